"""What a plan will do: the answer to "how long, how much memory, how much money", from one simulated step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import ceil
from statistics import fmean, pstdev

from mixfleet import trace as tr
from mixfleet.batching import Batch, Batcher, BatchUse, steps_of
from mixfleet.cluster import Cluster, Device
from mixfleet.cost.kernels import compute_dtype
from mixfleet.cost.memory import allocator_factor, attention_note
from mixfleet.cost.money import price_per_million_tokens, step_energy_j, step_price
from mixfleet.errors import InputError
from mixfleet.job import PRODUCTS, Job
from mixfleet.model.spec import Size
from mixfleet.plan import Plan
from mixfleet.plan_rules import why_not
from mixfleet.program.action import PUBLISH, STEP, Action, B, F, Program
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import in_flight
from mixfleet.sim.interpreter import CATEGORY, Played, Row, play
from mixfleet.sim.memory import Memory, Peak, follow, offloaded
from mixfleet.sim.sent import Sent, bytes_sent
from mixfleet.spec import Spec
from mixfleet.trace import MemoryMark, Span, Trace
from mixfleet.units import NS_PER_S, show_bytes

SENT_LIMIT = 64
"""Ranks up to which a prediction counts the bytes that each of them sends without being asked."""


class DeviceUse(Spec, frozen=True, kw_only=True):
    """What one device does and holds. Bytes are those taken from the device, allocator and framework included."""

    rank: int
    device: str
    node: str
    pipeline: int
    stage: int
    replica: int
    """Number among all data-parallel replicas."""
    busy: float
    """Fraction of the step in which it computes."""
    capacity_bytes: int
    peak_bytes: int
    """The larger of the two peaks below; what must fit."""
    fresh_bytes: int
    """Peak of the first step of a fresh run, in which the optimizer makes its state."""
    resumed_bytes: int
    """Peak of every later step, and of a resumed run from the start."""
    phase: str
    """What begins when the peak begins: `backward of micro-batch 0, blocks 3 to 7`."""
    peak_s: float
    """Seconds into the step at which it begins; under an asynchronous schedule, into the fill."""
    breakdown: dict[str, int]
    """Bytes at the peak, by what holds them."""
    more: tuple[tuple[int, int], ...] = ()
    """Where else it stands: (pipeline, stage)."""
    host_bytes: int = 0
    """What it keeps in the memory of its node instead (`Stage.offload`, `Stage.offload_blocks`), at most."""

    @property
    def lacks_bytes(self) -> int:
        """Bytes by which the peak is above the capacity; 0 if it fits."""
        return max(0, self.peak_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        return not self.lacks_bytes


class Share(Spec, frozen=True, kw_only=True):
    """A part of the chain of work and transfers that sets the length of the step."""

    category: str
    where: str
    """A stage, or the port that is tightest on the way: `lab0:nic:out`."""
    fraction: float


class Prediction(Spec, frozen=True, kw_only=True):
    """One optimizer step of a plan in steady state, from its first action to its last. Under an asynchronous schedule
    the mean of some steps between fill and drain; memory is that of all, fill included."""

    step_s: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float
    """FLOPs of forward and backward, without recomputation and with attention as the full square, over the time and
    the sum of the dense peaks of all devices in use, each at the type that it computes in."""
    hfu: float
    """The same with recomputation counted."""
    bubble: float
    """Share of all devices' time in which they neither compute nor communicate."""
    exposed_s: dict[str, float]
    """Seconds per step in which a device communicates and computes nothing, by category; the mean over devices."""
    devices: tuple[DeviceUse, ...]
    fits: bool
    reasons: tuple[str, ...]
    """Why it does not fit: which devices lack how much, when, and what would help."""
    bound: str
    """What limits the step, in one sentence."""
    critical: tuple[Share, ...]
    """The chain that sets the step's length, by what it is spent on; largest first."""
    cost_per_step: float | None
    cost_per_million_tokens: float | None
    """In the currency of the cluster's prices; None if a device has no price."""
    energy_j: float | None
    """Joules per step at rated power, an upper bound; None if a device has no rating."""
    sent_bytes: dict[str, Sent] | None
    """Payload bytes that each rank (as text) sends in a step, by operation (`sim.sent`); None for large plans unless
    asked for."""
    batches: BatchUse | None = None
    """Of a job whose samples differ in length: `step_s` and all rates are means over these steps; the rest is of the
    step whose time is nearest to the mean, memory that of the fullest micro-batches there can be, and `sent_bytes` of
    the first step."""
    trace: Trace | None = None

    @property
    def peak(self) -> DeviceUse:
        """The device that is fullest for its size."""
        return max(self.devices, key=lambda d: d.peak_bytes / d.capacity_bytes)


