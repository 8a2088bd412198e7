"""A better order for a plan as it is: the schedule search on its stages' own times, judged by the simulator."""

from __future__ import annotations

from mixfleet.cluster import Cluster
from mixfleet.cost.memory import allocator_factor
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.plan_rules import why_not
from mixfleet.schedule.greedy import Orders, show_steps
from mixfleet.schedule.properties import in_flight
from mixfleet.schedule.search import PLAYED, search
from mixfleet.sim import Prediction, predict
from mixfleet.sim.times import work_of

ATTEMPTS = 3
"""Simulations per kind of backward: limits that prove too high for the memory are lowered in between."""
WORTH = 1e-3
"""The share of a step that an order of the plan's own must save to be taken."""


def reschedule(plan: Plan, job: Job, cluster: Cluster, *, played: int = PLAYED) -> Plan:
    """The plan with the schedule `custom` and orders of its own, or the plan itself if that saves nothing worth it.

    A plan that does not fit may become one that does. Pipelines of one stage have nothing to order; those that share
    devices, and those with replicas of stages that go in turn, keep their order.
    """
    if plan.shared or any(p.in_turn for p in plan.pipelines) or all(
            len(p.stages) == 1 for p in plan.pipelines) or why_not(plan, job, cluster):
        return plan
    now = predict(plan, job, cluster, sent=False)
    best = now.step_s * (1 - WORTH) if now.fits else float("inf"), plan
    for split in (False, True):
        limits = _limits(plan, now, cluster)
        for _ in range(ATTEMPTS):
            tried = _ordered(plan, job, cluster, limits, split, played)
            if why_not(tried, job, cluster):
                break
            found = predict(tried, job, cluster, sent=False)
            if found.fits:
                if found.step_s < best[0]:
                    best = found.step_s, tried
                break
            limits = _lower(limits, tried, found)
    return best[1]


Limits = list[list[int]]
"""Per pipeline and stage, the most micro-batches times chunks in flight."""


def _limits(plan: Plan, now: Prediction, cluster: Cluster) -> Limits:
    """As many as would fit beside all else, if each holds as much as those of now do on average."""
    limits = [[len(s.chunks) * len(p.micro_batches) for s in p.stages] for p in plan.pipelines]
    held = {(p, s): in_flight(order) for p, pipe in enumerate(plan.pipelines)
            for s, order in enumerate(pipe.orders(plan.schedule))}
    for use in now.devices:
        one = use.breakdown.get("activations", 0) * allocator_factor(cluster.devices[use.rank]) / max(
            held[use.pipeline, use.stage], 1)
        if one:
            more = (use.capacity_bytes - use.peak_bytes) // one
            _cap(limits, plan, use.pipeline, use.stage, held[use.pipeline, use.stage] + int(more))
    return limits


def _lower(limits: Limits, plan: Plan, found: Prediction) -> Limits:
    """One less than was held wherever memory was short, or as much less as it lacks."""
    limits = [list(row) for row in limits]
    for use in found.devices:
        if not use.fits:
            held = in_flight(plan.pipelines[use.pipeline].orders(plan.schedule)[use.stage])
            one = max(use.breakdown.get("activations", 0) / max(held, 1), 1)
            _cap(limits, plan, use.pipeline, use.stage, held - max(1, -int(-use.lacks_bytes // one)))
    return limits


def _cap(limits: Limits, plan: Plan, p: int, s: int, most: int) -> None:
    limits[p][s] = max(len(plan.pipelines[p].stages[s].chunks), min(limits[p][s], most))


def _ordered(plan: Plan, job: Job, cluster: Cluster, limits: Limits, split: bool, played: int) -> Plan:
    known: dict[object, Orders] = {}
    pipelines = []
    for p, pipe in enumerate(plan.pipelines):
        work, limit = work_of(plan, p, job, cluster, split=split), tuple(limits[p])
        if (work, limit) not in known:
            known[work, limit] = search(work, limit, played=played).orders
        stages = [stage.replace(order=show_steps(order)) for stage, order in zip(pipe.stages, known[work, limit])]
        pipelines.append(pipe.replace(stages=tuple(stages)))
    return plan.replace(pipelines=tuple(pipelines), schedule="custom")
