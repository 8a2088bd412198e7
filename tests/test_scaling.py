"""Strong and weak scaling: the best plan on ever more devices, where they stop paying, when batches may not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sim_toys
from mixfleet import cli
from mixfleet.cluster import Cluster, Link, Node
from mixfleet.errors import InputError
from mixfleet.job import Data, Job
from mixfleet.model.families import build
from mixfleet.plan_rules import why_not
from mixfleet.search.scaling import Point, fastest, pays_until, samples_of, scaling

FAST, SLOW = (sim_toys.device([]).replace(flops={"fp32": 3e11 / n}, vector_flops=3e11 / n, memory_Bps=3e10 / n,
                                          name=f"d{n}") for n in (1, 3))
MODEL = build({"style": "gpt", "layers": 2, "hidden": 96, "heads": 6, "ffn": 384, "vocab": 212, "max_seq_len": 512})
LINK, NIC = Link(latency_s=1e-6, bandwidth_Bps=1e12), Link(latency_s=1e-6, bandwidth_Bps=1e11)
MIXED = Cluster(name="mixed", nodes=(Node(name="a", devices=(SLOW, SLOW), link=LINK, nic=NIC),
                                     Node(name="b", devices=(SLOW, FAST), link=LINK, nic=NIC)))


def job(global_batch: int = 12) -> Job:
    return Job(name="j", model=MODEL, seq_len=512, global_batch=global_batch, precision="fp32")


def test_the_fastest_come_first_and_keep_their_nodes() -> None:
    assert [[d.name for d in n.devices] for n in fastest(MIXED, 1, job()).nodes] == [["d1"]]
    assert [(n.name, [d.name for d in n.devices]) for n in fastest(MIXED, 3, job()).nodes] == [
        ("a", ["d3", "d3"]), ("b", ["d1"])]
    assert fastest(MIXED, 4, job()) == MIXED
    with pytest.raises(InputError, match="5 devices of mixed: it has 4"):
        fastest(MIXED, 5, job())


def test_strong_scaling_keeps_the_batch_and_shares_it_by_speed() -> None:
    """S58: the batch stays, and goes to a device and one a third as fast as 9 and 3; each point is a plan that can be
    run."""
    points = scaling(job(), MIXED, (2, 1))
    assert [(p.devices, p.global_batch) for p in points] == [(1, 12), (2, 12)]
    assert [p.speed for p in points] == pytest.approx([1, 4 / 3])
    steps = [p.step_s for p in points]
    assert steps == sorted(steps, reverse=True)
    for p in points:
        assert p.plan is not None
        assert p.plan.global_batch == 12
        assert why_not(p.plan, job(), fastest(MIXED, p.devices, job())) is None
    assert points[1].plan is not None
    assert sorted(p.samples for p in points[1].plan.pipelines) == [3, 9]
    assert points[1].gained == pytest.approx((steps[0] / steps[1] - 1) / (1 / 3))
    assert points[1].gained > 0.5


def test_where_more_devices_stop_paying() -> None:
    def point(devices: int, per_s: float, why: str = "") -> Point:
        return Point(devices=devices, global_batch=8, speed=devices, step_s=1.0, per_s=per_s, why=why)

    points = [point(1, 10), point(2, 18), point(4, 27), point(8, 35), point(16, 36)]  # 80, 50, 30 and 3 %
    assert pays_until(points) == points[2]
    assert pays_until(points, worth=0.6) == points[1]
    # 8 bring 30 %, but 16 bring 78 of 300 against 27: 63 %. 6 do not suit the job: slower than 4.
    assert pays_until([*points[:4], point(16, 78)]).devices == 16
    assert pays_until([*points[:3], point(6, 20), point(8, 50)]).devices == 8
    assert pays_until([point(1, 0, "nothing fits"), point(2, 9), point(4, 10)]).devices == 2
    assert pays_until([point(1, 0, "nothing fits")]) is None


def test_a_batch_must_not_grow_where_data_are_few() -> None:
    """S58: 1,000 samples at 12 a step are 83 steps an epoch, at 48 are 20."""
    points = scaling(job(), MIXED, (1, 4), weak=True, samples=1000, least_steps=40)
    assert [p.global_batch for p in points] == [12, 48]
    assert [bool(p.plan) for p in points] == [True, False]
    assert points[1].why == ("a global batch of 48 leaves 20 steps of an epoch of 1000 samples; at least 40 are "
                             "wanted, so at most 25. Keep the global batch")
    assert pays_until(points) == points[0]
    with pytest.raises(InputError, match="weak scaling needs the number of samples"):
        scaling(job(), MIXED, (1,), weak=True)


def test_samples_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(801))
    work = job().replace(data=Data(kind="text", path="text.txt"))
    assert samples_of(work, tmp_path) == 800 // work.seq_len
    assert samples_of(job(), tmp_path) == 0


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = Path(__file__).parent.parent / "examples"
    files = [str(where / "jobs/gpt-1b.yaml"), str(where / "clusters/three-and-one.yaml")]
    assert cli.main(["scale", *files, "--devices", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pays_until"] == 1
    assert found["points"][0]["global_batch"] == 16
    for option, says in (("1,x", "--devices has 'x'"), ("9", "9 devices of three-and-one: it has 4")):
        assert cli.main(["scale", *files, "--devices", option]) == 2
        assert says in capsys.readouterr().err
