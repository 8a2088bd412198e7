"""Law 1: every plan gives the losses and weights of one process on the same samples. Law 5: bytes are those planned."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from mixfleet.batching import Batcher, steps_of
from mixfleet.job import Data, Lengths, Optimizer, ParamGroup
from mixfleet.plan_rules import why_not
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, Outcome, Pool, Reference, chunked, expected_bytes, job, pipe, plan, reference

TOLERANCE = 1e-9
torch.set_num_threads(1)


_TIED, _QWEN = {"tied": True}, {"tied": True, "bias": True, "kv_heads": 2, "activation": "swiglu"}
_GPT2 = {"norm": "layernorm", "activation": "gelu", "position": "learned", "tied": True, "bias": True}
_MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12, "kv_heads": 2}
_CLIP = {"clip_norm": 0.3}
_LENGTHS = {"data": Data(lengths=Lengths(kind="uniform"))}

CASES = {
    "one rank": Case(plan(pipe((0, 5), (0,), samples=6, micro_batch=6)), job()),
    "one rank, accumulation with a smaller last micro-batch":
        Case(plan(pipe((0, 5), (0,), samples=6, micro_batch=4)), job()),
    "ddp, even": Case(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=3, replicas=2)), job()),
    "ddp of three": Case(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3)), job()),
    "ddp, uneven shares and micro-batches, masked":
        Case(plan(pipe((0, 5), (0,), samples=4, micro_batch=3), pipe((0, 5), (1, 2), samples=1, micro_batch=1,
                                                                     replicas=2)), job(**_CLIP), masked=True),
    "tensor 2": Case(plan(pipe((0, 5), (0, 1), samples=6, micro_batch=4, tensor=(2,))), job(**_CLIP)),
    "tensor 2, biases, grouped heads":
        Case(plan(pipe((0, 5), (0, 1), samples=6, micro_batch=4, tensor=(2,))), job(figures=_QWEN)),
    "tensor 4": Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=3, tensor=(4,))), job(figures=_TIED)),
    "gpipe, uneven blocks, tied":
        Case(plan(pipe((0, 1, 3, 5), (0,), (1,), (2,), samples=6, micro_batch=2), schedule="gpipe"),
             job(figures=_TIED, **_CLIP)),
    "1f1b, a stage with the head alone, gpt2":
        Case(plan(pipe((0, 4, 5), (0,), (1,), samples=6, micro_batch=4)), job(figures=_GPT2), masked=True),
    "a pipeline beside a single rank":
        Case(plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=1), pipe((0, 5), (2,), samples=2, micro_batch=2)),
             job(figures=_TIED, **_CLIP)),
    "tensor 2 beside tensor 1":
        Case(plan(pipe((0, 5), (0, 1), samples=4, micro_batch=2, tensor=(2,)), pipe((0, 5), (2,), samples=2,
                                                                                    micro_batch=2)), job(**_CLIP)),
    "a stage of tensor 2 after one of tensor 1, beside a single rank":
        Case(plan(pipe((0, 3, 5), (0,), (1, 2), samples=4, micro_batch=2, tensor=(1, 2)),
                  pipe((0, 5), (3,), samples=2, micro_batch=2)), job(figures=_TIED), masked=True),
    "zero-1 of three, uneven":
        Case(plan(pipe((0, 5), (0,), samples=4, micro_batch=2), pipe((0, 5), (1, 2), samples=1, micro_batch=1,
                                                                     replicas=2), sharding=(1, 1, 3)), job(**_CLIP)),
    "zero-2 of three": Case(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(1, 3, 3)),
                            job(figures=_TIED)),
    "zero-3 of two, uneven":
        Case(plan(pipe((0, 5), (0,), samples=4, micro_batch=2), pipe((0, 5), (1,), samples=2, micro_batch=1),
                  sharding=(2, 2, 2)), job(figures=_TIED, **_CLIP)),
    "zero-3 of three": Case(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(3, 3, 3)),
                            job(figures=_GPT2)),
    "mics, two groups of two": Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=1, replicas=4),
                                         sharding=(2, 2, 2)), job(12, **_CLIP)),
    "weights in twos, gradients and optimizer in fours":
        Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(2, 4, 4)), job(8)),
    "replicated weights, gradients in twos, optimizer in fours":
        Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(1, 2, 4)), job(8)),
    "three replicas in groups of two, unequal": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(2, 2, 2)), job()),
    "optimizer in threes, weights in twos, of three":
        Case(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(2, 2, 3)), job(**_CLIP)),
    "zero-3 of three, shares 5:3:1": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(3, 3, 3), shares=(5, 3, 1)),
        job(figures=_GPT2, **_CLIP)),
    "zero-1, shares 1:4, the fast one holds less":
        Case(plan(pipe((0, 5), (0,), samples=4, micro_batch=4), pipe((0, 5), (1,), samples=2, micro_batch=2),
                  sharding=(1, 1, 2), shares=(1, 4)), job(figures=_TIED)),
    "mics, groups of unequal shares, one rank that holds nothing": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=4), sharding=(2, 2, 2), shares=(3, 1, 0, 2)),
        job(12, figures=_TIED, **_CLIP)),
    "weights in twos, gradients and optimizer in fours, unequal shares": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(2, 4, 4), shares=(3, 1, 5, 2)),
        job(8, **_CLIP)),
    "layered, zero-3, 4 and 2 micro-batches, unequal shares":
        Case(plan(pipe((0, 5), (0,), samples=4, micro_batch=1), pipe((0, 5), (1,), samples=2, micro_batch=1),
                  sharding=(2, 2, 2), shares=(1, 2), accumulation="layered"), job(figures=_TIED, **_CLIP), masked=True),
    "layered, zero-2 of two, full recompute, a smaller last micro-batch": Case(
        plan(pipe((0, 5), (0, 1), samples=3, micro_batch=2, replicas=2, recompute="full"), sharding=(1, 2, 2),
             accumulation="layered"), job(figures=_GPT2)),
    "layered, mics with tensor 2": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=1, tensor=(2,), replicas=2), sharding=(2, 2, 2),
             accumulation="layered"), job(figures=_QWEN, **_CLIP)),
    "layered, one rank": Case(plan(pipe((0, 5), (0,), samples=6, micro_batch=4), accumulation="layered"), job()),
    "zero-3 of two nodes of two, hierarchical": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(4, 4, 4), hierarchical=2),
        job(8, figures=_TIED, **_CLIP)),
    "weights in fours, optimizer too, hierarchical, unequal shares": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=2, replicas=4), sharding=(4, 4, 4), hierarchical=2,
             shares=(3, 1, 0, 2), accumulation="layered"), job(8, figures=_GPT2), masked=True),
    "zero-3 with tensor 2":
        Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, tensor=(2,), replicas=2), sharding=(2, 2, 2)),
             job(figures=_QWEN, **_CLIP)),
    "zero-3 with pipelines":
        Case(plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2)),
             job(figures=_TIED, **_CLIP), masked=True),
    "zero-1 with pipelines of unequal shape":
        Case(plan(pipe((0, 3, 5), (0,), (1,), samples=3, micro_batch=2),
                  pipe((0, 1, 5), (2,), (3,), samples=3, micro_batch=1), sharding=(1, 1, 2)), job(figures=_TIED)),
    "recompute full, pipeline":
        Case(plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=2, recompute="full")), job()),
    "recompute full, zero-3":
        Case(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=2, replicas=2, recompute="full"), sharding=(2, 2, 2)),
             job()),
    "recompute block by block, zero-3":
        Case(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=2, replicas=2,
                       recompute=("none", "full", "selective", "full", "none")), sharding=(2, 2, 2)), job()),
    "recompute selective, tensor 2":
        Case(plan(pipe((0, 5), (0, 1), samples=6, micro_batch=3, tensor=(2,), recompute="selective")), job()),
    "frozen below, and norms, pipeline": Case(
        plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=2)),
        job(frozen=("embed/*", "layers.0/*", "*/norm*"), **_CLIP)),
    "frozen in the middle, zero-3 of four, shares": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(4, 4, 4), shares=(3, 1, 0, 2)),
        job(8, frozen=("layers.1/*", "head/norm*"), figures=_TIED)),
    "frozen and tied, tensor 2, halves of a backward": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, tensor=(2, 2)), schedule="zb-h1"),
        job(frozen=("embed/*", "layers.0/attention*"), figures=_TIED)),
    "frozen prefix, zero-2 with full recompute": Case(
        plan(pipe((0, 3, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2, recompute="full"),
             sharding=(1, 2, 2)),
        job(frozen=("embed/*", "layers.[01]/*"))),
    "lengths 1 to 8, padded, uneven": Case(
        plan(pipe((0, 5), (0,), samples=4, micro_batch=3), pipe((0, 5), (1, 2), samples=1, micro_batch=1, replicas=2)),
        job(**_LENGTHS, **_CLIP)),
    "packed, uneven": Case(
        plan(pipe((0, 5), (0,), samples=4, micro_batch=3), pipe((0, 5), (1, 2), samples=1, micro_batch=1, replicas=2),
             batching="packed"), job(**_LENGTHS, **_CLIP)),
    "packed, learned positions, tensor 2 after tensor 1, full recompute": Case(
        plan(pipe((0, 3, 5), (0,), (1, 2), samples=6, micro_batch=2, tensor=(1, 2), recompute="full"),
             batching="packed"), job(figures=_GPT2, **_LENGTHS)),
    "packed, zero-3, window, selective recompute": Case(
        plan(pipe((0, 5), (0, 1), samples=4, micro_batch=2, replicas=2, recompute="selective"), sharding=(2, 2, 2),
             batching="packed"), job(8, figures={"window": 3, **_TIED}, **_LENGTHS, **_CLIP)),
    "packed, more replicas than samples in some steps": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=1, micro_batch=1, replicas=4), batching="packed"), job(4, **_LENGTHS)),
    "bucketed, experts, pipelines of unequal shape": Case(
        plan(pipe((0, 3, 5), (0,), (1,), samples=7, micro_batch=3), pipe((0, 5), (2,), samples=2, micro_batch=2),
             batching="bucketed"), job(9, figures=_MOE, **_LENGTHS)),
    "bucketed, tensor 2, zero-1": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, tensor=(2,), replicas=2), sharding=(1, 1, 2),
             batching="bucketed"), job(figures=_QWEN, **_LENGTHS, **_CLIP)),
    "bucketed, layered, zero-2": Case(
        plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(1, 2, 2), accumulation="layered",
             batching="bucketed"), job(**_LENGTHS)),
    "packed, halves of a backward": Case(
        plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=2), schedule="zb-h1", batching="packed"),
        job(figures=_TIED, **_LENGTHS)),
    "packed, context 2, learned positions, tied": Case(
        plan(pipe((0, 5), (0, 1), samples=6, micro_batch=2, context=2), batching="packed"),
        job(figures={**_GPT2, **_TIED}, **_LENGTHS, **_CLIP)),
    "bucketed, context 2, shares 3:1, grouped heads, window, selective recompute": Case(
        plan(pipe((0, 5), (0, 1), samples=6, micro_batch=3, context=2, shares=(3, 1), recompute="selective"),
             batching="bucketed"), job(figures={**_QWEN, "window": 3}, **_LENGTHS)),
    "packed, context 3, shares 2:1:1, grouped heads, zero-3": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=6, micro_batch=2, context=3, shares=(2, 1, 1)), sharding=(3, 3, 3),
             batching="packed"), job(figures={**_QWEN, "window": 4}, **_LENGTHS, **_CLIP)),
    "packed, context 2 with tensor 2, shares 1:3, selective recompute": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=3, tensor=(2,), context=2, shares=(1, 3),
                  recompute="selective"), batching="packed"), job(figures=_QWEN, **_LENGTHS)),
    "bucketed, context 2 in two stages, halves of a backward": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, context=2), schedule="zb-h1",
             batching="bucketed"), job(figures=_GPT2, **_LENGTHS)),
    "packed, context 2 in two stages, shares 1:3, full recompute": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, context=2, shares=(1, 3), recompute="full"),
             batching="packed"), job(**_LENGTHS)),
    "bucketed, context 3 beside one rank, zero-2 of four": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=4, micro_batch=2, context=3), pipe((0, 5), (3,), samples=2, micro_batch=1),
             sharding=(1, 4, 4), batching="bucketed"), job(figures=_QWEN, **_LENGTHS)),
    "packed, two replicas of context 2, layered": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=1, replicas=2, context=2), sharding=(2, 2, 4),
             accumulation="layered", batching="packed"), job(figures=_MOE, **_LENGTHS)),
    "a whole stage frozen, tensor 2": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, tensor=(2, 2))),
        job(frozen=("embed/*", "layers.[01]/*"), **_CLIP)),
    "frozen below a cut inside a chunk, a wave": Case(
        plan(chunked("wave", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=1), schedule="wave"),
        job(frozen=("embed/*", "layers.[01]/*"))),
    "frozen below, two directions at once": Case(
        plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=1), pipe((0, 2, 5), (1,), (0,), samples=4,
                                                                        micro_batch=1), schedule="chimera"),
        job(8, frozen=("embed/*", "layers.0/*"))),
    "frozen below, layered zero-3": Case(
        plan(pipe((0, 5), (0, 1), samples=3, micro_batch=1, replicas=2), sharding=(2, 2, 2), accumulation="layered"),
        job(frozen=("embed/*", "layers.[01]/*"))),
    "groups of parameters": Case(
        plan(pipe((0, 5), (0, 1), samples=3, micro_batch=2, replicas=2), sharding=(1, 1, 2)),
        job(optimizer=Optimizer(lr=3e-2, weight_decay=0.1, groups=(
            ParamGroup(match="head/*", lr_scale=0.3), ParamGroup(match="*/norm1.*", weight_decay=0.4),
            ParamGroup(match="layers.[12]/mlp*", lr_scale=2.0, weight_decay=0.0))))),
    "sgd with momentum, zero-1": Case(
        plan(pipe((0, 5), (0, 1), samples=3, micro_batch=3, replicas=2), sharding=(1, 1, 2)),
        job(optimizer=Optimizer(name="sgd", lr=0.3, momentum=0.9, weight_decay=0.02))),
    "interleaved, two chunks on two stages, tied":
        Case(plan(chunked("interleaved", (0, 1, 2, 3, 5), (0,), (1,), samples=6, micro_batch=2, recompute="full"),
                  schedule="looped-bfs"), job(figures=_TIED, **_CLIP)),
    "interleaved, zero-2": Case(
        plan(chunked("interleaved", (0, 1, 2, 3, 5), (0, 1), (2, 3), samples=4, micro_batch=1, replicas=2),
             schedule="interleaved", sharding=(1, 2, 2)), job(8, figures=_TIED, **_CLIP)),
    "a wave, tied": Case(plan(chunked("wave", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=1),
                              schedule="wave"), job(figures=_TIED), masked=True),
    "a wave, zero-3, unequal last micro-batch":
        Case(plan(chunked("wave", (0, 1, 2, 4, 5), (0, 1), (2, 3), samples=3, micro_batch=2, replicas=2),
                  schedule="wave", sharding=(2, 2, 2)), job()),
    "zero bubble h1 of three": Case(plan(chunked("zb-h1", (0, 2, 3, 5), (0,), (1,), (2,), samples=6, micro_batch=1),
                                         schedule="zb-h1"), job(figures=_GPT2, **_CLIP)),
    "zero bubble h2, tensor 2, selective recompute": Case(
        plan(chunked("zb-h2", (0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=1, tensor=2, recompute="selective"),
             schedule="zb-h2"), job(figures=_QWEN)),
    "zero bubble v, full recompute": Case(
        plan(chunked("zb-v", (0, 1, 3, 4, 5), (0,), (1,), samples=6, micro_batch=2, recompute="full"),
             schedule="zb-v"), job(figures=_TIED)),
    "dualpipe v, whole and halved backwards": Case(
        plan(chunked("dualpipe-v", (0, 2, 3, 4, 5), (0,), (1,), samples=5, micro_batch=1), schedule="dualpipe-v"),
        job(5, figures=_TIED)),
    "zero bubble v, mics with hop 1 behind weight halves": Case(
        plan(chunked("zb-v", (0, 1, 3, 4, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2),
             schedule="zb-v", sharding=(2, 2, 2)), job(figures=_TIED, **_CLIP)),
    "context 2": Case(plan(pipe((0, 5), (0, 1), samples=6, micro_batch=4, context=2)), job(figures=_QWEN, **_CLIP)),
    "context 4, learned positions, selective recompute, masked": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=6, context=4, recompute="selective")),
        job(figures=_GPT2), masked=True),
    "context 3, shares 2:1:1, zero-3": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=6, micro_batch=3, context=3, shares=(2, 1, 1)), sharding=(3, 3, 3)),
        job(figures=_TIED, **_CLIP), masked=True),
    "context 2 with tensor 2, window, full recompute": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=4, tensor=(2,), context=2, shares=(3, 1),
                  recompute="full")), job(figures={**_QWEN, "window": 3})),
    "context 2 in two stages, shares 1:3": Case(
        plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, context=2, shares=(1, 3)), schedule="gpipe"),
        job(figures=_TIED, **_CLIP)),
    "context 2 beside tensor 2, zero-1 of three": Case(
        plan(pipe((0, 5), (0, 1), samples=4, micro_batch=2, context=2, recompute="selective"),
             pipe((0, 5), (2, 3), samples=2, micro_batch=1, tensor=(2,)), sharding=(1, 1, 3)), job(figures=_QWEN)),
    "two replicas of context 2, zero-2 of four": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=2, context=2), sharding=(1, 4, 4)),
        job(figures=_TIED, **_CLIP), masked=True),
    "two replicas of context 2, mics in twos, layered": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=2, context=2), sharding=(2, 2, 2),
             accumulation="layered"), job(attention="fused")),
    "zero bubble h1, context 2": Case(
        plan(chunked("zb-h1", (0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=1, context=2), schedule="zb-h1"),
        job(figures=_GPT2)),
    "experts, zero-3 of two": Case(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=2, replicas=2),
                                        sharding=(2, 2, 2)), job(figures=_MOE, **_CLIP), masked=True),
    "experts over tensor 4, a shared one": Case(plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=4, tensor=(4,))),
                                                job(figures={**_MOE, "shared_ffn": 12, "kv_heads": 4})),
    "experts over tensor 2 beside tensor 1 twice, full recompute, zero-1": Case(
        plan(pipe((0, 5), (0, 1), samples=2, micro_batch=2, tensor=(2,), recompute="full"),
             pipe((0, 5), (2, 3), samples=2, micro_batch=1, replicas=2), sharding=(1, 1, 3)),
        job(figures=_MOE, **_CLIP), masked=True),
    "experts over tensor 2 in parts of a sequence": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=3, tensor=(2,), context=2, recompute="selective")),
        job(figures=_MOE)),
    "experts over tensor 2 in two stages, zero bubble": Case(
        plan(chunked("zb-h1", (0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, tensor=2), schedule="zb-h1"),
        job(figures={**_MOE, "tied": True})),
}
_references: dict[object, Reference] = {}


def _reference(case: Case) -> Reference:
    job = case.job
    key = repr((job.model.config, job.global_batch, job.clip_norm, job.optimizer, job.frozen, job.data,
                case.masked, case.steps))
    if key not in _references:
        _references[key] = reference(case)
    return _references[key]


def _whole(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    """Weights put together from the pieces; every element from exactly one rank."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for outcome in outcomes:
        for key, kind, lo, hi, values in outcome.pieces:
            assert len(values) == hi - lo
            if kind == "weights":
                found.setdefault(key, []).append((lo, values))
    whole = {}
    for key, parts in found.items():
        at = 0
        for lo, values in sorted(parts, key=lambda p: p[0]):
            assert lo == at
            at += len(values)
        whole[key] = torch.cat([v for _, v in sorted(parts, key=lambda p: p[0])])
    return whole


