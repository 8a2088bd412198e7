"""`mixfleet validate`: how far are the predictions from a file of measurements?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit, emit_json, json_option, progress


@click.command()
@click.argument("file", type=EXISTING)
@click.option("--sample", type=click.IntRange(min=1), metavar="N",
              help="Predict N rows only, drawn with a fixed seed (files of kernel times).")
@click.option("--rows", type=WRITABLE, help="Write each predicted row as CSV.")
@click.option("--plot", type=WRITABLE, help="Write predicted against measured as SVG.")
@json_option
def validate(file: Path, sample: int | None, rows: Path | None, plot: Path | None, as_json: bool) -> None:
    """Predict every row of FILE (measured kernels, published results) and state the errors by source and device."""
    from mixfleet.calibrate import validate as engine
    from mixfleet.report.views import Table, View

    found = engine.validate(file, progress, sample=sample or 0)
    if rows:
        engine.write_rows(found, rows)
        progress(f"wrote {rows}")
    if plot:
        engine.plot(found, plot)
        progress(f"wrote {plot}")
    if as_json:
        emit_json({"rows": len(found.rows), "memory_rows": len(found.memory), "judged_not_to_fit": found.unfit,
                   **{name: getattr(found, name) for name in (
                       "file", "not_expressible", "skipped", "summaries", "sources", "total", "memory_summaries",
                       "memory_sources", "memory_total")}})
        return
    skipped: dict[tuple[str, str], int] = {}
    for s in found.skipped:
        skipped[s.source, s.device] = skipped.get((s.source, s.device), 0) + s.rows
    tables = []
    for title, each, sources, total in (
            ("absolute errors", found.summaries, found.sources, found.total),
            ("absolute errors of peak memory", found.memory_summaries, found.memory_sources, found.memory_total)):
        lines = [(s.source, s.device, f"{s.rows:,}", f"{s.median_ape:.1%}", f"{s.mean_ape:.1%}", f"{s.bias:+.1%}",
                  f"{s.p90_ape:.1%}", f"{s.covered:.0%}")
                 for s in (*sorted((*each, *sources), key=lambda s: (s.source, s.device == "all")),
                           *([total] if total else []))]
        if lines:
            tables.append(Table(_COLUMNS, lines, title))
    if skipped:
        tables.append(Table(("source", "device", ">rows"), [(*key, f"{n:,}") for key, n in sorted(skipped.items())],
                            "not predicted"))
    facts = [("judged not to fit", f"{found.unfit:,} runs")] if found.unfit else []
    facts += [("not predicted", f"{count:,} rows: {why}") for why, count in found.not_expressible.items()]
    emit(View(f"Predicted against measured: {file.name}", facts, tables))


_COLUMNS = ("source", "device", ">rows", ">median", ">mean", ">bias", ">90th", ">in interval")
