"""Measured against predicted on mixed clusters in one machine, and beside torch DDP and FSDP2. Needs root.

    python -m benchmarks.testbed --out out/testbed            six clusters, under 20 minutes on two free cores
    python -m benchmarks.testbed --out out/testbed --quick    two clusters, every second plan, once, for CI
    python -m benchmarks.testbed --out out/testbed --only "slow link" --merge    one, beside what is in out/testbed
    python -m benchmarks.testbed --out out/testbed --resume                      go on after a run that ended early

Every cluster is made as namespaces with shaped links and throttled ranks, its devices are profiled, and then all
plans and peers run in turn in the same processes. `--out` gets table.md, scatter.svg and results.json, written anew
after every row. Timing needs a machine with nothing else to do: the table says how much others used. Where the speed
of the machine itself drifts (as a virtual machine's does), ranks run the blocks of the job anew between plans, and
predictions allow for what these take by then. Plans with short steps run a second time when all have run once: the mean
counts, and how far apart the two are says how steady the machine is.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from benchmarks import Figure
from benchmarks.peers import zero
from mixfleet.cluster import Cluster, Device, Link, Node, device_named
from mixfleet.files import write_text
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.report.chrome import write_trace
from mixfleet.trace import Span, Trace, compare
from mixfleet.units import MB, GiB, MiB, show_seconds

CHOSEN = "chosen by mixfleet"
WINDOW_S, STEPS = 1.5, (1, 12)
"""A plan runs for this long, but so many steps, and then again when all others have run."""
LONG_S = 3.5
"""A plan whose step takes longer does not run again: there is no time for it."""
READY_S = 300
GAUGE_S, GAUGE_EVERY_S = 1.0, 12.0
"""Ranks run the blocks of the job for so long, between contenders, about so often."""
CALM = 0.15
"""Part of the machine that others may use while a contender runs, the kernel's own work among it: of the runs of a
plan, those beside more do not count if there are others."""
BUDGET_S = 1150
"""For all clusters: one that is behind its part of it repeats nothing."""
MICROS = 3
"""Micro-batches of the plans that split an even part of the batch."""
LINKED = ("small memory", "slow link", "two regions")
"""Clusters whose job sends for longer than it computes, if its batch is split evenly."""
INNER = Link(name="loopback", latency_s=60e-6, bandwidth_Bps=1e9)


# --- what is run ---------------------------------------------------------------------------------------------------

def job(cluster: str) -> Job:
    """Where devices differ (and where nothing does), 0.8 million parameters and 12,288 tokens a step: it computes for
    several times as long as its gradients are on their way. Where links or memory do, 3.4 million and 1,536 tokens,
    for the opposite."""
    if cluster in LINKED:
        return _job("gpt-3.4m", layers=4, hidden=256, seq_len=128, batch=12)
    return _job("gpt-0.8m", layers=3, hidden=128, seq_len=256, batch=48)


def _job(name: str, *, layers: int, hidden: int, seq_len: int, batch: int) -> Job:
    model = build({"layers": layers, "hidden": hidden, "heads": 4, "vocab": 512, "max_seq_len": seq_len})
    return Job(name=name, model=model, seq_len=seq_len, global_batch=batch, precision="fp32", attention="fused",
               optimizer=Optimizer(lr=1e-3))


def _device(share: float, memory_bytes: int = GiB) -> Device:
    return device_named("cpu").replace(share=share, memory_bytes=memory_bytes)


def _nic(mbps: float) -> Link:
    return Link(name="nic", latency_s=60e-6, bandwidth_Bps=mbps * MB / 8)


def _nodes(mbps: float, *devices: Sequence[Device], zones: Sequence[str] = ()) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{i}", devices=tuple(d), link=INNER, nic=_nic(mbps), zone=zones[i] if zones else "")
                 for i, d in enumerate(devices))


def shapes() -> dict[str, Cluster]:
    """Mixed clusters whose ranks take half of two cores: the kernel's part of the work, and what a virtual machine's
    neighbours steal of its cores (a third, at times), must not keep ranks from their shares."""
    mid = _device(0.25)
    return {
        "equal": Cluster(name="equal", nodes=_nodes(200, [mid], [mid], [mid], [mid])),
        "one slow": Cluster(name="one slow", nodes=_nodes(
            200, [mid], [mid], [mid], [_device(0.08)])),
        "small memory": Cluster(name="small memory", nodes=_nodes(
            80, [mid], [mid], [mid], [_device(0.25, 76 * MiB)])),
        "slow link": Cluster(name="slow link", nodes=_nodes(80, [mid, mid], [mid, mid])),
        "two regions": Cluster(name="two regions", nodes=_nodes(400, [mid], [mid], [mid], [mid], zones="aabb"),
                               zone_uplink=Link(name="wan", latency_s=1e-3, bandwidth_Bps=60 * MB / 8)),
        "three tiers": Cluster(name="three tiers", nodes=_nodes(
            200, [_device(0.5)], [_device(0.26)], [_device(0.13)], [_device(0.11)])),
    }


def _split(total: int, parts: Sequence[float], least: int = 1) -> list[int]:
    """Whole numbers in proportion to `parts`, none below `least`, by largest remainder."""
    exact = [total * p / sum(parts) for p in parts]
    found = [max(least, math.floor(x)) for x in exact]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        i = max((i for i, n in enumerate(found) if n + step >= least), key=lambda i: step * (exact[i] - found[i]))
        found[i] += step
    return found


def _pairs(cluster: Cluster) -> bool:
    """Whether ranks 0 and 1, and so on, are nearer to each other than to the rest."""
    near, far = cluster.path(0, 1), cluster.path(1, 2)
    return near.level != far.level


def _data(samples: Sequence[int], micro: Sequence[int], blocks: int, degree: int = 1, hierarchical: int = 0) -> Plan:
    sharding = Sharding(weights=degree, gradients=degree, optimizer=degree, hierarchical=hierarchical)
    return Plan(sharding=sharding, pipelines=tuple(
        Pipeline(stages=(Stage(blocks=(0, blocks), devices=(r,)),), samples=n, micro_batch=m)
        for r, (n, m) in enumerate(zip(samples, micro))))


def _pipe(ranks: Sequence[int], sizes: Sequence[int], samples: int, micro: int) -> Pipeline:
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return Pipeline(samples=samples, micro_batch=micro, stages=tuple(
        Stage(blocks=(cuts[i], cuts[i + 1]), devices=(r,)) for i, r in enumerate(ranks)))


def micro_batches(work: Job, cluster: Cluster) -> tuple[int, int, int]:
    """Micro-batches of the plans: one sample, a part of an even share of the batch, and all of it."""
    part = work.global_batch // len(cluster.devices)
    return 1, part // MICROS, part


def plans(work: Job, cluster: Cluster) -> dict[str, Plan]:
    """The same ways of splitting on every cluster of four devices; where two come to the same, only the first."""
    n, blocks, batch = len(cluster.devices), len(work.model.blocks), work.global_batch
    shares = [d.share for d in cluster.devices]
    _, micro, part = micro_batches(work, cluster)
    even, fair = [part] * n, _split(batch, shares)
    front = [2, 1, 1, blocks - 4]
    found = {
        "even data parallel": _data(even, even, blocks),
        "uneven data parallel": _data(fair, fair, blocks),
        "ZeRO-3": _data(even, even, blocks, n),
        f"ZeRO-3, {MICROS} micro-batches": _data(even, [micro] * n, blocks, n),
        **({"ZeRO-3, gathers in stages": _data(even, even, blocks, n, hierarchical=2)}
           if _pairs(cluster) and cluster.path(0, 1).level == "node" else {}),
        f"groups of 2, {MICROS} micro-batches": _data(even, [micro] * n, blocks, 2),
        "groups of 2": _data(even, even, blocks, 2),
        "uneven groups of 2": _data(fair, fair, blocks, 2),
        "pipeline, even": Plan(pipelines=(_pipe(range(n), front, batch, micro),)),
        "pipeline, by speed": Plan(pipelines=(_pipe(range(n), _split(blocks, shares), batch, micro),)),
        "2 pipelines, neighbours": Plan(pipelines=(
            _pipe((0, 1), _split(blocks, shares[:2]), batch // 2, micro),
            _pipe((2, 3), _split(blocks, shares[2:]), batch // 2, micro))),
        "2 pipelines, far apart": Plan(pipelines=(
            _pipe((0, 2), _split(blocks, shares[::2]), batch // 2, micro),
            _pipe((1, 3), _split(blocks, shares[1::2]), batch // 2, micro))),
    }
    return {label: plan for i, (label, plan) in enumerate(found.items()) if plan not in list(found.values())[:i]}


def same(a: Plan, b: Plan) -> bool:
    """Whether two plans split a step alike, however they write it."""
    return _apart(a) == _apart(b)


def _apart(plan: Plan) -> Plan:
    """Replicas written as pipelines of their own, and no more of a plan than what decides a step."""
    pipelines: list[Pipeline] = []
    for pipe in plan.pipelines:
        if any(len(s.devices) != s.tensor * pipe.replicas for s in pipe.stages):
            return plan  # parts of sequences, or stages with replicas of their own
        pipelines += [pipe.replace(replicas=1, stages=tuple(
            s.replace(devices=s.devices[s.tensor * r:s.tensor * (r + 1)]) for s in pipe.stages))
            for r in range(pipe.replicas)]
    unpiped = all(len(p.stages) == 1 and p.micro_batch == p.samples for p in pipelines)
    return Plan(pipelines=tuple(pipelines), sharding=plan.sharding, accumulation=plan.accumulation,
                batching=plan.batching, synchronization=plan.synchronization,
                schedule=Plan.schedule if unpiped else plan.schedule)


# --- the processes -------------------------------------------------------------------------------------------------

class Order(NamedTuple):
    """One contender: a plan, or the name of a peer."""

    name: str
    work: Job
    cluster: Cluster
    steps: int
    rendezvous: str
    plan: Plan | None = None
    per_node: int = 0
    """Of FSDP's pieces; of DeepSpeed, the stage of ZeRO."""
    traced: int = 0
    """Steps after the counted ones that are recorded."""


