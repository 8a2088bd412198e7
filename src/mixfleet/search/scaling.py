"""How far a job scales: the best plan on ever more devices, and where more of them stop paying.

Strong scaling keeps the global batch, so training is the same whatever the number of devices. Weak scaling lets it grow
with them, which changes training; where data are few, it leaves so few steps per epoch that models stop converging
(Cunha et al., 2018, arXiv 1807.09161), so it is forbidden there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mixfleet.cluster import Cluster
from mixfleet.cost.demand import rate
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.samples import open_sizes, tokens_of
from mixfleet.search.finder import find
from mixfleet.spec import Spec

LEAST_STEPS = 100
"""Steps of an epoch below which the global batch must not grow, unless another number is given."""
WORTH = 0.5
"""More devices pay where they bring at least this part of what as much more speed would bring."""


class Point(Spec, frozen=True, kw_only=True):
    """The job on the fastest `devices` of a cluster."""

    devices: int
    global_batch: int
    speed: float
    """Peak rate of the devices together, over that of the first point's."""
    step_s: float = 0.0
    """0 where there is no plan."""
    per_s: float = 0.0
    """Sequences per second."""
    gained: float = 0.0
    """What the devices beyond those of the point before bring, as part of what as much more speed would bring."""
    why: str = ""
    """Why there is no plan, or why this one is forbidden."""
    plan: Plan | None = None


def samples_of(job: Job, base: Path = Path()) -> int:
    """Samples of an epoch of the job's data; 0 for synthetic ones, which have no end."""
    sizes = open_sizes(job, base)
    if job.data.kind == "synthetic":
        return 0
    return len(sizes) if sizes is not None else (tokens_of(job.data, base) - 1) // job.seq_len


def fastest(cluster: Cluster, count: int, job: Job) -> Cluster:
    """The cluster with its `count` fastest devices for the job's precision, those of lower rank first among equals."""
    speeds = [rate(device, job.precision, emulate=True) for device in cluster.devices]
    order = sorted(range(len(speeds)), key=lambda r: (-speeds[r], r))
    kept = {*order[:count]}
    if not 1 <= count <= len(order):
        raise InputError(f"{count} devices of {cluster.name}: it has {len(order)}, so 1 to {len(order)}")
    some = cluster.without({node.name for node, ranks in zip(cluster.nodes, cluster.ranks_of_node)
                            if not kept & {*ranks}})[0]
    mine = {node.name: tuple(cluster.devices[r] for r in ranks if r in kept)
            for node, ranks in zip(cluster.nodes, cluster.ranks_of_node)}
    return some.replace(nodes=tuple(node.replace(devices=mine[node.name]) for node in some.nodes))


def scaling(job: Job, cluster: Cluster, counts: Sequence[int], *, weak: bool = False, samples: int = 0,
            least_steps: int = LEAST_STEPS, max_seconds: float = 120.0) -> tuple[Point, ...]:
    """The job on each number of devices, ascending. With `weak` the global batch grows with them, as long as an epoch
    of `samples` keeps `least_steps`. Raises InputError for numbers that the cluster does not have."""
    return tuple(_points(job, cluster, sorted({*counts}), weak=weak, samples=samples, least_steps=least_steps,
                         max_seconds=max_seconds))


def _points(job: Job, cluster: Cluster, counts: Sequence[int], *, weak: bool, samples: int, least_steps: int,
            max_seconds: float) -> Iterator[Point]:
    if weak and not samples:
        raise InputError("weak scaling needs the number of samples, to tell how many steps an epoch has: give `samples`"
                         " (`--samples`)")
    before = Point(devices=0, global_batch=0, speed=0.0)
    parts = [fastest(cluster, count, job) for count in counts]  # before anything is planned
    base = sum(rate(d, job.precision, emulate=True) for d in parts[0].devices)
    for count, part in zip(counts, parts):
        speed = sum(rate(d, job.precision, emulate=True) for d in part.devices) / base
        batch = job.global_batch * count // counts[0] if weak else job.global_batch
        point = Point(devices=count, global_batch=batch, speed=speed)
        if weak and samples // batch < least_steps:
            most = samples // least_steps
            yield point.replace(why=f"a global batch of {batch} leaves {samples // batch} steps of an epoch of "
                                f"{samples} samples; at least {least_steps} are wanted, so at most {most}. Keep the "
                                "global batch")
            continue
        best = find(job.replace(global_batch=batch), part, max_seconds=max_seconds).best
        if best is None:
            yield point.replace(why="nothing fits")
            continue
        point = point.replace(step_s=best.prediction.step_s, per_s=batch / best.prediction.step_s, plan=best.plan)
        if before.devices and speed > before.speed:
            point = point.replace(gained=(point.per_s / before.per_s - 1) / (speed / before.speed - 1))
        before = point
        yield point


def pays_until(points: Sequence[Point], worth: float = WORTH) -> Point | None:
    """The last point whose devices bring at least the part `worth` of their speed beyond those of the last point that
    did: a number between that does not suit the job is passed over."""
    found = None
    for point in points:
        if point.why or not point.per_s:
            continue
        if found is None or point.speed <= found.speed or (
                point.per_s / found.per_s - 1 >= worth * (point.speed / found.speed - 1)):
            found = point
    return found
