"""How the code of published runs differs from the runtime that plans are predicted for, and what that changes.

Three kinds of difference: operators (a model is rewritten to what really runs), seconds that the simulated step has or
lacks, and bytes. Each is a property of a code base that its documentation or source states, never of a single row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from mixfleet import trace
from mixfleet.cluster import Device
from mixfleet.cost.kernels import OptimizerLoop, accumulate_s, efficiency, fused_attention, generation, optimizer_s
from mixfleet.cost.memory import CONTEXT_BYTES, communicator_bytes
from mixfleet.job import Job
from mixfleet.model.parts import ROWS, SHARD, gemm
from mixfleet.model.spec import Block, Model, Op, Saved, Size, T
from mixfleet.plan import Plan
from mixfleet.sim.experts import Experts
from mixfleet.sim.prediction import DeviceUse, Prediction
from mixfleet.units import MiB


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
    reduces_16_bits: bool = False
    """Whether a job in fp16 exchanges its gradients in that type, not in fp32."""
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
    offloads: bool = False
    """Whether activations that do not fit move to the host, behind computing, where others make layers again."""
    adds_16_bits: bool = False
    """Whether gradients are kept, added up and exchanged in the type of the weights."""
    holds_clock: bool = False
    """Whether devices hold their clock where products are narrow, whatever their power."""
    hides_experts: bool = False
    """Whether rows move to experts and back while another micro-batch computes."""
    variables: tuple[float, int] = (0.0, 0)
    """Of every micro-batch, beyond adding up gradients: times that these are read or written in fp32, and kernels per
    parameter tensor that the host issues for it."""
    hook_s: float = 0.0
    """Seconds of the host per parameter tensor and pass, for hooks that gather and free its module."""
    saves_narrow: bool = True
    """Whether products in a narrow type keep narrow inputs for backward."""
    pure: bool = False
    """Whether weights, gradients and moments are all of 16 bits, without a master copy."""
    copies_trained: bool = False
    """Whether LoRA keeps the original beside each whole tensor that it trains, as PEFT's `modules_to_save` does."""
    whole_gradients: bool = False
    """Whether a sharded unit with frozen and trained weights makes gradients of all of them, and keeps them whole while
    it adds up micro-batches without exchanging (FSDP's documentation warns of the former)."""
    groups: bool = False
    """Whether the ranks of a copy of the model have a communicator, for norms and overflows, besides, and all ranks
    another, the default group, on which Megatron waits for all as it starts."""
    saves_products: Literal["", "all", "needed"] = ""
    """Selective recomputation by operator keeps attention's output and every second product: all of these, or with a
    compiler those that backward needs."""
    balances: bool = False
    """Whether pipeline stages are cut by the FLOPs of products, head included, not by the number of layers."""
    lazy: bool = True
    """Whether CUDA loads a kernel when it is first used (11.7 and later); before, all of PyTorch's at once."""


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
FP32_LOGITS, FP32_LOGITS_SHARDED = 12.0, 16.0
"""PyTorch's cross entropy of logits in fp32: its backward holds their log-softmax, the gradient of that and theirs (4
each); over vocabulary shards (DTensor's loss parallel) also the exponential."""
COMPILED_LOSS = 2.0
"""A compiler fuses all passes of it: what remains is the gradient in the type of the logits."""
CHUNKED_LOSS = FP32_LOGITS / 8
"""In chunks of an eighth of the tokens (torchtune)."""
LOSS_COMPILED_SINCE = 2025
"""Year from which on torchtitan compiles its loss when it compiles its layers."""
HIDES_EXPERTS_SINCE = 26, 6
"""Release of Megatron Bridge from which on its mxfp8 recipes hide exchanges with experts."""
KERNELS_BYTES = 550 * MiB
"""More that a context takes without lazy loading: about 1.3 GB in all (Hugging Face's guide to training on one GPU)."""
IN_PRODUCTS, IN_16_BITS = 0.0, 0.6
"""Gradients added up by the epilogue of the product that makes them, or in 16 bits: 6 bytes for each instead of 10."""

MEGATRON_DEEPSPEED = Framework(overlaps=False, sequence_parallel=False, expandable=False, bucket_elements=5 * 10**8,
                               dropped=True, joined=True, score_passes=FUSED_SOFTMAX, adding=IN_16_BITS, lazy=False,
                               groups=True, reduces_16_bits=True)
