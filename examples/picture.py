"""Draws the predicted timeline of a plan as an SVG file, as in the README.

    python examples/picture.py out/lab-plan.yaml docs/timeline.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from mixfleet import Cluster, Job, Plan, predict
from mixfleet.files import write_text
from mixfleet.report.timeline import svg


def main(plan_path: str, picture_path: str) -> None:
    plan, folder = Plan.load(plan_path), Path(plan_path).parent
    job, cluster = Job.load(folder / plan.job), Cluster.load(folder / plan.cluster)
    prediction = predict(plan, job, cluster, trace=True)
    assert prediction.trace is not None
    capacity = {use.rank: use.capacity_bytes for use in prediction.devices}
    title = f"{job.name} on {cluster.name}: one step, as predicted"
    write_text(picture_path, svg(prediction.trace, capacity=capacity, title=title, width=1000))


if __name__ == "__main__":
    main(*sys.argv[1:])
