"""docs/notation.md agrees with the fields."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/write_notation.py as a person would."""
    script = ROOT / "scripts" / "write_notation.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_notation_page_is_fresh() -> None:
    """The page in the repository is what the field notes give today."""
    outcome = run_script("--check")
    assert outcome.returncode == 0, outcome.stderr


def test_stale_page_is_noticed(tmp_path: Path) -> None:
    """A page with one word changed fails the check, and the message names the remedy."""
    page = tmp_path / "notation.md"
    assert run_script("--output", str(page)).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "| `hidden_size` | `h` |" in text
    page.write_text(text.replace("residual", "other", 1), encoding="utf-8")
    outcome = run_script("--check", "--output", str(page))
    assert outcome.returncode == 1
    assert "make docs" in outcome.stderr
