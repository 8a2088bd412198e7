"""What a cluster file becomes on one machine: names, addresses, rates, quotas, as plain values and commands.

Nothing here touches the machine. All bridges stand in a namespace of their own (`switch`), so that nothing of the
testbed is seen outside its namespaces. The tree of bridges is the one of `Cluster.path`: a node hangs on its rack,
a rack on its zone, a zone on the core; levels without an uplink of their own are left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from mixfleet.catalog.devices import device_fields
from mixfleet.cluster import EMULATED, Cluster, Device, Link
from mixfleet.errors import InputError
from mixfleet.spec import Spec
from mixfleet.testbed.kernel import Support
from mixfleet.units import text_rate

MTU = 9000
PAYLOAD = (MTU - 52) / (MTU + 14)
"""Part of what a link carries that is payload: IP and TCP headers with time stamps, and Ethernet's."""
_QUEUE_BYTES = 64 * 2**20
"""So large that nothing is dropped; what waits is bounded by TCP's windows."""
_WINDOW = 2**20
_RETRIES = 4
"""A connection over a dead link ends after 0.2 s (2^(n+1) - 1) = 6 s instead of a quarter of an hour."""
PERIOD_US, QUOTA_US = 5000, 1000
"""Shortest period of a quota, so that slow devices are slow evenly; and the kernel's smallest quota."""
_SLOWEST_BPS = 1e4
PROCESS_BYTES = 400 * 2**20
"""What Python, torch and gloo take of a rank's memory before training; it is added to the device's."""
CEILING_BPS = 1.25e9
"""Of one shaped link. More than 10 Gb/s over veth takes a core of its own."""
SYSCTLS = {"net/ipv4/tcp_retries2": str(_RETRIES), "net/ipv4/tcp_rmem": f"4096 {_WINDOW} {_WINDOW}",
           "net/ipv4/tcp_wmem": f"4096 {_WINDOW} {_WINDOW}", "net/ipv6/conf/all/disable_ipv6": "1",
           "net/ipv6/conf/default/disable_ipv6": "1"}
"""Of every namespace. Without IPv6 the kernel sends nothing of its own accord, so counters count training."""


class Seat(Spec, frozen=True, kw_only=True):
    """Where a rank runs and what it gets. `quota` is its part of one core; 0 is no limit."""

    rank: int
    node: str
    namespace: str
    cores: tuple[int, ...] = ()
    quota: float = 0.0
    memory_bytes: int = 0


class Wire(Spec, frozen=True, kw_only=True):
    """A veth pair: one end in a node's namespace or on an upper bridge, the other on a bridge of the switch."""

    name: str
    """Of the end on the lower bridge, or at the switch."""
    bridge: str
    peer: str
    namespace: str
    upper: str = ""
    """Bridge of the other end; empty for a node."""
    out: str
    """How the peer's end is shaped: tc commands' ends, in order."""
    into: str
    rate_Bps: float
    latency_s: float


