"""Seconds of any kernel on any device: the public entry of the kernel cost model.

`predict` takes many kernels at once as columns named as in the measured data (`docs/cost-model.md`); `gemm`,
`attention` and the others are the same for plain arguments. Each answer has the time, the analytical ceiling, the
pipeline that binds, and an interval that holds 80 % of measurements. Backward passes are their own products
(`gemm_backward`) or the forward's work times what the backward computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.cluster import Device, KernelTime
from mixfleet.cost import demand, learned
from mixfleet.cost.demand import PIPES, Array, Demand, Machine, rate, type_named
from mixfleet.cost.deviations import Deviations, Places
from mixfleet.cost.learned import Factors, Inputs, Layer
from mixfleet.errors import InputError, unknown

Columns = Mapping[str, Any]


class Times(NamedTuple):
    """One row per kernel."""

    time_s: Array
    ceiling_s: Array
    low_s: Array
    high_s: Array
    floor_s: Array
    """Part of the time that is launch, and the host where a library was timed along with it."""
    pipe: NDArray[np.intp]
    """Which of `PIPES` sets the ceiling."""
    inside: NDArray[np.bool_]
    """False where the shape is far outside the data and the time is the bound at a fixed efficiency."""

    @property
    def binds(self) -> list[str]:
        return [PIPES[i] for i in self.pipe]


class Kind(NamedTuple):
    """How one kind of kernel is described."""

    shape: dict[str, Any]
    """Numeric columns and their defaults; None if there is none."""
    size: tuple[str, ...]
    """Those that the learned layer sees as the shape; none of them falls when there is more work."""
    texts: dict[str, str]
    """Text columns and their defaults; with `source` and `backend` they choose the words."""
    demand: Callable[[Machine, dict[str, Any], dict[str, Array]], Demand]


def _gemm(m: Machine, c: dict[str, Any], t: dict[str, Array]) -> Demand:
    return demand.gemm(m, c["m"], c["n"], c["k"], c["batch"], **t)


def _attention(m: Machine, c: dict[str, Any], t: dict[str, Array]) -> Demand:
    return demand.attention(m, c["batch"], c["q_len"], c["kv_len"], c["heads"], c["kv_heads"], c["head_dim"],
                            causal=c["causal"], window=c["window"], n_decode=c["n_decode"], kv_decode=c["kv_decode"],
                            latent=c["op_latent"], element=t["activation"], kv_element=c["kv_dtype_bytes"])


def _moe(m: Machine, c: dict[str, Any], t: dict[str, Array]) -> Demand:
    return demand.moe(m, c["tokens"], c["hidden"], c["inter"], c["topk"], c["experts"], gated=c["gated"],
                      tp=c["moe_tp"], ep=c["moe_ep"], skewed=c["distribution_skewed"], first_only=c["op_first"],
                      activation=t["activation"], weight=t["weight"], quantizes=t["quantizes"])


def _stream(m: Machine, c: dict[str, Any], t: dict[str, Array]) -> Demand:
    return demand.stream(m, c["rows"], c["cols"], c["n_in"], c["n_out"], element=(t["activation"] + t["result"]) / 2,
                         vector=2, special=c["op_special"], reduces=c["op_reduces"], table=c["vocab"])


def _conv(m: Machine, c: dict[str, Any], t: dict[str, Array]) -> Demand:
    names = ("n", "c_in", "h", "w", "c_out", "r", "s", "stride", "stride_w", "pad", "pad_w", "dil", "dil_w", "groups")
    return demand.conv(m, **{name: c[name] for name in names}, element=t["activation"], backward=c["op_backward"])


SPECIAL_OPS = {"softmax", "log_softmax", "gelu", "tanh", "silu", "silu_and_mul", "silu_mul_eager", "sigmoid", "elu",
               "selu", "softplus", "pow", "powu", "rope", "rope_eager"}
REDUCING_OPS = {"softmax", "log_softmax", "layernorm", "rmsnorm", "rmsnorm_eager", "batchnorm2d",
                "quant_computescale"}
DERIVED: dict[str, Callable[[str, str], float]] = {
    "op_latent": lambda op, _: op.startswith("mla"), "op_first": lambda op, _: op == "moe_grouped_gemm_w13",
    "op_special": lambda op, _: op in SPECIAL_OPS, "op_reduces": lambda op, _: op in REDUCING_OPS,
    "op_backward": lambda op, _: 1 if op.endswith("bwd_data") else 2 if op.endswith("bwd_filter") else 0,
    "distribution_skewed": lambda _, text: text.startswith("power_law"),
    "kv_dtype_bytes": lambda _, text: type_named(text or "bf16").activation,
}
"""Numbers that a text stands for: name, and the function of the operator and of the column before the underscore."""

KINDS: dict[str, Kind] = {
    "gemm": Kind({"m": None, "n": None, "k": None, "batch": 1}, ("m", "n", "k", "batch"), {"op": "gemm", "trans": ""},
                 _gemm),
    "attention": Kind(
        {"batch": 1, "q_len": None, "kv_len": None, "heads": None, "kv_heads": None, "head_dim": 128, "causal": True,
         "window": 0, "n_decode": 0, "kv_decode": 0},
        ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim"), {"op": "attn_prefill", "kv_dtype": "bf16"},
        _attention),
    "moe": Kind({"tokens": None, "hidden": None, "inter": None, "topk": None, "experts": None, "gated": True,
                 "moe_tp": 1, "moe_ep": 1}, ("tokens", "hidden", "inter", "topk", "experts"),
                {"op": "moe", "distribution": "balanced"}, _moe),
    "stream": Kind({"rows": None, "cols": None, "n_in": 1, "n_out": 1, "vocab": 0}, ("rows", "cols"), {"op": "add"},
                   _stream),
    "conv": Kind({"n": None, "c_in": None, "h": None, "w": None, "c_out": None, "r": None, "s": None, "stride": 1,
                  "stride_w": 1, "pad": 0, "pad_w": 0, "dil": 1, "dil_w": 1, "groups": 1},
                 ("n", "c_in", "h", "w", "c_out", "r", "s"), {"op": "conv2d_fwd"}, _conv),
}


def group_of(kind: str, dtype: str, op: str) -> str:
    """The group of coefficients: products by class of type, attention by phase, experts by quantization."""
    run = type_named(dtype)
    sixteen = run.rate in ("fp16", "bf16") and run.weight == 2
    if kind == "attention":
        return f"attention.{'decode' if op.endswith('decode') else 'context'}"
    if kind == "moe":
        return f"moe.{'16bit' if sixteen else 'quantized'}"
    if kind != "gemm":
        return kind
    if run.rate in ("fp64", "fp32", "tf32"):
        return "gemm.fp32"
    return "gemm.16bit" if sixteen else "gemm.fp8" if dtype.startswith("fp8") else "gemm.quantized"


def texts_of(columns: Columns, names: Sequence[str], rows: int) -> tuple[list[tuple[str, ...]], NDArray[np.intp]]:
    """The different rows of some text columns, and which of them each row is."""
    if all(isinstance(columns[name], str) for name in names):
        return [tuple(columns[name] for name in names)], np.zeros(rows, np.intp)
    codes, values = np.zeros(rows, np.int64), list[list[str]]()
    for name in names:
        column = columns[name]
        known: dict[str, int] = {}
        code = [0] * rows if isinstance(column, str) else [known.setdefault(v, len(known)) for v in column]
        values.append([str(column)] if isinstance(column, str) else list(known))
        codes = codes * len(values[-1]) + np.asarray(code)
    different, which = np.unique(codes, return_inverse=True)
    rows_of = []
    for code in different:
        row, rest = list[str](), int(code)
        for known_values in reversed(values):
            rest, at = divmod(rest, len(known_values))
            row.append(known_values[at])
        rows_of.append(tuple(reversed(row)))
    return rows_of, which


def inputs(kind: str, columns: Columns, devices: Mapping[str, Device], factors: Mapping[str, Factors],
           vocabulary: Sequence[str], *, emulate: bool = False, group: learned.Group | None = None) -> Inputs:
    """Features of kernels. `columns` are complete: sizes, texts, `source`, `backend`, `dtype`, `gpu`, arrays or
    scalars; `factors` has an entry per device. A variant of a known device runs the kernels of that one, and with a
    `group` one without measurements in it those of its sibling (`learned.sibling`)."""
    what = KINDS[kind]
    sizes = {name: np.asarray(columns[name], float) for name in what.shape}
    rows = max([np.size(v) for v in sizes.values()] + [len(v) for v in columns.values() if not isinstance(v, str)
                                                      and np.ndim(v)])
    sizes = {name: np.broadcast_to(values, (rows,)) for name, values in sizes.items()}
    names = ("gpu", "dtype", "source", "backend", *what.texts)
    texts, which = texts_of(columns, names, rows)
    table = [dict(zip(names, row)) for row in texts]
    themselves = [devices[row["gpu"]] for row in table]
    siblings = [learned.sibling(learned.reference(d), group, row["source"], by_figures=group_of(
        kind, row["dtype"], row["op"]) in learned.BY_FIGURES) if group else None for d, row in zip(themselves, table)]
    of = [learned.as_known(d, name) if name else learned.reference(d) for d, name in zip(themselves, siblings)]
    types = [type_named(row["dtype"]) for row in table]
    varied = [d is not r for d, r in zip(themselves, of)]

    def nominal(ds: Sequence[Device]) -> Machine:
        return demand.machine(ds, [rate(d, row["dtype"], emulate=emulate) for d, row in zip(ds, table)], which)

    known = nominal(of)
    actual = nominal(themselves) if any(varied) else known
    mine = [group.factors[name] if group and name else factors[d.name] for d, name in zip(themselves, siblings)]
    chip = np.array([learned.chip_of(f, t.rate) for f, t in zip(mine, types)])[which]
    dram = np.array([f.dram for f in mine])[which]
    floor_s = np.array([learned.floor_of(f, row["source"], row["backend"], row["dtype"])
                        for f, row in zip(mine, table)])[which]
    machine = known.scaled(chip, dram)
    derived = {name: np.array([function(row["op"], row.get(name.rsplit("_", 1)[0], "")) if not name.startswith("kv")
                               else function(row["op"], row.get("kv_dtype", "")) for row in table], float)[which]
               for name, function in DERIVED.items()}
    by_type = {field: np.array([getattr(t, field) for t in types], float)[which]
               for field in ("activation", "weight", "result", "quantizes")}
    work = what.demand(machine, {**sizes, **derived}, by_type)
    found, bound = learned.features(work, machine, floor_s, {name: sizes[name] for name in what.size})
    words = learned.flags([" ".join((*row[1:], of[i].arch, of[i].vendor)) for i, row in enumerate(texts)], which,
                          vocabulary)
    matrix = np.empty((rows, len(found) + len(vocabulary)), np.float32, order="F")  # trees ask for it by column
    for i, values in enumerate(found.values()):
        matrix[:, i] = values
    matrix[:, len(found):] = words
    ratio = np.ones(rows)
    if any(varied):
        analytical = partial(learned.alone_s, work, machine, floor_s=floor_s)
        ratio = np.where(np.array(varied)[which], analytical(actual.scaled(chip, dram)) / analytical(machine), 1.0)
    return Inputs(work, actual, machine, floor_s, bound, matrix, (*found, *vocabulary), ratio)


BLOCK_ROWS = learned.BLOCK_ROWS


def predict(kind: str, columns: Columns, device: Device | Mapping[str, Device], *, emulate: bool = False,
            factors: Mapping[str, Factors] | None = None, layer: Layer | None = None, interval: bool = True) -> Times:
    """Times of kernels of one `kind` of `KINDS`, as columns of equal length (or scalars).

    `device` is one for all rows, or devices by name with a column `gpu`. Without `source` and `backend` the answer is
    for the plain library call, timed alone. `factors` replaces those of a device (see `adapt`); a device with
    `kernel_times` has those that these give. InputError: a size below 1, an unknown type, a type that the device lacks
    (unless `emulate`). Products in TF32 are answered as `in_16_bits` says. Large questions asked again are answered
    from memory. Without `interval` low and high are the time itself, which takes half as long.
    """
    layer = layer or learned.load()
    if kind not in KINDS:
        raise unknown("kind of kernel", kind, KINDS)
    asked = None if factors else _question(kind, columns, device, (emulate, interval), layer)
    if asked is None:
        return _predict(kind, columns, device, emulate, factors, layer, interval)
    if asked not in _ANSWERS:
        while len(_ANSWERS) >= REMEMBERED:
            del _ANSWERS[next(iter(_ANSWERS))]
        _ANSWERS[asked] = layer, _predict(kind, columns, device, emulate, factors, layer, interval)
    known = _ANSWERS[asked][1]
    return Times(known.time_s.copy(), known.ceiling_s.copy(), known.low_s.copy(), known.high_s.copy(),
                 known.floor_s.copy(), known.pipe.copy(), known.inside.copy())


LARGE, REMEMBERED = 1000, 16
"""Rows of a question from which its answer is remembered, and how many are."""
_ANSWERS: dict[tuple[object, ...], tuple[Layer, Times]] = {}
"""With the layer that gave them, whose number stays its own that way."""


def _question(kind: str, columns: Columns, device: Device | Mapping[str, Device], settings: tuple[bool, ...],
              layer: Layer) -> tuple[object, ...] | None:
    """What tells a question from all others; None for few rows."""
    if max((np.size(v) for v in columns.values() if not isinstance(v, str)), default=1) < LARGE:
        return None
    digest = blake2b(digest_size=16)
    for name in sorted(columns):
        value = columns[name]
        array = np.asarray(value)
        if array.dtype == object:
            return None
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    devices = device if isinstance(device, Device) else tuple(device.items())
    return kind, devices, settings, id(layer), digest.digest()


def _predict(kind: str, columns: Columns, device: Device | Mapping[str, Device], emulate: bool,
             factors: Mapping[str, Factors] | None, layer: Layer, interval: bool) -> Times:
    full = complete(kind, columns)
    devices = {device.name: device} if isinstance(device, Device) else device
    if isinstance(device, Device):
        full["gpu"] = device.name
    elif "gpu" not in full:
        raise InputError("give one device, or a column gpu with the name of each row's device")
    rows = max([np.size(v) for v in full.values() if not isinstance(v, str)], default=1)
    least_s = np.zeros(rows)
    if kind == "gemm":
        full, devices, least_s = in_16_bits(full, devices, rows)
    pairs, which = texts_of(full, ("dtype", "op"), rows)
    groups = np.array([group_of(kind, *pair) for pair in pairs], dtype=object)[which]
    out = Times(np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows), np.empty(rows),
                np.empty(rows, np.intp), np.empty(rows, bool))
    for name in sorted(set(groups)):
        if name not in layer.groups:
            raise InputError(f"there are no coefficients for {name}; make them with `mixfleet calibrate fit`")
        group = layer.groups[name]
        found = {d.name: (factors or {}).get(d.name.removesuffix(IN_TF32)) or _measured(d, name, layer)
                 for d in devices.values()}
        members = np.flatnonzero(groups == name)
        for start in range(0, len(members), BLOCK_ROWS):
            at = members[start:start + BLOCK_ROWS]
            part = {k: v if isinstance(v, str) or np.ndim(v) == 0 else [v[i] for i in at] if isinstance(v, list)
                    else np.asarray(v)[at] for k, v in full.items()}
            part = named(part, group)
            for values, answer in zip(out, _block(
                    kind, name, group, part, devices, found, layer, emulate, len(at), interval=interval)):
                values[at] = answer
    return out if not least_s.any() else out._replace(**{
        field: np.maximum(getattr(out, field), least_s) for field in ("time_s", "ceiling_s", "low_s", "high_s")})


IN_TF32 = " in TF32"


def in_16_bits(full: dict[str, Any], devices: Mapping[str, Device],
               rows: int) -> tuple[dict[str, Any], Mapping[str, Device], Array]:
    """Products with those in TF32 as products in 16 bits, their devices, and the least seconds [rows] of these.

    No TF32 product was measured. Tensor units multiply it at half of the 16-bit rate, and its operands have twice the
    bytes: to every pipeline, operands and tiles are those of a 16-bit product whose inner dimension is twice as long.
    Only the results have more bytes, so no such product is faster than DRAM moves all of them. A variant of a device
    that changes one of the two rates has for these products a 16-bit rate of their own.
    """
    dtypes = [full["dtype"]] * rows if isinstance(full["dtype"], str) else list(full["dtype"])
    if "tf32" not in dtypes:
        return full, devices, np.zeros(rows)
    names = [full["gpu"]] * rows if isinstance(full["gpu"], str) else list(full["gpu"])
    m, n, k, batch = (np.broadcast_to(np.asarray(full[x], float), (rows,)).copy() for x in ("m", "n", "k", "batch"))
    least_s, known = np.zeros(rows), dict(devices)
    for i in (i for i, dtype in enumerate(dtypes) if dtype == "tf32"):
        device = devices[names[i]]
        same = learned.reference(device)
        wide = next((t for t in ("bf16", "fp16") if t in same.flops), None)
        if wide is None or "tf32" not in device.flops:
            continue
        least_s[i] = 4 * batch[i] * (m[i] * k[i] + k[i] * n[i] + m[i] * n[i]) / device.memory_Bps
        longer = same.flops[wide] / same.flops["tf32"]
        k[i] *= longer
        dtypes[i] = wide
        if device.flops[wide] != device.flops["tf32"] * longer:
            names[i] += IN_TF32
            if names[i] not in known:
                known[names[i]] = device.replace(name=names[i], base=device.known_as, flops={
                    **device.flops, wide: device.flops["tf32"] * longer})
    return {**full, "k": k, "dtype": dtypes, "gpu": names}, known, least_s


def named(columns: Columns, group: learned.Group) -> dict[str, Any]:
    """The columns with the group's default library where they name none."""
    default = dict(zip(("source", "backend"), group.default.split(" ", 1)))
    return {**columns, **{c: v for c, v in default.items() if isinstance(columns[c], str) and not columns[c]}}


