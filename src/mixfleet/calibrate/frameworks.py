"""How the code of published runs differs from the runtime that plans are predicted for, and what that changes.

Three kinds of difference: operators (a model is rewritten to what really runs), seconds that the simulated step has or
lacks, and bytes. Each is a property of a code base that its documentation or source states, never of a single row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from mixfleet import trace
from mixfleet.cluster import Device
from mixfleet.cost.kernels import OptimizerLoop, accumulate_s, efficiency, fused_attention, generation, optimizer_s
from mixfleet.cost.memory import CONTEXT_BYTES
from mixfleet.job import Job
from mixfleet.model.parts import ROWS, SHARD, gemm
from mixfleet.model.spec import Block, Model, Op, Saved, Size, T
from mixfleet.plan import Pipeline, Plan, Stage
from mixfleet.sim.experts import Experts
from mixfleet.sim.prediction import DeviceUse, Prediction


class Framework(NamedTuple):
    """One code base. The defaults are those of the runtime, but for the optimizer, which nearly everybody fuses."""

    overlaps: bool = True
    """Whether gradients and weights move while the device computes."""
    sequence_parallel: bool = True
    """Whether tensors between the products are sharded over the tensor group (Korthikanti et al., 2022)."""
    expandable: bool = True
    """Whether the allocator grows its segments; without, it keeps more than it needs."""
    bucket_elements: int = 0
    """Elements of the buffer through which gradients are reduced to the owners of optimizer state."""
    both_gradients: bool = False
    """Whether the 16-bit gradients of a backward are all there beside the fp32 ones that they are added to."""
    dropped: bool = False
    """Whether attention and residuals are dropped out in training, whose masks and results are kept."""
    copies_weights: bool = True
    """Whether 16-bit weights are kept beside the fp32 ones; FSDP casts its shards as it gathers them."""
    counted: Literal["allocated", "reserved", "used"] = "used"
    """What its memory figure is: of torch's counters, or of the driver with context and communicators."""
    joined: bool = False
    """Whether q, k and v are one product, and gate and up another."""
    score_passes: tuple[float, float] | None = None
    """Times that attention which is not fused reads or writes its scores besides its products, forward and backward."""
    flash: Literal[1, 2, 3] = 3
    """Generation of its fused attention."""
    copied: float = 0.0
    """Times that the inputs and the output of attention's products are read or written to rearrange heads."""
    dropout: float = 0.0
    """Passes over a sublayer's output that dropout as a kernel of its own takes, forward and again backward."""
    activation_passes: tuple[float, float] = (0.0, 0.0)
    """The same of an activation that is not one kernel, beyond those of one."""
    optimizer: OptimizerLoop | Literal["loop"] = "fused"
    """How the optimizer steps: one kernel, one per operation, or a loop over parameters in Python."""
    adding: float = 1.0
    """Part of the bytes of adding up fp32 gradients that remains."""
    gates_fused: bool = False
    """Whether activation and product of a gated MLP are one kernel, whose backward makes the product again."""
    norm_passes: tuple[float, float] | None = None
    """Times that RMSNorm which is not one kernel reads or writes its input, forward and backward."""
    rotated: float = 2.0
    """Times that rotating queries and keys reads or writes them, forward and again backward."""
    loss_bytes: float = 36.0
    """Read or written per logit, forward and backward: the softmax in fp32, by separate kernels."""
    logit_bytes: float = 6.0
    """Temporaries of the loss, per logit, beside the logits themselves: their softmax in fp32 and their gradient."""
    hides_tensor: bool = False
    """Whether what a tensor group exchanges moves in pieces, while the products before or behind it compute others."""
    variables: tuple[float, int] = (0.0, 0)
    """Of every micro-batch, beyond adding up gradients: times that these are read or written in fp32, and kernels per
    parameter tensor that the host issues for it."""
    saves_narrow: bool = True
    """Whether products in a narrow type keep narrow inputs for backward."""
    pure: bool = False
    """Whether weights, gradients and moments are all of 16 bits, without a master copy."""


