"""What is discovered about this machine, and what is measured on it."""

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mixfleet.calibrate import MeasurementError, discover, profile_job
from mixfleet.calibrate.discover import _evened, catalog_name, gpu_from_driver
from mixfleet.calibrate.kernels import foreign_part
from mixfleet.calibrate.links import loopback_of, partner, turns_s
from mixfleet.calibrate.pinned import available_cores, run_pinned
from mixfleet.catalog.devices import device_fields, names
from mixfleet.catalog.efficiency import COLLECTIVE_S, MESSAGE_CPU_S
from mixfleet.cluster import Cluster, device_named
from mixfleet.cost.kernels import block_cost, optimizer_s
from mixfleet.errors import InputError
from mixfleet.job import Job

HERE = Path(__file__).parent.parent
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
A, B = available_cores()[0], available_cores()[-1]


def test_without_measuring_every_core_is_a_default_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cluster = discover(measure=False)
    assert [d.cores for d in cluster.devices] == [(c,) for c in available_cores()]
    assert {d.share for d in cluster.devices} == {1.0}
    assert all("stated default" in d.source and "not measured" in d.source for d in cluster.devices)
    assert sum(d.memory_bytes for d in cluster.devices) <= cluster.nodes[0].host_memory_bytes


def test_processes_on_one_core_share_it():
    cluster = discover([(A,), (B,), (B,)] if A != B else [(A,), (A,), (A,)], measure=False)
    assert [d.share for d in cluster.devices] == ([1, 0.5, 0.5] if A != B else pytest.approx([1 / 3] * 3))
    both = discover([available_cores()], measure=False).devices[0]
    assert both.flops["fp32"] == len(available_cores()) * device_fields("cpu")["flops"]["fp32"]


@pytest.mark.parametrize(("ranks", "says"), [
    ([(9999,)], "ranks names core 9999; this process may use "), ([], "ranks is empty"), ([()], "ranks names core no"),
])
def test_cores_that_are_not_ours(ranks, says):
    with pytest.raises(InputError, match=says):
        discover(ranks, measure=False)


@pytest.mark.parametrize(("driver", "name"), [
    ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"), ("Tesla T4", "T4"), ("NVIDIA H100 80GB HBM3", "H100-SXM"),
    ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA L4", "L4"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"), ("NVIDIA RTX A6000", "A6000"), ("NVIDIA H200", "H200-SXM"),
    ("NVIDIA GeForce GTX 1080 Ti", "GTX1080Ti"), ("AMD Instinct MI300X", "MI300X"), ("NVIDIA A10G", "A10G"),
    ("Tesla P100-PCIE-16GB", "P100-PCIe-16GB"), ("NVIDIA GeForce RTX 4060", None),
])
def test_names_of_drivers(driver, name):
    assert catalog_name(driver) == name
    assert name is None or name in names()


def test_a_gpu_that_is_not_in_the_catalog_gets_what_the_driver_tells():
    gpu = gpu_from_driver("Future X1", 7 * 2**30, sm_count=10, clock_Hz=2e9, memory_Bps=3e11, pcie=(4, 8))
    assert gpu.flops == {"fp32": 10 * 128 * 2 * 2e9}
    assert gpu.pcie_Bps == pytest.approx(15.754e9, rel=1e-4)
    assert "not in the catalog" in gpu.source
    with pytest.raises(InputError, match=r"GPU 'Future X1' is not in the catalog and the driver does not tell"):
        gpu_from_driver("Future X1", 7 * 2**30)


def _fake_nvml(gpus, nvlink):
    class Error(Exception):
        pass

    def link_state(handle, index):
        if nvlink is None:
            raise Error
        return nvlink

    return types.SimpleNamespace(
        NVMLError=Error, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_FEATURE_ENABLED=1, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: len(gpus), nvmlDeviceGetHandleByIndex=lambda i: gpus[i],
        nvmlDeviceGetName=lambda h: h[0], nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(total=h[1]),
        nvmlDeviceGetNumGpuCores=lambda h: 1280, nvmlDeviceGetMaxClockInfo=lambda h, kind: 2000 * kind,
        nvmlDeviceGetMemoryBusWidth=lambda h: 256, nvmlDeviceGetMaxPcieLinkGeneration=lambda h: 4,
        nvmlDeviceGetMaxPcieLinkWidth=lambda h: 16, nvmlDeviceGetNvLinkState=link_state)


