"""Exact sharing of a batch among unequal replicas, for the two ways in which they wait for each other.

Where replicas meet only at the end of a step (DDP, ZeRO-1), any integer split will do and the slowest replica counts.
Where they exchange at every micro-batch (ZeRO-2, ZeRO-3, MiCS), all need the same number of micro-batches. These are
the two cost models of Poplar (arXiv 2408.12596).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf

Curve = Callable[[int], float]
"""Seconds that one replica needs for a number of samples (1 or more); never falls; `inf` where it is impossible."""


def largest(curve: Curve, limit_s: float, most: int) -> int:
    """The most samples, up to `most`, that `curve` does within `limit_s`; 0 if not even one."""
    lo, hi = 0, most
    while lo < hi:
        middle = (lo + hi + 1) // 2
        lo, hi = (middle, hi) if curve(middle) <= limit_s else (lo, middle - 1)
    return lo


def allocate(curves: Sequence[Curve], copies: Sequence[int], total: int) -> tuple[tuple[int, int], ...] | None:
    """Samples for `copies[i]` replicas of curve i, one or more each and `total` in all, with the slowest fastest.

    Returns (samples, how many of the replicas take one more) per curve; None if it is impossible. Takes a lower
    limit from bisection, then gives out the rest one by one to whoever ends first: both keep the optimum.
    """
    if sum(copies) > total or not curves:
        return None
    low, high = 0.0, max(curve(-(-total // sum(copies))) for curve in curves)
    for _ in range(12 if high < inf else 0):
        middle = (low + high) / 2
        fits = sum(n * max(1, largest(c, middle, total)) for c, n in zip(curves, copies)) <= total
        low, high = (middle, high) if fits else (low, middle)
    samples = [max(1, largest(c, low, total)) for c in curves]
    if any(curve(s) == inf for curve, s in zip(curves, samples)):
        return None
    extra = [0] * len(curves)
    left = total - sum(n * s for n, s in zip(copies, samples))
    queue = [(curve(samples[i] + 1), i) for i, curve in enumerate(curves)]
    heapify(queue)
    while left:
        seconds, i = heappop(queue)
        if seconds == inf:
            return None
        given = min(copies[i], left)
        left -= given
        if given < copies[i]:
            extra[i] = given
        else:
            samples[i] += 1
            heappush(queue, (curves[i](samples[i] + 1), i))
    return tuple(zip(samples, extra))


def allocate_in_step(curves: Sequence[Curve], copies: Sequence[int], total: int,
                     steps: int) -> tuple[tuple[int, ...], ...] | None:
    """As `allocate`, for replicas that all do exactly `steps` micro-batches of equal size, the last one maybe smaller.

    Returns the samples of every replica, per curve in descending order; None if no such split exists. Which sums can
    be reached within a time limit is a set of bits, so that the search for the limit is exact.
    """
    if sum(copies) * steps > total:
        return None
    allowed = [s for s in range(steps, total + 1) if micro_batches(s, -(-s // steps)) == steps]
    options = [[(seconds, s) for s in allowed if (seconds := curve(s)) < inf] for curve in curves]
    limits = sorted({seconds for rows in options for seconds, _ in rows})
    lo, hi, found = 0, len(limits) - 1, None
    while lo <= hi:
        middle = (lo + hi) // 2
        split = _reach(options, copies, total, limits[middle])
        if split:
            found, hi = split, middle - 1
        else:
            lo = middle + 1
    return found


def _reach(options: Sequence[Sequence[tuple[float, int]]], copies: Sequence[int], total: int,
           limit_s: float) -> tuple[tuple[int, ...], ...] | None:
    """A split of `total` in which every replica takes an option within the limit."""
    mask = (1 << (total + 1)) - 1
    reached = [1]
    choices: list[tuple[int, list[int]]] = []
    for i, rows in enumerate(options):
        sizes = [s for seconds, s in rows if seconds <= limit_s]
        for _ in range(copies[i]):
            sums = 0
            for s in sizes:
                sums |= reached[-1] << s
            reached.append(sums & mask)
            choices.append((i, sizes))
    if not reached[-1] >> total & 1:
        return None
    left = total
    taken: list[list[int]] = [[] for _ in copies]
    for (i, sizes), before in zip(reversed(choices), reversed(reached[:-1])):
        wanted = left / max(1, sum(copies[:i + 1]) - len(taken[i]))
        s = min((s for s in sizes if s <= left and before >> (left - s) & 1), key=lambda s: (abs(s - wanted), s))
        taken[i].append(s)
        left -= s
    return tuple(tuple(sorted(row, reverse=True)) for row in taken)


def micro_batches(samples: int, micro_batch: int) -> int:
    """How many micro-batches of `micro_batch` samples, the last one maybe smaller."""
    return -(-samples // micro_batch)
