"""The training state of one unit on one rank: buffers, and how the module parameters lie in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mixfleet.job import Job
from mixfleet.plan import Offload
from mixfleet.program.action import GATHER, REDUCE
from mixfleet.program.layout import Kind, Layout
from mixfleet.run.collective import Flat, Part, Running, Steps, cut_alike
from mixfleet.run.linear import is_linear, mark_bound
from mixfleet.run.optim import FlatOptimizer, Run
from mixfleet.schedule.asynchronous import CURRENT

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}

_EXCHANGED = 1 << 20
"""Elements of two versions that change places at a time."""

Read = Callable[[str, str, int, int], Tensor]
"""(tensor key, kind, lo, hi) -> those elements in canonical flat order. Kinds: `weights` and the moments."""


class Numbers(NamedTuple):
    """The types of a job's tensors."""

    compute: torch.dtype
    gradient: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, job: Job) -> Numbers:
        compute = DTYPES[job.precision]
        gradient = {8: torch.float64, 4: torch.float32}.get(job.bytes.gradient_bytes, compute)
        return cls(compute, gradient, torch.float32 if job.bytes.master_bytes else None)


class Gradient(NamedTuple):
    """Where the gradient of a parameter lies in a unit's buffer."""

    param: nn.Parameter
    view: Tensor
    lo: int
    hi: int


class Paged:
    """What has contents in host memory between uses."""

    paged: dict[Offload, list[tuple[Flat, Tensor]]]
    """What lies in host memory between uses: the buffer here, and its contents there."""

    def load(self, what: Offload) -> Iterator[tuple[()]]:
        """Bring contents from the host, as a transfer."""
        for flat, _ in self.paged[what]:
            flat.restore()
        return self._copies([(flat.data, home) for flat, home in self.paged[what]])

    def save(self, what: Offload) -> Iterator[tuple[()]]:
        """Write contents back to the host, as a transfer."""
        return self._copies([(home, flat.data) for flat, home in self.paged[what]])

    @staticmethod
    def _copies(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[()]]:
        yield ()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    def free(self, what: Offload) -> None:
        """Give the memory here back."""
        for flat, _ in self.paged[what]:
            flat.release()


