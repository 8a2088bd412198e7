"""Schedules, lowering, the text form and the checker."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import toy
from mixfleet.errors import InputError
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.action import Action, Program, parse_action
from mixfleet.program.check import check
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.schedule.named import SCHEDULES
from test_layout import mixed_shapes, plans


def two_stages(schedule: str = "1f1b", **sharding: int) -> Plan:
    return Plan(pipelines=(toy.pipeline((0, 2, 5), ((0,), (1,)), samples=3),), schedule=schedule,
                sharding=Sharding(**sharding))


def test_golden_1f1b_with_unequal_stages() -> None:
    assert to_text(lower(two_stages(), toy.model())) == (
        "p0s0: F0:2.0 SA0:2.0@1 RG0:2.0@1 F0:2.1 SA0:2.1@1 B0:2.0 RG0:2.1@1 F0:2.2 SA0:2.2@1 RG0:2.2@1 B0:2.1 B0:2.2 "
        "N S0 S1\n"
        "p0s1: RA2:5.0@0 F2:5.0 RA2:5.1@0 B2:5.0 SG2:5.0@0 F2:5.1 RA2:5.2@0 B2:5.1 SG2:5.1@0 F2:5.2 B2:5.2 SG2:5.2@0 "
        "N S2 S3 S4\n")


def test_golden_zero3_gathers_one_block_ahead() -> None:
    plan = toy.data_parallel(2, 2, 2, 2, samples=1, blocks=3)
    assert to_text(lower(plan, toy.model(layers=1))) == (
        "p0s0: G0 G1 F0.0 X0 G2 F1.0 F2.0 B2.0 R2.0 X2 G0 B1.0 R1.0 X1 B0.0 R0.0 X0 N S0 S1 S2\n")


def test_golden_layered_accumulation() -> None:
    """All micro-batches pass a block before the next; only in the last one does backward follow at once."""
    plan = toy.data_parallel(2, 2, 2, 2, samples=2, blocks=3).replace(accumulation="layered")
    program = lower(plan, toy.model(layers=1))
    assert to_text(program) == (
        "p0s0: G0 G1 F0.0 F0.1 X0 G2 F1.0 F1.1 F2.0 B2.0 F2.1 B2.1 R2 X2 G0 B1.0 B1.1 R1 X1 B0.0 B0.1 R0 X0 "
        "N S0 S1 S2\n")
    assert check(program, plan, toy.model(layers=1)) == ()


def test_golden_mics_reduces_every_micro_batch_and_synchronizes_once() -> None:
    text = to_text(lower(toy.data_parallel(4, 2, 2, 2, samples=3, blocks=3), toy.model(layers=1)))
    for u in range(3):
        assert text.count(f" R{u}.") == 3
        assert text.count(f" Y{u}") == 1
        assert text.index(f" R{u}.2") < text.index(f" Y{u}")
    assert " P" not in text


def test_ddp_synchronizes_behind_the_last_backward_of_each_block() -> None:
    text = to_text(lower(toy.data_parallel(2, 1, 1, 1, blocks=3), toy.model(layers=1)))
    assert text == "p0s0: F0:3.0 B0:3.0 F0:3.1 B2.1 Y2 B1.1 Y1 B0.1 Y0 N S0 S1 S2\n"


def test_one_device_needs_no_communication() -> None:
    text = to_text(lower(toy.data_parallel(1, 1, 1, 1, samples=1, blocks=3), toy.model(layers=1)))
    assert text == "p0s0: F0:3.0 B0:3.0 N S0 S1 S2\n"


def test_tied_unit_is_synchronized_at_the_end_by_both_stages() -> None:
    text = to_text(lower(two_stages(), toy.model(tied=True)))
    assert [line.count("Y5") for line in text.splitlines()] == [1, 1]
    assert [line.split().count("S5") for line in text.splitlines()] == [1, 1]


@settings(max_examples=80, deadline=None)
@given(plans())
def test_lowered_plans_are_sound_and_round_trip(plan: Plan) -> None:
    if any(p.chain != plan.pipelines[0].chain for p in plan.pipelines):
        plan = plan.replace(sharding=plan.sharding.replace(weights=1, gradients=1))
    for tied in (False, True):
        for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
            program = lower(plan.replace(schedule=schedule), toy.model(tied=tied))
            assert check(program, plan, toy.model(tied=tied)) == ()
            assert from_text(to_text(program)) == program


@settings(max_examples=40, deadline=None)
@given(plans())
def test_layered_plans_are_sound(plan: Plan) -> None:
    plan = plan.replace(accumulation="layered")
    if all(len(p.stages) == 1 for p in plan.pipelines):
        program = lower(plan, toy.model(tied=True))
        assert check(program, plan, toy.model(tied=True)) == ()
        assert from_text(to_text(program)) == program
    else:
        assert "layered" in (why_not(plan, toy.job(plan.global_batch), toy.cluster(80)) or "")


def looped(schedule: str, stages: int, rounds: int, micro_batches: int, **sharding: int) -> Plan:
    """Chunks of one block each, two replicas."""
    home = SCHEDULES[schedule].place(stages, rounds)
    chunks = [[(k, k + 1) for k, h in enumerate(home) if h == s] for s in range(stages)]
    made = tuple(Stage(blocks=c[0], more=tuple(c[1:]), devices=(2 * s, 2 * s + 1)) for s, c in enumerate(chunks))
    pipeline = Pipeline(stages=made, samples=micro_batches, micro_batch=1, replicas=2)
    return Plan(pipelines=(pipeline,), schedule=schedule, sharding=Sharding(**sharding))


@pytest.mark.parametrize("sharding", [(1, 1, 1), (1, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize(("schedule", "rounds"), [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("looped-bfs", 2), ("wave", 2), ("wave", 4),
    ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)])
def test_every_schedule_is_sound_under_every_sharding(schedule: str, rounds: int, sharding: tuple[int, ...]) -> None:
    for stages in (2, 3):
        for tied in (False, True):
            model = toy.model(layers=stages * rounds - 2, tied=tied)
            w, g, o = sharding
            plan = looped(schedule, stages, rounds, 2 * stages, weights=w, gradients=g, optimizer=o)
            assert why_not(plan, toy.job(plan.global_batch, model), toy.cluster(6)) is None
            program = lower(plan, model)
            assert check(program, plan, model) == ()
            assert from_text(to_text(program)) == program


def test_golden_wave_hands_over_in_place_at_its_turn() -> None:
    plan = looped("wave", 2, 2, 1)
    assert to_text(lower(plan, toy.model(layers=2))) == (
        "p0s0: RA3.0@1 F0.0 SA0.0@1 F3.0 RG0.0@1 B3.0 Y3 SG3.0@1 B0.0 Y0 N S0 S3\n"
        "p0s1: RA1.0@0 F1.0 RG2.0@0 F2.0 SA2.0@0 B2.0 Y2 B1.0 Y1 SG1.0@0 N S1 S2\n")


def test_golden_zero_bubble() -> None:
    plan = looped("zb-h1", 2, 1, 2)
    assert to_text(lower(plan, toy.model(layers=0))) == (
        "p0s0: F0.0 SA0.0@1 RG0.0@1 F0.1 SA0.1@1 I0.0 RG0.1@1 W0.0 I0.1 W0.1 Y0 N S0\n"
        "p0s1: RA1.0@0 F1.0 RA1.1@0 I1.0 SG1.0@0 F1.1 I1.1 SG1.1@0 W1.0 W1.1 Y1 N S1\n")


def edited(program: Program, role: int, edit: object) -> Program:
    roles = list(program.roles)
    roles[role] = roles[role].replace(actions=tuple(edit(list(roles[role].actions))))  # type: ignore[operator]
    return program.replace(roles=tuple(roles))


def without(name: str) -> object:
    return lambda actions: [a for a in actions if str(a) != name]


def swapped(one: str, two: str) -> object:
    def edit(actions: list[Action]) -> list[Action]:
        names = [str(a) for a in actions]
        i, j = names.index(one), names.index(two)
        actions[i], actions[j] = actions[j], actions[i]
        return actions
    return edit


@pytest.mark.parametrize(("role", "edit", "says"), [
    (0, without("F0:2.1"), "F0.1 is missing"),
    (1, without("B2:5.2"), "B2.2 is missing"),
    (1, without("S3"), "S3 is missing"),
    (0, without("SA0:2.1@1"), "receives [0, 1, 2]"),
    (1, without("N"), "N is missing"),
    (0, lambda a: [*a, a[0]], "F0.0 is there 2 times"),
    (1, swapped("F2:5.1", "B2:5.1"), "backward of block 4 runs before its forward"),
    (1, swapped("RA2:5.1@0", "RA2:5.2@0"), "receives [0, 2, 1]"),
    (1, swapped("RA2:5.1@0", "F2:5.1"), "its input has not been received"),
    (0, lambda a: [*a, Action("P", 0, 1)], "P0 does not belong here"),
])
def test_the_checker_names_what_is_missing_doubled_or_out_of_order(role: int, edit: object, says: str) -> None:
    plan = two_stages()
    problems = check(edited(lower(plan, toy.model()), role, edit), plan, toy.model())
    assert any(says in p and f"stage {role}" in p for p in problems) or any(says in p for p in problems), problems
    assert problems


def test_the_checker_finds_a_deadlock_and_says_who_waits_for_what() -> None:
    """Two replicas that reduce their blocks in opposite order wait for each other for ever."""
    plan = Plan(pipelines=(toy.pipeline((0, 5), ((0,),), samples=1), toy.pipeline((0, 5), ((1,),), samples=1)))
    program = edited(lower(plan, toy.model()), 1, swapped("Y3", "Y1"))
    (first, second) = check(program, plan, toy.model())
    assert "pipeline 0 stage 0 is stuck: " in first
    assert "Y3 waits for pipeline 1 stage 0" in first
    assert "Y1 waits for pipeline 0 stage 0" in second


def test_the_checker_finds_use_of_released_weights() -> None:
    plan = toy.data_parallel(2, 2, 2, 2, samples=1)
    program = edited(lower(plan, toy.model()), 0, without("G2"))
    assert any("the weights of unit 2 are not here" in p for p in check(program, plan, toy.model()))


def test_pipelines_of_unlike_shape_are_sound() -> None:
    plan = Plan(pipelines=mixed_shapes(), sharding=Sharding(weights=1, gradients=3, optimizer=3))
    assert check(lower(plan, toy.model()), plan, toy.model()) == ()


@pytest.mark.parametrize("text", ["F", "Q3", "F0:4.x", "SA0@", ""])
def test_actions_that_are_none_are_refused(text: str) -> None:
    if text == "F":
        assert parse_action(text) == Action("F")
    else:
        with pytest.raises(InputError, match="not an action"):
            parse_action(text)


def test_text_errors_name_the_line() -> None:
    with pytest.raises(InputError, match=r"line 2.*Z9"):
        from_text("p0s0: F0.0\np0s1: Z9\n")
