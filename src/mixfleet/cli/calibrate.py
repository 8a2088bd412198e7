"""`mixfleet calibrate`: coefficients from measurements."""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, WRITABLE, emit_json, json_option, progress


@click.group()
def calibrate() -> None:
    """Fit what predictions rest on."""


@calibrate.command()
@click.option("--data", type=EXISTING, required=True, help="Folder of measured kernel files (*.parquet).")
@click.option("-o", "--output", type=WRITABLE, help="Write here instead of over the package's coefficients.")
@click.option("--group", "groups", multiple=True, help="Only this group, such as gemm.16bit; may be repeated.")
@click.option("--rows", type=click.IntRange(100), help="Rows drawn per group.")
@json_option
def fit(data: Path, output: Path | None, groups: tuple[str, ...], rows: int | None, as_json: bool) -> None:
    """Fit the kernel coefficients. The same files give the same coefficients."""
    from mixfleet import catalog
    from mixfleet.calibrate import fit as engine
    from mixfleet.cost import learned

    layer = engine.fit(data, rows=rows or engine.ROWS, groups=groups, report=progress)
    path = output or Path(catalog.__path__[0]) / learned.FILE
    learned.save(layer, path)
    progress(f"wrote {path}")
    if as_json:
        emit_json({"file": str(path), "groups": sorted(layer.groups)})
