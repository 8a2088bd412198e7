"""Payload bytes that each rank sends in one step: the sums that the runtime's own counters must equal."""

from __future__ import annotations

from mixfleet.cost.memory import boundary_bytes
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SEND_ACT, SEND_GRAD, SYNC, Program
from mixfleet.program.layout import Layout
from mixfleet.sim.traffic import Entity, shards

Sent = dict[str, int]
"""Bytes by category: `send`, `gather`, `reduce`."""


def bytes_sent(program: Program, plan: Plan, job: Job, layout: Layout) -> dict[str, Sent]:
    """By rank (as text). State moves count element by element as `Layout.moves` has them, messages between stages by
    sequence shard; the exchange of norms and tensor-parallel collectives, which a library may do in several ways, are
    left out."""
    found: dict[str, Sent] = {str(rank): {} for rank in plan.ranks}

    def add(rank: int, category: str, nbytes: int) -> None:
        row = found[str(rank)]
        row[category] = row.get(category, 0) + nbytes

    per_unit: dict[tuple[str, int], dict[int, int]] = {}
    for role in program.roles:
        pipeline = plan.pipelines[role.pipeline]
        stages, sizes = pipeline.stages, pipeline.micro_batches
        first = plan.replicas.index((role.pipeline, 0))
        for action in role.actions:
            if action.op in (SEND_ACT, SEND_GRAD):
                boundary = action.hi - 1 if action.op == SEND_ACT else action.lo - 1
                nbytes = boundary_bytes(job.model.blocks[boundary], sizes[action.mb], job.seq_len, 1, job)
                for r in range(pipeline.replicas):
                    a, b = (Entity(role.pipeline, s, first + r, stages[s].ranks(r)) for s in (role.stage, action.peer))
                    for x, _, n in shards(a, b, nbytes):
                        add(x, "send", n)
            elif action.op in (GATHER, PUBLISH, REDUCE, SYNC):
                key = (action.op, action.lo)
                weights = action.op in (GATHER, PUBLISH)
                if key not in per_unit:
                    element = job.bytes.weight_bytes if weights else job.bytes.gradient_bytes
                    per_unit[key] = {}
                    for move in layout.moves(*key):
                        per_unit[key][move.src] = per_unit[key].get(move.src, 0) + (move.hi - move.lo) * element
                for r in range(pipeline.replicas):
                    for rank in stages[role.stage].ranks(r):
                        if rank in per_unit[key]:
                            add(rank, "gather" if weights else "reduce", per_unit[key][rank])
    return found
