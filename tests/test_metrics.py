"""Metrics and progress of a run."""

from __future__ import annotations

import io
import json
import math

import pytest

from mixfleet.errors import InputError
from mixfleet.report.results import training
from mixfleet.run import metrics
from mixfleet.run.host import CoreUse, CoreWatch, foreign
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


def test_what_other_programs_take() -> None:
    """Two hosts of two cores; on the first 9 of 12 s are ours and 2 are not, on the second 3 of 8 s and 4."""
    uses = [CoreUse("a", {0: 5.0, 1: 6.0}, 4.5, 6.0), CoreUse("a", {0: 5.0, 1: 6.0}, 4.5, 6.0),
            CoreUse("b", {2: 4.0}, 3.0, 4.0), CoreUse("b", {3: 3.0}, 0.0, 4.0)]
    assert foreign(uses) == pytest.approx(4 / 8)
    assert foreign(uses[:2]) == pytest.approx(2 / 12)
    assert foreign([CoreUse("c", {}, 1.0, 2.0)]) == 0.0  # where nobody says how busy cores are
    watch = CoreWatch()
    while watch.use().own_s < 0.05:
        pass
    use = watch.use()
    assert sum(use.busy_s.values()) >= use.own_s - 0.05  # to a tick of both
    assert said(0.38) == "took 38% of the cores meanwhile, so steps took longer than they need"
    assert said(0.1) == ""


def said(part: float) -> str:
    """What a run says about it."""
    found = training({"step": 3, "stopped": False, "first_loss": 2.0, "last_loss": 1.0, "step_s": 1.0,
                      "predicted_step_s": 0.5, "checkpoint": "", "foreign": part})
    return dict(found.facts)["other programs"]
