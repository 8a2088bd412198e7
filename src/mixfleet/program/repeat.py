"""An asynchronous program for any number of updates, from one that shows how it fills, repeats itself and drains."""

from __future__ import annotations

from collections.abc import Sequence

from mixfleet.program.action import ANTICIPATE, DROP, KEEP, PUBLISH, STEP, USE, Action
from mixfleet.schedule.asynchronous import CURRENT


class Repeated:
    """The actions of a role, update by update, for as many updates as wanted.

    `actions` are its program of some updates (`schedule.asynchronous.enough`), `micro_batches` those of one update,
    `depth` the updates that fill and drain take.
    """

    def __init__(self, actions: Sequence[Action], micro_batches: int, depth: int) -> None:
        self._size, self._tail, self._steady = micro_batches, depth + 2, depth + 2
        self._parts: list[list[Action]] = [[]]
        for action in actions:
            if self._parts[-1] and self._parts[-1][-1].op in (STEP, PUBLISH) and action.op not in (STEP, PUBLISH):
                self._parts.append([])
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
            return action._replace(mb=action.mb + updates if action.mb != CURRENT else CURRENT)
        return action._replace(mb=action.mb + updates * self._size) if action.mb >= 0 else action
