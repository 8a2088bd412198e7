"""What happened, or is predicted to happen, on every device: the one record that all reports read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mixfleet.spec import Spec
from mixfleet.units import NS_PER_S

CATEGORIES = ("forward", "backward", "recompute", "tensor", "expert", "send", "recv", "gather", "reduce", "load",
              "save", "optimizer", "host")
"""What a span does. `tensor` is tensor-parallel communication, `expert` brings rows to experts and back, `gather` and
`reduce` move weights and gradients between devices, `load` and `save` state from and to host memory."""
COMPUTE = ("forward", "backward", "recompute", "optimizer", "host")
"""The categories in which a device computes; the others move bytes."""
STREAMS = ("compute", "p2p", "gather", "reduce", "load", "save")


class Span(NamedTuple):
    """One stretch of work of one stream of one device."""

    device: int
    stream: str
    name: str
    category: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class MemoryMark(NamedTuple):
    """Bytes held by one device from `time_ns` on, split by what holds them."""

    device: int
    time_ns: int
    total_bytes: int
    what: str


class Trace(Spec, frozen=True, kw_only=True, dict=True):
    """Spans and memory marks of one or more steps.

    `meta` carries what readers need besides: `kind` (`predicted` or `measured`), step boundaries `steps_ns`
    (list of [start, end]), `device_names`, `tokens_per_step`, `model_flops_per_step` and `hardware_flops_per_step`,
    `peak_flops` (of all devices in use together), and `multiplicity` (how many identical devices each device row
    stands for). Keys of per-device tables are the rank as text, as JSON has it.
    """

    spans: tuple[Span, ...]
    memory: tuple[MemoryMark, ...] = ()
    meta: dict[str, Any] = {}


    @property
    def devices(self) -> tuple[int, ...]:
        """The rows of the trace, ascending."""
        return tuple(sorted({s.device for s in self.spans} | {m.device for m in self.memory}))

    @property
    def steps_ns(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each step; without any in `meta`, the whole trace is one."""
        steps = self.meta.get("steps_ns")
        if steps:
            return tuple((int(a), int(b)) for a, b in steps)
        if not self.spans:
            return ()
        return ((min(s.start_ns for s in self.spans), max(s.end_ns for s in self.spans)),)

    def multiplicity(self, device: int) -> int:
        """Identical devices that the row stands for."""
        return int(self.meta.get("multiplicity", {}).get(str(device), 1))


def within(trace: Trace) -> Trace:
    """What lies between the start of its first step and the end of its last: spans cut, memory as it is then."""
    begin, end = trace.steps_ns[0][0], trace.steps_ns[-1][1]
    spans = tuple(s._replace(start_ns=max(s.start_ns, begin), end_ns=min(s.end_ns, end))
                  for s in trace.spans if s.end_ns > begin and s.start_ns < end)
    held = {m.device: m._replace(time_ns=begin) for m in trace.memory if m.time_ns <= begin}
    return trace.replace(spans=spans, memory=(*held.values(), *(m for m in trace.memory if begin < m.time_ns <= end)))


def step_s(trace: Trace) -> float:
    """Mean seconds of a step."""
    steps = trace.steps_ns
    return sum(b - a for a, b in steps) / len(steps) / NS_PER_S if steps else 0.0


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint intervals, ascending, that cover the same points."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > start:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def by_category(trace: Trace) -> dict[int, dict[str, float]]:
    """Seconds per step that each device spends on each category, overlaps between streams counted in each."""
    totals: dict[int, dict[str, int]] = {d: {} for d in trace.devices}
    for span in trace.spans:
        row = totals[span.device]
        row[span.category] = row.get(span.category, 0) + span.end_ns - span.start_ns
    scale = NS_PER_S * max(len(trace.steps_ns), 1)
    return {device: {c: row[c] / scale for c in CATEGORIES if c in row} for device, row in totals.items()}


def utilization(trace: Trace) -> dict[int, float]:
    """Fraction of the steps in which each device computes."""
    known: dict[int, float] | None = trace.__dict__.get("_utilization")
    if known is not None:
        return known
    whole = sum(b - a for a, b in trace.steps_ns)
    busy: dict[int, list[tuple[int, int]]] = {d: [] for d in trace.devices}
    for span in trace.spans:
        if span.category in COMPUTE:
            busy[span.device].append((span.start_ns, span.end_ns))
    found = {device: _length(_union(spans)) / whole if whole else 0.0 for device, spans in busy.items()}
    trace.__dict__["_utilization"] = found
    return found


