"""The interval layout, checked by moving real numbers: whatever the cuts, the owners end up with the exact sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from mixfleet.model.spec import Model
from mixfleet.plan import Pipeline, Plan, Sharding, groups
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SYNC
from mixfleet.program.layout import Layout, Move, Reduction

Columns = dict[tuple[int, int], np.ndarray]  # (rank, column) -> values


def zeros(layout: Layout, u: int) -> Columns:
    return {(r, c): np.zeros(layout.columns(u)[c].size, dtype=np.int64)
            for r in layout.places if u in layout.units_of_stage(layout.places[r].pipeline, layout.places[r].stage)
            for c in layout.held(u, r)}


def copy_moves(moves: tuple[Move, ...], source: Columns, target: Columns) -> None:
    for m in moves:
        target[m.dst, m.column][m.lo:m.hi] = source[m.src, m.column][m.lo:m.hi]


def reduce_into(reduction: Reduction, source: Columns, target: Columns) -> None:
    for adder, c, lo, hi, ranks in reduction.terms:
        sent = {m.src for m in reduction.sums if (m.dst, m.column, m.lo, m.hi) == (adder, c, lo, hi)}
        assert sent == set(ranks) - {adder}, "the moves must bring exactly the terms"
        target[adder, c][lo:hi] = sum(source[r, c][lo:hi] for r in ranks)
    copy_moves(reduction.copies, target, target)


def check_state_flow(plan: Plan, model: Model, micro_batches: int = 2) -> None:
    """Gradients of every rank flow to the optimizer owners, weights flow back: with integers, so exactly."""
    layout = Layout(plan, model)
    random = np.random.default_rng(3)
    for unit in layout.units:
        u = unit.number
        total: dict[int, np.ndarray] = {c: np.zeros(col.size, dtype=np.int64)
                                        for c, col in enumerate(layout.columns(u))}
        accumulated = zeros(layout, u)
        for _ in range(micro_batches):
            grads = {key: random.integers(-1000, 1000, size=v.shape) for key, v in accumulated.items()}
            for (_, c), g in grads.items():
                total[c] += g
            if layout.needed(REDUCE, u):
                step = zeros(layout, u)
                *inside, last = layout.reduces(u)
                for reduction in inside:
                    reduce_into(reduction, grads, grads)
                reduce_into(last, grads, step)
                grads = step
            for key, g in grads.items():
                accumulated[key] += g
        owned = zeros(layout, u)
        if layout.needed(SYNC, u):
            reduce_into(layout.sync(u), accumulated, owned)
        else:
            owned = accumulated
        weights = zeros(layout, u)
        for (r, c), values in owned.items():
            lo, hi = layout.piece("optimizer", u, c, layout.places[r].replica)
            assert (values[lo:hi] == total[c][lo:hi]).all(), (unit.name, r, c)
            weights[r, c][lo:hi] = values[lo:hi]  # the "updated weights" are the sums themselves
        if layout.needed(PUBLISH, u):
            copy_moves(layout.publish(u), {k: v.copy() for k, v in weights.items()}, weights)
        full = zeros(layout, u)
        for (r, c), values in weights.items():
            lo, hi = layout.piece("weights", u, c, layout.places[r].replica)
            assert (values[lo:hi] == total[c][lo:hi]).all()
            full[r, c][lo:hi] = values[lo:hi]
        if layout.needed(GATHER, u):
            first, *more = layout.gathers(u)
            copy_moves(first, weights, full)
            for moves in more:
                copy_moves(moves, {k: v.copy() for k, v in full.items()}, full)
        for (_, c), values in full.items():
            assert (values == total[c]).all()


@pytest.mark.parametrize(("n", "w", "g", "o"), [
    (1, 1, 1, 1), (4, 1, 1, 1), (4, 1, 1, 4), (4, 1, 4, 4), (4, 4, 4, 4), (4, 2, 2, 2), (6, 3, 3, 3), (8, 2, 2, 4),
    (8, 1, 2, 4), (7, 3, 3, 3), (5, 1, 2, 5), (7, 2, 3, 5), (6, 1, 1, 2)])
def test_any_degrees_bring_exact_sums_to_the_owners(n: int, w: int, g: int, o: int) -> None:
    for tied in (False, True):
        check_state_flow(toy.data_parallel(n, w, g, o), toy.model(tied=tied))


def mixed_shapes() -> tuple[Pipeline, ...]:
    """A two-stage pipeline with tensor degrees 2 and 1, a single device, and a tensor group of 4."""
    return (toy.pipeline((0, 2, 5), ((0, 1), (2,)), samples=2, tensor=(2, 1)),
            toy.pipeline((0, 5), ((3,),), samples=2),
            toy.pipeline((0, 5), ((4, 5, 6, 7),), samples=2, tensor=(4,)))


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 3), (1, 3, 3), (1, 2, 3), (3, 3, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_replicas_of_unequal_shape_and_tensor_degree(degrees: tuple[int, int, int], tied: bool) -> None:
    w, g, o = degrees
    check_state_flow(Plan(pipelines=mixed_shapes(), sharding=Sharding(weights=w, gradients=g, optimizer=o)),
                     toy.model(tied=tied))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pipelines, rank = [], 0
    for _ in range(draw(st.integers(1, 3))):
        replicas = draw(st.integers(1, 3))
        inner = sorted(draw(st.sets(st.integers(1, 4), max_size=2)))
        cuts = (0, *inner, 5)
        degrees = tuple(draw(st.sampled_from([1, 2, 4])) for _ in cuts[1:])
        devices = []
        for t in degrees:
            devices.append(tuple(range(rank, rank + t * replicas)))
            rank += t * replicas
        pipelines.append(toy.pipeline(cuts, tuple(devices), samples=2, tensor=degrees, replicas=replicas))
    n = sum(p.replicas for p in pipelines)
    w, g, o = sorted(draw(st.integers(1, n)) for _ in range(3))
    shares = draw(st.just(()) | st.tuples(*[st.sampled_from([0, 1, 1, 2, 3, 7])] * n).filter(sum))
    k = draw(st.sampled_from([0, 2, 3]))
    hierarchical = k if k and all(len(m) <= k or len(m) % k == 0 for d in (w, g) for m in groups(n, d)) else 0
    plan = Plan(pipelines=tuple(pipelines), sharding=Sharding(weights=w, gradients=g, optimizer=o, shares=shares,
                                                              hierarchical=hierarchical))
    empty = any(shares and d > 1 and not sum(shares[k] for k in group) for d in (w, g, o) for group in groups(n, d))
    return plan.replace(sharding=plan.sharding.replace(shares=())) if empty else plan


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans())
def test_random_plans_bring_exact_sums_to_the_owners(plan: Plan, tied: bool) -> None:
    check_state_flow(plan, toy.model(tied=tied))


@settings(max_examples=60, deadline=None)
@given(plans(), st.booleans())
def test_pieces_partition_every_column_once_per_group(plan: Plan, tied: bool) -> None:
    layout = Layout(plan, toy.model(tied=tied))
    for unit in layout.units:
        assert sum(c.size for c in layout.columns(unit.number)) == unit.elements
        for c, column in enumerate(layout.columns(unit.number)):
            for kind in ("weights", "gradients", "optimizer"):
                if kind == "gradients" and not layout.needed(REDUCE, unit.number):
                    continue  # whole on every rank until hop 2
                for group in {layout.group(kind, k) for k in range(len(plan.replicas))}:
                    pieces = sorted(layout.piece(kind, unit.number, c, k) for k in group)
                    assert [p[0] for p in pieces] == [0, *(p[1] for p in pieces[:-1])]
                    assert pieces[-1][1] == column.size


@settings(max_examples=40, deadline=None)
@given(plans(), st.booleans())
def test_every_element_is_in_the_norm_once(plan: Plan, tied: bool) -> None:
    layout = Layout(plan, toy.model(tied=tied))
    for unit in layout.units:
        for c, column in enumerate(layout.columns(unit.number)):
            times = np.zeros(column.size, np.int64)
            for post, place in layout.places.items():
                if c in layout.held(unit.number, post):
                    lo, hi = layout.measures(unit.number, c, post)
                    a, b = layout.piece("optimizer", unit.number, c, place.replica)
                    assert lo == hi or a <= lo < hi <= b
                    times[lo:hi] += 1
            assert (times == 1).all(), (unit.number, c)


@settings(max_examples=40, deadline=None)
@given(plans(), st.booleans())
def test_slices_and_segments_name_the_same_elements(plan: Plan, tied: bool) -> None:
    """A rank's buffer, filled tensor by tensor, reads the same through columns."""
    layout = Layout(plan, toy.model(tied=tied))
    for rank, place in layout.places.items():
        for u in layout.units_of_stage(place.pipeline, place.stage):
            for c in layout.held(u, rank):
                size = layout.columns(u)[c].size
                parts = list(layout.slices(u, c, 0, size))
                assert sum(hi - lo for _, lo, hi, _ in parts) == size
                lo, hi = size // 3, size - size // 4
                inner = [(k, a, b) for k, a, b, _ in layout.slices(u, c, lo, hi)]
                assert sum(b - a for _, a, b in inner) == hi - lo
                assert sum(n for _, _, n in layout.segments(u, c, rank)) == size
            ends = sorted((at, at + n) for c in layout.held(u, rank) for _, at, n in layout.segments(u, c, rank))
            if not layout.units[u].elements:
                continue  # the only tensor of the embedding is tied, and lives in a unit of its own
            assert [a for a, _ in ends] == [0, *(b for _, b in ends[:-1])]
            assert ends[-1][1] == layout.compute_elements(u, rank)


