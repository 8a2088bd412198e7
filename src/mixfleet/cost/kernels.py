"""Seconds of compute: operators by a roofline with fitted efficiencies, blocks as sums of them, the optimizer step.

Matrix products and fused attention on a GPU take what the learned layer predicts (`cost.query`). Any other operator,
and every one of a CPU or of a device that states its own efficiency, takes `max(flops / peak, bytes / bandwidth) /
efficiency` (Williams, Waterman and Patterson, 2009). Each kernel also takes a gap. A GPU runs behind its host, so a
block takes what the slower of the two needs. Measured `BlockTime`s of a device replace all that. See
`docs/cost-model.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from mixfleet.catalog.efficiency import (
    DEFAULT,
    EFFICIENCY,
    FUSED_ATTENTION,
    GAP_S,
    HOST_STEP_BPS,
    LAUNCH_S,
    LINK_EFFICIENCY,
    SEND_S,
    SUSTAINED,
    SUSTAINED_VECTOR,
)
from mixfleet.cluster import BlockTime, Device
from mixfleet.cost import query
from mixfleet.cost.narrow import operators, shortened
from mixfleet.errors import InputError
from mixfleet.job import PRECISIONS, Job, Products
from mixfleet.model.spec import Block, ExpertShare, Op

Recompute = Literal["none", "selective", "full"]
OptimizerLoop = Literal["chunked", "foreach", "fused"]

LAUNCHES: dict[str, tuple[int, int]] = {
    "gemm": (1, 2), "attention": (1, 2), "norm": (1, 2), "softmax": (1, 1), "elementwise": (1, 1),
    "embedding": (1, 2), "loss": (3, 3),
}
"""Kernels per operator, forward and backward."""
EAGER_LAUNCHES = (5, 7)
"""Attention without a fused kernel: two products, scale, mask, softmax; and their gradients."""
EAGER_SCORE_PASSES = (6, 8)
"""Times that the s*s scores are read or written without a fused kernel: stored by the first product, scaled and masked
(2), softmax (2), read by the second product; backward reads them again and writes and reads the gradient of each."""
OPTIMIZER_PASSES: dict[str, dict[str, tuple[int, int]]] = {
    "adamw": {"fused": (6, 1), "foreach": (18, 10), "chunked": (20, 9)},
    "sgd": {"fused": (2, 1), "foreach": (4, 2), "chunked": (4, 2)},
}
"""Elements of the state's type read or written per parameter besides its gradient and the 16-bit copy of the weight,
and kernels: master weight and moments once in and once out if fused, else once per elementary operation."""

_FALLBACK = {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32"), "tf32": ("tf32", "fp32"),
             "fp32": ("fp32",), "fp64": ("fp64",)}


class BlockCost(NamedTuple):
    """Seconds of one micro-batch on one rank, communication excluded. `backward_s` is without `recompute_s`.

    `weight_s` is the part of `backward_s` that makes gradients of weights in products: a split backward defers it.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    weight_s: float
    forward_wait_s: float = 0.0
    """Part of `forward_s` for which a GPU waits for its host to issue kernels."""
    backward_wait_s: float = 0.0

    def among(self, forward_s: float, backward_s: float, again_s: float = 0.0) -> BlockCost:
        """The rest beside collectives between the block's kernels, which take so many seconds forward, backward, and in
        what is computed again: while a device communicates, its host gets ahead, and the device waits that much less.
        """
        hidden = min(self.forward_wait_s, forward_s)
        return self._replace(
            forward_s=self.forward_s - hidden,
            backward_s=self.backward_s - min(self.backward_wait_s, backward_s, self.backward_s - self.weight_s),
            recompute_s=max(0.0, self.recompute_s - min(self.forward_wait_s, again_s)))


def generation(device: Device) -> str:
    """The key of the efficiency tables: `cpu`, or the first word of the architecture, such as `Ampere`."""
    return "cpu" if device.kind == "cpu" else (device.arch.split() or [""])[0]


def compute_dtype(device: Device, precision: str) -> str:
    """The type in which `device` computes a job of this precision.

    A device without bf16 units computes a 16-bit job in fp16 (autocast with loss scaling), one with neither in
    fp32; tf32 becomes fp32 where there is none. fp32 and fp64 have no substitute: InputError.
    """
    for dtype in _FALLBACK[precision]:
        if dtype in device.flops:
            return dtype
    raise InputError(f"{device.name} cannot compute {precision}; it has {', '.join(sorted(device.flops))}")


