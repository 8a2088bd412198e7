"""What to train: the model, the batch, the numbers it is computed in, the optimizer and the data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mixfleet.errors import InputError
from mixfleet.files import FORMAT_KEY, VERSIONS, decode, read_spec, write_yaml
from mixfleet.model.spec import Model
from mixfleet.spec import Spec

PrecisionName = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]


class Precision(Spec, frozen=True, kw_only=True):
    """Bytes per element of everything that training keeps.

    Mixed precision holds weights in the compute type, accumulates gradients in `gradient_bytes`, and keeps fp32
    master weights beside the optimizer's moments.
    """

    name: PrecisionName
    compute_bytes: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int


PRECISIONS: dict[str, Precision] = {
    "fp64": Precision(name="fp64", compute_bytes=8, weight_bytes=8, gradient_bytes=8, master_bytes=0),
    "fp32": Precision(name="fp32", compute_bytes=4, weight_bytes=4, gradient_bytes=4, master_bytes=0),
    "tf32": Precision(name="tf32", compute_bytes=4, weight_bytes=4, gradient_bytes=4, master_bytes=0),
    "bf16": Precision(name="bf16", compute_bytes=2, weight_bytes=2, gradient_bytes=4, master_bytes=4),
    "fp16": Precision(name="fp16", compute_bytes=2, weight_bytes=2, gradient_bytes=4, master_bytes=4),
}


ProductsName = Literal["", "fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4"]


class Products(NamedTuple):
    """A type for the products of layers that is narrower than the job's (`cost.narrow`). Costs count passes over the
    elements of an operand in 16 bits, forward or backward."""

    rate: Literal["fp8", "fp4"]
    element_bytes: float
    """Its share of the scales included."""
    fused: float
    """What narrowing costs where the kernel that makes the operand can do it,"""
    apart: float
    """and where it takes kernels of its own."""
    measured: str
    """The type of the kernel model whose products tell how much faster this one multiplies."""

    @property
    def column(self) -> float:
        """The part of it that the copy along the columns takes, which only the gradient of a weight needs."""
        return self.element_bytes / 2


PRODUCTS: dict[str, Products] = {
    "fp8": Products("fp8", 1.0, 0.0, 2.0, "fp8"),
    "fp8-current": Products("fp8", 1.0, 2.0, 3.0, "fp8"),
    "fp8-block": Products("fp8", 1.03125, 2.0, 2.03125, "fp8_block"),
    "mxfp8": Products("fp8", 1.03125, 2.0, 2.03125, "fp8"),
    "nvfp4": Products("fp4", 0.5625, 2.5625, 2.5625, "nvfp4"),
}
"""One scale per tensor from the largest values of earlier steps (Micikevicius et al., 2022): a read and two narrow
copies, or none where the norm or activation before writes those; from the largest value of the tensor itself, which
takes a read before; one per 128 elements (DeepSeek-V3); one of 8 bits per 32 (OCP MX); one per 16 and one per tensor,
with a read for the largest value (NVIDIA, 2025)."""


class ParamGroup(Spec, frozen=True, kw_only=True):
    """Parameters that are updated otherwise than the rest: those whose `block.name/param.name` the pattern matches."""

    match: str
    """A pattern of `fnmatch`: `head/*`, `layers.[0-3]/*`, `*.bias`."""
    lr_scale: float = 1.0
    """Times the learning rate of the step."""
    weight_decay: float | None = None
    """None: the optimizer's, for tensors of two or more dimensions."""

    def __post_init__(self) -> None:
        for field in ("lr_scale", "weight_decay"):
            if (getattr(self, field) or 0) < 0:
                raise InputError(f"optimizer.groups: {field} of {self.match!r} is {getattr(self, field)}; it cannot be "
                                 "negative")


