"""Who exchanges what with whom in one step of a plan, before any clock runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mixfleet.cluster import Cluster
from mixfleet.cost.memory import boundary_bytes
from mixfleet.cost.network import NO_LOADS, CollectiveOp, Ints, Loads, Ports
from mixfleet.job import Job
from mixfleet.model.spec import TensorComm
from mixfleet.plan import Pipeline, Plan
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SEND_ACT, SEND_GRAD, SEND_KEPT, SYNC
from mixfleet.program.layout import Comm, Layout
from mixfleet.sim.fold import Instance

SEATS = "seats"
"""The kind of an instance that moves nothing: it only keeps together what is on the same ranks."""
Kind = tuple[str, int, int] | tuple[str, int, int, int]
"""(operation, pipeline, block at whose input it moves) or (operation, first unit of its kind, phase). Where stages have
replicas of their own, messages bear the number of the micro-batch's pattern too: see `Traffic.pattern`."""


Demands = tuple[tuple[int, float], ...]
"""(port, bytes)"""


class Moved(NamedTuple):
    """What a transfer loads, as plain numbers."""

    latency_s: float
    demands: Demands
    turn_s: float

    @staticmethod
    def of(loads: Loads) -> Moved:
        return Moved(loads.latency_s, tuple(zip(loads.ports.tolist(), np.round(loads.nbytes, 2).tolist())),
                     loads.turn_s)


class Entity(NamedTuple):
    """One copy of a stage: a tensor-parallel group, which acts as one."""

    pipeline: int
    stage: int
    replica: int
    """Number among all data-parallel replicas (`Plan.replicas`)."""
    ranks: tuple[int, ...]
    posts: tuple[int, ...] = ()
    """What the layout calls them (`Plan.posts`)."""
    member: int = 0
    """Number among the stage's own replicas."""


