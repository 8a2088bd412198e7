"""Samples of unequal length on unequal devices: who computes which of a step's samples, in what micro-batches.

Which samples a step has belongs to the job; who computes them, to the plan. Loss and gradient are sums over the step's
tokens, so any arrangement gives the same. It follows from the lengths and the plan alone, so every rank and the
simulator find the same one, without a message.

`padded` takes the samples in order, each in a row of `seq_len`. `bucketed` puts samples of like length into one
micro-batch and pads them to its longest. `packed` lays them behind one another in one row, each attending to itself
only. The latter two give replicas samples by what they cost there: an attention that grows with the square of the
length, and all else, that grows with it. No micro-batch has more positions than `micro_batch` samples of `seq_len`, so
that no step takes more memory than predicted. Under context parallelism every sample is cut over the parts, so that
each has its share of the work of each (`Parts`). See `docs/data.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from math import inf, lcm
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mixfleet.cluster import Cluster, Device
from mixfleet.cost.clock import held_cost
from mixfleet.job import Job
from mixfleet.plan import Batching, Pipeline, Plan
from mixfleet.samples import Order, open_sizes
from mixfleet.spec import Spec
from mixfleet.units import NS_PER_S

EXACT_SAMPLES = 8
"""Samples up to which all ways to share them among replicas are compared."""
_IMPROVED, _TRIED = 64, 400
"""Moves that are made to improve a larger step, and ways that are looked at for each."""
STEPS = 8
"""Steps that a prediction looks at."""


class Micro(NamedTuple):
    """A micro-batch: rows of samples, all padded to `width` positions; or the part of it that one copy of the weights
    computes under context parallelism."""

    rows: tuple[tuple[int, ...], ...]
    """The samples in each row, by their places in the step's global batch."""
    width: int
    """Positions of each row that are here."""
    segments: tuple[int, ...] = ()
    """Packed: lengths of the pieces of its one row that attend to themselves only, padding included."""
    whole: int = 0
    """Of a part: positions of each row in all parts."""
    own: tuple[int, ...] = ()
    """Of a part of a packed row: positions of each segment that are here."""

    @property
    def positions(self) -> int:
        return len(self.rows) * self.width


class Batch(NamedTuple):
    """How the samples of one step lie on the replicas."""

    micro: tuple[tuple[Micro, ...], ...]
    """Micro-batches by copy of the weights (`Plan.replicas`)."""
    seconds: tuple[float, ...]
    """What each replica computes, by the cost model; one that shares its sequences counts once."""
    tokens: int
    """Real ones."""

    @property
    def padding(self) -> float:
        """Share of all positions that hold no token."""
        return 1 - self.tokens / sum(m.positions for row in self.micro for m in row)

    @property
    def imbalance(self) -> float:
        """By how much the slowest replica computes longer than the mean."""
        return max(self.seconds) / (sum(self.seconds) / len(self.seconds)) - 1 if any(self.seconds) else 0.0


class Curve(NamedTuple):
    """Seconds of a micro-batch: `fixed_s + position_s * positions + square_s * (squares of lengths, summed)`."""

    fixed_s: float
    position_s: float
    square_s: float

    def of(self, positions: float, squares: float) -> float:
        return self.fixed_s + self.position_s * positions + self.square_s * squares

    def micro(self, micro: Micro) -> float:
        squares = sum(n * n for n in micro.segments) if micro.segments else len(micro.rows) * micro.width**2
        return self.of(micro.positions, squares)


