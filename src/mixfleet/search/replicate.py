"""Pipelines whose stages have unequal numbers of replicas: dynamic programming over a line of devices.

PipeDream's and DAPPLE's planners: the devices stand in a line, every stage takes the next so many of them as its
replicas and the next blocks, and the slowest stage or message of a micro-batch is to be as fast as can be. What comes
out are candidates, which the simulator judges like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import gcd, inf
from typing import NamedTuple

import numpy as np

from mixfleet.cost.memory import boundary_bytes
from mixfleet.cost.network import collective_s
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.search.bounds import hop_s
from mixfleet.search.partition import Matrix
from mixfleet.search.space import Class, tensor_degrees
from mixfleet.search.tables import MODES, Pieces, Tables

STAGES = 4
"""Most stages of such a pipeline; deeper ones need no replicas to balance."""
PLACES = 10
"""Places in a line: with more devices, neighbours share a place."""
COUNTS = (4, 8, 16)
"""Numbers of micro-batches tried for a line."""
TEAMS = 4
"""Most equal pipelines side by side."""

Group = tuple[int, ...]
Place = tuple[Group, ...]
"""Neighbours in a line, each a tensor group; a stage takes all of them or none."""


class Found(NamedTuple):
    """A candidate, and a first estimate of its step, by which candidates are put in order."""

    step_s: float
    plan: Plan


def candidates(tables: Tables, classes: Sequence[Class], best_s: float = inf) -> list[Found]:
    """Plans in which some stage has more replicas than others, most promising first.

    Lines whose devices could not beat `best_s` if nothing but computing took time are left out.
    """
    found: dict[Plan, float] = {}
    for line, replicas in _lines(tables, classes):
        batch, rest = divmod(tables.job.global_batch, replicas)
        if rest:
            continue
        sizes = {m for count in COUNTS if (m := -(-batch // count)) > 1 and m < batch}
        for m in sorted(sizes):
            groups = [group for place in line for group in place[0]]
            ideal = batch / sum(m / tables.table(g, m).whole_s for g in groups)
            for one in _Line(tables, line, replicas, batch, m).plans() if ideal < best_s else ():
                found[one.plan] = min(one.step_s, found.get(one.plan, inf))
    return sorted((Found(seconds, plan) for plan, seconds in found.items()), key=lambda one: one.step_s)


def _lines(tables: Tables, classes: Sequence[Class]) -> Iterator[tuple[list[tuple[Place, ...]], int]]:
    """(line, equal pipelines): per place the tensor groups in each of the pipelines. All classes and the fastest ones
    alone, from fast to slow and back."""
    orders: dict[tuple[Class, ...], None] = {}
    for used in range(1, len(classes) + 1):
        some = tuple(classes[:used])
        orders |= dict.fromkeys((some, some[::-1]))
    for tensor in tensor_degrees(tables.job, 8):
        for order in orders:
            if tensor & (tensor - 1) or any(max(map(len, c.nodes)) % tensor for c in order):
                continue
            groups = [c.tensor_groups(tensor) for c in order]
            for replicas in range(1, TEAMS + 1):
                if any(len(g) % replicas for g in groups):
                    continue
                lines = [[one for g in groups for one in g[r * len(g) // replicas:(r + 1) * len(g) // replicas]]
                         for r in range(replicas)]
                width = -(-len(lines[0]) // PLACES)
                if len(lines[0]) < 3 or any(len(g) // replicas % width for g in groups):
                    continue
                yield [tuple(tuple(line[i:i + width]) for line in lines)
                       for i in range(0, len(lines[0]), width)], replicas


def shares_of(micro_batch: int, speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Samples of a micro-batch for replicas of these speeds, so that the slowest takes least; None if too few."""
    if micro_batch < len(speeds):
        return None
    held = [1] * len(speeds)
    for _ in range(micro_batch - len(speeds)):
        best = min(range(len(speeds)), key=lambda j: ((held[j] + 1) / speeds[j], j))
        held[best] += 1
    return tuple(held)


