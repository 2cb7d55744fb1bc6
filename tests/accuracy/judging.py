"""What tests of accuracy share: limits, measured tables, the refits of records, published runs, the mean error.

Measured tables are in SHAPEWRIGHT_DATA, or in shared/data next to the checkout; tests skip without them.
"""

from __future__ import annotations

import importlib
import os
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs

REPOSITORY = Path(__file__).parents[2]
ALL_LIMITS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))


def measured_file(name: str) -> Path:
    """Return a measured table, or skip the test with the reason."""
    folder = Path(os.environ.get("SHAPEWRIGHT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not here; set SHAPEWRIGHT_DATA to the folder of measured tables")
    return folder / name


def load_refit(name: str) -> ModuleType:
    """Import a module of ``shapewright.measure.refit``, or skip the test if the fit extra is not installed."""
    for package in ("pandas", "pyarrow", "scipy"):
        pytest.importorskip(package, reason="judging needs the fit extra")
    return importlib.import_module(f"shapewright.measure.refit.{name}")


@cache
def published_runs(*, has_experts: bool | None = None) -> list[PublishedRun]:
    """Published training runs with a full configuration: of mixtures of experts, of dense models, or of both."""
    columns = read_columns(measured_file("published_training_throughput.csv"), FORMAT, Counter())
    return list(read_runs(columns, Context(), has_experts=has_experts))


def mean_error(predicted: Any, measured: Any) -> float:
    """Mean |predicted / measured - 1|."""
    return float(np.mean(np.abs(np.asarray(predicted) / np.asarray(measured) - 1.0)))
