"""The search against brute force, its laws, and what it says."""

import random
from collections import Counter
from itertools import combinations, pairwise, product
from math import inf

import msgspec
import pytest

from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage, Synchronization
from mixfleet.plan_rules import why_not
from mixfleet.search import Limits, SearchResult, enumerate_all, find
from mixfleet.search.bounds import bound_s, compute_bound_s, too_full, upper_samples_per_s, whole_sequences
from mixfleet.search.candidates import Candidates
from mixfleet.search.finder import Search
from mixfleet.search.improve import dealt, neighbours
from mixfleet.search.replicate import _Line, shares_of
from mixfleet.search.space import bound_classes, classes_of, shapes
from mixfleet.search.tables import MODES, Tables
from mixfleet.search.uneven import by_room
from mixfleet.search.variants import PLANNED, is_deep, laid, schedules
from mixfleet.sim import predict
from mixfleet.units import GiB

PLAIN = Limits(recompute=("none",), schedules=("1f1b",), replicated=False)


def device(name, tera, gib, **more):
    return Device(name=name, arch="Ampere", flops={"bf16": tera * 1e12, "fp32": tera * 1e11}, vector_flops=tera * 1e11,
                  memory_bytes=int(gib * GiB), memory_Bps=tera * 1e10, **more)


def cluster(*nodes, fast_link=1e11, nic=3e9):
    link = Link(name="inside", latency_s=1e-5, bandwidth_Bps=fast_link)
    out = Link(name="outside", latency_s=3e-5, bandwidth_Bps=nic)
    return Cluster(name="small", nodes=tuple(
        Node(name=f"n{i}", devices=tuple(d), link=link, nic=out) for i, d in enumerate(nodes)))


def job(layers=2, batch=3, seq_len=256, hidden=512, **more):
    model = build({"layers": layers, "hidden": hidden, "heads": 4, "vocab": 2000, "max_seq_len": 4096})
    return Job(name="j", model=model, seq_len=seq_len, global_batch=batch, **more)


def routed_job(batch=4):
    """Six experts: 2 and 3 replicas can share them evenly, 4 cannot."""
    model = build({"layers": 2, "hidden": 256, "heads": 4, "vocab": 500, "max_seq_len": 4096, "experts": 6,
                   "expert_ffn": 1024})
    return Job(name="j", model=model, seq_len=256, global_batch=batch)


NEAR = device("near", 90, 40)
FAST, SLOW, TINY = device("fast", 100, 80), device("slow", 37, 30), device("tiny", 61, 1.4)
CASES = {
    "fast and slow in one node, slow alone": (job(), cluster([FAST, SLOW], [SLOW]), PLAIN),
    "two equal nodes": (job(batch=2), cluster([FAST, FAST], [FAST, FAST]), PLAIN.replace(idle=False)),
    "slow network": (job(batch=4), cluster([FAST], [SLOW], nic=1e8), PLAIN),
    "little memory": (job(batch=2, hidden=768), cluster([TINY, TINY]), Limits()),
    "all modes and schedules": (job(layers=1, batch=3), cluster([FAST, SLOW]), Limits()),
    "all schedules": (job(batch=4), cluster([FAST], [SLOW], nic=1e8), PLAIN.replace(schedules=PLANNED)),
    "six devices": (job(layers=2, batch=2), cluster([FAST] * 3, [SLOW] * 3), PLAIN.replace(idle=False, tensor=False)),
    "routed experts": (routed_job(), cluster([FAST, SLOW, SLOW]), PLAIN.replace(tensor=False)),
    "six blocks": (job(layers=4, batch=2), cluster([FAST, SLOW, SLOW]), PLAIN.replace(tensor=False)),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case == "six devices" else [])
                                  for case in CASES])
def test_equals_brute_force(case):
    work, where, limits = CASES[case]
    plans = list(enumerate_all(work, where, limits))
    assert 20 < len(plans) < 2500
    times = sorted(p.step_s for p in (predict(plan, work, where, sent=False) for plan in plans) if p.fits)
    result = find(work, where, top=3, limits=limits)
    assert result.exact
    assert result.complete
    assert [r.prediction.step_s for r in result.plans] == times[:3]
    assert result.simulated < len(plans)
    assert result.considered == len(plans)


@pytest.mark.parametrize("case", CASES)
def test_bounds_are_bounds(case):
    work, where, limits = CASES[case]
    tables = Tables(work, where)
    if len(where.devices) < 3:
        limits = limits.replace(recompute=Limits().recompute, schedules=Limits().schedules)
    plans = list(enumerate_all(work, where, limits))
    for plan in random.Random(7).sample(plans, 60):
        step_s = predict(plan, work, where, sent=False).step_s
        assert compute_bound_s(tables, plan) <= bound_s(tables, plan) <= step_s, plan