def _block(kind: str, name: str, group: learned.Group, part: Columns, devices: Mapping[str, Device],
           factors: Mapping[str, Factors], layer: Layer, emulate: bool, rows: int, *, interval: bool) -> Times:
    x = inputs(kind, part, devices, factors, group.words, emulate=emulate,
               group=group)
    correction = layer.forests[name].predict(x.features)
    gpu = np.array([part["gpu"]] * rows if isinstance(part["gpu"], str) else part["gpu"], dtype=object)
    for device in sorted(set(gpu)):
        deviations = factors[device].deviations
        if deviations is not None:
            texts, which = texts_of(part, TEXTS, rows)
            at = np.flatnonzero(gpu == device)
            correction[at] += deviations.at(Places.of(x, layer.forests[name], texts, which[at], at))
    same = {g: devices[g].known_as in group.factors and learned.reference(devices[g]) is devices[g] for g in set(gpu)}
    known = np.array([same[g] for g in gpu])
    sizes = {s: np.broadcast_to(np.asarray(part[s], float), (len(x.bound_s),)) for s in KINDS[kind].size}
    ok = learned.inside(group, np.log(x.bound_s), sizes)
    low = high = np.ones(rows)
    if interval:
        spread = layer.spreads.get(name)
        size = np.zeros(rows) if spread is None else np.exp(spread.predict(x.features))
        low, high = (np.where(ok, *both) for both in zip(learned.intervals(group, size, known), learned.FALLBACK_RANGE))
    far = x.floor_s + (x.bound_s - x.floor_s) / learned.FALLBACK_EFFICIENCY
    time = np.where(ok, x.bound_s * np.exp(correction), far) * x.ratio
    return Times(time, x.demand.ceiling_s(x.nominal), time * low, time * high, x.floor_s, x.demand.binds(x.nominal), ok)


