"""Routed experts shared by replicas: who holds what, what it costs, and real ranks that equal one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mixfleet.batching import Batcher, steps_of
from mixfleet.cluster import Cluster
from mixfleet.job import Data, Job, Lengths
from mixfleet.plan import Plan
from mixfleet.plan_rules import why_not
from mixfleet.program.check import check
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.run import train
from mixfleet.sim import predict
from mixfleet.sim.memory import static
from mixfleet.sim.sent import bytes_sent
from run_pool import CLUSTER, Case, Outcome, Pool, chunked, job, pipe, plan
from test_run_equality import check_equality

MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12, "kv_heads": 2}
FIVE = {**MOE, "experts": 5}
LENGTHS = {"data": Data(lengths=Lengths(kind="uniform"))}
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
    "two groups of two, zero-3 gathered in stages": Case(
        plan(replicas(4), sharding=(4, 4, 4), hierarchical=2).replace(expert=2), job(8, figures=FIVE, **CLIP)),
    "five experts on four, gathered in stages, unequal shares": Case(
        plan(replicas(4), sharding=(4, 4, 4), hierarchical=2, shares=(1, 3, 2, 2)).replace(expert=4),
        job(8, figures=FIVE, **CLIP), masked=True),
    "experts across the nodes, layered": Case(
        plan(replicas(4, samples=3), sharding=(2, 4, 4), hierarchical=2, accumulation="layered").replace(
            expert=4, expert_shares=(2, 0, 1, 1)), job(12, figures=MOE)),
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
    "packed, unequal shares, zero-2": Case(
        plan(replicas(2, samples=4, micro_batch=2), sharding=(1, 2, 2), batching="packed").replace(
            expert=2, expert_shares=(3, 1)), job(8, figures=MOE, **LENGTHS, **CLIP)),
    "packed on three parts of sequences, shares 2:1:1, beside one rank": Case(
        plan(pipe((0, 5), (0, 1, 2), samples=4, micro_batch=2, context=3, shares=(2, 1, 1)),
             pipe((0, 5), (3,), samples=2, micro_batch=1), batching="packed").replace(
                 expert=4, expert_shares=(1, 2, 1, 0)), job(figures=MOE, **LENGTHS)),
    "bucketed, two groups of two, full recompute": Case(
        plan(replicas(4, samples=2, recompute="full"), batching="bucketed").replace(expert=2),
        job(8, figures=FIVE, **LENGTHS)),
    "packed, pipelines of unequal micro-batches": Case(
        plan(pipe((0, 3, 5), (0,), (1,), samples=4, micro_batch=2),
             pipe((0, 3, 5), (2,), (3,), samples=2, micro_batch=1), batching="packed").replace(expert=2),
        job(figures=MOE, **LENGTHS)),
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
    batches = [Batcher(case.plan, case.job, CLUSTER).step(lengths)
               for lengths in steps_of(case.job, case.steps)] or [None] * case.steps
    routing = {rank: outcome.routed for rank, outcome in zip(case.plan.ranks, outcomes)}
    nothing = {rank: {name: [0] * len(rows) for name, rows in routed.items()} for rank, routed in routing.items()}
    all_rows, *no_rows = (bytes_sent(program, case.plan, case.job, layout, r, batch) for r, batch in (
        (routing, batches[0]), *((nothing, batch) for batch in batches)))
    for rank, outcome in zip(case.plan.ranks, outcomes):
        sent: Counter[str] = Counter()
        for (op, _), nbytes in outcome.sent.items():
            sent[op] += nbytes
        expected = sum((Counter(one[str(rank)]) for one in no_rows), Counter())
        expected["E"] += all_rows[str(rank)]["E"] - no_rows[0][str(rank)]["E"]  # the rows reported are those of all
        assert {op: n for op, n in sent.items() if n} == expected
        state = static(layout, case.job, rank)
        assert outcome.state_bytes == {"weights": state.weights, "gradients": state.gradients,
                                       "optimizer": state.master + state.moments}


def routed_plan(n: int = 4, expert: int = 2, **more):
    return plan(replicas(n)).replace(expert=expert, **more)


@pytest.mark.parametrize(("made", "figures", "says"), [
    (routed_plan(expert=0), MOE, "expert is 0; it must be at least 1"),
    (routed_plan(expert=5), MOE, "expert is 5; the plan has 4 data-parallel replicas, so at most 4"),
    (routed_plan(1, 2), MOE, "the one data-parallel replica has all experts; `tensor` spreads them"),
    (routed_plan(), {}, "has no routed experts; take 1"),
    (routed_plan(expert=4), {**MOE, "experts": 3}, "4 replicas would share 3 experts; at most 3, or say with"),
    (routed_plan(expert=1, expert_shares=(1, 1, 1, 1)), MOE, "expert_shares is given, but expert is 1"),
    (routed_plan(expert_shares=(1, 2)), MOE, "expert_shares has 2 numbers; the plan has 4 data-parallel replicas"),
    (routed_plan(expert_shares=(1, -2, 1, 1)), MOE, "expert_shares has -2; a share is 0 or more"),
    (routed_plan(expert_shares=(1, 2, 0, 0)), MOE, "gives no expert to replicas 2-3"),
    (plan(pipe((0, 5), (0,), samples=2, micro_batch=1), pipe((0, 5), (1,), samples=3, micro_batch=1)).replace(
        expert=2), MOE, "pipelines of 2 and 3 micro-batches into one group"),
    (plan(pipe((0, 5), (0,), samples=2, micro_batch=1),
          pipe((0, 2, 5), (1,), (2,), samples=2, micro_batch=1)).replace(expert=2), MOE,
     "pipelines with different stages into one group"),
    (plan(pipe((0, 5), (0,), samples=2, micro_batch=1),
          pipe((0, 5), (1,), samples=2, micro_batch=1, recompute="full")).replace(expert=2), MOE,
     "pipelines with different recompute into one group"),
    (plan(pipe((0, 2, 5), (0, 1), (2, 3), samples=2, micro_batch=1, replicas=2), schedule="pipedream").replace(
        expert=2), MOE, "under pipedream replicas go at their own pace"),
])
def test_impossible_plans_say_why(made: Plan, figures: dict[str, int], says: str) -> None:
    assert says in (why_not(made, job(made.global_batch, figures=figures), CLUSTER) or "")


def test_tensor_degree_need_not_divide_the_experts_of_a_replica() -> None:
    """Five experts: 2 and 3 of them on two replicas of tensor degree 2."""
    made = plan(pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, tensor=(2,), replicas=2))
    work = job(4, figures=FIVE)
    assert "does not divide 5 experts" in (why_not(made, work, CLUSTER) or "")
    assert why_not(made.replace(expert=2), work, CLUSTER) is None
    layout = Layout(made.replace(expert=2), work.model)
    gate = next(t for t in layout.units[1].tensors if t.key.endswith("experts.gate.weight"))
    assert [layout.rows(gate, rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 5)]


def test_state_by_hand() -> None:
    """Six experts of three matrices 12 x 16 in two groups of three replicas; all else is on each. Of the optimizer
    state, sharded over all six, an expert's is cut in two: each group has it once."""
    made = plan(replicas(6), sharding=(1, 1, 6)).replace(expert=3, expert_shares=(3, 1, 2, 1, 1, 4))
    work = job(12, figures={**MOE, "experts": 6})
    layout = Layout(made, work.model)
    each, layers = 3 * 12 * 16, 3
    dense = work.model.count - 6 * each * layers
    assert [layout.elements("weights", r) - dense for r in range(6)] == [n * each * layers for n in (3, 1, 2, 1, 1, 4)]
    own = [layout.elements("optimizer", r) for r in range(6)]
    assert sum(own) == work.model.count
    # Experts 0 and 3-5: replica 0 has 0-2, 1 has 3, 2 has 4-5; 3 has 0, 4 has 1, 5 has 2-5.
    held = [[0, 1, 2], [3], [4, 5], [0], [1], [2, 3, 4, 5]]
    assert [own[r] - dense / 6 for r in range(6)] == pytest.approx(
        [len(h) * each * layers / 2 for h in held], abs=4 * layers)


