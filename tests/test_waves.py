"""HetPipe: virtual workers, waves, and how far one may lead. Programs, closed forms and the simulated clock; then real
ranks beside one process that plays all virtual workers by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import sim_toys
import toy
from mixfleet.cluster import Cluster
from mixfleet.job import Job, Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Synchronization
from mixfleet.plan_rules import why_not
from mixfleet.program.action import by_block, dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.repeat import Repeated
from mixfleet.program.text import from_text, to_text
from mixfleet.run import train
from mixfleet.run.checkpoint import Reader
from mixfleet.run.modules import build_blocks
from mixfleet.run.optim import learning_rate
from mixfleet.run.source import DecoderSource
from mixfleet.run.state import Numbers
from mixfleet.schedule.asynchronous import WAVES, bound, readings, stream
from mixfleet.schedule.properties import properties
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from mixfleet.sim.interpreter import play
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, MaskedSource, Pool, assert_weights, job, pipe, plan, reference
from sim_toys import free_overheads  # noqa: F401
from test_program import edited
from test_sim_hazards import reachable

SGD = Optimizer(name="sgd", lr=0.4, weight_decay=0.03)
MOMENTUM = Optimizer(name="sgd", lr=0.3, momentum=0.8, weight_decay=0.02)


def waves(*pipelines: Pipeline, distance: int = 0, early: bool = False) -> Plan:
    return plan(*pipelines, schedule="hetpipe").replace(
        synchronization=Synchronization(distance=distance, pull="early" if early else "late"))


def toys(distance: int = 1) -> Plan:
    """A virtual worker of two stages and two micro-batches, one of three and five, one of a single device."""
    return waves(toy.pipeline((0, 2, 5), ((0,), (1,)), samples=2),
                 toy.pipeline((0, 1, 3, 5), ((2,), (3,), (4,)), samples=5),
                 toy.pipeline((0, 5), ((5,),), samples=3), distance=distance)


def test_golden_program() -> None:
    one = waves(toy.pipeline((0, 3), ((0,),), samples=2), toy.pipeline((0, 3), ((1,),), samples=1), distance=1)
    assert to_text(lower(one, toy.model(1), updates=2)) == (
        "p0s0: F0:3.0 B0:3.0 S0 S1 S2 F0:3.1 B0:3.1 S0 S1 S2 PU2.0 Y2.0 PU1.0 Y1.0 PU0.0 Y0.0 F0:3.2 B0:3.2 S0 S1 S2 "
        "F0:3.3 B0:3.3 S0 S1 S2 PU2.1 Y2.1 PU1.1 Y1.1 PU0.1 Y0.1 PL2.0 PL1.0 PL0.0 PL2.1 PL1.1 PL0.1\n"
        "p1s0: F0:3.0 B0:3.0 S0 S1 S2 PU2.0 Y2.0 PU1.0 Y1.0 PU0.0 Y0.0 F0:3.1 B0:3.1 S0 S1 S2 PU2.1 Y2.1 PU1.1 Y1.1 "
        "PU0.1 Y0.1 PL2.0 PL1.0 PL0.0 PL2.1 PL1.1 PL0.1\n")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("distance", [0, 1, 3])
def test_staleness_is_that_of_the_paper(size: int, distance: int) -> None:
    """Local: the Nm - 1 micro-batches in flight (or the stages less one). Global: (D + 1)(s + 1) + s - 1, reached."""
    stages, updates = 4, 9
    orders = stream(tuple(range(stages)), size, updates, WAVES, distance)
    local = min(size, stages) - 1
    for k, order in enumerate(orders):
        found = readings(order).of
        assert found.keys() == {(k, b) for b in range(size * updates)}
        for (_, b), read in found.items():
            assert read.forward == read.made == read.backward == max(0, b - local)
            assert read.staleness == min(b, local)
            assert read.waves == max(0, read.forward // size - distance)
        unknown = max(b - read.waves * size for (_, b), read in found.items())
        assert unknown <= bound(size, distance) == (distance + 1) * size + size - 2
        if size <= stages:
            assert unknown == bound(size, distance)
        assert sum(op == "PL" for op, _, _ in order) == sum(op == "PU" for op, _, _ in order) == updates


def test_as_many_as_a_wave_are_in_flight_and_no_more() -> None:
    """Two of four stages' micro-batches in flight keep half of the stages busy; four of them all."""
    for size, bubble in ((1, 0.75), (2, 0.5), (3, 0.25), (4, 0.0), (6, 0.0)):
        found = properties("hetpipe", 4, size)
        assert not isinstance(found, str)
        assert found.in_flight[0] == min(size, 4)
        assert found.bubble == pytest.approx(bubble, abs=1e-12)
        assert set(found.staleness) == {(min(size, 4) - 1,) * 2}
        assert max(found.versions) == min(size, 4)


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_programs_are_sound_and_repeat_themselves(distance: int) -> None:
    for of in (toys(distance), waves(toy.pipeline((0, 1, 2, 3, 5), ((0, 1), (2, 3), (4, 5), (6, 7)), samples=3,
                                                  replicas=2), distance=distance)):
        base = lower(of, toy.model())
        assert check(base, of, toy.model()) == ()
        assert from_text(to_text(base)) == base
        layout = Layout(of, toy.model())
        for role in base.roles:
            slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
            assert reachable(role.actions, hazards(role.actions, layout)) == reachable(role.actions, slow)
        for extra in (0, 1, 3):
            longer = lower(of, toy.model(), updates=of.updates + extra)
            for a, b in zip(base.roles, longer.roles):
                parts = Repeated(a.actions, len(of.pipelines[a.pipeline].micro_batches), of.depth, waves=True)
                assert parts.least == of.updates
                count = of.updates + extra
                assert tuple(x for u in range(count) for x in parts.update(u, count)) == b.actions


