"""Checkpoints as directories of `transformers` and back, and checkpoints written while training goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mixfleet.cli import main
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.model.families import build
from mixfleet.model.huggingface import family_of, unlike
from mixfleet.model.spec import Model
from mixfleet.run import Options, TrainResult, train
from mixfleet.run.checkpoint import Reader, Saving, State, shapes
from mixfleet.run.huggingface import Pretrained, export, open_weights
from mixfleet.run.modules import build_blocks, initial_values
from mixfleet.run.source import DecoderSource
from mixfleet.run.worker import Rank, train_loop
from run_pool import CLUSTER, job, pipe, plan
from test_checkpoint import KINDS, values, write
from test_modules import CONFIGS, GPT, LLAMA

torch.set_num_threads(1)
MODELS: dict[str, dict[str, Any]] = {
    **{family: {"model_type": family, **config} for family, config in CONFIGS.items()},
    "style llama, experts": {"layers": 2, "hidden": 40, "heads": 4, "ffn": 58, "vocab": 53, "max_seq_len": 64,
                             "experts": 4, "experts_per_token": 2, "expert_ffn": 26, "expert_skew": 1.5},
    "llama with biases": {"model_type": "llama", **CONFIGS["llama"], "attention_bias": True, "mlp_bias": True},
    "neox in sequence": {"model_type": "gpt_neox", **CONFIGS["gpt_neox"], "use_parallel_residual": False},
    "style llama": LLAMA, "style gpt": GPT, "style llama, tied, qk": LLAMA | {"tied": True, "qk_norm": True},
    "style llama, window": LLAMA | {"window": 5}, "style gpt, untied relu": GPT | {"tied": False, "activation": "relu"},
}


def weight(model: Model, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Random, biases and norms too, so that none can be mistaken for another."""
    n = torch.Size(shapes(model)[key].shape).numel()
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    return initial_values(model, 7, key, 0, n).to(dtype) + 0.1 * torch.randn(n, generator=generator, dtype=dtype)


def saved(root: Path, model: Model, dtype: torch.dtype) -> Path:
    state = State(step=3, position=0, seed=1, optimizer="adamw")
    pieces = [(key, "weights", 0, len(w), w) for key in shapes(model) for w in [weight(model, key, dtype)]]
    return Saving(root, model, state, 0, pieces).commit(lambda mine: [mine])


