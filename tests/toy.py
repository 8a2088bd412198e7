"""Small models, clusters and jobs with unequal numbers, for tests of planning rooms (no torch, no catalog)."""

from __future__ import annotations

from mixfleet.cluster import Cluster, Device, Link, Node
from mixfleet.job import Job
from mixfleet.model.spec import B as MB
from mixfleet.model.spec import Block, Model, Param, S
from mixfleet.plan import Pipeline, Plan, Sharding, Stage


def model(layers: int = 3, *, tied: bool = False, limit: int = 4) -> Model:
    """Embedding, `layers` blocks with split and replicated tensors, head; odd sizes so that cuts are uneven."""
    boundary = MB * S * 6
    def block(name: str, kind: str, *params: Param) -> Block:
        return Block(name=name, kind=kind, params=params, ops=(), saved=(), boundary=boundary)
    tokens = Param(name="tokens.weight", shape=(13, 6), split=0)
    head = Param(name="lm.weight", shape=(13, 6), split=0, tied="embed/tokens.weight" if tied else "")
    blocks = [block("embed", "embed", tokens)]
    blocks += [block(f"layers.{i}", "layer", Param(name="norm.weight", shape=(7,)),
                     Param(name="up.weight", shape=(20, 6), split=0), Param(name="down.weight", shape=(6, 20), split=1),
                     Param(name="scale", shape=(3, 5))) for i in range(layers)]
    blocks.append(block("head", "head", head, Param(name="norm.weight", shape=(11,))))
    return Model(name="toy", family="toy", blocks=tuple(blocks), hidden=6, layers=layers, vocab=13,
                 tensor_limit=(("attention heads", limit),))


def device(name: str = "toy", speed: float = 1.0, memory: int = 10**9) -> Device:
    """One GFLOP/s per unit of speed."""
    return Device(name=name, flops={"fp32": speed * 1e9}, vector_flops=speed * 1e9, memory_bytes=memory,
                  memory_Bps=speed * 1e9)


def cluster(*nodes: int) -> Cluster:
    """Nodes of so many equal devices."""
    return Cluster(name="toy", nodes=tuple(
        Node(name=f"n{i}", devices=(device(),) * count, link=Link(latency_s=1e-6, bandwidth_Bps=3e9),
             nic=Link(latency_s=7e-6, bandwidth_Bps=1e9)) for i, count in enumerate(nodes)))


def job(global_batch: int, of: Model | None = None) -> Job:
    """Sequences of 16 tokens in fp32."""
    return Job(name="toy", model=of or model(), seq_len=16, global_batch=global_batch, precision="fp32")


def pipeline(cuts: tuple[int, ...], devices: tuple[tuple[int, ...], ...], *, samples: int, micro_batch: int = 1,
             tensor: tuple[int, ...] = (), replicas: int = 1) -> Pipeline:
    """`cuts` are the stage boundaries, first and last included."""
    degrees = tensor or (1,) * len(devices)
    stages = tuple(Stage(blocks=(cuts[i], cuts[i + 1]), devices=d, tensor=degrees[i]) for i, d in enumerate(devices))
    return Pipeline(stages=stages, samples=samples, micro_batch=micro_batch, replicas=replicas)


def data_parallel(n: int, w: int, g: int, o: int, *, blocks: int = 5, samples: int = 2) -> Plan:
    """`n` replicas of one device each."""
    return Plan(pipelines=(pipeline((0, blocks), (tuple(range(n)),), samples=samples, replicas=n),),
                sharding=Sharding(weights=w, gradients=g, optimizer=o))
