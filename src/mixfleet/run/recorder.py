"""What one rank did and held, while recording is on: the measured half of a trace."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mixfleet.trace import MemoryMark, Span

_BLOCKS = ("forward", "backward", "recompute")
"""Categories of what blocks compute."""


class Recorder:
    """Spans by `time.perf_counter_ns` on CPU, by CUDA events on GPUs. Off, it costs next to nothing."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device, self.on = rank, device, False
        self.timed = False
        """Whether the time of computing is added up, for `busy_s`, without recording anything."""
        self._busy: list[tuple[Any, Any]] = []
        self.offset_ns = 0
        """Added to all times: this host's clock against that of the first rank."""
        self._raw: list[tuple[str, str, str, Any, Any]] = []
        self._memory: list[MemoryMark] = []
        self._saved: dict[int, list[int]] = {}
        self._saved_bytes = 0
        self._lock = threading.Lock()
        self._base: tuple[Any, int] | None = None

    def start(self) -> None:
        """Record from now on."""
        self.on = True
        if self.device.type == "cuda" and self._base is None:
            torch.cuda.synchronize()
            self._base = self._now(), time.perf_counter_ns()

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def span(self, stream: str, name: str, category: str) -> Iterator[None]:
        if not self.on and not self.timed:
            yield
            return
        start = self._now()
        yield
        end = self._now()
        if self.timed and category in _BLOCKS:
            self._busy.append((start, end))
        if self.on:
            with self._lock:
                self._raw.append((stream, name, category, start, end))

    def busy_s(self) -> float:
        """Seconds of computing since this was last asked."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            total = sum(start.elapsed_time(end) / 1e3 for start, end in self._busy)
        else:
            total = sum(end - start for start, end in self._busy) / 1e9
        self._busy.clear()
        return float(total)

    def ended(self, stream: str, name: str, category: str, seconds: float) -> None:
        """A span that ends now, timed by someone else on the host; on CUDA that is not when it happens."""
        if self.on and self.device.type != "cuda":
            now = time.perf_counter_ns()
            with self._lock:
                self._raw.append((stream, name, category, now - int(seconds * 1e9), now))

    @contextmanager
    def saving(self, held: list[int], skip: set[int], kept: dict[int, torch.UntypedStorage] | None = None
               ) -> Iterator[None]:
        """Count the storages that autograd keeps from this forward: appended to `held`, those in `skip` left out. The
        same storages come into `kept`, if that is given."""
        if kept is None and (not self.on or self.device.type == "cuda"):
            yield
            return

        def pack(t: torch.Tensor) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in skip:
                self.hold(t, held)
                if kept is not None:
                    kept[storage._cdata] = storage
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield

    def hold(self, t: torch.Tensor, held: list[int]) -> None:
        """Count the storage behind `t` as held by `held`, once for all holders."""
        if not self.on or self.device.type == "cuda" or t.is_meta:
            return
        key = t.untyped_storage()._cdata
        if key not in held:
            held.append(key)
            with self._lock:
                entry = self._saved.setdefault(key, [t.untyped_storage().nbytes(), 0])
                entry[1] += 1
                self._saved_bytes += entry[0] if entry[1] == 1 else 0

    def moved(self, keys: Iterable[int], *, here: bool) -> None:
        """Storages that are counted have gone to the host, or come back."""
        with self._lock:
            for key in keys:
                entry = self._saved.get(key)
                if entry:
                    self._saved_bytes += entry[0] if here else -entry[0]

    def drop(self, held: list[int]) -> None:
        """The holder is gone."""
        with self._lock:
            for key in held:
                entry = self._saved.get(key)
                if entry:
                    entry[1] -= 1
                    if entry[1] == 0:
                        self._saved_bytes -= entry[0]
                        del self._saved[key]

    def mark(self, what: str, state_bytes: int) -> None:
        """Bytes held now: CUDA's allocated memory, or on a CPU the state and saved activations that are counted."""
        if not self.on:
            return
        total = (torch.cuda.memory_allocated(self.device) if self.device.type == "cuda"
                 else state_bytes + self._saved_bytes)
        self._memory.append(MemoryMark(self.rank, time.perf_counter_ns() + self.offset_ns, total, what))

    def stop(self) -> tuple[list[Span], list[MemoryMark]]:
        """Everything recorded so far, in order of start; recording is off afterwards."""
        self.on = False
        spans: list[Span] = []
        if self._base:
            torch.cuda.synchronize()
        inner = sorted((start, end) for _, _, category, start, end in self._raw if category in ("tensor", "expert"))
        for stream, name, category, start, end in self._raw:
            a, b = self._ns(start), self._ns(end)
            if category in _BLOCKS:
                # Collectives inside a block are spans of their own; what computes is what lies between them.
                for lo, hi in inner[bisect_left(inner, (start, 0)):] if inner else ():
                    if lo >= end:
                        break
                    spans.append(Span(self.rank, stream, name, category, a, lo + self.offset_ns))
                    a = hi + self.offset_ns
            if b > a:
                spans.append(Span(self.rank, stream, name, category, a, b))
        memory, self._raw, self._memory = self._memory, [], []
        return sorted(spans, key=lambda s: (s.start_ns, s.stream)), memory

    def _ns(self, moment: Any) -> int:
        if isinstance(moment, int):
            return moment + self.offset_ns
        assert self._base is not None
        event, base_ns = self._base
        return base_ns + int(event.elapsed_time(moment) * 1e6) + self.offset_ns
