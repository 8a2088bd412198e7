"""Why a plan is impossible for a job on a cluster: every rule that joins several values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mixfleet.catalog.devices import rows
from mixfleet.cluster import Cluster, Device
from mixfleet.errors import InputError
from mixfleet.job import PRODUCTS, Job
from mixfleet.plan import Pipeline, Plan, ScheduleName, Sharding, Stage, Synchronization, groups
from mixfleet.schedule.greedy import parse_steps, stuck
from mixfleet.schedule.named import SCHEDULES


def why_not(plan: Plan, job: Job, cluster: Cluster) -> str | None:
    """The first reason why a plan is impossible for a job on a cluster, with the nearest legal value; None if it is.

    Memory is not judged here: that is what a prediction says.
    """
    return next(_reasons(plan, job, cluster), None)


def _reasons(plan: Plan, job: Job, cluster: Cluster) -> Iterator[str]:
    yield from _wrong_cluster(plan, cluster)
    if job.products and (why := lacking(job, (cluster.devices[r] for r in plan.ranks if r < len(cluster.devices)))):
        yield why
    ways = SCHEDULES[plan.schedule].ways if plan.schedule in SCHEDULES else 1
    used: list[dict[int, str]] = [{} for _ in range(ways)]
    for p, pipeline in enumerate(plan.pipelines):
        yield from _wrong_batch(pipeline, f"pipelines[{p}]")
        yield from _wrong_blocks(pipeline, job, f"pipelines[{p}]")
        crew = next(crew for crew in plan.crews if p in crew)
        yield from _wrong_schedule(plan, crew, p)
        yield from _wrong_context(pipeline, job, f"pipelines[{p}]")
        for s, stage in enumerate(pipeline.stages):
            yield from _wrong_stage(stage, pipeline.copies, job, cluster, used[min(crew.index(p), ways - 1)],
                                    f"pipelines[{p}].stages[{s}]", spread=plan.expert > 1)
            yield from _wrong_offload(stage, plan, cluster, f"pipelines[{p}].stages[{s}]")
        if any(stage.shares for stage in pipeline.stages):
            yield from _wrong_replication(plan, p)
    if plan.shared:
        yield from _wrong_sharing(plan)
    if plan.global_batch != job.global_batch:
        yield (f"the pipelines take {plan.global_batch} sequences per step; the job's global batch is "
               f"{job.global_batch}. Change `samples` by {job.global_batch - plan.global_batch:+d} in all")
    if plan.accumulation == "layered":
        yield from _wrong_layers(plan)
    yield from _wrong_sharding(plan)
    yield from _wrong_experts(plan, job)
    if not plan.synchronous:
        yield from _wrong_asynchronous(plan, job)
    yield from _wrong_waves(plan, job)
    yield from _wrong_rounds(plan, job, cluster)
    if plan.sharding.hierarchical:
        yield from _wrong_hierarchy(plan, cluster)
    if plan.batching != "padded":
        yield from _wrong_batching(plan, job)


def lacking(job: Job, devices: Iterable[Device]) -> str:
    """What is wrong where a device has no units for the type of the job's products; else empty."""
    devices = list(devices)
    rate = PRODUCTS[job.products].rate if job.products else ""
    without = sorted({d.name for d in devices if rate and rate not in d.flops})
    if not without:
        return ""
    have = sorted({d.name for d in devices} - {*without}) or [
        name for name, row in rows().items() if row.get(f"{rate}_tflops")]
    return (f"products is {job.products}, for which {', '.join(without)} {'has' if len(without) == 1 else 'have'} no "
            f"{rate} units. Leave `products` out, or take devices that have them: {', '.join(have)}")


