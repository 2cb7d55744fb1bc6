"""README and pages agree with the program: examples are run again, names and links are resolved."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from jsonschema import Draft202012Validator

from command_line import examples
from shapewright.app.cli.main import cli
from shapewright.app.cli.main import main as run_command
from shapewright.app.report.output_registry import COMMAND_OUTPUTS
from shapewright.core import errors
from shapewright.lint.rule import list_rules
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SCRIPTS = ROOT / "scripts"
# All figures of docs/ together. [byte]
MOST_FIGURE_BYTES = 600_000
# Outside of tables and code; generated paragraphs count.
MOST_WORDS_OF_THE_README = 1200
# Two printed pages; a longer record is of two subjects.
MOST_WORDS_OF_A_RECORD = 1000


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a person would."""
    return subprocess.run([sys.executable, SCRIPTS / name, *arguments], capture_output=True, text=True, check=False)


def text_of(*names: str) -> str:
    """Pages as one text."""
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


@pytest.mark.parametrize("script", ["write_pages.py", "write_results.py"])
def test_pages_are_fresh(script: str) -> None:
    """Output shown on the pages equals current output, character by character."""
    outcome = run_script(script, "--check")

    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[costs ", "[cost "),
        (" MFU\n", " mfu\n"),
        ("| GEMM, bf16: L40S | ", "| GEMM, bf16: L40S | 1"),
        (" model presets", " presets"),
        ("`v100-sxm2-16gb`", "`v100`"),
    ],
)
def test_stale_readme_is_noticed(before: str, after: str, tmp_path: Path) -> None:
    """A changed number in a block, a comment or a table fails the check, and the message names the remedy."""
    text = README.read_text(encoding="utf-8")
    stale = text.replace(before, after, 1)
    copy = tmp_path / "README.md"
    copy.write_text(stale, encoding="utf-8")
    assert stale != text
    outcome = run_script("write_results.py", "--check", str(copy))

    assert outcome.returncode == 1
    assert "make docs" in outcome.stderr


def test_every_script_has_its_place() -> None:
    """The page on scripts names each, those to run in its first part and those to import in its last, and no other."""
    page = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    to_run, shared = page.split("## What they share")
    sources = {path.name: path.read_text(encoding="utf-8") for path in SCRIPTS.glob("*.py")}
    runs = {name for name, source in sources.items() if '__name__ == "__main__"' in source}

    assert set(re.findall(r"\b\w+\.py\b", to_run)) == runs
    assert set(re.findall(r"\b\w+\.py\b", shared)) == set(sources) - runs


def test_numbers_of_the_readme_are_made() -> None:
    """Outside of code and of generated parts the README has no share, factor, time or rate."""
    text = re.sub(r"<!-- begin (\S+) -->.*?<!-- end \1 -->", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)

    claims = r"\d(?: ?%|x\b| (?:ms|us|s|times)\b|[^.\n]*(?:a|per) second)|(?:tau|error|factor) \d"
    assert re.findall(claims, prose) == []


def test_stale_page_is_noticed(tmp_path: Path) -> None:
    """A page that is missing or changed fails the check, and the message names the page and the remedy."""
    assert run_script("write_pages.py", "--output", str(tmp_path)).returncode == 0
    assert run_script("write_pages.py", "--check", "--output", str(tmp_path)).returncode == 0
    for name, before, after in (("rules.md", "TC101", "TC100"), ("notation.md", "| `hidden_size` | `h` |", "| `h` |")):
        page = tmp_path / name
        text = page.read_text(encoding="utf-8")
        assert before in text
        page.write_text(text.replace(before, after), encoding="utf-8")
    outcome = run_script("write_pages.py", "--check", "--output", str(tmp_path))

    assert outcome.returncode == 1
    assert outcome.stderr.count("run make docs") == 2
    assert "notation.md is stale" in outcome.stderr


def test_readme_shows_commands_and_python() -> None:
    """There is something to run: a console block with output, and a Python block with output."""
    text = README.read_text(encoding="utf-8")

    assert len(re.findall(r"```console\n\$ shapewright .*\n(?!```)", text)) >= 1
    assert len(re.findall(r"^# -> .+$", text, re.MULTILINE)) >= 2