def logits(model: Model, root: Path, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = build_blocks(model, range(len(model.blocks)), dtype=dtype, attention="eager", initialize=False)
    reader = Reader(root)
    for spec, block in zip(model.blocks, blocks):
        for p in spec.params:
            block.get_parameter(p.name).data.copy_(reader.whole(p.tied or f"{spec.name}/{p.name}", "weights"))
    x = tokens
    for block in blocks[:-1]:
        x = block(x)
    found: torch.Tensor = blocks[-1].logits(x).detach()  # type: ignore[operator]
    return found


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_an_export_and_gives_the_same_logits(name: str, dtype: torch.dtype, near: float,
                                                                tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    """Norms, rotations and softmax are in fp32 there whatever the type: for fp64 its fp32 is made to be fp64."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    model = build(MODELS[name])
    root = saved(tmp_path / "ours", model, dtype)
    shard = 5 * 10**9 if dtype == torch.float32 else 40_000
    files = export(tmp_path / "ours", tmp_path / "theirs", shard_bytes=shard)
    assert all(path.is_file() for path in files)
    assert (len(files) > 3) == (dtype == torch.float64)  # the small limit makes an index and several files

    def load() -> tuple[Any, dict[str, Any]]:
        found: tuple[Any, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", dtype=dtype, attn_implementation="eager", output_loading_info=True,
            **({"experts_implementation": "eager"} if model.config["experts"] else {}))  # the grouped one has no fp64
        return found

    theirs, info = load()
    if dtype == torch.float64:  # after the first, for modules that load late keep for good what these names mean then
        monkeypatch.setattr(torch, "float32", dtype)
        monkeypatch.setattr(torch, "float", dtype)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        theirs, info = load()
    assert not [k for what in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info[what]]
    assert next(theirs.parameters()).dtype == dtype
    tokens = torch.randint(0, model.vocab, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = logits(model, root, tokens, dtype), theirs.eval()(tokens).logits
    assert float((want - got).abs().max()) < near
    again = build(tmp_path / "theirs").config
    if name == "style llama, experts":  # no layer has the width of `ffn`, and transformers has no word for `skew`
        assert again["ffn"] == 26
        assert not unlike(again, model.config)
    else:
        assert again == model.config


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_comes_back(name: str, tmp_path: Path) -> None:
    """Its own `save_pretrained`, cut into files; and our weights again, to the bit."""
    transformers = pytest.importorskip("transformers")
    model = build(MODELS[name])
    saved(tmp_path / "ours", model, torch.float32)
    export(tmp_path / "ours", tmp_path / "theirs")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    loaded.save_pretrained(tmp_path / "again", max_shard_size="30KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    for directory in ("theirs", "again"):
        read = open_weights(tmp_path / directory, model)
        for key in shapes(model):
            want = weight(model, key, torch.float32)
            assert torch.equal(read(key, "weights", 3, len(want) - 1), want[3:-1])
    read = open_weights(tmp_path / "ours", model)  # a checkpoint will do as well
    assert torch.equal(read("head/norm.weight", "weights", 0, 5), weight(model, "head/norm.weight", torch.float32)[:5])


def test_base_models_lack_the_first_part_of_their_names(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf = transformers.GPT2Model(transformers.GPT2Config(**CONFIGS["gpt2"]))
    hf.save_pretrained(tmp_path)
    read = Pretrained(tmp_path, build(tmp_path)).read
    q = hf.h[1].attn.c_attn.weight.detach()[:, :48].T
    assert torch.equal(read("layers.1/attention.q.weight", "weights", 48, 96), q[1])


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    odd = build({"style": "gpt", "layers": 1, "hidden": 12, "heads": 2, "vocab": 31, "kv_heads": 1})
    with pytest.raises(InputError, match="no architecture of transformers is decoder; the nearest, gpt2, differs in"):
        family_of(odd)
    with pytest.raises(InputError, match=r"the nearest, mixtral, differs in: experts$"):  # none for all tokens
        family_of(build(MODELS["style llama, experts"] | {"shared_ffn": 20}))
    model = build(GPT)
    saved(tmp_path / "ours", model, torch.float32)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(InputError, match="full: is there already; give a new or empty directory"):
        export(tmp_path / "ours", tmp_path / "full")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "full")]) == 2
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--dtype", "bf16", "--json"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_directory_that_does_not_fit_says_what_differs(tmp_path: Path) -> None:
    model = build(GPT)
    saved(tmp_path / "ours", model, torch.float32)
    there = tmp_path / "theirs"
    export(tmp_path / "ours", there)
    with pytest.raises(InputError, match=r"is of another model than decoder: layers is 3 there and 2 here; ffn is 70"):
        Pretrained(there, build(GPT | {"layers": 2, "ffn": 71}))
    with pytest.raises(InputError, match=r"transformer\.wpe\.weight is 32x48; the model needs 20x48"):
        Pretrained(there, build(GPT | {"max_seq_len": 20})).read("embed/positions.weight", "weights", 0, 1)
    file = there / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"model\.safetensors: is missing, truncated or not a safetensors file"):
        Pretrained(there, model).read("embed/tokens.weight", "weights", 0, 1)
    file.unlink()
    with pytest.raises(InputError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        Pretrained(there, model)


# --- training --------------------------------------------------------------------------------------------------------

ALONE = plan(pipe((0, 5), (0,), samples=6, micro_batch=2))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., TrainResult]]:
    """Train in this process, the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)

    def run(work: Job | None = None, **options: Any) -> TrainResult:
        work = work or job()
        rank = Rank(ALONE, work, CLUSTER, DecoderSource(work), 0)
        found = Options(**options)
        rank.start(weights=Path(found.init_from) if found.init_from else None)
        try:
            result = train_loop(rank, found, lambda message: None, lambda: False)
        finally:
            rank.close()
        assert result is not None
        return result

    yield run
    dist.destroy_process_group()


@pytest.mark.parametrize("figures", [{}, {"style": "llama", "experts": 5, "experts_per_token": 2, "expert_ffn": 12}])
def test_training_from_an_export_goes_on_where_it_was(figures: dict[str, Any], alone: Callable[..., TrainResult],
                                                      tmp_path: Path) -> None:
    work = job(figures=figures)
    alone(work, steps=2, out_dir=str(tmp_path))
    root = tmp_path / "checkpoints"
    export(root, tmp_path / "hf")
    source = DecoderSource(work)
    source.open(0, 0)
    tokens, targets = source.batch(0, 0, 6)
    found = logits(work.model, root, tokens, torch.float64)
    want = float(nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten()))
    for start in ("hf", "checkpoints"):
        assert alone(work, steps=1, init_from=str(tmp_path / start)).losses[0] == pytest.approx(want, rel=1e-9)
    assert abs(alone(work, steps=1).losses[0] - want) > 1e-3
    with pytest.raises(InputError, match="either resume or init_from"):
        train(ALONE, job(), CLUSTER, init_from=tmp_path / "hf", resume=tmp_path)


