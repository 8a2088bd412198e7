"""S46: the 3-D grid of tensor parallelism times data: volumes, choice, and a projection on real ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.cost.grid import AXES, Grid, moves, projections, rank_configs, sent, why_not
from mixfleet.errors import InputError
from mixfleet.job import Job
from mixfleet.model.families import build

ROWS, INPUTS, OUTPUTS = 24, 20, 12
GRIDS = (Grid(2, 2, 1, 1), Grid(2, 1, 2, 1), Grid(1, 2, 1, 2), Grid(1, 1, 4, 1))


def test_places_by_hand() -> None:
    grid = Grid(2, 3, 1, 2)
    assert grid.size == 12
    assert grid.groups("x") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert grid.groups("y") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert grid.groups("z") == [[i] for i in range(12)]
    assert grid.groups("data") == [[i, i + 6] for i in range(6)]


def test_volumes_by_the_formulas_of_the_paper() -> None:
    """m rows, k inputs, n outputs, per device, for a ring; a transposed projection has x and y in exchange."""
    m, k, n, (x, y, z, d) = 24, 20, 12, Grid(2, 4, 3, 5)
    expected = {"z": 3 * (z - 1) / z * k * n / (x * y), "data": 2 * (d - 1) / d * k * n / (x * y * z),
                "x": 2 * (x - 1) / x * m * n / (z * y), "y": 2 * (y - 1) / y * m * k / (z * x)}
    for transposed, swap in ((False, {}), (True, {"x": "y", "y": "x"})):
        grid = Grid(y, x, z, d) if transposed else Grid(x, y, z, d)
        found = dict.fromkeys(AXES, 0.0)
        for move in moves(m, k, n, grid, transposed=transposed):
            found[move.axis] += sent(move, grid)
        assert found == pytest.approx({swap.get(axis, axis): volume for axis, volume in expected.items()})


def test_projections_alternate() -> None:
    model = build({"layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "vocab": 24, "ffn": 40})
    assert list(projections(model)) == [
        (16, 16, False), (16, 8, False), (16, 8, False), (16, 16, True), (16, 40, False), (16, 40, False),
        (40, 16, True), (16, 24, False)]


def _job(global_batch: int, **figures: int) -> Job:
    return Job(name="j", model=build({"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "ffn": 2048} | figures),
               seq_len=128, global_batch=global_batch, precision="fp32")


def _cluster(nodes: int, count: int, nic_Bps: float) -> Cluster:
    one = Device(name="d", kind="gpu", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=10**11, memory_Bps=1e12)
    fast, nic = Link(latency_s=1e-6, bandwidth_Bps=100e9), Link(latency_s=1e-6, bandwidth_Bps=nic_Bps)
    return Cluster(name="c", nodes=tuple(Node(name=f"n{i}", devices=(one,) * count, link=fast, nic=nic)
                                         for i in range(nodes)))


def test_grids_are_all_there_and_ordered() -> None:
    """Every factorization of 8 that divides; few rows want data and depth over weights, slow networks as well."""
    found = rank_configs(_job(64), _cluster(2, 4, 1e9))
    assert len(found) == len({c.grid for c in found}) == 20  # ways to write 2^3 as a product of four factors in order
    assert all(c.grid.size == 8 for c in found)
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    seconds = {c.grid: c.seconds for c in found}
    # Sums of activations inside a node, of gradients across nodes: not the other way round.
    assert seconds[Grid(1, 4, 1, 2)] < seconds[Grid(4, 2, 1, 1)]
    # One sample: the batch does not divide, so there is no data axis.
    assert {c.grid.data for c in rank_configs(_job(1), _cluster(2, 4, 1e9))} == {1}
    with pytest.raises(InputError, match="no projection"):
        rank_configs(Job(name="j", model=_job(1).model.replace(blocks=()), seq_len=8, global_batch=1),
                     _cluster(1, 2, 1e9))


def test_more_rows_move_the_choice_from_tensor_to_data() -> None:
    few, many = (rank_configs(_job(batch), _cluster(1, 8, 1e9))[0].grid for batch in (8, 1024))
    assert many.x * many.y <= few.x * few.y
    assert many == Grid(1, 1, 1, 8)


def test_what_cannot_be_trained_says_so() -> None:
    assert why_not(Grid(1, 4, 2, 2)) == ""
    assert "x is 2" in why_not(Grid(2, 4, 2, 2))
    assert "tensor 4, weights sharded 2 ways, 4 replicas" in why_not(Grid(2, 4, 2, 2))


# --- on four ranks ---------------------------------------------------------------------------------------------------

def _worker(rank: int, port: int, results: Any) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from mixfleet.run.grid import GridGroups, GridLinear

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=4)
    generator = torch.Generator().manual_seed(3)
    x, up, down, g = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in (
        (ROWS, INPUTS), (OUTPUTS, INPUTS), (INPUTS, OUTPUTS), (ROWS, INPUTS)))
    whole = [t.clone().requires_grad_() for t in (x, up, down)]
    out = F.gelu(whole[0] @ whole[1].t()) @ whole[2].t()
    out.backward(g)
    found = {}
    for grid in GRIDS:
        groups = GridGroups(grid)
        first, second = GridLinear(up, groups), GridLinear(down, groups, transposed=True)

        def mine(t: torch.Tensor, axis: str, groups: Any = groups) -> torch.Tensor:
            rows = groups.part("z", groups.part("data", t, 0), 0)
            return groups.part(axis, rows, 1)

        leaf = mine(x, "x").clone().requires_grad_()
        y = second(F.gelu(first(leaf)))
        y.backward(mine(g, "x"))
        for layer in (first, second):
            layer.reduce_gradients()
        pairs = [(y.detach(), mine(out.detach(), "x")), (leaf.grad, mine(whole[0].grad, "x"))]
        for layer, weight in ((first, whole[1]), (second, whole[2])):
            block = groups.part(layer.outputs, groups.part(layer.inputs, weight.grad, 1), 0)
            pairs.append((layer.weight.grad, groups.part("z", block, 0)))
        found[grid] = [float((a - b).abs().max()) if a.shape == b.shape else 1.0 for a, b in pairs], groups.sent
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch = pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_worker, args=(rank, port, results), daemon=True) for rank in range(4)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(30)
    return found


@pytest.mark.parametrize("grid", GRIDS)
def test_two_projections_on_a_grid_equal_one_process(on_ranks: Any, grid: Grid) -> None:
    """Outputs, gradients of inputs and of both weights; and no re-layout between the two projections."""
    for rank in range(4):
        assert max(on_ranks[rank][grid][0]) < 1e-12


@pytest.mark.parametrize("grid", GRIDS)
def test_bytes_sent_are_the_volumes(on_ranks: Any, grid: Grid) -> None:
    expected = dict.fromkeys(AXES, 0.0)
    for k, n, transposed in ((INPUTS, OUTPUTS, False), (OUTPUTS, INPUTS, True)):
        for move in moves(ROWS / grid.data, k, n, grid, transposed=transposed):
            expected[move.axis] += 8 * sent(move, grid)
    for rank in range(4):
        assert on_ranks[rank][grid][1] == expected


def test_a_weight_that_does_not_divide_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    from mixfleet.run.grid import GridGroups, GridLinear

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match="a grid of 2x1x1x1 has 2 ranks; there are 1"):
            GridGroups(Grid(2, 1, 1, 1))
        alone = GridGroups(Grid(1, 1, 1, 1))
        alone.along["y"].size = 2
        with pytest.raises(InputError, match="does not divide into 2 parts"):
            GridLinear(torch.zeros(3, 2), alone)
    finally:
        dist.destroy_process_group()