SLOWER_FLASH: dict[int, dict[str, float]] = {1: {"Ampere": 1.25, "Hopper": 2.5}, 2: {"Hopper": 1.5}, 3: {}}
"""Times that fused attention of an earlier generation takes, against the newest kernels of the device, which the kernel
model knows. On Hopper the third is 1.5 to 2 times as fast as the second (Shah et al., 2024); the first reaches 25 to
40 % of an A100, the second up to 73 % (Dao, 2023), and without Hopper's own instructions gains 1.5 from A100 to H100.
"""
FUSED_SOFTMAX = (4.0, 5.25)
"""Megatron's kernel for scale, mask and softmax reads and writes once, and backward reads two and writes one (of the
masked half nothing is read); dropout reads and writes, and its mask has a byte (a quarter to half a pass)."""
SCALED_SOFTMAX = (6.0, 9.0)
"""Megatron's in fp32: scale by layer (2), mask (2), softmax (2); backward of softmax (3), of the mask, which copies
what it then fills (4), and of the scale (2)."""
EAGER_SOFTMAX = (8.25, 9.25)
"""The same with the scale as a kernel of its own, as in Hugging Face models."""
NEW_GELU = (16.0, 20.0)
"""Eight elementwise kernels instead of one: a cube, three products, two sums, tanh and a last product."""
EAGER_RMSNORM = (18.0, 38.0)
"""In a 16-bit job, whose RMSNorm works in fp32, by elementwise kernels: a cast (3), the square (4), the mean (2), the
product with its root (4), the cast back (3), the weight (2); backward two passes of each product, the mean's, their sum
and the casts."""
EAGER_ROTATION = 10.0
"""Casts to fp32 and back (3 each) around a complex product (4), or two products (2 each), the half turn (3) and a sum
(3)."""
ONLINE_LOSS = 10.0
"""Transformer Engine's cross entropy reads 16-bit logits twice and leaves the gradient in their place, which backward
scales."""
SHIFTED_LOGITS = 12.0
"""Models of transformers' library before 4.45 turn all logits into fp32 (4), make the shifted ones contiguous (4), and
hold their log-softmax (4), in whose place the gradient comes."""
IN_PRODUCTS, IN_16_BITS = 0.0, 0.6
"""Gradients added up by the epilogue of the product that makes them, or in 16 bits: 6 bytes for each instead of 10."""

MEGATRON_DEEPSPEED = Framework(overlaps=False, sequence_parallel=False, expandable=False, bucket_elements=5 * 10**8,
                               dropped=True, joined=True, score_passes=FUSED_SOFTMAX, adding=IN_16_BITS)
MEGATRON_CORE = Framework(expandable=False, joined=True, adding=IN_PRODUCTS, gates_fused=True)
NEMO = MEGATRON_CORE._replace(hides_tensor=True)
TENSORFLOW = (10.0, 8)
"""NVIDIA's BERT for TensorFlow looks at every variable's gradient in each micro-batch: unscale (2), all finite (1),
norm (1), clip (2), add to a variable (3), each a kernel or two."""
XLA = Framework(gates_fused=True, loss_bytes=ONLINE_LOSS)
EAGER_LLAMA = Framework(norm_passes=EAGER_RMSNORM, rotated=EAGER_ROTATION)
HUGGING_FACE = Framework(dropped=True, score_passes=EAGER_SOFTMAX, copied=2.0, dropout=2.25)
FRAMEWORKS: dict[str, Framework] = {
    "bigscience": MEGATRON_DEEPSPEED, "bsv100": MEGATRON_DEEPSPEED, "vtrain": MEGATRON_DEEPSPEED,
    "sailor": MEGATRON_DEEPSPEED._replace(dropped=False, score_passes=SCALED_SOFTMAX, adding=1.0),
    "megatron": Framework(expandable=False, dropped=True, joined=True, score_passes=FUSED_SOFTMAX, adding=IN_16_BITS),
    "simumax": MEGATRON_CORE._replace(overlaps=False, counted="allocated"),
    "dgxc": NEMO, "nemo": NEMO, "mbridge": NEMO._replace(loss_bytes=ONLINE_LOSS),
    "llmfoundry": Framework(copies_weights=False, joined=True, flash=1),
    "torchtitan": EAGER_LLAMA._replace(copies_weights=False, counted="reserved", flash=2, saves_narrow=False),
    "nanotron": Framework(expandable=False, both_gradients=True, joined=True, flash=2),
    "neusight": HUGGING_FACE, "lambda": HUGGING_FACE, "dle": HUGGING_FACE,
    "finetune": EAGER_LLAMA._replace(optimizer="foreach"),
}
"""As the sources state: the Megatron-DeepSpeed of 2021 and 2022 had neither overlap nor sequence parallelism, has
kernels of its own for softmax in 16 bits only, and DeepSpeed's default bucket; simumax switched overlap off. In the
memory of sailor's runs there is room for one copy of the scores, so dropout seems to be off."""
LOOPING = ("lambda",)
"""Sources whose runs that are not in 16 bits loop over parameters in Python: NVIDIA's BERT takes a fused optimizer for
SQuAD in 16 bits only (and there has the whole model in 16 bits, softmax included)."""
LOOPED_KERNELS, LOOPED_S = 14, 10e-6
"""Kernels per parameter of such a loop, its clipping included, and seconds of the host for each: what PyTorch needs to
issue one elementwise operation from Python."""
UNEXPANDED = 1.10
"""Reserved over allocated bytes without expandable segments (31.7 over 28.8 GB, Megatron-LM issue 525)."""


