"""Backward in two halves: the gradient of the input now, those of linear layers' weights later (zero bubble)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Later = list[Callable[[], None]]
"""Weight gradients that are still to be made."""


class PutOff(TorchFunctionMode):
    """While active, forwards of linear layers leave their weight gradient to `later`; all else stays in backward, such
    as the weights of experts, which are parts of one parameter."""

    def __init__(self, later: Later) -> None:
        super().__init__()
        self.later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled() and args[1].requires_grad and args[1].is_leaf:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return _Linear.apply(*args[:2], bias, self.later)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved: where hooks watch what is saved, another tensor would come back, with a gradient of its own.
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        # Detached: a view of x would keep its graph, which holds `later`, in a circle that nobody frees.
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        ctx.later.append(lambda: _accumulate(weight, rows, inputs))
        return grad @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def _accumulate(weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the product to the gradient, as autograd would; hooks that follow accumulation follow here too."""
    if weight.grad is not None and weight.grad.dtype == rows.dtype:
        weight.grad.addmm_(rows.t(), inputs)
        return
    weight.grad = rows.t() @ inputs
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
