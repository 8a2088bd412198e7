"""Published training results: rows of a table as model, job, plan and cluster, and the predictions beside them.

The table has one metric per row (`id` = `<source>-<run>.<metric>`, figures of the model, parallel degrees, `metric`,
`value`). A row counts if every figure that decides the plan is stated and the plan language has it; every other row
is counted with the reason. What such a table leaves open is settled by the constants below, see `docs/accuracy.md`.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mixfleet import trace
from mixfleet.calibrate import validate as validation
from mixfleet.catalog.devices import rows as catalog_rows
from mixfleet.catalog.instances import NIC_LATENCY_S
from mixfleet.cluster import Cluster, Device, Link, Node, device_named
from mixfleet.cluster_file import link_between
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.model.parts import ROWS, SHARD
from mixfleet.model.spec import Model, Op, T
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.sim import predict
from mixfleet.sim.prediction import DeviceUse
from mixfleet.units import GB, GiB

COLUMNS = ("id", "model", "layers", "hidden", "heads", "seq_len", "dtype", "gpu", "num_gpus", "dp", "tp", "pp",
           "micro_batch", "global_batch", "metric", "value")
"""What a file must have to be of this kind."""


class Convention(NamedTuple):
    """How a source turns a step time into FLOP/s or utilization."""

    attention: Literal["full", "causal", "none"] = "full"
    """Part of the square of scores that counts."""
    recompute: bool = False
    """Whether recomputed layers count again."""


CONVENTIONS: dict[str, Convention] = {
    "llmfoundry": Convention(), "megatron": Convention(), "torchtitan": Convention(),
    "bigscience": Convention(recompute=True), "bsv100": Convention("none", recompute=True),
    "mbridge": Convention("causal"),
}
"""By source, as its own documentation or code says: llm-foundry's benchmark README (12 L h s a token), the README of
Megatron-LM, torchtitan's metrics, the chronicles of BigScience (its V100 part counts parameters only), NeMo's
calculator. All count the logits. Any other source counts as the first of these."""
COUNTED_TWICE = "F=96"
"""In the settings of a row: the formula of Narayanan et al. (2021), which counts recomputation."""
UTILIZATION_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""What sources divide by for utilization, whatever the type; others by the dense rate of the row's type."""

FORWARD_BACKWARD_ONLY = ("neusight",)
EAGER = ("bigscience", "bsv100", "megatron", "neusight", "sailor", "vtrain")
"""Sources that train without flash attention: before it existed, or in plain eager PyTorch."""
TF32_MEANT = ("sailor",)
"""Sources whose `fp32` ran on tensor cores where there are any: their rates are above the fp32 peak of the device."""
ASSUMED_DTYPE = {"sailor": "fp32"}
ASSUMED_ZERO = {"dgxc": 1}
"""Where not stated: NeMo trains with Megatron's distributed optimizer."""
ASSUMED_VOCAB = {"sailor": 50304}
"""GPT-2's tokenizer (50,257), padded to a multiple of 128 as Megatron does."""

FORMS = {"A100": "A100-SXM4", "H100": "H100-SXM", "H200": "H200-SXM", "B200": "B200-SXM", "B300": "B300-SXM",
         "V100": "V100-SXM2", "P100": "P100-SXM2", "A800": "A800-SXM4", "RTXA6000": "A6000",
         "RTXPRO6000": "RTXPRO6000-SE"}
"""Catalog name of a bare GPU name: the socketed form where there are several."""
UNSTATED_MEMORY = {"A100": "80GB", "V100": "16GB", "P100": "16GB"}
KNOWN_BY_MEMORY = {"RTX2080-11GB": "RTX2080Ti"}
"""Names that only fit one card: no other of that chip has this memory."""
REDUCED: dict[str, tuple[str, dict[str, Any]]] = {
    "H100-96GB-HBM2e-500W": ("H100-SXM", {"memory_bytes": round(95 * GiB), "memory_Bps": 2.4e12, "power_w": 500.0}),
}
"""GPUs that differ from a catalog entry, with what differs."""

