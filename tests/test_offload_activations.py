"""Activations in host memory, block by block: plans, programs, prices, memory, search, and runs against one process."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

import sim_toys
import toy
from mixfleet.cost.memory import parked_bytes, saved_bytes
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.plan_rules import why_not
from mixfleet.program.action import dependencies
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.program.text import from_text, to_text
from mixfleet.run.modules import TABLES, _causal, build_blocks
from mixfleet.run.parked import Parked, constants
from mixfleet.run.recorder import Recorder
from mixfleet.search.recompute import ANYWHERE, room_bytes, spared
from mixfleet.search.variants import under
from mixfleet.sim import predict
from mixfleet.sim.hazards import hazards
from run_pool import CLUSTER, CPU, Case, Pool, chunked, job, pipe, plan
from test_run_equality import check_equality
from test_sim_hazards import reachable

torch.set_num_threads(1)


def parked(of: Plan, *blocks: int) -> Plan:
    """The plan with what these blocks save in host memory."""
    return of.replace(pipelines=tuple(p.replace(stages=tuple(
        s.replace(offload_blocks=tuple(b for b in blocks if s.holds(b))) for s in p.stages)) for p in of.pipelines))


# --- programs --------------------------------------------------------------------------------------------------------


def test_golden_program() -> None:
    """It goes behind the forward and comes back one computing before the backward; where that would be at once, as for
    the last block of a single micro-batch, it stays."""
    two = parked(Plan(pipelines=(toy.pipeline((0, 3), ((0,),), samples=2),)), 1, 2)
    assert to_text(lower(two.replace(schedule="gpipe"), toy.model(1))) == (
        "p0s0: F0.0 F1.0 EA1.0 F2.0 EA2.0 F0.1 F1.1 EA1.1 LA2.0 F2.1 EA2.1 LA1.0 B2.0 XA2.0 B1.0 XA1.0 LA2.1 B0.0 "
        "LA1.1 B2.1 XA2.1 B1.1 XA1.1 B0.1 N S0 S1 S2\n")
    once = parked(Plan(pipelines=(toy.pipeline((0, 3), ((0,),), samples=1),)), 0, 1, 2)
    assert to_text(lower(once, toy.model(1))) == (
        "p0s0: F0.0 EA0.0 F1.0 EA1.0 F2.0 LA1.0 B2.0 LA0.0 B1.0 XA1.0 B0.0 XA0.0 N S0 S1 S2\n")
    ahead = two.replace(schedule="gpipe", sharding=two.sharding.replace(prefetch=0))
    assert "B2.0 XA2.0 LA1.0 B1.0 XA1.0" in to_text(lower(ahead, toy.model(1)))


def test_forwards_wait_until_enough_is_away() -> None:
    """With prefetch 1, two may be on their way out when the next one begins: the fourth waits for the first."""
    made = parked(Plan(pipelines=(toy.pipeline((0, 5), ((0,),), samples=1),)), 0, 1, 2, 3)
    assert to_text(lower(made, toy.model())).startswith(
        "p0s0: F0.0 EA0.0 F1.0 EA1.0 F2.0 EA2.0 HA0.0 F3.0 EA3.0 F4.0 LA3.0 B4.0 ")


def test_predicted_memory_does_not_depend_on_how_fast_copies_are() -> None:
    base = parked(sim_toys.straight((0, 4), 3, schedule="gpipe"), 1, 2)
    work = sim_toys.job([sim_toys.block(i) for i in range(4)], 3)
    held = {predict(base, work, hosted(CARD.replace(pcie_Bps=rate))).devices[0].breakdown["activations"]
            for rate in (1e3, 20e3, 200e3, 4e9)}
    assert max(held) <= 10 * 2048  # six parts of the ends; one used, one that comes, two on their way
    assert len(held) == 1


@pytest.mark.parametrize("made", [
    plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=5, micro_batch=1, replicas=2), sharding=(2, 2, 2)),
    plan(chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=1), schedule="zb-v"),
    plan(pipe((0, 5), (0,), samples=5, micro_batch=1), accumulation="layered"),
], ids=["zero-3", "zb-v", "layered"])
def test_programs_are_sound(made: Plan) -> None:
    model = toy.model()
    made = parked(made, *range(5))
    program, layout = lower(made, model), Layout(made, model)
    assert check(program, made, model) == ()
    assert from_text(to_text(program)) == program
    assert {"EA", "LA", "XA"} <= {a.op for role in program.roles for a in role.actions}
    for role in program.roles:
        slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
        assert reachable(role.actions, hazards(role.actions, layout)) == reachable(role.actions, slow)


def test_the_checker_finds_what_is_not_here() -> None:
    made = parked(plan(pipe((0, 5), (0,), samples=3, micro_batch=1), schedule="gpipe"), 1, 2, 3)
    program, model = lower(made, toy.model()), toy.model()

    def says(text: str, *, twice: bool = False, of: Plan = made) -> str:
        role = program.roles[0]
        at = next(i for i, a in enumerate(role.actions) if str(a) == text)
        actions = [*role.actions[:at], *role.actions[at:at + 1] * (2 * twice), *role.actions[at + 1:]]
        return " ".join(check(program.replace(roles=(role.replace(actions=tuple(actions)),)), of, model))

    assert "B2.0: what the forward of block 2 saved is in host memory" in says("LA2.0")
    assert "LA2.0: what it saved is not in host memory" in says("EA2.0")
    assert "EA2.0: what it saved is in host memory" in says("EA2.0", twice=True)
    assert "EA2.0: what this block saves stays on the device" in says("XA1.0", of=parked(made, 1, 3))


@pytest.mark.parametrize(("made", "says"), [
    (parked(plan(pipe((0, 5), (0,), samples=6, micro_batch=1)), 1).pipelines[0].stages[0].replace(
        offload_blocks=(1, 7)), "offload_blocks has block 7; the stage holds blocks 0-4"),
    (Stage(blocks=(0, 5), devices=(0,), offload_blocks=(3, 1, 3)), "names block 3 twice"),
    (Stage(blocks=(0, 5), devices=(0,), offload_blocks=(1, 2), recompute=("none", "full", "selective", "none", "none")),
     "has block 2, whose recompute is selective"),
])
def test_what_cannot_be(made: Stage, says: str) -> None:
    reason = why_not(Plan(pipelines=(Pipeline(stages=(made,), samples=6, micro_batch=1),)), job(), CLUSTER)
    assert says in (reason or "")


def test_blocks_take_it_along_where_they_are_laid_otherwise() -> None:
    made = parked(plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=1)), 1, 3)
    laid = under(made, "zb-v", job(), CLUSTER)
    assert isinstance(laid, Plan)
    assert laid.pipelines[0].away == {1, 3}
    assert [s.offload_blocks for s in laid.pipelines[0].stages] == [
        tuple(b for b in (1, 3) if s.holds(b)) for s in laid.pipelines[0].stages]
    assert why_not(laid, job(), CLUSTER) is None


def test_an_asynchronous_schedule_refuses_it(tmp_path: Path) -> None:
    made = parked(plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=1), schedule="pipedream"), 1)
    assert "under pipedream micro-batches of several steps are in flight" in (why_not(made, job(), CLUSTER) or "")
    made.save(tmp_path / "p.yaml")
    assert Plan.load(tmp_path / "p.yaml") == made
    assert made.pipelines[0].stages[0].away == ("activations of 1",)


# --- prices and memory -----------------------------------------------------------------------------------------------

CARD = sim_toys.device([(3, 7), (5, 11), (4, 9), (6, 13)]).replace(pcie_Bps=4e9)


def hosted(device: object, host: int = 10**9) -> object:
    made = sim_toys.cluster(device)
    return made.replace(nodes=tuple(n.replace(host_memory_bytes=host) for n in made.nodes))


def test_time_and_memory_by_hand() -> None:
    """Four blocks save 2,048 bytes of each of three micro-batches, all forwards first: 24,576 bytes at most. With the
    middle two in host memory the ends keep 6 parts of 2,048; of the middle, one is used, one comes, and at the turn one
    more is on its way out."""
    base = sim_toys.straight((0, 4), 3, schedule="gpipe")
    work = sim_toys.job([sim_toys.block(i) for i in range(4)], 3)
    plain, moved = (predict(of, work, hosted(CARD)) for of in (base, parked(base, 1, 2)))
    assert plain.devices[0].breakdown["activations"] == 12 * 2048
    assert moved.step_s == pytest.approx(plain.step_s, rel=1e-3)  # the copies are hidden, but for their latency
    assert moved.devices[0].breakdown["activations"] <= 9 * 2048
    assert moved.devices[0].host_bytes == 6 * 2048  # two blocks of three micro-batches
    # 2,048 bytes at 3/4 of 20 kB/s take 137 ms each way; the blocks take 18 + 40 ms per micro-batch.
    slow = predict(parked(base, 1, 2), work, hosted(CARD.replace(pcie_Bps=20e3)), trace=True)
    assert slow.trace is not None
    assert sum(s.end_ns - s.start_ns for s in slow.trace.spans if s.category == "save") / 1e6 == pytest.approx(
        6 * 2048 / 15e3 * 1e3, rel=1e-3)
    assert slow.step_s == pytest.approx(12 * 2048 / 15e3, rel=0.1)
    assert "the host of pipeline 0 stage 0" in slow.bound
    short = predict(parked(base, 1, 2), work, hosted(CARD, 6 * 2048 - 1))
    assert "lacks 1 B of host memory" in short.reasons[0]


@pytest.mark.parametrize("figures", [{}, {"style": "llama", "kv_heads": 2}, {"experts": 3, "experts_per_token": 2,
                                                                            "expert_ffn": 12, "style": "llama"}])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_goes_is_what_was_predicted(figures: dict[str, object], recompute: str) -> None:
    """S15: the bytes that leave are those of the account, to the byte; they come back, and the gradients are the same.
    """
    work = job(figures=figures)
    blocks, model = build_blocks(work.model, range(5), dtype=torch.float64, seed=3), work.model
    tokens = torch.randint(0, 23, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    recorder = Recorder(0, torch.device("cpu"))
    found: list[list[torch.Tensor]] = []
    for away in (False, True):
        for p in (p for block in blocks for p in block.parameters()):
            p.grad = None
        x, kept = tokens[0], []
        for b, block in enumerate(blocks):
            leaf = x if b == 0 else x.detach().requires_grad_()
            saved: dict[int, torch.UntypedStorage] = {}
            with torch.set_grad_enabled(recompute == "none"), recorder.saving([], set(), saved):
                out = block(leaf, tokens[1]) if b == 4 else block(leaf)
            saved = saved if recompute == "none" else {}
            saved[leaf.untyped_storage()._cdata] = leaf.untyped_storage()
            stay = {t.untyped_storage()._cdata for t in (tokens, out)} | TABLES | constants(block)
            kept.append((leaf, out, Parked({k: s for k, s in saved.items() if k not in stay}, recorder,
                                           torch.device("cpu"))))
            x = out
        for b, (leaf, _, gone) in enumerate(kept if away else ()):
            for _ in gone.save():
                pass
            want = parked_bytes(model.blocks[b], 2, 8, 1, CPU, work, recompute, first=b == 0)
            assert gone.nbytes == (pytest.approx(want, rel=0.05) if "experts" in figures else want)
            if b and recompute == "full":
                assert leaf.untyped_storage().nbytes() == 0
        gradient = torch.ones((), dtype=torch.float64)
        for b, (leaf, out, gone) in reversed(list(enumerate(kept))):
            for _ in gone.load() if away else ():
                pass
            if recompute == "full":
                out = blocks[b](leaf, tokens[1]) if b == 4 else blocks[b](leaf)
            out.backward(gradient)
            gradient = leaf.grad
        found.append([p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None])
    assert len(found[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- search ----------------------------------------------------------------------------------------------------------


def narrow(spare_layers: float, pcie_Bps: float) -> tuple[Job, object, Plan]:
    """A device that holds what full recompute needs and some layers' activations more."""
    model = build({"style": "gpt", "layers": 6, "hidden": 48, "heads": 6, "ffn": 136, "vocab": 212, "max_seq_len": 640})
    work = Job(name="j", model=model, seq_len=640, global_batch=3, precision="fp32")
    card = sim_toys.device([]).replace(flops={"fp32": 1e10}, vector_flops=1e10, memory_Bps=1e9, pcie_Bps=pcie_Bps)
    made = Plan(schedule="gpipe", pipelines=(Pipeline(samples=3, micro_batch=1, stages=(
        Stage(blocks=(0, 8), devices=(0,), recompute="full"),)),))
    use = predict(made, work, hosted(card, 10**12)).devices[0]
    layer = saved_bytes(model.blocks[1], 1, 640, 1, card, work)
    return work, hosted(card.replace(memory_bytes=use.peak_bytes + int(spare_layers * layer)), 10**12), made


