"""Data: every sample once per epoch, in an order that belongs to the job."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfleet.errors import InputError
from mixfleet.job import Data, Job
from mixfleet.model.families import build
from mixfleet.run import data
from mixfleet.run.data import Batches, Files, Synthetic, open_batches
from mixfleet.samples import permuted

MODEL = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 256, "max_seq_len": 64}


def job(kind="synthetic", path="", **changes):
    vocab = changes.pop("vocab", 256)
    figures = {"name": "x", "model": build(MODEL | {"vocab": vocab}), "seq_len": 7, "global_batch": 5, "seed": 11}
    return Job(**figures | changes, data=Data(kind=kind, path=str(path)))


class Numbers:
    """A corpus of `size` samples [i, i, ...]."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def read(self, indices):
        return np.repeat(indices[:, None], 4, 1)


@given(st.integers(1, 300), st.text(max_size=5))
def test_permutation_is_a_bijection(size, key):
    assert sorted(permuted(np.arange(size), size, key)) == list(range(size))


def test_permutation_mixes():
    found = permuted(np.arange(10_000), 10_000, "a")
    assert abs(np.corrcoef(np.arange(10_000), found)[0, 1]) < 0.05
    assert np.mean(found == permuted(np.arange(10_000), 10_000, "b")) < 0.01
    big = 10**15 + 7
    assert 0 <= permuted(np.array([big - 1]), big, "a")[0] < big


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 23), st.lists(st.integers(0, 23), max_size=4))
def test_every_sample_once_per_epoch_however_a_batch_is_shared(size, batch, cuts):
    """Steps over 3 epochs, batches crossing their ends, each cut at any places into uneven shares."""
    batches = Batches(Numbers(size), batch, seed=3)
    cuts = sorted({0, batch, *(c for c in cuts if c < batch)})
    used = []
    for step in range(-(-3 * size // batch)):
        shares = [batches.samples(step, a, b) for a, b in pairwise(cuts)]
        assert np.array_equal(np.concatenate(shares), batches.samples(step, 0, batch))
        used += np.concatenate(shares).tolist()
    for epoch in range(3):
        assert sorted(used[epoch * size:(epoch + 1) * size]) == list(range(size))
    if size > 20:
        assert used[:size] != used[size:2 * size]


def test_resuming_with_another_batch_skips_and_repeats_nothing():
    before = Batches(Numbers(30), 7, seed=3)
    after = Batches(Numbers(30), 4, seed=3, first_step=2, first_position=before.position(2))
    used = [*before.samples(0, 0, 7), *before.samples(1, 0, 7)]
    used += [i for step in range(2, 6) for i in after.samples(step, 0, 4)]
    assert sorted(used) == list(range(30))
    assert after.position(6) == 30


def test_targets_are_the_tokens_one_later():
    tokens, targets = open_batches(job()).batch(2, 1, 4)
    assert tokens.shape == targets.shape == (3, 7)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_an_empty_share_is_an_empty_batch():
    assert open_batches(job()).batch(0, 2, 2)[0].shape == (0, 7)


# --- synthetic -------------------------------------------------------------------------------------------------------


def test_synthetic_samples_depend_on_seed_and_number_alone():
    corpus = Synthetic(50, 1000, seed=4)
    rows = corpus.read(np.array([9, 2, 900_000]))
    assert np.array_equal(rows[[1]], Synthetic(50, 1000, seed=4).read(np.array([2])))
    assert not np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows, Synthetic(50, 1000, seed=5).read(np.array([9, 2, 900_000])))


def test_synthetic_is_learnable_to_the_loss_that_it_states():
    """A table of counts per pair of tokens, the ideal learner of an order-two chain, reaches 1.2 on fresh samples."""
    corpus = Synthetic(400, 50257, seed=4)
    symbols, train = np.unique(corpus.read(np.arange(400)), return_inverse=True)
    fresh = np.searchsorted(symbols, corpus.read(np.arange(1000, 1050)))
    assert len(symbols) == 32
    counts = np.full((32, 32, 32), 0.05)
    train = train.reshape(400, 401)
    np.add.at(counts, (train[:, :-2], train[:, 1:-1], train[:, 2:]), 1)
    chance = counts / counts.sum(-1, keepdims=True)
    loss = -np.log(chance[fresh[:, :-2], fresh[:, 1:-1], fresh[:, 2:]]).mean()
    assert 1.1 < loss < 1.3


def test_synthetic_with_a_tiny_vocabulary():
    rows = Synthetic(20, 3, seed=1).read(np.arange(5))
    assert rows.min() >= 0
    assert rows.max() < 3


# --- files -----------------------------------------------------------------------------------------------------------


def test_text_directory_is_one_sequence_in_the_order_of_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"fghijkl")
    (tmp_path / "a.txt").write_bytes(b"abcde")
    (tmp_path / "z.txt").write_bytes(b"mnopqrstu")
    (tmp_path / "empty").touch()
    (tmp_path / ".hidden").write_bytes(b"###")
    batches = open_batches(job("text", tmp_path))
    assert len(batches.corpus) == 3  # 21 tokens: targets 1..20, seven at a time
    rows = batches.corpus.read(np.arange(3))
    assert bytes(rows[0].astype(np.uint8)) == b"abcdefgh"
    assert bytes(rows[1].astype(np.uint8)) == b"hijklmno"
    assert bytes(rows[2, :7].astype(np.uint8)) == b"opqrstu"
    assert rows[2, 7] == -1


