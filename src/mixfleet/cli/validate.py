"""`mixfleet validate`: how far are the predictions from a file of measurements?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit, emit_json, json_option, progress


@click.command()
@click.argument("file", type=EXISTING)
@click.option("--rows", type=WRITABLE, help="Write each predicted row as CSV.")
@click.option("--plot", type=WRITABLE, help="Write predicted against measured as SVG.")
@json_option
def validate(file: Path, rows: Path | None, plot: Path | None, as_json: bool) -> None:
    """Predict every row of FILE (measured kernels, published results) and state the errors by source and device."""
    from mixfleet.calibrate import validate as engine
    from mixfleet.report.views import Table, View

    found = engine.validate(file)
    if rows:
        engine.write_rows(found, rows)
        progress(f"wrote {rows}")
    if plot:
        engine.plot(found, plot)
        progress(f"wrote {plot}")
    if as_json:
        emit_json({"file": found.file, "rows": len(found.rows), "not_expressible": found.not_expressible,
                   "summaries": found.summaries, "total": found.total})
        return
    lines = [*found.summaries, *([found.total] if found.total else [])]
    table = [(s.source, s.device, f"{s.rows:,}", f"{s.median_ape:.1%}", f"{s.mean_ape:.1%}", f"{s.bias:+.1%}",
              f"{s.p90_ape:.1%}", f"{s.covered:.0%}") for s in lines]
    facts = [("not predicted", f"{count:,} rows: {why}") for why, count in found.not_expressible.items()]
    columns = ("source", "device", ">rows", ">median", ">mean", ">bias", ">90th", ">in interval")
    emit(View(f"Predicted against measured: {file.name}", facts, [Table(columns, table, "absolute errors")]))
