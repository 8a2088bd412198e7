"""The cluster file of the machine that we run on: its GPUs, or else its cores as devices."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mixfleet.calibrate.pinned import Cores, available_cores
from mixfleet.catalog.devices import PCIE_BPS_PER_LANE, names
from mixfleet.cluster import Cluster, Device, Node, device_named
from mixfleet.cluster_file import LOOPBACK, link_between
from mixfleet.errors import InputError
from mixfleet.units import MiB

_DRIVER_NAMES = {
    "A100 80GB PCIe": "A100-PCIe-80GB", "A100-PCIE-80GB": "A100-PCIe-80GB", "H100 80GB HBM3": "H100-SXM",
    "H200": "H200-SXM", "H800": "H800-SXM", "B200": "B200-SXM", "B300": "B300-SXM", "B300 SXM6 AC": "B300-SXM",
    "GH200 480GB": "GH200-96GB", "GH200 144G HBM3e": "GH200-144GB", "RTX A6000": "A6000",
    "RTX PRO 6000 Blackwell Server Edition": "RTXPRO6000-SE", "GTX TITAN X": "TitanX-Maxwell",
    "TITAN X (Pascal)": "TitanX-Pascal",
}
"""Names of drivers that are not spelled like the catalog's."""
_LANES = 128
"""fp32 lanes of a multiprocessor since Ampere."""
ALIKE = 0.25
"""Cores whose measured rates differ by less than this part count as equal: the rest is noise."""


def discover(ranks: Sequence[Cores] | None = None, *, measure: bool = True) -> Cluster:
    """Describe this machine.

    NVIDIA GPUs are taken from the driver, and their figures from the catalog. Without GPUs, or if `ranks` is given,
    the devices are CPU processes: one per core, or one per entry of `ranks`, which names its cores; processes on the
    same core share it equally. Their figures are measured if `measure` and torch is there, else stated defaults;
    `Device.source` says which. Raises InputError for cores that this process may not use.
    """
    cards, nvlink = ([], False) if ranks is not None else gpus()
    host = platform.node().split(".")[0] or "local"
    memory = available_memory_bytes()
    if cards:
        link = link_between(tuple(cards), "" if nvlink else "pcie")
        node = Node(name=host, devices=tuple(cards), link=link, nic=link.replace(name="nic"), host_memory_bytes=memory)
        return Cluster(name=host, nodes=(node,))
    cores = available_cores()
    ranks = [tuple(r) for r in ranks] if ranks is not None else [(c,) for c in cores]
    _check_ranks(ranks, cores)
    link = LOOPBACK
    measured: list[dict[str, float]] = []
    why = "as asked"
    if measure:
        from mixfleet.calibrate.kernels import measure_machine

        try:
            figures, link = measure_machine(ranks)
            measured = _evened(figures, [len(r) for r in ranks])
        except InputError as error:
            why = str(error)
    users = Counter(core for r in ranks for core in r)
    each = memory // len(ranks) // MiB * MiB
    devices = tuple(
        _cpu(r, measured[i] if measured else {}, why).replace(
            cores=r, share=sum(1 / users[c] for c in r) / len(r), memory_bytes=each) for i, r in enumerate(ranks))
    node = Node(name=host, devices=devices, link=link, nic=link.replace(name="nic"), host_memory_bytes=memory)
    return Cluster(name=host, nodes=(node,))


def _check_ranks(ranks: Sequence[Cores], cores: Cores) -> None:
    if not ranks:
        raise InputError("ranks is empty; give the cores of at least one process, as in '0 1 1'")
    for rank in ranks:
        outside = [c for c in rank if c not in cores]
        if outside or not rank:
            raise InputError(f"ranks names core {outside[0] if outside else 'none'}; this process may use "
                             f"{', '.join(map(str, cores))}")


def _cpu(cores: Cores, figures: dict[str, float], why_not_measured: str) -> Device:
    base = core_device()
    if not figures:
        n = len(cores)
        return base.replace(flops={k: v * n for k, v in base.flops.items()}, vector_flops=base.vector_flops * n,
                            source=f"{base.source}; not measured: {why_not_measured}")
    flops = {k: figures[k] for k in ("fp64", "fp32", "bf16")}
    return base.replace(flops=flops, vector_flops=flops["fp32"], memory_Bps=figures["memory_Bps"],
                        launch_s=figures["launch_s"], source="measured by mixfleet discover")


