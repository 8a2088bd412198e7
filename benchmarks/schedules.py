"""Pipeline schedules for real: beside torch.distributed.pipelining, and beside what the simulator says of them.

Both contenders of a schedule run the same stages in the same processes, in turns, and the median over rounds of the
ratio of two neighbouring steps counts: the speed of a machine moves by a third within a minute, and by the best step of
each, one of them has the luckier moment. For the predictions blocks sleep, forward and in both halves of backward, and
are predicted by what they take when measured alone and what messages take of a process, as any model is; so what is
left is the order and the runtime.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

from benchmarks import Figure

ROUNDS, TRIES, PAIRS, MICRO_BATCHES = 5, 3, 30, 8
RATIO_LIMIT, ERROR_LIMIT = 1.05, 0.05
STREAMED, UPDATES = 4, 14
"""Micro-batches of an update, and updates, of asynchronous schedules."""
UNIT_S = 0.02
LINK_S = 0.015
"""What a message takes on the slow link."""
STAGES = (1, 2, 3, 2)
"""Units that the stages take forward; each half of a backward takes as long."""
NAMES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
         "zb-v": "ScheduleZBVZeroBubble"}


def _cluster(stages: int, times: Any = (), slow: float = 0.0, **costs: float) -> Any:
    """`stages` equal devices, with what messages cost them; in one node or, with `slow`, in nodes of their own of which
    the last is reached through a NIC of so many bytes per second."""
    from mixfleet.cluster import Cluster, Device, Link, Node

    device = Device(name="cpu", kind="cpu", flops={"fp32": 1e11}, vector_flops=1e11, memory_bytes=2**32,
                    memory_Bps=1e10, block_times=times).replace(**costs)
    link = Link(latency_s=5e-5, bandwidth_Bps=1e9)
    if not slow:
        return Cluster(name="bench", nodes=(Node(name="here", devices=(device,) * stages, link=link, nic=link),))
    return Cluster(name="bench", nodes=tuple(
        Node(name=f"node-{s}", devices=(device,), link=link,
             nic=link if s < stages - 1 else link.replace(bandwidth_Bps=slow)) for s in range(stages)))


class _Narrow:
    """What `Fabric.send` does, where messages to and from one rank pass a port of its own in each direction, one after
    another, at so many bytes per second. What collectives send (a few bytes) is not delayed."""

    def __init__(self, fabric: Any, rank: int, bytes_per_s: float, directory: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._fabric, self._rank, self._send, self._rate = fabric, rank, fabric.send, bytes_per_s
        self._directory, self._thread = directory, ThreadPoolExecutor(1)

    def __call__(self, data: Any, dst: int, channel: str, tag: int) -> Any:
        if self._rank not in (dst, self._fabric.rank):
            return self._send(data, dst, channel, tag)
        future = self._thread.submit(self._pass, data, dst, channel, tag)

        class Sent:
            def wait(self) -> None:
                future.result().wait()

        return Sent()

    def _pass(self, data: Any, dst: int, channel: str, tag: int) -> Any:
        import fcntl

        with open(f"{self._directory}/{'in' if dst == self._rank else 'out'}", "a") as port:
            fcntl.flock(port, fcntl.LOCK_EX)
            time.sleep(data.nbytes / self._rate)
            return self._send(data, dst, channel, tag)


def _plan(name: str, blocks: int, stages: int) -> Any:
    """Equal numbers of blocks, two chunks per stage where the schedule wants several; half of the samples in each
    direction where it has two."""
    from mixfleet.plan import Pipeline, Plan, Stage
    from mixfleet.schedule.named import SCHEDULES

    rounds = SCHEDULES[name].rounds
    if SCHEDULES[name].ways == 2:
        cuts = [(s * blocks // stages, (s + 1) * blocks // stages) for s in range(stages)]
        return Plan(schedule=name, pipelines=tuple(Pipeline(  # type: ignore[arg-type]
            samples=MICRO_BATCHES // 2, micro_batch=1,
            stages=tuple(Stage(blocks=cut, devices=(device,)) for cut, device in zip(cuts, devices)))
            for devices in (range(stages), reversed(range(stages)))))
    home = SCHEDULES[name].place(stages, rounds)
    size = blocks // len(home)
    chunks = [[(k * size, (k + 1) * size) for k, h in enumerate(home) if h == s] for s in range(stages)]
    return Plan(schedule=name, pipelines=(Pipeline(  # type: ignore[arg-type]
        samples=MICRO_BATCHES, micro_batch=1, stages=tuple(
            Stage(blocks=c[0], more=tuple(c[1:]), devices=(s,)) for s, c in enumerate(chunks))),))


def _squared(output: Any, target: Any) -> Any:
    return (output - target).square().sum()


# Beside torch


def beside_torch(process: int, world: int) -> dict[str, dict[str, float]]:
    """Schedule -> contender -> median seconds per step, and the median `ratio` of ours to theirs in a round.

    Eight equal blocks on two processes."""
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining as pipelining
    from torch import nn

    from mixfleet.job import Optimizer
    from mixfleet.run.trainer import Trainer
    from mixfleet.run.worker import Rank
    from mixfleet.schedule.named import SCHEDULES

    class Block(nn.Module):
        """A residual, as blocks have; torch's zb-v stops where the output of a stage is a view, as a linear layer's
        is."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.inner(x)
            return out

    found: dict[str, dict[str, float]] = {}
    for name, other in NAMES.items():
        torch.manual_seed(0)
        blocks = [Block() for _ in range(8)]
        inputs, targets = torch.randn(MICRO_BATCHES, 96, 512), torch.randn(MICRO_BATCHES, 96, 512)
        trainer = Trainer(blocks, _squared, inputs, targets, global_batch=MICRO_BATCHES,
                          optimizer=Optimizer(name="sgd", lr=1e-6, momentum=0.0))
        plan = _plan(name, len(blocks), world)
        rank = Rank(plan, trainer.job, _cluster(world), trainer.source, process)
        rank.start()
        batches = rank.batches(0)

        home = SCHEDULES[name].place(world, SCHEDULES[name].rounds)
        size = len(blocks) // len(home)
        torch.manual_seed(0)
        copies = [Block() for _ in range(8)]
        mine = [k for k, h in enumerate(home) if h == process]
        stages = [pipelining.PipelineStage(nn.Sequential(*copies[k * size:(k + 1) * size]), k, len(home),
                                           torch.device("cpu")) for k in mine]
        make = getattr(pipelining, other, None) or getattr(pipelining.schedules, other)
        schedule = make(stages if len(home) > world else stages[0], MICRO_BATCHES, loss_fn=_squared)
        optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=1e-6, fused=True)
        first, last = 0 in mine, len(home) - 1 in mine

        def torch_step(schedule: Any = schedule, first: bool = first, last: bool = last, inputs: Any = inputs,
                       targets: Any = targets, optimizer: Any = optimizer) -> None:
            schedule.step(*([inputs] if first else []), **({"target": targets, "losses": []} if last else {}))
            optimizer.step()
            optimizer.zero_grad()

        def our_step(rank: Any = rank, batches: Any = batches) -> None:
            rank.interpreter.step(batches, 1e-6)

        taken = _turns({"torch": torch_step, "mixfleet": our_step}, dist.barrier, PAIRS)
        found[name] = {who: median(seconds) for who, seconds in taken.items()} | {
            "ratio": median(ours / theirs for ours, theirs in zip(taken["mixfleet"], taken["torch"]))}
        rank.close()
    return found


