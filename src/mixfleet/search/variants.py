"""The same plan under other schedules: stages keep their devices and numbers of blocks, cut into chunks as needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, unknown
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, ScheduleName
from mixfleet.plan_rules import why_not
from mixfleet.schedule.named import SCHEDULES, straight
from mixfleet.search.reschedule import reschedule
from mixfleet.search.roundpipe import in_rounds
from mixfleet.sim import Prediction, predict

ROUNDS = "roundpipe"
"""Its legs are cut by their prices (`search.roundpipe`)."""
SEARCHED = "searched"
"""The plan with orders of its own (`search.reschedule`)."""


PLANNED: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved", "wave", "zb-h1", "zb-h2", "zb-v")
"""Schedules that the plan search tries."""
ROUNDS_TRIED = (2, 3, 4, 6, 8)
"""Chunks per stage that are tried where a schedule takes any number."""
LISTED = 2000
"""Steps of a pipeline up to which it tries those that are found by list scheduling, which takes a while."""


def laid(plan: Plan, name: ScheduleName, rounds: int = 0) -> Plan | str:
    """The plan with its stages cut for a named schedule, or why that is impossible; it may be for other reasons still.

    `rounds` is the number of chunks per stage for schedules that take several: as now, or else the least, if 0.
    """
    schedule = SCHEDULES[name]
    pipelines: list[Pipeline] = []
    for p, pipe in enumerate(_alone(plan)):
        now = rounds or max(len(s.chunks) for s in pipe.stages)
        count = now if schedule.rounds <= now <= schedule.most_rounds else schedule.rounds
        short = next((s for s, stage in enumerate(pipe.stages) if stage.size < count), None)
        if short is not None:
            return (f"wants {count} chunks on each stage; stage {short} of pipeline {p} has "
                    f"{pipe.stages[short].size} block(s)")
        if schedule.ways == 1:
            pipelines.append(_cut(pipe, schedule.place(len(pipe.stages), count), count))
            continue
        total = len(pipe.micro_batches)
        if total < schedule.ways:
            return f"wants {schedule.ways} micro-batches, one for each direction; pipeline {p} has {total}"
        down = _cut(pipe, straight(len(pipe.stages)), 1)
        samples = schedule.counts(total)[0] * pipe.micro_batch
        pipelines += [down.replace(samples=samples), _turned(down).replace(samples=pipe.samples - samples)]
    return plan.replace(pipelines=tuple(pipelines), schedule=name)


def under(plan: Plan, name: ScheduleName, job: Job, cluster: Cluster) -> Plan | str:
    """The plan under a named schedule, or why that is impossible."""
    other = in_rounds(plan, job, cluster) if name == ROUNDS else laid(plan, name)
    return other if isinstance(other, str) else why_not(other, job, cluster) or other


def known(names: Iterable[str], *more: str) -> tuple[str, ...]:
    """The names, once each, if all are of schedules or in `more`. Raises InputError with the nearest ones."""
    for name in names:
        if name not in SCHEDULES and name not in (ROUNDS, *more):
            raise unknown("schedule", name, [*more, *SCHEDULES, ROUNDS])
    return tuple(dict.fromkeys(names))


def rescheduled(plan: Plan, name: str, job: Job, cluster: Cluster) -> Plan:
    """The plan under a schedule, or with a searched order. Raises InputError if that is impossible."""
    (name,) = known([name], SEARCHED)
    if name == SEARCHED:
        return reschedule(plan, job, cluster)
    other = under(plan, name, job, cluster)  # type: ignore[arg-type]
    if isinstance(other, str):
        raise InputError(f"the plan cannot go under the schedule {name}: {other}")
    return other


def only(plan: Plan, names: Sequence[ScheduleName], job: Job, cluster: Cluster) -> Iterator[Plan | str]:
    """The plan under each of the schedules, or why not; as it is if it has no stages to order, or there are no names.
    """
    if not names or all(len(p.stages) == 1 for p in plan.pipelines):
        yield plan
    else:
        yield from (under(plan, name, job, cluster) for name in names)


def is_deep(plan: Plan) -> bool:
    """Whether some pipeline has stages that wait for each other, so that the schedule matters."""
    return any(len(p.stages) > 1 and len(p.micro_batches) > 1 for p in plan.pipelines)


def is_replicated(plan: Plan) -> bool:
    """Whether some stage has replicas of its own."""
    return any(pipeline.replicated for pipeline in plan.pipelines)


def schedules(plan: Plan, names: Sequence[ScheduleName] = (), *, wide: bool = False) -> Iterator[Plan]:
    """The plan under every other schedule that suits its pipelines, of `names` if given, and with one or two chunks per
    stage more or less; if `wide`, with all numbers of `ROUNDS_TRIED`."""
    if not is_deep(plan) or plan.accumulation != "plain":
        return
    rounds = len(plan.pipelines[0].stages[0].chunks)
    ways = [(name, 0) for name in names or PLANNED if name not in (plan.schedule, ROUNDS)]
    if plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].most_rounds > 2:
        ways += [(plan.schedule, n) for n in range(rounds - 2, rounds + 3) if n != rounds and n > 1]
    if wide:
        ways = [(name, n) for name in dict.fromkeys((*(names or PLANNED), plan.schedule)) if name in SCHEDULES
                for n in (ROUNDS_TRIED if SCHEDULES[name].most_rounds > 2 else (0,))
                if (name, n or rounds) != (plan.schedule, rounds)]
    for name, count in ways:
        other, schedule = laid(plan, name, count), SCHEDULES[name]
        if isinstance(other, str) or any(
                schedule.why_not(tuple(c.stage for c in p.chain), len(p.micro_batches)) for p in other.pipelines):
            continue
        steps = max(len(p.chain) * len(p.micro_batches) for p in other.pipelines)
        if steps <= LISTED or not (schedule.splits or schedule.even_rounds):
            yield other


def _alone(plan: Plan) -> list[Pipeline]:
    """The pipelines; of those that share devices the first, with the samples of all."""
    return [plan.pipelines[crew[0]].replace(samples=sum(plan.pipelines[p].samples for p in crew))
            for crew in plan.crews]


def _turned(pipe: Pipeline) -> Pipeline:
    """The pipeline from the other end: each stage's devices keep their number of blocks."""
    modes = {b: mode for stage in pipe.stages for b, mode in stage.modes.items()}
    at, stages = 0, []
    for stage in reversed(pipe.stages):
        stages.append(stage.replace(blocks=(at, at + stage.size)).with_modes(modes, pipe.away))
        at += stage.size
    return pipe.replace(stages=tuple(stages))


