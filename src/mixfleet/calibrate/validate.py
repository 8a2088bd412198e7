"""Predictions against a file of measurements: `mixfleet validate FILE`.

A kind of file is an entry of `READERS`: a test on its column names, and a function that gives a `Result` per row set.
Files of kernel times are here; others (published training results) register themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.calibrate.tables import COMMON, read
from mixfleet.cost import query
from mixfleet.errors import InputError


class Row(NamedTuple):
    """One row of the file, predicted."""

    where: int
    """Row of the file, from 0, headers not counted."""
    source: str
    device: str
    what: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    ceiling_s: float
    binds: str


class MemoryRow(NamedTuple):
    """A published peak of memory, predicted."""

    where: int
    source: str
    device: str
    what: str
    measured_bytes: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    fits: bool
    """Whether the prediction is within the memory of the device, which the run was."""


class Skipped(NamedTuple):
    """Rows of one source and device that are not predicted."""

    source: str
    device: str
    reason: str
    rows: int


class Summary(NamedTuple):
    """Errors of the rows of one source and device; None of all of them."""

    source: str
    device: str
    rows: int
    median_ape: float
    mean_ape: float
    bias: float
    """Mean of predicted / measured - 1."""
    p90_ape: float
    covered: float
    """Part of the rows whose measurement lies within the 10-90 % interval."""


class Result(NamedTuple):
    """What a file of measurements says about the predictions."""

    file: str
    rows: tuple[Row, ...]
    not_expressible: dict[str, int]
    summaries: tuple[Summary, ...]
    total: Summary | None
    sources: tuple[Summary, ...] = ()
    """The same over all devices of a source."""
    memory: tuple[MemoryRow, ...] = ()
    memory_summaries: tuple[Summary, ...] = ()
    memory_sources: tuple[Summary, ...] = ()
    memory_total: Summary | None = None
    skipped: tuple[Skipped, ...] = ()
    """The rows of `not_expressible`, where the file says of what source and device."""
    unfit: int = 0
    """Runs that are judged not to fit in memory, which they did."""


class Reader(NamedTuple):
    """How to validate one kind of file."""

    matches: Callable[[frozenset[str]], bool]
    """Whether column names are of this kind."""
    validate: Callable[[Path, Progress], Result]


Progress = Callable[[str], None]
"""Told how far a long validation is."""


def validate(path: Path, progress: Progress = lambda line: None, *, sample: int = 0) -> Result:
    """Predict every row that can be. InputError names the file and what it lacks.

    With `sample`, so many rows of a file of kernel times, drawn with a fixed seed; InputError for other files.
    """
    columns = _columns(path)
    read_it = next((r.validate for r in READERS if r.matches(columns)), kernels)
    if not sample:
        return read_it(path, progress)
    if read_it is not kernels:
        raise InputError("--sample is for files of kernel times; this file is predicted as a whole", where=str(path))
    return kernels(path, progress, sample)


def _columns(path: Path) -> frozenset[str]:
    if not path.exists():
        raise InputError("there is no such file", where=str(path))
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return frozenset(parquet.read_schema(path).names)
        import pandas

        return frozenset(pandas.read_csv(path, nrows=0).columns)
    except (ValueError, OSError) as error:
        raise InputError(f"not a table: {error}; give a .parquet, .csv or .csv.gz file", where=str(path)) from None


AT_ONCE = 500_000
"""Rows between two lines of progress."""


def kernels(path: Path, progress: Progress, sample: int = 0) -> Result:
    """A file of kernel times in the format of the measured data. Predictions count what of a source's times is the
    host's (`calibrate.drift`)."""
    table = read(path)
    assert table is not None
    at = np.arange(len(table.time_s))
    if 0 < sample < len(at):
        table.skipped[f"not drawn: --sample {sample}"] = len(at) - sample
        at = np.sort(np.random.default_rng(0).permutation(at)[:sample])
    rows = list[Row]()
    names: dict[tuple[str, str], str] = {}
    for start in range(0, len(at), AT_ONCE):
        part = at[start:start + AT_ONCE]
        columns = {name: values[part] for name, values in table.columns.items()}
        times, host = query.predict(table.kind, columns, table.devices, emulate=True), table.host_s[part]
        what = [names.setdefault(pair, " ".join(pair)) for pair in zip(columns["op"], columns["dtype"])]
        rows += [Row(*row) for row in zip(table.where[part].tolist(), columns["source"], columns["gpu"], what,
                                          table.time_s[part].tolist(), *((t + host).tolist() for t in (
                                              times.time_s, times.low_s, times.high_s, times.ceiling_s)),
                                          times.binds)]
        if len(at) > AT_ONCE:
            progress(f"{len(rows):,} of {len(at):,} kernels predicted")
    return result(path, rows, table.skipped)


