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


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Four gloo ranks that carry out one case after another."""
    from run_pool import Pool

    made = Pool()
    yield made
    made.close()
