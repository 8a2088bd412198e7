"""Routed experts shared by replicas: who holds what, what it costs, and real ranks that equal one process."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from mixfleet.plan import why_not
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim.memory import static
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, Outcome, Pool, chunked, job, pipe, plan
from test_run_equality import check_equality

MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12, "kv_heads": 2}
FIVE = {**MOE, "experts": 5}
CLIP = {"clip_norm": 0.3}


def replicas(n: int, *, samples: int = 2, micro_batch: int = 1, **more):
    return pipe((0, 5), tuple(range(n)), samples=samples, micro_batch=micro_batch, replicas=n, **more)


CASES = {
    "two replicas, masked": Case(plan(replicas(2, samples=3, micro_batch=2)).replace(expert=2),
                                 job(figures=MOE, **CLIP), masked=True),
    "devices the other way round": Case(
        plan(pipe((0, 5), (2, 0), samples=3, micro_batch=3, replicas=2)).replace(expert=2), job(figures=FIVE)),
    "two groups of two, zero-1 over all": Case(plan(replicas(4), sharding=(1, 1, 4)).replace(expert=2),
                                               job(8, figures=MOE, **CLIP), masked=True),
    "two groups of two, zero-2 in twos": Case(plan(replicas(4), sharding=(1, 2, 4)).replace(expert=2),
                                              job(8, figures=FIVE, **CLIP)),
    "two groups of two, zero-3 over all": Case(plan(replicas(4), sharding=(4, 4, 4)).replace(expert=2),
                                               job(8, figures=FIVE, **CLIP)),
    "five experts on four, zero-3 over all": Case(plan(replicas(4), sharding=(4, 4, 4)).replace(expert=4),
                                                  job(8, figures=FIVE, **CLIP), masked=True),
    "weights in twos, experts in fours": Case(plan(replicas(4), sharding=(2, 2, 4)).replace(expert=4),
                                              job(8, figures=MOE)),
    "groups of unequal size": Case(plan(replicas(3), sharding=(1, 2, 3)).replace(expert=2, expert_shares=(2, 1, 3)),
                                   job(figures=FIVE, **CLIP)),
    "shares, one without experts, full recompute": Case(
        plan(replicas(3, recompute="full"), sharding=(1, 3, 3), shares=(2, 1, 1)).replace(
            expert=3, expert_shares=(3, 0, 2)), job(figures=FIVE, **CLIP), masked=True),
    "unlike pipelines": Case(
        plan(pipe((0, 5), (0, 1), samples=2, micro_batch=1, replicas=2),
             pipe((0, 5), (2,), samples=4, micro_batch=2)).replace(expert=3, expert_shares=(1, 1, 2)),
        job(8, figures=MOE), masked=True),
    "tensor 2, a shared expert, zero-3, full recompute": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, tensor=(2,), replicas=2, recompute="full"),
             sharding=(2, 2, 2)).replace(expert=2), job(figures={**FIVE, "shared_ffn": 12}, **CLIP)),
    "tensor 2 beside tensor 1 twice": Case(
        plan(pipe((0, 5), (0, 1), samples=2, micro_batch=1, tensor=(2,)),
             pipe((0, 5), (2, 3), samples=2, micro_batch=1, replicas=2)).replace(expert=3), job(figures=MOE)),
    "two stages, 1f1b, tied": Case(plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2)).replace(
        expert=2), job(figures={**MOE, "tied": True}, **CLIP)),
    "two stages, zero bubble, zero-1": Case(
        plan(chunked("zb-h1", (0, 2, 5), (0, 1), (2, 3), samples=3, micro_batch=1, replicas=2), schedule="zb-h1",
             sharding=(1, 1, 2)).replace(expert=2), job(figures=MOE, **CLIP)),
    "parts of a sequence": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=2, context=2, shares=(3, 1)),
             sharding=(1, 2, 4)).replace(expert=4), job(figures=MOE)),
    "parts of a sequence, experts in twos": Case(
        plan(pipe((0, 5), (0, 1, 2, 3), samples=3, micro_batch=2, replicas=2, context=2, recompute="selective"),
             sharding=(1, 1, 4)).replace(expert=2), job(figures=MOE)),
    "layered accumulation, zero-3": Case(
        plan(replicas(2, samples=3), sharding=(2, 2, 2), accumulation="layered").replace(expert=2),
        job(figures=FIVE, **CLIP)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, pool: Pool) -> None:
    """Losses, gradient norms and weights of one process in fp64; replicas to the bit; bytes as laid out and routed."""
    case = CASES[name]._replace(steps=3)
    assert why_not(case.plan, case.job, CLUSTER) is None
    assert check(lower(case.plan, case.job.model), case.plan, case.job.model) == ()
    check_bytes(case, check_equality(case, pool))


def check_bytes(case: Case, outcomes: list[Outcome]) -> None:
    """With the rows that a run reports, the prediction of what each rank sends is exact; state is as predicted."""
    layout = Layout(case.plan, case.job.model)
    program = lower(case.plan, case.job.model, layout)
    routing = {rank: outcome.routed for rank, outcome in zip(case.plan.ranks, outcomes)}
    nothing = {rank: {name: [0] * len(rows) for name, rows in routed.items()} for rank, routed in routing.items()}
    all_rows, no_rows = (bytes_sent(program, case.plan, case.job, layout, r) for r in (routing, nothing))
    for rank, outcome in zip(case.plan.ranks, outcomes):
        sent: Counter[str] = Counter()
        for (op, _), nbytes in outcome.sent.items():
            sent[op] += nbytes
        each = Counter(no_rows[str(rank)])  # of every step; the rows that are reported are those of all
        expected = {op: case.steps * n for op, n in each.items()}
        expected["E"] += all_rows[str(rank)]["E"] - each["E"]
        assert {op: n for op, n in sent.items() if n} == expected
        state = static(layout, case.job, rank)
        assert outcome.state_bytes == {"weights": state.weights, "gradients": state.gradients,
                                       "optimizer": state.master + state.moments}
