"""Formatting and parsing quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.core.units import (
    format_bytes,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
    parse_count,
)


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0 s"),
        (1.0, "1 s"),
        (90.0, "90 s"),
        (0.9996, "1000 ms"),
        (0.0123, "12.3 ms"),
        (4.2e-6, "4.2 us"),
        (3e-9, "3 ns"),
        (4e-12, "0 ns"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds(time_s: float, text: str) -> None:
    """Durations have the unit that gives a number from 1 to 1000, with three digits."""
    assert format_seconds(time_s) == text


@pytest.mark.parametrize(
    ("amount_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (80 * 2**30, "80 GiB"),
        (80e9, "74.5 GiB"),  # 80e9 / 2**30 = 74.506: a sheet's 80 GB are not 80 GiB
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes_are_binary(amount_bytes: float, text: str) -> None:
    """Memory is formatted in binary units."""
    assert format_bytes(amount_bytes) == text


def test_rates_counts_and_percent() -> None:
    """Rates are in TFLOP/s, counts have decimal suffixes, fractions are percentages."""
    assert format_rate(311.9e12) == "312 TFLOP/s"
    assert format_rate(4.5e10) == "0.04 TFLOP/s"
    assert format_count(8_030_261_248) == "8.03 B"
    assert format_count(1_000) == "1 k"
    assert format_count(999) == "999"
    assert format_percent(0.5) == "50 %"
    assert format_percent(0.00051) == "0.05 %"


@pytest.mark.parametrize(
    ("text", "count"),
    [("12", 12), ("2.7b", 2_700_000_000), ("350M", 350_000_000), (" 8K ", 8000), ("1_000", 1000), ("1,000", 1000)],
)
def test_counts_are_parsed(text: str, count: int) -> None:
    """Suffixes are decimal, in either case; separators are ignored."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "b", "-1", "nan", "inf", "1e30", "ten", "1kk", "0x10"])
def test_invalid_counts(text: str) -> None:
    """Text that is not a number, and negative, infinite or huge numbers are a ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 - float's own message is as good as any
        parse_count(text)


@given(st.integers(0, 10**15))
def test_counts_round_trip(count: int) -> None:
    """A count formatted in full is parsed as itself, one with a suffix to three digits."""
    assert parse_count(str(count)) == count
    assert parse_count(format_count(count).replace(" ", "")) == pytest.approx(count, rel=0.006, abs=0.5)


@given(st.floats(1e-9, 1e6))
def test_seconds_keep_three_digits(time_s: float) -> None:
    """The formatted duration is within half a percent of the value."""
    number, unit = format_seconds(time_s).split()
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(time_s, rel=0.0051)
