"""`train`: what it writes, what it refuses; and the whole chain from `discover` to `compare`."""

import json
import os
from pathlib import Path

import pytest

from mixfleet import cli
from mixfleet.report import chrome

JOB = """mixfleet: job/1
name: toy
model: {layers: 2, hidden: 32, heads: 2, vocab: 64, max_seq_len: 16}
seq_len: 16
global_batch: 6
precision: fp32
steps: 6
"""
CLUSTER = """mixfleet: cluster/1
name: pair
nodes:
  - name: here
    devices: {device: cpu, count: 2}
    link: {bandwidth: 1 GB/s, latency: 50 us}
    nic: {bandwidth: 1 Gb/s, latency: 50 us}
"""
PLAN = """mixfleet: plan/1
job: job.yaml
cluster: cluster.yaml
pipelines:
  - {samples: 4, micro_batch: 2, stages: [{blocks: [0, 4], devices: [0]}]}
  - {samples: 2, micro_batch: 2, stages: [{blocks: [0, 4], devices: [1]}]}
"""
TWO_NODES = CLUSTER.replace("count: 2", "count: 1") + """  - name: there
    devices: {device: cpu, count: 1}
    link: {bandwidth: 1 GB/s, latency: 50 us}
    nic: {bandwidth: 1 Gb/s, latency: 50 us}
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (("job", JOB), ("cluster", CLUSTER), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def run(capsys, *arguments):
    code = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_a_trace_needs_a_folder(capsys, folder):
    code, _, err = run(capsys, "train", folder / "plan.yaml", "--trace")
    assert code == 2
    assert "give it with --out" in err


def test_a_plan_for_several_machines(capsys, folder):
    (folder / "cluster.yaml").write_text(TWO_NODES)
    code, _, err = run(capsys, "train", folder / "plan.yaml")
    assert code == 2
    assert "2 machines" in err
    code, out, _ = run(capsys, "train", folder / "plan.yaml", "--commands", "--json")
    assert code == 0
    commands = json.loads(out)
    assert [c["node"] for c in commands] == ["here", "there"]
    assert all("torchrun" in c["command"] and "--nproc-per-node=1" in c["command"] for c in commands)


def test_another_schedule_for_a_run(capsys, folder):
    (folder / "plan.yaml").write_text(PLAN[:PLAN.index("pipelines")] + """pipelines:
- {samples: 6, micro_batch: 2, stages: [{blocks: [0, 2], devices: [0]}, {blocks: [2, 4], devices: [1]}]}
""")
    (folder / "cluster.yaml").write_text(TWO_NODES)
    code, out, _ = run(capsys, "train", folder / "plan.yaml", "--schedule", "zb-v", "--commands")
    assert code == 0
    assert out.count("--schedule zb-v") == 2
    code, _, err = run(capsys, "train", folder / "plan.yaml", "--schedule", "zbv")
    assert code == 2
    assert "unknown schedule 'zbv'; did you mean " in err
    assert "'zb-v'" in err
    code, _, err = run(capsys, "train", folder / "plan.yaml", "--schedule", "interleaved")
    assert code == 2
    assert "cannot go under the schedule interleaved: " in err
    assert "wants micro-batches in groups of 2" in err


def test_impossible_plans_are_refused_before_any_process_starts(capsys, folder):
    (folder / "plan.yaml").write_text(PLAN.replace("samples: 4", "samples: 3"))
    code, _, err = run(capsys, "train", folder / "plan.yaml")
    assert code == 2
    assert "the job's global batch is 6" in err


@pytest.mark.slow
def test_train_writes_metrics_traces_and_a_checkpoint_that_resumes(capsys, folder):
    out_dir = folder / "run"
    code, out, err = run(capsys, "train", folder / "plan.yaml", "--out", out_dir, "--steps", 4, "--trace", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["step"] == 4
    assert not found["stopped"]
    assert Path(found["checkpoint"]).is_dir()
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["loss"] == found["first_loss"]
    measured = chrome.read_trace(out_dir / "measured.json")
    assert measured.devices == (0, 1)
    assert len(measured.steps_ns) == 4
    assert {"forward", "backward", "reduce", "optimizer"} <= {s.category for s in measured.spans}

    code, out, _ = run(capsys, "compare", out_dir)
    assert code == 0
    assert "forward" in out
    code, out, err = run(capsys, "train", folder / "plan.yaml", "--out", out_dir, "--resume", out_dir / "checkpoints")
    assert code == 0, err
    assert "trained to step 6" in out
    steps = [json.loads(line)["step"] for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_from_discovery_to_comparison(capsys, folder):
    cores = sorted(os.sched_getaffinity(0))
    here, plan, out_dir = folder / "here.yaml", folder / "best.yaml", folder / "run"
    steps = [
        ("discover", "--ranks", f"{cores[0]} {cores[-1]} {cores[-1]}", "--profile", folder / "job.yaml", "-o", here),
        ("plan", folder / "job.yaml", here, "-o", plan, "--html", folder / "plan.html"),
        ("predict", plan),
        ("train", plan, "--out", out_dir, "--trace"),
        ("compare", out_dir, "--html", folder / "compare.html"),
    ]
    for arguments in steps:
        code, _, err = run(capsys, *arguments)
        assert code == 0, f"{arguments[0]}: {err}"
    assert "<svg" in (folder / "plan.html").read_text()
    assert "measured" in (folder / "compare.html").read_text()
