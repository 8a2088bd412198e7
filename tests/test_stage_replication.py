"""Stages with replicas of their own (`Stage.shares`): who takes what, the simulator by hand, and real processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mixfleet.job import Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.run import train
from mixfleet.schedule.greedy import stuck
from mixfleet.schedule.named import one_f_one_b
from mixfleet.sim import predict
from mixfleet.sim.interpreter import play
from run_pool import CLUSTER, Case, Pool, assert_bytes_and_state, job, pipe, plan
from sim_toys import MS, block, cluster, device, free_overheads
from sim_toys import job as toy_job
from test_run_equality import check_equality
from test_run_random import _quiet

__all__ = ["free_overheads"]

TIED, GPT2 = {"tied": True}, {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": True}
QWEN = {"tied": True, "bias": True, "kv_heads": 2, "activation": "swiglu"}

CASES = {
    "three to one": Case(plan(pipe((0, 3, 5), (0, 1, 2), (3,), samples=6, micro_batch=3, members=((1, 1, 1), ()))),
                         job(clip_norm=0.3)),
    "one to three, uneven, tied, a smaller last micro-batch": Case(
        plan(pipe((0, 2, 5), (0,), (1, 2, 3), samples=6, micro_batch=4, members=((), (2, 1, 1)))),
        job(figures=TIED, clip_norm=0.3), masked=True),
    "two to two, other cuts": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=3, members=((2, 1), (1, 2)))),
        job(figures=GPT2, clip_norm=0.3)),
    "two to one in turn": Case(
        plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=1, members=((1, 1), ()), dispatch="round-robin")),
        job(clip_norm=0.3)),
    "one to three in turn, 2:1:1, full recompute": Case(
        plan(pipe((0, 2, 5), (0,), (1, 2, 3), samples=6, micro_batch=1, members=((), (2, 1, 1)),
                  dispatch="round-robin", recompute="full")), job(figures=TIED), masked=True),
    "split before tensor 2, gpipe": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=4, tensor=(1, 2), members=((3, 1), ())),
             schedule="gpipe"), job(figures=QWEN, clip_norm=0.3)),
    "halves of a backward": Case(
        plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=3, members=((2, 1), ())), schedule="zb-h1"),
        job(figures=TIED)),
    "zero-3 over two replicas of twins": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=2, members=((1, 1),)), sharding=(2, 2, 2)),
        job(figures=GPT2, clip_norm=0.3)),
    "zero-1 beside a pipeline without, layered": Case(
        plan(pipe((0, 5), (0, 1), samples=4, micro_batch=2, members=((1, 1),)),
             pipe((0, 5), (2,), samples=2, micro_batch=1), sharding=(1, 2, 2), accumulation="layered"), job()),
    "a chain that comes back, in a V": Case(plan(Pipeline(samples=6, micro_batch=3, stages=(
        Stage(blocks=(0, 1), more=((3, 5),), devices=(0, 1), shares=(1, 2)),
        Stage(blocks=(1, 2), more=((2, 3),), devices=(2,)))), schedule="zb-v"), job(figures=TIED)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_and_sends_the_bytes_predicted(name: str, pool: Pool) -> None:
    case = CASES[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    program = lower(case.plan, case.job.model)
    assert check(program, case.plan, case.job.model) == ()
    assert from_text(to_text(program)) == program
    check_equality(case, pool)


@pytest.mark.parametrize("name", [name for name in CASES if "halves" not in name])
def test_bytes_and_state_are_those_predicted(name: str, pool: Pool) -> None:
    case = CASES[name]._replace(job=CASES[name].job.replace(precision="bf16"), steps=2, masked=False)
    assert_bytes_and_state(case, pool.run(case))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three stages on four ranks, each with up to three replicas, split or in turn."""
    widths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda w: max(w) > 1 and sum(w) <= 4))
    twice = draw(st.booleans()) and sum(widths) <= 2
    cuts = (0, *sorted(draw(st.sets(st.integers(1, 4), min_size=len(widths) - 1, max_size=len(widths) - 1))), 5)
    samples = draw(st.integers(2, 6))
    at, stages = 0, []
    for width, blocks in zip(widths, pairwise(cuts)):
        shares = draw(st.tuples(*[st.integers(1, 3)] * width)) if width > 1 else ()
        count = width * (1 + twice)
        stages.append(Stage(blocks=blocks, devices=tuple(range(at, at + count)), shares=shares,
                            dispatch=draw(st.sampled_from(["split", "round-robin"])) if shares else "split",
                            recompute=draw(st.sampled_from(["none", "selective", "full"]))))
        at += count
    pipeline = Pipeline(stages=tuple(stages), samples=samples, micro_batch=draw(st.integers(1, samples)),
                        replicas=1 + twice)
    w, g, o = sorted(draw(st.integers(1, 1 + twice)) for _ in range(3))
    made = Plan(pipelines=(pipeline,), sharding=Sharding(weights=w, gradients=g, optimizer=o),
                schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])))
    work = job(made.global_batch, clip_norm=draw(st.sampled_from([0.0, 0.3])), figures={"tied": draw(st.booleans())},
               optimizer=draw(st.sampled_from((Optimizer(lr=3e-2, weight_decay=0.1),
                                               Optimizer(name="sgd", lr=0.3, momentum=0.9)))))
    assume(why_not(made, work, CLUSTER) is None)
    return Case(made, work, steps=2, masked=draw(st.booleans()))


