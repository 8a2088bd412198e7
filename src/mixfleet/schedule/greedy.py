"""List scheduling of pipelines: orders of forwards, backwards and weight gradients found by playing them in time.

A *chunk* is a block range of the chain; device `home[k]` computes chunk k. Forward of a chunk needs that of the one
before, backward that of the one behind; a split backward leaves the weight gradient (W) for later. Whenever a device
is free it takes the best of what is ready. With unit times this gives the known zero-bubble and wave schedules, with
measured times a schedule for uneven stages.
"""

from __future__ import annotations

import re
from collections import Counter
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from mixfleet.errors import InputError

F, B, I, W = "F", "B", "I", "W"
"""Forward; whole backward; the input half and the weight half of a split backward."""

Step = tuple[str, int, int]
"""(op, chunk, micro-batch)"""
Orders = tuple[tuple[Step, ...], ...]
"""What each device does, in order."""


class Work(NamedTuple):
    """A pipeline to be scheduled; times in any one unit. `backward` is the whole one, or its input half if split."""

    home: tuple[int, ...]
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] = ()
    """Seconds of W per chunk; empty if backward is not split. A whole backward takes both."""
    comm: float | tuple[float, ...] = 0.0
    """Between chunk k and k + 1, both ways; nothing if they share a device."""
    starts: tuple[int, ...] = (0,)
    """Where a chain begins: several where pipelines share the devices. Micro-batches are numbered through them all."""

    @property
    def devices(self) -> int:
        return max(self.home) + 1

    def hop(self, k: int) -> float:
        """Seconds from chunk k to chunk k + 1."""
        if self.home[k] == self.home[k + 1]:
            return 0.0
        return self.comm[k] if isinstance(self.comm, tuple) else self.comm

    def seconds(self, step: Step) -> float:
        op, k, _ = step
        if op == B and self.weight:
            return self.backward[k] + self.weight[k]
        return {F: self.forward, B: self.backward, I: self.backward, W: self.weight}[op][k]

    def ends(self, k: int) -> bool:
        """Whether chunk k is the last of its chain."""
        return k + 1 == len(self.home) or k + 1 in self.starts

    @property
    def back(self) -> str:
        return I if self.weight else B


class Rule(NamedTuple):
    """What a free device prefers.

    `limit` is the most micro-batches of chunks that may be in flight on each device (from forward to the end of
    backward, W included). Ready backwards come first, then forwards; `deep` prefers chunks further down the chain,
    for `turns` backwards that are ready give way to a forward after each other. W fills gaps; with `room` it
    comes first where the limit keeps a forward waiting. `old` takes the oldest micro-batch among forwards and among
    backwards, whatever its chunk.
    """

    limit: tuple[int, ...]
    deep: bool = True
    turns: bool = False
    room: bool = True
    old: bool = False


def makespan(work: Work, orders: Orders) -> float:
    """Seconds of one step when every device keeps its order; infinite if the orders wait for each other.

    It is where `timeline` ends, without a record of every step.
    """
    last, count = len(work.home) - 1, work.micro_batches
    hops = [0.0 if work.ends(k) else work.hop(k) for k in range(last + 1)]
    starts, ends = [k in work.starts for k in range(last + 1)], [work.ends(k) for k in range(last + 1)]
    seconds = {op: [work.seconds((op, k, 0)) for k in range(last + 1)]
               for op in ((F, B, I, W) if work.weight else (F, B))}
    # When forwards end, and below backwards, or their input halves.
    there: list[list[float | None]] = [[None] * count for _ in work.home]
    back_there: list[list[float | None]] = [[None] * count for _ in work.home]
    at, free = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            i, now = at[d], free[d]
            while i < len(order):
                op, k, m = order[i]
                ready: float | None
                if op == F:
                    ready = 0.0 if starts[k] else there[k - 1][m]
                    hop = 0.0 if starts[k] else hops[k - 1]
                elif op == W:
                    ready, hop = back_there[k][m], 0.0
                else:
                    ready, hop = there[k][m], 0.0
                    if ready is not None and not ends[k]:
                        behind = back_there[k + 1][m]
                        ready = None if behind is None else max(ready, behind + hops[k])
                if ready is None:
                    break
                now = max(now, ready + hop) + seconds[op][k]
                if op == F:
                    there[k][m] = now
                elif op != W:
                    back_there[k][m] = now
                i += 1
            moved |= i > at[d]
            at[d], free[d] = i, now
    return max(free, default=0.0) if at == [len(order) for order in orders] else float("inf")


