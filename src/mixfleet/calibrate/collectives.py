"""Measured collectives beside their predictions: rows of a file as groups of ranks in a cluster.

Columns are those of `kernels/collectives.parquet`: `op`, `gpu`, `library`, `algorithm`, `nodes`, `ranks`, `bytes`
(the full buffer), `interconnect`, `time_us`. NCCL's own choice of algorithm is what is predicted; fused kernels of
inference engines and expert dispatch are not.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mixfleet.calibrate import validate as validation
from mixfleet.catalog.instances import nic_latency_s
from mixfleet.cluster import Cluster, Link, Node, device_named
from mixfleet.cluster_file import PCIE_LATENCY_S, link_between
from mixfleet.cost import network
from mixfleet.errors import InputError
from mixfleet.units import GB

COLUMNS = ("source", "gpu", "op", "library", "algorithm", "nodes", "ranks", "bytes", "interconnect", "time_us")
SENDS = ("send_recv",)
INTERVAL = 0.75, 1.25


class Measured(NamedTuple):
    """One measured call."""

    where: int
    source: str
    gpu: str
    fabric: str
    op: str
    nodes: int
    ranks: int
    nbytes: float
    wires: str
    time_s: float


def read(path: Path) -> tuple[list[Measured], Counter[str]]:
    """Rows that can be predicted, and why others cannot. InputError names missing columns."""
    import pandas

    frame: Any = pandas.read_parquet(path) if path.suffix == ".parquet" else pandas.read_csv(path)
    if missing := [c for c in COLUMNS if c not in frame.columns]:
        raise InputError(f"has no column {', '.join(missing)}; collectives need {', '.join(COLUMNS)}", where=str(path))
    found, skipped = [], Counter[str]()
    for i, row in enumerate(frame[list(COLUMNS)].astype(object).fillna("").itertuples(index=False)):
        why = _why_not(row)
        if why:
            skipped[why] += 1
            continue
        found.append(Measured(i, row.source, row.gpu, fabric(row.interconnect, row.nodes), row.op, int(row.nodes),
                              int(row.ranks), float(row.bytes), row.interconnect, row.time_us * 1e-6))
    return found, skipped


def _why_not(row: Any) -> str:
    if row.op not in (*network.OPS, *SENDS):
        return f"{row.op} is not a collective of the cost model"
    if not re.search(r"n?ccl", str(row.library).lower()) or row.algorithm:
        return "not NCCL's own choice of algorithm"
    if not row.time_us > 0 or not row.bytes > 0:
        return "bytes or time is not positive"
    if row.ranks < 2 or row.ranks % row.nodes:
        return "ranks are not spread evenly over nodes"
    if row.nodes > 1 and not nic_gbit(row.interconnect, row.gpu):
        return "the network between nodes is not stated"
    if row.op in SENDS and row.ranks > 2:
        return "send_recv in a ring of more than two"
    try:
        cluster_of(row.gpu, 1, 1 if row.nodes > 1 else int(row.ranks), row.interconnect)
    except InputError as error:
        return f"{row.gpu}: {str(error).partition(';')[0]}"
    return ""


def fabric(wires: str, nodes: int) -> str:
    """What leave-one-out leaves out: the slowest kind of link that a group uses, with its generation."""
    if nodes > 1:
        kinds = ("EFA", "RoCE", "IB", "Slingshot", "MNNVL", "RDMA", "AINIC")
        return next((k for k in kinds if re.search(rf"\b{k}", wires)), "network")
    found = re.match(r"pairwise|NVLink\d|PCIe\d|xGMI|Infinity", wires)
    return found[0] if found else wires


def nic_gbit(wires: str, gpu: str) -> float:
    """Gb/s of a node's adapters together: as stated, or the reference design where the kind of network is; 0 if open.
    """
    if found := re.search(r"(\d+)x(\d+)G", wires):
        return float(found[1]) * float(found[2])
    if found := re.search(r"(\d+)G/node", wires):
        return float(found[1])
    if re.search(r"\bIB|RDMA|RoCE|EFA|Slingshot", wires):
        return 800.0 if "Slingshot" in wires else 3200.0 if gpu[:2] in ("H1", "H2", "B2", "B3") else 0.0
    return 0.0


@cache
def cluster_of(gpu: str, nodes: int, per_node: int, wires: str) -> Cluster:
    """The nodes of a measurement with all their devices, of which a group may use some."""
    device = device_named(gpu)
    pcie = Link(name="pcie", latency_s=PCIE_LATENCY_S, bandwidth_Bps=device.pcie_Bps or 16 * GB)
    pair = "pairwise" in wires and per_node > 2
    link = pcie if wires.startswith("PCIe") or pair else link_between((device,) * per_node) \
        if not wires.startswith(("NVLink", "pairwise")) else link_between((device,) * per_node, "nvlink")
    gbit = nic_gbit(wires, gpu) or 100.0
    size = max(per_node, 4 if "Slingshot" in wires and gpu.startswith("GH") else 8) if nodes > 1 else per_node
    name = next((known for known in ("EFA", "Slingshot") if known in wires), "nic")
    name += " 1" if re.search(r"EFA \d+x100G", wires) else ""
    return Cluster(name="measured", nodes=tuple(
        Node(name=f"n{i}", devices=(device,) * size, link=link, nics=size,
             nic=Link(name=name, latency_s=nic_latency_s(name), bandwidth_Bps=gbit * GB / 8)) for i in range(nodes)))


def predicted_s(row: Measured) -> float:
    """Seconds of the call by `cost.network`."""
    per_node = row.ranks // row.nodes
    cluster = cluster_of(row.gpu, row.nodes, per_node, row.wires)
    group = tuple(r for ranks in cluster.ranks_of_node for r in ranks[:per_node])
    if row.op in SENDS:
        return network.send(row.nbytes, group[0], group[-1], cluster).alone_s
    return network.collective(row.op, row.nbytes, group, cluster).alone_s  # type: ignore[arg-type]


def validate(path: Path) -> validation.Result:
    """Every NCCL call of the file beside its prediction, by source and GPU."""
    measured, skipped = read(path)
    low, high = INTERVAL
    rows = []
    for m in measured:
        seconds = predicted_s(m)
        rows.append(validation.Row(m.where, m.source, m.gpu, f"{m.op} {m.fabric}", m.time_s, seconds, low * seconds,
                                   high * seconds, seconds, "link"))
    return validation.result(path, rows, dict(skipped.most_common()))
