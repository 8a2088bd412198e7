"""Predicted against published step times and peak memory, and the choice among measured configurations.

    python benchmarks/accuracy.py TABLE.csv [--runs N] [--scan]

TABLE.csv holds published training runs, one metric per row; `mixfleet validate TABLE.csv` states the errors of all of
them. Here sources weigh equally, whatever their number of runs. `--scan` tries the coefficients chosen on whole
steps and leaves one source out at a time. What a table of this kind leaves open is settled in
`mixfleet.calibrate.published`, what frameworks do otherwise in `mixfleet.calibrate.frameworks`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mixfleet.calibrate.published import Case, Score, read, scores
from mixfleet.catalog import efficiency

GROUP = 4
"""Fewest measured configurations of one model, batch and number of GPUs to choose among."""


def errors(found: Sequence[Score], what: str) -> list[float]:
    """Signed relative errors of the runs that publish `what`."""
    return [getattr(s, what) / published - 1 for s in found if (published := getattr(s.case, what))]


def scan(by_source: dict[str, list[Case]]) -> None:
    """Every source's median error with each coefficient that is chosen on whole steps moved by itself, and for each
    source what the choice of all the others gives it."""
    shipped = efficiency.SUSTAINED["gpu"], efficiency.LAUNCH_S["gpu"], efficiency.THROTTLE
    moved = ((0.84, 0.92), (50e-6, 100e-6), (0.15, 0.45))
    grid = [shipped, *((*shipped[:i], value, *shipped[i + 1:]) for i, values in enumerate(moved) for value in values)]
    print("| part of kernel rates sustained | host seconds per kernel | throttling | mean of medians | mean bias |")
    print("| --: | --: | --: | --: | --: |")
    middles: dict[str, list[float]] = defaultdict(list)
    for sustained, launch_s, throttle in grid:
        efficiency.SUSTAINED["gpu"], efficiency.LAUNCH_S["gpu"], efficiency.THROTTLE = sustained, launch_s, throttle
        found = {source: errors(list(scores([c._replace(job=c.job.replace()) for c in cases], Counter())), "step_s")
                 for source, cases in by_source.items()}
        for source, errs in found.items():
            middles[source].append(statistics.median(map(abs, errs)))
        bias = statistics.mean(statistics.median(f) for f in found.values())
        middle = statistics.mean(m[-1] for m in middles.values())
        print(f"| {sustained:.2f} | {launch_s * 1e6:.0f} us | {throttle} | {middle:.1%} | {bias:+.1%} |", flush=True)
    print("\n| source left out | chosen by the others | its median |\n| --- | --- | --: |")
    for source, own in middles.items():
        best = min(range(len(grid)), key=lambda i: sum(m[i] for other, m in middles.items() if other != source))
        sustained, launch_s, throttle = grid[best]
        print(f"| {source} | {sustained:.2f}, {launch_s * 1e6:.0f} us, {throttle} | {own[best]:.1%} |")


def line(name: str, found: Sequence[Score]) -> tuple[str, float, float]:
    """A row of the table, and the medians of both errors; NaN where the source publishes none."""
    cells, middles = [name], []
    for errs in (errors(found, "step_s"), errors(found, "peak_bytes")):
        size = sorted(map(abs, errs))
        middles.append(statistics.median(size) if size else float("nan"))
        cells += [str(len(errs)), f"{statistics.median(errs):+.0%}", f"{middles[-1]:.0%}",
                  f"{statistics.mean(size):.0%}", f"{size[int(0.9 * (len(size) - 1))]:.0%}"] if errs else [""] * 5
    return f"| {' | '.join(cells)} | {sum(not s.fits for s in found)} |", middles[0], middles[1]


def choices(found: Sequence[Score]) -> Iterator[tuple[float, bool]]:
    """Per group of measured configurations: cost of the predicted best over that of the real best, and whether hit."""
    groups: dict[tuple[object, ...], list[Score]] = defaultdict(list)
    for s in found:
        if s.case.step_s:
            job, model = s.case.job, s.case.job.model
            groups[s.case.source, s.case.gpu, model.hidden, model.layers, model.heads, job.seq_len, job.global_batch,
                   job.precision, len(s.case.cluster.devices)].append(s)
    for group in groups.values():
        if len(group) >= GROUP:
            picked = min(group, key=lambda s: s.step_s).case.step_s
            best = min(s.case.step_s for s in group if s.case.step_s)
            yield (picked or best) / best, picked == best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=int, default=40, help="at most so many runs per source, drawn with a seed")
    parser.add_argument("--most", type=int, default=4096, help="leave out runs on more GPUs than this")
    parser.add_argument("--scan", action="store_true", help="try coefficients, leaving one source out at a time")
    parser.add_argument("--choose", help="only choose among the measured configurations of this source")
    options = parser.parse_args()
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in read(options.table)[0]:
        if len(case.cluster.devices) <= options.most:
            by_source[case.source].append(case)
    if options.choose:
        found = list(choices(list(scores(by_source[options.choose], Counter()))))
        print(f"{len(found)} groups: {statistics.mean(cost for cost, _ in found):.3f} times the best, "
              f"{statistics.mean(hit for _, hit in found):.0%} exact")
        return
    drawn = {source: random.Random(0).sample(found, min(options.runs, len(found)))
             for source, found in sorted(by_source.items())}
    if options.scan:
        return scan(drawn)
    print("| source | runs | bias | median | mean | 90 % below | memory runs | bias | median | mean | 90 % below "
          "| judged not to fit |")
    print("| --- |" + " --: |" * 11, flush=True)
    middles = []
    for name, cases in drawn.items():
        text, *both = line(name, list(scores(cases, Counter())))
        print(text, flush=True)
        middles.append(both)
    for what, middle in (("mean", statistics.mean), ("median", statistics.median)):
        step, memory = (middle([m for m in column if m == m]) for column in zip(*middles))
        print(f"| **{what} of medians** | | | **{step:.0%}** | | | | | **{memory:.0%}** | | | |")


if __name__ == "__main__":
    main()
