"""Drift of a grid of predictions: small changes pass, large ones fail until the stored grid is renewed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from refit_module import REPOSITORY


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script that writes the grid; it needs no extra."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import write_drift_grid

    yield write_drift_grid
    sys.path.remove(str(REPOSITORY / "scripts"))


def test_predictions_stay_near_the_grid(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """No part moved beyond the limits since the grid was written; CI shows how far each one did."""
    since, old = script.read_grid()
    movements = script.compare(old, script.predict_grid())
    with capsys.disabled():
        print("\n" + script.describe(movements, since))

    assert [each.part for each in movements if each.is_beyond] == []


def test_drift_is_measured_and_compared_with_limits(script: ModuleType) -> None:
    """Two of twenty GEMMs move by 4 and 30 %: the median passes, the largest exceeds its limit and is named."""
    old = {"products/h100-sxm-80gb": [1e-3] * 20}
    new = {"products/h100-sxm-80gb": [1e-3] * 18 + [1.04e-3, 1.3e-3]}
    (found,) = script.compare(old, new)

    assert (found.cells, found.moved, found.median) == (20, 2, 0.0)
    assert found.largest == pytest.approx(0.2624, abs=1e-4)
    assert found.where == "cell 19 on h100-sxm-80gb"
    assert found.is_beyond
    assert "BEYOND" in script.describe([found], "0.1.0")


def test_small_drift_passes_and_a_missing_prediction_fails(script: ModuleType) -> None:
    """One cell of a thousand that moves by 4 % is fine; one that is no longer predicted is not."""
    old = {"attention/l4": [1e-3] * 1000}
    (moved,) = script.compare(old, {"attention/l4": [1.04e-3] + [1e-3] * 999})
    (lost,) = script.compare(old, {"attention/l4": [None] + [1e-3] * 999})

    assert not moved.is_beyond
    assert lost.is_beyond
    assert lost.appeared == -1
