"""Metrics and progress of a run."""

from __future__ import annotations

import io
import json
import math

import pytest

from mixfleet.errors import InputError
from mixfleet.run import metrics
from mixfleet.run.metrics import Reporter, StepMetrics


def step(number, **changes):
    figures = {"step": number, "loss": 2.5, "tokens": 3000, "seconds": 0.5, "lr": 1e-3, "grad_norm": 0.7,
               "bytes_sent": 2048}
    return StepMetrics(**figures | changes)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_json_line_per_step(tmp_path):
    path = tmp_path / "out" / "metrics.jsonl"
    with Reporter(path, 2, stream=io.StringIO()) as reporter:
        reporter.step(step(1))
        assert steps_in(path) == [1]  # at once, not when the run ends
        reporter.step(step(2, loss=math.nan, grad_norm=math.inf))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 1, "loss": 2.5, "tokens": 3000, "seconds": 0.5, "lr": 1e-3, "grad_norm": 0.7,
                     "bytes_sent": 2048, "tokens_per_s": 6000}
    assert (second["loss"], second["grad_norm"]) == (None, None)


def test_resuming_drops_the_steps_that_are_trained_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Reporter(path, 9, stream=io.StringIO()) as reporter:
        for number in range(1, 6):
            reporter.step(step(number))
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed in the middle of a line
    with Reporter(path, 9, first_step=3, stream=io.StringIO()) as reporter:
        reporter.step(step(4, loss=1.5))
    assert steps_in(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 1.5


def test_plain_lines_at_most_one_per_second_besides_first_and_last(monkeypatch):
    now = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with Reporter(None, 6, stream=stream) as reporter:
        for number, now in enumerate((0.0, 0.3, 0.6, 1.2, 1.3, 1.5), 1):  # noqa: B007
            reporter.step(step(number))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/6", "4/6", "6/6"]
    assert lines[0] == "step 1/6  loss 2.5000  6 k tokens/s  500 ms  lr 0.001  norm 0.7  sent 2 KiB"


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    with Reporter(None, 2, stream=stream) as reporter:
        reporter.step(step(1))
        reporter.note("checkpoint [1] saved")
        reporter.step(step(2))
    assert "2/2" in stream.getvalue()
    assert "checkpoint [1] saved" in stream.getvalue()


def test_a_path_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        Reporter(tmp_path / "file" / "metrics.jsonl", 1)
