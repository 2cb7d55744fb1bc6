"""The annotated array shapes of pricing, search and plan are those of their arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jaxtyping", reason="needs the test extra")
pytest.importorskip("beartype", reason="needs the test extra")
_FOLDER = Path(__file__).parents[1]


def _run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_FOLDER / program), *args], capture_output=True, text=True, check=False, timeout=300
    )


def test_pricing_keeps_its_annotated_shapes() -> None:
    """Steps and arrays of every kind of operation are priced with every annotation of the package checked."""
    found = _run("checked_pricing.py")

    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout) > 1000


def test_wrong_shapes_are_noticed() -> None:
    """The same program fails when a function gets two sizes of m and three of n."""
    found = _run("checked_pricing.py", "--wrong-shape")

    assert found.returncode == 1
    assert "is_idle_case" in found.stderr
    assert "jaxtyping.TypeCheckError" in found.stderr


def test_search_and_plan_keep_their_annotated_shapes() -> None:
    """Searches and plans of several models run with every annotation of both packages checked."""
    found = _run("checked_optimize.py")

    assert found.returncode == 0, found.stderr[-3000:]
    assert int(found.stdout) > 100_000


def test_wrong_shapes_of_a_plan_are_noticed() -> None:
    """The same program fails when times of two shardings are added to three."""
    found = _run("checked_optimize.py", "--wrong-shape")

    assert found.returncode == 1
    assert "add_to_step" in found.stderr
    assert "jaxtyping.TypeCheckError" in found.stderr
