"""The table of architectures is consistent, and is the only place that names them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shapewright
from shapewright.hardware.architectures import (
    ARCHITECTURE_NAMES,
    ARCHITECTURES,
    LAST_RESORT_DONOR,
    find_architecture,
    find_compute_capability,
)
from shapewright.hardware.loader import list_devices, load_device

_PACKAGE = Path(shapewright.__file__).parent
# Recipes are published by model and chip, and a refit has settings for the devices in its data: neither is a fact about
# an architecture.
_MAY_NAME_ONE = {"hardware/architectures.py", "hardware/loader.py", "measure/accuracy/tables/published_rows.py"}
_REFITS = "measure/refit/"
_TELLTALE_NAMES = {name for name in ARCHITECTURE_NAMES if name != "other"}


def test_references_between_architectures_resolve() -> None:
    """Donors, same-kernel architectures and growth references name entries of the same table."""
    for architecture in ARCHITECTURES:
        named = (*architecture.donors, *architecture.same_kernels, *architecture.exponential_growth)
        assert set(named) <= set(ARCHITECTURE_NAMES), architecture.name
        assert all(architecture.name in find_architecture(other).same_kernels for other in architecture.same_kernels)
    assert len(set(ARCHITECTURE_NAMES)) == len(ARCHITECTURE_NAMES)
    assert LAST_RESORT_DONOR in ARCHITECTURE_NAMES


@pytest.mark.parametrize("name", list_devices())
def test_device_files_agree_with_the_table(name: str) -> None:
    """A device's vendor is that of its architecture."""
    device = load_device(name)

    assert device.vendor == device.architecture_facts.vendor
    assert device.architecture == device.architecture_facts.name


def test_unknown_names_have_no_facts() -> None:
    """An unknown architecture counts as ``other``; an unknown capability gets its own instruction set."""
    assert find_architecture("unheard-of").name == "other"
    assert find_compute_capability("gfx942").matrix_instructions == "gfx942"
    assert find_compute_capability("8.6").num_cache_partitions == 1
    assert find_compute_capability("10.3").num_cache_partitions == 2


def _names_in_code(path: Path) -> set[str]:
    """Architecture names that are string constants in code, docstrings aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in _TELLTALE_NAMES}


def test_only_the_table_names_architectures() -> None:
    """Adding an architecture takes one entry in one file: no other module tests for one by name."""
    modules = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
    found = {
        name: sorted(names)
        for name, path in modules.items()
        if name not in _MAY_NAME_ONE and not name.startswith(_REFITS) and (names := _names_in_code(path))
    }

    assert found == {}
    assert _names_in_code(_PACKAGE / "hardware" / "architectures.py") == _TELLTALE_NAMES
