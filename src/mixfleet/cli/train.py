"""`mixfleet train`: train by a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mixfleet.cli._common import (
    EXISTING,
    Loaded,
    cluster_option,
    emit,
    emit_json,
    job_option,
    json_option,
    load_plan,
    progress,
)
from mixfleet.cli.compare import MEASURED, PREDICTED
from mixfleet.errors import InputError

if TYPE_CHECKING:
    from mixfleet.run import TrainResult
    from mixfleet.run.launch import Enter, OnNan
    from mixfleet.run.metrics import StepMetrics
    from mixfleet.sim import Prediction


class Seats(NamedTuple):
    """Where a testbed's ranks run and meet, how long beyond a step one may be silent, and who hears of steps."""

    enter: Enter
    rendezvous: Callable[[Sequence[int]], str]
    patience_s: float
    on_step: Callable[[int], None]


@click.command()
@click.argument("plan", type=EXISTING)
@job_option
@cluster_option
@click.option("--schedule", help="Run the plan under another schedule: a name, or searched.")
@click.option("--steps", type=click.IntRange(1), help="Step at which to end, instead of the job's.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of checkpoints, metrics, traces.")
@click.option("--resume", type=EXISTING, help="A checkpoint, or a folder of them; any plan may have written it.")
@click.option("--init-from", type=EXISTING, help="Weights to start from: a transformers directory, or a checkpoint.")
@click.option("--checkpoint-every", type=click.IntRange(0), default=0, help="Steps between them; 0: at the end.")
@click.option("--async-save", is_flag=True, help="Write checkpoints while training goes on, from a copy in memory.")
@click.option("--trace", is_flag=True, help="Record the last steps into the folder, beside the prediction.")
@click.option("--trace-steps", type=click.IntRange(1), default=5, show_default=True, help="How many of them.")
@click.option("--balance-every", type=click.IntRange(0), default=0,
              help="Steps between looks at who is slow, to give its samples to others; 0: never.")
@click.option("--on-nan", type=click.Choice(["stop", "skip"]), default="stop", show_default=True,
              help="What a step that is not finite does.")
@click.option("--patience", type=click.FloatRange(0, min_open=True),
              help="Seconds without a sign of life, or in one action, after which a rank counts as failed; by default "
                   "600, and on a testbed 8 more than a step should take.")
@click.option("--local", is_flag=True, help="Start all ranks on this machine, though the plan uses several.")
@click.option("--commands", is_flag=True, help="Print the command to start on each machine, and stop.")
@json_option
@click.pass_obj
def train(seats: Seats | None, plan: Path, job: Path | None, cluster: Path | None, schedule: str | None,
          steps: int | None, out: Path | None, resume: Path | None, init_from: Path | None, checkpoint_every: int,
          async_save: bool, trace: bool, trace_steps: int, balance_every: int, on_nan: OnNan, patience: float | None,
          local: bool, commands: bool, as_json: bool) -> None:
    """Train by PLAN: starts local processes, or runs as one of the processes of torchrun."""
    from mixfleet.report import chrome, results
    from mixfleet.run import train as run
    from mixfleet.run.metrics import METRICS, Reporter
    from mixfleet.sim import predict

    loaded = load_plan(plan, job, cluster)
    if schedule:
        from mixfleet.search.variants import rescheduled

        loaded = loaded._replace(plan=rescheduled(loaded.plan, schedule, loaded.job, loaded.cluster))
    if commands:
        return _show_commands(loaded, [str(plan), *(["--schedule", schedule] if schedule else [])], as_json)
    if trace and not out:
        raise InputError("--trace needs a folder for the traces; give it with --out")
    first = os.environ.get("RANK", "0") == "0"
    if not local and not seats and "RANK" not in os.environ:
        _refuse_other_machines(loaded)
    prediction = predict(loaded.plan, loaded.job, loaded.cluster, trace=trace)
    if first and not prediction.fits:
        progress(f"warning: predicted not to fit: {prediction.reasons[0]}")
    last = loaded.job.steps if steps is None else steps
    patience = patience or (seats.patience_s + prediction.step_s if seats else 600.0)
    seconds: list[float] = []
    with ExitStack() as stack:
        reporters: list[Reporter] = []

        def on_step(report: StepMetrics) -> None:
            if not reporters:
                path = out / METRICS if out else None
                reporters.append(stack.enter_context(Reporter(path, last, first_step=report.step - 1)))
            reporters[0].step(report)
            seconds.append(report.seconds)
            if seats:
                seats.on_step(report.step)

        result = run(loaded.plan, loaded.job, loaded.cluster, steps=last, out_dir=out or "", resume=resume or "",
                     checkpoint_every=checkpoint_every, trace_steps=trace_steps if trace else 0,
                     base=loaded.job_path.parent, on_step=on_step, balance_every=balance_every, on_nan=on_nan,
                     init_from=init_from or "", async_save=async_save,
                     enter=seats.enter if seats else None, patience_s=patience,
                     rendezvous=seats.rendezvous(loaded.plan.ranks) if seats else "")
    if result is None:
        return
    if out and result.trace and prediction.trace:
        chrome.write_trace(prediction.trace, out / PREDICTED)
        chrome.write_trace(result.trace, out / MEASURED)
        progress(f"wrote {out / PREDICTED} and {out / MEASURED}; compare them: mixfleet compare {out}")
    step_s = median(seconds[1:] or seconds) if seconds else None  # the first step warms up
    if as_json:
        emit_json(_summary(result, prediction, step_s))
    else:
        emit(results.training(_summary(result, prediction, step_s)))


def _summary(result: TrainResult, prediction: Prediction, step_s: float | None) -> dict[str, Any]:
    losses = result.losses or (None,)
    return {"step": result.step, "stopped": result.stopped, "first_loss": losses[0], "last_loss": losses[-1],
            "step_s": step_s, "predicted_step_s": prediction.step_s, "checkpoint": result.checkpoint,
            "foreign": result.foreign}


def _show_commands(loaded: Loaded, arguments: list[str], as_json: bool) -> None:
    from mixfleet.run import torchrun_commands

    found = torchrun_commands(loaded.plan, loaded.cluster, arguments)
    if as_json:
        emit_json([{"node": node, "command": command} for node, command in found])
        return
    for node, command in found:
        click.echo(f"{node}: {command}")


def _refuse_other_machines(loaded: Loaded) -> None:
    nodes = {loaded.cluster.nodes[loaded.cluster.node_of[rank]].name for rank in loaded.plan.ranks}
    if len(nodes) > 1:
        raise InputError(f"the plan uses {len(nodes)} machines; --commands prints what to start on each, --local "
                         "starts all ranks here")
