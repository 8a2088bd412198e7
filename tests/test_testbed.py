"""The testbed: what a cluster file becomes, and (as root) that links, quotas, cleaning up and recovery are real."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks import testbed as bench

from mixfleet.calibrate import kernels
from mixfleet.cli import main
from mixfleet.cluster import BlockTime, Cluster, Link, Node, device_named
from mixfleet.errors import InputError, RunError
from mixfleet.job import Optimizer
from mixfleet.plan import Sharding
from mixfleet.report import chrome, html, views
from mixfleet.run import train
from mixfleet.run.checkpoint import Reader
from mixfleet.sim import predict
from mixfleet.testbed import Support, emulate_gpus, laid_out, leftovers, probe
from mixfleet.testbed import Testbed as Bed
from mixfleet.testbed import testbeds as standing
from mixfleet.testbed.elastic import train_by_torchrun, train_elastically
from mixfleet.testbed.faults import Fault, Schedule, explained, injected
from mixfleet.testbed.layout import PAYLOAD, PROCESS_BYTES, period_us
from run_pool import CLUSTER, Case, job, pipe, plan, reference

MISSING = probe().missing
as_root = [pytest.mark.root, pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "never")]
HERE = Support(root=True, qdiscs=("tbf", "htb"), cpu="/cpu", memory="/memory", cores=(0, 1))
INNER = Link(latency_s=3e-5, bandwidth_Bps=1e9)
CPU = device_named("cpu").replace(memory_bytes=2**30)
WIDE = {"hidden": 64, "ffn": 128}
BOTH = plan(pipe((0, 5), (0,), samples=4, micro_batch=2), pipe((0, 5), (1,), samples=2, micro_batch=1),
            sharding=(2, 2, 2))
ALONE = plan(pipe((0, 5), (0,), samples=6, micro_batch=6))
DATA = Path(__file__).parent.parent / "examples"


def cluster(*shares: float, mbps: float = 100, **changes: object) -> Cluster:
    nodes = tuple(Node(name=f"n{i}", devices=(CPU.replace(share=s),), link=INNER, zone="ab"[i % 2], rack=str(i),
                       nic=Link(name="nic", latency_s=2e-5, bandwidth_Bps=mbps * 1e6 / 8))
                  for i, s in enumerate(shares))
    return Cluster(name="toy", nodes=nodes, **changes)


# --- plain values --------------------------------------------------------------------------------------------------

def test_nodes_hang_on_the_bridges_that_limit_them():
    wan, top = Link(latency_s=1e-3, bandwidth_Bps=3e6), Link(latency_s=1e-4, bandwidth_Bps=7e6)
    found = laid_out(cluster(.5, .5, .5, zone_uplink=wan, rack_uplink=top), "x", HERE)
    bridge = {w.peer if w.namespace != found.switch else w.name: w for w in found.wires}
    assert found.bridges == ("core", "zone0", "rack0", "zone1", "rack1", "rack2")
    assert [w.bridge for w in found.wires if w.namespace != found.switch] == ["rack0", "rack1", "rack2"]
    assert {n: (w.upper, w.rate_Bps) for n, w in bridge.items() if w.upper} == {
        "zone0up": ("core", 3e6), "zone1up": ("core", 3e6), "rack0up": ("zone0", 7e6), "rack1up": ("zone1", 7e6),
        "rack2up": ("zone0", 7e6)}


def test_without_uplinks_all_share_one_bridge():
    found = laid_out(cluster(.5, .25), "x", HERE)
    assert found.bridges == ("core",)
    assert found.addresses == {"n0": "10.77.0.1", "n1": "10.77.0.2"}
    assert all("rate 100000000bit" in w.out and "netem" not in w.out for w in found.wires)
    assert found.seats[1].memory_bytes == 2**30 + PROCESS_BYTES


def test_delay_is_set_where_the_kernel_can():
    found = laid_out(cluster(.5, .25), "x", HERE.replace(qdiscs=("tbf", "htb", "netem")))
    assert "netem delay 20us" in found.wires[0].out
    assert any("netem" in line for line in HERE.instead)


def test_a_matrix_gives_each_pair_its_rate():
    rates = ((0.0, 3e6), (5e6, 0.0))
    found = laid_out(cluster(.5, .25, node_matrix_Bps=((1.0, 3e6), (5e6, 1.0))), "x", HERE)
    for node, row, other in (("n0", rates[0][1], "10.77.0.2"), ("n1", rates[1][0], "10.77.0.1")):
        text = "\n".join(found.classes[node])
        assert f"ceil {round(row * 8)}bit" in text
        assert f"dst {other}/32" in text


def test_quotas_are_short_and_not_below_the_kernels_smallest():
    assert period_us(1.0) == period_us(0.2) == 5000
    assert period_us(0.05) * 0.05 == pytest.approx(1000)


def test_shares_are_packed_on_cores():
    found = laid_out(cluster(.7, .6, .3, .4), "x", HERE)
    assert [s.cores for s in found.seats] == [(0,), (1,), (0,), (1,)]
    assert [s.cores for s in laid_out(cluster(.7, .7, .6), "x", HERE).seats] == [()] * 3


@pytest.mark.parametrize(("wanted", "says"), [
    (cluster(.9, .9, .9), "take 2.7 cores together; this machine has 2"),
    (cluster(.5, .5, mbps=40_000), "n0 has a NIC of 40 Gb/s"),
])
def test_refuses_what_the_machine_cannot_be(wanted, says):
    with pytest.raises(InputError, match=says.replace(".", r"\.")):
        laid_out(wanted, "x", HERE)


def test_gpus_only_emulated_and_in_proportion():
    lab = Cluster.load(DATA / "clusters/mixed-lab.yaml")
    with pytest.raises(InputError, match="--emulate"):
        laid_out(lab, "x", HERE)
    slow, note = emulate_gpus(lab, HERE)
    assert "emulated" in note
    assert sum(d.share for d in slow.devices) == pytest.approx(1.8, rel=1e-2)
    a, b = lab.devices[0], lab.devices[-1]
    assert slow.devices[0].share / slow.devices[-1].share == pytest.approx(
        max(a.flops[t] for t in a.flops if t in ("bf16", "fp16")) /
        max(b.flops[t] for t in b.flops if t in ("bf16", "fp16")), rel=1e-2)
    factor = slow.nodes[0].nic.bandwidth_Bps / lab.nodes[0].nic.bandwidth_Bps
    assert factor == pytest.approx(slow.nodes[-1].nic.bandwidth_Bps / lab.nodes[-1].nic.bandwidth_Bps)
    laid_out(slow, "x", HERE)


def test_what_is_emulated_is_said_on_every_page_and_in_every_file(tmp_path):
    slow, _ = emulate_gpus(Cluster.load(DATA / "clusters/mixed-lab.yaml"), HERE)
    slow.save(tmp_path / "slow.yaml")
    again = Cluster.load(tmp_path / "slow.yaml")
    said = f"{again.devices[0].name}, emulated on a CPU at"
    assert said in again.note
    found = predict(ALONE, job(), again, trace=True)
    assert said in html.of_prediction("title", ALONE, found, cluster=again)
    assert any(said in value for _, value in views.plan(ALONE, again).facts)
    chrome.write_trace(found.trace, tmp_path / "t.json")
    trace = chrome.read_trace(tmp_path / "t.json")
    assert said in html.render("Predicted against measured", traces=[("predicted", trace)])
    assert "emulated" not in html.render("Predicted against measured")
    assert CLUSTER.note == ""


@pytest.mark.parametrize(("fields", "says"), [
    ({"do": "kil", "rank": 1}, "kill"), ({"do": "kill"}, "needs a rank"), ({"do": "cut"}, "needs a node"),
    ({"do": "slow", "rank": 0}, "share"), ({"do": "degrade", "node": "a", "rate": "fast"}, "rate"),
])
def test_faults_are_checked(fields, says):
    with pytest.raises(InputError, match=says):
        Fault(**fields)


def test_schedules_name_the_line(tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text("faults:\n- {do: kill, rank: 1, at_step: 3}\n- {do: cut, noed: n1}\n")
    with pytest.raises(InputError, match="noed"):
        Schedule.load(path)


def test_a_dry_run_names_every_step_and_does_none(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    cluster(.5, .25).save(path)
    assert main(["testbed", "up", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "ip netns add mixfleet-ID-n0" in out
    assert "tbf rate 100000000bit" in out
    assert "cgroup of rank 1 on n1: 0.25 of a core" in out


def test_without_root_it_says_so(tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.yaml"
    cluster(.5, .25).save(path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["testbed", "up", str(path)]) == 2
    shown = capsys.readouterr()
    assert "root is needed" in shown.err
    assert "netns add" in shown.out


def test_a_slower_machine_takes_longer_to_compute_and_as_long_to_send():
    job_, wide = job(figures=WIDE), cluster(.5, .25, mbps=1)
    kinds = ("gemm", "attention", "norm", "softmax", "loss", "elementwise", "embedding", "optimizer")
    devices = [d.replace(message_cpu_s=0.0, byte_cpu_s=0.0, sum_cpu_s=0.0, turn_s=0.0, launch_s=0.0,
                         efficiency=dict.fromkeys(kinds, .5)) for d in wide.devices]
    wide = wide.replace(nodes=tuple(n.replace(devices=(d,)) for n, d in zip(wide.nodes, devices)))
    alone, both = (predict(p, job_, wide).step_s for p in (ALONE, BOTH))
    slow = bench.at_speed(wide, [1.5, 1.5])
    assert predict(ALONE, job_, slow).step_s == pytest.approx(1.5 * alone, rel=1e-3)
    sending_s = both - alone
    assert predict(BOTH, job_, slow).step_s == pytest.approx(both, abs=1.5 * alone)
    assert sending_s > 10 * alone
    one = bench.at_speed(wide, [1.0, 1.5])
    assert one.devices[0] == wide.devices[0]
    assert one.devices[1] == slow.devices[1]


def test_a_gauge_tells_how_many_times_as_long_as_in_the_profile_blocks_take(monkeypatch):
    """0.03 s each by the clock, 0.008 and 0.012 s in the profile; it begins when all are there."""
    job = bench._job("tiny", layers=6, hidden=16, seq_len=8, batch=4)
    kinds = {b.kind for b in job.model.blocks}
    device = device_named("cpu").replace(block_times=tuple(
        BlockTime(block=kind, micro_batch=size, seq_len=8, precision="fp32", forward_s=.004 * size,
                  backward_s=.006 * size) for kind in kinds for size in (1, 2)))
    seen, meetings = [], []
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(kernels, clock, lambda: seen.append(0) or .03 * len(seen))
    found = kernels.Gauge(job, device).slower(2, .05, lambda: meetings.append(len(seen)))
    assert found == pytest.approx(2 * .03 / .02)
    assert meetings == [0], "once, before anything is timed"


@pytest.mark.parametrize(("first", "passes"), [(.10, 3), (.12, 4), (10.0, 6)])
def test_blocks_are_measured_until_the_passes_agree(monkeypatch, first, passes):
    """With 0.13 before passes of 0.11, the mean of three is 6.06 % above the last, and that of four 4.5 %."""
    monkeypatch.setattr(kernels, "_slowest", lambda value: value)
    seen = []

    def measure(size, new):
        seen.append((size, new))
        return [(.01 * size, (first if new else .10) * size)]

    found = kernels._passes([1, 4, 16], measure)
    assert [*found] == ([1] if first == 10 else [1, 4, 16]), "whatever is beyond a size that takes long is left out"
    assert {len(times) for times in found.values()} == {passes}
    assert [new for _, new in seen] == [True] * len(found) + [False] * (len(seen) - len(found))


def row(cluster, name, predicted, measured, **more):
    return bench.Row(cluster, name, predicted, measured, True, 1.0, .5 * measured, **more)


def test_a_run_that_is_killed_keeps_its_rows_and_goes_on(tmp_path, monkeypatch, capsys):
    done = [row("equal", "ZeRO-3", 2.2, 2.0, plain_s=1.8, parts=((0, "forward", 1.0, 1.1),)),
            bench.Row("equal", "groups of 2", None, None, None, None, None, "failed: rank 2: no answer")]
    asked = []

    def first(name, cluster, **more):
        yield from done
        raise KeyboardInterrupt

    def second(name, cluster, known, **more):
        asked.append((name, known))
        yield row(name, "torch DDP", None, 3.0)

    monkeypatch.setattr(bench, "measure", first)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--out", str(tmp_path), "--only", "equal"])
    assert bench.load(tmp_path) == done
    monkeypatch.setattr(bench, "measure", second)
    bench.main(["--out", str(tmp_path), "--only", "equal", "--only", "two regions", "--resume"])
    assert asked == [("equal", {"ZeRO-3"}), ("two regions", set())]
    assert [(r.cluster, r.name) for r in bench.load(tmp_path)] == [
        ("equal", "ZeRO-3"), ("equal", "groups of 2"), ("equal", "torch DDP"), ("two regions", "torch DDP")]
    assert "+10.0%" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "scatter.svg").exists()
    capsys.readouterr()
    bench.main(["--out", str(tmp_path), "--only", "equal"])
    assert [r.name for r in bench.load(tmp_path)] == ["torch DDP"], "a new run begins anew"


def test_rows_of_several_runs_make_one_table():
    first = [row("equal", "ZeRO-3", 2.2, 2.0, plain_s=1.8, parts=((0, "forward", 1.0, 1.1),)),
             row("equal", bench.CHOSEN, .95, 1.0, plain_s=1.0), row("slow link", "ZeRO-3", 3.0, 4.0)]
    again = [row("slow link", "ZeRO-3", 3.9, 3.0), row("one slow", "ZeRO-3", 5.0, 4.0)]
    rows = bench.merged(again, first)
    assert [(r.cluster, r.measured_s) for r in rows] == [("equal", 2.0), ("equal", 1.0), ("one slow", 4.0),
                                                         ("slow link", 3.0)]
    assert rows[0] == first[0]
    assert bench.errors(rows) == pytest.approx([.05, .1, .25, .3])
    assert bench.errors(rows, plain=True) == pytest.approx([0, .1])
    (equal, *_) = bench.summaries(rows)
    assert (equal.tau, equal.behind_best, equal.of_bound) == (1.0, 0.0, 0.5)
    used = row("three tiers", bench.CHOSEN, 1.0, 2.0, cpu_s=(.5, .13, .26, .11))
    assert bench.busy(used) == pytest.approx([.5, .25, 1.0, .5])
    assert bench.summaries([used])[0].of_core == pytest.approx(1.0)
    lucky = row("equal", "ZeRO-3", 2.2, 2.0, speed=.8)  # it met faster cores: 2.5 s as they were beside the profile
    (equal,) = bench.summaries([lucky, row("equal", bench.CHOSEN, 2.0, 2.2, speed=1.0)])
    assert (equal.behind_best, equal.behind_alike) == pytest.approx((.1, 0))
    assert "| equal | ZeRO-3 | 2 s |  | 2.2 s | +10.0% |" in bench.table(rows)


def test_one_plan_written_in_two_ways_is_one_contender():
    work, cluster = bench.job("equal"), bench.shapes()["equal"]
    even = bench.plans(work, cluster)["even data parallel"]
    (pipe,) = {p.replace(stages=(p.stages[0].replace(devices=()),)) for p in even.pipelines}
    whole = even.replace(name="found", schedule="zb-h1", pipelines=(pipe.replace(
        replicas=4, stages=(pipe.stages[0].replace(devices=(0, 1, 2, 3)),)),))
    assert bench.same(whole, even)
    assert not bench.same(whole.replace(accumulation="layered"), even)
    assert not bench.same(whole.replace(sharding=Sharding(optimizer=2)), even)
    halves = bench.plans(work, cluster)["2 pipelines, far apart"]
    assert not bench.same(halves.replace(schedule="zb-h1"), halves), "a pipeline of stages depends on its schedule"


def test_runs_of_one_plan_count_together_but_for_disturbed_ones():
    runs = [row("equal", "ZeRO-3", 2.0, 1.0, runs=(1.0,), speed=1.1, others=.05, cpu_s=(.3, .1)),
            row("equal", "ZeRO-3", 2.4, 1.2, runs=(1.2,), speed=1.3, others=.10, cpu_s=(.5, .3))]
    found = bench.together(runs)
    assert (found.predicted_s, found.measured_s, found.speed, found.others) == pytest.approx((2.2, 1.1, 1.2, .1))
    assert found.cpu_s == pytest.approx((.4, .2))
    assert found.runs == (1.0, 1.2)
    disturbed = runs[1]._replace(others=.2, bytes_exact=False)
    found = bench.together([runs[0], disturbed])
    assert (found.measured_s, found.speed, found.runs) == (1.0, 1.1, (1.0, 1.2))
    assert found.bytes_exact is False, "what was sent does not depend on who else worked"
    assert bench.together([disturbed, disturbed]).measured_s == 1.2, "there is nothing better"


def test_orders_count_apart_where_both_runs_show_them():
    rows = [row("equal", "a", 1.0, 1.05, runs=(1.0, 1.1)), row("equal", "b", 1.3, 1.3, runs=(1.3, 1.3)),
            row("equal", "c", 1.2, 1.3, runs=(1.2, 1.4)), row("equal", "d", 1.25, 2.1, runs=(2.1,))]
    (equal,) = bench.summaries(rows)
    assert equal.clear == (4, 5), "not b and c, whose runs overlap; d is predicted before b"
    alone = [row("equal", "d", 2.0, 2.1, runs=(2.1,)), row("equal", "e", 1.0, 1.1, runs=(1.1,))]
    assert bench.summaries(alone)[0].clear == (0, 0), "neither ran twice"
    tied = [rows[0], row("equal", "f", 1.01, 2.0, runs=(2.0, 2.0))]
    assert bench.summaries(tied)[0].clear == (0, 0), "predictions say no order"
    assert bench.scatters(rows) == pytest.approx([0, .1, 1 / 6])
    assert "| equal | c | 1.3 s | +16.7% |" in bench.table(rows)


def test_the_speed_between_gauges_is_theirs_by_distance():
    contest = object.__new__(bench._Contest)
    contest._gauged = [(0.0, [1.0, 2.0]), (bench.GAUGE_EVERY_S, [4.0, 2.0])]
    assert contest.slower(bench.GAUGE_EVERY_S / 2) == pytest.approx([2.0, 2.0])
    early = contest.slower(0.0)
    assert early == pytest.approx([4 ** (math.exp(-.5) / (1 + math.exp(-.5))), 2.0])
    assert contest.slower(-1e3)[0] < early[0]


def test_what_was_measured_once_for_two_counts_once():
    even, other = row("equal", "even data parallel", 1.1, 1.0), row("equal", "ZeRO-3", 1.3, 1.0)
    rows = [even, other, even._replace(name=bench.CHOSEN, same_as="even data parallel")]
    assert bench.errors(rows) == pytest.approx([.1, .3])
    assert bench.summaries(rows)[0].behind_best == 0
    assert "the same as even data parallel" in bench.table(rows)


# --- the real thing ------------------------------------------------------------------------------------------------

RECEIVE = """
import socket, sys
server = socket.create_server(("", 4711))
print("ready", flush=True)
peer, _ = server.accept()
total = 0
while (data := peer.recv(1 << 20)):
    total += len(data)