def _assert_replicas_equal(outcomes: list[Outcome]) -> None:
    """Whoever holds an element of the weights holds the same bits."""
    seen: dict[tuple[int, int], list[tuple[int, int, torch.Tensor]]] = {}
    for outcome in outcomes:
        for unit, column, lo, hi, values in outcome.weights:
            for a, b, other in seen.get((unit, column), []):
                x, y = max(a, lo), min(b, hi)
                if x < y:
                    assert torch.equal(values[x - lo:y - lo], other[x - a:y - a]), (unit, column, x, y)
            seen.setdefault((unit, column), []).append((lo, hi, values))


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, pool: Pool) -> None:
    case = CASES[name]
    assert why_not(case.plan, case.job, CLUSTER) is None
    outcomes = check_equality(case, pool)
    if case.plan.batching != "padded":
        assert bytes_counted(case, outcomes) == sum(bytes_of_steps(case), Counter())


def check_equality(case: Case, pool: Pool) -> list[Outcome]:
    """Losses, norms and weights of one process; replicas equal to the bit; the bytes of the layout."""
    outcomes = pool.run(case)
    expected = _reference(case)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    whole = _whole(outcomes)
    assert whole.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        assert torch.allclose(whole[key], value, rtol=0, atol=TOLERANCE), key
    _assert_replicas_equal(outcomes)
    sent = {(kind, rank, dst): n for rank, outcome in zip(case.plan.ranks, outcomes)
            for (kind, dst), n in outcome.sent.items() if kind in "GPRY"}
    assert sent == expected_bytes(case)
    return outcomes


