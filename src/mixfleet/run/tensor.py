"""Tensor parallelism with sequence parallelism: what one rank of a tensor-parallel group exchanges, with gradients.

Between blocks the activations are sharded along the sequence. A layer gathers them before its column-cut projections
and scatters the partial sums of its row-cut ones (Korthikanti et al., 2022, section 4.2.2), so each collective moves
(t - 1) / t of the tensor per rank. gloo's reduce-scatter is an all-reduce inside and moves twice that, and its
all-gather is slower than the wire, so on gloo both are built from point-to-point messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OnComm = Callable[[str, list[int], float], None]
"""Called after each collective with its name, the payload bytes this rank sent to each other one, in order, and the
seconds it took."""


class TensorGroup:
    """The ranks that share every layer of one copy of a stage. Without a process group it is one rank alone.

    `rank` and `size` can be given without a process group to build (not run) the slices of one rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, rank: int = 0, size: int = 1,
                 on_comm: OnComm | None = None) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group) if process_group else rank
        self.size = dist.get_world_size(process_group) if process_group else size
        self.on_comm = on_comm
        self.context: ContextGroup | None = None
        """Those who hold the other parts of this group's sequences, where these are shared."""
        self.experts: ExpertGroup | None = None
        """Those who share routed experts with this group, where several replicas do."""
        self._direct = process_group is not None and "gloo" in dist.get_backend(process_group)

    def slice_of(self, length: int) -> slice:
        """This rank's part of a dimension: [length * rank // size, length * (rank + 1) // size)."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def experts_of(self, count: int) -> list[slice]:
        """Which of `count` routed experts each rank of those that exchange rows has."""
        return [slice(count * i // self.size, count * (i + 1) // self.size) for i in range(self.size)]

    def process(self, other: int) -> int:
        """The process of the default group that is rank `other` of this one."""
        assert self.process_group is not None
        return dist.get_global_rank(self.process_group, other)

    def all_gather(self, x: Tensor) -> Tensor:
        """Shards [b, s/t, h] of all ranks -> [b, s, h]."""
        start, x = time.perf_counter(), x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        if self._direct:
            parts[self.rank] = x
            self._exchange([x] * self.size, list(parts))
        else:
            dist.all_gather_into_tensor(parts, x, group=self.process_group)
        whole = parts.movedim(0, 1).reshape(x.shape[0], -1, *x.shape[2:])
        self._report("all_gather", [_nbytes(x)] * (self.size - 1), start)
        return whole

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Partial sums [b, s, h] of all ranks -> this rank's shard [b, s/t, h] of the sum.

        On gloo the sum is taken in rank order, in fp32 if `x` is shorter, so it repeats to the bit.
        """
        start = time.perf_counter()
        parts = x.reshape(x.shape[0], self.size, -1, *x.shape[2:]).movedim(1, 0).contiguous()
        if self._direct:
            received = torch.empty_like(parts)
            received[self.rank] = parts[self.rank]
            self._exchange(list(parts), list(received))
            shard = received.sum(0, dtype=wide(x.dtype)).to(x.dtype)
        else:
            shard = torch.empty_like(parts[0])
            dist.reduce_scatter_tensor(shard, parts, group=self.process_group)
        self._report("reduce_scatter", [_nbytes(shard)] * (self.size - 1), start)
        return shard

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or maximum) over all ranks, in place."""
        start = time.perf_counter()
        dist.all_reduce(x, op, group=self.process_group)
        total, others = 2 * (self.size - 1) * _nbytes(x) // self.size, self.size - 1
        self._report("all_reduce", [total * (i + 1) // others - total * i // others for i in range(others)], start)
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows of `x` [n, ...], `sent[i]` for rank i one after another -> those from all ranks, `received[i]` from rank
        i."""
        start = time.perf_counter()
        outgoing = torch.split(x.contiguous(), list(sent))
        whole = x.new_empty(sum(received), *x.shape[1:])
        incoming = torch.split(whole, list(received))
        incoming[self.rank].copy_(outgoing[self.rank])
        self._exchange(outgoing, incoming)
        self._report("all_to_all", [_nbytes(p) for i, p in enumerate(outgoing) if i != self.rank], start)
        return whole

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send one contiguous tensor to every other rank and receive one from each; their sizes may differ, and both
        sides know which are empty."""
        group = self.process_group
        assert group is not None
        messages = []
        for other in range(self.size):
            if other != self.rank:
                peer = self.process(other)
                messages += [dist.P2POp(way, _raw(tensors[other]), peer, group)
                             for way, tensors in ((dist.isend, outgoing), (dist.irecv, incoming))
                             if tensors[other].numel()]
        for message in dist.batch_isend_irecv(messages) if messages else ():
            message.wait()

    def _report(self, op: str, nbytes: list[int], start: float) -> None:
        if self.on_comm:
            self.on_comm(op, nbytes, time.perf_counter() - start)


ALONE = TensorGroup()


class ExpertGroup(TensorGroup):
    """The ranks over which the routed experts of a layer lie, where several replicas share them: all ranks of their
    tensor groups, in the order of the replicas.

    `experts` says which experts each has, `processes` which process of the default group each is.
    """

    def __init__(self, experts: Sequence[tuple[int, int]], process_group: dist.ProcessGroup | None = None, *,
                 rank: int = 0, processes: Sequence[int] = (), on_comm: OnComm | None = None) -> None:
        super().__init__(on_comm=on_comm, rank=rank, size=len(experts))
        self.process_group, self._experts, self._processes = process_group, experts, processes
        self._direct = process_group is not None and "gloo" in dist.get_backend(process_group)

    def experts_of(self, count: int) -> list[slice]:
        return [slice(lo, hi) for lo, hi in self._experts]

    def process(self, other: int) -> int:
        return self._processes[other]


class ContextGroup(TensorGroup):
    """The ranks that hold parts of one sequence, at equal index of their tensor groups.

    `spans` are the positions of every part (`Pipeline.spans`, or `Parts.spans` of a micro-batch of its own lengths).
    Queries stay; keys and values go to everyone, so each rank sends its own (parts - 1) times forward, and the
    gradients of all others' backward: as much as if they went round a ring (Liu et al., 2023), in one turn.
    """

    def __init__(self, spans: Sequence[Sequence[tuple[int, int]]], process_group: dist.ProcessGroup | None = None, *,
                 rank: int = 0, on_comm: OnComm | None = None) -> None:
        super().__init__(process_group, rank=rank, size=len(spans), on_comm=on_comm)
        self._cut(spans)

    def _cut(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.spans = [list(part) for part in spans]
        self.mine = self.spans[self.rank]
        self.lengths = [sum(hi - lo for lo, hi in part) for part in self.spans]

    def at(self, spans: Sequence[Sequence[tuple[int, int]]]) -> ContextGroup:
        """The same ranks with other positions."""
        view = copy(self)
        view._cut(spans)
        return view

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of a whole sequence."""
        return torch.cat([whole.narrow(dim, lo, hi - lo) for lo, hi in self.mine], dim)

    def gather_positions(self, x: Tensor) -> Tensor:
        """Parts [b, heads, own positions, d] -> [b, heads, all positions, d]."""
        start, x = time.perf_counter(), x.contiguous()
        parts = [x if i == self.rank else x.new_empty(*x.shape[:2], n, x.shape[3]) for i, n in enumerate(self.lengths)]
        self._exchange([x] * self.size, parts)
        pieces = [(lo, piece) for spans, part in zip(self.spans, parts)
                  for (lo, _), piece in zip(spans, torch.split(part, [b - a for a, b in spans], 2))]
        whole = torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0])], 2)
        self._report("all_gather", [_nbytes(x)] * (self.size - 1), start)
        return whole

    def scatter_positions(self, whole: Tensor) -> Tensor:
        """Partial sums [b, heads, all positions, d] -> this rank's positions of the sum, taken in the order of ranks,
        in fp32 if they are shorter."""
        start = time.perf_counter()
        parts = [torch.cat([whole[:, :, lo:hi] for lo, hi in spans], 2) for spans in self.spans]
        received = [parts[i] if i == self.rank else torch.empty_like(parts[self.rank]) for i in range(self.size)]
        self._exchange(parts, received)
        total = torch.stack(received).sum(0, dtype=wide(whole.dtype)).to(whole.dtype)
        self._report("reduce_scatter", [_nbytes(p) for i, p in enumerate(parts) if i != self.rank], start)
        return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums and softmaxes are taken in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _raw(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: gloo sends them whatever the type."""
    return x.view(-1).view(torch.uint8)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grad), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad), None


class _GatherPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        return group.gather_positions(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.scatter_positions(grad), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: TensorGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return group.all_to_all(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all(grad, ctx.received, ctx.sent), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits in their own type and the log of the softmax's sum; the softmax is computed again backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: TensorGroup) -> Tensor:
        high = logits.amax(-1).to(wide(logits.dtype))
        if group.size > 1:
            group.all_reduce(high, dist.ReduceOp.MAX)
        valid = targets >= 0
        local = targets - first
        mine = valid & (local >= 0) & (local < logits.shape[-1])
        local = torch.where(mine, local, 0)
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(high.dtype).masked_fill(~mine, 0)
        total = (logits - high.unsqueeze(-1)).exp_().sum(-1)
        if group.size > 1:
            total, picked = group.all_reduce(torch.stack((total, picked)))
        log_sum = high + total.log()
        ctx.save_for_backward(logits, log_sum, local, mine, valid)
        return ((log_sum - picked) * valid).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, local, mine, valid = ctx.saved_tensors
        softmax = (logits - log_sum.unsqueeze(-1)).exp_()
        softmax.scatter_add_(-1, local.unsqueeze(-1), -mine.to(softmax.dtype).unsqueeze(-1))
        softmax *= (valid * grad).unsqueeze(-1)
        return softmax.to(logits.dtype), None, None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def gather_sequence(x: Tensor, group: TensorGroup) -> Tensor:
    """[b, s/t, h] -> [b, s, h]; backward sums the ranks' gradients and keeps this rank's shard."""
    return _apply(_Gather, x, group) if group.size > 1 else x


def scatter_sequence(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial sums [b, s, h] -> shard [b, s/t, h] of their sum; backward gathers the gradient."""
    return _apply(_Scatter, x, group) if group.size > 1 else x


def gather_keys(k: Tensor, v: Tensor, group: ContextGroup) -> tuple[Tensor, Tensor]:
    """[b, heads, own positions, d] -> [b, heads, all positions, d] for keys and values, in one message; backward sums
    the ranks' gradients and keeps this rank's positions."""
    k, v = _apply(_GatherPositions, torch.cat((k, v), -1), group).split((k.shape[-1], v.shape[-1]), -1)
    return k, v


def swap_rows(x: Tensor, sent: list[int], received: list[int], group: TensorGroup) -> Tensor:
    """All-to-all of rows, see `TensorGroup.all_to_all`; backward sends their gradients the other way."""
    swapped: Tensor = _apply(_Swap, x, sent, received, group) if group.size > 1 else x
    return swapped


def cross_entropy(logits: Tensor, targets: Tensor, vocab: int, group: TensorGroup) -> Tensor:
    """Sum over tokens of the cross-entropy, a scalar in `wide` type, equal on all ranks.

    `logits` [..., this rank's slice of `vocab`], `targets` [...] int64; negative targets are ignored.
    """
    loss: Tensor = _apply(_CrossEntropy, logits, targets, group.slice_of(vocab).start, group)
    return loss
