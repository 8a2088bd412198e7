"""One rank of a training run: set up, the loop over steps, checkpoints, and what it tells the others."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mixfleet.batching import Batch, Batcher, Parts
from mixfleet.cluster import Cluster
from mixfleet.cost.kernels import fused_attention
from mixfleet.errors import InputError, RunError
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.layout import Layout, cut
from mixfleet.program.lower import lower
from mixfleet.run.balance import Rebalance, apart, rebalance, with_samples
from mixfleet.run.checkpoint import Reader, Saving, State
from mixfleet.run.collective import Fabric
from mixfleet.run.crew import Crew
from mixfleet.run.host import CoreWatch, calm_network_threads, foreign
from mixfleet.run.huggingface import open_weights
from mixfleet.run.interpreter import Interpreter, MicroBatch, StepResult
from mixfleet.run.launch import Failure, Options, RankReport, TrainResult
from mixfleet.run.metrics import StepMetrics
from mixfleet.run.modules import Layer
from mixfleet.run.optim import learning_rate
from mixfleet.run.recorder import Recorder
from mixfleet.run.rounds import Rounds
from mixfleet.run.source import Source
from mixfleet.run.stream import Stream
from mixfleet.run.tensor import ContextGroup, ExpertGroup, OnComm, TensorGroup
from mixfleet.run.watch import Watch
from mixfleet.trace import Trace, within

Tell = Callable[[Any], None]
_TIMEOUT = timedelta(minutes=10)
_MOST_BROKEN = 10
"""Steps in a row that may be left out because they are not finite."""


class NotFinite(RunError):
    """Training broke, on `rank`."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class Rank:
    """One rank: its interpreter, its samples, and the loop. The default process group must exist."""

    def __init__(self, plan: Plan, job: Job, cluster: Cluster, source: Source, process: int) -> None:
        self.plan, self.job, self.cluster, self.source = plan, job, cluster, source
        self.rank = plan.ranks[process]
        spec = cluster.devices[self.rank]
        self.device = pick_device(cluster, self.rank)
        torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
        self.recorder = Recorder(self.rank, self.device)
        self.fabric = Fabric(plan, self.rank, self.device, self.recorder)
        if self.device.type == "cpu":
            calm_network_threads()
        self.layout = Layout(plan, job.model)
        self.places = [place for post, place in sorted(self.layout.places.items()) if post % plan.span == self.rank]
        """One for each pipeline in which this rank stands."""
        self.program = lower(plan, job.model, self.layout)
        first = self.places[0]
        stages = [plan.pipelines[place.pipeline].stages[place.stage] for place in self.places]
        pipeline, copy = plan.pipelines[first.pipeline], plan.replicas[first.replica][1]
        groups = self.fabric.groups
        peers = [r for r in stages[0].ranks(copy, first.member) if r != self.rank]
        tensor = TensorGroup(groups.tensor[self.rank], on_comm=self._counts("T", peers)) if peers else TensorGroup()
        if pipeline.context > 1:
            start = copy - copy % pipeline.context
            sharing = [stages[0].ranks(start + x)[first.tensor_index] for x in range(pipeline.context)]
            counts = self._counts("K", [r for r in sharing if r != self.rank])
            tensor.context = ContextGroup(pipeline.spans(job.seq_len), groups.context[self.rank], on_comm=counts)
        if self.rank in groups.expert:
            tensor.experts = self._expert_group(*groups.expert[self.rank])
        modules = [source.modules(stage, tensor, self.device, fused=fused_attention(spec, job)) for stage in stages]
        self._context = tensor.context
        self._parts = Parts.of(pipeline, job.seq_len) if pipeline.context > 1 else None
        role = self.program.role(first.pipeline, first.stage)
        given = role, job, self.layout, self.fabric
        self.interpreter: Interpreter | Crew = (
            Crew(*given, modules, source.shape, source.loss) if role.more else
            Rounds(*given, modules[0], source.shape, source.loss, ahead=self._ahead(stages[0], tensor))
            if plan.schedule == "roundpipe" else
            (Interpreter if plan.synchronous else Stream)(*given, modules[0], source.shape, source.loss))
        self.step = 0
        self.saving: Saving | None = None
        """The checkpoint under way."""
        self._batches: list[MicroBatch] = []
        self._batcher = Batcher(plan, job, cluster) if job.data.lengths and plan.synchronous else None
        self.batch: Batch | None = None
        """How the samples of the step lie on the replicas, where they differ in length."""

    def _ahead(self, stage: Stage, tensor: TensorGroup) -> dict[int, torch.nn.Module]:
        """Modules of blocks that a worker of roundpipe only goes forward through."""
        lent = [b for lo, hi in sorted(stage.ahead) for b in range(lo, hi) if not stage.holds(b)]
        if not lent:
            return {}
        first, *more = [(b, b + 1) for b in lent]
        fused = fused_attention(self.cluster.devices[self.rank], self.job)
        return dict(zip(lent, self.source.modules(stage.replace(blocks=first, more=tuple(more)), tensor, self.device,
                                                  fused=fused)))

    def balance(self, steps: int, band: float) -> Rebalance | None:
        """Give samples of slow replicas to fast ones, by what they took in the last `steps`; None if all is well."""
        times = torch.zeros(len(self.plan.ranks), dtype=torch.float64, device=self.device)
        times[self.plan.ranks.index(self.rank)] = self.recorder.busy_s() / steps
        by_rank = dict(zip(self.plan.ranks, self.fabric.sum(times).tolist()))
        seconds = tuple(max(by_rank[r] for stage in p.stages for r in stage.devices) for p in self.plan.pipelines)
        before = tuple(p.samples for p in self.plan.pipelines)
        after = rebalance(before, seconds, band=band)
        if after == before:
            return None
        plan = with_samples(self.plan, after)
        change = Rebalance(step=self.step, seconds=seconds, before=before, after=after,
                           why_not=why_not(plan.replace(cluster_fingerprint=""), self.job, self.cluster) or "")
        if not change.why_not:
            self.plan = plan
            self.program = lower(plan, self.job.model, self.layout)
            role, pipelines = self.program.role(self.places[0].pipeline, self.places[0].stage), self._pipelines
            if isinstance(self.interpreter, Crew):
                self.interpreter.follow(role, pipelines)
            else:
                self.interpreter.follow(role, pipelines[0])
        return change

    @property
    def _pipelines(self) -> list[Pipeline]:
        return [self.plan.pipelines[place.pipeline] for place in self.places]

    @property
    def lag(self) -> int:
        """Steps that are under way when one is known to be done."""
        return self.interpreter.depth + 2 if isinstance(self.interpreter, Stream) else 0

    def locate(self) -> NotFinite:
        """Where the last step broke, as all ranks see it."""
        if isinstance(self.interpreter, Stream):
            return NotFinite(f"the loss or gradient of step {self.step + 1} is not finite; a synchronous schedule "
                             "would find the block", self.plan.ranks[0])
        batches = self._batches
        found: list[Any] = [None] * len(self.plan.ranks)
        dist.all_gather_object(found, self.interpreter.locate(batches), group=self.fabric.world)
        first = min(((where, rank) for where, rank in zip(found, self.plan.ranks) if where), default=None)
        if first is None:
            return NotFinite(f"the loss or gradient of step {self.step + 1} is not finite, though all blocks give "
                             "finite numbers", self.plan.ranks[0])
        (backward, mb, _, block), rank = first
        return NotFinite(f"step {self.step + 1} is not finite from block {block} ({self.job.model.blocks[block].name}) "
                         f"on, in {'backward' if backward else 'forward'} of micro-batch {mb} on rank {rank}", rank)

    def _expert_group(self, process_group: Any, ranks: tuple[int, ...]) -> ExpertGroup:
        """Those who share experts with this rank."""
        count = next(b.experts for b in self.job.model.blocks if b.routed)
        held: list[tuple[int, int]] = []
        for rank in ranks:
            place = self.layout.places[rank]
            lo, hi = self.plan.experts_of(place.replica, count)
            a, b = cut(hi - lo, self.plan.pipelines[place.pipeline].stages[place.stage].tensor, place.tensor_index)
            held.append((lo + a, lo + b))
        return ExpertGroup(held, process_group, rank=ranks.index(self.rank),
                           processes=[self.plan.ranks.index(rank) for rank in ranks],
                           on_comm=self._counts("E", [r for r in ranks if r != self.rank]))

    def _counts(self, kind: str, peers: list[int]) -> OnComm:
        """What counts the bytes that collectives inside blocks send to `peers`; those of rows to experts as `E`."""

        def count(op: str, nbytes: list[int], seconds: float) -> None:
            routed = op == "all_to_all"
            self.recorder.ended("compute", op, "expert" if routed else "tensor", seconds)
            for peer, n in zip(peers, nbytes):
                self.fabric.count("E" if routed else kind, peer, n)

        return count

    def start(self, checkpoint: Path | None = None, weights: Path | None = None) -> None:
        """Fill the state: from a checkpoint written under any plan; or from the source's first values, or the weights
        of a directory (see `open_weights`), at step 0."""
        units = self.interpreter.units.values()
        if checkpoint is None:
            read = open_weights(weights, self.job.model) if weights else self.source.initial
            for unit in units:
                unit.fill(read, moments=False)
            self.source.open(0, 0)
            return
        reader = Reader(checkpoint)
        reader.check(self.job.model)
        state = reader.state
        moments = state.optimizer == self.job.optimizer.name
        if not moments:
            raise InputError(f"was written with optimizer {state.optimizer}; the job has {self.job.optimizer.name}",
                             where=str(reader.path))
        for unit in units:
            unit.fill(reader.read, moments=moments)
            unit.optimizer.steps = state.extra["updates"]
        self.interpreter.loss_scale = state.extra["loss_scale"]
        self.interpreter.good_steps = state.extra["good_steps"]
        self.step = state.step
        self.source.open(state.step, state.position)

    def batches(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches: inputs where it holds the first block, targets where it holds the last. Those of
        one pipeline stand behind those of another where it is in several."""
        self.batch = self._batcher.step(self.source.lengths(step)) if self._batcher else None
        if self.batch and self.plan.batching != "padded":
            return self._arranged(step, self.batch)
        found: list[MicroBatch] = []
        seats = self.interpreter.seats if isinstance(self.interpreter, Crew) else [self.interpreter]
        for seat, place, pipeline in zip(seats, self.places, self._pipelines, strict=True):
            sizes, at = list(pipeline.micro_batches), self.plan.first_samples[place.replica]
            if not seat.is_first and not seat.is_last:
                found += [MicroBatch(None, None)] * len(sizes)
                continue
            inputs, targets = self.source.batch(step, at, at + sum(sizes))
            if self._context:
                inputs, targets = self._context.own(inputs, 1), self._context.own(targets, 1)
            mine = (parts[place.member] for parts in pipeline.slices[place.stage])
            found += [MicroBatch(x[lo:hi].to(self.device) if seat.is_first else None,
                                 y[lo:hi].to(self.device) if seat.is_last else None) for x, y, (lo, hi) in zip(
                                     torch.split(inputs, sizes), torch.split(targets, sizes), mine, strict=True)]
        return found

    def _arranged(self, step: int, batch: Batch) -> list[MicroBatch]:
        """The micro-batches of this rank's replica."""
        seat = self.interpreter
        assert isinstance(seat, Interpreter)
        found = []
        for micro in batch.micro[self.places[0].replica]:
            inputs = targets = None
            shared = self._context.at(self._parts.spans(micro)) if self._context and self._parts else None
            if seat.is_first or seat.is_last:
                inputs, targets = self.source.rows(step, micro.rows, micro.whole or micro.width, micro.segments)
                if shared:
                    inputs, targets = shared.own(inputs, 1), shared.own(targets, 1)
            found.append(MicroBatch(inputs.to(self.device) if seat.is_first and inputs is not None else None,
                                    targets.to(self.device) if seat.is_last and targets is not None else None,
                                    len(micro.rows), micro.width, micro.segments, shared))
        return found

    def advance(self, until: int, stop: Callable[[], bool]) -> Iterator[StepResult]:
        """Train to step `until`, or to one that was asked to stop after; an asynchronous pipeline is then drained."""
        if isinstance(self.interpreter, Stream):
            yield from self.interpreter.run(self.step, until - self.step, self.batches, self.targets, stop)
            return
        while self.step < until:
            lr = learning_rate(self.job.optimizer, self.step, self.job.steps)
            self._batches = self.batches(self.step)
            writing = self.saving is not None and self.saving.writing
            result = self.interpreter.step(self._batches, lr, stop=stop(), writing=writing)
            yield result
            if result.stop:
                return

    def targets(self, step: int) -> Tensor:
        """Those of a step's whole global batch."""
        return self.source.batch(step, 0, self.job.global_batch)[1]

    def save(self, root: Path, *, background: bool = False) -> None:
        """Begin a checkpoint, all ranks together; the one before must be committed. With `background` it is written
        while training goes on."""
        self.interpreter.now = f"the checkpoint of step {self.step}", time.monotonic()
        self.interpreter.finish()
        steps = next(iter(self.interpreter.units.values())).optimizer.steps
        state = State(step=self.step, position=self.source.position(self.step), seed=self.job.seed,
                      optimizer=self.job.optimizer.name,
                      extra={"updates": steps, "loss_scale": self.interpreter.loss_scale,
                             "good_steps": self.interpreter.good_steps})
        pieces = (piece for unit in self.interpreter.units.values() for piece in unit.pieces())
        self.saving = Saving(root, self.job.model, state, self.rank, pieces, background=background)
        self.interpreter.now = None

    def commit(self, keep: int) -> Path:
        """Wait for all writers of the checkpoint under way, and make it count, all ranks together."""
        assert self.saving is not None
        self.interpreter.now = f"the checkpoint {self.saving.directory.name}", time.monotonic()
        path, self.saving = self.saving.commit(self.gather, keep=keep), None
        dist.barrier(self.fabric.world)
        self.interpreter.now = None
        return path

    def gather(self, mine: Any) -> list[Any] | None:
        """Everyone's objects, on the first rank."""
        found: list[Any] = [None] * len(self.plan.ranks)
        first = self.rank == self.plan.ranks[0]
        dist.gather_object(mine, found if first else None, group=self.fabric.world, group_dst=0)
        return found if first else None

    def align_clock(self) -> None:
        """Take the first host's clock: on other hosts, by how far the clocks differ right after a barrier."""
        dist.barrier(self.fabric.world)
        mine = socket.gethostname(), time.perf_counter_ns()
        everyone: list[Any] = [None] * len(self.plan.ranks)
        dist.all_gather_object(everyone, mine, group=self.fabric.world)
        host, then = everyone[0]
        self.recorder.offset_ns = 0 if host == mine[0] else then - mine[1]

    def report(self) -> RankReport:
        """What this rank held and sent."""
        state = {"weights": 0, "gradients": 0, "optimizer": 0}
        for unit in self.interpreter.units.values():
            for kind, nbytes in unit.permanent_bytes.items():
                state[kind] += nbytes
        seats = self.interpreter.seats if isinstance(self.interpreter, Crew) else [self.interpreter]
        routed = {self.job.model.blocks[b].name: module.routed.tolist() for seat in seats
                  for b, module in seat.modules.items() if isinstance(module, Layer) and module.routed is not None}
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return RankReport(rank=self.rank, state_bytes=state, peak_bytes=peak, routed=routed,
                          sent={f"{kind}@{dst}": n for (kind, dst), n in sorted(self.fabric.sent.items())},
                          met=tuple(self.interpreter.readings) if isinstance(self.interpreter, (Stream, Rounds)) else
                          ())

    def close(self) -> None:
        self.fabric.close()


def pick_device(cluster: Cluster, rank: int) -> torch.device:
    """The torch device that a rank of the cluster is."""
    if cluster.devices[rank].kind == "cpu":
        return torch.device("cpu")
    index = cluster.local_of[rank]
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        node = cluster.nodes[cluster.node_of[rank]].name
        raise InputError(f"rank {rank} is {cluster.devices[rank].name}, device {index} of node {node}; torch finds "
                         f"{torch.cuda.device_count()} GPUs on {socket.gethostname()}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def train_loop(rank: Rank, options: Options, tell: Tell, stop: Callable[[], bool]) -> TrainResult | None:
    """Train to `options.steps`; returns the result on the first rank. `tell` gets a report of every step there."""
    first = rank.rank == rank.plan.ranks[0]
    rank.align_clock()
    root = Path(options.out_dir) / "checkpoints" if options.out_dir else None
    tokens = rank.job.tokens_per_step
    losses: list[float] = []
    bounds: list[tuple[int, int]] = []
    checkpoint: Path | None = None
    trace_from = options.steps - options.trace_steps if options.trace_steps else options.steps
    stopping = False
    balanced: list[Rebalance] = []
    broken, timed = 0, -1
    cores = CoreWatch()
    rank.recorder.timed = options.balance_every > 0

    def commit() -> None:
        nonlocal checkpoint
        checkpoint = rank.commit(options.keep)
        if first:
            tell(str(checkpoint))

    if first:
        tell(rank.step)
    steps: Iterator[StepResult] = iter(())
    saved = rank.step
    lag, begun = rank.lag, rank.step
    start = time.perf_counter_ns()
    while True:
        if rank.step >= trace_from - lag and not rank.recorder.on:
            rank.recorder.start()
        result = next(steps, None)
        if result is None:  # nothing is under way: a checkpoint is due, or the end has come
            done = stopping or rank.step >= options.steps
            due = options.checkpoint_every and rank.step % options.checkpoint_every == 0
            if root and rank.step > saved and (done or due):
                if rank.saving:
                    commit()
                rank.save(root, background=options.async_save and not done)
                saved = rank.step
                if done or not options.async_save:
                    commit()
            if done:
                break
            ahead = options.checkpoint_every - rank.step % options.checkpoint_every if root and \
                options.checkpoint_every else options.steps
            steps = rank.advance(min(options.steps, rank.step + ahead), stop)
            start = time.perf_counter_ns()
            continue
        note = ""
        lr = learning_rate(rank.job.optimizer, rank.step, rank.job.steps)
        if rank.recorder.on:
            rank.interpreter.finish()
        end = result.end_ns or time.perf_counter_ns()
        if result.broken:
            error = rank.locate()
            broken += 1
            if options.on_nan == "stop" or broken == _MOST_BROKEN:
                raise error
            note = f"left out: {error}"
        else:
            broken = 0
        rank.step += 1
        timed += 1
        if timed == 0:  # the first step warms up, and tells nothing
            rank.recorder.busy_s()
            cores = CoreWatch()
        if options.balance_every and rank.step % options.balance_every == 0 and timed > 0 and not stopping:
            change = rank.balance(timed, options.dead_band)
            timed = 0
            if change:
                balanced.append(change)
                note = str(change)
        stopping = stopping or result.stop
        losses.append(result.loss)
        if rank.recorder.on and rank.step > trace_from:
            bounds.append((start + rank.recorder.offset_ns, end + rank.recorder.offset_ns))
        if first:
            tell(StepMetrics(step=rank.step, loss=result.loss, tokens=result.valid, seconds=(end - start) / 1e9, lr=lr,
                             grad_norm=result.grad_norm, bytes_sent=result.bytes_sent, note=note,
                             padding=rank.batch.padding if rank.batch else None,
                             imbalance=rank.batch.imbalance if rank.batch else None))
        if rank.saving and not lag and not result.writing:
            commit()
        start = end if lag else time.perf_counter_ns()
    rank.interpreter.finish()
    spans, memory = rank.recorder.stop()
    uses = rank.gather(cores.use() if rank.step > begun + 1 else None)
    everything = rank.gather((spans, memory, rank.report(), rank.cluster.devices[rank.rank].name, bounds))
    if everything is None or uses is None:
        return None
    trace = None
    if bounds:
        # Asynchronous steps overlap from rank to rank: those of the first rank count.
        shown = [everything[0][4]] if lag else [b for *_, b in everything]
        meta = {"kind": "measured", "steps_ns": [[min(b[i][0] for b in shown), max(b[i][1] for b in shown)]
                                                 for i in range(len(bounds))],
                "device_names": {str(r.rank): name for _, _, r, name, _ in everything}, "tokens_per_step": tokens}
        meta |= {"note": rank.cluster.note} if rank.cluster.note else {}
        trace = Trace(spans=tuple(s for found, *_ in everything for s in found),
                      memory=tuple(m for _, found, *_ in everything for m in found), meta=meta)
        if lag:
            trace = within(trace)
    return TrainResult(step=rank.step, losses=tuple(losses), stopped=stopping, trace=trace,
                       checkpoint=str(checkpoint) if checkpoint else "", ranks=tuple(r for _, _, r, _, _ in everything),
                       balanced=tuple(balanced), foreign=foreign(use for use in uses if use))


def run(plan: Plan, job: Job, cluster: Cluster, source: Source, options: Options, process: int, tell: Tell,
        give_up: Callable[[str], None], *,
        init_method: str = "env://", local: bool = False, store: Any = None,
        stop: Callable[[], bool] | None = None) -> TrainResult | None:
    """Be process `process` of a run, from start to end. With `local`, the parent process looks after interrupts.

    Processes meet at `store`, if it is given, else by `init_method`. `stop`, if given, says whether this one is asked
    to stop; else SIGTERM and SIGINT do. `give_up` is told, from another thread, in what this rank has waited longer
    than `options.patience_s`.
    """
    result = _run(plan, job, cluster, source, options, process, tell, give_up, init_method, local, store, stop)
    # The rank's cycles held its process groups. Their threads must end before the interpreter does: one that lets go
    # of a Python object while it finalizes aborts the process.
    gc.collect()
    return result


def _run(plan: Plan, job: Job, cluster: Cluster, source: Source, options: Options, process: int, tell: Tell,
         give_up: Callable[[str], None], init_method: str, local: bool, store: Any,
         stop: Callable[[], bool] | None) -> TrainResult | None:
    asked = [False]

    def ask(signum: int, frame: Any) -> None:
        asked[0] = True

    if stop is None:
        signal.signal(signal.SIGTERM, ask)
        signal.signal(signal.SIGINT, signal.SIG_IGN if local else ask)
    spec = cluster.devices[plan.ranks[process]]
    if spec.cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, spec.cores)
    torch.set_num_threads(len(spec.cores) or 1)
    device = pick_device(cluster, plan.ranks[process])
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store,
                            init_method=None if store else init_method, rank=process, world_size=len(plan.ranks),
                            timeout=_TIMEOUT)
    rank = Rank(apart(plan) if options.balance_every else plan, job, cluster, source, process)
    rank.start(*(Path(given) if given else None for given in (options.resume, options.init_from)))
    watch = Watch(rank.interpreter, options.patience_s, give_up)
    result = train_loop(rank, options, tell, stop or (lambda: asked[0]))
    dist.barrier()
    watch.close()
    rank.close()
    dist.destroy_process_group()
    return result


def failure(rank: int, error: BaseException) -> Failure:
    """What a rank reports about an exception."""
    text = str(error).strip() or type(error).__name__
    network = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Read error", "NCCL")
    secondary = isinstance(error, dist.DistError) or (isinstance(error, NotFinite) and error.rank != rank) or (
        isinstance(error, RuntimeError) and any(word in text for word in network))
    shown = text if isinstance(error, (InputError, RunError)) else f"{type(error).__name__}: {text.splitlines()[0]}"
    return Failure(rank=rank, message=shown, details="".join(traceback.format_exception(error)),
                   bad_input=isinstance(error, InputError), secondary=secondary)
