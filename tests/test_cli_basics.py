"""Help, exit codes, error messages, `show` and `compare`: no traceback ever reaches a user."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from mixfleet import cli
from mixfleet.errors import RunError
from mixfleet.report import chrome
from mixfleet.trace import Span, Trace

COMMANDS = ("calibrate", "compare", "discover", "elastic", "export", "fit", "plan", "predict", "scale", "schedules",
            "show", "testbed", "train", "validate")
SILENT = {("testbed", verb) for verb in ("run", "profile", "down", "fault", "enter")}
"""They have no result of their own to print: a file, another command's output, a deed."""


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def fails(result, code, *parts):
    assert result[0] == code
    assert result[1] == ""
    line = next(line for line in result[2].splitlines() if line.startswith("error: "))
    for part in parts:
        assert part in line


def test_help_lists_the_verbs(run):
    code, out, _ = run("--help")
    assert code == 0
    assert set(cli.cli.commands) == set(COMMANDS)
    assert all(f"  {name} " in out for name in COMMANDS)


def verbs():
    """Every command, those of groups as `group verb`."""
    for name, command in cli.cli.commands.items():
        if isinstance(command, click.Group):
            yield from (((name, verb), one) for verb, one in command.commands.items())
        else:
            yield (name,), command


@pytest.mark.parametrize(("words", "command"), list(verbs()), ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_every_command_explains_itself_and_has_json(run, words, command):
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert ("--json" in out) == (words not in SILENT)
    for option in command.params:
        assert not isinstance(option, click.Option) or option.help, f"{option.name} has no help"


def test_help_is_quick():
    """The limit is 0.3 s of CPU time; `make bench` measures it. Here, of three tries on a busy machine, the best."""
    def seconds():
        before = os.times()
        subprocess.run([sys.executable, "-m", "mixfleet", "--help"], check=True, capture_output=True)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(seconds() for _ in range(3)) < 0.3


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("mixfleet 0.")


@pytest.mark.parametrize(("arguments", "parts"), [
    (["plam"], ["plam", "plan"]),
    (["show", "--jso", "devices"], ["--jso", "--json"]),
    (["show"], ["THING"]),
    (["predict", "missing.yaml"], ["missing.yaml", "does not exist"]),
    (["show", "A100-SXM4-80G"], ["'A100-SXM4-80G'", "A100-SXM4-80GB"]),
    (["show", "lama-3-8b"], ["llama-3-8b"]),
    (["discover", "--ranks", "0 x"], ["--ranks is '0 x'"]),
    (["discover", "--no-measure", "--ranks", "0 9999"], ["9999"]),
    (["compare", "examples/jobs/gpt-tiny.yaml", "examples/jobs/gpt-tiny.yaml"], ["gpt-tiny.yaml", "not a trace file"]),
    (["compare", "examples/jobs/gpt-tiny.yaml"], ["give the measured trace"]),
])
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, parts):
    fails(run(*arguments), 2, *parts)


@pytest.mark.parametrize(("text", "parts"), [
    ("mixfleet: cluster/1\nname: x\nnodes: [\n", ["bad.yaml", "not valid YAML"]),
    ("mixfleet: cluster/1\nname: x\nnodes:\n  - {name: a, devices: {device: T4}, nic: fast}\n", ["bad.yaml:4"]),
    ("mixfleet: job/1\nname: x\nmodel: lama-3-8b\nseq_len: 8\nglobal_batch: 2\n", ["bad.yaml:3", "llama-3-8b"]),
    ("mixfleet: job/1\nname: x\nmodel: llama-3-8b\nseq_len: -8\nglobal_batch: 2\n", ["seq_len", "-8"]),
    ("mixfleet: plan/1\npipelines: []\n", ["pipelines is empty"]),
    ("name: x\n", ["mixfleet: <kind>/1"]),
    ("just text\n", ["bad.yaml"]),
])
def test_a_bad_file_is_named_with_its_line(run, tmp_path, text, parts):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    fails(run("show", path), 2, *parts)


