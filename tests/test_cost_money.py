"""Money and energy of a step."""

import pytest

from mixfleet.cluster import Device
from mixfleet.cost import money

A = Device(name="a", flops={"fp32": 1e12}, vector_flops=1e12, memory_bytes=1, memory_Bps=1, price_per_hour=3.5,
           power_w=400)
B = A.replace(name="b", price_per_hour=0.7, power_w=150)


def test_price_of_a_step_and_of_a_million_tokens():
    assert money.price_per_hour([A, A, B]) == pytest.approx(7.7)
    assert money.step_price([A, A, B], 36) == pytest.approx(0.077)
    assert money.price_per_million_tokens([A, A, B], 36, 20_000) == pytest.approx(3.85)


def test_energy_of_a_step():
    assert money.step_energy_j([A, A, B], 2) == 1900


def test_without_all_prices_there_is_none():
    free = A.replace(price_per_hour=None, power_w=0)
    assert money.step_price([A, free], 1) is None
    assert money.price_per_million_tokens([free], 1, 1) is None
    assert money.step_energy_j([A, free], 1) is None
    assert money.step_price([A.replace(price_per_hour=0.0)], 1) == 0
