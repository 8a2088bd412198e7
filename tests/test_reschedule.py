"""A plan's own order: kept only if the simulator says it is faster, and within the memory of the devices."""

import pytest

from mixfleet.search.reschedule import reschedule
from mixfleet.sim import predict
from mixfleet.sim.times import work_of
from sim_toys import block, cluster, device, job, straight

TIMES = [(1, 2), (2, 4), (3, 6), (2, 4)]


def uneven(memory=10**10, samples=8, schedule="1f1b"):
    return (straight((0, 1, 2, 3, 4), samples, schedule), job([block(i) for i in range(4)], samples),
            cluster(*[device(TIMES).replace(memory_bytes=memory)] * 4))


def test_times_of_a_plan():
    plan, job_, cluster_ = uneven()
    work = work_of(plan, 0, job_, cluster_, split=False)
    assert work.home == (0, 1, 2, 3)
    assert work.forward == (0.001, 0.002, 0.003, 0.002)
    assert work.backward == (0.002, 0.004, 0.006, 0.004)
    assert work.micro_batches == 8


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_searched_order_is_faster_for_stages_of_1_2_3_2(schedule):
    plan, job_, cluster_ = uneven(schedule=schedule)
    found = reschedule(plan, job_, cluster_)
    assert found.schedule == "custom"
    # 1F1B takes 84, GPipe 87; no order takes less than 81.
    assert round(predict(found, job_, cluster_).step_s * 1e3) == 81
    assert predict(plan, job_, cluster_).step_s > predict(found, job_, cluster_).step_s


def test_orders_keep_the_memory():
    """Where only 1F1B's micro-batches fit, nothing is faster than 1F1B; where none did, GPipe's plan comes to fit."""
    plan, job_, cluster_ = uneven()
    most = max(d.peak_bytes for d in predict(plan, job_, cluster_).devices)
    plan, job_, cluster_ = uneven(memory=most)
    found = reschedule(plan, job_, cluster_)
    assert predict(found, job_, cluster_).fits
    gpipe = plan.replace(schedule="gpipe")
    assert not predict(gpipe, job_, cluster_).fits
    assert predict(reschedule(gpipe, job_, cluster_), job_, cluster_).fits


def test_a_plan_that_is_best_already_stays():
    """Equal stages: 1F1B is at the bound but for microseconds, and its blocks have no weight half of their own."""
    fast = device([(10, 20)] * 2)
    plan, job_, cluster_ = straight((0, 1, 2), 6), job([block(i) for i in range(2)], 6), cluster(fast, fast)
    assert reschedule(plan, job_, cluster_) == plan
    alone = straight((0, 2), 6)
    assert reschedule(alone, job_, cluster_) == alone
