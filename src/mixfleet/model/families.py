"""Models from a Hugging Face configuration, a well-known name, or plain figures.

Each family is one function from the keys of its `config.json` to a `TransformerConfig`; keys that may be absent take
the default of that family in `transformers`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mixfleet.errors import InputError, unknown
from mixfleet.model.blocks import blocks
from mixfleet.model.spec import Model
from mixfleet.model.transformer import GATED, Experts, Latent, TransformerConfig

_REQUIRED: Any = object()
_MOST_LAYERS = 2**16
_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_tanh")


def build(source: str | os.PathLike[str] | Mapping[str, Any], where: str = "") -> Model:
    """A model from a `config.json` (or its directory), a well-known name, or a mapping of figures.

    A mapping with `model_type` has the keys of `config.json`, any other those of `docs/models.md`. `where` stands
    before the message of an error in a mapping. Raises InputError.
    """
    if isinstance(source, Mapping):
        name = source.get("name", "")
        if not isinstance(name, str):
            raise InputError(f"name is {name!r}; it must be text", where=where)
        if "model_type" in source:
            return _from_config(source, name, where)
        return _model(name or "decoder", "decoder", _plain(_Keys(source, where)), where)
    path = Path(source)
    if path.suffix == ".json" or path.is_dir():
        path = path / "config.json" if path.is_dir() else path
        return _from_config(_read_json(path), path.resolve().parent.name, str(path))
    from mixfleet.catalog.models import MODELS

    name = os.fspath(source).rpartition("/")[2].lower()
    if name not in MODELS:
        raise unknown("model", os.fspath(source), MODELS, where=where)
    config = {key: value for key, value in MODELS[name].items() if key != "source"}
    return _from_config(config, name, name)


def restored(name: str, family: str, figures: Mapping[str, Any]) -> Model:
    """The model whose `config` is `figures`, as a job file keeps it. Raises InputError."""
    try:
        config = msgspec.convert(figures, TransformerConfig)
    except msgspec.ValidationError as error:
        raise InputError(f"figures: {error}") from None
    return _model(name, family, {field: getattr(config, field) for field in config.__struct_fields__}, "")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise InputError("is not a JSON object", where=str(path))
    return config


def _from_config(config: Mapping[str, Any], name: str, where: str) -> Model:
    keys = _Keys(config, where)
    family = keys.one_of("model_type", tuple(_FAMILIES))
    return _model(name or family, family, _FAMILIES[family](keys), where)


def _model(name: str, family: str, figures: dict[str, Any], where: str) -> Model:
    try:
        c = TransformerConfig(**figures)
    except InputError as error:
        raise InputError(str(error), where=where) from None
    limits = (("attention heads", c.heads),) + (() if c.latent else (("key/value heads", c.kv_heads),))
    limits += (("experts", c.experts.count),) if c.experts else ()
    return Model(name=name, family=family, blocks=tuple(blocks(c)), hidden=c.hidden, layers=c.layers, heads=c.heads,
                 kv_heads=c.kv_heads, vocab=c.vocab, max_seq_len=c.max_seq_len, config=c.figures(),
                 tensor_limit=limits)


class _Keys:
    """Typed look-ups in a configuration, with errors that name the key and the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise InputError(f"{key} is missing", where=self.where)
        return default

    def count(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = "a positive integer" if least else "an integer, 0 or more"
            raise InputError(f"{key} is {value!r}; it must be {what}", where=self.where)
        return value

    def layers(self, key: str) -> int:
        value = self.count(key)
        if value > _MOST_LAYERS:
            raise InputError(f"{key} is {value}; at most {_MOST_LAYERS} are supported", where=self.where)
        return value

    def list_of(self, key: str, kind: type, default: list[Any]) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, list) or not all(isinstance(x, kind) for x in value):
            raise InputError(f"{key} is {value!r}; it must be a list of {kind.__name__}", where=self.where)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
            raise InputError(f"{key} is {value!r}; it must be a positive number", where=self.where)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{key} is {value!r}; it must be true or false", where=self.where)
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: Any = _REQUIRED) -> str:
        value = self.get(key, default)
        if value not in allowed:
            raise unknown(key, value, allowed, where=self.where)
        return str(value)

    def refuse(self, **expected: Any) -> None:
        """Settings that only work with one value."""
        for key, value in expected.items():
            if self.get(key, value) != value:
                raise InputError(f"{key} is {self.values[key]!r}; only {value!r} is supported", where=self.where)

    def activation(self, key: str, default: str, *, gated: bool) -> str:
        value = self.one_of(key, (*(("silu", "swish") if gated else ("relu",)), "gelu", *_GELU_TANH), default)
        if gated:
            return "swiglu" if value in ("silu", "swish") else "geglu_tanh" if value in _GELU_TANH else "geglu"
        return "gelu_tanh" if value in _GELU_TANH else value

    def rope(self, key: str, old: str, default: float) -> float:
        """Newer files have rotary settings in `rope_parameters`, older ones at the top."""
        nested = self.get("rope_parameters", {})
        return _Keys(nested if isinstance(nested, Mapping) else {}, self.where).number(key, self.number(old, default))


