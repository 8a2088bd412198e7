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
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
from mixfleet.cluster import Cluster, Device, Port
from mixfleet.errors import unknown

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALGORITHMS = ("ring", "tree", "hierarchical", "switch", "direct")
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


class Transfer(NamedTuple):
    """Latency, and the bytes that pass each port as `(port name, usable bytes per second, bytes)`."""

    latency_s: float
    demands: tuple[tuple[str, float, float], ...]

    @property
    def alone_s(self) -> float:
        """Seconds if nothing else uses the ports."""
        return self.latency_s + max((nbytes / capacity for _, capacity, nbytes in self.demands), default=0.0)


NOTHING = Transfer(0.0, ())


class Loads(NamedTuple):
    """A transfer in numbers of `Ports`: latency, and per port that it passes the bytes and the seconds they take."""

    latency_s: float
    ports: Ints
    nbytes: Floats
    seconds: Floats

    @staticmethod
    def together(parts: Sequence[Loads]) -> Loads:
        """Transfers that happen at the same time."""
        if len(parts) == 1:
            return parts[0]
        ports, index = np.unique(np.concatenate([p.ports for p in parts]), return_inverse=True)
        nbytes, seconds = (np.bincount(index, np.concatenate(row), len(ports)).astype(float) for row in (
            [p.nbytes for p in parts], [p.seconds for p in parts]))
        return Loads(max(p.latency_s for p in parts), ports, nbytes, seconds)

    @property
    def alone_s(self) -> float:
        """Seconds if nothing else uses the ports."""
        return self.latency_s + (float(self.seconds.max()) if len(self.seconds) else 0.0)


class _Way(NamedTuple):
    """One algorithm in one protocol for groups of one pattern, per byte. Port i is number `offset[i]` of the node
    `slot[i]` of the group, or of no node (-1)."""

    latency_s: float
    slot: Ints
    offset: Ints
    part: Floats
    seconds: Floats
    pace: float
    """The largest of `seconds`."""

    def placed(self, nbytes: float, first: Ints) -> Loads:
        """For so many bytes, in the group whose nodes' ports begin at `first` (0 at the end stands for no node)."""
        return Loads(self.latency_s, first[self.slot] + self.offset, nbytes * self.part, nbytes * self.seconds)


