"""How fast the cores are just now. A virtual machine's cores change their speed with their neighbours, for a minute or
for a second; what was measured at one time predicts another only if both are known.

A process per core does a little fixed work many times a second, outside of all quotas, and says what CPU time it took
in the median between any two moments.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

PAUSE_S = 0.012
"""Between two pieces of work: they take some 6 % of a core."""
_KEPT_S = 600.0
_ANSWER_S = 60.0


class Pace(NamedTuple):
    """Of one core between two moments."""

    seconds: float
    """CPU time of a piece of work: geometric mean over its kinds, median of each."""
    cpu_s: float
    """What the measuring itself took."""


class Speedometer:
    """One process per core, from `with` to its end."""

    def __init__(self, cores: Collection[int]) -> None:
        self.cores = tuple(sorted(cores))

    def __enter__(self) -> Speedometer:
        context = multiprocessing.get_context("spawn")
        self._pipes = {}
        for core in self.cores:
            here, there = context.Pipe()
            context.Process(target=_watch, daemon=True, args=(core, there)).start()
            there.close()
            self._pipes[core] = here
        for pipe in self._pipes.values():
            pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            pipe.close()

    def between(self, start_s: float, end_s: float) -> dict[int, Pace]:
        """By core, between two values of `perf_counter` of at most ten minutes ago; a window in which no work was done
        is made longer to both sides."""
        for pipe in self._pipes.values():
            pipe.send((start_s, end_s))
        found = {}
        for core, pipe in self._pipes.items():
            if not pipe.poll(_ANSWER_S):
                raise RuntimeError(f"the speedometer of core {core} does not answer")
            found[core] = Pace(*pipe.recv())
        return found


def _watch(core: int, pipe: Any) -> None:
    os.sched_setaffinity(0, {core})
    kinds = _kinds()
    for work in kinds:
        for _ in range(5):
            work()
    taken: list[deque[tuple[float, float]]] = [deque() for _ in kinds]
    pipe.send("ready")
    turn = 0
    while True:
        if pipe.poll(PAUSE_S):
            try:
                pipe.send(pace(taken, *pipe.recv()))
            except (EOFError, OSError):
                return
        start = thread_time()
        kinds[turn]()
        mine = taken[turn]
        mine.append((perf_counter(), thread_time() - start))
        if mine[0][0] < mine[-1][0] - _KEPT_S:
            mine.popleft()
        turn = (turn + 1) % len(kinds)


def _kinds() -> list[Callable[[], object]]:
    """What training does: small products in the nearest cache, products with weights from a farther one, Python."""
    import torch

    torch.set_num_threads(1)
    near, x, weight = torch.ones(48, 48), torch.ones(256, 128), torch.ones(128, 512)
    near_out, out = torch.empty(48, 48), torch.empty(256, 512)

    def small() -> None:
        for _ in range(60):
            torch.mm(near, near, out=near_out)

    def layer() -> None:
        for _ in range(2):
            torch.relu_(torch.mm(x, weight, out=out))

    def python() -> None:
        sum(i for i in range(10_000))

    return [small, layer, python]


def pace(taken: Sequence[Collection[tuple[float, float]]], start_s: float, end_s: float) -> tuple[float, float]:
    """`Pace` of what was (done at, taken) of each kind."""
    logs, cpu_s = [], 0.0
    for mine in taken:
        inside, wider = [s for at, s in mine if start_s <= at <= end_s], 0.1
        cpu_s += sum(inside)
        while not inside and wider < 2 * _KEPT_S:
            inside, wider = [s for at, s in mine if start_s - wider <= at <= end_s + wider], 2 * wider
        logs.append(math.log(median(inside)))
    return math.exp(fmean(logs)), cpu_s


def ratios(now: Mapping[int, Pace], then: Mapping[int, Pace], cores: Sequence[Sequence[int]],
           alike: Sequence[int]) -> list[float]:
    """Per rank, how much longer computing takes `now` than its profile of `then` says.

    `cores` are those of each rank (none: all); ranks with the same number in `alike` have one profile, the mean of what
    was measured on all of them, whichever core each was on.
    """
    def mean(paces: Mapping[int, Pace], rank: int) -> float:
        return fmean(paces[core].seconds for core in cores[rank] or paces)

    usual = {kind: fmean(mean(then, r) for r, k in enumerate(alike) if k == kind) for kind in set(alike)}
    return [mean(now, rank) / usual[kind] for rank, kind in enumerate(alike)]
