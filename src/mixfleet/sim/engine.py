"""The clock and the queue: tasks that wait for others, take a fixed time or flow through shared ports.

It knows no devices. Order is (time, kind of event, insertion), so equal input gives equal output to the bit.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from mixfleet.sim.flow import Flow, Network


class Graph:
    """Tasks, numbered from 0, and what each waits for."""

    def __init__(self) -> None:
        self.duration_ns: list[int] = []
        self.flows: list[Flow | None] = []
        self.waits: list[int] = []
        self.after: list[list[int]] = []

    def add(self, duration_ns: int = 0, flow: Flow | None = None) -> int:
        """A task of a fixed duration, or one that takes as long as its flow needs."""
        if flow is not None and not flow.demands:
            duration_ns, flow = flow.latency_ns + flow.alone_ns, None
        self.duration_ns.append(duration_ns)
        self.flows.append(flow)
        self.waits.append(0)
        self.after.append([])
        return len(self.waits) - 1

    def order(self, first: int, then: int) -> None:
        """`then` starts when `first` has ended, at the earliest."""
        self.after[first].append(then)
        self.waits[then] += 1


_END, _ENTER = 0, 1


class Times(NamedTuple):
    """Per task: start and end in ns, and the task whose end let it start: of equals the last one (-1: none)."""

    start: list[int]
    end: list[int]
    cause: list[int]

    def critical(self) -> list[int]:
        """The chain of tasks, in order, that ends last: each has started when the one before it ended."""
        task = max(range(len(self.end)), key=lambda t: self.end[t], default=-1)
        chain = []
        while task >= 0:
            chain.append(task)
            task = self.cause[task]
        return chain[::-1]


def run(graph: Graph) -> Times:
    """Plays the graph, event by event. Tasks that wait for each other in a circle are left at -1.

    The readable engine: `compiled.play` gives the same in less time.
    """
    durations, flows, after = graph.duration_ns, graph.flows, graph.after
    waits = list(graph.waits)
    start, end = [-1] * len(waits), [-1] * len(waits)
    due = [-1] * len(waits)
    cause = [-1] * len(waits)
    network, waited = Network(flows), set[int]()
    queue: list[tuple[int, int, int, int]] = []
    inserted = now = 0
    ready = [task for task, n in enumerate(waits) if not n]

    def ended(task: int) -> None:
        end[task] = now
        for other in after[task]:
            if cause[other] < 0 or end[cause[other]] < now or task > cause[other]:
                cause[other] = task
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)

    while ready or queue or network.unsettled:
        for task in ready:  # grows while it is walked: tasks without duration end at once
            start[task] = now
            inserted += 1
            one = flows[task]
            if one is not None:
                heappush(queue, (now + one.latency_ns, _ENTER, inserted, task))
            elif durations[task]:
                due[task] = now + durations[task]
                heappush(queue, (due[task], _END, inserted, task))
            else:
                ended(task)
        ready.clear()
        if not queue or queue[0][0] > now:  # all that happens in this instant has happened
            for task, ends in network.settle(now):
                due[task] = ends
                inserted += 1
                heappush(queue, (ends, _END, inserted, task))
        if queue:
            now, kind, _, task = heappop(queue)
            if kind == _ENTER:
                one = flows[task]
                if one is not None and one.turn_ns and task not in waited and any(
                        start[other] < now < due[other] for other in network.computing(task)):
                    waited.add(task)
                    inserted += 1
                    heappush(queue, (now + one.turn_ns, _ENTER, inserted, task))
                else:
                    network.add(task, now)
            elif due[task] == now and end[task] < 0:  # else: the flow changed its speed since
                if flows[task] is not None:
                    network.remove(task)
                ended(task)
    for task in range(len(end)):
        if end[task] < 0:
            cause[task] = -1
    return Times(start, end, cause)
