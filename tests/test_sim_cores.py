"""Communication takes time of a CPU rank's core: by hand, with unequal numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim_toys as toy
from mixfleet.cluster import NS_PER_S
from mixfleet.cost import network
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim import compiled
from mixfleet.sim.engine import Graph, run
from mixfleet.sim.flow import computing, flow
from mixfleet.sim.interpreter import play
from mixfleet.sim.prediction import predict
from sim_toys import free_overheads  # noqa: F401

S = NS_PER_S
CORE, WIRE = 0, 1


def transfer(nbytes, work_s):
    """Through a wire of 100 B/s, with so much work of a core."""
    return flow(0.0, [(WIRE, 100.0, nbytes), (CORE, 1.0 * S, work_s * S)], cores={CORE})


def beside(work_s, compute_s=10, nbytes=400, fills=200.0):
    """Ends of a transfer and of a computation that start together on one core, in seconds."""
    graph = Graph()
    graph.add(flow=transfer(nbytes, work_s))
    graph.add(flow=computing(compute_s * S, [(CORE, 1.0)], fills))
    return [end / S for end in run(graph).end]


def test_a_transfer_that_waits_for_the_wire_takes_its_work_from_the_computing():
    assert beside(work_s=1) == [4, 11]  # 4 s at three quarters of the core, then 7 alone
    assert beside(work_s=3) == [5, 13]  # it wants three quarters of the core and gets 0.6, as computing fills 200 B/s
    assert beside(work_s=0) == [4, 10]


def test_a_transfer_that_waits_for_the_core_shares_it_equally():
    assert beside(work_s=8, fills=50.0) == [16, 18]  # half the core each; the last 2 s of computing alone


def test_two_transfers_share_a_wire_by_bytes_whatever_they_ask_of_their_cores():
    graph = Graph()
    graph.add(flow=transfer(300, work_s=0))
    graph.add(flow=flow(0.0, [(WIRE, 100.0, 300), (7, 1.0 * S, 2.5 * S)], cores={7}))
    assert [end / S for end in run(graph).end] == [6, 6]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=4), st.integers(1, 60))
def test_a_core_does_all_work_and_rests_only_for_the_wire(transfers, compute_s):
    """One after another beside computing: the end is never before all work is done, nor after doing it in turn."""
    graph = Graph()
    last = -1
    for nbytes, work_s in transfers:
        task = graph.add(flow=transfer(100 * nbytes, work_s))
        if last >= 0:
            graph.order(last, task)
        last = task
    graph.add(flow=computing(compute_s * S, [(CORE, 1.0)], 30.0))
    end = max(run(graph).end) / S
    work = compute_s + sum(w for _, w in transfers)
    assert end >= max(work, sum(max(n, w) for n, w in transfers)) - 1e-6
    assert end <= compute_s + sum(max(n, w) for n, w in transfers) + 1e-6


@given(st.lists(st.tuples(st.sampled_from("fct"), st.integers(1, 9), st.integers(0, 9), st.integers(0, 2),
                          st.sets(st.integers(1, 6), max_size=3)), min_size=1, max_size=14))
def test_both_engines_agree_to_the_nanosecond(tasks):
    """Fixed durations, computing on two cores, and transfers that load a wire and a core and may wait for their turn;
    each after some of the tasks before it."""
    graph = Graph()
    for i, (kind, size, work, core, back) in enumerate(tasks):
        if kind == "f":
            graph.add(size * 1000)
        elif kind == "c":
            graph.add(flow=computing(size * 1000, [(core, 1.0)], 7.0 + core))
        else:
            graph.add(flow=flow(1e-6 * (work % 3), [(5, 1e6, size), (core, 1e9, work * 700.0)], cores={0, 1, 2},
                                turn_s=1e-6 * (size % 4)))
        for j in {i - b for b in back if i >= b}:
            graph.order(j, i)
    assert compiled.play(graph) == run(graph)


def processes(count, **costs):
    """CPU ranks in nodes of their own: block 0 takes 3 s and 10 s, block 1 5 s and 8 s; 64 bytes per second."""
    costs = {"message_cpu_s": 1 / 8, "byte_cpu_s": 1 / 512, "sum_cpu_s": 1 / 256, "turn_s": 0.0} | costs
    one = toy.device([(3000, 10_000), (5000, 8000)], kind="cpu", efficiency={"optimizer": 1e9}, **costs)
    return toy.cluster(*[one] * count, nic=64.0, per_node=1)


def data_parallel(count, **sharding):
    return Plan(sharding=Sharding(**sharding), pipelines=(Pipeline(
        samples=1, micro_batch=1, replicas=count, stages=(Stage(blocks=(0, 2), devices=tuple(range(count))),)),))


@pytest.mark.parametrize("fold", [True, False])
def test_gradients_that_are_reduced_behind_a_backward_slow_it(fold):
    """256 bytes of gradient per block between two ranks: each sends 256 bytes (128 to be summed, 128 summed), so the
    wire takes 4 s; the core 512 / 512 for bytes, 128 / 256 for the sum and 4 / 8 for the messages: 2 s. While messages
    are made ready, nothing is on the wire."""
    plan, work, where = data_parallel(2), toy.job([toy.block(0), toy.block(1)], 2), processes(2)
    layout = Layout(plan, work.model)
    played = play(lower(plan, work.model, layout), plan, work, where, layout, fold=fold)
    assert len(played.rows) == (1 if fold else 2)
    for row in played.rows:
        ends = {str(a): end / S for a, end in zip(row.actions, row.end_ns)}
        assert ends["F0:2.0"] == 8
        assert ends["B1.0"] == 16
        assert ends["Y1"] == pytest.approx(20.5)
        assert ends["B0.0"] == pytest.approx(28)  # 10 s and the 2 s of Y1
        assert ends["Y0"] == pytest.approx(32.5)


def test_a_quota_is_what_they_share():
    """A quarter of a core: the work of the core takes 8 s for 4 s on the wire, and half of the quota while B0 runs."""
    plan, work, where = data_parallel(2), toy.job([toy.block(0), toy.block(1)], 2), processes(2, share=0.25)
    layout = Layout(plan, work.model)
    (row,) = play(lower(plan, work.model, layout), plan, work, where, layout).rows
    ends = {str(a): end / S for a, end in zip(row.actions, row.end_ns)}
    assert ends["B1.0"] == 16
    assert ends["B0.0"] == pytest.approx(16 + 10 + 8)
    assert ends["Y0"] == pytest.approx(16 + 10 + 8 + 8)


def test_the_predicted_spans_are_stretched_alike():
    plan, work = data_parallel(2), toy.job([toy.block(0), toy.block(1)], 2)
    busy = {free: predict(plan, work, processes(2, **costs), trace=True)
            for free, costs in ((False, {}), (True, {"message_cpu_s": 0.0, "byte_cpu_s": 0.0, "sum_cpu_s": 0.0}))}
    backward = {free: sum(s.duration_ns for s in p.trace.spans if s.category == "backward") / S
                for free, p in busy.items()}
    assert backward == {True: 18, False: pytest.approx(20)}


@pytest.mark.parametrize("sharding", [{}, {"weights": 2, "gradients": 2, "optimizer": 2},
                                      {"weights": 4, "gradients": 4, "optimizer": 4, "hierarchical": 2},
                                      {"weights": 1, "gradients": 1, "optimizer": 4}])
def test_folded_is_equal_to_all_of_them(sharding):
    plan, work, where = data_parallel(4, **sharding), toy.job([toy.block(0), toy.block(1)], 4), processes(4)
    layout = Layout(plan, work.model)
    program = lower(plan, work.model, layout)
    folded, full = (play(program, plan, work, where, layout, fold=fold) for fold in (True, False))
    assert len(folded.rows) < len(full.rows) == 4
    assert folded.end_ns == pytest.approx(full.end_ns, abs=50)


def test_no_less_than_without_and_work_counts_once_per_rank():
    ranks, where = (0, 1, 2), processes(3)
    for op, passes, summed in (("all_reduce", 2, 1), ("reduce_scatter", 1, 1), ("all_gather", 1, 0)):
        cores = {port: work for port, _, work in network.collective(op, 600, ranks, where).demands if "cpu" in port}
        each = passes * (2 * 400 / 512 + 4 / 8) + summed * 400 / 256
        assert cores == {f"n{r}:0:cpu": pytest.approx(each * S) for r in ranks}
    sums = network.exchange({(0, 1): 300, (2, 1): 500}, where, sums=True)
    assert {p: w / S for p, _, w in sums.demands if "cpu" in p} == {
        "n0:0:cpu": pytest.approx(300 / 512 + 1 / 8), "n1:0:cpu": pytest.approx(800 / 512 + 2 / 8 + 800 / 256),
        "n2:0:cpu": pytest.approx(500 / 512 + 1 / 8)}


def test_a_measured_turn_is_waited_for_once_per_call():
    three = processes(3, turn_s=0.25, share=0.5)
    assert network.send(64, 0, 1, three).turn_s == 0.25
    assert network.collective("all_gather", 64, (0, 1, 2), three).turn_s == 0.25
    assert network.collective("all_reduce", 64, (0, 1, 2), three).turn_s == 0.5
    plain = processes(2, turn_s=None, share=0.5)
    assert network.send(64, 0, 1, plain).turn_s == pytest.approx(network.TURN_S)


@pytest.mark.parametrize(("fold", "turn_s"), [(True, 1.5), (False, 1.5), (True, 0.0)])
def test_only_a_rank_that_computes_makes_a_message_wait_for_its_turn(fold, turn_s):
    """Y1 begins behind B1 while B0 computes, and takes two calls; when Y0 begins, all computing is over."""
    plan, work = data_parallel(2), toy.job([toy.block(0), toy.block(1)], 2)
    where = processes(2, turn_s=turn_s)
    layout = Layout(plan, work.model)
    for row in play(lower(plan, work.model, layout), plan, work, where, layout, fold=fold).rows:
        ends = {str(a): end / S for a, end in zip(row.actions, row.end_ns)}
        assert ends["Y1"] == pytest.approx(20.5 + 2 * turn_s)
        assert ends["B0.0"] == pytest.approx(28)
        assert ends["Y0"] == pytest.approx(32.5)


@pytest.mark.parametrize(("nbytes", "seconds"), [
    (256, 4 + 1 / 8),  # the wire, once the message is ready
    (8, 1 / 8 + 1 / 8),
    (0.5, 1 / 8 + 1 / 128)])
def test_a_message_leaves_when_it_is_ready(nbytes, seconds):
    """64 bytes per second; an eighth of a second of a core for the message, nbytes / 512 for its bytes."""
    assert network.send(1, 0, 1, processes(2)).scaled(nbytes).alone_s == pytest.approx(seconds)


def test_work_that_takes_longer_than_the_wire_hides_it():
    slow = network.send(1, 0, 1, processes(2, byte_cpu_s=1 / 16)).scaled(64)
    assert slow.alone_s == pytest.approx(1 / 8 + 64 / 16)


def test_a_gpu_has_no_core_that_transfers_take():
    gpus = toy.cluster(*[toy.device([(1, 2)])] * 2, nic=64.0, per_node=1)
    assert gpus.core_of == (None, None)
    assert not network.send(64, 0, 1, gpus).fixed