def timeline(work: Work, orders: Orders) -> dict[Step, tuple[float, float]]:
    """Start and end of every step that can run when every device keeps its order."""
    done: dict[Step, tuple[float, float]] = {}
    at = [0] * len(orders)
    free = [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while at[d] < len(order):
                ready = _ready(work, order[at[d]], done)
                if ready is None:
                    break
                start = max(ready, free[d])
                free[d] = start + work.seconds(order[at[d]])
                done[order[at[d]]] = (start, free[d])
                at[d] += 1
                moved = True
    return done


def _ready(work: Work, step: Step, done: dict[Step, tuple[float, float]]) -> float | None:
    """When the inputs of a step are there; None if they are not yet made."""
    op, k, m = step
    if op == F:
        needs = [] if k in work.starts else [((F, k - 1, m), work.hop(k - 1))]
    elif op == W:
        needs = [((I, k, m), 0.0)]
    else:
        behind = (B, k + 1, m) if (B, k + 1, m) in done else (I, k + 1, m)
        needs = [((F, k, m), 0.0)] + ([] if work.ends(k) else [(behind, work.hop(k))])
    if any(need not in done for need, _ in needs):
        return None
    return max((done[need][1] + hop for need, hop in needs), default=0.0)


def greedy(work: Work, rule: Rule) -> Orders | None:
    """Orders by list scheduling under a rule; None if its limits leave everything waiting."""
    chunks, last, count = range(len(work.home)), len(work.home) - 1, work.micro_batches
    mine = [[k for k in chunks if work.home[k] == d] for d in range(work.devices)]
    hops = [0.0 if work.ends(k) else work.hop(k) for k in chunks]
    starts, ends = [k in work.starts for k in chunks], [work.ends(k) for k in chunks]
    seconds = {op: [work.seconds((op, k, 0)) for k in chunks] for op in (F, work.back, *([W] if work.weight else []))}
    there: list[list[float | None]] = [[None] * count for _ in chunks]
    """When forwards end, and below backwards, or their input halves."""
    back_there: list[list[float | None]] = [[None] * count for _ in chunks]
    orders: list[list[Step]] = [[] for _ in mine]
    next_f, next_b = [0] * len(work.home), [0] * len(work.home)
    pending: list[list[Step]] = [[] for _ in mine]
    flying = [0] * len(mine)
    free = [0.0] * len(mine)
    queue = [(0.0, d) for d in range(len(mine))]
    total = len(work.home) * count * (3 if work.weight else 2)
    made = 0
    downward = [sorted(row, reverse=True) for row in mine]
    onward = downward if rule.deep else mine

    def forward_ready(k: int, m: int) -> float | None:
        if starts[k]:
            return 0.0
        end = there[k - 1][m]
        return None if end is None else end + hops[k - 1]

    def backward_ready(k: int, m: int) -> float | None:
        own = there[k][m]
        if own is None or ends[k]:
            return own
        end = back_there[k + 1][m]
        return None if end is None else max(own, end + hops[k])

    def choose(d: int, now: float) -> tuple[Step | None, float]:
        """The step to start now, or when the next one becomes ready."""
        later = float("inf")
        if rule.room and pending[d] and flying[d] >= rule.limit[d] and next_f[mine[d][0]] < count:
            return pending[d][0], now
        back: Step | None = None
        for k in sorted(downward[d], key=next_b.__getitem__) if rule.old else downward[d]:
            if next_b[k] < count:
                ready = backward_ready(k, next_b[k])
                if ready is not None and ready <= now:
                    back = (work.back, k, next_b[k])
                    break
                later = min(later, ready if ready is not None else later)
        if back and not (rule.turns and orders[d] and orders[d][-1][0] != F):
            return back, now
        for k in sorted(onward[d], key=next_f.__getitem__) if rule.old else onward[d]:
            # A micro-batch that is on the device already may always go on, or chunks would block each other.
            begun = k != mine[d][0]
            if next_f[k] < count and (begun or flying[d] < rule.limit[d]):
                ready = forward_ready(k, next_f[k])
                if ready is not None and ready <= now:
                    return (F, k, next_f[k]), now
                later = min(later, ready if ready is not None else later)
        if back:
            return back, now
        return (pending[d][0], now) if pending[d] else (None, later)

    while queue:
        now, d = heappop(queue)
        if now < free[d]:
            continue
        step, later = choose(d, now)
        if step is None:
            if now < later < float("inf"):
                heappush(queue, (later, d))
            continue
        op, k, m = step
        free[d] = now + seconds[op][k]
        orders[d].append(step)
        made += 1
        if op == F:
            there[k][m] = free[d]
            next_f[k] += 1
            flying[d] += 1
        elif op == W:
            pending[d].pop(0)
            flying[d] -= 1
        else:
            back_there[k][m] = free[d]
            next_b[k] += 1
            if op == I:
                pending[d].append((W, k, m))
            else:
                flying[d] -= 1
        heappush(queue, (free[d], d))
        other = work.home[k + 1] if op == F and k < last else work.home[k - 1] if op not in (F, W) and k else d
        if other != d:
            hop = hops[k if op == F else k - 1]
            heappush(queue, (max(free[d] + hop, free[other]), other))
    return tuple(map(tuple, orders)) if made == total else None


_STEP = re.compile(r"([FBIW])(\d+)\.(\d+)")


def parse_steps(text: str) -> tuple[Step, ...]:
    """`F0.0 F0.1 B0.0 ...`: op, chunk, micro-batch. Raises InputError."""
    steps = []
    for word in text.split():
        match = _STEP.fullmatch(word)
        if not match:
            raise InputError(f"{word!r} is not a step; write for example F0.3: forward of chunk 0, micro-batch 3")
        steps.append((match[1], int(match[2]), int(match[3])))
    return tuple(steps)


def show_steps(steps: tuple[Step, ...]) -> str:
    """The inverse of `parse_steps`."""
    return " ".join(f"{op}{k}.{m}" for op, k, m in steps)


def stuck(home: tuple[int, ...], micro_batches: int, orders: Orders, *, starts: tuple[int, ...] = (0,),
          counts: tuple[int, ...] = ()) -> str | None:
    """What is missing, doubled, out of place or waits for ever in orders made by hand; None if they are sound.

    Where several chains share the devices, `starts` are their first chunks and `counts` their micro-batches.
    """
    firsts = [0, *accumulate(counts or (micro_batches,))]
    owned = {k: range(firsts[way], firsts[way + 1]) for k in range(len(home))
             for way in (sum(k >= start for start in starts) - 1,)}
    for d, order in enumerate(orders):
        found = Counter(order)
        for step in order:
            if found[step] > 1:
                return f"stage {d} does {show_steps((step,))} twice"
            if step[1] >= len(home) or home[step[1]] != d or step[2] not in owned[step[1]]:
                return f"stage {d} does {show_steps((step,))}, which is not its own"
        for k in (k for k, h in enumerate(home) if h == d):
            for m in owned[k]:
                if (F, k, m) not in found:
                    return f"stage {d} lacks {show_steps(((F, k, m),))}"
                whole, halves = (B, k, m) in found, ((I, k, m) in found, (W, k, m) in found)
                if whole == any(halves) or any(halves) != all(halves):
                    return f"stage {d} must do either {show_steps(((B, k, m),))} or both of I and W"
    ones = (1.0,) * len(home)
    done = timeline(Work(home, micro_batches, ones, ones, ones, starts=starts), orders)
    for d, order in enumerate(orders):
        for step in order:
            if step not in done:
                return f"the orders wait for each other: stage {d} never gets to {show_steps((step,))}"
    return None