NIC_GBIT = {"V100": 100, "A100": 1600, "A800": 1600, "H100": 3200, "H200": 3200, "B200": 3200, "GH200": 800,
            "GB200": 1600}
"""Of a node, where the row does not state it: the reference design of the generation. Others have 100 Gb/s."""
MIXED_NIC_GBIT = 1.0
"""Of nodes in mixed clusters of consumer cards: the published gradient exchanges of those with eight GPUs a node
(21.6, 8.9 and 22.6 s) move 0.78 to 0.84 Gb/s, which is what gigabit Ethernet carries."""
class Framework(NamedTuple):
    """How the code of a source differs from the runtime that plans are predicted for."""

    overlaps: bool = True
    """Whether gradients and weights move while the device computes."""
    sequence_parallel: bool = True
    """Whether tensors between the products are sharded over the tensor group (Korthikanti et al., 2022)."""
    expandable: bool = True
    """Whether the allocator grows its segments; without, it keeps more than it needs."""
    bucket_elements: int = 0
    """Elements of the buffer through which gradients are reduced to the owners of optimizer state."""
    copies_weights: bool = True
    """Whether 16-bit weights are kept beside the fp32 ones; FSDP casts its shards as it gathers them."""
    counted: Literal["allocated", "reserved", "used"] = "used"
    """What its memory figure is: of torch's counters, or of the driver with context and communicators."""


MEGATRON_DEEPSPEED = Framework(overlaps=False, sequence_parallel=False, expandable=False, bucket_elements=5 * 10**8)
FRAMEWORKS: dict[str, Framework] = {
    "bigscience": MEGATRON_DEEPSPEED, "bsv100": MEGATRON_DEEPSPEED, "sailor": MEGATRON_DEEPSPEED,
    "vtrain": MEGATRON_DEEPSPEED, "megatron": Framework(expandable=False),
    "simumax": Framework(overlaps=False, expandable=False, counted="allocated"),
    "llmfoundry": Framework(copies_weights=False),
    "torchtitan": Framework(copies_weights=False, counted="reserved"),
}
"""As the sources state: the Megatron-DeepSpeed of 2021 and 2022 had neither overlap nor sequence parallelism, and
DeepSpeed's default bucket; simumax switched overlap off. Others are taken to be like the runtime."""
UNEXPANDED = 1.10
"""Reserved over allocated bytes without expandable segments (31.7 over 28.8 GB, Megatron-LM issue 525)."""

_WORDS = ("use for ranking only", "do not score", "ambiguous", "a changed model", "step definition")
"""Warnings of the table itself."""
_LACKS = {"LoRA": "frozen weights (LoRA)", "Adapter": "frozen weights (adapters)", "8bit": "8-bit optimizer state",
          "8-bit": "8-bit optimizer state", "optimizer in backward": "optimizer step inside backward",
          "offload": "offloading"}
"""In settings or model: what a job or plan has no words for."""


class Inexpressible(Exception):
    """Why a row cannot be predicted, in a few words."""


class Case(NamedTuple):
    """One published run as mixfleet sees it. `step_s` and `peak_bytes` are as published, None where they are not."""

    run: str
    source: str
    gpu: str
    plan: Plan
    job: Job
    cluster: Cluster
    step_s: float | None
    peak_bytes: float | None
    where: dict[str, int]
    """Row of the file for `step` and `memory`, from 0."""


Skipped = Counter[tuple[str, str, str]]
"""(source, GPU, reason) -> rows."""


