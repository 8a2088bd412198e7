"""What the commands say about schedules: figures against hand-worked ones, pictures, variants of a plan, memory."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mixfleet.cli import main
from mixfleet.errors import InputError
from mixfleet.job import Optimizer
from mixfleet.plan import Plan
from mixfleet.plan_rules import why_not
from mixfleet.schedule.named import SCHEDULES
from mixfleet.schedule.properties import properties
from mixfleet.search.variants import compare, under
from mixfleet.sim import predict
from sim_toys import block, cluster, device, job, straight


@pytest.mark.parametrize(("name", "over", "held", "messages"), [
    ("gpipe", 3 / 8, (8, 8, 8, 8), 6),
    ("1f1b", 3 / 8, (4, 3, 2, 1), 6),
    ("interleaved", 3 / 16, (5.5, 4.5, 3.5, 2.5), 14),  # warm-up 2(p - d - 1) + p, then one more, in halves
    ("zb-h1", 1 / 8, (4, 4, 4, 4), 6),
    ("zb-v", 1 / 16, None, 12),  # no message at the turning point
    ("chimera", 6 / 24, (3, 4, 4, 3), 6),
    ("dualpipe", 1 / 24, (5, 5, 5, 5), 6),
    ("dualpipe-v", 1.5 / 24, (4.5,) * 4, 12),  # 3 (F + B - 2W) of half chunks
])
def test_figures_of_four_stages_and_eight_micro_batches(name, over, held, messages):
    found = properties(name, 4, 8)
    assert found.over_ideal == pytest.approx(over)
    assert found.bubble == pytest.approx(over / (1 + over))
    assert held is None or found.in_flight == held
    assert found.messages == messages
    assert found.splits == SCHEDULES[name].splits
    assert found.copies == SCHEDULES[name].ways


@pytest.mark.parametrize(("p", "expected"), [(4, [0.429, 0.333, 0.213, 0.119]), (8, [0.467, 0.368, 0.238, 0.135])])
def test_more_waves_mean_smaller_bubbles(p, expected):
    """1F1B and then 1, 2 and 4 waves, with as many micro-batches as stages. Hanayo's formula as it is recalled,
    (2p - 2) / (3pW + p - 1), is within 0.02 of it for several waves, and 0.07 too high for one."""
    bubbles = [properties("1f1b", p, p).bubble] + [properties("wave", p, p, 2 * w).bubble for w in (1, 2, 4)]
    assert [round(b, 3) for b in bubbles] == expected


def test_the_command_lists_all_and_says_what_does_not_suit(capsys, tmp_path: Path):
    assert main(["schedules", "--micro-batches", "6", "--json", "--svg", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {p["name"] for p in found["schedules"]} | set(found["refused"]) == {*SCHEDULES, "roundpipe"}
    assert found["refused"] == {"interleaved": "wants micro-batches in groups of 4; there are 6, nearest 4 or 8"}
    for p in (p for p in found["schedules"] if p["name"] in SCHEDULES):
        tree = ElementTree.parse(tmp_path / f"{p['name']}.svg").getroot()
        boxes = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}title")]
        steps = len(p["home"]) * 6 // p["copies"]
        assert len(boxes) == len(set(boxes))
        mixed = p["name"].startswith("dualpipe")  # both whole backwards and halves
        updates = 1 if p["synchronous"] else 3  # one that fills, two more
        marks = len(p["home"]) * (0 if p["synchronous"] else updates)  # their optimizer steps
        assert sum(box.startswith(("S", "PU")) for box in boxes) == marks
        assert len(boxes) in (range(2 * steps + 1, 3 * steps) if mixed else
                              [(3 if p["splits"] else 2) * steps * updates + marks])


def chain(samples=4, memory=10**10, schedule="1f1b") -> tuple[Plan, object, object]:
    times = [(1, 2), (1, 3), (2, 3), (2, 5), (1, 2)]
    return (straight((0, 3, 5), samples, schedule), job([block(i) for i in range(5)], samples),
            cluster(*[device(times).replace(memory_bytes=memory)] * 2))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_under_other_schedules_keeps_devices_and_blocks(name):
    plan, job_, cluster_ = chain()
    job_ = job_.replace(optimizer=Optimizer(name="sgd"))
    other = under(plan, name, job_, cluster_)
    assert isinstance(other, Plan)
    assert why_not(other, job_, cluster_) is None
    assert other.schedule == name
    assert [(s.size, s.devices) for s in other.pipelines[0].stages] == [(3, (0,)), (2, (1,))]
    if SCHEDULES[name].ways == 2:
        assert [(s.text, s.devices) for s in other.pipelines[1].stages] == [("0-1", (1,)), ("2-4", (0,))]
    assert sum(p.samples for p in other.pipelines) == 4
    back = under(other, "1f1b", job_, cluster_)
    assert isinstance(back, Plan)
    assert back == plan.replace(schedule="1f1b")


def test_comparison_gives_reasons_and_is_the_simulators():
    plan, job_, cluster_ = chain(samples=3)
    found = compare(plan, ["1f1b", "interleaved", "searched"], job_, cluster_)
    assert found["interleaved"].endswith("wants micro-batches in groups of 2; there are 3, nearest 2 or 4")
    assert found["1f1b"][1].step_s == predict(plan, job_, cluster_).step_s
    assert isinstance(found["searched"], str) or found["searched"][1].step_s < found["1f1b"][1].step_s
    thin = plan.replace(pipelines=(straight((0, 4, 5), 3).pipelines[0],))
    assert "stage 1 of pipeline 0 has 1 block(s)" in compare(thin, ["wave"], job_, cluster_)["wave"]
    with pytest.raises(InputError, match="did you mean '1f1b'"):
        compare(plan, ["1f2b"], job_, cluster_)


def test_too_little_memory_says_how_many_micro_batches_fit():
    plan, job_, cluster_ = chain(samples=6)
    most = max(d.peak_bytes for d in predict(plan, job_, cluster_).devices)
    gpipe, job_, cluster_ = chain(samples=6, memory=most + 4000, schedule="gpipe")
    short = predict(gpipe, job_, cluster_)
    assert not short.fits
    # Stage 0 of two holds 2 micro-batches under 1F1B.
    assert "at most 2 of the 6 micro-batches now in flight here, as under 1f1b" in short.reasons[0]


def test_the_documentation_is_current(tmp_path: Path, capsys):
    """`mixfleet schedules --svg docs/schedules` draws the pictures again; the table is copied from what it prints."""
    docs = Path(__file__).parent.parent / "docs"
    assert main(["schedules", "--json", "--svg", str(tmp_path)]) == 0
    page = (docs / "schedules.md").read_text(encoding="utf-8")
    for p in json.loads(capsys.readouterr().out)["schedules"]:
        assert f"| {p['name']} | {100 * p['bubble']:.1f} % | {', '.join(f'{n:g}' for n in p['in_flight'])} |" in page
        assert (docs / "schedules" / f"{p['name']}.svg").read_text() == (tmp_path / f"{p['name']}.svg").read_text()
    for name in (n for n, s in SCHEDULES.items() if s.weights):
        cells = []
        for found in (properties(name, 4, 1), properties(name, 4, 8)):
            if isinstance(found, str):
                cells += ["needs m >= 3", ""]
            else:
                late = [str(a) if a == b else f"{a}-{b}" for a, b in found.staleness]
                cells += [" ".join(late), " ".join(map(str, found.versions))]
                backward = found.backward
        assert f"| {' | '.join([name, *cells, backward])} |".replace("|  |", "| |") in page
