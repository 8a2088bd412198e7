"""Graphs of millions of tasks of fixed duration, as arrays and in compiled code.

Without shared ports every task starts when the last of those it waits for has ended, so one walk in the order of
dependencies gives all times; `engine.run` gives the same to the nanosecond. Uses numba (extra `fast`) where it is
installed; plain Python otherwise, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mixfleet.schedule.greedy import Orders, Work
from mixfleet.units import NS_PER_S

Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


_CODE = np.zeros(128, np.int64)
_CODE[np.frombuffer(b"FBIW", np.uint8)] = range(4)


class Arrays(NamedTuple):
    """Tasks 0 to n - 1, and who waits for whom: `then[first[t]:first[t + 1]]` may start when t has ended."""

    duration_ns: Ints
    first: Ints
    then: Ints

    @staticmethod
    def of(duration_ns: Ints, before: Ints, after: Ints) -> Arrays:
        """From pairs: `after[i]` waits for `before[i]`."""
        count = np.bincount(before, minlength=len(duration_ns))
        first = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
        return Arrays(duration_ns, first, after[np.argsort(before, kind="stable")])


def pipeline(work: Work, orders: Orders) -> Arrays:
    """The tasks of a pipeline's orders: the steps, stage by stage, and a message for every hop that takes time."""
    chunks, m = len(work.home), work.micro_batches
    ops, places, numbers = zip(*(step for order in orders for step in order), strict=True)
    op = _CODE[np.frombuffer("".join(ops).encode(), np.uint8)]
    k, mb = np.array(places, np.int64), np.array(numbers, np.int64)
    kind = np.where(op == 2, 1, op)  # a whole backward and an input half stand in for each other
    weight = work.weight or (0.0,) * chunks
    whole = tuple(map(sum, zip(work.backward, weight)))
    seconds = np.array([work.forward, whole, work.backward, weight])
    at = np.full((4, chunks, m), -1, np.int64)
    at[kind, k, mb] = np.arange(len(op))
    duration = np.rint(seconds[op, k] * NS_PER_S).astype(np.int64)
    edges = [(np.arange(len(op) - 1), np.arange(1, len(op)))]
    ends = np.cumsum([len(order) for order in orders])[:-1]
    edges[0] = tuple(np.delete(side, ends - 1) for side in edges[0])  # type: ignore[assignment]
    hops, total = [], len(op)
    for c in range(chunks - 1):
        if work.ends(c):
            continue
        own = at[0, c] >= 0  # where pipelines share the devices, each chain has some of the micro-batches
        for row, (a, b) in ((0, (c, c + 1)), (1, (c + 1, c))):
            made, used = at[row, a][own], at[row, b][own]
            if work.home[c] == work.home[c + 1]:
                edges.append((made, used))
                continue
            message = np.arange(total, total + len(made))
            total += len(made)
            hops.append(np.full(len(made), round(work.hop(c) * NS_PER_S), np.int64))
            edges += [(made, message), (message, used)]
    before, after = (np.concatenate(side) for side in zip(*edges, strict=True))
    return Arrays.of(np.concatenate((duration, *hops)), before, after)


def run(graph: Arrays) -> tuple[Ints, Ints]:
    """Start and end of every task in ns; tasks that wait for each other in a circle stay at -1."""
    waits = np.bincount(graph.then, minlength=len(graph.duration_ns)).astype(np.int64)
    start, end = np.zeros(len(waits), np.int64), np.full(len(waits), -1, np.int64)
    _walker()(graph.duration_ns, graph.first, graph.then, waits, start, end)
    start[end < 0] = -1
    return start, end


def _walk(duration: Sequence[int], first: Sequence[int], then: Sequence[int], waits: Any, start: Any,
          end: Any) -> None:
    stack = np.empty(len(waits), np.int64)
    top = 0
    for task in range(len(waits)):
        if waits[task] == 0:
            stack[top] = task
            top += 1
    while top:
        top -= 1
        task = stack[top]
        done = start[task] + duration[task]
        end[task] = done
        for i in range(first[task], first[task + 1]):
            other = then[i]
            if done > start[other]:
                start[other] = done
            waits[other] -= 1
            if waits[other] == 0:
                stack[top] = other
                top += 1


_made: list[Callable[..., None]] = []


def _walker() -> Callable[..., None]:
    """The walk, compiled once and kept on disk, or as it is without numba."""
    if not _made:
        try:
            from numba import njit
        except ImportError:
            _made.append(_walk)
        else:
            _made.append(njit(cache=True)(_walk))
    return _made[0]