def _cut(pipe: Pipeline, home: tuple[int, ...], rounds: int) -> Pipeline:
    """Each stage's number of blocks in `rounds` parts as even as can be, laid along the chain as `home` says."""
    if tuple(c.stage for c in pipe.chain) == home:
        return pipe.replace(stages=tuple(s.replace(order="") for s in pipe.stages))
    ranges: list[list[tuple[int, int]]] = [[] for _ in pipe.stages]
    at = 0
    for s in home:
        size, turn = pipe.stages[s].size, len(ranges[s])
        n = size * (turn + 1) // rounds - size * turn // rounds
        ranges[s].append((at, at + n))
        at += n
    modes = {b: mode for stage in pipe.stages for b, mode in stage.modes.items()}
    return pipe.replace(stages=tuple(
        stage.replace(blocks=r[0], more=tuple(r[1:]), order="").with_modes(modes, pipe.away)
        for stage, r in zip(pipe.stages, ranges)))


def compare(plan: Plan, names: list[str], job: Job, cluster: Cluster) -> dict[str, tuple[Plan, Prediction] | str]:
    """Predictions under each schedule (`all` stands for every one), or why it does not suit. InputError for names."""
    wanted = dict.fromkeys(n for name in known(names, "all", SEARCHED)
                           for n in ([*SCHEDULES, ROUNDS, SEARCHED] if name == "all" else [name]))
    found: dict[str, tuple[Plan, Prediction] | str] = {}
    for name in wanted:
        if name == SEARCHED:
            other: Plan | str = reschedule(plan, job, cluster)
            if other == plan:
                other = "saves nothing against the plan as it is"
        else:
            other = under(plan, name, job, cluster)  # type: ignore[arg-type]
        found[name] = other if isinstance(other, str) else (other, predict(other, job, cluster, sent=False))
    return found
