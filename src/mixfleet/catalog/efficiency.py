"""What fraction of the roofline operators reach, and what a kernel launch costs.

The figures are fitted on public measurements (`benchmarks/fit_roofline.py` reproduces them; `docs/cost-model.md`
explains them) per architecture generation and operator kind. A `Device` may override them.
"""

from __future__ import annotations

from typing import NamedTuple

DEFAULT = "default"

EFFICIENCY: dict[str, dict[str, float]] = {
    DEFAULT: {"gemm": 0.70, "attention": 0.40, "norm": 0.50, "softmax": 0.55, "loss": 0.55, "elementwise": 0.75,
              "embedding": 0.30, "optimizer": 0.75},
    "Pascal": {"gemm": 0.48, "norm": 0.43, "elementwise": 0.71},
    "Turing": {"gemm": 0.40},
    "Ampere": {"gemm": 0.75, "attention": 0.47, "softmax": 0.63, "loss": 0.63, "elementwise": 0.81},
    "Ada": {"gemm": 0.57, "attention": 0.39, "norm": 0.78, "softmax": 0.79, "loss": 0.79, "elementwise": 0.78},
    "Hopper": {"gemm": 0.78, "attention": 0.43},
    "Blackwell": {"gemm": 0.74, "attention": 0.33},
    "CDNA": {"gemm": 0.62, "norm": 0.48, "softmax": 0.39, "loss": 0.39},
    "CDNA2": {"gemm": 0.61, "norm": 0.41, "softmax": 0.29, "loss": 0.29},
    "P100-PCIe-16GB": {"gemm": 0.64},
    "P100-SXM2-16GB": {"gemm": 0.64},
    "RTX3090": {"gemm": 0.89},
    "RTX4090": {"gemm": 0.96},
    "cpu": {"gemm": 0.85, "attention": 0.50, "norm": 0.50, "softmax": 0.50, "loss": 0.50, "elementwise": 0.80,
            "embedding": 0.30, "optimizer": 0.50},
}
"""Device name or generation (first word of `Device.arch`) to operator kind to fraction of the roofline. Entries of
single devices are given where they reach clearly more or less; RTX cards and embeddings rest on one source."""

SUSTAINED: dict[str, float] = {"gpu": 0.88, "cpu": 1.0}
"""What whole training steps reach of the rates of kernels measured alone: clocks under load, the casts, biases and
dropout that eager frameworks run besides the operators we count. Chosen with `benchmarks/accuracy.py --scan`."""
SUSTAINED_VECTOR = 1.0
"""The same of products in fp32 that vector units make: there is nothing to cast, and those units multiply at a
sixteenth of the tensor units' rate, so that a GPU holds its clock. Chosen
by neusight, dle and lambda alike; sailor's mixed runs, bound by their network, are a little worse by it."""

KNEE_W, THROTTLE = 1.0, 0.3
"""Watts per TFLOP/s of dense peak below which a GPU cannot hold its clocks while it multiplies for minutes, and the
power of what it lacks by which it slows down: power grows a little faster than with the cube of the clock near the
boost clock. A100 has 1.3, H100 0.71, its 500 W part 0.51, B200 0.44. Kernels timed alone are too short to show it."""

LAUNCH_S: dict[str, float] = {"gpu": 75e-6, "cpu": 20e-6}
"""Seconds of the host per counted kernel, chosen with `SUSTAINED`; eager frameworks issue several kernels for each."""

GAP_S = 2e-6
"""Seconds between the kernels of a GPU whose host is ahead."""

FUSED_ATTENTION = ("Ampere", "Ada", "Hopper", "Blackwell", "CDNA2", "CDNA3", "CDNA4", "cpu")
"""Generations for which PyTorch ships a flash attention kernel."""


class Protocol(NamedTuple):
    """How collectives move pieces."""

    call: float
    """What a call costs besides bytes and hops, as a part of `COLLECTIVE_S`."""
    latency: float
    """Latency of a hop as a part of the link's."""
    wire: float
    """Bytes on the wire per byte of payload."""
    across: float = 1.0
    """As `latency`, of a hop between nodes."""


