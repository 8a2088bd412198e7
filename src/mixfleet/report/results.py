"""What there is to say about predictions, searches, traces and runs. See `views` for what a view is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mixfleet.report.views import Table, View, percent, plural, ranges, some
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
from mixfleet.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from mixfleet.plan import Plan
    from mixfleet.search.result import NearestMiss, Ranked, SearchResult
    from mixfleet.search.scaling import Point
    from mixfleet.sim.fit import Fit
    from mixfleet.sim.prediction import DeviceUse, Prediction


FOREIGN = 0.1
"""Part of the cores that other programs may take before a run says so."""

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


def batches(this: Prediction) -> list[tuple[str, str]]:
    """Of samples of unequal length."""
    use = this.batches
    if use is None:
        return []
    return [("steps", f"{show_seconds(use.least_s)} to {show_seconds(use.most_s)}, standard deviation "
             f"{show_seconds(use.deviation_s)} (the first {use.steps})"),
            ("padding", f"{percent(use.padding)} of all positions"),
            ("imbalance", f"the slowest replica computes {percent(use.imbalance)} longer than the mean")]


def money(amount: float | None) -> str:
    """In the currency of the cluster file, which has no name."""
    return "" if amount is None else f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"


def prediction(this: Prediction, of: Plan) -> View:
    """The figures, what bounds them, and what every device does and holds; equal devices share a row."""
    facts = [*headline(this), *batches(this), ("bound by", this.bound), *(("", reason) for reason in this.reasons)]
    return View("prediction: fits" if this.fits else "prediction: does not fit", facts, [_devices(this, of)])


def fits(title: str, found: Sequence[Fit]) -> View:
    """The largest micro-batch per recompute mode, and what holds the bytes at the peak."""
    names = list(dict.fromkeys(name for one in found for name in one.breakdown))
    rows = [["micro-batch", *(str(one.micro_batch) if one.micro_batch else "none" for one in found)],
            ["tokens/s", *(f"{one.tokens_per_s:,.0f}" if one.micro_batch else "" for one in found)],
            ["peak", *(show_bytes(one.peak_bytes) for one in found)],
            *([name, *(some(one.breakdown.get(name, 0), show_bytes(one.breakdown.get(name, 0))) for one in found)]
              for name in names)]
    notes = [(one.recompute, f"one more lacks {show_bytes(one.next_lacks_bytes)}" if one.micro_batch else one.why_not)
             for one in found if one.next_lacks_bytes]
    return View(title, [("memory", show_bytes(found[0].capacity_bytes)), *notes],
                [Table(("recompute", *(f">{one.recompute}" for one in found)), rows)])


def scaling(title: str, points: Sequence[Point], last: Point | None) -> View:
    """The best plan on each number of devices, and where more stop paying."""
    rows = [[str(p.devices), str(p.global_batch), *([show_seconds(p.step_s), f"{p.per_s:,.2f}", some(
        p.gained, percent(p.gained))] if p.plan else ["", "", ""]), p.why] for p in points]
    facts = [("more devices pay until", plural(last.devices, "device") if last else "nothing fits")]
    return View(title, facts, [Table((">devices", ">batch", ">step", ">sequences/s", ">gained", ""), rows)])


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
        seats = ((use.pipeline, use.stage), *use.more)
        pipes = [of.pipelines[p] for p, _ in seats]
        rows.append([ranges((u.rank for u in group), short=True), use.device, " + ".join(f"{p}.{s}" for p, s in seats),
                     " + ".join(of.pipelines[p].stages[s].text for p, s in seats),
                     " + ".join(str(pipe.micro_batch) for pipe in pipes),
                     " + ".join(str(pipe.samples) for pipe in pipes),
                     percent(use.busy), show_bytes(use.fresh_bytes), show_bytes(use.resumed_bytes),
                     show_bytes(use.capacity_bytes)])
    return Table(["ranks", "device", "stage", "blocks", ">micro-batch", ">samples", ">computes", ">first step",
                  ">later steps", ">memory"], rows, "peak memory of the first step, which makes the optimizer's "
                 "state, and of later ones")


def search(this: SearchResult) -> list[View]:
    """The ranking, why the best wins, what was rejected; or why nothing fits."""
    counts = [("considered", f"{plural(this.considered, 'candidate')}, {this.simulated:,} simulated"
               + (", all there are" if this.exact else "") + ("" if this.complete else "; stopped at a limit"))]
    if this.best is None:
        return [View("nothing fits", [*_missed(this.nearest_miss), *counts], [
            Table(["rejected", ">candidates", "for example"],
                  [[r.reason, f"{r.count:,}", r.example] for r in this.rejections])])]
    rejections = Table(["rejected", ">candidates"], [[r.reason, f"{r.count:,}"] for r in this.rejections])
    facts = [("" if i else "why", line) for i, line in enumerate(this.why)]
    facts += [("bound by", this.bound),
              ("upper bound", f"{percent(this.fraction_of_upper_bound)} of what all devices could do"),
              *((f"ranks {ranges(left.devices)}", f"{left.device_name}, left out: {left.reason}. {left.better_use}")
                for left in this.left_over)]
    return [View(f"best plans by {this.objective}", tables=[_ranking(this.plans)]), View("why plan 1", facts),
            View("what was rejected", counts, [rejections] if this.rejections else [])]


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

_GROUPS = {"forward": ("forward",), "backward": ("backward", "recompute"),
           "activations": ("tensor", "expert", "send", "recv"), "state": ("gather", "reduce", "load", "save"),
           "optimizer": ("optimizer",)}


def trace(this: Trace) -> View:
    """Totals, and where every device's time went."""
    used, busy, peaks = by_category(this), utilization(this), peak_memory(this)
    names = this.meta.get("device_names", {})
    rows = []
    for d in this.devices:
        times = [sum(used[d].get(c, 0.0) for c in kinds) for kinds in _GROUPS.values()]
        copies = f" (x {this.multiplicity(d)})" if this.multiplicity(d) > 1 else ""
        rows.append([f"{d}{copies}", str(names.get(str(d), "")), percent(busy[d]),
                     *(some(t, show_seconds(t)) for t in times),
                     show_bytes(peaks[d].total_bytes) if d in peaks else ""])
    mfu, hfu = flop_utilization(this)
    step, tokens = step_s(this), float(this.meta.get("tokens_per_step", 0))
    alone = mean_exposed(this)
    return View(
        f"{this.meta.get('kind', '')} trace of {plural(len(this.steps_ns), 'step')}".strip(),
        [("step", show_seconds(step)), ("tokens/s", some(tokens * step, f"{tokens / (step or 1):,.0f}")),
         ("MFU", some(mfu, percent(mfu))), ("HFU", percent(hfu) if hfu and hfu != mfu else ""),
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
        [("most seconds off", some(len(this.rows), f"{worst.category} on rank {worst.device}: predicted "
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
        ("other programs", f"took {this['foreign']:.0%} of the cores meanwhile, so steps took longer than they need"
                           if this["foreign"] > FOREIGN else ""),
        ("checkpoint", this["checkpoint"])])
