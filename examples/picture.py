"""Draws how a step of a plan begins, as predicted, as an SVG file; the README shows one.

    python examples/picture.py out/lab-plan.yaml docs/timeline.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from mixfleet import Cluster, Job, Plan, predict
from mixfleet.files import write_text
from mixfleet.report.timeline import svg
from mixfleet.units import NS_PER_S, show_seconds

PART = 5
"""One such part of the step is drawn."""


def main(plan_path: str, picture_path: str) -> None:
    plan, folder = Plan.load(plan_path), Path(plan_path).parent
    job, cluster = Job.load(folder / plan.job), Cluster.load(folder / plan.cluster)
    prediction = predict(plan, job, cluster, trace=True)
    assert prediction.trace is not None
    capacity = {use.rank: use.capacity_bytes for use in prediction.devices}
    end = prediction.trace.steps_ns[0][1]
    start = prediction.trace.replace(meta=prediction.trace.meta | {"steps_ns": [[0, end // PART]]})
    title = f"{job.name} on {cluster.name}, as predicted: the start of a step of {show_seconds(end / NS_PER_S)}"
    write_text(picture_path, svg(start, capacity=capacity, title=title, width=1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
