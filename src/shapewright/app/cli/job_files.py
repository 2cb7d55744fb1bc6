"""CONFIG and --layout-from as files of trainers and inference engines: their fields come below the given options."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shapewright.app.cli.names import STANDARD_INPUT, complete_config, read_standard_input
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.models import Model

Command = TypeVar("Command", bound=Callable[..., Any])

_KEY = "shapewright.job_file"
_MOST_NAMED = 8
# Commands that choose layout and batch themselves, and the fields that they do not choose.
_CHOOSE = ("plan", "design", "serve-plan")
_NOT_CHOSEN = ("seq_len", "dtype", "weight_dtype", "kv_cache_dtype", "attention", "global_batch_size", "optimizer")


@dataclass
class _FileFields:
    model: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    run_path: str = ""


def config_argument(command: Command) -> Command:
    """Add CONFIG to a command."""
    return click.argument("config", required=False, callback=_read_config, shell_complete=complete_config)(command)


def layout_from_option(command: Command) -> Command:
    """Add --layout-from to a command."""
    return click.option(
        "--layout-from",
        metavar="FILE",
        expose_value=False,
        callback=_read_run,
        help="take workload and layout from a file of DeepSpeed, Accelerate, Megatron-LM, torchtitan, GPT-NeoX, litgpt "
        "or nanoGPT, or from a launch line of vLLM or SGLang",
    )(command)


def fields_of_files(context: click.Context | None) -> dict[str, dict[str, Any]]:
    """Fields of the files of a command, by group; the options that were given come on top of them."""
    found = context.meta.get(_KEY) if context is not None else None
    if context is None or found is None:
        return {}
    if found.run_path:
        _keep(context, found.run_path, with_model=False)
        found.run_path = ""
    taken = {parameter.name for parameter in context.command.params}
    groups: dict[str, dict[str, Any]] = {"model": found.model, "workload": found.workload, "layout": found.layout}
    if context.info_name in _CHOOSE:
        groups["layout"] = {}
        groups["workload"] = {name: value for name, value in found.workload.items() if name in _NOT_CHOSEN}
    return {
        group: {name: value for name, value in fields.items() if group == "model" or f"{group}__{name}" in taken}
        for group, fields in groups.items()
    }


def _read_config(context: click.Context, _: click.Parameter, value: str | None) -> str | Model | None:
    if value in STANDARD_INPUT and not context.resilient_parsing:
        return read_standard_input()
    if value is None or not os.path.isfile(value.partition("::")[0]):  # noqa: PTH113 - takes long names
        return value
    from shapewright.app.formats import is_job_file

    if not is_job_file(value):
        return value
    reading = _keep(context, value, with_model=True)
    return reading.model or None


def _read_run(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:  # read when the command runs
        context.meta.setdefault(_KEY, _FileFields()).run_path = value


def _keep(context: click.Context, path: str, *, with_model: bool) -> Any:
    from shapewright.app.formats import read_job

    reading = read_job(path)
    found = context.meta.setdefault(_KEY, _FileFields())
    found.workload |= reading.workload
    found.layout |= reading.layout
    if with_model and reading.fields:
        found.model |= {"name": Path(path.partition("::")[0]).stem, **reading.fields}
    if reading.unread:
        shown = ", ".join(reading.unread[:_MOST_NAMED])
        more = f" and {len(reading.unread) - _MOST_NAMED} more" if len(reading.unread) > _MOST_NAMED else ""
        click.echo(f"note: read {path} as {reading.format}, without {shown}{more}", err=True)
    return reading
