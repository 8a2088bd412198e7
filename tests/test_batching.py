"""Samples of unequal length: their lengths, how they are shared out, and what a prediction says about it."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.batching import Batcher, Bin, Curve, Micro, Parts, steps_of
from mixfleet.cluster import BlockTime, Cluster, Link, Node
from mixfleet.cost.clock import held_cost
from mixfleet.cost.kernels import BlockCost, block_cost
from mixfleet.errors import InputError
from mixfleet.job import Data, Job, Lengths
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.samples import open_sizes
from mixfleet.sim import predict
from mixfleet.sim.interpreter import play
from run_pool import CLUSTER, CPU, job, pipe, plan

TAIL = Lengths(kind="lognormal", median=48, sigma=0.8, least=4)
FAST = CPU.replace(name="fast", flops={"fp32": 4e10, "fp64": 2e10}, vector_flops=4e10, memory_Bps=4e10)
LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)
CPUS = Cluster(name="sixteen", nodes=(Node(name="n", devices=(CPU,) * 16, link=LINK, nic=LINK),))
MIXED = Cluster(name="mixed", nodes=(Node(name="n", devices=(FAST, CPU), link=LINK, nic=LINK),))


def long_job(batch: int = 16, lengths: Lengths | None = TAIL) -> Job:
    figures = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "max_seq_len": 256}
    return Job(name="tail", model=build(figures), seq_len=256, global_batch=batch, precision="fp32", seed=3,
               data=Data(lengths=lengths))


def two(batching: str = "padded", samples: tuple[int, int] = (12, 4), micro_batch: int = 2, degree: int = 1) -> Plan:
    return Plan(batching=batching, sharding=Sharding(  # type: ignore[arg-type]
        weights=degree, gradients=degree, optimizer=degree), pipelines=tuple(
        Pipeline(stages=(Stage(blocks=(0, 4), devices=(r,)),), samples=n, micro_batch=micro_batch)
        for r, n in enumerate(samples)))


# --- how long samples are ---------------------------------------------------------------------------------------------


def test_lengths_are_drawn_by_sample_alone() -> None:
    sizes = open_sizes(long_job())
    assert sizes is not None
    whole = sizes.of(np.arange(20_000))
    assert np.array_equal(sizes.of(np.array([12_345, 3])), whole[[12_345, 3]])
    assert whole.min() == 4
    assert whole.max() == 256
    assert np.median(whole) == pytest.approx(48, abs=1)
    assert np.quantile(np.log(whole), 0.84) - np.log(48) == pytest.approx(0.8, abs=0.05)
    assert steps_of(long_job()) == steps_of(long_job().replace(steps=7))
    assert steps_of(long_job()) != steps_of(long_job().replace(seed=4))
    assert steps_of(long_job(lengths=None)) == []


def test_a_corpus_is_cut_by_its_lengths(tmp_path: Path) -> None:
    from mixfleet.run.data import open_batches

    (tmp_path / "text").write_bytes(bytes(range(30)))
    (tmp_path / "lengths").write_text("3\n8\n\n1\n7\n")
    data = Data(kind="text", path="text", lengths=Lengths(kind="file", path="lengths"))
    figures = {"layers": 1, "hidden": 4, "heads": 1, "vocab": 256, "max_seq_len": 8}
    work = job(4, data=data, figures=figures)
    batches = open_batches(work, tmp_path)
    numbers = batches.samples(0, 0, 4).tolist()
    starts, lengths = {0: 0, 1: 3, 2: 11, 3: 12}, {0: 3, 1: 8, 2: 1, 3: 7}
    assert batches.lengths(0) == tuple(lengths[i] for i in numbers)
    tokens, targets = batches.rows(0, [[2, 0], [1]], 12)
    row = [t for i in (numbers[2], numbers[0]) for t in range(starts[i], starts[i] + lengths[i])]
    assert tokens[0].tolist() == row + [0] * (12 - len(row))
    assert targets[0].tolist() == [t + 1 for t in row] + [-100] * (12 - len(row))
    apart, _ = batches.rows(0, [[2, 0]], 16, (9, 7))  # each sample in a segment
    second = row[lengths[numbers[2]]:]
    assert apart[0].tolist() == [*row[:-len(second)], *[0] * (9 - len(row) + len(second)), *second, *[0] * (
        7 - len(second))]
    tokens, targets = batches.batch(0, 1, 2)
    start, n = starts[numbers[1]], lengths[numbers[1]]
    assert targets[0].tolist() == list(range(start + 1, start + n + 1)) + [-100] * (8 - n)
    drawn = work.replace(data=data.replace(lengths=Lengths(kind="uniform", least=2)))
    cut = open_sizes(drawn, tmp_path)
    assert cut is not None
    every = cut.of(np.arange(len(cut)))
    assert every.sum() == 29  # each token but the first is a target once
    assert all(2 <= n <= 8 for n in every[:-1])


@pytest.mark.parametrize(("text", "says"), [
    ("3\nx\n", r"lengths:2: 'x' is not a length; give one whole number per line"),
    ("3\n\n9\n", r"lengths:3: 9 is not a length; seq_len is 8, so lengths are 1 to 8"),
    ("", "holds no lengths"), ("8\n8\n8\n8\n", "its lengths need 33 tokens; .*text holds 30")])
def test_bad_files_of_lengths(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(30)))
    (tmp_path / "lengths").write_text(text)
    data = Data(kind="text", path=str(tmp_path / "text"),
                lengths=Lengths(kind="file", path=str(tmp_path / "lengths")))
    with pytest.raises(InputError, match=says):
        open_sizes(job(4, data=data))
    with pytest.raises(InputError, match="unknown file of lengths 'lenghts'; did you mean 'lengths'"):
        open_sizes(job(4, data=data.replace(lengths=Lengths(kind="file", path=str(tmp_path / "lenghts")))))


def test_bad_distributions() -> None:
    with pytest.raises(InputError, match="median is 0; kind 'lognormal' needs one of at least 1"):
        Lengths(kind="lognormal")
    with pytest.raises(InputError, match="path is empty"):
        Lengths(kind="file")
    with pytest.raises(InputError, match="most is 9; seq_len is 8, the longest"):
        open_sizes(job(data=Data(lengths=Lengths(kind="uniform", most=9))))
    with pytest.raises(InputError, match="least is 9; the longest sample has 8"):
        open_sizes(job(data=Data(lengths=Lengths(kind="uniform", least=9))))


def test_a_job_file_keeps_them(tmp_path: Path) -> None:
    work = long_job(lengths=Lengths(kind="file", path=str(tmp_path / "far" / "lengths.npy")))
    (tmp_path / "far").mkdir()
    np.save(tmp_path / "far" / "lengths.npy", np.array([5, 256, 17]))
    work.save(tmp_path / "j.yaml")
    assert "path: far/lengths.npy" in (tmp_path / "j.yaml").read_text()
    found = Job.load(tmp_path / "j.yaml")
    assert found == work
    assert sorted(set(steps_of(found, 1)[0])) == [5, 17, 256]


# --- who computes what ------------------------------------------------------------------------------------------------


def batcher(batching: str, bins: list[Bin], *, in_step: bool = False) -> Batcher:
    """One of these replicas, in place of those that a plan makes."""
    made = Batcher(two(batching), long_job(), MIXED)
    at = 0
    made.bins, made._naive, made._in_step, made._seq_len = bins, [], in_step, bins[0].room
    for b in bins:
        made._naive.append([])
        for _ in range(b.micro_batches):
            made._naive[-1].append((at,))
            at += 1
    return made


def brute(batching: str, bins: list[Bin], lengths: tuple[int, ...]) -> float:
    """Seconds of the best of all ways to lay samples into micro-batches."""
    slots = [(r, m) for r, b in enumerate(bins) for m in range(b.micro_batches)]
    best = float("inf")
    for where in product(range(len(slots)), repeat=len(lengths)):
        seconds = [0.0] * len(bins)
        fits = True
        for k, (r, _) in enumerate(slots):
            places = [i for i, w in enumerate(where) if w == k]
            micro = bins[r].shaped(places, lengths, batching)  # type: ignore[arg-type]
            fits &= micro.positions <= bins[r].room
            squares = sum(n * n for n in micro.segments) or len(micro.rows) * micro.width**2
            curve = bins[r].curve
            seconds[r] += curve.fixed_s + curve.position_s * micro.positions + curve.square_s * squares
        if fits:
            best = min(best, max(seconds))
    return best


CURVES = [Curve(0.3, 1.0, 0.05), Curve(0.1, 2.3, 0.02), Curve(0.7, 0.6, 0.11)]


@pytest.mark.parametrize("batching", ["packed", "bucketed"])
@pytest.mark.parametrize(("counts", "room", "unit", "lengths"), [
    ((2, 1), 10, 1, (10, 7, 1)), ((2, 2), 8, 2, (3, 8, 1, 5)), ((1, 2, 2), 9, 1, (2, 9, 4, 4, 1)),
    ((1, 1, 1), 12, 3, (11, 1, 6)), ((3, 1), 7, 1, (7, 6, 5, 1))])
def test_small_steps_are_the_best_there_is(batching: str, counts: tuple[int, ...], room: int, unit: int,
                                           lengths: tuple[int, ...]) -> None:
    room = -(-room // unit) * unit
    bins = [Bin(CURVES[k], n, room, unit) for k, n in enumerate(counts)]
    found = batcher(batching, bins).step(lengths)
    assert max(found.seconds) == pytest.approx(brute(batching, bins, lengths), rel=1e-12)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 16), min_size=6, max_size=24), st.sampled_from(["packed", "bucketed"]),
       st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]))
def test_never_worse_than_in_order_and_no_sample_lost(lengths: list[int], batching: str, in_step: bool, unit: int,
                                                      stages: int) -> None:
    count = len(lengths)
    shares = (count // 2, count // 3, count - count // 2 - count // 3)
    bins = [Bin(CURVES[k], n, 16, unit, stages) for k, n in enumerate(shares)]
    made = batcher(batching, bins, in_step=in_step)
    found = made.step(tuple(lengths))
    assert found == batcher(batching, bins, in_step=in_step).step(tuple(lengths))
    used = [p for one in found.micro for m in one for row in m.rows for p in row]
    assert sorted(used) == list(range(count))
    for one, b in zip(found.micro, bins):
        assert len(one) == b.micro_batches
        for m in one:
            assert m.positions <= b.room
            assert m.width % unit == 0
            assert batching != "packed" or sum(m.segments) == m.width
            assert all(sum(lengths[p] for p in row) <= m.width for row in m.rows)
    naive = [[b.shaped(places, lengths, batching) for places in one]  # type: ignore[arg-type]
             for one, b in zip(made._naive, bins)]
    assert made._makespan(found.micro) <= made._makespan(naive) * (1 + 1e-12)
    assert found.tokens == sum(lengths)


def test_a_step_by_hand() -> None:
    """1 s per position and 3 s: of samples of 6, 4 and 2 tokens 6 + 4 take the fast one 10 s, and 2 the slow one 6 s;
    6 + 2 there and 4 here would take 12 s."""
    bins = [Bin(Curve(0, 1, 0), 2, 6, 1), Bin(Curve(0, 3, 0), 1, 6, 1)]
    found = batcher("packed", bins).step((4, 2, 6))
    assert found.seconds == (10, 6)
    assert found.micro == ((Micro(((2,),), 6, (6,)), Micro(((0,),), 4, (4,))), (Micro(((1,),), 2, (2,)),))
    assert found.padding == 0
    assert found.imbalance == pytest.approx(10 / 8 - 1)
    # In buckets 4 and 2 in rows of 4, beside 6, take 14 s; a third replica would need 18 s for 2, and does nothing.
    bucketed = batcher("bucketed", [Bin(Curve(0, 1, 0), 2, 8, 1), Bin(Curve(0, 9, 0), 1, 8, 1)]).step((4, 2, 6))
    assert bucketed.micro == ((Micro(((0,), (1,)), 4), Micro(((2,),), 6)), (Micro(((),), 1),))
    assert bucketed.padding == pytest.approx(3 / 15)


def test_curves_split_what_grows_with_the_square() -> None:
    """Doubling the length of rows of equal positions adds attention only; the curve says what the cost model says."""
    work = long_job()
    made = Batcher(two(micro_batch=4), work, MIXED)
    fast, slow = made.bins
    assert slow.curve.position_s == pytest.approx(4 * fast.curve.position_s, rel=0.05)
    for rows, width in ((4, 256), (8, 128), (4, 128)):
        cost = sum(sum(block_cost(b, rows, width, 1, CPU, work)[:2]) for b in work.model.blocks)
        assert slow.curve.of(rows * width, rows * width**2) == pytest.approx(cost, rel=1e-6)
    assert slow.curve.square_s > 0


def test_room_is_that_of_who_asks() -> None:
    """Pipelines that are cut alike share what is known of their parts, but not the size of their micro-batches."""
    parts = Parts.of(pipe((0, 5), (0, 1), samples=4, micro_batch=1, context=2), 8)
    assert [parts.rows(6, room) for room in (8, 16, 32, 16)] == [1, 2, 4, 2]
    assert [parts.rows(4, room) for room in (16, 8)] == [4, 2]


def test_last_bits_of_costs_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank arranges a step for itself, and all must agree, though the last bits of a predicted time depend on
    what else a process has asked."""
    noise = np.random.default_rng(5)

    def noisy(*args: object, **named: object) -> BlockCost:
        cost = held_cost(*args, **named)  # type: ignore[arg-type]
        return cost._replace(forward_s=cost.forward_s * (1 + noise.normal() * 1e-13))

    exact = Batcher(two("bucketed"), long_job(), MIXED)
    monkeypatch.setattr("mixfleet.batching.held_cost", noisy)
    assert Batcher(two("bucketed"), long_job(), MIXED).bins == exact.bins


