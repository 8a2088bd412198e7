"""What the devices and links of a testbed really do: profiles of the throttled ranks, latency of the veth pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mixfleet.calibrate.kernels import profile_job
from mixfleet.calibrate.links import latency_s
from mixfleet.calibrate.pinned import run_pinned
from mixfleet.cluster import Cluster
from mixfleet.job import Job
from mixfleet.testbed.bed import LATENCY_S, Testbed


def profile(bed: Testbed, cluster: Cluster, job: Job, *, micro_batches: Sequence[int] = (),
            note: Callable[[str], None] = lambda _: None) -> Cluster:
    """`cluster` as the testbed realises it, with the block times of `job` under the quotas of the devices.

    Rates of links are those of the file; only the latency is measured, where it cannot be set.
    """
    with bed.unthrottled() as throttle:
        here = bed.realised(cluster, latency(bed))
        return profile_job(job, here, micro_batches=micro_batches, links=False, enter=bed.enter,
                           environment=bed.enter.environment, loaded=throttle, note=note)


def latency(bed: Testbed) -> float:
    """Seconds of a NIC: half of what small messages between all the nodes take; a stated default for one node."""
    first = [next(s for s in bed.layout.seats if s.node == node) for node in bed.layout.nodes]
    if len(first) < 2:
        return LATENCY_S
    rounds = run_pinned("mixfleet.calibrate.links:small_exchange", [s.cores for s in first], {},
                        enter=bed.enter.only([s.rank for s in first]), environment=bed.enter.environment)
    return latency_s(rounds) / 2