class Parts:
    """How rows are cut over the parts of sequences under context parallelism.

    A row consists of cells: half of a cell are neighbours in the first half of a sample, the rest is their mirror image
    in the second. Cells go to the parts one by one, each to that which lags most behind its share (Webster's method),
    so that every prefix of a row is shared out as evenly as can be, whatever its samples; of `seq_len` positions a part
    gets what it has of a padded row. Within a sample, a part's cells are neighbours, as in `Pipeline.spans`.
    """

    def __init__(self, unit: int, cells: tuple[int, ...]) -> None:
        """Cells of `unit` positions; each part has so many `cells` of a row of `seq_len`, at least one."""
        self.unit, self._cells, self._round = unit, cells, sum(cells)
        turns = np.concatenate([(2 * np.arange(n) + 1) / n for n in cells])
        part = np.repeat(np.arange(len(cells)), cells)
        dealt = part[np.lexsort((part, turns))]
        self._turns = [np.flatnonzero(dealt == p) for p in range(len(cells))]
        self.least = (1 + max(int(turns[0]) for turns in self._turns)) * unit
        """Positions of the shortest row of which every part has some."""
        self._rows: dict[tuple[int, int], int] = {}

    @staticmethod
    def of(pipeline: Pipeline, seq_len: int) -> Parts:
        """Those of a pipeline with `context` above 1."""
        unit = 2 * pipeline.context_unit
        return _parts(unit, tuple(pipeline.tokens(seq_len, p) // unit for p in range(pipeline.context)))

    def dealt(self, cells: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """How many of the first `cells` cells of a row each part has: [parts, len(cells)]."""
        rounds, rest = np.divmod(np.array(cells, np.int64), self._round)
        return np.stack([n * rounds + np.searchsorted(turns, rest) for n, turns in zip(self._cells, self._turns)])

    def _edges(self, micro: Micro) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """Cells that each part has before each segment of a row, and of all: [parts, segments + 1]."""
        return self.dealt([n // self.unit for n in accumulate(micro.segments or (micro.width,), initial=0)])

    def cut(self, micro: Micro) -> list[Micro]:
        """What each part has of a micro-batch."""
        own = [tuple(one) for one in (np.diff(self._edges(micro)) * self.unit).tolist()]
        return [Micro(micro.rows, sum(n), micro.segments, micro.width, n if micro.segments else ()) for n in own]

    def spans(self, micro: Micro) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The positions of each part in a whole row, as [lo, hi), segment by segment; `micro` may be a part."""
        whole = micro._replace(width=micro.whole or micro.width)
        half = self.unit // 2
        found: list[list[tuple[int, int]]] = [[] for _ in self._cells]
        starts = accumulate(whole.segments or (whole.width,), initial=0)
        for (start, end), counts in zip(pairwise(starts), np.diff(self._edges(whole)).T.tolist()):
            at = 0
            for part, n in zip(found, counts):
                if n:
                    a, b = at * half, (at + n) * half
                    part += [(start + a, start + b), (end - b, end - a)]
                at += n
        return tuple(map(tuple, found))

    def rows(self, width: int, room: int) -> int:
        """Rows of `width` of which no part has more positions than of `room` positions in rows of `seq_len`."""
        if (width, room) not in self._rows:
            here = self.dealt([width // self.unit])[:, 0].tolist()
            times = room // (self._round * self.unit)
            self._rows[width, room] = min(times * n // h for n, h in zip(self._cells, here))
        return self._rows[width, room]


@lru_cache(maxsize=64)
def _parts(unit: int, cells: tuple[int, ...]) -> Parts:
    return Parts(unit, cells)


class Bin(NamedTuple):
    """What one replica is to the arrangement."""

    curve: Curve
    micro_batches: int
    """Micro-batches per step."""
    room: int
    """Most positions of one."""
    unit: int
    """Rows are multiples of so many positions."""
    stages: int = 1
    parts: Parts | None = None
    """Of sequences, if the replica shares them. Every sample of a packed row is padded to `unit` then."""

    def taken(self, length: int) -> int:
        """Positions that a sample takes in a packed row."""
        return up(length, self.unit) if self.parts else length

    def width(self, length: int) -> int:
        """Of rows whose longest sample has so many tokens."""
        return max(up(length, self.unit), self.parts.least if self.parts else 0)

    def rows(self, width: int) -> int:
        """Most rows of that width."""
        return self.parts.rows(width, self.room) if self.parts else self.room // width

    def shaped(self, places: Sequence[int], lengths: Sequence[int], batching: Batching) -> Micro:
        """A micro-batch of these samples."""
        if batching == "bucketed":
            return Micro(tuple((p,) for p in places) or ((),), self.width(max((lengths[p] for p in places), default=0)))
        segments = tuple(self.taken(lengths[p]) for p in places)
        width = self.width(sum(segments))
        padding = width - sum(segments)
        return Micro((tuple(places),), width, (*segments, padding) if padding else segments)


class BatchUse(Spec, frozen=True, kw_only=True):
    """What a prediction says about the batches of a job whose samples differ in length: means over some steps."""

    steps: int
    step_s: float
    least_s: float
    most_s: float
    """Shortest and longest step."""
    deviation_s: float
    """Standard deviation of the step's time."""
    tokens: float
    """Real tokens per step."""
    padding: float
    """Share of positions that hold no token."""
    imbalance: float
    """By how much the slowest replica computes longer than the mean."""


class Batcher:
    """Arranges the steps of a plan. `lengths` below are those of a step's samples, by their places."""

    def __init__(self, plan: Plan, job: Job, cluster: Cluster) -> None:
        self.batching: Batching = plan.batching
        self._seq_len = job.seq_len
        self._in_step = plan.expert > 1 or (plan.sharding.gradients > 1 and plan.accumulation == "plain")
        known: dict[object, Curve] = {}
        self.bins: list[Bin] = []
        """By replica; the parts of one that shares its sequences are one."""
        self._naive: list[list[tuple[int, ...]]] = []
        at = 0
        for pipeline in plan.pipelines:
            for r in range(pipeline.replicas):
                devices = tuple(tuple(tuple(cluster.devices[d] for d in s.ranks(r * pipeline.context + part))
                                      for part in range(pipeline.context)) for s in pipeline.stages)
                key = (pipeline.stages[0].blocks, pipeline.micro_batch, devices, pipeline.context_shares,
                       tuple((s.chunks, s.tensor, s.recompute) for s in pipeline.stages))
                if key not in known:
                    known[key] = _curve(pipeline, devices, job)
                sizes = pipeline.micro_batches
                parts = Parts.of(pipeline, job.seq_len) if pipeline.context > 1 else None
                self.bins.append(Bin(known[key], len(sizes), pipeline.micro_batch * job.seq_len,
                                     parts.unit if parts else lcm(*(s.tensor for s in pipeline.stages)),
                                     len(pipeline.stages), parts))
                self._naive.append([])
                for size in sizes:
                    self._naive[-1].append(tuple(range(at, at + size)))
                    at += size

    def step(self, lengths: tuple[int, ...]) -> Batch:
        """The arrangement of a step."""
        if self.batching == "padded":
            return self._made([[Micro(tuple((p,) for p in places), self._seq_len) for places in one]
                               for one in self._naive], lengths)
        naive = [[b.shaped(places, lengths, self.batching) for places in one]
                 for one, b in zip(self._naive, self.bins)]
        found = self._exact(lengths) if len(lengths) <= EXACT_SAMPLES and not self._in_step else \
            self._improved(lengths)
        if found is None or self._makespan(found) >= self._makespan(naive):
            found = naive
        # Where replicas meet at every micro-batch, the longest of all meet each other.
        return self._made([sorted(one, key=b.curve.micro, reverse=True) for one, b in zip(found, self.bins)], lengths)

    def _made(self, micro: Sequence[Sequence[Micro]], lengths: Sequence[int]) -> Batch:
        seconds = tuple(_seconds(one, b) for one, b in zip(micro, self.bins))
        copies: list[tuple[Micro, ...]] = []
        for one, b in zip(micro, self.bins):
            copies += zip(*map(b.parts.cut, one)) if b.parts else [tuple(one)]
        return Batch(tuple(copies), seconds, sum(lengths))

    def _makespan(self, micro: Sequence[Sequence[Micro]]) -> float:
        """Seconds until the slowest replica is done."""
        if not self._in_step:
            return max(_seconds(one, b) for one, b in zip(micro, self.bins))
        costs = [sorted(map(b.curve.micro, one), reverse=True) for one, b in zip(micro, self.bins)]
        return float(sum(map(max, zip_longest(*costs, fillvalue=0.0))))

    def _grouped(self, places: Sequence[int], lengths: Sequence[int], b: Bin) -> list[Micro] | None:
        """One replica's samples in its micro-batches; None if there is no room."""
        return (packed if self.batching == "packed" else bucketed)(places, lengths, b)

    def _exact(self, lengths: Sequence[int]) -> list[list[Micro]] | None:
        """The best of all ways to share out the samples: dynamic programming over sets of samples."""
        n = len(lengths)
        whole = (1 << n) - 1
        groups: dict[tuple[Bin, int], list[Micro] | None] = {}

        def group(b: Bin, mask: int) -> list[Micro] | None:
            if (b, mask) not in groups:
                groups[b, mask] = self._grouped([i for i in range(n) if mask >> i & 1], lengths, b)
            return groups[b, mask]

        def seconds(b: Bin, mask: int) -> float:
            made = group(b, mask)
            return inf if made is None else _seconds(made, b)

        best: dict[int, float] = {0: 0.0}
        choices: list[dict[int, int]] = []
        for i, b in enumerate(self.bins):
            cost = {mask: seconds(b, mask) for mask in range(whole + 1)}
            after: dict[int, float] = {}
            choice: dict[int, int] = {}
            for mask in range(whole + 1) if i + 1 < len(self.bins) else (whole,):
                sub = mask
                while True:
                    before = best.get(mask ^ sub, inf)
                    if before < inf and cost[sub] < inf:
                        value = max(before, cost[sub])
                        if value < after.get(mask, inf):
                            after[mask], choice[mask] = value, sub
                    if not sub:
                        break
                    sub = (sub - 1) & mask
            best = after
            choices.append(choice)
        if whole not in best:
            return None
        found: list[list[Micro]] = []
        for b, choice in zip(reversed(self.bins), reversed(choices)):
            made = group(b, choice[whole])
            assert made is not None
            found.append(made)
            whole ^= choice[whole]
        return found[::-1]

    def _improved(self, lengths: Sequence[int]) -> list[list[Micro]] | None:
        """Longest first to whoever ends first with it, or like lengths together; then what makes the slowest faster."""
        starts = [self._longest_first(lengths)]
        if self.batching == "bucketed":
            starts += [self._in_blocks(lengths, order) for order in (range(len(self.bins)), self._by_speed())]
        best, score = None, inf
        for start in starts:
            made = start and self._improve(start, lengths)
            if made and (value := self._makespan(made)) < score:
                best, score = made, value
        return best

    def _weight(self, b: Bin, length: int) -> float:
        return b.curve.of(length, length**2) - b.curve.fixed_s

    def _by_speed(self) -> list[int]:
        """Replicas, slow ones first: for them short samples cost less, since attention is a smaller part."""
        return sorted(range(len(self.bins)), key=lambda k: (-self._weight(self.bins[k], self._seq_len), k))

    def _longest_first(self, lengths: Sequence[int]) -> list[list[int]] | None:
        loads = [b.micro_batches * b.curve.fixed_s for b in self.bins]
        room = [b.micro_batches * b.room for b in self.bins]
        given: list[list[int]] = [[] for _ in self.bins]
        for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            length = lengths[place]
            open_ = [k for k, b in enumerate(self.bins) if room[k] >= b.taken(length)]
            if not open_:
                return None
            k = min(open_, key=lambda k: (loads[k] + self._weight(self.bins[k], length), k))
            given[k].append(place)
            loads[k] += self._weight(self.bins[k], length)
            room[k] -= self.bins[k].taken(length)
        return given

    def _in_blocks(self, lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
        """Samples by length, cut into one run for each replica by its speed."""
        left = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
        given: list[list[int]] = [[] for _ in self.bins]
        speeds = {k: 1 / max(self._weight(self.bins[k], self._seq_len), 1e-30) for k in order}
        for n, k in enumerate(order):
            b, rest = self.bins[k], sum(speeds[j] for j in order[n:])
            wanted = sum(self._weight(b, lengths[i]) for i in left) * speeds[k] / rest
            done = 0.0
            while left and (n + 1 == len(order) or done + self._weight(b, lengths[left[0]]) / 2 < wanted):
                done += self._weight(b, lengths[left[0]])
                given[k].append(left.pop(0))
        return given

    def _improve(self, given: list[list[int]], lengths: Sequence[int]) -> list[list[Micro]] | None:
        """Moves samples off the slowest replica, or swaps one, while that makes the whole faster."""
        made = [self._grouped(places, lengths, b) for places, b in zip(given, self.bins)]
        if any(one is None for one in made):
            return None
        micro = [one for one in made if one is not None]
        score = self._makespan(micro)
        for _ in range(_IMPROVED):
            slow = max(range(len(self.bins)), key=lambda k: _seconds(micro[k], self.bins[k]))
            better = None
            for a, other, c in self._moves(given, lengths, slow)[:_TRIED if self.batching == "packed" else _TRIED // 8]:
                mine = [i for i in given[slow] if i != a] + ([c] if c >= 0 else [])
                theirs = [i for i in given[other] if i != c] + [a]
                one = self._grouped(mine, lengths, self.bins[slow])
                two = self._grouped(theirs, lengths, self.bins[other])
                if one is None or two is None:
                    continue
                trial = list(micro)
                trial[slow], trial[other] = one, two
                if (value := self._makespan(trial)) < score * (1 - 1e-9):
                    better = trial, mine, other, theirs
                    score = value
                    break
            if better is None:
                break
            micro, given[slow], given[better[2]] = better[0], better[1], better[3]
        return micro

    def _moves(self, given: Sequence[Sequence[int]], lengths: Sequence[int], slow: int) -> list[tuple[int, int, int]]:
        """(sample of the slow replica, other replica, sample that comes back or -1), those first that should level the
        two most."""
        loads = [sum(self._weight(b, lengths[i]) for i in places) + b.micro_batches * b.curve.fixed_s
                 for places, b in zip(given, self.bins)]
        found = []
        for other, theirs in enumerate(given):
            if other == slow:
                continue
            b, c = self.bins[slow], self.bins[other]
            for a in given[slow]:
                for back in (-1, *theirs):
                    mine = loads[slow] - self._weight(b, lengths[a])
                    yours = loads[other] + self._weight(c, lengths[a])
                    if back >= 0:
                        mine += self._weight(b, lengths[back])
                        yours -= self._weight(c, lengths[back])
                    if max(mine, yours) < loads[slow]:
                        found.append((max(mine, yours), a, other, back))
        return [(a, other, back) for _, a, other, back in sorted(found)]


def _seconds(micro: Sequence[Micro], b: Bin) -> float:
    """Seconds of one replica: all micro-batches pass its slowest stage, and the longest fills and drains the others."""
    costs = list(map(b.curve.micro, micro))
    return sum(costs) + (b.stages - 1) * max(costs, default=0.0)


def up(length: int, unit: int) -> int:
    """`length` rounded up to a multiple of `unit`, at least one."""
    return max(1, -(-length // unit)) * unit


def packed(places: Sequence[int], lengths: Sequence[int], b: Bin) -> list[Micro] | None:
    """Micro-batches of about equal cost: the longest sample first, each to the one with least that has room. Where that
    leaves one over, all ways are tried for few samples."""
    order = sorted(places, key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = [[] for _ in range(b.micro_batches)]
    costs, filled = [0.0] * b.micro_batches, [0] * b.micro_batches
    for place in order:
        length = b.taken(lengths[place])
        open_ = [m for m in range(b.micro_batches) if filled[m] + length <= b.room]
        if not open_:
            fitted = _fitted(order, lengths, b) if len(order) <= EXACT_SAMPLES else None
            if fitted is None:
                return None
            bins = fitted
            break
        m = min(open_, key=lambda m: (costs[m], m))
        bins[m].append(place)
        filled[m] += length
        costs[m] += b.curve.position_s * length + b.curve.square_s * length**2
    return [b.shaped(sorted(one), lengths, "packed") for one in bins]


def _fitted(order: Sequence[int], lengths: Sequence[int], b: Bin) -> list[list[int]] | None:
    """Some way to lay samples into bins with room, by search."""
    bins: list[list[int]] = [[] for _ in range(b.micro_batches)]
    filled = [0] * b.micro_batches

    def place(n: int) -> bool:
        if n == len(order):
            return True
        seen = set()
        length = b.taken(lengths[order[n]])
        for m in range(b.micro_batches):
            if filled[m] in seen or filled[m] + length > b.room:
                continue
            seen.add(filled[m])
            bins[m].append(order[n])
            filled[m] += length
            if place(n + 1):
                return True
            bins[m].pop()
            filled[m] -= length
        return False

    return bins if place(0) else None


def bucketed(places: Sequence[int], lengths: Sequence[int], b: Bin) -> list[Micro] | None:
    """Micro-batches of like lengths. By length, the best groups are runs; where to cut is found by dynamic programming,
    for the least sum, and with several stages for the least maximum as well."""
    order = sorted(places, key=lambda i: (-lengths[i], i))
    n = len(order)
    costs = np.full((n + 1, n + 1), np.inf)
    counts = np.arange(1, n + 1)
    for i, place in enumerate(order):
        width = b.width(lengths[place])
        rows = counts[:n - i]
        costs[i, i + 1:] = np.where(rows <= b.rows(width), rows * (b.curve.of(width, width**2) - b.curve.fixed_s),
                                    np.inf)
    np.fill_diagonal(costs, b.curve.of(b.width(0), b.width(0)**2) - b.curve.fixed_s)  # one that has no sample
    found = []
    for combine in (np.add, np.maximum)[:1 if b.stages == 1 else 2]:
        cuts = _cuts(costs, b.micro_batches, combine)
        if cuts:
            groups = [order[lo:hi] for lo, hi in pairwise(cuts)]
            found.append([b.shaped(sorted(one), lengths, "bucketed") for one in groups])
    return min(found, key=lambda made: _seconds(made, b)) if found else None


def _cuts(costs: np.ndarray[tuple[int, ...], np.dtype[np.float64]], count: int,
          combine: Callable[..., np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> list[int] | None:
    """Where to cut [0, n) into `count` runs, of which some may be empty, with the least combined `costs[lo, hi]`."""
    n = len(costs) - 1
    best = costs[0]
    back = []
    for _ in range(1, count):
        tried = combine(best[:, None], costs)
        back.append(np.argmin(tried, 0))
        best = np.min(tried, 0)
    if best[n] == np.inf:
        return None
    cuts = [n]
    for step in reversed(back):
        cuts.append(int(step[cuts[-1]]))
    return [0, *reversed(cuts)]


def _curve(pipeline: Pipeline, devices: Sequence[Sequence[Sequence[Device]]], job: Job) -> Curve:
    """The stage that takes longest, as it is on the slowest of its `devices` (by stage and part of a sequence), from
    three shapes: the same positions in longer rows tell what grows with the square, fewer positions what grows with the
    length.

    Times are whole nanoseconds, as the simulator's: the last bits of a prediction depend on what else was asked with
    it, and by those bits one process would break ties otherwise than another."""
    size, length = pipeline.micro_batch, max(2, job.seq_len - job.seq_len % 2)
    found = []
    for stage, parts in zip(pipeline.stages, devices):
        modes = stage.modes
        for device, here in dict.fromkeys((device, pipeline.tokens(job.seq_len, part))
                                          for part, kinds in enumerate(parts) for device in kinds):
            def seconds(rows: int, width: int, stage=stage, device=device, here=here, modes=modes) -> float:  # type: ignore[no-untyped-def]
                own = max(1, round(width * here / job.seq_len))
                return round(NS_PER_S * sum(sum(held_cost(
                    job.model.blocks[i], rows, own, stage.tensor, device, job, modes[i], width / own)[:3])
                    for i in stage.held)) / NS_PER_S
            whole, short, half = (seconds(size, length), seconds(2 * size, length // 2), seconds(size, length // 2))
            positions = size * length
            square = max(0.0, 2 * (whole - short) / (positions * length))
            linear = max(0.0, 2 * (short - half) / positions - square * length / 2)
            fixed = max(0.0, whole - linear * positions - square * positions * length)
            found.append(Curve(fixed, linear, square))
    return max(found, key=lambda c: c.of(size * length, size * length**2))


def steps_of(job: Job, steps: int = STEPS, base: Path = Path()) -> list[tuple[int, ...]]:
    """Lengths of the samples of a job's first steps, by their places; none if all samples are equally long."""
    known: dict[tuple[int, Path], list[tuple[int, ...]]] = job.__dict__.setdefault("_lengths", {})
    if (steps, base) not in known:
        sizes = open_sizes(job, base)
        order = sizes and Order(len(sizes), job.global_batch, job.seed)
        known[steps, base] = [tuple(sizes.of(order.samples(step, 0, job.global_batch)).tolist())
                              for step in range(steps)] if sizes and order else []
    return known[steps, base]