def of(source: str, dtype: str = "", settings: str = "") -> Framework:
    """The code base of a source, for runs of a type; the runtime's habits where none is known.

    `settings` may name another one (JAX), or a compiler, which fuses what lies between products, or asynchronous tensor
    parallelism.
    """
    found = XLA if "JAX" in settings else FRAMEWORKS.get(source, Framework())
    if "framework=TensorFlow" in settings:
        found = found._replace(variables=TENSORFLOW, optimizer="foreach")
    if re.search(r"\bcompile\b", settings):
        found = found._replace(gates_fused=True, norm_passes=None, rotated=2.0)
    if re.search(r"\basync ?TP\b", settings, re.IGNORECASE):
        found = found._replace(hides_tensor=True)
    looping = source in LOOPING or ("framework=PyTorch" in settings and "fine-tuning" in settings)
    return found._replace(optimizer="loop") if looping and dtype not in ("fp16", "bf16") else found


def rewritten(model: Model, job: Job, device: Device, framework: Framework) -> Model:
    """The model with the operators that the framework runs, and what they save."""
    blocks: dict[str, Block] = {}
    for block in model.blocks:
        if block.kind not in blocks:
            ops: Iterable[Op] = block.ops
            if framework.joined:
                ops = _joined(ops)
            if framework.score_passes and not fused_attention(device, job):
                ops = [part for op in ops for part in _eager(op, framework.score_passes, framework.copied)]
            slower = SLOWER_FLASH[framework.flash].get(generation(device), 1.0)
            ops = [op.replace(shape={**op.shape, "batch": slower * op.shape["batch"]})
                   if op.kind == "attention" and fused_attention(device, job) else op for op in ops]
            if not framework.sequence_parallel:
                ops = map(_whole, ops)
            names = {p.name for p in block.params}
            ops = [_fused(op, framework, is_rms=f"{op.name}.bias" not in names and job.bytes.compute_bytes == 2)
                   for op in ops]
            ops = [_longer(op, ".activation", framework.activation_passes) for op in ops]
            ops = [_longer(op, ("add1", "add2"), (framework.dropout, framework.dropout)) for op in ops]
            saved = tuple(_with_masks(s) if framework.dropped else s for s in block.saved
                          if not (framework.gates_fused and s.name.endswith(".activated_out")))
            if job.products and not framework.saves_narrow:
                saved = tuple(s.replace(bytes_per_element=job.bytes.compute_bytes) if s.bytes_per_element is None else s
                              for s in saved)
            workspace = block.workspace
            if block.kind.startswith("head"):
                workspace = framework.logit_bytes / Framework().logit_bytes * workspace
            blocks[block.kind] = block.replace(ops=tuple(ops), saved=saved, workspace=workspace)
    return model.replace(blocks=tuple(blocks[b.kind].replace(name=b.name) for b in model.blocks))


def _with_masks(saved: Saved) -> Saved:
    """With dropout, 5 bytes a score for 2 (softmax, its mask, what remains), and masks of a byte for both sublayers'
    outputs beside the 2 bytes of the sum between them, in a 16-bit job (Korthikanti et al., 2022)."""
    more = {"attention.probabilities": 2.5, "norm2.input": 2.0}.get(saved.name, 1.0)
    return saved.replace(size=more * saved.size) if more != 1.0 else saved


_TOGETHER = {"attention.k": "attention.q", "attention.v": "attention.q", "mlp.up": "mlp.gate"}
"""Products of one input, and the first of them."""


def _joined(ops: Iterable[Op]) -> list[Op]:
    found: list[Op] = []
    for op in ops:
        first = next((o for o in found if o.name == _TOGETHER.get(op.name)), None)
        if first is None:
            found.append(op)
            continue
        wide = gemm(first.name, first.shape["batch"], first.shape["m"], first.shape["n"] + op.shape["n"],
                    first.shape["k"])
        found[found.index(first)] = wide
    return found


