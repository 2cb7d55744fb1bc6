"""Rows that a device of an expert group gets."""

from __future__ import annotations

import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.tables.moe import busiest_load


def test_balanced_rows_divide() -> None:
    """512 tokens to 8 of 32 experts on 4 devices: 1024 rows for 8 experts, each device receives every token."""
    assert busiest_load(512, 8, 32, 4, "balanced") == (1024.0, 8.0, 512.0)


def test_few_balanced_rows_reach_few_experts() -> None:
    """One token to 2 of 64 experts on 4 devices: a device has one row at most, for one expert."""
    assert busiest_load(1, 2, 64, 4, "balanced") == (1.0, 1.0, 1.0)


def test_balanced_tokens_reach_a_device_once() -> None:
    """2 of 8 experts, one on each device: each receives a quarter of 64 tokens, one row each."""
    assert busiest_load(64, 2, 8, 8, "balanced") == (16.0, 1.0, 16.0)


def test_one_device_keeps_all_rows() -> None:
    """Without a group every row stays, however skewed; experts without rows are not counted."""
    rows, experts, tokens = busiest_load(16, 8, 256, 1, "power_law_1.01")

    assert rows == 16 * 8
    assert 16 <= experts < 128
    assert tokens <= 16


def test_skew_loads_the_busiest_device() -> None:
    """It gets more than its share, a steeper law gives it more, and no expert gets a token twice."""
    even, mild, steep = (busiest_load(8192, 2, 8, 8, law) for law in ("balanced", "power_law_1.01", "power_law_1.2"))

    assert even.rows == 2048
    assert 3.0 * even.rows < mild.rows <= steep.rows <= 8192


def test_more_experts_on_a_device_even_out() -> None:
    """The busiest device's share over the even one shrinks towards 1 as experts are put together."""
    over = [busiest_load(8192, 8, 128, num, "power_law_1.2").rows / (8192 * 8 / num) for num in (64, 16, 4, 1)]

    assert over == sorted(over, reverse=True)
    assert over[-1] == 1.0


def test_rows_that_rounding_leaves_over() -> None:
    """One token to 8 of 128 experts rounds to none: dealt out to 16 devices a row each, or packed on the timed one."""
    assert busiest_load(1, 8, 128, 16, "power_law_1.2") == (1.0, 1.0, 1.0)
    assert busiest_load(1, 8, 128, 16, "power_law_1.2", packs_rest=True) == (8.0, 8.0, 1.0)
    assert busiest_load(1, 8, 128, 64, "power_law_1.2", packs_rest=True) == (2.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "word", ["zipf", "power_law_", "power_law_x", "power_law_99", "power_law_nan", "steep_1.2", ""]
)
def test_unknown_distributions(word: str) -> None:
    """The message names those that are known."""
    with pytest.raises(MeasuredFileError, match=f"unknown distribution '{word}'; known are balanced"):
        busiest_load(1, 1, 8, 1, word)
