"""What this machine offers for a testbed, and what is done without the rest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from mixfleet.spec import Spec

QDISCS = {"tbf": "rate 1mbit burst 10kb latency 50ms", "htb": "default 1", "netem": "delay 1ms"}
_PROBE = """
ip link add mfprobe0 type veth peer name mfprobe1 || exit 9
ip link add mfprobe2 type bridge || exit 8
""" + "\n".join(f"tc qdisc add dev mfprobe0 root {name} {rest} && echo {name} && tc qdisc del dev mfprobe0 root"
                for name, rest in QDISCS.items())


class Support(Spec, frozen=True, kw_only=True):
    """What there is. Paths of cgroup hierarchies are empty where there are none."""

    root: bool
    tools: tuple[str, ...] = ()
    """Those of `ip` and `tc` that are missing."""
    links: str = ""
    """Why namespaces with veth pairs on a bridge cannot be had; empty if they can."""
    qdiscs: tuple[str, ...] = ()
    cpu: str = ""
    memory: str = ""
    unified: bool = False
    """Both are one hierarchy, of version 2."""
    cores: tuple[int, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What a testbed cannot do without."""
        found = [] if self.root else ["root is needed to make network namespaces and cgroups"]
        found += [f"`{tool}` is not installed (package iproute2)" for tool in self.tools]
        found += [self.links] if self.links else []
        if self.root and not self.tools and not self.links and "tbf" not in self.qdiscs:
            found.append("this kernel has no queueing discipline tbf, so no link can be slowed")
        return tuple(found)

    @property
    def instead(self) -> tuple[str, ...]:
        """What is done differently here, for people."""
        found = []
        if "netem" not in self.qdiscs:
            found.append("no netem: links are not delayed; predictions take the latency that is measured")
        if not self.cpu:
            found.append("no cgroup for CPU time: slow devices are stopped and continued in turn (coarser)")
        if not self.memory:
            found.append("no cgroup for memory: memory is not limited")
        return tuple(found)


def probe() -> Support:
    """Look, and try each queueing discipline in a namespace of its own that is gone afterwards."""
    root = sys.platform == "linux" and os.geteuid() == 0
    tools = tuple(tool for tool in ("ip", "tc") if not shutil.which(tool))
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    if not root or tools:
        return Support(root=root, tools=tools, cores=cores)
    run = subprocess.run(["unshare", "--net", "sh", "-c", _PROBE], capture_output=True, text=True)
    why = {9: "this kernel cannot make veth pairs", 8: "this kernel cannot make bridges"}
    links = why.get(run.returncode, "")
    if not links and run.stderr.startswith("unshare"):
        links = f"no network namespaces here: {run.stderr.strip()}"
    cpu, memory, unified = _cgroups()
    return Support(root=True, links=links, qdiscs=tuple(run.stdout.split()), cpu=cpu, memory=memory, unified=unified,
                   cores=cores)


def _cgroups() -> tuple[str, str, bool]:
    """Roots of the hierarchies of `cpu` and `memory` in which this process can make groups, and whether version 2."""
    found = {"cpu": "", "memory": ""}
    unified = False
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup":
            found |= {name: where for name in found if name in options.split(",")}
        elif kind == "cgroup2" and not any(found.values()):
            here = Path(where, "cgroup.controllers").read_text().split()
            if {"cpu", "memory"} <= set(here):
                found, unified = {"cpu": where, "memory": where}, True
    usable = {name: where if where and os.access(where, os.W_OK) else "" for name, where in found.items()}
    return usable["cpu"], usable["memory"], unified