def test_equal_tensor_degrees_need_one_segment_per_column() -> None:
    plan = Plan(pipelines=(toy.pipeline((0, 5), (tuple(range(8)),), samples=1, tensor=(2,), replicas=4),))
    layout = Layout(plan, toy.model())
    assert [c.size for c in layout.columns(1)] == [60 + 60, 60 + 60, 7 + 15]
    assert layout.segments(1, 0, 0) == ((0, 0, 120),)
    assert layout.segments(1, 2, 1) == ((0, 120, 22),)


def test_mics_groups_are_those_of_the_paper() -> None:
    """S42: n=8, p=4 gives partition groups {0..3}, {4..7} and replication groups {0,4}, {1,5}, {2,6}, {3,7}."""
    layout = Layout(toy.data_parallel(8, 4, 4, 4), toy.model())
    assert layout.comms(GATHER, 1, 2)[0].ranks == (0, 1, 2, 3)
    assert layout.comms(REDUCE, 1, 6)[0].ranks == (4, 5, 6, 7)
    (hop2,) = layout.comms(SYNC, 1, 6)
    assert (hop2.op, hop2.ranks) == ("all_reduce", (2, 6))
    assert hop2.elements == layout.units[1].elements // 4
    assert not layout.needed(PUBLISH, 1)


