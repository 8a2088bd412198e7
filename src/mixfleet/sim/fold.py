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
from numpy.typing import NDArray

from mixfleet.cost.network import Floats, Ints

Marks = NDArray[np.uint64]


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


def _first_numbers(keys: Marks | Ints | Floats) -> Ints:
    """Equal values get equal numbers, in the order in which they first come."""
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[index]


def _marks(values: Ints, domain: int) -> Marks:
    """64 bits that look random for each value (SplitMix64), other ones in each domain."""
    x = (values.astype(np.uint64) + np.uint64(domain << 56)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Ends(NamedTuple):
    """Where the parts of consecutive vertices end in an array, with a 0 in front."""

    ends: Ints

    @staticmethod
    def of(counts: Sequence[int] | Ints) -> _Ends:
        return _Ends(np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))

    def sums(self, marks: Marks) -> Marks:
        """Per vertex the sum of its marks: equal for equal multisets, and for others but once in 2^64."""
        total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(marks, dtype=np.uint64)))
        return total[self.ends[1:]] - total[self.ends[:-1]]


def flat(instances: Sequence[Instance]) -> tuple[Ints, Ints, Floats]:
    """All demands one after another: the instance, the port and the bytes of each."""
    counts = [len(instance.demands) for instance in instances]
    every = chain.from_iterable(chain.from_iterable(instance.demands for instance in instances))
    pairs = np.fromiter(every, float, 2 * sum(counts)).reshape(-1, 2)
    return np.repeat(np.arange(len(counts)), counts), pairs[:, 0].astype(np.int64), pairs[:, 1]


def distinct(entities: int, instances: int, ports: int) -> Colours:
    """Nothing is equal: the run is simulated in full."""
    return Colours(list(range(entities)), list(range(instances)), list(range(ports)))


MANY = 1000
"""Demands from which arrays are faster than loops."""


def refine(kinds: Sequence[Hashable], instances: Sequence[Instance], capacities: Sequence[float]) -> Colours:
    """The coarsest equitable colouring in which equal entities are of equal `kinds`."""
    many = sum(len(instance.demands) for instance in instances) > MANY
    return (in_arrays if many else in_loops)(kinds, instances, capacities)


def in_loops(kinds: Sequence[Hashable], instances: Sequence[Instance], capacities: Sequence[float]) -> Colours:
    """`refine` with what a vertex sees of its neighbours written out."""
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


def in_arrays(kinds: Sequence[Hashable], instances: Sequence[Instance], capacities: Sequence[float]) -> Colours:
    """`refine` with arrays: what a vertex sees of its neighbours is told by the sum of the marks of their colours."""
    counts = [len(instance.members) for instance in instances]
    member = np.fromiter(chain.from_iterable(i.members for i in instances), np.int64, sum(counts))
    meets = _Ends.of(counts)
    joined = np.repeat(np.arange(len(counts)), counts)[np.argsort(member, kind="stable")]
    owner = _Ends.of(np.bincount(member, minlength=len(kinds)))
    which, port, nbytes = flat(instances)
    amount = _first_numbers(nbytes)
    amounts = int(amount.max(initial=0)) + 1
    # Ports with exactly the same users, such as those of the ranks of one tensor group, are one port from the start.
    order = np.argsort(port, kind="stable")
    users = _Ends.of(np.bincount(port, minlength=len(capacities))).sums(
        _marks(which[order] * amounts + amount[order], 1))
    width = _first_numbers(np.array(capacities, float))
    twin = _first_numbers(users + _marks(width, 2))
    ports = _first_numbers(width[np.unique(twin, return_index=True)[1]])
    _, index = np.unique(which * len(ports) + twin[port], return_index=True)
    which, port, amount = which[index], twin[port[index]], amount[index]
    passes = _Ends.of(np.bincount(which, minlength=len(instances)))
    order = np.argsort(port, kind="stable")
    user, used, passed = which[order], amount[order], _Ends.of(np.bincount(port, minlength=len(ports)))
    entities = np.array(_numbers(kinds), np.int64)
    flows = np.array(_numbers([(i.kind, i.latency_s, i.turn_s) for i in instances]), np.int64)
    size = 0
    while True:
        flows = _first_numbers(_marks(flows, 3) + meets.sums(_marks(entities[member], 4))
                               + passes.sums(_marks(ports[port] * amounts + amount, 5)))
        ports = _first_numbers(_marks(ports, 6) + passed.sums(_marks(flows[user] * amounts + used, 7)))
        entities = _first_numbers(_marks(entities, 8) + owner.sums(_marks(flows[joined], 9)))
        before, size = size, sum(int(c.max(initial=0)) for c in (entities, flows, ports))
        if size == before:
            return Colours(entities.tolist(), flows.tolist(), ports[twin].tolist())
