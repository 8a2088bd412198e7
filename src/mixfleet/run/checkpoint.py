"""Checkpoints that any plan can read, whatever plan wrote them. See `docs/checkpoints.md` for the files.

State is stored as intervals of tensors in their canonical flat order (split dimension first), in chunks that carry a
checksum each. The index is written last and replaced in one step: a save that is killed leaves nothing that a reader
would take for a checkpoint, and what was there before stays as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mixfleet.errors import InputError
from mixfleet.files import write_text
from mixfleet.model.spec import Model
from mixfleet.spec import Spec

FORMAT = 1
_CHUNK = 2**24
"""Largest number of elements under one checksum: what a reader of a few elements has to read."""
_FILE_BYTES = 2**30
_STEP = re.compile(r"step-(\d{8,})")
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Piece = tuple[str, str, int, int, Tensor]
"""Tensor key (`block.name/param.name`), kind (`weights`, or a moment of the optimizer), lo, hi, elements [lo, hi)."""


class Entry(Spec, frozen=True, kw_only=True):
    """A chunk: elements [lo, hi) of `kind` of `tensor`, stored under `name` in `file`."""

    tensor: str
    kind: str
    lo: int
    hi: int
    file: str
    name: str
    sha256: str


class TensorShape(Spec, frozen=True, kw_only=True):
    """Whole shape of a tensor, and the dimension that comes first in its flat order."""

    shape: tuple[int, ...]
    split: int | None = None


class State(Spec, frozen=True, kw_only=True):
    """Where training stands: `step` steps are done, and the next sample is at `position` of the job's order."""

    step: int
    position: int
    seed: int
    optimizer: str
    extra: dict[str, Any] = {}


class _Signed(Spec, frozen=True, kw_only=True):
    sha256: str
    index: msgspec.Raw


class Index(Spec, frozen=True, kw_only=True):
    """What a checkpoint holds."""

    format: int
    model: str
    family: str = ""
    figures: dict[str, Any] = {}
    """What the model was built from, so that a checkpoint can be exported by itself."""
    tensors: dict[str, TensorShape]
    state: State
    pieces: tuple[Entry, ...]


def shapes(model: Model) -> dict[str, TensorShape]:
    """All tensors of a model by key; tied ones appear once, under their owner."""
    return {f"{block.name}/{p.name}": TensorShape(shape=p.shape, split=p.split)
            for block in model.blocks for p in block.params if not p.tied}


class Saving:
    """A checkpoint that one rank of several writes; every element of every kind comes from at least one rank.

    With `background` the pieces are copied to host memory, and a thread writes the copies while training goes on. Until
    `commit` the checkpoint does not count, and the one before is what a reader finds. InputError names the file that
    cannot be written: from here, or with `background` from `writing` and `commit`.
    """

    def __init__(self, root: Path, model: Model, state: State, rank: int, pieces: Iterable[Piece], *,
                 background: bool = False) -> None:
        self._root, self._model, self._state = root, model, state
        self.directory = root / f"step-{state.step:08d}"
        self._entries: list[Entry] = []
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if background:
            pieces = [(tensor, kind, lo, hi, data.detach().to("cpu", copy=True))
                      for tensor, kind, lo, hi, data in pieces]
            self._thread = threading.Thread(target=self._write, args=(rank, pieces), daemon=True)
            self._thread.start()
        else:
            self._write(rank, pieces)
            self._check()

    def _write(self, rank: int, pieces: Iterable[Piece]) -> None:
        try:
            self._entries = _write(self.directory, rank, pieces)
        except Exception as error:
            self._error = error

    def _check(self) -> None:
        if self._error:
            raise self._error

    @property
    def writing(self) -> bool:
        """Whether this rank has something left to write."""
        self._check()
        return self._thread is not None and self._thread.is_alive()

    def commit(self, gather: Callable[[list[Entry]], Sequence[list[Entry]] | None], *, keep: int = 2) -> Path:
        """Wait for the writer, then make the checkpoint count, all ranks together; the newest `keep` stay.

        `gather` is called once on every rank: it returns all ranks' lists on the rank that commits, None on the others.
        Returns the checkpoint's directory.
        """
        if self._thread:
            self._thread.join()
        self._check()
        everything = gather(self._entries)
        if everything is not None:
            model = self._model
            index = Index(format=FORMAT, model=model.name, family=model.family, figures=model.config,
                          tensors=shapes(model), state=self._state,
                          pieces=tuple(entry for rank_entries in everything for entry in rank_entries))
            for gap in _gaps(index):
                raise ValueError(f"the ranks did not give {gap}")
            try:
                _commit(self.directory, index)
                _prune(self._root, self._state.step, keep)
            except OSError as error:
                raise InputError(f"cannot write the checkpoint: {error.strerror or error}",
                                 where=str(self.directory)) from error
        return self.directory