def test_attention_of_packed_rows_is_of_each_sample() -> None:
    work = long_job()
    layer = work.model.blocks[1]
    row = block_cost(layer, 1, 128, 1, CPU, work)
    assert block_cost(layer, 1, 128, 1, CPU, work, segments=(128,)) == row
    halves = block_cost(layer, 1, 128, 1, CPU, work, segments=(64, 64))
    two_rows = block_cost(layer, 2, 64, 1, CPU, work)
    assert halves.forward_s < row.forward_s
    assert halves.forward_s == pytest.approx(two_rows.forward_s + 20e-6)  # one more kernel is issued


def test_measured_blocks_serve_other_lengths() -> None:
    """Three times slower than modelled at 256 positions is three times slower at 64, and in packed rows."""
    work = long_job()
    layer, bare = work.model.blocks[1], block_cost(work.model.blocks[1], 1, 256, 1, CPU, work)
    seen = CPU.replace(block_times=(BlockTime(block=layer.kind, micro_batch=1, seq_len=256, precision="fp32",
                                              forward_s=3 * bare.forward_s, backward_s=5 * bare.backward_s),))
    for shape in ((4, 64, 1), (1, 64, 1)):
        plain = block_cost(layer, *shape, CPU, work)
        found = block_cost(layer, *shape, seen, work)
        assert found.forward_s == pytest.approx(3 * plain.forward_s)
        assert found.backward_s == pytest.approx(5 * plain.backward_s)
    packed = block_cost(layer, 1, 256, 1, seen, work, segments=(100, 156))
    assert packed.forward_s == pytest.approx(
        3 * block_cost(layer, 1, 256, 1, CPU, work, segments=(100, 156)).forward_s)


