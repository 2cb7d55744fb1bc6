"""The scripts that made the records; their splits decide which rows are unseen."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    """Import a script of ``scripts/``, or skip where the fit extra is missing."""
    for package in ("pandas", "pyarrow", "scipy"):
        pytest.importorskip(package, reason="judging needs the fit extra")
    folder = str(REPOSITORY / "scripts")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
