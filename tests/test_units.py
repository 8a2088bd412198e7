"""Quantities: parsing, printing, and text that parses back to the same number."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfleet import units
from mixfleet.errors import InputError

positive = st.floats(min_value=1e-12, max_value=1e18, allow_nan=False)


@pytest.mark.parametrize(("text", "value"), [
    ("80 GB", 80_000_000_000), ("24 GiB", 25_769_803_776), ("1.5KiB", 1536), (" 7 B ", 7), ("123", 123), (45, 45),
    ("1_000 MB", 10**9), (".5 KiB", 512),
])
def test_bytes(text, value):
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("25 Gb/s", 3.125e9), ("300 GB/s", 3e11), ("200 Gbps", 2.5e10), ("64 GBps", 6.4e10), ("8 bit/s", 1.0), (17.5, 17.5),
    ("2.5e3 kb/s", 312_500.0), ("31.5 GB/s", 31.5e9),
])
def test_rates(text, value):
    assert units.parse_rate(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("5 us", 5e-6), ("30 ms", 0.03), ("7", 7.0), ("3 min", 180.0), ("2 h", 7200.0), ("11 µs", 11e-6), ("13 ns", 13e-9),
    ("20.71 ms", 0.02071), ("122.4 ms", 0.1224),
])
def test_seconds(text, value):
    assert units.parse_seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("312 TFLOP/s", 312e12), ("19.5 TFLOPS", 19.5e12), ("48 GFLOPs", 48e9), (3e9, 3e9),
])
def test_flops(text, value):
    assert units.parse_flops(text) == value


@pytest.mark.parametrize(("parse", "text"), [
    (units.parse_bytes, "80 Gb"), (units.parse_bytes, "80 GB/s"), (units.parse_bytes, "many"),
    (units.parse_bytes, "GB"),
    (units.parse_rate, "25 G"), (units.parse_rate, "25 GB"), (units.parse_rate, "25 Gx/s"), (units.parse_rate, ""),
    (units.parse_seconds, "5 GB"), (units.parse_seconds, "soon"), (units.parse_flops, "312 T"),
    (units.parse_bytes, True), (units.parse_rate, math.nan), (units.parse_seconds, math.inf),
])
def test_what_is_not_a_quantity_is_refused_and_named(parse, text):
    with pytest.raises(InputError, match=r"^the nic is "):
        parse(text, "the nic")


@given(st.integers(min_value=0, max_value=2**53))
def test_bytes_round_trip(value):
    assert units.parse_bytes(units.text_bytes(value)) == value


@given(positive, st.booleans())
def test_rates_round_trip(value, bits):
    assert units.parse_rate(units.text_rate(value, bits=bits)) == value


@given(positive)
def test_seconds_and_flops_round_trip(value):
    assert units.parse_seconds(units.text_seconds(value)) == value
    assert units.parse_flops(units.text_flops(value)) == value


def test_text_is_what_a_person_would_write():
    assert units.text_rate(25e9, bits=True) == "200 Gb/s"
    assert units.text_rate(31.5e9) == "31.5 GB/s"
    assert units.text_bytes(80 * units.GiB) == "80 GiB"
    assert units.text_bytes(80 * units.GB) == "80 GB"
    assert units.text_seconds(0.02071) == "20.71 ms"
    assert units.text_flops(19.5e12) == "19.5 TFLOP/s"


@given(st.floats(min_value=1, max_value=1e15))
def test_shown_bytes_are_within_a_digit(value):
    number, unit = units.show_bytes(value).split()
    scale = {"B": 1, "KiB": units.KiB, "MiB": units.MiB, "GiB": units.GiB, "TiB": units.TiB}[unit]
    assert float(number) * scale == pytest.approx(value, rel=6e-3)