def bytes_of_steps(case: Case) -> list[Counter[tuple[int, str]]]:
    """By rank and kind, what the simulator says that each step of a case sends."""
    layout, batcher = Layout(case.plan, case.job.model), Batcher(case.plan, case.job, CLUSTER)
    program = lower(case.plan, case.job.model, layout)
    batches = [None if case.plan.batching == "padded" else batcher.step(lengths)
               for lengths in steps_of(case.job, case.steps)] or [None] * case.steps
    return [Counter({(int(rank), kind): n for rank, kinds in bytes_sent(
        program, case.plan, case.job, layout, batch=batch).items() for kind, n in kinds.items()}) for batch in batches]


def bytes_counted(case: Case, outcomes: list[Outcome]) -> Counter[tuple[int, str]]:
    """The same as the ranks counted it."""
    found: Counter[tuple[int, str]] = Counter()
    for rank, outcome in zip(case.plan.ranks, outcomes):
        for (kind, _), n in outcome.sent.items():
            found[rank, kind] += n
    return +found


def test_fp16_leaves_out_what_overflows_on_all_ranks_together(pool: Pool) -> None:
    """A loss scale that is too large is halved until gradients are finite, and doubled after three good steps. Steps
    that overflow on some rank change nothing on any, the step count of the optimizer included: what remains is one
    process in fp64 without these steps."""
    wide = Case(plan(pipe((0, 2, 5), (0,), (1,), samples=4, micro_batch=2),
                     pipe((0, 5), (2,), samples=2, micro_batch=1), sharding=(1, 1, 2)),
                job(optimizer=Optimizer(lr=1e-3), **_CLIP), steps=12, loss_scale=2.0**24)
    outcomes = pool.run(wide._replace(job=wide.job.replace(precision="fp16")))
    scale, good = 2.0**24, 0
    for skipped, now in outcomes[0].scales:
        good = 0 if skipped else good + 1
        scale *= 0.5 if skipped else 2.0 if good % 3 == 0 else 1.0
        good %= 3
        assert now == scale
    left_out = [step for step, (skipped, _) in enumerate(outcomes[0].scales) if skipped]
    assert left_out[:2] == [0, 1]
    assert max(left_out) > 4  # grown too far, it overflows again
    assert len(left_out) < 8
    for outcome in outcomes:
        assert outcome.scales == outcomes[0].scales
        assert outcome.losses == outcomes[0].losses
    _assert_replicas_equal(outcomes)
    expected = reference(wide, left_out)
    assert outcomes[0].losses == pytest.approx(expected.losses, rel=2e-3)
    assert expected.losses != pytest.approx(reference(wide).losses, rel=2e-3)
    whole = _whole(outcomes)
    for key, value in expected.weights.items():
        assert torch.allclose(whole[key].double(), value, atol=2e-3), key


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.plan.batching != "padded"
                                  and any(len(p.stages) > 1 or p.context > 1 for p in case.plan.pipelines)])
