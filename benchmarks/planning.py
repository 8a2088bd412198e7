"""How long predictions, of plans and of kernels, and searches take, and how much memory; each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import Figure

PREDICT = """
import json, time
from mixfleet import Cluster, Job, Pipeline, Plan, Sharding, Stage, predict
job, cluster = Job.load("examples/jobs/llama-3-70b.yaml"), Cluster.load("examples/clusters/h100-128.yaml")
# 16 pipelines of 8 stages, tensor degree 8; one stage to a node.
cuts = [round(i * len(job.model.blocks) / 8) for i in range(9)]
stages = tuple(Stage(blocks=(cuts[s], cuts[s + 1]), tensor=8, recompute="selective",
                     devices=tuple(8 * (8 * r + s) + d for r in range(16) for d in range(8))) for s in range(8))
plan = Plan(pipelines=(Pipeline(stages=stages, samples=64, micro_batch=1, replicas=16),),
            sharding=Sharding(optimizer=16))
times = []
for _ in range(2):
    start = time.perf_counter()
    predict(plan, job, cluster)
    times.append(time.perf_counter() - start)
print(json.dumps({"first_s": times[0], "again_s": times[1], "devices": len(cluster.devices)}))
"""
PLAN = """
import json, resource, time
from mixfleet import Cluster, Job, find
job, cluster = Job.load({job!r}), Cluster.load({cluster!r})
start = time.perf_counter()
result = find(job, cluster)
print(json.dumps({{"s": time.perf_counter() - start, "step_s": result.best.prediction.step_s,
                  "fraction": result.fraction_of_upper_bound, "simulated": result.simulated,
                  "complete": result.complete, "devices": len(cluster.devices),
                  "kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}}))
"""
ALLOCATE = """
import json, time
from mixfleet.search.joint import Option, share
# Four kinds of 16 devices each: every number of samples up to 256, slower ones with more memory.
options = [[Option(n, 3e-3 + 1e-2 * (kind + 1) * n, 20 + 8 * kind - (0.04 + 0.01 * kind) * n) for n in range(257)]
           for kind in range(4)]
start = time.perf_counter()
found = share(options, (16,) * 4, 4096, 900)
taken = time.perf_counter() - start
assert sum(o.samples for row in found.chosen for o in row) == 4096
print(json.dumps({"s": taken}))
"""
KERNELS = """
import json, statistics, time
import numpy as np
from mixfleet.cluster import device_named
from mixfleet.cost.query import predict
device, rows, random = device_named("H100-SXM"), 100_000, np.random.default_rng(0)
def sizes(least, most):
    return np.rint(2 ** random.uniform(np.log2(least), np.log2(most), rows))
def attention():
    length, heads = sizes(128, 16384), 2.0 ** random.integers(2, 7, rows)
    return {"batch": sizes(1, 32), "q_len": length, "kv_len": length, "heads": heads, "kv_heads": np.minimum(heads, 8)}
questions = {
    "GEMM": ("gemm", lambda: {"m": sizes(16, 16384), "n": sizes(64, 16384), "k": sizes(64, 16384)}),
    "attention": ("attention", attention),
    "elementwise": ("stream", lambda: {"rows": sizes(128, 65536), "cols": sizes(128, 16384), "n_in": 2, "op": "add"}),
}
def timed(kind, columns):
    start = time.process_time()
    predict(kind, columns, device)
    return time.process_time() - start
found = {}
for name, (kind, draw) in questions.items():
    timed(kind, {k: v[:10] if np.ndim(v) else v for k, v in draw().items()})
    draws = [draw() for _ in range(5)]
    found[name] = [rows / statistics.median([timed(kind, columns) for columns in draws]) for _ in range(2)]
found["all three in turn"] = [len(found) / sum(1 / row[i] for row in found.values()) for i in (0, 1)]
print(json.dumps(found))
"""
KERNELS_PER_S, REPEATED_PER_S = 100_000, 1_000_000
SEARCHES = (("llama-3-8b", "mixed-lab", 15), ("llama-3-8b", "p4d-64", 30))
"""Job, cluster, seconds allowed."""
PREDICT_LIMIT_S, ALLOCATE_LIMIT_S = 0.2, 1.0
MEMORY_LIMIT_BYTES = 10**9


def _run(code: str) -> Any:
    """What a fresh process prints as JSON; its numerical libraries have one thread."""
    alone = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                          env=os.environ | alone)
    return json.loads(done.stdout)


def figures() -> Iterator[Figure]:
    found = _run(PREDICT)
    yield Figure(f"predict one plan of Llama-3-70B on {found['devices']} GPUs, first / again",
                 f"{found['first_s']:.3f} s / {found['again_s']:.3f} s", f"{PREDICT_LIMIT_S} s",
                 found["first_s"] <= PREDICT_LIMIT_S)
    for kind, (first, again) in _run(KERNELS).items():
        yield Figure(f"kernel predictions per second on one core, {kind}, first / asked again",
                     f"{first:,.0f} / {again:,.0f}", f"{KERNELS_PER_S:,} / {REPEATED_PER_S:,}",
                     first >= KERNELS_PER_S and again >= REPEATED_PER_S)
    seconds = _run(ALLOCATE)["s"]
    yield Figure("share 4,096 samples and the state among 64 devices of four kinds, exactly", f"{seconds:.2f} s",
                 f"{ALLOCATE_LIMIT_S:g} s", seconds <= ALLOCATE_LIMIT_S)
    for job, cluster, limit_s in SEARCHES:
        found = _run(PLAN.format(job=f"examples/jobs/{job}.yaml", cluster=f"examples/clusters/{cluster}.yaml"))
        name = f"plan {job} on {cluster} ({found['devices']} devices)"
        yield Figure(name, f"{found['s']:.1f} s, {found['simulated']} plans simulated", f"{limit_s} s",
                     found["s"] <= limit_s)
        yield Figure(f"{name}, peak memory of the process", f"{found['kib'] * 1024 / 1e6:.0f} MB",
                     f"{MEMORY_LIMIT_BYTES / 1e6:.0f} MB", found["kib"] * 1024 < MEMORY_LIMIT_BYTES)
        yield Figure(f"{name}, best plan of the upper bound", f"{found['fraction']:.0%}")
