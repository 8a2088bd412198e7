"""`mixfleet fit`: the largest micro-batch that one device trains, and what fills its memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mixfleet.cli._common import emit, emit_json, json_option

if TYPE_CHECKING:
    from mixfleet.job import Job


@click.command()
@click.argument("model_or_job", metavar="MODEL_OR_JOB")
@click.option("--on", "device", required=True, help="Device by name: see `mixfleet show devices`.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens per sequence, instead of the job's or 2048.")
@json_option
def fit(model_or_job: str, device: str, seq_len: int | None, as_json: bool) -> int:
    """Find the largest micro-batch of MODEL_OR_JOB that fits one device, for each way to recompute.

    MODEL_OR_JOB is a job file, a well-known model or a config.json; a model is trained in bf16 with AdamW. Exits with 1
    if nothing fits.
    """
    from mixfleet.cluster import device_named
    from mixfleet.report import results
    from mixfleet.sim.fit import fit as largest

    job = _job(model_or_job, seq_len)
    found = largest(job, device_named(device))
    if as_json:
        emit_json({"job": job.name, "device": device, "seq_len": job.seq_len, "fits": found})
    else:
        emit(results.fits(f"{job.name}, {job.seq_len} tokens, on {device}", found))
    return 0 if any(one.micro_batch for one in found) else 1


def _job(source: str, seq_len: int | None) -> Job:
    from mixfleet.job import Job
    from mixfleet.model.families import build

    path = Path(source)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        job = Job.load(path)
        return job.replace(seq_len=seq_len) if seq_len else job
    model = build(path if path.is_file() else source)
    return Job(name=model.name, model=model, global_batch=1,
               seq_len=seq_len or min(2048, model.max_seq_len or 2048))