def test_examples_of_the_readme_run() -> None:
    """Every command of the README's list is an example of a help page, all of which are run."""
    text = README.read_text(encoding="utf-8").partition("## What it answers")[2].partition("\n## ")[0]
    shown = re.findall(r"^shapewright .*$", text, re.MULTILINE)

    assert len(shown) > 8
    assert set(shown) <= set(examples())


def test_the_readme_names_every_extra() -> None:
    """What a user can install is in the README; the tools of the project's own pages and tests are not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (sentence,) = re.findall(r"^Optional features are extras: .*$", README.read_text(encoding="utf-8"), re.MULTILINE)

    assert set(re.findall(r"`(\w+)`", sentence)) == set(project["optional-dependencies"]) - {"docs", "test"}


def test_every_name_is_documented() -> None:
    """Commands, rules, error classes and fields each have their place in the pages."""
    pages = text_of("README.md", "docs/commands.md", "docs/rules.md", "docs/notation.md")
    names = [f"shapewright {command}" for command in cli.list_commands(click.Context(cli))]
    names += [rule.code for rule in list_rules()] + [rule.name for rule in list_rules()]
    names += [
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    names += [spec.name for cls in (TransformerConfig, Workload, ParallelLayout) for spec in fields(cls)]

    assert [name for name in names if name not in pages] == []


JSON_COMMANDS = (
    "batch --global-batch 64 --gpus 8",
    "check gpt2 --device a100-sxm-40gb",
    "compare gpt2 --devices a100-sxm-40gb,cerebras-wse-2",
    "design gpt2 --params 125m --train-tokens 1b --device a100-sxm-40gb --gpus 2 --top 2",
    "flops gpt2 --train-tokens 1b --gpus 8 --device a100-sxm-40gb --mfu 0.4 --usd-per-hour 2",
    "memory llama-3-8b --device a100-sxm-40gb",
    "mfu gpt2 --device a100-sxm-40gb --seconds 1 --gpus 1 --global-batch 8",
    "models",
    "params gpt2",
    "plan gpt2 --device a100-sxm-40gb --gpus 2 --global-batch 16 --seq-len 1024",
    "predict gpt2 --device a100-sxm-40gb",
    "predict gpt2 --device a100-sxm-40gb --explain logits",
    "predict gpt2 --device a100-sxm-40gb --sweep micro_batch_size=1,2",
    "rule TC101",
    "search gpt2 --devices a100-sxm-40gb,l40s --vary vocab",
    "search gpt2 --device a100-sxm-40gb --vary vocab --train-tokens 1b",
    "serve-plan gpt2 --device a100-sxm-40gb --gpus 1 --isl 128 --osl 16",
)
# What these print is tested where there is something to measure, to fit or to judge; the fields of a device are those
# of its file.
OTHER_JSON_COMMANDS = {"accuracy", "bench", "calibrate", "devices", "proxy", "store"}


def words_of(text: str) -> set[str]:
    """Words of a page in code type."""
    return set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_keys_are_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON output is valid by docs/json-schema.json, and docs/json.md lists its keys under the command's heading."""
    with pytest.raises(SystemExit):
        run_command([*command.split(), "--json"])
    facts = json.loads(capsys.readouterr().out)
    variant = command.split(maxsplit=1)[0] + "".join(f" {flag}" for flag in re.findall(r"--(?:explain|sweep)", command))
    schema = json.loads(text_of("docs/json-schema.json"))
    defined = schema["$defs"][schema["properties"][variant]["$ref"].rpartition("/")[2]]
    sections = re.split(r"^## shapewright ", text_of("docs/json.md"), flags=re.MULTILINE)
    (own,) = (each for each in sections if each.partition("\n")[0] == command.split(maxsplit=1)[0])

    Draft202012Validator(schema).validate({variant: facts})
    assert set(defined["required"]) <= set(facts) <= set(defined["properties"])
    assert set(facts) - words_of(own) - {"schema_version"} == set()


