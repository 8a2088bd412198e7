"""Predicted against published step times and peak memory.

    python benchmarks/accuracy.py TABLE.csv [--runs N] [--rows FILE.csv]

TABLE.csv holds published training runs, one metric per row (`id, model, layers, hidden, heads, ..., metric, value`).
A run counts if every figure that decides its plan is stated and the plan language has it; the sources are weighed
equally, whatever their number of runs. Half of the sources were looked at when the coefficients were chosen, the
others are held out. The assumptions that a table of this kind leaves open are the constants below.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mixfleet.catalog import efficiency
from mixfleet.cluster import Cluster, Link, Node, device_named
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.sim import predict
from mixfleet.units import GB, GiB

LOOKED_AT = ("bsv100", "llmfoundry", "neusight", "simumax", "vtrain")
HELD_OUT = ("bigscience", "dgxc", "megatron", "nanotron", "other", "torchtitan")
EAGER = ("bigscience", "bsv100", "megatron", "neusight", "vtrain")
"""Sources that trained without flash attention (before it existed, or plain eager PyTorch)."""
FORWARD_BACKWARD_ONLY = ("neusight",)
MODEL_FLOPS_PEAK = {"H100": 989e12, "A100": 312e12}
"""What the sources divide by for their utilization, per GPU."""

DEVICES = {
    "A100": "A100-SXM4-80GB", "A100-80GB": "A100-SXM4-80GB", "A100-80GB-SXM": "A100-SXM4-80GB",
    "A100-40GB": "A100-SXM4-40GB", "A100-40GB-SXM": "A100-SXM4-40GB", "A100-80GB-PCIe": "A100-PCIe-80GB",
    "H100-80GB": "H100-SXM", "H100-80GB-SXM": "H100-SXM", "H100-96GB-HBM2e-500W": "H100-SXM", "B200": "B200-SXM",
    "V100-16GB": "V100-SXM2-16GB", "V100-32GB": "V100-SXM2-32GB", "V100-32GB-PCIe": "V100-PCIe-32GB",
    "MI100-32GB": "MI100", "MI210-64GB": "MI210", "L4-24GB": "L4",
}
NIC_GBIT = {"V100": 100, "A100": 1600, "H100": 3200, "B200": 3200}
"""Per node, where the row does not state it."""
LINK_LATENCY_S, NIC_LATENCY_S = 3.4e-6, 5e-6


class Case(NamedTuple):
    """One published run as mixfleet sees it."""

    run: str
    source: str
    plan: Plan
    job: Job
    cluster: Cluster
    step_s: float | None
    peak_bytes: float | None


def number(row: dict[str, str], key: str, default: float | None = None) -> float:
    if row[key]:
        return float(row[key])
    if default is None:
        raise KeyError(key)
    return default


def count(row: dict[str, str], key: str, default: int | None = None) -> int:
    return int(number(row, key, default))


def model_of(row: dict[str, str]) -> dict[str, Any]:
    """Figures of the model: GPT style unless the name says Llama."""
    heads = count(row, "heads")
    figures: dict[str, Any] = {"layers": count(row, "layers"), "hidden": count(row, "hidden"), "heads": heads,
                               "kv_heads": count(row, "kv_heads", heads), "ffn": count(row, "ffn"),
                               "vocab": count(row, "vocab"), "max_seq_len": count(row, "seq_len")}
    if "Llama" in row["model"]:
        return {**figures, "style": "llama"}
    return {**figures, "style": "gpt"}


def cluster_of(row: dict[str, str]) -> Cluster:
    device = device_named(DEVICES[row["gpu"]])
    gpus = count(row, "num_gpus")
    per_node = min(gpus, count(row, "gpus_per_node", 8))
    text, generation = row["interconnect"], row["gpu"].split("-")[0]
    gbit = float(NIC_GBIT.get(generation, 100))
    if found := re.search(r"(\d+)x(\d+) Gb/s", text):
        gbit = float(found[1]) * float(found[2])
    elif found := re.search(r"(\d+) Gb/s (?:RDMA |CX-7 )?per GPU", text):
        gbit = float(found[1]) * per_node
    elif found := re.search(r"(\d+) Gbps", text):
        gbit = float(found[1])
    name, rate = ("nvlink", device.link_Bps) if device.link_Bps else ("pcie", device.pcie_Bps)
    if gpus % per_node:
        raise KeyError("gpus_per_node")
    node = Node(name="n", devices=(device,) * per_node,
                link=Link(name=name, latency_s=LINK_LATENCY_S, bandwidth_Bps=rate or 16 * GB),
                nic=Link(name="nic", latency_s=NIC_LATENCY_S, bandwidth_Bps=gbit * GB / 8))
    return Cluster(name="published", nodes=tuple(node.replace(name=f"n{i}") for i in range(gpus // per_node)))


def plan_of(row: dict[str, str], blocks: int) -> Plan:
    """Tensor degree innermost, then data, pipeline outermost; layers as even as can be."""
    tensor, data, stages = (count(row, k) for k in ("tp", "dp", "pp"))
    if tensor * data * stages != count(row, "num_gpus"):
        raise KeyError("dp * tp * pp")
    samples, left = divmod(count(row, "global_batch"), data)
    if left or samples % count(row, "micro_batch") or stages > blocks - 2:
        raise KeyError("global_batch")
    recompute = row["recompute"].split()[0] if row["recompute"] else "none"
    per_stage = tensor * data
    layers = blocks - 2
    cuts = [0, *(1 + layers * i // stages for i in range(1, stages)), blocks]
    zero = count(row, "zero_stage", 0)
    return Plan(
        pipelines=(Pipeline(
            stages=tuple(Stage(blocks=(cuts[i], cuts[i + 1]), tensor=tensor, recompute=recompute,
                               devices=tuple(range(i * per_stage, (i + 1) * per_stage))) for i in range(stages)),
            samples=samples, micro_batch=count(row, "micro_batch"), replicas=data),),
        sharding=Sharding(weights=data if zero == 3 else 1, gradients=data if zero >= 2 else 1,
                          optimizer=data if zero >= 1 else 1))


def step_s_of(rows: dict[str, dict[str, str]], job: Job, gpus: int) -> float | None:
    """Seconds of a step from what the source printed, the metric that needs least conversion first."""
    def value(metric: str) -> float | None:
        return float(rows[metric]["value"]) if metric in rows else None

    if (seconds := value("step_time_s")) is not None:
        return seconds
    if (rate := value("tokens_per_s_per_gpu")) is not None:
        return job.tokens_per_step / rate / gpus
    if (rate := value("samples_per_s")) is not None:
        return job.global_batch / rate
    row, model = next(iter(rows.values())), job.model
    if (rate := value("tflops_per_gpu")) is not None and "F=96" in row["other_settings"]:
        h, layers = model.hidden, model.layers
        work = 96 * job.tokens_per_step * layers * h**2 * (
            1 + job.seq_len / (6 * h) + model.vocab / (16 * layers * h))
        return work / (rate * 1e12 * gpus)
    if (part := value("mfu")) is not None:
        work = (6 * model.count + 12 * model.layers * model.hidden * job.seq_len) * job.tokens_per_step
        return work / (part * MODEL_FLOPS_PEAK[row["gpu"].split("-")[0]] * gpus)
    return None


def cases(path: Path) -> Iterator[Case]:
    """Every run of the table that can be expressed."""
    runs: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            runs[row["id"].rpartition(".")[0]][row["metric"]] = row
    for run, metrics in runs.items():
        row, source = next(iter(metrics.values())), run.split("-")[0]
        if source not in (*LOOKED_AT, *HELD_OUT) or row["dtype"] not in ("fp16", "bf16", "fp32"):
            continue
        if "experts" in row["model"] or "selective (" in row["recompute"] or "LoRA" in row["other_settings"]:
            continue
        try:
            if any(number(row, key, 1) > 1 for key in ("cp", "ep", "vpp")):
                continue
            model = build(model_of(row))
            settings = row["other_settings"]
            job = Job(name=run, model=model, seq_len=count(row, "seq_len"), global_batch=count(row, "global_batch"),
                      precision=row["dtype"], attention="eager" if source in EAGER else "auto",
                      gradient_precision="bf16" if "mp_mode=PURE" in settings else "",
                      optimizer=Optimizer(name="sgd" if source in FORWARD_BACKWARD_ONLY else "adamw"))
            cluster = cluster_of(row)
            plan = plan_of(row, len(model.blocks))
            step_s = step_s_of(metrics, job, len(cluster.devices))
        except (KeyError, ValueError):
            continue
        memory = metrics.get("peak_mem_gib")
        peak = float(memory["value"]) * GiB if memory else None
        if step_s or peak:
            yield Case(run, source, plan, job, cluster, step_s, peak)


class Score(NamedTuple):
    case: Case
    step_s: float
    peak_bytes: float


def score(case: Case) -> Score:
    found = predict(case.plan, case.job, case.cluster)
    return Score(case, found.step_s, max(use.peak_bytes for use in found.devices))


def errors(scores: Sequence[Score], what: str) -> list[float]:
    """Signed relative errors of the runs that publish `what`."""
    return [getattr(s, what) / getattr(s.case, what) - 1 for s in scores if getattr(s.case, what)]


def scan(by_source: dict[str, list[Case]]) -> None:
    """The mean of the sources' median errors over a grid of the two coefficients that are chosen on whole steps."""
    looked_at = {source: found for source, found in by_source.items() if source in LOOKED_AT}
    print("| part of kernel rates sustained | host seconds per kernel | mean of medians | mean bias |")
    print("| --: | --: | --: | --: |")
    for sustained in (0.80, 0.85, 0.90, 1.0):
        for launch_s in (20e-6, 40e-6, 60e-6):
            efficiency.SUSTAINED["gpu"], efficiency.LAUNCH_S["gpu"] = sustained, launch_s
            found = [errors([score(c._replace(job=c.job.replace())) for c in cases], "step_s")
                     for cases in looked_at.values()]
            middle = statistics.mean(statistics.median(map(abs, f)) for f in found)
            bias = statistics.mean(statistics.median(f) for f in found)
            print(f"| {sustained:.2f} | {launch_s * 1e6:.0f} us | {middle:.1%} | {bias:+.1%} |", flush=True)


