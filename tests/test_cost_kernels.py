"""Kernel times against hand-computed rooflines; what devices fall back to; measured times in place of the model."""

import pytest

from mixfleet.catalog.efficiency import DEFAULT, EFFICIENCY, SUSTAINED, SUSTAINED_VECTOR
from mixfleet.cluster import BlockTime, Device, device_named
from mixfleet.cost import kernels, query
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.model.spec import B, Op, S, Size, T

UNIT = dict.fromkeys(("gemm", "attention", "norm", "softmax", "loss", "elementwise", "embedding", "optimizer"), 1.0)
FAST = Device(name="fast", arch="Ampere X", flops={"fp32": 0.7e12, "bf16": 5e12}, vector_flops=0.3e12,
              memory_bytes=10**10, memory_Bps=2e11, efficiency=UNIT, launch_s=0.0)
OLD = FAST.replace(name="old", arch="Volta X", flops={"fp32": 0.7e12, "fp16": 2e12})
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 160, "vocab": 99, "max_seq_len": 512}


def job(**changes):
    return Job(**{"name": "j", "model": build(SMALL), "seq_len": 128, "global_batch": 4, **changes})


def gemm(n=512, k=384):
    flops, moved = 2 * B * S * n * k, B * S * (n + k) + n * k
    return Op(name="g", kind="gemm", shape={"batch": Size.of(1), "m": B * S, "n": Size.of(n), "k": Size.of(k)},
              flops=flops, backward_flops=2 * flops, traffic=moved, backward_traffic=2 * moved)


def attention(causal=True, window=0):
    scores = B * (Size.of(12) / T) * S * S
    flops, moved = scores * 2 * (24 + 16), B * S * (Size.of(12) / T) * (24 + 24 + 16 + 16)
    return Op(name="a", kind="attention", causal=causal, window=window, flops=flops, backward_flops=2 * flops,
              traffic=moved, backward_traffic=2 * moved,
              shape={"batch": B, "heads": Size.of(12) / T, "kv_heads": Size.of(12) / T, "q": S, "kv": S,
                     "qk_dim": Size.of(24), "v_dim": Size.of(16)})


def test_gemm_is_bound_by_compute_or_by_memory():
    forward, backward = kernels.op_s(gemm(), 3, 1000, 1, FAST, "bf16")
    assert forward == pytest.approx(2 * 3000 * 512 * 384 / 5e12)
    assert backward == pytest.approx(2 * forward)
    forward, _ = kernels.op_s(gemm(), 1, 8, 1, FAST, "bf16")
    assert forward == pytest.approx(2 * (8 * (512 + 384) + 512 * 384) / 2e11)
    in_fp32, _ = kernels.op_s(gemm(), 3, 1000, 1, FAST, "fp32")
    assert in_fp32 == pytest.approx(2 * 3000 * 512 * 384 / 0.7e12)


def test_efficiency_issue_time_and_share_scale_a_cpu():
    plain, _ = kernels.op_s(gemm(), 3, 1000, 1, FAST, "bf16")
    slow = FAST.replace(kind="cpu", efficiency={**UNIT, "gemm": 0.4}, launch_s=1e-3, share=0.25)
    forward, backward = kernels.op_s(gemm(), 3, 1000, 1, slow, "bf16")
    assert forward == pytest.approx(plain / 0.4 / 0.25 + 1e-3 / 0.25)
    assert backward == pytest.approx(2 * plain / 0.4 / 0.25 + 2e-3 / 0.25)


def test_a_gpu_waits_for_its_host_only_where_its_kernels_are_short():
    one = job()
    block = one.model.blocks[1]
    issued = [sum(kernels.launches(op, True)[way] for op in block.ops) for way in (0, 1)]
    work = kernels.block_cost(block, 2, 128, 1, FAST, one)
    small = kernels.block_cost(block, 2, 128, 1, FAST.replace(launch_s=5e-3), one)
    assert small[:2] == pytest.approx([5e-3 * n for n in issued])
    large = kernels.block_cost(block, 2, 128, 1, FAST.replace(launch_s=1e-6), one)
    assert large[:2] == pytest.approx([work[way] + 1e-6 * issued[way] for way in (0, 1)])


def test_causal_masks_and_windows_leave_part_of_the_square():
    def seconds(op):
        return kernels.op_s(op, 2, 1000, 1, FAST, "bf16")[0]

    full = 2 * 12 * 1000 * 1000 * 2 * 40 / 5e12
    assert seconds(attention(causal=False)) == pytest.approx(full)
    assert seconds(attention()) == pytest.approx(full / 2)
    # 1000 queries see 1, 2, ... 100, 100, ... keys: 0.1 - 0.1**2 / 2 of the square
    assert seconds(attention(window=100)) == pytest.approx(full * 0.095)
    assert seconds(attention(causal=False, window=100)) == pytest.approx(full * 0.1)
    assert seconds(attention(window=5000)) == seconds(attention())