MEGATRON_CORE = Framework(expandable=False, joined=True, groups=True, adding=IN_PRODUCTS, gates_fused=True)
NEMO = MEGATRON_CORE._replace(hides_tensor=True)
TENSORFLOW = (10.0, 8)
"""NVIDIA's BERT for TensorFlow looks at every variable's gradient in each micro-batch: unscale (2), all finite (1),
norm (1), clip (2), add to a variable (3), each a kernel or two."""
HOOK_S = 0.45e-3
"""ZeRO-3 of DeepSpeed has hooks in Python around every module, forward and backward, which look for what to gather
next. No source states what one takes: so much in fine-tuning of Qwen-1.8B on one GPU, whose micro-batches take 0.26 s
of 256 to 2,048 tokens alike."""
MEGATRON_BRIDGE = NEMO._replace(loss_bytes=ONLINE_LOSS, offloads=True, adds_16_bits=True, holds_clock=True)
"""Of its performance recipes (tags 0.2 to 0.6): `cpu_offloading_num_layers`, `grad_reduce_in_fp32=False`. That clocks
hold is in no recipe but read off its runs in narrow types, on four kinds of GPU (docs/accuracy.md)."""
XLA = Framework(gates_fused=True, loss_bytes=ONLINE_LOSS)
EAGER_LLAMA = Framework(norm_passes=EAGER_RMSNORM, rotated=EAGER_ROTATION)
HUGGING_FACE = Framework(dropped=True, score_passes=EAGER_SOFTMAX, copied=2.0, dropout=2.25)
FRAMEWORKS: dict[str, Framework] = {
    "bigscience": MEGATRON_DEEPSPEED, "bsv100": MEGATRON_DEEPSPEED, "vtrain": MEGATRON_DEEPSPEED,
    "sailor": MEGATRON_DEEPSPEED._replace(dropped=False, score_passes=SCALED_SOFTMAX, adding=1.0, lazy=True),
    "megatron": Framework(expandable=False, dropped=True, joined=True, score_passes=FUSED_SOFTMAX, adding=IN_16_BITS),
    "simumax": MEGATRON_CORE._replace(overlaps=False, counted="allocated"),
    "dgxc": NEMO, "nemo": NEMO, "mbridge": MEGATRON_BRIDGE,
    "llmfoundry": Framework(copies_weights=False, joined=True, flash=1),
    "torchtitan": EAGER_LLAMA._replace(copies_weights=False, counted="reserved", flash=2, saves_narrow=False,
                                       logit_bytes=FP32_LOGITS),
    "nanotron": Framework(expandable=False, both_gradients=True, joined=True, flash=2, counted="reserved",
                          balances=True),
    "neusight": HUGGING_FACE, "lambda": HUGGING_FACE, "dle": HUGGING_FACE,
    "finetune": EAGER_LLAMA._replace(optimizer="foreach"),
}
"""As the sources state: the Megatron-DeepSpeed of 2021 and 2022 had neither overlap nor sequence parallelism, has
kernels of its own for softmax in 16 bits only, DeepSpeed's default bucket, and its default type of exchanges, which is
that of the gradients; simumax switched overlap off. In the memory of sailor's runs there is room for one copy of the
scores, so dropout seems to be off."""
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


def bridged(framework: Framework, settings: str) -> Framework:
    """That of Megatron Bridge by the release that a row states: most of its recipes of models with experts in mxfp8
    hide their exchanges from 26.06 on (`moe_a2a_overlap` of its tags 0.3 to 0.5)."""
    release = re.search(r"release (\d+)\.(\d+)", settings)
    is_late = release is not None and (int(release[1]), int(release[2])) >= HIDES_EXPERTS_SINCE
    return framework._replace(hides_experts=is_late and "MXFP8" in settings)