@pytest.mark.parametrize(("degrees", "sent"), [
    # What all 4 ranks send in one step, in units of N = 262 elements: gather, hop 1, hop 2, publish
    ((1, 1, 1), (0, 0, 2 * 3, 0)),          # DDP: an all-reduce moves 2 (n-1) N
    ((1, 1, 4), (0, 0, 3, 3)),              # ZeRO-1: reduce-scatter, all-gather
    ((1, 4, 4), (0, 3, 0, 3)),              # ZeRO-2
    ((4, 4, 4), (3, 3, 0, 0)),              # ZeRO-3
    ((2, 2, 2), (2 * 1, 2 * 1, 2 * 1, 0)),  # MiCS: two groups of p=2; hop 2 all-reduces N/2 between 2 ranks, twice
])
def test_bytes_follow_the_formulas(degrees: tuple[int, int, int], sent: tuple[int, ...]) -> None:
    layout = Layout(toy.data_parallel(4, *degrees), toy.model())
    n = layout.units[1].elements
    assert n == 7 + 120 + 120 + 15
    for op, times in zip((GATHER, REDUCE, SYNC, PUBLISH), sent):
        moved = sum(m.hi - m.lo for m in layout.moves(op, 1)) if layout.needed(op, 1) else 0
        assert moved == times * n, op


def test_nested_degrees_keep_publish_among_those_who_share_a_piece() -> None:
    """AMSP's 4/4/8 of 8: the optimizer eighth of a rank lies in its weight quarter, so publishing pairs two ranks."""
    layout = Layout(toy.data_parallel(8, 4, 4, 8), toy.model())
    for rank in range(8):
        (comm,) = layout.comms(PUBLISH, 1, rank)
        assert comm.ranks == (rank % 4, rank % 4 + 4)


def test_shares_cut_in_proportion() -> None:
    """Block 1 has 262 elements; shares of 5, 2 and 0 end at floor(262 * 5 / 7) = 187, and at 262."""
    plan = toy.data_parallel(3, 3, 3, 3)
    layout = Layout(plan.replace(sharding=plan.sharding.replace(shares=(5, 2, 0))), toy.model())
    for kind in ("weights", "gradients", "optimizer"):
        assert [layout.piece(kind, 1, 0, k) for k in range(3)] == [(0, 187), (187, 262), (262, 262)]
    assert not layout.needed(PUBLISH, 1)
    sent = {rank: sum(m.hi - m.lo for m in layout.gather(1) if m.src == rank) for rank in range(3)}
    assert sent == {0: 2 * 187, 1: 2 * 75, 2: 0}


def test_equal_shares_are_no_shares() -> None:
    plan = toy.data_parallel(4, 2, 2, 4)
    layout, shared = (Layout(plan.replace(sharding=plan.sharding.replace(shares=s)), toy.model())
                      for s in ((), (3, 3, 3, 3)))
    assert not shared.irregular
    assert layout.moves(PUBLISH, 1) == shared.moves(PUBLISH, 1)


@pytest.mark.parametrize(("p", "k"), [(4, 2), (6, 3), (8, 2), (8, 4)])
def test_hierarchical_moves_leave_a_node_once(p: int, k: int) -> None:
    """S42 (b): node egress of a gather is (p-k) M/p; sent directly, it is k times as much. Hop 1 is the same."""
    flat = toy.data_parallel(p, p, p, p)
    staged = flat.replace(sharding=flat.sharding.replace(hierarchical=k))
    for plan, times in ((flat, k), (staged, 1)):
        layout = Layout(plan, toy.model())
        for op in (GATHER, REDUCE):
            out = [sum(m.hi - m.lo for m in layout.moves(op, 1) if m.src // k == node != m.dst // k)
                   for node in range(p // k)]
            assert sum(out) == times * (p // k - 1) * layout.units[1].elements, op
            assert max(out) - min(out) <= times * p
        check_state_flow(plan, toy.model(tied=True))


def test_groups_of_any_size() -> None:
    assert groups(16, 8) == (range(8), range(8, 16))
    assert groups(7, 3) == (range(4), range(4, 7))
    assert groups(3, 3) == (range(3),)
    assert groups(5, 1) == tuple(range(i, i + 1) for i in range(5))