class Optimizer(Spec, frozen=True, kw_only=True):
    """AdamW (Loshchilov and Hutter, 2019) or SGD with momentum, as PyTorch defines them.

    Weight decay touches tensors of two or more dimensions only, so norms and biases do not decay, unless a group of
    `groups` says otherwise; the first one that matches a parameter holds.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: int = 0
    """Step at which the decay ends; 0 is the job's `steps`."""
    min_lr: float = 0.0
    groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise InputError(f"optimizer.lr is {self.lr}; it must be positive")
        for field in ("eps", "weight_decay", "momentum", "warmup_steps", "decay_steps", "min_lr"):
            if getattr(self, field) < 0:
                raise InputError(f"optimizer.{field} is {getattr(self, field)}; it cannot be negative")

    def rates(self, key: str, dimensions: int) -> tuple[float, float]:
        """Factor on the learning rate, and weight decay, of parameter `block.name/param.name`."""
        decay = self.weight_decay if dimensions > 1 else 0.0
        group = next((g for g in self.groups if fnmatchcase(key, g.match)), None)
        if group is None:
            return 1.0, decay
        return group.lr_scale, decay if group.weight_decay is None else group.weight_decay

    @property
    def moments(self) -> int:
        """Tensors of state per parameter, besides master weights."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)


class Lengths(Spec, frozen=True, kw_only=True):
    """How long samples are, in tokens: drawn per sample, or one number per sample in a file."""

    kind: Literal["lognormal", "uniform", "file"]
    median: int = 0
    """Of `lognormal`, before what lies outside [least, most] is moved to the nearer end."""
    sigma: float = 1.0
    """Of `lognormal`: standard deviation of the logarithm."""
    least: int = 1
    most: int = 0
    """0: the job's `seq_len`."""
    path: str = ""
    """Of `file`: a text file with one length per line, or an .npy array of integers."""

    def __post_init__(self) -> None:
        if self.kind == "file" and not self.path:
            raise InputError("data.lengths.path is empty; kind 'file' needs a file with one length per line")
        if self.kind == "lognormal" and self.median < 1:
            raise InputError(f"data.lengths.median is {self.median}; kind 'lognormal' needs one of at least 1")
        if self.sigma < 0:
            raise InputError(f"data.lengths.sigma is {self.sigma}; it cannot be negative")
        if self.least < 1 or self.most < 0:
            raise InputError(f"data.lengths is from {self.least} to {self.most}; a sample has at least 1 token")


class Data(Spec, frozen=True, kw_only=True):
    """Where samples come from. A sample is `seq_len + 1` consecutive tokens, or one more than `lengths` says; the order
    belongs to the job."""

    kind: Literal["synthetic", "text", "tokens"] = "synthetic"
    path: str = ""
    """A text file or directory (byte-level tokens), or a `.bin` file of uint16 tokens."""
    lengths: Lengths | None = None
    """None: all samples have `seq_len` tokens."""

    def __post_init__(self) -> None:
        if self.kind != "synthetic" and not self.path:
            raise InputError(f"data.path is empty; kind {self.kind!r} needs a file or directory")


