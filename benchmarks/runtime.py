"""Throughput of the runtime beside torch DDP and FSDP2, and of a planned uneven split beside DDP's even one.

All contenders train the same model on equally many samples in the same processes, in turns of a step, so that whatever
else the machine does meets all of them; the median over rounds of the ratio of two steps of a round counts, since the
best step of each compares the luckiest moments of a machine whose speed moves. Bounds: 1 on equal processes (as fast as
a hand-written loop; the limit is a step of 1.05 times theirs), 4/3 where one process owns a core and two share another
(24 + 12 + 12 samples against 16 + 16 + 16), and 7/3 where quotas give them 1/4, 1/2 and all of a core (12 + 24 + 48
against 28 each). There state lies the other way round, most of it on the slowest, and the other bound is what each does
alone, without a word to the others, added up. Both keep gathered weights until backward has used them, which is little
beside what so many samples save.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import Figure

ROUNDS, ROUNDS_UNEQUAL = 12, 8
UNEQUAL = [9, 23, 52]
"""Samples of the processes with a quarter, a half and all of a core. By speed alone they would be 12, 24 and 48; but
the messages of a step take each process about 100 ms of CPU, as one or two samples do, and that is four times as long
on the first."""
FIGURES = {"layers": 6, "hidden": 256, "heads": 4, "vocab": 1024, "max_seq_len": 128}


def contenders(process: int, parts: Sequence[float], shares: list[int], sharded: bool, state: list[int],
               groups: int = 1, keep: bool = False) -> dict[str, Callable[[int], None]]:
    """Name -> one training step, for torch's even split, for mixfleet with `shares` samples and `state` per process
    (empty: equal parts), and for the same samples alone, without communication. With several `groups` each has all of
    the state, samples come in two micro-batches, and gradients are reduced over the groups behind the last one.
    `parts` are those of a core that the processes get. With `keep` gathered weights stay until backward used them."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from mixfleet.cluster import Cluster, Device, Link, Node
    from mixfleet.job import Job, Optimizer
    from mixfleet.model.families import build
    from mixfleet.plan import Pipeline, Plan, Sharding, Stage
    from mixfleet.run.modules import build_blocks
    from mixfleet.run.source import DecoderSource
    from mixfleet.run.worker import Rank

    world, total = len(parts), sum(shares)
    job = Job(name="bench", model=build(FIGURES), seq_len=128, global_batch=total, precision="fp32", attention="fused",
              optimizer=Optimizer(lr=1e-3))
    device = Device(name="cpu", kind="cpu", flops={"fp32": 1e11}, vector_flops=1e11, memory_bytes=2**32,
                    memory_Bps=1e10)
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    cluster = Cluster(name="bench", nodes=(Node(name="here", devices=tuple(
        device.replace(share=part) for part in parts), link=link, nic=link),))
    blocks = len(job.model.blocks)
    degree, micro = world // groups if sharded else 1, 2 if groups > 1 else 1
    plan = Plan(sharding=Sharding(weights=degree, gradients=degree, optimizer=degree, shares=tuple(state),
                                  prefetch=2 * blocks if keep else 1),
                pipelines=tuple(
        Pipeline(stages=(Stage(blocks=(0, blocks), devices=(r,)),), samples=n, micro_batch=n // micro)
        for r, n in enumerate(shares)))
    rank = Rank(plan, job, cluster, DecoderSource(job), process)
    rank.start()
    even = total // world
    batches = [rank.source.batch(step, process * even, (process + 1) * even) for step in range(ROUNDS + 1)]
    ours = [rank.batches(step) for step in range(ROUNDS + 1)]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(build_blocks(job.model, range(blocks), seed=job.seed, attention="fused"))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:-1]:
                x = block(x)
            loss: torch.Tensor = self.blocks[-1](x, targets)
            return loss / (even * job.seq_len)  # the sum over micro-batches is the mean

    model: nn.Module = Chain()
    alone = Chain() if state else model
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = (init_device_mesh("cpu", (groups, world // groups), mesh_dim_names=("groups", "members")) if groups > 1
                else init_device_mesh("cpu", (world,)))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    rule = job.optimizer
    # Clipping is off on both sides; DTensors have no fused AdamW on CPU, so FSDP2 has the default one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=rule.weight_decay,
                                  fused=None if sharded else True)

    def torch_step(step: int) -> None:
        parts = list(zip(*(torch.split(t, even // micro) for t in batches[step])))
        for i, part in enumerate(parts):
            if groups > 1:
                model.set_requires_all_reduce(i == len(parts) - 1)  # type: ignore[operator]
            model(*part).backward()
        optimizer.step()
        optimizer.zero_grad()

    by_itself = torch.optim.AdamW(alone.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=rule.weight_decay,
                                  fused=True) if state else None

    def lonely_step(step: int) -> None:
        assert by_itself is not None
        inputs, targets = ours[step][0][:2]
        alone(inputs, targets).backward()
        by_itself.step()
        by_itself.zero_grad()

    def our_step(step: int) -> None:
        rank.interpreter.step(ours[step], rule.lr)

    def finished(run: Callable[[int], None]) -> Callable[[int], None]:
        def steps(step: int) -> None:
            run(step)
            rank.interpreter.finish()
            dist.barrier()
        return steps

    return {"torch": finished(torch_step), "mixfleet": finished(our_step)} | ({"alone": lonely_step} if state else {})


def _process(process: int, cores: list[int], shares: list[int], sharded: bool, state: list[int], groups: int,
             parts: Sequence[float], group: str, rendezvous: str, pipe: Any) -> None:
    os.sched_setaffinity(0, {cores[process]})
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from mixfleet.run.host import keep_memory

    keep_memory()  # as every rank of a run does, here for all contenders
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=len(cores))
    steps = contenders(process, parts, shares, sharded, state, groups, keep=bool(state))
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run(0)
    for turn in range(ROUNDS_UNEQUAL if state else ROUNDS):
        for name in list(steps)[::1 if turn % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name](1 + turn)
            taken[name].append(time.perf_counter() - start)
    if "alone" in taken:  # seconds in which all together do a batch
        speeds = shares[process] / torch.tensor(taken["alone"], dtype=torch.float64)
        dist.all_reduce(speeds)
        taken["alone"] = (sum(shares) / speeds).tolist()
    if process == 0:
        pipe.send(taken)
    dist.barrier()
    os._exit(0)


@contextmanager
def quotas(parts: Sequence[float]) -> Iterator[list[str]]:
    """A cgroup for each part of a core; none of them if this machine has no such groups to make."""
    from mixfleet.testbed.kernel import probe

    found = probe()
    if not found.cpu or found.unified:
        yield []
        return
    groups = [Path(found.cpu, f"mixfleet-bench-{os.getpid()}-{i}") for i in range(len(parts))]
    try:
        for group, part in zip(groups, parts):
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text("20000")
            (group / "cpu.cfs_quota_us").write_text(str(round(20000 * part)))
        yield [str(group) for group in groups]
    finally:
        for group in groups:
            if group.exists():
                group.rmdir()


def measure(cores: list[int], shares: list[int], sharded: bool, state: list[int] | None = None,
            quota: Sequence[float] = (), cgroups: Sequence[str] = (), groups: int = 1) -> dict[str, list[float]]:
    """Seconds per step of each contender, round by round. `quota` are the parts of a core that `cgroups` grant."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    parts = quota or [1 / cores.count(core) for core in cores]
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=_process, args=(r, cores, shares, sharded, state or [], groups, parts,
                                                             cgroups[r] if cgroups else "", f"file://{directory}/r",
                                                             there))
                 for r in range(len(cores))]
        for rank in ranks:
            rank.start()
        there.close()
        taken: dict[str, list[float]] = here.recv()
        for rank in ranks:
            rank.join()
    return taken


def _beside(taken: dict[str, list[float]], other: str) -> tuple[float, str]:
    """The median ratio of another contender's step to ours, and the medians of both in words."""
    ratio = median(theirs / ours for theirs, ours in zip(taken[other], taken["mixfleet"]))
    return ratio, f"{median(taken[other]) * 1e3:.0f} ms beside {median(taken['mixfleet']) * 1e3:.0f} ms"


def figures() -> Iterator[Figure]:
    a, b = sorted(os.sched_getaffinity(0))[:2]
    for what, cores, shares, sharded, groups, target, bound in (
            ("throughput beside torch DDP, 2 equal processes", [a, b], [8, 8], False, 1, 0.952, "1"),
            ("throughput beside FSDP2 fully_shard, 2 equal processes", [a, b], [8, 8], True, 1, 0.952, "1"),
            ("throughput beside FSDP2 hybrid shard, all-reduce deferred, 2 groups of 2", [a, b, a, b], [4] * 4, True, 2,
             0.952, "1"),
            ("planned split beside DDP's even, a core and two halves", [a, b, b], [24, 12, 12], False, 1, 1.25, "4/3")):
        ratio, words = _beside(measure(cores, shares, sharded, groups=groups), "torch")
        yield Figure(what, f"{ratio:.3f} ({words})", f"at least {target} (bound {bound})", ratio >= target)
    yield from unequal()


def unequal() -> Iterator[Figure]:
    """Processes of 1/4, 1/2 and a whole core, with memory the other way round."""
    a, b = sorted(os.sched_getaffinity(0))[:2]
    quota = (0.25, 0.5, 1.0)
    with quotas(quota) as made:
        if not made:
            print("unequal processes: no cgroup for CPU time can be made here, so they are left out")
            return
        taken = measure([b, b, a], UNEQUAL, True, [4, 2, 1], quota, made)
    for what, other, target, bound in (
            ("planned split and state beside FSDP2's even, CPU shares 1:2:4, memory reversed", "torch", 2, "7/3"),
            ("the same beside what each process does alone, added up", "alone", 0.9, "1")):
        ratio, words = _beside(taken, other)
        yield Figure(what, f"{ratio:.2f} ({words})", f"at least {target} (bound {bound})", ratio >= target)
