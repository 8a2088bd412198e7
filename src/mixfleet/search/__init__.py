"""Which plan is best, why, and what was rejected and why."""

from mixfleet.search.result import (
    Alternative,
    LeftOver,
    NearestMiss,
    Objective,
    Ranked,
    Rejection,
    SearchResult,
)

__all__ = ["Alternative", "LeftOver", "NearestMiss", "Objective", "Ranked", "Rejection", "SearchResult"]
