"""DeepSpeed's ZeRO on CPU ranks, where it is installed: `pip install deepspeed` (docs/testbed.md)."""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist

from benchmarks.peers import Chain, Step, even_batches
from mixfleet.job import Job


def installed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def stepper(job: Job, stage: int) -> Step:
    """Steps under ZeRO `stage` (1 to 3) over all processes of the default group, in fp32 on gloo."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
    import deepspeed

    samples, batches = even_batches(job)
    rule = job.optimizer
    model = Chain(job, samples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rule.lr, betas=rule.betas, weight_decay=rule.weight_decay)
    if stage == 3:  # blocks use weights of the modules inside them, whose own forward is not called
        first, *others = model.blocks
        # Whether backward of a leaf is over is told by the gradient of its input, and the first block's has none.
        for weight in first.parameters():
            deepspeed.zero.register_external_parameter(first, weight)
        deepspeed.utils.set_z3_leaf_modules(model, [*{type(block) for block in others}])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, dist_init_required=False, config={
        "train_batch_size": samples * dist.get_world_size(), "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": job.clip_norm, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}})

    def step(number: int) -> None:
        engine.backward(engine(*batches(number)))
        engine.step()

    return step
