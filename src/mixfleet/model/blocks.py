"""Blocks from a `TransformerConfig`: the embedding, the layers, the head with its loss."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import msgspec

from mixfleet.model.parts import (
    ROWS,
    SHARD,
    Part,
    attention,
    elementwise,
    gathered,
    keep,
    latent_attention,
    linear,
    mlp,
    moe,
    norm,
    norm_input,
    residual,
    scatter,
)
from mixfleet.model.spec import WHOLE, B, Block, Op, Param, S, Size, T, TensorComm
from mixfleet.model.transformer import TransformerConfig


def blocks(c: TransformerConfig) -> Iterator[Block]:
    """`embed`, `layers.0` ... and `head`. Layers of one kind share their operators and parameters."""
    yield _block("embed", "embedding", c, _embedding(c), boundary=SHARD * c.hidden)
    layers: dict[tuple[bool, int], Block] = {}
    for i in range(c.layers):
        routed = c.experts is not None and i not in c.experts.dense_layers
        window = 0 if i in c.full_attention_layers else c.window
        if (routed, window) not in layers:
            layers[routed, window] = _layer(c, routed, window)
        yield layers[routed, window].replace(name=f"layers.{i}")
    yield _head(c)


def _block(name: str, role: str, c: TransformerConfig, part: Part, *, boundary: Size, workspace: Size | None = None,
           temporaries: Size | None = None, unfused_temporaries: Size | None = None,
           routed_temporaries: Size | None = None) -> Block:
    """A block of the part; its kind is a name for its content, so equal blocks of different models are of one kind."""
    content = msgspec.json.encode((part.params, part.ops, part.saved, part.comms))
    return Block(name=name, kind=f"{role}@{sha256(content).hexdigest()[:8]}", params=part.params, ops=part.ops,
                 saved=part.saved, boundary=boundary, workspace=workspace or Size(), temporaries=temporaries or Size(),
                 unfused_temporaries=unfused_temporaries or Size(),
                 routed_temporaries=routed_temporaries or Size(), tensor_comm=part.comms, context_comm=part.context)


def _embedding(c: TransformerConfig) -> Part:
    """Each rank looks up its slice of the vocabulary; the sum over ranks is scattered along the sequence."""
    width = c.embedding_dim or c.hidden
    out = ROWS * width
    tokens = Param(name="tokens.weight", shape=(c.vocab, width), split=0, role="embedding")
    lookup = Op(name="tokens", kind="embedding", shape={"rows": ROWS, "cols": Size.of(width)}, flops=Size(),
                backward_flops=Size(), traffic=2 * out, backward_traffic=2 * out + Size.of(tokens.count) / T)
    part = Part(params=(tokens,), ops=(lookup,)) + keep("tokens", ROWS, "full", 8)
    part += scatter(width)
    if c.embedding_dim:
        part += keep("project.input", SHARD * width) + linear("project", SHARD, width, c.hidden)
    positions = c.max_seq_len + c.position_offset if c.position == "learned" else 0
    for name, rows in (("positions", positions), ("segments", c.segments)):
        if rows:
            table = Param(name=f"{name}.weight", shape=(rows, c.hidden), role="embedding")
            part += Part(params=(table,)) + elementwise(name, SHARD, c.hidden, (3, 1))
    if c.embedding_norm:
        part += norm_input("norm.input", SHARD * c.hidden, c.norm) + norm("norm", SHARD, c.hidden, c.norm)
    return part


def _layer(c: TransformerConfig, routed: bool, window: int) -> Block:
    """A layer. Its temporaries are what backward holds beyond all that forward saved: at first the gradients inside the
    MLP; then those of the scores, when what the MLP had saved is free again.
    """
    def normed(name: str) -> Part:
        return norm(name, SHARD, c.hidden, c.norm)

    def after(name: str) -> Part:
        """The norm on a sublayer's output, where there is one."""
        if c.norm_position != "both":
            return Part()
        return keep(f"{name}.input", SHARD * c.hidden) + normed(name)

    def attend(input_part: Part) -> Part:
        if c.latent:
            return input_part + latent_attention(c, c.latent)
        return attention(c, window, input_part + gathered("attention.input", c.hidden,
                                                          is_shard_kept=c.norm_position == "post"))

    def feed(input_part: Part, *, ends: bool = True) -> Part:
        if routed and c.experts:
            return moe(c, c.experts, input_part)
        return mlp(c, c.ffn, input_part + gathered("mlp.input", c.hidden)) + (scatter(c.hidden) if ends else Part())

    part = keep("input", SHARD * c.hidden, "full")
    if c.norm_position == "post":
        part += attend(Part()) + residual("add1", c.hidden) + norm_input("norm1.input", SHARD * c.hidden, c.norm)
        part += feed(normed("norm1")) + residual("add2", c.hidden)
        part += norm_input("norm2.input", SHARD * c.hidden, c.norm) + normed("norm2")
    elif c.parallel:
        part += attend(normed("norm1")) + feed(normed("norm2"), ends=False)  # the sum of both is scattered once
        part += residual("add1", c.hidden) + residual("add2", c.hidden)
    else:
        part += attend(normed("norm1")) + after("attention.norm") + residual("add1", c.hidden)
        part += norm_input("norm2.input", SHARD * c.hidden, c.norm)
        part += feed(normed("norm2")) + after("mlp.norm") + residual("add2", c.hidden)

    gates = 2 if c.gated else 1
    gradients, at_experts = ROWS * c.ffn * gates / T + ROWS * c.hidden, Size()
    if routed and c.experts:
        gradients = ROWS * c.experts.shared_ffn * gates / T
        at_experts = SHARD * c.experts.per_token * (c.experts.ffn * gates + c.hidden)
    scores = next(B * op.shape["heads"] * S * WHOLE for op in part.ops if op.kind == "attention")
    freed = sum((s.size for s in part.saved if s.name.startswith("mlp.")), Size())
    role = "layer" + (".moe" if routed else "") + (".window" if window else "")
    return _block("", role, c, part, boundary=SHARD * c.hidden, temporaries=gradients, routed_temporaries=at_experts,
                  unfused_temporaries=2 * scores + 2 * ROWS * c.hidden + -1 * freed)


