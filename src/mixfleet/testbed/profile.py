"""What the devices and links of a testbed really do: profiles of the throttled ranks, latency of the veth pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mixfleet.calibrate.kernels import profile_job
from mixfleet.calibrate.pinned import run_pinned
from mixfleet.cluster import Cluster
from mixfleet.job import Job
from mixfleet.testbed.bed import Testbed


def profile(bed: Testbed, cluster: Cluster, job: Job, *, micro_batches: Sequence[int] = (),
            note: Callable[[str], None] = lambda _: None, run: Callable[..., list[Any]] = run_pinned) -> Cluster:
    """`cluster` as the testbed realises it, with the block times of `job` under the quotas of the devices.

    Rates of links are those of the file; only the latency is measured, where it cannot be set, and stands as a stated
    default where there is one node. `run` may stand in for `run_pinned`, with processes that are at their seats.
    """
    with bed.unthrottled() as throttle:
        return profile_job(job, bed.realised(cluster), micro_batches=micro_batches, links=False, enter=bed.enter,
                           environment=bed.enter.environment, loaded=throttle, note=note, run=run,
                           late=lambda seconds: bed.realised(cluster, seconds))
