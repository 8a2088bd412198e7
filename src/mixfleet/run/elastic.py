"""One process under an elastic `torchrun`: whenever its agents meet anew, a plan for the nodes that are there.

The agents start all processes again when one of them fails, when a node is gone, and when a node wants to join. What
they start here says where it is, gets the plan that is made for what is there, and resumes from the newest checkpoint
(which any plan can read). Only what a checkpoint holds counts as trained, and the order of samples belongs to the job:
so no sample that counts is trained twice or left out. Processes that the plan does not need wait for the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError, RunError, unknown
from mixfleet.job import Job
from mixfleet.plan import Plan
from mixfleet.run.launch import Options, TrainResult, as_process
from mixfleet.run.metrics import StepMetrics
from mixfleet.spec import Spec

LEGS = "legs.jsonl"
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, torchrun's processes meet at a store of their own every time; else they find what the last time left."""
_RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3"
"""A node that is silent for 4 s is gone; those that are left wait 3 s for others before they begin."""
_MEET = timedelta(minutes=5)
_LOOK_S, _BEAT_S = 0.2, 0.5
_LEAVE_S = 30.0
"""How long a process that was told to stop by others waits until its own agent ends it."""


class Leg(Spec, frozen=True, kw_only=True):
    """One stretch of training under one plan."""

    first_step: int
    """Steps that were done before it."""
    last_step: int
    """Steps that are done and saved after it."""
    nodes: tuple[str, ...]
    plan: Plan
    """Ranks are numbered through `nodes`."""
    seconds: float
    failure: str = ""
    noticed_s: float = 0.0
    """From the last step done to the failure's message."""


class Begun(Spec, frozen=True, kw_only=True):
    """A line of `legs.jsonl`: a leg that begins."""

    first_step: int
    nodes: tuple[str, ...]
    plan: Plan
    at: float
    """Seconds since 1970."""


class _Place(NamedTuple):
    """Where this process is among those that are there."""

    cluster: Cluster
    """Of the nodes that are there."""
    process: dict[int, int]
    """By rank of that cluster, the process of torchrun."""
    rank: int


def newest(out: Path) -> int:
    """Steps done according to the newest checkpoint of a run; 0 if there is none."""
    from mixfleet.run.checkpoint import Reader, latest

    path = latest(out / "checkpoints")
    return Reader(path).state.step if path else 0


def legs(out: Path) -> list[Begun]:
    """What a run has left in its folder; a line that was cut off by a kill is not one."""
    found = []
    path = out / LEGS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(msgspec.json.decode(line, type=Begun))
        except msgspec.DecodeError:
            continue
    return found


