"""Weights to and from directories of Hugging Face's `transformers`: `config.json` beside safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mixfleet.errors import InputError
from mixfleet.files import write_text
from mixfleet.model.families import build, restored
from mixfleet.model.huggingface import Weight, family_of, unlike, weights
from mixfleet.model.spec import Model
from mixfleet.run.checkpoint import Reader, removed_on_failure, shapes, write_safetensors
from mixfleet.run.state import DTYPES, Read
from mixfleet.units import GB

SHARD_BYTES = 5 * GB
"""Most that one file holds by default, as `transformers` has it."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def export(checkpoint: Path, output: Path, *, dtype: str = "", shard_bytes: int = SHARD_BYTES) -> tuple[Path, ...]:
    """Write a checkpoint's weights as a directory that `transformers` loads; returns its files, `config.json` last.

    `dtype` is the name of a precision; empty keeps the stored type, that of the master weights where there are any. One
    tensor is in memory at a time. The directory appears in one step, when it is complete. Raises InputError.
    """
    reader = Reader(checkpoint)
    if not reader.index.family:
        raise InputError("does not say which figures its model has: an older version wrote it", where=str(reader.path))
    if reader.index.family == "modules":
        raise InputError("is of modules of your own, which transformers does not know", where=str(reader.path))
    model = restored(reader.index.model, reader.index.family, reader.index.figures)
    reader.check(model)
    family, config = family_of(model)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError("is there already; give a new or empty directory", where=str(output))
    found = list(weights(model, family))
    kind = DTYPES[dtype] if dtype else reader.read(found[0].parts[0], "weights", 0, 0).dtype
    config["torch_dtype"] = str(kind).removeprefix("torch.")
    files = _files(found, kind.itemsize, shard_bytes)
    scratch = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        with removed_on_failure(scratch):
            scratch.mkdir(parents=True)
            for file, part in files.items():
                write_safetensors(scratch / file, [(w.name, kind, w.shape) for w in part],
                                  (_joined(w, reader, model.heads).to(kind) for w in part), {"format": "pt"})
            if len(files) > 1:
                total = sum(_count(w) * kind.itemsize for w in found)
                write_text(scratch / _INDEX, json.dumps({
                    "metadata": {"total_size": total},
                    "weight_map": {w.name: file for file, part in files.items() for w in part}}, indent=2))
            write_text(scratch / "config.json", json.dumps(config, indent=2) + "\n")
            if output.exists():
                output.rmdir()
            os.replace(scratch, output)
    except OSError as error:
        raise InputError(f"cannot write it: {error.strerror or error}", where=str(output)) from error
    return tuple(output / name for name in (*files, *([_INDEX] if len(files) > 1 else []), "config.json"))


def _count(weight: Weight) -> int:
    return torch.Size(weight.shape).numel()


