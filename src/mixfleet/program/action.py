"""The actions of a program, and what each reads and writes.

A *role* is one stage of one pipeline; all its replicas and all ranks of its tensor-parallel group do the same
actions. Where pipelines share devices, a role has a *seat* in each of them, and its actions say for which they are.
Every action goes to a stream (`stream_of`). Order within a stream, and the hazards on named values (read after write,
write after read, write after write, by position in the list), are all the semantics there is: both interpreters may
overlap streams as far as these allow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mixfleet.errors import InputError
from mixfleet.schedule import asynchronous, rounds
from mixfleet.schedule.greedy import Step
from mixfleet.spec import Spec

if TYPE_CHECKING:
    from mixfleet.program.layout import Layout

Value = tuple[str, int, int]

F, B, I, W = "F", "B", "I", "W"
SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD = "SA", "RA", "SG", "RG"
GATHER, RELEASE, REDUCE, SYNC, NORM, STEP, PUBLISH = "G", "X", "R", "Y", "N", "S", "P"
PUSH, PULL = asynchronous.PUSH, asynchronous.PULL
AHEAD, SEND_KEPT, RECV_KEPT = rounds.AHEAD, "SX", "RX"
LOAD_WEIGHTS, SAVE_WEIGHTS, FREE_WEIGHTS = "LW", "EW", "XW"
LOAD_STATE, SAVE_STATE, FREE_STATE = "LO", "EO", "XO"
LOAD_GRAD, SAVE_GRAD, FREE_GRAD, LOAD_UPDATED = "LG", "EG", "XG", "LU"
LOAD_SAVED, PARK_SAVED, PASS_SAVED, AWAIT_PARKED = "LA", "EA", "XA", "HA"
KEEP, ANTICIPATE, USE, DROP = asynchronous.KEEP, asynchronous.ANTICIPATE, asynchronous.USE, asynchronous.DROP
_ACTION = re.compile(r"(F|B|I|W|SA|RA|SG|RG|SX|RX|PU|PL|C|G|X|R|Y|N|S|P|[LEX][WOAG]|LU|HA|K|A|U|D)"
                     r"(?:(\d+)(?::(\d+))?)?(?:\.(\d+))?(?:@(\d+))?('*|\*)")
JOINT = -1
"""The seat of what a rank does once for all its seats: the norm, and exchanges of a unit that several of them hold."""


class Action(NamedTuple):
    """One thing that a role does.

    op   what
    F    forward of blocks `lo` to `hi - 1` for micro-batch `mb`
    B    backward of the same, last block first (recomputes first where the stage says so)
    I    the half of B that makes the gradient of the input;  W the half that makes those of the weights
    SA   send the output of block `hi - 1` for `mb` to stage `peer`;  RA receive the input of block `lo` from `peer`
    SG   send the gradient of the input of block `lo` to `peer`;      RG receive the gradient of the output of `hi - 1`
    G    gather the weights of state unit `lo` in its weight group (all-gather)
    X    release the gathered weights of unit `lo`
    R    hop 1: reduce the gradient of unit `lo` for `mb` inside its gradient group (reduce-scatter) and accumulate it
    Y    hop 2: reduce the accumulated gradient of unit `lo` across groups, to the owners of its optimizer state
    N    norm of the whole gradient (all ranks), for clipping and scaling
    S    optimizer step of the owned piece of unit `lo`
    P    hand the updated weights of unit `lo` from the optimizer owners to those who hold them
    LW   load the weights of unit `lo` from host memory, of sharded ones the own piece, to gather from;  XW free what
         was loaded;  EW write them back, updated
    LO   load the optimizer's state of the owned piece of unit `lo`;  EO write it back;  XO free it
    LG   load the gradient of unit `lo`, summed so far, before backward (or hop 1) of `mb` adds to it; EG write it back;
         XG free it. Without `mb`: the whole gradient of the owned piece, all micro-batches and replicas in it
    LU   load the updated weights of the owned piece of unit `lo`, where the host has made the step
    EA   move what the forward of block `lo` saved for `mb` to host memory;  LA bring it back;  XA once its backward
         has used it, which those behind it in their stream wait for; HA go on only once it is in host memory
    K    keep a copy of the current weights of blocks `lo` to `hi - 1`, as version `mb`
    A    anticipate: predict the weights of these blocks that will be version `mb`, from the optimizer's state
    U    from here on F and B of these blocks use the copy that is version `mb`; without a version, the current weights
    D    drop that copy; the current weights are used again if it was in use
    C    forward that keeps nothing: what enters block `hi` goes to the next leg, and to whom it belongs for backward
    SX   send what enters block `hi` in `mb` to stage `peer`, which goes back there;  RX receive it, entering block `lo`
    PU   take what wave `mb` changed of unit `lo`; Y with the same `mb` sums it over the virtual workers
    PL   add what the others changed in wave `mb`

    In an asynchronous program `mb` counts through all its updates, and a version is the number of updates made before.
    State units are the blocks, in order, then one per tied tensor, then what is frozen in a block (see
    `layout`). `seat` counts the role's seats; one prime per seat behind the first stands in the text, a star for all.
    """

    op: str
    lo: int = 0
    hi: int = 0
    mb: int = -1
    peer: int = -1
    seat: int = 0

    def __str__(self) -> str:
        blocks = f"{self.lo}" if self.hi <= self.lo + 1 else f"{self.lo}:{self.hi}"
        where = "" if self.op == NORM else blocks
        return f"{self.op}{where}" + (f".{self.mb}" if self.mb >= 0 else "") + (
            f"@{self.peer}" if self.peer >= 0 else "") + ("*" if self.seat == JOINT else "'" * self.seat)


def boundary(action: Action) -> int:
    """The block at whose input a point-to-point action moves activations or gradients."""
    return action.hi if action.op in (SEND_ACT, RECV_GRAD, SEND_KEPT) else action.lo


_MESSAGES = {op: i for i, op in enumerate((SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD, SEND_KEPT, RECV_KEPT))}
_STREAMS = {op: (name, 0) for name, ops in (
    ("gather", (GATHER, RELEASE, PUBLISH)), ("reduce", (REDUCE, SYNC)),
    ("load", (LOAD_WEIGHTS, FREE_WEIGHTS, LOAD_STATE, FREE_STATE, LOAD_GRAD, FREE_GRAD, LOAD_UPDATED)),
    ("save", (SAVE_WEIGHTS, SAVE_STATE, SAVE_GRAD)),
    ("host", (PARK_SAVED, LOAD_SAVED, PASS_SAVED))) for op in ops}  # one: what comes back does so behind what went
_COMPUTE, _BANK = ("compute", 0), ("bank", 0)


def stream_of(action: Action) -> tuple[str, int]:
    """Stream name and channel. Point-to-point actions have one FIFO channel per seat, block boundary and kind.

    Whole gradients wait for other ranks (hop 2), so they go to the host on a stream of their own, which holds up
    nothing.
    """
    kind = _MESSAGES.get(action.op)
    if kind is not None:
        return "p2p", boundary(action) * len(_MESSAGES) + kind + (action.seat << 20)
    if action.mb < 0 and action.op in (SAVE_GRAD, FREE_GRAD):
        return _BANK
    return _STREAMS.get(action.op, _COMPUTE)


class Role(Spec, frozen=True, kw_only=True):
    """Stage `stage` of pipeline `pipeline`, and what it does in one optimizer step."""

    pipeline: int
    stage: int
    actions: tuple[Action, ...]
    more: tuple[tuple[int, int], ...] = ()
    """The (pipeline, stage) of further seats."""

    @property
    def seats(self) -> tuple[tuple[int, int], ...]:
        """The (pipeline, stage) of all its seats."""
        return ((self.pipeline, self.stage), *self.more)

    def indices(self, seat: int) -> list[int]:
        """Where the actions of one seat are, joint ones included."""
        return [i for i, a in enumerate(self.actions) if a.seat in (seat, JOINT)]

    def view(self, seat: int) -> Role:
        """One seat by itself."""
        if not self.more:
            return self
        pipeline, stage = self.seats[seat]
        return Role(pipeline=pipeline, stage=stage, actions=tuple(self.actions[i] for i in self.indices(seat)))

    def needs(self, of: Callable[[Role], Sequence[tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Per action, the earlier ones that it waits for, from what `of` says of each seat by itself."""
        if not self.more:
            return list(of(self))
        found: list[set[int]] = [set() for _ in self.actions]
        for seat in range(len(self.seats)):
            mine = self.indices(seat)
            for i, before in zip(mine, of(self.view(seat)), strict=True):
                found[i].update(mine[j] for j in before)
        return [tuple(sorted(before)) for before in found]


