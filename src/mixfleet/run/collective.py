"""State buffers and the transfers between them.

Every movement of weights and gradients is a set of `Move`s. A rank sends all that one action moves to a peer as one
message, directly to where it is needed: each byte crosses the wire once, so the bytes sent are those of the layout.
Each sum is taken by one rank in a fixed order and copied to the others, so replicas are bitwise equal.
Streams make transfers asynchronous: a worker thread on CPU, a CUDA stream on GPUs.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mixfleet.plan import Plan
from mixfleet.program.layout import Move, Reduction
from mixfleet.run.recorder import Recorder

CHANNELS = ("G", "P", "R", "Y", "SA", "SG", "SX")
"""Kinds of actions that send."""


class Part(NamedTuple):
    """Elements [lo, hi) of a column of the layout, at `offset` of a buffer."""

    column: int
    lo: int
    hi: int
    offset: int


class Flat:
    """Parts of a unit's state side by side in one 1-D buffer, which can be released and brought back.

    Views stay valid over `release` and `restore`, because only the storage behind them shrinks and grows; so module
    parameters can point into a buffer that exists only while it is needed.
    """

    def __init__(self, parts: Iterable[Part], data: Tensor, *, owner: bool = True) -> None:
        self.parts = tuple(p for p in parts if p.lo < p.hi)
        self.data = data
        self.nbytes = data.untyped_storage().nbytes() if owner else 0
        self.held = True
        self.task: Running | None = None
        """The last transfer that reads or writes this buffer."""

    @classmethod
    def packed(cls, intervals: Iterable[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> Flat:
        """A buffer of its own for (column, lo, hi) intervals, one after another, zeroed."""
        parts = []
        at = 0
        for column, lo, hi in intervals:
            parts.append(Part(column, lo, hi, at))
            at += hi - lo
        return cls(parts, torch.zeros(at, dtype=dtype, device=device))

    def narrowed(self, intervals: Iterable[tuple[int, int, int]]) -> Flat | None:
        """The same memory, seen as fewer intervals; None if one of them is not all here."""
        parts: list[Part] = []
        for column, lo, hi in intervals:
            found = self._find(column, lo, hi)
            if sum(p.hi - p.lo for p in found) < hi - lo:
                return None
            parts += found
        return Flat(parts, self.data, owner=False)

    def _find(self, column: int, lo: int, hi: int) -> list[Part]:
        found = []
        for p in self.parts:
            a, b = max(lo, p.lo), min(hi, p.hi)
            if p.column == column and a < b:
                found.append(Part(column, a, b, p.offset + a - p.lo))
        return sorted(found)

    def views(self, column: int, lo: int, hi: int) -> list[Tensor]:
        """1-D views that together are elements [lo, hi) of a column, in order."""
        found = self._find(column, lo, hi)
        assert sum(p.hi - p.lo for p in found) == hi - lo, f"[{lo}, {hi}) of column {column} is not in {self.parts}"
        return [self.data[p.offset:p.offset + p.hi - p.lo] for p in found]

    @property
    def count(self) -> int:
        return sum(p.hi - p.lo for p in self.parts)

    def release(self) -> None:
        """Give the memory back; contents are lost."""
        self.wait()
        if self.held and self.nbytes:
            self.data.untyped_storage().resize_(0)
            self.held = False

    def drop(self) -> None:
        """Give the memory back as the end of a transfer; a GPU's goes to others once the transfer is made."""
        if self.held and self.nbytes:
            if self.data.is_cuda:
                self.data.record_stream(torch.cuda.current_stream())
            self.data.untyped_storage().resize_(0)
            self.held = False

    def restore(self) -> None:
        """Have memory again, contents undefined."""
        if not self.held:
            self.data.untyped_storage().resize_(self.nbytes)
            self.held = True

    @property
    def idle(self) -> bool:
        return self.task is None or self.task.done()

    def wait(self) -> None:
        """Until the last transfer that uses this buffer is done (on CUDA, only the current stream waits)."""
        if self.task is not None:
            self.task.wait()
            self.task = None


def merged(views: Iterable[Tensor]) -> list[Tensor]:
    """1-D views, those that follow each other in memory joined."""
    joined: list[Tensor] = []
    for v in views:
        if joined:
            last = joined[-1]
            same = last.untyped_storage()._cdata == v.untyped_storage()._cdata
            if same and last.storage_offset() + last.numel() == v.storage_offset():
                joined[-1] = last.as_strided((last.numel() + v.numel(),), (1,), last.storage_offset())
                continue
        if v.numel():
            joined.append(v)
    return joined


