"""Latency and bandwidth between the processes of this machine, measured with the messages that training sends.

`exchange` runs inside the processes of `pinned`.
"""

from __future__ import annotations

from statistics import quantiles
from time import perf_counter

from mixfleet.catalog.efficiency import COLLECTIVE_S
from mixfleet.cluster import Link

_SMALL, _LARGE = 4, 8 * 2**20
_ROUNDS = 24


def loopback_of(rounds: list[list[list[float]]]) -> Link:
    """The link from what `exchange` returned on every rank.

    The bandwidth is the sum over all processes, as the cost model shares it among them; the latency is what an
    exchange of single numbers takes beyond the fixed cost of a collective. A round lasts as long as its slowest
    rank; the first quartile of the rounds counts, so that other work on the machine hardly shows.
    """
    n = len(rounds)
    small, large = (_typical_s([ranks[i] for ranks in rounds]) for i in (0, 1))
    rate = (n - 1) * _LARGE / max(large - small, 1e-9)
    return Link(name="loopback", latency_s=latency_s([ranks[0] for ranks in rounds]), bandwidth_Bps=_digits(rate))


def latency_s(rounds: list[list[float]]) -> float:
    """The latency between ranks from the seconds of each rank's rounds of small messages."""
    return _digits(max(_typical_s(rounds) - COLLECTIVE_S["cpu"], 1e-6))


def _typical_s(rounds: list[list[float]]) -> float:
    slowest = [max(one) for one in zip(*rounds)]
    return float(quantiles(slowest, n=4)[0])


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def exchange() -> list[list[float]]:
    """Seconds of rounds in which every rank sends a piece to every other one: of 4 bytes, and of 8 MiB / ranks."""
    import torch.distributed as dist

    return [_rounds_s(nbytes) for nbytes in (_SMALL, _LARGE // dist.get_world_size())]


def small_exchange() -> list[float]:
    """Seconds of the rounds of 4 bytes alone."""
    return _rounds_s(_SMALL)


def _rounds_s(nbytes: int) -> list[float]:
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    peers = [p for p in range(n) if p != rank]
    out, into = torch.ones(nbytes // 4), torch.empty(n, nbytes // 4)
    seconds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = perf_counter()
        messages = [op for p in peers for op in (dist.P2POp(dist.isend, out, p), dist.P2POp(dist.irecv, into[p], p))]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        seconds.append(perf_counter() - start)
    return seconds
