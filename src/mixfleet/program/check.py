"""Is a program complete and free of deadlock? Every problem names the role and the action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mixfleet.model.spec import Model
from mixfleet.plan import Plan
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
    Program,
    Role,
    W,
    boundary,
    by_block,
    dependencies,
    stream_of,
)
from mixfleet.program.layout import Kind, Layout
from mixfleet.schedule.asynchronous import CURRENT, readings

RoleKey = tuple[int, int]
_MATCHES = {SEND_ACT: RECV_ACT, RECV_ACT: SEND_ACT, SEND_GRAD: RECV_GRAD, RECV_GRAD: SEND_GRAD, SEND_KEPT: RECV_KEPT,
            RECV_KEPT: SEND_KEPT}
_GROUPS: dict[str, Kind] = {GATHER: "weights", REDUCE: "gradients", PUBLISH: "optimizer"}


def check(program: Program, plan: Plan, model: Model) -> tuple[str, ...]:
    """All problems found; empty for a sound program. Deadlock is looked for only in an otherwise sound program."""
    layout = Layout(plan, model)
    seats = {key: role.view(seat) for role in program.roles for seat, key in enumerate(role.seats)}
    wanted = [(p, s) for p, pipeline in enumerate(plan.pipelines) for s in range(len(pipeline.stages))]
    problems = [f"{_name(key)} has no program" for key in wanted if key not in seats]
    if problems:
        return tuple(problems)
    for key in wanted:
        problems += [f"{_name(key)}: {text}" for text in _role_problems(seats[key], plan, layout)]
    problems += _unmatched(seats)
    problems = problems or [*_misread(seats, plan)]
    return tuple(problems) or tuple(_deadlock({role.seats[0]: role for role in program.roles}, plan, layout))


def _name(key: RoleKey) -> str:
    return f"pipeline {key[0]} stage {key[1]}"


def _role_problems(role: Role, plan: Plan, layout: Layout) -> Iterator[str]:
    pipeline = plan.pipelines[role.pipeline]
    units = layout.units_of_stage(role.pipeline, role.stage)
    yield from _miscounted(role, layout, units)
    stage_of = {b: c.stage for c in pipeline.chain for b in range(c.lo, c.hi)}
    ends = {c.hi: c for c in pipeline.chain}
    seen: set[tuple[str, int, int]] = set()
    held: set[int] = set()
    state: set[int] = set()
    pieces = set[int]() if layout.needed(GATHER, units[0]) else held
    versions = _Versions()
    rounds = plan.schedule == "roundpipe"
    loads = "weights" in pipeline.stages[role.stage].offload
    parked: set[tuple[int, int]] = set()
    sharded = loads or layout.needed(GATHER, units[0])
    away = pipeline.stages[role.stage].offload
    gradients = _Gradients(layout) if "gradients" in away else None
    for at, a in enumerate(role.actions):
        here = f"action {at}, {a}"
        if gradients and (text := gradients.wrong(a, hosted=pipeline.stages[role.stage].hosted)):
            yield f"{here}: {text}"
        if a.op in (GATHER, LOAD_WEIGHTS):
            mine = held if a.op == GATHER else pieces
            if a.lo in mine:
                yield f"{here}: the weights are here already"
            if a.op == GATHER and loads and a.lo not in pieces:
                yield f"{here}: the piece of this rank is in host memory"
            mine.add(a.lo)
        elif a.op in (RELEASE, FREE_WEIGHTS):
            mine = held if a.op == RELEASE else pieces
            if a.lo not in mine:
                yield f"{here}: the weights are not here"
            mine.discard(a.lo)
        elif a.op in (PARK_SAVED, LOAD_SAVED, PASS_SAVED):
            if (F, a.lo, a.mb) not in seen:
                yield f"{here}: its forward has saved nothing yet"
            elif a.lo not in pipeline.stages[role.stage].offload_blocks:
                yield f"{here}: what this block saves stays on the device"
            elif ((a.lo, a.mb) in parked) != (a.op == LOAD_SAVED):
                yield f"{here}: what it saved is {'not ' if a.op == LOAD_SAVED else ''}in host memory"
            elif a.op == PASS_SAVED and not {(B, a.lo, a.mb), (I, a.lo, a.mb)} & seen:
                yield f"{here}: its backward has not used it yet"
            (parked.add if a.op == PARK_SAVED else parked.discard)((a.lo, a.mb))
        elif a.op == AWAIT_PARKED:
            if (a.lo, a.mb) not in parked:
                yield f"{here}: what it saved is not on its way to host memory"
        elif a.op in (LOAD_STATE, FREE_STATE):
            if (a.lo in state) == (a.op == LOAD_STATE):
                yield f"{here}: the optimizer's state is {'here already' if a.lo in state else 'not here'}"
            (state.add if a.op == LOAD_STATE else state.discard)(a.lo)
            seen.add((a.op, a.lo, a.mb))
        elif a.op in (STEP, SAVE_WEIGHTS, SAVE_STATE):
            needs = layout.loads_for_step(a.lo, away)
            if ("weights" in needs and a.op != SAVE_STATE and a.lo not in pieces) or (
                    "optimizer" in needs and a.op != SAVE_WEIGHTS and a.lo not in state):
                yield f"{here}: what it works on is in host memory"
            if a.op == STEP and (text := versions.wrong(STEP, a.lo, a.mb)):
                yield f"{here}: {text}"
            seen.add((a.op, a.lo, a.mb))
        elif a.op in (PUSH, PULL):
            if text := versions.wrong(a.op, a.lo, a.mb):
                yield f"{here}: {text}"
            needed = {PUSH: STEP, PULL: SYNC}[a.op]
            if (needed, a.lo, -1 if needed == STEP else a.mb) not in seen:
                yield f"{here}: nothing is there yet to {'push' if a.op == PUSH else 'pull'}"
            seen.add((a.op, a.lo, a.mb))
        elif a.op in (KEEP, ANTICIPATE, USE, DROP):
            wrong = [text for b in range(a.lo, a.hi) if (text := versions.wrong(a.op, b, a.mb))]
            if wrong:
                yield f"{here}: {wrong[0]}"
        elif a.op == AHEAD:
            missing = [u for b in range(a.lo, a.hi) for u in layout.units_of_block[b] if u not in held]
            if missing:
                yield f"{here}: the weights of unit {missing[0]} are not here"
            if a.lo and not {(AHEAD, a.lo - 1, a.mb), (RECV_ACT, a.lo, a.mb)} & seen:
                yield f"{here}: its input has not been received"
            seen.update((AHEAD, b, a.mb) for b in range(a.lo, a.hi))
        elif a.op in (F, B, I, W):
            for b in range(a.lo, a.hi) if a.op == F else reversed(range(a.lo, a.hi)):
                missing = [u for u in layout.units_of_block[b] if u not in held] if sharded and a.op != W else []
                if missing:
                    yield f"{here}: the weights of unit {missing[0]} are not here"
                if a.op == F:
                    arrived, source = (F, b - 1, a.mb) in seen, (RECV_ACT, b, a.mb) in seen
                    if rounds and b == a.lo:
                        if b and not {(AHEAD, b - 1, a.mb), (RECV_KEPT if b in pipeline.entries else RECV_ACT, b, a.mb)
                                      } & seen:
                            yield f"{here}: its input has not been received"
                    elif b and not (arrived if stage_of[b - 1] == role.stage else source):
                        yield (f"{here}: block {b} runs before block {b - 1}" if stage_of[b - 1] == role.stage
                               else f"{here}: its input has not been received")
                elif a.op == W:
                    if (I, b, a.mb) not in seen:
                        yield f"{here}: the weight half of block {b} runs before its input half"
                else:
                    if (F, b, a.mb) not in seen:
                        yield f"{here}: the backward of block {b} runs before its forward"
                    if (b, a.mb) in parked:
                        yield f"{here}: what the forward of block {b} saved is in host memory"
                    behind = stage_of.get(b + 1)
                    if behind == role.stage and not {(B, b + 1, a.mb), (I, b + 1, a.mb)} & seen:
                        yield f"{here}: the backward of block {b} runs before that of block {b + 1}"
                    if behind not in (None, role.stage) and (RECV_GRAD, ends[b + 1].lo, a.mb) not in seen:
                        yield f"{here}: the gradient of its output has not been received"
                seen.add((a.op, b, a.mb))
        else:
            ready = {SEND_ACT: [(F, a.hi - 1, a.mb), (AHEAD, a.hi - 1, a.mb)],
                     SEND_KEPT: [(AHEAD, a.hi - 1, a.mb)], SEND_GRAD: [(B, a.lo, a.mb), (I, a.lo, a.mb)]}.get(a.op)
            if ready and not seen.intersection(ready):
                yield f"{here}: what it sends has not been computed"
            seen.add((a.op, a.lo, a.mb))


class _Gradients:
    """Where the gradients of units are that go to the host."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._gone: set[int] = set()
        self._unsaved: set[int] = set()

    def wrong(self, a: Action, *, hosted: bool) -> str | None:
        """Follows one action, or says why it is not possible."""
        if a.op in (B, I, W):
            mine = {u for b in range(a.lo, a.hi) for u in self._layout.units_of_block[b]
                    if not self._layout.units[u].frozen and not self._layout.needed(REDUCE, u)}
        elif a.op in (REDUCE, SYNC, STEP, LOAD_GRAD, SAVE_GRAD, FREE_GRAD):
            mine = {a.lo}
        else:
            return None
        there = mine & self._gone
        if a.op == LOAD_GRAD:
            self._gone.discard(a.lo)
            return None if there else f"the gradient of unit {a.lo} is here already"
        if a.op == STEP and hosted:
            return None if there else f"the gradient of unit {a.lo} is not in host memory, where the step is made"
        if there:
            return f"the gradient of unit {min(there)} is in host memory"
        if a.op == SAVE_GRAD:
            self._unsaved.discard(a.lo)
        elif a.op == FREE_GRAD:
            self._gone.add(a.lo)
            if a.lo in self._unsaved:
                return f"the gradient of unit {a.lo} has not been written back"
        elif a.op != STEP:
            self._unsaved |= mine
        return None


