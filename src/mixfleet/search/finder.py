"""The search: candidates in order of their lower bounds, judged by the simulator until no bound is better.

Small cases are enumerated in full, so that the best plan is the best of the space. Larger ones expand templates and
then improve the best plans step by step. Limits count candidates, not seconds, so that equal input gives equal output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from time import monotonic

from mixfleet.batching import steps_of
from mixfleet.cluster import Cluster
from mixfleet.cost.kernels import foresee
from mixfleet.cost.money import price_per_hour
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.plan import Batching, Offload, Pipeline, Plan, ScheduleName
from mixfleet.plan_rules import lacking, why_not
from mixfleet.search.bounds import SLACK, bound_s, busy_s, compute_bound_s, rates_of, too_full, walked_s
from mixfleet.search.candidates import Candidates
from mixfleet.search.improve import dealt, frugal, neighbours
from mixfleet.search.miss import most_frugal
from mixfleet.search.recompute import ANYWHERE, HERE, can_park, room_bytes, spared
from mixfleet.search.replicate import candidates
from mixfleet.search.reschedule import reschedule
from mixfleet.search.result import Objective, SearchResult
from mixfleet.search.space import (
    FEW_BOUND,
    MANY_CLASSES,
    Limits,
    Shape,
    bound_classes,
    classes_of,
    enumerate_all,
    micro_batch_sizes,
    parts_of,
    shapes,
    tensor_degrees,
    used,
)
from mixfleet.search.tables import Tables
from mixfleet.search.uneven import by_room
from mixfleet.search.variants import PLANNED, is_deep, is_replicated, known, only, schedules, under
from mixfleet.sim import Prediction, predict
from mixfleet.sim.prediction import few_collections
from mixfleet.units import show_seconds

Progress = Callable[[str], None]
Entry = tuple[float, int, int, Plan]
"""(bound of the score, order, 1 if the bound is of computing alone and 2 if of transfers too, plan)"""

MOST_FORESEEN = 64
"""The largest micro-batch whose products are worked out together beforehand."""
EXPANDED = 300
"""Shapes whose plans are worked out."""
PATIENCE = 64
"""Bounds that are worked out in a row before the plan with the least is simulated: its score drops others."""
BEGUN, EXPANDING = 0.25, 0.5
"""Parts of the time left in which the fastest devices are searched by themselves, and shapes are worked out."""
LAST = 8
"""Simulations in all up to which a search whose time is over goes on if it has found nothing."""
SIMULATED, EXACT_SIMULATED = 14, 4000
"""Simulations of templates, and of a space that is enumerated in full."""
TURNED: tuple[ScheduleName, ...] = ("chimera", "dualpipe", "dualpipe-v")
"""Schedules that place the blocks otherwise, tried on request for the best pipelines."""
AWAY: tuple[tuple[Offload, ...], ...] = (("optimizer",), ("gradients", "optimizer"), ("weights", "optimizer"),
                                        ("weights", "gradients", "optimizer"))
"""What is kept in host memory where nothing fits without."""
BATCHED: tuple[Batching, ...] = ("packed", "bucketed")
RELATIVES = 2
"""Simulations of plans that differ only in sharding, placement and sizes, before those of other plans."""
PROPOSED = 12
"""Candidates with stages replicated by themselves whose bounds are looked at; as many as `TRIED` are simulated."""
PARTS, NARROW = 12, 8
"""Parts of the cluster that are tried, and the shapes of each whose plans are worked out."""
SCHEDULED, LAID = 4, 8
"""Families whose best plans are laid out for other schedules, and simulations of these."""
AHEAD, ALIKE = 8, 2
"""Simulations of pipelines under any schedule before those of other plans, and of those from one family."""
MORE = 3
"""Times as many of both where each device may stand by itself, since there are more shapes."""
FEW = 4
"""Micro-batches per stage from which a pipeline is filled and drained soon enough, whatever its schedule."""
FARTHEST, WORTH = 3, 1e-3
"""Waves that virtual workers may be ahead of each other, and the part of a step that one more must save."""
STATE = 0.01
"""Of a step that moving state has to itself: from there on other degrees of sharding are tried."""
IMPROVED, ROUNDS, EACH, TRIED = 3, 4, 2, 4
"""Plans that are improved, rounds for each, simulations in a round for each kind of change, and those elsewhere."""
SMALL = 48
"""Steps of a pipeline forward, up to which a round has four times as many simulations."""


class Search:
    """One search: what was looked at, what was found, what was rejected and why."""

    def __init__(self, job: Job, cluster: Cluster, objective: Objective, max_seconds: float,
                 progress: Progress | None, names: tuple[ScheduleName, ...] = ()) -> None:
        self.job, self.cluster, self.objective = job, cluster, objective
        self.tables = Tables(job, cluster)
        self.candidates = Candidates(self.tables)
        sizes = {*micro_batch_sizes(min(job.global_batch, 16), fine=True),
                 *micro_batch_sizes(min(job.global_batch, MOST_FORESEEN), fine=False)}
        for device, most in {d: len(node.devices) for node in cluster.nodes for d in node.devices}.items():
            foresee(job, device, [(m, job.seq_len, t) for m in sizes for t in tensor_degrees(job, most)])
        self.classes = classes_of(self.tables)
        self.found: dict[Plan, Prediction] = {}
        """Plans that fit, with their predictions."""
        self.misses: dict[Plan, Prediction] = {}
        self.rejected = self.candidates.rejected
        self.considered = self.simulated = 0
        self.complete = True
        self._begun = False
        self.names = names
        """Schedules that pipelines of several stages may have; any that the search knows if none."""
        self.remaining = inf
        self._until = monotonic() + max_seconds
        self._progress = progress
        self._prices = {d: price_per_hour([d]) for d in dict.fromkeys(cluster.devices)}
        if objective == "cost" and None in self._prices.values():
            missing = next(d.name for d, price in self._prices.items() if price is None)
            raise InputError(f"objective is 'cost', but {missing} has no price_per_hour; add it to the cluster file, "
                             "or take objective 'time'")

    def begin(self) -> None:
        """Searches the fastest kind of device by itself, if there are others: what it finds is the score to beat, one
        answer to what else one would do, and an answer if time runs out."""
        fastest = self.classes[0].device.name
        members = [i for i, c in enumerate(self.classes) if c.device.name == fastest]
        if self._begun or len(members) == len(self.classes) or self.on_fastest():
            return
        self._begun = True
        part = Search(self.job, self.cluster, self.objective, BEGUN * (self._until - monotonic()), None, self.names)
        part.expand(shapes(part.tables, [part.classes[i] for i in members], lambda chosen: part.candidates.choose(
            tuple(members[i] for i in chosen), part.classes)), 1, simulations=TRIED, ahead=0)
        self.found |= part.found
        self.misses |= part.misses
        self.considered += part.considered
        self.simulated += part.simulated

    def on_fastest(self) -> list[Plan]:
        """Plans found on the fastest kind of device alone, best first."""
        fastest = self.classes[0].device.name
        return [plan for _, _, plan in self.scored()
                if all(self.cluster.devices[rank].name == fastest for rank in plan.ranks)]

    # --- judging -------------------------------------------------------------------------------------------------

    def score(self, seconds: float, ranks: Iterable[int]) -> float:
        """The objective: seconds per step, or money per step."""
        if self.objective == "time":
            return seconds
        return seconds / 3600 * sum(self._prices[self.cluster.devices[r]] or 0.0 for r in ranks)

    def scored(self) -> list[tuple[float, int, Plan]]:
        """What was found, best first; of equals the one found first."""
        return sorted((self.score(p.step_s, plan.ranks), i, plan) for i, (plan, p) in enumerate(self.found.items()))

    @property
    def best(self) -> float:
        """The best score found."""
        return min((self.score(p.step_s, plan.ranks) for plan, p in self.found.items()), default=inf)

    def judge(self, plan: Plan) -> Prediction | None:
        """Simulates a plan once; None if it is impossible. Only plans that fit are `found`."""
        known = self.found.get(plan) or self.misses.get(plan)
        if known:
            return known
        reason = why_not(plan, self.job, self.cluster)
        if reason:
            self.rejected.add("impossible sharding for these pipelines", example=reason)
            return None
        self.simulated += 1
        prediction = predict(plan, self.job, self.cluster, sent=False)
        if prediction.fits:
            before = self.best
            self.found[plan] = prediction
            if self._progress and self.best < before:
                self._progress(f"{self.considered} candidates, {self.simulated} simulated, best step "
                               f"{show_seconds(prediction.step_s)}")
        else:
            worst = max(prediction.devices, key=lambda d: d.lacks_bytes)
            self.rejected.add(f"memory of {worst.device}, by simulation", example=prediction.reasons[0])
            self.misses[plan] = prediction
        return prediction

    def late(self) -> bool:
        """Whether the time limit is over, which is noted."""
        if monotonic() > self._until:
            self.complete = False
            return True
        return False

    # --- the two ways through the space --------------------------------------------------------------------------

    def enumerate(self, limits: Limits, top: int) -> bool:
        """Exact search of a small case; False, with nothing done, if the space is too large."""
        if len(self.cluster.devices) > limits.devices or len(self.job.model.blocks) > limits.blocks:
            return False
        plans = list(islice(enumerate_all(self.job, self.cluster, limits), limits.plans + 1))
        if len(plans) > limits.plans:
            return False
        heap: list[Entry] = []
        for plan in plans:
            self._push(heap, plan)
        self._drain(heap, EXACT_SIMULATED, top, 0)
        return True

    def expand(self, shapes_: Iterable[Shape], top: int, simulations: int = SIMULATED, ahead: int = AHEAD) -> None:
        """Works out the shapes with the least bounds, then simulates their plans in the order of theirs; before that,
        `ahead` pipelines under any schedule."""
        bounds = [(self.score(self.candidates.ideal_s(s), used(s)), i, s) for i, s in enumerate(shapes_)]
        bounds.sort(key=lambda entry: entry[:2])
        until = monotonic() + EXPANDING * (self._until - monotonic())
        heap: list[Entry] = []
        deep: dict[tuple[Pipeline, ...], list[Plan]] = {}
        for n, (bound, _, shape) in enumerate(bounds):
            if n and (n == EXPANDED or monotonic() > until):
                self.rejected.add("shapes with a higher lower bound, not worked out", len(bounds) - n)
                self.remaining = min(self.remaining, bound)
                break
            for plan in self.candidates.plans(shape):
                reason = ""
                for other in only(plan, self.names, self.job, self.cluster):
                    if isinstance(other, Plan):  # the others follow: `_ahead` and `schedule`
                        self._push(heap, other)
                        if _waits(other) and other.accumulation == "plain" and other.sharding.gradients == 1:
                            deep.setdefault(other.pipelines, []).append(other)
                        break
                    reason = reason or other
                else:
                    self.rejected.add("impossible under the schedules asked for", example=reason)
        self._ahead(deep.values(), ahead)
        self._drain(heap, simulations, top, RELATIVES)

    def shapes(self, *, wide: bool) -> Iterator[Shape]:
        """Shapes of whole classes, then on small clusters those of single devices and of unlike ones bound together;
        of those that differ only by equal devices of a node the first."""
        ways = [self.classes, *(() if wide else bound_classes(self.tables))]
        seen: set[object] = set()
        for classes in ways:
            for shape in shapes(self.tables, classes, lambda members, some=classes:  # type: ignore[misc]
                                self.candidates.choose(members, some, wide=wide)):
                if len(ways) > 1:
                    key = tuple(sorted((team.context, *(self._label(group) for replica in team.ranks
                                                        for group in (*replica, ()))) for team in shape))
                    if key in seen:
                        continue
                    seen.add(key)
                yield shape

    def _label(self, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Kinds and nodes of the devices."""
        return tuple((self.tables.kind_of[r], self.cluster.node_of[r]) for r in ranks)

    def narrow(self) -> None:
        """Tries parts of the cluster, those first that could be fastest if each device trained alone: where links are
        slow, fewer devices of a kind may do better than all of them. Sets of whole classes are among the shapes."""
        rates = rates_of(self.tables)
        batch = self.job.global_batch
        whole = [frozenset(r for node in c.nodes for r in node) for c in self.classes]
        parts = sorted((self.score(batch / sum(rates[r] for r in part) * SLACK, part), i, part)
                       for i, part in enumerate(parts_of(self.cluster, self.tables.kind_of))
                       if len(whole) > MANY_CLASSES or not all(c <= part or not c & part for c in whole))
        tried = 0
        for n, (bound, _, part) in enumerate(parts):
            if bound >= self.best or tried == PARTS or self.late():
                self.rejected.add("parts of the cluster with a higher lower bound" if bound >= self.best else
                                  "parts of the cluster, not tried: the limit was reached", len(parts) - n)
                break
            classes = classes_of(self.tables, part)
            found = []
            for i, shape in enumerate(shapes(self.tables, classes, lambda members, some=classes:  # type: ignore[misc]
                                             self.candidates.choose(members, some))):
                ideal = self.score(self.candidates.ideal_s(shape), part)
                if ideal < self.best and {*used(shape)} == part:  # what uses less of it is another part
                    found.append((ideal, i, shape))
            heap: list[Entry] = []
            for _, _, shape in sorted(found, key=lambda entry: entry[:2])[:NARROW]:
                for plan in self.candidates.plans(shape):
                    for other in only(plan, self.names, self.job, self.cluster):
                        if isinstance(other, Plan):
                            self._push(heap, other)
                            break
            tried += bool(heap)
            self._drain(heap, TRIED, 1, 0)

    def _ahead(self, groups: Iterable[Sequence[Plan]], most: int) -> None:
        """Simulates pipelines that exchange state only at the end of a step under all schedules, `most` of them, those
        with the least bounds first: for them, bounds of all steps in order and of the sums of gradients behind them are
        close. Plans of a group differ only in how state is shared.
        """
        heap: list[Entry] = []
        groups = list(groups)
        for i, (plan, *_) in enumerate(groups):
            heap.append((self.score(busy_s(self.tables, plan), plan.ranks), i, 0, plan))
        heapify(heap)
        order, tried = len(heap), 0
        seen: Counter[object] = Counter()
        group_of = {id(group[0]): group for group in groups}
        ways: dict[Plan, Sequence[Plan]] = {}
        while heap and tried < most and not self.late():
            bound, _, level, plan = heappop(heap)
            if bound >= self.best:
                break
            family = self.family(plan)
            twin = (family, plan.sharding, plan.expert, plan.schedule, tuple(
                (p.samples, p.micro_batch, *(s.chunks for s in p.stages)) for p in plan.pipelines))
            if seen[family] >= ALIKE or (level == 3 and seen[twin]):
                continue
            if level == 3:
                short = self._lacking(plan)
                if not short:
                    prediction = self.judge(plan)
                    tried, seen[twin] = tried + 1, 1
                    if prediction and prediction.fits:
                        seen[family] += 1
                continue
            if level == 0:
                others = [plan, *schedules(plan, self.names, wide=True)]
                ways |= dict.fromkeys(others, group_of[id(plan)])
            elif level == 1:
                others = [plan]
            else:
                others = [plan.replace(sharding=way.sharding, expert=way.expert) for way in ways[plan]]
                self.considered += len(others) if plan.schedule != "1f1b" else 0
            for other in others:
                seconds = (compute_bound_s, walked_s, bound_s)[level](self.tables, other)
                least = max(bound, self.score(seconds, other.ranks))
                if least < self.best:
                    order += 1
                    heappush(heap, (least, order, level + 1, other))

    def _push(self, heap: list[Entry], plan: Plan) -> None:
        self.considered += 1
        heappush(heap, (self.score(compute_bound_s(self.tables, plan), plan.ranks), self.considered, 1, plan))

    def _drain(self, heap: list[Entry], simulations: int, top: int, relatives: int) -> None:
        """Simulates in the order of bounds until the next bound is no better than the `top` best scores.

        A plan first has the bound of its computing, then, if that is the least, one with its transfers. Where many have
        about the same bound of computing, some are simulated out of turn.
        """
        families: Counter[object] = Counter()
        later: list[Entry] = []
        priced: list[Entry] = []  # of those in the heap, the ones with bounds of transfers
        done: set[int] = set()
        waited = 0
        while heap or later:
            if not heap:
                heap, later, relatives = later, [], 0
            early = bool(relatives and priced) and waited >= PATIENCE
            bound, order, level, plan = heappop(priced if early else heap)
            if order in done or (early and bound >= self.best):
                continue
            if not early and self._enough(bound, top, relatives):
                self.rejected.add("slower than the best, by a lower bound", len(heap) + 1)
                heap = []
                continue
            family = self.family(plan)
            twin = (family, plan.sharding, plan.expert, tuple((p.samples, p.micro_batch, *(s.blocks for s in p.stages))
                                                 for p in plan.pipelines))
            if relatives and (families[family] >= relatives or families[twin]):
                later += [] if early else [(bound, order, level, plan)]
            elif (level == 2 and not simulations) or self.late():
                self.complete = False
                self.remaining = min(self.remaining, bound, *(entry[0] for entry in later))
                self.rejected.add("not simulated: the limit was reached", len(heap) + len(later) + 1)
                self._at_last([(bound, order, level, plan), *priced, *heap])
                return
            elif level == 1:
                bound = max(bound, self.score(bound_s(self.tables, plan), plan.ranks))
                for queue in (heap, priced):
                    heappush(queue, (bound, order, 2, plan))
                waited += 1
            else:
                done.add(order)
                waited = 0
                short = self._lacking(plan)
                if not short:
                    simulations -= 1
                    prediction = self.judge(plan)
                    families[twin] += 1  # differs in placement alone
                    if prediction and prediction.fits:
                        families[family] += 1
                    elif prediction:
                        short = _short(prediction)
                for other in frugal(plan, short) if short and relatives else ():
                    self._push(heap, other)

    def _at_last(self, entries: Iterable[Entry]) -> None:
        """Where the time is over before anything was found to fit: whatever does, those with bounds of transfers first.
        """
        for _, _, _, plan in sorted(entries, key=lambda entry: (-entry[2], *entry[:2])) if not self.found else ():
            if not too_full(self.tables, plan):
                prediction = self.judge(plan)
                if prediction and (prediction.fits or self.simulated > LAST):
                    return

    def _enough(self, bound: float, top: int, relatives: int) -> bool:
        """Whether no plan with this bound can matter: in a full enumeration for any of the `top` plans, else for the
        best one, once there are as many families to show."""
        if not relatives:
            scores = [score for score, _, _ in self.scored()]
            return len(scores) >= top and bound >= scores[top - 1]
        return bound >= self.best and len(self.distinct()) >= top

    def family(self, plan: Plan) -> object:
        """What plans of one family share: how many replicas have which kinds of devices in every stage."""
        counts: Counter[object] = Counter()
        for p in plan.pipelines:
            counts[p.context, tuple(
                self.tables.signature(s.ranks(0)) if s.members == 1 else
                tuple(self.tables.signature(s.ranks(0, j)) for j in range(s.members)) for s in p.stages)] += p.replicas
        return frozenset(counts.items())

    def replicate(self) -> None:
        """Tries stages with replicas of their own, as long as their bound is better than the best, or that under
        another schedule is; then other schedules for the best of them, and small changes if one is among the best."""
        fastest_s, tried = self.best if self.objective == "time" else inf, 0
        for _, proposed in candidates(self.tables, self.classes, fastest_s)[:PROPOSED]:
            plan = next((p for p in only(proposed, self.names, self.job, self.cluster) if isinstance(p, Plan)), None)
            if plan is None:
                continue
            self.considered += 1
            bound = self._bound(plan)
            if bound >= self.best:
                bound, _, plan = min(self._laid_out(plan), default=(bound, 0, plan))
            if bound >= self.best:
                self.rejected.add("slower than the best, by a lower bound", 1)
            elif tried < TRIED and not self.late():
                tried += 1
                self._judge_or_lighter(plan)
        self._under_others([plan for _, _, plan in self.scored() if is_replicated(plan)][:IMPROVED])
        self.improve([plan for _, _, plan in self.distinct()[:IMPROVED] if is_replicated(plan)])

    def schedule(self) -> None:
        """Tries other schedules for the best plans with several stages."""
        self._under_others([plan for _, _, plan in self.distinct() if is_deep(plan)][:SCHEDULED])

    def _under_others(self, plans: Iterable[Plan]) -> None:
        """Simulates these plans under other schedules, those with the least bounds of all first."""
        options = [(bound, i, order, other) for i, plan in enumerate(plans)
                   for bound, order, other in self._laid_out(plan)]
        for n, (bound, _, _, other) in enumerate(sorted(options)):
            if bound >= self.best:
                self.rejected.add("slower than the best, by a lower bound", len(options) - n)
                break
            if n == LAID or self.late():
                self.rejected.add("not simulated: the limit was reached", len(options) - n)
                break
            self._judge_or_lighter(other)

    def _laid_out(self, plan: Plan) -> list[tuple[float, int, Plan]]:
        """The plan under other schedules that have not been simulated and may be the best, with their bounds."""
        found = []
        for i, other in enumerate((*schedules(plan, self.names), *dealt(plan))):
            if other in self.found or other in self.misses or why_not(other, self.job, self.cluster):
                continue
            self.considered += 1
            bound = self._bound(other)
            if bound < self.best:
                found.append((bound, i, other))
            else:
                self.rejected.add("slower than the best, by a lower bound", 1)
        return found

    def _bound(self, plan: Plan) -> float:
        """A bound of the score: of computing alone, if that is no better than the best, else with transfers."""
        bound = self.score(compute_bound_s(self.tables, plan), plan.ranks)
        return bound if bound >= self.best else self.score(bound_s(self.tables, plan), plan.ranks)

    def _judge_or_lighter(self, plan: Plan) -> None:
        """Simulates a plan, or if it lacks memory, one with more recompute that may still be the best."""
        short = self._lacking(plan)
        if not short:
            prediction = self.judge(plan)
            short = _short(prediction) if prediction else ()
        for lighter in frugal(plan, short) if short else ():
            if self._bound(lighter) >= self.best:
                self.rejected.add("slower than the best, by a lower bound", 1)
            elif not self._lacking(lighter):
                self.judge(lighter)

    def _lacking(self, plan: Plan) -> Collection[tuple[int, int]]:
        """Stages that cannot fit whatever a simulation says, which is counted. As long as nothing fits, simulations
        tell which plan lacks least."""
        short = too_full(self.tables, plan) if self.found or self.simulated >= TRIED else {}
        if short:
            self.rejected.add(f"memory of {next(iter(short.values()))}, by a lower bound")
        return short

    def improve(self, plans: Iterable[Plan]) -> None:
        """Moves blocks, samples, micro-batches, recompute and other settings of plans, one at a time."""
        kinds, nodes = self.tables.kind_of, self.cluster.node_of
        company = [sorted(kinds[r] for r in ranks) for ranks in self.cluster.ranks_of_node]
        places: Sequence[object] = [(k, *company[n]) for k, n in zip(kinds, nodes)]
        for plan in plans:
            for _ in range(ROUNDS):
                now = self.score(self.found[plan].step_s, plan.ranks)
                options = []
                spent = self.found[plan].exposed_s
                state = spent.get("gather", 0.0) + spent.get("reduce", 0.0) > STATE * self.found[plan].step_s
                for i, other in enumerate(neighbours(plan, self.job, nodes, self.names, state=state,
                                                      place_of=places)):
                    if other in self.found or other in self.misses or why_not(other, self.job, self.cluster):
                        continue
                    self.considered += 1
                    bound = self.score(bound_s(self.tables, other), other.ranks)
                    if bound < now:
                        options.append((bound, i, other))
                    else:
                        self.rejected.add("slower than the best, by a lower bound", 1)
                better, few = plan, max(len(p.chain) * len(p.micro_batches) for p in plan.pipelines) <= SMALL
                tried: Counter[object] = Counter()
                heapify(options)
                while options:
                    bound, i, other = heappop(options)
                    if self.late() or bound >= now:
                        break
                    # Bounds of some kinds of change are closer than of others, so each kind has its own tries.
                    kind = (other.schedule != plan.schedule, other.pipelines != plan.pipelines,
                            _degrees(other) != _degrees(plan), _devices(other) != _devices(plan))
                    if tried[kind] == EACH * (4 if few else 1):
                        continue
                    short, prediction = self._lacking(other), None
                    if not short:
                        tried[kind] += 1
                        prediction = self.judge(other)
                        short = _short(prediction) if prediction else ()
                    if prediction and prediction.fits and (s := self.score(prediction.step_s, other.ranks)) < now:
                        now, better = s, other
                    for lighter in frugal(other, short) if short else ():
                        if any(a.micro_batch != b.micro_batch for a, b in zip(lighter.pipelines, other.pipelines)) or (
                                lighter in self.found or lighter in self.misses):
                            continue
                        bound = self.score(bound_s(self.tables, lighter), lighter.ranks)
                        if bound < now:
                            heappush(options, (bound, i, lighter))
                if better is plan or self.late():
                    break
                plan = better

    def spread(self) -> None:
        """Lets the virtual workers of the best plans be waves ahead of each other, as many as make steps shorter."""
        for plan in [plan for _, _, plan in self.distinct() if plan.waves][:IMPROVED]:
            before = self.found[plan].step_s
            for distance in range(1, FARTHEST + 1):
                other = plan.replace(synchronization=plan.synchronization.replace(distance=distance))
                prediction = None if self.late() else self.judge(other)
                if prediction is None or not prediction.fits or prediction.step_s >= before * (1 - WORTH):
                    break
                before = prediction.step_s

    def recompute(self) -> None:
        """Recomputes only some blocks of the stages of the best plans, as few as memory allows; or keeps what they save
        in host memory."""
        best = self.distinct()[:IMPROVED]
        away = [plan for _, _, plan in best if any(
            stage.recompute != "none" and can_park(plan, p, s, self.cluster)
            for p, pipe in enumerate(plan.pipelines) for s, stage in enumerate(pipe.stages))]
        for plan, ways in [*((plan, HERE) for _, _, plan in best), *((plan, ANYWHERE) for plan in away)]:
            room = room_bytes(self.found[plan], self.cluster)
            for _ in range(TRIED):
                other = spared(plan, room, self.job, self.cluster, ways)
                prediction = None if other == plan or self.late() else self.judge(other)
                if prediction is None:
                    break
                if prediction.fits:
                    plan, room = other, room_bytes(prediction, self.cluster)
                for use in prediction.devices:
                    room[use.pipeline, use.stage] -= use.lacks_bytes

    def reorder(self) -> None:
        """Tries the best plans with several stages in two directions, in a V, and with orders of their own."""
        deep = [plan for _, _, plan in self.distinct() if any(len(p.stages) > 1 for p in plan.pipelines)]
        for plan in deep[:IMPROVED]:
            for name in self.names or TURNED:
                other = under(plan, name, self.job, self.cluster)
                if isinstance(other, Plan) and not self.late():
                    self.judge(other)
            if not self.late():
                self.judge(reschedule(plan, self.job, self.cluster))

    def offload(self) -> None:
        """Where nothing fits: the plans that lack least, with state in proportion to room; else with optimizer state,
        gradients and weights in host memory."""
        least = most_frugal(self.job, self.cluster)
        short = [(max(d.lacks_bytes / d.capacity_bytes for d in p.devices), i, plan, p)
                 for i, (plan, p) in enumerate([*least, *self.misses.items()])]
        ways = (way for *_, plan, p in sorted(short, key=lambda entry: entry[:2])
                if (way := by_room(plan, p, self.cluster)) and why_not(way, self.job, self.cluster) is None)
        for plan in islice(ways, TRIED):
            if not self.late():
                self.considered += 1
                self.judge(plan)
        for plan, _ in least if not self.found else ():
            for what in AWAY:
                other = plan.replace(pipelines=tuple(
                    p.replace(stages=tuple(s.replace(offload=what) for s in p.stages)) for p in plan.pipelines))
                if why_not(other, self.job, self.cluster) is None and not self.late():
                    self.considered += 1
                    self.judge(other)

    def batch(self) -> None:
        """Where samples differ in length: shares out the steps of the best plans by cost, in rows of several samples or
        of like lengths. Rows are then shorter than `seq_len`, so larger micro-batches may be better."""
        if not steps_of(self.job, 1):
            return
        for _, _, plan in self.distinct()[:IMPROVED]:
            for batching in BATCHED:
                before = inf
                for times in (1, 2, 4, 8):
                    other = plan.replace(batching=batching, pipelines=tuple(
                        p.replace(micro_batch=min(p.samples, times * p.micro_batch)) for p in plan.pipelines))
                    if self.late() or other in self.found or why_not(other, self.job, self.cluster):
                        break
                    self.considered += 1
                    prediction = self.judge(other)
                    if prediction is None or not prediction.fits or prediction.step_s >= before:
                        break
                    before = prediction.step_s

    def distinct(self) -> list[tuple[float, int, Plan]]:
        """The best plan of every family, best first."""
        seen: dict[object, tuple[float, int, Plan]] = {}
        for entry in self.scored():
            seen.setdefault(self.family(entry[2]), entry)
        return list(seen.values())


