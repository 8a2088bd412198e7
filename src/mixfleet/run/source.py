"""What is trained, and on what: the modules of a stage, their first values, and the samples of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.plan import Stage
from mixfleet.run.data import Batches, open_batches
from mixfleet.run.modules import build_blocks, initial_values
from mixfleet.run.state import DTYPES
from mixfleet.run.tensor import TensorGroup

Loss = Callable[[Tensor, Tensor], Tensor]


class Source(Protocol):
    """Everything that a rank needs besides the plan. It is sent to every rank, so it must pickle."""

    loss: Loss | None
    """Applied to the last block's output and the targets; None if the last block takes the targets itself."""

    def modules(self, stage: Stage, group: TensorGroup, device: torch.device, *, fused: bool) -> list[nn.Module]:
        """The blocks of a stage; `fused` attention keeps no scores. The runtime puts its own parameters in place."""

    def initial(self, tensor: str, kind: str, lo: int, hi: int) -> Tensor:
        """First values of a weight, elements [lo, hi) of its flat order with the cut dimension first."""

    def shape(self, block: int, samples: int) -> tuple[int, ...]:
        """Shape of what enters a block, whole in the tensor-parallel group."""

    def open(self, first_step: int, first_position: int) -> None:
        """Make the data ready, on the rank that reads it."""

    def position(self, step: int) -> int:
        """Samples used before a step."""

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets at places [lo, hi) of the step's global batch."""

    def lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of every sample of a step, by its place; none if all are equally long."""

    def rows(self, step: int, rows: Sequence[Sequence[int]], width: int, segments: Sequence[int] = ()
             ) -> tuple[Tensor, Tensor]:
        """Inputs and targets [rows, width]: in each row the samples at these places of the step, each padded to its
        segment if these are given, then padding."""


class DecoderSource:
    """A job's own model and data."""

    loss: Loss | None = None

    def __init__(self, job: Job, base: Path = Path()) -> None:
        self.job, self.base = job, base

    def modules(self, stage: Stage, group: TensorGroup, device: torch.device, *, fused: bool) -> list[nn.Module]:
        return build_blocks(self.job.model, stage.held, group, seed=self.job.seed, device="meta",
                            dtype=DTYPES[self.job.precision], attention="fused" if fused else "eager",
                            recompute=stage.modes, initialize=False)

    def initial(self, tensor: str, kind: str, lo: int, hi: int) -> Tensor:
        return initial_values(self.job.model, self.job.seed, tensor, lo, hi)

    def shape(self, block: int, samples: int) -> tuple[int, ...]:
        return samples, self.job.seq_len, self.job.model.hidden

    def open(self, first_step: int, first_position: int) -> None:
        self._batches = open_batches(self.job, self.base, first_step=first_step, first_position=first_position)

    def position(self, step: int) -> int:
        return self._batches.position(step)

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        return self._batches.batch(step, lo, hi)

    def lengths(self, step: int) -> tuple[int, ...]:
        return self._batches.lengths(step) if self.job.data.lengths else ()

    def rows(self, step: int, rows: Sequence[Sequence[int]], width: int, segments: Sequence[int] = ()
             ) -> tuple[Tensor, Tensor]:
        return self._batches.rows(step, rows, width, segments)


class _Numbered:
    """A corpus that is known by its length only."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
             ) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return indices


class ModulesSource:
    """Any chain of modules, trained on tensors of samples.

    `blocks[i]` maps the output of `blocks[i - 1]` to its own; `loss(output, targets)` is the sum over the targets of
    the micro-batch: over samples, or over integer targets that are not negative. `shapes[i]` is the shape per sample
    of what enters block i. Buffers, such as BatchNorm's statistics, stay local to each replica.
    """

    def __init__(self, job: Job, blocks: list[nn.Module], loss: Loss, inputs: Tensor, targets: Tensor,
                 shapes: list[tuple[int, ...]]) -> None:
        self.job, self.blocks, self.shapes = job, blocks, shapes
        self.inputs, self.targets = inputs.detach(), targets.detach()
        self.loss: Loss | None = loss

    def modules(self, stage: Stage, group: TensorGroup, device: torch.device, *, fused: bool) -> list[nn.Module]:
        if stage.tensor > 1:
            raise InputError(f"tensor is {stage.tensor}; modules have no tensor parallelism, so it must be 1")
        if group.context:
            raise InputError(f"context is {group.context.size}; modules cannot share samples, so it must be 1")
        names = [block.name for block in self.job.model.blocks]
        self._first = {f"{name}/{leaf}": param.detach().clone() for name, module in zip(names, self.blocks)
                       for leaf, param in module.named_parameters()}
        return [self.blocks[b].to(device, DTYPES[self.job.precision]) for b in stage.held]

    def initial(self, tensor: str, kind: str, lo: int, hi: int) -> Tensor:
        return self._first[tensor].reshape(-1)[lo:hi]

    def shape(self, block: int, samples: int) -> tuple[int, ...]:
        return samples, *self.shapes[block]

    def open(self, first_step: int, first_position: int) -> None:
        self._batches = Batches(_Numbered(len(self.inputs)), self.job.global_batch, self.job.seed,
                                first_step=first_step, first_position=first_position)

    def position(self, step: int) -> int:
        return self._batches.position(step)

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(self._batches.samples(step, lo, hi))
        return self.inputs[chosen], self.targets[chosen]

    def lengths(self, step: int) -> tuple[int, ...]:
        return ()

    def rows(self, step: int, rows: Sequence[Sequence[int]], width: int, segments: Sequence[int] = ()
             ) -> tuple[Tensor, Tensor]:
        raise AssertionError("the samples of modules are all of one shape")
