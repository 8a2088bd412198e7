"""Decoder blocks in torch, with tensor and sequence parallelism, built from a `Model`.

Block 0 maps tokens [b, s] to x; a layer maps x to x; the last block maps (x, targets [b, s]) to the sum of the token
losses. x is [b, s/t, hidden]: sharded along the sequence in the tensor-parallel group. Under context parallelism s
counts the positions of this rank's part of the sequence; only attention looks beyond them. The parameters of a block
are exactly those that its specification lists, each cut to this rank's slice. A parameter that is not cut sees only
this rank's tokens or heads: the sum of its gradients over the group is its gradient. Where `segments` are set, the one
row holds several samples of these lengths, which attend to themselves and count their positions from 0. There is no
dropout.
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from mixfleet.errors import InputError
from mixfleet.model.spec import Model, Param
from mixfleet.model.transformer import TransformerConfig
from mixfleet.plan import Recompute
from mixfleet.run.linear import linear
from mixfleet.run.tensor import (
    ALONE,
    ContextGroup,
    TensorGroup,
    cross_entropy,
    gather_keys,
    gather_sequence,
    scatter_sequence,
    swap_rows,
    wide,
)

FAMILIES = ("decoder", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "opt", "qwen2", "qwen3", "qwen3_moe")
"""Families that can be trained; every other one can be predicted and planned."""

_FIGURES = frozenset(("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len"))
_SUPPORTED = frozenset(("norm", "norm_eps", "activation", "position", "rope_theta", "tied", "attention_bias",
                        "output_bias", "mlp_bias", "qk_norm", "window", "full_attention_layers", "parallel",
                        "rotary_fraction", "position_offset", "experts"))
_BRANCH_ENDS = ("attention.o.weight", "mlp.down.weight", "mlp.experts.down.weight", "mlp.shared.down.weight")
_INIT_STD = 0.02
_CHUNK = 2**18
"""Elements of initial values that are drawn at a time, each chunk from its own counter."""


def build_blocks(model: Model, indices: Iterable[int], group: TensorGroup = ALONE, *, seed: int = 0,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
                 attention: Literal["fused", "eager"] = "fused",
                 recompute: Recompute | Mapping[int, Recompute] = "none",
                 initialize: bool = True) -> list[nn.Module]:
    """The blocks `indices` of a model, cut for one rank of a tensor-parallel group.

    `recompute`, for all blocks or by index: `selective` keeps no attention scores; `full` is the caller's to do around
    a block's call.
    `initialize=False` leaves the parameters unset, for a caller that fills them from a checkpoint.
    Raises InputError for a model that cannot be trained, and for a group that does not divide the heads.
    """
    config = trainable_config(model)
    for what, count in model.tensor_limits(shared_experts=group.experts is not None):
        if count % group.size:
            raise InputError(f"tensor is {group.size}; it must divide the {count} {what} of {model.name}")
    last = len(model.blocks) - 1
    built: list[nn.Module] = []
    for i in indices:
        figures = config.replace(window=0) if i - 1 in config.full_attention_layers else config
        kind = Embedding if i == 0 else Head if i == last else Layer
        mode = recompute if isinstance(recompute, str) else recompute[i]
        block = kind(figures, group, attention, selective=mode == "selective")
        for param in model.blocks[i].params:
            value = torch.empty(_slice_shape(param, group), dtype=dtype, device=device)
            if initialize:
                value.copy_(_initial_slice(model, seed, param.tied or f"{model.blocks[i].name}/{param.name}", group))
            _attach(block, param.name, nn.Parameter(value, requires_grad=param.trainable))
        built.append(block)
    return built


def trainable_config(model: Model) -> TransformerConfig:
    """The model's figures; InputError if the runtime has no modules for them."""
    works = "predict and plan work for it, train does not yet"
    if model.family not in FAMILIES:
        raise InputError(f"{model.name} is of family {model.family!r}: {works}. Trainable: {', '.join(FAMILIES)}.")
    config = msgspec.convert(model.config, TransformerConfig)
    plain = TransformerConfig(**{field: getattr(config, field) for field in _FIGURES | _SUPPORTED})
    extra = [field for field in config.__struct_fields__ if getattr(config, field) != getattr(plain, field)]
    if extra:
        raise InputError(f"{model.name} sets {', '.join(extra)}: {works}")
    return config


