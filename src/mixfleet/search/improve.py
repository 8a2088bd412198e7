"""Small changes of a plan: the steps of the local search, and the way out when a plan lacks memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations
from math import gcd

from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, ScheduleName, Stage
from mixfleet.search.tables import MODES
from mixfleet.search.variants import laid, schedules

Change = Callable[[Pipeline], Pipeline | None]


def neighbours(plan: Plan, job: Job, node_of: Sequence[int] = (), names: Sequence[ScheduleName] = (), *,
               state: bool = True, place_of: Sequence[object] = ()) -> Iterator[Plan]:
    """Plans that differ in one setting. Pipelines with equal stages (parts of one team) change together.

    `node_of` tells the node of each rank: gathers over several nodes may then go in stages. Stages of several chunks
    change as if they had one each, and are cut for their schedule again. `names` are the schedules allowed, if not any.
    Without `state` the degrees of sharding stay. `place_of` says of each rank what tells its device from others: stages
    may then exchange unlike ones.
    """
    flat = laid(plan, "1f1b") if any(s.more for p in plan.pipelines for s in p.stages) else plan
    for other in _moves(flat, node_of, place_of) if isinstance(flat, Plan) else ():
        again = other if flat is plan else laid(other, plan.schedule, len(plan.pipelines[0].stages[0].chunks))
        if isinstance(again, Plan):
            yield again
    yield from _experts(plan, job)
    if state:
        yield from _degrees(plan)
    yield from dealt(plan)
    yield from schedules(plan, names)


def _moves(plan: Plan, node_of: Sequence[int], place_of: Sequence[object]) -> Iterator[Plan]:
    for cuts in dict.fromkeys(_look(p) for p in plan.pipelines):
        first = next(p for p in plan.pipelines if _look(p) == cuts)
        for i in range(len(first.stages) - 1):
            for step in (-1, 1):
                yield from _changed(plan, cuts, lambda p, i=i, step=step: _moved(p, i, step))  # type: ignore[misc]
        for i, stage in enumerate(first.stages):
            for step in (-1, 1):
                mode = MODES.index(stage.recompute) + step if isinstance(stage.recompute, str) else -1
                if 0 <= mode < len(MODES):
                    yield from _changed(plan, cuts, lambda p, i=i, mode=mode: _staged(  # type: ignore[misc]
                        p, i, recompute=MODES[mode]))
            for kind in stage.offload:
                rest = tuple(other for other in stage.offload if other != kind)
                yield from _changed(plan, cuts, lambda p, i=i, rest=rest: _staged(p, i, offload=rest))  # type: ignore[misc]
        for i, j in combinations(range(len(first.stages)), 2) if place_of else ():
            here, there = first.stages[i], first.stages[j]
            if (here.tensor, here.members) == (there.tensor, there.members) and [
                    place_of[r] for r in here.devices] != [place_of[r] for r in there.devices]:
                yield from _changed(plan, cuts, lambda p, i=i, j=j: _exchanged(p, i, j))  # type: ignore[misc]
        # Twice or half, one more or less, and as even as can be in one micro-batch more or less, or as many as now.
        count = len(first.micro_batches)
        sizes = {first.micro_batch * 2, first.micro_batch // 2, first.micro_batch + 1, first.micro_batch - 1,
                 *(-(-first.samples // n) for n in (count - 1, count, count + 1) if n)}
        for size in sorted(sizes - {first.micro_batch}):
            yield from _changed(plan, cuts, lambda p, size=size: p.replace(  # type: ignore[misc]
                micro_batch=size) if 1 <= size <= p.samples else None)
    for a, giver in enumerate(plan.pipelines):
        for b, taker in enumerate(plan.pipelines):
            part = gcd(giver.replicas, taker.replicas)
            less, more = giver.samples - taker.replicas // part, taker.samples + giver.replicas // part
            if a != b and less >= 1:
                pipelines = list(plan.pipelines)
                pipelines[a] = giver.replace(samples=less, micro_batch=min(giver.micro_batch, less))
                pipelines[b] = taker.replace(samples=more)
                yield plan.replace(pipelines=tuple(pipelines))
    yield from _settings(plan)
    yield from _staged_gathers(plan, node_of)


def _staged_gathers(plan: Plan, node_of: Sequence[int]) -> Iterator[Plan]:
    """Hierarchical gathers on where groups span nodes that hold equally many of their replicas, or off."""
    if plan.sharding.hierarchical:
        yield plan.replace(sharding=plan.sharding.replace(hierarchical=0))
    elif plan.sharding.gradients > 1 and node_of:
        homes = [node_of[plan.pipelines[p].stages[0].ranks(r)[0]] for p, r in plan.replicas]
        width = next(i for i in range(1, len(homes) + 1) if i == len(homes) or homes[i] != homes[0])
        if 1 < width < plan.sharding.gradients:
            yield plan.replace(sharding=plan.sharding.replace(hierarchical=width))


def _experts(plan: Plan, job: Job) -> Iterator[Plan]:
    """The next degrees of expert parallelism that divide experts and replicas; and experts in proportion to samples,
    which follow the speed, where those of a group are unequal."""
    n, count = len(plan.replicas), min((b.experts for b in job.model.blocks if b.routed), default=0)
    degrees = [e for e in range(1, min(n, count) + 1) if n % e == 0 and count % e == 0]
    if plan.expert in degrees:
        at = degrees.index(plan.expert)
        yield from (plan.replace(expert=e, expert_shares=())
                    for e in degrees[max(0, at - 1):at + 2] if e != plan.expert)
    if plan.expert > 1:
        samples = tuple(plan.pipelines[p].samples for p, _ in plan.replicas)
        if plan.expert_shares:
            yield plan.replace(expert_shares=())
        elif any(len({samples[k] for k in group}) > 1 for group in plan.expert_groups):
            yield plan.replace(expert_shares=samples)


def dealt(plan: Plan) -> Iterator[Plan]:
    """Replicas of single stages that split every micro-batch take micro-batches in turn instead, as large as a part or
    as the whole was; or the other way round."""
    if plan.schedule not in ("1f1b", "gpipe") or not any(p.replicated for p in plan.pipelines):
        return
    split = any(p.in_turn for p in plan.pipelines)
    for parted in (True, False):
        pipelines = []
        for p in plan.pipelines:
            most = max(stage.members for stage in p.stages)
            size = p.micro_batch if not parted else p.micro_batch * most if split else -(-p.micro_batch // most)
            pipelines.append(p.replace(micro_batch=min(size, p.samples), stages=tuple(
                s.replace(dispatch="split" if split else "round-robin") if s.members > 1 else s for s in p.stages)))
        yield plan.replace(pipelines=tuple(pipelines))


def _degrees(plan: Plan) -> Iterator[Plan]:
    """Optimizer state shared by twice or half as many replicas; and gradients or weights by as many as that, or by
    nobody."""
    shard, n = plan.sharding, len(plan.replicas)
    if shard.shares or n == 1:
        return
    w, g, o = shard.weights, shard.gradients, shard.optimizer
    for degrees in dict.fromkeys(((w, g, 2 * o), (w, g, max(g, o // 2)), (1, 1, o), (1, o, o), (o, o, o), (1, 1, 1))):
        if degrees != (w, g, o) and all(n % degree == 0 for degree in degrees):
            yield plan.replace(sharding=shard.replace(
                weights=degrees[0], gradients=degrees[1], optimizer=degrees[2], hierarchical=0))


def _settings(plan: Plan) -> Iterator[Plan]:
    """Whole-plan settings."""
    if plan.sharding.weights > 1:
        for prefetch in (0, 2):
            if prefetch != plan.sharding.prefetch:
                yield plan.replace(sharding=plan.sharding.replace(prefetch=prefetch))
    if plan.sharding.gradients > 1 and any(p.micro_batch < p.samples for p in plan.pipelines):
        yield plan.replace(accumulation="layered" if plan.accumulation == "plain" else "plain")


def frugal(plan: Plan, short: Collection[tuple[int, int]]) -> Iterator[Plan]:
    """The same plan with the next recompute mode in those stages, (pipeline, stage), that lack memory, or else smaller
    micro-batches."""
    pipelines = []
    stuck = False
    for p, pipeline in enumerate(plan.pipelines):
        stages = list(pipeline.stages)
        for s, stage in enumerate(stages):
            if (p, s) in short:
                mode = max(MODES.index(mode) for mode in stage.modes.values())
                stuck |= mode + 1 == len(MODES)
                stages[s] = stage.replace(recompute=MODES[min(mode + 1, len(MODES) - 1)])
        pipelines.append(pipeline.replace(stages=tuple(stages)))
    if not stuck:
        yield plan.replace(pipelines=tuple(pipelines))
    elif any(p.micro_batch > 1 for p in plan.pipelines):
        yield plan.replace(pipelines=tuple(p.replace(micro_batch=-(-p.micro_batch // 2)) for p in plan.pipelines))


def _look(pipeline: Pipeline) -> tuple[object, ...]:
    return tuple((s.blocks, s.tensor, s.recompute) for s in pipeline.stages)


def _changed(plan: Plan, look: tuple[object, ...], change: Change) -> Iterator[Plan]:
    pipelines = [change(p) if _look(p) == look else p for p in plan.pipelines]
    whole = [p for p in pipelines if p is not None]
    if len(whole) == len(pipelines):
        yield plan.replace(pipelines=tuple(whole))


def _staged(pipeline: Pipeline, index: int, **changes: object) -> Pipeline:
    stages = list(pipeline.stages)
    stages[index] = stages[index].replace(**changes)
    return pipeline.replace(stages=tuple(stages))


def _exchanged(pipeline: Pipeline, i: int, j: int) -> Pipeline:
    """Two stages with each other's devices; blocks and their recompute stay where they are."""
    stages = list(pipeline.stages)
    for here, there in ((i, j), (j, i)):
        other = pipeline.stages[there]
        stages[here] = stages[here].replace(devices=other.devices, shares=other.shares, offload=other.offload)
    return pipeline.replace(stages=tuple(stages))


def _moved(pipeline: Pipeline, index: int, step: int) -> Pipeline | None:
    """The boundary behind stage `index` moved by `step` blocks."""
    a, b = pipeline.stages[index], pipeline.stages[index + 1]
    edge = a.blocks[1] + step
    if not a.blocks[0] < edge < b.blocks[1]:
        return None
    stages: list[Stage] = list(pipeline.stages)
    modes = a.modes | b.modes
    stages[index] = a.replace(blocks=(a.blocks[0], edge)).with_modes(modes, pipeline.away)
    stages[index + 1] = b.replace(blocks=(edge, b.blocks[1])).with_modes(modes, pipeline.away)
    return pipeline.replace(stages=tuple(stages))
