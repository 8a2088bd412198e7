"""Elastic training by torchrun, short of the agents themselves (test_testbed.py starts real ones)."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from torch.distributed import HashStore

from mixfleet.cli import main
from mixfleet.cluster import Cluster, Link, Node, device_named
from mixfleet.errors import InputError
from mixfleet.run import elastic
from run_pool import job, pipe, plan

CPU = device_named("cpu")
LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)


def fleet(*counts: int, **changes: object) -> Cluster:
    return Cluster(name="toy", nodes=tuple(Node(name=f"n{i}", devices=(CPU,) * n, link=LINK, nic=LINK)
                                           for i, n in enumerate(counts)), **changes)


def met(monkeypatch, cluster: Cluster, *seats: tuple[str, int]) -> list[elastic._Place]:
    """What each process finds, of those at (node, local rank)."""
    store = HashStore()
    for number, seat in enumerate(seats):
        store.set(f"at/{number}", json.dumps(seat))
    found = []
    for number, (node, local) in enumerate(seats):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        found.append(elastic._meet(store, number, len(seats), cluster, node))
    return found


def test_processes_find_their_ranks_among_the_nodes_that_are_there(monkeypatch):
    places = met(monkeypatch, fleet(2, 1, 3), ("n2", 0), ("n0", 1), ("n2", 2), ("n0", 0), ("n2", 1))
    assert {p.cluster for p in places} == {fleet(2, 1, 3).without({"n1"})[0]}
    assert [p.rank for p in places] == [2, 1, 4, 0, 3]
    assert places[0].process == {0: 3, 1: 1, 2: 0, 3: 4, 4: 2}


def test_nodes_are_whole_and_there_once(monkeypatch):
    with pytest.raises(InputError, match=r"1 processes on node n0, which has 2 devices.*--nproc-per-node=2"):
        met(monkeypatch, fleet(2, 1), ("n1", 0), ("n0", 0))
    with pytest.raises(InputError, match="two agents of torchrun say that they are on node n1"):
        met(monkeypatch, fleet(2, 1), ("n1", 0), ("n1", 0))


def test_what_is_left_keeps_its_numbers_in_the_whole():
    matrix = ((0.0, 1.0, 2.0), (3.0, 0.0, 4.0), (5.0, 6.0, 0.0))
    left, ranks = fleet(2, 1, 3, node_matrix_Bps=matrix).without({"n1"})
    assert [n.name for n in left.nodes] == ["n0", "n2"]
    assert ranks == (0, 1, 3, 4, 5)
    assert left.node_matrix_Bps == ((0.0, 2.0), (5.0, 0.0))
    with pytest.raises(InputError, match="no node of toy is left"):
        fleet(2, 1).without({"n0", "n1"})


def test_commands_start_an_agent_per_node_that_meets_at_the_first():
    (first, one), (second, two) = elastic.elastic_commands(fleet(2, 3), ["job.yaml", "c.yaml", "--out", "run"])
    assert (first, second) == ("n0", "n1")
    assert one.startswith("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 --nproc-per-node=2 ")
    assert "--rdzv-endpoint=n0:29500" in two
    assert "--nproc-per-node=3" in two
    assert two.endswith("mixfleet elastic job.yaml c.yaml --out run --machine n1")


def test_legs_leave_out_a_line_that_was_cut_off(tmp_path):
    begun = elastic.Begun(first_step=3, nodes=("n0",), at=1.5, plan=plan(pipe((0, 5), (0,), samples=6, micro_batch=2)))
    line = msgspec.json.encode(begun)
    (tmp_path / elastic.LEGS).write_bytes(line + b"\n" + line[:40])
    assert elastic.legs(tmp_path) == [begun]
    assert elastic.legs(tmp_path / "none") == []
    assert elastic.newest(tmp_path) == 0


@pytest.fixture
def files(tmp_path):
    job().save(tmp_path / "job.yaml")
    fleet(2, 1).save(tmp_path / "c.yaml")
    return [str(tmp_path / "job.yaml"), str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")]


@pytest.mark.parametrize(("node", "variables", "says"), [
    ("n2", {}, "no node in toy is named n2|unknown node in toy"),
    ("n1", {}, "start it by the commands that `--commands` prints"),
    ("n1", {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"},
     "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
])
def test_says_what_is_missing(files, capsys, monkeypatch, node, variables, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["elastic", *files, "--machine", node]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_commands_are_printed(files, capsys):
    assert main(["elastic", *files, "--commands", "--steps", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("n0: TORCH_DISABLE")
    assert "--steps 7 --checkpoint-every 50 --machine n1" in out
