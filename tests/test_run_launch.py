"""Local ranks, torchrun, interrupts, deaths and resumed runs, as a user meets them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from mixfleet.errors import InputError
from mixfleet.job import Data, Job
from mixfleet.run import TrainError, TrainResult, torchrun_commands, train
from mixfleet.run.checkpoint import Reader, latest
from mixfleet.run.host import calm_network_threads
from mixfleet.run.metrics import StepMetrics
from mixfleet.run.source import DecoderSource
from run_pool import CLUSTER, Case, job, pipe, plan, reference

torch.set_num_threads(1)
PAIR = plan(pipe((0, 5), (0,), samples=4, micro_batch=3), pipe((0, 5), (2,), samples=2, micro_batch=2),
            sharding=(1, 1, 2))
PIPELINE = plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=2))


def _long() -> Job:
    return job().replace(steps=100_000)


class _Leaves:
    """Writes down what threads a rank still has when its interpreter ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, rank: int) -> None:
        atexit.register(self._write, rank)

    def _write(self, rank: int) -> None:
        names = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with suppress(OSError):  # a thread that has just ended
                names.append(path.read_text().strip())
        (self.path / f"threads-{rank}").write_text(json.dumps([*names, *(t.name for t in threading.enumerate())]))


def test_resumes_under_another_plan(tmp_path: Path) -> None:
    reported: list[StepMetrics] = []
    first = train(PIPELINE, job(), CLUSTER, steps=2, out_dir=tmp_path, on_step=reported.append,
                  enter=_Leaves(tmp_path))
    assert first is not None
    for rank in (0, 1):  # a thread of a process group that meets an interpreter which ends aborts the process
        left = json.loads((tmp_path / f"threads-{rank}").read_text())
        assert "MainThread" in left
        assert not [name for name in left if "gloo" in name or "_look" in name]
    then = train(PAIR, job(), CLUSTER, steps=4, out_dir=tmp_path, resume=tmp_path / "checkpoints", trace_steps=1)
    assert then is not None
    expected = reference(Case(PAIR, job()))
    assert [*first.losses, *then.losses] == pytest.approx(expected.losses, rel=1e-9)
    assert [(m.step, m.tokens) for m in reported] == [(1, 48), (2, 48)]
    reader = Reader(tmp_path / "checkpoints")
    assert (reader.state.step, reader.state.position) == (4, 24)
    for key, value in expected.weights.items():
        assert torch.allclose(reader.read(key, "weights", 0, len(value)), value, rtol=0, atol=1e-9)
    _assert_measured(then)


def _assert_measured(result: TrainResult) -> None:
    trace = result.trace
    assert trace is not None
    assert trace.devices == (0, 2)
    (start, end), = trace.steps_ns
    for device in (0, 2):
        spans = [s for s in trace.spans if s.device == device]
        assert {"forward", "backward", "reduce", "gather", "optimizer"} == {s.category for s in spans}
        assert all(start <= s.start_ns <= s.end_ns <= end for s in spans)
    held = {r.rank: sum(r.state_bytes.values()) for r in result.ranks}
    for device in (0, 2):
        marks = [m.total_bytes for m in trace.memory if m.device == device]
        assert min(marks) >= held[device]
        assert max(marks) > min(marks)  # saved activations come and go


def _spawned() -> list[psutil.Process]:
    """Children that multiprocessing started: the ranks of runs, and of other tests' groups that live on."""
    return [c for c in psutil.Process().children() if "spawn_main" in " ".join(c.cmdline())]


def test_a_killed_rank_ends_the_run_with_one_message(tmp_path: Path) -> None:
    others = _spawned()

    def kill(metrics: StepMetrics) -> None:
        if metrics.step == 6:
            [c for c in _spawned() if c not in others][-1].kill()

    with pytest.raises(TrainError) as caught:
        train(PAIR, _long(), CLUSTER, out_dir=tmp_path, checkpoint_every=2, on_step=kill)
    message = str(caught.value)
    assert message.startswith("rank 2 (cpu on node here) was killed by SIGKILL, after step ")
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None
    assert message.endswith(f"The last checkpoint is {saved}.")
    assert Reader(saved).state.step >= 4


def _complete(root: Path, step: int) -> Path:
    """What a reader takes for a complete checkpoint."""
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "index.json").write_text("{}")
    return path


def test_a_checkpoint_that_no_rank_lived_to_tell_of_is_named(tmp_path: Path) -> None:
    others = _spawned()
    saved: list[Path] = []

    def kill(metrics: StepMetrics) -> None:
        if metrics.step == 2:
            saved.append(_complete(tmp_path / "checkpoints", 2))
            next(c for c in _spawned() if c not in others).kill()

    with pytest.raises(TrainError) as caught:
        train(PAIR, _long(), CLUSTER, out_dir=tmp_path, on_step=kill)
    assert str(caught.value).endswith(f"The last checkpoint is {saved[0]}.")