class Traffic:
    """All transfers of a step, each with the entities that meet in it and the bytes on every port it passes.

    Units of equal shape on the same devices exchange equal transfers; `unit_kind` names the first like each.
    """

    def __init__(self, plan: Plan, job: Job, cluster: Cluster, layout: Layout) -> None:
        self._plan, self._job, self._cluster, self._layout = plan, job, cluster, layout
        self.entities = tuple(Entity(p, s, k, stage.ranks(r, member), plan.posts(p, s, r, member), member)
                              for k, (p, r) in enumerate(plan.replicas)
                              for s, stage in enumerate(plan.pipelines[p].stages) for member in range(stage.members))
        self._entity_of = {post: e for e, entity in enumerate(self.entities) for post in entity.posts}
        self.crews = self._crews()
        self._ports = Ports.of(cluster)
        self.instances: list[Instance] = []
        self.at: dict[tuple[int, Kind], int] = {}
        """(entity, kind) -> index of the instance."""
        self.unit_kind: list[int] = []
        self.phases: dict[tuple[str, int], int] = {}
        """(operation, unit kind) -> transfers one after another; 0 where nothing moves."""
        self.pattern: list[tuple[int, ...]] = []
        """Per pipeline with replicated stages, the pattern of each micro-batch: those of one pattern are cut alike."""
        for p, pipeline in enumerate(plan.pipelines):
            self.pattern.append(self._replicated(p) if pipeline.replicated else ())
            if not pipeline.replicated:
                self._point_to_point(p)
        self._state()
        for crew in self.crews.values() if plan.shared else ():
            self._add((SEATS, 0, 0), crew, NO_LOADS)
        self.capacities = self._ports.capacities
        self.cores = self._cores()
        """Per entity, the ports of the cores of its ranks that transfers load: its computing shares them."""

    def _cores(self) -> list[tuple[int, ...]]:
        loaded = {port for instance in self.instances for port, _ in instance.demands}
        ports = {rank: self._ports.number(core) for entity in self.entities for rank in entity.ranks
                 if (core := self._cluster.core_of[rank])}
        return [tuple(ports[r] for r in entity.ranks if ports.get(r) in loaded) for entity in self.entities]

    def _crews(self) -> dict[int, tuple[int, ...]]:
        """By their first entity, those that are the same ranks in several pipelines, in the order of their seats."""
        found: dict[tuple[int, ...], list[int]] = {}
        for e, entity in enumerate(self.entities):
            found.setdefault(entity.ranks, []).append(e)
        return {crew[0]: tuple(crew) for crew in found.values()}

    def tightest(self, instance: int) -> str:
        """Name of the port that takes longest to pass the transfer's bytes."""
        demands = self.instances[instance].demands
        return self._ports.names[max(demands, key=lambda d: d[1] / self.capacities[d[0]])[0]] if demands else ""

    def _add(self, kind: Kind, members: Iterable[int], moved: Moved | Loads) -> None:
        if isinstance(moved, Loads):
            moved = Moved.of(moved)
        instance = Instance(kind, tuple(members), *moved)
        for member in instance.members:
            self.at[member, kind] = len(self.instances)
        self.instances.append(instance)

    def _point_to_point(self, pipeline: int) -> None:
        pipe, first = self._plan.pipelines[pipeline], self._plan.replicas.index((pipeline, 0))
        stages = len(pipe.stages)
        start = next(e for e, entity in enumerate(self.entities) if entity.replica == first)
        if self._plan.schedule == "roundpipe":
            for op, at, src, dst in _between_legs(pipe):
                block, ends = self._job.model.blocks[at - 1], (start + src, start + dst)
                nbytes = boundary_bytes(block, pipe.micro_batch, self._job.seq_len, 1, self._job)
                self._add((op, pipeline, at), ends, self._message(*ends, nbytes))
            return
        for here, there in pairwise(pipe.chain):
            if here.stage == there.stage:
                continue
            block = self._job.model.blocks[here.hi - 1]
            for r in range(pipe.copies):
                nbytes = boundary_bytes(block, pipe.micro_batch, pipe.tokens(self._job.seq_len, r), 1, self._job)
                a, b = start + r * stages + here.stage, start + r * stages + there.stage
                self._add((SEND_ACT, pipeline, here.hi), (a, b), self._message(a, b, nbytes))
                self._add((SEND_GRAD, pipeline, here.hi), (b, a), self._message(b, a, nbytes))

    def _replicated(self, pipeline: int) -> tuple[int, ...]:
        """Adds the messages between stages that have replicas of their own, for each pattern of micro-batches: those
        who meet in common samples, directly or through others, exchange at once."""
        pipe, job = self._plan.pipelines[pipeline], self._job
        entity = {(x.replica, x.stage, x.member): e for e, x in enumerate(self.entities) if x.pipeline == pipeline}
        numbers: dict[object, int] = {}
        pattern = [numbers.setdefault(tuple(rows[m] for rows in pipe.slices), len(numbers))
                   for m in range(len(pipe.micro_batches))]
        for number, m in {n: m for m, n in reversed(list(enumerate(pattern)))}.items():
            for here, there in pairwise(pipe.chain):
                if here.stage == there.stage:
                    continue
                block = job.model.blocks[here.hi - 1]
                for k in (k for k, (p, _) in enumerate(self._plan.replicas) if p == pipeline):
                    tokens = pipe.tokens(job.seq_len, self._plan.replicas[k][1])
                    meetings = [(entity[k, here.stage, i], entity[k, there.stage, j], hi - lo)
                                for i, j, lo, hi in pipe.meetings(here.stage, there.stage, m)]
                    together = {e: e for a, b, _ in meetings for e in (a, b)}
                    for a, b, _ in meetings:
                        together[_root(together, a)] = _root(together, b)
                    for root in dict.fromkeys(_root(together, a) for a, _, _ in meetings):
                        group = [x for x in meetings if _root(together, x[0]) == root]
                        members = dict.fromkeys(e for a, b, _ in group for e in (a, b))
                        nbytes = boundary_bytes(block, sum(n for _, _, n in group), tokens, 1, job)
                        for op, turned in ((SEND_ACT, False), (SEND_GRAD, True)):
                            ways = [(b, a, n) if turned else (a, b, n) for a, b, n in group]
                            self._add((op, pipeline, here.hi, number), members, self._messages(ways, nbytes))
        return tuple(pattern)

    def _messages(self, ways: list[tuple[int, int, int]], nbytes: int) -> Loads:
        """Messages of `nbytes` in all: so many samples, in sequence shards, from one entity to another, all at once."""
        senders, takers = (tuple(dict.fromkeys(way[side] for way in ways)) for side in (0, 1))
        a, b = (tuple(r for e in group for r in self.entities[e].ranks) for group in (senders, takers))
        total, parts = sum(n for _, _, n in ways), []
        for x, y, n in ways:
            here, there = self.entities[x], self.entities[y]
            whole = len(here.ranks) * len(there.ranks)
            parts += [(src, dst, n * part / (whole * total)) for src, dst, part in shards(here, there, whole)]
        kind = tuple((senders.index(x), takers.index(y), n, len(self.entities[x].ranks), len(self.entities[y].ranks))
                     for x, y, n in ways)
        return self._ports.message(a, b, parts, nbytes, kind)

    def _message(self, a: int, b: int, nbytes: int) -> Moved:
        """A message in the sequence shards that the ranks of entity `a` send to those of `b`, remembered for all plans
        on the cluster."""
        here, there = self.entities[a], self.entities[b]
        known, key = self._ports.known, ("moved", here.ranks, there.ranks, nbytes)
        if key not in known:
            whole = len(here.ranks) * len(there.ranks)
            known[key] = Moved.of(self._ports.message(
                here.ranks, there.ranks, ((x, y, n / whole) for x, y, n in shards(here, there, whole)), nbytes))
        found: Moved = known[key]
        return found

    def _state(self) -> None:
        layout, plan = self._layout, self._plan
        for u, like in enumerate(alike(layout)):
            self.unit_kind.append(like)
            if like == u:
                blocks = layout.units[u].blocks
                hosts = tuple(tuple(s for s, stage in enumerate(pipe.stages)
                                    if any(map(stage.holds, blocks)))
                              for pipe in plan.pipelines)
                for op in (GATHER, REDUCE, SYNC, PUBLISH):
                    self.phases[op, u] = 0 if not layout.needed(op, u) else self._exchanges(op, u, hosts) \
                        if layout.irregular else self._collectives(op, u, hosts)

    def _exchanges(self, op: str, unit: int, hosts: tuple[tuple[int, ...], ...]) -> int:
        """Adds the transfers of one action on units like this one, move by move; returns the number of phases."""
        entities = [e for e, entity in enumerate(self.entities) if entity.stage in hosts[entity.pipeline]]
        stages = exchanges(self._layout, self._job, self._ports, op, unit, [self.entities[e].posts for e in entities])
        for i, groups in enumerate(stages):
            for members, loads in groups:
                self._add((op, unit, i), [entities[m] for m in members], loads)
        return len(stages)

    def _collectives(self, op: str, unit: int, hosts: tuple[tuple[int, ...], ...]) -> int:
        """Adds the transfers of one action on units like this one; returns the number of phases."""
        element = self._job.bytes.weight_bytes if op in (GATHER, PUBLISH) else self._job.bytes.gradient_bytes
        entities = [e for e, entity in enumerate(self.entities) if entity.stage in hosts[entity.pipeline]]
        degrees = {len(self.entities[e].ranks) for e in entities}
        # Tensor ranks of equal groups do the same side by side: the last one, whose slice is the largest, is asked.
        equal = len(degrees) == 1 and all(len(h) == 1 for h in hosts)
        # Where every degree divides the next, a group of one rank is the group of all its members.
        shard, n = self._plan.sharding, len(self._plan.replicas)
        chain = [min(d, n) for d in (shard.weights, shard.gradients, shard.optimizer, n)]
        regular = equal and all(b % a == 0 for a, b in pairwise(chain))
        phases: list[dict[tuple[int, ...], tuple[Comm, int]]] = []
        turns: dict[int, int] = {}
        covered: list[set[int]] = []
        for e in entities:
            if regular and covered and all(e in seen for seen in covered):
                continue
            ranks = self.entities[e].ranks
            for rank in ranks[-1:] if equal else ranks:
                for comm in self._layout.comms(op, unit, rank):
                    i = turns.setdefault(comm.turn, len(turns))
                    if i == len(phases):
                        phases.append({})
                        covered.append(set())
                    # Of two views of one group the smaller counts: a rank that holds more than the others' slices
                    # meets the others in several groups.
                    known = phases[i].get(comm.ranks)
                    if known is None or comm.elements < known[0].elements:
                        phases[i][comm.ranks] = (comm, e)
                        covered[i].update(self._entity_of[r] for r in comm.ranks)
        sides = degrees.pop() if equal else 1
        for i, comms in enumerate(phases):
            parent = {e: e for e in entities}
            for comm, e in comms.values():
                for rank in comm.ranks:
                    parent[_root(parent, self._entity_of[rank])] = _root(parent, e)
            members: dict[int, list[int]] = {}
            for e in entities:
                members.setdefault(_root(parent, e), []).append(e)
            calls: dict[int, list[tuple[CollectiveOp, int, tuple[int, ...]]]] = {}
            for comm, e in comms.values():
                for side in range(sides):
                    ranks = tuple([self.entities[self._entity_of[r]].ranks[side] for r in comm.ranks]) if equal \
                        else comm.ranks
                    calls.setdefault(_root(parent, e), []).append((comm.op, comm.elements * element, ranks))
            for root, group in members.items():
                self._add((op, unit, i), group, self._collective(tuple(calls.get(root, ()))))
        return len(phases)

    def _collective(self, calls: tuple[tuple[CollectiveOp, int, tuple[int, ...]], ...]) -> Moved:
        """Collectives that happen together, as (operation, bytes, ranks), remembered for all plans on the cluster."""
        known: dict[object, Moved] = self._ports.known
        if calls not in known:
            known[calls] = Moved.of(
                Loads.together([self._ports.loads(*call) for call in calls]) if calls else NO_LOADS)
        return known[calls]


