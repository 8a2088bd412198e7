"""Law 1 for random combinations of settings: whatever the plan, training equals one process."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mixfleet.job import Data, Lengths, Optimizer
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from run_pool import CLUSTER, Case, Pool, job
from test_run_equality import bytes_counted, bytes_of_steps, check_equality

_OPTIMIZERS = (Optimizer(lr=3e-2, weight_decay=0.1), Optimizer(name="sgd", lr=0.3, momentum=0.9))
_AWAY = ((), (), ("optimizer",), ("gradients",), ("weights",), ("gradients", "optimizer"),
         ("weights", "gradients", "optimizer"))
_RECOMPUTE = ("none", "selective", "full")


_WAYS = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (4, 1))
"""Replicas, and parts of their sequences."""
_IN_PARTS = ((1, 2), (1, 3), (2, 2))


@st.composite
def _pipelines(draw: st.DrawFn, ways: tuple[tuple[int, int], ...]) -> tuple[Pipeline, ...]:
    """On four ranks at most: tensor degrees 1, 2 and 4, one or two stages, one or several replicas; the first pipeline
    is cut in one of these `ways`."""
    found: list[Pipeline] = []
    rank = 0
    while rank < 4 and (not found or draw(st.booleans())):
        stages = draw(st.sampled_from([1, 1, 2]))
        degrees = [draw(st.sampled_from([1, 1, 2, 4])) for _ in range(stages)]
        replicas, context = draw(st.sampled_from(_WAYS if found else ways))
        if rank + sum(degrees) * replicas * context > 4:
            continue
        shares = draw(st.just(()) | st.tuples(*[st.integers(1, 2)] * context))
        cuts = (0, draw(st.integers(1, 4)), 5) if stages == 2 else (0, 5)
        made = []
        for s, t in enumerate(degrees):
            made.append(Stage(blocks=(cuts[s], cuts[s + 1]), tensor=t, offload=draw(st.sampled_from(_AWAY)),
                              devices=tuple(range(rank, rank + t * replicas * context)),
                              recompute=draw(st.sampled_from(_RECOMPUTE) | st.tuples(
                                  *[st.sampled_from(_RECOMPUTE)] * (cuts[s + 1] - cuts[s])))))
            rank += t * replicas * context
        samples = draw(st.integers(1, 4))
        found.append(Pipeline(stages=tuple(made), replicas=replicas, samples=samples, context=context,
                              context_shares=shares,
                              micro_batch=draw(st.integers(1, samples))))
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn, *, in_parts: bool = False) -> Case:
    """With `in_parts`, samples of unequal length lie on parts of sequences."""
    pipelines = draw(_pipelines(_IN_PARTS if in_parts else _WAYS))
    n = sum(p.copies for p in pipelines)
    w, g, o = sorted(draw(st.integers(1, n)) for _ in range(3))
    shares = draw(st.just(()) | st.tuples(*[st.integers(0, 5)] * n))
    batching = draw(st.sampled_from([*(() if in_parts else ("padded", "padded")), "bucketed", "packed"]))
    data = Data() if batching == "padded" else Data(lengths=Lengths(kind="uniform", least=draw(st.integers(1, 4))))
    plan = Plan(pipelines=pipelines, batching=batching, schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
                accumulation=draw(st.sampled_from(["plain", "layered"])),
                sharding=Sharding(weights=w, gradients=g, optimizer=o, shares=shares, prefetch=draw(st.integers(0, 2)),
                                  hierarchical=draw(st.sampled_from([0, 0, 2]))))
    work = job(plan.global_batch, clip_norm=draw(st.sampled_from([0.0, 0.3])), optimizer=draw(st.sampled_from(
        _OPTIMIZERS)), data=data, attention=draw(st.sampled_from(["fused", "eager"])), figures={
            "tied": draw(st.booleans()), "bias": draw(st.booleans()),
            **draw(st.sampled_from(({}, {"kv_heads": 2, "window": 3}, {"position": "learned"})))})
    assume(why_not(plan, work, CLUSTER) is None)
    return Case(plan, work, steps=3, masked=batching == "padded" and draw(st.booleans()))


def _check(case: Case, pool: Pool) -> None:
    """Losses, norms and weights are those of one process, and bytes sent those of the simulator."""
    assert bytes_counted(case, check_equality(case, pool)) == sum(bytes_of_steps(case), Counter())


_quiet = {"deadline": None, "derandomize": True, "database": None,
          "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow,
                                    HealthCheck.function_scoped_fixture]}


@settings(max_examples=6, **_quiet)
@given(case=cases())
def test_random_plans_equal_one_process(pool: Pool, case: Case) -> None:
    _check(case, pool)


@settings(max_examples=6, **_quiet)
@given(case=cases(in_parts=True))
def test_random_parts_of_unequal_samples_equal_one_process(pool: Pool, case: Case) -> None:
    _check(case, pool)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(max_examples=50, **_quiet)
@given(case=cases() | cases(in_parts=True))
def test_many_random_plans_equal_one_process(pool: Pool, case: Case) -> None:
    _check(case, pool)
