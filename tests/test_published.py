"""Published rows as plans: parsing, reasons, conventions of FLOPs by hand, and the command on a small table."""

import csv
import json

import pytest

from mixfleet import cli
from mixfleet.calibrate import frameworks, published
from mixfleet.calibrate.frameworks import Framework
from mixfleet.calibrate.published import Inexpressible, device_of, read, work
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.program.layout import Layout

ROW = {
    "id": "vtrain-0001.step", "source": "somewhere", "year": "2024", "model": "GPT-tiny", "params_b": "", "layers": "4",
    "hidden": "256", "heads": "4", "kv_heads": "", "ffn": "1024", "vocab": "1000", "seq_len": "128", "dtype": "fp16",
    "gpu": "A100", "gpus_per_node": "8", "num_gpus": "8", "interconnect": "single node NVLink", "dp": "2", "tp": "2",
    "pp": "2", "cp": "1", "ep": "", "vpp": "", "zero_stage": "", "micro_batch": "1", "global_batch": "8",
    "recompute": "full", "other_settings": "", "metric": "step_time_s", "value": "0.5",
}


ROUTED = {"model": "Qwen3-30B-A3B", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "ffn": "",
          "vocab": "151936", "seq_len": "4096", "dtype": "bf16", "gpu": "H100", "dp": "8", "tp": "1", "pp": "1",
          "ep": "8", "recompute": ""}
"""Of a run whose experts are shared."""


def table(tmp_path, *changes):
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        for change in changes:
            writer.writerow({**ROW, **change})
    return path


def case(tmp_path, **change):
    cases, skipped = read(table(tmp_path, change))
    assert not skipped, skipped
    return cases[0]


def reason(tmp_path, **change):
    cases, skipped = read(table(tmp_path, change))
    assert not cases
    return next(iter(skipped))[2]


def test_a_row_becomes_model_job_plan_and_cluster(tmp_path):
    found = case(tmp_path)
    pipe = found.plan.pipelines[0]
    assert [s.blocks for s in pipe.stages] == [(0, 3), (3, 6)]
    assert pipe.stages[1].devices == (4, 5, 6, 7)
    assert pipe.stages[1].tensor == 2
    assert (pipe.replicas, pipe.samples, pipe.micro_batch) == (2, 4, 1)
    assert pipe.stages[0].recompute == ("none", "full", "full")  # the embedding and the head are not wrapped
    assert pipe.stages[1].recompute == ("full", "full", "none")
    assert found.job.attention == "eager"
    assert found.job.precision == "fp16"
    assert found.step_s == 0.5
    assert found.cluster.nodes[0].devices[0].name == "A100-SXM4-80GB"
    assert len(found.cluster.nodes) == 1


def test_interleaved_stages_hybrid_sharding_and_listed_layers(tmp_path):
    chunks = case(tmp_path, vpp="2", id="dgxc-1.step")
    assert chunks.plan.schedule == "interleaved"
    assert [s.chunks for s in chunks.plan.pipelines[0].stages] == [((0, 2), (3, 4)), ((2, 3), (4, 6))]
    assert chunks.plan.sharding.optimizer == 2  # NeMo's distributed optimizer
    hybrid = case(tmp_path, dp="16", tp="1", pp="1", num_gpus="16", global_batch="16", zero_stage="3",
                  other_settings="FSDP HYBRID_SHARD")
    assert hybrid.plan.sharding.weights == hybrid.plan.sharding.optimizer == 8
    listed = case(tmp_path, other_settings="layers per stage incl. embedding and head=[2, 4]")
    assert [s.blocks for s in listed.plan.pipelines[0].stages] == [(0, 2), (2, 6)]


def test_mixed_clusters_have_a_node_per_kind_on_gigabit_ethernet(tmp_path):
    found = case(tmp_path, id="sailor-1.step", dtype="", gpu="2xRTX3090-24GB+2xTitanRTX-24GB", num_gpus="4",
                 gpus_per_node="2", dp="1", global_batch="4", vocab="")
    assert [n.devices[0].name for n in found.cluster.nodes] == ["RTX3090", "TitanRTX"]
    assert found.cluster.nodes[0].nic.bandwidth_Bps == 1e9 / 8
    assert found.job.precision == "fp32"
    assert found.job.model.vocab == 50304
    alike = case(tmp_path, id="sailor-1.step", dtype="fp32", gpu="GH200-96GB", gpus_per_node="4")
    assert alike.job.precision == "tf32"