def test_saving_in_the_background_gives_the_same_checkpoints(
        alone: Callable[..., TrainResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is slow, so that steps go on and the next save finds the one before still being written."""
    waiting = alone(steps=6, out_dir=str(tmp_path / "waiting"), keep=9, checkpoint_every=2)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.05), sync(file)))
    background = alone(steps=6, out_dir=str(tmp_path / "background"), keep=9, checkpoint_every=2, async_save=True)
    assert background.losses == waiting.losses
    for step in (2, 4, 6):
        one, two = (Reader(tmp_path / name / "checkpoints" / f"step-{step:08d}") for name in ("waiting", "background"))
        assert one.state == two.state
        assert [e.sha256 for e in one.index.pieces] == [e.sha256 for e in two.index.pieces]


def test_a_writer_that_fails_names_its_file_and_the_last_checkpoint_stays(
        alone: Callable[..., TrainResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def full(file: int) -> None:
        if list(tmp_path.rglob("step-00000004")):
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"step-00000004/rank-00000-.*: cannot write the checkpoint: No space left"):
        alone(steps=400, out_dir=str(tmp_path), checkpoint_every=2, async_save=True)
    assert Reader(tmp_path / "checkpoints").state.step == 2


@pytest.mark.slow
def test_two_processes_save_in_the_background(tmp_path: Path) -> None:
    two = plan(pipe((0, 2, 5), (0,), (1,), samples=6, micro_batch=2))
    result = train(two, job(), CLUSTER, out_dir=tmp_path, checkpoint_every=1, keep=9, async_save=True)
    assert result is not None
    assert [Reader(path).state.step for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [1, 2, 3, 4]
    again = train(two, job(), CLUSTER, steps=6, resume=tmp_path / "checkpoints" / "step-00000002")
    assert again is not None
    assert again.losses[:2] == result.losses[2:]


def test_until_all_have_written_the_one_before_counts(tmp_path: Path) -> None:
    """Killed at any time before `commit`, what is on the disk is the checkpoint before."""
    write(tmp_path, 100, seed=1)
    state = State(step=200, position=0, seed=1, optimizer="adamw")
    model = build({"style": "gpt", "layers": 2, "hidden": 12, "heads": 2, "ffn": 22, "vocab": 31, "max_seq_len": 9})
    live = [(key, kind, 0, torch.Size(shape.shape).numel(), values(key, kind, 2))
            for key, shape in shapes(model).items() for kind in KINDS]
    saving = Saving(tmp_path, model, state, 0, live, background=True)
    for *_, data in live:
        data.zero_()  # training goes on: the copy must not see it
    while saving.writing:
        time.sleep(0.01)
    assert Reader(tmp_path).state.step == 100
    saving.commit(lambda mine: [mine])
    held = Reader(tmp_path).read("head/norm.weight", "weights", 0, 12)
    assert torch.equal(held, values("head/norm.weight", "weights", 2))
