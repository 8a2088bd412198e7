"""Which blocks to recompute and whose activations to keep in host memory: time against memory, block by block (as
MONET trades them, arXiv 2603.15002).

A set of blocks under recompute saves what they would keep and costs their forward once more; one in host memory costs
what its copies take longer than the computing beside them. The choices that nothing else beats in both are found by
dynamic programming over the blocks; which one a stage can afford, and what it takes, the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mixfleet.cluster import Cluster, Device
from mixfleet.cost.clock import held_cost
from mixfleet.cost.kernels import host_copy_s
from mixfleet.cost.memory import allocator_factor, parked_bytes, recompute_bytes, saved_bytes
from mixfleet.job import Job
from mixfleet.model.spec import Block, ExpertShare
from mixfleet.plan import Plan, Recompute, Stage
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import held_at_peak
from mixfleet.search.tables import MODES
from mixfleet.sim import Prediction
from mixfleet.sim.experts import Experts
from mixfleet.units import NS_PER_S

MOST_POINTS = 2000
"""Of a frontier between two blocks; beyond that many, those close to their neighbours are left out."""


class Choice(NamedTuple):
    """One mode of one block."""

    time_ns: int
    """What it recomputes for one micro-batch, or waits for copies."""
    kept_bytes: int
    """Of all micro-batches in flight."""
    again_bytes: int
    """What backward brings back for its own duration."""


class Point(NamedTuple):
    """One way to take a choice per block."""

    nbytes: int
    """Kept by all blocks, and the most that one of them brings back."""
    time_ns: int
    chosen: tuple[int, ...]
    """Per block the index of its choice."""


_Path = tuple["_Path", int] | None
"""The choices so far, last one outside."""


def frontier(blocks: Sequence[Sequence[Choice]]) -> list[Point]:
    """The Pareto set of time against memory over all ways to take one choice per block, least memory first.

    The most that is brought back is a maximum, not a sum: for each cap on it the sums are a problem of their own.
    Exact while no frontier exceeds `MOST_POINTS`.
    """
    found: list[tuple[int, int, _Path]] = []
    for cap in sorted({c.again_bytes for choices in blocks for c in choices}):
        sums: list[tuple[int, int, _Path]] = [(cap, 0, None)]
        for choices in blocks:
            allowed = [(i, c) for i, c in enumerate(choices) if c.again_bytes <= cap]
            sums = _thinned(_best([(nbytes + c.kept_bytes, time_ns + c.time_ns, (path, i))
                                   for nbytes, time_ns, path in sums for i, c in allowed]))
        found += sums
    return [Point(nbytes, time_ns, _unrolled(path)) for nbytes, time_ns, path in _best(found)]


def _best(points: list[tuple[int, int, _Path]]) -> list[tuple[int, int, _Path]]:
    """Those that no other beats, least bytes first."""
    kept: list[tuple[int, int, _Path]] = []
    for point in sorted(points, key=lambda p: p[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _thinned(points: list[tuple[int, int, _Path]]) -> list[tuple[int, int, _Path]]:
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    return [points[last * i // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def _unrolled(path: _Path) -> tuple[int, ...]:
    found: list[int] = []
    while path:
        path, i = path
        found.append(i)
    return tuple(reversed(found))


Room = dict[tuple[int, int], int]
"""Per (pipeline, stage), the bytes that its blocks may keep and bring back."""


def room_bytes(now: Prediction, cluster: Cluster) -> Room:
    """What they take now at the peak, and what is free then on the fullest device."""
    room: Room = {}
    for use in now.devices:
        free = (use.capacity_bytes - use.peak_bytes) / allocator_factor(cluster.devices[use.rank])
        mine = use.breakdown.get("activations", 0) + use.breakdown.get("recomputed", 0) + int(free)
        at = use.pipeline, use.stage
        room[at] = min(room.get(at, mine), mine)
    return room


Way = tuple[Recompute, bool]
"""A mode of a block, and whether what it keeps lies in host memory."""
HERE: tuple[Way, ...] = tuple((mode, False) for mode in MODES)
ANYWHERE: tuple[Way, ...] = (*HERE, ("none", True), ("full", True))


def spared(plan: Plan, room: Room, job: Job, cluster: Cluster, ways: tuple[Way, ...] = HERE) -> Plan:
    """The plan with as little recompute, block by block, as the room allows; with `ANYWHERE`, or copies to the host."""
    if plan.schedule != "custom" and SCHEDULES[plan.schedule].ways > 1:
        return plan
    return plan.replace(pipelines=tuple(
        pipe.replace(stages=tuple(_within(plan, p, s, room[p, s], job, cluster, ways)
                                  for s in range(len(pipe.stages))))
        for p, pipe in enumerate(plan.pipelines)))


def can_park(plan: Plan, p: int, s: int, cluster: Cluster) -> bool:
    """Whether a stage's devices have another memory to keep activations in, and a way there."""
    return plan.synchronous and plan.schedule != "roundpipe" and all(
        device.kind == "gpu" and device.pcie_Bps and cluster.nodes[cluster.node_of[rank]].host_memory_bytes
        for rank in plan.pipelines[p].stages[s].devices for device in (cluster.devices[rank],))