@pytest.mark.parametrize(("change", "why"), [
    ({"dtype": "mxfp8"}, "has no fp8 units"), ({"dtype": "int8"}, "precision int8"),
    ({"dtype": ""}, "precision is not stated"),
    ({"ep": "8"}, "mixture of experts"),
    ({**ROUTED, "tp": "2", "dp": "4", "ep": "4"}, "whether tensor parallelism cuts"),
    ({**ROUTED, "hidden": "1024"}, "hidden is not that of qwen3-30b-a3b"),
    ({**ROUTED, "other_settings": "Muon optimizer"}, "the optimizer Muon"),
    ({"other_settings": "MoE 128 experts top8"}, "mixture of experts"), ({"layers": ""}, "not a transformer"),
    ({"other_settings": "QLoRA rank 8"}, "4-bit weights"), ({"dp": ""}, "dp is not stated"),
    ({"dp": "4"}, "dp * cp * tp * pp"), ({"global_batch": "7"}, "whole micro-batches"),
    ({"vocab": ""}, "vocab is not stated"), ({"heads": "four"}, "heads is not a number"),
    ({"vpp": "8"}, "more stages than layers"), ({"gpu": "Z9000"}, "unknown device"), ({"value": "0"}, "not positive"),
    ({"value": ""}, "value is not stated"), ({"metric": "fps"}, "no conversion"), ({"heads": "3"}, "heads"),
    ({"num_gpus": "12", "dp": "3", "global_batch": "6"}, "gpus_per_node"),
    ({"other_settings": "use for ranking only"}, "the table says"),
])
def test_other_rows_are_counted_with_the_reason(tmp_path, change, why):
    assert why in reason(tmp_path, **change)


def test_one_run_counts_once_by_the_metric_that_needs_least_conversion(tmp_path):
    path = table(tmp_path, {"id": "vtrain-1.tf", "metric": "tflops_per_gpu", "value": "50"},
                 {"id": "vtrain-1.step", "value": "0.25"},
                 {"id": "vtrain-1.mem", "metric": "peak_mem_gib", "value": "3"})
    cases, skipped = read(path)
    assert (cases[0].step_s, cases[0].peak_bytes, cases[0].where) == (0.25, 3 * 2**30, {"step": 1, "memory": 2})
    assert dict(skipped) == {("vtrain", "A100", "another metric of a run that is counted"): 1}


def test_memory_counts_in_the_unit_that_the_source_means(tmp_path):
    row = {"id": "finetune-1.mem", "metric": "peak_mem_gib", "value": "3"}
    assert case(tmp_path, **row).peak_bytes == 3 * 2**30
    assert case(tmp_path, source="QwenLM/Qwen@1:README.md", **row).peak_bytes == 3e9


def test_rates_become_seconds(tmp_path):
    tokens = case(tmp_path, metric="tokens_per_s_per_gpu", value="64")
    assert tokens.step_s == pytest.approx(8 * 128 / 64 / 8)
    assert case(tmp_path, metric="samples_per_s", value="16").step_s == 0.5


def test_conventions_of_flops_by_hand(tmp_path):
    model = build({"layers": 4, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1000, "style": "gpt"})
    matrices, logits = 12 * 4 * 256**2, 1000 * 256
    assert work(model, 128, "none", recompute=False) == 6 * (matrices + logits)
    assert work(model, 128, "full", recompute=False) == 6 * (matrices + logits) + 12 * 4 * 256 * 128
    assert work(model, 128, "causal", recompute=True) == 8 * matrices + 8 * 4 * 256 * 128 + 6 * logits
    # Narayanan et al., 2021: 96 B s l h^2 (1 + s/6h + V/16lh) counts a recomputed step with logits once
    whole = 96 * 4 * 256**2 * (1 + 128 / (6 * 256) + 1000 / (16 * 4 * 256))
    assert work(model, 128, "full", recompute=True) == pytest.approx(whole)
    counted = case(tmp_path, id="bigscience-1.tf", metric="tflops_per_gpu", value="10")
    assert counted.step_s == pytest.approx(whole * 8 * 128 / (10e12 * 8))
    utilized = case(tmp_path, id="llmfoundry-1.mfu", metric="mfu", value="0.4", recompute="full")
    assert utilized.step_s == pytest.approx(work(model, 128, "full", recompute=False) * 8 * 128 / (0.4 * 312e12 * 8))


def test_names_of_gpus():
    assert device_of("A100-80GB-PCIe").name == "A100-PCIe-80GB"
    assert device_of("A100-40GB").name == "A100-SXM4-40GB"
    assert device_of("H100-80GB-SXM").name == "H100-SXM"
    assert device_of("V100").name == "V100-SXM2-16GB"
    assert device_of("RTX2080-11GB").name == "RTX2080Ti"
    assert device_of("L40S-48GB").name == "L40S"
    assert device_of("RTXA6000-48GB").name == "A6000"
    assert device_of("RTXPRO6000-96GB").name == "RTXPRO6000-SE"
    half, whole = device_of("MI250-GCD-64GB"), device_of("MI250")
    assert half.memory_bytes == whole.memory_bytes // 2
    assert half.flops["fp16"] * 2 == whole.flops["fp16"]
    reduced = device_of("H100-96GB-HBM2e-500W")
    assert reduced.flops == device_of("H100-80GB").flops
    assert reduced.memory_Bps == 2.4e12
    with pytest.raises(InputError, match="unknown device"):
        device_of("A100-97GB-PCIx")


