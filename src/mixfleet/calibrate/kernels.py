"""What a core reaches (matrix products, memory, overhead per operator), and what the blocks of a job take.

The functions that take no cluster run inside the processes of `pinned`.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Literal

from mixfleet.calibrate.links import exchange, latency_s, loopback_of, meetings, messages, small_exchange, turns_s
from mixfleet.calibrate.pinned import Cores, ready, run_pinned
from mixfleet.cluster import BlockTime, Cluster, Device, Link
from mixfleet.cluster_file import LOOPBACK
from mixfleet.cost.kernels import block_cost, efficiency, fused_attention, optimizer_s
from mixfleet.errors import InputError
from mixfleet.job import Job

if TYPE_CHECKING:
    from torch import Tensor, nn

_WINDOW_S = 0.25
_CHAIN_WINDOW_S = 0.4
_LEAST_PASSES, _MOST_PASSES, _AGREE, _PASSES_S = 3, 6, 1.06, 30.0
"""Of all micro-batches in turn: as many as it takes until the last is this near to the mean of all, on every device, or
until the next would go beyond so long."""
_MOST_ALIKE = 4
_TOO_SLOW_S = 4.0
_OPTIMIZER_ELEMENTS = 2**20
_FOREIGN = 0.1
"""Part of a rank's core that others may take before its times are corrected: below it, shares themselves waver."""
_ROOFLINE_KINDS = ("gemm", "attention", "norm", "softmax", "loss", "elementwise", "embedding")


def measure_machine(ranks: Sequence[Cores]) -> tuple[list[dict[str, float]], Link]:
    """Figures of the cores of each rank, all of them loaded, and the link between the ranks.

    Figures are FLOP/s per data type, `memory_Bps` and `launch_s` of all the cores together, as if nobody shared them.
    """
    found = run_pinned(f"{__name__}:machine_figures", ranks, {"ranks": ranks})
    figures = [found[ranks.index(cores)]["figures"] for cores in ranks]
    return figures, loopback_of([f["exchange"] for f in found]) if len(ranks) > 1 else LOOPBACK


def machine_figures(ranks: list[list[int]]) -> dict[str, Any]:
    """One rank per set of cores measures them while those that share them wait; then all exchange messages."""
    import torch.distributed as dist

    rank = dist.get_rank()
    mine = core_figures() if ranks.index(ranks[rank]) == rank else {}
    dist.barrier()
    return {"figures": mine, "exchange": exchange() if len(ranks) > 1 else []}


def core_figures() -> dict[str, float]:
    """Best of many short runs; with one thread in CPU time, so that other work on the machine hardly shows."""
    import torch

    figures: dict[str, float] = {}
    for dtype, n in (("fp32", 512), ("fp64", 384), ("bf16", 512)):
        kind = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[dtype]
        a, b = (torch.randn(n, n).to(kind) for _ in range(2))
        figures[dtype] = 2 * n**3 / best_s(partial(torch.matmul, a, b))
    source, target = torch.ones(2**24), torch.empty(2**24)
    figures["memory_Bps"] = 2 * source.nbytes / best_s(lambda: target.copy_(source))
    tiny = torch.ones(8)
    figures["launch_s"] = best_s(lambda: [tiny + 1.0 for _ in range(100)]) / 100
    return figures


