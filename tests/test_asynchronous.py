"""Schedules without a flush, without processes: versions, programs and their checker, prices and memory, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest

import toy
from mixfleet.cost.kernels import anticipate_s, copy_s
from mixfleet.cost.memory import allocator_factor
from mixfleet.job import Job, Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.action import Action, Program, by_block, dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.repeat import Repeated
from mixfleet.program.text import from_text, to_text
from mixfleet.schedule.asynchronous import Weights, enough, fill, readings, stream
from mixfleet.schedule.greedy import Work, timeline
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import computes, properties
from mixfleet.search.variants import compare
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from sim_toys import block, cluster, device, free_overheads, job, straight  # noqa: F401
from test_program import edited, without
from test_sim_hazards import reachable

NAMES = [name for name, s in SCHEDULES.items() if s.weights and not s.weights.waves]
"""Those of one update after another; `test_waves` has the others."""


def shapes(name: str, stages: tuple[int, ...] = (1, 2, 3, 5), sizes: tuple[int, ...] = (1, 2, 3, 5)
           ) -> list[tuple[int, int]]:
    return [(p, m) for p in stages for m in sizes if SCHEDULES[name].why_not(tuple(range(p)), m) is None]


def weights_of(name: str) -> Weights:
    weights = SCHEDULES[name].weights
    assert weights
    return weights


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_those_of_the_papers(name: str) -> None:
    """Stage i of p, m micro-batches per update: what each forward and backward reads, by the closed forms."""
    for p, m in shapes(name):
        updates = enough(p, m)
        for i, order in enumerate(stream(tuple(range(p)), m, updates, weights_of(name))):
            found = readings(order)
            assert found.of.keys() == {(i, mb) for mb in range(m * updates)}
            for (_, mb), read in found.of.items():
                update, now, first = mb // m, max(0, mb - (p - 1 - i)) // m, max(0, mb - (p - 1)) // m
                teller = max(0, update * m - (p - 1 - i)) // m
                assert read.applied == update
                assert (read.forward, read.made, read.backward) == {
                    "async-1f1b": (now, now, update), "pipedream": (now, now, now),
                    "pipedream-vertical": (first, first, first),
                    "pipedream-2bw": (max(0, update - 1),) * 3,
                    "pipeoptim": (update, now, update), "xpipe": (update, teller, update)}[name]
            most = {"async-1f1b": 1, "pipedream": 1 + fill(p - i, m), "pipedream-vertical": 1 + fill(p, m),
                    "pipedream-2bw": 2, "pipeoptim": 2, "xpipe": 2}[name]
            assert found.copies <= most
            if name in ("pipedream", "pipedream-vertical") and m == 1:
                assert found.copies == (p - i if name == "pipedream" else p)


def test_no_flush_keeps_every_stage_busy() -> None:
    """Equal stages: no bubble at all. With stages of 1, 3 and 2 the slowest sets the pace, from the second update."""
    for name in NAMES:
        for p, m in shapes(name, stages=(2, 4), sizes=(1, 3, 4)):
            found = properties(name, p, m)
            assert not isinstance(found, str)
            assert found.bubble == pytest.approx(0, abs=1e-12)
            assert found.in_flight == tuple(float(p - i) for i in range(p))
            assert not found.synchronous
    orders = computes(stream((0, 1, 2), 2, 9, weights_of("pipedream")))
    done = timeline(Work((0, 1, 2), 18, (1, 3, 2), (2, 6, 4)), orders)
    ends = [done["B", 0, 2 * u + 1][1] for u in range(9)]
    assert [b - a for a, b in pairwise(ends[1:8])] == [18.0] * 6


def test_synchronous_schedules_have_no_late_gradients() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        found = properties(name, 3, 6)
        assert not isinstance(found, str)
        assert (found.synchronous, found.backward, set(found.versions)) == (True, "same", {1})
        assert set(found.staleness) == {(0, 0)}


def two(name: str, samples: int = 1, **sharding: int) -> Plan:
    return Plan(pipelines=(toy.pipeline((0, 2, 5), ((0,), (1,)), samples=samples),), schedule=name,
                sharding=Sharding(**sharding))


@pytest.mark.parametrize(("name", "samples", "updates", "text"), [
    ("pipedream", 1, 3, (
        "p0s0: F0:2.0 SA0:2.0@1 RG0:2.0@1 F0:2.1 SA0:2.1@1 B0:2.0 K0:2.0 S0 S1 RG0:2.1@1 F0:2.2 SA0:2.2@1 U0:2.0 "
        "RG0:2.2@1 B0:2.1 D0:2.0 K0:2.1 S0 S1 U0:2.1 B0:2.2 D0:2.1 S0 S1\n"
        "p0s1: RA2:5.0@0 F2:5.0 RA2:5.1@0 B2:5.0 SG2:5.0@0 S2 S3 S4 F2:5.1 RA2:5.2@0 B2:5.1 SG2:5.1@0 S2 S3 S4 F2:5.2 "
        "B2:5.2 SG2:5.2@0 S2 S3 S4\n")),
    ("pipedream-2bw", 2, 2, (
        "p0s0: F0:2.0 SA0:2.0@1 RG0:2.0@1 F0:2.1 SA0:2.1@1 B0:2.0 RG0:2.1@1 F0:2.2 SA0:2.2@1 B0:2.1 K0:2.0 S0 S1 "
        "U0:2.0 RG0:2.2@1 F0:2.3 SA0:2.3@1 RG0:2.3@1 B0:2.2 B0:2.3 D0:2.0 S0 S1\n"
        "p0s1: RA2:5.0@0 F2:5.0 RA2:5.1@0 B2:5.0 SG2:5.0@0 F2:5.1 RA2:5.2@0 B2:5.1 SG2:5.1@0 K2:5.0 S2 S3 S4 U2:5.0 "
        "F2:5.2 RA2:5.3@0 B2:5.2 SG2:5.2@0 F2:5.3 B2:5.3 SG2:5.3@0 D2:5.0 S2 S3 S4\n")),
    ("pipeoptim", 1, 2, (
        "p0s0: F0:2.0 SA0:2.0@1 A0:2.1 U0:2.1 RG0:2.0@1 F0:2.1 SA0:2.1@1 D0:2.1 RG0:2.1@1 B0:2.0 S0 S1 B0:2.1 S0 S1\n"
        "p0s1: RA2:5.0@0 F2:5.0 RA2:5.1@0 B2:5.0 SG2:5.0@0 S2 S3 S4 F2:5.1 B2:5.1 SG2:5.1@0 S2 S3 S4\n")),
])
def test_golden_programs(name: str, samples: int, updates: int, text: str) -> None:
    program = lower(two(name, samples), toy.model(), updates=updates)
    assert to_text(program) == text
    assert from_text(text) == program
    assert program.updates == updates


def many(name: str, stages: int, size: int, replicas: int, optimizer: int = 1) -> Plan:
    cuts = (*range(stages), 5)
    places = tuple(tuple(range(i * replicas, (i + 1) * replicas)) for i in range(stages))
    return Plan(pipelines=(toy.pipeline(cuts, places, samples=size, replicas=replicas),), schedule=name,
                sharding=Sharding(optimizer=optimizer))


@pytest.mark.parametrize("name", NAMES)
def test_programs_are_sound_and_repeat_themselves(name: str) -> None:
    """The program of n updates makes those of more: what lies between fill and drain, again and again."""
    for p, m in shapes(name, stages=(1, 2, 4), sizes=(1, 2, 4)):
        plan = many(name, p, m, 2, 1 if weights_of(name).predicts else 2)
        assert why_not(plan, toy.job(plan.global_batch), toy.cluster(4, 4)) is None
        base = lower(plan, toy.model())
        assert check(base, plan, toy.model()) == ()
        assert from_text(to_text(base)) == base
        for extra in (0, 1, 3):
            longer = lower(plan, toy.model(), updates=base.updates + extra)
            for a, b in zip(base.roles, longer.roles):
                parts = Repeated(a.actions, m, fill(p, m))
                assert parts.least == base.updates
                assert tuple(x for u in range(longer.updates) for x in parts.update(u, longer.updates)) == b.actions


@pytest.mark.parametrize("name", NAMES)
def test_fast_hazards_are_those_of_the_values(name: str) -> None:
    plan = many(name, 2, 2, 2, 1 if weights_of(name).predicts else 2)
    layout = Layout(plan, toy.model())
    for role in lower(plan, toy.model(), layout).roles:
        slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
        assert reachable(role.actions, hazards(role.actions, layout)) == reachable(role.actions, slow)


def unlike() -> tuple[Pipeline, ...]:
    """Two and three stages, two and three micro-batches per update."""
    return (toy.pipeline((0, 2, 5), ((0,), (1,)), samples=2),
            toy.pipeline((0, 1, 3, 5), ((2,), (3,), (4,)), samples=3))


@pytest.mark.parametrize("name", NAMES)
def test_pipelines_of_unlike_shape_exchange_gradients_without_deadlock(name: str) -> None:
    plan = Plan(pipelines=unlike(), schedule=name)
    assert why_not(plan, toy.job(5), toy.cluster(4, 4)) is None
    assert check(lower(plan, toy.model()), plan, toy.model()) == ()


def removed(*names: str) -> object:
    """Without some actions, wherever they are."""
    return lambda actions: [a for a in actions if str(a) not in names]


@pytest.mark.parametrize(("name", "edit", "says"), [
    ("pipedream", removed("U0:2.1"), "B0.2 sees version 2 of the weights, its forward saw version 1"),
    ("pipedream", removed("K0:2.1"), "there is no copy of version 1 of block 0"),
    ("pipedream", removed("D0:2.0"), "block 0 uses version 0, not the current weights"),
    ("pipedream", lambda actions: [a._replace(mb=2) if str(a) == "K0:2.1" else a for a in actions],
     "the current weights of block 0 are version 1"),
    ("pipedream", without("S0"), "S0 is missing"),
    ("pipeoptim", removed("A0:2.1", "U0:2.1", "D0:2.1"),
     "B0.1 sees version 1 of the weights, its forward saw version 0"),
    ("pipeoptim", removed("A0:2.1"), "no copy of version 1"),
])
def test_the_checker_finds_wrong_weights(name: str, edit: object, says: str) -> None:
    plan = two(name)
    program = lower(plan, toy.model(), updates=3)
    assert check(program, plan, toy.model()) == ()
    problems = check(edited(program, 0, edit), plan, toy.model())
    assert any(says in p and "stage 0" in p for p in problems), problems


def test_the_checker_holds_each_schedule_to_its_own_promise() -> None:
    """The order without any copies is what `async-1f1b` promises, and breaks what all others do."""
    naive = lower(two("async-1f1b", 1), toy.model(), updates=4)
    for name in ("async-1f1b", "pipedream", "pipedream-vertical", "pipeoptim", "xpipe"):
        assert bool(check(naive, two(name, 1), toy.model())) == (name != "async-1f1b")
    stashed = lower(two("pipedream", 2), toy.model(), updates=4)
    problems = check(stashed, two("pipedream-vertical", 2), toy.model())
    assert any("F2.3 sees version 1 of the weights, F0.3 saw version 0" in p or
               "F2.2 sees version 1 of the weights, F0.2 saw version 0" in p for p in problems), problems


def free(name: str, times: list[tuple[float, float]], samples: int = 1, **more: object) -> tuple[Plan, Job, object]:
    n = len(times)
    plan = straight(tuple(range(n + 1)), samples, schedule=name)
    blocks = [block(i, elements=1000 * (i + 1)) for i in range(n)]
    return plan, job(blocks, samples, **more), cluster(*[device(times)] * n)


@pytest.mark.usefixtures("free_overheads")
@pytest.mark.parametrize("name", NAMES)
def test_steps_come_at_the_pace_of_the_slowest_stage(name: str) -> None:
    """A GPipe step of the same micro-batches pays its fill and drain every time."""
    times = [(1.0, 2.0), (1.5, 3.5), (1.0, 2.5)]
    plan, what, where = free(name, times, samples=4)
    found = predict(plan, what, where)  # type: ignore[arg-type]
    assert found.step_s == pytest.approx(4 * 5.0e-3, rel=1e-6)
    busy = [d.busy for d in found.devices]
    assert busy == pytest.approx([12 / 20, 20 / 20, 14 / 20], rel=1e-4)
    flush = predict(plan.replace(schedule="gpipe"), what, where)  # type: ignore[arg-type]
    assert flush.step_s > 4 * 5.0e-3 + 4e-3
    assert found.trace is None


@pytest.mark.usefixtures("free_overheads")
def test_copies_take_time_and_memory() -> None:
    """pipedream on three stages: K, U and back by D at every update of the first two, 3 and 2 versions there."""
    times = [(1.0, 2.0)] * 3
    plan, what, where = free("pipedream", times)
    slow = cluster(*[device(times).replace(memory_Bps=1e7)] * 3)
    found = predict(plan, what, slow, trace=True)
    copy = copy_s(2000, slow.devices[1], what)
    naive = predict(plan.replace(schedule="async-1f1b"), what, slow)
    assert found.trace is not None
    steps = len(found.trace.steps_ns)
    kept = [s for s in found.trace.spans if s.device == 1 and s.name[0] in "KUD"]
    assert sum(s.duration_ns for s in kept) / steps == pytest.approx(4e9 * copy, rel=1e-3)  # 1 + 2 (both ways) + 1
    more = [a.busy * found.step_s - b.busy * naive.step_s for a, b in zip(found.devices, naive.devices)]
    assert more == pytest.approx([2 * copy, 4 * copy, 0], rel=1e-3, abs=1e-9)  # the first stage has half the elements
    for name, versions in (("pipedream", [2, 1, 0]), ("pipedream-vertical", [2, 2, 2]), ("async-1f1b", [0, 0, 0])):
        marks = predict(plan.replace(schedule=name), what, where, trace=True).trace  # type: ignore[arg-type]
        plain = predict(plan.replace(schedule="async-1f1b"), what, where, trace=True).trace  # type: ignore[arg-type]
        assert marks
        assert plain
        for d, count in enumerate(versions):
            most = [max(m.total_bytes for m in t.memory if m.device == d) for t in (marks, plain)]
            factor = allocator_factor(slow.devices[d])
            assert most[0] - most[1] == pytest.approx(count * 4000 * (d + 1) * factor, abs=2)


def test_predicting_costs_what_it_reads_and_writes() -> None:
    what = toy.job(2).replace(optimizer=Optimizer(name="sgd", momentum=0.9))
    rate = anticipate_s(10**6, toy.device(), what) / copy_s(10**6, toy.device(), what)
    assert rate == pytest.approx(3 / 2, rel=0.2)  # value, momentum and the result against one copy
    assert anticipate_s(10**6, toy.device(), toy.job(2)) > anticipate_s(10**6, toy.device(), what)


@pytest.mark.usefixtures("free_overheads")
def test_plain_sgd_keeps_a_direction_where_it_is_predicted_from() -> None:
    sgd = Optimizer(name="sgd")
    held = {}
    for name in ("async-1f1b", "pipeoptim"):
        plan, what, where = free(name, [(1.0, 2.0)] * 2, optimizer=sgd)
        found = predict(plan, what, where)  # type: ignore[arg-type]
        held[name] = [d.breakdown.get("moments", 0) for d in found.devices]
    assert held == {"async-1f1b": [0, 0], "pipeoptim": [4000, 8000]}


@pytest.mark.parametrize(("plan", "change", "says"), [
    (many("pipedream", 2, 1, 2).replace(sharding=Sharding(weights=2, gradients=2, optimizer=2)), {},
     "sharding.weights is 2, which the schedule pipedream cannot follow: every rank keeps whole versions of its "
     "weights. Take weights 1 (and optimizer 1 or 2)"),
    (many("pipedream", 2, 1, 2).replace(sharding=Sharding(gradients=2, optimizer=2)), {},
     "sharding.gradients is 2, which"),
    (many("pipeoptim", 2, 1, 2).replace(sharding=Sharding(optimizer=2)), {},
     "sharding.optimizer is 2, but under pipeoptim every rank predicts all its weights from the optimizer's state; "
     "take 1"),
    (many("pipedream-2bw", 4, 2, 1), {}, "wants at least 3 micro-batches; there are 2"),
    (two("pipedream"), {"clip_norm": 1.5}, "clip_norm is 1.5: for the norm of the whole gradient all stages would "
     "wait for each other at every update, which pipedream is there to avoid. Set it to 0"),
    (two("xpipe"), {"precision": "fp16"}, "precision is fp16"),
    (two("async-1f1b"), {"model": toy.model(tied=True)}, "blocks 0 and 4 share weights and are on stages 0 and 1"),
    (two("pipedream").replace(accumulation="layered"), {}, "accumulation is layered"),
    (Plan(pipelines=(Pipeline(samples=1, micro_batch=1, stages=(
        Stage(blocks=(0, 1), more=((2, 3),), devices=(0,)), Stage(blocks=(1, 2), more=((3, 5),), devices=(1,)))),),
        schedule="pipedream"), {}, "wants 1 chunks on each stage"),
])
def test_what_cannot_be_is_refused_with_numbers(plan: Plan, change: dict[str, object], says: str) -> None:
    what = toy.job(plan.global_batch).replace(**change)
    assert says in (why_not(plan, what, toy.cluster(4, 4)) or "")
    synchronous = why_not(plan.replace(schedule="1f1b"), what, toy.cluster(4, 4))
    assert synchronous is None or "layered" in says or "chunks" in says


def test_tied_weights_on_one_stage_are_no_obstacle() -> None:
    plan = Plan(pipelines=(toy.pipeline((0, 5), ((0,),), samples=1),), schedule="pipedream")
    model = toy.model(tied=True)
    assert why_not(plan, toy.job(1, model), toy.cluster(1)) is None
    assert check(lower(plan, model), plan, model) == ()


@pytest.mark.usefixtures("free_overheads")
def test_all_schedules_of_a_plan_are_compared() -> None:
    plan, what, where = free("1f1b", [(1.0, 2.0)] * 4, samples=4)
    found = compare(plan, ["all"], what, where)  # type: ignore[arg-type]
    steps = {name: one[1].step_s for name, one in found.items() if not isinstance(one, str)}
    assert set(NAMES) <= set(steps)
    assert all(steps[name] < steps["1f1b"] for name in NAMES)


def test_a_version_is_no_micro_batch() -> None:
    """K, A, U and D are told by version, and an order that drops what is in use goes back to the current weights."""
    read = readings(by_block([Action("F", 0, 1, 0), Action("K", 0, 1, 0), Action("S", 0, 1), Action("F", 0, 1, 1),
                              Action("U", 0, 1, 0), Action("B", 0, 1, 0), Action("D", 0, 1, 0),
                              Action("B", 0, 1, 1), Action("S", 0, 1)]))
    assert read.copies == 2
    assert [tuple(read.of[0, m][:4]) for m in (0, 1)] == [(0, 0, 0, 1), (1, 1, 1, 1)]
    assert isinstance(Program(roles=()), Program)
