"""Payload bytes that each rank sends in one step: the sums that the runtime's own counters must equal."""

from __future__ import annotations

from collections import Counter

from mixfleet.cost.memory import boundary_bytes
from mixfleet.job import Job
from mixfleet.model.spec import Block
from mixfleet.plan import Plan
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SEND_ACT, SEND_GRAD, SYNC, Action, B, F, I, Program
from mixfleet.program.layout import Layout
from mixfleet.sim.traffic import Entity, shards, tensor_bytes

TENSOR = "T"
Sent = dict[str, int]
"""Bytes by operation: SA, SG, G, R, Y, P as in `program.action`, T for tensor-parallel collectives."""


def bytes_sent(program: Program, plan: Plan, job: Job, layout: Layout) -> dict[str, Sent]:
    """By rank (as text). State moves are counted from `Layout.moves`, messages between stages by sequence shard,
    tensor-parallel collectives as the runtime makes them, from shards sent directly. The few bytes of the norm are
    left out."""
    found: dict[int, Counter[str]] = {rank: Counter() for rank in plan.ranks}
    moved: dict[tuple[str, int], Counter[int]] = {}
    for role in program.roles:
        pipeline = plan.pipelines[role.pipeline]
        stages, sizes = pipeline.stages, pipeline.micro_batches
        first = plan.replicas.index((role.pipeline, 0))
        groups = [stages[role.stage].ranks(r) for r in range(pipeline.replicas)]
        for action in role.actions:
            op = action.op
            if op in (SEND_ACT, SEND_GRAD):
                block = job.model.blocks[action.hi - 1 if op == SEND_ACT else action.lo - 1]
                nbytes = boundary_bytes(block, sizes[action.mb], job.seq_len, 1, job)
                for r, ranks in enumerate(groups):
                    a = Entity(role.pipeline, role.stage, first + r, ranks)
                    b = Entity(role.pipeline, action.peer, first + r, stages[action.peer].ranks(r))
                    for rank, _, n in shards(a, b, nbytes):
                        found[rank][op] += n
            elif op in (GATHER, PUBLISH, REDUCE, SYNC):
                if (op, action.lo) not in moved:
                    counts: Counter[int] = Counter()
                    moved[op, action.lo] = counts
                    element = job.bytes.weight_bytes if op in (GATHER, PUBLISH) else job.bytes.gradient_bytes
                    for move in layout.moves(op, action.lo):
                        counts[move.src] += (move.hi - move.lo) * element
                for rank in (rank for ranks in groups for rank in ranks):
                    found[rank][op] += moved[op, action.lo][rank]
            elif op in (F, B, I) and stages[role.stage].tensor > 1:
                again = stages[role.stage].recompute == "full"
                nbytes = sum(_tensor_bytes(job.model.blocks[b], action, sizes[action.mb], stages[role.stage].tensor,
                                           job, again) for b in range(action.lo, action.hi))
                for rank in (rank for ranks in groups for rank in ranks):
                    found[rank][TENSOR] += nbytes
    return {str(rank): {op: n for op, n in counts.items() if n} for rank, counts in found.items()}


def _tensor_bytes(block: Block, action: Action, micro_batch: int, tensor: int, job: Job, again: bool) -> int:
    """Bytes that each rank of a tensor group sends for one block; full recompute repeats the forward's."""
    phases = ("forward",) if action.op == F else ("forward", "backward") if again else ("backward",)
    total = 0
    for comm in block.tensor_comm:
        if comm.phase in phases:
            whole = tensor_bytes(comm, micro_batch, tensor, job)
            total += (2 if comm.op == "all_reduce" else 1) * (tensor - 1) * whole // tensor
    return total
