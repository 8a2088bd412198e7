"""The engine of predictions: one walk over a graph of tasks, for graphs of millions in compiled code.

Tasks of fixed duration start when the last of those they wait for has ended, so they need no clock; only flows that
share ports are played in order of time. `engine.run` gives the same to the nanosecond. Large graphs without shared
ports use numba (extra `fast`) where it is installed; plain Python otherwise, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mixfleet.schedule.greedy import Orders, Work
from mixfleet.sim.engine import Graph, Times
from mixfleet.sim.flow import Flow, speeds
from mixfleet.units import NS_PER_S

Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


_CODE = np.zeros(128, np.int64)
_CODE[np.frombuffer(b"FBIW", np.uint8)] = range(4)


class Arrays(NamedTuple):
    """Tasks 0 to n - 1, and who waits for whom: `then[first[t]:first[t + 1]]` may start when t has ended."""

    duration_ns: Ints
    first: Ints
    then: Ints

    @staticmethod
    def of(duration_ns: Ints, before: Ints, after: Ints) -> Arrays:
        """From pairs: `after[i]` waits for `before[i]`."""
        count = np.bincount(before, minlength=len(duration_ns))
        first = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
        return Arrays(duration_ns, first, after[np.argsort(before, kind="stable")])


def pipeline(work: Work, orders: Orders) -> Arrays:
    """The tasks of a pipeline's orders: the steps, stage by stage, and a message for every hop that takes time."""
    chunks, m = len(work.home), work.micro_batches
    ops, places, numbers = zip(*(step for order in orders for step in order), strict=True)
    op = _CODE[np.frombuffer("".join(ops).encode(), np.uint8)]
    k, mb = np.array(places, np.int64), np.array(numbers, np.int64)
    kind = np.where(op == 2, 1, op)  # a whole backward and an input half stand in for each other
    weight = work.weight or (0.0,) * chunks
    whole = tuple(map(sum, zip(work.backward, weight)))
    seconds = np.array([work.forward, whole, work.backward, weight])
    at = np.full((4, chunks, m), -1, np.int64)
    at[kind, k, mb] = np.arange(len(op))
    duration = np.rint(seconds[op, k] * NS_PER_S).astype(np.int64)
    edges = [(np.arange(len(op) - 1), np.arange(1, len(op)))]
    ends = np.cumsum([len(order) for order in orders])[:-1]
    edges[0] = tuple(np.delete(side, ends - 1) for side in edges[0])  # type: ignore[assignment]
    hops, total = [], len(op)
    for c in range(chunks - 1):
        if work.ends(c):
            continue
        own = at[0, c] >= 0  # where pipelines share the devices, each chain has some of the micro-batches
        for row, (a, b) in ((0, (c, c + 1)), (1, (c + 1, c))):
            made, used = at[row, a][own], at[row, b][own]
            if work.home[c] == work.home[c + 1]:
                edges.append((made, used))
                continue
            message = np.arange(total, total + len(made))
            total += len(made)
            hops.append(np.full(len(made), round(work.hop(c) * NS_PER_S), np.int64))
            edges += [(made, message), (message, used)]
    before, after = (np.concatenate(side) for side in zip(*edges, strict=True))
    return Arrays.of(np.concatenate((duration, *hops)), before, after)


def run(graph: Arrays) -> tuple[Ints, Ints]:
    """Start and end of every task in ns; tasks that wait for each other in a circle stay at -1."""
    start, end, _ = _played(graph)
    return start, end


def play(graph: Graph) -> Times:
    """The same as `engine.run`, to the nanosecond, in a fraction of its time; compiled if there are many tasks and no
    shared ports."""
    n = len(graph.duration_ns)
    first = [0, *accumulate(map(len, graph.after))]
    then = list(chain.from_iterable(graph.after))
    if n >= MANY and not any(graph.flows):
        arrays = Arrays(*(np.array(x, np.int64) for x in (graph.duration_ns, first, then)))
        return Times(*(x.tolist() for x in _played(arrays)))
    flows: dict[int, int] = {}
    kind = [-1 if one is None else flows.setdefault(id(one), len(flows)) for one in graph.flows]
    found = {id(one): one for one in graph.flows if one is not None}
    start, end, cause = [0] * n, [-1] * n, [-1] * n
    _flowing(graph.duration_ns, kind, first, then, list(graph.waits), start, end, cause,
             tuple(found[key] for key in flows))
    for task in range(n):
        if end[task] < 0:
            start[task] = cause[task] = -1
    return Times(start, end, cause)


MANY = 100_000
"""Tasks from which loading compiled code is worth its time."""


def _played(graph: Arrays) -> tuple[Ints, Ints, Ints]:
    n = len(graph.duration_ns)
    waits = np.bincount(graph.then, minlength=n).astype(np.int64)
    start, end, cause = np.zeros(n, np.int64), np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    _walker()(graph.duration_ns, graph.first, graph.then, waits, start, end, cause)
    start[end < 0] = cause[end < 0] = -1
    return start, end, cause


