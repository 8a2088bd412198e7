"""Four processes that live as long as the tests of the runtime: they carry out one plan after another."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.run.collective import Groups, Sums
from mixfleet.run.parked import Parked
from mixfleet.run.source import DecoderSource
from mixfleet.run.state import Numbers
from mixfleet.schedule.named import SCHEDULES
from mixfleet.sim.memory import static
from mixfleet.sim.sent import bytes_sent

CPU = Device(name="cpu", kind="cpu", flops={"fp32": 1e10, "fp64": 5e9}, vector_flops=1e10, memory_bytes=2**31,
             memory_Bps=1e10)
LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)
CLUSTER = Cluster(name="four", nodes=(Node(name="here", devices=(CPU,) * 4, link=LINK, nic=LINK),))
FIGURES = {"layers": 3, "hidden": 16, "heads": 4, "vocab": 23, "max_seq_len": 16, "ffn": 20}


def job(global_batch: int = 6, **changes: Any) -> Job:
    """A decoder small enough that a step takes milliseconds; fp64, so that equality is sharp."""
    figures = {**FIGURES, **changes.pop("figures", {})}
    settings: dict[str, Any] = {"precision": "fp64", "seed": 5, "optimizer": Optimizer(lr=3e-2, weight_decay=0.1),
                                **changes}
    return Job(name="tiny", model=build(figures), seq_len=8, global_batch=global_batch, steps=4, **settings)


def pipe(cuts: tuple[int, ...], *devices: tuple[int, ...], samples: int, micro_batch: int, tensor: tuple[int, ...] = (),
         replicas: int = 1, recompute: str | tuple[str, ...] = "none", context: int = 1,
         shares: tuple[int, ...] = (), members: tuple[tuple[int, ...], ...] = (), dispatch: str = "split") -> Pipeline:
    """A pipeline cut at `cuts`, first and last block included; `members` are the shares of each stage's replicas."""
    degrees, members = tensor or (1,) * len(devices), members or ((),) * len(devices)
    return Pipeline(samples=samples, micro_batch=micro_batch, replicas=replicas, context=context,
                    context_shares=shares, stages=tuple(
        Stage(blocks=(cuts[i], cuts[i + 1]), devices=d, tensor=degrees[i], recompute=recompute,  # type: ignore[arg-type]
              shares=members[i], dispatch=dispatch if members[i] else "split")  # type: ignore[arg-type]
        for i, d in enumerate(devices)))


