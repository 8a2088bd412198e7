"""Trace files, pictures and pages."""

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfleet.cluster import Cluster
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.report import chrome, html, results, terminal, timeline, views
from mixfleet.sim import predict
from mixfleet.trace import CATEGORIES, STREAMS, MemoryMark, Span, Trace, compare

LAB = "examples/clusters/mixed-lab.yaml"
TIMES = st.integers(0, 2**62)


@st.composite
def traces(draw):
    def span():
        start = draw(TIMES)
        return Span(draw(st.integers(0, 5)), draw(st.sampled_from(STREAMS)), draw(st.text(max_size=8)),
                    draw(st.sampled_from(CATEGORIES)), start, draw(st.integers(start, 2**62)))

    marks = draw(st.lists(st.builds(MemoryMark, st.integers(0, 5), TIMES, st.integers(0, 2**50), st.text(max_size=8)),
                          max_size=5))
    return Trace(spans=tuple(span() for _ in range(draw(st.integers(0, 8)))), memory=tuple(marks),
                 meta={"kind": "measured", "steps_ns": [[0, 17]], "device_names": {"0": draw(st.text(max_size=5))}})


@given(traces())
def test_trace_file_keeps_every_nanosecond(trace):
    assert chrome.loads(chrome.dumps(trace)) == trace


def tiny(kind="predicted", slower=1):
    """Two devices, the second stands for three; hand-made times in ns."""
    spans = (Span(0, "compute", "F0:2.0", "forward", 0, 3_000_000 * slower),
             Span(0, "p2p", "SA1.0@1", "send", 3_000_000 * slower, 4_000_000 * slower),
             Span(1, "compute", "F2:3.0", "forward", 4_000_000 * slower, 9_000_000 * slower))
    return Trace(spans=spans, memory=(MemoryMark(0, 0, 6 * 2**30, "weights"),), meta={
        "kind": kind, "steps_ns": [[0, 10_000_000 * slower]], "multiplicity": {"1": 3},
        "device_names": {"0": "A<b>", "1": "B&C"}, "tokens_per_step": 50})


def test_chrome_events_are_what_viewers_expect():
    events = json.loads(chrome.dumps(tiny()))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in spans] == [(0, 0, 3000), (0, 3000, 1000), (1, 4000, 5000)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "0 A<b>", 1: "1 B&C (x 3)"}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"bytes": 6 * 2**30}]


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not a trace file"),
    ('{"x": 1}', "not a trace file"),
    ('{"traceEvents": [{"ph": "X", "cat": "dancing", "pid": 0}]}', r"traceEvents\[0\].cat is 'dancing'"),
    ('{"traceEvents": [{"ph": "X", "cat": "forward", "pid": "gpu"}]}', r"traceEvents\[0\].pid is 'gpu'"),
    ('{"traceEvents": [{"ph": "X", "cat": "forward", "pid": 0, "dur": -3.5}]}', "cannot be negative"),
    ('{"traceEvents": [{"ph": "C", "name": "memory", "pid": 0, "args": {"bytes": "many"}}]}', "'many'"),
])
def test_a_broken_trace_file_is_bad_input(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"broken.json.*{message}"):
        chrome.read_trace(path)


def test_events_of_others_are_skipped():
    trace = chrome.loads('{"traceEvents": [{"ph": "i", "name": "x"}, {"ph": "C", "name": "other", "pid": 0}]}')
    assert trace == Trace(spans=())


