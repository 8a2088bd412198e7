"""Fit the learned layer of kernel costs on measured kernel times: `mixfleet calibrate fit --data DIR`.

Deterministic: rows are drawn with a fixed seed, evenly over source, device and type; the trees (CatBoost, extra `fit`)
have no randomness. So the same files give the same coefficients. Cross-validation leaves whole devices or sources out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mixfleet.calibrate.tables import Table, read
from mixfleet.cluster import Device
from mixfleet.cost import learned, query
from mixfleet.cost.demand import DRAM, TENSOR, Array, type_named
from mixfleet.cost.learned import Factors, Forest, Group, Layer, Relatives
from mixfleet.errors import InputError

ROWS = 50_000
"""Drawn per group."""
EVENLY = ("source", "gpu", "dtype", "op")
EVEN = 4000
"""Rows of a source, device and type up to which all count; larger ones get this much weight."""
TREES, DEPTH, RATE, BORDERS = 400, 7, 0.15, 128
HELD_OUT = 0.1
BEST = 0.8
"""Quantile of what kernels of a device reach that becomes its effective rate."""
FLOOR = 0.01
UNMEASURED_DRAM = 0.8
LEAST = 12
"""Rows from which a factor is estimated."""
BINS = (0.5, 1.0, 2.0, 3.0, 5.0)
SETTINGS = {"loss_function": "RMSE", "random_seed": 0, "verbose": 0, "allow_writing_files": False,
            "bootstrap_type": "No", "boosting_type": "Plain", "l2_leaf_reg": 1.0, "random_strength": 0.0,
            "score_function": "L2", "thread_count": 2}


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
    """The groups' rows, drawn from the data files of a folder; `groups` limits to those."""
    tables: dict[str, list[Table]] = {}
    for path in sorted(folder.glob("*.parquet")):
        table = read(path, optional=True)
        if table is not None:
            tables.setdefault(table.kind, []).append(table)
    if not tables:
        raise InputError("there are no kernel files (*.parquet) that mixfleet knows", where=str(folder))
    found = {}
    for kind, parts in sorted(tables.items()):
        names = sorted({name for part in parts for name in part.columns})
        columns = {name: np.concatenate([part.column(name) for part in parts]) for name in names}
        devices = {name: d for part in parts for name, d in part.devices.items()}
        times = np.concatenate([part.time_s for part in parts])
        pairs, which = query.texts_of(columns, ("dtype", "op"), len(times))
        group = np.array([query.group_of(kind, *pair) for pair in pairs], dtype=object)[which]
        for name in sorted(set(group)):
            if groups and name not in groups:
                continue
            at = np.flatnonzero(group == name)
            _, code = query.texts_of({c: columns[c][at] for c in EVENLY}, EVENLY, len(at))
            count = np.bincount(code)
            weight = 1 / np.maximum(count[code], EVEN)
            drawn = np.random.default_rng(0).choice(len(at), min(rows, len(at)), replace=False, p=weight / weight.sum())
            found[name] = Sample(kind, {k: v[at[np.sort(drawn)]] for k, v in columns.items()}, devices,
                                 times[at[np.sort(drawn)]])
    return found