def test_the_search_offloads_where_copies_cost_less_than_computing_again() -> None:
    work, where, made = narrow(6, 16e9)
    now = predict(made, work, where)
    room = room_bytes(now, where)
    here, there = (predict(spared(made, dict(room), work, where, *more), work, where) for more in ((), (ANYWHERE,)))
    assert there.fits
    assert there.step_s < here.step_s < now.step_s
    assert spared(made, room, work, where, ANYWHERE).pipelines[0].stages[0].offload_blocks
    slow_work, slow, _ = narrow(6, 1e4)
    assert not spared(made, room, slow_work, slow, ANYWHERE).pipelines[0].stages[0].offload_blocks


def test_no_choice_of_few_blocks_is_better_than_the_one_found() -> None:
    """All 5^3 ways of two layers and a head, by simulation: none that fits is faster than what is found for its memory.
    """
    model = build({"style": "gpt", "layers": 2, "hidden": 48, "heads": 6, "ffn": 136, "vocab": 212, "max_seq_len": 640})
    work = Job(name="j", model=model, seq_len=640, global_batch=3, precision="fp32")
    card = sim_toys.device([]).replace(flops={"fp32": 1e10}, vector_flops=1e10, memory_Bps=1e9, pcie_Bps=2e9)
    stage = Stage(blocks=(0, 4), devices=(0,), recompute="full")
    base = Plan(schedule="gpipe", pipelines=(Pipeline(samples=3, micro_batch=1, stages=(stage,)),))
    every = []
    for ways in product(ANYWHERE, repeat=3):  # the embedding keeps nothing
        modes = ("none", *(mode for mode, _ in ways))
        one = base.replace(pipelines=(base.pipelines[0].replace(stages=(stage.replace(
            recompute=modes, offload_blocks=tuple(b for b, (_, away) in enumerate(ways, 1) if away)),)),))
        found = predict(one, work, hosted(card, 10**12))
        every.append((found.devices[0].peak_bytes, found.step_s))
    least, most = min(every)[0], max(every)[0]
    slower = []
    for memory in (least + (most - least) * k // 7 for k in range(1, 7)):
        where = hosted(card.replace(memory_bytes=memory), 10**12)
        made, room = base, room_bytes(predict(base, work, where), where)
        best = predict(base, work, where)
        for _ in range(4):
            other = spared(made, room, work, where, ANYWHERE)
            if other == made:
                break
            found = predict(other, work, where)
            if found.fits:
                best, made, room = min(best, found, key=lambda p: p.step_s), other, room_bytes(found, where)
            for use in found.devices:
                room[use.pipeline, use.stage] -= use.lacks_bytes
        slower.append(best.step_s / min(s for n, s in every if n <= memory))
    assert slower[0] < 1.2  # hardly more than the least there can be: how many are on their way decides
    assert max(slower[1:]) < 1.001


# --- real processes --------------------------------------------------------------------------------------------------

RUNS: dict[str, Case] = {
    "one rank": Case(parked(plan(pipe((0, 5), (0,), samples=6, micro_batch=2), schedule="gpipe"), *range(5)), job(),
                     trace=True),
    "a pipeline, full recompute, zero-3": Case(parked(plan(
        pipe((0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2, recompute="full"), sharding=(2, 2, 2)),
        1, 2, 3), job(clip_norm=0.3, figures={"tied": True})),
    "zero bubble, watched": Case(plan(
        chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=1), schedule="zb-v"), job(), trace=True),
    "zero bubble, halves": Case(parked(plan(
        chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=1), schedule="zb-v"), 1, 2, 3, 4),
        job(figures={"style": "llama"})),
    "tensor 2, layered, packed experts": Case(parked(plan(
        pipe((0, 5), (0, 1), samples=6, micro_batch=2, tensor=(2,)), accumulation="layered"), 1, 2, 3),
        job(figures={"style": "llama", "experts": 4, "experts_per_token": 2, "expert_ffn": 12})),
}


