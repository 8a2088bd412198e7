"""What a schedule costs and holds, read from its orders: nothing here is typed in."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from mixfleet.schedule.asynchronous import STEP, Readings, fill, readings
from mixfleet.schedule.greedy import B, F, I, Orders, Step, W, Work, timeline
from mixfleet.schedule.named import SCHEDULES, Homes
from mixfleet.schedule.rounds import Cut, Leg, played, split


class Properties(NamedTuple):
    """One schedule on some stages. A stage's whole forward takes 1, its backward 2 (in halves 1 and 1), messages 0."""

    name: str
    home: Homes
    micro_batches: int
    bubble: float
    """Share of all devices' time in which they do nothing; of an asynchronous schedule, between fill and drain."""
    over_ideal: float
    """The same over the time that the work alone takes, as most papers count it."""
    in_flight: tuple[float, ...]
    """The most micro-batches that each device holds at a time, in micro-batches of all its layers."""
    messages: int
    """Sends per micro-batch over all devices, activations and gradients."""
    copies: int
    """Of the weights, on all devices together."""
    splits: bool
    synchronous: bool
    """Whether every gradient is that of the weights which it changes."""
    versions: tuple[int, ...]
    """The most versions of its weights that each device holds, the current one included."""
    staleness: tuple[tuple[int, int], ...]
    """Least and most updates between the weights that a forward knew and those that its gradient changes."""
    backward: str
    """Whether a backward sees the weights of its forward: `same`, those `predicted` for it, or `newer` ones."""
    wants: str
    """What it asks of chunks and micro-batches."""


def in_flight(order: tuple[Step, ...]) -> int:
    """The most micro-batches, times chunks, that a device holds between forward and the end of backward."""
    halved = {(k, m) for op, k, m in order if op == W}
    held = peak = 0
    for op, k, m in order:
        held += 1 if op == F else -1 if op == W or (op in (B, I) and (k, m) not in halved) else 0
        peak = max(peak, held)
    return peak


def held_at_peak(order: tuple[Step, ...]) -> tuple[Counter[int], int | None]:
    """Micro-batches of each chunk that a device holds when it holds most, chunks counted alike; and the chunk that goes
    back next then, None if something else comes next."""
    halved = {(k, m) for op, k, m in order if op == W}
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    total = peak = 0
    then: int | None = None
    for (op, k, m), (later, there, _) in zip(order, (*order[1:], ("", 0, 0))):
        change = 1 if op == F else -1 if op == W or (op == B and (k, m) not in halved) else 0
        held[k] += change
        total += change
        if total > peak:
            most, peak, then = held.copy(), total, there if later in (B, I) else None
    return most, then


def properties(name: str, stages: int, micro_batches: int, chunks: int = 2) -> Properties | str:
    """Of a named schedule; `chunks` per stage for those that take several. Text says why it does not suit."""
    schedule = SCHEDULES[name]
    rounds = 1 if schedule.most_rounds == 1 else chunks
    home, counts = schedule.place(stages, rounds), schedule.counts(micro_batches)
    reason = schedule.why_not(home, *counts)
    return reason if reason else of_orders(name, home, micro_batches, schedule.orders(home, *counts))


class Turns(NamedTuple):
    """RoundPipe's legs over equal blocks, `chunks` per stage, in the time of `Properties`."""

    cut: Cut
    legs: tuple[Leg, ...]
    done: dict[Step, tuple[float, float]]
    orders: Orders


def turns(stages: int, micro_batches: int, chunks: int = 2) -> Turns:
    """The legs that `rounds.split` makes, and when each is done."""
    forward, both = ((time / chunks,) * (stages * chunks) for time in (1.0, 3.0))
    cut = split(forward, both, stages)
    assert cut is not None
    legs = cut.legs(stages)
    done = played(legs, forward, both, micro_batches)
    return Turns(cut, legs, done, tuple(tuple(sorted((step for step in done if legs[step[1]].device == d),
                                                     key=done.__getitem__)) for d in range(stages)))


