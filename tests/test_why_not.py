"""Every impossible plan is answered with its reason and the nearest legal value; possible ones are not refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toy
from mixfleet.plan import Pipeline, Plan, Sharding
from mixfleet.plan_rules import why_not


def one(pipeline: Pipeline, **sharding: int) -> Plan:
    return Plan(pipelines=(pipeline,), sharding=Sharding(**sharding))


def reason(plan: Plan, global_batch: int | None = None) -> str:
    return why_not(plan, toy.job(global_batch or plan.global_batch or 1), toy.cluster(4, 4)) or ""


def test_possible_plans_are_possible() -> None:
    assert reason(one(toy.pipeline((0, 2, 5), ((0, 1), (2, 3)), samples=3, micro_batch=2, tensor=(2, 2)))) == ""
    assert reason(toy.data_parallel(7, 3, 3, 3)) == ""
    # Fewer micro-batches than stages is slow, not impossible: the schedule does not hang.
    assert reason(one(toy.pipeline((0, 1, 2, 5), ((0,), (1,), (2,)), samples=1))) == ""


@pytest.mark.parametrize(("plan", "says"), [
    (one(toy.pipeline((0, 4), ((0,),), samples=2)), "holds blocks 0-3; toy has 5"),
    (one(toy.pipeline((0, 6), ((0,),), samples=2)), "holds blocks 0-5; toy has 5"),
    (one(toy.pipeline((0, 0, 5), ((0,), (1,)), samples=2)), "at least one block"),
    (one(toy.pipeline((0, 1, 2, 3, 4, 5, 5), tuple((i,) for i in range(6)), samples=2)), "6 stages for 5 blocks"),
    (one(toy.pipeline((1, 5), ((0,),), samples=2)), "must begin at block 0"),
    (one(toy.pipeline((0, 5), ((0, 1, 2),), samples=2, tensor=(3,))), "does not divide 4 attention heads; nearest "
                                                                      "possible: 2 or 4"),
    (one(toy.pipeline((0, 5), ((0, 1, 2),), samples=2, tensor=(2,))), "lists 3 devices; 1 replicas of tensor degree 2"),
    (one(toy.pipeline((0, 5), ((0,),), samples=2, tensor=(0,))), "tensor is 0"),
    (one(toy.pipeline((0, 5), ((9,),), samples=2)), "has 9; toy has devices 0-7"),
    (one(toy.pipeline((0, 2, 5), ((3,), (3,)), samples=2)), "which pipelines[0].stages[0] uses already"),
    (one(toy.pipeline((0, 5), ((0,),), samples=0)), "samples is 0"),
    (one(toy.pipeline((0, 5), ((0,),), samples=3, micro_batch=4)), "the largest is 3"),
    (one(toy.pipeline((0, 5), ((0,),), samples=3, micro_batch=0)), "micro_batch is 0"),
    (one(toy.pipeline((0, 5), ((0,),), samples=2), optimizer=2), "nothing to shard: the plan has one data-parallel"),
    (toy.data_parallel(2, 8, 8, 8), "has 2 data-parallel replicas, so at most 2"),
    (toy.data_parallel(4, 4, 2, 4), "cannot fall"),
    (toy.data_parallel(4, 0, 1, 4), "weights is 0"),
    (Plan(pipelines=(toy.pipeline((0, 5), ((0,),), samples=2), toy.pipeline((0, 5), ((1,),), samples=3)),
          sharding=Sharding(gradients=2, optimizer=2)), "2 and 3 micro-batches"),
    (Plan(pipelines=(toy.pipeline((0, 5), ((0,),), samples=2), toy.pipeline((0, 2, 5), ((1,), (2,)), samples=2)),
          sharding=Sharding(weights=2, gradients=2, optimizer=2)), "block ranges must be equal"),
    (Plan(pipelines=(toy.pipeline((0, 2, 5), ((0,), (1,)), samples=2),), accumulation="layered"),
     "pipelines[0] has 2 stages; micro-batches that pass"),
    (toy.data_parallel(2, 1, 1, 1).replace(accumulation="layered", schedule="zb-h1"), "schedule zb-h1 cannot go with"),
    (toy.data_parallel(6, 6, 6, 6).replace(sharding=Sharding(weights=6, gradients=6, optimizer=6, hierarchical=4)),
     "hierarchical is 4, which does not divide the 6 replicas that share weights"),
    (toy.data_parallel(6, 6, 6, 6).replace(sharding=Sharding(weights=6, gradients=6, optimizer=6, hierarchical=3)),
     "replicas 3-5 are not in one node"),
    (toy.data_parallel(4, 4, 4, 4).replace(sharding=Sharding(weights=4, gradients=4, optimizer=4, shares=(1, 2))),
     "shares has 2 numbers; the plan has 4 data-parallel replicas"),
    (toy.data_parallel(2, 2, 2, 2).replace(sharding=Sharding(weights=2, gradients=2, optimizer=2, shares=(3, -1))),
     "shares has -1; a share is 0 or more"),
    (toy.data_parallel(4, 2, 2, 2).replace(sharding=Sharding(weights=2, gradients=2, optimizer=2, shares=(3, 1, 0, 0))),
     "gives nothing to replicas 2-3"),
])
def test_impossible_plans_say_why(plan: Plan, says: str) -> None:
    assert says in reason(plan)


def test_a_share_that_does_not_add_up_says_by_how_much() -> None:
    assert "take 14 sequences per step; the job's global batch is 16. Change `samples` by +2" in reason(
        toy.data_parallel(7, 1, 1, 1), global_batch=16)


def test_a_plan_for_another_cluster_is_refused() -> None:
    here, there = toy.cluster(4, 4), toy.cluster(8)
    plan = toy.data_parallel(2, 1, 1, 1).replace(cluster_fingerprint=there.fingerprint())
    assert "made for another cluster" in (why_not(plan, toy.job(4), here) or "")
    assert why_not(plan, toy.job(4), there) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(-1, 9), st.integers(-1, 9), st.integers(-1, 9), st.integers(-1, 4), st.integers(-1, 6))
def test_any_numbers_get_an_answer_not_a_crash(w: int, g: int, o: int, tensor: int, end: int) -> None:
    plan = one(toy.pipeline((0, end), (tuple(range(4)),), samples=2, tensor=(tensor,), replicas=2),
               weights=w, gradients=g, optimizer=o)
    answer = why_not(plan, toy.job(4), toy.cluster(4, 4))
    possible = 1 <= w <= g <= o <= 2 and tensor == 2 and end == 5
    assert (answer is None) == possible
