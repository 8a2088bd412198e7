"""Measures kernels on one device of this machine and describes it by them: `mixfleet calibrate device`.

The kernels are those that tell most about all others (`cost.deviations.design`); from their times `cost.query` predicts
others (S40's way: a few measurements fit the device's side alone). A GPU keeps the rates of its data sheet, to which
the coefficients refer; a core's rates are measured. `device_times` runs inside a process of `pinned`. The file is
written after every kernel, so a measurement that was stopped goes on where it was.

Kernels are timed alone and cold: before each run a buffer larger than the cache is written, as the other kernels of a
training step would. On a GPU, events on the stream enclose the kernel alone, after its clocks had time to rise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from mixfleet.calibrate.discover import available_memory_bytes, core_device, gpus
from mixfleet.calibrate.kernels import best_s, core_figures
from mixfleet.calibrate.pinned import Cores, available_cores, run_pinned
from mixfleet.cluster import Device, KernelTime, device_named
from mixfleet.cluster_file import load_device, save_device
from mixfleet.cost import kernels as compute
from mixfleet.cost import learned, query
from mixfleet.cost.demand import DRAM, TENSOR, Array
from mixfleet.cost.deviations import Places, design
from mixfleet.cost.learned import Factors
from mixfleet.errors import InputError
from mixfleet.units import GiB, MiB

if TYPE_CHECKING:
    from torch import Tensor

BUDGET_S = 180.0
PER_GROUP, QUICK = 20, 5
"""Kernels of each group of coefficients."""
POOL = 160
"""Shapes of a group among which the design chooses."""
LONGEST_S = {"gpu": 0.02, "cpu": 0.1}
"""By the roofline, of kernels that are measured."""
LARGEST_BYTES = GiB
CORE_CACHE_BYTES = 16 * MiB
"""Written between runs on a CPU: more than the cache that a core has to itself."""
STARTS_S = 240.0
"""For what comes before the first kernel and for the last one, in case a process hangs."""
WARM_S, WINDOW_S, MOST_RUNS, LEAST_RUNS = 0.1, 0.15, 50, 5

SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "gemm": {"m": (16, 16384), "n": (64, 16384), "k": (64, 16384)},
    "attention": {"batch": (1, 16), "q_len": (64, 8192), "heads": (1, 64)},
    "stream": {"rows": (16, 65536), "cols": (128, 16384)},
}
"""Smallest and largest size, each a multiple of the smallest; the space between is filled evenly in logarithms."""
STREAMS = ("layernorm", "softmax", "gelu", "add", "embedding")
VOCAB, HEAD_DIMS = 32000, (64, 128)
OPERATORS = {"gemm": "gemm", "attn_prefill": "attention", "layernorm": "norm", "softmax": "softmax",
             "gelu": "elementwise", "add": "elementwise", "embedding": "embedding"}
"""Operators of kernels: kinds of operators of models."""


class Kernel(NamedTuple):
    """What is to be measured."""

    kind: str
    op: str
    dtype: str
    sizes: tuple[tuple[str, float], ...]

    @staticmethod
    def of(time: KernelTime) -> Kernel:
        return Kernel(time.kind, time.op, time.dtype, tuple(sorted(time.sizes.items())))

    def timed(self, time_s: float) -> KernelTime:
        return KernelTime(kind=self.kind, op=self.op, dtype=self.dtype, sizes=dict(self.sizes), time_s=time_s)


class Error(NamedTuple):
    """Median absolute errors of the predicted times of one group's measured kernels."""

    group: str
    kernels: int
    before: float
    """From the data sheet alone."""
    after: float
    """Each one from the measurements of all others."""


class Found(NamedTuple):
    """The result."""

    device: Device
    measured: int
    kept: int
    """Of an earlier measurement."""
    left: int
    """Not measured for lack of time."""
    errors: tuple[Error, ...]


