"""The schedule search: never worse than a named schedule, within its limits, and on small cases the true optimum."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from mixfleet.errors import InputError
from mixfleet.schedule.exact import bound, solve
from mixfleet.schedule.greedy import Orders, Step, Work, makespan, stuck, timeline
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import in_flight
from mixfleet.schedule.search import halves, search


def words(counts: dict[tuple[str, int], int], chunks: list[int], limit: int) -> Iterator[tuple[Step, ...]]:
    """All orders of one device that take micro-batches in turn and keep the limit."""
    ops = sorted({op for op, _ in counts})

    def grow(done: tuple[Step, ...], at: dict[tuple[str, int], int]) -> Iterator[tuple[Step, ...]]:
        if all(at[key] == counts[key] for key in counts):
            yield done
            return
        for op, k in counts:
            if at[op, k] == counts[op, k]:
                continue
            last = "W" if "W" in ops else "B"
            if op == "F" and sum(at["F", j] - at[last, j] for j in chunks) >= limit:
                continue
            if (op in "BI" and at[op, k] >= at["F", k]) or (op == "W" and at[op, k] >= at["I", k]):
                continue
            yield from grow((*done, (op, k, at[op, k])), at | {(op, k): at[op, k] + 1})

    yield from grow((), dict.fromkeys(counts, 0))


def brute(work: Work, limit: tuple[int, ...]) -> float:
    """Every order of every device against every other."""
    options = []
    for d in range(work.devices):
        mine = [k for k, h in enumerate(work.home) if h == d]
        counts = {(op, k): work.micro_batches for k in mine for op in ("FIW" if work.weight else "FB")}
        options.append(list(words(counts, mine, limit[d])))
    return min(makespan(work, orders) for orders in product(*options))


def program(work: Work) -> float:
    """The optimum as a mixed integer program with one binary variable per pair of steps of a device; no limits, and
    micro-batches in any order."""
    ops = "FIW" if work.weight else "FB"
    steps = [(op, k, m) for op in ops for k in range(len(work.home)) for m in range(work.micro_batches)]
    at = {s: i for i, s in enumerate(steps)}
    pairs = [(a, b) for a in steps for b in steps if a < b and work.home[a[1]] == work.home[b[1]]]
    size, big = len(steps) + len(pairs) + 1, 10 * sum(map(work.seconds, steps)) / 2
    rows, lows = [], []

    def after(later: int, earlier: int, gap: float, pair: int = -1, sign: int = 0) -> None:
        row = np.zeros(size)
        row[later], row[earlier] = 1, -1
        if pair >= 0:
            row[pair] = sign * big
        rows.append(row)
        lows.append(gap - big if sign < 0 else gap)

    for s in steps:
        op, k, m = s
        after(size - 1, at[s], work.seconds(s))
        needs = []
        if op == "F" and k:
            needs = [(("F", k - 1, m), work.hop(k - 1))]
        elif op in "BI":
            needs = [(("F", k, m), 0.0)] + ([((op, k + 1, m), work.hop(k))] if k + 1 < len(work.home) else [])
        elif op == "W":
            needs = [(("I", k, m), 0.0)]
        for need, hop in needs:
            after(at[s], at[need], work.seconds(need) + hop)
    for n, (a, b) in enumerate(pairs):  # 0: a first, 1: b first
        after(at[b], at[a], work.seconds(a), len(steps) + n, 1)
        after(at[a], at[b], work.seconds(b), len(steps) + n, -1)
    cost = np.zeros(size)
    cost[-1] = 1
    upper = np.full(size, np.inf)
    upper[len(steps):-1] = 1
    integral = np.zeros(size)
    integral[len(steps):-1] = 1
    found = milp(cost, constraints=LinearConstraint(np.array(rows), np.array(lows), np.inf), integrality=integral,
                 bounds=Bounds(0, upper))
    assert found.success
    return float(found.fun)


CASES = [  # home, micro-batches, forward, backward, weight, hop, limits
    ((0, 1), 4, (2.0, 3.0), (5.0, 4.0), (), 1.0, (4, 4)),
    ((0, 1, 2), 3, (1.0, 3.0, 2.0), (3.0, 5.0, 7.0), (), 0.5, (3, 2, 1)),
    ((0, 1, 2), 4, (3.0, 1.0, 2.0), (4.0, 7.0, 3.0), (), 0.0, (3, 3, 2)),
    ((0, 1), 3, (2.0, 3.0), (3.0, 2.0), (1.0, 4.0), 0.5, (2, 1)),
    ((0, 1), 3, (3.0, 2.0), (1.0, 2.0), (4.0, 3.0), 2.0, (3, 3)),
    ((0, 1, 1, 0), 2, (2.0, 1.0, 3.0, 2.0), (1.0, 4.0, 2.0, 3.0), (), 0.7, (4, 4)),
    ((0, 1, 0, 1), 2, (2.0, 1.0, 3.0, 2.0), (1.0, 4.0, 2.0, 3.0), (), 0.7, (4, 4)),
]


@pytest.mark.parametrize(("home", "m", "f", "b", "w", "hop", "limit"), CASES)
def test_small_cases_are_the_best_of_all_orders(home: tuple[int, ...], m: int, f: tuple[float, ...],
                                                b: tuple[float, ...], w: tuple[float, ...], hop: float,
                                                limit: tuple[int, ...]) -> None:
    work = Work(home, m, f, b, w, comm=hop)
    best = brute(work, limit)
    found = search(work, limit)
    assert found.proven
    assert found.makespan == pytest.approx(best)
    assert found.bound == pytest.approx(best)
    assert bound(work, limit) <= best + 1e-9
    assert stuck(home, m, found.orders) is None
    assert all(in_flight(order) <= most for order, most in zip(found.orders, limit))
    # Branch and bound by itself, without a good start.
    answer = solve(work, limit, 2 * best, 10**6)
    assert answer.orders is not None
    assert makespan(work, answer.orders) == pytest.approx(best)


@pytest.mark.parametrize(("home", "m", "f", "b", "w", "hop", "limit"), CASES)
def test_the_makespan_is_where_the_timeline_ends(home: tuple[int, ...], m: int, f: tuple[float, ...],
                                                 b: tuple[float, ...], w: tuple[float, ...], hop: float,
                                                 limit: tuple[int, ...]) -> None:
    """In any orders, those that wait for each other forever among them, and with a second chain."""
    pick = random.Random(7)
    for starts in ((0,), (0, len(home) // 2)):
        work = Work(home, m, f, b, w, comm=hop, starts=starts)
        steps = [(op, k, i) for op in ("FIW" if w else "FB") for k in range(len(home)) for i in range(m)]
        for _ in range(60):
            pick.shuffle(steps)
            ranked = steps if pick.random() < 0.5 else sorted(steps, key=lambda s: "FBIW".index(s[0]))
            orders = tuple(tuple(s for s in ranked if home[s[1]] == d) for d in range(work.devices))
            done = timeline(work, orders)
            expected = max(end for _, end in done.values()) if len(done) == len(steps) else float("inf")
            assert makespan(work, orders) == expected


@pytest.mark.parametrize(("home", "m", "f", "b", "w"), [
    ((0, 1, 2), 2, (1.0, 3.0, 2.0), (3.0, 5.0, 7.0), ()),
    ((0, 1), 3, (2.0, 3.0), (5.0, 4.0), ()),
    ((0, 1), 2, (2.0, 3.0), (3.0, 2.0), (1.0, 4.0)),
    ((0, 1, 1, 0), 2, (2.0, 1.0, 3.0, 2.0), (1.0, 4.0, 2.0, 3.0), ()),
])
def test_an_integer_program_finds_nothing_better(home: tuple[int, ...], m: int, f: tuple[float, ...],
                                                 b: tuple[float, ...], w: tuple[float, ...]) -> None:
    """Also if micro-batches may overtake each other."""
    work = Work(home, m, f, b, w, comm=0.5)
    assert search(work).makespan == pytest.approx(program(work))


@pytest.mark.parametrize(("m", "limit", "splits", "best", "named"), [
    (4, (4, 3, 2, 1), False, 48, 48),   # with the memory of 1F1B nothing is better: proven
    (4, (4, 4, 4, 4), False, 45, 48),
    (8, (4, 3, 2, 1), False, 84, 84),
    (8, (8, 8, 8, 8), False, 81, 84),
    (8, (8, 8, 8, 8), True, 75, 75),
])
def test_stages_of_1_2_3_2(m: int, limit: tuple[int, ...], splits: bool, best: float, named: float) -> None:
    """The searched schedule beats the best named one, or proves that none can."""
    f = (1.0, 2.0, 3.0, 2.0)
    found = search(Work((0, 1, 2, 3), m, f, f if splits else tuple(2 * x for x in f), f if splits else ()), limit)
    assert found.proven
    assert (found.makespan, found.best_named_makespan) == (best, named)


@pytest.mark.parametrize(("m", "limit", "splits", "best", "named"), [
    (4, (4, 4, 4, 4), False, 46.5, 53.5),
    (4, (4, 3, 2, 1), False, 53.5, 53.5),   # nothing better with the memory of 1F1B
    (8, (5, 4, 3, 2), False, 84.5, 89.5),
    (8, (5, 4, 3, 2), True, 75.75, 80.5),
])
def test_stages_of_1_2_3_2_behind_links(m: int, limit: tuple[int, ...], splits: bool, best: float,
                                        named: float) -> None:
    """The same with links of 1/2, 1/4 and 1: one more micro-batch in flight per device than 1F1B has hides them."""
    f = (1.0, 2.0, 3.0, 2.0)
    work = Work((0, 1, 2, 3), m, f, f if splits else tuple(2 * x for x in f), f if splits else (), (0.5, 0.25, 1.0))
    found = search(work, limit)
    assert found.proven
    assert (found.makespan, found.best_named_makespan) == (best, named)
    assert makespan(work, found.orders) == best
    assert all(in_flight(order) <= most for order, most in zip(found.orders, limit))


times = st.floats(0.5, 9)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0)]), st.integers(1, 5),
       st.booleans(), st.integers(0, 5), st.data())
def test_no_named_schedule_is_better(home: tuple[int, ...], m: int, splits: bool, more: int,
                                     data: st.DataObject) -> None:
    per = st.lists(times, min_size=len(home), max_size=len(home)).map(tuple)
    work = Work(home, m, data.draw(per), data.draw(per), data.draw(per) if splits else (),
                comm=data.draw(st.floats(0, 3)))
    limit = tuple(home.count(d) + more for d in range(work.devices))
    found = search(work, limit, played=20_000, nodes=200)
    assert stuck(home, m, found.orders) is None
    assert makespan(work, found.orders) == pytest.approx(found.makespan)
    assert all(in_flight(order) <= most for order, most in zip(found.orders, limit))
    assert found.bound <= found.makespan + 1e-9
    for schedule in SCHEDULES.values():
        if not schedule.weights and schedule.why_not(home, m) is None and (splits or not schedule.splits):
            orders: Orders = schedule.orders(home, m)
            orders = halves(orders) if splits else orders
            if all(in_flight(order) <= most for order, most in zip(orders, limit)):
                assert found.makespan <= makespan(work, orders) + 1e-9


def test_equal_input_gives_equal_orders() -> None:
    work = Work((0, 1, 2, 3), 12, (1.0, 2.5, 3.0, 2.0), (2.0, 2.7, 3.1, 2.2), (0.9, 2.2, 2.8, 1.7), comm=0.4)
    assert search(work, (4, 4, 4, 4), played=60_000) == search(work, (4, 4, 4, 4), played=60_000)


def test_a_limit_too_low_is_named() -> None:
    with pytest.raises(InputError, match="device 1 may hold 1 chunks of micro-batches; it needs 2"):
        search(Work((0, 1, 1, 0), 2, (1.0,) * 4, (2.0,) * 4), (2, 1))
