"""Files of measured kernel times (`kernels/*.parquet` and the same as CSV): which rows can be predicted, and why not.

The columns are those of the data's README: `source`, `gpu`, `op`, `dtype`, `time_us`, and the sizes of the kind.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.calibrate import drift
from mixfleet.cluster import Device, device_named
from mixfleet.cost.demand import TYPES, Array
from mixfleet.cost.query import KINDS
from mixfleet.errors import InputError

US = 1e-6
COMMON = ("source", "gpu", "op", "dtype", "time_us")


class Layout(NamedTuple):
    """How one kind of file maps to `query.KINDS`."""

    kind: str
    marks: tuple[str, ...]
    """Columns that only this kind of file has."""
    rename: dict[str, str]
    constant: dict[str, Any]


LAYOUTS: dict[str, Layout] = {
    "gemm": Layout("gemm", ("m", "n", "k"), {}, {}),
    "attention": Layout("attention", ("q_len", "kv_len"), {}, {}),
    "moe": Layout("moe", ("tokens", "experts"), {}, {}),
    "conv": Layout("conv", ("c_in", "c_out"), {}, {}),
    "elementwise": Layout("stream", ("rows", "cols", "n_in"), {}, {"vocab": 0}),
    "norm": Layout("stream", ("rows", "cols"), {}, {"n_in": 1, "n_out": 1, "vocab": 0}),
    "embedding": Layout("stream", ("tokens", "dim", "vocab"), {"tokens": "rows", "dim": "cols"},
                        {"n_in": 1, "n_out": 1}),
}
UNKNOWN = {"linear attention": ("num_k_heads", "chunk_size"), "operators by name": ("op", "shape"),
           "operators of whole models": ("in_shapes",), "collectives": ("ranks", "bytes")}
"""Kernel files that have no demand model, by columns of theirs."""


class Table(NamedTuple):
    """Rows of one file that can be predicted."""

    kind: str
    columns: dict[str, NDArray[Any]]
    devices: dict[str, Device]
    time_s: Array
    """As measured."""
    host_s: Array
    """What of it is no kernel's, but the host's (`drift`)."""
    where: NDArray[np.intp]
    """Row of the file."""
    skipped: dict[str, int]
    """Why others cannot, and how many."""

    def column(self, name: str) -> NDArray[Any]:
        """All kinds of a file's columns; zeros where this one lacks it."""
        return self.columns.get(name, np.zeros(len(self.time_s)))


def read(path: Path, *, optional: bool = False) -> Table | None:
    """A file's rows. InputError names missing columns; none of them, or None if `optional`, for a kind without a model.
    """
    import pandas

    try:
        frame = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    except (ValueError, OSError) as error:
        raise InputError(f"not a table: {error}", where=str(path)) from None
    have = set(frame.columns)
    for what, marks in UNKNOWN.items():
        if have.issuperset(marks):
            if optional:
                return None
            return Table("", {}, {}, np.zeros(0), np.zeros(0), np.zeros(0, np.intp), {
                f"{what}; kernels that can be predicted are {', '.join(LAYOUTS)}": len(frame)})
    found = [x for x in LAYOUTS.values() if have.issuperset(x.marks)]
    if not found and path.stem in LAYOUTS:
        found = [LAYOUTS[path.stem]]
    if not found:
        near = max(LAYOUTS.values(), key=lambda x: len(have.intersection(x.marks)))
        raise InputError(f"columns {', '.join(m for m in near.marks if m not in have)} are missing; a file "
                         f"of kernel times has {', '.join(COMMON)} and sizes, such as {', '.join(near.marks)}",
                         where=str(path))
    layout = found[0]
    frame = frame.rename(columns=layout.rename)
    kind = KINDS[layout.kind]
    needed = [*COMMON, *(n for n, default in kind.shape.items() if default is None)]
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise InputError(f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing; a {layout.kind} "
                         f"file needs {', '.join(needed)}", where=str(path))
    columns: dict[str, NDArray[Any]] = {}
    rows = len(frame)
    for name, default in {**kind.shape, **layout.constant}.items():
        values = frame[name] if name in frame.columns else pandas.Series(default, index=frame.index)
        columns[name] = pandas.to_numeric(values, errors="coerce").to_numpy(float)
    for name, text in {"source": "", "gpu": "", "dtype": "", "backend": "", **kind.texts}.items():
        column = frame[name] if name in frame.columns else pandas.Series(text, index=frame.index)
        columns[name] = column.astype(object).fillna(text).astype(str).to_numpy(object)
    time = pandas.to_numeric(frame["time_us"], errors="coerce").to_numpy(float) * US
    host = drift.host_s(columns) if layout.kind == "conv" else np.zeros(rows)
    if layout.kind == "stream" and "direction" in frame.columns:
        # a backward also reads the gradient of what was written, and writes that of what was read
        back = frame["direction"].astype(str).to_numpy(object) == "bwd"
        read, written = columns["n_in"], columns["n_out"]
        columns |= {"n_in": np.where(back, read + written, read), "n_out": np.where(back, read, written)}
    if "kv_decode" in columns:
        columns["kv_decode"] = np.maximum(columns["kv_decode"], 0)
    devices: dict[str, Device] = {}
    no_device = {}
    for name in sorted(set(columns["gpu"])):
        try:
            devices[name] = device_named(name)
        except InputError as error:
            no_device[name] = f"device {name}: {'not in the catalog' if 'unknown' in str(error) else 'incomplete'}"
    reason = np.full(rows, "", dtype=object)
    for name in kind.size:
        reason[~(columns[name] > 0)] = f"{name} is not positive"
    reason[time <= host] = "time is not above the host's part of it"
    reason[~(np.isfinite(time) & (time > 0))] = "time is not a positive number"
    for dtype in sorted(set(columns["dtype"]) - set(TYPES)):
        reason[columns["dtype"] == dtype] = f"data type {dtype!r}"
    for name, why in no_device.items():
        reason[columns["gpu"] == name] = why
    if "kernel_config" in frame.columns:
        config = frame["kernel_config"].astype(object).fillna("").astype(str).to_numpy(object)
        reason[[bool(c) and "default" not in c for c in config]] = "kernel configuration set by hand"
    if "suspect" in frame.columns:
        reason[frame["suspect"].fillna(False).to_numpy(bool)] = "marked suspect"
    keep = np.flatnonzero(reason == "")
    counted = Counter(reason[reason != ""])
    return Table(layout.kind, {k: v[keep] for k, v in columns.items()}, devices, time[keep], host[keep], keep,
                 dict(sorted(counted.items(), key=lambda item: -item[1])))
