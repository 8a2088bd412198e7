"""A projection on a 3-D grid of ranks (AxoNN, see `cost.grid`): outputs, gradients and bytes of `cost.grid.moves`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixfleet.cost.grid import AXES, Grid
from mixfleet.errors import InputError
from mixfleet.run.tensor import OnComm, TensorGroup


class GridGroups:
    """The groups of one rank along x, y, z and data. Every process of the default group makes them.

    `sent` counts payload bytes by axis.
    """

    def __init__(self, grid: Grid) -> None:
        if dist.get_world_size() != grid.size:
            raise InputError(f"a grid of {'x'.join(map(str, grid))} has {grid.size} ranks; there are "
                             f"{dist.get_world_size()}")
        self.grid = grid
        self.sent = dict.fromkeys(AXES, 0)
        self.along: dict[str, TensorGroup] = {}
        for axis in AXES:
            for ranks in grid.groups(axis):
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    self.along[axis] = TensorGroup(group, on_comm=self._counts(axis))

    def _counts(self, axis: str) -> OnComm:
        def count(op: str, nbytes: list[int], seconds: float) -> None:
            self.sent[axis] += sum(nbytes)

        return count

    def part(self, axis: str, whole: Tensor, dim: int) -> Tensor:
        """This rank's slice of a dimension that an axis cuts."""
        cut = self.along[axis].slice_of(whole.shape[dim])
        return whole.narrow(dim, cut.start, cut.stop - cut.start)


class GridLinear(nn.Module):
    """y = x W^T with W (outputs, inputs), of which this rank keeps [outputs / y / z, inputs / x].

    Forward maps [rows / z, inputs / x] to [rows / z, outputs / y]; with `transposed`, x and y are exchanged. All sizes
    must divide. After backward, `reduce_gradients` sums over the data replicas.
    """

    def __init__(self, weight: Tensor, groups: GridGroups, *, transposed: bool = False) -> None:
        super().__init__()
        self.groups = groups
        self.inputs, self.outputs = ("y", "x") if transposed else ("x", "y")
        for dim, axes in ((1, (self.inputs,)), (0, (self.outputs, "z"))):
            parts = 1
            for axis in axes:
                parts *= groups.along[axis].size
            if weight.shape[dim] % parts:
                raise InputError(f"a weight of {weight.shape[dim]} in dimension {dim} does not divide into {parts} "
                                 "parts of the grid")
        block = groups.part(self.outputs, groups.part(self.inputs, weight, 1), 0)
        self.weight = nn.Parameter(groups.part("z", block, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        along = self.groups.along
        out: Tensor = _Product.apply(x, self.weight, along[self.inputs],  # type: ignore[no-untyped-call]
                                     along[self.outputs], along["z"])
        return out

    def reduce_gradients(self) -> None:
        if self.weight.grad is not None:
            self.weight.grad = _summed(self.weight.grad, self.groups.along["data"])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inputs: TensorGroup, outputs: TensorGroup, depth: TensorGroup
                ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = inputs, outputs, depth
        return _summed(x @ _gathered(weight, depth).t(), inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (x, weight), (_, outputs, depth) = ctx.saved_tensors, ctx.groups
        back = _summed(grad @ _gathered(weight, depth), outputs)
        return back, _scattered(grad.t() @ x, depth), None, None, None


def _gathered(x: Tensor, group: TensorGroup) -> Tensor:
    return group.all_gather(x.unsqueeze(0))[0] if group.size > 1 else x


def _scattered(x: Tensor, group: TensorGroup) -> Tensor:
    return group.reduce_scatter(x.unsqueeze(0))[0] if group.size > 1 else x


def _summed(x: Tensor, group: TensorGroup) -> Tensor:
    """An all-reduce as a scatter and a gather, each of which moves (g - 1) / g of the elements."""
    if group.size == 1:
        return x
    flat = x.reshape(-1, 1)
    return _gathered(_scattered(flat, group), group).view_as(x)