def _decoder(k: _Keys, *, tied: bool = False, head_dim: int | None = None, eps: float = 1e-6, theta: float = 1e4,
             act: str = "hidden_act", default_act: str = "silu", grouped: bool = True) -> dict[str, Any]:
    """What the RMSNorm, rotary, gated families have in common."""
    hidden, heads = k.count("hidden_size"), k.count("num_attention_heads")
    if k.get("head_dim", head_dim) is None and hidden % heads:
        raise InputError(f"hidden_size is {hidden}; num_attention_heads, {heads}, must divide it", where=k.where)
    return {
        "layers": k.layers("num_hidden_layers"), "hidden": hidden, "heads": heads,
        "kv_heads": k.count("num_key_value_heads", heads) if grouped else heads,
        "head_dim": k.count("head_dim", head_dim or hidden // heads), "ffn": k.count("intermediate_size"),
        "vocab": k.count("vocab_size"), "max_seq_len": k.count("max_position_embeddings"),
        "norm_eps": k.number("rms_norm_eps", eps), "rope_theta": k.rope("rope_theta", "rope_theta", theta),
        "activation": k.activation(act, default_act, gated=True), "tied": k.flag("tie_word_embeddings", tied),
    }


def _biases(k: _Keys) -> dict[str, Any]:
    bias = k.flag("attention_bias", False)
    return {"attention_bias": bias, "output_bias": bias}


def _llama(k: _Keys) -> dict[str, Any]:
    return _decoder(k) | _biases(k) | {"mlp_bias": k.flag("mlp_bias", False)}


def _windows(k: _Keys, layers: int, windowed: Callable[[int], bool]) -> dict[str, Any]:
    """The sliding window and the layers without it, from `layer_types` or, without that, from `windowed`."""
    usual = ["sliding_attention" if windowed(i) else "full_attention" for i in range(layers)]
    kinds = k.list_of("layer_types", str, usual)
    if len(kinds) != layers or not {*kinds} <= {"sliding_attention", "full_attention"}:
        raise InputError(f"layer_types must be {layers} times full_attention or sliding_attention", where=k.where)
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if len(full) == layers:
        return {}
    return {"window": k.count("sliding_window", 4096), "full_attention_layers": full}


def _qwen_windows(k: _Keys, layers: int) -> dict[str, Any]:
    if not k.flag("use_sliding_window", False):
        return {}
    first = k.count("max_window_layers", 28, least=0)
    return _windows(k, layers, lambda i: i >= first)


def _qwen2(k: _Keys) -> dict[str, Any]:
    figures = _decoder(k)
    return figures | _qwen_windows(k, figures["layers"]) | {"attention_bias": True}


def _qwen3(k: _Keys) -> dict[str, Any]:
    figures = _decoder(k, head_dim=128)
    return figures | _qwen_windows(k, figures["layers"]) | _biases(k) | {"qk_norm": True}


def _qwen3_moe(k: _Keys) -> dict[str, Any]:
    figures = _decoder(k) | _biases(k) | {"qk_norm": True}
    if k.flag("use_sliding_window", False):
        figures["window"] = k.count("sliding_window", 4096)
    step, dense = k.count("decoder_sparse_step", 1), k.list_of("mlp_only_layers", int, [])
    return figures | {"experts": Experts(
        count=k.count("num_experts" if "num_experts" in k.values else "num_local_experts"),
        per_token=k.count("num_experts_per_tok"), ffn=k.count("moe_intermediate_size"),
        normalized=k.flag("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(figures["layers"]) if i in dense or (i + 1) % step))}


def _mistral(k: _Keys) -> dict[str, Any]:
    # An explicit null means no window; a missing key is the family's default.
    window = k.count("sliding_window", 4096) if k.values.get("sliding_window", 4096) else 0
    return _decoder(k) | {"window": window}


def _mixtral(k: _Keys) -> dict[str, Any]:
    figures = _decoder(k, eps=1e-5, theta=1e6) | {"window": k.count("sliding_window", 0, least=0)}
    return figures | {"experts": Experts(count=k.count("num_local_experts"), per_token=k.count("num_experts_per_tok"),
                                         ffn=figures["ffn"])}


def _gemma(k: _Keys) -> dict[str, Any]:
    act = "hidden_activation" if k.get("hidden_activation", None) else "hidden_act"
    return _decoder(k, tied=True, head_dim=256, act=act, default_act="gelu_pytorch_tanh") | _biases(k)


def _gemma2(k: _Keys) -> dict[str, Any]:
    figures = _gemma(k) | {"norm_position": "both"}
    return figures | _windows(k, figures["layers"], lambda i: i % 2 == 0)


def _gpt2(k: _Keys) -> dict[str, Any]:
    k.refuse(add_cross_attention=False)
    hidden = k.count("n_embd")
    return _layernorm(k, k.layers("n_layer"), hidden, k.count("n_head"), k.count("n_inner", 4 * hidden)) | {
        "max_seq_len": k.count("n_positions"), "norm_eps": k.number("layer_norm_epsilon", 1e-5),
        "activation": k.activation("activation_function", "gelu_new", gated=False),
        "tied": k.flag("tie_word_embeddings", True)}


def _layernorm(k: _Keys, layers: int, hidden: int, heads: int, ffn: int, *, bias: bool = True) -> dict[str, Any]:
    """What the LayerNorm families have in common: learned positions, biases, no grouped heads."""
    if hidden % heads:
        raise InputError(f"hidden size is {hidden}; the number of attention heads, {heads}, must divide it",
                         where=k.where)
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
            "ffn": ffn, "vocab": k.count("vocab_size"), "norm": "layernorm", "position": "learned",
            "attention_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _gpt_neox(k: _Keys) -> dict[str, Any]:
    bias = k.flag("attention_bias", True)
    return _layernorm(k, k.layers("num_hidden_layers"), k.count("hidden_size"), k.count("num_attention_heads"),
                      k.count("intermediate_size")) | {
        "max_seq_len": k.count("max_position_embeddings"), "norm_eps": k.number("layer_norm_eps", 1e-5),
        "activation": k.activation("hidden_act", "gelu", gated=False), "position": "rotary",
        "rope_theta": k.rope("rope_theta", "rotary_emb_base", 1e4),
        "rotary_fraction": k.rope("partial_rotary_factor", "rotary_pct", 0.25),
        "tied": k.flag("tie_word_embeddings", False), "parallel": k.flag("use_parallel_residual", True),
        "attention_bias": bias, "output_bias": bias}


def _opt(k: _Keys) -> dict[str, Any]:
    k.refuse(layer_norm_elementwise_affine=True)
    before, hidden = k.flag("do_layer_norm_before", True), k.count("hidden_size")
    width = k.count("word_embed_proj_dim", hidden)
    return _layernorm(k, k.layers("num_hidden_layers"), hidden, k.count("num_attention_heads"), k.count("ffn_dim"),
                      bias=k.flag("enable_bias", True)) | {
        "max_seq_len": k.count("max_position_embeddings"), "position_offset": 2,
        "activation": k.activation("activation_function", "relu", gated=False),
        "tied": k.flag("tie_word_embeddings", True), "embedding_dim": 0 if width == hidden else width,
        "norm_position": "pre" if before else "post",
        "final_norm": before and not k.flag("_remove_final_layer_norm", False)}


def _deepseek(k: _Keys) -> dict[str, Any]:
    nope, rope, v = (k.count(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    figures = _decoder(k) | {"head_dim": nope + rope}
    bias = k.flag("attention_bias", False)
    expert_ffn = k.count("moe_intermediate_size")
    return figures | {
        "attention_bias": bias, "output_bias": bias,
        "latent": Latent(q_rank=k.count("q_lora_rank", 0, least=0), kv_rank=k.count("kv_lora_rank"), nope_dim=nope,
                         rope_dim=rope, v_dim=v),
        "experts": Experts(
            count=k.count("n_routed_experts"), per_token=k.count("num_experts_per_tok"), ffn=expert_ffn,
            shared_ffn=expert_ffn * k.count("n_shared_experts"),
            dense_layers=tuple(range(min(k.count("first_k_dense_replace", 0, least=0), figures["layers"]))))}


def _bert(k: _Keys) -> dict[str, Any]:
    k.refuse(is_decoder=False, add_cross_attention=False)
    return _layernorm(k, k.layers("num_hidden_layers"), k.count("hidden_size"), k.count("num_attention_heads"),
                      k.count("intermediate_size")) | {
        "max_seq_len": k.count("max_position_embeddings"), "norm_eps": k.number("layer_norm_eps", 1e-12),
        "activation": k.activation("hidden_act", "gelu", gated=False), "tied": k.flag("tie_word_embeddings", True),
        "segments": k.count("type_vocab_size"), "norm_position": "post", "embedding_norm": True, "final_norm": False,
        "causal": False, "head_transform": True}


def _roberta(k: _Keys) -> dict[str, Any]:
    offset = k.count("pad_token_id", 1, least=0) + 1  # positions are counted from there
    figures = _bert(k)
    return figures | {"max_seq_len": figures["max_seq_len"] - offset, "position_offset": offset}


_FAMILIES: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "mistral": _mistral,
    "mixtral": _mixtral, "gemma": _gemma, "gemma2": _gemma2, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "opt": _opt,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "bert": _bert, "roberta": _roberta,
}

_STYLES: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rotary", "bias": False, "tied": False},
    "gpt": {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "bias": True, "tied": True},
}
_PLAIN_KEYS = ("name", "family", "style", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab",
               "max_seq_len", "norm", "norm_eps", "activation", "position", "rope_theta", "tied", "bias", "qk_norm",
               "window", "experts", "experts_per_token", "expert_ffn", "shared_ffn", "expert_skew")


def _plain(k: _Keys) -> dict[str, Any]:
    """Figures of a decoder by their plain names; `style` sets the defaults."""
    for key in k.values:
        if key not in _PLAIN_KEYS:
            raise unknown("key", key, _PLAIN_KEYS, where=k.where)
    k.refuse(family="decoder")
    style = _STYLES[k.one_of("style", tuple(_STYLES), "llama")]
    hidden, heads = k.count("hidden"), k.count("heads")
    if k.get("head_dim", None) is None and hidden % heads:
        raise InputError(f"hidden is {hidden}; heads, {heads}, must divide it, or give head_dim", where=k.where)
    activation = k.one_of("activation", (*GATED, "gelu", "gelu_tanh", "relu"), style["activation"])
    bias = k.flag("bias", style["bias"])
    return {
        "layers": k.layers("layers"), "hidden": hidden, "heads": heads, "kv_heads": k.count("kv_heads", heads),
        "head_dim": k.count("head_dim", hidden // heads), "ffn": k.count("ffn", _usual_ffn(hidden, activation)),
        "vocab": k.count("vocab"), "max_seq_len": k.count("max_seq_len", 2048), "activation": activation,
        "norm": k.one_of("norm", ("rmsnorm", "layernorm"), style["norm"]), "norm_eps": k.number("norm_eps", 1e-5),
        "position": k.one_of("position", ("rotary", "learned"), style["position"]),
        "rope_theta": k.number("rope_theta", 1e4), "tied": k.flag("tied", style["tied"]), "attention_bias": bias,
        "output_bias": bias, "mlp_bias": bias, "qk_norm": k.flag("qk_norm", False),
        "window": k.count("window", 0, least=0)} | _plain_experts(k, activation)


def _plain_experts(k: _Keys, activation: str) -> dict[str, Any]:
    if not k.count("experts", 0, least=0):
        return {}
    if activation not in GATED:
        raise InputError(f"activation is {activation!r}; experts need one of {', '.join(GATED)}", where=k.where)
    return {"experts": Experts(count=k.count("experts"), per_token=k.count("experts_per_token", 2),
                               ffn=k.count("expert_ffn"), shared_ffn=k.count("shared_ffn", 0, least=0),
                               skew=k.number("expert_skew", 1.0))}


def _usual_ffn(hidden: int, activation: str) -> int:
    """4 * hidden, or for gated MLPs two thirds of that, rounded up to a multiple of 64."""
    return -(-8 * hidden // 3 // 64) * 64 if activation in GATED else 4 * hidden
