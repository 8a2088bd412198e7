"""A worker of RoundPipe: it computes whatever leg comes next, with weights from the memory that all workers share."""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixfleet.program.action import AHEAD, LOAD_WEIGHTS, RECV_KEPT, SAVE_WEIGHTS, SEND_KEPT, Action
from mixfleet.run.interpreter import Interpreter, StepResult
from mixfleet.run.launch import Met
from mixfleet.run.state import Guest, Paged, bind, mapped
from mixfleet.run.stream import REMEMBERED

_MEMORY = Path("/dev/shm")
"""Where files are memory, on Linux."""


class Rounds(Interpreter):
    """An interpreter of legs. The state of a block belongs to the worker that goes back through it; between uses its
    weights lie in a file in memory, from which those that go forward through it load them too.

    `ahead` are the modules of blocks that are not its own. All workers of the plan make theirs together.
    """

    def __init__(self, *args: Any, ahead: Mapping[int, nn.Module]) -> None:
        super().__init__(*args)
        layout, job, pipeline = self.layout, self.job, self.pipeline
        self.is_first = self.is_first or any(lo == 0 for lo, _ in self.stage.ahead)
        self._entries = pipeline.entries
        self._do |= {AHEAD: self._ahead, SEND_KEPT: self._send, RECV_KEPT: self._receive}
        made = [tempfile.mkdtemp(prefix="mixfleet-", dir=_MEMORY if _MEMORY.is_dir() else None)] \
            if dist.get_rank(self.fabric.world) == 0 else [""]
        dist.broadcast_object_list(made, group=self.fabric.world, group_src=0)
        owner = {u: s for s in reversed(range(len(pipeline.stages)))
                 for u in layout.units_of_stage(self.role.pipeline, s)}
        self._late, self._now, self._loading = layout.plan.synchronization.late, 0, 0
        copies = 2 if self._late else 1
        self._homes: dict[int, list[Tensor]] = {}
        """Where the weights of each unit lie in host memory: in one of two places by turns, if updates come late."""

        def lies(index: int, like: Tensor, count: int) -> list[Tensor]:
            return [mapped(f"{made[0]}/{index}.{k}", count, like.dtype) for k in range(copies)]

        for u, unit in self.units.items():
            home = unit.paged["weights"][0][1]
            self._homes[u] = lies(u, home, home.numel()) if owner[u] == self.role.stage else [
                home, *(torch.zeros_like(home) for _ in range(copies - 1))]
            unit.settle(self._homes[u][0])
        dist.barrier(self.fabric.world)
        self._guests: dict[int, Guest] = {}
        self.modules.update(ahead)
        for b in ahead:
            for u in layout.units_of_block[b]:
                if u not in self.units and u not in self._guests:
                    guest = self._guests[u] = Guest(u, layout, job, self.device)
                    self._homes[u] = lies(u, guest.compute.data, layout.units[u].elements)
                    bind(guest, dict(ahead), layout, self.rank)
                    guest.free("weights")
        self._lent = {b: [self._guests[u] if u in self._guests else self.units[u] for u in layout.units_of_block[b]]
                      for lo, hi in self.stage.ahead for b in range(lo, hi)}
        self._steps = 0
        """Steps made."""
        self.readings: deque[Met] = deque(maxlen=REMEMBERED)
        """The weights that the latest micro-batches met, if updates come late."""
        dist.barrier(self.fabric.world)
        if dist.get_rank(self.fabric.world) == 0:
            shutil.rmtree(made[0])  # the memory stays as long as somebody maps it

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Before anybody loads, all have written back what they updated."""
        for unit in self.units.values():
            for flat, _ in unit.paged["weights"]:
                flat.wait()
        if self._late and not self._steps:  # there is nothing older yet
            for u in self.units:
                self._homes[u][1 - self._now].copy_(self._homes[u][self._now])
        self._loading = 1 - self._now if self._late else 0
        dist.barrier(self.fabric.world)
        super().begin(*args, **kwargs)

    def end(self) -> StepResult:
        if self._late:
            made = self._step_of(max(0, self._steps - 1))
            self.readings += [Met(self._step_of(self._steps), m, made, made, made, self._step_of(self._steps))
                              for m in range(len(self._sizes))]
            self._now = 1 - self._now
            for u, unit in self.units.items():
                unit.settle(self._homes[u][self._now])
        self._steps += 1
        return super().end()

    def _step_of(self, count: int) -> int:
        """Steps done when so many were done by this process."""
        return self.units[self.stage.held[0]].optimizer.steps - self._steps - 1 + count

    def _norm(self, action: Action) -> None:
        super()._norm(action)
        self._loading = self._now  # what is updated is the newest

    def _page(self, action: Action) -> None:
        """Updated weights go where those of the step before were: whoever computed with them has done so."""
        if action.op in (LOAD_WEIGHTS, SAVE_WEIGHTS):
            unit = self._paged(action.lo)
            home = self._homes[action.lo][self._loading if action.op == LOAD_WEIGHTS or not self._late else
                                          1 - self._now]
            unit.paged["weights"] = [(unit.paged["weights"][0][0], home)]
        super()._page(action)

    def _step(self, action: Action) -> None:
        unit = self.units[action.lo]
        if unit.hosted and self._late:  # which the host makes in place
            home = self._homes[action.lo][1 - self._now]
            home.copy_(self._homes[action.lo][self._now])
            unit.settle(home)
        super()._step(action)

    def _paged(self, index: int) -> Paged:
        return self._guests[index] if index in self._guests else self.units[index]

    @torch.no_grad()
    def _ahead(self, action: Action) -> None:
        """Forward, to keep nothing but what others need."""
        x = self._input(action)
        for b in range(action.lo, action.hi):
            for unit in self._lent[b]:
                unit.compute.wait()
            with self.recorder.span("compute", f"C{b}.{action.mb}", "forward"):
                x = self._run(b, x, action.mb)
            self._watch(x, b, action.mb, backward=False)
            self._mark(f"C{b}.{action.mb}")
        self._values["x", action.hi, action.mb] = x
        if action.hi in self._entries:
            self._values["entry", action.hi, action.mb] = x

    def _input(self, action: Action) -> Tensor:
        if action.op != AHEAD and action.lo in self._entries:
            return self._take("entry", action.lo, action.mb)
        return super()._input(action)

    def _forward(self, action: Action) -> None:
        super()._forward(action)
        self._values.pop(("x", action.hi, action.mb), None)  # the leg above has done with it
