"""What an entity's actions take by themselves: computing, exchanges inside its group, copies to and from its host."""

from __future__ import annotations

from typing import NamedTuple

from mixfleet.batching import Batch, Micro
from mixfleet.cluster import Cluster, Device
from mixfleet.cost.clock import held_cost
from mixfleet.cost.kernels import accumulate_s, anticipate_s, copy_s, foresee, host_copy_s, host_step_s, optimizer_s
from mixfleet.cost.memory import parked_bytes, state_bytes
from mixfleet.cost.network import Loads, Ports, collective_s, in_arrays
from mixfleet.job import Job
from mixfleet.model.spec import Block, TensorComm
from mixfleet.plan import Plan, Stage
from mixfleet.program.action import (
    AHEAD,
    ANTICIPATE,
    DROP,
    GATHER,
    KEEP,
    LOAD_GRAD,
    LOAD_SAVED,
    LOAD_STATE,
    LOAD_UPDATED,
    LOAD_WEIGHTS,
    PARK_SAVED,
    PULL,
    PUSH,
    SAVE_GRAD,
    SAVE_STATE,
    SAVE_WEIGHTS,
    STEP,
    USE,
    Action,
    B,
    F,
    I,
    W,
)
from mixfleet.program.layout import Kind as StateKind
from mixfleet.program.layout import Layout
from mixfleet.sim.experts import Experts, even_rows
from mixfleet.sim.traffic import Traffic, tensor_bytes
from mixfleet.units import NS_PER_S

NORM_BYTES = 16
"""What the norm exchanges per rank: a sum of squares and a count of valid tokens, both fp64."""
HOST = {LOAD_WEIGHTS: "load", LOAD_STATE: "load", LOAD_GRAD: "load", LOAD_UPDATED: "load",
        SAVE_WEIGHTS: "save", SAVE_STATE: "save", SAVE_GRAD: "save"}
"""Category of the actions that move state between a device and its host."""
PARKS = {PARK_SAVED: "save", LOAD_SAVED: "load"}
"""Of those that move saved activations."""


def host_bytes(layout: Layout, job: Job, unit: int, post: int, op: str, *, whole: bool = True) -> int:
    """Bytes that such an action moves for a unit; of its gradient what is owned of the `whole` one, or what is summed
    up micro-batch by micro-batch."""
    kind: StateKind = "optimizer"
    if op in (LOAD_WEIGHTS, SAVE_WEIGHTS) and layout.needed(GATHER, unit):
        kind = "weights"
    elif op in (LOAD_WEIGHTS, SAVE_WEIGHTS):  # under roundpipe a worker loads what is not its own as well
        return (layout.compute_elements(unit, post) if layout.held(unit, post) else layout.units[unit].elements
                ) * job.bytes.weight_bytes
    elif op in (LOAD_GRAD, SAVE_GRAD) and not whole:
        kind = "gradients"
    pieces = [layout.piece(kind, unit, c, layout.places[post].replica) for c in layout.held(unit, post)]
    elements = sum(hi - lo for lo, hi in pieces)
    if op in (LOAD_GRAD, SAVE_GRAD):
        return elements * job.bytes.gradient_bytes
    if op in (LOAD_UPDATED, LOAD_WEIGHTS, SAVE_WEIGHTS):
        return elements * job.bytes.weight_bytes
    state = state_bytes(job, 0, 0, elements)
    return state.master + state.moments


class Part(NamedTuple):
    """A stretch of an action: its category and duration."""

    category: str
    ns: int


