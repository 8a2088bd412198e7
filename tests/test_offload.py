"""State in host memory: plans, programs, prices, memory, and runs on real processes against one."""

from __future__ import annotations

import pytest
import torch

import sim_toys
import toy
from mixfleet.cost.kernels import host_copy_s, host_step_s
from mixfleet.plan import Offload, Plan
from mixfleet.plan_rules import why_not
from mixfleet.program.action import dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.search import find
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from mixfleet.sim.memory import offloaded, static
from run_pool import CLUSTER, Case, Pool, chunked, job, pipe, plan
from test_run_equality import check_equality
from test_sim_hazards import reachable

BOTH: tuple[Offload, ...] = ("weights", "optimizer")
HOSTED: tuple[Offload, ...] = ("gradients", "optimizer")
ALL: tuple[Offload, ...] = ("weights", "gradients", "optimizer")


def away(of: Plan, *what: Offload, stages: tuple[int, ...] | None = None) -> Plan:
    """The plan with this on all stages, or on some."""
    return of.replace(pipelines=tuple(p.replace(stages=tuple(
        s.replace(offload=what) if stages is None or i in stages else s for i, s in enumerate(p.stages)))
        for p in of.pipelines))


def test_golden_program() -> None:
    """Loads go one block ahead of use and of step; what was updated is written back and freed one step later."""
    one = away(Plan(pipelines=(toy.pipeline((0, 3), ((0,),), samples=1),)), *BOTH)
    model = toy.model(1)
    assert to_text(lower(one, model)) == (
        "p0s0: LW0 LW1 F0.0 XW0 LW2 F1.0 F2.0 B2.0 XW2 LW0 B1.0 XW1 B0.0 XW0 N LW0 LO0 LW1 LO1 S0 EW0 EO0 LW2 LO2 S1 "
        "EW1 EO1 XW0 XO0 S2 EW2 EO2 XW1 XO1 XW2 XO2\n")
    only = away(one, "optimizer")
    assert to_text(lower(only, model)) == "p0s0: F0:3.0 B0:3.0 N LO0 LO1 S0 EO0 LO2 S1 EO1 XO0 S2 EO2 XO1 XO2\n"


def test_gradients_go_as_they_are_made() -> None:
    """Behind every backward (or hop 1), back one computing before the next; the host steps where the state lies too,
    and hands on the weights unless they stay there."""
    two, model = Plan(pipelines=(toy.pipeline((0, 3), ((0,),), samples=2),)), toy.model(1)
    made = ("p0s0: F0.0 F1.0 F2.0 B2.0 EG2.0 XG2.0 B1.0 EG1.0 XG1.0 B0.0 EG0.0 XG0.0 F0.1 F1.1 LG2.1 F2.1 LG1.1 B2.1 "
            "EG2 XG2 LG0.1 B1.1 EG1 XG1 B0.1 EG0 XG0 N ")
    assert to_text(lower(away(two, *HOSTED), model)) == made + "S0 LU0 S1 LU1 S2 LU2\n"
    assert to_text(lower(away(two, "gradients"), model)) == made + "LG0 LG1 S0 LG2 S1 XG0 S2 XG1 XG2\n"
    assert to_text(lower(away(two, *ALL), model)).endswith("EG0 XG0 XW0 N S0 S1 S2\n")
    zero2 = plan(pipe((0, 3), (0, 1), samples=1, micro_batch=1, replicas=2), sharding=(1, 2, 2))
    assert to_text(lower(away(zero2, *HOSTED), model)) == (
        "p0s0: F0.0 F1.0 F2.0 B2.0 R2.0 EG2 XG2 B1.0 R1.0 EG1 XG1 B0.0 R0.0 EG0 XG0 N S0 LU0 P0 S1 LU1 P1 S2 LU2 P2\n")


