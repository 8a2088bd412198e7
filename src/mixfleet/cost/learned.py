"""How far kernels stay from their analytical bound: a small learned layer over `cost.demand`, evaluated with numpy.

A kernel's bound is what its busiest SM needs, plus a floor (launch and the host, where that was timed along). The
learned layer predicts log(time / bound) from the ratios of the pipelines' seconds to the bound, from shape and from
words (library, type, architecture), with boosted oblivious trees. No device is an input: one enters through its rates
and three effective factors (chip, DRAM, floor), fitted where it was measured and else averaged over its relatives.
`mixfleet calibrate fit` writes the coefficients; `docs/cost-model.md` explains them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import msgspec
import numpy as np
from numpy.typing import NDArray

from mixfleet.catalog.devices import rows as catalog_rows
from mixfleet.cluster import Device, device_named
from mixfleet.cost.demand import DRAM, PIPES, TENSOR, Array, Demand, Machine, sms
from mixfleet.cost.deviations import Deviations
from mixfleet.errors import InputError
from mixfleet.spec import Spec

VERSION = 3
"""Of the meaning of features and coefficients; a file of another version is refused."""
FILE = "kernels.npz"
FALLBACK_EFFICIENCY = 0.6
"""Of the bound, far outside the data: about the median of large kernels in it."""
FALLBACK_RANGE = (0.6, 2.0)
"""Low and high time there, as factors."""
MARGIN = 1.5
"""How far outside the fitted range of log(bound) and log(shape) still counts as inside: a factor of 4.5."""
FEW_ROWS, FEW_BORDERS = 64, 4
BLOCK_ROWS = 16384
"""Rows evaluated together, so that the columns in use stay in cache."""
_TINY_S = 1e-12
KEPT = 0.6
"""Of the cache, what the operands of the last repetition find; the rest is lost to conflicts and results."""
ALIGNED = ("m", "n", "k", "cols", "c_in", "c_out")
MOST_ALIGNED = 256
"""Sizes whose power of two tells which vector loads and tiles a library may use, and the largest one that matters."""
ON_CHIP = [i for i in range(len(PIPES)) if i != DRAM]


class Relatives(NamedTuple):
    """What a device is like, to find its relatives: architecture, generation, vendor, power per SM and clock."""

    arch: str
    generation: str
    vendor: str
    log_power: float

    @staticmethod
    def of(device: Device) -> Relatives:
        watts = device.power_w / (device.vector_flops / 1e12) if device.power_w else 8.0
        return Relatives(device.arch, (device.arch.split() or [""])[0], device.vendor, float(np.log(watts)))

    def weight(self, other: Relatives) -> float:
        """How much the other one's factors say about this one's: 1 for the same chip at the same power."""
        kin = 1.0 if self.arch == other.arch else 0.3 if self.generation == other.generation else (
            0.05 if self.vendor == other.vendor else 0.01)
        return kin * float(np.exp(-2 * abs(self.log_power - other.log_power)))


SIXTEEN = ("bf16", "fp16")


def sixteen_power(device: Device) -> float | None:
    """Logarithm of watts per TFLOP/s in 16 bits; None where either is unknown."""
    rates = [device.flops[t] for t in SIXTEEN if t in device.flops]
    return float(np.log(device.power_w / (max(rates) / 1e12))) if rates and device.power_w else None


@cache
def _sixteen_power_of(name: str) -> float | None:
    return sixteen_power(device_named(name)) if name in catalog_rows() else None


WIDER: dict[str, tuple[tuple[str, float], ...]] = {
    "fp4": (("fp8", 2), ("bf16", 4), ("fp16", 4)), "fp8": (("bf16", 2), ("fp16", 2)),
    "int8": (("bf16", 2), ("fp16", 2)), "bf16": (("fp16", 1),), "fp16": (("bf16", 1),),
    "tf32": (("bf16", 0.5), ("fp16", 0.5))}
"""Rates that tensor units usually have of types that a device lacks, as multiples of the rate of others."""
RESOURCES = ("flops", "vector_flops", "memory_Bps", "cache_bytes", "sm_count", "arch", "vendor", "power_w")


def reference(device: Device) -> Device:
    """The device whose kernels a device runs: itself, or the known one of which it is a variant, before the change.

    Units for a type that the known one lacks have there the rate that such units usually have.
    """
    kept: dict[str, Device] = device.__dict__
    if "_reference" not in kept:
        kept["_reference"] = _reference(device)
    return kept["_reference"]


BY_FIGURES = ("gemm.16bit", "gemm.fp8")
"""Groups in which a known device that no fit saw is told better by its own figures and the mean of its relatives than
by a sibling: what large products reach depends on the watts, and many devices were measured. Chosen by leaving devices
out. Devices that somebody made up have siblings there too, so that more of anything is not slower."""


def sibling(device: Device, group: Group, source: str, *, by_figures: bool = False) -> str | None:
    """The measured device of the same chip that is most like one which no fit saw, if `source` timed kernels on it.

    Between such devices kernels are the same, and what differs (clock, bandwidth, memory) is analytical; what another
    source timed tells less than what the learned layer makes of the device's own figures. Known devices are alike in
    watts per FLOP/s, as leaving them out chose; those that somebody made up in all rates, since a bit more clock must
    not lead to a card with a sixth of the tensor units. `by_figures`: known devices have none (`BY_FIGURES`).
    """
    is_known = device.known_as in catalog_rows()
    if device.kind != "gpu" or device.known_as in group.factors or (by_figures and is_known):
        return None
    me, like = Relatives.of(device), list[tuple[float, str]]()
    for name, found in group.factors.items():
        if source in found.floor_s and catalog_rows().get(name, {}).get("arch") == device.arch:
            other = _named(name)
            like.append((-me.weight(Relatives.of(other)) if is_known else unlike(device, other), name))
    return min(like)[1] if like else None


def unlike(a: Device, b: Device) -> float:
    """How far apart two devices are: logarithms of their tensor, vector and memory rates, of SMs and of watts."""
    def figures(d: Device) -> list[float]:
        tensor = max((d.flops[t] for t in (*SIXTEEN, "fp32") if t in d.flops), default=d.vector_flops)
        return [tensor, d.vector_flops, d.memory_Bps, sms(d)]

    steps = np.abs(np.log(figures(a)) - np.log(figures(b)))
    return float(steps.sum()) + abs(Relatives.of(a).log_power - Relatives.of(b).log_power)


@cache
def _named(name: str) -> Device:
    return device_named(name)


def _reference(device: Device) -> Device:
    if device.kind != "gpu" or device.known_as not in catalog_rows():
        return device
    try:
        base = _named(device.known_as)
    except InputError:
        return device
    return device if all(getattr(device, f) == getattr(base, f) for f in RESOURCES) else as_known(device, base.name)


def as_known(device: Device, name: str) -> Device:
    """The known device `name`, with units of the usual rate for types that only `device` has."""
    base = _named(name)
    flops = dict(base.flops)
    for added in sorted(set(device.flops) - set(flops)):
        flops[added] = next((base.flops[t] * times for t, times in WIDER.get(added, ()) if t in base.flops),
                            device.flops[added])
    return base.replace(flops=flops)


JOULE_PER_FLOP, YEAR, E_FOLDING_YEARS = 24e-12, 2016, 6.0
"""What a product on fp32 lanes takes of a card's watts: 24 pJ for a FLOP in 2016, and 1/e of it six years later.
From the three cards whose watts are far too few, P4 (2016, 24 pJ), T4 (2018, 18 pJ) and L4 (2023, 7.5 pJ): any two
of them tell the third within 15 %."""
STARVED = 0.7
"""Power of the part of the watts that is there by which the clock falls: of 0.4, 0.6, 0.8 and 1, devices left out of
products in fp32 are told equally well by 0.6 and 0.8."""


def fed(device: Device) -> float:
    """What the watts of a device leave of its fp32 rate in large products; 1 where they suffice, or are not known.

    Where the rate is that of matrix units, as on CDNA, no energy is known.
    """
    row = catalog_rows().get(device.known_as)
    if not row or not row["year"] or not device.power_w or device.flops.get("fp32") != device.vector_flops:
        return 1.0
    joule = JOULE_PER_FLOP * float(np.exp((YEAR - float(row["year"])) / E_FOLDING_YEARS))
    return float(min(1.0, device.power_w / (joule * device.vector_flops)) ** STARVED)


@cache
def _fed(name: str) -> float:
    return fed(device_named(name)) if name in catalog_rows() else 1.0


class Factors(Spec, frozen=True, kw_only=True):
    """Effective factors of one device for one kind of kernel, and how its measurements deviate from them, if given."""

    chip: dict[str, float] = {}
    """Of the nominal rate, by the type that the tensor units run."""
    dram: float = 1.0
    floor_s: dict[str, float] = {}
    """By what ran and how it was timed: `source backend dtype`, or `source` alone."""
    deviations: Deviations | None = None
    """From a few measurements (`query.adapt`)."""


class Group(Spec, frozen=True, kw_only=True):
    """Coefficients of one kind of kernel but for its trees' arrays."""

    names: tuple[str, ...]
    words: tuple[str, ...]
    factors: dict[str, Factors]
    default: str
    """`source backend` of a query that names none."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Fitted range of log(bound) and of the logarithm of each shape column."""
    known: tuple[float, float]
    unknown: tuple[float, float]
    """The 10 % and 90 % quantile of log(measured / predicted) in units of the expected size of the error, for devices
    in the data and others."""


