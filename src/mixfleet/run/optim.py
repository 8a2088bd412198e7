"""Optimizers on flat state. A rank updates exactly the elements whose optimizer state it owns.

The rules are PyTorch's (`torch.optim.AdamW`, `torch.optim.SGD`); a run of elements has a factor on the learning
rate and a weight decay of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mixfleet.job import Optimizer

_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements updated at a time: on a CPU both passes over them stay in cache, on a GPU temporaries stay bounded."""
_VECTOR_BYTES = 64
"""What PyTorch's CPU kernels compute at once, or a multiple of it. They work what is left at the end of a tensor by
scalar instructions, which may round otherwise."""


def learning_rate(rule: Optimizer, step: int, steps: int) -> float:
    """The rate of step `step` (from 0): linear warm-up to `lr`, then constant, linear or cosine decay to `min_lr`."""
    if step < rule.warmup_steps:
        return rule.lr * (step + 1) / rule.warmup_steps
    end = rule.decay_steps or steps
    if rule.decay == "constant":
        return rule.lr
    progress = min(1.0, (step - rule.warmup_steps) / max(1, end - rule.warmup_steps))
    left = 1 - progress if rule.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return rule.min_lr + (rule.lr - rule.min_lr) * left


class Run(NamedTuple):
    """Elements [lo, hi) of the owned piece that are updated alike."""

    lo: int
    hi: int
    lr_scale: float
    decay: float


class _Piece(NamedTuple):
    """What AdamW changes together."""

    value: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor


def runs(parts: Sequence[Run]) -> list[Run]:
    """Neighbours of the same kind joined."""
    joined: list[Run] = []
    for part in sorted(parts):
        if joined and joined[-1].hi == part.lo and joined[-1][2:] == part[2:]:
            joined[-1] = joined[-1]._replace(hi=part.hi)
        elif part.lo < part.hi:
            joined.append(part)
    return joined


