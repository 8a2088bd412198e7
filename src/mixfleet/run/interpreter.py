"""One rank carries out its role of a program with PyTorch.

Actions run in the order of the list. State moves on streams of its own and is waited for at first use, by the buffer
that it changes. Where gathers, reductions or a recorder go block by block, each block is an autograd segment of its
own; all other blocks of an action are one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixfleet.job import Job
from mixfleet.plan import Offload, Pipeline
from mixfleet.program.action import (
    ANTICIPATE,
    AWAIT_PARKED,
    DROP,
    FREE_GRAD,
    FREE_STATE,
    FREE_WEIGHTS,
    GATHER,
    JOINT,
    KEEP,
    LOAD_GRAD,
    LOAD_SAVED,
    LOAD_STATE,
    LOAD_UPDATED,
    LOAD_WEIGHTS,
    NORM,
    PARK_SAVED,
    PASS_SAVED,
    PUBLISH,
    RECV_ACT,
    RECV_GRAD,
    RECV_KEPT,
    REDUCE,
    RELEASE,
    SAVE_GRAD,
    SAVE_STATE,
    SAVE_WEIGHTS,
    SEND_ACT,
    SEND_GRAD,
    SEND_KEPT,
    STEP,
    SYNC,
    USE,
    Action,
    B,
    F,
    I,
    Role,
    W,
    boundary,
)
from mixfleet.program.layout import Layout
from mixfleet.run.collective import Chain, Copies, Fabric, Running, Sums, Task, overlaps
from mixfleet.run.linear import Later, Linears, PutOff, adopt
from mixfleet.run.modules import TABLES
from mixfleet.run.parked import Parked, Storages, constants
from mixfleet.run.state import DTYPES, Paged, Unit, bind
from mixfleet.run.tensor import ContextGroup


class MicroBatch(NamedTuple):
    """One micro-batch."""

    inputs: Tensor | None
    """Where the first block is."""
    targets: Tensor | None
    """Where the last one is."""
    rows: int = 0
    width: int = 0
    """Positions of every row; 0: the micro-batch is what the plan says, of rows of `seq_len`."""
    segments: tuple[int, ...] = ()
    """Of a row of several samples: the lengths of its pieces, each of which attends to itself only."""
    shared: ContextGroup | None = None
    """Who has which positions of its rows, where these are cut in other ways than rows of `seq_len`."""


_PLAIN = MicroBatch(None, None)
Shape = Callable[[int, int], tuple[int, ...]]
"""(block, samples) -> shape of what enters that block, before sequence sharding."""

STREAMS = {GATHER: ("gather", "gather"), PUBLISH: ("gather", "gather"), REDUCE: ("reduce", "reduce"),
            SYNC: ("reduce", "reduce")}
_PAGES: dict[str, tuple[Offload, str]] = {
    LOAD_WEIGHTS: ("weights", "load"), SAVE_WEIGHTS: ("weights", "save"), FREE_WEIGHTS: ("weights", ""),
    LOAD_STATE: ("optimizer", "load"), SAVE_STATE: ("optimizer", "save"), FREE_STATE: ("optimizer", "")}
"""What an action moves between device and host, and on which stream; none frees it."""
_VALUES = {SEND_ACT: ("x", SEND_ACT), RECV_ACT: ("x", SEND_ACT), SEND_GRAD: ("g", SEND_GRAD),
           RECV_GRAD: ("g", SEND_GRAD), SEND_KEPT: ("entry", SEND_KEPT), RECV_KEPT: ("entry", SEND_KEPT)}
"""Kind of the value that a message carries, and the channel."""
_RECEIVED = {"x": RECV_ACT, "g": RECV_GRAD, "entry": RECV_KEPT}
_KINDS = tuple(dict.fromkeys(channel for _, channel in _VALUES.values()))
_TAGS = {GATHER: 0, PUBLISH: 1, REDUCE: 2, SYNC: 4}
_TAGS_PER_UNIT = 6
_FIRST_MESSAGE_TAG = 1 << 20
_FIRST_LOSS_SCALE, _GROWTH_STEPS = 2.0**16, 2000


class StepResult(NamedTuple):
    """What all ranks know after a step."""

    loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Of the gradient of that mean, before clipping."""
    valid: int
    """Tokens that counted."""
    stop: bool
    """Whether some rank was asked to stop."""
    bytes_sent: int
    """Payload of all ranks since the same point of the step before."""
    writing: bool = False
    """Whether some rank was still writing a checkpoint when the step began."""
    skipped: bool = False
    """The gradient was not finite, and the step was not taken."""
    broken: bool = False
    """And not because fp16 overflowed, which is to be expected: something is wrong."""
    end_ns: int = 0
    """When it ended on this rank, where it is known only later."""