def test_bytes_follow_the_lengths(name: str) -> None:
    """What is sent between stages and parts of sequences, which `test_equals_one_process` counts, differs from step to
    step with the lengths of the samples."""
    steps = bytes_of_steps(CASES[name])
    for kind in {kind for one in steps for _, kind in one} & {"SA", "SG", "K", "T"}:
        assert len({sum(n for (_, k), n in one.items() if k == kind) for one in steps}) > 1


def test_mics_reduces_in_two_hops(pool: Pool) -> None:
    """Four ranks in groups of two, three micro-batches: per step and unit three hops 1 and one hop 2."""
    case = CASES["mics, two groups of two"]._replace(trace=True)
    for outcome in pool.run(case):
        for unit in range(5):
            names = [s.name for s in outcome.spans if s.stream == "reduce"]
            assert [n for n in names if n.startswith(f"R{unit}.")] == [f"R{unit}.{m}" for m in range(3)] * case.steps
            assert names.count(f"Y{unit}") == case.steps


def test_layered_accumulation_gathers_once_per_layer_and_pass(pool: Pool) -> None:
    """S03: however many micro-batches. Where the direction turns, the last two blocks are still there."""
    sent = set()
    for micro_batch in (3, 2, 1):
        case = Case(plan(pipe((0, 5), (0, 1), samples=3, micro_batch=micro_batch, replicas=2), sharding=(2, 2, 2),
                         accumulation="layered"), job(), steps=1, trace=True)
        for outcome in pool.run(case):
            names = Counter(s.name for s in outcome.spans if s.stream in ("gather", "reduce"))
            assert names == {"G0": 2, "G1": 2, "G2": 2, "G3": 1, "G4": 1, **{f"R{b}": 1 for b in range(5)}}
            sent.add(sum(n for (kind, _), n in outcome.sent.items() if kind in "GR"))
    assert len(sent) == 1


