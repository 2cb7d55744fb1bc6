"""The documentation site builds strictly, needs nothing from elsewhere, and shows only what runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from shapewright.app.cli.main import cli
from shapewright.hardware.loader import list_devices
from shapewright.lint.rule import list_rules

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as it is published."""
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    pytest.importorskip("mkdocstrings", reason="needs the docs extra")
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    outcome = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return folder


def test_every_rule_and_device_has_a_page(site: Path) -> None:
    """Pages are made from the rule and device files, and the lists lead to them."""
    rules, devices = ((site / name).read_text(encoding="utf-8") for name in ("rules.html", "devices.html"))
    for rule in list_rules():
        assert rule.name in (site / "rules" / f"{rule.code}.html").read_text(encoding="utf-8")
        assert f'href="rules/{rule.code}.html"' in rules
    for name in list_devices():
        assert (site / "devices" / f"{name}.html").is_file()
        assert f'href="devices/{name}.html"' in devices


def test_pages_make_no_requests(site: Path) -> None:
    """No page loads a script, style, font or picture from another place."""
    loads = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?https?:|<link[^>]+href=["']?https?:|url\(https?:"""
    )
    for page in site.rglob("*.html"):
        found = loads.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.name}: {found[0] if found else ''}"


def test_api_page_shows_docstrings(site: Path) -> None:
    """The reference of the Python API is made from the docstrings."""
    text = (site / "api.html").read_text(encoding="utf-8")
    for words in ("Predict the time, throughput and memory of one step", "step_time_low_s", "UnknownDeviceError"):
        assert words in text


def blocks() -> list[tuple[str, str, str]]:
    """Page, language and text of every block."""
    return [
        (page.relative_to(ROOT).as_posix(), found[1], found[2])
        for page in PAGES
        for found in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def parse_command(line: str) -> None:
    """Let the command line read a line, without running it; raises click's error where it would refuse."""
    words = shlex.split(re.split(r" [|<>] ", line)[0], comments=True)[1:]
    words = ["config.json" if word == "-" else word for word in words]  # a config on standard input
    with cli.make_context("shapewright", words) as context:
        command = cli.get_command(context, words[0])
        assert command is not None, f"no command {words[0]}"
        rest = words[1:]
        while isinstance(command, click.Group) and rest:
            command, rest = command.get_command(context, rest[0]), rest[1:]
            assert command is not None, line
        if "--help" not in rest:
            command.make_context(words[0], rest, parent=context)


@pytest.mark.parametrize(("page", "language", "text"), blocks())
def test_block_rows_equal_their_operations(page: str, language: str, text: str) -> None:
    """Commands parse, data parses, results of the guides are run again by make docs; nothing else is shown as code."""
    if language == "console":
        assert page.startswith("docs/guides/"), "console blocks are run again only on guides"
    elif language in {"python", "py"}:  # py: shown and not run
        compile(text, page, "exec")
    elif language == "json":
        json.loads(text)
    elif language == "toml":
        tomllib.loads(text)
    else:
        assert language in {"", "text", "yaml", "diff"}
        joined = text.replace("\\\n", " ")
        for line in joined.splitlines():
            for part in line.split(" && "):
                if part.strip().startswith("shapewright "):
                    parse_command(part.strip())


def test_wrong_commands_are_noticed() -> None:
    """The check refuses a command or option that does not exist."""
    parse_command("shapewright predict gpt2 --device h100-sxm-80gb --json > out.json")
    with pytest.raises(click.ClickException):
        parse_command("shapewright predict gpt2 --device h100-sxm-80gb --no-such-option")
    with pytest.raises(AssertionError):
        parse_command("shapewright no-such-command")