class Forest(NamedTuple):
    """Oblivious trees: all nodes of a level ask the same question, so a leaf is a number of `depth` bits."""

    feature: NDArray[np.int16]
    """[trees, depth]"""
    border: NDArray[np.uint8]
    """[trees, depth]: the answer is `bin > border`."""
    leaves: NDArray[np.float32]
    """[trees, 2**depth]"""
    borders: tuple[NDArray[np.float32], ...]
    """Per feature: ascending; the bin of a value is the number of them below it."""
    bias: float

    def leaf(self, x: NDArray[np.float32]) -> NDArray[np.uint8]:
        """[rows, features] to [rows, trees]: the number of the leaf of each tree."""
        bins = np.stack([np.searchsorted(b, x[:, f]) for f, b in enumerate(self.borders)], 1)
        found = np.empty((len(x), len(self.feature)), np.uint8)
        bits = np.left_shift(1, np.arange(self.feature.shape[1]))
        for start in range(0, len(x), FEW_ROWS):
            part = bins[start:start + FEW_ROWS]
            found[start:start + FEW_ROWS] = (part[:, self.feature] > self.border) @ bits
        return found

    def predict(self, x: NDArray[np.float32]) -> Array:
        """[rows, features] to [rows]. Few rows are evaluated over all trees at once, many tree by tree."""
        if len(x) <= FEW_ROWS:
            values = self.leaves[np.arange(len(self.leaves)), self.leaf(x)]
            return np.asarray(values.sum(axis=1, dtype=np.float64) + self.bias)
        out = np.empty(len(x))
        for at in range(0, len(x), BLOCK_ROWS):
            part = x[at:at + BLOCK_ROWS]
            used = {int(f): _bins(self.borders[f], part[:, f]) for f in np.unique(self.feature)}
            total, value = np.full(len(part), self.bias, np.float32), np.empty(len(part), np.float32)
            answer, leaf, index = np.empty(len(part), bool), np.empty(len(part), np.uint8), np.empty(len(part), np.intp)
            bit = answer.view(np.uint8)
            for feature, border, leaves in zip(self.feature[:, ::-1].tolist(), self.border[:, ::-1], self.leaves):
                leaf[:] = 0
                for f, b in zip(feature, border):
                    np.greater(used[f], b, out=answer)
                    np.add(leaf, leaf, out=leaf)
                    np.bitwise_or(leaf, bit, out=leaf)
                index[:] = leaf
                np.take(leaves, index, out=value, mode="clip")
                np.add(total, value, out=total)
            out[at:at + BLOCK_ROWS] = total
        return out


