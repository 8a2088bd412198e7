"""Frozen parameters and groups of parameters: in job files, in predictions, and what the runtime holds for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mixfleet.cost.kernels import block_cost
from mixfleet.cost.memory import saved_bytes
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer, ParamGroup
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim import predict
from mixfleet.sim.fit import fit
from run_pool import CLUSTER, CPU, job, pipe, plan

LOWER = ("embed/*", "layers.[01]/*")


def test_patterns_choose_parameters() -> None:
    model = job(frozen=("layers.1/*", "*/norm*")).model
    frozen = {f"{b.name}/{p.name}" for b in model.blocks for p in b.params if not p.trainable}
    assert {name.partition("/")[0] for name in frozen} == {"layers.0", "layers.1", "layers.2", "head"}
    assert "layers.0/norm1.weight" in frozen
    assert "layers.0/mlp.up.weight" not in frozen
    assert [b.hands_down for b in model.blocks] == [True] * 5
    assert [b.idle_backward for b in job(frozen=LOWER).model.blocks] == [True, True, True, False, False]
    assert job(frozen=LOWER).replace(frozen=()) == job()


def test_bad_patterns_say_what_there_is() -> None:
    with pytest.raises(InputError, match=r"frozen: 'layer\.0/\*' matches no parameter; they are named as in embed/"):
        job(frozen=("layer.0/*",))
    with pytest.raises(InputError, match="every parameter is, so there is nothing to train"):
        job(frozen=("*",))
    with pytest.raises(InputError, match=r"optimizer\.groups: 'x' matches no parameter"):
        job(optimizer=Optimizer(groups=(ParamGroup(match="x"),)))
    with pytest.raises(InputError, match="lr_scale of 'x' is -1"):
        ParamGroup(match="x", lr_scale=-1)


def test_a_job_file_has_them(tmp_path: Path) -> None:
    text = """
mixfleet: job/1
model: gpt2
seq_len: 8
global_batch: 2
frozen: ["layers.[0-5]/*", "embed/*"]
optimizer:
  groups:
    - {match: "*.bias", lr_scale: 2.0}
    - {match: "head/*", weight_decay: 0.3}
"""
    (tmp_path / "j.yaml").write_text(text)
    found = Job.load(tmp_path / "j.yaml")
    assert found.frozen == ("layers.[0-5]/*", "embed/*")
    assert found.optimizer.rates("layers.7/mlp.up.bias", 1) == (2.0, 0.0)
    assert found.optimizer.rates("head/norm.weight", 1) == (1.0, 0.3)
    assert found.optimizer.rates("layers.7/mlp.up.weight", 2) == (1.0, 0.1)
    found.save(tmp_path / "again.yaml")
    assert "model: gpt2" in (tmp_path / "again.yaml").read_text()
    assert Job.load(tmp_path / "again.yaml") == found


def test_no_gradient_no_state_no_reduction_no_step() -> None:
    """By hand, fp64: frozen weights take 8 bytes, trained ones 8 for the gradient and 16 for moments besides."""
    two = plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(1, 1, 2))
    work = job(frozen=LOWER)
    total = work.model.count
    trained = sum(p.count for b in work.model.blocks for p in b.params if p.trainable)
    assert 0 < trained < total / 2
    held = predict(two, work, CLUSTER).devices[0].breakdown
    assert held["weights"] == 8 * total
    assert held["gradients"] == 8 * trained
    assert held["moments"] == pytest.approx(16 * trained / 2, abs=16 * 5)
    actions = lower(two, work.model).roles[0].actions
    assert {a.lo for a in actions if a.op == "S"} == {0, 1, 2, 3, 4}
    layout = Layout(two, work.model)
    assert {u.name for u in layout.units if u.frozen} == {"embed, frozen", "layers.0, frozen", "layers.1, frozen"}
    assert {a.lo for a in actions if a.op == "Y"} == {3, 4}


def test_backward_ends_at_the_lowest_trained_block() -> None:
    """By hand: three of five blocks are frozen. Micro-batches pass a stage of them upwards only, nothing comes back to
    it, and where weights are sharded frozen ones are gathered for the forward alone."""
    work = job(frozen=LOWER)
    three = plan(pipe((0, 2, 4, 5), (0,), (1,), (2,), samples=6, micro_batch=2))
    first, second, third = (role.actions for role in lower(three, work.model).roles)
    assert [(a.op, a.mb) for a in first if a.op != "S"] == [
        *((op, m) for m in range(3) for op in ("F", "SA")), ("N", -1)]
    assert [(a.lo, a.hi) for a in second if a.op == "B"] == [(3, 4)] * 3
    assert not [a for a in second if a.op == "SG"]
    assert len([a for a in third if a.op == "SG"]) == 3
    sent = predict(three, work, CLUSTER).sent_bytes
    whole = predict(three, job(), CLUSTER).sent_bytes
    assert sent is not None
    assert whole is not None
    message = 6 * 8 * 16 * 8  # samples, positions, width, bytes
    assert sent == {"0": {"SA": message}, "1": {"SA": message}, "2": {"SG": message}}
    assert whole == {"0": {"SA": message}, "1": {"SA": message, "SG": message}, "2": {"SG": message}}
    sharded = plan(pipe((0, 5), (0, 1), samples=3, micro_batch=3, replicas=2), sharding=(2, 2, 2))
    gathers = Counter(a.lo for a in lower(sharded, work.model).roles[0].actions if a.op == "G")
    trained = Counter(a.lo for a in lower(sharded, job().model).roles[0].actions if a.op == "G")
    assert [trained[b] for b in range(5)] == [2, 2, 2, 1, 1]
    assert [gathers[b] for b in range(5)] == [1] * 5


def test_backward_does_less() -> None:
    """Nothing below the lowest trained block; no weight gradients, nor what they need, in a frozen one above it."""
    plain, prefix, middle = job(), job(frozen=LOWER), job(frozen=("layers.1/*",))

    def cost(work: Job, b: int) -> tuple[float, float, int]:
        block = work.model.blocks[b]
        one = block_cost(block, 2, 8, 1, CPU, work)
        return one.forward_s, one.backward_s, saved_bytes(block, 2, 8, 1, CPU, work)

    forward, backward, saved = cost(plain, 2)
    assert cost(prefix, 2) == (forward, 0.0, 0)
    assert cost(prefix, 3) == cost(plain, 3)
    assert cost(middle, 1) == cost(plain, 1)
    weights = block_cost(plain.model.blocks[2], 2, 8, 1, CPU, plain).weight_s
    rows, hidden, ffn = 16, 16, 20
    inputs = rows * (2 * hidden + ffn) + 2 * rows * hidden  # of the products, and what RMSNorm multiplies by its weight
    assert cost(middle, 2) == (forward, pytest.approx(backward - weights), saved - 8 * inputs)


def test_the_largest_micro_batch_grows() -> None:
    """S44: frozen parts count in `mixfleet fit`."""
    small = CPU.replace(memory_bytes=int(1.1 * predict(plan(pipe((0, 5), (0,), samples=6, micro_batch=6)), job(),
                                                       CLUSTER).devices[0].peak_bytes))
    before, after = fit(job(), small)[0], fit(job(frozen=LOWER), small)[0]
    assert after.micro_batch > 1.3 * before.micro_batch
    assert after.breakdown["gradients"] < before.breakdown["gradients"]
