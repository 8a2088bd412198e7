"""What people reported about today's tools, kept right here: one test per problem, named as in docs/user-problems.md.

Where another file already holds the proof (equality of uneven runs, resharding), the table names that file.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mixfleet import Cluster, Job, find, predict, why_not
from mixfleet.cluster import Device, Link, Node, device_named
from mixfleet.cost.memory import optimizer_temporary_bytes
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.check import check
from mixfleet.program.lower import lower
from mixfleet.run import torchrun_commands
from mixfleet.sim.prediction import Prediction
from mixfleet.units import GiB

SMALL = {"layers": 6, "hidden": 128, "heads": 6, "head_dim": 32, "vocab": 300, "max_seq_len": 64}


def cluster(*nodes: tuple[str, int]) -> Cluster:
    """Nodes of so many devices of a kind."""
    return Cluster(name="lab", nodes=tuple(
        Node(name=f"n{i}", devices=(device_named(device),) * count, link=Link(latency_s=3e-6, bandwidth_Bps=2e11),
             nic=Link(latency_s=5e-6, bandwidth_Bps=12.5e9)) for i, (device, count) in enumerate(nodes)))


def job(model: object, batch: int, seq_len: int = 1024, precision: str = "bf16", **settings: object) -> Job:
    return Job(name="job", model=build(model), seq_len=seq_len, global_batch=batch,  # type: ignore[arg-type]
               precision=precision, **settings)  # type: ignore[arg-type]


def one_stage(job: Job, tensor: int, **settings: object) -> Plan:
    """All blocks on one tensor-parallel group."""
    stage = Stage(blocks=(0, len(job.model.blocks)), devices=tuple(range(tensor)), tensor=tensor)
    return Plan(pipelines=(Pipeline(stages=(stage,), samples=job.global_batch, micro_batch=1),),
                **settings)  # type: ignore[arg-type]


def data_parallel(job: Job, n: int, *, micro_batch: int = 1, sharding: tuple[int, int, int] = (1, 1, 1)) -> Plan:
    w, g, o = sharding
    stage = Stage(blocks=(0, len(job.model.blocks)), devices=tuple(range(n)))
    return Plan(pipelines=(Pipeline(stages=(stage,), samples=job.global_batch // n, micro_batch=micro_batch,
                                    replicas=n),), sharding=Sharding(weights=w, gradients=g, optimizer=o))


def pipelined(job: Job, cuts: tuple[int, ...], *, schedule: str = "1f1b", micro_batch: int = 1) -> Plan:
    stages = tuple(Stage(blocks=(a, b), devices=(i,)) for i, (a, b) in enumerate(pairwise(cuts)))
    return Plan(pipelines=(Pipeline(stages=stages, samples=job.global_batch, micro_batch=micro_batch),),
                schedule=schedule)  # type: ignore[arg-type]


def peaks(prediction: Prediction) -> list[int]:
    return [d.peak_bytes for d in prediction.devices]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_m1_model_states_are_one_line_of_many() -> None:
    """DeepSpeed#4527: a ZeRO-3 estimate 30 times too small counted nothing but states."""
    one = job("llama-2-7b", 8)
    used = predict(data_parallel(one, 4, sharding=(4, 4, 4)), one, cluster(("A100-SXM4-80GB", 4))).devices[0]
    parts = used.breakdown
    assert {"weights", "gradients", "master", "moments", "gathered weights", "gradient buffers", "activations",
            "framework", "allocator"} <= set(parts)
    states = sum(parts[k] for k in ("weights", "gradients", "master", "moments"))
    assert used.peak_bytes == sum(parts.values())
    assert used.peak_bytes > states + 8 * GiB


def test_m2_memory_falls_with_every_device_and_what_does_not_has_a_name() -> None:
    """DeepSpeed#4093: the same memory on 2 and 4 GPUs, and no word of what is not sharded."""
    one = job("llama-2-7b", 8)
    used = {n: predict(data_parallel(one, n, sharding=(n, n, n)), one, cluster(("A100-SXM4-80GB", n))).devices[0]
            for n in (2, 4, 8)}
    for n, part in ((2, 1 / 2), (4, 1 / 4), (8, 1 / 8)):
        for name, each in (("weights", 2), ("gradients", 4), ("master", 4), ("moments", 8)):
            assert used[n].breakdown[name] == pytest.approx(each * one.model.count * part, rel=0.01)
    assert used[2].peak_bytes > used[4].peak_bytes > used[8].peak_bytes
    same = {name for name in used[2].breakdown if used[2].breakdown[name] == used[8].breakdown[name]}
    assert same == {"gathered weights", "workspace", "framework"}