def simulate(program: Program, plan: Plan, job: Job, cluster: Cluster, *, fold: bool = True) -> Trace:
    """One step of `program`, which `lower` made of `plan`. Equal devices share a row unless `fold` is off."""
    layout = Layout(plan, job.model)
    played = play(program, plan, job, cluster, layout, fold=fold)
    memories = {(r, rank): follow(row, rank, plan, job, cluster, layout)
                for r, row in enumerate(played.rows) for rank in _kinds(row, cluster).values()}
    return _trace(played, memories, plan, job, cluster)


def predict(plan: Plan, job: Job, cluster: Cluster, *, trace: bool = False,
            sent: bool | None = None) -> Prediction:
    """Predicts one step. `trace` adds the simulated trace, `sent` the bytes each rank sends (None: in small plans).

    Memory that does not suffice is an answer (`fits`, `reasons`). A plan that is impossible raises InputError.
    """
    reason = why_not(plan, job, cluster)
    if reason:
        raise InputError(reason, where=f"plan {plan.name}" if plan.name else "")
    with few_collections():
        return _predicted(plan, job, cluster, trace, len(plan.ranks) <= SENT_LIMIT if sent is None else sent)


@contextmanager
def few_collections() -> Iterator[None]:
    """Garbage is collected rarely: many small values are made that live on, and looking at them again is wasted."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


YOUNG = 500_000
"""New values before a collection."""


def _predicted(plan: Plan, job: Job, cluster: Cluster, trace: bool, sent: bool) -> Prediction:
    layout = Layout(plan, job.model)
    program = lower(plan, job.model, layout)
    use, batch, tokens = None, None, float(job.tokens_per_step)
    lengths: tuple[int, ...] = ()
    steps = steps_of(job)
    if steps:
        batcher = Batcher(plan, job, cluster)
        batches = [batcher.step(one) for one in steps]
        played, typical, use = _several(batches, program, plan, job, cluster, layout)
        lengths, tokens = steps[typical], use.tokens
        batch = batches[0] if plan.batching != "padded" else None
    else:
        played = play(program, plan, job, cluster, layout)
    memories = {(r, rank): follow(row, rank, plan, job, cluster, layout)
                for r, row in enumerate(played.rows) for rank in _kinds(row, cluster).values()}
    record = _trace(played, memories if trace else {}, plan, job, cluster, named=trace, lengths=lengths)
    step_s = use.step_s if use else tr.step_s(record)
    devices = _devices(played, memories, job, cluster, layout, tr.utilization(record))
    crowded = tuple(_crowded(devices, cluster))
    used = [cluster.devices[rank] for rank in plan.ranks]
    mfu, hfu = tr.flop_utilization(record)
    exposed = tr.mean_exposed(record)
    critical = _critical(played)
    return Prediction(
        step_s=step_s, tokens_per_s=tokens / step_s, samples_per_s=job.global_batch / step_s,
        mfu=mfu, hfu=hfu, bubble=tr.bubble(record), exposed_s=exposed, devices=devices,
        fits=all(d.fits for d in devices) and not crowded,
        reasons=(*_reasons(devices, plan, job, cluster), *crowded),
        bound=_bound(critical, devices), critical=critical, cost_per_step=step_price(used, step_s),
        cost_per_million_tokens=price_per_million_tokens(used, step_s, tokens),
        energy_j=step_energy_j(used, step_s),
        sent_bytes=bytes_sent(lower(plan, job.model, layout, updates=1), plan, job, layout, batch=batch) if sent else
        None, batches=use, trace=record if trace else None)


def _several(batches: Sequence[Batch], program: Program, plan: Plan, job: Job, cluster: Cluster, layout: Layout
             ) -> tuple[Played, int, BatchUse]:
    """Plays some steps: that whose time is nearest to their mean, its number, and what is to be said of all. Padded
    steps take equally long."""
    alike = plan.batching == "padded"
    played = [play(program, plan, job, cluster, layout, batch=None if alike else batch)
              for batch in (batches[:1] if alike else batches)]
    seconds = [one.end_ns / NS_PER_S for one in played]
    mean = fmean(seconds)
    typical = min(range(len(played)), key=lambda k: abs(seconds[k] - mean))
    return played[typical], typical, BatchUse(
        steps=len(batches), step_s=mean, least_s=min(seconds), most_s=max(seconds), deviation_s=pstdev(seconds),
        tokens=fmean(batch.tokens for batch in batches), padding=fmean(batch.padding for batch in batches),
        imbalance=fmean(batch.imbalance for batch in batches))


def flops_per_step(job: Job, plan: Plan, lengths: Sequence[int] = ()) -> tuple[float, float]:
    """FLOPs of one step over all devices: of the model, and with what the plan recomputes. `lengths` are those of the
    step's samples, if not all `seq_len`; padding does not count."""
    powers = [fmean(n**k for n in lengths) if lengths else float(job.seq_len**k) for k in range(3)]

    def per_sample(size: Size) -> float:
        """The mean over samples of a count, a polynomial in the length."""
        return sum(term.coef * powers[term.s] for term in size.terms)

    known: dict[str, tuple[float, float, float]] = {} if lengths else job.__dict__.setdefault("_flops", {})
    for block in job.model.blocks:
        if block.kind not in known:
            forward = [(op.kind, per_sample(op.flops)) for op in block.ops]
            backward = sum(per_sample(op.backward_flops) for op in block.ops)
            known[block.kind] = (sum(n for _, n in forward), backward,
                                 sum(n for kind, n in forward if kind == "attention"))
    model = job.global_batch * sum(sum(known[b.kind][:2]) for b in job.model.blocks)
    again = 0.0
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            again += pipeline.samples * pipeline.replicas * sum(
                known[job.model.blocks[b].kind][0 if mode == "full" else 2]
                for b, mode in stage.modes.items() if mode != "none")
            again += pipeline.samples * pipeline.replicas * sum(  # a backward leg goes forward again
                known[job.model.blocks[b].kind][0] for lo, hi in stage.ahead for b in range(lo, hi))
    return model, model + again


