"""RoundPipe: stateless workers, legs in turn, forward and backward cut apart. The partitioner beside brute force,
programs and prices, then real ranks beside one process."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sim_toys
import toy
from mixfleet.cluster import Cluster
from mixfleet.cost import network
from mixfleet.job import Job, Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Stage, Synchronization
from mixfleet.plan_rules import why_not
from mixfleet.program.action import dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.run.modules import build_blocks
from mixfleet.run.source import DecoderSource
from mixfleet.run.state import Numbers
from mixfleet.schedule.greedy import Work, timeline
from mixfleet.schedule.named import one_f_one_b
from mixfleet.schedule.rounds import LOOSER, Cut, makespan, split
from mixfleet.search.roundpipe import in_rounds
from mixfleet.search.variants import compare, under
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from mixfleet.sim.interpreter import play
from run_pool import CLUSTER, Case, Pool, assert_bytes, job
from sim_toys import free_overheads  # noqa: F401
from test_offload import ALL, toy_cluster
from test_program import edited
from test_run_equality import check_equality
from test_sim_hazards import reachable


def rounds(forward: tuple[int, ...], backward: tuple[int, ...], workers: int, *, samples: int, micro_batch: int = 1,
           offload: tuple[str, ...] = ("weights", "optimizer"), prefetch: int = 1) -> Plan:
    """Legs between these cuts, in turn on so many devices."""
    legs = Cut(forward, backward, 0.0).legs(workers)
    stages = []
    for s in range(workers):
        first, *more = [(leg.lo, leg.hi) for leg in legs if leg.back and leg.device == s]
        stages.append(Stage(blocks=first, more=tuple(more), devices=(s,), offload=offload,  # type: ignore[arg-type]
                            ahead=tuple((leg.lo, leg.hi) for leg in legs if not leg.back and leg.device == s)))
    return Plan(schedule="roundpipe", sharding=Sharding(prefetch=prefetch), pipelines=(
        Pipeline(stages=tuple(stages), samples=samples, micro_batch=micro_batch),))


def test_golden_program() -> None:
    """Two workers. Leg 0 goes forward through block 0, leg 1 forward and back through block 2, leg 2 back through 1,
    leg 3 through 0; what enters block 1 is kept on its way, and loads come one leg ahead."""
    of = rounds((0, 2), (0, 1, 2, 3), 2, samples=1)
    assert to_text(lower(of, toy.model(1))) == (
        "p0s0: LW0 LW1 C0.0 C1.0 XW0 SA1.0@1 RG1.0@1 F1.0 B1.0 XW1 SG1.0@1 N LW1 LO1 S1 EW1 EO1 XW1 XO1\n"
        "p0s1: LW2 LW0 RA2.0@0 F2.0 B2.0 XW2 SG2.0@0 RG0.0@0 F0.0 B0.0 XW0 N LW0 LO0 LW2 LO2 S0 EW0 EO0 S2 EW2 EO2 "
        "XW0 XO0 XW2 XO2\n")


SHAPES = [((0, 2, 4), (0, 1, 3, 4, 5), 3, 2), ((0, 3), (0, 1, 2, 3, 5), 2, 3), ((0, 1, 2, 3, 4), (0, 4, 5), 2, 2),
          ((0,), (0, 5), 1, 2), ((0, 4), (0, 2, 4, 5), 4, 3), ((0, 4), (0, 4, 5), 3, 1), ((0, 2, 3), (0, 3, 5), 4, 2)]


@pytest.mark.parametrize(("forward", "backward", "workers", "samples"), [s for s in SHAPES if len(s[1]) - 1 >= s[2]])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_programs_are_sound(forward: tuple[int, ...], backward: tuple[int, ...], workers: int, samples: int,
                            tied: bool, prefetch: int) -> None:
    of, model = rounds(forward, backward, workers, samples=samples, prefetch=prefetch), toy.model(tied=tied)
    assert why_not(of, toy.job(samples, model), toy_cluster()) is None  # type: ignore[arg-type]
    program, layout = lower(of, model), Layout(of, model)
    assert check(program, of, model) == ()
    assert from_text(to_text(program)) == program
    for role in program.roles:
        slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
        assert reachable(role.actions, hazards(role.actions, layout)) == reachable(role.actions, slow)


@pytest.mark.parametrize(("name", "says"), [
    ("RX1.0@0", "sends SX at block 1 for micro-batches [0, 1] to stage 1, which receives [1]"),
    ("LW2", "C2.0: the weights of unit 2 are not here"), ("C2.1", "C2.1 is missing"),
    ("RA2.0@0", "C2.0: its input has not been received"), ("RX1:3.0@0", "F1:3.0: its input has not been received"),
    ("RG1:3.1@0", "the gradient of its output has not been received")])
def test_the_checker_finds_what_is_missing(name: str, says: str) -> None:
    of, model = rounds((0, 2, 4), (0, 1, 3, 4, 5), 3, samples=2), toy.model()
    problems = check(edited(lower(of, model), 1, lambda actions: [a for a in actions if str(a) != name]), of, model)
    assert any(says in p for p in problems) or name == "RX1.0@0", problems


@pytest.mark.parametrize(("change", "says"), [
    (lambda s: (s[0].replace(offload=("optimizer",)), *s[1:]), "stages[0].offload lacks weights"),
    (lambda s: (s[0].replace(ahead=((0, 1),)), *s[1:]), "ahead has blocks 2-3; it must begin at block 1"),
    (lambda s: (s[0], s[1].replace(ahead=()), s[2]), "reaches block 1; it must end with block 3"),
    (lambda s: (s[0].replace(ahead=s[1].ahead), s[1].replace(ahead=s[0].ahead), s[2]),
     "leg 0 of roundpipe (blocks 0-1, forward) is on stage 1; legs go in turn, so it belongs on stage 0"),
    (lambda s: (s[0].replace(recompute="full"), *s[1:]), "stages[0].recompute is full"),
])
def test_what_cannot_be_is_refused(change: Any, says: str) -> None:
    of = rounds((0, 2, 4), (0, 1, 3, 4, 5), 3, samples=2)
    pipe = of.pipelines[0]
    other = of.replace(pipelines=(pipe.replace(stages=change(pipe.stages)),))
    assert says in (why_not(other, toy.job(2), toy_cluster()) or "")  # type: ignore[arg-type]
    plain = of.replace(schedule="1f1b")
    assert "ahead is of the schedule roundpipe" in " ".join(
        filter(None, [why_not(plain.replace(pipelines=(pipe.replace(stages=(
            Stage(blocks=(0, 5), devices=(0,), ahead=((0, 2),)),)),)), toy.job(2), toy_cluster())]))  # type: ignore[arg-type]


def brute(forward: list[float], backward: list[float], devices: int) -> float:
    """The least cost over all pairs of cuts whose longest leg is at most 1.1 times the slowest block."""
    n, best, most = len(forward), math.inf, LOOSER * max(backward)
    for k in range(n):
        for inner in combinations(range(1, n), k):
            back = (0, *inner, n)
            for j in range(back[-2]):
                for ends in combinations(range(1, back[-2]), j):
                    front = (0, *ends, back[-2])
                    cap = max([sum(forward[a:b]) for a, b in pairwise(front)] + [sum(backward[a:b])
                                                                                for a, b in pairwise(back)])
                    if cap <= most:
                        best = min(best, max(len(front) + len(back) - 2, devices) * cap)
            if not back[-2] and sum(backward) <= most:
                best = min(best, max(1, devices) * sum(backward))
    return best


def test_the_partitioner_is_as_good_as_brute_force() -> None:
    draw = np.random.default_rng(7)
    for n in (1, 2, 3, 5, 7):
        for devices in (1, 2, 3, 5):
            forward = [float(x) for x in draw.integers(1, 6, n)]
            backward = [3 * f + float(x) for f, x in zip(forward, draw.integers(0, 4, n))]
            found = split(forward, backward, devices)
            assert found is not None
            assert found.cost(devices) == pytest.approx(brute(forward, backward, devices))
    assert split([1, 1], [3, 3], 2, weights=[5, 7], budget=6) is None
    tight = split([1, 1, 1], [3, 1, 1], 2, weights=[4, 4, 4], budget=4)
    assert tight is not None
    assert tight.backward == (0, 1, 2, 3)


def test_a_heavy_block_does_not_bind_a_device() -> None:
    """One block of eight, the head, is three times as heavy: a bound stage waits for it, workers in turn do not."""
    forward = [1.0] * 7 + [3.0]
    backward = [3 * f for f in forward]
    found = split(forward, backward, 4)
    assert found is not None
    step = makespan(found.legs(4), forward, backward, 8)
    work = [(sum(forward[a:b]), sum(backward[a:b])) for cuts in combinations(range(1, 8), 3)
            for a, b in pairwise((0, *cuts, 8))]
    bound = min(max(end for _, end in timeline(Work((0, 1, 2, 3), 8, *zip(*work[i:i + 4])),  # type: ignore[arg-type]
                                               one_f_one_b((0, 1, 2, 3), 8)).values()) for i in range(0, len(work), 4))
    alone = 8 * (sum(forward[:found.forward[-1]]) + sum(backward)) / 4
    assert alone < step < 0.95 * bound
    assert 1 - alone / step < 1 - alone / bound


@pytest.mark.usefixtures("free_overheads")
def test_the_simulated_step_is_that_of_the_legs() -> None:
    times = [(1.0, 2.0), (2.0, 3.0), (1.0, 2.5), (1.0, 2.0), (3.0, 6.0)]
    device = sim_toys.device(times).replace(pcie_Bps=1e18)
    where = sim_toys.cluster(*[device] * 3)
    where = where.replace(nodes=tuple(n.replace(host_memory_bytes=10**12) for n in where.nodes))
    what = sim_toys.job([sim_toys.block(i) for i in range(5)], 4)
    of = rounds((0, 2, 4), (0, 2, 3, 4, 5), 3, samples=4)
    assert why_not(of, what, where) is None
    found = predict(of, what, where)
    forward, both = [f for f, _ in times], [f + b for f, b in times]
    assert found.step_s == pytest.approx(makespan(of.pipelines[0].legs, forward, both, 4) / 1e3, rel=0.01)


def test_a_plan_becomes_one_of_workers_in_turn() -> None:
    """The heavy last block makes legs of one or few blocks; what does not suit says why."""
    times = [(1.0, 2.0)] * 7 + [(3.0, 6.0)]
    device = sim_toys.device(times).replace(pcie_Bps=1e12)
    where = sim_toys.cluster(*[device] * 4)
    where = where.replace(nodes=tuple(n.replace(host_memory_bytes=10**12) for n in where.nodes))
    what = sim_toys.job([sim_toys.block(i) for i in range(8)], 8)
    plain = sim_toys.straight((0, 3, 5, 7, 8), 8)
    full = plain.replace(pipelines=tuple(p.replace(stages=tuple(s.replace(recompute="full") for s in p.stages))
                                         for p in plain.pipelines))
    made = in_rounds(plain, what, where)
    assert isinstance(made, Plan)
    assert [(leg.lo, leg.hi, leg.back) for leg in made.pipelines[0].legs] == [
        (leg.lo, leg.hi, leg.back) for leg in split([f for f, _ in times], [f + b for f, b in times],  # type: ignore[union-attr]
                                                    4, least=4).legs(4)]
    found = compare(full, ["1f1b", "gpipe", "roundpipe"], what, where)
    steps = {name: one[1].step_s for name, one in found.items() if not isinstance(one, str)}
    assert steps["roundpipe"] < 0.95 * steps["1f1b"]
    two = plain.replace(pipelines=tuple(p.replace(samples=4) for p in plain.pipelines * 2))
    assert "wants one pipeline" in str(in_rounds(two, what, where))
    assert "states no host_memory" in str(under(plain, "roundpipe", what, sim_toys.cluster(*[device] * 4)))


def test_the_example_is_what_the_search_makes() -> None:
    root = Path(__file__).parent.parent / "examples"
    of, what = Plan.load(root / "plans/roundpipe.yaml"), Job.load(root / "jobs/qwen3-8b-tuning.yaml")
    where = Cluster.load(root / "clusters/workstation.yaml")
    assert in_rounds(of, what, where) == of
    assert predict(of, what, where).fits


SGD = Optimizer(name="sgd", lr=0.3, momentum=0.8, weight_decay=0.02)
_TIED = {"figures": {"tied": True}}
RUNS = {
    "three workers, six legs": Case(rounds((0, 2, 4), (0, 1, 3, 4, 5), 3, samples=6), job(clip_norm=0.3)),
    "two workers, tied": Case(rounds((0, 3), (0, 1, 2, 3, 5), 2, samples=6, micro_batch=2), job(**_TIED)),
    "four workers, many forward legs": Case(rounds((0, 1, 2, 4), (0, 1, 2, 4, 5), 4, samples=6, micro_batch=4),
                                            job(optimizer=SGD)),
    "one worker": Case(rounds((0,), (0, 5), 1, samples=6, micro_batch=3), job()),
    "stepped by the host": Case(rounds((0, 2, 4), (0, 1, 3, 4, 5), 3, samples=6, offload=ALL), job(clip_norm=0.3)),
    "stepped by the host, tied": Case(
        rounds((0, 3), (0, 1, 2, 3, 5), 2, samples=6, micro_batch=2, offload=ALL), job(**_TIED)),
}


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, pool: Pool) -> None:
    case = RUNS[name]
    host = CLUSTER
    assert why_not(case.plan, case.job, host) is None
    check_equality(case, pool)


@pytest.mark.parametrize("name", ["three workers, six legs", "stepped by the host"])
def test_late_updates_are_one_step_late(name: str, pool: Pool) -> None:
    """W(t + 1) = W(t) - step of the gradient at W(t - 1), and W(1) from that at W(0)."""
    base = RUNS[name]
    case = base._replace(plan=base.plan.replace(synchronization=Synchronization(late=True)),
                         job=job(optimizer=SGD), steps=6)
    assert why_not(case.plan, case.job, CLUSTER) is None
    found = pool.run(case)
    blocks = build_blocks(case.job.model, range(5), seed=case.job.seed, dtype=Numbers.of(case.job).compute,
                          attention="eager")
    params = {f"{block.name}/{n}": p for block, module in zip(case.job.model.blocks, blocks)
              for n, p in module.named_parameters()}
    history = [{k: p.detach().clone() for k, p in params.items()}]
    momentum = {k: torch.zeros_like(p) for k, p in history[0].items()}
    source, losses = DecoderSource(case.job), []
    source.open(0, 0)
    for step in range(case.steps):
        x, targets = source.batch(step, 0, 6)
        for k, p in params.items():
            p.data.copy_(history[max(0, step - 1)][k])
            p.grad = None
        for block in blocks[:-1]:
            x = block(x)
        loss = blocks[-1](x, targets) / targets.numel()
        loss.backward()
        losses.append(float(loss.detach()))
        for k, p in params.items():
            momentum[k] = SGD.momentum * momentum[k] + p.grad + (SGD.weight_decay if p.ndim > 1 else 0) * history[-1][k]
        history.append({k: v - SGD.lr * momentum[k] for k, v in history[-1].items()})
    assert found[0].losses == pytest.approx(losses, rel=1e-9)
    split = {f"{b.name}/{p.name}": p.split or 0 for b in case.job.model.blocks for p in b.params}
    for outcome in found:
        for key, kind, lo, hi, values in outcome.pieces:
            if kind == "weights":
                whole = history[-1][key].movedim(split[key], 0).reshape(-1)
                torch.testing.assert_close(values, whole[lo:hi], rtol=1e-9, atol=1e-12)
        assert [(m.step, m.forward, m.staleness) for m in outcome.met if m.micro_batch == 0] == [
            (t, max(0, t - 1), min(t, 1)) for t in range(6)]


def test_legs_go_round_and_bytes_are_those_predicted(pool: Pool) -> None:
    case = RUNS["three workers, six legs"]._replace(trace=True)
    found = pool.run(case)
    assert_bytes(case, found)
    first = {}
    for outcome in found:
        for span in outcome.spans:
            if span.name.endswith(".0") and span.name[0] in "CB" and span.category in ("forward", "backward"):
                first.setdefault(span.name, (span.start_ns, span.device))
    legs = case.plan.pipelines[0].legs
    names = [f"{'B' if leg.back else 'C'}{leg.hi - 1 if leg.back else leg.lo}.0" for leg in legs]
    assert [first[name][1] for name in names] == [0, 1, 2, 0, 1, 2]
    starts = [first[name][0] for name in names]
    assert starts == sorted(starts)


@pytest.mark.usefixtures("free_overheads")
def test_devices_share_what_the_host_can_move() -> None:
    """Two workers load 300 and 100 MB at once at up to 1 GB/s each. A host of 1 GB/s gives each half until the shorter
    one ends after 200 ms, and all to the other, which ends after 400; with 2 GB/s they take 300 and 100 ms."""
    blocks = [sim_toys.block(i, elements=n * 25_000_000) for i, n in enumerate((3, 1))]
    device = sim_toys.device([(1.0, 2.0)] * 2).replace(pcie_Bps=1e9 / dict(network.LINK_EFFICIENCY)["pcie"])
    what, of = sim_toys.job(blocks, 1), rounds((0, 1), (0, 1, 2), 2, samples=1, offload=("weights",), prefetch=0)

    def loads(host: float) -> list[float]:
        where = sim_toys.cluster(*[device] * 2)
        where = where.replace(nodes=tuple(n.replace(host_memory_bytes=10**12, host_Bps=host) for n in where.nodes))
        assert why_not(of, what, where) is None
        layout = Layout(of, what.model)
        rows = play(lower(of, what.model, layout), of, what, where, layout).rows
        return [next(end for a, end in zip(row.actions, row.end_ns) if a.op == "LW") / 1e6 for row in rows]

    assert loads(2e9) == pytest.approx([300, 100], rel=1e-4)
    assert loads(1e9) == pytest.approx([400, 200], rel=1e-4)
    assert loads(0) == pytest.approx(loads(1e12), rel=1e-9)
