"""shapewright params: parameters by component."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import group_options, model_options

_EPILOG = """\b
Examples:
  shapewright params llama-3-8b
  shapewright params mixtral-8x7b --explain
  shapewright params --hidden-size 4096 --num-layers 32 --num-heads 32 --vocab-size 50257 --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@model_options
@click.option("--explain", "explains", is_flag=True, help="show the formula of each number")
@click.option("--json", "as_json", is_flag=True, help="print JSON, formulas included")
def command(config: str | None, explains: bool, as_json: bool, **given: Any) -> int:
    """Count the parameters of CONFIG, exactly, by component."""
    from shapewright.app.report.calculators import print_parameters
    from shapewright.app.report.outputs.calculators import params_output
    from shapewright.models.read import read_model

    output = params_output(read_model(config, group_options(given)["model"]))
    print_output(output, partial(print_parameters, explains=explains), as_json=as_json)
    return 0
