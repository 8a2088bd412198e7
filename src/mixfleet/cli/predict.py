"""`mixfleet predict`: how long is a step by this plan, what does each device hold, what does it cost?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import (
    EXISTING,
    WRITABLE,
    cluster_option,
    emit,
    emit_json,
    html_option,
    job_option,
    json_option,
    load_plan,
    progress,
)


@click.command()
@click.argument("plan", type=EXISTING)
@job_option
@cluster_option
@click.option("--trace", type=WRITABLE, help="Write the predicted trace (Chrome/Perfetto JSON).")
@html_option
@json_option
def predict(plan: Path, job: Path | None, cluster: Path | None, trace: Path | None, html: Path | None,
            as_json: bool) -> int:
    """Predict step time, memory per device and cost of PLAN. Exits with 1 if it does not fit."""
    from mixfleet.report import chrome, results, views
    from mixfleet.sim import predict as run

    what, this_job, this_cluster, _ = load_plan(plan, job, cluster)
    result = run(what, this_job, this_cluster, trace=bool(trace or html))
    if trace and result.trace:
        chrome.write_trace(result.trace, trace)
        progress(f"wrote {trace}")
    if html:
        from mixfleet.report import html as page

        title = f"{this_job.name} on {this_cluster.name}"
        page.write(html, page.of_prediction(title, what, result, cluster=this_cluster))
        progress(f"wrote {html}")
    if as_json:
        emit_json(result.replace(trace=None))
    else:
        emit(results.prediction(result, what), views.plan(what, this_cluster))
    return 0 if result.fits else 1
