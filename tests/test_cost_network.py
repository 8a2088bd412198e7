"""Bytes per port and times of transfers, by hand; against a message-by-message count; and as invariants."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfleet.catalog.efficiency import COLLECTIVE_S, MESSAGE_CPU_S, NVLS_RATE, SEND_S, STAGED_BPS, STAGED_FAR_BPS
from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.cost import network
from mixfleet.errors import InputError

GPU = Device(name="gpu", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=10**9, memory_Bps=1e11)
CPU = GPU.replace(name="cpu", kind="cpu")


def cluster(*sizes, device=GPU, inside=100e9, nic=10e9, link="wire", **changes):
    """Nodes with links whose names carry no known efficiency, so that rates are as written."""
    return Cluster(name="c", nodes=tuple(
        Node(name=f"n{i}", devices=(device,) * n, link=Link(name=link, latency_s=1e-6, bandwidth_Bps=inside),
             nic=Link(name="port", latency_s=3e-6, bandwidth_Bps=nic), rack=f"r{i // 2}", zone=f"z{i // 4}")
        for i, n in enumerate(sizes)), **changes)


def loads(transfer):
    return {port: round(nbytes, 6) for port, _, nbytes in transfer.demands}


def test_a_message_loads_every_port_of_its_way():
    three = send = network.send(5e9, 1, 2, cluster(2, 1))
    assert loads(three) == dict.fromkeys(["n0:1:out", "n0:nic:out", "n1:nic:in", "n1:0:in"], 5e9)
    assert send.latency_s == pytest.approx(6e-6 + SEND_S["gpu"])
    assert send.alone_s == pytest.approx(0.5 + 6e-6 + SEND_S["gpu"])
    assert network.send(5e9, 1, 1, cluster(2)) == network.send(0, 0, 1, cluster(2)) == network.NOTHING


def test_links_reach_a_part_of_their_rate_by_kind():
    named = network.send(1e9, 0, 1, cluster(2, link="NVLink 3"))
    assert named.demands[0][1] == pytest.approx(100e9 * network.link_efficiency("nvlink"))
    assert 0 < network.link_efficiency("PCIe 4 x16") < 1
    assert network.link_efficiency("loopback") == network.link_efficiency("") == 1


@pytest.mark.parametrize(("op", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_ring_inside_a_node(op, passes):
    transfer = network.collective(op, 8e9, range(4), cluster(4), "ring")
    assert set(loads(transfer).values()) == {passes * 6e9}
    assert transfer.alone_s == pytest.approx(COLLECTIVE_S["gpu"] + passes * (3e-6 + 0.06))


def test_ring_over_nodes_crosses_each_nic_once():
    transfer = network.collective("all_gather", 6e9, (4, 0, 3, 1), cluster(3, 2), "ring")
    found = loads(transfer)
    assert found["n0:nic:out"] == found["n1:nic:in"] == found["n1:nic:out"] == found["n0:0:out"] == 4.5e9
    # hops 0-1 and 3-4 inside (1 us), 1-3 and 4-0 across (6 us); a piece makes all hops but the shortest, and a network
    # carries its whole rate once a message is five latencies of it long
    assert transfer.latency_s == pytest.approx(COLLECTIVE_S["gpu"] + 1e-6 + 5 * 12e-6)
    alone = network.collective("all_gather", 6e9, (0, 3), cluster(3, 2), "ring")  # two hops across, less the shortest
    assert alone.latency_s == pytest.approx(COLLECTIVE_S["gpu"] + 5 * 6e-6)


def test_hierarchical_reduces_inside_before_it_crosses():
    transfer = network.collective("all_reduce", 8e9, range(8), cluster(4, 4), "hierarchical")
    found = loads(transfer)
    assert found["n0:nic:out"] == found["n1:nic:in"] == 2 * 8e9 / 2
    assert found["n0:1:out"] == 2 * (8e9 * 3 / 4 + 8e9 / 4 / 2)
    half = network.collective("reduce_scatter", 8e9, range(8), cluster(4, 4), "hierarchical")
    assert loads(half) == {port: nbytes / 2 for port, nbytes in found.items()}


def test_tree_uses_both_directions_and_few_steps():
    transfer = network.collective("all_reduce", 8e9, range(6), cluster(3, 3), "tree")
    found = loads(transfer)
    # chains of three ranks up and down, and a third of what crosses through each
    assert found["n0:1:out"] == found["n0:1:in"] == pytest.approx(2 * 8e9 + 8e9 / 3)
    assert found["n1:2:out"] == found["n1:2:in"] == pytest.approx(8e9 + 8e9 / 3)
    assert found["n0:nic:out"] == found["n1:nic:in"] == 8e9
    assert transfer.latency_s == pytest.approx(COLLECTIVE_S["gpu"] + 2 * (2e-6 + 5 * 6e-6))
    down = network.collective("broadcast", 8e9, range(6), cluster(3, 3), "tree")
    assert loads(down)["n0:1:out"] == loads(down)["n0:1:in"] == pytest.approx(8e9 + 8e9 / 3)
    assert loads(down)["n0:nic:out"] == 8e9


def test_auto_is_the_fastest_that_there_is():
    wide = cluster(*[4] * 16)
    for nbytes in (1e3, 1e7, 1e10):
        by = {a: network.collective("all_reduce", nbytes, range(64), wide, a).alone_s
              for a in ("auto", "ring", "tree", "hierarchical")}
        assert by["auto"] == min(by[a] for a in ("ring", "tree", "hierarchical"))
    two = cluster(4, 4, inside=5e9, nic=50e9)
    small, large = (network.collective("all_gather", n, range(8), two) for n in (1, 1e9))
    assert small.latency_s < large.latency_s


def brute_direct(ranks, cluster, nbytes):
    """Bytes per port if every rank sends `nbytes / n` to every other one, message by message."""
    found = {}
    for a in ranks:
        for b in ranks:
            if a != b:
                for port, _, moved in network.send(nbytes / len(ranks), a, b, cluster).scaled(1).demands:
                    found[port] = found.get(port, 0) + moved
    return found


@pytest.mark.parametrize("device", [GPU, CPU])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 3), (0, 1, 2, 3, 4, 5), (1, 2, 5)])
def test_all_to_all_is_the_sum_of_its_messages(device, ranks):
    uneven = cluster(3, 1, 2, device=device, rack_uplink=Link(latency_s=1e-6, bandwidth_Bps=4e9))
    assert loads(network.collective("all_to_all", 7e6, ranks, uneven)) == pytest.approx(
        brute_direct(ranks, uneven, 7e6), rel=1e-6)


def test_cpu_processes_exchange_directly_and_share_the_loopback():
    local = cluster(3, device=CPU, inside=1e9)
    gathered = network.collective("all_gather", 9e6, range(3), local)
    assert loads(gathered)["n0:0:out"] == loads(gathered)["n0:2:in"] == 6e6
    assert loads(gathered)["n0:loopback"] == 18e6
    assert gathered.alone_s == pytest.approx(COLLECTIVE_S["cpu"] + 4 * MESSAGE_CPU_S + 1e-6 + 0.018)
    reduced = network.collective("all_reduce", 9e6, range(3), local)
    assert loads(reduced)["n0:loopback"] == 36e6
    assert loads(network.send(5e6, 0, 1, local))["n0:loopback"] == 5e6


def test_racks_zones_and_measured_matrices_limit_what_crosses_them():
    zones = cluster(*[1] * 5, zone_uplink=Link(latency_s=0.02, bandwidth_Bps=1e8),
                    rack_uplink=Link(latency_s=1e-5, bandwidth_Bps=2e9))
    assert network.send(1e8, 0, 1, zones).alone_s < 0.02
    assert network.send(1e8, 0, 4, zones).alone_s == pytest.approx(1 + 0.02 + 1.6e-5 + SEND_S["gpu"])
    assert "zone z0:out" in loads(network.collective("all_reduce", 1e6, range(5), zones, "ring"))
    matrix = cluster(1, 1, node_matrix_Bps=((1e9, 2e9), (5e8, 1e9)), node_latency_s=((0, 0.1), (0.3, 0)))
    assert network.send(1e9, 0, 1, matrix).alone_s == pytest.approx(0.6 + SEND_S["gpu"])
    assert network.send(1e9, 1, 0, matrix).alone_s == pytest.approx(2.3 + SEND_S["gpu"])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(network.OPS), st.data(),
       st.sampled_from([GPU, CPU, GPU.replace(arch="Hopper GH100")]), st.sampled_from(["wire", "nvlink", "pcie"]),
       st.integers(1, 4))
def test_more_bytes_never_take_less_time(sizes, op, data, device, link, nics):
    plain = cluster(*sizes, device=device, link=link)
    some = plain.replace(nodes=tuple(n.replace(nics=nics) for n in plain.nodes))
    ranks = data.draw(st.sets(st.integers(0, sum(sizes) - 1), min_size=1))
    few, many = sorted(data.draw(st.lists(st.integers(1, 10**10), min_size=2, max_size=2)))
    a, b = (network.collective(op, n, ranks, some) for n in (few, many))
    assert a.alone_s <= b.alone_s
    assert (a.alone_s == 0) == (len(ranks) == 1)
    assert network.collective(op, 0, ranks, some) == network.NOTHING
    # no rank can get what it lacks, or lose what others need, with fewer bytes than this
    if len(ranks) > 1 and op != "broadcast":
        into = {p: n for p, _, n in b.demands if p.endswith(":in") and ":nic" not in p}
        assert all(n >= 0 for _, _, n in b.demands)
        assert op == "all_reduce" or min(into.values()) >= many * (len(ranks) - 1) / len(ranks) * (1 - 1e-9)


def test_one_rank_per_node_reaches_only_its_own_adapter():
    three = cluster(4, 4, 4, nic=12e9, inside=1e12)
    rails = Cluster(name="r", nodes=tuple(n.replace(nics=2) for n in three.nodes))
    alone = network.collective("all_gather", 6e9, (0, 4, 8), rails, "ring")
    assert loads(alone)["n0:nic0:out"] == loads(alone)["n0:nic:out"] == 4e9
    assert "n0:nic1:out" not in loads(alone)
    assert alone.alone_s - alone.latency_s == pytest.approx(4e9 / 6e9)
    together = network.collective("all_gather", 6e9, range(12), rails, "ring")
    assert loads(together)["n0:nic0:out"] == loads(together)["n1:nic1:in"] == loads(together)["n0:nic:out"] / 2
    assert network.send(3e9, 3, 11, rails).alone_s == pytest.approx(0.5 + 6e-6 + SEND_S["gpu"])
    assert loads(network.send(3e9, 3, 11, rails))["n0:nic1:out"] == 3e9
    exchanged = network.collective("all_to_all", 12e9, range(12), rails)
    assert loads(exchanged)["n0:nic:out"] == pytest.approx(12e9 * 4 * 8 / 12)
    assert loads(exchanged)["n0:nic0:out"] == pytest.approx(12e9 * 4 * 8 / 12 / 2)


def test_small_messages_go_by_the_protocol_of_low_latency():
    eight = cluster(8, link="NVLink 4", device=GPU.replace(arch="Ampere GA100"))
    small, large = (network.collective("all_reduce", n, range(8), eight) for n in (1e3, 1e9))
    assert small.latency_s < large.latency_s / 2
    assert sum(n for _, _, n in small.demands) / 1e3 > 1.9 * sum(n for _, _, n in large.demands) / 1e9
    ways = network._analyse("all_reduce", tuple(range(8)), eight)["ring"]
    slopes = [way.alone_s - way.latency_s for way in ways]
    assert slopes == sorted(slopes)  # simple moves fewest bytes, LL most
    assert [way.latency_s for way in ways] == sorted((way.latency_s for way in ways), reverse=True)


def test_a_switch_that_sums_moves_the_buffer_once():
    hopper = GPU.replace(arch="Hopper GH100")
    node = cluster(8, device=hopper, link="nvlink")
    switch = network.collective("all_reduce", 8e9, range(8), node, "switch")
    assert loads(switch)["n0:3:out"] == pytest.approx(9e9 / NVLS_RATE, rel=1e-6)
    ring = network.collective("all_reduce", 8e9, range(8), node, "ring")
    assert switch.alone_s < ring.alone_s
    two = network.collective("all_reduce", 8e9, range(16), cluster(8, 8, device=hopper, link="nvlink"), "switch")
    assert loads(two)["n1:nic:out"] == 8e9
    for device, ranks in ((GPU.replace(arch="Ampere GA100"), range(8)), (hopper, range(2))):
        with pytest.raises(InputError, match="algorithm for all_reduce in this group 'switch'"):
            network.collective("all_reduce", 1, ranks, cluster(8, device=device, link="nvlink"), "switch")


def test_cards_without_peer_access_share_the_memory_of_the_host():
    card = GPU.replace(name="RTX4090")
    transfer = network.collective("all_gather", 8e9, range(4), cluster(4, device=card, link="pcie"), "ring")
    assert loads(transfer)["n0:host"] == 4 * 6e9
    assert transfer.alone_s - transfer.latency_s == pytest.approx(24e9 / STAGED_BPS)
    pair = network.collective("all_gather", 8e9, range(2), cluster(2, device=card, link="pcie"))
    assert loads(pair)["n0:host"] == 2 * 4e9
    far = network.collective("all_gather", 8e9, range(8), cluster(8, device=card, link="pcie"), "ring")
    assert far.alone_s - far.latency_s == pytest.approx(8 * 7e9 / STAGED_FAR_BPS)
    reached = GPU.replace(name="L40S")  # a pair of these has peer access
    assert "n0:host" not in loads(network.collective("all_gather", 8e9, range(2), cluster(2, device=reached,
                                                                                          link="pcie")))
    assert "n0:host" not in loads(network.collective("all_gather", 8e9, range(4), cluster(4, link="pcie")))


def test_the_rate_between_nodes_grows_with_the_message():
    """Effective rates rise from size to size to what the ports allow."""
    hopper = cluster(8, 8, device=GPU.replace(arch="Hopper GH100"), link="nvlink", nic=400e9)
    for op in ("all_reduce", "all_gather", "all_to_all"):
        seconds = [network.collective_s(op, 2.0**i, range(16), hopper) for i in range(10, 36)]
        rates = [2.0**i / s for i, s in zip(range(10, 36), seconds)]
        assert seconds == sorted(seconds)
        assert rates == sorted(rates)
        assert rates[-1] / rates[-4] < 1.1  # the port sets the pace
        assert rates[-1] / rates[11] > 1.5  # 2 MiB do not fill the network


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InputError, match="did you mean 'all_gather'"):
        network.collective("allgather", 1, range(2), cluster(2))
    with pytest.raises(InputError, match="unknown collective algorithm 'rings'"):
        network.collective("all_gather", 1, range(2), cluster(2), "rings")
    with pytest.raises(InputError, match="algorithm for all_gather in this group 'tree'"):
        network.collective("all_gather", 1, range(2), cluster(2), "tree")


def test_a_thousand_ranks_are_analysed_once_and_fast():
    large = cluster(*[8] * 128)
    start = time.process_time()
    first = network.collective("all_reduce", 1e9, range(1024), large)
    assert time.process_time() - start < 0.5
    start = time.process_time()
    for _ in range(10):
        assert network.collective("all_reduce", 1e9, range(1024), large) == first
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_groups_of_one_pattern_are_analysed_once(op, monkeypatch):
    """Ranks at the same places of other nodes load the same ports of those: what a fresh analysis of them says."""
    def racks():
        base = cluster(4, 4, 4, 3, 4)
        return base.replace(nodes=tuple(n.replace(rack="b" if i == 4 else "a") for i, n in enumerate(base.nodes)),
                            rack_uplink=Link(name="up", latency_s=1e-5, bandwidth_Bps=7e8))

    shared, calls = racks(), []
    analyse = network._analyse
    monkeypatch.setattr(network, "_analyse", lambda *a: calls.append(a[1]) or analyse(*a))
    groups = [(0, 1, 4, 6), (4, 5, 8, 10), (0, 1, 8, 10), (0, 1, 12, 14), (4, 5, 15, 17)]
    for group in groups:
        assert network.collective(op, 7e6, group, shared) == network.collective(op, 7e6, group, racks())
        assert network.collective_s(op, 7e6, group, shared) == pytest.approx(
            network.collective(op, 7e6, group, shared).alone_s)
    # Of the shared cluster: nodes 0-1, 1-2 and 0-2 are one pattern, the smaller node another, the other rack a third.
    assert [g for g in dict.fromkeys(calls) if calls.count(g) == 2] == [groups[0], groups[3], groups[4]]