def _kinds(row: Row, cluster: Cluster) -> dict[Device, int]:
    """One rank for each kind of device in the row: the last, whose slices are the largest."""
    return {cluster.devices[rank]: rank for rank in row.entity.ranks}


def _trace(played: Played, memories: dict[tuple[int, int], Memory], plan: Plan, job: Job, cluster: Cluster, *,
           named: bool = True, lengths: Sequence[int] = ()) -> Trace:
    """The record of what was played; `lengths` are those of the samples, if not all `seq_len`.

    Spans without names are enough for sums, and much of the work is saved."""
    spans: list[Span] = []
    marks: list[MemoryMark] = []
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    row_of: dict[str, int] = {}
    steps = _steps(played, plan)
    for r, row in enumerate(played.rows):
        device = row.entity.ranks[0]
        for action, stream, parts, start, end in zip(row.actions, row.streams, row.parts, row.start_ns, row.end_ns,
                                                     strict=True):
            name = str(action) if named else ""
            if parts:
                whole, done, begin = sum(part.ns for part in parts), 0, start  # transfers on the same core stretch all
                for part in parts:
                    done += part.ns
                    until = begin + (end - begin) * done // whole
                    spans.append(Span(device, stream, name, part.category, start, until))
                    start = until
            elif end > start:
                spans.append(Span(device, stream, name, CATEGORY[action.op], start, end))
        for (index, rank), memory in memories.items():
            if index == r and rank == next(iter(_kinds(row, cluster).values())):
                marks += [MemoryMark(device, ns, nbytes, str(row.actions[i]) if i >= 0 else "")
                          for ns, nbytes, i in memory.marks]
        names[str(device)] = cluster.devices[device].name
        counts[str(device)] = sum(len(m.ranks) for m in row.members)
        row_of |= {str(rank): device for m in row.members for rank in m.ranks}
    model, hardware = flops_per_step(job, plan, lengths)
    found = Trace(spans=tuple(spans), memory=tuple(marks), meta={
        "kind": "predicted", "steps_ns": [[a, b] for a, b in pairwise(steps)],
        "device_names": names, "multiplicity": counts,
        "row_of": row_of, "tokens_per_step": sum(lengths) or job.tokens_per_step, "model_flops_per_step": model,
        "hardware_flops_per_step": hardware, "peak_flops": sum(
            d.flops[PRODUCTS[job.products].rate if job.products else compute_dtype(d, job.precision)] * d.share
            for d in (cluster.devices[r] for r in plan.ranks))} | (
            {"note": cluster.note} if cluster.note else {}))
    return found if plan.synchronous else tr.within(found)


