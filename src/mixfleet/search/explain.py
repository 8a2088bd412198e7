"""From what a search found to its answer: ranking, reasons, alternatives, left-over devices, and the nearest miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean

from mixfleet.batching import steps_of
from mixfleet.job import Job
from mixfleet.plan import Pipeline, Plan, Sharding, Synchronization
from mixfleet.plan_rules import why_not
from mixfleet.search.bounds import Whole, upper_samples_per_s, whole_sequences
from mixfleet.search.finder import Search
from mixfleet.search.miss import nearest_miss
from mixfleet.search.result import Alternative, LeftOver, Ranked, SearchResult
from mixfleet.search.space import Team, context_degrees, tensor_degrees
from mixfleet.search.tables import Pieces, Tables
from mixfleet.search.uneven import stranded
from mixfleet.search.variants import is_deep, is_replicated, laid
from mixfleet.sim import Prediction, predict
from mixfleet.units import show_bytes, show_seconds


def explain(search: Search, top: int, exact: bool) -> SearchResult:
    """The answer of a finished search."""
    alone, whole = _upper_samples_per_s(search), None
    if not steps_of(search.job) and alone:
        whole = whole_sequences(search.tables, context_degrees(search.job, len(search.cluster.devices)))
    upper = min(alone, search.job.global_batch / whole.step_s) if whole else alone
    result = SearchResult(
        plans=(), objective=search.objective, upper_samples_per_s=upper, considered=search.considered,
        simulated=search.simulated, exact=exact, complete=search.complete, rejections=search.rejected.listed())
    ranking = search.scored()[:top]
    judged = _alternatives(search)
    if not exact:  # an alternative may be better than all templates; and other families tell more than variants
        ranking = search.distinct()[:top]
        ranking += [entry for entry in search.scored() if entry not in ranking][:top - len(ranking)]
    if not ranking:
        return result.replace(nearest_miss=nearest_miss(search))
    others = [(_with_relative(search, one, ranking[0][0]), one[1]) for one in judged]
    best_score, _, best = ranking[0]
    plans = tuple(Ranked(plan=_named(search, plan, i), prediction=search.found[plan], relative=score / best_score,
                         summary=summary(search, plan)) for i, (score, _, plan) in enumerate(ranking))
    return result.replace(
        plans=plans, why=tuple(_why(search, plans, others, alone, whole)), bound=search.found[best].bound,
        alternatives=tuple(other for other, _ in others),
        fraction_of_upper_bound=search.found[best].samples_per_s / upper,
        left_over=tuple(_left_over(search, best)),
        remaining_bound=search.remaining if search.remaining < best_score else None)


def _upper_samples_per_s(search: Search) -> float:
    """Samples of unequal length take at least what as many of their mean length would: attention grows faster."""
    steps = steps_of(search.job)
    if not steps:
        return upper_samples_per_s(search.tables)
    mean = int(fmean(n for step in steps for n in step))
    return upper_samples_per_s(Tables(search.job.replace(seq_len=max(1, mean)), search.cluster))


def _named(search: Search, plan: Plan, rank: int) -> Plan:
    return plan.replace(name=f"{search.job.name} on {search.cluster.name}, choice {rank + 1}",
                        cluster_fingerprint=search.cluster.fingerprint())


# --- in words --------------------------------------------------------------------------------------------------------

def summary(search: Search, plan: Plan) -> str:
    """A plan in one line. Neighbouring stages on equal devices are written together, `[0:6:11]` for two of them."""
    parts: dict[str, list[Pipeline]] = {}
    deep, flat = is_deep(plan), laid(plan, "1f1b")
    for pipeline in (flat if isinstance(flat, Plan) else plan).pipelines:
        runs: dict[tuple[int, str], list[int]] = {}
        turn, before = 0, ""
        for s in pipeline.stages:
            what = f"{_names(search, s.ranks(0))}{f' tp{s.tensor}' if s.tensor > 1 else ''}"
            if s.members > 1:
                mine = _names(search, s.devices[:s.members * s.tensor])
                what = f"{s.members} x {mine}{what[len(_names(search, s.ranks(0))):]} by {s.shares_text}"
            what += "" if s.recompute == "none" else f" {s.recompute_text} recompute"
            what += f" {' and '.join(s.away)} in host memory" if s.away else ""
            turn, before = turn + (what != before), what
            runs.setdefault((turn, what), [s.blocks[0]]).append(s.blocks[1])
        stages = " | ".join(f"{what} [{':'.join(map(str, cuts))}]" for (_, what), cuts in runs.items())
        if pipeline.context > 1:
            stages = f"{pipeline.context} parts of a sequence on {stages}"
        parts.setdefault(f"({stages})", []).append(pipeline)
    teams = []
    for stages, pipelines in parts.items():
        samples, sizes = (" or ".join(str(n) for n in dict.fromkeys(values)) for values in (
            [p.samples for p in pipelines], [p.micro_batch for p in pipelines]))
        teams.append(f"{sum(p.replicas for p in pipelines)} x {stages}, {samples} samples by {sizes}")
    rounds = max(len(stage.chunks) for pipeline in plan.pipelines for stage in pipeline.stages)
    settings = [_sharding(plan)]
    if deep and plan.schedule != "1f1b":
        settings.append(plan.schedule + (f" in {rounds} chunks" if rounds > 1 else ""))
    if plan.batching != "padded":
        settings.append(f"{plan.batching} samples")
    if plan.accumulation == "layered":
        settings.append("layered")
    if plan.expert > 1:
        held = plan.expert_shares
        settings.append(f"experts shared by {plan.expert} of {len(plan.replicas)} replicas" + (
            f", {':'.join(f'{n}' for n, _ in groupby(held))}" if held else ""))
    if plan.sharding.hierarchical:
        settings.append(f"gathers by nodes of {plan.sharding.hierarchical}")
    return f"{'; '.join(teams)}; {', '.join(settings)}"


def _names(search: Search, ranks: Iterable[int]) -> str:
    return "+".join(dict.fromkeys(search.cluster.devices[r].name for r in ranks))


def _sharding(plan: Plan) -> str:
    shares = plan.sharding.shares
    return f"{_degrees(plan)}, shares {':'.join(f'{s}' for s, _ in groupby(shares))}" if shares else _degrees(plan)


def _degrees(plan: Plan) -> str:
    shard, n = plan.sharding, len(plan.replicas)
    w, g, o = shard.weights, shard.gradients, shard.optimizer
    if n == 1:
        return "one replica"
    if (w, g, o) == (1, 1, 1):
        return "replicated (DDP)"
    stage = 3 if w > 1 else 2 if g > 1 else 1
    if w == g == o and w < n:
        return f"MiCS groups of {w} of {n} replicas"
    name = f"ZeRO-{stage} over {(w, g, o)[3 - stage]} of {n} replicas"
    return name if stage == 1 or o == (w if stage == 3 else g) else f"{name}, optimizer state over {o}"


def _spent(prediction: Prediction) -> dict[str, float]:
    """Seconds per step and device: waiting, and each kind of communication that is not hidden."""
    return {"waiting": prediction.bubble * prediction.step_s,
            **{f"exposed {name}": s for name, s in prediction.exposed_s.items()}}


def _difference(a: Prediction, b: Prediction) -> str:
    """Where `b` loses against `a`."""
    mine, other = _spent(a), _spent(b)
    lost = {k: other.get(k, 0.0) - mine.get(k, 0.0) for k in {**mine, **other}}
    lost["computing"] = b.step_s - a.step_s - sum(lost.values())
    worst = max(sorted(lost), key=lambda k: lost[k])
    return f"mostly {worst} (+{show_seconds(lost[worst])} per step and device)" if lost[worst] > 0 else ""


def _why(search: Search, plans: Sequence[Ranked], others: Sequence[Judged], alone: float, whole: Whole | None
         ) -> Iterable[str]:
    best = plans[0]
    yield (f"{show_seconds(best.prediction.step_s)} per step, {best.prediction.samples_per_s:.3g} samples/s: "
           f"{best.prediction.samples_per_s / alone:.0%} of what all {len(search.cluster.devices)} devices would do "
           f"alone ({alone:.3g} samples/s, memory and communication ignored)")
    yield from _limits(search, best, alone, whole)
    for other, prediction in others:
        if prediction is None:
            yield f"{other.name}: {other.why_not}"
        elif prediction is best.prediction:
            yield f"{other.name}: that is the best plan"
        elif other.relative is not None:
            gap = _difference(best.prediction, prediction)
            yield f"{other.name} takes {other.relative:.2f} times as much per sample{f', {gap}' if gap else ''}"
    for other_plan in plans[1:2]:
        gap = _difference(best.prediction, other_plan.prediction)
        yield f"the runner-up, {other_plan.summary}, takes {other_plan.relative:.3f} times as much" + (
            f", {gap}" if gap else "")
    yield from _replication(search, best)
    yield from _schedule(search, best)
    yield from _virtual_workers(search, best)
    yield from _shares(search, best.plan)
    yield from _experts(search, best)
    if best.plan.sharding.shares:
        even = best.plan.replace(sharding=best.plan.sharding.replace(shares=()))
        yield from stranded(best.plan, predict(even, search.job, search.cluster, sent=False))


def _limits(search: Search, best: Ranked, alone: float, whole: Whole | None) -> Iterable[str]:
    """How far a plan can go where sequences are few, and what keeps the best one from that."""
    job = search.job
    if whole is None or job.global_batch / whole.step_s > CLOSE * alone:
        return
    spent = ", ".join(f"{show_seconds(s)} {name}" for name, s in sorted(
        _spent(best.prediction).items(), key=lambda item: -item[1]) if s > (1 - CLOSE) * best.prediction.step_s)
    yield (f"{job.global_batch} sequences leave {whole.devices:.3g} devices to each, so they are cut: no plan takes "
           f"less than {show_seconds(whole.step_s)} ({job.global_batch / whole.step_s:.3g} samples/s, tensor degree "
           f"{whole.tensor}), and the best one reaches {whole.step_s / best.prediction.step_s:.0%} of that"
           f"{f'; per step and device: {spent}' if spent else ''}")


CLOSE = 0.98
"""Of a limit or a step: what is nearer is not told apart."""


def _replication(search: Search, best: Ranked) -> Iterable[str]:
    """What stages with replicas of their own gain over the best plan without."""
    if not is_replicated(best.plan):
        return
    equal = next((plan for _, _, plan in search.scored() if not is_replicated(plan)), None)
    if equal is None:
        yield "no plan fits whose stages are all replicated alike; with replicas of single stages one does"
        return
    saved = 1 - best.prediction.step_s / search.found[equal].step_s
    yield (f"replicas of single stages save {saved:.1%} of the {show_seconds(search.found[equal].step_s)} of the best "
           f"plan without, {summary(search, equal)}")


def _schedule(search: Search, best: Ranked) -> Iterable[str]:
    """What the schedule gains over 1F1B on the same stages, or what others would lose."""
    flat = laid(best.plan, "1f1b")
    if isinstance(flat, str) or not is_deep(best.plan) or best.plan.waves:
        return
    if best.plan.schedule != "1f1b":
        other = predict(flat, search.job, search.cluster, sent=False)
        saved = 1 - best.prediction.step_s / other.step_s
        yield (f"{best.plan.schedule} saves {saved:.1%} of the {show_seconds(other.step_s)} that these stages would "
               f"take under 1F1B (bubble {best.prediction.bubble:.0%} instead of {other.bubble:.0%})" if other.fits else
               f"under 1F1B these stages would not fit; under {best.plan.schedule} they do")
        return
    times = {plan.schedule: found.step_s for plan, found in search.found.items()
             if plan.schedule not in ("1f1b", "custom") and laid(plan, "1f1b") == flat.replace(
                 name="", cluster_fingerprint="")}
    if times:
        yield "1F1B is the fastest schedule for these stages: " + ", ".join(
            f"{name} takes {seconds / best.prediction.step_s:.3f} times as much"
            for name, seconds in sorted(times.items(), key=lambda item: item[1]))


def _virtual_workers(search: Search, best: Ranked) -> Iterable[str]:
    """What virtual workers gain over steps that wait for all gradients, or why there are none although asked for."""
    if "hetpipe" not in search.names:
        return
    if best.plan.waves:
        flat = laid(best.plan.replace(synchronization=Synchronization()), "1f1b")
        other = None if isinstance(flat, str) else predict(flat, search.job, search.cluster, sent=False)
        if other:
            saved = 1 - best.prediction.step_s / other.step_s
            yield (f"virtual workers, at most {best.plan.synchronization.distance} waves ahead of the slowest, save "
                   f"{saved:.1%} of the {show_seconds(other.step_s)} that the same pipelines take if every step waits "
                   f"for all gradients (1F1B){'' if other.fits else ', which would not fit'}")
        return
    plan = laid(best.plan.replace(sharding=Sharding(), expert=1, expert_shares=()), "hetpipe")
    reason = plan if isinstance(plan, str) else why_not(plan, search.job, search.cluster)
    yield f"no virtual workers (hetpipe): {reason or 'those that fit take longer'}"


def _experts(search: Search, best: Ranked) -> Iterable[str]:
    """What sharing experts among replicas gains over all experts on each."""
    if best.plan.expert == 1:
        return
    whole = predict(best.plan.replace(expert=1, expert_shares=()), search.job, search.cluster, sent=False)
    ratio = whole.step_s / best.prediction.step_s
    what = f"takes {ratio:.2f} times as long" if whole.fits else "does not fit"
    held, peak = (max(use.peak_bytes for use in found.devices) for found in (best.prediction, whole))
    yield (f"{best.plan.expert} replicas share the routed experts: the same plan with all experts on each {what} and "
           f"holds {show_bytes(peak)} on the fullest device instead of {show_bytes(held)}")


def _shares(search: Search, plan: Plan) -> Iterable[str]:
    """What part of the work falls to each kind of device, against its part of the speed."""
    tables, job = search.tables, search.job
    work: dict[str, float] = {}
    speed: dict[str, float] = {}
    for rank in plan.ranks:
        name = search.cluster.devices[rank].name
        speed[name] = speed.get(name, 0.0) + 1 / tables.table((rank,), 1).whole_s
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            flops = sum(op.flops.at(1, job.seq_len) + op.backward_flops.at(1, job.seq_len)
                        for block in map(job.model.blocks.__getitem__, stage.held) for op in block.ops)
            shares, mine = stage.shares or (1,), len(stage.devices) // pipeline.copies
            for i, rank in enumerate(stage.devices):
                name, part = search.cluster.devices[rank].name, shares[i % mine // stage.tensor] / sum(shares)
                work[name] = work.get(name, 0.0) + flops * pipeline.samples * part / stage.tensor / pipeline.context
    if len(work) > 1:
        yield "; ".join(f"{n}: {work[n] / sum(work.values()):.0%} of the work, {speed[n] / sum(speed.values()):.0%} of "
                        "the speed" for n in sorted(work, key=lambda n: -work[n]))


# --- what one would do without a search ------------------------------------------------------------------------------

ROUNDED = 1.25
"""Most by which the global batch of an even plan may differ from the job's."""
Judged = tuple[Alternative, Prediction | None]


