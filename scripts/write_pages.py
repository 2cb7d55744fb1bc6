"""Generate the reference pages of docs/: commands, rules, devices, accuracy, JSON output, notation.

With --check nothing is written; the exit code says whether a page is stale.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

import click
from accuracy_page import accuracy_page
from json_page import json_page, schema_file
from markdown_parts import DOCS, WRITTEN_BY, join_parts, markdown_table

from shapewright.app.cli.main import cli
from shapewright.app.report.outputs.catalogue import borrowed_records, describe_calibration
from shapewright.core import errors
from shapewright.core.fields import FieldDoc, documented_fields
from shapewright.core.units import TERA, format_bytes
from shapewright.hardware.device import Device
from shapewright.hardware.loader import list_devices, load_device
from shapewright.lint.rule import FAMILIES, Rule, list_rules
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# Where the options of the model and its workload are described, field by field.
SHARED_GROUPS = {"workload", "layout", "model"}

_DEVICE_COLUMNS = (
    "name",
    "architecture",
    "16-bit TFLOP/s",
    "fp8 TFLOP/s",
    "memory",
    "TB/s",
    "measured",
    "borrows from",
)
# Distance of a calibration donor, in shorter words than in other reports.
_DISTANCES = {
    "architecture": "sibling",
    "generic": "other chip family",
    "distant": "two generations apart",
    "foreign": "other vendor or link",
}
_NOTATION = """\
Fields are spelled as Hugging Face spells them where that is unambiguous. Symbols are the letters of arXiv 2401.14489
where it has one, and appear in formulas only. In the GEMM C[m,n] = A[m,k] B[k,n] the contracted dimension is `k`, as
in BLAS; the paper writes `n` for it.

Quantities are in SI base units and say so in their suffix: `_s`, `_bytes`, `_flops` (an amount), `_flops_per_s` (a
rate), `_bytes_per_s`, `_hz`, `_watts`; `num_` begins a count and `_fraction` ends a number from 0 to 1.

Fields that flags can set are listed. `patches` and `vision` of a model (its image side, and the tower whose tokens a
language model reads) come from a config.json alone: [images](guides/images.md)."""

_NOTATION_SECTIONS = (
    ("The model: `TransformerConfig`", TransformerConfig),
    ("What is run: `Workload`", Workload),
    ("How it is spread: `ParallelLayout`", ParallelLayout),
)


def is_shared(parameter: click.Parameter) -> bool:
    """Whether an option sets a field of the model, workload or layout."""
    group: str = getattr(parameter, "group", "")
    return group.partition(",")[0] in SHARED_GROUPS


def main() -> int:
    """Write the pages, or compare them with their current content."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the pages")
    arguments = parser.parse_args()
    pages = {
        "commands.md": commands(),
        "rules.md": rules(),
        "devices.md": devices(),
        "accuracy.md": accuracy_page(),
        "json.md": json_page(),
        "json-schema.json": schema_file(),
        "notation.md": notation(),
    }
    stale = 0
    for name, text in pages.items():
        path = arguments.output / name
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale; run make docs", file=sys.stderr)
            stale = 1
    return stale


def commands() -> str:
    """Every command with its own options and examples, the options that two share, exit codes, errors."""
    parts = [
        "# Commands",
        WRITTEN_BY,
        "`shapewright COMMAND --help` prints the options used most, `--help-all` every one with its default.",
    ]
    shared: list[click.Parameter] = []
    for path, command in walk(cli):
        usage = " ".join(["shapewright", *path.split()])
        own = [parameter for parameter in command.params if not is_shared(parameter)]
        fields = [parameter for parameter in command.params if is_shared(parameter)]
        shared = max(shared, fields, key=len)
        parts += [f"## {usage}", " ".join((command.help or "").partition("\f")[0].split())]
        rows = [record for parameter in own if (record := option_row(parameter))]
        if rows:
            parts.append(markdown_table(["option", "meaning"], rows))
        if len(own) < len(command.params):
            parts.append("And the options of model, workload and layout, below.")
        examples = [
            line.strip() for line in (command.epilog or "").splitlines() if line.strip().startswith("shapewright")
        ]
        if examples:
            parts.append("```\n" + "\n".join(examples) + "\n```")
    parts += [
        "## Options of model, workload and layout",
        "One for each field; [notation](notation.md) has symbols and defaults.",
        markdown_table(["option", "meaning"], [record for parameter in shared if (record := option_row(parameter))]),
        "## Defaults",
        "Without `--device`, the device is that of the variable `SHAPEWRIGHT_DEVICE`, else of `[tool.shapewright]` in "
        "the pyproject.toml of the repository (or of the working directory outside of one), else the first GPU that "
        "nvidia-smi reports. The output says which. A name that several boards share is the usual one, with a note: "
        "`h100` is the SXM board with 80 GB.",
        '```toml\n[tool.shapewright]\ndevice = "h100-sxm-80gb"   # or the path of a device file\n'
        "layout = { tp = 8, zero_stage = 1 }   # where the flags do not give them; not for plans\n"
        'ignore = ["TC103"]   # rules that check ignores\n```',
        "CONFIG `-` reads a config.json from standard input. `NO_COLOR` and `FORCE_COLOR` decide on colour in pipes.",
        "## Completion",
        "Names of commands, options, devices, presets, software and rules are completed in bash, zsh and fish:",
        '```\neval "$(_SHAPEWRIGHT_COMPLETE=bash_source shapewright)"    # in ~/.bashrc\n'
        'eval "$(_SHAPEWRIGHT_COMPLETE=zsh_source shapewright)"     # in ~/.zshrc\n'
        "_SHAPEWRIGHT_COMPLETE=fish_source shapewright | source     # in ~/.config/fish/config.fish\n```",
        "## Exit codes",
        "0: success. 1: negative result: findings at or above `--fail-on`, no way to serve within the limits, a table "
        "that could not be evaluated, a damaged store. 2: bad input, one line on standard error. 130: interrupted.",
        "## Errors",
        "Each is one line with the problem, the given value, the allowed values and a remedy. In Python they are "
        "the classes of `shapewright.core.errors`, all of them `ValueError`s.",
        "```\n" + error_tree() + "\n```",
    ]
    return join_parts(parts)


