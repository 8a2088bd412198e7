"""The clock that power allows, by hand."""

import pytest

from mixfleet.cluster import device_named
from mixfleet.cost.clock import held_clock, held_cost
from mixfleet.cost.kernels import block_cost, op_s
from mixfleet.job import Job
from mixfleet.model.families import build


def test_a_device_with_watts_to_spare_holds_its_clock():
    assert held_clock(device_named("A100-SXM4-80GB"), "bf16") == 1  # 400 W for 312 TFLOP/s
    assert held_clock(device_named("V100-SXM2-16GB"), "fp16") == 1
    assert held_clock(device_named("H100-SXM"), "fp32") == 1  # not by tensor units


def test_more_units_than_watts_slow_down():
    h100 = device_named("H100-SXM")
    assert held_clock(h100, "bf16") == pytest.approx((h100.power_w / 989.5) ** 0.3, rel=1e-3)
    assert held_clock(h100, "tf32") == held_clock(h100, "bf16")  # the same units, as busy
    less = h100.replace(power_w=500.0)
    assert held_clock(less, "bf16") < held_clock(h100, "bf16") < 1
    assert held_clock(h100.replace(efficiency={"gemm": 0.7}), "bf16") == 1  # measured as it is
    assert held_clock(h100.replace(power_w=0.0), "bf16") == 1


def test_tensor_units_slow_down_and_memory_does_not():
    model = build({"layers": 1, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 1000, "max_seq_len": 512})
    job = Job(name="x", model=model, seq_len=512, global_batch=1)
    h100, layer = device_named("H100-SXM").replace(launch_s=0.0), model.blocks[1]
    plain, held = (f(layer, 8, 512, 1, h100, job, "full") for f in (block_cost, held_cost))
    tensor_s = sum(op_s(op, 8, 512, 1, h100, "bf16")[0] for op in layer.ops if op.kind in ("gemm", "attention"))
    assert 0 < tensor_s < plain.forward_s
    assert held.forward_s == pytest.approx(plain.forward_s + tensor_s * (1 / held_clock(h100, "bf16") - 1))
    assert held.recompute_s == held.forward_s
    assert held.weight_s == pytest.approx(plain.weight_s / held_clock(h100, "bf16"))


def test_a_stated_clock_goes_before_the_one_that_power_allows():
    h100 = device_named("H100-SXM")
    locked = h100.replace(clock=0.75)
    assert {held_clock(locked, t) for t in ("bf16", "tf32", "fp32")} == {0.75}  # all units have one clock
    assert held_clock(locked.replace(efficiency={"gemm": 0.7}), "bf16") == 0.75
    assert held_clock(h100.replace(clock=1.0), "bf16") == 1 > held_clock(h100, "bf16")
