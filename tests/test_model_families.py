"""Models against published counts, against `transformers` on the meta device, and against PyTorch's FLOP counter."""

from __future__ import annotations

import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.catalog.models import MODELS
from mixfleet.errors import InputError
from mixfleet.model.families import build
from mixfleet.model.spec import Model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 96, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
DEEPSEEK = LLAMA | MOE | {
    "num_key_value_heads": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2}
NEOX = {
    "model_type": "gpt_neox", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4,
    "intermediate_size": 56, "vocab_size": 96, "max_position_embeddings": 64, "rotary_pct": 0.5,
    "hidden_act": "gelu_fast"}
OPT = {
    "model_type": "opt", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "ffn_dim": 56,
    "vocab_size": 96, "max_position_embeddings": 64, "do_layer_norm_before": True, "word_embed_proj_dim": 24}
BERT = {
    "model_type": "bert", "num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4,
    "intermediate_size": 56, "vocab_size": 96, "max_position_embeddings": 64, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12}
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, biases and tied": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, wide heads": LLAMA | {"head_dim": 10},
    "qwen2": LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen3_moe": LLAMA | MOE | {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 8, "decoder_sparse_step": 2},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 5},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3,
                        "sliding_window": None},
    "gemma": LLAMA | {"model_type": "gemma", "head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True,
                      "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": LLAMA | {"model_type": "gemma2", "head_dim": 10, "sliding_window": 5, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 24, "n_head": 4, "n_positions": 64, "vocab_size": 96,
             "n_inner": 56},
    "gpt_neox": NEOX,
    "gpt_neox, sequential": NEOX | {"use_parallel_residual": False, "attention_bias": False},
    "opt": OPT,
    "opt, post-norm and projected": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 18},
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None, "attention_bias": True,
                               "mlp_bias": False, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK | {"model_type": "deepseek_v3"},
    "bert": BERT,
    "roberta": BERT | {"model_type": "roberta", "max_position_embeddings": 66, "type_vocab_size": 1},
}
PLAIN = {"style": "gpt", "layers": 2, "hidden": 6, "heads": 3, "ffn": 10, "vocab": 5, "max_seq_len": 7, "name": "tiny"}
BATCH, SEQUENCE = 2, 14


def reference(config: dict[str, Any], attention: str = "eager") -> Any:
    """The `transformers` model: with a causal language head, or a masked one for BERT and RoBERTa (no pooler)."""
    masked = config["model_type"] in ("bert", "roberta")
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_config(transformers.AutoConfig.for_model(**config), attn_implementation=attention)
    model.config._experts_implementation = "eager"  # its grouped products are not in the flop counter
    return model


