"""Who holds which part of the state: interval sharding, the one mechanism behind DDP, ZeRO, MiCS and what lies between.

The state of a block is a flat interval [0, N): its tensors one after another, those that tensor parallelism cuts
first, each with the cut dimension moved to the front. So every tensor-parallel slice is a few intervals, whatever
the degree. Elements that the same ranks hold in every replica form a *column* with coordinates [0, size) of its own
(without tensor parallelism the whole block is one column; with it there is one column per slice and one for the
replicated tensors). Inside a column the replicas of a group cut the interval into pieces, and all communication of
state is moves of pieces. Groups of unequal size and replicas of unequal tensor degree just give other cuts. Where
replicas share experts, a column of experts has holders in some replicas only, one in each group that shares them; of a
group that cuts state, those who hold a column cut it.

All ranks in here are posts (`Plan.posts`): a rank that stands in several pipelines counts once in each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from math import gcd
from typing import Literal, NamedTuple

from mixfleet.model.spec import Model, Param
from mixfleet.plan import Offload, Plan, groups, makes_step
from mixfleet.program.action import GATHER, PUBLISH, REDUCE, SYNC

Kind = Literal["weights", "gradients", "optimizer"]


class Tensor(NamedTuple):
    """A parameter inside a unit's flat interval; `row` elements per index of the cut dimension."""

    key: str
    param: Param
    offset: int
    rows: int
    row: int

    @property
    def elements(self) -> int:
        return self.rows * self.row


class Unit(NamedTuple):
    """State that moves together: a block's own tensors, or one tensor tied between blocks."""

    number: int
    name: str
    blocks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    elements: int
    frozen: bool = False
    """Not trained: weights alone, without gradient, reduction or optimizer state."""


class Column(NamedTuple):
    """Elements of a unit that the same ranks compute with: `holders[k]` in replica k, at `spans` of the interval."""

    holders: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[int, int], ...]
    size: int
    partial: bool = False
    """Of experts that replicas share: not every replica has holders."""


class Place(NamedTuple):
    """Where a rank stands in the plan."""

    pipeline: int
    replica: int
    """Number among all data-parallel replicas (`Plan.replicas`)."""
    stage: int
    tensor_index: int
    member: int = 0
    """Number among the stage's own replicas (`Stage.shares`)."""


class Move(NamedTuple):
    """Elements [lo, hi) of a column, from rank `src` to rank `dst`."""

    src: int
    dst: int
    column: int
    lo: int
    hi: int


class Reduction(NamedTuple):
    """A sum over ranks. First `sums`: every contributor sends its part to the rank that adds it up; `terms` names, per
    (adding rank, column, lo, hi), all contributors in the order of addition. Then `copies` hand the sums to the
    other ranks that want them."""

    sums: tuple[Move, ...]
    copies: tuple[Move, ...]
    terms: tuple[tuple[int, int, int, int, tuple[int, ...]], ...]


Interval = tuple[int, int, int, list[int], list[int]]
"""To be summed: (column, lo, hi, contributing ranks, ranks that want the sum)."""


class Comm(NamedTuple):
    """What a state-moving action costs one rank, as a collective over `ranks` of a buffer of `elements`."""

    op: Literal["all_reduce", "all_gather", "reduce_scatter"]
    ranks: tuple[int, ...]
    elements: int
    turn: int = 0
    """Collectives of equal turn happen at the same time; those of shared experts follow those of all else."""


def cut(size: int, pieces: int, index: int) -> tuple[int, int]:
    """Piece `index` of [0, size) cut into `pieces` as evenly as can be."""
    return size * index // pieces, size * (index + 1) // pieces


