"""PyTorch FSDP2: state in equal pieces over all processes, or (`per_node`) over those of a node, copied across."""

from benchmarks.peers import Chain, Step, even_batches, steps_of
from mixfleet.job import Job


def stepper(job: Job, per_node: int = 0) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    samples, batches = even_batches(job)
    model = Chain(job, samples)
    mesh = (init_device_mesh("cpu", (world // per_node, per_node), mesh_dim_names=("copies", "pieces")) if per_node
            else init_device_mesh("cpu", (world,)))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return steps_of(model, job, batches, None)  # DTensors have no fused AdamW on CPU
