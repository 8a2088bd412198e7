"""`mixfleet calibrate`: coefficients from measurements, and devices from their own."""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit, emit_json, json_option, progress
from mixfleet.errors import InputError


@click.group()
def calibrate() -> None:
    """Fit what predictions rest on."""


@calibrate.command()
@click.option("--data", type=EXISTING, required=True, help="Folder of measured kernel files (*.parquet).")
@click.option("-o", "--output", type=WRITABLE, help="Write here instead of over the package's coefficients.")
@click.option("--group", "groups", multiple=True, help="Only this group, such as gemm.16bit; may be "
              "repeated. The others stay as they are in the file.")
@click.option("--rows", type=click.IntRange(100), help="Rows drawn per group.")
@json_option
def fit(data: Path, output: Path | None, groups: tuple[str, ...], rows: int | None, as_json: bool) -> None:
    """Fit the kernel coefficients. The same files give the same coefficients."""
    from mixfleet import catalog
    from mixfleet.calibrate import fit as engine
    from mixfleet.cost import learned

    path = output or Path(catalog.__path__[0]) / learned.FILE
    others = learned.load(path) if groups and path.exists() else None
    layer = engine.fit(data, rows=rows or engine.ROWS, groups=groups, report=progress)
    learned.save(learned.together(others, layer) if others else layer, path)
    progress(f"wrote {path}")
    if as_json:
        emit_json({"file": str(path), "groups": sorted(layer.groups)})


@calibrate.command()
@click.option("-o", "--output", type=WRITABLE, required=True, help="The device file; one that exists is completed.")
@click.option("--gpu", type=click.IntRange(0), help="Number of the GPU, instead of the first.")
@click.option("--cores", help="Cores of a CPU process to measure instead of a GPU, as in '0' or '0,1'.")
@click.option("--name", default="", help="Name of the device, instead of the catalog's.")
@click.option("--quick", is_flag=True, help="A quarter of the kernels.")
@click.option("--budget", type=click.FloatRange(min=1), help="Seconds after which no other kernel is begun.")
@click.option("--again", is_flag=True, help="Measure everything anew, instead of what the file lacks.")
@json_option
def device(output: Path, gpu: int | None, cores: str | None, name: str, quick: bool, budget: float | None, again: bool,
           as_json: bool) -> None:
    """Measure kernels on this machine and write the device's file.

    The file can be named as a device of a cluster file. Without --gpu and --cores, the first GPU is measured, or else
    one core.
    """
    from mixfleet.calibrate import device as engine
    from mixfleet.report.views import Table, View, plural

    if gpu is not None and cores is not None:
        raise InputError("give either --gpu or --cores")
    budget_s = budget or engine.BUDGET_S
    progress(f"measuring for up to {budget_s:.0f} s ...")
    found = engine.measure(output, gpu=gpu, cores=_cores(cores) if cores is not None else (), name=name,
                           per_group=engine.QUICK if quick else engine.PER_GROUP, budget_s=budget_s, again=again)
    progress(f"wrote {output}")
    if as_json:
        emit_json({"file": str(output), **found._asdict()})
        return
    facts = [("measured", f"{plural(found.measured, 'kernel')}" + (
        f", {found.kept} kept from before" if found.kept else ""))]
    if found.left:
        facts.append(("not measured", f"{plural(found.left, 'kernel')}: the time was over; the same command goes on"))
    emit(View(f"{found.device.name}: {found.device.source}", facts, [Table(
        ("kernels", ">number", ">data sheet", ">measured"),
        [(e.group, str(e.kernels), f"{e.before:.0%}", f"{e.after:.0%}") for e in found.errors],
        "median error of predictions: from the data sheet alone, and each kernel from the others' measurements")]))


def _cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(core) for core in text.split(","))
    except ValueError:
        raise InputError(f"--cores is {text!r}; write numbers, as in '0' or '0,1'") from None