class Program(Spec, frozen=True, kw_only=True, dict=True):
    """One optimizer step of a plan, or as many as an asynchronous one spans: a list of actions per role."""

    roles: tuple[Role, ...]

    @property
    def updates(self) -> int:
        """Optimizer steps in it."""
        steps = [a.lo for a in self.roles[0].actions if a.op == STEP]
        return steps.count(steps[0]) if steps else 0

    def role(self, pipeline: int, stage: int) -> Role:
        """The role that has a seat there."""
        return next(r for r in self.roles if (pipeline, stage) in r.seats)


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`. Raises InputError."""
    match = _ACTION.fullmatch(text)
    if not match:
        raise InputError(f"{text!r} is not an action; write for example F0:4.2, SA0:4.2@1 or S3")
    op, lo, hi, mb, peer, seat = match.groups()
    first = int(lo or 0)
    return Action(op, first, int(hi) if hi else (first + 1 if lo else 0), int(mb or -1), int(peer or -1),
                  JOINT if seat == "*" else len(seat))


def by_block(actions: Iterable[Action]) -> Iterator[Step]:
    """What happens to each block and its weights, as `schedule.asynchronous.readings` follows it."""
    for a in actions:
        if a.op in (F, B, STEP, KEEP, ANTICIPATE, USE, DROP, PULL):
            yield from ((a.op, b, a.mb) for b in range(a.lo, a.hi))


def effects(action: Action, layout: Layout, units: tuple[int, ...]) -> tuple[list[Value], list[Value]]:
    """Names of the values that an action reads and writes on its own rank, which holds `units`.

    x activations at a block boundary, g gradients there, saved what backward needs, later what the halves of a
    backward leave to each other, w usable weights, shard the
    permanent piece of sharded weights, grad the gradient as backward leaves it, acc what hop 1 accumulated,
    own the gradient of the owned optimizer piece, opt its updated state, scale the clipping factor, state what the
    optimizer keeps; home, away, banked and parked are weights, state, gradients and activations in host memory, kept
    the copies of weights by version; delta is what a wave changed, total its sum over the virtual workers; entry what
    enters a backward leg.
    """
    op, lo, hi, mb, *_ = action
    home = "shard" if layout.needed(GATHER, 0) else "w"
    if op in (F, B, I, W):
        mine = sorted({u for b in range(lo, hi) for u in layout.units_of_block[b]})
        saved: list[Value] = [("saved", b, mb) for b in range(lo, hi)]
        weights: list[Value] = [("w", u, 0) for u in mine]
        if op == F:
            return [("x", lo, mb), ("entry", lo, mb), *weights], [("x", hi, mb), *saved]
        grads: list[Value] = [("grad", u, 0) for u in mine]
        later: list[Value] = [("later", b, mb) for b in range(lo, hi)]
        if op == W:
            return [*later, *grads], [*later, *grads]
        if op == I:  # gradients of what has no half of its own, such as norms, are made here
            return [("g", hi, mb), *saved, *weights, *grads], [("g", lo, mb), *later, *saved, *grads]
        return [("g", hi, mb), *saved, *weights, *grads], [("g", lo, mb), *saved, *grads]
    if op == AHEAD:
        mine = sorted({u for b in range(lo, hi) for u in layout.units_of_block[b]})
        return [("x", lo, mb), *(("w", u, 0) for u in mine)], [("x", hi, mb), ("entry", hi, mb)]
    if op in (KEEP, ANTICIPATE, USE, DROP):
        mine = sorted({u for b in range(lo, hi) for u in layout.units_of_block[b]})
        current: list[Value] = [("w", u, 0) for u in mine]
        copies: list[Value] = [("kept", u, 0) for u in mine]
        if op in (KEEP, ANTICIPATE):
            return [*current, *([("opt", u, 0) for u in mine] if op == ANTICIPATE else [])], copies
        return [*current, *copies], [*current, *copies]
    if op == SYNC and mb >= 0:
        return [("delta", lo, mb)], [("total", lo, mb)]
    if op in (LOAD_GRAD, SAVE_GRAD, FREE_GRAD):
        here: list[Value] = [("acc" if layout.needed(REDUCE, lo) else "grad", lo, 0)] * (op != LOAD_GRAD or mb >= 0)
        here += [("own", lo, 0)] * (mb < 0)
        there: list[Value] = [("banked", lo, 0)]
        return {LOAD_GRAD: (there, here), SAVE_GRAD: (here, there), FREE_GRAD: ([], here)}[op]
    if op == NORM:
        return [(name, u, 0) for u in units for name in ("grad", "acc", "own")], [("scale", 0, 0)]
    simple: dict[str, tuple[list[Value], list[Value]]] = {
        SEND_ACT: ([("x", hi, mb)], []),
        RECV_ACT: ([], [("x", lo, mb)]),
        SEND_GRAD: ([("g", lo, mb)], []),
        SEND_KEPT: ([("entry", hi, mb)], []),
        RECV_KEPT: ([], [("entry", lo, mb)]),
        RECV_GRAD: ([], [("g", hi, mb)]),
        GATHER: ([("shard", lo, 0)], [("w", lo, 0)]),
        RELEASE: ([], [("w", lo, 0)]),
        REDUCE: ([("grad", lo, 0), ("acc", lo, 0)], [("acc", lo, 0), ("grad", lo, 0)]),
        SYNC: ([("grad", lo, 0), ("acc", lo, 0)], [("own", lo, 0)]),
        STEP: ([("own", lo, 0), ("banked", lo, 0), ("scale", 0, 0), ("state", lo, 0)],
               [("opt", lo, 0), (home, lo, 0), ("state", lo, 0), ("home", lo, 0)]),
        LOAD_UPDATED: ([("opt", lo, 0)], [("opt", lo, 0), (home, lo, 0)]),
        LOAD_WEIGHTS: ([("home", lo, 0)], [(home, lo, 0)]),
        SAVE_WEIGHTS: ([(home, lo, 0)], [("home", lo, 0)]),
        FREE_WEIGHTS: ([], [(home, lo, 0)]),
        LOAD_STATE: ([("away", lo, 0)], [("state", lo, 0)]),
        SAVE_STATE: ([("state", lo, 0)], [("away", lo, 0)]),
        FREE_STATE: ([], [("state", lo, 0)]),
        PARK_SAVED: ([("saved", lo, mb)], [("parked", lo, mb)]),
        LOAD_SAVED: ([("parked", lo, mb)], [("saved", lo, mb)]),
        PASS_SAVED: ([], [("saved", lo, mb)]),
        AWAIT_PARKED: ([("parked", lo, mb)], []),
        PUBLISH: ([("opt", lo, 0)], [(home, lo, 0)]),
        PUSH: ([("w", lo, 0)], [("delta", lo, mb)]),
        PULL: ([("total", lo, mb), ("w", lo, 0)], [("w", lo, 0)]),
    }
    return simple[op]


def dependencies(actions: tuple[Action, ...], layout: Layout, units: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Per action, the earlier ones that must have ended before it starts, besides those before it in its stream.

    Read after write, write after read and write after write on the values of `effects`; only the nearest are listed.
    A gradient comes back once what is computed before is done, which bounds memory.
    """
    computed = -1
    writer: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    streams = [stream_of(a) for a in actions]
    found: list[tuple[int, ...]] = []
    for i, action in enumerate(actions):
        reads, writes = effects(action, layout, units)
        needs = {writer[v] for v in (*reads, *writes) if v in writer}
        if streams[i] == _COMPUTE:
            computed = i
        elif action.op == LOAD_GRAD and computed >= 0:
            needs.add(computed)
        for v in writes:
            needs.update(readers.get(v, ()))
        found.append(tuple(sorted(j for j in needs if streams[j] != streams[i])))
        for v in reads:
            readers.setdefault(v, []).append(i)
        for v in writes:
            writer[v] = i
            readers[v] = []
    return tuple(found)
