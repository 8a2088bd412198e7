"""Starting a training run: local ranks of its own, or as one process of `torchrun`. This module does not need torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, RunError
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.plan_rules import why_not
from mixfleet.run.balance import Rebalance
from mixfleet.run.host import keep_memory
from mixfleet.run.metrics import StepMetrics
from mixfleet.spec import Spec
from mixfleet.trace import Trace

if TYPE_CHECKING:
    from mixfleet.run.source import Source

_GRACE_S = 1.0
"""How long to collect failures after the first: the cause may arrive after its consequences."""
_PULSE_S = 0.5

OnNan = Literal["stop", "skip"]
"""What a loss or gradient that is not finite does: end the run, or leave the step out and go on."""
Enter = Callable[[int], None]
"""Called with a rank in that rank's process, before anything else; must pickle."""


class Options(Spec, frozen=True, kw_only=True):
    """How far to train and what to keep."""

    steps: int
    """Step at which training ends, counted from the very first one."""
    out_dir: str = ""
    """Where checkpoints, metrics and the trace go; empty writes nothing."""
    resume: str = ""
    """A checkpoint, or a directory that holds some (then the newest)."""
    init_from: str = ""
    """Weights to start from at step 0: a directory of `transformers`, or a checkpoint."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    async_save: bool = False
    """Checkpoints are copied to host memory and written while training goes on."""
    keep: int = 2
    trace_steps: int = 0
    """How many of the last steps to record."""
    balance_every: int = 0
    """Steps between looks at who is slow, after which samples may go from one replica to another; 0: never."""
    dead_band: float = 0.1
    """Part of its samples by which some replica must be off before anything changes."""
    on_nan: OnNan = "stop"
    patience_s: float = 600.0
    """Seconds without a sign of life, or in one action, after which a rank counts as failed."""


class Met(NamedTuple):
    """The weights that a micro-batch met on a rank of an asynchronous run; versions count all steps done before. Those
    of a virtual worker (`hetpipe`) count its own updates, one per micro-batch, since the pipeline began to fill."""

    step: int
    """Steps before the one that its gradient is part of."""
    micro_batch: int
    forward: int
    """Version in forward; one that was only predicted counts as what it was predicted for."""
    made: int
    """Steps done when those weights were made."""
    backward: int
    applied: int
    """Version that its gradient changes."""
    waves: int = 0
    """Waves of the other virtual workers that the weights in forward knew."""

    @property
    def staleness(self) -> int:
        """Updates between the weights that it knew and those that its gradient changes."""
        return self.applied - self.made


class RankReport(Spec, frozen=True, kw_only=True):
    """What one rank held and sent."""

    rank: int
    state_bytes: dict[str, int]
    """Bytes that stay between steps: weights, gradients, optimizer (with master weights)."""
    peak_bytes: int
    """Most that the allocator of a GPU held; 0 on a CPU."""
    sent: dict[str, int]
    """Payload bytes sent in all steps, by `kind@destination`; kinds are those of actions, `T` is tensor parallelism,
    `K` keys and values of shared sequences, `E` rows to experts and back."""
    routed: dict[str, list[int]] = {}
    """By block with routed experts, the rows that this rank sent to each expert, forwards done again included."""
    met: tuple[Met, ...] = ()
    """Asynchronous runs: what the last micro-batches met."""


class TrainResult(Spec, frozen=True, kw_only=True):
    """What training came to."""

    step: int
    losses: tuple[float, ...]
    stopped: bool
    """It was asked to stop before its last step."""
    trace: Trace | None = None
    checkpoint: str = ""
    ranks: tuple[RankReport, ...] = ()
    balanced: tuple[Rebalance, ...] = ()
    """Every change of samples."""
    foreign: float = 0.0
    """Part of the ranks' cores that other programs took behind the first step, on the host where it was most."""


class Failure(Spec, frozen=True, kw_only=True):
    """Why a rank stopped. `secondary` failures only follow from another rank's."""

    rank: int
    message: str
    details: str
    bad_input: bool
    secondary: bool


