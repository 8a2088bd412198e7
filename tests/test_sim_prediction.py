"""Predictions: memory by phase, fresh and resumed, reasons, bytes sent, and the figures derived from a step."""

import pytest

from mixfleet import trace as tr
from mixfleet.cost import memory as cost_memory
from mixfleet.errors import InputError
from mixfleet.job import Optimizer
from mixfleet.model.spec import B, S, Saved
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim import predict, simulate
from sim_toys import HIDDEN, block, cluster, device, free_overheads, job, mixed_cluster, mixed_plans, straight

__all__ = ["free_overheads"]
INPUT = 16 * HIDDEN * 4
"""Bytes that the toy blocks save, and hand on, per sequence."""


@pytest.fixture
def bare(monkeypatch):
    """Without framework and allocator, so that bytes add up by hand."""
    monkeypatch.setattr(cost_memory, "CONTEXT_BYTES", {"gpu": 0, "cpu": 0})
    monkeypatch.setattr(cost_memory, "COMMUNICATOR_BYTES", {"gpu": 0, "cpu": 0})
    monkeypatch.setattr(cost_memory, "ALLOCATOR_FACTOR", {"gpu": 1.0, "cpu": 1.0})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 2), (4, 7)])
def test_stage_i_of_1f1b_holds_p_minus_i_micro_batches_and_gpipe_all(bare, schedule, p, m):
    dev = device([(3, 5)] * p)
    found = predict(straight(range(p + 1), m, schedule), job([block(i) for i in range(p)], m), cluster(*[dev] * p))
    held = [d.breakdown["activations"] // INPUT for d in found.devices]
    assert held == [m] * p if schedule == "gpipe" else held == [min(p - i, m) for i in range(p)]


def test_bubble_has_its_closed_form():
    p, m = 4, 7
    dev = device([(3, 5)] * p)
    found = predict(straight(range(p + 1), m), job([block(i) for i in range(p)], m), cluster(*[dev] * p), trace=True)
    assert found.step_s == pytest.approx(0.008 * (m + p - 1), rel=1e-3)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-3)
    assert found.tokens_per_s == pytest.approx(m * 16 / found.step_s)
    assert found.samples_per_s == pytest.approx(m / found.step_s)
    assert tr.utilization(found.trace) == {r: pytest.approx(m / (m + p - 1), rel=1e-3) for r in range(p)}


def test_memory_by_hand_fresh_and_resumed(bare):
    # fp32, AdamW: 1000 weights, as many gradients, two moments; one micro-batch saves its input
    dev = device([(3, 5)])
    plan = Plan(pipelines=(Pipeline(samples=3, micro_batch=1, stages=(Stage(blocks=(0, 1), devices=(0,)),)),))
    (use,) = predict(plan, job([block(0, 1000)], 3), cluster(dev)).devices
    state = 4000 + 4000
    assert use.resumed_bytes == state + 8000 + INPUT + INPUT  # saved input, and the gradient that goes on
    assert use.fresh_bytes == state + 8000  # the optimizer step: moments appear when activations are gone
    assert use.peak_bytes == use.resumed_bytes
    assert use.phase == "forward of micro-batch 0, block 0"
    assert use.breakdown == {"weights": 4000, "gradients": 4000, "moments": 8000, "activations": INPUT,
                             "workspace": INPUT}


def test_sgd_without_momentum_has_no_state(bare):
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, stages=(Stage(blocks=(0, 1), devices=(0,)),)),))
    what = job([block(0, 1000)], 1, optimizer=Optimizer(name="sgd", momentum=0.0))
    (use,) = predict(plan, what, cluster(device([(3, 5)]))).devices
    assert use.fresh_bytes == use.resumed_bytes == 8000 + 2 * INPUT


def test_sharded_state_and_gathered_buffers_by_hand(bare):
    # 3 replicas, 3 blocks of 900 weights, one piece of 300 each; at most two blocks gathered, two gradient buffers
    dev = device([(3, 5)] * 3)
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=3, stages=(
        Stage(blocks=(0, 3), devices=(0, 1, 2)),)),), sharding=Sharding(weights=3, gradients=3, optimizer=3))
    found = predict(plan, job([block(i, 900) for i in range(3)], 3), cluster(dev, dev, dev, bandwidth=1e6))
    for use in found.devices:
        assert {k: use.breakdown[k] for k in ("weights", "gradients", "moments")} == {
            "weights": 3600, "gradients": 3600, "moments": 7200}
        assert use.breakdown["gathered weights"] == 2 * 3600
        assert use.breakdown["gradient buffers"] in (3600, 7200)
        assert use.phase.startswith("backward of micro-batch 0")