class Layout(Spec, frozen=True, kw_only=True):
    """The whole testbed."""

    id: str
    switch: str
    bridges: tuple[str, ...]
    nodes: dict[str, str]
    """Node name: namespace."""
    addresses: dict[str, str]
    wires: tuple[Wire, ...]
    seats: tuple[Seat, ...]
    classes: dict[str, tuple[str, ...]] = {}
    """Node name: tc commands for rates that depend on the destination (`node_matrix`)."""

    def commands(self) -> list[tuple[str, str, list[str]]]:
        """(program, namespace, lines) in order; an empty namespace is this machine's."""
        done: list[tuple[str, str, list[str]]] = [
            ("ip", "", [f"netns add {ns}" for ns in (self.switch, *self.nodes.values())]),
            ("ip", self.switch, [f"link add {b} type bridge forward_delay 0 mcast_snooping 0" for b in self.bridges]),
            ("ip", "", [f"link add {w.name} netns {self.switch} mtu {MTU} type veth peer name {w.peer} "
                        f"netns {w.namespace} mtu {MTU}" for w in self.wires])]
        up = ["link set lo up"]
        up += [f"link set {w.name} master {w.bridge}" for w in self.wires]
        up += [f"link set {w.peer} master {w.upper}" for w in self.wires if w.upper]
        up += [f"link set {name} up" for w in self.wires for name in (w.name, w.peer if w.upper else w.name)]
        done.append(("ip", self.switch, [*up, *(f"link set {b} mtu {MTU} up" for b in self.bridges)]))
        shaped = [line for w in self.wires for line in shape(w.name, w.into)]
        shaped += [line for w in self.wires if w.upper for line in shape(w.peer, w.out)]
        done.append(("tc", self.switch, shaped))
        for node, ns in self.nodes.items():
            wire = next(w for w in self.wires if w.namespace == ns)
            done.append(("ip", ns, ["link set lo up", f"addr add {self.addresses[node]}/16 dev {wire.peer}",
                                    f"link set {wire.peer} up"]))
            done.append(("tc", ns, list(self.classes.get(node) or shape(wire.peer, wire.out))))
        return done

    def dry(self) -> str:
        """The commands as a person would type them."""
        lines = []
        for program, ns, batch in self.commands():
            lines += [f"{program}{f' -n {ns}' if ns else ''} {line}" for line in batch]
        for seat in self.seats:
            what = [f"{seat.quota:.3g} of a core"] if seat.quota else []
            what += [f"cores {','.join(map(str, seat.cores))}"] if seat.cores else []
            what += [f"{seat.memory_bytes} bytes"] if seat.memory_bytes else []
            lines.append(f"# cgroup of rank {seat.rank} on {seat.node}: {', '.join(what)}")
        return "\n".join(lines)


def shape(device: str, rules: str) -> list[str]:
    return [f"qdisc add dev {device} {rule}" for rule in rules.split("; ")]


def rule(rate_Bps: float, latency_s: float, support: Support) -> str:
    """tc's words for one direction of a link. The burst is a packet of TCP as the kernel builds them (64 KiB)."""
    burst = max(2**16 + 2048, round(rate_Bps / 250))  # the clock ticks at 250 Hz on common kernels
    text = f"root handle 1: tbf rate {round(rate_Bps * 8)}bit burst {burst} limit {_QUEUE_BYTES}"
    if latency_s and "netem" in support.qdiscs:
        text += f"; parent 1:1 handle 10: netem delay {latency_s * 1e6:.0f}us limit 100000"
    return text


def laid_out(cluster: Cluster, id: str, support: Support) -> Layout:
    """Names start with `mixfleet-` and the id. InputError for what this machine cannot be."""
    _refuse(cluster, support)
    ns = {n.name: f"mixfleet-{id}-n{i}" for i, n in enumerate(cluster.nodes)}
    switch = f"mixfleet-{id}-switch"
    bridges = ["core"]
    wires: list[Wire] = []

    def attach(name: str, bridge: str, peer: str, namespace: str, link: Link, upper: str = "") -> None:
        text = rule(link.bandwidth_Bps, link.latency_s, support)
        wires.append(Wire(name=name, bridge=bridge, peer=peer, namespace=namespace, upper=upper, out=text, into=text,
                          rate_Bps=link.bandwidth_Bps, latency_s=link.latency_s))

    def bridge(kind: str, keys: list[tuple[str, ...]], key: tuple[str, ...], link: Link, upper: str) -> str:
        name = f"{kind}{len(keys)}" if key not in keys else f"{kind}{keys.index(key)}"
        if key not in keys:
            keys.append(key)
            bridges.append(name)
            attach(f"{name}up", name, f"{name}dn", switch, link, upper)
        return name

    zones: list[tuple[str, ...]] = []
    racks: list[tuple[str, ...]] = []
    for i, node in enumerate(cluster.nodes):
        at = "core"
        if not cluster.node_matrix_Bps:
            if cluster.zone_uplink:
                at = bridge("zone", zones, (node.zone,), cluster.zone_uplink, at)
            if cluster.rack_uplink:
                at = bridge("rack", racks, (node.zone, node.rack), cluster.rack_uplink, at)
        attach(f"n{i}", at, "eth0", ns[node.name], node.nic)
    addresses = {n.name: f"10.77.{i // 250}.{i % 250 + 1}" for i, n in enumerate(cluster.nodes)}
    return Layout(id=id, switch=switch, bridges=tuple(bridges), nodes=ns, addresses=addresses, wires=tuple(wires),
                  seats=_seats(cluster, ns, support.cores), classes=_classes(cluster, addresses, support))