TEMPLATES = Limits(devices=1)
NARROW = {
    "one of two equal devices behind a slow link": (job(layers=4, batch=4), cluster([FAST], [FAST], nic=2e8), PLAIN),
    "one device of each kind": (job(layers=3, batch=7), cluster([SLOW, FAST], [SLOW], nic=2e8), PLAIN),
    "the whole share at once": (job(layers=3, batch=5), cluster([FAST], [SLOW], nic=1e9), PLAIN),
    "experts": (routed_job(), cluster([FAST], [SLOW], nic=1e9), PLAIN),
    "unlike devices as one tensor group": (job(batch=1, seq_len=1024, hidden=1024), cluster([FAST, NEAR]), PLAIN),
}


@pytest.mark.parametrize("case", NARROW)
def test_templates_find_what_uses_a_part_of_the_devices(case):
    """No plan of the enumerated space is better by more than a hundredth (`benchmarks/gap.py` has larger ones)."""
    work, where, limits = NARROW[case]
    best, found = (find(work, where, limits=some).best for some in (limits, TEMPLATES))
    assert found.prediction.step_s <= 1.01 * best.prediction.step_s


@pytest.mark.parametrize(("nodes", "ways"), [
    ([[FAST, SLOW], [SLOW]], 2),  # apart, or the first two together
    ([[FAST, FAST], [FAST, SLOW]], 4),
    ([[FAST] * 3], 2),  # which two are together makes no difference; three do not divide four heads
    ([[FAST, FAST, SLOW]], 3),
    ([[FAST] * 3, [SLOW] * 2], 0),  # more than four devices
])
def test_each_way_to_bind_devices_together_comes_once(nodes, ways):
    found = list(bound_classes(Tables(job(), cluster(*nodes))))
    assert len(found) == ways
    for classes in found:
        assert sorted(r for c in classes for r in c.nodes[0]) == list(range(sum(map(len, nodes))))
        assert all(c.bound and c.tensor_groups(c.size) == [c.nodes[0]] for c in classes)


def mixed():
    """Three kinds of devices, too many for the full enumeration."""
    return cluster([FAST] * 4, [SLOW] * 4, [TINY] * 2)


def test_bounds_hold_for_templates_and_their_neighbours():
    work, where = job(layers=6, batch=24), mixed()
    tables = Tables(work, where)
    classes, candidates = classes_of(tables), Candidates(tables)
    found = list(shapes(tables, classes, lambda members: candidates.choose(members, classes)))
    checked = 0
    for shape in random.Random(3).sample(found, 25):
        ideal = candidates.ideal_s(shape)
        for plan in candidates.plans(shape)[:3]:
            assert why_not(plan, work, where) is None
            others = list(schedules(plan))
            for other in (plan, *random.Random(3).sample(list(neighbours(plan, work)), 1),
                          *random.Random(3).sample(others, min(1, len(others)))):
                if why_not(other, work, where) is None:
                    step_s = predict(other, work, where, sent=False).step_s
                    assert ideal <= step_s or other.schedule not in ("1f1b", "gpipe")
                    assert bound_s(tables, other) <= step_s, other
                    checked += 1
    assert checked > 50


def test_enumeration_has_no_doubles_and_only_possible_plans():
    work, where, limits = CASES["fast and slow in one node, slow alone"]
    plans = list(enumerate_all(work, where, limits))
    assert len(set(plans)) == len(plans)
    assert all(why_not(plan, work, where) is None for plan in plans)
    # Two equal devices in one node give one plan each for what either of them would do alone.
    alone = [p for p in enumerate_all(job(batch=1), cluster([FAST, FAST]), PLAIN) if len(p.ranks) == 1]
    assert [p.ranks for p in alone] == [(0,)]


@pytest.mark.slow
def test_result_is_lawful_and_repeats_to_the_bit():
    work, where = job(layers=6, batch=24, hidden=1024, seq_len=1024), mixed()
    result = find(work, where)
    assert not result.exact
    assert len(result.plans) == 5
    assert [r.relative for r in result.plans] == sorted(r.relative for r in result.plans)
    assert result.plans[0].relative == 1.0
    for ranked in result.plans:
        assert why_not(ranked.plan, work, where) is None
        again = predict(ranked.plan, work, where, sent=False)
        assert again.fits
        assert again.step_s == ranked.prediction.step_s
        assert all(d.fresh_bytes <= d.capacity_bytes and d.resumed_bytes <= d.capacity_bytes for d in again.devices)
    assert 0 < result.fraction_of_upper_bound <= 1
    assert result.fraction_of_upper_bound == pytest.approx(
        result.best.prediction.samples_per_s / upper_samples_per_s(Tables(work, where)))
    text = msgspec.json.encode(result)
    assert msgspec.json.encode(find(work, where)) == text
    assert msgspec.json.decode(text, type=SearchResult) == result
    for other in result.alternatives:
        assert other.relative is None or other.relative >= 1.0
        assert (other.step_s is None) == bool(other.why_not)
    assert {"even DDP over all devices", "even FSDP (ZeRO-3) over all devices"} <= {
        a.name.partition(" (global")[0] for a in result.alternatives}
    assert any("the 4 fastest devices (fast)" in line for line in result.why)