LINK_EFFICIENCY: tuple[tuple[str, float], ...] = (
    ("nvlink", 0.77), ("xgmi", 0.75), ("pcie", 0.75), ("efa", 0.77), ("slingshot", 0.88), ("ethernet", 0.85),
    ("nic", 0.88), ("infiniband", 0.88), ("roce", 0.88),
)
"""Part of the nominal rate that transfers reach, by a word of the link's name; 1 for links named otherwise, whose
bandwidth counts as measured."""

PROTOCOLS: dict[str, Protocol] = {
    "simple": Protocol(1.0, 1.0, 1.0),
    "ll128": Protocol(0.58, 1.0, 128 / 120),
    "ll": Protocol(0.32, 0.25, 2.2),
}
"""NCCL's ways to move a piece (Hu et al., 2025): whole buffers behind a fence; lines of 128 bytes of which 8 are a
flag, on NVLink only; words of 8 bytes of which 4 are a flag. Chosen with `COLLECTIVE_S`, `NETWORK_PROTOCOLS`,
`NVLS_RATE` and `OWN_PART` on measured collectives (docs/accuracy.md), from NCCL's own table of latencies."""
NETWORK_PROTOCOLS: dict[str, Protocol] = {
    "simple": Protocol(1.0, 1.0, 1.0, 5.0),
    "filling": Protocol(0.58, 1.0, 2.0, 2.75),
    "ll": Protocol(0.32, 0.32, 12.0, 1.1),
}
"""The same where hops go through a network. A network carries its whole rate only once many pieces are under way, for
which a message must be long: the line of `simple` begins at several latencies of the hops between nodes, and `filling`
is the one that it touches halfway. So the rate grows smoothly, and the time never falls, with the bytes."""

NVLS_RATE = 0.82
"""Rate of a switch that reduces, as a part of what transfers over the same links reach."""
OWN_PART = 0.36
"""What a rank's own 1/n of a buffer costs in a ring over NVLink: its copy is made by the kernel that also sends."""
STAGED_BPS, STAGED_FAR_BPS, STAGED_NEAR = 21e9, 12e9, 4
"""Bytes per second through the memory of a host whose PCIe cards cannot reach each other: of as many cards as one
socket has, and of more, which pass the link between sockets. From calls of 2, 4 and 8 L40S, and of 2 RTX 6000 Ada."""
STAGED = ("RTX", "TitanRTX", "L4", "L40", "A10G", "T4")
"""Cards, by the start of their names, for which drivers or clouds do not offer peer access over PCIe,"""
STAGED_PAIRS = ("RTX", "TitanRTX")
"""and those that do not reach each other even as a pair of one machine."""

HOST_STEP_BPS = 120e9
"""Bytes per second of an optimizer step in the memory of a host with two sockets: what ZeRO-Offload's CPU Adam reaches
(arXiv 2101.06840, recalled: 0.22 s for 1e9 parameters of 28 bytes). Not measured here."""

COLLECTIVE_S: dict[str, float] = {"gpu": 25e-6, "cpu": 100e-6}
"""Seconds of a collective call that depend neither on bytes nor on ranks."""

SEND_S: dict[str, float] = {"gpu": 6e-6, "cpu": 50e-6}
"""Seconds of a message besides its bytes and the latency of its way."""

MESSAGE_CPU_S, BYTE_CPU_S, SUM_CPU_S = 50e-6, 0.6e-9, 0.2e-9
"""What communication takes of a CPU rank's own core: seconds per message sent or received, per byte sent or received
and per byte added up. Measured with gloo over loopback and veth pairs (`calibrate.links`, 2 GHz Xeon)."""

TURN_S = 8e-3
"""Seconds for which a message waits, per other process on the same core, until the scheduler gives the receiver its
turn: from traces of two tensor-parallel ranks on one core (Linux 6, EEVDF), 40 collectives a step."""
