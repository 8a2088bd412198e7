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


def by_name(row):
    return {str(a): (s / MS, e / MS) for a, s, e in zip(row.actions, row.start_ns, row.end_ns) if a.op != "X"}


def test_zero_3_overlap_by_hand():
    # Two nodes of one device, NICs of 1 MB/s. Each block has 1000 fp32 weights; half of them come from the other rank:
    # a gather or a reduction alone takes 2 ms. Forwards take 3, 4, 2 ms and backwards 5, 7, 6.
    dev = device([(3, 5), (4, 7), (2, 6)])
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 3), devices=(0, 1)),)),), sharding=Sharding(weights=2, gradients=2, optimizer=2))
    rows = played(plan, job([block(i, 1000) for i in range(3)], 2), cluster(dev, dev, per_node=1, nic=1e6))
    assert len(rows) == 1
    times = dict(zip(map(str, rows[0].actions), zip(rows[0].start_ns, rows[0].end_ns)))
    expected = {
        "F0.0": (2, 5), "F1.0": (5, 9),        # after its gather 0-2; the next gather 2-4 hides
        "G2": (5, 7), "F2.0": (9, 11),         # waits for the release of block 0, still hides
        "B2.0": (11, 17),
        "R2.0": (17, 21), "G0": (17, 21),      # together they get half of the NIC each
        "B1.0": (17, 24), "R1.0": (24, 26), "B0.0": (24, 29),
        "R0.0": (29, 31),                      # exposed
    }
    assert {k: (s / MS, e / MS) for k, (s, e) in times.items() if k in expected} == expected


def test_without_prefetch_every_gather_is_exposed():
    dev = device([(3, 5), (4, 7)])
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 2), devices=(0, 1)),)),), sharding=Sharding(weights=2, gradients=2, optimizer=2, prefetch=0))
    (row,) = played(plan, job([block(i, 1000) for i in range(2)], 2), cluster(dev, dev, per_node=1, nic=1e6))
    # G 2, F 3, G 2, F 4, B 7, then the gather of block 0 (2, shared with R1: 4), B 5, R0 2
    assert by_name(row)["B0.0"] == (22, 27)
    assert by_name(row)["R0.0"] == (27, 29)


def test_unequal_tensor_degrees_send_overlapping_shards():
    from mixfleet.sim.traffic import Entity, shards

    two, three = Entity(0, 0, 0, (4, 5)), Entity(0, 1, 0, (7, 8, 9))
    assert shards(two, three, 6000) == [(4, 7, 2000), (4, 8, 1000), (5, 8, 1000), (5, 9, 2000)]
    assert shards(three, two, 6000) == [(7, 4, 2000), (8, 4, 1000), (8, 5, 1000), (9, 5, 2000)]


def test_a_tensor_group_goes_at_the_pace_of_its_slowest_device():
    fast, slow = device([(3, 5)]), device([(4, 9)], name="slow")
    times = [t.replace(tensor=2) for t in slow.block_times]
    slow = slow.replace(block_times=tuple(times))
    fast = fast.replace(block_times=tuple(t.replace(tensor=2) for t in fast.block_times))
    plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, stages=(
        Stage(blocks=(0, 1), devices=(0, 1), tensor=2),)),))
    (row,) = played(plan, job([block(0, 2)], 1), cluster(fast, slow))
    assert by_name(row)["F0.0"] == (0, 4)
    assert by_name(row)["B0.0"] == (4, 13)


def test_tensor_groups_of_one_node_share_its_nic():
    # two groups, each with one rank in either node: their all-gathers pass the same NICs at the same time
    from mixfleet.model.spec import TensorComm

    def talking(i):
        return block(i, 1).replace(tensor_comm=(TensorComm(op="all_gather", phase="forward", size=B * S * HIDDEN),))

    dev = device([(3, 5)])
    dev = dev.replace(block_times=tuple(t.replace(tensor=2) for t in dev.block_times))
    wide = cluster(dev, dev, dev, dev, per_node=2, nic=1.024e6)
    for devices, replicas, expected in (((0, 2), 1, 1), ((0, 2, 1, 3), 2, 2)):
        plan = Plan(pipelines=(Pipeline(samples=1, micro_batch=1, replicas=replicas, stages=(
            Stage(blocks=(0, 1), devices=devices, tensor=2),)),))
        (row,) = played(plan, job([talking(0)], replicas), wide)  # half of 2048 B through a NIC of 1.024 MB/s
        assert by_name(row)["F0.0"] == (0, 3 + expected)
        assert [(p.category, p.ns) for p in row.parts[0]] == [("forward", 3 * MS), ("tensor", expected * MS)]


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


@pytest.mark.parametrize("plan", list(mixed_plans()))
def test_folded_equals_unfolded(plan):
    # Equal to the ns up to the rounding of sums that are added in another order.
    what = job([block(i, 2000 + 100 * i) for i in range(6)], plan.global_batch)
    folded, full = (played(plan, what, mixed_cluster(), fold) for fold in (True, False))
    assert len(full) == sum(len(p.stages) * p.replicas for p in plan.pipelines)
    assert sorted(m for row in folded for m in row.members) == sorted(row.entity for row in full)
    assert len(folded) < len(full)
    of = {row.entity: row for row in full}
    for row in folded:
        for member in row.members:
            for mine, theirs in ((row.start_ns, of[member].start_ns), (row.end_ns, of[member].end_ns)):
                assert max(abs(x - y) for x, y in zip(mine, theirs)) <= 3


def test_shared_nic_contention_is_preserved_by_folding():
    plan = next(mixed_plans())
    what = job([block(i, 2000) for i in range(6)], 12)
    row = next(r for r in played(plan, what, mixed_cluster()) if r.entity.stage == 0)
    sends = [e - s for _, s, e in spans(row, "SA")]
    # four replicas at once: 4 * 2048 B through the slower NIC, 1.3 MB/s of node b
    assert sends[0] == pytest.approx(1e9 * (22e-6 + 4 * 2048 / 1.3e6), abs=2)


def test_a_program_that_deadlocks_is_an_error_and_no_answer():
    from mixfleet.program.action import Program

    dev = device([(2, 3), (4, 7)])
    plan, what = straight((0, 1, 2), 2), job([block(0), block(1)], 2)
    layout = Layout(plan, what.model)
    good = lower(plan, what.model, layout)
    role = good.roles[1]
    swapped = role.replace(actions=(*role.actions[2:], *role.actions[:2]))
    with pytest.raises(RuntimeError, match="deadlock"):
        play(Program(roles=(good.roles[0], swapped)), plan, what, cluster(dev, dev), layout)
