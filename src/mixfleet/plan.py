"""Who does what: the plan language. A plan is one YAML file that a person can read, edit and run."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import gcd, lcm
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mixfleet.errors import InputError
from mixfleet.files import FORMAT_KEY, VERSIONS, Document, Keys, decode, read_spec, write_yaml
from mixfleet.schedule.asynchronous import Weights, enough, fill, stream
from mixfleet.schedule.greedy import B, F, Orders, Step, parse_steps
from mixfleet.schedule.named import SCHEDULES, one_f_one_b
from mixfleet.schedule.rounds import Leg
from mixfleet.spec import Spec

Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "looped-bfs", "wave", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
                       "chimera", "dualpipe", "async-1f1b", "pipedream", "pipedream-vertical", "pipedream-2bw",
                       "pipeoptim", "xpipe", "hetpipe", "roundpipe",
                       "custom"]
"""Those of `schedule.named`, and `custom`: every stage's own `order`."""


Accumulation = Literal["plain", "layered"]
"""`layered`: all micro-batches pass a block before the next block begins, so that a sharded block is gathered and
reduced once per pass, however many there are (Cephalo, arXiv 2411.01075). All of them are in flight then."""


Offload = Literal["weights", "gradients", "optimizer"]
"""What a stage keeps in host memory: weights, loaded for each use; gradients, which go there as backward makes them;
the optimizer's state (moments and master weights), loaded for the update. Where gradients and state lie there, the host
makes the update."""


def makes_step(away: Collection[Offload]) -> bool:
    """Whether the host makes the update of what a device keeps there: gradients and the optimizer's state are there."""
    return {"gradients", "optimizer"} <= {*away}


Dispatch = Literal["split", "round-robin"]
"""What the replicas of one stage take: a part of every micro-batch (DAPPLE's split and concat), or whole micro-batches
in turn (PipeDream)."""
Slices = tuple[tuple[int, int], ...]
"""Per replica of a stage, its samples [lo, hi) of a micro-batch."""
Batching = Literal["padded", "bucketed", "packed"]
"""How samples of unequal length become micro-batches: in order, each padded to `seq_len`; with samples of like length
together, padded to the longest; or one behind another, each attending to itself only. See `batching`."""


class Chunk(NamedTuple):
    """Blocks `lo` to `hi - 1` on a stage: one link of a pipeline's chain."""

    lo: int
    hi: int
    stage: int


