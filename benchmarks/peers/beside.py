"""mixfleet's ZeRO beside DeepSpeed's on equal processes, as a ratio of step times in one run.

    python -m benchmarks.peers.beside --stage 3        in an environment with DeepSpeed (docs/testbed.md)

Both hold their own copy of the model in the same processes, one per core, and take turns of a few steps: neighbouring
turns are compared, so that a machine whose speed drifts is as slow for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.peers import zero
from mixfleet.cluster import Cluster, Link, Node, device_named
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage

TURNS, STEPS, SAMPLES = 16, 3, 8
"""Turns of each; steps of a turn; samples per process and step."""


def job(processes: int) -> Job:
    return Job(name="gpt-3m", model=build({"layers": 4, "hidden": 256, "heads": 4, "vocab": 512, "max_seq_len": 128}),
               seq_len=128, global_batch=SAMPLES * processes, precision="fp32", attention="fused",
               optimizer=Optimizer(lr=1e-3))


def plan(work: Job, processes: int, stage: int) -> Plan:
    """ZeRO `stage` over all processes, in one micro-batch as DeepSpeed has it."""
    one, many = 1, processes
    return Plan(sharding=Sharding(weights=many if stage == 3 else one, gradients=many if stage >= 2 else one,
                                  optimizer=many),
                pipelines=tuple(Pipeline(stages=(Stage(blocks=(0, len(work.model.blocks)), devices=(rank,)),),
                                         samples=SAMPLES, micro_batch=SAMPLES) for rank in range(processes)))


def _process(rank: int, cores: Sequence[int], stage: int, store: str, results: Any) -> None:
    os.sched_setaffinity(0, {cores[rank]})
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    from mixfleet.run.host import keep_memory
    from mixfleet.run.source import DecoderSource
    from mixfleet.run.worker import Rank

    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(cores))
    work = job(len(cores))
    link = Link(name="loopback", latency_s=60e-6, bandwidth_Bps=1e9)
    here = Cluster(name="here", nodes=(Node(name="here", devices=(device_named("cpu"),) * len(cores), link=link,
                                            nic=link),))
    mine = Rank(plan(work, len(cores), stage), work, here, DecoderSource(work), rank)
    mine.start()
    theirs = zero.stepper(work, stage)
    number = 0

    def ours(step: int) -> None:
        mine.interpreter.step(mine.batches(step), work.optimizer.lr)

    def turn(step: Callable[[int], None]) -> float:
        nonlocal number
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            number += 1
            step(number)
        mine.interpreter.finish()
        dist.barrier()
        return (time.perf_counter() - start) / STEPS

    for step in (ours, theirs):
        turn(step)
    found = [(turn(ours), turn(theirs)) for _ in range(TURNS)]
    if rank == 0:
        results.put(found)
    mine.close()
    dist.barrier()
    os._exit(0)


def measure(stage: int, cores: Sequence[int]) -> list[tuple[float, float]]:
    """Seconds per step of every turn: ours, DeepSpeed's."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="mixfleet-") as folder:
        workers = [context.Process(target=_process, args=(rank, list(cores), stage, f"{folder}/store", results))
                   for rank in range(len(cores))]
        for worker in workers:
            worker.start()
        found: list[tuple[float, float]] = results.get(timeout=600)
        for worker in workers:
            worker.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), action="append")
    options = parser.parse_args(arguments)
    if not zero.installed():
        print("not measured: DeepSpeed is not installed here (docs/testbed.md says how)")
        return 0
    for stage in options.stage or (3,):
        found = measure(stage, sorted(os.sched_getaffinity(0))[:2])
        low, middle, high = quantiles((a / b for a, b in found), n=4)
        ours, theirs = (1e3 * median(times) for times in zip(*found))
        print(f"ZeRO-{stage}, 2 processes: {ours:.1f} ms a step beside DeepSpeed's {theirs:.1f} ms; ratio {middle:.2f} "
              f"(quartiles {low:.2f} and {high:.2f}; limit 1.05)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
