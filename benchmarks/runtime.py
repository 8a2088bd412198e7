"""Throughput of the runtime beside torch DDP and FSDP2, and of a planned uneven split beside DDP's even one.

All contenders train the same model on equally many samples in the same processes, in turns, so that whatever else the
machine does meets all of them; the best turn of each counts. Bounds: 1 on equal processes (as fast as a hand-written
loop), 4/3 where one process owns a core and two share another (24 + 12 + 12 samples against 16 + 16 + 16).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import Figure

ROUNDS, STEPS = 4, 2
FIGURES = {"layers": 6, "hidden": 256, "heads": 4, "vocab": 1024, "max_seq_len": 128}


def contenders(process: int, world: int, shares: list[int], sharded: bool) -> dict[str, Callable[[int], None]]:
    """Name -> one training step, for torch's even split and for mixfleet with `shares` samples per process."""
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

    total = sum(shares)
    job = Job(name="bench", model=build(FIGURES), seq_len=128, global_batch=total, precision="fp32", attention="fused",
              optimizer=Optimizer(lr=1e-3))
    device = Device(name="cpu", kind="cpu", flops={"fp32": 1e11}, vector_flops=1e11, memory_bytes=2**32,
                    memory_Bps=1e10)
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    cluster = Cluster(name="bench", nodes=(Node(name="here", devices=(device,) * world, link=link, nic=link),))
    blocks = len(job.model.blocks)
    degree = world if sharded else 1
    plan = Plan(sharding=Sharding(weights=degree, gradients=degree, optimizer=degree), pipelines=tuple(
        Pipeline(stages=(Stage(blocks=(0, blocks), devices=(r,)),), samples=n, micro_batch=n)
        for r, n in enumerate(shares)))
    rank = Rank(plan, job, cluster, DecoderSource(job), process)
    rank.start()
    even = total // world
    batches = [rank.source.batch(step, process * even, (process + 1) * even) for step in range(ROUNDS * STEPS + 1)]
    ours = [rank.batches(step) for step in range(ROUNDS * STEPS + 1)]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(build_blocks(job.model, range(blocks), seed=job.seed, attention="fused"))

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[:-1]:
                x = block(x)
            loss: torch.Tensor = self.blocks[-1](x, targets)
            return loss / (even * job.seq_len)

    model: nn.Module = Chain()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    rule = job.optimizer
    # Clipping is off on both sides; DTensors have no fused AdamW on CPU, so FSDP2 has the default one.
    optimizer = torch.optim.AdamW(model.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=rule.weight_decay,
                                  fused=None if sharded else True)

    def torch_step(step: int) -> None:
        model(*batches[step]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def our_step(step: int) -> None:
        rank.interpreter.step(ours[step], rule.lr)

    def finished(run: Callable[[int], None]) -> Callable[[int], None]:
        def steps(step: int) -> None:
            run(step)
            rank.interpreter.finish()
            dist.barrier()
        return steps

    return {"torch": finished(torch_step), "mixfleet": finished(our_step)}


def _process(process: int, cores: list[int], shares: list[int], sharded: bool, rendezvous: str, pipe: Any) -> None:
    os.sched_setaffinity(0, {cores[process]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=len(cores))
    steps = contenders(process, len(cores), shares, sharded)
    best = dict.fromkeys(steps, float("inf"))
    for run in steps.values():
        run(0)
    for turn in range(ROUNDS):
        for name, run in steps.items():
            start = time.perf_counter()
            for step in range(1 + turn * STEPS, 1 + (turn + 1) * STEPS):
                run(step)
            best[name] = min(best[name], (time.perf_counter() - start) / STEPS)
    if process == 0:
        pipe.send(best)
    dist.barrier()
    os._exit(0)


def measure(cores: list[int], shares: list[int], sharded: bool) -> dict[str, float]:
    """Best seconds per step of each contender."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=_process, args=(r, cores, shares, sharded, f"file://{directory}/r", there))
                 for r in range(len(cores))]
        for rank in ranks:
            rank.start()
        there.close()
        best: dict[str, float] = here.recv()
        for rank in ranks:
            rank.join()
    return best


def figures() -> Iterator[Figure]:
    a, b = sorted(os.sched_getaffinity(0))[:2]
    for what, cores, shares, sharded, target, bound in (
            ("throughput beside torch DDP, 2 equal processes", [a, b], [8, 8], False, 0.9, "1"),
            ("throughput beside FSDP2 fully_shard, 2 equal processes", [a, b], [8, 8], True, 0.9, "1"),
            ("planned split beside DDP's even, a core and two halves", [a, b, b], [24, 12, 12], False, 1.25, "4/3")):
        best = measure(cores, shares, sharded)
        ratio = best["torch"] / best["mixfleet"]
        yield Figure(what, f"{ratio:.2f} ({best['torch'] * 1e3:.0f} ms beside {best['mixfleet'] * 1e3:.0f} ms)",
                     f"at least {target} (bound {bound})", ratio >= target)