def tuned(framework: Framework, owner: str, model: str, settings: str, *, alone: bool) -> Framework:
    """That of a script for fine-tuning, by the owner of its code; `alone` on one GPU.

    Both litgpt and torchtune print what torch has allocated. litgpt takes logits and loss in pieces of 128 tokens;
    torchtune takes its loss in chunks, unless the row says that this is not yet on, and fuses its optimizer.
    """
    is_lora = "LoRA" in f"{settings} {model}"
    found = framework._replace(pure=not model.startswith("Qwen") or (is_lora and alone))
    if owner in ("QwenLM", "AnswerDotAI"):
        found = found._replace(joined=model.startswith("Qwen"), logit_bytes=SHIFTED_LOGITS,
                               copies_trained=is_lora and "embeddings trained" in settings)
    elif owner == "Lightning-AI":
        found = found._replace(counted="allocated", logit_bytes=CHUNKED_LOSS, whole_gradients=is_lora)
    elif owner == "pytorch":
        whole = COMPILED_LOSS if "compile" in settings else FP32_LOGITS
        chunked = "baseline" not in settings or "chunked" in settings
        found = found._replace(counted="allocated", optimizer="fused", logit_bytes=CHUNKED_LOSS if chunked else whole)
    return found


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
            if not framework.sequence_parallel:
                saved = tuple(s.replace(size=s.size * T) if s.name in _SHARDED else s for s in saved)
            if framework.norm_passes and job.bytes.compute_bytes == 2 and "norm1.bias" not in names:
                saved = tuple(part for s in saved for part in _cast(s))
            if framework.saves_products:
                saved = tuple(_with_products(saved, framework))
            if job.products and not framework.saves_narrow:
                saved = tuple(s.replace(bytes_per_element=job.bytes.compute_bytes) if s.bytes_per_element is None else s
                              for s in saved)
            workspace = block.workspace
            if block.kind.startswith("head"):
                workspace = framework.logit_bytes / Framework().logit_bytes * workspace
            unfused = block.unfused_temporaries
            if framework.dropped:  # what dropout made is free once the product behind it has its gradient
                unfused += sum((-1 * s.size for s in block.saved if s.name == "attention.probabilities"), Size())
            blocks[block.kind] = block.replace(ops=tuple(ops), saved=saved, workspace=workspace,
                                               unfused_temporaries=unfused)
    return model.replace(blocks=tuple(blocks[b.kind].replace(name=b.name) for b in model.blocks))


_SHARDED = ("input", "norm1.statistics", "norm2.input", "norm2.statistics", "norm.statistics")
"""What is kept between the products: without sequence parallelism every rank has all of it."""
_PRODUCTS = ("attention.q", "attention.v", "mlp.gate_out", "attention.out", "attention.logsumexp")
"""What torchtitan's selective recomputation keeps that backward needs: every second product of q, k, v, output, gate,
up and down, and attention."""


def _cast(saved: Saved) -> list[Saved]:
    """RMSNorm as elementwise kernels keeps its input in fp32; that of the first is the layer's, in 16 bits."""
    if saved.name == "input":
        return [saved, saved.replace(name="norm1.cast", until="selective", bytes_per_element=2)]
    return [saved.replace(bytes_per_element=4)] if saved.name == "norm2.input" and saved.device != "cpu" else [saved]