def test_uneven_processors_get_uneven_shares():
    """One process owns a core, two share another: 12 + 6 + 6 samples, better than even DDP by nearly 4/3."""
    cpu = Device(name="cpu", kind="cpu", flops={"fp32": 1e11}, vector_flops=1e11, memory_bytes=2 * GiB,
                 memory_Bps=1e10, cores=(0,))
    half = cpu.replace(cores=(1,), share=0.5)
    where = cluster([cpu, half, half], fast_link=4e9)
    work = job(layers=4, batch=24, seq_len=128, hidden=256, precision="fp32")
    result = find(work, where)
    shares = {rank: pipe.samples for pipe in result.best.plan.pipelines for s in pipe.stages for rank in s.devices}
    assert shares == {0: 12, 1: 6, 2: 6}
    even = next(a for a in result.alternatives if a.name.startswith("even DDP"))
    assert 1.25 < even.relative < 1.5  # 4/3 by computing alone; the even plan is replicated, and sends more


def test_the_fast_one_computes_more_and_holds_less():
    """S03: a fast device with little memory beside a slow one with much, behind a link too slow to gather often."""
    fast, slow = device("fast", 100, 2.5), device("slow", 40, 6.0)
    work, where = job(layers=16, batch=23, hidden=1024, seq_len=1024), cluster([fast, slow], fast_link=5e9)
    search = Search(work, where, "time", 100, None)
    (shape,) = [s for s in shapes(search.tables, search.classes,
                                  lambda members: search.candidates.choose(members, search.classes)) if len(s) == 2]
    plans = search.candidates.plans(shape)
    times = {plan: p.step_s for plan in plans if (p := predict(plan, work, where, sent=False)).fits}
    best = min(times, key=times.get)
    (a, b), (x, y) = [p.samples for p in best.pipelines], best.sharding.shares
    assert best.accumulation == "layered"
    assert a > 2 * b
    assert 5 * x < y
    assert times[best] < 0.9 * min(s for plan, s in times.items() if plan.accumulation == "plain")
    tied = best.replace(sharding=best.sharding.replace(shares=(a, b)))  # state in proportion to samples
    assert not predict(tied, work, where, sent=False).fits


