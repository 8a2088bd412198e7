"""Cutting a chain of blocks into stages: exact dynamic programming on the slowest stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]
"""`[lo, hi]` holds a figure of a stage with blocks lo to hi - 1; only hi > lo counts."""


def partition(costs: Sequence[Matrix]) -> tuple[int, ...] | None:
    """Cut points 0 = c0 < c1 < ... < cp = blocks for which the largest cost of a stage is least.

    `costs[i]` is the cost matrix of stage i, `inf` where a range does not fit. None if there is no way. Of equal
    solutions it takes the one whose first stages are smallest.
    """
    blocks = costs[0].shape[0] - 1
    if len(costs) > blocks:
        return None
    best = np.full(blocks + 1, np.inf)
    best[0] = 0.0
    froms = []
    for cost in costs:
        worst = np.maximum(best[:, None], cost)
        came = worst.argmin(axis=0)
        best = worst[came, np.arange(blocks + 1)]
        froms.append(came)
    if not np.isfinite(best[blocks]):
        return None
    cuts = [blocks]
    for came in reversed(froms):
        cuts.append(int(came[cuts[-1]]))
    return tuple(reversed(cuts))
