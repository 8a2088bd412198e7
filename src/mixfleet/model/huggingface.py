"""How `transformers` names and stores what the runtime trains: the way back of `families`.

For every family there is its `config.json`, and per tensor file entry the tensors of ours that it is made of. Nothing
here needs torch; `run.huggingface` moves the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from mixfleet.errors import InputError
from mixfleet.model.families import build
from mixfleet.model.spec import Model
from mixfleet.model.transformer import TransformerConfig

Form = Literal["joined", "transposed", "by head"]
"""`joined` in the first dimension; `transposed` after that (Conv1D); `by head`: one head of all parts, the next ..."""


class Weight(NamedTuple):
    """A tensor in a file of `transformers`, and the tensors of ours (`block.name/param.name`) that it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    """First dimension of each part."""
    form: Form = "joined"
    expert: int = -1
    """Of routed experts, which are one tensor of ours: the one that this is."""


class _Family(NamedTuple):
    """Modules by their names there, with ours. `layer` names are below `layers.<i>.`; a star stands for an expert's
    number."""

    architecture: str
    layers: str
    embed: dict[str, str]
    layer: dict[str, str]
    head: dict[str, str]
    config: Callable[[TransformerConfig], dict[str, Any]]
    forms: dict[str, Form] = {}


_LLAMA_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2",
                **{f"self_attn.{x}_proj": f"attention.{x}" for x in "qkvo"},
                **{f"self_attn.{x}_norm": f"attention.{x}_norm" for x in "qk"},
                **{f"mlp.{x}_proj": f"mlp.{x}" for x in ("gate", "up", "down")}}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "gelu": "gelu",
                "gelu_tanh": "gelu_new", "relu": "relu"}


def _usual(c: TransformerConfig) -> dict[str, Any]:
    return {"hidden_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
            "intermediate_size": c.ffn, "vocab_size": c.vocab, "max_position_embeddings": c.max_seq_len,
            "hidden_act": _ACTIVATIONS[c.activation], "tie_word_embeddings": c.tied}


def _rope(c: TransformerConfig) -> dict[str, Any]:
    """Where versions before 5 of `transformers` look, and where later ones do."""
    return {"rope_theta": c.rope_theta, "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}


def _llama(c: TransformerConfig) -> dict[str, Any]:
    return _usual(c) | _rope(c) | {
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "rms_norm_eps": c.norm_eps,
        "attention_bias": c.attention_bias, "mlp_bias": c.mlp_bias}


def _qwen(c: TransformerConfig) -> dict[str, Any]:
    kinds = ["sliding_attention" if c.window and i not in c.full_attention_layers else "full_attention"
             for i in range(c.layers)]
    return _llama(c) | {"use_sliding_window": c.window > 0, "sliding_window": c.window or None, "layer_types": kinds}


def _mistral(c: TransformerConfig) -> dict[str, Any]:
    return _llama(c) | {"sliding_window": c.window or None}


def _gpt2(c: TransformerConfig) -> dict[str, Any]:
    return {"n_embd": c.hidden, "n_layer": c.layers, "n_head": c.heads, "n_inner": c.ffn, "vocab_size": c.vocab,
            "n_positions": c.max_seq_len, "layer_norm_epsilon": c.norm_eps, "tie_word_embeddings": c.tied,
            "activation_function": _ACTIVATIONS[c.activation]}


def _gpt_neox(c: TransformerConfig) -> dict[str, Any]:
    rope = _rope(c)
    rope["rope_parameters"]["partial_rotary_factor"] = c.rotary_fraction
    return _usual(c) | rope | {
        "rotary_emb_base": c.rope_theta, "rotary_pct": c.rotary_fraction, "layer_norm_eps": c.norm_eps,
        "use_parallel_residual": c.parallel, "attention_bias": c.attention_bias}


def _opt(c: TransformerConfig) -> dict[str, Any]:
    return _usual(c) | {"ffn_dim": c.ffn, "word_embed_proj_dim": c.embedding_dim or c.hidden,
                        "activation_function": _ACTIVATIONS[c.activation], "enable_bias": c.attention_bias,
                        "do_layer_norm_before": c.norm_position == "pre"}


def _mixtral(c: TransformerConfig) -> dict[str, Any]:
    experts = c.experts
    assert experts is not None
    return _llama(c) | {"intermediate_size": experts.ffn, "num_local_experts": experts.count,
                        "num_experts_per_tok": experts.per_token, "sliding_window": c.window or None}


def _qwen3_moe(c: TransformerConfig) -> dict[str, Any]:
    experts = c.experts
    assert experts is not None
    return _llama(c) | {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.ffn,
        "norm_topk_prob": experts.normalized, "decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers),
        "use_sliding_window": c.window > 0, "sliding_window": c.window or None}


def _llama_like(architecture: str, config: Callable[[TransformerConfig], dict[str, Any]], **more: str) -> _Family:
    return _Family(architecture, "model.layers", {"model.embed_tokens": "tokens"}, {**_LLAMA_LAYER, **more},
                   {"model.norm": "norm", "lm_head": "lm"}, config)


_FAMILIES = {
    "llama": _llama_like("LlamaForCausalLM", _llama),
    "qwen2": _llama_like("Qwen2ForCausalLM", _qwen),
    "qwen3": _llama_like("Qwen3ForCausalLM", _qwen),
    "mistral": _llama_like("MistralForCausalLM", _mistral),
    "mixtral": _llama_like("MixtralForCausalLM", _mixtral, **{
        "block_sparse_moe.gate": "mlp.router", "block_sparse_moe.experts.*.w1": "mlp.experts.gate",
        "block_sparse_moe.experts.*.w3": "mlp.experts.up", "block_sparse_moe.experts.*.w2": "mlp.experts.down"}),
    "qwen3_moe": _llama_like("Qwen3MoeForCausalLM", _qwen3_moe, **{
        "mlp.gate": "mlp.router", **{f"mlp.experts.*.{x}_proj": f"mlp.experts.{x}" for x in ("gate", "up", "down")}}),
    "gpt2": _Family(
        "GPT2LMHeadModel", "transformer.h", {"transformer.wte": "tokens", "transformer.wpe": "positions"},
        {"ln_1": "norm1", "attn.c_attn": "attention.q attention.k attention.v", "attn.c_proj": "attention.o",
         "ln_2": "norm2", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
        {"transformer.ln_f": "norm", "lm_head": "lm"}, _gpt2,
        dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), "transposed")),
    "opt": _Family(
        "OPTForCausalLM", "model.decoder.layers",
        {"model.decoder.embed_tokens": "tokens", "model.decoder.embed_positions": "positions"},
        {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2",
         **{f"self_attn.{x}_proj": f"attention.{x}" for x in "qkv"}, "self_attn.out_proj": "attention.o",
         "fc1": "mlp.up", "fc2": "mlp.down"},
        {"model.decoder.final_layer_norm": "norm", "lm_head": "lm"}, _opt),
    "gpt_neox": _Family(
        "GPTNeoXForCausalLM", "gpt_neox.layers", {"gpt_neox.embed_in": "tokens"},
        {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "attention.dense": "attention.o",
         "attention.query_key_value": "attention.q attention.k attention.v", "mlp.dense_h_to_4h": "mlp.up",
         "mlp.dense_4h_to_h": "mlp.down"},
        {"gpt_neox.final_layer_norm": "norm", "embed_out": "lm"}, _gpt_neox,
        {"attention.query_key_value": "by head"}),
}


