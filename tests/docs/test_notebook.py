"""The example notebook runs from top to bottom, and its results show themselves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    """Every cell runs without an error, and what is a result of this package is shown as HTML."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient, which the test extra installs")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, which the test extra installs")
    pytest.importorskip("ipykernel", reason="needs ipykernel, which the test extra installs")
    notebook: Any = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are made by running, not kept"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own libraries
        nbclient.NotebookClient(notebook, timeout=120).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("text/html" in output["data"] for output in shown) >= 4
