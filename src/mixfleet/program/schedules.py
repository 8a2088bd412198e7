"""Pipeline schedules: the order of forwards and backwards of one stage. Nothing else is decided here.

A generator takes (stage, stages, micro-batches) and yields (op, micro-batch); passes add everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mixfleet.program.action import B, F

Step = tuple[str, int]


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[Step]:
    """All forwards, then all backwards (Huang et al., 2019). Holds every micro-batch."""
    yield from ((F, m) for m in range(micro_batches))
    yield from ((B, m) for m in range(micro_batches))


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[Step]:
    """Warm up, alternate, drain (PipeDream-Flush; Narayanan et al., 2021). Stage i holds min(stages - i, m)."""
    warm = min(stages - stage - 1, micro_batches)
    yield from ((F, m) for m in range(warm))
    for m in range(micro_batches):
        if m + warm < micro_batches:
            yield F, m + warm
        yield B, m


SCHEDULES: dict[str, Callable[[int, int, int], Iterator[Step]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