def _alternatives(search: Search) -> list[Judged]:
    everyone = range(len(search.cluster.devices))
    fastest = search.classes[0].device.name
    fast = [r for r in everyone if search.cluster.devices[r].name == fastest]
    found = [_even(search, "even DDP over all devices", sharded=False),
             _even(search, "even FSDP (ZeRO-3) over all devices", sharded=True)]
    if 0 < len(fast) < len(everyone):
        found.append(_fastest_only(search, f"only the {len(fast)} fastest devices ({fastest})"))
    return found


def _with_relative(search: Search, judged: Judged, best: float) -> Alternative:
    """The objective per sample, as a multiple of the best plan's."""
    other, prediction = judged
    if prediction is None:
        return other
    ranks = other.plan.ranks if other.plan else range(len(search.cluster.devices))
    return other.replace(relative=search.score(search.job.global_batch / prediction.samples_per_s, ranks) / best)


def _even(search: Search, name: str, *, sharded: bool) -> Judged:
    """Every device a replica with the same samples and micro-batch, the largest that fits everywhere.

    Where the batch does not divide, it is the next one that does, as one would set it by hand.
    """
    n, wanted = len(search.cluster.devices), search.job.global_batch
    each = -(-wanted // n)
    if each * n > ROUNDED * wanted:
        return Alternative(name=name, why_not=f"{wanted} sequences do not divide by {n} devices; the next global batch "
                                              f"that does is {each * n}"), None
    job = search.job.replace(global_batch=each * n)
    signature = search.tables.signature
    runs: list[list[int]] = []
    for rank in range(n):
        if runs and signature((runs[-1][0],)) == signature((rank,)):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shape = tuple(Team(((1, signature((run[0],))),), tuple(((r,),) for r in run)) for run in runs)
    sharding = Sharding(weights=n, gradients=n, optimizer=n) if sharded else Sharding()
    pieces = Pieces.of(sharding, n)
    prediction: Prediction | None = None
    why = ""
    for micro_batch in reversed([m for m in range(1, each + 1) if each % m == 0]):
        fits = [search.candidates.fit(team, micro_batch, pieces, each) for team in shape]
        short = [run[0] for run, fit in zip(runs, fits) if fit is None]
        if short:
            why = f"does not fit in the memory of {search.cluster.devices[short[0]].name}, even with full recompute"
            continue
        plan = search.candidates.build(shape, sharding, [(f, [each] * t.replicas) for f, t in zip(fits, shape) if f])
        prediction = predict(plan, job, search.cluster, sent=False)
        if prediction.fits:
            same = job.global_batch == wanted
            if same:
                search.found.setdefault(plan, prediction)
            return Alternative(name=name if same else f"{name} (global batch {job.global_batch}, which divides)",
                               plan=plan if same else None, step_s=prediction.step_s,
                               summary=summary(search, plan)), prediction
        why = prediction.reasons[0]
    return Alternative(name=name, why_not=why), None


def _fastest_only(search: Search, name: str) -> Judged:
    """The best plan on the fastest kind of device alone, the others idle; searched like the whole."""
    search.begin()
    inside = search.on_fastest()
    if not inside:
        return Alternative(name=name, why_not="no plan was found in the time given" if search.late() else
                           "does not fit in their memory"), None
    prediction = search.found[inside[0]]
    return Alternative(name=name, plan=inside[0], step_s=prediction.step_s,
                       summary=summary(search, inside[0])), prediction


# --- devices left over -----------------------------------------------------------------------------------------------

def _left_over(search: Search, best: Plan) -> Iterable[LeftOver]:
    cluster, used = search.cluster, set(best.ranks)
    rest: dict[int, list[int]] = {}
    for rank in range(len(cluster.devices)):
        if rank not in used:
            rest.setdefault(search.tables.kind_of[rank], []).append(rank)
    for ranks in rest.values():
        name = cluster.devices[ranks[0]].name
        with_them = [(s, plan) for s, _, plan in search.scored() if set(ranks) & set(plan.ranks)]
        if with_them:
            relative = with_them[0][0] / search.score(search.found[best].step_s, best.ranks)
            reason = (f"the best plan that uses any of them takes {relative:.2f} times as much "
                      f"({summary(search, with_them[0][1])})")
        else:
            reason = "no plan that uses them fits, or their bound is higher than the best plan"
        alike = [r for r in used if search.tables.kind_of[r] == search.tables.kind_of[ranks[0]]]
        if alike:
            degrees = tensor_degrees(search.job, len(ranks) + len(alike))
            reason = (f"the other {len(alike)} {name} are used; {len(ranks)} do not make another equal part "
                      f"(tensor degrees that divide the model: {', '.join(map(str, degrees))}); {reason}")
        yield LeftOver(devices=tuple(ranks), device_name=name, reason=reason, better_use=_better_use(search, ranks),
                       nodes=tuple(dict.fromkeys(cluster.nodes[cluster.node_of[r]].name for r in ranks)))


def _better_use(search: Search, ranks: Sequence[int]) -> str:
    """What else the devices could do: hold a copy of the model for evaluation, or another job."""
    job: Job = search.job
    device = search.cluster.devices[ranks[0]]
    weights = job.model.count * job.bytes.weight_bytes
    need = -(-weights // max(1, int(0.8 * device.memory_bytes)))
    if need <= len(ranks):
        return (f"They could evaluate checkpoints (the weights of {job.model.name} need {need} of them), or train "
                "another job")
    return (f"They could train another job; the weights of {job.model.name} alone need {need} of them, so they cannot "
            "evaluate its checkpoints")
