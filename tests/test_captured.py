"""Networks that are no decoders: what a captured chain of convolutions saves and holds, frozen parts included."""

from __future__ import annotations

import pytest
import torch
from benchmarks.memory import ALONE, CPU, Living
from torch import Tensor, nn

from mixfleet.cost.memory import saved_bytes
from mixfleet.job import Optimizer
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.run.trainer import Trainer
from mixfleet.run.worker import Rank
from mixfleet.sim import predict
from mixfleet.sim.fit import fit

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("one_process")
BATCH = 6


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target)**2).sum()


def autoencoder(*, frozen: bool) -> Trainer:
    """An encoder of two convolutions, and a decoder; the encoder may be given."""
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GELU()),
        nn.Sequential(nn.Conv2d(12, 20, 3, stride=2, padding=1), nn.GELU()),
        nn.Sequential(nn.ConvTranspose2d(20, 8, 2, stride=2), nn.GELU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))]
    for block in blocks[:2] if frozen else ():
        block.requires_grad_(requires_grad=False)
    inputs = torch.randn(BATCH, 1, 24, 20, generator=torch.Generator().manual_seed(3))
    return Trainer(blocks, squared, inputs, inputs.clone(), global_batch=BATCH, optimizer=Optimizer(lr=1e-3))


def test_saved_bytes_of_convolutions_are_those_of_hooks() -> None:
    """S15: from a trace of one sample, to the byte for a batch of six."""
    trainer, x = autoencoder(frozen=False), torch.zeros(BATCH, 1, 24, 20)
    for spec, module in zip(trainer.job.model.blocks, trainer.blocks):
        own, saved = {p.untyped_storage()._cdata for p in module.parameters()}, dict[int, int]()

        def keep(t: Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> Tensor:
            if t.untyped_storage()._cdata not in own:
                saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        entry = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            x = module(entry)
        assert saved_bytes(spec, BATCH, 1, 1, CPU, trainer.job) == sum(saved.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_the_peak_is_as_predicted(frozen: bool) -> None:
    """S44: with and without a given encoder, within 10 % of the storages that a step holds."""
    trainer = autoencoder(frozen=frozen)
    plan = Plan(pipelines=(Pipeline(samples=BATCH, micro_batch=BATCH, stages=(Stage(blocks=(0, 4), devices=(0,)),)),))
    living = Living()
    with living:
        rank = Rank(plan, trainer.job, ALONE, trainer.source, 0)
        rank.start()
        for step in range(2):
            living.peak = 0
            rank.interpreter.step(rank.batches(step), 1e-3)
    rank.close()
    (use,) = predict(plan, trainer.job, ALONE).devices
    assert use.resumed_bytes - use.breakdown["framework"] == pytest.approx(living.peak, rel=0.1)


def test_the_largest_micro_batch_of_convolutions() -> None:
    """S44: more samples fit where the encoder is given; what does not fit at all says so."""
    whole, given = (fit(autoencoder(frozen=frozen).job, CPU.replace(memory_bytes=6_000_000))[0]
                    for frozen in (False, True))
    assert 0 < whole.micro_batch < given.micro_batch
    none = fit(autoencoder(frozen=False).job, CPU.replace(memory_bytes=40_000))[0]
    assert none.micro_batch == 0
    assert none.why_not
