"""Fit the learned layer of kernel costs on measured kernel times: `mixfleet calibrate fit --data DIR`.

Deterministic: rows are drawn with a fixed seed, evenly over source, device and type; the trees (CatBoost, extra `fit`)
have no randomness. So the same files give the same coefficients. Cross-validation leaves whole devices or sources out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.calibrate.tables import Table, read
from mixfleet.cluster import Device
from mixfleet.cost import learned, query
from mixfleet.cost.demand import DRAM, TENSOR, Array, type_named
from mixfleet.cost.learned import Factors, Forest, Group, Layer, Relatives
from mixfleet.errors import InputError, unknown

ROWS = 400_000
"""Drawn per group. Four times as many rows take a tenth to a fifth off the error on rows that are held out."""
EVENLY = ("source", "gpu", "dtype", "op")
EVEN = 4000
"""Rows of a source, device, type and operator that count in full, when rows are drawn and in the fit: those that have
more count as this many, or the devices that were measured most would decide for all others."""
TREES, DEPTH, RATE, BORDERS = 300, 8, 0.35, 64
"""Trees cost more time than rows: few deep ones at a high rate on many rows reach what twice as many small steps do."""
MORE_TREES = {"gemm.16bit": 700, "gemm.fp32": 2000, "attention.context": 500, "attention.decode": 700,
              "moe.16bit": 1100, "moe.quantized": 700, "conv": 900}
"""Of groups whose held-out error still falls with more of them."""
SLOWER = {"conv": (7, 0.1), "gemm.fp32": (7, 0.15)}
"""Depth and rate of groups with few rows, chosen among three or four on folds of the rows that are not held out."""
FOLD_ROWS, FOLD_TREES, FOLD_DEPTH, FOLDS = 12_000, 60, 6, 4
FOLD_LEAST = 60
"""Smaller fits, for the errors on devices left out that have enough rows."""
SPREAD_TREES, SPREAD_DEPTH, SPREAD_RATE = 60, 5, 0.1
LEAST_ERROR = 0.02
"""Added to a log error before its logarithm is fitted: measurements are no better than this."""
HELD_OUT, HELD_OUT_FEW, FEW = 0.1, 0.3, 200
"""Part of the rows that no fit sees, and of sources that have few of a device."""
BEST = 0.8
"""Quantile of what kernels of a device reach that becomes its effective rate."""
FLOOR = 0.01
UNMEASURED_DRAM = 0.8
SHORT, SHORT_S, LARGE = 3, 10e-6, 10
"""A kernel shows its floor if it takes this many times its pipelines and those no longer than this, and its rate if it
takes this many times its floor."""
LEAST = 12
"""Rows from which a factor is estimated."""
SETTINGS = {"loss_function": "RMSE", "random_seed": 0, "verbose": 0, "allow_writing_files": False,
            "bootstrap_type": "No", "boosting_type": "Plain", "l2_leaf_reg": 1.0, "random_strength": 0.0,
            "score_function": "L2", "thread_count": 1}


class Sample(NamedTuple):
    """Rows of one group."""

    kind: str
    columns: dict[str, Any]
    devices: dict[str, Device]
    time_s: Array

    @property
    def rows(self) -> int:
        return len(self.time_s)

    def take(self, rows: NDArray[Any]) -> Sample:
        at = np.flatnonzero(rows) if rows.dtype == bool else rows
        return self._replace(columns={k: v[at] for k, v in self.columns.items()}, time_s=self.time_s[at])


def samples(folder: Path, rows: int = ROWS, groups: Sequence[str] = ()) -> dict[str, Sample]:
    """The groups' rows, drawn from the data files of a folder; `groups` limits to those.

    InputError for a group that the files do not have.
    """
    tables: dict[str, list[Table]] = {}
    for path in sorted(folder.glob("*.parquet")):
        table = read(path, optional=True)
        if table is not None:
            tables.setdefault(table.kind, []).append(table)
    if not tables:
        raise InputError("there are no kernel files (*.parquet) that mixfleet knows", where=str(folder))
    found, known = {}, set[str]()
    for kind, parts in sorted(tables.items()):
        names = sorted({name for part in parts for name in part.columns})
        columns = {name: np.concatenate([part.column(name) for part in parts]) for name in names}
        devices = {name: d for part in parts for name, d in part.devices.items()}
        times = np.concatenate([part.time_s - part.host_s for part in parts])
        pairs, which = query.texts_of(columns, ("dtype", "op"), len(times))
        group = np.array([query.group_of(kind, *pair) for pair in pairs], dtype=object)[which]
        known |= set(group)
        for name in sorted(set(group)):
            if groups and name not in groups:
                continue
            at = np.flatnonzero(group == name)
            weight = 1 / np.maximum(_alike({c: columns[c][at] for c in EVENLY}, EVENLY), EVEN)
            drawn = np.random.default_rng(0).choice(len(at), min(rows, len(at)), replace=False, p=weight / weight.sum())
            found[name] = Sample(kind, {k: v[at[np.sort(drawn)]] for k, v in columns.items()}, devices,
                                 times[at[np.sort(drawn)]])
    for name in groups:
        if name not in known:
            raise unknown("group of kernels", name, known, where=str(folder))
    return found


def _alike(columns: dict[str, Any], names: Sequence[str]) -> NDArray[np.int64]:
    """How many rows have the values of each row in these columns."""
    _, code = query.texts_of(columns, names, len(columns[names[0]]))
    return np.asarray(np.bincount(code)[code])


def factors(sample: Sample) -> dict[str, Factors]:
    """Effective factors of each device in the rows: floors by quantile, rates from what its best kernels reach.

    A floor shows only in kernels that are much slower than their pipelines; where a library was timed on large kernels
    alone, the device has the floor that the library has on its relatives.
    """
    gpu = sample.columns["gpu"]
    plain = {name: Factors(floor_s={"": 1e-7}) for name in sample.devices}
    x = query.inputs(sample.kind, sample.columns, sample.devices, plain, (), emulate=True)
    seconds = x.demand.total_s(x.machine)
    tensor, dram = seconds[:, TENSOR], seconds[:, DRAM]
    pipe = seconds.max(axis=1)
    short = (sample.time_s > SHORT * pipe) & (pipe < SHORT_S)
    types = np.array([type_named(t).rate for t in sample.columns["dtype"]])
    source = sample.columns["source"]
    keys = np.array([f"{s} {b} {t}" for s, b, t in zip(source, sample.columns["backend"], sample.columns["dtype"])])
    names = [str(name) for name in sorted(set(gpu))]
    shown = {}
    for name in names:
        mine = gpu == name
        floors: dict[str, float] = {}
        for column in (keys, source):
            for key in sorted(set(column[mine])):
                rows = mine & short & (column == key)
                if rows.sum() >= LEAST:
                    floors[str(key)] = float(np.quantile(sample.time_s[rows], FLOOR)) * 0.98
        shown[name] = Factors(floor_s=floors)
    group = Group(names=(), words=(), factors=shown, default="", low=(), high=(), known=(0, 0), unknown=(0, 0))
    relatives = {name: Relatives.of(sample.devices[name]) for name in names}
    found = {}
    for name in names:
        mine = gpu == name
        near = learned.factors_of(group, sample.devices[name], relatives, known=False).floor_s
        floors = {str(key): near[key] for key in sorted({*keys[mine], *source[mine]}) if key in near}
        floors |= shown[name].floor_s
        for key in sorted({*source[mine]} - set(floors)):
            floors[str(key)] = float(sample.time_s[mine & (source == key)].min()) / 2
        floor = np.array([floors.get(k, floors[s]) for k, s in zip(keys[mine], source[mine])])
        large = np.zeros(sample.rows, bool)
        large[mine] = sample.time_s[mine] > LARGE * floor
        chip = {}
        for run in sorted(set(types[mine])):
            rows = large & (types == run) & (tensor > 3 * dram)
            if rows.sum() >= LEAST:
                chip[str(run)] = float(np.clip(np.quantile(tensor[rows] / sample.time_s[rows], BEST), 0.05, 2))
        rows = large & (dram > 3 * tensor) & (x.demand.more["in_cache"] > 2)
        rate = UNMEASURED_DRAM
        if rows.sum() >= LEAST:
            rate = float(np.clip(np.quantile(dram[rows] / sample.time_s[rows], BEST), 0.05, 1.2))
        found[name] = Factors(chip=chip, dram=rate, floor_s=floors)
    return found


def fit_group(sample: Sample, *, trees: int = TREES, depth: int = DEPTH, rate: float = RATE,
              words: Sequence[str] = ()) -> tuple[Group, Forest, dict[str, Relatives]]:
    """Coefficients of one group from all rows given; the intervals are still to be set (`with_intervals`).

    `words` are those that the trees may ask for; without them all that the rows have.
    """
    words = words or sorted(set().union(*(learned.words_of(text) for text in _texts(sample))))
    measured = factors(sample)
    relatives = {name: Relatives.of(sample.devices[name]) for name in measured}
    x = query.inputs(sample.kind, sample.columns, sample.devices, measured, words, emulate=True)
    forest = grow(x.features, np.log(sample.time_s / x.bound_s), trees=trees, depth=depth, rate=rate,
                  weight=np.minimum(1, EVEN / _alike(sample.columns, EVENLY)))
    shape = [np.log(np.maximum(sample.columns[s].astype(float), 1)) for s in query.KINDS[sample.kind].size]
    ranges = [np.log(x.bound_s), *shape]
    keys = np.array([f"{s} {b}" for s, b in zip(sample.columns["source"], sample.columns["backend"])])
    group = Group(names=x.names, words=tuple(words), factors=measured, default=_default(sample, keys),
                  low=tuple(float(v.min()) for v in ranges), high=tuple(float(v.max()) for v in ranges),
                  known=(0, 0), unknown=(0, 0))
    return group, forest, relatives


PLAIN = ("torch", "cublas", "flash", "fa2", "triton", "default", "flow")
"""Words of libraries that a training framework calls."""
COMMON = 0.01
"""Part of a group's rows that a library needs to be the default."""


