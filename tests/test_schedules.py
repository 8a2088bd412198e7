"""Schedules on their own: soundness, memory, and the published closed forms with unequal numbers of everything."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.errors import InputError
from mixfleet.schedule.greedy import Orders, Rule, Work, greedy, makespan, parse_steps, show_steps, stuck, timeline
from mixfleet.schedule.named import SCHEDULES, Homes

SHAPES = [(name, p, r, m) for name, s in SCHEDULES.items() if not s.weights
          for p in (1, 2, 3, 5) for r in range(1, 5) for m in (1, 4, 6, 15)
          if s.why_not(s.place(p, r), m) is None]


def work(home: Homes, micro_batches: int, splits: bool, forward: float = 1.0) -> Work:
    """A device's whole forward takes `forward`, each half of its backward likewise, cut evenly over its chunks."""
    part = (forward * (max(home) + 1) / len(home),) * len(home)
    return Work(home, micro_batches, part, part if splits else tuple(2 * x for x in part), part if splits else ())


def in_flight(orders: Orders) -> list[int]:
    """The most chunks times micro-batches that each device holds."""
    peaks = []
    for order in orders:
        held = peak = 0
        halves = {(k, m) for op, k, m in order if op == "W"}
        for op, k, m in order:
            held += {"F": 1, "B": -1, "W": -1, "I": 0}[op]
            assert (k, m) in halves or op in "FB"
            peak = max(peak, held)
        assert held == 0
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize(("name", "p", "r", "m"), SHAPES)
def test_every_schedule_is_sound(name: str, p: int, r: int, m: int) -> None:
    schedule = SCHEDULES[name]
    home = schedule.place(p, r)
    orders = schedule.orders(home, m)
    assert stuck(home, m, orders) is None
    assert makespan(work(home, m, schedule.splits), orders) >= 3 * m - 1e-9


@pytest.mark.parametrize(("name", "bubble"), [
    ("gpipe", lambda p, r, m: Fraction(p - 1, m)),
    ("1f1b", lambda p, r, m: Fraction(p - 1, m)),
    ("interleaved", lambda p, r, m: Fraction(p - 1, r * m)),
    ("looped-bfs", lambda p, r, m: Fraction(p - 1, r * m)),
    ("zb-h1", lambda p, r, m: Fraction(p - 1, 3 * m)),  # (p - 1)(F + I - W), all halves equal
    ("zb-v", lambda p, r, m: Fraction(p - 1, 6 * m)),   # the first forward reaches the last device at (p - 1) / 2
])
@pytest.mark.parametrize(("p", "r", "m"), [(2, 1, 6), (4, 1, 8), (5, 1, 10), (2, 2, 4), (4, 2, 12), (3, 2, 9),
                                           (4, 3, 8)])
def test_bubbles_are_those_of_the_papers(name: str, bubble: object, p: int, r: int, m: int) -> None:
    schedule = SCHEDULES[name]
    home = schedule.place(p, r)
    if schedule.why_not(home, m):
        pytest.skip("not a shape of this schedule")
    span = makespan(work(home, m, schedule.splits), schedule.orders(home, m))
    assert span / (3 * m) - 1 == pytest.approx(float(bubble(p, r, m)))  # type: ignore[operator]


TWO_WAYS = [name for name, s in SCHEDULES.items() if s.ways == 2]


@pytest.mark.parametrize("name", TWO_WAYS)
def test_two_ways_are_sound_for_any_share_of_the_micro_batches(name: str) -> None:
    schedule = SCHEDULES[name]
    for p in (1, 2, 3, 4, 6):
        home = schedule.place(p, 1)
        for counts in [(1, 0), (0, 3), (1, 2), (5, 5), (9, 4), (3, 14)]:
            if schedule.why_not(home, *counts) is None:
                orders = schedule.orders(home, *counts)
                assert stuck(home, sum(counts), orders, starts=schedule.starts(home), counts=counts) is None