def test_memory_counts_as_the_source_counts_it(tmp_path):
    found = case(tmp_path)
    plan, job, device = found.plan, found.job, found.cluster.devices[0]
    use = published.predict(plan, job, found.cluster).devices[0]
    held = use.breakdown

    def peak(**changes):
        return frameworks.peak_bytes(use, plan, job, device, Framework(**changes))

    assert peak() == pytest.approx(use.peak_bytes, abs=4)
    no_link = device.replace(link_Bps=50e9)
    assert frameworks.peak_bytes(use, plan, job, no_link, Framework()) == pytest.approx(use.peak_bytes, abs=4)
    allocated = peak(counted="allocated")
    assert allocated == sum(n for what, n in held.items() if what not in ("framework", "allocator"))
    assert peak(counted="reserved") == pytest.approx(use.peak_bytes - held["framework"], abs=4)
    assert peak(lazy=False) - peak() == frameworks.KERNELS_BYTES
    assert peak(groups=True) - peak() == 2 * 640 * 2**20  # of a copy of the model, and of all ranks
    table = max(p.count for p in job.model.blocks[0].params) // 2 * 2  # half of it, in 16 bits
    assert peak(expandable=False, counted="reserved") == round((allocated + table) * frameworks.UNEXPANDED)
    pure = frameworks.allocated_bytes(use, plan, job, Framework(pure=True))
    assert allocated - pure == held["master"] + held["moments"] / 2 + held["gradients"] / 2 + held.get(
        "optimizer temporaries", 0) + held.get("gradient buffers", 0) / 2


def test_without_sequence_parallelism_what_lies_between_products_is_whole():
    """At micro-batch 3, 128 tokens, tensor degree 4: the layer's input and the sum inside it."""
    kept = [{s.name: s.size.at(3, 128, 4) for s in frameworks.rewritten(
        LLAMA, JOB, device_of("A100"), Framework(sequence_parallel=whole)).blocks[1].saved if s.device != "cpu"}
        for whole in (True, False)]
    assert kept[0]["input"] == kept[0]["norm2.input"] == 3 * 128 * 256 / 4
    assert {name for name, n in kept[1].items() if n != kept[0][name]} == {
        "input", "norm1.statistics", "norm2.input", "norm2.statistics"}
    assert kept[1]["input"] == kept[1]["norm2.input"] == 3 * 128 * 256


def test_deepspeed_adds_up_gradients_of_16_bits_in_fp16_and_has_both_kinds_in_bf16(tmp_path):
    """Times the 16-bit weights. In fp16 a bucket for all of so small a model (1), gradients of 2 bytes for 4 (-1), and
    those of a half's step, of 2 and 4 bytes (1.5); in bf16 a bucket in fp32 (2) and the 16-bit gradients (1)."""
    extra = []
    for dtype, stage in (("fp16", 1), ("bf16", 1), ("bf16", 2)):
        found = case(tmp_path, dtype=dtype, zero_stage=str(stage))
        use = published.predict(found.plan, found.job, found.cluster).devices[0]
        plain, deepspeed = (frameworks.allocated_bytes(use, found.plan, found.job, Framework(bucket_elements=n))
                            for n in (0, 5 * 10**8))
        extra.append((deepspeed - plain) / use.breakdown["weights"])
    assert extra[:2] == pytest.approx([1.5, 3.0], rel=1e-3)
    sharded = use.breakdown["gradients"] / use.breakdown["weights"]
    assert extra[2] == pytest.approx(1 - sharded / 2, rel=1e-3)  # its part of 2 bytes instead of 4, and a bucket


def test_fine_tuning_scripts_are_told_by_the_owner_of_their_code(tmp_path):
    """Sharded units of frozen and trained weights make gradients of all; what trains whole has an original beside."""
    base = frameworks.of("finetune")
    litgpt = frameworks.tuned(base, "Lightning-AI", "Llama-2-7B", "LoRA fine-tuning", alone=False)
    assert (litgpt.pure, litgpt.counted, litgpt.whole_gradients) == (True, "allocated", True)
    qwen = frameworks.tuned(base, "QwenLM", "Qwen-7B", "LoRA (embeddings trained) fine-tuning", alone=True)
    assert (qwen.pure, qwen.counted, qwen.copies_trained, qwen.joined) == (True, "used", True, True)
    assert not frameworks.tuned(base, "QwenLM", "Qwen-7B", "full fine-tuning", alone=True).pure
    tune = [frameworks.tuned(base, "pytorch", "Llama-3.2-3B", text, alone=True).logit_bytes for text in (
        "LoRA fine-tune", "baseline (unpacked)", "baseline (unpacked) + torch.compile",
        "baseline (unpacked) + torch.compile + chunked cross entropy")]
    assert tune == [1.5, 12.0, 2.0, 1.5]
    found = case(tmp_path, id="finetune-1.step", dtype="bf16", zero_stage="3", tp="1", pp="1", dp="8",
                 other_settings="LoRA rank 8", recompute="full")
    use = published.predict(found.plan, found.job, found.cluster).devices[0]
    sizes = [frameworks.allocated_bytes(use, found.plan, found.job, f) for f in (
        Framework(), Framework(whole_gradients=True), Framework(copies_trained=True))]
    every = sum(p.count for b in found.job.model.blocks for p in b.params if not p.tied)
    assert sizes[1] - sizes[0] == 2 * every
    assert sizes[2] == sizes[0]  # only LoRA's own weights train
    assert "8-bit optimizer" in reason(tmp_path, source="pytorch/torchtune@1:README.md", num_gpus="1", dp="1", tp="1",
                                       pp="1", other_settings="full fine-tune; batch 2")


