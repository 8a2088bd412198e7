"""Sums of costs over every range of blocks, so that the search can look them up. No price is made here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from mixfleet.cluster import Cluster, Device, Link
from mixfleet.cost.clock import held_cost
from mixfleet.cost.kernels import accumulate_s
from mixfleet.cost.memory import (
    allocator_factor,
    boundary_bytes,
    framework_bytes,
    recompute_bytes,
    saved_bytes,
    state_bytes,
    workspace_bytes,
)
from mixfleet.cost.network import collective_s
from mixfleet.job import Job
from mixfleet.model.spec import ExpertShare
from mixfleet.plan import Pipeline, Plan, Recompute, Sharding, Stage, groups
from mixfleet.program.layout import Layout, Unit
from mixfleet.search.partition import Matrix
from mixfleet.search.walk import Times
from mixfleet.sim.memory import replica_groups

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


LAYOUTS = 32
"""Layouts that are remembered: those of many ranks are large."""


class Pieces(NamedTuple):
    """Fewest replicas that share each kind of state: a rank holds one part in that many, which need not be whole."""

    weights: float
    gradients: float
    optimizer: float
    prefetch: int = 1
    expert: int = 1
    """Replicas that share routed experts; of what each has, those who have the same hold parts."""
    groups: int = 0
    """Process groups over replicas."""

    @staticmethod
    def of(sharding: Sharding, replicas: int, expert: int = 1) -> Pieces:
        """Groups are as even as can be; the smallest one holds the largest pieces."""
        w, g, o = (min(len(members) for members in groups(replicas, min(degree, replicas)))
                   for degree in (sharding.weights, sharding.gradients, sharding.optimizer))
        return Pieces(w, g, o, sharding.prefetch, expert, replica_groups(sharding, replicas))

    @staticmethod
    def portion(sharding: Sharding, part: float, expert: int = 1) -> Pieces:
        """For a replica that holds this part of all that is sharded over all."""
        w, g, o = (1 / part if degree > 1 and part else inf if degree > 1 else 1.0
                   for degree in (sharding.weights, sharding.gradients, sharding.optimizer))
        return Pieces(w, g, o, sharding.prefetch, expert, 1)


class Sharing(NamedTuple):
    """Routed experts that a replica shares with others: how many times its own tokens come together, all experts over
    those of its fullest rank, and all ranks that share them (empty: their exchanges are left out)."""

    times: float
    parts: float
    crowd: tuple[int, ...] = ()

    @staticmethod
    def evenly(job: Job, expert: int, tensor: int, crowd: tuple[int, ...] = ()) -> Sharing | None:
        """Of `expert` equal replicas; None if there are no routed experts to share."""
        count = min((b.experts for b in job.model.blocks if b.routed), default=0)
        return Sharing(expert, count / -(-count // (expert * tensor)), crowd) if expert > 1 and count else None


class Table:
    """Figures of one tensor group at one micro-batch, as matrices over block ranges `[lo, hi]`.

    With `context`, of the tensor groups of so many equal parts of every sequence, whose ranks follow each other.

    `forward_s`, and per recompute mode `backward_s` (recompute included; `weight_s` is the weight halves' part of it,
    and adding gradients that are kept whole takes `adding_s` more), `saved_bytes` per micro-batch in flight and
    `passing_bytes` (what backward brings back, and workspace); `edge_bytes[i]` crosses the boundary below block i. A
    group of unlike devices goes at the pace of the slowest and has the least memory. `sharing` is of routed experts
    that other replicas share.
    """

    def __init__(self, job: Job, cluster: Cluster, ranks: Sequence[int], devices: Sequence[Device],
                 micro_batch: int, context: int = 1, sharing: Sharing | None = None) -> None:
        self.devices, self.micro_batch = devices, micro_batch
        blocks, t = job.model.blocks, len(ranks) // context
        shape = (micro_batch, job.seq_len // context, t)
        costs = {}
        for block in blocks:
            if block.kind in costs:
                continue
            talk = {"forward": 0.0, "backward": 0.0}
            experts = ExpertShare(int(sharing.times * shape[0] * shape[1]), sharing.parts) if (
                sharing and block.routed) else None
            for comm in block.tensor_comm:
                group = sharing.crowd if sharing and comm.routed else tuple(ranks[:t])
                if len(group) < 2:
                    continue
                nbytes = round(comm.size.at(*shape) * (comm.bytes_per_element or job.bytes.compute_bytes))
                talk[comm.phase] += collective_s(comm.op, nbytes, group, cluster)
            keys = {"forward": 0.0, "backward": 0.0}
            for comm in block.context_comm if context > 1 else ():
                nbytes = round(comm.size.at(*shape, context) * job.bytes.compute_bytes)
                keys[comm.phase] += collective_s(comm.op, nbytes, ranks[::t], cluster)
            both = [talk[phase] + keys[phase] for phase in ("forward", "backward")]
            plain = [held_cost(block, *shape, d, job, context=context, experts=experts).among(*both) for d in devices]
            forward = max(c.forward_s for c in plain) + both[0]
            backward = max(c.backward_s for c in plain) + both[1]
            again = []
            for mode in MODES:
                waits = (talk["forward"] if mode == "full" else 0.0) + (keys["forward"] if mode != "none" else 0.0)
                again.append(waits + max(held_cost(block, *shape, d, job, mode, context, experts)
                                         .among(0.0, 0.0, waits).recompute_s for d in devices))
            weight = max(c.weight_s for c in plain)
            adding = max(accumulate_s(block, t, d, job, experts) for d in devices)
            costs[block.kind] = (
                forward, [backward + r for r in again],
                [max(saved_bytes(block, *shape, d, job, mode, context, experts) for d in devices) for mode in MODES],
                [max(recompute_bytes(block, *shape, d, job, mode, context, experts) for d in devices)
                 for mode in MODES],
                max(workspace_bytes(block, *shape, d, job, context, experts) for d in devices),
                boundary_bytes(block, *shape, job), weight, adding)
        rows = [costs[b.kind] for b in blocks]
        self.forward_s = _sums([r[0] for r in rows])
        self.backward_s = [_sums([r[1][m] for r in rows]) for m in range(len(MODES))]
        self.weight_s, self.adding_s = _sums([r[6] for r in rows]), _sums([r[7] for r in rows])
        self.saved_bytes = [_sums([r[2][m] for r in rows]) for m in range(len(MODES))]
        work = _maxima([r[4] for r in rows])
        self.passing_bytes = [work + _maxima([r[3][m] for r in rows]) for m in range(len(MODES))]
        self.edge_bytes = np.array([0, *(r[5] for r in rows)], dtype=float)
        self.kinds: dict[str, tuple[int, float, float]] = {}
        """Per kind of block: how many, and seconds forward and backward without recompute."""
        for b in blocks:
            self.kinds[b.kind] = (self.kinds.get(b.kind, (0,))[0] + 1, costs[b.kind][0], costs[b.kind][1][0])
        self.capacity_bytes = min(d.memory_bytes for d in devices)
        self._moving: dict[tuple[int, bool, bool], tuple[Matrix, Matrix]] = {}

    def backward_of(self, stage: Stage, lo: int, hi: int) -> float:
        """Seconds backward through blocks `lo` to `hi - 1` of a stage, under its recompute modes."""
        if isinstance(stage.recompute, str):
            return float(self.backward_s[MODES.index(stage.recompute)][lo, hi])
        return sum(float(self.backward_s[MODES.index(mode)][b, b + 1])
                   for b, mode in stage.modes.items() if lo <= b < hi)

    def saved_of(self, stage: Stage, lo: int, hi: int) -> float:
        """Bytes that blocks `lo` to `hi - 1` of a stage keep for one micro-batch, under its recompute modes."""
        if isinstance(stage.recompute, str):
            return float(self.saved_bytes[MODES.index(stage.recompute)][lo, hi])
        return sum(float(self.saved_bytes[MODES.index(mode)][b, b + 1])
                   for b, mode in stage.modes.items() if lo <= b < hi)

    @cached_property
    def whole_s(self) -> float:
        """Seconds of the whole model, forward and backward, for the micro-batch."""
        return sum(n * (f + b) for n, f, b in self.kinds.values())

    def cheapest(self, state: Matrix, in_flight: int, *, first: bool, last: bool, communicators: int
                 ) -> tuple[Matrix, Matrix]:
        """Per block range, seconds of a micro-batch under the cheapest recompute for which `need_bytes` fits (`inf` if
        none does), and which mode that is."""
        framework = max(framework_bytes(d, communicators) for d in self.devices)
        most = (self.capacity_bytes - framework) / allocator_factor(self.devices[0])
        seconds = np.full_like(self.forward_s, inf)
        chosen = np.zeros(seconds.shape, dtype=np.int8)
        for mode in reversed(range(len(MODES))):
            key = (mode, first, last)
            if key not in self._moving:
                moving = self._moving_bytes(mode, first=first, last=last)
                self._moving[key] = np.where(self.forward_s > 0, moving, inf), self.forward_s + self.backward_s[mode]
            moving, whole_s = self._moving[key]
            fits = state + in_flight * self.saved_bytes[mode] + moving <= most
            seconds = np.where(fits, whole_s, seconds)
            chosen[fits] = mode
        return seconds, chosen

    def _moving_bytes(self, mode: int, *, first: bool, last: bool) -> Matrix:
        """Temporaries and messages."""
        edges = (0 if first else 2) * self.edge_bytes[:, None] + (0 if last else 2) * self.edge_bytes[None, :]
        moving: Matrix = self.passing_bytes[mode] + edges
        return moving

    def need_bytes(self, state: Matrix, mode: int, in_flight: int, *, first: bool, last: bool,
                   communicators: int) -> Matrix:
        """Bytes taken from a device at the most, if all meet: state, micro-batches in flight, temporaries, messages."""
        tensors: Matrix = state + in_flight * self.saved_bytes[mode] + self._moving_bytes(mode, first=first, last=last)
        framework = max(framework_bytes(d, communicators) for d in self.devices)
        tensors *= allocator_factor(self.devices[0])
        tensors += framework
        return tensors


class Tables:
    """All tables of a job on a cluster, made when they are asked for."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        whole = Pipeline(stages=(Stage(blocks=(0, len(job.model.blocks)), devices=(0,)),), samples=1, micro_batch=1)
        layout = Layout(Plan(pipelines=(whole,)), job.model)
        self.units, self.floor = layout.units, layout.floor
        seen: dict[tuple[Device, Link, Link], int] = {}
        self.kind_of = tuple(
            seen.setdefault((d.replace(cores=()) if d.cores else d, node.link, node.nic), len(seen))
            for node in cluster.nodes for d in node.devices)
        """Per rank a number; equal ones are equal devices in equally linked nodes."""
        self._tables: dict[tuple[object, ...], Table] = {}
        self._signatures: dict[tuple[int, ...], tuple[object, ...]] = {}
        self._states: dict[tuple[int, Pieces], Matrix] = {}
        self._layouts: dict[object, Layout] = {}
        self.prices: dict[object, Any] = {}
        self.seconds: dict[tuple[object, ...], float] = {}
        self.walks: dict[tuple[object, ...], Times | None] = {}
        """What `bounds` remembers."""

    def layout(self, plan: Plan) -> Layout:
        """The layout of a plan's state, which plans share that differ in samples, micro-batches, recompute, or in order
        alone; the last few are remembered."""
        key = (plan.sharding, plan.expert, plan.expert_shares, plan.synchronous, plan.schedule == "roundpipe", tuple([
            (pipe.replicas, pipe.context, tuple([(one.devices, one.tensor, one.chunks, one.ahead, one.shares,
                                                  one.dispatch, one.offload) for one in pipe.stages]))
            for pipe in plan.pipelines]))
        found = self._layouts.pop(key, None) or Layout(plan, self.job.model, self.units)
        if len(self._layouts) == LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[key] = found
        return found

    def signature(self, ranks: tuple[int, ...]) -> tuple[object, ...]:
        """Tensor groups of equal signature cost the same."""
        if ranks not in self._signatures:
            nodes = {self.cluster.node_of[r] for r in ranks}
            kinds = tuple(sorted(self.kind_of[r] for r in ranks))
            self._signatures[ranks] = (kinds,) if len(nodes) == 1 else (kinds, ranks)
        return self._signatures[ranks]

    def table(self, ranks: tuple[int, ...], micro_batch: int, context: int = 1,
              sharing: Sharing | None = None) -> Table:
        """The table of a tensor group, or of those of `context` parts; it answers for all of the same signature."""
        key: tuple[object, ...] = (self.signature(ranks), micro_batch, context)
        if sharing:
            key += (sharing.times, sharing.parts, self.signature(sharing.crowd))
        if key not in self._tables:
            devices = list({self.kind_of[r]: self.cluster.devices[r] for r in ranks}.values())
            self._tables[key] = Table(self.job, self.cluster, ranks, devices, micro_batch, context, sharing)
        return self._tables[key]

    def state_bytes(self, tensor: int, pieces: Pieces) -> Matrix:
        """Bytes per block range that do not depend on the micro-batch: state, gathered weights, gradient buffers."""
        key = (tensor, pieces)
        if key not in self._states:
            blocks, job = len(self.job.model.blocks), self.job
            e, changing = pieces.expert, [u for u in self.units if not u.frozen]
            elements, trained = (_unit_sums(blocks, [(u, _local(u, tensor)) for u in us])
                                 for us in (self.units, changing))
            unit = [state_bytes(job, *one).total for one in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
            if e > 1:
                some, changed = (_unit_sums(blocks, [(u, _local(u, e * tensor, "expert")) for u in us])
                                 for us in (self.units, changing))
                elements, trained = (_unit_sums(blocks, [(u, _local(u, tensor, "other")) for u in us])
                                     for us in (self.units, changing))
            total = sum((np.ceil(held / part) * n for n, part, held in zip(unit, pieces, (elements, trained, trained))),
                        np.zeros_like(elements))
            if e > 1:
                total += sum((np.ceil(held / max(1, part / e)) * n
                              for n, part, held in zip(unit, pieces, (some, changed, changed))), np.zeros_like(some))
            largest = _maxima([sum(_local(u, tensor, "other") + _local(u, e * tensor, "expert")
                                   for u in self.units if b in u.blocks) for b in range(blocks)])
            if pieces.weights > 1:
                total += (pieces.prefetch + 1) * largest * job.bytes.weight_bytes
            if pieces.gradients > 1:
                total += largest * job.bytes.gradient_bytes
            self._states[key] = total
        return self._states[key]


def _sums(values: Sequence[float]) -> Matrix:
    total = np.concatenate(([0.0], np.cumsum(values)))
    return total[None, :] - total[:, None]


def _maxima(values: Sequence[float]) -> Matrix:
    n = len(values)
    found = np.zeros((n + 1, n + 1))
    for lo in range(n):
        found[lo, lo + 1:] = np.maximum.accumulate(values[lo:])
    return found


def _local(unit: Unit, ways: int, which: Literal["all", "expert", "other"] = "all") -> int:
    """Elements of a unit, or of its routed experts, or of all else, on one of `ways` ranks: the largest slice."""
    return sum(-(-t.rows // ways) * t.row if t.param.split is not None else t.elements for t in unit.tensors
               if which == "all" or (t.param.role == "expert") == (which == "expert"))


def _unit_sums(blocks: int, units: Sequence[tuple[Unit, int]]) -> Matrix:
    """Elements per range, from those of every unit; a tied unit counts once where several of its blocks are."""
    own = [0] * blocks
    for unit, elements in units:
        if len(unit.blocks) == 1:
            own[unit.blocks[0]] += elements
    found = _sums(own)
    edge = np.arange(blocks + 1)
    for unit, elements in units:
        if len(unit.blocks) > 1:
            inside = np.zeros_like(found, dtype=bool)
            for b in unit.blocks:
                inside |= (edge[:, None] <= b) & (b < edge[None, :])
            found = found + inside * elements
    return found