def line(name: str, group: str, scores: Sequence[Score]) -> tuple[str, float]:
    step, memory = errors(scores, "step_s"), errors(scores, "peak_bytes")
    cells = [name, group, str(len(step))]
    middle = statistics.median(map(abs, step)) if step else float("nan")
    for found in (step, memory):
        if found:
            size = sorted(map(abs, found))
            cells += [f"{statistics.median(found):+.0%}", f"{statistics.median(size):.0%}",
                      f"{size[int(0.9 * (len(size) - 1))]:.0%}"]
        else:
            cells += ["", "", ""]
    cells.insert(6, str(len(memory)) if memory else "")
    return "| " + " | ".join(cells) + " |", middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=int, default=60, help="at most so many runs per source, drawn with a seed")
    parser.add_argument("--scan", action="store_true", help="try coefficients on the sources that are looked at")
    parser.add_argument("--rows", type=Path, help="write every run with both values to this file")
    options = parser.parse_args()
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases(options.table):
        by_source[case.source].append(case)
    drawn = {source: random.Random(0).sample(found, min(options.runs, len(found)))
             for source, found in sorted(by_source.items())}
    if options.scan:
        return scan(drawn)
    scores = {source: [score(c) for c in found] for source, found in drawn.items()}
    print("| source | use | runs | bias | median error | 90 % below | memory runs | bias | median error | 90 % below |")
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |")
    for group, names in (("looked at", LOOKED_AT), ("held out", HELD_OUT)):
        middles = []
        for name in names:
            if name in scores:
                text, middle = line(name, group, scores[name])
                print(text)
                middles.append(middle)
        print(f"| **mean of sources** | {group} | | | **{statistics.mean(middles):.0%}** | | | | | |")
    if options.rows:
        with options.rows.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["run", "model", "devices", "stages", "tensor", "replicas", "micro_batch", "recompute",
                          "step_s", "predicted_step_s", "peak_gib", "predicted_peak_gib"])
            for s in (s for found in scores.values() for s in found):
                pipe = s.case.plan.pipelines[0]
                out.writerow([s.case.run, f"{s.case.job.model.count / 1e9:.2f}B", len(s.case.cluster.devices),
                              len(pipe.stages), pipe.stages[0].tensor, pipe.replicas, pipe.micro_batch,
                              pipe.stages[0].recompute, s.case.step_s, round(s.step_s, 4),
                              round((s.case.peak_bytes or 0) / GiB, 2), round(s.peak_bytes / GiB, 2)])


if __name__ == "__main__":
    main()
