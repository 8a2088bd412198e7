"""`mixfleet scale`: how does a job speed up on ever more devices, and where do more stop paying?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, emit, emit_json, json_option, progress, split_names
from mixfleet.errors import InputError


@click.command()
@click.argument("job", type=EXISTING)
@click.argument("cluster", type=EXISTING)
@click.option("--devices", help="Numbers of devices, with commas; otherwise 1, 2, 4 ... and all. Fastest first.")
@click.option("--weak", is_flag=True, help="Let the global batch grow with the devices, as long as epochs have enough "
                                           "steps.")
@click.option("--samples", type=click.IntRange(1), help="Samples of an epoch, where the job's data do not say.")
@click.option("--least-steps", type=click.IntRange(1), default=100, show_default=True,
              help="Steps of an epoch below which the global batch must not grow.")
@click.option("--max-seconds", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True,
              help="Stop searching for each number of devices after this long.")
@json_option
def scale(job: Path, cluster: Path, devices: str | None, weak: bool, samples: int | None, least_steps: int,
          max_seconds: float, as_json: bool) -> int:
    """Plan JOB on ever more devices of CLUSTER and say where more of them stop paying.

    The global batch stays as the job has it, so that training is the same on all of them. Exits with 1 if nothing fits.
    """
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.report import results
    from mixfleet.search.scaling import pays_until, samples_of, scaling

    this_job, this_cluster = Job.load(job), Cluster.load(cluster)
    whole = len(this_cluster.devices)
    counts = _numbers(devices) if devices else [*(2**k for k in range(whole.bit_length()) if 2**k < whole), whole]
    progress(f"planning {this_job.name} on {', '.join(map(str, counts))} devices of {this_cluster.name} ...")
    points = scaling(this_job, this_cluster, counts, weak=weak, least_steps=least_steps, max_seconds=max_seconds,
                     samples=samples or (samples_of(this_job, job.parent) if weak else 0))
    last = pays_until(points)
    if as_json:
        emit_json({"job": this_job.name, "points": points, "pays_until": last.devices if last else None})
    else:
        emit(results.scaling(f"{this_job.name} on {this_cluster.name}", points, last))
    return 0 if last else 1


def _numbers(text: str) -> list[int]:
    names = split_names(text)
    wrong = next((name for name in names if not name.isdecimal() or int(name) < 1), None)
    if wrong is not None or not names:
        raise InputError(f"--devices has {wrong!r}; give numbers of devices with commas, such as 1,2,4")
    return [int(name) for name in names]
