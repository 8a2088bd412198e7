"""What we have: devices in nodes, nodes behind links.

A transfer between two devices passes *ports*. A port has one direction and one capacity, and everything that
passes it at the same time shares that capacity. So sharing is written once, here, for every level of the network.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property
from pathlib import Path as FilePath
from typing import Literal, NamedTuple

import msgspec

from mixfleet.catalog.devices import device_fields
from mixfleet.errors import InputError
from mixfleet.spec import Spec
from mixfleet.units import NS_PER_S

EMULATED = "emulated on a CPU"
"""Part of the source of a device that a CPU process stands in for."""
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")


class BlockTime(Spec, frozen=True, kw_only=True):
    """Measured seconds of one model block on a device, forward and backward, for one micro-batch size.

    `block` is `Block.kind`; `seq_len`, `tensor` and `precision` say under what it was measured. `cost.kernels`
    prefers these over the roofline and interpolates linearly over the micro-batch.
    """

    block: str
    micro_batch: int
    seq_len: int
    precision: str
    forward_s: float
    backward_s: float
    tensor: int = 1


class KernelTime(Spec, frozen=True, kw_only=True):
    """Measured seconds of one kernel on a device; `kind`, `op` and `sizes` are named as in `cost.query`, which predicts
    others from a few of these."""

    kind: str
    op: str
    dtype: str
    sizes: dict[str, float]
    time_s: float

    def __post_init__(self) -> None:
        if not self.time_s > 0:
            raise InputError(f"kernel {self.kind} {self.op}: time is {self.time_s}; it must be positive")


class Device(Spec, frozen=True, kw_only=True, dict=True):
    """One accelerator, or one CPU process with its share of the cores.

    `flops` holds dense FLOP/s of the fastest unit per data type (tensor cores where there are any);
    `vector_flops` is the fp32 rate outside them.
    """

    name: str
    base: str = ""
    """The known device that this one is a variant of, whose efficiencies it has; empty for one that is known itself."""
    kind: Literal["gpu", "cpu"] = "gpu"
    vendor: str = ""
    arch: str = ""
    flops: dict[str, float]
    vector_flops: float
    memory_bytes: int
    memory_Bps: float
    cache_bytes: int = 0
    sm_count: int = 0
    link_Bps: float = 0.0
    """NVLink, xGMI: bytes per second and direction out of this device; 0 where it has none."""
    pcie_Bps: float = 0.0
    power_w: float = 0.0
    clock: float | None = None
    """Part of the clock of kernels measured alone that products and attention have in whole steps; None: what `power_w`
    allows (`cost.clock`). For GPUs whose clocks are locked, or known to hold."""
    price_per_hour: float | None = None
    efficiency: dict[str, float] = {}
    """Fraction of the roofline reached, per op kind; overrides the default of `cost.kernels`."""
    launch_s: float | None = None
    """Seconds of host overhead per kernel; None takes the default of `cost.kernels`."""
    cores: tuple[int, ...] = ()
    """CPU affinity of the process, for kind `cpu`."""
    share: float = 1.0
    """The part of those cores that this process gets; two processes pinned to one core have 0.5 each."""
    message_cpu_s: float | None = None
    """CPU seconds per message that a CPU process sends or receives; for this and the next three None takes the default
    of `cost.network`."""
    byte_cpu_s: float | None = None
    """CPU seconds per byte that it sends or receives."""
    sum_cpu_s: float | None = None
    """CPU seconds per byte that it adds up."""
    turn_s: float | None = None
    """Seconds for which a message waits, while this process computes, until it gets its turn on the core."""
    block_times: tuple[BlockTime, ...] = ()
    kernel_times: tuple[KernelTime, ...] = ()
    """A few measured kernels, from which others are predicted (`mixfleet calibrate device`)."""
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("vector_flops", "memory_bytes", "memory_Bps"):
            if getattr(self, field) <= 0:
                raise InputError(f"device {self.name}: {field} is {getattr(self, field)}; it must be positive")
        if not self.flops:
            raise InputError(f"device {self.name}: flops is empty; give at least fp32")
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise InputError(f"device {self.name}: flops has {dtype!r}; data types are {', '.join(DTYPES)}")
            if rate <= 0:
                raise InputError(f"device {self.name}: flops[{dtype}] is {rate}; it must be positive")
        for field in ("cache_bytes", "sm_count", "link_Bps", "pcie_Bps", "power_w", "price_per_hour", "launch_s",
                      "message_cpu_s", "byte_cpu_s", "sum_cpu_s", "turn_s"):
            if (getattr(self, field) or 0) < 0:
                raise InputError(f"device {self.name}: {field} is {getattr(self, field)}; it cannot be negative")
        for op, value in self.efficiency.items():
            if value <= 0:
                raise InputError(f"device {self.name}: efficiency[{op}] is {value}; it must be positive")
        if self.clock is not None and not 0 < self.clock <= 1:
            raise InputError(f"device {self.name}: clock is {self.clock}; it must be above 0 and at most 1")
        if self.clock is not None and self.kind == "cpu":
            raise InputError(f"device {self.name}: clock is for GPUs; a part of a CPU's time is its share")
        if not 0 < self.share <= 1:
            raise InputError(f"device {self.name}: share is {self.share}; it must be above 0 and at most 1")

    @property
    def known_as(self) -> str:
        """The name under which tables of known devices list it."""
        return self.base or self.name

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.share, self.cores))


class Link(Spec, frozen=True, kw_only=True):
    """A channel with the same latency and bandwidth in both directions (full duplex)."""

    name: str = ""
    latency_s: float
    bandwidth_Bps: float
    """Bytes per second in one direction."""

    def __post_init__(self) -> None:
        if self.bandwidth_Bps <= 0:
            raise InputError(f"link {self.name}: bandwidth is {self.bandwidth_Bps}; it must be positive")
        if self.latency_s < 0:
            raise InputError(f"link {self.name}: latency is {self.latency_s}; it cannot be negative")


class Node(Spec, frozen=True, kw_only=True):
    """Devices under one operating system. `link` joins them, each device with its own port; `nic` is shared by all."""

    name: str
    devices: tuple[Device, ...]
    link: Link
    nic: Link
    nics: int = 1
    """Adapters that make up `nic`, in equal parts, each next to as many devices; a device sends through its own."""
    rack: str = ""
    zone: str = ""
    host_memory_bytes: int = 0
    host_Bps: float = 0.0
    """What all devices together can move to and from the memory of the host; 0: as much as they can take."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError(f"node {self.name}: devices is empty")
        if self.nics < 1:
            raise InputError(f"node {self.name}: nics is {self.nics}; it must be at least 1")

    def adapter(self, local: int, way: str) -> Port | None:
        """The port of the adapter that device `local` uses; None where the node has just one."""
        parts = min(self.nics, len(self.devices))
        if parts == 1:
            return None
        index = local * parts // len(self.devices)
        return Port(f"{self.name}:nic{index}:{way}", self.nic.bandwidth_Bps / parts, self.nic.name)


