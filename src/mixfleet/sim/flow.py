"""Shared links: concurrent transfers as fluids that divide the ports they pass.

A *flow* has a latency, in which it uses nothing, and then moves its bytes through several ports at once: it goes at
one speed, and on every port it takes its part of the capacity. Concurrent flows share by max-min fairness (progressive
filling, Bertsekas and Gallager, Data Networks, section 6.5.2): the flows that meet at the tightest port get equal
bytes per second there, and what they leave on other ports goes to the others.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from mixfleet.units import NS_PER_S


class Flow(NamedTuple):
    """A transfer, in the terms that sharing needs.

    `alone_ns` is the time its bytes take when it has its ports to itself, after `latency_ns`. `demands` lists
    `(port, part)`: the part of the port's capacity it takes at that speed. A folded flow stands for several equal
    ones, and `part` then sums over those that pass the port, so it may exceed 1. `rate` is the bytes per second of
    one of them through its own tightest link, the measure in which shares are equal.
    """

    latency_ns: int
    alone_ns: int
    rate: float
    demands: tuple[tuple[int, float], ...]
    turn_ns: int = 0
    """What is added to the latency where one of its ports is computing when that is over."""
    computes: bool = False


def flow(latency_s: float, demands: Sequence[tuple[int, float, float]], passing: Sequence[float] = (),
         cores: Container[int] = (), turn_s: float = 0.0) -> Flow:
    """The flow of a transfer with `demands` as `(port, capacity_Bps, bytes)`.

    `passing`, if given, is for each demand the bytes that all the equal transfers it stands for send through the port.
    Ports among `cores` are processors, whose capacity and work are in CPU time.
    """
    alone_s = max((nbytes / capacity for _, capacity, nbytes in demands), default=0.0)
    latency_ns = round(latency_s * NS_PER_S)
    alone_ns = round((latency_s + alone_s) * NS_PER_S) - latency_ns
    if not alone_ns:
        return Flow(latency_ns, 0, 1.0, ())
    links = [(nbytes / capacity, capacity) for port, capacity, nbytes in demands if port not in cores]
    busy_s, rate = max(links or [(alone_s, 1.0)])
    if busy_s < alone_s:
        rate *= busy_s / alone_s
    total = passing or [nbytes for _, _, nbytes in demands]
    return Flow(latency_ns, alone_ns, rate, tuple(
        (port, n / capacity / alone_s) for (port, capacity, _), n in zip(demands, total, strict=True) if n),
        round(turn_s * NS_PER_S))


def computing(duration_ns: int, cores: Sequence[tuple[int, float]], rate: float) -> Flow:
    """Work that keeps processors busy, as `(port, how many equal tasks are on it)`. Beside transfers it counts as one
    of `rate` bytes per second: what would take all of the processor, so that the two get equal parts of it."""
    return Flow(0, duration_ns, rate, tuple(cores), computes=True)


def speeds(flows: Sequence[Flow]) -> list[float]:
    """Max-min fair speed of each of the concurrent flows, as a fraction of its speed when alone."""
    if len(flows) == 1:
        return [1.0 / max([part for _, part in flows[0].demands])]
    free: dict[int, float] = {}
    users: dict[int, dict[int, float]] = {}  # port -> flow -> part of the port per byte per second
    for i, one in enumerate(flows):
        for port, part in one.demands:
            free[port] = 1.0
            users.setdefault(port, {})[i] = part / one.rate
    result = [0.0] * len(flows)
    while users:
        level, tightest = min((free[port] / sum(on.values()), port) for port, on in users.items())
        for i in list(users[tightest]):
            result[i] = level / flows[i].rate
            for port, part in flows[i].demands:
                free[port] = max(free[port] - result[i] * part, 0.0)
                del users[port][i]
                if not users[port]:
                    del users[port]
    return result


class Network:
    """Which flows are under way, and how fast. `settle` after every batch of `add` and `remove` at one instant."""

    def __init__(self, flows: Sequence[Flow | None]) -> None:
        self._flows = flows
        self._on: dict[int, dict[int, None]] = {}
        self._left_ns: dict[int, float] = {}
        self._speed: dict[int, float] = {}
        self._since_ns: dict[int, int] = {}
        self._touched: dict[int, None] = {}

    @property
    def unsettled(self) -> bool:
        """Whether speeds are to be worked out anew."""
        return bool(self._touched)

    def _ports(self, task: int) -> tuple[tuple[int, float], ...]:
        one = self._flows[task]
        assert one is not None
        return one.demands

    def add(self, task: int, now_ns: int) -> None:
        """The bytes of `task` start to move."""
        one = self._flows[task]
        assert one is not None
        self._left_ns[task], self._speed[task], self._since_ns[task] = one.alone_ns, 0.0, now_ns
        self._touched[task] = None
        for port, _ in one.demands:
            self._on.setdefault(port, {})[task] = None

    def remove(self, task: int) -> None:
        """The last byte of `task` has arrived."""
        del self._left_ns[task], self._speed[task], self._since_ns[task]
        self._touched.pop(task, None)
        for port, _ in self._ports(task):
            on = self._on[port]
            del on[task]
            self._touched.update(on)

    def computing(self, task: int) -> list[int]:
        """What the processors that `task` needs compute."""
        return [other for port, _ in self._ports(task) for other in self._on.get(port, ())
                if (one := self._flows[other]) is not None and one.computes]

    def _alone(self, task: int) -> bool:
        return all(len(self._on[port]) == 1 for port, _ in self._ports(task))

    def _component(self, task: int) -> list[int]:
        """The flows whose speeds depend on each other, `task` among them."""
        found, ports = {task: None}, set()
        queue = [task]
        for one in queue:
            for port, _ in self._ports(one):
                if port not in ports:
                    ports.add(port)
                    for other in self._on[port]:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
        return sorted(found)

    def settle(self, now_ns: int) -> list[tuple[int, int]]:
        """Recompute the speeds that the last changes touch; returns `(task, new end)` for those that changed."""
        changed = []
        while self._touched:
            task = next(iter(self._touched))
            tasks = [task] if self._alone(task) else self._component(task)
            new = speeds([f for t in tasks if (f := self._flows[t]) is not None])
            for task, speed in zip(tasks, new, strict=True):
                self._touched.pop(task, None)
                if speed != self._speed[task]:
                    self._left_ns[task] -= (now_ns - self._since_ns[task]) * self._speed[task]
                    self._since_ns[task], self._speed[task] = now_ns, speed
                    changed.append((task, now_ns + max(round(self._left_ns[task] / speed), 0)))
        return changed
