"""What a device holds as simulated time goes on: each action allocates at its start and frees at its end.

A forward keeps what its backward needs (by recompute mode), a backward brings back what recompute had dropped and
frees both (a split one at the end of its weight half); gathers hold weights until their release, copies of weights
are there until they are dropped, and sharded gradients have a buffer until hop 1 has taken it. Messages are held from
the start of a receive to its use, and from their making to the end of a send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from mixfleet.cluster import Cluster, Device
from mixfleet.cost.memory import (
    allocator_factor,
    boundary_bytes,
    framework_bytes,
    optimizer_temporary_bytes,
    parked_bytes,
    recompute_bytes,
    saved_bytes,
    state_bytes,
    workspace_bytes,
)
from mixfleet.job import Job
from mixfleet.plan import Plan, Sharding
from mixfleet.program.action import (
    AHEAD,
    ANTICIPATE,
    AWAIT_PARKED,
    DROP,
    FREE_GRAD,
    FREE_STATE,
    FREE_WEIGHTS,
    GATHER,
    JOINT,
    KEEP,
    LOAD_GRAD,
    LOAD_SAVED,
    LOAD_STATE,
    LOAD_UPDATED,
    LOAD_WEIGHTS,
    PARK_SAVED,
    PULL,
    PUSH,
    RECV_ACT,
    RECV_GRAD,
    RECV_KEPT,
    REDUCE,
    RELEASE,
    SEND_ACT,
    SEND_GRAD,
    SEND_KEPT,
    STEP,
    SYNC,
    Action,
    B,
    F,
    I,
    W,
    boundary,
)
from mixfleet.program.layout import Kind, Layout
from mixfleet.sim.experts import Experts
from mixfleet.sim.interpreter import Row
from mixfleet.sim.pricing import host_bytes
from mixfleet.sim.traffic import alike

HOLDS = ("weights", "gradients", "master", "moments", "activations", "messages", "gathered weights",
         "gradient buffers", "recomputed", "workspace", "optimizer temporaries", "loaded state", "offloaded state",
         "weight versions", "offloaded activations")
"""What tensors are held for. A breakdown has besides `framework` and `allocator`."""
_WEIGHTS, _GRADIENTS, _MASTER, _MOMENTS, _SAVED, _MESSAGES, _GATHERED = range(7)
_BUFFERS, _AGAIN, _WORK, _OPTIMIZER, _LOADED, _AWAY, _VERSIONS, _PARKED = range(7, 15)


class Peak(NamedTuple):
    """The most that a device holds, in bytes taken from it, and when that begins."""

    total_bytes: int
    time_ns: int
    action: Action | None
    """What begins then; None where the state alone is the peak."""
    breakdown: dict[str, int]


class Memory(NamedTuple):
    """Of one device: the peaks of a resumed run and of the first step of a fresh one, and all changes of the first."""

    resumed: Peak
    fresh: Peak
    marks: list[tuple[int, int, int]]
    """(ns, bytes, index of the action that begins or ends, -1 for none) in order of time, one per instant."""
    parked: int = 0
    """The most bytes of activations that lie in host memory at a time."""


class Static(NamedTuple):
    """Bytes of state that a rank holds all the time."""

    weights: int
    gradients: int
    master: int
    moments: int


def static(layout: Layout, job: Job, rank: int) -> Static:
    """State of a rank (or one of its posts), moments in place. A piece that lies outside the one it is made from needs
    its own buffer."""
    place = layout.places[rank]
    own = updated = 0
    totals = {"weights": 0, "gradients": 0, "optimizer": 0}
    like = alike(layout)
    copies = Counter(like[u] for u in layout.units_of_stage(place.pipeline, place.stage))
    for u, n in copies.items():
        held = layout.held(u, rank)
        pieces = {kind: [layout.piece(kind, u, c, place.replica) for c in held] for kind in _KINDS}
        for kind in _KINDS:
            totals[kind] += n * sum(hi - lo for lo, hi in pieces[kind])
        owned = n * sum(hi - lo for lo, hi in pieces["optimizer"])
        own += 0 if _inside(pieces["optimizer"], pieces["gradients"]) else owned
        updated += 0 if _inside(pieces["optimizer"], pieces["weights"]) else owned
    away = layout.plan.pipelines[place.pipeline].stages[place.stage].offload
    weights = 0 if "weights" in away else totals["weights"] + updated
    gradients = 0 if "gradients" in away else totals["gradients"] + own
    state = state_bytes(job, weights, gradients, totals["optimizer"])
    if "optimizer" in away:
        return Static(*state[:2], 0, 0)
    return Static(*state[:3], _moments(layout, job, totals["optimizer"]))


def offloaded(layout: Layout, job: Job, post: int) -> int:
    """Bytes of state that a post keeps in host memory."""
    place = layout.places[post]
    away = layout.plan.pipelines[place.pipeline].stages[place.stage].offload
    total = 0
    for u in layout.units_of_stage(place.pipeline, place.stage):
        total += host_bytes(layout, job, u, post, LOAD_WEIGHTS) if "weights" in away else 0
        total += host_bytes(layout, job, u, post, LOAD_STATE) if "optimizer" in away else 0
        if "gradients" in away:
            total += sum(host_bytes(layout, job, u, post, LOAD_GRAD, whole=whole)
                         for whole in ([False, True] if layout.apart(u, post) else [False]))
        if layout.fetches_updated(u, away):
            total += host_bytes(layout, job, u, post, LOAD_UPDATED)
    return total


def _moments(layout: Layout, job: Job, elements: int) -> int:
    """Bytes of moments; plain SGD keeps its last gradient where weights are predicted from it."""
    weights = layout.plan.weights
    if weights and weights.predicts and not job.optimizer.moments:
        job = job.replace(optimizer=job.optimizer.replace(momentum=1.0))
    return state_bytes(job, 0, 0, elements).moments


_KINDS: tuple[Kind, ...] = ("weights", "gradients", "optimizer")


def _inside(parts: Iterable[tuple[int, int]], wholes: Iterable[tuple[int, int]]) -> bool:
    return all(a <= lo and hi <= b for (lo, hi), (a, b) in zip(parts, wholes) if lo < hi)


def communicators(plan: Plan, pipeline: int, stage: int) -> int:
    """Process groups of a rank that hold buffers: all ranks, its tensor, context and expert groups, all replicas,
    partition groups."""
    pipe = plan.pipelines[pipeline]
    return (1 + (pipe.stages[stage].tensor > 1) + (pipe.context > 1) + (plan.expert > 1)
            + replica_groups(plan.sharding, len(plan.replicas)))


def replica_groups(sharding: Sharding, replicas: int) -> int:
    """Of these the groups of a rank over replicas: all of them, and partition groups."""
    return (replicas > 1) + len({sharding.weights, sharding.gradients, sharding.optimizer} - {1, replicas})


def follow(row: Row, rank: int, plan: Plan, job: Job, cluster: Cluster, layout: Layout) -> Memory:
    """Memory of `rank`, one of the row's entity, through the step."""
    device = cluster.devices[rank]
    groups = communicators(plan, row.entity.pipeline, row.entity.stage)
    posts = [seat.posts[seat.ranks.index(rank)] for seat in row.seats]
    events = sorted(event for seat, post in enumerate(posts)
                    for event in _Walk(row, seat, post, plan, job, device, layout).events())
    state = Static(*map(sum, zip(*(static(layout, job, post) for post in posts))))
    parked = max(accumulate((nbytes for _, nbytes, what, _ in events if what == _PARKED), initial=0))
    if device.kind == "cpu":  # what is offloaded stays in the same memory
        events = [(0, sum(offloaded(layout, job, post) for post in posts), _AWAY, -1), *events]
    elif parked:
        events = [event for event in events if event[2] != _PARKED]
    return _peaks(events, state, row, allocator_factor(device), framework_bytes(device, groups))._replace(parked=parked)