peer.sendall(str(total).encode())
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 4711))
peer.sendall(bytes(1 << 17))
start = time.perf_counter()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(100)
print(time.perf_counter() - start)
"""


@pytest.fixture
def pair():
    with Bed.up(cluster(.9, .45)) as bed:
        yield bed


STANDSTILLS = """
import time
start = last = time.perf_counter()
gaps = []
while last - start < 1:
    now = time.perf_counter()
    if now - last > 1e-3:
        gaps.append(now - last)
    last = now
print(sorted(gaps)[len(gaps) // 2])
"""


def beats(bed: Bed) -> list[int]:
    """The processes of a testbed's metronomes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"metronome.py" in text and bed.layout.id.encode() in text:
            found.append(int(path.parent.name))
    return found


def carry(bed: Bed, nbytes: int) -> float:
    server = bed.spawn(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    assert server.stdout
    server.stdout.readline()
    client = bed.spawn(0, [sys.executable, "-c", SEND, bed.layout.addresses["n1"], str(nbytes)],
                       stdout=subprocess.PIPE)
    out, _ = client.communicate(timeout=60)
    server.wait(timeout=10)
    return float(out)


def assert_same_end(found: Path, expected: Path) -> None:
    """The newest checkpoints of two runs have used the same samples, and have the same weights."""
    one, other = Reader(found), Reader(expected)
    assert one.state.position == other.state.position
    for key in {entry.tensor for entry in other.index.pieces}:
        torch.testing.assert_close(one.whole(key, "weights"), other.whole(key, "weights"), rtol=1e-9, atol=1e-12)


class TestReal:
    pytestmark = as_root

    def test_eight_nodes_come_and_go(self):
        start = time.monotonic()
        bed = Bed.up(cluster(*[.2] * 8))
        made_s = time.monotonic() - start
        assert len(subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split(bed.layout.id)) == 10
        bed.down()
        assert bed.layout.id not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert not Path(bed.state.cpu or "/nowhere").exists()
        assert bed.layout.id not in {s.layout.id for s in standing()}
        assert made_s < 6, "2 s on a machine with nothing else to do"

    def test_a_link_carries_its_rate_and_counts_it(self, pair):
        nbytes = 4 * 2**20
        before = pair.counters()
        seconds = carry(pair, nbytes)
        bound = nbytes / (100e6 / 8)
        assert 1.0 <= seconds / bound / PAYLOAD <= 1.15
        sent = pair.counters()["n0"]["tx_bytes"] - before["n0"]["tx_bytes"]
        assert nbytes + 2**17 <= sent <= 1.02 * (nbytes + 2**17)

    def test_a_degraded_link_is_slower_and_a_cut_one_is_seen(self, pair):
        pair.set_rate("n1", 20e6 / 8)
        assert carry(pair, 2**20) > 0.95 * 2**20 / (20e6 / 8)
        pair.set_link("n1", False)
        assert pair.unplugged() == ["n1"]
        pair.set_link("n1", True)
        assert pair.unplugged() == []

    def test_two_at_once_do_not_meet(self, pair):
        with Bed.up(cluster(.05, .05)) as other:
            assert carry(other, 2**16) > 0
            assert pair.counters()["n1"]["rx_bytes"] < 2**16
            assert {pair.layout.id, other.layout.id} <= {s.layout.id for s in standing()}

    @pytest.mark.skipif(not probe().cpu, reason="no cgroup for CPU time")
    def test_quotas_hold(self, pair):
        code = ("import time\nend, begun = time.monotonic() + 1, time.process_time()\n"
                "while time.monotonic() < end: pass\nprint(time.process_time() - begun)")
        runs = [pair.spawn(r, [sys.executable, "-c", code], stdout=subprocess.PIPE) for r in (0, 1)]
        used = [float(run.communicate()[0]) for run in runs]
        assert used[0] <= 1.05
        assert used[1] <= 0.45 * 1.25

    @pytest.mark.skipif(not probe().cpu, reason="no cgroup for CPU time")
    def test_a_slow_rank_is_slow_evenly_and_its_metronome_goes_with_it(self):
        """At ticks alone (4 ms) it would stand still for three periods at a time, 17 ms."""
        with Bed.up(cluster(.5, .15)) as bed:
            run = bed.spawn(1, [sys.executable, "-c", STANDSTILLS], stdout=subprocess.PIPE)
            assert float(run.communicate()[0]) < 1.6 * 1e-6 * period_us(.15)
            assert len(beats(bed)) == len({seat.cores for seat in bed.layout.seats})
        assert not beats(bed)

    def test_a_metronome_ends_with_its_owner(self, tmp_path):
        path = tmp_path / "c.yaml"
        cluster(.05, .05).save(path)
        owner = subprocess.Popen([sys.executable, "-m", "mixfleet", "testbed", "run", str(path), "--", "sleep", "78"])
        until = time.monotonic() + 30
        mine: list[Bed] = []
        while not mine and time.monotonic() < until:
            time.sleep(0.1)
            mine = [bed for s in standing() if s.owner == owner.pid and beats(bed := Bed(s, probe()))]
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        until = time.monotonic() + 5
        while beats(mine[0]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not beats(mine[0])
        leftovers(remove=True)

    def test_what_a_killed_owner_leaves_is_removed(self, tmp_path):
        path = tmp_path / "c.yaml"
        cluster(.05, .05).save(path)
        owner = subprocess.Popen([sys.executable, "-m", "mixfleet", "testbed", "run", str(path), "--", "sleep", "77"])
        until = time.monotonic() + 30
        mine = []
        while not mine and time.monotonic() < until:
            time.sleep(0.1)
            mine = [s for s in standing() if s.owner == owner.pid and len(Bed(s, probe()).processes()) == 2]
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        (state,) = mine
        assert state.abandoned
        left = Bed(state, probe()).processes()
        assert left
        removed = leftovers(remove=True)
        assert state.layout.id in {s.layout.id for s in removed}
        assert not any(Path(f"/proc/{pid}/cmdline").exists() and b"77" in Path(f"/proc/{pid}/cmdline").read_bytes()
                       for pid in left)
        assert state.layout.id not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout

    def test_training_equals_the_reference_and_its_bytes_are_on_the_wire(self, pair, tmp_path):
        case = Case(BOTH, job(figures=WIDE), steps=3)
        before = pair.counters()
        with pair.unthrottled():
            result = train(case.plan, case.job, pair.realised(cluster(.9, .45)), steps=3, out_dir=tmp_path,
                           enter=pair.enter, rendezvous=pair.rendezvous())
        after = pair.counters()
        assert result is not None
        expected = reference(case)
        assert result.losses == pytest.approx(expected.losses, rel=1e-9)
        reader = Reader(tmp_path / "checkpoints")
        for key, value in expected.weights.items():
            found = reader.read(key, "weights", 0, value.numel())
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
        said = predict(case.plan, case.job, cluster(.9, .45), sent=True).sent_bytes
        for node, report in enumerate(result.ranks):
            payload = sum(report.sent.values())
            assert payload == 3 * sum(said[str(node)].values())
            wire = after[f"n{node}"]["tx_bytes"] - before[f"n{node}"]["tx_bytes"]
            assert payload < wire < 1.05 * payload + 60_000, "headers, and what ranks tell each other to begin and end"

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    def test_recovers_from_a_restarted_node_and_takes_it_back(self, tmp_path):
        wanted = cluster(.9, .45)
        work = job(figures=WIDE, optimizer=Optimizer(lr=1e-4, weight_decay=0.1))  # larger: rounding grows
        with Bed.up(wanted) as bed:
            legs = train_elastically(
                bed, bed.realised(wanted), work, tmp_path, steps=300, checkpoint_every=3,
                plan_for=lambda _, left: BOTH if len(left.nodes) == 2 else ALONE,
                schedule=Schedule(faults=(Fault(do="restart", node="n1", at_step=7, until_step=20),)))
        assert "n1" in legs[0].failure
        assert legs[0].noticed_s < 10
        assert legs[0].nodes == ("n0", "n1")
        assert legs[1].nodes == ("n0",)
        assert legs[-1].nodes == ("n0", "n1")
        for leg, after in pairwise(legs):
            assert after.first_step == leg.last_step
        calm = train(ALONE, work, CLUSTER, steps=legs[-1].last_step, out_dir=tmp_path / "calm")
        assert calm is not None
        assert_same_end(tmp_path / "checkpoints", tmp_path / "calm/checkpoints")

    @pytest.mark.slow
    @pytest.mark.timeout(400)
    def test_torchruns_agents_recover_from_a_restarted_node_and_take_it_back(self, tmp_path):
        """The same by torchrun: the search plans each time for what the agents found."""
        work = job(figures=WIDE, optimizer=Optimizer(lr=1e-4, weight_decay=0.1)).replace(steps=400)
        work.save(tmp_path / "job.yaml")
        wanted = cluster(.2, .7)  # the fast node trains, the slow one stands by
        with Bed.up(wanted) as bed:
            bed.realised(wanted).save(tmp_path / "cluster.yaml")
            legs = train_by_torchrun(
                bed, tmp_path / "cluster.yaml", tmp_path / "job.yaml", tmp_path / "run", steps=400, checkpoint_every=10,
                schedule=Schedule(faults=(Fault(do="restart", node="n1", at_step=12, until_step=30),)), timeout_s=300)
            assert not bed.processes()
        ways = [(leg.nodes, leg.plan.ranks) for leg in legs]
        assert (ways[0], ways[-1]) == ((("n0", "n1"), (1,)),) * 2
        assert (("n0",), (0,)) in ways
        assert "n1" in legs[0].failure
        for leg, after in pairwise(legs):
            assert after.first_step == leg.last_step
        assert legs[-1].last_step == 400
        calm = train(ALONE, work, CLUSTER, steps=400, out_dir=tmp_path / "calm")
        assert calm is not None
        assert_same_end(tmp_path / "run/checkpoints", tmp_path / "calm/checkpoints")

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_torchruns_agents_recover_from_two_ranks_lost_together(self, tmp_path):
        """A node with two of the three devices, which share what one could not hold alone as fast, restarts: the one
        that is left takes all, from their pieces, and gives them back."""
        work = job(12, figures={**WIDE, "max_seq_len": 128}, optimizer=Optimizer(lr=1e-4, weight_decay=0.1)).replace(
            steps=40, seq_len=128)
        work.save(tmp_path / "job.yaml")
        wanted = cluster(.2, .2)
        first, second = wanted.nodes
        wanted = wanted.replace(nodes=(first, second.replace(devices=second.devices * 2)))
        with Bed.up(wanted) as bed:
            bed.realised(wanted).save(tmp_path / "cluster.yaml")
            legs = train_by_torchrun(
                bed, tmp_path / "cluster.yaml", tmp_path / "job.yaml", tmp_path / "run", steps=40, checkpoint_every=3,
                schedule=Schedule(faults=(Fault(do="restart", node="n1", at_step=7, until_step=14),)), timeout_s=500)
            assert not bed.processes()
        assert legs[0].nodes == legs[-1].nodes == ("n0", "n1")
        assert {1, 2} <= set(legs[0].plan.ranks)
        assert {1, 2} <= set(legs[-1].plan.ranks)
        alone = [leg for leg in legs if leg.nodes == ("n0",)]
        assert any(leg.last_step > leg.first_step and leg.plan.ranks == (0,) for leg in alone)
        assert "n1" in legs[0].failure
        for leg, after in pairwise(legs):
            assert after.first_step == leg.last_step
        assert legs[-1].last_step == 40
        calm = train(plan(pipe((0, 5), (0,), samples=12, micro_batch=12)), work, CLUSTER, steps=40,
                     out_dir=tmp_path / "calm")
        assert calm is not None
        assert_same_end(tmp_path / "run/checkpoints", tmp_path / "calm/checkpoints")

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_slow_ranks_and_links_change_no_weight(self, pair, tmp_path):
        """A rank at a tenth of its speed, later a link at a tenth: slower, but the same training."""
        work, seconds = job(figures=WIDE, optimizer=Optimizer(lr=1e-4, weight_decay=0.1)), []
        schedule = Schedule(faults=(Fault(do="slow", rank=1, share=.04, at_step=4, until_step=6),
                                    Fault(do="degrade", node="n1", rate="10 Mb/s", at_step=9, until_step=11)))

        def on_step(report):
            seconds.append(report.seconds)
            struck(report.step)

        with injected(pair, schedule) as struck:
            result = train(BOTH, work, pair.realised(cluster(.9, .45)), steps=12, out_dir=tmp_path / "bed",
                           enter=pair.enter, patience_s=60, on_step=on_step)
        calm = train(ALONE, work, CLUSTER, steps=12, out_dir=tmp_path / "calm")
        assert result is not None
        assert calm is not None
        usual = sorted(seconds[1:4])[1]
        assert max(seconds[4:6]) > 2 * usual
        assert max(seconds[9:11]) > 2 * usual
        assert result.losses == pytest.approx(calm.losses, rel=1e-9)
        assert_same_end(tmp_path / "bed/checkpoints", tmp_path / "calm/checkpoints")

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize(("fault", "says"), [
        (Fault(do="kill", rank=1, at_step=3), "n1) was killed by SIGKILL"),
        (Fault(do="freeze", rank=1, at_step=3), "n1): has not answered"),
        (Fault(do="cut", node="n1", at_step=3), "n1 is off the network"),
        (Fault(do="fill", rank=1, at_step=3), "cannot write the checkpoint: File too large"),
    ], ids=lambda value: value.do if isinstance(value, Fault) else "")
    def test_names_what_failed(self, pair, tmp_path, fault, says):
        told = []

        def on_step(report):
            told.append(time.monotonic())
            struck(report.step)

        with injected(pair, Schedule(faults=(fault,))) as struck, pytest.raises((RunError, InputError)) as error:
            train(BOTH, job(figures=WIDE), pair.realised(cluster(.9, .45)), steps=10_000, out_dir=tmp_path,
                  checkpoint_every=5, enter=pair.enter, patience_s=6, on_step=on_step)
        assert says in str(explained(pair, RunError(str(error.value))))
        assert time.monotonic() - told[-1] < 10
