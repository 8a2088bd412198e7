"""When nothing fits: which plan lacks least, and the smallest change of the job that makes one fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from mixfleet.cluster import Cluster
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.search.partition import partition
from mixfleet.search.result import NearestMiss
from mixfleet.search.space import Team, classes_of, splits, teams
from mixfleet.search.tables import MODES, Pieces, Tables
from mixfleet.sim import Prediction, predict

if TYPE_CHECKING:
    from mixfleet.search.finder import Search

TRIED = 4
"""Plans with the least estimated lack that are simulated."""


def nearest_miss(search: Search) -> NearestMiss | None:
    """The plan that lacks least, and changes that help; None if no plan is possible at all."""
    from mixfleet.search.explain import summary

    misses = dict(search.misses)
    frugal = min(most_frugal(search.job, search.cluster), key=lambda rated: _lack(rated[1]), default=None)
    if frugal:
        misses[frugal[0]] = predict(frugal[0], search.job, search.cluster, sent=False)
    if not misses:
        return None
    plan, prediction = min(misses.items(), key=lambda item: _lack(item[1]))
    worst = max(prediction.devices, key=lambda d: (d.lacks_bytes, -d.rank))
    return NearestMiss(device=worst.rank, device_name=worst.device, node=worst.node, lacks_bytes=worst.lacks_bytes,
                       phase=worst.phase, plan=plan, summary=summary(search, plan),
                       changes=tuple(_changes(search.job, search.cluster)))


def _lack(prediction: Prediction) -> float:
    return max(d.lacks_bytes / d.capacity_bytes for d in prediction.devices)


def most_frugal(job: Job, cluster: Cluster) -> list[tuple[Plan, Prediction]]:
    """Plans cut by memory alone: micro-batch 1, full recompute, all state sharded over all replicas.

    Their predictions are of a batch just large enough to fill the pipelines: what is held does not grow beyond that.
    """
    tables = Tables(job, cluster)
    classes = classes_of(tables)
    rated: list[tuple[float, int, Team, tuple[int, ...]]] = []
    for members in dict.fromkeys(m for split in splits(classes, cluster) for m in split):
        for wide in (False, True):
            for team in teams(members, classes, tables, wide=wide):
                found = _frugal_cuts(team, tables)
                if found:
                    rated.append((found[0], len(rated), team, found[1]))
    plans: list[tuple[Plan, Prediction]] = []
    for _, _, team, cuts in sorted(rated, key=lambda r: r[:2]):
        plan = _planned(team, cuts, job.global_batch)
        if len(plans) < TRIED and why_not(plan, job, cluster) is None:
            batch = min(job.global_batch, team.replicas * team.stages)
            small = _planned(team, cuts, batch)
            plans.append((plan, predict(small, job.replace(global_batch=batch), cluster, sent=False)))
    return plans


def _frugal_cuts(team: Team, tables: Tables) -> tuple[float, tuple[int, ...]] | None:
    """(largest need as a part of the capacity, cuts) of a team whose stages are cut by memory."""
    job, n = tables.job, team.replicas
    waves = job.global_batch // n
    pieces, full = Pieces(n, n, n, 0), len(MODES) - 1
    costs = []
    for i, group in enumerate(team.ranks[0]):
        table = tables.table(group, 1)
        need = table.need_bytes(tables.state_bytes(len(group), pieces), full, min(team.stages - i, waves),
                                first=i == 0, last=i == team.stages - 1, communicators=1 + (n > 1) + (len(group) > 1))
        costs.append(np.where(table.forward_s > 0, need / table.capacity_bytes, inf))
    cuts = partition(costs)
    return (max(float(c[b]) for c, b in zip(costs, pairwise(cuts))), cuts) if cuts else None


def _planned(team: Team, cuts: tuple[int, ...], batch: int) -> Plan:
    n = team.replicas
    samples, more = divmod(batch, n)
    pipelines = []
    for share, replicas in ((samples + 1, team.ranks[:more]), (samples, team.ranks[more:])):
        if replicas:
            stages = tuple(Stage(blocks=blocks, tensor=len(replicas[0][s]), recompute="full",
                                 devices=tuple(r for one in replicas for r in one[s]))
                           for s, blocks in enumerate(pairwise(cuts)))
            size = -(-share // samples) if more else 1
            pipelines.append(Pipeline(stages=stages, samples=share, micro_batch=size, replicas=len(replicas)))
    return Plan(pipelines=tuple(pipelines), sharding=Sharding(weights=n, gradients=n, optimizer=n, prefetch=0))


def _changes(job: Job, cluster: Cluster) -> Iterator[str]:
    """Changes after which a plan fits: the closest of every kind alone, or else two together."""
    alone = False
    for kind in (_types(job), _lengths(job), _optimizers(job)):
        for text, changed in kind:
            if _fits(changed, cluster):
                yield text
                alone = True
                break
    for text, grown in _grown(cluster):
        if _fits(job, grown):
            yield text
            alone = True
            break
    if not alone:
        both = ((f"{a} and {b}", changed, grown) for a, changed in _lengths(job) for b, grown in _grown(cluster))
        yield from (text for text, _, _ in islice((one for one in both if _fits(*one[1:])), 1))


def _grown(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    for times in (2, 4, 8, 16, 32):
        nodes = tuple(node.replace(name=f"{node.name}~{i}" if i else node.name)
                      for i in range(times) for node in cluster.nodes)
        yield (f"{times} times the nodes ({len(nodes)} instead of {len(cluster.nodes)})",
               cluster.replace(nodes=nodes, node_matrix_Bps=(), node_latency_s=()))


def _fits(job: Job, cluster: Cluster) -> bool:
    return any(prediction.fits for _, prediction in most_frugal(job, cluster))


def _types(job: Job) -> Iterator[tuple[str, Job]]:
    if job.bytes.gradient_bytes > 2 and job.precision in ("bf16", "fp16"):
        yield f"gradient_precision {job.precision} (now fp32)", job.replace(gradient_precision=job.precision)


def _lengths(job: Job) -> Iterator[tuple[str, Job]]:
    length = job.seq_len // 2
    while length >= 128 and length * 16 >= job.seq_len:
        yield f"seq_len {length} (now {job.seq_len})", job.replace(seq_len=length)
        length //= 2


def _optimizers(job: Job) -> Iterator[tuple[str, Job]]:
    if job.optimizer.name == "adamw":
        yield "optimizer sgd (now adamw)", job.replace(optimizer=job.optimizer.replace(name="sgd", momentum=0.0))