def test_recompute_trades_memory_for_time(bare):
    def rich(i):
        return block(i, 100).replace(saved=(
            Saved(name="x", size=B * S * HIDDEN, until="full"), Saved(name="scores", size=3 * B * S * HIDDEN,
                                                                      until="none")))

    dev = device([(3, 5), (4, 7)])
    what = job([rich(0), rich(1)], 4)
    found = {}
    for mode in ("none", "full"):
        plan = Plan(schedule="gpipe", pipelines=(Pipeline(samples=4, micro_batch=1, stages=(
            Stage(blocks=(0, 2), devices=(0,), recompute=mode),)),))
        found[mode] = predict(plan, what, cluster(dev))
    none, full = (found[mode].devices[0].breakdown for mode in ("none", "full"))
    assert none["activations"] == 4 * 2 * 4 * INPUT
    assert full["activations"] == 4 * 2 * INPUT
    assert full["recomputed"] == 3 * INPUT
    assert found["none"].step_s == pytest.approx(4 * 0.019, rel=1e-3)
    assert found["full"].step_s == pytest.approx(4 * 0.026, rel=1e-3)


@pytest.mark.parametrize("plan", list(mixed_plans()))
def test_the_walk_never_exceeds_the_bound_of_the_cost_model(plan):
    what = job([block(i, 2000 + 100 * i) for i in range(6)], plan.global_batch)
    where = mixed_cluster()
    layout = Layout(plan, what.model)
    for use in predict(plan, what, where).devices:
        pipeline = plan.pipelines[use.pipeline]
        stage = pipeline.stages[use.stage]
        units = layout.units_of_stage(use.pipeline, use.stage)
        whole = [layout.compute_elements(u, use.rank) for u in units]
        m, shard = len(pipeline.micro_batches), plan.sharding
        in_flight = m if plan.schedule == "gpipe" else min(len(pipeline.stages) - use.stage, m)
        own = 0 if shard.gradients == shard.optimizer else layout.elements("optimizer", use.rank)
        updated = 0 if shard.weights in (1, shard.optimizer) else layout.elements("optimizer", use.rank)
        bound = cost_memory.stage_memory(
            what.model.blocks[slice(*stage.blocks)], pipeline.micro_batch, stage.tensor, where.devices[use.rank], what,
            weights=layout.elements("weights", use.rank) + updated,
            gradients=layout.elements("gradients", use.rank) + own, optimizer=layout.elements("optimizer", use.rank),
            gathered_units=whole if shard.weights > 1 else (), reduced_units=whole if shard.gradients > 1 else (),
            communicators=10)
        messages = use.breakdown.get("messages", 0)
        slack = max(whole, default=0) * 4 * 2 if shard.gradients > 1 else 0  # a second buffer while hop 1 runs
        assert use.peak_bytes <= bound.peak_bytes(in_flight) + 2 * messages + 2 * slack


def test_what_does_not_fit_says_who_lacks_what_when_and_what_helps(bare):
    dev = device([(3, 5)] * 2)
    small = dev.replace(memory_bytes=4 * 4000 + INPUT)
    plan = straight((0, 1, 2), 3)
    found = predict(plan, job([block(0, 1000), block(1, 1000)], 3), cluster(small, dev))
    assert not found.fits
    assert [d.fits for d in found.devices] == [False, True]
    use = found.devices[0]
    assert use.lacks_bytes == use.peak_bytes - small.memory_bytes > 0
    (reason,) = found.reasons
    assert "toy (rank 0; pipeline 0 stage 0) lacks" in reason
    assert use.phase in reason
    assert "moments 7.81 KiB" in reason
    assert found.bound.startswith("memory of toy (rank 0)")


def test_an_impossible_plan_is_refused_with_its_reason():
    plan = straight((0, 1), 3)
    with pytest.raises(InputError):
        predict(plan, job([block(0), block(1)], 3), cluster(device([(3, 5)] * 2)))


def test_what_bounds_the_step():
    dev = device([(3, 5), (4, 7)])
    found = predict(straight((0, 1, 2), 5), job([block(0), block(1)], 5), cluster(dev, dev))
    assert found.bound.startswith("computing of pipeline 0 stage 1")
    assert sum(share.fraction for share in found.critical) == pytest.approx(1)
    slow = predict(straight((0, 1, 2), 5), job([block(0), block(1)], 5), cluster(dev, dev, bandwidth=1e4))
    assert slow.bound.startswith("sends through n0:")


def test_the_critical_chain_has_no_gaps():
    for plan in mixed_plans():
        what = job([block(i, 2000 + 100 * i) for i in range(6)], plan.global_batch)
        from mixfleet.sim.interpreter import play

        layout = Layout(plan, what.model)
        played = play(lower(plan, what.model, layout), plan, what, mixed_cluster(), layout)
        assert sum(ns for *_, ns in played.critical) == pytest.approx(played.end_ns, abs=3)