Event = tuple[int, int, int, int]
"""(ns, bytes, index of `HOLDS`, action): frees sort before allocations of the same instant."""


def _peaks(events: list[Event], state: Static, row: Row, factor: float, framework: int) -> Memory:
    """Follows a resumed run, which holds its moments all along, and the first step of a fresh one, which makes them."""
    held = [*state, *[0] * (len(HOLDS) - len(state))]
    total = sum(held)
    missing = state.moments
    most, fresh = (total, 0, -1, list(held)), (total - missing, 0, -1, [*held[:_MOMENTS], 0, *held[_MOMENTS + 1:]])
    marks = [(0, round(total * factor) + framework, -1)]
    last = len(events) - 1
    for i, (ns, nbytes, what, action) in enumerate(events):
        if what == _MOMENTS:
            missing -= nbytes
        else:
            held[what] += nbytes
            total += nbytes
        if total > most[0]:
            most = (total, ns, action, list(held))
        if total - missing > fresh[0]:
            fresh = (total - missing, ns, action, list(held))
            fresh[3][_MOMENTS] -= missing
        if i == last or events[i + 1][0] != ns:
            marks.append((ns, round(total * factor) + framework, action))

    def peak(allocated: int, ns: int, action: int, snapshot: list[int]) -> Peak:
        taken = round(allocated * factor)
        breakdown = {name: n for name, n in zip(HOLDS, snapshot) if n}
        breakdown |= {name: n for name, n in (("framework", framework), ("allocator", taken - allocated)) if n}
        return Peak(taken + framework, ns, row.actions[action] if action >= 0 else None, breakdown)

    return Memory(peak(*most), peak(*fresh), marks)