def take_part(job: Job, cluster: Cluster, out: Path, *, node: str, steps: int, checkpoint_every: int,
              plan_for: Callable[[Job, Cluster], Plan], patience_s: Callable[[Plan, Cluster], float],
              base: Path | str = "", on_step: Callable[[StepMetrics], None] | None = None,
              say: Callable[[str], None] = lambda line: None) -> TrainResult | None:
    """Be one of torchrun's processes, on `node` of the cluster, from one meeting of the agents to the next.

    `out` is a folder that all nodes see. Returns the result on the first rank of the plan. Ends the process with exit
    code 1 where others were told to stop and it was not: torchrun must not take that for success. InputError for a node
    or number of processes that the cluster does not have, and if no plan fits what is there.
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if node not in {n.name for n in cluster.nodes}:
        raise unknown(f"node in {cluster.name}", node, [n.name for n in cluster.nodes])
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise InputError("this is a process of torchrun: start it by the commands that `--commands` prints")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise InputError(f"torchrun's processes share a store that outlives a restart; set {SHARED_STORE}=1")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    store, process, world = next(iter(rendezvous("env://", timeout=_MEET)))
    here = _meet(store, process, world, cluster, node)
    with _beating(store.clone(), process):
        done = newest(out)
        if process == 0:
            plan = plan_for(job, here.cluster)
            used = dict.fromkeys(here.cluster.nodes[here.cluster.node_of[r]].name for r in plan.ranks)
            say(f"step {done}: {len(plan.ranks)} of {len(here.process)} devices, on {', '.join(used)}")
            out.mkdir(parents=True, exist_ok=True)
            with open(out / LEGS, "ab") as file:
                begun = Begun(first_step=done, nodes=tuple(n.name for n in here.cluster.nodes), plan=plan,
                              at=time.time())
                file.write(msgspec.json.encode(begun) + b"\n")
            store.set("plan", msgspec.json.encode(plan).decode())
        plan = msgspec.json.decode(store.get("plan"), type=Plan)
        result: TrainResult | None = None
        if here.rank in plan.ranks:
            options = Options(steps=steps, out_dir=str(out), resume=str(out / "checkpoints") if done else "",
                              checkpoint_every=checkpoint_every, patience_s=patience_s(plan, here.cluster))
            result = as_process(plan, job, here.cluster, plan.ranks.index(here.rank), options, base=Path(base),
                                on_step=on_step, store=PrefixStore("train", store), stop=asked.is_set)
            if result:
                store.set("over", "stopped" if result.stopped else "done")
        over = _over(store, process, here, patience_s(plan, here.cluster))
        if over == "stopped" and not asked.wait(_LEAVE_S):
            print(f"error: {node}: others were told to stop, and this process was not", file=sys.stderr, flush=True)
            os._exit(1)
        return result


def _meet(store: Any, process: int, world: int, cluster: Cluster, node: str) -> _Place:
    """Tell the others where we are, and hear where they are. InputError unless whole nodes are there."""
    store.set(f"at/{process}", json.dumps([node, int(os.environ["LOCAL_RANK"])]))
    at: dict[tuple[str, int], int] = {}
    for other in range(world):
        name, local = json.loads(store.get(f"at/{other}"))
        if (name, local) in at:
            raise InputError(f"two agents of torchrun say that they are on node {name}")
        at[name, local] = other
    there = {name for name, _ in at}
    part, _ = cluster.without({n.name for n in cluster.nodes} - there)
    for n in part.nodes:
        count = sum(name == n.name for name, _ in at)
        if count != len(n.devices):
            raise InputError(f"torchrun started {count} processes on node {n.name}, which has {len(n.devices)} "
                             f"devices: give its agent --nproc-per-node={len(n.devices)}")
    by_rank = {rank: at[part.nodes[i].name, part.local_of[rank]] for i, ranks in enumerate(part.ranks_of_node)
               for rank in ranks}
    return _Place(part, by_rank, next(r for r, p in by_rank.items() if p == process))


@contextmanager
def _beating(store: Any, process: int) -> Iterator[None]:
    """Tell that this process lives, while the context lasts and the store is there."""
    over = threading.Event()

    def beat() -> None:
        with suppress(Exception):
            while not over.is_set():
                store.add(f"alive/{process}", 1)
                over.wait(_BEAT_S)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:  # a thread in the store while the interpreter ends aborts the process
        over.set()
        thread.join(_BEAT_S)


def _over(store: Any, process: int, here: _Place, patience_s: float) -> str:
    """How it ended, once it has. The first process, at which the store is, stays until all know. RunError if a process
    gives no sign of life: those that do not train would not notice otherwise."""
    heard: dict[int, tuple[int, float]] = {}
    while not store.check(["over"]):
        now = time.monotonic()
        for rank, other in here.process.items():
            count = store.add(f"alive/{other}", 0)
            known, since = heard.get(other, (-1, now))
            if count != known:
                heard[other] = count, now
            elif now - since > patience_s:
                name = here.cluster.nodes[here.cluster.node_of[rank]].name
                raise RunError(f"rank {rank} on node {name} has not answered for {patience_s:.3g} s")
        time.sleep(_LOOK_S)
    world = len(here.process)
    over: str = store.get("over").decode()
    known, until = store.add("known", 1), time.monotonic() + _LEAVE_S
    while process == 0 and known < world and time.monotonic() < until:
        time.sleep(_LOOK_S)
        known = store.add("known", 0)
    return over


def elastic_commands(cluster: Cluster, arguments: Sequence[str], *, port: int = 29500, least: int = 1,
                     restarts: int = 20) -> list[tuple[str, str]]:
    """(node, command) for the agent of every node. They meet at the first node, which must stay: torchrun's own
    meeting place is there."""
    import shlex

    head = cluster.nodes[0].name
    found = []
    for node in cluster.nodes:
        words = ["torchrun", *agent_options(len(node.devices), len(cluster.nodes), f"{head}:{port}",
                                            cluster.name.replace(" ", "-"), least=least, restarts=restarts),
                 "--no-python", "mixfleet", "elastic", *arguments, "--machine", node.name]
        found.append((node.name, f"{SHARED_STORE}=1 " + shlex.join(words)))
    return found


def agent_options(processes: int, nodes: int, endpoint: str, id: str, *, least: int = 1, restarts: int,
                  head: bool | None = None) -> list[str]:
    """What torchrun is told on a node with so many processes, of `least` to `nodes` nodes. They meet at `endpoint`;
    `head` says whether that is this node, where torchrun cannot see it from the name."""
    host = "" if head is None else f",is_host={head}"
    return [f"--nnodes={least}:{nodes}", f"--nproc-per-node={processes}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}", f"--rdzv-id={id}", f"--rdzv-conf={_RENDEZVOUS}{host}",
            f"--max-restarts={restarts}"]
