"""Asynchronous schedules on real processes: losses and weights of one process that reads the versions stated by hand,
versions met as the program says, and the constant-gradient tests that decide how far ahead to predict."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer
from mixfleet.plan import Plan, Sharding
from mixfleet.plan_rules import why_not
from mixfleet.program.action import by_block
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.run import train
from mixfleet.run.checkpoint import Reader
from mixfleet.run.metrics import StepMetrics
from mixfleet.run.modules import build_blocks
from mixfleet.run.source import DecoderSource, ModulesSource
from mixfleet.run.state import Numbers
from mixfleet.run.trainer import capture
from mixfleet.schedule.asynchronous import readings
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, MaskedSource, Pool, assert_weights, job, pipe, plan

ADAM = Optimizer(lr=3e-2, weight_decay=0.1)
SGD = Optimizer(name="sgd", lr=0.3, momentum=0.8, weight_decay=0.02)
PLAIN = Optimizer(name="sgd", lr=0.5, weight_decay=0.0)


def by_hand(schedule: str, stages: int, size: int, k: int, mb: int) -> tuple[int, int, int]:
    """(version in forward, updates made when it was, version in backward) on stage k, as the papers have it."""
    update = mb // size

    def seen(stage: int) -> int:  # 1F1B: forward of mb follows backward of mb - (p - 1 - stage) - 1
        return max(0, mb - (stages - 1 - stage)) // size

    first = update * size  # the micro-batch that predicts for all of its update
    return {
        "async-1f1b": (seen(k), seen(k), update),
        "pipedream": (seen(k), seen(k), seen(k)),
        "pipedream-vertical": (seen(0), seen(0), seen(0)),
        "pipedream-2bw": (max(0, update - 1),) * 3,
        "pipeoptim": (update, seen(k), update),
        "xpipe": (update, max(0, first - (stages - 1 - k)) // size, update),
    }[schedule]


class Alone:
    """One process that does the micro-batches in turn, each on the versions of weights that it should read."""

    def __init__(self, case: Case) -> None:
        self.case, job = case, case.job
        pipeline = case.plan.pipelines[0]
        self.size, self.stages = len(pipeline.micro_batches), len(pipeline.stages)
        self.home = {b: s for s, stage in enumerate(pipeline.stages) for b in stage.held}
        self.blocks = build_blocks(job.model, range(len(job.model.blocks)), seed=job.seed,
                                   dtype=Numbers.of(job).compute, attention="eager")
        self.params = {(b, n): p for b, m in enumerate(self.blocks) for n, p in m.named_parameters()}
        # Per stage and version: weights, and what a prediction needs besides.
        self.history = [{key: p.detach().clone() for key, p in self.params.items()}]
        rule = job.optimizer
        groups = [{"params": [p for p in self.params.values() if p.ndim > 1], "weight_decay": rule.weight_decay},
                  {"params": [p for p in self.params.values() if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(groups, lr=rule.lr, betas=rule.betas, eps=rule.eps) if rule.name == "adamw"
            else torch.optim.SGD(groups, lr=rule.lr, momentum=rule.momentum))
        self.moments: list[dict[object, dict[str, torch.Tensor]]] = [{}]

    def predicted(self, key: tuple[int, str], made: int, ahead: int) -> torch.Tensor:
        value, state, rule = self.history[made][key].clone(), self.moments[made].get(key), self.case.job.optimizer
        if not state:
            return value
        if rule.name == "adamw":
            t = int(state["step"])
            d = state["exp_avg"] / (1 - rule.betas[0]**t) / (
                (state["exp_avg_sq"] / (1 - rule.betas[1]**t)).sqrt() + rule.eps)
            decay = rule.weight_decay if value.ndim > 1 else 0.0
            for _ in range(ahead):
                value = value - rule.lr * (d + decay * value)
            return value
        return value - rule.lr * ahead * (state["momentum_buffer"] if rule.momentum else state["last"])

    def load(self, which: int, mb: int) -> None:
        for key, p in self.params.items():
            forward, made, backward = by_hand(self.case.plan.schedule, self.stages, self.size, self.home[key[0]], mb)
            version, base = ((forward, made), (backward, backward))[which]
            p.data.copy_(self.history[version][key] if version == base
                         else self.predicted(key, base, version - base))

    def train(self) -> tuple[list[float], dict[tuple[int, str], torch.Tensor]]:
        job, losses = self.case.job, []
        source = (MaskedSource if self.case.masked else DecoderSource)(job)
        source.open(0, 0)
        for step in range(self.case.steps):
            total, grads = 0.0, {key: torch.zeros_like(p) for key, p in self.params.items()}
            valid = int((source.batch(step, 0, job.global_batch)[1] >= 0).sum())
            for replica in range(self.case.plan.pipelines[0].replicas):
                at = replica * self.case.plan.pipelines[0].samples
                for m, size in enumerate(self.case.plan.pipelines[0].micro_batches):
                    x, targets = source.batch(step, at, at + size)
                    at += size
                    self.load(0, step * self.size + m)
                    for block in self.blocks[:-1]:
                        x = block(x)
                    loss = self.blocks[-1](x, targets) / valid
                    self.load(1, step * self.size + m)
                    loss.backward()
                    total += float(loss.detach())
            losses.append(total)
            for key, p in self.params.items():
                grads[key] = p.grad.clone()
                p.data.copy_(self.history[step][key])
            self.optimizer.step()
            self.history.append({key: p.detach().clone() for key, p in self.params.items()})
            self.moments.append({key: {**{n: t.clone() for n, t in self.optimizer.state[p].items() if t is not None},
                                       "last": grads[key]} for key, p in self.params.items()})
            self.optimizer.zero_grad()
        return losses, self.history[-1]


def three(schedule: str, samples: int, *, replicas: int = 1, recompute: str = "none", **sharding: int) -> Plan:
    if replicas == 2:
        return plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=samples, micro_batch=1, replicas=2), schedule=schedule,
                    ).replace(sharding=Sharding(**sharding))
    return plan(pipe((0, 1, 3, 5), (0,), (1,), (2,), samples=samples, micro_batch=1, recompute=recompute),
                schedule=schedule)


CASES = {
    "pipedream": Case(three("pipedream", 1), job(1), 7),
    "pipedream, two micro-batches per update": Case(three("pipedream", 2), job(2, optimizer=SGD), 6),
    "pipedream, two replicas, masked": Case(three("pipedream", 2, replicas=2), job(4), 6, masked=True),
    "pipedream, two replicas, optimizer in two": Case(three("pipedream", 1, replicas=2, optimizer=2), job(2), 6),
    "vertical sync": Case(three("pipedream-vertical", 1), job(1, optimizer=SGD), 7),
    "2bw": Case(three("pipedream-2bw", 3), job(3), 6, masked=True),
    "naive": Case(three("async-1f1b", 1), job(1), 7),
    "pipeoptim": Case(three("pipeoptim", 1), job(1), 7),
    "pipeoptim, momentum": Case(three("pipeoptim", 2), job(2, optimizer=SGD), 6),
    "pipeoptim, plain sgd, two replicas": Case(three("pipeoptim", 1, replicas=2), job(2, optimizer=PLAIN), 6),
    "xpipe": Case(three("xpipe", 2), job(2), 6),
    "pipedream, a first stage of two": Case(plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=3, members=(
        (2, 1), ())), schedule="pipedream"), job(6), 5, masked=True),
    "full recompute": Case(three("pipedream", 1, recompute="full"), job(1), 6),
}


QUICK = ("pipedream", "2bw", "naive", "pipeoptim, momentum", "pipedream, two replicas, masked")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_equals_one_process_that_reads_the_stated_versions(pool: Pool, name: str) -> None:
    case = CASES[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    found = pool.run(case)
    losses, weights = Alone(case).train()
    assert found[0].losses == pytest.approx(losses, rel=1e-9)
    assert_weights(case, found, weights)
    _met_what_the_program_says(case, found)


def _met_what_the_program_says(case: Case, found: list[object]) -> None:
    pipeline = case.plan.pipelines[0]
    program = lower(case.plan, case.job.model, updates=case.steps)
    for s, stage in enumerate(pipeline.stages):
        said = readings(by_block(program.role(0, s).actions)).of
        for rank in stage.devices:
            outcome = found[case.plan.ranks.index(rank)]
            met = outcome.met  # type: ignore[attr-defined]
            assert len(met) == case.steps * len(pipeline.micro_batches)
            for one in met:
                mb = one.step * len(pipeline.micro_batches) + one.micro_batch
                read = said[stage.held[0], mb]
                assert (one.forward, one.made, one.backward) == (read.forward, read.made, read.backward)
                assert one.staleness == read.staleness
                assert (one.forward, one.made, one.backward) == by_hand(
                    case.plan.schedule, len(pipeline.stages), len(pipeline.micro_batches), s, mb)


class _Look(torch.autograd.Function):
    """x + w, which tells what w is in forward, and what it is when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, told: list[Any]) -> torch.Tensor:
        ctx.w, ctx.told = w, told
        told.append(("F", w.detach().clone()))
        return x + w

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.told.append(("B", ctx.w.detach().clone()))
        return grad[0], grad[0].sum(0), None


