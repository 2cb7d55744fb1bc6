"""Write the pages of docs/ that repeat what the code knows: commands, rules, devices, accuracy.

With --check nothing is written; the exit code says whether a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

from shapewright import errors
from shapewright.cli.main import cli
from shapewright.hardware import list_devices, load_device
from shapewright.lint import list_rules
from shapewright.lint.rule import FAMILIES
from shapewright.perf.calibration import RECORD_KINDS, CalibrationRecord, load_record
from shapewright.perf.software import load_software, software_names
from shapewright.report.devices import calibration_words
from shapewright.units import TERA, format_bytes

DEFAULT_TARGET = Path(__file__).parent.parent / "docs"
WRITTEN_BY = "<!-- Written by scripts/write_pages.py; run `make docs` after a change. -->"
# Where the options of the model and its workload are described, field by field.
SHARED_GROUPS = {"workload", "layout", "model"}


def main() -> int:
    """Write the pages, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    parser.add_argument("--output", type=Path, default=DEFAULT_TARGET, help="folder of the pages")
    arguments = parser.parse_args()
    pages = {"commands.md": commands(), "rules.md": rules(), "devices.md": devices(), "accuracy.md": accuracy()}
    stale = 0
    for name, text in pages.items():
        path = arguments.output / name
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale; run make docs", file=sys.stderr)
            stale = 1
    return stale


def markdown_table(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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
        "0: fine. 1: findings at or above `--fail-on`. 2: bad input, with one line on standard error. 130: stopped.",
        "## Errors",
        "Each is one line that says what is wrong, what was given, what is allowed and what to do. In Python they are "
        "the classes of `shapewright.errors`, all of them `ValueError`s.",
        "```\n" + error_tree() + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


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
    return "\n\n".join(parts) + "\n"


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
                f"{device.memory_bandwidth_bytes_per_s / TERA:.2f}",
                calibration_words(device),
            ]
        )
    parts = [
        "# Devices",
        WRITTEN_BY,
        "Dense rates. Every number has its source in the device's file; `shapewright devices show NAME` prints them. "
        "*Measured* says which kinds of operation were measured on it; other kinds borrow a sibling's record.",
        markdown_table(["name", "architecture", "16-bit TFLOP/s", "fp8 TFLOP/s", "memory", "TB/s", "measured"], rows),
    ]
    return "\n\n".join(parts) + "\n"