def _wrong_batching(plan: Plan, job: Job) -> Iterator[str]:
    what = f"batching is {plan.batching}"
    if job.data.lengths is None:
        yield f"{what}, but all samples have seq_len tokens: the job states no data.lengths. Take `batching: padded`"
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.replicated:
            yield (f"{what}, but a stage of pipelines[{p}] has replicas of its own, which share samples of one length. "
                   "Take `replicas` of the whole pipeline, or `batching: padded`")
    if plan.shared:
        yield f"{what}, which cannot go with pipelines that share devices; take `batching: padded`"
    if not plan.synchronous:
        yield (f"{what}, which cannot go with the schedule {plan.schedule}; take a synchronous one, or `batching: "
               "padded`")


def _wrong_cluster(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if plan.cluster_fingerprint and plan.cluster_fingerprint != cluster.fingerprint():
        yield (f"the plan was made for another cluster ({plan.cluster_fingerprint}); this "
               f"is {cluster.name} ({cluster.fingerprint()}). Plan again, or remove `cluster_fingerprint`")


def _wrong_batch(pipeline: Pipeline, where: str) -> Iterator[str]:
    for name in ("samples", "micro_batch", "replicas", "context"):
        if getattr(pipeline, name) < 1:
            yield f"{where}.{name} is {getattr(pipeline, name)}; it must be at least 1"
    if pipeline.micro_batch > pipeline.samples:
        yield (f"{where}.micro_batch is {pipeline.micro_batch}, more than its {pipeline.samples} samples; "
               f"the largest is {pipeline.samples}")


def _wrong_blocks(pipeline: Pipeline, job: Job, where: str) -> Iterator[str]:
    blocks = len(job.model.blocks)
    if not pipeline.stages:
        yield f"{where}.stages is empty; a pipeline has at least one"
    if len(pipeline.stages) > blocks:
        yield f"{where} has {len(pipeline.stages)} stages for {blocks} blocks; at most {blocks}"
    expected = 0
    for lo, hi, s in pipeline.chain:
        if lo != expected or hi <= lo:
            yield (f"{where}.stages[{s}] holds blocks {lo}-{hi - 1}; it must begin at block {expected} and hold at "
                   "least one block, so that no block is lost or doubled")
        expected = hi
    if expected != blocks:
        yield (f"{where} holds blocks 0-{expected - 1}; {job.model.name} has {blocks} (0-{blocks - 1}, embedding and "
               "head included)")


def _wrong_context(pipeline: Pipeline, job: Job, where: str) -> Iterator[str]:
    if pipeline.context_shares and len(pipeline.context_shares) != pipeline.context:
        yield (f"{where}.context_shares has {len(pipeline.context_shares)} numbers for {pipeline.context} parts of a "
               "sequence; give one for each")
    if pipeline.context_shares and min(pipeline.context_shares) < 1:
        yield f"{where}.context_shares has {min(pipeline.context_shares)}; a share is at least 1"
    if pipeline.context == 1 or min(s.tensor for s in pipeline.stages) < 1:
        return
    unit = 2 * pipeline.context_unit
    if job.seq_len % unit:
        yield (f"{where}.context is {pipeline.context}: parts of a sequence come in pairs of {unit // 2} positions for "
               f"these tensor degrees, and {unit} does not divide {job.seq_len} positions")
    elif job.seq_len // unit < pipeline.context:
        yield (f"{where}.context is {pipeline.context}; {job.seq_len} positions of a sequence fall into at most "
               f"{job.seq_len // unit} parts for these tensor degrees")
    elif not all(b - a for spans in pipeline.spans(job.seq_len) for a, b in spans):
        yield f"{where}.context_shares leaves a part of the sequence without a position; take less unequal shares"


def _wrong_replication(plan: Plan, p: int) -> Iterator[str]:
    """What does not go with stages that have replicas of their own."""
    pipeline, where = plan.pipelines[p], f"pipelines[{p}]"
    for s, stage in enumerate(pipeline.stages):
        if stage.shares and min(stage.shares) < 1:
            yield f"{where}.stages[{s}].shares has {min(stage.shares)}; a share is at least 1"
            return
        idle = next((j for j in range(stage.members) if not sum(pipeline.sizes(s, j))), None)
        if idle is not None and stage.dispatch == "split":
            least = next(m for m in range(1, sum(stage.shares) + 1) if all(lo < hi for lo, hi in stage.deal(0, m)))
            yield (f"{where}.stages[{s}].shares leaves replica {idle} of the stage without a sample: micro-batches "
                   f"have {pipeline.micro_batch}, and {':'.join(map(str, stage.shares))} needs {least}. Take a larger "
                   "micro_batch, other shares, or `dispatch: round-robin`")
        elif idle is not None:
            yield (f"{where}.stages[{s}].shares leaves replica {idle} of the stage without a micro-batch: there are "
                   f"{len(pipeline.micro_batches)}, and a turn of {':'.join(map(str, stage.shares))} takes "
                   f"{sum(stage.shares)}. Take a smaller micro_batch, or other shares")
    if not pipeline.replicated:
        return
    if pipeline.context > 1:
        yield (f"{where}.context is {pipeline.context}, which cannot go with stages that have replicas of their own; "
               "take 1")
    if plan.shared:
        yield f"{where} shares devices with another pipeline, so its stages cannot have replicas of their own"
    if plan.sharding.hierarchical:
        yield (f"sharding.hierarchical is {plan.sharding.hierarchical}, which cannot go with stages that have replicas "
               "of their own; take 0")
    if pipeline.in_turn and plan.schedule not in ("gpipe", "1f1b", "custom"):
        yield (f"{where}: round-robin needs an order that keeps all replicas of a stage busy, which gpipe, 1f1b and "
               f"orders of their own do; the schedule is {plan.schedule}. Take one of them, or `dispatch: split`")


def _wrong_stage(stage: Stage, copies: int, job: Job, cluster: Cluster, used: dict[int, str], where: str, *,
                 spread: bool) -> Iterator[str]:
    if stage.tensor < 1:
        yield f"{where}.tensor is {stage.tensor}; it must be at least 1"
    elif len(stage.devices) != copies * stage.members * stage.tensor:
        held = f"{copies}" if stage.members == 1 else f"{copies} times {stage.members}"
        yield (f"{where}.devices lists {len(stage.devices)} devices; {held} replicas of tensor degree "
               f"{stage.tensor} need {copies * stage.members * stage.tensor} (parts of a sequence count as replicas)")
    if not isinstance(stage.recompute, str) and len(stage.recompute) != stage.size:
        yield (f"{where}.recompute lists {len(stage.recompute)} modes; the stage holds {stage.size} blocks "
               f"({stage.text}), one mode for each")
    for rank in stage.devices:
        if not 0 <= rank < len(cluster.devices):
            yield f"{where}.devices has {rank}; {cluster.name} has devices 0-{len(cluster.devices) - 1}"
        if rank in used:
            yield f"{where}.devices has {rank}, which {used[rank]} uses already"
        used[rank] = where
    limits = (*job.model.tensor_limits(shared_experts=spread), ("positions of a sequence", job.seq_len))
    for what, count in limits:
        if count % stage.tensor:
            legal = [d for d in range(1, count + 1) if all(c % d == 0 for _, c in limits)]
            near = sorted(sorted(legal, key=lambda d: abs(d - stage.tensor))[:2])
            yield (f"{where}.tensor is {stage.tensor}, which does not divide {count} {what}; nearest possible: "
                   f"{' or '.join(map(str, near))}")


def _wrong_schedule(plan: Plan, crew: tuple[int, ...], p: int) -> Iterator[str]:
    pipeline, schedule, where = plan.pipelines[p], plan.schedule, f"pipelines[{p}]"
    home, count = tuple(c.stage for c in pipeline.chain), len(pipeline.micro_batches)
    if schedule != "roundpipe" and sorted(set(home)) != list(range(len(pipeline.stages))):
        yield f"{where}: the stages must stand in the order in which the chain first reaches them"
    if schedule == "roundpipe":
        return
    if schedule != "custom":
        counts: tuple[int, ...] = (count,)
        if SCHEDULES[schedule].ways > 1 and len(crew) > 1:
            if p != crew[-1]:
                return
            unlike = list(_unlike_devices(plan, crew))
            yield from unlike
            if unlike:
                return
            home, counts = plan.homes(crew), tuple(len(plan.pipelines[q].micro_batches) for q in crew)
            where = f"pipelines {' and '.join(map(str, crew))}"
        reason = SCHEDULES[schedule].why_not(home, *counts)
        if reason:
            yield f"{where}: the schedule {schedule} {reason}"
        return
    orders = []
    for s, stage in enumerate(pipeline.stages):
        try:
            orders.append(parse_steps(stage.order))
        except InputError as error:
            yield f"{where}.stages[{s}].order: {error}"
            return
    reason = stuck(home, count, tuple(orders))
    if reason:
        yield f"{where}: {reason}"


def _unlike_devices(plan: Plan, crew: tuple[int, ...]) -> Iterator[str]:
    """Pipelines that share devices do so stage by stage."""
    first = plan.pipelines[crew[0]]
    known = {stage.devices: stage.tensor for stage in first.stages}
    for p in crew[1:]:
        other = plan.pipelines[p]
        if other.replicas != first.replicas or len(other.stages) != len(first.stages):
            yield (f"pipelines {crew[0]} and {p} share devices, so they must have equally many stages and replicas; "
                   f"they have {len(first.stages)} and {len(other.stages)} stages, {first.replicas} and "
                   f"{other.replicas} replicas")
        for s, stage in enumerate(other.stages):
            if known.get(stage.devices) != stage.tensor:
                there = "; ".join(f"{', '.join(map(str, d))} (tensor {t})" for d, t in known.items())
                yield (f"pipelines[{p}].stages[{s}] is on devices {', '.join(map(str, stage.devices))} (tensor "
                       f"{stage.tensor}); pipelines that share devices do so stage by stage, and those of "
                       f"pipelines[{crew[0]}] are on {there}")


def _wrong_sharing(plan: Plan) -> Iterator[str]:
    """What does not go with devices that stand in several pipelines."""
    if plan.sharding.hierarchical:
        yield (f"sharding.hierarchical is {plan.sharding.hierarchical}, which cannot go with pipelines that share "
               "devices; take 0")
    if any(p.context > 1 for p in plan.pipelines):
        yield "context is above 1, which cannot go with pipelines that share devices; take 1"
    if max(plan.sharding.weights, plan.sharding.gradients) == 1:
        return
    for crew in plan.crews:
        for seats in plan.seats(crew) if len(crew) > 1 else ():
            held = [plan.pipelines[p].stages[s] for p, s in seats]
            twice = {b for b in held[0].held if any(other.holds(b) for other in held[1:])}
            if twice:
                yield (f"device {held[0].devices[0]} holds block {min(twice)} in pipelines "
                       f"{' and '.join(str(p) for p, _ in seats)}; then weights and gradients cannot be sharded. Take "
                       "weights 1 and gradients 1, or stages that meet nowhere")


def _wrong_offload(stage: Stage, plan: Plan, cluster: Cluster, where: str) -> Iterator[str]:
    if stage.offload_blocks:
        yield from _wrong_parking(stage, plan, where)
    if not stage.offload and not stage.offload_blocks:
        return
    if len(set(stage.offload)) < len(stage.offload):
        yield f"{where}.offload names {stage.offload[0]} twice"
    for rank in stage.devices:
        device, node = cluster.devices[rank], cluster.nodes[cluster.node_of[rank]]
        if device.kind == "gpu" and not device.pcie_Bps:
            yield f"{where}.offload: {device.name} (device {rank}) states no pcie_bandwidth, over which it would go"
        if device.kind == "gpu" and not node.host_memory_bytes:
            yield f"{where}.offload: node {node.name} states no host_memory, in which it would lie"


def _wrong_parking(stage: Stage, plan: Plan, where: str) -> Iterator[str]:
    """Activations that cannot go to the host."""
    blocks = stage.offload_blocks
    elsewhere = next((b for b in blocks if not stage.holds(b)), None)
    if elsewhere is not None:
        yield f"{where}.offload_blocks has block {elsewhere}; the stage holds blocks {stage.text}"
    elif len(set(blocks)) < len(blocks):
        yield f"{where}.offload_blocks names block {next(b for b in blocks if blocks.count(b) > 1)} twice"
    elif len(stage.modes) == stage.size and "selective" in (modes := [stage.modes[b] for b in blocks]):
        yield (f"{where}.offload_blocks has block {blocks[modes.index('selective')]}, whose recompute is selective: "
               "what that keeps belongs to the part that is computed again. Take none or full for it")
    if not plan.synchronous or plan.schedule == "roundpipe":
        yield (f"{where}.offload_blocks is given, but under {plan.schedule} "
               + ("a backward leg follows its forward at once" if plan.schedule == "roundpipe" else
                  "micro-batches of several steps are in flight, which is not supported")
               + ". Leave it out, or take a synchronous schedule")


def _wrong_layers(plan: Plan) -> Iterator[str]:
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.chain) != 1:
            yield (f"accumulation is layered, but pipelines[{p}] has {len(pipeline.stages)} stages; micro-batches that "
                   "pass the model block by block need all blocks on one stage")
    if plan.schedule not in ("gpipe", "1f1b"):
        yield f"accumulation is layered, which is an order of its own; the schedule {plan.schedule} cannot go with it"