def test_eager_attention_pays_for_the_scores():
    eager, back = kernels.op_s(attention(), 2, 1000, 3, FAST, "bf16", fused=False)
    scores = 2 * 2 * 4 * 1000 * 1000
    products = 2 * 4 * 1000 * 1000 * 2 * 40 / 5e12
    assert eager == pytest.approx(products + 6 * scores / 2e11)
    assert back == pytest.approx(2 * products + 8 * scores / 2e11)


def test_tensor_parallel_ranks_do_their_part():
    assert kernels.op_s(attention(), 2, 4000, 4, FAST, "bf16")[1] == pytest.approx(
        kernels.op_s(attention(), 2, 4000, 1, FAST, "bf16")[1] / 4)


@pytest.mark.parametrize(("name", "precision", "dtype"), [
    ("A100-SXM4-80GB", "bf16", "bf16"), ("V100-SXM2-32GB", "bf16", "fp16"), ("T4", "bf16", "fp16"),
    ("P40", "bf16", "fp32"), ("V100-SXM2-32GB", "tf32", "fp32"), ("A100-SXM4-80GB", "tf32", "tf32"),
    ("cpu", "bf16", "bf16")])
def test_a_device_computes_in_the_nearest_type_that_it_has(name, precision, dtype):
    assert kernels.compute_dtype(device_named(name), precision) == dtype


def test_a_type_without_substitute_is_an_error_that_names_those_there_are():
    with pytest.raises(InputError, match="old cannot compute fp64; it has fp16, fp32"):
        kernels.compute_dtype(OLD, "fp64")


def test_fused_attention_needs_a_generation_that_has_it_unless_forced():
    def fused(name, **changes):
        return kernels.fused_attention(device_named(name), job(**changes))

    assert [fused(n) for n in ("A100-SXM4-80GB", "RTX4090", "MI250X", "cpu")] == [True] * 4
    assert [fused(n) for n in ("V100-SXM2-32GB", "T4", "P100-SXM2-16GB", "MI100")] == [False] * 4
    assert fused("T4", attention="fused")
    assert not fused("H100-SXM", attention="eager")


def test_recompute_repeats_the_forward_or_the_attention_core():
    one = job()
    block = one.model.blocks[1]
    none, selective, full = (kernels.block_cost(block, 2, 128, 1, FAST, one, mode)
                             for mode in ("none", "selective", "full"))
    core = next(op for op in block.ops if op.kind == "attention")
    assert (none.recompute_s, full.recompute_s) == (0.0, full.forward_s)
    assert selective.recompute_s == pytest.approx(kernels.op_s(core, 2, 128, 1, FAST, "bf16")[0])
    assert none[:2] == selective[:2] == full[:2]
    assert none.forward_s == pytest.approx(sum(kernels.op_s(op, 2, 128, 1, FAST, "bf16")[0] for op in block.ops))
    head = one.model.blocks[-1]
    assert kernels.block_cost(head, 2, 128, 1, FAST, one, "selective").recompute_s == 0


def test_costs_are_remembered_apart_for_devices_of_one_name():
    one = job()
    assert kernels.efficiency(FAST.replace(efficiency={}), "gemm") == pytest.approx(
        EFFICIENCY["Ampere"]["gemm"] * SUSTAINED["gpu"])
    twice = FAST.replace(flops={"fp32": 1.4e12, "bf16": 10e12}, memory_Bps=4e11, vector_flops=0.6e12)
    first, second = (kernels.block_cost(one.model.blocks[1], 2, 128, 1, d, one) for d in (FAST, twice))
    assert first.forward_s == pytest.approx(2 * second.forward_s)


def test_products_on_vector_units_keep_the_rate_of_kernels_alone():
    """TF32 and 16 bits lose to clocks and casts what a step in plain fp32 does not."""
    device = device_named("A100-SXM4-80GB")
    gemm = next(op for op in job().model.blocks[1].ops if op.kind == "gemm")
    size = (8, 4096, 1.0)
    m, n, k, batch = (max(1.0, gemm.shape[x].at(*size, 1.0)) for x in ("m", "n", "k", "batch"))
    for precision, part in (("fp32", SUSTAINED_VECTOR), ("tf32", SUSTAINED["gpu"]), ("bf16", SUSTAINED["gpu"])):
        alone = query.gemm(m, n, k, device, batch=batch, dtype=precision)
        seconds = max(alone.time_s[0] - alone.floor_s[0], alone.ceiling_s[0])
        assert kernels.op_s(gemm, *size, device, precision)[0] == pytest.approx(seconds / part + 2e-6)


