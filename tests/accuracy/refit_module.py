"""Modules that fit the package's records; their splits decide which rows are held out."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


def load_refit(name: str) -> ModuleType:
    """Import a module of ``shapewright.measure.refit``, or skip the test if the fit extra is not installed."""
    for package in ("pandas", "pyarrow", "scipy"):
        pytest.importorskip(package, reason="judging needs the fit extra")
    return importlib.import_module(f"shapewright.measure.refit.{name}")