def _write(directory: Path, rank: int, pieces: Iterable[Piece]) -> list[Entry]:
    """One rank's files, under names that no other save uses; they count only once an index names them."""
    chunks = ((tensor, kind, a, b, data[a - lo:b - lo])
              for tensor, kind, lo, hi, data in pieces for a, b in _cut(lo, hi))
    entries: list[Entry] = []
    save_id = os.urandom(4).hex()
    for number, batch in enumerate(_batches(chunks)):
        path = directory / f"rank-{rank:05d}-{save_id}-{number}.safetensors"
        names = [f"{kind}:{tensor}:{lo}" for tensor, kind, lo, *_ in batch]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with removed_on_failure(path):
                sums = write_safetensors(path, [(name, data.dtype, tuple(data.shape)) for name, (*_, data)
                                                in zip(names, batch)], (data for *_, data in batch))
        except OSError as error:
            raise InputError(f"cannot write the checkpoint: {error.strerror or error}", where=str(path)) from error
        entries += [Entry(tensor=tensor, kind=kind, lo=lo, hi=hi, file=path.name, name=name, sha256=digest)
                    for name, digest, (tensor, kind, lo, hi, _) in zip(names, sums, batch)]
    return entries


def _batches(chunks: Iterable[Piece]) -> Iterator[list[Piece]]:
    """What goes to one file: the pieces may be copies, so no more than `_FILE_BYTES` of them are held."""
    batch: list[Piece] = []
    nbytes = 0
    for chunk in chunks:
        batch.append(chunk)
        nbytes += chunk[4].nbytes
        if nbytes >= _FILE_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def write_safetensors(path: Path, tensors: list[tuple[str, torch.dtype, tuple[int, ...]]],
                      data: Iterable[Tensor], metadata: dict[str, str] | None = None) -> list[str]:
    """Stream tensors to a file, one in memory at a time; returns their SHA-256.

    The format is eight bytes of header length, a JSON header, and the data (safetensors documentation, "Format").
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = []
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in data:
            raw = _raw(tensor)
            sums.append(hashlib.sha256(raw).hexdigest())
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return sums


def _commit(directory: Path, index: Index) -> None:
    """From here on the checkpoint counts: the index, then `latest`, each replaced in one step."""
    used = {entry.file for entry in index.pieces}
    for name in sorted(used):
        if not (directory / name).is_file():
            raise InputError(f"{name} is not there: checkpoints need a directory that all machines share",
                             where=str(directory))
    content = msgspec.json.encode(index)
    signed = _Signed(sha256=hashlib.sha256(content).hexdigest(), index=msgspec.Raw(content))
    _replace(directory / "index.json", msgspec.json.encode(signed).decode())
    _replace(directory.parent / "latest", f"{directory.name}\n")
    for path in directory.glob("rank-*.safetensors"):
        if path.name not in used:
            path.unlink()


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, and the directory's entry for it to the disk."""
    write_text(path, text)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _prune(root: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step` keep the newest; remove what killed saves left. Each loses its index first."""
    kept = [path for found, path in _steps(root) if found <= step][:max(keep, 1)]
    for path in root.iterdir():
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) <= step and path not in kept:
            (path / "index.json").unlink(missing_ok=True)
            shutil.rmtree(path)


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Steps and directories that have an index, newest first."""
    found = [(int(match[1]), path) for path in root.glob("step-*")
             if (match := _STEP.fullmatch(path.name)) and (path / "index.json").is_file()]
    return sorted(found, reverse=True)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint below `root`, None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        name = (root / "latest").read_text(encoding="utf-8").strip()
        if _STEP.fullmatch(name) and (root / name / "index.json").is_file():
            return root / name
    return next((path for _, path in _steps(root)), None)


class Reader:
    """An open checkpoint. `path` is its directory, or the directory that holds checkpoints (then the newest).

    Raises InputError, with the file's name, for whatever is missing, truncated, altered or of another version.
    """

    def __init__(self, path: Path) -> None:
        found = path if (path / "index.json").is_file() else latest(path)
        if found is None:
            raise InputError("holds no complete checkpoint", where=str(path))
        self.path = found
        self.index = _read_index(found / "index.json")
        for gap in _gaps(self.index):
            raise InputError(f"lacks {gap}", where=str(found / "index.json"))
        self._entries: dict[tuple[str, str], list[Entry]] = {}
        for entry in sorted(self.index.pieces, key=lambda e: (e.lo, -e.hi)):
            self._entries.setdefault((entry.tensor, entry.kind), []).append(entry)
        self._chunk = lru_cache(maxsize=1)(self._read_chunk)
        self._file = lru_cache(maxsize=16)(self._open_file)

    @property
    def state(self) -> State:
        return self.index.state

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of state stored, sorted."""
        return tuple(sorted({kind for _, kind in self._entries}))

    def check(self, model: Model) -> None:
        """InputError if the checkpoint is of another model: it names the first tensors that differ."""
        mine, theirs = self.index.tensors, shapes(model)
        differ = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
        if differ:
            shown = "; ".join(f"{key} is {_shape(mine.get(key))} there and {_shape(theirs.get(key))} here"
                              for key in differ[:3])
            more = f"; {len(differ) - 3} more" if len(differ) > 3 else ""
            raise InputError(f"is of model {self.index.model}, not {model.name}: {shown}{more}", where=str(self.path))

    def read(self, tensor: str, kind: str, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a tensor's flat order, 1-D on the CPU, in the stored type."""
        entries = self._entries.get((tensor, kind))
        if entries is None:
            raise InputError(f"holds no {kind} of {tensor}; it holds {', '.join(self.kinds)}", where=str(self.path))
        parts: list[Tensor] = []
        at = lo
        for entry in entries:
            if entry.hi > at and entry.lo < hi:
                parts.append(self._chunk(entry)[at - entry.lo:min(hi, entry.hi) - entry.lo])
                at = min(hi, entry.hi)
        if at < hi:
            raise ValueError(f"[{lo}, {hi}) is outside {tensor}")
        return torch.cat(parts) if parts else self._chunk(entries[0])[:0].clone()

    def whole(self, tensor: str, kind: str) -> Tensor:
        """All of a tensor, in its torch shape."""
        found = self.index.tensors[tensor]
        first = found.split or 0
        moved = [found.shape[first], *(n for d, n in enumerate(found.shape) if d != first)]
        return self.read(tensor, kind, 0, torch.Size(found.shape).numel()).view(moved).movedim(0, first)

    def _read_chunk(self, entry: Entry) -> Tensor:
        path = self.path / entry.file
        try:
            data: Tensor = self._file(path).get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"is missing, truncated or not a safetensors file: {error}", where=str(path)) from None
        if data.shape != (entry.hi - entry.lo,) or hashlib.sha256(_raw(data)).hexdigest() != entry.sha256:
            raise InputError(f"is corrupted: {entry.kind} of {entry.tensor} [{entry.lo}, {entry.hi}) "
                             "does not have the checksum of the index", where=str(path))
        return data

    @staticmethod
    def _open_file(path: Path) -> Any:
        return safe_open(path, framework="pt")


def _read_index(path: Path) -> Index:
    try:
        signed = msgspec.json.decode(path.read_bytes(), type=_Signed)
        if hashlib.sha256(signed.index).hexdigest() != signed.sha256:
            raise InputError("is corrupted: its checksum does not match", where=str(path))
        version = msgspec.json.decode(signed.index)["format"]
        if version != FORMAT:
            raise InputError(f"is of checkpoint format {version}; this version reads {FORMAT}", where=str(path))
        return msgspec.json.decode(signed.index, type=Index)
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror or error}", where=str(path)) from None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise InputError(f"is corrupted or not a checkpoint's index: {error}", where=str(path)) from None


def _gaps(index: Index) -> Iterator[str]:
    """Elements of a tensor that no piece holds, for weights and every other kind that is stored at all."""
    held: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for entry in index.pieces:
        held.setdefault((entry.kind, entry.tensor), []).append((entry.lo, entry.hi))
    for kind in sorted({kind for kind, _ in held} | {"weights"}):
        for tensor, shape in index.tensors.items():
            count, at = torch.Size(shape.shape).numel(), 0
            for lo, hi in sorted([*held.get((kind, tensor), ()), (count, count)]):
                if lo > at:
                    yield f"elements [{at}, {lo}) of {kind} of {tensor}"
                at = max(at, hi)


def _cut(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + _CHUNK, hi)) for a in range(lo, hi, _CHUNK))


def _shape(found: TensorShape | None) -> str:
    return "absent" if found is None else "x".join(map(str, found.shape)) + (
        "" if found.split is None else f" split along {found.split}")


def _raw(data: Tensor) -> memoryview:
    """The bytes of a tensor. bf16 has no numpy type, so it goes as bytes."""
    return data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@contextlib.contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Of a file or directory that is written."""
    try:
        yield
    except BaseException:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        raise