def measured(what, *points, **changes):
    return FAST.replace(block_times=tuple(
        BlockTime(**{"block": what.kind, "micro_batch": m, "seq_len": 128, "precision": "bf16", "forward_s": f,
                     "backward_s": g, **changes}) for m, f, g in points))


def test_measured_times_replace_the_model():
    one = job()
    block, head = one.model.blocks[1], one.model.blocks[-1]
    device = measured(block, (2, 0.5, 1.1), (6, 0.9, 2.3), (8, 1.3, 2.9))

    def cost(micro_batch, recompute="none", what=block, device=device):
        return kernels.block_cost(what, micro_batch, 128, 1, device, one, recompute)

    assert cost(6, "full")[:3] == (0.9, 2.3, 0.9)
    assert cost(3)[:2] == pytest.approx((0.6, 1.4))
    assert cost(10)[:2] == pytest.approx((1.7, 3.5))
    assert cost(1)[:2] == pytest.approx((0.4, 0.8))
    model = cost(6, "selective", device=FAST)
    assert cost(6, "selective").recompute_s == pytest.approx(0.9 * model.recompute_s / model.forward_s)
    assert cost(6, what=head) == cost(6, what=head, device=FAST)


def test_few_measurements_scale_in_proportion_at_least():
    one = job()
    block = one.model.blocks[1]
    single = measured(block, (4, 0.8, 1.6))
    assert kernels.block_cost(block, 1, 128, 1, single, one)[:2] == pytest.approx((0.2, 0.4))
    concave = measured(block, (2, 0.1, 0.2), (4, 0.8, 1.6))
    assert kernels.block_cost(block, 1, 128, 1, concave, one)[:2] == pytest.approx((0.05, 0.1))


@pytest.mark.parametrize("other", [{"seq_len": 64}, {"precision": "fp32"}, {"tensor": 2}, {"block": "else"}])
def test_measurements_under_other_conditions_do_not_count(other):
    one = job()
    block = one.model.blocks[1]
    device = measured(block, (2, 0.5, 1.1), **other)
    assert kernels.block_cost(block, 2, 128, 1, device, one) == kernels.block_cost(block, 2, 128, 1, FAST, one)


def test_optimizer_step_moves_state_gradient_and_weight():
    elements = 3_000_000
    fused = kernels.optimizer_s(elements, FAST, job(), implementation="fused")
    assert fused == pytest.approx(elements * (6 * 4 + 4 + 2) / 2e11)
    looped = kernels.optimizer_s(elements, FAST, job())
    assert looped == pytest.approx(elements * (20 * 4 + 4 + 2) / 2e11)
    sgd = job(optimizer=Optimizer(name="sgd", momentum=0.9), precision="fp32")
    assert kernels.optimizer_s(elements, FAST, sgd, implementation="fused") == pytest.approx(
        elements * (4 * 4 + 4) / 2e11)
    assert kernels.optimizer_s(0, FAST, job()) == 0


def test_every_catalog_efficiency_is_a_fraction_of_a_known_kind():
    for name, table in EFFICIENCY.items():
        assert set(table) <= set(EFFICIENCY[DEFAULT]), name
        assert all(0 < part <= 1 for part in table.values()), name
    assert kernels.efficiency(device_named("RTX4090"), "gemm") > kernels.efficiency(device_named("L40S"), "gemm")
    assert set(kernels.LAUNCHES) | {"optimizer"} == set(EFFICIENCY[DEFAULT])


def test_a_device_that_communicates_waits_less_for_its_host():
    """Computing 2 and 3 s, issuing 7 and 11; collectives of 4 and 9 fill the waits of 5 and 8."""
    cost = kernels.BlockCost(7.0, 11.0, 7.0, 2.0, 5.0, 8.0)
    assert cost.among(4.0, 9.0)[:4] == (3.0, 3.0, 7.0, 2.0)
    assert cost.among(6.0, 1.0, 6.0)[:4] == (2.0, 10.0, 2.0, 2.0)
    assert cost._replace(weight_s=10.5).among(0.0, 9.0).backward_s == 10.5  # never less than its half for weights
    busy = kernels.BlockCost(7.0, 11.0, 0.0, 2.0)
    assert busy.among(4.0, 9.0, 4.0) == busy