def best_s(work: Callable[[], Any], window_s: float = _WINDOW_S, before: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of many runs on this CPU, with `before` ahead of each, which does not count."""
    import torch

    clock = process_time if torch.get_num_threads() == 1 else perf_counter
    work()
    best, rounds, end = float("inf"), 0, perf_counter() + window_s
    while perf_counter() < end or rounds < 3:
        before()
        start = clock()
        work()
        best = min(best, clock() - start)
        rounds += 1
    return best


def profile_job(job: Job, cluster: Cluster, *, micro_batches: Sequence[int] = (), links: bool = True,
                enter: Callable[[int], None] | None = None, environment: Mapping[str, str] | None = None,
                loaded: Callable[[], None] | None = None, late: Callable[[float], Cluster] | None = None,
                note: Callable[[str], None] = lambda _: None, run: Callable[..., list[Any]] = run_pinned) -> Cluster:
    """`cluster`, which must be this one machine, with what the job's blocks really take on each of its devices.

    All devices work at the same time, and blocks run as in training: forwards one after another, then backwards, with
    activations held between. Every kind is measured for a few micro-batches in turn, several times until the times
    agree, without tensor parallelism; for shapes that were not measured, the efficiencies are scaled to agree. The
    optimizer and the link between the processes (unless `links` is off) are measured too. With `enter` (and
    `environment`, `loaded`: see `run_pinned`) the
    processes of several nodes are taken where they belong; links between nodes are those of the cluster then, or of
    what `late` makes of the seconds that a small message takes between them before `loaded` is called. Where other
    programs took a part of the cores meanwhile, times are what the ranks' CPU time says, and `note` is told. `run` may
    stand in for `run_pinned` where there are processes already.
    Raises InputError for a job that cannot be trained here and MeasurementError if a process dies.
    """
    if len(cluster.nodes) > 1 and not enter:
        raise InputError(f"cluster {cluster.name} has {len(cluster.nodes)} nodes; only this machine can be measured")
    sizes = sorted(set(micro_batches or (1, min(4, job.global_batch), min(16, job.global_batch))))
    with tempfile.TemporaryDirectory(prefix="mixfleet-") as folder:
        job.save(Path(folder, "job.yaml"))
        found = run(f"{__name__}:job_times", [d.cores for d in cluster.devices],
                    {"job_path": f"{folder}/job.yaml", "micro_batches": sizes, "links": links,
                     "kinds": [d.kind for d in cluster.devices],
                     "shares": [d.share for d in cluster.devices],
                     "apart": [ranks[0] for ranks in cluster.ranks_of_node] if late else [],
                     "rehearse": loaded is not None,
                     "fused": [fused_attention(d, job) for d in cluster.devices]}, timeout_s=1800,
                    enter=enter, environment=environment, loaded=loaded)
    worst = max(found, key=lambda times: times["foreign"])
    if worst["foreign"] > _FOREIGN:
        note(f"other programs took {worst['foreign']:.0%} of what rank {found.index(worst)} may use of its cores; "
             "times of blocks allow for that, those of messages do not: measure again on an idle machine")
    alike: dict[Device, list[dict[str, Any]]] = defaultdict(list)
    for times, turn_s in zip(found, turns_s([f["meetings"] for f in found], cluster.devices)):
        times["turn_s"] = turn_s
    for device, times in zip(cluster.devices, found):
        alike[_without_cores(device)].append(times)
    devices = iter([_measured(d, alike[_without_cores(d)], job) for d in cluster.devices])
    nodes = tuple(node.replace(devices=tuple(next(devices) for _ in node.devices)) for node in cluster.nodes)
    if late and len(nodes) > 1:
        there = late(latency_s([found[ranks[0]]["small"] for ranks in cluster.ranks_of_node]) / 2)
        cluster = there
        nodes = tuple(node.replace(devices=mine.devices) for node, mine in zip(there.nodes, nodes))
    if links and len(nodes) == 1 and len(cluster.devices) > 1 and all(d.kind == "cpu" for d in cluster.devices):
        link = loopback_of([f["exchange"] for f in found])
        nodes = (nodes[0].replace(link=link, nic=link.replace(name="nic")),)
    return cluster.replace(nodes=nodes)


def _without_cores(device: Device) -> Device:
    return device.replace(cores=(), block_times=())


def _measured(device: Device, runs: list[dict[str, Any]], job: Job) -> Device:
    """The device with the mean of what was measured on it and on those like it."""
    times = []
    for i, first in enumerate(runs[0]["blocks"]):
        rows = [run["blocks"][i] for run in runs]
        times.append(BlockTime(
            block=first["block"], micro_batch=first["micro_batch"], seq_len=job.seq_len, precision=job.precision,
            forward_s=_digits(fmean(r["forward"] for r in rows)),
            backward_s=_digits(fmean(r["backward"] for r in rows))))
    step_s = fmean(run["optimizer"] for run in runs)
    plain = device.replace(block_times=(), efficiency={**device.efficiency, "optimizer": 1.0}, launch_s=0.0)
    part = optimizer_s(_OPTIMIZER_ELEMENTS, plain, job) / step_s
    roofline = measured = 0.0
    for block in {b.kind: b for b in job.model.blocks}.values():
        for time in (t for t in times if t.block == block.kind):
            cost = block_cost(block, time.micro_batch, job.seq_len, 1, device.replace(block_times=()), job)
            roofline += cost.forward_s + cost.backward_s
            measured += time.forward_s + time.backward_s
    scaled = {kind: _digits(efficiency(device, kind) * roofline / measured) for kind in _ROOFLINE_KINDS}
    # where ranks share a core, one of them may poll for a whole turn in every exchange, and seem to pay for both
    costs = min((run["messages"] for run in runs), key=lambda found: found.get("message_cpu_s", 0.0))
    costs = {name: _digits(value) for name, value in costs.items()}
    if device.share < 1 and runs[0]["meetings"]:
        costs["turn_s"] = _digits(fmean(run["turn_s"] for run in runs))
    return device.replace(block_times=tuple(times), efficiency={**scaled, "optimizer": _digits(part)}, **costs)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def job_times(job_path: str, micro_batches: list[int], kinds: list[str], shares: list[float], fused: list[bool],
              links: bool = True, apart: Sequence[int] = (), rehearse: bool = False) -> dict[str, Any]:
    """Seconds of forward and backward per block kind and micro-batch, and of an optimizer step; the largest part of
    its share of a core that others took; between CPU processes also what `messages`, `meetings` and (with `links`)
    `exchange` return, and what `small_exchange` does of the ranks `apart`. With `rehearse`, all is done once before the
    process says that it is ready."""
    import torch
    import torch.distributed as dist

    import mixfleet.run.optim  # noqa: F401  what is loaded here does not count against a quota
    from mixfleet.run.host import calm_network_threads

    job, rank = Job.load(job_path), dist.get_rank()
    device = torch.device("cuda", kinds[:rank].count("gpu")) if kinds[rank] == "gpu" else torch.device("cpu")
    chain = _Chain(job, device, fused=fused[rank])
    if device.type == "cpu":
        calm_network_threads()
    small = small_exchange(apart) if len(apart) > 1 else []
    if rehearse:
        for size in micro_batches:
            chain.times(size, _Rehearsal(device, 1.0))
        dist.barrier()
    ready()
    clock = _Clock(device, shares[rank])
    passes = _passes(micro_batches, lambda size, first: chain.times(size, clock, warm=rehearse or not first))
    rows = []
    for size, found in passes.items():
        times = {i: (fmean(one[at][0] for one in found), fmean(one[at][1] for one in found))
                 for at, i in enumerate(chain.blocks)}
        rows += [{"block": kind, "micro_batch": size, "forward": fmean(times[i][0] for i in indices),
                  "backward": fmean(times[i][1] for i in indices)} for kind, indices in chain.of_kind.items()]
    talk = len(kinds) > 1 and set(kinds) == {"cpu"}
    return {"blocks": rows, "optimizer": _optimizer_s(job, clock), "foreign": clock.foreign, "small": small,
            "messages": messages() if talk else {}, "meetings": meetings() if talk else {},
            "exchange": exchange() if links and len(kinds) > 1 else []}


def _passes(sizes: Sequence[int], measure: Callable[[int, bool], list[tuple[float, float]]]
            ) -> dict[int, list[list[tuple[float, float]]]]:
    """What `measure` finds for every size up to the first that is too slow, once per pass: a core that is slower for a
    moment is not slower for one size only. It is told whether this is the first time. All ranks make as many passes."""
    found: dict[int, list[list[tuple[float, float]]]] = {}
    start = perf_counter()
    for number in range(1, _MOST_PASSES + 1):
        begun = perf_counter()
        for size in found or list(sizes):
            times = measure(size, number == 1)
            found.setdefault(size, []).append(times)
            if number == 1 and _slowest(sum(f + b for f, b in times)) > _TOO_SLOW_S:
                break
        ratios = [totals[-1] / fmean(totals) for runs in found.values()
                  for totals in [[sum(f + b for f, b in one) for one in runs]]]
        apart = _slowest(max(max(r, 1 / r) for r in ratios))
        spent = _slowest(perf_counter() - start + perf_counter() - begun)
        if spent > _PASSES_S or (number >= _LEAST_PASSES and apart <= _AGREE):
            break
    return found


class _Chain:
    """Blocks of every kind, in the order of the model, run and timed as a training step runs them."""

    def __init__(self, job: Job, device: Any, *, fused: bool) -> None:
        import torch

        from mixfleet.run.modules import build_blocks

        self.job, self.device = job, device
        self.dtype = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}.get(
            job.precision, torch.float32)
        self.of_kind: dict[str, list[int]] = defaultdict(list)
        for i, block in enumerate(job.model.blocks):
            if len(self.of_kind[block.kind]) < _MOST_ALIKE:
                self.of_kind[block.kind].append(i)
        self.blocks = sorted(i for indices in self.of_kind.values() for i in indices)
        attention: Literal["fused", "eager"] = "fused" if fused else "eager"
        self._modules = [build_blocks(job.model, [i], device=device, dtype=self.dtype, attention=attention)[0]
                         for i in self.blocks]

    def times(self, size: int, clock: _Clock, *, window_s: float = _CHAIN_WINDOW_S, warm: bool = False
              ) -> list[tuple[float, float]]:
        """Seconds of forward and backward of each block for a micro-batch of `size`."""
        import torch

        job, n = self.job, len(self.blocks)
        tokens = torch.randint(0, job.model.vocab, (size, job.seq_len), device=self.device)
        x = torch.randn(size, job.seq_len, job.model.hidden, device=self.device, dtype=self.dtype)
        leaves: list[Tensor] = []
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []

        def forward(index: int, module: nn.Module) -> None:
            leaf = tokens if index == 0 else (outputs[-1] if outputs else x).detach().requires_grad_()
            leaves.append(leaf)
            outputs.append(module(leaf, tokens) if index == len(job.model.blocks) - 1 else module(leaf))

        def backward() -> None:
            out, leaf = outputs.pop(), leaves.pop()
            torch.autograd.backward(out, gradients.pop() if gradients else torch.ones_like(out))
            if leaf.grad is not None:
                gradients.append(leaf.grad)

        def end() -> None:
            gradients.clear()

        steps = [partial(forward, i, m) for i, m in zip(self.blocks, self._modules)]
        times = clock.alternating([*steps, *[backward] * n, end], window_s, least=1, warm=warm)
        return list(zip(times[:n], reversed(times[n:-1])))


class Gauge:
    """Tells whether the blocks of a job still take what the profile of a CPU device says, in a process that does other
    work as well."""

    def __init__(self, job: Job, device: Device) -> None:
        import torch

        self._device, self._chain = device, _Chain(job, torch.device("cpu"), fused=fused_attention(device, job))

    def slower(self, size: int, window_s: float, meet: Callable[[], Any]) -> float:
        """How many times as long as in the profile forward and backward of a micro-batch of `size`, which is in it,
        take in the mean of a window that begins when `meet` returns. They run once before."""
        chain, device = self._chain, self._device
        chain.times(size, _Rehearsal(chain.device, 1.0))
        now = sum(map(sum, chain.times(size, _Clock(chain.device, device.share, meet), window_s=window_s, warm=True)))
        then = {t.block: t.forward_s + t.backward_s for t in device.block_times if t.micro_batch == size}
        return now / sum(then[chain.job.model.blocks[i].kind] for i in chain.blocks)


def _optimizer_s(job: Job, clock: _Clock) -> float:
    import torch

    from mixfleet.run.optim import FlatOptimizer, Run

    value, gradient = (torch.full((_OPTIMIZER_ELEMENTS,), 1e-3, device=clock.device) for _ in range(2))
    optimizer = FlatOptimizer(job.optimizer, [Run(0, _OPTIMIZER_ELEMENTS, 1.0, job.optimizer.weight_decay)], [value])
    return clock.alternating([partial(optimizer.step, [value], [gradient], 1.0, job.optimizer.lr)])[0]


class _Clock:
    """Times work on a device of which the process may use a share; remembers how much of it others took."""

    def __init__(self, device: Any, share: float, meet: Callable[[], Any] | None = None) -> None:
        """With `meet` ranks begin when that returns, not at a barrier of their process group."""
        self.device, self.share, self.meet, self.foreign = device, share, meet, 0.0

    def alternating(self, parts: Sequence[Callable[[], Any]], window_s: float = _WINDOW_S, least: int = 2, *,
                    warm: bool = False) -> list[float]:
        """Mean seconds of each part, run in turn for as long as the window lasts on every rank at once, but so often at
        least; `warm` says that all have run before."""
        import torch
        import torch.distributed as dist

        for part in () if warm else parts:
            part()
        totals = [0.0] * len(parts)
        (self.meet or dist.barrier)()
        rounds, begin, cpu = 0, perf_counter(), process_time()
        while perf_counter() < begin + window_s or rounds < least:
            for i, part in enumerate(parts):
                start = perf_counter()
                part()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                totals[i] += perf_counter() - start
            rounds += 1
        taken = foreign_part(process_time() - cpu, perf_counter() - begin, self.share)
        if self.device.type == "cuda" or torch.get_num_threads() > 1:  # their CPU time says nothing
            taken = 0.0
        self.foreign = max(self.foreign, taken)
        return [total / rounds * (1 - taken if taken > _FOREIGN else 1) for total in totals]


class _Rehearsal(_Clock):
    """Runs everything once."""

    def alternating(self, parts: Sequence[Callable[[], Any]], window_s: float = _WINDOW_S, least: int = 2, *,
                    warm: bool = False) -> list[float]:
        for part in parts:
            part()
        return [0.0] * len(parts)


def foreign_part(cpu_s: float, wall_s: float, share: float) -> float:
    """The part of its share of a core that a process which always had work did not get, so that others had it."""
    return max(0.0, 1 - cpu_s / (share * wall_s))


def _slowest(seconds: float) -> float:
    """The largest value of any rank, so that all of them decide alike."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()