def _wrong_asynchronous(plan: Plan, job: Job) -> Iterator[str]:
    """What would make the stages wait for each other at every update, or needs copies of what is nowhere whole."""
    shard, n, weights, name = plan.sharding, len(plan.replicas), plan.weights, plan.schedule
    for kind, degree in (("weights", shard.weights), ("gradients", shard.gradients)):
        if degree > 1:
            most = "1" if weights and weights.predicts else f"1 or {n}" if n > 1 else "1"
            yield (f"sharding.{kind} is {degree}, which the schedule {name} cannot follow: every rank keeps whole "
                   f"versions of its weights. Take {kind} 1 (and optimizer {most})")
    if weights and weights.predicts and shard.optimizer > 1:
        yield (f"sharding.optimizer is {shard.optimizer}, but under {name} every rank predicts all its weights from "
               "the optimizer's state; take 1")
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.offload:
                yield (f"pipelines[{p}].stages[{s}].offload is {', '.join(stage.offload)}, but under {name} weights "
                       "of several versions are in use at a time; keep them on the device")
    if job.clip_norm:
        yield (f"clip_norm is {job.clip_norm:g}: for the norm of the whole gradient all stages would wait for each "
               f"other at every update, which {name} is there to avoid. Set it to 0, or take a synchronous schedule")
    if job.precision == "fp16":
        yield (f"precision is fp16: when a gradient overflows all stages leave the step out together, which {name} "
               "cannot. Take bf16 or fp32")
    for p, pipeline in enumerate(plan.pipelines):
        at = {b: c.stage for c in pipeline.chain for b in range(c.lo, c.hi)}
        index = {block.name: b for b, block in enumerate(job.model.blocks)}
        for b, block in enumerate(job.model.blocks):
            owners = {index[param.tied.split("/")[0]] for param in block.params if param.tied}
            for owner in sorted(o for o in owners if at.get(o) != at.get(b)):
                yield (f"pipelines[{p}]: blocks {owner} and {b} share weights and are on stages {at.get(owner)} and "
                       f"{at.get(b)}, which would wait for each other at every update under {name}. Take a model "
                       "with untied embeddings, one stage, or a synchronous schedule")


