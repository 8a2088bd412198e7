"""`mixfleet plan`: which plan is best, and why?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit, emit_json, html_option, json_option, progress, split_names

if TYPE_CHECKING:
    from mixfleet.plan import Plan
    from mixfleet.search import Objective


@click.command()
@click.argument("job", type=EXISTING)
@click.argument("cluster", type=EXISTING)
@click.option("-o", "--output", type=WRITABLE, help="Write the best plan.")
@click.option("--top", type=click.IntRange(1), default=5, show_default=True, help="How many plans to show.")
@click.option("--max-seconds", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
              help="Stop searching after this long; what remains is then stated.")
@click.option("--objective", type=click.Choice(["time", "cost"]), help="Instead of the job's own.")
@click.option("--schedule", "names", help="Only these schedules for pipelines of several stages: names with commas.")
@click.option("--schedule-search", is_flag=True,
              help="Also try the best pipelines in two directions, in a V, and with orders of their own.")
@html_option
@json_option
def plan(job: Path, cluster: Path, output: Path | None, top: int, max_seconds: float, objective: Objective | None,
         names: str | None, schedule_search: bool, html: Path | None, as_json: bool) -> int:
    """Find the best plan for JOB on CLUSTER and say why. Exits with 1, and the nearest miss, if nothing fits."""
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.report import results, views
    from mixfleet.search import find
    from mixfleet.sim import predict

    this_job, this_cluster = Job.load(job), Cluster.load(cluster)
    progress(f"planning {this_job.name} on {this_cluster.name} ({len(this_cluster.devices)} devices) ...")
    result = find(this_job, this_cluster, top=top, max_seconds=max_seconds, objective=objective, progress=progress,
                  schedule_search=schedule_search, names=split_names(names))
    best = result.best
    if best and output:
        _named(best.plan, job, cluster, output).save(output, header=best.summary)
        progress(f"wrote {output}")
    if best and html:
        from mixfleet.report import html as page

        prediction = predict(best.plan, this_job, this_cluster, trace=True)
        page.write(html, page.of_prediction(f"{this_job.name} on {this_cluster.name}", best.plan, prediction,
                                            cluster=this_cluster, more=results.search(result)))
        progress(f"wrote {html}")
    if as_json:
        emit_json(result)
    elif best:
        emit(*results.search(result), views.plan(best.plan, this_cluster),
             results.prediction(best.prediction, best.plan))
    else:
        emit(*results.search(result))
    return 0 if best else 1


def _named(plan: Plan, job: Path, cluster: Path, output: Path) -> Plan:
    """The plan with its job and cluster as paths relative to where it is written."""
    here = output.absolute().parent
    return plan.replace(job=os.path.relpath(job, here), cluster=os.path.relpath(cluster, here))