def test_bad_json(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    fails(run("show", path), 2, "config.json", "not valid JSON")
    path.write_text("[1]")
    fails(run("show", path), 2, "config.json")


def test_an_unexpected_exception_asks_for_a_report(run, monkeypatch):
    def broken(**_):
        raise ZeroDivisionError("7 by 0")

    monkeypatch.setattr(cli.cli.commands["show"], "callback", broken)
    code, out, err = run("show", "devices")
    assert (code, out) == (1, "")
    assert "unexpected ZeroDivisionError: 7 by 0" in err
    assert "MIXFLEET_DEBUG=1" in err
    monkeypatch.setenv("MIXFLEET_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "devices"])


@pytest.mark.parametrize(("error", "code", "part"), [
    (RunError("rank 3 died"), 1, "rank 3 died"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "pip install 'mixfleet[run]'"),
    (ModuleNotFoundError("No module named 'q'", name="q"), 1, "unexpected ModuleNotFoundError"),
])
def test_exit_codes(run, monkeypatch, error, code, part):
    def raises(**_):
        raise error

    monkeypatch.setattr(cli.cli.commands["show"], "callback", raises)
    fails(run("show", "devices"), code, part)


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m mixfleet show devices | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.parametrize(("thing", "parts"), [
    ("devices", ["A100-SXM4-80GB", "312 TFLOP/s"]),
    ("instances", ["p4d.24xlarge", "8 x A100-SXM4-40GB", "400 Gb/s"]),
    ("models", ["llama-3-8b", "8,030,261,248"]),
    ("RTX4090", ["device RTX4090", "source"]),
    ("p4d.24xlarge", ["8 x A100-SXM4-40GB"]),
    ("llama-3-8b", ["8,030,261,248", "128,256"]),
    ("examples/clusters/mixed-lab.yaml", ["cluster mixed-lab: 28 devices in 4 nodes"]),
    ("examples/jobs/llama-3-8b.yaml", ["job llama-3-8b", "8,192 tokens"]),
])
def test_show(run, thing, parts):
    code, out, err = run("show", thing)
    assert (code, err) == (0, "")
    for part in parts:
        assert part in out
    code, out, err = run("show", thing, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)


def traces(folder: Path):
    def one(kind, ns):
        return Trace(spans=(Span(0, "compute", "F0:2.0", "forward", 0, ns),), meta={
            "kind": kind, "steps_ns": [[0, ns]], "device_names": {"0": "cpu"}, "tokens_per_step": 30})

    folder.mkdir(exist_ok=True)
    chrome.write_trace(one("predicted", 1_100_000), folder / "predicted.json")
    chrome.write_trace(one("measured", 1_000_000), folder / "measured.json")


def test_compare_files_and_run_folder(run, tmp_path):
    traces(tmp_path / "run")
    code, out, _ = run("compare", tmp_path / "run")
    assert code == 0
    assert "step predicted 1.1 ms, measured 1 ms: +10.0 %" in out
    both = run("compare", tmp_path / "run/predicted.json", tmp_path / "run/measured.json", "--json",
               "--html", tmp_path / "a" / "page.html")
    found = json.loads(both[1])
    assert found["step"]["predicted_s"] == 0.0011
    assert found["step"]["error"] == pytest.approx(0.1)
    assert found["rows"] == [{"device": 0, "category": "forward", "predicted_s": 0.0011, "measured_s": 0.001,
                              "error": pytest.approx(0.1)}]
    assert "<svg" in (tmp_path / "a" / "page.html").read_text()
    assert "wrote" in both[2]


def test_show_a_trace(run, tmp_path):
    traces(tmp_path)
    code, out, _ = run("show", tmp_path / "measured.json")
    assert code == 0
    assert "measured trace of 1 step" in out
    assert "30,000" in out


def test_compare_of_a_folder_without_traces(run, tmp_path):
    fails(run("compare", tmp_path), 2, "predicted.json", "No such file")


def test_discover_without_measuring(run, tmp_path):
    path = tmp_path / "here.yaml"
    core = sorted(os.sched_getaffinity(0))[0]
    code, out, err = run("discover", "--no-measure", "--ranks", f"{core} {core} {core}", "-o", path)
    assert code == 0
    assert "3 devices in 1 node" in out
    assert f"wrote {path}" in err
    code, out, _ = run("show", path, "--json")
    assert [d["share"] for d in json.loads(out)["nodes"][0]["devices"]] == [pytest.approx(1 / 3)] * 3
    assert "Traceback" not in out


def test_output_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    traces(tmp_path / "run")
    fails(run("compare", tmp_path / "run", "--html", tmp_path / "file" / "page.html"), 2, "cannot be written")


def test_a_device_file_is_shown_with_the_clock_it_states(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("mixfleet: device/1\nbase: H100-SXM\nname: locked\nclock: 0.8\n")
    code, out, _ = run("show", path)
    assert code == 0
    assert any(line.split() == ["clock", "held", "80.0", "%"] for line in out.splitlines())
    path.write_text(path.read_text().replace("0.8", "7"))
    fails(run("show", path), 2, "mine.yaml: device locked: clock is 7.0; it must be above 0 and at most 1")