# --- parts of sequences -----------------------------------------------------------------------------------------------


def parts_pipe(shares: tuple[int, ...], tensor: int = 1, micro_batch: int = 1, samples: int = 6) -> Pipeline:
    return Pipeline(samples=samples, micro_batch=micro_batch, context=len(shares), context_shares=shares, stages=(
        Stage(blocks=(0, 4), devices=tuple(range(len(shares) * tensor)), tensor=tensor),))


def test_samples_are_cut_over_parts_by_hand() -> None:
    """Of 8 cells of two positions, shares 3:1 give 6 and 2. By Webster's method they go to parts 0 0 1 0 0 0 1 0. Of
    samples of 6, 4 and 2 positions the first has cells 0 0 1, the second 0 0, the third 0."""
    pipe = parts_pipe((3, 1))
    parts = Parts.of(pipe, 16)
    assert parts.dealt(range(11)).tolist() == [[0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8], [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert parts.least == 6
    row = Micro(((2, 0, 1),), 12, (6, 4, 2))
    assert parts.cut(row) == [Micro(((2, 0, 1),), 10, (6, 4, 2), 12, (4, 4, 2)), Micro(
        ((2, 0, 1),), 2, (6, 4, 2), 12, (2, 0, 0))]
    spans = (((0, 2), (4, 6), (6, 8), (8, 10), (10, 11), (11, 12)), ((2, 3), (3, 4)))
    assert parts.spans(row) == parts.spans(parts.cut(row)[1]) == spans
    assert parts.spans(Micro(((0,), (1,)), 10)) == (((0, 4), (6, 10)), ((4, 5), (5, 6)))
    assert parts.spans(Micro(((0,),), 16)) == pipe.spans(16)
    assert Parts.of(parts_pipe((3, 1), tensor=4), 64).unit == 4  # each of four ranks has a position of a cell
    # Two rows of 16 positions are room for 12 and 4 of each row's cells. Rows of 6 take 2 and 1: four of them.
    assert [parts.rows(width, 32) for width in (6, 8, 10, 16)] == [4, 4, 3, 2]
    one = Bin(CURVES[0], 1, 32, 2, parts=parts)
    assert one.shaped([1, 0], (5, 3), "packed") == Micro(((1, 0),), 10, (4, 6))
    assert one.shaped([0], (1,), "packed") == Micro(((0,),), 6, (2, 4))  # so that nobody has nothing
    assert one.shaped([], (), "packed") == Micro(((),), 6, (6,))
    assert one.shaped([1], (5, 3), "bucketed") == Micro(((1,),), 6)
    assert one.shaped([], (), "bucketed") == Micro(((),), 6)


@settings(max_examples=50)
@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.sampled_from([1, 2, 4]), st.integers(1, 3),
       st.sampled_from(["packed", "bucketed"]))
def test_every_part_has_its_share_and_room(data: st.DataObject, shares: list[int], tensor: int, micro_batch: int,
                                           batching: str) -> None:
    """Every position of a row is in one part, every part has some, no more than of full rows of `seq_len`, and as many
    for every rank of a tensor group; and of every sample it sees keys in exact proportion to its positions."""
    seq_len = 96
    pipe = parts_pipe(tuple(shares), tensor, micro_batch)
    work = long_job(6).replace(seq_len=seq_len)
    if not all(b > a for spans in pipe.spans(seq_len) for a, b in spans):
        return
    made = Batcher(Plan(pipelines=(pipe,), batching=batching), work, CPUS)  # type: ignore[arg-type]
    lengths = tuple(data.draw(st.lists(st.integers(1, seq_len), min_size=6, max_size=6)))
    batch = made.step(lengths)
    assert len(batch.micro) == pipe.context
    parts = Parts.of(pipe, seq_len)
    for copies in zip(*batch.micro, strict=True):
        whole = copies[0].whole
        assert {m.whole for m in copies} == {whole}
        assert {m.rows for m in copies} == {copies[0].rows}
        assert len(copies[0].rows) * whole <= micro_batch * seq_len
        bounds = np.cumsum((0, *(copies[0].segments or (whole,))))
        spans = parts.spans(copies[0])
        assert sorted(q for part in spans for a, b in part for q in range(a, b)) == list(range(whole))
        for k, (micro, part) in enumerate(zip(copies, spans, strict=True)):
            assert micro.width == sum(b - a for a, b in part)
            assert 0 < micro.positions <= micro_batch * pipe.tokens(seq_len, k)
            assert micro.width % tensor == 0
            for n, (start, end) in enumerate(pairwise(bounds)):
                mine = [q - start for a, b in part for q in range(a, b) if start <= q < end]
                assert 2 * sum(q + 1 for q in mine) == len(mine) * (end - start + 1)
                assert not micro.segments or micro.own[n] == len(mine)
    used = [p for m in batch.micro[0] for row in m.rows for p in row]
    assert sorted(used) == list(range(6))


@given(st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_every_prefix_of_a_row_is_shared_out_evenly(cells: list[int]) -> None:
    parts = Parts(2, tuple(cells))
    counts = parts.dealt(range(3 * sum(cells) + 1))
    assert (np.diff(counts) >= 0).all()
    assert (counts.sum(0) == np.arange(3 * sum(cells) + 1)).all()
    assert (counts[:, sum(cells)] == cells).all()
    exact = np.outer(cells, np.arange(3 * sum(cells) + 1)) / sum(cells)
    assert np.abs(counts - exact).max() < (1.0001 if len(cells) < 4 else 1.5)


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_parts_of_unequal_samples_are_predicted(batching: str) -> None:
    """Folded or not; every block takes as long as on the part that takes longest; keys and values are those of rows."""
    work = long_job()
    shared = Plan(batching=batching, pipelines=(parts_pipe((3, 1), micro_batch=2, samples=16),))  # type: ignore[arg-type]
    padded = shared.replace(batching="padded")
    found, before = predict(shared, work, MIXED), predict(padded, work, MIXED)
    assert found.step_s < 0.6 * before.step_s
    assert found.batches is not None
    assert found.batches.padding < 0.5 * before.batches.padding  # type: ignore[union-attr]
    assert [d.peak_bytes for d in found.devices] == [d.peak_bytes for d in before.devices]
    batch = Batcher(shared, work, MIXED).step(steps_of(work, 1)[0])
    layout = Layout(shared, work.model)
    program = lower(shared, work.model, layout)
    one, other = (play(program, shared, work, MIXED, layout, fold=fold, batch=batch) for fold in (True, False))
    assert one.end_ns == other.end_ns
    for row in other.rows:
        for action, pieces in zip(row.actions, row.parts):
            if action.op == "F":
                seconds = 0.0
                for block in work.model.blocks[action.lo:action.hi]:
                    seconds += max(block_cost(
                        block, len(micro.rows), micro.width, 1, device, work, context=micro.whole / micro.width,
                        segments=micro.own, wholes=micro.segments if micro.own else ()).forward_s
                        for micro, device in zip((copy[action.mb] for copy in batch.micro), (FAST, CPU)))
                assert pieces[0].ns == round(seconds * 1e9)
    keys = 2 * 4 * 8 * 4  # keys and values, heads, width, bytes
    rows = [[len(m.rows) * m.width for m in copy] for copy in batch.micro]
    assert found.sent_bytes is not None
    for rank in (0, 1):  # two layers; its own forward, the gradients of the other's backward
        assert found.sent_bytes[str(rank)]["K"] == 2 * keys * (sum(rows[rank]) + sum(rows[1 - rank]))


# --- what a prediction says -------------------------------------------------------------------------------------------


def test_a_long_tail_is_predicted() -> None:
    """S57: less waste and shorter steps than in order; time, spread, waste and imbalance are those of the steps."""
    found = {b: predict(two(b), long_job(), MIXED) for b in ("padded", "bucketed", "packed")}
    uses = {b: p.batches for b, p in found.items()}
    mean = np.mean([sum(one) for one in steps_of(long_job())])
    for batching, use in uses.items():
        assert use is not None
        assert use.tokens == pytest.approx(mean)
        assert found[batching].tokens_per_s == pytest.approx(mean / found[batching].step_s)
        assert use.least_s <= use.step_s <= use.most_s
    assert uses["padded"].padding == pytest.approx(1 - mean / (16 * 256))
    assert uses["padded"].deviation_s == 0
    assert uses["packed"].padding == 0
    assert uses["packed"].deviation_s > 0
    assert uses["bucketed"].padding < 0.5 * uses["padded"].padding
    assert uses["packed"].imbalance < 0.05
    assert max(found["packed"].step_s, found["bucketed"].step_s) < 0.5 * found["padded"].step_s
    assert [d.peak_bytes for d in found["packed"].devices] == [d.peak_bytes for d in found["padded"].devices]
    assert predict(two(), long_job(lengths=None), MIXED).batches is None


@pytest.mark.parametrize("batching", ["bucketed", "packed"])
def test_who_shares_experts_goes_in_step(batching: str) -> None:
    """Forwards with layers of experts take as long on both devices as on the slower with its own rows of that
    micro-batch, folded or not; a replica that has experts alone waits for nobody."""
    figures = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "max_seq_len": 256, "experts": 4,
               "experts_per_token": 2, "expert_ffn": 48}
    work = long_job(8).replace(model=build(figures))
    shared = two(batching, (4, 4), 1).replace(expert=2)
    batcher = Batcher(shared, work, MIXED)
    assert batcher._in_step
    batch = batcher.step(steps_of(work, 1)[0])
    assert [m.width for m in batch.micro[0]] != [m.width for m in batch.micro[1]]

    def layers(this: Plan, *, fold: bool) -> list[list[int]]:
        layout = Layout(this, work.model)
        played = play(lower(this, work.model, layout), this, work, MIXED, layout, fold=fold, batch=batch)
        return [[sum(part.ns for part in parts) for a, parts in zip(row.actions, row.parts) if a.op == "F"]
                for row in played.rows]

    fast, slow = layers(shared, fold=True)
    assert fast == slow
    assert [fast, slow] == layers(shared, fold=False)
    alone = layers(shared.replace(expert=1), fold=True)
    assert alone[0] != alone[1]
    assert all(a > max(both) for a, both in zip(fast, zip(*alone), strict=True))  # and rows travel


def test_flops_are_those_of_real_tokens() -> None:
    """A job whose samples all have 256 tokens, drawn or not, is one and the same; half as long is less than half."""
    whole, drawn = (predict(two(), long_job(lengths=n), MIXED) for n in (
        None, Lengths(kind="uniform", least=256)))
    assert drawn.mfu == pytest.approx(whole.mfu)
    assert drawn.step_s == whole.step_s
    half = predict(two(), long_job(lengths=Lengths(kind="uniform", least=128, most=128)), MIXED)
    flops = [sum(op.flops.at(1, n) + op.backward_flops.at(1, n) for b in long_job().model.blocks for op in b.ops)
             for n in (128, 256)]
    assert half.mfu / whole.mfu == pytest.approx(flops[0] / flops[1])
    assert flops[0] / flops[1] < 0.5


def test_what_does_not_go_is_said() -> None:
    def reason(this: Plan, work: Job) -> str:
        return why_not(this, work, CLUSTER) or ""

    tail, even = job(data=Data(lengths=Lengths(kind="uniform"))), job()
    assert "all samples have seq_len tokens" in reason(plan(pipe((0, 5), (0,), samples=6, micro_batch=1),
                                                            batching="packed"), even)
    assert "schedule pipedream" in reason(plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=1),
                                               schedule="pipedream", batching="bucketed"), tail)
    crossed = (pipe((0, 2, 5), (0,), (1,), samples=3, micro_batch=1),
               pipe((0, 3, 5), (1,), (0,), samples=3, micro_batch=1))
    assert "share devices" in reason(plan(*crossed, schedule="chimera", batching="packed"), tail)


def test_the_search_proposes_it() -> None:
    """The best plan shares out samples by cost; where all are equally long nothing of it is tried."""
    from mixfleet.search import Limits, find

    few = Limits(devices=0)
    best = find(long_job(8), MIXED, limits=few).best
    assert best is not None
    assert best.plan.batching in ("packed", "bucketed")
    assert f"{best.plan.batching} samples" in best.summary
    padded = predict(best.plan.replace(batching="padded"), long_job(8), MIXED)
    assert best.prediction.step_s < 0.6 * padded.step_s
    even = find(long_job(8, lengths=None), MIXED, limits=few).best
    assert even is not None
    assert even.plan.batching == "padded"
