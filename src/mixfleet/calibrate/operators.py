"""Measured operators of whole training models: forward and backward of each, as sums of kernels.

A row gives an operator's name, the shapes of its inputs and of its result, and microseconds forward (`fw_us`) and
backward (`bw_us`, 0 where only inference was measured). Products are products, their backward two more; everything
else that touches its elements once is a stream. A row becomes up to two predictions.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixfleet.calibrate import validate as validation
from mixfleet.cluster import Device, device_named
from mixfleet.cost import query
from mixfleet.cost.demand import TYPES
from mixfleet.errors import InputError

COLUMNS = ("source", "gpu", "op", "dtype", "in_shapes", "out_shape", "fw_us", "bw_us")
"""What a file must have to be of this kind."""
US = 1e-6
SOURCE = "neusight"
"""Whose kernels the operators run: eager PyTorch's."""


class Kernel(NamedTuple):
    """One kernel of an operator: its kind and the columns of `query.KINDS`."""

    kind: str
    sizes: dict[str, Any]


Shape = tuple[int, ...]


def _product(batch: int, m: int, n: int, k: int) -> tuple[list[Kernel], list[Kernel]]:
    """Forward, and the gradients of both factors."""
    def one(m: int, n: int, k: int) -> Kernel:
        return Kernel("gemm", {"batch": batch, "m": m, "n": n, "k": k, "op": "bmm" if batch > 1 else "gemm"})

    return [one(m, n, k)], [one(m, k, n), one(k, n, m)]


def _linear(inputs: list[Shape], out: Shape) -> tuple[list[Kernel], list[Kernel]]:
    return _product(1, prod(out[:-1]), out[-1], inputs[0][-1])


def _addmm(inputs: list[Shape], out: Shape) -> tuple[list[Kernel], list[Kernel]]:
    return _product(1, prod(out[:-1]), out[-1], inputs[1][-1])


def _matmul(inputs: list[Shape], out: Shape) -> tuple[list[Kernel], list[Kernel]]:
    if len(inputs[1]) <= 2:
        return _linear(inputs, out)
    return _product(prod(out[:-2]), out[-2], out[-1], inputs[0][-1])


def _stream(name: str, scalar: str = "", back: tuple[str, ...] = ("mul",)
            ) -> Callable[[list[Shape], Shape], tuple[list[Kernel], list[Kernel]]]:
    """Reads every input as large as the result, writes the result. `scalar`: the operator's name where one input is
    smaller. `back`: elementwise kernels that move what the backward moves; one for each input as large as the result of
    an operator of two."""
    def kernels(inputs: list[Shape], out: Shape) -> tuple[list[Kernel], list[Kernel]]:
        full = max(1, sum(prod(shape) == prod(out) for shape in inputs))
        sizes = {"rows": max(1, prod(out[:-1])), "cols": out[-1]}

        def one(op: str) -> Kernel:
            return Kernel("stream", {**sizes, "op": op, "n_in": 1 + (op in TWO_INPUTS), "n_out": 1})

        if not scalar:
            return [one(name)], [one(op) for op in back]
        if full < 2:
            return [one(scalar)], [one(op + "u" if op in TWO_INPUTS else op) for op in back]
        return [one(name)], [one(op) for op in back] * full

    return kernels


TWO_INPUTS = ("add", "mul", "div")


def _embedding(inputs: list[Shape], out: Shape) -> tuple[list[Kernel], list[Kernel]]:
    return [Kernel("stream", {"rows": max(1, prod(out[:-1])), "cols": out[-1], "op": "embedding"})], []


OPERATORS: dict[str, Callable[[list[Shape], Shape], tuple[list[Kernel], list[Kernel]]]] = {
    "linear": _linear, "addmm": _addmm, "matmul": _matmul, "bmm": _matmul,
    "layernorm": _stream("layernorm", back=("mul", "mul")), "softmax": _stream("softmax", back=("mul", "mulu")),
    "add": _stream("add", "addu", ()), "sub": _stream("add", "addu", ()), "mul": _stream("mul", "mulu"),
    "truediv": _stream("div", "divu"), "pow": _stream("pow", "powu", ("powu", "mulu", "mul")),
    "tanh": _stream("tanh"), "gelu": _stream("gelu"), "relu": _stream("relu"), "activation": _stream("relu"),
    "embedding": _embedding}