class Gauged(NamedTuple):
    """Not a contender but a question: whether ranks compute as fast as their profiles say."""

    work: Job
    cluster: Cluster
    micro_batch: int


class Task(NamedTuple):
    """Not a contender either: what `run_pinned` would do in processes of its own."""

    name: str
    arguments: dict[str, Any]
    rendezvous: str


class Outcome(NamedTuple):
    """On one rank: seconds per step, and payload bytes by (kind, destination) of all counted steps."""

    step_s: float
    sent: dict[tuple[str, int], int]
    cpu_s: float
    """CPU seconds per step, of all threads."""
    spans: tuple[Span, ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    """Of the recorded steps, in ns."""


def _carry_out(order: Order, rank: int, mark: Callable[[], None]) -> Outcome | None:
    import torch.distributed as dist

    ranks = order.plan.ranks if order.plan else tuple(range(len(order.cluster.devices)))
    if rank not in ranks:
        for _ in range(3):
            mark()
        return None
    dist.init_process_group("gloo", init_method=order.rendezvous, rank=ranks.index(rank), world_size=len(ranks))
    sent: Counter[tuple[str, int]] = Counter()
    if order.plan:
        from mixfleet.run.source import DecoderSource
        from mixfleet.run.worker import Rank

        mine = Rank(order.plan, order.work, order.cluster, DecoderSource(order.work), ranks.index(rank))
        mine.start()
        sent = mine.fabric.sent

        def own(number: int) -> None:
            mine.interpreter.step(mine.batches(number), order.work.optimizer.lr)

        step: Callable[[int], None] = own
        finish, close, recorder = mine.interpreter.finish, mine.close, mine.recorder
    else:
        from benchmarks.peers import ddp, fsdp, zero

        step = ddp.stepper(order.work) if order.name.endswith("DDP") else zero.stepper(
            order.work, order.per_node) if order.name.startswith("DeepSpeed") else fsdp.stepper(
            order.work, order.per_node)
        finish = close = lambda: None
        recorder = None
    step(0)
    finish()
    dist.barrier()
    mark()
    dist.barrier()
    mark()
    before, start, cpu = Counter(sent), time.perf_counter(), time.process_time()
    for number in range(1, order.steps + 1):
        step(number)
    finish()
    dist.barrier()
    end, cpu = time.perf_counter(), time.process_time() - cpu
    mark()
    sent, spans, bounds = Counter(sent) - before, list[Any](), list[Any]()
    if recorder and order.traced:
        recorder.start()
        dist.barrier()
        for number in range(order.steps + 1, order.steps + 1 + order.traced):
            start_ns = time.perf_counter_ns()
            step(number)
            finish()
            bounds.append((start_ns, time.perf_counter_ns()))
        spans, _ = recorder.stop()
    close()
    dist.destroy_process_group()
    return Outcome((end - start) / order.steps, dict(sent), cpu / order.steps, tuple(spans), tuple(bounds))


def _gauge(order: Gauged, rank: int, mark: Callable[[], None]) -> float:
    """How many times as long as in its profile the rank takes."""
    from mixfleet.calibrate.kernels import Gauge

    return Gauge(order.work, order.cluster.devices[rank]).slower(order.micro_batch, GAUGE_S, mark)


def _task(order: Task, rank: int, ranks: int, mark: Callable[[], None]) -> Any:
    import torch.distributed as dist

    from mixfleet.calibrate.pinned import carry_out

    dist.init_process_group("gloo", init_method=order.rendezvous, rank=rank, world_size=ranks)
    result = carry_out(order.name, order.arguments, mark)
    dist.destroy_process_group()
    return result


def _serve(rank: int, ranks: int, enter: Any, pipe: Any) -> None:
    enter(rank)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    import mixfleet.run.worker
    from benchmarks.peers import ddp, fsdp  # noqa: F401
    from mixfleet.run.host import keep_memory
    assert mixfleet.run.worker
    keep_memory()  # as every rank of a run does
    pipe.send("ready")

    def mark() -> None:
        """The parent reads the counters of the interfaces while all wait."""
        pipe.send("mark")
        pipe.recv()

    while (order := pipe.recv()) is not None:
        try:
            pipe.send(_gauge(order, rank, mark) if isinstance(order, Gauged) else _task(order, rank, ranks, mark)
                      if isinstance(order, Task) else _carry_out(order, rank, mark))
            gc.collect()  # each process group that is still there wakes 100 times a second to look for messages
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")
            raise
    os._exit(0)


def _used() -> tuple[int, int]:
    """Time of all cores until now, and what of it they were in use, in ticks."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(numbers), sum(numbers) - numbers[3] - numbers[4]


class Measured(NamedTuple):
    """One contender, run once."""

    outcomes: list[Outcome | None]
    """By rank."""
    wire: dict[str, int]
    """Bytes that left each node in the counted steps."""
    others: float
    """Part of the machine that others used meanwhile, the kernel among them."""
    at_s: float
    """When, in the middle, by `monotonic`."""

    @property
    def step_s(self) -> float:
        """Of the slowest rank."""
        return max(o.step_s for o in self.outcomes if o)


class Pool:
    """One process per rank at its seat. What they load does not count against their quotas; what they train does."""

    def __init__(self, bed: Any) -> None:
        self.bed = bed
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        ranks = len(bed.layout.seats)
        with bed.unthrottled():
            for rank in range(ranks):
                here, there = context.Pipe()
                context.Process(target=_serve, daemon=True, args=(rank, ranks, bed.enter, there)).start()
                there.close()
                self._pipes.append(here)
            self._all("ready")

    def _all(self, expected: str | None) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            waiting = {p: i for i, p in enumerate(self._pipes) if i not in found}
            ready = multiprocessing.connection.wait(list(waiting), READY_S)
            if not ready:
                raise RuntimeError(f"{len(waiting)} ranks hang")
            for pipe in ready:
                message = pipe.recv()  # type: ignore[union-attr, call-arg]
                if isinstance(message, str) and message != expected:
                    raise RuntimeError(f"rank {waiting[pipe]}: {message}")  # type: ignore[index]
                found[waiting[pipe]] = message  # type: ignore[index]
        return [found[i] for i in range(len(self._pipes))]

    def _begin(self, order: Order | Gauged | Task) -> None:
        """Ranks do what is not measured at full speed, then all go on."""
        with self.bed.unthrottled() as throttle:
            for pipe in self._pipes:
                pipe.send(order)
            self._all("mark")
            throttle()
            for pipe in self._pipes:
                pipe.send(None)

    def task(self, name: str, _: object, arguments: dict[str, Any], **__: object) -> list[Any]:
        """As `run_pinned` does; all that is loaded at full speed is throttled from `ready` on."""
        self._begin(Task(name, arguments, self.bed.rendezvous()))
        return self._all(None)

    def gauge(self, work: Job, cluster: Cluster) -> list[float]:
        """How many times as long as in its profile each rank takes for blocks of the job, all at the same time."""
        self._begin(Gauged(work, cluster, micro_batches(work, cluster)[1]))
        return self._all(None)

    def run(self, order: Order) -> Measured:
        """One contender. The first step is made at full speed."""
        counts, used, at = [], [], []

        def mark() -> None:
            self._all("mark")
            counts.append(self.bed.counters())
            used.append(_used())
            at.append(time.monotonic())
            for pipe in self._pipes:
                pipe.send(None)

        self._begin(order)
        mark()
        mark()
        outcomes = self._all(None)
        total, busy = (b - a for a, b in zip(*used))
        mine = os.sysconf("SC_CLK_TCK") * order.steps * sum(o.cpu_s for o in outcomes if o)
        return Measured(outcomes, {n: counts[1][n]["tx_bytes"] - counts[0][n]["tx_bytes"] for n in counts[0]},
                        max(0.0, busy - mine) / max(total, 1), fmean(at))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


# --- what comes of it ----------------------------------------------------------------------------------------------

class Row(NamedTuple):
    """One contender on one cluster."""

    cluster: str
    name: str
    predicted_s: float | None
    measured_s: float | None
    bytes_exact: bool | None
    """Payload counted by every rank equals the prediction."""
    wire: float | None
    """Bytes on the interfaces over payload between nodes."""
    bound_s: float | None
    """The larger of computing at full speed on all devices, and of this plan's bytes on its tightest link."""
    note: str = ""
    far_bytes: float | None = None
    """Payload per step that leaves the half of the cluster with ranks 0 and 1, or comes to it."""
    parts: tuple[tuple[int, str, float, float], ...] = ()
    """Where recorded: device, category, seconds per step predicted and measured."""
    speed: float | None = None
    """How much longer computing took around this contender than in the profile, in the mean over its ranks; predictions
    allow for it."""
    plain_s: float | None = None
    """What is predicted without that."""
    others: float = 0.0
    cpu_s: tuple[float, ...] = ()
    """CPU seconds per step of each rank."""
    same_as: str = ""
    """The contender that the chosen plan is, where it is one of them: measured once for both."""
    runs: tuple[float, ...] = ()
    """Seconds per step of each run; all else is the mean over those that count."""


def measure(name: str, cluster: Cluster, *, quick: bool, traced: int = 0, labels: Sequence[str] = (),
            known: Collection[str] = (), out: Path | None = None, until: float = math.inf) -> Iterator[Row]:
    """All plans and peers on one cluster, each as soon as it is measured; with so many `traced` steps, plans are also
    compared by category, and `out` gets a folder for each. `labels` are those of the contenders that take part, if not
    all do, less those `known`. Then plans run once more, each as much later, until the clock (`time.monotonic`) is past
    `until`; at the end all rows of plans come anew, with what is known of the machine's speed by then."""
    from mixfleet.search import find
    from mixfleet.sim import predict
    from mixfleet.testbed import Testbed
    from mixfleet.testbed.profile import profile

    work = job(name)
    contenders: dict[str, Plan | None] = {**plans(work, cluster), CHOSEN: None}
    wanted = set(labels or (*contenders, *_peers(cluster))) - set(known)
    if not wanted:
        return
    with Testbed.up(cluster) as bed, _Contest(bed) as contest:
        real = profile(bed, cluster, work, micro_batches=sorted(set(micro_batches(work, cluster))),
                       run=contest.pool.task)
        result = find(work, real, top=1)
        contenders[CHOSEN] = result.best.plan if result.best else None
        ideal_s = work.global_batch / result.upper_samples_per_s
        twins: dict[str, str] = {}
        orders: dict[str, Order] = {}
        runs: dict[str, list[Measured]] = {}
        failed: dict[str, str] = {}

        def attempt(label: str) -> None:
            found = contest.run(orders[label])
            if isinstance(found, str):
                failed[label] = found
                return
            runs.setdefault(label, []).append(found)
            if out and traced:
                _keep(out / name.replace(" ", "-") / label.replace(" ", "-").replace(",", ""), orders[label], found,
                      contest.slower(found.at_s))

        def row(label: str) -> Row:
            if label in failed:
                return _empty(name, label, failed[label])
            return together([_row(name, orders[label], m, contest.slower(m.at_s), ideal_s) for m in runs[label]])

        for i, (label, plan) in enumerate(contenders.items()):
            skipped = quick and not labels and i and i % 2 == 0 and label != CHOSEN
            if label not in wanted or skipped or not plan:
                continue
            reason = why_not(plan, work, real)
            prediction = None if reason else predict(plan, work, real)
            if prediction and not prediction.fits:
                reason = f"does not fit: {prediction.reasons[0]}"
            if reason or not prediction:
                yield _empty(name, label, str(reason))
                continue
            twin = next((other for other, order in orders.items() if order.plan and same(plan, order.plan)), "")
            if twin:
                twins[label] = twin
                continue
            orders[label] = Order(label, work, real, _steps(prediction.step_s), "", plan, traced=traced)
            attempt(label)
            yield row(label)
        slowest_s = max((found[0].step_s for found in runs.values()), default=1.0)
        for label, per_node in _peers(cluster).items():
            if label not in wanted:
                continue
            if cluster.name == "small memory" and label not in ("torch FSDP2 full", "DeepSpeed ZeRO-3"):
                yield _empty(name, label, "does not fit: as even data parallel, or groups of 2")
                continue
            found = contest.run(Order(label, work, real, _steps(slowest_s), "", None, per_node))
            yield _empty(name, label, found) if isinstance(found, str) else Row(
                name, label, None, found.step_s, None, None, None, others=found.others)
        for label in orders:
            if time.monotonic() < until and label not in failed and runs[label][0].step_s < LONG_S:
                attempt(label)
        if runs:
            contest.gauge(work, real)
        for label in orders:
            yield row(label)
        for label, twin in twins.items():
            yield row(twin)._replace(name=label, same_as=twin)


def together(rows: Sequence[Row]) -> Row:
    """What several runs of one plan say: the mean of those that others did not disturb, or of all."""
    calm = [r for r in rows if r.others <= CALM] or [*rows]

    def mean(of: Callable[[Row], float | None]) -> float | None:
        values = [value for r in calm if (value := of(r)) is not None]
        return fmean(values) if values else None

    return calm[-1]._replace(
        predicted_s=mean(lambda r: r.predicted_s), measured_s=mean(lambda r: r.measured_s), wire=mean(lambda r: r.wire),
        bound_s=mean(lambda r: r.bound_s), speed=mean(lambda r: r.speed), others=max(r.others for r in calm),
        bytes_exact=all(r.bytes_exact for r in rows), cpu_s=tuple(map(fmean, zip(*(r.cpu_s for r in calm)))),
        runs=tuple(r.measured_s for r in rows if r.measured_s is not None))


def _peers(cluster: Cluster) -> dict[str, int]:
    """With what `Order.per_node` says of them."""
    stages = (1, 2, 3) if zero.installed() else ()
    return {"torch DDP": 0, "torch FSDP2 full": 0, "torch FSDP2 hybrid": max(len(cluster.ranks_of_node[0]), 2),
            **{f"DeepSpeed ZeRO-{stage}": stage for stage in stages}}


def at_speed(cluster: Cluster, slower: Sequence[float]) -> Cluster:
    """The profiled cluster with cores on which everything takes so many times as long, by rank."""
    def device(d: Device, ratio: float) -> Device:
        costs = {name: value * ratio for name in ("message_cpu_s", "byte_cpu_s", "sum_cpu_s")
                 if (value := getattr(d, name)) is not None}
        return d.replace(efficiency={kind: part / ratio for kind, part in d.efficiency.items()}, block_times=tuple(
            t.replace(forward_s=t.forward_s * ratio, backward_s=t.backward_s * ratio) for t in d.block_times), **costs)

    mine = iter(slower)
    return cluster.replace(nodes=tuple(
        n.replace(devices=tuple(device(d, next(mine)) for d in n.devices)) for n in cluster.nodes))


class _Contest:
    """Contenders one after the other; after one that fails, the processes are made anew."""

    def __init__(self, bed: Any) -> None:
        self.bed, self._gauged = bed, list[tuple[float, list[float]]]()
        self._anew()

    def _anew(self) -> None:
        self.pool, self._is_new = Pool(self.bed), True

    def run(self, order: Order) -> Measured | str:
        """Or why it failed. New processes make one step of it before: they do more at first than one step at full speed
        tells, and ranks with a tenth of a core took up to 1.8 times as long."""
        try:
            if self._is_new:
                self._measure(order._replace(steps=1, traced=0))
                self._is_new = False
            if not self._gauged or time.monotonic() > self._gauged[-1][0] + GAUGE_EVERY_S:
                self.gauge(order.work, order.cluster)
            return self._measure(order)
        except (RuntimeError, EOFError, OSError) as error:
            for pid in self.bed.processes():
                os.kill(pid, 9)
            self._anew()
            return f"failed: {error}"

    def gauge(self, work: Job, cluster: Cluster) -> None:
        found = self.pool.gauge(work, cluster)
        self._gauged.append((time.monotonic(), found))

    def slower(self, at_s: float) -> list[float]:
        """How many times as long as in its profile each rank computed at that time: the geometric mean over all times
        that ranks were asked, the nearest counting most."""
        near = min(abs(at_s - then) for then, _ in self._gauged)
        weights = [math.exp((near**2 - (at_s - then)**2) / GAUGE_EVERY_S**2 / 2) for then, _ in self._gauged]
        return [math.exp(sum(w * math.log(x) for w, x in zip(weights, mine)) / sum(weights))
                for mine in zip(*(found for _, found in self._gauged))]

    def _measure(self, order: Order) -> Measured:
        return self.pool.run(order._replace(rendezvous=self.bed.rendezvous(order.plan.ranks if order.plan else ())))

    def __enter__(self) -> _Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def _empty(cluster: str, name: str, note: str) -> Row:
    return Row(cluster, name, None, None, None, None, None, note.splitlines()[0][:200])


def _steps(seconds: float) -> int:
    return max(STEPS[0], min(STEPS[1], math.ceil(WINDOW_S / seconds)))


def _row(cluster: str, order: Order, found: Measured, slower: Sequence[float], ideal_s: float) -> Row:
    from mixfleet.sim import predict

    plan, steps, outcomes, wire = order.plan, order.steps, found.outcomes, found.wire
    assert plan is not None
    real, speed = at_speed(order.cluster, slower), fmean(slower[rank] for rank in plan.ranks)
    prediction = predict(plan, order.work, real, sent=True, trace=bool(order.traced))
    plain_s = predict(plan, order.work, order.cluster).step_s
    exact, payload = True, Counter[str]()
    ports: dict[str, float] = defaultdict(float)
    capacity: dict[str, float] = {}
    for rank in plan.ranks:
        outcome = outcomes[rank]
        assert outcome is not None
        assert prediction.sent_bytes is not None
        kinds: Counter[str] = Counter()
        for (kind, dst), nbytes in outcome.sent.items():
            kinds[kind] += nbytes
            path = real.path(rank, dst)
            if real.node_of[rank] != real.node_of[dst]:
                payload[real.nodes[real.node_of[rank]].name] += nbytes
                for port in path.ports[1:-1]:
                    ports[port.name] += nbytes / steps
                    capacity[port.name] = port.bandwidth_Bps
        expected = prediction.sent_bytes[str(rank)]
        exact &= all(kinds[k] == steps * n for k, n in expected.items()) and sum(kinds.values()) == steps * sum(
            expected.values())
    link_s = max((n / capacity[p] for p, n in ports.items()), default=0.0)
    total = sum(payload.values())
    far = sum(n for rank in plan.ranks if (o := outcomes[rank]) for (_, dst), n in o.sent.items()
              if (rank < 2) != (dst < 2))
    return Row(cluster, order.name, prediction.step_s, found.step_s, exact,
               sum(wire.values()) / total if total else None, max(ideal_s * speed, link_s), far_bytes=far / steps,
               cpu_s=tuple(o.cpu_s if o else 0.0 for o in outcomes),
               speed=speed, plain_s=plain_s, others=found.others, runs=(found.step_s,),
               parts=_parts(prediction.trace, [o for o in outcomes if o]) if prediction.trace else ())


def _traced(outcomes: Sequence[Outcome]) -> Trace:
    bounds = list(zip(*(o.bounds for o in outcomes)))
    return Trace(spans=tuple(s for o in outcomes for s in o.spans), meta={
        "kind": "measured", "steps_ns": [[min(a for a, _ in each), max(b for _, b in each)] for each in bounds]})


def _parts(predicted: Trace, outcomes: Sequence[Outcome]) -> tuple[tuple[int, str, float, float], ...]:
    """What `mixfleet compare` would say of the recorded steps."""
    return tuple(tuple(row) for row in compare(predicted, _traced(outcomes)).rows)  # type: ignore[misc]


def _keep(folder: Path, order: Order, found: Measured, slower: Sequence[float]) -> None:
    """What `mixfleet predict` and `compare` read: plan, job, cluster as fast as it was meanwhile, recorded steps."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [o for o in found.outcomes if o]
    assert order.plan is not None
    order.plan.save(folder / "plan.yaml")
    order.work.save(folder / "job.yaml")
    at_speed(order.cluster, slower).save(folder / "cluster.yaml")
    write_trace(_traced(outcomes), folder / "measured.json")


class Gain(NamedTuple):
    """What moving less far away brings. Ratios are of the plan to the one that it is measured against."""

    cluster: str
    name: str
    against: str
    bytes_by_formula: float
    bytes_counted: float
    time_predicted: float
    time_measured: float


def gains(rows: Sequence[Row]) -> list[Gain]:
    """Gathers in stages, and partition groups (MiCS), against ZeRO-3: bytes across the middle, and time.

    With p pieces on nodes of k ranks a gather takes (p - k) M / p out of each node in stages (MiCS, arXiv 2205.00119)
    and k times that if every rank sends its piece to every other one; hop 1 is the same the other way. Groups that
    stay in a node exchange nothing across until hop 2, 2 (r - 1) / r M / p per rank once per step, against three such
    exchanges of every micro-batch: all but the gathers of blocks at the ends, which stay from forward to backward and
    from backward to the next forward, one more than are gathered ahead.
    """
    found = []
    k, p, steps = 2, 4, MICROS
    r, stay = p // k, 1 + Sharding().prefetch
    hop_2, exchange = k * 2 * (r - 1) / r / k, k * (p - k) / p  # in M, out of a node
    pairs = (("ZeRO-3, gathers in stages", "ZeRO-3"),
             (f"groups of 2, {MICROS} micro-batches", f"ZeRO-3, {MICROS} micro-batches"))
    for name, against in pairs:
        for cluster in dict.fromkeys(r.cluster for r in rows):
            sizes = [sum(param.count for param in block.params) for block in job(cluster).model.blocks]
            first, last = sum(sizes[:stay]) / sum(sizes), sum(sizes[-stay:]) / sum(sizes)
            groups = hop_2 / (exchange * (3 * steps - steps * last - (steps - 1) * first))
            ratio = 1 / k if name == pairs[0][0] else groups
            here = {r.name: r for r in rows if r.cluster == cluster}
            a, b = here.get(name), here.get(against)
            if a and b and a.measured_s and b.measured_s and a.predicted_s and b.predicted_s and a.far_bytes \
                    and b.far_bytes and _pairs(shapes()[cluster]):
                found.append(Gain(cluster, name, against, ratio, a.far_bytes / b.far_bytes,
                                  a.predicted_s / b.predicted_s, a.measured_s / b.measured_s))
    return found


TIE = 0.02
"""Plans whose predictions are this close are not said to be in an order."""


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation (tau): pairs of plans in the same order, less those in the other, over all; without ties."""
    found = [math.copysign(1, (a - c) * (b - d)) for (a, b), (c, d) in combinations(pairs, 2)
             if abs(a / c - 1) > TIE]
    return sum(found) / len(found) if found else 1.0


def clear_order(rows: Sequence[Row]) -> tuple[int, int]:
    """See `Summary.clear`."""
    found = []
    for a, b in combinations([r for r in rows if r.predicted_s and r.runs], 2):
        assert a.predicted_s
        assert b.predicted_s
        if abs(a.predicted_s / b.predicted_s - 1) > TIE and max(len(a.runs), len(b.runs)) > 1:
            if max(a.runs) < min(b.runs):
                found.append(a.predicted_s < b.predicted_s)
            elif max(b.runs) < min(a.runs):
                found.append(b.predicted_s < a.predicted_s)
    return sum(found), len(found)


class Summary(NamedTuple):
    """What the issue asks for."""

    cluster: str
    tau: float
    clear: tuple[int, int]
    """Of the pairs of plans that are in one order in whichever of their runs, how many are predicted in that order; and
    how many there are, where at least one of the two ran twice and predictions differ."""
    behind_best: float
    """The chosen plan's time over that of the best measured plan, less 1."""
    behind_alike: float
    """The same with times as they would be if the cores had been as fast beside all plans as beside the profile."""
    over_peers: float
    """Best peer's time over the chosen plan's."""
    of_bound: float
    of_core: float
    """Part of its quota that the busiest rank of the chosen plan used, messages among it."""


def summaries(rows: Sequence[Row]) -> list[Summary]:
    found = []
    for cluster in dict.fromkeys(r.cluster for r in rows):
        mine = [r for r in rows if r.cluster == cluster and r.measured_s]
        pairs = [(r.predicted_s, r.measured_s) for r in mine if r.predicted_s and r.measured_s and not r.same_as]
        best = min((m for _, m in pairs), default=math.nan)
        alike = {r.name: r.measured_s / r.speed for r in mine if r.speed and r.measured_s}
        chosen = next((r for r in mine if r.name == CHOSEN and r.measured_s and r.bound_s), None)
        peers = [r.measured_s for r in mine if r.name.startswith(("torch", "DeepSpeed")) and r.measured_s]
        mine_s, bound_s = (chosen.measured_s or math.nan, chosen.bound_s or math.nan) if chosen else (math.nan,) * 2
        found.append(Summary(cluster, kendall(pairs), clear_order([r for r in mine if not r.same_as]),
                             mine_s / best - 1, alike.get(CHOSEN, math.nan) / min(alike.values(), default=math.nan) - 1,
                             min(peers) / mine_s if peers else math.inf, bound_s / mine_s,
                             max(busy(chosen), default=math.nan) if chosen else math.nan))
    return found


def busy(row: Row) -> list[float]:
    """Per rank, the part of its quota that it used; none where that is not known."""
    shares = [d.share for d in shapes()[row.cluster].devices]
    return [cpu_s / share / row.measured_s for cpu_s, share in zip(row.cpu_s, shares)
            ] if row.measured_s and len(row.cpu_s) == len(shares) else []


def errors(rows: Sequence[Row], *, plain: bool = False) -> list[float]:
    """Relative errors of step times, smallest first; with `plain`, of predictions that do not allow for the speed."""
    pairs = [(r.plain_s if plain else r.predicted_s, r.measured_s) for r in rows if not r.same_as]
    return sorted(abs(p / m - 1) for p, m in pairs if p and m)


def scatters(rows: Sequence[Row]) -> list[float]:
    """How far the second run of a plan is from its first, smallest first."""
    return sorted(abs(r.runs[1] / r.runs[0] - 1) for r in rows if len(r.runs) > 1 and not r.same_as)


def _spread(found: Sequence[float]) -> str:
    tail = quantiles(found, n=10, method="inclusive")[-1] if len(found) > 1 else max(found, default=math.nan)
    return f"{median(found) if found else math.nan:.1%} (median), {tail:.1%} (90th percentile)"


def _line(row: Row) -> str:
    def seconds(value: float | None) -> str:
        return show_seconds(value) if value else ""

    error = f"{row.predicted_s / row.measured_s - 1:+.1%}" if row.predicted_s and row.measured_s else ""
    exact = "" if row.bytes_exact is None else "exact" if row.bytes_exact else "**differ**"
    wire = f"{row.wire:.3f}" if row.wire else ""
    of_bound = f"{row.bound_s / row.measured_s:.2f}" if row.bound_s and row.measured_s else ""
    speed = f"{row.speed:.2f}" if row.speed else ""
    apart = f"{row.runs[1] / row.runs[0] - 1:+.1%}" if len(row.runs) > 1 else ""
    return (f"| {row.cluster} | {row.name} | {seconds(row.measured_s)} | {apart} | "
            f"{seconds(row.predicted_s)} | {error} | {speed} | {row.others:.0%} | {exact} | {wire} | {of_bound} | "
            f"{row.note or (f'the same as {row.same_as}' if row.same_as else '')} |")


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    found, apart = errors(rows), scatters(rows)
    twice = f"the second run of a plan is off its first by {_spread(apart)}; " if apart else ""
    lines = [f"{len(found)} pairs of plan and cluster; step time off by {_spread(found)}; without allowing for the "
             f"machine's speed, {_spread(errors(rows, plain=True))}; "
             f"{twice}bytes {'exact' if all(r.bytes_exact is not False for r in rows) else 'NOT exact'}. "
             f"The kernel and others used up to {max((r.others for r in rows), default=0):.0%} of the machine. Rank "
             f"correlation is Kendall's, over the pairs of plans whose predictions differ by more than {TIE:.0%}.", "",
             "| cluster | rank correlation | of clear orders right | chosen behind best | at one speed | "
             "peers over chosen | chosen reaches of its bound | its busiest rank used of its quota |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {s.cluster} | {s.tau:.2f} | {s.clear[0]} of {s.clear[1]} | {s.behind_best:.1%} | "
              f"{s.behind_alike:.1%} | {s.over_peers:.2f} | {s.of_bound:.2f} | {s.of_core:.2f} |"
              for s in summaries(rows)]
    if found_gains := gains(rows):
        lines += ["", "| cluster | plan | against | bytes across by formula | counted | time predicted | measured |",
                  "| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [f"| {g.cluster} | {g.name} | {g.against} | {g.bytes_by_formula:.3f} | {g.bytes_counted:.3f} | "
                  f"{g.time_predicted:.3f} | {g.time_measured:.3f} |" for g in found_gains]
    lines += ["", "| cluster | plan | measured | apart | predicted | error | speed | others | bytes | wire/payload | "
              "bound/measured | |",
              "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def diagnosis(rows: Sequence[Row]) -> str:
    """Markdown: seconds per step by category, predicted and measured, of every pair that was recorded.

    Measured gathers, reductions and receives include waiting for the others; computing does not.
    """
    lines = []
    for row in (r for r in rows if r.parts):
        names = list(dict.fromkeys(category for _, category, _, _ in row.parts))
        lines += [f"## {row.cluster}: {row.name} ({show_seconds(row.predicted_s or 0)} for "
                  f"{show_seconds(row.measured_s or 0)})", "", f"| rank | {' | '.join(names)} |", "| --- " * (
                      len(names) + 1) + "|"]
        for rank in dict.fromkeys(part[0] for part in row.parts):
            mine = {category: f"{show_seconds(p)} for {show_seconds(m)}"
                    for device, category, p, m in row.parts if device == rank}
            lines.append(f"| {rank} | {' | '.join(mine.get(name, '') for name in names)} |")
        lines.append("")
    return "\n".join(lines)


def scatter(rows: Sequence[Row]) -> str:
    """Measured over predicted, both logarithmic, as SVG; the band is 8 % to both sides."""
    points = [(r.predicted_s, r.measured_s, r) for r in rows if r.predicted_s and r.measured_s and not r.same_as]
    low = min(min(p, m) for p, m, _ in points) / 1.15
    high = max(max(p, m) for p, m, _ in points) * 1.15
    size, margin = 560, 56

    def at(value: float) -> float:
        return margin + (size - 2 * margin) * math.log(value / low) / math.log(high / low)

    colours = dict(zip(dict.fromkeys(r.cluster for *_, r in points),
                       ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + 130}" height="{size}" font-family="sans-serif" '
             f'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    shift = at(low * 1.08) - at(low)
    a, b = at(low), at(high)
    parts.append(f'<polygon fill="#eee" points="{a},{size - a - shift} {b},{size - b - shift} {b},{size - b + shift} '
                 f'{a},{size - a + shift}"/><line x1="{a}" y1="{size - a}" x2="{b}" y2="{size - b}" stroke="#888"/>')
    for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20):
        if low <= tick <= high:
            parts.append(f'<text x="{at(tick):.1f}" y="{size - margin + 18}" text-anchor="middle">{tick:g} s</text>'
                         f'<text x="{margin - 8}" y="{size - at(tick) + 4:.1f}" text-anchor="end">{tick:g} s</text>')
    for p, m, r in points:
        mark = 6 if r.name == CHOSEN else 4
        parts.append(f'<circle cx="{at(p):.1f}" cy="{size - at(m):.1f}" r="{mark}" fill="{colours[r.cluster]}" '
                     f'fill-opacity="0.75"><title>{r.cluster}: {r.name}</title></circle>')
    for i, (cluster, colour) in enumerate(colours.items()):
        parts.append(f'<circle cx="{size}" cy="{margin + 20 * i}" r="5" fill="{colour}"/>'
                     f'<text x="{size + 12}" y="{margin + 4 + 20 * i}">{cluster}</text>')
    parts.append(f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">predicted step</text>'
                 f'<text x="16" y="{size / 2}" text-anchor="middle" transform="rotate(-90 16 {size / 2})">measured step'
                 "</text></svg>")
    return "\n".join(parts) + "\n"


def run(*, quick: bool, only: Sequence[str] = (), traced: int = 0, labels: Sequence[str] = (),
        known: Collection[tuple[str, str]] = (), out: Path | None = None) -> Iterator[Row]:
    """Rows of all clusters, less those of the (cluster, contender) that are `known`; of two rows of one contender the
    later counts."""
    if quick and not only:
        only = ("one slow", "slow link")
    start, wanted = time.monotonic(), [name for name in shapes() if not only or name in only]
    for i, name in enumerate(wanted, 1):
        yield from measure(name, shapes()[name], quick=quick, traced=traced, labels=labels,
                           known={label for where, label in known if where == name}, out=out,
                           until=start if quick else start + BUDGET_S * i / len(shapes()))


def merged(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Row]:
    """These rows, and those of an earlier run that they do not replace, by cluster."""
    found = {(r.cluster, r.name): r for r in (*earlier, *rows)}
    order = list(shapes())
    return sorted(found.values(), key=lambda r: order.index(r.cluster))


def load(out: Path) -> list[Row]:
    """The rows that a run has left in its folder; none if there are none."""
    path = out / "results.json"
    return [Row(**{**one, "parts": tuple(tuple(p) for p in one["parts"]), "cpu_s": tuple(one.get("cpu_s", ())),
                   "runs": tuple(one.get("runs", ()))})
            for one in (json.loads(path.read_text()) if path.exists() else ())]


def save(rows: Sequence[Row], out: Path) -> str:
    """results.json, table.md, scatter.svg, and diagnosis.md where steps were recorded. Returns the table."""
    out.mkdir(parents=True, exist_ok=True)
    text = table(rows)
    write_text(out / "results.json", json.dumps([r._asdict() for r in rows], indent=1))
    write_text(out / "table.md", text)
    if any(r.parts for r in rows):
        write_text(out / "diagnosis.md", diagnosis(rows))
    if errors(rows):
        write_text(out / "scatter.svg", scatter(rows))
    return text


def figures() -> Iterator[Figure]:
    """The quick part, as figures."""
    from mixfleet.testbed import probe

    missing = probe().missing
    if missing:
        yield Figure("prediction on a testbed", f"not measured: {missing[0]}")
        return
    rows = merged([*run(quick=True)], ())
    found, busy = errors(rows), max(r.others for r in rows)
    yield Figure("step time on a testbed, median error", f"{median(found):.1%} (others use up to {busy:.0%} of the "
                 "machine)", "at most 8 %", median(found) <= 0.08)
    yield Figure("bytes on a testbed", "exact" if all(r.bytes_exact is not False for r in rows) else "differ", "exact",
                 all(r.bytes_exact is not False for r in rows))
    for s in summaries(rows):
        yield Figure(f"testbed {s.cluster}: rank correlation; chosen behind best; best peer over chosen",
                     f"{s.tau:.2f}; {s.behind_best:.1%}; {s.over_peers:.2f}", "at least 0.9; at most 3 %; at least 2",
                     s.tau >= 0.9 and s.behind_best <= 0.03)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/testbed"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[], choices=list(shapes()))
    parser.add_argument("--plan", action="append", default=[], metavar="NAME",
                        help="a plan or peer of the table, instead of all; may be repeated")
    parser.add_argument("--merge", action="store_true", help="keep the rows of results.json that are not measured now")
    parser.add_argument("--resume", action="store_true", help="measure only what results.json does not have yet")
    parser.add_argument("--diagnose", action="store_true", help="record steps, and compare them by category")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    earlier = load(options.out) if options.merge or options.resume else []
    known = {(r.cluster, r.name) for r in earlier if options.resume and not r.note.startswith("failed")}
    rows: list[Row] = []
    for row in run(quick=options.quick, only=options.only, traced=2 if options.diagnose else 0, labels=options.plan,
                   known=known, out=options.out):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
        save(merged(rows, earlier), options.out)
    print(save(merged(rows, earlier), options.out))
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
