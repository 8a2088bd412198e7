"""Recompute block by block: the trade-off, plans and files, and that what is saved is what was predicted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.cost.memory import recompute_bytes
from mixfleet.errors import InputError
from mixfleet.plan import Pipeline, Plan, Recompute, Stage
from mixfleet.plan_rules import why_not
from mixfleet.search import find
from mixfleet.search.recompute import Choice, frontier, room_bytes, spared
from mixfleet.sim import predict
from sim_toys import cluster, device
from test_model_saved import FIGURES

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
choices = st.lists(st.builds(Choice, st.integers(0, 9), st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=3)


def total(blocks: list[list[Choice]], chosen: tuple[int, ...]) -> tuple[int, int]:
    taken = [options[i] for options, i in zip(blocks, chosen)]
    return sum(c.kept_bytes for c in taken) + max(c.again_bytes for c in taken), sum(c.time_ns for c in taken)


@settings(max_examples=150, deadline=None)
@given(st.lists(choices, min_size=1, max_size=6))
def test_the_frontier_is_that_of_enumeration(blocks: list[list[Choice]]) -> None:
    """S15: no set of blocks beats it, and every point of it is one that exists."""
    every = {total(blocks, chosen) for chosen in product(*(range(len(options)) for options in blocks))}
    best = {(n, t) for n, t in every if not any((m <= n and u <= t) and (m, u) != (n, t) for m, u in every)}
    found = frontier(blocks)
    assert {(p.nbytes, p.time_ns) for p in found} == best
    assert len(found) == len(best)
    assert all(total(blocks, p.chosen) == (p.nbytes, p.time_ns) for p in found)


def test_twelve_blocks_against_none_all_and_every_third() -> None:
    blocks = [[Choice(0, 7 * b + 11, 0), Choice(3 * (b % 5) + 2, 5, 7 * b + 6)] for b in range(12)]
    found = {(p.nbytes, p.time_ns) for p in frontier(blocks)}
    every = [total(blocks, chosen) for chosen in product((0, 1), repeat=12)]
    assert found == {(n, t) for n, t in every if not any((m <= n and u <= t) and (m, u) != (n, t) for m, u in every)}
    for habit in ((0,) * 12, (1,) * 12, (0, 1, 1) * 4):
        n, t = total(blocks, habit)
        assert any(m <= n and u <= t for m, u in found)
    assert len(found) > 20


# --- plans -----------------------------------------------------------------------------------------------------------


def staged(*modes: Recompute, **more: Any) -> Plan:
    return Plan(pipelines=(Pipeline(samples=3, micro_batch=1, stages=(
        Stage(blocks=(0, 5), devices=(0,), recompute=modes, **more),)),))


def test_modes_of_blocks_in_a_file(tmp_path: Path) -> None:
    plan = staged("full", "full", "full", "none", "selective")
    plan.save(tmp_path / "p.yaml")
    text = (tmp_path / "p.yaml").read_text()
    assert "full*3" in text
    assert Plan.load(tmp_path / "p.yaml") == plan
    stage = plan.pipelines[0].stages[0]
    assert stage.recompute_text == "full 0-2, none 3, selective 4"
    assert stage.modes == {0: "full", 1: "full", 2: "full", 3: "none", 4: "selective"}
    assert stage.with_modes(dict.fromkeys(range(5), "none")).recompute == "none"  # type: ignore[arg-type]
    (tmp_path / "p.yaml").write_text(text.replace("full*3", "ful*3"))
    with pytest.raises(InputError, match="ful"):
        Plan.load(tmp_path / "p.yaml")


def test_as_many_modes_as_blocks() -> None:
    from run_pool import CLUSTER, job

    reason = why_not(staged("full", "none"), job(3), CLUSTER)
    assert reason == (
        "pipelines[0].stages[0].recompute lists 2 modes; the stage holds 5 blocks (0-4), one mode for each")


def narrow(spare_layers: float) -> tuple[Any, Any]:
    """A job, and one device that holds what full recompute needs and some layers' activations more."""
    from mixfleet.job import Job
    from mixfleet.model.families import build

    model = build(FIGURES | {"style": "gpt", "layers": 6, "max_seq_len": 640})
    work = Job(name="j", model=model, seq_len=640, global_batch=1, precision="fp32")
    dev = device([]).replace(kind="cpu", flops={"fp32": 1e10}, vector_flops=1e10, memory_Bps=1e9)
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, stages=(
        Stage(blocks=(0, 8), devices=(0,), recompute="full"),)),))
    use = predict(plan, work, cluster(dev)).devices[0]
    layer = recompute_bytes(model.blocks[1], 1, 640, 1, dev, work, "full")
    return work, cluster(dev.replace(memory_bytes=use.peak_bytes + int(spare_layers * layer)))


def test_the_search_recomputes_only_as_many_blocks_as_it_must() -> None:
    work, where = narrow(3.5)
    best = find(work, where).plans[0]
    stage = best.plan.pipelines[0].stages[0]
    assert not isinstance(stage.recompute, str)
    (pipe,) = best.plan.pipelines
    whole = [predict(Plan(pipelines=(pipe.replace(stages=(stage.replace(recompute=mode),)),)), work, where)
             for mode in MODES]
    assert best.prediction.fits
    assert all(p.step_s > best.prediction.step_s or not p.fits for p in whole)


def test_spared_keeps_to_the_room() -> None:
    work, where = narrow(3.5)
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, stages=(
        Stage(blocks=(0, 8), devices=(0,), recompute="full"),)),))
    now = predict(plan, work, where)
    other = spared(plan, room_bytes(now, where), work, where)
    found = predict(other, work, where)
    assert found.fits
    assert found.step_s < now.step_s
    assert found.devices[0].peak_bytes > now.devices[0].peak_bytes
    assert spared(plan.replace(pipelines=(plan.pipelines[0].replace(stages=(
        plan.pipelines[0].stages[0].replace(recompute="none"),)),)), room_bytes(now, where), work, where).pipelines[
            0].stages[0].recompute == "none"