class Adds(torch.nn.Module):
    """Its gradient is the same whatever its weights: with the sum as loss, the number of samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(width, dtype=torch.float64))
        self.told: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Look.apply(x, self.w, self.told)
        return out


def total(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output * targets).sum()


class LinearSource(ModulesSource):
    """Blocks that add, on samples that are all alike."""

    def outcome(self) -> dict[int, list[Any]]:
        return {b: block.told for b, block in enumerate(self.blocks) if block.told}  # type: ignore[misc]


def constant(schedule: str, micro_batches: int, rule: Optimizer, steps: int) -> tuple[Case, int]:
    """Four stages of one block each, whose gradients never change."""
    blocks = [Adds(3) for _ in range(4)]
    inputs, targets = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1.0, -0.5, 2.0]], dtype=torch.float64)
    model, shapes = capture(blocks, inputs, torch.float64, "adds")  # type: ignore[arg-type]
    made = Job(name="adds", model=model, seq_len=1, global_batch=micro_batches, precision="fp64", steps=steps,
               optimizer=rule)
    source = LinearSource(made, [Adds(3) for _ in range(4)], total, inputs, targets, shapes)  # type: ignore[arg-type]
    where = plan(pipe((0, 1, 2, 3, 4), (0,), (1,), (2,), (3,), samples=micro_batches, micro_batch=1),
                 schedule=schedule)
    return Case(where, made, steps, source=source), micro_batches


@pytest.mark.parametrize(("schedule", "micro_batches"), [
    ("pipeoptim", 1), pytest.param("pipeoptim", 2, marks=pytest.mark.slow), ("xpipe", 2),
    pytest.param("xpipe", 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", [PLAIN, Optimizer(name="sgd", lr=0.1, momentum=0.4, weight_decay=0.0),
                                  Optimizer(lr=0.02, weight_decay=0.3)], ids=["sgd", "momentum", "adamw"])
def test_predicted_weights_are_those_of_the_backward(pool: Pool, schedule: str, micro_batches: int,
                                                     rule: Optimizer) -> None:
    """The off-by-one of S22 and S34: with a constant gradient, what a forward predicts is what its backward finds, if
    it looks ahead by the updates between them, p - 1 - i for one micro-batch per update."""
    steps = 36 if rule.momentum else 9
    case, size = constant(schedule, micro_batches, rule, steps)
    found = pool.run(case)
    settled = steps - 4 if rule.momentum else 5  # in updates; the momentum needs as many to be within 1e-9
    for stage, outcome in enumerate(found):
        looks = outcome.told[stage]
        forward, backward = ([w for op, w in looks if op == which] for which in "FB")
        assert len(forward) == len(backward) == steps * size
        for one in outcome.met:
            mb = one.step * size + one.micro_batch
            if one.step >= settled:
                torch.testing.assert_close(forward[mb], backward[mb], rtol=0, atol=1e-8)
        moved = (backward[-1] - backward[-1 - size]).abs().min()
        assert moved > 1e-3  # so that one update more or less would show
        if micro_batches == 1:
            late = [one.step - one.made for one in outcome.met if one.step >= 4]
            assert set(late) == {len(found) - 1 - stage}


@pytest.mark.parametrize("schedule", ["async-1f1b", "pipedream"])
def test_without_prediction_the_weights_are_as_old_as_stated(pool: Pool, schedule: str) -> None:
    case, _ = constant(schedule, 1, PLAIN, 9)
    for stage, outcome in enumerate(pool.run(case)):
        forward, backward = ([w for op, w in outcome.told[stage] if op == which] for which in "FB")
        step = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64)  # lr times the gradient
        late = 3 - stage
        for mb in range(4, 9):
            start = torch.arange(3, dtype=torch.float64)
            torch.testing.assert_close(forward[mb], start - (mb - late) * step)
            torch.testing.assert_close(backward[mb], start - (mb - (late if schedule == "pipedream" else 0)) * step)


@pytest.mark.parametrize("name", ["pipedream", "naive"])
def test_bytes_are_those_predicted(pool: Pool, name: str) -> None:
    case = Case(three({"naive": "async-1f1b"}.get(name, name), 2, replicas=2), job(4), 5)
    layout = Layout(case.plan, case.job.model)
    expected = bytes_sent(lower(case.plan, case.job.model, layout, updates=1), case.plan, case.job, layout)
    for rank, outcome in zip(case.plan.ranks, pool.run(case)):
        sent = Counter()  # type: ignore[var-annotated]
        for (op, _), n in outcome.sent.items():
            sent[op] += n
        assert sent == {op: n * case.steps for op, n in expected[str(rank)].items()}


def test_stashed_gradients_differ_from_naive_ones() -> None:
    """Backward on newer weights than the forward's is another gradient."""
    ends = [Alone(Case(three(name, 1), job(1), 4)).train()[1] for name in ("pipedream", "async-1f1b")]
    assert max(float((a - b).abs().max()) for a, b in zip(*(e.values() for e in ends))) > 1e-6


