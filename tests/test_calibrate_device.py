"""Measuring a device: which kernels, how they are timed, what the file says then; variants of known devices."""

import importlib.util
import json

import numpy as np
import pytest

from mixfleet.calibrate import device as engine
from mixfleet.calibrate.pinned import available_cores
from mixfleet.cli import main
from mixfleet.cluster import Cluster, KernelTime, device_named
from mixfleet.cluster_file import load_device, save_device
from mixfleet.cost import kernels as compute
from mixfleet.cost import network, query
from mixfleet.errors import InputError

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")


def gemm(m, n, k, time_s, dtype="fp32"):
    return KernelTime(kind="gemm", op="gemm", dtype=dtype, sizes={"m": m, "n": n, "k": k}, time_s=time_s)


def test_a_core_is_described_by_what_its_kernels_reach_beyond_their_launches():
    core = device_named("cpu").replace(flops={"fp32": 1e11}, vector_flops=1e11, memory_Bps=1e10, launch_s=1e-6)
    core = core.replace(kernel_times=(
        gemm(1000, 500, 400, 5e-3 + 1e-6), gemm(100, 500, 400, 3e-4 + 1e-6),
        KernelTime(kind="stream", op="add", dtype="fp32", sizes={"rows": 100, "cols": 250, "n_in": 2}, time_s=6.1e-5)))
    found = engine.described(core)
    # products: 0.4 GFLOP at 100 GFLOP/s is 4 ms, 40 MFLOP is 0.4 ms: 4.4 ms of work in 5.3 ms
    assert found.efficiency == pytest.approx({"gemm": 4.4 / 5.3, "elementwise": 3e5 / 1e10 / 6e-5}, rel=1e-3)
    # each from the others: the first from the second's 0.4 / 0.3, and the second from the first's 0.8
    (products,) = [e for e in engine.errors(found) if e.group == "gemm.fp32"]
    first, second = 4e-3 / (0.4 / 0.3) + 1e-6, 0.4e-3 / 0.8 + 1e-6
    wanted = np.median([abs(first / (5e-3 + 1e-6) - 1), abs(second / (3e-4 + 1e-6) - 1)])
    assert products.kernels == 2
    assert products.after == pytest.approx(wanted, rel=2e-3)


def test_a_gpu_is_predicted_from_its_own_kernels():
    sheet = device_named("H100-SXM")
    rng = np.random.default_rng(3)
    sizes = {c: (2 ** rng.integers(8, 13, 40)).astype(float) for c in "mnk"}
    truth = query.predict("gemm", sizes, sheet).time_s * 1.3
    times = tuple(gemm(*(float(sizes[c][i]) for c in "mnk"), truth[i], "bf16") for i in range(20))
    slow = sheet.replace(kernel_times=times)
    rest = {c: v[20:] for c, v in sizes.items()}
    assert np.median(np.abs(query.predict("gemm", rest, slow).time_s / truth[20:] - 1)) < 0.06
    (found,) = engine.errors(slow)
    assert found.group == "gemm.16bit"
    assert found.before == pytest.approx(0.3 / 1.3, rel=1e-6)
    assert found.after < 0.08
    assert engine.described(slow) == slow
    # what was not measured stays as it was
    assert query.gemm(512, 512, 512, slow, dtype="fp32").time_s == query.gemm(512, 512, 512, sheet, dtype="fp32").time_s
    step = [compute._products_s(1, 4096, 4096, 4096, d, "bf16")[0] for d in (sheet, slow)]
    assert step[1] > 1.1 * step[0]


@pytest.mark.parametrize("name", ["cpu", "H100-SXM", "T4", "P4"])
def test_the_design_is_short_distinct_and_grows_from_its_start(name):
    device = device_named(name)
    few, many = engine.kernels(device, 3), engine.kernels(device, 6)
    assert len(set(many)) == len(many)
    for group in {query.group_of(k.kind, k.dtype, k.op) for k in many}:
        mine = [[k for k in some if query.group_of(k.kind, k.dtype, k.op) == group] for some in (few, many)]
        assert mine[1][:3] == mine[0]
        assert len(mine[1]) == 6
    times = [k.timed(1.0) for k in many]
    assert (engine.roofline_s(device, times) < engine.LONGEST_S[device.kind]).all()
    assert all(query.type_named(k.dtype).rate in device.flops for k in many)
    assert max(map(engine._bytes, many)) <= engine.LARGEST_BYTES


