"""shapewright check: lint a shape, with the cost of each finding."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.console import echo, print_json, print_output, write_json_file
from shapewright.app.cli.defaults import default_ignored
from shapewright.app.cli.device_options import loss_law_option
from shapewright.app.cli.help_pages import GroupedCommand, set_next
from shapewright.app.cli.names import complete_rule
from shapewright.app.cli.options import question_options, scenario_from_options, software_option
from shapewright.app.cli.param_types import count_of
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options
from shapewright.core.errors import ConfigError

_EPILOG = """\b
Examples:
  shapewright check gpt3-2.7b --device a100-sxm-40gb
  shapewright check ./config.json --device h100-sxm-80gb --tp 8 --fail-on error
  shapewright check ./config.json --device h100-sxm-80gb --fix -o fixed.json
  shapewright check llama-3-8b --device h100-sxm-80gb --train-tokens 15t
  shapewright check - --device h100-sxm-80gb < ./config.json
  shapewright check llama-3-8b --device h100-sxm-80gb --format sarif > shapewright.sarif
  shapewright check my_model.py:build --inputs "tokens=int64[4,512]" --device h100-sxm-80gb --dtype bf16
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@click.option(
    "--train-tokens",
    type=count_of("tokens"),
    metavar="N",
    help="tokens of the run, after which losses of better shapes are compared (default: 20 per parameter)",
)
@loss_law_option
@software_option
@trace_options
@trace_config_option
@click.option(
    "--format",
    "form",
    type=click.Choice(("text", "json", "sarif")),
    default="text",
    show_default=True,
    help="output format",
)
@click.option("--json", "as_json", is_flag=True, help="same as --format json")
@click.option(
    "--fail-on",
    type=click.Choice(("info", "warning", "error", "never")),
    default="warning",
    show_default=True,
    help="lowest severity that makes the exit code 1",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="CODE",
    shell_complete=complete_rule,
    help="ignore a rule, by code, name or family; comma-separated or repeated",
)
@click.option("--fix", is_flag=True, help="apply the exact suggestions; needs -o")
@click.option("-o", "--output", metavar="FILE", help="output file of --fix, in the format of the input")
def command(
    config: str | None,
    device: str,
    software: str | None,
    train_tokens: int | None,
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
    from shapewright.lint.check import check_scenario, exit_code, fix_config

    if fix and not output:
        raise click.UsageError("--fix needs -o FILE: the input config is never overwritten")
    if output == "-":
        raise click.UsageError("-o needs a file name: standard output is used for the report")
    if as_json and form == "sarif":
        raise click.UsageError("--json and --format sarif cannot be combined; give one of them")
    if output and not fix:
        raise click.UsageError("-o has no effect without --fix")
    as_json = as_json or form == "json"
    codes = [*(part for entry in ignore for part in entry.split(",") if part), *default_ignored()]
    job = pop_traced_job(
        config,
        device,
        given,
        software=software,
        train_tokens=train_tokens is not None,
        fix=fix,
        format=form == "sarif",
    )
    if job is not None:
        from shapewright.app.report.traced.outputs import traced_check_output
        from shapewright.app.report.traced.report import print_traced_check
        from shapewright.lint.traced import check_trace

        traced = check_trace(job.trace, job.device, ignore=codes, optimizer=job.optimizer)
        print_output(traced_check_output(traced), print_traced_check, as_json=as_json)
        return exit_code(traced, fail_on)
    scenario = scenario_from_options(config, device, given, software=software)
    if fix and scenario.model.raw is None:
        raise ConfigError(
            "a model described by flags alone has no form to write back; start from a config.json or a preset"
        )
    report = check_scenario(scenario, ignore=codes, train_tokens=train_tokens)
    if report.prediction is None:
        set_next("check {job}" if report.assumed_changes else "rule", report.assumed_changes)
    elif scenario.workload.has_given_weights:
        set_next("memory {job}")
    if output:
        # Before the report, so that nothing is printed if it cannot be written.
        from shapewright.models.write import to_config_json

        fixed = fix_config(scenario.config, report)
        write_json_file(output, to_config_json(scenario.model, fixed))
        nothing = " (no exact suggestion to apply)" if fixed == scenario.config else ""
        echo(f"wrote {output}{nothing}", err=True)
    if form == "sarif":
        from shapewright.app.integrations.sarif import to_sarif
        from shapewright.models.write import locate_fields

        source = config if isinstance(config, str) else scenario.model.source
        print_json(to_sarif(report, source, locate_fields(scenario.model, source)))
    else:
        from shapewright.app.report.check import print_check
        from shapewright.app.report.outputs.check import check_output

        print_output(check_output(report, scenario), print_check, as_json=as_json)
    return exit_code(report, fail_on)