def _classes(cluster: Cluster, addresses: dict[str, str], support: Support) -> dict[str, tuple[str, ...]]:
    """htb: all classes of a node share its NIC, and none is faster than the entry of the matrix."""
    found = {}
    for i, row in enumerate(cluster.node_matrix_Bps):
        node, bits = cluster.nodes[i], round(cluster.nodes[i].nic.bandwidth_Bps * 8)
        lines = ["qdisc add dev eth0 root handle 1: htb default 1",
                 f"class add dev eth0 parent 1: classid 1:1 htb rate {bits}bit ceil {bits}bit quantum 60000"]
        for j, rate in enumerate(row):
            if i != j:
                ceil = min(round(rate * 8), bits)
                lines += [f"class add dev eth0 parent 1:1 classid 1:{j + 16:x} htb rate {ceil // len(row)}bit "
                          f"ceil {ceil}bit burst 70000 cburst 70000 quantum 60000",
                          f"qdisc add dev eth0 parent 1:{j + 16:x} bfifo limit {_QUEUE_BYTES}",
                          f"filter add dev eth0 parent 1: protocol ip u32 match ip dst "
                          f"{addresses[cluster.nodes[j].name]}/32 flowid 1:{j + 16:x}"]
        found[node.name] = tuple(lines)
    if found and "htb" not in support.qdiscs and support.root:
        raise InputError("the cluster has a node_matrix, and this kernel has no queueing discipline htb to give a node "
                         "several rates; leave the matrix out, and nodes keep the rates of their NICs")
    return found


def _refuse(cluster: Cluster, support: Support) -> None:
    gpus = sorted({d.name for d in cluster.devices if d.kind == "gpu"})
    if gpus:
        raise InputError(f"cluster {cluster.name} has GPUs ({', '.join(gpus)}); a testbed can only stand in for them "
                         "with slow CPU ranks: --emulate does that, scaled")
    for node in cluster.nodes:
        if node.nic.bandwidth_Bps > CEILING_BPS:
            asks, most = (text_rate(v, bits=True) for v in (node.nic.bandwidth_Bps, CEILING_BPS))
            raise InputError(f"node {node.name} has a NIC of {asks}; on this machine no more than {most} can be "
                             "carried. --emulate scales all rates")
    wanted = sum(asked(d) for d in cluster.devices)
    if support.cores and wanted > len(support.cores) + 1e-9:
        raise InputError(f"the devices of {cluster.name} take {wanted:.3g} cores together; this machine has "
                         f"{len(support.cores)}. Give them smaller shares, or --emulate")


def asked(device: Device) -> float:
    """Cores that a device takes."""
    return device.share * (len(device.cores) or 1)


def _seats(cluster: Cluster, namespaces: dict[str, str], cores: Sequence[int]) -> tuple[Seat, ...]:
    home = _packed([asked(d) for d in cluster.devices], cores)
    seats = []
    for rank, device in enumerate(cluster.devices):
        node = cluster.nodes[cluster.node_of[rank]].name
        mine = device.cores if device.cores and set(device.cores) <= set(cores) else home[rank]
        quota = asked(device) if device.share < 1 else 0.0
        seats.append(Seat(rank=rank, node=node, namespace=namespaces[node], cores=mine, quota=quota,
                          memory_bytes=device.memory_bytes + PROCESS_BYTES))
    return tuple(seats)


