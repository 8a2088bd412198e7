"""Settings of all tests, and the processes that they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from run_pool import Pool

# A busy machine must not fail a test, and a failure must come back on the next run.
settings.register_profile("mixfleet", deadline=None, derandomize=True,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mixfleet")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo ranks that carry out one case after another. To start them takes seconds, in every module."""
    from run_pool import Pool

    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
