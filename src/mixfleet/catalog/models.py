"""Configurations of well-known models, with the keys of their Hugging Face `config.json`.

Every entry names its repository on the Hugging Face Hub, where the figures come from. Keys that change no shape,
operation or byte are left out.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _llama(repo: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int,
           theta: float, *, eps: float = 1e-5, tied: bool = False) -> Config:
    return {"source": repo, "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
            "vocab_size": vocab, "max_position_embeddings": length, "rope_theta": theta, "rms_norm_eps": eps,
            "hidden_act": "silu", "tie_word_embeddings": tied}


def _qwen(repo: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, length: int, *,
          tied: bool = False, **more: Any) -> Config:
    return {"source": repo, "model_type": "qwen2", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
            "vocab_size": vocab, "max_position_embeddings": length, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            "hidden_act": "silu", "use_sliding_window": False, "tie_word_embeddings": tied, **more}


def _gpt2(repo: str, layers: int, hidden: int, heads: int) -> Config:
    return {"source": repo, "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads,
            "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}


def _neox(repo: str, layers: int, hidden: int, heads: int, vocab: int, *, act: str = "gelu") -> Config:
    return {"source": repo, "model_type": "gpt_neox", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": vocab,
            "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5,
            "hidden_act": act, "use_parallel_residual": True, "tie_word_embeddings": False}


def _opt(repo: str, layers: int, hidden: int, heads: int) -> Config:
    return {"source": repo, "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272,
            "max_position_embeddings": 2048, "word_embed_proj_dim": hidden, "do_layer_norm_before": True,
            "activation_function": "relu"}


def _gemma(repo: str, kind: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Config:
    return {"source": repo, "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256, "intermediate_size": ffn,
            "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **more}


def _mixtral(repo: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, length: int) -> Config:
    return _llama(repo, layers, hidden, heads, 8, ffn, vocab, length, 1e6) | {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}


def _deepseek(repo: str, kind: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, *, q_rank: int | None,
              experts: int, per_token: int, expert_ffn: int, shared: int, dense: int, length: int = 163840) -> Config:
    return _llama(repo, layers, hidden, heads, heads, ffn, vocab, length, 1e4, eps=1e-6) | {
        "model_type": kind, "q_lora_rank": q_rank, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": experts, "num_experts_per_tok": per_token,
        "moe_intermediate_size": expert_ffn, "n_shared_experts": shared, "first_k_dense_replace": dense}


def _bert(repo: str, kind: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, segments: int,
          eps: float) -> Config:
    return {"source": repo, "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden, "vocab_size": vocab,
            "max_position_embeddings": positions, "type_vocab_size": segments, "hidden_act": "gelu",
            "layer_norm_eps": eps}


MODELS: dict[str, Config] = {
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 32, 4096, 32, 32, 11008, 32000, 4096, 1e4),
    "llama-2-13b": _llama("meta-llama/Llama-2-13b-hf", 40, 5120, 40, 40, 13824, 32000, 4096, 1e4),
    "llama-2-70b": _llama("meta-llama/Llama-2-70b-hf", 80, 8192, 64, 8, 28672, 32000, 4096, 1e4),
    "llama-3-8b": _llama("meta-llama/Meta-Llama-3-8B", 32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "llama-3-70b": _llama("meta-llama/Meta-Llama-3-70B", 80, 8192, 64, 8, 28672, 128256, 8192, 5e5),
    "llama-3.1-8b": _llama("meta-llama/Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256, 131072, 5e5),
    "llama-3.1-70b": _llama("meta-llama/Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256, 131072, 5e5),
    "llama-3.1-405b": _llama("meta-llama/Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256, 131072, 5e5),
    "llama-3.2-1b": _llama("meta-llama/Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, 131072, 5e5, tied=True),
    "llama-3.2-3b": _llama("meta-llama/Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, 131072, 5e5, tied=True),
    "qwen2-7b": _qwen("Qwen/Qwen2-7B", 28, 3584, 28, 4, 18944, 152064, 131072),
    "qwen2.5-0.5b": _qwen("Qwen/Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, 32768, tied=True),
    "qwen2.5-7b": _qwen("Qwen/Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064, 131072),
    "qwen2.5-14b": _qwen("Qwen/Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064, 131072),
    "qwen2.5-72b": _qwen("Qwen/Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064, 131072),
    "qwen3-8b": _qwen("Qwen/Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, 40960, model_type="qwen3", head_dim=128),
    "qwen3-32b": _qwen("Qwen/Qwen3-32B", 64, 5120, 64, 8, 25600, 151936, 40960, model_type="qwen3", head_dim=128),
    "qwen3-30b-a3b": _qwen("Qwen/Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 151936, 40960, model_type="qwen3_moe",
                           head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                           decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True),
    "qwen3-235b-a22b": _qwen("Qwen/Qwen3-235B-A22B", 94, 4096, 64, 4, 12288, 151936, 40960, model_type="qwen3_moe",
                             head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1536,
                             decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True),
    "mistral-7b": _llama("mistralai/Mistral-7B-v0.1", 32, 4096, 32, 8, 14336, 32000, 32768, 1e4) | {
        "model_type": "mistral", "sliding_window": 4096},
    "mixtral-8x7b": _mixtral("mistralai/Mixtral-8x7B-v0.1", 32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral("mistralai/Mixtral-8x22B-v0.1", 56, 6144, 48, 16384, 32000, 65536),
    "gemma-2b": _gemma("google/gemma-2b", "gemma", 18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma("google/gemma-7b", "gemma", 28, 3072, 16, 16, 24576),
    "gemma-2-9b": _gemma("google/gemma-2-9b", "gemma2", 42, 3584, 16, 8, 14336, sliding_window=4096),
    "gpt2": _gpt2("openai-community/gpt2", 12, 768, 12),
    "gpt2-medium": _gpt2("openai-community/gpt2-medium", 24, 1024, 16),
    "gpt2-large": _gpt2("openai-community/gpt2-large", 36, 1280, 20),
    "gpt2-xl": _gpt2("openai-community/gpt2-xl", 48, 1600, 25),
    "gpt-neox-20b": _neox("EleutherAI/gpt-neox-20b", 44, 6144, 64, 50432, act="gelu_fast"),
    "pythia-70m": _neox("EleutherAI/pythia-70m", 6, 512, 8, 50304),
    "pythia-160m": _neox("EleutherAI/pythia-160m", 12, 768, 12, 50304),
    "pythia-410m": _neox("EleutherAI/pythia-410m", 24, 1024, 16, 50304),
    "pythia-1b": _neox("EleutherAI/pythia-1b", 16, 2048, 8, 50304),
    "pythia-1.4b": _neox("EleutherAI/pythia-1.4b", 24, 2048, 16, 50304),
    "pythia-2.8b": _neox("EleutherAI/pythia-2.8b", 32, 2560, 32, 50304),
    "pythia-6.9b": _neox("EleutherAI/pythia-6.9b", 32, 4096, 32, 50432),
    "pythia-12b": _neox("EleutherAI/pythia-12b", 36, 5120, 40, 50688),
    "opt-125m": _opt("facebook/opt-125m", 12, 768, 12),
    "opt-1.3b": _opt("facebook/opt-1.3b", 24, 2048, 32),
    "opt-13b": _opt("facebook/opt-13b", 40, 5120, 40),
    "opt-30b": _opt("facebook/opt-30b", 48, 7168, 56),
    "deepseek-v2-lite": _deepseek("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", 27, 2048, 16, 10944, 102400,
                                  q_rank=None, experts=64, per_token=6, expert_ffn=1408, shared=2, dense=1),
    "deepseek-v2": _deepseek("deepseek-ai/DeepSeek-V2", "deepseek_v2", 60, 5120, 128, 12288, 102400,
                             q_rank=1536, experts=160, per_token=6, expert_ffn=1536, shared=2, dense=1),
    "deepseek-v3": _deepseek("deepseek-ai/DeepSeek-V3", "deepseek_v3", 61, 7168, 128, 18432, 129280,
                             q_rank=1536, experts=256, per_token=8, expert_ffn=2048, shared=1, dense=3),
    "bert-base": _bert("google-bert/bert-base-uncased", "bert", 12, 768, 12, 30522, 512, 2, 1e-12),
    "bert-large": _bert("google-bert/bert-large-uncased", "bert", 24, 1024, 16, 30522, 512, 2, 1e-12),
    "roberta-base": _bert("FacebookAI/roberta-base", "roberta", 12, 768, 12, 50265, 514, 1, 1e-5),
    "roberta-large": _bert("FacebookAI/roberta-large", "roberta", 24, 1024, 16, 50265, 514, 1, 1e-5),
}
