"""Seconds and bytes of transfers: which ports a message or a collective loads, and how long it takes alone.

A `Transfer` names the bytes that pass each shared port, so that the simulator can let concurrent transfers share
them. Counts follow the collective algorithms of NCCL: a ring over the group laid out node by node, a pipelined
double binary tree, and the hierarchical form (inside the nodes, then across them for each local index in
parallel), and the sum in the NVLink switch. Each moves its pieces by the protocol that is fastest for their size.
Between CPU processes the runtime exchanges pieces directly. Every way is linear in the bytes, so a group is analysed
once per cluster and only scaled afterwards. See `docs/cost-model.md`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil, log2
from typing import Literal, NamedTuple

from mixfleet.catalog.efficiency import (
    COLLECTIVE_S,
    LINK_EFFICIENCY,
    NETWORK_LATENCY,
    NVLS_RATE,
    OWN_PART,
    PROTOCOLS,
    SEND_S,
    STAGED,
    STAGED_BPS,
    TURN_S,
)
from mixfleet.cluster import Cluster, Port
from mixfleet.errors import unknown

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALGORITHMS = ("ring", "tree", "hierarchical", "switch", "direct")
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


class Transfer(NamedTuple):
    """Latency, and the bytes that pass each port as `(port name, usable bytes per second, bytes)`."""

    latency_s: float
    demands: tuple[tuple[str, float, float], ...]

    @property
    def alone_s(self) -> float:
        """Seconds if nothing else uses the ports."""
        return self.latency_s + max((nbytes / capacity for _, capacity, nbytes in self.demands), default=0.0)

    def scaled(self, nbytes: float) -> Transfer:
        """The same transfer with every byte count multiplied."""
        return Transfer(self.latency_s, tuple((port, rate, part * nbytes) for port, rate, part in self.demands))


NOTHING = Transfer(0.0, ())


@cache
def link_efficiency(name: str) -> float:
    """Part of a link's nominal rate that transfers reach: by a word of its name, 1 if none is known."""
    return next((part for word, part in LINK_EFFICIENCY if word in name.lower()), 1.0)


def send(nbytes: float, a: int, b: int, cluster: Cluster) -> Transfer:
    """A message from rank `a` to rank `b`; nothing if they are one."""
    if a == b or not nbytes:
        return NOTHING
    load = _Load(cluster)
    latency_s = load.hop(a, b, nbytes)
    return load.transfer(latency_s + SEND_S[cluster.devices[a].kind] + _turn_s((b,), cluster))


def exchange(messages: Mapping[tuple[int, int], float], cluster: Cluster) -> Transfer:
    """Messages of so many bytes from one rank to another, all at once, each sent directly."""
    load = _Load(cluster)
    latency_s = max((load.hop(a, b, nbytes) for (a, b), nbytes in messages.items() if nbytes), default=0.0)
    if not load.bytes:
        return NOTHING
    kinds = {cluster.devices[rank].kind for pair in messages for rank in pair}
    ranks = {rank for pair in messages for rank in pair}
    return load.transfer(latency_s + COLLECTIVE_S["cpu" if kinds == {"cpu"} else "gpu"] + _turn_s(ranks, cluster))


def collective(op: CollectiveOp, nbytes: float, ranks: Sequence[int], cluster: Cluster,
               algorithm: str = "auto") -> Transfer:
    """A collective in the group `ranks`; `nbytes` is the full (gathered or not yet reduced) buffer of one rank.

    `auto` is the algorithm that is fastest alone. Zero for a group of one and for no bytes.
    """
    if op not in OPS:
        raise unknown("collective", op, OPS)
    if algorithm not in ("auto", *ALGORITHMS):
        raise unknown("collective algorithm", algorithm, ("auto", *ALGORITHMS))
    group = tuple(sorted(set(ranks)))
    if len(group) < 2 or not nbytes:
        return NOTHING
    known: dict[tuple[object, ...], dict[str, list[Transfer]]] = cluster.__dict__.setdefault("_collectives", {})
    if (op, group) not in known:
        known[op, group] = _analyse(op, group, cluster)
    shapes = known[op, group]
    if algorithm != "auto" and algorithm not in shapes:
        raise unknown(f"algorithm for {op} in this group", algorithm, shapes)
    ways = [way for name, found in shapes.items() if algorithm in ("auto", name) for way in found]
    return min(ways, key=lambda way: _alone_s(way, nbytes)).scaled(nbytes)