def _turns(steps: dict[str, Callable[[], None]], barrier: Callable[[], Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each one's step in every round. One step a turn, and the other way round in every second one, so that
    what slows the machine down meets both."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for run in steps.values():
        run()
    for turn in range(rounds):
        for name in list(steps)[::1 if turn % 2 else -1]:
            barrier()
            start = time.perf_counter()
            steps[name]()
            barrier()
            taken[name].append(time.perf_counter() - start)
    return taken


# Beside the simulator


def _wait(seconds: float) -> None:
    """Sleep, and spin for the last bit: sleeping alone takes up to a tenth of a millisecond too long."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - 0.0002))
    while time.perf_counter() < end:
        pass


def _sleepers(units: list[float]) -> list[Any]:
    """Blocks that take `units` forward and in each half of backward, and compute next to nothing."""
    import torch
    from torch import nn

    import mixfleet.run.linear as linear

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            _wait(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            _wait(ctx.seconds)
            return grad, None

    class Sleeper(nn.Module):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)
            self.seconds, self.hooked = seconds, False

        def forward(self, x: Any) -> Any:
            weight = self.linear.weight
            if not self.hooked and self.seconds and weight.requires_grad:
                weight.seconds, self.hooked = self.seconds, True  # type: ignore[attr-defined]
                # Without a gradient it is the input half of a backward: the weight half waits in `slowly`.
                weight.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad: None if grad is None else _wait(self.seconds))
            return nn.functional.linear(Busy.apply(x, self.seconds), weight)  # type: ignore[no-untyped-call]

    if not hasattr(linear, "_plain"):
        linear._plain = linear._accumulate  # type: ignore[attr-defined]

        def slowly(weight: Any, rows: Any, inputs: Any) -> None:
            _wait(getattr(weight, "seconds", 0.0))
            linear._plain(weight, rows, inputs)  # type: ignore[attr-defined]

        linear._accumulate = slowly
    return [Sleeper(n * UNIT_S) for n in units]


def _alone(units: Sequence[float], position: Sequence[int]) -> Callable[..., Any]:
    """Measures what such blocks take with nothing around them, as `Trainer.measure` does, and what messages take of a
    process, as `mixfleet discover --profile` does, on all processes at once. Returns the function that makes the
    cluster for a model and its chain of units, each block with the mean over these. A chain begins with `units[0]`.

    The fastest of a few tries counts for each process, as the fastest step does of what is measured beside it."""
    import torch
    import torch.distributed as dist

    from mixfleet.calibrate.links import messages
    from mixfleet.job import Optimizer
    from mixfleet.run.trainer import Trainer

    kinds = sorted(set(units))
    samples = torch.randn(2, MICRO_BATCHES, *position, 8)
    gauge = Trainer(_sleepers([units[0], *kinds]), _squared, *samples, global_batch=MICRO_BATCHES,
                    optimizer=Optimizer(name="sgd"))
    tries = [[t for t in gauge.measure(_cluster(1)).devices[0].block_times if t.micro_batch == 1]
             for _ in range(TRIES)]
    mine = [(min(t.forward_s for t in times), min(t.backward_s for t in times)) for times in zip(*tries)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, messages()))
    means = [tuple(map(fmean, zip(*found))) for found in zip(*(times for times, _ in everyone))]
    costs = {key: fmean(found[key] for _, found in everyone) for key in everyone[0][1]}

    def cluster(model: Any, chain: Sequence[float], slow: float = 0.0) -> Any:
        found = [means[0 if i == 0 else 1 + kinds.index(n)] for i, n in enumerate(chain)]
        times = tuple(tries[0][0].replace(block=b.kind, forward_s=forward_s, backward_s=backward_s)
                      for b, (forward_s, backward_s) in zip(model.blocks, found))
        return _cluster(dist.get_world_size(), times, slow, **costs)

    return cluster


def beside_simulator(process: int, world: int, names: tuple[str, ...] = (), *, narrow: bool = False
                     ) -> dict[str, dict[str, float]]:
    """Schedule -> predicted and measured seconds per step, for the searched order and every named one of a pipeline
    that drains; or those of `names`. With `narrow`, a message to or from the last rank takes `LINK_S`. All take turns
    of one step, so that a slow minute meets all of them."""
    import torch
    import torch.distributed as dist

    from mixfleet.job import Optimizer
    from mixfleet.run.trainer import Trainer
    from mixfleet.run.worker import Rank
    from mixfleet.schedule.named import SCHEDULES
    from mixfleet.search.reschedule import reschedule
    from mixfleet.search.roundpipe import in_rounds
    from mixfleet.sim import predict

    predicted: dict[str, float] = {}
    ranks: dict[str, Rank] = {}
    steps: dict[str, Callable[[], None]] = {}
    position = [512] if narrow else []
    cluster_of = _alone([n / 2 for n in STAGES], position)
    # Two directions pass the slow link both ways at once; `_Narrow` knows one pipeline.
    named = [name for name, s in SCHEDULES.items() if not s.weights and not (narrow and s.ways > 1)]
    ports = [tempfile.mkdtemp() if process == 0 else ""]
    dist.broadcast_object_list(ports)
    # The workers of roundpipe share the memory of one node.
    for name in names or [*named, *([] if narrow else ["roundpipe"]), "searched"]:
        # Two blocks per stage; where the chain passes a stage twice, one in each chunk.
        plan = _plan(name if name in named else "1f1b", 2 * world, world)
        units = [0.0] * (2 * world)
        for stage, n in zip(plan.pipelines[0].stages, STAGES):
            for b in stage.held:
                units[b] = n / 2  # in two directions a device also has a stage of the other one
        samples = torch.randn(2, MICRO_BATCHES, *position, 8)
        slow = samples[0, 0].nbytes / LINK_S if narrow else 0.0
        trainer = Trainer(_sleepers(units), _squared, *samples, global_batch=MICRO_BATCHES,
                          optimizer=Optimizer(name="sgd", lr=1e-3, momentum=0.0))
        cluster = cluster_of(trainer.job.model, units, slow)
        if name == "searched":
            plan = reschedule(plan, trainer.job, cluster)
        elif name == "roundpipe":
            found_plan = in_rounds(plan, trainer.job, cluster)
            assert not isinstance(found_plan, str)
            plan = found_plan
        rank = Rank(plan, trainer.job, cluster, trainer.source, process)
        rank.start()
        if narrow:
            rank.fabric.send = _Narrow(rank.fabric, world - 1, slow, ports[0])  # type: ignore[method-assign]
        ranks[name], predicted[name] = rank, predict(plan, trainer.job, cluster).step_s
        steps[name] = partial(rank.interpreter.step, rank.batches(0), 1e-3)  # type: ignore[assignment]
    taken = _turns(steps, dist.barrier, ROUNDS)
    for rank in ranks.values():
        rank.close()
    if process == 0:
        shutil.rmtree(ports[0])
    return {name: {"predicted": predicted[name], "measured": min(seconds)} for name, seconds in taken.items()}


def streams_beside_simulator(process: int, world: int) -> dict[str, dict[str, float]]:
    """The same for every asynchronous schedule: seconds per update between fill and drain.

    One pipeline of the same stages as above; of HetPipe, by distance, two virtual workers of two stages, cut unlike,
    one with waves of four and one of six micro-batches."""
    import torch

    from mixfleet.job import Optimizer
    from mixfleet.plan import Pipeline, Plan, Stage, Synchronization
    from mixfleet.run.trainer import Trainer
    from mixfleet.run.worker import Rank
    from mixfleet.schedule.named import SCHEDULES
    from mixfleet.sim import predict

    chain = [n / 2 for n in STAGES for _ in range(2)]
    cut_unlike = [0.0, 2.0, 2.0, 2.0]  # what comes first makes no gradient of its input, so it takes no time
    plans: dict[str, tuple[Any, list[float]]] = {
        name: (Plan(schedule=name, pipelines=(Pipeline(  # type: ignore[arg-type]
            samples=STREAMED, micro_batch=1, stages=tuple(
                Stage(blocks=(2 * s, 2 * s + 2), devices=(s,)) for s in range(world))),)), chain)
        for name, schedule in SCHEDULES.items() if schedule.weights and name != "hetpipe"}
    plans |= {f"hetpipe, distance {distance}": (
        Plan(schedule="hetpipe", synchronization=Synchronization(distance=distance), pipelines=tuple(
            Pipeline(samples=samples, micro_batch=1, stages=(Stage(blocks=(0, cut), devices=(first,)),
                                                             Stage(blocks=(cut, 4), devices=(first + 1,))))
            for first, cut, samples in ((0, 2, 4), (2, 3, 6)))), cut_unlike) for distance in (0, 1)}
    clusters = {tuple(units): _alone(units, []) for units in (chain, cut_unlike)}
    found = {}
    for name, (plan, units) in plans.items():
        batch = plan.global_batch
        trainer = Trainer(_sleepers(units), _squared, torch.randn(batch, 8), torch.randn(batch, 8), global_batch=batch,
                          optimizer=Optimizer(name="sgd", lr=1e-6, momentum=0.0))
        cluster = clusters[tuple(units)](trainer.job.model, units)
        rank = Rank(plan, trainer.job, cluster, trainer.source, process)
        rank.start()
        ends = [result.end_ns for result in rank.advance(UPDATES, lambda: False)]
        rank.close()
        depth = plan.depth + 1
        measured = (ends[-depth - 1] - ends[depth]) / (UPDATES - 2 * depth - 1) / 1e9
        found[name] = {"predicted": predict(plan, trainer.job, cluster).step_s, "measured": measured}
    return found


def _process(process: int, cores: list[int], measure: Callable[[int, int], Any], rendezvous: str, pipe: Any) -> None:
    os.sched_setaffinity(0, {cores[process]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from mixfleet.run.host import keep_memory

    keep_memory()  # as every rank of a run does, here for both sides
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=process, world_size=len(cores))
    found = measure(process, len(cores))
    if process == 0:
        pipe.send(found)
    dist.barrier()
    os._exit(0)


def run(measure: Callable[[int, int], Any], cores: list[int]) -> Any:
    """What `measure` returns on the first of as many processes as cores are given."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=_process, args=(r, cores, measure, f"file://{directory}/r", there))
                 for r in range(len(cores))]
        for rank in ranks:
            rank.start()
        there.close()
        found = here.recv()
        for rank in ranks:
            rank.join()
    return found


def million() -> tuple[float, int, float, float]:
    """Seconds to turn the orders of 8 stages into arrays and to play them, tasks, and gigabytes of the process."""
    import resource

    from mixfleet.schedule.greedy import Work
    from mixfleet.schedule.named import one_f_one_b
    from mixfleet.sim.compiled import pipeline, run

    home = tuple(range(8))
    work = Work(home, 33_400, tuple(k * 1e-3 for k in range(1, 9)), tuple(k * 2.1e-3 for k in range(1, 9)), comm=1e-4)
    orders = one_f_one_b(home, work.micro_batches)
    run(pipeline(work._replace(micro_batches=2), one_f_one_b(home, 2)))  # compiles
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        graph = pipeline(work, orders)
        middle = time.perf_counter()
        run(graph)
        best = min(best, time.perf_counter() - start)
        played = time.perf_counter() - middle
    return best, len(graph.duration_ns), played, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def figures() -> Iterator[Figure]:
    seconds, tasks, played, gigabytes = million()
    yield Figure(f"simulate a pipeline of {tasks:,} actions, arrays included",
                 f"{seconds:.2f} s (walk {played:.2f} s), {gigabytes:.2f} GB", "1 s, 1 GB",
                 seconds <= 1 and gigabytes < 1)
    a, b = sorted(os.sched_getaffinity(0))[:2]
    for name, took in run(beside_torch, [a, b]).items():
        yield Figure(f"step time under {name} beside torch.distributed.pipelining {NAMES[name]}, 2 processes",
                     f"{took['ratio']:.2f} ({took['mixfleet'] * 1e3:.0f} ms beside {took['torch'] * 1e3:.0f} ms)",
                     f"at most {RATIO_LIMIT}", took["ratio"] <= RATIO_LIMIT)
    for narrow, where in ((False, ""), (True, " and a slow link to the last")):
        found = run(partial(beside_simulator, narrow=narrow), [a, b, a, b])
        for name, times in found.items():
            yield _predicted(f"predicted step under {name}, 4 stages of 1:2:3:2{where} on real processes", times)
        wrong = [(x, y) for x in found for y in found if found[x]["predicted"] < 0.98 * found[y]["predicted"]
                 and found[x]["measured"] > found[y]["measured"]]
        yield Figure(f"schedules in the wrong order among those predicted 2 % apart{where.replace('and', 'with')}",
                     str(len(wrong)), "0", not wrong)
    for name, times in run(streams_beside_simulator, [a, b, a, b]).items():
        where = "two virtual workers of two stages" if name.startswith("hetpipe") else "4 stages of 1:2:3:2"
        yield _predicted(f"predicted update under {name}, {where} on real processes", times)


def _predicted(what: str, times: dict[str, float]) -> Figure:
    error = times["predicted"] / times["measured"] - 1
    return Figure(what, f"{error:+.1%} ({times['predicted'] * 1e3:.0f} ms for {times['measured'] * 1e3:.0f} ms)",
                  f"{ERROR_LIMIT:.0%}", abs(error) <= ERROR_LIMIT)