def test_a_gpu_is_timed_by_events_around_the_kernel_alone():
    """A stream on which the kernel takes 3 ms, the flush 50, and the first runs, at a low clock, four times as long."""
    clock, log = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")
            self.ms = clock[0]

        def elapsed_time(self, other):
            return other.ms - self.ms

    class Cuda:
        @staticmethod
        def synchronize():
            log.append("wait")

    Cuda.Event = Event

    def work():
        log.append("work")
        clock[0] += 12.0 if log.count("work") <= 2 else 3.0

    def flush():
        log.append("flush")
        clock[0] += 50.0

    assert engine.events_s(work, flush, Cuda) == pytest.approx(3e-3)
    runs = " ".join(log)
    assert log.count("work") * 4 == len([x for x in log if x != "wait"])
    assert runs.count("flush event work event") == log.count("work")
    timed = runs.rpartition("wait")[0].rpartition("wait")[2]
    assert timed.count("work") == int(engine.WINDOW_S / 3e-3) == 50  # all issued before the one wait at the end


def test_a_device_file_is_what_was_saved_and_a_cluster_names_it(tmp_path):
    card = device_named("RTX4090").replace(power_w=300.0, kernel_times=(gemm(100, 200, 300, 1.25e-5, "bf16"),))
    save_device(card, tmp_path / "mine.yaml", "measured")
    assert load_device(tmp_path / "mine.yaml") == card
    (tmp_path / "c.yaml").write_text(
        "mixfleet: cluster/1\nname: c\nnodes:\n  - name: n\n    devices:\n      - {device: mine.yaml, count: 2}\n"
        "      - {base: mine.yaml, name: tuned, power: 250}\n")
    cluster = Cluster.load(tmp_path / "c.yaml")
    assert cluster.devices[:2] == (card, card)
    assert cluster.devices[2] == card.replace(name="tuned", base="RTX4090", power_w=250.0)
    cluster.save(tmp_path / "d.yaml")
    assert Cluster.load(tmp_path / "d.yaml").devices == cluster.devices


@pytest.mark.parametrize(("entry", "said"), [
    ("{device: none.yaml}", "none.yaml: cannot be read"),
    ("{device: job.yaml}", "a device file"),
    ("{device: loop.yaml}", "starts from itself"),
    ("{device: two.yaml}", "give the count in the cluster file"),
    ("{device: bad.yaml}", "kernel gemm gemm: time is 0.0; it must be positive"),
    ("{device: T4, base: L4}", "give either device or base"),
    ("{base: H100-SXN}", "did you mean"),
])
def test_what_is_wrong_with_a_device_file_is_said(tmp_path, entry, said):
    (tmp_path / "job.yaml").write_text("mixfleet: job/1\nmodel: gpt2\n")
    (tmp_path / "loop.yaml").write_text("mixfleet: device/1\ndevice: loop.yaml\n")
    (tmp_path / "two.yaml").write_text("mixfleet: device/1\ndevice: T4\ncount: 2\n")
    (tmp_path / "bad.yaml").write_text("mixfleet: device/1\ndevice: T4\nkernels:\n  - {kind: gemm, op: gemm, "
                                       "dtype: fp16, sizes: {m: 1, n: 2, k: 3}, time: 0 us}\n")
    (tmp_path / "c.yaml").write_text(f"mixfleet: cluster/1\nname: c\nnodes:\n  - name: n\n    devices: {entry}\n")
    with pytest.raises(InputError) as error:
        Cluster.load(tmp_path / "c.yaml")
    assert str(error.value).startswith(f"{tmp_path}/c.yaml:5: nodes[0].devices")
    assert said in str(error.value)


def test_kernels_of_an_unknown_kind_are_an_error_when_they_are_asked_for():
    odd = device_named("T4").replace(kernel_times=(KernelTime(kind="gem", op="", dtype="fp16", sizes={}, time_s=1e-6),))
    with pytest.raises(InputError, match="device T4: unknown kind of kernel 'gem'; did you mean 'gemm'"):
        query.gemm(8, 8, 8, odd, dtype="fp16")


