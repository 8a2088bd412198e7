"""Making a testbed, putting processes into it, reading its counters, and leaving nothing behind.

A state file is written before anything is made, and names follow from its id, so whatever a crash leaves is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, RunError, unknown
from mixfleet.spec import Spec
from mixfleet.testbed import metronome
from mixfleet.testbed.kernel import Support, probe
from mixfleet.testbed.layout import SYSCTLS, Layout, Seat, Wire, laid_out, period_us, pids, realised, rule

LATENCY_S = 60e-6
"""Of a NIC of the testbed without netem, before anything is measured: half of what a small message takes."""
_CLONE_NEWNET = 0x40000000


class State(Spec, frozen=True, kw_only=True):
    """What the state file says."""

    layout: Layout
    cluster: str
    """Name of the cluster."""
    owner: int
    """Process whose end ends the testbed; 0 if it stays until `down`."""
    started: str = ""
    """Start time of the owner, as a process number comes back."""
    cpu: str = ""
    """Folder of its cgroups for CPU time; empty where there is none."""
    memory: str = ""
    note: str = ""
    """What every report has to say, such as that GPUs are emulated."""

    @property
    def abandoned(self) -> bool:
        return bool(self.owner) and _started(self.owner) != self.started


def folder() -> Path:
    """Where state files lie."""
    return Path("/run/mixfleet") if os.geteuid() == 0 else Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"), "mixfleet")


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Enter(Spec, frozen=True, kw_only=True):
    """Takes the calling process to the seat of a rank. It pickles, and needs nothing but the standard library."""

    seats: tuple[Seat, ...]
    groups: tuple[tuple[str, ...], ...]
    """Per rank: files to which a process is written to be in its cgroups."""
    throttle: bool = False
    """There is no cgroup for CPU time: a companion stops and continues the process in turn."""

    def __call__(self, rank: int) -> None:
        seat = self.seats[rank]
        self.outside(rank)
        for path in self.groups[rank]:
            Path(path).write_text(str(os.getpid()))
        if seat.cores:
            os.sched_setaffinity(0, seat.cores)
        if self.throttle and seat.quota:
            _companion(os.getpid(), seat.quota)

    def outside(self, rank: int) -> None:
        """To the network of its node only: no quota, no limit, no core."""
        seat = self.seats[rank]
        with open(f"/run/netns/{seat.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {seat.namespace}")
        os.environ |= self.environment

    @property
    def environment(self) -> dict[str, str]:
        """For programs that are started at a seat."""
        return {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}

    def only(self, ranks: Sequence[int]) -> Enter:
        """Of some of the seats, numbered anew."""
        return self.replace(seats=tuple(self.seats[r] for r in ranks), groups=tuple(self.groups[r] for r in ranks))


def _companion(pid: int, quota: float) -> None:
    """A child that stops and continues `pid` so that it runs for `quota` of the time, as long as it lives."""
    if os.fork():
        return
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == pid:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02 * quota)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02 * (1 - quota))
    os._exit(0)


class Testbed:
    """A testbed that exists. Leave it with `down`, or use it as a context."""

    def __init__(self, state: State, support: Support) -> None:
        self.state, self.support, self.layout = state, support, state.layout
        self._beats: list[subprocess.Popen[bytes]] = []

    # --- making and removing -------------------------------------------------------------------------------------

    @classmethod
    def up(cls, cluster: Cluster, *, keep: bool = False, support: Support | None = None, note: str = "") -> Testbed:
        """Make it. With `keep` it outlives this process. What earlier processes left behind is removed first.

        InputError for a cluster that this machine cannot be, RunError if the machine refuses a step.
        """
        support = support or probe()
        if support.missing:
            raise InputError("a testbed cannot be made here: " + "; ".join(support.missing))
        leftovers(remove=True)
        identity = secrets.token_hex(3)
        layout = laid_out(cluster, identity, support)
        name = f"mixfleet-{identity}"
        me = os.getpid()
        state = State(layout=layout, cluster=cluster.name, owner=0 if keep else me, started=_started(me), note=note,
                      cpu=support.cpu and f"{support.cpu}/{name}", memory=support.memory and f"{support.memory}/{name}")
        _write(state)
        bed = cls(state, support)
        try:
            bed._make()
        except BaseException:
            bed.down()
            raise
        return bed

    @staticmethod
    def named(identity: str) -> Testbed:
        """The one with this id; InputError if there is none."""
        known = {s.layout.id: s for s in testbeds()}
        if identity not in known:
            raise unknown("testbed", identity, known) if known else InputError("there are no testbeds here")
        return Testbed(known[identity], probe())

    def _make(self) -> None:
        spaces, *rest = self.layout.commands()
        _batch(*spaces)
        for ns in (self.layout.switch, *self.layout.nodes.values()):
            _write_sysctls(ns, SYSCTLS)
        for program, namespace, lines in rest:
            if lines:
                _batch(program, namespace, lines)
        if self.support.unified and self.state.cpu:
            root = Path(self.support.cpu, "cgroup.subtree_control")
            if not {"cpu", "memory"} <= set(root.read_text().split()):
                root.write_text("+cpu +memory")
        for group in {self.state.cpu, self.state.memory} - {""}:
            Path(group).mkdir()
            if self.support.unified:
                Path(group, "cgroup.subtree_control").write_text("+cpu +memory")
        if self.state.cpu:  # as a whole it weighs as much as its ranks would one by one
            weight, each = ("cpu.weight", 100) if self.support.unified else ("cpu.shares", 1024)
            Path(self.state.cpu, weight).write_text(str(min(each * len(self.layout.seats), 10_000)))
        for seat in self.layout.seats:
            for mine in self._groups(seat.rank):
                mine.mkdir(exist_ok=True)
            self.set_quota(seat.rank, seat.quota)
            if self.state.memory and seat.memory_bytes:
                limit = "memory.max" if self.support.unified else "memory.limit_in_bytes"
                Path(self.state.memory, f"r{seat.rank}", limit).write_text(str(seat.memory_bytes))
        self._beat()

    def _beat(self) -> None:
        """A metronome for every core of a rank with a quota; where real-time priority is refused, it ends at once."""
        slow = [seat for seat in self.layout.seats if seat.quota] if self.state.cpu else []
        cores = {core for seat in slow for core in seat.cores or self.support.cores}
        path = str(folder() / f"{self.layout.id}.json")
        self._beats = [subprocess.Popen(
            [sys.executable, "-I", "-S", metronome.__file__, str(core), path, str(self.state.owner)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            for core in sorted(cores)]

    def _groups(self, rank: int) -> list[Path]:
        return [Path(group, f"r{rank}") for group in sorted({self.state.cpu, self.state.memory} - {""})]

    def down(self) -> None:
        """End its processes and remove all of it; what is gone already does not matter."""
        until = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for ns in (self.layout.switch, *self.layout.nodes.values()):
            subprocess.run(["ip", "netns", "del", ns], capture_output=True)
        for group in {self.state.cpu, self.state.memory} - {""}:
            for path in (*sorted(Path(group).glob("r*")), Path(group)):
                for _ in range(50):
                    try:
                        path.rmdir()
                    except FileNotFoundError:
                        pass
                    except OSError:  # a process that has just ended may still be counted
                        time.sleep(0.02)
                        continue
                    break
        (folder() / f"{self.layout.id}.json").unlink(missing_ok=True)
        for beat in self._beats:  # those of another process end without the file
            beat.kill()
            beat.wait()
        self._beats = []

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.down()

    # --- living in it --------------------------------------------------------------------------------------------

    @property
    def enter(self) -> Enter:
        """To be called by a process with its rank, or given to `run.train`."""
        return Enter(seats=self.layout.seats, throttle=not self.state.cpu, groups=tuple(
            tuple(f"{group}/cgroup.procs" for group in self._groups(s.rank)) for s in self.layout.seats))

    def realised(self, cluster: Cluster, latency_s: float = LATENCY_S) -> Cluster:
        """What predictions should take the cluster for: `latency_s` is a NIC's, where links cannot be delayed."""
        seats = {s.rank: s for s in self.layout.seats}
        nodes, rank = [], 0
        for node in cluster.nodes:
            devices = tuple(d.replace(cores=seats[rank + i].cores) for i, d in enumerate(node.devices))
            rank += len(devices)
            nodes.append(node.replace(devices=devices))
        return realised(cluster.replace(nodes=tuple(nodes)), self.support, latency_s)

    def rendezvous(self, ranks: Sequence[int] = ()) -> str:
        """Where the ranks of a run find each other: a free port, by chance, at the node of the first of them."""
        first = self.layout.seats[ranks[0] if ranks else 0]
        return f"tcp://{self.layout.addresses[first.node]}:{20_000 + secrets.randbelow(10_000)}"

    def environment(self, rank: int, ranks: Sequence[int] = (), port: int = 29500) -> dict[str, str]:
        """What torch's `env://` and torchrun's variables would say at a seat, for programs of others."""
        everyone = list(ranks or range(len(self.layout.seats)))
        first = self.layout.seats[everyone[0]]
        mine = [r for r in everyone if self.layout.seats[r].node == self.layout.seats[rank].node]
        return {**self.enter.environment, "RANK": str(everyone.index(rank)), "WORLD_SIZE": str(len(everyone)),
                "LOCAL_RANK": str(mine.index(rank)), "LOCAL_WORLD_SIZE": str(len(mine)),
                "MASTER_ADDR": self.layout.addresses[first.node], "MASTER_PORT": str(port)}

    def spawn(self, rank: int, command: Sequence[str], *, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start a program at the seat of a rank."""
        return subprocess.Popen(list(command), env={**os.environ, **self.environment(rank)}, stdout=stdout,
                                preexec_fn=partial(self.enter, rank))

    def processes(self, rank: int | None = None) -> list[int]:
        """Numbers of the processes at a seat, or of all."""
        ranks = [s.rank for s in self.layout.seats] if rank is None else [rank]
        found = set(pids(str(g / "cgroup.procs") for r in ranks for g in self._groups(r)))
        if (not found and rank is None) or not self._groups(0):
            spaces = {self.layout.seats[r].namespace for r in ranks} | ({self.layout.switch} if rank is None else set())
            for ns in spaces:
                run = subprocess.run(["ip", "netns", "pids", ns], capture_output=True, text=True)
                found |= {int(pid) for pid in run.stdout.split()}
        return sorted(found - {os.getpid()})

    def inhabitants(self, node: str) -> list[int]:
        """Numbers of all processes in a node's network, those outside of its seats among them."""
        run = subprocess.run(["ip", "netns", "pids", self.layout.nodes[node]], capture_output=True, text=True)
        return [int(pid) for pid in run.stdout.split()]

    def set_quota(self, rank: int, quota: float) -> None:
        """Part of a core that a rank gets from now on; 0 is no limit."""
        if not self.state.cpu:
            return
        group = Path(self.state.cpu, f"r{rank}")
        period = period_us(quota or 1.0)
        mine = round(quota * period) if quota else -1
        burst = Path(group, "cpu.max.burst" if self.support.unified else "cpu.cfs_burst_us")
        if burst.exists():  # must not be above the quota at any time
            burst.write_text("0")
        if self.support.unified:
            Path(group, "cpu.max").write_text(f"{mine if quota else 'max'} {period}")
        else:
            Path(group, "cpu.cfs_quota_us").write_text("-1")
            Path(group, "cpu.cfs_period_us").write_text(str(period))
            Path(group, "cpu.cfs_quota_us").write_text(str(mine))
        if quota and burst.exists():  # what others on the core kept a rank from using, it may use one period later
            burst.write_text(str(mine))

    @contextmanager
    def unthrottled(self) -> Iterator[Callable[[], None]]:
        """Devices at full speed, for what is not measured, such as loading programs; calling the value ends it."""
        slow = [seat for seat in self.layout.seats if seat.quota]
        for seat in slow:
            self.set_quota(seat.rank, 0.0)

        def throttle() -> None:
            while slow:
                seat = slow.pop()
                self.set_quota(seat.rank, seat.quota)

        try:
            yield throttle
        finally:
            throttle()

    def set_rate(self, node: str, rate_Bps: float) -> None:
        """Both directions of a node's NIC from now on."""
        wire = self.wire(node)
        text = rule(rate_Bps, wire.latency_s, self.support).split("; ")[0]
        _batch("tc", self.layout.switch, [f"qdisc replace dev {wire.name} {text}"])
        if node not in self.layout.classes:
            _batch("tc", wire.namespace, [f"qdisc replace dev {wire.peer} {text}"])

    def set_link(self, node: str, up: bool) -> None:
        """Plug a node into its switch or pull it out. Its interface stays up: what it sends is lost, as on a dead path
        (with the interface down, the kernel would neither send nor give up, for minutes)."""
        wire = self.wire(node)
        _batch("ip", self.layout.switch, [f"link set {wire.name} {f'master {wire.bridge}' if up else 'nomaster'}"])

    def wire(self, node: str) -> Wire:
        if node not in self.layout.nodes:
            raise unknown("node", node, self.layout.nodes)
        return next(w for w in self.layout.wires if w.namespace == self.layout.nodes[node])

    def counters(self) -> dict[str, dict[str, int]]:
        """Bytes and packets that each node's interface has carried: `tx_bytes`, `rx_bytes`, `tx_packets`, ..."""
        found = {}
        for node, ns in self.layout.nodes.items():
            run = subprocess.run(["ip", "-n", ns, "-j", "-s", "link", "show", "eth0"], capture_output=True, text=True)
            if run.returncode:
                raise RunError(f"cannot read the counters of node {node}: {run.stderr.strip()}")
            stats = json.loads(run.stdout)[0]["stats64"]
            found[node] = {f"{way}_{what}": int(stats[way][what]) for way in ("tx", "rx")
                           for what in ("bytes", "packets", "dropped")}
        return found

    def unplugged(self) -> list[str]:
        """Nodes that are plugged into no switch."""
        run = subprocess.run(["ip", "-n", self.layout.switch, "-j", "link", "show", "type", "veth"],
                             capture_output=True, text=True)
        if run.returncode:
            raise RunError(f"testbed {self.layout.id} is gone: {run.stderr.strip()}")
        plugged = {port["ifname"] for port in json.loads(run.stdout) if "master" in port}
        return [node for node in self.layout.nodes if self.wire(node).name not in plugged]

    def starved(self) -> list[int]:
        """Ranks whose memory limit has killed a process."""
        found = []
        for seat in self.layout.seats if self.state.memory else ():
            name = "memory.events" if self.support.unified else "memory.oom_control"
            with contextlib.suppress(OSError):
                text = Path(self.state.memory, f"r{seat.rank}", name).read_text().split()
                if int(text[text.index("oom_kill") + 1]):
                    found.append(seat.rank)
        return found


def testbeds() -> list[State]:
    """All that have a state file."""
    found = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=State))
    return found


def leftovers(*, remove: bool) -> list[State]:
    """Testbeds whose owner has died."""
    found = [s for s in testbeds() if s.abandoned]
    for state in found if remove else ():
        support = Support(root=True, unified=bool(state.cpu) and state.cpu == state.memory)
        Testbed(state, support).down()
    return found


def _write(state: State) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{state.layout.id}.json"
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(state))
    part.replace(path)


def _batch(program: str, namespace: str, lines: Sequence[str]) -> None:
    where = ["-n", namespace] if namespace else []
    run = subprocess.run([program, *where, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True,
                         text=True)
    if run.returncode:
        raise RunError(f"`{program}{f' -n {namespace}' if namespace else ''}` failed: {run.stderr.strip()}")


def _write_sysctls(namespace: str, values: Mapping[str, str]) -> None:
    """The files under /proc/sys/net are those of the namespace of whoever opens them."""
    script = "; ".join(f"[ ! -e /proc/sys/{name} ] || echo '{value}' > /proc/sys/{name}"
                       for name, value in values.items())
    run = subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", script], capture_output=True, text=True)
    if run.returncode:
        raise RunError(f"cannot set up namespace {namespace}: {run.stderr.strip()}")
