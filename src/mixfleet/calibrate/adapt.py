"""A device's effective factors from a few measurements of it (after PerfVec, Li et al., 2024).

What kernels ask for, and how efficiency depends on it, stays as fitted on all devices; only the device's side is
fitted: its chip, DRAM and floor factors and one on all times. Each starts from what its relatives have and is held
near it, the more loosely the more measurements there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mixfleet.cluster import Device
from mixfleet.cost import learned, query
from mixfleet.cost.learned import Factors, Layer
from mixfleet.errors import InputError

STEPS = np.exp(np.linspace(-0.6, 0.6, 13))
"""Factors tried on each starting value."""
SPREAD = 0.3
"""Of the logarithm of such a factor between relatives."""
ROUNDS = 2


def adapt(device: Device, kind: str, columns: Mapping[str, Any], time_s: Any, *, emulate: bool = False,
          known: bool = False, layer: Layer | None = None) -> dict[str, Factors]:
    """Factors for `query.predict(..., factors=)` from measured kernels of one group (see `query.group_of`).

    `columns` as for `query.predict`, `time_s` [rows]. `known=False` starts from the relatives even of a device that the
    coefficients know. InputError if there are no rows, times that are not positive, or rows of several groups.
    """
    layer = layer or learned.load()
    time = np.atleast_1d(np.asarray(time_s, float))
    if not time.size or not np.all(time > 0):
        raise InputError("adapt needs at least one measurement, each with a positive time")
    full = query.complete(kind, columns)
    pairs, _ = query.texts_of(full, ("dtype", "op"), time.size)
    names = {query.group_of(kind, *pair) for pair in pairs}
    if len(names) > 1:
        raise InputError(f"the measurements are of {', '.join(sorted(names))}; adapt takes one of them at a time")
    start = learned.factors_of(layer.groups[names.pop()], device, layer.relatives, known=known)
    rows = {k: v for k, v in columns.items() if k != "gpu"}

    def factors(scales: Sequence[float], times: float = 1.0) -> Factors:
        chip, dram, floor = scales
        return Factors(chip={k: v * chip for k, v in start.chip.items()}, dram=start.dram * dram,
                       floor_s={k: v * floor for k, v in start.floor_s.items()}, times=times)

    def errors(scales: list[float]) -> Any:
        found = query.predict(kind, rows, device, emulate=emulate, layer=layer,
                              factors={device.name: factors(scales)})
        return np.log(time / found.time_s)

    def shift(residual: Any) -> float:
        """The constant factor, shrunk towards 1 as if one more measurement had said so."""
        return float(np.median(residual)) * time.size / (time.size + 1)

    def loss(scales: list[float]) -> float:
        residual = errors(scales)
        constant = shift(residual)
        held = (sum(np.log(s) ** 2 for s in scales) + constant**2) / (2 * SPREAD**2)
        return float(np.abs(residual - constant).sum() / 0.1 + held)

    scales = [1.0, 1.0, 1.0]
    for _ in range(ROUNDS if time.size > 2 else 0):
        for i in range(len(scales)):
            tried = [[*scales[:i], float(step), *scales[i + 1:]] for step in STEPS]
            scales = min(tried, key=loss)
    return {device.name: factors(scales, float(np.exp(shift(errors(scales)))))}