@settings(max_examples=8, **_quiet)
@given(case=cases())
def test_random_plans_equal_one_process(pool: Pool, case: Case) -> None:
    check_equality(case, pool)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=80, **_quiet)
@given(case=cases())
def test_many_random_plans_equal_one_process(pool: Pool, case: Case) -> None:
    assert check(lower(case.plan, case.job.model), case.plan, case.job.model) == ()
    check_equality(case, pool)


def test_who_takes_what() -> None:
    stage = Stage(blocks=(0, 1), devices=(0, 1, 2), shares=(2, 1, 1))
    assert stage.deal(0, 8) == ((0, 4), (4, 6), (6, 8))
    assert stage.deal(0, 3) == ((0, 1), (1, 2), (2, 3))
    turns = stage.replace(dispatch="round-robin")
    assert turns.turns == (0, 1, 2, 0)
    assert turns.deal(5, 7) == ((0, 0), (0, 7), (0, 0))
    assert [Stage(blocks=(0, 1), devices=(0, 1), shares=(5, 2), dispatch="round-robin").turns.count(j)
            for j in (0, 1)] == [5, 2]
    both = pipe((0, 2, 5), (0, 1, 2), (3, 4), samples=11, micro_batch=6, members=((3, 2, 1), (1, 1)))
    assert both.sizes(0, 0) == (3, 2)
    assert both.sizes(1, 1) == (3, 3)
    # Samples 0-2, 3-4 and 5 of six on one side, 0-2 and 3-5 on the other.
    assert both.meetings(0, 1, 0) == ((0, 0, 0, 3), (1, 1, 3, 5), (2, 1, 5, 6))
    assert both.meetings(1, 0, 0) == ((0, 0, 0, 3), (1, 1, 3, 5), (1, 2, 5, 6))


def test_a_plan_file_round_trips(tmp_path: Path) -> None:
    for name, case in CASES.items():
        case.plan.save(tmp_path / "plan.yaml")
        assert Plan.load(tmp_path / "plan.yaml") == case.plan, name
    text = (tmp_path / "plan.yaml").read_text()
    assert "shares" in text
    assert "dispatch" not in text


def rows(made: Plan, blocks: int, batch: int, *devices: object, **links: float) -> list[object]:
    what, where = toy_job([block(i) for i in range(blocks)], batch), cluster(*devices, **links)
    layout = Layout(made, what.model)
    found = [play(lower(made, what.model, layout), made, what, where, layout, fold=fold).rows for fold in (True, False)]
    for row in found[0]:  # folded or not
        for member in row.members:
            (full,) = [r for r in found[1] if r.entity == member]
            assert (row.start_ns, row.end_ns) == (full.start_ns, full.end_ns)
    return found[1]