def _within(plan: Plan, p: int, s: int, most_bytes: int, job: Job, cluster: Cluster, ways: tuple[Way, ...]) -> Stage:
    """The stage with the choices of least time that keep at most `most_bytes`; as it is where nothing is to gain."""
    stage, pipe = plan.pipelines[p].stages[s], plan.pipelines[p]
    if stage.recompute == "none" and not stage.offload_blocks:
        return stage
    if not can_park(plan, p, s, cluster):
        ways = tuple(way for way in ways if not way[1])
    tokens = max(pipe.tokens(job.seq_len, copy) for copy in range(pipe.context))
    largest = max(pipe.sizes(s, j)[0] for j in range(stage.members))
    shape, context = (largest, tokens, stage.tensor), job.seq_len / tokens
    devices = dict.fromkeys(cluster.devices[rank] for rank in stage.devices)
    in_flight = dict(_in_flight(plan, p, s))
    experts, copies = Experts(plan, job), [k for k, (q, _) in enumerate(plan.replicas) if q == p]
    options = []
    for b in stage.held:
        block = job.model.blocks[b]
        most = max((share for k in copies if (share := experts.share(block, k, stage.tensor, -1))),
                   key=lambda share: share.tokens / share.parts, default=None)
        options.append([_choice(block, shape, devices, job, way, context, most, in_flight[b], first=b == 0)
                        for way in ways])
    now = [(mode, b in stage.offload_blocks) for b, mode in stage.modes.items()]
    now_ns = sum(choices[ways.index(way)].time_ns for choices, way in zip(options, now))
    fits = [point for point in frontier(options) if point.nbytes <= most_bytes and point.time_ns < now_ns]
    if not fits:
        return stage
    chosen = dict(zip(stage.held, [ways[i] for i in fits[-1].chosen]))
    return stage.with_modes({b: mode for b, (mode, _) in chosen.items()},
                            {b for b, (_, away) in chosen.items() if away})


def _choice(block: Block, shape: tuple[int, int, int], devices: Iterable[Device], job: Job, way: Way, context: float,
            experts: ExpertShare | None, in_flight: int, *, first: bool) -> Choice:
    """What one way costs. Of what goes to the host one block and micro-batch at least is on the device at a time; how
    many more are on their way, the simulator says."""
    mode, away = way
    time_ns = kept = again = 0
    for d in devices:
        cost = held_cost(block, *shape, d, job, mode, context, experts)
        whole = saved_bytes(block, *shape, d, job, mode, context, experts)
        goes = parked_bytes(block, *shape, d, job, mode, context, experts, first=first) if away else 0
        copy_s = host_copy_s(goes, d)
        waits = max(0.0, copy_s - cost.forward_s) + max(0.0, copy_s - cost.backward_s - cost.recompute_s)
        time_ns = max(time_ns, round((cost.recompute_s + waits) * NS_PER_S))
        kept = max(kept, in_flight * (whole - goes))
        again = max(again, recompute_bytes(block, *shape, d, job, mode, context, experts) + goes)
    return Choice(time_ns, kept, again)


def _in_flight(plan: Plan, p: int, s: int) -> Iterator[tuple[int, int]]:
    """Per block of a stage, how many micro-batches it keeps when the stage keeps most."""
    pipe = plan.pipelines[p]
    if plan.accumulation == "layered":
        yield from ((b, len(pipe.micro_batches)) for b in pipe.stages[s].held)
        return
    most, _ = held_at_peak(pipe.orders(plan.schedule)[s])
    for k, chunk in enumerate(pipe.chain):
        if chunk.stage == s:
            yield from ((b, most[k]) for b in range(chunk.lo, chunk.hi))