def chunked(schedule: str, cuts: tuple[int, ...], *devices: tuple[int, ...], samples: int, micro_batch: int,
            replicas: int = 1, tensor: int = 1, recompute: str = "none", context: int = 1) -> Pipeline:
    """A pipeline whose chunks, between `cuts`, lie on the stages as the schedule wants them."""
    home = SCHEDULES[schedule].place(len(devices), (len(cuts) - 1) // len(devices))
    stages = []
    for s, d in enumerate(devices):
        first, *more = [(cuts[k], cuts[k + 1]) for k, h in enumerate(home) if h == s]
        stages.append(Stage(blocks=first, more=tuple(more), devices=d, tensor=tensor,
                            recompute=recompute))  # type: ignore[arg-type]
    return Pipeline(stages=tuple(stages), samples=samples, micro_batch=micro_batch, replicas=replicas,
                    context=context)


def plan(*pipelines: Pipeline, sharding: tuple[int, int, int] = (1, 1, 1), schedule: str = "1f1b",
         shares: tuple[int, ...] = (), accumulation: str = "plain", hierarchical: int = 0,
         batching: str = "padded") -> Plan:
    w, g, o = sharding
    return Plan(pipelines=pipelines, schedule=schedule, accumulation=accumulation,  # type: ignore[arg-type]
                batching=batching,  # type: ignore[arg-type]
                sharding=Sharding(weights=w, gradients=g, optimizer=o, shares=shares, hierarchical=hierarchical))


class MaskedSource(DecoderSource):
    """The job's data with targets masked unevenly: sample k of a step keeps only its first 1 + 3k mod 8 targets."""

    def batch(self, step: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = super().batch(step, lo, hi)
        keep = 1 + 3 * torch.arange(lo, hi) % 8
        return tokens, targets.masked_fill(torch.arange(targets.shape[1]) >= keep.unsqueeze(1), -100)


class Outcome(NamedTuple):
    """What one rank ends with."""

    losses: list[float]
    norms: list[float]
    valid: list[int]
    pieces: list[tuple[str, str, int, int, torch.Tensor]]
    weights: list[tuple[int, int, int, int, torch.Tensor]]
    """(unit, column, lo, hi, values) of all weights held."""
    sent: Counter[tuple[str, int]]
    state_bytes: dict[str, int]
    spans: list[Any]
    memory: list[Any]
    met: tuple[Any, ...] = ()
    scales: tuple[tuple[bool, float], ...] = ()
    """fp16: after every step, whether it was left out, and the loss scale from then on."""
    told: Any = None
    """What the source has to say, if it can tell."""
    routed: dict[str, list[int]] = {}
    """Rows to each expert, by block."""


class Case(NamedTuple):
    plan: Plan
    job: Job
    steps: int = 4
    masked: bool = False
    trace: bool = False
    source: Any = None
    """In place of the job's own model and data."""
    loss_scale: float = 0.0
    """fp16: what it starts with, and it grows after three good steps; 0 for the usual."""
    sabotage: str = ""
    """`accumulate`: hop 1 forgets earlier micro-batches. `hop 2`: groups do not hear of each other.
    `slow copies`: what goes to the host takes long."""


def carry_out(case: Case, process: int) -> Outcome:
    """Be one rank of a case."""
    from mixfleet.run import interpreter
    from mixfleet.run.worker import Rank

    source = case.source or (MaskedSource if case.masked else DecoderSource)(case.job)
    rank = Rank(case.plan, case.job, CLUSTER, source, process)
    rank.start()
    if case.sabotage == "accumulate":
        for exchange in rank.interpreter._exchanges.values():
            if isinstance(exchange, Sums):
                exchange.accumulate = False
    elif case.sabotage == "slow copies":
        saved = Parked.save

        def slowly(self: Parked) -> Iterator[tuple[()]]:
            time.sleep(0.02)
            yield from saved(self)

        Parked.save = slowly  # type: ignore[method-assign]
    elif case.sabotage == "hop 2":
        rank.interpreter._do["Y"] = lambda action: None
    results, scales = [], []
    if case.loss_scale:
        rank.interpreter.loss_scale = case.loss_scale
    usual, interpreter._GROWTH_STEPS = interpreter._GROWTH_STEPS, 3 if case.loss_scale else interpreter._GROWTH_STEPS
    if case.trace:
        rank.recorder.start()
    for result in rank.advance(case.steps, lambda: False):
        results.append(result)
        scales.append((result.skipped, rank.interpreter.loss_scale))
        rank.step += 1
    interpreter._GROWTH_STEPS = usual
    rank.interpreter.finish()
    if case.sabotage == "slow copies":
        Parked.save = saved  # type: ignore[method-assign]
    spans, memory = rank.recorder.stop()
    units = rank.interpreter.units.values()
    outcome = Outcome([r.loss for r in results], [r.grad_norm for r in results], [r.valid for r in results],
                      [p for u in units for p in u.pieces()],
                      [(u.index, p.column, p.lo, p.hi, u.home(u.weights.data)[p.offset:p.offset + p.hi - p.lo].clone())
                       for u in units for p in u.weights.parts],
                      rank.fabric.sent, rank.report().state_bytes, spans, memory, rank.report().met, tuple(scales),
                      source.outcome() if hasattr(source, "outcome") else None, rank.report().routed)
    rank.close()
    return outcome


def _serve(process: int, size: int, rendezvous: str, pipe: Any) -> None:
    import os

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=size)
    while (case := pipe.recv()) is not None:
        try:
            if process < len(case.plan.ranks):
                # By value: torch's own pickling shares memory, through a helper process that a busy machine outruns.
                pipe.send_bytes(pickle.dumps(carry_out(case, process)))
            else:
                Groups(case.plan, cuda=False)
        except BaseException:
            import traceback

            pipe.send_bytes(pickle.dumps(traceback.format_exc()))
    os._exit(0)


class Pool:
    """`run` gives the outcomes of all ranks of a plan. The processes live on, unless a case fails in them."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for process in range(self._size):
            here, there = context.Pipe()
            self._processes.append(context.Process(target=_serve, daemon=True, args=(
                process, self._size, f"file://{self._directory.name}/rendezvous", there)))
            self._processes[-1].start()
            self._pipes.append(here)

    def run(self, case: Case) -> list[Outcome]:
        try:
            return self._run(case)
        except BaseException:  # what others still send would be taken for answers to the next case
            self.close()
            self._start()
            raise

    def _run(self, case: Case) -> list[Outcome]:
        pipes = self._pipes[:len(case.plan.ranks)]
        for p in self._pipes:
            p.send(case)
        found: dict[Any, Outcome] = {}
        while len(found) < len(pipes):
            ready = multiprocessing.connection.wait([p for p in pipes if p not in found], 120)
            assert ready, f"{len(pipes) - len(found)} ranks hang"
            for p in ready:
                found[p] = pickle.loads(p.recv_bytes())
                assert not isinstance(found[p], str), found[p]
        return [found[p] for p in pipes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def assert_weights(case: Case, found: list[Outcome], weights: dict[tuple[int, str], torch.Tensor]) -> None:
    """All ranks together hold the weights, by (block, parameter), to 1e-9, and nothing twice."""
    split = {f"{b.name}/{p.name}": (i, p) for i, b in enumerate(case.job.model.blocks) for p in b.params}
    covered = 0
    for outcome in found:
        for tensor, kind, lo, hi, values in outcome.pieces:
            if kind == "weights":
                i, p = split[tensor]
                whole = weights[i, p.name].movedim(p.split or 0, 0).reshape(-1)
                torch.testing.assert_close(values, whole[lo:hi], rtol=1e-9, atol=1e-12)
                covered += hi - lo
    assert covered == sum(w.numel() for w in weights.values())


def assert_bytes(case: Case, found: list[Outcome]) -> None:
    """Every rank sent, by kind, what the simulator says."""
    layout = Layout(case.plan, case.job.model)
    expected = bytes_sent(lower(case.plan, case.job.model, layout), case.plan, case.job, layout)
    for rank, outcome in zip(case.plan.ranks, found):
        sent: Counter[str] = Counter()
        for (op, _), nbytes in outcome.sent.items():
            sent[op] += nbytes
        assert +sent == {op: case.steps * n for op, n in expected[str(rank)].items()}


def assert_bytes_and_state(case: Case, found: list[Outcome]) -> None:
    """The same, and every rank holds what the simulator says."""
    assert_bytes(case, found)
    layout = Layout(case.plan, case.job.model)
    for rank, outcome in zip(case.plan.ranks, found):
        state = static(layout, case.job, rank)
        assert outcome.state_bytes == {"weights": state.weights, "gradients": state.gradients,
                                       "optimizer": state.master + state.moments}
        assert CLUSTER.devices[rank].memory_bytes > sum(state)


def expected_bytes(case: Case) -> dict[tuple[str, int, int], int]:
    """Payload bytes by (kind, source, destination) that the layout says, over all steps of a case."""
    layout, numbers = Layout(case.plan, case.job.model), Numbers.of(case.job)
    total: Counter[tuple[str, int, int]] = Counter()
    span = case.plan.span
    for role in (whole.view(k) for whole in lower(case.plan, case.job.model, layout).roles
                 for k in range(len(whole.seats))):
        pipeline = case.plan.pipelines[role.pipeline]
        for copy, member in product(range(pipeline.copies), range(pipeline.stages[role.stage].members)):
            for post in case.plan.posts(role.pipeline, role.stage, copy, member):
                for a in role.actions:
                    if a.op in ("G", "P", "R", "Y"):
                        size = (numbers.compute if a.op in "GP" else numbers.gradient).itemsize
                        for m in layout.moves(a.op, a.lo):
                            if m.src == post and m.dst % span != post % span:
                                total[a.op, post % span, m.dst % span] += (m.hi - m.lo) * size * case.steps
    return dict(total)


class Reference(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """Whole tensors by key, flat, cut dimension first."""


def reference(case: Case, left_out: Collection[int] = ()) -> Reference:
    """The same training in one process, with torch's own optimizer, on whole batches, without the updates of the steps
    that are `left_out`."""
    from mixfleet.run.modules import build_blocks

    job, rule = case.job, case.job.optimizer
    blocks = build_blocks(job.model, range(len(job.model.blocks)), seed=job.seed, dtype=Numbers.of(job).compute,
                          attention="eager")
    params: dict[str, torch.nn.Parameter] = {}
    for block, module in zip(job.model.blocks, blocks):
        for p in block.params:
            path, _, leaf = p.name.rpartition(".")
            holder = module.get_submodule(path)
            if p.tied:
                setattr(holder, leaf, params[p.tied])
            else:
                params[f"{block.name}/{p.name}"] = getattr(holder, leaf)
    groups = [{"params": [p], "lr": rule.lr * scale, "weight_decay": decay} for key, p in params.items()
              if p.requires_grad for scale, decay in (rule.rates(key, p.ndim),)]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=rule.lr, betas=rule.betas, eps=rule.eps) if rule.name == "adamw"
        else torch.optim.SGD(groups, lr=rule.lr, momentum=rule.momentum))
    source = (MaskedSource if case.masked else DecoderSource)(job)
    source.open(0, 0)
    losses, norms = [], []
    for step in range(case.steps):
        x, targets = source.batch(step, 0, job.global_batch)
        for block in blocks[:-1]:
            x = block(x)
        loss = blocks[-1](x, targets) / (targets >= 0).sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params.values(), job.clip_norm or float("inf"))))
        if step not in left_out:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    split = {f"{b.name}/{p.name}": p.split or 0 for b in job.model.blocks for p in b.params}
    return Reference(losses, norms, {k: p.detach().movedim(split[k], 0).reshape(-1) for k, p in params.items()})