def test_the_checker_knows_the_distance() -> None:
    """A pull that is left out, or comes a wave late, lets a worker lead too far."""
    of, model = toys(0), toy.model()
    program = lower(of, model, updates=4)
    assert check(program, of, model) == ()

    def without(name: str) -> str:
        return " ".join(check(edited(program, 0, lambda actions: [a for a in actions if str(a) != name]), of, model))

    assert "PL0.1 is missing" in without("PL0.1")
    assert "Y1.1 is missing" in without("Y1.1")
    assert "nothing is there yet to pull" in without("Y1.1")
    late = lower(of.replace(synchronization=Synchronization(distance=1)), model, updates=4)
    assert any("knows 0 waves of the others; at version 2 and distance 0 it must know 1" in p
               for p in check(late, of, model))


@pytest.mark.parametrize(("change", "rule", "says"), [
    ({"schedule": "1f1b"}, SGD, "synchronization is of virtual workers, which the schedule 1f1b does not have"),
    ({"synchronization": Synchronization(distance=-1)}, SGD, "synchronization.distance is -1"),
    ({"sharding": Sharding(optimizer=2)}, SGD, "sharding.optimizer is 2, but under hetpipe"),
    ({}, Optimizer(), "optimizer is adamw: under hetpipe"),
    ({"pipelines": (toy.pipeline((0, 5), ((0, 1),), samples=10, tensor=(2,)),)}, SGD,
     "pipelines[0].stages[0].tensor is 2; under hetpipe"),
])
def test_what_cannot_be_is_refused(change: dict[str, Any], rule: Optimizer, says: str) -> None:
    assert why_not(toys(), toy.job(10).replace(optimizer=SGD), toy.cluster(4, 4)) is None
    assert says in (why_not(toys().replace(**change), toy.job(10).replace(optimizer=rule), toy.cluster(4, 4)) or "")