def test_whole_gradients_hold_up_nothing() -> None:
    """They wait for hop 2, which may have to wait for another pipeline, and that for what this one computes next."""
    model = toy.model(tied=True)
    two = plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=1),
               pipe((0, 2, 5), (1,), (0,), samples=2, micro_batch=1), schedule="chimera")
    unlike = plan(pipe((0, 2, 5), (0,), (1,), samples=5, micro_batch=1),
                  pipe((0, 5), (2,), samples=1, micro_batch=1))
    for made in (two, unlike):
        for what in (("gradients",), HOSTED, ALL):
            moved = away(made, *what)
            program, layout = lower(moved, model), Layout(moved, model)
            assert check(program, moved, model) == ()
            for role in program.roles:
                seats = [layout.units_of_stage(*seat) for seat in role.seats]
                for k, units in enumerate(seats):
                    actions = role.view(k).actions
                    slow = dependencies(actions, layout, units)
                    assert reachable(actions, hazards(actions, layout)) == reachable(actions, slow)


@pytest.mark.parametrize("what", [("weights",), ("optimizer",), BOTH, ("gradients",), HOSTED, ALL])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_programs_are_sound(what: tuple[Offload, ...], degrees: tuple[int, int, int], tied: bool) -> None:
    model = toy.model(tied=tied)
    shaped = plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=2, replicas=2), sharding=degrees)
    for stages in (None, (1,)):
        moved = away(shaped, *what, stages=stages)
        assert why_not(moved, toy.job(6, model), toy_cluster()) is None
        program, layout = lower(moved, model), Layout(moved, model)
        assert check(program, moved, model) == ()
        assert from_text(to_text(program)) == program
        for role in program.roles:
            slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
            assert reachable(role.actions, hazards(role.actions, layout)) == reachable(role.actions, slow)


def toy_cluster(pcie_Bps: float = 4e9, host: int = 10**12) -> object:
    made = toy.cluster(4)
    return made.replace(nodes=tuple(n.replace(host_memory_bytes=host, devices=tuple(
        d.replace(pcie_Bps=pcie_Bps) for d in n.devices)) for n in made.nodes))


@pytest.mark.parametrize(("change", "says"), [
    ({"pcie_Bps": 0.0}, "states no pcie_bandwidth"), ({"host": 0}, "node n0 states no host_memory")])
def test_a_cluster_must_say_how_and_where(change: dict[str, float], says: str) -> None:
    moved = away(plan(pipe((0, 5), (0,), samples=2, micro_batch=1)), "optimizer")
    assert says in (why_not(moved, toy.job(2), toy_cluster(**change)) or "")  # type: ignore[arg-type]


def test_missing_loads_are_found() -> None:
    moved, model = away(plan(pipe((0, 5), (0,), samples=2, micro_batch=1)), *BOTH), toy.model()
    program = lower(moved, model)

    def says(op: str) -> str:
        role = program.roles[0]
        actions = list(role.actions)
        del actions[next(i for i, a in enumerate(actions) if str(a) == op)]
        return " ".join(check(program.replace(roles=(role.replace(actions=tuple(actions)),)), moved, model))

    assert "the weights of unit 1 are not here" in says("LW1")
    assert "what it works on is in host memory" in says("LO2")
    assert "EW3 is missing" in says("EW3")
    moved = away(plan(pipe((0, 5), (0,), samples=2, micro_batch=1)), *HOSTED)
    program = lower(moved, model)
    assert "B2.1: the gradient of unit 2 is in host memory" in says("LG2.1")
    assert "XG2.0: the gradient of unit 2 has not been written back" in says("EG2.0")
    assert "S2: the gradient of unit 2 is not in host memory, where the step is made" in says("XG2")
    assert "LU2 is missing" in says("LU2")


def test_bytes_move_between_device_and_host() -> None:
    """fp32 and AdamW: 4 bytes of weights and 8 of moments per element; what goes is counted at the host."""
    model = toy.model()
    base = plan(pipe((0, 5), (0, 1), samples=2, micro_batch=1, replicas=2), sharding=(1, 1, 2))
    total = sum(unit.elements for unit in Layout(base, model).units)
    for what, here, there in ((("weights",), (0, 4), 4.0), (("optimizer",), (4, 0), 4.0), (BOTH, (0, 0), 8.0)):
        moved = away(base, *what)
        layout = Layout(moved, model)
        state = [static(layout, toy.job(4, model), rank) for rank in (0, 1)]
        assert [s.weights for s in state] == [here[0] * total] * 2
        assert sum(s.moments for s in state) == 2 * here[1] * total
        assert sum(offloaded(layout, toy.job(4, model), rank) for rank in (0, 1)) == 2 * there * total


