"""Constants, and the only place where quantities are parsed and printed.

Inside the package every number is in seconds, bytes, bytes per second, FLOP or FLOP per second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal

from mixfleet.errors import InputError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
NS_PER_S = 10**9

_PREFIX = {"": 1, "K": KB, "k": KB, "M": MB, "G": GB, "T": TB, "P": 10**15,
           "Ki": KiB, "Mi": MiB, "Gi": GiB, "Ti": TiB}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")
_BYTES = re.compile(r"(Ki|Mi|Gi|Ti|[KkMGTP])?(B|b|bit|bits)?$")
_FLOPS = re.compile(r"([KkMGTP])?FLOP(?:/s|S|s)?$")
_SECONDS = {"": "1", "s": "1", "ms": "1e-3", "us": "1e-6", "µs": "1e-6", "ns": "1e-9", "min": "60", "h": "3600"}


def _split(value: str | int | float, what: str) -> tuple[float, str]:
    if isinstance(value, bool):
        raise InputError(f"{what} is {value}; it must be a quantity")
    if isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise InputError(f"{what} is {value}; it must be a finite number")
        return float(value), ""
    match = _NUMBER.match(value)
    if not match:
        raise InputError(f"{what} is {value!r}; it must start with a number, as in '25 Gb/s'")
    return float(match[1].replace("_", "")), match[2]


def _times(number: float, factor: int | str) -> float:
    """The float nearest to the decimal product, so that `20.71 ms` is 0.02071 to the last bit."""
    return float(Decimal(repr(number)) * Decimal(factor))


def parse_bytes(value: str | int | float, what: str = "size") -> int:
    """`80 GB`, `24 GiB`, or plain bytes."""
    number, unit = _split(value, what)
    match = _BYTES.match(unit)
    if not match or (match[2] or "B") != "B":
        raise InputError(f"{what} is {value!r}; write bytes, as in '80 GB' or '24 GiB'")
    return round(_times(number, _PREFIX[match[1] or ""]))


def parse_rate(value: str | int | float, what: str = "bandwidth") -> float:
    """`25 Gb/s` (bits), `300 GB/s` (bytes), or plain bytes per second."""
    number, unit = _split(value, what)
    if not unit:
        return number
    if unit.endswith("ps") and not unit.endswith("/s"):
        unit = unit[:-2] + "/s"
    match = _BYTES.match(unit[:-2]) if unit.endswith("/s") else None
    if not match or match[2] is None:
        raise InputError(f"{what} is {value!r}; write a rate, as in '25 Gb/s' or '300 GB/s'")
    return _times(number, _PREFIX[match[1] or ""]) / (1 if match[2] == "B" else 8)


def parse_seconds(value: str | int | float, what: str = "time") -> float:
    """`5 us`, `30 ms`, or plain seconds."""
    number, unit = _split(value, what)
    if unit not in _SECONDS:
        raise InputError(f"{what} is {value!r}; write a time, as in '5 us' or '30 ms'")
    return _times(number, _SECONDS[unit])


def parse_flops(value: str | int | float, what: str = "rate") -> float:
    """`312 TFLOP/s`, or plain FLOP per second."""
    number, unit = _split(value, what)
    match = _FLOPS.match(unit) if unit else None
    if unit and not match:
        raise InputError(f"{what} is {value!r}; write a rate, as in '312 TFLOP/s'")
    return _times(number, _PREFIX[match[1] or ""]) if match else number


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for size, name in steps:
        if abs(value) >= size:
            return f"{value / size:.3g} {name}" if abs(value / size) < 1000 else f"{value / size:.0f} {name}"
    size, name = steps[-1]
    return f"{value / size:.3g} {name}"


def show_bytes(value: float) -> str:
    """Binary prefixes, three digits: `74.5 GiB`."""
    return _scaled(value, ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "B")))


def show_seconds(value: float) -> str:
    """Three digits: `1.52 s`, `310 ms`."""
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def show_rate(value: float) -> str:
    """Bytes per second, decimal prefixes: `25 GB/s`."""
    return _scaled(value, ((TB, "TB/s"), (GB, "GB/s"), (MB, "MB/s"), (KB, "kB/s"), (1, "B/s")))


def show_count(value: float) -> str:
    """Decimal prefixes, three digits: `8.03 G`."""
    return _scaled(value, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))).strip()


def show_flops(value: float) -> str:
    """FLOP per second: `312 TFLOP/s`."""
    return _scaled(value, ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")))


def text_bytes(value: int) -> str:
    """Text from which `parse_bytes` reads exactly this value."""
    return _exact(value, parse_bytes, {"GB": GB, "GiB": GiB, "MiB": MiB, "KiB": KiB})


def text_rate(value: float, bits: bool = False) -> str:
    """Text from which `parse_rate` reads exactly this value; in bits per second for network adapters."""
    return _exact(value, parse_rate, {"Gb/s": GB / 8, "Mb/s": MB / 8} if bits else {"GB/s": GB, "MB/s": MB})


def text_seconds(value: float) -> str:
    """Text from which `parse_seconds` reads exactly this value."""
    return _exact(value, parse_seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6})


def text_flops(value: float) -> str:
    """Text from which `parse_flops` reads exactly this value."""
    return _exact(value, parse_flops, {"TFLOP/s": 10**12, "GFLOP/s": 10**9})


def _exact(value: float, parse: Callable[[str], float], units: dict[str, float]) -> str:
    """Text in one of `units` that parses to exactly `value`, the one that reads best; else the plain number."""
    texts = [(value / size, f"{value / size:.{digits}g} {unit}") for unit, size in units.items() for digits in (12, 17)]
    fits = [("e" in text, not 1 <= number < 1000, len(text), text) for number, text in texts if parse(text) == value]
    return min(fits)[-1] if fits else repr(value)
