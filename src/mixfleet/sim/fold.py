"""Which parts of a run are equal, so that one of them can be simulated for all.

Colour refinement (Weisfeiler and Leman) on three kinds of vertices: entities (a replica of a stage), transfers that
join entities, and ports that transfers load. Two entities stay equal only while their transfers are, two transfers
while their members and ports are, two ports while the same kinds of transfers load them with the same bytes. The
stable colouring is equitable: in a run that starts equal, all members of a colour do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from mixfleet.cost.network import Floats, Ints


class Instance(NamedTuple):
    """One transfer that happens at least once per step: `members` meet in it, `demands` are (port, bytes)."""

    kind: Hashable
    members: tuple[int, ...]
    latency_s: float
    demands: tuple[tuple[int, float], ...]
    turn_s: float = 0.0
    """How much longer it takes to begin where a member computes."""


class Colours(NamedTuple):
    """A number per entity, instance and port; equal numbers are equal in everything that a run can tell."""

    entities: list[int]
    instances: list[int]
    ports: list[int]


def _numbers(keys: Sequence[Hashable]) -> list[int]:
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def flat(instances: Sequence[Instance]) -> tuple[Ints, Ints, Floats]:
    """All demands one after another: the instance, the port and the bytes of each."""
    counts = [len(instance.demands) for instance in instances]
    every = list(chain.from_iterable(instance.demands for instance in instances))
    return (np.repeat(np.arange(len(counts)), counts), np.array([p for p, _ in every], np.int64),
            np.array([n for _, n in every], float))


def distinct(entities: int, instances: int, ports: int) -> Colours:
    """Nothing is equal: the run is simulated in full."""
    return Colours(list(range(entities)), list(range(instances)), list(range(ports)))


def refine(kinds: Sequence[Hashable], instances: Sequence[Instance], capacities: Sequence[float]) -> Colours:
    """The coarsest equitable colouring in which equal entities are of equal `kinds`."""
    joined: list[list[int]] = [[] for _ in kinds]
    for i, instance in enumerate(instances):
        for member in instance.members:
            joined[member].append(i)
    which, port, nbytes = flat(instances)
    # Ports with exactly the same users, such as those of the ranks of one tensor group, are one port from the start.
    order = np.argsort(port, kind="stable")
    ends = np.searchsorted(port[order], np.arange(len(capacities) + 1)).tolist()
    users, loaded = which[order], nbytes[order]
    twin = _numbers([(capacities[p], users[a:b].tobytes(), loaded[a:b].tobytes()) if a < b else (capacities[p],)
                     for p, (a, b) in enumerate(pairwise(ends))])
    first = {t: p for p, t in reversed(list(enumerate(twin)))}
    merged_users = {t: list(zip(users[ends[p]:ends[p + 1]].tolist(), loaded[ends[p]:ends[p + 1]].tolist()))
                    for t, p in first.items()}
    ports = _numbers([capacities[first[t]] for t in range(len(first))])
    pairs, index = np.unique(which * len(first) + np.array(twin, np.int64)[port], return_index=True)
    loads: list[list[tuple[int, float]]] = [[] for _ in instances]
    for i, t, n in zip((pairs // len(first)).tolist(), (pairs % len(first)).tolist(), nbytes[index].tolist()):
        loads[i].append((t, n))
    entities = _numbers(kinds)
    flows = _numbers([(i.kind, i.latency_s, i.turn_s) for i in instances])
    size = 0
    while True:
        flows = _numbers([
            (flows[i], tuple(sorted([entities[m] for m in instance.members])),
             tuple(sorted([(ports[p], n) for p, n in loads[i]]))) for i, instance in enumerate(instances)])
        ports = _numbers([(ports[p], tuple(sorted([(flows[i], n) for i, n in merged_users[p]])))
                          for p in range(len(ports))])
        entities = _numbers([(entities[e], tuple(sorted([flows[i] for i in joined[e]]))) for e in range(len(kinds))])
        before, size = size, sum(max(c, default=0) for c in (entities, flows, ports))
        if size == before:
            return Colours(entities, flows, [ports[p] for p in twin])
