"""How far plans of the template search are from the best of all, on clusters small enough to look at all plans.

The whole space of `docs/planning.md` is enumerated, with the recompute modes and schedules of a case, and searched by
bounds and simulations until no plan can be better. Then the same job is planned as if the cluster were too large for
that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from math import inf
from typing import Any, NamedTuple

from benchmarks import Figure
from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.search import Limits, SearchResult, enumerate_all, find
from mixfleet.search.variants import PLANNED
from mixfleet.units import GiB, show_seconds

LIMIT = 0.01
"""What a plan may take longer than the best one."""
RANDOM = 13
"""Cases with drawn clusters and jobs."""
EACH = 2
"""Cases of each of these kinds, the first whose space is small:"""
KINDS = ("memory", "regions", "experts", "narrow", "tied", "few", "long", "frozen", "sgd", "cost", "mixed")
"""Devices of little and unequal memory, two regions behind a slow link, routed experts, types other than bf16, tied
embeddings, fewer samples than devices, long sequences, parameters that are not trained, another optimizer, money as
the objective; and several of these together."""
SPACE = 3000
"""Plans of a small space."""
EXPERTS = {"experts": 4, "expert_ffn": 2048}
TEMPLATES = Limits(devices=0)


class Case(NamedTuple):
    job: Job
    cluster: Cluster
    limits: Limits


def _device(name: str, tera: float, gib: float) -> Device:
    return Device(name=name, arch="Ampere", memory_bytes=int(gib * GiB), memory_Bps=tera * 1e10,
                  vector_flops=tera * 1e11, flops={"bf16": tera * 1e12, "fp16": tera * 1e12, "fp8": tera * 2e12,
                                                    "fp32": tera * 1e11})


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
        "routed experts": Case(_job(more=EXPERTS), _cluster([FAST, SLOW], [SLOW]),
                               _limits()),
        "frozen below, trained above": Case(_job(layers=6, frozen=("embed/*", "layers.[0-3]/*")),
                                            _cluster([FAST], [MID, SLOW]), _limits()),
        "frozen but for norms": Case(_job(frozen=("*/tokens*", "*/attention*", "*/mlp*", "*/lm*")),
                                     _cluster([FAST, MID], [SLOW]), _limits()),
    }
    found |= {f"drawn, {seed}": drawn(seed) for seed in range(RANDOM)}
    for kind in KINDS:
        small = (seed for seed in count() if _is_small(drawn(seed, kind)))
        found |= {f"drawn, {kind}, {seed}": drawn(seed, kind) for seed in islice(small, EACH)}
    return found


def _is_small(case: Case) -> bool:
    """Whether the whole space has at most `SPACE` plans."""
    return sum(1 for _ in islice(enumerate_all(case.job, case.cluster, case.limits), SPACE + 1)) <= SPACE


def drawn(seed: int, kind: str = "") -> Case:
    """A cluster of two to four devices in two or three nodes, and a job for it; of one of `KINDS`."""
    rng = random.Random(f"{kind} {seed}" if kind else seed)
    nodes: list[list[Device]] = []
    while not 2 <= sum(map(len, nodes)) <= 4:
        nodes = [[rng.choice([FAST, MID, SLOW]) for _ in range(rng.choice([1, 1, 2]))]
                 for _ in range(rng.choice([2, 3]))]
    few = sum(map(len, nodes)) < 4
    settings: dict[str, Any] = {
        "layers": rng.choice([2, 3, 4]), "batch": rng.randint(2, 8), "seq_len": rng.choice([256, 512, 2048]),
        "hidden": rng.choice([512, 1024]), "more": rng.choice([{}, {}, EXPERTS])}
    nic = rng.choice([2e8, 1e9, 5e9, 2e10])
    limits: dict[str, Any] = {"schedules": PLANNED if few else ("1f1b", "zb-h2"), "tensor": few}
    zones: tuple[int, ...] = ()
    for name in KINDS if kind == "mixed" else (kind,):
        if kind == "mixed" and rng.random() < 0.6:
            continue
        match name:
            case "memory":
                sizes = rng.sample([0.9, 1.1, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0], 3)
                of = {d.name: d.replace(memory_bytes=int(gib * GiB), pcie_Bps=1e10)
                      for d, gib in zip((FAST, MID, SLOW), sizes)}
                nodes = [[of[d.name] for d in node] for node in nodes]
                settings["batch"] = min(settings["batch"], 5)
                limits |= {"recompute": ("none", "selective", "full") if few else ("none", "full"),
                           "schedules": ("1f1b", "zb-h1") if few else ("1f1b",)}
            case "regions":
                zones = tuple(rng.randint(0, 1) for _ in nodes)
            case "experts":
                settings["more"] = settings["more"] | rng.choice([EXPERTS, {"experts": 6, "expert_ffn": 1024}])
            case "narrow":
                settings |= rng.choice([{"precision": "fp16"}, {"products": "fp8"}, {"gradient_precision": "bf16"},
                                        {"products": "fp8-block", "gradient_precision": "bf16"}])
            case "tied":
                settings["more"] = settings["more"] | {"tied": True, "vocab": rng.choice([4000, 64000])}
            case "few":
                settings["batch"] = rng.randint(1, 3)
            case "long":
                settings |= {"batch": rng.randint(1, 3), "seq_len": rng.choice([8192, 16384, 32768])}
                limits |= {"recompute": ("none", "full"), "schedules": ("1f1b", "zb-h1")}
            case "frozen":
                settings["frozen"] = rng.choice([("embed/*",), ("embed/*", "layers.0/*"), ("*/attention*", "*/mlp*"),
                                                 ("layers.*",), ("embed/*", "layers.[0-1]/*", "head/*")])
            case "sgd":
                settings["optimizer"] = Optimizer(name="sgd", momentum=rng.choice([0.0, 0.9]))
            case "cost":
                prices = {d.name: rng.choice([0.5, 1.0, 2.0, 4.0]) for d in (FAST, MID, SLOW)}
                nodes = [[d.replace(price_per_hour=prices[d.name]) for d in node] for node in nodes]
                settings["objective"] = "cost"
    cluster = _cluster(*nodes, nic=nic)
    if zones:
        cluster = cluster.replace(
            nodes=tuple(node.replace(zone=str(zone)) for node, zone in zip(cluster.nodes, zones)),
            zone_uplink=Link(name="between", latency_s=rng.choice([1e-3, 1e-2]), bandwidth_Bps=rng.choice([3e7, 2e8])))
    return Case(_job(**settings), cluster, _limits(*limits.pop("schedules"), **limits))


def gap(case: Case) -> tuple[float, float, bool]:
    """Score per step (seconds, or money) of the best of all plans and of the templates' plan, infinite where none fits;
    and whether all were looked at."""
    whole = find(case.job, case.cluster, limits=case.limits, max_seconds=1e6)
    some = find(case.job, case.cluster, limits=TEMPLATES, max_seconds=1e6)
    return _score(whole), _score(some), whole.exact


def _score(result: SearchResult) -> float:
    if result.best is None:
        return inf
    prediction = result.best.prediction
    return prediction.cost_per_step or inf if result.objective == "cost" else prediction.step_s


def figures() -> Iterator[Figure]:
    worst = 0.0
    for name, case in cases().items():
        best_s, step_s, exact = gap(case)
        behind = step_s / best_s - 1 if best_s < inf else 0.0
        worst = max(worst, behind)
        if step_s == best_s == inf:
            beside = "nothing fits"
        elif case.job.objective == "cost":
            beside = f"{step_s:.3g} beside {best_s:.3g} of money per step"
        else:
            beside = f"{show_seconds(step_s)} beside {show_seconds(best_s)}"
        yield Figure(f"plan behind the best of all: {name}", f"{behind:+.2%} ({beside}"
                     f"{'' if exact or best_s == inf else ', not all looked at'})", f"at most {LIMIT:.0%}",
                     behind <= LIMIT and (exact or best_s == inf))
    yield Figure(f"plan behind the best of all, worst of {len(cases())} cases", f"{worst:+.2%}", f"at most {LIMIT:.0%}",
                 worst <= LIMIT)
