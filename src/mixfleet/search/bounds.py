"""Lower bounds of a step, which prune and order; they never rank. Every one leaves something out and adds nothing.

A stage is busy with its micro-batches from the time when the first one can have reached it until the last one can
still travel back. That bounds the step from below whatever the schedule does in between, and so does a stream that
carries its transfers one after another, each as fast as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from mixfleet.cost.kernels import optimizer_s
from mixfleet.cost.memory import allocator_factor, boundary_bytes, framework_bytes
from mixfleet.cost.network import Floats, Ports, collective_s
from mixfleet.plan import Chunk, Pipeline, Plan, ScheduleName
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SYNC
from mixfleet.program.layout import Comm, Layout
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import held_at_peak
from mixfleet.search.space import micro_batch_sizes, tensor_degrees
from mixfleet.search.tables import MODES, Sharing, Table, Tables
from mixfleet.search.walk import Times, walk
from mixfleet.sim.experts import Experts
from mixfleet.sim.memory import communicators, static
from mixfleet.sim.traffic import Entity, exchanges, shards

SLACK = 1 - 1e-4
"""The simulator rounds every part of an action to whole nanoseconds."""


class Flow:
    """Times of one pipeline's stages, of which the slowest way through gives the bound."""

    def __init__(self, forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float],
                 home: Sequence[int] = (), *, splits: bool = False) -> None:
        """Seconds per chunk of the chain; `send_s[k]`: from chunk k to the next, or back. `home[k]` is the stage of
        chunk k: without it every stage has one. If backward `splits`, what a stage does last may be a weight half,
        after which nothing has to travel back."""
        home = home or range(len(forward_s))
        stages = max(home) + 1
        self.forward_s, self.backward_s = [0.0] * stages, [0.0] * stages
        self.fill_s: list[float] = []
        self.drain_s: list[float] = []
        fill = drain = 0.0
        for s, f, b, hop in zip(home, forward_s, backward_s, (*send_s, 0.0)):
            if s == len(self.fill_s):  # its first chunk, where micro-batches come in first and gradients leave last
                self.fill_s.append(fill)
                self.drain_s.append(0.0 if splits else drain)
            self.forward_s[s] += f
            self.backward_s[s] += b
            fill, drain = fill + f + hop, drain + b + hop
        self.round_s = [fill + drain - a - z for a, z in zip(self.fill_s, self.drain_s)]
        """With one chunk per stage: from the forward of a micro-batch on stage i to the end of its backward there."""

    def step_s(self, micro_batches: float, schedule: ScheduleName = "1f1b") -> float:
        """Shortest time for that many micro-batches.

        Under 1F1B stage i starts a micro-batch only when the one `stages - i` before it has come back, so every so
        many of them take a whole round trip.
        """
        stages, worst = len(self.forward_s), 0.0
        if schedule in SCHEDULES and SCHEDULES[schedule].weights:  # never fills or drains
            return max(micro_batches * (f + b) for f, b in zip(self.forward_s, self.backward_s))
        for i, (a, f, b, z) in enumerate(zip(self.fill_s, self.forward_s, self.backward_s, self.drain_s)):
            worst = max(worst, a + micro_batches * (f + b) + z)
            if schedule == "1f1b" and micro_batches >= 1:
                trips = int(micro_batches - 1) // (stages - i)
                left = micro_batches - 1 - trips * (stages - i)
                worst = max(worst, a + (trips + 1) * self.round_s[i] + left * b + z)
        return worst