def test_hierarchical_gather_is_bitwise_equal_and_leaves_a_node_once(pool: Pool) -> None:
    """S42 (b), two nodes of two: half of the weights leave each node per gather, all of them if sent directly."""
    case = CASES["zero-3 of two nodes of two, hierarchical"]._replace(steps=1)
    flat = case._replace(plan=case.plan.replace(sharding=case.plan.sharding.replace(hierarchical=0)))
    staged_run, flat_run = pool.run(case), pool.run(flat)
    assert staged_run[0].losses == flat_run[0].losses

    def egress(outcomes: list[Outcome], node: int) -> int:
        return sum(n for rank in (2 * node, 2 * node + 1) for (kind, dst), n in outcomes[rank].sent.items()
                   if kind == "G" and dst // 2 != node)

    layout = Layout(case.plan, case.job.model)
    gathered = sum(8 * layout.units[a.lo].elements for a in lower(case.plan, case.job.model).roles[0].actions
                   if a.op == "G")
    assert egress(staged_run, 0) + egress(staged_run, 1) == gathered  # half of it each, up to uneven cuts
    for node in (0, 1):
        assert egress(staged_run, node) == pytest.approx(gathered / 2, rel=0.01)
        assert egress(flat_run, node) == 2 * egress(staged_run, node)


def test_both_hops_are_needed(pool: Pool) -> None:
    case = CASES["mics, two groups of two"]
    expected = _reference(case)
    assert pool.run(case._replace(sabotage="accumulate"))[0].losses != pytest.approx(expected.losses, rel=1e-6)
    with pytest.raises(AssertionError):
        _assert_replicas_equal(pool.run(case._replace(sabotage="hop 2")))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02), ("fp16", 0.01)])
