"""Linear layers whose weight gradients go straight to where they are added up, at once or later (zero bubble)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Later = list[Callable[[], None]]
"""Weight gradients that are still to be made."""

_PLACE, _CALLED = "mixfleet_place", "mixfleet_called"
_putting_off: list[Later] = []


def mark_bound(weight: Tensor, place: Tensor) -> None:
    """From here on `linear` may add to the gradient of this parameter, which lies in `place`, without asking autograd
    to; where `grad` is None, the first product is written there over whatever it holds."""
    setattr(weight, _PLACE, place)


def is_linear(weight: Tensor) -> bool:
    """Whether `linear` has used this parameter, whose gradient has a place."""
    return hasattr(weight, _CALLED) and hasattr(weight, _PLACE)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`. Inside `PutOff` backward leaves the weight's gradient for later; where the gradient has a place of
    its own, the product is added to it there, without a tensor in between (Megatron-LM's fused accumulation). All else
    stays in backward, such as the weights of experts, which are parts of one parameter."""
    later = _putting_off[-1] if _putting_off else None
    if torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and (
            later is not None or (hasattr(weight, _PLACE) and not weight._backward_hooks)):
        setattr(weight, _CALLED, True)
        out: Tensor = _Linear.apply(x, weight, bias, later)  # type: ignore[no-untyped-call]
        return out
    return F.linear(x, weight, bias)


class PutOff:
    """While active, backwards of the `linear` layers called meanwhile leave their weight gradients to `later`."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def __enter__(self) -> None:
        _putting_off.append(self._later)

    def __exit__(self, *raised: object) -> None:
        _putting_off.pop()


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def adopt(module: nn.Module) -> None:
    """Let every plain `nn.Linear` inside go by `linear`, also where backward computes parts of forward again."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear


class Linears(TorchFunctionMode):
    """While active, `F.linear` is `linear`: for modules that call it themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later | None) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved: where hooks watch what is saved, or it is computed again, another tensor would come back, with a
        # gradient of its own.
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        # Detached: a view of x would keep its graph, which holds `later`, in a circle that nobody frees.
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.detach().reshape(-1, x.shape[-1])
        if ctx.later is None:
            _accumulate(weight, rows, inputs)
        else:
            ctx.later.append(lambda: _accumulate(weight, rows, inputs))
        return (grad @ weight if ctx.needs_input_grad[0] else None, None,
                rows.sum(0) if ctx.needs_input_grad[2] else None, None)


def _accumulate(weight: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the product to the gradient, as autograd would; hooks that follow accumulation follow here too."""
    place: Tensor | None = getattr(weight, _PLACE, None)
    if weight.grad is not None and weight.grad.dtype == rows.dtype:
        weight.grad.addmm_(rows.t(), inputs)
        return
    if weight.grad is None and place is not None:
        weight.grad = torch.mm(rows.t(), inputs, out=place)
        return
    weight.grad = rows.t() @ inputs
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
