"""The parts that layers are made of: projections, norms, attention, MLPs, experts, with what each costs and keeps.

Sizes are per rank. Between blocks, in norms and residual sums the tokens are sharded over the tensor-parallel group
(`SHARD`); inside attention and MLP every rank has all tokens (`ROWS`) and a slice of the heads or of the width
(Korthikanti et al., 2022). FLOPs count products only, two per multiply-add, as PyTorch's flop counter does.
`traffic` is that of separate PyTorch kernels, attention excepted, which is counted fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mixfleet.model.spec import WHOLE, B, Op, Param, S, Saved, Size, T, TensorComm
from mixfleet.model.transformer import Experts, Latent, TransformerConfig

ROWS = B * S
SHARD = B * S / T


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a block. Parts add up in the order in which they run."""

    params: tuple[Param, ...] = ()
    ops: tuple[Op, ...] = ()
    saved: tuple[Saved, ...] = ()
    comms: tuple[TensorComm, ...] = ()
    context: tuple[TensorComm, ...] = ()

    def __add__(self, other: Part) -> Part:
        return Part(self.params + other.params, self.ops + other.ops, self.saved + other.saved,
                    self.comms + other.comms, self.context + other.context)


def keep(name: str, size: Size, until: Literal["none", "selective", "full"] = "selective",
         bytes_per_element: int | Literal["wide", "copy", "long"] | None = None, *, for_weights: bool = False,
         device: Literal["", "gpu", "cpu"] = "") -> Part:
    """A tensor that backward needs, or only the gradient of a weight."""
    return Part(saved=(Saved(name=name, size=size, until=until, bytes_per_element=bytes_per_element,
                             for_weights=for_weights, device=device),))


def at_experts(part: Part) -> Part:
    """The part as one that works on the rows that come to the experts of a rank."""
    return Part(part.params, tuple(op.replace(routed=True) for op in part.ops),
                tuple(saved.replace(routed=True) for saved in part.saved), part.comms, part.context)


def norm_input(name: str, size: Size, kind: str) -> Part:
    """The input of a norm, where nothing else keeps it. On a CPU RMSNorm works on an fp32 copy of 16-bit inputs."""
    if kind == "layernorm":
        return keep(name, size)
    return keep(name, size, device="gpu") + keep(name, size, bytes_per_element="long", device="cpu")


def elementwise(name: str, rows: Size, cols: Size | float, passes: tuple[float, float]) -> Part:
    """A row-wise operator that reads and writes `passes` times its output's size, forward and backward."""
    size = rows * cols
    return Part(ops=(Op(name=name, kind="elementwise", shape={"rows": rows, "cols": Size.of(cols)}, flops=Size(),
                        backward_flops=Size(), traffic=passes[0] * size, backward_traffic=passes[1] * size),))


def residual(name: str, hidden: int) -> Part:
    """`x + y` on the shard; backward sums the gradients of the two branches."""
    return elementwise(name, SHARD, hidden, (3, 3))


def linear(name: str, rows: Size, fan_in: int, fan_out: int, *, cut: Literal["", "in", "out"] = "",
           bias: bool = False, op: str = "") -> Part:
    """A projection with weight (fan_out, fan_in); tensor parallelism cuts its inputs, its outputs, or nothing."""
    n = Size.of(fan_out) / T if cut == "out" else Size.of(fan_out)
    k = Size.of(fan_in) / T if cut == "in" else Size.of(fan_in)
    split = {"": None, "out": 0, "in": 1}[cut]
    params = [Param(name=f"{name}.weight", shape=(fan_out, fan_in), split=split)]
    if bias:
        params.append(Param(name=f"{name}.bias", shape=(fan_out,), split=0 if cut == "out" else None, role="bias"))
    return Part(params=tuple(params), ops=(gemm(op or name, Size.of(1), rows, n, k),))


def gemm(name: str, batch: Size, m: Size, n: Size, k: Size) -> Op:
    """`batch` products [m, k] x [k, n]; backward is one product for the input and one for the weight."""
    flops = 2 * batch * m * n * k
    traffic = batch * (m * k + k * n + m * n)
    return Op(name=name, kind="gemm", shape={"batch": batch, "m": m, "n": n, "k": k}, flops=flops,
              backward_flops=2 * flops, traffic=traffic, backward_traffic=2 * traffic)


