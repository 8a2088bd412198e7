"""What traces say, on spans small enough to add up by hand."""

import pytest

from mixfleet import trace as tr
from mixfleet.trace import MemoryMark, Span, Trace

S = 10**9


def spans(*rows):
    return tuple(Span(*what, round(a * S), round(b * S)) for *what, a, b in rows)


@pytest.fixture
def trace():
    # device 0: computes 0-3 and 5-9, receives 2-6, gathers 4-4.5 of it; device 1 stands for 3 and computes 1-3
    return Trace(
        spans=spans((0, "compute", "F0.0", "forward", 0, 3), (0, "p2p", "RG0.0@1", "recv", 2, 6),
                    (0, "gather", "G1", "gather", 4, 4.5), (0, "compute", "B0.0", "backward", 5, 9),
                    (1, "compute", "F1.0", "forward", 1, 2.5), (1, "compute", "F1.0", "tensor", 2.5, 3)),
        memory=(MemoryMark(0, 0, 70, ""), MemoryMark(0, 3 * S, 90, "B"), MemoryMark(0, 5 * S, 90, "F"),
                MemoryMark(1, 0, 7, "")),
        meta={"steps_ns": [[0, 10 * S]], "multiplicity": {"1": 3}, "peak_flops": 50.0, "model_flops_per_step": 200.0,
              "hardware_flops_per_step": 250.0})


def test_time_by_category_and_utilization(trace):
    assert tr.step_s(trace) == 10
    assert tr.by_category(trace) == {0: {"forward": 3, "backward": 4, "recv": 4, "gather": 0.5},
                                     1: {"forward": 1.5, "tensor": 0.5}}
    assert tr.utilization(trace) == {0: 0.7, 1: 0.15}


def test_exposed_communication_counts_each_instant_once(trace):
    # device 0 has nothing to compute in 3-5 and receives all the time; the gather in 4-4.5 adds nothing to that
    assert tr.exposed(trace) == {0: {"recv": 2, "gather": 0}, 1: {"tensor": 0.5}}
    assert tr.mean_exposed(trace) == {"tensor": 1.5 / 4, "recv": 2 / 4, "gather": 0}
    gather = trace.replace(spans=tuple(s for s in trace.spans if s.category != "recv"))
    assert tr.exposed(gather)[0] == {"gather": 0.5}


def test_bubble_is_what_is_left_of_all_devices(trace):
    assert tr.bubble(trace) == pytest.approx((0.1 + 3 * 0.8) / 4)


def test_peak_memory_is_the_first_of_equals(trace):
    assert tr.peak_memory(trace) == {0: MemoryMark(0, 3 * S, 90, "B"), 1: MemoryMark(1, 0, 7, "")}


def test_flop_utilization(trace):
    assert tr.flop_utilization(trace) == (200 / 500, 250 / 500)
    assert tr.flop_utilization(Trace(spans=trace.spans)) == (0.0, 0.0)


def test_several_steps_are_averaged():
    two = Trace(spans=spans((0, "compute", "F", "forward", 0, 3), (0, "compute", "F", "forward", 5, 10)),
                meta={"steps_ns": [[0, 5 * S], [5 * S, 12 * S]]})
    assert tr.step_s(two) == 6
    assert tr.by_category(two) == {0: {"forward": 4}}
    assert tr.utilization(two) == {0: 8 / 12}


def test_without_steps_the_trace_is_one(trace):
    assert Trace(spans=trace.spans).steps_ns == ((0, 9 * S),)
    assert Trace(spans=()).steps_ns == ()
    assert tr.step_s(Trace(spans=())) == 0


def test_compare_by_category_and_device():
    predicted = Trace(spans=spans((0, "compute", "F", "forward", 0, 3), (0, "p2p", "SA", "send", 3, 4)),
                      meta={"row_of": {"0": 0, "1": 0}})
    measured = Trace(spans=spans((0, "compute", "F", "forward", 0, 2), (1, "compute", "F", "forward", 0, 4),
                                 (1, "compute", "N", "host", 4, 5)))
    result = tr.compare(predicted, measured)
    assert [tuple(r) for r in result.rows] == [
        (0, "forward", 3, 2), (0, "send", 1, 0), (1, "forward", 3, 4), (1, "send", 1, 0), (1, "host", 0, 1)]
    assert (result.step.predicted_s, result.step.measured_s, result.step.error) == (4, 5, -0.2)
    assert result.rows[0].error == 0.5
    assert result.rows[1].error is None
    assert abs(result.worst.predicted_s - result.worst.measured_s) == 1


def test_a_prediction_against_itself_is_exact(trace):
    assert all(r.error == 0 for r in tr.compare(trace, trace).rows)
