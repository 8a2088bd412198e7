"""What each action of one seat waits for on other streams, for whole programs in microseconds per action.

`program.action.dependencies` says the same of any action from the values it reads and writes; this is the short cut
for the hot path. It keeps, per state unit, who touched weights and gradients last, and names only the last action of
a stream, since the stream's order implies the others. A test holds the two equal.
"""

from __future__ import annotations

from mixfleet.program.action import (
    AHEAD,
    ANTICIPATE,
    AWAIT_PARKED,
    DROP,
    FREE_GRAD,
    FREE_STATE,
    FREE_WEIGHTS,
    GATHER,
    KEEP,
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
    USE,
    Action,
    B,
    F,
    I,
    W,
    stream_of,
)
from mixfleet.program.layout import Layout

_COMPUTE = stream_of(Action(F))


def hazards(actions: tuple[Action, ...], layout: Layout) -> list[tuple[int, ...]]:
    """Per action, the earlier ones on other streams that must have ended before it starts."""
    blocks, count = len(layout.model.blocks), len(layout.units)
    tied = [tuple(u for u in units if u >= blocks) for units in layout.units_of_block]
    some_tied = any(tied)
    used, computed = [-1] * count, [-1] * count  # last F or B that read the weights; last B of the gradient
    ready, moved = [-1] * count, [-1] * count  # last G, X or P; last R or Y
    stepped, loaded, saved = [-1] * count, [-1] * count, [-1] * count
    brought, banked = [-1] * count, [-1] * count  # last LG or XG of the gradient; last EG
    hosts, last = any(a.op == SAVE_GRAD for a in actions), -1  # last of what is computed
    loads = any(a.op == LOAD_WEIGHTS for a in actions)
    both = loads and any(a.op == GATHER for a in actions)
    here, read = ([-1] * count, [-1] * count) if both else (ready, used)  # of pieces to gather from: last LW, XW, S, LU
    # or P; last G or EW
    fetched: dict[tuple[int, int], int] = {}  # LA of each block and micro-batch
    parked: dict[tuple[int, int], int] = {}  # EA of each
    received: dict[tuple[str, int, int], int] = {}
    made: dict[tuple[str, int, int], int] = {}
    waves: dict[tuple[str, int, int], int] = {}  # PU and Y of each wave
    rounds = any(a.op in (AHEAD, RECV_KEPT) for a in actions)
    reduced, freed, normed = -1, -1, False
    found: list[tuple[int, ...]] = []
    for i, (op, lo, hi, mb, *_) in enumerate(actions):
        needs: tuple[int, ...] = ()
        if op in (F, B, I, W):
            extra = [u for b in range(lo, hi) for u in tied[b]] if some_tied else []
            before: set[int] = set()
            if op != W:  # the weight half of a backward reads no weights
                before = {*ready[lo:hi], *[ready[u] for u in extra]}
                used[lo:hi] = [i] * (hi - lo)
                for u in extra:
                    used[u] = i
            if op == F:
                before.add(received.get((RECV_ACT, lo, mb), -1))
                made[F, hi, mb] = i
                if rounds:
                    before.update((received.get((RECV_KEPT, lo, mb), -1), received.get((SEND_ACT, hi, mb), -1)))
            else:
                before.update(moved[lo:hi], [moved[u] for u in extra])
                if hosts:
                    mine = {u for b in range(lo, hi) for u in layout.units_of_block[b]}
                    before.update(brought[u] for u in mine if not layout.needed(REDUCE, u))
                if op != W:
                    before.add(received.get((RECV_GRAD, hi, mb), -1))
                    if fetched:
                        before.add(fetched.get((lo, mb), -1))
                computed[lo:hi] = [i] * (hi - lo)
                for u in extra:
                    computed[u] = i
                if op != W:
                    made[B, lo, mb] = i
            before.discard(-1)
            needs = tuple(sorted(before))
        elif op == AHEAD:
            mine = {u for b in range(lo, hi) for u in layout.units_of_block[b]}
            for u in mine:
                used[u] = i
            needs = tuple(sorted({*(ready[u] for u in mine), received.get((RECV_ACT, lo, mb), -1)} - {-1}))
            made[F, hi, mb] = i
        elif op in (GATHER, RELEASE):
            needs = (used[lo],) if op == RELEASE or not both else tuple(sorted({used[lo], here[lo]} - {-1}))
            ready[lo] = i
            if op == GATHER:
                read[lo] = i if both else read[lo]
        elif op in (LOAD_WEIGHTS, FREE_WEIGHTS):
            needs = (read[lo],)
            here[lo] = i
        elif op == PARK_SAVED:  # block by block, as all computing is then
            needs = (made[F, hi, mb],)
            parked[lo, mb] = i
        elif op == AWAIT_PARKED:
            needs = (parked[lo, mb],)
        elif op == LOAD_SAVED:
            fetched[lo, mb] = i
        elif op == PASS_SAVED:
            needs = (made[B, lo, mb],)
        elif op == LOAD_STATE:
            loaded[lo] = i
        elif op == SAVE_WEIGHTS:
            needs = (here[lo],)
            read[lo] = i
        elif op == SAVE_STATE:
            needs = (stepped[lo],)
            saved[lo] = i
        elif op == FREE_STATE:
            needs = (saved[lo],)
        elif op == LOAD_GRAD:
            needs = tuple(sorted({banked[lo], last} - {-1}))
            brought[lo] = freed = i
        elif op == FREE_GRAD:
            needs = (max(banked[lo], stepped[lo]),)
            brought[lo] = freed = i
        elif op == SAVE_GRAD:
            first = {brought[lo], moved[lo], -1 if layout.needed(REDUCE, lo) else computed[lo]}
            needs = tuple(sorted(first - {-1}))
            banked[lo] = i
        elif op == LOAD_UPDATED:
            needs = (stepped[lo],)
            stepped[lo] = here[lo] = i
        elif op == SYNC and mb >= 0:
            needs = (waves[PUSH, lo, mb],)
            waves[SYNC, lo, mb] = i
        elif op in (PUSH, PULL):
            needs = (waves[SYNC, lo, mb],) if op == PULL else ()
            waves[op, lo, mb] = i
        elif op in (REDUCE, SYNC):
            needs = (computed[lo],) if brought[lo] < 0 else tuple(sorted({computed[lo], brought[lo]} - {-1}))
            moved[lo] = reduced = i
        elif op in (RECV_ACT, RECV_GRAD, RECV_KEPT):
            received[op, hi if op == RECV_GRAD else lo, mb] = i
        elif op in (SEND_ACT, SEND_KEPT):
            needs = (made[F, hi, mb],)
            if rounds:
                received[op, hi, mb] = i
        elif op == SEND_GRAD:
            needs = (made[B, lo, mb],)
        elif op == NORM:
            needs = (reduced,) if freed < 0 else tuple(sorted({reduced, freed} - {-1}))
            normed = True
        elif op == STEP:
            # Without loads it stands behind the computing that used the last gather.
            before = {loaded[lo], here[lo] if loads else -1, -1 if normed else moved[lo], brought[lo]}
            needs = tuple(sorted(before - {-1}))
            stepped[lo] = i
            if loads:
                here[lo] = i
        elif op == PUBLISH:
            needs = (stepped[lo],)
            here[lo] = i
        elif op in (KEEP, ANTICIPATE, USE, DROP):
            before = {*ready[lo:hi], *(ready[u] for b in range(lo, hi) for u in tied[b])} - {-1}
            needs = tuple(sorted(before))
        if hosts and stream_of(actions[i]) == _COMPUTE:
            last = i
        found.append(needs if needs != (-1,) else ())
    return found
