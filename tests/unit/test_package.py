"""Contents of the installed package: everything in the source tree, and three dependencies."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs the yaml extra")
classifiers = pytest.importorskip("trove_classifiers", reason="needs the build backend").classifiers

from packaging.metadata import Metadata

import shapewright

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


def test_wheel_is_reproducible(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Built from a copy in another place with other times of files, the wheel is the same byte by byte."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=copy, capture_output=True, check=True)
    assert wheel.filename is not None
    assert next(tmp_path.glob("*.whl")).read_bytes() == Path(wheel.filename).read_bytes()


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


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Metadata:
    """Metadata of the wheel; malformed ones raise."""
    folder = next(name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    return Metadata.from_email(wheel.read(f"{folder}/METADATA"), validate=True)


def test_metadata_is_complete(metadata: Metadata) -> None:
    """The metadata that an index shows is present, and every classifier is valid."""
    assert (metadata.name, str(metadata.version)) == ("shapewright", shapewright.__version__)
    assert metadata.summary
    assert metadata.keywords
    assert metadata.description_content_type == "text/markdown"
    assert str(metadata.requires_python) == ">=3.11"
    assert set(metadata.classifiers or ()) <= classifiers
    assert "Typing :: Typed" in (metadata.classifiers or ())


def test_version_is_the_same_everywhere(metadata: Metadata) -> None:
    """Package, citation and the newest closed section of the changelog name one version and date."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\S+)(?: - (\d{4}-\d{2}-\d{2}))?$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    assert sections[0] == ("Unreleased", "")
    assert sections[1] == (str(metadata.version), str(citation["date-released"]))
    assert citation["version"] == str(metadata.version)
    assert {"cff-version", "message", "authors", "title"} <= set(citation)


def test_sdist_builds_the_same_package(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    """The sdist holds every file of the package, and nothing of the repository's tests and tools."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    assert {f"src/{name}" for name in wheel.namelist() if name.startswith("shapewright/")} <= names
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"} <= names
    assert not any(name.startswith(("tests", "docs", "scripts", ".")) and name != ".gitignore" for name in names)


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


def test_release_check_covers_every_extra() -> None:
    """The release check installs each extra alone and runs a command that needs it."""
    script = runpy.run_path(str(ROOT / "scripts" / "check_release.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert set(script["USES"]) == set(project["optional-dependencies"]) - {"test"}
    assert "make release" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