class Job(Spec, frozen=True, kw_only=True, dict=True):
    """One training job. `global_batch` counts sequences per optimizer step."""

    name: str
    model: Model
    seq_len: int
    global_batch: int
    precision: PrecisionName = "bf16"
    gradient_precision: Literal["", "fp32", "bf16", "fp16"] = ""
    """Type in which gradients are accumulated and reduced; empty is the default of the precision."""
    products: ProductsName = ""
    """Type of the layers' products, where narrower than a 16-bit `precision`: what is predicted and planned; training
    does not run it yet."""
    optimizer: Optimizer = Optimizer()
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained (`Model.frozen`): `embed/*`, `layers.[0-3]/*`."""
    clip_norm: float = 0.0
    """Largest norm of the whole gradient; 0 does not clip."""
    attention: Literal["auto", "fused", "eager"] = "auto"
    """`auto` is fused (no s*s scores kept) where the device has a fused kernel."""
    steps: int = 100
    seed: int = 0
    data: Data = Data()
    objective: Literal["time", "cost"] = "time"

    def __post_init__(self) -> None:
        for field in ("seq_len", "global_batch", "steps"):
            if getattr(self, field) <= 0:
                raise InputError(f"{field} is {getattr(self, field)}; it must be positive")
        if self.frozen or not all(p.trainable for b in self.model.blocks for p in b.params):
            msgspec.structs.force_setattr(self, "model", self.model.frozen(self.frozen))
        keys = [f"{b.name}/{p.name}" for b in self.model.blocks for p in b.params if not p.tied]
        for group in self.optimizer.groups if keys else ():
            if not any(fnmatchcase(key, group.match) for key in keys):
                raise InputError(f"optimizer.groups: {group.match!r} matches no parameter; they are named as in "
                                 f"{', '.join(keys[:3])}")
        if self.products and self.precision not in ("bf16", "fp16"):
            raise InputError(f"products is {self.products} with precision {self.precision}; narrow products need bf16 "
                             "or fp16 around them")
        if self.clip_norm < 0:
            raise InputError(f"clip_norm is {self.clip_norm}; it cannot be negative")
        if self.model.max_seq_len and self.seq_len > self.model.max_seq_len:
            raise InputError(f"seq_len is {self.seq_len}; {self.model.name} allows at most {self.model.max_seq_len}")

    @property
    def bytes(self) -> Precision:
        """Bytes per element, with `gradient_precision` applied."""
        base = PRECISIONS[self.precision]
        if not self.gradient_precision:
            return base
        return base.replace(gradient_bytes=4 if self.gradient_precision == "fp32" else 2)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @staticmethod
    def load(path: str | Path) -> Job:
        """From a job file; `model` is a well-known name, the path of a config.json relative to it, or a mapping."""
        from mixfleet.model.families import build, restored

        path = Path(path)
        doc = read_spec(path, "job")
        source = doc.data.get("model")
        if not isinstance(source, (str, dict)):
            raise InputError("give a well-known name, the path of a config.json, or a mapping of layers, hidden, ...",
                             where=doc.where(("model",)))
        if isinstance(source, str) and (path.parent / source).is_file():
            source = path.parent / source
        try:
            if isinstance(source, dict) and source.keys() == {"name", "family", "figures"}:
                doc.data["model"] = restored(**source)
            else:
                doc.data["model"] = build(source)
        except InputError as error:
            raise InputError(str(error), where=doc.where(("model",))) from None
        doc.data.setdefault("name", path.stem)
        job = decode(doc, Job)
        data, lengths = job.data, job.data.lengths
        if lengths and lengths.path and not Path(lengths.path).is_absolute():
            data = data.replace(lengths=lengths.replace(path=str(path.parent / lengths.path)))
        if data.path and not Path(data.path).is_absolute():
            data = data.replace(path=str(path.parent / data.path))
        return job if data == job.data else job.replace(data=data)

    def save(self, path: str | Path, header: str = "") -> None:
        """To a job file from which `load` makes an equal job."""
        path = Path(path)
        data = msgspec.to_builtins(self)
        data["model"] = _model_data(self.model, self.frozen)
        if self.data.path:
            data["data"]["path"] = os.path.relpath(self.data.path, path.parent)
        if self.data.lengths and self.data.lengths.path:
            data["data"]["lengths"]["path"] = os.path.relpath(self.data.lengths.path, path.parent)
        write_yaml(path, {FORMAT_KEY: f"job/{VERSIONS['job']}", **data}, header)


def _model_data(model: Model, frozen: Sequence[str]) -> str | dict[str, Any]:
    """What `Job.load` reads as an equal model: a well-known name, or all the figures."""
    from mixfleet.catalog.models import MODELS
    from mixfleet.model.families import build

    if model.name in MODELS and build(model.name).frozen(frozen) == model:
        return model.name
    return {"name": model.name, "family": model.family, "figures": model.config}