class _Segment(NamedTuple):
    """What forward keeps of blocks that backward goes through in one."""

    first: int
    """Block."""
    leaf: Tensor
    """What entered it."""
    out: Tensor | None
    """What came out of the last one; None where backward computes that again."""
    held: list[int]
    """Storages that are counted as kept."""


class _Leg(NamedTuple):
    """A part of a message between stages: with which rank, samples [first, last) and positions [lo, hi) of what this
    rank has."""

    rank: int
    first: int
    last: int
    lo: int
    hi: int


class _Arrival(NamedTuple):
    """A message between stages under way: the parts it comes in, along the sequence, of one batch of samples behind
    another."""

    works: list[Task]
    parts: list[list[Tensor]]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        rows = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in self.parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def tag_of(op: str, index: int) -> int:
    """The tag of the messages that such an action of unit `index` sends; sums hand on their results with the next."""
    return index * _TAGS_PER_UNIT + _TAGS[op]


def after_step(op: str, units: dict[int, Unit], layout: Layout, fabric: Fabric) -> Copies | Sums:
    """The exchange of a Y or P action for the posts of this rank that take part, by their units."""
    index = next(iter(units.values())).index
    tag = tag_of(op, index)
    if op == PUBLISH:
        return Copies(fabric, layout.publish(index), {k: u.updated for k, u in units.items()},
                      {k: u.weights for k, u in units.items()}, op, tag, {k: u.unpublished for k, u in units.items()})
    return Sums(fabric, layout.sync(index), {k: u.acc for k, u in units.items()},
                {k: u.own for k, u in units.items()}, op, tag)


