"""One self-contained HTML file: headline figures, the timeline, memory per device, and the same tables as the terminal.

No scripts, no fonts or images from elsewhere. Everything from outside passes jinja2's autoescape or `html.escape`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mixfleet.files import write_text
from mixfleet.report import timeline
from mixfleet.report.views import View
from mixfleet.trace import Trace
from mixfleet.units import show_bytes

PARTS = {"weights": "#2f5fa8", "gradients": "#5b8fd6", "master": "#8457b0", "moments": "#b58fd8", "activations": "#3f9e8f",
         "gathered": "#e08a3c", "workspace": "#d4b13c", "optimizer": "#c2577f", "framework": "#a3a3a3"}
"""What holds memory, in the order of the bars, and its colour."""


class Bar(NamedTuple):
    """Bytes that a row of equal devices holds at its peak, by what holds them."""

    name: str
    parts: dict[str, int]
    capacity_bytes: int


def render(title: str, subtitle: str = "", *, tiles: Sequence[tuple[str, str]] = (), lines: Sequence[str] = (),
           traces: Sequence[tuple[str, Trace]] = (), bars: Sequence[Bar] = (), capacity: dict[int, int] | None = None,
           views: Sequence[View] = ()) -> str:
    """The page. `tiles` are headline figures (name, value), `lines` plain sentences, `traces` are drawn to one scale;
    `capacity` is bytes per row of a trace."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    page = Environment(loader=PackageLoader("mixfleet", "report"), autoescape=True, trim_blocks=True)
    longest = max((end - start for _, t in traces for start, end in [timeline.window(t)]), default=0)
    pictures = [Markup(timeline.svg(t, span_ns=longest, capacity=capacity, title=name if len(traces) > 1 else ""))
                for name, t in traces]
    used = {what for bar in bars for what in bar.parts}
    return page.get_template("page.html.j2").render(
        title=title, subtitle=subtitle, tiles=tiles, lines=lines, pictures=pictures, views=views,
        memory=[_bar(bar) for bar in bars], memory_key=[(w, c) for w, c in PARTS.items() if w in used])


def write(path: str | Path, page: str) -> None:
    """Write the file; a reader sees it whole or not at all."""
    write_text(path, page)


def _bar(bar: Bar) -> dict[str, object]:
    total = sum(bar.parts.values())
    whole = max(total, bar.capacity_bytes)
    return {"name": bar.name, "text": f"{show_bytes(total)} of {show_bytes(bar.capacity_bytes)}",
            "parts": [{"percent": round(100 * bar.parts[what] / whole, 3), "colour": PARTS[what],
                       "text": f"{what}: {show_bytes(bar.parts[what])}"} for what in PARTS if bar.parts.get(what)]}
