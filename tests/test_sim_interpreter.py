"""The interpreter against closed forms and sums worked out by hand. Blocks have measured times, so costs are exact."""

from itertools import pairwise

import pytest

from mixfleet.cluster import BlockTime, Cluster, Device, Link, Node
from mixfleet.job import Job
from mixfleet.model.spec import B, Block, Model, Param, S, Saved
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim.interpreter import play

MS = 10**6
HIDDEN = 32


def block(i, elements=64, boundary=HIDDEN):
    return Block(name=f"b{i}", kind=f"k{i}", params=(Param(name="w", shape=(elements,)),), ops=(),
                 saved=(Saved(name="x", size=B * S * HIDDEN, until="full"),), boundary=B * S * boundary)


def device(times_ms, name="toy", seq_len=16, micro_batches=(1,), **more):
    return Device(name=name, flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=10**10, memory_Bps=1e18, launch_s=0,
                  block_times=tuple(BlockTime(block=f"k{i}", micro_batch=m, seq_len=seq_len, precision="fp32",
                                              forward_s=m * f / 1e3, backward_s=m * b / 1e3)
                                    for i, (f, b) in enumerate(times_ms) for m in micro_batches), **more)


def cluster(*devices, bandwidth=1e30, nic=1e30, per_node=8):
    """Latency-free links; without a bandwidth, transfers are free."""
    link, port = Link(latency_s=0, bandwidth_Bps=bandwidth), Link(latency_s=0, bandwidth_Bps=nic)
    return Cluster(name="toy", nodes=tuple(
        Node(name=f"n{i}", devices=devices[i:i + per_node], link=link, nic=port)
        for i in range(0, len(devices), per_node)))


def job(blocks, batch, **more):
    model = Model(name="toy", family="toy", blocks=tuple(blocks), hidden=HIDDEN)
    return Job(name="toy", model=model, seq_len=16, global_batch=batch, precision="fp32", **more)


def played(plan, job, cluster, fold=True):
    layout = Layout(plan, job.model)
    return play(lower(plan, job.model, layout), plan, job, cluster, layout, fold=fold).rows


def ending(rows):
    return max(max(row.end_ns) for row in rows)


def spans(row, op):
    return [(str(a), s, e) for a, s, e in zip(row.actions, row.start_ns, row.end_ns) if a.op == op]


@pytest.fixture(autouse=True)
def free_overheads(monkeypatch):
    """Without the fixed costs per message, so that sums by hand are round."""
    from mixfleet.cost import network

    monkeypatch.setattr(network, "SEND_S", {"gpu": 0.0, "cpu": 0.0})
    monkeypatch.setattr(network, "COLLECTIVE_S", {"gpu": 0.0, "cpu": 0.0})


def straight(cuts, samples, schedule="1f1b", **more):
    return Plan(schedule=schedule, pipelines=(Pipeline(
        samples=samples, micro_batch=1,
        stages=tuple(Stage(blocks=ab, devices=(i,)) for i, ab in enumerate(pairwise(cuts)))),), **more)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (3, 7), (4, 4), (5, 11)])
def test_equal_stages_idle_for_p_minus_1_of_m(schedule, p, m):
    dev = device([(3, 5)] * p)
    rows = played(straight(range(p + 1), m, schedule), job([block(i) for i in range(p)], m), cluster(*[dev] * p))
    assert ending(rows) == (m + p - 1) * 8 * MS


def test_unequal_stages_by_hand():
    # stage 0: F 2 B 3; stage 1: F 4 B 7. F0.0 0-2, F1.0 2-6, B1.0 6-13; F1.1 13-17, B1.1 17-24; B0.1 24-27
    dev = device([(2, 3), (4, 7)])
    rows = played(straight((0, 1, 2), 2), job([block(0), block(1)], 2), cluster(dev, dev))
    zero, one = rows
    assert spans(zero, "F") == [("F0.0", 0, 2 * MS), ("F0.1", 2 * MS, 4 * MS)]
    assert spans(one, "F") == [("F1.0", 2 * MS, 6 * MS), ("F1.1", 13 * MS, 17 * MS)]
    assert spans(one, "B") == [("B1.0", 6 * MS, 13 * MS), ("B1.1", 17 * MS, 24 * MS)]
    assert spans(zero, "B") == [("B0.0", 13 * MS, 16 * MS), ("B0.1", 24 * MS, 27 * MS)]


def test_the_last_micro_batch_is_smaller():
    dev = device([(2, 3)], micro_batches=(1, 2))
    plan = Plan(pipelines=(Pipeline(samples=5, micro_batch=2, stages=(Stage(blocks=(0, 1), devices=(0,)),)),))
    rows = played(plan, job([block(0)], 5), cluster(dev))
    assert ending(rows) == (2 * 5 + 2 * 5 + 5) * MS


def test_a_send_takes_its_bytes_and_delays_the_next_stage():
    # 16 * 32 * 4 B = 2048 B at 1.024 MB/s: 2 ms each way
    dev = device([(3, 5), (4, 7)])
    rows = played(straight((0, 1, 2), 1), job([block(0), block(1)], 1), cluster(dev, dev, bandwidth=1.024e6))
    assert [s[1:] for s in spans(rows[1], "RA")] == [(3 * MS, 5 * MS)]
    assert spans(rows[1], "B") == [("B1.0", 9 * MS, 16 * MS)]
    assert spans(rows[0], "B") == [("B0.0", 18 * MS, 23 * MS)]


def test_two_replicas_share_the_nic():
    # both replicas send from node 0 to node 1 at the same time, so each send takes twice as long
    dev = device([(3, 5), (4, 7)])
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 1), devices=(0, 1)), Stage(blocks=(1, 2), devices=(2, 3)))),))
    what = job([block(0, 1), block(1, 1)], 2)
    wide = cluster(dev, dev, dev, dev, per_node=2, nic=1.024e6)
    for fold in (True, False):
        rows = played(plan, what, wide, fold)
        assert len(rows) == (2 if fold else 4)
        sends = {spans(row, "SA")[0][1:] for row in rows if row.entity.stage == 0}
        assert sends == {(3 * MS, 7 * MS)}