def _default(sample: Sample, keys: NDArray[Any]) -> str:
    """What a query without a backend means: the plain library with kernels timed alone on the most devices, among those
    with enough rows to know its floor."""
    def merit(key: str) -> tuple[bool, bool, int, str]:
        rows = keys == key
        gpus = len(set(sample.columns["gpu"][rows]))
        return (gpus >= 3 and rows.mean() > COMMON, bool(learned.words_of(key) & set(PLAIN)), gpus, key)

    return max(sorted(map(str, set(keys))), key=merit)


def _texts(sample: Sample) -> set[str]:
    names = ("dtype", "source", "backend", *query.KINDS[sample.kind].texts)
    texts = set(zip(*(sample.columns[n] for n in names)))
    found = {" ".join(row) for row in texts}
    return found | {f"{d.arch} {d.vendor}" for name, d in sample.devices.items() if name in set(sample.columns["gpu"])}


def grow(x: NDArray[np.float32], y: Array, *, trees: int = TREES, depth: int = DEPTH, rate: float = RATE,
         weight: Array | None = None) -> Forest:
    """Boosted oblivious trees for y [rows] from x [rows, features], by least squares."""
    import json
    import tempfile

    from catboost import CatBoostRegressor

    model = CatBoostRegressor(iterations=trees, depth=depth, learning_rate=rate, border_count=BORDERS, **SETTINGS)
    model.fit(x, y, sample_weight=weight)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        data = json.loads(path.read_text())
    borders = [np.array(f["borders"] or (), np.float32) for f in data["features_info"]["float_features"]]
    feature = np.zeros((len(data["oblivious_trees"]), depth), np.int16)
    border = np.full((len(feature), depth), 255, np.uint8)
    leaves = np.zeros((len(feature), 2 ** depth), np.float32)
    scale, (bias,) = data["scale_and_bias"]
    for i, tree in enumerate(data["oblivious_trees"]):
        for j, split in enumerate(tree["splits"] or ()):
            feature[i, j] = split["float_feature_index"]
            border[i, j] = np.searchsorted(borders[feature[i, j]], np.float32(split["border"]))
        values = np.array(tree["leaf_values"], np.float64) * scale
        leaves[i, :len(values)] = values.astype(np.float16)
    return Forest(feature, border, leaves, tuple(borders), float(bias))