def _turn_s(ranks: Iterable[int], cluster: Cluster) -> float:
    """How long the slowest of these waits for its turn on a core that it shares."""
    return TURN_S * (1 / min(cluster.devices[rank].share for rank in ranks) - 1)


def _alone_s(shape: Transfer, nbytes: float) -> float:
    return shape.latency_s + nbytes * (shape.alone_s - shape.latency_s)


def _analyse(op: str, group: tuple[int, ...], cluster: Cluster) -> dict[str, list[Transfer]]:
    """Transfers of one byte by algorithm, in each protocol that it can use."""
    is_cpu = all(cluster.devices[rank].kind == "cpu" for rank in group)
    nodes = _by_node(group, cluster)
    if op == "all_to_all" or is_cpu:
        shape = _direct(op, group, cluster)
        if is_cpu:
            call_s = COLLECTIVE_S["cpu"] + _turn_s(group, cluster)
            return {"direct": [Transfer(shape.calls * call_s + shape.hops_s, shape.demands)]}
        return {"direct": [shape.by(protocol, far=len(nodes) > 1) for protocol in ("simple", "ll")]}
    shapes = {"ring": _ring(op, group, cluster)}
    if op in ("all_reduce", "broadcast"):
        shapes["tree"] = _tree(op, group, cluster)
    if len(nodes) > 1 and op != "broadcast" and len({len(ranks) for ranks in nodes}) == 1 and len(nodes[0]) > 1:
        shapes["hierarchical"] = _hierarchical(op, nodes, cluster)
    wires = {cluster.nodes[cluster.node_of[rank]].link.name.lower() for rank in group}
    is_nvlink = all("nvlink" in name for name in wires)
    own = 1 + OWN_PART / (_PASSES[op] * (len(group) - 1)) if is_nvlink and len(nodes) == 1 else 1.0
    far = len(nodes) > 1
    found = {name: [shape.by(protocol, own, far=far) for protocol in PROTOCOLS if protocol != "ll128" or is_nvlink]
             for name, shape in shapes.items()}
    if op == "all_reduce" and is_nvlink and all(_sums(ranks, cluster) for ranks in nodes):
        found["switch"] = [_switch(nodes, cluster)]
    return found


def _sums(ranks: Sequence[int], cluster: Cluster) -> bool:
    """Whether a switch inside the node can sum for these ranks: Hopper and later, three and more of them."""
    generations = {cluster.devices[rank].arch.partition(" ")[0] for rank in ranks}
    return len(ranks) > 2 and generations <= {"Hopper", "Blackwell"}


