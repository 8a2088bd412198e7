"""Which samples a step trains on, and how long they are: both belong to the job alone, never to the plan.

An epoch is a keyed permutation of the samples that is computed element by element: any rank finds any position without
storage. Lengths are drawn per sample, or read from a file; the same numbers serve planning and training.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mixfleet.errors import InputError, unknown
from mixfleet.job import Data, Job, Lengths

Indices = NDArray[np.int64]

SYNTHETIC_SAMPLES = 2**20
_DRAWN = 2**12
"""Lengths that are drawn at a time, each chunk from a counter of its own."""


class Order:
    """The order of samples: position p is sample `permutation of epoch p // count` at `p % count`.

    `first_step` starts at `first_position`, so a resumed job may change its batch and still use every sample once.
    """

    def __init__(self, count: int, global_batch: int, seed: int, *, first_step: int = 0,
                 first_position: int = 0) -> None:
        self.count, self.global_batch, self.seed = count, global_batch, seed
        self._first_step, self._first_position = first_step, first_position

    def position(self, step: int) -> int:
        """Samples used before `step`, over all epochs: the whole state of the data."""
        return self._first_position + (step - self._first_step) * self.global_batch

    def samples(self, step: int, lo: int, hi: int) -> Indices:
        """Sample numbers at places [lo, hi) of the step's global batch."""
        if not 0 <= lo <= hi <= self.global_batch:
            raise ValueError(f"places [{lo}, {hi}) are not in a batch of {self.global_batch}")
        epoch, place = np.divmod(self.position(step) + np.arange(lo, hi, dtype=np.int64), self.count)
        found = np.empty_like(place)
        for e in np.unique(epoch):
            found[epoch == e] = permuted(place[epoch == e], self.count, f"{self.seed}/epoch/{e}")
        return found


class Sizes:
    """Tokens of every sample, by its number, without the one that only the last target adds."""

    def __init__(self, known: Indices | None = None, *, spec: Lengths | None = None, seq_len: int = 0, seed: int = 0,
                 count: int = 0) -> None:
        self._known, self._spec, self._seq_len, self._seed = known, spec, seq_len, seed
        self._count = count if known is None else len(known)
        self._chunks: dict[int, Indices] = {}

    def __len__(self) -> int:
        return self._count

    def of(self, numbers: Indices) -> Indices:
        """Lengths of these samples."""
        if self._known is not None:
            return self._known[numbers]
        assert self._spec is not None
        found = np.empty(len(numbers), np.int64)
        chunk = numbers // _DRAWN
        for c in np.unique(chunk).tolist():
            if c not in self._chunks:
                if len(self._chunks) == 1024:
                    self._chunks.clear()
                self._chunks[c] = _drawn(self._spec, self._seq_len, self._seed, c)
            found[chunk == c] = self._chunks[c][numbers[chunk == c] % _DRAWN]
        return found


def open_sizes(job: Job, base: Path = Path()) -> Sizes | None:
    """The lengths of a job's samples; None if all of them have `seq_len` tokens.

    A corpus is cut into samples of these lengths, one after another: a file has one per sample and must not need more
    tokens than the corpus has; a distribution is drawn until they are used up. InputError says what does not go.
    """
    spec, data = job.data.lengths, job.data
    if spec is None:
        return None
    if spec.kind == "file":
        known = _read(base / Path(spec.path).expanduser(), job.seq_len)
        if data.kind != "synthetic":
            have, need = tokens_of(data, base), int(known.sum()) + 1
            if need > have:
                raise InputError(f"its lengths need {need} tokens; {data.path} holds {have}", where=spec.path)
        return Sizes(known)
    most = spec.most or job.seq_len
    if most > job.seq_len:
        raise InputError(f"data.lengths.most is {most}; seq_len is {job.seq_len}, the longest that a sample may be")
    if spec.least > most:
        raise InputError(f"data.lengths.least is {spec.least}; the longest sample has {most} tokens")
    spec = spec.replace(most=most)
    if data.kind == "synthetic":
        return Sizes(spec=spec, seq_len=job.seq_len, seed=job.seed, count=SYNTHETIC_SAMPLES)
    return Sizes(_cut(spec, job.seq_len, job.seed, tokens_of(data, base) - 1))