def unlike(distance: int) -> tuple[Plan, Job, Any]:
    """A virtual worker of one device, and one of two that are half as fast, each with a wave of two."""
    blocks = [sim_toys.block(i, elements=100) for i in range(2)]
    fast, slow = sim_toys.device([(1.0, 2.0)] * 2), sim_toys.device([(3.0, 6.0)] * 2)
    of = waves(toy.pipeline((0, 2), ((0,),), samples=2), toy.pipeline((0, 1, 2), ((1,), (2,)), samples=2),
               distance=distance)
    return of, sim_toys.job(blocks, 4, optimizer=SGD), sim_toys.cluster(fast, slow, slow)


@pytest.mark.usefixtures("free_overheads")
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_the_simulated_clock_keeps_the_distance(distance: int) -> None:
    """The fast one takes 12 ms for a wave, the slow one 18: it leads by up to D waves and then waits, never further."""
    of, what, where = unlike(distance)
    assert why_not(of, what, where) is None
    found = predict(of, what, where)
    assert found.step_s == pytest.approx(18e-3, rel=1e-3)
    assert found.devices[0].busy == pytest.approx(12 / 18, rel=0.01)
    layout = Layout(of, what.model)
    rows = play(lower(of, what.model, layout, 12), of, what, where, layout, fold=False).rows
    fast, slow = ([end for a, end in zip(row.actions, row.end_ns) if a.op == "B"][1::2] for row in rows[:2])
    assert len(fast) == len(slow) == 12
    leads = [done + 1 - sum(t <= now for t in slow) for done, now in enumerate(fast)]
    assert max(leads) == distance + 1  # the wave just done counts: it is pushed, and then the worker waits
    assert [a.mb for a in rows[0].actions if str(a).startswith("PU0")] == list(range(12))


class Hand:
    """All virtual workers in one process, as the paper has it: `local` weights with the updates of every micro-batch,
    the sum of a wave's updates pushed, and what others pushed added as soon as, and not before, the distance asks."""

    def __init__(self, case: Case) -> None:
        self.case, job = case, case.job
        self.blocks = build_blocks(job.model, range(len(job.model.blocks)), seed=job.seed,
                                   dtype=Numbers.of(job).compute, attention="eager")
        self.params = {(b, n): p for b, m in enumerate(self.blocks) for n, p in m.named_parameters()}
        first = {key: p.detach().clone() for key, p in self.params.items()}
        self.workers = [(p, first_sample) for (p, _), first_sample in zip(case.plan.replicas, case.plan.first_samples)]
        count = len(self.workers)
        self.history = [[first] for _ in range(count)]
        self.agreed = [{k: v.clone() for k, v in first.items()} for _ in range(count)]
        self.changes: list[list[dict[Any, torch.Tensor]]] = [[] for _ in range(count)]
        self.momentum = [{k: torch.zeros_like(v) for k, v in first.items()} for _ in range(count)]

    def train(self) -> tuple[list[float], dict[Any, torch.Tensor]]:
        of, job = self.case.plan, self.case.job
        distance = of.synchronization.distance
        source = (MaskedSource if self.case.masked else DecoderSource)(job)
        source.open(0, 0)
        losses = []
        for wave in range(self.case.steps):
            valid = int((source.batch(wave, 0, job.global_batch)[1] >= 0).sum())
            losses.append(sum(self._wave(v, wave, valid, source) for v in range(len(self.workers))))
            if wave >= distance:
                self._pull(wave - distance)
        for wave in range(max(0, self.case.steps - distance), self.case.steps):
            self._pull(wave)
        return losses, self.agreed[0]

    def _wave(self, v: int, wave: int, valid: int, source: Any) -> float:
        p, at = self.workers[v]
        pipeline, rule = self.case.plan.pipelines[p], self.case.job.optimizer
        sizes = pipeline.micro_batches
        local = min(len(pipeline.stages), len(sizes)) - 1
        before, total = self.history[v][-1], 0.0
        lr = learning_rate(rule, wave, self.case.job.steps)
        for m, size in enumerate(sizes):
            x, targets = source.batch(wave, at, at + size)
            at += size
            for key, param in self.params.items():
                param.data.copy_(self.history[v][max(0, wave * len(sizes) + m - local)][key])
                param.grad = None
            for block in self.blocks[:-1]:
                x = block(x)
            loss = self.blocks[-1](x, targets) / valid
            loss.backward()
            total += float(loss.detach())
            after = {}
            for key, param in self.params.items():
                value, decay = self.history[v][-1][key], rule.weight_decay if param.ndim > 1 else 0.0
                gradient = param.grad + decay * size / self.case.job.global_batch * value
                self.momentum[v][key] = rule.momentum * self.momentum[v][key] + gradient
                after[key] = value - lr * self.momentum[v][key]
            self.history[v].append(after)
        self.changes[v].append({key: self.history[v][-1][key] - before[key] for key in before})
        return total

    def _pull(self, wave: int) -> None:
        for v in range(len(self.workers)):
            for key, agreed in self.agreed[v].items():
                agreed += sum(changes[wave][key] for changes in self.changes)
            self.history[v][-1] = {key: agreed + sum(change[key] for change in self.changes[v][wave + 1:])
                                   for key, agreed in self.agreed[v].items()}