def initial_values(model: Model, seed: int, key: str, lo: int, hi: int) -> Tensor:
    """Elements [lo, hi) of the first value of tensor `key` (`block.name/param.name`), fp32, split dimension first.

    They depend on the seed and the key only, not on rank or plan: normal with standard deviation 0.02, divided by
    sqrt(2 * layers) in the projections that end a residual branch (Radford et al., 2019); norms 1, biases 0.
    """
    name, param = key.partition("/")[2], _param(model, key)
    if name.endswith(".bias"):
        return torch.zeros(hi - lo)
    if param.role == "norm":
        return torch.ones(hi - lo)
    std = _INIT_STD / (2 * model.layers) ** 0.5 if name in _BRANCH_ENDS else _INIT_STD
    philox = int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=16).digest(), "little")
    values = np.empty(hi - lo, np.float32)
    for chunk in range(lo // _CHUNK, -(-hi // _CHUNK)):
        start = chunk * _CHUNK
        first, end = max(lo, start), min(hi, start + _CHUNK)
        draw = np.random.Generator(np.random.Philox(key=philox, counter=[0, 0, chunk, 0]))
        drawn = draw.standard_normal(min(_CHUNK, param.count - start), np.float32)
        values[first - lo:end - lo] = drawn[first - start:end - start] * np.float32(std)
    return torch.from_numpy(values)


def _param(model: Model, key: str) -> Param:
    block, _, name = key.partition("/")
    return next(p for b in model.blocks if b.name == block for p in b.params if p.name == name)


def _part(param: Param, group: TensorGroup) -> slice:
    """What a rank has of a parameter's cut dimension."""
    count = param.shape[param.split or 0]
    if param.role == "expert" and group.experts:
        return group.experts.experts_of(count)[group.experts.rank]
    return group.slice_of(count)


def _slice_shape(param: Param, group: TensorGroup) -> tuple[int, ...]:
    cut = _part(param, group)
    return tuple(cut.stop - cut.start if d == param.split else n for d, n in enumerate(param.shape))


def _initial_slice(model: Model, seed: int, key: str, group: TensorGroup) -> Tensor:
    param = _param(model, key)
    if param.split is None:
        return initial_values(model, seed, key, 0, param.count).view(param.shape)
    cut, row = _part(param, group), param.count // param.shape[param.split]
    rest = [n for d, n in enumerate(param.shape) if d != param.split]
    return initial_values(model, seed, key, cut.start * row, cut.stop * row).view(-1, *rest).movedim(0, param.split)


def _attach(module: nn.Module, name: str, value: nn.Parameter) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, value)


