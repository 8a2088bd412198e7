"""How far plans of the template search are from the best of all, on clusters small enough to look at all plans.

The whole space of `docs/planning.md` is enumerated, with the recompute modes and schedules of a case, and searched by
bounds and simulations until no plan can be better. Then the same job is planned as if the cluster were too large for
that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import Figure
from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.search import Limits, find
from mixfleet.search.variants import PLANNED
from mixfleet.units import GiB, show_seconds

LIMIT = 0.01
"""What a plan may take longer than the best one."""
RANDOM = 13
"""Cases with drawn clusters and jobs."""
TEMPLATES = Limits(devices=0)


class Case(NamedTuple):
    job: Job
    cluster: Cluster
    limits: Limits


def _device(name: str, tera: float, gib: float) -> Device:
    return Device(name=name, arch="Ampere", flops={"bf16": tera * 1e12, "fp32": tera * 1e11}, vector_flops=tera * 1e11,
                  memory_bytes=int(gib * GiB), memory_Bps=tera * 1e10)


FAST, MID, SLOW = _device("fast", 100, 40), _device("mid", 61, 24), _device("slow", 37, 16)


def _cluster(*nodes: list[Device], inside: float = 1e11, nic: float = 3e9) -> Cluster:
    link = Link(name="inside", latency_s=1e-5, bandwidth_Bps=inside)
    out = Link(name="outside", latency_s=3e-5, bandwidth_Bps=nic)
    return Cluster(name="small", nodes=tuple(
        Node(name=f"n{i}", devices=tuple(d), link=link, nic=out) for i, d in enumerate(nodes)))


def _job(layers: int = 4, batch: int = 8, seq_len: int = 1024, hidden: int = 1024, more: dict[str, Any] | None = None,
         **settings: Any) -> Job:
    model = build({"layers": layers, "hidden": hidden, "heads": 8, "vocab": 4000, "max_seq_len": 32768, **(more or {})})
    return Job(name="small", model=model, seq_len=seq_len, global_batch=batch, **settings)


def _limits(*schedules: Any, recompute: tuple[Any, ...] = ("none",), **more: Any) -> Limits:
    return Limits(devices=6, blocks=32, plans=400_000, schedules=schedules or ("1f1b", "zb-h1"), recompute=recompute,
                  **more)


def _small(gib: float) -> list[Device]:
    return [FAST.replace(memory_bytes=int(gib * GiB)), SLOW.replace(memory_bytes=int(gib * GiB))]


def cases() -> dict[str, Case]:
    """By name; the drawn ones are the same on every run."""
    found = {
        "three kinds in unequal nodes": Case(_job(layers=3, batch=6), _cluster([FAST, FAST], [MID], [SLOW]),
                                             _limits("1f1b")),
        "slow links": Case(_job(batch=6), _cluster([FAST], [MID], [FAST], nic=3e8), _limits()),
        "little memory": Case(_job(layers=6, batch=4), _cluster([_small(1.9)[0]], _small(1.9)), _limits(
            "1f1b", recompute=("none", "full"))),
        "long sequences": Case(_job(batch=3, seq_len=16384), _cluster([FAST, FAST], [SLOW]), _limits(
            recompute=("none", "full"))),
        "routed experts": Case(_job(more={"experts": 4, "expert_ffn": 2048}), _cluster([FAST, SLOW], [SLOW]),
                               _limits()),
        "frozen below, trained above": Case(_job(layers=6, frozen=("embed/*", "layers.[0-3]/*")),
                                            _cluster([FAST], [MID, SLOW]), _limits()),
        "frozen but for norms": Case(_job(frozen=("*/tokens*", "*/attention*", "*/mlp*", "*/lm*")),
                                     _cluster([FAST, MID], [SLOW]), _limits()),
    }
    for seed in range(RANDOM):
        rng = random.Random(seed)
        nodes: list[list[Device]] = []
        while not 2 <= sum(map(len, nodes)) <= 4:
            nodes = [[rng.choice([FAST, MID, SLOW]) for _ in range(rng.choice([1, 1, 2]))]
                     for _ in range(rng.choice([2, 3]))]
        few = sum(map(len, nodes)) < 4
        found[f"drawn, {seed}"] = Case(
            _job(layers=rng.choice([2, 3, 4]), batch=rng.randint(2, 8), seq_len=rng.choice([256, 512, 2048]),
                 hidden=rng.choice([512, 1024]), more=rng.choice([{}, {}, {"experts": 4, "expert_ffn": 2048}])),
            _cluster(*nodes, nic=rng.choice([2e8, 1e9, 5e9, 2e10])),
            _limits(*(PLANNED if few else ("1f1b", "zb-h2")), tensor=few))
    return found


def gap(case: Case) -> tuple[float, float, bool]:
    """Seconds per step of the best of all plans and of the templates' plan; and whether all were looked at."""
    whole = find(case.job, case.cluster, limits=case.limits, max_seconds=1e6)
    some = find(case.job, case.cluster, limits=TEMPLATES, max_seconds=1e6)
    assert whole.best is not None
    assert some.best is not None
    return whole.best.prediction.step_s, some.best.prediction.step_s, whole.exact


def figures() -> Iterator[Figure]:
    worst = 0.0
    for name, case in cases().items():
        best_s, step_s, exact = gap(case)
        behind = step_s / best_s - 1
        worst = max(worst, behind)
        yield Figure(f"plan behind the best of all: {name}", f"{behind:+.2%} ({show_seconds(step_s)} beside "
                     f"{show_seconds(best_s)}{'' if exact else ', not all looked at'})", f"at most {LIMIT:.0%}",
                     behind <= LIMIT and exact)
    yield Figure(f"plan behind the best of all, worst of {len(cases())} cases", f"{worst:+.2%}", f"at most {LIMIT:.0%}",
                 worst <= LIMIT)