class Port(NamedTuple):
    """One direction of one shared capacity, such as `node3:nic:out`."""

    name: str
    bandwidth_Bps: float
    link: str = ""
    """Name of the link, which tells its kind (`NVLink 4`, `EFA`); empty for a measured rate."""


class Path(NamedTuple):
    """How bytes get from one device to another."""

    latency_s: float
    ports: tuple[Port, ...]
    level: str
    """`device` (same device), `node`, `nic`, `rack`, `zone`: the slowest kind of boundary crossed."""

    @property
    def bandwidth_Bps(self) -> float:
        """Of a single transfer that has the path to itself."""
        return min(p.bandwidth_Bps for p in self.ports)


class Cluster(Spec, frozen=True, kw_only=True, dict=True):
    """Nodes and the network between them. Devices are numbered through the nodes in order: that number is the rank.

    `rack_uplink` is the capacity of a rack towards the rest of its zone, `zone_uplink` that of a zone towards the
    others (a WAN); None means that the level does not limit. `node_matrix_Bps[i][j]`, if given, is the measured
    rate of a single transfer from node i to node j, and `node_latency_s[i][j]` its latency; they replace the
    levels between nodes, while the nodes' NICs stay shared.
    """

    name: str
    nodes: tuple[Node, ...]
    rack_uplink: Link | None = None
    zone_uplink: Link | None = None
    node_matrix_Bps: tuple[tuple[float, ...], ...] = ()
    node_latency_s: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise InputError(f"cluster {self.name}: nodes is empty")
        names = [n.name for n in self.nodes]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"cluster {self.name}: two nodes are named {name!r}")
        for field in ("node_matrix_Bps", "node_latency_s"):
            rows = getattr(self, field)
            if rows and (len(rows) != len(names) or any(len(r) != len(names) for r in rows)):
                raise InputError(f"cluster {self.name}: {field} must have {len(names)} rows of {len(names)} numbers")

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, in rank order."""
        return tuple(d for n in self.nodes for d in n.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Index of the node that holds each rank."""
        return tuple(i for i, n in enumerate(self.nodes) for _ in n.devices)

    @cached_property
    def local_of(self) -> tuple[int, ...]:
        """Index of each rank inside its node."""
        return tuple(j for n in self.nodes for j in range(len(n.devices)))

    @cached_property
    def ranks_of_node(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        ranks: list[list[int]] = [[] for _ in self.nodes]
        for rank, node in enumerate(self.node_of):
            ranks[node].append(rank)
        return tuple(map(tuple, ranks))

    @property
    def note(self) -> str:
        """What everything that is written about this cluster has to say: which devices others stand in for."""
        found = sorted({d.source for d in self.devices if EMULATED in d.source})
        return f"not real GPUs: {'; '.join(found)}" if found else ""

    @cached_property
    def core_of(self) -> tuple[Port | None, ...]:
        """Per rank, what a CPU process computes with, as a port of nanoseconds of CPU time per second: computing and
        communication share it. None for a GPU, whose transfers take nothing from its computing."""
        return tuple(Port(f"{node.name}:{i}:cpu", d.share * (len(d.cores) or 1) * NS_PER_S) if d.kind == "cpu" else None
                     for node in self.nodes for i, d in enumerate(node.devices))

    def without(self, lost: Container[str]) -> tuple[Cluster, tuple[int, ...]]:
        """The cluster without these nodes, and its ranks' numbers in this one. InputError if none is left."""
        kept = [i for i, node in enumerate(self.nodes) if node.name not in lost]
        if not kept:
            raise InputError(f"no node of {self.name} is left")

        def some(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(rows[i][j] for j in kept) for i in kept) if rows else ()

        return self.replace(nodes=tuple(self.nodes[i] for i in kept), node_latency_s=some(self.node_latency_s),
                            node_matrix_Bps=some(self.node_matrix_Bps)), tuple(
                                r for i in kept for r in self.ranks_of_node[i])

    def path(self, a: int, b: int) -> Path:
        """The way from rank `a` to rank `b`; ports in the order in which they are passed."""
        i, j = self.node_of[a], self.node_of[b]
        here, there = self.nodes[i], self.nodes[j]
        out = Port(f"{here.name}:{self.local_of[a]}:out", here.link.bandwidth_Bps, here.link.name)
        into = Port(f"{there.name}:{self.local_of[b]}:in", there.link.bandwidth_Bps, there.link.name)
        if i == j:
            return Path(here.link.latency_s, (out, into), "device" if a == b else "node")
        own, other = here.adapter(self.local_of[a], "out"), there.adapter(self.local_of[b], "in")
        ports = [out, *([own] if own else []), Port(f"{here.name}:nic:out", here.nic.bandwidth_Bps, here.nic.name)]
        latency = here.nic.latency_s + there.nic.latency_s
        level = "nic"
        if self.node_matrix_Bps:
            ports.append(Port(f"{here.name}->{there.name}", self.node_matrix_Bps[i][j]))
            if self.node_latency_s:
                latency = self.node_latency_s[i][j]
        else:
            far = here.zone != there.zone
            if self.rack_uplink and (far or here.rack != there.rack):
                level = "rack"
                latency += self.rack_uplink.latency_s
                ports += [Port(f"rack {n.zone}/{n.rack}:{way}", self.rack_uplink.bandwidth_Bps, self.rack_uplink.name)
                          for n, way in ((here, "out"), (there, "in"))]
            if self.zone_uplink and far:
                level = "zone"
                latency += self.zone_uplink.latency_s
                ports += [Port(f"zone {n.zone}:{way}", self.zone_uplink.bandwidth_Bps, self.zone_uplink.name)
                          for n, way in ((here, "out"), (there, "in"))]
        ports += [Port(f"{there.name}:nic:in", there.nic.bandwidth_Bps, there.nic.name),
                  *([other] if other else []), into]
        return Path(latency, tuple(ports), level)

    @staticmethod
    def load(path: str | FilePath) -> Cluster:
        """From a cluster file (docs/cluster.md); InputError names the file, line and key of what is wrong."""
        from mixfleet import cluster_file

        return cluster_file.load(path)

    def save(self, path: str | FilePath, header: str = "") -> None:
        """To a cluster file from which `load` makes an equal cluster; comments of an existing file stay."""
        from mixfleet import cluster_file

        cluster_file.save(self, path, header)

    def fingerprint(self) -> str:
        """Short hash of which devices sit where, to tell that a plan was made for another cluster.

        Measured figures are left out: a plan stays valid when the same machines are measured again.
        """
        from hashlib import sha256

        seats = [(n.name, n.rack, n.zone, [(d.name, d.cores) for d in n.devices]) for n in self.nodes]
        return sha256(msgspec.json.encode(seats)).hexdigest()[:12]


def device_named(name: str) -> Device:
    """A device of the catalog; InputError with the nearest names for an unknown one."""
    return Device(**device_fields(name))
