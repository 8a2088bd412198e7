"""What there is to say about a cluster, model, job, plan or trace: headings, facts and tables of text.

The terminal and the HTML page both print these views, so that they never tell different things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from mixfleet.trace import (
    Comparison,
    Trace,
    bubble,
    by_category,
    flop_utilization,
    mean_exposed,
    peak_memory,
    step_s,
    utilization,
)
from mixfleet.units import show_bytes, show_count, show_flops, show_rate, show_seconds

if TYPE_CHECKING:
    from mixfleet.catalog.instances import Instance
    from mixfleet.cluster import Cluster, Device, Node
    from mixfleet.job import Job
    from mixfleet.model import Model
    from mixfleet.plan import Plan
    from mixfleet.search.result import NearestMiss, Ranked, SearchResult
    from mixfleet.sim.prediction import DeviceUse, Prediction


class Table(NamedTuple):
    """Rows of text; a column whose name starts with `>` is set to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


class View(NamedTuple):
    """A heading, facts (name and value; those without a value are not shown), and tables."""

    heading: str
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def counted(names: Iterable[str]) -> str:
    """`8 x A100, 2 x V100`, in the order of first appearance."""
    names = list(names)
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


def plural(count: int, noun: str) -> str:
    """`1 node`, `1,024 nodes`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def percent(fraction: float) -> str:
    """`41.7 %`."""
    return f"{100 * fraction:.1f} %"


def _some(value: float, shown: str) -> str:
    return shown if value else ""


# What we have


def _peak(device: Device) -> str:
    order = ("fp32", *device.flops) if device.kind == "cpu" else ("bf16", "fp16", "fp32", *device.flops)
    dtype = next(d for d in order if d in device.flops)
    return f"{show_flops(device.flops[dtype])} {dtype}"


def cluster(this: Cluster) -> View:
    """Nodes that are alike share a row."""
    def alike(node: Node) -> tuple[object, ...]:
        return (node.devices, node.link, node.nic, node.rack, node.zone)

    rows, first = [], 0
    for _, group in groupby(this.nodes, key=alike):
        nodes = list(group)
        node, size = nodes[0], len(nodes[0].devices)
        name = node.name if len(nodes) == 1 else f"{node.name} .. {nodes[-1].name} ({len(nodes)})"
        for kind, places in groupby(range(size), key=lambda j: node.devices[j]):
            local = list(places)
            rows.append([name, ranges(first + size * n + j for n in range(len(nodes)) for j in local),
                         f"{len(local)} x {kind.name}", show_bytes(kind.memory_bytes), _peak(kind),
                         show_rate(node.link.bandwidth_Bps), show_rate(node.nic.bandwidth_Bps),
                         "/".join(filter(None, (node.zone, node.rack)))])
            name = ""
        first += size * len(nodes)
    prices = [d.price_per_hour for d in this.devices if d.price_per_hour is not None]
    return View(
        f"cluster {this.name}: {plural(len(this.devices), 'device')} in {plural(len(this.nodes), 'node')}",
        [("memory", show_bytes(sum(d.memory_bytes for d in this.devices))),
         ("rack uplink", show_rate(this.rack_uplink.bandwidth_Bps) if this.rack_uplink else ""),
         ("zone uplink", show_rate(this.zone_uplink.bandwidth_Bps) if this.zone_uplink else ""),
         ("between nodes", "measured matrix" if this.node_matrix_Bps else ""),
         ("price", f"{sum(prices):.2f} per hour" if len(prices) == len(this.devices) else "")],
        [Table(["node", "ranks", "devices per node", ">memory", ">peak", ">link", ">NIC", "zone/rack"], rows)])


def devices(known: Iterable[Device]) -> View:
    """The catalog."""
    def tensor_rate(device: Device) -> str:
        return next((show_flops(device.flops[d]) for d in ("bf16", "fp16") if d in device.flops), "")

    return View("devices", tables=[Table(
        ["device", "architecture", ">memory", ">bf16/fp16", ">fp32", ">memory rate", ">link", ">power"],
        [[d.name, d.arch, show_bytes(d.memory_bytes), tensor_rate(d), show_flops(d.vector_flops),
          show_rate(d.memory_Bps), _some(d.link_Bps, show_rate(d.link_Bps)), _some(d.power_w, f"{d.power_w:.0f} W")]
         for d in known])])


def device(this: Device) -> View:
    """Every figure of one device."""
    return View(f"device {this.name}", [
        ("kind", this.kind), ("vendor", this.vendor), ("architecture", this.arch),
        *((f"{dtype} peak", show_flops(rate)) for dtype, rate in this.flops.items()),
        ("vector fp32", show_flops(this.vector_flops)),
        ("memory", show_bytes(this.memory_bytes)),
        ("memory rate", show_rate(this.memory_Bps)),
        ("cache", _some(this.cache_bytes, show_bytes(this.cache_bytes))),
        ("link", _some(this.link_Bps, show_rate(this.link_Bps))),
        ("PCIe", _some(this.pcie_Bps, show_rate(this.pcie_Bps))),
        ("power", _some(this.power_w, f"{this.power_w:.0f} W")),
        ("price", "" if this.price_per_hour is None else f"{this.price_per_hour:.2f} per hour"),
        ("cores", ", ".join(map(str, this.cores))),
        ("share of them", _some(this.share < 1, percent(this.share))),
        ("measured blocks", ", ".join(sorted({t.block for t in this.block_times}))),
        ("source", this.source)])


def instances(known: Mapping[str, Instance]) -> View:
    """Machine shapes."""
    return View("instances", tables=[Table(
        ["instance", "devices", ">network", ">price per hour", "source"],
        [[name, f"{shape.size} x {shape.device}", f"{shape.nic_gbps:g} Gb/s",
          "" if shape.price_per_hour is None else f"{shape.price_per_hour:.2f}", shape.source]
         for name, shape in known.items()])])


# What we train


def models(known: Mapping[str, Model]) -> View:
    """Well-known models."""
    return View("models", tables=[Table(
        ["model", "family", ">parameters", ">layers", ">hidden", ">longest sequence"],
        [[name, m.family, f"{m.count:,}", str(m.layers), str(m.hidden), f"{m.max_seq_len:,}"]
         for name, m in known.items()])])


def model(this: Model) -> View:
    """Blocks of equal kind share a row."""
    seq_len = min(this.max_seq_len or 2048, 2048)
    rows, first = [], 0
    for kind, group in groupby(this.blocks, key=lambda b: b.kind):
        blocks = list(group)
        block = blocks[0]
        flops = sum(op.flops.at(1, seq_len) for op in block.ops)
        saved = sum(s.size.at(1, seq_len) * (s.bytes_per_element or 2) for s in block.saved if not s.unfused_only)
        rows.append([ranges(range(first, first + len(blocks))), kind, f"{block.count:,}", f"{show_count(flops)}FLOP",
                     show_bytes(saved), show_bytes(block.boundary.at(1, seq_len) * 2)])
        first += len(blocks)
    return View(
        f"model {this.name}",
        [("family", this.family), ("parameters", f"{this.count:,}"),
         *((name, _some(count, f"{count:,}")) for name, count in (
             ("layers", this.layers), ("hidden", this.hidden), ("heads", this.heads),
             ("key/value heads", this.kv_heads), ("vocabulary", this.vocab), ("longest sequence", this.max_seq_len)))],
        [Table(["blocks", "kind", ">parameters each", ">forward", ">saved", ">boundary"], rows,
               f"per block, one sequence of {seq_len} tokens, 2-byte activations")])


def job(this: Job) -> View:
    """The job file in words."""
    return View(f"job {this.name}", [
        ("model", f"{this.model.name}, {this.model.count:,} parameters"),
        ("sequence", f"{this.seq_len:,} tokens"),
        ("global batch", f"{this.global_batch:,} sequences, {this.tokens_per_step:,} tokens"),
        ("precision", this.precision),
        ("optimizer", f"{this.optimizer.name}, learning rate {this.optimizer.lr:g} ({this.optimizer.decay})"),
        ("gradient clipping", _some(this.clip_norm, f"{this.clip_norm:g}")),
        ("steps", f"{this.steps:,}"),
        ("data", f"{this.data.kind} {this.data.path}".rstrip()),
        ("objective", this.objective)])


# Who does what


def plan(this: Plan, on: Cluster | None = None) -> View:
    """The stages and the ranks that hold them; with the cluster, their devices by name."""
    rows = []
    for p, pipe in enumerate(this.pipelines):
        name = f"{p}" + (f" (x {pipe.replicas})" if pipe.replicas > 1 else "")
        for s, stage in enumerate(pipe.stages):
            known = on is not None and max(stage.devices, default=0) < len(on.devices)
            what = counted(on.devices[d].name for d in stage.devices) if on and known else str(len(stage.devices))
            rows.append(["" if s else name, str(s), f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                         ranges(stage.devices), what, str(stage.tensor),
                         f"{pipe.micro_batch} x {len(pipe.micro_batches)}", str(pipe.samples), stage.recompute])
    shard = this.sharding
    return View(
        f"plan {this.name}".rstrip(),
        [("job", this.job), ("cluster", this.cluster), ("schedule", this.schedule),
         ("global batch", str(this.global_batch)),
         ("sharding", f"weights {shard.weights}, gradients {shard.gradients}, optimizer {shard.optimizer} ways"),
         ("idle ranks", ranges(set(range(len(on.devices))) - set(this.ranks)) if on else "")],
        [Table(["pipeline", "stage", "blocks", "ranks", "devices", ">tensor", ">micro-batch", ">samples", "recompute"],
               rows)])


# What a plan will do


def headline(this: Prediction) -> list[tuple[str, str]]:
    """The figures that decide, name and value."""
    peak = this.peak
    exposed = ", ".join(f"{category} {show_seconds(t)}" for category, t in this.exposed_s.items() if t)
    return [
        ("step", show_seconds(this.step_s)), ("tokens/s", f"{this.tokens_per_s:,.0f}"), ("MFU", percent(this.mfu)),
        ("HFU", percent(this.hfu) if this.hfu != this.mfu else ""),
        ("fullest device", f"{show_bytes(peak.peak_bytes)} of {show_bytes(peak.capacity_bytes)} ({peak.device})"),
        ("when", f"{peak.phase}, on rank {peak.rank}"),
        ("bubble", percent(this.bubble)),
        ("exposed communication", exposed or "none"),
        ("cost per million tokens", money(this.cost_per_million_tokens)), ("cost per step", money(this.cost_per_step))]


def money(amount: float | None) -> str:
    """In the currency of the cluster file, which has no name."""
    return "" if amount is None else f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"


def prediction(this: Prediction, of: Plan) -> View:
    """The figures, what bounds them, and what every device does and holds; equal devices share a row."""
    facts = [*headline(this), ("bound by", this.bound), *(("", reason) for reason in this.reasons)]
    return View("prediction: fits" if this.fits else "prediction: does not fit", facts, [_devices(this, of)])


def alike(this: Prediction) -> list[list[DeviceUse]]:
    """Devices of a stage that hold the same, together."""
    groups: dict[tuple[object, ...], list[DeviceUse]] = {}
    for use in this.devices:
        groups.setdefault((use.pipeline, use.stage, use.device, use.peak_bytes, use.phase), []).append(use)
    return list(groups.values())


def _devices(this: Prediction, of: Plan) -> Table:
    rows = []
    for group in alike(this):
        use = group[0]
        pipe = of.pipelines[use.pipeline]
        stage = pipe.stages[use.stage]
        rows.append([ranges(u.rank for u in group), use.device, f"{use.pipeline}.{use.stage}",
                     f"{stage.blocks[0]}-{stage.blocks[1] - 1}", str(pipe.micro_batch), str(pipe.samples),
                     percent(use.busy), show_bytes(use.fresh_bytes), show_bytes(use.resumed_bytes),
                     show_bytes(use.capacity_bytes)])
    return Table(["ranks", "device", "stage", "blocks", ">micro-batch", ">samples", ">computes", ">first step",
                  ">later steps", ">memory"], rows, "peak memory of the first step, which makes the optimizer's "
                 "state, and of later ones")


def search(this: SearchResult) -> list[View]:
    """The ranking, why the best wins, what was rejected; or why nothing fits."""
    counts = [("considered", f"{plural(this.considered, 'candidate')}, {this.simulated:,} simulated"
               + (", all there are" if this.exact else "") + ("" if this.complete else "; stopped at a limit"))]
    rejections = Table(["rejected", ">candidates", "for example"],
                       [[r.reason, f"{r.count:,}", r.example] for r in this.rejections])
    if this.best is None:
        return [View("nothing fits", [*_missed(this.nearest_miss), *counts], [rejections])]
    tables = [_ranking(this.plans)]
    if this.alternatives:
        tables.append(Table(["instead of searching", ">step", ">slower", ""], [
            [a.name, "" if a.step_s is None else show_seconds(a.step_s),
             "" if a.relative is None else f"{a.relative:.2f} x", a.why_not or a.summary] for a in this.alternatives]))
    facts = [("" if i else "why", line) for i, line in enumerate(this.why)]
    facts += [("bound by", this.bound),
              ("upper bound", f"{percent(this.fraction_of_upper_bound)} of what all devices would do alone"),
              *((f"ranks {ranges(left.devices)}", f"{left.device_name}, left out: {left.reason}. {left.better_use}")
                for left in this.left_over)]
    return [View(f"best plans by {this.objective}", facts, tables),
            View("the search", counts, [rejections] if this.rejections else [])]


def _ranking(plans: Sequence[Ranked]) -> Table:
    """The cost column is there only where devices have prices."""
    rows = []
    for place, ranked in enumerate(plans, 1):
        of = ranked.prediction
        rows.append([str(place), show_seconds(of.step_s), f"{of.tokens_per_s:,.0f}", percent(of.mfu),
                     percent(of.peak.peak_bytes / of.peak.capacity_bytes), money(of.cost_per_million_tokens),
                     ranked.summary])
    columns = ["plan", ">step", ">tokens/s", ">MFU", ">fullest device", ">cost/Mtoken", ""]
    shown = [i for i, name in enumerate(columns) if name != ">cost/Mtoken" or any(row[i] for row in rows)]
    return Table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _missed(miss: NearestMiss | None) -> list[tuple[str, str]]:
    if miss is None:
        return []
    return [("nearest miss", f"{miss.device_name} (rank {miss.device}, node {miss.node}) lacks "
             f"{show_bytes(miss.lacks_bytes)} in {miss.phase}"),
            ("by this plan", miss.summary), *(("would fit with", change) for change in miss.changes)]


# What happened

_GROUPS = {"forward": ("forward",), "backward": ("backward", "recompute"), "activations": ("tensor", "send", "recv"),
           "state": ("gather", "reduce"), "optimizer": ("optimizer",)}


def trace(this: Trace) -> View:
    """Totals, and where every device's time went."""
    used, busy, peaks = by_category(this), utilization(this), peak_memory(this)
    names = this.meta.get("device_names", {})
    rows = []
    for d in this.devices:
        times = [sum(used[d].get(c, 0.0) for c in kinds) for kinds in _GROUPS.values()]
        copies = f" (x {this.multiplicity(d)})" if this.multiplicity(d) > 1 else ""
        rows.append([f"{d}{copies}", str(names.get(str(d), "")), percent(busy[d]),
                     *(_some(t, show_seconds(t)) for t in times),
                     show_bytes(peaks[d].total_bytes) if d in peaks else ""])
    mfu, hfu = flop_utilization(this)
    step, tokens = step_s(this), float(this.meta.get("tokens_per_step", 0))
    alone = mean_exposed(this)
    return View(
        f"{this.meta.get('kind', '')} trace of {plural(len(this.steps_ns), 'step')}".strip(),
        [("step", show_seconds(step)), ("tokens/s", _some(tokens * step, f"{tokens / (step or 1):,.0f}")),
         ("MFU", _some(mfu, percent(mfu))), ("HFU", percent(hfu) if hfu and hfu != mfu else ""),
         ("bubble", percent(bubble(this))),
         ("exposed", ", ".join(f"{c} {show_seconds(s)}" for c, s in alone.items() if s) or "nothing")],
        [Table(["rank", "device", ">computes", *(f">{name}" for name in _GROUPS), ">peak memory"], rows,
               "time per step and device; activations and state: moving them")])


