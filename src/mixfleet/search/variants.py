"""The same plan under other schedules: stages keep their devices and numbers of blocks, cut into chunks as needed."""

from __future__ import annotations

from mixfleet.cluster import Cluster
from mixfleet.errors import unknown
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, ScheduleName, why_not
from mixfleet.schedule.named import SCHEDULES, straight
from mixfleet.search.reschedule import reschedule
from mixfleet.sim import Prediction, predict

SEARCHED = "searched"
"""The plan with orders of its own (`search.reschedule`)."""


def under(plan: Plan, name: ScheduleName, job: Job, cluster: Cluster) -> Plan | str:
    """The plan under a named schedule, or why that is impossible."""
    schedule = SCHEDULES[name]
    pipelines: list[Pipeline] = []
    for p, pipe in enumerate(_alone(plan)):
        now = max(len(s.chunks) for s in pipe.stages)
        rounds = now if schedule.rounds <= now <= schedule.most_rounds else schedule.rounds
        short = next((s for s, stage in enumerate(pipe.stages) if stage.size < rounds), None)
        if short is not None:
            return (f"wants {rounds} chunks on each stage; stage {short} of pipeline {p} has "
                    f"{pipe.stages[short].size} block(s)")
        if schedule.ways == 1:
            pipelines.append(_cut(pipe, schedule.place(len(pipe.stages), rounds), rounds))
            continue
        count = len(pipe.micro_batches)
        if count < schedule.ways:
            return f"wants {schedule.ways} micro-batches, one for each direction; pipeline {p} has {count}"
        down = _cut(pipe, straight(len(pipe.stages)), 1)
        samples = schedule.counts(count)[0] * pipe.micro_batch
        pipelines += [down.replace(samples=samples), _turned(down).replace(samples=pipe.samples - samples)]
    other = plan.replace(pipelines=tuple(pipelines), schedule=name)
    return why_not(other, job, cluster) or other


def _alone(plan: Plan) -> list[Pipeline]:
    """The pipelines; of those that share devices the first, with the samples of all."""
    return [plan.pipelines[crew[0]].replace(samples=sum(plan.pipelines[p].samples for p in crew))
            for crew in plan.crews]


def _turned(pipe: Pipeline) -> Pipeline:
    """The pipeline from the other end: each stage's devices keep their number of blocks."""
    modes = {b: mode for stage in pipe.stages for b, mode in stage.modes.items()}
    at, stages = 0, []
    for stage in reversed(pipe.stages):
        stages.append(stage.replace(blocks=(at, at + stage.size)).with_modes(modes))
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
    return pipe.replace(stages=tuple(stage.replace(blocks=r[0], more=tuple(r[1:]), order="").with_modes(modes)
                                     for stage, r in zip(pipe.stages, ranges)))


def compare(plan: Plan, names: list[str], job: Job, cluster: Cluster) -> dict[str, tuple[Plan, Prediction] | str]:
    """Predictions under each schedule (`all` stands for every one), or why it does not suit. InputError for names."""
    wanted = list(dict.fromkeys(n for name in names for n in ([*SCHEDULES, SEARCHED] if name == "all" else [name])))
    found: dict[str, tuple[Plan, Prediction] | str] = {}
    for name in wanted:
        if name == SEARCHED:
            other: Plan | str = reschedule(plan, job, cluster)
            if other == plan:
                other = "saves nothing against the plan as it is"
        elif name in SCHEDULES:
            other = under(plan, name, job, cluster)  # type: ignore[arg-type]
        else:
            raise unknown("schedule", name, ["all", *SCHEDULES, SEARCHED])
        found[name] = other if isinstance(other, str) else (other, predict(other, job, cluster, sent=False))
    return found
