"""Pipelines without a flush: 1F1B over the micro-batches of one update after another, and the weights that each reads.

Every m micro-batches make an update (the job's optimizer step), and micro-batches of several updates are in flight
together. An order spans `updates` of them, from fill to drain; in between it repeats itself, m micro-batches and one
version later. Besides F and B it holds

S chunk.update     optimizer step of the chunk's weights, which makes version update + 1
K chunk.version    keep a copy of the current weights, which are that version
A chunk.version    anticipate: predict the weights that will be that version from the optimizer's state
U chunk.version    use those weights from here on; version -1: the current ones
D chunk.version    drop that copy, and use the current weights again if it was in use

A version counts the updates since the order began, when all weights are version 0.

Under wave-synchronous parallelism (HetPipe; Park et al., 2020) a pipeline is a virtual worker: every micro-batch makes
an update of its own weights, and an update of the job is a *wave* of m of them. Between waves

PU chunk.wave      push: what the wave changed, summed, goes to the other virtual workers
PL chunk.wave      pull: what all others changed in that wave is added here; waits until the slowest has pushed it

Under a distance of D a virtual worker pulls wave w - D when it has pushed wave w, so none is more than D waves ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from mixfleet.schedule.greedy import B, F, I, Orders, Rule, Step, Work, greedy

STEP, KEEP, ANTICIPATE, USE, DROP = "S", "K", "A", "U", "D"
PUSH, PULL = "PU", "PL"
CURRENT = -1

Made = Mapping[int, tuple[int, ...]]
"""Chunk -> how many updates are made when each micro-batch goes forward there."""
Version = tuple[int, int]
"""Which version, and how many updates had been made when it was: fewer than the version if it was predicted."""


class Weights(NamedTuple):
    """Which weights a forward reads, from (made, chunk, micro-batch, micro-batches per update). A backward reads the
    same copy if `kept`, else what is current then. `same` promises that both see one version, `everywhere` that all
    stages do. `predicts` says that it may read weights that are not made yet, `waves` that every micro-batch is an
    update by itself and pipelines exchange what waves of them changed."""

    forward: Callable[[Made, int, int, int], Version]
    kept: bool = False
    predicts: bool = False
    same: bool = True
    everywhere: bool = False
    waves: bool = False


def _latest(made: Made, k: int, mb: int, size: int) -> Version:
    return made[k][mb], made[k][mb]


def _first_stage(made: Made, k: int, mb: int, size: int) -> Version:
    return made[0][mb], made[0][mb]


def _one_behind(made: Made, k: int, mb: int, size: int) -> Version:
    version = max(0, mb // size - 1)
    return version, version


def _ahead(made: Made, k: int, mb: int, size: int) -> Version:
    return mb // size, made[k][mb]


def _bellwether(made: Made, k: int, mb: int, size: int) -> Version:
    return mb // size, made[k][mb // size * size]


NAIVE = Weights(_latest, same=False)
"""Whatever is current, forward and backward."""
STASH = Weights(_latest, kept=True)
"""The version that the forward read is kept for the backward (PipeDream; Harlap et al., 2018)."""
VERTICAL = Weights(_first_stage, kept=True, everywhere=True)
"""On every stage the version that the first stage read for the micro-batch (PipeDream's vertical sync)."""
DOUBLE = Weights(_one_behind, kept=True, everywhere=True)
"""All of update t read version t - 1: two versions at most (PipeDream-2BW; Narayanan et al., 2021)."""
PREDICT = Weights(_ahead, predicts=True)
"""Forward on the weights predicted for the backward, anew whenever the current ones changed (PipeOptim)."""
BELLWETHER = Weights(_bellwether, predicts=True)
"""The first micro-batch of an update predicts, the others take its prediction (XPipe; Guan et al., 2019)."""

WAVES = Weights(_first_stage, kept=True, everywhere=True, waves=True)
"""On every stage the weights that the first stage read: those of this virtual worker's updates so far, and of the
others' waves pulled by then (HetPipe; Park et al., 2020)."""


def fill(stages: int, micro_batches: int) -> int:
    """Updates that begin before the first stage ends its first: also those that a drain is spread over."""
    return -(-(stages - 1) // micro_batches)


def enough(stages: int, micro_batches: int, distance: int = 0) -> int:
    """Updates after which an order has filled, repeated itself for a while, and drained."""
    return 2 * (fill(stages, micro_batches) + distance) + 4 + 2 * -(-stages // micro_batches)


def stream(home: tuple[int, ...], micro_batches: int, updates: int, weights: Weights, distance: int = 0) -> Orders:
    """1F1B that never drains between updates: stage i goes p - 1 - i forwards ahead, then alternates.

    With waves no more than `micro_batches` are in flight, and stages push and pull between them.
    """
    total = micro_batches * updates
    orders = []
    for k, computing in zip(home, _narrow(home, total, micro_batches) if weights.waves and micro_batches < len(home)
                            else _full(home, total)):
        steps: list[Step] = []
        for step in computing:
            steps.append(step)
            if step[0] == F:
                continue
            m = step[2]
            update, rest = divmod(m + 1, micro_batches)
            if weights.waves:
                steps.append((STEP, k, m))
                steps += [] if rest else [(PUSH, k, update - 1)]
                steps += [(PULL, k, update - 1 - distance)] if not rest and update > distance else []
            elif not rest:
                steps.append((STEP, k, update - 1))
        if weights.waves:
            steps += [(PULL, k, wave) for wave in range(max(0, updates - distance), updates)]
        orders.append(tuple(steps))
    made = {k: _made(order) for k, order in zip(home, orders)}
    return tuple(_with_versions(order, made, micro_batches, weights) for order in orders)


def _full(home: tuple[int, ...], total: int) -> Orders:
    """As many micro-batches in flight as there are stages."""
    orders = []
    for k in home:
        warm = min(len(home) - 1 - k, total)
        steps: list[Step] = [(F, k, m) for m in range(warm)]
        for m in range(total):
            steps += [(F, k, m + warm)] if m + warm < total else []
            steps.append((B, k, m))
        orders.append(tuple(steps))
    return tuple(orders)


@lru_cache(maxsize=64)
def _narrow(home: tuple[int, ...], total: int, most: int) -> Orders:
    """Fewer than that: as they come where a backward takes twice as long as a forward."""
    work = Work(home, total, (1.0,) * len(home), (2.0,) * len(home))
    orders = greedy(work, Rule((most,) * len(home)))
    assert orders is not None
    return orders


def bound(micro_batches: int, distance: int) -> int:
    """The most micro-batches of another virtual worker, of those before it in its order, that a micro-batch may not
    know of: (D + 1)(s + 1) + s - 1 with s = micro_batches - 1, as HetPipe has it. Reached where stages suffice."""
    return (distance + 1) * micro_batches + micro_batches - 2


def _made(order: Iterable[Step]) -> tuple[int, ...]:
    count, found = 0, []
    for op, _, _ in order:
        count += op == STEP
        if op == F:
            found.append(count)
    return tuple(found)


def _with_versions(order: tuple[Step, ...], made: Made, micro_batches: int, weights: Weights) -> tuple[Step, ...]:
    """Keeps, predicts, uses and drops weights so that every step reads those that it should."""
    count = 0
    reads: list[Version | None] = []  # per step; None: the current weights
    for op, k, m in order:
        version = None
        if op == F or (op == B and weights.kept):
            version = weights.forward(made, k, m, micro_batches)
        reads.append(None if version == (count, count) else version)
        count += op == STEP
    last = {version: i for i, version in enumerate(reads)}
    out: list[Step] = []
    held: set[Version] = set()
    using: Version | None = None
    count = 0
    for i, ((op, k, m), version) in enumerate(zip(order, reads)):
        if op == STEP and last.get((count, count), -1) > i:
            out.append((KEEP, k, count))
            held.add((count, count))
        if version and version not in held:
            out.append((ANTICIPATE, k, version[0]))
            held.add(version)
        if version != using:
            out.append((USE, k, version[0] if version else CURRENT))
            using = version
        out.append((op, k, m))
        count += op == STEP
        if version and last[version] == i:
            out.append((DROP, k, version[0]))
            held.remove(version)
            using = None
    return tuple(out)


class Reading(NamedTuple):
    """The weights that one micro-batch met on one chunk, as versions."""

    forward: int
    made: int
    """Updates made when the weights of the forward were: fewer than `forward` if they were predicted."""
    backward: int
    applied: int
    """Updates made when its gradient is applied."""
    waves: int = 0
    """Waves of the other virtual workers that the weights of the forward knew."""

    @property
    def staleness(self) -> int:
        """Updates between the weights that it knew and those that its gradient changes."""
        return self.applied - self.made


class Readings(NamedTuple):
    """What an order or a program says about weights."""

    of: dict[tuple[int, int], Reading]
    """By chunk (or block) and micro-batch."""
    copies: int
    """The most copies of one chunk's weights at a time, the current ones included."""


def readings(steps: Iterable[Step]) -> Readings:
    """Follow the versions through the steps of a stage, or through actions told block by block."""
    count: dict[int, int] = {}
    pulled: dict[int, int] = {}
    held: dict[int, dict[int, tuple[int, int]]] = {}  # copies: updates and waves when they were made
    using: dict[int, int] = {}
    forward: dict[tuple[int, int], tuple[int, int, int]] = {}
    waiting: dict[int, list[tuple[int, int]]] = {}
    found: dict[tuple[int, int], Reading] = {}
    most = 1
    for op, k, m in steps:
        now, version = count.get(k, 0), using.get(k, CURRENT)
        read = (now, now, pulled.get(k, 0)) if version == CURRENT else (version, *held[k][version])
        if op == F:
            forward[k, m] = read
        elif op in (B, I):
            waiting.setdefault(k, []).append((m, read[0]))
        elif op == STEP:
            for mb, backward in waiting.pop(k, ()):
                version, made, waves = forward.pop((k, mb))
                found[k, mb] = Reading(version, made, backward, now, waves)
            count[k] = now + 1
        elif op == PULL:
            pulled[k] = pulled.get(k, 0) + 1
        elif op in (KEEP, ANTICIPATE):
            held.setdefault(k, {})[m] = now, pulled.get(k, 0)
            most = max(most, 1 + len(held[k]))
        elif op == USE:
            using[k] = m
        elif op == DROP:
            del held[k][m]
            if version == m:
                using[k] = CURRENT
    return Readings(found, most)