def test_m7_experts_are_divided_by_their_own_degree() -> None:
    """Megatron-LM#4050: all parameters were divided by the tensor degree. Experts are by the expert degree only."""
    one = job("mixtral-8x7b", 4, seq_len=64)
    sizes = {"experts": 0, "rest": 0}
    for block in one.model.blocks:
        for param in block.params:
            sizes["experts" if param.role == "expert" else "rest"] += param.count
    assert sizes["experts"] > 25 * sizes["rest"]
    for degree in (1, 2, 4):
        plan = data_parallel(one, 4).replace(expert=degree)
        held = predict(plan, one, cluster(("A100-SXM4-80GB", 4))).devices[3].breakdown["weights"]
        assert held == 2 * (sizes["rest"] + sizes["experts"] // degree)


def test_m4_bytes_by_type_and_degree() -> None:
    """DeepSpeed#5099: ZeRO-2 holds 2P weights + (4 + 4 + 8) P/N, from the types and not from one constant."""
    one = job("gpt2", 4, seq_len=64)
    p = one.model.count
    parts = predict(data_parallel(one, 4, sharding=(1, 4, 4)), one, cluster(("A100-SXM4-80GB", 4))).devices[3].breakdown
    assert parts["weights"] == 2 * p
    for name, each in (("gradients", 4), ("master", 4), ("moments", 8)):
        assert parts[name] == pytest.approx(each * p / 4, rel=1e-4)
    lean = one.replace(gradient_precision="bf16")
    assert predict(data_parallel(lean, 4, sharding=(1, 4, 4)), lean,
                   cluster(("A100-SXM4-80GB", 4))).devices[3].breakdown["gradients"] == pytest.approx(p / 2, rel=1e-4)


def test_m5_scores_and_logits_are_counted_and_the_reason_names_flash_attention() -> None:
    """Megatron-LM#525: own sum 23 GB, out of memory at 32 GB, without flash attention on a V100."""
    one = job("gpt2-large", 12, seq_len=1024, precision="fp16")
    v100, a100 = (predict(data_parallel(one, 1, micro_batch=12), one, cluster((name, 1)))
                  for name in ("V100-SXM2-32GB", "A100-SXM4-40GB"))
    assert not v100.fits
    assert "no flash attention on V100-SXM2-32GB: +" in v100.reasons[0]
    scores = 36 * 12 * 20 * 1024 * 1024 * 2  # layers, sequences, heads, s * s, two bytes
    more = v100.devices[0].breakdown["activations"] - a100.devices[0].breakdown["activations"]
    assert more >= 0.99 * scores
    logits = 12 * 1024 * 50257 * 4
    assert max(p.devices[0].breakdown.get("workspace", 0) for p in (v100, a100)) >= logits


def test_m6_memory_is_per_rank() -> None:
    """Megatron-LM#482: one number for all ranks, 20 and 50 GB in truth."""
    one = job("llama-2-7b", 8)
    both = peaks(predict(pipelined(one, (0, 12, 34)), one, cluster(("A100-SXM4-80GB", 2))))
    assert both[1] > 1.3 * both[0]


def test_m10_the_first_stage_holds_more_micro_batches() -> None:
    """DeepSpeed#4477, #4602: equal stages, unequal memory; and more accumulation steps under GPipe need more."""
    one = job({**SMALL, "layers": 8, "vocab": 64}, 8, seq_len=64, precision="fp32")
    here = cluster(("A100-SXM4-80GB", 4))
    activations = [d.breakdown["activations"] for d in
                   predict(pipelined(one, (0, 3, 5, 7, 10)), one, here).devices]
    middle = activations[1:3]
    assert middle[0] / middle[1] == pytest.approx(3 / 2, rel=0.02)  # min(p - i, m) of 4 stages
    few, many = (max(peaks(predict(pipelined(one.replace(global_batch=m), (0, 3, 5, 7, 10), schedule="gpipe"),
                                   one.replace(global_batch=m), here))) for m in (4, 16))
    assert many > few
    few, many = (max(peaks(predict(pipelined(one.replace(global_batch=m), (0, 3, 5, 7, 10)),
                                   one.replace(global_batch=m), here))) for m in (4, 16))
    assert many == few


def test_m13_a_resumed_run_holds_its_moments_from_the_start() -> None:
    """Megatron-LM#4638: a fresh start fits, the resumed one does not; a plan must pass both."""
    one = job("gpt2-xl", 8)
    used = predict(data_parallel(one, 1, micro_batch=8), one, cluster(("A100-SXM4-80GB", 1))).devices[0]
    assert used.resumed_bytes > used.fresh_bytes + 4 * one.model.count
    assert used.peak_bytes == used.resumed_bytes
    tight = device_named("A100-SXM4-80GB").replace(memory_bytes=(used.fresh_bytes + used.resumed_bytes) // 2)
    between = Cluster(name="tight", nodes=(cluster(("A100-SXM4-80GB", 1)).nodes[0].replace(devices=(tight,)),))
    assert not predict(data_parallel(one, 1, micro_batch=8), one, between).fits


def test_m15_optimizer_temporaries_by_implementation() -> None:
    """verl#5364: a `foreach` step adds temporaries as large as what it steps; chunks bound them, fused has none."""
    one = job("gpt2", 1)
    many = 10**9
    one = one.replace(gradient_precision="bf16")  # fp32 gradients serve the update in place
    sizes = {how: optimizer_temporary_bytes(many, one, implementation=how)  # type: ignore[arg-type]
             for how in ("foreach", "chunked", "fused")}
    assert sizes["fused"] == 0
    assert sizes["foreach"] >= 4 * many
    assert 0 < sizes["chunked"] < sizes["foreach"] / 10


def test_m18_nothing_to_shard() -> None:
    """DeepSpeed#237: ZeRO over one data-parallel rank."""
    one = job(SMALL, 4, seq_len=64)
    plan = Plan(pipelines=(Pipeline(stages=(Stage(blocks=(0, 8), devices=(0, 1), tensor=2),), samples=4,
                                    micro_batch=1),), sharding=Sharding(optimizer=8))
    assert "nothing to shard" in (why_not(plan, one, cluster(("A100-SXM4-80GB", 2))) or "")


# --- unequal devices -------------------------------------------------------------------------------------------------


def test_h2_h5_the_planner_gives_each_device_what_it_can_do_and_hold() -> None:
    """fairscale#1073, ms-swift#775: three equal cards and a larger one; the batch per rank is an answer."""
    one = job("gpt2", 64)
    best = find(one, cluster(("A100-SXM4-80GB", 1), ("V100-SXM2-32GB", 2)), top=1).best
    assert best is not None
    assert best.prediction.fits
    share = {d.device: d for d in best.prediction.devices}
    assert len(share) == 2, "all kinds are used"
    samples = {p.stages[0].devices[0]: p.samples for p in best.plan.pipelines}
    if all(len(p.stages) == 1 for p in best.plan.pipelines):
        assert samples[0] > max(n for rank, n in samples.items() if rank)


def test_h9_processes_per_node_come_from_the_plan() -> None:
    """accelerate#3894: two nodes of 8 and 2 devices were started with 5 processes each."""
    one = job(SMALL, 10, seq_len=64)
    commands = torchrun_commands(data_parallel(one, 10), cluster(("A100-SXM4-80GB", 8), ("A100-SXM4-80GB", 2)),
                                 ["plan.yaml"])
    assert ["--nproc-per-node 8" in text or "--nproc-per-node=8" in text for _, text in commands] == [True, False]
    assert "--nproc-per-node 2" in commands[1][1] or "--nproc-per-node=2" in commands[1][1]


def test_n7_tensor_parallelism_first_inside_a_node_is_no_law() -> None:
    """Megatron-LM#258: with many micro-batches, 8 pipeline stages inside one node are over 30 % faster than 8 ways of
    tensor parallelism."""
    one, here = job("llama-2-7b", 128), cluster(("A100-SXM4-80GB", 8))
    pipeline = predict(pipelined(one, (0, 5, 9, 13, 17, 21, 25, 29, 34)), one, here)
    assert pipeline.fits
    assert 1.3 * pipeline.step_s < predict(one_stage(one, 8), one, here).step_s


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 8, 12, 16])
def test_n12_any_partition_group_size(degree: int) -> None:
    """pytorch#84590: 16 devices, shard over 8; and over 3 or 5 as well."""
    one = job(SMALL, 16, seq_len=64)
    plan = data_parallel(one, 16, sharding=(degree, degree, degree))
    here = cluster(("A100-SXM4-80GB", 8), ("A100-SXM4-80GB", 8))
    assert why_not(plan, one, here) is None
    assert check(lower(plan, one.model), plan, one.model) == ()
    held = [d.breakdown["moments"] for d in predict(plan, one, here).devices]
    assert max(held) <= 8 * one.model.count / degree * 1.01