def test_every_json_command_is_tested() -> None:
    """Every command with JSON output is either run above or tested where it can be run."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    with_json = {
        name
        for name, command in commands.items()
        if isinstance(command, click.Group) or any("--json" in each.opts for each in command.params)
    }

    assert with_json == {command.split()[0] for command in JSON_COMMANDS} | OTHER_JSON_COMMANDS == set(COMMAND_OUTPUTS)


def test_links_lead_somewhere() -> None:
    """Every relative link of README and pages is a file or folder of the repository."""
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_is_short_and_in_order() -> None:
    """What the tool answers comes before how accurate it is, and the text without tables and code is short."""
    text = README.read_text(encoding="utf-8")

    assert text.isascii()
    assert text.index("## Install") < text.index("## What it answers") < text.index("## How accurate")
    assert num_words(text) <= MOST_WORDS_OF_THE_README


def num_words(text: str) -> int:
    """Count the words of a page outside of its tables and code."""
    prose = re.sub(r"```.*?```|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", prose))


def test_decision_records_are_short() -> None:
    """Every decision record is read in two pages, without its tables."""
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    lengths = {page.name: num_words(page.read_text(encoding="utf-8")) for page in records}

    assert len(records) > 20
    assert {name: length for name, length in lengths.items() if length > MOST_WORDS_OF_A_RECORD} == {}


def test_words_of_tables_and_code_are_not_counted() -> None:
    """Three words of a sentence count; those of a table and of a block of code do not."""
    assert num_words("- one two three\n\n| a | b |\n|---|---|\n\n```\nfour five\n```\n") == 3


def load_script(name: str) -> ModuleType:
    """Import a script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figure_shows_the_prediction() -> None:
    """The curve in docs/figures/wave_cliffs.svg is today's, and it falls where the measured points do."""
    script: Any = load_script("draw_figures")
    picture = (ROOT / "docs" / "figures" / "wave_cliffs.svg").read_text(encoding="utf-8")
    points = re.search(rf"{script.DESCRIBED_BY}([0-9:. ]+)", picture)
    assert points is not None
    drawn = {int(n): float(rate) for n, rate in (point.split(":") for point in points[1].split())}
    widths, rates = script.predict_curve()

    assert list(drawn) == widths
    assert rates == pytest.approx(list(drawn.values()), rel=0.01), "run make figure"
    for n in (1536, 3072, 4608):
        assert drawn[n + 64] < drawn[n]
        assert script.MEASURED[n + 64] < script.MEASURED[n]


def test_gallery_shows_todays_numbers() -> None:
    """Curves, points, bars and cells of every other figure of the gallery are those that the script draws today."""
    script: Any = load_script("draw_figures")
    for name, draw in script.FIGURES.items():
        if name == "wave_cliffs":
            continue
        picture = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        found = re.search(rf"; {script.NUMBERS_ARE}([-+.e0-9 ]+)<", picture)
        assert found is not None, name
        drawn = [float(word) for word in found[1].split()]
        assert drawn == pytest.approx(script.drawn_numbers(draw()), rel=0.01), f"{name}: run make figure"


def test_gallery_is_small_and_whole() -> None:
    """The gallery shows every figure of the script, each file is on a page, and the folder stays small."""
    script: Any = load_script("draw_figures")
    figures = {path.stem: path for path in (ROOT / "docs" / "figures").glob("*.svg")}
    pages = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    shown = {name: set(re.findall(r"\(figures/(\w+)\.svg\)", text)) for name, text in pages.items()}

    assert set(script.FIGURES) == shown["gallery.md"]
    assert set(figures) == set().union(*shown.values())
    assert sum(path.stat().st_size for path in figures.values()) < MOST_FIGURE_BYTES


def test_changelog_has_each_group_once() -> None:
    """Each version has its headings at most once and in order, and no entry twice, as after a bad merge."""
    for version in text_of("CHANGELOG.md").split("\n## ")[1:]:
        groups = re.findall(r"^### (\w+)$", version, re.MULTILINE)
        entries = re.findall(r"^- .{40,}$", version, re.MULTILINE)

        assert groups == [name for name in ("Added", "Changed", "Fixed", "Removed") if name in groups]
        assert len(set(entries)) == len(entries)