def _packed(shares: Sequence[float], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """A core for each share so that none holds more than 1, largest first; nobody is pinned if that does not work."""
    free = dict.fromkeys(cores, 1.0)
    home: list[tuple[int, ...]] = [()] * len(shares)
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = max(free, key=lambda c: free[c], default=None)
        if core is None or shares[i] > free[core] + 1e-9:
            return [()] * len(shares)
        free[core] -= shares[i]
        home[i] = (core,)
    return home


def period_us(quota: float) -> int:
    """Period of a quota in microseconds: short, but the quota itself is at least a millisecond."""
    return round(max(PERIOD_US, QUOTA_US / min(quota, 1.0)))


def emulate_gpus(cluster: Cluster, support: Support) -> tuple[Cluster, str]:
    """A cluster of CPU ranks whose rates are those of the file times one factor, and a note that says so.

    Compute and links are scaled alike (the rate of the tensor cores counts, in 16 bits), so that their proportion
    stays: all devices together take 0.9 of the cores. Memory is not scaled: every rank gets an equal part of the
    machine's.
    """
    count = len(support.cores) or os.cpu_count() or 1
    core = Device(**device_fields("cpu"))
    rates = [_tensor_flops(d) for d in cluster.devices]
    factor = core.flops["fp32"] * min(0.9 * count / sum(rates), 1 / max(rates))
    part = int(0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // len(rates)

    def device(d: Device) -> Device:
        share = float(f"{_tensor_flops(d) * factor / core.flops['fp32']:.4g}")
        return core.replace(name=d.name, memory_bytes=part, share=min(1.0, share), price_per_hour=d.price_per_hour,
                            source=f"{d.name}, {EMULATED} at {factor:.3g} of its rate")

    def link(one: Link) -> Link:
        return one.replace(bandwidth_Bps=max(one.bandwidth_Bps * factor, _SLOWEST_BPS))

    nodes = tuple(n.replace(devices=tuple(map(device, n.devices)), link=link(n.link), nic=link(n.nic))
                  for n in cluster.nodes)
    matrix = tuple(tuple(max(v * factor, _SLOWEST_BPS) for v in row) for row in cluster.node_matrix_Bps)
    return cluster.replace(
        nodes=nodes, rack_uplink=cluster.rack_uplink and link(cluster.rack_uplink), node_matrix_Bps=matrix,
        zone_uplink=cluster.zone_uplink and link(cluster.zone_uplink)), (
        f"the GPUs of {cluster.name} are emulated: CPU ranks and links at {factor:.3g} of their rates, memory unscaled")


def _tensor_flops(device: Device) -> float:
    return max(device.flops.get(t, 0.0) for t in ("bf16", "fp16", "fp32")) or max(device.flops.values())


def realised(cluster: Cluster, support: Support, latency_s: float) -> Cluster:
    """The cluster that predictions should take: links carry headers too, and have `latency_s` where netem is absent."""
    delayed = "netem" in support.qdiscs

    def link(one: Link, late: float) -> Link:
        return Link(name="shaped", latency_s=one.latency_s if delayed else late,
                    bandwidth_Bps=one.bandwidth_Bps * PAYLOAD)

    n = len(cluster.nodes)
    late = cluster.node_latency_s if delayed or not cluster.node_latency_s else ((2 * latency_s,) * n,) * n
    return cluster.replace(
        nodes=tuple(node.replace(nic=link(node.nic, latency_s)) for node in cluster.nodes),
        rack_uplink=cluster.rack_uplink and link(cluster.rack_uplink, 0.0),
        zone_uplink=cluster.zone_uplink and link(cluster.zone_uplink, 0.0), node_latency_s=late,
        node_matrix_Bps=tuple(tuple(v * PAYLOAD for v in row) for row in cluster.node_matrix_Bps))


def pids(groups: Iterable[str]) -> list[int]:
    """Processes listed in files such as `cgroup.procs`."""
    found = []
    for path in groups:
        try:
            with open(path) as file:
                found += [int(line) for line in file]
        except OSError:
            continue
    return found
