"""What late gradients do to training: asynchronous schedules beside the synchronous one on a toy task.

Four stages of two layers learn what a fixed random network says of random inputs. One process does the micro-batches in
turn, each on the versions of weights that the order of its schedule states; the first figures hold that to four real
ranks. `python -m benchmarks.staleness [--svg FILE]` prints the tables of docs/schedules.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import Figure
from benchmarks.schedules import run

STAGES, WIDTH, SAMPLES, BATCH = 4, 16, 256, 32
STEPS, EVERY, SEEDS = 160, 8, (0, 1, 2)
TARGET = 0.4
"""Of the loss at the start: the loss to be reached."""
VARIANTS = ("1f1b", "async-1f1b", "pipedream", "pipedream-vertical", "pipedream-2bw", "pipeoptim", "xpipe")
RULES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "SGD, momentum 0.9": ({"name": "sgd", "momentum": 0.9, "weight_decay": 0.0}, (0.005, 0.02, 0.04, 0.08)),
    "Adam": ({"name": "adamw", "betas": (0.9, 0.999), "weight_decay": 0.0}, (0.002, 0.005, 0.01, 0.04)),
    "AdamW, decay 0.1": ({"name": "adamw", "betas": (0.9, 0.999), "weight_decay": 0.1}, (0.002, 0.005, 0.01, 0.04)),
}
"""Optimizers and their learning rates. With SGD the synchronous run diverges at twice the last one; Adam's no longer
gets anywhere at the last one."""
SIZES = {1: 4, 4: 2}
"""Micro-batches per update, and how many of the learning rates are tried with them: the last ones."""


class Curve(NamedTuple):
    """One run: the loss over all samples after every `EVERY` updates, as a multiple of the loss at the start."""

    losses: tuple[float, ...]

    @property
    def final(self) -> float:
        """Mean of the last five."""
        return sum(self.losses[-5:]) / 5

    @property
    def reached(self) -> float:
        """Updates until the loss is below the target and stays there for two looks; infinite if never."""
        below = [x < TARGET for x in self.losses]
        return next((float(EVERY * (i + 1)) for i in range(len(below) - 1) if below[i] and below[i + 1]), math.inf)


def _squared(output: Any, target: Any) -> Any:
    return (output - target).square().sum()


def _task(rule: dict[str, Any], lr: float, seed: int, precision: str) -> Any:
    """A trainer of 2 * STAGES layers; the teacher and its inputs are of the same seed."""
    import torch
    from torch import nn

    from mixfleet.job import Optimizer
    from mixfleet.run.trainer import Trainer

    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    teacher = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
    with torch.no_grad():
        targets = 2 * teacher(inputs)

    def layer(last: bool) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH) if last else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    blocks = [layer(i == 2 * STAGES - 1) for i in range(2 * STAGES)]
    return Trainer(blocks, _squared, inputs.double() if precision == "fp64" else inputs,
                   targets.double() if precision == "fp64" else targets, global_batch=BATCH,
                   optimizer=Optimizer(lr=lr, **rule), precision=precision, seed=seed)  # type: ignore[arg-type]


def _plan(schedule: str, micro_batches: int) -> Any:
    from mixfleet.plan import Pipeline, Plan, Stage

    return Plan(schedule=schedule, pipelines=(Pipeline(  # type: ignore[arg-type]
        samples=BATCH, micro_batch=BATCH // micro_batches,
        stages=tuple(Stage(blocks=(2 * s, 2 * s + 2), devices=(s,)) for s in range(STAGES))),))


class Alone:
    """One process in place of the stages. The weights of a stage are one flat vector, of which versions are kept."""

    def __init__(self, trainer: Any, schedule: str, micro_batches: int, steps: int) -> None:
        import torch

        from mixfleet.run.optim import FlatOptimizer, Run
        from mixfleet.schedule.asynchronous import readings, stream
        from mixfleet.schedule.named import SCHEDULES

        self.size, self.steps, self.source = micro_batches, steps, trainer.source
        dtype = {"fp64": torch.float64, "fp32": torch.float32}[trainer.job.precision]
        self.rule = trainer.job.optimizer
        self.blocks = [block.to(dtype) for block in trainer.source.blocks]
        self.flat, self.grad, self.optimizers = [], [], []
        for s in range(STAGES):
            params = [p for block in self.blocks[2 * s:2 * s + 2] for p in block.parameters()]
            flat = torch.cat([p.detach().reshape(-1) for p in params])
            grad, at, parts = torch.zeros_like(flat), 0, []
            for p in params:
                p.data, p.grad = flat[at:at + p.numel()].view_as(p), grad[at:at + p.numel()].view_as(p)
                parts.append(Run(at, at + p.numel(), *self.rule.rates("", p.ndim)))
                at += p.numel()
            self.flat.append(flat)
            self.grad.append(grad)
            self.optimizers.append(FlatOptimizer(self.rule, parts, [flat], predicts=True))
        weights = SCHEDULES[schedule].weights
        self.read = {} if weights is None else {
            key: found for order in stream(tuple(range(STAGES)), micro_batches, steps, weights)
            for key, found in readings(order).of.items()}
        # Per stage and version: the weights, and the state from which later ones are predicted.
        self.past: list[dict[int, tuple[Any, dict[str, Any]]]] = [{} for _ in range(STAGES)]

    def _load(self, s: int, version: int, made: int) -> None:
        value, state = self.past[s][made]
        self.flat[s].copy_(value)
        if version > made:
            optimizer = self.optimizers[s]
            now = optimizer.state, optimizer.steps
            optimizer.state, optimizer.steps = state, made
            optimizer.anticipate([value], [self.flat[s]], [self.rule.lr] * (version - made))
            optimizer.state, optimizer.steps = now

    def _keep(self, version: int) -> None:
        for s, optimizer in enumerate(self.optimizers):
            self.past[s][version] = self.flat[s].clone(), {k: t.clone() for k, t in optimizer.state.items()}
            self.past[s].pop(version - 2 * STAGES, None)

    def train(self, look: Callable[[int], bool] = lambda step: False) -> list[float]:
        """The loss of every step. `look` is called after each, with its weights in place; it may end the run."""
        self.source.open(0, 0)
        self._keep(0)
        losses = []
        for step in range(self.steps):
            inputs, targets = self.source.batch(step, 0, BATCH)
            total = 0.0
            for m, (x, y) in enumerate(zip(inputs.chunk(self.size), targets.chunk(self.size))):
                read = [self.read.get((s, step * self.size + m)) for s in range(STAGES)]
                for s, one in enumerate(read):
                    self._load(s, *((one.forward, one.made) if one else (step, step)))
                for block in self.blocks:
                    x = block(x)
                loss = _squared(x, y) / BATCH
                for s, one in enumerate(read):
                    if one and (one.backward, one.backward) != (one.forward, one.made):
                        self._load(s, one.backward, one.backward)
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            for s, optimizer in enumerate(self.optimizers):
                self.flat[s].copy_(self.past[s][step][0])
                optimizer.step([self.flat[s]], [self.grad[s]], 1.0, self.rule.lr)
                self.grad[s].zero_()
            self._keep(step + 1)
            if look(step):
                break
        return losses


def curve(rule: dict[str, Any], lr: float, seed: int, schedule: str, micro_batches: int) -> Curve:
    import torch

    alone = Alone(_task(rule, lr, seed, "fp32"), schedule, micro_batches, STEPS)
    inputs, targets = alone.source.inputs, alone.source.targets
    found: list[float] = []

    @torch.no_grad()
    def loss() -> float:
        x = inputs
        for block in alone.blocks:
            x = block(x)
        return float(_squared(x, targets) / len(inputs))

    start = loss()

    def look(step: int) -> bool:
        if (step + 1) % EVERY == 0:
            found.append(loss() / start)
        return bool(found) and not found[-1] < 100

    alone.train(look)
    return Curve((*found, *[math.inf] * (STEPS // EVERY - len(found))))


def on_ranks(process: int, world: int) -> dict[tuple[str, int], list[float]]:
    """Losses of every variant on real ranks, in fp64."""
    from mixfleet.run.worker import Rank

    found = {}
    for name, size in _suited():
        trainer = _task(*_checked(), 0, "fp64")
        rank = Rank(_plan(name, size), trainer.job, _cluster(), trainer.source, process)
        rank.start()
        found[name, size] = [result.loss for result in rank.advance(24, lambda: False)]
        rank.close()
    return found


def _checked() -> tuple[dict[str, Any], float]:
    return RULES["AdamW, decay 0.1"][0], 0.01


def _cluster() -> Any:
    from mixfleet.cluster import Cluster, Device, Link, Node

    device = Device(name="cpu", kind="cpu", flops={"fp64": 1e10, "fp32": 1e10}, vector_flops=1e10, memory_bytes=2**31,
                    memory_Bps=1e10)
    link = Link(latency_s=1e-5, bandwidth_Bps=1e9)
    return Cluster(name="bench", nodes=(Node(name="here", devices=(device,) * STAGES, link=link, nic=link),))


def _suited() -> list[tuple[str, int]]:
    from mixfleet.schedule.named import SCHEDULES

    return [(name, size) for size in SIZES for name in VARIANTS[1:]
            if SCHEDULES[name].why_not(tuple(range(STAGES)), size) is None]


Found = dict[tuple[int, str, float, str], list[Curve]]
"""By micro-batches per update, optimizer, learning rate and schedule: one curve per seed."""


def measure() -> Found:
    import torch

    torch.set_num_threads(1)
    suited = {*_suited(), *(("1f1b", size) for size in SIZES)}
    return {(size, rule, lr, name): [curve(RULES[rule][0], lr, seed, name, size) for seed in SEEDS]
            for size in SIZES for rule in RULES for lr in _rates(rule, size)
            for name in VARIANTS if (name, size) in suited}


def _rates(rule: str, size: int) -> tuple[float, ...]:
    return RULES[rule][1][-SIZES[size]:]


def _cell(curves: list[Curve]) -> str:
    final, reached = median(c.final for c in curves), median(c.reached for c in curves)
    if not final < 1:
        return "diverges"
    return f"{final:.4f} / {reached:.0f}" if math.isfinite(reached) else f"{final:.4f} / -"


def tables(found: Found) -> str:
    lines = []
    for size in SIZES:
        names = [n for n in VARIANTS if any(k[0] == size and k[3] == n for k in found)]
        lines += [f"\n{size} micro-batch{'es' if size > 1 else ''} per update:\n",
                  f"| optimizer | lr | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
        for rule in RULES:
            lines += [f"| {rule} | {lr:g} | {' | '.join(_cell(found[size, rule, lr, n]) for n in names)} |"
                      for lr in _rates(rule, size)]
    return "\n".join(lines)


def svg(found: Found, rule: str, lr: float, size: int) -> str:
    """Curves of the first seed, loss on a logarithmic scale."""
    colours = dict(zip(VARIANTS, ("#1d232b", "#c8452f", "#5b8fd6", "#2f5fa8", "#8457b0", "#3a9a5b", "#d29a2f")))
    width, height, left, top = 640, 260, 60, 24
    floor = -1.5

    def at(i: int, loss: float) -> str:
        x = left + (width - left - 150) * (i + 1) / (STEPS // EVERY)
        y = top + (height - top - 30) * (1 - (max(floor, math.log10(max(loss, 1e-9))) - floor) / (0.4 - floor))
        return f"{x:.1f},{max(top, y):.1f}"

    body = [f'<text x="0" y="14" font-weight="600">{rule}, lr {lr:g}, {size} micro-batch'
            f'{"es" if size > 1 else ""} per update: loss over the first, by updates</text>']
    for power in (0, -1):
        y = at(0, 10.0**power).split(",")[1]
        body.append(f'<text x="{left - 44}" y="{float(y) + 4:.1f}">{10.0**power:g}</text>'
                    f'<path d="M{left},{y}H{width - 150}" stroke="currentColor" opacity=".15"/>')
    for i in (0, STEPS // EVERY // 2 - 1, STEPS // EVERY - 1):
        x = at(i, 1).split(",")[0]
        body.append(f'<text x="{x}" y="{height - 8}" text-anchor="middle">{EVERY * (i + 1)}</text>')
    row = 0
    for name in VARIANTS:
        if (size, rule, lr, name) in found:
            points = " ".join(at(i, x) for i, x in enumerate(found[size, rule, lr, name][0].losses) if x < 2.5)
            body.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.6"/>'
                        f'<text x="{width - 140}" y="{top + 14 + 17 * row}" fill="{colours[name]}">{name}</text>')
            row += 1
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" fill="#1d232b" '
            f'font-family="system-ui,sans-serif" font-size="12">{"".join(body)}</svg>\n')


def figures() -> Iterator[Figure]:
    import os

    a, b = sorted(os.sched_getaffinity(0))[:2]
    ranks = run(on_ranks, [a, b, a, b])
    worst = 0.0
    for (name, size), losses in ranks.items():
        alone = Alone(_task(*_checked(), 0, "fp64"), name, size, len(losses)).train()
        worst = max(worst, *(abs(x / y - 1) for x, y in zip(losses, alone)))
    yield Figure(f"losses of {len(ranks)} asynchronous settings on 4 ranks beside one process that reads the stated "
                 "versions, fp64", f"{worst:.1e}", "1e-9", worst <= 1e-9)
    found = measure()
    for size in SIZES:
        for rule in RULES:
            for lr in _rates(rule, size):
                sync, *others = [(n, found[size, rule, lr, n]) for n in VARIANTS if (size, rule, lr, n) in found]
                yield Figure(f"{rule}, lr {lr:g}, {size} per update: final loss / updates to {TARGET:g}",
                             "; ".join(f"{n} {_cell(c)}" for n, c in others), f"1f1b {_cell(sync[1])}")
    for rule, (_, rates) in RULES.items():  # what S34 asks of a toy task
        nearer = [lr for lr in rates if _apart(found, rule, lr, "pipeoptim") < _apart(found, rule, lr, "async-1f1b")]
        yield Figure(f"{rule}, 1 per update: final loss nearer to the synchronous one with prediction than without",
                     f"at {len(nearer)} of {len(rates)} learning rates", "most", 2 * len(nearer) > len(rates))


def _apart(found: Found, rule: str, lr: float, name: str) -> float:
    """How far the final loss is from that of the synchronous run, as a logarithm; the median over seeds."""
    return median(abs(math.log(min(c.final, 1e3) / min(s.final, 1e3)))
                  for c, s in zip(found[1, rule, lr, name], found[1, rule, lr, "1f1b"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="also draw the curves of one setting into this file")
    arguments = parser.parse_args()
    found = measure()
    print(tables(found))
    if arguments.svg:
        arguments.svg.write_text(svg(found, "Adam", 0.01, 1), encoding="utf-8")


if __name__ == "__main__":
    main()
