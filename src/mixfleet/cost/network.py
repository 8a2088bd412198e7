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
from functools import cache, cached_property
from itertools import pairwise
from math import ceil, log2
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mixfleet.catalog.efficiency import (
    BYTE_CPU_S,
    COLLECTIVE_S,
    LINK_EFFICIENCY,
    MESSAGE_CPU_S,
    NETWORK_PROTOCOLS,
    NVLS_RATE,
    OWN_PART,
    PROTOCOLS,
    SEND_S,
    STAGED,
    STAGED_BPS,
    STAGED_FAR_BPS,
    STAGED_NEAR,
    STAGED_PAIRS,
    SUM_CPU_S,
    TURN_S,
    Protocol,
)
from mixfleet.cluster import Cluster, Device, Port
from mixfleet.errors import unknown
from mixfleet.units import NS_PER_S

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
ALGORITHMS = ("ring", "tree", "hierarchical", "switch", "direct")
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


class Transfer(NamedTuple):
    """Latency, and the bytes that pass each port as `(port name, usable bytes per second, bytes)`.

    The core of a CPU rank is a port as well, in nanoseconds of CPU time. `fixed` is what messages take of it whatever
    the bytes: while it makes a message ready, no link moves it.
    """

    latency_s: float
    demands: tuple[tuple[str, float, float], ...]
    fixed: tuple[tuple[str, float], ...] = ()
    turn_s: float = 0.0
    """How much longer it waits for its turn where a rank computes meanwhile."""

    @property
    def alone_s(self) -> float:
        """Seconds if nothing else uses the ports."""
        whole = self.scaled(1) if self.fixed else self
        return whole.latency_s + max((n / capacity for _, capacity, n in whole.demands), default=0.0)

    def scaled(self, nbytes: float) -> Transfer:
        """The same transfer with every byte count multiplied, and with what is fixed among the demands."""
        fixed = dict(self.fixed)
        demands = tuple((port, rate, part * nbytes + fixed.get(port, 0.0)) for port, rate, part in self.demands)
        latency_s = self.latency_s + _ready_s([n / rate for _, rate, n in demands],
                                              [fixed.get(port, 0.0) / rate for port, rate, _ in demands])
        return Transfer(latency_s, demands, turn_s=self.turn_s)


def _ready_s(seconds: Sequence[float], fixed: Sequence[float]) -> float:
    """How much longer a transfer takes than its tightest port, given the seconds that each port needs and what of them
    is fixed: links move nothing while cores make messages ready."""
    links_s = max((s for s, f in zip(seconds, fixed) if not f), default=0.0)
    return max(0.0, links_s + max(fixed, default=0.0) - max(seconds, default=0.0)) if any(fixed) else 0.0


NOTHING = Transfer(0.0, ())


class Loads(NamedTuple):
    """A transfer in numbers of `Ports`: latency, and per port that it passes the bytes and the seconds they take."""

    latency_s: float
    ports: Ints
    nbytes: Floats
    seconds: Floats
    turn_s: float = 0.0
    """How much longer it waits for its turn where a rank computes meanwhile."""

    @staticmethod
    def together(parts: Sequence[Loads]) -> Loads:
        """Transfers that happen at the same time."""
        if len(parts) == 1:
            return parts[0]
        ports, index = np.unique(np.concatenate([p.ports for p in parts]), return_inverse=True)
        nbytes, seconds = (np.bincount(index, np.concatenate(row), len(ports)).astype(float) for row in (
            [p.nbytes for p in parts], [p.seconds for p in parts]))
        return Loads(max(p.latency_s for p in parts), ports, nbytes, seconds, max(p.turn_s for p in parts))

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
    turn_s: float
    fixed: Floats | None
    """What passes each port whatever the bytes, and how long that takes; None where nothing does."""
    fixed_s: Floats | None

    def placed(self, nbytes: float, first: Ints) -> Loads:
        """For so many bytes, in the group whose nodes' ports begin at `first` (0 at the end stands for no node)."""
        ports = first[self.slot] + self.offset
        if self.fixed is None or self.fixed_s is None:
            return Loads(self.latency_s, ports, nbytes * self.part, nbytes * self.seconds, self.turn_s)
        seconds = nbytes * self.seconds + self.fixed_s
        latency_s = self.latency_s + _ready_s(seconds.tolist(), self.fixed_s.tolist())
        return Loads(latency_s, ports, nbytes * self.part + self.fixed, seconds, self.turn_s)

    def alone_s(self, nbytes: float) -> float:
        """Seconds for so many bytes if nothing else uses the ports."""
        if self.fixed_s is None:
            return self.latency_s + nbytes * self.pace
        seconds = nbytes * self.seconds + self.fixed_s
        return self.latency_s + _ready_s(seconds.tolist(), self.fixed_s.tolist()) + float(seconds.max())


