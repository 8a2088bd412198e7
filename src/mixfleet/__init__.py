"""Predict, plan and run deep-learning training on the accelerators that people have.

    from mixfleet import Cluster, Job, find, predict, train

    job, cluster = Job.load("job.yaml"), Cluster.load("cluster.yaml")
    best = find(job, cluster).best
    train(best.plan, job, cluster)

Names are loaded when they are first used, so that importing mixfleet is quick and planning never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixfleet.calibrate.discover import discover as discover
    from mixfleet.calibrate.kernels import profile_job as profile_job
    from mixfleet.cluster import Cluster as Cluster
    from mixfleet.cluster import Device as Device
    from mixfleet.cluster import Link as Link
    from mixfleet.cluster import Node as Node
    from mixfleet.cluster import device_named as device_named
    from mixfleet.errors import InputError as InputError
    from mixfleet.errors import RunError as RunError
    from mixfleet.job import Data as Data
    from mixfleet.job import Job as Job
    from mixfleet.job import Optimizer as Optimizer
    from mixfleet.model.families import build as build
    from mixfleet.model.spec import Model as Model
    from mixfleet.plan import Pipeline as Pipeline
    from mixfleet.plan import Plan as Plan
    from mixfleet.plan import Sharding as Sharding
    from mixfleet.plan import Stage as Stage
    from mixfleet.plan_rules import why_not as why_not
    from mixfleet.program.action import Program as Program
    from mixfleet.program.lower import lower as lower
    from mixfleet.report.chrome import read_trace as read_trace
    from mixfleet.report.chrome import write_trace as write_trace
    from mixfleet.run import train as train
    from mixfleet.search import SearchResult as SearchResult
    from mixfleet.search import find as find
    from mixfleet.sim.prediction import Prediction as Prediction
    from mixfleet.sim.prediction import predict as predict
    from mixfleet.trace import Span as Span
    from mixfleet.trace import Trace as Trace
    from mixfleet.trace import compare as compare

_HOME = {
    "calibrate.discover": ("discover",),
    "calibrate.kernels": ("profile_job",),
    "cluster": ("Cluster", "Device", "Link", "Node", "device_named"),
    "errors": ("InputError", "RunError"),
    "job": ("Data", "Job", "Optimizer"),
    "model.families": ("build",),
    "model.spec": ("Model",),
    "plan": ("Pipeline", "Plan", "Sharding", "Stage"),
    "plan_rules": ("why_not",),
    "program.action": ("Program",),
    "program.lower": ("lower",),
    "report.chrome": ("read_trace", "write_trace"),
    "run": ("train",),
    "search": ("SearchResult", "find"),
    "sim.prediction": ("Prediction", "predict"),
    "trace": ("Span", "Trace", "compare"),
}
_MODULES = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mixfleet' has no attribute {name!r}")
    return getattr(import_module(f"mixfleet.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
