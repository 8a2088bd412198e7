"""The order of NeuSight's convolutions, and what of their times is taken for the host's."""

import numpy as np
import pytest

from mixfleet.calibrate import drift
from mixfleet.calibrate.tables import read
from mixfleet.calibrate.validate import kernels as validate
from mixfleet.cost import query

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
FIRST, FOURTH = (38, 893, 5, 326), (5, 119, 24, 758)
"""Of the file of shapes that NeuSight publishes."""


def test_shapes_come_in_the_order_of_the_published_file():
    assert len(drift.order()) == drift.SHAPES
    assert (drift.order()[FIRST], drift.order()[FOURTH]) == (0, 3)


def test_the_host_never_takes_less_later():
    for grown_us in drift.GROWN_US.values():
        assert grown_us[0] == 0
        assert list(grown_us) == sorted(grown_us)


def test_tables_tell_what_the_host_grew_by_and_validation_counts_it(tmp_path):
    """At place 2250, half of the way from the fifth point to the sixth; other sources and shapes stay as they are."""
    middle = next(shape for shape, place in drift.order().items() if place == 2250)
    shapes = [middle, FIRST, middle, (2, 3, 7, 11)]
    frame = pandas.DataFrame(shapes, columns=drift.NAMES).assign(
        source=["neusight", "neusight", "other", "neusight"], gpu="P100-PCIe-16GB", op="conv2d_fwd", dtype="fp32",
        r=3, s=3, pad=1, pad_w=1, time_us=1000.0)
    frame["w"] = frame["h"]
    frame.to_parquet(tmp_path / "conv.parquet")
    table = read(tmp_path / "conv.parquet")
    assert np.allclose(table.time_s * 1e6, 1000)
    assert np.allclose(table.host_s * 1e6, [(200 + 300) / 2, 0, 0, 0])
    rows = validate(tmp_path / "conv.parquet", print).rows
    kernels = query.predict("conv", table.columns, table.devices, emulate=True)
    assert [r.measured_s for r in rows] == pytest.approx([1e-3] * 4)
    assert [r.predicted_s for r in rows] == pytest.approx((kernels.time_s + table.host_s).tolist())