def _eager(op: Op, passes: tuple[float, float], copied: float) -> list[Op]:
    """Attention as what runs without a fused kernel: two batched products, and what lies between them."""
    if op.kind != "attention":
        return [op]
    heads, q, kv = op.shape["batch"] * op.shape["heads"], op.shape["q"], op.shape["kv"]
    scores = heads * q * kv
    moved = copied * heads * (q + kv) * (op.shape["qk_dim"] + op.shape["v_dim"])
    between = Op(name="attention.softmax", kind="elementwise", shape={"rows": heads * q, "cols": kv}, flops=Size(),
                 backward_flops=Size(), traffic=passes[0] * scores + moved, backward_traffic=passes[1] * scores + moved)
    return [gemm("attention.scores", heads, q, kv, op.shape["qk_dim"]), between,
            gemm("attention.values", heads, q, op.shape["v_dim"], kv)]


def _whole(op: Op) -> Op:
    """Without sequence parallelism every rank of a tensor group norms and adds all tokens."""
    if op.kind not in ("norm", "elementwise") or op.shape["rows"] != SHARD:
        return op
    return op.replace(shape={**op.shape, "rows": ROWS}, traffic=op.traffic * T,
                      backward_traffic=op.backward_traffic * T)


def _fused(op: Op, framework: Framework, *, is_rms: bool) -> Op:
    """An operator as the framework fuses it, or cuts it up; `is_rms` says whether a norm is RMSNorm in 16 bits."""
    if op.kind not in ("norm", "elementwise", "loss"):
        return op
    size = op.shape["rows"] * op.shape["cols"]
    if op.kind == "loss":
        part = framework.loss_bytes / Framework().loss_bytes
        return op.replace(traffic=part * op.traffic, backward_traffic=part * op.backward_traffic)
    if op.kind == "norm" and framework.norm_passes and is_rms:
        forward, backward = framework.norm_passes
        return op.replace(kind="elementwise", traffic=forward * size, backward_traffic=backward * size)
    if op.name == "attention.rotate":
        return op.replace(traffic=framework.rotated * size, backward_traffic=framework.rotated * size)
    if framework.gates_fused and op.name.endswith(".activation") and op.traffic == 5.0 * size:
        return op.replace(traffic=3.0 * size, backward_traffic=5.0 * size)
    return op


def _longer(op: Op, end: str | tuple[str, ...], passes: tuple[float, float]) -> Op:
    if not any(passes) or not op.name.endswith(end):
        return op
    size = op.shape["rows"] * op.shape["cols"]
    return op.replace(traffic=op.traffic + passes[0] * size, backward_traffic=op.backward_traffic + passes[1] * size)


def step_s(found: Prediction, plan: Plan, job: Job, device: Device, framework: Framework) -> float:
    """Seconds of a step, from the simulated one: without overlap if there is none (`found` has a trace then), with the
    framework's optimizer, and with its way of adding up gradients.

    Exchanges of a tensor group of t that move in pieces leave one of t pieces bare.
    """
    seconds = found.step_s
    if not framework.overlaps and found.trace:
        seconds += hidden_s(found.trace)
    if framework.hides_tensor:
        tensor = max(stage.tensor for p in plan.pipelines for stage in p.stages)
        seconds -= (1 - 1 / tensor) * sum(s.fraction for s in found.critical if s.category == "tensor") * found.step_s
    updating = sum(s.fraction for s in found.critical if s.category == "optimizer") * found.step_s
    each = 10**9
    seconds += updating_s(updating * optimizer_s(each, device, job, implementation="foreach" if framework.optimizer
                                                 == "loop" else framework.optimizer)
                          / optimizer_s(each, device, job), plan, job, framework) - updating
    passes, kernels = framework.variables
    if passes:
        seconds += max(len(p.micro_batches) * sum(
            passes * 4 * block.count / stage.tensor / device.memory_Bps / efficiency(device, "elementwise")
            + kernels * LOOPED_S * len(block.params) for b in stage.held for block in (job.model.blocks[b],))
            for p in plan.pipelines for stage in p.stages)
    if plan.sharding.gradients == 1:
        experts = Experts(plan, job)
        seconds -= (1 - framework.adding) * max(
            (len(p.micro_batches) + (len(p.stages) - 1) / len(stage.chunks))
            * sum(accumulate_s(block, stage.tensor, device, job, experts.share(
                block, plan.replicas.index((i, 0)), stage.tensor, -1)) for b in stage.held
                for block in (job.model.blocks[b],))
            for i, p in enumerate(plan.pipelines) for stage in p.stages)
    return seconds


