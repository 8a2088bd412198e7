"""The space of plans: which devices form which stages of which pipelines, and how states are sharded among these.

`shapes` yields templates for clusters of any size. Equal devices in equal nodes are one *class*; a *team* is a set of
equal replicas, each with a proportional part of one or several classes; a *shape* is one team or several that use
disjoint classes. `enumerate_all` yields every plan of a small case, within the limits that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement, pairwise, permutations, product
from math import lcm, prod
from typing import NamedTuple

from mixfleet.cluster import Cluster, Device
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Recompute, ScheduleName, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.search.tables import MODES, Tables
from mixfleet.search.variants import PLANNED, is_deep, laid
from mixfleet.spec import Spec

LONG, SHARED, FEW = 16384, 2048, 8
"""Positions of a sequence from which it is cut into parts, always and where devices are `FEW` times the sequences."""
FEW_DEGREES = 4
"""Degrees of expert parallelism that are tried in templates."""
FEW_DEVICES, FEW_NODES, FEW_STAGES, MOST_PARTS = 8, 4, 4, 500
"""What a small cluster and a short pipeline are, of which more ways are tried, and the most parts of a cluster."""
FEW_BOUND = 4
"""Devices up to which each may stand by itself."""
MANY_CLASSES = 4
"""Classes up to which every way of putting them together is tried."""


class Class(NamedTuple):
    """Equal devices in equal nodes of one zone; `nodes` holds their ranks node by node."""

    device: Device
    nodes: tuple[tuple[int, ...], ...]
    bound: bool = False
    """Whether its devices, maybe unlike, work as one tensor group only."""

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    def tensor_groups(self, degree: int) -> list[tuple[int, ...]]:
        """As many groups of this size as there are; inside the nodes if they fit there, else across them."""
        if degree <= max(map(len, self.nodes)):
            return [n[i:i + degree] for n in self.nodes for i in range(0, len(n) - degree + 1, degree)]
        ranks = [r for n in self.nodes for r in n]
        return [tuple(ranks[i:i + degree]) for i in range(0, len(ranks) - degree + 1, degree)]


class Team(NamedTuple):
    """Equal replicas: `ranks[replica][stage]` is a tensor group, or those of its parts under context parallelism."""

    kind: tuple[object, ...]
    """Signature of each stage's tensor groups."""
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    context: int = 1

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return len(self.ranks) * self.context

    @property
    def stages(self) -> int:
        return len(self.kind)


Shape = tuple[Team, ...]


def classes_of(tables: Tables, some: Collection[int] | None = None) -> tuple[Class, ...]:
    """The classes of a cluster, or of `some` of its ranks, fastest device first."""
    cluster = tables.cluster
    found: dict[tuple[int, int, str], list[tuple[int, ...]]] = {}
    for node, ranks in enumerate(cluster.ranks_of_node):
        pools: dict[int, list[int]] = {}
        for rank in ranks:
            if some is None or rank in some:
                pools.setdefault(tables.kind_of[rank], []).append(rank)
        for kind, pool in pools.items():
            found.setdefault((kind, len(pool), cluster.nodes[node].zone), []).append(tuple(pool))
    classes = [Class(cluster.devices[nodes[0][0]], tuple(nodes)) for nodes in found.values()]
    return tuple(sorted(classes, key=lambda c: (tables.table(c.nodes[0][:1], 1).whole_s, c.nodes)))


def bound_classes(tables: Tables) -> Iterator[tuple[Class, ...]]:
    """For a cluster of up to `FEW_BOUND` devices, all ways to put these into tensor groups inside nodes, unlike devices
    included, each a class of its own: so devices of one kind may also do different work. Ways that differ only by equal
    devices of a node come once."""
    devices, kind_of = tables.cluster.devices, tables.kind_of
    if len(devices) > FEW_BOUND:
        return
    degrees = tensor_degrees(tables.job, len(devices))
    seen: set[object] = set()
    for groups in product(*(_partitions(ranks) for ranks in tables.cluster.ranks_of_node)):
        found = [group for node in groups for group in node]
        key = tuple(tuple(sorted(tuple(kind_of[r] for r in group) for group in node)) for node in groups)
        if key not in seen and all(len(group) in degrees for group in found):
            seen.add(key)
            yield tuple(Class(devices[group[0]], (group,), bound=True) for group in found)


