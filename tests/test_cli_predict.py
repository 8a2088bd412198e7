"""`predict`: figures, files, and plans that are impossible or do not fit."""

import json
from pathlib import Path

import pytest

from mixfleet import cli
from mixfleet.report import chrome

ROOT = Path(__file__).parent.parent
PLAN = """mixfleet: plan/1
job: {root}/examples/jobs/llama-3-8b.yaml
cluster: {root}/examples/clusters/mixed-lab.yaml
sharding: {{optimizer: {optimizer}}}
pipelines:
  - samples: {samples}
    micro_batch: {micro}
    replicas: 4
    stages:
      - {{blocks: [0, 22], devices: [0-7], tensor: 2, recompute: selective}}
      - {{blocks: [22, {last}], devices: [8-23], tensor: {tensor}, recompute: full}}
"""


@pytest.fixture
def plan(tmp_path):
    def write(**changes):
        path = tmp_path / "plan.yaml"
        path.write_text(PLAN.format(**{"root": ROOT, "optimizer": 4, "samples": 32, "micro": 1, "last": 34, "tensor": 4}
                                    | changes))
        return path

    return write


def run(capsys, *arguments):
    code = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_text_and_json_agree(capsys, plan):
    code, out, err = run(capsys, "predict", plan())
    assert (code, err) == (0, "")
    assert "prediction: fits" in out
    code, text, _ = run(capsys, "predict", plan(), "--json")
    found = json.loads(text)
    assert code == 0
    assert found["fits"]
    assert f"{found['tokens_per_s']:,.0f}" in out
    assert len(found["devices"]) == 24
    assert {d["device"] for d in found["devices"]} == {"A100-SXM4-80GB", "V100-SXM2-32GB"}
    for device in found["devices"]:
        assert sum(device["breakdown"].values()) == device["peak_bytes"] <= device["capacity_bytes"]


def test_trace_and_page(capsys, plan, tmp_path):
    trace, page = tmp_path / "out" / "trace.json", tmp_path / "page.html"
    code, _, err = run(capsys, "predict", plan(), "--trace", trace, "--html", page)
    assert code == 0
    assert err.count("wrote") == 2
    assert chrome.read_trace(trace).meta["kind"] == "predicted"
    assert "llama-3-8b on mixed-lab" in page.read_text()


def test_what_does_not_fit_says_why_and_exits_with_1(capsys, plan):
    code, out, _ = run(capsys, "predict", plan(micro=32, optimizer=1))
    assert code == 1
    assert "prediction: does not fit" in out
    assert "lacks" in out
    assert "Try" in out
    code, out, _ = run(capsys, "predict", plan(micro=32, optimizer=1), "--json")
    assert code == 1
    assert json.loads(out)["reasons"]


@pytest.mark.parametrize(("changes", "part"), [
    ({"samples": 31}, "the job's global batch is 128"),
    ({"last": 33}, "llama-3-8b has 34"),
    ({"tensor": 3}, "16 devices"),
    ({"optimizer": 5}, "at most 4"),
    ({"micro": 33}, "the largest is 32"),
])
def test_impossible_plans_are_bad_input(capsys, plan, changes, part):
    code, out, err = run(capsys, "predict", plan(**changes))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert part in err


def test_a_plan_for_another_cluster(capsys, plan):
    path = plan()
    path.write_text(path.read_text() + "cluster_fingerprint: 0123456789ab\n")
    code, _, err = run(capsys, "predict", path)
    assert code == 2
    assert "made for another cluster" in err


def test_other_job_and_cluster(capsys, plan, tmp_path):
    path = plan()
    job = tmp_path / "job.yaml"
    job.write_text((ROOT / "examples/jobs/llama-3-8b.yaml").read_text().replace("seq_len: 8192", "seq_len: 4096"))
    whole, half = (json.loads(run(capsys, "predict", path, "--json", *more)[1])["step_s"]
                   for more in ([], ["--job", job]))
    assert half < whole


def test_a_plan_that_names_no_job(capsys, plan):
    path = plan()
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith("job:")))
    code, _, err = run(capsys, "predict", path)
    assert code == 2
    assert "give one with --job" in err
