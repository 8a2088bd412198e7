"""Plays a program in simulated time: actions become tasks, priced by `cost`, and the engine runs them.

Streams and hazards give the order (`program.action`); a send and its receive are one task, and so is a collective
of all ranks that meet in it. Equal entities are played once (`fold`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mixfleet.batching import Batch
from mixfleet.cluster import Cluster
from mixfleet.cost.network import cpu_costs
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.program.action import (
    GATHER,
    NORM,
    PUBLISH,
    RECV_ACT,
    RECV_GRAD,
    RECV_KEPT,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    SEND_KEPT,
    SYNC,
    Action,
    Program,
    boundary,
    stream_of,
)
from mixfleet.program.layout import Layout
from mixfleet.sim import compiled
from mixfleet.sim.engine import Graph, Times
from mixfleet.sim.flow import Flow, computing, flow
from mixfleet.sim.fold import Colours, Instance, distinct, flat, refine
from mixfleet.sim.hazards import hazards
from mixfleet.sim.pricing import Part, Pricing
from mixfleet.sim.traffic import Entity, Kind, Traffic
from mixfleet.units import NS_PER_S

_SENDER = {SEND_ACT: SEND_ACT, RECV_ACT: SEND_ACT, SEND_GRAD: SEND_GRAD, RECV_GRAD: SEND_GRAD,
           SEND_KEPT: SEND_KEPT, RECV_KEPT: SEND_KEPT}
"""From a point-to-point action to that of the sender."""
CATEGORY = {SEND_ACT: "send", SEND_GRAD: "send", RECV_ACT: "recv", RECV_GRAD: "recv",
            SEND_KEPT: "send", RECV_KEPT: "recv", GATHER: "gather",
            PUBLISH: "gather", REDUCE: "reduce", SYNC: "reduce", NORM: "optimizer"}
"""Of the actions that communicate. The norm counts as part of the optimizer step, as where it is measured."""
_MEETS = {*_SENDER, GATHER, REDUCE, SYNC, PUBLISH, NORM}


class Row(NamedTuple):
    """What one entity does, for all entities that are equal to it."""

    entity: Entity
    """Its first seat."""
    seats: tuple[Entity, ...]
    members: tuple[Entity, ...]
    """The first seats of all of them."""
    actions: tuple[Action, ...]
    streams: tuple[str, ...]
    """Per action, the name of its stream."""
    parts: tuple[tuple[Part, ...], ...]
    """Per action, what it is made of; empty for communication."""
    start_ns: list[int]
    end_ns: list[int]


class Played(NamedTuple):
    """One step. `critical` is the chain of actions and transfers that sets its length, as (category, where, ns)."""

    rows: list[Row]
    critical: list[tuple[str, str, int]]

    @property
    def end_ns(self) -> int:
        return max((max(row.end_ns) for row in self.rows if row.end_ns), default=0)


def play(program: Program, plan: Plan, job: Job, cluster: Cluster, layout: Layout, *, fold: bool = True,
         batch: Batch | None = None) -> Played:
    """Runs one step. With `fold` off every entity gets a row of its own. `batch` is what the micro-batches of the step
    are; None for rows of `seq_len`.

    Raises RuntimeError if the program deadlocks: `program.check` finds that with the reason.
    """
    return _Player(program, plan, job, cluster, layout, fold, batch).play()


class _Voice(NamedTuple):
    """The actions of one colour of entities, as tasks: where each begins and ends."""

    group: list[int]
    actions: tuple[Action, ...]
    streams: list[str]
    parts: list[tuple[Part, ...]]
    first: list[int]
    last: list[int]


class _Player:
    """Turns the program into a graph of tasks and runs it."""

    def __init__(self, program: Program, plan: Plan, job: Job, cluster: Cluster, layout: Layout, fold: bool,
                 batch: Batch | None) -> None:
        self._layout, self._devices, self._batch = layout, cluster.devices, batch
        self._whole = [pipeline.micro_batches * max(program.updates, 1) for pipeline in plan.pipelines]
        self._parts = {(p, s, m): pipeline.sizes(s, m) * max(program.updates, 1)
                       for p, pipeline in enumerate(plan.pipelines) for s, stage in enumerate(pipeline.stages)
                       for m in range(stage.members)}
        self._roles = {(role.pipeline, role.stage): role for role in program.roles}
        self._traffic = Traffic(plan, job, cluster, layout)
        self._pricing = Pricing(plan, job, cluster, layout, self._traffic, batch)
        count, capacities = len(self._traffic.entities), self._traffic.capacities
        # What entities compute passes their cores, as transfers do.
        instances = self._traffic.instances + [Instance("compute", (e,), 0.0, tuple((port, 1.0) for port in ports))
                                               for e, ports in enumerate(self._traffic.cores) if ports]
        kinds = [(self._pricing.kind(e), () if batch is None else self._shapes(e)) for e in range(count)]
        self._colours = refine(kinds, instances, capacities) if fold \
            else distinct(count, len(instances), len(capacities))
        self._flows = _Flows(self._traffic, self._colours, cluster)
        self._graph = Graph()
        self._shared: dict[tuple[object, ...], int] = {}
        self._link: dict[int, int] = {}
        """Task -> the instance of its transfer."""

    def _shapes(self, e: int) -> tuple[object, ...]:
        """What the micro-batches of an entity are to the clock."""
        assert self._batch is not None
        return tuple(self._pricing.shapes(e, mb)
                     for mb in range(len(self._batch.micro[self._traffic.entities[e].replica])))

    def play(self) -> Played:
        groups: dict[tuple[int, ...], list[int]] = {}
        for e, crew in self._traffic.crews.items():
            groups.setdefault(tuple([self._colours.entities[seat] for seat in crew]), []).append(e)
        voices = [self._voice(group) for group in groups.values()]
        times = compiled.play(self._graph)
        if min(times.end, default=0) < 0:
            raise RuntimeError("the program deadlocks: some actions wait for each other")
        entities = self._traffic.entities
        rows = [Row(entities[v.group[0]], tuple(entities[e] for e in self._traffic.crews[v.group[0]]),
                    tuple(entities[e] for e in v.group), v.actions, tuple(v.streams), tuple(v.parts),
                    [times.start[t] for t in v.first], [times.end[t] for t in v.last]) for v in voices]
        return Played(rows, self._critical(voices, times))

    def _voice(self, group: list[int]) -> _Voice:
        entity = self._traffic.entities[group[0]]
        role = self._roles[entity.pipeline, entity.stage]
        crew = self._traffic.crews[group[0]]
        voice = _Voice(group, role.actions, [], [], [], [])
        needs = role.needs(lambda seat: hazards(seat.actions, self._layout))
        order = self._graph.order
        before: dict[tuple[str, int], int] = {}
        turns: dict[tuple[str, int, int], int] = {}
        known: dict[object, tuple[tuple[Part, ...], int, Flow | None]] = {}
        first, last, pieces, streams = voice.first, voice.last, voice.parts, voice.streams
        for action, after in zip(voice.actions, needs, strict=True):
            stream = stream_of(action)
            streams.append(stream[0])
            e = crew[max(action.seat, 0)]
            if action.op in _MEETS:
                key = action.op, action.lo, action.seat
                turns[key] = turn = turns.get(key, 0) + 1
                tasks = self._meetings(e, action, turn)
                pieces.append(())
            else:
                parts, ns, flow = self._alone(e, action, stream[0], known)
                tasks = [self._graph.add(ns, flow)]
                pieces.append(parts)
            if stream in before:
                order(before[stream], tasks[0])
            for j in after:
                order(last[j], tasks[0])
            for a, b in pairwise(tasks) if len(tasks) > 1 else ():
                order(a, b)
            before[stream] = tasks[-1]
            first.append(tasks[0])
            last.append(tasks[-1])
        return voice

    def _meetings(self, e: int, action: Action, turn: int) -> list[int]:
        """The tasks of an action in which entities meet, one after another; `turn` counts the actions of its kind on
        its unit."""
        op, traffic = action.op, self._traffic
        entity = traffic.entities[e]
        if op in _SENDER:
            sizes, pattern = self._whole[entity.pipeline], traffic.pattern[entity.pipeline]
            if pattern:
                part: Kind = (_SENDER[op], entity.pipeline, boundary(action), pattern[action.mb % len(pattern)])
                if (e, part) not in traffic.at:  # no sample of it is here
                    return [self._graph.add()]
                return [self._transfer(traffic.at[e, part], (action.mb,))]
            kind: Kind = (_SENDER[op], entity.pipeline, boundary(action))
            if self._batch is None:
                return [self._transfer(traffic.at[e, kind], (action.mb,), sizes[action.mb], sizes[0])]
            positions = self._batch.micro[entity.replica][action.mb].positions
            return [self._transfer(traffic.at[e, kind], (action.mb,), positions, sizes[0] * self._pricing.tokens[e])]
        if op == NORM:
            if (NORM,) not in self._shared:
                self._shared[NORM,] = self._graph.add(self._pricing.norm_ns)
            return [self._shared[NORM,]]
        unit_kind = traffic.unit_kind[action.lo]
        phases = range(traffic.phases[op, unit_kind])
        return [self._transfer(traffic.at[e, (op, unit_kind, i)], (action.lo, turn)) for i in phases] \
            or [self._graph.add()]

    def _alone(self, e: int, action: Action, stream: str, known: dict[object, tuple[tuple[Part, ...], int, Flow | None]]
               ) -> tuple[tuple[Part, ...], int, Flow | None]:
        """What an action of one entity is made of, its duration, and its flow where it shares a port. `known` remembers
        equal actions of this entity."""
        entity = self._traffic.entities[e]
        mine = self._parts[entity.pipeline, entity.stage, entity.member]
        size = mine[action.mb] if action.mb >= 0 else 0
        # Rows of the batch's own lengths, and micro-batches of those that share experts, differ one by one.
        own = self._batch is not None or self._pricing.meets
        key = (action.op, action.lo, action.hi, action.seat, action.mb if own else size)
        found = known.get(key)
        if found is None:
            parts = self._pricing.parts(e, action, size)
            ns = sum(part.ns for part in parts)
            made = self._flows.computing(e, ns) if stream == "compute" else self._flows.host(
                e, ns, self._pricing.moved(e, action, size))
            found = known[key] = (parts, *made)
        return found

    def _transfer(self, instance: int, which: tuple[int, ...], size: int = 1, whole: int = 1) -> int:
        """The task of a transfer, made by the first of those who meet in it."""
        key = (self._colours.instances[instance], *which)
        task = self._shared.get(key)
        if task is None:
            task = self._shared[key] = self._graph.add(flow=self._flows.of(instance, size, whole))
            self._link[task] = instance
        return task

    def _critical(self, voices: list[_Voice], times: Times) -> list[tuple[str, str, int]]:
        owner = {task: (v, k) for v in reversed(voices) for tasks in (v.first, v.last) for k, task in enumerate(tasks)}
        chain = []
        names: dict[int, str] = {}
        for task in times.critical():
            if task not in owner:  # the middle of an action of several transfers
                continue
            voice, k = owner[task]
            seat = self._traffic.crews[voice.group[0]][max(voice.actions[k].seat, 0)]
            entity = self._traffic.entities[seat]
            device = self._devices[entity.ranks[0]].name
            where = f"pipeline {entity.pipeline} stage {entity.stage} (from rank {entity.ranks[0]}, {device})"
            category = CATEGORY.get(voice.actions[k].op, "")
            if task in self._link:
                link = self._link[task]
                where = names[link] if link in names else names.setdefault(link, self._traffic.tightest(link))
            if category:
                chain.append((category, where, times.end[task] - times.start[task]))
            chain += [(part.category, where, part.ns) for part in voice.parts[k]]
        return chain


class _Flows:
    """Flows of the instances, each standing for all that are equal to it."""

    def __init__(self, traffic: Traffic, colours: Colours, cluster: Cluster) -> None:
        self._traffic, self._cluster = traffic, cluster
        self._cores = {port for ports in traffic.cores for port in ports}
        self._ports = colours.ports
        self._colours = colours.instances
        # What all instances of a colour together pass through each port.
        which, port, nbytes = flat(traffic.instances)
        self._width = len(traffic.capacities)
        keys, index = np.unique(np.array(self._colours, np.int64)[which] * self._width + port, return_inverse=True)
        self._passing = keys, np.bincount(index, nbytes, len(keys))
        self._made: dict[tuple[int, int, int], Flow] = {}
        self._computing: dict[tuple[int, int], Flow] = {}
        self._entities = colours.entities
        self._beside: dict[tuple[int, int], int] = {}

    def of(self, i: int, size: int = 1, whole: int = 1) -> Flow:
        """The flow of instance `i` with `size / whole` of its bytes."""
        colour = self._colours[i]
        key = (colour, size, whole)
        if key not in self._made:
            instance, capacities = self._traffic.instances[i], self._traffic.capacities
            scale = size / whole
            # Of the ports of one colour the instance passes, the fullest by itself speaks for all.
            unique: dict[int, tuple[float, float, float]] = {}
            keys, passing = self._passing
            at = np.searchsorted(keys, [colour * self._width + port for port, _ in instance.demands])
            for (port, nbytes), together in zip(instance.demands, passing[at].tolist()):
                found = (together * scale, nbytes * scale, capacities[port])
                unique[self._ports[port]] = max(found, unique.get(self._ports[port], found))
            cores = {self._ports[port] for port, _ in instance.demands if port in self._cores}
            self._made[key] = flow(instance.latency_s, [(p, c, n) for p, (_, n, c) in unique.items()],
                                   [total for total, _, _ in unique.values()], cores, instance.turn_s)
        return self._made[key]

    def computing(self, e: int, ns: int) -> tuple[int, Flow | None]:
        """Duration of what entity `e` computes, and its flow where transfers take the same cores."""
        ports = self._traffic.cores[e]
        if not ports or not ns:
            return ns, None
        if (e, ns) not in self._computing:
            devices = [self._cluster.devices[rank] for rank in self._traffic.entities[e].ranks]
            rate = min(d.share * (len(d.cores) or 1) / max(cpu_costs(d)[1], 1e-12) for d in devices)
            self._computing[e, ns] = computing(
                ns, [(port, 1.0) for port in dict.fromkeys(self._ports[p] for p in ports)], rate)
        return 0, self._computing[e, ns]


    def host(self, e: int, ns: int, nbytes: int) -> tuple[int, Flow | None]:
        """Duration of a copy between a device and its host, and its flow where all devices share what the host can
        move, equal entities counted with it."""
        node = self._cluster.node_of[self._traffic.entities[e].ranks[0]]
        capacity = self._cluster.nodes[node].host_Bps
        if not capacity or not ns:
            return ns, None
        like = self._entities[e]
        if (like, node) not in self._beside:
            self._beside[like, node] = sum(
                self._entities[other] == like and self._cluster.node_of[x.ranks[0]] == node
                for other, x in enumerate(self._traffic.entities))
        rate = nbytes * NS_PER_S / ns
        first = len(self._traffic.capacities)
        own = first + len(self._cluster.nodes) + like  # the device's link to its host, which is its alone
        return 0, Flow(0, ns, rate, ((own, 1.0), (first + node, self._beside[like, node] * rate / capacity)))
