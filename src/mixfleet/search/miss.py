"""When nothing fits: which plan lacks least, and the smallest change of the job that makes one fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from mixfleet.cluster import Cluster
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Sharding, Stage, why_not
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
    for plan in _most_frugal(search.job, search.cluster):
        misses[plan] = predict(plan, search.job, search.cluster, sent=False)
    if not misses:
        return None
    plan, prediction = min(misses.items(), key=lambda item: _lack(item[1]))
    worst = max(prediction.devices, key=lambda d: (d.lacks_bytes, -d.rank))
    return NearestMiss(device=worst.rank, device_name=worst.device, node=worst.node, lacks_bytes=worst.lacks_bytes,
                       phase=worst.phase, plan=plan, summary=summary(search, plan),
                       changes=tuple(_changes(search.job, search.cluster)))


def _lack(prediction: Prediction) -> float:
    return max(d.lacks_bytes / d.capacity_bytes for d in prediction.devices)


def _most_frugal(job: Job, cluster: Cluster) -> list[Plan]:
    """Plans cut by memory alone: micro-batch 1, full recompute, all state sharded over all replicas."""
    tables = Tables(job, cluster)
    classes = classes_of(tables)
    rated: list[tuple[float, int, Plan]] = []
    for members in dict.fromkeys(m for split in splits(classes, cluster) for m in split):
        for wide in (False, True):
            for team in teams(members, classes, tables, wide=wide):
                found = _frugal(team, tables)
                if found:
                    rated.append((found[0], len(rated), found[1]))
    plans = (plan for _, _, plan in sorted(rated, key=lambda r: r[:2]))
    return [plan for plan, _ in zip((p for p in plans if why_not(p, job, cluster) is None), range(TRIED))]


def _frugal(team: Team, tables: Tables) -> tuple[float, Plan] | None:
    """(largest need as a part of the capacity, plan) of a team whose stages are cut by memory."""
    job, n = tables.job, team.replicas
    samples, more = divmod(job.global_batch, n)
    pieces, full = Pieces(n, n, n, 0), len(MODES) - 1
    costs = []
    for i, group in enumerate(team.ranks[0]):
        table = tables.table(group, 1)
        need = table.need_bytes(tables.state_bytes(len(group), pieces), full, min(team.stages - i, samples),
                                first=i == 0, last=i == team.stages - 1, communicators=2 + (len(group) > 1))
        costs.append(np.where(table.forward_s > 0, need / table.capacity_bytes, inf))
    cuts = partition(costs)
    if cuts is None:
        return None
    pipelines = []
    for share, replicas in ((samples + 1, team.ranks[:more]), (samples, team.ranks[more:])):
        if replicas:
            stages = tuple(Stage(blocks=blocks, tensor=len(replicas[0][s]), recompute="full",
                                 devices=tuple(r for one in replicas for r in one[s]))
                           for s, blocks in enumerate(pairwise(cuts)))
            size = -(-share // samples) if more else 1
            pipelines.append(Pipeline(stages=stages, samples=share, micro_batch=size, replicas=len(replicas)))
    sharding = Sharding(weights=n, gradients=n, optimizer=n, prefetch=0)
    return max(float(c[b]) for c, b in zip(costs, pairwise(cuts))), Plan(pipelines=tuple(pipelines), sharding=sharding)


def _changes(job: Job, cluster: Cluster) -> Iterator[str]:
    """Changes after which a plan fits, each alone: the closest of every kind."""
    for text, changed, grown in _ideas(job, cluster):
        if any(predict(plan, changed, grown, sent=False).fits for plan in _most_frugal(changed, grown)[:2]):
            yield text


def _ideas(job: Job, cluster: Cluster) -> Iterator[tuple[str, Job, Cluster]]:
    if job.bytes.gradient_bytes > 2 and job.precision in ("bf16", "fp16"):
        yield (f"gradient_precision {job.precision} (now fp32)", job.replace(gradient_precision=job.precision), cluster)
    length = job.seq_len // 2
    while length >= 128 and length * 16 >= job.seq_len:
        yield f"seq_len {length} (now {job.seq_len})", job.replace(seq_len=length), cluster
        length //= 2
    if job.optimizer.name == "adamw":
        yield ("optimizer sgd (now adamw)",
               job.replace(optimizer=job.optimizer.replace(name="sgd", momentum=0.0)), cluster)
    for times in (2, 4, 8):
        nodes = tuple(node.replace(name=f"{node.name}~{i}" if i else node.name)
                      for i in range(times) for node in cluster.nodes)
        grown = cluster.replace(nodes=nodes, node_matrix_Bps=(), node_latency_s=())
        yield f"{times} times the nodes ({len(nodes)} instead of {len(cluster.nodes)})", job, grown