def _waits(plan: Plan) -> bool:
    """Whether pipelines have so few micro-batches that it matters more than anything how they wait."""
    return is_deep(plan) and all(len(p.micro_batches) < FEW * len(p.stages) for p in plan.pipelines)


def _degrees(plan: Plan) -> tuple[int, ...]:
    return plan.sharding.weights, plan.sharding.gradients, plan.sharding.optimizer, plan.expert


def _devices(plan: Plan) -> list[tuple[int, ...]]:
    return [stage.devices for pipeline in plan.pipelines for stage in pipeline.stages]


def _short(prediction: Prediction) -> set[tuple[int, int]]:
    """The stages, as (pipeline, stage), that lack memory."""
    return {(d.pipeline, d.stage) for d in prediction.devices if not d.fits}


def find(job: Job, cluster: Cluster, *, top: int = 5, max_seconds: float = 120.0, objective: Objective | None = None,
         progress: Progress | None = None, limits: Limits | None = None,
         schedule_search: bool = False, names: Sequence[str] = ()) -> SearchResult:
    """The best plans for a job on a cluster, and why.

    `objective` is the job's unless given. `max_seconds` is a safety limit only: a search that it ends says so
    (`complete`). `schedule_search` tries orders of their own (`custom`) and those of `TURNED` for the best
    pipelines. `names` are the only schedules that pipelines of several stages may then have, besides such orders.
    Raises InputError for an objective that the cluster does not allow, for unknown names, and for products in a type
    that a device lacks. Nothing that fits is an
    answer.
    """
    if why := lacking(job, cluster.devices):
        raise InputError(why)
    allowed: tuple[ScheduleName, ...] = tuple(sorted(known(names), key=_usual))  # type: ignore[arg-type]
    limits = limits or Limits()
    if allowed:
        limits = limits.replace(schedules=allowed)
    with few_collections():
        return _found(Search(job, cluster, objective or job.objective, max_seconds, progress, allowed), top, limits,
                      schedule_search)


