"""What a kernel asks of each pipeline of a device: in total, and of the busiest SM. Analytical, without measurements.

Six pipelines: tensor units, vector units, special-function units (exponentials), DRAM, L2 and shared memory. A kernel
is cut into equal tasks (thread blocks); waves of them fill the SMs, so the busiest SM has `ceil(tasks / SMs)` of
them. Tiles follow one rule: of a few common shapes, the one whose busiest SM needs the least time to multiply and to
fetch its operands. The split into totals and the busiest SM follows PipeWeave (Zhang et al., 2026); the counts are
our own.

All functions are vectorized: arguments are arrays (or scalars) that broadcast to one row per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.cluster import Device
from mixfleet.errors import InputError, unknown

Array = NDArray[np.float64]
PIPES = ("tensor", "vector", "special", "dram", "l2", "shared")
TENSOR, VECTOR, SPECIAL, DRAM, L2, SHARED = range(6)

LANES = {"Kepler": 192, "Maxwell": 128, "Pascal GP100": 64, "Pascal": 128, "Volta": 64, "Turing": 64,
         "Ampere GA100": 64, "Ampere": 128, "Ada": 128, "Hopper": 128, "Blackwell": 128, "Vega10": 64,
         "CDNA3": 128, "CDNA4": 128, "CDNA": 64, "Xe2": 128}
"""fp32 lanes per SM (CU, Xe core) by the start of `Device.arch`: NVIDIA, AMD and Intel architecture papers."""
DEFAULT_LANES = 128
LANES_PER_SPECIAL = 8
"""16 special-function results per clock and SM of 128 lanes (CUDA programming guide, arithmetic throughput)."""
SHARED_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 64
"""Per SM: shared memory serves 32 banks of 4 bytes; L2 64 bytes (the A100 architecture paper: 5120 for 80 slices)."""


class Type(NamedTuple):
    """An arithmetic type of the data: the rate it runs at, and bytes per element of activations, weights, results."""

    rate: str
    activation: float
    weight: float
    result: float
    quantizes: bool
    """Whether the operator turns 16-bit activations into this type first."""


TYPES: dict[str, Type] = {
    "fp64": Type("fp64", 8, 8, 8, False), "fp32": Type("fp32", 4, 4, 4, False), "tf32": Type("tf32", 4, 4, 4, False),
    "fp16": Type("fp16", 2, 2, 2, False), "bf16": Type("bf16", 2, 2, 2, False),
    "fp16_mixed": Type("fp16", 2, 2, 4, False),
    "fp8": Type("fp8", 1, 1, 2, True), "fp8_block": Type("fp8", 1, 1, 2, True),
    "fp8_static": Type("fp8", 1, 1, 2, True),
    "int8": Type("int8", 1, 1, 4, False), "sq": Type("int8", 1, 1, 2, True),
    "int8_wo": Type("fp16", 2, 1, 2, False), "int4_wo": Type("fp16", 2, 0.5, 2, False),
    "nvfp4": Type("fp4", 0.5625, 0.5625, 2, True), "mxfp4": Type("fp4", 0.53125, 0.53125, 2, True),
    "w4a16_mxfp4": Type("bf16", 2, 0.53125, 2, False), "a16w4_mxfp4": Type("bf16", 2, 0.53125, 2, False),
    "w4a8_mxfp4_mxfp8": Type("fp8", 1.03125, 0.53125, 2, True), "a8w4_mxfp4": Type("fp8", 1, 0.53125, 2, True),
    "a4w4_mxfp4": Type("fp4", 0.53125, 0.53125, 2, True), "w4afp8": Type("fp8", 1, 0.5, 2, True),
}
"""Block formats carry their scales: 8 bits for 16 (nvfp4) or 32 elements (mxfp4, mxfp8)."""
EMULATED = {"fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"), "fp8": ("fp8", "bf16", "fp16", "fp32"),
            "int8": ("int8", "fp16", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32"),
            "tf32": ("tf32", "fp32")}
"""What a device without units for a type computes it in, if asked to emulate: operands are widened on the way."""


def type_named(dtype: str) -> Type:
    """InputError names the known types and the nearest one."""
    if dtype not in TYPES:
        raise unknown("data type", dtype, TYPES)
    return TYPES[dtype]


def rate(device: Device, dtype: str, *, emulate: bool = False) -> float:
    """FLOP/s of the fastest units for `dtype`. InputError if the device has none, unless it may emulate."""
    wanted = type_named(dtype).rate
    for candidate in EMULATED.get(wanted, (wanted,)) if emulate else (wanted,):
        if candidate in device.flops:
            return device.flops[candidate]
    raise InputError(f"{device.name} has no {wanted} units for {dtype!r}; it has {', '.join(sorted(device.flops))}. "
                     "emulate=True computes it in the next wider type that it has")


class Machine(NamedTuple):
    """Rates of one device per row: work per second of the whole device for each of `PIPES`, and what else counts."""

    rates: Array
    """[rows, 6], FLOP/s, results/s and bytes/s."""
    sms: Array
    clock_Hz: Array
    cache_bytes: Array

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Machine:
        return Machine(self.rates[rows], self.sms[rows], self.clock_Hz[rows], self.cache_bytes[rows])

    def scaled(self, chip: Array | float, dram: Array | float) -> Machine:
        """With effective rates: everything on the chip times `chip`, DRAM times `dram`."""
        factor = np.repeat(np.reshape(np.asarray(chip, float), (-1, 1)), len(PIPES), axis=1)
        factor[:, DRAM] = dram
        return self._replace(rates=self.rates * factor, clock_Hz=self.clock_Hz * np.ravel(chip))


def lanes(device: Device) -> int:
    """fp32 lanes per SM."""
    return next((n for start, n in LANES.items() if device.arch.startswith(start)), DEFAULT_LANES)


def sms(device: Device) -> int:
    """SMs; where the description gives none, what its vector rate needs at 1.5 GHz."""
    return device.sm_count or max(1, round(device.vector_flops / (2 * lanes(device) * 1.5e9)))


def machine(devices: Sequence[Device], rates: Sequence[float], which: NDArray[np.intp]) -> Machine:
    """Rows `which` of a table of devices; `rates` are their tensor rates. The clock is what the vector rate implies."""
    table = []
    for device, tensor in zip(devices, rates):
        count = sms(device)
        clock = device.vector_flops / (2 * lanes(device) * count)
        table.append((tensor, device.vector_flops, device.vector_flops / 2 / LANES_PER_SPECIAL, device.memory_Bps,
                      clock * count * L2_BYTES_PER_CLOCK, clock * count * SHARED_BYTES_PER_CLOCK,
                      count, clock, device.cache_bytes or 0.006 * device.memory_Bps / 1e6 * 1e3))
    rows = np.array(table, float).reshape(-1, 9)[which]
    return Machine(rows[:, :6], rows[:, 6], rows[:, 7], rows[:, 8])


class Demand(NamedTuple):
    """Work of kernels by pipeline, one row each."""

    total: Array
    """[rows, 6]: FLOP (tensor, vector), results (special), bytes (DRAM, L2, shared)."""
    busiest: Array
    """[rows, 6]: the same on the SM that has most of it."""
    tasks: Array
    waves: Array
    chain: Array
    """Steps of the longest loop whose iterations wait for one another."""
    more: dict[str, Array]
    """What else the learned layer looks at; but for paddings, never falls when the kernel gets more work; 0 where it
    does not apply."""

    def total_s(self, m: Machine) -> Array:
        """[rows, 6]: seconds of each pipeline if every SM is equally loaded."""
        return np.asarray(self.total / m.rates)

    def busiest_s(self, m: Machine) -> Array:
        """[rows, 6]: seconds of the busiest SM with its own part of each pipeline."""
        return np.asarray(self.busiest / (m.rates / m.sms[:, None]))

    def ceiling_s(self, m: Machine) -> Array:
        """[rows]: no kernel that does this work is faster: the slowest pipeline with every SM equally loaded."""
        return np.asarray(self.total_s(m).max(axis=1))

    def binds(self, m: Machine) -> NDArray[np.intp]:
        """[rows]: which of `PIPES` sets the ceiling."""
        return np.asarray(self.total_s(m).argmax(axis=1))


def _rows(*columns: Any) -> list[Array]:
    return [np.asarray(c, float) for c in np.broadcast_arrays(*(np.atleast_1d(np.asarray(c, float)) for c in columns))]


def _stack(**pipes: Array) -> Array:
    size = len(next(iter(pipes.values())))
    out = np.zeros((size, len(PIPES)))
    for name, values in pipes.items():
        out[:, PIPES.index(name)] = values
    return out


def _positive(**columns: Array) -> None:
    for name, values in columns.items():
        bad = np.flatnonzero(~(values > 0))
        if bad.size:
            raise InputError(f"{name} is {values[bad[0]]:g} in row {bad[0]}; sizes must be positive")


TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (16, 64), (16, 32))
"""Rows and columns of results per thread block of common GEMM libraries."""
STEP = 64
"""Elements of the inner dimension per step of a block's loop."""
FIXED_TILES = ((256, 128), (128, 128), (64, 64))
"""Tiles whose busy time the learned layer sees whichever tile is chosen."""
GROUPS_OF_SPLIT = 4
"""Least steps of a slice: shorter ones cost more to add up than they save."""


