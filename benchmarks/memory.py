"""Predicted against counted peaks of tensor memory, in one process on the CPU: state, activations and temporaries.

Every storage that an operator makes is counted from then until it is freed. The first step warms up; the peak is that
of the second, when the state of the optimizer is there.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import Figure
from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.plan_rules import why_not
from mixfleet.run.source import DecoderSource
from mixfleet.run.worker import Rank
from mixfleet.sim import predict

LIMIT = 0.05
CPU = Device(name="cpu", kind="cpu", flops={"fp32": 1e10, "fp64": 5e9}, vector_flops=1e10, memory_bytes=2**33,
              memory_Bps=1e10)
_LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)
ALONE = Cluster(name="alone", nodes=(Node(name="here", devices=(CPU,), link=_LINK, nic=_LINK),))
_FIGURES = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 300, "max_seq_len": 128, "ffn": 256}

SETTINGS: dict[str, dict[str, Any]] = {
    "gpt, fp32": {"style": "gpt"},
    "gpt, fp32, micro-batches of 1": {"style": "gpt", "micro_batch": 1},
    "gpt, fp32, 16 at a time": {"style": "gpt", "samples": 16, "micro_batch": 16},
    "gpt, bf16": {"style": "gpt", "precision": "bf16"},
    "gpt, full recompute": {"style": "gpt", "recompute": "full"},
    "gpt, recompute of some blocks": {"style": "gpt", "recompute": ("none", "full", "full", "none", "full", "none")},
    "gpt, scores kept": {"style": "gpt", "attention": "eager"},
    "gpt, scores recomputed": {"style": "gpt", "attention": "eager", "recompute": "selective"},
    "gpt, SGD": {"style": "gpt", "optimizer": Optimizer(name="sgd")},
    "llama, fp32": {"style": "llama"},
    "llama, fp64": {"style": "llama", "precision": "fp64"},
    "llama, bf16": {"style": "llama", "precision": "bf16"},
    "llama, full recompute": {"style": "llama", "recompute": "full"},
    "llama, scores kept, micro-batches of 2": {"style": "llama", "attention": "eager", "micro_batch": 2},
    "llama, lower half frozen": {"style": "llama", "frozen": ("embed/*", "layers.[01]/*")},
    "gpt, everything on the host": {"style": "gpt", "micro_batch": 1, "offload": ("weights", "gradients", "optimizer")},
    "gpt, state on the host": {"style": "gpt", "offload": ("weights", "optimizer")},
    "llama, bf16, stepped by the host": {"style": "llama", "precision": "bf16", "micro_batch": 1,
                                         "offload": ("gradients", "optimizer")},
    "llama, roundpipe": {"style": "llama", "micro_batch": 1, "offload": ("weights", "optimizer"), "cuts": (2, 4)},
    "gpt, roundpipe, stepped by the host": {"style": "gpt", "micro_batch": 2, "cuts": (2, 4),
                                            "offload": ("weights", "gradients", "optimizer")},
    "llama, layered accumulation": {"style": "llama", "micro_batch": 1, "accumulation": "layered"},
}


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages made under it that are still alive, and their peak. Those that are emptied and filled again
    count as what they are at the time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def _gone(self, key: int) -> None:
        self._living.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._living:
                    self._living[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._gone, storage._cdata)
        alive = (one() for one in [*self._living.values()])
        self.peak = max(self.peak, sum(one.nbytes() for one in alive if one is not None))
        return out


def peaks(style: str, *, samples: int = 4, micro_batch: int = 4, recompute: Any = "none", accumulation: Any = "plain",
          precision: Any = "fp32", offload: Any = (), cuts: tuple[int, ...] = (), **settings: Any) -> tuple[int, int]:
    """(predicted, counted) bytes of tensors at the peak of a step. Needs a process group of one. With `cuts`, of one
    worker of RoundPipe, whose legs begin there."""
    model = build({"style": style, **_FIGURES})
    job = Job(name=style, model=model, seq_len=128, global_batch=samples, precision=precision, **settings)
    ends = [*pairwise((0, *cuts, len(model.blocks)))]
    stage = Stage(blocks=(0, len(model.blocks)), devices=(0,), recompute=recompute, offload=offload)
    if cuts:
        stage = stage.replace(blocks=ends[-1], more=tuple(reversed(ends[:-1])), ahead=tuple(ends[:-1]))
    plan = Plan(pipelines=(Pipeline(stages=(stage,), samples=samples, micro_batch=micro_batch),),
                accumulation=accumulation, schedule="roundpipe" if cuts else "1f1b")
    if why := why_not(plan, job, ALONE):
        raise InputError(why)
    living = Living()
    with living:
        rank = Rank(plan, job, ALONE, DecoderSource(job), 0)
        rank.start()
        for step in range(2):
            living.peak = 0
            rank.interpreter.step(rank.batches(step), 1e-3)
    rank.close()
    (use,) = predict(plan, job, ALONE).devices
    return use.resumed_bytes - use.breakdown["framework"], living.peak


def figures() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        for name, settings in SETTINGS.items():
            predicted, counted = peaks(**settings)
            ratio = predicted / counted
            yield Figure(f"peak of tensors, {name}: predicted over counted",
                         f"{ratio:.3f} ({predicted / 1e6:.2f} beside {counted / 1e6:.2f} MB)", f"within {LIMIT:.0%}",
                         abs(ratio - 1) <= LIMIT)
        dist.destroy_process_group()
