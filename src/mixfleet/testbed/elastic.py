"""Training that goes on with what is left after a loss, and with everything again when it returns.

A run is a sequence of legs. Each leg plans for the nodes that are on the network, resumes from the newest checkpoint
(which any plan can read) and trains until it is done, something fails, or a node comes back; a node that comes back
ends the leg after the step under way, with a checkpoint. Only what a checkpoint holds counts as trained, and the order
of samples belongs to the job, so no sample that counts is trained twice or left out.

There are two launchers. The own one (`train_elastically`) watches all ranks from one process. The other
(`train_by_torchrun`) keeps an agent of torchrun running on every node, as on separate machines: agents find out by
themselves who is there, and `run.elastic` makes the plans.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, RunError
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.run.elastic import SHARED_STORE, Begun, Leg, agent_options, legs, newest
from mixfleet.run.launch import train
from mixfleet.run.metrics import METRICS, StepMetrics
from mixfleet.search import best_plan
from mixfleet.sim import predict
from mixfleet.testbed.bed import Testbed
from mixfleet.testbed.faults import Schedule, explained, injected

FAILURES = 5
"""Legs that may fail without a step done before the run is given up."""
PATIENCE_S = 8.0
"""Beyond a step: without a sign of life or in one action, after that long a rank is lost."""
_LOOK_S = 0.2


def train_elastically(bed: Testbed, cluster: Cluster, job: Job, out: Path, *, steps: int, checkpoint_every: int,
                      schedule: Schedule | None = None, patience_s: float = PATIENCE_S, base: Path | str = "",
                      plan_for: Callable[[Job, Cluster], Plan] | None = None,
                      say: Callable[[str], None] = lambda line: None) -> list[Leg]:
    """Train to `steps`, whatever fails; the legs it took. `cluster` is the one to plan with (`profile`).

    `plan_for` gives the plan of a leg, by default the best that the search finds. Call it in the main thread: a
    returning node ends a leg by a signal. InputError if no plan fits what is left; RunError after several failures
    without a step between them.
    """
    found: list[Leg] = []
    failed = 0
    with injected(bed, schedule) as struck:
        while not found or found[-1].last_step < steps:
            done = newest(out)
            lost = set(bed.unplugged())
            part, ranks = cluster.without(lost)
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
            found.append(Leg(first_step=done, last_step=newest(out), nodes=tuple(n.name for n in part.nodes),
                            plan=plan, seconds=time.monotonic() - start, failure=failure, noticed_s=noticed_s))
            failed = failed + 1 if failure and found[-1].last_step == done else 0
            if failed == FAILURES:
                raise RunError(f"{FAILURES} attempts failed without a checkpoint between them; the last: {failure}")
    return found


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


# --- by torchrun ---------------------------------------------------------------------------------------------------

_MINE = ("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
"""Variables that must not reach an agent from a torchrun that this process itself is part of."""


def train_by_torchrun(bed: Testbed, cluster: Path, job: Path, out: Path, *, steps: int, checkpoint_every: int,
                      schedule: Schedule | None = None, patience_s: float = PATIENCE_S,
                      say: Callable[[str], None] = lambda line: None, timeout_s: float = 3600.0) -> list[Leg]:
    """As `train_elastically`, by torchrun's elastic agents: one per node, started again when its node is back on the
    network. The first node must stay, for the agents meet there.

    `cluster` and `job` are files. RunError if a node's agent ends by itself several times without a step between, or
    after `timeout_s`; what the agents said is in `agent-NODE.log` in `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    fleet = _Agents(bed, out, [
        "mixfleet", "elastic", str(job), str(cluster), "--out", str(out), "--steps", str(steps),
        "--checkpoint-every", str(checkpoint_every), "--patience", str(patience_s)])
    before, begun, ends = len(legs(out)), time.time(), time.monotonic() + timeout_s
    done = newest(out)
    known: set[int] = set()
    failures: dict[float, str] = {}
    with ExitStack() as loading, injected(bed, schedule) as struck:
        throttle: Callable[[], None] | None = None
        try:
            while fleet.run():
                for text in fleet.complaints():
                    failures[time.time()] = text
                    say(text)
                now, step = set(bed.processes()), _last_step(out / METRICS)
                if now - known:  # loading programs, and the first step, are not what is slow on a slow device
                    known, throttle = now, throttle or loading.enter_context(bed.unthrottled())
                if step != done:
                    done = step
                    struck(step)
                    if throttle:
                        throttle()
                        throttle = None
                if time.monotonic() > ends:
                    raise RunError(f"not done after {timeout_s:g} s; see {fleet.log('*')}")
                time.sleep(_LOOK_S)
        finally:
            fleet.end()
    return _legs(legs(out)[before:], newest(out), failures, begun)


def _legs(begun: list[Begun], last: int, failures: Mapping[float, str], start: float) -> list[Leg]:
    found = []
    for i, leg in enumerate(begun):
        after = begun[i + 1] if i + 1 < len(begun) else None
        until = after.at if after else time.time()
        said = [text for at, text in failures.items() if leg.at <= at < until]
        found.append(Leg(first_step=leg.first_step, last_step=after.first_step if after else last, nodes=leg.nodes,
                         plan=leg.plan, seconds=until - leg.at, failure=said[0] if said else ""))
    return found


def _last_step(path: Path) -> int:
    """The step of the last line of a run's metrics."""
    try:
        return int(json.loads(path.read_bytes().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


class _Agents:
    """An agent of torchrun on every node, in the network of the node and outside of its ranks' quotas; the processes
    that it starts go to their seats."""

    def __init__(self, bed: Testbed, out: Path, command: list[str]) -> None:
        self._bed, self._out, self._command = bed, out, command
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._done: set[str] = set()
        self._failed: dict[str, int] = {}
        self._read: dict[str, int] = {}
        self._head = next(iter(bed.layout.nodes))
        self._endpoint = f"{bed.layout.addresses[self._head]}:{20_000 + secrets.randbelow(10_000)}"

    def log(self, node: str) -> Path:
        return self._out / f"agent-{node}.log"

    def run(self) -> bool:
        """Start what should run and does not; whether some agent has not finished."""
        away = set(self._bed.unplugged())
        for node in self._bed.layout.nodes:
            agent = self._running.get(node)
            if agent and agent.poll() is not None:
                del self._running[node]
                if agent.returncode == 0:
                    self._done.add(node)
                elif node not in away:
                    self._failed[node] = self._failed.get(node, 0) + 1
                    if self._failed[node] == FAILURES:
                        raise RunError(f"the agent of node {node} has failed {FAILURES} times; see {self.log(node)}")
            if node not in self._running and node not in away and not self._done:
                self._start(node)
        return bool(self._running) or not self._done

    def _start(self, node: str) -> None:
        bed = self._bed
        seats = [s for s in bed.layout.seats if s.node == node]
        sit = [sys.executable, "-m", "mixfleet", "testbed", "enter", bed.layout.id, node, "--"]
        words = [sys.executable, "-m", "torch.distributed.run", *agent_options(
                     len(seats), len(bed.layout.nodes), self._endpoint, bed.layout.id, restarts=100,
                     head=node == self._head), f"--local-addr={bed.layout.addresses[node]}", "--no-python", *sit,
                 sys.executable, "-m", *self._command, "--machine", node]
        env = {k: v for k, v in os.environ.items() if not k.startswith(_MINE)}
        with open(self.log(node), "ab") as log:
            self._running[node] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=env | bed.enter.environment | {SHARED_STORE: "1"},
                preexec_fn=partial(bed.enter.outside, seats[0].rank))

    def complaints(self) -> list[str]:
        """Errors that ranks have reported since the last time, with what the testbed knows of their cause."""
        found = []
        for node in self._bed.layout.nodes:
            path, at = self.log(node), self._read.get(node, 0)
            if not path.exists() or path.stat().st_size == at:
                continue
            with open(path, "rb") as file:
                file.seek(at)
                new = file.read()
            new = new[:new.rfind(b"\n") + 1]
            self._read[node] = at + len(new)
            found += [str(explained(self._bed, RunError(line.removeprefix("error: ")))) for line in
                      new.decode(errors="replace").splitlines() if line.startswith("error: ")]
        return found

    def end(self) -> None:
        for agent in self._running.values():
            if agent.poll() is None:
                agent.terminate()
        until = time.monotonic() + 5
        for agent in self._running.values():
            try:
                agent.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