class TrainError(RunError):
    """Training failed, though nothing was wrong with the input. `details` is the traceback of the causing rank."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def train(plan: Plan, job: Job, cluster: Cluster, *, steps: int | None = None, out_dir: Path | str = "",
          resume: Path | str = "", checkpoint_every: int = 0, keep: int = 2, trace_steps: int = 0,
          base: Path | str = "", source: Source | None = None, on_step: Callable[[StepMetrics], None] | None = None,
          enter: Enter | None = None, patience_s: float = 600.0, balance_every: int = 0, dead_band: float = 0.1,
          on_nan: OnNan = "stop", init_from: Path | str = "", async_save: bool = False, rendezvous: str = ""
          ) -> TrainResult | None:
    """Train by a plan: with local processes, one per device of the plan, or as one process under `torchrun`.

    `steps` is the step to end at, by default the job's. `base` is the directory of a relative `data.path`. `on_step`
    is called after every step, in the calling process (under torchrun, on the first rank). SIGINT and SIGTERM end
    the run after the step under way, with a checkpoint if there is an `out_dir`. `enter` is called first in every
    local rank's process, with its rank, to take it where it belongs; local ranks find each other at `rendezvous`
    (`tcp://ADDRESS:PORT` where the first rank then is; by default a temporary file). The other settings: see `Options`.
    Returns None on all ranks of torchrun but the first. Raises InputError, and TrainError if a rank fails or dies.
    """
    reason = why_not(plan, job, cluster)
    if reason:
        raise InputError(reason)
    if job.products:
        raise InputError(f"products is {job.products}: training runs products in the job's precision, {job.precision}, "
                         "only. Leave `products` out; predictions and plans can have it")
    if not plan.synchronous and (balance_every or on_nan == "skip"):
        what = "move samples between replicas" if balance_every else "leave out steps that are not finite"
        raise InputError(f"cannot {what} under the schedule {plan.schedule}: the next steps are under way already. "
                         "Take a synchronous schedule")
    if balance_every and plan.batching != "padded":
        raise InputError(f"cannot move samples between replicas with `batching: {plan.batching}`, which shares out "
                         "every step by what its samples cost. Leave out balance_every, or take `batching: padded`")
    options = Options(steps=job.steps if steps is None else steps, out_dir=str(out_dir), resume=str(resume),
                      checkpoint_every=checkpoint_every, keep=keep, trace_steps=trace_steps,
                      balance_every=balance_every, dead_band=dead_band, on_nan=on_nan, init_from=str(init_from),
                      async_save=async_save, patience_s=patience_s)
    if resume and init_from:
        raise InputError("give either resume or init_from: a resumed run has weights already")
    if out_dir:
        try:
            Path(out_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made: {error.strerror}", where=str(out_dir)) from None
    listener = _Listener(options, on_step)
    if enter is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _under_torchrun(plan, job, cluster, source, Path(base), options, listener)
    return _Local(plan, job, cluster, source, Path(base), options, listener, enter, rendezvous).run()


class _Listener:
    """Hears what the first rank tells: where it starts, every step, every checkpoint."""

    def __init__(self, options: Options, on_step: Callable[[StepMetrics], None] | None) -> None:
        self._on_step = on_step
        self.step, self.checkpoint = 0, options.resume

    def __call__(self, message: Any) -> None:
        if isinstance(message, int):
            self.step = message
        elif isinstance(message, StepMetrics):
            self.step = message.step
            if self._on_step:
                self._on_step(message)
        elif isinstance(message, str):
            self.checkpoint = message


def torchrun_commands(plan: Plan, cluster: Cluster, arguments: Sequence[str], *, port: int = 29500
                      ) -> list[tuple[str, str]]:
    """(node, command) for every node that the plan uses; each starts as many processes as the plan has there."""
    used = [i for i in range(len(cluster.nodes)) if any(cluster.node_of[r] == i for r in plan.ranks)]
    head = cluster.nodes[used[0]].name
    commands = []
    for number, node in enumerate(used):
        processes = sum(cluster.node_of[r] == node for r in plan.ranks)
        words = ["torchrun", f"--nnodes={len(used)}", f"--node-rank={number}", f"--nproc-per-node={processes}",
                 f"--master-addr={head}", f"--master-port={port}", "--no-python", "mixfleet", "train", *arguments]
        commands.append((cluster.nodes[node].name, shlex.join(words)))
    return commands


def _device_name(cluster: Cluster, rank: int) -> str:
    return f"rank {rank} ({cluster.devices[rank].name} on node {cluster.nodes[cluster.node_of[rank]].name})"


def _source(source: Source | None, job: Job, base: Path) -> Source:
    if source is not None:
        return source
    from mixfleet.run.source import DecoderSource

    return DecoderSource(job, base)


def _under_torchrun(plan: Plan, job: Job, cluster: Cluster, source: Source | None, base: Path, options: Options,
                    listener: _Listener) -> TrainResult | None:
    process, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != len(plan.ranks):
        raise InputError(f"torchrun started {world} processes; the plan has {len(plan.ranks)} ranks. On each node: "
                         + "; ".join(c for _, c in torchrun_commands(plan, cluster, ["PLAN"])))
    return as_process(plan, job, cluster, process, options, base=base, source=source, tell=listener)


def as_process(plan: Plan, job: Job, cluster: Cluster, process: int, options: Options, *, base: Path,
               source: Source | None = None, tell: Callable[[Any], None] | None = None,
               on_step: Callable[[StepMetrics], None] | None = None, store: Any = None,
               stop: Callable[[], bool] | None = None) -> TrainResult | None:
    """Be process `process` of a run that others have started. They meet at `store`, by default where the variables of
    `env://` say; `stop` says whether this one was asked to stop, by default by a signal. Raises as `train` does."""
    from mixfleet.run import worker

    keep_memory()

    def give_up(message: str) -> None:
        print(f"error: {_device_name(cluster, plan.ranks[process])}: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    try:
        return worker.run(plan, job, cluster, _source(source, job, base), options, process,
                          tell or _Listener(options, on_step), give_up, store=store, stop=stop)
    except InputError:
        raise
    except Exception as error:
        found = worker.failure(plan.ranks[process], error)
        raise TrainError(f"{_device_name(cluster, found.rank)}: {found.message}", found.details) from error


def _child(plan: Plan, job: Job, cluster: Cluster, source: Source | None, base: Path, options: Options, process: int,
           enter: Enter | None, init_method: str, pipe: Any) -> None:
    """A local rank. The affinity comes first: torch counts its threads by it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = _Pipe(pipe)
    if enter:
        enter(plan.ranks[process])
    cores = cluster.devices[plan.ranks[process]].cores
    if cores and hasattr(os, "sched_setaffinity"):
        allowed = set(cores) & os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed or os.sched_getaffinity(0))
    if all(cluster.node_of[r] == cluster.node_of[plan.ranks[0]] for r in plan.ranks) and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(cores) or 1))
    keep_memory()
    from mixfleet.run import worker

    threading.Thread(target=pipe.pulse, daemon=True).start()

    def give_up(message: str) -> None:
        pipe.send(Failure(rank=plan.ranks[process], message=message, details="", bad_input=False, secondary=True))
        os._exit(1)

    try:
        pipe.send(worker.run(plan, job, cluster, _source(source, job, base), options, process, pipe.send, give_up,
                             init_method=init_method, local=True))
    except BaseException as error:
        pipe.send(worker.failure(plan.ranks[process], error))
        pipe.close()
        os._exit(1)


