"""Compute and state shared apart: who takes how many samples, and who holds how much of the sharded state.

Cephalo's problem (arXiv 2411.01075), solved exactly. Replicas meet at the end of the step only (layered accumulation),
so the slowest counts; together they must have room for the state beside what their samples need. For a time limit the
most room that any split of the batch leaves is a sum of independent choices, found by dynamic programming over the
samples; the least limit that leaves enough is found by bisection over the times that occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mixfleet.cost.network import Floats
from mixfleet.plan import Recompute


class Option(NamedTuple):
    """One way for a replica to do its part."""

    samples: int
    seconds: float
    room: float
    """What it leaves for state, in the unit of the state. Negative: it does not fit."""
    micro_batch: int = 1
    recompute: Recompute = "none"


class Shared(NamedTuple):
    """The option of every replica, curve by curve, and the part of the state that each holds."""

    chosen: tuple[tuple[Option, ...], ...]
    parts: tuple[tuple[float, ...], ...]


def share(options: Sequence[Sequence[Option]], copies: Sequence[int], total: int, state: float) -> Shared | None:
    """An option for each of `copies[i]` replicas of kind i, `total` samples in all and room for the state among them,
    with the slowest fastest; of those, one that leaves most room. The state falls to replicas in proportion to their
    room. None if it is impossible."""
    usable = [[o for o in row if o.room >= 0 and o.samples <= total] for row in options]
    limits = sorted({o.seconds for row in usable for o in row})
    lo, hi, found = 0, len(limits) - 1, None
    while lo <= hi:
        middle = (lo + hi) // 2
        split = _most_room(usable, copies, total, limits[middle])
        if split and sum(o.room for row in split for o in row) >= state:
            found, hi = split, middle - 1
        else:
            lo = middle + 1
    if found is None:
        return None
    room = sum(o.room for row in found for o in row) or 1.0
    return Shared(found, tuple(tuple(o.room / room for o in row) for row in found))


def _most_room(options: Sequence[Sequence[Option]], copies: Sequence[int], total: int,
               limit_s: float) -> tuple[tuple[Option, ...], ...] | None:
    """Options within the limit that add up to `total` samples and leave the most room together."""
    best: Floats = np.full(total + 1, -np.inf)
    best[0] = 0.0
    steps: list[tuple[int, list[Option], Floats]] = []
    for i, row in enumerate(options):
        roomiest: dict[int, Option] = {}
        for o in row:
            if o.seconds <= limit_s and (o.samples not in roomiest or o.room > roomiest[o.samples].room):
                roomiest[o.samples] = o
        for _ in range(copies[i]):
            steps.append((i, list(roomiest.values()), best))
            after = np.full(total + 1, -np.inf)
            for o in roomiest.values():
                reach = after[o.samples:]
                np.maximum(reach, best[:total + 1 - o.samples] + o.room, out=reach)
            best = after
    if best[total] == -np.inf:
        return None
    left = total
    taken: list[list[Option]] = [[] for _ in copies]
    for i, row, before in reversed(steps):
        o = max((o for o in row if o.samples <= left),
                key=lambda o, left=left, before=before: (before[left - o.samples] + o.room, -o.samples))  # type: ignore[misc]
        taken[i].append(o)
        left -= o.samples
    return tuple(tuple(sorted(row, key=lambda o: (-o.samples, o.seconds))) for row in taken)
