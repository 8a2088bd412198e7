"""The actions of a program, and what each reads and writes.

A *role* is one stage of one pipeline; all its replicas and all ranks of its tensor-parallel group do the same
actions. Every action goes to a stream (`stream_of`). Order within a stream, and the hazards on named values
(read after write, write after read, write after write, by position in the list), are all the semantics there is:
both interpreters may overlap streams as far as these allow.
"""

from __future__ import annotations

from typing import NamedTuple

from mixfleet.spec import Spec

F, B = "F", "B"
SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD = "SA", "RA", "SG", "RG"
GATHER, RELEASE, REDUCE, SYNC, NORM, STEP, PUBLISH = "G", "X", "R", "Y", "N", "S", "P"


class Action(NamedTuple):
    """One thing that a role does.

    op   what
    F    forward of blocks `lo` to `hi - 1` for micro-batch `mb`
    B    backward of the same, last block first (recomputes first where the stage says so)
    SA   send the output of block `hi - 1` for `mb` to stage `peer`;  RA receive the input of block `lo` from `peer`
    SG   send the gradient of the input of block `lo` to `peer`;      RG receive the gradient of the output of `hi - 1`
    G    gather the weights of state unit `lo` in its weight group (all-gather)
    X    release the gathered weights of unit `lo`
    R    hop 1: reduce the gradient of unit `lo` for `mb` inside its gradient group (reduce-scatter) and accumulate it
    Y    hop 2: reduce the accumulated gradient of unit `lo` across groups, to the owners of its optimizer state
    N    norm of the whole gradient (all ranks), for clipping and scaling
    S    optimizer step of the owned piece of unit `lo`
    P    hand the updated weights of unit `lo` from the optimizer owners to those who hold them

    State units are the blocks, in order, then one per tied tensor (see `layout`).
    """

    op: str
    lo: int = 0
    hi: int = 0
    mb: int = -1
    peer: int = -1

    def __str__(self) -> str:
        blocks = f"{self.lo}" if self.hi <= self.lo + 1 else f"{self.lo}:{self.hi}"
        where = "" if self.op == NORM else blocks
        return f"{self.op}{where}" + (f".{self.mb}" if self.mb >= 0 else "") + (
            f"@{self.peer}" if self.peer >= 0 else "")


def stream_of(action: Action) -> tuple[str, int]:
    """Stream name and channel. Point-to-point actions have one FIFO channel per peer and direction of data."""
    if action.op in (SEND_ACT, RECV_ACT, SEND_GRAD, RECV_GRAD):
        direction = {SEND_ACT: 0, RECV_ACT: 1, SEND_GRAD: 2, RECV_GRAD: 3}[action.op]
        return "p2p", action.peer * 4 + direction
    if action.op in (GATHER, RELEASE, PUBLISH):
        return "gather", 0
    if action.op in (REDUCE, SYNC):
        return "reduce", 0
    return "compute", 0


class Role(Spec, frozen=True, kw_only=True):
    """Stage `stage` of pipeline `pipeline`, and what it does in one optimizer step."""

    pipeline: int
    stage: int
    actions: tuple[Action, ...]


class Program(Spec, frozen=True, kw_only=True, dict=True):
    """One optimizer step of a plan: a list of actions per role."""

    roles: tuple[Role, ...]

    def role(self, pipeline: int, stage: int) -> Role:
        return next(r for r in self.roles if r.pipeline == pipeline and r.stage == stage)