def parts_of(cluster: Cluster, kind_of: Sequence[int]) -> list[frozenset[int]]:
    """Parts of a cluster, all but the whole, as sets of ranks; one of those that differ only by equal nodes.

    With up to `FEW_DEVICES` devices any number of equal devices of a node may be used, else all of a node or none; of
    equal nodes any number up to `FEW_NODES`, else powers of two. Besides, 1, 2, 4, ... equal devices of one node alone.
    """
    alike: dict[tuple[object, ...], list[list[list[int]]]] = {}
    """By what they are made of, the nodes; each with its ranks kind by kind."""
    for node, ranks in enumerate(cluster.ranks_of_node):
        pools: dict[int, list[int]] = {}
        for rank in ranks:
            pools.setdefault(kind_of[rank], []).append(rank)
        alike.setdefault((cluster.nodes[node].zone, *((kind, len(pools[kind])) for kind in sorted(pools))), []).append(
            [pools[kind] for kind in sorted(pools)])
    options: list[list[frozenset[int]]] = []
    found: dict[frozenset[int], None] = {}
    for nodes in alike.values():
        some = len(kind_of) <= FEW_DEVICES
        counts = list(product(*(range(len(pool) + 1) for pool in nodes[0]))) if some else [
            (0,) * len(nodes[0]), tuple(map(len, nodes[0]))]
        sizes = range(len(nodes) + 1) if len(nodes) <= FEW_NODES else {
            0, len(nodes), *(2**i for i in range(len(nodes).bit_length()))}
        rows = [row for n in sorted(sizes) for row in combinations_with_replacement(counts[1:], n)]
        options.append([frozenset(r for node, used in zip(nodes, row) for pool, n in zip(node, used) for r in pool[:n])
                        for row in rows])
        found |= dict.fromkeys(frozenset(pool[:2**i]) for pool in nodes[0] for i in range(len(pool).bit_length()))
    if prod(map(len, options)) <= MOST_PARTS:
        found |= dict.fromkeys(frozenset().union(*row) for row in product(*options))
    else:
        found |= dict.fromkeys(one for row in options for one in row)
    return [one for one in found if 0 < len(one) < len(kind_of)]


def tensor_degrees(job: Job, most: int) -> tuple[int, ...]:
    """Degrees up to `most` that divide everything that tensor parallelism cuts."""
    limits = (*(count for _, count in job.model.tensor_limit), job.seq_len)
    return tuple(d for d in range(1, most + 1) if all(count % d == 0 for count in limits))