def ideal_s(costs: Sequence[Sequence[float]], counts: Sequence[int], micro_batches: float) -> float:
    """Bound over all cuts of the model into stages on given devices, in this order; bubble of GPipe or 1F1B included.

    `costs[i][k]` are seconds of a block of kind k on stage i, forward and backward of one micro-batch; there are
    `counts[k]` such blocks. By duality: for weights y of sum 1, the step takes at least the mean of the stages'
    bounds, in which a block of stage i counts `micro_batches * y_i` for its own stage and `y_j` for every later
    stage j. Each block then goes where it counts least. The weights are those that make all stages equal.
    """
    shares: list[float] = []
    later = 0.0
    for row in reversed(costs):
        speed = 1 / sum(n * c for n, c in zip(counts, row))
        shares.append(max(0.0, (speed - later) / micro_batches))
        later += shares[-1]
    weights, before = [], 0.0
    for share in shares:
        weights.append((micro_batches * share + before) / later)
        before += share
    weights.reverse()
    return sum(n * min(w * row[k] for w, row in zip(weights, costs)) for k, n in enumerate(counts)) * SLACK


def upper_samples_per_s(tables: Tables) -> float:
    """Samples per second of all devices, each training alone at its best micro-batch; memory and links ignored."""
    return sum(rates_of(tables))


def rates_of(tables: Tables) -> list[float]:
    """Per rank, samples per second if it trains alone at its best micro-batch; memory and links ignored."""
    ways = dict.fromkeys((None, Sharing.evenly(tables.job, len(tables.kind_of), 1)))  # experts shared by all, or none
    rates: dict[int, float] = {}
    for kind in sorted(set(tables.kind_of)):
        rank = tables.kind_of.index(kind)
        best, micro_batch = 0.0, 1
        while micro_batch <= max(1, min(tables.job.global_batch, 64)):
            best = max(best, *(micro_batch / tables.table((rank,), micro_batch, sharing=way).whole_s for way in ways))
            micro_batch *= 2
        rates[kind] = best
    return [rates[kind] for kind in tables.kind_of]


class Whole(NamedTuple):
    """What follows from sequences being whole."""

    step_s: float
    devices: float
    """For each sequence of the batch."""
    tensor: int
    """The degree, parts of a sequence included, of the plans that come closest."""


def whole_sequences(tables: Tables, contexts: Sequence[int] = (1,)) -> Whole | None:
    """No synchronous plan on equal devices has a shorter step, memory and what crosses stages and replicas ignored;
    None where devices are unequal or not more than sequences.

    A micro-batch passes all blocks forward and backward one after another, and some replica has at least as many
    samples per device as all together have. Each block falls to a tensor degree and a micro-batch; high degrees are
    better for the first, low ones for the second, so for every weight of the two the sum over blocks of the least
    weighted mean is a bound. `contexts` are the numbers of parts of a sequence.
    """
    job, cluster, devices = tables.job, tables.cluster, len(tables.kind_of)
    if len(set(tables.kind_of)) > 1 or job.global_batch >= devices:
        return None
    node, load = max(cluster.ranks_of_node, key=len), job.global_batch / devices
    sizes = {*micro_batch_sizes(min(job.global_batch, 16), fine=False), *(m for m in (32, 64) if m <= job.global_batch)}
    ways: list[tuple[int, dict[str, tuple[float, float]]]] = []
    for tensor in tensor_degrees(job, len(node)):
        for context in (c for c in contexts if c * tensor <= devices):
            degree = tensor * context
            for sharing in dict.fromkeys((None, Sharing.evenly(job, devices, tensor))):
                for m in sorted(sizes):
                    kinds = tables.table(tuple(range(degree)), m, context, sharing).kinds
                    ways.append((degree, {kind: (n * (f + b), n * (f + b) * degree * load / m)
                                          for kind, (n, f, b) in kinds.items()}))
    best = 0.0
    for part in np.linspace(0, 1, 41).tolist():
        best = max(best, sum(min(part * way[kind][0] + (1 - part) * way[kind][1] for _, way in ways)
                             for kind in ways[0][1]))
    closest = min(ways, key=lambda way: max(sum(column) for column in zip(*way[1].values())))
    return Whole(best * SLACK, 1 / load, closest[0])


