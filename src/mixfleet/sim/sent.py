"""Payload bytes that each rank sends in one step: the sums that the runtime's own counters must equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mixfleet.batching import Batch
from mixfleet.cost.memory import boundary_bytes
from mixfleet.job import Job
from mixfleet.model.spec import Block
from mixfleet.plan import Plan, Recompute
from mixfleet.program.action import (
    GATHER,
    PUBLISH,
    REDUCE,
    SEND_ACT,
    SEND_GRAD,
    SEND_KEPT,
    SYNC,
    Action,
    B,
    F,
    I,
    Program,
)
from mixfleet.program.layout import Layout
from mixfleet.sim.experts import Experts
from mixfleet.sim.traffic import Entity, shards, tensor_bytes

TENSOR, CONTEXT, EXPERT = "T", "K", "E"
Routing = Mapping[int, Mapping[str, Sequence[int]]]
"""Rows that each rank sent to each expert of a layer, in all forwards of a step, those that are done again included:
rank -> block -> rows by expert (`RankReport.routed`)."""
Sent = dict[str, int]
"""Bytes by operation: SA, SG, G, R, Y, P as in `program.action`, T for tensor-parallel collectives, K for keys and
values, and their gradients, under context parallelism, E for rows to experts and back."""


def bytes_sent(program: Program, plan: Plan, job: Job, layout: Layout, routing: Routing | None = None,
               batch: Batch | None = None) -> dict[str, Sent]:
    """By rank (as text), in a step whose micro-batches are those of `batch`, or rows of `seq_len`.

    State moves are counted from `Layout.moves`, messages between stages by sequence shard, tensor-parallel collectives
    as the runtime makes them, from shards sent directly. The few bytes of the norm are left out. Which rows go to which
    expert only the data say: with `routing`, what a run reports, its bytes are exact; without, every expert gets
    equally many rows."""
    found: dict[int, Counter[str]] = {rank: Counter() for rank in plan.ranks}
    experts = Experts(plan, job, batch)
    counted: set[tuple[object, ...]] = set()
    moved: dict[tuple[str, int], Counter[int]] = {}
    for role in (one.view(seat) for one in program.roles for seat in range(len(one.seats))):
        pipeline = plan.pipelines[role.pipeline]
        stages, sizes = pipeline.stages, pipeline.micro_batches
        first = plan.replicas.index((role.pipeline, 0))
        stage = stages[role.stage]
        copies = [(r, member) for r in range(pipeline.copies) for member in range(stage.members)]
        posts = [post for r, member in copies for post in plan.posts(role.pipeline, role.stage, r, member)]
        for action in role.actions:
            op = action.op
            if op in (SEND_ACT, SEND_GRAD, SEND_KEPT):
                block = job.model.blocks[action.lo - 1 if op == SEND_GRAD else action.hi - 1]
                for i, j, lo, hi in pipeline.meetings(role.stage, action.peer, action.mb % len(sizes)):
                    for r in range(pipeline.copies):
                        samples, length = hi - lo, pipeline.tokens(job.seq_len, r)
                        if batch:
                            micro = batch.micro[first + r][action.mb]
                            samples, length = len(micro.rows), micro.width
                        nbytes = boundary_bytes(block, samples, length, 1, job)
                        here = Entity(role.pipeline, role.stage, first + r, stage.ranks(r, i))
                        there = Entity(role.pipeline, action.peer, first + r, stages[action.peer].ranks(r, j))
                        for rank, _, n in shards(here, there, nbytes):
                            found[rank][op] += n
            elif op in (GATHER, PUBLISH, REDUCE, SYNC):
                if (op, action.lo) not in moved:
                    counts: Counter[int] = Counter()
                    moved[op, action.lo] = counts
                    element = job.bytes.weight_bytes if op in (GATHER, PUBLISH) else job.bytes.gradient_bytes
                    for move in layout.moves(op, action.lo):
                        if (move.src - move.dst) % plan.span:
                            counts[move.src] += (move.hi - move.lo) * element
                for post in posts:
                    found[post % plan.span][op] += moved[op, action.lo][post]
            elif op in (F, B, I):
                modes = stage.modes
                for r, member in copies if stage.tensor > 1 or pipeline.context > 1 else ():
                    samples = pipeline.sizes(role.stage, member)[action.mb % len(sizes)]
                    shape, whole = (samples, pipeline.tokens(job.seq_len, r), stage.tensor), job.seq_len
                    if batch:
                        micro = batch.micro[first + r][action.mb]
                        shape, whole = (len(micro.rows), micro.width, stage.tensor), micro.whole or micro.width
                    sent = Counter[str]()
                    for b in range(action.lo, action.hi):
                        sent += _inside(job.model.blocks[b], action, shape, whole, pipeline.context, job, modes[b])
                    for rank in stage.ranks(r, member):
                        found[rank].update(sent)
                for b in range(action.lo, action.hi):
                    block = job.model.blocks[b]
                    if not block.routed or (stage.tensor == 1 and not experts.shared):
                        continue
                    again = modes[b] == "full"
                    phases = ["forward"] if action.op == F else ["forward", "backward"] if again else ["backward"]
                    for r, member in copies:
                        samples = pipeline.sizes(role.stage, member)[action.mb % len(sizes)]
                        if not samples:
                            continue
                        tokens = samples * pipeline.tokens(job.seq_len, r)
                        if batch:
                            tokens = batch.micro[first + r][action.mb].positions
                        who = [(first + r, stage.ranks(r, member), tokens)]
                        if experts.shared:
                            who = [(k, plan.pipelines[p].stages[role.stage].ranks(q), experts.tokens(k, action.mb))
                                   for k in experts.mates(first + r) for p, q in (plan.replicas[k],)]
                        turn = (action.op == F, b, role.pipeline, r, member)
                        rows = routing if routing is None or turn not in counted else {}
                        counted.add(turn)
                        for rank, n in _exchanged(who, first + r, plan, job, experts, block, phases, rows,
                                                  again=again).items():
                            found[rank][EXPERT] += n
    return {str(rank): {op: n for op, n in counts.items() if n} for rank, counts in found.items()}


def _inside(block: Block, action: Action, shape: tuple[int, int, int], length: int, context: int, job: Job,
            recompute: Recompute) -> Counter[str]:
    """Bytes that each rank of a tensor group sends in the collectives of one block, by operation.

    Full recompute repeats those of the forward, selective the gather of keys and values. `shape` is micro-batch,
    positions of this part of a sequence of that length, and tensor degree.
    """
    sent: Counter[str] = Counter()
    for comm in block.tensor_comm:
        if comm.routed:
            continue
        times = comm.phase == "forward" if action.op == F else comm.phase == "backward" or recompute == "full"
        whole = tensor_bytes(comm, *shape, job)
        sent[TENSOR] += times * (2 if comm.op == "all_reduce" else 1) * (shape[2] - 1) * whole // shape[2]
    for comm in block.context_comm if context > 1 else ():
        times = comm.phase == "forward" if action.op == F else comm.phase == "backward" or recompute != "none"
        whole = tensor_bytes(comm, *shape, job, length / shape[1])
        mine = whole * shape[1] // length
        sent[CONTEXT] += times * ((context - 1) * mine if comm.op == "all_gather" else whole - mine)
    return sent


def _exchanged(who: Sequence[tuple[int, tuple[int, ...], int]], replica: int, plan: Plan, job: Job, experts: Experts,
               block: Block, phases: Sequence[str], routing: Routing | None, *, again: bool) -> Counter[int]:
    """Bytes that each rank of a replica's tensor group sends to bring rows of one micro-batch to experts and back, in
    each of `phases`. `who` has all replicas that share the experts: number, ranks, tokens.

    Rows of a whole step, as `routing` has them, count with the first micro-batch and are missing for others; `again`
    says that they contain those of forwards that are done twice.
    """
    one = next(c for c in block.tensor_comm if c.routed and not c.bytes_per_element)
    told = sum(c.bytes_per_element or 0 for c in block.tensor_comm if c.routed) * phases.count("forward")
    places: list[tuple[int, int, int, int, int]] = []  # rank, replica, first expert, one past the last, bytes of rows
    for k, ranks, tokens in who:
        at, have = plan.experts_of(k, block.experts)[0], tensor_bytes(one, 1, tokens, len(ranks), job)
        for rank, n in zip(ranks, experts.held(k, len(ranks), block.experts)):
            places.append((rank, k, at, at + n, have))
            at += n
    found: Counter[int] = Counter()
    for a, k, first, last, have in places:
        if k == replica:
            found[a] += told * (block.experts - (last - first))
        for b, q, lo, hi, _ in places:
            if a == b or replica not in (k, q):
                continue
            nbytes = have * (hi - lo) // block.experts
            if routing is not None:
                rows = sum(routing[a][block.name][lo:hi]) if a in routing else 0
                nbytes = rows * job.model.hidden * job.bytes.compute_bytes // (1 + again)
            for rank, whose in ((a, k), (b, q)):  # there, and as much back
                found[rank] += (whose == replica) * nbytes * len(phases)
    return found