@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, pool: Pool) -> None:
    assert why_not(RUNS[name].plan, RUNS[name].job, CLUSTER) is None
    check_equality(RUNS[name], pool)


def test_held_bytes_are_those_predicted(pool: Pool) -> None:
    """With all of what the layers save in host memory, what a real step holds beside its state at the end of the last
    forward: of the last micro-batch's blocks, and of others the embedding's and the head's."""
    base = plan(pipe((0, 5), (0,), samples=6, micro_batch=1), schedule="gpipe")

    def peak(of: Plan, sabotage: str = "") -> int:
        outcome = pool.run(Case(of, job(), steps=1, trace=True, sabotage=sabotage))[0]
        assert outcome.memory[-1].total_bytes == sum(outcome.state_bytes.values())
        return max(m.total_bytes for m in outcome.memory) - sum(outcome.state_bytes.values())

    each = [saved_bytes(block, 1, 8, 1, CPU, job()) for block in job().model.blocks]
    assert peak(base) == pytest.approx(6 * sum(each), rel=0.05)
    # one used, one that comes, and at most two on their way out, however slow the copies are
    moved = parked(base, 1, 2, 3, 4)
    assert peak(moved) < 6 * each[0] + 4 * max(each[1:])
    assert peak(moved, "slow copies") < 6 * each[0] + 4 * max(each[1:])


def test_a_table_that_no_cache_has_any_more_is_forgotten():
    """Whatever gets its address next would stay on the device."""
    _causal.cache_clear()
    known = TABLES.copy()
    table = _causal(7, 0, torch.device("cpu"))
    (storage,) = TABLES - known
    assert storage == table.untyped_storage()._cdata
    del table
    assert storage in TABLES
    _causal.cache_clear()
    assert storage not in TABLES