def fused_attention(device: Device, job: Job) -> bool:
    """Whether attention keeps no s*s scores: as the job forces it, else where a flash kernel exists.

    Devices of an unknown generation count as having one if they have bf16 units.
    """
    if job.attention != "auto":
        return job.attention == "fused"
    kind = generation(device)
    return kind in FUSED_ATTENTION if kind else "bf16" in device.flops


def efficiency(device: Device, kind: str) -> float:
    """Fraction of the roofline that operators of `kind` reach on `device` in the middle of training.

    What the device states itself counts as it is; table entries are of kernels measured alone.
    """
    if kind in device.efficiency:
        return device.efficiency[kind]
    for table in (EFFICIENCY.get(device.known_as, {}), EFFICIENCY.get(generation(device), {})):
        if kind in table:
            return table[kind] * SUSTAINED[device.kind]
    return EFFICIENCY[DEFAULT][kind] * SUSTAINED[device.kind]


def launch_s(device: Device) -> float:
    """Seconds that the host needs to issue one operator's kernel."""
    return LAUNCH_S[device.kind] if device.launch_s is None else device.launch_s


def _gap_s(device: Device) -> float:
    """Seconds per kernel on top of its work. On a CPU issuing and computing are one thread's work."""
    return launch_s(device) if device.kind == "cpu" else min(GAP_S, launch_s(device))


def launches(op: Op, fused: bool) -> tuple[int, int]:
    """Kernels of one operator, forward and backward."""
    if op.kind == "elementwise":
        return int(bool(op.traffic.terms)), int(bool(op.backward_traffic.terms))
    return EAGER_LAUNCHES if op.kind == "attention" and not fused else LAUNCHES[op.kind]


def _roofline_s(flops: float, nbytes: float, peak: float, device: Device, kind: str) -> float:
    return max(flops / peak, nbytes / device.memory_Bps) / efficiency(device, kind) / device.share


def visible(op: Op, kv: float) -> float:
    """Part of the square of scores that a fused kernel computes under a causal mask and a sliding window."""
    window = min(op.window or kv, kv) / kv
    if not op.causal:
        return window
    return window - window * window / 2


def op_s(op: Op, b: int, s: int, t: float, device: Device, precision: str, *, fused: bool = True,
         context: float = 1, products: Products | None = None) -> tuple[float, float]:
    """Seconds of one operator, forward and backward, for micro-batch b, sequence length s, tensor degree t.

    The whole sequence is `context` times longer than s. `fused` concerns attention only. A fused backward computes
    five products for the forward's two (Dao, 2023). `products` is the narrow type of a product, casts apart.
    """
    dtype, shape = compute_dtype(device, precision), (b, s, t, context)
    element = 4 if op.kind == "loss" else PRECISIONS[precision].compute_bytes
    flops, back_flops = op.flops.at(*shape), op.backward_flops.at(*shape)
    nbytes, back_bytes = element * op.traffic.at(*shape), element * op.backward_traffic.at(*shape)
    peak = device.flops[dtype] if op.kind in ("gemm", "attention") else device.vector_flops
    gap = _gap_s(device) / device.share
    kernels, back_kernels = launches(op, fused)
    learned = _learned_s(op, shape, device, dtype, fused, products)
    if products:
        peak = device.flops.get(products.rate, peak)
    if learned:
        sustained = SUSTAINED_VECTOR if dtype == "fp32" else SUSTAINED["gpu"]
        forward, backward = (seconds / sustained / device.share for seconds in learned)
        return forward + kernels * gap, backward + (back_kernels * gap if back_flops else 0.0)
    if op.kind == "attention":
        q, kv, heads, batch = (op.shape[name].at(*shape) for name in ("q", "kv", "heads", "batch"))
        back_flops = (2.5 if fused else 2.0) * flops
        if fused:
            part = visible(op, kv)
            forward = _roofline_s(flops * part, nbytes, peak, device, "attention")
            backward = _roofline_s(back_flops * part, back_bytes, peak, device, "attention")
        else:
            scores = element * batch * heads * q * kv
            forward, backward = (
                _roofline_s(work, moved, peak, device, "gemm")
                + _roofline_s(0, passes * scores, peak, device, "elementwise")
                for work, moved, passes in zip((flops, back_flops), (nbytes, back_bytes), EAGER_SCORE_PASSES))
    else:
        forward = _roofline_s(flops, nbytes, peak, device, op.kind)
        backward = _roofline_s(back_flops, back_bytes, peak, device, op.kind)
    return forward + kernels * gap, backward + (back_kernels * gap if back_flops or back_bytes else 0.0)


_LEARNED = ("fp32", "tf32", "fp16", "bf16")


