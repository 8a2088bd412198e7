"""A plan for RoundPipe's workers: the devices of a plan's one pipeline, its legs cut by their prices."""

from __future__ import annotations

from mixfleet.cluster import Cluster
from mixfleet.cost.clock import held_cost
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.plan import Offload, Plan, Sharding, Stage, Synchronization
from mixfleet.plan_rules import why_not
from mixfleet.schedule.rounds import Leg, split
from mixfleet.sim import predict

HALVINGS = 4
"""Times that the weights of a leg may be halved until all fits."""
AWAY: tuple[tuple[Offload, ...], ...] = (("weights", "gradients", "optimizer"), ("weights", "optimizer"))
"""What may lie in host memory: with gradients there the host makes the step, without them the workers do."""


def in_rounds(plan: Plan, job: Job, cluster: Cluster) -> Plan | str:
    """The devices of the plan as workers in turn, with all state in host memory, but for gradients where it is faster
    that the workers make the step; or why that is impossible.

    The legs are those that `schedule.rounds.split` cuts by the times of the slowest device. A worker must have a
    backward leg, since the state of a block belongs to one; with fewer of them than devices, as many are used.
    """
    if len(plan.pipelines) > 1 or len(plan.replicas) > 1:
        return f"wants one pipeline, whose stages are its workers; here are {len(plan.replicas)} replicas"
    pipeline, blocks = plan.pipelines[0], job.model.blocks
    devices = tuple(rank for stage in pipeline.stages for rank in stage.devices)
    kinds = {cluster.devices[rank]: rank for rank in devices}
    try:
        costs = [[held_cost(block, pipeline.micro_batch, job.seq_len, 1, device, job, "none") for device in kinds]
                 for block in blocks]
    except InputError as error:
        return str(error)
    forward = [max(c.forward_s for c in found) for found in costs]
    both = [max(c.forward_s + c.backward_s for c in found) for found in costs]
    weights = [float(sum(p.count for p in block.params) * job.bytes.weight_bytes) for block in blocks]
    first: Plan | None = None
    budget = min(device.memory_bytes for device in kinds) / 2
    for _ in range(HALVINGS):
        for count in range(min(len(devices), len(blocks)), 0, -1):
            cut = split(forward, both, count, weights=weights, budget=budget, least=count)
            if cut is not None:
                break
        if cut is None:
            break
        ways = [_made(plan, cut.legs(count), devices[:count], away) for away in AWAY]
        if why_not(ways[0], job, cluster):
            return ways[0]
        first = first or ways[0]
        found = [predict(way, job, cluster, sent=False) for way in ways]
        fitting = [(p.step_s, i) for i, p in enumerate(found) if p.fits]
        if fitting:
            return ways[min(fitting)[1]]
        budget /= 2
    return first or f"wants a block's weights twice on a device; the largest block has {max(weights):.3g} bytes"


def _made(plan: Plan, legs: tuple[Leg, ...], devices: tuple[int, ...], away: tuple[Offload, ...]) -> Plan:
    stages = []
    for s, rank in enumerate(devices):
        own, *more = [(leg.lo, leg.hi) for leg in legs if leg.back and leg.device == s]
        ahead = tuple((leg.lo, leg.hi) for leg in legs if not leg.back and leg.device == s)
        stages.append(Stage(blocks=own, more=tuple(more), ahead=ahead, devices=(rank,),
                            offload=away))
    return plan.replace(schedule="roundpipe", sharding=Sharding(), synchronization=Synchronization(),
                        accumulation="plain", pipelines=(plan.pipelines[0].replace(stages=tuple(stages)),))
