"""Known machine shapes: devices, the link between them, network adapters, host memory, list price.

Network rates are per direction and for the adapters that collectives use. Prices are on-demand list prices per hour of
the whole machine with region and date, and None where we are not sure: prices change, so write your own in the
cluster file.
"""

from __future__ import annotations

from typing import NamedTuple

from mixfleet.errors import unknown
from mixfleet.units import GB, GiB

NIC_LATENCY_S = 7e-6
"""Per adapter passed, two per transfer. Source: 14 us per hop, ring and simple protocol, in NCCL's tuning table."""
NIC_LATENCIES_S = (("efa 1", 32e-6), ("efa", 14e-6), ("slingshot", 6e-6))
"""Of other networks, by a word of their name: medians of NCCL calls below 1 MB, which go through libfabric. EFA's first
generation is that of machines with 100 Gb/s adapters."""


def nic_latency_s(name: str) -> float:
    """Latency of an adapter on a network of this name."""
    return next((seconds for word, seconds in NIC_LATENCIES_S if word in name.lower()), NIC_LATENCY_S)


class Instance(NamedTuple):
    """One machine shape with `size` devices. `nic_gbps` is in Gb/s."""

    device: str
    size: int
    nic_gbps: float
    host_memory_bytes: int
    source: str
    price_per_hour: float | None = None
    link: str = ""
    """`nvlink` or `pcie` where the device's default is not what the machine has."""
    nics: int = 1
    """Adapters for collectives, each next to as many devices; those that one device has to itself count as one."""
    nic: str = "nic"
    """Name of the adapters, which tells their latency and the part of their rate that transfers reach."""


_AWS = "AWS EC2 instance type page"
_AWS_PRICE = f"{_AWS}; on-demand list price us-east-1, Linux, 2024"
_GCP = "Google Cloud GPU machine types page"
_AZURE = "Azure VM sizes page"
_OCI = "Oracle Cloud compute shapes page"
_NV = "NVIDIA system data sheet"