def _wrong_waves(plan: Plan, job: Job) -> Iterator[str]:
    distance = plan.synchronization.distance
    if not plan.waves:
        if plan.synchronization.late and plan.schedule != "roundpipe":
            yield f"synchronization.late is of the schedule roundpipe; the schedule is {plan.schedule}. Leave it out"
        if plan.synchronization.replace(late=False) != Synchronization():
            yield (f"synchronization is of virtual workers, which the schedule {plan.schedule} does not have. Take the "
                   "schedule hetpipe, or leave it out")
        return
    if plan.synchronization.late:
        yield "synchronization.late is of the schedule roundpipe; hetpipe has `distance`. Leave it out"
    if distance < 0:
        yield f"synchronization.distance is {distance}; it cannot be negative (0 waits for all after every wave)"
    if job.optimizer.name != "sgd":
        yield (f"optimizer is {job.optimizer.name}: under hetpipe every virtual worker updates its weights by itself, "
               "and what they change is added up, which makes sense for steps in proportion to gradients. Take sgd")
    if plan.sharding.optimizer > 1:
        yield (f"sharding.optimizer is {plan.sharding.optimizer}, but under hetpipe every virtual worker makes steps "
               "of its own; take 1")
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.context > 1:
            yield (f"pipelines[{p}].context is {pipeline.context}; parts of a sequence cannot go ahead of each other "
                   "as virtual workers do under hetpipe. Take 1")
        for s, stage in enumerate(pipeline.stages):
            if stage.tensor > 1:
                yield (f"pipelines[{p}].stages[{s}].tensor is {stage.tensor}; under hetpipe every micro-batch makes an "
                       "update, for which the group would have to sum the gradients of norms each time. Take 1")
            if stage.members > 1:
                yield (f"pipelines[{p}].stages[{s}].shares has {stage.members} replicas, which under hetpipe would "
                       "have to sum their gradients at every micro-batch. Leave it out, or make them virtual workers")


