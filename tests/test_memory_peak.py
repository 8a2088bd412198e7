"""Predicted peaks of tensor memory against what a step holds, storage by storage."""

from __future__ import annotations

import pytest
import torch
from benchmarks.memory import LIMIT, SETTINGS, peaks

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("name", SETTINGS)
def test_peak_is_within_five_per_cent(name: str) -> None:
    predicted, counted = peaks(**SETTINGS[name])
    assert predicted == pytest.approx(counted, rel=LIMIT)
