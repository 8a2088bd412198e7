"""Bytes: what a device holds, by what holds it.

Every figure comes from the data types of the job and the shapes of the model; there is no constant per parameter.
Three kinds are kept apart, since they live differently long: static (model state, framework), per micro-batch in
flight (saved activations), and transient (workspace, gathered weights, optimizer temporaries). When they meet is for
the simulator to say. See `docs/cost-model.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from mixfleet.cluster import Device
from mixfleet.cost.kernels import OptimizerLoop, Recompute, fused_attention
from mixfleet.cost.narrow import kept_bytes
from mixfleet.job import Job
from mixfleet.model.spec import Block, ExpertShare
from mixfleet.spec import Spec
from mixfleet.units import MiB, show_bytes

Start = Literal["fresh", "resumed"]

CONTEXT_BYTES: dict[str, int] = {"gpu": 750 * MiB, "cpu": 0}
"""Taken by the driver's context, loaded kernels and cuBLAS workspaces before the first tensor. A CPU process's
interpreter and libraries are host memory that `Device.memory_bytes` does not count."""
COMMUNICATOR_BYTES: dict[str, int] = {"gpu": 200 * MiB, "cpu": 4 * MiB}
"""Channel buffers of one NCCL communicator (about 10 MiB of each of up to 16 channels and what they share), or of a
gloo one."""
NVLINK_BYTES, NVLINK_FULL_BPS = 640 * MiB, 300e9
"""The same on a device with NVLink, whose rate takes more channels: 544 MiB for two A100, 688 for more (NCCL issue
964); in proportion where a device has less, no more where it has more."""
ALLOCATOR_FACTOR: dict[str, float] = {"gpu": 1.06, "cpu": 1.0}
"""Reserved over allocated bytes of PyTorch's caching allocator with `expandable_segments:True`, which plans assume.
Without it the factor is larger: 31.7 over 28.8 (Megatron-LM issue 525), 63 over 59 (llama-cookbook issue 120)."""
OPTIMIZER_CHUNK = 1 << 24
"""Elements that the runtime's optimizer updates at a time on a GPU (fewer on a CPU)."""
_KEPT = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}


_OF_BATCH = ("tokens", "targets")