def hop_s(tables: Tables, a: Sequence[int], b: Sequence[int], nbytes: int) -> float:
    """Seconds of one micro-batch's message of `nbytes` between two tensor groups, alone."""
    key = ("hop", tuple(a), tuple(b), nbytes)
    if key not in tables.seconds:
        one, other = (Entity(0, 0, 0, tuple(ranks)) for ranks in (a, b))
        whole = len(one.ranks) * len(other.ranks)
        tables.seconds[key] = Ports.of(tables.cluster).message(
            one.ranks, other.ranks, ((x, y, n / whole) for x, y, n in shards(one, other, whole)), nbytes).alone_s
    return tables.seconds[key]


def replica_table(tables: Tables, plan: Plan, p: int, s: int, micro_batch: int) -> Table:
    """The table of replica 0 of a stage."""
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    return tables.table(stage.devices[:pipeline.context * stage.tensor], micro_batch, pipeline.context,
                        sharing(tables, plan, p, s) if plan.expert > 1 else None)


def sharing(tables: Tables, plan: Plan, p: int, s: int) -> Sharing | None:
    """What replica 0 of a stage shares experts with: in the micro-batch in which the others add least, and with the
    exchanges only where all are alike."""
    experts, first = Experts(plan, tables.job), plan.replicas.index((p, 0))
    block = next((b for b in tables.job.model.blocks if b.routed), None)
    if block is None:
        return None
    mates = experts.mates(first)
    tensors = [plan.pipelines[plan.replicas[k][0]].stages[s].tensor for k in mates]
    ends = {0, len(plan.pipelines[p].micro_batches) - 1}  # the last micro-batch may be smaller than all others
    tokens = [[experts.tokens(k, m) for k in mates] for m in ends]
    held = [n for k, t in zip(mates, tensors) for n in experts.held(k, t, block.experts)]
    most = max(experts.held(first, tensors[first - mates.start], block.experts))
    alike = len(set(held)) == len(set(tensors)) == 1 and all(len(set(row)) == 1 for row in tokens)
    return Sharing(min(sum(row) / row[first - mates.start] for row in tokens), block.experts / most if most else inf,
                   tuple(rank for k in mates for q, r in (plan.replicas[k],)
                         for rank in plan.pipelines[q].stages[s].ranks(r)) if alike else ())


def pipeline_flow(tables: Tables, plan: Plan, p: int, micro_batch: int) -> Flow:
    """Times of replica 0 of a pipeline for micro-batches of this size; its parts of a sequence are equal."""
    forward, backward = [], []
    pipeline = plan.pipelines[p]
    for lo, hi, s in pipeline.chain:
        table = replica_table(tables, plan, p, s, micro_batch)
        forward.append(float(table.forward_s[lo, hi]))
        backward.append(table.backward_of(pipeline.stages[s], lo, hi))
    return Flow(forward, backward, _hops(tables, pipeline, micro_batch), [c.stage for c in pipeline.chain],
                splits=_splits(plan.schedule))


def _hops(tables: Tables, pipeline: Pipeline, micro_batch: int) -> list[float]:
    """Seconds between neighbours of the chain, from replica 0."""
    job = tables.job

    def hop(a: Chunk, b: Chunk) -> float:
        here, there = (pipeline.stages[x.stage].devices[:pipeline.context * pipeline.stages[x.stage].tensor]
                       for x in (a, b))
        return hop_s(tables, here, there,
                     boundary_bytes(job.model.blocks[b.lo - 1], micro_batch, job.seq_len, 1, job))

    return [hop(a, b) if a.stage != b.stage else 0.0 for a, b in pairwise(pipeline.chain)]


