"""What backward keeps and what the tensor-parallel group exchanges, measured on the runtime's own modules."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from mixfleet.cost.memory import boundary_bytes, saved_bytes
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.model.spec import Block, Model

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from mixfleet.run.modules import build_blocks  # noqa: E402
from mixfleet.run.state import DTYPES  # noqa: E402
from mixfleet.run.tensor import TensorGroup  # noqa: E402
from run_pool import CPU  # noqa: E402

BATCH, SEQUENCE = 3, 160
FIGURES = {"layers": 3, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 136, "vocab": 212, "max_seq_len": 256}


class Imagined(TensorGroup):
    """A group of which only this rank exists: the others would have sent the same. Notes each collective."""

    def __init__(self, size: int) -> None:
        super().__init__(rank=0, size=size)
        self.seen: list[tuple[str, int, int]] = []

    def all_gather(self, x: Any) -> Any:
        whole = torch.cat([x] * self.size, 1)
        self.seen.append(("all_gather", whole.numel(), x.element_size()))
        return whole

    def reduce_scatter(self, x: Any) -> Any:
        self.seen.append(("reduce_scatter", x.numel(), x.element_size()))
        return x.chunk(self.size, 1)[0].clone()

    def all_to_all(self, x: Any, sent: Any, received: Any) -> Any:
        self.seen.append(("all_to_all", x.numel(), x.element_size()))
        return x.clone()

    def all_reduce(self, x: Any, op: Any = None) -> Any:
        self.seen.append(("all_reduce", x.numel(), x.element_size()))
        return x


def run(model: Model, tensor: int = 1, dtype: Any = None, **options: Any
        ) -> tuple[list[dict[int, int]], list[dict[str, list[tuple[str, int, int]]]]]:
    """Per block, the bytes of each storage that its forward saved (parameters apart), and its collectives by phase."""
    group = Imagined(tensor) if tensor > 1 else TensorGroup()
    modules = build_blocks(model, range(len(model.blocks)), group, dtype=dtype or torch.float32, **options)
    tokens = torch.randint(0, model.vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
    own = {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}
    saved: list[dict[int, int]] = []
    comms: list[dict[str, list[tuple[str, int, int]]]] = []
    alive = []
    x = tokens
    for module in modules:
        kept: dict[int, int] = {}

        def pack(t: Any, kept: dict[int, int] = kept) -> Any:
            if t.untyped_storage().data_ptr() not in own:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            alive.append(t)
            return t

        if tensor > 1:
            group.seen = []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = module(x, tokens) if module is modules[-1] else module(x)
        for given in (x, tokens) if module is modules[-1] else (x,):  # the runtime holds them, saved or not
            pack(given)
        seen = {"forward": list(group.seen) if tensor > 1 else []}
        if tensor > 1:
            group.seen = []
        torch.autograd.backward(y, torch.ones_like(y), retain_graph=True)
        seen["backward"] = list(group.seen) if tensor > 1 else []
        saved.append(kept)
        comms.append(seen)
        alive.append(y)
        x = y.detach().requires_grad_()
    return saved, comms


def predicted(block: Block, tensor: int, element: int, *, fused: bool) -> float:
    return sum(s.element_bytes(element) * s.size.at(BATCH, SEQUENCE, tensor) for s in block.saved
               if s.held("cpu", fused=fused))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("extra", [{"style": "gpt"}, {"style": "gpt", "kv_heads": 6, "activation": "relu"},
                                   {"style": "llama"}, {"style": "llama", "qk_norm": True, "ffn": 88},
                                   {"style": "gpt", "activation": "swiglu", "bias": False, "experts": 4,
                                    "experts_per_token": 4, "expert_ffn": 88, "shared_ffn": 50}])
def test_saved_bytes(extra: dict[str, Any], attention: str, tensor: int) -> None:
    """Within 5 % in every block. Constants that all layers share (rotary tables) are not counted."""
    model = build(FIGURES | extra)
    saved, _ = run(model, tensor, attention=attention)
    shared = saved[1].keys() & saved[2].keys()
    assert len(saved[1]) > 10
    for i in (0, 1, 2, len(saved) - 1):
        block = model.blocks[i]
        want = predicted(block, tensor, 4, fused=attention == "fused")
        got = sum(nbytes for key, nbytes in saved[i].items() if key not in shared)
        slack = 9 * BATCH * SEQUENCE if i == 0 and tensor > 1 else 0  # per token an index, and if it is of this slice
        assert abs(want - got) < 0.05 * got + slack, (block.name, want, got)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("extra", [{"style": "gpt"}, {"style": "gpt", "kv_heads": 6, "activation": "relu"},
                                   {"style": "llama"}, {"style": "llama", "qk_norm": True}])
def test_saved_bytes_are_exact_on_one_rank(extra: dict[str, Any], precision: str, attention: str,
                                                  recompute: str) -> None:
    """S15: to the byte, in every mode; `full` keeps the input alone, which is the boundary below."""
    model = build(FIGURES | extra)
    work = Job(name="j", model=model, seq_len=SEQUENCE, global_batch=BATCH, precision=precision,  # type: ignore[arg-type]
               attention=attention)  # type: ignore[arg-type]
    saved, _ = run(model, dtype=DTYPES[precision], attention=attention, recompute=recompute)
    shared = saved[1].keys() & saved[2].keys()
    for i in (0, 1, 2, len(saved) - 1):
        got = sum(nbytes for key, nbytes in saved[i].items() if key not in shared)
        assert got == saved_bytes(model.blocks[i], BATCH, SEQUENCE, 1, CPU, work, recompute)  # type: ignore[arg-type]
    boundary = boundary_bytes(model.blocks[0], BATCH, SEQUENCE, 1, work)
    assert saved_bytes(model.blocks[1], BATCH, SEQUENCE, 1, CPU, work, "full") == boundary


class Living(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all storages made under it that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, 0)
        self.peak = max(self.peak, self.nbytes)
        return out


@pytest.mark.parametrize("attention", ["fused", "eager"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_peak_beyond_what_is_saved(style: str, attention: str) -> None:
    """The peak of backward over the end of forward; of the weights' gradients few exist by then."""
    model = build(FIGURES | {"style": style, "kv_heads": 6, "ffn": 208})
    modules = build_blocks(model, range(len(model.blocks)), attention=attention)
    tokens = torch.randint(0, model.vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
    for i in (1, len(modules) - 1):
        block, module = model.blocks[i], modules[i]
        x = torch.randn(BATCH, SEQUENCE, model.hidden, requires_grad=True)
        arguments = (x,) if i == 1 else (x, tokens)
        module(*arguments)  # makes the tables that all layers share
        with Living() as living:
            y = module(*arguments)
            saved, living.peak = living.nbytes, 0
            y.backward(torch.ones_like(y))
        others = [block.temporaries, block.boundary] + [block.unfused_temporaries] * (attention == "eager")
        want = 4 * (block.workspace.at(BATCH, SEQUENCE) + max(size.at(BATCH, SEQUENCE) for size in others))
        got = living.peak - saved
        if i == 1:
            assert want == pytest.approx(got, rel=0.2), (want, got)
        else:
            assert got <= want <= 1.6 * got, (want, got)


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("tensor", [2])
def test_the_group_exchanges_what_is_predicted(style: str, tensor: int) -> None:
    """Every collective of every block, forward and backward: kind, elements and bytes per element."""
    model = build(FIGURES | {"style": style, "qk_norm": style == "llama"})
    _, comms = run(model, tensor, dtype=torch.bfloat16)
    for block, seen in zip(model.blocks, comms, strict=True):
        for phase in ("forward", "backward"):
            want = sorted((c.op, c.size.at(BATCH, SEQUENCE, tensor), c.bytes_per_element or 2)
                          for c in block.tensor_comm if c.phase == phase)
            assert want == sorted(seen[phase]), (block.name, phase)


def test_recompute_modes_by_hand() -> None:
    """hidden 48, 6 heads of 8, 2 key/value heads, ffn 136; b = 3, s = 160: elements and 4-byte statistics."""
    layer = build(FIGURES).blocks[1]
    tokens = 3 * 160

    def elements(mode: str, *, fused: bool) -> float:
        kept = {"none": ("none", "selective", "full"), "selective": ("selective", "full"), "full": ("full",)}[mode]
        return sum(s.size.at(3, 160) for s in layer.saved if s.until in kept and s.held("gpu", fused=fused))

    attention, inner = tokens * (48 + 48 + 16 + 16 + 48), tokens * 4 * 136
    selective = tokens * (48 + 1 + 48 + 1 + 48) + attention + inner
    assert elements("full", fused=True) == elements("full", fused=False) == tokens * 48
    assert elements("selective", fused=True) == elements("selective", fused=False) == selective
    assert elements("none", fused=True) == selective + tokens * 6
    assert elements("none", fused=False) == selective + tokens * 6 * 160 + 160 * 160 + tokens * 2 * 4 * 8


def test_experts_and_latents_by_hand() -> None:
    """A routed layer keeps k copies of each token; latent attention keeps the latents. b = 2, s = 10, t = 2."""
    model = build({
        "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6,
        "intermediate_size": 40, "vocab_size": 96, "max_position_embeddings": 64, "kv_lora_rank": 10,
        "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1})
    kept = {s.name: s.size.at(2, 10, 2) for s in model.blocks[2].saved}
    assert kept["mlp.expert_in"] == kept["mlp.expert_out"] == 20 * 3 * 24 / 2
    assert kept["mlp.experts.gate_out"] == 20 * 3 * 20 / 2
    assert kept["mlp.shared.inner_out"] == 20 * 40 / 2
    assert kept["attention.q_latent"] == 20 * 14
    assert kept["attention.kv_latent_raw"] == 20 * 14 / 2
    assert kept["attention.q"] == kept["attention.k"] == 20 * 6 * 10 / 2
    assert kept["attention.kv"] == 20 * 6 * 14 / 2
    assert kept["attention.out"] == 20 * 6 * 8 / 2
    gathered = sum(c.size.at(2, 10, 2) for c in model.blocks[2].tensor_comm
                   if (c.op, c.phase) == ("all_gather", "forward"))
    assert gathered == 20 * (14 + 14 + 24)  # both latents with the rotary key, then the MLP's input


def test_a_skewed_router_makes_one_rank_busier_the_more_ranks_there_are() -> None:
    """Twice the mean on a rank with one of four experts: nothing on one rank, 2 - 1/2 on two, 2 - 1/4 on four."""
    figures = FIGURES | {"experts": 4, "expert_ffn": 30}
    even, skewed = (build(figures | {"expert_skew": f}).blocks[1] for f in (1.0, 2.0))
    for tensor, factor in ((1, 1.0), (2, 1.5), (4, 1.75)):
        for name in ("mlp.expert_in", "mlp.experts.inner_out"):
            one, two = (next(s.size.at(2, 10, tensor) for s in b.saved if s.name == name) for b in (even, skewed))
            assert two == pytest.approx(factor * one)
        one, two = (next(op for op in b.ops if op.name == "mlp.experts.up") for b in (even, skewed))
        assert one.shape["batch"].at(2, 10, tensor) == 4 / tensor
        assert one.shape["m"].at(2, 10, tensor) == 2 * 10 * 2 / 4
        assert one.flops.at(2, 10, tensor) == pytest.approx(2 * 2 * 10 * 2 * 30 * 48 / tensor)
        assert two.flops.at(2, 10, tensor) == pytest.approx(factor * one.flops.at(2, 10, tensor))
