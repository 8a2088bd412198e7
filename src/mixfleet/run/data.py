"""Samples by global position: which tokens a step trains on depends on the job alone, never on the plan.

A sample is `seq_len + 1` consecutive tokens, the first of which is the last target of the sample before, so every
token of a corpus is a target exactly once per epoch. An epoch is a keyed permutation of the samples that is computed
element by element: any rank finds any position without storage, and a change of plan changes nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfleet.errors import InputError, unknown
from mixfleet.job import Job

MASKED = -100
"""Target of a position that is padding: the loss ignores it."""

_SYNTHETIC_SAMPLES = 2**20
_SYMBOLS = 32
_LIKELY, _SECOND = 0.6, 0.9
_SCANNED = 2**26
"""Tokens that are checked when a file is opened; every other token is checked when it is read."""

Indices = NDArray[np.int64]


class Corpus(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def read(self, indices: Indices) -> Indices:
        """Tokens [len(indices), seq_len + 1]; negative ones are padding after the end of the corpus."""


class Batches:
    """The order of samples: position p is sample `permutation of epoch p // len(corpus)` at `p % len(corpus)`.

    `first_step` starts at `first_position`, so a resumed job may change its batch and still use every sample once.
    """

    def __init__(self, corpus: Corpus, global_batch: int, seed: int, *, first_step: int = 0,
                 first_position: int = 0) -> None:
        self.corpus, self.global_batch, self.seed = corpus, global_batch, seed
        self._first_step, self._first_position = first_step, first_position

    def position(self, step: int) -> int:
        """Samples used before `step`, over all epochs: the whole state of the data."""
        return self._first_position + (step - self._first_step) * self.global_batch

    def samples(self, step: int, lo: int, hi: int) -> Indices:
        """Sample numbers at places [lo, hi) of the step's global batch."""
        if not 0 <= lo <= hi <= self.global_batch:
            raise ValueError(f"places [{lo}, {hi}) are not in a batch of {self.global_batch}")
        size = len(self.corpus)
        epoch, place = np.divmod(self.position(step) + np.arange(lo, hi, dtype=np.int64), size)
        found = np.empty_like(place)
        for e in np.unique(epoch):
            found[epoch == e] = permuted(place[epoch == e], size, f"{self.seed}/epoch/{e}")
        return found

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [hi - lo, seq_len], of places [lo, hi) of the step; padding has target -100."""
        rows = torch.from_numpy(self.corpus.read(self.samples(step, lo, hi)))
        tokens, targets = rows[:, :-1], rows[:, 1:]
        return tokens.clamp(min=0), targets.masked_fill(targets < 0, MASKED)


def open_batches(job: Job, base: Path = Path(), *, first_step: int = 0, first_position: int = 0) -> Batches:
    """The job's data; `base` is the directory that a relative `data.path` starts from.

    Raises InputError for a missing path, a corpus shorter than one sample, or a token outside the vocabulary.
    """
    vocab = job.model.vocab
    corpus: Corpus
    if job.data.kind == "synthetic":
        corpus = Synthetic(job.seq_len, vocab, job.seed)
    else:
        path = base / Path(job.data.path).expanduser()
        if not path.exists():
            raise _missing(path)
        if job.data.kind == "tokens" and not path.is_file():
            raise InputError("is a directory; data kind 'tokens' needs a file of uint16 tokens", where=str(path))
        corpus = Files(_text_files(path) if job.data.kind == "text" else [path], job.seq_len, vocab,
                       np.dtype(np.uint8) if job.data.kind == "text" else np.dtype("<u2"), where=str(path))
    return Batches(corpus, job.global_batch, job.seed, first_step=first_step, first_position=first_position)


class Synthetic:
    """Sequences of a fixed random Markov chain of order two over at most 32 symbols; nothing is stored.

    The next token is, with probability 0.6, one that follows from the last token; with 0.3, one that follows from
    the last two; else any. A model that has learned the chain has a loss of about 1.2, one that knows only which
    symbols occur, log(32) = 3.5.
    """

    def __init__(self, seq_len: int, vocab: int, seed: int, samples: int = _SYNTHETIC_SAMPLES) -> None:
        self._length, self._samples, self._seed = seq_len + 1, samples, seed
        symbols = min(vocab, _SYMBOLS)
        rule = np.random.Generator(np.random.Philox(key=_key(f"{seed}/rule")))
        self._tokens = rule.permutation(vocab)[:symbols].astype(np.int64)
        self._one = rule.integers(symbols, size=symbols)
        self._two = rule.integers(symbols, size=(symbols, symbols))

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: Indices) -> Indices:
        symbols, key = len(self._tokens), _key(f"{self._seed}/sample")
        draws = [np.random.Generator(np.random.Philox(key=key, counter=[0, 0, int(i), 0])) for i in indices]
        chance = np.stack([d.random(self._length) for d in draws]) if draws else np.empty((0, self._length))
        rows = np.stack([d.integers(symbols, size=self._length) for d in draws]) if draws else chance.astype(np.int64)
        for i in range(2, self._length):
            before, last, p = rows[:, i - 2], rows[:, i - 1], chance[:, i]
            rows[:, i] = np.where(p < _LIKELY, self._one[last],
                                  np.where(p < _SECOND, self._two[before, last], rows[:, i]))
        return self._tokens[rows]


class Files:
    """Files of fixed-width tokens, one after another as one sequence, memory-mapped; the last sample is padded."""

    def __init__(self, paths: list[Path], seq_len: int, vocab: int, dtype: np.dtype[np.generic], *, where: str) -> None:
        sizes = [path.stat().st_size for path in paths]
        for path, size in zip(paths, sizes):
            if size % dtype.itemsize:
                raise InputError(f"has {size} bytes; a token takes {dtype.itemsize}, so it is truncated",
                                 where=str(path))
        filled = [(path, size // dtype.itemsize) for path, size in zip(paths, sizes) if size]
        self._paths = [path for path, _ in filled]
        self._ends = list(accumulate(count for _, count in filled))
        self._total = self._ends[-1] if self._ends else 0
        self._seq_len, self._vocab, self._dtype = seq_len, vocab, dtype
        if self._total <= seq_len:
            raise InputError(f"holds {self._total} tokens; one sample is {seq_len + 1} (seq_len + 1)", where=where)
        if vocab <= np.iinfo(dtype).max:  # type: ignore[type-var]
            step, end = 2**22, min(self._total, _SCANNED)
            for lo in range(0, end, step):
                self._tokens(lo, min(lo + step, end))

    def __len__(self) -> int:
        return -(-(self._total - 1) // self._seq_len)

    def read(self, indices: Indices) -> Indices:
        rows = np.full((len(indices), self._seq_len + 1), -1, np.int64)
        for row, i in zip(rows, indices.tolist()):
            lo = i * self._seq_len
            found = self._tokens(lo, min(lo + self._seq_len + 1, self._total))
            row[:len(found)] = found
        return rows

    def _tokens(self, lo: int, hi: int) -> NDArray[np.generic]:
        """Tokens [lo, hi) of the whole sequence, checked against the vocabulary."""
        parts = []
        while lo < hi:
            file = bisect_right(self._ends, lo)
            start = self._ends[file - 1] if file else 0
            end = min(hi, self._ends[file])
            part = _mapped(self._paths[file], self._dtype)[lo - start:end - start]
            if int(part.max()) >= self._vocab:
                raise InputError(f"holds token {part.max()}; the model's vocabulary has {self._vocab} "
                                 f"(0 to {self._vocab - 1})", where=str(self._paths[file]))
            parts.append(part)
            lo = end
        return np.concatenate(parts)


def permuted(places: Indices, size: int, key: str) -> Indices:
    """Where a keyed random permutation of [0, size) sends `places`.

    A four-round Feistel network over the next even power of two, applied again until the result is below `size`
    (Black and Rogaway, 2002, "cycle walking"): a bijection that needs no table.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = np.uint64(2**half - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=32).digest(), np.uint64)
    values = places.astype(np.uint64)
    walking = np.ones(len(values), bool)
    while walking.any():
        left, right = values[walking] >> np.uint64(half), values[walking] & low
        for k in keys:
            left, right = right, left ^ (_mixed(right ^ k) & low)
        values[walking] = left << np.uint64(half) | right
        walking = values >= size
    return values.astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


@lru_cache(maxsize=64)
def _mapped(path: Path, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    try:
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path)) from None


def _text_files(path: Path) -> list[Path]:
    """The file, or all files below a directory in the order of their paths; hidden ones are left out."""
    if path.is_file():
        return [path]
    found = {f.relative_to(path).as_posix(): f for f in path.rglob("*") if f.is_file()}
    shown = [found[name] for name in sorted(found) if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise InputError("the directory holds no files", where=str(path))
    return shown


def _missing(path: Path) -> InputError:
    """Names the nearest entries of the deepest directory that exists."""
    while not path.parent.exists():
        path = path.parent
    if path.parent.is_dir():
        return unknown("data file", path.name, [p.name for p in path.parent.iterdir()], where=str(path.parent))
    return InputError("is not a directory", where=str(path.parent))
