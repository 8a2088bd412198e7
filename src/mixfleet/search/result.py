"""What a search answers: plans with their predictions, and what it can say about those that it did not choose."""

from __future__ import annotations

from typing import Literal

from mixfleet.plan import Plan
from mixfleet.sim.prediction import Prediction
from mixfleet.spec import Spec

Objective = Literal["time", "cost"]


class Ranked(Spec, frozen=True, kw_only=True):
    """One plan of the ranking."""

    plan: Plan
    prediction: Prediction
    relative: float
    """Its objective as a multiple of the best plan's: 1.0 for the best."""
    summary: str
    """The plan in one line: `4 x (A100 tp2 [0:20] | V100 [20:27:34]), 32 samples by 1; ZeRO-1 over 4 of 4 replicas`."""


class Alternative(Spec, frozen=True, kw_only=True):
    """What one would have done without a search: the even plan, the fastest devices alone, DDP."""

    name: str
    summary: str = ""
    plan: Plan | None = None
    """None where it does not fit, or where it needs another global batch."""
    step_s: float | None = None
    """None where it does not fit."""
    relative: float | None = None
    """The objective per sample, as a multiple of the best plan's."""
    why_not: str = ""


class Rejection(Spec, frozen=True, kw_only=True):
    """Candidates that were left out for one reason; being slower, as a lower bound proves, is one."""

    reason: str
    count: int
    example: str = ""


class Rejected:
    """Counts of rejections while a search goes on, each reason with its first example."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, reason: str, count: int = 1, example: str = "") -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        if example:
            self.examples.setdefault(reason, example)

    def listed(self) -> tuple[Rejection, ...]:
        """Most frequent first."""
        return tuple(Rejection(reason=r, count=n, example=self.examples.get(r, ""))
                     for r, n in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])))


class NearestMiss(Spec, frozen=True, kw_only=True):
    """When nothing fits: the candidate that lacks least, what it lacks, and the closest change that makes it fit."""

    device: int
    """Rank of the device that lacks most in this candidate."""
    device_name: str
    node: str
    lacks_bytes: int
    phase: str
    summary: str
    plan: Plan
    changes: tuple[str, ...] = ()
    """Changes of the job that make a plan fit, the smallest first: `seq_len 4096 (now 8192)`."""


class LeftOver(Spec, frozen=True, kw_only=True):
    """Devices that the best plan does not use, and what they are good for."""

    devices: tuple[int, ...]
    device_name: str
    nodes: tuple[str, ...]
    reason: str
    better_use: str


class SearchResult(Spec, frozen=True, kw_only=True):
    """The answer to one search; equal input gives an equal result, to the bit."""

    plans: tuple[Ranked, ...]
    """Best first; empty if nothing fits (then `nearest_miss` is set)."""
    objective: Objective
    why: tuple[str, ...] = ()
    """Sentences: why the best plan wins, against runners-up and alternatives."""
    bound: str = ""
    """What limits the best plan, in one sentence."""
    alternatives: tuple[Alternative, ...] = ()
    upper_samples_per_s: float = 0.0
    """What all devices would do alone, added up; memory and communication ignored. Less where the devices are equal and
    the sequences so few that they have to be cut (`bounds.whole_sequences`)."""
    fraction_of_upper_bound: float = 0.0
    rejections: tuple[Rejection, ...] = ()
    nearest_miss: NearestMiss | None = None
    left_over: tuple[LeftOver, ...] = ()
    considered: int = 0
    """Candidates of the space that were looked at."""
    simulated: int = 0
    exact: bool = False
    """The whole space was enumerated (small cases): no plan of the space is better."""
    complete: bool = True
    """False if a limit stopped the search; `remaining_bound_s` then says what could still be hidden."""
    remaining_bound: float | None = None
    """Smallest lower bound of the objective among the candidates that were not simulated."""

    @property
    def best(self) -> Ranked | None:
        """The first of `plans`."""
        return self.plans[0] if self.plans else None
