"""`mixfleet predict`: how long is a step by this plan, what does each device hold, what does it cost?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    split_names,
)

if TYPE_CHECKING:
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.plan import Plan


@click.command()
@click.argument("plan", type=EXISTING)
@job_option
@cluster_option
@click.option("--trace", type=WRITABLE, help="Write the predicted trace (Chrome/Perfetto JSON).")
@click.option("--schedule", "names", help="Compare schedules for the plan: all, searched, or names with commas.")
@html_option
@json_option
def predict(plan: Path, job: Path | None, cluster: Path | None, trace: Path | None, names: str | None,
            html: Path | None, as_json: bool) -> int:
    """Predict step time, memory per device and cost of PLAN. Exits with 1 if it does not fit.

    With --schedule, PLAN is predicted under other schedules, its stages cut into chunks where they ask for it.
    """
    from mixfleet.report import chrome, results, views
    from mixfleet.sim import predict as run

    what, this_job, this_cluster, _ = load_plan(plan, job, cluster)
    if names:
        return _compare(split_names(names), what, this_job, this_cluster, as_json)
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


def _compare(names: list[str], plan: Plan, job: Job, cluster: Cluster, as_json: bool) -> int:
    """Exits with 1 if the plan fits under none of the schedules."""
    from mixfleet.report import schedules as report
    from mixfleet.search.variants import compare

    found = compare(plan, names, job, cluster)
    if as_json:
        emit_json({name: {"why_not": one} if isinstance(one, str) else {"plan": one[0], "prediction": one[1]}
                   for name, one in found.items()})
    else:
        emit(report.comparison(found))
    return 0 if any(not isinstance(one, str) and one[1].fits for one in found.values()) else 1
