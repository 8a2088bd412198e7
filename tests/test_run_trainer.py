"""Any chain of modules, trained by a plan, against a plain loop."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixfleet.errors import InputError
from mixfleet.job import Optimizer
from mixfleet.run.trainer import Trainer
from mixfleet.run.worker import Rank
from run_pool import CLUSTER, pipe, plan

torch.set_num_threads(1)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def _chain() -> list[nn.Module]:
    torch.manual_seed(2)
    first, middle, last = nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)), nn.Linear(7, 7)
    last.weight = middle[1].weight  # tied between blocks
    return [module.double() for module in (first, middle, nn.Sequential(nn.GELU(), last), nn.Linear(7, 2))]


def _trainer(blocks: list[nn.Module], **changes: object) -> Trainer:
    torch.manual_seed(3)
    return Trainer(blocks, squared, torch.randn(11, 5).double(), torch.randn(11, 2).double(), **{  # type: ignore[arg-type]
        "global_batch": 6, "precision": "fp64", "optimizer": Optimizer(lr=0.05), **changes})


def test_blocks_that_nothing_parts_go_through_backward_in_one(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Recompute, or a recorder, parts them; the step is the same to the bit."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    backward, calls = torch.autograd.backward, []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args: (calls.append(1), backward(*args)))
    found = {}
    for name, recompute in (("joined", "none"), ("recorded", "none"),
                            ("third again", ("none", "none", "full", "none"))):
        trainer = _trainer(_chain())
        one = plan(pipe((0, 4), (0,), samples=6, micro_batch=2))
        one = one.replace(pipelines=(one.pipelines[0].replace(
            stages=(one.pipelines[0].stages[0].replace(recompute=recompute),)),))
        rank = Rank(one, trainer.job, CLUSTER, trainer.source, 0)
        rank.start()
        if name == "recorded":
            rank.recorder.start()
        calls.clear()
        result = rank.interpreter.step(rank.batches(0), 0.05)
        found[name] = len(calls), result.loss, [u.weights.data.clone() for u in rank.interpreter.units.values()]
        rank.close()
    dist.destroy_process_group()
    assert [count for count, *_ in found.values()] == [3, 3 * 4, 3 * 3]
    for _, loss, weights in found.values():
        assert loss == found["joined"][1]
        assert all(map(torch.equal, weights, found["joined"][2]))


def test_trains_like_a_plain_loop() -> None:
    trainer = _trainer(_chain())
    mixed = plan(pipe((0, 2, 4), (0,), (1,), samples=4, micro_batch=3), pipe((0, 4), (2,), samples=2, micro_batch=2),
                 sharding=(1, 1, 2))
    source, rule = trainer.source, trainer.job.optimizer
    whole = nn.Sequential(*deepcopy(trainer.blocks))
    optimizer = torch.optim.AdamW([
        {"params": [p for p in whole.parameters() if p.ndim > 1], "weight_decay": rule.weight_decay},
        {"params": [p for p in whole.parameters() if p.ndim < 2], "weight_decay": 0.0}], lr=rule.lr, betas=rule.betas)
    source.open(0, 0)
    losses = []
    for step in range(4):  # samples 0 to 23: more than two epochs of 11
        inputs, targets = source.batch(step, 0, 6)
        loss = squared(whole(inputs), targets) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    result = trainer.train(mixed, CLUSTER, steps=4)
    assert result is not None
    assert result.losses == pytest.approx(losses, rel=1e-9)
    for ours, theirs in zip(nn.Sequential(*trainer.blocks).parameters(), whole.parameters()):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-9)


def test_capture_counts_what_the_modules_have() -> None:
    model = _trainer(_chain()).job.model
    assert [b.count for b in model.blocks] == [5 * 7 + 7, 7 * 7 + 7, 7, 7 * 2 + 2]  # the third one's weight is tied
    assert [p.tied for p in model.blocks[2].params] == ["blocks.1/1.weight", ""]
    assert [b.boundary.at(3, 1) for b in model.blocks] == [21, 21, 21, 6]
    assert [b.ops[0].flops.at(2, 1) for b in model.blocks] == [2 * 2 * n for n in (5 * 7, 7 * 7, 7 * 7, 7 * 2)]


def test_measures_blocks_for_every_cpu() -> None:
    trainer = _trainer([nn.Linear(5, 400).double(), nn.Linear(400, 400).double(), nn.Linear(400, 2).double()])
    half = CLUSTER.devices[0].replace(share=0.5)
    cluster = CLUSTER.replace(nodes=(CLUSTER.nodes[0].replace(devices=(CLUSTER.devices[0], half)),))
    whole, shared = (d.block_times for d in trainer.measure(cluster).devices)
    assert [(t.block, t.micro_batch) for t in whole] == [(f"blocks.{i}", b) for b in (1, 4) for i in range(3)]
    assert [s.forward_s for s in shared] == [2 * w.forward_s for w in whole]
    assert all(t.backward_s > 0 for t in whole)


def test_measures_the_first_block_without_the_gradient_of_samples() -> None:
    asked: list[bool] = []

    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(x.requires_grad)
            return super().forward(x)

    trainer = _trainer([Seen(5, 6).double(), Seen(6, 2).double()])
    asked.clear()
    trainer.measure(CLUSTER)
    assert asked == ([False] * 4 + [True] * 4) * 2  # as a run does: four times each, of 1 and of 4 samples


def test_refuses_bad_chains() -> None:
    with pytest.raises(InputError, match="two or more"):
        _trainer([nn.Linear(5, 2).double()])
    with pytest.raises(InputError, match="11 inputs and 3 targets"):
        Trainer(_chain(), squared, torch.zeros(11, 5), torch.zeros(3, 2), global_batch=2)
