"""Asynchronous programs on one rank: updates without end, tallied while they go on, until the pipeline is drained."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mixfleet.program.action import PULL, PUSH, SYNC, Action, F
from mixfleet.program.lower import lower
from mixfleet.program.repeat import Repeated
from mixfleet.run.collective import Flat, Sums
from mixfleet.run.interpreter import STREAMS, Interpreter, MicroBatch, StepResult, tag_of
from mixfleet.run.launch import Met
from mixfleet.run.optim import learning_rate

Feed = Callable[[int], Sequence[MicroBatch]]
"""This rank's micro-batches of a step."""
Targets = Callable[[int], Tensor]
"""Targets of the whole global batch of a step, asked where the last block is."""
REMEMBERED = 1024
"""Micro-batches of which a rank remembers the weights that they met."""


class _Tally(NamedTuple):
    """What all ranks add up about one update, while they go on with the next ones."""

    work: Any
    values: Tensor
    end_ns: int


class Stream(Interpreter):
    """An interpreter of asynchronous programs.

    Between updates there is nothing that all ranks wait for: gradients are of the mean from the start, and what is
    reported of an update is known some updates later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writes_first = False
        self.readings: deque[Met] = deque(maxlen=REMEMBERED)
        """What the latest micro-batches met in this rank's first block."""
        self.depth = self.layout.plan.depth
        """Updates over which the pipeline fills and drains."""
        self._met: dict[int, tuple[int, int, int]] = {}
        self._square = torch.zeros_like(self._loss)
        self._waves, self._pushing = self.layout.plan.waves, dict[tuple[int, int], Flat]()
        self._do |= {PUSH: self._push, PULL: self._pull}

    def run(self, first_step: int, updates: int, feed: Feed, targets: Targets, stop: Callable[[], bool]
            ) -> Iterator[StepResult]:
        """Fill the pipeline, make `updates` updates from step `first_step` on, and drain it.

        Yields what all ranks know of each update, in order. When some rank was asked to stop, as few more follow as
        all ranks can still agree on.
        """
        plan, depth = self.layout.plan, self.depth
        size = len(self.pipeline.micro_batches)
        self._first_step, self._targets = first_step, targets
        self._counts: dict[int, int] = {}
        for unit in self.units.values():
            unit.updates, unit.taken = 0, True
            if self._waves:
                unit.begin_waves()
        whole = lower(plan, self.layout.model, self.layout, min(updates, plan.updates))
        program = Repeated(whole.role(self.role.pipeline, self.role.stage).actions, size, depth,
                           waves=self._waves)
        tallies: deque[_Tally] = deque()
        update, fed = 0, 0
        while update < updates:
            for action in program.update(update, updates):
                while action.op == F and action.mb >= fed * size:
                    self._batches.update(enumerate(feed(first_step + fed), fed * size))
                    fed += 1
                self.now = action, time.monotonic()
                self._do[action.op](action)
            tallies.append(self._tally(range(update * size, (update + 1) * size), stop()))
            update += 1
            while len(self._sending) > 2 * size * (depth + 2):
                self._sending.pop(0).wait()
            if len(tallies) > depth + 1:
                result = self._known(tallies.popleft())
                if result.stop:  # every rank learns it here, before any has begun what drains so short a program
                    updates = min(updates, max(update + depth + 2, program.least))
                yield result
        while tallies:
            yield self._known(tallies.popleft())
        for work in self._sending:
            work.wait()
        self._sending.clear()
        if self._waves and len(plan.replicas) > 1:
            self._share_moments()

    def _push(self, action: Action) -> None:
        with self.recorder.span("compute", str(action), "optimizer"):
            self._pushing[action.lo, action.mb] = self.units[action.lo].push(action.mb)
        self._mark(str(action))

    def _move(self, action: Action) -> None:
        if action.op == SYNC and action.mb >= 0:
            self._sum(action.lo, self._pushing.pop((action.lo, action.mb)), str(action))
        else:
            super()._move(action)

    def _sum(self, index: int, flat: Flat, name: str) -> None:
        """Start to sum a unit's values over the virtual workers, in place."""
        stream, category = STREAMS[SYNC]
        mine = {self.rank: flat}
        exchange = Sums(self.fabric, self.layout.sync(index), mine, mine, SYNC, tag_of(SYNC, index))
        flat.task = self.fabric.run(stream, exchange.steps(), name, category)

    def _pull(self, action: Action) -> None:
        """As late as the distance allows; if the plan says so, waves that are there already as well."""
        unit, wave = self.units[action.lo], action.mb
        unit.await_wave(wave)
        with self.recorder.span("compute", str(action), "optimizer"):
            unit.pull(wave)
            while self.layout.plan.synchronization.pull == "early" and unit.arrived(wave + 1):
                wave += 1
                unit.pull(wave)
        self._mark(str(action))

    def _share_moments(self) -> None:
        """In a drained pipeline: what all virtual workers have of the moments, each a part of it."""
        for index, unit in sorted(self.units.items(), reverse=True):
            if not self.layout.units[index].frozen:
                for flat in unit.moments():
                    self._sum(index, flat, f"moments of {index}")
                    flat.wait()
                    flat.data.mul_(unit.part)

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        if action.lo == self.stage.held[0]:
            self._met[action.mb] = *self.units[action.lo].read, self.units[action.lo].knows

    def _backward(self, action: Action) -> None:
        super()._backward(action)
        if action.lo == self.stage.held[0]:
            step, mb = divmod(action.mb, len(self.pipeline.micro_batches))
            forward, made, waves = self._met.pop(action.mb)
            seen, first = self.units[action.lo].read[0], 0 if self._waves else self._first_step
            self.readings.append(Met(self._first_step + step, mb, first + forward, first + made, first + seen,
                                     action.mb if self._waves else first + step, waves))

    def _loss_gradient(self, mb: int) -> float:
        step = self._first_step + mb // len(self.pipeline.micro_batches)
        if step not in self._counts:
            self._counts = {step: self._valid(self._targets(step))}
        return 1.0 / max(1, self._counts[step])

    def _step(self, action: Action) -> None:
        unit = self.units[action.lo]
        unit.acc.wait()
        unit.own.wait()
        with self.recorder.span("compute", str(action), "optimizer"):
            for norm in torch._foreach_norm(unit.norm_views) if unit.norm_views else ():
                self._square += norm.double().square()
            unit.step(1.0, self._rates(unit.updates, unit.updates + 1)[0], self._share(unit.updates))
        unit.taken = True

    def _rates(self, lo: int, hi: int) -> list[float]:
        each = len(self.pipeline.micro_batches) if self._waves else 1
        return [learning_rate(self.job.optimizer, self._first_step + u // each, self.job.steps) for u in range(lo, hi)]

    def _share(self, update: int) -> float:
        """The part of a step's samples that an update is of."""
        sizes = self.pipeline.micro_batches
        return sizes[update % len(sizes)] / self.layout.plan.global_batch if self._waves else 1.0

    def _tally(self, done: range, stop: bool) -> _Tally:
        """Start to add up one update over all ranks; its micro-batches are not needed any more."""
        targets = [self._batches.pop(mb)[1] for mb in done]
        counts = self.is_last and self.place.tensor_index == 0
        valid = sum(map(self._valid, targets)) if counts else 0
        values = torch.stack([self._loss if counts else torch.zeros_like(self._loss), self._square,
                              self._square.new_tensor(valid), self._square.new_tensor(stop),
                              self._square.new_tensor(self.fabric.newly_sent())]).cpu()
        self._loss.zero_()
        self._square.zero_()
        return _Tally(dist.all_reduce(values, group=self.fabric.world, async_op=True), values,
                      time.perf_counter_ns())

    def _known(self, tally: _Tally) -> StepResult:
        self.now = "what the ranks add up", time.monotonic()
        tally.work.wait()
        self.now = None
        loss, square, tokens, stop, sent = tally.values.tolist()
        return StepResult(loss / tokens if tokens else 0.0, math.sqrt(square), int(tokens), stop > 0, int(sent),
                          broken=not (math.isfinite(loss) and math.isfinite(square)), end_ns=tally.end_ns)
