"""A 3-D grid of tensor parallelism times data parallelism: bytes per axis, and which grid moves them soonest.

AxoNN (Singh et al., 2023, arXiv 2305.13525), after the 3-D matrix product of Agarwal et al. (1995). A projection with
weight (n, k) has its inputs (k) cut along x, its outputs (n) along y; along z the rows of the activations are cut, and
the weight's block is sharded. Weights are gathered along z, forward and backward; results are summed along x, the
gradients of inputs along y, and those of weights scattered along z and summed over the data replicas. Every second
projection of a block is *transposed*, x and y in exchange, so that outputs are cut as the next one's inputs are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mixfleet.cluster import Cluster
from mixfleet.cost.network import CollectiveOp, Ports
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.model.spec import Model

AXES = ("x", "y", "z", "data")


class Grid(NamedTuple):
    """Ranks along each axis. x changes fastest from rank to rank, then y, z and data."""

    x: int
    y: int
    z: int
    data: int

    @property
    def size(self) -> int:
        return self.x * self.y * self.z * self.data

    def groups(self, axis: str) -> list[list[int]]:
        """Places on the grid that differ in one coordinate only."""
        at = AXES.index(axis)
        stride = 1
        for length in self[:at]:
            stride *= length
        return [[first + i * stride for i in range(self[at])] for first in range(self.size)
                if first // stride % self[at] == 0]


class Move(NamedTuple):
    """A collective along an axis: elements of the whole buffer of one rank, and how often it happens."""

    axis: str
    op: CollectiveOp
    elements: float
    times: int


def moves(rows: float, fan_in: int, fan_out: int, grid: Grid, *, transposed: bool = False) -> tuple[Move, ...]:
    """What one projection moves, forward and backward, on `rows` rows of each data replica."""
    x, y, z = (grid.y, grid.x, grid.z) if transposed else grid[:3]
    along, across = ("y", "x") if transposed else ("x", "y")
    block = fan_in * fan_out / (x * y)
    return (Move("z", "all_gather", block, 2), Move(along, "all_reduce", rows * fan_out / (z * y), 1),
            Move(across, "all_reduce", rows * fan_in / (z * x), 1), Move("z", "reduce_scatter", block, 1),
            Move("data", "all_reduce", block / z, 1))


def sent(move: Move, grid: Grid) -> float:
    """Elements that each rank sends: (g - 1) / g of the buffer, twice that for an all-reduce."""
    n = grid[AXES.index(move.axis)]
    return move.times * (2 if move.op == "all_reduce" else 1) * (n - 1) / n * move.elements


def projections(model: Model) -> Iterator[tuple[int, int, bool]]:
    """(inputs, outputs, transposed) of every projection that tensor parallelism cuts, in order. Those that it cuts
    along their inputs are the transposed ones."""
    for block in model.blocks:
        for p in block.params:
            if p.role == "dense" and p.split is not None and len(p.shape) == 2:
                yield p.shape[1], p.shape[0], p.split == 1


class Choice(NamedTuple):
    """A grid, bytes that each rank sends per step along each axis, and the seconds of all that, nothing overlapped."""

    grid: Grid
    sent_bytes: dict[str, float]
    seconds: float
    why_not: str
    """Why the decoders of this runtime cannot be trained on it; empty if they can."""


def rank_configs(job: Job, cluster: Cluster, ranks: Sequence[int] | None = None) -> list[Choice]:
    """All grids of these ranks (of the whole cluster), those that communicate for the shortest time first.

    The batch must divide by the data replicas, its rows by z, and every projection by x and y; empty if none does. An
    axis takes as long as all its groups need together, by the links that they share.
    """
    ranks = range(len(cluster.devices)) if ranks is None else ranks
    shapes: dict[tuple[int, int, bool], int] = {}
    for projection in projections(job.model):
        shapes[projection] = shapes.get(projection, 0) + 1
    if not shapes:
        raise InputError(f"{job.model.name} has no projection that tensor parallelism cuts")
    found = []
    for grid in _factors(len(ranks)):
        x, y, z, data = grid
        rows = job.global_batch * job.seq_len / data
        if job.global_batch % data or rows % z or any(n % d for k, m, _ in shapes for n in (k, m) for d in (x, y)):
            continue
        total: dict[tuple[str, CollectiveOp], float] = {}
        nbytes = dict.fromkeys(AXES, 0.0)
        for (fan_in, fan_out, transposed), count in shapes.items():
            for move in moves(rows, fan_in, fan_out, grid, transposed=transposed):
                element = job.bytes.gradient_bytes if move.axis == "data" or move.op == "reduce_scatter" else \
                    job.bytes.weight_bytes if move.axis == "z" else job.bytes.compute_bytes
                nbytes[move.axis] += count * sent(move, grid) * element
                key = (move.axis, move.op)
                total[key] = total.get(key, 0.0) + count * move.times * move.elements * element
        seconds = sum(_together_s(op, n, [[ranks[i] for i in group] for group in grid.groups(axis)], cluster)
                      for (axis, op), n in total.items() if grid[AXES.index(axis)] > 1)
        found.append(Choice(grid, nbytes, seconds, why_not(grid)))
    return sorted(found, key=lambda choice: (choice.seconds, choice.grid))


def why_not(grid: Grid) -> str:
    """Why a decoder cannot be trained on a grid: weights are cut along one dimension (`tensor`), which is y."""
    if grid.x == 1:
        return ""
    return (f"x is {grid.x}: blocks cut their weights along one dimension, so x must be 1; take a grid of x = 1, which "
            f"is tensor {grid.y}, weights sharded {grid.z} ways, {grid.z * grid.data} replicas")


def _factors(n: int) -> Iterator[Grid]:
    for x in (d for d in range(1, n + 1) if n % d == 0):
        for y in (d for d in range(1, n // x + 1) if n // x % d == 0):
            for z in (d for d in range(1, n // x // y + 1) if n // x // y % d == 0):
                yield Grid(x, y, z, n // x // y // z)


def _together_s(op: CollectiveOp, nbytes: float, groups: Sequence[Sequence[int]], cluster: Cluster) -> float:
    """Seconds of equal collectives in all groups at once."""
    ports, latency_s, busy_s = Ports.of(cluster), 0.0, dict[int, float]()
    for group in groups:
        loads = ports.loads(op, nbytes, group)
        latency_s = max(latency_s, loads.latency_s)
        for port, seconds in zip(loads.ports.tolist(), loads.seconds.tolist()):
            busy_s[port] = busy_s.get(port, 0.0) + seconds
    return latency_s + max(busy_s.values(), default=0.0)
