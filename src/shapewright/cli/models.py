"""shapewright models: the presets."""

from __future__ import annotations

import click

from shapewright.cli.console import make_console, print_json


@click.command(
    epilog="\b\nExamples:\n  shapewright models\n  shapewright models llama\n  shapewright models --json qwen3"
)
@click.argument("pattern", required=False)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(pattern: str | None, as_json: bool) -> int:
    """List model presets, or those whose name holds PATTERN."""
    from shapewright.report.columns import print_table
    from shapewright.report.models import model_columns, models_to_json

    if as_json:
        print_json(models_to_json(pattern))
    else:
        print_table(model_columns(pattern), make_console())
    return 0
