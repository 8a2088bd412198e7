"""The walk that predictions use against the readable event queue, and orders against the readable timeline."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.schedule.greedy import Work, timeline
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import computes
from mixfleet.sim import compiled
from mixfleet.sim.compiled import Arrays, pipeline, run
from mixfleet.sim.engine import Graph
from mixfleet.sim.engine import run as play
from mixfleet.sim.flow import flow


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    monkeypatch.setattr(compiled, "_made", [compiled._walk] if request.param == "plain" else [])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_times_are_those_of_the_event_queue(n, random):
    durations = [random.choice([0, random.randint(1, 99)]) for _ in range(n)]
    pairs = [(a, b) for b in range(n) for a in range(b) if random.random() < 0.15]
    label = random.sample(range(n), n)  # not in order of dependency
    graph = Graph()
    for t in range(n):
        graph.add(durations[label.index(t)])
    for a, b in pairs:
        graph.order(label[a], label[b])
    times = play(graph)
    before, after = (np.array([label[p[i]] for p in pairs], np.int64) for i in (0, 1))
    start, end = run(Arrays.of(np.array(graph.duration_ns, np.int64), before, after))
    assert start.tolist() == times.start
    assert end.tolist() == times.end


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from((0.02, 0.1, 0.3)),
       st.randoms(use_true_random=False))
def test_shared_ports_are_shared_to_the_nanosecond(n, ports, density, random):
    """Flows of few kinds, so that many happen at the same instants, and of odd sizes, so that rounding shows."""
    def one():
        through = random.sample(range(ports), random.randint(1, ports))
        demands = [(p, random.choice([1e9, 3e9, 7e9]), random.choice([1, 77, 1001])) for p in through]
        more = random.choice([(), [k * random.randint(1, 3) for _, _, k in demands]])
        return flow(random.choice([0.0, 0.0, 5e-9]), demands, more)

    kinds = [one() for _ in range(random.randint(1, 6))]
    graph = Graph()
    for _ in range(n):
        if random.random() < 0.6:
            graph.add(flow=random.choice(kinds))
        else:
            graph.add(random.choice([0, 0, 7, random.randint(1, 99)]))
    for b in range(n):
        for a in range(b):
            if random.random() < density:
                graph.order(a, b)
    times = play(graph)
    found = compiled.play(graph)
    assert found == times
    assert found.critical() == times.critical()


def test_compiled_code_tells_the_same_causes(monkeypatch):
    graph, random = Graph(), Random(3)
    for b in range(60):
        graph.add(random.randint(0, 3))
        for a in range(b):
            if random.random() < 0.1:
                graph.order(a, b)
    expected = play(graph)
    monkeypatch.setattr(compiled, "MANY", 1)
    assert compiled.play(graph) == expected
    assert compiled.play(graph).critical() == expected.critical()


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_take_as_long_as_in_the_timeline(name, way):
    schedule = SCHEDULES[name]
    stages = 4 if schedule.even_stages else 3
    home, m = schedule.place(stages, 2 if schedule.most_rounds > 1 else 1), 6 * stages // 3
    f, b = [tuple(k * 1e-3 for k in range(a, a + len(home))) for a in (1, 3)]
    work = Work(home, m, f, b, tuple(reversed(f)) if schedule.splits else (), comm=7e-4,
                starts=schedule.starts(home))
    orders = computes(schedule.orders(home, *schedule.counts(m)))
    work = work._replace(micro_batches=1 + max(mb for order in orders for _, _, mb in order))
    start, end = run(pipeline(work, orders))
    expected = timeline(work, orders)
    steps = [step for order in orders for step in order]
    assert [(round(s * 1e9), round(e * 1e9)) for s, e in map(expected.__getitem__, steps)] == [
        (s, e) for s, e in zip(start.tolist(), end.tolist())][:len(steps)]


def test_a_circle_is_left(way):
    start, end = run(Arrays.of(np.array([5, 3, 2]), np.array([1, 2, 0]), np.array([2, 1, 1])))
    assert end.tolist() == [5, -1, -1]
    assert start.tolist() == [0, -1, -1]