FEW_PAIRS = 256
"""Patterns of messages of which `Ports.exchange` remembers the ways."""


class Ports:
    """Numbers for the ports of a cluster, and the ways between its ranks. Kept with the cluster from plan to plan.

    The ports of all nodes are numbered alike, node by node. So what is known of one group holds for every group that
    has the same places in equal nodes, and each pattern is analysed once.
    """

    def __init__(self, cluster: Cluster) -> None:
        nodes = cluster.nodes
        self.cluster = cluster
        self._stride = 5 * max(len(node.devices) for node in nodes) + 4
        self._node = {node.name: i for i, node in enumerate(nodes)}
        self._offset: dict[str, int] = {}
        self._number: dict[str, int] = {}
        self.names = [""] * (self._stride * len(nodes))
        self.capacities = [1.0] * len(self.names)
        """Usable bytes per second, by number."""
        self.known: dict[object, Any] = {}
        self._ways: dict[tuple[int, int], tuple[float, tuple[int, ...], str]] = {}
        self._adapters: dict[tuple[int, str], int] = {}
        self._pairs: dict[tuple[bytes, bytes], tuple[float, Ints, Ints, Ints, list[int]]] = {}
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
        work = dict(transfer.fixed)
        fixed = np.array([work.get(name, 0.0) for name, _, _ in transfer.demands]) if work else None
        fixed_s = fixed / np.array([rate for _, rate, _ in transfer.demands]) if fixed is not None else None
        return _Way(transfer.latency_s, slot, np.array(numbers, np.int64) - first[slot], part, seconds,
                    float(seconds.max()) if len(seconds) else 0.0, transfer.turn_s, fixed, fixed_s)

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
        return min(ways, key=lambda way: way.alone_s(nbytes)), first

    def loads(self, op: CollectiveOp, nbytes: float, ranks: Sequence[int]) -> Loads:
        """A collective in numbers."""
        found = self.collective(op, nbytes, ranks)
        return found[0].placed(nbytes, found[1]) if found else NO_LOADS

    def message(self, a: tuple[int, ...], b: tuple[int, ...], shards: Iterable[tuple[int, int, float]],
                nbytes: float = 1.0, kind: tuple[object, ...] = ()) -> Loads:
        """Messages of these parts of `nbytes`, as (from, to, part), that tensor group `a` sends to `b` at once.

        `shards` must follow from `kind` and the places of the ranks in their groups: it is asked once for all pairs of
        equal pattern."""
        pattern, first = self.pattern((*a, *b))
        key = ("message", len(a), pattern, *kind)
        if key not in self.known:
            load, latency_s, turn_s = _Load(self.cluster), 0.0, 0.0
            for x, y, part in shards:
                if x != y and part:
                    latency_s = max(latency_s, load.hop(x, y, part) + SEND_S[self.cluster.devices[x].kind])
                    turn_s = max(turn_s, _turn_s((y,), self.cluster))
                    load.work(x, part, 1)
                    load.work(y, part, 1)
            self.known[key] = self.template(load.transfer(latency_s, turn_s), first)
        way: _Way = self.known[key]
        return way.placed(nbytes, first)

    @cached_property
    def _ranks(self) -> tuple[Ints, Ints]:
        """Per rank its node, and a number for its place: equal ones are equal places in equal nodes."""
        numbers: dict[tuple[int, int], int] = {}
        node_of, local_of = self.cluster.node_of, self.cluster.local_of
        places = [numbers.setdefault((self._kind[i], local), len(numbers)) for i, local in zip(node_of, local_of)]
        return np.array(node_of, np.int64), np.array(places, np.int64)

    def exchange(self, src: Ints, dst: Ints, nbytes: Floats, *, sums: bool = False) -> Loads:
        """Messages of so many bytes from one rank to another, one for each pair, all at once and each sent directly;
        with `sums` the receivers add up what arrives."""
        some = nbytes > 0
        if not some.any():
            return NO_LOADS
        if not some.all():
            src, dst, nbytes = src[some], dst[some], nbytes[some]
        key = src.tobytes(), dst.tobytes()
        if key not in self._pairs:
            if len(self._pairs) == FEW_PAIRS:
                self._pairs.clear()
            self._pairs[key] = self._analysed(src, dst)
        latency_s, numbers, which, near, ranks = self._pairs[key]
        load, cores = _Load(self.cluster), self.cluster.core_of
        for rank, sent in _totals(src[near], nbytes[near]) if len(near) else ():
            load.loopback(rank, sent)
        for rank in (r for r in ranks if cores[r]):
            out, into = nbytes[src == rank], nbytes[dst == rank]
            load.work(rank, float(out.sum() + into.sum()), len(out) + len(into), float(into.sum()) * sums)
        total = np.bincount(numbers, nbytes[which], len(self.names)).astype(float)
        fixed = np.zeros(len(total))
        for port, n in load.bytes.items():
            total[port] += n
        for port, work in load.fixed.items():
            fixed[port] = work
        total += fixed
        ports = np.flatnonzero(total)
        total, fixed = total[ports], fixed[ports]
        capacities = np.array([self.capacities[p] for p in ports.tolist()])
        latency_s += _ready_s((total / capacities).tolist(), (fixed / capacities).tolist()) if load.fixed else 0.0
        return Loads(latency_s, ports, total, total / capacities, _turn_s(ranks, self.cluster))

    def _analysed(self, src: Ints, dst: Ints) -> tuple[float, Ints, Ints, Ints, list[int]]:
        """Of messages between pairs of ranks, whatever their bytes: latency; the numbers of ports and, for each, the
        message that passes it; the messages that go through a node's memory; and all ranks."""
        cluster, (node, place) = self.cluster, self._ranks
        # Pairs of equal places, in one node or in two, pass equal ports, so one way is asked for all of them.
        like = (place[src] * (int(place.max()) + 1) + place[dst]) * 2 + (node[src] == node[dst])
        order = np.argsort(like, kind="stable")
        latency_s, numbers, which, near = 0.0, [], [], []
        for pairs in np.split(order, np.flatnonzero(np.diff(like[order])) + 1):
            a, b = int(src[pairs[0]]), int(dst[pairs[0]])
            found_s, ports, level = self.way(a, b)
            latency_s = max(latency_s, found_s)
            for port in ports:
                home, offset = divmod(port, self._stride)
                ends = src if home == node[a] else dst if home == node[b] else None
                numbers.append(np.full(len(pairs), port) if ends is None else node[ends[pairs]] * self._stride + offset)
                which.append(pairs)
            if level == "node" and _staged(cluster.devices[a]):
                near.append(pairs)
        ranks = np.unique(np.concatenate((src, dst))).tolist()
        latency_s += COLLECTIVE_S["cpu" if {cluster.devices[rank].kind for rank in ranks} == {"cpu"} else "gpu"]
        return (latency_s, np.concatenate(numbers), np.concatenate(which),
                np.sort(np.concatenate(near)) if near else np.zeros(0, np.int64), ranks)

    def named(self, loads: Loads) -> Transfer:
        """With the names of the ports."""
        return Transfer(loads.latency_s, tuple((self.names[p], self.capacities[p], n) for p, n in
                                               zip(loads.ports.tolist(), loads.nbytes.tolist())), turn_s=loads.turn_s)