def test_pieces_by_room_in_pipelines_of_several_stages():
    """Two pipelines of two stages, one on devices with little memory: pieces in proportion to the room of each one's
    tightest stage fit where equal ones do not."""
    work = job(layers=12, batch=4, hidden=512, seq_len=256)
    made = Plan(schedule="1f1b", sharding=Sharding(weights=2, gradients=2, optimizer=2), pipelines=tuple(
        Pipeline(samples=2, micro_batch=1, stages=(
            Stage(blocks=(0, 6), devices=(a,)), Stage(blocks=(6, len(work.model.blocks)), devices=(b,))))
        for a, b in ((0, 1), (2, 3))))
    roomy = predict(made, work, cluster([device("any", 50, 80.0)] * 4), sent=False).devices
    state = min(sum(d.breakdown.get(k, 0) for k in ("weights", "gradients", "master", "moments")) for d in roomy)
    sizes = [d.peak_bytes + (state // 2 if d.rank < 2 else -state // 4) for d in roomy]
    where = cluster([device("any", 50, 80.0).replace(name=f"d{i}", memory_bytes=n) for i, n in enumerate(sizes)])
    even = predict(made, work, where, sent=False)
    assert not even.fits
    spread = by_room(made, even, where)
    assert spread is not None
    assert spread.sharding.shares[0] > spread.sharding.shares[1]
    assert predict(spread, work, where, sent=False).fits
    assert by_room(spread.replace(sharding=Sharding(weights=1)), even, where) is None
    tight = where.replace(nodes=tuple(n.replace(devices=tuple(
        d.replace(memory_bytes=min(sizes)) for d in n.devices)) for n in where.nodes))
    assert by_room(made, predict(made, work, tight, sent=False), tight) is None  # all rooms together are too small


def test_nothing_fits_names_the_device_the_lack_and_a_change():
    work, where = job(layers=8, batch=4, hidden=2048, seq_len=4096), cluster([device("small", 50, 2.0)] * 2)
    result = find(work, where)
    miss = result.nearest_miss
    assert result.plans == ()
    assert result.best is None
    prediction = predict(miss.plan, work, where)
    short = next(d for d in prediction.devices if d.rank == miss.device)
    assert (miss.device_name, miss.node) == ("small", "n0")
    assert miss.lacks_bytes == short.lacks_bytes > 0
    assert miss.phase == short.phase
    assert miss.changes
    assert sum(r.count for r in result.rejections) > 0
    assert any("memory of small" in r.reason for r in result.rejections)
    times = next(int(c.split()[0]) for c in miss.changes if "times the nodes" in c)
    grown = where.replace(nodes=tuple(n.replace(name=f"{n.name}-{i}") for i in range(times) for n in where.nodes))
    assert find(work, grown).plans


def test_more_devices_than_the_model_divides_by_are_named_with_a_use():
    """Batch 1: one replica of at most 3 blocks and tensor degrees 1, 2, 4, so that of 13 devices one is left."""
    work, where = job(layers=1, batch=1), cluster([FAST] * 13, nic=1e6)
    result = find(work, where)
    left = [rank for one in result.left_over for rank in one.devices]
    assert sorted((*left, *result.best.plan.ranks)) == list(range(13))
    assert left
    assert result.left_over[0].better_use
    assert "times as much" in result.left_over[0].reason or "bound" in result.left_over[0].reason


def test_a_single_device():
    work, where = job(layers=6, batch=8), cluster([FAST])
    result = find(work, where)
    assert result.best.plan.ranks == (0,)
    assert result.left_over == ()
    assert 0.5 < result.fraction_of_upper_bound < 1


def test_the_schedule_is_part_of_the_plan_and_why_says_what_it_gains():
    """Slow links leave a pipeline; with as few micro-batches as stages 1F1B idles for almost half of the time."""
    work = job(layers=18, batch=4, hidden=1024, seq_len=1024)
    where = cluster([FAST], [FAST], [FAST], [FAST], nic=2e9)
    result = find(work, where)
    best = result.best
    flat = laid(best.plan, "1f1b")
    plain = predict(flat, work, where, sent=False)
    assert best.plan.schedule != "1f1b"
    assert [s.size for s in flat.pipelines[0].stages] == [s.size for s in best.plan.pipelines[0].stages]
    saved = 1 - best.prediction.step_s / plain.step_s
    assert saved > 0.1
    assert any(line.startswith(f"{best.plan.schedule} saves {saved:.1%}") and "under 1F1B" in line
               for line in result.why)
    assert best.plan.schedule in best.summary


@pytest.mark.parametrize("names", [("wave", "gpipe"), *(pytest.param(one, marks=pytest.mark.slow) for one in (
    ("zb-h1",), ("pipedream",)))])
def test_only_the_schedules_that_were_asked_for(names):
    """Slow links leave pipelines. What is found is possible, in full enumerations as by templates, and no better than
    without the restriction."""
    big = (job(layers=18, batch=4, hidden=1024, seq_len=1024, clip_norm=0.0),
           cluster([FAST], [FAST], [FAST], [FAST], nic=2e9), None)
    small = job(layers=2, batch=3, clip_norm=0.0), cluster([FAST], [SLOW], nic=1e8), Limits(recompute=("none",))
    for work, where, limits in (big, small):
        result = find(work, where, limits=limits, names=names, top=3)
        deep = [plan for plan in result.plans if len(plan.plan.pipelines[0].stages) > 1]
        assert {plan.plan.schedule for plan in deep} <= {*names}
        assert deep or where is not big[1]
        assert result.exact == (where is small[1])
        if names != ("pipedream",):  # which never drains
            free = find(work, where, limits=limits)
            assert result.best.prediction.step_s >= free.best.prediction.step_s * (1 - 1e-12)
    with pytest.raises(InputError, match=r"unknown schedule 'zb-h11'; did you mean .*'zb-h1'"):
        find(work, where, names=("zb-h11",))


def test_bounds_of_asynchronous_plans_are_below_what_is_simulated():
    work, where = job(layers=6, batch=6, clip_norm=0.0), cluster([FAST], [SLOW], [FAST], nic=1e9)
    stages = tuple(Stage(blocks=(a, b), devices=(i,)) for i, (a, b) in enumerate([(0, 3), (3, 4), (4, 8)]))
    for micro_batch in (1, 2, 4):
        flat = Plan(pipelines=(Pipeline(stages=stages, samples=6, micro_batch=micro_batch),))
        for name in ("async-1f1b", "pipedream", "pipedream-2bw", "pipeoptim", "xpipe"):
            plan = laid(flat, name)
            step_s = predict(plan, work, where, sent=False).step_s
            assert 0 < compute_bound_s(Tables(work, where), plan) <= bound_s(Tables(work, where), plan) <= step_s


def test_neighbours_of_a_plan_of_several_chunks_keep_its_schedule():
    stages = tuple(Stage(blocks=(4 * i, 4 * i + 4), devices=(i,)) for i in range(2))
    flat = Plan(pipelines=(Pipeline(stages=stages, samples=4, micro_batch=1),))
    plan = laid(flat, "interleaved")
    assert [s.chunks for s in plan.pipelines[0].stages] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    assert laid(plan, "1f1b") == flat
    around = list(neighbours(plan, job(layers=6, batch=4)))
    sizes = {(p.schedule, tuple(len(s.chunks) for s in p.pipelines[0].stages)) for p in around}
    assert {("1f1b", (1, 1)), ("wave", (2, 2)), ("zb-h1", (1, 1)), ("interleaved", (3, 3))} <= sizes
    # A block across the cut: 3 and 5 blocks, again in two chunks each.
    assert any(p.schedule == "interleaved" and [s.chunks for s in p.pipelines[0].stages]
               == [((0, 1), (3, 5)), ((1, 3), (5, 8))] for p in around)


def placed(widths, cuts, ranks, samples, micro_batch, shares=(), dispatch="split"):
    at, stages = 0, []
    for i, (width, blocks) in enumerate(zip(widths, pairwise(cuts))):
        given = (shares[i] if shares else (1,) * width) if width > 1 else ()
        stages.append(Stage(blocks=blocks, devices=tuple(ranks[at:at + width]), shares=given,
                            dispatch=dispatch if given else "split"))
        at += width
    return Plan(pipelines=(Pipeline(stages=tuple(stages), samples=samples, micro_batch=micro_batch),))


MID, BIG = device("mid", 60, 40), device("big", 170, 80)
WINS = {"two and three": (job(layers=14, batch=8, hidden=1024, seq_len=1024),
                          cluster([FAST] * 2, [MID] * 3, nic=2e9))}


@pytest.mark.parametrize("name", WINS)
def test_stages_with_replicas_of_their_own_are_proposed_where_they_win(name):
    work, where = WINS[name]
    result, without = find(work, where), find(work, where, limits=Limits(replicated=False))
    best = result.best
    assert any(stage.members > 1 for stage in best.plan.pipelines[0].stages)
    assert not any(p.replicated for p in without.best.plan.pipelines)
    saved = 1 - best.prediction.step_s / without.best.prediction.step_s
    assert saved > 0.01
    assert any(line.startswith(f"replicas of single stages save {saved:.1%} of the") for line in result.why)
    assert " by 1:1" in best.summary
    assert predict(best.plan, work, where).step_s == best.prediction.step_s
    for plan in dealt(laid(best.plan, "1f1b")):
        if why_not(plan, work, where) is None:
            assert predict(plan, work, where, sent=False).step_s >= best.prediction.step_s


def test_replicas_that_split_micro_batches_may_take_them_in_turn():
    work, where = job(layers=6, batch=12), cluster([FAST] * 3, [SLOW])
    plan = placed((3, 1), (0, 6, 8), range(4), 12, 3)
    turned = list(dealt(plan))
    assert [(p.pipelines[0].micro_batch, p.pipelines[0].stages[0].dispatch) for p in turned] == [
        (1, "round-robin"), (3, "round-robin")]
    assert all(why_not(p, work, where) is None for p in turned)
    assert plan in dealt(turned[0])
    assert not list(dealt(placed((1, 1), (0, 6, 8), range(2), 12, 3)))
    assert set(turned) <= set(neighbours(plan, work))


@pytest.mark.slow
def test_the_search_is_near_the_best_of_all_pipelines_over_a_line_of_devices():
    """Brute force: every cut of devices (in both orders) and blocks into stages, equal shares, every micro-batch."""
    work, where = job(layers=4, batch=8, hidden=1024, seq_len=512), cluster([MID] * 3, [BIG], nic=2e9)
    found = find(work, where, limits=Limits(recompute=("none",), schedules=("1f1b",)), names=("1f1b",))
    best = inf
    for ranks, stages in product([(0, 1, 2, 3), (3, 0, 1, 2)], (2, 3, 4)):
        for bars, cuts in product(combinations(range(1, 4), stages - 1), combinations(range(1, 6), stages - 1)):
            widths = [b - a for a, b in pairwise((0, *bars, 4))]
            for micro_batch in range(max(widths), 8):
                plan = placed(widths, (0, *cuts, 6), ranks, 8, micro_batch)
                for other in (plan, *dealt(plan)):
                    if why_not(other, work, where) is None:
                        best = min(best, predict(other, work, where, sent=False).step_s)
    assert found.best.prediction.step_s <= best * (1 + 1e-9)


def test_the_cut_of_a_line_is_the_best_of_all():
    """PipeDream's dynamic program against all cuts, by its own prices of stages and messages."""
    work, where = job(layers=4, batch=12, hidden=1024), cluster([MID] * 2, [BIG], [SLOW], nic=1e9)
    line = _Line(Tables(work, where), [(((0,),),), (((1,),),), (((2,),),), (((3,),),)], 1, 12, 4)
    made = {len(one.plan.pipelines[0].stages): one.plan.pipelines[0].stages for one in line.plans()}

    def slowest(ends, cuts):
        worst = 0.0
        for k, ((i, j), (a, b)) in enumerate(zip(pairwise(ends), pairwise(cuts))):
            priced = line._stage(i, j, len(cuts) - 2 - k)
            worst = max(worst, float(priced[0][a, b]), float(line._ways(j)[b]) if j < 4 else 0.0)
        return worst

    assert set(made) >= {2, 3}
    for p, stages in made.items():
        mine = [0]
        for stage in stages:
            mine.append(mine[-1] + stage.members)
        least = min(slowest((0, *bars, 4), (0, *cuts, 6)) for bars in combinations(range(1, 4), p - 1)
                    for cuts in combinations(range(1, 6), p - 1))
        assert slowest(mine, [0, *(s.blocks[1] for s in stages)]) == pytest.approx(least, rel=1e-12)


def test_samples_fall_to_replicas_by_speed():
    for speeds, size in (((3.0, 1.0), 8), ((5.0, 2.0, 2.0), 13), ((1.0, 1.0, 1.0), 5), ((7.0, 3.0, 1.0), 6)):
        shares = shares_of(size, speeds)
        assert sum(shares) == size
        best = min(max(n / v for n, v in zip((*some, size - sum(some)), speeds))
                   for some in product(range(1, size), repeat=len(speeds) - 1) if size - sum(some) > 0)
        assert max(n / v for n, v in zip(shares, speeds)) == best
    assert shares_of(2, (1.0, 1.0, 1.0)) is None


def test_bounds_hold_for_uneven_stages_in_a_v_and_in_two_directions():
    rng = random.Random(1)
    work, where = job(layers=14, batch=12), cluster([FAST, SLOW, MID], [MID], nic=3e9)
    tables, seen = Tables(work, where), []
    for _ in range(6):
        cuts = (0, *sorted(rng.sample(range(2, 15), 3)), 16)
        plan = placed((1,) * 4, cuts, rng.sample(range(4), 4), 12, rng.choice([1, 2, 3]))
        for name in ("dualpipe-v", "zb-v", "chimera", "dualpipe"):
            other = laid(plan, name)
            if not isinstance(other, str) and why_not(other, work, where) is None:
                assert bound_s(tables, other) <= predict(other, work, where, sent=False).step_s
                seen.append(name)
    assert len({*seen}) == 4


def test_bounds_of_replicated_stages_are_below_what_is_simulated():
    rng = random.Random(4)
    work, where = job(layers=6, batch=10, clip_norm=0.0), cluster([FAST, SLOW, MID], [MID, MID], nic=3e9)
    tables, ratios = Tables(work, where), []
    for _ in range(40):
        widths = rng.choice([(3, 2), (2, 3), (1, 4), (2, 1, 2), (1, 2, 1, 1)])
        shares = [tuple(rng.randint(1, 3) for _ in range(width)) for width in widths]
        cuts = (0, *sorted(rng.sample(range(1, 8), len(widths) - 1)), 8)
        dispatch, schedule = rng.choice([("split", "1f1b"), ("split", "zb-h1"), ("round-robin", "1f1b"),
                                         ("split", "pipedream"), ("round-robin", "gpipe")])
        plan = placed(widths, cuts, rng.sample(range(5), 5), 10, rng.randint(1, 6), shares, dispatch)
        plan = plan.replace(schedule=schedule)
        if why_not(plan, work, where):
            continue
        step_s = predict(plan, work, where, sent=False).step_s
        assert 0 < compute_bound_s(tables, plan) <= bound_s(tables, plan) <= step_s
        ratios.append(bound_s(tables, plan) / step_s)
    assert len(ratios) > 15
    assert max(ratios) > 0.5


def test_stages_that_a_bound_says_lack_memory_do_lack_it():
    rng = random.Random(9)
    work, where = job(layers=6, batch=8, hidden=768, seq_len=1024), cluster([device("small", 61, 1.6)] * 4, [SLOW])
    tables, found = Tables(work, where), Counter[str]()
    for _ in range(60):
        widths = rng.choice([(1, 1), (1, 1, 1), (2, 3), (1, 2, 1), (3, 1)])
        cuts = (0, *sorted(rng.sample(range(1, 8), len(widths) - 1)), 8)
        plan = placed(widths, cuts, rng.sample(range(5), sum(widths)), 8, rng.choice([1, 2, 3, 4]))
        plan = laid(plan, rng.choice(["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved"]))
        if isinstance(plan, str):
            continue
        plan = plan.replace(pipelines=tuple(p.replace(stages=tuple(
            s.replace(recompute=rng.choice(["none", "selective", "full"])) for s in p.stages)) for p in plan.pipelines))
        if why_not(plan, work, where):
            continue
        short, prediction = too_full(tables, plan), predict(plan, work, where, sent=False)
        lack = {((d.pipeline, d.stage), d.device) for d in prediction.devices if not d.fits}
        assert short.items() <= lack
        found.update(known=bool(short), lacks=bool(lack), fits=prediction.fits)
    assert found["known"] > 0.5 * found["lacks"] > 3
    assert found["fits"] > 3


def test_few_sequences_on_many_equal_devices_have_a_bound_of_their_own():
    work, where = job(batch=2, seq_len=1024), cluster([FAST, FAST], [FAST, FAST])
    tables = Tables(work, where)
    whole, alone = whole_sequences(tables), upper_samples_per_s(tables)
    plans = list(enumerate_all(work, where, PLAIN.replace(schedules=("1f1b", "zb-h1", "wave"))))
    times = [predict(plan, work, where, sent=False).step_s for plan in random.Random(2).sample(plans, 30)]
    assert 2 / alone * 1.1 < whole.step_s <= min(times)
    assert whole.devices == 2
    result = find(work, where, limits=PLAIN.replace(idle=False), top=1)
    assert result.upper_samples_per_s == 2 / whole.step_s
    assert any(line.startswith("2 sequences leave 2 devices to each, so they are cut: no plan takes less than")
               for line in result.why)
    assert whole_sequences(Tables(work, cluster([FAST] * 2, [SLOW]))) is None
    assert whole_sequences(Tables(job(batch=4), where)) is None


def test_cost_objective_leaves_dear_devices_idle():
    cheap = device("cheap", 40, 80, price_per_hour=1.0)
    dear = device("dear", 60, 80, price_per_hour=40.0)
    work, where = job(batch=4), cluster([dear], [cheap])
    assert find(work, where, limits=PLAIN).best.plan.ranks != (1,)
    result = find(work, where, objective="cost", limits=PLAIN)
    assert result.best.plan.ranks == (1,)
    plans = list(enumerate_all(work, where, PLAIN))
    assert result.best.prediction.cost_per_step == min(predict(p, work, where).cost_per_step for p in plans)
    with pytest.raises(InputError, match="price_per_hour"):
        find(work, cluster([FAST]), objective="cost")


def test_time_limit_is_reported():
    """Even then there is a plan if one fits, and what was not looked at is not said to lack memory."""
    result = find(job(layers=4, batch=12), mixed(), limits=PLAIN, max_seconds=0.0)
    assert not result.complete
    assert result.best is not None
    assert result.best.prediction.fits
    whole = find(job(layers=4, batch=12), mixed(), limits=PLAIN)
    assert whole.best.prediction.step_s <= result.best.prediction.step_s <= 4 * whole.best.prediction.step_s
    assert "memory" not in next(other.why_not for other in result.alternatives if other.name.startswith("only"))
    nothing = find(job(layers=2, batch=12, hidden=32768), mixed(), max_seconds=0.0)
    assert nothing.best is None
    assert not nothing.complete


def test_progress_tells_of_better_plans():
    lines = []
    result = find(job(), cluster([FAST, SLOW]), limits=PLAIN, progress=lines.append)
    assert lines
    assert "simulated" in lines[-1]
    assert result.simulated >= len(lines)


def test_a_pipeline_by_itself_needs_no_group_of_replicas():
    """Its ranks have one communicator (200 MiB), for all of them; with a second one it would not fit."""
    small = device("small", 100, 1.3)
    work, where = job(layers=2, batch=5, seq_len=512, hidden=1024), cluster([small, small])
    result = find(work, where, limits=Limits(devices=0))
    (pipeline,) = result.best.plan.pipelines
    assert len(pipeline.stages) == 2
    assert all(1.3 * GiB - 200 * 2**20 < use.peak_bytes <= 1.3 * GiB for use in result.best.prediction.devices)


def test_state_in_proportion_to_memory_where_equal_pieces_do_not_fit():
    """H2: two large devices and two small ones, on which a quarter of the state lacks room."""
    large, small = device("large", 50, 2.8), device("small", 50, 1.9)
    work, where = job(layers=16, batch=8, hidden=1024, seq_len=1024), cluster([large] * 2 + [small] * 2, fast_link=3e12)
    result = find(work, where, limits=Limits(devices=1))
    best = result.plans[0]
    assert best.prediction.fits
    assert set(best.plan.ranks) == {0, 1, 2, 3}
    a, b, c, d = best.plan.sharding.shares
    assert a == b > 2 * c == 2 * d > 0
    even = best.plan.replace(sharding=best.plan.sharding.replace(shares=()))
    assert [use.fits for use in predict(even, work, where).devices] == [True, True, False, False]
    text = next(line for line in result.why if line.startswith("pieces of state in proportion"))
    assert "on small (rank 2) and strand" in text
    assert text.endswith("on 2 other devices")


@pytest.mark.slow
def test_experts_are_shared_where_a_replica_cannot_hold_all():
    """Sixteen experts of 12 blocks on eight devices: none holds them all; the answer says what sharing is worth."""
    model = build({"layers": 12, "hidden": 1024, "heads": 16, "vocab": 8000, "max_seq_len": 2048, "experts": 16,
                   "expert_ffn": 4096})
    work = Job(name="routed", model=model, seq_len=512, global_batch=32, precision="bf16")
    where = cluster([device("gpu", 100, 24)] * 8, nic=2e10)
    found = find(work, where, top=2)
    best = found.plans[0]
    assert best.plan.expert > 1
    assert "experts shared by" in best.summary
    assert any("replicas share the routed experts" in line for line in found.why)
    whole = predict(best.plan.replace(expert=1, expert_shares=()), work, where)
    assert not whole.fits or whole.step_s > best.prediction.step_s


def around(plan, work):
    """Every plan that differs from this one in one setting: a cut by a block, the micro-batch, the recompute of one
    stage, the schedule and its chunks, and all degrees of sharding."""
    flat = laid(plan, "1f1b")
    for p, pipe in enumerate(flat.pipelines):
        def put(changed, p=p):
            return flat.replace(pipelines=tuple(changed if q == p else other for q, other in enumerate(flat.pipelines)))

        changed = [put(pipe.replace(micro_batch=m)) for m in range(1, pipe.samples + 1)]
        for s, stage in enumerate(pipe.stages):
            changed += [put(pipe.replace(stages=(
                *pipe.stages[:s], stage.replace(recompute=mode), *pipe.stages[s + 1:]))) for mode in MODES]
        for s, (a, b) in enumerate(pairwise(pipe.stages)):
            for edge in (a.blocks[1] - 1, a.blocks[1] + 1):
                if a.blocks[0] < edge < b.blocks[1]:
                    changed.append(put(pipe.replace(stages=(
                        *pipe.stages[:s], a.replace(blocks=(a.blocks[0], edge)),
                        b.replace(blocks=(edge, b.blocks[1])), *pipe.stages[s + 2:]))))
        for other in changed:
            yield laid(other, plan.schedule, len(plan.pipelines[0].stages[0].chunks)) if is_deep(other) else other
    for name in PLANNED if is_deep(plan) else ():
        for chunks in range(1, 5):
            yield laid(flat, name, chunks)
    degrees = [d for d in range(1, len(plan.replicas) + 1) if len(plan.replicas) % d == 0]
    for w, g, o in product(degrees, repeat=3):
        if w <= g <= o:
            yield plan.replace(sharding=Sharding(weights=w, gradients=g, optimizer=o))


NEIGHBOURED = {
    "two nodes behind a slow link": (job(layers=6, batch=32, hidden=1024), cluster([FAST] * 2, [FAST] * 2, nic=1e9)),
    "four nodes of one": (job(layers=14, batch=8, hidden=1024), cluster([FAST], [FAST], [FAST], [FAST], nic=2e9)),
    "fast beside slow": (job(layers=6, batch=24), cluster([FAST] * 4, [SLOW] * 4, nic=1e9)),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case == "fast beside slow" else [])
                                  for case in NEIGHBOURED])
