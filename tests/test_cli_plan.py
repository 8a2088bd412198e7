"""`plan`: the ranking and its reasons, the file it writes, and what it says when nothing fits."""

import json
import re

from mixfleet import cli
from mixfleet.plan import Plan

JOB = """mixfleet: job/1
name: small
model: {layers: 6, hidden: 256, heads: 4, vocab: 512, max_seq_len: 512}
seq_len: 512
global_batch: 12
precision: fp32
"""
CLUSTER = """mixfleet: cluster/1
name: three
nodes:
  - name: a
    devices: {device: T4, count: 1, price_per_hour: 0.5}
    nic: {bandwidth: 10 Gb/s, latency: 20 us}
  - name: b
    devices: {device: RTX4090, count: 2, price_per_hour: 0.7}
    nic: {bandwidth: 10 Gb/s, latency: 20 us}
"""


def run(capsys, *arguments):
    code = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def files(folder, job=JOB, cluster=CLUSTER):
    (folder / "job.yaml").write_text(job)
    (folder / "cluster.yaml").write_text(cluster)
    return folder / "job.yaml", folder / "cluster.yaml"


def test_plan_says_why_and_writes_what_predict_reads(capsys, tmp_path):
    job, cluster = files(tmp_path)
    output = tmp_path / "deep" / "plan.yaml"
    code, out, err = run(capsys, "plan", job, cluster, "-o", output, "--top", 3, "--html", tmp_path / "page.html")
    assert code == 0, err
    for part in ("why", "bound by", "upper bound", "cost/Mtoken", "ranks", "RTX4090"):
        assert part in out
    assert "planning small on three (3 devices)" in err
    plan = Plan.load(output)
    assert (plan.job, plan.cluster) == ("../job.yaml", "../cluster.yaml")
    assert "small on three" in (tmp_path / "page.html").read_text()
    code, text, _ = run(capsys, "plan", job, cluster, "--json", "--top", 3)
    found = json.loads(text)
    assert code == 0
    assert len(found["plans"]) <= 3
    assert found["plans"][0]["relative"] == 1.0
    code, text, _ = run(capsys, "predict", output, "--json")
    assert code == 0
    assert json.loads(text)["step_s"] == found["plans"][0]["prediction"]["step_s"]


def test_the_cheapest_plan_is_no_dearer_than_the_fastest(capsys, tmp_path):
    job, cluster = files(tmp_path)
    time, cost = (json.loads(run(capsys, "plan", job, cluster, "--json", "--objective", objective)[1])
                  for objective in ("time", "cost"))
    assert (cost["objective"], time["objective"]) == ("cost", "time")
    first = [r["plans"][0]["prediction"] for r in (time, cost)]
    assert first[1]["cost_per_million_tokens"] <= first[0]["cost_per_million_tokens"]
    assert first[0]["step_s"] <= first[1]["step_s"]


def test_only_some_schedules(capsys, tmp_path):
    job, cluster = files(tmp_path)
    code, text, _ = run(capsys, "plan", job, cluster, "--json", "--schedule", "gpipe, zb-h1")
    assert code == 0
    found = [plan["plan"] for plan in json.loads(text)["plans"]]
    deep = {plan.get("schedule", "1f1b") for plan in found if any(len(p["stages"]) > 1 for p in plan["pipelines"])}
    assert deep
    assert deep <= {"gpipe", "zb-h1"}
    code, _, err = run(capsys, "plan", job, cluster, "--schedule", "gpip")
    assert code == 2
    assert "'gpipe'" in err


def test_nothing_fits(capsys, tmp_path):
    job, cluster = files(tmp_path, job=re.sub(r"model: .*", "model: llama-3-8b", JOB))
    output = tmp_path / "plan.yaml"
    code, out, _ = run(capsys, "plan", job, cluster, "-o", output)
    assert code == 1
    assert not output.exists()
    assert "nothing fits" in out
    assert "nearest miss" in out
    assert "lacks" in out
    code, text, _ = run(capsys, "plan", job, cluster, "--json")
    assert code == 1
    assert json.loads(text)["nearest_miss"]["lacks_bytes"] > 0