class Interpreter:
    """The state of one rank, and how it makes one optimizer step.

    `modules` are the stage's blocks; their parameters become views into this rank's state. `shape` tells the shape
    of activations between blocks. `loss` is applied to the last block's output, unless that takes the targets itself.
    """

    def __init__(self, role: Role, job: Job, layout: Layout, fabric: Fabric, modules: list[nn.Module], shape: Shape,
                 loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.role, self.job, self.layout, self.fabric = role, job, layout, fabric
        self.recorder, self.rank, self.device = fabric.recorder, fabric.rank, fabric.device
        place = layout.places[self.rank]
        self.pipeline = layout.plan.pipelines[role.pipeline]
        self.stage = self.pipeline.stages[role.stage]
        self._modes, held = self.stage.modes, self.stage.held
        self.place, self.shape = place, shape
        self.dtype = DTYPES[job.precision]
        self.is_first, self.is_last = held[0] == 0, held[-1] == len(layout.model.blocks) - 1
        self.modules, self.loss = dict(zip(held, modules)), loss
        for module in modules:
            adopt(module)
        self.units: dict[int, Unit] = {}
        self._exchanges: dict[tuple[str, int], Copies | Sums | Chain] = {}
        for u in layout.units_of_stage(role.pipeline, role.stage):
            self.units[u] = Unit(u, self.rank, layout, job, self.device)
            bind(self.units[u], self.modules, layout, self.rank)
            self._make_exchanges(self.units[u])
            self.units[u].release()
        self.loss_scale = _FIRST_LOSS_SCALE if job.precision == "fp16" else 1.0
        self.good_steps = 0
        """fp16: steps since the last overflow or growth of the loss scale."""
        self._units_of = {b: [self.units[u] for u in layout.units_of_block[b]] for b in held}
        self._weight_storages = {u.compute.data.untyped_storage()._cdata for u in self.units.values()}
        self._sizes = self.pipeline.sizes(role.stage, place.member)
        """Samples of each micro-batch that are here."""
        self._routes: dict[tuple[int, int, int], list[_Leg]] = {}
        self._do: dict[str, Callable[[Action], None]] = {
            F: self._forward, B: self._backward, I: self._backward, W: self._weights, SEND_ACT: self._send,
            RECV_ACT: self._receive, SEND_GRAD: self._send, RECV_GRAD: self._receive, GATHER: self._move,
            RELEASE: self._release, REDUCE: self._move, SYNC: self._move, NORM: self._norm, STEP: self._step,
            PUBLISH: self._move, **dict.fromkeys(_PAGES, self._page),
            **dict.fromkeys((LOAD_GRAD, SAVE_GRAD, FREE_GRAD), self._bank), LOAD_UPDATED: self._fetch,
            **dict.fromkeys((PARK_SAVED, LOAD_SAVED, PASS_SAVED, AWAIT_PARKED), self._park),
            **dict.fromkeys((KEEP, ANTICIPATE, USE, DROP), self._version)}
        self._values: dict[tuple[str, int, int], Tensor | _Arrival] = {}
        """Activations `x` and gradients `g` at block boundaries, by (kind, block, micro-batch)."""
        self._saved: dict[tuple[int, int], _Segment] = {}
        """By their last block and micro-batch."""
        self._joins = {b for b, block in enumerate(layout.model.blocks) if b - 1 in self._modes and b in self._modes
                       and block.hands_down and not layout.model.blocks[b - 1].idle_backward
                       and "full" not in (self._modes[b - 1], self._modes[b])}
        """Blocks that may be one segment with the block before, both being here."""
        self._read(role)
        self._parked: dict[tuple[int, int], tuple[Parked, Running | None]] = {}
        """What lies in host memory, or is on its way there or back."""
        self._later: dict[tuple[int, int], tuple[Later, list[int]]] = {}
        """Weight gradients put off by the input half of a backward, and what they hold."""
        self._sending: list[Task] = []
        self._reducing: deque[Unit] = deque()
        self._batches: dict[int, MicroBatch] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._lr, self._factor, self._stop, self._writing = 0.0, 0.0, False, False
        self._result: StepResult | None = None
        self.writes_first = True
        """Whether gradients are complete only once they are sent on or summed here, so that most need not be zeroed."""
        self.mates = [self]
        """The interpreters of all seats of this rank."""
        self.now: tuple[object, float] | None = None
        """What this rank is at, and since when by `time.monotonic`; None between steps."""
        self.broken: list[tuple[int, int, int, int]] | None = None
        """Where numbers were not finite, while one looks for that."""

    # --- setting up ----------------------------------------------------------------------------------------------

    def _make_exchanges(self, unit: Unit) -> None:
        index, layout = unit.index, self.layout
        me = self.rank
        for op in {a.op for a in self.role.actions if a.op in _TAGS and a.lo == index and a.seat != JOINT}:
            tag = tag_of(op, index)
            if op == GATHER:  # each stage gathers a tied tensor for itself
                tag += self.role.stage * len(layout.units) * _TAGS_PER_UNIT
            exchange: Copies | Sums | Chain
            if op == GATHER:
                first, *more = layout.gathers(index)
                exchange = Copies(self.fabric, first, {me: unit.weights}, {me: unit.compute}, op, tag, {me: unit.kept})
                if more:
                    compute = {me: unit.compute}
                    exchange = Chain((exchange, *(Copies(self.fabric, moves, compute, compute, op, tag)
                                                  for moves in more)))
            elif op == REDUCE:
                *inside, last = layout.reduces(index)
                grad = {me: unit.grad}
                exchange = Sums(self.fabric, last, grad, {me: unit.acc}, op, tag, accumulate=True)
                if inside:
                    exchange = Chain((*(Sums(self.fabric, one, grad, grad, op, tag) for one in inside), exchange))
            else:
                exchange = after_step(op, {me: unit}, layout, self.fabric)
            self._exchanges[op, index] = exchange

    def _route(self, peer: int, mb: int) -> list[_Leg]:
        """How this rank's samples of a micro-batch, and its shard of the sequence, meet those of another stage.

        Stages of unequal tensor degree cut the sequence differently, and those with replicas of their own the samples;
        each overlap is one message.
        """
        micro = self._batches.get(mb, _PLAIN)
        mb %= len(self._sizes)
        key = (peer, micro.rows, micro.width) if micro.width else (peer, mb, 0)
        if key not in self._routes:
            other, copy = self.pipeline.stages[peer], self.layout.plan.replicas[self.place.replica][1]
            shape = self.shape(self.stage.held[0], 1)
            length = micro.width or (self.pipeline.tokens(shape[1], copy) if len(shape) > 2 else 1)
            start = length * self.place.tensor_index // self.stage.tensor
            meetings, before = self.pipeline.meetings(self.role.stage, peer, mb), 0
            if micro.width:  # stages have no replicas of their own then
                meetings = ((0, 0, 0, micro.rows),)
            else:
                before = self.pipeline.slices[self.role.stage][mb][self.place.member][0]
            self._routes[key] = [
                _Leg(self.layout.plan.posts(self.role.pipeline, peer, copy, member)[j], first - before, last - before,
                     lo - start, hi - start)
                for mine, member, first, last in meetings if mine == self.place.member
                for j, lo, hi in overlaps(length, self.stage.tensor, self.place.tensor_index, other.tensor)]
        return self._routes[key]

    # --- a step ----------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[MicroBatch], lr: float, *, stop: bool = False, writing: bool = False
             ) -> StepResult:
        """One optimizer step on this rank's micro-batches. `stop` asks all ranks to stop after it; `writing` tells them
        that this one still writes a checkpoint."""
        self.begin(batches, lr, stop=stop, writing=writing)
        for action in self.role.actions:
            self.now = action, time.monotonic()
            self.do(action)
        self.now = None
        return self.end()

    def begin(self, batches: Sequence[MicroBatch], lr: float, *, stop: bool, writing: bool) -> None:
        """Get ready for the actions of a step."""
        self._batches, self._lr, self._stop, self._writing = dict(enumerate(batches)), lr, stop, writing
        self._loss.zero_()
        for unit in self.units.values():
            unit.taken = True
            if unit.reduced and not unit.banked:
                unit.acc.data.zero_()

    def do(self, action: Action) -> None:
        """Carry out one action, or start it where it has a stream of its own."""
        self._do[action.op](action)

    def end(self) -> StepResult:
        """Wait until all is sent."""
        for work in self._sending:
            work.wait()
        self._sending.clear()
        assert self._result is not None
        return self._result

    def follow(self, role: Role, pipeline: Pipeline) -> None:
        """Go on by another role of the same place: other micro-batches, but the same state."""
        self.pipeline = pipeline
        self._sizes, self._routes = pipeline.sizes(role.stage, self.place.member), {}
        self._read(role)

    def _read(self, role: Role) -> None:
        """What has to be known of later actions beforehand."""
        self.role = role
        self._halved = {(b, a.mb) for a in role.actions if a.op == I for b in range(a.lo, a.hi)}
        self._parks = {(a.lo, a.mb) for a in role.actions if a.op == PARK_SAVED}
        self._cuts = {(b, a.mb % len(self._sizes)) for a in role.actions if a.op in (B, I) for b in (a.lo, a.hi)}
        """Where backward of a micro-batch goes from one action to the next, in whatever step."""

    def locate(self, batches: Sequence[MicroBatch]) -> tuple[int, int, int, int] | None:
        """Repeat a broken step and look where numbers cease to be finite on this rank, first in time: (0 forward or 1
        backward, micro-batch, blocks on the way there, block). All ranks together; nothing is updated."""
        self.broken = []
        self.step(batches, 0.0)
        found, self.broken = self.broken, None
        return min(found, default=None)

    def _watch(self, tensor: Tensor | None, block: int, mb: int, *, backward: bool) -> None:
        if self.broken is not None and tensor is not None and not bool(tensor.isfinite().all()):
            way = len(self.layout.model.blocks) - 1 - block if backward else block
            self.broken.append((int(backward), mb, way, block))

    def under_way(self) -> str:
        """The movements of state that this rank is in the middle of, and with whom; "" if none (or on CUDA)."""
        moves = {str(a): a for a in self.role.actions if a.op in _TAGS}
        found = []
        for name in self.fabric.under_way():
            comms = self.layout.comms(moves[name].op, moves[name].lo, self.rank) if name in moves else ()
            ranks = sorted({self.fabric.rank_of(r) for comm in comms for r in comm.ranks}
                           - {self.fabric.rank_of(self.rank)})
            found.append(f"{name} with rank {', '.join(map(str, ranks))}" if ranks else name)
        return ", ".join(found)

    def finish(self) -> None:
        """Wait for everything under way, so that the state can be read."""
        for unit in self.units.values():
            unit.weights.wait()
            unit.compute.wait()
        if self.stage.offload and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what was written back is read by the host

    def _absent(self, mb: int) -> bool:
        """Whether other replicas of the stage have all samples of a micro-batch."""
        return not self._sizes[mb % len(self._sizes)]

    def _forward(self, action: Action) -> None:
        if self._absent(action.mb):
            return
        x, first = self._input(action), action.lo
        for b in range(action.lo, action.hi):
            for unit in self._units_of[b]:
                unit.compute.wait()
            block, ends = self.layout.model.blocks[b], b + 1 == action.hi or self._apart(b + 1, action.mb)
            with self.recorder.span("compute", f"F{b}.{action.mb}", "forward"):
                if b == first:
                    leaf = x if b == 0 else x.detach().requires_grad_(block.hands_down)
                    x, held = leaf, list[int]()
                kept: Storages | None = {} if (b, action.mb) in self._parks else None
                out: Tensor | None
                if block.idle_backward or self._modes[b] == "full":
                    with torch.no_grad():
                        x, out = self._run(b, x, action.mb), None
                    if block.idle_backward:
                        leaf = leaf.to("meta")
                else:
                    with self.recorder.saving(held, self._weight_storages, kept):
                        x = out = self._run(b, x, action.mb)
                if ends and b >= self.layout.floor:
                    self._saved[b, action.mb] = _Segment(first, leaf, out, held)
                    self.recorder.hold(leaf, held)
                if kept is not None:
                    self._parked[b, action.mb] = self._may_go(b, action.mb, leaf, x, kept), None
            self._watch(x, b, action.mb, backward=False)
            self._mark(f"F{b}.{action.mb}")
            if ends:
                x, first = x.detach(), b + 1
        if action.hi == len(self.layout.model.blocks):
            self._loss += x
        else:
            self._values["x", action.hi, action.mb] = x

    def _apart(self, block: int, mb: int) -> bool:
        """Whether block and the one before it are segments of their own: where something happens between them in
        backward, or somebody looks at each block."""
        return (self.recorder.on or self.broken is not None or block not in self._joins
                or (block, mb % len(self._sizes)) in self._cuts or (block, mb) in self._parks
                or (block - 1, mb) in self._parks)

    def _may_go(self, block: int, mb: int, leaf: Tensor, out: Tensor, kept: Storages) -> Parked:
        """What a forward saved that may lie in host memory."""
        batch = self._batches[mb]
        shared = [t for t in (batch.inputs, batch.targets, out) if t is not None]
        if not self.layout.model.blocks[block].idle_backward:
            kept[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
        stay = {t.untyped_storage()._cdata for t in shared} | TABLES | constants(self.modules[block])
        return Parked({key: s for key, s in kept.items() if key not in stay}, self.recorder, self.device)

    def _park(self, action: Action) -> None:
        """EA, LA, XA or HA: the backward waits for what comes back."""
        if self._absent(action.mb) or action.op == PASS_SAVED:
            return
        key = action.lo, action.mb
        if action.op == AWAIT_PARKED:
            if task := self._parked[key][1]:
                task.settle()
            return
        parked, _ = self._parked.pop(key)
        steps, category = (parked.save(), "save") if action.op == PARK_SAVED else (parked.load(), "load")
        self._parked[key] = parked, self.fabric.run("host", steps, str(action), category)

    def _input(self, action: Action) -> Tensor:
        if action.lo == 0:
            tokens = self._batches[action.mb][0]
            assert tokens is not None
            return tokens
        return self._take("x", action.lo, action.mb)

    def _take(self, kind: str, block: int, mb: int) -> Tensor:
        value = self._values.pop((kind, block, mb))
        if isinstance(value, Tensor):
            return value
        with self.recorder.span("p2p", f"{_RECEIVED[kind]}{block}.{mb}", "recv"):
            self._clear_while_waiting()
            return value.wait()

    def _run(self, block: int, x: Tensor, mb: int) -> Tensor:
        module, micro = self.modules[block], self._batches[mb]
        targets = micro.targets
        if micro.segments:
            module.segments = micro.segments  # type: ignore[assignment]
        if micro.shared:
            module.context = micro.shared  # type: ignore[assignment]
        if (block, mb) in self._halved and torch.is_grad_enabled():
            others = nullcontext() if hasattr(module, "calls_linear") else Linears()
            with PutOff(self._later.setdefault((block, mb), ([], []))[0]), others:
                return self._call(module, block, x, targets)
        return self._call(module, block, x, targets)

    def _call(self, module: nn.Module, block: int, x: Tensor, targets: Tensor | None) -> Tensor:
        if block < len(self.layout.model.blocks) - 1:
            out: Tensor = module(x)
        elif self.loss is None:
            out = module(x, targets)
        else:
            assert targets is not None
            out = self.loss(module(x), targets)
        return out

    def _backward(self, action: Action) -> None:
        blocks, mb, end = self.layout.model.blocks, action.mb, action.hi
        while end > action.lo:
            b = end - 1
            first = b if self._absent(mb) else self._saved[b, mb].first
            units = [unit for k in reversed(range(first, end)) for unit in self._units_of[k]]
            for unit in units:
                unit.compute.wait()
                self._clear(unit)
                if unit.banked:
                    unit.grad.wait()
            end = first
            if self._absent(mb):
                continue
            grad = (torch.tensor(self._loss_gradient(mb), dtype=torch.float64, device=self.device)
                    if b == len(blocks) - 1 else self._take("g", b + 1, mb))
            if (b, mb) in self._parked:
                task = self._parked.pop((b, mb))[1]
                if task:
                    task.wait()
            _, leaf, out, held = self._saved.pop((b, mb))
            if blocks[b].idle_backward:
                self._later[b, mb] = [], []
            elif out is None:
                with self.recorder.span("compute", f"C{b}.{mb}", "recompute"), \
                        self.recorder.saving(held, self._weight_storages):
                    out = self._run(b, leaf, mb)
                self._mark(f"C{b}.{mb}")
            with self.recorder.span("compute", f"B{b}.{mb}", "backward"):
                if out is not None and out.requires_grad:
                    torch.autograd.backward(out, grad.to(out.dtype))
            if action.op == I:
                self._later[b, mb][1].extend(held)
            else:
                self.recorder.drop(held)
            self._watch(leaf.grad, b, mb, backward=True)
            for unit in units:
                self._watch(unit.grad.data, b, mb, backward=True)
            if first > self.layout.floor:
                nothing = torch.zeros((), dtype=leaf.dtype, device=self.device).expand(leaf.shape)
                self._values["g", first, mb] = leaf.grad if leaf.grad is not None else nothing
                leaf.grad = None
            self._mark(f"B{b}.{mb}")

    def _loss_gradient(self, mb: int) -> float:
        """Of the sum over the micro-batch; the rest of a mean over the valid tokens comes with the norm."""
        return self.loss_scale / self.job.tokens_per_step

    def _weights(self, action: Action) -> None:
        """The half of a backward that was put off."""
        if self._absent(action.mb):
            return
        for b in reversed(range(action.lo, action.hi)):
            later, held = self._later.pop((b, action.mb))
            for unit in self._units_of[b]:
                self._clear(unit)
                if unit.banked:
                    unit.grad.wait()
            with torch.no_grad(), self.recorder.span("compute", f"W{b}.{action.mb}", "backward"):
                for accumulate in later:
                    accumulate()
            self.recorder.drop(held)
            self._mark(f"W{b}.{action.mb}")

    def _clear(self, unit: Unit) -> None:
        """Zero the gradient buffer before the first backward of a step, or the first after hop 1 has taken it."""
        if unit.taken:
            unit.taken = False
            if unit in self._reducing:
                self._reducing.remove(unit)
            unit.grad.wait()
            unit.grad.restore()
            if self.writes_first and self.broken is None:
                unit.clear()
            else:
                unit.grad.data.zero_()

    def _clear_while_waiting(self) -> None:
        """What would have to be cleared soon, and is there anyway."""
        for unit in self.units.values():
            if unit.taken and not unit.reduced and not unit.banked:
                self._clear(unit)

    # --- between stages ----------------------------------------------------------------------------------------------

    def _message_tag(self, action: Action) -> int:
        """Messages of activations and of gradients at every block boundary of a pipeline are streams of their own."""
        kind = len(_KINDS) * boundary(action) + _KINDS.index(_VALUES[action.op][1])
        return _FIRST_MESSAGE_TAG + kind * len(self.layout.plan.pipelines) + self.role.pipeline

    def _send(self, action: Action) -> None:
        if self._absent(action.mb):
            return
        value = self._values.pop((_VALUES[action.op][0], boundary(action), action.mb))
        assert isinstance(value, Tensor)
        route = self._route(action.peer, action.mb)
        parts = [value] if len(route) == 1 else [
            value[leg.first:leg.last] if value.dim() < 3 else value[leg.first:leg.last, leg.lo:leg.hi] for leg in route]
        works = [self.fabric.send(part.contiguous(), leg.rank, action.op, self._message_tag(action))
                 for part, leg in zip(parts, route)]
        if self.recorder.on:
            works = [self.fabric.run("p2p", iter((works,)), str(action), "send")]
        self._sending += works

    def _receive(self, action: Action) -> None:
        if self._absent(action.mb):
            return
        block, (kind, channel), tag = boundary(action), _VALUES[action.op], self._message_tag(action)
        _, *rest = self.shape(block, 1)
        works: list[Task] = []
        rows: dict[int, list[Tensor]] = {}
        for rank, first, last, lo, hi in self._route(action.peer, action.mb):
            cut = [hi - lo, *rest[1:]] if len(rest) > 1 else rest
            part = torch.empty(last - first, *cut, dtype=self.dtype, device=self.device)
            rows.setdefault(first, []).append(part)
            works.append(self.fabric.receive(part, rank, channel, tag))
        self._values[kind, block, action.mb] = _Arrival(works, list(rows.values()))

    # --- state -----------------------------------------------------------------------------------------------------

    def _move(self, action: Action) -> None:
        """G, P, R or Y: start the exchange; what it touches remembers the task."""
        unit, op = self.units[action.lo], action.op
        stream, category = STREAMS[op]
        source, target = {GATHER: (unit.weights, unit.compute), PUBLISH: (unit.updated, unit.weights),
                          REDUCE: (unit.grad, unit.acc), SYNC: (unit.acc, unit.own)}[op]
        if unit.hosted and op in (GATHER, PUBLISH):  # what the host has made is on its way
            source.wait()
        if op == GATHER:
            unit.compute.restore()
        elif op != PUBLISH:
            unit.complete()
            if unit.banked and op == SYNC:
                unit.own.restore()
        steps, summing = self._exchanges[op, action.lo].steps(), unit.banked and op == REDUCE
        if summing:
            steps = unit.summing(steps)
        if op == GATHER and "weights" in unit.paged:
            steps, summing = unit.gathering(steps), True
        # Earlier tasks on these buffers are on the same stream: the messages may have to wait there for their turn.
        task = self.fabric.run(stream, steps, str(action), category,
                               post=not summing and source.idle and (op == REDUCE or target.idle))
        source.task = target.task = task
        if op == REDUCE:
            unit.taken = True
            self._reducing.append(unit)
            if len(self._reducing) > 1:
                self._reducing.popleft().grad.release()

    def _bank(self, action: Action) -> None:
        """LG, EG or XG; what goes to the host frees its place itself."""
        unit, whole = self.units[action.lo], action.mb < 0
        flats = (unit.acc, unit.own)
        if action.op == FREE_GRAD:
            for flat in unit.banks if unit.brought else ():
                flat.release()
            unit.brought = False
            return
        if action.op == SAVE_GRAD:
            unit.complete()
            steps, stream = unit.bank(whole=whole), "bank" if whole else "save"
        else:
            steps, stream = unit.unbank(whole=whole), "load"
        category = "load" if action.op == LOAD_GRAD else "save"
        task = self.fabric.run(stream, steps, str(action), category, post=False)
        for flat in flats:
            flat.task = task

    def _fetch(self, action: Action) -> None:
        """LU: a step that was left out has made nothing."""
        assert self._result is not None
        unit = self.units[action.lo]
        if self._result.skipped:
            return
        task = self.fabric.run("load", unit.fetch(), str(action), "load")
        for flat in {id(f): f for f in (unit.updated, unit.weights, unit.compute)}.values():
            flat.task = task

    def _page(self, action: Action) -> None:
        """Load, save or free what lies in host memory between uses."""
        what, stream = _PAGES[action.op]
        unit = self._paged(action.lo)
        if not stream:
            if what == "weights" and isinstance(unit, Unit) and unit.lent:
                unit.lent = False
            else:
                unit.free(what)
            return
        for flat, _ in unit.paged[what]:
            flat.wait()
        steps = unit.load(what) if stream == "load" else unit.save(what)
        task = self.fabric.run(stream, steps, str(action), stream)
        for flat, _ in unit.paged[what]:
            flat.task = task

    def _paged(self, index: int) -> Paged:
        return self.units[index]

    def _release(self, action: Action) -> None:
        self.units[action.lo].compute.release()

    def _norm(self, action: Action) -> None:
        mine = self.measure()
        with self.recorder.span("compute", "N", "optimizer"):
            self.settle(self.fabric.sum(mine).tolist())

    def measure(self) -> Tensor:
        """What this rank adds to the sums over all ranks that end in `settle`."""
        while self._reducing:
            self._reducing.popleft().grad.release()
        for unit in self.units.values():
            unit.complete()
            unit.acc.wait()
            unit.own.wait()
        with self.recorder.span("compute", "N", "optimizer"):
            counts = self.is_last and self.place.tensor_index == 0
            views = [v for unit in self.units.values() if not unit.banked for v in unit.norm_views]
            square = (torch.stack(torch._foreach_norm(views)).double().square().sum() if views
                      else torch.zeros((), dtype=torch.float64, device=self.device))
            for unit in self.units.values():
                square = square if unit.square is None else square + unit.square
            valid = sum(self._valid(one.targets) for one in self._batches.values()) if counts else 0
            return torch.stack([self._loss if counts else torch.zeros_like(self._loss), square,
                                square.new_tensor(valid), square.new_tensor(self._stop),
                                square.new_tensor(self._writing), square.new_tensor(self.fabric.newly_sent())])

    def settle(self, totals: Sequence[float]) -> None:
        """From the sums over all ranks: the loss, the norm of the whole gradient, and whether the step is taken."""
        loss, square_sum, tokens, stop, writing, sent = totals
        factor = self.job.tokens_per_step / tokens / self.loss_scale if tokens else 0.0
        norm = square_sum**0.5 * factor
        broken = not math.isfinite(loss) or (self.job.precision != "fp16" and not math.isfinite(norm))
        skipped = self._adapt_loss_scale(norm) or broken
        clip = self.job.clip_norm
        self._factor = factor * min(1.0, clip / (norm + 1e-6)) if clip else factor
        self._result = StepResult(loss / tokens if tokens else 0.0, norm, int(tokens), stop > 0, int(sent),
                                  writing > 0, skipped, broken)

    def _valid(self, targets: Tensor | None) -> int:
        if targets is None:
            return 0
        return len(targets) if targets.is_floating_point() else int((targets >= 0).sum())

    def _adapt_loss_scale(self, norm: float) -> bool:
        """fp16: halve the scale and skip the step after an overflow, double it after many good steps."""
        if self.job.precision != "fp16":
            return False
        if norm != norm or norm == float("inf"):
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0
            return True
        self.good_steps += 1
        if self.good_steps == _GROWTH_STEPS:
            self.loss_scale, self.good_steps = self.loss_scale * 2, 0
        return False

    def _step(self, action: Action) -> None:
        assert self._result is not None
        if not self._result.skipped:
            with self.recorder.span("compute", str(action), "optimizer"):
                self.units[action.lo].step(self._factor, self._lr)

    def _version(self, action: Action) -> None:
        """K, A, U or D on the weights of blocks."""
        with self.recorder.span("compute", str(action), "optimizer"):
            for unit in dict.fromkeys(u for b in range(action.lo, action.hi) for u in self._units_of[b]
                                      if not self.layout.units[u.index].frozen):
                if action.op == ANTICIPATE:
                    unit.anticipate(action.mb, self._rates(unit.updates, action.mb))
                else:
                    {KEEP: unit.keep, USE: unit.use, DROP: unit.drop}[action.op](action.mb)
        self._mark(str(action))

    def _rates(self, lo: int, hi: int) -> list[float]:
        """Learning rates of updates `lo` to `hi - 1`."""
        return [self._lr] * (hi - lo)

    def _mark(self, what: str) -> None:
        if self.recorder.on:
            self.recorder.mark(what, sum(mate.state_bytes for mate in self.mates))

    @property
    def state_bytes(self) -> int:
        """Bytes of state held now, temporary buffers included."""
        flats = {id(f): f for unit in self.units.values()
                 for f in (unit.compute, unit.grad, unit.weights, unit.acc, unit.own, unit.updated, unit.value)}
        moments = sum(sum(f.nbytes for f, _ in u.paged["optimizer"] if f.held and f is not u.value)
                      if "optimizer" in u.paged else 0 if u.hosted else u.optimizer.nbytes
                      for u in self.units.values())
        return sum(f.nbytes for f in flats.values() if f.held) + moments + sum(
            u.version_bytes for u in self.units.values())
