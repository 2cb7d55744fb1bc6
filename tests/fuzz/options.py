"""Hostile command lines: those that people type, with options added, dropped and given odd values."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import click

from command_line import COMMANDS, examples
from shapewright.app.cli.main import main
from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import list_devices
from shapewright.models.read import list_presets

REGRESSION = Path(__file__).parents[1] / "regression"
ATTACKED = ("mfu", "serve-plan", "search", "design", "plan")
# Jobs that no other test types, for the commands with few lines in the regression tables.
LINES = (
    "mfu gpt2 --device a100-sxm-40gb --seconds 0.5 --gpus 1 --micro-batch-size 4 --attention flash",
    "mfu mixtral-8x7b --device h100-sxm-80gb --tokens-per-s 90000 --gpus 64 --tp 2 --ep 4 --dp 32 --recompute full",
    "mfu vit-l-16 --device a100-sxm-40gb --images-per-s 2000 --gpus 8 --dp 8 --micro-batch-size 32 --oneline",
    "mfu llama-3-8b --device mi300x --steps-per-s 0.2 --gpus 8 --finetune lora --lora-rank 8 --zero-stage 3 --dp 8",
    "design --params 124m --train-tokens 2b --gpus 1 --device a100-sxm-40gb --top 2",
    "design --params 500m --hours 24 --gpus 8 --device h100-sxm-80gb --family llama --seq-len 2048 --top 2",
    "design --params 1b --usd 5000 --usd-per-hour 2 --gpus 16 --device mi300x --global-batch-tokens 1m --headroom 5%",
    "design --params 350m --train-tokens 20b --gpus 4 --device l40s --format torchtitan-toml --strict",
)
# Numbers, sizes, shares, durations, rates, lists, sweeps, paths and texts.
ODD = (
    "", " ", "0", "-0", "-1", "1", "2", "3", "7", "1.5", "+8", " 8", "8 ", "1_000", "0x10", "1e3", "1e308", "-1e308",
    "1e999", "1e-308", "nan", "-nan", "inf", "-inf", "infinity", "4097", "65536", "2147483648", "9223372036854775807",
    "9223372036854775808", "1" + "0" * 308, "9" * 5000, "100%", "0%", "-5%", "101%", "1e308%", "nan%", "1k", "5m", "8b",
    "1e300t", "0b", "1.5.5", "500ms", "0s", "-1s", "1e308s", "nans", "5/s", "0/s", "1e308/s", "1,2", ",", "1,,2",
    "1,2,", "a,b", "1:2:3", ":", "uniform:1,2", "uniform:5,1", "uniform:nan,5", "normal:100,1e308", "normal:-5,0",
    "lognormal:0,0", "lognormal:1e308,1e308", "geometric:0", "geometric:1e308", "100=0.5,200=0.5", "100=0,200=0",
    "100=nan", "mean:700", "mean:0", "bf16", "fp8", "fp4", "BF16", "fp8:fp8:fp8", "bf16:", "::::", "int4", "tf32",
    "heads=16", "heads=", "=16", "heads=16=16", "hidden_size=4096", "ep=1,2,4", "tp=0", "depth=1e308", "sp=maybe",
    "heads,ffn,vocab", "true", "false", "True", "none", "None", "null", "[]", "{}", "{", "llama-3-8b", "gpt2", "gtp2",
    "h100-sxm-80gb", "h100", "x", "é", "\u0664\u0660", "\u202e8", "\x1b[31m8", "8\n", "\t8", "a\nb", "\0", "\ud800",
    "'", '"', "`id`", "$(id)", "%s%n", "{0}", "{x.__class__}", "[bold]", "-", "--", "--json", "-h", "a" * 3000, "../x",
    "nope/x.json", "/dev/null", "/proc/self/mem", "/", ".", "file:///etc/passwd", "http://[", "~", "*",
)  # fmt: skip
# Where a command may write: these stay in the working directory, or cannot be written.
OUTPUTS = ("out", "out/", "out.html", ".", "", "-", "\0", "a\nb", "\ud800", "nope/x", "/dev/null", "/proc/x", "a" * 300)
WRITTEN = {"output", "html", "experiments"}
# What starts a measurement on this machine, a cluster, or a file of Python, or prints a traceback where it is asked to.
LEFT_OUT = {"verify", "verify_budget", "engine", "address", "inputs", "fused", "value", "time_limit", "traceback"}


def list_options(command: str) -> dict[str, click.Option]:
    """Options of a command that are attacked, by each of their spellings."""
    return {
        spelling: option
        for option in COMMANDS[command].params
        if isinstance(option, click.Option) and option.name not in LEFT_OUT
        for spelling in (*option.opts, *option.secondary_opts)
    }


@cache
def typed_lines() -> dict[str, list[list[str]]]:
    """Command lines of the regression tables, of help pages and of this file, by command."""
    rows = [line for path in sorted(REGRESSION.glob("*.tsv")) for line in path.read_text("utf-8").splitlines()[1:]]
    texts = [
        *LINES,
        *(row.partition("\t")[0] for row in rows),
        *(each.removeprefix("shapewright ") for each in examples()),
    ]
    lines: dict[str, list[list[str]]] = {}
    for text in texts:
        words = shlex.split(text)
        lines.setdefault(words[0], []).append(words)
    return lines


@cache
def typed_values() -> dict[str, list[str]]:
    """Values that are typed after each option anywhere."""
    found: dict[str, set[str]] = {}
    for words in (words for lines in typed_lines().values() for words in lines):
        for option, value in pairwise(words):
            if option.startswith("-") and not value.startswith("--"):
                found.setdefault(option, set()).add(value)
    return {option: sorted(values) for option, values in found.items()}


def choose_value(option: click.Option, spelling: str, chance: Random) -> str:
    """A value that belongs to the option, to another one, or to none."""
    if option.name in WRITTEN:
        return chance.choice(OUTPUTS)
    own = [*typed_values().get(spelling, ()), *getattr(option.type, "choices", ())]
    if own and chance.random() < 0.6:
        return chance.choice(own)
    if option.name == "device" and chance.random() < 0.7:
        return chance.choice(list_devices())
    if chance.random() < 0.15:
        return chance.choice(chance.choice(sorted(typed_values().values())))
    return chance.choice(ODD)


def make_line(chance: Random) -> bytes:
    """A command line with some options added, dropped, doubled, or given another value."""
    command = chance.choice(ATTACKED)
    options = list_options(command)
    words = list(chance.choice(typed_lines()[command]))
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        places = [place for place, word in enumerate(words[:-1]) if word in options and not options[word].is_flag]
        way = chance.random()
        if way < 0.35 and places:
            place = chance.choice(places)
            words[place + 1] = choose_value(options[words[place]], words[place], chance)
        elif way < 0.45 and places:
            place = chance.choice(places)
            del words[place : place + 2]
        elif way < 0.5 and len(words) > 1 and command != "design":
            words[1] = chance.choice((*ODD, *list_presets()))
        else:
            spelling = chance.choice(sorted(options))
            option = options[spelling]
            words += [spelling] if option.is_flag else [spelling, choose_value(option, spelling, chance)]
    return json.dumps(words).encode()


def refuse_constant(name: str) -> Any:
    """Fail on NaN and infinities."""
    raise AssertionError(f"{name} in the output")


def use_line(path: Path, _chance: Random) -> None:
    """Run the command line in an empty folder: an answer, or one line on standard error and exit code 2.

    Raises:
        ShapewrightError: with the line.
    """
    words = json.loads(path.read_bytes())
    output, errors = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
    text = errors.getvalue()
    assert code in (0, 1, 2), f"exit code {code}"
    assert "Traceback" not in text
    if code == 2:
        assert text.endswith("\n")
        assert not output.getvalue(), "output beside a refusal"
        raise ShapewrightError(text[:-1].removeprefix("shapewright: "))
    if not any("nan" in word.lower() for word in words):
        assert not re.search(r"\bnan\b", output.getvalue().lower())
    if "--json" in words and output.getvalue().startswith("{"):
        json.loads(output.getvalue(), parse_constant=refuse_constant)
