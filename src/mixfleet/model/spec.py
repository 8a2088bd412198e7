"""The language of models.

Sizes are symbolic in micro-batch `b`, sequence length `s`, tensor-parallel degree `t` and context ratio `c`, so that a
model is built once and priced for any plan. A `Size` is a sum of monomials `coefficient * b^i * s^j * c^l / t^k`.
Under context parallelism `s` is the part of a sequence that one rank has, and `c` how many times longer the whole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mixfleet.errors import InputError
from mixfleet.spec import Spec


class Term(NamedTuple):
    """`coef * b**b * s**s * c**c / t**t`"""

    coef: float
    b: int = 0
    s: int = 0
    t: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """A symbolic count. Build it from `Size.of(3)`, `B`, `S`, `T` with `+`, `*` and `/`."""

    terms: tuple[Term, ...] = ()

    @staticmethod
    def of(value: Size | float) -> Size:
        return value if isinstance(value, Size) else Size((Term(value),) if value else ())

    def __add__(self, other: Size | float) -> Size:
        coefs: dict[tuple[int, int, int, int], float] = {}
        for term in self.terms + Size.of(other).terms:
            coefs[term[1:]] = coefs.get(term[1:], 0) + term.coef
        return Size(tuple(Term(c, *powers) for powers, c in sorted(coefs.items())))

    def __radd__(self, other: float) -> Size:
        return self + other

    def __mul__(self, other: Size | float) -> Size:
        total = Size()
        for x in self.terms:
            for y in Size.of(other).terms:
                total += Size((Term(x.coef * y.coef, x.b + y.b, x.s + y.s, x.t + y.t, x.c + y.c),))
        return total

    def __rmul__(self, other: float) -> Size:
        return self * other

    def __truediv__(self, other: Size | float) -> Size:
        (d,) = Size.of(other).terms
        return Size(tuple(Term(x.coef / d.coef, x.b - d.b, x.s - d.s, x.t - d.t, x.c - d.c) for x in self.terms))

    def at(self, b: float, s: float, t: float = 1, c: float = 1) -> float:
        """The value for micro-batch `b`, sequence length `s` on a rank, tensor degree `t`, context ratio `c`."""
        if c == 1:
            return sum(x.coef * b**x.b * s**x.s / t**x.t for x in self.terms)
        return sum(x.coef * b**x.b * s**x.s * c**x.c / t**x.t for x in self.terms)


B, S, T = Size((Term(1, 1),)), Size((Term(1, 0, 1),)), Size((Term(1, 0, 0, -1),))
"""Micro-batch, sequence length, tensor degree: dividing by `T` shards."""
WHOLE = Size((Term(1, 0, 1, 0, 1),))
"""Length of the whole sequence, which is longer than `S` under context parallelism."""

OpKind = Literal["gemm", "attention", "norm", "elementwise", "embedding", "softmax", "loss"]


class Op(Spec, frozen=True, kw_only=True):
    """One operator of a block, forward and backward, as it is on one rank.

    `shape` names its dimensions: gemm `batch, m, n, k`; attention `batch, heads, kv_heads, q, kv, qk_dim, v_dim`;
    row-wise kinds `rows, cols`. A multiply-add counts as two FLOPs, as in PyTorch's flop counter; attention counts
    the full square even if `causal` (cost functions halve the time). `traffic` counts elements read and written.
    """

    name: str
    kind: OpKind
    shape: dict[str, Size]
    flops: Size
    backward_flops: Size
    traffic: Size
    backward_traffic: Size
    causal: bool = False
    window: int = 0
    """Sliding-window length of attention; 0 is none."""
    routed: bool = False
    """Of the rows that come to the experts of a rank: where several replicas share these, see `ExpertShare`."""


class ExpertShare(NamedTuple):
    """What a rank has of routed experts that several replicas share (expert parallelism).

    Sizes of what is `routed` are taken at micro-batch 1, sequence length `tokens` and tensor degree `parts`: all who
    share the experts are like one large tensor group, of which each rank holds a part that need not be equal.
    """

    tokens: int
    """Of one micro-batch, over all replicas that share the experts."""
    parts: float
    """All experts over those that the rank holds; infinite if it holds none."""


class Param(Spec, frozen=True, kw_only=True):
    """One parameter tensor of a block, whole (before any sharding)."""

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    """Dimension that tensor parallelism cuts; None is replicated in the tensor-parallel group."""
    role: Literal["dense", "embedding", "expert", "norm", "bias"] = "dense"
    trainable: bool = True
    tied: str = ""
    """`block.name/param.name` of the parameter that this one is the same tensor as; counted once, there."""

    @property
    def count(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n


class Saved(Spec, frozen=True, kw_only=True):
    """A tensor kept from forward to backward, in elements per rank.

    `until` says which recompute mode still keeps it: `none` drops first (kept only without recompute),
    `selective` is kept under none and selective, `full` is kept always (the block's input).
    """

    name: str
    size: Size
    until: Literal["none", "selective", "full"] = "selective"
    bytes_per_element: int | Literal["wide", "copy", "long"] | None = None
    """None: the compute type of the job; 1 for masks, 8 for indices; `wide`: fp32, or the compute type if that is
    wider; `copy`: fp32 beside 16 bits, nothing beside others; `long`: nothing for 16 bits, else the compute type."""
    device: Literal["", "gpu", "cpu"] = ""
    """Kept on such devices only: CPUs have no kernel for RMSNorm, so its steps keep tensors of their own, in fp32."""
    for_weights: bool = False
    """Only the gradients of weights need it: a block whose weights are frozen does not keep it."""
    fused_only: bool = False
    """Held only where attention is fused: statistics of its rows."""
    unfused_only: bool = False
    """Held only where attention is not fused (no flash attention): the s*s scores."""
    routed: bool = False
    """As `Op.routed`."""

    def element_bytes(self, compute_bytes: int) -> int:
        """Bytes per element where the compute type has so many."""
        wide = max(4, compute_bytes)
        special = {None: compute_bytes, "wide": wide, "copy": wide if compute_bytes < 4 else 0,
                   "long": compute_bytes if compute_bytes >= 4 else 0}
        return self.bytes_per_element if isinstance(self.bytes_per_element, int) else special[self.bytes_per_element]

    def held(self, device: str, *, fused: bool) -> bool:
        """Whether it is kept at all on a kind of device, where attention is fused or not."""
        return self.device in ("", device) and not (self.unfused_only if fused else self.fused_only)


class TensorComm(Spec, frozen=True, kw_only=True):
    """A collective inside a tensor or context group; it carries `size` elements in total (the gathered tensor).

    An all-to-all brings rows to the experts and back, over the replicas that share these, too; `size` is what one rank
    has for all experts, its own included.
    `bytes_per_element` is None for the compute type, 4 for fp32 (or the compute type, if that is wider).
    """

    op: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    phase: Literal["forward", "backward"]
    size: Size
    bytes_per_element: int | None = None

    @property
    def routed(self) -> bool:
        """Whether it brings rows to experts and back."""
        return self.op == "all_to_all"


class Block(Spec, frozen=True, kw_only=True, dict=True):
    """The smallest unit of a pipeline split: an embedding, one transformer layer, a head with its loss."""

    name: str
    kind: str
    """Blocks of equal kind are equal in everything but name: costs are computed once per kind."""
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    saved: tuple[Saved, ...]
    boundary: Size
    """Elements of the output that go to the next block, per rank (sequence-sharded under tensor parallelism)."""
    workspace: Size = Size()
    """Elements of the temporaries that are fp32 whatever the compute type (the head's softmax over the vocabulary)."""
    workspace_bytes_per_element: int = 4
    temporaries: Size = Size()
    """Elements, in the compute type, that backward holds at its peak beyond all saved ones: gradients in the MLP."""
    unfused_temporaries: Size = Size()
    """The same where attention is not fused and its scores are the peak; the larger of the two counts."""
    routed_temporaries: Size = Size()
    """What adds to `temporaries` for the rows that come to a rank's experts, see `Op.routed`."""
    tensor_comm: tuple[TensorComm, ...] = ()
    context_comm: tuple[TensorComm, ...] = ()
    """Keys and values, and their gradients, among the ranks that hold parts of one sequence."""

    hands_down: bool = True
    """Whether it makes the gradient of its input; not if all below it is frozen."""

    @cached_property
    def count(self) -> int:
        """Parameters that this block owns (tied ones belong to where they point)."""
        return sum(p.count for p in self.params if not p.tied)

    @cached_property
    def routed(self) -> bool:
        """Whether it has routed experts."""
        return any(p.role == "expert" for p in self.params)

    @cached_property
    def experts(self) -> int:
        """Number of its routed experts."""
        return next((p.shape[0] for p in self.params if p.role == "expert"), 0)

    @cached_property
    def trained_part(self) -> float:
        """The share of its parameters that are trained, tied ones included; 1 for a block without any."""
        total = sum(p.count for p in self.params)
        return sum(p.count for p in self.params if p.trainable) / total if total else 1.0

    @property
    def idle_backward(self) -> bool:
        """Whether it has nothing to do backward: it is frozen, and so is all below it."""
        return not self.hands_down and self.trained_part == 0


class Model(Spec, frozen=True, kw_only=True, dict=True):
    """A chain of blocks. `config` holds the figures it was built from, and is what the runtime builds modules from."""

    name: str
    family: str
    blocks: tuple[Block, ...]
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    max_seq_len: int = 0
    config: dict[str, Any] = {}
    tensor_limit: tuple[tuple[str, int], ...] = ()
    """Counts that a tensor degree must divide, such as `(("attention heads", 32), ("key/value heads", 8))`."""

    def tensor_limits(self, *, shared_experts: bool) -> tuple[tuple[str, int], ...]:
        """`tensor_limit`; where replicas share experts, each has some of them, which its tensor group may cut at will.
        """
        return tuple(limit for limit in self.tensor_limit if not (shared_experts and limit[0] == "experts"))

    @cached_property
    def count(self) -> int:
        """Parameters, tied ones once."""
        return sum(b.count for b in self.blocks)

    @cached_property
    def idle_blocks(self) -> int:
        """Blocks at the bottom with nothing to do backward: no gradient is needed at or below the last of them."""
        return next((i for i, block in enumerate(self.blocks) if not block.idle_backward), len(self.blocks))

    def frozen(self, patterns: Sequence[str]) -> Model:
        """The model with the parameters frozen that some pattern matches: `embed/*`, `layers.[0-3]/*`, `*/norm?.*`.

        Patterns (of `fnmatch`) are for `block.name/param.name`; a tied tensor goes by its owner's name. InputError for
        one that matches nothing, and if nothing is left to train.
        """
        keys = {f"{b.name}/{p.name}" for b in self.blocks for p in b.params if not p.tied}
        frozen = {key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns)}
        for pattern in patterns:
            if not any(fnmatchcase(key, pattern) for key in keys):
                raise InputError(f"frozen: {pattern!r} matches no parameter; they are named as in "
                                 f"{', '.join(sorted(keys)[:3])}")
        if frozen == keys:
            raise InputError("frozen: every parameter is, so there is nothing to train")
        blocks: list[Block] = []
        trained_below = False
        for block in self.blocks:
            params = tuple(p.replace(trainable=(p.tied or f"{block.name}/{p.name}") not in frozen)
                           for p in block.params)
            flags = "".join("01"[p.trainable] for p in params)
            hands_down = trained_below or (not blocks and "0" not in flags)
            # What follows # tells blocks apart that are of one kind but for what is trained.
            suffix = "" if hands_down and "0" not in flags else f"#{flags}{'01'[hands_down]}"
            blocks.append(block.replace(params=params, hands_down=hands_down,
                                        kind=block.kind.partition("#")[0] + suffix))
            trained_below |= "1" in flags
        return self.replace(blocks=tuple(blocks))
