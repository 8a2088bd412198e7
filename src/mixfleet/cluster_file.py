"""The YAML form of a cluster, for people: quantities with units, catalog names, counts. See docs/cluster.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from mixfleet.catalog.devices import device_fields, link_peers, names
from mixfleet.catalog.instances import NIC_LATENCY_S, instance_named, nic_latency_s
from mixfleet.cluster import BlockTime, Cluster, Device, KernelTime, Link, Node
from mixfleet.errors import InputError, unknown
from mixfleet.files import FORMAT_KEY, VERSIONS, Document, Keys, decode, read_spec, write_yaml
from mixfleet.spec import Spec
from mixfleet.units import (
    GB,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
    text_bytes,
    text_flops,
    text_rate,
    text_seconds,
)

NVLINK_LATENCY_S, PCIE_LATENCY_S = 3.4e-6, 5.7e-6
"""Source: latency per hop, ring and simple protocol, in NCCL's tuning table."""
LOOPBACK = Link(name="loopback", latency_s=30e-6, bandwidth_Bps=2 * GB)
"""Between CPU processes of one machine; a stated default that `mixfleet discover` replaces by a measurement."""
MOST = 1_000_000
"""Devices of a node, or of a row of nodes; a larger count is a slip."""


class _Bytes(int): ...
class _Rate(float): ...
class _Seconds(float): ...
class _Flops(float): ...


_PARSERS: dict[type, Any] = {_Bytes: parse_bytes, _Rate: parse_rate, _Seconds: parse_seconds, _Flops: parse_flops}


def _quantity(kind: type, value: Any) -> Any:
    if not isinstance(value, (str, int, float)):
        raise InputError(f"must be a quantity such as '25 Gb/s' or '80 GiB', not {value!r}")
    number = _PARSERS[kind](value, "the value")
    if number < 0:
        raise InputError(f"is {value!r}; it cannot be negative")
    return kind(number)


class _LinkForm(Spec, frozen=True, kw_only=True):
    bandwidth: _Rate
    latency: _Seconds = _Seconds(0.0)
    name: str = ""


class _BlockTimeForm(Spec, frozen=True, kw_only=True):
    block: str
    micro_batch: int
    seq_len: int
    precision: str
    forward: _Seconds
    backward: _Seconds
    tensor: int = 1


class _KernelTimeForm(Spec, frozen=True, kw_only=True):
    kind: str
    op: str
    dtype: str
    sizes: dict[str, float]
    time: _Seconds


class _DeviceForm(Spec, frozen=True, kw_only=True):
    device: str = ""
    base: str = ""
    name: str | None = None
    count: int = 1
    kind: Literal["gpu", "cpu"] | None = None
    vendor: str | None = None
    arch: str | None = None
    flops: dict[str, _Flops] | None = None
    vector_flops: _Flops | None = None
    memory: _Bytes | None = None
    memory_bandwidth: _Rate | None = None
    cache: _Bytes | None = None
    sm_count: int | None = None
    link_bandwidth: _Rate | None = None
    pcie_bandwidth: _Rate | None = None
    power: float | None = None
    clock: float | None = None
    price_per_hour: float | None = None
    efficiency: dict[str, float] | None = None
    launch: _Seconds | None = None
    cores: int | tuple[int, ...] | None = None
    share: float | None = None
    message_cpu: _Seconds | None = None
    byte_cpu: _Seconds | None = None
    sum_cpu: _Seconds | None = None
    turn: _Seconds | None = None
    block_times: tuple[_BlockTimeForm, ...] | None = None
    kernels: tuple[_KernelTimeForm, ...] | None = None
    source: str | None = None


class _NodeForm(Spec, frozen=True, kw_only=True):
    name: str
    count: int = 1
    instance: str = ""
    devices: str | _DeviceForm | tuple[str | _DeviceForm, ...] = ()
    link: str | _LinkForm = ""
    nic: str | _LinkForm = ""
    nics: int | None = None
    rack: str = ""
    zone: str = ""
    host_memory: _Bytes | None = None
    host_bandwidth: _Rate | None = None