class _Versions:
    """The copies of each block's weights, and which is in use."""

    def __init__(self) -> None:
        self._made: Counter[int] = Counter()
        self._held: set[tuple[int, int]] = set()
        self._using: dict[int, int] = {}

    def wrong(self, op: str, block: int, version: int) -> str | None:
        """Does one thing, or says why that is not possible."""
        now, known = self._made[block], (block, version) in self._held
        if op in (STEP, PUSH, PULL):
            if self._using.get(block, CURRENT) != CURRENT:
                return f"block {block} uses version {self._using[block]}, not the current weights"
            self._made[block] += op == STEP
        elif op in (KEEP, ANTICIPATE):
            if known:
                return f"there is a copy of version {version} of block {block} already"
            if (version != now) if op == KEEP else version <= now:
                return f"the current weights of block {block} are version {now}"
            self._held.add((block, version))
        elif version != CURRENT and not known:
            return f"there is no copy of version {version} of block {block}"
        elif op == USE:
            self._using[block] = version
        else:
            self._held.discard((block, version))
            if self._using.get(block) == version:
                del self._using[block]
        return None


def _misread(roles: dict[RoleKey, Role], plan: Plan) -> Iterator[str]:
    """Backwards that see other weights than their forwards, and stages that see others than the first, where the
    schedule promises otherwise. Weights predicted for a version count as that version."""
    weights = plan.weights
    if weights is None:
        return
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for (p, s), role in roles.items():
        for (block, mb), read in readings(by_block(role.actions)).of.items():
            if weights.same and read.forward != read.backward:
                yield (f"{_name((p, s))}: B{block}.{mb} sees version {read.backward} of the weights, its forward saw "
                       f"version {read.forward}")
            count = len(plan.pipelines[p].micro_batches)
            lead = plan.synchronization.distance
            due = read.forward // count - lead if weights.waves and len(plan.replicas) > 1 else 0
            if read.waves < due:
                yield (f"{_name((p, s))}: F{block}.{mb} knows {read.waves} waves of the others; at version "
                       f"{read.forward} and distance {lead} it must know {due}")
            version, block_0 = first.setdefault((p, mb), (read.forward, block))
            if weights.everywhere and read.forward != version:
                yield (f"{_name((p, s))}: F{block}.{mb} sees version {read.forward} of the weights, F{block_0}.{mb} "
                       f"saw version {version}")


