"""Small pipelines scheduled to the proven optimum: branch and bound over active schedules, and lower bounds of any.

Micro-batches are alike, so each kind of step of a chunk may take them in turn (relabelling them never delays one).
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

from mixfleet.schedule.greedy import F, Orders, Step, W, Work

EPSILON = 1e-9


class Answer(NamedTuple):
    """Orders better than what was known (None if there are none), and what no orders can beat."""

    orders: Orders | None
    bound: float
    complete: bool


def bound(work: Work, limit: tuple[int, ...]) -> float:
    """No orders with at most `limit` chunks of micro-batches in flight on each device take less.

    Per device: it starts when the first forward can have reached it, does all its work, and what leaves it last still
    goes down the chain. Before the first backward can have come back it does `limit` forwards at the most.
    """
    down = [0.0]  # the first forward at every chunk, then the first backward
    for k in range(1, len(work.home)):
        down.append(down[-1] + work.forward[k - 1] + work.hop(k - 1))
    up = [down[-1] + work.forward[-1]]
    for k in reversed(range(len(work.home) - 1)):
        up.append(up[-1] + work.backward[k + 1] + work.hop(k))
    up.reverse()
    weight = work.weight or (0.0,) * len(work.home)
    m = work.micro_batches
    best = up[0] + work.backward[0] + weight[0]
    for d in range(work.devices):
        mine = [k for k, h in enumerate(work.home) if h == d]
        first, last = mine[0], mine[-1]
        forward, back, late = (m * sum(table[k] for k in mine) for table in (work.forward, work.backward, weight))
        tail = sum(work.backward[k] + work.hop(k) for k in range(first))
        after = max(tail + weight[0], late) if weight[0] else max(tail, late)
        ahead = min(limit[d], m) * forward / m if len(mine) == 1 else forward
        begun = max(down[first] + ahead, up[last])
        best = max(best, down[first] + forward + back + after, begun + forward - ahead + back + after)
    return best


def solve(work: Work, limit: tuple[int, ...], known: float, nodes: int) -> Answer:
    """Orders that take less than `known` seconds, the best there are; gives up after `nodes` states.

    With several chunks on a device and limits that bind, waiting may be better than anything that could start, which
    is not tried: the answer is then complete only if it reaches the bound.
    """
    least = bound(work, limit)
    if known <= least * (1 + EPSILON):
        return Answer(None, known, True)
    tree = _Tree(work, limit, known, nodes)
    tree.grow()
    best = tree.best
    binds = any(limit[d] < sum(h == d for h in work.home) * work.micro_batches for d in range(work.devices))
    single = len(set(work.home)) == len(work.home)
    complete = tree.left >= 0 and (single or not binds)
    reached = best <= least * (1 + EPSILON)
    return Answer(tree.orders, best if complete or reached else least, complete or reached)


class _Tree:
    """Depth first; the same counts with no time better than seen before are not expanded again."""

    def __init__(self, work: Work, limit: tuple[int, ...], known: float, nodes: int) -> None:
        self.work, self.limit, self.best, self.left = work, limit, known, nodes
        self.orders: Orders | None = None
        chunks = len(work.home)
        self.hops = [work.hop(k) for k in range(chunks - 1)]
        self.weight = work.weight or (0.0,) * chunks
        self.split = bool(work.weight)
        self.mine = [[k for k, h in enumerate(work.home) if h == d] for d in range(work.devices)]
        self.tail = [sum(work.backward[j] + self.hops[j] for j in range(k)) for k in range(chunks)]
        self.f: list[list[float]] = [[] for _ in range(chunks)]  # ends of forwards, backwards, W
        self.b: list[list[float]] = [[] for _ in range(chunks)]
        self.w = [0] * chunks
        self.free = [0.0] * work.devices
        self.flying = [0] * work.devices
        self.steps: list[Step] = []
        self.seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def grow(self) -> None:
        self.left -= 1
        if self.left < 0:
            return
        choices = self._choices()
        if not choices:
            end = max(self.free)
            if len(self.steps) == len(self.f) * self.work.micro_batches * (3 if self.split else 2) and end < self.best:
                self.best = end
                self.orders = tuple(tuple(s for s in self.steps if self.work.home[s[1]] == d)
                                    for d in range(self.work.devices))
            return
        # Giffler and Thompson: whoever can end first; some step of that device starts before that end.
        ends = min(start + self.work.seconds(step) for start, step in choices)
        device = next(self.work.home[s[1]] for start, s in choices if start + self.work.seconds(s) == ends)
        ordered: list[tuple[float, int, Step, float]] = []
        for start, step in choices:
            if self.work.home[step[1]] == device and (start < ends or start + self.work.seconds(step) == ends):
                undo = self._do(step, start)
                low = self._bound()
                if low < self.best * (1 - EPSILON) and self._new():
                    insort(ordered, (low, "BIFW".index(step[0]), step, start))
                self._undo(step, undo)
        for low, _, step, start in ordered:
            if low < self.best * (1 - EPSILON):
                undo = self._do(step, start)
                self.grow()
                self._undo(step, undo)

    def _choices(self) -> list[tuple[float, Step]]:
        """Steps whose inputs are made and for which there is room, with their earliest starts."""
        found: list[tuple[float, Step]] = []
        m, last, back = self.work.micro_batches, len(self.f) - 1, self.work.back
        for k, d in enumerate(self.work.home):
            free, nf, nb = self.free[d], len(self.f[k]), len(self.b[k])
            if nf < m and self.flying[d] < self.limit[d] and (k == 0 or nf < len(self.f[k - 1])):
                found.append((free if k == 0 else max(free, self.f[k - 1][nf] + self.hops[k - 1]), (F, k, nf)))
            if nb < nf and (k == last or nb < len(self.b[k + 1])):
                found.append((free if k == last else max(free, self.b[k + 1][nb] + self.hops[k]), (back, k, nb)))
            if self.split and self.w[k] < nb:
                found.append((free, (W, k, self.w[k])))
        return found

    def _do(self, step: Step, start: float) -> float:
        op, k, _ = step
        d = self.work.home[k]
        before = self.free[d]
        self.free[d] = end = start + self.work.seconds(step)
        self.steps.append(step)
        if op == F:
            self.f[k].append(end)
            self.flying[d] += 1
        elif op == W:
            self.w[k] += 1
            self.flying[d] -= 1
        else:
            self.b[k].append(end)
            self.flying[d] -= not self.split
        return before

    def _undo(self, step: Step, before: float) -> None:
        op, k, _ = step
        d = self.work.home[k]
        self.free[d] = before
        self.steps.pop()
        if op == F:
            self.f[k].pop()
            self.flying[d] -= 1
        elif op == W:
            self.w[k] -= 1
            self.flying[d] += 1
        else:
            self.b[k].pop()
            self.flying[d] += not self.split

    def _new(self) -> bool:
        """Whether no state with the same counts and no later times has been here."""
        key = (*map(len, self.f), *map(len, self.b), *self.w)
        last = len(self.f) - 1
        times = (*self.free, *(t for k in range(last) for t in self.f[k][len(self.f[k + 1]):]),
                 *(t for k in range(1, last + 1) for t in self.b[k][len(self.b[k - 1]):]))
        known = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(old, times)) for old in known):
            return False
        known[:] = [old for old in known if any(a < b for a, b in zip(old, times))]
        known.append(times)
        return True

    def _bound(self) -> float:
        """When the next forward and backward of each chunk can start, then as in `bound`."""
        work, m, free = self.work, self.work.micro_batches, self.free
        chunks = len(self.f)
        inf = float("inf")
        to_f, to_b = [inf] * chunks, [inf] * chunks
        for k in range(chunks):
            n = len(self.f[k])
            if n < m:
                come = 0.0 if k == 0 else (self.f[k - 1][n] if n < len(self.f[k - 1]) else
                                           to_f[k - 1] + work.forward[k - 1]) + self.hops[k - 1]
                to_f[k] = max(come, free[work.home[k]])
        for k in reversed(range(chunks)):
            n = len(self.b[k])
            if n < m:
                come = 0.0 if k == chunks - 1 else (self.b[k + 1][n] if n < len(self.b[k + 1]) else
                                                    to_b[k + 1] + work.backward[k + 1]) + self.hops[k]
                to_b[k] = max(come, free[work.home[k]], to_f[k] + work.forward[k] if n == len(self.f[k]) else 0.0)
        least = 0.0
        for d, mine in enumerate(self.mine):
            f = [(m - len(self.f[k])) * work.forward[k] for k in mine]
            b = [(m - len(self.b[k])) * work.backward[k] for k in mine]
            late = sum((m - self.w[k]) * self.weight[k] for k in mine)
            start_f, start_b = min(to_f[k] for k in mine), min(to_b[k] for k in mine)
            tail = self.tail[mine[0]] + self.weight[0] if any(b) else 0.0
            after = max(late, tail)
            begin = min(start_f, start_b)
            least = max(least, free[d] + late, (begin + sum(f) + sum(b) + after) if begin < inf else 0.0,
                        (start_b + sum(b) + after) if start_b < inf else 0.0)
        return least