def times(sample: Sample, name: str, group: Group, forest: Forest, relatives: dict[str, Relatives], *,
          unknown: bool = False) -> Array:
    """Predicted seconds of rows; `unknown` takes every device as never seen."""
    found = {n: learned.factors_of(group, d, relatives, known=not unknown) for n, d in sample.devices.items()}
    layer = Layer({name: group}, {name: forest}, relatives)
    return query.predict(sample.kind, sample.columns, sample.devices, emulate=True, factors=found, layer=layer).time_s


class Score(NamedTuple):
    """Errors of one fold: which device or source was left out, rows, and log(measured / predicted) of each."""

    left_out: str
    rows: int
    mean: float
    median: float
    bias: float
    errors: Array
    features: NDArray[np.float32]


def score(left_out: str, sample: Sample, name: str, group: Group, forest: Forest, relatives: dict[str, Relatives], *,
          unknown: bool = False) -> Score:
    predicted = times(sample, name, group, forest, relatives, unknown=unknown)
    ape = np.abs(predicted / sample.time_s - 1)
    found = {n: learned.factors_of(group, d, relatives, known=not unknown) for n, d in sample.devices.items()}
    x = query.inputs(sample.kind, sample.columns, sample.devices, found, group.words, emulate=True,
                     group=group)
    return Score(left_out, sample.rows, float(ape.mean()), float(np.median(ape)),
                 float(np.mean(predicted / sample.time_s - 1)), np.log(sample.time_s / predicted), x.features)


def held_out(sample: Sample) -> NDArray[np.bool_]:
    """The rows that no fit sees, so that the shipped coefficients can be tested on them."""
    part = np.where(_alike(sample.columns, ("source", "gpu")) < FEW, HELD_OUT_FEW, HELD_OUT)
    return np.asarray(np.random.default_rng(1).random(sample.rows) < part)


Fitted = tuple[Group, Forest, dict[str, Relatives]]