# --- illegal settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [7, 9])
def test_v1_v2_no_block_is_ever_lost(blocks: int) -> None:
    """Megatron-LM#1304, torchtitan#963: 30 layers over 4 stages became 28, without a word."""
    one = job({**SMALL, "layers": 30}, 4, seq_len=64)
    even = pipelined(one, (0, blocks, 2 * blocks, 3 * blocks, 4 * blocks))
    assert "32" in (why_not(even, one, cluster(("A100-SXM4-80GB", 4))) or "")
    best = find(one, cluster(("V100-SXM2-16GB", 4)), top=3)
    for ranked in best.plans:
        for pipeline in ranked.plan.pipelines:
            assert [c.lo for c in pipeline.chain] == [0, *(c.hi for c in pipeline.chain[:-1])]
            assert pipeline.chain[-1].hi == 32


def test_v4_a_stage_may_hold_the_head_alone() -> None:
    """torchtitan#1041: embedding and head count by their predicted time, not as layers."""
    one = job(SMALL, 4, seq_len=64)
    plan = pipelined(one, (0, 1, 7, 8))
    assert why_not(plan, one, cluster(("A100-SXM4-80GB", 3))) is None
    assert predict(plan, one, cluster(("A100-SXM4-80GB", 3))).fits


def test_v5_fewer_micro_batches_than_stages_do_not_hang() -> None:
    """torchtitan#775 hung; the schedules here end for any number, and the bubble says what it costs."""
    one = job(SMALL, 2, seq_len=64)
    plan = pipelined(one, (0, 2, 4, 6, 8), micro_batch=2)
    assert check(lower(plan, one.model), plan, one.model) == ()
    assert predict(plan, one, cluster(("A100-SXM4-80GB", 4))).bubble > 0.5