class Task(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Running(Task, Protocol):
    """A transfer on a stream."""

    def done(self) -> bool: ...

    def settle(self) -> None:
        """Wait as long as it takes, the host too."""


Buffers: TypeAlias = "Mapping[int, Flat]"
"""By the post whose state it is."""
Steps: TypeAlias = Iterator[Sequence[Task]]
"""A transfer as a generator that yields what it must wait for before it goes on."""


class _Thread:
    """Drives transfers in order on a worker thread."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._recorder = recorder
        self.name = name
        self.now = ""
        """The transfer under way."""

    def run(self, steps: Steps, name: str, category: str, *, post: bool) -> Running:
        """Start a transfer; with `post`, its first messages go out at once, past what the thread still waits for."""
        first = next(steps, ()) if post else ()
        return _Joined(self._pool.submit(self._drive, steps, first, name, category))

    def _drive(self, steps: Steps, first: Sequence[Task], name: str, category: str) -> None:
        self.now = name
        with torch.no_grad(), self._recorder.span(self.name, name, category):
            _drive(steps, first)
        self.now = ""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Joined:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    settle = wait

    def done(self) -> bool:
        return self._future.done()


def _drive(steps: Steps, first: Sequence[Task]) -> None:
    for task in first:
        task.wait()
    for tasks in steps:
        for task in tasks:
            task.wait()


class _CudaStream:
    """Enqueues transfers on a CUDA stream of their own; nothing blocks the host."""

    def __init__(self, name: str, recorder: Recorder, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.name = name

    def run(self, steps: Steps, name: str, category: str, *, post: bool) -> Running:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream), self._recorder.span(self.name, name, category):
            _drive(steps, ())
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Recorded(event)

    def close(self) -> None:
        self._stream.synchronize()


class _Recorded:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def settle(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class Groups:
    """The communicators of a plan. Every process of the default group makes them, in the same order.

    gloo tells messages apart by tag; NCCL needs a communicator for each order of messages, one per kind of action.
    """

    def __init__(self, plan: Plan, *, cuda: bool) -> None:
        self._process = {rank: i for i, rank in enumerate(plan.ranks)}
        # Every group on gloo has a thread that looks for messages 100 times a second, so one that is there will do.
        everyone = not cuda and dist.get_world_size() == len(plan.ranks)
        self.world: Any = dist.group.WORLD if everyone else self._make(plan.ranks)
        self.channels: dict[str, Any] = {c: self._make(plan.ranks) if cuda else self.world for c in CHANNELS}
        self.tensor: dict[int, Any] = {}
        """The tensor-parallel group of each rank that has one."""
        self.context: dict[int, Any] = {}
        """The group of each rank that shares its sequences: those of equal tensor index in the parts."""
        self.expert: dict[int, tuple[Any, tuple[int, ...]]] = {}
        """The group of each rank that shares experts with other replicas, and its ranks in the order of these."""
        for members in plan.expert_groups if plan.expert > 1 else ():
            places = [plan.replicas[k] for k in members]
            for s in range(len(plan.pipelines[places[0][0]].stages)):
                ranks = tuple(rank for p, r in places for rank in plan.pipelines[p].stages[s].ranks(r))
                self.expert.update(dict.fromkeys(ranks, (self._make(ranks), ranks)))
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                groups = [stage.ranks(r, member) for r in range(pipeline.copies) for member in range(stage.members)]
                for ranks in groups if stage.tensor > 1 else ():
                    self.tensor.update(dict.fromkeys(ranks, self._make(ranks)))
                for first in range(0, pipeline.copies, pipeline.context) if pipeline.context > 1 else ():
                    for ranks in zip(*groups[first:first + pipeline.context]):
                        self.context.update(dict.fromkeys(ranks, self._make(ranks)))

    def _make(self, ranks: Sequence[int]) -> Any:
        return dist.new_group([self._process[r] for r in ranks])


class Fabric:
    """This rank's way to the others. Ranks are those of the cluster; the plan's, in order, are the processes."""

    def __init__(self, plan: Plan, rank: int, device: torch.device, recorder: Recorder) -> None:
        self.rank, self.device, self.recorder = rank, device, recorder
        self._process = {r: i for i, r in enumerate(plan.ranks)}
        self._span = plan.span
        self.sent: Counter[tuple[str, int]] = Counter()
        """Payload bytes that this rank sent, by (kind of action, destination)."""
        self._told = [0]
        self._lock = threading.Lock()
        self._streams: dict[str, _Thread | _CudaStream] = {}
        self.groups = Groups(plan, cuda=device.type == "cuda")
        self.world = self.groups.world

    def run(self, stream: str, steps: Steps, name: str, category: str, *, post: bool = True) -> Running:
        """Carry out a transfer on a named stream, behind the earlier ones of that stream."""
        if stream not in self._streams:
            self._streams[stream] = (_CudaStream(stream, self.recorder, self.device) if self.device.type == "cuda"
                                     else _Thread(stream, self.recorder))
        return self._streams[stream].run(steps, name, category, post=post)

    def under_way(self) -> list[str]:
        """The transfers that streams are at; on CUDA the host does not know."""
        return [s.now for s in self._streams.values() if isinstance(s, _Thread) and s.now]

    def count(self, kind: str, dst: int, nbytes: int) -> None:
        with self._lock:
            self.sent[kind, dst] += nbytes

    def newly_sent(self) -> int:
        """Payload bytes that this rank sent since this was last asked."""
        with self._lock:
            total = self.sent.total()
        new, self._told[0] = total - self._told[0], total
        return new

    def at(self, post: int) -> Fabric:
        """The same way to the others, as one of this rank's posts takes it."""
        seat = copy.copy(self)
        seat.rank = post
        return seat

    def rank_of(self, post: int) -> int:
        return post % self._span

    def send(self, data: Tensor, dst: int, channel: str, tag: int) -> Task:
        """Start to send a contiguous tensor to another rank; it must stay unchanged until the work is done."""
        dst = self.rank_of(dst)
        self.count(channel, dst, data.nbytes)
        work = dist.isend(data, group=self.groups.channels[channel], group_dst=self._process[dst], tag=tag)
        assert work is not None
        return work

    def receive(self, data: Tensor, src: int, channel: str, tag: int) -> Task:
        """Start to receive into a contiguous tensor."""
        process = self._process[self.rank_of(src)]
        work = dist.irecv(data, group=self.groups.channels[channel], group_src=process, tag=tag)
        assert work is not None
        return work

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place, equal to the bit everywhere."""
        dist.all_reduce(values, group=self.world)
        return values

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


class Copies:
    """Moves that copy, as one rank carries them out: one message to and from each peer.

    `sources` and `targets` are the buffers of the rank's posts that take part; what moves between two of them, and
    `own` (column, lo, hi) inside each, is copied in place.
    """

    def __init__(self, fabric: Fabric, moves: Sequence[Move], sources: Buffers, targets: Buffers, channel: str,
                 tag: int, own: Mapping[int, Sequence[tuple[int, int, int]]] | None = None) -> None:
        self.fabric, self.channel, self.tag = fabric, channel, tag
        self.sends = _sends(fabric, moves, sources)
        inward = [m for m in moves if m.dst in targets and m.src not in sources]
        self.receives = [(src, merged(v for m in inward if fabric.rank_of(m.src) == src
                                      for v in targets[m.dst].views(m.column, m.lo, m.hi)))
                         for src in dict.fromkeys(fabric.rank_of(m.src) for m in inward)]
        local = [(m.src, m.dst, (m.column, m.lo, m.hi)) for m in moves if m.src in sources and m.dst in targets]
        local += [(post, post, piece) for post, pieces in (own or {}).items() for piece in pieces]
        self.own = cut_alike([v for _, dst, piece in local for v in targets[dst].views(*piece)],
                             [v for src, _, piece in local for v in sources[src].views(*piece)])

    def steps(self) -> Steps:
        works: list[Task] = []
        scattered: list[tuple[Tensor, list[Tensor]]] = []
        for src, views in self.receives:
            message = views[0]
            if len(views) > 1:
                message = message.new_empty(sum(v.numel() for v in views))
                scattered.append((message, views))
            works.append(self.fabric.receive(message, src, self.channel, self.tag))
        works += _send_all(self.fabric, self.sends, self.channel, self.tag)
        yield works
        if self.own[0]:
            torch._foreach_copy_(self.own[0], self.own[1])
        for message, views in scattered:
            torch._foreach_copy_(views, list(torch.split(message, [v.numel() for v in views])))


class _Sum(NamedTuple):
    """Where one sum goes, and its terms in order: the views of our own part, or the peer that a part comes from."""

    target: list[Tensor]
    terms: tuple[list[Tensor] | int, ...]


class Sums:
    """A `Reduction` as one rank carries it out: parts to those who add them up, then sums to those who want them.

    With `accumulate` the sum is added to the target, and what is copied on is the accumulated value. `sources` and
    `targets` are the buffers of the rank's posts that take part.
    """

    def __init__(self, fabric: Fabric, reduction: Reduction, sources: Buffers, targets: Buffers, channel: str,
                 tag: int, *, accumulate: bool = False) -> None:
        self.fabric, self.channel, self.tag, self.accumulate = fabric, channel, tag, accumulate
        self.like = next(iter(sources.values())).data
        self.sends = _sends(fabric, reduction.sums, sources)
        inward = [m for m in reduction.sums if m.dst in targets and m.src not in sources]
        self.receives = [(src, [m.hi - m.lo for m in inward if fabric.rank_of(m.src) == src])
                         for src in dict.fromkeys(fabric.rank_of(m.src) for m in inward)]
        self.sums: list[_Sum] = []
        for adder, column, lo, hi, posts in reduction.terms:
            if adder in targets:
                if len(posts) == 2 and posts[1] in sources:  # a sum of two commutes, and ours is in place already
                    posts = posts[::-1]
                self.sums.append(_Sum(targets[adder].views(column, lo, hi), tuple(
                    sources[post].views(column, lo, hi) if post in sources else fabric.rank_of(post)
                    for post in posts)))
        self.copies = Copies(fabric, reduction.copies, targets, targets, channel, tag + 1)

    def steps(self) -> Steps:
        arrived: dict[int, Iterator[Tensor]] = {}
        works: list[Task] = []
        for src, sizes in self.receives:
            message = self.like.new_empty(sum(sizes))
            arrived[src] = iter(torch.split(message, sizes))
            works.append(self.fabric.receive(message, src, self.channel, self.tag))
        yield works + _send_all(self.fabric, self.sends, self.channel, self.tag)
        for target, terms in self.sums:
            self._add(target, [next(arrived[t]) if isinstance(t, int) else t for t in terms])
        yield from self.copies.steps()

    def _add(self, target: list[Tensor], terms: list[Tensor | list[Tensor]]) -> None:
        first, *rest = terms
        total = first if isinstance(first, list) else [first]
        for term in rest:
            _each(torch._foreach_add_, total, term if isinstance(term, list) else [term])
        if self.accumulate:
            _each(torch._foreach_add_, target, total)
        elif not all(map(_same, total, target)) or len(total) != len(target):
            _each(torch._foreach_copy_, target, total)


class Chain:
    """Exchanges one after another."""

    def __init__(self, exchanges: Sequence[Copies | Sums]) -> None:
        self._exchanges = exchanges

    def steps(self) -> Steps:
        for exchange in self._exchanges:
            yield from exchange.steps()


def cut_alike(*lists: list[Tensor]) -> list[list[Tensor]]:
    """Lists of 1-D views of equally many elements, cut further until they are cut at the same places."""
    points = sorted({0, *(p for views in lists for p in accumulate(v.numel() for v in views))})
    sizes = [b - a for a, b in pairwise(points)]
    return [_cut(views, sizes) for views in lists]


def _each(apply: Any, targets: list[Tensor], values: list[Tensor]) -> None:
    """Apply in place over two lists of views that cut the same elements differently."""
    a, b = cut_alike(targets, values)
    apply(a, b)


def _cut(views: list[Tensor], sizes: list[int]) -> list[Tensor]:
    if len(views) == len(sizes):
        return views
    out: list[Tensor] = []
    rest = iter(sizes)
    for v in views:
        at = 0
        while at < v.numel():
            n = next(rest)
            out.append(v[at:at + n])
            at += n
    return out


def _sends(fabric: Fabric, moves: Sequence[Move], sources: Buffers) -> list[tuple[int, list[Tensor]]]:
    """What goes to each other rank, in the order of the moves."""
    outward = [m for m in moves if m.src in sources and m.dst not in sources]
    return [(dst, merged(v for m in outward if fabric.rank_of(m.dst) == dst
                         for v in sources[m.src].views(m.column, m.lo, m.hi)))
            for dst in dict.fromkeys(fabric.rank_of(m.dst) for m in outward)]


def _send_all(fabric: Fabric, sends: list[tuple[int, list[Tensor]]], channel: str, tag: int) -> list[Task]:
    return [fabric.send(v[0] if len(v) == 1 else torch.cat(v), dst, channel, tag) for dst, v in sends]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def overlaps(length: int, parts: int, index: int, other_parts: int) -> list[tuple[int, int, int]]:
    """Where shard `index` of `parts` of a sequence meets the shards of another cut: (other index, lo, hi)."""
    lo, hi = length * index // parts, length * (index + 1) // parts
    found = []
    for j in range(other_parts):
        a, b = max(lo, length * j // other_parts), min(hi, length * (j + 1) // other_parts)
        if a < b:
            found.append((j, a, b))
    return found