def _wrong_rounds(plan: Plan, job: Job, cluster: Cluster) -> Iterator[str]:
    """Legs that leave something out or are not in turn, and what stateless workers cannot do."""
    if plan.schedule != "roundpipe":
        for p, pipeline in enumerate(plan.pipelines):
            for s, stage in enumerate(pipeline.stages):
                if stage.ahead:
                    yield (f"pipelines[{p}].stages[{s}].ahead is of the schedule roundpipe; the schedule is "
                           f"{plan.schedule}. Leave it out")
        return
    pipeline, count = plan.pipelines[0], len(plan.pipelines[0].stages)
    if len(plan.replicas) > 1:
        yield f"roundpipe has one pipeline, whose stages are its workers; here are {len(plan.replicas)} replicas"
        return
    last, expected = pipeline.chain[-1].lo, 0
    for leg in (leg for leg in pipeline.legs if not leg.back):
        if leg.lo != expected or leg.hi <= leg.lo:
            yield (f"pipelines[0].stages[{leg.device}].ahead has blocks {leg.lo}-{leg.hi - 1}; it must begin at block "
                   f"{expected} and hold at least one block")
        expected = leg.hi
    if expected != last:
        yield (f"`ahead` of all stages reaches block {expected - 1}; it must end with block {last - 1}, behind which "
               "the first leg goes back")
    for j, leg in enumerate(pipeline.legs):
        if leg.device != j % count:
            yield (f"leg {j} of roundpipe (blocks {leg.lo}-{leg.hi - 1}, {'back' if leg.back else 'forward'}) is on "
                   f"stage {leg.device}; legs go in turn, so it belongs on stage {j % count}")
    for s, stage in enumerate(pipeline.stages):
        where = f"pipelines[0].stages[{s}]"
        if "weights" not in stage.offload:
            yield f"{where}.offload lacks weights: under roundpipe they lie in host memory, where all workers find them"
        if stage.tensor > 1 or stage.members > 1 or pipeline.context > 1:
            yield f"{where} is of more than one device; a worker of roundpipe is one"
        if stage.recompute != "none":
            yield (f"{where}.recompute is {stage.recompute_text}; a backward leg of roundpipe goes forward again just "
                   "before, so it would be done twice. Take none")
        node = cluster.node_of[stage.devices[0]]
        if node != cluster.node_of[pipeline.stages[0].devices[0]]:
            yield (f"{where} is on node {cluster.nodes[node].name}, another than stage 0: workers of roundpipe share "
                   "the memory of one host")
    if plan.accumulation == "layered" or plan.sharding.optimizer > 1:
        yield "roundpipe goes with accumulation plain and no sharding"
    if job.data.lengths is not None:
        yield "data.lengths: legs of roundpipe are cut for samples of one length. Leave it out, or change the schedule"


