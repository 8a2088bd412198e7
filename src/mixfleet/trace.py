"""What happened, or is predicted to happen, on every device: the one record that all reports read."""

from __future__ import annotations

from typing import Any, NamedTuple

from mixfleet.spec import Spec

CATEGORIES = ("forward", "backward", "recompute", "tensor", "send", "recv", "gather", "reduce", "optimizer", "host")
"""What a span does. `tensor` is tensor-parallel communication, `gather` and `reduce` move weights and gradients."""
STREAMS = ("compute", "p2p", "gather", "reduce")


class Span(NamedTuple):
    """One stretch of work of one stream of one device."""

    device: int
    stream: str
    name: str
    category: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


class MemoryMark(NamedTuple):
    """Bytes held by one device from `time_ns` on, split by what holds them."""

    device: int
    time_ns: int
    total_bytes: int
    what: str


class Trace(Spec, frozen=True, kw_only=True, dict=True):
    """Spans and memory marks of one or more steps.

    `meta` carries what readers need besides: `kind` (`predicted` or `measured`), step boundaries `steps_ns`
    (list of [start, end]), `device_names`, `tokens_per_step`, `model_flops_per_step`, `peak_flops` per device,
    and `multiplicity` (how many identical devices each device row stands for).
    """

    spans: tuple[Span, ...]
    memory: tuple[MemoryMark, ...] = ()
    meta: dict[str, Any] = {}