def _miscounted(role: Role, layout: Layout, units: tuple[int, ...]) -> Iterator[str]:
    """Missing and doubled actions."""
    pipeline = layout.plan.pipelines[role.pipeline]
    last, floor = len(pipeline.chain) - 1, layout.floor
    steps = Counter(a.lo for a in role.actions if a.op == STEP)
    each = len(pipeline.micro_batches) if layout.plan.waves else 1
    updates = 1 if layout.plan.synchronous else max(steps.values(), default=each) // each
    halves = {(a.mb, b) for a in role.actions if a.op in (I, W) for b in range(a.lo, a.hi)}
    expected: Counter[tuple[str, int, int]] = Counter()
    for m in range(len(pipeline.micro_batches) * updates):
        for k, (lo, hi, stage) in enumerate(pipeline.chain):
            if stage != role.stage:
                continue
            for b in range(lo, hi):
                expected[F, b, m] += 1
                expected.update((op, b, m) for op in ((I, W) if (m, b) in halves else (B,)) if b >= floor)
            if layout.plan.schedule == "roundpipe":  # between legs: what does not match is found as such
                continue
            if k > 0 and pipeline.chain[k - 1].stage != stage:
                expected[RECV_ACT, lo, m] += 1
                expected[SEND_GRAD, lo, m] += lo > floor
            if k < last and pipeline.chain[k + 1].stage != stage:
                expected[SEND_ACT, lo, m] += 1
                expected[RECV_GRAD, max(lo, floor), m] += hi > floor
        for lo, hi in pipeline.stages[role.stage].ahead:
            expected.update((AHEAD, b, m) for b in range(lo, hi))
        if layout.plan.accumulation == "plain":
            expected.update((REDUCE, u, m) for u in units if layout.needed(REDUCE, u))
    if layout.plan.accumulation == "layered":
        expected.update((REDUCE, u, -1) for u in units if layout.needed(REDUCE, u))
    if layout.plan.waves:
        expected.update((op, u, wave) for op in (PUSH, SYNC, PULL) for u in units if layout.needed(SYNC, u)
                        for wave in range(updates))
    else:
        expected.update({(op, u, -1): updates for op in (SYNC, PUBLISH) for u in units if layout.needed(op, u)})
    stepped = [u for u in units if not layout.units[u].frozen]
    expected.update({(STEP, u, -1): updates * each for u in stepped})
    away = pipeline.stages[role.stage].offload
    for u in stepped:
        needs = layout.loads_for_step(u, away)
        expected.update((op, u, -1) for op in ((SAVE_WEIGHTS,) if "weights" in needs else ())
                        + ((LOAD_STATE, SAVE_STATE, FREE_STATE) if "optimizer" in needs else ())
                        + ((SAVE_GRAD, FREE_GRAD) if "gradients" in away else ())
                        + ((LOAD_GRAD, FREE_GRAD) if "gradients" in needs else ())
                        + ((LOAD_UPDATED,) if layout.fetches_updated(u, away) else ()))
    if layout.plan.synchronous:
        expected[(NORM, 0, -1)] = 1
    found: Counter[tuple[str, int, int]] = Counter()
    for a in role.actions:
        if a.op in _MATCHES and layout.plan.schedule == "roundpipe":
            continue
        if a.op in (F, B, I, W, AHEAD):
            found.update((a.op, b, a.mb) for b in range(a.lo, a.hi))
        elif a.op in (LOAD_GRAD, SAVE_GRAD, FREE_GRAD) and a.mb >= 0:
            continue  # between micro-batches: what does not match is found as such
        elif a.op not in (GATHER, RELEASE, LOAD_WEIGHTS, FREE_WEIGHTS, KEEP, ANTICIPATE, USE, DROP, PARK_SAVED,
                          LOAD_SAVED, PASS_SAVED, AWAIT_PARKED):
            found[(a.op, a.lo, a.mb)] += 1
    for key in sorted((expected | found).keys()):
        name = str(Action(key[0], key[1], key[1] + 1, key[2]))
        if found[key] < expected[key]:
            yield f"{name} is missing"
        elif expected[key] == 0:
            yield f"{name} does not belong here"
        elif found[key] > expected[key]:
            yield f"{name} is there {found[key]} times"


