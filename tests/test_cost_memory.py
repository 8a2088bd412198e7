"""Bytes against hand-made sums and against figures that users measured."""

import pytest

from mixfleet.cluster import Device, device_named
from mixfleet.cost import memory
from mixfleet.job import Job, Optimizer
from mixfleet.model.families import build
from mixfleet.model.spec import Block
from mixfleet.plan import Recompute
from mixfleet.units import GiB

A100, V100 = device_named("A100-SXM4-80GB"), device_named("V100-SXM2-32GB")
CPU = device_named("cpu")


@pytest.fixture(scope="module")
def small():
    return build({"layers": 3, "hidden": 64, "heads": 4, "ffn": 160, "vocab": 1000, "max_seq_len": 512})


def job(model, **changes):
    return Job(**{"name": "j", "model": model, "seq_len": 128, "global_batch": 4, **changes})


def test_state_follows_the_types_of_the_job(small):
    assert memory.state_bytes(job(small), 100, 30, 7) == (200, 120, 28, 56)
    assert memory.state_bytes(job(small, gradient_precision="bf16"), 100, 30, 7) == (200, 60, 28, 56)
    assert memory.state_bytes(job(small, precision="fp32"), 100, 30, 7) == (400, 120, 0, 56)
    assert memory.state_bytes(job(small, precision="fp64"), 100, 30, 7) == (800, 240, 0, 112)
    assert memory.state_bytes(job(small, optimizer=Optimizer(name="sgd")), 100, 30, 7) == (200, 120, 28, 0)


