"""Orders for uneven stages: no named schedule is better than what is found here, and small cases are proven.

Starting points are all named schedules that suit and list scheduling under several rules; the best are improved by
exchanging neighbouring steps on the critical path (the classic neighbourhood of job-shop scheduling, van Laarhoven,
Aarts and Lenstra, 1992); what is left is closed by branch and bound where that is small. Effort is counted in steps
played, not in seconds, and the random numbers are seeded, so equal input gives equal output.
"""

from __future__ import annotations

from itertools import product
from math import log
from random import Random
from typing import NamedTuple

from mixfleet.errors import InputError
from mixfleet.schedule.exact import EPSILON, bound, solve
from mixfleet.schedule.greedy import B, F, I, Orders, Rule, Step, W, Work, greedy, makespan
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import in_flight

PLAYED = 1_000_000
"""Steps played by the local search, by default: about two seconds."""
NODES = 20_000
"""States of the branch and bound, by default; cases of more than `SMALL` steps do without it."""
SMALL = 64


class Found(NamedTuple):
    """The best orders found. Times are in the unit of `Work`."""

    orders: Orders
    makespan: float
    bound: float
    """No orders within the limits can take less."""
    best_named: str
    """The fastest named schedule that suits and keeps the limits; empty if there is none."""
    best_named_makespan: float

    @property
    def proven(self) -> bool:
        """Whether nothing better exists."""
        return self.makespan <= self.bound * (1 + EPSILON)


def halves(orders: Orders) -> Orders:
    """The same orders with every whole backward cut in two, one right behind the other."""
    return tuple(tuple(half for op, k, m in order for half in ([(I, k, m), (W, k, m)] if op == B else [(op, k, m)]))
                 for order in orders)


