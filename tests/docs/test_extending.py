"""The page on extending names places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"(?:src|tests|scripts)/[\w/.-]*\w", PAGE)))


@pytest.mark.parametrize("path", PATHS)
def test_named_places_exist(path: str) -> None:
    """Every file and folder that the page names is there."""
    assert (ROOT / path).exists()


def test_every_package_is_described() -> None:
    """The first table lists the packages of the source folder, in the order of imports."""
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| looking for |")[0], re.MULTILINE)
    found = {path.name for path in (ROOT / "src" / "shapewright").iterdir() if (path / "__init__.py").is_file()}

    assert set(listed) == found
    assert len(listed) <= 12