class Checker(HTMLParser):
    """Balanced tags, and nothing that is fetched from elsewhere."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page):
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert not {"script", "link", "iframe", "img", "object"} & set(checker.tags)
    assert "@import" not in page
    assert "url(" not in page
    return checker.tags


def test_page_is_self_contained_and_escapes():
    trace = tiny()
    page = html.render("<script>alert(1)</script>", tiles=[("step", "<i>")], traces=[("one", trace), ("two", trace)],
                       capacity={0: 8 * 2**30}, sections=[results.trace(trace)],
                       bars=[html.Bar("A<b>", {"weights": 3 * 2**30, "moments": 2**30}, 8 * 2**30)])
    tags = checked(page)
    assert tags.count("svg") == 2
    assert "A<b>" not in page
    assert "A&lt;b&gt;" in page
    widths = re.findall(r'<i style="width:([\d.]+)%', page)
    assert widths == ["37.5", "12.5"]


def test_timeline_draws_to_scale():
    picture = timeline.svg(tiny(), width=timeline._LABEL + timeline._MARGIN + 1000, span_ns=20_000_000)
    boxes = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="\d+" fill="(#\w+)"><title>', picture)
    found = [(float(x) - timeline._LABEL, float(w), colour) for x, w, colour in boxes]
    assert found == [(0, pytest.approx(149.6), timeline.COLOURS["forward"]),
                     (150, pytest.approx(49.6), timeline.COLOURS["send"]),
                     (200, pytest.approx(249.6), timeline.COLOURS["forward"])]
    assert "× 3" in picture


def test_timeline_of_many_spans_and_devices_stays_small():
    spans = tuple(Span(d, "compute", f"F0.{i}", "forward", i * 10, i * 10 + 9) for d in range(1024) for i in range(40))
    picture = timeline.svg(Trace(spans=spans))
    assert f"{1024 - timeline.MAX_ROWS} more devices are not drawn" in picture
    dense = Trace(spans=tuple(Span(0, "compute", f"F0.{i}", "forward", i * 10, i * 10 + 9) for i in range(100_000)))
    assert len(timeline.svg(dense)) < 20_000


def test_timeline_of_an_empty_trace():
    assert "<svg" in timeline.svg(Trace(spans=()))


def test_the_step_drawn_is_the_median():
    trace = tiny().replace(meta={"steps_ns": [[0, 50], [50, 60], [60, 90]]})
    assert timeline.window(trace) == (60, 90)


def test_ranges_and_counts():
    assert views.ranges([7, 0, 1, 2, 4]) == "0-2, 4, 7"
    assert views.ranges([]) == ""
    assert views.ranges(r for i in range(5) for r in (7 * i, 7 * i + 1)) == "0-1, 7-8 .. 28-29 (10)"
    assert views.ranges([0, 2, 4, 6, 9]) == "0, 2, 4, 6, 9"
    assert views.ranges([0, 2, 4, 6, 9], short=True) == "0, 2 .. 9 (5)"
    assert views.counted(["b", "a", "b"]) == "2 x b, 1 x a"
    assert views.plural(1, "node") == "1 node"
    assert views.plural(1024, "node") == "1,024 nodes"


def test_trace_view_shows_where_time_went():
    text = terminal.text(results.trace(tiny()))
    assert "predicted trace of 1 step" in text
    row = next(line for line in text.splitlines() if line.startswith("1 (x 3)"))
    assert "50.0 %" in row
    assert "5 ms" in row
    assert "5,000" in text  # 50 tokens in 10 ms


def test_comparison_view_names_the_worst():
    text = terminal.text(results.comparison(compare(tiny(), tiny("measured", 2)), {"1": "B&C"}))
    assert "step predicted 10 ms, measured 20 ms: -50.0 %" in text
    assert "forward on rank 1: predicted 5 ms, measured 10 ms" in text


def lab():
    cluster, job = Cluster.load(LAB), Job.load("examples/jobs/llama-3-8b.yaml")
    blocks = len(job.model.blocks)
    plan = Plan(pipelines=(Pipeline(samples=32, micro_batch=1, replicas=4, stages=(
        Stage(blocks=(0, 22), devices=tuple(range(8)), tensor=2, recompute="selective"),
        Stage(blocks=(22, blocks), devices=tuple(range(8, 24)), tensor=4, recompute="full"))),),
        sharding=Sharding(optimizer=4))
    return plan, job, cluster


def test_page_of_a_prediction():
    plan, job, cluster = lab()
    prediction = predict(plan, job, cluster, trace=True)
    page = html.of_prediction("llama", plan, prediction, cluster=cluster, measured=prediction.trace)
    tags = checked(page)
    assert tags.count("svg") == 2
    assert "Memory per device" in page
    assert "0-7 A100-SXM4-80GB" in page
    shown = terminal.text(results.prediction(prediction, plan))
    assert "bound by" in shown
    assert all(name in html.PARTS for use in prediction.devices for name in use.breakdown)


def test_plan_view_prints_the_rank_map():
    plan, _, cluster = lab()
    text = terminal.text(views.plan(plan, cluster))
    assert re.search(r"1 +22-33 +8-23 +16 x V100-SXM2-32GB +4 +1 x 32 +32 +full", text)
    assert "idle ranks    24-27" in text


def test_cluster_view_folds_nodes_that_are_alike():
    text = terminal.text(views.cluster(Cluster.load(LAB)))
    assert re.search(r"v100-0 \.\. v100-1 \(2\) +8-23 +8 x V100", text)
    assert "28 devices in 4 nodes" in text