def test_gradients_and_what_the_host_makes_of_weights_are_counted() -> None:
    """fp32, AdamW, 2 of 2 replicas: 4 bytes of gradient per element, and 4 of weights and 8 of moments of the owned
    half. ZeRO-1 keeps the sum over micro-batches and the whole gradient of its half."""
    model = toy.model()
    base = plan(pipe((0, 5), (0, 1), samples=2, micro_batch=1, replicas=2))
    total = sum(unit.elements for unit in Layout(base, model).units)
    for degrees, what, there in (((1, 1, 1), ("gradients",), 8), ((1, 1, 2), ("gradients",), 12),
                                 ((1, 2, 2), ("gradients",), 4), ((1, 1, 2), HOSTED, 12 + 8 + 4),
                                 ((1, 1, 2), ALL, 12 + 8 + 4 + 8), ((1, 1, 1), ALL, 8 + 16 + 8)):
        moved = away(base, *what).replace(sharding=base.sharding.replace(
            **dict(zip(("weights", "gradients", "optimizer"), degrees))))
        layout = Layout(moved, model)
        assert [static(layout, toy.job(4, model), rank).gradients for rank in (0, 1)] == [0, 0]
        assert sum(offloaded(layout, toy.job(4, model), rank) for rank in (0, 1)) == there * total, (degrees, what)


def test_the_host_steps_for_all_its_devices_at_once() -> None:
    """AdamW in fp32: moments and values once in and once out, and the gradient: 28 bytes an element, at 120 GB/s, or
    what the host moves if that is less, for both devices together. Loading state would take 8 and 8 by PCIe."""
    device = sim_toys.device([(10, 20)] * 4).replace(pcie_Bps=16e9)
    assert host_step_s(3 * 10**9, device, toy.job(1), 2, 0.0) == pytest.approx(3e9 * 28 * 2 / 120e9)
    assert host_step_s(3 * 10**9, device, toy.job(1), 2, 60e9) == pytest.approx(3e9 * 28 * 2 / 60e9)
    job_ = sim_toys.job([sim_toys.block(i, elements=10_000_000) for i in range(4)], 4)
    made = sim_toys.cluster(device)
    made = made.replace(nodes=tuple(n.replace(host_memory_bytes=10**12) for n in made.nodes))
    base = sim_toys.straight((0, 4), 4)
    plain, state, hosted = (predict(of, job_, made, trace=True)
                            for of in (base, away(base, "optimizer"), away(base, *HOSTED)))
    assert hosted.trace is not None
    steps = [s for s in hosted.trace.spans if s.name.startswith("S")]
    assert sum(s.end_ns - s.start_ns for s in steps) / 1e9 == pytest.approx(4e7 * 28 / 120e9, rel=1e-3)
    assert state.devices[0].breakdown["gradients"] == 4 * 40_000_000
    assert hosted.devices[0].breakdown.get("gradients", 0) <= 3 * 40_000_000  # used, on its way there, on its way back
    assert hosted.devices[0].peak_bytes < state.devices[0].peak_bytes < plain.devices[0].peak_bytes
    assert hosted.devices[0].host_bytes == 4 * 10_000_000 * (4 + 4 + 8)
    bytes_moved = sum(s.end_ns - s.start_ns for s in hosted.trace.spans if s.category == "save") / 1e9
    assert bytes_moved == pytest.approx(4 * 4 * 40_000_000 / 12e9, rel=3e-3)  # every micro-batch, at 3/4 of the rate


def test_prices_are_those_of_pcie_and_overlap_with_computing() -> None:
    device = sim_toys.device([(1, 2)] * 4).replace(pcie_Bps=4e9)
    assert host_copy_s(3 * 10**9, device) == pytest.approx(1.0, rel=1e-4)  # three quarters of the rate
    model = [sim_toys.block(i) for i in range(4)]
    made = sim_toys.cluster(device)
    made = made.replace(nodes=tuple(n.replace(host_memory_bytes=10**9) for n in made.nodes))
    base = sim_toys.straight((0, 4), 4)
    job_ = sim_toys.job(model, 4)
    plain = predict(base, job_, made)
    moved = predict(away(base, *BOTH), job_, made, trace=True)
    assert moved.trace is not None
    assert {s.stream for s in moved.trace.spans} >= {"load", "save"}
    assert plain.step_s < moved.step_s < plain.step_s * 1.05  # blocks of a few bytes: latency, mostly hidden
    slow = made.replace(nodes=tuple(n.replace(devices=tuple(d.replace(pcie_Bps=2e4) for d in n.devices))
                                    for n in made.nodes))
    bound = predict(away(base, *BOTH), job_, slow)
    assert bound.step_s > 2 * plain.step_s
    assert "loading from the host of pipeline 0 stage 0" in bound.bound