def updating_s(computing: float, plan: Plan, job: Job, framework: Framework) -> float:
    """Seconds of the optimizer, of which the device computes for `computing`: a loop in Python waits for its host."""
    if framework.optimizer != "loop":
        return computing
    tensors = max(sum(len(job.model.blocks[b].params) for b in stage.held)
                  for p in plan.pipelines for stage in p.stages)
    return max(computing, tensors * LOOPED_KERNELS * LOOPED_S)


def hidden_s(record: trace.Trace) -> float:
    """Seconds for which the slowest device moves gradients and weights behind its computing."""
    whole, bare = trace.by_category(record), trace.exposed(record)
    return max(sum(whole[rank].get(c, 0.0) - bare[rank].get(c, 0.0) for c in ("reduce", "gather")) for rank in whole)


def allocated_bytes(use: DeviceUse, plan: Plan, job: Job, framework: Framework) -> int:
    """Bytes of tensors at the peak of a device.

    Of the 34 bytes per element of a layer's activations 10 are outside the products, and eager attention keeps
    5 heads * seq_len / hidden more inside (Korthikanti et al., 2022); under full recomputation only the layer's input
    is kept, which is all outside.
    """
    held = {name: n for name, n in use.breakdown.items() if name not in ("framework", "allocator")}
    stage = plan.pipelines[use.pipeline].stages[use.stage]
    tensor, sizes = stage.tensor, job.bytes
    if framework.pure and sizes.master_bytes:
        held["master"] = 0
        held["moments"] = held.get("moments", 0) // 2
        for name in ("gradients", "gradient buffers"):
            held[name] = held.get(name, 0) * sizes.weight_bytes // sizes.gradient_bytes
        held["optimizer temporaries"] = 0
    allocated = sum(held.values())
    if not framework.sequence_parallel:
        scores = 5 * job.model.heads * job.seq_len / job.model.hidden
        layer = (10 * tensor + 24 + scores) / (34 + scores)
        kept = tensor if "full" in stage.modes.values() else layer
        layers = held.get("activations", 0) - _head_bytes(stage, plan.pipelines[use.pipeline], job)
        allocated += round(max(0, layers) * (kept - 1) + held.get("recomputed", 0) * (layer - 1))
    if not framework.copies_weights and sizes.master_bytes:
        allocated -= held.get("weights", 0)
    if plan.sharding.optimizer > 1:
        elements = min(framework.bucket_elements, held.get("weights", 0) // sizes.weight_bytes)
        allocated += elements * sizes.compute_bytes
    # DeepSpeed's bf16 optimizer keeps both; in fp16 it makes fp32 ones of its own part for the step.
    deepspeed = framework.bucket_elements and (job.precision == "bf16" or plan.sharding.optimizer == 1)
    if sizes.master_bytes and (framework.both_gradients or deepspeed):
        allocated += held.get("weights", 0)
    return allocated


def _head_bytes(stage: Stage, pipe: Pipeline, job: Job) -> float:
    """Bytes that one micro-batch keeps of the head, if the stage holds it: its logits are sharded in any case."""
    if not stage.holds(len(job.model.blocks) - 1):
        return 0.0
    shape = (pipe.micro_batch, job.seq_len // pipe.context, stage.tensor)
    return sum(s.size.at(*shape) * s.element_bytes(job.bytes.compute_bytes) for s in job.model.blocks[-1].saved
               if s.held("gpu", fused=True))


def peak_bytes(use: DeviceUse, plan: Plan, job: Job, framework: Framework) -> int:
    """Peak of a device as the source counts it."""
    allocated = allocated_bytes(use, plan, job, framework)
    if framework.counted == "allocated":
        return allocated
    outside = use.breakdown.get("framework", 0)
    tensors = sum(use.breakdown.values()) - outside
    factor = tensors / max(1, tensors - use.breakdown.get("allocator", 0)) if framework.expandable else UNEXPANDED
    return round(allocated * factor) + (outside if framework.counted == "used" else 0)


def lacks_bytes(use: DeviceUse, plan: Plan, job: Job, framework: Framework) -> int:
    """Bytes by which the tensors of a device and its context are above its memory; negative if they fit.

    What the allocator reserves beyond them, it gives back when memory runs short, and communicators make do with less.
    """
    return allocated_bytes(use, plan, job, framework) + CONTEXT_BYTES["gpu"] - use.capacity_bytes
