"""Latency and bandwidth between the processes of this machine, and what messages take of their cores, measured with
the messages that training sends.

`exchange`, `small_exchange`, `messages` and `meetings` run inside the processes of `pinned`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean, quantiles
from time import perf_counter, process_time, sleep

from mixfleet.catalog.efficiency import COLLECTIVE_S, MESSAGE_CPU_S
from mixfleet.cluster import Device, Link

_SMALL, _LARGE = 4, 8 * 2**20
_ROUNDS = 24
_CPU_SIZES, _CPU_ROUNDS, _CPU_TURNS, _CALM_S = (4, 2**21), (8, 1), 5, 0.2
"""Of `messages`: bytes per message, rounds in a row, how often these take turns with computing alone, for how long. The
large ones are so large that what their bytes take stands out from how a message's own cost scatters."""
_MOST_PARTNERS, _MEETINGS, _MEETING_BYTES = 3, 12, 2**18
"""Of `meetings`: partners per rank, times that each is met, and bytes per message: as many as training sends, since
those need several turns."""


def loopback_of(rounds: list[list[list[float]]]) -> Link:
    """The link from what `exchange` returned on every rank.

    The bandwidth is the sum over all processes, as the cost model shares it among them; the latency is what an
    exchange of single numbers takes beyond the fixed cost of a collective. A round lasts as long as its slowest
    rank; the first quartile of the rounds counts for the bandwidth, so that other work on the machine hardly shows.
    Where even that lets small messages take as long as large ones, half of a large one's time counts as moving bytes.
    """
    n = len(rounds)
    small, large = (_typical_s([ranks[i] for ranks in rounds]) for i in (0, 1))
    rate = (n - 1) * _LARGE / max(large - small, large / 2)
    return Link(name="loopback", latency_s=latency_s([ranks[0] for ranks in rounds]), bandwidth_Bps=_digits(rate))


def latency_s(rounds: list[list[float]]) -> float:
    """The latency between ranks from the seconds of each rank's rounds of small messages, less what the cost model
    counts besides; the fastest round counts, since other work on the machine only adds."""
    work_s = 2 * (len(rounds) - 1) * MESSAGE_CPU_S
    return _digits(max(min(map(max, zip(*rounds))) - COLLECTIVE_S["cpu"] - work_s, 1e-6))