def _by_node(group: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in group:
        nodes[cluster.node_of[rank]].append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


class _Shape(NamedTuple):
    """An algorithm in a group: calls one after another, latency of all hops, and bytes per port."""

    calls: int
    hops_s: float
    demands: tuple[tuple[str, float, float], ...]

    def by(self, protocol: str, own: float = 1.0, *, far: bool = False) -> Transfer:
        """In a protocol; `own` adds what a rank's own part costs, `far` says that hops between nodes set the pace."""
        how = PROTOCOLS[protocol]
        latency = NETWORK_LATENCY[protocol] if far else how.latency
        return Transfer(self.calls * how.call * COLLECTIVE_S["gpu"] + latency * self.hops_s,
                        tuple((port, rate, part * how.wire * own) for port, rate, part in self.demands))


class _Load:
    """Adds up bytes per port, with the usable capacity of each port."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.bytes: dict[str, float] = defaultdict(float)
        self.rate: dict[str, float] = {}

    def hop(self, a: int, b: int, nbytes: float, out: Sequence[int] = (), into: Sequence[int] = ()) -> float:
        """`nbytes` from rank a to rank b; returns the latency of the way.

        `out` and `into` are the ranks of the group in both nodes: a collective runs over several channels, which
        leave and enter through the adapters of all of them.
        """
        path = self.cluster.path(a, b)
        for port in path.ports:
            self.add(port, nbytes)
        if path.level == "node":
            self.loopback(a, nbytes)
        else:
            for rank, ranks, way in ((a, out, "out"), (b, into, "in")):
                self.spread(rank, ranks, way, nbytes)
        return path.latency_s

    def spread(self, rank: int, ranks: Sequence[int], way: str, nbytes: float) -> None:
        """Moves bytes from the adapter of `rank` to those of all `ranks` of its node, in equal parts."""
        node = self.cluster.nodes[self.cluster.node_of[rank]]
        own = node.adapter(self.cluster.local_of[rank], way)
        if own and ranks:
            self.bytes[own.name] -= nbytes
            ports = {port.name: port for r in ranks if (port := node.adapter(self.cluster.local_of[r], way))}
            for port in ports.values():
                self.add(port, nbytes / len(ports))

    def loopback(self, rank: int, nbytes: float) -> None:
        """What processes of one machine send each other adds up in its memory, and what cards without peer access do.
        """
        node = self.cluster.nodes[self.cluster.node_of[rank]]
        device = self.cluster.devices[rank]
        if nbytes and device.kind == "cpu":
            self.add(Port(f"{node.name}:loopback", node.link.bandwidth_Bps, node.link.name), nbytes)
        elif nbytes and len(node.devices) > 2 and "pcie" in node.link.name.lower() and device.name.startswith(STAGED):
            self.add(Port(f"{node.name}:host", STAGED_BPS), nbytes)

    def add(self, port: Port, nbytes: float) -> None:
        self.bytes[port.name] += nbytes
        self.rate[port.name] = port.bandwidth_Bps * link_efficiency(port.link)

    def transfer(self, latency_s: float) -> Transfer:
        return Transfer(latency_s, tuple((port, self.rate[port], nbytes) for port, nbytes in self.bytes.items()))

    def shape(self, hops_s: float, calls: int = 1) -> _Shape:
        return _Shape(calls, hops_s, self.transfer(0.0).demands)


def _ring(op: str, group: tuple[int, ...], cluster: Cluster) -> _Shape:
    """Every rank passes pieces to the next; a piece goes all the way round, once a pass (Patarasuk and Yuan, 2009)."""
    load, n = _Load(cluster), len(group)
    passes = _PASSES[op]
    part = 1.0 if op == "broadcast" else passes * (n - 1) / n
    nodes = {cluster.node_of[ranks[0]]: ranks for ranks in _by_node(group, cluster)}
    hops = [load.hop(a, b, part, nodes[cluster.node_of[a]], nodes[cluster.node_of[b]])
            for a, b in zip(group, (*group[1:], group[0]))]
    return load.shape(passes * (sum(hops) - min(hops)))


def _tree(op: str, group: tuple[int, ...], cluster: Cluster) -> _Shape:
    """Chains inside the nodes, two complementary binary trees across them (Sanders, Speck and Traeff, 2009).

    A reduction goes up and its result comes down, so an all-reduce uses both directions; the depth across nodes is
    logarithmic. With half the buffer in each tree, all nodes move the same.
    """
    load, reduces = _Load(cluster), op == "all_reduce"
    nodes = _by_node(group, cluster)
    inside = 0.0
    for ranks in nodes:
        inside = max(inside, sum(load.hop(a, b, 1.0) for a, b in pairwise(ranks)))
        for a, b in pairwise(ranks) if reduces else ():
            load.hop(b, a, 1.0)
    across = _across(load, nodes, 2 * (len(nodes) - 1) / len(nodes) if reduces else 1.0)
    return load.shape(_PASSES[op] * (inside + ceil(log2(len(nodes))) * across))


def _across(load: _Load, nodes: list[tuple[int, ...]], part: float) -> float:
    """The trees between the nodes; returns the latency of the slowest edge, 0 for one node."""
    if len(nodes) == 1:
        return 0.0
    return max(load.hop(here[0], there[0], part, here, there) for here, there in zip(nodes, (*nodes[1:], nodes[0])))


def _switch(nodes: list[tuple[int, ...]], cluster: Cluster) -> Transfer:
    """An all-reduce in the switch of each node (NVLink SHARP), and by trees across nodes.

    Each of n ranks asks the switch for the sum of its 1/n and hands that to all through it: its buffer goes out once
    and its part once more, and the same comes in.
    """
    load = _Load(cluster)
    for ranks in nodes:
        part = (1 + 1 / len(ranks)) / NVLS_RATE
        for a, b in zip(ranks, (*ranks[1:], ranks[0])):
            load.hop(a, b, part)
    inside = max(cluster.path(ranks[0], ranks[1]).latency_s for ranks in nodes)
    across = _across(load, nodes, 2 * (len(nodes) - 1) / len(nodes))
    return load.transfer(COLLECTIVE_S["gpu"] + 2 * (2 * inside + ceil(log2(len(nodes))) * across))


def _hierarchical(op: str, nodes: list[tuple[int, ...]], cluster: Cluster) -> _Shape:
    """Reduce-scatter inside each node, across nodes one ring per local index at the same time, gather inside.

    A reduce-scatter or an all-gather does only its half. All nodes hold equally many ranks.
    """
    load, passes = _Load(cluster), _PASSES[op]
    per_node, count = len(nodes[0]), len(nodes)
    inside = 0.0
    for ranks in nodes:
        hops = [load.hop(a, b, passes * (per_node - 1) / per_node) for a, b in zip(ranks, (*ranks[1:], ranks[0]))]
        inside = max(inside, sum(hops) - min(hops))
    rails = zip(*nodes)
    across = 0.0
    for rail in rails:
        hops = [load.hop(a, b, passes * (count - 1) / count / per_node) for a, b in zip(rail, (*rail[1:], rail[0]))]
        across = max(across, sum(hops) - min(hops))
    return load.shape(passes * (inside + across), passes + 1)


def _direct(op: str, group: tuple[int, ...], cluster: Cluster) -> _Shape:
    """Every rank sends a piece to every other one; an all-reduce is a reduce-scatter and an all-gather.

    A broadcast is the root's scatter followed by an all-gather, priced as two passes of everybody.
    """
    load, n = _Load(cluster), len(group)
    passes = 2 if op == "broadcast" else _PASSES.get(op, 1)
    latency = 0.0
    for a, b in zip(group, (*group[1:], group[0])):
        out, *_, into = cluster.path(a, b).ports
        load.add(out, passes * (n - 1) / n)
        load.add(into, passes * (n - 1) / n)
    nodes = _by_node(group, cluster)
    for mine in nodes:
        load.loopback(mine[0], passes * len(mine) * (len(mine) - 1) / n)
        if len(mine) > 1:
            latency = max(latency, cluster.path(mine[0], mine[1]).latency_s)
        for other in nodes:
            if mine is not other:
                path = cluster.path(mine[0], other[0])
                latency = max(latency, path.latency_s)
                part = passes * len(mine) * len(other) / n
                for port in path.ports[1:-1]:
                    load.add(port, part)
                load.spread(mine[0], mine, "out", part)
                load.spread(other[0], other, "in", part)
    return load.shape(passes * latency, passes)
