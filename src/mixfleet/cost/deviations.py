"""What a few measurements of a device say about all its kernels (after PerfVec, Li et al., 2024).

What kernels ask for, and how efficiency depends on it, stays as fitted on all devices; only the device's side is
fitted: how it deviates from what its relatives let expect, as a whole, by library, by pipeline, by kind of demand, by
shape, and among kernels that the learned layer takes for alike. That is a Gaussian process (Rasmussen and Williams,
2006), so few measurements change little and none are overrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.spec import Spec

if TYPE_CHECKING:
    from mixfleet.cost.demand import Array
    from mixfleet.cost.learned import Forest, Inputs

DEVICE, SOURCE, BACKEND, PIPELINE, DEMAND, SHAPE, ALIKE = 0.2, 0.1, 0.1, 0.2, 0.1, 0.1, 0.2
"""Standard deviations of log(measured / predicted) between relatives: of the whole device, of a source, of a backend
and type, of each pipeline's part of the bound, of a kind of demand, of a shape, and of kernels that fall into the same
leaves. Chosen on 16-bit products and norms with devices left out; few measurements and many are equally good within a
factor of two of them."""
NOISES = (0.05, 0.1)
"""Standard deviation of log(measured / predicted) that no device's deviation explains, and"""
SCALES = (0.3, 1.0, 2.0)
"""what the others are multiplied by: the likeliest pair is taken, since devices with close relatives deviate little."""
ROUNDS = 4
SIMILAR = 2.0
"""Unit of the coordinates: a factor of e^2 in what a kernel asks for or in a size."""


class Places(NamedTuple):
    """Where kernels lie, as far as deviations depend on it; one row each."""

    points: Array
    """[rows, 3 and more]: how far above the floor, tensor against DRAM time, waves, then the shape."""
    shares: Array
    """[rows, 4]: of the bound, floor, tensor time, DRAM time, and all but the floor."""
    leaves: NDArray[np.uint8]
    """[rows, trees]"""
    texts: Sequence[tuple[str, ...]]
    """Source, backend and type of each `which`."""
    which: NDArray[np.intp]

    @staticmethod
    def of(x: Inputs, forest: Forest, texts: Sequence[tuple[str, ...]], which: NDArray[np.intp],
           rows: NDArray[np.intp]) -> Places:
        """Of some rows of the inputs; `which` of the texts is what ran in each of those."""
        column = {name: i for i, name in enumerate(x.names)}
        features = x.features[rows]

        def log(name: str) -> Array:
            return features[:, column[name]].astype(float)

        shape = [log(name) for name in x.names if name.startswith("shape.")]
        points = [log("bound/floor"), np.clip(log("total.tensor") - log("total.dram"), -6, 6), log("waves"), *shape]
        floor = np.exp(-log("bound/floor"))
        shares = [floor, np.exp(log("total.tensor")), np.minimum(np.exp(log("total.dram")), 1), 1 - floor]
        return Places(np.stack(points, 1) / SIMILAR, np.stack(shares, 1), forest.leaf(features), texts, which)


def covariance(a: Places, b: Places) -> Array:
    """[rows of a, rows of b] of the deviations at a scale of 1."""
    def same(upto: int) -> Array:
        equal = [[x[:upto] == y[:upto] for y in b.texts] for x in a.texts]
        return np.array(equal, float).reshape(len(a.texts), -1)[np.ix_(a.which, b.which)]

    squares = (a.points[:, None, :] - b.points[None, :, :]) ** 2
    demand, shape = squares[..., :3].sum(2), squares[..., 3:].sum(2)
    alike = np.stack([(a.leaves == leaf).mean(1) for leaf in b.leaves], 1)
    return np.asarray(DEVICE**2 + SOURCE**2 * same(1) + BACKEND**2 * same(3) + PIPELINE**2 * (a.shares @ b.shares.T)
                      + DEMAND**2 * np.exp(-demand / 2) + SHAPE**2 * same(1) * np.exp(-(demand + shape) / 2)
                      + ALIKE**2 * alike)


def design(places: Places, count: int) -> list[int]:
    """Which kernels to measure: the rows that tell most about all, one after another, whatever their times will be.

    Each leaves the least variance, summed over all rows, under the deviations that are expected.
    """
    left = covariance(places, places)
    noise = max(NOISES)**2
    chosen: list[int] = []
    for _ in range(min(count, len(left))):
        gain = (left**2).sum(0) / (np.diag(left) + noise)
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + noise)
    return chosen


class Deviations(Spec, frozen=True, kw_only=True):
    """What measurements of a device add to its factors: log(measured / predicted), expected where it was not measured.
    """

    points: tuple[tuple[float, ...], ...]
    shares: tuple[tuple[float, ...], ...]
    leaves: tuple[bytes, ...]
    texts: tuple[tuple[str, ...], ...]
    """`Places` of the measured kernels."""
    weights: tuple[float, ...]
    scale: float

    @staticmethod
    def of(places: Places, residual: Array) -> Deviations:
        """From log(measured / predicted) [rows] of the measured kernels."""
        scale, weights = _likeliest(covariance(places, places), residual)
        return Deviations(points=tuple(map(tuple, places.points.tolist())),
                          shares=tuple(map(tuple, places.shares.tolist())),
                          leaves=tuple(row.tobytes() for row in places.leaves),
                          texts=tuple(places.texts[i] for i in places.which), weights=tuple(weights.tolist()),
                          scale=scale)

    def at(self, places: Places) -> Array:
        """[rows]: expected log(measured / predicted)."""
        leaves = np.frombuffer(b"".join(self.leaves), np.uint8).reshape(len(self.leaves), -1)
        mine = Places(np.array(self.points), np.array(self.shares), leaves, self.texts, np.arange(len(self.texts)))
        return np.asarray(self.scale**2 * (covariance(places, mine) @ np.array(self.weights)))


def _likeliest(like: Array, residual: Array) -> tuple[float, Array]:
    """The scale under which the residuals are likeliest, and the weights of the measurements."""
    found = []
    for scale in SCALES:
        for least in NOISES:
            prior, noise = scale**2 * like, np.full(len(residual), least**2)
            for _ in range(ROUNDS):
                weights = np.linalg.solve(prior + np.diag(noise), residual)
                # a residual far off counts less, as under a heavy-tailed noise
                noise = least**2 * (1 + ((residual - prior @ weights) / (2 * least)) ** 2)
            total = prior + np.diag(noise)
            fit = residual @ np.linalg.solve(total, residual)
            found.append((-fit - np.linalg.slogdet(total)[1], scale, weights))
    best = max(range(len(found)), key=lambda i: float(found[i][0]))
    return found[best][1], np.asarray(found[best][2], float)