def _cut(spec: Lengths, seq_len: int, seed: int, tokens: int) -> Indices:
    """Lengths drawn until they are `tokens` in all; the last is what remains."""
    parts: list[Indices] = []
    total = 0
    while total < tokens:
        parts.append(_drawn(spec, seq_len, seed, len(parts)))
        total += int(parts[-1].sum())
    lengths = np.concatenate(parts)
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    lengths = lengths[:last + 1]
    lengths[last] -= ends[last] - tokens
    return lengths


def _drawn(spec: Lengths, seq_len: int, seed: int, chunk: int) -> Indices:
    """Lengths of samples [chunk, chunk + 1) * _DRAWN."""
    draw = np.random.Generator(np.random.Philox(key=key_of(f"{seed}/lengths"), counter=[0, 0, chunk, 0]))
    most = spec.most or seq_len
    if spec.kind == "uniform":
        return draw.integers(spec.least, most, _DRAWN, np.int64, endpoint=True)
    values = np.rint(spec.median * np.exp(spec.sigma * draw.standard_normal(_DRAWN)))
    found: Indices = np.clip(values, spec.least, most).astype(np.int64)
    return found


@lru_cache(maxsize=4)
def _read(path: Path, seq_len: int) -> Indices:
    """One length per line, or a one-dimensional array of integers in an .npy file."""
    if not path.exists():
        raise missing(path, "file of lengths")
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else None
        lines = [] if values is not None else path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from None
    if values is None:
        found = [(n, line.strip()) for n, line in enumerate(lines, 1) if line.strip()]
        for n, text in found:
            if not text.isdecimal():
                raise InputError(f"{text!r} is not a length; give one whole number per line", where=f"{path}:{n}")
        places, values = [n for n, _ in found], np.array([int(text) for _, text in found], np.int64)
    elif values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(f"holds {values.dtype} of shape {values.shape}; lengths are one row of integers",
                         where=str(path))
    else:
        places = list(range(1, len(values) + 1))
    if not len(values):
        raise InputError("holds no lengths", where=str(path))
    values = values.astype(np.int64)
    wrong = np.flatnonzero((values < 1) | (values > seq_len))
    if wrong.size:
        raise InputError(f"{values[wrong[0]]} is not a length; seq_len is {seq_len}, so lengths are 1 to {seq_len}",
                         where=f"{path}:{places[wrong[0]]}")
    return values


def tokens_of(data: Data, base: Path = Path()) -> int:
    """Tokens of a corpus, by the sizes of its files."""
    return sum(path.stat().st_size for path in corpus_files(data, base)) // (1 if data.kind == "text" else 2)


def corpus_files(data: Data, base: Path = Path()) -> list[Path]:
    """The files of a corpus in order: one, or all below a directory by their paths; hidden ones are left out."""
    path = base / Path(data.path).expanduser()
    if not path.exists():
        raise missing(path)
    if path.is_file():
        return [path]
    if data.kind == "tokens":
        raise InputError("is a directory; data kind 'tokens' needs a file of uint16 tokens", where=str(path))
    found = {f.relative_to(path).as_posix(): f for f in path.rglob("*") if f.is_file()}
    shown = [found[name] for name in sorted(found) if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise InputError("the directory holds no files", where=str(path))
    return shown


def missing(path: Path, what: str = "data file") -> InputError:
    """Names the nearest entries of the deepest directory that exists."""
    while not path.parent.exists():
        path = path.parent
    if path.parent.is_dir():
        return unknown(what, path.name, [p.name for p in path.parent.iterdir()], where=str(path.parent))
    return InputError("is not a directory", where=str(path.parent))


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


def key_of(text: str) -> int:
    """A key for counter-based generators."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