class _Walk:
    """The allocations of one seat of a row, as seen by one of its ranks."""

    def __init__(self, row: Row, seat: int, post: int, plan: Plan, job: Job, device: Device, layout: Layout) -> None:
        self._row, self._post, self._job, self._device, self._layout = row, post, job, device, layout
        self._entity = row.seats[seat]
        self._mine = [i for i, a in enumerate(row.actions) if a.seat in (seat, JOINT)]
        self._pipe = plan.pipelines[self._entity.pipeline]
        self._stage = self._pipe.stages[self._entity.stage]
        self._tokens = self._pipe.tokens(job.seq_len, plan.replicas[self._entity.replica][1])
        self._modes = self._stage.modes
        self._experts = Experts(plan, job)
        self._known: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._alike = alike(layout)
        self._edges: dict[tuple[int, int], int] = {}
        self._elements: dict[int, tuple[int, int]] = {}
        self._layered = plan.accumulation == "layered"
        self._banks = "gradients" in self._stage.offload
        self._reduced = {row.actions[i].lo for i in self._mine if row.actions[i].op == REDUCE}

    def _blocks(self, action: Action, micro_batch: int, *, frees: bool = False) -> tuple[int, int, int]:
        """(saved, workspace, recomputed) bytes of blocks that compute one after another, where they hold most.

        With `frees` the last block goes first and each gives back what it saved before the next begins; workspace then
        is what remains of it beyond what is free by that time.
        """
        lo, hi, replica, degree = action.lo, action.hi, self._entity.replica, self._stage.tensor
        first = next((b for b in self._job.model.blocks[lo:hi] if b.routed), None) if self._experts.shared else None
        key = (lo, hi, micro_batch, frees, self._experts.share(first, replica, degree, action.mb) if first else None)
        if key not in self._known:
            stage, job, device, modes = self._stage, self._job, self._device, self._modes
            shape, context = (micro_batch, self._tokens, stage.tensor), job.seq_len / self._tokens
            sizes: dict[tuple[object, ...], tuple[int, int, int]] = job.__dict__.setdefault("_block_bytes", {})
            saved = work = again = 0
            for b in reversed(range(lo, hi)):
                block, mode = job.model.blocks[b], modes.get(b, "none")
                experts = self._experts.share(block, replica, degree, action.mb)
                one = sizes.get(kind := (block.kind, *shape, device, mode, context, experts))
                if one is None:
                    one = sizes[kind] = (saved_bytes(block, *shape, device, job, mode, context, experts),
                                         workspace_bytes(block, *shape, device, job, context, experts),
                                         recompute_bytes(block, *shape, device, job, mode, context, experts))
                mine = (max(0, one[1] - saved), max(0, one[2] - max(0, saved - one[1]))) if frees else one[1:]
                work, again = max((work, again), mine, key=sum) if frees else (max(work, one[1]), max(again, one[2]))
                saved += one[0]
            self._known[key] = (saved, work, again)
        return self._known[key]

    def _park(self, action: Action, micro_batch: int) -> int:
        """Bytes that the host keeps of a block and micro-batch."""
        block, b = self._job.model.blocks[action.lo], action.lo
        share = self._experts.share(block, self._entity.replica, self._stage.tensor, action.mb)
        return parked_bytes(block, micro_batch, self._tokens, self._stage.tensor, self._device, self._job,
                            self._modes[b], self._job.seq_len / self._tokens, share, first=b == 0)

    def _certainly_away(self) -> dict[int, int]:
        """Per EA, when what it moves has left the device however slow copies are: when something is computed that
        waits for it or for what comes back behind it in its stream. So the peak does not depend on their speed."""
        row, found, upto = self._row, dict[int, int](), 0
        if not self._stage.offload_blocks:
            return found
        leaving: list[int] = []
        place: dict[tuple[int, int], int] = {}
        behind: dict[tuple[int, int], int] = {}
        for i in self._mine:
            action, key = row.actions[i], (row.actions[i].lo, row.actions[i].mb)
            if action.op == PARK_SAVED:
                place[key] = len(leaving)
                leaving.append(i)
            elif action.op == LOAD_SAVED:
                behind[key] = len(leaving)
            sure = place[key] + 1 if action.op == AWAIT_PARKED else behind.pop(key, 0) if action.op in (B, I) else 0
            for j in leaving[upto:sure]:
                found[j] = min(found.get(j, row.start_ns[i]), row.start_ns[i])
            upto = max(upto, sure)
        return found

    def _boundary(self, block: int, micro_batch: int) -> int:
        """Bytes of the output of a block, in the shards of this stage."""
        job, key = self._job, (block, micro_batch)
        if key not in self._edges:
            self._edges[key] = boundary_bytes(job.model.blocks[block], micro_batch, self._tokens, self._stage.tensor,
                                              job)
        return self._edges[key]

    def _unit(self, unit: int) -> tuple[int, int]:
        """Elements of a unit that the rank computes with, and those whose optimizer state it owns."""
        first = self._alike[unit]
        if first not in self._elements:
            layout, replica = self._layout, self._entity.replica
            pieces = [layout.piece("optimizer", first, c, replica) for c in layout.held(first, self._post)]
            self._elements[first] = (layout.compute_elements(first, self._post), sum(hi - lo for lo, hi in pieces))
        return self._elements[first]

    def _gradient(self, unit: int) -> int:
        return self._unit(unit)[0] * self._job.bytes.gradient_bytes

    def _summed(self, unit: int, *, whole: bool) -> int:
        """Bytes of a gradient that goes to the host: what is summed up, or what is owned of the whole one."""
        return host_bytes(self._layout, self._job, self._alike[unit], self._post, LOAD_GRAD, whole=whole)

    def _touched(self, action: Action) -> Iterator[tuple[int, bool]]:
        """Units whose gradient an action makes or brings here, and whether that is the whole one."""
        op, layout = action.op, self._layout
        if op in (B, I, W):
            for b in range(action.lo, action.hi):
                yield from ((u, False) for u in layout.units_of_block[b]
                            if not layout.units[u].frozen and not layout.needed(REDUCE, u))
        elif op == REDUCE or (op == LOAD_GRAD and action.mb >= 0):
            yield action.lo, False
        elif op == LOAD_GRAD or (op == SYNC and layout.apart(action.lo, self._post)):
            yield action.lo, True

    def events(self) -> list[Event]:
        """All changes; those of moments are what a fresh run makes in its first step."""
        row = self._row
        one = self._pipe.sizes(self._entity.stage, self._entity.member)
        sizes = one * (1 + max((a.mb for a in row.actions if a.op == F), default=0) // len(one))
        found: list[Event] = []
        add = found.append
        waiting: dict[tuple[str, int, int], int] = {}
        buffers: set[int] = set()
        stepped: set[int] = set()
        agreed: set[int] = set()
        here: dict[tuple[int, bool], int] = {}  # gradients that go to the host
        away, going = self._certainly_away(), list[list[int]]()
        sent = {(a.op, boundary(a)) for a in map(row.actions.__getitem__, self._mine) if a.op in (SEND_ACT, SEND_GRAD)}
        if self._layered:  # what one block hands to the next waits for it as a message would
            inner = range(1, len(self._job.model.blocks))
            sent |= {(op, b) for b in inner for op in (SEND_ACT, SEND_GRAD) if op == SEND_ACT or b > self._layout.floor}
        entry, back = (SEND_ACT, SEND_GRAD) if self._layered else (RECV_ACT, RECV_GRAD)
        for i in self._mine:
            action, start, end = row.actions[i], row.start_ns[i], row.end_ns[i]
            op, mb = action.op, action.mb
            for key in self._touched(action) if self._banks else ():
                if key not in here:
                    here[key] = nbytes = self._summed(key[0], whole=key[1])
                    add((start, nbytes, _GRADIENTS, i))
            if op in (F, RECV_ACT, RECV_GRAD, SEND_ACT, SEND_GRAD) and not sizes[mb]:
                continue  # another replica of the stage has all of it
            if op == F:
                saved, work, _ = self._blocks(action, sizes[mb])
                add((start, saved, _SAVED, i))
                add((start, work, _WORK, i))
                add((end, -work, _WORK, i))
                for kind in (entry, AHEAD, RECV_KEPT):
                    if (kind, action.lo, mb) in waiting:
                        add((start, -waiting.pop((kind, action.lo, mb)), _MESSAGES, i))
                if (SEND_ACT, action.hi) in sent:
                    waiting[SEND_ACT, action.hi, mb] = nbytes = self._boundary(action.hi - 1, sizes[mb])
                    add((end, nbytes, _MESSAGES, i))
            elif op in (B, I, W):
                saved, work, again = self._blocks(action, sizes[mb], frees=op == B) if sizes[mb] else (0, 0, 0)
                for change, what in ((work, _WORK), (again, _AGAIN)):
                    if change and op != W:
                        add((start, change, what, i))
                        add((end, -change, what, i))
                if op != I:
                    add((end, -saved, _SAVED, i))
                for b in range(action.lo, action.hi):
                    for u in self._layout.units_of_block[b]:
                        if u in self._reduced and u not in buffers:
                            buffers.add(u)
                            add((start, self._gradient(u), _BUFFERS, i))
                if (back, action.hi, mb) in waiting:
                    add((end, -waiting.pop((back, action.hi, mb)), _MESSAGES, i))
                if (SEND_GRAD, action.lo) in sent and op != W and sizes[mb]:
                    waiting[SEND_GRAD, action.lo, mb] = nbytes = self._boundary(action.lo - 1, sizes[mb])
                    add((end, nbytes, _MESSAGES, i))
            elif op in (PARK_SAVED, LOAD_SAVED):
                nbytes = self._park(action, sizes[mb])
                if op == PARK_SAVED:
                    add((start, nbytes, _PARKED, i))
                    add((away.get(i, end), -nbytes, _SAVED, i))
                    going.append([away.get(i, end), nbytes])
                else:  # where others before it may not have gone yet, it has not come either
                    add((end, -nbytes, _PARKED, i))
                    for other in going:
                        part = min(nbytes, other[1]) if other[0] > start else 0
                        if part:
                            add((other[0], part, _SAVED, i))
                            other[1] -= part
                            nbytes -= part
                    add((start, nbytes, _SAVED, i))
                    going = [other for other in going if other[1]]
            elif op == AHEAD:
                # One block after another: what is made and, inside a block, what a forward needs at a time.
                work = max(saved + work for b in range(action.lo, action.hi) for saved, work, _ in (
                    self._blocks(action._replace(lo=b, hi=b + 1), sizes[mb]),))
                add((start, work, _WORK, i))
                add((end, -work, _WORK, i))
                for kind in (RECV_ACT, AHEAD):
                    add((end, -waiting.pop((kind, action.lo, mb), 0), _MESSAGES, i))
                nbytes = self._boundary(action.hi - 1, sizes[mb])
                for kind in (SEND_ACT if (SEND_ACT, action.hi) in sent else AHEAD,
                             *([RECV_KEPT] if action.hi in self._pipe.entries else [])):
                    waiting[kind, action.hi, mb] = nbytes
                    add((end, nbytes, _MESSAGES, i))
            elif op == RECV_KEPT:
                waiting[RECV_KEPT, action.lo, mb] = nbytes = self._boundary(action.lo - 1, sizes[mb])
                add((start, nbytes, _MESSAGES, i))
            elif op == SEND_KEPT:
                add((end, -waiting.pop((RECV_KEPT, action.hi, mb), 0), _MESSAGES, i))
            elif op in (RECV_ACT, RECV_GRAD):
                waiting[op, boundary(action), mb] = nbytes = self._boundary(boundary(action) - 1, sizes[mb])
                add((start, nbytes, _MESSAGES, i))
            elif op in (SEND_ACT, SEND_GRAD):
                add((end, -waiting.pop((op, boundary(action), mb), 0), _MESSAGES, i))
            elif op in (GATHER, RELEASE):
                nbytes = self._unit(action.lo)[0] * self._job.bytes.weight_bytes
                add((start, nbytes, _GATHERED, i) if op == GATHER else (end, -nbytes, _GATHERED, i))
            elif op in (LOAD_WEIGHTS, LOAD_STATE):
                add((start, host_bytes(self._layout, self._job, self._alike[action.lo], self._post, op), _LOADED, i))
            elif op == FREE_GRAD:
                for whole in (False, True):
                    add((end, -here.pop((action.lo, whole), 0), _GRADIENTS, i))
            elif op in (FREE_WEIGHTS, FREE_STATE):
                kind = LOAD_WEIGHTS if op == FREE_WEIGHTS else LOAD_STATE
                add((end, -host_bytes(self._layout, self._job, self._alike[action.lo], self._post, kind), _LOADED, i))
            elif op == REDUCE and action.lo in buffers:
                buffers.remove(action.lo)
                add((end, -self._gradient(action.lo), _BUFFERS, i))
            elif op == STEP:
                owned = self._unit(action.lo)[1]
                if "optimizer" not in self._stage.offload and action.lo not in stepped:
                    stepped.add(action.lo)
                    add((start, _moments(self._layout, self._job, owned), _MOMENTS, i))
                nbytes = optimizer_temporary_bytes(owned, self._job)
                if nbytes and not (self._stage.hosted and self._device.kind != "cpu"):
                    add((start, nbytes, _OPTIMIZER, i))
                    add((end, -nbytes, _OPTIMIZER, i))
            elif op in (PUSH, PULL):  # what is pushed stays until the sum has come in its place, both together
                nbytes = 2 * self._gradient(action.lo)
                add((start, nbytes, _VERSIONS, i) if op == PUSH else (end, -nbytes, _VERSIONS, i))
                if op == PUSH and action.lo not in agreed:
                    agreed.add(action.lo)
                    based = self._unit(action.lo)[0] * (self._job.bytes.master_bytes or self._job.bytes.weight_bytes)
                    add((0, based, _VERSIONS, i))
            elif op in (KEEP, ANTICIPATE, DROP):
                units = self._layout.trained(action.lo, action.hi)
                nbytes = sum(self._unit(u)[0] for u in units) * self._job.bytes.weight_bytes
                add((end, -nbytes, _VERSIONS, i) if op == DROP else (start, nbytes, _VERSIONS, i))
        return found