def test_recompute_by_operator_keeps_every_second_product_and_attention():
    """Of a gated layer: its input, q, v, attention, gate, and without a compiler down too."""
    names = [{s.name for s in frameworks.rewritten(LLAMA, JOB, device_of("A100"), Framework(saves_products=what))
              .blocks[1].saved if s.until == "selective" and s.device != "cpu"} for what in ("all", "needed")]
    assert names[1] == {"attention.q", "attention.v", "attention.out", "attention.logsumexp", "mlp.gate_out"}
    assert names[0] - names[1] == {"mlp.out"}


def test_tied_embeddings_follow_from_the_parameters(tmp_path):
    """A Llama of 4 layers: 4 (4 * 64 k + 3 * 256 * 704) + 256 k of each table, in billions."""
    layers = 4 * (4 * 256 * 256 + 3 * 256 * 704)
    heads = [case(tmp_path, model="Llama-x", ffn="704", params_b=f"{(layers + n * 256_000) / 1e9:.5f}").job.model.blocks
             for n in (1, 2)]
    tied = [blocks[-1].params[-1].tied for blocks in heads]
    assert tied == ["embed/tokens.weight", ""]
    assert not case(tmp_path, model="Llama-x", ffn="704").job.model.blocks[-1].params[-1].tied


def test_rmsnorm_in_elementwise_kernels_keeps_its_input_in_fp32():
    kept = [sum(s.size.at(3, 128, 1) * s.element_bytes(2) for s in frameworks.rewritten(
        LLAMA, JOB, device_of("A100"), f).blocks[1].saved if s.device != "cpu")
        for f in (Framework(), frameworks.EAGER_LLAMA)]
    assert kept[1] - kept[0] == 2 * 2 * 3 * 128 * 256  # two norms, 2 bytes more each