def test_what_does_not_fit_a_device_fits_the_host_and_has_a_limit_there() -> None:
    device = sim_toys.device([(1, 2)] * 4).replace(pcie_Bps=4e9)
    made = sim_toys.cluster(device)
    base, job_ = sim_toys.straight((0, 4), 2), sim_toys.job([sim_toys.block(i) for i in range(4)], 2)
    plain = predict(base, job_, made)
    moved = away(base, "optimizer")
    roomy = made.replace(nodes=tuple(n.replace(host_memory_bytes=10**9) for n in made.nodes))
    (use,), (now,) = predict(moved, job_, roomy).devices, plain.devices
    assert 0 < use.host_bytes == now.breakdown["moments"]
    assert use.peak_bytes < now.peak_bytes
    tight = made.replace(nodes=tuple(n.replace(host_memory_bytes=use.host_bytes - 1) for n in made.nodes))
    short = predict(moved, job_, tight)
    assert not short.fits
    assert "lacks 1 B of host memory" in short.reasons[0]


def test_the_search_offloads_where_nothing_else_fits() -> None:
    """Weights, gradients and moments are 4 + 4 + 8 bytes per element in fp32. Without moments 8 stay and those of three
    blocks of twelve: 0.63 of the whole. With the step on the host, 4 and the gradients of three: 0.31; without weights
    too, both of three: 0.13."""
    job_ = sim_toys.job([sim_toys.block(i, elements=10_000_000) for i in range(12)], 2)
    whole = 12 * 10_000_000 * 16
    device = sim_toys.device([(10, 20)] * 12).replace(pcie_Bps=16e9)
    one = predict(sim_toys.straight((0, 12), 2), job_, sim_toys.cluster(device))
    framework = one.devices[0].breakdown["framework"]

    def found(part: float, host: int) -> object:
        small = device.replace(memory_bytes=framework + int(part * whole * 1.06))
        made = sim_toys.cluster(small)
        return find(job_, made.replace(nodes=tuple(n.replace(host_memory_bytes=host) for n in made.nodes)))

    def away_of(result: object) -> tuple[str, ...]:
        return result.best.plan.pipelines[0].stages[0].offload  # type: ignore[attr-defined, no-any-return]

    assert away_of(found(1.2, 0)) == ()
    assert away_of(found(0.8, 10**12)) == ("optimizer",)
    assert away_of(found(0.55, 10**12)) == HOSTED
    assert away_of(found(0.27, 10**12)) == ALL
    assert found(0.8, 0).best is None  # type: ignore[attr-defined]
    small = sim_toys.cluster(device.replace(memory_bytes=framework + int(0.8 * whole)))
    assert "`offload: [optimizer]`" in predict(sim_toys.straight((0, 12), 2), job_, small).reasons[0]