def search(work: Work, limit: tuple[int, ...] | None = None, *, played: int = PLAYED, nodes: int = NODES) -> Found:
    """The best orders for `work`, with at most `limit` micro-batches times chunks in flight on each device.

    Raises InputError if a limit is too low for one micro-batch.
    """
    own = [sum(h == d for h in work.home) for d in range(work.devices)]
    limit = limit or tuple(n * work.micro_batches for n in own)
    for d, (n, most) in enumerate(zip(own, limit, strict=True)):
        if most < n:
            raise InputError(f"device {d} may hold {most} chunks of micro-batches; it needs {n} for a single one")
    named = {}
    for name, schedule in SCHEDULES.items():
        suits = not schedule.weights and (work.weight or not schedule.splits)
        if suits and schedule.why_not(work.home, work.micro_batches) is None:
            orders = schedule.orders(work.home, work.micro_batches)
            orders = halves(orders) if work.weight else orders
            if all(in_flight(order) <= most for order, most in zip(orders, limit)):
                named[name] = orders
    starts = [(makespan(work, orders), i, orders) for i, orders in enumerate(
        [*named.values(), *_listed(work, limit), _one_by_one(work)])]
    shown = {name: time for name, (time, _, _) in zip(named, starts)}
    best_named = min(shown, key=lambda name: shown[name], default="")
    least = bound(work, limit)
    best = min(starts)
    if best[0] > least * (1 + EPSILON):
        shop = _Shop(work, limit)
        for start in sorted(starts)[:3]:
            best = min(best, shop.improve(start[2], least, played // 3))
    time, _, orders = best
    if sum(map(len, orders)) <= SMALL:
        answer = solve(work, limit, time, nodes)
        least = max(least, answer.bound)
        if answer.orders is not None:
            orders, time = answer.orders, makespan(work, answer.orders)
    return Found(orders, time, min(least, time), best_named, shown.get(best_named, float("inf")))


def _listed(work: Work, limit: tuple[int, ...]) -> list[Orders]:
    """List scheduling under every rule, with the full limits and with those of 1F1B where they are lower."""
    found = []
    lean = tuple(min(most, work.devices * sum(h == d for h in work.home)) for d, most in enumerate(limit))
    for most in dict.fromkeys((limit, lean)):
        old = (False, True) if len(set(work.home)) < len(work.home) else (False,)
        for rule in product((True, False), (False, True), (True, False) if work.weight else (False,), old):
            orders = greedy(work, Rule(most, *rule))
            if orders and all(in_flight(order) <= m for order, m in zip(orders, limit)):
                found.append(orders)
    return found


def _one_by_one(work: Work) -> Orders:
    """Each micro-batch by itself: slow, but within every limit."""
    chunks = range(len(work.home))
    return tuple(tuple(step for m in range(work.micro_batches) for step in (
        *((F, k, m) for k in chunks if work.home[k] == d),
        *((op, k, m) for k in reversed(chunks) if work.home[k] == d for op in ((I, W) if work.weight else (B,)))))
        for d in range(work.devices))


class _Shop:
    """Plays orders quickly, and improves them."""

    def __init__(self, work: Work, limit: tuple[int, ...]) -> None:
        self.limit, self.devices, self.home = limit, work.devices, work.home
        self.release = W if work.weight else work.back
        self.steps: list[Step] = [(op, k, m) for op in ((F, I, W) if work.weight else (F, B))
                                  for k in range(len(work.home)) for m in range(work.micro_batches)]
        self.number = {step: i for i, step in enumerate(self.steps)}
        self.seconds = [work.seconds(step) for step in self.steps]
        self.before, self.hop = [-1] * len(self.steps), [0.0] * len(self.steps)
        for i, (op, k, m) in enumerate(self.steps):
            if op == F and k:
                self.before[i], self.hop[i] = self.number[F, k - 1, m], work.hop(k - 1)
            elif op == W:
                self.before[i] = self.number[I, k, m]
            elif op != F:
                on = k + 1 < len(work.home)
                self.before[i] = self.number[(work.back, k + 1, m) if on else (F, k, m)]
                self.hop[i] = work.hop(k) if on else 0.0

    def play(self, orders: list[list[int]]) -> tuple[float, list[float]] | None:
        """Makespan and the end of every step; None if the orders wait for each other."""
        end = [-1.0] * len(self.steps)
        before, hop, seconds = self.before, self.hop, self.seconds
        at, free, left = [0] * self.devices, [0.0] * self.devices, len(self.steps)
        while left:
            stuck = left
            for d, order in enumerate(orders):
                i, now = at[d], free[d]
                while i < len(order):
                    step = order[i]
                    b = before[step]
                    if b >= 0:
                        come = end[b]
                        if come < 0:
                            break
                        come += hop[step]
                        if come > now:
                            now = come
                    now += seconds[step]
                    end[step] = now
                    i += 1
                left -= i - at[d]
                at[d], free[d] = i, now
            if stuck == left:
                return None
        return max(free), end

    def improve(self, orders: Orders, least: float, played: int) -> tuple[float, int, Orders]:
        """Simulated annealing: a step on the critical path goes ahead of the one before it, or of several."""
        random = Random(0)
        now = [[self.number[step] for step in order] for order in orders]
        result = self.play(now)
        assert result
        cost, ends = result
        best, kept = cost, [list(order) for order in now]
        rounds = max(1, played // len(self.steps))
        hot = 0.02 * cost
        for turn in range(rounds):
            if best <= least * (1 + EPSILON):
                break
            places = self._critical(now, ends)
            if not places:
                break
            d, i = places[random.randrange(len(places))]
            row = list(now[d])
            far = 1 if random.random() < 0.6 else random.randint(2, 6)
            if not self._forward(d, row, i, far):
                continue
            tried = [row if e == d else order for e, order in enumerate(now)]
            result = self.play(tried)
            heat = hot * (1 - turn / rounds) + 1e-12
            if result and (result[0] <= cost or log(1 - random.random()) < (cost - result[0]) / heat):
                now, (cost, ends) = tried, result
                if cost < best * (1 - EPSILON):
                    best, kept = cost, [list(order) for order in now]
        return best, 1 << 20, tuple(tuple(self.steps[s] for s in order) for order in kept)

    def _critical(self, orders: list[list[int]], ends: list[float]) -> list[tuple[int, int]]:
        """Places (device, index) on the longest chain whose step waits for the one before it on its device."""
        place = {step: (d, i) for d, order in enumerate(orders) for i, step in enumerate(order)}
        step = max(range(len(ends)), key=lambda s: ends[s])
        found = []
        while True:
            d, i = place[step]
            start = ends[step] - self.seconds[step]
            left = orders[d][i - 1] if i else -1
            b = self.before[step]
            if left >= 0 and ends[left] >= start - EPSILON * ends[step]:
                found.append((d, i))
                step = left
            elif b >= 0:
                step = b
            else:
                return found

    def _forward(self, d: int, row: list[int], i: int, far: int) -> bool:
        """Moves the step at `i` forward by up to `far` places, as far as data, turns and room allow."""
        held = 0
        room = []
        for s in row:
            room.append(held)
            held += 1 if self.steps[s][0] == F else -1 if self.steps[s][0] == self.release else 0
        moved = False
        for j in range(i, max(i - far, 0), -1):
            a, b = self.steps[row[j - 1]], self.steps[row[j]]
            same = a[:2] == b[:2] or a[1:] == b[1:]
            chained = self.before[row[j]] == row[j - 1]
            if same or chained or (b[0] == F and room[j - 1] + 1 > self.limit[d]):
                break
            row[j - 1], row[j] = row[j], row[j - 1]
            moved = True
        return moved
