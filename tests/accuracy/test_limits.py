"""Limits on held-out error only tighten: a looser limit needs a stated reason."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "limits.toml"
# A limit of this name is one from below.
FROM_BELOW = "kendall_tau"
GAVE_WAY = "gave_way"


def limits_of(text: str) -> dict[str, float]:
    """Limits by dotted name, counted so that smaller is tighter."""
    content = tomllib.loads(text)
    content.pop(GAVE_WAY, None)
    return {name: -value if FROM_BELOW in name else value for name, value in flatten(content)}


def flatten(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested tables by dotted name."""
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from flatten(value, name)
        else:
            yield name, float(value)


def looser_than(old: dict[str, float], new: dict[str, float]) -> list[str]:
    """Names of limits in both that became looser."""
    return [name for name, value in new.items() if name in old and value > old[name] + 1e-12]


def history() -> Iterator[str]:
    """Earlier versions of the file in the git history."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("limits are compared with their history, and git is not here")

    def run(*arguments: str) -> str:
        done = subprocess.run([git, *arguments], cwd=FILE.parent, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    commits = run("log", "--format=%H", "--", FILE.name).split()
    if not commits:
        pytest.skip("limits are compared with their history, and this is no git checkout")
    for commit in commits:
        yield run("show", f"{commit}:./{FILE.name}")


def test_limits_only_tighten() -> None:
    """No limit is looser than in any earlier commit unless a reason is given."""
    text = FILE.read_text(encoding="utf-8")
    reasons = tomllib.loads(text).get(GAVE_WAY, {})
    now = limits_of(text)
    grown = {name for earlier in history() for name in looser_than(limits_of(earlier), now)}

    assert grown - set(reasons) == set()
    assert set(reasons) <= set(now), "a reason names a limit that is gone"
    assert all(len(reason) > 20 for reason in reasons.values())


def test_looser_limit_is_reported() -> None:
    """Both kinds of limit are checked: errors may not grow and rank correlations may not fall."""
    old = limits_of("[gemm]\na = 0.05\n[training.kendall_tau]\nall = 0.9\n")

    assert looser_than(old, limits_of("[gemm]\na = 0.04\n[training.kendall_tau]\nall = 0.95\n")) == []
    assert looser_than(old, limits_of("[gemm]\na = 0.06\n[training.kendall_tau]\nall = 0.95\n")) == ["gemm.a"]
    assert looser_than(old, limits_of("[gemm]\na = 0.05\n[training.kendall_tau]\nall = 0.8\n")) == [
        "training.kendall_tau.all"
    ]