class Unit(Paged):
    """The state of one unit on one rank.

    `compute` is what modules read and `weights` the permanent piece: one buffer, unless weights are sharded. Backward
    adds to `grad`; `acc` is the permanent piece of the gradient, `own` the gradient of the owned optimizer piece,
    `updated` its weights in compute type, `value` what the optimizer works on. Those that coincide share memory.
    """

    def __init__(self, index: int, rank: int, layout: Layout, job: Job, device: torch.device) -> None:
        numbers, place = Numbers.of(job), layout.places[rank]
        self.index, self._layout = index, layout
        self.sharded, self.reduced = layout.needed(GATHER, index), layout.needed(REDUCE, index)
        held = layout.held(index, rank)

        def pieces(kind: Kind) -> list[tuple[int, int, int]]:
            return [(c, *layout.piece(kind, index, c, place.replica)) for c in held]

        parts = [Part(c, a, a + n, at) for c in held for a, at, n in layout.segments(index, c, rank)]
        count = layout.compute_elements(index, rank)
        self.compute = Flat(parts, torch.zeros(count, dtype=numbers.compute, device=device))
        frozen = layout.units[index].frozen
        self.grad = Flat([] if frozen else parts, torch.zeros(0 if frozen else count, dtype=numbers.gradient,
                                                              device=device))
        self.weights = Flat.packed(pieces("weights"), numbers.compute, device) if self.sharded else self.compute
        self.acc = Flat.packed(pieces("gradients"), numbers.gradient, device) if self.reduced else self.grad
        owned = pieces("optimizer")
        stage = layout.plan.pipelines[place.pipeline].stages[place.stage]
        self.banked, self.hosted = "gradients" in stage.offload and not frozen, stage.hosted and not frozen
        """Whether gradients go to host memory, and whether the host makes the step."""
        apart = self.banked and layout.apart(index, rank)
        self.own = (None if apart else self.acc.narrowed(owned)) or Flat.packed(owned, numbers.gradient, device)
        self.updated = self.weights.narrowed(owned) or Flat.packed(owned, numbers.compute, device)
        host, pinned = torch.device("cpu"), device.type == "cuda"

        def at_home(flat: Flat) -> Tensor:
            return torch.zeros_like(flat.data, device=host, pin_memory=pinned)

        self.banks = [self.acc, *([self.own] if apart else [])] if self.banked else []
        """Gradients that go to the host: what is summed up, and what is owned of the whole one if that is another."""
        self.brought = False
        """Whether the whole gradient is here for the step."""
        homes = [at_home(flat) for flat in self.banks]
        self._homes = {id(flat.data): home for flat, home in zip(self.banks, homes)}
        if "weights" in stage.offload:
            self._homes[id(self.weights.data)] = at_home(self.weights)
        self._made = Flat.packed(owned, numbers.compute, host) if layout.fetches_updated(index, stage.offload) \
            and self.hosted else None
        """What the host has made of the owned weights, for the device to load."""
        if self._made is not None and pinned:
            self._made.data = self._made.data.pin_memory()
        self.value = self.updated
        if numbers.master:
            self.value = Flat.packed(owned, numbers.master, host if self.hosted else device)
        elif self.hosted:
            self.value = self._made or Flat(self.updated.parts, self.home(self.updated.data), owner=False)
        if self.hosted:
            self.value.nbytes = 0
            self._homes[id(self.value.data)] = self.value.data
        self._stored = pieces("weights") if frozen else owned
        """Intervals whose weights, and moments if they are trained, are read from checkpoints."""
        self.counted = [piece for piece in self._stored if layout.counts(index, piece[0], rank)]
        """Those that this rank alone writes to checkpoints."""
        self.kept = pieces("weights") if self.sharded else []
        """Intervals of sharded weights that stay here between steps."""
        self.unpublished = [] if self.updated.data is self.weights.data else [
            (c, max(a, x), min(b, y)) for c, a, b in owned for d, x, y in pieces("weights")
            if c == d and max(a, x) < min(b, y)]
        """Owned intervals of weights held here that the optimizer does not write in place."""
        params = {t.key: t.param for t in layout.units[index].tensors}
        runs = []
        at = 0
        for c, lo, hi in owned:
            for key, a, b, offset in layout.slices(index, c, lo, hi):
                runs.append(Run(at + offset, at + offset + b - a, *job.optimizer.rates(key, len(params[key].shape))))
            at += hi - lo
        self._owned, self._copies_value = owned, bool(numbers.master)
        self._aim()
        weights = layout.plan.weights
        self.optimizer = FlatOptimizer(job.optimizer, runs, self._value, predicts=bool(weights and weights.predicts))
        self.norm_views = [v for c, lo, hi in ((c, *layout.measures(index, c, rank)) for c in held)
                           if lo < hi and not frozen for v in self.own.views(c, lo, hi)]
        """Of the gradient, what this rank alone adds to the norm."""
        self.square: Tensor | None = None
        """The sum of squares of that, taken before it went to the host."""
        self.paged = {}
        if "weights" in stage.offload:
            self.paged["weights"] = [(self.weights, self._homes[id(self.weights.data)])]
        self.lent = False
        """Whether the piece that lies in host memory was loaded to gather from, and frees its place by that."""
        if "optimizer" in stage.offload and not self.hosted:
            moments = [Flat((), data) for data in self.optimizer.state.values()]
            self.paged["optimizer"] = [(flat, at_home(flat))
                                       for flat in (*([self.value] if numbers.master else []), *moments)]
            self._homes |= {id(flat.data): home for flat, home in self.paged["optimizer"]}
        self.gradients: list[Gradient] = []
        """Of the parameters that are views into this unit; tied ones lie in the same place."""
        self._written: list[Gradient] = []
        """Those that whoever computes them first writes, so that nobody need zero them."""
        self._zeroed: tuple[int, list[Tensor]] = 0, []
        self.taken = True
        """Whether the gradient buffer's contents have been used, so that the next backward starts from zero."""
        self.updates = 0
        """Optimizer steps since versions are counted."""
        self.using = CURRENT
        """The version that modules read."""
        self.part = 1.0
        """The part of the moments that is here: virtual workers have moments of their own, which together are the
        job's."""
        if layout.plan.waves:
            self.part = layout.plan.pipelines[place.pipeline].samples / layout.plan.global_batch
        self.pulled = 0
        """Waves of other virtual workers in the current weights."""
        self._agreed: Tensor | None = None
        """What the weights are with all waves that are pulled, and nothing else: the same on all virtual workers."""
        self._pushed: dict[int, tuple[Tensor, Flat]] = {}
        """Waves that are pushed and not pulled yet: what they changed here, and the sum over all."""
        self._since: dict[int, tuple[int, int]] = {}
        self._shelf: dict[int, Tensor] = {}
        """Other versions. What modules read always lies in `compute`, so using another one exchanges contents."""

    def _aim(self) -> None:
        """Find out where the step reads and writes, in pieces that are cut alike."""
        target = self.updated
        if self.hosted:
            target = self._made or Flat(self.updated.parts, self.home(self.updated.data), owner=False)
        source = Flat(self.own.parts, self.home(self.own.data), owner=False) if self.hosted else self.own
        buffers = [self.value, source, *([target] if self._copies_value else [])]
        self._value, self._gradient, *rest = cut_alike(
            *([v for c, lo, hi in self._owned if lo < hi for v in flat.views(c, lo, hi)] for flat in buffers))
        self._copy = rest[0] if rest else []

    def release(self) -> None:
        """Give back the buffers that exist only while they are used, once everything that views them is made."""
        if self.sharded:
            self.compute.release()
        if self.reduced:
            self.grad.release()
        for what in self.paged:
            self.free(what)
        for flat in self.banks:
            flat.release()

    def bank(self, *, whole: bool) -> Iterator[tuple[Running, ...]]:
        """Move the gradient to the host, as a transfer: what is summed up, or the owned piece of the whole one."""
        return self._bank(self._under_way(), whole=whole)

    def _under_way(self) -> tuple[Running, ...]:
        return tuple(flat.task for flat in (self.acc, self.own) if flat.task is not None)

    def _bank(self, before: tuple[Running, ...], *, whole: bool) -> Iterator[tuple[Running, ...]]:
        yield before
        flat = self.own if whole else self.acc
        if whole:
            self.square = torch.stack(torch._foreach_norm(self.norm_views)).double().square().sum() \
                if self.norm_views else None
        self.home(flat.data).copy_(flat.data, non_blocking=True)
        for bank in self.banks:
            bank.drop()

    def unbank(self, *, whole: bool) -> Iterator[tuple[Running, ...]]:
        """Bring it back."""
        self.brought = whole
        data = (self.own if whole else self.acc).data
        bank = next(flat for flat in self.banks if flat.data is data)
        if data.is_cuda:  # memory of the stream that computes with it; the host has issued all that goes before
            bank.restore()
        return self._unbank(self._under_way(), bank)

    def _unbank(self, before: tuple[Running, ...], bank: Flat) -> Iterator[tuple[Running, ...]]:
        yield before
        bank.restore()
        bank.data.copy_(self.home(bank.data), non_blocking=True)

    def summing(self, steps: Steps) -> Steps:
        """Hop 1 into a sum that is loaded, or not there yet and begins with zero."""
        fresh = self.acc.data.is_cuda and not self.acc.held
        if fresh:
            self.acc.restore()
        return self._summing(self._under_way(), steps, fresh=fresh)

    def _summing(self, before: tuple[Running, ...], steps: Steps, *, fresh: bool) -> Steps:
        yield before
        if fresh or not self.acc.held:
            self.acc.restore()
            self.acc.data.zero_()
        yield from steps

    def gathering(self, steps: Steps) -> Steps:
        """A gather from a piece that is on its way from the host, and whose place is free then."""
        self.lent = True
        before = () if self.weights.task is None else (self.weights.task,)

        def gathered() -> Steps:
            yield before
            yield from steps
            self.weights.drop()
        return gathered()

    def fetch(self) -> Iterator[tuple[()]]:
        """Load the owned weights that the host has made, as a transfer."""
        assert self._made is not None
        views = ([v for c, lo, hi in self._owned if lo < hi for v in flat.views(c, lo, hi)]
                 for flat in (self.updated, self._made))
        return self._copies(list(zip(*cut_alike(*views), strict=True)))

    def clear(self) -> None:
        """Let gradients start from zero. Those of weights that only linear layers use are left as they are: the first
        product is written over them."""
        places = Counter(g.lo for g in self.gradients)
        fresh = [g for g in self.gradients if is_linear(g.param) and places[g.lo] == 1]
        if self._zeroed[0] != len(fresh):
            edges = [0, *(x for g in sorted(fresh, key=lambda g: g.lo) for x in (g.lo, g.hi)), len(self.grad.data)]
            self._zeroed = len(fresh), [self.grad.data[lo:hi] for lo, hi in zip(edges[::2], edges[1::2]) if lo < hi]
        for g in fresh:
            g.param.grad = None
        for part in self._zeroed[1] if fresh else [self.grad.data]:
            part.zero_()
        self._written = fresh

    def complete(self) -> None:
        """Let the whole gradient be in its buffer, zero where nobody computed any."""
        for g in self._written:
            if g.param.grad is None:
                g.view.zero_()
            elif g.param.grad is not g.view:  # autograd was first
                g.view.copy_(g.param.grad)
            g.param.grad = g.view
        self._written = []

    def home(self, data: Tensor) -> Tensor:
        """Where the contents of a buffer stay between steps: the buffer itself, or its place in host memory."""
        return self._homes.get(id(data), data)

    def settle(self, home: Tensor) -> None:
        """Let the weights lie there from now on."""
        (flat, _), = self.paged["weights"]
        self.paged["weights"] = [(flat, home)]
        self._homes[id(flat.data)] = home
        if self.hosted and self._made is None:
            if not self._copies_value:
                del self._homes[id(self.value.data)]
                self.value = Flat(self.updated.parts, home, owner=False)
                self._homes[id(home)] = home
            self._aim()

    @property
    def permanent_bytes(self) -> dict[str, int]:
        """Bytes that stay between steps."""
        distinct = {id(f): f for f in (self.weights, self.updated, self.acc, self.own, self.value)
                    if id(f.data) not in self._homes}.values()
        kinds = {id(self.weights): "weights", id(self.acc): "gradients", id(self.own): "gradients"}
        away = "optimizer" in self.paged or self.hosted
        total = {"weights": 0, "gradients": 0, "optimizer": 0 if away else self.optimizer.nbytes}
        for flat in distinct:
            total[kinds.get(id(flat), "optimizer")] += flat.nbytes
        return total

    def step(self, scale: float, lr: float, share: float = 1.0) -> None:
        """Update the owned piece, with `share` of the weight decay of a step."""
        self.weights.wait()
        self.compute.wait()
        for flat, _ in self.paged.get("optimizer", ()):
            flat.wait()
        if self.banked:
            self.own.wait()
        self.optimizer.step(self._value, self._gradient, scale, lr, self._copy, share)
        self.updates += 1

    @property
    def read(self) -> tuple[int, int]:
        """The version that modules read, and how many updates had been made when it was."""
        return (self.updates, self.updates) if self.using == CURRENT else (self.using, self._since[self.using][0])

    @property
    def knows(self) -> int:
        """Waves of other virtual workers in the version that modules read."""
        return self.pulled if self.using == CURRENT else self._since[self.using][1]

    def begin_waves(self) -> None:
        """From here on count updates and waves; all virtual workers have the same weights."""
        self.updates = self.pulled = 0
        self._agreed = self.value.data.clone()

    def push(self, wave: int) -> Flat:
        """What the wave changed, to be summed in place over the virtual workers."""
        assert self._agreed is not None
        self.compute.wait()
        change = self.value.data - self._agreed
        for before, _ in self._pushed.values():
            change.sub_(before)
        change = change.to(self.own.data.dtype)
        total = Flat(self.value.parts, change.clone())
        self._pushed[wave] = change, total
        return total

    def arrived(self, wave: int) -> bool:
        """Whether all have pushed a wave that is not pulled here yet."""
        return wave in self._pushed and self._pushed[wave][1].idle

    def await_wave(self, wave: int) -> None:
        """Wait until all have pushed a wave."""
        if wave in self._pushed:
            self._pushed[wave][1].wait()

    def pull(self, wave: int) -> None:
        """Add what the others changed in a wave: the current weights are what all agree on, and then this worker's own
        later waves. Nothing if it is pulled already."""
        if wave not in self._pushed:
            return
        assert self._agreed is not None
        self.await_wave(wave)
        _, total = self._pushed.pop(wave)
        self._agreed.add_(total.data)
        self.value.data.copy_(self._agreed)
        for own, _ in self._pushed.values():
            self.value.data.add_(own)
        for copy, v in zip(self._copy, self._value):
            copy.copy_(v)
        self.pulled += 1

    def moments(self) -> Iterator[Flat]:
        """The optimizer's state, as what it is of."""
        for state in self.optimizer.state.values():
            packed, at = [], 0
            for c, lo, hi in self._stored:
                packed.append(Part(c, lo, hi, at))
                at += hi - lo
            yield Flat(packed, state, owner=False)

    @property
    def version_bytes(self) -> int:
        waves = [self._agreed] if self._agreed is not None else []
        return sum(t.nbytes for t in (*self._shelf.values(), *waves)) + sum(
            own.nbytes + total.nbytes for own, total in self._pushed.values())

    def keep(self, version: int) -> None:
        """Keep a copy of the current weights, which are `version`."""
        assert version == self.updates
        self.compute.wait()
        current = self.compute.data if self.using == CURRENT else self._shelf[CURRENT]
        self._shelf[version], self._since[version] = current.clone(), (self.updates, self.pulled)

    def anticipate(self, version: int, rates: Sequence[float]) -> None:
        """Predict the weights that will be `version`, after updates at `rates`."""
        assert version == self.updates + len(rates)
        using = self.using
        self.use(CURRENT)
        copy = self.compute.data.clone()
        ours = Flat(self.weights.parts, copy, owner=False)
        views = [v for c, lo, hi in self._stored if lo < hi for v in ours.views(c, lo, hi)]
        value, out = cut_alike(self._value, views)
        self.optimizer.anticipate(value, out, rates)
        self._shelf[version], self._since[version] = copy, (self.updates, self.pulled)
        self.use(using)

    def use(self, version: int) -> None:
        """Let modules read a version from here on."""
        self.compute.wait()
        if version != self.using:
            other = self._shelf.pop(version)
            for mine, theirs in zip(*(torch.split(t, _EXCHANGED) for t in (self.compute.data, other))):
                before = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(before)
            self._shelf[self.using], self.using = other, version

    def drop(self, version: int) -> None:
        """Give up a version; the current weights are used again if it was in use."""
        if version == self.using:
            self.compute.wait()
            self.compute.data.copy_(self._shelf.pop(CURRENT))
            self.using = CURRENT
        else:
            del self._shelf[version]
        del self._since[version]

    def _slices(self) -> Iterator[tuple[str, int, int, list[Tensor], int, bool]]:
        """What is stored, by tensors: key, from, to, the values, where the moments lie, whether it is counted here."""
        at = 0
        held = self.weights if self._layout.units[self.index].frozen else self.value
        held = Flat(held.parts, self.home(held.data), owner=False)
        for c, lo, hi in self._stored:
            for key, a, b, offset in self._layout.slices(self.index, c, lo, hi):
                values = held.views(c, lo + offset, lo + offset + b - a)
                yield key, a, b, values, at + offset, (c, lo, hi) in self.counted
            at += hi - lo

    def fill(self, read: Read, *, moments: bool) -> None:
        """Set weights, and with `moments` the optimizer's state, from whoever knows intervals of whole tensors."""
        for flat in dict.fromkeys((self.weights, self.updated, self.value)):
            for part in flat.parts:
                for key, a, b, offset in self._layout.slices(self.index, part.column, part.lo, part.hi):
                    at = part.offset + offset
                    self.home(flat.data)[at:at + b - a].copy_(read(key, "weights", a, b))
        if moments and self.optimizer.rule.moments:  # what plain SGD keeps to predict from need not be in a checkpoint
            for key, a, b, _, at, _ in self._slices():
                for kind, state in self.optimizer.state.items():
                    self.home(state)[at:at + b - a].copy_(read(key, kind, a, b) * self.part)

    def pieces(self) -> Iterator[tuple[str, str, int, int, Tensor]]:
        """What this rank writes to a checkpoint: (tensor key, kind, lo, hi, values); over all ranks, everything once.

        Kinds are `weights`, from the fp32 master where there is one, and the optimizer's moments.
        """
        for key, a, b, values, at, counted in self._slices():
            if counted:
                yield key, "weights", a, b, torch.cat(values)
                for kind, state in self.optimizer.state.items():
                    yield key, kind, a, b, self.home(state)[at:at + b - a] / self.part if self.part < 1 else \
                        self.home(state)[at:at + b - a]