def _usual(name: str) -> int:
    """Schedules that need least of a plan come first."""
    return PLANNED.index(name) if name in PLANNED else len(PLANNED)


def _found(search: Search, top: int, limits: Limits, schedule_search: bool) -> SearchResult:
    from mixfleet.search.explain import explain

    exact = search.enumerate(limits, top)
    if not exact:
        search.begin()
    for wide in () if exact else (False, True):
        if not wide or not search.found:
            times = 1 if len(search.cluster.devices) > FEW_BOUND else MORE
            search.expand(search.shapes(wide=wide), top, times * SIMULATED, times * AHEAD)
    if not search.found:
        search.offload()
        exact = exact and not search.found
    if not exact:
        search.narrow()
        search.schedule()
        search.spread()
        search.improve([plan for _, _, plan in search.distinct()[:IMPROVED]])
    if limits.replicated and not search.late():
        search.replicate()
    search.spread()
    search.recompute()
    search.batch()
    if schedule_search:
        search.reorder()
    return explain(search, top, exact and search.complete)


def best_plan(job: Job, cluster: Cluster) -> Plan:
    """What the search finds; InputError if nothing fits."""
    best = find(job, cluster, top=1).best
    if best is None:
        names = ", ".join(node.name for node in cluster.nodes)
        raise InputError(f"no plan for {job.name} fits what is left of {cluster.name}: {names}")
    return best.plan