def test_bytes_sent_by_hand():
    # DDP over 2 replicas of a 2-stage pipeline: activations and gradients of 3 micro-batches; a reduce-scatter and an
    # all-gather of 1000 and 700 fp32 gradients over 2 ranks send half of each buffer twice
    dev = device([(3, 5), (4, 7)])
    plan = Plan(pipelines=(Pipeline(samples=3, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 1), devices=(0, 1)), Stage(blocks=(1, 2), devices=(2, 3)))),))
    found = predict(plan, job([block(0, 1000), block(1, 700)], 6), cluster(dev, dev, dev, dev))
    assert found.sent_bytes == {
        "0": {"SA": 3 * INPUT, "Y": 4000}, "1": {"SA": 3 * INPUT, "Y": 4000},
        "2": {"SG": 3 * INPUT, "Y": 2800}, "3": {"SG": 3 * INPUT, "Y": 2800}}
    assert predict(plan, job([block(0, 1000), block(1, 700)], 6), cluster(dev, dev, dev, dev),
                   sent=False).sent_bytes is None


def test_simulate_leaves_the_trace_that_predict_reads():
    plan = next(mixed_plans())
    what, where = job([block(i, 2000) for i in range(6)], plan.global_batch), mixed_cluster()
    trace = simulate(lower(plan, what.model), plan, what, where)
    found = predict(plan, what, where, trace=True)
    assert found.trace == trace
    assert found == predict(plan, what, where, trace=True)
    assert tr.step_s(trace) == found.step_s
    assert sum(trace.multiplicity(d) for d in trace.devices) == 8
    peaks = tr.peak_memory(trace)
    for use in found.devices:
        assert peaks[int(trace.meta["row_of"][str(use.rank)])].total_bytes == use.resumed_bytes


def test_money_and_energy():
    dev = device([(3, 5)], price_per_hour=7.2, power_w=300)
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 1), devices=(0, 1)),)),))
    found = predict(plan, job([block(0, 8)], 2), cluster(dev, dev))
    assert found.cost_per_step == pytest.approx(2 * 7.2 * found.step_s / 3600)
    assert found.cost_per_million_tokens == pytest.approx(found.cost_per_step / 32 * 1e6)
    assert found.energy_j == pytest.approx(600 * found.step_s)


def test_a_thousand_equal_devices_are_as_many_rows_as_sixteen():
    from mixfleet.sim.interpreter import play

    dev = device([(3, 5)] * 4)
    counts = {}
    for replicas in (8, 512):
        plan = Plan(sharding=Sharding(optimizer=replicas), pipelines=(Pipeline(
            samples=3, micro_batch=1, replicas=replicas, stages=tuple(
                Stage(blocks=(2 * s, 2 * s + 2), devices=tuple(range(s * replicas, s * replicas + replicas)))
                for s in range(2))),))
        what = job([block(i, 5120) for i in range(4)], 3 * replicas)
        where = cluster(*[dev] * (2 * replicas), nic=1e8)
        layout = Layout(plan, what.model)
        played = play(lower(plan, what.model, layout), plan, what, where, layout)
        counts[replicas] = (len(played.rows), sum(len(row.actions) for row in played.rows))
        assert sum(len(row.members) for row in played.rows) == 2 * replicas
    assert counts[8] == counts[512]
    assert counts[512][0] == 2


def test_flop_utilization_of_a_real_model_by_the_formula():
    from mixfleet.cluster import Cluster, Link, Node
    from mixfleet.model.families import build

    hidden, layers, vocab, seq, ffn = 256, 4, 1000, 128, 700
    model = build({"layers": layers, "hidden": hidden, "heads": 8, "vocab": vocab, "max_seq_len": seq, "ffn": ffn})
    what = job([block(0)], 6).replace(model=model, seq_len=seq, precision="bf16")
    dev = device([]).replace(flops={"bf16": 3e12, "fp32": 1e12}, memory_Bps=1e12)
    where = Cluster(name="two", nodes=(Node(name="n", devices=(dev, dev), nic=Link(latency_s=0, bandwidth_Bps=1e9),
                                            link=Link(latency_s=0, bandwidth_Bps=1e11)),))
    plan = Plan(pipelines=(Pipeline(samples=3, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, len(model.blocks)), devices=(0, 1), recompute="full"),)),))
    found = predict(plan, what, where)
    matrices = sum(p.count for b in model.blocks for p in b.params
                   if len(p.shape) == 2 and (p.role == "dense" or b.name == "head"))
    flops = 6 * seq * (6 * matrices + 6 * 2 * layers * seq * hidden)
    assert found.mfu == pytest.approx(flops / found.step_s / (2 * 3e12), rel=0.02)
    assert found.hfu == pytest.approx(found.mfu * 4 / 3, rel=0.02)


def test_a_prediction_is_json():
    import msgspec

    plan = next(mixed_plans())
    found = predict(plan, job([block(i, 2000) for i in range(6)], plan.global_batch), mixed_cluster(), trace=True)
    data = msgspec.json.decode(msgspec.json.encode(found))
    assert data["devices"][0]["peak_bytes"] == found.devices[0].peak_bytes
    assert data["sent_bytes"]["0"] == found.sent_bytes["0"]
