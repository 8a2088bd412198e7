"""`mixfleet show`: anything that mixfleet can read or knows by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mixfleet.cli._common import emit, emit_json, json_option
from mixfleet.errors import InputError, unknown

if TYPE_CHECKING:
    from rich.console import RenderableType

LISTS = ("devices", "instances", "models")


@click.command()
@click.argument("thing")
@json_option
def show(thing: str, as_json: bool) -> None:
    """Print a cluster, job, plan or trace file, a model config.json, or something known by name.

    THING is a file; the name of a device, an instance or a model (A100-SXM4-80GB, p4d.24xlarge, llama-3-8b); or one of
    the lists: devices, instances, models.
    """
    path = Path(thing)
    if path.is_file():
        view, data = _file(path)
    elif thing in LISTS:
        view, data = _list(thing)
    else:
        view, data = _named(thing)
    emit_json(data) if as_json else emit(view)


def _file(path: Path) -> tuple[RenderableType, Any]:
    from mixfleet.cluster import Cluster
    from mixfleet.files import FORMAT_KEY, read_yaml
    from mixfleet.job import Job
    from mixfleet.plan import Plan
    from mixfleet.report import chrome, terminal

    if path.suffix == ".json":
        return _json_file(path)
    doc = read_yaml(path)
    kind = str(doc.data.get(FORMAT_KEY, "")).split("/")[0]
    if kind == "cluster":
        cluster = Cluster.load(path)
        return terminal.cluster(cluster), cluster
    if kind == "job":
        job = Job.load(path)
        return terminal.job(job), job
    if kind == "plan":
        plan = Plan.load(path)
        beside = path.parent / plan.cluster
        return terminal.plan(plan, Cluster.load(beside) if plan.cluster and beside.is_file() else None), plan
    raise InputError("not a file of mixfleet: cluster, job and plan files start with 'mixfleet: <kind>/1'", where=str(path))


def _json_file(path: Path) -> tuple[RenderableType, Any]:
    import json

    from mixfleet.model.families import build
    from mixfleet.report import chrome, terminal

    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", where=str(path)) from None
    if isinstance(data, dict) and "traceEvents" in data:
        trace = chrome.read(path)
        return terminal.trace(trace), trace
    model = build(path)
    return terminal.model(model), _model_summary(model)


def _list(what: str) -> tuple[RenderableType, Any]:
    from mixfleet.report import terminal

    if what == "devices":
        from mixfleet.catalog import devices
        from mixfleet.cluster import device_named

        known = []
        for name in devices.names():
            try:
                known.append(device_named(name))
            except InputError:  # a figure is missing in every source; `show NAME` says which
                continue
        return terminal.devices(known), known
    if what == "instances":
        from mixfleet.catalog.instances import INSTANCES

        rows = [[name, f"{i.size} x {i.device}", f"{i.nic_gbps:g} Gb/s",
                 "" if i.price_per_hour is None else f"{i.price_per_hour:.2f}", i.source] for name, i in INSTANCES.items()]
        columns = ["instance", "devices", ">NIC", ">price per hour", "source"]
        return terminal.table(columns, rows), INSTANCES
    from mixfleet.catalog.models import MODELS
    from mixfleet.model.families import build

    summaries = {name: _model_summary(build(name)) for name in MODELS}
    rows = [[name, s["family"], f"{s['parameters']:,}", str(s["layers"]), str(s["hidden"]), f"{s['max_seq_len']:,}"]
            for name, s in summaries.items()]
    return terminal.table(["model", "family", ">parameters", ">layers", ">hidden", ">longest sequence"], rows), summaries


def _named(name: str) -> tuple[RenderableType, Any]:
    from mixfleet.catalog import devices
    from mixfleet.catalog.instances import INSTANCES
    from mixfleet.catalog.models import MODELS
    from mixfleet.cluster import device_named
    from mixfleet.model.families import build
    from mixfleet.report import terminal

    if name in MODELS:
        model = build(name)
        return terminal.model(model), _model_summary(model)
    if name in INSTANCES:
        instance = INSTANCES[name]
        return terminal.facts([(field.replace("_", " "), "" if value is None else str(value))
                               for field, value in instance._asdict().items()]), instance
    if name in devices.names():
        device = device_named(name)
        return terminal.device(device), device
    raise unknown("file, device, instance or model", name, (*LISTS, *devices.names(), *INSTANCES, *MODELS))


def _model_summary(model: Any) -> dict[str, Any]:
    return {"name": model.name, "family": model.family, "parameters": model.count, "layers": model.layers,
            "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads, "vocab": model.vocab,
            "max_seq_len": model.max_seq_len, "blocks": [{"name": b.name, "kind": b.kind, "parameters": b.count}
                                                         for b in model.blocks], "config": model.config}
