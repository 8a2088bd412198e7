"""From a shape and its sharding to plans: block ranges, recompute, micro-batches and samples.

Stages come from the exact partition, samples from the exact allocation; the simulator judges the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, product
from math import inf
from typing import NamedTuple

from mixfleet.cost.memory import allocator_factor, boundary_bytes
from mixfleet.plan import Pipeline, Plan, Recompute, Sharding, Stage
from mixfleet.search.allocate import allocate, allocate_in_step
from mixfleet.search.bounds import Flow, hop_s, ideal_s
from mixfleet.search.joint import Option
from mixfleet.search.joint import share as share_apart
from mixfleet.search.partition import Matrix, partition
from mixfleet.search.result import Rejected
from mixfleet.search.space import (
    Class,
    Shape,
    Team,
    context_degrees,
    expert_degrees,
    micro_batch_sizes,
    sharding_families,
    teams,
)
from mixfleet.search.tables import MODES, Pieces, Sharing, Tables
from mixfleet.search.uneven import FINENESS, parts, shares

BEAM, KEPT = 48, 12
"""Teams of a set of classes whose stages are worked out, and those kept for each way of sharding (by the number of
classes, since sets are combined)."""
SPARE = 0.97
"""Of the room for state that samples leave: what is put there, as estimates of memory are a little coarse."""
UNEVEN = 8
"""A replica may hold this much less than an equal piece of the state."""


class Fit(NamedTuple):
    """A team's stages for one micro-batch size."""

    micro_batch: int
    cuts: tuple[int, ...]
    modes: tuple[Recompute, ...]
    flow: Flow

    def step_s(self, samples: int) -> float:
        return self.flow.step_s(samples / self.micro_batch)