class _MatrixForm(Spec, frozen=True, kw_only=True):
    bandwidth: tuple[tuple[_Rate, ...], ...]
    latency: tuple[tuple[_Seconds, ...], ...] = ()


class _ClusterForm(Spec, frozen=True, kw_only=True):
    nodes: tuple[_NodeForm, ...]
    name: str = ""
    rack_uplink: _LinkForm | None = None
    zone_uplink: _LinkForm | None = None
    node_matrix: _MatrixForm | None = None


_FIELD = {"memory": "memory_bytes", "memory_bandwidth": "memory_Bps", "cache": "cache_bytes", "power": "power_w",
          "link_bandwidth": "link_Bps", "pcie_bandwidth": "pcie_Bps", "launch": "launch_s",
          "message_cpu": "message_cpu_s", "byte_cpu": "byte_cpu_s", "sum_cpu": "sum_cpu_s", "turn": "turn_s",
          "kernels": "kernel_times"}
"""Key in the file: field of `Device`, where they differ."""
_TEXT: dict[str, Any] = {"memory": text_bytes, "cache": text_bytes, "memory_bandwidth": text_rate,
                         "link_bandwidth": text_rate, "pcie_bandwidth": text_rate, "vector_flops": text_flops,
                         "launch": text_seconds, "message_cpu": text_seconds, "byte_cpu": text_seconds,
                         "sum_cpu": text_seconds, "turn": text_seconds, "cores": list}


def load(path: str | Path) -> Cluster:
    """Read a cluster file; InputError names file, line and key of whatever is wrong."""
    doc = read_spec(path, "cluster")
    form = decode(doc, _ClusterForm, _quantity)
    alone = len(form.nodes) == 1 and form.nodes[0].count == 1
    nodes = [node for i, n in enumerate(form.nodes) for node in _nodes(doc, ("nodes", i), n, alone)]
    matrix = form.node_matrix
    with _located(doc, ("node_matrix",) if matrix else ()):
        return Cluster(
            name=form.name or Path(path).stem, nodes=tuple(nodes),
            rack_uplink=_link(form.rack_uplink, "rack uplink") if form.rack_uplink else None,
            zone_uplink=_link(form.zone_uplink, "zone uplink") if form.zone_uplink else None,
            node_matrix_Bps=tuple(tuple(map(float, r)) for r in matrix.bandwidth) if matrix else (),
            node_latency_s=tuple(tuple(map(float, r)) for r in matrix.latency) if matrix else ())


def save(cluster: Cluster, path: str | Path, header: str = "") -> None:
    """Write a cluster file from which `load` makes an equal cluster."""
    alone = len(cluster.nodes) == 1
    data: dict[str, Any] = {FORMAT_KEY: f"cluster/{VERSIONS['cluster']}", "name": cluster.name,
                            "nodes": [_node_data(n, count, alone) for n, count in _runs(cluster.nodes)]}
    for key in ("rack_uplink", "zone_uplink"):
        link = getattr(cluster, key)
        if link:
            data[key] = _link_data(link, key.replace("_", " "), bits=True)
    if cluster.node_matrix_Bps:
        data["node_matrix"] = {"bandwidth": [[text_rate(v, bits=True) for v in r] for r in cluster.node_matrix_Bps]}
        if cluster.node_latency_s:
            data["node_matrix"]["latency"] = [[text_seconds(v) for v in r] for r in cluster.node_latency_s]
    write_yaml(path, data, header)


def load_device(path: str | Path) -> Device:
    """Read a device file: the keys of a device in a cluster file (docs/cluster.md), for clusters to name."""
    return _load_device(Path(path), ())


