"""Two pipelines in opposite directions on the same devices: what a plan may be, its program, its prediction, and runs
on real processes against one."""

from __future__ import annotations

from itertools import product

import pytest

import sim_toys
import toy
from mixfleet.plan import Plan, Sharding
from mixfleet.plan_rules import why_not
from mixfleet.program.action import JOINT, Program, dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.search.finder import Search
from mixfleet.search.variants import under
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from mixfleet.sim.interpreter import play
from mixfleet.sim.memory import static
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, Pool, job, pipe
from test_run_equality import check_equality
from test_sim_hazards import reachable


def facing(cuts: tuple[int, ...], *devices: tuple[int, ...], samples: tuple[int, int],
           micro_batch: tuple[int, int] = (1, 1), schedule: str = "chimera",
           sharding: tuple[int, int, int] = (1, 1, 1), back: tuple[int, ...] = (), shares: tuple[int, ...] = (),
           **more: object) -> Plan:
    """A pipeline down the devices and one up; `back` are the cuts of the second if they are others."""
    w, g, o = sharding
    down = pipe(cuts, *devices, samples=samples[0], micro_batch=micro_batch[0], **more)  # type: ignore[arg-type]
    up = pipe(back or cuts, *devices[::-1], samples=samples[1], micro_batch=micro_batch[1], **more)  # type: ignore[arg-type]
    return Plan(pipelines=(down, up), schedule=schedule,  # type: ignore[arg-type]
                sharding=Sharding(weights=w, gradients=g, optimizer=o, shares=shares))


def check_hazards(program: Program, layout: Layout) -> None:
    for role in program.roles:
        slow = role.needs(lambda one: dependencies(one.actions, layout, layout.units_of_stage(*one.seats[0])))
        fast = role.needs(lambda one: hazards(one.actions, layout))
        assert reachable(role.actions, fast) == reachable(role.actions, slow)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharding", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_programs_are_sound(schedule: str, tied: bool, sharding: tuple[int, int, int]) -> None:
    model = toy.model(6, tied=tied)
    plans = [facing(cuts, *devices, samples=n, micro_batch=mb, schedule=schedule, sharding=sharding, back=back)
             for (cuts, devices, back), (n, mb) in product([
                 ((0, 3, 8), ((0,), (1,)), ()), ((0, 3, 8), ((0,), (1,)), (0, 4, 8)),
                 ((0, 1, 3, 6, 8), ((0,), (1,), (2,), (3,)), ())],
                 [((2, 2), (1, 1)), ((5, 3), (2, 1)), ((4, 9), (1, 2))])]
    plans += [facing((0, 1, 3, 6, 8), (0, 1), (2, 3), (4, 5), (6, 7), samples=(2, 2), schedule=schedule,
                     sharding=sharding, **more)  # type: ignore[arg-type]
              for more in ({"tensor": (2,) * 4}, {"replicas": 2})]
    sound = 0
    for plan in plans:
        if why_not(plan, toy.job(plan.global_batch, model), toy.cluster(8)):
            continue
        program = lower(plan, model)
        assert check(program, plan, model) == ()
        assert from_text(to_text(program)) == program
        check_hazards(program, Layout(plan, model))
        sound += 1
    assert sound >= 6


def test_golden_chimera_with_tied_embeddings() -> None:
    """Primes mark the second direction, stars what both do together: the norm, and the exchange of the tied tensor."""
    plan = facing((0, 2, 5), (0,), (1,), samples=(2, 3), micro_batch=(1, 2), sharding=(1, 1, 2))
    assert to_text(lower(plan, toy.model(tied=True))) == (
        "p0s0+p1s1: RG0:2.0@1 RA2:5.0@0' F0:2.0 SA0:2.0@1 F2:5.0' RA2:5.1@0' B2:5.0' SG2:5.0@0' B0:2.0 RG0:2.1@1 "
        "F0:2.1 SA0:2.1@1 F2:5.1' B4.1' Y4' B3.1' Y3' B2.1' Y2' SG2:5.1@0' B1.1 Y1 B0.1 Y5* N* S0 S1 P1 S2' P2' S3' "
        "P3' S4' P4' S5 S5' P5*\n"
        "p0s1+p1s0: RA2:5.0@0 RG0:2.0@1' F0:2.0' SA0:2.0@1' F2:5.0 RA2:5.1@0 B2:5.0 SG2:5.0@0 B0:2.0' RG0:2.1@1' "
        "F0:2.1' SA0:2.1@1' F2:5.1 B4.1 Y4 B3.1 Y3 B2.1 Y2 SG2:5.1@0 B1.1' Y1' B0.1' Y5* N* S0' S1' P1' S2 P2 S3 P3 "
        "S4 P4 S5 S5' P5*\n")