def context_degrees(job: Job, devices: int) -> tuple[int, ...]:
    """Numbers of parts of a sequence worth trying: powers of two, where sequences are long or much fewer than devices.

    Elsewhere they would only take simulations from what is faster.
    """
    if job.seq_len < LONG and not (job.seq_len >= SHARED and job.global_batch * FEW <= devices):
        return (1,)
    return tuple(c for c in (1, 2, 4, 8, 16, 32, 64) if c <= devices and job.seq_len // c >= SHARED // 2)


def expert_degrees(job: Job, shape: Shape) -> tuple[int, ...]:
    """Numbers of replicas of a shape that share routed experts: those that divide the experts and every team, so that
    each holds equally many and unlike replicas stay apart; and all, where pipelines of one stage are unlike."""
    count = min((b.experts for b in job.model.blocks if b.routed), default=0)
    inside = [e for e in range(1, count + 1) if count % e == 0 and all(team.copies % e == 0 for team in shape)]
    if len(inside) > FEW_DEGREES:  # least, largest and what lies in the middle; `improve` goes on from there
        inside = [inside[0], inside[1], inside[len(inside) // 2], inside[-1]]
    everyone = sum(team.copies for team in shape)
    if len(shape) > 1 and everyone <= count and all(team.stages == 1 for team in shape):
        inside.append(everyone)
    return tuple(dict.fromkeys(inside)) or (1,)


def teams(members: Sequence[int], classes: Sequence[Class], tables: Tables, *, wide: bool = False,
          contexts: Sequence[int] = (1,)) -> list[Team]:
    """Teams that use all of the classes `members`, as far as their numbers allow.

    For every number of replicas, each class gives every replica as many tensor groups as it can, one stage each.
    On small clusters stages of a class may also stand apart. `wide` lets tensor groups span nodes. Where replicas have
    several stages there are two placements: neighbours form a pipeline, or neighbours hold the same stage. `contexts`
    are the numbers of parts of a sequence to try; parts may span nodes.
    """
    found: list[Team] = []
    job = tables.job
    blocks = len(job.model.blocks)
    degrees = {c: (classes[c].size,) if classes[c].bound else
               tensor_degrees(job, classes[c].size if wide else max(map(len, classes[c].nodes))) for c in members}
    every = len(members) <= 3 or all(classes[c].bound for c in members)
    for order in permutations(members) if every else (tuple(members), tuple(reversed(members))):
        for context, *chosen in product(contexts, *(degrees[c] for c in order)):
            if context > 1 and (job.seq_len % (2 * context * lcm(*chosen)) or any(
                    len(node) % d for c, d in zip(order, chosen) for node in classes[c].nodes)):
                continue
            groups = [classes[c].tensor_groups(d * context) for c, d in zip(order, chosen)]
            counts = [len(g) for g in groups]
            most = min(*counts, job.global_batch)
            # Several numbers of replicas leave each class with as many stages: the largest of them wastes least.
            depths = {tuple(n // r for n in counts): r for r in range(1, most + 1)}
            for depth, replicas in depths.items():
                if sum(depth) > blocks:
                    continue
                plain = tuple(i for i, d in enumerate(depth) for _ in range(d))
                lines = [plain]
                if len(order) > 1 and len(tables.kind_of) <= FEW_DEVICES and sum(depth) <= FEW_STAGES:
                    lines += [one for one in sorted({*permutations(plain)}) if _stretches(one) > len(order)]
                for line in lines:  # the class of each stage, and which of its stages that is
                    at = [(i, line[:s].count(i)) for s, i in enumerate(line)]
                    kind = tuple((context, tables.signature(groups[i][0])) for i in line)
                    for by_stage in (False, True) if sum(depth) > len(order) and replicas > 1 else (False,):
                        found.append(Team(kind, tuple(
                            tuple(groups[i][s * replicas + r if by_stage else r * depth[i] + s] for i, s in at)
                            for r in range(replicas)), context))
    return list(dict.fromkeys(found))


def _stretches(line: Sequence[int]) -> int:
    """How many stretches of equal members it has."""
    return 1 + sum(a != b for a, b in pairwise(line))


def shapes(tables: Tables, classes: Sequence[Class], choose: Callable[[tuple[int, ...]], Sequence[Team]]
           ) -> Iterator[Shape]:
    """Templates: sets of classes that work together, the others idle; `choose` gives the teams of a set."""
    known: dict[tuple[int, ...], Sequence[Team]] = {}
    for split in splits(classes, tables.cluster):
        for members in split:
            if members not in known:
                known[members] = choose(members)
        for shape in product(*(known[members] for members in split)):
            if sum(team.replicas for team in shape) <= tables.job.global_batch:
                yield shape


def splits(classes: Sequence[Class], cluster: Cluster) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to use some or all classes, in sets that work together. With many classes only the plausible ones."""
    everyone = tuple(range(len(classes)))
    if len(classes) <= MANY_CLASSES:
        for used in range(1, 1 << len(classes)):
            yield from _partitions(tuple(c for c in everyone if used >> c & 1))
        return
    zones = [cluster.nodes[cluster.node_of[c.nodes[0][0]]].zone for c in classes]
    names = [c.device.name for c in classes]
    found: dict[tuple[tuple[int, ...], ...], None] = {
        tuple((c,) for c in everyone[:n]): None for n in range(1, len(classes) + 1)}
    for key in (zones, names):
        sets = [tuple(c for c in everyone if key[c] == k) for k in dict.fromkeys(key)]
        found |= dict.fromkeys((tuple(sets), *((one,) for one in sets)))
    found[everyone,] = None
    yield from found


def _partitions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put the items into sets."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for mask in range(1 << len(rest)):
        block = (first, *(x for i, x in enumerate(rest) if mask >> i & 1))
        for others in _partitions(tuple(x for i, x in enumerate(rest) if not mask >> i & 1)):
            yield (block, *others)


def sharding_families(shape: Shape) -> tuple[tuple[Sharding, ...], ...]:
    """Sharding degrees worth trying, in families; inside a family memory falls and communication rises.

    None and ZeRO-1, ZeRO-2, ZeRO-2 whose optimizer state is spread over all, MiCS, MiCS with optimizer state spread
    over all, and ZeRO-2 and 3 over all replicas. Groups are of consecutive replicas: degrees that divide every team
    keep unlike replicas apart.
    """
    n = sum(team.copies for team in shape)
    inner = [d for d in range(2, n) if all(team.copies % d == 0 for team in shape)]
    families = ([(1, 1, p) for p in (1, *inner, n)], [(1, p, p) for p in inner], [(1, p, n) for p in inner],
                [(p, p, p) for p in inner], [(p, p, n) for p in inner], [(1, n, n)], [(n, n, n)])
    return tuple(tuple(Sharding(weights=w, gradients=g, optimizer=o) for w, g, o in dict.fromkeys(family))
                 for family in (families if n > 1 else families[:1]) if family)


def micro_batch_sizes(most: int, *, fine: bool) -> tuple[int, ...]:
    """Micro-batches worth trying: all small ones (`fine`), else powers of two and three times such."""
    grown = {2**i * m for i in range(12) for m in (1, 3)}
    return tuple(m for m in range(1, most + 1) if m in grown or (fine and m <= 16))


class Limits(Spec, frozen=True, kw_only=True):
    """Bounds of the space that is enumerated in full."""

    devices: int = 6
    blocks: int = 6
    plans: int = 20_000
    """A space of more plans is not enumerated."""
    recompute: tuple[Recompute, ...] = MODES
    schedules: tuple[ScheduleName, ...] = PLANNED
    """The first one is that of plans to which it does not matter. One stage alone is under 1F1B."""
    tensor: bool = True
    idle: bool = True
    """Also plans that leave devices idle."""
    replicated: bool = True
    """Then also stages with replicas of their own, as `replicate` proposes them; those are not enumerated."""


def enumerate_all(job: Job, cluster: Cluster, limits: Limits | None = None) -> Iterator[Plan]:
    """Every plan of a small case, one for each set of plans that differ only by equal devices.

    All ways to put all or some devices into ordered stages of pipelines, tensor groups included; all cuts into block
    ranges, splits of the batch, micro-batches, recompute modes per stage, schedules (stages cut evenly into as many
    chunks as these want), sharding degrees that divide the number of replicas, and degrees of expert parallelism that
    divide it and the experts; prefetch is 1.
    """
    limits = limits or Limits()
    kind_of = Tables(job, cluster).kind_of
    ranks = sorted(range(len(kind_of)), key=lambda r: (kind_of[r], cluster.node_of[r], r))
    label = [(kind_of[r], cluster.node_of[r]) for r in ranks]
    degrees = tensor_degrees(job, len(label)) if limits.tensor else (1,)
    for pipelines in _arrangements(label, degrees, limits.idle):
        if len(pipelines) <= job.global_batch and all(len(p) <= len(job.model.blocks) for p in pipelines):
            yield from _filled([[tuple(sorted(ranks[i] for i in group)) for group in pipeline]
                                for pipeline in pipelines], job, cluster, limits)


Group = tuple[int, ...]


def _arrangements(label: Sequence[tuple[int, int]], degrees: Sequence[int],
                  idle: bool) -> Iterator[tuple[tuple[Group, ...], ...]]:
    """Sets of pipelines (sequences of tensor groups) over positions of `label`, which is sorted.

    Devices of one label are equal, so the first free one is always taken, and sets with equal labels come once.
    """
    seen: set[object] = set()

    def fill(done: tuple[tuple[Group, ...], ...], free: Group) -> Iterator[tuple[tuple[Group, ...], ...]]:
        if done and (idle or not free):
            key = tuple(sorted(tuple(tuple(label[r] for r in g) for g in pipe) for pipe in done))
            if key in seen:
                return
            seen.add(key)
            yield done
        for pipe in chains(free):
            if not done or pipe[0] > done[-1][0]:
                taken = {r for g in pipe for r in g}
                yield from fill((*done, pipe), tuple(r for r in free if r not in taken))

    def chains(free: Group) -> Iterator[tuple[Group, ...]]:
        for group in _groups(free, label, degrees):
            yield (group,)
            for rest in chains(tuple(r for r in free if r not in group)):
                yield (group, *rest)

    yield from fill((), tuple(range(len(label))))


def _groups(free: Group, label: Sequence[tuple[int, int]], degrees: Sequence[int]) -> Iterator[Group]:
    """Tensor groups inside one node; of equal devices the first free ones."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    for degree in degrees:
        for group in combinations(free, degree):
            key = tuple(label[r] for r in group)
            if len({node for _, node in key}) == 1 and key not in seen:
                seen.add(key)
                yield group


def _filled(pipelines: Sequence[Sequence[Group]], job: Job, cluster: Cluster, limits: Limits) -> Iterator[Plan]:
    blocks, n = len(job.model.blocks), len(pipelines)
    degrees = [d for d in range(1, n + 1) if n % d == 0]
    count = min((b.experts for b in job.model.blocks if b.routed), default=1)
    spread = [d for d in degrees if count % d == 0]
    triples = [(w, g, o) for w, g, o in product(degrees, repeat=3) if w <= g <= o]
    for bars in combinations(range(1, job.global_batch), n - 1):
        edges = (0, *bars, job.global_batch)
        samples = [b - a for a, b in pairwise(edges)]
        choices = []
        for groups, share in zip(pipelines, samples):
            options = []
            for cuts in combinations(range(1, blocks), len(groups) - 1):
                ends = (0, *cuts, blocks)
                for modes in product(limits.recompute, repeat=len(groups)):
                    stages = tuple(Stage(blocks=(a, b), devices=g, tensor=len(g), recompute=mode)
                                   for (a, b), g, mode in zip(pairwise(ends), groups, modes))
                    options += [Pipeline(stages=stages, samples=share, micro_batch=m)
                                for m in micro_batch_sizes(share, fine=True)]
            choices.append(options)
        for chosen in product(*choices):
            flat = Plan(pipelines=chosen)
            names = limits.schedules if is_deep(flat) else limits.schedules[:1]
            if all(len(pipeline.stages) == 1 for pipeline in chosen):
                names = PLANNED[:1]
            for schedule in names:
                cut = laid(flat, schedule)
                simple = schedule in ("1f1b", "gpipe")
                if isinstance(cut, str):
                    continue
                for (w, g, o), e in product(triples, spread):
                    plan = cut.replace(sharding=Sharding(weights=w, gradients=g, optimizer=o), expert=e)
                    if (g == e == 1 and simple) or why_not(plan, job, cluster) is None:
                        yield plan


def used(shape: Iterable[Team]) -> tuple[int, ...]:
    """Ranks of a shape, ascending."""
    return tuple(sorted(r for team in shape for replica in team.ranks for group in replica for r in group))
