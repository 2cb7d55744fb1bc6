"""Public names of ``import shapewright``, which must not change."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import shapewright


@pytest.mark.parametrize("name", shapewright.__all__)
def test_public_name_is_there(name: str) -> None:
    """Every listed name can be had, and is a class or a function with a docstring."""
    found = getattr(shapewright, name)
    assert inspect.isclass(found) or inspect.isfunction(found)
    assert found.__doc__


def test_no_package_is_named_as_a_function() -> None:
    """Importing a package never puts it in the place of a public function of the same name."""
    packages = {found.name for found in pkgutil.iter_modules(shapewright.__path__)}

    assert packages.isdisjoint(shapewright.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that is not there fails as it does on any module."""
    with pytest.raises(AttributeError, match="module 'shapewright' has no attribute 'predictor'"):
        _ = shapewright.predictor