def _steps(played: Played, plan: Plan) -> list[int]:
    """Where steps end, in ns: the whole program, or the updates of an asynchronous one between fill and drain."""
    if plan.synchronous:
        return [0, played.end_ns]
    ends: dict[int, int] = {}
    for row in played.rows:
        turns: Counter[tuple[str, int]] = Counter()
        for action, end in zip(row.actions, row.end_ns, strict=True):
            if action.op in (STEP, PUBLISH):
                update = turns[action.op, action.lo] // len(plan.pipelines[row.entity.pipeline].micro_batches) \
                    if plan.waves else turns[action.op, action.lo]
                ends[update] = max(end, ends.get(update, 0))
                turns[action.op, action.lo] += 1
    depth = plan.depth
    return [ends[u] for u in range(depth, len(ends) - depth)]


def _phase(action: Action | None) -> str:
    """An action in words."""
    if action is None:
        return "the whole step"
    blocks = f"block {action.lo}" if action.hi <= action.lo + 1 else f"blocks {action.lo} to {action.hi - 1}"
    if action.op in (F, B):
        return f"{'forward' if action.op == F else 'backward'} of micro-batch {action.mb}, {blocks}"
    what = {"RA": "receiving activations", "RG": "receiving gradients", "G": "gathering weights",
            "S": "the optimizer step", "R": "reducing gradients",
            "LA": "bringing activations back from the host", "EA": "moving activations to the host",
            "K": "keeping a version of the weights", "A": "predicting weights"}.get(action.op, str(action))
    return f"{what}, {blocks}"


def _crowded(devices: tuple[DeviceUse, ...], cluster: Cluster) -> Iterable[str]:
    """Nodes whose host memory is too small for what their GPUs keep there."""
    held_by = Counter[str]()
    for d in devices:
        if d.host_bytes and cluster.devices[d.rank].kind == "gpu":
            held_by[d.node] += d.host_bytes
    for node in cluster.nodes:
        held = held_by[node.name]
        if held > node.host_memory_bytes:
            yield (f"node {node.name} lacks {show_bytes(held - node.host_memory_bytes)} of host memory: what its "
                   f"devices offload takes {show_bytes(held)} of {show_bytes(node.host_memory_bytes)}. Try `offload` "
                   "on fewer stages, or sharding.optimizer over more replicas")