def _product(m: Machine, tiles_of: Mapping[tuple[int, int], Array], k: Array, activation: Array,
             weight: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Of a matrix product cut into `tiles_of[tile]` blocks: the busiest SM's blocks, its tile's rows and columns, the
    inner length per block, slices, and the criterion's seconds, by the tile that is best by that criterion."""
    best = np.full(len(k), np.inf)
    chosen = [np.zeros(len(k)) for _ in range(5)]
    for (tm, tn), tiles in tiles_of.items():
        slices = np.clip(np.floor(m.sms / tiles), 1, np.maximum(1, np.floor(k / (STEP * GROUPS_OF_SPLIT))))
        inner = np.ceil(k / slices / STEP) * STEP
        waves = np.ceil(tiles * slices / m.sms)
        multiply = waves * 2 * tm * tn * inner / (m.rates[:, TENSOR] / m.sms)
        fetch = waves * (tm * activation + tn * weight) * inner / (m.rates[:, L2] / m.sms)
        seconds = multiply + fetch
        better = seconds < best
        best = np.where(better, seconds, best)
        for kept, value in zip(chosen, (waves, np.full(len(k), tm), np.full(len(k), tn), inner, slices)):
            kept[better] = value[better]
    waves, tm_, tn_, inner, slices = chosen
    return waves, tm_, tn_, inner, slices, best


def gemm(mach: Machine, m: Any, n: Any, k: Any, batch: Any = 1, *, activation: Any = 2, weight: Any = 2,
         result: Any = 2, quantizes: Any = False) -> Demand:
    """`batch` products C[m,n] = A[m,k] B[k,n]; bytes per element of A, B and C. `quantizes`: A is read in 16 bits
    first."""
    m, n, k, batch, activation, weight, result, quantizes = _rows(
        m, n, k, batch, activation, weight, result, quantizes)
    _positive(m=m, n=n, k=k, batch=batch)
    tiles = {t: batch * np.ceil(m / t[0]) * np.ceil(n / t[1]) for t in TILES}
    waves, tm, tn, inner, slices, tiled_s = _product(mach, tiles, k, activation, weight)
    blocks = batch * np.ceil(m / tm) * np.ceil(n / tn)
    tasks = blocks * slices
    fetched = (tm * activation + tn * weight) * inner
    convert = quantizes * batch * m * k * (2 + activation)
    compulsory = batch * (m * k * activation + k * n * weight + m * n * result)
    total = _stack(tensor=2 * batch * m * n * k, dram=compulsory + convert, l2=tasks * fetched + batch * m * n * result,
                   shared=tasks * fetched, vector=batch * m * n * slices)
    each = _stack(tensor=2 * tm * tn * inner, dram=total[:, DRAM] / tasks, l2=fetched + tm * tn * result,
                  shared=fetched, vector=tm * tn)
    more = {"tiled_s": tiled_s, "weight_s": batch * n * k * weight / mach.rates[:, DRAM],
            "input_s": batch * m * k * activation / mach.rates[:, DRAM],
            "output_s": batch * m * n * result / mach.rates[:, DRAM], "convert_s": convert / mach.rates[:, DRAM],
            "in_cache": compulsory / mach.cache_bytes,
            "misaligned": (((n % 8) > 0) | ((k % 8) > 0)).astype(float)}
    for t in FIXED_TILES:
        more[f"tile{t[0]}x{t[1]}_s"] = np.ceil(tiles[t] / mach.sms) * 2 * t[0] * t[1] * k / (
            mach.rates[:, TENSOR] / mach.sms)
    return Demand(np.maximum(total, 0), each * waves[:, None], tasks, waves, np.ceil(k / STEP), more)


def visible_pairs(q: Any, kv: Any, causal: Any, window: Any) -> Array:
    """Query-key pairs of one head: the last of `q` queries sees all `kv` keys, each at most `window` (0: all)."""
    q, kv, causal, window = _rows(q, kv, causal, window)
    limit = np.where(window > 0, np.minimum(window, kv), kv)
    before = np.maximum(kv - q, 0)
    whole = np.clip(limit - before, 0, q)
    return np.asarray(np.where(causal > 0, whole * before + whole * (whole + 1) / 2 + (q - whole) * limit, q * limit))


def attention(mach: Machine, batch: Any, q_len: Any, kv_len: Any, heads: Any, kv_heads: Any, head_dim: Any, *,
              causal: Any = True, window: Any = 0, n_decode: Any = 0, kv_decode: Any = 0, latent: Any = False,
              element: Any = 2, kv_element: Any = 2) -> Demand:
    """Fused attention: `batch` sequences of q_len new tokens against kv_len in all, heads per device.

    `n_decode` single-token decodes over `kv_decode` cached tokens run in the same kernel. `latent`: MLA over the
    compressed cache (576 = 512 + 64 per token, Liu et al., 2024) for one new token, over expanded 192/128-wide heads
    for more.
    """
    batch, q_len, kv_len, heads, kv_heads, head_dim, causal, window, n_decode, kv_decode, latent, element, \
        kv_element = _rows(batch, q_len, kv_len, heads, kv_heads, head_dim, causal, window, n_decode, kv_decode, latent,
                           element, kv_element)
    _positive(batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    absorbed = (latent > 0) & (q_len == 1)
    qk = np.where(latent > 0, np.where(absorbed, 576, 192), head_dim)
    pv = np.where(latent > 0, np.where(absorbed, 512, 128), head_dim)
    stored = np.where(absorbed, 576, np.where(latent > 0, heads * 320, kv_heads * 2 * head_dim))
    keepers = np.where(absorbed, 1, np.where(latent > 0, heads, kv_heads))
    group = heads / keepers
    span = np.where(window > 0, np.minimum(window + q_len, kv_len), kv_len)
    pairs = batch * visible_pairs(q_len, kv_len, causal, window) + n_decode * kv_decode
    scores = heads * pairs
    kv_bytes = (batch * span + n_decode * kv_decode) * stored * kv_element
    io_bytes = (batch * q_len + n_decode) * heads * (qk + pv) * element
    packed = q_len * np.where(q_len == 1, group, 1)
    tile = np.where(packed > 64, 128, np.where(packed > 16, 64, 16))
    rows = np.where(q_len == 1, keepers * np.ceil(group / tile), heads * np.ceil(q_len / tile))
    units = batch * rows + n_decode * keepers
    steps = np.ceil(np.where(q_len == 1, span, np.minimum(span, kv_len)) / STEP)
    slices = np.clip(np.floor(mach.sms * 2 / units), 1, np.maximum(1, np.floor(steps / 4)))
    tasks = units * slices
    waves = np.ceil(tasks / mach.sms)
    padded = np.where(q_len == 1, tile * np.ceil(group / tile) * keepers, np.ceil(q_len / tile) * tile * heads)
    padding = padded / np.where(q_len == 1, heads, q_len * heads)
    total = _stack(tensor=2 * scores * (qk + pv), vector=6 * scores, special=scores, dram=kv_bytes + io_bytes,
                   l2=rows / keepers * kv_bytes / np.maximum(1, np.where(q_len == 1, 1, group)) + io_bytes,
                   shared=scores / tile * (qk + pv) * kv_element * padding)
    longest = np.minimum(steps, np.ceil(steps / slices)) * STEP
    each = np.maximum(total / tasks[:, None], 0)
    last = _stack(tensor=2 * tile * longest * (qk + pv), vector=6 * tile * longest, special=tile * longest,
                  dram=np.zeros(len(steps)), l2=longest * (qk + pv) * kv_element,
                  shared=longest * (qk + pv) * kv_element)
    busiest = np.maximum(each * waves[:, None], np.minimum(last, total))
    more = {"kv_s": kv_bytes / mach.rates[:, DRAM], "io_s": io_bytes / mach.rates[:, DRAM],
            "in_cache": kv_bytes / mach.cache_bytes, "units_per_sm": units / mach.sms,
            "padded_s": total[:, TENSOR] * padding / mach.rates[:, TENSOR],
            "longest_s": last[:, TENSOR] / (mach.rates[:, TENSOR] / mach.sms), "batch": batch}
    return Demand(total, busiest, tasks, waves, np.ceil(steps / slices), more)


SKEW = 0.17
"""Under a power law over experts the busiest of p devices holds about p**0.17 times its even share (2 at 64)."""


def moe(mach: Machine, tokens: Any, hidden: Any, inter: Any, topk: Any, experts: Any, *, gated: Any = True, tp: Any = 1,
        ep: Any = 1, skewed: Any = False, first_only: Any = False, activation: Any = 2, weight: Any = 2,
        quantizes: Any = False) -> Demand:
    """The experts of one layer on the busiest device: `experts / ep` of them, of width `inter / tp`, routing given.

    `skewed`: tokens spread by a power law instead of evenly. `first_only`: only the product into the experts' width.
    """
    tokens, hidden, inter, topk, experts, gated, tp, ep, skewed, first_only, activation, weight, quantizes = _rows(
        tokens, hidden, inter, topk, experts, gated, tp, ep, skewed, first_only, activation, weight, quantizes)
    _positive(tokens=tokens, hidden=hidden, inter=inter, topk=topk, experts=experts, tp=tp, ep=ep)
    local, width = np.maximum(1, np.floor(experts / ep)), np.maximum(1, inter / tp)
    pairs = np.maximum(1, tokens * topk / ep * np.where(skewed > 0, 1.1 * ep ** SKEW, 1))
    active = np.where(skewed > 0, local * -np.expm1(-pairs / local), np.minimum(local, pairs))
    active = np.clip(active, 1, local)
    wide = np.where(gated > 0, 2, 1) * width
    second = 1 - (first_only > 0)
    per_expert = pairs / active
    blocks_of = {t: active * np.ceil(per_expert / t[0]) for t in TILES}
    into = _product(mach, {t: blocks_of[t] * np.ceil(wide / t[1]) for t in TILES}, hidden, activation, weight)
    out = _product(mach, {t: blocks_of[t] * np.ceil(hidden / t[1]) for t in TILES}, width, activation, weight)
    rows_in, rows_out = (active * np.ceil(per_expert / x[1]) for x in (into, out))
    tasks_in = rows_in * np.ceil(wide / into[2]) * into[4]
    tasks_out = rows_out * np.ceil(hidden / out[2]) * out[4] * second
    weights = active * hidden * (wide + second * width) * weight
    acts = pairs * (hidden * (activation + quantizes * 2) + wide * 2 + second * (width * (2 + activation) + hidden * 2))
    fetched = [(x[1] * activation + x[2] * weight) * x[3] for x in (into, out)]
    total = _stack(tensor=2 * pairs * hidden * (wide + second * width), dram=weights + acts,
                   l2=tasks_in * fetched[0] + tasks_out * fetched[1],
                   shared=tasks_in * fetched[0] + tasks_out * fetched[1],
                   vector=pairs * wide * 4, special=second * pairs * width)
    busiest = np.zeros_like(total)
    for x, bytes_each, there in zip((into, out), fetched, (np.ones(len(wide)), second)):
        busiest += _stack(tensor=there * x[0] * 2 * x[1] * x[2] * x[3], l2=there * x[0] * bytes_each,
                          shared=there * x[0] * bytes_each)
    waves = into[0] + second * out[0]
    busiest[:, [DRAM, VECTOR, SPECIAL]] = (total / np.minimum(tasks_in, mach.sms)[:, None])[:, [DRAM, VECTOR, SPECIAL]]
    more = {"tiled_s": into[5] + second * out[5], "weight_s": weights / mach.rates[:, DRAM],
            "acts_s": acts / mach.rates[:, DRAM],
            "in_cache": (weights + acts) / mach.cache_bytes, "pairs": pairs, "rows_per_expert": per_expert,
            "active": active, "local": local, "gathered": tokens, "skewed": skewed * ep}
    for t in FIXED_TILES:
        more[f"tile{t[0]}x{t[1]}_s"] = 2 * t[0] * t[1] / (mach.rates[:, TENSOR] / mach.sms) * (
            np.ceil(blocks_of[t] * np.ceil(wide / t[1]) / mach.sms) * hidden
            + second * np.ceil(blocks_of[t] * np.ceil(hidden / t[1]) / mach.sms) * width)
    return Demand(total, np.maximum(busiest, total / mach.sms[:, None]), tasks_in + tasks_out, waves,
                  np.ceil(hidden / STEP) + second * np.ceil(width / STEP), more)


def stream(mach: Machine, rows: Any, cols: Any, n_in: Any = 1, n_out: Any = 1, *, element: Any = 2, vector: Any = 1,
           special: Any = 0, reduces: Any = False, table: Any = 0) -> Demand:
    """Kernels that touch each element of `rows` x `cols` once: elementwise, norms, softmax, look-ups, copies.

    `vector`, `special`: operations per element. `reduces`: along `cols`, so one task per row; else per 1024 elements.
    """
    rows, cols, n_in, n_out, element, vector, special, reduces, table = _rows(
        rows, cols, n_in, n_out, element, vector, special, reduces, table)
    _positive(rows=rows, cols=cols)
    elements = rows * cols
    nbytes = elements * (n_in + n_out) * element
    tasks = np.where(reduces > 0, rows, np.ceil(elements / 1024))
    waves = np.ceil(tasks / mach.sms)
    total = _stack(vector=vector * elements, special=special * elements, dram=nbytes, l2=nbytes,
                   shared=reduces * elements * 4)
    more = {"in_cache": nbytes / mach.cache_bytes, "rows": rows, "cols": cols, "read_s": elements * n_in * element /
            mach.rates[:, DRAM], "row_s": cols * element * (n_in + n_out) / mach.rates[:, DRAM], "table": table}
    return Demand(total, total / tasks[:, None] * waves[:, None], tasks, waves,
                  np.where(reduces > 0, np.ceil(cols / 1024), 1), more)


PADDED = {"channels": (4, 8, 32), "filters": (16, 32, 64, 128), "width": (2, 4), "pixels": (32, 64, 128),
          "patches": (32,)}
"""Edges of the tiles that cuDNN's algorithms cut a convolution into. How much of the tiles is padding decides between
them, whatever the device: without it, errors of one shape on four GPUs went together (correlation 0.5 to 0.7)."""

GROUPED = ((1, 4, 8), (2, 4, 4), (2, 2, 8), (4, 2, 4), (4, 1, 8), (4, 4, 2))
"""Images, rows and columns of the 32 patches of 2x2 results that a block of cuDNN's fused Winograd kernels takes, for
32 filters (`tile148`, ... in their names; the grids of NeuSight's profiles are these)."""
FFT = (16, 32)
"""Edges of the tiles that cuDNN transforms by FFT."""


def _winograd(mach: Machine, n: Array, image: Array, ho: Array, wo: Array, c_in: Array, c_out: Array, groups: Array,
              element: Array) -> dict[str, Array]:
    """Seconds of cuDNN's Winograd kernels of 3x3 convolutions with stride 1, and the padding of the first ones' blocks.

    `fused`: patches of 2x2 in one kernel, by what the busiest SM multiplies; `apart`: patches of 4x4, as 36 products
    between kernels that write transformed filters, images and results to DRAM and read them again.
    """
    per_sm, dram = mach.rates[:, TENSOR] / mach.sms, mach.rates[:, DRAM]
    high, wide = np.ceil(ho / 2), np.ceil(wo / 2)
    blocks = [np.ceil(n / i) * np.ceil(high / y) * np.ceil(wide / x) for i, y, x in GROUPED]
    found = {}
    for name, count in (("first", blocks[0]), ("best", np.minimum.reduce(blocks))):
        tasks = count * groups * np.ceil(c_out / groups / 32)
        found[f"fused_{name}_s"] = np.ceil(tasks / mach.sms) * 2 * 16 * 32 * 32 * c_in / groups / per_sm
        found[f"padded.fused_{name}"] = count * 32 / (n * high * wide) - 1
    patches = n * np.ceil(ho / 4) * np.ceil(wo / 4)
    tiles = {t: 36 * groups * np.ceil(patches / t[0]) * np.ceil(c_out / groups / t[1]) for t in TILES}
    apart = {"product_s": _product(mach, tiles, c_in / groups, element, element)[5],
             "filter_s": element * c_in * c_out / groups * (9 + 2 * 36) / dram,
             "image_s": element * c_in * (image + 2 * 36 * patches) / dram,
             "output_s": element * c_out * (n * ho * wo + 2 * 36 * patches) / dram}
    return {**found, **{f"apart_{name}": seconds for name, seconds in apart.items()},
            "apart_s": np.sum(list(apart.values()), axis=0)}


def conv(mach: Machine, n: Any, c_in: Any, h: Any, w: Any, c_out: Any, r: Any, s: Any, *, stride: Any = 1,
         stride_w: Any = 1, pad: Any = 0, pad_w: Any = 0, dil: Any = 1, dil_w: Any = 1, groups: Any = 1,
         element: Any = 4, backward: Any = 0) -> Demand:
    """2-D convolution as an implicit matrix product. `backward`: 0 forward, 1 to the input, 2 to the filter."""
    n, c_in, h, w, c_out, r, s, stride, stride_w, pad, pad_w, dil, dil_w, groups, element, backward = _rows(
        n, c_in, h, w, c_out, r, s, stride, stride_w, pad, pad_w, dil, dil_w, groups, element, backward)
    _positive(n=n, c_in=c_in, h=h, w=w, c_out=c_out, r=r, s=s, stride=stride, groups=groups)
    ho = np.floor((h + 2 * pad - dil * (r - 1) - 1) / stride) + 1
    wo = np.floor((w + 2 * pad_w - dil_w * (s - 1) - 1) / stride_w) + 1
    _positive(output_height=ho, output_width=wo)
    pixels, inputs, window = n * ho * wo, n * h * w, r * s
    per_in, per_out = c_in / groups, c_out / groups
    shape = [(pixels, per_out, per_in * window), (inputs, per_in, per_out * window), (per_out, per_in * window, pixels)]
    gm, gn, gk = (np.select([backward == 0, backward == 1], [shape[0][i], shape[1][i]], shape[2][i]) for i in range(3))
    d = gemm(mach, gm, gn, np.maximum(gk, 1), groups, activation=element, weight=element, result=element)
    total = d.total.copy()
    total[:, TENSOR] = 2 * pixels * c_out * per_in * window
    total[:, DRAM] = element * (inputs * c_in + pixels * c_out + c_out * per_in * window)
    patches = n * np.ceil(ho / 2) * np.ceil(wo / 2)
    fits = (r == 3) & (s == 3) & (stride == 1) & (stride_w == 1) & (dil == 1) & (dil_w == 1)
    winograd = _product(mach, {t: 16 * groups * np.ceil(patches / t[0]) * np.ceil(per_out / t[1]) for t in TILES},
                        per_in, element, element)[5] + 16 * patches * (c_in + c_out) * element / mach.rates[:, L2]
    more = {key: value for key, value in d.more.items() if key.startswith("tile") or key == "misaligned"}
    for name, size in (("channels", per_in), ("filters", per_out), ("width", wo), ("pixels", pixels),
                       ("patches", patches)):
        for edge in PADDED[name]:
            more[f"padded.{name}{edge}"] = np.ceil(size / edge) * edge / size - 1
    kernels = _winograd(mach, n, inputs, ho, wo, c_in, c_out, groups, element)
    more |= {name: np.where(fits, values, 0) for name, values in kernels.items()}
    for edge in FFT:
        able = (stride == 1) & (stride_w == 1) & (dil == 1) & (dil_w == 1) & (r > 1) & (np.maximum(r, s) < edge)
        tiles = n * np.ceil(ho / np.maximum(edge - r + 1, 1)) * np.ceil(wo / np.maximum(edge - s + 1, 1))
        points = edge * (edge / 2 + 1)  # complex: 8 FLOP per product and sum, twice the bytes, written and read
        multiply = 8 * points * tiles * per_in * c_out / mach.rates[:, TENSOR]
        moved = 4 * element * points * (tiles * (c_in + c_out) + per_in * c_out) / mach.rates[:, DRAM]
        more |= {f"fft{edge}_s": np.where(able, multiply + moved, 0),
                 f"fft{edge}_product_s": np.where(able, multiply, 0)}
    faster = np.minimum(winograd, kernels["apart_s"])
    more["tiled_s"] = np.where(fits, np.minimum(d.more["tiled_s"], faster), d.more["tiled_s"])
    more |= {"direct_s": d.more["tiled_s"], "winograd_s": np.where(fits, winograd, 0),
             "lowered_s": element * pixels * c_in * window / mach.rates[:, DRAM],
             "in_cache": total[:, DRAM] / mach.cache_bytes, "filter_s": element * c_out * per_in * window /
             mach.rates[:, DRAM], "image_s": element * inputs * c_in / mach.rates[:, DRAM], "window": window,
             "output_s": element * pixels * c_out / mach.rates[:, DRAM], "channels": c_in, "filters": c_out,
             "per_group": per_in, "stride": stride, "pixels": pixels, "output_width": wo,
             "few_channels": (c_in < 16).astype(float)}
    return Demand(total, d.busiest, d.tasks, d.waves, d.chain, more)