class Pricing:
    """Durations of what an entity does by itself. `batch` is what the micro-batches of the step are; None for rows of
    `seq_len`."""

    def __init__(self, plan: Plan, job: Job, cluster: Cluster, layout: Layout, traffic: Traffic,
                 batch: Batch | None = None) -> None:
        self._plan, self._job, self._cluster, self._layout, self._batch = plan, job, cluster, layout, batch
        self._entities, self._alike = traffic.entities, traffic.unit_kind
        self._hashes: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._device = [self._number(d) for d in cluster.devices]
        self._known: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._runs: dict[tuple[int, int, int, int], int] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[int, int] = {}
        self._groups: dict[tuple[object, ...], int] = {}
        self._group_of: dict[int, int] = {}
        self._talk: dict[tuple[int, str, int, int, str], float] = {}
        self._neighbours: dict[tuple[int, int, int], list[int]] = {}
        self.tokens = [plan.pipelines[x.pipeline].tokens(job.seq_len, plan.replicas[x.replica][1])
                       for x in self._entities]
        """Positions of a sequence of `seq_len` that each entity has."""
        self._sharing: dict[int, tuple[object, ...]] = {}
        self._sequence_of: dict[int, list[int]] = {}
        self._experts = Experts(plan, job, batch)
        self.meets = self._experts.shared
        """Whether entities go in step with those that share their experts."""
        self._routes = {b.kind: b for b in job.model.blocks if b.routed}
        self._at = {(x.replica, x.stage): e for e, x in enumerate(self._entities)}
        self._crowds: dict[int, tuple[object, ...]] = {}
        self._rows_s: dict[tuple[object, ...], float] = {}
        for e, entity in enumerate(self._entities):
            for node in {cluster.node_of[r] for r in entity.ranks}:
                self._neighbours.setdefault((entity.pipeline, entity.stage, node), []).append(e)
        shapes: dict[tuple[int, int, int, int], tuple[int, Device]] = {}
        for e, x in enumerate(self._entities):
            shapes.setdefault((self._device[x.ranks[0]], x.pipeline, x.stage, x.member),
                              (e, cluster.devices[x.ranks[0]]))
        for e, device in shapes.values():
            x = self._entities[e]
            sizes = plan.pipelines[x.pipeline].sizes(x.stage, x.member)
            foresee(job, device, [(n, self.tokens[e], len(x.ranks)) for n in {sizes[0], sizes[-1]} - {0}])
        if batch:
            wanted: dict[int, dict[tuple[int, int, int], None]] = {}
            for x in self._entities:
                for device_number in {self._device[r] for r in x.ranks}:
                    wanted.setdefault(device_number, {}).update(
                        ((len(m.rows), m.width, len(x.ranks)), None) for m in batch.micro[x.replica])
            for number, found in wanted.items():
                foresee(job, cluster.devices[self._device.index(number)], found)
        self.norm_ns = round(self._norm_s() * NS_PER_S)

    def _norm_s(self) -> float:
        """An all-reduce of a few bytes: in the node with most ranks, then over one rank of each node."""
        nodes: dict[int, list[int]] = {}
        for rank in self._plan.ranks:
            nodes.setdefault(self._cluster.node_of[rank], []).append(rank)
        steps = (max(nodes.values(), key=len), [ranks[0] for ranks in nodes.values()])
        return sum(collective_s("all_reduce", NORM_BYTES, ranks, self._cluster) for ranks in steps)

    def _number(self, value: object) -> int:
        """Small numbers for specs, by identity first, since hashing one reads all of it."""
        known = self._hashes.get(id(value))
        if known is None:
            known = self._hashes[id(value)] = self._numbers.setdefault(value, len(self._numbers))
        return known

    def _stage(self, e: int) -> Stage:
        entity = self._entities[e]
        return self._plan.pipelines[entity.pipeline].stages[entity.stage]

    def kind(self, e: int) -> int:
        """Entities of equal kind take equally long for the same action, transfers aside."""
        if e not in self._kind_of:
            entity = self._entities[e]
            self._kind_of[e] = self._kinds.setdefault(
                (entity.pipeline, entity.stage, tuple([self._device[r] for r in entity.ranks]), self._group(e),
                 self._layout.share(entity.replica), self._shared_sequence(e), self._shared_experts(e),
                 self._plan.pipelines[entity.pipeline].sizes(entity.stage, entity.member)
                 if self._stage(e).members > 1 else (),
                 self._host_of(entity.ranks[0]) if self._stage(e).hosted else ()), len(self._kinds))
        return self._kind_of[e]

    def _parts_of(self, e: int) -> list[int]:
        """The entities that hold the parts of the sequences of this one, in order; itself without context parallelism.
        """
        if e not in self._sequence_of:
            pipe = self._plan.pipelines[self._entities[e].pipeline]
            mine = self._plan.replicas[self._entities[e].replica][1] % pipe.context
            self._sequence_of[e] = [e + (part - mine) * len(pipe.stages) for part in range(pipe.context)]
        return self._sequence_of[e]

    def _shared_sequence(self, e: int) -> tuple[object, ...]:
        """What tells apart the sets of entities that hold parts of one sequence: their parts, their devices, and how
        long they need to exchange keys and values."""
        parts = self._parts_of(e)
        if len(parts) == 1:
            return ()
        if parts[0] not in self._sharing:
            micro_batch = self._plan.pipelines[self._entities[e].pipeline].micro_batch
            comms = {b.kind: b.context_comm for lo, hi in self._stage(e).chunks for b in self._job.model.blocks[lo:hi]}
            self._sharing[parts[0]] = (
                *((self.tokens[m], *(self._device[r] for r in self._entities[m].ranks)) for m in parts),
                *(round(self._context_s(e, comm, micro_batch, self.tokens[e], self._job.seq_len) * NS_PER_S)
                  for kind in comms for comm in comms[kind]))
        return (self.tokens[e], *self._sharing[parts[0]])

    def _mates(self, e: int) -> list[int]:
        """The entities that share experts with this one, in order; itself where nobody does."""
        entity = self._entities[e]
        return [self._at[k, entity.stage] for k in self._experts.mates(entity.replica)] if self._experts.shared else [e]

    def _in_step(self, e: int) -> list[int]:
        """All entities that go in step with this one through layers of experts: who shares experts with it, or a
        sequence with one of those, and so on."""
        found = [e]
        for member in found:
            found += [m for m in (*self._parts_of(member), *self._mates(member)) if m not in found]
        return sorted(found)

    def _shared_experts(self, e: int) -> tuple[object, ...]:
        """What tells apart the sets of entities that share experts, and their members by what they hold."""
        mates = self._mates(e)
        if len(mates) == 1 or not self._routes:
            return ()
        if mates[0] not in self._crowds:
            blocks = {b.kind: b for lo, hi in self._stage(e).chunks for b in self._job.model.blocks[lo:hi] if b.routed}
            self._crowds[mates[0]] = (
                *((self.tokens[m], self._plan.pipelines[x.pipeline].micro_batch,
                   self._plan.pipelines[x.pipeline].samples, *(self._device[r] for r in x.ranks))
                  for m in mates for x in (self._entities[m],)),
                *(round(self._expert_s(e, block, -1, 0, phase) * NS_PER_S)
                  for block in blocks.values() for phase in ("forward", "backward")))
        x = self._entities[e]
        return (*(self._experts.held(x.replica, len(x.ranks), block.experts) for block in self._routes.values()),
                *self._crowds[mates[0]])

    def _expert_s(self, e: int, block: Block, mb: int, tokens: int, phase: str) -> float:
        """Seconds of the exchanges of rows in a layer of experts, routing even, while all others in the same nodes do
        the same. Rows come back the way they went. Of micro-batch `mb` this entity has so many `tokens`."""
        mates = self._mates(e)
        key = (mates[0], block.kind, phase, *(self._having(m, mb, tokens) for m in mates))
        if key not in self._rows_s:
            comms = [c for c in block.tensor_comm if c.routed and c.phase == phase]
            groups: dict[int, list[int]] = {}
            for m in mates:
                for rival in self._rivals(m):
                    theirs = self._mates(rival)
                    groups.setdefault(theirs[0], theirs)
            mine = groups[mates[0]]
            total = 0.0
            for comm in comms:
                loads = {id(group): self._rows(group, block, comm, [self._having(m, mb, tokens) for m in group])
                         for group in groups.values()}
                total += sum(self._beside_s(loads[id(mine)][way], [both[way] for both in loads.values()])
                             for way in (0, 1)) / 2
            self._rows_s[key] = total
        return self._rows_s[key]

    def _having(self, e: int, mb: int, tokens: int) -> int:
        """Tokens of an entity; those that share experts may have other micro-batches than the one that is looked at."""
        if self._experts.shared:
            return self._experts.tokens(self._entities[e].replica, mb)
        return tokens

    def _rows(self, group: list[int], block: Block, comm: TensorComm, tokens: list[int]) -> tuple[Loads, Loads]:
        """An exchange of rows among these entities, which have so many tokens, and the way back."""
        job, ports = self._job, Ports.of(self._cluster)
        entities = [self._entities[m] for m in group]
        ranks = tuple(r for x in entities for r in x.ranks)
        have = [even_rows(job, comm, n, len(x.ranks)) for x, n in zip(entities, tokens) for _ in x.ranks]
        held = [n for x in entities for n in self._experts.held(x.replica, len(x.ranks), block.experts)]
        if len(set(have)) == len(set(held)) == 1:
            one = ports.loads(comm.op, round(have[0]), ranks)
            return one, one
        messages = {(a, b): nbytes * n / block.experts for a, nbytes in zip(ranks, have)
                    for b, n in zip(ranks, held) if a != b and n}
        src, dst, nbytes = in_arrays(messages)
        return ports.exchange(src, dst, nbytes), ports.exchange(dst, src, nbytes)

    def _context_s(self, e: int, comm: TensorComm, micro_batch: int, tokens: int, whole: int) -> float:
        """Seconds of an exchange of keys and values of sequences of `whole` positions, of which this entity has
        `tokens`; the ranks of equal tensor index and other replicas' sequences exchange at the same time."""
        nbytes = tensor_bytes(comm, micro_batch, tokens, len(self._entities[e].ranks), self._job, whole / tokens)

        def groups(member: int) -> list[tuple[int, ...]]:
            return list(zip(*(self._entities[m].ranks for m in self._parts_of(member))))

        rivals = dict.fromkeys(self._parts_of(rival)[0] for m in self._parts_of(e) for rival in self._rivals(m))
        return self._together_s(comm, nbytes, groups(e)[0], [ranks for m in rivals for ranks in groups(m)])

    def _rivals(self, e: int) -> list[int]:
        """Entities of the same role with a rank in one of its nodes: their tensor groups talk at the same time."""
        entity = self._entities[e]
        nodes = {self._cluster.node_of[r] for r in entity.ranks}
        return sorted({other for node in nodes
                       for other in self._neighbours[entity.pipeline, entity.stage, node]})

    def _group(self, e: int) -> int:
        """Groups of one number have equally fast tensor-parallel communication."""
        if e not in self._group_of:
            ranks = self._entities[e].ranks
            nodes = {self._cluster.node_of[r] for r in ranks}
            key: tuple[object, ...] = ()
            if len(ranks) > 1 and len(nodes) == 1:
                node = self._cluster.nodes[nodes.pop()]
                key = (self._number(node.link), tuple(self._device[r] for r in ranks), len(self._rivals(e)),
                       self.tokens[e])
            elif len(ranks) > 1:  # what it takes tells them apart
                micro_batch = self._plan.pipelines[self._entities[e].pipeline].micro_batch
                comms = {b.kind: b.tensor_comm for lo, hi in self._stage(e).chunks
                         for b in self._job.model.blocks[lo:hi]}
                key = tuple(round(self._collective_s(e, comm, micro_batch, self.tokens[e]) * NS_PER_S)
                            for kind in comms for comm in comms[kind] if not (comm.routed and self._experts.shared))
            self._group_of[e] = self._groups.setdefault((self._entities[e].pipeline, self._entities[e].stage, key), e)
        return self._group_of[e]

    def _tensor_s(self, e: int, block: Block, micro_batch: int, tokens: int, phase: str) -> float:
        """Seconds of a block's collectives in the tensor group, all groups of the same role in its nodes at once."""
        key = (self._group(e), block.kind, micro_batch, tokens, phase)
        if key not in self._talk:
            self._talk[key] = sum(self._collective_s(e, comm, micro_batch, tokens)
                                  for comm in block.tensor_comm if comm.phase == phase and not comm.routed)
        return self._talk[key]

    def _collective_s(self, e: int, comm: TensorComm, micro_batch: int, tokens: int) -> float:
        ranks = self._entities[e].ranks
        nbytes = tensor_bytes(comm, micro_batch, tokens, len(ranks), self._job)
        return self._together_s(comm, nbytes, ranks, [self._entities[rival].ranks for rival in self._rivals(e)])

    def _together_s(self, comm: TensorComm, nbytes: int, ranks: tuple[int, ...],
                    everyone: list[tuple[int, ...]]) -> float:
        """Seconds of a collective of `ranks` while all of `everyone` do the same."""
        ports = Ports.of(self._cluster)
        return self._beside_s(ports.loads(comm.op, nbytes, ranks),
                              [ports.loads(comm.op, nbytes, others) for others in everyone])

    @staticmethod
    def _beside_s(own: Loads, everything: list[Loads]) -> float:
        """Seconds of a transfer while all of `everything`, which contains it, is under way."""
        passing = dict.fromkeys(own.ports.tolist(), 0.0)
        for other in everything:
            for port, seconds in zip(other.ports.tolist(), other.seconds.tolist()):
                if port in passing:
                    passing[port] += seconds
        return own.latency_s + own.turn_s + max(passing.values(), default=0.0)

    def _micro(self, e: int, mb: int) -> Micro | None:
        return None if self._batch is None else self._batch.micro[self._entities[e].replica][mb]

    def shapes(self, e: int, mb: int) -> tuple[tuple[object, ...], ...]:
        """What a micro-batch of the step's batch is to the clock: its own shape, and those of others that the entity
        goes in step with."""
        found = (self._micro(m, mb) for m in (self._in_step(e) if self._experts.shared else [e]))
        return tuple((len(micro.rows), *micro[1:]) for micro in found if micro is not None)

    def _run(self, e: int, lo: int, hi: int) -> int:
        """A number that blocks of a stage share with all that are equal to them."""
        x = self._entities[e]
        key = (x.pipeline, x.stage, lo, hi)
        if key not in self._runs:
            modes = self._stage(e).modes
            blocks = tuple((self._job.model.blocks[b].kind, modes.get(b)) for b in range(lo, hi))
            self._runs[key] = self._numbers.setdefault(blocks, len(self._numbers))
        return self._runs[key]

    def parts(self, e: int, action: Action, micro_batch: int) -> tuple[Part, ...]:
        """What a compute action is made of, in order; `micro_batch` are the samples that the entity has of it where
        rows are of `seq_len`."""
        if action.op in (F, B, I, W, AHEAD) or action.op in PARKS:
            if not micro_batch:
                return ()
            # All parts of a sequence take as long, but for what each adds up on its own device.
            one = self._parts_of(e)[0] if self._batch and not self._experts.shared and action.op not in PARKS else e
            blocks = (action.lo, action.hi) if action.op in PARKS else (self._run(e, action.lo, action.hi),)
            key: tuple[object, ...] = (self.kind(one), *(self._device[r] for r in self._entities[e].ranks), action.op,
                                       *blocks, self.shapes(one, action.mb) or micro_batch)
            if self._experts.shared:  # whose micro-batches may shrink apart
                key += tuple(self._experts.tokens(self._entities[m].replica, action.mb) for m in self._mates(e))
        elif action.op in (STEP, PUSH, PULL) or action.op in HOST:
            key = (e, action.op, self._alike[action.lo], action.mb < 0)
        elif action.op in (KEEP, ANTICIPATE, USE, DROP):
            key = (e, action.op, action.lo, action.hi)
        else:
            return ()
        if key not in self._known:
            first = self._alike[action.lo]
            made = (self._step(e, first) if action.op == STEP else self._wave(e, action.op, first)
                    if action.op in (PUSH, PULL) else self._copy(e, action, first) if action.op in HOST
                    else self._park(e, action, micro_batch) if action.op in PARKS
                    else self._blocks(e, action, micro_batch) if action.op in (F, B, I, W, AHEAD)
                    else self._version(e, action))
            self._known[key] = tuple(Part(c, ns) for c, s in made if (ns := round(s * NS_PER_S)))
        return self._known[key]

    def _blocks(self, e: int, action: Action, micro_batch: int) -> list[tuple[str, float]]:
        """A tensor group, all who hold parts of the same sequences, and in actions with layers of experts those who
        share these, go at the pace of the slowest device, block by block."""
        ranks, stage, job, parts = self._entities[e].ranks, self._stage(e), self._job, self._parts_of(e)
        blocks = job.model.blocks[action.lo:action.hi]
        meet = self._experts.shared and action.op != W and any(block.routed for block in blocks)
        together = self._in_step(e) if meet else parts
        devices = list({self._device[r]: self._cluster.devices[r] for r in ranks}.values())
        lengths = {m: self.tokens[m] for m in together}
        whole = dict.fromkeys(together, job.seq_len)
        segments: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        forward = backward = weight = recompute = tensor = expert = 0.0
        modes = stage.modes
        sizes = dict.fromkeys(together, micro_batch)
        if meet:
            sizes = {m: self._experts.tokens(self._entities[m].replica, action.mb) // self.tokens[m] for m in together}
        for m in together if self._batch else ():
            if micro := self._micro(m, action.mb):  # which is all of its samples
                sizes[m], lengths[m], whole[m] = len(micro.rows), micro.width, micro.whole or micro.width
                segments[m] = (micro.own, micro.segments) if micro.own else (micro.segments, ())
        kinds = {(self._device[r], x.replica if self._experts.shared else (lengths[m], segments.get(m))): (
            m, self._cluster.devices[r]) for m in together for x in (self._entities[m],) for r in x.ranks}
        for i in range(action.lo, action.hi):
            block = job.model.blocks[i]
            mode = modes.get(i, "none")
            costs = []
            for m, device in kinds.values():
                x, tokens = self._entities[m], lengths[m]
                share = self._experts.share(block, x.replica, len(x.ranks), action.mb)
                costs.append(held_cost(block, sizes[m], tokens, len(x.ranks), device, job, mode,
                                       whole[m] / tokens, share, *segments.get(m, ())))
            mine = self._experts.share(block, self._entities[e].replica, len(ranks), action.mb)
            talk = {phase: max(self._tensor_s(m, block, sizes[m], lengths[m], phase) for m in together)
                    if len(ranks) > 1 else 0.0 for phase in ("forward", "backward")}
            again = talk["forward"] if mode == "full" else 0.0
            costs = [c.among(talk["forward"], talk["backward"], again) for c in costs]
            forward += max(c.forward_s for c in costs)
            backward += max(c.backward_s for c in costs)
            weight += max(c.weight_s for c in costs)
            if self._plan.sharding.gradients == 1:
                adding = max(accumulate_s(block, len(ranks), d, job, mine) for d in devices)
                backward, weight = backward + adding, weight + adding
            recompute += max(c.recompute_s for c in costs)
            if action.op == W:
                continue
            ahead = action.op in (F, AHEAD)
            phases = ["forward"] * (ahead or mode == "full") + ["backward"] * (not ahead)
            if block.routed and (self._experts.shared or len(ranks) > 1):
                expert += sum(max(self._expert_s(m, block, action.mb, sizes[m] * lengths[m], phase) for m in together)
                              for phase in phases)
            tensor += sum(talk[phase] for phase in phases)
            if len(parts) > 1:
                tensor += sum(self._context_s(e, comm, sizes[e], lengths[e], whole[e]) for comm in block.context_comm
                              if (comm.phase == "forward" and (action.op == F or mode != "none"))
                              or (comm.phase == "backward" and action.op != F))
        if action.op in (F, AHEAD):
            return [("forward", forward), ("tensor", tensor), ("expert", expert)]
        if action.op == W:
            return [("backward", weight)]
        if action.op == I:
            backward -= weight
        return [("recompute", recompute), ("backward", backward), ("tensor", tensor), ("expert", expert)]

    def _copy(self, e: int, action: Action, unit: int) -> list[tuple[str, float]]:
        """Loading or saving a unit's weights or gradient, or the optimizer's state of the piece that a rank owns."""
        entity, op = self._entities[e], action.op
        sizes = [host_bytes(self._layout, self._job, unit, post, op, whole=action.mb < 0) for post in entity.posts]
        return [(HOST[op], max(host_copy_s(n, self._cluster.devices[r]) for r, n in zip(entity.ranks, sizes)))]

    def _parked(self, e: int, action: Action, micro_batch: int) -> dict[int, int]:
        """By rank, the bytes of what a block saves of a micro-batch and the host can keep."""
        entity, stage, job, b = self._entities[e], self._stage(e), self._job, action.lo
        tokens, context = self.tokens[e], job.seq_len / self.tokens[e]
        if micro := self._micro(e, action.mb):
            micro_batch, tokens = len(micro.rows), micro.width
            context = (micro.whole or micro.width) / micro.width
        share = self._experts.share(job.model.blocks[b], entity.replica, len(entity.ranks), action.mb)
        return {r: parked_bytes(job.model.blocks[b], micro_batch, tokens, len(entity.ranks), self._cluster.devices[r],
                                job, stage.modes[b], context, share, first=b == 0) for r in entity.ranks}

    def _park(self, e: int, action: Action, micro_batch: int) -> list[tuple[str, float]]:
        found = self._parked(e, action, micro_batch)
        return [(PARKS[action.op], max(host_copy_s(n, self._cluster.devices[r]) for r, n in found.items()))]

    def moved(self, e: int, action: Action, micro_batch: int) -> int:
        """Bytes that a copy between the devices of an entity and their host moves."""
        if action.op in PARKS and micro_batch:
            return sum(self._parked(e, action, micro_batch).values())
        if action.op not in HOST:
            return 0
        return sum(host_bytes(self._layout, self._job, self._alike[action.lo], post, action.op, whole=action.mb < 0)
                   for post in self._entities[e].posts)

    def _version(self, e: int, action: Action) -> list[tuple[str, float]]:
        """Copies of weights are made, exchanged with those in use, and predicted at the pace of the memory."""
        layout, entity, job = self._layout, self._entities[e], self._job
        units = layout.trained(action.lo, action.hi)
        slowest = 0.0
        for rank in entity.ranks:
            count, device = sum(layout.compute_elements(u, rank) for u in units), self._cluster.devices[rank]
            slowest = max(slowest, anticipate_s(count, device, job) if action.op == ANTICIPATE else
                          copy_s(count, device, job) * (2 if action.op == USE else 1))
        return [("optimizer", slowest)]

    def _host_of(self, rank: int) -> tuple[int, float]:
        """How many devices have their steps made by the host of this one, all at once, and what it can move."""
        node = self._cluster.node_of[rank]
        return (len({r for p in self._plan.pipelines for stage in p.stages if stage.hosted for r in stage.devices
                     if self._cluster.node_of[r] == node}), self._cluster.nodes[node].host_Bps)

    def _wave(self, e: int, op: str, unit: int) -> list[tuple[str, float]]:
        """A push takes the difference of two versions; a pull adds one, and what the worker has changed since."""
        entity = self._entities[e]
        times = 1 if op == PUSH else 2 + self._plan.synchronization.distance
        return [("optimizer", max(times * copy_s(self._layout.compute_elements(unit, post),
                                                 self._cluster.devices[rank], self._job)
                                  for rank, post in zip(entity.ranks, entity.posts)))]

    def _step(self, e: int, unit: int) -> list[tuple[str, float]]:
        layout, entity = self._layout, self._entities[e]
        slowest = 0.0
        same = len({self._device[r] for r in entity.ranks}) == 1
        for rank, post in zip(entity.ranks[-1:], entity.posts[-1:]) if same else zip(entity.ranks, entity.posts):
            owned = 0
            for column in layout.held(unit, post):
                lo, hi = layout.piece("optimizer", unit, column, entity.replica)
                owned += hi - lo
            device = self._cluster.devices[rank]
            slowest = max(slowest, host_step_s(owned, device, self._job, *self._host_of(rank))
                          if self._stage(e).hosted else optimizer_s(owned, device, self._job))
        return [("optimizer", slowest)]
