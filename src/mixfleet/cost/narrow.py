"""Products of layers in a narrower type than the job's: what runs in it, what narrowing costs, what is kept.

As in Transformer Engine, a product reads both operands in the narrow type and adds up and writes in 16 bits; norms,
attention, embedding, head, routers and the optimizer stay in the job's precision, weights too (their narrow copies are
made once a step, which is not counted). Each operand is narrowed once, along its rows for the product that it is made
for and along its columns for the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from mixfleet.cluster import Device
from mixfleet.cost import query
from mixfleet.cost.demand import type_named
from mixfleet.job import PRODUCTS, Job, Products
from mixfleet.model.parts import elementwise
from mixfleet.model.spec import Block, Op, Saved, T

_BY_A_NORM = ("attention.q", "attention.k", "attention.v", "attention.q_down", "mlp.gate", "mlp.up")
"""Products whose input a norm makes, and"""
_BY_AN_ACTIVATION = ("mlp.down",)
"""one whose input an activation makes; the gradients of those below it are made by the activation's backward."""
_KEPT = ("attention.input", "attention.out", "mlp.input", "mlp.inner_out", "mlp.expert_in", "mlp.experts.inner_out")
"""Inputs of products, of which backward needs the narrow copy only. Attention's output is kept in 16 bits too where it
is fused: its backward reads it."""


def is_narrow(op: Op, block: Block) -> bool:
    """Whether an operator of a block is a product in the narrow type: one with a weight of the layer."""
    role = block.kind.partition("@")[0]
    return (op.kind == "gemm" and role.startswith("layer") and "router" not in op.name and ".lora_" not in op.name
            and any(p.name == f"{op.name}.weight" for p in block.params))


def operators(block: Block, job: Job) -> Iterator[tuple[Op, Products | None]]:
    """Operators of a block with the type of those that are narrow, and the casts that these need as elementwise ones.

    Products of one input, which follow each other, share its cast.
    """
    recipe = PRODUCTS[job.products] if job.products else None
    before: Op | None = None
    for op in block.ops:
        if recipe is None or not is_narrow(op, block):
            before = None
            yield op, None
            continue
        weight = next(p for p in block.params if p.name == f"{op.name}.weight")
        rows, inner, outer = op.shape["batch"] * op.shape["m"], op.shape["k"], op.shape["n"]
        shared = before is not None and (before.shape["m"], before.shape["k"]) == (op.shape["m"], inner)
        fused = op.name in _BY_A_NORM + _BY_AN_ACTIVATION
        forward = 0.0 if shared else recipe.fused if fused else recipe.apart
        backward = recipe.fused if op.name in ("mlp.gate", "mlp.up") else recipe.apart
        if not weight.trainable:  # nothing along the columns
            forward, backward = max(0.0, forward - recipe.column), max(0.0, backward - recipe.column)
        # Across a tensor group a shard is narrowed before it is gathered.
        read = rows * inner / (T if weight.split == 0 and not op.routed else 1)
        written = rows * outer / (T if weight.split == 1 and not op.routed else 1)
        (cast,) = elementwise(f"{op.name}.narrowed", rows, inner, (1, 1)).ops
        if forward or backward:
            yield cast.replace(traffic=forward * read, backward_traffic=backward * written, routed=op.routed), None
        before = op
        yield op, recipe


def kept_bytes(tensor: Saved, job: Job) -> float:
    """Bytes per element of a tensor that backward needs."""
    if job.products and tensor.bytes_per_element is None and tensor.name in _KEPT:
        narrow = PRODUCTS[job.products].element_bytes
        return narrow + job.bytes.compute_bytes if tensor.name == "attention.out" else narrow
    return tensor.element_bytes(job.bytes.compute_bytes)


LARGE = [(m, n, k) for m in (8192, 16384) for n in (16384, 28672, 57344) for k in (4096, 8192, 16384)]
"""Products so large that narrowing what they read is a small part of them."""


ALONE = {"nvfp4": 3.48}
"""How much faster products of a layer are whose operands were narrowed before: those of Transformer Engine on a B300
(its guide to profiling products: 13.10 and 3.76 ms; with casts, 2.69 ms more, twice what their bytes take)."""


@cache
def speedup(device: Device, measured: str) -> float:
    """How much faster large products are in a narrow type of the kernel model than in 16 bits, casts apart.

    Narrow products were measured inside inference engines, whose casts are in their times: one read and write. Casts to
    four bits take longer than their bytes do, so there the ratio is that of `ALONE`.
    """
    if measured in ALONE:
        rate = type_named(measured).rate
        return min(ALONE[measured], device.flops[rate] / device.flops[wide_type(device)])
    m, n, k = (np.array(sizes, float) for sizes in zip(*LARGE))
    wide, narrow = (query.gemm(m, n, k, device, dtype=dtype).time_s for dtype in (wide_type(device), measured))
    casts = m * k * (2 + type_named(measured).activation) / device.memory_Bps
    return max(1.0, float(np.exp(np.mean(np.log(wide / (narrow - casts))))))


def wide_type(device: Device) -> str:
    """The 16-bit type that stands for the narrow one."""
    return "bf16" if "bf16" in device.flops else "fp16"


def shortened(recipe: Products, device: Device) -> tuple[str, float]:
    """The 16-bit type as which a narrow product is answered, and how much shorter its inner dimension then is.

    Tensor units multiply the narrow type faster by about what its operands are smaller, so to every pipeline it is a
    16-bit product with a shorter inner dimension, by what large products are faster.
    """
    if recipe.rate not in device.flops:
        return wide_type(device), 1.0
    return wide_type(device), 1 / speedup(device, recipe.measured)