def comparison(this: Comparison, names: dict[str, str]) -> View:
    """Predicted against measured seconds per step, by device and category."""
    def off(error: float | None) -> str:
        return "" if error is None else f"{100 * error:+.1f} %"

    rows = []
    for rank, group in groupby(this.rows, key=lambda r: r.device):
        name = f"{rank} {names.get(str(rank), '')}".strip()
        for row in group:
            rows.append([name, row.category, show_seconds(row.predicted_s), show_seconds(row.measured_s),
                         off(row.error)])
            name = ""
    whole, worst = this.step, this.worst
    return View(
        f"step predicted {show_seconds(whole.predicted_s)}, measured {show_seconds(whole.measured_s)}"
        + (f": {off(whole.error)}" if whole.error is not None else ""),
        [("most seconds off", _some(len(this.rows), f"{worst.category} on rank {worst.device}: predicted "
                                    f"{show_seconds(worst.predicted_s)}, measured {show_seconds(worst.measured_s)}"))],
        [Table(["rank", "category", ">predicted", ">measured", ">error"], rows)])


def training(this: Mapping[str, Any]) -> View:
    """What a run came to: the summary of `mixfleet train --json`."""
    predicted, measured = this["predicted_step_s"], this["step_s"]
    loss = f"{this['first_loss']:.4f} -> {this['last_loss']:.4f}" if this["last_loss"] is not None else ""
    error = f"{100 * (predicted - measured) / measured:+.1f} %" if measured else ""
    return View(f"trained to step {this['step']}" + (", stopped early" if this["stopped"] else ""), [
        ("loss", loss),
        ("step", f"{show_seconds(measured)} (median)" if measured else ""),
        ("predicted", f"{show_seconds(predicted)}{', ' * bool(error)}{error}"),
        ("checkpoint", this["checkpoint"])])
