"""A trace as a picture: one row per device, a lane per stream, as plain SVG.

Spans that are narrower than a pixel are merged with their neighbours and take the colour of the longest category among
them, so that the size of the picture depends on its width and not on the length of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import floor, log10

from mixfleet.trace import CATEGORIES, STREAMS, MemoryMark, Span, Trace
from mixfleet.units import show_bytes, show_seconds

COLOURS = {"forward": "#5b8fd6", "backward": "#2f5fa8", "recompute": "#9db9e0", "tensor": "#e08a3c",
           "expert": "#b8642a", "send": "#c2577f",
           "recv": "#dfa3ba", "gather": "#3f9e8f", "reduce": "#8457b0",
           "load": "#7c9a5b", "save": "#a3b98a", "optimizer": "#d4b13c", "host": "#a3a3a3"}
"""Blues compute; every kind of communication has a hue of its own."""
MAX_ROWS = 40
_LABEL, _MARGIN = 210, 14
_COMPUTE, _LANE, _MEMORY, _GAP = 18, 6, 18, 8
_VISIBLE = 0.8
"""Narrowest rectangle that is drawn on its own."""
_STYLE = """.tl{font:12px system-ui,sans-serif;color:#1d232b}.tl text{fill:currentColor}
.tl .dim{opacity:.62}.tl .grid{stroke:currentColor;opacity:.13}.tl .mb{fill:#fff;font-size:10px;pointer-events:none}
.tl .lane{fill:currentColor;opacity:.05}.tl .mem{fill:currentColor;opacity:.28}.tl .over{fill:#c92a2a;opacity:.7}
@media (prefers-color-scheme:dark){.tl{color:#e4e8ee}}"""


def svg(trace: Trace, *, width: int = 1180, span_ns: int = 0, capacity: dict[int, int] | None = None,
        title: str = "") -> str:
    """One step of the trace. `span_ns` is the length of the time axis (0: the step's own), to draw two traces to one
    scale; `capacity` (bytes per row) adds the memory held over time."""
    start, end = window(trace)
    length = max(span_ns, end - start, 1)
    scale = (width - _LABEL - _MARGIN) / length
    rows, hidden = _chosen(trace.devices)
    body: list[str] = []
    top = 46 if title else 26
    y: float = top
    spans = {d: list(group) for d, group in groupby(sorted(trace.spans), key=lambda s: s.device)}
    names = trace.meta.get("device_names", {})
    for device in rows:
        copies = trace.multiplicity(device)
        label = f"{device} {names.get(str(device), '')}".strip()
        marks = [m for m in trace.memory if m.device == device and m.time_ns <= end]
        row, height = _row(spans.get(device, []), start, end, scale, y)
        body.append(f'<text x="0" y="{y + 13}">{escape(label)}</text>')
        if copies > 1:
            body.append(f'<text x="{_LABEL - 10}" y="{y + 13}" text-anchor="end" class="dim">× {copies}</text>')
        body += row
        y += height
        if marks and capacity and capacity.get(device):
            body.append(_memory(marks, start, end, scale, y, capacity[device]))
            peak = max(m.total_bytes for m in marks)
            body.append(f'<text x="{_LABEL - 10}" y="{y + 13}" text-anchor="end" class="dim">{show_bytes(peak)} of '
                        f"{show_bytes(capacity[device])}</text>")
            y += _MEMORY
        y += _GAP
    if hidden:
        body.append(f'<text x="0" y="{y + 12}" class="dim">{hidden} more devices are not drawn</text>')
        y += 20
    axis = _axis(length, scale, top, y)
    head = f'<text x="0" y="14" font-weight="600">{escape(title)}</text>' if title else ""
    legend = _legend(sorted({s.category for s in trace.spans}, key=CATEGORIES.index), y + 22)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="tl" viewBox="0 0 {width} {y + 36}" role="img">'
            f"<style>{_STYLE}</style>{head}{''.join(axis)}{''.join(body)}{legend}</svg>")


def window(trace: Trace) -> tuple[int, int]:
    """The step to draw: of several, the one of median length."""
    steps = sorted(trace.steps_ns, key=lambda s: s[1] - s[0])
    return steps[len(steps) // 2] if steps else (0, 0)


def _chosen(devices: Sequence[int]) -> tuple[list[int], int]:
    """At most `MAX_ROWS` devices, evenly spread, and how many were left out."""
    if len(devices) <= MAX_ROWS:
        return list(devices), 0
    return [devices[i * len(devices) // MAX_ROWS] for i in range(MAX_ROWS)], len(devices) - MAX_ROWS


def _row(spans: list[Span], start: int, end: int, scale: float, y: float) -> tuple[list[str], float]:
    inside = [s for s in spans if s.end_ns > start and s.start_ns < end]
    order = {name: i for i, name in enumerate(STREAMS)}
    used = sorted({s.stream for s in inside} | {"compute"}, key=lambda name: (order.get(name, len(order)), name))
    out, top = [], y
    for stream in used:
        height = _COMPUTE if stream == "compute" else _LANE
        right = _LABEL + (end - start) * scale
        out.append(f'<rect class="lane" x="{_LABEL}" y="{top}" width="{right - _LABEL:.1f}" height="{height}"/>')
        for x, wide, category, hint, label in _boxes([s for s in inside if s.stream == stream], start, end, scale):
            out.append(f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height - 1}" '
                       f'fill="{COLOURS[category]}"><title>{escape(hint)}</title></rect>')
            if label and height == _COMPUTE and wide > 7 * len(label) + 3:
                out.append(f'<text class="mb" x="{x + wide / 2:.1f}" y="{top + 12.5}" text-anchor="middle">'
                           f"{escape(label)}</text>")
        top += height + 1
    return out, top - y


def _boxes(spans: list[Span], start: int, end: int, scale: float) -> Iterator[tuple[float, float, str, str, str]]:
    """(x, width, category, tooltip, label) of each rectangle. What is too narrow to see joins what follows."""
    held: list[Span] = []
    until = 0

    def box() -> tuple[float, float, str, str, str]:
        first, last = held[0], held[-1]
        longest = max(held, key=lambda s: s.duration_ns)
        x, wide = (max(first.start_ns, start) - start) * scale, (min(until, end) - max(first.start_ns, start)) * scale
        times: dict[str, int] = {}
        for s in held:
            times[s.category] = times.get(s.category, 0) + s.duration_ns
        category = max(times, key=lambda c: times[c])
        hint = f"{category} {first.name}" if len(held) == 1 else f"{len(held)} spans, {first.name} .. {last.name}"
        alone = longest.duration_ns * scale > wide / 2
        label = longest.name.rpartition(".")[2] if alone and "." in longest.name else ""
        return (_LABEL + x, max(wide - (0.4 if wide > 3 else 0), 0.3), category,
                f"{hint}: {', '.join(f'{c} {show_seconds(t / 1e9)}' for c, t in times.items())}", label)

    for span in sorted(spans, key=lambda s: (s.start_ns, s.end_ns)):
        narrow = (until - held[0].start_ns) * scale < _VISIBLE if held else False
        alike = bool(held) and span.category == held[-1].category and span.duration_ns * scale < _VISIBLE
        if held and not ((narrow or alike) and (span.start_ns - until) * scale < _VISIBLE / 2):
            yield box()
            held = []
        held.append(span)
        until = max(until, span.end_ns)
    if held:
        yield box()


def _memory(marks: list[MemoryMark], start: int, end: int, scale: float, y: float, capacity: int) -> str:
    """Bytes held over time as an area; the full height is the capacity."""
    before = [m for m in marks if m.time_ns <= start]
    steps = [(0.0, before[-1].total_bytes if before else 0)]
    for mark in marks:
        x = (mark.time_ns - start) * scale
        if mark.time_ns > start and (x - steps[-1][0] >= 0.5 or mark.total_bytes > steps[-1][1]):
            steps.append((max(x, steps[-1][0]), mark.total_bytes))
    right = (end - start) * scale
    base = y + _MEMORY - 1
    points = [f"M{_LABEL},{base}"]
    for (x, held), following in zip(steps, [*steps[1:], (right, 0)]):
        top = base - min(held / capacity, 1.0) * (_MEMORY - 2)
        points.append(f"L{_LABEL + x:.1f},{top:.1f}L{_LABEL + following[0]:.1f},{top:.1f}")
    peak = max(m.total_bytes for m in marks)
    return (f'<rect class="lane" x="{_LABEL}" y="{y + 1}" width="{right:.1f}" height="{_MEMORY - 2}"/>'
            f'<path class="{"over" if peak > capacity else "mem"}" d="{"".join(points)}L{_LABEL + right:.1f},{base}Z">'
            f"<title>memory, at most {show_bytes(peak)} of {show_bytes(capacity)}</title></path>")


def _axis(length: int, scale: float, top: float, bottom: float) -> list[str]:
    step = 10 ** floor(log10(length / 4))
    step = next(step * k for k in (1, 2, 5, 10) if length / (step * k) <= 8)
    out = []
    for i in range(int(length / step) + 1):
        x = _LABEL + i * step * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}"/>'
                   f'<text class="dim" x="{x:.1f}" y="{top - 10}" text-anchor="middle">'
                   f"{show_seconds(i * step / 1e9) if i else '0'}</text>")
    return out


def _legend(categories: Sequence[str], y: float) -> str:
    out, x = [], float(_LABEL)
    for name in categories:
        out.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" fill="{COLOURS[name]}"/>'
                   f'<text x="{x + 16}" y="{y}">{name}</text>')
        x += 30 + 7 * len(name)
    return "".join(out)