def _learned_s(op: Op, size: tuple[int, int, float, float], device: Device, dtype: str,
               fused: bool, products: Products | None = None) -> tuple[float, float] | None:
    """Seconds of an operator alone, without its launch, forward and backward; None where the roofline is to answer.

    The gradients of a product are two products. Fused attention's backward computes five products for two. Causal
    queries of a part of the sequence, which lies mirrored about its middle, see half of all keys on average: as many
    as queries at the end of a shorter sequence.
    """
    if device.kind != "gpu" or op.kind in device.efficiency or dtype not in _LEARNED:
        return None
    shape = {name: max(1.0, length.at(*size)) for name, length in op.shape.items()}
    if op.kind == "gemm":
        part = 1.0
        if products:
            dtype, part = shortened(products, device)
        forward, inputs, weights = _products_s(shape["batch"], shape["m"], shape["n"], shape["k"], device, dtype, part)
        flops = op.flops.at(*size)
        passes = op.backward_flops.at(*size) / flops if flops else 0.0
        return forward, inputs * min(passes, 1) + weights * max(passes - 1, 0)
    if op.kind == "attention" and fused and dtype in ("fp16", "bf16"):
        if op.causal and size[3] != 1:
            shape["kv"] = (shape["kv"] + shape["q"]) / 2
        forward = _attention_s(*(shape[x] for x in ("batch", "q", "kv", "heads", "kv_heads", "qk_dim", "v_dim")),
                               op.causal, op.window, device, dtype)
        return forward, 2.5 * forward
    return None


_Product = tuple[float, float, float, float, Device, str, float]
"""batch, m, n, k, device, type, and what part inner dimensions are of what they would be."""
_PRODUCTS: dict[_Product, tuple[float, float, float]] = {}


def _products_s(batch: float, m: float, n: float, k: float, device: Device, dtype: str,
                part: float = 1.0) -> tuple[float, float, float]:
    """Seconds of C = A B and of the gradients of A and B; inner dimensions are `part` of what they are."""
    key = (batch, m, n, k, device, dtype, part)
    if key not in _PRODUCTS:
        _answer([key])
    return _PRODUCTS[key]


def _answer(products: Sequence[_Product]) -> None:
    """Remembers the seconds of products, all on one device and in one type."""
    device, dtype = products[0][4:6]
    rows = [(batch, a, b, max(1.0, part * inner)) for batch, m, n, k, _, _, part in products
            for a, b, inner in ((m, n, k), (m, k, n), (k, n, m))]
    batch, m, n, k = (list(column) for column in zip(*rows))
    times = query.gemm(m, n, k, device, batch=batch, dtype=dtype, interval=False)
    seconds = np.maximum(times.time_s - times.floor_s, times.ceiling_s).reshape(-1, 3).tolist()
    if len(_PRODUCTS) > MOST_PRODUCTS:
        _PRODUCTS.clear()
    _PRODUCTS.update({key: (one[0], one[1], one[2]) for key, one in zip(products, seconds)})


def foresee(job: Job, device: Device, shapes: Iterable[tuple[int, int, int]]) -> None:
    """Works out many products of the model at once, which takes a fraction of the time that they take one by one.

    `shapes` are (micro-batch, sequence length, tensor degree). Nothing changes but when answers are made; those in
    narrow types are made one by one."""
    dtype = compute_dtype(device, job.precision)
    if job.products or device.kind != "gpu" or "gemm" in device.efficiency or dtype not in _LEARNED:
        return
    ops = [op for block in {b.kind: b for b in job.model.blocks}.values() for op in block.ops if op.kind == "gemm"]
    sizes = ((op, (b, s, float(t), 1.0)) for b, s, t in shapes for op in ops)
    wanted = ([max(1.0, op.shape[x].at(*size)) for x in ("batch", "m", "n", "k")] for op, size in sizes)
    products: dict[_Product, None] = dict.fromkeys((*one, device, dtype, 1.0) for one in wanted)  # type: ignore[misc]
    new = [product for product in products if product not in _PRODUCTS]
    for start in range(0, len(new), TOGETHER):
        _answer(new[start:start + TOGETHER])


TOGETHER = 21
"""Products in one question: with their gradients, as many rows as the learned layer evaluates at once."""
MOST_PRODUCTS = 100_000


@lru_cache(maxsize=100_000)
def _attention_s(batch: float, q: float, kv: float, heads: float, kv_heads: float, qk_dim: float, v_dim: float,
                 causal: bool, window: int, device: Device, dtype: str) -> float:
    times = query.predict("attention", {
        "batch": batch, "q_len": q, "kv_len": kv, "heads": heads, "kv_heads": kv_heads,
        "head_dim": (qk_dim + v_dim) / 2, "causal": causal, "window": window, "dtype": dtype}, device,
        interval=False)
    return float(max(times.time_s[0] - times.floor_s[0], times.ceiling_s[0]))


