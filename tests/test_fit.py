"""`mixfleet fit`: the largest micro-batch, against a plain scan, and the reason where none fits."""

import json

import pytest

from mixfleet import cli
from mixfleet.cluster import device_named
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.sim.fit import _predict, fit

MODEL = build({"layers": 3, "hidden": 256, "heads": 4, "vocab": 1000, "max_seq_len": 512})
JOB = Job(name="small", model=MODEL, seq_len=512, global_batch=64)


@pytest.mark.parametrize("gib", [1.25, 1.5, 2.5])
def test_equals_a_scan(gib):
    device = device_named("V100-SXM2-16GB").replace(memory_bytes=int(gib * 2**30))
    for one in fit(JOB, device):
        from mixfleet.cluster import Cluster, Link, Node

        link = Link(latency_s=0.0, bandwidth_Bps=1.0)
        lone = Cluster(name="x", nodes=(Node(name="x", devices=(device,), link=link, nic=link),))
        scan = next(m for m in range(1, 200) if not _predict(JOB, lone, one.recompute, m).fits) - 1
        assert one.micro_batch == scan > 0
        assert one.peak_bytes <= one.capacity_bytes == device.memory_bytes
        assert sum(one.breakdown.values()) == pytest.approx(one.peak_bytes, abs=8)
        assert one.next_lacks_bytes > 0


def test_more_recompute_never_fits_less():
    none, selective, full = fit(JOB, device_named("V100-SXM2-16GB"))
    assert 0 < none.micro_batch <= selective.micro_batch <= full.micro_batch
    assert none.breakdown["weights"] == full.breakdown["weights"]


def test_state_that_does_not_fit_is_the_reason():
    for one in fit(Job(name="large", model=build("llama-3-8b"), seq_len=2048, global_batch=8),
                   device_named("A100-SXM4-80GB")):
        assert one.micro_batch == 0
        assert one.why_not.startswith("its state alone takes 136 GiB of")


def test_activations_that_do_not_fit_are_the_reason():
    device = device_named("V100-SXM2-16GB").replace(memory_bytes=int(1.15 * 2**30))
    job = JOB.replace(model=build({"layers": 3, "hidden": 256, "heads": 4, "vocab": 1000, "max_seq_len": 65536}),
                      seq_len=16384)
    for one in fit(job, device):
        assert one.why_not.startswith("micro-batch 1 lacks")


def test_command_line(capsys):
    assert cli.main(["fit", "gpt2", "--on", "A100-SXM4-80GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq_len"] == 1024  # all that GPT-2 allows
    assert [one["recompute"] for one in found["fits"]] == ["none", "selective", "full"]
    assert cli.main(["fit", "llama-3-8b", "--on", "A100-SXM4-80GB"]) == 1
    assert "its state alone takes 136 GiB" in capsys.readouterr().out
    assert cli.main(["fit", "gpt2", "--on", "A1000"]) == 2
    assert "unknown device 'A1000'" in capsys.readouterr().err