class Layout:
    """The state layout of a plan. All answers are cached; nothing is materialized that is not asked for."""

    def __init__(self, plan: Plan, model: Model, units: tuple[Unit, ...] = ()) -> None:
        """`units` are those of another layout of the same model."""
        self.plan = plan
        self.model = model
        if units:
            self.__dict__["units"] = units
        self._replicas = plan.replicas
        shard, n = plan.sharding, len(self._replicas)
        self._degree: dict[Kind, int] = {"weights": min(shard.weights, n), "gradients": min(shard.gradients, n),
                                         "optimizer": min(shard.optimizer, n)}
        w, g, o = self._degree.values()
        # Nested degrees are numbered so that a rank's optimizer piece lies inside its gradient piece, and that inside
        # its weight piece: then hop 2 and publish stay among the ranks that share a piece.
        self._shares = shard.shares if len(set(shard.shares)) > 1 else ()
        self._nested = n % o == 0 and o % g == 0 and g % w == 0 and not self._shares
        self.piece = cache(self._piece)
        self._ends = cache(self._all_pieces)
        self.columns = cache(self._columns)
        self._expert_holders = cache(self._find_expert_holders)
        self._positions = cache(self._find_positions)
        self.comms = cache(self._comms)
        self.gather, self.publish = cache(self._gather), cache(self._publish)
        self.reduce, self.sync = cache(self._reduce), cache(self._sync)
        self.segments = cache(self._segments)

    @property
    def floor(self) -> int:
        """The lowest block that has a backward: what is frozen below it needs none. All have one under an asynchronous
        schedule, where it tells when a version of the weights has been used, and under RoundPipe, whose legs go all the
        way down."""
        return self.model.idle_blocks if self.plan.synchronous and self.plan.schedule != "roundpipe" else 0

    # --- units -------------------------------------------------------------------------------------------------

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """One unit per block, then one per tied tensor, then one for what is frozen in a block."""
        blocks = self.model.blocks
        shared: dict[str, list[int]] = {}
        for i, block in enumerate(blocks):
            for p in block.params:
                if p.tied:
                    shared.setdefault(p.tied, []).append(i)
        units: list[Unit] = []
        frozen: list[list[tuple[str, Param]]] = []
        for i, block in enumerate(blocks):
            own = [(f"{block.name}/{p.name}", p) for p in block.params if not p.tied]
            mine = [(k, p) for k, p in own if k not in shared]
            units.append(_unit(i, block.name, (i,), [(k, p) for k, p in mine if p.trainable]))
            frozen.append([(k, p) for k, p in mine if not p.trainable])
        by_key = {f"{b.name}/{p.name}": (i, p) for i, b in enumerate(blocks) for p in b.params if not p.tied}
        for key, others in shared.items():
            home, param = by_key[key]
            units.append(_unit(len(units), key, tuple(sorted({home, *others})), [(key, param)]))
        for i, params in enumerate(frozen):
            if params:
                units.append(_unit(len(units), f"{blocks[i].name}, frozen", (i,), params))
        return tuple(units)

    @cached_property
    def units_of_block(self) -> tuple[tuple[int, ...], ...]:
        """The units that each block computes with."""
        found: list[list[int]] = [[] for _ in self.model.blocks]
        for unit in self.units:
            for b in unit.blocks:
                found[b].append(unit.number)
        return tuple(map(tuple, found))

    def units_of_stage(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """Units that a stage holds, ascending."""
        chunks = self.plan.pipelines[pipeline].stages[stage].chunks
        return tuple(sorted({u for lo, hi in chunks for b in range(lo, hi) for u in self.units_of_block[b]}))

    # --- ranks -------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> dict[int, Place]:
        """Where each post of the plan is."""
        return {post: Place(p, k, s, j, member)
                for k, (p, r) in enumerate(self._replicas)
                for s, stage in enumerate(self.plan.pipelines[p].stages) for member in range(stage.members)
                for j, post in enumerate(self.plan.posts(p, s, r, member))}

    def posts_of(self, rank: int) -> tuple[int, ...]:
        """All posts of a rank."""
        return tuple(post for seat in range(len(self.plan.pipelines) if self.plan.shared else 1)
                     if (post := rank + seat * self.plan.span) in self.places)

    @cached_property
    def _late(self) -> frozenset[int]:
        """Tied units that two stages of a pipeline hold. Hop 1 would make every micro-batch of one stage wait for the
        other, so their gradient stays whole until hop 2."""
        return frozenset(u.number for u in self.units if len(u.blocks) > 1 and any(
            not s.holds(u.blocks[-1]) for p in self.plan.pipelines for s in p.stages if s.holds(u.blocks[0])))

    def _reduces(self, u: int) -> bool:
        return self._degree["gradients"] > 1 and u not in self._late and not self.units[u].frozen

    def group(self, kind: Kind, replica: int) -> range:
        """The replicas that share one copy of this kind of state with `replica`."""
        return next(g for g in groups(len(self._replicas), self._degree[kind]) if replica in g)

    @cached_property
    def _groups(self) -> dict[Kind, tuple[range, ...]]:
        return {kind: groups(len(self._replicas), d) for kind, d in self._degree.items()}

    @cached_property
    def _index(self) -> dict[Kind, tuple[tuple[int, int, int], ...]]:
        """Per replica: where its piece begins and ends, and where the whole does, in shares of its group."""
        w, g, o = self._degree.values()
        result: dict[Kind, tuple[tuple[int, int, int], ...]] = {}
        for kind, members in self._groups.items():
            index: list[tuple[int, int, int]] = []
            for group in members:
                if self._shares and len(group) > 1:
                    ends = [0, *accumulate(self._shares[k] for k in group)]
                    part = gcd(*ends)
                    index += [(a // part, b // part, ends[-1] // part) for a, b in pairwise(ends)]
                    continue
                for k in group:
                    i = k - group.start
                    if self._nested and kind != "weights":
                        i = (k % w) * (g // w) + (k % g) // w
                        if kind == "optimizer":
                            i = i * (o // g) + (k % o) // g
                    index.append((i, i + 1, len(group)))
            result[kind] = tuple(index)
        return result

    @property
    def irregular(self) -> bool:
        """Whether state moves otherwise than in equal pieces and in one stage: `comms` then only resembles it."""
        uneven = self.plan.expert > 1 and (len(set(self.plan.expert_shares)) > 1
                                           or len({len(group) for group in self.plan.expert_groups}) > 1)
        return bool(self._shares or self.plan.sharding.hierarchical or self.plan.shared or uneven
                    or any(pipeline.replicated for pipeline in self.plan.pipelines))

    def share(self, replica: int) -> tuple[tuple[int, int], ...]:
        """The part of each kind of state that a replica holds, as fractions, where the parts are unequal."""
        return tuple((b - a, whole) for a, b, whole in (index[replica] for index in self._index.values())
                     ) if self._shares else ()

    # --- columns and pieces ------------------------------------------------------------------------------------

    def rows(self, tensor: Tensor, post: int) -> tuple[int, int]:
        """The indices [lo, hi) of a tensor's cut dimension that a post computes with."""
        if tensor.param.split is None:
            return 0, tensor.rows
        place = self.places[post]
        degree = self.plan.pipelines[place.pipeline].stages[place.stage].tensor
        if tensor.param.role != "expert":
            return cut(tensor.rows, degree, place.tensor_index)
        lo, hi = self.plan.experts_of(place.replica, tensor.rows)
        a, b = cut(hi - lo, degree, place.tensor_index)
        return lo + a, lo + b

    def _find_expert_holders(self, stages: tuple[tuple[int, ...], ...], count: int
                             ) -> tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]:
        """(from, to, holders in every replica) of `count` experts of a layer on these stages of the pipelines."""
        ranges: list[list[tuple[int, int, int]]] = []
        for k, (p, r) in enumerate(self._replicas):
            lo, hi = self.plan.experts_of(k, count)
            ranges.append([(lo + a, lo + b, post) for s in stages[p]
                           for j, post in enumerate(self.plan.posts(p, s, r))
                           for a, b in (cut(hi - lo, self.plan.pipelines[p].stages[s].tensor, j),)])
        points = sorted({x for found in ranges for a, b, _ in found for x in (a, b)})
        return tuple((x, y, tuple(tuple(post for a, b, post in found if a <= x < b) for found in ranges))
                     for x, y in pairwise(points))

    def _columns(self, u: int) -> tuple[Column, ...]:
        unit = self.units[u]
        stages = tuple(tuple(s for s, stage in enumerate(p.stages)
                             if any(map(stage.holds, unit.blocks)))
                       for p in self.plan.pipelines)
        degrees = sorted({self.plan.pipelines[p].stages[s].tensor for p, found in enumerate(stages) for s in found})
        ends: dict[int, list[list[int]]] = {}
        spans: dict[tuple[int, ...] | None, list[tuple[int, int]]] = {}
        shared: dict[tuple[tuple[int, ...], ...], list[tuple[int, int]]] = {}
        for tensor in unit.tensors:
            if tensor.param.role == "expert" and self.plan.expert > 1:
                for a, b, holding in self._expert_holders(stages, tensor.rows):
                    shared.setdefault(holding, []).append((tensor.offset + a * tensor.row,
                                                           tensor.offset + b * tensor.row))
                continue
            if tensor.param.split is None or degrees == [1]:
                spans.setdefault(None, []).append((tensor.offset, tensor.offset + tensor.elements))
                continue
            if tensor.rows not in ends:
                ends[tensor.rows] = [[cut(tensor.rows, t, j)[1] for j in range(t)] for t in degrees]
            for a, b in pairwise(sorted({0, *chain.from_iterable(ends[tensor.rows])})):
                owner = tuple([bisect_right(found, a) for found in ends[tensor.rows]])
                spans.setdefault(owner, []).append((tensor.offset + a * tensor.row, tensor.offset + b * tensor.row))
        columns = []
        for slice_, parts in spans.items():
            holders = []
            for p, r in self._replicas:
                ranks: list[int] = []
                for s in stages[p]:
                    stage = self.plan.pipelines[p].stages[s]
                    for member in range(stage.members):
                        mine = self.plan.posts(p, s, r, member)
                        ranks += mine if slice_ is None else [mine[slice_[degrees.index(stage.tensor)]]]
                holders.append(tuple(ranks))
            columns.append(Column(tuple(holders), tuple(parts), sum(b - a for a, b in parts)))
        columns += [Column(holding, tuple(parts), sum(b - a for a, b in parts), partial=True)
                    for holding, parts in shared.items()]
        return tuple(columns)

    def _piece(self, kind: Kind, u: int, column: int, replica: int) -> tuple[int, int]:
        """The interval of a column whose state of this kind `replica` holds."""
        if kind != "weights" and self.units[u].frozen:
            return 0, 0
        found = self.columns(u)[column]
        if found.partial and not found.holders[replica]:
            return 0, 0
        if kind == "gradients" and not self._reduces(u):
            return 0, found.size
        first, last, whole = (self._positions(kind, found.holders)[replica] if found.partial
                              else self._index[kind][replica])
        return found.size * first // whole, found.size * last // whole

    def _find_positions(self, kind: Kind, holders: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, int, int]]:
        """As `_index`, for those replicas of each group that hold a column, in the same order."""
        result: dict[int, tuple[int, int, int]] = {}
        for group in self._groups[kind]:
            members = sorted((k for k in group if holders[k]), key=lambda k: (self._index[kind][k][0], k))
            shares = [self._shares[k] for k in members] if self._shares else []
            ends = [0, *accumulate(shares if sum(shares) and len(members) > 1 else [1] * len(members))]
            result |= {k: (a, b, ends[-1]) for k, (a, b) in zip(members, pairwise(ends))}
        return result

    def counts(self, u: int, column: int, post: int) -> bool:
        """Whether what a post holds of a column is written to checkpoints there: it is in the first group, of those
        that cut it, that holds it."""
        holders, replica = self.columns(u)[column].holders, self.places[post].replica
        return replica in self._holding(u, column)[0] and holders[replica][0] == post

    def measures(self, u: int, column: int, post: int) -> tuple[int, int]:
        """What of a column a post adds to the norm of the gradient: every group has all of it, and equal parts of the
        work; but of virtual workers, whose gradients are their own, the first."""
        lo, hi = self.piece("optimizer", u, column, self.places[post].replica)
        having = self._holding(u, column)[:1 if self.plan.waves else None]
        k = next((k for k, group in enumerate(having) if self.places[post].replica in group), -1)
        if k < 0 or self.columns(u)[column].holders[self.places[post].replica][0] != post:
            return lo, lo
        a, b = cut(self.columns(u)[column].size, len(having), k)
        return max(lo, a), max(lo, a, min(hi, b))

    def _holding(self, u: int, column: int) -> list[range]:
        """The groups of those that cut a column, or keep it where it is frozen, that hold it."""
        holders = self.columns(u)[column].holders
        return [group for group in self._groups["weights" if self.units[u].frozen else "optimizer"]
                if any(holders[k] for k in group)]

    def _all_pieces(self, kind: Kind, u: int, column: int) -> list[tuple[int, int]]:
        """Those of all replicas."""
        return [self.piece(kind, u, column, q) for q in range(len(self._replicas))]

    def held(self, u: int, rank: int) -> tuple[int, ...]:
        """Columns of unit `u` that `rank` computes with."""
        k = self.places[rank].replica
        return tuple(c for c, column in enumerate(self.columns(u)) if rank in column.holders[k])

    def elements(self, kind: Kind, rank: int) -> int:
        """Elements of state of this kind that a rank holds permanently."""
        place = self.places[rank]
        total = 0
        for u in self.units_of_stage(place.pipeline, place.stage):
            for c in self.held(u, rank):
                lo, hi = self.piece(kind, u, c, place.replica)
                total += hi - lo
        return total

    def trained(self, lo: int, hi: int) -> set[int]:
        """Units of blocks `lo` to `hi - 1` whose weights change, of which there are versions."""
        return {u for b in range(lo, hi) for u in self.units_of_block[b] if not self.units[u].frozen}

    def compute_elements(self, u: int, rank: int) -> int:
        """Elements of unit `u` that a rank computes with (gathered, after tensor parallelism)."""
        return sum(self.columns(u)[c].size for c in self.held(u, rank))

    def _segments(self, u: int, column: int, rank: int) -> tuple[tuple[int, int, int], ...]:
        """How a column lies in the rank's own flat buffer of the unit: (from in column, from in buffer, length).

        The buffer is the concatenation of the rank's slices of the unit's tensors, in the unit's order.
        """
        starts = []
        total = 0
        for tensor in self.units[u].tensors:
            lo, hi = self.rows(tensor, rank)
            starts.append((tensor.offset + lo * tensor.row, tensor.offset + hi * tensor.row, total))
            total += (hi - lo) * tensor.row
        found: list[tuple[int, int, int]] = []
        at = 0
        for lo, hi in self.columns(u)[column].spans:
            local = next(t + lo - a for a, b, t in starts if a <= lo and hi <= b)
            if found and found[-1][1] + found[-1][2] == local:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + hi - lo)
            else:
                found.append((at, local, hi - lo))
            at += hi - lo
        return tuple(found)

    def slices(self, u: int, column: int, lo: int, hi: int) -> Iterator[tuple[str, int, int, int]]:
        """Elements [lo, hi) of a column as parts of tensors: (tensor key, from, to, offset from `lo`).

        From and to count in the tensor's flat order with the cut dimension first.
        """
        at = 0
        for a, b in self.columns(u)[column].spans:
            start, end = max(lo, at), min(hi, at + b - a)
            if start < end:
                for tensor in self.units[u].tensors:
                    x = max(a + start - at, tensor.offset)
                    y = min(a + end - at, tensor.offset + tensor.elements)
                    if x < y:
                        yield tensor.key, x - tensor.offset, y - tensor.offset, at + x - a - lo
            at += b - a

    # --- moves ---------------------------------------------------------------------------------------------------

    def _gather(self, u: int) -> tuple[Move, ...]:
        """All-gather of a unit's weights inside every weight group."""
        return tuple(Move(_peer(column.holders[q], i), dst, c, *self.piece("weights", u, c, q))
                     for c, column in enumerate(self.columns(u))
                     for group in self._groups["weights"] for k in group for i, dst in enumerate(column.holders[k])
                     for q in group if q != k and _length(self.piece("weights", u, c, q)))

    def gathers(self, u: int) -> tuple[tuple[Move, ...], ...]:
        """The stages of a gather: one, or across nodes among replicas of equal local index, then inside the nodes.
        Pieces of experts that replicas share are sent directly, with the last stage."""
        k = self.plan.sharding.hierarchical
        if not k:
            return (self.gather(u),)
        across: list[Move] = []
        inside: list[Move] = []
        for c, column in enumerate(self.columns(u)):
            if column.partial:  # its holders are not the replicas of a node
                inside += (move for move in self.gather(u) if move.column == c)
                continue
            for group in self._groups["weights"]:
                width = k if len(group) > k else len(group)
                for r in group:
                    node, local = divmod(r - group.start, width)
                    for q in group:
                        there, index = divmod(q - group.start, width)
                        piece = self.piece("weights", u, c, q)
                        if q == r or not _length(piece):
                            continue
                        source = q if index == local else group.start + node * width + index
                        moves = across if index == local and there != node else inside
                        moves += [Move(_peer(column.holders[source], i), dst, c, *piece)
                                  for i, dst in enumerate(column.holders[r])]
        return tuple(across), tuple(inside)

    def reduces(self, u: int) -> tuple[Reduction, ...]:
        """The stages of hop 1: one, or inside every node, by local index of the owner, then across nodes."""
        if not self.plan.sharding.hierarchical or not self._reduces(u):
            return (self.reduce(u),)
        return tuple(_reduction(parts) for parts in self._staged_parts(u))

    def _staged_parts(self, u: int) -> tuple[list[Interval], list[Interval]]:
        """What is summed inside the nodes, then across them."""
        k = self.plan.sharding.hierarchical
        inside: list[Interval] = []
        across: list[Interval] = []
        across += (part for part in self._reduce_parts(u) if self.columns(u)[part[0]].partial)
        for c, column in enumerate(self.columns(u)):
            for group in self._groups["gradients"] if not column.partial else ():
                width = k if len(group) > k else len(group)
                nodes = [group[i:i + width] for i in range(0, len(group), width)]
                for r in group:
                    piece, local = self.piece("gradients", u, c, r), (r - group.start) % width
                    wants = list(column.holders[r])
                    for node in nodes:
                        inside.append((c, *piece, [rank for q in node for rank in column.holders[q]],
                                       list(column.holders[node[local]])))
                    across.append((c, *piece, [next((rank for rank in column.holders[node[local]] if rank in wants),
                                                    column.holders[node[local]][0]) for node in nodes], wants))
        return inside, across

    def summed(self, op: str, u: int) -> tuple[list[Interval], ...]:
        """What an R or Y action of unit `u` sums, in stages that follow each other, without its moves one by one."""
        if op == SYNC:
            return ([part for c in range(len(self.columns(u))) for part in self._sync_parts(u, c)],)
        if self.plan.sharding.hierarchical and self._reduces(u):
            return self._staged_parts(u)
        return (list(self._reduce_parts(u)),)

    def _publish(self, u: int) -> tuple[Move, ...]:
        """Updated weights from the owners of the optimizer state to those who hold the weights."""
        moves = []
        for c, column in enumerate(self.columns(u)):
            for group in self._groups["optimizer"]:
                for k in group:
                    want = self.piece("weights", u, c, k)
                    for q in group:
                        lo, hi = _overlap(want, self.piece("optimizer", u, c, q))
                        if q != k and lo < hi:
                            moves += [Move(_peer(column.holders[q], i), dst, c, lo, hi)
                                      for i, dst in enumerate(column.holders[k])]
        return tuple(moves)

    def _reduce(self, u: int) -> Reduction:
        """Hop 1: partial gradients of one micro-batch to their owners inside every gradient group."""
        return _reduction(self._reduce_parts(u))

    def _reduce_parts(self, u: int) -> Iterator[Interval]:
        if self._reduces(u):
            yield from ((c, *self.piece("gradients", u, c, k),
                         [r for q in group for r in column.holders[q]], list(column.holders[k]))
                        for c, column in enumerate(self.columns(u))
                        for group in self._groups["gradients"] for k in group)

    def _sync(self, u: int) -> Reduction:
        """Hop 2: accumulated gradients, summed over the groups, to the owners of the optimizer state."""
        return _reduction(part for c in range(len(self.columns(u))) for part in self._sync_parts(u, c))

    def _sync_parts(self, u: int, c: int) -> Iterator[Interval]:
        column = self.columns(u)[c]
        kinds: tuple[Kind, ...] = ("gradients", "optimizer") if self._reduces(u) else ("optimizer",)
        points = sorted({x for kind in kinds for k in range(len(self._replicas))
                         for x in self.piece(kind, u, c, k)})
        for lo, hi in pairwise(points):
            wants = [r for k in self._owners("optimizer", u, c, lo) for r in column.holders[k]]
            if not self._reduces(u):
                has = [r for ranks in column.holders for r in ranks]
            else:  # hop 1 has left the same sum on all holders of a piece; one of them speaks for its group
                has = [next((r for r in column.holders[k] if r in wants), column.holders[k][0])
                       for k in self._owners("gradients", u, c, lo)]
            yield c, lo, hi, has, wants

    def _owners(self, kind: Kind, u: int, c: int, at: int) -> list[int]:
        """The replica, per group, that owns element `at` of a column."""
        return [k for group in self._groups[kind] for k in group
                if self.piece(kind, u, c, k)[0] <= at < self.piece(kind, u, c, k)[1]]

    def stages(self, op: str, u: int) -> tuple[tuple[Move, ...], ...]:
        """The moves of a G, R, Y or P action of unit `u`, over all ranks, in stages that follow each other."""
        if op in (GATHER, PUBLISH):
            return self.gathers(u) if op == GATHER else (self.publish(u),)
        reductions = self.reduces(u) if op == REDUCE else (self.sync(u),)
        return tuple(moves for reduction in reductions for moves in (reduction.sums, reduction.copies))

    def moves(self, op: str, u: int) -> tuple[Move, ...]:
        """All moves of a G, R, Y or P action of unit `u`, over all ranks."""
        return tuple(move for stage in self.stages(op, u) for move in stage)

    def loads_for_step(self, u: int, away: Sequence[Offload]) -> tuple[Offload, ...]:
        """What a device that keeps `away` in host memory loads for the step of a unit: where the host makes it, at most
        the weights, if others need them."""
        if makes_step(away):
            return ("weights",) if "weights" in away and self.needed(PUBLISH, u) else ()
        return tuple(away)

    def fetches_updated(self, u: int, away: Sequence[Offload]) -> bool:
        """Whether it loads what the host has made of the weights: not if they lie in host memory anyway."""
        return makes_step(away) and ("weights" not in away or self.needed(PUBLISH, u))

    def apart(self, u: int, rank: int) -> bool:
        """Whether the gradient that a rank steps with is another than the one which it sums up."""
        k = self.places[rank].replica
        return any(self.piece("gradients", u, c, k) != self.piece("optimizer", u, c, k) for c in self.held(u, rank))

    # --- collectives, for pricing ----------------------------------------------------------------------------------

    def needed(self, op: str, u: int) -> bool:
        """Whether a G, R, Y or P action moves anything at all."""
        n = len(self._replicas)
        w, _, o = self._degree.values()
        if op == GATHER:  # the same for all units, empty ones too
            return w > 1
        if op == REDUCE:
            return self._reduces(u)
        if not self.units[u].elements or self.units[u].frozen:
            return False
        if op == PUBLISH:
            return o > 1 and self._index["weights"] != self._index["optimizer"]
        if not self._reduces(u):
            return n > 1 or any(len(c.holders[0]) > 1 for c in self.columns(u))
        return len(self._groups["gradients"]) > 1 or self._index["gradients"] != self._index["optimizer"]

    def _comms(self, op: str, u: int, rank: int) -> tuple[Comm, ...]:
        """The collectives of an action as `rank` sees them, one after another.

        All columns that the rank holds move in one exchange, those of experts that replicas share in another; each is
        priced over the ranks of its largest column.
        """
        if not self.units[u].elements or not self.needed(op, u):
            return ()
        columns, held = self.columns(u), self.held(u, rank)
        return tuple(comm._replace(turn=comm.turn + 2 * partial) for partial in (False, True)
                     if (mine := [c for c in held if columns[c].partial == partial])
                     for comm in self._comms_of(op, u, rank, mine, partial=partial)
                     if len(comm.ranks) > 1 or not partial)

    def _comms_of(self, op: str, u: int, rank: int, held: list[int], *, partial: bool) -> tuple[Comm, ...]:
        k = self.places[rank].replica
        main = max(held, key=lambda c: (self.columns(u)[c].size, -c))
        holders = self.columns(u)[main].holders
        side = holders[k].index(rank)
        total = sum(self.columns(u)[c].size for c in held)

        def ranks(replicas: Iterable[int]) -> tuple[int, ...]:
            return tuple(sorted(_peer(holders[q], side) for q in replicas if holders[q]))

        if op == GATHER:
            return (Comm("all_gather", ranks(self.group("weights", k)), total),)
        if op == REDUCE:
            return (Comm("reduce_scatter", ranks(self.group("gradients", k)), total),)

        def sharing(kind: Kind, mine: tuple[int, int], among: Iterable[int]) -> list[int]:
            ends, (a, b) = self._ends(kind, u, main), mine
            return [q for q in among if a < ends[q][1] and ends[q][0] < b and ends[q][0] < ends[q][1]] if a < b else []

        if op == PUBLISH:
            piece = self.piece("weights", u, main, k)
            partners = {k, *sharing("optimizer", piece, self.group("optimizer", k))}
            return (Comm("all_gather", ranks(partners), total * _length(piece) // max(1, self.columns(u)[main].size)),)
        everyone = range(len(self._replicas))
        if not self._reduces(u):
            given = (0, self.columns(u)[main].size)
            sources = ranks(everyone)
            if any(len(h) > 1 for h in holders):
                sources = tuple(sorted({r for h in holders for r in h}))
        else:
            given = self.piece("gradients", u, main, k)
            sources = ranks(sharing("gradients", given, everyone))
        share = total * _length(given) // max(1, self.columns(u)[main].size)
        owned = self.piece("optimizer", u, main, k)
        targets = ranks(sharing("optimizer", owned, everyone))
        if self._degree["optimizer"] == (self._degree["gradients"] if self._reduces(u) else 1) or (
                partial and owned == given):
            return (Comm("all_reduce", sources, share),)
        scatter = Comm("reduce_scatter", sources, share)
        if len(targets) == 1:
            return (scatter,)
        return (scatter, Comm("all_gather", targets, total * _length(owned) // max(1, self.columns(u)[main].size), 1))


def _unit(number: int, name: str, blocks: tuple[int, ...], params: list[tuple[str, Param]]) -> Unit:
    tensors = []
    offset = 0
    for key, p in sorted(params, key=lambda kp: kp[1].split is None):
        rows = p.shape[p.split or 0] if p.shape else 1
        tensors.append(Tensor(key, p, offset, rows, p.count // rows if rows else 0))
        offset += p.count
    return Unit(number, name, blocks, tuple(tensors), offset, bool(params) and not params[0][1].trainable)


def _peer(ranks: tuple[int, ...], index: int) -> int:
    """The counterpart of holder `index` among the holders of another replica."""
    return ranks[index % len(ranks)]


def _length(piece: tuple[int, int]) -> int:
    return max(0, piece[1] - piece[0])


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def _reduction(parts: Iterable[Interval]) -> Reduction:
    """Sums and copies for intervals.

    Where several ranks want the sum, each adds up a part of the interval and hands it to the others: that moves as
    few bytes as a ring all-reduce, and makes the result bitwise equal everywhere.
    """
    sums: list[Move] = []
    copies: list[Move] = []
    terms: list[tuple[int, int, int, int, tuple[int, ...]]] = []
    for c, lo, hi, has, wants in parts:
        for i, adder in enumerate(wants):
            a, b = cut(hi - lo, len(wants), i)
            a, b = lo + a, lo + b
            if a == b:
                continue
            terms.append((adder, c, a, b, tuple(has)))
            sums += [Move(src, adder, c, a, b) for src in has if src != adder]
            copies += [Move(adder, dst, c, a, b) for dst in wants if dst != adder]
    return Reduction(tuple(sums), tuple(copies), tuple(terms))