def _unmatched(roles: dict[RoleKey, Role]) -> Iterator[str]:
    """Sends and receives of a channel must name the same micro-batches in the same order."""
    for (p, s), role in roles.items():
        channels = {(a.op, boundary(a), a.peer) for a in role.actions if a.op in (SEND_ACT, SEND_GRAD, SEND_KEPT)}
        for op, block, peer in sorted(channels):
            sent = [a.mb for a in role.actions if a.op == op and boundary(a) == block]
            other = roles.get((p, peer))
            got = [a.mb for a in other.actions if a.op == _MATCHES[op] and boundary(a) == block] if other else []
            if sent != got:
                yield (f"{_name((p, s))} sends {op} at block {block} for micro-batches {sent} to stage {peer}, which "
                       f"receives {got}")


def _linked(pipeline: int, plan: Plan, layout: Layout, kind: Kind) -> set[int]:
    """Pipelines that must act together because groups join their replicas, directly or through others."""
    found = {pipeline}
    while True:
        more = {plan.replicas[q][0] for k, (p, _) in enumerate(plan.replicas) if p in found
                for q in layout.group(kind, k)}
        if more == found:
            return found
        found = more


def _deadlock(roles: dict[RoleKey, Role], plan: Plan, layout: Layout) -> list[str]:
    """Run the program without a clock; what cannot start any more is named with what it waits for."""
    needs = {key: r.needs(lambda one: dependencies(one.actions, layout, layout.units_of_stage(*one.seats[0])))
             for key, r in roles.items()}
    owner = {seat: key for key, r in roles.items() for seat in r.seats}
    queues: dict[RoleKey, dict[tuple[str, int], list[int]]] = {}
    for key, role in roles.items():
        streams: dict[tuple[str, int], list[int]] = {}
        for i, a in enumerate(role.actions):
            streams.setdefault(stream_of(a), []).append(i)
        queues[key] = {stream: list(reversed(items)) for stream, items in streams.items()}
    done: dict[RoleKey, set[int]] = {key: set() for key in roles}

    def partners(key: RoleKey, a: Action) -> set[RoleKey]:
        pipeline, stage = roles[key].seats[max(a.seat, 0)]
        if a.op in _MATCHES:
            return {key, owner[pipeline, a.peer]}
        if a.op == NORM:
            return set(roles)
        if a.op not in (GATHER, REDUCE, SYNC, PUBLISH):
            return {key}
        pipelines = set(range(len(plan.pipelines)))
        if a.op in _GROUPS:
            pipelines = _linked(pipeline, plan, layout, _GROUPS[a.op])
        held_by = {(p, s) for p, s in owner if p in pipelines and a.lo in layout.units_of_stage(p, s)}
        # Pipelines that share weights have equal stages, and each stage gathers for itself, tied tensors too.
        return {owner[p, s] for p, s in held_by if a.op != GATHER or s == stage}

    def named(key: RoleKey, a: Action, op: str = "") -> tuple[object, ...]:
        """By what partners know the action: which seat it is for matters where they might have several like it."""
        pipeline, stage = roles[key].seats[max(a.seat, 0)]
        if a.op in _MATCHES:
            return op or a.op, boundary(a), a.mb, pipeline
        if a.op in (GATHER, REDUCE):
            return a.op, a.lo, a.mb, min(_linked(pipeline, plan, layout, _GROUPS[a.op])), a.op == GATHER and stage
        return a.op, a.lo, a.mb, 0 if a.op in (SYNC, PUBLISH, NORM) else a.seat

    def ready(key: RoleKey) -> dict[tuple[object, ...], tuple[int, tuple[str, int]]]:
        """Heads of streams whose dependencies are met, by what partners must agree on."""
        found = {}
        for stream, items in queues[key].items():
            if items and done[key].issuperset(needs[key][items[-1]]):
                a = roles[key].actions[items[-1]]
                found[named(key, a)] = (items[-1], stream)
        return found

    moved = True
    while moved:
        moved = False
        heads = {key: ready(key) for key in roles}
        for key in roles:
            for name, (i, _) in list(heads[key].items()):
                a = roles[key].actions[i]
                group = partners(key, a)
                wanted = {k: name if k == key or a.op not in _MATCHES else named(key, a, _MATCHES[a.op]) for k in group}
                if i not in done[key] and all(wanted[k] in heads[k] for k in group):
                    for k in group:
                        j, stream = heads[k].pop(wanted[k])
                        queues[k][stream].pop()
                        done[k].add(j)
                    moved = True
    problems = []
    for key, role in roles.items():
        stuck = [items[-1] for items in queues[key].values() if items]
        if stuck:
            waits = []
            for i in sorted(stuck):
                open_ = [str(role.actions[j]) for j in needs[key][i] if j not in done[key]]
                others = ", ".join(_name(k) for k in sorted(partners(key, role.actions[i]) - {key}))
                waits.append(f"{role.actions[i]} waits for {', '.join(open_) or others}")
            problems.append(f"{_name(key)} is stuck: {'; '.join(waits)}")
    return problems
