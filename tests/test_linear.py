"""Linear layers that add to gradients themselves, at once or later; nothing is kept in the end."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toy
from mixfleet.job import Optimizer
from mixfleet.program.layout import Layout
from mixfleet.run import linear as engine
from mixfleet.run.linear import Later, Linears, PutOff, adopt, linear, mark_bound
from mixfleet.run.state import Unit, bind


def test_both_halves_give_the_gradients_and_free_what_they_saved():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    halved = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    halved.load_state_dict(whole.state_dict())
    x = torch.randn(7, 3, dtype=torch.float64)
    whole(x).square().sum().backward()
    later: Later = []
    with PutOff(later), Linears():
        hidden = halved[1](halved[0](x))
        halved[2](hidden).square().sum().backward()
    kept = weakref.ref(hidden)
    del hidden
    assert [p.grad is None for p in halved.parameters()] == [True, False, True, False]
    for accumulate in later:
        accumulate()
    for a, b in zip(whole.parameters(), halved.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)
    later.clear()
    assert kept() is None


def test_what_was_saved_is_freed_even_if_nobody_clears_the_list():
    """An activation's graph holds the list; the list must not hold the graph."""
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

    class Kept(list):  # a list that can be watched
        pass

    def once() -> weakref.ref[Kept]:
        later = Kept()
        with PutOff(later), Linears():
            hidden = layers[1](layers[0](torch.ones(7, 3)))
            layers[2](hidden).sum().backward()
        for accumulate in later:
            accumulate()
        return weakref.ref(later)

    assert once()() is None


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("rows", [(7,), (2, 4)])
def test_gradients_go_straight_to_their_buffer(rows, kept, monkeypatch):
    """On top of what is there, for one and several dimensions of rows, with a backward that computes forward again."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()
    x = torch.randn(*rows, 3, dtype=torch.float64, requires_grad=True)
    layers(x).square().sum().backward()
    expected, below = [p.grad.clone() + 0.5 for p in layers.parameters()], x.grad
    x.grad = None
    buffers = [torch.full_like(p, 0.5) for p in layers.parameters()]
    for p, buffer in zip(layers.parameters(), buffers):
        p.grad = buffer
        mark_bound(p, buffer)
    straight, added = engine._accumulate, []
    monkeypatch.setattr(engine, "_accumulate", lambda weight, *ab: (added.append(weight), straight(weight, *ab)))
    adopt(layers)
    (layers(x) if kept else checkpoint(layers, x, use_reentrant=False)).square().sum().backward()
    assert [w is layer.weight for w, layer in zip(added, (layers[2], layers[0]), strict=True)] == [True, True]
    for p, buffer, gradient in zip(layers.parameters(), buffers, expected):
        assert p.grad is buffer
        torch.testing.assert_close(buffer, gradient, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, below, rtol=1e-12, atol=0)


def test_a_hook_on_a_weight_sees_its_gradient():
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.zeros(2, 3)
    mark_bound(weight, weight.grad)
    seen = []
    weight.register_hook(lambda g: seen.append(g.clone()))
    linear(torch.full((4, 3), 2.0), weight).sum().backward()
    assert seen[0].tolist() == [[8.0] * 3] * 2
    assert weight.grad.tolist() == [[8.0] * 3] * 2


def test_the_first_product_is_written_over_what_the_buffer_holds():
    """Nothing of linear weights is zeroed beforehand, but all is there in the end: what two micro-batches gave, what
    autograd gave before or behind a product, and zeros where nobody gave anything."""
    job = toy.job(2).replace(optimizer=Optimizer(name="sgd", lr=1.0))
    layout = Layout(toy.data_parallel(1, 1, 1, 1), job.model)
    unit = Unit(1, 0, layout, job, torch.device("cpu"))
    block = nn.Module()
    for name in ("norm", "up", "down"):
        block.add_module(name, nn.Module())
    bind(unit, {1: block}, layout, 0)
    torch.manual_seed(0)
    unit.compute.data.normal_()
    up, down, norm = block.up.weight, block.down.weight, block.norm.weight
    assert down.stride() == (1, 6)  # cut along its second dimension, so it lies transposed
    x, y = torch.randn(4, 6), torch.randn(3, 20)

    def losses() -> dict[str, torch.Tensor]:
        return {"once": linear(x, up).square().sum(), "twice": linear(2 * x, up).square().sum(),
                "product": linear(y, down).square().sum(), "plain": down.pow(3).sum()}

    alone = {}
    for name, loss in losses().items():
        unit.grad.data.zero_()
        loss.backward()
        alone[name] = up.grad.clone(), down.grad.clone()
    for order in (("once", "twice", "product"), ("once", "plain", "product"), ("product", "plain", "once"), ()):
        unit.grad.data.fill_(torch.nan)
        unit.clear()
        assert up.grad is None
        assert norm.grad.tolist() == [0.0] * 7
        for name in order:
            losses()[name].backward()
        unit.complete()
        for weight, i in ((up, 0), (down, 1)):
            torch.testing.assert_close(weight.grad, sum((alone[n][i] for n in order), torch.zeros_like(weight)))
        assert unit.grad.data.isfinite().all()
        assert up.grad.untyped_storage().data_ptr() == unit.grad.data.untyped_storage().data_ptr()