"""Kernels of an operator, forward and backward, from the shapes of its inputs and its result. Backward: a sum passes
its gradient on; softmax reads gradient and result twice; LayerNorm does so for its input, then for its weights; a power
is taken, scaled and multiplied by the gradient in kernels of their own (PyTorch 2.1)."""


ACTIVATIONS = ("activation_fn", "mlp.act")
"""How modules end that are listed as products of equal shapes, which they are not: OPT's and Switch's ReLU."""


class Entry(NamedTuple):
    """One measured pass of a row."""

    where: int
    source: str
    gpu: str
    what: str
    dtype: str
    measured_s: float
    kernels: list[Kernel]


def validate(path: Path) -> validation.Result:
    """Every pass that can be predicted. InputError names missing columns."""
    import pandas

    frame = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise InputError(f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing; a file of operators "
                         f"of whole models has {', '.join(COLUMNS)}", where=str(path))
    devices: dict[str, Device] = {}
    entries, skipped = list[Entry](), Counter[str]()
    for where, row in enumerate(frame.to_dict("records")):
        try:
            entries += _entries(where, row, devices)
        except ValueError as reason:  # of which InputError is one
            skipped[str(reason)] += 1
    return validation.result(path, _rows(entries, devices), dict(skipped.most_common()))


def _entries(where: int, row: dict[str, Any], devices: dict[str, Device]) -> list[Entry]:
    """The passes of a row. ValueError says why there is none."""
    op, dtype, gpu = str(row["op"]), str(row["dtype"]), str(row["gpu"])
    if op == "dropout" and row.get("mode") == "inf":
        raise ValueError("dropout does nothing in inference")
    if op == "linear" and str(row.get("module", "")).endswith(ACTIVATIONS):
        op = "relu"
    if op not in OPERATORS:
        raise ValueError(f"operator {op}")
    if dtype not in TYPES:
        raise ValueError(f"data type {dtype!r}")
    if gpu not in devices:
        try:
            devices[gpu] = device_named(gpu)
        except InputError as error:
            raise ValueError(f"device {gpu}: {'not in the catalog' if 'unknown' in str(error) else 'incomplete'}"
                             ) from None
    try:
        inputs = [tuple(int(n) for n in shape) for shape in ast.literal_eval(str(row["in_shapes"]))]
        out = tuple(int(n) for n in ast.literal_eval(str(row["out_shape"])))
        passes = OPERATORS[op](inputs, out)
    except (SyntaxError, TypeError, IndexError, ValueError):
        raise ValueError("shapes that cannot be read") from None
    if prod(out) <= 1:
        raise ValueError("a result of one element")
    times = [float(row[c]) * US for c in ("fw_us", "bw_us")]
    if not times[0] > 0:
        raise ValueError("time is not a positive number")
    return [Entry(where, str(row["source"]), gpu, f"{op} {name} {dtype}", dtype, measured, kernels)
            for name, measured, kernels in zip(("forward", "backward"), times, passes) if measured > 0 and kernels]


def _rows(entries: Sequence[Entry], devices: dict[str, Device]) -> list[validation.Row]:
    """Sums of the kernels' predictions, all of a kind at once."""
    sums = np.zeros((len(entries), 4))
    binds = [""] * len(entries)
    for kind, what in query.KINDS.items():
        at = [(i, k) for i, e in enumerate(entries) for k in e.kernels if k.kind == kind]
        if not at:
            continue
        names = [n for n, default in what.shape.items() if all(n in k.sizes for _, k in at) or default is None]
        columns: dict[str, Any] = {n: np.array([k.sizes[n] for _, k in at], float) for n in names}
        columns |= {"op": [k.sizes["op"] for _, k in at], "dtype": [entries[i].dtype for i, _ in at],
                    "gpu": [entries[i].gpu for i, _ in at], "source": [SOURCE] * len(at),
                    "backend": [_backend(kind, devices[entries[i].gpu]) for i, _ in at]}
        found = query.predict(kind, columns, devices, emulate=True)
        for j, (i, _) in enumerate(at):
            sums[i] += (found.time_s[j], found.low_s[j], found.high_s[j], found.ceiling_s[j])
            binds[i] = binds[i] or found.binds[j]
    return [validation.Row(e.where, e.source, e.gpu, e.what, e.measured_s, time, low, high, ceiling, bound)
            for e, (time, low, high, ceiling), bound in zip(entries, sums.tolist(), binds)]


def _backend(kind: str, device: Device) -> str:
    return "torch" if kind == "stream" else "torch/rocblas" if device.vendor == "AMD" else "torch/cublas"