def accuracy() -> str:
    """Errors of every calibration record on rows that its fit did not see."""
    rows = []
    for fact in accuracy_facts():
        errors_shown = [f"{100.0 * fact[key]:.1f} %" for key in ("mean", "median", "p90")]
        rows.append(
            [fact["operation"], fact["device"], fact["section"], f"{fact['rows']:,}", *errors_shown, fact["date"]]
        )
    for name in software_names():
        if (provenance := load_software(name).provenance) and (report := provenance["reports"]["held out"]):
            shown = [f"{100.0 * report[f'{key}_absolute_error']:.1f} %" for key in ("mean", "median", "p90")]
            rows.append(["training step", "all", name, f"{report['rows']:,}", *shown, provenance["date"]])
    commands_used = {fact["command"].partition(" --device")[0] for fact in accuracy_facts()}
    commands_used |= {"python scripts/calibrate_software.py --data DIR", results()["command"]}
    commands_used |= {"python scripts/calibrate_intervals.py --data DIR"}
    records = [*measured_records("gemm"), *measured_records("attention")]
    learned = [record.residual for record in records if record.residual]
    commands_used |= {residual["command"].partition(" --device")[0] for residual in learned}
    parts = [
        "# Accuracy",
        WRITTEN_BY,
        "## Against the bars of the project",
        f"Judged on {results()['date']}. *Bar* is what was to be reached, *aim* what was hoped for. Rows that a fit "
        "saw are counted in the intervals alone.",
        markdown_table(
            ["what", "judged on", "bar", "aim", "reached"],
            [[row[key] for key in ("what", "judged_on", "bar", "aim", "reached")] for row in results()["bars"]],
        ),
        "What was tried, what fell short and why stands in the decisions: "
        "[whole steps](decisions/0002-adding-up-a-step.md), [GEMMs](decisions/0003-gemm-calibration.md), "
        "[attention, pointwise operations, collectives](decisions/0004-attention-pointwise-collectives.md), "
        "[experts](decisions/0007-moe.md). Tests hold left-out errors to `tests/accuracy/limits.toml`, whose limits "
        "only tighten; `make drift` shows how far predictions moved.",
        "## Every table, all rows",
        "As `shapewright accuracy DIR --regret` judges it, devices, formats and libraries together; roofline is the "
        "mean error of max(FLOPs / peak, bytes / bandwidth), regret how much slower than the best of its size the "
        "shape is that would be chosen (p90 over sizes).",
        markdown_table(
            ["table", "rows", "mean", "median", "p90", "Kendall tau", "covered", "roofline", "regret p90"],
            [_table_cells(row) for row in results()["tables"]],
        ),
        "## Intervals",
        "How many measurements lie inside the 90 % interval, and how wide it is (mean ln(high / low)): all rows, which "
        "a fit mostly saw; rows that none saw; and each device priced as if nobody had measured it, with intervals of "
        "the other devices alone (least and mean of the devices). Cells are those of device, format and library with "
        "200 rows and more, inside 85 to 95 %. Which residuals make an interval, and what stays outside: "
        "[intervals](decisions/0012-intervals.md).",
        markdown_table(
            [
                "table",
                "covered",
                "width",
                "cells inside",
                "unseen rows",
                "covered",
                "width",
                "cells inside",
                "below 20 us",
                "above 1 ms",
                "device left out",
            ],
            [_coverage_cells(facts) for facts in results()["coverage"]],
        ),
        "Cells outside: "
        + "; ".join(
            f"{facts['table']} {cell} {100.0 * share:.0f} %"
            for facts in results()["coverage"]
            for cell, share in facts["outside"].items()
        )
        + ".",
        "## Where the residuals are",
        "\n\n".join(
            f"![{path.stem.replace('_', ' ')}](figures/{path.name})"
            for path in sorted((DEFAULT_TARGET / "figures").glob("residuals_*.svg"))
        ),
        "Products, attention and expert blocks: rows that no fit saw, each library by its own section. Collectives and "
        "pointwise operations: all rows. Short times err most: below 10 us a kernel is its start, and two collections "
        "of the same shape differ by 2 to 10 %. Odd sizes err two to four times as much as aligned ones on A100 and "
        "V100. Decode beyond a millisecond errs by Hopper's heads of 512 and B200's triton kernels, which few layouts "
        "taught.",
        "## Calibration records",
        "Absolute percentage error of predicted against measured time, on rows that the fit did not see: whole (n, k) "
        "shapes of GEMMs, whole layouts of expert blocks (each fifth of them left out in turn), whole head layouts of "
        "attention, whole (operation, group, message) cells of collectives, one whole model of pointwise operations, "
        "whole models of training software. Splits and what is assumed are in the decisions "
        "([GEMMs](decisions/0003-gemm-calibration.md) first), sources and "
        "licences of the data in the README.",
        markdown_table(["operation", "device", "section", "rows", "mean", "median", "p90", "fitted"], rows),
        "Attention in 16 bits, all kernels that price models together. A device has 3 to 16 unseen layouts, and which "
        "ones they are moves its error by a point or two; beside it the mean over every layout, left out of the trees "
        "in turn (the formulas' few constants saw most of them).",
        markdown_table(
            ["device", "phase", "unseen layouts", "rows", "mean", "median", "p90", "rows left out in turn", "mean"],
            [_attention_cells(fact) for fact in results()["attention"]],
        ),
        "Reproduce, with the measured tables in DIR:",
        "```\n" + "\n".join(sorted(commands_used)) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


@cache
def results() -> dict[str, Any]:
    """What scripts/write_accuracy_results.py found."""
    content: dict[str, Any] = json.loads((DEFAULT_TARGET / "accuracy_results.json").read_text(encoding="utf-8"))
    return content


def _table_cells(row: dict[str, Any]) -> list[str]:
    """One judged table; a figure that it lacks stays empty."""
    shares = [row[key] for key in ("mean", "median", "p90", "coverage_90", "roofline", "regret_p90")]
    mean, median, p90, covered, roofline, regret = (
        "" if share is None else f"{100.0 * share:.1f} %" for share in shares
    )
    tau = "" if row["kendall_tau"] is None else f"{row['kendall_tau']:.3f}"
    return [row["table"], f"{row['rows']:,}", mean, median, p90, tau, covered, roofline, regret]


def _coverage_cells(facts: dict[str, Any]) -> list[str]:
    """Intervals of one table."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100.0 * share:.0f} %"

    def inside(number: int, count: int) -> str:
        return f"{number} of {count}" if count else ""

    unseen, devices = facts["unseen"], list((facts["left_out"] or {}).values())
    cells = [facts["table"], percent(facts["covered"]), f"{facts['width']:.2f}"]
    cells.append(inside(facts["cells"] - len(facts["outside"]), facts["cells"]))
    if unseen:
        cells += [f"{unseen['rows']:,}", percent(unseen["covered"]), f"{unseen['width']:.2f}"]
        cells += [inside(unseen["cells_inside"], unseen["cells"])]
        cells += [percent(unseen[name]) for name in ("below 20 us", "above 1 ms")]
    else:
        cells += [""] * 6
    mean = sum(devices) / len(devices) if devices else None
    return [*cells, f"{percent(min(devices))}, {percent(mean)}" if devices else ""]


def _attention_cells(fact: dict[str, Any]) -> list[str]:
    """Errors of attention on one device in one phase."""
    shares = [f"{100.0 * fact[key]:.1f} %" for key in ("mean", "median", "p90")]
    counts = [f"{fact[key]:,}" for key in ("layouts", "rows")]
    return [
        fact["device"],
        fact["phase"],
        *counts,
        *shares,
        f"{fact['in_turn']['rows']:,}",
        f"{100.0 * fact['in_turn']['mean']:.1f} %",
    ]


def accuracy_facts() -> list[dict[str, Any]]:
    """Held-out errors that the records carry, one entry per record and section."""
    facts = []
    for kind in RECORD_KINDS:
        for record in measured_records(kind):
            origin = record.provenance
            for section, report, is_part in held_out_reports(origin):
                borrower = section.removeprefix("without ")
                is_borrower = borrower in list_devices()
                facts.append(
                    {
                        "operation": kind,
                        "device": borrower if is_borrower else record.device,
                        "section": "around the paper's products, other hidden sizes" if is_borrower else section,
                        "rows": report["rows"],
                        "is_part": is_part,
                        "mean": report.get("mean_ape", report.get("mean_absolute_error")),
                        "median": report.get("median_ape", report.get("median_absolute_error")),
                        "p90": report.get("p90_ape", report.get("p90_absolute_error")),
                        "date": origin["date"],
                        "command": origin["command"],
                    }
                )
    return facts


def measured_records(kind: str) -> list[CalibrationRecord]:
    """Records of a kind, each once."""
    found = (load_record(kind, load_device(name)) for name in list_devices())
    return sorted({record.id: record for record in found if record.transfer == "exact"}.values(), key=lambda it: it.id)


def held_out_reports(origin: Any) -> Iterator[tuple[str, Any, bool]]:
    """Reports on held-out rows: section, report, and whether its rows are part of another section's."""
    for name, section in origin.get("sections", {}).items():
        yield name, section["held_out"], False
        yield from ((f"{name}, {library}", report, True) for library, report in section.get("libraries", {}).items())
        if "held_out" in section.get("alignment", {}):
            yield f"{name}, odd sizes", section["alignment"]["held_out"], False
    for name, report in origin.get("reports", {}).items():
        if name == "held_out":
            yield "inside a node", report, False
        elif name.startswith("held out "):
            yield f"without {name.removeprefix('held out ')}", report, False
        elif report.get("held_out"):
            yield name.replace("/main", ""), report["held_out"], False


if __name__ == "__main__":
    sys.exit(main())