def _with_products(saved: Iterable[Saved], framework: Framework) -> Iterator[Saved]:
    """What is kept in mode `selective` as selective recomputation by operator would."""
    for one in saved:
        if one.until != "full":
            one = one.replace(until="selective" if one.name in _PRODUCTS else "none")
        yield one
        if one.name == "norm2.input" and one.device != "cpu" and framework.saves_products == "all":
            yield one.replace(name="mlp.out", until="selective", bytes_per_element=None)


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

    Exchanges of a tensor group of t that move in pieces leave one of t pieces bare; those with experts, which hide
    behind other micro-batches' computing for as long as that takes, those of one micro-batch.
    """
    seconds = found.step_s
    if not framework.overlaps and found.trace:
        seconds += hidden_s(found.trace)
        if framework.reduces_16_bits and job.precision == "fp16":
            seconds -= (1 - job.bytes.compute_bytes / job.bytes.gradient_bytes) * min(
                by.get("reduce", 0.0) for by in trace.by_category(found.trace).values())
    if framework.hides_tensor:
        tensor = max(stage.tensor for p in plan.pipelines for stage in p.stages)
        seconds -= (1 - 1 / tensor) * sum(s.fraction for s in found.critical if s.category == "tensor") * found.step_s
    if framework.hides_experts:
        micros = max(len(p.micro_batches) for p in plan.pipelines)
        bare = sum(s.fraction for s in found.critical if s.category == "expert") * found.step_s
        seconds -= (1 - 1 / micros) * min(bare, found.step_s - bare)
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
    if framework.hook_s:  # the device waits for a host that is slower than it
        seconds = max(seconds, max(len(p.micro_batches) * sum(
            framework.hook_s * (3 if mode == "full" else 2) * len(job.model.blocks[b].params)
            for b, mode in stage.modes.items()) for p in plan.pipelines for stage in p.stages))
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
    """Bytes of tensors at the peak of a device, of which the simulation follows those of the runtime."""
    held = {name: n for name, n in use.breakdown.items() if name not in ("framework", "allocator")}
    stage, sizes = plan.pipelines[use.pipeline].stages[use.stage], job.bytes
    weights, sharded = held.get("weights", 0), plan.sharding.optimizer > 1
    if framework.pure and sizes.master_bytes:
        held["master"] = 0
        held["moments"] = held.get("moments", 0) // 2
        for name in ("gradients", "gradient buffers"):
            held[name] = held.get(name, 0) * sizes.weight_bytes // sizes.gradient_bytes
        held["optimizer temporaries"] = 0
    state = sum(held.get(name, 0) for name in ("weights", "gradients", "master", "moments"))
    allocated = sum(held.values())
    if framework.optimizer == "foreach":  # the root of the second moments
        allocated = max(allocated, state + held.get("moments", 0) // max(1, job.optimizer.moments))
    if framework.copies_trained:
        frozen = set(job.frozen)
        allocated += sum(p.count for b in stage.held for p in job.model.blocks[b].params if ".lora_" not in p.name
                         and not p.tied and f"{job.model.blocks[b].name}/{p.name}" not in frozen) * sizes.weight_bytes
    if not framework.copies_weights and sizes.master_bytes:
        allocated -= weights
    if framework.whole_gradients and plan.sharding.gradients > 1 and job.frozen:
        allocated += sum(p.count for b in stage.held for p in job.model.blocks[b].params
                         if not p.tied) // stage.tensor * sizes.weight_bytes
    if not framework.bucket_elements and framework.both_gradients and sizes.master_bytes:
        allocated += weights
    if not framework.bucket_elements or not sizes.master_bytes:
        return allocated + _bucket(plan, job, framework, weights)
    # DeepSpeed: gradients of 16 bits are added up as such or sharded; only its bf16 optimizer has fp32 ones as well.
    gradients, buffers = held.get("gradients", 0), held.get("gradient buffers", 0)
    narrow = gradients * sizes.compute_bytes // sizes.gradient_bytes
    if plan.sharding.gradients > 1:
        allocated += narrow - gradients + min(0, framework.bucket_elements * sizes.compute_bytes - buffers)
    elif job.precision == "fp16" and sharded:  # and it makes those of its own part, of 16 bits and fp32, for the step
        own = held.get("master", 0) // sizes.master_bytes
        allocated += narrow - gradients + own * (sizes.compute_bytes + sizes.master_bytes)
    else:
        allocated += weights
    return allocated + _bucket(plan, job, framework, weights)


def _bucket(plan: Plan, job: Job, framework: Framework, weights: int) -> int:
    """Bytes of the buffer through which gradients are reduced: of 16 bits where these are."""
    if len(plan.replicas) == 1:
        return 0
    narrow = plan.sharding.gradients > 1 or (job.precision == "fp16" and plan.sharding.optimizer > 1)
    each = job.bytes.compute_bytes if narrow else job.bytes.gradient_bytes
    return min(framework.bucket_elements, weights // job.bytes.weight_bytes) * each


def peak_bytes(use: DeviceUse, plan: Plan, job: Job, device: Device, framework: Framework) -> int:
    """Peak of a device as the source counts it."""
    allocated = allocated_bytes(use, plan, job, framework)
    if framework.counted == "allocated":
        return allocated
    inside = use.breakdown.get("framework", 0)
    tensors = sum(use.breakdown.values()) - inside
    factor = tensors / max(1, tensors - use.breakdown.get("allocator", 0)) if framework.expandable else UNEXPANDED
    reserved = round((allocated + (0 if framework.expandable else _table_bytes(use, plan, job))) * factor)
    return reserved + (_outside_bytes(use, plan, device, framework) if framework.counted == "used" else 0)


def _table_bytes(use: DeviceUse, plan: Plan, job: Job) -> int:
    """Bytes of the gradient of an embedding, which each micro-batch makes anew before it is added up: larger than any
    tensor that is free by then, so the allocator takes more memory for it unless its segments can grow."""
    pipe = plan.pipelines[use.pipeline]
    if use.stage or len(pipe.micro_batches) == 1 or f"{job.model.blocks[0].name}/tokens.weight" in job.frozen:
        return 0
    return (max(p.count for p in job.model.blocks[0].params) // pipe.stages[0].tensor) * job.bytes.compute_bytes


def _outside_bytes(use: DeviceUse, plan: Plan, device: Device, framework: Framework) -> int:
    """Bytes of the context and the communicators, as the driver counts them."""
    stages = plan.pipelines[use.pipeline].stages
    ranks = stages[use.stage].tensor * len(stages)
    more = framework.groups * ((ranks > 1) + (ranks * len(plan.replicas) > 1))
    return (use.breakdown.get("framework", CONTEXT_BYTES["gpu"]) + more * communicator_bytes(device)
            + (0 if framework.lazy else KERNELS_BYTES))


def lacks_bytes(use: DeviceUse, plan: Plan, job: Job, framework: Framework) -> int:
    """Bytes by which the tensors of a device and its context are above its memory; negative if they fit.

    What the allocator reserves beyond them, it gives back when memory runs short, and communicators make do with less.
    """
    return allocated_bytes(use, plan, job, framework) + CONTEXT_BYTES["gpu"] - use.capacity_bytes