def test_every_token_but_the_first_is_a_target_once_and_padding_is_masked(tmp_path):
    tokens = np.arange(100, 124, dtype="<u2")  # 23 targets: three samples of seven and one of two
    tokens.tofile(tmp_path / "train.bin")
    batches = open_batches(job("tokens", tmp_path / "train.bin", global_batch=4))
    inputs, targets = batches.batch(0, 0, 4)
    valid = targets != data.MASKED
    assert sorted(targets[valid].tolist()) == list(range(101, 124))
    assert torch.equal(targets[valid], inputs[valid] + 1)
    assert Counter(valid.sum(1).tolist()) == {7: 3, 2: 1}
    assert inputs.min() >= 0


def test_relative_paths_start_at_the_base(tmp_path):
    (tmp_path / "t.txt").write_bytes(bytes(range(65, 90)))
    assert len(open_batches(job("text", "t.txt"), tmp_path).corpus) == 4


@pytest.mark.parametrize(("kind", "name", "message"), [
    ("text", "shakespaere.txt", "did you mean 'shakespeare.txt'"),
    ("text", "none/such/file", "unknown data file 'none'"),
    ("text", "shakespeare.txt/x", "is not a directory"),
    ("text", "short.txt", "holds 7 tokens; one sample is 8"),
    ("text", "empty", "holds no files"),
    ("tokens", "odd.bin", "odd.bin: has 21 bytes; a token takes 2"),
    ("tokens", "empty", "is a directory"),
])
def test_bad_paths(tmp_path, kind, name, message):
    (tmp_path / "shakespeare.txt").write_bytes(b"x" * 50)
    (tmp_path / "short.txt").write_bytes(b"1234567")
    (tmp_path / "odd.bin").write_bytes(b"x" * 21)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        open_batches(job(kind, name), tmp_path)


def test_a_token_outside_the_vocabulary_names_file_and_value(tmp_path, monkeypatch):
    np.array([1, 2, 3, 299, 5, 6, 7, 8, 9, 10], "<u2").tofile(tmp_path / "train.bin")
    with pytest.raises(InputError, match=r"train\.bin: holds token 299; the model's vocabulary has 256"):
        open_batches(job("tokens", "train.bin"), tmp_path)
    (tmp_path / "t.txt").write_bytes(b"x" * 20)
    with pytest.raises(InputError, match=r"t\.txt: holds token 120; the model's vocabulary has 100"):
        open_batches(job("text", "t.txt", vocab=100), tmp_path)
    monkeypatch.setattr(data, "_SCANNED", 2)
    corpus = Files([tmp_path / "train.bin"], 7, 256, np.dtype("<u2"), where="")
    with pytest.raises(InputError, match="holds token 299"):
        corpus.read(np.array([0]))
    assert corpus.read(np.array([1]))[0, :3].tolist() == [8, 9, 10]
