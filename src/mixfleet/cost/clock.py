"""Blocks at the clock that a GPU holds through whole training steps, not the one that its kernels were measured at."""

from __future__ import annotations

from functools import lru_cache

from mixfleet.catalog import efficiency
from mixfleet.cluster import Device
from mixfleet.cost.kernels import BlockCost, Recompute, block_cost, compute_dtype
from mixfleet.job import Job
from mixfleet.model.spec import Block, ExpertShare


def held_clock(device: Device, precision: str) -> float:
    """1 where power suffices for the tensor units at work, less where it does not; 1 for devices measured by the user.

    Dynamic power grows with frequency and the square of the voltage, so what a device lacks in watts costs it less in
    clock: `(watts per TFLOP/s / KNEE_W) ** THROTTLE`. TF32 keeps the same units as busy as 16 bits do. A device that
    says itself what it holds has that.
    """
    if device.clock is not None:
        return device.clock
    return _held_clock(device, precision, efficiency.THROTTLE)


@lru_cache(maxsize=4096)
def _held_clock(device: Device, precision: str, throttle: float) -> float:
    if device.kind != "gpu" or not device.power_w or device.block_times or device.efficiency:
        return 1.0
    dtype = compute_dtype(device, precision)
    busy = next((t for t in ("bf16", "fp16") if dtype == "tf32" and t in device.flops), dtype)
    watts = device.power_w / (device.flops[busy] / 1e12)
    return float(min(1.0, (watts / efficiency.KNEE_W) ** throttle))


def held_cost(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
              recompute: Recompute = "none", context: float = 1, experts: ExpertShare | None = None,
              segments: tuple[int, ...] = (), wholes: tuple[int, ...] = ()) -> BlockCost:
    """`block_cost` at the clock that the device holds."""
    return block_cost(block, micro_batch, seq_len, tensor, device, job, recompute, context,
                      held_clock(device, job.precision), experts, segments, wholes)
