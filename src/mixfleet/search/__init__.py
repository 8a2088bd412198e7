"""Which plan is best, why, and what was rejected and why."""

from mixfleet.search.finder import best_plan, find
from mixfleet.search.reschedule import reschedule
from mixfleet.search.result import (
    Alternative,
    LeftOver,
    NearestMiss,
    Objective,
    Ranked,
    Rejection,
    SearchResult,
)
from mixfleet.search.space import Limits, enumerate_all

__all__ = ["Alternative", "LeftOver", "Limits", "NearestMiss", "Objective", "Ranked", "Rejection", "SearchResult",
           "best_plan", "enumerate_all", "find", "reschedule"]
