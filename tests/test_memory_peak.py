"""Predicted peaks of tensor memory against what a step holds, storage by storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from benchmarks.memory import LIMIT, SETTINGS, peaks

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SETTINGS)
def test_peak_is_within_five_per_cent(name: str) -> None:
    predicted, counted = peaks(**SETTINGS[name])
    assert predicted == pytest.approx(counted, rel=LIMIT)