@pytest.mark.parametrize(("nvlink", "link"), [(1, "nvlink"), (0, "pcie"), (None, "pcie")])
def test_gpus_come_from_the_driver(monkeypatch, tmp_path, nvlink, link):
    gpus = [("NVIDIA A100-SXM4-80GB", 80 * 2**30), ("NVIDIA A100-SXM4-80GB", 70 * 2**30)]
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(gpus, nvlink))
    cluster = discover()
    assert [d.name for d in cluster.devices] == ["A100-SXM4-80GB"] * 2
    assert cluster.devices[0] == device_named("A100-SXM4-80GB")  # of 80 GiB, programs get 79.15
    assert cluster.devices[1].memory_bytes == 70 * 2**30
    assert cluster.nodes[0].link.name == link
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster


def test_nearly_equal_cores_count_as_equal():
    even = _evened([{"fp32": 100.0, "launch_s": 1.0}, {"fp32": 104.0, "launch_s": 3.0}, {"fp32": 50.0, "launch_s": 5.0},
                    {"fp32": 101.0, "launch_s": 7.0}], [1, 1, 1, 2])
    assert [f["fp32"] for f in even] == [102, 102, 50, 101]
    assert [f["launch_s"] for f in even] == [2, 2, 5, 7]


def test_the_link_follows_from_the_rounds_of_an_exchange():
    fixed = COLLECTIVE_S["cpu"] + 4 * MESSAGE_CPU_S  # each sends two messages and receives two
    small, large = fixed + 50e-6, fixed + 50e-6 + 4e-3
    rounds = [[[small] * 8, [large] * 8], [[small / 2] * 8, [large / 2] * 8], [[small] * 8, [large] * 8]]
    link = loopback_of(rounds)
    assert link.latency_s == pytest.approx(50e-6)
    assert link.bandwidth_Bps == pytest.approx(2 * 8 * 2**20 / 4e-3, rel=5e-3)  # 3 ranks send 2 pieces of a third each