def core_device() -> Device:
    """A core of this machine with the stated defaults."""
    return device_named("cpu").replace(arch=_cpu_model())


def _evened(figures: list[dict[str, float]], cores: list[int]) -> list[dict[str, float]]:
    """Figures rounded to 3 digits; entries with equally many cores and nearly the same rates get their mean."""
    groups: list[list[int]] = []
    for i, mine in enumerate(figures):
        for group in groups:
            first = figures[group[0]]
            rates = [k for k in mine if k != "launch_s"]
            if cores[group[0]] == cores[i] and all(abs(mine[k] - first[k]) <= ALIKE * first[k] for k in rates):
                group.append(i)
                break
        else:
            groups.append([i])
    means = {i: {k: _digits(sum(figures[j][k] for j in group) / len(group)) for k in figures[i]}
             for group in groups for i in group}
    return [means[i] for i in range(len(figures))]


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())


def available_memory_bytes() -> int:
    """Free memory now, or the limit of the container if that is less."""
    try:
        info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(info["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError, ValueError):
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free // MiB * MiB


def gpus() -> tuple[list[Device], bool]:
    """The GPUs of this machine, and whether NVLink joins them (assumed where the driver is not asked)."""
    try:
        import pynvml
    except ImportError:
        return _torch_gpus(), True
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], False
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_nvml_gpu(pynvml, h) for h in handles], all(_has_nvlink(pynvml, h) for h in handles)
    finally:
        pynvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, handle: Any) -> Device:
    name = nvml.nvmlDeviceGetName(handle)
    return gpu_from_driver(
        name.decode() if isinstance(name, bytes) else name, nvml.nvmlDeviceGetMemoryInfo(handle).total,
        sm_count=nvml.nvmlDeviceGetNumGpuCores(handle) // _LANES,
        clock_Hz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        memory_Bps=(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6 * 2
                    * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8),
        pcie=(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)))


def _has_nvlink(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, 0) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:
        return False


def _torch_gpus() -> list[Device]:
    if not find_spec("torch"):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append(gpu_from_driver(
            p.name, p.total_memory, sm_count=p.multi_processor_count, clock_Hz=getattr(p, "clock_rate", 0) * 1e3,
            memory_Bps=getattr(p, "memory_clock_rate", 0) * 1e3 * 2 * getattr(p, "memory_bus_width", 0) / 8))
    return found


def gpu_from_driver(name: str, memory_bytes: int, *, sm_count: int = 0, clock_Hz: float = 0.0, memory_Bps: float = 0.0,
                    pcie: tuple[int, int] | None = None) -> Device:
    """The catalog's device for a driver's name, else one with what the driver tells.

    Memory is the smaller figure: a driver counts some that programs do not get. A device that is not in the catalog
    has fp32 only (128 lanes per multiprocessor, 2 FLOP per cycle), and its source says so.
    """
    known = catalog_name(name)
    if known:
        device = device_named(known)
        return device.replace(memory_bytes=min(memory_bytes, device.memory_bytes))
    if not (sm_count and clock_Hz and memory_Bps):
        raise InputError(f"GPU {name!r} is not in the catalog and the driver does not tell its rates; describe it in "
                         "the cluster file by flops, memory and memory_bandwidth")
    fp32: dict[str, Any] = {"fp32": sm_count * _LANES * 2 * clock_Hz}
    rate = PCIE_BPS_PER_LANE.get(pcie[0], 0.0) * pcie[1] if pcie else 0.0
    return Device(name=name, vendor="NVIDIA", flops=fp32, vector_flops=fp32["fp32"], memory_bytes=memory_bytes,
                  memory_Bps=memory_Bps, sm_count=sm_count, pcie_Bps=rate,
                  source="driver; not in the catalog: matrix units are unknown, so only the fp32 rate is given")


def catalog_name(driver_name: str) -> str | None:
    """The catalog's name for what a driver calls a GPU: `Tesla V100-SXM2-32GB`, `NVIDIA GeForce RTX 4090`."""
    shown = driver_name
    for word in ("NVIDIA", "GeForce", "Tesla", "AMD", "Instinct", "Generation"):
        shown = shown.replace(word, "")
    shown = " ".join(shown.split())
    return _DRIVER_NAMES.get(shown) or next((n for n in names() if n != "cpu" and _bare(n) == _bare(shown)), None)


def _bare(name: str) -> str:
    return "".join(c for c in name.upper() if c.isalnum())
