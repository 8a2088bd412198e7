"""Which parts of a run are equal, so that one of them can be simulated for all.

Colour refinement (Weisfeiler and Leman) on three kinds of vertices: entities (a replica of a stage), transfers that
join entities, and ports that transfers load. Two entities stay equal only while their transfers are, two transfers
while their members and ports are, two ports while the same kinds of transfers load them with the same bytes. The
stable colouring is equitable: in a run that starts equal, all members of a colour do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


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


def distinct(entities: int, instances: int, ports: int) -> Colours:
    """Nothing is equal: the run is simulated in full."""
    return Colours(list(range(entities)), list(range(instances)), list(range(ports)))


def refine(kinds: Sequence[Hashable], instances: Sequence[Instance], capacities: Sequence[float]) -> Colours:
    """The coarsest equitable colouring in which equal entities are of equal `kinds`."""
    users: list[list[tuple[int, float]]] = [[] for _ in capacities]
    joined: list[list[int]] = [[] for _ in kinds]
    for i, instance in enumerate(instances):
        for port, nbytes in instance.demands:
            users[port].append((i, nbytes))
        for member in instance.members:
            joined[member].append(i)
    # Ports with exactly the same users, such as those of the ranks of one tensor group, are one port from the start.
    twin = _numbers([(capacity, tuple(uses)) for capacity, uses in zip(capacities, users, strict=True)])
    merged_users: dict[int, list[tuple[int, float]]] = {}
    for port, uses in zip(twin, users, strict=True):
        merged_users.setdefault(port, uses)
    first = {port: i for i, port in reversed(list(enumerate(twin)))}
    ports = _numbers([capacities[first[port]] for port in range(len(first))])
    loads = [sorted({(twin[port], nbytes) for port, nbytes in instance.demands}) for instance in instances]
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
