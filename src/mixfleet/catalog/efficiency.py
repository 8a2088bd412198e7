"""What fraction of the roofline operators reach, and what a kernel launch costs.

The figures are fitted on public measurements (`benchmarks/fit_roofline.py` reproduces them; `docs/cost-model.md`
explains them) per architecture generation and operator kind. A `Device` may override them.
"""

from __future__ import annotations

DEFAULT = "default"

EFFICIENCY: dict[str, dict[str, float]] = {
    DEFAULT: {"gemm": 0.75, "attention": 0.45, "norm": 0.50, "softmax": 0.50, "loss": 0.50, "elementwise": 0.80,
              "embedding": 0.30, "optimizer": 0.80},
    "Volta": {"gemm": 0.70},
    "Ampere": {"gemm": 0.77, "attention": 0.55},
    "Ada": {"gemm": 0.75, "attention": 0.45},
    "Hopper": {"gemm": 0.75, "attention": 0.50},
    "Blackwell": {"gemm": 0.68, "attention": 0.45},
    "cpu": {"gemm": 0.70, "attention": 0.30},
}
"""Device name or generation (first word of `Device.arch`) to operator kind to fraction of the roofline."""

LAUNCH_S: dict[str, float] = {"gpu": 5e-6, "cpu": 20e-6}
"""Seconds per kernel that do not shrink with the work: launch, ramp-up and tail."""

FUSED_ATTENTION = ("Ampere", "Ada", "Hopper", "Blackwell", "CDNA2", "CDNA3", "CDNA4", "cpu")
"""Generations for which PyTorch ships a flash attention kernel."""

LINK_EFFICIENCY: tuple[tuple[str, float], ...] = (
    ("nvlink", 0.80), ("xgmi", 0.75), ("infinity fabric", 0.75), ("pcie", 0.75), ("infiniband", 0.90), ("roce", 0.85),
    ("efa", 0.70), ("slingshot", 0.85), ("ethernet", 0.85), ("wan", 0.85),
)
"""Part of the nominal rate that collectives reach, by a word of the link's name; 1 for links named otherwise."""

COLLECTIVE_S: dict[str, float] = {"gpu": 10e-6, "cpu": 100e-6}
"""Seconds of a collective call that depend neither on bytes nor on ranks."""

SEND_S: dict[str, float] = {"gpu": 8e-6, "cpu": 50e-6}
"""Seconds of a message besides its bytes and the latency of its way."""