MODEL = build({"layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1000, "style": "gpt", "max_seq_len": 128})
LLAMA = build({"layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1000, "style": "llama",
               "max_seq_len": 128})
JOB = Job(name="x", model=MODEL, seq_len=128, global_batch=8, precision="fp16", attention="eager")


def layer(framework, model=MODEL, job=JOB):
    return frameworks.rewritten(model, job, device_of("A100"), framework).blocks[1].ops


def test_without_sequence_parallelism_all_ranks_norm_all_tokens():
    norms = [[op.traffic.at(2, 128, 4) for op in layer(Framework(sequence_parallel=whole)) if op.kind == "norm"]
             for whole in (True, False)]
    assert norms == [[2 * 2 * 128 / 4 * 256] * 2, [2 * 2 * 128 * 256] * 2]


def test_joined_products_do_the_same_work_in_fewer_kernels():
    plain, joined = (layer(Framework(joined=j)) for j in (False, True))
    assert [op.name for op in joined if op.kind == "gemm"] == ["attention.q", "attention.o", "mlp.up", "mlp.down"]
    assert sum(op.flops.at(2, 128, 2) for op in joined) == sum(op.flops.at(2, 128, 2) for op in plain)
    wide = next(op for op in joined if op.name == "attention.q")
    assert wide.shape["n"].at(2, 128, 2) == 3 * 256 / 2


def test_eager_attention_is_two_products_and_passes_over_the_scores():
    plain = sum(op.flops.at(3, 128, 2) for op in layer(Framework()))
    eager = layer(Framework(score_passes=(5.0, 7.0), copied=2.0))
    assert sum(op.flops.at(3, 128, 2) for op in eager) == plain
    between = next(op for op in eager if op.name == "attention.softmax")
    scores, rows = 3 * (4 / 2) * 128 * 128, 3 * (4 / 2) * 128 * 64
    assert between.traffic.at(3, 128, 2) == 5 * scores + 2 * 4 * rows
    assert between.backward_traffic.at(3, 128, 2) == 7 * scores + 2 * 4 * rows
    assert layer(Framework(score_passes=(5.0, 7.0)), job=JOB.replace(attention="fused")) == layer(Framework())


def test_norms_rotations_gates_and_losses_are_one_kernel_or_several():
    names = ("norm1", "attention.rotate", "mlp.activation")
    sizes = (3 * 128 * 256, 3 * 128 * 2 * 256, 3 * 128 * 1024)  # q and k are rotated

    def passes(framework, job):
        ops = {op.name: op for op in frameworks.rewritten(LLAMA, job, device_of("A100"), framework).blocks[1].ops}
        return [(ops[n].traffic.at(3, 128, 1) / size, ops[n].backward_traffic.at(3, 128, 1) / size, ops[n].kind)
                for n, size in zip(names, sizes)]

    job = JOB.replace(model=LLAMA, precision="bf16")
    assert passes(Framework(), job) == [(2, 3, "norm"), (2, 2, "elementwise"), (5, 8, "elementwise")]
    eager = frameworks.of("torchtitan")
    assert passes(eager, job) == [(18, 38, "elementwise"), (10, 10, "elementwise"), (5, 8, "elementwise")]
    assert passes(eager, job.replace(precision="fp32"))[0] == (2, 3, "norm")
    compiled = frameworks.of("torchtitan", "bf16", "FSDP2 + torch.compile + Float8")
    assert passes(compiled, job) == passes(frameworks.MEGATRON_CORE, job) == [
        (2, 3, "norm"), (2, 2, "elementwise"), (3, 5, "elementwise")]
    plain, online = (frameworks.rewritten(LLAMA, job, device_of("A100"), f).blocks[-1].ops[-1].traffic.at(3, 128, 1)
                     for f in (Framework(), frameworks.of("mbridge")))
    assert online == pytest.approx(plain * 10 / 36)


def test_dropout_keeps_masks_and_what_remains():
    """Of 2 bytes a score 5, of 2 bytes a token's sum 4."""
    kept = [{s.name: s.size.at(3, 128, 1) for s in
             frameworks.rewritten(MODEL, JOB, device_of("A100"), f).blocks[1].saved}
            for f in (Framework(), Framework(dropped=True))]
    more = {name: kept[1][name] / n for name, n in kept[0].items() if kept[1][name] != n}
    assert more == {"attention.probabilities": 2.5, "norm2.input": 2.0}


def test_backward_of_scores_reuses_what_dropout_made():
    """5 bytes a score and 2 for a gradient at most: the product's with all 5, or dropout's two with the 3 left then."""
    plain, dropped = (frameworks.rewritten(MODEL, JOB, device_of("A100"), f).blocks[1].unfused_temporaries.at(3, 128, 1)
                      for f in (Framework(), Framework(dropped=True)))
    assert plain - dropped == 3 * MODEL.heads * 128 * 128


def test_lora_trains_narrow_products_beside_frozen_ones(tmp_path):
    """Rank 8 beside q, k, v, o (64 x 64 at 4 heads ...) and an MLP of 4 times the width, in 4 layers."""
    plain, lora = case(tmp_path), case(tmp_path, other_settings="LoRA rank 8, PyTorch FSDP")
    h = plain.job.model.hidden
    trained = sum(p.count for b in lora.job.model.blocks for p in b.params if p.trainable)
    assert trained == 4 * 8 * (4 * 2 * h + 2 * 5 * h)
    ops = {op.name: op for op in lora.job.model.blocks[1].ops}
    rows = 3 * 128
    assert ops["mlp.up.lora_a"].flops.at(3, 128, 1) == 2 * rows * 8 * h
    assert ops["mlp.up.lora_b"].flops.at(3, 128, 1) == 2 * rows * 8 * 4 * h
    narrow = case(tmp_path, other_settings="LoRA", id="nemo-1.step").job.model
    assert {p.name.partition(".lora")[0] for p in narrow.blocks[1].params if p.trainable} == {
        "attention.q", "attention.k", "attention.v"}
    ends = case(tmp_path, other_settings="LoRA (embeddings trained)").job.model
    assert all(p.trainable for b in (ends.blocks[0], ends.blocks[-1]) for p in b.params)
    scores = [published.score(c) for c in (plain, lora)]
    assert scores[1].peak_bytes < scores[0].peak_bytes


def test_recompute_that_only_the_settings_state(tmp_path):
    stated = case(tmp_path, recompute="", other_settings="seq and AC as in llama3_8b.toml default (8192, selective op)")
    assert stated.recompute == case(tmp_path, recompute="selective (op)").recompute == "products"
    run = case(tmp_path, recompute="selective (op)", id="torchtitan-1.mem", metric="peak_mem_gib", value="3",
               model="Llama-x", ffn="1408", tp="1", dp="4", global_batch="16")
    every, kept, none = (published.score(run._replace(recompute=r)) for r in ("as planned", "products", "half"))
    assert kept.step_s == none.step_s
    assert kept.peak_bytes < every.peak_bytes


def test_settings_name_the_code_base_and_what_it_hides():
    assert frameworks.of("dgxc", "bf16", "NeMo 24.09").hides_tensor
    assert frameworks.of("dgxc", "bf16", "JAX MaxText, FSDP degree 64 x DP 1") == frameworks.XLA
    hidden = [frameworks.of("torchtitan", "bf16", f"FSDP 8 x TP 8, {what}").hides_tensor
              for what in ("torch.compile, vanilla TP", "async TP", "AsyncTP, Float8, compile; schedule 1F1B")]
    assert hidden == [False, True, True]


def test_hidden_exchanges_leave_one_piece_bare(tmp_path):
    found = case(tmp_path, tp="2", dp="1", pp="1", num_gpus="2", global_batch="2")
    device = found.cluster.devices[0]
    step = published.predict(found.plan, found.job, found.cluster)
    bare, hidden = (frameworks.step_s(step, found.plan, found.job, device, Framework(hides_tensor=h))
                    for h in (False, True))
    exchanged = sum(s.fraction for s in step.critical if s.category == "tensor") * step.step_s
    assert exchanged > 0
    assert bare - hidden == pytest.approx(exchanged / 2)


def test_rows_move_to_experts_behind_other_micro_batches(tmp_path):
    """All but those of one, for as long as there is computing to hide behind."""
    assert [frameworks.bridged(Framework(), f"release {r}; Megatron-Bridge; precision {p}").hides_experts
            for r, p in (("26.06", "MXFP8"), ("27.02.01", "MXFP8"), ("26.04.01", "MXFP8"), ("26.06", "BF16"))] == [
        True, True, False, False]
    found = case(tmp_path, **ROUTED, global_batch="24")
    device, micros = found.cluster.devices[0], 3
    assert len(found.plan.pipelines[0].micro_batches) == micros
    step = published.predict(found.plan, found.job, found.cluster)
    (expert,) = (s for s in step.critical if s.category == "expert")
    for exchanged, saved in ((0.3, 0.2), (0.8, 2 / 15)):  # of 0.8 there is room for 0.2
        other = step.replace(critical=(expert.replace(fraction=exchanged), expert.replace(
            category="forward", fraction=1 - exchanged)))
        whole, hidden = (frameworks.step_s(other, found.plan, found.job, device, Framework(hides_experts=h))
                         for h in (False, True))
        assert whole - hidden == pytest.approx(saved * step.step_s)


def test_separate_kernels_move_more():
    plain, slow = (layer(Framework(activation_passes=p, dropout=d)) for p, d in (((0, 0), 0), ((16, 20), 2.25)))
    more = {a.name: (b.traffic.at(3, 128, 1) - a.traffic.at(3, 128, 1)) for a, b in zip(plain, slow)}
    assert {name: n for name, n in more.items() if n} == {
        "mlp.activation": 16 * 3 * 128 * 1024, "add1": 2.25 * 3 * 128 * 256, "add2": 2.25 * 3 * 128 * 256}


def test_a_fused_optimizer_and_gradients_in_products_save_time(tmp_path):
    found = case(tmp_path)
    device = found.cluster.devices[0]
    step = published.predict(found.plan, found.job, found.cluster)
    times = [frameworks.step_s(step, found.plan, found.job, device, f) for f in (
        Framework(optimizer="chunked"), Framework(), Framework(adding=0.0))]
    assert times[0] == step.step_s
    assert times[0] > times[1] > times[2] > 0
    tensors = max(sum(len(found.job.model.blocks[b].params) for b in s.held) for s in found.plan.pipelines[0].stages)
    looped = frameworks.updating_s(1e-6, found.plan, found.job, Framework(optimizer="loop"))
    assert looped == pytest.approx(tensors * 14 * 10e-6)  # the host is slower than a small model's device
    assert frameworks.updating_s(3.0, found.plan, found.job, Framework(optimizer="loop")) == 3.0


def test_nvidias_bert_loops_over_parameters_unless_in_16_bits():
    assert [frameworks.of("lambda", t).optimizer for t in ("fp16", "fp32", "tf32")] == ["fused", "loop", "loop"]
    assert frameworks.of("dle", "fp32").optimizer == "fused"


def test_a_run_that_states_no_recompute_recomputes_as_little_as_lets_it_fit(tmp_path):
    small = case(tmp_path, recompute="")
    assert published.score(small).step_s == published.score(small._replace(recompute="as planned")).step_s
    figures = {"layers": "48", "hidden": "4096", "heads": "32", "ffn": "16384", "seq_len": "4096", "tp": "8", "dp": "1",
               "pp": "1", "micro_batch": "4", "id": "anybody-1.step", "gpu": "A100-40GB"}
    large = case(tmp_path, recompute="", **figures)
    none, some = published.score(large._replace(recompute="as planned")), published.score(large)
    full = published.score(case(tmp_path, recompute="full", **figures))
    assert not none.fits
    assert full.fits
    assert some.fits
    assert none.step_s < some.step_s < full.step_s
    moved = published.score(large._replace(framework=large.framework._replace(offloads=True)))
    assert (moved.step_s, moved.ceiling_s, moved.fits) == (none.step_s, none.ceiling_s, True)
    assert moved.peak_bytes == some.peak_bytes
    half = published.score(large._replace(recompute="half"))
    assert half.step_s == pytest.approx((none.step_s + full.step_s) / 2)


def test_narrow_types_are_those_of_the_layers_products(tmp_path):
    """Scales are from the tensor itself where the source says so."""
    hopper = {"dtype": "fp8", "gpu": "H100-80GB", "other_settings": ""}
    for run, products in (("dgxc-1.step", "fp8"), ("mbridge-1.step", "fp8-current")):
        found = case(tmp_path, id=run, **hopper).job
        assert (found.precision, found.products) == ("bf16", products)
    assert case(tmp_path, gpu="B200", dtype="nvfp4").job.products == "nvfp4"


def test_runs_of_megatron_bridge_hold_their_clock_in_narrow_types_and_recompute_no_layers(tmp_path):
    hopper = {"gpu": "H100-80GB", "recompute": ""}
    for run, dtype, clock, offloads, gradients in (
            ("mbridge-1.step", "fp8", 1.0, True, 2), ("mbridge-1.step", "bf16", None, True, 2),
            ("dgxc-1.step", "fp8", None, False, 4)):
        found = case(tmp_path, id=run, dtype=dtype, **hopper)
        assert {d.clock for d in found.cluster.devices} == {clock}
        assert (found.framework.offloads, found.job.bytes.gradient_bytes) == (offloads, gradients)


def test_key_heads_follow_from_the_number_of_parameters(tmp_path):
    """12 h^2 a layer with as many key heads as query heads, 10 h^2 and a bit with few."""
    figures = {"layers": "32", "hidden": "6144", "heads": "48", "kv_heads": "", "ffn": "24576", "vocab": "256000",
               "params_b": "15.6"}
    assert case(tmp_path, **figures).job.model.kv_heads == 8
    assert case(tmp_path, **figures | {"params_b": "17.7"}).job.model.kv_heads == 48
    assert case(tmp_path, **figures | {"params_b": ""}).job.model.kv_heads == 48


def test_samples_that_are_packed_do_not_see_each_other(tmp_path):
    """4,096 tokens as 20 samples of 204.8: scores are a twentieth, all else is as it was."""
    figures = {"id": "nemo-1.step", "seq_len": "4096", "gpu": "H100-80GB"}
    whole, apart = (case(tmp_path, **figures, other_settings=text).job.model.blocks[1]
                    for text in ("pre-training", "SFT fine-tuning, packed sequences of 4096"))
    for a, b in zip(whole.ops, apart.ops, strict=True):
        if a.kind == "attention":
            assert a.flops.at(2, 4096, 1) == pytest.approx(20 * b.flops.at(2, 4096, 1))
            assert (b.shape["batch"].at(2, 4096, 1), b.shape["q"].at(2, 4096, 1)) == (40, pytest.approx(204.8))
        else:
            assert a == b


def test_tensorflow_looks_at_all_gradients_in_every_micro_batch(tmp_path):
    """10 passes over fp32 gradients and 8 kernels of 10 us a tensor, for each of the micro-batches."""
    figures = {"id": "dle-1.step", "gpu": "A100", "num_gpus": "1", "dp": "1", "tp": "1", "pp": "1", "micro_batch": "1",
               "global_batch": "3", "seq_len": "128"}
    plain, more = (published.score(case(tmp_path, **figures, other_settings=text)).step_s
                   for text in ("framework=PaddlePaddle", "framework=TensorFlow"))
    model = case(tmp_path, **figures).job.model
    bare = 3 * sum(8 * 10e-6 * len(b.params) for b in model.blocks)
    assert more > plain + bare


def test_hooks_of_deepspeed_keep_the_host_busy_however_few_the_tokens(tmp_path):
    """8 micro-batches of a model of 40 + 3 + 3 tensors; layers are computed again, so their hooks run three times."""
    row = {"source": "QwenLM/Qwen@1:README.md", "dtype": "bf16", "tp": "1", "pp": "1", "dp": "1", "num_gpus": "1"}
    tuned = [case(tmp_path, id="finetune-1.step", other_settings=text, **row) for text in (
        "full fine-tuning", "LoRA fine-tuning")]
    assert [c.framework.hook_s for c in tuned] == [frameworks.HOOK_S, 0.0]
    found, device = tuned[0], device_of("A100")
    ends, layers = ([len(b.params) for b in found.job.model.blocks[cut]] for cut in (slice(0, None, 5), slice(1, -1)))
    slow = published.predict(found.plan, found.job, found.cluster, sent=False)
    assert frameworks.step_s(slow, found.plan, found.job, device, Framework(hook_s=0.1)) == pytest.approx(
        8 * 0.1 * (2 * sum(ends) + 3 * sum(layers)))
    bare, hooked = (frameworks.step_s(slow, found.plan, found.job, device, Framework(hook_s=x)) for x in (0, 1e-9))
    assert bare == hooked  # a device that is slower than its host waits for nothing


def test_heads_of_encoders(tmp_path):
    span = case(tmp_path, model="BERT-Base SQuAD fine-tune", seq_len="", tp="1", dp="4")
    assert span.job.seq_len == 384
    assert [op.name for op in span.job.model.blocks[-1].ops] == ["norm", "span"]
    whole = case(tmp_path, tp="1", dp="4").job.model.blocks[-1]
    masked = case(tmp_path, model="BERT-Large", other_settings="pre-training", tp="1", dp="4").job.model.blocks[-1]
    for a, b in zip(whole.ops, masked.ops, strict=True):
        part = 20 / 128 if a.kind in ("gemm", "loss") else 1
        assert b.flops.at(4, 128) == part * a.flops.at(4, 128)
        assert b.traffic.at(4, 128) == part * a.traffic.at(4, 128)


def test_what_is_open_of_the_model(tmp_path):
    found = case(tmp_path, heads="", kv_heads="", ffn="", hidden="768")
    assert (found.job.model.heads, found.job.model.config["ffn"]) == (6, 3072)
    assert case(tmp_path, heads="", hidden="640", tp="4", dp="1").job.model.heads == 4


def test_context_parallel_rows(tmp_path):
    found = case(tmp_path, cp="2", tp="1", id="anybody-1.step", recompute="none")
    assert (found.plan.pipelines[0].context, found.plan.pipelines[0].replicas) == (2, 2)
    assert len(found.plan.pipelines[0].stages[0].devices) == 4
    assert published.score(found).step_s > 0


def test_embedding_and_head_as_layers(tmp_path):
    stages = case(tmp_path, layers="10", tp="1", pp="4").plan.pipelines[0].stages
    assert [s.blocks for s in stages] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_nanotron_cuts_stages_by_the_flops_of_products(tmp_path):
    """A layer has (4 + 3 * 4) * 256**2 = 1.05 M weights, the head 8,192 * 256 = 2 layers' worth, so the first of two
    stages takes layers until it has more than 6 of 12; of three, until it has more than 4, and the second until both
    have 8."""
    assert published._by_cost([0, *[1] * 10, 2], 2) == [0, 8, 12]
    assert published._by_cost([0, *[1] * 10, 2], 3) == [0, 6, 10, 12]
    change = {"model": "Llama-tiny", "layers": "10", "vocab": "8192", "tp": "1", "dp": "4", "dtype": "bf16"}
    stages = [case(tmp_path, id=f"{source}-1.step", **change).plan.pipelines[0].stages
              for source in ("nanotron", "torchtitan")]
    assert [[s.blocks for s in each] for each in stages] == [[(0, 8), (8, 12)], [(0, 6), (6, 12)]]


def test_without_overlap_a_step_takes_what_was_hidden_longer(tmp_path):
    found = case(tmp_path)
    alone = published.score(found._replace(framework=found.framework._replace(overlaps=True))).step_s
    assert published.score(found).step_s > alone


def test_gradients_in_fp16_are_exchanged_as_such(tmp_path):
    """Half of the bytes of fp32 ones; in bf16 they move in fp32."""
    for dtype, part in (("fp16", 0.5), ("bf16", 1.0)):
        found = case(tmp_path, id="bigscience-1.step", dtype=dtype, tp="1", pp="1", dp="8")
        device = device_of("A100")
        simulated = published.predict(found.plan, found.job, found.cluster, sent=False, trace=True)
        wide, narrow = (frameworks.step_s(simulated, found.plan, found.job, device, Framework(
            overlaps=False, reduces_16_bits=which)) for which in (False, True))
        moving = frameworks.trace.by_category(simulated.trace)[0]["reduce"]
        assert moving > 0
        assert wide - narrow == pytest.approx((1 - part) * moving, rel=0.02)


def test_the_command_states_errors_and_reasons(tmp_path, capsys):
    path = table(tmp_path, {}, {"id": "vtrain-2.step", "ep": "2"}, {"id": "dgxc-1.step", "dtype": "bf16"},
                 {"id": "bigscience-1.mem", "metric": "peak_mem_gib", "value": "3"})
    rows = tmp_path / "rows.csv"
    assert not cli.main(["validate", str(path), "--json", "--rows", str(rows)])
    found = json.loads(capsys.readouterr().out)
    why = "mixture of experts whose experts are not given as figures"
    assert found["not_expressible"] == {f"vtrain: {why}": 1}
    assert found["skipped"] == [{"source": "vtrain", "device": "A100", "rows": 1, "reason": why}]
    assert {(s["source"], s["device"], s["rows"]) for s in found["summaries"]} == {
        ("vtrain", "A100", 1), ("dgxc", "A100", 1)}
    assert [(s["source"], s["device"], s["rows"]) for s in found["memory_summaries"]] == [("bigscience", "A100", 1)]
    assert (found["total"]["rows"], found["memory_rows"], found["judged_not_to_fit"]) == (2, 1, 0)
    with rows.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [bool(r["measured_s"]) for r in written] == [True, True, False]
    assert written[2]["measured_bytes"] == str(3 * 2**30)
    assert not cli.main(["validate", str(path)])
    out = capsys.readouterr().out
    assert "mixture of experts" in out
    assert "peak memory" in out


def test_a_table_without_a_column_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,metric,value\n")
    with pytest.raises(InputError, match="no column 'model'"):
        read(path)
    with pytest.raises(Inexpressible):
        published.case_of("x-1", {"mfu": (0, {**ROW, "metric": "mfu", "value": "-1"})})


def test_experts_are_shared_by_replicas(tmp_path):
    """128 experts of width 768 over eight GPUs: 30.5e9 parameters, of which each holds an eighth of 29.0e9."""
    found = case(tmp_path, **ROUTED)
    assert (found.plan.expert, len(found.plan.replicas)) == (8, 8)
    assert found.job.model.count == pytest.approx(30.53e9, rel=1e-3)
    held = Layout(found.plan, found.job.model).elements("weights", 3)
    assert held == found.job.model.count - 48 * 128 * 3 * 768 * 2048 * 7 // 8
    # Megatron counts ranks: with tensor 2 and more of them than replicas, whole experts lie over the tensor group too.
    two = case(tmp_path, **{**ROUTED, "tp": "2", "dp": "4"})
    assert (two.plan.expert, two.plan.pipelines[0].stages[0].tensor) == (4, 2)
    sliced = case(tmp_path, **{**ROUTED, "model": "DeepSeek-V2-236B (4 layers)", "layers": "4", "hidden": "5120",
                               "other_settings": "layer 1 dense, 3 MoE; 160 experts top6"})
    assert [block.routed for block in sliced.job.model.blocks] == [False, False, True, True, True, False]