def factors(sample: Sample) -> dict[str, Factors]:
    """Effective factors of each device in the rows: floors by quantile, rates from what its best kernels reach."""
    kind, gpu = sample.kind, sample.columns["gpu"]
    plain = {name: Factors(floor_s={"": 1e-7}) for name in sample.devices}
    x = query.inputs(kind, sample.columns, sample.devices, plain, (), emulate=True)
    seconds = x.demand.total_s(x.machine)
    tensor, dram = seconds[:, TENSOR], seconds[:, DRAM]
    types = np.array([type_named(t).rate for t in sample.columns["dtype"]])
    found = {}
    for name in sorted(set(gpu)):
        mine = gpu == name
        floors: dict[str, float] = {}
        source, backend, dtype = (sample.columns[c][mine] for c in ("source", "backend", "dtype"))
        time = sample.time_s[mine]
        for keys in (np.array([f"{s} {b} {t}" for s, b, t in zip(source, backend, dtype)]), source):
            for key in sorted(set(keys)):
                if np.sum(keys == key) >= LEAST or " " not in key:
                    floors[str(key)] = float(np.quantile(time[keys == key], FLOOR)) * 0.98
        large = mine & (sample.time_s > 20 * min(floors.values()))
        chip = {}
        for run in sorted(set(types[mine])):
            rows = large & (types == run) & (tensor > 3 * dram)
            if rows.sum() >= LEAST:
                chip[str(run)] = float(np.clip(np.quantile(tensor[rows] / sample.time_s[rows], BEST), 0.05, 2))
        rows = large & (dram > 3 * tensor) & (x.demand.more["in_cache"] > 2)
        rate = UNMEASURED_DRAM
        if rows.sum() >= LEAST:
            rate = float(np.clip(np.quantile(dram[rows] / sample.time_s[rows], BEST), 0.05, 1.2))
        found[str(name)] = Factors(chip=chip, dram=rate, floor_s=floors)
    return found


def fit_group(sample: Sample, *, trees: int = TREES, depth: int = DEPTH) -> tuple[Group, Forest, dict[str, Relatives]]:
    """Coefficients of one group from all rows given; the intervals are still to be set (`with_intervals`)."""
    words = sorted(set().union(*(learned.words_of(text) for text in _texts(sample))))
    measured = factors(sample)
    relatives = {name: Relatives.of(sample.devices[name]) for name in measured}
    x = query.inputs(sample.kind, sample.columns, sample.devices, measured, words, emulate=True)
    forest = grow(x.features, np.log(sample.time_s / x.bound_s), trees=trees, depth=depth)
    shape = [np.log(np.maximum(sample.columns[s].astype(float), 1)) for s in query.KINDS[sample.kind].size]
    ranges = [np.log(x.bound_s), *shape]
    keys = np.array([f"{s} {b}" for s, b in zip(sample.columns["source"], sample.columns["backend"])])
    group = Group(names=x.names, words=tuple(words), factors=measured, default=_default(sample, keys),
                  low=tuple(float(v.min()) for v in ranges), high=tuple(float(v.max()) for v in ranges), edges=BINS,
                  known=((0.0, 0.0),) * (len(BINS) + 1), unknown=((0.0, 0.0),) * (len(BINS) + 1))
    return group, forest, relatives


PLAIN = ("torch", "cublas", "flash", "fa2", "triton", "default", "flow")
"""Words of libraries that a training framework calls."""


def _default(sample: Sample, keys: NDArray[Any]) -> str:
    """What a query without a backend means: the plain library with kernels timed alone on the most devices."""
    def merit(key: str) -> tuple[int, int, int, str]:
        gpus = len(set(sample.columns["gpu"][keys == key]))
        return (gpus >= 3, int(bool(learned.words_of(key) & set(PLAIN))), gpus, key)

    return max(sorted(map(str, set(keys))), key=merit)


def _texts(sample: Sample) -> set[str]:
    names = ("dtype", "source", "backend", *query.KINDS[sample.kind].texts)
    texts = set(zip(*(sample.columns[n] for n in names)))
    found = {" ".join(row) for row in texts}
    return found | {f"{d.arch} {d.vendor}" for name, d in sample.devices.items() if name in set(sample.columns["gpu"])}


def grow(x: NDArray[np.float32], y: Array, *, trees: int = TREES, depth: int = DEPTH) -> Forest:
    """Boosted oblivious trees for y [rows] from x [rows, features], by least squares."""
    import json
    import tempfile

    from catboost import CatBoostRegressor

    model = CatBoostRegressor(iterations=trees, depth=depth, learning_rate=RATE, border_count=BORDERS, **SETTINGS)
    model.fit(x, y)
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
    over_floor: Array


