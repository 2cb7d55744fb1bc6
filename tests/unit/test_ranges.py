"""Range checks accept and reject the right values, and state the range in their message."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shapewright.core.errors import ConfigError
from shapewright.core.ranges import check_integer, check_number, read_integer


@pytest.mark.parametrize("value", [1, 4, np.int64(3)])
def test_integers_in_range(value: object) -> None:
    """Integers of Python and NumPy are returned as int, bounds included."""
    checked = check_integer("x", value, 1, 4, error=ConfigError)

    assert (type(checked), checked) == (int, value)


@pytest.mark.parametrize("value", [0, 5, 2.0, "2", True, None, math.nan, np.float64(2.0), 10**400, [2]])
def test_invalid_integers(value: object) -> None:
    """Anything else is an error on one line."""
    with pytest.raises(ConfigError, match=r"^x=.{1,40} must be an integer from 1 to 4; try 2$"):
        check_integer("x", value, 1, 4, error=ConfigError, hint="try 2")


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float64(0.25)])
def test_numbers_in_range(value: float) -> None:
    """Integers and floats are accepted, bounds included."""
    assert check_number("x", value, 0, 1, error=ConfigError) == value


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.5", True, None, math.nan, math.inf, -math.inf, 10**400])
def test_invalid_numbers(value: object) -> None:
    """NaN, infinities, huge integers and other types are errors."""
    with pytest.raises(ConfigError, match=r"must be a number from 0 to 1$"):
        check_number("x", value, 0, 1, error=ConfigError)


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [
        ({"low": 0, "high": 1, "exclude_low": True}, "above 0 and at most 1"),
        ({"low": 1, "high": 100, "exclude_high": True}, "from 1 to below 100"),
        ({"low": 0, "high": 1, "exclude_low": True, "exclude_high": True}, "above 0 and below 1"),
        ({"low": 1}, "of at least 1"),
        ({"low": 0, "exclude_low": True}, "above 0"),
        ({"low": 1e-6, "high": 1e6}, "from 1e-06 to 1e+06"),
        ({"low": 100_000, "high": 10**14}, "from 100000 to 1e+14"),
        ({"low": 1, "high": 2**40}, "from 1 to 2**40"),
        ({"low": 1, "high": 2**24}, "from 1 to 16777216"),
    ],
)
def test_the_message_states_the_range(bounds: dict[str, float], allowed: str) -> None:
    """Messages distinguish open and closed ends, and abbreviate large bounds."""
    with pytest.raises(ConfigError) as caught:
        check_number("x", -1, **bounds, error=ConfigError)  # type: ignore[arg-type]

    assert str(caught.value) == f"x=-1 must be a number {allowed}"


def test_excluded_bounds() -> None:
    """A bound that is excluded is out of range, one that is included is not."""
    assert check_number("x", 1, 0, 1, exclude_low=True, error=ConfigError) == 1
    with pytest.raises(ConfigError, match="above 0"):
        check_number("x", 0, 0, 1, exclude_low=True, error=ConfigError)
    with pytest.raises(ConfigError, match="below 1"):
        check_number("x", 1, 0, 1, exclude_high=True, error=ConfigError)


@pytest.mark.parametrize("value", [10**400, -(10**400), math.inf, math.nan])
def test_numbers_without_an_upper_bound_still_fit_into_a_float(value: float) -> None:
    """An integer that no float can hold would fail in the first division."""
    with pytest.raises(ConfigError, match=r"must be a number"):
        check_number("x", value, -math.inf, error=ConfigError)


def test_texts_that_only_look_like_integers() -> None:
    """Superscripts and digits of other scripts are no integers, nor is a number too long for Python to read."""
    assert [read_integer(text) for text in ("8", " 08 ", "-8")] == [8, 8, -8]
    assert [read_integer(text) for text in ("", "-", "--8", "8.0", "\u00b2", "\u0668", "9" * 5000)] == [None] * 7
