"""Find the measured tables: SHAPEWRIGHT_DATA, or shared/data next to the checkout; accuracy tests skip without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def measured_file(name: str) -> Path:
    """Return a measured table, or skip the test with the reason."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("SHAPEWRIGHT_DATA", beside))
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not here; set SHAPEWRIGHT_DATA to the folder of measured tables")
    return folder / name