def spans(row: object, *ops: str) -> dict[str, tuple[float, float]]:
    return {str(a): (s / MS, e / MS) for a, s, e in zip(row.actions, row.start_ns, row.end_ns)  # type: ignore[attr-defined]
            if a.op in ops and e > s}


def test_split_by_hand() -> None:
    """Micro-batches of 3 samples, 2 and 1 of them on the replicas of stage 0: F 2 ms and B 3 ms per sample, stage 1 F 1
    and B 2; a sample takes 2 ms through a port, and stage 1 has one port for both."""
    dev = device([(2, 3), (1, 2)], micro_batches=(1, 2, 3))
    made = plan(pipe((0, 1, 2), (0, 1), (2,), samples=6, micro_batch=3, members=((2, 1), ())))
    big, small, one = rows(made, 2, 6, dev, dev, dev, bandwidth=1.024e6)
    assert spans(big, "F") == {"F0.0": (0, 4), "F0.1": (4, 8)}
    assert spans(small, "F") == {"F0.0": (0, 2), "F0.1": (2, 4)}
    # All of a micro-batch goes at once, when both have it: 3 samples into one port.
    assert spans(one, "RA", "F", "B") == {"RA1.0@0": (4, 10), "F1.0": (10, 13), "B1.0": (13, 19), "RA1.1@0": (10, 16),
                                          "F1.1": (19, 22), "B1.1": (22, 28)}
    assert spans(big, "RG", "B") == {"RG0.0@1": (19, 25), "B0.0": (25, 31), "RG0.1@1": (28, 34), "B0.1": (34, 40)}
    assert spans(small, "B") == {"B0.0": (25, 28), "B0.1": (34, 37)}


def test_pairs_that_share_no_sample_do_not_wait_for_each_other() -> None:
    """2:1 to 2:1, on devices of unequal speed: each pair goes its own way."""
    fast, slow = device([(1, 1), (1, 1)], micro_batches=(1, 2)), device([(5, 7), (5, 7)], micro_batches=(1, 2))
    made = plan(pipe((0, 1, 2), (0, 1), (2, 3), samples=3, micro_batch=3, members=((2, 1), (2, 1))))
    found = rows(made, 2, 3, fast, slow, fast, slow)
    assert [spans(row, "F") for row in found] == [{"F0.0": (0, 2)}, {"F0.0": (0, 5)}, {"F1.0": (2, 4)},
                                                  {"F1.0": (5, 10)}]


def test_round_robin_by_hand() -> None:
    """Two replicas of stage 0 take micro-batches in turn, F 4 ms and B 6; stage 1 takes F 2 and B 3 for each."""
    dev = device([(4, 6), (2, 3)])
    made = plan(pipe((0, 1, 2), (0, 1), (2,), samples=4, micro_batch=1, members=((1, 1), ()), dispatch="round-robin"))
    assert [str(a) for a in lower(made, toy_job([block(0), block(1)], 4).model).roles[0].actions if a.op in "FB"] == [
        "F0.0", "F0.1", "F0.2", "F0.3", "B0.0", "B0.1", "B0.2", "B0.3"]
    zero, one, last = rows(made, 2, 4, dev, dev, dev)
    assert spans(zero, "F", "B") == {"F0.0": (0, 4), "F0.2": (4, 8), "B0.0": (9, 15), "B0.2": (19, 25)}
    assert spans(one, "F", "B") == {"F0.1": (0, 4), "F0.3": (4, 8), "B0.1": (14, 20), "B0.3": (24, 30)}
    assert spans(last, "F", "B") == {"F1.0": (4, 6), "B1.0": (6, 9), "F1.1": (9, 11), "B1.1": (11, 14),
                                     "F1.2": (14, 16), "B1.2": (16, 19), "F1.3": (19, 21), "B1.3": (21, 24)}


