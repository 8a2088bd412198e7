"""One self-contained HTML file: headline figures, the timeline, memory per device, and the same tables as the terminal.

No scripts, no fonts or images from elsewhere. Everything from outside passes jinja2's autoescape or `html.escape`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mixfleet.files import write_text
from mixfleet.report import results, timeline, views
from mixfleet.report.views import View
from mixfleet.trace import Trace, compare
from mixfleet.units import show_bytes

if TYPE_CHECKING:
    from mixfleet.cluster import Cluster
    from mixfleet.plan import Plan
    from mixfleet.sim.prediction import Prediction

PARTS = {"weights": "#2f5fa8", "gradients": "#5b8fd6", "master": "#8457b0", "moments": "#b58fd8",
         "activations": "#3f9e8f", "recomputed": "#8cc9be", "messages": "#c2577f", "gathered weights": "#e08a3c",
         "gradient buffers": "#f0bd8b", "workspace": "#d4b13c", "optimizer temporaries": "#9c7a12",
         "framework": "#8a8a8a", "allocator": "#c4c4c4"}
"""What holds memory, in the order of the bars, and its colour."""
TILES = ("step", "tokens/s", "MFU", "fullest device", "bubble", "cost per million tokens")


class Bar(NamedTuple):
    """Bytes that a row of equal devices holds at its peak, by what holds them."""

    name: str
    parts: dict[str, int]
    capacity_bytes: int


def render(title: str, subtitle: str = "", *, tiles: Sequence[tuple[str, str]] = (), lines: Sequence[str] = (),
           traces: Sequence[tuple[str, Trace]] = (), bars: Sequence[Bar] = (), capacity: dict[int, int] | None = None,
           sections: Sequence[View] = (), note: str = "") -> str:
    """The page. `tiles` are headline figures (name, value), `lines` plain sentences, `traces` are drawn to one scale;
    `capacity` is bytes per row of a trace. `note`, or what the traces have to say, stands above all and on every
    printed page."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    page = Environment(loader=PackageLoader("mixfleet", "report"), autoescape=True, trim_blocks=True)
    longest = max((end - start for _, t in traces for start, end in [timeline.window(t)]), default=0)
    pictures = [Markup(timeline.svg(t, span_ns=longest, capacity=capacity, title=name if len(traces) > 1 else ""))
                for name, t in traces]
    used = {what for bar in bars for what in bar.parts}
    return page.get_template("page.html.j2").render(
        title=title, subtitle=subtitle, tiles=tiles, lines=lines, pictures=pictures, views=sections,
        note=note or next((str(t.meta["note"]) for _, t in traces if t.meta.get("note")), ""),
        memory=[_bar(bar) for bar in bars], memory_key=[(w, c) for w, c in PARTS.items() if w in used])


def of_prediction(title: str, plan: Plan, prediction: Prediction, *, cluster: Cluster, more: Sequence[View] = (),
                  measured: Trace | None = None) -> str:
    """The page of one plan; `more` views come first, `measured` adds what really happened."""
    capacity = {use.rank: use.capacity_bytes for use in prediction.devices}
    traces = [("predicted", prediction.trace)] if prediction.trace else []
    found: list[View] = []
    if measured:
        traces.append(("measured", measured))
        if prediction.trace:
            found.append(results.comparison(compare(prediction.trace, measured), measured.meta.get("device_names", {})))
    bars = [Bar(f"{views.ranges((u.rank for u in group), short=True)} {group[0].device}", group[0].breakdown,
                group[0].capacity_bytes) for group in results.alike(prediction)]
    tiles = [(name, value) for name, value in results.headline(prediction) if value and name in TILES]
    return render(title, f"cluster {cluster.name}, {plan.schedule}, {plan.global_batch} samples per step", tiles=tiles,
                  lines=[f"Bound by {prediction.bound}.", *prediction.reasons], traces=traces, bars=bars,
                  capacity=capacity, note=cluster.note,
                  sections=[*found, *more, views.plan(plan, cluster), results.prediction(prediction, plan)])


def write(path: str | Path, page: str) -> None:
    """Write the file; a reader sees it whole or not at all."""
    write_text(path, page)


def _bar(bar: Bar) -> dict[str, object]:
    total = sum(bar.parts.values())
    whole = max(total, bar.capacity_bytes)
    return {"name": bar.name, "text": f"{show_bytes(total)} of {show_bytes(bar.capacity_bytes)}",
            "parts": [{"percent": round(100 * bar.parts[what] / whole, 3), "colour": PARTS[what],
                       "text": f"{what}: {show_bytes(bar.parts[what])}"} for what in PARTS if bar.parts.get(what)]}
