"""How long a prediction and a search take, and how much memory; each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

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
SEARCHES = (("llama-3-8b", "mixed-lab", 15), ("llama-3-8b", "p4d-64", 30))
"""Job, cluster, seconds allowed."""
PREDICT_LIMIT_S, ALLOCATE_LIMIT_S = 0.2, 1.0
MEMORY_LIMIT_BYTES = 10**9


def _run(code: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def figures() -> Iterator[Figure]:
    found = _run(PREDICT)
    yield Figure(f"predict one plan of Llama-3-70B on {found['devices']} GPUs, first / again",
                 f"{found['first_s']:.3f} s / {found['again_s']:.3f} s", f"{PREDICT_LIMIT_S} s",
                 found["first_s"] <= PREDICT_LIMIT_S)
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
