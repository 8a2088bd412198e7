"""The solvers inside the search, against brute force."""

from itertools import combinations, pairwise, product
from math import inf
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from mixfleet.model.families import build
from mixfleet.schedule.greedy import Work, makespan, timeline
from mixfleet.schedule.named import SCHEDULES
from mixfleet.search.allocate import allocate, allocate_in_step, micro_batches
from mixfleet.search.improve import neighbours
from mixfleet.search.joint import Option, share
from mixfleet.search.partition import partition
from mixfleet.search.space import _partitions, parts_of
from mixfleet.search.tables import MODES, Pieces, Tables
from mixfleet.search.variants import PLANNED
from mixfleet.search.walk import walk
from mixfleet.sim import predict


def splits(total, parts):
    """All ways to write `total` as an ordered sum of positive parts."""
    for bars in combinations(range(1, total), parts - 1):
        edges = (0, *bars, total)
        yield tuple(b - a for a, b in pairwise(edges))


def test_two_to_one_to_one():
    assert allocate([lambda s: 3.0 * s, lambda s: 6.0 * s], [1, 2], 24) == ((12, 0), (6, 0))


def test_remainder_goes_where_it_ends_first():
    # 7 samples on three equal replicas and one that takes 5 s each: 2 + 2 + 2 + 1 = 7 within 5 s.
    assert allocate([lambda s: 2.0 * s, lambda s: 5.0 * s], [3, 1], 7) == ((2, 0), (1, 0))
    assert allocate([lambda s: 2.0 * s], [3], 7) == ((2, 1),)


@pytest.mark.parametrize("total", [0, 2])
def test_fewer_samples_than_replicas(total):
    assert allocate([lambda s: 1.0 * s], [3], total) is None
    assert allocate_in_step([lambda s: 1.0 * s], [3], total, 1) is None