def exposed(trace: Trace) -> dict[int, dict[str, float]]:
    """Seconds per step in which a device communicates and computes nothing, by category.

    Where several kinds of communication are under way at once, the instant counts for the first of `CATEGORIES`,
    so that the sum of the row and of the computing time never exceeds the step.
    """
    known: dict[int, dict[str, float]] | None = trace.__dict__.get("_exposed")
    if known is not None:
        return known
    scale = NS_PER_S * max(len(trace.steps_ns), 1)
    rows: dict[int, dict[str, list[tuple[int, int]]]] = {d: {} for d in trace.devices}
    for span in trace.spans:
        key = "" if span.category in COMPUTE else span.category
        rows[span.device].setdefault(key, []).append((span.start_ns, span.end_ns))
    result: dict[int, dict[str, float]] = {}
    for device, row in rows.items():
        covered = _union(row.get("", ()))
        length = _length(covered)
        result[device] = {}
        for category in CATEGORIES:
            if category in row:
                covered = _union((*covered, *row[category]))
                result[device][category] = (-length + (length := _length(covered))) / scale
    trace.__dict__["_exposed"] = result
    return result


def bubble(trace: Trace) -> float:
    """Share of all devices' time in which they neither compute nor communicate with nothing else to do.

    With p equal stages, m micro-batches and free communication it is (p - 1) / (m + p - 1); the step is then
    (p - 1) / m longer than the computing.
    """
    step = step_s(trace)
    if not step:
        return 0.0
    busy, hidden = utilization(trace), exposed(trace)
    counts = {d: trace.multiplicity(d) for d in busy}
    idle = sum(n * (1 - busy[d] - sum(hidden[d].values()) / step) for d, n in counts.items())
    return max(0.0, idle / sum(counts.values()))


def mean_exposed(trace: Trace) -> dict[str, float]:
    """Seconds per step of exposed communication, by category, averaged over all devices."""
    rows = exposed(trace)
    counts = {d: trace.multiplicity(d) for d in rows}
    total = max(sum(counts.values()), 1)
    return {c: sum(n * rows[d].get(c, 0.0) for d, n in counts.items()) / total
            for c in CATEGORIES if any(c in row for row in rows.values())}


def peak_memory(trace: Trace) -> dict[int, MemoryMark]:
    """The mark with the most bytes of each device; the first of equal ones."""
    peaks: dict[int, MemoryMark] = {}
    for mark in trace.memory:
        if mark.device not in peaks or mark.total_bytes > peaks[mark.device].total_bytes:
            peaks[mark.device] = mark
    return peaks


def flop_utilization(trace: Trace) -> tuple[float, float]:
    """(MFU, HFU): FLOPs of the model, and those plus recomputation, per step and peak FLOP/s of all devices in use.

    The model's FLOPs are forward and backward without recomputation, attention as the full square (PaLM, Chowdhery
    et al. 2022, appendix B); the peak is dense, at the type of the computation. 0 where the trace does not know them.
    """
    whole = step_s(trace) * float(trace.meta.get("peak_flops", 0.0))
    if not whole:
        return 0.0, 0.0
    model = float(trace.meta.get("model_flops_per_step", 0.0))
    return model / whole, float(trace.meta.get("hardware_flops_per_step", model)) / whole


class Difference(NamedTuple):
    """One category on one device, seconds per step."""

    device: int
    category: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; None where nothing was measured."""
        return (self.predicted_s - self.measured_s) / self.measured_s if self.measured_s else None


class Comparison(NamedTuple):
    """A prediction against a measurement. `rows` are by device and category, `step` by the whole step."""

    step: Difference
    rows: tuple[Difference, ...]

    @property
    def worst(self) -> Difference:
        """The row that is most seconds off."""
        return max((*self.rows, self.step) if not self.rows else self.rows,
                   key=lambda r: abs(r.predicted_s - r.measured_s))


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Seconds per step by device and category. A folded row of the prediction answers for all devices it stands for."""
    like = {int(d): int(row) for d, row in predicted.meta.get("row_of", {}).items()}
    ours, theirs = by_category(predicted), by_category(measured)
    rows = []
    for device in measured.devices:
        mine = ours.get(like.get(device, device), {})
        rows += [Difference(device, c, mine.get(c, 0.0), theirs[device].get(c, 0.0))
                 for c in CATEGORIES if c in mine or c in theirs[device]]
    return Comparison(Difference(-1, "step", step_s(predicted), step_s(measured)), tuple(rows))