class _Line:
    """Cuts of one line of devices and of the chain of blocks into stages, for one size of micro-batch."""

    def __init__(self, tables: Tables, line: list[tuple[Place, ...]], replicas: int, batch: int, micro_batch: int
                 ) -> None:
        self._tables, self._line, self._replicas = tables, line, replicas
        self._batch, self._size, self._count = batch, micro_batch, -(-batch // micro_batch)
        self._blocks = len(tables.job.model.blocks)
        self._known: dict[tuple[object, ...], tuple[Matrix, Matrix] | None] = {}
        self._ways = cache(self._hop_s)

    def _members(self, i: int, j: int, pipeline: int = 0) -> list[Group]:
        return [group for place in self._line[i:j] for group in place[pipeline]]

    def _shares(self, members: Sequence[Group]) -> tuple[int, ...] | None:
        return shares_of(self._size, [1 / self._tables.table(g, 1).whole_s for g in members])

    def _stage(self, i: int, j: int, behind: int) -> tuple[Matrix, Matrix] | None:
        """Per block range, seconds of a micro-batch on places i to j - 1 under the cheapest recompute that fits, and
        which that is; the sum of gradients is spread over the micro-batches. `behind` stages follow."""
        members = self._members(i, j)
        in_flight, ends = min(behind + 1, self._count), (i == 0, behind == 0)
        kinds = tuple(self._tables.signature(g) for g in members)
        key = (kinds, in_flight, ends, tuple(members) if len(members) > 1 else ())
        if key not in self._known:
            self._known[key] = self._priced(members, in_flight, *ends)
        return self._known[key]

    def _priced(self, members: list[Group], in_flight: int, first: bool, last: bool) -> tuple[Matrix, Matrix] | None:
        tables, job = self._tables, self._tables.job
        shares = self._shares(members)
        if shares is None:
            return None
        seconds = np.full((self._blocks + 1, self._blocks + 1), inf)
        chosen = np.zeros(seconds.shape, dtype=np.int8)
        tensor = len(members[0])
        state = tables.state_bytes(tensor, Pieces(1, 1, 1))
        alike = dict.fromkeys(zip((tables.signature(g) for g in members), shares))
        rows = [(next(g for g, n in zip(members, shares) if (tables.signature(g), n) == one), one[1]) for one in alike]
        for mode in reversed(range(len(MODES))):
            fits = np.ones(seconds.shape, dtype=bool)
            slowest = np.zeros(seconds.shape)
            for group, n in rows:
                table = tables.table(group, n)
                need = table.need_bytes(state, mode, in_flight, first=first, last=last,
                                        communicators=1 + (tensor > 1) + (self._replicas > 1))
                fits &= (need <= table.capacity_bytes) & (table.forward_s > 0)
                slowest = np.maximum(slowest, table.forward_s + table.backward_s[mode])
            seconds, chosen = np.where(fits, slowest, seconds), np.where(fits, mode, chosen)
        ranks = tuple(g[0] for g in members)
        if len(ranks) > 1 or self._replicas > 1:
            unit = 1 << 24
            rate = collective_s("all_reduce", unit, ranks, tables.cluster) / unit if len(ranks) > 1 else 0.0
            own = state / max(1.0, float(state[0, -1]))  # bytes of gradients in proportion to those of state
            whole = job.model.count // tensor * job.bytes.gradient_bytes
            seconds = seconds + own * whole * rate / self._count
        return seconds, chosen

    def _hop_s(self, j: int) -> Matrix:
        """Seconds of a micro-batch's activations and gradients over the boundary below place j, by block."""
        tables, job = self._tables, self._tables.job
        here, there = self._members(j - 1, j)[-1], self._members(j, j + 1)[0]
        found: dict[str, float] = {}
        for block in job.model.blocks:
            if block.kind not in found:
                nbytes = boundary_bytes(block, self._size, job.seq_len, 1, job)
                found[block.kind] = 2 * hop_s(tables, here, there, nbytes)
        return np.array([0.0, *(found[b.kind] for b in job.model.blocks)])

    def plans(self) -> Iterator[Found]:
        """For each number of stages the cut whose slowest stage or message is fastest, if some stage is replicated."""
        places, blocks = len(self._line), self._blocks
        best = np.full((places + 1, blocks + 1), inf)
        best[places, blocks] = 0.0
        trail: list[dict[tuple[int, int], tuple[int, int]]] = []
        for behind in range(min(STAGES, places, blocks)):
            now = np.full_like(best, inf)
            came: dict[tuple[int, int], tuple[int, int]] = {}
            for i in range(places):
                for j in range(i + 1, places + 1):
                    if (behind == 0) != (j == places) or not np.isfinite(best[j]).any():
                        continue
                    priced = self._stage(i, j, behind)
                    if priced is None:
                        continue
                    after = best[j] if j == places else np.maximum(best[j], self._ways(j))
                    worst = np.maximum(priced[0], after[None, :])
                    choice = worst.argmin(axis=1)
                    value = worst[np.arange(blocks + 1), choice]
                    for a in np.flatnonzero(value < now[i]).tolist():
                        now[i, a], came[i, a] = value[a], (j, int(choice[a]))
            best = now
            trail.append(came)
            if behind and np.isfinite(best[0, 0]):
                found = self._built(trail, float(best[0, 0]))
                if found:
                    yield found

    def _built(self, trail: Sequence[dict[tuple[int, int], tuple[int, int]]], slowest_s: float) -> Found | None:
        at, cuts = (0, 0), [(0, 0)]
        for came in reversed(trail):
            at = came[at]
            cuts.append(at)
        stages = []
        passing = 0.0
        for k, ((i, a), (j, b)) in enumerate(pairwise(cuts)):
            members = self._members(i, j)
            shares = self._shares(members)
            assert shares is not None
            priced = self._stage(i, j, len(trail) - 1 - k)
            assert priced is not None
            passing += float(priced[0][a, b])
            part = gcd(*shares)
            devices = tuple(r for p in range(self._replicas) for g in self._members(i, j, p) for r in g)
            stages.append(Stage(blocks=(a, b), devices=devices, tensor=len(members[0]),
                                shares=tuple(n // part for n in shares) if len(members) > 1 else (),
                                recompute=MODES[int(priced[1][a, b])]))
        if len({stage.members for stage in stages}) == 1:
            return None  # equal replication: other candidates have that
        pipeline = Pipeline(stages=tuple(stages), samples=self._batch, micro_batch=self._size, replicas=self._replicas)
        return Found((self._count - 1) * slowest_s + passing, Plan(pipelines=(pipeline,), sharding=Sharding()))