def _typical_s(rounds: list[list[float]]) -> float:
    slowest = [max(one) for one in zip(*rounds)]
    return float(quantiles(slowest, n=4)[0])


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def exchange() -> list[list[float]]:
    """Seconds of rounds in which every rank sends a piece to every other one: of 4 bytes, and of 8 MiB / ranks."""
    import torch.distributed as dist

    return [_rounds_s(nbytes) for nbytes in (_SMALL, _LARGE // dist.get_world_size())]


def messages() -> dict[str, float]:
    """CPU seconds of this process, all its threads together: per message sent or received, per byte of it, and per byte
    added up.

    As in training, messages are driven by a thread of their own, and another one computes meanwhile: a message that is
    alone finds its code and data in the caches. What a message takes is what the process needs beyond the same
    computing while nobody sends: the kernel's work for a message is charged to whatever it interrupts. A byte takes at
    least what adding one up does, since both ends copy it; a smaller difference is noise.
    """
    import torch
    import torch.distributed as dist

    peers = dist.get_world_size() - 1
    found = []
    with ThreadPoolExecutor(1) as thread, _computing() as products:
        for nbytes, rounds in zip(_CPU_SIZES, _CPU_ROUNDS):
            swap = _swap(nbytes, [p for p in range(peers + 1) if p != dist.get_rank()])
            send = partial(_by, thread, swap, rounds)
            send()
            calm, taken = [_taken(products, partial(sleep, _CALM_S))], []
            for _ in range(_CPU_TURNS):
                taken.append(_taken(products, send))
                calm.append(_taken(products, partial(sleep, _CALM_S)))
            each = [cpu_s / max(done, 1) for cpu_s, done in calm]
            extra_s = sum(cpu_s - done * fmean(around) for (cpu_s, done), around in zip(taken, pairwise(each)))
            found.append(extra_s / (2 * peers * rounds * _CPU_TURNS))
    total, term = torch.ones(2**20), torch.ones(2**20)
    start = process_time()
    for _ in range(_ROUNDS):
        torch._foreach_add_([total], [term])
    sum_s = (process_time() - start) / _ROUNDS / term.nbytes
    return {"message_cpu_s": _digits(max(found[0], 1e-6)), "sum_cpu_s": _digits(sum_s),
            "byte_cpu_s": _digits(max((found[1] - found[0]) / (_CPU_SIZES[1] - _CPU_SIZES[0]), sum_s))}


def meetings() -> dict[str, tuple[float, float]]:
    """Seconds that swapping messages takes while nobody computes and while all do, as pairs: with all others (`all`),
    and with one other, by its number, while the rest does likewise."""
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    rounds = [partner(rank, k, n) for k in range(min(_MOST_PARTNERS, n - 1 + n % 2))]
    swaps = {"all": _swap(_MEETING_BYTES, [p for p in range(n) if p != rank])} | {
        str(other) if other is not None else "": _swap(_MEETING_BYTES, [] if other is None else [other])
        for other in rounds}
    calm = {name: _mean_s(swap) for name, swap in swaps.items()}
    with _computing():
        busy = {name: _mean_s(swap) for name, swap in swaps.items()}
    return {name: (calm[name], busy[name]) for name in swaps if name}


def _by(thread: Executor, part: Callable[[], object], rounds: int) -> None:
    for _ in range(rounds):
        thread.submit(part).result()


def _taken(products: Callable[[], int], part: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds of this process during a part that begins on all ranks at once, and products computed meanwhile."""
    import torch.distributed as dist

    dist.barrier()
    start_s, start = process_time(), products()
    part()
    return process_time() - start_s, products() - start


@contextmanager
def _computing() -> Iterator[Callable[[], int]]:
    """Another thread computes, as training does while messages are under way. The value tells how many products it has
    made."""
    import torch

    over, made = threading.Event(), [0]

    def compute() -> None:
        a = torch.randn(192, 192)
        while not over.is_set():
            a @ a
            made[0] += 1

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield lambda: made[0]
    finally:
        over.set()
        thread.join()


def partner(rank: int, round_: int, ranks: int) -> int | None:
    """Who meets whom in a tournament in which everybody meets everybody: None sits out. Rounds repeat after
    `ranks - 1`, or `ranks` if that is odd."""
    even = ranks + ranks % 2
    last = even - 1
    if rank == last:
        other = next(r for r in range(last) if (2 * r - round_) % last == 0)
    else:
        other = (round_ - rank) % last
        other = last if other == rank else other
    return other if other < ranks else None


def turns_s(found: Sequence[dict[str, tuple[float, float]]], devices: Sequence[Device]) -> list[float]:
    """Per rank, how long a message waits for its turn while the rank computes, from the `meetings` of all: in the mean
    over partners that are as fast or faster, and for the slowest over the meeting of all."""
    turns = []
    least = min(d.share for d in devices)
    for mine, device in zip(found, devices):
        waits = {name: max(0.0, busy - calm) for name, (calm, busy) in mine.items()}
        everyone = waits.pop("all", 0.0)
        as_fast = [s for other, s in waits.items() if devices[int(other)].share >= device.share]
        seconds = as_fast or [*waits.values()]
        turns.append(_digits(fmean([*seconds, *([everyone] if device.share == least else [])])) if seconds else 0.0)
    return turns


def _mean_s(part: Callable[[], object]) -> float:
    import torch.distributed as dist

    part()
    dist.barrier()
    start = perf_counter()
    for _ in range(_MEETINGS):
        part()
    return (perf_counter() - start) / _MEETINGS


def _swap(nbytes: int, peers: Sequence[int]) -> Callable[[], None]:
    """Sends so much to each peer and receives as much."""
    import torch
    import torch.distributed as dist

    out, into = torch.ones(nbytes // 4), torch.empty(dist.get_world_size(), nbytes // 4)

    def swap() -> None:
        if peers:
            for work in dist.batch_isend_irecv([op for p in peers for op in (
                    dist.P2POp(dist.isend, out, p), dist.P2POp(dist.irecv, into[p], p))]):
                work.wait()

    return swap


def small_exchange(ranks: Sequence[int]) -> list[float]:
    """Seconds of the rounds of 4 bytes alone, which only these ranks exchange; all call it."""
    return _rounds_s(_SMALL, ranks)


def _rounds_s(nbytes: int, ranks: Sequence[int] = ()) -> list[float]:
    import torch.distributed as dist

    rank, meet = dist.get_rank(), ranks or range(dist.get_world_size())
    swap = _swap(nbytes, [p for p in meet if p != rank] if rank in meet else [])
    seconds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = perf_counter()
        swap()
        seconds.append(perf_counter() - start)
    return seconds
