"""shapewright check-files: check the config files of a commit or a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from shlex import join
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import make_console, refuse_unwritable, write_json_file, write_text_file
from shapewright.app.cli.defaults import default_ignored, default_layout
from shapewright.app.cli.device_options import device_option, named_device
from shapewright.app.cli.help_pages import GroupedCommand, set_next
from shapewright.app.cli.param_types import SHARE
from shapewright.app.report.flags import SHORT_FLAGS, field_named, flag_of

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.prediction.scenario import Scenario

_EPILOG = """\b
Examples:
  shapewright check-files config.json --device h100-sxm-80gb --fail-above 5%
  shapewright check-files config.json --device h100-sxm-80gb --set tp=2 --sarif shapewright.sarif --comment pr.md
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("files", nargs=-1)
@device_option
@click.option(
    "--fail-above",
    type=SHARE,
    default="2%",
    show_default=True,
    help="predicted cost of a shape, as a share of the step, above which the exit code is 1",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="field of the workload or layout for all files, such as tp=8 or dtype=fp8; may be repeated",
)
@click.option("--ignore", multiple=True, metavar="CODE", help="ignore a rule, by code, name or family")
@click.option("--sarif", metavar="FILE", help="write the findings of all files as SARIF 2.1.0")
@click.option("--comment", metavar="FILE", help="write a comment for the pull request, in Markdown")
def command(
    files: tuple[str, ...],
    device: str,
    fail_above: float,
    settings: tuple[str, ...],
    ignore: tuple[str, ...],
    sarif: str | None,
    comment: str | None,
) -> int:
    """Check the shapes of changed config files, as the pre-commit hook and the GitHub Action do.

    Files that describe no model are passed over. Findings about batch and layout are not counted, since a config.json
    does not set them. Exit code 0: no shape costs more than --fail-above; 1: one does, or cannot be used.
    """
    from shapewright.app.integrations.changed_files import (
        check_files,
        describe_file,
        describe_verdict,
        join_sarif,
        write_comment,
    )

    refuse_unwritable(sarif, comment)
    found = named_device(device)
    workload, layout = _split(settings)
    layout = {**default_layout(layout), **layout}
    codes = (*ignore, *default_ignored())
    checked = check_files(files, lambda path: _build(path, found, workload, layout), ignore=codes)
    console = make_console()
    for line in (line for each in checked for line in describe_file(each)):
        console.print(line, soft_wrap=True)
    if any(each.is_model for each in checked):
        console.print(describe_verdict(checked, fail_above), soft_wrap=True)
    priced = sorted((each for each in checked if each.report is not None), key=lambda each: not each.findings)
    if priced:
        set_next(_check_of(priced[0].path, _split(settings), ignore))
    if sarif:
        write_json_file(sarif, join_sarif(checked))
    if comment:
        write_text_file(comment, write_comment(checked, found.title, fail_above))
    return int(any(each.fails(fail_above) for each in checked))


def _check_of(path: str, fields: Iterable[dict[str, Any]], ignore: tuple[str, ...]) -> str:
    """Template of the command that checks one file with the same settings."""
    words = [word for group in fields for name, value in group.items() for word in _flags_of(name, value)]
    words += [word for code in ignore for word in ("--ignore", code)]
    escaped = join([path, *words]).replace("{", "{{").replace("}", "}}")
    return f"check {escaped} --device {{device}}"


def _flags_of(name: str, value: Any) -> tuple[str, ...]:
    """The words that set a field on the command line."""
    if isinstance(value, bool):
        return (flag_of(name if value else f"no_{name}"),)
    return (SHORT_FLAGS.get(name, flag_of(name)), str(value))


def _build(path: str, device: Device, workload: dict[str, Any], layout: dict[str, Any]) -> Scenario:
    """Scenario of a config.json, or of a file of a trainer, whose batch and layout come below the given ones."""
    from shapewright.app.formats.reading import with_global_batch
    from shapewright.app.formats.registry import is_job_file, read_job
    from shapewright.prediction.build import build_scenario

    if not is_job_file(path):
        return build_scenario(path, device, workload=workload, layout=layout)
    job = read_job(path)
    parts = job.parts(**layout)
    parts["workload"] = with_global_batch({**job.workload, **workload}, parts["layout"], job.passes)
    return build_scenario(job.model or None, device, **parts)


def _split(settings: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the workload and of the layout."""
    from dataclasses import fields

    from shapewright.prediction.sweep import parse_values
    from shapewright.workload.layout import ParallelLayout

    workload: dict[str, Any] = {}
    layout: dict[str, Any] = {}
    of_layout = {spec.name for spec in fields(ParallelLayout)}
    for text in settings:
        name, equals, value = text.partition("=")
        values = parse_values(value) if equals else ()
        if len(values) != 1:
            raise click.UsageError(f"--set {text!r} is not of the form FIELD=VALUE, such as tp=8")
        field = field_named(name)
        (layout if field in of_layout else workload)[field] = values[0]
    return workload, layout