class _Stuck(DecoderSource):
    """Rank 2 never gets the data of its third step."""

    def batch(self, step: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 2 and lo >= 4:
            time.sleep(1000)
        return super().batch(step, lo, hi)


def test_a_rank_that_waits_too_long_says_in_which_action(tmp_path: Path) -> None:
    with pytest.raises(TrainError) as caught:
        train(PAIR, _long(), CLUSTER, source=_Stuck(_long()), out_dir=tmp_path, patience_s=8)
    message = str(caught.value)
    assert message.startswith("rank 0 (cpu on node here): has been at N for 8 s (under way: Y")
    assert " with rank 2), after step 2; the other ranks were stopped." in message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    def interrupt(metrics: StepMetrics) -> None:
        if metrics.step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = train(PAIR, _long(), CLUSTER, out_dir=tmp_path, on_step=interrupt)
    assert result is not None
    assert result.stopped
    assert 3 <= result.step == Reader(tmp_path / "checkpoints").state.step == len(result.losses) < 1000
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_trains_from_a_thread() -> None:
    found: list[TrainResult | None] = []
    thread = threading.Thread(target=lambda: found.append(train(PAIR, job(), CLUSTER, steps=1)))
    thread.start()
    thread.join()
    assert found[0] is not None
    assert len(found[0].losses) == 1


def test_bad_input_in_a_rank_is_one_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data file 'nothing\.txt'"):
        train(PAIR, job(data=Data(kind="text", path=str(tmp_path / "nothing.txt"))), CLUSTER)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="no complete checkpoint"):
        train(PAIR, job(), CLUSTER, resume=tmp_path / "checkpoints")


def test_an_impossible_plan_is_refused() -> None:
    with pytest.raises(InputError, match="global batch"):
        train(PAIR, job(7), CLUSTER)


@pytest.mark.slow
def test_torchrun_starts_what_the_plan_says(tmp_path: Path) -> None:
    (node, command), = torchrun_commands(PAIR, CLUSTER, ["plan.yaml"])
    assert node == "here"
    assert command == ("torchrun --nnodes=1 --node-rank=0 --nproc-per-node=2 --master-addr=here --master-port=29500 "
                       "--no-python mixfleet train plan.yaml")
    script = tmp_path / "script.py"
    script.write_text(f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from run_pool import CLUSTER, job
from test_run_launch import PAIR
from mixfleet.run import train
result = train(PAIR, job(), CLUSTER, steps=2)
if result:
    print(json.dumps(result.losses))
""")
    def torchrun(processes: int) -> subprocess.CompletedProcess[str]:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})

    done = torchrun(2)
    assert json.loads(done.stdout) == pytest.approx(reference(Case(PAIR, job(), 2)).losses, rel=1e-9), done.stderr
    assert "torchrun started 1 processes; the plan has 2 ranks" in torchrun(1).stderr


def test_commands_follow_uneven_nodes() -> None:
    big, small = CLUSTER.nodes[0], CLUSTER.nodes[0].replace(name="there", devices=CLUSTER.devices[:2])
    two = CLUSTER.replace(nodes=(big, small))
    wide = plan(pipe((0, 5), (0, 1, 2, 3, 4), samples=1, micro_batch=1, replicas=5))
    first, second = torchrun_commands(wide, two, ["p.yaml", "--out", "a b"])
    assert first[0] == "here"
    assert "--nnodes=2 --node-rank=0 --nproc-per-node=4 --master-addr=here" in first[1]
    assert "--nnodes=2 --node-rank=1 --nproc-per-node=1 --master-addr=here" in second[1]
    assert second[1].endswith("mixfleet train p.yaml --out 'a b'")


def test_a_rank_that_stops_answering_early_does_not_hang(tmp_path: Path) -> None:
    """A death before training starts is noticed as well."""
    started, others = time.monotonic(), _spawned()
    _complete(tmp_path / "checkpoints", 9)  # of an earlier run, which this one does not resume

    def kill() -> None:
        while time.monotonic() - started < 30:
            ranks = [c for c in _spawned() if c not in others]
            if ranks:
                ranks[0].kill()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(TrainError, match=r"rank \d .*SIGKILL.*There is no checkpoint yet"):
        train(PAIR, _long(), CLUSTER, out_dir=tmp_path)
    thread.join()
    assert time.monotonic() - started < 20


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_threads_of_gloo_do_not_interrupt_others():
    told, over, threads = threading.Event(), threading.Event(), {}

    def live(name):
        threads[name] = threading.get_native_id()
        Path(f"/proc/self/task/{threads[name]}/comm").write_text(name)
        if len(threads) == 2:
            told.set()
        over.wait()

    both = [threading.Thread(target=live, args=(name,)) for name in ("gloo_tcp_loop", "pt_gloo_runloop")]
    for one in both:
        one.start()
    try:
        assert told.wait(10)
        calm_network_threads()
        assert os.sched_getscheduler(threads["gloo_tcp_loop"]) == os.SCHED_BATCH
        assert os.sched_getscheduler(threads["pt_gloo_runloop"]) == os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        over.set()
        for one in both:
            one.join()
