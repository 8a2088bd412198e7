"""RoundPipe's rounds: stages that belong to no device, and go to the next one in turn (Luo et al., 2026).

All weights lie in host memory. A *leg* is a range of blocks that one device does for all micro-batches before the next
leg: first the forward legs, which keep nothing but what enters a backward leg, then the one that goes forward and back
at once, then the backward legs, which go forward again before. So forward and backward are cut apart from each other,
and leg j goes to device j modulo the number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mixfleet.schedule.greedy import B, F, Step

AHEAD = "C"
"""A forward that keeps nothing: only a forward leg has it."""
LOOSER = 1.1
"""How far above the slowest block a leg may be, at most, when legs are packed."""


class Leg(NamedTuple):
    """Blocks `lo` to `hi - 1` on a device (or stage of a plan) for all micro-batches."""

    lo: int
    hi: int
    device: int
    back: bool
    """Forward and backward; else forward alone."""


class Cut(NamedTuple):
    """Where forward and backward are cut: the forward legs end where the last of `backward` begins."""

    forward: tuple[int, ...]
    """Cut points 0 = c0 < c1 < ... of the forward legs; (0,) if there are none."""
    backward: tuple[int, ...]
    """Those of the backward legs, 0 to the number of blocks."""
    cap: float
    """The longest leg."""

    def legs(self, devices: int) -> tuple[Leg, ...]:
        """In turn."""
        ranges = [(a, b, False) for a, b in zip(self.forward, self.forward[1:])]
        ranges += [(a, b, True) for a, b in reversed(list(zip(self.backward, self.backward[1:])))]
        return tuple(Leg(a, b, j % devices, back) for j, (a, b, back) in enumerate(ranges))

    def cost(self, devices: int) -> float:
        """What a micro-batch takes of every device: legs, or devices if there are more, times the longest leg."""
        return max(len(self.forward) + len(self.backward) - 2, devices) * self.cap


def split(forward: Sequence[float], backward: Sequence[float], devices: int, *, weights: Sequence[float] = (),
          budget: float = float("inf"), least: int = 1) -> Cut | None:
    """The cut that costs least; None if a block alone is above the budget, or no cut has `least` backward legs.

    `forward` are seconds per block of a forward that keeps nothing, `backward` of a forward and a backward behind each
    other. `weights` are bytes per block; no leg may have more than `budget`, half of what a device can give to weights,
    since the next leg's are loaded meanwhile. Every sum of neighbouring blocks between the slowest block and 1.1 times
    it is tried as a cap, legs are packed full under it, and the least cost wins; of equals the one with fewer legs.
    """
    sizes = list(weights) or [0.0] * len(forward)
    if max(sizes) > budget:
        return None
    slowest = max(backward)
    caps = {s for times in (forward, backward) for s in _sums(times, slowest * LOOSER) if s >= slowest}
    found = [_packed(forward, backward, sizes, budget, cap) for cap in sorted(caps)]
    return min((cut for cut in found if len(cut.backward) > least),
               key=lambda cut: (cut.cost(devices), len(cut.forward) + len(cut.backward)), default=None)


def _sums(times: Sequence[float], most: float) -> list[float]:
    ends = [0.0, *accumulate(times)]
    return [ends[b] - ends[a] for a in range(len(times)) for b in range(a + 1, len(ends)) if ends[b] - ends[a] <= most]


def _packed(forward: Sequence[float], backward: Sequence[float], sizes: Sequence[float], budget: float, cap: float
            ) -> Cut:
    """Backward legs from the last block down, then forward legs from the first block up to the last backward leg."""
    slack = cap * (1 + 1e-12)
    lows, longest = [len(backward)], 0.0
    while lows[-1]:
        lo, time, held = lows[-1], 0.0, 0.0
        while lo and time + backward[lo - 1] <= slack and held + sizes[lo - 1] <= budget:
            lo -= 1
            time, held = time + backward[lo], held + sizes[lo]
        lows.append(lo)
        longest = max(longest, time)
    last = lows[1]
    cuts = [0]
    while cuts[-1] < last:
        hi, time, held = cuts[-1], 0.0, 0.0
        while hi < last and time + forward[hi] <= slack and held + sizes[hi] <= budget:
            time, held = time + forward[hi], held + sizes[hi]
            hi += 1
        cuts.append(hi)
        longest = max(longest, time)
    return Cut(tuple(cuts), tuple(reversed(lows)), longest)


def played(legs: Sequence[Leg], forward: Sequence[float], backward: Sequence[float], micro_batches: int
           ) -> dict[Step, tuple[float, float]]:
    """Start and end of every step, as (op, leg, micro-batch), where a device begins what comes next as soon as its
    inputs are there and transfers are free.

    A backward leg needs what enters it from the forward legs, and for going back the gradient of the leg above.
    `forward` and `backward` as in `split`."""
    free: dict[int, float] = {}
    entered: dict[tuple[int, int], float] = {}  # when a micro-batch is there at the input of a block
    ends = [0.0] * micro_batches
    done: dict[Step, tuple[float, float]] = {}
    for k, leg in enumerate(legs):
        for m in range(micro_batches):
            now = start = max(entered.get((leg.lo, m), 0.0), free.get(leg.device, 0.0))
            for b in range(leg.lo, leg.hi):
                now += forward[b]
                if not leg.back:
                    entered[b + 1, m] = now
            done[F if leg.back else AHEAD, k, m] = start, now
            if leg.back:
                start = max(now, ends[m])
                now = ends[m] = start + sum(backward[leg.lo:leg.hi]) - sum(forward[leg.lo:leg.hi])
                done[B, k, m] = start, now
            free[leg.device] = now
    return done


def makespan(legs: Sequence[Leg], forward: Sequence[float], backward: Sequence[float], micro_batches: int) -> float:
    """Seconds until all is done."""
    return max(end for _, end in played(legs, forward, backward, micro_batches).values())