class _Pipe:
    """A rank's way to its parent, for several threads; None says no more than that the rank lives."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock:
            self._pipe.send(message)

    def pulse(self) -> None:
        with suppress(OSError):
            while True:
                self.send(None)
                time.sleep(_PULSE_S)

    def close(self) -> None:
        with self._lock:
            self._pipe.close()


class _Local:
    """Local ranks and their parent, which watches them: the first failure ends the run, with one message."""

    def __init__(self, plan: Plan, job: Job, cluster: Cluster, source: Source | None, base: Path, options: Options,
                 listener: _Listener, enter: Enter | None, rendezvous: str) -> None:
        self.plan, self.cluster, self.options, self._listener = plan, cluster, options, listener
        self._arguments = plan, job, cluster, source, base, options
        self._enter, self._rendezvous = enter, rendezvous
        self._heard: dict[int, float] = {}
        self._processes: list[Any] = []
        self._pipes: dict[Any, int] = {}
        self._failures: list[Failure] = []
        self._dead: list[tuple[int, int]] = []
        self._result: TrainResult | None = None
        self._found = self._on_disk()

    def run(self) -> TrainResult:
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="mixfleet-") as directory, self._signals():
            try:
                for process in range(len(self.plan.ranks)):
                    here, there = context.Pipe(duplex=False)
                    child = context.Process(target=_child, daemon=True, args=(
                        *self._arguments, process, self._enter,
                        self._rendezvous or f"file://{directory}/rendezvous", there))
                    child.start()
                    there.close()
                    self._processes.append(child)
                    self._pipes[here] = process
                self._watch()
            finally:
                for child in self._processes:
                    if child.is_alive():
                        child.kill()
                    child.join()
        if self._failures or self._dead:
            raise self._error()
        assert self._result is not None
        return self._result

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first interrupt asks the ranks to stop after the step under way, the second ends them."""
        asked = [0]

        def handle(signum: int, frame: Any) -> None:
            asked[0] += 1
            if asked[0] > 1:
                raise KeyboardInterrupt
            for child in self._processes:
                child.terminate()

        try:
            before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: signals are the caller's affair
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> None:
        """Until all ranks are done, or a moment after the first failure."""
        sentinels = {child.sentinel: i for i, child in enumerate(self._processes)}
        deadline: float | None = None
        while sentinels or self._pipes:
            timeout = _PULSE_S if deadline is None else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([*sentinels, *self._pipes], timeout)
            if not ready and deadline is not None:
                return
            self._miss(set(sentinels.values()))
            for item in ready:
                if item in self._pipes:
                    self._hear(item)
                else:
                    process = sentinels.pop(item)
                    child = self._processes[process]
                    child.join()
                    if child.exitcode:
                        self._dead.append((process, child.exitcode))
            if (self._failures or self._dead) and deadline is None:
                deadline = time.monotonic() + _GRACE_S

    def _miss(self, running: set[int]) -> None:
        """A rank that was heard once and is silent for too long has failed."""
        now, patience_s = time.monotonic(), self.options.patience_s
        for process in running:
            if now - self._heard.get(process, now) > patience_s:
                del self._heard[process]
                self._failures.append(Failure(rank=self.plan.ranks[process], details="", bad_input=False,
                                              secondary=False, message=f"has not answered for {patience_s:g} s"))

    def _hear(self, pipe: Any) -> None:
        try:
            message = pipe.recv()
            self._heard[self._pipes[pipe]] = time.monotonic()
        except (EOFError, OSError):
            del self._pipes[pipe]
            return
        if isinstance(message, TrainResult):
            self._result = message
        elif isinstance(message, Failure):
            self._failures.append(message)
        elif message is not None:
            self._listener(message)

    def _on_disk(self) -> tuple[Path, int] | None:
        """The newest complete checkpoint of the run's directory, and when it became complete, in ns."""
        from mixfleet.run.checkpoint import latest  # which takes torch

        found = latest(Path(self.options.out_dir) / "checkpoints") if self.options.out_dir else None
        return (found, (found / "index.json").stat().st_mtime_ns) if found else None

    def _error(self) -> Exception:
        """The one error to show: a death comes before an exception, and that before what only follows from it."""
        reported = {f.rank for f in self._failures}
        silent = [(self.plan.ranks[p], code) for p, code in self._dead if self.plan.ranks[p] not in reported]
        causes = sorted(self._failures, key=lambda f: (f.secondary, not f.bad_input))
        if silent:
            rank, code = silent[0]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            what, details = f"{_device_name(self.cluster, rank)} {how}", ""
        elif causes[0].bad_input:
            return InputError(causes[0].message)
        else:
            what, details = f"{_device_name(self.cluster, causes[0].rank)}: {causes[0].message}", causes[0].details
        now = self._on_disk()  # the first rank may have died between a commit and telling of it
        saved = now[0] if now and now != self._found else self._listener.checkpoint
        after = f"The last checkpoint is {saved}" if saved else "There is no checkpoint yet"
        return TrainError(f"{what}, after step {self._listener.step}; the other ranks were stopped. {after}.", details)
