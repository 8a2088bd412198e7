"""Context parallelism: which positions a part has, what it computes, keeps and sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toy
from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.cost.kernels import op_s
from mixfleet.job import Data, Job, Lengths
from mixfleet.model.families import build
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.plan_rules import why_not
from mixfleet.sim import predict

FIGURES = {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 136, "vocab": 212, "max_seq_len": 4096}
FAST = Device(name="fast", kind="gpu", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=10**11, memory_Bps=1e15,
              launch_s=0.0, efficiency=dict.fromkeys(
                  ("gemm", "attention", "norm", "softmax", "elementwise", "embedding", "loss", "optimizer"), 1.0))
LINK = Link(latency_s=0.0, bandwidth_Bps=1e9)


def pipeline(context: int, shares: tuple[int, ...] = (), *, tensor: int = 1, replicas: int = 1, blocks: int = 4,
             **more: Any) -> Pipeline:
    return Pipeline(samples=2, micro_batch=1, context=context, context_shares=shares, replicas=replicas, stages=(
        Stage(blocks=(0, blocks), devices=tuple(range(context * tensor * replicas)), tensor=tensor, **more),))


@given(shares=st.lists(st.integers(1, 9), min_size=2, max_size=6), tensor=st.integers(1, 6), cells=st.integers(9, 60))
def test_parts_are_a_partition_that_sees_keys_in_proportion(shares: list[int], tensor: int, cells: int) -> None:
    """Every position once; each part a multiple of the tensor degree; visible keys in exact proportion to length."""
    pipe = pipeline(len(shares), tuple(shares), tensor=tensor)
    seq_len = 2 * pipe.context_unit * cells
    parts = [[q for a, b in spans for q in range(a, b)] for spans in pipe.spans(seq_len)]
    assert sorted(q for part in parts for q in part) == list(range(seq_len))
    for i, part in enumerate(parts):
        assert len(part) % tensor == 0
        assert pipe.tokens(seq_len, i) == len(part)
        assert 2 * sum(q + 1 for q in part) == len(part) * (seq_len + 1)


def test_unequal_parts_by_hand() -> None:
    assert pipeline(2, (3, 1)).spans(16) == (((0, 6), (10, 16)), ((6, 8), (8, 10)))
    assert pipeline(3, tensor=4).spans(24) == (((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 12), (12, 16)))


@pytest.mark.parametrize(("pipe", "says"), [
    (pipeline(2, (1, 2, 3), blocks=5), "3 numbers for 2 parts"),
    (pipeline(2, (1, 0), blocks=5), "has 0; a share is at least 1"),
    (pipeline(0, blocks=5), "context is 0"),
    (pipeline(9, blocks=5), "at most 8 parts"),
    (pipeline(2, (1, 20), blocks=5), "without a position"),
    (pipeline(2, blocks=5).replace(stages=(Stage(blocks=(0, 5), devices=(0, 1, 2)),)), "lists 3 devices; 2 replicas"),
])
def test_impossible_parts_say_why(pipe: Pipeline, says: str) -> None:
    assert says in (why_not(Plan(pipelines=(pipe,)), toy.job(2), toy.cluster(9, 9)) or "")


def test_state_is_sharded_over_parts_as_over_replicas() -> None:
    plan = Plan(pipelines=(pipeline(2, replicas=2, blocks=5),), sharding=Sharding(optimizer=4))
    assert why_not(plan, toy.job(4), toy.cluster(8)) is None
    assert plan.global_batch == 4
    assert plan.replicas == ((0, 0), (0, 1), (0, 2), (0, 3))
    assert plan.first_samples == (0, 0, 2, 2)
    too_many = plan.replace(sharding=Sharding(optimizer=5))
    assert "has 4 data-parallel replicas" in (why_not(too_many, toy.job(4), toy.cluster(8)) or "")


def test_a_part_takes_its_share_of_attention() -> None:
    model = build(FIGURES)
    core = next(op for op in model.blocks[1].ops if op.kind == "attention")
    whole = op_s(core, 1, 4096, 1, FAST, "fp32")
    for share in (0.5, 0.125):
        part = op_s(core, 1, round(4096 * share), 1, FAST, "fp32", context=1 / share)
        assert part == pytest.approx([share * s for s in whole])


def predicted(context: int, shares: tuple[int, ...] = (), fast: int = 1, recompute: str = "none") -> Any:
    """On `context` devices, the first `fast` times faster than the others."""
    swift = FAST.replace(flops={"fp32": fast * 1e12}, vector_flops=fast * 1e12)
    cluster = Cluster(name="c", nodes=(Node(name="n", devices=(swift, *(FAST,) * (context - 1)), link=LINK, nic=LINK),))
    job = Job(name="j", model=build(FIGURES), seq_len=4096, global_batch=2, precision="fp32")
    return predict(Plan(pipelines=(pipeline(context, shares, recompute=recompute),)), job, cluster, trace=True)


def busy_s(found: Any, category: str, device: int) -> float:
    return sum(s.end_ns - s.start_ns for s in found.trace.spans
               if s.category == category and s.device == found.trace.meta["row_of"][str(device)]) / 1e9


def test_prediction_by_hand() -> None:
    """Forward takes a quarter on four parts; each sends its keys and values three times, and gradients of the rest."""
    one, four = predicted(1), predicted(4)
    assert busy_s(four, "forward", 0) == pytest.approx(busy_s(one, "forward", 0) / 4, rel=1e-3)
    keys = 4096 * 2 * 2 * 8 * 4  # positions, keys and values, heads, width, bytes
    layers = samples = 2
    assert four.sent_bytes["2"]["K"] == layers * samples * (3 * keys // 4 + 3 * keys // 4)
    assert busy_s(four, "tensor", 0) == pytest.approx(layers * samples * 2 * 3 / 4 * keys / 1e9, rel=0.2)
    again = predicted(4, recompute="selective")
    assert again.sent_bytes["2"]["K"] == layers * samples * 3 * (3 * keys // 4)


def test_everyone_waits_for_the_slowest_part() -> None:
    """A device three times as fast takes three quarters of the positions; with halves it would wait."""
    fair, halves, alone = predicted(2, (3, 1), fast=3), predicted(2, fast=3), predicted(1, fast=3)
    assert busy_s(fair, "forward", 1) == pytest.approx(3 / 4 * busy_s(alone, "forward", 0), rel=0.01)
    assert busy_s(halves, "forward", 0) == pytest.approx(2 * busy_s(fair, "forward", 0), rel=0.01)
    assert fair.sent_bytes["0"]["K"] == fair.sent_bytes["1"]["K"]  # 3/4 once and 1/4 once, or the other way


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
@pytest.mark.parametrize(("attention", "recompute"), [("fused", "none"), ("eager", "none"), ("fused", "selective")])
def test_saved_bytes_are_those_of_the_modules(attention: Any, recompute: Any, shares: tuple[int, ...], tensor: int
                                              ) -> None:
    """Within 5 % of the storages that autograd keeps; masks on CPUs, which all layers share, are left out."""
    torch = pytest.importorskip("torch")
    from mixfleet.run.modules import _bias, build_blocks
    from mixfleet.run.tensor import ContextGroup
    from test_model_saved import Imagined

    class Lonely(ContextGroup):
        def _exchange(self, outgoing: Any, incoming: Any) -> None:
            for i, t in enumerate(incoming):
                if i != self.rank:
                    t.zero_()

    torch.set_num_threads(1)
    model, seq_len = build(FIGURES | {"style": "gpt"}), 320
    spans = pipeline(2, shares, tensor=tensor).spans(seq_len)
    for part in range(2):
        context, group = Lonely(spans, rank=part), Imagined(tensor)
        group.context = context
        length = context.lengths[part]
        (layer,) = build_blocks(model, [1], group, attention=attention, recompute=recompute)
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        if attention == "fused":
            own |= {_bias(lo, hi, 0, torch.float32, torch.device("cpu")).data_ptr() for lo, hi in context.mine}
        kept: dict[int, int] = {}
        alive = []

        def pack(t: Any, own: set[int] = own, kept: dict[int, int] = kept, alive: list[Any] = alive) -> Any:
            alive.append(t)
            if t.untyped_storage().data_ptr() not in own:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(torch.randn(3, length // tensor, 48, requires_grad=True))
        keeps = ("selective", "full") if recompute == "selective" else ("none", "selective", "full")
        want = sum(s.size.at(3, length, tensor, seq_len / length) * s.element_bytes(4)
                   for s in model.blocks[1].saved
                   if s.until in keeps and s.held("cpu", fused=attention == "fused"))
        assert want == pytest.approx(sum(kept.values()), rel=0.05)


def test_search_shares_long_sequences_where_that_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two nodes of eight H100, 32k positions: parts of sequences beat tensor groups and full recompute."""
    from mixfleet.search import candidates, find

    (tmp_path / "two.yaml").write_text("mixfleet: cluster/1\nname: two\nnodes:\n- {name: n, count: 2, instance: "
                                       "DGX-H100}\n")
    cluster = Cluster.load(tmp_path / "two.yaml")
    job = Job(name="long", model=build("llama-3-8b").replace(max_seq_len=2**15), seq_len=2**15, global_batch=16)
    best = find(job, cluster, top=1).plans[0]
    assert best.plan.pipelines[0].context > 1
    assert "parts of a sequence on H100" in best.summary
    assert len(best.plan.ranks) == 16
    monkeypatch.setattr(candidates, "context_degrees", lambda job, devices: (1,))
    assert find(job, cluster, top=1).plans[0].prediction.step_s > 1.05 * best.prediction.step_s