def test_variants_of_a_known_device_keep_its_efficiencies(tmp_path):
    """What-if devices: more of one thing never makes anything slower, and what does not depend on it stays."""
    (tmp_path / "c.yaml").write_text("""\
mixfleet: cluster/1
name: what-if
nodes:
  - name: a
    devices: [H100-SXM, {base: H100-SXM, name: fast-memory, memory_bandwidth: 6.7 TB/s},
              {base: H100-SXM, name: large-cache, cache: 200 MiB}, {base: H100-SXM, name: roomy, memory: 141 GB},
              {base: H100-SXM, name: linked, link_bandwidth: 900 GB/s}]
    nic: 400 Gb/s
  - {name: b, devices: {base: H100-SXM, name: linked, link_bandwidth: 900 GB/s, count: 2}, nic: 400 Gb/s}
""")
    cluster = Cluster.load(tmp_path / "c.yaml")
    plain, memory, cache, roomy, linked = cluster.devices[:5]
    rng = np.random.default_rng(0)
    sizes = {c: 2 ** rng.integers(4, 14, 200) for c in "mnk"}
    times = {d.name: query.predict("gemm", sizes, d) for d in cluster.devices[:5]}
    base = times["H100-SXM"].time_s
    for same in (roomy, linked):
        assert (times[same.name].time_s == base).all()
        assert (times[same.name].low_s == times["H100-SXM"].low_s).all()
    bound = times["H100-SXM"].pipe == query.PIPES.index("dram")
    faster = times["fast-memory"].time_s / base
    assert np.median(faster[~bound]) == pytest.approx(1, abs=0.05)
    assert (faster[bound] < 1.2).all()
    streaming = [query.gemm([8, 16, 64], 16384, 16384, d).time_s for d in (plain, memory)]  # far more than the cache
    assert (streaming[1] / streaming[0] < 0.7).all()
    for d in (memory, cache):
        assert (times[d.name].time_s / base).max() < 1.2  # the trees are not monotone, see docs/cost-model.md
    assert roomy.memory_bytes > plain.memory_bytes
    slow, fast = (network.collective_s("all_gather", 1e9, ranks, cluster) for ranks in ((0, 1), (5, 6)))
    assert fast == pytest.approx(slow / 2, rel=0.02)
    assert compute.efficiency(device_named("RTX4090").replace(name="mine", base="RTX4090"), "gemm") == \
        compute.efficiency(device_named("RTX4090"), "gemm")


def test_what_cannot_be_measured_is_said_without_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine, "run_pinned", None)
    monkeypatch.setattr(engine, "gpus", lambda: ([], False))
    out = str(tmp_path / "d.yaml")
    (tmp_path / "t4.yaml").write_text("mixfleet: device/1\ndevice: T4\n")
    (tmp_path / "job.yaml").write_text("mixfleet: job/1\nmodel: gpt2\n")
    for arguments, said in (
            (["-o", out, "--gpu", "0"], "there is no GPU 0; this machine has 0"),
            (["-o", out, "--cores", "9999"], "there is no core 9999"),
            (["-o", out, "--cores", "a"], "--cores is 'a'"),
            (["-o", out, "--cores", "0", "--gpu", "1"], "either --gpu or --cores"),
            (["-o", str(tmp_path / "t4.yaml")], "this is device T4, not cpu"),
            (["-o", str(tmp_path / "job.yaml")], "a device file"),
            (["-o", out, "--budget", "0"], "--budget"),
            ([], "-o")):
        assert main(["calibrate", "device", *arguments]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "job.yaml").read_text().startswith("mixfleet: job/1")


@pytest.mark.slow
@needs_torch
def test_a_measurement_that_was_stopped_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engine, "QUICK", 1)
    path = tmp_path / "core.yaml"
    command = ["calibrate", "device", "-o", str(path), "--cores", str(available_cores()[0]), "--quick", "--json"]
    assert main([*command, "--budget", "1"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*command, "--name", "mine"]) == 2
    capsys.readouterr()
    assert main(command) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["measured"] + second["measured"] == 4
    assert second["kept"] == first["measured"]
    assert second["left"] == 0
    device = load_device(path)
    assert [t.time_s for t in device.kernel_times[:first["measured"]]] == [
        t["time_s"] for t in first["device"]["kernel_times"]]
    assert device.flops["fp32"] > 1e8
    assert set(device.efficiency) >= {"gemm", "attention"}
    assert main(["calibrate", "device", "-o", str(path), "--cores", str(available_cores()[0]), "--quick"]) == 0
    assert "4 kept from before" in capsys.readouterr().out