def test_golden_dualpipe_with_a_block_held_twice() -> None:
    plan = facing((0, 2, 5), (0,), (1,), samples=(2, 2), schedule="dualpipe", back=(0, 3, 5))
    assert to_text(lower(plan, toy.model())) == (
        "p0s0+p1s1: RA3:5.0@0' F0:2.0 SA0:2.0@1 RG0:2.0@1 F3:5.0' RA3:5.1@0' F0:2.1 SA0:2.1@1 RG0:2.1@1 B3:5.0' "
        "SG3:5.0@0' F3:5.1' B0:2.0 B4.1' Y4' B3.1' Y3' SG3:5.1@0' I0:2.1 W1.1 Y1 W0.1 Y0 N* S0 S1 S3' S4'\n"
        "p0s1+p1s0: RA2:5.0@0 F0:3.0' SA0:3.0@1' RG0:3.0@1' F2:5.0 RA2:5.1@0 F0:3.1' SA0:3.1@1' RG0:3.1@1' B2:5.0 "
        "SG2:5.0@0 F2:5.1 B0:3.0' B4.1 Y4 B3.1 Y3 B2.1 SG2:5.1@0 I0:3.1' W2.1' Y2* W1.1' Y1' W0.1' Y0' N* S0' S1' "
        "S2 S2' S3 S4\n")


def test_a_block_that_a_device_holds_twice_is_reduced_there() -> None:
    plan, model = facing((0, 2, 5), (0,), (1,), samples=(2, 2), back=(0, 3, 5)), toy.model()
    layout = Layout(plan, model)
    joint = [a for role in lower(plan, model, layout).roles for a in role.actions if a.seat == JOINT and a.op == "Y"]
    assert [a.lo for a in joint] == [2]
    assert {m.src % plan.span for m in layout.moves("Y", 2)} == {1}
    sent = bytes_sent(lower(plan, model, layout), plan, toy.job(4, model), layout)
    whole = 4 * sum(unit.elements for unit in layout.units if unit.number != 2)
    assert sent["0"]["Y"] + sent["1"]["Y"] == 2 * whole  # two copies of all else, each half summed and handed back


@pytest.mark.parametrize(("change", "says"), [
    ({"schedule": "1f1b"}, "pipelines[1].stages[0].devices has 1, which pipelines[0].stages[1] uses already"),
    ({"pipelines": 1}, "wants 2 pipelines in opposite directions on the same devices; here they are 1"),
    ({"devices": ((0,), (1,))}, "wants its chunks on stages 0, 1, 1, 0 in the order of the chain; they are on 0, 1, "),
    ({"devices": ((1,), (2,))}, "pipelines[1].stages[1] is on devices 2 (tensor 1); pipelines that share devices do"),
    ({"devices": ((2,), (3,))}, "wants 2 pipelines"),
    ({"back": (0, 3, 5), "sharding": (1, 2, 2)}, "device 1 holds block 2 in pipelines 0 and 1; then weights"),
    ({"samples": (3, 2), "sharding": (1, 2, 2)}, "puts pipelines of 3 and 2 micro-batches into one group"),
])
def test_impossible_plans_are_answered(change: dict[str, object], says: str) -> None:
    settings = {"samples": (2, 2), **{k: v for k, v in change.items() if k in ("back", "sharding", "samples")}}
    plan = facing((0, 2, 5), (0,), (1,), **settings)  # type: ignore[arg-type]
    if "schedule" in change:
        plan = plan.replace(schedule=change["schedule"])
    if "pipelines" in change:
        plan = plan.replace(pipelines=plan.pipelines[:1])
    if "devices" in change:
        up = plan.pipelines[1]
        stages = tuple(s.replace(devices=d) for s, d in zip(up.stages, change["devices"]))  # type: ignore[call-overload]
        plan = plan.replace(pipelines=(plan.pipelines[0], up.replace(stages=stages)))
    assert says in (why_not(plan, toy.job(plan.global_batch), toy.cluster(4)) or "")


