"""Contents of the installed package: everything in the source tree, and three dependencies."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel as an installer would."""
    pytest.importorskip("hatchling", reason="needs the build backend, which the test extra installs")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    """Device files, presets and calibration records travel with the code."""
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "shapewright").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name.rpartition(".")[2] for name in wanted} >= {"py", "toml", "json", "typed"}
    assert {name for name in wheel.namelist() if name.startswith("shapewright/")} == wanted


def test_core_needs_three_packages(wheel: zipfile.ZipFile) -> None:
    """Without extras, NumPy, Click and Rich are all that is installed; the licence is inside."""
    folder = next(name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    metadata = wheel.read(f"{folder}/METADATA").decode()
    required = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    core = {line.partition(">")[0] for line in required if "extra ==" not in line}
    assert core == {"numpy", "click", "rich"}
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert "shapewright = shapewright.app.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
