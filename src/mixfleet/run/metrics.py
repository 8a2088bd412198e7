"""What a run reports while it trains: one JSON line per step, and progress on the terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import IO, Any

from mixfleet.errors import InputError
from mixfleet.files import write_text
from mixfleet.spec import Spec
from mixfleet.units import show_bytes, show_count, show_seconds

METRICS = "metrics.jsonl"
"""The file in a run's folder."""
_LINE_EVERY_S = 1.0


class StepMetrics(Spec, frozen=True, kw_only=True):
    """One optimizer step. `step` counts from 1; `loss` is the mean over the step's valid `tokens`."""

    step: int
    loss: float
    tokens: int
    seconds: float
    lr: float
    grad_norm: float
    bytes_sent: int | None = None
    note: str = ""
    """What is out of the ordinary: a step left out, samples that moved."""
    padding: float | None = None
    """Where samples differ in length: share of positions that held no token."""
    imbalance: float | None = None
    """And by how much the slowest replica computes longer than the mean, by the cost model."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def record(self) -> dict[str, Any]:
        """A plain mapping; numbers that are not finite become null, which JSON has no other way to say."""
        values = {field: getattr(self, field) for field in self.__struct_fields__} | {"tokens_per_s": self.tokens_per_s}
        for field in ("note", "padding", "imbalance"):
            if values[field] in ("", None):
                del values[field]
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def __str__(self) -> str:
        sent = "" if self.bytes_sent is None else f"  sent {show_bytes(self.bytes_sent)}"
        return (f"step {self.step}  loss {self.loss:.4f}  {show_count(self.tokens_per_s)} tokens/s  "
                f"{show_seconds(self.seconds)}  lr {self.lr:.3g}  norm {self.grad_norm:.3g}{sent}"
                f"{'' if self.padding is None else f'  padding {self.padding:.0%}'}"
                f"{f'  {self.note}' if self.note else ''}")


class Reporter:
    """Writes metrics to `path` and shows progress on `stream`; a context manager.

    A run that resumes after `first_step` steps drops the lines of later steps: they are trained again. On a terminal
    progress is a bar at the bottom, elsewhere plain lines, at most one per second besides the first and the last.
    """

    def __init__(self, path: Path | None, steps: int, *, first_step: int = 0, stream: IO[str] | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stderr
        self._file = _opened(path, first_step) if path else None
        self._bar: Any = None
        self._first, self._shown_s = first_step + 1, -math.inf
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(BarColumn(20), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                                 TimeRemainingColumn(), TextColumn("{task.description}"),
                                 console=Console(file=self._stream))
            self._bar.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> Reporter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()
        if self._file:
            self._file.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one step."""
        if self._file:
            self._file.write(json.dumps(metrics.record(), allow_nan=False) + "\n")
            self._file.flush()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=metrics.step, description=str(metrics))
        elif (metrics.note or metrics.step in (self._first, self._steps)
              or time.monotonic() - self._shown_s >= _LINE_EVERY_S):
            self._shown_s = time.monotonic()
            self.note(str(metrics).replace(f"step {metrics.step}", f"step {metrics.step}/{self._steps}", 1))

    def note(self, text: str) -> None:
        """A line of progress, such as a saved checkpoint."""
        if self._bar:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)


def _opened(path: Path, first_step: int) -> IO[str]:
    """The file, open for appending, with the lines of steps up to `first_step` only."""
    try:
        kept = [line for line in path.read_text().splitlines() if _step(line) <= first_step] if path.exists() else []
        write_text(path, "".join(line + "\n" for line in kept))
        return path.open("a")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _step(line: str) -> float:
    """The step of a line; one that was cut off by a kill counts as later than any."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
