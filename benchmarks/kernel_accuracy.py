"""Errors of the kernel cost model: rows held out, devices left out, sources left out, and k measurements given.

    python benchmarks/kernel_accuracy.py DIR [--group gemm.16bit] [--rows 20000] [--trees 130] [--most 6]

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
from mixfleet.cost.learned import Layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", action="append", default=[])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--trees", type=int, default=130)
    parser.add_argument("--most", type=int, default=6, help="devices and sources left out per group")
    args = parser.parse_args()
    settings = {"trees": args.trees}
    for name, sample in fit.samples(args.data, args.rows, args.group).items():
        test = fit.held_out(sample)
        fitted = fit.fit_group(sample.take(~test), **settings)
        known = fit.score("rows", sample.take(test), name, *fitted)
        print(f"{name}: {sample.rows} rows; held out: mean {known.mean:.1%}, median {known.median:.1%}", flush=True)
        for column, left in (("gpu", "device"), ("source", "source")):
            scores = []
            values, counts = np.unique(sample.columns[column], return_counts=True)
            for value in values[np.argsort(-counts, kind="stable")][:args.most]:
                out = sample.columns[column] == value
                if not fit.LEAST <= out.sum() < sample.rows:
                    continue
                group, forest, relatives = fit.fit_group(sample.take(~out), **settings)
                rest = sample.take(out)
                scores.append(fit.score(str(value), rest, name, group, forest, relatives, unknown=column == "gpu"))
                text = f"  without {left} {value}: mean {scores[-1].mean:.1%}, median {scores[-1].median:.1%}, " \
                       f"bias {scores[-1].bias:+.1%}"
                if column == "gpu":
                    layer = Layer({name: group}, {name: forest}, relatives)
                    text += given(rest, name, layer)
                print(text, flush=True)
            if scores:
                print(f"{name}: {left}s left out: mean {np.mean([s.mean for s in scores]):.1%}, median of rows "
                      f"{np.median(np.concatenate([np.abs(np.expm1(-s.errors)) for s in scores])):.1%}, "
                      f"mean of medians {np.mean([s.median for s in scores]):.1%}", flush=True)


def given(rest: fit.Sample, name: str, layer: Layer) -> str:
    """Errors on the other rows once 5, 20 and 80 rows of the device are given."""
    order = np.random.default_rng(3).permutation(rest.rows)
    text = ""
    for k in (5, 20, 80):
        if rest.rows < 2 * k:
            break
        some, others = rest.take(order[:k]), rest.take(order[k:][:2000])
        device = rest.devices[str(some.columns["gpu"][0])]
        factors = adapt(device, rest.kind, some.columns, some.time_s, emulate=True, layer=layer)
        predicted = query.predict(rest.kind, others.columns, rest.devices, emulate=True, layer=layer,
                                  factors=factors).time_s
        ape = np.abs(predicted / others.time_s - 1)
        text += f"; given {k}: mean {ape.mean():.1%}, median {np.median(ape):.1%}"
    return text


if __name__ == "__main__":
    main()
