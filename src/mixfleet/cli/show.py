"""`mixfleet show`: anything that mixfleet can read or knows by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mixfleet.cli._common import emit, emit_json, json_option
from mixfleet.errors import InputError, unknown

if TYPE_CHECKING:
    from mixfleet.model import Model
    from mixfleet.report.views import View

LISTS = ("devices", "instances", "models")


@click.command()
@click.argument("thing")
@json_option
def show(thing: str, as_json: bool) -> None:
    """Print a cluster, device, job, plan or trace file, a model config.json, or something known by name.

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


def _file(path: Path) -> tuple[View, Any]:
    from mixfleet.cluster import Cluster
    from mixfleet.cluster_file import load_device
    from mixfleet.files import FORMAT_KEY, read_yaml
    from mixfleet.job import Job
    from mixfleet.plan import Plan
    from mixfleet.report import views

    if path.suffix == ".json":
        return _json_file(path)
    doc = read_yaml(path)
    kind = str(doc.data.get(FORMAT_KEY, "")).split("/")[0]
    if kind == "cluster":
        cluster = Cluster.load(path)
        return views.cluster(cluster), cluster
    if kind == "device":
        device = load_device(path)
        return views.device(device), device
    if kind == "job":
        job = Job.load(path)
        return views.job(job), job
    if kind == "plan":
        plan = Plan.load(path)
        beside = path.parent / plan.cluster
        return views.plan(plan, Cluster.load(beside) if plan.cluster and beside.is_file() else None), plan
    raise InputError("not a file of mixfleet: cluster, device, job and plan files start with 'mixfleet: <kind>/1'",
                     where=str(path))


def _json_file(path: Path) -> tuple[View, Any]:
    import json

    from mixfleet.model.families import build
    from mixfleet.report import chrome, results, views

    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}", where=str(path)) from None
    if isinstance(data, dict) and "traceEvents" in data:
        trace = chrome.read_trace(path)
        return results.trace(trace), trace
    model = build(path)
    return views.model(model), _summary(model)


def _list(what: str) -> tuple[View, Any]:
    from mixfleet.report import views

    if what == "devices":
        from mixfleet.catalog import devices
        from mixfleet.cluster import device_named

        known = []
        for name in devices.names():
            try:
                known.append(device_named(name))
            except InputError:  # a figure is missing in every source; `show NAME` says which
                continue
        return views.devices(known), known
    if what == "instances":
        from mixfleet.catalog.instances import INSTANCES

        return views.instances(INSTANCES), INSTANCES
    from mixfleet.catalog.models import MODELS
    from mixfleet.model.families import build

    models = {name: build(name) for name in MODELS}
    return views.models(models), {name: _summary(model) for name, model in models.items()}


def _named(name: str) -> tuple[View, Any]:
    from mixfleet.catalog import devices
    from mixfleet.catalog.instances import INSTANCES
    from mixfleet.catalog.models import MODELS
    from mixfleet.cluster import device_named
    from mixfleet.model.families import build
    from mixfleet.report import views

    if name in MODELS:
        model = build(name)
        return views.model(model), _summary(model)
    if name in INSTANCES:
        return views.instances({name: INSTANCES[name]}), INSTANCES[name]
    if name in devices.names():
        device = device_named(name)
        return views.device(device), device
    raise unknown("file, device, instance or model", name, (*LISTS, *devices.names(), *INSTANCES, *MODELS))


def _summary(model: Model) -> dict[str, Any]:
    return {"name": model.name, "family": model.family, "parameters": model.count, "layers": model.layers,
            "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads, "vocab": model.vocab,
            "max_seq_len": model.max_seq_len, "config": model.config,
            "blocks": [{"name": b.name, "kind": b.kind, "parameters": b.count} for b in model.blocks]}