class Ports:
    """Numbers for the ports of a cluster, and the ways between its ranks. Kept with the cluster from plan to plan.

    The ports of all nodes are numbered alike, node by node. So what is known of one group holds for every group that
    has the same places in equal nodes, and each pattern is analysed once.
    """

    def __init__(self, cluster: Cluster) -> None:
        nodes = cluster.nodes
        self.cluster = cluster
        self._stride = 4 * max(len(node.devices) for node in nodes) + 4
        self._node = {node.name: i for i, node in enumerate(nodes)}
        self._offset: dict[str, int] = {}
        self._number: dict[str, int] = {}
        self.names = [""] * (self._stride * len(nodes))
        self.capacities = [1.0] * len(self.names)
        """Usable bytes per second, by number."""
        self.known: dict[object, Any] = {}
        self._ways: dict[tuple[int, int], tuple[float, tuple[int, ...], str]] = {}
        self._adapters: dict[tuple[int, str], int] = {}
        kinds: dict[object, int] = {}
        devices: dict[Device, int] = {}
        # Levels above the nodes, and ports whose names do not tell their node, are what they are for these nodes only.
        levels, single = bool(cluster.rack_uplink or cluster.zone_uplink), any(":" in node.name for node in nodes)
        self._kind = [kinds.setdefault(
            (i if single or cluster.node_matrix_Bps else -1, *((node.rack, node.zone) if levels else ()),
             tuple([devices.setdefault(d, len(devices)) for d in node.devices]), node.link, node.nic, node.nics),
            len(kinds)) for i, node in enumerate(nodes)]

    @staticmethod
    def of(cluster: Cluster) -> Ports:
        ports = cluster.__dict__.get("_ports")
        if not isinstance(ports, Ports):
            ports = cluster.__dict__["_ports"] = Ports(cluster)
        return ports

    def number(self, port: Port) -> int:
        """The number of a port."""
        found = self._number.get(port.name)
        if found is None:
            head, _, rest = port.name.partition(":")
            rate = port.bandwidth_Bps * link_efficiency(port.link)
            if head not in self._node:
                found = self._number[port.name] = len(self.names)
                self.names.append(port.name)
                self.capacities.append(rate)
                return found
            here = self._node[head]
            offset = self._offset.setdefault(rest, len(self._offset))
            for i, node in enumerate(self.cluster.nodes):
                if self._kind[i] == self._kind[here]:
                    number = self._number[f"{node.name}:{rest}"] = i * self._stride + offset
                    self.names[number], self.capacities[number] = f"{node.name}:{rest}", rate
            found = here * self._stride + offset
        return found

    def way(self, a: int, b: int) -> tuple[float, tuple[int, ...], str]:
        """Latency, ports and level of the path from rank a to rank b."""
        found = self._ways.get((a, b))
        if found is None:
            path = self.cluster.path(a, b)
            found = self._ways[a, b] = path.latency_s, tuple(map(self.number, path.ports)), path.level
        return found

    def adapter(self, rank: int, way: str) -> int:
        """The adapter's port that a rank uses; -1 where its node has just one."""
        found = self._adapters.get((rank, way))
        if found is None:
            node = self.cluster.nodes[self.cluster.node_of[rank]]
            port = node.adapter(self.cluster.local_of[rank], way)
            found = self._adapters[rank, way] = -1 if port is None else self.number(port)
        return found

    def pattern(self, ranks: Sequence[int]) -> tuple[tuple[object, ...], Ints]:
        """What groups that behave alike have in common, and where the ports of each node of this group begin."""
        node_of, local_of = self.cluster.node_of, self.cluster.local_of
        slots: dict[int, int] = {}
        places = tuple([(slots.setdefault(node_of[r], len(slots)), local_of[r]) for r in ranks])
        first = np.array([node * self._stride for node in slots] + [0])
        return (tuple([self._kind[node] for node in slots]), places), first

    def template(self, transfer: Transfer, first: Ints) -> _Way:
        """A transfer of one byte in a group whose nodes' ports begin at `first`, for all groups of its pattern."""
        slot_of = {int(start) // self._stride: slot for slot, start in enumerate(first[:-1])}
        numbers = [self._number[name] for name, _, _ in transfer.demands]
        nodes = len(self._node)
        slot = np.array([slot_of[n // self._stride] if n < nodes * self._stride else -1 for n in numbers], np.int64)
        part = np.array([nbytes for _, _, nbytes in transfer.demands])
        seconds = np.array([nbytes / rate for _, rate, nbytes in transfer.demands])
        return _Way(transfer.latency_s, slot, np.array(numbers, np.int64) - first[slot], part, seconds,
                    float(seconds.max()) if len(seconds) else 0.0)

    def collective(self, op: CollectiveOp, nbytes: float, ranks: Sequence[int],
                   algorithm: str = "auto") -> tuple[_Way, Ints] | None:
        """The fastest way for a group and where its nodes' ports begin; None for a group of one and for no bytes."""
        group = tuple(sorted(set(ranks)))
        if len(group) < 2 or not nbytes:
            return None
        if ("group", group) not in self.known:
            self.known["group", group] = self.pattern(group)
        pattern, first = self.known["group", group]
        if (op, pattern) not in self.known:
            self.known[op, pattern] = {name: [self.template(way, first) for way in ways]
                                       for name, ways in _analyse(op, group, self.cluster).items()}
        shapes = self.known[op, pattern]
        if algorithm != "auto" and algorithm not in shapes:
            raise unknown(f"algorithm for {op} in this group", algorithm, shapes)
        ways = [way for name, found in shapes.items() if algorithm in ("auto", name) for way in found]
        return min(ways, key=lambda way: way.latency_s + nbytes * way.pace), first

    def loads(self, op: CollectiveOp, nbytes: float, ranks: Sequence[int]) -> Loads:
        """A collective in numbers."""
        found = self.collective(op, nbytes, ranks)
        return found[0].placed(nbytes, found[1]) if found else NO_LOADS

    def message(self, a: tuple[int, ...], b: tuple[int, ...], shards: Iterable[tuple[int, int, float]]) -> Loads:
        """Messages of so many bytes, as (from, to, bytes), that tensor group `a` sends to `b` at once. `shards` must
        follow from the places of the ranks in their groups: it is asked once for all pairs of equal pattern."""
        pattern, first = self.pattern((*a, *b))
        key = ("message", len(a), pattern)
        if key not in self.known:
            load, latency_s = _Load(self.cluster), 0.0
            for x, y, nbytes in shards:
                if x != y and nbytes:
                    latency_s = max(latency_s, load.hop(x, y, nbytes) + SEND_S[self.cluster.devices[x].kind]
                                    + _turn_s((y,), self.cluster))
            self.known[key] = self.template(load.transfer(latency_s), first)
        way: _Way = self.known[key]
        return way.placed(1.0, first)

    def exchange(self, messages: Mapping[tuple[int, int], float]) -> Loads:
        """Messages of so many bytes from one rank to another, all at once, each sent directly."""
        load, cluster = _Load(self.cluster), self.cluster
        latency_s = max([load.hop(a, b, nbytes) for (a, b), nbytes in messages.items() if nbytes], default=0.0)
        if not load.bytes:
            return NO_LOADS
        ranks = {rank for pair in messages for rank in pair}
        kinds = {cluster.devices[rank].kind for rank in ranks}
        latency_s += COLLECTIVE_S["cpu" if kinds == {"cpu"} else "gpu"] + _turn_s(ranks, cluster)
        ports, nbytes = np.fromiter(load.bytes, np.int64), np.fromiter(load.bytes.values(), float)
        return Loads(latency_s, ports, nbytes, nbytes / np.array([self.capacities[p] for p in load.bytes]))

    def named(self, loads: Loads) -> Transfer:
        """With the names of the ports."""
        return Transfer(loads.latency_s, tuple((self.names[p], self.capacities[p], n) for p, n in
                                               zip(loads.ports.tolist(), loads.nbytes.tolist())))


NO_LOADS = Loads(0.0, np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


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
    ports = Ports.of(cluster)
    return ports.named(ports.exchange(messages))


def collective(op: CollectiveOp, nbytes: float, ranks: Sequence[int], cluster: Cluster,
               algorithm: str = "auto") -> Transfer:
    """A collective in the group `ranks`; `nbytes` is the full (gathered or not yet reduced) buffer of one rank.

    `auto` is the algorithm that is fastest alone. Zero for a group of one and for no bytes.
    """
    if op not in OPS:
        raise unknown("collective", op, OPS)
    if algorithm not in ("auto", *ALGORITHMS):
        raise unknown("collective algorithm", algorithm, ("auto", *ALGORITHMS))
    ports = Ports.of(cluster)
    found = ports.collective(op, nbytes, ranks, algorithm)
    return ports.named(found[0].placed(nbytes, found[1])) if found else NOTHING


def collective_s(op: CollectiveOp, nbytes: float, ranks: Sequence[int], cluster: Cluster) -> float:
    """Seconds of a collective that has its ports to itself."""
    found = Ports.of(cluster).collective(op, nbytes, ranks)
    return found[0].latency_s + nbytes * found[0].pace if found else 0.0


def _turn_s(ranks: Iterable[int], cluster: Cluster) -> float:
    """How long the slowest of these waits for its turn on a core that it shares."""
    return TURN_S * (1 / min([cluster.devices[rank].share for rank in ranks]) - 1)


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
    """Adds up bytes per port."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.ports = cluster, Ports.of(cluster)
        self.bytes: dict[int, float] = defaultdict(float)

    def hop(self, a: int, b: int, nbytes: float, out: Sequence[int] = (), into: Sequence[int] = ()) -> float:
        """`nbytes` from rank a to rank b; returns the latency of the way.

        `out` and `into` are the ranks of the group in both nodes: a collective runs over several channels, which
        leave and enter through the adapters of all of them.
        """
        latency_s, ports, level = self.ports.way(a, b)
        for port in ports:
            self.bytes[port] += nbytes
        if level == "node":
            self.loopback(a, nbytes)
        else:
            for rank, ranks, way in ((a, out, "out"), (b, into, "in")):
                if ranks:
                    self.spread(rank, ranks, way, nbytes)
        return latency_s

    def spread(self, rank: int, ranks: Sequence[int], way: str, nbytes: float) -> None:
        """Moves bytes from the adapter of `rank` to those of all `ranks` of its node, in equal parts."""
        own = self.ports.adapter(rank, way)
        if own >= 0 and ranks:
            self.bytes[own] -= nbytes
            ports = dict.fromkeys([self.ports.adapter(r, way) for r in ranks])
            for port in ports:
                self.bytes[port] += nbytes / len(ports)

    def loopback(self, rank: int, nbytes: float) -> None:
        """What processes of one machine send each other adds up in its memory, and what cards without peer access do.
        """
        device = self.cluster.devices[rank]
        if not nbytes or not (device.kind == "cpu" or device.name.startswith(STAGED)):
            return
        node = self.cluster.nodes[self.cluster.node_of[rank]]
        if device.kind == "cpu":
            self.add(Port(f"{node.name}:loopback", node.link.bandwidth_Bps, node.link.name), nbytes)
        elif len(node.devices) > 2 and "pcie" in node.link.name.lower():
            self.add(Port(f"{node.name}:host", STAGED_BPS), nbytes)

    def add(self, port: Port, nbytes: float) -> None:
        self.bytes[self.ports.number(port)] += nbytes

    def transfer(self, latency_s: float) -> Transfer:
        names, capacities = self.ports.names, self.ports.capacities
        return Transfer(latency_s, tuple([(names[p], capacities[p], nbytes) for p, nbytes in self.bytes.items()]))

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
    """The trees between the nodes; returns the latency of the slowest edge, 0 for one node.

    There are as many trees as ranks in a node, each through a rank of its own.
    """
    latency_s = 0.0
    for here, there in zip(nodes, (*nodes[1:], nodes[0])) if len(nodes) > 1 else ():
        lanes = max(len(here), len(there))
        for i in range(lanes):
            latency_s = max(latency_s, load.hop(here[i % len(here)], there[i % len(there)], part / lanes, here, there))
    return latency_s


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