def of_turns(stages: int, micro_batches: int, chunks: int = 2) -> Properties:
    """Of RoundPipe. Going forward again before going back counts as work; what enters a backward leg and waits for it
    is a message, not held."""
    made = turns(stages, micro_batches, chunks)
    span = max(end for _, end in made.done.values())
    busy = sum(end - start for start, end in made.done.values()) / stages
    back = [leg for leg in made.legs if leg.back]
    front = [leg for leg in made.legs if not leg.back]
    makes = {b: leg.device for leg in front for b in range(leg.lo + 1, leg.hi + 1)}
    messages = sum(a.device != b.device for a, b in itertools.pairwise(made.legs))
    messages += sum(leg.lo > 0 and makes[leg.lo] != leg.device for leg in back[1:])
    held = tuple(max((leg.hi - leg.lo for leg in back if leg.device == d), default=0) / chunks for d in range(stages))
    return Properties("roundpipe", tuple(leg.device for leg in made.legs), micro_batches, max(0.0, 1 - busy / span),
                      span / (3.0 * micro_batches) - 1, held, messages, 1, False, True, (1,) * stages,
                      ((0, 0),) * stages, "same",
                      "all weights in the memory of one host; forward and backward cut apart")


def even_work(name: str, home: Homes, micro_batches: int, *, splits: bool) -> Work:
    """Stages whose whole forward takes 1 and backward 2 (or halves of 1), messages nothing."""
    starts = SCHEDULES[name].starts(home) if name in SCHEDULES else (0,)
    part = ((max(home) + 1) * len(starts) / len(home),) * len(home)
    return Work(home, micro_batches, part, part if splits else tuple(2 * x for x in part), part if splits else (),
                starts=starts)


def computes(orders: Orders) -> Orders:
    """Forwards and backwards only, without what is done to the weights."""
    return tuple(tuple(step for step in order if step[0] in (F, B, I, W)) for order in orders)


def of_orders(name: str, home: Homes, micro_batches: int, orders: Orders) -> Properties:
    """Of any sound orders; `name` need not be a named schedule."""
    splits = any(op == W for order in orders for op, _, _ in order)
    work = even_work(name, home, micro_batches, splits=splits)
    copies = len(work.starts)
    rounds = len(home) // len(orders) // copies
    hops = sum(a != b and not work.ends(k) for k, (a, b) in enumerate(itertools.pairwise(home)))
    ideal = 3.0 * micro_batches
    updates = sum(op == STEP for op, _, _ in orders[0])
    known = SCHEDULES.get(name)
    if known and known.weights and known.weights.waves:  # an update of the job is a wave
        updates //= micro_batches
    depth = fill(len(orders), micro_batches) if updates else 0
    done = timeline(work, computes(orders))
    if updates:  # all devices go on at one pace: that of the first between its updates
        first, last = ((u + 1) * micro_batches - 1 for u in (depth, updates - depth - 1))
        span = (done[B, 0, last][1] - done[B, 0, first][1]) / (updates - 2 * depth - 1)
    else:
        span = max(end for _, end in done.values())
    read = [readings(order if updates else (*order, *((STEP, k, 0) for k in range(len(home))))) for order in orders]
    settled = range(depth * micro_batches, (max(updates, 1) - depth) * micro_batches)
    late = [[r.staleness for (_, m), r in one.of.items() if m in settled] for one in read]
    return Properties(
        name, home, micro_batches, max(0.0, 1 - ideal / span), max(0.0, span / ideal - 1),
        tuple(in_flight(order) / rounds for order in orders), 2 * hops // copies, copies, splits,
        not any(map(any, late)), tuple(one.copies for one in read), tuple((min(n), max(n)) for n in late), _sees(read),
        _wants(name))


def _sees(read: list[Readings]) -> str:
    every = [r for one in read for r in one.of.values()]
    if any(r.forward != r.backward for r in every):
        return "newer"
    return "predicted" if any(r.made != r.forward for r in every) else "same"


def _wants(name: str) -> str:
    schedule = SCHEDULES.get(name)
    if schedule is None:
        return ""
    sample = schedule.place(3, max(2, schedule.rounds))
    many = schedule.most_rounds > schedule.rounds
    return "; ".join(filter(None, (
        "one chunk per stage" if schedule.most_rounds == 1 else
        f"{schedule.rounds}{' or more' if many else ''} chunks per stage"
        + (", an even number" if schedule.even_rounds and many else "")
        + (", round and round" if sample[3] == 0 else ", there and back"),
        f"{schedule.ways} pipelines in opposite directions" if schedule.ways > 1 else "",
        "an even number of stages" if schedule.even_stages else "",
        "micro-batches in groups of the stages" if schedule.divides else "",
        "at least as many micro-batches per update as stages, less one" if schedule.covers else "")))