def norm(name: str, rows: Size, width: int, kind: str) -> Part:
    """RMSNorm or LayerNorm as one kernel: it keeps its input, which the caller counts, and fp32 statistics."""
    params = [Param(name=f"{name}.weight", shape=(width,), role="norm")]
    if kind == "layernorm":
        params.append(Param(name=f"{name}.bias", shape=(width,), role="norm"))
    size = rows * width
    op = Op(name=name, kind="norm", shape={"rows": rows, "cols": Size.of(width)}, flops=Size(), backward_flops=Size(),
            traffic=2 * size, backward_traffic=3 * size)
    part, statistics = Part(params=tuple(params), ops=(op,)), f"{name}.statistics"
    if kind == "layernorm":
        return part + keep(statistics, 2 * rows, bytes_per_element="wide", device="gpu") + keep(
            statistics, 2 * rows, device="cpu")
    return part + keep(statistics, rows, bytes_per_element="wide") + keep(
        f"{name}.copy", size, bytes_per_element="copy", device="cpu") + keep(
        f"{name}.normalized", size, bytes_per_element="wide", for_weights=True, device="cpu")


def gather(width: int) -> Part:
    """All tokens from the shards; backward sums the gradients and scatters them."""
    size = ROWS * width
    return Part(comms=(TensorComm(op="all_gather", phase="forward", size=size),
                       TensorComm(op="reduce_scatter", phase="backward", size=size)))


def scatter(width: int) -> Part:
    """Shards of the sum of partial results; backward gathers the gradient."""
    size = ROWS * width
    return Part(comms=(TensorComm(op="reduce_scatter", phase="forward", size=size),
                       TensorComm(op="all_gather", phase="backward", size=size)))


def gathered(name: str, width: int, *, is_shard_kept: bool = False) -> Part:
    """All tokens from the shards, kept as a projection's input.

    With `is_shard_kept` the shard itself is the block's input: without tensor parallelism both are one tensor.
    """
    size = ROWS * width
    if is_shard_kept:
        size = size + -1 * SHARD * width
    return gather(width) + keep(name, size, for_weights=True)


