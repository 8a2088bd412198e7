"""`mixfleet testbed`: one Linux machine as the mixed cluster of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit_json, json_option, progress
from mixfleet.errors import InputError, RunError

if TYPE_CHECKING:
    from mixfleet.cluster import Cluster
    from mixfleet.testbed import State, Support, Testbed

emulate_option = click.option("--emulate", is_flag=True, help="Let slow CPU ranks stand in for GPUs, all rates scaled.")
cluster_argument = click.argument("cluster", type=EXISTING)


@click.group()
def testbed() -> None:
    """Make this machine a mixed cluster: slowed devices, shaped links. Needs root."""


@testbed.command()
@cluster_argument
@emulate_option
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing. Needs no root.")
@click.option("-o", "--output", type=WRITABLE, help="Write the cluster file that predictions should take.")
@json_option
def up(cluster: Path, emulate: bool, dry_run: bool, output: Path | None, as_json: bool) -> None:
    """Make the testbed of CLUSTER and let it stand; prints its id."""
    bed, wanted = _make(cluster, emulate, keep=True, dry_run=dry_run)
    if bed is None:
        return
    if output:
        bed.realised(wanted).save(output, header=bed.state.note)
        progress(f"wrote {output}")
    emit_json(_shown(bed.state)) if as_json else click.echo(bed.layout.id)


@testbed.command(context_settings={"ignore_unknown_options": True})
@cluster_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@emulate_option
@click.option("--faults", type=EXISTING, help="Schedule of faults while it runs (docs/testbed.md).")
def run(cluster: Path, command: tuple[str, ...], emulate: bool, faults: Path | None) -> None:
    """Run `mixfleet train` on the testbed of CLUSTER: `testbed run CLUSTER -- train plan.yaml --out run`.

    The testbed is made first and removed in any case. Another program is started once per rank, with torchrun's
    variables: `testbed run CLUSTER -- python script.py`.
    """
    import tempfile

    from mixfleet.testbed import faults as trouble

    plan = trouble.Schedule.load(faults) if faults else None
    bed, wanted = _make(cluster, emulate)
    assert bed is not None
    with bed, tempfile.TemporaryDirectory(prefix="mixfleet-") as folder, trouble.injected(bed, plan) as on_step:
        if command[0] != "train":
            raise SystemExit(_everywhere(bed, command))
        try:
            _train(bed, wanted, [*command[1:]], Path(folder, cluster.name), on_step)
        except RunError as error:
            raise trouble.explained(bed, error) from error


def _train(bed: Testbed, wanted: Cluster, arguments: list[str], file: Path, on_step: Any) -> None:
    from mixfleet.cli.train import Seats, train
    from mixfleet.testbed.elastic import PATIENCE_S

    if "--cluster" not in arguments:
        bed.realised(wanted).save(file)
        arguments += ["--cluster", str(file)]
    with bed.unthrottled() as throttle:
        def heard(step: int) -> None:
            throttle()  # loading programs, and the first step, are not what is slow on a slow device
            on_step(step)

        seats = Seats(bed.enter, bed.rendezvous, PATIENCE_S, heard)
        train.main(arguments, prog_name="mixfleet train", standalone_mode=False, obj=seats)


def _everywhere(bed: Testbed, command: tuple[str, ...]) -> int:
    """The largest exit code of the program at all the seats; the first that fails ends the others."""
    import time

    ranks = [bed.spawn(seat.rank, command) for seat in bed.layout.seats]
    while any(r.poll() is None for r in ranks) and not any(r.returncode for r in ranks):
        time.sleep(0.05)
    for process in ranks:
        process.terminate()
        process.wait()
    return max((abs(int(r.returncode)) for r in ranks if r.returncode != -15), default=0)


@testbed.command(context_settings={"ignore_unknown_options": True})
@click.argument("id")
@click.argument("node")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def enter(id: str, node: str, command: tuple[str, ...]) -> None:
    """Become a program at a seat of NODE of the testbed ID: `testbed enter ID slow -- python script.py`.

    Of several seats of a node, LOCAL_RANK says which, as torchrun sets it.
    """
    import os

    from mixfleet.testbed import Testbed

    bed = Testbed.named(id)
    bed.wire(node)
    seats, local = [s for s in bed.layout.seats if s.node == node], int(os.environ.get("LOCAL_RANK", "0"))
    if local >= len(seats):
        raise InputError(f"LOCAL_RANK is {local}; node {node} has {len(seats)} seats")
    bed.enter(seats[local].rank)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(f"cannot start {command[0]}: {error.strerror}") from None


@testbed.command()
@cluster_argument
@click.argument("job", type=EXISTING)
@emulate_option
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of checkpoints.")
@click.option("--steps", type=click.IntRange(1), help="Step at which to end, instead of the job's.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=5, show_default=True, help="Steps between them.")
@click.option("--faults", type=EXISTING, help="Schedule of faults while it trains.")
@click.option("--patience", type=click.FloatRange(0, min_open=True),
              help="Seconds, beyond a step, without a sign of life or in one action, after which a rank is lost [8].")
@click.option("--launcher", type=click.Choice(["own", "torchrun"]), default="own", show_default=True,
              help="Who finds out what is lost and starts anew: one process that watches all ranks, or an elastic "
                   "agent of torchrun on every node.")
@json_option
def train(cluster: Path, job: Path, emulate: bool, out: Path, steps: int | None, checkpoint_every: int,
          faults: Path | None, patience: float | None, launcher: str, as_json: bool) -> None:
    """Plan and train JOB on the testbed of CLUSTER; after a loss, go on with what is left, until it is back."""
    from mixfleet.job import Job
    from mixfleet.testbed import faults as trouble
    from mixfleet.testbed.elastic import PATIENCE_S, train_by_torchrun, train_elastically

    loaded, schedule = Job.load(job), trouble.Schedule.load(faults) if faults else None
    bed, wanted = _make(cluster, emulate)
    assert bed is not None
    with bed:
        real, last = bed.realised(wanted), steps or loaded.steps
        if launcher == "torchrun":
            out.mkdir(parents=True, exist_ok=True)
            real.save(out / "cluster.yaml", header=bed.state.note)
            legs = train_by_torchrun(bed, out / "cluster.yaml", job, out, steps=last, schedule=schedule, say=progress,
                                     checkpoint_every=checkpoint_every, patience_s=patience or PATIENCE_S)
        else:
            legs = train_elastically(bed, real, loaded, out, steps=last, base=job.parent, schedule=schedule,
                                     checkpoint_every=checkpoint_every, say=progress,
                                     patience_s=patience or PATIENCE_S)
    if as_json:
        emit_json(legs)
        return
    for leg in legs:
        click.echo(f"steps {leg.first_step}-{leg.last_step} on {', '.join(leg.nodes)}"
                   + (f": {leg.failure} (noticed after {leg.noticed_s:.1f} s)" if leg.failure else ""))


@testbed.command()
@cluster_argument
@click.argument("job", type=EXISTING)
@emulate_option
@click.option("-o", "--output", type=WRITABLE, required=True, help="Cluster file to write.")
def profile(cluster: Path, job: Path, emulate: bool, output: Path) -> None:
    """Measure what the blocks of JOB take on the testbed of CLUSTER; predictions then need no tuning."""
    from mixfleet.job import Job
    from mixfleet.testbed.profile import profile as measure

    loaded = Job.load(job)
    bed, wanted = _make(cluster, emulate)
    assert bed is not None
    with bed:
        progress(f"measuring the blocks of {loaded.name} ...")
        measure(bed, wanted, loaded, note=progress).save(output, header=bed.state.note)
    progress(f"wrote {output}")


@testbed.command()
@json_option
def status(as_json: bool) -> None:
    """The testbeds of this machine, and what it supports."""
    from mixfleet.testbed import probe, testbeds

    support, found = probe(), testbeds()
    if as_json:
        emit_json({"testbeds": [_shown(s) for s in found], "missing": support.missing, "instead": support.instead})
        return
    for state in found:
        shown = _shown(state)
        click.echo(f"{shown['id']}  {shown['cluster']}: {len(shown['nodes'])} nodes, {shown['ranks']} ranks, "
                   f"{shown['state']}" + (f"\n  {state.note}" if state.note else ""))
        for node, counts in shown["nodes"].items():
            click.echo(f"  {node}: {counts['tx_bytes']} bytes out, {counts['rx_bytes']} bytes in" if counts else
                       f"  {node}: gone")
    if not found:
        click.echo("no testbeds")
    _say(support)


@testbed.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of them.")
def down(ids: tuple[str, ...], everything: bool) -> None:
    """Remove testbeds, with their processes; and always what crashed ones have left."""
    from mixfleet.testbed import Testbed, leftovers, probe, testbeds

    if not probe().root:
        raise InputError("root is needed to remove testbeds" + (
            f"; there are {', '.join(s.layout.id for s in testbeds())}" if testbeds() else "; there are none"))
    for state in leftovers(remove=True):
        progress(f"removed {state.layout.id}, left behind by process {state.owner}")
    for identity in dict.fromkeys([*ids, *(s.layout.id for s in testbeds() if everything)]):
        Testbed.named(identity).down()
        progress(f"removed {identity}")


@testbed.command()
@click.argument("id")
@click.argument("what", required=False)
@click.option("--rank", type=click.IntRange(0), help="For kill, freeze, slow, fill.")
@click.option("--node", help="For cut, degrade, restart.")
@click.option("--share", type=click.FloatRange(0.01, 1), help="For slow: the part of a core from now on.")
@click.option("--rate", help="For degrade: the rate from now on, as in '20 Mb/s'.")
@click.option("--for", "seconds", type=click.FloatRange(0), default=0.0, help="Seconds after which it is undone.")
@click.option("--schedule", type=EXISTING, help="A file of faults, by seconds from now.")
def fault(id: str, what: str | None, rank: int | None, node: str | None, share: float | None, rate: str | None,
          seconds: float, schedule: Path | None) -> None:
    """Break something in the testbed ID: kill, freeze, slow or fill a rank, cut or degrade a node's link, restart."""
    from mixfleet.testbed import Testbed, faults

    bed = Testbed.named(id)
    if schedule:
        faults.play(bed, faults.Schedule.load(schedule))
        return
    if what is None:
        raise InputError(f"say what to do: {', '.join(faults.ACTIONS)}; or give a --schedule")
    one = faults.Fault(do=what, rank=rank, node=node or "", share=share or 0.0, rate=rate or "", seconds=seconds)
    faults.play(bed, faults.Schedule(faults=(one,)))