def walked(tables: Tables, plan: Plan, p: int) -> Times | None:
    """A pipeline's steps in their order, with messages, and nothing else in the way; None where they have no order of
    their own, or another one."""
    pipeline = plan.pipelines[p]
    if (plan.schedule not in SCHEDULES or SCHEDULES[plan.schedule].ways > 1 or not plan.synchronous
            or plan.accumulation != "plain" or pipeline.replicated or tables.floor):
        return None
    sizes, home = pipeline.micro_batches, tuple(c.stage for c in pipeline.chain)
    rows = [[[0.0] * len(home), [0.0] * len(home)] for _ in range(4)]
    adds = plan.sharding.gradients == 1
    for last in (0, 1):
        if last and sizes[-1] == sizes[0]:
            for both in rows:
                both[1] = both[0]
            break
        for k, (lo, hi, s) in enumerate(pipeline.chain):
            table = replica_table(tables, plan, p, s, sizes[-last])
            whole, weight = table.backward_of(pipeline.stages[s], lo, hi), float(table.weight_s[lo, hi])
            more = float(table.adding_s[lo, hi]) if adds else 0.0
            here = (float(table.forward_s[lo, hi]), whole + more, whole - weight, weight + more)
            for both, seconds in zip(rows, here):
                both[last][k] = seconds
    hops = _hops(tables, pipeline, sizes[-1])
    key = ("walk", plan.schedule, home, len(sizes), tuple(tuple(row) for op in rows for row in op), tuple(hops))
    if key not in tables.walks:
        tables.walks[key] = walk(plan.schedule, home, len(sizes), rows, hops)
    return tables.walks[key]


def _splits(schedule: ScheduleName) -> bool:
    return schedule not in SCHEDULES or SCHEDULES[schedule].splits


def busy_s(tables: Tables, plan: Plan) -> float:
    """Bound of a plan's stages under any schedule, from computing alone."""
    worst = 0.0
    for p, pipeline in enumerate(plan.pipelines):
        sizes = pipeline.micro_batches
        counts = {size: sizes.count(size) for size in (sizes[0], sizes[-1])}
        for s, stage in enumerate(pipeline.stages):
            worst = max(worst, sum(n * float(table.forward_s[lo, hi] + table.backward_of(stage, lo, hi))
                                   for size, n in counts.items()
                                   for table in (replica_table(tables, plan, p, s, size),) for lo, hi in stage.chunks))
    return worst * SLACK


def walked_s(tables: Tables, plan: Plan) -> float:
    """Bound from all steps of synchronous pipelines in their order; 0 where that is not known."""
    found = (walked(tables, plan, p) for p in range(len(plan.pipelines)))
    return max((times.end_s for times in found if times), default=0.0) * SLACK


def compute_bound_s(tables: Tables, plan: Plan) -> float:
    """Bound from computing and the way through the pipelines."""
    worst = 0.0
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.replicated:
            worst = max(worst, *(x.fill_s + x.busy_s + x.drain_s for x in _replicated(tables, pipeline, plan)))
            continue
        whole, rest = divmod(pipeline.samples, pipeline.micro_batch)
        rest = rest if plan.synchronous or not whole else 0
        flow = pipeline_flow(tables, plan, p, pipeline.micro_batch)
        if whole:
            worst = max(worst, flow.step_s(whole, plan.schedule))
        if rest:
            last = pipeline_flow(tables, plan, p, rest)
            first = flow if whole else last
            worst = max(worst, max(a + whole * (f + b) + g + c + z for a, f, b, g, c, z in zip(
                first.fill_s, flow.forward_s, flow.backward_s, last.forward_s, last.backward_s, last.drain_s)))
    return worst * SLACK


class _Staged(NamedTuple):
    """A stage with replicas of its own, in seconds."""

    fill_s: float
    """Before any sample can have reached it."""
    drain_s: float
    busy_s: float
    """Of the replica that computes longest."""
    ready_s: float
    """Of that time, until the gradient of the topmost block can be ready; 0 where that is not known."""


