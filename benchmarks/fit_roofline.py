"""Fit the coefficients of `mixfleet.catalog.efficiency` on measured kernels.

    python benchmarks/fit_roofline.py DATA_DIRECTORY

reads `kernels/*.parquet` of a directory of public measurements (columns as in its README) and prints, per
generation and operator kind, the fitted fraction of the roofline and the median error on sources that were not
fitted on. The table that ships is this output, rounded to two digits, and for kinds or
generations without data the stated default. Needs pandas and pyarrow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from mixfleet.catalog.devices import device_fields
from mixfleet.catalog.efficiency import SUSTAINED
from mixfleet.cluster import Device
from mixfleet.cost import kernels

HELD_OUT = ("vidur", "llmservingsim", "llmservingsim-v0", "llmcompass", "pipeweave", "kernelbench")
LEFT_OUT = ("aiter", "pipeweave-dse", "deepbench")
"""Tuned floors, sweeps of bad settings, and libraries of 2016: none is what training runs on today."""
FLOOR_S = 5e-6
"""What a measured kernel takes besides its work."""
SIZE = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}


def device(name: str) -> Device | None:
    try:
        return Device(**device_fields(name))
    except ValueError:
        return None


def training_sized(path: Path, kind: str) -> pd.DataFrame:
    """Rows of one operator kind as big as training makes them, with `flops` (0 if none) and `bytes`."""
    names = {"gemm": "gemm", "attention": "attention", "norm": "norm", "softmax": "norm",
             "elementwise": "elementwise", "embedding": "embedding"}
    rows = pd.read_parquet(path / "kernels" / f"{names[kind]}.parquet")
    for column in rows.select_dtypes(exclude="number"):
        rows[column] = rows[column].astype(object) if rows[column].dtype != bool else rows[column]
    rows = rows[rows.dtype.isin(SIZE) & ~rows.source.isin(LEFT_OUT)]
    size = rows.dtype.map(SIZE).astype(float)
    if kind == "gemm":
        m, n, k, batch = (rows[c].clip(lower=1).astype(float) for c in ("m", "n", "k", "batch"))
        rows = rows.assign(flops=2 * batch * m * n * k, bytes=size * batch * (m * k + k * n + m * n))
        return rows[~rows.suspect & (rows.op == "gemm") & (m >= 512) & (n >= 512) & (k >= 512)]
    if kind == "attention":
        rows = rows[~rows.suspect & rows.op.isin(["attn_prefill", "attn_encoder"]) & (rows.q_len == rows.kv_len)
                    & (rows.window == 0) & rows.head_dim.isin([64, 128]) & rows.kv_dtype.isin(["", *SIZE])
                    & (rows.q_len >= 1024)]
        pairs = rows.batch.astype(float) * rows.heads * rows.q_len.astype(float) ** 2 * np.where(rows.causal, 0.5, 1)
        size = rows.dtype.map(SIZE).astype(float)
        moved = size * rows.batch.astype(float) * rows.q_len * rows.head_dim * 2 * (rows.heads + rows.kv_heads)
        return rows.assign(flops=4 * pairs * rows.head_dim, bytes=moved)[pairs * rows.head_dim > 2e9]
    if kind == "embedding":
        return rows.assign(flops=0.0, bytes=2.0 * size * rows.tokens * rows.dim)[rows.tokens * rows.dim > 4e6]
    if kind == "elementwise":
        moved = (rows.n_in + rows.n_out) * rows.rows.astype(float) * rows.cols * size
        eager = rows.op.isin(["add", "mul", "div", "gelu", "relu", "tanh", "silu_and_mul", "rope"])
        return rows.assign(flops=0.0, bytes=moved)[eager & (moved > 3e7)]
    wanted = ["softmax"] if kind == "softmax" else ["layernorm", "rmsnorm"]
    moved = 2.0 * rows.rows * rows.cols * size
    return rows.assign(flops=0.0, bytes=moved)[rows.op.isin(wanted) & (moved > 3e7) & (rows.cols <= 16384)]


def fit_kernels(path: Path) -> None:
    for kind in ("gemm", "attention", "norm", "softmax", "elementwise", "embedding"):
        rows = training_sized(path, kind)
        found = []
        for (source, gpu, dtype), group in rows.groupby(["source", "gpu", "dtype"]):
            known = device(gpu)
            if known is None or dtype not in known.flops or len(group) < 5:
                continue
            roof = np.maximum(group.flops / known.flops[dtype], group.bytes / known.memory_Bps)
            seconds = group.time_us * 1e-6 - FLOOR_S
            shipped = kernels.efficiency(known, kind) / SUSTAINED["gpu"]
            predicted = roof / shipped + FLOOR_S
            found.append({"generation": kernels.generation(known), "gpu": gpu, "source": source, "dtype": dtype,
                          "rows": len(group), "held_out": source in HELD_OUT,
                          "fraction": float((roof / seconds.clip(lower=1e-7)).median()),
                          "error": float(np.abs(predicted / group.time_us * 1e6 - 1).median())})
        table = pd.DataFrame(found)
        sixteen = table[~((table.dtype == "fp32") & table.generation.isin(
            table[table.dtype != "fp32"].generation))] if kind in ("gemm", "attention") else table
        fitted = sixteen[~sixteen.held_out].groupby("generation").fraction.median().round(2)
        print(f"\n{kind}: fraction per generation {fitted.to_dict()}, over all {fitted.median():.2f}")
        print(table.round(3).to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory with kernels/*.parquet")
    path = parser.parse_args().data
    fit_kernels(path)


if __name__ == "__main__":
    main()