def _wrong_sharding(plan: Plan) -> Iterator[str]:
    shard, n = plan.sharding, len(plan.replicas)
    degrees = {"weights": shard.weights, "gradients": shard.gradients, "optimizer": shard.optimizer}
    for name, degree in degrees.items():
        if degree < 1:
            yield f"sharding.{name} is {degree}; it must be at least 1"
        if degree > n:
            yield (f"sharding.{name} is {degree}, but there is nothing to shard: the plan has one data-parallel replica"
                   if n == 1 else
                   f"sharding.{name} is {degree}; the plan has {n} data-parallel replicas, so at most {n}")
    yield from _wrong_shares(shard, n)
    if shard.prefetch < 0:
        yield f"sharding.prefetch is {shard.prefetch}; it cannot be negative"
    if not shard.weights <= shard.gradients <= shard.optimizer:
        yield (f"sharding is weights {shard.weights}, gradients {shard.gradients}, optimizer {shard.optimizer}; the "
               "degrees cannot fall in this order (what is updated must be owned by those who hold its gradient)")
    for kind, degree in (("weights", shard.weights), ("gradients", shard.gradients)):
        if degree == 1:
            continue
        for group in groups(n, degree):
            together = [plan.pipelines[p] for p in dict.fromkeys(plan.replicas[k][0] for k in group)]
            yield from _unlike(together, kind, plan.schedule, layered=plan.accumulation == "layered")


