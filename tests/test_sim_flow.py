"""Sharing of links, against numbers worked out by hand."""

import random

import pytest

from mixfleet.sim.engine import Graph, run
from mixfleet.sim.flow import flow, speeds

GB = 10**9


def times(*flows):
    graph = Graph()
    for one in flows:
        graph.add(flow=one)
    return run(graph)[:2]


def test_alone_a_transfer_takes_its_latency_and_its_slowest_port():
    start, end = times(flow(3e-6, [(0, 5 * GB, 7_000_000), (1, 2 * GB, 7_000_000)]))
    assert (start, end) == ([0], [3_000 + 3_500_000])


def test_two_transfers_through_one_port_take_twice_as_long():
    one, two = flow(0, [(0, 2 * GB, 4 * GB)]), flow(0, [(0, 2 * GB, 4 * GB)])
    assert times(one, two)[1] == [4 * GB, 4 * GB]


def test_the_small_one_leaves_and_the_large_one_speeds_up():
    # 1 GB/s each until the 3 GB are through at 3 s; the other has 4 of 7 GB left, at 2 GB/s
    small, large = flow(0, [(0, 2 * GB, 3 * GB)]), flow(0, [(0, 2 * GB, 7 * GB)])
    assert times(small, large)[1] == [3 * GB, 5 * GB]


def test_a_late_arrival_slows_the_first():
    # first: 1 s alone moves 2 of 5 GB; then 1 GB/s each until the second's 1 GB is through at 2 s; 2 GB left: 1 s
    graph = Graph()
    first = graph.add(flow=flow(0, [(0, 2 * GB, 5 * GB)]))
    wait = graph.add(600_000_000)
    second = graph.add(flow=flow(0.4, [(0, 2 * GB, 1 * GB)]))
    graph.order(wait, second)
    start, end, _ = run(graph)
    assert (start[second], end[second], end[first]) == (600_000_000, 2 * GB, 3 * GB)


def test_what_one_cannot_use_the_other_gets():
    # a is held to 1 GB/s by its own port, so b gets 4 of the 5 GB/s they share
    a, b = flow(0, [(0, 1 * GB, 3 * GB), (1, 5 * GB, 3 * GB)]), flow(0, [(1, 5 * GB, 12 * GB)])
    assert times(a, b)[1] == [3 * GB, 3 * GB]


def test_max_min_on_a_chain():
    # ports 10 and 4 GB/s; x passes both, y the first, z the second: x and z get 2, y gets 8
    x = flow(0, [(0, 10 * GB, 6 * GB), (1, 4 * GB, 6 * GB)])
    y, z = flow(0, [(0, 10 * GB, 6 * GB)]), flow(0, [(1, 4 * GB, 6 * GB)])
    fx, fy, fz = speeds([x, y, z])
    assert (fx * 4, fy * 10, fz * 4) == pytest.approx((2, 8, 2))


def test_a_folded_flow_counts_all_that_pass_the_port():
    # three equal transfers of 2 GB through one 4 GB/s NIC, each from its own 4 GB/s port
    folded = flow(0, [(0, 4 * GB, 2 * GB), (1, 4 * GB, 2 * GB)], passing=[2 * GB, 6 * GB])
    plain = [flow(0, [(i, 4 * GB, 2 * GB), (9, 4 * GB, 2 * GB)]) for i in range(3)]
    assert times(folded)[1] == [1_500_000_000]
    assert times(*plain)[1] == [1_500_000_000] * 3


def test_speeds_are_feasible_and_no_flow_can_gain_without_a_slower_one_losing():
    rng = random.Random(3)
    for _ in range(200):
        flows = [flow(0, [(p, rng.randint(1, 9) * GB, rng.randint(1, 5) * GB) for p in rng.sample(range(5), 2)])
                 for _ in range(rng.randint(1, 6))]
        got = speeds(flows)
        rates = [s * f.rate for s, f in zip(got, flows)]
        load = {}
        for s, f in zip(got, flows):
            for port, part in f.demands:
                load[port] = load.get(port, 0) + s * part
        assert all(v <= 1 + 1e-9 for v in load.values())
        for rate, f in zip(rates, flows):  # a port that is full and where nobody is faster
            assert any(load[p] > 1 - 1e-9 and all(rates[j] <= rate * (1 + 1e-9) for j, g in enumerate(flows)
                                                 if any(q == p for q, _ in g.demands)) for p, _ in f.demands)


def test_order_and_circles():
    graph = Graph()
    a, b, c, d = graph.add(3), graph.add(5), graph.add(0), graph.add(7)
    graph.order(a, c)
    graph.order(b, c)
    graph.order(c, d)
    times = run(graph)
    assert times[:2] == ([0, 0, 5, 5], [3, 5, 5, 12])
    assert times.critical() == [b, c, d]
    graph.order(d, c)
    assert run(graph)[1] == [3, 5, -1, -1]


def plain(durations, flows, before):
    """The same rules with nothing clever: all speeds anew at every event, until all tasks have ended."""
    start, end, left = {}, {}, {}
    now = 0.0
    while len(end) < len(durations):
        for task in range(len(durations)):
            if task not in start and all(b in end and end[b] <= now + 1e-6 for b in before[task]):
                start[task] = now
                left[task] = flows[task].alone_ns if flows[task] else durations[task]
        moving = [t for t in start if t not in end and flows[t] and now >= start[t] + flows[t].latency_ns - 1e-6]
        speed = dict.fromkeys([t for t in start if t not in end and not flows[t]], 1.0)
        speed.update(zip(moving, speeds([flows[t] for t in moving]) if moving else ()))
        waits = [start[t] + flows[t].latency_ns - now for t in start
                 if t not in end and flows[t] and t not in moving]
        step = min([*waits, *(left[t] / v for t, v in speed.items())])
        now += step
        for t, v in speed.items():
            left[t] -= step * v
            if left[t] <= 1e-6 * max(1, now):
                end[t] = now
    return start, end


def test_engine_equals_the_plain_rules_on_random_graphs():
    rng = random.Random(11)
    for _ in range(60):
        size = rng.randint(2, 12)
        flows = [flow(rng.choice([0, 1e-6, 3e-6]), [(p, rng.choice([1, 2, 5]) * GB, rng.randint(1, 50) * 1000)
                                                    for p in rng.sample(range(4), rng.randint(1, 3))])
                 if rng.random() < 0.7 else None for _ in range(size)]
        durations = [rng.randint(0, 20_000) for _ in range(size)]
        before = [sorted(rng.sample(range(t), min(t, rng.randint(0, 2)))) for t in range(size)]
        graph = Graph()
        for t in range(size):
            graph.add(durations[t], flows[t])
        for t in range(size):
            for b in before[t]:
                graph.order(b, t)
        got = run(graph)
        start, end = plain(durations, flows, before)
        for t in range(size):  # the engine rounds every end to whole ns, and later ones build on it
            assert abs(got.start[t] - start[t]) <= 3 * size
            assert abs(got.end[t] - end[t]) <= 3 * size