def _replicated(tables: Tables, pipeline: Pipeline, plan: Plan) -> list[_Staged]:
    """Stages of which some have replicas of their own: each of them is busy with its samples, from when any can have
    reached it until they can have travelled back. Messages are left out."""
    splits = _splits(plan.schedule)
    single = plan.synchronous and not any(len(stage.chunks) > 1 for stage in pipeline.stages)
    found = []
    fill = drain = 0.0
    for s, stage in enumerate(pipeline.stages):
        mine, ready = [], 0.0
        for j in range(stage.members):
            sizes, per = [n for n in pipeline.sizes(s, j) if n], dict[int, tuple[float, float]]()
            for n in set(sizes):
                table = tables.table(stage.ranks(0, j), n)
                per[n] = (sum(float(table.forward_s[lo, hi]) for lo, hi in stage.chunks),
                          sum(table.backward_of(stage, lo, hi) for lo, hi in stage.chunks))
            mine.append([per[n] for n in sizes])
            if sizes and single and not splits and plan.accumulation == "plain":
                lo, hi = stage.blocks
                below = tables.table(stage.ranks(0, j), sizes[-1]).backward_of(stage, lo, hi - 1) if hi - lo > 1 else 0
                ready = max(ready, sum(f + b for f, b in mine[-1]) - below)
        found.append(_Staged(fill, drain, max(sum(f + b for f, b in one) for one in mine), ready))
        if single:
            fill += min(f for one in mine for f, _ in one)
            drain += 0.0 if splits else min(b for one in mine for _, b in one)
    return found