def left_out(column: str, name: str, sample: Sample, folds: int = 100, least: int = LEAST,
             **settings: Any) -> Iterator[tuple[Score, Sample, Fitted]]:
    """Errors on each device (`gpu`) or `source` with at least `least` rows, left out with those of its fold; with its
    rows and the fit without it.

    Devices are dealt to folds by architecture, so that relatives are left out at different times.
    """
    values, counts = np.unique(sample.columns[column].astype(str), return_counts=True)
    order = [str(v) for v, n in zip(values, counts) if least <= n < sample.rows]
    if column == "gpu":
        order.sort(key=lambda v: (sample.devices[v].arch, v))
    for i in range(min(folds, len(order))):
        away = order[i::folds]
        out = np.isin(sample.columns[column].astype(str), away)
        if out.all():
            continue
        fitted = fit_group(sample.take(~out), **settings)
        for value in away:
            rest = sample.take(sample.columns[column] == value)
            yield score(value, rest, name, *fitted, unknown=column == "gpu"), rest, fitted


def spread_of(known: Score, weight: Array) -> Forest:
    """Trees for the logarithm of the size of the error, on every second of the held-out rows."""
    return grow(known.features[::2], np.log(np.abs(known.errors[::2]) + LEAST_ERROR), trees=SPREAD_TREES,
                depth=SPREAD_DEPTH, rate=SPREAD_RATE, weight=weight[::2])


def with_intervals(group: Group, spread: Forest, known: Score, weight: Array, unknown: Sequence[Score]) -> Group:
    """The group with the 10 and 90 % quantiles of errors in units of their expected size: on the held-out rows that the
    spread did not see, and on devices left out, which count alike."""
    mine = _quantiles([known._replace(errors=known.errors[1::2], features=known.features[1::2])], spread,
                      [weight[1::2]])
    others = _quantiles(unknown, spread, [np.full(s.rows, 1 / s.rows) for s in unknown]) if unknown else mine
    return group.replace(known=mine, unknown=(min(mine[0], others[0]), max(mine[1], others[1])))


def _quantiles(scores: Sequence[Score], spread: Forest, weights: Sequence[Array]) -> tuple[float, float]:
    errors = np.concatenate([s.errors / np.exp(spread.predict(s.features)) for s in scores])
    order = np.argsort(errors, kind="stable")
    cumulative = np.cumsum(np.concatenate(weights)[order])
    low, high = (float(errors[order][min(int(np.searchsorted(cumulative, q * cumulative[-1])), len(errors) - 1)])
                 for q in (0.1, 0.9))
    return low, high


def evenly(sample: Sample) -> Array:
    """Weights under which a source's rows of a device count as much as the root of their number."""
    return np.asarray(1 / np.sqrt(_alike(sample.columns, ("source", "gpu"))))


def fit(folder: Path, *, rows: int = ROWS, trees: int = 0, depth: int = 0, folds: int = FOLDS,
        groups: Sequence[str] = (), report: Callable[[str], None] = lambda text: None) -> Layer:
    """All groups from the kernel files in `folder`. InputError names a file and the columns that it lacks.

    `trees` and `depth` replace each group's. All devices are left out once, in `folds` smaller fits per group, to
    state the intervals of unseen devices.
    """
    layer = Layer({}, {}, {}, {})
    for name, sample in samples(folder, rows, groups).items():
        report(f"{name}: {sample.rows} rows of {len(set(sample.columns['gpu']))} devices")
        deep, rate = SLOWER.get(name, (DEPTH, RATE))
        add(layer, name, sample, trees=trees or MORE_TREES.get(name, TREES), depth=depth or deep, rate=rate,
            folds=folds, report=report)
    return layer


def add(layer: Layer, name: str, sample: Sample, *, trees: int, depth: int, folds: int, rate: float = RATE,
        report: Callable[[str], None]) -> None:
    """One more group of the layer."""
    test = held_out(sample)
    group, forest, relatives = fit_group(sample.take(~test), trees=trees, depth=depth, rate=rate)
    rest = sample.take(test)
    known, weight = score("rows", rest, name, group, forest, relatives), evenly(rest)
    small = sample.take(np.sort(np.random.default_rng(2).permutation(sample.rows)[:FOLD_ROWS]))
    away = [scored for scored, _, _ in left_out("gpu", name, small, folds, FOLD_LEAST, trees=min(trees, FOLD_TREES),
                                                depth=min(depth, FOLD_DEPTH), words=group.words)]
    spread = spread_of(known, weight)
    layer.groups[name] = with_intervals(group, spread, known, weight, away)
    layer.forests[name], layer.spreads[name] = forest, spread
    layer.relatives.update(relatives)
    report(f"{name}: held-out rows {known.mean:.1%} mean, {known.median:.1%} median; devices left out "
           + ", ".join(f"{s.left_out} {s.median:.1%}" for s in away))
