"""Who does what: the plan language. A plan is one YAML file that a person can read, edit and run."""

from __future__ import annotations

from typing import Literal

from mixfleet.errors import InputError
from mixfleet.spec import Spec

Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["gpipe", "1f1b"]


class Stage(Spec, frozen=True, kw_only=True):
    """A range of blocks and the devices that hold it.

    `devices` lists ranks of the cluster, `tensor` per replica of the pipeline: with 2 replicas and tensor degree 4
    the first four belong to replica 0, the next four to replica 1.
    """

    blocks: tuple[int, int]
    """First block and one past the last."""
    devices: tuple[int, ...]
    tensor: int = 1
    recompute: Recompute = "none"

    @property
    def size(self) -> int:
        return self.blocks[1] - self.blocks[0]

    def ranks(self, replica: int) -> tuple[int, ...]:
        """The tensor-parallel group of one replica, in order."""
        return self.devices[replica * self.tensor:(replica + 1) * self.tensor]


class Pipeline(Spec, frozen=True, kw_only=True):
    """A complete copy of the model, cut into stages; `replicas` equal copies of it.

    Every replica takes `samples` sequences of the global batch, in micro-batches of `micro_batch` (the last one may
    be smaller).
    """

    stages: tuple[Stage, ...]
    samples: int
    micro_batch: int
    replicas: int = 1

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sequences in each micro-batch."""
        whole, rest = divmod(self.samples, self.micro_batch)
        return (self.micro_batch,) * whole + ((rest,) if rest else ())


class Sharding(Spec, frozen=True, kw_only=True):
    """Into how many pieces each kind of state is cut among the data-parallel replicas.

    1/1/1 is DDP, 1/1/n ZeRO-1, 1/n/n ZeRO-2, n/n/n ZeRO-3, p/p/p with p < n MiCS. A degree that does not divide
    the number of replicas gives groups of unequal size, none smaller than the degree.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that computes."""


class Plan(Spec, frozen=True, kw_only=True, dict=True):
    """The whole plan for one job on one cluster."""

    pipelines: tuple[Pipeline, ...]
    schedule: ScheduleName = "1f1b"
    sharding: Sharding = Sharding()
    name: str = ""
    job: str = ""
    """Path of the job file, relative to the plan file."""
    cluster: str = ""
    """Path of the cluster file, relative to the plan file."""
    cluster_fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise InputError("pipelines is empty; a plan has at least one")

    @property
    def replicas(self) -> tuple[tuple[int, int], ...]:
        """All data-parallel replicas as (pipeline, replica in it), in order: their index is the replica number."""
        return tuple((p, r) for p, pipe in enumerate(self.pipelines) for r in range(pipe.replicas))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Devices in use, ascending."""
        return tuple(sorted({d for p in self.pipelines for s in p.stages for d in s.devices}))

    @property
    def global_batch(self) -> int:
        return sum(p.samples * p.replicas for p in self.pipelines)