class Candidates:
    """Makes plans, remembers what teams can do, and counts what was impossible."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.rejected = Rejected()
        self._fits: dict[tuple[object, ...], Fit | None] = {}
        self._stages: dict[tuple[object, ...], tuple[Matrix, Matrix]] = {}
        self._apart_options: dict[tuple[object, ...], list[Option]] = {}
        self._lines: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    # --- bound of a shape ----------------------------------------------------------------------------------------

    def ideal_s(self, shape: Shape) -> float:
        """Bound over all plans of a shape under GPipe and 1F1B, from computing alone.

        However the batch is split, one team's replicas take at least their part of a given split; so the smallest of
        the teams' bounds for that split holds. The split is chosen so that these are about equal.
        """
        batch = self.tables.job.global_batch
        shares = [1.0] * len(shape)
        times = [self._team_ideal_s(team, batch / sum(t.replicas for t in shape)) for team in shape]
        for _ in range(2):
            if len(shape) == 1:
                break
            speeds = [share / seconds for share, seconds in zip(shares, times)]
            scale = batch / sum(v * team.replicas for v, team in zip(speeds, shape))
            shares = [max(1.0, v * scale) for v in speeds]
            over = batch / sum(s * team.replicas for s, team in zip(shares, shape))
            shares = [s * over for s in shares]
            times = [self._team_ideal_s(team, s) for team, s in zip(shape, shares)]
        return min(times)

    def _team_ideal_s(self, team: Team, samples: float) -> float:
        key = team.kind
        if key not in self._lines:
            self._lines[key] = [self._best_rates(group, team.context) for group in team.ranks[0]]
        counts = [n for n, _, _ in self.tables.table(team.ranks[0][0], 1, team.context).kinds.values()]
        return ideal_s(self._lines[key], counts, max(samples, 1.0))

    def _best_rates(self, ranks: tuple[int, ...], context: int) -> tuple[float, ...]:
        """Seconds per sample of one block of each kind, at the micro-batch that is best for it, experts shared by as
        many as can or by nobody."""
        job = self.tables.job
        sizes = micro_batch_sizes(min(job.global_batch, 16), fine=False)
        ways = dict.fromkeys((None, Sharing.evenly(job, len(self.tables.kind_of), len(ranks) // context)))
        tables = [self.tables.table(ranks, m, context, way) for m in sizes for way in ways]
        return tuple(min((t.kinds[kind][1] + t.kinds[kind][2]) / t.micro_batch for t in tables)
                     for kind in tables[0].kinds)

    def choose(self, members: tuple[int, ...], classes: Sequence[Class], *, wide: bool = False) -> list[Team]:
        """The most promising teams of a set of classes: fastest without sharding, with ZeRO-1, and with ZeRO-3.

        First by the ideal, then the best of these by their stages, for the part of the batch that falls to the set.
        """
        speeds = [c.size / self.tables.table(c.nodes[0][:1], 1).whole_s for c in classes]
        part = sum(speeds[c] for c in members) / sum(speeds)
        batch = self.tables.job.global_batch
        placements: dict[tuple[object, ...], list[Team]] = {}
        contexts = context_degrees(self.tables.job, len(self.tables.cluster.devices))
        for team in teams(members, classes, self.tables, wide=wide, contexts=contexts):
            placements.setdefault((team.kind, team.replicas), []).append(team)

        def share(team: Team) -> int:
            return max(1, round(batch * part / team.replicas))

        kinds = [options[0] for options in placements.values()]
        kinds.sort(key=lambda t: self._team_ideal_s(t, share(t)) / (share(t) * t.replicas))
        picked: dict[Team, None] = {}
        some = any(block.routed for block in self.tables.job.model.blocks)
        for *sharded, spread in (((False, False, False, False), (False, False, True, False), (True, True, True, False),
                                  *((False, False, True, True), (True, True, True, True)) * some)):
            rated = []
            for order, team in enumerate(kinds[:BEAM]):
                everyone = max(team.copies, round(team.copies / part))
                alone = team.copies == 1 and not any(sharded)  # it may be all there is
                weights, gradients, optimizer = (everyone if s else 1 for s in sharded)
                pieces = Pieces(weights, gradients, optimizer, groups=int(everyone > 1 and not alone))
                if spread:
                    pieces = pieces._replace(expert=expert_degrees(self.tables.job, (team,))[-1])
                fits = [f for m in (1, 2, 4) if (f := self.fit(team, m, pieces, share(team)))]
                if not fits and all(sharded) and team.stages == 1 and part < 1:  # others may hold more than their part
                    most = UNEVEN * everyone
                    generous = Pieces(most, most, most, groups=1)
                    fits = [f for m in (1, 2, 4) if (f := self.fit(team, m, generous, share(team)))]
                if fits:
                    seconds = min(f.step_s(share(team)) for f in fits)
                    rated.append((seconds / (share(team) * team.replicas), order, team))
                elif all(sharded):
                    self._too_small(team, pieces)
            kept = len(rated) if classes[0].bound else KEPT // len(classes)
            picked |= dict.fromkeys(team for _, _, team in sorted(rated)[:kept])
        return [team for kind in picked for team in placements[kind.kind, kind.replicas]]

    # --- stages --------------------------------------------------------------------------------------------------

    def fit(self, team: Team, micro_batch: int, pieces: Pieces, batch: int) -> Fit | None:
        """The best stages of a team whose replicas do `batch` samples each; None if no cut fits the memories."""
        waves = max(1, -(-batch // micro_batch))
        key = (team.kind, micro_batch, pieces, min(waves, team.stages), team.replicas > 1,
               *(self.tables.signature(self._crowd(team, i, pieces.expert)) for i in range(team.stages)))
        if key not in self._fits:
            self._fits[key] = self._fit(team, micro_batch, pieces, waves)
        return self._fits[key]

    def _fit(self, team: Team, micro_batch: int, pieces: Pieces, waves: int) -> Fit | None:
        groups, stages = team.ranks[0], team.stages
        choices: list[tuple[Matrix, Matrix]] = []
        for i, group in enumerate(groups):
            place = (min(stages - i, waves), i == 0, i == stages - 1)
            crowd = self._crowd(team, i, pieces.expert)
            key = (team.kind[i], micro_batch, pieces, *place, self.tables.signature(crowd))
            if key not in self._stages:
                self._stages[key] = self._stage(group, team.context, micro_batch, pieces, crowd, *place)
            choices.append(self._stages[key])
        cuts = partition([seconds for seconds, _ in choices])
        if cuts is None:
            return None
        job = self.tables.job
        ranges = list(pairwise(cuts))
        modes = [int(mode[r]) for (_, mode), r in zip(choices, ranges)]
        tables = [self.tables.table(group, micro_batch, team.context, Sharing.evenly(
            job, pieces.expert, len(group) // team.context, self._crowd(team, i, pieces.expert)))
            for i, group in enumerate(groups)]
        hops = [hop_s(self.tables, a, b, boundary_bytes(job.model.blocks[c - 1], micro_batch, job.seq_len, 1, job))
                for (a, b), c in zip(pairwise(groups), cuts[1:])]
        flow = Flow([float(t.forward_s[r]) for t, r in zip(tables, ranges)],
                    [float(t.backward_s[m][r]) for t, m, r in zip(tables, modes, ranges)], hops)
        return Fit(micro_batch, cuts, tuple(MODES[m] for m in modes), flow)

    @staticmethod
    def _crowd(team: Team, stage: int, expert: int) -> tuple[int, ...]:
        """The ranks of the first `expert` copies of a stage, which share its experts; nobody without."""
        if expert == 1:
            return ()
        tensor = len(team.ranks[0][stage]) // team.context
        return tuple(r for replica in team.ranks for r in replica[stage])[:expert * tensor]

    def _too_small(self, team: Team, pieces: Pieces) -> None:
        names = [self.tables.cluster.devices[g[0]].name for g in team.ranks[0]]
        tensor = [len(g) // team.context for g in team.ranks[0]]
        stages = " | ".join(f"{name} tp{t}" if t > 1 else name for name, t in zip(names, tensor))
        self.rejected.add(f"no cut into stages fits the memory of {' and '.join(sorted(set(names)))}",
                          example=f"{team.replicas} x {f'{team.context} parts of ' if team.context > 1 else ''}"
                                  f"({stages}), weights, gradients and optimizer state over "
                                  f"{pieces.weights}, {pieces.gradients} and {pieces.optimizer} replicas")

    def _stage(self, ranks: tuple[int, ...], context: int, micro_batch: int, pieces: Pieces, crowd: tuple[int, ...],
               in_flight: int, first: bool, last: bool) -> tuple[Matrix, Matrix]:
        """Per block range, seconds of a micro-batch under the cheapest recompute that fits, and which that is."""
        tensor = len(ranks) // context
        experts = Sharing.evenly(self.tables.job, pieces.expert, tensor, crowd)
        table = self.tables.table(ranks, micro_batch, context, experts)
        state = self.tables.state_bytes(tensor, pieces)
        communicators = 1 + (tensor > 1) + (context > 1) + (pieces.expert > 1) + pieces.groups
        return table.cheapest(state, in_flight, first=first, last=last, communicators=communicators)

    # --- plans ---------------------------------------------------------------------------------------------------

    def plans(self, shape: Shape) -> list[Plan]:
        """Plans of a shape; what memory or the sharding forbids is counted.

        Of each family of shardings the two least degrees that fit, and the largest.
        """
        found: dict[Plan, None] = {}
        for family, expert in product(sharding_families(shape), expert_degrees(self.tables.job, shape)):
            fitted = 0
            for sharding in family:
                if fitted >= 2 and sharding is not family[-1]:
                    continue
                made = self._sharded(shape, sharding, expert)
                found |= dict.fromkeys(made)
                fitted += bool(made)
        return list(found)

    def _sharded(self, shape: Shape, sharding: Sharding, expert: int) -> list[Plan]:
        apart = self._apart(shape, sharding) if expert == 1 else []
        return apart + self._alike(shape, sharding, expert, alone=not apart)

    def _apart(self, shape: Shape, sharding: Sharding) -> list[Plan]:
        """Unlike replicas that share gradients or weights with all others, in layered accumulation: samples and state
        are shared apart (`joint`). At most one plan."""
        n = sum(team.replicas for team in shape)
        degrees = (sharding.weights, sharding.gradients, sharding.optimizer)
        if len(shape) < 2 or sharding.gradients < n or not {*degrees} <= {1, n} or any(
                team.stages > 1 or team.context > 1 for team in shape):
            return []
        batch = self.tables.job.global_batch
        found = share_apart([self._options(team, sharding, batch - n + 1) for team in shape],
                            [t.replicas for t in shape], batch, 1 / SPARE)
        if found is None:
            return []
        pipelines = []
        for team, row in zip(shape, found.chosen):
            at = 0
            for option, equal in groupby(row, key=lambda o: (o.samples, o.micro_batch, o.recompute)):
                members = team.ranks[at:at + len(list(equal))]
                at += len(members)
                stage = Stage(blocks=(0, len(self.tables.job.model.blocks)), tensor=len(members[0][0]),
                              devices=tuple(r for m in members for r in m[0]), recompute=option[2])
                pipelines.append(Pipeline(stages=(stage,), samples=option[0], micro_batch=option[1],
                                          replicas=len(members)))
        held = tuple(round(FINENESS * part) for row in found.parts for part in row)
        return [Plan(pipelines=tuple(pipelines), accumulation="layered",
                     sharding=sharding.replace(shares=held if len(set(held)) > 1 else ()))]

    def _options(self, team: Team, sharding: Sharding, most: int) -> list[Option]:
        """What one replica can do: samples, micro-batch and recompute, with its time and the part of the whole state
        that it then has room for. All its micro-batches are in flight at once."""
        group = team.ranks[0][0]
        key = (self.tables.signature(group), sharding, most)
        if key not in self._apart_options:
            blocks = len(self.tables.job.model.blocks)
            communicators = 2 + (len(group) > 1)
            bare, half = (self.tables.state_bytes(len(group), Pieces.portion(sharding, part)) for part in (0.0, 0.5))
            found = []
            for m in self._sizes(team, most, fine=False):
                table = self.tables.table(group, m)
                tensors = table.need_bytes(half - bare, 0, 0, first=True, last=True, communicators=communicators)
                empty = table.need_bytes(0 * bare, 0, 0, first=True, last=True, communicators=communicators)
                whole = 2 * float((tensors - empty)[0, blocks])
                for mode, name in enumerate(MODES):
                    one, two = (float(table.need_bytes(bare, mode, k, first=True, last=True,
                                                       communicators=communicators)[0, blocks]) for k in (1, 2))
                    each = two - one + allocator_factor(table.devices[0]) * float(table.edge_bytes.max())
                    seconds = float(table.forward_s[0, blocks] + table.backward_s[mode][0, blocks])
                    for samples in range(1, most + 1):
                        full, rest = divmod(samples, m)
                        if m > samples or (rest and m > 1 and full > 1 and samples % (m // 2)):
                            continue
                        waves = full + (rest > 0)
                        room = (table.capacity_bytes - one - (waves - 1) * each) / whole
                        last = self.tables.table(group, rest) if rest else table
                        more = float(last.forward_s[0, blocks] + last.backward_s[mode][0, blocks]) if rest else 0.0
                        if room < 0:
                            break
                        found.append(Option(samples, full * seconds + more, room, m, name))
            self._apart_options[key] = found
        return self._apart_options[key]

    def _alike(self, shape: Shape, sharding: Sharding, expert: int, *, alone: bool) -> list[Plan]:
        """Plans whose replicas do equally many micro-batches where they exchange at every one."""
        replicas = sum(team.replicas for team in shape)
        batch = self.tables.job.global_batch
        pieces = Pieces.of(sharding, sum(team.copies for team in shape), expert)
        joint = len(shape) > 1 and any(degree > 1 and team.copies % degree for team in shape
                                       for degree in (sharding.weights, sharding.gradients, expert))
        if joint and max(sharding.weights, expert) > 1 and any(team.stages > 1 for team in shape):
            self.rejected.add("weights sharded or experts shared over pipelines with unequal stages")
            return []
        options = []
        # No larger micro-batch than 1 needs less.
        small = next((t for t in shape if not self.fit(t, 1, pieces, batch // t.replicas)), None)
        portions = parts(self.tables, shape, sharding) if small else None
        held = [Pieces.portion(sharding, part, expert) for part in portions] if portions else [pieces] * len(shape)
        if portions:
            sharding = sharding.replace(shares=shares(shape, portions))
            small = next((t for t, p in zip(shape, held) if not self.fit(t, 1, p, batch // t.replicas)), None)
        if small:
            if alone:
                self._too_small(small, pieces)
            return []
        for team, pieces in zip(shape, held):
            share = batch // team.replicas
            sizes = self._sizes(team, min(share, max(1, batch // replicas * 4)), fine=joint)
            options.append([f for m in sizes if (f := self.fit(team, m, pieces, share))])
        if joint:
            made = list(self._in_step(shape, sharding, options))
        elif max(sharding.gradients, expert) > 1:
            made = []
            for cap in sorted({f.micro_batch for fits in options for f in fits}):
                some = [[max((f for f in fits if f.micro_batch <= cap), key=lambda f: f.micro_batch)]
                        for fits in options]
                made += self._free(shape, sharding, some, in_step=True)
        else:
            made = list(self._free(shape, sharding, options))
        made = [plan.replace(expert=expert) for plan in made]
        if not made:
            self.rejected.add("the batch does not split into equal numbers of micro-batches")
        return made

    def _sizes(self, team: Team, most: int, *, fine: bool) -> list[int]:
        """Micro-batches worth trying: all small ones if `fine`, else those that gain a percent of speed on a stage, of
        a small share its equal parts too."""
        even = {-(-most // n) for n in range(1, 5)} if most <= 16 else set()
        sizes = sorted({*micro_batch_sizes(most, fine=fine), *even})
        if fine:
            return list(sizes)
        found = [1]
        for m in sizes[1:]:
            now, before = (sum(self.tables.table(g, size, team.context).whole_s / size
                               for g in dict.fromkeys(team.ranks[0])) for size in (m, found[-1]))
            if now < 0.99 * before or m == 2 * found[-1] <= 4:
                found.append(m)
        return found

    def _free(self, shape: Shape, sharding: Sharding, options: Sequence[Sequence[Fit]], *, in_step: bool = False
              ) -> Iterator[Plan]:
        """Replicas meet only at the end of the step, or those of a team do equally many micro-batches (`in_step`)."""
        curves = [_Curve(fits) for fits in options]
        split = allocate([c.__getitem__ for c in curves], [t.replicas for t in shape], self.tables.job.global_batch)
        if split is None:
            return
        chosen = []
        for team, fits, (samples, extra) in zip(shape, options, split):
            best = min(fits, key=lambda f: (f.step_s(samples + (extra > 0)), f.micro_batch))
            chosen.append((best, [samples + 1] * extra + [samples] * (team.replicas - extra)))
        yield self.build(shape, sharding, chosen, in_step=in_step)

    def _in_step(self, shape: Shape, sharding: Sharding, options: Sequence[Sequence[Fit]]) -> Iterator[Plan]:
        """All replicas do equally many micro-batches."""
        batch, copies = self.tables.job.global_batch, [t.replicas for t in shape]
        fits = [{f.micro_batch: f for f in row} for row in options]
        for steps in micro_batch_sizes(batch // sum(copies), fine=True):
            seconds = [{m: f.flow.step_s(steps) for m, f in row.items()} for row in fits]
            curves = [lambda s, row=row, n=steps: row.get(-(-s // n), inf) for row in seconds]
            split = allocate_in_step(curves, copies, batch, steps)
            if split is None:
                continue
            chosen = []
            for row, samples in zip(fits, split):
                chosen.append((row[-(-samples[0] // steps)], list(samples)))
            yield self.build(shape, sharding, chosen, steps)

    def build(self, shape: Shape, sharding: Sharding, chosen: Sequence[tuple[Fit, Sequence[int]]],
              steps: int = 0, *, in_step: bool = False) -> Plan:
        """A plan from every team's stages and its replicas' samples; equal neighbours become one pipeline."""
        pipelines = []
        for team, (fit, samples) in zip(shape, chosen):
            at = 0
            for share, equal in groupby(samples):
                count = len(list(equal))
                members = team.ranks[at:at + count]
                at += count
                stages = tuple(
                    Stage(blocks=blocks, devices=tuple(r for m in members for r in m[s]),
                          tensor=len(members[0][s]) // team.context, recompute=mode)
                    for s, (blocks, mode) in enumerate(zip(pairwise(fit.cuts), fit.modes)))
                micro_batch = -(-share // steps) if steps else min(fit.micro_batch, share)
                if (sharding.gradients > 1 or in_step) and not steps:
                    # Replicas that exchange at every micro-batch need equally many of them.
                    micro_batch = -(-share // -(-samples[-1] // fit.micro_batch))
                pipelines.append(Pipeline(stages=stages, samples=share, micro_batch=micro_batch, replicas=count,
                                          context=team.context))
        return Plan(pipelines=tuple(pipelines), sharding=sharding)


class _Curve(dict[int, float]):
    """Seconds for a number of samples at the best micro-batch, remembered."""

    def __init__(self, fits: Sequence[Fit]) -> None:
        super().__init__()
        self._fits = fits

    def __missing__(self, samples: int) -> float:
        self[samples] = value = min(f.step_s(samples) for f in self._fits)
        return value