def _head(c: TransformerConfig) -> Block:
    """Final norm, logits and loss; each rank has a slice of the vocabulary and keeps its logits.

    Backward holds their softmax in fp32 and, where that is another type, their gradient: 6 bytes for each logit.
    """
    part = keep("input", SHARD * c.hidden, "full")
    if c.final_norm:
        part += norm("norm", SHARD, c.hidden, c.norm)
    width = c.hidden
    if c.head_transform:
        part += linear("transform", SHARD, c.hidden, c.hidden, bias=True)
        part += elementwise("transform.activation", SHARD, c.hidden, (2, 3))
        part += keep("transform.out", SHARD * c.hidden)
        part += norm_input("norm.input", SHARD * c.hidden, c.norm)
        part += norm("norm", SHARD, c.hidden, c.norm)
    if c.embedding_dim:
        width = c.embedding_dim
        if c.final_norm:
            part += keep("project.input", SHARD * c.hidden)
        part += linear("project", SHARD, c.hidden, width)
    part += gathered("lm.input", width, is_shard_kept=not (c.final_norm or c.head_transform or c.embedding_dim))
    logits = linear("lm", ROWS, width, c.vocab, cut="out", bias=c.head_transform)
    if c.tied:
        logits = Part((logits.params[0].replace(tied="embed/tokens.weight"), *logits.params[1:]), logits.ops)
    local = ROWS * c.vocab / T
    loss = Op(name="loss", kind="loss", shape={"rows": ROWS, "cols": Size.of(c.vocab) / T}, flops=Size(),
              backward_flops=Size(), traffic=4 * local, backward_traffic=5 * local)
    part += logits + Part(ops=(loss,)) + keep("logits", local) + keep("targets", ROWS, "full", 8)
    part += keep("loss.logsumexp", ROWS, bytes_per_element="wide")
    part += keep("loss.local_targets", ROWS, bytes_per_element=8)
    part += keep("loss.masks", 2 * ROWS, bytes_per_element=1)
    part += Part(comms=(TensorComm(op="all_reduce", phase="forward", size=ROWS, bytes_per_element=4),
                        TensorComm(op="all_reduce", phase="forward", size=2 * ROWS, bytes_per_element=4)))
    return _block("head", "head", c, part, boundary=Size(), workspace=1.5 * local)
