"""The interpreter against closed forms and sums worked out by hand. Blocks have measured times, so costs are exact."""

import random

import pytest

from mixfleet.model.spec import B, S, TensorComm
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim.fold import Instance, in_arrays, in_loops
from mixfleet.sim.interpreter import play
from sim_toys import (
    HIDDEN,
    MS,
    block,
    cluster,
    device,
    free_overheads,
    job,
    mixed_cluster,
    mixed_plans,
    straight,
)

__all__ = ["free_overheads"]


def played(plan, job, cluster, fold=True):
    layout = Layout(plan, job.model)
    return play(lower(plan, job.model, layout), plan, job, cluster, layout, fold=fold).rows


def ending(rows):
    """End of the last backward."""
    return max(end for row in rows for a, end in zip(row.actions, row.end_ns) if a.op == "B")


def spans(row, op):
    return [(str(a), s, e) for a, s, e in zip(row.actions, row.start_ns, row.end_ns) if a.op == op]


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


def test_colours_are_the_same_in_arrays_and_in_loops():
    rng = random.Random(3)
    for _ in range(200):
        entities, ports = rng.randint(1, 9), rng.randint(1, 6)
        kinds = [rng.randint(0, 1) for _ in range(entities)]
        capacities = [rng.choice([1.0, 2.5]) for _ in range(ports)]
        instances = [Instance(rng.choice("ab"), tuple(rng.sample(range(entities), rng.randint(1, min(3, entities)))),
                              rng.choice([0.0, 1e-6]), tuple((p, rng.choice([1.0, 3.0])) for p in rng.sample(
                                  range(ports), rng.randint(0, min(3, ports)))), rng.choice([0.0, 1e-3]))
                     for _ in range(rng.randint(0, 12))]
        assert in_arrays(kinds, instances, capacities) == in_loops(kinds, instances, capacities)


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
