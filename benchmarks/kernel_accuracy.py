"""Errors of the kernel cost model: rows held out, devices left out, sources left out, and k measurements given.

    python benchmarks/kernel_accuracy.py DIR [--group gemm.16bit] [--rows 20000] [--trees 130] [--folds 4] [--what gpu]

DIR is a folder of measured kernel files (`gemm.parquet`, ...). Prints lines of text per group, and at last a Markdown
table of what measurements of a device left out achieve; "one factor" is the error once the device's constant factor,
the median of its errors, is divided out. Every fold is a fit of its own, with the factors of the device left out taken
from its relatives. Measurements are drawn at random, or designed: chosen among 500 random rows by their shapes, before
any of them is measured.

    python benchmarks/kernel_accuracy.py DIR --variants

tests what-if devices on real ones: each second device of `VARIANTS` is predicted by the shipped coefficients as the
first one with other figures, beside being predicted as itself and as the first one unchanged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mixfleet.calibrate import fit
from mixfleet.cost import learned, query
from mixfleet.cost.deviations import Places, design
from mixfleet.cost.learned import Forest, Group, Layer, Relatives

GIVEN, DESIGNED, REPEATS, LEAST, POOL, TESTED = (5, 20, 80), 20, 3, 60, 500, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--trees", type=int, default=130)
    parser.add_argument("--folds", type=int, default=4, help="fits among which devices, and sources, are dealt")
    parser.add_argument("--what", choices=("gpu", "source"), action="append", help="what to leave out (both)")
    parser.add_argument("--variants", action="store_true", help="real devices as variants of others, instead")
    args = parser.parse_args()
    if args.variants:
        variants(fit.samples(args.data, groups=args.group))
        return
    settings = {"trees": args.trees}
    table = []
    for name, sample in fit.samples(args.data, args.rows, args.group).items():
        test = fit.held_out(sample)
        known = fit.score("rows", sample.take(test), name, *fit.fit_group(sample.take(~test), **settings))
        print(f"{name}: {sample.rows} rows; held out: mean {known.mean:.1%}, median {known.median:.1%}", flush=True)
        for column in args.what or ("gpu", "source"):
            what = {"gpu": "device"}.get(column, column)
            scores, after = [], list[list[float]]()
            for scored, rest, fitted in fit.left_out(column, name, sample, args.folds, LEAST, **settings):
                scores.append(scored)
                text = f"  without {what} {scored.left_out}: mean {scored.mean:.1%}, median {scored.median:.1%}, " \
                       f"bias {scored.bias:+.1%}"
                factor = float(np.median(np.abs(np.exp(np.median(scored.errors) - scored.errors) - 1)))
                text += f"; without its factor {factor:.1%}"
                found = given(rest, name, fitted) if column == "gpu" else []
                if found:
                    after.append([scored.median, factor, *found])
                    text += "".join(f"; given {k}: {m:.1%}" for k, m in zip(NAMES, found))
                print(text, flush=True)
            if scores:
                median, mean = (np.mean([getattr(s, field) for s in scores]) for field in ("median", "mean"))
                print(f"{name}: mean of {len(scores)} {what}s left out: median {median:.1%}, mean {mean:.1%}",
                      flush=True)
            if after:
                table.append((name, np.array(after)))
    print("\n| group | devices |", " | ".join(("none", "one factor", *NAMES)), "|\n| --- | --: |",
          "--: | " * (len(NAMES) + 2))
    for name, errors in table:
        cells = [f"{mean:.1%}, {middle:.1%}" for mean, middle in zip(errors.mean(0), np.median(errors, 0))]
        print(f"| {name} | {len(errors)} |", " | ".join(cells), "|")


VARIANTS = (("H100-SXM", "H200-SXM"), ("H200-SXM", "H100-SXM"), ("A100-PCIe-40GB", "A100-PCIe-80GB"),
            ("H100-SXM", "H800-SXM"), ("B200-SXM", "GB200"), ("GB200", "GB300"), ("A6000", "A40"),
            ("A100-SXM4-80GB", "H100-SXM"), ("H100-SXM", "B200-SXM"))
COMPARED = 600


def variants(samples: dict[str, fit.Sample]) -> None:
    """A table of median errors per pair: means over the groups that have both devices."""
    print("| base | device | groups | as itself | as a variant | base unchanged |\n| --- | --- |", "--: | " * 4)
    for base, name in VARIANTS:
        found = []
        for sample in samples.values():
            gpus = sample.columns["gpu"]
            at = np.flatnonzero(gpus == name)
            at = at[np.random.default_rng(0).permutation(len(at))[:COMPARED]]
            if len(at) < LEAST or base not in gpus:
                continue
            some = sample.take(at)
            itself, other = sample.devices[name], sample.devices[base]
            same = {field: getattr(other, field) for field in learned.RESOURCES}
            found.append([float(np.median(np.abs(query.predict(
                sample.kind, some.columns, {name: device}, emulate=True).time_s / some.time_s - 1)))
                for device in (itself, itself.replace(base=base), itself.replace(base=base, **same))])
        if found:
            print(f"| {base} | {name} | {len(found)} |", " | ".join(f"{m:.1%}" for m in np.mean(found, 0)), "|",
                  flush=True)


NAMES = (*map(str, GIVEN), f"{DESIGNED} designed")


Fitted = tuple[Group, Forest, dict[str, Relatives]]


def given(rest: fit.Sample, name: str, fitted: Fitted) -> list[float]:
    """Median errors on the other rows once `GIVEN` random rows of the device are given, and then designed ones; means
    over a few draws. Empty for a device that has not twice as many rows."""
    if rest.rows < 2 * max(GIVEN):
        return []
    found = [[_error(rest, name, fitted, order[:k], order[k:]) for order in _orders(rest)] for k in GIVEN]
    designed = []
    for order in _orders(rest):
        some = _designed(rest, name, fitted, np.sort(order[:POOL]))
        designed.append(_error(rest, name, fitted, some, np.setdiff1d(order, some, assume_unique=True)))
    return [float(np.mean(each)) for each in (*found, designed)]


def _orders(rest: fit.Sample) -> list[np.ndarray]:
    return [np.random.default_rng(draw).permutation(rest.rows) for draw in range(REPEATS)]


def _designed(rest: fit.Sample, name: str, fitted: Fitted, pool: np.ndarray) -> np.ndarray:
    group, forest, relatives = fitted
    some = rest.take(pool)
    device = rest.devices[str(rest.columns["gpu"][0])]
    factors = {device.name: learned.factors_of(group, device, relatives, known=False)}
    x = query.inputs(rest.kind, some.columns, {device.name: device}, factors, group.words, emulate=True,
                     group=group)
    texts, which = query.texts_of(some.columns, query.TEXTS, some.rows)
    return pool[design(Places.of(x, forest, texts, which, np.arange(some.rows)), DESIGNED)]


def _error(rest: fit.Sample, name: str, fitted: Fitted, some: np.ndarray, others: np.ndarray) -> float:
    group, forest, relatives = fitted
    layer = Layer({name: group}, {name: forest}, relatives, {})
    device = rest.devices[str(rest.columns["gpu"][0])]
    few, test = rest.take(some), rest.take(others[:TESTED])
    factors = query.adapt(device, rest.kind, few.columns, few.time_s, emulate=True, layer=layer)
    predicted = query.predict(rest.kind, test.columns, rest.devices, emulate=True, layer=layer, factors=factors).time_s
    return float(np.median(np.abs(predicted / test.time_s - 1)))


if __name__ == "__main__":
    main()
