"""The figures of a transformer, under one set of names for every family.

`Model.config` is `TransformerConfig.figures()`. The first group of fields describes the decoders that the runtime
builds; every field after them belongs to families that are only planned for.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mixfleet.errors import InputError
from mixfleet.spec import Spec

GATED = ("swiglu", "geglu", "geglu_tanh")
"""Activations with a gate and an up projection; the others have an up projection only."""


class Latent(Spec, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): q, k and v come from low-rank latents.

    A query or key head is `nope_dim + rope_dim` wide, a value head `v_dim`; the rotary part of the key is shared by
    all heads. `q_rank` 0 means that q is projected from the hidden state directly.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


class Experts(Spec, frozen=True, kw_only=True):
    """Routed experts in place of the MLP; each token goes to `per_token` of `count` experts of width `ffn`.

    `shared_ffn` is the width of an MLP that every token passes besides. Layers in `dense_layers` keep a plain MLP. The
    weights of a token's experts are their probabilities, which `normalized` scales to a sum of 1.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: tuple[int, ...] = ()
    normalized: bool = True
    skew: float = 1.0
    """Rows that come to the busiest rank, over the mean, where every expert is on a rank of its own; for predictions.
    """

    def __post_init__(self) -> None:
        if self.skew < 1:
            raise InputError(f"skew of the experts is {self.skew:g}; the busiest rank gets the mean at least, so 1")


class TransformerConfig(Spec, frozen=True, kw_only=True):
    """What a transformer is built from. See `docs/models.md` for the meaning of each key."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq_len: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"] = "swiglu"
    position: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    tied: bool = False
    """The logits use the token embedding's weight."""
    attention_bias: bool = False
    """Biases of q, k and v."""
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before the rotation; weights of length `head_dim`."""
    window: int = 0
    """Sliding-window length; 0 is none."""

    full_attention_layers: tuple[int, ...] = ()
    """Layers in which the window does not hold."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Norm before each sublayer; after the residual sum (BERT); or before and after the sublayer (Gemma 2)."""
    parallel: bool = False
    """Attention and MLP both read the layer's input (GPT-NeoX)."""
    rotary_fraction: float = 1.0
    """Part of a head that is rotated."""
    position_offset: int = 0
    """Rows of the learned positions beyond `max_seq_len`."""
    embedding_dim: int = 0
    """Width of the token embedding if a projection follows it; 0 is `hidden`."""
    segments: int = 0
    """Rows of the segment (token type) embedding."""
    embedding_norm: bool = False
    final_norm: bool = True
    causal: bool = True
    head_transform: bool = False
    """Masked-language-model head: a square projection, GELU and LayerNorm before the logits, which have a bias."""
    latent: Latent | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len"):
            if getattr(self, field) <= 0:
                raise InputError(f"{field} is {getattr(self, field)}; it must be positive")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads is {self.kv_heads}; it must divide heads, which is {self.heads}")
        if self.window < 0:
            raise InputError(f"window is {self.window}; it cannot be negative")
        if not 0 < self.rotary_fraction <= 1:
            raise InputError(f"rotary_fraction is {self.rotary_fraction}; it must be above 0 and at most 1")
        if self.experts and not 0 < self.experts.per_token <= self.experts.count:
            raise InputError(f"{self.experts.per_token} experts per token; the layer has {self.experts.count}")

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    def figures(self) -> dict[str, Any]:
        """All fields by name, as plain values."""
        return {field: msgspec.to_builtins(getattr(self, field)) for field in self.__struct_fields__}
