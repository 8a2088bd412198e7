"""Products of layers in a narrower type than the job's: costs, bytes, and who refuses them."""

from __future__ import annotations

import math

import pytest

from mixfleet.cluster import Cluster, Link, Node, device_named
from mixfleet.cost import narrow
from mixfleet.cost.kernels import block_cost, op_s
from mixfleet.cost.memory import saved_bytes
from mixfleet.errors import InputError
from mixfleet.job import PRODUCTS, Job
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.plan_rules import why_not
from mixfleet.search import find
from mixfleet.sim import predict

MODEL = build({"layers": 2, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 3584, "vocab": 5000,
               "max_seq_len": 2048, "style": "llama"})
H100, A100 = device_named("H100-SXM"), device_named("A100-SXM4-80GB")


def job(products: str = "", **changes: object) -> Job:
    return Job(**{"name": "j", "model": MODEL, "seq_len": 2048, "global_batch": 8,  # type: ignore[arg-type]
                  "products": products, **changes})


def cluster(device: object) -> Cluster:
    link = Link(name="nvlink", latency_s=1e-6, bandwidth_Bps=3e11)
    return Cluster(name="c", nodes=(Node(name="n", devices=(device,) * 2, link=link, nic=link),))  # type: ignore[arg-type]


def plan() -> Plan:
    return Plan(pipelines=(Pipeline(stages=(Stage(blocks=(0, 4), devices=(0, 1)),), samples=4, micro_batch=2,
                                    replicas=2),))


def test_only_products_with_a_weight_of_a_layer_are_narrow():
    layer = job("fp8").model.blocks[1]
    found = {op.name for op, recipe in narrow.operators(layer, job("fp8")) if recipe}
    assert found == {f"attention.{x}" for x in "qkvo"} | {"mlp.gate", "mlp.up", "mlp.down"}
    for block in (job().model.blocks[0], job().model.blocks[-1]):
        assert not any(recipe for _, recipe in narrow.operators(block, job("fp8")))
    assert [op for op, _ in narrow.operators(layer, job())] == list(layer.ops)


def test_casts_are_counted_once_per_operand():
    """Of current scaling: 3 passes over what no norm or activation makes, 2 over what one does; at 3 samples of 7
    tokens and tensor degree 2, of which a shard is narrowed before it is gathered."""
    casts = {op.name: (op.traffic.at(3, 7, 2), op.backward_traffic.at(3, 7, 2))
             for op, _ in narrow.operators(MODEL.blocks[1], job("fp8-current")) if op.name.endswith(".narrowed")}
    rows = 21
    assert casts == {
        "attention.q.narrowed": (2 * rows * 1024 / 2, 3 * rows * 1024 / 2),
        "attention.k.narrowed": (0, 3 * rows * 256 / 2), "attention.v.narrowed": (0, 3 * rows * 256 / 2),
        "attention.o.narrowed": (3 * rows * 1024 / 2, 3 * rows * 1024 / 2),
        "mlp.gate.narrowed": (2 * rows * 1024 / 2, 2 * rows * 3584 / 2), "mlp.up.narrowed": (0, 2 * rows * 3584 / 2),
        "mlp.down.narrowed": (2 * rows * 3584 / 2, 3 * rows * 1024 / 2)}


def test_a_narrow_product_is_faster_by_about_what_its_operands_are_smaller():
    op = next(op for op in build({"layers": 1, "hidden": 8192, "heads": 64, "ffn": 28672, "vocab": 100,
                                  "max_seq_len": 8192, "style": "llama"}).blocks[1].ops if op.name == "mlp.up")
    wide = op_s(op, 1, 8192, 1, H100, "bf16")
    fast = op_s(op, 1, 8192, 1, H100, "bf16", products=PRODUCTS["fp8"])
    assert 1.6 < sum(wide) / sum(fast) < 2.0
    assert sum(op_s(op, 1, 8192, 1, A100, "bf16", products=PRODUCTS["fp8"])) == pytest.approx(
        sum(op_s(op, 1, 8192, 1, A100, "bf16")))


def test_a_delayed_scale_costs_less_than_a_current_one():
    costs = [block_cost(MODEL.blocks[1], 2, 2048, 1, H100, job(name)) for name in ("fp8", "fp8-current")]
    assert costs[0].forward_s < costs[1].forward_s
    assert costs[0].backward_s < costs[1].backward_s


def test_narrow_inputs_are_kept():
    """Inputs of the projections in one byte instead of two, attention's output in both."""
    wide, fp8 = (saved_bytes(MODEL.blocks[1], 2, 2048, 1, H100, j) for j in (job(), job("fp8")))
    assert wide - fp8 == 2 * 2048 * (1024 + 1024 + 3584) - 2 * 2048 * 1024
    four = saved_bytes(MODEL.blocks[1], 2, 2048, 1, H100, job("nvfp4"))
    assert fp8 - four == round(2 * 2048 * (1024 + 1024 + 3584 + 1024) * (1 - 0.5625))


def test_a_step_is_shorter_and_mfu_is_of_the_narrow_peak():
    wide = build({"layers": 2, "hidden": 8192, "heads": 64, "ffn": 28672, "vocab": 5000, "max_seq_len": 2048,
                  "style": "llama"})
    found = [predict(plan(), job(name, model=wide), cluster(H100)) for name in ("", "fp8")]
    assert found[1].step_s < found[0].step_s
    ratio = found[1].mfu / found[0].mfu * found[1].step_s / found[0].step_s
    assert math.isclose(ratio, H100.flops["bf16"] / H100.flops["fp8"], rel_tol=1e-3)


def test_devices_without_the_units_are_refused_by_name():
    reason = why_not(plan(), job("fp8"), cluster(A100))
    assert reason is not None
    assert "A100-SXM4-80GB has no fp8 units" in reason
    assert "H100-SXM" in reason
    assert why_not(plan(), job("fp8"), cluster(H100)) is None
    four = why_not(plan(), job("nvfp4"), cluster(H100))
    assert four is not None
    assert "no fp4 units" in four
    assert "B200-SXM" in four
    with pytest.raises(InputError, match="no fp8 units"):
        find(job("fp8"), cluster(A100))


def test_narrow_products_need_16_bits_around_them(tmp_path):
    with pytest.raises(InputError, match="products is mxfp8 with precision fp32"):
        job("mxfp8", precision="fp32")
    one = job("mxfp8")
    one.save(tmp_path / "job.yaml")
    assert Job.load(tmp_path / "job.yaml") == one


def test_training_refuses_them():
    from mixfleet.run.launch import train
    with pytest.raises(InputError, match="products is fp8: training runs"):
        train(plan(), job("fp8"), cluster(H100))


def test_products_of_four_bits_gain_what_they_do_without_their_casts():
    """3.48 times 16 bits, but never more than the units are faster."""
    b300 = device_named("B300-SXM")
    assert narrow.speedup(b300, "nvfp4") == 3.48
    fewer = b300.replace(name="fewer", base="B300-SXM", flops={**b300.flops, "fp4": 2.5 * b300.flops["bf16"]})
    assert narrow.speedup(fewer, "nvfp4") == 2.5
