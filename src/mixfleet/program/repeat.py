"""An asynchronous program for any number of updates, from one that shows how it fills, repeats itself and drains."""

from __future__ import annotations

from collections.abc import Sequence

from mixfleet.program.action import ANTICIPATE, DROP, KEEP, PUBLISH, PULL, PUSH, STEP, SYNC, USE, Action
from mixfleet.schedule.asynchronous import CURRENT


class Repeated:
    """The actions of a role, update by update, for as many updates as wanted.

    `actions` are its program of some updates (`schedule.asynchronous.enough`), `micro_batches` those of one update,
    `depth` the updates that fill and drain take. With `waves` every micro-batch makes an update of its own, and those
    of the job are waves.
    """

    def __init__(self, actions: Sequence[Action], micro_batches: int, depth: int, *, waves: bool = False) -> None:
        self._size, self._tail, self._steady = micro_batches, depth + 2, depth + 2
        self._steps = micro_batches if waves else 1
        last = (STEP, PUBLISH, PUSH, SYNC, PULL) if waves else (STEP, PUBLISH)
        self._parts: list[list[Action]] = [[]]
        first, made = next((a.lo for a in actions if a.op == STEP), -1), 0
        for action in actions:
            if made == self._steps and action.op not in last:
                self._parts.append([])
                made = 0
            made += action.op == STEP and action.lo == first
            self._parts[-1].append(action)

    @property
    def least(self) -> int:
        """Updates below which a program of its own is needed."""
        return len(self._parts)

    def update(self, number: int, updates: int) -> list[Action]:
        """The actions up to the end of an update, the program spanning `updates` in all."""
        assert number < updates >= self.least
        left = updates - number
        source = self.least - left if left <= self._tail else min(number, self._steady)
        return [self._later(a, number - source) for a in self._parts[source]] if number > source else \
            self._parts[source]

    def _later(self, action: Action, updates: int) -> Action:
        if action.op in (KEEP, ANTICIPATE, USE, DROP):
            return action._replace(mb=action.mb + updates * self._steps if action.mb != CURRENT else CURRENT)
        if action.op in (PUSH, SYNC, PULL):
            return action._replace(mb=action.mb + updates) if action.mb >= 0 else action
        return action._replace(mb=action.mb + updates * self._size) if action.mb >= 0 else action