class StateBytes(NamedTuple):
    """Bytes of model state on one rank."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return sum(self)


def state_bytes(job: Job, weights: int, gradients: int, optimizer: int, start: Start = "resumed") -> StateBytes:
    """Bytes of the pieces that a rank owns, given their elements.

    A fresh start creates Adam's moments only in the first optimizer step; a resumed run holds them from the
    beginning. Moments and master weights are fp32, fp64 in an fp64 job.
    """
    sizes = job.bytes
    moment = 8 if job.precision == "fp64" else 4
    moments = 0 if start == "fresh" else optimizer * moment * job.optimizer.moments
    return StateBytes(weights * sizes.weight_bytes, gradients * sizes.gradient_bytes,
                      optimizer * sizes.master_bytes, moments)


def saved_bytes(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
                recompute: Recompute = "none", context: float = 1, experts: ExpertShare | None = None) -> int:
    """Bytes that one micro-batch keeps from the forward of a block to its backward.

    Here as below, a rank has `seq_len` positions of a sequence that is `context` times longer, and `experts` says what
    it has of experts that several replicas share.
    """
    if block.idle_backward:
        return 0
    fused, frozen = fused_attention(device, job), block.trained_part == 0
    kept, shape = _KEPT[recompute], (micro_batch, seq_len, tensor, context)
    routed = (1, experts.tokens, experts.parts) if experts else shape
    return round(sum(
        tensor_.size.at(*(routed if tensor_.routed else shape)) * kept_bytes(tensor_, job)
        for tensor_ in block.saved if tensor_.until in kept and tensor_.held(device.kind, fused=fused)
        and not (frozen and tensor_.for_weights)))


def parked_bytes(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
                 recompute: Recompute = "none", context: float = 1, experts: ExpertShare | None = None, *,
                 first: bool = False) -> int:
    """Bytes of those that can lie in host memory meanwhile: not what is the batch's own, which is here anyway (tokens
    and targets; what enters the `first` block)."""
    mine = tuple(s for s in block.saved if s.name not in _OF_BATCH and not (first and s.name == "input"))
    return saved_bytes(block.replace(saved=mine), micro_batch, seq_len, tensor, device, job, recompute, context,
                       experts)


def recompute_bytes(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
                    recompute: Recompute, context: float = 1, experts: ExpertShare | None = None) -> int:
    """Bytes that the backward of one block brings back for its own duration: what recompute had dropped."""
    whole, kept = (saved_bytes(block, micro_batch, seq_len, tensor, device, job, mode, context, experts)
                   for mode in ("none", recompute))
    return whole - kept


def workspace_bytes(block: Block, micro_batch: int, seq_len: int, tensor: int, device: Device, job: Job,
                    context: float = 1, experts: ExpertShare | None = None) -> int:
    """Bytes of temporaries while the block computes: the fp32 softmax over the vocabulary in a head, gradients inside
    an MLP, of all keys and values of a shared sequence, or scores and their gradient in attention that is not fused;
    at least the gradient that goes on."""
    shape = (micro_batch, seq_len, tensor, context)
    routed = (1, experts.tokens, experts.parts) if experts else shape
    others = [block.temporaries.at(*shape) + block.routed_temporaries.at(*routed), block.boundary.at(*shape)]
    if context != 1:
        others.append(sum(c.size.at(*shape) for c in block.context_comm if c.phase == "backward"))
    if not fused_attention(device, job):
        others.append(block.unfused_temporaries.at(*shape))
    return round(block.workspace.at(*shape) * block.workspace_bytes_per_element
                 + max(others) * job.bytes.compute_bytes)


def boundary_bytes(block: Block, micro_batch: int, seq_len: int, tensor: int, job: Job) -> int:
    """Bytes of one micro-batch that a rank hands to the next block, forward or backward."""
    return round(block.boundary.at(micro_batch, seq_len, tensor) * job.bytes.compute_bytes)


def gathered_bytes(unit_elements: Sequence[int], job: Job, prefetch: int) -> int:
    """Bytes of gathered weights at their most: the `prefetch + 1` neighbouring units that hold most."""
    window = prefetch + 1
    most = max((sum(unit_elements[i:i + window]) for i in range(max(1, len(unit_elements) - prefetch))), default=0)
    return most * job.bytes.weight_bytes


def optimizer_temporary_bytes(elements: int, job: Job, *, implementation: OptimizerLoop = "chunked") -> int:
    """Bytes of temporaries while the optimizer steps a piece of `elements`, the largest that it takes at a time.

    `foreach` makes a tensor as large as the piece (the root of AdamW's second moment, SGD's decayed gradient); the
    runtime's loop over chunks reuses the gradient for that, after conversion if it is not of the state's type.
    """
    state = 8 if job.precision == "fp64" else 4
    if implementation == "fused":
        return 0
    if implementation == "foreach":
        return elements * state
    return 0 if job.bytes.gradient_bytes == state else min(elements, OPTIMIZER_CHUNK) * state


def communicator_bytes(device: Device) -> int:
    """Bytes of the buffers of one process group."""
    linked = NVLINK_BYTES * min(1.0, device.link_Bps / NVLINK_FULL_BPS) if device.kind == "gpu" else 0
    return max(COMMUNICATOR_BYTES[device.kind], round(linked))


def framework_bytes(device: Device, communicators: int) -> int:
    """Bytes taken before the first tensor: context, and the buffers of `communicators` process groups."""
    return CONTEXT_BYTES[device.kind] + communicators * communicator_bytes(device)


def allocator_factor(device: Device) -> float:
    """Reserved over allocated bytes of tensors."""
    return ALLOCATOR_FACTOR[device.kind]


class StageMemory(Spec, frozen=True, kw_only=True):
    """What one rank of a stage holds, in bytes. Tensors count as allocated; `reserved` adds the allocator's part."""

    weights_bytes: int
    gradients_bytes: int
    master_bytes: int
    moments_bytes: int
    framework_bytes: int
    saved_bytes: int
    """Per micro-batch in flight."""
    gathered_bytes: int
    gradient_buffer_bytes: int
    """Whole gradients of the block in backward, before they are reduced into the pieces."""
    workspace_bytes: int
    recompute_bytes: int
    optimizer_bytes: int
    """Temporaries of the optimizer step."""
    allocator_factor: float

    def static_bytes(self, start: Start = "resumed") -> int:
        """Model state that is there the whole step; moments only after the first step of a fresh run."""
        moments = self.moments_bytes if start == "resumed" else 0
        return self.weights_bytes + self.gradients_bytes + self.master_bytes + moments

    def reserved(self, allocated_bytes: int) -> int:
        """Bytes taken from the device when tensors of `allocated_bytes` are held."""
        return round(allocated_bytes * self.allocator_factor) + self.framework_bytes

    def peak_bytes(self, in_flight: int) -> int:
        """Largest of the two peaks: backward with `in_flight` micro-batches saved, and the optimizer step.

        An upper bound for a stage that never holds more micro-batches at once, moments in place.
        """
        backward = (in_flight * self.saved_bytes + self.gathered_bytes + self.gradient_buffer_bytes
                    + self.workspace_bytes + self.recompute_bytes)
        return self.reserved(self.static_bytes() + max(backward, self.optimizer_bytes))


