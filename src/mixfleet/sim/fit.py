"""The largest micro-batch that fits one device, by recompute mode, and what fills the memory."""

from __future__ import annotations

from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Recompute, Stage
from mixfleet.sim.prediction import Prediction, predict
from mixfleet.spec import Spec
from mixfleet.units import show_bytes

MOST = 1 << 20
"""Sequences; models so small that more would fit are answered with this."""
_MODES: tuple[Recompute, ...] = ("none", "selective", "full")
_NOWHERE = Link(latency_s=0.0, bandwidth_Bps=1.0)
_FIXED = ("weights", "gradients", "master", "moments", "framework")
"""Parts of the breakdown that do not depend on the micro-batch."""


class Fit(Spec, frozen=True, kw_only=True):
    """What fits under one recompute mode. `why_not` is empty if micro-batch 1 does."""

    recompute: Recompute
    micro_batch: int
    tokens_per_s: float
    peak_bytes: int
    capacity_bytes: int
    breakdown: dict[str, int]
    """Bytes at the peak, by what holds them; for micro-batch 1 where none fits."""
    phase: str
    next_lacks_bytes: int
    """What the next larger micro-batch lacks."""
    why_not: str = ""


def fit(job: Job, device: Device) -> tuple[Fit, ...]:
    """The largest micro-batch of a job's model that trains on one device alone, per recompute mode.

    Steps of one micro-batch, state and optimizer included, fresh and resumed; the search takes O(log) predictions.
    """
    lone = Cluster(name=device.name, nodes=(Node(name="one", devices=(device,), link=_NOWHERE, nic=_NOWHERE),))
    return tuple(_largest(job, lone, mode) for mode in _MODES)


def _predict(job: Job, cluster: Cluster, mode: Recompute, micro_batch: int) -> Prediction:
    stage = Stage(blocks=(0, len(job.model.blocks)), devices=(0,), recompute=mode)
    plan = Plan(pipelines=(Pipeline(stages=(stage,), samples=micro_batch, micro_batch=micro_batch),))
    return predict(plan, job.replace(global_batch=micro_batch), cluster, sent=False)


def _largest(job: Job, cluster: Cluster, mode: Recompute) -> Fit:
    low, high = 0, 1
    found = over = _predict(job, cluster, mode, 1)
    while over.fits and high < MOST:
        low, high, found = high, high * 2, over
        over = _predict(job, cluster, mode, high)
    while high - low > 1 and not over.fits:
        middle = (low + high) // 2
        one = _predict(job, cluster, mode, middle)
        low, high, found, over = (middle, high, one, over) if one.fits else (low, middle, found, one)
    if over.fits:
        low, found = high, over
    (use,), (next_use,) = found.devices, over.devices
    return Fit(recompute=mode, micro_batch=low, tokens_per_s=found.tokens_per_s if low else 0.0,
               peak_bytes=use.peak_bytes, capacity_bytes=use.capacity_bytes, breakdown=use.breakdown, phase=use.phase,
               next_lacks_bytes=next_use.lacks_bytes, why_not="" if low else _reason(found))


def _reason(one: Prediction) -> str:
    (use,) = one.devices
    state = sum(use.breakdown.get(name, 0) for name in _FIXED)
    if state > use.capacity_bytes:
        return (f"its state alone takes {show_bytes(state)} of {show_bytes(use.capacity_bytes)}; shard it over several "
                "devices, or take an optimizer or a precision with less state")
    return (f"micro-batch 1 lacks {show_bytes(use.lacks_bytes)} in {use.phase}; take a shorter sequence, or "
            "several devices")