def test_zero_2_keeps_what_the_corrected_formula_says(small):
    """DeepSpeed issue 5099: 2 P for the weights, and a share of all else; we keep only the fp32 gradients."""
    p, n = 8000, 4
    state = memory.state_bytes(job(small), p, p // n, p // n)
    assert state.total == 2 * p + (4 + 4 + 8) * p // n


def test_a_fresh_run_lacks_the_moments_until_its_first_step(small):
    fresh, resumed = (memory.state_bytes(job(small), 100, 30, 7, start) for start in ("fresh", "resumed"))
    assert resumed.total - fresh.total == 2 * 4 * 7
    assert fresh.moments == 0
    assert fresh[:3] == resumed[:3]


def stage(model, device=A100, recompute="none", micro_batch=2, **changes):
    return memory.stage_memory(model.blocks[1:3], micro_batch, 1, device, job(model, **changes), recompute,
                               weights=5000, gradients=4000, optimizer=3000, gathered_units=(700, 1100, 500),
                               reduced_units=(700, 900), largest_step=650)


def test_saved_bytes_by_recompute_mode(small):
    block, one = small.blocks[1], job(small)

    def saved(mode, device=A100, micro_batch=2, tensor=1):
        return memory.saved_bytes(block, micro_batch, 128, tensor, device, one, mode)

    boundary = 2 * 128 * 64 * 2
    assert memory.boundary_bytes(block, 2, 128, 1, one) == boundary
    assert saved("full") == boundary
    assert saved("none") > saved("selective") > saved("full")
    assert saved("none", micro_batch=6) == 3 * saved("none")
    # probabilities: batch, heads, s, s, bytes; the mask; no statistics of fused rows
    assert saved("none", V100) - saved("none", A100) == 2 * 4 * 128 * 128 * 2 + 128 * 128 - 2 * 4 * 128 * 4
    assert saved("selective", V100) == saved("selective", A100)
    assert saved("full", tensor=4) == boundary // 4
    for mode in ("none", "selective", "full"):
        brought_back = memory.recompute_bytes(block, 2, 128, 1, A100, one, mode)
        assert brought_back + saved(mode) == saved("none")


def test_a_head_needs_logits_in_fp32_and_their_gradient(small):
    head = small.blocks[-1]
    logits = 2 * 128 * 1000
    assert memory.workspace_bytes(head, 2, 128, 1, A100, job(small)) == logits * (4 + 2)
    assert memory.workspace_bytes(head, 2, 128, 4, A100, job(small)) == logits * (4 + 2) // 4
    assert memory.saved_bytes(head, 2, 128, 1, A100, job(small)) > logits * 2


def test_eager_attention_needs_room_for_two_sets_of_scores(small):
    block, one = small.blocks[1], job(small, seq_len=512)
    scores = 2 * 4 * 512 * 512 * 2
    # by the time of the attention's backward the MLP's saved tensors are free
    assert 1.7 * scores < memory.workspace_bytes(block, 2, 512, 1, V100, one) <= 2 * scores
    assert memory.workspace_bytes(block, 2, 512, 1, A100, one) < scores


def test_gathered_weights_are_the_largest_neighbours(small):
    sizes = (5, 70, 11, 13, 60)
    assert [memory.gathered_bytes(sizes, job(small), n) for n in (0, 1, 2, 9)] == [140, 162, 188, 318]
    assert memory.gathered_bytes((), job(small), 1) == 0


def test_optimizer_temporaries_by_implementation(small):
    def temporary(elements, implementation, **changes):
        return memory.optimizer_temporary_bytes(elements, job(small, **changes), implementation=implementation)

    # verl issue 5364: 31.16 GB of moments, 15.58 GB of foreach temporaries
    elements = 31_160_000_000 // 8
    assert temporary(elements, "foreach") == 15_580_000_000
    assert temporary(elements, "fused") == temporary(elements, "chunked") == 0
    assert temporary(elements, "chunked", gradient_precision="bf16") == 64 * 2**20
    assert temporary(1000, "chunked", gradient_precision="bf16") == 4000


def test_a_stage_adds_up(small):
    one = stage(small)
    assert (one.weights_bytes, one.gradients_bytes, one.master_bytes, one.moments_bytes) == (
        10000, 16000, 12000, 24000)
    assert (one.gathered_bytes, one.gradient_buffer_bytes, one.optimizer_bytes) == (3600, 3600, 0)
    assert one.saved_bytes == 2 * memory.saved_bytes(small.blocks[1], 2, 128, 1, A100, job(small))
    assert one.static_bytes("fresh") == 38000
    assert one.static_bytes() == 62000
    held = 62000 + 3 * one.saved_bytes + 3600 + 3600 + one.workspace_bytes
    assert one.peak_bytes(3) == round(held * one.allocator_factor) + one.framework_bytes
    assert one.framework_bytes == memory.CONTEXT_BYTES["gpu"] + 2 * memory.communicator_bytes(A100)


def test_full_recompute_keeps_one_block_whole(small):
    full, none = stage(small, recompute="full"), stage(small)
    assert full.recompute_bytes == (none.saved_bytes - full.saved_bytes) // 2
    assert full.peak_bytes(4) < none.peak_bytes(4)


def test_the_optimizer_step_can_be_the_peak(small):
    one = memory.stage_memory(small.blocks[:0], 1, 1, A100, job(small, gradient_precision="bf16"), weights=0,
                              gradients=0, optimizer=10**9, largest_step=10**9)
    assert one.peak_bytes(1) == round((12 * 10**9 + 2**26) * one.allocator_factor) + one.framework_bytes


def test_processes_on_a_cpu_pay_no_context():
    assert memory.framework_bytes(CPU, 0) == 0
    assert memory.allocator_factor(CPU) == 1
    assert memory.framework_bytes(A100, 3) - memory.framework_bytes(A100, 2) == memory.communicator_bytes(A100)


def test_a_communicator_takes_as_many_channels_as_its_links_need():
    names = {"H100-SXM": 640, "A100-SXM4-80GB": 640, "V100-SXM2-32GB": 320, "L40S": 200, "cpu": 4}
    assert {n: memory.communicator_bytes(device_named(n)) / 2**20 for n in names} == names


def test_gpt2_large_on_one_v100_is_over_memory_and_the_note_says_why():
    """Megatron-LM issue 525: 774 M parameters on one V100-32GB: own sum 23.3 GB, out of memory at 29.97 GiB."""
    model = build("gpt2-large")
    one = Job(name="j", model=model, seq_len=1024, global_batch=8, precision="fp16")

    def peak(device: Device) -> int:
        return memory.stage_memory(model.blocks, 8, 1, device, one, weights=model.count, gradients=model.count,
                                   optimizer=model.count, largest_step=max(b.count for b in model.blocks)).peak_bytes(1)

    plain: list[tuple[Block, Recompute]] = [(b, "none") for b in model.blocks]
    note = memory.attention_note(plain, 8, 1, V100, one)
    scores = 36 * ((8 * 20 * 2 + 1) * 1024**2 - 8 * 20 * 1024 * 4)
    assert note == f"no flash attention on V100-SXM2-32GB: +{scores / GiB:.3g} GiB"
    assert peak(V100) > V100.memory_bytes
    assert peak(V100) - peak(A100) > scores
    assert memory.attention_note(plain, 8, 1, A100, one) == ""
    eager = memory.attention_note(plain, 8, 1, A100, one.replace(attention="eager"))
    assert eager.startswith("attention is eager: +")
    recomputed = memory.attention_note([(b, "full") for b in model.blocks], 8, 1, V100, one)
    assert recomputed == f"no flash attention on V100-SXM2-32GB: +{scores / 36 / GiB * 1024:.3g} MiB"
