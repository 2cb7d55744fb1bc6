"""Write the pages of docs/ that repeat what the code knows: commands, rules, devices, accuracy.

With --check nothing is written; the exit code says whether a page is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click
from accuracy_page import accuracy_page
from markdown_parts import DOCS, WRITTEN_BY, join_parts, markdown_table

from shapewright import errors
from shapewright.cli.main import cli
from shapewright.hardware import Device, list_devices, load_device
from shapewright.lint import list_rules
from shapewright.lint.rule import FAMILIES
from shapewright.report.devices import borrowed_records, calibration_words
from shapewright.units import TERA, format_bytes

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
# How far a lender is, shorter than perf.calibration says it.
_DISTANCES = {
    "architecture": "sibling",
    "generic": "another family",
    "distant": "two generations",
    "foreign": "another maker or link",
}


def main() -> int:
    """Write the pages, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the pages")
    arguments = parser.parse_args()
    pages = {"commands.md": commands(), "rules.md": rules(), "devices.md": devices(), "accuracy.md": accuracy_page()}
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
        "`shapewright COMMAND --help` says the same, and lists every option with its default.",
    ]
    shared: list[click.Parameter] = []
    for path, command in walk(cli):
        usage = " ".join(["shapewright", *path.split()])
        own = [parameter for parameter in command.params if getattr(parameter, "group", "") not in SHARED_GROUPS]
        shared = shared or [parameter for parameter in command.params if parameter not in own]
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
        "One for each field; [notation](notation.md) has letters and defaults.",
        markdown_table(["option", "meaning"], [record for parameter in shared if (record := option_row(parameter))]),
        "## Exit codes",
        "0: fine. 1: what was asked for is not so: findings at or above `--fail-on`, no way to serve inside the "
        "limits, a table that could not be judged, a damaged store. 2: bad input, with one line on standard error. "
        "130: stopped.",
        "## Errors",
        "Each is one line that says what is wrong, what was given, what is allowed and what to do. In Python they are "
        "the classes of `shapewright.errors`, all of them `ValueError`s.",
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
    """The hierarchy as errors.py draws it."""
    lines = (errors.__doc__ or "").splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines if line.startswith("    "))


def rules() -> str:
    """All rules by family."""
    listed = list_rules()
    parts = [
        "# Rules",
        WRITTEN_BY,
        f"{len(listed)} rules. `shapewright rule CODE` prints a rule's page: what it does, why it is slow, an example, "
        "what to use instead, how safe the fix is, when it does not matter. `--ignore` with a code, a name or a family "
        "leaves rules out. Severity follows the predicted cost: a violation that costs nothing stays quiet.",
    ]
    for family, title in FAMILIES.items():
        rows = [
            [
                f"[{rule.code}](../src/shapewright/lint/rules/{rule.name.replace('-', '_')}.py)",
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
                calibration_words(device),
                _lenders(device),
            ]
        )
    parts = [
        "# Devices",
        WRITTEN_BY,
        "Dense rates. Every number has its source in the device's file; `shapewright devices show NAME` prints them. "
        "*Measured* says which kinds of operation were measured, *borrows from* whose record prices others, how far "
        "off: a chip with the same multiprocessors comes before one whose architecture has the same name "
        "([rules](decisions/0013-strangers.md#a-device-that-nobody-measured)). Pointwise ones are A100's everywhere.",
        markdown_table(list(_DEVICE_COLUMNS), rows),
    ]
    return join_parts(parts)


def _lenders(device: Device) -> str:
    """Whose records price what was not measured on a device, most kinds first; pointwise ones are alike for all."""
    kinds: dict[str, list[str]] = {}
    for kind, lender in borrowed_records(device).items():
        if kind != "pointwise":
            kinds.setdefault(f"{lender['device']} ({_DISTANCES[lender['distance']]})", []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(own)}: {lender}" for lender, own in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
