"""Seconds and bytes of transfers: which ports a message or a collective loads, and how long it takes alone.

A `Transfer` names the bytes that pass each shared port, so that the simulator can let concurrent transfers share
them. Counts follow the collective algorithms of NCCL: a ring over the group laid out node by node, a pipelined
double binary tree, and the hierarchical form (inside the nodes, then across them for each local index in
parallel). Between CPU processes the runtime exchanges pieces directly. Everything is linear in the bytes, so a
group is analysed once per cluster and only scaled afterwards. See `docs/cost-model.md`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import ceil, log2
from typing import Literal, NamedTuple

from mixfleet.catalog.efficiency import COLLECTIVE_S, LINK_EFFICIENCY, SEND_S
from mixfleet.cluster import Cluster, Port
from mixfleet.errors import unknown

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALGORITHMS = ("ring", "tree", "hierarchical", "direct")
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
    return load.transfer(latency_s + SEND_S[cluster.devices[a].kind])


def exchange(messages: Mapping[tuple[int, int], float], cluster: Cluster) -> Transfer:
    """Messages of so many bytes from one rank to another, all at once, each sent directly."""
    load = _Load(cluster)
    latency_s = max((load.hop(a, b, nbytes) for (a, b), nbytes in messages.items() if nbytes), default=0.0)
    if not load.bytes:
        return NOTHING
    kinds = {cluster.devices[rank].kind for pair in messages for rank in pair}
    return load.transfer(latency_s + COLLECTIVE_S["cpu" if kinds == {"cpu"} else "gpu"])


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
    known: dict[tuple[object, ...], dict[str, Transfer]] = cluster.__dict__.setdefault("_collectives", {})
    if (op, group) not in known:
        known[op, group] = _analyse(op, group, cluster)
    shapes = known[op, group]
    if algorithm in shapes:
        return shapes[algorithm].scaled(nbytes)
    if algorithm != "auto":
        raise unknown(f"algorithm for {op} in this group", algorithm, shapes)
    best = min(shapes.values(), key=lambda shape: _alone_s(shape, nbytes))
    return best.scaled(nbytes)


def _alone_s(shape: Transfer, nbytes: float) -> float:
    return shape.latency_s + nbytes * (shape.alone_s - shape.latency_s)


def _analyse(op: str, group: tuple[int, ...], cluster: Cluster) -> dict[str, Transfer]:
    """Transfers of one byte by algorithm."""
    if op == "all_to_all":
        return {"direct": _direct(op, group, cluster)}
    if all(cluster.devices[rank].kind == "cpu" for rank in group):
        return {"direct": _direct(op, group, cluster)}
    shapes = {"ring": _ring(op, group, cluster)}
    if op in ("all_reduce", "broadcast"):
        shapes["tree"] = _tree(op, group, cluster)
    nodes = _by_node(group, cluster)
    if len(nodes) > 1 and op != "broadcast" and len({len(ranks) for ranks in nodes}) == 1 and len(nodes[0]) > 1:
        shapes["hierarchical"] = _hierarchical(op, nodes, cluster)
    return shapes


def _by_node(group: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in group:
        nodes[cluster.node_of[rank]].append(rank)
    return [tuple(ranks) for ranks in nodes.values()]


class _Load:
    """Adds up bytes per port, with the usable capacity of each port."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.bytes: dict[str, float] = defaultdict(float)
        self.rate: dict[str, float] = {}

    def hop(self, a: int, b: int, nbytes: float) -> float:
        """`nbytes` from rank a to rank b; returns the latency of the way."""
        path = self.cluster.path(a, b)
        for port in path.ports:
            self.add(port, nbytes)
        if path.level == "node":
            self.loopback(a, nbytes)
        return path.latency_s

    def loopback(self, rank: int, nbytes: float) -> None:
        """Processes of one machine share its memory: what they send each other adds up on one port."""
        if nbytes and self.cluster.devices[rank].kind == "cpu":
            node = self.cluster.nodes[self.cluster.node_of[rank]]
            self.add(Port(f"{node.name}:loopback", node.link.bandwidth_Bps, node.link.name), nbytes)

    def add(self, port: Port, nbytes: float) -> None:
        self.bytes[port.name] += nbytes
        self.rate[port.name] = port.bandwidth_Bps * link_efficiency(port.link)

    def transfer(self, latency_s: float) -> Transfer:
        return Transfer(latency_s, tuple((port, self.rate[port], nbytes) for port, nbytes in self.bytes.items()))


def _ring(op: str, group: tuple[int, ...], cluster: Cluster) -> Transfer:
    """Every rank passes pieces to the next; a piece goes all the way round, once a pass (Patarasuk and Yuan, 2009)."""
    load, n = _Load(cluster), len(group)
    passes = _PASSES[op]
    part = 1.0 if op == "broadcast" else passes * (n - 1) / n
    hops = [load.hop(a, b, part) for a, b in zip(group, (*group[1:], group[0]))]
    return load.transfer(COLLECTIVE_S["gpu"] + passes * (sum(hops) - min(hops)))


def _tree(op: str, group: tuple[int, ...], cluster: Cluster) -> Transfer:
    """Chains inside the nodes, two complementary binary trees across them (Sanders, Speck and Traeff, 2009).

    A reduction goes up and its result comes down, so an all-reduce uses both directions; the depth across nodes is
    logarithmic. With half the buffer in each tree, all nodes move the same.
    """
    load, reduces = _Load(cluster), op == "all_reduce"
    nodes = _by_node(group, cluster)
    inside = across = 0.0
    for ranks in nodes:
        inside = max(inside, sum(load.hop(a, b, 1.0) for a, b in pairwise(ranks)))
        for a, b in pairwise(ranks) if reduces else ():
            load.hop(b, a, 1.0)
    if len(nodes) > 1:
        leaders = [ranks[0] for ranks in nodes]
        part = 2 * (len(nodes) - 1) / len(nodes) if reduces else 1.0
        across = max(load.hop(a, b, part) for a, b in zip(leaders, (*leaders[1:], leaders[0])))
    return load.transfer(COLLECTIVE_S["gpu"] + _PASSES[op] * (inside + ceil(log2(len(nodes))) * across))


def _hierarchical(op: str, nodes: list[tuple[int, ...]], cluster: Cluster) -> Transfer:
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
    return load.transfer(COLLECTIVE_S["gpu"] * (passes + 1) + passes * (inside + across))


def _direct(op: str, group: tuple[int, ...], cluster: Cluster) -> Transfer:
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
                for port in path.ports[1:-1]:
                    load.add(port, passes * len(mine) * len(other) / n)
    kind = "cpu" if all(cluster.devices[rank].kind == "cpu" for rank in group) else "gpu"
    return load.transfer(passes * (COLLECTIVE_S[kind] + latency))