def test_search_packs_samples_of_unequal_length_onto_parts(tmp_path: Path) -> None:
    """Eight H100, samples of up to 64k positions, half of them below 8k: packed rows on parts of sequences take a
    fraction of what padded ones take there."""
    from mixfleet.search import find

    (tmp_path / "one.yaml").write_text("mixfleet: cluster/1\nname: one\nnodes:\n- {name: n, instance: DGX-H100}\n")
    cluster = Cluster.load(tmp_path / "one.yaml")
    model = build({"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "vocab": 4096, "ffn": 2816,
                   "max_seq_len": 2**16})
    job = Job(name="tail", model=model, seq_len=2**16, global_batch=2, data=Data(
        lengths=Lengths(kind="lognormal", median=2**13, sigma=1.0, least=256)))
    best = find(job, cluster, top=1).plans[0]
    assert best.plan.pipelines[0].context > 1
    assert best.plan.batching == "packed"
    padded = predict(best.plan.replace(batching="padded"), job, cluster)
    assert best.prediction.step_s < 0.5 * padded.step_s


def test_search_leaves_short_sequences_whole() -> None:
    from mixfleet.search.space import context_degrees

    llama = build("llama-3-8b")
    assert context_degrees(Job(name="j", model=llama, seq_len=8192, global_batch=9), 64) == (1,)
    assert context_degrees(Job(name="j", model=llama, seq_len=8192, global_batch=8), 64) == (1, 2, 4, 8)
    assert context_degrees(Job(name="j", model=llama.replace(max_seq_len=16384), seq_len=16384, global_batch=64), 4
                           ) == (1, 2, 4)