def walk(group: click.Group, path: str = "") -> list[tuple[str, click.Command]]:
    """Commands with their paths, in the order of --help."""
    context = click.Context(group)
    found: list[tuple[str, click.Command]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((f"{path} {name}".strip(), command))
        if isinstance(command, click.Group):
            found += walk(command, f"{path} {name}".strip())
    return found


def option_row(parameter: click.Parameter) -> list[str] | None:
    """Flags and meaning of an option; None for a positional argument."""
    if not isinstance(parameter, click.Option):
        return None
    flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    choices = f" ({', '.join(parameter.type.choices)})" if isinstance(parameter.type, click.Choice) else ""
    return [flags, f"{parameter.help or ''}{choices}"]


def error_tree() -> str:
    """The hierarchy from the docstring of errors.py."""
    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))


def module_path(rule: Rule) -> str:
    """Path of a rule's module, from the folder of the package."""
    module = inspect.getmodule(rule.check)
    assert module
    return module.__name__.partition(".")[2].replace(".", "/") + ".py"


def rules() -> str:
    """All rules by family."""
    listed = list_rules()
    parts = [
        "# Rules",
        WRITTEN_BY,
        f"{len(listed)} rules. `shapewright rule CODE` prints a rule's page: what it does, why it is slow, an example, "
        "what to use instead, how safe the fix is, when it does not matter. `--ignore` with a code, a name or a family "
        "suppresses rules. Severity follows the predicted cost: a violation without cost is not reported.",
    ]
    for family, title in FAMILIES.items():
        rows = [
            [
                f"[{rule.code}](../src/shapewright/{module_path(rule)})",
                f"`{rule.name}`",
                rule.summary,
            ]
            for rule in listed
            if rule.code.startswith(family)
        ]
        parts += [f"## {family}: {title}", markdown_table(["code", "name", "what it finds"], rows)]
    return join_parts(parts)


def devices() -> str:
    """All devices."""
    rows = []
    for name in list_devices():
        device = load_device(name)
        rates = device.dense_flops_per_s
        sixteen = rates.get("bf16", rates.get("fp16"))
        rows.append(
            [
                f"[{name}](../src/shapewright/hardware/data/{name}.toml)",
                device.architecture,
                f"{sixteen / TERA:,.0f}" if sixteen else "",
                f"{rates['fp8'] / TERA:,.0f}" if "fp8" in rates else "",
                format_bytes(device.memory_bytes),
                f"{device.memory_bandwidth_bytes_per_s / TERA:,.2f}",
                describe_calibration(device),
                _donors(device),
            ]
        )
    parts = [
        "# Devices",
        WRITTEN_BY,
        "Dense rates; `shapewright devices show NAME` prints every number with its source. *Measured* lists the "
        "operations with a calibration of their own; for all others, *borrows from* names the calibration donor and "
        "its distance ([selection](decisions/0013-unmeasured-devices.md)). Pointwise operations use the A100's "
        "calibration everywhere.",
        markdown_table(list(_DEVICE_COLUMNS), rows),
    ]
    return join_parts(parts)


def _donors(device: Device) -> str:
    """Calibration donors of a device, for all kinds of operation but pointwise ones."""
    kinds: dict[str, list[str]] = {}
    for kind, donor in borrowed_records(device).items():
        if kind != "pointwise":
            kinds.setdefault(f"{donor.device} ({_DISTANCES[donor.distance]})", []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(own)}: {donor}" for donor, own in kinds.items())


def notation() -> str:
    """Every field that a flag can set: symbol, meaning, default."""
    parts = ["# Notation", WRITTEN_BY, _NOTATION]
    for title, cls in _NOTATION_SECTIONS:
        rows = [_field_row(spec, doc) for spec, doc in documented_fields(cls)]
        parts += [f"## {title}", markdown_table(["field", "symbol", "meaning", "default"], rows)]
    return join_parts(parts)


def _field_row(spec: Field[Any], doc: FieldDoc) -> list[str]:
    choices = "; one of " + ", ".join(f"`{choice}`" for choice in doc.choices) if doc.choices else ""
    default = "" if spec.default in (None, "", ()) else f"`{spec.default}`"
    return [
        f"`{spec.name}`",
        f"`{doc.symbol}`" if doc.symbol else "",
        doc.help + choices,
        "required" if spec.default is MISSING else default,
    ]


if __name__ == "__main__":
    sys.exit(main())