def _devices(played: Played, memories: dict[tuple[int, int], Memory], job: Job, cluster: Cluster, layout: Layout,
             busy: dict[int, float]) -> tuple[DeviceUse, ...]:
    found = []
    away = any(stage.offload for pipeline in layout.plan.pipelines for stage in pipeline.stages)
    for r, row in enumerate(played.rows):
        answers = {device: memories[r, rank] for device, rank in _kinds(row, cluster).items()}
        known: dict[int, tuple[Memory, Peak, str]] = {}  # by identity, since hashing a device reads much of it
        for member in row.members:
            for rank in member.ranks:
                device = cluster.devices[rank]
                if id(device) not in known:
                    peak = _use(answers[device].resumed, answers[device].fresh)
                    known[id(device)] = answers[device], peak, _phase(peak.action)
                memory, peak, phase = known[id(device)]
                found.append(DeviceUse(
                    rank=rank, device=device.name, node=cluster.nodes[cluster.node_of[rank]].name,
                    pipeline=member.pipeline, stage=member.stage, replica=member.replica,
                    busy=busy.get(row.entity.ranks[0], 0.0), capacity_bytes=device.memory_bytes,
                    fresh_bytes=memory.fresh.total_bytes, resumed_bytes=memory.resumed.total_bytes,
                    peak_bytes=peak.total_bytes, phase=phase,
                    peak_s=peak.time_ns / NS_PER_S, breakdown=peak.breakdown,
                    more=tuple((seat.pipeline, seat.stage) for seat in row.seats[1:]),
                    host_bytes=memory.parked + (
                        sum(offloaded(layout, job, post) for post in layout.posts_of(rank)) if away else 0)))
    return tuple(sorted(found, key=lambda d: d.rank))


def _use(resumed: Peak, fresh: Peak) -> Peak:
    return fresh if fresh.total_bytes > resumed.total_bytes else resumed


def _critical(played: Played) -> tuple[Share, ...]:
    spent: dict[tuple[str, str], int] = {}
    for category, where, ns in played.critical:
        spent[category, where] = spent.get((category, where), 0) + ns
    whole = sum(spent.values())
    return tuple(Share(category=c, where=w, fraction=ns / whole)
                 for (c, w), ns in sorted(spent.items(), key=lambda item: (-item[1], item[0])) if ns)


def _bound(critical: tuple[Share, ...], devices: tuple[DeviceUse, ...]) -> str:
    """The largest part of the critical chain, computing of one stage taken together; memory if that does not fit."""
    short = [d for d in devices if not d.fits]
    if short:
        worst = max(short, key=lambda d: d.lacks_bytes)
        return f"memory of {worst.device} (rank {worst.rank}): it lacks {show_bytes(worst.lacks_bytes)}"
    groups: dict[tuple[str, str], float] = {}
    for share in critical:
        what = "compute" if share.category in tr.COMPUTE else share.category
        groups[what, share.where] = groups.get((what, share.where), 0.0) + share.fraction
    if not groups:
        return "nothing"
    (what, where), fraction = max(groups.items(), key=lambda item: item[1])
    names = {"compute": f"computing of {where}", "tensor": f"tensor-parallel communication of {where}",
             "expert": f"rows to experts and back of {where}",
             "send": f"sends through {where}", "recv": f"sends through {where}",
             "gather": f"gathering weights through {where}", "reduce": f"reducing gradients through {where}",
             "load": f"loading from the host of {where}", "save": f"saving to the host of {where}"}
    return f"{names[what]} ({fraction:.0%} of the chain that sets the step's length)"


def _reasons(devices: tuple[DeviceUse, ...], plan: Plan, job: Job, cluster: Cluster) -> Iterable[str]:
    """One sentence per stage and kind of device that lacks memory, worst first."""
    groups: dict[tuple[int, int, str], list[DeviceUse]] = {}
    for use in devices:
        if not use.fits:
            groups.setdefault((use.pipeline, use.stage, use.device), []).append(use)
    for (p, s, name), uses in sorted(groups.items(), key=lambda item: -max(u.lacks_bytes for u in item[1])):
        worst = max(uses, key=lambda u: u.lacks_bytes)
        largest = sorted(worst.breakdown.items(), key=lambda item: -item[1])[:3]
        yield (f"{name} (rank {worst.rank}{f' and {len(uses) - 1} more' if len(uses) > 1 else ''}; pipeline {p} "
               f"stage {s}) lacks {show_bytes(worst.lacks_bytes)} in {worst.phase}: it needs "
               f"{show_bytes(worst.peak_bytes)} of {show_bytes(worst.capacity_bytes)}, mostly "
               f"{', '.join(f'{what} {show_bytes(n)}' for what, n in largest)}. "
               + _advice(worst, plan, job, cluster.devices[worst.rank]))