def measure(output: Path, *, gpu: int | None = None, cores: Cores = (), name: str = "", per_group: int = PER_GROUP,
            budget_s: float = BUDGET_S, again: bool = False) -> Found:
    """Measure GPU number `gpu`, or a process on `cores`, for at most about `budget_s`, and write its device file.

    Without either, the first GPU, or else the first core that this process may use. Kernels that the file has already
    are kept, unless `again`. InputError: no such GPU or core; a file that is of another device, or none of ours.
    """
    found = gpus()[0] if not cores else []
    if gpu is not None and gpu >= len(found):
        raise InputError(f"there is no GPU {gpu}; this machine has {len(found)}" + (
            f", from 0 to {len(found) - 1}" if found else ""))
    if found:
        device = found[gpu or 0]
    else:
        cores = cores or available_cores()[:1]
        outside = [c for c in cores if c not in available_cores()]
        if outside:
            raise InputError(f"there is no core {outside[0]}; this process may use "
                             f"{', '.join(map(str, available_cores()))}")
        device = core_device().replace(memory_bytes=available_memory_bytes() // len(available_cores()) * len(cores))
    if name and name != device.name:
        device = device.replace(name=name, base=device.name)
    if output.exists() and not again:
        old = load_device(output)
        if (old.name, old.kind) != (device.name, device.kind):
            raise InputError(f"this is device {old.name}, not {device.name}; give another file, or --again to replace "
                             "it", where=str(output))
        device = old
    else:
        output.unlink(missing_ok=True)
    before = len(device.kernel_times)
    (left,) = run_pinned(f"{__name__}:device_times", [cores], {
        "path": str(output), "gpu": -1 if device.kind == "cpu" else gpu or 0, "per_group": per_group,
        "budget_s": budget_s, "device": msgspec.to_builtins(device)}, timeout_s=budget_s + STARTS_S)
    device = load_device(output)
    return Found(device, len(device.kernel_times) - before, before, left, tuple(errors(device)))


def device_times(path: str, gpu: int, per_group: int, budget_s: float, device: dict[str, Any]) -> int:
    """Measure what the device's design lacks and write the device file after each; returns what time did not suffice
    for."""
    import torch

    this = msgspec.convert(device, Device)
    until = perf_counter() + budget_s
    where = torch.device("cpu") if gpu < 0 else torch.device("cuda", gpu)
    if not this.kernel_times:
        this = with_rates(this, where)
    wanted = kernels(this, per_group)
    have = {Kernel.of(t) for t in this.kernel_times}
    missing = [k for k in wanted if k not in have]
    save_device(this, path, HEADER)
    for i, kernel in enumerate(missing):
        if perf_counter() > until:
            return len(missing) - i
        time_s = seconds(kernel, where, this)
        this = described(this.replace(kernel_times=(*this.kernel_times, kernel.timed(time_s))))
        save_device(this, path, HEADER)
    return 0


HEADER = "Measured by mixfleet calibrate device; name this file as a device of a cluster file."


def with_rates(device: Device, where: Any) -> Device:
    """A core with the rates that it reaches, a GPU that the catalog does not have with those of its types."""
    if device.kind == "cpu":
        rates = {k: float(f"{v:.4g}") for k, v in core_figures().items()}
        return device.replace(
            flops={t: rates[t] for t in ("fp64", "fp32", "bf16")}, vector_flops=rates["fp32"], efficiency={},
            memory_Bps=rates["memory_Bps"], launch_s=rates["launch_s"], source="measured by mixfleet calibrate device")
    if "not in the catalog" not in device.source:
        return device
    reached = {}
    for dtype in ("bf16", "fp16", "tf32", "fp32"):
        kernel = Kernel("gemm", "gemm", dtype, (("k", 8192.0), ("m", 8192.0), ("n", 8192.0)))
        reached[dtype] = float(f"{2 * 8192**3 / seconds(kernel, where, device):.4g}")
    return device.replace(flops=reached, source="driver; rates as products of 8192 reach them, measured by mixfleet "
                                                "calibrate device")


def described(device: Device) -> Device:
    """A core with the efficiencies that its measured kernels have; a GPU's kernels speak for themselves."""
    if device.kind == "gpu":
        return device
    plain = device.replace(efficiency={})
    ideal = roofline_s(plain, device.kernel_times)
    found = {}
    for kind in dict.fromkeys(OPERATORS.values()):
        at = [i for i, t in enumerate(device.kernel_times) if OPERATORS[t.op] == kind]
        if at:
            found[kind] = _efficiency(plain, ideal, at)
    if "softmax" in found:
        found["loss"] = found["softmax"]
    return device.replace(efficiency={k: float(f"{v:.3g}") for k, v in found.items()})


def _efficiency(device: Device, ideal: Array, at: Sequence[int]) -> float:
    """Part of the roofline that kernels reach in all, beyond their launches: those that take long count more."""
    times = [device.kernel_times[i].time_s for i in at]
    work = sum(max(t - compute.launch_s(device), 0.1 * t) for t in times)
    return float(ideal[list(at)].sum() / work)


def roofline_s(device: Device, times: Sequence[KernelTime]) -> Array:
    """[kernels]: seconds at the full rates of a device: the slower of the tensor units and the memory."""
    found = np.empty(len(times))
    for kind in {t.kind for t in times}:
        at = [i for i, t in enumerate(times) if t.kind == kind]
        full = {**query.complete(kind, query.columns_of([times[i] for i in at])), "gpu": device.name}
        x = query.inputs(kind, full, {device.name: device}, {device.name: Factors()}, (), emulate=True)
        each = x.demand.total_s(x.nominal)
        found[at] = np.maximum(each[:, TENSOR], each[:, DRAM])
    return found


def errors(device: Device) -> Iterator[Error]:
    """How far the device's measured kernels are from what is predicted without them, by group."""
    times = device.kernel_times
    groups = [query.group_of(t.kind, t.dtype, t.op) for t in times]
    for group in sorted(set(groups)):
        at = [i for i, g in enumerate(groups) if g == group]
        sheet = _sheet(device)
        before = [abs(_predicted_s(sheet, times[i]) / times[i].time_s - 1) for i in at]
        after = []
        for i in at:
            others = described(device.replace(kernel_times=times[:i] + times[i + 1:]))
            after.append(abs(_predicted_s(others, times[i]) / times[i].time_s - 1))
        yield Error(group, len(at), median(before), median(after))


def _sheet(device: Device) -> Device:
    """The device as it is known without measurements."""
    if device.kind == "cpu":
        return device_named("cpu")
    return device.replace(kernel_times=())


def _predicted_s(device: Device, time: KernelTime) -> float:
    """Seconds of a kernel as training steps are predicted: on a CPU by the roofline."""
    if device.kind == "cpu":
        work = float(roofline_s(device, [time])[0])
        return work / compute.efficiency(device, OPERATORS[time.op]) + compute.launch_s(device)
    return float(query.predict(time.kind, query.columns_of([time]), device, emulate=True).time_s[0])


def kernels(device: Device, per_group: int) -> list[Kernel]:
    """What to measure, the most telling first: per group of coefficients, the groups in turn."""
    def types(*names: str) -> list[str]:
        return [t for t in names if t in device.flops]

    narrow = types("bf16", "fp16")[:1]
    on_gpu = device.kind == "gpu"
    plans = [[("gemm", "gemm", t) for t in types("fp32")],  # TF32 is answered as 16 bits are
             [("gemm", "gemm", t) for t in narrow],
             [("attention", "attn_prefill", t) for t in (narrow if on_gpu else ["fp32"])],
             [("stream", op, t) for op in STREAMS for t in (narrow if on_gpu and narrow else ["fp32"])]]
    each = [_chosen(device, plan, per_group) for plan in plans if plan]
    return [kernel for turn in zip_longest(*each) for kernel in turn if kernel]


def _chosen(device: Device, plan: Sequence[tuple[str, str, str]], count: int) -> list[Kernel]:
    """The most telling kernels of one group."""
    kind = plan[0][0]
    pool = [Kernel(*plan[i % len(plan)], tuple(sorted(_sizes(kind, plan[i % len(plan)][1], i // len(plan)).items())))
            for i in range(3 * POOL)]
    times = [kernel.timed(1.0) for kernel in pool]
    nbytes = np.array([_bytes(kernel) for kernel in pool])
    fit = (roofline_s(device, times) < LONGEST_S[device.kind]) & (nbytes < min(LARGEST_BYTES, device.memory_bytes / 4))
    pool = [pool[i] for i in np.flatnonzero(fit)][:POOL]
    if not pool:
        raise InputError(f"{device.name} is too slow, or has too little memory, to measure {kind} on it")
    layer = learned.load()
    name = query.group_of(kind, plan[0][2], plan[0][1])
    columns = query.named({**query.complete(kind, query.columns_of([k.timed(1.0) for k in pool])), "gpu": device.name},
                          layer.groups[name])
    factors = learned.factors_of(layer.groups[name], device, layer.relatives)
    x = query.inputs(kind, columns, {device.name: device}, {device.name: factors}, layer.groups[name].words,
                     emulate=True, group=layer.groups[name])
    texts, which = query.texts_of(columns, query.TEXTS, len(pool))
    order = design(Places.of(x, layer.forests[name], texts, which, np.arange(len(pool))), count)
    return [pool[i] for i in order]


def _sizes(kind: str, op: str, index: int) -> dict[str, float]:
    """The `index`-th shape of a sequence that fills the space evenly (Halton, 1960)."""
    found = {}
    for (size, (low, high)), prime in zip(SIZES[kind].items(), (2, 3, 5)):
        position, part, left = 0.0, 1.0, index + 1
        while left:
            part /= prime
            position += part * (left % prime)
            left //= prime
        found[size] = float(max(1, round((high / low) ** position)) * low)
    if kind == "attention":
        found |= {"kv_len": found["q_len"], "kv_heads": found["heads"], "causal": 1.0,
                  "head_dim": float(HEAD_DIMS[index % len(HEAD_DIMS)])}
    if kind == "stream":
        found |= {"n_in": 2.0 if op == "add" else 1.0, "n_out": 1.0, "vocab": float(VOCAB * (op == "embedding"))}
    return found


def _bytes(kernel: Kernel) -> float:
    """Of memory that measuring a kernel takes."""
    size, element = dict(kernel.sizes), 2 if kernel.dtype in ("bf16", "fp16") else 4
    if kernel.kind == "gemm":
        return element * (size["m"] * size["k"] + size["k"] * size["n"] + size["m"] * size["n"])
    if kernel.kind == "attention":
        return 4 * element * size["batch"] * size["heads"] * size["q_len"] * size["head_dim"]
    return element * size["cols"] * (size["rows"] * (size["n_in"] + 1) + size["vocab"])


def seconds(kernel: Kernel, where: Any, device: Device) -> float:
    """Seconds of one kernel on `where`, to four digits."""
    import torch

    with torch.no_grad():
        work = _work(kernel, where)
        if where.type == "cuda":
            flush = torch.empty(max(2 * device.cache_bytes, 64 * MiB) // 4, device=where)
            found = events_s(work, flush.zero_, torch.cuda)
        else:
            flush = torch.empty(CORE_CACHE_BYTES // 4)
            found = best_s(work, WINDOW_S, before=flush.zero_)
    return float(f"{found:.4g}")


def events_s(work: Callable[[], Any], flush: Callable[[], Any], cuda: Any) -> float:
    """Median seconds of `work` on the current stream of a GPU, each run after `flush`.

    Runs are issued without waiting: while the device flushes, the host gets ahead, so that an interval between events
    holds the kernel alone and no launch. `cuda` is `torch.cuda`.
    """
    def run() -> tuple[Any, Any]:
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        flush()
        start.record()
        work()
        stop.record()
        return start, stop

    until = perf_counter() + WARM_S
    run()
    while perf_counter() < until:
        start, stop = run()
        cuda.synchronize()
    rough_s = max(start.elapsed_time(stop) * 1e-3, 1e-6)
    pairs = [run() for _ in range(min(MOST_RUNS, max(LEAST_RUNS, int(WINDOW_S / rough_s))))]
    cuda.synchronize()
    return float(median(start.elapsed_time(stop) for start, stop in pairs)) * 1e-3


def _work(kernel: Kernel, where: Any) -> Callable[[], Any]:
    """The call that is timed, with its operands made."""
    import torch
    from torch.nn import functional

    size = {name: int(value) for name, value in kernel.sizes}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kernel.dtype, torch.float32)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where, dtype=torch.float32).to(dtype)

    if kernel.kind == "gemm":
        if where.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = kernel.dtype == "tf32"
        a, b = some(size["m"], size["k"]), some(size["k"], size["n"])
        return partial(torch.matmul, a, b, out=some(size["m"], size["n"]))
    if kernel.kind == "attention":
        q, k, v = (some(size["batch"], size["heads"], size["q_len"], size["head_dim"]) for _ in range(3))
        return partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    if kernel.op == "embedding":
        rows = torch.randint(0, size["vocab"], (size["rows"],), device=where)
        return partial(functional.embedding, rows, some(size["vocab"], size["cols"]))
    x = some(size["rows"], size["cols"])
    if kernel.op == "add":
        return partial(torch.add, x, some(size["rows"], size["cols"]))
    if kernel.op == "layernorm":
        return partial(functional.layer_norm, x, (size["cols"],), some(size["cols"]), some(size["cols"]))
    return partial(torch.softmax, x, -1) if kernel.op == "softmax" else partial(functional.gelu, x)
