"""Law 5: a prediction counts the bytes that the runtime sends, and the state that it holds, exactly."""


import pytest

from run_pool import Case, Pool, assert_bytes_and_state, job, pipe, plan

CASES = {
    "pipelines with uneven micro-batches": plan(
        pipe((0, 2, 5), (0,), (1,), samples=5, micro_batch=2), pipe((0, 3, 5), (2,), (3,), samples=1, micro_batch=1)),
    "tensor parallel, full recompute": plan(
        pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=2, tensor=(2, 2), recompute="full")),
    "tensor parallel, last micro-batch smaller": plan(
        pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=4, tensor=(4,))),
    "unequal tensor degrees": plan(pipe((0, 2, 5), (0, 1), (2,), samples=6, micro_batch=3, tensor=(2, 1))),
    "zero-3 in two groups, optimizer over all": plan(
        pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(2, 2, 4)),
    "zero-3 of three, unequal shares": plan(
        pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(3, 3, 3), shares=(5, 1, 2)),
    "zero-3 of four, hierarchical": plan(
        pipe((0, 5), (0, 1, 2, 3), samples=2, micro_batch=1, replicas=4), sharding=(4, 4, 4), hierarchical=2),
    "context 2 with tensor 2, shares 3:1, selective recompute": plan(
        pipe((0, 5), (0, 1, 2, 3), samples=6, micro_batch=4, tensor=(2,), context=2, shares=(3, 1),
             recompute="selective"), sharding=(2, 2, 2)),
    "context 2 in two stages, full recompute": plan(
        pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=4, context=2, shares=(1, 3), recompute="full")),
    "experts over tensor 2, full recompute": plan(
        pipe((0, 2, 5), (0, 1), (2, 3), samples=6, micro_batch=4, tensor=(2, 2), recompute="full")),
    "zero-2 of three": plan(pipe((0, 5), (0, 1, 2), samples=2, micro_batch=1, replicas=3), sharding=(1, 3, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_bytes_and_state_are_those_of_the_runtime(name: str, precision: str, pool: Pool) -> None:
    # Every token to every expert: then routing is even, as the prediction has it.
    experts = {"experts": 4, "experts_per_token": 4, "expert_ffn": 6, "shared_ffn": 8} if "experts" in name else {}
    case = Case(CASES[name], job(CASES[name].global_batch, precision=precision, figures=experts), steps=2)
    assert_bytes_and_state(case, pool.run(case))
