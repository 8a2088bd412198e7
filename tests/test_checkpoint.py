"""Checkpoints: any plan reads what any plan wrote, and nothing broken is ever read."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from mixfleet.errors import InputError
from mixfleet.model.families import build
from mixfleet.run import checkpoint
from mixfleet.run.checkpoint import Reader, Saving, State, latest, shapes
from mixfleet.run.modules import initial_values

torch.set_num_threads(1)
MODEL = build({"style": "gpt", "layers": 2, "hidden": 12, "heads": 2, "ffn": 22, "vocab": 31, "max_seq_len": 9})
KINDS = {"weights": torch.float32, "exp_avg": torch.bfloat16}


def count(key):
    return torch.Size(shapes(MODEL)[key].shape).numel()


def values(key, kind, seed=0):
    """The whole flat tensor that a checkpoint should hold."""
    return initial_values(MODEL, seed + (kind != "weights"), key, 0, count(key)).to(KINDS[kind])


def pieces_of(ranks, seed=0, shuffle=0):
    """Every tensor cut at random places (empty pieces too) among ranks."""
    generator = random.Random(shuffle)
    found = [[] for _ in range(ranks)]
    for key in shapes(MODEL):
        for kind in KINDS:
            n = count(key)
            cuts = sorted(generator.randint(0, n) for _ in range(ranks - 1))
            for rank, (lo, hi) in enumerate(zip([0, *cuts], [*cuts, n])):
                found[rank].append((key, kind, lo, hi, values(key, kind, seed)[lo:hi]))
    return found


def write(root, step=100, ranks=3, seed=0, keep=2, pieces=None, model=MODEL, background=False):
    state = State(step=step, position=step * 7, seed=1, optimizer="adamw", extra={"updates": step})
    gathered = []

    def gather(mine):
        gathered.append(mine)
        return gathered if len(gathered) == ranks else None

    for rank, mine in enumerate(pieces or pieces_of(ranks, seed, step)):
        path = Saving(root, model, state, rank, mine, background=background).commit(gather, keep=keep)
    return path


def read_all(path, seed=0):
    reader = Reader(path)
    for key in shapes(MODEL):
        for kind, dtype in KINDS.items():
            found = reader.read(key, kind, 0, count(key))
            assert found.dtype == dtype
            assert torch.equal(found, values(key, kind, seed))
    return reader


@pytest.mark.parametrize("written", [1, 2, 5])
def test_any_interval_of_what_any_number_of_ranks_wrote(tmp_path, written, monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK", 50)
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 900)
    path = write(tmp_path, ranks=written)
    assert path == tmp_path / "step-00000100"
    assert len(list(path.glob("*.safetensors"))) > written
    reader = read_all(tmp_path)
    reader.check(MODEL)
    assert reader.kinds == ("exp_avg", "weights")
    assert (reader.state.step, reader.state.position, reader.state.extra) == (100, 700, {"updates": 100})
    for ranks in (2, 3, 400):  # also more ranks than rows
        for key in shapes(MODEL):
            n = count(key)
            for j in range(0, ranks, max(1, ranks // 7)):
                lo, hi = n * j // ranks, n * (j + 1) // ranks
                assert torch.equal(reader.read(key, "weights", lo, hi), values(key, "weights")[lo:hi])


def test_chunks_of_the_default_size(tmp_path):
    read_all(write(tmp_path, ranks=2))


def test_the_newest_stay_and_latest_names_one(tmp_path):
    for step in (100, 200, 300):
        write(tmp_path, step, seed=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000200", "step-00000300"]
    assert latest(tmp_path).name == "step-00000300"
    read_all(tmp_path / "step-00000200", seed=200)
    read_all(tmp_path, seed=300)


def test_going_back_keeps_what_was_just_written(tmp_path):
    for step in (100, 200, 300):
        write(tmp_path, step, keep=3)
    write(tmp_path, 150, seed=5, keep=1)
    assert latest(tmp_path).name == "step-00000150"
    read_all(tmp_path, seed=5)
    assert not (tmp_path / "step-00000100").exists()


def test_the_same_step_again_replaces_the_old(tmp_path):
    write(tmp_path, ranks=3, seed=1)
    before = set(tmp_path.rglob("*.safetensors"))
    write(tmp_path, ranks=2, seed=2)
    read_all(tmp_path, seed=2)
    assert not before & set(tmp_path.rglob("*.safetensors"))


# --- broken saves ----------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_previous(tmp_path, monkeypatch):
    write(tmp_path, 100, seed=1)
    broken = pieces_of(2)
    broken[1].remove(next(piece for piece in broken[1] if piece[2] < piece[3]))  # an empty one would not be missed
    with pytest.raises(ValueError, match=r"the ranks did not give elements \["):
        write(tmp_path, 200, ranks=2, pieces=broken)
    read_all(tmp_path, seed=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"step-00000300/rank-00000-.*: cannot write the checkpoint: No space left"):
        write(tmp_path, 300)
    monkeypatch.undo()
    assert not list((tmp_path / "step-00000300").iterdir())
    read_all(tmp_path, seed=1)
    write(tmp_path, 400, seed=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000100", "step-00000400"]


KILLED = """
import sys, torch
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_checkpoint import write
print("ready", flush=True)
for step in range(101, 100000):
    write(Path({root!r}), step, ranks=2, seed=step)