class Stage(Spec, frozen=True, kw_only=True):
    """One or more ranges of blocks and the devices that hold them.

    `devices` lists ranks of the cluster, `tensor` per copy of the pipeline's weights (a replica, or under context
    parallelism each part of one): with 2 replicas and tensor degree 4 the first four belong to replica 0, the next
    four to replica 1. A stage with `shares` is replicated by itself: each copy of it is so many tensor groups.
    """

    blocks: tuple[int, int]
    """First block and one past the last."""
    more: tuple[tuple[int, int], ...] = ()
    """Further ranges, for schedules that pass a device several times (interleaved, wave)."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Under `roundpipe`: ranges that its devices go forward through for others, who go back there."""
    devices: tuple[int, ...]
    tensor: int = 1
    shares: tuple[int, ...] = ()
    """Replicas of this stage inside one pipeline, by what each takes of the micro-batches: `[2, 1]` are two, the first
    takes two thirds. Empty: one."""
    dispatch: Dispatch = "split"
    """How they share: every micro-batch is split, or whole micro-batches go round."""
    recompute: Recompute | tuple[Recompute, ...] = "none"
    """One mode for all its blocks, or one for each, ascending; in the list of a file `full*3` stands for three."""
    offload: tuple[Offload, ...] = ()
    """What lies in host memory between uses."""
    offload_blocks: tuple[int, ...] = ()
    """Blocks whose saved activations lie in host memory from their forward to their backward."""
    order: str = ""
    """Under the schedule `custom`: the stage's steps, as in `F0.0 F0.1 B0.0 B0.1`. F or B (or I and W, the input and
    weight halves of a backward), chunk of the pipeline's chain, micro-batch."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """All its ranges of blocks."""
        return (self.blocks, *self.more)

    @property
    def size(self) -> int:
        """Number of blocks."""
        return sum(hi - lo for lo, hi in self.chunks)

    @property
    def text(self) -> str:
        """Its blocks for people: `0-3, 8-11`."""
        return ", ".join(f"{lo}-{hi - 1}" for lo, hi in self.chunks)

    @property
    def held(self) -> tuple[int, ...]:
        """Its blocks, ascending."""
        return tuple(b for lo, hi in sorted(self.chunks) for b in range(lo, hi))

    @property
    def modes(self) -> dict[int, Recompute]:
        """Recompute mode by block."""
        held = self.held
        return dict(zip(held, (self.recompute,) * len(held) if isinstance(self.recompute, str) else self.recompute))

    @property
    def recompute_text(self) -> str:
        """Its recompute for people: `full`, or `full 0-2, none 3`."""
        if isinstance(self.recompute, str):
            return self.recompute
        runs = [(mode, [b for b, _ in run]) for mode, run in groupby(self.modes.items(), lambda entry: entry[1])]
        return ", ".join(f"{mode} {run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for mode, run in runs)

    @property
    def hosted(self) -> bool:
        """Whether the host makes the update."""
        return makes_step(self.offload)

    @property
    def away(self) -> tuple[str, ...]:
        """What it keeps in host memory, for people: `optimizer`, `activations of 3-5, 8`."""
        blocks = enumerate(sorted(self.offload_blocks))
        runs = [[b for _, b in run] for _, run in groupby(blocks, lambda entry: entry[1] - entry[0])]
        text = ", ".join(f"{run[0]}" + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
        return (*self.offload, *([f"activations of {text}"] if text else []))

    def with_modes(self, modes: Mapping[int, Recompute], away: Collection[int] = ()) -> Stage:
        """With these recompute modes of its blocks, and the activations of those in `away` in host memory."""
        mine = tuple(modes[b] for b in self.held)
        return self.replace(recompute=mine[0] if len(set(mine)) == 1 else mine,
                            offload_blocks=tuple(b for b in self.held if b in away))

    def holds(self, block: int) -> bool:
        return any(lo <= block < hi for lo, hi in self.chunks)

    @property
    def members(self) -> int:
        """Replicas of this stage in one copy of the pipeline."""
        return len(self.shares) or 1

    def ranks(self, copy: int, member: int = 0) -> tuple[int, ...]:
        """The tensor-parallel group of one copy, or of one replica of the stage in it, in order."""
        at = copy * self.members + member
        return self.devices[at * self.tensor:(at + 1) * self.tensor]

    @property
    def shares_text(self) -> str:
        """How its replicas share, for people: `2:1` or `2:1 in turn`; "" if it has only one."""
        if self.members == 1:
            return ""
        return ":".join(map(str, self.shares)) + (" in turn" if self.dispatch == "round-robin" else "")

    def deal(self, micro_batch: int, size: int) -> Slices:
        """What each of its replicas takes of a micro-batch of `size` samples."""
        if self.dispatch == "split":
            whole = sum(self.shares)
            return tuple(pairwise(size * end // whole for end in accumulate(self.shares, initial=0)))
        mine = self.turns[micro_batch % sum(self.shares)]
        return tuple((0, size if j == mine else 0) for j in range(self.members))

    @property
    def turns(self) -> tuple[int, ...]:
        """Under round-robin, whose turn it is: each so often as its share, as evenly spread as can be."""
        whole, ahead, found = sum(self.shares), [0] * self.members, []
        for _ in range(whole):
            ahead = [a + share for a, share in zip(ahead, self.shares)]
            found.append(max(range(self.members), key=lambda j: (ahead[j], -j)))
            ahead[found[-1]] -= whole
        return tuple(found)


class Pipeline(Spec, frozen=True, kw_only=True, dict=True):
    """A complete copy of the model, cut into stages; `replicas` equal copies of it.

    Every replica takes `samples` sequences of the global batch, in micro-batches of `micro_batch` (the last one may
    be smaller).
    """

    stages: tuple[Stage, ...]
    samples: int
    micro_batch: int
    replicas: int = 1
    context: int = 1
    """Parts into which every sequence is cut; each is computed with a copy of the weights, on devices of its own."""
    context_shares: tuple[int, ...] = ()
    """Ratio of the parts' lengths. Empty: equal parts."""

    @property
    def copies(self) -> int:
        """Copies of the weights: the parts of replica 0, then those of replica 1 ..."""
        return self.replicas * self.context

    @property
    def context_unit(self) -> int:
        """Half a part is a multiple of this, so that every tensor group can cut a part evenly."""
        return lcm(*(s.tensor // gcd(s.tensor, 2) for s in self.stages))

    def spans(self, seq_len: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The positions of each part, as [lo, hi).

        Part i has a piece of the first half of the sequence and its mirror image in the second. Positions p and
        `seq_len - 1 - p` see `seq_len + 1` keys together, so causal attention too is work in proportion to length.
        """
        if self.context == 1:
            return (((0, seq_len),),)
        shares = self.context_shares or (1,) * self.context
        unit, whole = self.context_unit, sum(shares)
        cells = seq_len // (2 * unit)
        edges = [cells * end // whole * unit for end in accumulate(shares, initial=0)]
        return tuple(((a, b), (seq_len - b, seq_len - a)) for a, b in pairwise(edges))

    def tokens(self, seq_len: int, copy: int) -> int:
        """Positions of a sequence that a copy computes."""
        return seq_len if self.context == 1 else sum(b - a for a, b in self.spans(seq_len)[copy % self.context])

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sequences in each micro-batch."""
        whole, rest = divmod(self.samples, self.micro_batch)
        return (self.micro_batch,) * whole + ((rest,) if rest else ())

    @property
    def replicated(self) -> bool:
        """Whether some stage has replicas of its own."""
        return any(stage.members > 1 for stage in self.stages)

    @property
    def in_turn(self) -> bool:
        """Whether those of some stage take micro-batches in turn."""
        return any(stage.members > 1 and stage.dispatch == "round-robin" for stage in self.stages)

    @cached_property
    def slices(self) -> tuple[tuple[Slices, ...], ...]:
        """Per stage and micro-batch, what each replica of the stage takes."""
        return tuple(tuple(stage.deal(m, size) if stage.shares else ((0, size),)
                           for m, size in enumerate(self.micro_batches)) for stage in self.stages)

    def sizes(self, stage: int, member: int = 0) -> tuple[int, ...]:
        """Sequences of each micro-batch that one replica of a stage takes."""
        if self.stages[stage].members == 1:
            return self.micro_batches
        return tuple(hi - lo for lo, hi in (parts[member] for parts in self.slices[stage]))

    def meetings(self, a: int, b: int, micro_batch: int) -> tuple[tuple[int, int, int, int], ...]:
        """Between the replicas of stages `a` and `b`: (one of a, one of b, from, to), samples of the micro-batch that
        both take."""
        return tuple((i, j, lo, hi) for i, (p, q) in enumerate(self.slices[a][micro_batch])
                     for j, (r, s) in enumerate(self.slices[b][micro_batch])
                     for lo, hi in ((max(p, r), min(q, s)),) if lo < hi)

    def orders(self, schedule: ScheduleName, updates: int = 0, distance: int = 0) -> Orders:
        """The steps of every stage; chunks are numbered along the chain. An asynchronous schedule spans `updates`, 0
        for as many as show how it repeats itself; `distance` is that of its waves."""
        if schedule == "custom":
            return tuple(parse_steps(stage.order) for stage in self.stages)
        if schedule == "roundpipe":  # the forward legs of `ahead` keep nothing, and are not among them
            turns = [(chunk.stage, k) for k, chunk in reversed(list(enumerate(self.chain)))]
            return tuple(tuple((op, k, m) for stage, k in turns if stage == s
                               for m in range(len(self.micro_batches)) for op in (F, B))
                         for s in range(len(self.stages)))
        if schedule == "1f1b" and self.in_turn:
            return one_f_one_b(tuple(c.stage for c in self.chain), len(self.micro_batches), tuple(
                s.members if s.dispatch == "round-robin" else 1 for s in self.stages))
        home, count = tuple(c.stage for c in self.chain), len(self.micro_batches)
        weights = SCHEDULES[schedule].weights
        if weights and updates:
            return stream(home, count, updates, weights, distance)
        return SCHEDULES[schedule].orders(home, count)

    @property
    def away(self) -> frozenset[int]:
        """Blocks whose activations lie in host memory."""
        return frozenset(b for stage in self.stages for b in stage.offload_blocks)

    @cached_property
    def chain(self) -> tuple[Chunk, ...]:
        """All chunks in the order of the model."""
        return tuple(sorted(Chunk(lo, hi, s) for s, stage in enumerate(self.stages) for lo, hi in stage.chunks))

    @cached_property
    def legs(self) -> tuple[Leg, ...]:
        """Under `roundpipe`, what goes to one stage after another: forward legs, then backward legs."""
        front = sorted((lo, hi, s) for s, stage in enumerate(self.stages) for lo, hi in stage.ahead)
        return (*(Leg(lo, hi, s, False) for lo, hi, s in front), *(Leg(*chunk, True) for chunk in reversed(self.chain)))

    @cached_property
    def entries(self) -> frozenset[int]:
        """Under `roundpipe`, the blocks at whose input a backward leg begins that is not the first of them."""
        return frozenset(c.lo for c in self.chain[:-1] if c.lo)


class Sharding(Spec, frozen=True, kw_only=True):
    """Into how many pieces each kind of state is cut among the data-parallel replicas.

    1/1/1 is DDP, 1/1/n ZeRO-1, 1/n/n ZeRO-2, n/n/n ZeRO-3, p/p/p with p < n MiCS. A degree that does not divide
    the number of replicas gives groups of unequal size, none smaller than the degree. See `docs/sharding.md`.
    """

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that computes."""
    shares: tuple[int, ...] = ()
    """Size of each replica's pieces, in the order of the replicas; only the ratio inside a group counts, and 0 holds
    nothing. Empty: equal pieces."""
    hierarchical: int = 0
    """So many consecutive replicas share a node: groups over several nodes gather across the nodes first, each piece
    once per node, then inside them; hop 1 goes the other way. 0: every piece is sent directly."""


class Synchronization(Spec, frozen=True, kw_only=True):
    """How virtual workers keep together under `hetpipe`, and whether `roundpipe` waits for updates."""

    distance: int = 0
    """Waves by which one may be ahead of the slowest."""
    pull: Literal["late", "early"] = "late"
    """`late`: a wave is pulled when the distance makes it due, so that runs repeat to the bit. `early`: also before,
    with the next wave's end, if all have pushed it by then."""
    late: bool = False
    """Under `roundpipe`: a step computes with the weights from before the last update, one step late."""


class Plan(Spec, frozen=True, kw_only=True, dict=True):
    """The whole plan for one job on one cluster."""

    pipelines: tuple[Pipeline, ...]
    schedule: ScheduleName = "1f1b"
    sharding: Sharding = Sharding()
    expert: int = 1
    """Expert-parallel degree: so many consecutive replicas share the routed experts of every layer. Each holds some of
    them and computes the rows of all; the rest of the model is replicated as ever. Groups are as those of `sharding`.
    """
    expert_shares: tuple[int, ...] = ()
    """Ratio of the numbers of experts that the replicas of a group hold, one number for each replica. Empty: as equal
    as can be."""
    accumulation: Accumulation = "plain"
    synchronization: Synchronization = Synchronization()
    batching: Batching = "padded"
    name: str = ""
    job: str = ""
    """Path of the job file, relative to the plan file."""
    cluster: str = ""
    """Path of the cluster file, relative to the plan file."""
    cluster_fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise InputError("pipelines is empty; a plan has at least one")

    @cached_property
    def replicas(self) -> tuple[tuple[int, int], ...]:
        """All copies of the weights as (pipeline, copy in it), in order: their index is the replica number.

        They are the data-parallel replicas; one that shares its sequences under context parallelism counts `context`
        times, since state is sharded and gradients are summed over its parts as over replicas.
        """
        return tuple((p, r) for p, pipe in enumerate(self.pipelines) for r in range(pipe.copies))

    @cached_property
    def expert_groups(self) -> tuple[range, ...]:
        """The replicas that share experts: each by itself without expert parallelism."""
        n = len(self.replicas)
        return groups(n, self.expert) if self.expert > 1 else tuple(range(k, k + 1) for k in range(n))

    @cached_property
    def _expert_parts(self) -> tuple[tuple[int, int, int], ...]:
        """Per replica: where its experts begin and end, and where all do, in shares of its group."""
        found: list[tuple[int, int, int]] = []
        for group in self.expert_groups:
            unequal = self.expert_shares and self.expert > 1
            ends = [0, *accumulate(self.expert_shares[k] if unequal else 1 for k in group)]
            found += [(a, b, ends[-1]) for a, b in pairwise(ends)]
        return tuple(found)

    def experts_of(self, replica: int, count: int) -> tuple[int, int]:
        """The experts [lo, hi) of `count` that a replica holds: its share, to the nearest whole expert."""
        a, b, whole = self._expert_parts[replica]
        if not self.expert_shares:
            return count * a // whole, count * b // whole
        return (2 * count * a + whole) // (2 * whole), (2 * count * b + whole) // (2 * whole)

    @cached_property
    def first_samples(self) -> tuple[int, ...]:
        """Per replica number, the place in the global batch of its first sample."""
        starts = [0, *accumulate(p.samples * p.replicas for p in self.pipelines)]
        return tuple(starts[p] + r // self.pipelines[p].context * self.pipelines[p].samples for p, r in self.replicas)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Devices in use, ascending."""
        return tuple(sorted({d for p in self.pipelines for s in p.stages for d in s.devices}))

    @cached_property
    def crews(self) -> tuple[tuple[int, ...], ...]:
        """The pipelines by the devices that they run on: one alone, or several that share all of theirs."""
        found: list[list[int]] = []
        crew_of: dict[int, int] = {}
        for p, pipeline in enumerate(self.pipelines):
            ranks = [d for s in pipeline.stages for d in s.devices]
            crew = next((crew_of[d] for d in ranks if d in crew_of), len(found))
            if crew == len(found):
                found.append([])
            found[crew].append(p)
            crew_of.update(dict.fromkeys(ranks, crew))
        return tuple(map(tuple, found))

    @cached_property
    def shared(self) -> bool:
        """Whether some devices stand in several pipelines."""
        return len(self.crews) < len(self.pipelines)

    @cached_property
    def span(self) -> int:
        """What tells the posts of a rank apart: see `posts`."""
        return self.ranks[-1] + 1

    def posts(self, pipeline: int, stage: int, replica: int, member: int = 0) -> tuple[int, ...]:
        """The tensor-parallel group of one replica of a stage. A rank has a post in each pipeline in which it stands,
        rank + span * place of the pipeline in its crew; so posts are ranks where no devices are shared."""
        ranks = self.pipelines[pipeline].stages[stage].ranks(replica, member)
        seat = next(crew.index(pipeline) for crew in self.crews if pipeline in crew) if self.shared else 0
        return tuple(rank + seat * self.span for rank in ranks) if seat else ranks

    def seats(self, crew: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per stage of a crew's first pipeline, the (pipeline, stage) that its devices hold, one in each pipeline."""
        if len(crew) == 1:
            return tuple(((crew[0], s),) for s in range(len(self.pipelines[crew[0]].stages)))
        index = [{stage.devices: s for s, stage in enumerate(self.pipelines[p].stages)} for p in crew]
        return tuple(tuple((p, index[i][stage.devices]) for i, p in enumerate(crew))
                     for stage in self.pipelines[crew[0]].stages)

    def homes(self, crew: tuple[int, ...]) -> tuple[int, ...]:
        """Which stage of the crew's first pipeline has the devices of each chunk, over the chains of all its
        pipelines."""
        where = {stage.devices: s for s, stage in enumerate(self.pipelines[crew[0]].stages)}
        return tuple(where[pipeline.stages[c.stage].devices] for pipeline in (self.pipelines[p] for p in crew)
                     for c in pipeline.chain)

    def orders(self, crew: tuple[int, ...], updates: int = 0) -> tuple[tuple[tuple[int, Step], ...], ...]:
        """Per stage of a crew's first pipeline, what its devices do: (place of a pipeline in the crew, step of it)."""
        pipelines = [self.pipelines[p] for p in crew]
        if len(crew) == 1:
            found = pipelines[0].orders(self.schedule, updates, self.synchronization.distance)
            return tuple(tuple((0, step) for step in order) for order in found)
        counts = [len(p.micro_batches) for p in pipelines]
        chunks, firsts = ([0, *accumulate(n)] for n in ([len(p.chain) for p in pipelines], counts))
        found = SCHEDULES[self.schedule].orders(self.homes(crew), *counts)
        return tuple(tuple((seat, (op, k - chunks[seat], m - firsts[seat])) for op, k, m in order
                           for seat in (bisect(chunks, k) - 1,)) for order in found)

    @property
    def synchronous(self) -> bool:
        """Whether every gradient is that of the weights which it changes."""
        return self.weights is None

    @property
    def weights(self) -> Weights | None:
        """Which weights each step reads under an asynchronous schedule."""
        return SCHEDULES[self.schedule].weights if self.schedule in SCHEDULES else None

    @property
    def updates(self) -> int:
        """Optimizer steps that its program spans: 1, or enough for an asynchronous one to fill, go on and drain."""
        return 1 if self.synchronous else max(
            enough(len(p.stages), len(p.micro_batches), self.synchronization.distance) for p in self.pipelines)

    @property
    def waves(self) -> bool:
        """Whether its pipelines are virtual workers, which update their own weights and exchange what waves changed."""
        return self.weights is not None and self.weights.waves

    @property
    def depth(self) -> int:
        """Updates over which an asynchronous program fills and drains."""
        return max(fill(len(p.stages), len(p.micro_batches)) for p in self.pipelines) + (
            self.synchronization.distance if self.waves else 0)

    @property
    def global_batch(self) -> int:
        return sum(p.samples * p.replicas for p in self.pipelines)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """From a plan file, where `devices` may hold ranges: `[0-7, 12]`. InputError names file, line and key."""
        doc = read_spec(path, "plan")
        for keys, stage in _stages(doc.data):
            if "devices" in stage:
                stage["devices"] = _expanded(stage["devices"], doc, (*keys, "devices"))
            if isinstance(stage.get("recompute"), list):
                stage["recompute"] = _repeated(stage["recompute"])
        return decode(doc, Plan)

    def save(self, path: str | Path, header: str = "") -> None:
        """To a plan file from which `load` makes an equal plan; comments of an existing file stay."""
        data = msgspec.to_builtins(self)
        for _, stage in _stages(data):
            stage["devices"] = _ranges(stage["devices"])
            if not isinstance(stage.get("recompute", ""), str):
                stage["recompute"] = [mode if n == 1 else f"{mode}*{n}" for mode, run in groupby(stage["recompute"])
                                      for n in (len(list(run)),)]
        first = {key: data.pop(key) for key in ("name", "job", "cluster", "cluster_fingerprint") if key in data}
        write_yaml(path, {FORMAT_KEY: f"plan/{VERSIONS['plan']}", **first, **data}, header)


def _stages(data: dict[str, Any]) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """The stages of a plan file and their keys, as far as it has the right form: `decode` complains about the rest."""
    pipelines = data.get("pipelines")
    for p, pipeline in enumerate(pipelines if isinstance(pipelines, (list, tuple)) else ()):
        stages = pipeline.get("stages") if isinstance(pipeline, dict) else ()
        for s, stage in enumerate(stages if isinstance(stages, (list, tuple)) else ()):
            if isinstance(stage, dict):
                yield ("pipelines", p, "stages", s), stage


def _expanded(devices: Any, doc: Document, keys: Keys) -> list[Any]:
    ranks: list[Any] = []
    for entry in devices if isinstance(devices, list) else [devices]:
        first, dash, last = str(entry).partition("-")
        if isinstance(entry, str) and dash and first.strip().isdecimal() and last.strip().isdecimal():
            if int(first) > int(last):
                raise InputError(f"the range {entry!r} runs backwards", where=doc.where(keys))
            ranks += range(int(first), int(last) + 1)
        else:
            ranks.append(entry)
    return ranks


def _repeated(modes: list[Any]) -> list[Any]:
    """`full*3` three times."""
    found: list[Any] = []
    for entry in modes:
        mode, star, times = str(entry).partition("*")
        found += [mode.strip()] * int(times) if star and times.strip().isdecimal() else [entry]
    return found


def _ranges(ranks: Sequence[int]) -> list[int | str]:
    """Runs of three and more consecutive ranks as text, such as `0-7`."""
    shown: list[int | str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            run = ranks[start:i]
            shown += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
            start = i
    return shown


def groups(replicas: int, degree: int) -> tuple[range, ...]:
    """Consecutive replicas in `replicas // degree` groups, larger ones first; none is smaller than the degree."""
    count = max(1, replicas // degree)
    size, extra = divmod(replicas, count)
    starts = [g * size + min(g, extra) for g in range(count + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))