def hetpipe(distance: int, *, early: bool = False) -> Plan:
    """Two stages with a wave of two, and two others with one of three (the last smaller)."""
    return waves(pipe((0, 2, 5), (0,), (1,), samples=2, micro_batch=1),
                 pipe((0, 4, 5), (2,), (3,), samples=5, micro_batch=2), distance=distance, early=early)


def triple(distance: int, size: int = 3) -> Plan:
    return waves(pipe((0, 1, 3, 5), (0,), (1,), (2,), samples=size, micro_batch=1),
                 pipe((0, 5), (3,), samples=2, micro_batch=2), distance=distance)


CASES = {
    "two unlike, distance 0": Case(hetpipe(0), job(7, optimizer=SGD), 4, masked=True),
    "two unlike, distance 1": Case(hetpipe(1), job(7, optimizer=MOMENTUM), 5),
    "three stages and one, distance 2": Case(triple(2), job(5, optimizer=SGD), 6),
    "three stages, waves of two, distance 1": Case(triple(1, 2), job(4, optimizer=MOMENTUM), 5, masked=True),
    "replicas, distance 1": Case(waves(pipe((0, 3, 5), (0, 1), (2, 3), samples=2, micro_batch=1, replicas=2),
                                       distance=1), job(4, optimizer=SGD), 5),
}
QUICK = ("two unlike, distance 0", "two unlike, distance 1", "three stages and one, distance 2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_equals_the_virtual_workers_by_hand(pool: Pool, name: str) -> None:
    case = CASES[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    found = pool.run(case)
    losses, weights = Hand(case).train()
    assert found[0].losses == pytest.approx(losses, rel=1e-9)
    assert_weights(case, found, weights)
    assert_met(case, found)


def assert_met(case: Case, found: list[Any], *, exact: bool = True) -> None:
    """Versions and waves that ranks met are those of the program, and no staler than the paper's bound."""
    program = lower(case.plan, case.job.model, updates=case.steps)
    distance = case.plan.synchronization.distance
    for p, pipeline in enumerate(case.plan.pipelines):
        size = len(pipeline.micro_batches)
        for s, stage in enumerate(pipeline.stages):
            said = readings(by_block(program.role(p, s).actions)).of
            for rank in stage.devices:
                met = found[case.plan.ranks.index(rank)].met
                assert len(met) == case.steps * size
                for one in met:
                    b = one.step * size + one.micro_batch
                    read = said[stage.held[0], b]
                    assert (one.forward, one.made, one.backward, one.applied) == (
                        read.forward, read.made, read.backward, read.applied)
                    assert one.waves == read.waves if exact else one.waves >= read.waves
                    assert one.staleness <= size - 1
                    assert b - one.waves * size <= bound(size, distance)
                if exact and size <= len(pipeline.stages) and case.steps > distance + 1:
                    assert max(o.step * size + o.micro_batch - o.waves * size for o in met) == bound(size, distance)


@pytest.mark.parametrize("rule", [SGD, MOMENTUM], ids=["sgd", "momentum"])
def test_one_micro_batch_and_distance_0_are_synchronous_sgd(pool: Pool, rule: Optimizer) -> None:
    case = Case(waves(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=4),
                      pipe((0, 5), (2,), samples=2, micro_batch=2)), job(6, optimizer=rule), 4)
    found, alone = pool.run(case), reference(case)
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-9)
    for outcome in found:
        for tensor, kind, lo, hi, values in outcome.pieces:
            if kind == "weights":
                torch.testing.assert_close(values, alone.weights[tensor][lo:hi], rtol=1e-9, atol=1e-12)


