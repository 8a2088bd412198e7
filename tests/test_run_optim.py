"""Optimizers on flat pieces against torch.optim; learning-rate schedules by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from mixfleet.job import Optimizer
from mixfleet.run.optim import FlatOptimizer, Run, learning_rate, runs

torch.set_num_threads(1)
SIZES = (200_001, 3, 70_000, 40)
DECAYS = (True, False, True, False)


def _torch(rule: Optimizer, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "weight_decay": rule.weight_decay * d} for p, d in zip(params, DECAYS)]
    if rule.name == "adamw":
        return torch.optim.AdamW(groups, lr=rule.lr, betas=rule.betas, eps=rule.eps)
    return torch.optim.SGD(groups, lr=rule.lr, momentum=rule.momentum)


@pytest.mark.parametrize("rule", [
    Optimizer(lr=0.02, betas=(0.8, 0.97), eps=1e-7, weight_decay=0.3),
    Optimizer(name="sgd", lr=0.02, weight_decay=0.3),
    Optimizer(name="sgd", lr=0.02, weight_decay=0.3, momentum=0.7)], ids=["adamw", "sgd", "momentum"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=["fp64", "fp32"])
def test_equals_torch(rule: Optimizer, dtype: torch.dtype, close: float) -> None:
    """Several tensors in one flat piece that comes as two views cut inside a tensor, larger than a chunk."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in SIZES]
    flat = torch.cat([p.detach() for p in params])
    value = [flat[:150_000], flat[150_000:]]
    ends = [sum(SIZES[:i + 1]) for i in range(len(SIZES))]
    ours = FlatOptimizer(rule, [Run(e - n, e, 1.0, rule.weight_decay * d)
                                for n, e, d in zip(SIZES, ends, DECAYS)], value)
    theirs = _torch(rule, params)
    for step in range(5):
        gradient = torch.randn(len(flat), dtype=dtype)
        for p, g in zip(params, gradient.split(SIZES)):
            p.grad = g / 7
        theirs.step()
        whole = gradient.clone()
        ours.step(value, [whole[:150_000], whole[150_000:]], 1 / 7, rule.lr)
        expected = torch.cat([p.detach() for p in params])
        assert (flat - expected).abs().max() < close, step


@pytest.mark.parametrize("rule", [Optimizer(lr=0.03, betas=(0.9, 0.95), weight_decay=0.1),
                                  Optimizer(name="sgd", lr=0.03, weight_decay=0.1, momentum=0.7)],
                         ids=["adamw", "momentum"])
@pytest.mark.parametrize("scale", [1.0, 2.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_replicas_that_cut_elements_differently_keep_the_same_bits(dtype: torch.dtype, scale: float,
                                                                   rule: Optimizer) -> None:
    """PyTorch's AdamW rounds the last elements of a tensor otherwise than those before."""
    torch.manual_seed(1)
    start, gradients = torch.randn(1830, dtype=dtype), torch.randn(6, 1830, dtype=dtype)

    def after_six_steps(lo: int, hi: int) -> torch.Tensor:
        value = start[lo:hi].clone()
        views = [value[:5], value[5:]]
        optimizer = FlatOptimizer(rule, [Run(0, hi - lo, 1.0, rule.weight_decay)], views)
        for gradient in gradients:
            mine = gradient[lo:hi].clone()
            optimizer.step(views, [mine[:5], mine[5:]], scale, rule.lr)
        return value

    whole = after_six_steps(0, 1830)
    for lo, hi in itertools.pairwise(itertools.accumulate(range(61))):
        assert torch.equal(after_six_steps(lo, hi), whole[lo:hi]), (lo, hi)


def test_untouched_between_runs_and_a_copy_in_a_shorter_type() -> None:
    value, copy = torch.ones(10), torch.ones(10, dtype=torch.bfloat16)
    frozen = FlatOptimizer(Optimizer(lr=0.5, weight_decay=0.0), [Run(2, 5, 1.0, 0.0)], [value])
    frozen.step([value], [torch.full((10,), 4.0, dtype=torch.bfloat16)], 0.25, 0.5, [copy])
    assert value[:2].tolist() == [1, 1]
    assert value[5:].tolist() == [1] * 5
    assert value[2:5].tolist() == pytest.approx([0.5] * 3)  # the first step of Adam moves by the learning rate
    assert copy[2:5].tolist() == [0.5] * 3
    assert frozen.nbytes == 2 * 10 * 4


def test_neighbouring_runs_join() -> None:
    assert runs([Run(5, 9, 1, 0.1), Run(0, 5, 1, 0.1), Run(9, 9, 1, 0), Run(9, 12, 1, 0), Run(12, 15, 2, 0)]) == [
        Run(0, 9, 1, 0.1), Run(9, 12, 1, 0), Run(12, 15, 2, 0)]


def test_learning_rates() -> None:
    rule = Optimizer(lr=0.8, warmup_steps=4, decay="linear", min_lr=0.2)
    assert [learning_rate(rule, s, 10) for s in (0, 3, 4, 7, 10, 12)] == pytest.approx([0.2, 0.8, 0.8, 0.5, 0.2, 0.2])
    cosine = rule.replace(decay="cosine", decay_steps=16)
    assert [learning_rate(cosine, s, 10) for s in (4, 8, 10, 16)] == pytest.approx(
        [0.8, 0.65, 0.5, 0.2])
    assert learning_rate(rule.replace(decay="constant"), 9, 10) == 0.8