def _load_device(path: Path, inside: tuple[Path, ...]) -> Device:
    if path.resolve() in inside:
        raise InputError("the device file starts from itself", where=str(path))
    doc = read_spec(path, "device")
    form = decode(doc, _DeviceForm, _quantity)
    with _located(doc, ()):
        if form.count != 1:
            raise InputError("a device file describes one device; give the count in the cluster file",
                             where=doc.where(("count",)))
        return _devices(form, path.parent, (*inside, path.resolve()))[0]


def save_device(device: Device, path: str | Path, header: str = "") -> None:
    """Write a device file from which `load_device` makes an equal device."""
    write_yaml(path, {FORMAT_KEY: f"device/{VERSIONS['device']}", **_device_data(device, 1)}, header)


@contextmanager
def _located(doc: Document, keys: Keys) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(str(error), where=doc.where(keys)) from None


def _nodes(doc: Document, keys: Keys, form: _NodeForm, alone: bool) -> Iterator[Node]:
    if form.count < 1:
        raise InputError(f"count is {form.count}; it must be at least 1", where=doc.where((*keys, "count")))
    host_memory, link, nic, devices = int(form.host_memory or 0), form.link, None, []
    nics = 1
    if form.instance:
        if form.devices:
            raise InputError("give either instance or devices", where=doc.where((*keys, "devices")))
        with _located(doc, (*keys, "instance")):
            shape = instance_named(form.instance)
            one = Device(**device_fields(shape.device))
        price = None if shape.price_per_hour is None else shape.price_per_hour / shape.size
        devices = [one.replace(price_per_hour=price)] * shape.size
        host_memory, link = host_memory or shape.host_memory_bytes, link or shape.link
        nics = shape.nics
        nic = Link(name=shape.nic, latency_s=nic_latency_s(shape.nic), bandwidth_Bps=shape.nic_gbps * GB / 8)
    else:
        several = isinstance(form.devices, tuple)
        for i, entry in enumerate(form.devices if isinstance(form.devices, tuple) else (form.devices,)):
            at = (*keys, "devices", i) if several else (*keys, "devices")
            with _located(doc, at):
                devices += _devices(_counted(entry) if isinstance(entry, str) else entry, Path(doc.path).parent)
    if not devices:
        raise InputError(f"node {form.name}: devices is empty", where=doc.where(keys))
    if form.count * len(devices) > MOST:
        raise InputError(f"{form.count:,} nodes of {len(devices):,} devices; a cluster has at most {MOST:,} devices",
                         where=doc.where(keys))
    with _located(doc, (*keys, "link")):
        inner = _link(link, "link") if isinstance(link, _LinkForm) else link_between(tuple(devices), link)
    with _located(doc, (*keys, "nic")):
        if form.nic:
            nic = _link(form.nic, "nic")
        elif nic is None and not alone:
            raise InputError(f"node {form.name} has no nic; give its rate, as in 'nic: {{bandwidth: 25 Gb/s, "
                             "latency: 10 us}'")
    for i in range(form.count):
        with _located(doc, keys):
            yield Node(name=form.name if form.count == 1 else f"{form.name}-{i}", devices=tuple(devices), link=inner,
                       nic=nic or inner.replace(name="nic"), nics=nics if form.nics is None else form.nics,
                       rack=form.rack, zone=form.zone, host_memory_bytes=host_memory,
                       host_Bps=float(form.host_bandwidth or 0))


FILES = (".yaml", ".yml")
"""Ends of names that are of device files, not of devices."""


def _started_from(name: str, folder: Path, inside: tuple[Path, ...]) -> dict[str, Any]:
    """The fields of a known device, or of the device file of that name (relative to `folder`)."""
    if not name.endswith(FILES):
        return dict(device_fields(name))
    found = _load_device(folder / name, inside)
    return {f: getattr(found, f) for f in found.__struct_fields__}


def _counted(text: str) -> _DeviceForm:
    """`8 x H100-SXM`, as `mixfleet show` prints it, or one device of that name."""
    found = re.fullmatch(r"(\d+) x (.+)", text)
    return _DeviceForm(device=found[2], count=int(found[1])) if found else _DeviceForm(device=text)