def _wrong_experts(plan: Plan, job: Job) -> Iterator[str]:
    n, e = len(plan.replicas), plan.expert
    if e < 1:
        yield f"expert is {e}; it must be at least 1"
    if e <= 1:
        if plan.expert_shares:
            yield f"expert_shares is given, but expert is {e}; set expert to the number of replicas that share experts"
        return
    if e > n:
        yield (f"expert is {e}, but the one data-parallel replica has all experts; `tensor` spreads them"
               if n == 1 else f"expert is {e}; the plan has {n} data-parallel replicas, so at most {n}")
        return
    count = min((b.experts for b in job.model.blocks if b.routed), default=0)
    if not count:
        yield f"expert is {e}, but {job.model.name} has no routed experts; take 1"
        return
    largest = max(map(len, plan.expert_groups))
    if largest > count and not plan.expert_shares:
        yield (f"expert is {e}: {largest} replicas would share {count} experts; at most {count}, or say with "
               "`expert_shares` which replicas hold none")
    if plan.expert_shares:
        if len(plan.expert_shares) != n:
            yield (f"expert_shares has {len(plan.expert_shares)} numbers; the plan has {n} data-parallel replicas, one "
                   "number for each")
            return
        if min(plan.expert_shares) < 0:
            yield f"expert_shares has {min(plan.expert_shares)}; a share is 0 or more"
        for group in plan.expert_groups:
            if not sum(plan.expert_shares[k] for k in group):
                yield f"expert_shares gives no expert to replicas {group[0]}-{group[-1]}, who share them"
    if plan.shared:
        yield f"expert is {e}, which cannot go with pipelines that share devices; take 1"
    if any(pipeline.replicated for pipeline in plan.pipelines):
        yield (f"expert is {e}, which cannot go with stages that have replicas of their own: these have parts of a "
               "micro-batch. Take 1, or `replicas` of the pipeline")
    if not plan.synchronous:
        yield (f"expert is {e}, but under {plan.schedule} replicas go at their own pace, and those that share experts "
               "meet in every layer. Take 1, or a synchronous schedule")
    for group in plan.expert_groups:
        first, *others = (plan.pipelines[p] for p in dict.fromkeys(plan.replicas[k][0] for k in group))
        for other in others:
            if len(first.micro_batches) != len(other.micro_batches):
                yield (f"expert is {e}, which puts pipelines of {len(first.micro_batches)} and "
                       f"{len(other.micro_batches)} micro-batches into one group; they meet in every layer of every "
                       "micro-batch, so the numbers must be equal. Change `micro_batch` or `samples`")
            if first.chain != other.chain or first.orders(plan.schedule) != other.orders(plan.schedule):
                yield (f"expert is {e}, which puts pipelines with different stages into one group; they meet in every "
                       "layer, so their block ranges and orders must be equal")
            if [s.modes for s in first.stages] != [s.modes for s in other.stages]:
                yield (f"expert is {e}, which puts pipelines with different recompute into one group; they exchange "
                       "rows again where a layer is computed again, so it must be equal")


