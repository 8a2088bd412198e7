"""Runs a measurement in fresh processes at the same time, each pinned to its cores, as training would run there.

`python -m mixfleet.calibrate.pinned order.json` is one such process. The processes share a gloo group, by which
measurements start together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from mixfleet.errors import InputError

Cores = tuple[int, ...]
_wait_for_all: Callable[[], None] | None = None
"""What `ready` does in this process, if anything."""


class MeasurementError(InputError):
    """A measuring process died or took too long; the message holds the last line that it wrote."""


def run_pinned(task: str, cores: Sequence[Cores], arguments: dict[str, Any], *, timeout_s: float = 300.0,
               enter: Callable[[int], None] | None = None, environment: Mapping[str, str] | None = None,
               loaded: Callable[[], None] | None = None) -> list[Any]:
    """Call the function named `module:function` with `arguments` once per entry of `cores`, all at the same time.

    An empty entry does not pin. `enter` is called first in every process with its number, to take it where it
    belongs; `environment` is added to each one's; `loaded` is called when all have called `ready`, before any goes on.
    Returns what each call returned (it must be JSON). Raises MeasurementError, and InputError without torch.
    """
    if not find_spec("torch"):
        raise InputError("measuring needs torch: pip install 'mixfleet[run]'")
    with tempfile.TemporaryDirectory(prefix="mixfleet-") as folder:
        workers = []
        for rank, mine in enumerate(cores):
            order = {"task": task, "rank": rank, "world": len(cores), "cores": list(mine), "arguments": arguments,
                     "store": f"{folder}/store", "result": f"{folder}/result-{rank}.json",
                     "go": f"{folder}/go" if loaded else ""}
            path = Path(folder, f"order-{rank}.json")
            path.write_text(json.dumps(order))
            with open(f"{folder}/log-{rank}", "wb") as log:
                workers.append(subprocess.Popen(
                    [sys.executable, "-m", __name__, str(path)], stdout=log, stderr=log,
                    preexec_fn=partial(enter, rank) if enter else None,
                    env=os.environ | {"OMP_NUM_THREADS": str(len(mine) or 1)} | dict(environment or {})))
        try:
            _wait(workers, monotonic() + timeout_s, folder, loaded)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [json.loads(Path(folder, f"result-{rank}.json").read_text()) for rank in range(len(cores))]


def _wait(workers: list[subprocess.Popen[bytes]], until: float, folder: str, loaded: Callable[[], None] | None) -> None:
    while any(w.poll() is None for w in workers):
        if loaded and all(Path(f"{folder}/result-{rank}.json.loaded").exists() for rank in range(len(workers))):
            loaded()
            loaded = None
            Path(folder, "go").touch()
        failed = next((i for i, w in enumerate(workers) if w.poll()), None)
        if failed is not None or monotonic() > until:
            break
        sleep(0.02)
    for rank, worker in enumerate(workers):
        if worker.poll() is None:
            continue
        if worker.returncode:
            log = Path(folder, f"log-{rank}").read_text(errors="replace").strip().splitlines()
            raise MeasurementError(f"measuring process {rank} failed: {log[-1] if log else worker.returncode}")
    if any(w.poll() is None for w in workers):
        raise MeasurementError("the measurement took too long")


def available_cores() -> Cores:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def ready() -> None:
    """Called by a task that has loaded its programs: goes on when all have, and `loaded` of `run_pinned` was called."""
    if _wait_for_all:
        _wait_for_all()


def carry_out(task: str, arguments: dict[str, Any], wait_for_all: Callable[[], None]) -> Any:
    """The task in this process, which is in its process group; `ready` is `wait_for_all` meanwhile."""
    global _wait_for_all
    import torch.distributed as dist

    module, _, name = task.partition(":")
    function = getattr(import_module(module), name)
    _wait_for_all = wait_for_all
    try:
        result = function(**arguments)
    finally:
        _wait_for_all = None
    dist.barrier()
    return result


def _main(path: str) -> None:
    order = json.loads(Path(path).read_text())
    if order["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order["cores"])
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from mixfleet.run.host import keep_memory

    keep_memory()
    torch.set_num_threads(len(order["cores"]) or 1)
    dist.init_process_group("gloo", init_method=f"file://{order['store']}", rank=order["rank"],
                            world_size=order["world"])

    def wait_for_all() -> None:
        if order["go"]:
            Path(f"{order['result']}.loaded").touch()
            while not Path(order["go"]).exists():
                sleep(0.01)

    here = import_module("mixfleet.calibrate.pinned")  # this file is `__main__`, which tasks do not know
    result = here.carry_out(order["task"], order["arguments"], wait_for_all)
    Path(order["result"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1])
