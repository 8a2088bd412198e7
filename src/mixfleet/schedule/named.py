"""Pipeline schedules: in which order every device does the forwards and backwards of its chunks. Nothing else.

A *chunk* is one block range of the chain, `home[k]` the stage (devices) that computes chunk k. A schedule takes the
homes and the number of micro-batches, and returns for each stage its steps (op, chunk, micro-batch). Passes add
communication, recompute, sharding and the optimizer (`lower`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from mixfleet.schedule import asynchronous
from mixfleet.schedule.asynchronous import Weights
from mixfleet.schedule.greedy import B, F, I, Orders, Rule, Step, W, Work, greedy, makespan

Homes = tuple[int, ...]


def straight(stages: int) -> Homes:
    """One chunk per stage."""
    return tuple(range(stages))


def loops(stages: int, rounds: int) -> Homes:
    """The chain goes round the stages: 0 1 2 0 1 2."""
    return tuple(range(stages)) * rounds


def waves(stages: int, rounds: int) -> Homes:
    """The chain goes there and back: 0 1 2 2 1 0 (a V), and again for more rounds. `rounds` counts single passes."""
    there = tuple(range(stages))
    return sum((there if r % 2 == 0 else there[::-1] for r in range(rounds)), ())


def gpipe(home: Homes, micro_batches: int) -> Orders:
    """All forwards, then all backwards (Huang et al., 2019). Holds every micro-batch."""
    ms = range(micro_batches)
    return tuple((*((F, k, m) for m in ms), *((B, k, m) for m in ms)) for k in home)


def one_f_one_b(home: Homes, micro_batches: int, turns: Sequence[int] = ()) -> Orders:
    """Warm up, alternate, drain (PipeDream-Flush, DAPPLE's early backward). Stage i holds min(p - i, m).

    `turns[i]` replicas of stage i take micro-batches in turn: each then holds as many as it takes to keep all workers
    from there on busy, ceil(sum(turns[i:]) / turns[i]) (PipeDream's NOAM).
    """
    ahead = [len(home) - k - 1 for k in home]
    if turns:
        ahead = [n * -(-sum(turns[k:]) // n) - 1 for k, n in enumerate(turns)]
        for k in reversed(range(len(home) - 1)):
            ahead[k] = max(ahead[k], ahead[k + 1] + 1)
    orders = []
    for k in home:
        warm = min(ahead[k], micro_batches)
        steps: list[Step] = [(F, k, m) for m in range(warm)]
        for m in range(micro_batches):
            steps += [(F, k, m + warm)] if m + warm < micro_batches else []
            steps.append((B, k, m))
        orders.append(tuple(steps))
    return tuple(orders)


def _rounds(home: Homes) -> tuple[int, int]:
    stages = max(home) + 1
    return stages, len(home) // stages


def interleaved(home: Homes, micro_batches: int) -> Orders:
    """1F1B over chunks, in groups of p micro-batches (Narayanan et al., 2021): bubble (p - 1) / (v m)."""
    stages, rounds = _rounds(home)
    total = micro_batches * rounds

    def step(i: int, device: int, op: str) -> Step:
        group, rest = divmod(i, stages * rounds)
        turn, m = divmod(rest, stages)
        turn = turn if op == F else rounds - 1 - turn
        return op, turn * stages + device, group * stages + m

    orders = []
    for d in range(stages):
        warm = min(total, (stages - d - 1) * 2 + (rounds - 1) * stages)
        steps = [step(i, d, F) for i in range(warm)]
        for i in range(total):
            steps += [step(i + warm, d, F)] if i + warm < total else []
            steps.append(step(i, d, B))
        orders.append(tuple(steps))
    return tuple(orders)


def looped_bfs(home: Homes, micro_batches: int) -> Orders:
    """Every chunk does all micro-batches before the next one begins (Lamy-Poirier, 2023)."""
    ms = range(micro_batches)
    chunks = range(len(home))
    return tuple((*((F, k, m) for k in chunks if home[k] == d for m in ms),
                  *((B, k, m) for k in reversed(chunks) if home[k] == d for m in ms)) for d in range(max(home) + 1))


@cache
def _listed(home: Homes, micro_batches: int, limit: int, split: bool) -> Orders:
    """The best of list scheduling with unit times (forward 1, backward 2, halves 1 and 1) and `limit` in flight."""
    ones = (1.0,) * len(home)
    work = Work(home, micro_batches, ones, ones if split else (2.0,) * len(home), ones if split else ())
    while True:
        found = [orders for rule in product((True, False), (False, True), (True, False) if split else (False,),
                                            (False, True))
                 if (orders := greedy(work, Rule((limit,) * work.devices, *rule)))]
        if found:
            return min(dict.fromkeys(found), key=lambda orders: makespan(work, orders))
        limit += 1  # too low for the chain to move at all


def zb_h1(home: Homes, micro_batches: int) -> Orders:
    """Zero bubble with the memory of 1F1B: W fills the gaps (Qi et al., 2023)."""
    return _listed(home, micro_batches, max(home) + 1, True)


def zb_h2(home: Homes, micro_batches: int) -> Orders:
    """Zero bubble with up to 2p - 1 micro-batches in flight (Qi et al., 2023)."""
    return _listed(home, micro_batches, 2 * max(home) + 1, True)


def zb_v(home: Homes, micro_batches: int) -> Orders:
    """Zero bubble on a V of two chunks per device, with the memory of 1F1B (Qi et al., 2024)."""
    return _listed(home, micro_batches, 2 * max(home) + 2, True)


def wave(home: Homes, micro_batches: int) -> Orders:
    """Waves down and up the devices, backward first (Hanayo; Liu et al., 2023)."""
    return _listed(home, micro_batches, len(home), False)


def two_ways(stages: int) -> Homes:
    """Two chains of one chunk per stage, the second in opposite direction: 0 1 2, then 2 1 0."""
    return straight(stages) + straight(stages)[::-1]


def chimera(home: Homes, down: int, up: int) -> Orders:
    """Two copies of the pipeline in opposite directions, one filling the gaps of the other (Li and Hoefler, 2021).

    Each direction goes by units of p / 2 micro-batches; with forward and backward taken as one slot each, both meet in
    no slot if p is even. The second direction's micro-batches are numbered behind those of the first.
    """
    stages = len(home) // 2
    half = (stages + 1) // 2
    slots: list[list[tuple[int, Step]]] = [[] for _ in range(stages)]
    for k, d in enumerate(home):
        chain, depth = divmod(k, stages)
        for i in range(down if chain == 0 else up):
            unit, turn = divmod(i, half)
            m, at = i + chain * down, 4 * half * unit + 2 * turn
            slots[d] += [(at + depth, (F, k, m)), (at + 2 * stages - 1 - depth, (B, k, m))]
    return tuple(tuple(step for _, step in sorted(mine)) for mine in slots)


def _dual(place: int, depth: int, micro_batches: int) -> list[Step]:
    """What a device does with its two chunks, 0 nearer to where its micro-batches come in: DualPipe's eight phases.

    `place` counts from the nearer end of `depth` devices. Forwards of one chunk stand beside backwards of the other.
    """
    outer, inner = depth - place - 1, place + 1
    pair = [(F, 0), (B, 1), (F, 1), (B, 0)]
    steps = ([(F, 0)] * (2 * outer) + [(F, 0), (F, 1)] * inner + [(I, 1), (W, 1), (F, 1)] * outer
             + pair * (micro_batches - 2 * depth + inner) + pair[1:] * outer)
    ending = [(B, 1), (B, 0)] * inner
    steps += [*ending[:inner], *((I, k) for _, k in ending[inner:])]
    halved = [k for _, k in ending[inner:]]
    for k in [0] * outer + [-1] * inner:  # the weight halves put off fill what the last backwards leave
        steps.append((W, halved.pop(0)))
        if k == 0:
            steps.append((I, 0))
            halved.append(0)
    seen: dict[tuple[str, int], int] = {}
    numbers: list[Step] = []
    put_off: dict[int, list[int]] = {0: [], 1: []}
    for op, k in steps:
        if op == W:
            m = put_off[k].pop(0)
        else:
            kind = (F if op == F else B, k)
            m = seen[kind] = seen.get(kind, -1) + 1
            if op == I:
                put_off[k].append(m)
        numbers.append((op, k, m))
    return numbers


def dualpipe(home: Homes, down: int, up: int) -> Orders:
    """Two copies in opposite directions, forwards beside backwards, weight halves at the ends (DeepSeek-V3, 2024)."""
    stages = len(home) // 2
    counts = (down, up)
    orders = []
    for d in range(stages):
        second = d >= stages // 2
        steps = _dual(stages - 1 - d if second else d, stages // 2, max(stages, *counts))
        chunks = (d, 2 * stages - 1 - d)
        orders.append(tuple((op, chunks[k ^ second], m + (k ^ second) * down) for op, k, m in steps
                            if m < counts[k ^ second]))
    return tuple(orders)


def dualpipe_v(home: Homes, micro_batches: int) -> Orders:
    """Half of DualPipe: one copy, laid out in a V, so that a device holds a chunk of either way (Qi et al., 2025)."""
    stages = len(home) // 2
    return tuple(tuple((op, (d, 2 * stages - 1 - d)[k], m)
                       for op, k, m in _dual(d, stages, max(2 * stages, micro_batches)) if m < micro_batches)
                 for d in range(stages))


class Schedule(NamedTuple):
    """A named schedule. `rounds` is the least number of chunks per stage; `place` puts chunks on stages.

    `orders` takes the homes and, for each of its `ways`, the number of micro-batches.
    """

    orders: Callable[..., Orders]
    place: Callable[[int, int], Homes]
    rounds: int = 1
    most_rounds: int = 1
    even_rounds: bool = False
    divides: bool = False
    """Whether the number of stages must divide that of micro-batches."""
    splits: bool = False
    """Whether backward is split into input and weight halves."""
    ways: int = 1
    """Pipelines that share the devices, each with a copy of the weights."""
    even_stages: bool = False
    weights: Weights | None = None
    """Of an asynchronous schedule: which weights each step reads. Its `orders` span several updates."""
    covers: bool = False
    """Whether an update's micro-batches must cover the pipeline's depth."""

    def counts(self, micro_batches: int) -> tuple[int, ...]:
        """That many micro-batches, shared among the ways as evenly as can be."""
        return tuple((micro_batches + i) // self.ways for i in reversed(range(self.ways)))

    def starts(self, home: Homes) -> tuple[int, ...]:
        """The first chunk of each way."""
        return tuple(range(0, len(home), len(home) // self.ways))

    def why_not(self, home: Homes, *counts: int) -> str | None:
        """Why these chunks or micro-batches (those of each way) do not suit, with what would."""
        if len(counts) != self.ways:
            return (f"wants {self.ways} pipelines in opposite directions on the same devices; here they are "
                    f"{len(counts)}" if self.ways > 1 else "wants one pipeline on its devices, not several")
        stages, micro_batches = max(home) + 1, sum(counts)
        rounds, rest = divmod(len(home), stages * self.ways)
        if rest or not self.rounds <= rounds <= self.most_rounds or (self.even_rounds and rounds % 2):
            want = f"{self.rounds}" if self.rounds == self.most_rounds else (
                f"{self.rounds} or more" + (", an even number" if self.even_rounds else ""))
            return f"wants {want} chunks on each stage; there are {len(home)} chunks on {stages} stages"
        if self.even_stages and stages % 2:
            return f"wants an even number of stages; there are {stages}, nearest {stages - 1} or {stages + 1}"
        if home != self.place(stages, rounds):
            return (f"wants its chunks on stages {', '.join(map(str, self.place(stages, rounds)))} in the order of the "
                    f"chain; they are on {', '.join(map(str, home))}")
        if self.divides and micro_batches % stages:
            low = micro_batches // stages * stages
            near = f"{low} or {low + stages}" if low else f"{stages}"
            return f"wants micro-batches in groups of {stages}; there are {micro_batches}, nearest {near}"
        if self.covers and micro_batches < stages - 1:
            return (f"holds two versions of the weights, for which an update of {stages} stages wants at least "
                    f"{stages - 1} micro-batches; there are {micro_batches}")
        return None


def _straight(stages: int, rounds: int) -> Homes:
    return straight(stages)


def _opposite(stages: int, rounds: int) -> Homes:
    return two_ways(stages)


def _streamed(weights: Weights, *, covers: bool = False) -> Schedule:
    def orders(home: Homes, micro_batches: int) -> Orders:
        return asynchronous.stream(home, micro_batches, asynchronous.enough(len(home), micro_batches), weights)

    return Schedule(orders, _straight, weights=weights, covers=covers)


_MANY = 1 << 10

SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, _straight),
    "1f1b": Schedule(one_f_one_b, _straight),
    "interleaved": Schedule(interleaved, loops, rounds=2, most_rounds=_MANY, divides=True),
    "looped-bfs": Schedule(looped_bfs, loops, rounds=2, most_rounds=_MANY),
    "wave": Schedule(wave, waves, rounds=2, most_rounds=_MANY, even_rounds=True),
    "zb-h1": Schedule(zb_h1, _straight, splits=True),
    "zb-h2": Schedule(zb_h2, _straight, splits=True),
    "zb-v": Schedule(zb_v, waves, rounds=2, most_rounds=2, splits=True),
    "chimera": Schedule(chimera, _opposite, ways=2),
    "dualpipe": Schedule(dualpipe, _opposite, splits=True, ways=2, even_stages=True),
    "dualpipe-v": Schedule(dualpipe_v, waves, rounds=2, most_rounds=2, splits=True),
    "async-1f1b": _streamed(asynchronous.NAIVE),
    "pipedream": _streamed(asynchronous.STASH),
    "pipedream-vertical": _streamed(asynchronous.VERTICAL),
    "pipedream-2bw": _streamed(asynchronous.DOUBLE, covers=True),
    "pipeoptim": _streamed(asynchronous.PREDICT),
    "xpipe": _streamed(asynchronous.BELLWETHER),
    "hetpipe": _streamed(asynchronous.WAVES),
}