def block_cost(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
               recompute: Recompute = "none", context: float = 1, clock: float = 1,
               experts: ExpertShare | None = None, segments: tuple[int, ...] = (),
               wholes: tuple[int, ...] = ()) -> BlockCost:
    """Seconds of a block of `job.model` for one micro-batch on one rank of a tensor-parallel group.

    The rank has `seq_len` positions of a sequence that is `context` times longer, and `experts` says what it has of
    experts that several replicas share. With `segments` the micro-batch is one row in parts of these lengths, each with
    an attention of its own; those of parts of sequences are parts of `wholes`. Recompute repeats the whole forward if
    full, the attention cores if selective. Tensor units run at `clock` times their rate; memory has a clock of its own.
    Remembered per job, block kind, device and shape.
    """
    memory: dict[tuple[object, ...], BlockCost] = job.__dict__.setdefault("_block_costs", {})
    key = (block.kind, micro_batch, seq_len, tensor, device, recompute, context, clock, experts, segments, wholes)
    if key not in memory:
        memory[key] = _block_cost(block, micro_batch, seq_len, tensor, device, job, recompute, context, clock, experts,
                                  segments, wholes)
    return memory[key]


def _block_cost(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
                recompute: Recompute, context: float, clock: float, experts: ExpertShare | None,
                segments: tuple[int, ...], wholes: tuple[int, ...]) -> BlockCost:
    forward = backward = core = weights = host = back_host = 0.0
    fused = fused_attention(device, job)
    apart = [(1, n, whole / n) for n, whole in zip(segments, wholes) if n] if wholes else [
        (1, n, context) for n in segments]
    whole = [(micro_batch, seq_len, context)]
    for op, narrow, (rows, length, times) in [(o, narrow, rows) for o, narrow in operators(block, job)
                                       for rows in (apart if apart and o.kind == "attention" else whole)]:
        shape, part = (rows, length, float(tensor)), times
        if experts and op.routed:
            if experts.parts == inf:
                continue
            shape, part = (1, experts.tokens, experts.parts), 1.0
        f, g = op_s(op, *shape, device, job.precision, fused=fused, context=part, products=narrow)
        if op.kind in ("gemm", "attention"):
            f, g = f / clock, g / clock
        forward, backward = forward + f, backward + g
        core += f if op.kind == "attention" else 0.0
        weights += g / 2 if op.kind == "gemm" else 0.0
        kernels, back_kernels = launches(op, fused)
        host, back_host = host + kernels * launch_s(device), back_host + back_kernels * launch_s(device)
    weight_part = weights / backward if backward else 0.0
    wait = back_wait = 0.0
    if device.kind == "gpu":
        wait, back_wait = max(0.0, host - forward), max(0.0, back_host - backward)
        forward, backward = forward + wait, backward + back_wait
    known = [m for m in device.block_times if m.block == block.kind.partition("#")[0]
             and m.precision == job.precision and not job.products and m.tensor == tensor and context == 1
             and not experts and m.seq_len in (seq_len, job.seq_len)]
    measured = [] if segments else [m for m in known if m.seq_len == seq_len]
    if known and not measured:  # samples shorter than the job's, or several in a row: as far off as whole ones
        at = max(1, round(micro_batch * seq_len / job.seq_len))
        seen, said = (block_cost(block, at, job.seq_len, tensor, d, job) for d in (device, device.replace(
            block_times=())))
        ratio = seen.forward_s / said.forward_s if said.forward_s else 1.0
        forward, core = ratio * forward, ratio * core
        backward *= seen.backward_s / said.backward_s if said.backward_s else 1.0
    if measured:
        core_part = core / forward if forward else 0.0
        forward, backward = _measured_s(measured, micro_batch)
        core, wait, back_wait = core_part * forward, 0.0, 0.0
    if block.idle_backward:
        return BlockCost(forward, 0.0, 0.0, 0.0, wait)
    trained = weight_part * backward * block.trained_part
    backward -= weight_part * backward - trained
    return BlockCost(forward, backward, {"none": 0.0, "selective": core, "full": forward}[recompute], trained, wait,
                     back_wait)


