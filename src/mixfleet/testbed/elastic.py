"""Training that goes on with what is left after a loss, and with everything again when it returns.

A run is a sequence of legs. Each leg plans for the nodes that are on the network, resumes from the newest checkpoint
(which any plan can read) and trains until it is done, something fails, or a node comes back; a node that comes back
ends the leg after the step under way, with a checkpoint. Only what a checkpoint holds counts as trained, and the order
of samples belongs to the job, so no sample that counts is trained twice or left out.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, RunError
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.run.launch import train
from mixfleet.run.metrics import StepMetrics
from mixfleet.search import find
from mixfleet.sim import predict
from mixfleet.spec import Spec
from mixfleet.testbed.bed import Testbed
from mixfleet.testbed.faults import Schedule, explained, injected

FAILURES = 5
"""Legs that may fail without a step done before the run is given up."""
PATIENCE_S = 8.0
"""Beyond a step: without a sign of life or in one action, after that long a rank is lost."""
_LOOK_S = 0.2


class Leg(Spec, frozen=True, kw_only=True):
    """One stretch of training under one plan."""

    first_step: int
    """Steps that were done before it."""
    last_step: int
    """Steps that are done and saved after it."""
    nodes: tuple[str, ...]
    plan: Plan
    """Ranks are numbered through `nodes`."""
    seconds: float
    failure: str = ""
    noticed_s: float = 0.0
    """From the last step done to the failure's message."""


def without(cluster: Cluster, lost: set[str]) -> tuple[Cluster, tuple[int, ...]]:
    """The cluster of the nodes that are left, and its ranks' numbers in the whole one. InputError for none."""
    kept = [i for i, node in enumerate(cluster.nodes) if node.name not in lost]
    if not kept:
        raise InputError(f"no node of {cluster.name} is left")
    ranks = tuple(r for i in kept for r in cluster.ranks_of_node[i])

    def some(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(rows[i][j] for j in kept) for i in kept) if rows else ()

    return cluster.replace(nodes=tuple(cluster.nodes[i] for i in kept), node_latency_s=some(cluster.node_latency_s),
                           node_matrix_Bps=some(cluster.node_matrix_Bps)), ranks


def train_elastically(bed: Testbed, cluster: Cluster, job: Job, out: Path, *, steps: int, checkpoint_every: int,
                      schedule: Schedule | None = None, patience_s: float = PATIENCE_S, base: Path | str = "",
                      plan_for: Callable[[Job, Cluster], Plan] | None = None,
                      say: Callable[[str], None] = lambda line: None) -> list[Leg]:
    """Train to `steps`, whatever fails; the legs it took. `cluster` is the one to plan with (`profile`).

    `plan_for` gives the plan of a leg, by default the best that the search finds. Call it in the main thread: a
    returning node ends a leg by a signal. InputError if no plan fits what is left; RunError after several failures
    without a step between them.
    """
    legs: list[Leg] = []
    failed = 0
    with injected(bed, schedule) as struck:
        while not legs or legs[-1].last_step < steps:
            done = newest(out)
            lost = set(bed.unplugged())
            part, ranks = without(cluster, lost)
            plan = (plan_for or best_plan)(job, part)
            used = dict.fromkeys(part.nodes[part.node_of[r]].name for r in plan.ranks)
            say(f"step {done}: {len(plan.ranks)} of {len(ranks)} devices, on {', '.join(used)}")
            start = last = time.monotonic()

            failure, noticed_s = "", 0.0
            with _returns(bed, lost), bed.unthrottled() as throttle:
                def on_step(report: StepMetrics, throttle: Callable[[], None] = throttle) -> None:
                    nonlocal last
                    last = time.monotonic()
                    throttle()
                    struck(report.step)

                try:
                    train(plan, job, part, steps=steps, out_dir=out, checkpoint_every=checkpoint_every, base=base,
                          resume=out / "checkpoints" if done else "", enter=bed.enter.only(ranks), on_step=on_step,
                          rendezvous=bed.rendezvous([ranks[r] for r in plan.ranks]),
                          patience_s=patience_s + predict(plan, job, part).step_s)
                except (RunError, InputError) as error:
                    noticed_s = time.monotonic() - last
                    failure = str(explained(bed, RunError(str(error))))
                    say(failure)
            legs.append(Leg(first_step=done, last_step=newest(out), nodes=tuple(n.name for n in part.nodes),
                            plan=plan, seconds=time.monotonic() - start, failure=failure, noticed_s=noticed_s))
            failed = failed + 1 if failure and legs[-1].last_step == done else 0
            if failed == FAILURES:
                raise RunError(f"{FAILURES} attempts failed without a checkpoint between them; the last: {failure}")
    return legs


def best_plan(job: Job, cluster: Cluster) -> Plan:
    """What the search finds; InputError if nothing fits."""
    best = find(job, cluster, top=1).best
    if best is None:
        names = ", ".join(node.name for node in cluster.nodes)
        raise InputError(f"no plan for {job.name} fits what is left of {cluster.name}: {names}")
    return best.plan


def newest(out: Path) -> int:
    """Steps done according to the newest checkpoint of a run; 0 if there is none."""
    from mixfleet.run.checkpoint import Reader, latest

    path = latest(out / "checkpoints") if (out / "checkpoints").is_dir() else None
    return Reader(path).state.step if path else 0


@contextmanager
def _returns(bed: Testbed, lost: set[str]) -> Iterator[None]:
    """Asks this process to end its leg when one of the lost nodes is back."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if lost - set(bed.unplugged()):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, daemon=True)
    if lost:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if lost:
            thread.join()
