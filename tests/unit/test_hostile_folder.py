"""Commands that start processes run nothing from the working directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shapewright.app.cli.console import refuse_unwritable, write_text_file
from shapewright.core.child_process import SOURCE_FOLDER, child_environment, python_command
from shapewright.measure.store.export import _write_csv

# What workers import, from the standard library, from dependencies and from optional ones.
PLANTED = ("json", "numpy", "torch", "rich", "click", "sqlite3", "socket", "sitecustomize", "shapewright", "lightgbm")
SEARCH = ["gpt3-125m", "--device", "h100-sxm-80gb", "--vary", "vocab"]
COMMANDS = {
    "bench": ["bench", "smoke", "--cpu", "--budget", "0.1s"],
    "bench on Ray": ["bench", "smoke", "--cpu", "--budget", "0.1s", "--engine", "ray"],
    "search on Ray": ["search", *SEARCH, "--engine", "ray"],
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules leave a trace when they are imported."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    trace = tmp_path / "trace"
    for name in PLANTED:
        text = f"import os\nos.close(os.open({str(trace)!r}, os.O_CREAT | os.O_WRONLY))\nraise ImportError({name!r})\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def was_run(folder: Path) -> bool:
    """Whether a planted module ran."""
    return (folder.parent / "trace").exists()


def test_planted_modules_are_noticed(hostile: Path) -> None:
    """A child that imports from its working directory leaves the trace."""
    subprocess.run([sys.executable, "-c", "import numpy"], cwd=hostile, capture_output=True, check=False)

    assert was_run(hostile)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_import_nothing_from_the_working_directory(name: str, hostile: Path) -> None:
    """Measuring and searching, here and on Ray, leave planted modules alone."""
    pytest.importorskip("ray" if "Ray" in name else "torch", reason="needs the ray and bench extras")
    command = [*python_command("shapewright"), *COMMANDS[name]]
    outcome = subprocess.run(command, cwd=hostile, env=environment(), capture_output=True, text=True, check=False)

    assert not was_run(hostile), outcome.stderr
    assert outcome.returncode == 0, outcome.stderr


def test_processes_of_the_explorer_import_nothing_from_the_working_directory(hostile: Path) -> None:
    """Findings and a search, each in a process that the explorer starts, have a result, and no planted module ran."""
    pytest.importorskip("uvicorn", reason="needs the serve extra")
    command = [*python_command("shapewright"), "serve", "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, cwd=hostile, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        address = found.group()
        job = {"preset": "gpt3-125m", "device": "h100-sxm-80gb"}
        assert ask(f"{address}api/v1/check", {"job": job})["findings"]
        run = ask(f"{address}api/v1/searches", {"job": job})
        stop_s = time.monotonic() + 60.0
        while run["state"] in ("waiting", "running") and time.monotonic() < stop_s:
            time.sleep(0.2)
            run = ask(f"{address}api/v1/searches/{run['id']}")
    finally:
        server.terminate()
        server.communicate(timeout=20)

    assert run["state"] == "done", run["error"]
    assert not was_run(hostile)


def environment() -> dict[str, str]:
    """Environment of a parent that is safe itself (by -P), whose children must be so by their own commands."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**given, "PYTHONPATH": SOURCE_FOLDER}


def ask(address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Answer of the explorer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_an_empty_entry_of_the_path_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a child holds no empty entry, which Python reads as the working directory."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", "/some/folder", "")))

    assert child_environment()["PYTHONPATH"].split(os.pathsep)[1:] == ["/some/folder"]


def test_planted_links_are_not_written_through(tmp_path: Path) -> None:
    """A link with the name of a temporary file, in a folder that others may write to, does not reach its target."""
    victim = tmp_path / "victim.txt"
    victim.write_text("kept", encoding="utf-8")
    for name in ("config.json", "rows.csv"):
        for suffix in ("tmp", "draft"):
            (tmp_path / f".{name}.{os.getpid()}.{suffix}").symlink_to(victim)

    refuse_unwritable(str(tmp_path / "config.json"))
    (tmp_path / f".config.json.{os.getpid()}.tmp").symlink_to(victim)
    write_text_file(str(tmp_path / "config.json"), "{}")
    _write_csv(tmp_path / "rows.csv", [{"m": 1}])

    assert victim.read_text(encoding="utf-8") == "kept"
    assert (tmp_path / "config.json").read_text(encoding="utf-8") == "{}"
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8") == "m\n1\n"