def _devices(form: _DeviceForm, folder: Path, inside: tuple[Path, ...] = ()) -> list[Device]:
    """`count` devices; names of device files are relative to `folder`."""
    if not 1 <= form.count <= MOST:
        raise InputError(f"count is {form.count}; it must be 1 to {MOST:,}")
    if form.device and form.base:
        raise InputError("give either device or base: both name what the device starts from")
    start = form.device or form.base
    given = {_FIELD.get(f, f): getattr(form, f) for f in form.__struct_fields__ if f not in ("device", "base", "count")}
    given = {k: v for k, v in given.items() if v is not None}
    base = _started_from(start, folder, inside) if start else {}
    if base and given.get("name", base["name"]) != base["name"]:
        base["base"] = base.get("base") or base["name"]
    for table in ("flops", "efficiency"):
        if table in given:
            given[table] = {**base.get(table, {}), **{k: float(v) for k, v in given[table].items()}}
    if isinstance(given.get("cores"), int):
        given["cores"] = (given["cores"],)
    if "block_times" in given:
        given["block_times"] = tuple(
            BlockTime(block=t.block, micro_batch=t.micro_batch, seq_len=t.seq_len, precision=t.precision,
                      forward_s=float(t.forward), backward_s=float(t.backward), tensor=t.tensor)
            for t in given["block_times"])
    if "kernel_times" in given:
        given["kernel_times"] = tuple(
            KernelTime(kind=t.kind, op=t.op, dtype=t.dtype, sizes=t.sizes, time_s=float(t.time))
            for t in given["kernel_times"])
    plain = {k: float(v) if isinstance(v, float) else int(v) if isinstance(v, _Bytes) else v for k, v in given.items()}
    fields = {**base, **plain}
    if "fp32" in fields.get("flops", {}):
        fields.setdefault("vector_flops", fields["flops"]["fp32"])
    missing = [k for k in ("name", "flops", "vector_flops", "memory_bytes", "memory_Bps") if k not in fields]
    if missing:
        keys = {v: k for k, v in _FIELD.items()}
        raise InputError(f"without a known 'device', {', '.join(repr(keys.get(k, k)) for k in missing)} must be given")
    return [Device(**fields)] * form.count


def link_between(devices: tuple[Device, ...], kind: str = "") -> Link:
    """The link inside a node by name (`nvlink`, `xgmi`, `pcie`, `loopback`); by default the fastest they have."""
    fast = min(d.link_Bps for d in devices)
    pcie = min(d.pcie_Bps for d in devices)
    fabric = "xgmi" if devices[0].vendor == "AMD" else "nvlink"
    if not kind:
        reach = min((n for d in devices if (n := link_peers(d.known_as)) is not None), default=len(devices))
        bridged_out = len(devices) > reach + 1
        kind = fabric if fast and not bridged_out else "pcie" if pcie else "loopback"
        if kind == "loopback" and any(d.kind != "cpu" for d in devices):
            raise InputError("the devices name no link of their own; give 'link: {bandwidth: ..., latency: ...}'")
    if kind == "loopback":
        return LOOPBACK
    rates = {fabric: (fast, NVLINK_LATENCY_S), "pcie": (pcie, PCIE_LATENCY_S)}
    if kind not in rates:
        raise unknown("link", kind, (*rates, "loopback"))
    rate, latency = rates[kind]
    if not rate:
        slow = next(d.name for d in devices if not (d.link_Bps if kind == fabric else d.pcie_Bps))
        raise InputError(f"link is {kind!r}, but device {slow} has none")
    return Link(name=kind, latency_s=latency, bandwidth_Bps=rate)


def _link(form: _LinkForm | str, name: str) -> Link:
    if isinstance(form, str):
        return Link(name=name, latency_s=NIC_LATENCY_S, bandwidth_Bps=parse_rate(form))
    return Link(name=form.name or name, latency_s=float(form.latency), bandwidth_Bps=float(form.bandwidth))


