"""Known devices: `devices.csv`, one row per device, in the units of data sheets, each with its source.

A blank cell is a figure that no source gives with certainty. `usable_gib` is what the driver leaves to programs of
the nominal `mem_gb` (2**30 bytes each): the total capacity that PyTorch names in the out-of-memory messages of public
threads, the smaller one where they differ. `link_peers` is set where NVLink is a bridge, to the cards that it reaches.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import Any

from mixfleet.errors import InputError, unknown
from mixfleet.units import GB, GiB, MiB

TFLOP = 10**12
UNUSABLE_SHARE = 0.01
"""Of the nominal memory, where no measurement is known: page tables and firmware. An A100-80GB shows 79.1 GiB."""

PCIE_BPS_PER_LANE = {2: 0.5e9, 3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130}
"""Bytes per second and direction after line coding (8b/10b up to generation 2, then 128b/130b). Source: PCI-SIG."""

_FLOPS = {"fp64": ("fp64_tflops", "fp64_tensor_tflops"), "fp32": ("fp32_tflops", "fp32_matrix_tflops"),
          "tf32": ("tf32_tflops",), "fp16": ("fp16_tflops",), "bf16": ("bf16_tflops",), "fp8": ("fp8_tflops",),
          "fp4": ("fp4_tflops",), "int8": ("int8_tops",)}
_ESSENTIAL = {"fp32_tflops": "fp32 rate", "mem_gb": "memory", "mem_gbs": "memory bandwidth"}

CPU: dict[str, Any] = {
    "name": "cpu", "kind": "cpu", "arch": "x86-64 core with AVX2",
    "flops": {"fp64": 24e9, "fp32": 48e9, "bf16": 12e9}, "vector_flops": 24e9,
    "memory_bytes": 4 * GiB, "memory_Bps": 10e9, "cache_bytes": 2 * MiB, "launch_s": 8e-6,
    "source": "stated default: 3 GHz, two 8-wide fp32 FMA units (96 GFLOP/s), half of it reached; "
              "`mixfleet discover` measures the real core",
}


@cache
def rows() -> dict[str, dict[str, str]]:
    """The GPU table as text, by name."""
    text = resources.files("mixfleet.catalog").joinpath("devices.csv").read_text(encoding="utf-8")
    return {row["gpu"]: row for row in csv.DictReader(text.splitlines())}


def names() -> tuple[str, ...]:
    """Every known device, `cpu` included."""
    return (*rows(), "cpu")


def device_fields(name: str) -> dict[str, Any]:
    """The fields of `mixfleet.cluster.Device` for a known device. InputError for an unknown or incomplete one."""
    if name == "cpu":
        return CPU
    row = rows().get(_canonical(name))
    if row is None:
        raise unknown("device", name, names())
    missing = [what for column, what in _ESSENTIAL.items() if not row[column]]
    if missing:
        note = f" ({row['note']})" if row["note"] else ""
        raise InputError(f"device {row['gpu']!r}: no source gives its {' or its '.join(missing)}{note}; describe it "
                         "by its own figures, with a name of your own")
    flops = {dtype: max(float(row[c]) for c in columns if row[c]) * TFLOP
             for dtype, columns in _FLOPS.items() if any(row[c] for c in columns)}
    nominal = float(row["mem_gb"])
    return {
        "name": row["gpu"], "kind": "gpu", "vendor": row["vendor"], "arch": row["arch"], "flops": flops,
        "vector_flops": float(row["fp32_tflops"]) * TFLOP,
        "memory_bytes": round(float(row["usable_gib"] or nominal * (1 - UNUSABLE_SHARE)) * GiB),
        "memory_Bps": float(row["mem_gbs"]) * GB,
        "cache_bytes": round(float(row["l2_mb"] or 0) * MiB), "sm_count": int(row["sm_count"] or 0),
        "link_Bps": float(row["nvlink_gbs_per_dir"] or 0) * GB,
        "pcie_Bps": PCIE_BPS_PER_LANE[int(row["pcie_gen"])] * int(row["pcie_width"]) if row["pcie_gen"] else 0.0,
        "power_w": float(row["tdp_w"] or 0), "source": row["source"],
    }


def link_peers(name: str) -> int | None:
    """How many other devices the NVLink of this one reaches; None if it does not limit (a switch or a mesh)."""
    row = rows().get(name)
    return int(row["link_peers"]) if row and row["link_peers"] else None


def _canonical(name: str) -> str:
    """Names are matched without regard to case."""
    return next((known for known in rows() if known.lower() == name.lower()), name)
