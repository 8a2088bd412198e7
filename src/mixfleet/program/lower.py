"""From a plan to its program: a schedule per stage, then small passes that add what the plan asks for.

Each pass takes a list of actions and returns a new one. Their order is the order of this file.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from mixfleet.model.spec import Model
from mixfleet.plan import Offload, Pipeline, Plan
from mixfleet.program.action import (
    AHEAD,
    AWAIT_PARKED,
    FREE_GRAD,
    FREE_STATE,
    FREE_WEIGHTS,
    GATHER,
    JOINT,
    LOAD_GRAD,
    LOAD_SAVED,
    LOAD_STATE,
    LOAD_UPDATED,
    LOAD_WEIGHTS,
    NORM,
    PARK_SAVED,
    PASS_SAVED,
    PUBLISH,
    PULL,
    PUSH,
    RECV_ACT,
    RECV_GRAD,
    RECV_KEPT,
    REDUCE,
    RELEASE,
    SAVE_GRAD,
    SAVE_STATE,
    SAVE_WEIGHTS,
    SEND_ACT,
    SEND_GRAD,
    SEND_KEPT,
    STEP,
    SYNC,
    Action,
    B,
    F,
    I,
    Program,
    Role,
    W,
)
from mixfleet.program.layout import Layout
from mixfleet.schedule.rounds import Leg

Actions = list[Action]


def lower(plan: Plan, model: Model, layout: Layout | None = None, updates: int = 0) -> Program:
    """The program of one optimizer step; under an asynchronous schedule of `updates` steps, from fill to drain, or of
    as many as show how it repeats itself. The plan must be possible (`why_not` is None)."""
    layout = layout or Layout(plan, model)
    updates = updates or plan.updates
    roles = []
    for crew in plan.crews:
        for seats, steps in zip(plan.seats(crew), plan.orders(crew, updates), strict=True):
            order = [Action(op, chunk.lo, chunk.hi, m, seat=seat) for seat, (op, k, m) in steps
                     for chunk in (plan.pipelines[crew[seat]].chain[k],)]
            order = _stop_backward(order, layout.floor)
            if plan.schedule == "roundpipe":
                actions = _rounds(plan, layout, *seats[0])
            elif plan.synchronous:
                made = [_seat([a for a in order if a.seat == seat], plan, layout, p, s)
                        for seat, (p, s) in enumerate(seats)]
                units = [layout.units_of_stage(p, s) for p, s in seats]
                actions = _synchronize(_weave(order, made) if len(made) > 1 else made[0], layout, units)
                actions = _end(actions, plan, layout, seats, units)
            else:
                actions = _stream(order, plan, layout, *seats[0])
            roles.append(Role(pipeline=seats[0][0], stage=seats[0][1], more=seats[1:], actions=tuple(actions)))
    return Program(roles=tuple(roles))


def _stop_backward(actions: Actions, floor: int) -> Actions:
    """No backward below the lowest trained block."""
    return [a._replace(lo=max(a.lo, floor)) if a.op in (B, I, W) else a for a in actions
            if a.op not in (B, I, W) or a.hi > floor]


def _end(actions: Actions, plan: Plan, layout: Layout, seats: Sequence[tuple[int, int]],
         units: Sequence[tuple[int, ...]]) -> Actions:
    """What a synchronous step ends with; before that, gradients go to the host where they lie there."""
    away = [plan.pipelines[p].stages[s].offload for p, s in seats]
    for seat, (mine, what) in enumerate(zip(units, away)):
        if "gradients" in what:
            actions = _bank(actions, layout, mine, seat, plan.sharding.prefetch)
    return actions + _optimizer(layout, units, away)


def _seat(actions: Actions, plan: Plan, layout: Layout, pipeline: int, stage: int) -> Actions:
    """All that one seat does up to its last gradient."""
    units = layout.units_of_stage(pipeline, stage)
    layered = plan.accumulation == "layered"
    away = plan.pipelines[pipeline].stages[stage].offload
    loads = "weights" in away
    parked = plan.pipelines[pipeline].stages[stage].offload_blocks
    actions = _by_block(actions, layout.floor) if layered else _pipe(actions, plan.pipelines[pipeline], stage,
                                                                     layout.floor)
    actions = _split_blocks(actions, layout, units, loads=loads, apart=bool(parked) or "gradients" in away)
    if parked:
        actions = _park(actions, frozenset(b for b in parked if b >= layout.floor), plan.sharding.prefetch)
    if layout.needed(GATHER, units[0]):
        bring = (LOAD_WEIGHTS, GATHER, FREE_WEIGHTS) if loads else (GATHER,)
        actions = _bring_weights(actions, layout, plan.sharding.prefetch, bring, RELEASE)
    elif loads:
        actions = _bring_weights(actions, layout, plan.sharding.prefetch, (LOAD_WEIGHTS,), FREE_WEIGHTS)
    return _reduce_gradients(actions, layout, units, layered=layered)


def _weave(order: Actions, made: Sequence[Actions]) -> Actions:
    """One list from those of several seats: their computing in the given order, what else stands between two
    computings of a seat right behind the first of them. First receives come first of all."""
    rest = [deque(a._replace(seat=seat) for a in actions) for seat, actions in enumerate(made)]

    def until(seat: int, *ops: str) -> Actions:
        found = []
        while rest[seat] and rest[seat][0].op not in ops:
            found.append(rest[seat].popleft())
        return found

    out = [a for seat in range(len(made)) for a in until(seat, GATHER, F)]
    for step in order:
        blocks = step.hi - step.lo
        while blocks:
            out += until(step.seat, F, B, I, W)
            action = rest[step.seat].popleft()
            blocks -= action.hi - action.lo
            out += [action, *until(step.seat, F, B, I, W)]
    return out


def _stream(actions: Actions, plan: Plan, layout: Layout, pipeline: int, stage: int) -> Actions:
    """Update by update: what lies before an optimizer step, what it needs, and the step, with no norm of the whole
    gradient: for that all stages would wait for each other."""
    units = layout.units_of_stage(pipeline, stage)
    waves = plan.weights is not None and plan.weights.waves
    exchanged = [u for u in reversed(units) if layout.needed(SYNC, u)]
    out: Actions = []
    update: Actions = []
    for a in _pipe(actions, plan.pipelines[pipeline], stage):
        if a.op == STEP and waves:
            out += [*update, *_steps(layout, [units], [()])]
            update = []
        elif a.op == PUSH:  # last blocks first on every stage: virtual workers of unlike shape meet in one order
            out += [Action(op, u, u + 1, a.mb) for u in exchanged for op in (PUSH, SYNC)]
        elif a.op == PULL:
            out += [Action(PULL, u, u + 1, a.mb) for u in exchanged]
        elif a.op == STEP:
            out += _synchronize(_split_blocks(update, layout, units, loads=False), layout, [units])
            out += _steps(layout, [units], [()])
            update = []
        else:
            update.append(a)
    return out + update


def _rounds(plan: Plan, layout: Layout, pipeline: int, stage: int) -> Actions:
    """The legs of one device, the weights of the next one loaded meanwhile, then what other schedules end with."""
    pipe = plan.pipelines[pipeline]
    mine = [leg for leg in pipe.legs if leg.device == stage]
    needs = [[u for b in range(leg.lo, leg.hi) for u in layout.units_of_block[b]] for leg in mine]
    needs = [list(dict.fromkeys(found)) for found in needs]
    ahead = 1 if plan.sharding.prefetch else 0
    computes = [a for leg in mine for m in range(len(pipe.micro_batches)) for a in _leg(pipe, leg, m)]
    actions = _messages(computes, pipe, stage)
    ends = [max(i for i, a in enumerate(actions) if leg.lo <= a.lo < leg.hi and a.op == (B if leg.back else AHEAD))
            for leg in mine]
    out: Actions = []
    held: set[int] = set()
    begin = issued = 0
    for n, end in enumerate(ends):
        while issued < min(n + ahead + 1, len(mine)):
            out += [Action(LOAD_WEIGHTS, u, u + 1) for u in needs[issued] if u not in held]
            held.update(needs[issued])
            issued += 1
        out += actions[begin:end + 1]
        begin = end + 1
        later = {u for found in needs[n + 1:issued] for u in found}
        out += [Action(FREE_WEIGHTS, u, u + 1) for u in needs[n] if u not in later]
        held -= set(needs[n]) - later
    units = layout.units_of_stage(pipeline, stage)
    return _end(_synchronize(out + actions[begin:], layout, [units]), plan, layout, [(pipeline, stage)], [units])


def _leg(pipe: Pipeline, leg: Leg, m: int) -> Actions:
    if leg.back:
        return [Action(F, leg.lo, leg.hi, m), Action(B, leg.lo, leg.hi, m)]
    points = [leg.lo, *sorted(b for b in pipe.entries if leg.lo < b < leg.hi), leg.hi]
    return [Action(AHEAD, a, b, m) for a, b in pairwise(points)]


def _messages(computes: Actions, pipe: Pipeline, stage: int) -> Actions:
    """Sends after, receives before, posted one computing early."""
    front = [leg for leg in pipe.legs if not leg.back]
    joined = pipe.chain[-1]
    begins = {leg.lo: leg.device for leg in front} | {joined.lo: joined.stage}
    ends = {leg.hi: leg.device for leg in front}
    makes = {b: leg.device for leg in front for b in range(leg.lo + 1, leg.hi + 1)}
    owner = {c.lo: c.stage for c in pipe.chain}
    above = {c.hi: c.stage for c in pipe.chain}

    def receives(a: Action) -> Actions:
        if a.op == B:
            peer, op = owner.get(a.hi, stage), RECV_GRAD
        elif a.op == F and a.lo in pipe.entries:
            peer, op = makes[a.lo], RECV_KEPT
        else:
            peer, op = ends.get(a.lo, stage), RECV_ACT
        return [a._replace(op=op, peer=peer)] if peer != stage else []

    def sends(a: Action) -> Actions:
        found = []
        if a.op == AHEAD and begins.get(a.hi, stage) != stage:
            found.append(a._replace(op=SEND_ACT, peer=begins[a.hi]))
        if a.op == AHEAD and a.hi in pipe.entries and owner[a.hi] != stage:
            found.append(a._replace(op=SEND_KEPT, peer=owner[a.hi]))
        if a.op == B and above.get(a.lo, stage) != stage:
            found.append(a._replace(op=SEND_GRAD, peer=above[a.lo]))
        return found

    out = receives(computes[0])
    for a, after in zip(computes, [*computes[1:], None]):
        out += receives(after) if after else []
        out += [a, *sends(a)]
    return out


def _by_block(actions: Actions, floor: int) -> Actions:
    """Layered accumulation: all micro-batches through one block, then through the next.

    In the last block the backward of each follows its forward at once, so that what a loss saves is there only once.
    """
    lo, hi = actions[0].lo, actions[0].hi
    batches = sorted({a.mb for a in actions})
    out = [Action(F, b, b + 1, m) for b in range(lo, hi - 1) for m in batches]
    out += [Action(op, hi - 1, hi, m) for m in batches for op in (F, B)]
    return out + [Action(B, b, b + 1, m) for b in reversed(range(max(lo, floor), hi - 1)) for m in batches]


def _pipe(actions: Actions, pipeline: Pipeline, stage: int, floor: int = 0) -> Actions:
    """Sends after, receives before; a receive is posted one compute action early, so that it can overlap. Below block
    `floor` no gradients are needed.

    Chunks that follow each other on one stage hand over in place.
    """
    ends = {c.hi: c.stage for c in pipeline.chain}
    begins = {c.lo: c.stage for c in pipeline.chain}
    out: Actions = []
    computes = [i for i, a in enumerate(actions) if a.op in (F, B, I, W)]
    after = {i: actions[j] for i, j in pairwise(computes)}
    for i, (op, lo, hi, mb, *_) in enumerate(actions):
        posts = [actions[computes[0]]] if i == 0 else []
        for a in [*posts, *([after[i]] if i in after else [])]:
            if a.op == F and ends.get(a.lo, stage) != stage:
                out.append(Action(RECV_ACT, a.lo, a.hi, a.mb, ends[a.lo]))
            if a.op in (B, I) and begins.get(a.hi, stage) != stage:
                out.append(Action(RECV_GRAD, a.lo, a.hi, a.mb, begins[a.hi]))
        out.append(actions[i])
        if op == F and begins.get(hi, stage) != stage:
            out.append(Action(SEND_ACT, lo, hi, mb, begins[hi]))
        if op in (B, I) and lo > floor and ends.get(lo, stage) != stage:
            out.append(Action(SEND_GRAD, lo, hi, mb, ends[lo]))
    return out


def _final(actions: Actions) -> set[int]:
    """Where the last gradient of each chunk (or block) is made: positions of its last B or W."""
    last = {(a.lo, a.hi): i for i, a in enumerate(actions) if a.op in (B, W)}
    return set(last.values())


def _split_blocks(actions: Actions, layout: Layout, units: tuple[int, ...], *, loads: bool, apart: bool = False
                  ) -> Actions:
    """One action per block where state moves between blocks: gathers, loads, hop 1, and hop 2 behind the last
    backward; everywhere if that is asked for (`apart`)."""
    gathers = loads or apart or layout.needed(GATHER, units[0])
    reduces = layout.needed(REDUCE, units[0])
    syncs = any(layout.needed(SYNC, u) for u in units)
    final = _final(actions) if syncs else set()
    out: Actions = []
    for i, a in enumerate(actions):
        if a.op == F and gathers:
            out += [a._replace(lo=b, hi=b + 1) for b in range(a.lo, a.hi)]
        elif a.op in (B, I, W) and (gathers or reduces or i in final):
            out += [a._replace(lo=b, hi=b + 1) for b in reversed(range(a.lo, a.hi))]
        else:
            out.append(a)
    return out


def _park(actions: Actions, blocks: frozenset[int], prefetch: int) -> Actions:
    """What these blocks save goes to the host behind their forward and comes back `prefetch` computings before their
    backward.

    The stream keeps its order, so what comes back waits until the backward before has used its own: that bounds
    memory. So does a forward whose own will go: it waits until at most `prefetch` + 1 others are on their way, however
    slow copies are. Where nothing would lie there for a while, it stays.
    """
    computes = [i for i, a in enumerate(actions) if a.op in (F, B, I, W)]
    made = {(actions[i].lo, actions[i].mb): n for n, i in enumerate(computes) if actions[i].op == F}
    parks: set[int] = set()
    loads: dict[int, Actions] = {}
    for n, i in enumerate(computes):
        a = actions[i]
        if a.op not in (B, I) or a.lo not in blocks:
            continue
        begin, back = made[a.lo, a.mb], n - prefetch
        if back > begin + 1:
            parks.add(computes[begin])
            loads.setdefault(computes[back], []).append(Action(LOAD_SAVED, a.lo, a.hi, a.mb))
    there = {(actions[i].lo, actions[i].mb) for i in parks}
    out: Actions = []
    leaving: deque[Action] = deque()
    for i, a in enumerate(actions):
        out += loads.get(i, ())
        leaving = deque(one for one in leaving if (one.lo, one.mb) not in {(b.lo, b.mb) for b in loads.get(i, ())})
        if i in parks:
            if len(leaving) > prefetch + 1:
                out.append(leaving.popleft())
            leaving.append(Action(AWAIT_PARKED, a.lo, a.hi, a.mb))
        out.append(a)
        if i in parks:
            out.append(Action(PARK_SAVED, a.lo, a.hi, a.mb))
        elif a.op in (B, I) and (a.lo, a.mb) in there:
            out.append(Action(PASS_SAVED, a.lo, a.hi, a.mb))
    return out


def _bank(actions: Actions, layout: Layout, units: tuple[int, ...], seat: int, prefetch: int) -> Actions:
    """Gradients go to the host behind every backward (or hop 1) that adds to them, and come back `prefetch` computings
    before the next one does; the whole gradient of a unit goes last. Where they would come back at once, they stay."""
    computes = [i for i, a in enumerate(actions) if a.op in (F, B, I, W, AHEAD)]
    touched: dict[int, list[int]] = {u: [] for u in units if not layout.units[u].frozen}
    for i, a in enumerate(actions):
        if a.op in (B, I, W) and a.seat == seat:
            mine = {u for b in range(a.lo, a.hi) for u in layout.units_of_block[b] if not layout.needed(REDUCE, u)}
        else:
            mine = {a.lo} if a.op in (REDUCE, SYNC) and a.seat in (seat, JOINT) else set()
        for u in mine & touched.keys():
            touched[u].append(i)
    before: dict[int, Actions] = {}
    behind: dict[int, Actions] = {}
    for u, uses in touched.items():
        for i, j in pairwise(uses):
            at, back = bisect(computes, i), bisect(computes, j) - 1 - prefetch
            if actions[j].op != SYNC and back > at:
                behind.setdefault(i, []).extend(Action(op, u, u + 1, actions[i].mb, seat=seat)
                                                for op in (SAVE_GRAD, FREE_GRAD))
                before.setdefault(computes[back], []).append(Action(LOAD_GRAD, u, u + 1, actions[j].mb, seat=seat))
        behind.setdefault(uses[-1], []).extend(Action(op, u, u + 1, seat=seat) for op in (SAVE_GRAD, FREE_GRAD))
    return [b for i, a in enumerate(actions) for b in (*before.get(i, ()), a, *behind.get(i, ()))]


def _bring_weights(actions: Actions, layout: Layout, prefetch: int, bring: tuple[str, ...], free: str
                   ) -> Actions:
    """Weights that are not here: gather (ZeRO-3, FSDP) or load them before use, `prefetch` blocks ahead, and free them
    after it. Where pieces lie in host memory, the own one is loaded, gathered from and freed.

    The stream keeps its order, so a gather that stands behind a release waits for it: that bounds memory. A unit that
    the next use needs again is kept. Weight halves of a backward need no weights.
    """
    computes = [i for i, a in enumerate(actions) if a.op in (F, B, I)]
    uses: list[tuple[int, ...]] = []  # actions that follow each other with the same units are one use
    order: dict[int, int] = {}
    for i in computes:
        needs = layout.units_of_block[actions[i].lo]
        if not uses or uses[-1] != needs:
            uses.append(needs)
        order[i] = len(uses) - 1
    last = {n: i for i, n in order.items()}
    held: set[int] = set()
    issued = 0
    out: Actions = []
    for i, action in enumerate(actions):
        n = order.get(i)
        if n is None:
            out.append(action)
            continue
        while issued < min(n + prefetch + 1, len(uses)):
            fresh = [u for u in uses[issued] if u not in held]
            out += [Action(op, u, u + 1) for u in fresh for op in bring]
            held.update(fresh)
            issued += 1
        out.append(action)
        if i != last[n]:
            continue
        ahead = {u for use in uses[n + 1: issued + 1] for u in use}
        drop = [u for u in uses[n] if u not in ahead]
        out += [Action(free, u, u + 1) for u in drop]
        held.difference_update(drop)
    return out


def _reduce_gradients(actions: Actions, layout: Layout, units: tuple[int, ...], *, layered: bool) -> Actions:
    """Hop 1 behind every backward, for sharded gradients; a tied unit follows the last of its blocks.

    With layered accumulation all micro-batches add up first, and go in one.
    """
    if not layout.needed(REDUCE, units[0]):
        return actions
    whole = _final(actions) if layered else set()
    out: Actions = []
    for i, a in enumerate(actions):
        out.append(a)
        if a.op in (B, W) and (not layered or i in whole):
            out += [Action(REDUCE, u, u + 1, -1 if layered else a.mb) for u in layout.units_of_block[a.lo]
                    if layout.needed(REDUCE, u) and a.lo == min(b for b in layout.units[u].blocks if b in units)]
    return out


def _owner(u: int, units: Sequence[tuple[int, ...]]) -> int:
    """The seat that holds a unit; JOINT if several do."""
    holders = [seat for seat, mine in enumerate(units) if u in mine]
    return holders[0] if len(holders) == 1 else JOINT


def _synchronize(actions: Actions, layout: Layout, units: Sequence[tuple[int, ...]]) -> Actions:
    """Hop 2 once per step, behind the last backward (or hop 1) of a unit; tied units at the end: two stages meet.

    `units` are those of every seat; what several of them hold is reduced in one.
    """
    # Tied tensors that are reduced at all follow their lowest block, so the last action of a unit is its hop 1.
    ready = {(a.lo, a.seat): i for i, a in enumerate(actions)
             if a.op == REDUCE or (a.op in (B, W) and a.hi == a.lo + 1 and not layout.needed(REDUCE, a.lo))}
    held = sorted({u for mine in units for u in mine if layout.needed(SYNC, u)})
    tied = [u for u in held if len(layout.units[u].blocks) > 1]
    # Last blocks first, on every stage of every pipeline: pipelines of unlike shape must meet in one order.
    waiting = [u for u in reversed(held) if u not in tied]
    when = {u: max(ready[u, seat] for seat, mine in enumerate(units) if u in mine) for u in waiting}
    out: Actions = []
    for i, a in enumerate(actions):
        out.append(a)
        while waiting and when[waiting[0]] <= i:
            u = waiting.pop(0)
            out.append(Action(SYNC, u, u + 1, seat=_owner(u, units)))
    return out + [Action(SYNC, u, u + 1, seat=_owner(u, units)) for u in tied]


_PAGES: dict[Offload, tuple[str, str, str]] = {"weights": (LOAD_WEIGHTS, SAVE_WEIGHTS, FREE_WEIGHTS),
                                               "gradients": (LOAD_GRAD, "", FREE_GRAD),
                                               "optimizer": (LOAD_STATE, SAVE_STATE, FREE_STATE)}
"""Load, write back and free."""


def _optimizer(layout: Layout, units: Sequence[tuple[int, ...]], away: Sequence[tuple[Offload, ...]]) -> Actions:
    """The norm of the whole gradient, then the steps."""
    return [Action(NORM, seat=JOINT if len(units) > 1 else 0), *_steps(layout, units, away)]


def _steps(layout: Layout, units: Sequence[tuple[int, ...]], away: Sequence[tuple[Offload, ...]]) -> Actions:
    """Step and publish, first blocks first: they are needed first.

    What lies in host memory (`away`, per seat) is loaded one unit ahead of its step, written back behind it, and freed
    behind the next one.
    """
    turns = [(u, [seat for seat, mine in enumerate(units) if u in mine])
             for u in sorted({u for mine in units for u in mine if not layout.units[u].frozen})]

    def paged(turn: int, *which: int) -> Actions:
        u, seats = turns[turn] if 0 <= turn < len(turns) else (0, [])
        return [Action(op, u, u + 1, seat=seat) for i in which for seat in seats
                for kind in layout.loads_for_step(u, away[seat]) for op in (_PAGES[kind][i],) if op]

    out = paged(0, 0)
    for turn, (u, seats) in enumerate(turns):
        out += paged(turn + 1, 0)
        out += [Action(STEP, u, u + 1, seat=seat) for seat in seats]
        out += [Action(LOAD_UPDATED, u, u + 1, seat=seat) for seat in seats if layout.fetches_updated(u, away[seat])]
        if layout.needed(PUBLISH, u):
            out.append(Action(PUBLISH, u, u + 1, seat=_owner(u, units)))
        out += paged(turn, 1) + paged(turn - 1, 2)
    return out + paged(len(turns) - 1, 2)