def bound_s(tables: Tables, plan: Plan) -> float:
    """Bound from computing, then from the streams of state: one transfer after another, and ports that they share."""
    worst = compute_bound_s(tables, plan)
    if not plan.synchronous:  # gradients and optimizer steps of one update pass while another one computes
        return worst
    layout = tables.layout(plan)
    starts = {pipe: k for k, (pipe, _) in reversed(list(enumerate(plan.replicas)))}
    tails: list[float] = []
    # What state moves does not depend on micro-batches, samples, recompute or schedule.
    known: Known = tables.prices.setdefault((
        plan.sharding, plan.expert, plan.expert_shares, tuple([(pipe.copies, pipe.context, tuple([
            (one.devices, one.tensor) for one in pipe.stages])) for pipe in plan.pipelines])), Known({}, {}))
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.replicated:
            for s, own in enumerate(_replicated(tables, pipeline, plan)):
                units, prices = layout.units_of_stage(p, s), _Prices(tables, layout, plan, p, s, known)
                sync = prices.total(SYNC, units)
                if sync.seconds:
                    worst = max(worst, (own.fill_s + own.ready_s + sync.seconds) * SLACK)
                tails.append(sum(prices.step_s(u, starts[p]) for u in units))
            continue
        sizes = pipeline.micro_batches
        first, last = (pipeline_flow(tables, plan, p, m) for m in (sizes[0], sizes[-1]))
        times = walked(tables, plan, p)
        if times:
            worst = max(worst, times.end_s * SLACK)
        for s, stage in enumerate(pipeline.stages):
            units = layout.units_of_stage(p, s)
            prices, k = _Prices(tables, layout, plan, p, s, known), len(sizes)
            if times:
                worst = max(worst, _reduced_s(tables, plan, p, s, layout, units, prices, times) * SLACK)
            busy = last.forward_s[s] + last.backward_s[s] + (k - 1) * (first.forward_s[s] + first.backward_s[s])
            if plan.accumulation == "layered":  # the last backward of the topmost block is nowhere near the end
                busy, k = 0.0, 1
            forward_s = first.forward_s[s]
            if stage.more or _splits(plan.schedule):  # nor need it be here, nor is the whole forward ahead of it
                busy = forward_s = 0.0
            # The gradient of the topmost block is ready after its own backward in the last micro-batch.
            lo, hi = stage.blocks
            table = replica_table(tables, plan, p, s, sizes[-1])
            below = table.backward_of(stage, lo, hi - 1) if hi - lo > 1 else 0.0
            # Each use gathers a unit, but for the few that are still there when the direction turns: a unit is kept
            # if its next use is among the next `prefetch + 1`, and around a turn they are 0, 2, 4 ... uses apart.
            turning = sorted(units, key=lambda u: -layout.units[u].elements)[
                :(1 + (plan.sharding.prefetch + 1) // 2) * len(stage.chunks)]
            gather, reduce = prices.total(GATHER, [u for u in units if u not in turning]), prices.total(REDUCE, units)
            sync, publish = prices.total(SYNC, units), prices.total(PUBLISH, units)
            ports = float(_plus(_plus(2 * k * gather.ports, k * reduce.ports), sync.ports).max())
            if sync.seconds:
                worst = max(worst, (first.fill_s[s] + max(0.0, busy - below) + sync.seconds) * SLACK)
            if reduce.seconds:
                worst = max(worst, (first.fill_s[s] + forward_s + k * reduce.seconds + sync.seconds) * SLACK)
            worst = max(worst, 2 * k * gather.seconds * SLACK, ports * SLACK)
            tails.append(max(sum(prices.step_s(u, starts[p]) for u in units), publish.seconds))
    return worst + max(tails) * SLACK


def _reduced_s(tables: Tables, plan: Plan, p: int, s: int, layout: Layout, units: Sequence[int], prices: _Prices,
               times: Times) -> float:
    """When the sums of gradients of a stage can be done: from when those of some chunk are ready, all that are ready
    then or later pass one after another. The topmost block of a chunk is ready first."""
    pipeline, stage, found = plan.pipelines[p], plan.pipelines[p].stages[s], 0.0
    ready: list[tuple[float, float, list[int]]] = []
    left = {u for u in units if layout.needed(SYNC, u)}
    for (lo, hi, own), (start, end) in sorted(zip(pipeline.chain, times.last_s), key=lambda both: both[1]):
        mine = [u for u in sorted(left) if any(lo <= b < hi for b in layout.units[u].blocks)] if own == s else []
        if not mine:
            continue
        left -= {*mine}
        if not _splits(plan.schedule) and hi - lo > 1:
            table = replica_table(tables, plan, p, s, pipeline.micro_batches[-1])
            start = max(start, end - table.backward_of(stage, lo, hi - 1) - (
                float(table.adding_s[lo, hi - 1]) if plan.sharding.gradients == 1 else 0.0))
        ready.append((start, end, mine))
    alone, ports = 0.0, np.zeros(1)
    for start, end, mine in reversed(ready):
        own_s, loads = prices.sums(SYNC, mine)
        alone, ports = alone + own_s, _plus(ports, loads)
        found = max(found, start + max(alone, float(ports.max())), end + prices.total(SYNC, mine[:1]).seconds)
    return found


def too_full(tables: Tables, plan: Plan) -> dict[tuple[int, int], str]:
    """Stages, as (pipeline, stage), that cannot fit, with the device that lacks memory: its state and the activations
    that the order of its steps makes it hold at once are too much. Empty where that is not known beforehand."""
    if plan.shared or plan.accumulation == "layered" or not plan.synchronous or plan.schedule == "roundpipe":
        return {}
    job, devices = tables.job, tables.cluster.devices
    layout, found = tables.layout(plan), dict[tuple[int, int], str]()
    for p, pipeline in enumerate(plan.pipelines):
        orders, chain = pipeline.orders(plan.schedule), pipeline.chain
        for s, stage in enumerate(pipeline.stages):
            held, then = held_at_peak(orders[s])
            for j in range(stage.members):
                post = plan.posts(p, s, 0, j)[-1]
                sizes = [n for n in pipeline.sizes(s, j) if n]
                if not sizes or devices[post].kind == "cpu":  # those keep what is offloaded as well
                    continue
                ranks = stage.devices[:pipeline.context * stage.tensor] if stage.members == 1 else stage.ranks(0, j)
                table = tables.table(ranks, min(sizes), pipeline.context,
                                     sharing(tables, plan, p, s) if plan.expert > 1 else None)
                apart = stage.offload_blocks or (stage.members > 1 and pipeline.in_turn)
                kept = 0.0 if apart else sum(n * table.saved_of(stage, *chain[k][:2]) for k, n in held.items())
                if then is not None and not apart and not tables.floor:  # a backward comes next, topmost block first
                    at = chain[then].hi - 1
                    kept += float(table.passing_bytes[MODES.index(stage.modes[at])][at, at + 1])
                taken = (sum(static(layout, job, post)) + kept) * allocator_factor(devices[post]) * SLACK
                if taken + framework_bytes(devices[post], communicators(plan, p, s)) > devices[post].memory_bytes:
                    found[p, s] = devices[post].name
    return found


class Busy(NamedTuple):
    """Least seconds of some transfers, and seconds that each port is busy with them."""

    seconds: float
    ports: Floats
    """By the number of the port."""


class Known(NamedTuple):
    """What transfers of state take, by operation and kind of unit, and the numbers of these kinds."""

    prices: dict[tuple[str, int], Busy]
    kinds: dict[tuple[object, ...], int]


def _plus(a: Floats, b: Floats) -> Floats:
    """The sum of loads by port; the shorter one says nothing of the last ports."""
    long, short = (a, b) if len(a) > len(b) else (b, a)
    found = long.copy()
    found[:len(short)] += short
    return found


class _Prices:
    """Seconds of the transfers of state of one stage, as its first rank sees them; equal units are asked once."""

    def __init__(self, tables: Tables, layout: Layout, plan: Plan, pipeline: int, stage: int,
                 known: Known) -> None:
        """`known` is shared by the stages of a plan, and by plans whose state is laid out alike."""
        self._tables, self._layout, self._plan = tables, layout, plan
        self._ports = Ports.of(tables.cluster)
        self._alike = len({one.tensor for pipe in plan.pipelines for one in pipe.stages}) == 1
        self._pipe, self._mine = plan.pipelines[pipeline], plan.pipelines[pipeline].stages[stage]
        mine = self._mine
        self._rank = mine.devices[0]
        self._known, self._kinds = known.prices, dict[int, int]()
        self._numbers = known.kinds
        # Stages of a single pipeline whose devices stand alike exchange alike; only which ports they load differs.
        self._place: tuple[object, ...] = (pipeline, stage)
        if len(plan.pipelines) == 1:
            self._place = self._ports.pattern(mine.devices)[0]

    @cached_property
    def _group_of(self) -> dict[int, tuple[int, ...]]:
        return {rank: one.ranks(r) for pipe in self._plan.pipelines for one in pipe.stages for r in range(pipe.copies)
                for rank in one.ranks(r)}

    @cached_property
    def _neighbours(self) -> list[int]:
        node_of = self._tables.cluster.node_of
        firsts = [self._mine.ranks(r)[0] for r in range(self._pipe.copies)]
        return [rank for rank in firsts if node_of[rank] == node_of[self._rank]]

    def total(self, op: str, units: Sequence[int]) -> Busy:
        """A G, R, Y or P action of all `units`: at least their sum, each alone, on the rank's own stream; and at least
        what the busiest port carries for all ranks of the stage in its node."""
        alone, ports = self.sums(op, units)
        return Busy(max(alone, float(ports.max())), ports)

    def sums(self, op: str, units: Sequence[int]) -> Busy:
        """The two sums."""
        counts: dict[int, int] = {}
        first: dict[int, int] = {}
        for u in units:
            if self._layout.needed(op, u):
                kind = self._kind(u)
                counts[kind] = counts.get(kind, 0) + 1
                first.setdefault(kind, u)
        alone, ports = 0.0, np.zeros(1)
        for kind, count in counts.items():
            if (op, kind) not in self._known:
                self._known[op, kind] = self._price(op, first[kind])
            seconds, loads = self._known[op, kind]
            alone += count * seconds
            ports = _plus(ports, count * loads)
        return Busy(alone, ports)

    def _price(self, op: str, u: int) -> Busy:
        layout, cluster, sizes = self._layout, self._tables.cluster, self._tables.job.bytes
        loads = np.zeros(1)
        if self._plan.shared:  # whose seats exchange with each other
            return Busy(0.0, loads)
        if layout.irregular:
            return self._exchanged(op, u)
        element_bytes = sizes.weight_bytes if op in (GATHER, PUBLISH) else sizes.gradient_bytes
        alone = sum(collective_s(c.op, self._least(op, u, i, c) * element_bytes, c.ranks, cluster)
                    for i, c in enumerate(layout.comms(op, u, self._rank)))
        covered: set[int] = set()
        for rank in self._neighbours if self._alike and len(layout.units[u].blocks) == 1 else ():
            for c in layout.comms(op, u, rank) if rank not in covered else ():
                covered.update(c.ranks)
                for side in range(len(self._group_of[rank])):
                    ranks = tuple(self._group_of[r][side] for r in c.ranks)
                    found = self._ports.loads(c.op, c.elements * element_bytes, ranks)
                    loads = _plus(loads, np.bincount(found.ports, found.seconds).astype(float))
        return Busy(alone, loads)

    def _exchanged(self, op: str, u: int) -> Busy:
        """Where state moves piece by piece: the exchanges in which the rank is, one after another, each alone."""
        alone, loads = 0.0, np.zeros(1)
        blocks = self._layout.units[u].blocks
        posts = [self._plan.posts(p, s, r, member) for p, r in self._plan.replicas
                 for s, stage in enumerate(self._plan.pipelines[p].stages) if any(map(stage.holds, blocks))
                 for member in range(stage.members)]
        for groups in exchanges(self._layout, self._tables.job, self._ports, op, u, posts):
            for members, found in groups:
                alone += found.alone_s if any(self._rank in posts[m] for m in members) else 0.0
                if len(found.ports):
                    loads = _plus(loads, np.bincount(found.ports, found.seconds).astype(float))
        return Busy(alone, loads)

    def step_s(self, u: int, replica: int) -> float:
        """Seconds of the optimizer step on the owned piece of a unit."""
        key = ("S", self._kind(u))
        if key not in self._known:
            pieces = [self._layout.piece("optimizer", u, c, replica) for c in self._layout.held(u, self._rank)]
            seconds = optimizer_s(sum(hi - lo for lo, hi in pieces), self._tables.cluster.devices[self._rank],
                                  self._tables.job)
            self._known[key] = Busy(seconds, np.zeros(1))
        return self._known[key].seconds

    def _kind(self, u: int) -> int:
        """A number; units of one kind have equal tensors on the same stages."""
        if u not in self._kinds:
            unit, blocks = self._layout.units[u], self._layout.model.blocks
            hosts = () if len(self._plan.pipelines) == 1 and len(unit.blocks) == 1 else tuple(
                s for pipe in self._plan.pipelines for s, stage in enumerate(pipe.stages)
                if any(map(stage.holds, unit.blocks)))
            kind = (self._place, blocks[u].kind if u < len(blocks) else u, hosts)
            self._kinds[u] = self._numbers.setdefault(kind, len(self._numbers))
        return self._kinds[u]

    def _least(self, op: str, u: int, index: int, comm: Comm) -> int:
        """Elements of a collective; members with other tensor degrees may see fewer."""
        if self._alike:
            return comm.elements
        views = (self._layout.comms(op, u, rank) for rank in comm.ranks)
        return min(view[index].elements for view in views if len(view) > index and view[index].ranks == comm.ranks)
