"""What a training process asks of its operating system."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_KEEP = 2**31 - 1


def keep_memory() -> None:
    """Let glibc keep freed activations instead of handing them back and faulting them in again at every block.

    On a CPU that takes about 7 % off a training step. Elsewhere than on glibc nothing happens.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_TRIM_THRESHOLD, _KEEP)


def calm_network_threads() -> None:
    """Let gloo's threads wait for their turn instead of interrupting others. For ranks that compute on CPUs.

    gloo's thread that waits for messages skips a pair of sockets that another thread holds, and looks again at once:
    if it interrupts a thread in the middle of sending, it spins until the scheduler takes its turn away, 2 to 4 ms
    later. As batch work (sched(7)) it does not interrupt: on a shared core, a swap of a few bytes takes 0.3 ms instead
    of 4, and on a core of their own ranks that exchange gradients behind backward spin no more. Where a core is free,
    it goes there at once as before. Groups that are made later are not reached.
    """
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if hasattr(os, "SCHED_BATCH") and tasks.exists() else ():
        with suppress(OSError):  # it has ended meanwhile, or may not be changed
            if (task / "comm").read_text().startswith("gloo_"):
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


class CoreUse(NamedTuple):
    """What one process saw of the cores that it may use, over some time."""

    host: str
    busy_s: dict[int, float]
    """Per core, the seconds in which anybody used it."""
    own_s: float
    """CPU time of this process."""
    wall_s: float


class CoreWatch:
    """Looks at the cores of this process from now on. Only Linux says how busy they are."""

    def __init__(self) -> None:
        self._busy, self._own, self._wall = _busy_s(), time.process_time(), time.perf_counter()

    def use(self) -> CoreUse:
        now = _busy_s()
        busy = {core: now[core] - begin for core, begin in self._busy.items() if core in now}
        return CoreUse(socket.gethostname(), busy,
                       time.process_time() - self._own, time.perf_counter() - self._wall)


def _busy_s() -> dict[int, float]:
    """Seconds that each core that this process may use was not idle, since the machine started (proc_stat(5)); time
    that a hypervisor took counts too."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return {}
    mine, tick_s, found = os.sched_getaffinity(0), 1 / os.sysconf("SC_CLK_TCK"), {}
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in mine:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            found[int(name[3:])] = (user + nice + system + irq + softirq + steal) * tick_s
    return found


def foreign(uses: Iterable[CoreUse]) -> float:
    """The part of their cores that others than these processes took, on the host where that is most."""
    hosts: dict[str, list[CoreUse]] = {}
    for use in uses:
        hosts.setdefault(use.host, []).append(use)
    worst = 0.0
    for mine in hosts.values():
        busy_s = sum({core: s for use in mine for core, s in use.busy_s.items()}.values())
        cores, wall_s = len({core for use in mine for core in use.busy_s}), max(use.wall_s for use in mine)
        if cores and wall_s > 0:
            worst = max(worst, (busy_s - sum(use.own_s for use in mine)) / (cores * wall_s))
    return worst
