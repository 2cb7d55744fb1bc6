"""Rows that a device of an expert group gets."""

from __future__ import annotations

import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.tables.moe import busiest_load


@pytest.mark.parametrize(
    ("arguments", "load"),
    [
        # 1024 rows for 8 experts, and each device receives every token.
        ((512, 8, 32, 4), (1024.0, 8.0, 512.0)),
        # A device has one row at most, for one expert.
        ((1, 2, 64, 4), (1.0, 1.0, 1.0)),
        # One expert on each device: each receives a quarter of the tokens, one row each.
        ((64, 2, 8, 8), (16.0, 1.0, 16.0)),
    ],
)
def test_balanced_rows(arguments: tuple[int, int, int, int], load: tuple[float, float, float]) -> None:
    """Rows, experts and tokens of a device: so many tokens to so many of all experts on some devices."""
    assert busiest_load(*arguments, "balanced") == load


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
