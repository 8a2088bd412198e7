"""`mixfleet compare`: where was the prediction wrong?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import emit, emit_json, file_argument, json_option, out_option, progress
from mixfleet.errors import InputError

PREDICTED, MEASURED = "predicted.json", "measured.json"


@click.command()
@file_argument("predicted")
@file_argument("measured", required=False)
@out_option("--html", help="Write the comparison as one self-contained HTML file.")
@json_option
def compare(predicted: Path, measured: Path | None, html: Path | None, as_json: bool) -> None:
    """Set a measured trace against the predicted one, by device and category.

    Give two trace files, or the folder of a run that `mixfleet train --trace` wrote: it holds both.
    """
    from mixfleet.report import chrome, views
    from mixfleet.trace import compare as compare_traces

    if measured is None:
        if not predicted.is_dir():
            raise InputError("give the measured trace too, or the folder of a run", where=str(predicted))
        predicted, measured = predicted / PREDICTED, predicted / MEASURED
    ours, theirs = chrome.read_trace(predicted), chrome.read_trace(measured)
    result = compare_traces(ours, theirs)
    if html:
        from mixfleet.report import html as page

        names = theirs.meta.get("device_names", {})
        page.write(html, page.render(f"{predicted.name} against {measured.name}", traces=[("predicted", ours), ("measured", theirs)],
                                     views=[views.comparison(result, names), views.trace(ours), views.trace(theirs)]))
        progress(f"wrote {html}")
    if as_json:
        emit_json({"step": {**result.step._asdict(), "error": result.step.error},
                   "rows": [{**row._asdict(), "error": row.error} for row in result.rows]})
    else:
        emit(views.comparison(result, theirs.meta.get("device_names", {})))
