"""Backward in two halves: the same gradients, and nothing is kept when both are done."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from mixfleet.run.halves import Later, PutOff


def test_both_halves_give_the_gradients_and_free_what_they_saved():
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    halved = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    halved.load_state_dict(whole.state_dict())
    x = torch.randn(7, 3, dtype=torch.float64)
    whole(x).square().sum().backward()
    later: Later = []
    with PutOff(later):
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
        with PutOff(later):
            hidden = layers[1](layers[0](torch.ones(7, 3)))
            layers[2](hidden).sum().backward()
        for accumulate in later:
            accumulate()
        return weakref.ref(later)

    assert once()() is None