class _Block(nn.Module):
    """Computes from the parameters that were attached under the names of the specification."""

    calls_linear = True
    """Its linear layers are `linear.linear`."""

    def __init__(self, config: TransformerConfig, group: TensorGroup, attention: str, *, selective: bool) -> None:
        super().__init__()
        self.config, self.group, self.fused, self.selective = config, group, attention == "fused", selective
        self.context = group.context
        self.routed: Tensor | None = None
        """Rows that went to each expert so far."""
        self.segments: tuple[int, ...] = ()

    def counted(self, table: Tensor) -> Tensor:
        """Rows of a table of positions, for those of the packed samples one after another."""
        return torch.cat([table[:n] for n in self.segments])

    def params(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def normalize(self, x: Tensor, name: str, params: dict[str, Tensor]) -> Tensor:
        weight, eps = params[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "layernorm":
            return F.layer_norm(x, weight.shape, weight, params[f"{name}.bias"], eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def project(self, x: Tensor, name: str, params: dict[str, Tensor]) -> Tensor:
        """Column-cut: the outputs of this rank. [b, s, h] -> [b, s, n/t]."""
        return linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    def gathered(self, x: Tensor, norm: str, params: dict[str, Tensor]) -> Tensor:
        """Normalized, whole sequence: [b, s/t, h] -> [b, s, h]."""
        return gather_sequence(self.normalize(x, norm, params), self.group)

    def merge(self, part: Tensor, params: dict[str, Tensor], *projections: str) -> Tensor:
        """The sum over ranks and the biases of the row-cut projections that gave it: [b, s, h] -> [b, s/t, h]."""
        x = scatter_sequence(part, self.group)
        for bias in (params.get(f"{name}.bias") for name in projections):
            x = x if bias is None else x + bias
        return x


class Embedding(_Block):
    """Tokens [b, s] -> x [b, s/t, h]; each rank holds a slice of the vocabulary."""

    def forward(self, tokens: Tensor) -> Tensor:
        params, sequence = self.params(), tokens.shape[1]
        if sequence % self.group.size:
            raise InputError(f"seq_len is {sequence}; tensor degree {self.group.size} must divide it")
        weight = params["tokens.weight"]
        if self.group.size == 1:
            x = F.embedding(tokens, weight)
        else:
            local = tokens - self.group.slice_of(self.config.vocab).start
            mine = (local >= 0) & (local < weight.shape[0])
            x = F.embedding(torch.where(mine, local, 0), weight).masked_fill(~mine.unsqueeze(-1), 0)
            x = scatter_sequence(x, self.group)
        if self.config.position == "learned":
            table = params["positions.weight"][self.config.position_offset:]
            if self.segments:
                table = self.counted(table)
            if self.context:
                table = self.context.own(table, 0)
            x = x + table[self.group.slice_of(sequence)]
        return x


class Layer(_Block):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)); or both of the same x, summed."""

    def forward(self, x: Tensor) -> Tensor:
        params = self.params()
        attended = self.attend(self.gathered(x, "norm1", params), params)
        if self.config.parallel:
            both = attended + self.feed_forward(self.gathered(x, "norm2", params), params)
            return x + self.merge(both, params, "attention.o", "mlp.down")
        x = x + self.merge(attended, params, "attention.o")
        if "mlp.router.weight" in params:
            return x + self.route(self.normalize(x, "norm2", params), params)
        return x + self.merge(self.feed_forward(self.gathered(x, "norm2", params), params), params, "mlp.down")

    def attend(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        """[b, s, h] -> this rank's part of the output projection's sum, [b, s, h]."""
        head, eps = self.config.head_dim, self.config.norm_eps
        q, k, v = (self.project(x, f"attention.{name}", params).view(*x.shape[:2], -1, head) for name in "qkv")
        if self.config.qk_norm:
            q = F.rms_norm(q, (head,), params["attention.q_norm.weight"], eps)
            k = F.rms_norm(k, (head,), params["attention.k_norm.weight"], eps)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.config.position == "rotary":
            rotated = int(head * self.config.rotary_fraction)
            whole = max(self.segments) if self.segments else sum(self.context.lengths) if self.context else x.shape[1]
            angles = _rotation(whole, rotated, self.config.rope_theta, x.dtype, x.device)
            if self.segments:
                angles = self.counted(angles[0]), self.counted(angles[1])
            if self.context:
                angles = self.context.own(angles[0], 0), self.context.own(angles[1], 0)
            q, k = _rotate(q, *angles), _rotate(k, *angles)
        core = partial(self.shared_core, self.context, self.segments) if self.context else \
            partial(self.packed_core, self.segments) if self.segments else self.core
        mixed: Tensor | tuple[Tensor, ...]
        if self.selective:
            mixed = checkpoint(core, q, k, v, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = core(q, k, v)
        parts = [linear(part.transpose(1, 2).flatten(2), params["attention.o.weight"])
                 for part in (mixed if isinstance(mixed, tuple) else (mixed,))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, [b, heads/t, s, head_dim] for q and [b, kv_heads/t, s, head_dim] for k and v."""
        sequence, window = q.shape[2], self.config.window
        masked = 0 < window < sequence
        if self.fused:
            mask = _causal(sequence, window, q.device) if masked else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked,
                                                  enable_gqa=q.shape[1] != k.shape[1])
        return self._eager(q, k, v, _causal(sequence, window if masked else 0, q.device))

    def shared_core(self, context: ContextGroup, segments: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
                    ) -> tuple[Tensor, ...]:
        """The same where queries, keys and values are those of this rank's part of the sequence, or of each segment.

        Queries of one span see all keys of its segment up to its end, so each span is a causal attention of its own.
        """
        k, v = gather_keys(k, v, context)
        sequence, window = k.shape[2], self.config.window
        window = window if window < sequence else 0
        if not self.fused and not segments:
            return (self._eager(q, k, v, context.own(_causal(sequence, window, q.device), 0)),)
        starts, masks, parts = list(accumulate(segments, initial=0)), _masks(context) if segments else None, []
        for part, (lo, hi) in zip(torch.split(q, [hi - lo for lo, hi in context.mine], 2), context.mine):
            start = starts[bisect(starts, lo) - 1]
            keys, values = k[:, :, start:hi], v[:, :, start:hi]
            parts.append(self._span(part, keys, values, window, masks))
        return (torch.cat(parts, 2),) if segments else tuple(parts)

    def _span(self, q: Tensor, k: Tensor, v: Tensor, window: int, masks: dict[object, Tensor] | None) -> Tensor:
        """Causal attention of the last queries of so many keys. Masks are remembered in `masks`, if it is there."""
        hi = k.shape[2]
        lo = hi - q.shape[2]
        window = window if window < hi else 0
        kind, device = (q.dtype if self.fused else torch.bool), q.device

        def mask() -> Tensor:
            if masks is None:
                return _bias(lo, hi, window, kind, device)
            key = (lo, hi, window, kind)
            if key not in masks:
                masks[key] = _made_bias(lo, hi, window, kind, device)
            return masks[key]

        if not self.fused:
            return self._eager(q, k, v, mask())
        return F.scaled_dot_product_attention(
            q, k, v, enable_gqa=q.shape[1] != k.shape[1],
            attn_mask=causal_lower_right(hi - lo, hi) if q.is_cuda and not window else mask())  # which a kernel knows

    def packed_core(self, segments: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same where one row holds several samples: a causal attention for each, so that none sees another."""
        parts = zip(*(torch.split(x, list(segments), 2) for x in (q, k, v)))
        return torch.cat([self.core(*part) for part in parts], 2)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """With scores in full; `visible` [queries, keys] is true where a query may see a key."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        weights: Tensor = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return weights @ v

    def feed_forward(self, x: Tensor, params: dict[str, Tensor], name: str = "mlp") -> Tensor:
        """[b, s, h] -> this rank's part of the down projection's sum, [b, s, h]."""
        activation, up = _ACTIVATIONS[self.config.activation], self.project(x, f"{name}.up", params)
        inner = activation(self.project(x, f"{name}.gate", params)) * up if self.config.gated else activation(up)
        return linear(inner, params[f"{name}.down.weight"])

    def route(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Every token through its experts, all of them, and through the shared MLP: [b, s/t, h] -> [b, s/t, h].

        Rows go to the ranks that hold their experts, and come back. No expert turns any away.
        """
        experts, group = self.config.experts, self.group.experts or self.group
        assert experts is not None
        rows = x.flatten(0, 1)
        probability, chosen = linear(rows, params["mlp.router.weight"]).softmax(-1, dtype=wide(x.dtype)).topk(
            experts.per_token, -1)
        if experts.normalized:
            probability = probability / probability.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts.count)
        self.routed = counts if self.routed is None else self.routed + counts
        held = [part.stop - part.start for part in group.experts_of(experts.count)]
        mine = held[group.rank]
        here = group.all_to_all(counts, held, [mine] * group.size) if group.size > 1 else counts
        here = here.view(group.size, mine).cpu()
        sent, received = [int(part.sum()) for part in torch.split(counts.cpu(), held)], here.sum(1).tolist()
        back = swap_rows(self.experts(swap_rows(rows[order // experts.per_token], sent, received, group),
                                      here, params), received, sent, group)
        mixed = back[order.argsort()].view(len(rows), experts.per_token, -1) * probability.to(x.dtype).unsqueeze(-1)
        out = mixed.sum(1).view_as(x)
        if experts.shared_ffn:
            shared = self.feed_forward(gather_sequence(x, self.group), params, "mlp.shared")
            out = out + self.merge(shared, params, "mlp.shared.down")
        return out

    def experts(self, rows: Tensor, counts: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Rows [n, h] through the experts that this rank has; `counts` [ranks, experts here] says how they lie."""
        activation = _ACTIVATIONS[self.config.activation]
        number, ways = counts.shape[1], ("gate", "up", "down")
        if not number:  # no rows either; those who have some wait for what backward sends, if experts are trained
            return rows + sum(params[f"mlp.experts.{which}.weight"].sum() for which in ways)
        pieces = torch.split(rows, counts.flatten().tolist())
        weights = zip(*(params[f"mlp.experts.{which}.weight"].unbind(0) for which in ways))
        done: list[tuple[Tensor, ...]] = []
        for e, (gate, up, down) in enumerate(weights):
            mine = pieces[e::number]
            one = torch.cat(mine) if len(mine) > 1 else mine[0]
            one = linear(activation(linear(one, gate)) * linear(one, up), down)
            done.append(torch.split(one, [len(piece) for piece in mine]))
        return torch.cat([by_source[i] for i in range(len(counts)) for by_source in done])


class Head(_Block):
    """Final norm, logits of this rank's slice of the vocabulary, and the loss."""

    def logits(self, x: Tensor) -> Tensor:
        """x [b, s/t, h] -> [b, s, vocab/t]."""
        params = self.params()
        return self.project(self.gathered(x, "norm", params), "lm", params)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.logits(x), targets, self.config.vocab, self.group)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _gelu_tanh,
                                                       "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu}


TABLES: set[int] = set()
"""Storages that layers and micro-batches share: these tables, while a cache below has them. Then something else may get
their address."""


def _table(t: Tensor) -> Tensor:
    storage = t.untyped_storage()._cdata
    TABLES.add(storage)
    weakref.finalize(t, TABLES.discard, storage)
    return t


@lru_cache(maxsize=8)
def _rotation(sequence: int, head: int, theta: float, dtype: torch.dtype, device: torch.device
              ) -> tuple[Tensor, Tensor]:
    """Cosine and sine [s, head_dim] of rotary positions (Su et al., 2021), each half of a head the same."""
    frequency = theta ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angle = torch.outer(torch.arange(sequence, dtype=torch.float64), frequency).repeat(1, 2)
    return _table(angle.cos().to(device, dtype)), _table(angle.sin().to(device, dtype))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions of each head, as many as `cos` has."""
    turned, rest = x[..., :cos.shape[-1]], x[..., cos.shape[-1]:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


@lru_cache(maxsize=8)
def _causal(sequence: int, window: int, device: torch.device) -> Tensor:
    """True where a query [rows] may see a key [columns]: not later, and nearer than `window` (0 is any distance)."""
    distance = torch.arange(sequence, device=device).unsqueeze(1) - torch.arange(sequence, device=device)
    return _table((distance >= 0) & (distance < window) if window else distance >= 0)


def _made_bias(lo: int, hi: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same for queries [lo, hi) and all keys before `hi`, as what to add to scores, or as truth values."""
    distance = torch.arange(lo, hi, device=device).unsqueeze(1) - torch.arange(hi, device=device)
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    if dtype == torch.bool:
        return _table(~hidden)
    return _table(torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf")))


_bias = lru_cache(maxsize=8)(_made_bias)
"""One for all layers."""


@lru_cache(maxsize=1)
def _masks(context: ContextGroup) -> dict[object, Tensor]:
    """The masks of a micro-batch whose spans are too many for the cache above. Layers of one stage follow each other,
    so one micro-batch at a time suffices."""
    return {}