def test_no_single_change_improves_what_is_found(case):
    work, where = NEIGHBOURED[case]
    best = find(work, where, limits=Limits(devices=1)).best
    tried = {plan for plan in around(best.plan, work) if isinstance(plan, Plan) and why_not(plan, work, where) is None}
    assert len(tried) > 10
    times = sorted((p.step_s, i, plan) for i, plan in enumerate(sorted(tried, key=repr))
                   if (p := predict(plan, work, where, sent=False)).fits)
    assert best.prediction.step_s <= times[0][0] * 1.002, times[0][2]


@pytest.mark.slow
def test_virtual_workers_are_proposed_where_steps_may_be_late_and_why_says_what_for():
    """Behind a slow link the exchange of a wave goes on beside the next one, if a worker may be one wave ahead. Where
    updates do not add up (AdamW) there are no such workers."""
    work = job(layers=8, batch=24, hidden=1024, seq_len=512, clip_norm=0.0, optimizer=Optimizer(name="sgd", lr=0.01))
    where = cluster([FAST] * 2, [SLOW] * 2, [FAST] * 2, nic=1e9)
    found, usual = (find(work, where, names=names, limits=Limits(devices=1)) for names in (("hetpipe",), ()))
    best = found.best.plan
    assert usual.best.plan.synchronous
    assert (best.schedule, best.synchronization.distance) == ("hetpipe", 1)
    near = predict(best.replace(synchronization=Synchronization()), work, where, sent=False)
    assert found.best.prediction.step_s < near.step_s
    assert any(line.startswith("virtual workers, at most 1 waves ahead") for line in found.why)
    adam = find(work.replace(optimizer=Optimizer()), where, names=("hetpipe",), limits=Limits(devices=1))
    assert all(ranked.plan.synchronous for ranked in adam.plans)
    assert any(line.startswith("no virtual workers (hetpipe): optimizer is adamw") for line in adam.why)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "nic", "batch", "seq_len", "workers"), [
    ([[FAST], [MID]], 1e9, 16, 512, 1),  # its pipeline never drains
    ([[FAST, SLOW], [FAST, SLOW]], 3e8, 64, 2048, 3),  # and exchanges go on beside the next wave
])
def test_virtual_workers_may_be_faster_than_all_synchronous_plans(nodes, nic, batch, seq_len, workers):
    work = job(layers=4, batch=batch, seq_len=seq_len, hidden=1024, optimizer=Optimizer(name="sgd", momentum=0.9))
    found, usual = (find(work, cluster(*nodes, nic=nic), names=names, limits=Limits(devices=1)).best
                    for names in (("hetpipe",), ()))
    assert (found.plan.schedule, len(found.plan.pipelines)) == ("hetpipe", workers)
    assert usual.plan.synchronous
    assert found.prediction.step_s < 0.95 * usual.prediction.step_s


def test_replicas_that_hold_unequally_many_experts_reduce_gradients_at_every_micro_batch():
    """Some experts are on one replica alone, which then has nothing to reduce. With one micro-batch each replica sends
    as much as if gradients were summed at the end."""
    work, where = routed_job(5), cluster([FAST], [SLOW], nic=1e9)
    whole = (0, len(work.model.blocks))
    pipelines = tuple(Pipeline(stages=(Stage(blocks=whole, devices=(rank,)),), samples=n, micro_batch=n)
                      for rank, n in ((0, 3), (1, 2)))
    late, early = (predict(Plan(pipelines=pipelines, sharding=Sharding(gradients=g, optimizer=2), expert=2,
                                expert_shares=(3, 2)), work, where, sent=True).sent_bytes for g in (1, 2))
    assert late["0"]["Y"] == early["0"]["R"] == early["1"]["R"] > 0
    assert "Y" not in early["0"]