def _make(path: Path, emulate: bool, *, keep: bool = False, dry_run: bool = False) -> tuple[Testbed | None, Cluster]:
    """The testbed of a cluster file. Without root, prints what would be done, and is an error."""
    from mixfleet.cluster import Cluster
    from mixfleet.testbed import Testbed, emulate_gpus, laid_out, probe

    support, cluster, note = probe(), Cluster.load(path), ""
    if emulate:
        cluster, note = emulate_gpus(cluster, support)
    if dry_run or support.missing:
        click.echo(laid_out(cluster, "ID", support).dry())
        if not dry_run:
            raise InputError("a testbed cannot be made here: " + "; ".join(support.missing)
                             + ". Above is what would have been done")
        return None, cluster
    _say(support)
    if note:
        progress(f"note: {note}")
    return Testbed.up(cluster, keep=keep, support=support, note=note), cluster


def _say(support: Support) -> None:
    for line in (*support.missing, *support.instead):
        progress(f"note: {line}")


def _shown(state: State) -> dict[str, Any]:
    from mixfleet.testbed import Testbed, probe

    try:
        counters = Testbed(state, probe()).counters()
    except RunError:
        counters = {node: {} for node in state.layout.nodes}
    return {"id": state.layout.id, "cluster": state.cluster, "ranks": len(state.layout.seats), "note": state.note,
            "state": "left behind" if state.abandoned else "standing" if not state.owner else
                     f"of process {state.owner}", "nodes": counters, "namespaces": state.layout.nodes}