def adapt(device: Device, kind: str, columns: Columns, time_s: Any, *, emulate: bool = False, known: bool = False,
          layer: Layer | None = None) -> dict[str, Factors]:
    """Factors for `predict(..., factors=)` from a few measured kernels of one group (see `group_of`).

    `columns` as for `predict`, `time_s` [rows]. `known=False` starts from the relatives even of a device that the
    coefficients know. InputError if there are no rows, times that are not positive, or rows of several groups.
    """
    layer = layer or learned.load()
    time = np.atleast_1d(np.asarray(time_s, float))
    if not time.size or not np.all((time > 0) & np.isfinite(time)):
        raise InputError("adapt needs at least one measurement, each with a positive time")
    full = complete(kind, columns)
    pairs, _ = texts_of(full, ("dtype", "op"), time.size)
    names = {group_of(kind, *pair) for pair in pairs}
    if len(names) > 1:
        raise InputError(f"the measurements are of {', '.join(sorted(names))}; adapt takes one of them at a time")
    name = names.pop()
    group = layer.groups[name]
    start = learned.factors_of(group, learned.reference(device), layer.relatives, known=known)
    full = named({**full, "gpu": device.name}, group)
    x = inputs(kind, full, {device.name: device}, {device.name: start}, group.words, emulate=emulate,
               group=group)
    residual = np.log(time / x.bound_s / x.ratio) - layer.forests[name].predict(x.features)
    texts, which = texts_of(full, TEXTS, time.size)
    places = Places.of(x, layer.forests[name], texts, which, np.arange(time.size))
    return {device.name: start.replace(deviations=Deviations.of(places, residual))}