@pytest.mark.parametrize("name", TWO_WAYS)
def test_orders_of_two_ways_are_checked_too(name: str) -> None:
    schedule, home = SCHEDULES[name], (0, 1, 1, 0)
    first, second = schedule.orders(home, 2, 3)

    def says(*orders: object) -> str:
        return stuck(home, 5, orders, starts=(0, 2), counts=(2, 3)) or ""  # type: ignore[arg-type]

    assert "lacks F0.1" in says([s for s in first if s != ("F", 0, 1)], second)
    assert "F0.2, which is not its own" in says((*first, ("F", 0, 2)), second)  # of the other direction
    assert "wait for each other" in says(first[::-1], second)


def split(name: str, p: int, counts: tuple[int, ...], f: float, i: float, w: float) -> float:
    """Seconds over those of the work alone, with every chunk alike."""
    schedule = SCHEDULES[name]
    home = schedule.place(p, 2)
    chunks = (1.0,) * len(home)
    made = Work(home, sum(counts), tuple(f * c for c in chunks), tuple(i * c for c in chunks),
                tuple(w * c for c in chunks), starts=schedule.starts(home))
    alone = sum(counts) * (f + i + w) * (2 if schedule.ways == 1 else 1)
    return makespan(made, schedule.orders(home, *counts)) - alone


@pytest.mark.parametrize(("p", "n"), [(2, 2), (4, 4), (4, 12), (6, 6), (8, 16)])
def test_chimera_fills_the_gaps_of_one_direction_with_the_other(p: int, n: int) -> None:
    """Forward and backward equally long: p - 2 slots idle, whatever the number of units (Li and Hoefler). With
    backwards twice as long and one unit, p forwards and 2p - 2 backwards are on the critical path."""
    home = SCHEDULES["chimera"].place(p, 1)
    orders = SCHEDULES["chimera"].orders(home, n // 2, n // 2)
    ones = (1.0,) * len(home)
    assert makespan(Work(home, n, ones, ones, starts=(0, p)), orders) == 2 * n + p - 2
    if n == p:
        assert makespan(Work(home, n, ones, (2.0,) * len(home), starts=(0, p)), orders) == p + 2 * (2 * p - 2)
    assert in_flight(orders) == [p // 2 + 1 + min(d, p - 1 - d) for d in range(p)]


@pytest.mark.parametrize(("p", "n"), [(2, 2), (4, 4), (4, 7), (6, 9), (8, 8)])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1.0, 1.2, 0.8)])
def test_dualpipe_idles_only_at_the_ends(p: int, n: int, f: float, i: float, w: float) -> None:
    """(p / 2 - 1)(F + B - 2W), B = I + W: the published (F&B + B - 3W) counts a pair as one step that ends at once,
    while here what a forward makes leaves before its backward. Half the devices in a V are half of it."""
    expected = (p / 2 - 1) * (f + i - w)
    assert split("dualpipe", p, (n, n), f, i, w) == pytest.approx(expected)
    assert split("dualpipe-v", p // 2, (n,), f, i, w) == pytest.approx(expected)
    home = SCHEDULES["dualpipe"].place(p, 1)
    assert in_flight(SCHEDULES["dualpipe"].orders(home, n, n)) == [p + 1] * p
    assert in_flight(SCHEDULES["dualpipe-v"].orders(SCHEDULES["dualpipe-v"].place(p // 2, 2), n)) == [p + 1] * (p // 2)


@pytest.mark.parametrize(("name", "held"), [
    ("gpipe", lambda p, m: [m] * p),
    ("1f1b", lambda p, m: [min(p - i, m) for i in range(p)]),
])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 2), (4, 9), (5, 5)])
def test_in_flight_micro_batches(name: str, held: object, p: int, m: int) -> None:
    assert in_flight(SCHEDULES[name].orders(tuple(range(p)), m)) == held(p, m)  # type: ignore[operator]


@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 12), (5, 15)])
def test_zero_bubble_memory_is_bounded(p: int, m: int) -> None:
    """ZB-H1 and ZB-V hold what 1F1B holds at most, p micro-batches of a device's layers; ZB-H2 2p - 1."""
    assert max(in_flight(SCHEDULES["zb-h1"].orders(tuple(range(p)), m))) <= p
    assert max(in_flight(SCHEDULES["zb-h2"].orders(tuple(range(p)), m))) <= 2 * p - 1
    home = SCHEDULES["zb-v"].place(p, 2)
    assert max(in_flight(SCHEDULES["zb-v"].orders(home, m))) <= 2 * p + 1  # halves of a device's layers


