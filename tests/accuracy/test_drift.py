"""Drift of a grid of predictions: small changes pass, large ones fail until the stored grid is renewed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from judging import REPOSITORY


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script that writes the grid; it needs no extra."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    import write_drift_grid

    yield write_drift_grid
    sys.path.remove(str(REPOSITORY / "scripts"))


@pytest.mark.parametrize(
    "part", ["train", "train, spread", "prefill", "decode", "products", "attention", "collectives", "kernels"]
)
def test_predictions_stay_near_the_grid(script: ModuleType, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The part did not move beyond the limits since the grid was written; CI shows how far."""
    since, old = script.read_grid()
    cells = {key: values for key, values in old.items() if key.startswith(f"{part}/")}
    (movement,) = script.compare(cells, script.predict_grid(part))
    with capsys.disabled():
        print("\n" + script.describe([movement], since))

    assert not movement.is_beyond


def test_the_grid_has_every_part(script: ModuleType) -> None:
    """No part of the script lacks in the file."""
    _, old = script.read_grid()

    assert {key.partition("/")[0] for key in old} == set(script.PARTS)


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