curves = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7), st.integers(1, 3)), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(curves, st.integers(1, 9))
def test_allocation_is_optimal(figures, total):
    """Seconds grow by steps (ceil), so that ties and plateaus occur."""
    functions = [lambda s, a=a, b=b: float(b + a * -(-s // 2)) for a, b, _ in figures]
    copies = [n for _, _, n in figures]
    owner = [i for i, n in enumerate(copies) for _ in range(n)]
    found = allocate(functions, copies, total)
    if total < len(owner):
        assert found is None
        return
    best = min(max(functions[i](s) for i, s in zip(owner, split)) for split in splits(total, len(owner)))
    assert sum(n * s + more for n, (s, more) in zip(copies, found)) == total
    assert all(0 <= more < n for n, (_, more) in zip(copies, found))
    assert max(f(s + (more > 0)) for f, (s, more) in zip(functions, found)) == best


@settings(max_examples=60, deadline=None)
@given(curves, st.integers(1, 10), st.integers(1, 4))
def test_allocation_in_step_is_optimal(figures, total, steps):
    functions = [lambda s, a=a, b=b: float(b + a * -(-s // steps)) for a, b, _ in figures]
    copies = [n for _, _, n in figures]
    owner = [i for i, n in enumerate(copies) for _ in range(n)]
    found = allocate_in_step(functions, copies, total, steps)
    legal = [split for split in splits(total, len(owner))
             if all(any(micro_batches(s, m) == steps for m in range(1, s + 1)) for s in split)]
    if not legal:
        assert found is None
        return
    best = min(max(functions[i](s) for i, s in zip(owner, split)) for split in legal)
    assert [len(row) for row in found] == copies
    assert sum(map(sum, found)) == total
    assert max(functions[i](s) for i, row in enumerate(found) for s in row) == best


def test_in_step_where_a_plain_share_is_impossible():
    """5 samples cannot be 4 equal micro-batches and a smaller one; 4 and 7 can be four: 1+1+1+1 and 2+2+2+1."""
    assert sum(map(sum, allocate_in_step([lambda s: 1.0 * s], [2], 11, 4))) == 11
    assert allocate_in_step([lambda s: 1.0 * s], [2], 9, 4) is None


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.randoms(use_true_random=False))
def test_partition_is_optimal(blocks, stages, random):
    matrices = []
    for _ in range(stages):
        times = [random.choice([1, 2, 3, 5, 8]) for _ in range(blocks)]
        limit = random.choice([3, 9, 99])
        matrix = np.full((blocks + 1, blocks + 1), inf)
        for lo, hi in combinations(range(blocks + 1), 2):
            matrix[lo, hi] = sum(times[lo:hi]) if sum(times[lo:hi]) <= limit else inf
        matrices.append(matrix)
    best = min((max(m[a, b] for m, (a, b) in zip(matrices, zip((0, *cut), (*cut, blocks))))
                for cut in combinations(range(1, blocks), stages - 1)), default=inf)
    cuts = partition(matrices)
    if best == inf:
        assert cuts is None
    else:
        assert cuts[0] == 0
        assert cuts[-1] == blocks
        assert list(cuts) == sorted(set(cuts))
        assert max(m[a, b] for m, (a, b) in zip(matrices, pairwise(cuts))) == best


def test_partition_with_memory_moves_the_cut():
    """Equal devices, but the first holds at most one of the two heavy blocks."""
    free = np.full((4, 4), inf)
    for lo, hi in combinations(range(4), 2):
        free[lo, hi] = hi - lo
    tight = free.copy()
    tight[0, 2] = tight[0, 3] = inf
    assert partition([free, free]) == (0, 1, 3)
    assert partition([tight, free]) == (0, 1, 3)
    assert partition([free, tight]) == (0, 1, 3)
    tight = free.copy()
    tight[1, 3] = inf
    assert partition([free, tight]) == (0, 2, 3)


def test_ways_to_put_classes_together():
    assert len(list(_partitions((0, 1, 2, 3)))) == 15
    assert all(sorted(x for block in p for x in block) == [0, 1, 2] for p in _partitions((0, 1, 2)))
    assert len(set(product(_partitions((0, 1, 2))))) == 5


def test_gathers_in_stages_are_a_neighbour_where_groups_span_nodes():
    """They pay where NICs are slow, since a piece then leaves a node once instead of twice, and not for tiny messages
    in a fast network."""
    def nodes(nic):
        return toy.cluster(2, 2).replace(nodes=tuple(n.replace(
            devices=(toy.device().replace(kind="cpu", message_cpu_s=0.0),) * 2, nic=n.nic.replace(bandwidth_Bps=nic))
            for n in toy.cluster(2, 2).nodes))

    plan, work = toy.data_parallel(4, 4, 4, 4), toy.job(8)
    (staged,) = [p for p in neighbours(plan, work, nodes(1e6).node_of) if p.sharding.hierarchical]
    assert staged.sharding.hierarchical == 2
    assert predict(staged, work, nodes(1e6)).step_s < 0.7 * predict(plan, work, nodes(1e6)).step_s
    assert predict(staged, work, nodes(1e9)).step_s > predict(plan, work, nodes(1e9)).step_s
    assert plan in list(neighbours(staged, work, nodes(1e6).node_of))
    assert not [p for p in neighbours(toy.data_parallel(4, 2, 2, 2), work, nodes(1e6).node_of)
                if p.sharding.hierarchical]


def test_large_batches_on_many_devices_are_shared_within_a_second():
    """64 devices of nine speeds, 4,096 samples, memory for fewer than 400 each; both cost models."""
    curves = [lambda s, v=1 + 0.37 * (i % 9): 0.002 + s / v if s < 400 else inf for i in range(64)]
    start = process_time()
    free = allocate(curves, [1] * 64, 4096)
    in_step = allocate_in_step(curves, [1] * 64, 4096, 8)
    assert process_time() - start < 2  # each within one
    assert sum(s + extra for s, extra in free) == sum(map(sum, in_step)) == 4096


option = st.builds(Option, st.integers(1, 4), st.sampled_from((1.0, 2.0, 3.5, 5.0, 7.0)), st.integers(-2, 9))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(option, min_size=1, max_size=5), st.integers(1, 2)), min_size=1, max_size=3),
       st.integers(1, 8), st.sampled_from((0, 5, 12, 20)))
def test_samples_and_state_apart_are_optimal(kinds, total, state):
    """Against every way to choose one option per replica."""
    options, copies = zip(*kinds)
    rows = [row for row, n in kinds for _ in range(n)]
    possible = [chosen for chosen in product(*rows) if sum(o.samples for o in chosen) == total
                and min(o.room for o in chosen) >= 0 and sum(o.room for o in chosen) >= state]
    found = share(options, copies, total, state)
    assert (found is None) == (not possible)
    if found:
        chosen = [o for row in found.chosen for o in row]
        assert tuple(map(len, found.chosen)) == copies
        assert sum(o.samples for o in chosen) == total
        assert max(o.seconds for o in chosen) == min(max(o.seconds for o in c) for c in possible)
        held = [part for row in found.parts for part in row]
        assert sum(held) in (0, pytest.approx(1))
        assert all(part * state <= o.room + 1e-9 for part, o in zip(held, chosen))


def test_the_state_decides_the_split_where_room_is_scarce():
    """By hand: b samples take 2b s and leave 10 - 2b on two fast replicas, 5b s and 24 - b on a slow one. Of 9 samples
    they do 4, 4 and 1, which leaves 2 + 2 + 23 = 27; for a state of 28 one goes over: 4, 3 and 2, in 10 s."""
    fast = [Option(b, 2.0 * b, 10 - 2 * b) for b in range(1, 5)]
    slow = [Option(b, 5.0 * b, 24 - b) for b in range(1, 6)]
    easy, scarce = (share([fast, slow], [2, 1], 9, state) for state in (27, 28))
    assert [[o.samples for o in row] for row in easy.chosen] == [[4, 4], [1]]
    assert [[o.samples for o in row] for row in scarce.chosen] == [[4, 3], [2]]
    assert scarce.parts == ((2 / 28, 4 / 28), (22 / 28,))
    assert share([fast, slow], [2, 1], 9, 33) is None


def test_a_pipeline_walked_by_hand():
    """Forward 3 and 5, backward 7 and 11, messages 2. Stage 1 has the first micro-batch from 5 to 21 and the second
    from then to 37; the first stage waits for its gradient until 39."""
    rows = [[[3.0, 5.0]] * 2, [[7.0, 11.0]] * 2, [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2]
    found = walk("1f1b", (0, 1), 2, rows, [2.0])
    assert found.end_s == 46
    assert found.last_s == ((39, 46), (26, 37))
    rows[1] = [[7.0, 11.0], [7.0, 4.0]]  # a smaller last micro-batch
    assert walk("1f1b", (0, 1), 2, rows, [2.0]).end_s == 39


@pytest.mark.parametrize("name", PLANNED)
def test_walks_agree_with_the_timeline_of_schedules(name):
    schedule = SCHEDULES[name]
    for stages, count in ((2, 4), (3, 6), (4, 8)):
        home = schedule.place(stages, schedule.rounds)
        forward = tuple(1.0 + 0.37 * (k * k % 5) for k in range(len(home)))
        backward = tuple(1.3 + 0.61 * (k % 3) for k in range(len(home)))
        weight = tuple(0.4 + 0.29 * (k % 4) for k in range(len(home)))
        hops = tuple(0.11 * (k + 1) for k in range(len(home) - 1))
        work = Work(home, count, forward, backward, weight, hops)
        whole = tuple(b + w for b, w in zip(backward, weight))
        between = [h if a != b else 0.0 for h, (a, b) in zip(hops, pairwise(home))]
        found = walk(name, home, count, [[row] * 2 for row in (forward, whole, backward, weight)], between)
        orders = schedule.orders(home, count)
        assert found.end_s == pytest.approx(makespan(work, orders))
        done = timeline(work, orders)
        for k, (start, end) in enumerate(found.last_s):
            assert (start, end) == pytest.approx(max(t for (op, c, _), t in done.items() if c == k and op in "BW"))


def test_parts_of_a_cluster_by_hand():
    """None, one or both of two equal devices with or without another one; of two equal nodes the order is nothing; of
    16 nodes powers of two, and of one node too."""
    assert {*parts_of(toy.cluster(2, 1), (0, 0, 1))} == {*map(frozenset, ({0}, {0, 1}, {2}, {0, 2}))}
    assert {*parts_of(toy.cluster(2, 2), (0,) * 4)} == {*map(frozenset, ({0}, {0, 1}, {0, 2}, {0, 2, 3}))}
    assert sorted(map(len, parts_of(toy.cluster(*[8] * 16), (0,) * 128))) == [1, 2, 4, 8, 16, 32, 64]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.sampled_from([(1, 1, 1), (1, 1, 4), (2, 2, 2)]), st.booleans(), st.booleans(),
       st.floats(0.4, 3.0))
def test_the_cheapest_recompute_that_fits(in_flight, degrees, first, last, gib):
    model = build({"layers": 3, "hidden": 64, "heads": 4, "vocab": 500, "max_seq_len": 64})
    job, where = toy.job(4, model), toy.cluster(1, 1)
    table = Tables(job, where).table((0,), 2)
    state = Tables(job, where).state_bytes(1, Pieces(*degrees))
    needs = [table.need_bytes(state, mode, in_flight, first=first, last=last, communicators=3)
             for mode in range(len(MODES))]
    table.capacity_bytes = int(gib * np.median(needs[1]))
    seconds, chosen = table.cheapest(state, in_flight, first=first, last=last, communicators=3)
    blocks = len(job.model.blocks)
    for lo, hi in combinations(range(blocks + 1), 2):
        fits = [m for m in range(len(MODES)) if needs[m][lo, hi] <= table.capacity_bytes]
        assert (seconds[lo, hi] < inf) == bool(fits)
        if fits:
            assert chosen[lo, hi] == fits[0]
            assert seconds[lo, hi] == table.forward_s[lo, hi] + table.backward_s[fits[0]][lo, hi]


@pytest.mark.parametrize("name", PLANNED)
def test_the_end_of_a_timeline_is_its_makespan(name):
    """With and without split backwards, hops and unequal chunks; orders that wait for each other never end."""
    rng, schedule = np.random.default_rng(5), SCHEDULES[name]
    for stages, count in ((2, 2), (3, 6), (4, 4)):
        home = schedule.place(stages, schedule.rounds)
        drawn = [tuple(row) for row in rng.random((4, len(home))).tolist()]
        work = Work(home, count, *drawn[:2], drawn[2] if schedule.splits else (), drawn[3][1:])
        orders = schedule.orders(home, count)
        assert makespan(work, orders) == max(end for _, end in timeline(work, orders).values())
        assert makespan(work, tuple(order[::-1] for order in orders)) == inf
