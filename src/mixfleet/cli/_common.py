"""What the commands share: the `--json` switch, reading the files that a plan names, and where output goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mixfleet.errors import InputError

if TYPE_CHECKING:
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.plan import Plan
    from mixfleet.report.views import View

EXISTING = click.Path(exists=True, path_type=Path)
"""click itself says that a file is missing, and exits with 2."""
WRITABLE = click.Path(dir_okay=False, path_type=Path)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
html_option = click.option("--html", type=WRITABLE, help="Write a report as one self-contained HTML file.")
job_option = click.option("--job", type=EXISTING, help="Job file, instead of the one that the plan names.")
cluster_option = click.option("--cluster", type=EXISTING, help="Cluster file, instead of the one that the plan names.")


def split_names(text: str | None) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",")] if text else []


def emit(*views: View) -> None:
    from mixfleet.report import terminal

    terminal.show(*views)


def emit_json(data: Any) -> None:
    """Specs, named tuples, dicts; named tuples become mappings."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(plain(data)), indent=2).decode())


def plain(data: Any) -> Any:
    """Builtins only; named tuples keep their names."""
    import msgspec

    if hasattr(data, "_asdict"):
        return {name: plain(value) for name, value in data._asdict().items()}
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    if isinstance(data, msgspec.Struct):
        return {name: plain(getattr(data, name)) for name in data.__struct_fields__}
    return msgspec.to_builtins(data)


def progress(message: str) -> None:
    click.echo(message, err=True)


class Loaded(NamedTuple):
    """A plan, what it is for, and where the job file lies."""

    plan: Plan
    job: Job
    cluster: Cluster
    job_path: Path


def load_plan(path: Path, job: Path | None = None, cluster: Path | None = None) -> Loaded:
    """A plan with its job and cluster: the given files, or those that the plan names (relative to its own place)."""
    from mixfleet.cluster import Cluster
    from mixfleet.job import Job
    from mixfleet.plan import Plan

    plan = Plan.load(path)
    files = []
    for kind, given, named in (("job", job, plan.job), ("cluster", cluster, plan.cluster)):
        if given is None and not named:
            raise InputError(f"the plan names no {kind} file; give one with --{kind}", where=str(path))
        files.append(given or path.parent / named)
    return Loaded(plan, Job.load(files[0]), Cluster.load(files[1]), files[0])
