"""What users run today, on the same model, data and seats as mixfleet: each module gives `stepper(job, ...)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from mixfleet.job import Job
from mixfleet.run.modules import build_blocks
from mixfleet.run.source import DecoderSource

Step = Callable[[int], None]


class Chain(nn.Module):
    """The whole model of a job; its loss is the mean over an even part of the batch."""

    def __init__(self, job: Job, samples: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build_blocks(job.model, range(len(job.model.blocks)), seed=job.seed,
                                                 attention="fused"))
        self.tokens = samples * job.seq_len

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        loss: torch.Tensor = self.blocks[-1](x, targets)
        return loss / self.tokens


def even_batches(job: Job) -> tuple[int, Callable[[int], tuple[torch.Tensor, torch.Tensor]]]:
    """Samples of each process, and its part of a step's batch."""
    samples, source = job.global_batch // dist.get_world_size(), DecoderSource(job)
    source.open(0, 0)
    at = dist.get_rank() * samples
    return samples, lambda step: source.batch(step, at, at + samples)


def steps_of(model: nn.Module, job: Job, batches: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
             fused: bool | None) -> Step:
    rule = job.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=rule.weight_decay,
                                  fused=fused)

    def step(number: int) -> None:
        model(*batches(number)).backward()
        if job.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step