def _measured(device: Device, name: str, layer: Layer) -> Factors:
    """Factors of a device for the group `name`: with what its own measured kernels of that group say, if it has any."""
    for t in device.kernel_times:
        if t.kind not in KINDS:
            raise unknown("kind of kernel", t.kind, KINDS, where=f"device {device.name}")
    rows = [t for t in device.kernel_times if group_of(t.kind, t.dtype, t.op) == name]
    if not rows:
        return learned.factors_of(layer.groups[name], learned.reference(device), layer.relatives)
    kept: dict[str, tuple[Layer, Factors]] = device.__dict__.setdefault("_factors", {})
    if name not in kept or kept[name][0] is not layer:
        kept[name] = layer, adapt(device, rows[0].kind, columns_of(rows), [t.time_s for t in rows], emulate=True,
                                  known=True, layer=layer)[device.name]
    return kept[name][1]


def columns_of(rows: Sequence[KernelTime]) -> dict[str, Any]:
    """Measured kernels of one kind as columns; sizes that one of them leaves out have their default."""
    what = KINDS[rows[0].kind]
    return {"dtype": [t.dtype for t in rows], "op": [t.op for t in rows],
            **{name: [t.sizes.get(name, default) for t in rows] for name, default in what.shape.items()}}


TEXTS = ("source", "backend", "dtype")
"""What ran, as far as the deviations of a device depend on it."""


