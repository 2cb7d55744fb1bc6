"""What ``import shapewright`` offers, and that it stays what it is."""

from __future__ import annotations

import importlib
import inspect

import pytest

import shapewright


@pytest.mark.parametrize("name", shapewright.__all__)
def test_public_name_is_there(name: str) -> None:
    """Every listed name can be had, and is a class or a function with a docstring."""
    found = getattr(shapewright, name)
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__doc__


def test_predict_stays_a_function() -> None:
    """Importing the module of the same name, as every prediction does, leaves the function in place."""
    assert inspect.isfunction(importlib.import_module("shapewright.predict").predict)
    assert inspect.isfunction(shapewright.predict)
    for _ in range(2):
        assert shapewright.predict("gpt3-125m", device="a100-sxm-40gb").step_time_s > 0


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not there fails as it does on any module."""
    with pytest.raises(AttributeError, match="module 'shapewright' has no attribute 'predictor'"):
        _ = shapewright.predictor