def read(path: Path) -> tuple[list[Case], Skipped]:
    """Every run of the table that can be expressed, and the rows that cannot by reason."""
    runs: dict[str, dict[str, tuple[int, dict[str, str]]]] = {}
    cases: list[Case] = []
    skipped: Skipped = Counter()
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [c for c in COLUMNS if c not in (reader.fieldnames or ())]:
            raise InputError(f"has no column {missing[0]!r}; published results need {', '.join(COLUMNS)}",
                             where=str(path))
        for i, row in enumerate(reader):
            runs.setdefault(row["id"].rpartition(".")[0] or row["id"], {})[row["metric"]] = (i, row)
    for run, metrics in runs.items():
        first = next(iter(metrics.values()))[1]
        key = run.split("-")[0], first["gpu"]
        try:
            case = case_of(run, metrics)
        except (Inexpressible, InputError) as error:
            skipped[*key, str(error)] += len(metrics)
            continue
        cases.append(case)
        if rest := len(metrics) - len(case.where):
            skipped[*key, "another metric of a run that is counted"] += rest
    return cases, skipped


def case_of(run: str, metrics: Mapping[str, tuple[int, dict[str, str]]]) -> Case:
    """A run from its rows by metric. Inexpressible or InputError say why not."""
    row, source = next(iter(metrics.values()))[1], run.split("-")[0]
    _refuse(row)
    dtype = row["dtype"] or ASSUMED_DTYPE.get(source, "")
    if dtype not in ("fp16", "bf16", "fp32", "tf32"):
        raise Inexpressible(f"precision {dtype} is not among a job's types" if dtype else "precision is not stated")
    if dtype == "fp32" and source in TF32_MEANT and all("tf32" in d.flops for d in cluster_of(row).devices):
        dtype = "tf32"
    model = build(_figures(row, source))
    settings = row.get("other_settings", "")
    job = Job(name=run, model=model, seq_len=_count(row, "seq_len"), global_batch=_count(row, "global_batch"),
              precision=dtype, attention="eager" if source in EAGER else "auto",  # type: ignore[arg-type]
              gradient_precision="bf16" if "mp_mode=PURE" in settings else "",
              optimizer=Optimizer(name="sgd" if source in FORWARD_BACKWARD_ONLY else "adamw"))
    cluster = cluster_of(row)
    plan = plan_of(row, len(model.blocks), zero=ASSUMED_ZERO.get(source, 0))
    step = _step_s(metrics, job, source, cluster)
    where = {} if step is None else {"step": step[0]}
    peak = metrics.get("peak_mem_gib")
    if peak:
        where["memory"] = peak[0]
    if not where:
        raise Inexpressible(f"metric {' and '.join(metrics)} has no conversion")
    return Case(run, source, row["gpu"], plan, job, cluster, step and step[1],
                _number(peak[1], "value") * GiB if peak else None, where)


def _refuse(row: dict[str, str]) -> None:
    """What the model, job or plan language lacks."""
    settings, model = row.get("other_settings", ""), row["model"]
    for word in _WORDS:
        if word in settings:
            raise Inexpressible(f"the table says: {word}")
    for word, why in _LACKS.items():
        if word in f"{settings} {model}".replace("offload=False", ""):
            raise Inexpressible(why)
    if _number(row, "cp", 1) > 1:
        raise Inexpressible("context parallelism")
    if _number(row, "ep", 1) > 1:
        raise Inexpressible("expert parallelism inside data parallelism")
    if re.search(r"\bexperts\b|MoE", f"{settings} {model}"):
        raise Inexpressible("mixture of experts whose experts are not given as figures")
    if not row["hidden"] or not row["layers"]:
        raise Inexpressible("not a transformer, or layers and hidden size not stated")
    if "SQuAD" in model or ("fine-tuning" in settings and "BERT" in model):
        raise Inexpressible("an encoder with a task head")
    if "BERT" in model and "pre-training" in settings:
        raise Inexpressible("an encoder whose head sees only masked positions")
    if "selective (" in row.get("recompute", ""):
        raise Inexpressible(f"recompute {row['recompute']}")