def family_of(model: Model) -> tuple[str, dict[str, Any]]:
    """The `model_type` that is this model, and its `config.json`: read again, that gives the same model.

    A plain decoder is the first family that can say all its figures. Raises InputError if there is none.
    """
    if model.family not in (*_FAMILIES, "decoder"):
        raise InputError(f"{model.name} is of family {model.family!r}, which transformers cannot be handed; it can: "
                         f"{', '.join((*_FAMILIES, 'decoder'))}")
    figures = msgspec.convert(model.config, TransformerConfig)
    differ: dict[str, list[str]] = {}
    routed = figures.experts is not None
    for name in _FAMILIES if model.family == "decoder" else (model.family,):
        family = _FAMILIES[name]
        if routed != any("*" in theirs for theirs in family.layer):
            continue
        config = {"architectures": [family.architecture], "model_type": name, **family.config(figures)}
        try:
            again = build(config).config
        except InputError as error:
            differ[name] = [str(error)]
            continue
        differ[name] = unlike(again, model.config)
        if not differ[name]:
            return name, config
    near = min(differ, key=lambda name: len(differ[name]))
    raise InputError(f"no architecture of transformers is {model.name}; the nearest, {near}, differs in: "
                     f"{', '.join(differ[near])}")


def unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Figures in which two configurations differ, as far as tensors depend on them: predictions alone know how unevenly
    experts are busy, and without a dense layer nothing has the width of an MLP."""
    def seen(config: dict[str, Any]) -> dict[str, Any]:
        experts = config["experts"]
        if not experts:
            return config
        width = config["ffn"] if experts.get("dense_layers") else experts["ffn"]
        return {**config, "ffn": width, "experts": {**experts, "skew": 1.0}}

    a, b = seen(one), seen(other)
    return [field for field, value in b.items() if a[field] != value]


def weights(model: Model, family: str) -> Iterator[Weight]:
    """The tensors of a model as files of `transformers` hold them, in the order of the blocks; tied ones once."""
    names = _FAMILIES[family]
    for block in model.blocks:
        role = block.name.partition(".")[0]
        prefix = f"{names.layers}.{block.name.partition('.')[2]}." if role == "layers" else ""
        table = {"embed": names.embed, "layers": names.layer, "head": names.head}[role]
        own = {p.name: p.shape for p in block.params if not p.tied}
        for theirs, ours in table.items():
            for leaf in ("weight", "bias"):
                found = [f"{part}.{leaf}" for part in ours.split() if f"{part}.{leaf}" in own]
                if found and "*" in theirs:
                    count, *shape = own[found[0]]
                    yield from (Weight(f"{prefix}{theirs.replace('*', str(e))}.{leaf}", tuple(shape),
                                       (f"{block.name}/{found[0]}",), (shape[0],), expert=e) for e in range(count))
                elif found:
                    form, rows = names.forms.get(theirs, "joined"), tuple(own[name][0] for name in found)
                    whole = (sum(rows), *own[found[0]][1:])
                    yield Weight(f"{prefix}{theirs}.{leaf}", whole[::-1] if form == "transposed" else whole,
                                 tuple(f"{block.name}/{name}" for name in found), rows, form)