INSTANCES: dict[str, Instance] = {
    "p3.8xlarge": Instance("V100-SXM2-16GB", 4, 10, 244 * GiB, _AWS_PRICE, 12.24),
    "p3.16xlarge": Instance("V100-SXM2-16GB", 8, 25, 488 * GiB, _AWS_PRICE, 24.48),
    "p3dn.24xlarge": Instance("V100-SXM2-32GB", 8, 100, 768 * GiB, _AWS_PRICE, 31.212, nic="EFA 1"),
    "p4d.24xlarge": Instance("A100-SXM4-40GB", 8, 400, 1152 * GiB, _AWS_PRICE, 32.7726, nics=4, nic="EFA 1"),
    "p4de.24xlarge": Instance("A100-SXM4-80GB", 8, 400, 1152 * GiB, _AWS_PRICE, 40.9657, nics=4, nic="EFA 1"),
    "p5.48xlarge": Instance("H100-SXM", 8, 3200, 2048 * GiB, _AWS_PRICE, 98.32, nics=8, nic="EFA 2"),
    "p5e.48xlarge": Instance("H200-SXM", 8, 3200, 2048 * GiB, _AWS, nics=8, nic="EFA 2"),
    "p5en.48xlarge": Instance("H200-SXM", 8, 3200, 2048 * GiB, _AWS, nics=8, nic="EFA 3"),
    "p6-b200.48xlarge": Instance("B200-SXM", 8, 3200, 2048 * GiB, _AWS, nics=8, nic="EFA 4"),
    "g4dn.12xlarge": Instance("T4", 4, 50, 192 * GiB, _AWS_PRICE, 3.912),
    "g4dn.metal": Instance("T4", 8, 100, 384 * GiB, _AWS_PRICE, 7.824),
    "g5.12xlarge": Instance("A10G", 4, 40, 192 * GiB, _AWS_PRICE, 5.672),
    "g5.48xlarge": Instance("A10G", 8, 100, 768 * GiB, _AWS_PRICE, 16.288),
    "g6.12xlarge": Instance("L4", 4, 40, 192 * GiB, _AWS_PRICE, 4.6016),
    "g6.48xlarge": Instance("L4", 8, 100, 768 * GiB, _AWS_PRICE, 13.3504),
    "g6e.12xlarge": Instance("L40S", 4, 100, 384 * GiB, _AWS),
    "g6e.48xlarge": Instance("L40S", 8, 400, 1536 * GiB, _AWS),
    "a2-highgpu-8g": Instance("A100-SXM4-40GB", 8, 100, 680 * GB, _GCP),
    "a2-megagpu-16g": Instance("A100-SXM4-40GB", 16, 100, 1360 * GB, _GCP),
    "a2-ultragpu-8g": Instance("A100-SXM4-80GB", 8, 100, 1360 * GB, _GCP),
    "a3-highgpu-8g": Instance("H100-SXM", 8, 800, 1872 * GB, f"{_GCP}: four 200 Gb/s adapters for the GPUs", nics=4),
    "a3-megagpu-8g": Instance("H100-SXM", 8, 1600, 1872 * GB, f"{_GCP}: eight 200 Gb/s adapters for the GPUs", nics=8),
    "a3-ultragpu-8g": Instance("H200-SXM", 8, 3200, 2952 * GB, f"{_GCP}: eight 400 Gb/s adapters for the GPUs", nics=8),
    "g2-standard-48": Instance("L4", 4, 50, 192 * GB, _GCP),
    "g2-standard-96": Instance("L4", 8, 100, 384 * GB, _GCP),
    "Standard_ND96asr_v4": Instance("A100-SXM4-40GB", 8, 1600, 900 * GiB, f"{_AZURE}: 200 Gb/s InfiniBand per GPU",
                                     nics=8),
    "Standard_ND96amsr_A100_v4": Instance("A100-SXM4-80GB", 8, 1600, 1900 * GiB,
                                          f"{_AZURE}: 200 Gb/s InfiniBand per GPU", nics=8),
    "Standard_ND96isr_H100_v5": Instance("H100-SXM", 8, 3200, 1900 * GiB, f"{_AZURE}: 400 Gb/s InfiniBand per GPU",
                                          nics=8),
    "Standard_ND40rs_v2": Instance("V100-SXM2-32GB", 8, 100, 672 * GiB, f"{_AZURE}: EDR InfiniBand"),
    "Standard_NC96ads_A100_v4": Instance("A100-PCIe-80GB", 4, 80, 880 * GiB, _AZURE, link="pcie"),
    "Standard_NC24rs_v3": Instance("V100-PCIe-16GB", 4, 56, 448 * GiB, f"{_AZURE}: FDR InfiniBand"),
    "BM.GPU4.8": Instance("A100-SXM4-40GB", 8, 1600, 2048 * GiB, f"{_OCI}: RDMA network", nics=8),
    "BM.GPU.H100.8": Instance("H100-SXM", 8, 3200, 2048 * GiB, f"{_OCI}: RDMA network", nics=8),
    "DGX-1V": Instance("V100-SXM2-32GB", 8, 400, 512 * GB, f"{_NV}: four EDR InfiniBand ports", nics=4),
    "DGX-A100": Instance("A100-SXM4-80GB", 8, 1600, 2000 * GB, f"{_NV}: eight 200 Gb/s ports for the GPUs", nics=8),
    "DGX-H100": Instance("H100-SXM", 8, 3200, 2000 * GB, f"{_NV}: eight 400 Gb/s ports for the GPUs", nics=8),
    "DGX-H200": Instance("H200-SXM", 8, 3200, 2000 * GB, f"{_NV}: eight 400 Gb/s ports for the GPUs", nics=8),
    "HGX-B200": Instance("B200-SXM", 8, 3200, 2000 * GB, f"{_NV}: DGX B200, eight 400 Gb/s ports for the GPUs", nics=8),
}


def instance_named(name: str) -> Instance:
    """A known machine shape, without regard to case; InputError with the nearest names otherwise."""
    known = next((k for k in INSTANCES if k.lower() == name.lower()), None)
    if known is None:
        raise unknown("instance", name, INSTANCES)
    return INSTANCES[known]