class Guest(Paged):
    """Weights of a unit that belongs to another rank of the same host, loaded to compute with and never changed."""

    def __init__(self, index: int, layout: Layout, job: Job, device: torch.device) -> None:
        dtype, count = Numbers.of(job).compute, layout.units[index].elements
        self.index, self.updates = index, 0
        self.compute = Flat((), torch.zeros(count, dtype=dtype, device=device))
        self.grad = Flat((), torch.zeros(0, dtype=dtype, device=device))
        self.paged = {"weights": [(self.compute, torch.zeros(0, dtype=dtype))]}


def mapped(path: str, count: int, dtype: torch.dtype) -> Tensor:
    """A vector in a file that all processes which map it share."""
    return torch.from_file(path, shared=True, size=count, dtype=dtype) if count else torch.zeros(0, dtype=dtype)


def bind(unit: Unit | Guest, modules: dict[int, nn.Module], layout: Layout, rank: int) -> None:
    """Make the parameters of a unit views into its buffers, their gradients likewise; `modules` are those of the stage.

    A tensor lies with its cut dimension first, so a parameter cut along a later dimension is a transposed view.
    """
    at = 0
    for tensor in layout.units[unit.index].tensors:
        lo, hi = layout.rows(tensor, rank)
        count = (hi - lo) * tensor.row
        for b in layout.units[unit.index].blocks:
            for spec in layout.model.blocks[b].params if b in modules else ():
                if (spec.tied or f"{layout.model.blocks[b].name}/{spec.name}") == tensor.key:
                    split = spec.split or 0
                    shape = (hi - lo, *(n for d, n in enumerate(spec.shape) if d != split)) if spec.shape else ()
                    flats = (unit.compute, unit.grad) if spec.trainable and isinstance(unit, Unit) else (unit.compute,)
                    views = [flat.data[at:at + count].view(shape).movedim(0, split) for flat in flats]
                    param = _put(modules[b], spec.name, *views)
                    if len(views) > 1 and isinstance(unit, Unit):
                        unit.gradients.append(Gradient(param, views[1], at, at + count))
        at += count


def _put(module: nn.Module, name: str, weight: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    """A parameter; without a gradient buffer it is frozen."""
    path, _, leaf = name.rpartition(".")
    # `.data` has a version counter of its own: gathering into the buffer must not upset what autograd saved.
    param = nn.Parameter(weight.data, requires_grad=grad is not None)
    if grad is not None and grad.dtype == weight.dtype:
        param.grad = grad
        mark_bound(param, grad)
    elif grad is not None:
        param.register_post_accumulate_grad_hook(_adds_to(grad))  # type: ignore[no-untyped-call]
    setattr(module.get_submodule(path), leaf, param)
    return param


def _adds_to(total: Tensor) -> Callable[[Tensor], None]:
    """For gradients that are accumulated in a longer type than the weights have."""

    def add(param: Tensor) -> None:
        if param.grad is not None:
            total.add_(param.grad)
            param.grad = None

    return add
