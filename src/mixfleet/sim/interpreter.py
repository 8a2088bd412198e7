"""Plays a program in simulated time: actions become tasks, priced by `cost`, and the engine runs them.

Streams and hazards give the order (`program.action`); a send and its receive are one task, and so is a collective
of all ranks that meet in it. Equal entities are played once (`fold`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from mixfleet.cluster import Cluster
from mixfleet.cost.kernels import block_cost, optimizer_s
from mixfleet.cost.network import collective
from mixfleet.job import Job
from mixfleet.plan import Plan, Stage
from mixfleet.program.action import (
    GATHER,
    NORM,
    PUBLISH,
    RECV_ACT,
    RECV_GRAD,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    STEP,
    SYNC,
    Action,
    B,
    F,
    Program,
    dependencies,
    stream_of,
)
from mixfleet.program.layout import Layout
from mixfleet.sim.engine import Graph, run
from mixfleet.sim.flow import Flow, flow
from mixfleet.sim.fold import distinct, refine
from mixfleet.sim.traffic import Entity, Kind, Traffic
from mixfleet.units import NS_PER_S

NORM_BYTES = 16
"""What the norm exchanges per rank: a sum of squares and a count of valid tokens, both fp64."""
_SENDS = {SEND_ACT: 0, SEND_GRAD: 0, RECV_ACT: -1, RECV_GRAD: 1}
"""From a point-to-point action to the stage that sends, relative to its own."""


class Part(NamedTuple):
    """A stretch of an action: its category and duration."""

    category: str
    ns: int


class Row(NamedTuple):
    """What one entity does, for all entities that are equal to it."""

    entity: Entity
    members: tuple[Entity, ...]
    actions: tuple[Action, ...]
    parts: tuple[tuple[Part, ...], ...]
    """Per action, what it is made of; empty for communication."""
    start_ns: list[int]
    end_ns: list[int]


def play(program: Program, plan: Plan, job: Job, cluster: Cluster, layout: Layout, *, fold: bool = True) -> list[Row]:
    """Runs one step. With `fold` off every entity gets a row of its own.

    Raises RuntimeError if the program deadlocks: `program.check` finds that with the reason.
    """
    traffic = Traffic(plan, job, cluster, layout)
    pricing = _Pricing(plan, job, cluster, layout, traffic)
    entities, instances = traffic.entities, traffic.instances
    if fold:
        colours = refine([pricing.kind(e) for e in range(len(entities))], instances, traffic.capacities)
    else:
        colours = distinct(len(entities), len(instances), len(traffic.capacities))
    members: dict[int, list[int]] = {}
    for e, colour in enumerate(colours.entities):
        members.setdefault(colour, []).append(e)
    flows = _Flows(traffic, colours.instances, colours.ports)
    graph = Graph()
    shared: dict[tuple[object, ...], int] = {}
    roles = {(role.pipeline, role.stage): role for role in program.roles}
    orders: dict[tuple[int, int], tuple[list[tuple[str, int]], tuple[tuple[int, ...], ...]]] = {}
    played = []
    for group in members.values():
        e = group[0]
        entity = entities[e]
        place = (entity.pipeline, entity.stage)
        actions = roles[place].actions
        if place not in orders:
            orders[place] = ([stream_of(a) for a in actions],
                             dependencies(actions, layout, layout.units_of_stage(*place)))
        streams, needs = orders[place]
        last: dict[tuple[str, int], int] = {}
        ends: list[int] = []
        starts: list[int] = []
        parts: list[tuple[Part, ...]] = []
        count: dict[tuple[str, int], int] = {}
        sizes = plan.pipelines[entity.pipeline].micro_batches
        for action, stream, after in zip(actions, streams, needs, strict=True):
            op = action.op
            part: tuple[Part, ...] = ()
            if op in _SENDS:
                kind: Kind = ((SEND_ACT if op in (SEND_ACT, RECV_ACT) else SEND_GRAD), entity.pipeline,
                              entity.stage + _SENDS[op])
                i = traffic.at[e, kind]
                key: tuple[object, ...] = (colours.instances[i], action.mb)
                if key not in shared:
                    shared[key] = graph.add(flow=flows.of(i, sizes[action.mb], sizes[0]))
                tasks = [shared[key]]
            elif op in (GATHER, REDUCE, SYNC, PUBLISH):
                u = action.lo
                count[op, u] = turn = count.get((op, u), 0) + 1
                tasks = []
                for phase in range(traffic.phases[op, traffic.unit_kind[u]]):
                    i = traffic.at[e, (op, traffic.unit_kind[u], phase)]
                    key = (colours.instances[i], u, turn)
                    if key not in shared:
                        shared[key] = graph.add(flow=flows.of(i))
                    tasks.append(shared[key])
                if not tasks:
                    tasks = [graph.add()]
            elif op == NORM:
                if (NORM,) not in shared:
                    shared[NORM,] = graph.add(pricing.norm_ns)
                tasks = [shared[NORM,]]
            else:
                part = pricing.parts(e, action, sizes[action.mb] if action.mb >= 0 else 0)
                tasks = [graph.add(sum(p.ns for p in part))]
            first = tasks[0]
            before = last.get(stream)
            if before is not None:
                graph.order(before, first)
            for j in after:
                graph.order(ends[j], first)
            for a, b in pairwise(tasks):
                graph.order(a, b)
            last[stream] = tasks[-1]
            starts.append(first)
            ends.append(tasks[-1])
            parts.append(part)
        played.append((group, actions, tuple(parts), starts, ends))
    start, end = run(graph)
    if min(end, default=0) < 0:
        raise RuntimeError("the program deadlocks: some actions wait for each other")
    return [Row(entities[group[0]], tuple(entities[m] for m in group), actions, parts,
                [start[t] for t in starts], [end[t] for t in ends])
            for group, actions, parts, starts, ends in played]


class _Flows:
    """Flows of the instances, each standing for all that are equal to it."""

    def __init__(self, traffic: Traffic, instance_colours: list[int], port_colours: list[int]) -> None:
        self._traffic = traffic
        self._ports = port_colours
        self._colours = instance_colours
        self._passing: dict[tuple[int, int], float] = {}
        for i, instance in enumerate(traffic.instances):
            for port, nbytes in instance.demands:
                key = (instance_colours[i], port)
                self._passing[key] = self._passing.get(key, 0.0) + nbytes
        self._made: dict[tuple[int, int, int], Flow] = {}

    def of(self, i: int, size: int = 1, whole: int = 1) -> Flow:
        """The flow of instance `i` with `size / whole` of its bytes."""
        colour = self._colours[i]
        key = (colour, size, whole)
        if key not in self._made:
            instance, capacities = self._traffic.instances[i], self._traffic.capacities
            scale = size / whole
            alone_s = max((n * scale / capacities[p] for p, n in instance.demands), default=0.0)
            # Of the ports of one colour the instance passes, the fullest by itself speaks for all.
            unique: dict[int, tuple[float, float, float]] = {}
            for port, nbytes in instance.demands:
                found = (self._passing[colour, port] * scale, nbytes * scale, capacities[port])
                unique[self._ports[port]] = max(found, unique.get(self._ports[port], found))
            self._made[key] = flow(instance.latency_s, [(p, c, n) for p, (_, n, c) in unique.items()],
                                   [total for total, _, _ in unique.values()]) if alone_s else flow(
                                       instance.latency_s, [])
        return self._made[key]


class _Pricing:
    """Durations of what an entity does by itself."""

    def __init__(self, plan: Plan, job: Job, cluster: Cluster, layout: Layout, traffic: Traffic) -> None:
        self._plan, self._job, self._cluster, self._layout = plan, job, cluster, layout
        self._entities = traffic.entities
        self._hashes: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._device = [self._number(d) for d in cluster.devices]
        self._known: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._groups: dict[tuple[object, ...], int] = {}
        self._neighbours: dict[tuple[int, int, int], list[int]] = {}
        for e, entity in enumerate(self._entities):
            for node in {cluster.node_of[r] for r in entity.ranks}:
                self._neighbours.setdefault((entity.pipeline, entity.stage, node), []).append(e)
        self.norm_ns = round(collective("all_reduce", NORM_BYTES, plan.ranks, cluster).alone_s * NS_PER_S)

    def _number(self, value: object) -> int:
        """Small numbers for specs, by identity first, since hashing one reads all of it."""
        known = self._hashes.get(id(value))
        if known is None:
            known = self._hashes[id(value)] = self._numbers.setdefault(value, len(self._numbers))
        return known

    def _stage(self, e: int) -> Stage:
        entity = self._entities[e]
        return self._plan.pipelines[entity.pipeline].stages[entity.stage]

    def kind(self, e: int) -> tuple[object, ...]:
        """Entities of equal kind take equally long for the same action, transfers aside."""
        entity = self._entities[e]
        return (entity.pipeline, entity.stage, tuple([self._device[r] for r in entity.ranks]), self._group(e))

    def _rivals(self, e: int) -> list[int]:
        """Entities of the same role with a rank in one of its nodes: their tensor groups talk at the same time."""
        entity = self._entities[e]
        nodes = {self._cluster.node_of[r] for r in entity.ranks}
        return sorted({other for node in nodes
                       for other in self._neighbours[entity.pipeline, entity.stage, node]})

    def _group(self, e: int) -> int:
        """Groups of one number have equally fast tensor-parallel communication."""
        ranks = self._entities[e].ranks
        if len(ranks) == 1:
            return -1
        nodes = {self._cluster.node_of[r] for r in ranks}
        key: tuple[object, ...] = (e,)
        if len(nodes) == 1:
            node = self._cluster.nodes[nodes.pop()]
            key = (len(ranks), self._number(node.link), tuple(self._device[r] for r in ranks), len(self._rivals(e)))
        return self._groups.setdefault(key, e)

    def _tensor_s(self, e: int, block_index: int, micro_batch: int, phase: str) -> float:
        """Seconds of a block's collectives in the tensor group, all groups of the same role in its nodes at once."""
        entity, job = self._entities[e], self._job
        seconds = 0.0
        for comm in job.model.blocks[block_index].tensor_comm:
            if comm.phase != phase:
                continue
            nbytes = round(comm.size.at(micro_batch, job.seq_len, len(entity.ranks))
                           * (comm.bytes_per_element or job.bytes.compute_bytes))
            own = collective(comm.op, nbytes, entity.ranks, self._cluster)
            passing: dict[str, float] = {}
            for rival in self._rivals(e):
                for port, _, n in collective(comm.op, nbytes, self._entities[rival].ranks, self._cluster).demands:
                    passing[port] = passing.get(port, 0.0) + n
            seconds += own.latency_s + max((passing[p] / capacity for p, capacity, _ in own.demands), default=0.0)
        return seconds

    def parts(self, e: int, action: Action, micro_batch: int) -> tuple[Part, ...]:
        """What a compute action is made of, in order."""
        if action.op in (F, B):
            key: tuple[object, ...] = (self.kind(e), action.op, action.lo, action.hi, micro_batch)
        elif action.op == STEP:
            key = (e, STEP, action.lo)
        else:
            return ()
        if key not in self._known:
            made = self._step(e, action.lo) if action.op == STEP else self._blocks(e, action, micro_batch)
            self._known[key] = tuple(Part(c, ns) for c, s in made if (ns := round(s * NS_PER_S)))
        return self._known[key]

    def _blocks(self, e: int, action: Action, micro_batch: int) -> list[tuple[str, float]]:
        """A tensor group goes at the pace of its slowest device, block by block."""
        ranks, stage, job = self._entities[e].ranks, self._stage(e), self._job
        devices = list({self._device[r]: self._cluster.devices[r] for r in ranks}.values())
        forward = backward = recompute = tensor = 0.0
        for i in range(action.lo, action.hi):
            costs = [block_cost(job.model.blocks[i], micro_batch, job.seq_len, len(ranks), d, job, stage.recompute)
                     for d in devices]
            forward += max(c.forward_s for c in costs)
            backward += max(c.backward_s for c in costs)
            recompute += max(c.recompute_s for c in costs)
            if len(ranks) > 1:
                if action.op == F or stage.recompute == "full":
                    tensor += self._tensor_s(e, i, micro_batch, "forward")
                if action.op == B:
                    tensor += self._tensor_s(e, i, micro_batch, "backward")
        if action.op == F:
            return [("forward", forward), ("tensor", tensor)]
        return [("recompute", recompute), ("backward", backward), ("tensor", tensor)]

    def _step(self, e: int, unit: int) -> list[tuple[str, float]]:
        layout, entity = self._layout, self._entities[e]
        slowest = 0.0
        for rank in entity.ranks[-1:] if len({self._device[r] for r in entity.ranks}) == 1 else entity.ranks:
            owned = 0
            for column in layout.held(unit, rank):
                lo, hi = layout.piece("optimizer", unit, column, entity.replica)
                owned += hi - lo
            slowest = max(slowest, optimizer_s(owned, self._cluster.devices[rank], self._job))
        return [("optimizer", slowest)]
