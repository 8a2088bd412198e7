"""PyTorch DistributedDataParallel: every process holds everything and takes an equal part of the batch."""

from benchmarks.peers import Chain, Step, even_batches, steps_of
from mixfleet.job import Job


def stepper(job: Job) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    samples, batches = even_batches(job)
    return steps_of(DistributedDataParallel(Chain(job, samples), gradient_as_bucket_view=True), job, batches, True)
