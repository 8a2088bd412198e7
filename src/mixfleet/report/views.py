"""What there is to say about a cluster, model, job or plan: headings, facts and tables of text.

The terminal and the HTML page both print these views, so that they never tell different things.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from mixfleet.units import show_bytes, show_count, show_flops, show_rate

if TYPE_CHECKING:
    from mixfleet.catalog.instances import Instance
    from mixfleet.cluster import Cluster, Device, Node
    from mixfleet.job import Job, Lengths
    from mixfleet.model import Model
    from mixfleet.plan import Plan


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


def ranges(numbers: Iterable[int], short: bool = False) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7. More than four runs at equal distance are `0-7, 64-71 .. 960-967 (128)`; `short`
    does that to any."""
    runs = [(run[0][1], run[-1][1]) for _, group in groupby(enumerate(sorted(numbers)), key=lambda x: x[1] - x[0])
            for run in [list(group)]]
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(runs)}
    if len(runs) > 4 and (short or len(steps) == 1):
        return f"{shown[0]}, {shown[1]} .. {shown[-1]} ({sum(last - first + 1 for first, last in runs)})"
    return ", ".join(shown)


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


def some(value: float, shown: str) -> str:
    """`shown` unless `value` is 0: views leave out facts without a value."""
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
          show_rate(d.memory_Bps), some(d.link_Bps, show_rate(d.link_Bps)), some(d.power_w, f"{d.power_w:.0f} W")]
         for d in known])])


def device(this: Device) -> View:
    """Every figure of one device."""
    return View(f"device {this.name}", [
        ("kind", this.kind), ("vendor", this.vendor), ("architecture", this.arch),
        *((f"{dtype} peak", show_flops(rate)) for dtype, rate in this.flops.items()),
        ("vector fp32", show_flops(this.vector_flops)),
        ("memory", show_bytes(this.memory_bytes)),
        ("memory rate", show_rate(this.memory_Bps)),
        ("cache", some(this.cache_bytes, show_bytes(this.cache_bytes))),
        ("link", some(this.link_Bps, show_rate(this.link_Bps))),
        ("PCIe", some(this.pcie_Bps, show_rate(this.pcie_Bps))),
        ("power", some(this.power_w, f"{this.power_w:.0f} W")),
        ("clock held", "" if this.clock is None else percent(this.clock)),
        ("price", "" if this.price_per_hour is None else f"{this.price_per_hour:.2f} per hour"),
        ("cores", ", ".join(map(str, this.cores))),
        ("share of them", some(this.share < 1, percent(this.share))),
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
        saved = sum(s.size.at(1, seq_len) * s.element_bytes(2) for s in block.saved if s.held("gpu", fused=True))
        rows.append([ranges(range(first, first + len(blocks))), kind, f"{block.count:,}", f"{show_count(flops)}FLOP",
                     show_bytes(saved), show_bytes(block.boundary.at(1, seq_len) * 2)])
        first += len(blocks)
    return View(
        f"model {this.name}",
        [("family", this.family), ("parameters", f"{this.count:,}"),
         *((name, some(count, f"{count:,}")) for name, count in (
             ("layers", this.layers), ("hidden", this.hidden), ("heads", this.heads),
             ("key/value heads", this.kv_heads), ("vocabulary", this.vocab), ("longest sequence", this.max_seq_len)))],
        [Table(["blocks", "kind", ">parameters each", ">forward", ">saved", ">boundary"], rows,
               f"per block, one sequence of {seq_len} tokens, 2-byte activations")])


def _lengths(this: Lengths | None) -> str:
    if this is None or this.kind == "file":
        return this.path if this else ""
    center = f"median {this.median:,}, sigma {this.sigma:g}, " if this.kind == "lognormal" else ""
    return f"{this.kind}, {center}{this.least:,} to {f'{this.most:,}' if this.most else 'seq_len'}"


def job(this: Job) -> View:
    """The job file in words."""
    return View(f"job {this.name}", [
        ("model", f"{this.model.name}, {this.model.count:,} parameters"),
        ("sequence", f"{this.seq_len:,} tokens"),
        ("global batch", f"{this.global_batch:,} sequences, {this.tokens_per_step:,} tokens"),
        ("precision", this.precision),
        ("optimizer", f"{this.optimizer.name}, learning rate {this.optimizer.lr:g} ({this.optimizer.decay})"),
        ("gradient clipping", some(this.clip_norm, f"{this.clip_norm:g}")),
        ("steps", f"{this.steps:,}"),
        ("data", f"{this.data.kind} {this.data.path}".rstrip()),
        ("lengths", _lengths(this.data.lengths)),
        ("objective", this.objective)])


# Who does what


def _schedule(this: Plan) -> str:
    if this.waves:
        distance = this.synchronization.distance
        return f"{this.schedule}, at most {distance} wave{'' if distance == 1 else 's'} ahead"
    return f"{this.schedule}, updates one step late" if this.synchronization.late else this.schedule


def plan(this: Plan, on: Cluster | None = None) -> View:
    """The stages and the ranks that hold them; with the cluster, their devices by name."""
    rows = []
    away = any(stage.away for pipe in this.pipelines for stage in pipe.stages)
    for p, pipe in enumerate(this.pipelines):
        name = f"{p}" + (f" (x {pipe.replicas})" if pipe.replicas > 1 else "")
        name += f", context {pipe.context}" if pipe.context > 1 else ""
        for s, stage in enumerate(pipe.stages):
            known = on is not None and max(stage.devices, default=0) < len(on.devices)
            what = counted(on.devices[d].name for d in stage.devices) if on and known else str(len(stage.devices))
            what += f", {stage.shares_text}" if stage.shares_text else ""
            ahead = ", ".join(f"{lo}-{hi - 1}" for lo, hi in stage.ahead)
            rows.append(["" if s else name, str(s), stage.text + (f"; forward {ahead}" if ahead else ""),
                         ranges(stage.devices), what, str(stage.tensor),
                         f"{pipe.micro_batch} x {len(pipe.micro_batches)}", str(pipe.samples),
                         stage.recompute_text, *([", ".join(stage.away)] if away else [])])
    shard = this.sharding
    return View(
        f"plan {this.name}".rstrip(),
        [("job", this.job), ("cluster", this.cluster), ("schedule", _schedule(this)),
         ("batching", "" if this.batching == "padded" else this.batching),
         ("global batch", str(this.global_batch)),
         ("sharding", f"weights {shard.weights}, gradients {shard.gradients}, optimizer {shard.optimizer} ways"),
         ("experts", f"shared by {this.expert} of {len(this.replicas)} replicas" + (
             f", {':'.join(map(str, this.expert_shares))}" if this.expert_shares else "") if this.expert > 1 else ""),
         ("idle ranks", ranges(set(range(len(on.devices))) - set(this.ranks)) if on else ""),
         ("note", on.note if on else "")],
        [Table(["pipeline", "stage", "blocks", "ranks", "devices", ">tensor", ">micro-batch", ">samples", "recompute",
                *(["in host memory"] if away else [])], rows)])