_TIED = {"figures": {"tied": True}}
RUNS: dict[str, Case] = {
    "one rank, all away": Case(away(plan(pipe((0, 5), (0,), samples=6, micro_batch=4)), *BOTH), job(**_TIED)),
    "a pipeline, its second stage away": Case(
        away(plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=1)), *BOTH, stages=(1,)),
        job(clip_norm=0.3, **_TIED)),
    "zero-1 and weights away": Case(
        away(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(1, 1, 3)), *BOTH), job()),
    "zero-2, unequal shares, optimizer away": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(1, 2, 2), shares=(1, 3)),
             "optimizer"), job(**_TIED)),
    "zero-3, optimizer away": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2)), "optimizer"), job()),
    "zero bubble v, weights away": Case(
        away(plan(chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=2, recompute="full"),
                  schedule="zb-v"), "weights"), job(**_TIED)),
    "tensor 2, all away": Case(
        away(plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=3, tensor=(2, 2))), *BOTH), job(**_TIED)),
    "one rank, stepped by the host, three micro-batches": Case(
        away(plan(pipe((0, 5), (0,), samples=6, micro_batch=2)), *HOSTED), job(clip_norm=0.3, **_TIED)),
    "gradients alone, four replicas in groups of two": Case(
        away(plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=1, replicas=4), sharding=(1, 2, 4)), "gradients"),
        job(12)),
    "gradients alone, unequal groups": Case(
        away(plan(pipe((0, 5), (0, 1, 2), samples=3, micro_batch=1, replicas=3), sharding=(1, 2, 3)), "gradients"),
        job(9, **_TIED)),
    "zero-1, everything away": Case(
        away(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(1, 1, 3)), *ALL),
        job(**_TIED)),
    "zero-2, unequal shares, stepped by the host": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(1, 2, 2), shares=(1, 3)),
             *HOSTED), job(**_TIED)),
    "zero-3, layered, stepped by the host": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2),
                  accumulation="layered"), *HOSTED), job()),
    "zero-3, weights away": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2)), "weights"),
        job(clip_norm=0.3, **_TIED)),
    "zero-3 in stages, everything away": Case(
        away(plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2)), *ALL),
        job(**_TIED)),
    "mics with unequal shares, everything away": Case(
        away(plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=1, replicas=4), sharding=(2, 2, 4),
                  shares=(1, 3, 2, 2)), *ALL), job(12, **_TIED)),
    "zero-3 gathered in steps, weights and state away": Case(
        away(plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(4, 4, 4),
                  hierarchical=2), *BOTH), job(8)),
    "zero-3 layered with frozen layers, everything away": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2),
                  accumulation="layered"), *ALL), job(frozen=("layers.0/*",))),
    "zero bubble v, everything away": Case(
        away(plan(chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=2, recompute="full"),
                  schedule="zb-v"), *ALL), job(**_TIED)),
    "tensor 2, its second stage stepped by the host": Case(
        away(plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=3, tensor=(2, 2))), *HOSTED, stages=(1,)),
        job(**_TIED)),
    "experts over replicas, stepped by the host": Case(
        away(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(1, 2, 2)).replace(expert=2),
             *HOSTED), job(figures={"style": "llama", "experts": 3, "experts_per_token": 2, "expert_ffn": 12})),
    "two directions, everything away": Case(
        away(plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=1),
                  pipe((0, 2, 5), (1,), (0,), samples=2, micro_batch=1), schedule="chimera"), *ALL), job(**_TIED)),
    "two directions, all away": Case(
        away(plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=1),
                  pipe((0, 2, 5), (1,), (0,), samples=2, micro_batch=1), schedule="chimera"), *BOTH), job(**_TIED)),
}


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, pool: Pool) -> None:
    case = RUNS[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    check_equality(case, pool)


def test_mixed_precision_is_the_same_to_the_bit_and_memory_is_as_predicted(pool: Pool) -> None:
    """bf16 with fp32 master weights: with everything in host memory only gradients stay."""
    base = plan(pipe((0, 5), (0,), samples=6, micro_batch=2))
    here, there = (pool.run(Case(of, job(precision="bf16"), trace=True))[0] for of in (base, away(base, *BOTH)))
    assert here.losses == there.losses
    for a, b in zip(here.weights, there.weights, strict=True):
        assert torch.equal(a[-1], b[-1])
    gradients = static(Layout(base, job().model), job(precision="bf16"), 0).gradients
    assert there.state_bytes == {"weights": 0, "gradients": gradients, "optimizer": 0}
    assert {s.stream for s in there.spans} >= {"load", "save"}
    for what in (HOSTED, ALL):
        host = pool.run(Case(away(base, *what), job(precision="bf16"), trace=True))[0]
        assert host.losses == here.losses
        for a, b in zip(here.weights, host.weights, strict=True):
            assert torch.equal(a[-1], b[-1])
        weights = static(Layout(base, job().model), job(precision="bf16"), 0).weights
        assert host.state_bytes == {"weights": 0 if what == ALL else weights, "gradients": 0, "optimizer": 0}
