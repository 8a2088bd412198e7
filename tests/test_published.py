"""Published rows as plans: parsing, reasons, conventions of FLOPs by hand, and the command on a small table."""

import csv
import json

import pytest

from mixfleet import cli
from mixfleet.calibrate import published
from mixfleet.calibrate.published import Inexpressible, device_of, read, work
from mixfleet.errors import InputError
from mixfleet.model.families import build

ROW = {
    "id": "vtrain-0001.step", "source": "somewhere", "year": "2024", "model": "GPT-tiny", "layers": "4",
    "hidden": "256", "heads": "4", "kv_heads": "", "ffn": "1024", "vocab": "1000", "seq_len": "128", "dtype": "fp16",
    "gpu": "A100", "gpus_per_node": "8", "num_gpus": "8", "interconnect": "single node NVLink", "dp": "2", "tp": "2",
    "pp": "2", "cp": "1", "ep": "", "vpp": "", "zero_stage": "", "micro_batch": "1", "global_batch": "8",
    "recompute": "full", "other_settings": "", "metric": "step_time_s", "value": "0.5",
}


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
    assert (pipe.replicas, pipe.samples, pipe.micro_batch, pipe.stages[0].recompute) == (2, 4, 1, "full")
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
    ({"dtype": "mxfp8"}, "precision mxfp8"), ({"dtype": ""}, "precision is not stated"),
    ({"cp": "2"}, "context parallelism"), ({"ep": "8"}, "expert parallelism inside data parallelism"),
    ({"other_settings": "MoE 128 experts top8"}, "mixture of experts"), ({"layers": ""}, "not a transformer"),
    ({"other_settings": "LoRA rank 8"}, "frozen weights"), ({"recompute": "selective (op)"}, "recompute selective"),
    ({"dp": ""}, "dp is not stated"), ({"dp": "4"}, "dp * tp * pp"), ({"global_batch": "7"}, "whole micro-batches"),
    ({"vocab": ""}, "vocab is not stated"), ({"heads": "four"}, "heads is not a number"),
    ({"vpp": "8"}, "more stages than layers"), ({"gpu": "Z9000"}, "unknown device"), ({"value": "0"}, "not positive"),
    ({"value": ""}, "value is not stated"), ({"metric": "fps"}, "no conversion"), ({"heads": "3"}, "heads"),
    ({"num_gpus": "12", "dp": "3", "global_batch": "6"}, "gpus_per_node"),
    ({"model": "BERT SQuAD fine-tune"}, "task head"),
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


def test_without_sequence_parallelism_activations_are_larger(tmp_path):
    found = case(tmp_path)
    use = published.predict(found.plan, found.job, found.cluster).devices[0]
    plain = published._peak_bytes(use, found, published.Framework())
    whole = published._peak_bytes(use, found, published.Framework(sequence_parallel=False))
    assert plain == pytest.approx(use.peak_bytes, abs=4)
    assert whole - plain >= use.breakdown["activations"]  # twice the layer inputs at tensor degree 2
    allocated = published._peak_bytes(use, found, published.Framework(counted="allocated"))
    assert allocated == sum(n for what, n in use.breakdown.items() if what not in ("framework", "allocator"))
    reserved = published._peak_bytes(use, found, published.Framework(counted="reserved"))
    assert reserved == pytest.approx(use.peak_bytes - use.breakdown["framework"], abs=4)


def test_without_sequence_parallelism_all_ranks_norm_all_tokens():
    model = build({"layers": 2, "hidden": 256, "heads": 4, "ffn": 1024, "vocab": 1000, "style": "gpt"})
    norms = [[op.traffic.at(2, 128, 4) for op in m.blocks[1].ops if op.kind == "norm"]
             for m in (model, published.replicated(model))]
    assert norms == [[2 * 2 * 128 / 4 * 256] * 2, [2 * 2 * 128 * 256] * 2]
    products = [[op.traffic.at(2, 128, 4) for op in m.blocks[1].ops if op.kind == "gemm"]
                for m in (model, published.replicated(model))]
    assert products[0] == products[1]


def test_without_overlap_a_step_takes_what_was_hidden_longer(tmp_path):
    found = case(tmp_path)
    alone = published.score(found._replace(source="anybody")).step_s
    assert published.score(found).step_s > alone


def test_the_command_states_errors_and_reasons(tmp_path, capsys):
    path = table(tmp_path, {}, {"id": "vtrain-2.step", "cp": "2"}, {"id": "dgxc-1.step", "dtype": "bf16"},
                 {"id": "bigscience-1.mem", "metric": "peak_mem_gib", "value": "3"})
    rows = tmp_path / "rows.csv"
    assert not cli.main(["validate", str(path), "--json", "--rows", str(rows)])
    found = json.loads(capsys.readouterr().out)
    assert found["not_expressible"] == {"vtrain: context parallelism": 1}
    assert {(s["source"], s["device"], s["rows"]) for s in found["summaries"]} == {
        ("vtrain", "A100", 1), ("dgxc", "A100", 1), ("bigscience, memory", "A100", 1)}
    assert found["total"]["rows"] == 2
    assert len(rows.read_text().splitlines()) == 4


def test_a_table_without_a_column_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,metric,value\n")
    with pytest.raises(InputError, match="no column 'model'"):
        read(path)
    with pytest.raises(Inexpressible):
        published.case_of("x-1", {"mfu": (0, {**ROW, "metric": "mfu", "value": "-1"})})