def score(left_out: str, sample: Sample, name: str, group: Group, forest: Forest, relatives: dict[str, Relatives], *,
          unknown: bool = False) -> Score:
    predicted = times(sample, name, group, forest, relatives, unknown=unknown)
    ape = np.abs(predicted / sample.time_s - 1)
    found = {n: learned.factors_of(group, d, relatives, known=not unknown) for n, d in sample.devices.items()}
    floor = np.array([learned.floor_of(found[g], s, b, t) for g, s, b, t in
                      zip(*(sample.columns[c] for c in ("gpu", "source", "backend", "dtype")))])
    return Score(left_out, sample.rows, float(ape.mean()), float(np.median(ape)),
                 float(np.mean(predicted / sample.time_s - 1)), np.log(sample.time_s / predicted),
                 np.log(np.maximum(predicted / floor, 1)))


def held_out(sample: Sample) -> NDArray[np.bool_]:
    """The rows that no fit sees, so that the shipped coefficients can be tested on them."""
    return np.asarray(np.random.default_rng(1).random(sample.rows) < HELD_OUT)


def leave_out(column: str, name: str, sample: Sample, most: int = 100, **settings: Any) -> list[Score]:
    """Each device (`gpu`) or `source` with enough rows left out in turn, largest first, at most `most` of them."""
    values, counts = np.unique(sample.columns[column], return_counts=True)
    scores = []
    for value in values[np.argsort(-counts, kind="stable")][:most]:
        out = sample.columns[column] == value
        if LEAST <= out.sum() < sample.rows:
            fitted = fit_group(sample.take(~out), **settings)
            scores.append(score(str(value), sample.take(out), name, *fitted, unknown=column == "gpu"))
    return scores


def with_intervals(group: Group, known: Sequence[Score], unknown: Sequence[Score]) -> Group:
    """The group with 10 and 90 % quantiles of the errors of held-out rows and of devices left out."""
    return group.replace(known=_quantiles(known), unknown=_quantiles(unknown or known))


def _quantiles(scores: Sequence[Score]) -> tuple[tuple[float, float], ...]:
    errors = np.concatenate([s.errors for s in scores])
    over = np.concatenate([s.over_floor for s in scores])
    weight = np.concatenate([np.full(s.rows, 1 / s.rows) for s in scores])
    found = []
    for i in range(len(BINS) + 1):
        rows = np.searchsorted(np.array(BINS), over) == i
        if rows.sum() < LEAST:
            rows = np.ones(len(errors), bool)
        order = np.argsort(errors[rows], kind="stable")
        cumulative = np.cumsum(weight[rows][order]) / weight[rows].sum()
        low, high = (float(errors[rows][order][min(np.searchsorted(cumulative, q), rows.sum() - 1)])
                     for q in (0.1, 0.9))
        found.append((low, high))
    return tuple(found)


def fit(folder: Path, *, rows: int = ROWS, trees: int = TREES, depth: int = DEPTH, folds: int = 2,
        groups: Sequence[str] = (), report: Callable[[str], None] = lambda text: None) -> Layer:
    """All groups from the kernel files in `folder`. InputError names a file and the columns that it lacks.

    `folds` devices per group are left out in turn, with a third of the trees, to state the intervals of unseen devices.
    """
    layer = Layer({}, {}, {})
    for name, sample in samples(folder, rows, groups).items():
        report(f"{name}: {sample.rows} rows of {len(set(sample.columns['gpu']))} devices")
        test = held_out(sample)
        group, forest, relatives = fit_group(sample.take(~test), trees=trees, depth=depth)
        known = score("rows", sample.take(test), name, group, forest, relatives)
        small = sample.take(np.random.default_rng(2).permutation(sample.rows)[:rows // 3])
        away = leave_out("gpu", name, small, folds, trees=max(1, trees // 3), depth=depth)
        layer.groups[name] = with_intervals(group, [known], away)
        layer.forests[name] = forest
        layer.relatives.update(relatives)
        report(f"{name}: held-out rows {known.mean:.1%} mean, {known.median:.1%} median; devices left out "
               + ", ".join(f"{s.left_out} {s.median:.1%}" for s in away))
    return layer