def test_bytes_of_even_routing_by_hand() -> None:
    """Two micro-batches of 8 positions; every token goes to all 4 experts, in rows of 16 fp64. Rank 0 has 3 experts, so
    a quarter of its 32 rows goes to rank 1 and comes back, and of rank 1's rows three quarters come and go."""
    made = plan(replicas(2)).replace(expert=2, expert_shares=(3, 1))
    work = job(4, figures={**MOE, "experts_per_token": 4})
    layout = Layout(made, work.model)
    sent = bytes_sent(lower(made, work.model, layout), made, work, layout)
    rows = 8 * 4 * 16 * 8
    both = rows // 4 + 3 * rows // 4
    assert {r: s["E"] for r, s in sent.items()} == {
        "0": 3 * 2 * (2 * both + 8 * 1), "1": 3 * 2 * (2 * both + 8 * 3)}


def test_sharing_experts_saves_their_memory_and_costs_exchanges() -> None:
    alone, shared = (predict(routed_plan(expert=e), job(8, figures=MOE), CLUSTER) for e in (1, 4))
    assert "expert" not in alone.exposed_s
    assert shared.exposed_s["expert"] > 0
    weights = [p.devices[0].breakdown["weights"] for p in (alone, shared)]
    assert weights[0] - weights[1] == 8 * 3 * (3 * 12 * 16) * 3  # three of four experts in three layers


def test_the_example_is_possible() -> None:
    root = Path(__file__).parent.parent / "examples"
    made = Plan.load(root / "plans/mixtral-experts.yaml")
    work, where = Job.load(root / "jobs/mixtral-8x7b.yaml"), Cluster.load(root / "clusters/h100-128.yaml")
    assert why_not(made, work, where) is None
    layout = Layout(made, work.model)
    assert [layout.plan.experts_of(k, 8) for k in range(8)] == [(k, k + 1) for k in range(8)]


@pytest.mark.slow
def test_a_checkpoint_is_read_under_another_degree_and_by_one_process(tmp_path: Path) -> None:
    """Five experts on four replicas, then on two groups of two, then one process: losses as if nothing had changed."""
    work = job(8, figures=FIVE, **CLIP).replace(steps=6)
    plans = [routed_plan(expert=4), plan(replicas(4), sharding=(1, 2, 4)).replace(expert=2),
             plan(pipe((0, 5), (0,), samples=8, micro_batch=8))]
    losses: list[float] = []
    for i, made in enumerate(plans):
        found = train(made, work, CLUSTER, steps=2 * (i + 1), out_dir=tmp_path / str(i),
                      resume=tmp_path / str(i - 1) / "checkpoints" if i else "")
        losses += found.losses
    whole = train(plans[-1], work, CLUSTER, steps=6)
    assert losses == pytest.approx(whole.losses, rel=1e-9)