class FlatOptimizer:
    """State and update of one rank's piece of a unit: `parts` are its trainable elements.

    `value` is what the rule works on (fp32 master weights, or the weights themselves) and has the size of the piece;
    it may come as several views, which together are the piece. `state` holds one tensor per moment; with `predicts`,
    plain SGD keeps its last gradient as a momentum of 0.
    """

    def __init__(self, rule: Optimizer, parts: Sequence[Run], value: Sequence[Tensor], *,
                 predicts: bool = False) -> None:
        self.rule = rule
        count = sum(v.numel() for v in value)
        moments = max(rule.moments, int(predicts))
        names = ("exp_avg", "exp_avg_sq")[:moments] if rule.name == "adamw" else ("momentum",)[:moments]
        self.state = {n: torch.zeros(count, dtype=value[0].dtype, device=value[0].device)
                      for n in names} if count else {}
        self.steps = 0
        """Updates made so far; the bias correction of AdamW needs it."""
        self._parts = runs(parts)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.state.values())

    def step(self, value: Sequence[Tensor], gradient: Sequence[Tensor], scale: float, lr: float,
             copy: Sequence[Tensor] = (), share: float = 1.0) -> None:
        """Update `value` by `scale * gradient`; `copy`, if given, receives the result in its own type.

        `share` is the part of the weight decay that is due: less than 1 where several updates make one step.

        All are lists of 1-D views that cut the same piece alike. The gradient is overwritten.
        """
        self.steps += 1
        if value:
            self._count = torch.full((), float(self.steps), device=value[0].device)
        at = 0
        alike: dict[tuple[float, float], list[_Piece]] = {}
        for v, g in zip(value, gradient, strict=True):
            for part in self._parts:
                lo, hi = max(part.lo, at), min(part.hi, at + v.numel())
                rate, decay = lr * part.lr_scale, part.decay * share
                if lo < hi and self._in_one_pass(v, g, scale):
                    alike.setdefault((rate, decay), []).append(self._piece(v[lo - at:hi - at], g[lo - at:hi - at], lo))
                    continue
                # What makes one pass and no temporaries needs no chunks.
                whole = not (self.state or part.decay) and g.dtype == v.dtype
                chunk = max(1, v.numel()) if whole else _CHUNK.get(v.device.type, v.numel())
                for a in range(lo, hi, chunk):
                    b = min(hi, a + chunk)
                    self._update(v[a - at:b - at], g[a - at:b - at], a, b, scale, rate, decay)
            at += v.numel()
        for (rate, decay), pieces in alike.items():
            self._adamw(pieces, rate, decay, scale)
        for to, v in zip(copy, value):
            to.copy_(v)

    def _in_one_pass(self, v: Tensor, g: Tensor, scale: float) -> bool:
        """Whether PyTorch's kernel updates a view as it is: it scales gradients too, but by a number in fp32."""
        return self.rule.name == "adamw" and g.dtype == v.dtype and (scale == 1 or v.dtype == torch.float32)

    def _piece(self, p: Tensor, g: Tensor, lo: int) -> _Piece:
        return _Piece(p, g, *(self.state[name][lo:lo + len(p)] for name in ("exp_avg", "exp_avg_sq")))

    def _adamw(self, pieces: Sequence[_Piece], lr: float, decay: float, scale: float = 1.0) -> None:
        """Bit by bit the same however elements are cut into pieces: replicas cut them differently."""
        width = _VECTOR_BYTES // pieces[0].value.element_size()
        left = [piece for piece in pieces if len(piece.value) % width] if pieces[0].value.device.type == "cpu" else []
        if not left:
            self._fused(pieces, lr, decay, scale)
            return
        ends = [_Piece(*(t[len(t) // width * width:] for t in piece)) for piece in left]
        sizes = [len(end.value) for end in ends]
        padding = -sum(sizes) % width
        joined = _Piece(*(torch.cat([*parts, parts[0].new_zeros(padding)]) for parts in zip(*ends)))
        self._fused([*(_Piece(*(t[:len(t) // width * width] for t in piece)) for piece in pieces), joined],
                    lr, decay, scale)
        for end, made in zip(ends, zip(*(t.split_with_sizes([*sizes, padding]) for t in joined))):
            for t, new in zip(end, made):
                t.copy_(new)

    def _fused(self, pieces: Sequence[_Piece], lr: float, decay: float, scale: float) -> None:
        rule, (p, g, first, second) = self.rule, map(list, zip(*pieces))
        divisor = None if scale == 1 else torch.full((), 1 / scale, dtype=torch.float32, device=p[0].device)
        torch._fused_adamw_(p, g, first, second, [], [self._count] * len(p), lr=lr, beta1=rule.betas[0],
                            beta2=rule.betas[1], weight_decay=decay, eps=rule.eps, amsgrad=False, maximize=False,
                            grad_scale=divisor)

    def anticipate(self, value: Sequence[Tensor], out: Sequence[Tensor], rates: Sequence[float]) -> None:
        """Write to `out`, cut as `value`, what updates at these rates would make of `value`, each like the last one:
        W - sum(lr) d, where d is SGD's momentum, or AdamW's m^ / (sqrt(v^) + eps) besides its decay."""
        at = 0
        for v, o in zip(value, out, strict=True):
            p = v.clone()
            for part in self._parts if self.steps else ():
                lo, hi = max(part.lo, at), min(part.hi, at + v.numel())
                if lo < hi:
                    decay = part.decay if self.rule.name == "adamw" else 0.0
                    piece, direction = p[lo - at:hi - at], self._direction(lo, hi)
                    for lr in (rate * part.lr_scale for rate in rates):
                        piece.mul_(1 - lr * decay).add_(direction, alpha=-lr)
            o.copy_(p)
            at += v.numel()

    def _direction(self, lo: int, hi: int) -> Tensor:
        if self.rule.name == "sgd":
            return self.state["momentum"][lo:hi]
        first, second = (1 - beta**self.steps for beta in self.rule.betas)
        root = (self.state["exp_avg_sq"][lo:hi] / second).sqrt_().add_(self.rule.eps)
        return (self.state["exp_avg"][lo:hi] / first).div_(root)

    def _update(self, p: Tensor, raw: Tensor, lo: int, hi: int, scale: float, lr: float, decay: float) -> None:
        rule = self.rule
        g = raw.to(p.dtype)
        if rule.name == "sgd" and not decay and "momentum" not in self.state:
            p.add_(g, alpha=-lr * scale)
            return
        if scale != 1:
            g.mul_(scale)
        if rule.name == "adamw":
            self._adamw([self._piece(p, g, lo)], lr, decay)
            return
        if decay:
            g.add_(p, alpha=decay)
        if "momentum" in self.state:
            g = self.state["momentum"][lo:hi].mul_(rule.momentum).add_(g)
        p.add_(g, alpha=-lr)
