"""`mixfleet compare`: where was the prediction wrong?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, emit, emit_json, html_option, json_option, progress
from mixfleet.errors import InputError

PREDICTED, MEASURED = "predicted.json", "measured.json"


@click.command()
@click.argument("predicted", type=EXISTING)
@click.argument("measured", type=EXISTING, required=False)
@html_option
@json_option
def compare(predicted: Path, measured: Path | None, html: Path | None, as_json: bool) -> None:
    """Set a measured trace against the predicted one, by device and category.

    Give two trace files, or the folder of a run that `mixfleet train --trace` wrote: it holds both.
    """
    from mixfleet.report import chrome, results
    from mixfleet.trace import compare as compare_traces

    if measured is None:
        if not predicted.is_dir():
            raise InputError("give the measured trace too, or the folder of a run", where=str(predicted))
        predicted, measured = predicted / PREDICTED, predicted / MEASURED
    ours, theirs = chrome.read_trace(predicted), chrome.read_trace(measured)
    result = compare_traces(ours, theirs)
    view = results.comparison(result, theirs.meta.get("device_names", {}))
    note = theirs.meta.get("note") or ours.meta.get("note")
    if note:
        progress(f"note: {note}")
    if html:
        from mixfleet.report import html as page

        page.write(html, page.render("Predicted against measured", f"{predicted}, {measured}",
                                     traces=[("predicted", ours), ("measured", theirs)],
                                     sections=[view, results.trace(ours), results.trace(theirs)]))
        progress(f"wrote {html}")
    if as_json:
        emit_json({"step": {**result.step._asdict(), "error": result.step.error},
                   "rows": [{**row._asdict(), "error": row.error} for row in result.rows]})
    else:
        emit(view)
