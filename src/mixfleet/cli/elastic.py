"""`mixfleet elastic`: train on whatever nodes torchrun's agents find."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mixfleet.cli._common import EXISTING, emit_json, json_option, progress

if TYPE_CHECKING:
    from mixfleet.cluster import Cluster
    from mixfleet.plan import Plan
    from mixfleet.run.metrics import StepMetrics

PATIENCE_S = 60.0


@click.command()
@click.argument("job", type=EXISTING)
@click.argument("cluster", type=EXISTING)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Folder of checkpoints and metrics, which all nodes see.")
@click.option("--machine", help="This machine's name in the cluster file; by default its host name.")
@click.option("--steps", type=click.IntRange(1), help="Step at which to end, instead of the job's.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=50, show_default=True, help="Steps between them.")
@click.option("--patience", type=click.FloatRange(0, min_open=True), default=PATIENCE_S, show_default=True,
              help="Seconds, beyond a step, in one action after which a rank is lost.")
@click.option("--commands", is_flag=True, help="Print the command to start on each machine, and stop.")
@json_option
def elastic(job: Path, cluster: Path, out: Path, machine: str | None, steps: int | None, checkpoint_every: int,
            patience: float, commands: bool, as_json: bool) -> None:
    """Train JOB on those nodes of CLUSTER that are there, as one of the processes of torchrun.

    When a node is lost or comes back, torchrun starts all processes again; they plan for the nodes that are there then,
    and go on from the newest checkpoint. `--commands` prints how to start torchrun on each node.
    """
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.run.elastic import elastic_commands, newest, take_part
    from mixfleet.run.metrics import METRICS, Reporter
    from mixfleet.search import best_plan
    from mixfleet.sim import predict

    work, fleet = Job.load(job), Cluster.load(cluster)
    if commands:
        found = elastic_commands(fleet, [str(job), str(cluster), "--out", str(out), *(
            ["--steps", str(steps)] if steps else []), "--checkpoint-every", str(checkpoint_every)])
        if as_json:
            return emit_json([{"node": name, "command": command} for name, command in found])
        for name, command in found:
            click.echo(f"{name}: {command}")
        return None
    last = steps or work.steps
    with ExitStack() as stack:
        reporters: list[Reporter] = []

        def on_step(report: StepMetrics) -> None:
            if not reporters:
                reporters.append(stack.enter_context(Reporter(out / METRICS, last, first_step=report.step - 1)))
            reporters[0].step(report)

        def patience_s(plan: Plan, part: Cluster) -> float:
            return patience + predict(plan, work, part).step_s

        result = take_part(work, fleet, out, node=machine or socket.gethostname(), steps=last, base=job.parent,
                           checkpoint_every=checkpoint_every, plan_for=best_plan, patience_s=patience_s,
                           on_step=on_step, say=progress)
    if result and as_json:
        emit_json({"step": result.step, "stopped": result.stopped, "checkpoint": result.checkpoint})
    elif result:
        click.echo(f"step {newest(out)} of {last}; the last checkpoint is {result.checkpoint}")
    return None