def test_a_link_beside_other_work_has_a_rate_that_can_be():
    slower = [[[7e-3] * 8, [5e-3] * 8]] * 2  # small messages that take longer than large ones
    assert loopback_of(slower).bandwidth_Bps == pytest.approx(8 * 2**20 / 2.5e-3, rel=5e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_in_a_tournament_everybody_meets_everybody_once(ranks):
    rounds = ranks - 1 + ranks % 2
    met = [[partner(r, k, ranks) for k in range(rounds)] for r in range(ranks)]
    for r in range(ranks):
        assert sorted(o for o in met[r] if o is not None) == [o for o in range(ranks) if o != r]
        assert all(met[o][k] == r for k, o in enumerate(met[r]) if o is not None)


def test_turns_are_those_of_meetings_with_ranks_as_fast():
    """Ranks of half, half and a fifth of a core: what meeting the slowest takes is the slowest's."""
    half, fifth = (device_named("cpu").replace(share=share) for share in (0.5, 0.2))
    found = [{"all": (5e-3, 25e-3), "1": (1e-3, 4e-3), "2": (1e-3, 17e-3)},
             {"all": (5e-3, 25e-3), "0": (1e-3, 4e-3), "2": (2e-3, 20e-3)},
             {"all": (5e-3, 25e-3), "0": (1e-3, 17e-3), "1": (2e-3, 20e-3)}]
    assert turns_s(found, [half, half, fifth]) == pytest.approx([3e-3, 3e-3, 18e-3])
    assert turns_s([{}, {}], [half, half]) == [0.0, 0.0]


@pytest.mark.slow
@needs_torch
def test_messages_take_time_of_the_core():
    first, second = run_pinned("mixfleet.calibrate.links:messages", [(A,), (A,)], {})
    for found in (first, second):
        assert 1e-6 < found["message_cpu_s"] < 0.1
        assert 0 < found["sum_cpu_s"] <= found["byte_cpu_s"] < 1e-7


@pytest.mark.slow
@needs_torch
def test_a_measuring_process_that_fails_is_one_message():
    with pytest.raises(MeasurementError, match=r"measuring process 0 failed: .*no_such_thing"):
        run_pinned("math:no_such_thing", [(A,)], {})


@pytest.mark.slow
@needs_torch
def test_this_machine_is_measured():
    cluster = discover([(A,), (B,)])
    for device in cluster.devices:
        assert device.source == "measured by mixfleet discover"
        assert device.flops["fp32"] > device.flops["fp64"] > 1e8
        assert 1e8 < device.memory_Bps < 1e12
        assert 1e-7 < device.launch_s < 1e-3
    assert 1e7 < cluster.nodes[0].link.bandwidth_Bps < 1e12
    assert cluster.nodes[0].link.latency_s < 0.1


@pytest.mark.slow
@needs_torch
def test_measured_blocks_are_what_the_cost_model_then_says(tmp_path):
    (tmp_path / "j.yaml").write_text(
        "mixfleet: job/1\nmodel: {layers: 3, hidden: 48, heads: 3, vocab: 31, max_seq_len: 40}\nseq_len: 40\n"
        "global_batch: 12\nprecision: fp32\n")
    job = Job.load(tmp_path / "j.yaml")
    plain = discover([(A,), (B,), (B,)], measure=False)
    cluster = profile_job(job, plain, micro_batches=[1, 5])
    assert plain.fingerprint() == cluster.fingerprint()
    kinds = {b.kind: b for b in job.model.blocks}
    for device in cluster.devices:
        assert len(device.block_times) == 2 * len(kinds) == 6
        for time in device.block_times:
            cost = block_cost(kinds[time.block], time.micro_batch, 40, 1, device, job)
            assert (cost.forward_s, cost.backward_s) == (time.forward_s, time.backward_s)
            assert 1e-6 < time.forward_s < 1
    slow = [sum(t.forward_s + t.backward_s for t in d.block_times) for d in cluster.devices]
    if A != B:
        assert cluster.devices[1].block_times == cluster.devices[2].block_times
        assert 1.3 < slow[1] / slow[0] < 4  # half a core
    assert 1e-4 < optimizer_s(2**20, cluster.devices[0], job) < 1
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster


@pytest.mark.parametrize(("cpu", "wall", "share", "foreign"), [
    (1.2, 1.2, 1.0, 0.0), (0.3, 1.2, 1.0, 0.75), (0.3, 1.2, 0.5, 0.5), (0.6, 1.2, 0.5, 0.0), (0.9, 1.2, 0.5, 0.0)])
def test_what_a_rank_did_not_get_of_its_share_went_to_others(cpu, wall, share, foreign):
    assert foreign_part(cpu, wall, share) == pytest.approx(foreign)


@pytest.mark.slow
@needs_torch
def test_other_work_on_the_core_is_noticed_and_allowed_for(tmp_path):
    (tmp_path / "j.yaml").write_text(
        "mixfleet: job/1\nmodel: {layers: 2, hidden: 96, heads: 3, vocab: 31, max_seq_len: 40}\nseq_len: 40\n"
        "global_batch: 12\nprecision: fp32\n")
    job, plain, notes = Job.load(tmp_path / "j.yaml"), discover([(A,)], measure=False), []
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{A}])\nwhile True: pass"])
    try:
        profile_job(job, plain, micro_batches=[2], note=notes.append)
    finally:
        busy.kill()
        busy.wait()
    (note,) = notes
    assert int(re.match(r"other programs took (\d+)% of what rank 0 may use", note)[1]) > 25


def test_only_one_machine_can_be_profiled():
    lab = Cluster.load(HERE / "examples/clusters/mixed-lab.yaml")
    with pytest.raises(InputError, match="cluster mixed-lab has 4 nodes; only this machine can be measured"):
        profile_job(Job.load(HERE / "examples/jobs/gpt-tiny.yaml"), lab)
