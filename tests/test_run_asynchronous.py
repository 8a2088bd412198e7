"""Asynchronous schedules on real processes: losses and weights of one process that reads the versions stated by hand,
versions met as the program says, and the constant-gradient tests that decide how far ahead to predict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mixfleet.job import Optimizer
from mixfleet.plan import Plan, Sharding, why_not
from mixfleet.program.action import by_block
from mixfleet.program.lower import lower
from mixfleet.run.modules import build_blocks
from mixfleet.run.source import DecoderSource
from mixfleet.run.state import Numbers
from mixfleet.schedule.asynchronous import readings
from run_pool import CLUSTER, Case, MaskedSource, Pool, job, pipe, plan

ADAM = Optimizer(lr=3e-2, weight_decay=0.1)
SGD = Optimizer(name="sgd", lr=0.3, momentum=0.8, weight_decay=0.02)
PLAIN = Optimizer(name="sgd", lr=0.5, weight_decay=0.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


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
    "full recompute": Case(three("pipedream", 1, recompute="full"), job(1), 6),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process_that_reads_the_stated_versions(pool: Pool, name: str) -> None:
    case = CASES[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    found = pool.run(case)
    losses, weights = Alone(case).train()
    assert found[0].losses == pytest.approx(losses, rel=1e-9)
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
