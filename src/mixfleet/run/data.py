"""Samples by global position: which tokens a step trains on depends on the job alone, never on the plan.

A sample is `seq_len + 1` consecutive tokens, the first of which is the last target of the sample before, so every
token of a corpus is a target exactly once per epoch. An epoch is a keyed permutation of the samples that is computed
element by element (`samples`): a change of plan changes nothing. Where the job states lengths, a sample has so many
tokens and the target of the last; what a row has beyond them is padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.samples import SYNTHETIC_SAMPLES, Indices, Order, Sizes, corpus_files, key_of, open_sizes

MASKED = -100
"""Target of a position that is padding: the loss ignores it."""

_SYMBOLS = 32
_LIKELY, _SECOND = 0.6, 0.9
_SCANNED = 2**26
"""Tokens that are checked when a file is opened; every other token is checked when it is read."""


class Corpus(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def read(self, indices: Indices) -> Indices:
        """Tokens [len(indices), seq_len + 1]; negative ones are padding after the end of the corpus."""


class Batches:
    """The samples of every step; see `samples.Order`. `sizes` tells how long they are, None if all have `seq_len`."""

    def __init__(self, corpus: Corpus, global_batch: int, seed: int, *, first_step: int = 0,
                 first_position: int = 0, sizes: Sizes | None = None) -> None:
        self.corpus, self.global_batch, self.seed, self.sizes = corpus, global_batch, seed, sizes
        self._order = Order(len(corpus), global_batch, seed, first_step=first_step, first_position=first_position)
        self.position, self.samples = self._order.position, self._order.samples

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [hi - lo, seq_len], of places [lo, hi) of the step; padding has target -100."""
        rows = torch.from_numpy(self.corpus.read(self.samples(step, lo, hi)))
        tokens, targets = rows[:, :-1], rows[:, 1:]
        return tokens.clamp(min=0), targets.masked_fill(targets < 0, MASKED)

    def lengths(self, step: int) -> tuple[int, ...]:
        """Tokens of every sample of a step, by its place in the global batch."""
        assert self.sizes is not None
        return tuple(self.sizes.of(self.samples(step, 0, self.global_batch)).tolist())

    def rows(self, step: int, rows: Sequence[Sequence[int]], width: int, segments: Sequence[int] = ()
             ) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [rows, width]: in each row the samples at these places of the step, one behind
        another, then padding; each padded to the length of its segment, where these are given."""
        assert self.sizes is not None
        numbers = self.samples(step, 0, self.global_batch)
        tokens, targets = (np.full((len(rows), width), fill, np.int64) for fill in (0, MASKED))
        for r, places in enumerate(rows):
            chosen = numbers[list(places)]
            at, lengths = 0, self.sizes.of(chosen).tolist()
            for length, room, found in zip(lengths, segments or lengths, self.corpus.read(chosen)):
                end = min(length, int((found >= 0).sum()) - 1)
                tokens[r, at:at + end], targets[r, at:at + end] = found[:end], found[1:end + 1]
                at += room
        return torch.from_numpy(tokens), torch.from_numpy(targets)


def open_batches(job: Job, base: Path = Path(), *, first_step: int = 0, first_position: int = 0) -> Batches:
    """The job's data; `base` is the directory that a relative `data.path` starts from.

    Raises InputError for a missing path, a corpus shorter than one sample, or a token outside the vocabulary.
    """
    vocab, sizes = job.model.vocab, open_sizes(job, base)
    corpus: Corpus
    if job.data.kind == "synthetic":
        corpus = Synthetic(job.seq_len, vocab, job.seed, sizes=sizes)
    else:
        corpus = Files(corpus_files(job.data, base), job.seq_len, vocab,
                       np.dtype(np.uint8) if job.data.kind == "text" else np.dtype("<u2"),
                       where=str(base / Path(job.data.path).expanduser()), cuts=sizes)
    return Batches(corpus, job.global_batch, job.seed, first_step=first_step, first_position=first_position,
                   sizes=sizes)


class Synthetic:
    """Sequences of a fixed random Markov chain of order two over at most 32 symbols; nothing is stored.

    The next token is, with probability 0.6, one that follows from the last token; with 0.3, one that follows from
    the last two; else any. A model that has learned the chain has a loss of about 1.2, one that knows only which
    symbols occur, log(32) = 3.5.
    """

    def __init__(self, seq_len: int, vocab: int, seed: int, samples: int = SYNTHETIC_SAMPLES, *,
                 sizes: Sizes | None = None) -> None:
        self._length, self._seed, self._sizes = seq_len + 1, seed, sizes
        self._samples = samples if sizes is None else len(sizes)
        symbols = min(vocab, _SYMBOLS)
        rule = np.random.Generator(np.random.Philox(key=key_of(f"{seed}/rule")))
        self._tokens = rule.permutation(vocab)[:symbols].astype(np.int64)
        self._one = rule.integers(symbols, size=symbols)
        self._two = rule.integers(symbols, size=(symbols, symbols))

    def __len__(self) -> int:
        return self._samples

    def read(self, indices: Indices) -> Indices:
        symbols, key = len(self._tokens), key_of(f"{self._seed}/sample")
        draws = [np.random.Generator(np.random.Philox(key=key, counter=[0, 0, int(i), 0])) for i in indices]
        chance = np.stack([d.random(self._length) for d in draws]) if draws else np.empty((0, self._length))
        rows = np.stack([d.integers(symbols, size=self._length) for d in draws]) if draws else chance.astype(np.int64)
        for i in range(2, self._length):
            before, last, p = rows[:, i - 2], rows[:, i - 1], chance[:, i]
            rows[:, i] = np.where(p < _LIKELY, self._one[last],
                                  np.where(p < _SECOND, self._two[before, last], rows[:, i]))
        found = self._tokens[rows]
        return found if self._sizes is None else _shortened(found, self._sizes.of(indices))


def _shortened(rows: Indices, lengths: Indices) -> Indices:
    """Rows [n, seq_len + 1] with -1 beyond the last target of each."""
    return np.where(np.arange(rows.shape[1]) <= lengths[:, None], rows, -1)


class Files:
    """Files of fixed-width tokens, one after another as one sequence, memory-mapped; the last sample is padded.

    With `cuts` the sequence is cut into samples of those lengths.
    """

    def __init__(self, paths: list[Path], seq_len: int, vocab: int, dtype: np.dtype[np.generic], *, where: str,
                 cuts: Sizes | None = None) -> None:
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
        self._starts = None if cuts is None else np.concatenate(
            ([0], np.cumsum(cuts.of(np.arange(len(cuts), dtype=np.int64)))))
        if self._total <= seq_len and cuts is None:
            raise InputError(f"holds {self._total} tokens; one sample is {seq_len + 1} (seq_len + 1)", where=where)
        if vocab <= np.iinfo(dtype).max:  # type: ignore[type-var]
            step, end = 2**22, min(self._total, _SCANNED)
            for lo in range(0, end, step):
                self._tokens(lo, min(lo + step, end))

    def __len__(self) -> int:
        return -(-(self._total - 1) // self._seq_len) if self._starts is None else len(self._starts) - 1

    def read(self, indices: Indices) -> Indices:
        rows = np.full((len(indices), self._seq_len + 1), -1, np.int64)
        for row, i in zip(rows, indices.tolist()):
            lo = i * self._seq_len if self._starts is None else int(self._starts[i])
            length = self._seq_len if self._starts is None else int(self._starts[i + 1]) - lo
            found = self._tokens(lo, min(lo + length + 1, self._total))
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


@lru_cache(maxsize=64)
def _mapped(path: Path, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    try:
        return np.memmap(path, dtype, mode="r")
    except OSError as error:
        raise InputError(f"cannot read it: {error.strerror}", where=str(path)) from None
