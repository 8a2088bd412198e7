"""`mixfleet export`: a checkpoint's weights for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import EXISTING, emit_json, json_option


@click.command()
@click.argument("checkpoint", type=EXISTING)
@click.argument("out_dir", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["fp64", "fp32", "bf16", "fp16"]), help="Instead of the stored type.")
@click.option("--shard", default="5 GB", show_default=True, help="Most that one file holds.")
@json_option
def export(checkpoint: Path, out_dir: Path, dtype: str | None, shard: str, as_json: bool) -> None:
    """Write the weights of CHECKPOINT as a directory that Hugging Face's transformers loads.

    CHECKPOINT may be a folder of checkpoints: then the newest. OUT_DIR must be new or empty.
    """
    from mixfleet.run.huggingface import export as write
    from mixfleet.units import parse_bytes

    files = write(checkpoint, out_dir, dtype=dtype or "", shard_bytes=parse_bytes(shard, "--shard"))
    if as_json:
        emit_json({"files": [str(path) for path in files]})
    else:
        for path in files:
            click.echo(path)