def test_timeline_by_hand() -> None:
    """Two stages, unequal times, a link of 5: worked out on paper."""
    w = Work((0, 1), 2, (2.0, 3.0), (4.0, 7.0), comm=5.0)
    done = timeline(w, SCHEDULES["1f1b"].orders((0, 1), 2))
    assert done["F", 0, 1] == (2, 4)
    assert done["F", 1, 0] == (7, 10)
    assert done["B", 1, 0] == (10, 17)
    assert done["F", 1, 1] == (17, 20)
    assert done["B", 0, 0] == (22, 26)
    assert done["B", 1, 1] == (20, 27)
    assert done["B", 0, 1] == (32, 36)


@pytest.mark.parametrize(("name", "home", "m", "says"), [
    ("interleaved", (0, 1, 0, 1), 3, "in groups of 2; there are 3, nearest 2 or 4"),
    ("interleaved", (0, 1), 4, "wants 2 or more chunks on each stage; there are 2 chunks on 2 stages"),
    ("wave", (0, 1, 0, 1), 4, "0, 1, 1, 0"),
    ("wave", (0, 1, 1, 0, 0, 1), 4, "an even number"),
    ("1f1b", (0, 1, 1, 0), 4, "wants 1 chunks"),
    ("chimera", (0, 1), 4, "wants 2 pipelines in opposite directions on the same devices; here they are 1"),
])
def test_shapes_that_do_not_suit_are_refused(name: str, home: Homes, m: int, says: str) -> None:
    assert says in (SCHEDULES[name].why_not(home, m) or "")


@pytest.mark.parametrize(("text", "says"), [
    ("F0.0 B0.0", "lacks F0.1"),
    ("F0.0 F0.1 B0.0 B0.1 B0.1", "twice"),
    ("F0.0 F0.1 B0.0 F1.0", "not its own"),
    ("F0.0 F0.1 I0.0 B0.1", "either B0.0 or both of I and W"),
    ("F0.0 B0.1 F0.1 B0.0", "never gets to B0.1"),
])
def test_orders_made_by_hand_are_checked(text: str, says: str) -> None:
    assert says in (stuck((0,), 2, (parse_steps(text),)) or "")


def test_dualpipe_wants_even_stages_and_others_no_second_way() -> None:
    assert "there are 3, nearest 2 or 4" in (SCHEDULES["dualpipe"].why_not((0, 1, 2, 2, 1, 0), 4, 4) or "")
    assert "not several" in (SCHEDULES["1f1b"].why_not((0, 1, 1, 0), 4, 4) or "")


def test_steps_round_trip_and_bad_ones_are_named() -> None:
    steps = parse_steps("F0.0 I3.12 W3.12")
    assert parse_steps(show_steps(steps)) == steps
    with pytest.raises(InputError, match="'Q1' is not a step"):
        parse_steps("F0.0 Q1")


times = st.floats(0.5, 9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.booleans(), st.data())
def test_greedy_orders_are_sound_and_never_beat_the_bound(p: int, m: int, limit: int, splits: bool,
                                                          data: st.DataObject) -> None:
    per = st.lists(times, min_size=p, max_size=p).map(tuple)
    f, b, w = data.draw(per), data.draw(per), data.draw(per)
    made = Work(tuple(range(p)), m, f, b, w if splits else (), comm=data.draw(st.floats(0, 3)))
    orders = greedy(made, Rule((limit,) * p))
    assert orders is not None
    assert stuck(made.home, m, orders) is None
    busiest = max(m * (f[i] + b[i] + (w[i] if splits else 0)) for i in range(p))
    assert makespan(made, orders) >= busiest - 1e-9
    assert max(in_flight(orders)) <= limit
