"""Batches that follow the speed of replicas, and steps that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mixfleet.plan import Stage
from mixfleet.plan_rules import why_not
from mixfleet.run import TrainError, train
from mixfleet.run.balance import apart, rebalance, with_samples
from mixfleet.run.metrics import StepMetrics
from mixfleet.run.source import DecoderSource
from mixfleet.run.tensor import TensorGroup
from run_pool import CLUSTER, Case, job, pipe, plan, reference

torch.set_num_threads(1)


def test_converges_to_the_speeds_and_stays() -> None:
    """S05: speeds 1, 2, 4 and 70 samples."""
    samples: tuple[int, ...] = (24, 23, 23)
    for _ in range(2):
        samples = rebalance(samples, [b / v for b, v in zip(samples, (1, 2, 4))])
    assert samples == (10, 20, 40)
    assert rebalance(samples, [b / v for b, v in zip(samples, (1.06, 2, 3.9))]) == samples  # inside the dead band


def test_bounds_hand_on_what_they_cut_off() -> None:
    assert rebalance((8, 8, 8), (8.0, 4.0, 1.0), most=12) == (4, 8, 12)
    assert rebalance((8, 8, 8), (80.0, 4.0, 4.0), least=4) == (4, 10, 10)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-3, 1e3)), min_size=1, max_size=6), st.data())
def test_any_times_keep_the_sum_and_the_bounds(replicas: list[tuple[int, float]], data: st.DataObject) -> None:
    samples, seconds = [b for b, _ in replicas], [t for _, t in replicas]
    least = data.draw(st.integers(1, min(samples)))
    most = data.draw(st.integers(max(samples), sum(samples)))
    new = rebalance(samples, seconds, least=least, most=most)
    assert sum(new) == sum(samples)
    assert all(least <= n <= most for n in new)


@pytest.mark.parametrize("sharding", [(1, 1, 2), (2, 2, 2)])
def test_plans_stay_possible(sharding: tuple[int, int, int]) -> None:
    whole = plan(pipe((0, 5), (0, 1), samples=6, micro_batch=2, replicas=2), sharding=sharding)
    split = apart(whole)
    assert split.ranks == whole.ranks
    assert split.global_batch == 12
    for samples in ((8, 4), (7, 5), (11, 1)):
        assert why_not(with_samples(split, samples), job(12), CLUSTER) is None


class Clock:
    """Time that passes only where a test says so: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns


class Limping(DecoderSource):
    """By the recorder's clock a rank takes so many seconds per sample, in one block; `later` from step `swap` on."""

    def __init__(self, of: Any, seconds: tuple[float, float], later: tuple[float, float], swap: int) -> None:
        super().__init__(of)
        self._seconds, self._later, self._swap, self._step = seconds, later, swap, 0

    def modules(self, stage: Stage, group: TensorGroup, device: torch.device, *, fused: bool) -> list[nn.Module]:
        from mixfleet.run import recorder

        clock = Clock()
        recorder.time = clock  # type: ignore[assignment]
        rank = stage.devices[0]

        def work(module: nn.Module, x: Any) -> None:
            seconds = (self._later if self._step >= self._swap else self._seconds)[rank]
            clock.ns += round(seconds * 1e9) * len(x[0])

        blocks = super().modules(stage, group, device, fused=fused)
        blocks[1].register_forward_pre_hook(work)
        return blocks

    def batch(self, step: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._step = step
        return super().batch(step, lo, hi)


def test_samples_follow_the_speed_and_the_gradient_stays_the_same(tmp_path: Path) -> None:
    """S05: one rank takes three times as long, then the other; the losses are those of one process all the same."""
    whole = plan(pipe((0, 5), (0, 1), samples=6, micro_batch=2, replicas=2), sharding=(1, 1, 2))
    work = job(12).replace(steps=8)
    reported: list[StepMetrics] = []
    result = train(whole, work, CLUSTER, source=Limping(work, (0.03, 0.09), (0.09, 0.03), swap=4), balance_every=2,
                   on_step=reported.append, out_dir=tmp_path, patience_s=120)
    assert result is not None
    assert result.losses == pytest.approx(reference(Case(whole, work, steps=8)).losses, rel=1e-9)
    first, second = result.balanced  # after steps 4 and 8 both take equally long: nothing changes
    assert (first.step, first.before, first.after) == (2, (6, 6), (9, 3))
    assert first.seconds == pytest.approx((0.18, 0.54))
    assert (second.step, second.before, second.after) == (6, (9, 3), (3, 9))
    assert second.seconds == pytest.approx((0.81, 0.09))
    assert reported[1].note == "samples 9+3 instead of 6+6 (replica 1 computes longest, 0.54 s)"
    assert [m.step for m in reported if m.note] == [2, 6]


class Poisoned(DecoderSource):
    """Gives a number that is not finite for one sample, in one block of one rank."""

    def modules(self, stage: Stage, group: TensorGroup, device: torch.device, *, fused: bool) -> list[nn.Module]:
        blocks = super().modules(stage, group, device, fused=fused)
        if stage.devices[0] == 1:
            blocks[2].register_forward_hook(lambda module, x, out: out * torch.nan if self.bad else out)
        return blocks

    bad = False

    def batch(self, step: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.bad = step == 2 and hi == 6
        return super().batch(step, lo, hi)


@pytest.mark.parametrize("sharding", [(1, 1, 1), (2, 2, 2)])
def test_a_loss_that_is_not_finite_names_step_rank_and_block(sharding: tuple[int, int, int]) -> None:
    two = plan(pipe((0, 5), (0,), samples=4, micro_batch=2), pipe((0, 5), (1,), samples=2, micro_batch=1),
               sharding=sharding)
    with pytest.raises(TrainError) as caught:
        train(two, job(), CLUSTER, source=Poisoned(job()), patience_s=120)
    assert ("rank 1 (cpu on node here): step 3 is not finite from block 2 (layers.1) on, in forward of micro-batch 0 "
            "on rank 1, after step 2;") in str(caught.value)


def test_a_step_that_is_not_finite_can_be_left_out() -> None:
    two = plan(pipe((0, 5), (0,), samples=4, micro_batch=2), pipe((0, 5), (1,), samples=2, micro_batch=1))
    reported: list[StepMetrics] = []
    result = train(two, job(), CLUSTER, source=Poisoned(job()), on_nan="skip", patience_s=120, on_step=reported.append)
    assert result is not None
    assert [loss == loss for loss in result.losses] == [True, True, False, True]
    assert reported[2].note.startswith("left out: step 3 is not finite from block 2")
    assert not any(m.note for m in (*reported[:2], reported[3]))