def even(schedule: str, n: int, p: int = 4) -> tuple[Plan, object, object]:
    """Blocks of 1 ms forward and 2 ms backward, one per stage."""
    stages = tuple((d,) for d in range(p))
    cluster = sim_toys.cluster(*[sim_toys.device([(1, 2)] * p)] * p)
    return (facing(tuple(range(p + 1)), *stages, samples=(n // 2, n // 2), schedule=schedule),
            sim_toys.job([sim_toys.block(i) for i in range(p)], n), cluster)


def test_predictions_are_those_of_the_closed_forms() -> None:
    """Four stages, four micro-batches: 4 forwards and 6 backwards are on Chimera's critical path, and six messages."""
    plan, job_, cluster = even("chimera", 4)
    assert predict(plan, job_, cluster).step_s == pytest.approx(16e-3, rel=0.01)
    alone = sim_toys.straight((0, 1, 2, 3, 4), 4)
    assert predict(alone, job_, cluster).step_s == pytest.approx(21e-3, rel=0.01)
    plan, job_, cluster = even("dualpipe", 8)
    assert 24e-3 < predict(plan, job_, cluster).step_s < 28e-3


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_folded_and_whole_simulations_agree(schedule: str) -> None:
    plan = facing((0, 1, 3), (0, 1), (2, 3), samples=(2, 3), schedule=schedule, replicas=2)
    job_ = sim_toys.job([sim_toys.block(i) for i in range(3)], 10)
    cluster = sim_toys.cluster(*[sim_toys.device([(1, 2)] * 3)] * 4)
    layout = Layout(plan, job_.model)
    program = lower(plan, job_.model, layout)
    folded, whole = (play(program, plan, job_, cluster, layout, fold=fold) for fold in (True, False))
    assert folded.end_ns == whole.end_ns
    assert len(folded.rows) < len(whole.rows) == 4


def test_a_device_holds_the_state_of_all_its_seats() -> None:
    """On the devices of an even pair everything is there once over both, twice over all, and halves if it is shared."""
    model = toy.model()
    total = sum(unit.elements for unit in Layout(facing((0, 2, 5), (0,), (1,), samples=(1, 1)), model).units)
    for degree in (1, 2):
        plan = facing((0, 2, 5), (0,), (1,), samples=(1, 1), sharding=(degree, degree, degree))
        layout = Layout(plan, model)
        held = [sum(static(layout, toy.job(2, model), post).weights
                    for post in layout.places if post % plan.span == rank) for rank in (0, 1)]
        assert sum(held) == 4 * total * 2 // degree
        assert abs(held[0] - held[1]) <= 4 * len(layout.units)


def test_the_search_turns_pipelines_round_on_request() -> None:
    """Two stages and two micro-batches: in two directions nothing is idle but for messages."""
    cluster = sim_toys.cluster(*[sim_toys.device([(10, 20)] * 4)] * 2)
    job_ = sim_toys.job([sim_toys.block(i) for i in range(4)], 4)
    plan = sim_toys.straight((0, 2, 4), 4)
    turned = under(plan, "chimera", job_, cluster)
    assert isinstance(turned, Plan)
    assert predict(turned, job_, cluster).step_s < predict(plan, job_, cluster).step_s
    search = Search(job_, cluster, "time", 60.0, None)
    search.judge(plan)
    search.reorder()
    assert {entry[2].schedule for entry in search.scored()} >= {"1f1b", "chimera", "dualpipe"}


_TIED = {"figures": {"tied": True}}
RUNS: dict[str, Case] = {
    "chimera of two": Case(facing((0, 2, 5), (0,), (1,), samples=(4, 2), micro_batch=(1, 2)), job()),
    "chimera of two, tied, unequal batches": Case(
        facing((0, 2, 5), (0,), (1,), samples=(5, 1), micro_batch=(2, 1), sharding=(1, 1, 2)), job(**_TIED)),
    "chimera of four, gradients and weights shared by mirrors": Case(
        facing((0, 1, 2, 4, 5), (0,), (1,), (2,), (3,), samples=(3, 3), sharding=(2, 2, 2)), job(**_TIED)),
    "chimera of two, unlike cuts": Case(
        facing((0, 2, 5), (0,), (1,), samples=(3, 3), back=(0, 4, 5), sharding=(1, 1, 2)), job(clip_norm=0.05)),
    "chimera of three": Case(facing((0, 1, 3, 5), (0,), (1,), (2,), samples=(4, 2), recompute="full"), job()),
    "chimera of two stages, tensor 2": Case(
        facing((0, 2, 5), (0, 1), (2, 3), samples=(4, 2), tensor=(2, 2)), job(**_TIED)),
    "chimera of two stages, two replicas, unequal shares": Case(
        facing((0, 2, 5), (0, 1), (2, 3), samples=(1, 2), sharding=(1, 1, 4), shares=(1, 3, 2, 5), replicas=2),
        job(**_TIED), masked=True),
    "dualpipe of two": Case(facing((0, 2, 5), (0,), (1,), samples=(3, 3), schedule="dualpipe"), job(**_TIED)),
    "dualpipe of four, mirrors share gradients": Case(
        facing((0, 1, 2, 4, 5), (0,), (1,), (2,), (3,), samples=(5, 5), schedule="dualpipe", sharding=(1, 2, 2)),
        job(10)),
    "dualpipe of four, unequal batches": Case(
        facing((0, 1, 2, 4, 5), (0,), (1,), (2,), (3,), samples=(8, 2), micro_batch=(2, 1), schedule="dualpipe"),
        job(10, **_TIED)),
}


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, pool: Pool) -> None:
    case = RUNS[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    check_equality(case, pool)
