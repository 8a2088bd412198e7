"""Torch blocks: equal to Hugging Face's, and under tensor parallelism equal to one rank."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mixfleet.errors import InputError
from mixfleet.model.families import build
from mixfleet.run import modules
from mixfleet.run.modules import build_blocks, initial_values
from mixfleet.run.tensor import ALONE, TensorGroup

torch.set_num_threads(1)

LLAMA = {"style": "llama", "layers": 2, "hidden": 40, "heads": 8, "kv_heads": 4, "head_dim": 6, "ffn": 90, "vocab": 103,
         "max_seq_len": 64}
GPT = {"style": "gpt", "layers": 3, "hidden": 48, "heads": 4, "ffn": 70, "vocab": 101, "max_seq_len": 32}
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 40, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 10, "intermediate_size": 58, "vocab_size": 53,
         "max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
NEOX = {"model_type": "gpt_neox", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 90, "vocab_size": 53, "max_position_embeddings": 64}
MOE = {"layers": 2, "hidden": 40, "heads": 4, "ffn": 58, "vocab": 53, "max_seq_len": 64, "experts": 8,
       "experts_per_token": 3, "expert_ffn": 26, "shared_ffn": 20}
EVEN_MOE = MOE | {"experts": 4, "experts_per_token": 4}
MODELS = {"llama": LLAMA, "gpt": GPT, "qwen3": QWEN3, "gpt_neox": NEOX, "moe": MOE, "even moe": EVEN_MOE}


def batch(vocab, rows=3, length=12):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, vocab, (rows, length), generator=generator) for _ in range(2))
    targets[1, 5:9] = -100
    return tokens, targets


def loss_of(blocks, tokens, targets):
    x = tokens
    for block in blocks[:-1]:
        x = block(x)
    return blocks[-1](x, targets)


def gradients(model, group=ALONE, dtype=torch.float64, **options):
    blocks = build_blocks(model, range(len(model.blocks)), group, seed=5, dtype=dtype, **options)
    loss = loss_of(blocks, *batch(model.vocab))
    loss.backward()
    return loss.detach(), [{n: p.grad for n, p in block.named_parameters()} for block in blocks]


# --- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parameters_are_those_of_the_specification(name, size):
    model = build(MODELS[name])
    everything = range(len(model.blocks))
    whole = build_blocks(model, everything, seed=3)
    ranks = [build_blocks(model, everything, TensorGroup(rank=j, size=size), seed=3) for j in range(size)]
    for i, block in enumerate(model.blocks):
        params = dict(whole[i].named_parameters())
        assert [(n, tuple(p.shape)) for n, p in params.items()] == [(p.name, p.shape) for p in block.params]
        for spec in block.params:
            slices = [dict(rank[i].named_parameters())[spec.name].detach() for rank in ranks]
            if spec.split is None:
                assert all(torch.equal(s, params[spec.name]) for s in slices)
            else:
                n = spec.shape[spec.split]
                assert [s.shape[spec.split] for s in slices] == [n * (j + 1) // size - n * j // size
                                                                 for j in range(size)]
                assert torch.equal(torch.cat(slices, spec.split), params[spec.name])


def test_initial_values():
    model = build({"layers": 8, "hidden": 300, "heads": 4, "vocab": 1000, "ffn": 900})
    key, count = "embed/tokens.weight", 300_000
    whole = initial_values(model, 1, key, 0, count)
    assert count > modules._CHUNK  # so the next line crosses from one draw to another
    assert torch.equal(initial_values(model, 1, key, 262_000, 262_300), whole[262_000:262_300])
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    assert not torch.equal(initial_values(model, 2, key, 0, 9), whole[:9])
    down = initial_values(model, 1, "layers.3/mlp.down.weight", 0, 270_000)
    assert down.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.01)  # 2 * 8 layers
    assert not torch.equal(initial_values(model, 1, "layers.4/mlp.down.weight", 0, 9), down[:9])
    assert torch.equal(initial_values(model, 1, "layers.0/norm1.weight", 7, 9), torch.ones(2))


def test_tied_weights_start_equal():
    model = build(GPT)
    first, last = build_blocks(model, [0, len(model.blocks) - 1], seed=4)
    assert torch.equal(first.get_parameter("tokens.weight"), last.get_parameter("lm.weight"))


# --- one rank --------------------------------------------------------------------------------------------------------

LLAMA_NAMES = {"embed/tokens": "model.embed_tokens", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
               **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
               **{f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
               **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}, "head/norm": "model.norm",
               "mlp.router": "mlp.gate", **{f"mlp.experts.{x}": f"mlp.experts.{x}" for x in ("gate", "up", "down")},
               "head/lm": "lm_head", "layers": "model.layers"}
HF_NAMES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"), LLAMA_NAMES),
    "gpt2": {"embed/tokens": "transformer.wte", "embed/positions": "transformer.wpe", "norm1": "ln_1", "norm2": "ln_2",
             **{f"attention.{x}": f"attn.c_attn.{x}" for x in "qkv"}, "attention.o": "attn.c_proj",
             "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "head/norm": "transformer.ln_f", "head/lm": "lm_head",
             "layers": "transformer.h"},
    "gpt_neox": {"embed/tokens": "gpt_neox.embed_in", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
                 **{f"attention.{x}": f"attention.query_key_value.{x}" for x in "qkv"},
                 "attention.o": "attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
                 "head/norm": "gpt_neox.final_layer_norm", "head/lm": "lm_head", "layers": "gpt_neox.layers"},
    "opt": {"embed/tokens": "model.decoder.embed_tokens", "embed/positions": "model.decoder.embed_positions",
            "norm1": "self_attn_layer_norm", "norm2": "final_layer_norm",
            **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attention.o": "self_attn.out_proj",
            "mlp.up": "fc1", "mlp.down": "fc2", "head/norm": "model.decoder.final_layer_norm", "head/lm": "lm_head",
            "layers": "model.decoder.layers"},
}
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 90, "vocab_size": 61,
         "max_position_embeddings": 40}
GROUPED = SMALL | {"num_key_value_heads": 2}
CONFIGS = {
    "llama": GROUPED | {"rope_theta": 5000.0, "rms_norm_eps": 1e-5},
    "qwen2": GROUPED | {"tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 10, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "mistral": GROUPED | {"sliding_window": 6},
    "mixtral": GROUPED | {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED | {"head_dim": 10, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
                            "decoder_sparse_step": 2},
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 40},
    "gpt_neox": SMALL | {"rotary_pct": 0.5},
    "opt": SMALL | {"ffn_dim": 90, "word_embed_proj_dim": 48},
}


def hf_weights(family, hf, heads):
    """State of a Hugging Face model with separate q, k and v in torch.nn.Linear's layout."""
    state = dict(hf.state_dict())
    for name, value in list(state.items()):
        if "c_attn" in name or "c_proj" in name or "c_fc" in name:  # GPT-2's Conv1D is (in, out)
            state[name] = value = value.t() if value.dim() == 2 else value
        if "c_attn" in name:
            for x, part in zip("qkv", value.chunk(3)):
                state[name.replace("c_attn", f"c_attn.{x}")] = part
        if "experts.gate_up_proj" in name:
            for x, part in zip(("gate", "up"), value.chunk(2, 1)):
                state[name.replace("gate_up_proj", f"{x}.weight")] = part
        if "experts.down_proj" in name:
            state[name.replace("down_proj", "down.weight")] = value
        if "query_key_value" in name:  # per head: q, k, v
            for x, part in zip("qkv", value.unflatten(0, (heads, 3, -1)).unbind(1)):
                state[name.replace("query_key_value", f"query_key_value.{x}")] = part.flatten(0, 1)
    return state


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_hugging_face(family, attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    hf = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, value in hf.named_parameters():  # biases and norms too, or an error in them would not show
            value.copy_(torch.randn_like(value) * 0.1 + ("norm" in name or "ln_" in name))
    state, names = hf_weights(family, hf, 4), HF_NAMES[family]
    model = build({"model_type": family} | config.to_dict())
    blocks = build_blocks(model, range(len(model.blocks)), attention=attention)
    for block, spec in zip(blocks, model.blocks):
        for key, value in block.named_parameters():
            part, _, leaf = key.rpartition(".")
            layer = spec.name.partition(".")[2]
            there = f"{names['layers']}.{layer}.{names[part]}" if layer else names[f"{spec.name}/{part}"]
            value.data.copy_(state[f"{there}.{leaf}"])
    tokens = torch.randint(0, model.vocab, (2, 17))
    with torch.no_grad():
        x = tokens
        for block in blocks[:-1]:
            x = block(x)
        logits, expected = blocks[-1].logits(x), hf(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_loss_is_the_sum_over_valid_tokens():
    model = build(LLAMA)
    blocks = build_blocks(model, range(len(model.blocks)), dtype=torch.float64)
    tokens, targets = batch(model.vocab)
    loss = loss_of(blocks, tokens, targets)
    x = tokens
    for block in blocks[:-1]:
        x = block(x)
    logits = blocks[-1].logits(x)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    mine, theirs = (torch.autograd.grad(value, blocks[-1].get_parameter("lm.weight"), retain_graph=True)[0]
                    for value in (loss, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{"attention": "eager"}, {"recompute": "selective"},
                                     {"attention": "eager", "recompute": "selective"}])
def test_attention_and_recompute_change_nothing(name, options):
    model = build(MODELS[name])
    (loss, grads), (same, also) = gradients(model), gradients(model, **options)
    torch.testing.assert_close(same, loss, atol=0, rtol=1e-13)
    torch.testing.assert_close(also, grads, atol=1e-12, rtol=0)


def test_selective_recompute_keeps_no_scores():
    model = build(LLAMA)

    def saved(recompute):
        (layer,) = build_blocks(model, [1], attention="eager", recompute=recompute)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            layer(torch.randn(3, 12, model.hidden))
        return [s for s in sizes if s[-2:] == (12, 12) and len(s) > 2]

    assert saved("none")
    assert not saved("selective")


def test_bf16_loss_is_accumulated_in_fp32():
    loss, grads = gradients(build(GPT), dtype=torch.bfloat16)
    exact, _ = gradients(build(GPT))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)
    assert grads[1]["mlp.up.weight"].dtype == torch.bfloat16


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def deviation(model, group, dtype, log, **options):
    """Largest difference of loss and of gradients from one rank alone, as a part of the largest gradient; whether all
    ranks have the same loss; bytes sent."""
    loss, grads = gradients(model, dtype=dtype, **options)
    log.clear()
    mine, partial = gradients(model, group, dtype=dtype, **options)
    bytes_sent, worst = sum(sum(n) for _, n, _ in log), abs(mine - loss).item()
    for block, whole, part in zip(model.blocks, grads, partial):
        for spec in block.params:
            if spec.split is None:
                dist.all_reduce(part[spec.name], group=group.process_group)
                expected = whole[spec.name]
            else:
                cut = group.slice_of(spec.shape[spec.split])
                expected = whole[spec.name].narrow(spec.split, cut.start, cut.stop - cut.start)
            worst = max(worst, (part[spec.name] - expected).abs().max().item())
    losses = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(losses, mine, group=group.process_group)
    largest = max(g.abs().max().item() for block in grads for g in block.values())
    return worst / largest, all(torch.equal(x, losses[0]) for x in losses), bytes_sent


def tensor_worker(rank, port, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    log = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for size, process_group in ((4, dist.group.WORLD), (2, pairs[rank // 2])):
        group = TensorGroup(process_group, on_comm=lambda *event: log.append(event))
        for name, figures in MODELS.items():
            model = build(figures)
            found[name, size, "fp64"] = deviation(model, group, torch.float64, log)
            found[name, size, "bf16"] = deviation(model, group, torch.bfloat16, log, recompute="selective")
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def tensor_results():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=tensor_worker, args=(rank, port, results), daemon=True) for rank in range(4)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(30)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_equals_one_rank(tensor_results, name, size):
    for rank in range(4):
        worst, equal, _ = tensor_results[rank][name, size, "fp64"]
        assert worst < 1e-12
        assert equal
        assert tensor_results[rank][name, size, "bf16"][0] < 0.02


@pytest.mark.parametrize("name", [n for n in MODELS if n != "moe"])  # whose bytes depend on the routing
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_those_of_the_model(tensor_results, name, size):
    """What the cost model charges: (t - 1) / t of each gathered or scattered tensor, twice that to reduce to all."""
    model = build(MODELS[name])
    for precision, width in (("fp64", 8), ("bf16", 2)):
        expected = 0.0
        for block in model.blocks:
            for comm in block.tensor_comm:
                times = 2 if comm.op == "all_reduce" else 1
                each = max(width, comm.bytes_per_element or 0)
                expected += times * (size - 1) / size * comm.size.at(3, 12, size) * each
        for rank in range(4):
            assert tensor_results[rank][name, size, precision][2] == expected


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma-2b", "deepseek-v3"])
def test_families_that_are_only_planned_for(name):
    with pytest.raises(InputError, match=rf"{name[:5]}.*predict and plan work.*llama"):
        build_blocks(build(name), [0])


def test_settings_that_are_only_planned_for():
    config = {"model_type": "opt"} | CONFIGS["opt"] | {"word_embed_proj_dim": 24}
    with pytest.raises(InputError, match="embedding_dim"):
        build_blocks(build(config), [0])


def test_degrees_that_do_not_divide():
    with pytest.raises(InputError, match=r"tensor is 3.*8 attention heads"):
        build_blocks(build(LLAMA), [1], TensorGroup(size=3))
    with pytest.raises(InputError, match=r"seq_len is 13.*2"):
        build_blocks(build(LLAMA), [0], TensorGroup(size=2))[0](torch.zeros(1, 13, dtype=torch.int64))