NO_LOADS = Loads(0.0, np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


@cache
def link_efficiency(name: str) -> float:
    """Part of a link's nominal rate that transfers reach: by a word of its name, 1 if none is known."""
    return next((part for word, part in LINK_EFFICIENCY if word in name.lower()), 1.0)


def send(nbytes: float, a: int, b: int, cluster: Cluster) -> Transfer:
    """A message from rank `a` to rank `b`; nothing if they are one. What it takes of cores per message is `fixed`."""
    if a == b or not nbytes:
        return NOTHING
    load = _Load(cluster)
    latency_s = load.hop(a, b, nbytes)
    load.work(a, nbytes, 1)
    load.work(b, nbytes, 1)
    return load.transfer(latency_s + SEND_S[cluster.devices[a].kind], _turn_s((b,), cluster))


def exchange(messages: Mapping[tuple[int, int], float], cluster: Cluster, *, sums: bool = False) -> Transfer:
    """Messages of so many bytes from one rank to another, all at once, each sent directly; with `sums` the receivers
    add up what arrives."""
    ports = Ports.of(cluster)
    return ports.named(ports.exchange(*in_arrays(messages), sums=sums))


def in_arrays(messages: Mapping[tuple[int, int], float]) -> tuple[Ints, Ints, Floats]:
    """Senders, receivers and bytes of messages between pairs of ranks."""
    pairs = np.array(list(messages), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], np.fromiter(messages.values(), float)


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
    return found[0].alone_s(nbytes) if found else 0.0


def cpu_costs(device: Device) -> tuple[float, float, float]:
    """CPU seconds per message, per byte sent or received, and per byte added up."""
    known = device.message_cpu_s, device.byte_cpu_s, device.sum_cpu_s
    message_s, byte_s, sum_s = (default if value is None else value
                                for value, default in zip(known, (MESSAGE_CPU_S, BYTE_CPU_S, SUM_CPU_S)))
    return message_s, byte_s, sum_s


def _turn_s(ranks: Iterable[int], cluster: Cluster) -> float:
    """How long the slowest of these waits for its turn on a core that it shares."""
    devices = [cluster.devices[rank] for rank in ranks]
    return max([TURN_S * (1 / d.share - 1) if d.turn_s is None else d.turn_s for d in devices])


def _analyse(op: str, group: tuple[int, ...], cluster: Cluster) -> dict[str, list[Transfer]]:
    """Transfers of one byte by algorithm, in each protocol that it can use."""
    is_cpu = all(cluster.devices[rank].kind == "cpu" for rank in group)
    nodes = _by_node(group, cluster)
    if op == "all_to_all" or is_cpu:
        shape = _direct(op, group, cluster)
        if is_cpu:
            latency_s = shape.calls * COLLECTIVE_S["cpu"] + shape.hops_s + shape.across_s
            return {"direct": [Transfer(latency_s, shape.demands, shape.fixed,
                                        shape.calls * _turn_s(group, cluster))]}
        return {"direct": shape.ways(("simple", "ll"))}
    shapes = {"ring": _ring(op, group, cluster)}
    if op in ("all_reduce", "broadcast"):
        shapes["tree"] = _tree(op, group, cluster)
    if len(nodes) > 1 and op != "broadcast" and len({len(ranks) for ranks in nodes}) == 1 and len(nodes[0]) > 1:
        shapes["hierarchical"] = _hierarchical(op, nodes, cluster)
    wires = {cluster.nodes[cluster.node_of[rank]].link.name.lower() for rank in group}
    is_nvlink = all("nvlink" in name for name in wires)
    own = 1 + OWN_PART / (_PASSES[op] * (len(group) - 1)) if is_nvlink and len(nodes) == 1 else 1.0
    near = [protocol for protocol in PROTOCOLS if protocol != "ll128" or is_nvlink]
    found = {name: shape.ways(near, own) for name, shape in shapes.items()}
    if op == "all_reduce" and is_nvlink and all(_sums(ranks, cluster) for ranks in nodes):
        found["switch"] = _switch(nodes, cluster)
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
    """An algorithm in a group: calls one after another, latency of the hops inside nodes and of those between them, and
    bytes per port."""

    calls: int
    hops_s: float
    across_s: float
    demands: tuple[tuple[str, float, float], ...]
    fixed: tuple[tuple[str, float], ...]

    def by(self, how: Protocol, own: float = 1.0) -> Transfer:
        """In a protocol; `own` adds what a rank's own part costs."""
        latency_s = how.latency * self.hops_s + how.across * self.across_s
        return Transfer(self.calls * how.call * COLLECTIVE_S["gpu"] + latency_s,
                        tuple((port, rate, part * how.wire * own) for port, rate, part in self.demands))

    def ways(self, near: Sequence[str], own: float = 1.0) -> list[Transfer]:
        """In each protocol that it can use: those of `near`, or where it crosses a network, those of networks."""
        if self.across_s:
            return [self.by(how) for how in NETWORK_PROTOCOLS.values()]
        return [self.by(PROTOCOLS[name], own) for name in near]


def _staged(device: Device) -> bool:
    """Whether messages inside a node go through its memory."""
    return device.kind == "cpu" or device.known_as.startswith(STAGED)


def _totals(ranks: Ints, nbytes: Floats) -> list[tuple[int, float]]:
    """The sum for each rank."""
    found, index = np.unique(ranks, return_inverse=True)
    return list(zip(found.tolist(), np.bincount(index, nbytes).tolist()))


class _Load:
    """Adds up bytes per port."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.ports = cluster, Ports.of(cluster)
        self.bytes: dict[int, float] = defaultdict(float)
        self.fixed: dict[int, float] = defaultdict(float)

    def work(self, rank: int, nbytes: float, messages: int, summed: float = 0.0) -> None:
        """What a CPU rank's core does to send or receive so much, and to add up some of it."""
        core = self.cluster.core_of[rank]
        if core:
            message_s, byte_s, sum_s = cpu_costs(self.cluster.devices[rank])
            work_s = nbytes * byte_s + summed * sum_s
            if work_s or message_s:
                port = self.ports.number(core)
                self.bytes[port] += work_s * NS_PER_S
                if message_s:
                    self.fixed[port] += messages * message_s * NS_PER_S

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
        if not nbytes or not _staged(device):
            return
        node = self.cluster.nodes[self.cluster.node_of[rank]]
        if device.kind == "cpu":
            self.add(Port(f"{node.name}:loopback", node.link.bandwidth_Bps, node.link.name), nbytes)
        elif "pcie" in node.link.name.lower():
            cards = len(node.devices)
            if cards > 2 or device.known_as.startswith(STAGED_PAIRS):
                self.add(Port(f"{node.name}:host", STAGED_BPS if cards <= STAGED_NEAR else STAGED_FAR_BPS), nbytes)

    def add(self, port: Port, nbytes: float) -> None:
        self.bytes[self.ports.number(port)] += nbytes

    def transfer(self, latency_s: float, turn_s: float = 0.0) -> Transfer:
        names, capacities = self.ports.names, self.ports.capacities
        return Transfer(latency_s, tuple([(names[p], capacities[p], nbytes) for p, nbytes in self.bytes.items()]),
                        tuple([(names[p], work) for p, work in self.fixed.items()]), turn_s)

    def shape(self, hops_s: float, across_s: float, calls: int = 1) -> _Shape:
        load = self.transfer(0.0)
        return _Shape(calls, hops_s, across_s, load.demands, load.fixed)


def _ring(op: str, group: tuple[int, ...], cluster: Cluster) -> _Shape:
    """Every rank passes pieces to the next; a piece goes all the way round, once a pass (Patarasuk and Yuan, 2009)."""
    load, n = _Load(cluster), len(group)
    passes = _PASSES[op]
    part = 1.0 if op == "broadcast" else passes * (n - 1) / n
    nodes = {cluster.node_of[ranks[0]]: ranks for ranks in _by_node(group, cluster)}
    ways = list(zip(group, (*group[1:], group[0])))
    hops = [load.hop(a, b, part, nodes[cluster.node_of[a]], nodes[cluster.node_of[b]]) for a, b in ways]
    across_s = sum(s for s, (a, b) in zip(hops, ways) if cluster.node_of[a] != cluster.node_of[b])
    if len(nodes) == len(group):
        return load.shape(0.0, passes * (across_s - min(hops)))
    return load.shape(passes * (sum(hops) - across_s - min(hops)), passes * across_s)


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
    return load.shape(_PASSES[op] * inside, _PASSES[op] * ceil(log2(len(nodes))) * across)


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


def _switch(nodes: list[tuple[int, ...]], cluster: Cluster) -> list[Transfer]:
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
    shape = load.shape(4 * inside, 2 * ceil(log2(len(nodes))) * across)
    return shape.ways(("simple",))


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
    return load.shape(passes * inside, passes * across, passes + 1)


def _direct(op: str, group: tuple[int, ...], cluster: Cluster) -> _Shape:
    """Every rank sends a piece to every other one; an all-reduce is a reduce-scatter and an all-gather.

    A broadcast is the root's scatter followed by an all-gather, priced as two passes of everybody.
    """
    load, n = _Load(cluster), len(group)
    passes = 2 if op == "broadcast" else _PASSES.get(op, 1)
    latency, far, each = 0.0, 0.0, (n - 1) / n
    for a, b in zip(group, (*group[1:], group[0])):
        out, *_, into = cluster.path(a, b).ports
        load.add(out, passes * each)
        load.add(into, passes * each)
        load.work(a, 2 * passes * each, 2 * passes * (n - 1), each if op in ("all_reduce", "reduce_scatter") else 0.0)
    nodes = _by_node(group, cluster)
    for mine in nodes:
        load.loopback(mine[0], passes * len(mine) * (len(mine) - 1) / n)
        if len(mine) > 1:
            latency = max(latency, cluster.path(mine[0], mine[1]).latency_s)
        for other in nodes:
            if mine is not other:
                path = cluster.path(mine[0], other[0])
                far = max(far, path.latency_s)
                part = passes * len(mine) * len(other) / n
                for port in path.ports[1:-1]:
                    load.add(port, part)
                load.spread(mine[0], mine, "out", part)
                load.spread(other[0], other, "in", part)
    return load.shape(0.0 if far else passes * latency, passes * far, passes)