def test_in_turn_keeps_every_worker_busy() -> None:
    """Stages of equal speed per worker: from the fill on the slowest worker never waits (PipeDream's NOAM)."""
    for widths in ((2, 1), (3, 1), (3, 2), (4, 2, 1), (1, 2), (2, 3, 1)):
        home = tuple(range(len(widths)))
        for m in (max(widths), 7, 12):
            orders = one_f_one_b(home, m, widths)
            assert stuck(home, m, orders) is None
        dev = device([(2 * w, 4 * w) for w in widths])
        at, stages = 0, []
        for s, w in enumerate(widths):
            stages.append(Stage(blocks=(s, s + 1), devices=tuple(range(at, at + w)), shares=(1,) * w,
                                dispatch="round-robin"))
            at += w
        made = Plan(pipelines=(Pipeline(stages=tuple(stages), samples=48, micro_batch=1),))
        found = rows(made, len(widths), 48, *[dev] * at)
        ends = [max(e for _, e in spans(row, "B").values()) for row in found]
        assert max(ends) < (48 + 3 * sum(widths)) * 6
        for row in found:  # no more in flight than its part of all workers from there on
            s = row.entity.stage  # type: ignore[attr-defined]
            flying = most = 0
            for a, parts in zip(row.actions, row.parts):  # type: ignore[attr-defined]
                flying += bool(parts) * ((a.op == "F") - (a.op == "B"))
                most = max(most, flying)
            assert most <= -(-sum(widths[s:]) // widths[s]) + 1


def test_memory_follows_what_each_replica_takes() -> None:
    dev = device([(2, 3), (1, 2)], micro_batches=(1, 2, 3, 6))
    made = plan(pipe((0, 1, 2), (0, 1), (2,), samples=12, micro_batch=3, members=((2, 1), ())), schedule="gpipe")
    found = predict(made, toy_job([block(0), block(1)], 12), cluster(dev, dev, dev))
    held = [use.breakdown["activations"] for use in found.devices]
    assert held[0] == 2 * held[1] == 4 * 2 * 16 * 32 * 4  # four micro-batches of two samples of 16 x 32 fp32
    assert found.devices[0].breakdown["weights"] == found.devices[1].breakdown["weights"]


@pytest.mark.parametrize(("made", "expected"), [
    (plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=2, members=((1, 1, 1), ()))),
     "stages[0].devices lists 2 devices; 1 times 3 replicas of tensor degree 1 need 3"),
    (plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=2, members=((1, 0), ()))), "a share is at least 1"),
    (plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=2, members=((1, 3), ()))),
     "leaves replica 0 of the stage without a sample: micro-batches have 2, and 1:3 needs 4"),
    (plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=6, members=((1, 1), ()), dispatch="round-robin")),
     "replica 1 of the stage without a micro-batch: there are 1, and a turn of 1:1 takes 2"),
    (plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=1, members=((1, 1), ()), dispatch="round-robin"),
          schedule="zb-h1"), "round-robin needs an order that keeps all replicas of a stage busy"),
    (plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=2, context=2, members=((1, 1),))),
     "context is 2, which cannot go with stages that have replicas of their own"),
    (plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=3, replicas=2, members=((1, 1),))).replace(expert=2),
     "expert is 2, which cannot go with stages that have replicas of their own"),
    (plan(pipe((0, 5), (0, 1), samples=3, micro_batch=3, members=((1, 1),)),
          pipe((0, 5), (2,), samples=3, micro_batch=3), sharding=(2, 2, 2)),
     "stages have [2] and [1] replicas of their own"),
])
def test_what_cannot_be(made: Plan, expected: str) -> None:
    model = job(figures={"experts": 4, "experts_per_token": 2, "expert_ffn": 12} if made.expert > 1 else {})
    assert expected in (why_not(made, model, CLUSTER) or "")


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    case = CASES["one to three, uneven, tied, a smaller last micro-batch"]
    whole = train(case.plan, case.job, CLUSTER, steps=4)
    train(case.plan, case.job, CLUSTER, steps=2, out_dir=tmp_path)
    other = plan(pipe((0, 5), (0, 1), samples=3, micro_batch=3, replicas=2), sharding=(1, 1, 2))
    for made in (other, CASES["three to one"].plan):
        found = train(made, case.job, CLUSTER, steps=4, resume=tmp_path / "checkpoints")
        assert whole is not None
        assert found is not None
        assert found.losses == pytest.approx(whole.losses[2:], rel=1e-9)
