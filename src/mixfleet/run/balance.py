"""Feedback control of the batch while training: replicas get samples in proportion to the speed that they show.

The controller is OmniLearn's (arXiv 2503.17469): a replica's next share is its present one times the mean time over its
own time, nothing changes inside a dead band, and the global batch stays what it is. A loss is a sum over samples of the
global batch, divided by their tokens, so any split has the same gradient. No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mixfleet.plan import Plan
from mixfleet.spec import Spec


class Rebalance(Spec, frozen=True, kw_only=True):
    """What the controller saw after a step, and what it did."""

    step: int
    seconds: tuple[float, ...]
    """Computing per step of every replica, since the last time."""
    before: tuple[int, ...]
    after: tuple[int, ...]
    """Samples per step of every replica."""
    why_not: str = ""
    """Why the new samples were not taken."""

    def __str__(self) -> str:
        slowest = max(range(len(self.seconds)), key=lambda k: self.seconds[k])
        what = f"samples {'+'.join(map(str, self.after))} instead of {'+'.join(map(str, self.before))}"
        if self.why_not:
            what = f"not {what}: {self.why_not}"
        return f"{what} (replica {slowest} computes longest, {self.seconds[slowest]:.3g} s)"


def rebalance(samples: Sequence[int], seconds: Sequence[float], *, band: float = 0.1, least: int = 1,
              most: int | None = None) -> tuple[int, ...]:
    """Samples for the next steps from those of the last and the seconds they took, with the same sum.

    Unchanged while every replica would change by less than `band` of its new share. What the bounds `least` and `most`
    cut off goes to the others. The sum of the bounds must allow the sum.
    """
    total, top = sum(samples), most or sum(samples)
    speeds = [b / t for b, t in zip(samples, seconds)]
    fixed: dict[int, int] = {}
    while True:
        free = [k for k in range(len(samples)) if k not in fixed]
        left, together = total - sum(fixed.values()), sum(speeds[k] for k in free)
        wanted = {k: left * speeds[k] / together for k in free}
        over = {k: top for k in free if wanted[k] > top}
        under = {k: least for k in free if wanted[k] < least}
        if not over and not under:
            break
        excess = sum(wanted[k] - top for k in over) - sum(least - wanted[k] for k in under)
        fixed |= over if excess > 0 else under if excess < 0 else over | under
    whole = fixed | {k: int(wanted[k]) for k in free}
    for k in sorted(free, key=lambda k: (int(wanted[k]) - wanted[k], k))[:total - sum(whole.values())]:
        whole[k] += 1
    new = tuple(whole[k] for k in range(len(samples)))
    calm = all(abs(a - b) < band * a for a, b in zip(new, samples))
    return tuple(samples) if calm else new


def apart(plan: Plan) -> Plan:
    """The same plan with every replica as a pipeline of its own, so that each can take its own samples."""
    return plan.replace(pipelines=tuple(
        pipeline.replace(replicas=1, stages=tuple(
            s.replace(devices=s.devices[r * len(s.devices) // pipeline.replicas:
                                        (r + 1) * len(s.devices) // pipeline.replicas]) for s in pipeline.stages))
        for pipeline in plan.pipelines for r in range(pipeline.replicas)))


def with_samples(plan: Plan, samples: Sequence[int]) -> Plan:
    """A plan of single replicas with other samples. Micro-batches keep their size, so that memory does.

    Where replicas exchange at every micro-batch, or share experts, they need equally many: as many as now, or the next
    number that works.
    """
    sizes = [min(p.micro_batch, n) for p, n in zip(plan.pipelines, samples)]
    if (plan.sharding.gradients > 1 and plan.accumulation == "plain") or plan.expert > 1:
        now = min(len(plan.pipelines[0].micro_batches), min(samples))
        count = next(c for c in (*range(now, min(samples) + 1), *range(now, 0, -1))
                     if all(-(-n // -(-n // c)) == c for n in samples))
        sizes = [-(-n // count) for n in samples]
    return plan.replace(pipelines=tuple(
        p.replace(samples=n, micro_batch=size) for p, n, size in zip(plan.pipelines, samples, sizes)))
