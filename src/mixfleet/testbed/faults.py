"""Breaking things on purpose, by hand or by a schedule file, and telling what broke."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mixfleet.errors import InputError, RunError, unknown
from mixfleet.files import decode, read_yaml
from mixfleet.spec import Spec
from mixfleet.testbed.bed import Testbed
from mixfleet.units import parse_rate

ACTIONS = {"kill": "rank", "freeze": "rank", "slow": "rank", "fill": "rank", "cut": "node", "degrade": "node",
           "restart": "node"}
"""What can be done, and to what."""
_TICK_S = 0.02


class Fault(Spec, frozen=True, kw_only=True):
    """One fault. It strikes `at` seconds after the start, or when training has done `at_step` steps.

    `kill` ends the processes of a rank, `freeze` stops them, `slow` gives the rank `share` of a core, `fill` lets
    its disk be full (no file can grow any more), `cut` takes a node off the network, `degrade` gives its link `rate`,
    `restart` ends all that runs on a node and keeps it off the network. After `seconds`, or when training has done
    `until_step` steps (both 0: never), a frozen rank goes on, a slow one is fast again, a link is back, a restarted
    node is up.
    """

    do: str
    rank: int | None = None
    node: str = ""
    at: float = 0.0
    at_step: int = 0
    share: float = 0.0
    rate: str = ""
    seconds: float = 0.0
    until_step: int = 0

    def __post_init__(self) -> None:
        if self.do not in ACTIONS:
            raise unknown("fault", self.do, ACTIONS)
        if ACTIONS[self.do] == "rank" and self.rank is None:
            raise InputError(f"{self.do} needs a rank")
        if ACTIONS[self.do] == "node" and not self.node:
            raise InputError(f"{self.do} needs a node")
        if self.do == "slow" and not 0 < self.share <= 1:
            raise InputError("slow needs a share, above 0 and at most 1")
        if self.do == "degrade":
            parse_rate(self.rate or "", "rate of degrade")


class Schedule(Spec, frozen=True, kw_only=True):
    """A file of faults."""

    faults: tuple[Fault, ...]

    @staticmethod
    def load(path: Path | str) -> Schedule:
        return decode(read_yaml(path), Schedule)


def strike(bed: Testbed, fault: Fault) -> None:
    """Do it now."""
    _check(bed, fault)
    match fault.do:
        case "kill":
            _signal(bed, fault.rank, signal.SIGKILL)
        case "freeze":
            _signal(bed, fault.rank, signal.SIGSTOP)
        case "slow":
            bed.set_quota(fault.rank or 0, fault.share)
        case "fill":
            _limit_files(bed, fault.rank, 0)
        case "cut":
            bed.set_link(fault.node, False)
        case "degrade":
            bed.set_rate(fault.node, parse_rate(fault.rate))
        case "restart":
            bed.set_link(fault.node, False)
            for pid in bed.inhabitants(fault.node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def undo(bed: Testbed, fault: Fault) -> None:
    """As it was; what has been killed stays dead."""
    match fault.do:
        case "freeze":
            _signal(bed, fault.rank, signal.SIGCONT)
        case "slow":
            bed.set_quota(fault.rank or 0, bed.layout.seats[fault.rank or 0].quota)
        case "fill":
            _limit_files(bed, fault.rank, -1)
        case "cut" | "restart":
            bed.set_link(fault.node, True)
        case "degrade":
            bed.set_rate(fault.node, bed.wire(fault.node).rate_Bps)


def _check(bed: Testbed, fault: Fault) -> None:
    if fault.rank is not None and fault.rank >= len(bed.layout.seats):
        raise InputError(f"{fault.do}: rank is {fault.rank}; the testbed has ranks 0-{len(bed.layout.seats) - 1}")
    if fault.node:
        bed.wire(fault.node)


def _signal(bed: Testbed, rank: int | None, number: signal.Signals) -> None:
    for pid in bed.processes(rank):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _limit_files(bed: Testbed, rank: int | None, nbytes: int) -> None:
    """A full disk as one rank sees it: writing fails (with EFBIG), and nobody else's disk is touched."""
    import resource

    for pid in bed.processes(rank):
        with contextlib.suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if nbytes < 0 else nbytes, hard))


def play(bed: Testbed, schedule: Schedule, *, step: Callable[[], int] = lambda: 0,
         over: Callable[[], bool] = lambda: False) -> None:
    """Strike every fault in its time, counted from now, and undo it after its seconds; returns after the last."""
    for fault in schedule.faults:
        _check(bed, fault)
    start = time.monotonic()
    waiting = list(schedule.faults)
    undoing: list[tuple[float, Fault]] = []
    """With the time at which the fault was made."""
    while (waiting or undoing) and not over():
        now = time.monotonic() - start
        for fault in [f for f in waiting if now >= f.at and step() >= f.at_step]:
            waiting.remove(fault)
            strike(bed, fault)
            if fault.seconds or fault.until_step:
                undoing.append((now, fault))
        for entry in list(undoing):
            since, fault = entry
            if 0 < fault.seconds <= now - since or 0 < fault.until_step <= step():
                undoing.remove(entry)
                undo(bed, fault)
        time.sleep(_TICK_S)


@contextmanager
def injected(bed: Testbed, schedule: Schedule | None) -> Iterator[Callable[[int], None]]:
    """Plays a schedule beside what runs inside; the value is to be called with every step that is done."""
    done, over = [0], threading.Event()
    told: list[Exception] = []

    def work() -> None:
        try:
            play(bed, schedule or Schedule(faults=()), step=lambda: done[0], over=over.is_set)
        except Exception as error:
            told.append(error)

    def on_step(step: int) -> None:
        done[0] = step

    for fault in schedule.faults if schedule else ():
        _check(bed, fault)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield on_step
    finally:
        over.set()
        thread.join()
    if told:
        raise told[0]


def explained(bed: Testbed, error: RunError) -> RunError:
    """The error of a run with what the testbed knows of its cause: nodes without a link, ranks out of memory."""
    unplugged, starved = bed.unplugged(), bed.starved()
    if unplugged:
        return RunError(f"node {', '.join(unplugged)} is off the network. {error}")
    if starved:
        seat = bed.layout.seats[starved[0]]
        return RunError(f"rank {seat.rank} on node {seat.node} went beyond its {seat.memory_bytes} bytes of memory. "
                        f"{error}")
    named = re.search(r"\[?(10\.77\.\d+\.\d+)\]?:\d+", str(error))
    node = next((n for n, a in bed.layout.addresses.items() if named and a == named[1]), "")
    return RunError(f"{error} ({named[1]} is node {node})") if node and named else error
