"""shapewright check: lint with prices."""

from __future__ import annotations

from typing import Any

import click

from shapewright.cli.console import make_console, print_json, write_json_file
from shapewright.cli.options import GroupedCommand, ask_from_options, question_options, software_option
from shapewright.errors import ConfigError

_EPILOG = """\b
Examples:
  shapewright check gpt3-2.7b --device a100-sxm-40gb
  shapewright check ./config.json --device h100-sxm-80gb --tp 8 --fail-on error
  shapewright check ./config.json --device h100-sxm-80gb --fix -o fixed.json
  shapewright check llama-3-8b --device h100-sxm-80gb --format sarif > shapewright.sarif
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json", "sarif")),
    default="text",
    show_default=True,
    help="form of the report",
)
@click.option("--json", "as_json", is_flag=True, help="same as --format json")
@click.option(
    "--fail-on",
    type=click.Choice(("info", "warning", "error", "never")),
    default="warning",
    show_default=True,
    help="least severity that makes the exit code 1",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODE",
    help="leave out a rule, by code, name or family; may be given again, or comma-separated",
)
@click.option("--fix", is_flag=True, help="apply the exact suggestions; needs -o")
@click.option("-o", "--output", metavar="FILE", help="where --fix writes the config, in the form it was read")
def command(
    config: str | None,
    device: str,
    uncalibrated: bool,
    software: str,
    form: str,
    as_json: bool,
    fail_on: str,
    ignore: tuple[str, ...],
    fix: bool,
    output: str | None,
    **given: Any,
) -> int:
    """Find what is wrong with CONFIG's shape on a device, what it costs, and what to use instead.

    Exit code 0: nothing at or above --fail-on; 1: findings; 2: bad input.
    """
    from shapewright.lint import check_model, exit_code, fix_config, to_json, to_sarif

    if fix and not output:
        raise click.UsageError("--fix needs -o FILE: the config that was read is never overwritten silently")
    if output == "-":
        raise click.UsageError("-o needs a file name: standard output carries the report")
    if as_json and form == "sarif":
        raise click.UsageError("--json and --format sarif contradict each other: give one of them")
    if output and not fix:
        raise click.UsageError("-o has no effect without --fix")
    question = ask_from_options(config, device, given, uncalibrated=uncalibrated, software=software)
    if fix and question.model.raw is None:
        raise ConfigError(
            "a model described by flags alone has no form to write back; start from a config.json or a preset"
        )
    codes = [part for entry in ignore for part in entry.split(",") if part]
    report = check_model(question.config, **question.terms, ignore=codes)
    if output:
        # Before the report: if it cannot be written, nothing else is said.
        from shapewright.config import write_back

        fixed = fix_config(question.config, report)
        write_json_file(output, write_back(question.model, fixed))
        nothing = " (no exact suggestion to apply)" if fixed == question.config else ""
        click.echo(f"wrote {output}{nothing}", err=True)
    form = "json" if as_json else form
    if form == "json":
        from shapewright.report.question_json import question_to_json

        print_json({**to_json(report), **question_to_json(question)})
    elif form == "sarif":
        from urllib.parse import quote

        print_json(to_sarif(report, quote(config or "flags")))
    else:
        from shapewright.report.check_text import print_check

        print_check(report, make_console(), notes=question.notes)
    return exit_code(report, fail_on)
