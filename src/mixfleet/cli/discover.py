"""`mixfleet discover`: the cluster file of this machine."""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit, emit_json, json_option, progress
from mixfleet.errors import InputError


@click.command()
@click.option("-o", "--output", type=WRITABLE, help="Write the cluster file.")
@click.option("--ranks", help="Cores of each process: '0 1 1' is three processes, the last two sharing core 1; "
                              "'0,1 2,3' gives two cores each.")
@click.option("--measure/--no-measure", default=True, help="Measure the cores and the link between them (needs torch).")
@click.option("--profile", type=EXISTING, metavar="JOB",
              help="Also measure what the blocks of this job take on each device.")
@json_option
def discover(output: Path | None, ranks: str | None, measure: bool, profile: Path | None, as_json: bool) -> None:
    """Describe the machine this runs on: its GPUs, or else its cores as devices."""
    from mixfleet import calibrate
    from mixfleet.job import Job
    from mixfleet.report import views

    cores = _cores(ranks) if ranks is not None else None
    if measure:
        progress("measuring ...")
    cluster = calibrate.discover(cores, measure=measure)
    if profile:
        job = Job.load(profile)
        progress(f"measuring the blocks of {job.name} ...")
        cluster = calibrate.profile_job(job, cluster, note=progress)
    if output:
        cluster.save(output)
        progress(f"wrote {output}")
    emit_json(cluster) if as_json else emit(views.cluster(cluster))


def _cores(text: str) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(core) for core in entry.split(",")) for entry in text.split()]
    except ValueError:
        raise InputError(f"--ranks is {text!r}; write the cores of each process, as in '0 1 1' or '0,1 2,3'") from None
