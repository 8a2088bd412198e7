"""Measured inference: prefill and decode steps of whole models as sums of kernels and all-reduces.

A row gives the model, batch, tokens, tensor degree, and milliseconds (`prefill_ms`, `decode_step_ms`). Nothing
overlaps and no host time is added, as in PipeWeave (Zhang et al., 2026). Rows of eager PyTorch are one forward pass of
the training model, priced as training is. Where lengths within a batch are not stated they count as equal.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mixfleet.calibrate import collectives
from mixfleet.calibrate import validate as validation
from mixfleet.catalog.models import MODELS
from mixfleet.cluster import Device, device_named
from mixfleet.cost import kernels, network, query
from mixfleet.cost.demand import type_named
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.model.families import build

COLUMNS = ("model", "gpu", "batch", "input_len", "output_len", "prefill_ms", "decode_step_ms")
"""What a file must have to be of this kind."""
MS = 1e-3
INTERVAL = (0.8, 1.25)
"""Around a step's prediction: the errors of its kernels partly cancel."""
MODEL_NAMES = {"bert_large": "bert-large", "gpt2_large": "gpt2-large", "opt_13": "opt-1.3b"}
GPT3 = {"gpt3_xl": (24, 3072, 24), "gpt3_27": (32, 2560, 32)}
"""Layers, hidden size and heads of the smaller GPT-3 (Brown et al., 2020, table 2.1; its 24 heads of 128 are 3072 wide,
as the operators measured with the model are, not 2048)."""
SOURCES = {"norm": ("vidur", "torch/vllm-kernels (vidur input_layernorm)"),
           "rope": ("vidur", "torch/vllm-kernels (vidur attn_rope)"),
           "act": ("vidur", "torch/vllm-kernels (vidur mlp_act)"),
           "gemm": ("aiconfigurator", "sglang/sglang_torch_linear"),
           "attention": ("aiconfigurator", "sglang/flash_attention")}
"""Which measured library stands for a serving engine's kernels."""


class Shape(NamedTuple):
    """What a decoder layer's kernels depend on."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@cache
def shape_of(name: str) -> Shape:
    """Of a catalog model with the keys of Llama. InputError for any other."""
    config = MODELS.get(name, {})
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return Shape(config["num_hidden_layers"], hidden, heads, config["num_key_value_heads"],
                     config.get("head_dim", hidden // heads), config["intermediate_size"], config["vocab_size"])
    except KeyError:
        raise InputError(f"model {name!r} is no dense decoder of the catalog") from None


def step_s(model: Shape, device: Device, tensor: int, sequences: int, new: float, seen: float, *,
           dtype: str = "bf16") -> float:
    """Seconds of one engine step: `sequences` with `new` tokens each, `seen` with their cache, on `tensor` devices.

    Prefill has `new == seen`; a decode step has one new token. Logits are those of each sequence's last token.
    """
    rows = sequences * new
    heads, kv_heads = model.heads // tensor, max(1, model.kv_heads // tensor)
    ffn, vocab = model.ffn // tensor, model.vocab // tensor
    products = [(rows, (heads + 2 * kv_heads) * model.head_dim, model.hidden, model.layers),
                (rows, model.hidden, heads * model.head_dim, model.layers),
                (rows, 2 * ffn, model.hidden, model.layers), (rows, model.hidden, ffn, model.layers),
                (sequences, vocab, model.hidden, 1)]
    m, n, k, count = (list(column) for column in zip(*products))

    def of(kind: str, what: str, columns: Mapping[str, Any]) -> Any:
        source, backend = SOURCES[what]
        return query.predict(kind, {"source": source, "backend": backend, "dtype": dtype, **columns}, device).time_s

    total = float(of("gemm", "gemm", {"m": m, "n": n, "k": k}) @ count)
    decode = new == 1
    total += model.layers * float(of("attention", "attention", {
        "batch": sequences, "q_len": new, "kv_len": seen, "heads": heads, "kv_heads": kv_heads,
        "head_dim": model.head_dim, "op": "attn_decode" if decode else "attn_prefill", "causal": not decode})[0])
    for what, op, cols, n_in, times in (("norm", "rmsnorm", model.hidden, 1, 2 * model.layers + 1),
                                        ("rope", "rope", (heads + kv_heads) * model.head_dim, 1, model.layers),
                                        ("act", "silu_and_mul", ffn, 2, model.layers)):
        total += times * float(of("stream", what, {"rows": rows, "cols": cols, "op": op, "n_in": n_in})[0])
    if tensor > 1:
        cluster = collectives.cluster_of(device.name, 1, tensor, "")
        nbytes = rows * model.hidden * type_named(dtype).result
        total += 2 * model.layers * network.collective("all_reduce", nbytes, range(tensor), cluster).alone_s
    return total


def serving_model(name: str) -> str:
    """The catalog's name in `Qwen2.5-14B-arxiv_8`, whose last part is the workload."""
    return name.rsplit("-", 1)[0].lower()


def forward_s(name: str, device: Device, batch: int, length: int) -> float:
    """Seconds of one fp32 forward pass of a training model in eager PyTorch."""
    if name in GPT3:
        layers, hidden, heads = GPT3[name]
        source: Any = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads,
                       "n_positions": 2048, "vocab_size": 50257}
    elif name in MODEL_NAMES:
        source = MODEL_NAMES[name]
    else:
        raise InputError(f"model {name!r} is not known")
    job = Job(name=name, model=build(source), seq_len=length, global_batch=batch, precision="fp32", attention="eager")
    return sum(kernels.block_cost(block, batch, length, 1, device, job).forward_s for block in job.model.blocks)


def validate(path: Path) -> validation.Result:
    """Every prefill and decode step of the file beside its prediction."""
    low, high = INTERVAL
    found, skipped = [], Counter[str]()
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for where, row in enumerate(csv.DictReader(file)):
            for what in ("prefill", "decode_step"):
                if not row[f"{what}_ms"]:
                    continue
                try:
                    measured_s = float(row[f"{what}_ms"]) * MS
                    seconds = _predicted_s(row, what)
                except (InputError, ValueError) as error:
                    skipped[str(error)] += 1
                    continue
                found.append(validation.Row(where, f"{row['source']} {what}", row["gpu"], row["model"], measured_s,
                                            seconds, low * seconds, high * seconds, 0.0, ""))
    return validation.result(path, found, dict(skipped.most_common()))


def _predicted_s(row: Mapping[str, str], what: str) -> float:
    """InputError says what cannot be expressed."""
    device = device_named(row["gpu"])
    batch, length = int(row["batch"]), int(row["input_len"])
    if "eager" in row["framework"]:
        if "fused" in row["framework"]:
            raise InputError("fused by a compiler")
        if row["dtype"] != "fp32":
            raise InputError(f"eager PyTorch in {row['dtype']}")
        return forward_s(row["model"], device, batch, length)
    if int(row["pp"] or 1) > 1:
        raise InputError("pipeline parallel inference")
    model, tensor = shape_of(serving_model(row["model"])), int(row["tp"])
    prompt = float(row["total_prefill_tokens"] or batch * length) / batch
    if what == "prefill":
        return step_s(model, device, tensor, batch, prompt, prompt, dtype=row["dtype"])
    # the median step has half of the output in its cache
    return step_s(model, device, tensor, batch, 1, prompt + float(row["output_len"]) / 2, dtype=row["dtype"])