def complete(kind: str, columns: Columns) -> dict[str, Any]:
    """The columns with defaults filled in. InputError names a missing or non-positive one."""
    what = KINDS[kind]
    full: dict[str, Any] = {"source": "", "backend": "", "dtype": "bf16", **what.texts}
    for name, default in what.shape.items():
        if name not in columns and default is None:
            raise InputError(f"{kind} needs {name}; its sizes are {', '.join(what.shape)}")
        full[name] = columns.get(name, default)
    full |= {k: v for k, v in columns.items() if k in full or k == "gpu"}
    for name in what.shape:
        try:
            values = np.ravel(np.asarray(full[name], float))
        except (TypeError, ValueError):
            raise InputError(f"{kind}: {name} is {full[name]!r}; sizes are numbers") from None
        bad = np.flatnonzero(~(np.isfinite(values) & ((values > 0) | (name not in what.size))))
        if bad.size:
            raise InputError(f"{kind}: {name} is {values[bad[0]]:g} in row {bad[0]}; sizes must be positive")
    lengths = {name: np.size(v) for name, v in full.items() if not isinstance(v, str) and np.ndim(v)}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{kind}: columns of unequal length: {', '.join(f'{k} {n}' for k, n in lengths.items())}")
    return full


def gemm(m: Any, n: Any, k: Any, device: Device, *, batch: Any = 1, dtype: str = "bf16", **options: Any) -> Times:
    """C[m,n] = A[m,k] B[k,n], `batch` times."""
    return predict("gemm", {"m": m, "n": n, "k": k, "batch": batch, "dtype": dtype}, device, **options)


def gemm_backward(m: Any, n: Any, k: Any, device: Device, *, batch: Any = 1, dtype: str = "bf16",
                  **options: Any) -> tuple[Times, Times]:
    """The gradients of A (m,k from n) and of B (k,n from m)."""
    return (gemm(m, k, n, device, batch=batch, dtype=dtype, **options),
            gemm(k, n, m, device, batch=batch, dtype=dtype, **options))