def test_short_numbers_stay_near(precision: str, tolerance: float, pool: Pool) -> None:
    """Sharded and uneven, against one process in fp64; fp32 masters keep what 16-bit weights would lose."""
    wide = Case(plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(3, 3, 3)),
                job(optimizer=Optimizer(lr=1e-3)))
    outcomes = pool.run(wide._replace(job=wide.job.replace(precision=precision)))
    assert outcomes[0].losses == pytest.approx(_reference(wide).losses, rel=tolerance)
    _assert_replicas_equal(outcomes)


@pytest.mark.parametrize("name", [
    "ddp of three", "zero-3 of three", "weights in twos, gradients and optimizer in fours"])
def test_state_takes_the_bytes_of_the_layout(name: str, pool: Pool) -> None:
    """What stays between steps, counted after training: weights, gradients, and two moments of the owned piece."""
    case = CASES[name]
    layout = Layout(case.plan, case.job.model)
    for rank, outcome in zip(case.plan.ranks, pool.run(case)):
        assert outcome.state_bytes == {
            "weights": 8 * layout.elements("weights", rank), "gradients": 8 * layout.elements("gradients", rank),
            "optimizer": 2 * 8 * layout.elements("optimizer", rank)}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_held_activations_shrink_with_recompute(recompute: str, pool: Pool) -> None:
    """All held bytes come back to the state alone; recompute holds less at the peak."""
    mode = plan(pipe((0, 5), (0,), samples=6, micro_batch=3, recompute=recompute))
    outcome = pool.run(Case(mode, job(), steps=1, trace=True))[0]
    marks = [m.total_bytes for m in outcome.memory]
    assert marks[-1] == sum(outcome.state_bytes.values())
    peak = max(marks) - marks[-1]
    x, layers = 3 * 8 * 16 * 8, 3
    if recompute == "full":  # inputs of all blocks, and what one layer saves when it is computed again
        assert layers * x < peak < 20 * x
    else:
        assert peak > 20 * x
    assert ("recompute" in {s.category for s in outcome.spans}) == (recompute == "full")