def _bins(borders: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[rows]: the number of borders below each value; words are the same for many kernels, and have one border."""
    if len(borders) < FEW_BORDERS:
        bins = np.zeros(len(values), np.uint8)
        for border in borders:
            bins += values > border
        return bins
    if values[0] == values[-1] and (values == values[0]).all():
        return np.full(len(values), np.searchsorted(borders, values[0]), np.uint8)
    return np.searchsorted(borders, values).astype(np.uint8)


class Inputs(NamedTuple):
    """Kernels ready for the learned layer."""

    demand: Demand
    nominal: Machine
    machine: Machine
    """With effective rates."""
    floor_s: Array
    bound_s: Array
    features: NDArray[np.float32]
    names: tuple[str, ...]
    ratio: Array
    """[rows]: by how much longer the device itself takes than its reference (`reference`), of which all else speaks
    but `nominal`; 1 for a device that is its own."""


_SPLIT = re.compile(r"[^a-z0-9]+")


def words_of(text: str) -> set[str]:
    """The lower-case words and numbers of a text."""
    return {w for w in _SPLIT.split(text.lower()) if w}


def flags(texts: Sequence[str], which: NDArray[np.intp], vocabulary: Sequence[str]) -> NDArray[np.float32]:
    """[rows, words]: 1 where text `which[row]` has the word."""
    table = np.zeros((len(texts), len(vocabulary)), np.float32)
    for i, text in enumerate(texts):
        have = words_of(text)
        table[i] = [word in have for word in vocabulary]
    return table[which]


def warm_s(d: Demand, m: Machine) -> Array:
    """[rows]: DRAM seconds of a kernel repeated in a loop, as measurements are: what fits in the cache stays there."""
    nbytes, kept = d.total[:, DRAM], KEPT * m.cache_bytes
    return np.asarray(nbytes / m.rates[:, DRAM] * nbytes**2 / (nbytes**2 + kept**2))


def bound_s(d: Demand, m: Machine, floor_s: Array) -> Array:
    """[rows]: the floor, and the slowest of the warm pipelines and of what the busiest SM needs under the best tile."""
    total, busiest = d.total_s(m), d.busiest_s(m)
    busy = d.more["tiled_s"] if "tiled_s" in d.more else busiest[:, ON_CHIP].max(axis=1)
    return np.asarray(floor_s + np.maximum(np.maximum(total[:, ON_CHIP].max(axis=1), busy), warm_s(d, m)))


OVERLAP = 3.0
"""Norm that adds the seconds of pipelines that work side by side: between 1, one after another, and infinity."""


def alone_s(d: Demand, of: Machine, m: Machine, floor_s: Array) -> Array:
    """[rows]: analytical seconds on `m` of kernels as the machine `of` runs them, with its tiles; never more where `m`
    has more of anything: rates, cache, or SMs of the same rate."""
    total = d.total / m.rates
    waves = np.ceil(d.tasks / m.sms) / np.ceil(d.tasks / of.sms)
    busiest = d.busiest / (m.rates / m.sms[:, None]) * waves[:, None]
    seconds = np.concatenate([np.maximum(total, busiest)[:, ON_CHIP], warm_s(d, m)[:, None]], axis=1)
    largest = seconds.max(axis=1)
    norm = (np.maximum(seconds / largest[:, None], _TINY_S) ** OVERLAP).sum(axis=1) ** (1 / OVERLAP)
    return np.asarray(floor_s + largest * norm)


def features(d: Demand, m: Machine, floor_s: Array, shape: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
    """Named features besides the words, and the bound."""
    bound = bound_s(d, m, floor_s)
    total, busiest = d.total_s(m), d.busiest_s(m)
    seconds = {f"total.{p}": total[:, i] for i, p in enumerate(PIPES)}
    seconds |= {f"busiest.{PIPES[i]}": busiest[:, i] for i in (TENSOR, DRAM)}
    seconds |= {"warm": warm_s(d, m), "chain": d.chain / m.clock_Hz}
    seconds |= {name: values for name, values in d.more.items() if name.endswith("_s")}
    log_bound = np.log(bound)
    found = {name: np.log(np.maximum(values, _TINY_S)) - log_bound for name, values in seconds.items()}
    found |= {name: np.log1p(values) for name, values in d.more.items() if not name.endswith("_s")}
    found["bound"], found["bound/floor"] = log_bound, log_bound - np.log(floor_s)
    each = d.tasks / m.sms
    found |= {"waves": np.log(d.waves), "tail": np.ceil(each) / each, "sms": np.log(m.sms)}
    for name, values in shape.items():
        found[f"shape.{name}"] = np.log(np.maximum(values, 1))
        if name in ALIGNED:
            found[f"align.{name}"] = np.log2(np.gcd(values.astype(np.int64), MOST_ALIGNED))
    return found, bound


class Layer(NamedTuple):
    """All coefficients."""

    groups: dict[str, Group]
    forests: MutableMapping[str, Forest]
    """Of log(time / bound)."""
    relatives: dict[str, Relatives]
    spreads: MutableMapping[str, Forest] = {}
    """Of the logarithm of the expected size of the error."""


def factors_of(group: Group, device: Device, relatives: Mapping[str, Relatives], *, known: bool = True) -> Factors:
    """The device's own factors, or the weighted geometric mean of those of its relatives.

    fp16 and bf16 run on the same units and share one chip factor. What its large products reach depends on the watts
    that those units get, so for it power is compared per FLOP/s in 16 bits. In fp32 products it is what the watts leave
    (`fed`) times a mean of what relatives reach of theirs.

    `known=False` treats a measured device as one never seen, as cross-validation does.
    """
    if known and device.known_as in group.factors:
        return _with_floors(group, device, relatives)
    me = Relatives.of(device)
    others = [(name, f) for name, f in sorted(group.factors.items()) if name != device.known_as]
    near = [(me.weight(relatives[name]), f) for name, f in others]
    mine = sixteen_power(device)
    is_fed = "shape.k" in group.names  # of products; convolutions left out are told worse that way

    def mean(pairs: list[tuple[float, float]]) -> float:
        return float(np.exp(sum(w * np.log(v) for w, v in pairs) / sum(w for w, _ in pairs)))

    chips: dict[str, list[tuple[float, float]]] = {}
    floors: dict[str, list[tuple[float, float]]] = {}
    for (name, f), (w, _) in zip(others, near):
        for key, value in f.floor_s.items():
            floors.setdefault(key, []).append((w, value))
        for key, value in f.chip.items():
            theirs = _sixteen_power_of(name) if key in SIXTEEN else None
            weight = w if theirs is None or mine is None else me._replace(log_power=mine).weight(
                relatives[name]._replace(log_power=theirs))
            for kind in SIXTEEN if key in SIXTEEN else (key,):
                chips.setdefault(kind, []).append((weight, value / _fed(name) if is_fed and kind == "fp32" else value))
    own = {"fp32": fed(device)} if is_fed else {}
    return Factors(chip={k: mean(v) * own.get(k, 1.0) for k, v in chips.items()},
                   dram=mean([(w, f.dram) for w, f in near]) if near else 1.0,
                   floor_s={k: mean(v) for k, v in floors.items()})


LONGEST_FLOOR_S = 50e-6
"""No source shows a longer launch: a floor above it is that of a device on which only long kernels were timed."""


def _with_floors(group: Group, device: Device, relatives: Mapping[str, Relatives]) -> Factors:
    """The device's own factors; where its rows show no floor, with the floors that relatives have of other sources."""
    own = group.factors[device.known_as]
    if min(own.floor_s.values(), default=0.0) < LONGEST_FLOOR_S:
        return own
    timed = {key.split(" ", 1)[0] for key in own.floor_s}
    floors = factors_of(group, device, relatives, known=False).floor_s
    return own.replace(floor_s={**{k: v for k, v in floors.items() if k.split(" ", 1)[0] not in timed}, **own.floor_s})


def floor_of(factors: Factors, source: str, backend: str, dtype: str) -> float:
    """The floor of what ran: of this backend and type, else of its source, else the least known."""
    for key in (f"{source} {backend} {dtype}", source):
        if key in factors.floor_s:
            return factors.floor_s[key]
    return min(factors.floor_s.values(), default=3e-6)


def chip_of(factors: Factors, kind: str) -> float:
    """The chip factor for a type of the tensor units, else the mean of the others."""
    if kind in factors.chip:
        return factors.chip[kind]
    return float(np.exp(np.mean(np.log(list(factors.chip.values()))))) if factors.chip else 1.0


def load(path: Path | None = None) -> Layer:
    """Coefficients from a file, or those of the package. InputError if it is of another version."""
    return _load(path)


@cache
def _load(path: Path | None) -> Layer:
    source = path or resources.files("mixfleet.catalog").joinpath(FILE)
    if not source.is_file():
        raise InputError("there are no such coefficients; `mixfleet calibrate fit` makes them", where=str(source))
    data = source.read_bytes()
    with _arrays(data, str(source)) as arrays:
        version = int(arrays["version"]) if "version" in arrays else 0
        if version != VERSION:
            raise InputError(f"coefficients of version {version}, this code needs {VERSION}; make them anew with "
                             "`mixfleet calibrate fit`", where=str(source))
        head = msgspec.json.decode(arrays["head"].tobytes(), type=dict[str, Any])
    groups = {name: msgspec.convert(value, Group) for name, value in head["groups"].items()}
    forests, spreads = (_Forests(data, str(source), groups, what) for what in PARTS)
    return Layer(groups, forests, {name: Relatives(*value) for name, value in head["relatives"].items()}, spreads)


class _Forests(MutableMapping[str, Forest]):
    """Those of a file, each unpacked when it is asked for: a prediction needs few of them."""

    def __init__(self, data: bytes, where: str, names: Iterable[str], what: str) -> None:
        self._data, self._where, self._what = data, where, what
        self._known: dict[str, Forest | None] = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Forest:
        found = self._known[name]
        if found is None:
            with _arrays(self._data, self._where) as arrays:
                found = self._known[name] = _forest(arrays, f"{name}.{self._what}")
        return found

    def __setitem__(self, name: str, forest: Forest) -> None:
        self._known[name] = forest

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _arrays(data: bytes, where: str) -> Any:
    try:
        return np.load(BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        raise InputError(f"not a file of coefficients: {error}", where=where) from None


PARTS = ("time", "spread")


def _forest(arrays: Mapping[str, NDArray[Any]], name: str) -> Forest:
    ends = np.cumsum(arrays[f"{name}.sizes"])[:-1]
    return Forest(arrays[f"{name}.feature"], arrays[f"{name}.border"], arrays[f"{name}.leaves"].astype(np.float32),
                  tuple(np.split(arrays[f"{name}.borders"], ends)), float(arrays[f"{name}.bias"]))


def save(layer: Layer, path: Path) -> None:
    """Write the coefficients; the same layer gives the same bytes, in whatever order its groups were fitted."""
    arrays: dict[str, Any] = {"version": np.int64(VERSION)}
    head = {"groups": msgspec.to_builtins(layer.groups), "relatives": {k: list(v) for k, v in layer.relatives.items()}}
    arrays["head"] = np.frombuffer(msgspec.json.encode(head, order="sorted"), np.uint8)
    for what, forests in zip(PARTS, (layer.forests, layer.spreads)):
        for group, f in sorted(forests.items()):
            name = f"{group}.{what}"
            arrays |= {f"{name}.feature": f.feature, f"{name}.border": f.border,
                       f"{name}.leaves": f.leaves.astype(np.float16),
                       f"{name}.sizes": np.array([len(b) for b in f.borders], np.int64),
                       f"{name}.borders": np.concatenate(f.borders), f"{name}.bias": np.float64(f.bias)}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    _load.cache_clear()


def together(old: Layer, new: Layer) -> Layer:
    """The groups of both; those of `new` replace equal names."""
    return Layer({**old.groups, **new.groups}, {**old.forests, **new.forests}, {**old.relatives, **new.relatives},
                 {**old.spreads, **new.spreads})


def intervals(group: Group, size: Array, known: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Factors on the predicted time between which 80 % of measurements lie, from the expected `size` of log errors."""
    table = np.where(known[:, None], group.known, group.unknown) * size[:, None]
    return np.exp(table[:, 0]), np.exp(table[:, 1])


def inside(group: Group, log_bound: Array, shape: Mapping[str, Array]) -> NDArray[np.bool_]:
    """[rows]: within a margin of the fitted ranges."""
    columns = [log_bound, *(np.log(np.maximum(v, 1)) for v in shape.values())]
    ok = np.ones(len(log_bound), bool)
    for values, low, high in zip(columns, group.low, group.high):
        ok &= (values > low - MARGIN) & (values < high + MARGIN)
    return ok



