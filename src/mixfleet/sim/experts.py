"""Who shares routed experts in a plan, and what each of them has: expert parallelism as the simulator sees it."""

from __future__ import annotations

from math import inf

from mixfleet.batching import Batch
from mixfleet.job import Job
from mixfleet.model.spec import Block, ExpertShare, TensorComm
from mixfleet.plan import Plan


class Experts:
    """The replicas of a plan that share experts. Without expert parallelism nobody does: every answer is None or the
    replica alone. Micro-batches are those of `batch`, or rows of `seq_len`."""

    def __init__(self, plan: Plan, job: Job, batch: Batch | None = None) -> None:
        self._plan, self._job, self._batch = plan, job, batch
        self.shared = plan.expert > 1
        self._group_of = {k: group for group in plan.expert_groups for k in group} if self.shared else {}
        self._tokens: dict[tuple[int, int], int] = {}

    def mates(self, replica: int) -> range:
        """The replicas that share experts with one, itself included."""
        return self._group_of.get(replica, range(replica, replica + 1))

    def tokens(self, replica: int, micro_batch: int) -> int:
        """Tokens of a replica's micro-batch of this number, padding included; for -1, the most that one may have."""
        if self._batch is not None and micro_batch >= 0:
            return self._batch.micro[replica][micro_batch].positions
        p, copy = self._plan.replicas[replica]
        pipe = self._plan.pipelines[p]
        sizes = pipe.micro_batches
        samples = sizes[micro_batch % len(sizes)] if micro_batch >= 0 else pipe.micro_batch
        return samples * pipe.tokens(self._job.seq_len, copy)

    def held(self, replica: int, tensor: int, count: int) -> tuple[int, ...]:
        """How many of `count` experts each rank of a replica's tensor group holds."""
        lo, hi = self._plan.experts_of(replica, count)
        return tuple((hi - lo) * (j + 1) // tensor - (hi - lo) * j // tensor for j in range(tensor))

    def share(self, block: Block, replica: int, tensor: int, micro_batch: int) -> ExpertShare | None:
        """What the fullest rank of a replica's tensor group has of a block's experts; None where none are shared."""
        if not self.shared or not block.routed:
            return None
        mates = self.mates(replica)
        key = (mates.start, micro_batch)
        if key not in self._tokens:
            self._tokens[key] = sum(self.tokens(k, micro_batch) for k in mates)
        most = max(self.held(replica, tensor, block.experts))
        return ExpertShare(self._tokens[key], block.experts / most if most else inf)


def even_rows(job: Job, comm: TensorComm, tokens: int, tensor: int) -> float:
    """Bytes that a rank of a tensor group has for all experts, its own included, of `tokens` of its replica."""
    element = comm.bytes_per_element or job.bytes.compute_bytes
    return comm.size.at(1, tokens, tensor) * element