class Moves(NamedTuple):
    """All moves of one stage of an action, in numbers; with `sums` those who get them add them up."""

    sums: bool
    src: Ints
    """Posts."""
    dst: Ints
    elements: Ints


def moves(layout: Layout, op: str, unit: int) -> list[Moves]:
    """What `Layout.stages` says move by move; stages in which nothing moves are left out."""
    if op in (GATHER, PUBLISH):
        return [Moves(False, *np.array([(m.src, m.dst, m.hi - m.lo) for m in stage], np.int64).T)
                for stage in layout.stages(op, unit) if stage]
    found = []
    for parts in layout.summed(op, unit):
        rows: tuple[list[list[Ints]], list[list[Ints]]] = [], []
        for _, lo, hi, has, wants in parts:
            n = len(wants)
            if not n:  # a replica without any of these experts
                continue
            size = np.diff((hi - lo) * np.arange(n + 1) // n)
            rows[0].append([np.repeat(has, n), np.tile(wants, len(has)), np.tile(size, len(has))])
            rows[1].append([np.repeat(wants, n), np.tile(wants, n), np.repeat(size, n)])
        for sums, some in zip((True, False), rows):
            if some:
                src, dst, elements = (np.concatenate(column) for column in zip(*some))
                real = (src != dst) & (elements > 0)
                if real.any():
                    found.append(Moves(sums, src[real], dst[real], elements[real]))
    return found


def exchanges(layout: Layout, job: Job, ports: Ports, op: str, unit: int, posts: Sequence[tuple[int, ...]]
              ) -> list[list[tuple[list[int], Loads]]]:
    """The transfers of an action on a unit among entities that have these posts, stage by stage: which of the entities
    meet, and what their messages load."""
    element = job.bytes.weight_bytes if op in (GATHER, PUBLISH) else job.bytes.gradient_bytes
    stages, span = moves(layout, op, unit), layout.plan.span
    entity_of = np.zeros(max(map(max, posts)) + 1, np.int64)
    for e, mine in enumerate(posts):
        entity_of[list(mine)] = e
    together = {e: e for e in range(len(posts))}
    for stage in stages:
        for pair in np.unique(entity_of[stage.src] * len(posts) + entity_of[stage.dst]).tolist():
            a, b = divmod(pair, len(posts))
            together[_root(together, a)] = _root(together, b)
    members: dict[int, list[int]] = {}
    for e in together:
        members.setdefault(_root(together, e), []).append(e)
    root_of = np.array([_root(together, e) for e in range(len(posts))])
    found = []
    for stage in stages:
        pair = stage.src % span * span + stage.dst % span
        root = root_of[entity_of[stage.src]]
        groups = []
        for which, group in members.items():
            mine = root == which
            pairs, index = np.unique(pair[mine], return_inverse=True)
            nbytes = np.bincount(index, stage.elements[mine], len(pairs)).astype(float) * element
            nbytes[pairs // span == pairs % span] = 0.0  # from one seat of a rank to another
            groups.append((group, ports.exchange(pairs // span, pairs % span, nbytes, sums=stage.sums)))
        found.append(groups)
    return found


def alike(layout: Layout) -> list[int]:
    """For each unit the first one of equal shape on the same stages: all answers about them are equal."""
    known: list[int] | None = layout.__dict__.get("_alike")
    if known is not None:
        return known
    homes = list(zip(*([c.stage for c in pipe.chain for _ in range(c.lo, c.hi)] for pipe in layout.plan.pipelines)))
    seen: dict[object, int] = {}
    found = [seen.setdefault((tuple(homes[b] for b in unit.blocks),
                              tuple((t.param.split, t.rows, t.row, t.param.role == "expert") for t in unit.tensors),
                              unit.frozen), u)
             for u, unit in enumerate(layout.units)]
    layout.__dict__["_alike"] = found
    return found


def _between_legs(pipe: Pipeline) -> list[tuple[str, int, int, int]]:
    """Under roundpipe: (kind of message, block at whose input it is, from stage, to stage)."""
    front = [leg for leg in pipe.legs if not leg.back]
    after = [*[(leg.lo, leg.device) for leg in front[1:]], (pipe.chain[-1].lo, pipe.chain[-1].stage)]
    makes = {b: leg.device for leg in front for b in range(leg.lo + 1, leg.hi + 1)}
    found = [(SEND_ACT, at, leg.device, stage) for leg, (at, stage) in zip(front, after)]
    found += [(SEND_KEPT, c.lo, makes[c.lo], c.stage) for c in pipe.chain if c.lo in pipe.entries]
    found += [(SEND_GRAD, there.lo, there.stage, here.stage) for here, there in pairwise(pipe.chain)]
    return [message for message in found if message[2] != message[3]]


def _root(parent: dict[int, int], e: int) -> int:
    while parent[e] != e:
        parent[e] = parent[parent[e]]
        e = parent[e]
    return e


def tensor_bytes(comm: TensorComm, micro_batch: int, seq_len: int, tensor: int, job: Job, context: float = 1) -> int:
    """Bytes of the whole tensor of a collective inside a block, of `seq_len` positions of a sequence that is `context`
    times longer. Statistics in fp32 are fp64 in an fp64 job."""
    element = max(comm.bytes_per_element or 0, 8) if job.precision == "fp64" else comm.bytes_per_element
    return round(comm.size.at(micro_batch, seq_len, tensor, context) * (element or job.bytes.compute_bytes))


def shards(a: Entity, b: Entity, nbytes: int) -> list[tuple[int, int, int]]:
    """(sender, receiver, bytes) for a sequence that `a` holds in even shards, one per rank, and `b` wants so."""
    n, m = len(a.ranks), len(b.ranks)
    if n == m:
        return [(x, y, nbytes // n) for x, y in zip(a.ranks, b.ranks)]
    found = []
    for i, x in enumerate(a.ranks):
        for j, y in enumerate(b.ranks):
            part = min((i + 1) * m, (j + 1) * n) - max(i * m, j * n)
            if part > 0:
                found.append((x, y, nbytes * part // (n * m)))
    return found