def attention(c: TransformerConfig, window: int, input_part: Part) -> Part:
    """From the layer's (normed) input to the output projection's shard. `input_part` keeps the input of q, k and v."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    part = input_part
    for name, width in (("q", q), ("k", kv), ("v", kv)):
        part += linear(f"attention.{name}", ROWS, c.hidden, width, cut="out", bias=c.attention_bias)
    if c.qk_norm:
        for name, heads in (("q", c.heads), ("k", c.kv_heads)):
            rows = ROWS * heads / T
            part += norm_input(f"attention.{name}_raw", rows * c.head_dim, "rmsnorm")
            part += norm(f"attention.{name}_norm", rows, c.head_dim, "rmsnorm")
    if c.position == "rotary":
        part += elementwise("attention.rotate", ROWS, Size.of(c.rotary_fraction * (q + kv)) / T, (2, 2))
    for name, width in (("q", q), ("k", kv), ("v", kv)):
        part += keep(f"attention.{name}", ROWS * width / T)
    part += core(c.heads, c.kv_heads, c.head_dim, c.head_dim, window, causal=c.causal)
    return part + linear("attention.o", ROWS, q, c.hidden, cut="in", bias=c.output_bias) + scatter(c.hidden)


def core(heads: int, kv_heads: int, qk_dim: int, v_dim: int, window: int, *, causal: bool) -> Part:
    """softmax(q k / sqrt(d)) v of [B, heads / T, S]; its output is kept as the next projection's input.

    Backward counts the four products of the formula; a fused kernel computes the scores once more. Under context
    parallelism the queries are those of a part, and the keys and values of the whole sequence are gathered; they are
    kept, unless the core is computed again, which gathers again.
    """
    local, local_kv = Size.of(heads) / T, Size.of(kv_heads) / T
    scores = B * local * S * WHOLE
    flops = 2 * scores * (qk_dim + v_dim)
    keys = B * local_kv * (qk_dim + v_dim)
    read_write = B * S * local * (qk_dim + v_dim) + keys * WHOLE
    op = Op(name="attention.core", kind="attention", flops=flops, backward_flops=2 * flops, traffic=read_write,
            backward_traffic=2 * read_write + B * S * local * v_dim, causal=causal, window=window,
            shape={"batch": B, "heads": local, "kv_heads": local_kv, "q": S, "kv": WHOLE, "qk_dim": Size.of(qk_dim),
                   "v_dim": Size.of(v_dim)})
    eager = [Saved(name="attention.probabilities", size=scores, until="none", unfused_only=True),
             Saved(name="attention.mask", size=S * WHOLE, until="none", bytes_per_element=1, unfused_only=True)]
    if heads != kv_heads:  # the products need every query head's own copy
        eager.append(Saved(name="attention.repeated_kv", size=B * WHOLE * (heads - kv_heads) * (qk_dim + v_dim) / T,
                           until="none", unfused_only=True))
    exchange = (TensorComm(op="all_gather", phase="forward", size=keys * WHOLE),
                TensorComm(op="reduce_scatter", phase="backward", size=keys * WHOLE))
    return Part(ops=(op,), context=exchange, saved=(
        Saved(name="attention.kv_of_others", size=keys * WHOLE + -1 * keys * S, until="none"),
        *eager,
        Saved(name="attention.logsumexp", size=B * local * S, until="none", bytes_per_element="wide", fused_only=True),
        Saved(name="attention.out", size=B * local * S * v_dim)))


def latent_attention(c: TransformerConfig, latent: Latent) -> Part:
    """Multi-head latent attention; the down-projections are replicated and run on the shard where both are low-rank.

    Their latents are gathered instead of the hidden state, which is wider.
    """
    qk, up = latent.nope_dim + latent.rope_dim, latent.nope_dim + latent.v_dim
    part = Part()
    if latent.q_rank:
        rows = SHARD
        part += keep("attention.input", SHARD * c.hidden)
        part += linear("attention.q_down", rows, c.hidden, latent.q_rank, bias=c.attention_bias)
        part += norm_input("attention.q_latent_raw", rows * latent.q_rank, "rmsnorm")
        part += norm("attention.q_latent_norm", rows, latent.q_rank, "rmsnorm") + gathered(
            "attention.q_latent", latent.q_rank)
        part += linear("attention.q", ROWS, latent.q_rank, c.heads * qk, cut="out")
    else:
        rows = ROWS
        part += gathered("attention.input", c.hidden)
        part += linear("attention.q", ROWS, c.hidden, c.heads * qk, cut="out")
    part += linear("attention.kv_down", rows, c.hidden, latent.kv_rank + latent.rope_dim, bias=c.attention_bias)
    part += norm_input("attention.kv_latent_raw", rows * (latent.kv_rank + latent.rope_dim), "rmsnorm")
    part += norm("attention.kv_latent_norm", rows, latent.kv_rank, "rmsnorm")
    part += keep("attention.kv_latent", ROWS * latent.kv_rank)
    if latent.q_rank:
        part += gather(latent.kv_rank + latent.rope_dim)
    part += linear("attention.kv_up", ROWS, latent.kv_rank, c.heads * up, cut="out")
    part += elementwise("attention.rotate", ROWS, Size.of(latent.rope_dim * (c.heads + 1)) / T, (2, 2))
    part += elementwise("attention.assemble", ROWS, Size.of(2 * c.heads * qk) / T, (2, 2))
    part += keep("attention.q", ROWS * c.heads * qk / T) + keep("attention.k", ROWS * c.heads * qk / T)
    # v is a view of the up-projection's output, so all of that stays alive.
    part += keep("attention.kv", ROWS * c.heads * up / T)
    part += core(c.heads, c.heads, qk, latent.v_dim, 0, causal=c.causal)
    return part + linear("attention.o", ROWS, c.heads * latent.v_dim, c.hidden, cut="in", bias=c.output_bias) + scatter(
        c.hidden)


def activation(name: str, kind: str, gated: bool, rows: Size, width: Size) -> Part:
    """The nonlinearity between the projections of an MLP, and what it and the last projection keep."""
    if gated:
        kept = Part()
        for what in ("gate", "up", "activated"):
            kept += keep(f"{name}.{what}_out", rows * width)
        kept += keep(f"{name}.inner_out", rows * width, for_weights=True)
        return elementwise(f"{name}.activation", rows, width, (5, 8)) + kept
    inner = keep(f"{name}.inner_out", rows * width, for_weights=kind != "relu")
    if kind == "relu":  # its gradient needs only its output
        return elementwise(f"{name}.activation", rows, width, (2, 3)) + inner
    return elementwise(f"{name}.activation", rows, width, (2, 3)) + keep(f"{name}.up_out", rows * width) + inner


def mlp(c: TransformerConfig, ffn: int, input_part: Part, name: str = "mlp") -> Part:
    """Gate and up projections, activation, down projection; ends before the scatter."""
    part = input_part
    for which in ("gate", "up") if c.gated else ("up",):
        part += linear(f"{name}.{which}", ROWS, c.hidden, ffn, cut="out", bias=c.mlp_bias)
    part += activation(name, c.activation, c.gated, ROWS, Size.of(ffn) / T)
    return part + linear(f"{name}.down", ROWS, ffn, c.hidden, cut="in", bias=c.mlp_bias)


def spread(size: Size, times: int) -> Part:
    """Exchanges between those who have rows and those who have their experts, as many forward as backward."""
    comms = [TensorComm(op="all_to_all", phase=phase, size=size) for phase in ("forward", "backward")]
    return Part(comms=tuple(comm for comm in comms for _ in range(times)))


def moe(c: TransformerConfig, experts: Experts, input_part: Part) -> Part:
    """Router, routed experts, and the shared MLP; to the shard of their sum.

    Every rank routes the tokens of its shard. It has some of the experts whole, and rows go to the ranks that have
    theirs and come back. Routing is even, up to `Experts.skew` of the rank that counts. What is `routed` is written as
    it is where a tensor group has all experts (`ExpertShare`).
    """
    routed = SHARD * experts.per_token
    busy = routed * (Size.of(experts.skew) + Size.of(1 - experts.skew) / T)
    here, count, width = Size.of(experts.count) / T, Size.of(experts.count), Size.of(experts.ffn)
    each, probabilities = busy / here, SHARD * count
    part = input_part + keep("mlp.router_in", SHARD * c.hidden) + linear("mlp.router", SHARD, c.hidden, experts.count)
    part += Part(ops=(Op(name="mlp.route", kind="softmax", shape={"rows": SHARD, "cols": count}, flops=Size(),
                         backward_flops=Size(), traffic=2 * probabilities, backward_traffic=3 * probabilities),))
    part += keep("mlp.router_probabilities", probabilities, bytes_per_element=4)
    part += keep("mlp.expert_index", routed, bytes_per_element=8)
    part += elementwise("mlp.dispatch", routed, c.hidden, (2, 2)) + spread(routed * c.hidden, 1)
    part += Part(comms=(TensorComm(op="all_to_all", phase="forward", size=count, bytes_per_element=8),))
    computed = keep("mlp.expert_in", busy * c.hidden)
    for which in ("gate", "up"):
        computed += Part((Param(name=f"mlp.experts.{which}.weight", shape=(experts.count, experts.ffn, c.hidden),
                                split=0, role="expert"),),
                         (gemm(f"mlp.experts.{which}", here, each, width, Size.of(c.hidden)),))
    computed += activation("mlp.experts", c.activation, True, busy, width)
    computed += Part((Param(name="mlp.experts.down.weight", shape=(experts.count, c.hidden, experts.ffn), split=0,
                            role="expert"),), (gemm("mlp.experts.down", here, each, Size.of(c.hidden), width),))
    part += at_experts(computed)
    part += spread(routed * c.hidden, 1)
    part += keep("mlp.expert_out", routed * c.hidden) + elementwise("mlp.combine", routed, c.hidden, (2, 3))
    if experts.shared_ffn:
        shared = gathered("mlp.input", c.hidden, is_shard_kept=True)
        part += mlp(c, experts.shared_ffn, shared, "mlp.shared") + scatter(c.hidden)
        part += elementwise("mlp.add_shared", SHARD, c.hidden, (3, 1))
    return part
