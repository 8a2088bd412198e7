"""Any chain of `torch.nn.Module`s: captured as a model, measured, planned and trained like every other."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from mixfleet.cluster import BlockTime, Cluster
from mixfleet.errors import InputError
from mixfleet.job import Job, Optimizer, PrecisionName
from mixfleet.model.spec import B, Block, Model, Op, Param, Saved, Size
from mixfleet.plan import Plan
from mixfleet.run.launch import TrainResult, train
from mixfleet.run.metrics import StepMetrics
from mixfleet.run.source import Loss, ModulesSource
from mixfleet.run.state import DTYPES

_MEASURED_BATCHES = (1, 4)


class Trainer:
    """A chain of modules with a loss and tensors of samples.

    `blocks[i]` takes the output of `blocks[i - 1]`; the first takes a batch of `inputs`. `loss(output, targets)` must
    return the sum over the batch, so that uneven shares weigh right; training minimizes the mean. Blocks and loss are
    sent to other processes, so they must pickle. After `train` the blocks hold the trained weights.
    """

    def __init__(self, blocks: Sequence[nn.Module], loss: Loss, inputs: Tensor, targets: Tensor, *, global_batch: int,
                 optimizer: Optimizer | None = None, precision: PrecisionName = "fp32", clip_norm: float = 0.0,
                 steps: int = 100, seed: int = 0, name: str = "modules") -> None:
        if len(blocks) < 2:
            raise InputError(f"blocks has {len(blocks)} modules; give the model as a chain of two or more")
        if len(inputs) != len(targets):
            raise InputError(f"there are {len(inputs)} inputs and {len(targets)} targets; they must be as many")
        self.blocks = list(blocks)
        model, shapes = capture(self.blocks, inputs[:1], DTYPES[precision], name)
        frozen = tuple(f"blocks.{i}/{leaf}" for i, block in enumerate(self.blocks)
                       for leaf, p in block.named_parameters() if not p.requires_grad)
        self.job = Job(name=name, model=model, seq_len=1, global_batch=global_batch, precision=precision, steps=steps,
                       frozen=frozen, optimizer=optimizer or Optimizer(), clip_norm=clip_norm, seed=seed)
        self.source = ModulesSource(self.job, self.blocks, loss, inputs, targets, shapes)

    def measure(self, cluster: Cluster) -> Cluster:
        """The cluster with the time that each block takes, measured on this machine's CPU by one thread.

        A device with a share of a core gets the time divided by its share. InputError for devices other than CPUs.
        """
        other = next((d for d in cluster.devices if d.kind != "cpu"), None)
        if other:
            raise InputError(f"{other.name} is not a CPU; measure its blocks where it is, and give them as block_times")
        times = _times(self.blocks, self.source)
        nodes = tuple(node.replace(devices=tuple(device.replace(block_times=tuple(
            t.replace(forward_s=t.forward_s / device.share, backward_s=t.backward_s / device.share) for t in times))
            for device in node.devices)) for node in cluster.nodes)
        return cluster.replace(nodes=nodes)

    def train(self, plan: Plan, cluster: Cluster, *, steps: int | None = None, out_dir: Path | str = "",
              resume: Path | str = "", checkpoint_every: int = 0, trace_steps: int = 0,
              on_step: Callable[[StepMetrics], None] | None = None) -> TrainResult | None:
        """Train by a plan; see `mixfleet.run.train`. Under torchrun it needs an `out_dir` that all ranks share."""
        from mixfleet.run.checkpoint import Reader

        if "RANK" in os.environ and not out_dir:
            raise InputError("out_dir is empty; under torchrun the trained weights come back through a shared folder")
        with tempfile.TemporaryDirectory() as scratch:
            result = train(plan, self.job, cluster, steps=steps, out_dir=out_dir or scratch, resume=resume, keep=1,
                           checkpoint_every=checkpoint_every, trace_steps=trace_steps, source=self.source,
                           on_step=on_step)
            if result and result.checkpoint:
                reader = Reader(Path(result.checkpoint))
                with torch.no_grad():
                    for block, module in zip(self.job.model.blocks, self.blocks):
                        for param, held in zip(block.params, module.parameters()):
                            held.copy_(reader.whole(param.tied or f"{block.name}/{param.name}", "weights"))
        return result


def capture(blocks: list[nn.Module], sample: Tensor, dtype: torch.dtype, name: str
            ) -> tuple[Model, list[tuple[int, ...]]]:
    """The model that a chain of modules is, and the shape per sample of what enters each block.

    Parameters, saved bytes, FLOPs and boundaries are those of one forward pass of one sample; everything but the
    parameters is taken to grow with the batch. A parameter that two modules share is tied.
    """
    from torch.utils.flop_counter import FlopCounterMode

    x = (sample.to(dtype) if sample.is_floating_point() else sample).clone()  # not a part of all samples' storage
    owners: dict[int, str] = {}
    specs: list[Block] = []
    shapes: list[tuple[int, ...]] = []
    for i, module in enumerate(blocks):
        params = []
        for leaf, p in module.named_parameters():
            tied = owners.setdefault(id(p), f"blocks.{i}/{leaf}")
            params.append(Param(name=leaf, shape=tuple(p.shape),
                                tied="" if tied == f"blocks.{i}/{leaf}" else tied))
        shapes.append(tuple(x.shape[1:]))
        saved: dict[int, int] = {}
        trial = deepcopy(module).to(dtype)
        own = {p.untyped_storage()._cdata for p in trial.parameters()}

        def keep(t: Tensor, saved: dict[int, int] = saved, own: set[int] = own) -> Tensor:
            storage = t.untyped_storage()
            if storage._cdata not in own:
                saved[storage._cdata] = storage.nbytes()
            return t

        entry = x.detach().requires_grad_(x.is_floating_point())
        with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out: Tensor = trial(entry)
        flops = float(counter.get_total_flops())
        entry_bytes, elements = entry.nbytes, out.numel()
        specs.append(Block(
            name=f"blocks.{i}", kind=f"blocks.{i}", params=tuple(params), boundary=B * elements,
            ops=(Op(name="all", kind="gemm", flops=B * flops, backward_flops=B * (2 * flops),
                    shape={"batch": Size.of(1), "m": B, "n": Size.of(1), "k": Size.of(1)},
                    traffic=B * (entry.numel() + elements) + sum(p.count for p in params),
                    backward_traffic=B * (2 * (entry.numel() + elements)) + 2 * sum(p.count for p in params)),),
            saved=(Saved(name="input", size=B * entry_bytes, until="full", bytes_per_element=1),
                   Saved(name="inside", size=B * max(0, sum(saved.values()) - entry_bytes), bytes_per_element=1))))
        x = out.detach()
    return Model(name=name, family="modules", blocks=tuple(specs), layers=len(blocks)), shapes


def _times(blocks: list[nn.Module], source: ModulesSource) -> list[BlockTime]:
    """Forward and backward seconds of every block, the median of three after one to warm up."""
    precision, found = source.job.precision, []
    trials = [deepcopy(module).to(DTYPES[precision]) for module in blocks]
    for batch in _MEASURED_BATCHES:
        x = source.inputs[torch.arange(batch) % len(source.inputs)]
        x = x.to(DTYPES[precision]) if x.is_floating_point() else x
        for i, (spec, module) in enumerate(zip(source.job.model.blocks, trials)):
            taken = []
            for _ in range(4):
                # Nobody asks for the gradient of a sample, so the first block makes none in training.
                entry = x.detach().requires_grad_(i > 0 and x.is_floating_point())
                start = time.perf_counter()
                out: Tensor = module(entry)
                middle = time.perf_counter()
                if out.requires_grad:
                    torch.autograd.backward(out, torch.ones_like(out))
                taken.append((middle - start, time.perf_counter() - middle))
            forward, backward = (sorted(t)[1] for t in zip(*taken[1:]))
            found.append(BlockTime(block=spec.kind, micro_batch=batch, seq_len=1, precision=precision,
                                   forward_s=forward, backward_s=backward))
            x = out.detach()
    return found