"""


def test_a_process_killed_while_it_saves_leaves_a_good_checkpoint(tmp_path):
    write(tmp_path, 100, seed=100)
    code = KILLED.format(tests=os.path.dirname(__file__), root=str(tmp_path))
    generator = random.Random(0)
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert worker.stdout.readline() == b"ready\n"
    for _ in range(25):  # stopped, what a reader sees is what it would see after a kill
        time.sleep(generator.uniform(0.005, 0.02))
        worker.send_signal(signal.SIGSTOP)
        reader = Reader(tmp_path)
        read_all(reader.path, seed=reader.state.step)
        worker.send_signal(signal.SIGCONT)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    reader = Reader(tmp_path)
    assert reader.state.step > 100
    read_all(tmp_path, seed=reader.state.step)


# --- broken files ----------------------------------------------------------------------------------------------------


def first_file(path):
    return sorted(path.glob("rank-*"))[0]


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "message"), [
    (cut_off, "is missing, truncated or not a safetensors file"), (flip, "is corrupted: .* does not have the checksum"),
    (lambda path: path.write_bytes(b""), "is missing, truncated"), (lambda path: path.unlink(), "is missing"),
    (lambda path: path.write_bytes(b"\x80\x04K\x01."), "is missing, truncated")])
def test_damaged_files_are_named(tmp_path, damage, message):
    path = write(tmp_path)
    file = first_file(path)
    damage(file)
    with pytest.raises(InputError, match=f"{file.name}.*{message}"):
        read_all(path)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda text: text[:-40], "corrupted or not a checkpoint's index"), (lambda text: b"", "corrupted or not"),
    (lambda text: text.replace(b'"step":100', b'"step":108'), "its checksum does not match")])
def test_a_damaged_index_is_named(tmp_path, damage, message):
    index = write(tmp_path) / "index.json"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(InputError, match=f"index.json.*{message}"):
        Reader(tmp_path)


def test_another_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 7)
    write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(InputError, match="is of checkpoint format 7; this version reads 1"):
        Reader(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        Reader(tmp_path)
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        Reader(tmp_path / "absent")


def test_another_model_names_the_tensors_that_differ(tmp_path):
    write(tmp_path)
    other = build({"style": "gpt", "layers": 3, "hidden": 12, "heads": 2, "ffn": 26, "vocab": 31, "max_seq_len": 9})
    message = r"layers\.0/mlp\.up\.weight is 22x12 split along 0 there and 26x12 split along 0 here; .*; \d+ more"
    with pytest.raises(InputError, match=message):
        Reader(tmp_path).check(other)


def test_what_is_not_stored_is_named(tmp_path):
    write(tmp_path)
    with pytest.raises(InputError, match=r"holds no momentum of head/norm\.bias; it holds exp_avg, weights"):
        Reader(tmp_path).read("head/norm.bias", "momentum", 0, 1)
