"""Terminal views. Each function returns something that rich prints; `text` makes plain text of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

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
    from mixfleet.cluster import Cluster, Device, Node
    from mixfleet.job import Job
    from mixfleet.model import Model
    from mixfleet.plan import Plan

PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""


def show(view: RenderableType) -> None:
    """Print to standard output; as wide as the terminal, or `PLAIN_WIDTH`."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(view)


def text(view: RenderableType, width: int = PLAIN_WIDTH) -> str:
    """The view as plain text without styles."""
    console = Console(highlight=False, width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """A table; a column whose name starts with `>` is set to the right."""
    grid = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
                 show_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one pair a line; pairs without a value are left out."""
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        if value:
            grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def heading(line: str) -> Text:
    return Text(line, style="bold")


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def counted(names: Iterable[str]) -> str:
    """`8 x A100, 2 x V100`, in the order of first appearance."""
    names = list(names)
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


# What we have


def _peak(device: Device) -> str:
    dtype = next(d for d in ("bf16", "fp16", "fp32", *device.flops) if d in device.flops)
    if device.kind == "cpu":
        dtype = "fp32" if "fp32" in device.flops else dtype
    return f"{show_flops(device.flops[dtype])} {dtype}"


def cluster(this: Cluster) -> RenderableType:
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
    memory = sum(d.memory_bytes for d in this.devices)
    prices = [d.price_per_hour for d in this.devices]
    known = [p for p in prices if p is not None]
    return Group(
        heading(f"cluster {this.name}: {plural(len(this.devices), 'device')} in {plural(len(this.nodes), 'node')}"),
        facts([("memory", show_bytes(memory)),
               ("rack uplink", show_rate(this.rack_uplink.bandwidth_Bps) if this.rack_uplink else ""),
               ("zone uplink", show_rate(this.zone_uplink.bandwidth_Bps) if this.zone_uplink else ""),
               ("between nodes", "measured matrix" if this.node_matrix_Bps else ""),
               ("price", f"{sum(known):.2f} per hour" if len(known) == len(prices) else "")]), "",
        table(["node", "ranks", "devices per node", ">memory", ">peak", ">link", ">NIC", "zone/rack"], rows))


def devices(known: Iterable[Device]) -> RenderableType:
    def rate(device: Device, *dtypes: str) -> str:
        return next((show_flops(device.flops[d]) for d in dtypes if d in device.flops), "")

    return table(
        ["device", "architecture", ">memory", ">bf16/fp16", ">fp32", ">memory rate", ">link", ">power"],
        [[d.name, d.arch, show_bytes(d.memory_bytes), rate(d, "bf16", "fp16"), show_flops(d.vector_flops),
          show_rate(d.memory_Bps), show_rate(d.link_Bps) if d.link_Bps else "", f"{d.power_w:.0f} W" if d.power_w else ""]
         for d in known])


def device(this: Device) -> RenderableType:
    return Group(heading(f"device {this.name}"), facts([
        ("kind", this.kind), ("vendor", this.vendor), ("architecture", this.arch),
        *((f"{dtype} peak", show_flops(rate)) for dtype, rate in this.flops.items()),
        ("vector fp32", show_flops(this.vector_flops)), ("memory", show_bytes(this.memory_bytes)),
        ("memory rate", show_rate(this.memory_Bps)), ("cache", show_bytes(this.cache_bytes) if this.cache_bytes else ""),
        ("link", show_rate(this.link_Bps) if this.link_Bps else ""),
        ("PCIe", show_rate(this.pcie_Bps) if this.pcie_Bps else ""),
        ("power", f"{this.power_w:.0f} W" if this.power_w else ""),
        ("price", f"{this.price_per_hour:.2f} per hour" if this.price_per_hour is not None else ""),
        ("cores", ", ".join(map(str, this.cores))), ("share of them", percent(this.share) if this.share < 1 else ""),
        ("measured blocks", ", ".join(sorted({t.block for t in this.block_times}))), ("source", this.source)]))


# What we train


def model(this: Model) -> RenderableType:
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
    return Group(
        heading(f"model {this.name}"),
        facts([("family", this.family), ("parameters", f"{this.count:,}"), ("layers", str(this.layers or "")),
               ("hidden", str(this.hidden or "")), ("heads", str(this.heads or "")),
               ("key/value heads", str(this.kv_heads or "")), ("vocabulary", f"{this.vocab:,}" if this.vocab else ""),
               ("longest sequence", f"{this.max_seq_len:,}" if this.max_seq_len else "")]), "",
        table(["blocks", "kind", ">parameters each", ">forward", ">saved", ">boundary"], rows,
              title=f"per block, one sequence of {seq_len} tokens, 2-byte activations"))


def job(this: Job) -> RenderableType:
    return Group(heading(f"job {this.name}"), facts([
        ("model", f"{this.model.name}, {this.model.count:,} parameters"), ("sequence", f"{this.seq_len:,} tokens"),
        ("global batch", f"{this.global_batch:,} sequences, {this.tokens_per_step:,} tokens"),
        ("precision", this.precision),
        ("optimizer", f"{this.optimizer.name}, learning rate {this.optimizer.lr:g} ({this.optimizer.decay})"),
        ("gradient clipping", f"{this.clip_norm:g}" if this.clip_norm else ""), ("steps", f"{this.steps:,}"),
        ("data", " ".join((this.data.kind, this.data.path))), ("objective", this.objective)]))


# Who does what


def plan(this: Plan, on: Cluster | None = None) -> RenderableType:
    """The stages, and which device is which rank; with the cluster, devices have names."""
    rows = []
    for p, pipe in enumerate(this.pipelines):
        for s, stage in enumerate(pipe.stages):
            what = counted(on.devices[d].name for d in stage.devices) if on else str(len(stage.devices))
            rows.append([f"{p}" + (f" (x {pipe.replicas})" if pipe.replicas > 1 else "") if s == 0 else "", str(s),
                         f"{stage.blocks[0]}-{stage.blocks[1] - 1}", ranges(stage.devices), what, str(stage.tensor),
                         f"{pipe.micro_batch} x {len(pipe.micro_batches)}", str(pipe.samples), stage.recompute])
    shard = this.sharding
    return Group(
        heading(f"plan {this.name}".rstrip()),
        facts([("job", this.job), ("cluster", this.cluster), ("schedule", this.schedule),
               ("global batch", str(this.global_batch)),
               ("sharding", f"weights {shard.weights}, gradients {shard.gradients}, optimizer {shard.optimizer}"),
               ("idle devices", ranges(set(range(len(on.devices))) - set(this.ranks)) if on else "")]), "",
        table(["pipeline", "stage", "blocks", "ranks", "devices", ">tensor", ">micro-batch", ">samples", "recompute"], rows))


# What happened


def trace(this: Trace) -> RenderableType:
    used, busy, peaks = by_category(this), utilization(this), peak_memory(this)
    names = this.meta.get("device_names", {})
    rows = []
    for d in this.devices:
        times = used[d]
        copies = f" (x {this.multiplicity(d)})" if this.multiplicity(d) > 1 else ""
        rows.append([f"{d}{copies}", str(names.get(str(d), "")), percent(busy[d]),
                     *(show_seconds(sum(times.get(c, 0.0) for c in kinds)) if any(c in times for c in kinds) else ""
                       for kinds in (("forward",), ("backward", "recompute"), ("tensor", "send", "recv"),
                                     ("gather", "reduce"), ("optimizer",))),
                     show_bytes(peaks[d].total_bytes) if d in peaks else ""])
    mfu, hfu = flop_utilization(this)
    step, tokens = step_s(this), float(this.meta.get("tokens_per_step", 0))
    alone = mean_exposed(this)
    return Group(
        heading(f"{this.meta.get('kind', '')} trace of {plural(len(this.steps_ns), 'step')}".strip()),
        facts([("step", show_seconds(step)), ("tokens/s", f"{tokens / step:,.0f}" if tokens and step else ""),
               ("MFU", percent(mfu) if mfu else ""), ("HFU", percent(hfu) if hfu and hfu != mfu else ""),
               ("bubble", percent(bubble(this))),
               ("exposed", ", ".join(f"{c} {show_seconds(s)}" for c, s in alone.items() if s) or "nothing")]), "",
        table(["rank", "device", ">computes", ">forward", ">backward", ">activations", ">state", ">optimizer", ">peak memory"],
              rows, title="seconds per step and device: computing, moving activations, moving weights and gradients"))


def comparison(this: Comparison, names: dict[str, str]) -> RenderableType:
    """Predicted against measured seconds per step, by device and category."""

    def off(error: float | None) -> str:
        return "" if error is None else f"{100 * error:+.1f} %"

    rows = []
    for device, group in groupby(this.rows, key=lambda r: r.device):
        for i, row in enumerate(group):
            rows.append([f"{device} {names.get(str(device), '')}".strip() if i == 0 else "", row.category,
                         show_seconds(row.predicted_s), show_seconds(row.measured_s), off(row.error)])
    whole = this.step
    worst = this.worst
    return Group(
        heading(f"step predicted {show_seconds(whole.predicted_s)}, measured {show_seconds(whole.measured_s)}: "
                f"{off(whole.error) or 'nothing measured'}"),
        facts([("most seconds off", f"{worst.category} on device {worst.device}: predicted "
                f"{show_seconds(worst.predicted_s)}, measured {show_seconds(worst.measured_s)}")] if this.rows else []), "",
        table(["device", "category", ">predicted", ">measured", ">error"], rows))