def _wrong_hierarchy(plan: Plan, cluster: Cluster) -> Iterator[str]:
    k, n = plan.sharding.hierarchical, len(plan.replicas)
    if k < 0:
        yield f"sharding.hierarchical is {k}; it cannot be negative"
        return
    for kind, degree in (("weights", plan.sharding.weights), ("gradients", plan.sharding.gradients)):
        for group in groups(n, degree):
            if len(group) > k and len(group) % k:
                yield (f"sharding.hierarchical is {k}, which does not divide the {len(group)} replicas that share "
                       f"{kind}")
    for start in range(0, n, k):
        for p, r in plan.replicas[start:start + k]:
            homes = {cluster.node_of[d] for stage in plan.pipelines[p].stages for d in stage.ranks(r)}
            first, q = plan.replicas[start]
            if len({cluster.node_of[plan.pipelines[first].stages[0].ranks(q)[0]], *homes}) > 1:
                yield (f"sharding.hierarchical is {k}, but replicas {start}-{min(n, start + k) - 1} are not in one "
                       "node; order the devices node by node, or take the number of replicas per node")
                return


def _wrong_shares(shard: Sharding, n: int) -> Iterator[str]:
    if not shard.shares:
        return
    if len(shard.shares) != n:
        yield (f"sharding.shares has {len(shard.shares)} numbers; the plan has {n} data-parallel "
               f"replica{'s' if n > 1 else ''}, one number for each")
        return
    if min(shard.shares) < 0:
        yield f"sharding.shares has {min(shard.shares)}; a share is 0 or more"
    for degree in (shard.weights, shard.gradients, shard.optimizer):
        for group in groups(n, degree) if 1 < degree <= n else ():
            if not sum(shard.shares[k] for k in group):
                yield f"sharding.shares gives nothing to replicas {group[0]}-{group[-1]}, who hold the state together"


def _unlike(together: list[Pipeline], kind: str, schedule: ScheduleName, *, layered: bool) -> Iterator[str]:
    """Replicas that shard weights or gradients among them exchange them at every micro-batch, so they go in step.

    With layered accumulation they exchange once per block and pass.
    """
    first = together[0]
    for other in together[1:]:
        counts = len(first.micro_batches), len(other.micro_batches)
        if counts[0] != counts[1] and not layered:
            yield (f"sharding.{kind} puts pipelines of {counts[0]} and {counts[1]} micro-batches into one group; they "
                   "exchange at every micro-batch, so the numbers must be equal. Change `micro_batch` or `samples`, or "
                   "take `accumulation: layered`")
        if (kind == "weights" or schedule not in ("gpipe", "1f1b")) and first.chain != other.chain:
            yield (f"sharding.{kind} puts pipelines with different stages into one group; under {schedule} they "
                   "exchange the same blocks at the same time, so their block ranges must be equal")
        widths = [[stage.members for stage in pipeline.stages] for pipeline in (first, other)]
        if kind == "weights" and widths[0] != widths[1]:
            yield (f"sharding.weights puts pipelines into one group whose stages have {widths[0]} and {widths[1]} "
                   "replicas of their own; they gather from their like, so the numbers must be equal")
