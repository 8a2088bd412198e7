"""A rank's watchdog: an action that takes longer than the patience ends the rank, and says what it was.

A network path that is cut without a word leaves both ends waiting, and neither TCP nor a collective library gives up
soon: TCP's own limit grows with the round trip that it measured, to a quarter of an hour.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mixfleet.run.crew import Crew
from mixfleet.run.interpreter import Interpreter


class Watch:
    """Looks after an interpreter from a thread of its own; `give_up` is called once, there, with the message."""

    def __init__(self, interpreter: Interpreter | Crew, patience_s: float, give_up: Callable[[str], None]) -> None:
        self._interpreter, self._patience_s, self._give_up = interpreter, patience_s, give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(min(0.5, self._patience_s / 4)):
            now = self._interpreter.now
            if now and time.monotonic() - now[1] > self._patience_s:
                moves = self._interpreter.under_way()
                self._give_up(f"has been at {now[0]} for {self._patience_s:g} s"
                              + (f" (under way: {moves})" if moves else ""))
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()