def _number(row: dict[str, str], key: str, default: float | None = None) -> float:
    text = row.get(key, "")
    if not text:
        if default is None:
            raise Inexpressible(f"{key} is not stated")
        return default
    try:
        return float(text)
    except ValueError:
        raise Inexpressible(f"{key} is not a number") from None


def _count(row: dict[str, str], key: str, default: int | None = None) -> int:
    value = _number(row, key, default)
    if value < 0 or value != int(value):
        raise Inexpressible(f"{key} is not a count")
    return int(value)


def _figures(row: dict[str, str], source: str) -> dict[str, Any]:
    """Figures of the model: gated and rotary where the name or a narrow MLP says so, else as GPT."""
    heads, hidden = _count(row, "heads"), _count(row, "hidden")
    ffn = _count(row, "ffn")
    llama = re.search(r"llama|mistral|qwen|gemma", row["model"], re.IGNORECASE) or ffn < 4 * hidden
    return {"layers": _count(row, "layers"), "hidden": hidden, "heads": heads, "ffn": ffn,
            "kv_heads": _count(row, "kv_heads", heads), "max_seq_len": _count(row, "seq_len"),
            "vocab": _count(row, "vocab", ASSUMED_VOCAB.get(source)), "style": "llama" if llama else "gpt"}


def device_of(name: str) -> Device:
    """A GPU of the table: `A100`, `A100-80GB-PCIe`, `MI250-GCD-64GB`, `H100-96GB-HBM2e-500W`.

    Without a form it is the socketed one, without memory the usual one. InputError for what the catalog lacks.
    """
    if name in REDUCED:
        base, changes = REDUCED[name]
        return device_named(base).replace(name=name, **changes)
    name = KNOWN_BY_MEMORY.get(name, name)
    if name in catalog_rows():
        return device_named(name)
    base, *rest = name.split("-")
    if "GCD" in rest:
        return _half(device_named(base))
    memory = next((r for r in rest if re.fullmatch(r"\d+GB", r)), UNSTATED_MEMORY.get(base, ""))
    forms = [r for r in rest if r.isalpha()]
    stem = FORMS.get(base, base)
    if forms == ["PCIe"] or forms == ["NVL"]:
        stem = f"{base}-{forms[0]}"
    return device_named(next((n for n in (f"{stem}-{memory}", stem, f"{base}-{memory}") if n in catalog_rows()), name))


def _half(package: Device) -> Device:
    """One die of a two-die package, which programs see as a GPU."""
    return package.replace(
        name=f"{package.name}-GCD", flops={k: v / 2 for k, v in package.flops.items()},
        vector_flops=package.vector_flops / 2, memory_bytes=package.memory_bytes // 2,
        memory_Bps=package.memory_Bps / 2, cache_bytes=package.cache_bytes // 2, sm_count=package.sm_count // 2,
        power_w=package.power_w / 2)


