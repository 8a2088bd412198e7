"""Toy blocks, devices, clusters and plans for tests of the simulator. Block times are measured, so costs are exact."""

from itertools import pairwise

import pytest

from mixfleet.cluster import BlockTime, Cluster, Device, Link, Node
from mixfleet.job import Job
from mixfleet.model.spec import B, Block, Model, Param, S, Saved
from mixfleet.plan import Pipeline, Plan, Sharding, Stage

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


def mixed_plans():
    """Plans on three nodes of 4, 4 and 2 devices of three speeds."""
    def stage(lo, hi, devices, tensor=1):
        return Stage(blocks=(lo, hi), devices=devices, tensor=tensor)

    yield Plan(pipelines=(Pipeline(samples=3, micro_batch=1, replicas=4, stages=(
        stage(0, 3, (0, 1, 2, 3)), stage(3, 6, (4, 5, 6, 7)))),))
    yield Plan(schedule="gpipe", sharding=Sharding(optimizer=4), pipelines=(Pipeline(
        samples=3, micro_batch=2, replicas=4, stages=(stage(0, 2, (0, 1, 4, 5)), stage(2, 6, (2, 3, 6, 7)))),))
    yield Plan(sharding=Sharding(weights=2, gradients=2, optimizer=4), pipelines=(
        Pipeline(samples=4, micro_batch=2, replicas=4, stages=(stage(0, 6, (0, 1, 2, 3, 4, 5, 6, 7), 2),)),))
    yield Plan(sharding=Sharding(optimizer=3), pipelines=(
        Pipeline(samples=4, micro_batch=2, replicas=2, stages=(stage(0, 4, (0, 1, 2, 3), 2), stage(4, 6, (8, 9)))),
        Pipeline(samples=3, micro_batch=1, replicas=1, stages=(stage(0, 6, (4, 5), 2),))))
    yield Plan(accumulation="layered", sharding=Sharding(weights=4, gradients=4, optimizer=4), pipelines=(
        Pipeline(samples=3, micro_batch=1, replicas=4, stages=(stage(0, 6, (0, 1, 2, 3)),)),))
    yield Plan(sharding=Sharding(weights=8, gradients=8, optimizer=8, hierarchical=4), pipelines=(
        Pipeline(samples=2, micro_batch=1, replicas=8, stages=(stage(0, 6, tuple(range(8))),)),))
    yield Plan(sharding=Sharding(weights=4, gradients=4, optimizer=8, shares=(2, 2, 1, 1, 2, 2, 1, 1)), pipelines=(
        Pipeline(samples=2, micro_batch=1, replicas=8, stages=(stage(0, 6, tuple(range(8))),)),))
    yield Plan(sharding=Sharding(weights=5, gradients=5, optimizer=10), pipelines=(
        Pipeline(samples=2, micro_batch=2, replicas=8, stages=(stage(0, 6, tuple(range(8))),)),
        Pipeline(samples=1, micro_batch=1, replicas=2, stages=(stage(0, 6, (8, 9)),))))
    yield Plan(pipelines=(  # replicas that differ in what they share: three pairs cross the NICs, one does not
        Pipeline(samples=5, micro_batch=1, replicas=4, stages=(stage(0, 3, (0, 1, 2, 4)), stage(3, 6, (5, 6, 7, 3)))),))


def mixed_cluster():
    def dev(name, scale):
        times = [(1.3, 2.9), (1.7, 3.1), (2.3, 4.1), (1.9, 3.7), (1.1, 2.3), (2.9, 5.3)]
        base = device([(f * scale, b * scale) for f, b in times], name=name, micro_batches=(1, 2))
        return base.replace(block_times=tuple(t.replace(tensor=n) for t in base.block_times for n in (1, 2)))

    def node(name, devices, Bps, nic_Bps):
        return Node(name=name, devices=devices, link=Link(latency_s=3e-6, bandwidth_Bps=Bps),
                    nic=Link(latency_s=11e-6, bandwidth_Bps=nic_Bps))

    fast, slow, old = dev("fast", 1), dev("slow", 1.5), dev("old", 2.2)
    return Cluster(name="mixed", nodes=(node("a", (fast,) * 4, 7e6, 1.7e6), node("b", (slow,) * 4, 5e6, 1.3e6),
                                        node("c", (old,) * 2, 3e6, 0.9e6)))