def _files(found: Sequence[Weight], itemsize: int, most: int) -> dict[str, list[Weight]]:
    """Weights by file, in order; a file holds at most `most` bytes, or one tensor."""
    parts: list[list[Weight]] = [[]]
    filled = 0
    for weight in found:
        nbytes = _count(weight) * itemsize
        if parts[-1] and filled + nbytes > most:
            parts.append([])
            filled = 0
        parts[-1].append(weight)
        filled += nbytes
    if len(parts) == 1:
        return {_SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _joined(weight: Weight, reader: Reader, heads: int) -> Tensor:
    """The tensor as `transformers` has it, from whole tensors of ours, or one expert's part of them."""
    if weight.expert >= 0:
        n = _count(weight)
        return reader.read(weight.parts[0], "weights", weight.expert * n, (weight.expert + 1) * n).view(weight.shape)
    parts = [reader.whole(part, "weights") for part in weight.parts]
    if weight.form == "by head":
        return torch.stack([p.view(heads, -1, *p.shape[1:]) for p in parts], 1).flatten(0, 2)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.T.contiguous() if weight.form == "transposed" and whole.ndim == 2 else whole


def _taken_apart(weight: Weight, whole: Tensor, heads: int) -> Sequence[Tensor]:
    """The inverse of `_joined`: tensors of ours, in the order of the parts."""
    if weight.form == "by head":
        return [p.flatten(0, 1) for p in whole.view(heads, len(weight.parts), -1, *whole.shape[1:]).unbind(1)]
    return torch.split(whole.T if weight.form == "transposed" and whole.ndim == 2 else whole, list(weight.rows))


class Pretrained:
    """The weights of a directory in the format of `transformers`, for a model of the same figures.

    Base models, whose names lack the first part (`h.0.` for `transformer.h.0.`), are read as well. Raises InputError:
    for another model with the figures that differ, for files that are missing or damaged, for tensors that are
    missing or of another shape.
    """

    def __init__(self, directory: Path, model: Model) -> None:
        self._directory, self._model = directory, model
        there = build(directory)
        differ = [f"{name} is {there.config[name]} there and {model.config[name]} here"
                  for name in unlike(there.config, model.config) if name != "max_seq_len"]
        if differ:
            raise InputError(f"is of another model than {model.name}: {'; '.join(differ[:3])}", where=str(directory))
        family, _ = family_of(there)
        self._shapes = shapes(model)
        self._of: dict[str, list[Weight]] = {}
        for weight in weights(model, family):
            for part in weight.parts:
                self._of.setdefault(part, []).append(weight)
        self._file_of = self._map()
        self._parts = lru_cache(maxsize=2)(self._read)

    def _map(self) -> dict[str, str]:
        """File by name of tensor."""
        index = self._directory / _INDEX
        if index.is_file():
            try:
                found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {str(name): str(file) for name, file in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"is not an index of weights: {error}", where=str(index)) from None
        if not (self._directory / _SINGLE).is_file():
            raise InputError(f"holds neither {_SINGLE} nor {_INDEX}", where=str(self._directory))
        return dict.fromkeys(self._open(_SINGLE, lambda file: list(file.keys())), _SINGLE)

    def _open(self, file: str, use: Callable[[Any], Any]) -> Any:
        path = self._directory / file
        try:
            with safe_open(path, framework="pt") as opened:
                return use(opened)
        except (OSError, SafetensorError) as error:
            raise InputError(f"is missing, truncated or not a safetensors file: {error}", where=str(path)) from None

    def _names(self, name: str) -> Iterator[str]:
        yield name
        yield name.partition(".")[2]
        if name == "embed_out.weight":
            yield "lm_head.weight"

    def _read(self, weight: Weight) -> dict[str, Tensor]:
        name = next((n for n in self._names(weight.name) if n in self._file_of), None)
        if name is None:
            raise InputError(f"holds no {weight.name}", where=str(self._directory))
        whole = self._open(self._file_of[name], lambda file: file.get_tensor(name))
        if tuple(whole.shape) != weight.shape:
            raise InputError(f"{name} is {'x'.join(map(str, whole.shape))}; the model needs "
                             f"{'x'.join(map(str, weight.shape))}", where=str(self._directory / self._file_of[name]))
        return dict(zip(weight.parts, _taken_apart(weight, whole, self._model.heads)))

    def read(self, tensor: str, kind: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a tensor's canonical flat order, its cut dimension first, in the stored type."""
        one, *others = self._of[tensor]
        if others:  # a tensor for each expert, one after another
            n = _count(one)
            first, end = lo // n, max(lo // n + 1, -(-hi // n))
            some = [self._parts(weight)[tensor].reshape(-1) for weight in self._of[tensor][first:end]]
            return torch.cat(some)[lo - first * n:hi - first * n]
        value = self._parts(one)[tensor]
        return value.movedim(self._shapes[tensor].split or 0, 0).reshape(-1)[lo:hi]


def open_weights(path: Path, model: Model) -> Read:
    """Weights to start from: a directory of `transformers`, or a checkpoint of any plan (weights only)."""
    if (path / "config.json").is_file():
        return Pretrained(path, model).read
    reader = Reader(path)
    reader.check(model)
    return reader.read