def _runs(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, int]]:
    """Nodes named `x-0`, `x-1`, ... that are otherwise equal, as one node `x` and their number."""
    i = 0
    while i < len(nodes):
        base, dash, number = nodes[i].name.rpartition("-")
        count = 0
        if dash and base and number == "0":
            while i + count < len(nodes) and nodes[i].replace(name=f"{base}-{count}") == nodes[i + count]:
                count += 1
        if count > 1:
            yield nodes[i].replace(name=base), count
        else:
            yield nodes[i], 1
        i += max(count, 1)


def _node_data(node: Node, count: int, alone: bool) -> dict[str, Any]:
    devices = [_device_data(d, len(list(same))) for d, same in groupby(node.devices)]
    data: dict[str, Any] = {"name": node.name}
    if count > 1:
        data["count"] = count
    data["devices"] = devices[0] if len(devices) == 1 else devices
    link = _link_name(node)
    if link is None:
        data["link"] = _link_data(node.link, "link")
    elif link:
        data["link"] = link
    if not (alone and node.nic == node.link.replace(name="nic")):
        data["nic"] = _link_data(node.nic, "nic", bits=True)
    if node.nics != 1:
        data["nics"] = node.nics
    if node.host_memory_bytes:
        data["host_memory"] = text_bytes(node.host_memory_bytes)
    if node.host_Bps:
        data["host_bandwidth"] = text_rate(node.host_Bps)
    return data | {key: getattr(node, key) for key in ("rack", "zone") if getattr(node, key)}


def _link_name(node: Node) -> str | None:
    """How the node's link is written: empty where it is the default, None where it has no name."""
    for kind in ("", "nvlink", "xgmi", "pcie", "loopback"):
        try:
            if link_between(node.devices, kind) == node.link:
                return kind
        except InputError:
            continue
    return None


def _link_data(link: Link, name: str, bits: bool = False) -> dict[str, Any]:
    data = {"bandwidth": text_rate(link.bandwidth_Bps, bits=bits), "latency": text_seconds(link.latency_s)}
    return data if link.name == name else {**data, "name": link.name}


def _device_data(device: Device, count: int) -> dict[str, Any]:
    base = device_fields(device.known_as) if device.known_as in names() and _complete(device.known_as) else {}
    lost = [k for k, v in base.items() if v is not None and getattr(device, k) is None]
    if lost or not set(base.get("flops", {})) <= set(device.flops):
        base = {}  # a file changes figures of a known device, but cannot take one away
    data: dict[str, Any] = {"device": device.name} if base else {"name": device.name}
    if base and device.base:
        data = {"base": device.base, "name": device.name}
    if count > 1:
        data["count"] = count
    usual = {f.name: f.default for f in msgspec.structs.fields(Device)} | base
    for key in _DeviceForm.__struct_fields__[4:]:
        value = getattr(device, _FIELD.get(key, key))
        default = usual.get(_FIELD.get(key, key))
        if value == default or (not value and default is msgspec.NODEFAULT):
            continue
        if key == "flops":
            value = {k: text_flops(v) for k, v in value.items() if base.get("flops", {}).get(k) != v}
        elif key == "block_times":
            value = [{"block": t.block, "micro_batch": t.micro_batch, "seq_len": t.seq_len, "precision": t.precision,
                      "forward": text_seconds(t.forward_s), "backward": text_seconds(t.backward_s),
                      **({"tensor": t.tensor} if t.tensor != 1 else {})} for t in value]
        elif key == "kernels":
            value = [{"kind": t.kind, "op": t.op, "dtype": t.dtype,
                      "sizes": {k: int(v) if v == int(v) else v for k, v in t.sizes.items()},
                      "time": text_seconds(t.time_s)} for t in value]
        data[key] = _TEXT[key](value) if key in _TEXT else value
    return data


def _complete(name: str) -> bool:
    try:
        return bool(device_fields(name))
    except InputError:
        return False
