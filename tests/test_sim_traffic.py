"""Who meets in which transfer, against what the layout says for every rank."""

import random
from collections import Counter

import numpy as np
import pytest

from mixfleet.cost import network
from mixfleet.cost.network import Ports
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.sim.traffic import Traffic, alike, moves
from sim_toys import block, cluster, device, job, mixed_cluster, mixed_plans


def regular(degrees: tuple[int, int, int], tensor: int) -> Plan:
    w, g, o = degrees
    stages = tuple(Stage(blocks=(2 * s, 2 * s + 2), tensor=tensor,
                         devices=tuple(range(8 * tensor * s, 8 * tensor * (s + 1)))) for s in range(2))
    return Plan(sharding=Sharding(weights=w, gradients=g, optimizer=o),
                pipelines=(Pipeline(samples=2, micro_batch=1, replicas=8, stages=stages),))


def assert_meets(plan: Plan, what: Job, where, exact: bool) -> None:
    layout = Layout(plan, what.model)
    traffic = Traffic(plan, what, where, layout)
    entity_of = {rank: e for e, entity in enumerate(traffic.entities) for rank in entity.ranks}
    met = 0
    for u, like in enumerate(alike(layout)):
        for op in "GRYP":
            for rank, e in entity_of.items():
                if u not in layout.units_of_stage(traffic.entities[e].pipeline, traffic.entities[e].stage):
                    continue
                comms = layout.comms(op, u, rank)
                assert len(comms) <= traffic.phases[op, like]
                for i, comm in enumerate(comms):
                    members = set(traffic.instances[traffic.at[e, (op, like, i)]].members)
                    wanted = {entity_of[r] for r in comm.ranks}
                    assert members == wanted if exact else members >= wanted
                    met += 1
    assert met or plan.sharding == Sharding()


@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2), (8, 8, 8), (2, 4, 8), (1, 4, 4)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_regular_groups_meet_exactly(degrees: tuple[int, int, int], tensor: int) -> None:
    plan = regular(degrees, tensor)
    dev = device([(3, 5)] * 4)
    assert_meets(plan, job([block(i, 160) for i in range(4)], 16), cluster(*[dev] * (16 * tensor), nic=1e8), True)


@pytest.mark.parametrize("plan", list(mixed_plans()))
def test_irregular_groups_meet_at_least(plan: Plan) -> None:
    assert_meets(plan, job([block(i, 2000) for i in range(6)], plan.global_batch), mixed_cluster(), False)


def in_parts(*widths: int, tensor: int = 1) -> Plan:
    """Two stages with so many replicas of their own each."""
    ends = [0, *(tensor * n for n in widths)]
    return Plan(pipelines=(Pipeline(samples=4, micro_batch=4, stages=tuple(
        Stage(blocks=(3 * s, 3 * s + 3), devices=tuple(range(sum(ends[:s + 1]), sum(ends[:s + 2]))), tensor=tensor,
              shares=(1,) * n if n > 1 else ()) for s, n in enumerate(widths))),))


@pytest.mark.parametrize("plan", [*mixed_plans(), in_parts(3, 1), in_parts(2, 3, tensor=2)])
def test_moves_in_numbers_are_those_of_the_layout(plan: Plan) -> None:
    blocks = [block(i, 2003 + 7 * i) for i in range(6)]
    layout = Layout(plan, job(blocks, plan.global_batch).model)
    for u, like in enumerate(alike(layout)):
        for op in "GRYP" if like == u else "":
            wanted = [(op in "RY" and i % 2 == 0, Counter((m.src, m.dst, m.hi - m.lo) for m in stage))
                      for i, stage in enumerate(layout.stages(op, u)) if stage]
            assert [(x.sums, Counter(zip(x.src.tolist(), x.dst.tolist(), x.elements.tolist())))
                    for x in moves(layout, op, u)] == wanted


@pytest.mark.parametrize("racks", [False, True])
def test_an_exchange_loads_what_its_messages_load_one_by_one(racks: bool) -> None:
    where = mixed_cluster()
    if racks:
        where = where.replace(rack_uplink=where.nodes[0].nic, nodes=tuple(
            node.replace(rack=f"r{i // 2}") for i, node in enumerate(where.nodes)))
    rng = random.Random(5)
    for _ in range(5):
        messages = {(a, b): rng.randint(1, 999) for a in range(10) for b in range(10) if a != b and rng.random() < 0.6}
        alone = [network.send(n, a, b, where) for (a, b), n in messages.items()]
        loads = Counter[str]()
        for one in alone:
            loads.update({port: n for port, _, n in one.demands})
        found = network.exchange(messages, where)
        assert {port: n for port, _, n in found.demands} == pytest.approx(loads)
        assert found.latency_s == max(where.path(*pair).latency_s for pair in messages) + network.COLLECTIVE_S["gpu"]
    assert len(Ports.of(where).exchange(np.array([3]), np.array([4]), np.array([0.0])).ports) == 0


def test_what_tensor_ranks_exchange_side_by_side_adds_up_on_their_node() -> None:
    # DDP over two nodes, one tensor pair in each: both halves of the gradient cross the NIC
    dev = device([(3, 5)] * 4)
    plan = Plan(pipelines=(Pipeline(samples=2, micro_batch=1, replicas=2, stages=(
        Stage(blocks=(0, 1), devices=(0, 1, 2, 3), tensor=2),)),))
    block0 = block(0, 1000)
    split = block0.replace(params=(block0.params[0].replace(split=0),))
    what, where = job([split], 4), cluster(dev, dev, dev, dev, per_node=2, nic=1e6)
    layout = Layout(plan, what.model)
    traffic = Traffic(plan, what, where, layout)
    (sync,) = [i for i in traffic.instances if i.kind[0] == "Y"]
    # a ring all-reduce over two ranks passes each buffer of 500 * 4 bytes once
    assert max(n for _, n in sync.demands) == 2 * 500 * 4
    assert sync.members == (0, 1)