def test_early_pulls_are_no_staler(pool: Pool) -> None:
    """What is pulled early differs from run to run; in the end all agree, and no bound is broken."""
    case = Case(hetpipe(2, early=True), job(7, optimizer=SGD), 6)
    found = pool.run(case)
    assert_met(case, found, exact=False)
    late = Hand(case).train()[0]
    assert found[0].losses[0] == pytest.approx(late[0], rel=1e-9)
    assert found[0].losses[-1] == pytest.approx(late[-1], rel=0.2)
    ends: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for outcome in found:
        for unit, column, lo, _, values in outcome.weights:
            ends.setdefault((unit, column, lo), []).append(values)
    assert all(torch.equal(a, b) for values in ends.values() for a, b in pairwise(values))


def test_bytes_are_those_predicted(pool: Pool) -> None:
    case = CASES["two unlike, distance 0"]
    layout = Layout(case.plan, case.job.model)
    expected = bytes_sent(lower(case.plan, case.job.model, layout, updates=1), case.plan, case.job, layout)
    for rank, outcome in zip(case.plan.ranks, pool.run(case)):
        sent: Counter[str] = Counter()
        for (op, _), n in outcome.sent.items():
            sent[op] += n
        assert sent == {op: n * case.steps for op, n in expected[str(rank)].items()}


@pytest.mark.slow
def test_a_checkpoint_holds_the_moments_of_all(tmp_path: Path) -> None:
    """A run goes on from one as if nothing had happened, and so does a synchronous one."""
    of, what = hetpipe(1), job(7, optimizer=MOMENTUM)
    whole = train(of, what, CLUSTER, steps=6, out_dir=tmp_path / "whole", checkpoint_every=3, keep=2)
    assert whole is not None
    assert whole.losses[:3] == pytest.approx(Hand(Case(of, what, 3)).train()[0], rel=1e-9)
    at = tmp_path / "whole" / "checkpoints" / "step-00000003"
    again = train(of, what, CLUSTER, steps=6, resume=at)
    assert again is not None
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-12)
    one = Case(waves(pipe((0, 5), (0,), samples=7, micro_batch=7)), what, 3)
    other = train(plan(pipe((0, 5), (0,), samples=7, micro_batch=7)), what, CLUSTER, steps=5, resume=at)
    assert other is not None
    assert Reader(at).state.step == 3
    same = train(one.plan, what, CLUSTER, steps=5, resume=at)
    assert same is not None
    assert same.losses == pytest.approx(other.losses, rel=1e-9)  # one worker, one micro-batch: synchronous


def test_the_example_hides_its_exchange() -> None:
    """Three unlike virtual workers, one behind a slow NIC: a lead of one wave is worth a third of the step."""
    root = Path(__file__).parent.parent / "examples"
    of, what = Plan.load(root / "plans/hetpipe.yaml"), Job.load(root / "jobs/llama-1b-sgd.yaml")
    where = Cluster.load(root / "clusters/mixed-lab.yaml")
    steps = [predict(of.replace(synchronization=Synchronization(distance=d)), what, where).step_s for d in (0, 1)]
    assert steps[1] < 0.65 * steps[0]
