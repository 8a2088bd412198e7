"""Schedules as a table and as pictures: a row per device, a box per step with the number of its micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mixfleet.report.views import Table, View, percent
from mixfleet.schedule.asynchronous import PUSH, STEP
from mixfleet.schedule.greedy import Orders, Step, Work, timeline
from mixfleet.schedule.properties import Properties, computes
from mixfleet.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from mixfleet.plan import Plan
    from mixfleet.sim.prediction import Prediction

COLOURS = {"C": "#9fb8dc", "F": "#5b8fd6", "B": "#2f5fa8", "I": "#2f5fa8", "W": "#8457b0", STEP: "#c8452f"}
_WORDS = {STEP: "optimizer step", "C": "forward that keeps nothing", "F": "forward", "B": "backward",
          "I": "backward, input half", "W": "weight half"}
_ROW, _LABEL = 22, 70


def table(found: Iterable[Properties], refused: Mapping[str, str]) -> View:
    """All schedules with what they cost; those that do not suit with the reason. Then those whose gradients come late:
    by how many updates, and which weights they are of."""
    found = list(found)
    rows = [[p.name, percent(p.bubble), " ".join(f"{n:g}" for n in p.in_flight), str(p.messages), str(p.copies),
             "yes" if p.splits else "", p.wants] for p in found]
    rows += [[name, "", "", "", "", "", reason] for name, reason in refused.items()]
    late = [[p.name, " ".join(_range(*n) for n in p.staleness), " ".join(map(str, p.versions)), p.backward]
            for p in found if not p.synchronous]
    tables = [Table(["schedule", ">bubble", "in flight per stage", ">messages", ">weight copies", "split backward",
                     "wants"], rows)]
    if late:
        tables.append(Table(["asynchronous", "updates late per stage", "weight versions per stage", "backward sees"],
                            late))
    return View("schedules", tables=tables)


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}-{most}"


def comparison(found: Mapping[str, tuple[Plan, Prediction] | str]) -> View:
    """One plan under several schedules: those that fit first, fastest first."""
    rows: list[tuple[tuple[bool, float], list[str]]] = []
    for name, one in found.items():
        if isinstance(one, str):
            rows.append(((True, float("inf")), [name, "", "", "", one]))
            continue
        _, p = one
        peak = f"{show_bytes(p.peak.peak_bytes)} of {show_bytes(p.peak.capacity_bytes)} ({p.peak.device})"
        rows.append(((not p.fits, p.step_s), [name, show_seconds(p.step_s), percent(p.bubble), peak,
                                              "" if p.fits else f"does not fit: {p.reasons[0]}"]))
    return View("the plan under other schedules", tables=[Table(
        ["schedule", ">step", ">bubble", "fullest device", "why not"],
        [row for _, row in sorted(rows, key=lambda item: item[0])])])


def svg(work: Work | Mapping[Step, tuple[float, float]], orders: Orders, *, width: int = 900, title: str = "") -> str:
    """The orders in time. Later chunks of a device are lighter; a line is an optimizer step between micro-batches, or
    where each of them makes one, the end of a wave. In place of the work it takes the times of the steps as well."""
    done = timeline(work, computes(orders)) if isinstance(work, Work) else work
    end = max(stop for _, stop in done.values())
    scale = (width - _LABEL - 10) / end
    top = 24 if title else 4
    body = [f'<text x="0" y="15" font-weight="600">{title}</text>'] if title else []
    for d, order in enumerate(orders):
        y = top + d * _ROW
        body.append(f'<text x="0" y="{y + 15}">device {d}</text><rect x="{_LABEL}" y="{y}" width="{end * scale:.1f}" '
                    f'height="{_ROW - 2}" fill="currentColor" opacity=".06"/>')
        mine = sorted({k for _, k, _ in order})
        line = PUSH if any(op == PUSH for op, _, _ in order) else STEP
        stop = 0.0
        for step in order:
            op, k, m = step
            if op == line:
                body.append(f'<rect x="{_LABEL + stop * scale - 1.2:.1f}" y="{y - 1}" width="1.6" height="{_ROW}" '
                            f'fill="{COLOURS[STEP]}"><title>{op}{k}.{m}</title></rect>')
            if step not in done:
                continue
            start, stop = done[step]
            wide = (stop - start) * scale
            light = 1 - 0.45 * mine.index(k) / max(len(mine) - 1, 1)
            body.append(f'<rect x="{_LABEL + start * scale:.1f}" y="{y}" width="{max(wide - 0.8, 0.4):.1f}" '
                        f'height="{_ROW - 2}" fill="{COLOURS[op]}" opacity="{light:.2f}"><title>{op}{k}.{m}</title>'
                        "</rect>")
            if wide > 8:
                body.append(f'<text x="{_LABEL + (start + stop) / 2 * scale:.1f}" y="{y + 14}" text-anchor="middle" '
                            f'fill="#fff" font-size="10">{m}</text>')
    y, x = top + len(orders) * _ROW + 12, _LABEL
    for op in dict.fromkeys(op for order in orders for op, _, _ in order if op in COLOURS):
        body.append(f'<rect x="{x}" y="{y - 9}" width="11" height="11" fill="{COLOURS[op]}"/>'
                    f'<text x="{x + 16}" y="{y}">{_WORDS[op]}</text>')
        x += 40 + 7 * len(_WORDS[op])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 8}" role="img" fill="#1d232b" '
            f'font-family="system-ui,sans-serif" font-size="12">{"".join(body)}</svg>\n')