def stage_memory(blocks: Sequence[Block], micro_batch: int, tensor: int, device: Device, job: Job,
                 recompute: Recompute = "none", *, weights: int, gradients: int, optimizer: int,
                 gathered_units: Sequence[int] = (), reduced_units: Sequence[int] = (), largest_step: int = 0,
                 prefetch: int = 1, communicators: int = 2) -> StageMemory:
    """The breakdown of one rank that holds `blocks`.

    `weights`, `gradients`, `optimizer`: elements of the pieces it owns. `gathered_units`: elements of each unit
    whose weights are gathered for use, `reduced_units` those of units whose gradients leave through a buffer, and
    `largest_step` those of the largest piece stepped at a time.
    """
    shape = (micro_batch, job.seq_len, tensor)
    state = state_bytes(job, weights, gradients, optimizer)
    return StageMemory(
        weights_bytes=state.weights, gradients_bytes=state.gradients, master_bytes=state.master,
        moments_bytes=state.moments, framework_bytes=framework_bytes(device, communicators),
        saved_bytes=sum(saved_bytes(b, *shape, device, job, recompute) for b in blocks),
        gathered_bytes=gathered_bytes(gathered_units, job, prefetch),
        gradient_buffer_bytes=max(reduced_units, default=0) * job.bytes.gradient_bytes,
        workspace_bytes=max((workspace_bytes(b, *shape, device, job) for b in blocks), default=0),
        recompute_bytes=max((recompute_bytes(b, *shape, device, job, recompute) for b in blocks), default=0),
        optimizer_bytes=optimizer_temporary_bytes(largest_step, job),
        allocator_factor=allocator_factor(device))


def attention_note(blocks: Sequence[tuple[Block, Recompute]], micro_batch: int, tensor: int, device: Device, job: Job,
                   in_flight: int = 1) -> str:
    """What the lack of flash attention costs blocks with their modes, as `no flash attention on V100-SXM2-32GB: +5.06
    GiB`; else empty."""
    if fused_attention(device, job):
        return ""
    shape = (micro_batch, job.seq_len, tensor)
    fused = job.replace(attention="fused")
    extra = in_flight * sum(saved_bytes(b, *shape, device, job, mode)
                            - saved_bytes(b, *shape, device, fused, mode) for b, mode in blocks)
    extra += max((recompute_bytes(b, *shape, device, job, mode)
                  - recompute_bytes(b, *shape, device, fused, mode) for b, mode in blocks), default=0)
    if not extra:
        return ""
    why = "attention is eager" if job.attention == "eager" else f"no flash attention on {device.name}"
    return f"{why}: +{show_bytes(extra)}"