def _measured_s(times: list[BlockTime], micro_batch: int) -> tuple[float, float]:
    """Forward and backward seconds on the line through the two nearest measured micro-batches.

    One measurement alone, and anything below the smallest, is at least proportional to the micro-batch.
    """
    points = sorted(times, key=lambda m: m.micro_batch)
    for point in points:
        if point.micro_batch == micro_batch:
            return point.forward_s, point.backward_s
    low = points[0]
    scale = micro_batch / low.micro_batch
    if len(points) == 1:
        return low.forward_s * scale, low.backward_s * scale
    above = next((i for i, p in enumerate(points) if p.micro_batch > micro_batch), len(points) - 1)
    a, b = points[max(above, 1) - 1], points[max(above, 1)]
    part = (micro_batch - a.micro_batch) / (b.micro_batch - a.micro_batch)
    forward = a.forward_s + part * (b.forward_s - a.forward_s)
    backward = a.backward_s + part * (b.backward_s - a.backward_s)
    if micro_batch < low.micro_batch:
        return max(forward, low.forward_s * scale), max(backward, low.backward_s * scale)
    return max(forward, a.forward_s), max(backward, a.backward_s)


def accumulate_s(block: Block, tensor: int, device: Device, job: Job, experts: ExpertShare | None = None) -> float:
    """Seconds to add the gradients of one micro-batch to those that a rank keeps: read, read and written.

    Zero where measured block times of the device have it in their backward.
    """
    if device.block_times:
        return 0.0
    elements = sum(p.count / (experts.parts if experts and p.role == "expert" else tensor if p.split is not None else 1)
                   for p in block.params if not p.tied and p.trainable)
    nbytes = elements * (job.bytes.compute_bytes + 2 * job.bytes.gradient_bytes)
    return nbytes / device.memory_Bps / efficiency(device, "elementwise") / device.share


def host_copy_s(nbytes: int, device: Device) -> float:
    """Seconds of a copy between a device and pinned memory of its host, with the link to itself.

    Over PCIe at the part of its rate that transfers reach; a CPU reads and writes its own memory.
    """
    if not nbytes:
        return 0.0
    if device.kind == "cpu":
        return 2 * nbytes / device.memory_Bps / efficiency(device, "elementwise") / device.share
    return SEND_S["gpu"] + nbytes / device.pcie_Bps / dict(LINK_EFFICIENCY)["pcie"]


def copy_s(elements: int, device: Device, job: Job) -> float:
    """Seconds to copy weights inside the memory: read once, written once."""
    return 2 * elements * job.bytes.weight_bytes / device.memory_Bps / efficiency(device, "elementwise") / device.share


def anticipate_s(elements: int, device: Device, job: Job) -> float:
    """Seconds to predict weights from the optimizer's state: value and moments read, weights written."""
    state = 8 if job.precision == "fp64" else 4
    nbytes = (1 + max(1, job.optimizer.moments)) * state + job.bytes.weight_bytes
    return elements * nbytes / device.memory_Bps / efficiency(device, "optimizer") / device.share


def host_step_s(elements: int, device: Device, job: Job, sharing: int, host_Bps: float) -> float:
    """Seconds of an optimizer step over `elements` parameters in the memory of the device's host, which makes the steps
    of `sharing` devices at once; `host_Bps` is what it can move, 0 if that is not known. A CPU is its own host."""
    if device.kind == "cpu":
        return optimizer_s(elements, device, job)
    rate = min(host_Bps or HOST_STEP_BPS, HOST_STEP_BPS)
    return elements * _step_bytes(job, "fused") * max(1, sharing) / rate


def _step_bytes(job: Job, implementation: OptimizerLoop) -> int:
    """Bytes that an optimizer step reads and writes per parameter."""
    passes = OPTIMIZER_PASSES[job.optimizer.name][implementation][0]
    if job.optimizer.name == "sgd" and job.optimizer.moments:
        passes += 2 if implementation == "fused" else 5
    sizes = job.bytes
    return passes * (8 if job.precision == "fp64" else 4) + sizes.gradient_bytes + (
        sizes.weight_bytes if sizes.master_bytes else 0)


def optimizer_s(elements: int, device: Device, job: Job, *, implementation: OptimizerLoop = "chunked") -> float:
    """Seconds of an optimizer step over `elements` parameters owned by this device; bound by memory bandwidth.

    `chunked` is the loop of the runtime; on a CPU its chunks stay in cache, so memory sees what a fused one would.
    """
    if not elements:
        return 0.0
    if implementation == "chunked" and device.kind == "cpu":
        implementation = "fused"
    kernels = OPTIMIZER_PASSES[job.optimizer.name][implementation][1]
    nbytes = _step_bytes(job, implementation)
    return (elements * nbytes / device.memory_Bps / efficiency(device, "optimizer")
            + kernels * _gap_s(device)) / device.share