def _walk(duration: Sequence[int], first: Sequence[int], then: Sequence[int], waits: Any, start: Any, end: Any,
          cause: Any) -> None:
    stack = np.empty(len(waits), np.int64)
    top = 0
    for task in range(len(waits)):
        if waits[task] == 0:
            stack[top] = task
            top += 1
    while top:
        top -= 1
        task = stack[top]
        done = start[task] + duration[task]
        end[task] = done
        for i in range(first[task], first[task + 1]):
            other = then[i]
            if done > start[other] or cause[other] < 0 or (done == start[other] and task > cause[other]):
                start[other] = done
                cause[other] = task
            waits[other] -= 1
            if waits[other] == 0:
                stack[top] = other
                top += 1


def _flowing(duration: list[int], kind: list[int], first: list[int], then: list[int], waits: list[int],
             start: list[int], end: list[int], cause: list[int], flows: tuple[Flow, ...]) -> None:
    """Tasks of fixed duration are played as soon as their start is known, whatever the time; flows in order of time.

    `kind` is a task's place in `flows`, -1 for a fixed duration. At every instant in which flows come or go, those
    that depend on each other get new speeds.
    """
    n = len(waits)
    ports = [[port for port, _ in one.demands] for one in flows]
    latency, alone = [one.latency_ns for one in flows], [float(one.alone_ns) for one in flows]
    lone = [speeds([one])[0] for one in flows]
    lone_ns = [round(whole / fast) for whole, fast in zip(alone, lone)]
    known: dict[tuple[int, ...], list[float]] = {}
    """Speeds of flows that are under way together."""
    turn, computes, waited = [one.turn_ns for one in flows], [one.computes for one in flows], set[int]()
    left, speed, since, due = [0.0] * n, [0.0] * n, [0] * n, [-1] * n
    on: dict[int, list[int]] = {port: [] for row in ports for port in row}
    """Flows under way, by port."""
    changed: dict[int, None] = {}
    """Ports on which some came or went in this instant."""
    queue: list[tuple[int, int]] = []
    """(ns, task): a flow that starts to move its bytes, or one that ends."""
    ready = [task for task in range(n) if not waits[task]]
    now = 0
    while True:
        while ready:
            task = ready.pop()
            if kind[task] < 0:
                end[task] = done = start[task] + duration[task]
            elif end[task] < 0:
                due[task] = start[task] + latency[kind[task]]
                heappush(queue, (due[task], task))
                continue
            else:
                done = end[task]
            for i in range(first[task], first[task + 1]):
                other = then[i]
                if done > start[other] or cause[other] < 0 or (done == start[other] and task > cause[other]):
                    start[other] = done
                    cause[other] = task
                waits[other] -= 1
                if not waits[other]:
                    ready.append(other)
        if changed and (not queue or queue[0][0] > now):
            seen: set[int] = set()
            for port in changed:
                for task in on[port]:
                    if task in seen:
                        continue
                    group = [task] if all(len(on[p]) == 1 for p in ports[kind[task]]) else _together(task, on, ports,
                                                                                                     kind)
                    seen.update(group)
                    which = tuple([kind[one] for one in group])
                    new = [lone[which[0]]] if len(group) == 1 else known.get(which)
                    if new is None:
                        new = known[which] = speeds([flows[k] for k in which])
                    for one, fast in zip(group, new):
                        if fast != speed[one]:
                            left[one] -= (now - since[one]) * speed[one]
                            since[one], speed[one] = now, fast
                            due[one] = now + max(round(left[one] / fast), 0)
                            heappush(queue, (due[one], one))
            changed.clear()
            continue
        if not queue:
            return
        now, task = heappop(queue)
        if due[task] != now or end[task] >= 0:  # it has changed its speed since
            continue
        k = kind[task]
        if not speed[task] and turn[k] and task not in waited and any(
                computes[kind[other]] and start[other] < now < due[other] for port in ports[k] for other in on[port]):
            waited.add(task)
            due[task] = now + turn[k]
            heappush(queue, (due[task], task))
        elif speed[task]:
            end[task] = now
            ready.append(task)
            for port in ports[k]:
                on[port].remove(task)
                if on[port]:
                    changed[port] = None
        else:
            left[task], since[task] = alone[k], now
            due[task], shared = -1, not lone_ns[k]
            for port in ports[k]:
                shared = shared or bool(on[port])
                on[port].append(task)
            if shared:
                changed.update(dict.fromkeys(ports[k]))
            else:  # until another one comes
                speed[task], due[task] = lone[k], now + lone_ns[k]
                heappush(queue, (due[task], task))


def _together(task: int, on: dict[int, list[int]], ports: list[list[int]], kind: list[int]) -> list[int]:
    """The flows under way whose speeds depend on that of `task`, itself included, in order."""
    found, known = {task}, set[int]()
    queue = [task]
    for one in queue:
        for port in ports[kind[one]]:
            if port not in known:
                known.add(port)
                for other in on[port]:
                    if other not in found:
                        found.add(other)
                        queue.append(other)
    return sorted(found)


_made: list[Callable[..., None]] = []


def _walker() -> Callable[..., None]:
    """The walk, compiled once and kept on disk, or as it is without numba."""
    if not _made:
        try:
            from numba import njit
        except ImportError:
            _made.append(_walk)
        else:
            _made.append(njit(cache=True)(_walk))
    return _made[0]
