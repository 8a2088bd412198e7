"""Published training results: rows of a table as model, job, plan and cluster, and the predictions beside them.

The table has one metric per row (`id` = `<source>-<run>.<metric>`, figures of the model, parallel degrees, `metric`,
`value`). A row counts if every figure that decides the plan is stated and the plan language has it; every other row
is counted with the reason. What such a table leaves open is settled by the constants below, see `docs/accuracy.md`.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mixfleet.calibrate import frameworks
from mixfleet.calibrate import validate as validation
from mixfleet.calibrate.frameworks import Framework
from mixfleet.catalog.devices import rows as catalog_rows
from mixfleet.catalog.instances import NIC_LATENCY_S
from mixfleet.catalog.models import MODELS
from mixfleet.cluster import Cluster, Device, Link, Node, device_named
from mixfleet.cluster_file import link_between
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer, ProductsName
from mixfleet.model.families import build
from mixfleet.model.parts import ROWS, elementwise, gemm, linear, norm
from mixfleet.model.spec import Block, Model, Op, Param, Saved, Size
from mixfleet.plan import Pipeline, Plan, Recompute, Sharding, Stage
from mixfleet.plan_rules import lacking
from mixfleet.sim import predict
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
EAGER = ("bigscience", "bsv100", "dle", "lambda", "megatron", "neusight", "sailor", "vtrain")
"""Sources that train without flash attention: before it existed, or in plain eager PyTorch. NVIDIA's examples, which
lambda runs too, multiply scores and values as two products in every framework that they are written for."""
TF32_MEANT = ("sailor", "lambda")
"""Sources whose `fp32` ran on tensor cores where there are any: sailor's rates are above the fp32 peak of the device,
lambda's README says so."""
ASSUMED_DTYPE = {"sailor": "fp32"}
ASSUMED_ZERO = {"dgxc": 1, "nemo": 1, "mbridge": 1}
"""Where not stated: NeMo trains with Megatron's distributed optimizer."""
ASSUMED_VOCAB = {"sailor": 50304, "nemo": 51200}
"""GPT-2's tokenizer (50,257), padded to a multiple of 128 as Megatron does, and NeMo once more."""
ASSUMED_HEAD = 128
"""Width of a head where the number of heads is not stated; of the counts near it one that the tensor degree divides."""
KV_CLEARLY, KV_FITS = 0.015, 0.01
"""Part by which a stated number of parameters must differ, beyond its rounding, from that of a model with as many key
heads as query heads, and within which it must be that of one with fewer, for the key heads to follow from it."""
ASSUMED_SQUAD = 384
"""Tokens of a sample of SQuAD in NVIDIA's examples, where not stated."""
PACKED = ("dgxc", "nemo", "mbridge")
PACKED_TOKENS = 200
"""NeMo fine-tunes on samples of SQuAD that are packed into whole sequences, each with an attention of its own; they
have about so many tokens: 117 words of context and 11 of a question (Rajpurkar et al., 2016)."""
MASKED = 20 / 128
"""Part of the positions that the head of BERT's pretraining sees: 20 of 128, 80 of 512 (Devlin et al., 2019)."""
ASSUMED_RANK, RANK_BY = 16, {"QwenLM": 64, "Lightning-AI": 8}
"""Of LoRA, where not stated; and what the scripts of an owner of code have by default."""
DECIMAL_GB = ("QwenLM",)
"""Owners of code whose GB of memory are 1e9 bytes, though the table takes them for GiB: the 162.0 GB that Qwen-7B takes
on two A100 would be 81 GiB on a card of 80 (README of QwenLM/Qwen)."""
ADAPTED = ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
ADAPTED_BY = dict.fromkeys(("dgxc", "nemo", "mbridge"), ADAPTED[:3])
ADAPTED_BY_QWEN = ("attention.q", "attention.o", "mlp.gate", "mlp.up", "mlp.down")
ADAPTED_BY_LITGPT = ("attention.q", "attention.v")
"""Products that LoRA adapts, those of NeMo's recipes, those of Qwen's scripts (c_attn, which is q, k and v, both
c_proj, w1 and w2), and those of litgpt's."""
NARROW: dict[str, ProductsName] = {"fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Types of the layers' products in runs that keep all else in bf16."""
SCALED_AT_ONCE = ("mbridge", "torchtitan")
"""Sources whose fp8 has scales from the tensor itself: Megatron Bridge names it, torchtitan's default is dynamic."""

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

NIC_GBIT = {"V100": 100, "A100": 1600, "A800": 1600, "H100": 3200, "H200": 3200, "B200": 3200, "B300": 6400,
            "GH200": 800, "GB200": 3200, "GB300": 6400}
"""Of a node, where the row does not state it: the reference design of the generation; for GB200 and GB300 of 8 GPUs.
Others have 100 Gb/s."""
MIXED_NIC_GBIT = 1.0
"""Of nodes in mixed clusters of consumer cards: the published gradient exchanges of those with eight GPUs a node
(21.6, 8.9 and 22.6 s) move 0.78 to 0.84 Gb/s, which is what gigabit Ethernet carries."""

ROUTED: dict[str, str | dict[str, Any]] = {
    "Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3-235B-A22B": "qwen3-235b-a22b", "DeepSeek-V2-236B": "deepseek-v2",
    "DeepSeek-V3-671B": "deepseek-v3", "Mixtral-8x22B": "mixtral-8x22b",
    "gpt-oss-120B": {"layers": 36, "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880,
                     "vocab": 201088, "experts": 128, "experts_per_token": 4, "expert_ffn": 2880},
}
"""Models with routed experts whose configuration is public: of the catalog, or its figures (openai/gpt-oss-120b,
config.json; without the window of every second layer and attention's sinks)."""

_WORDS = ("use for ranking only", "do not score", "ambiguous", "a changed model", "step definition")
"""Warnings of the table itself."""
_LACKS = {"QLoRA": "4-bit weights (QLoRA)", "Q-LoRA": "4-bit weights (QLoRA)",
          "quantization=bnb": "4-bit weights (QLoRA)", "Adapter": "adapters of other kinds than LoRA",
          "8bit": "8-bit optimizer state",
          "8-bit": "8-bit optimizer state", "optimizer in backward": "optimizer step inside backward",
          "offload": "offloading", "Muon": "the optimizer Muon"}
"""In settings or model: what a job or plan has no words for."""


RACK = 64
"""GPUs of an NVLink domain of 72 that runs use: the largest power of two."""


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
    recompute: Literal["as planned", "as needed", "half", "products"] = "as planned"
    """Where the row states none, as few layers as let the run fit, which it did; `half` is every second layer, and
    `products` every second product. All lie between the plan, which recomputes nothing, and the same with all
    recomputed; which bytes `products` keeps, the framework says."""
    framework: Framework = Framework()


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
    cluster = cluster_of(row)
    if dtype == "fp32" and source in TF32_MEANT and all("tf32" in d.flops for d in cluster.devices):
        dtype = "tf32"
    model = _headed(build(_routed(row) or _figures(row, source)), row)
    narrow, dtype = (dtype, "bf16") if dtype in NARROW else ("", dtype)
    if dtype not in ("fp16", "bf16", "fp32", "tf32"):
        raise Inexpressible(f"precision {dtype} is not among a job's types" if dtype else "precision is not stated")
    settings, framework = row.get("other_settings", ""), frameworks.of(source, dtype, row.get("other_settings", ""))
    if source == "neusight" and row["model"].startswith("GPT"):
        framework = framework._replace(joined=True, activation_passes=frameworks.NEW_GELU)
    owner = row.get("source", "").partition("/")[0]
    if source == "finetune":
        framework = frameworks.tuned(framework, owner, row["model"], settings, alone=row["num_gpus"] == "1")
    if source == "mbridge":
        framework = frameworks.bridged(framework, settings)
    if source == "torchtitan" and _count(row, "tp") > 1:
        framework = framework._replace(logit_bytes=frameworks.FP32_LOGITS_SHARDED)
    if source == "torchtitan" and framework.gates_fused and _number(row, "year", 0) >= frameworks.LOSS_COMPILED_SINCE:
        framework = framework._replace(logit_bytes=frameworks.COMPILED_LOSS)
    job = Job(name=run, model=model, seq_len=model.max_seq_len, global_batch=_count(row, "global_batch"),
              precision=dtype, attention="eager" if source in EAGER else "auto",  # type: ignore[arg-type]
              gradient_precision="bf16" if framework.adds_16_bits or "mp_mode=PURE" in settings else "",
              optimizer=Optimizer(name="sgd" if source in FORWARD_BACKWARD_ONLY else "adamw"))
    zero, is_lora = ASSUMED_ZERO.get(source, 0), "LoRA" in f"{settings} {row['model']}"
    if row.get("source", "").startswith("QwenLM"):
        zero = 2 if is_lora else 3  # its scripts' DeepSpeed configurations
        if not is_lora:
            framework = framework._replace(both_gradients=True, bucket_elements=5 * 10**8, pure=False)
        if _count(row, "zero_stage", zero) == 3:
            framework = framework._replace(hook_s=frameworks.HOOK_S)
    costs = [_products_flops(b) for b in model.blocks] if framework.balances else ()
    plan = plan_of(row, len(model.blocks), zero=zero, costs=costs)
    if is_lora:
        stated = re.search(r"LoRA rank (\d+)", settings)
        names = (ADAPTED_BY_QWEN if row["model"].startswith("Qwen-") else ADAPTED_BY_LITGPT if owner == "Lightning-AI"
                 else ADAPTED_BY.get(source, ADAPTED))
        whole = adapted(model, int(stated[1]) if stated else RANK_BY.get(owner, ASSUMED_RANK), names)
        job = job.replace(model=whole, frozen=unadapted(whole, is_rest_trained="embeddings trained" in settings))
    if source in PACKED and re.search(r"fine-tuning|\bSFT\b|LoRA", settings):
        job = job.replace(model=packed(job.model, max(1, job.seq_len // PACKED_TOKENS)))
    if narrow:
        at_once = narrow == "fp8" and source in SCALED_AT_ONCE
        job = job.replace(products="fp8-current" if at_once else NARROW[narrow])
        if why := lacking(job, cluster.devices):
            raise Inexpressible(why.partition(".")[0])
        if framework.holds_clock:
            cluster = _unthrottled(cluster)
    step = _step_s(metrics, job, source, cluster)
    where = {} if step is None else {"step": step[0]}
    peak = metrics.get("peak_mem_gib")
    if peak:
        where["memory"] = peak[0]
    if not where:
        raise Inexpressible(f"metric {' and '.join(metrics)} has no conversion")
    stated_recompute = _recompute(row)
    part: Literal["as planned", "as needed", "half", "products"] = (
        "as needed" if not stated_recompute else "products" if stated_recompute == "selective (op)"
        else "half" if "(" in stated_recompute else "as planned")
    peak_bytes = _number(peak[1], "value") * (GB if owner in DECIMAL_GB else GiB) if peak else None
    return Case(run, source, row["gpu"], plan, job, cluster, step and step[1], peak_bytes, where, part, framework)


def _refuse(row: dict[str, str]) -> None:
    """What the model, job or plan language lacks."""
    settings, model = row.get("other_settings", ""), row["model"]
    if ("torchtune" in row.get("source", "") and settings.startswith("full fine-tune") and row["num_gpus"] == "1"
            and "AdamW" not in settings):
        raise Inexpressible("8-bit optimizer state")  # its recipes for one GPU
    for word in _WORDS:
        if word in settings:
            raise Inexpressible(f"the table says: {word}")
    for word, why in _LACKS.items():
        if word in f"{settings} {model}".replace("offload=False", ""):
            raise Inexpressible(why)
    routed = _number(row, "ep", 1) > 1 or re.search(r"\bexperts\b|MoE", f"{settings} {model}")
    if routed and model.partition(" ")[0] not in ROUTED:
        raise Inexpressible("mixture of experts whose experts are not given as figures")
    if not row["hidden"] or not row["layers"]:
        raise Inexpressible("not a transformer, or layers and hidden size not stated")


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


def _routed(row: dict[str, str]) -> dict[str, Any]:
    """The public configuration of a model with routed experts, with the row's layers; empty for others."""
    known = ROUTED.get(row["model"].partition(" ")[0])
    if known is None:
        return {}
    length = _count(row, "seq_len")
    if not isinstance(known, str):
        return known | {"max_seq_len": length}
    config = {k: v for k, v in MODELS[known].items() if k != "source"}
    if _count(row, "hidden") != config["hidden_size"]:
        raise Inexpressible(f"hidden is not that of {known}")
    dense = re.search(r"layer (\d+) dense", row.get("other_settings", ""))
    return config | {"num_hidden_layers": _count(row, "layers"), "max_position_embeddings": length} | (
        {"first_k_dense_replace": int(dense[1])} if dense else {})


def _expert(row: dict[str, str]) -> int:
    """Replicas that share experts. Megatron counts ranks that have different experts: whole ones lie over the tensor
    group too, those cut in their width by it do not."""
    ranks, tensor = _count(row, "ep", 1), _count(row, "tp")
    if ranks == 1 or tensor == 1:
        return ranks
    if ranks % tensor or ranks <= _count(row, "dp") * _count(row, "cp", 1):
        raise Inexpressible("whether tensor parallelism cuts the experts is not stated")
    return ranks // tensor


def _figures(row: dict[str, str], source: str) -> dict[str, Any]:
    """Figures of the model: gated and rotary where the name or a narrow MLP says so, else as GPT."""
    hidden = _count(row, "hidden")
    heads = _count(row, "heads", _heads(hidden, _count(row, "tp", 1)))
    named = re.search(r"llama|mistral|qwen|gemma", row["model"], re.IGNORECASE)
    ffn = _count(row, "ffn", None if named else 4 * hidden)
    squad = ASSUMED_SQUAD if _task(row) == "span" else None
    found = {"layers": _count(row, "layers"), "hidden": hidden, "heads": heads, "ffn": ffn,
             "max_seq_len": _count(row, "seq_len", squad), "vocab": _count(row, "vocab", ASSUMED_VOCAB.get(source)),
             "style": "llama" if named or ffn < 4 * hidden else "gpt"}
    kv_heads = _count(row, "kv_heads", _kv_heads(row, found))
    off, rounding = _off(row, found)
    one, two = (off(kv_heads, n) for n in (1, 2))
    tied = {"tied": True} if named and one < KV_FITS + rounding and two > KV_CLEARLY + rounding else {}
    return found | {"kv_heads": kv_heads} | tied


def _off(row: dict[str, str], figures: Mapping[str, Any]) -> tuple[Callable[[int, int], float], float]:
    """How far the parameters of a model with so many key heads and tables of words (one if they are tied) are from what
    the row states, as a part; and how far rounding alone may put that, 0 where nothing is stated."""
    heads, hidden, layers = (int(figures[x]) for x in ("heads", "hidden", "layers"))
    ffn, ends = float(figures["ffn"]), float(figures["vocab"]) * hidden
    text, stated = row.get("params_b", ""), _number(row, "params_b", 0) * 1e9
    rounding = 0.5 * 10.0 ** -len(text.partition(".")[2]) * 1e9 / stated if stated else 0.0

    def off(kv: int, tables: int) -> float:
        layer = (2 + 2 * kv / heads) * hidden**2 + (3 if figures["style"] == "llama" else 2) * hidden * ffn
        return abs((layers * layer + tables * ends) / stated - 1) if stated else 0.0

    return off, rounding


def _kv_heads(row: dict[str, str], figures: Mapping[str, Any]) -> int:
    """Where not stated, what the stated number of parameters says, if it is clearly not one for each query head."""
    heads, tensor, stated = int(figures["heads"]), _count(row, "tp", 1), row.get("params_b", "")
    each, rounding = _off(row, figures)

    def off(kv: int) -> float:
        return min(each(kv, tables) for tables in (1, 2))

    counts = [n for n in range(tensor, heads + 1, tensor) if heads % n == 0]
    if not stated or off(heads) < KV_CLEARLY + rounding or not counts:
        return heads
    best = min(counts, key=off)
    return best if off(best) < KV_FITS + rounding else heads


def _heads(hidden: int, tensor: int) -> int:
    counts = [n for n in range(tensor, hidden + 1, tensor) if hidden % n == 0]
    return min(counts, key=lambda n: abs(n - hidden / ASSUMED_HEAD), default=1)


def _task(row: dict[str, str]) -> Literal["", "span", "masked"]:
    """What the head of an encoder does besides a look at all tokens: find a span, or only see masked positions."""
    settings, model = row.get("other_settings", ""), row["model"]
    if "SQuAD" in model or ("BERT" in model and "fine-tuning" in settings):
        return "span"
    return "masked" if "BERT" in model and "pre-training" in settings else ""


def _headed(model: Model, row: dict[str, str]) -> Model:
    """The model with the head that an encoder has for its task."""
    task, head = _task(row), model.blocks[-1]
    if task == "span":  # a start and an end for every token
        part = norm("norm", ROWS, model.hidden, "layernorm") + linear("span", ROWS, model.hidden, 2)
        head = Block(name="head", kind="head.span", params=part.params, ops=part.ops, saved=part.saved, boundary=Size())
    elif task == "masked":
        head = head.replace(
            kind="head.masked", ops=tuple(_part(op, MASKED) if op.kind in ("gemm", "loss") else op for op in head.ops),
            saved=tuple(s.replace(size=MASKED * s.size) if s.name == "logits" else s for s in head.saved),
            workspace=MASKED * head.workspace)
    return model.replace(blocks=(*model.blocks[:-1], head))


def _part(op: Op, part: float) -> Op:
    """An operator on a part of its rows."""
    rows = "m" if op.kind == "gemm" else "rows"
    return op.replace(shape={**op.shape, rows: part * op.shape[rows]}, flops=part * op.flops,
                      backward_flops=part * op.backward_flops, traffic=part * op.traffic,
                      backward_traffic=part * op.backward_traffic)


def adapted(model: Model, rank: int, names: Sequence[str] = ADAPTED) -> Model:
    """A model with a pair of narrow products beside those of `names` in its layers, as in LoRA (Hu et al., 2021):
    y = W x + B A x, A [rank, in] and B [out, rank]."""
    kinds: dict[str, Block] = {}
    for block in model.blocks[1:-1]:
        if block.kind in kinds:
            continue
        params, saved = list(block.params), list(block.saved)
        ops: list[Op] = []
        for op in block.ops:
            ops.append(op)
            if op.name not in names:
                continue
            m, n, k = (op.shape[x] for x in "mnk")
            weight = next(p for p in block.params if p.name == f"{op.name}.weight")
            params += [Param(name=f"{op.name}.lora_a", shape=(rank, weight.shape[1]), split=weight.split and 1),
                       Param(name=f"{op.name}.lora_b", shape=(weight.shape[0], rank),
                             split=0 if weight.split == 0 else None)]
            ops += [gemm(f"{op.name}.lora_a", Size.of(1), m, Size.of(rank), k),
                    gemm(f"{op.name}.lora_b", Size.of(1), m, n, Size.of(rank)),
                    *elementwise(f"{op.name}.lora_add", m, n, (3, 1)).ops]
            saved.append(Saved(name=f"{op.name}.lora_inner", size=rank * m, until="selective"))
        kinds[block.kind] = block.replace(params=tuple(params), ops=tuple(ops), saved=tuple(saved))
    layers = [kinds[b.kind].replace(name=b.name) for b in model.blocks[1:-1]]
    return model.replace(blocks=(model.blocks[0], *layers, model.blocks[-1]))


def packed(model: Model, samples: int) -> Model:
    """A model of which every sequence is so many samples, none of which attends to another."""
    def apart(op: Op) -> Op:
        shape = op.shape | {"batch": samples * op.shape["batch"], "q": op.shape["q"] / samples,
                            "kv": op.shape["kv"] / samples} if op.kind == "attention" else op.shape
        return op.replace(shape=shape, flops=op.flops / samples, backward_flops=op.backward_flops / samples
                          ) if op.kind == "attention" else op

    kinds: dict[str, Block] = {}
    for block in model.blocks:
        if block.kind not in kinds:
            kinds[block.kind] = block.replace(ops=tuple(map(apart, block.ops)))
    return model.replace(blocks=tuple(kinds[b.kind].replace(name=b.name) for b in model.blocks))


def unadapted(model: Model, *, is_rest_trained: bool) -> tuple[str, ...]:
    """Names of what LoRA leaves as it is: all but its own products, or, if the rest is trained, those of the layers."""
    blocks = model.blocks[1:-1] if is_rest_trained else model.blocks
    return tuple(f"{b.name}/{p.name}" for b in blocks for p in b.params if not p.tied and ".lora_" not in p.name)


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
    rack = "NVL72" in row.get("other_settings", "")
    per_node = min(gpus, RACK if rack else _count(row, "gpus_per_node", 8))
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


def _unthrottled(cluster: Cluster) -> Cluster:
    """With devices that hold the clock at which their kernels were measured."""
    return cluster.replace(nodes=tuple(
        node.replace(devices=tuple(d.replace(clock=1.0) for d in node.devices)) for node in cluster.nodes))


def _nic_gbit(row: dict[str, str], per_node: int) -> float:
    """Gb/s of a node's adapters together, as the row states it or as is usual."""
    text = row.get("interconnect", "")
    if found := re.search(r"(\d+)x(\d+) Gb/s", text):
        return float(found[1]) * float(found[2])
    if found := re.search(r"(\d+) Gb/s (?:RDMA |CX-7 )?per GPU", text):
        return float(found[1]) * per_node
    if found := re.search(r"(\d+) (?:Gbps|Gb/s)", text):
        return float(found[1])
    chip = row["gpu"].split("-")[0]
    usual = float(NIC_GBIT.get(chip, 100))
    return usual * per_node / 8 if chip in ("GB200", "GB300") else usual


def plan_of(row: dict[str, str], blocks: int, *, zero: int = 0, costs: Sequence[float] = ()) -> Plan:
    """Tensor degree innermost, then context, data, and pipeline; layers as even as can be, by `costs` of all blocks if
    the code base goes by such, or as the row lists them.

    `zero` is the stage of ZeRO where the row states none.
    """
    tensor, data, stages = (_count(row, k) for k in ("tp", "dp", "pp"))
    context = _count(row, "cp", 1)
    if tensor * data * stages * context != _count(row, "num_gpus"):
        raise Inexpressible("dp * cp * tp * pp is not the number of GPUs")
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
    cuts = _cuts(row, blocks, stages * rounds, costs)
    stated = _recompute(row)
    recompute = "none" if "(" in stated else stated or "none"
    copies = data * context
    zero, size = _count(row, "zero_stage", zero), tensor * copies
    shard = copies
    if "HYBRID" in row.get("other_settings", ""):
        shard = min(copies, _count(row, "gpus_per_node", 8))
    chunks = list(pairwise(cuts))
    plan = Plan(
        pipelines=(Pipeline(
            stages=tuple(Stage(blocks=chunks[i], more=tuple(chunks[i + stages::stages]), tensor=tensor,
                               devices=tuple(range(i * size, (i + 1) * size))) for i in range(stages)),
            samples=samples, micro_batch=micro, replicas=data, context=context),),
        schedule="interleaved" if rounds > 1 else "1f1b", expert=_expert(row),
        sharding=Sharding(weights=shard if zero == 3 else 1, gradients=shard if zero >= 2 else 1,
                          optimizer=shard if zero >= 1 else 1))
    return plan if recompute == "none" else _recomputing(plan, blocks, recompute)  # type: ignore[arg-type]


def _recompute(row: dict[str, str]) -> str:
    """What the row states, if only among its settings. Qwen's scripts for fine-tuning switch checkpointing on, as do
    torchtune's recipes, and litgpt's on several GPUs."""
    named = re.search(r"\(\d+, (selective) (op)\)", row.get("other_settings", ""))
    owner = row.get("source", "").partition("/")[0]
    tuned = "QwenLM" in owner or "torchtune" in row.get("source", "") or (
        owner == "Lightning-AI" and row["num_gpus"] != "1")
    checkpointing = "full" if tuned else ""
    return row.get("recompute") or (f"{named[1]} ({named[2]})" if named else checkpointing)


def _products_flops(block: Block) -> float:
    """FLOPs of a block's products per token."""
    return sum(op.flops.at(1, 1, 1) for op in block.ops if op.kind == "gemm")


def _by_cost(costs: Sequence[float], chunks: int) -> list[int]:
    """Where stages begin, and the end, if each takes blocks until all up to its own cost more than its share and that
    of those before it."""
    cuts, so_far = [0], 0.0
    for i, cost in enumerate(costs):
        so_far += cost
        if len(cuts) < chunks and so_far > sum(costs) * len(cuts) / chunks:
            cuts.append(i + 1)
    return [*cuts, len(costs)]


def _cuts(row: dict[str, str], blocks: int, chunks: int, costs: Sequence[float] = ()) -> list[int]:
    found = re.search(r"layers per stage incl\. embedding and head=\[([\d, ]+)\]", row.get("other_settings", ""))
    if found:
        sizes = [int(n) for n in found[1].split(",")]
        if len(sizes) != chunks or sum(sizes) != blocks:
            raise Inexpressible("the layers per stage do not add up")
        return [sum(sizes[:i]) for i in range(chunks + 1)]
    if costs and chunks > 1:
        cuts = _by_cost(costs, chunks)
        if len(cuts) == chunks + 1 and cuts[-2] < blocks:
            return cuts
    if (blocks - 2) % chunks and blocks % chunks == 0:  # Megatron can count the embedding and the head as layers
        return [blocks * i // chunks for i in range(chunks + 1)]
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
    layers = sum(map(_products_flops, model.blocks[1:-1]))
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
    lacks_bytes: int
    """Bytes by which the fullest device is above its memory; negative if all fit."""

    @property
    def fits(self) -> bool:
        return self.lacks_bytes <= 0


def score(case: Case) -> Score:
    """Predicts one run, with what its framework does otherwise."""
    plain = _score(case)
    if case.recompute == "as planned" or (case.recompute == "as needed" and plain.fits):
        return plain
    blocks = len(case.job.model.blocks)
    whole = _score(case._replace(plan=_recomputing(case.plan, blocks)))
    part = 0.5
    if case.recompute == "as needed":
        part = min(1.0, plain.lacks_bytes / max(1, plain.lacks_bytes - whole.lacks_bytes))
    step_s, ceiling_s, peak, lacks = (a + part * (b - a) for a, b in (
        (plain.step_s, whole.step_s), (plain.ceiling_s, whole.ceiling_s), (plain.peak_bytes, whole.peak_bytes),
        (plain.lacks_bytes, whole.lacks_bytes)))
    if case.recompute == "products":
        saving = case.framework._replace(saves_products="needed" if case.framework.gates_fused else "all")
        kept = _score(case._replace(plan=_recomputing(case.plan, blocks, "selective"), framework=saving))
        return Score(case, step_s, kept.peak_bytes, ceiling_s, whole.bound, kept.lacks_bytes)
    if case.recompute == "as needed" and case.framework.offloads:
        step_s, ceiling_s, whole = plain.step_s, plain.ceiling_s, whole._replace(bound=plain.bound)
    return Score(case, step_s, round(peak), ceiling_s, whole.bound, min(round(lacks), whole.lacks_bytes)
                 if case.recompute == "as needed" else round(lacks))


def _recomputing(plan: Plan, blocks: int, mode: Recompute = "full") -> Plan:
    """With all layers recomputed: no framework wraps the embedding or the head."""
    ends = (0, blocks - 1)
    return plan.replace(pipelines=tuple(
        p.replace(stages=tuple(s.with_modes({b: "none" if b in ends else mode for b in s.held}) for s in p.stages))
        for p in plan.pipelines))


def _score(case: Case) -> Score:
    plan, framework, device = case.plan, case.framework, case.cluster.devices[0]
    job = case.job.replace(model=frameworks.rewritten(case.job.model, case.job, device, framework))
    found = predict(plan, job, case.cluster, sent=False, trace=not framework.overlaps)
    return Score(case, frameworks.step_s(found, plan, job, device, framework),
                 max(frameworks.peak_bytes(use, plan, job, device, framework) for use in found.devices),
                 found.step_s * found.hfu, found.bound.partition(" (")[0],
                 max(frameworks.lacks_bytes(use, plan, job, framework) for use in found.devices))


def scores(cases: list[Case], skipped: Skipped) -> Iterator[Score]:
    """Predicts run by run; what the plan language refuses is added to `skipped`."""
    for case in cases:
        try:
            yield score(case)
        except InputError as error:
            skipped[case.source, case.gpu, str(error)] += len(case.where)


INTERVAL = 0.80, 1.30
"""Times a predicted step time: about where 10 and 90 % of published steps lie (`docs/accuracy.md`); for memory too."""
EVERY = 100
"""Runs between two lines about progress."""


def validate(path: Path, progress: Callable[[str], None] = lambda line: None) -> validation.Result:
    """Every row of a table of published results beside its prediction, by source and GPU; peak memory apart.

    The totals weigh sources equally: their errors are means of the sources' own figures.
    """
    cases, skipped = read(path)
    rows: list[validation.Row] = []
    memory: list[validation.MemoryRow] = []
    low, high = INTERVAL
    unfit = 0
    for i, s in enumerate(scores(cases, skipped), 1):
        case = s.case
        unfit += not s.fits
        if case.step_s:
            rows.append(validation.Row(case.where["step"], case.source, case.gpu, "step", case.step_s, s.step_s,
                                       low * s.step_s, high * s.step_s, s.ceiling_s, s.bound))
        if case.peak_bytes:
            memory.append(validation.MemoryRow(
                case.where["memory"], case.source, case.gpu, "peak memory", round(case.peak_bytes), s.peak_bytes,
                round(low * s.peak_bytes), round(high * s.peak_bytes), s.fits))
        if i % EVERY == 0:
            progress(f"{i} of {len(cases)} runs")
    reasons: Counter[str] = Counter()
    for (source, _, why), n in sorted(skipped.items()):
        reasons[f"{source}: {why}"] += n
    found = validation.result(path, rows, dict(reasons), memory)._replace(unfit=unfit)
    apart = tuple(validation.Skipped(*key, n) for key, n in sorted(skipped.items()))
    return found._replace(skipped=apart, total=_equally(found.sources),
                          memory_total=_equally(found.memory_sources))


def _equally(by_source: tuple[validation.Summary, ...]) -> validation.Summary | None:
    if not by_source:
        return None
    means = [sum(values) / len(by_source) for values in zip(*(s[3:] for s in by_source))]
    return validation.Summary("mean of sources", "all", sum(s.rows for s in by_source), *means)