@pytest.mark.parametrize(("name", "count"), [
    ("llama-2-7b", 6_738_415_616), ("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496),
    ("mixtral-8x7b", 46_702_792_704), ("qwen2.5-7b", 7_615_616_512), ("gpt2", 124_439_808),
    ("pythia-1.4b", 1_414_647_808), ("gemma-2-9b", 9_241_705_984), ("bert-base", 109_514_298),
])
def test_published_counts(name: str, count: int) -> None:
    assert build(name).count == count


@pytest.mark.parametrize("name", MODELS)
def test_catalog_equals_transformers(name: str) -> None:
    config = {key: value for key, value in MODELS[name].items() if key != "source"}
    with torch.device("meta"):
        assert build(name).count == sum(p.numel() for p in reference(config).parameters())


@pytest.mark.parametrize("name", SMALL)
def test_small_models_have_the_same_tensors(name: str) -> None:
    """The same shapes, once what `transformers` stores fused or transposed is taken apart."""
    config = SMALL[name]
    with torch.device("meta"):
        theirs: list[tuple[int, ...]] = []
        for param, value in reference(config).named_parameters():
            shape = tuple(value.shape)
            if re.search(r"c_attn|c_proj|c_fc", param):
                shape = shape[::-1]
            parts = 3 if re.search("c_attn|query_key_value", param) else 1
            if param.endswith("gate_up_proj"):
                theirs += [(shape[0], shape[1] // 2, shape[2])] * 2
            else:
                theirs += [(shape[0] // parts, *shape[1:])] * parts
    ours = [p.shape for b in build(config).blocks for p in b.params if not p.tied]
    assert sorted(ours) == sorted(theirs)


def count_flops(model: Any, backward: bool = True, mapping: dict[Any, Any] | None = None) -> tuple[int, int, Any]:
    """FLOPs forward and backward of one batch by PyTorch's counter, and the counts by module."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.randint(0, 96, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3))
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        loss = model(tokens, labels=tokens).loss
        forward = counter.get_total_flops()
        if backward:
            loss.backward()
    return forward, counter.get_total_flops() - forward, counter.get_flop_counts()


def flops(model: Model, which: str) -> float:
    return sum(getattr(op, which).at(BATCH, SEQUENCE) for block in model.blocks for op in block.ops)


@pytest.mark.parametrize("name", SMALL)
def test_flops_equal_the_counter(name: str) -> None:
    """Eager attention and experts one by one: every product is then one that the counter knows.

    All tokens are routed, so which experts they go to does not matter. The embedding's output needs a gradient, so
    the first projections compute one.
    """
    model = build(SMALL[name])
    forward, backward, _ = count_flops(reference(SMALL[name]).train())
    assert (flops(model, "flops"), flops(model, "backward_flops")) == (forward, backward)


MODULES = {r"\.(q_proj|query)$": "attention.q", r"\.(k_proj|key)$": "attention.k", r"\.(v_proj|value)$": "attention.v",
           r"(attn\.(o_proj|out_proj|c_proj|dense)|attention\.(output\.)?dense)$": "attention.o",
           r"mlp\.gate_proj$": "mlp.gate", r"(mlp\.up_proj|fc1|c_fc|dense_h_to_4h|intermediate\.dense)$": "mlp.up",
           r"(mlp\.down_proj|fc2|mlp\.c_proj|dense_4h_to_h|\d\.output\.dense)$": "mlp.down",
           r"mlp\.gate$": "mlp.router", r"kv_b_proj$": "attention.kv_up", r"q_a_proj$": "attention.q_down",
           r"kv_a_proj_with_mqa$": "attention.kv_down", r"q_b_proj$": "attention.q",
           r"shared_experts\.up_proj$": "mlp.shared.up"}


@pytest.mark.parametrize("name", SMALL)
def test_forward_flops_of_each_module(name: str) -> None:
    """Module by module in every layer: the forward FLOPs of the projections and of the attention core."""
    model = build(SMALL[name])
    blocks = {block.name: {op.name: op for op in block.ops} for block in model.blocks}
    _, _, counts = count_flops(reference(SMALL[name]), backward=False)
    checked = set()
    for module, by_op in counts.items():
        layer = re.search(r"\.(?:layers|h|layer)\.(\d+)\.", module)
        if not layer:
            continue
        ops = blocks[f"layers.{layer[1]}"]
        found = sum(by_op.values())
        if re.search(r"(c_attn|query_key_value)$", module):
            assert found == sum(ops[f"attention.{x}"].flops.at(BATCH, SEQUENCE) for x in "qkv")
            checked.add((layer[1], "qkv"))
        for pattern, op in MODULES.items():
            if re.search(pattern, module):
                assert found == ops[op].flops.at(BATCH, SEQUENCE), module
                checked.add((layer[1], op))
    assert len(checked) >= 4 * model.layers
    assert sum(v for k, v in counts["Global"].items() if "bmm" in str(k)) == sum(
        op["attention.core"].flops.at(BATCH, SEQUENCE) for name, op in blocks.items() if name.startswith("layers"))


def test_the_fused_kernel_computes_the_scores_once_more() -> None:
    """The counter does not know the CPU's fused kernel; with its own formula for the CUDA one, backward is 5/4."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu:
            lambda q, k, v, *a, out_shape=None, **kw: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward:
            lambda grad, q, k, v, *a, out_shape=None, **kw: sdpa_backward_flop_count(grad, q, k, v),
    }
    model, theirs = build(LLAMA), reference(LLAMA, "sdpa")
    core = sum(op.flops.at(BATCH, SEQUENCE) for b in model.blocks for op in b.ops if op.kind == "attention")
    assert core > 0
    forward, backward, _ = count_flops(theirs, mapping=mapping)
    assert forward == flops(model, "flops")
    assert backward == flops(model, "backward_flops") + core / 2
    forward, backward, _ = count_flops(theirs)
    assert forward == flops(model, "flops") - core  # uncounted
    assert backward == flops(model, "backward_flops") - 2 * core


@pytest.mark.parametrize("name", [n for n in SMALL if "deepseek" not in n])
def test_tensor_parallel_shares_add_up(name: str) -> None:
    """All products are divided: attention, MLP, router and experts of rank 1/2 do half."""
    for block in build(SMALL[name]).blocks:
        for op in block.ops:
            whole, half = op.flops.at(3, 10, 1), op.flops.at(3, 10, 2)
            assert half == whole / 2, op.name


def test_llama_block_by_hand() -> None:
    """hidden 24, 6 heads of 4, 2 key/value heads, ffn 40, vocabulary 96; b = 3, s = 10, t = 2."""
    model = build(LLAMA)
    layer, head = model.blocks[2], model.blocks[-1]
    assert [b.name for b in model.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert {p.name: (p.shape, p.split, p.role) for p in layer.params} == {
        "norm1.weight": ((24,), None, "norm"), "attention.q.weight": ((24, 24), 0, "dense"),
        "attention.k.weight": ((8, 24), 0, "dense"), "attention.v.weight": ((8, 24), 0, "dense"),
        "attention.o.weight": ((24, 24), 1, "dense"), "norm2.weight": ((24,), None, "norm"),
        "mlp.gate.weight": ((40, 24), 0, "dense"), "mlp.up.weight": ((40, 24), 0, "dense"),
        "mlp.down.weight": ((24, 40), 1, "dense")}
    assert layer.boundary.at(3, 10, 2) == 3 * 10 * 24 / 2
    ops = {op.name: op for op in layer.ops}
    assert {k: v.at(3, 10, 2) for k, v in ops["attention.k"].shape.items()} == {"batch": 1, "m": 30, "n": 4, "k": 24}
    assert {k: v.at(3, 10, 2) for k, v in ops["mlp.down"].shape.items()} == {"batch": 1, "m": 30, "n": 24, "k": 20}
    core = {k: v.at(3, 10, 2) for k, v in ops["attention.core"].shape.items()}
    assert core == {"batch": 3, "heads": 3, "kv_heads": 1, "q": 10, "kv": 10, "qk_dim": 4, "v_dim": 4}
    assert ops["attention.core"].flops.at(3, 10, 2) == 2 * 3 * 3 * 10 * 10 * (4 + 4)
    assert ops["attention.core"].causal
    comms = [(c.op, c.phase, c.size.at(3, 10, 2)) for c in layer.tensor_comm]
    assert sorted(comms) == sorted(
        [("all_gather", "forward", 720), ("reduce_scatter", "forward", 720),
         ("all_gather", "backward", 720), ("reduce_scatter", "backward", 720)] * 2)
    assert [(c.op, c.phase, c.size.at(3, 10, 2), c.bytes_per_element) for c in head.tensor_comm] == [
        ("all_gather", "forward", 720, None), ("reduce_scatter", "backward", 720, None),
        ("all_reduce", "forward", 30, 4), ("all_reduce", "forward", 60, 4)]
    assert head.workspace.at(3, 10, 2) == 1.5 * 30 * 48
    assert model.tensor_limit == (("attention heads", 6), ("key/value heads", 2))


def test_parallel_residual_scatters_once() -> None:
    forward = [c.op for c in build(SMALL["gpt_neox"]).blocks[1].tensor_comm if c.phase == "forward"]
    assert sorted(forward) == ["all_gather", "all_gather", "reduce_scatter"]


def test_windows_and_experts_by_layer() -> None:
    def windows(config: dict[str, Any]) -> list[int]:
        return [op.window for b in build(config).blocks for op in b.ops if op.kind == "attention"]

    assert windows(SMALL["mistral"]) == [5, 5, 5]
    assert windows(SMALL["qwen2"]) == [0, 5, 5]
    assert windows(SMALL["gemma2"]) == [5, 0, 5]
    assert windows(SMALL["gemma2"] | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}) == [
        0, 0, 5]
    assert windows(SMALL["mistral"] | {"sliding_window": None}) == [0, 0, 0]

    def routed(config: dict[str, Any]) -> list[bool]:
        return [any(p.role == "expert" for p in b.params) for b in build(config).blocks[1:-1]]

    assert routed(SMALL["deepseek_v3"]) == [False, True, True]
    assert routed(SMALL["qwen3_moe"]) == [False, True, False]
    assert routed(SMALL["qwen3_moe"] | {"decoder_sparse_step": 1, "mlp_only_layers": [2]}) == [True, True, False]


def test_kinds_name_the_content() -> None:
    """Equal layers of different models are one kind; any difference in shape is another."""
    kinds = {name: [b.kind for b in build(name).blocks] for name in ("llama-3-70b", "llama-2-70b", "llama-3-8b")}
    assert len(set(kinds["llama-3-70b"])) == 3
    assert kinds["llama-3-70b"][1] == kinds["llama-2-70b"][1]
    assert kinds["llama-3-70b"][1] != kinds["llama-3-8b"][1]
    assert kinds["llama-3-70b"][-1] != kinds["llama-2-70b"][-1]
    blocks = build("llama-3-70b").blocks
    assert blocks[1].ops is blocks[80].ops


def test_large_models_build_quickly() -> None:
    build("llama-3-70b")
    start = time.process_time()
    build("llama-3-70b")
    assert time.process_time() - start < 0.05


def test_plain_figures() -> None:
    """A GPT of 2 layers: 5*6 tokens, 7*6 positions, per layer 4 norms and biases, and the final norm; tied."""
    gpt = build(PLAIN)
    layer = (4 * 6) + (4 * 36 + 4 * 6) + (60 + 10 + 60 + 6)
    assert (gpt.name, gpt.family, gpt.count) == ("tiny", "decoder", 30 + 42 + 2 * layer + 12)
    assert gpt.blocks[-1].params[-1].tied == "embed/tokens.weight"
    assert gpt.config["activation"] == "gelu_tanh"
    llama = build({"layers": 2, "hidden": 6, "heads": 3, "kv_heads": 1, "ffn": 10, "vocab": 5})
    assert llama.count == 30 + 2 * (12 + 2 * 36 + 2 * 12 + 3 * 60) + 6 + 30
    assert build({"layers": 1, "hidden": 96, "heads": 3, "vocab": 5}).config["ffn"] == 256


def test_a_path_a_directory_and_a_name_are_one(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "config.json"
    transformers.AutoConfig.for_model(**LLAMA).to_json_file(path)
    assert build(path).name == "tiny"
    assert build(path).blocks == build(str(path.parent)).blocks == build(LLAMA).blocks
    assert build("meta-llama/Llama-3-8B") == build("llama-3-8b")


@pytest.mark.parametrize("name", SMALL)
def test_files_that_transformers_writes(name: str, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(**SMALL[name]).to_json_file(tmp_path / "config.json")
    assert build(tmp_path / "config.json").blocks == build(SMALL[name]).blocks


@pytest.mark.parametrize(("source", "message"), [
    ("lama-3-8b", r"unknown model 'lama-3-8b'; did you mean .*'llama-3-8b'"),
    ("no/such/config.json", r"no/such/config.json: cannot be read: No such file"),
    ({"model_type": "mamba"}, r"job.yaml: unknown model_type 'mamba'.*llama"),
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, r"job.yaml: hidden_size is missing"),
    (LLAMA | {"num_hidden_layers": -3}, r"job.yaml: num_hidden_layers is -3; it must be a positive integer"),
    (LLAMA | {"vocab_size": "big"}, r"job.yaml: vocab_size is 'big'"),
    (LLAMA | {"vocab_size": True}, r"job.yaml: vocab_size is True"),
    (LLAMA | {"num_attention_heads": 7, "num_key_value_heads": 7}, r"num_attention_heads, 7, must divide it"),
    (LLAMA | {"num_key_value_heads": 4}, r"job.yaml: kv_heads is 4; it must divide heads, which is 6"),
    (LLAMA | {"hidden_act": "mish"}, r"unknown hidden_act 'mish'"),
    (BERT | {"is_decoder": True}, r"job.yaml: is_decoder is True; only False is supported"),
    (SMALL["mixtral"] | {"num_experts_per_tok": 6}, r"6 experts per token; the layer has 5"),
    ({"layers": 2, "hiden": 6}, r"job.yaml: unknown key 'hiden'; did you mean 'hidden'\?"),
    ({"layers": 2, "hidden": 6, "heads": 3}, r"job.yaml: vocab is missing"),
    ({"layers": 2, "hidden": 6, "heads": 3, "vocab": 0}, r"job.yaml: vocab is 0"),
    ({"layers": 2, "hidden": 6, "heads": 4, "vocab": 9}, r"hidden is 6; heads, 4, must divide it"),
    ({"layers": 2, "hidden": 6, "heads": 3, "vocab": 9, "style": "bert"}, r"unknown style 'bert'"),
    ({"name": 3, "layers": 2}, r"job.yaml: name is 3"),
])
def test_bad_input_says_what_and_where(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(source, "job.yaml")


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not JSON"), ("[1]", "is not a JSON object"), ("{}", "model_type is missing"),
    (json.dumps({"model_type": "gpt2", "n_embd": 8}), r"n_layer is missing"),
])
def test_bad_files_name_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(str(path)) + ".*" + message):
        build(path)


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.just(10**12), st.floats(), st.text(max_size=5),
                 st.lists(st.one_of(st.integers(-1, 4), st.text(max_size=3)), max_size=4),
                 st.dictionaries(st.sampled_from(["rope_theta", "x"]), st.integers(-1, 9), max_size=2))
EXTRA_KEYS = ("head_dim", "layer_types", "rope_parameters", "sliding_window", "mlp_only_layers", "hidden_activation",
              "num_key_value_heads", "name", "attention_bias", "pad_token_id")


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_any_value_builds_or_is_refused(data: st.DataObject) -> None:
    """Whatever stands in one or two keys of a configuration, the answer is a model or an InputError with the place."""
    config = dict(data.draw(st.sampled_from([*SMALL.values(), PLAIN])))
    for key in data.draw(st.lists(st.sampled_from([*config, *EXTRA_KEYS]), min_size=1, max_size=2)):
        config[key] = data.draw(JUNK)
    refused = ""
    try:
        model = build(config, "job.yaml")
    except InputError as error:
        refused = str(error)
    if refused:
        assert refused.startswith("job.yaml: ")
    else:
        assert model.count > 0
        assert len(model.blocks) == model.layers + 2


@pytest.mark.parametrize(("figures", "says"), [
    ({"experts": 4}, "expert_ffn is missing"),
    ({"experts": 4, "expert_ffn": 8, "experts_per_token": 5}, "5 experts per token; the layer has 4"),
    ({"experts": 4, "expert_ffn": 8, "activation": "gelu"}, "experts need one of swiglu"),
    ({"experts": 4, "expert_ffn": 8, "expert_skew": 0.5}, "skew of the experts is 0.5"),
])
def test_impossible_experts_say_why(figures: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        build({"layers": 2, "hidden": 8, "heads": 2, "vocab": 9} | figures)


def test_experts_limit_the_tensor_degree() -> None:
    assert ("experts", 6) in build({"layers": 2, "hidden": 8, "heads": 2, "vocab": 9, "experts": 6, "expert_ffn": 8}
                                   ).tensor_limit