@pytest.mark.slow
def test_checkpoints_are_of_a_drained_pipeline(tmp_path: Path) -> None:
    """Six steps with a checkpoint at three are the two halves by themselves; another plan goes on from there."""
    where, what = three("pipedream", 1), job(1)
    whole = train(where, what, CLUSTER, steps=6, out_dir=tmp_path / "whole", checkpoint_every=3, keep=2)
    assert whole is not None
    half = Alone(Case(where, what, 3)).train()
    assert whole.losses[:3] == pytest.approx(half[0], rel=1e-9)
    reader = Reader(tmp_path / "whole" / "checkpoints" / "step-00000003")
    assert (reader.state.step, reader.state.position, reader.state.extra["updates"]) == (3, 3, 3)
    again = train(where, what, CLUSTER, steps=6, resume=tmp_path / "whole" / "checkpoints" / "step-00000003")
    assert again is not None
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-12)
    assert {m.step for r in again.ranks for m in r.met} == {3, 4, 5}
    first = again.ranks[0].met
    assert [m.staleness for m in first] == [0, 1, 2]  # the pipeline fills again
    other = train(where.replace(schedule="1f1b"), what, CLUSTER, steps=4,
                  resume=tmp_path / "whole" / "checkpoints" / "step-00000003")
    assert other is not None
    assert other.losses[0] == pytest.approx(whole.losses[3], rel=1e-9)  # on the very weights of the checkpoint


@pytest.mark.slow
def test_an_interrupt_drains_the_pipeline_and_saves(tmp_path: Path) -> None:
    reported: list[StepMetrics] = []

    def interrupt(metrics: StepMetrics) -> None:
        reported.append(metrics)
        if metrics.step == 4:
            signal.raise_signal(signal.SIGINT)

    found = train(three("pipeoptim", 2), job(2).replace(steps=100_000), CLUSTER, out_dir=tmp_path, on_step=interrupt)
    assert found is not None
    assert found.stopped
    assert 4 < found.step < 2000
    assert found.step == len(found.losses) == reported[-1].step
    assert Reader(tmp_path / "checkpoints").state.step == found.step


@pytest.mark.parametrize("change", [{"balance_every": 2}, {"on_nan": "skip"}])
def test_what_asynchronous_runs_cannot_do_is_said(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="under the schedule pipedream: the next steps are under way already"):
        train(three("pipedream", 1), job(1), CLUSTER, **change)