_QUICK_STEPS = 128


def _lighter(use: DeviceUse, plan: Plan, device: Device) -> list[str]:
    """How many micro-batches in flight would fit, and which schedules hold no more on any device that lacks memory."""
    if plan.shared or plan.pipelines[use.pipeline].in_turn:
        return []
    pipeline = plan.pipelines[use.pipeline]
    home, count = tuple(c.stage for c in pipeline.chain), len(pipeline.micro_batches)
    held = in_flight(pipeline.orders(plan.schedule)[use.stage])
    one = use.breakdown.get("activations", 0) * allocator_factor(device) / held
    if held < 2 or not one:
        return []
    fit = held - ceil(use.lacks_bytes / one)
    what = "micro-batches" if len(home) == len(pipeline.stages) else "micro-batches times chunks"
    if fit < 1:
        return []
    # Orders that are found by list scheduling take a while for many steps; a hint is not worth it. Asynchronous ones
    # train otherwise, which is no way to save memory.
    few = len(home) * count <= _QUICK_STEPS
    lighter = [name for name, schedule in SCHEDULES.items()
               if (few or not (schedule.splits or schedule.even_rounds)) and not schedule.weights
               and schedule.why_not(home, count) is None
               and in_flight(schedule.orders(home, count)[use.stage]) <= fit]
    return [f"at most {fit} of the {held} {what} now in flight here, as under {' or '.join(lighter)}" if lighter else
            f"an order with at most {fit} of the {held} {what} now in flight here"]


def _advice(use: DeviceUse, plan: Plan, job: Job, device: Device) -> str:
    """What would help most, by what is held at the peak."""
    pipeline, held = plan.pipelines[use.pipeline], use.breakdown
    stage = pipeline.stages[use.stage]
    moving = held.get("activations", 0) + held.get("recomputed", 0) + held.get("workspace", 0)
    state = sum(held.get(k, 0) for k in ("weights", "gradients", "master", "moments"))
    tips = []
    if moving > state:
        tips += _lighter(use, plan, device)
        if stage.recompute != "full":
            modes = {*stage.modes.values()}
            tips.append(f"recompute {'selective or full' if modes == {'none'} else 'full'}"
                        f"{' for all blocks' if len(modes) > 1 else ''}")
        if pipeline.micro_batch > 1:
            tips.append(f"a micro-batch below {pipeline.micro_batch}")
        if stage.size > 1 and len(pipeline.stages) > 1:
            tips.append(f"fewer than {stage.size} blocks here")
    else:
        replicas = len(plan.replicas)
        degree = min(plan.sharding.optimizer, plan.sharding.gradients, plan.sharding.weights)
        if replicas > 1 and degree < replicas:
            tips.append(f"sharding over up to {replicas} replicas (now weights {plan.sharding.weights}, gradients "
                        f"{plan.sharding.gradients}, optimizer {plan.sharding.optimizer})")
        elif replicas == 1:
            tips.append("more stages or tensor parallelism (with one replica there is nothing to shard)")
        if device.kind == "gpu" and device.pcie_Bps and "optimizer" not in stage.offload:
            tips.append("`offload: [optimizer]`")
        if stage.size > 1 and len(pipeline.stages) > 1:
            tips.append(f"fewer than {stage.size} blocks here")
    note = attention_note([(job.model.blocks[b], mode) for b, mode in stage.modes.items()], pipeline.micro_batch,
                          stage.tensor, device, job)
    advice = f"Try {' or '.join(tips)}." if tips else "Try more devices for this stage."
    return f"{advice} ({note} per micro-batch)" if note else advice