EIGHT: dict[str, tuple[object, Plan, int, str]] = {
    "ranks do not divide into replicas": (SMALL, Plan(pipelines=(Pipeline(stages=(Stage(
        blocks=(0, 8), devices=(0, 1, 2), tensor=2),), samples=4, micro_batch=1),)), 3,
        "lists 3 devices; 1 replicas of tensor degree 2 need 2"),
    "interleaved without stages": (SMALL, one_stage(job(SMALL, 4, 64), 1, schedule="interleaved"), 1,
                                   "wants 2 or more chunks on each stage"),
    "heads": (SMALL, one_stage(job(SMALL, 4, 64), 4), 4, "does not divide 6 attention heads; nearest possible: 1 or 2"),
    "experts without experts": (SMALL, data_parallel(job(SMALL, 4, 64), 2).replace(expert=2), 2,
                                "decoder has no routed experts; take 1"),
    "more shards than replicas": (SMALL, data_parallel(job(SMALL, 4, 64), 2, sharding=(8, 8, 8)), 2,
                                  "the plan has 2 data-parallel replicas, so at most 2"),
    "more shares of experts than replicas": ("mixtral-8x7b", data_parallel(
        job("mixtral-8x7b", 4, 64), 2).replace(expert=5), 2, "the plan has 2 data-parallel replicas, so at most 2"),
    "more ranks than devices": (SMALL, data_parallel(job(SMALL, 4, 64), 2), 1, "lab has devices 0-0"),
}


@pytest.mark.parametrize("case", EIGHT)
def test_v8_n14_the_most_common_wrong_configurations_say_what_is_wrong(case: str) -> None:
    """Megatron-LM#5768 and instructlab/training#682. The other three of the eight cannot be written down here: a job
    has one precision, sequences are split wherever tensors are, and what crosses stages has the job's type."""
    model, plan, devices, reason = EIGHT[case]
    assert reason in (why_not(plan, job(model, 4, 64), cluster(("A100-SXM4-80GB", devices))) or "")


def test_v9_three_devices_and_heads_that_do_not_divide() -> None:
    """vllm#596: the nearest usable degrees are named, and the planner uses all three devices in another way."""
    one = job({**SMALL, "heads": 8, "head_dim": 16}, 9, seq_len=64)
    assert "nearest possible: 2 or 4" in (why_not(one_stage(one, 3), one, cluster(("A100-SXM4-80GB", 3))) or "")
    best = find(one, cluster(("A100-SXM4-80GB", 3)), top=1).best
    assert best is not None
    assert len(best.plan.ranks) == 3


def test_v10_nothing_fits_is_an_answer_with_counted_reasons() -> None:
    """DeepSpeed#7269: `No optimal configuration found`, and not why."""
    tiny = Device(name="tiny", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=GiB // 2, memory_Bps=1e11)
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    here = Cluster(name="tiny", nodes=(Node(name="n", devices=(tiny,) * 2, link=link, nic=link),))
    result = find(job("gpt2", 4, precision="fp32"), here)
    assert result.best is None
    assert sum(r.count for r in result.rejections) > 0
    assert result.nearest_miss is not None
    assert result.nearest_miss.lacks_bytes > 0
    assert result.nearest_miss.device_name == "tiny"


def test_every_row_of_the_table_names_a_test_that_exists() -> None:
    here = Path(__file__).parent
    rows = [line for line in (here.parent / "docs" / "user-problems.md").read_text().splitlines()
            if line.startswith("| ") and "test_" in line]
    assert len(rows) >= 20
    for row in rows:
        file, _, name = row.rsplit("|", 2)[1].strip().strip("`").partition("::")
        text = (here / Path(file).name).read_text()
        assert not name or name in text, row
