"""A pipeline alone: when its steps end at the earliest if every stage keeps its order and nothing else is in the way.

Steps wait for the step before them on their stage and for what they need from another, with a message in between.
Whatever state, ports and other pipelines add comes on top, and no delay makes a later step earlier: so these times
bound the simulator's from below, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mixfleet.schedule.greedy import B, F, I, W
from mixfleet.schedule.named import SCHEDULES

MOST_STEPS = 20_000
"""Of a pipeline; longer ones are not walked, since their bubble hardly matters."""


class Times(NamedTuple):
    """Seconds from the beginning of the step."""

    end_s: float
    last_s: tuple[tuple[float, float], ...]
    """Per chunk, start and end of what completes its gradients: its last backward, or weight half."""


class _Steps(NamedTuple):
    """The steps of all stages so that each comes behind those it waits for; steps count from 1, 0 is the beginning."""

    kinds: tuple[int, ...]
    """Where its duration stands."""
    before: tuple[int, ...]
    """The step before it on its stage."""
    needs: tuple[int, ...]
    hops: tuple[int, ...]
    """The message between what it needs and it; one more than there are for none."""
    last: tuple[int, ...]
    """Per chunk, the step that completes its gradients."""


@lru_cache(maxsize=512)
def _steps(schedule: str, home: tuple[int, ...], micro_batches: int) -> _Steps | None:
    orders = SCHEDULES[schedule].orders(home, micro_batches)
    if sum(map(len, orders)) > MOST_STEPS:
        return None
    chunks, n = len(home), micro_batches
    numbers: dict[tuple[bool, int, int], int] = {}
    """Of forwards (True) and of backwards or input halves."""
    kinds, before, needs, hops, last = [], [], [], [], [0] * chunks
    at, latest, moved = [0] * len(orders), [0] * len(orders), True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                op, k, m = order[at[d]]
                hop = chunks - 1
                need: int | None = 0
                if op == F and k:
                    need, hop = numbers.get((True, k - 1, m)), k - 1
                elif op == W:
                    need = numbers.get((False, k, m))
                elif op in (B, I):
                    need = numbers.get((True, k, m))
                    if need is not None and k + 1 < chunks:
                        need, hop = numbers.get((False, k + 1, m)), k
                if need is None:
                    break
                moved = True
                at[d] += 1
                kinds.append((("FBIW".index(op) * 2) + (m == n - 1)) * chunks + k)
                before.append(latest[d])
                needs.append(need)
                hops.append(hop)
                latest[d] = len(kinds)
                if op != W:
                    numbers[op == F, k, m] = latest[d]
                if op in (B, W):
                    last[k] = latest[d]
    if any(a < len(order) for a, order in zip(at, orders)):
        return None
    return _Steps(*map(tuple, (kinds, before, needs, hops, last)))


def walk(schedule: str, home: tuple[int, ...], micro_batches: int, seconds: Sequence[Sequence[Sequence[float]]],
         hops: Sequence[float]) -> Times | None:
    """The earliest times of a pipeline's steps under a named schedule; None if there are too many of them.

    `seconds[op][last][k]` of F, B, I and W (0 to 3) on chunk k, for all micro-batches but the last and for that;
    `hops[k]` between the chunks k and k + 1, either way.
    """
    steps = _steps(schedule, home, micro_batches)
    if steps is None:
        return None
    durations = [s for op in seconds for row in op for s in row]
    gaps = [*hops, 0.0]
    ends = [0.0]
    add = ends.append
    for kind, before, need, hop in zip(steps.kinds, steps.before, steps.needs, steps.hops):
        free, ready = ends[before], ends[need] + gaps[hop]
        add((free if free > ready else ready) + durations[kind])
    last = tuple((ends[i] - durations[steps.kinds[i - 1]], ends[i]) for i in steps.last)
    return Times(max(ends), last)
