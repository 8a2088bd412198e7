"""`mixfleet schedules`: which pipeline schedules are there, and what do they cost?"""

from __future__ import annotations

from pathlib import Path

import click

from mixfleet.cli._common import emit, emit_json, json_option, progress


@click.command()
@click.option("--stages", type=click.IntRange(1, 64), default=4, show_default=True, help="Devices in the pipeline.")
@click.option("--micro-batches", type=click.IntRange(1, 1024), default=8, show_default=True, help="Per step.")
@click.option("--chunks", type=click.IntRange(1, 16), default=2, show_default=True,
              help="Block ranges per stage, for schedules that pass a device several times.")
@click.option("--svg", type=click.Path(file_okay=False, path_type=Path), help="Draw each into this folder.")
@json_option
def schedules(stages: int, micro_batches: int, chunks: int, svg: Path | None, as_json: bool) -> None:
    """List the pipeline schedules. All figures are computed from the orders themselves.

    A stage's forward takes 1, its backward 2 or two halves of 1, messages nothing. Asynchronous ones take an optimizer
    step after every so many micro-batches and go on; they are judged between fill and drain.
    """
    from mixfleet.report import schedules as report
    from mixfleet.schedule.asynchronous import fill, stream
    from mixfleet.schedule.named import SCHEDULES
    from mixfleet.schedule.properties import Properties, even_work, of_turns, properties, turns

    found, refused = [], {}
    for name in SCHEDULES:
        one = properties(name, stages, micro_batches, chunks)
        if isinstance(one, Properties):
            found.append(one)
        else:
            refused[name] = one
    found.append(of_turns(stages, micro_batches, chunks))
    if svg:
        svg.mkdir(parents=True, exist_ok=True)
        for p in found:
            if p.name not in SCHEDULES:
                made = turns(stages, micro_batches, chunks)
                (svg / f"{p.name}.svg").write_text(report.svg(made.done, made.orders), encoding="utf-8")
                continue
            schedule = SCHEDULES[p.name]
            orders = (stream(p.home, micro_batches, fill(stages, micro_batches) + 2, schedule.weights)
                      if schedule.weights else schedule.orders(p.home, *schedule.counts(micro_batches)))
            picture = report.svg(even_work(p.name, p.home, micro_batches, splits=p.splits), orders)
            (svg / f"{p.name}.svg").write_text(picture, encoding="utf-8")
        progress(f"wrote {len(found)} pictures to {svg}")
    if as_json:
        emit_json({"schedules": found, "refused": refused})
    else:
        emit(report.table(found, refused))