def cluster_of(row: dict[str, str]) -> Cluster:
    """Full nodes of one kind of device each, in the order of the GPU name where that lists several."""
    gpus = _count(row, "num_gpus")
    per_node = min(gpus, _count(row, "gpus_per_node", 8))
    mixed = re.fullmatch(r"\d+x[^+]+(\+\d+x[^+]+)+", row["gpu"])
    kinds = [(int(n), device_of(name)) for n, _, name in (part.partition("x") for part in row["gpu"].split("+"))] \
        if mixed else [(gpus, device_of(row["gpu"]))]
    if sum(n for n, _ in kinds) != gpus or any(n % per_node for n, _ in kinds):
        raise Inexpressible("gpus_per_node does not divide the GPUs")
    gbit = MIXED_NIC_GBIT if mixed else _nic_gbit(row, per_node)
    name = "ethernet" if mixed else "nic"
    nodes: list[Node] = []
    for n, device in kinds:
        nodes += [Node(name=f"n{len(nodes) + i}", devices=(device,) * per_node,
                       link=link_between((device,) * per_node) if per_node > 1 else link_between((device,)),
                       nic=Link(name=name, latency_s=NIC_LATENCY_S, bandwidth_Bps=gbit * GB / 8))
                  for i in range(n // per_node)]
    return Cluster(name="published", nodes=tuple(nodes))


def _nic_gbit(row: dict[str, str], per_node: int) -> float:
    """Gb/s of a node's adapters together, as the row states it or as is usual."""
    text = row.get("interconnect", "")
    if found := re.search(r"(\d+)x(\d+) Gb/s", text):
        return float(found[1]) * float(found[2])
    if found := re.search(r"(\d+) Gb/s (?:RDMA |CX-7 )?per GPU", text):
        return float(found[1]) * per_node
    if found := re.search(r"(\d+) (?:Gbps|Gb/s)", text):
        return float(found[1])
    return float(NIC_GBIT.get(row["gpu"].split("-")[0], 100))


def plan_of(row: dict[str, str], blocks: int, *, zero: int = 0) -> Plan:
    """Tensor degree innermost, then data, pipeline outermost; layers as even as can be, or as the row lists them.

    `zero` is the stage of ZeRO where the row states none.
    """
    tensor, data, stages = (_count(row, k) for k in ("tp", "dp", "pp"))
    if tensor * data * stages != _count(row, "num_gpus"):
        raise Inexpressible("dp * tp * pp is not the number of GPUs")
    samples, left = divmod(_count(row, "global_batch"), data)
    micro, rounds = _count(row, "micro_batch"), max(1, _count(row, "vpp", 1))
    if left or samples % micro:
        raise Inexpressible("global_batch is not dp times whole micro-batches")
    if stages * rounds > blocks - 2:
        raise Inexpressible("more stages than layers")
    if stages == 1:
        rounds = 1
    if rounds > 1 and (samples // micro) % stages:
        raise Inexpressible("interleaved stages whose number does not divide the micro-batches")
    cuts = _cuts(row, blocks, stages * rounds)
    recompute = (row.get("recompute") or "none").split()[0]
    zero, size = _count(row, "zero_stage", zero), tensor * data
    shard = data
    if "HYBRID" in row.get("other_settings", ""):
        shard = min(data, _count(row, "gpus_per_node", 8))
    chunks = list(pairwise(cuts))
    return Plan(
        pipelines=(Pipeline(
            stages=tuple(Stage(blocks=chunks[i], more=tuple(chunks[i + stages::stages]), tensor=tensor,
                               recompute=recompute,  # type: ignore[arg-type]
                               devices=tuple(range(i * size, (i + 1) * size))) for i in range(stages)),
            samples=samples, micro_batch=micro, replicas=data),),
        schedule="interleaved" if rounds > 1 else "1f1b",
        sharding=Sharding(weights=shard if zero == 3 else 1, gradients=shard if zero >= 2 else 1,
                          optimizer=shard if zero >= 1 else 1))


def _cuts(row: dict[str, str], blocks: int, chunks: int) -> list[int]:
    found = re.search(r"layers per stage incl\. embedding and head=\[([\d, ]+)\]", row.get("other_settings", ""))
    if found:
        sizes = [int(n) for n in found[1].split(",")]
        if len(sizes) != chunks or sum(sizes) != blocks:
            raise Inexpressible("the layers per stage do not add up")
        return [sum(sizes[:i]) for i in range(chunks + 1)]
    return [0, *(1 + (blocks - 2) * i // chunks for i in range(1, chunks)), blocks]


def _step_s(metrics: Mapping[str, tuple[int, dict[str, str]]], job: Job, source: str,
            cluster: Cluster) -> tuple[int, float] | None:
    """Row and seconds of a step, from the metric that needs least conversion."""
    gpus = len(cluster.devices)
    seconds: dict[str, Callable[[float], float]] = {
        "step_time_s": lambda v: v, "tokens_per_s_per_gpu": lambda v: job.tokens_per_step / v / gpus,
        "samples_per_s": lambda v: job.global_batch / v,
        "tflops_per_gpu": lambda v: _work(metrics, job, source) / (v * 1e12 * gpus),
        "mfu": lambda v: _work(metrics, job, source, recompute=False) / (v * _peak(cluster, job) * gpus),
    }
    for metric, convert in seconds.items():
        if metric in metrics:
            i, row = metrics[metric]
            value = _number(row, "value")
            if value <= 0:
                raise Inexpressible("value is not positive")
            return i, convert(value)
    return None


def _work(metrics: Mapping[str, tuple[int, dict[str, str]]], job: Job, source: str, *,
          recompute: bool | None = None) -> float:
    """FLOPs of a step as the source counts them. Utilization never counts recomputation."""
    row = next(iter(metrics.values()))[1]
    convention = CONVENTIONS.get(source, Convention())
    again = COUNTED_TWICE in row.get("other_settings", "") or convention.recompute if recompute is None else recompute
    return work(job.model, job.seq_len, convention.attention,
                recompute=again and row.get("recompute") == "full") * job.tokens_per_step


def work(model: Model, seq_len: int, attention: str, *, recompute: bool) -> float:
    """FLOPs per token of forward and backward: products of the layers and the logits, and the scores.

    A full square of scores is 4 s h a layer and pass (Narayanan et al., 2021); backward is two forwards, recomputed
    layers one more. Lookups are free.
    """
    config = model.config
    width = model.heads * (int(config["head_dim"]) if "head_dim" in config else model.hidden // model.heads)
    layers = sum(sum(op.flops.at(1, 1, 1) for op in block.ops if op.kind == "gemm") for block in model.blocks[1:-1])
    scores = {"full": 4.0, "causal": 2.0, "none": 0.0}[attention] * model.layers * width * seq_len
    return (4 if recompute else 3) * (layers + scores) + 6 * model.vocab * model.hidden


def _peak(cluster: Cluster, job: Job) -> float:
    device = cluster.devices[0]
    return UTILIZATION_PEAK.get(device.name.split("-")[0], device.flops.get(job.precision, device.vector_flops))


class Score(NamedTuple):
    """A run with what is predicted for it."""

    case: Case
    step_s: float
    peak_bytes: int
    ceiling_s: float
    """Seconds at the peak rates of the devices, recomputation included."""
    bound: str
    fits: bool


def score(case: Case) -> Score:
    """Predicts one run, with what its framework does otherwise."""
    framework = FRAMEWORKS.get(case.source, Framework())
    job = case.job if framework.sequence_parallel else case.job.replace(model=replicated(case.job.model))
    found = predict(case.plan, job, case.cluster, sent=False, trace=not framework.overlaps)
    step_s = found.step_s + (0.0 if framework.overlaps or not found.trace else _hidden_s(found.trace))
    peak = max(_peak_bytes(use, case, framework) for use in found.devices)
    used = framework._replace(counted="used")
    fits = all(_peak_bytes(use, case, used) <= use.capacity_bytes for use in found.devices)
    return Score(case, step_s, peak, found.step_s * found.hfu, found.bound.partition(" (")[0], fits)


def replicated(model: Model) -> Model:
    """The model as it runs without sequence parallelism: every rank of a tensor group norms and adds all tokens."""
    def whole(op: Op) -> Op:
        if op.kind not in ("norm", "elementwise") or op.shape["rows"] != SHARD:
            return op
        return op.replace(shape={**op.shape, "rows": ROWS}, traffic=op.traffic * T,
                          backward_traffic=op.backward_traffic * T)

    return model.replace(blocks=tuple(b.replace(ops=tuple(map(whole, b.ops))) for b in model.blocks))


def _hidden_s(record: trace.Trace) -> float:
    """Seconds for which the slowest device moves gradients and weights behind its computing."""
    whole, bare = trace.by_category(record), trace.exposed(record)
    return max(sum(whole[rank].get(c, 0.0) - bare[rank].get(c, 0.0) for c in ("reduce", "gather")) for rank in whole)


def _peak_bytes(use: DeviceUse, case: Case, framework: Framework) -> int:
    """Peak of a device under another framework: activations that are not sharded, and the allocator's reserve.

    Of the 34 bytes per element of a layer's activations 10 are outside the products, and eager attention keeps
    5 heads * seq_len / hidden more inside (Korthikanti et al., 2022); under full recomputation only the layer's input
    is kept, which is all outside.
    """
    held = dict(use.breakdown)
    framework_bytes, allocator = held.pop("framework", 0), held.pop("allocator", 0)
    allocated = sum(held.values())
    stage = case.plan.pipelines[use.pipeline].stages[use.stage]
    tensor = stage.tensor
    if not framework.sequence_parallel:
        scores = 5 * case.job.model.heads * case.job.seq_len / case.job.model.hidden
        layer = (10 * tensor + 24 + scores) / (34 + scores)
        kept = tensor if stage.recompute == "full" else layer
        allocated += round(held.get("activations", 0) * (kept - 1) + held.get("recomputed", 0) * (layer - 1))
    if not framework.copies_weights and case.job.bytes.master_bytes:
        allocated -= held.get("weights", 0)
    if case.plan.sharding.optimizer > 1:
        elements = min(framework.bucket_elements, held.get("weights", 0) // case.job.bytes.weight_bytes)
        allocated += elements * case.job.bytes.compute_bytes
    if framework.counted == "allocated":
        return allocated
    factor = 1 + allocator / max(1, sum(held.values())) if framework.expandable else UNEXPANDED
    return round(allocated * factor) + (framework_bytes if framework.counted == "used" else 0)


def scores(cases: list[Case], skipped: Skipped) -> Iterator[Score]:
    """Predicts run by run; what the plan language refuses is added to `skipped`."""
    for case in cases:
        try:
            yield score(case)
        except InputError as error:
            skipped[case.source, case.gpu, str(error)] += len(case.where)


INTERVAL = 0.80, 1.30
"""Times a predicted step time: about where 10 and 90 % of published steps lie (`docs/accuracy.md`); for memory too."""


def validate(path: Path) -> validation.Result:
    """Every row of a table of published results beside its prediction, by source and GPU; memory in GiB.

    The last summary weighs sources equally: its errors are means of the sources' own figures for step times.
    """
    cases, skipped = read(path)
    rows: list[validation.Row] = []
    low, high = INTERVAL
    for s in scores(cases, skipped):
        case = s.case
        if case.step_s:
            rows.append(validation.Row(case.where["step"], case.source, case.gpu, "step", case.step_s, s.step_s,
                                       low * s.step_s, high * s.step_s, s.ceiling_s, s.bound))
        if case.peak_bytes:
            peak = s.peak_bytes / GiB
            rows.append(validation.Row(case.where["memory"], f"{case.source}, memory", case.gpu, MEMORY,
                                       case.peak_bytes / GiB, peak, low * peak, high * peak, peak,
                                       "" if s.fits else "does not fit"))
    reasons: Counter[str] = Counter()
    for (source, _, why), n in sorted(skipped.items()):
        reasons[f"{source}: {why}"] += n
    found = validation.result(path, rows, dict(reasons))
    return found._replace(total=_equally(found))


MEMORY = "peak memory, GiB"


def _equally(found: validation.Result) -> validation.Summary | None:
    by_source: dict[str, list[validation.Row]] = {}
    for row in found.rows:
        if row.what != MEMORY:
            by_source.setdefault(row.source, []).append(row)
    sums = [s.total for rows in by_source.values() if (s := validation.result(Path(found.file), rows, {})).total]
    if not sums:
        return None
    means = [sum(values) / len(sums) for values in zip(*(s[3:] for s in sums))]
    return validation.Summary("mean of sources", "all", sum(s.rows for s in sums), *means)
