"""Money and energy of a step: sums over devices, for as long as the step takes."""

from __future__ import annotations

from collections.abc import Iterable

from mixfleet.cluster import Device


def price_per_hour(devices: Iterable[Device]) -> float | None:
    """Price of all devices for an hour, in the currency of the cluster file; None if any has none."""
    total = 0.0
    for device in devices:
        if device.price_per_hour is None:
            return None
        total += device.price_per_hour
    return total


def step_price(devices: Iterable[Device], step_s: float) -> float | None:
    """Price of one step; None if any device has no price."""
    hourly = price_per_hour(devices)
    return None if hourly is None else hourly * step_s / 3600


def price_per_million_tokens(devices: Iterable[Device], step_s: float, tokens_per_step: float) -> float | None:
    """Price of training on a million tokens; None if any device has no price."""
    price = step_price(devices, step_s)
    return None if price is None else price / tokens_per_step * 1e6


def step_energy_j(devices: Iterable[Device], step_s: float) -> float | None:
    """Joules of one step if every device draws its rated power throughout, an upper bound; None if any is not rated."""
    total = 0.0
    for device in devices:
        if not device.power_w:
            return None
        total += device.power_w
    return total * step_s