def result(path: Path, rows: list[Row], skipped: dict[str, int], memory: Sequence[MemoryRow] = ()) -> Result:
    """Rows with their summaries by source and device, and over all."""
    of_rows, of_memory = (summaries(found, lambda r: (r.source, r.device)) for found in (rows, memory))
    total, memory_total = (next(iter(summaries(found, lambda _: ("all", "all"))), None) for found in (rows, memory))
    sources, memory_sources = (summaries(found, lambda r: (r.source, "all")) for found in (rows, memory))
    return Result(str(path), tuple(rows), skipped, of_rows, total, sources, tuple(memory), of_memory, memory_sources,
                  memory_total)


def summaries(rows: Sequence[Row] | Sequence[MemoryRow],
              key: Callable[[Row | MemoryRow], tuple[str, str]]) -> tuple[Summary, ...]:
    """Errors of rows with the same key, in the order of the keys."""
    if not rows:
        return ()
    measured, predicted, low, high = (np.array([r[i] for r in rows], float) for i in range(4, 8))
    keys = [key(r) for r in rows]
    code = {k: i for i, k in enumerate(sorted(set(keys)))}
    which = np.array([code[k] for k in keys])
    error = predicted / measured - 1
    inside = (measured >= low) & (measured <= high)

    def summary(source: str, device: str, at: NDArray[Any]) -> Summary:
        ape = np.abs(error[at])
        return Summary(source, device, int(at.sum()), float(np.median(ape)), float(ape.mean()), float(error[at].mean()),
                       float(np.quantile(ape, 0.9)), float(inside[at].mean()))

    return tuple(summary(*k, which == i) for k, i in code.items())


def write_rows(found: Result, path: Path) -> None:
    """One line per predicted row, as CSV; columns of bytes where the file has memory."""
    import csv

    columns = (*Row._fields, *(f for f in MemoryRow._fields if found.memory and f not in Row._fields))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(row._asdict() for row in found.rows)
        writer.writerows(row._asdict() for row in found.memory)


def plot(found: Result, path: Path, *, most: int = 4000) -> None:
    """Predicted against measured seconds as an SVG, both on logarithmic axes; at most `most` points, evenly drawn."""
    rows = found.rows[::max(1, len(found.rows) // most)]
    if not rows:
        raise InputError("no row could be predicted, so there is nothing to plot", where=found.file)
    xy = np.log10(np.array([[r.measured_s, r.predicted_s] for r in rows]))
    low, high = np.floor(xy.min()), np.ceil(xy.max())
    size, pad = 520, 60

    def at(value: float) -> float:
        return float(pad + (value - low) / max(high - low, 1) * size)

    side = size + 2 * pad
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" font-family="sans-serif" '
             'font-size="12"><rect width="100%" height="100%" fill="white"/>',
             f'<line x1="{at(low)}" y1="{side - at(low)}" x2="{at(high)}" y2="{side - at(high)}" stroke="#999"/>']
    for tick in np.arange(low, high + 1):
        label = f"1e{int(tick)} s"
        parts.append(f'<text x="{at(tick)}" y="{side - pad / 2}" text-anchor="middle">{label}</text>'
                     f'<text x="{pad / 2}" y="{side - at(tick)}" text-anchor="middle">{label}</text>')
    parts += [f'<circle cx="{at(x):.1f}" cy="{side - at(y):.1f}" r="1.6" fill="#1f77b4" fill-opacity="0.4"/>'
              for x, y in xy]
    parts.append(f'<text x="{side / 2}" y="{side - 8}" text-anchor="middle">measured</text>'
                 f'<text x="{side / 2}" y="20" text-anchor="middle">predicted</text></svg>')
    path.write_text("\n".join(parts), encoding="utf-8")


def _published(path: Path, progress: Progress) -> Result:
    from mixfleet.calibrate import published

    return published.validate(path, progress)


def _collectives(path: Path, progress: Progress) -> Result:
    from mixfleet.calibrate import collectives

    return collectives.validate(path)


def _inference(path: Path, progress: Progress) -> Result:
    from mixfleet.calibrate import inference

    return inference.validate(path)


def _operators(path: Path, progress: Progress) -> Result:
    from mixfleet.calibrate import operators

    return operators.validate(path)


READERS: list[Reader] = [Reader(lambda columns: columns.issuperset(("id", "metric", "value")), _published),
                         Reader(lambda columns: columns.issuperset(("ranks", "bytes", "time_us")), _collectives),
                         Reader(lambda columns: columns.issuperset(("prefill_ms", "decode_step_ms")), _inference),
                         Reader(lambda columns: columns.issuperset(("in_shapes", "out_shape", "fw_us")), _operators),
                         Reader(lambda columns: columns.issuperset(COMMON), kernels)]
"""First match wins; modules of other kinds append theirs."""
