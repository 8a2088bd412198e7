"""Unequal pieces of state where equal ones do not fit: every replica gets a part in proportion to the room it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from mixfleet.cluster import Cluster
from mixfleet.cost.memory import allocator_factor
from mixfleet.plan import Plan, Sharding
from mixfleet.search.space import Shape
from mixfleet.search.tables import MODES, Pieces, Tables
from mixfleet.sim import Prediction
from mixfleet.units import show_bytes

FINENESS = 1000
"""Shares of a plan add up to about this."""


def parts(tables: Tables, shape: Shape, sharding: Sharding) -> list[float] | None:
    """The part of the sharded state for each replica of a team, so that all are equally full.

    Room is what micro-batch 1 under full recompute leaves. None if all rooms together are too small, and where the
    question is another one: several stages, or state that is held in more than one group.
    """
    n = sum(team.replicas for team in shape)
    degrees = (sharding.weights, sharding.gradients, sharding.optimizer)
    if n < 2 or max(degrees) == 1 or not {*degrees} <= {1, n} or any(
            team.stages > 1 or team.context > 1 for team in shape):
        return None
    rooms = []
    whole = (0, len(tables.job.model.blocks))
    for team in shape:
        group = team.ranks[0][0]
        table, communicators = tables.table(group, 1), 2 + (len(group) > 1)
        need = []
        for part in (0.0, 0.5):
            state = tables.state_bytes(len(group), Pieces.portion(sharding, part))
            need.append(float(table.need_bytes(state, len(MODES) - 1, 1, first=True, last=True,
                                               communicators=communicators)[whole]))
        bare, half = need
        rooms.append((table.capacity_bytes - bare) / (2 * (half - bare)))
    together = sum(max(0.0, room) * team.replicas for room, team in zip(rooms, shape))
    if min(rooms) < 0 or together < 1:
        return None
    return [room / together for room in rooms]


def shares(shape: Shape, portions: Sequence[float]) -> tuple[int, ...]:
    """One whole number per replica."""
    return tuple(round(FINENESS * part) for part, team in zip(portions, shape) for _ in range(team.replicas))


def by_room(plan: Plan, prediction: Prediction, cluster: Cluster) -> Plan | None:
    """The plan, whose state is cut over all replicas, with pieces in proportion to the room that they have: for a
    replica of several stages that of the stage which allows the smallest part of its blocks. None where that makes no
    difference or is not enough.

    What a device holds grows in proportion to its part, as far as it holds state of the kinds that are cut.
    """
    n, shard = len(plan.replicas), plan.sharding
    degrees = {"weights": shard.weights, "gradients": shard.gradients, "master": shard.optimizer,
               "moments": shard.optimizer}
    if n < 2 or max(degrees.values()) == 1 or not {*degrees.values()} <= {1, n}:
        return None
    now = shard.shares or (1,) * n
    rooms = [inf] * n
    for use in prediction.devices:
        part = now[use.replica] / sum(now)
        cut = sum(use.breakdown.get(kind, 0) for kind, degree in degrees.items() if degree == n)
        if not part or not cut:
            continue
        grows = cut / part * allocator_factor(cluster.devices[use.rank])
        rooms[use.replica] = min(rooms[use.replica], part + (use.capacity_bytes - use.peak_bytes) / grows)
    if min(rooms) < 0 or max(rooms) == inf or sum(rooms) < 1:
        return None
    found = tuple(round(FINENESS * room / sum(rooms)) for room in rooms)
    return plan.replace(sharding=shard.replace(shares=found)) if len({*found}) > 1 else None


def stranded(plan: Plan, even: Prediction) -> Iterator[str]:
    """What equal pieces would have wasted, if the plan has unequal ones; `even` predicts it with equal ones."""
    short = [d for d in even.devices if not d.fits]
    if not plan.sharding.shares or not short:
        return
    worst = max(short, key=lambda d: (d.lacks_bytes, -d.rank))
    free = sum(d.capacity_bytes - d.peak_bytes for d in even.devices if d.fits)
    yield (f"pieces of state in proportion to memory: equal ones lack {show_bytes(worst.lacks_bytes)} on "
           f"{worst.device} (rank {worst.rank}) and strand {show_bytes(free)} on "
           f"{len(even.devices) - len(short)} other devices")
