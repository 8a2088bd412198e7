"""A rank that stands in several pipelines: an interpreter per seat, and one order for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mixfleet.job import Job
from mixfleet.plan import Pipeline
from mixfleet.program.action import JOINT, NORM, PUBLISH, SYNC, Action, Role
from mixfleet.program.layout import Layout
from mixfleet.run.collective import Copies, Fabric, Sums
from mixfleet.run.interpreter import STREAMS, Interpreter, MicroBatch, Shape, StepResult, after_step
from mixfleet.run.state import Unit


class Crew:
    """Carries out a role of several seats. Each seat has its own state and its own micro-batches, and does its actions;
    what is joint is done here: the norm, and exchanges of units that all seats hold.

    `modules` are the blocks of each seat. What it offers is what `Interpreter` does.
    """

    def __init__(self, role: Role, job: Job, layout: Layout, fabric: Fabric, modules: Sequence[list[nn.Module]],
                 shape: Shape, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        self.role, self.layout, self.fabric = role, layout, fabric
        self.seats = [Interpreter(role.view(k), job, layout, fabric.at(fabric.rank + k * layout.plan.span), blocks,
                                  shape, loss) for k, blocks in enumerate(modules)]
        for seat in self.seats:
            seat.mates, seat.writes_first = self.seats, False
        self.now: tuple[object, float] | None = None
        banks = [flat for unit in self.units.values() for flat in unit.banks]
        for flat in banks:
            flat.restore()
        self._exchanges: dict[tuple[str, int], Copies | Sums] = {
            (a.op, a.lo): after_step(a.op, {seat.rank: seat.units[a.lo] for seat in self.seats}, layout, fabric)
            for a in role.actions if a.seat == JOINT and a.op in (SYNC, PUBLISH)}
        for flat in banks:
            flat.release()

    @property
    def units(self) -> dict[tuple[int, int], Unit]:
        """All state, by post and unit."""
        return {(seat.rank, u): unit for seat in self.seats for u, unit in seat.units.items()}

    @property
    def loss_scale(self) -> float:
        return self.seats[0].loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        for seat in self.seats:
            seat.loss_scale = value

    @property
    def good_steps(self) -> int:
        return self.seats[0].good_steps

    @good_steps.setter
    def good_steps(self, value: int) -> None:
        for seat in self.seats:
            seat.good_steps = value

    def step(self, batches: Sequence[MicroBatch], lr: float, *, stop: bool = False, writing: bool = False
             ) -> StepResult:
        """One optimizer step on the micro-batches of all seats, one seat's behind another's."""
        at = 0
        for seat in self.seats:
            count = len(seat.pipeline.micro_batches)
            seat.begin(batches[at:at + count], lr, stop=stop, writing=writing)
            at += count
        for action in self.role.actions:
            self.now = action, time.monotonic()
            if action.seat != JOINT:
                self.seats[action.seat].do(action)
            elif action.op == NORM:
                self._norm()
            else:
                self._move(action)
        results = [seat.end() for seat in self.seats]
        self.now = None
        return results[0]

    def _norm(self) -> None:
        mine = torch.stack([seat.measure() for seat in self.seats]).sum(0)
        totals = self.fabric.sum(mine).tolist()
        for seat in self.seats:
            seat.settle(totals)

    def _move(self, action: Action) -> None:
        units = [seat.units[action.lo] for seat in self.seats]
        flats = [flat for unit in units
                 for flat in ((unit.acc, unit.own) if action.op == SYNC else (unit.updated, unit.weights))]
        for unit in units:
            if unit.hosted and action.op == PUBLISH:
                unit.updated.wait()
            elif unit.banked and action.op == SYNC:
                unit.complete()
                unit.own.restore()
        stream, category = STREAMS[action.op]
        task = self.fabric.run(stream, self._exchanges[action.op, action.lo].steps(), str(action), category,
                               post=all(flat.idle for flat in flats))
        for flat in flats:
            flat.task = task

    def follow(self, role: Role, pipelines: Sequence[Pipeline]) -> None:
        """Go on by another role of the same place: other micro-batches, but the same state."""
        self.role = role
        for k, (seat, pipeline) in enumerate(zip(self.seats, pipelines, strict=True)):
            seat.follow(role.view(k), pipeline)

    def locate(self, batches: Sequence[MicroBatch]) -> tuple[int, int, int, int] | None:
        """As `Interpreter.locate`, over all seats."""
        for seat in self.seats:
            seat.broken = []
        self.step(batches, 0.0)
        found = [where for seat in self.seats for where in seat.broken or ()]
        for seat in self.seats:
            seat.broken = None
        return min(found, default=None)

    def under_way(self) -> str:
        return self.seats[0].under_way()

    def finish(self) -> None:
        """Wait for everything under way, so that the state can be read."""
        for seat in self.seats:
            seat.finish()
