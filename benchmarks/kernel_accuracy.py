"""Errors of the kernel cost model: rows held out, devices left out, sources left out, and k measurements given.

    python benchmarks/kernel_accuracy.py DIR [--group gemm.16bit] [--rows 20000] [--trees 130] [--folds 4]

DIR is a folder of measured kernel files (`gemm.parquet`, ...). Prints one Markdown row per group. Every fold is a fit
of its own, with the factors of the device left out taken from its relatives.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mixfleet.calibrate import fit
from mixfleet.calibrate.adapt import adapt
from mixfleet.cost import query
from mixfleet.cost.learned import Forest, Group, Layer, Relatives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--trees", type=int, default=130)
    parser.add_argument("--folds", type=int, default=4, help="fits among which devices, and sources, are dealt")
    args = parser.parse_args()
    settings = {"trees": args.trees}
    for name, sample in fit.samples(args.data, args.rows, args.group).items():
        test = fit.held_out(sample)
        known = fit.score("rows", sample.take(test), name, *fit.fit_group(sample.take(~test), **settings))
        print(f"{name}: {sample.rows} rows; held out: mean {known.mean:.1%}, median {known.median:.1%}", flush=True)
        for column, what in (("gpu", "device"), ("source", "source")):
            scores, after = [], list[tuple[float, ...]]()
            for scored, rest, fitted in fit.left_out(column, name, sample, args.folds, LEAST, **settings):
                scores.append(scored)
                text = f"  without {what} {scored.left_out}: mean {scored.mean:.1%}, median {scored.median:.1%}, " \
                       f"bias {scored.bias:+.1%}"
                if column == "gpu":
                    found = given(rest, name, fitted)
                    after += [found] if len(found) == len(GIVEN) else []
                    text += "".join(f"; given {k}: {m:.1%}" for k, m in zip(GIVEN, found))
                print(text, flush=True)
            if scores:
                median, mean = (np.mean([getattr(s, field) for s in scores]) for field in ("median", "mean"))
                text = "".join(f"; median given {k} {m:.1%}" for k, m in zip(GIVEN, np.mean(after, 0))) if after else ""
                print(f"{name}: mean of {len(scores)} {what}s left out: median {median:.1%}, mean {mean:.1%}{text}",
                      flush=True)


GIVEN, REPEATS, LEAST = (5, 20, 80), 3, 60


def given(rest: fit.Sample, name: str, fitted: tuple[Group, Forest, dict[str, Relatives]]) -> tuple[float, ...]:
    """Median errors on the other rows once some rows of the device are given, over a few draws of them."""
    group, forest, relatives = fitted
    layer = Layer({name: group}, {name: forest}, relatives, {})
    device = rest.devices[str(rest.columns["gpu"][0])]
    found = []
    for k in GIVEN:
        if rest.rows < 2 * k:
            break
        medians = []
        for draw in range(REPEATS):
            order = np.random.default_rng(draw).permutation(rest.rows)
            some, others = rest.take(order[:k]), rest.take(order[k:][:1000])
            factors = adapt(device, rest.kind, some.columns, some.time_s, emulate=True, layer=layer)
            predicted = query.predict(rest.kind, others.columns, rest.devices, emulate=True, layer=layer,
                                      factors=factors).time_s
            medians.append(float(np.median(np.abs(predicted / others.time_s - 1))))
        found.append(float(np.mean(medians)))
    return tuple(found)


if __name__ == "__main__":
    main()
