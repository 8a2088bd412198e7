"""What one pipeline of a plan is to a schedule: the seconds of its chunks and of the hops between them."""

from __future__ import annotations

from mixfleet.cluster import Cluster
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.program.action import SEND_ACT, SEND_GRAD, Action, B, F, I, W
from mixfleet.program.layout import Layout
from mixfleet.schedule.greedy import Work
from mixfleet.sim.pricing import Pricing
from mixfleet.sim.traffic import Traffic
from mixfleet.units import NS_PER_S


def work_of(plan: Plan, pipeline: int, job: Job, cluster: Cluster, *, split: bool) -> Work:
    """The work of a pipeline in seconds, from the prices of the simulator; of its replicas, and of those of a stage,
    the slowest counts.

    Transfers have their links to themselves; those of state are left out. `split` cuts backward in two.
    """
    layout = Layout(plan, job.model)
    traffic = Traffic(plan, job, cluster, layout)
    pricing = Pricing(plan, job, cluster, layout, traffic)
    pipe = plan.pipelines[pipeline]
    entities = [(e, entity) for e, entity in enumerate(traffic.entities) if entity.pipeline == pipeline]

    def seconds(op: str) -> tuple[float, ...]:
        return tuple(max(sum(part.ns for part in pricing.parts(e, Action(op, c.lo, c.hi),
                                                                 pipe.sizes(c.stage, entity.member)[0]))
                         for e, entity in entities if entity.stage == c.stage) / NS_PER_S for c in pipe.chain)

    def hop(block: int) -> float:
        found = [traffic.instances[i] for (e, kind), i in traffic.at.items()
                 if kind[:3] in ((SEND_ACT, pipeline, block), (SEND_GRAD, pipeline, block))]
        return max((i.latency_s + max((n / traffic.capacities[p] for p, n in i.demands), default=0.0) for i in found),
                   default=0.0)

    return Work(tuple(c.stage for c in pipe.chain), len(pipe.micro_batches), seconds(F),
                seconds(I if split else B), seconds(W) if split else (), tuple(hop(c.hi) for c in pipe.chain[:-1]))
