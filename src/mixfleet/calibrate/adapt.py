"""What a few measurements of a device say about all its kernels (after PerfVec, Li et al., 2024).

What kernels ask for, and how efficiency depends on it, stays as fitted on all devices; only the device's side is
fitted: how it deviates from what its relatives let expect, as a whole, by library, by kind of demand and by shape. That
is a Gaussian process (Rasmussen and Williams, 2006), so few measurements change little and none are overrated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mixfleet.cluster import Device
from mixfleet.cost import learned, query
from mixfleet.cost.demand import Array
from mixfleet.cost.learned import Deviations, Factors, Layer
from mixfleet.errors import InputError

NOISE = 0.1
"""Standard deviation of log(measured / predicted) that no device's deviation explains."""
SCALES = (0.3, 1.0, 2.0)
"""Of the deviations; the likeliest one is taken: devices with close relatives deviate little."""
ROUNDS = 4


def adapt(device: Device, kind: str, columns: Mapping[str, Any], time_s: Any, *, emulate: bool = False,
          known: bool = False, layer: Layer | None = None) -> dict[str, Factors]:
    """Factors for `query.predict(..., factors=)` from measured kernels of one group (see `query.group_of`).

    `columns` as for `query.predict`, `time_s` [rows]. `known=False` starts from the relatives even of a device that the
    coefficients know. InputError if there are no rows, times that are not positive, or rows of several groups.
    """
    layer = layer or learned.load()
    time = np.atleast_1d(np.asarray(time_s, float))
    if not time.size or not np.all((time > 0) & np.isfinite(time)):
        raise InputError("adapt needs at least one measurement, each with a positive time")
    full = query.complete(kind, columns)
    pairs, _ = query.texts_of(full, ("dtype", "op"), time.size)
    names = {query.group_of(kind, *pair) for pair in pairs}
    if len(names) > 1:
        raise InputError(f"the measurements are of {', '.join(sorted(names))}; adapt takes one of them at a time")
    name = names.pop()
    group = layer.groups[name]
    start = learned.factors_of(group, device, layer.relatives, known=known)
    full = query.named({**full, "gpu": device.name}, group)
    x = query.inputs(kind, full, {device.name: device}, {device.name: start}, group.words, emulate=emulate)
    residual = np.log(time / x.bound_s) - layer.forests[name].predict(x.features)
    texts, which = query.texts_of(full, query.TEXTS, time.size)
    points = learned.coordinates(x)
    like = learned.covariance(points, texts, which, points, texts, which)
    scale, weights = _likeliest(like, residual)
    deviations = Deviations(points=tuple(map(tuple, points.tolist())), texts=tuple(texts[i] for i in which),
                            weights=tuple(weights.tolist()), scale=scale)
    return {device.name: start.replace(deviations=deviations)}


def _likeliest(like: Array, residual: Array) -> tuple[float, Array]:
    """The scale under which the residuals are likeliest, and the weights of the measurements."""
    found = []
    for scale in SCALES:
        prior, noise = scale**2 * like, np.full(len(residual), NOISE**2)
        for _ in range(ROUNDS):
            total = prior + np.diag(noise)
            weights = np.linalg.solve(total, residual)
            # a residual far off counts less, as under a heavy-tailed noise
            noise = NOISE**2 * (1 + ((residual - prior @ weights) / (2 * NOISE)) ** 2)
        fit = residual @ np.linalg.solve(prior + np.diag(noise), residual)
        found.append((-fit - np.linalg.slogdet(prior + np.diag(noise))[1], scale, weights))
    best = max(range(len(found)), key=lambda i: float(found[i][0]))
    return found[best][1], np.asarray(found[best][2], float)
