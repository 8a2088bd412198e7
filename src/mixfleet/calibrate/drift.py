"""Host time in NeuSight's convolutions, which grows from shape to shape and is not the kernel's.

Its script (Lee et al., 2025: `neusight/Dataset/collect.py`) times 5,000 random 3x3 convolutions in one process, cuDNN's
search on, with an event before the call and one after it. What the host does between the first event and the launch
grows with the shapes that came before: on A100, P100, P4 and T4 no shape takes less than 59, 108, 73 and 66 us among
the first, and 355, 801, 783 and 456 us among the last 250, however small. Long kernels are longer by as much. Most
other operators of that script keep their floor to the end on A100 and P100; layer norms, linear layers and batched
products, which it takes by size, rise as they grow, and are left as they are. The data has the shapes sorted, but their
order is that in which the generator (`neusight/Dataset/dims.py`) draws them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mixfleet.cost.demand import Array

SOURCE = "neusight"
SEED, SHAPES, MOST_FLOP = 42, 5000, 1e9
"""Of the generator; shapes that take more for one image are drawn again."""
BOUNDS = {"n": (1, 64), "c_in": (3, 2048), "c_out": (3, 2048), "r": (3, 3), "h": (5, 256), "stride": (1, 1),
          "pad": (1, 1)}
"""In the order in which they are drawn."""
NAMES = ("n", "c_in", "h", "c_out")
STEP = 500
GROWN_US = {"A100-PCIe-80GB": (0, 6, 23, 43, 66, 86, 118, 148, 208, 255, 305),
            "P100-PCIe-16GB": (0, 27, 68, 115, 200, 300, 390, 477, 571, 641, 714),
            "P4": (0, 22, 81, 136, 203, 293, 349, 428, 517, 620, 707),
            "T4": (0, 25, 42, 92, 132, 174, 217, 274, 321, 354, 406)}
"""By how much the host's time has grown after each `STEP` shapes: the line through these points from which kernels
predicted below 1 ms deviate least (absolute differences over the prediction; rows that are not held out). Found once,
with the coefficients of convolutions as they were before; `calibrate fit` takes them as given."""


@cache
def order() -> dict[tuple[int, ...], int]:
    """The place of each shape (`NAMES`) in the run."""
    draw, found = random.Random(SEED), dict[tuple[int, ...], int]()
    while len(found) < SHAPES:
        shape = {name: draw.randint(*bounds) for name, bounds in BOUNDS.items()}
        if 2 * shape["c_in"] * shape["c_out"] * shape["r"]**2 * shape["h"]**2 <= MOST_FLOP:
            found[tuple(shape[name] for name in NAMES)] = len(found)
    return found


def host_s(columns: Mapping[str, NDArray[Any]]) -> Array:
    """[rows]: host time beyond that of the run's first shapes, in the times of a table of convolutions."""
    found = np.zeros(len(columns["source"]))
    for gpu, grown_us in GROWN_US.items():
        mine = np.flatnonzero((columns["source"] == SOURCE) & (columns["gpu"] == gpu))
        shapes = zip(*(columns[name][mine].tolist() for name in NAMES))
        place = np.array([order().get(shape, 0) for shape in shapes], float)
        found[mine] = np.interp(place, np.arange(len(grown_us)) * STEP, grown_us) / 1e6
    return found
