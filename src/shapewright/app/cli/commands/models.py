"""shapewright models: the presets."""

from __future__ import annotations

import click

from shapewright.app.cli.console import make_console, print_json
from shapewright.app.cli.help_pages import GroupedCommand


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  shapewright models\n  shapewright models llama\n  shapewright models --json qwen3",
)
@click.argument("pattern", required=False)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(pattern: str | None, as_json: bool) -> int:
    """List model presets, or those whose name contains PATTERN."""
    from shapewright.app.report.catalogue import model_columns, select_presets
    from shapewright.app.report.columns import print_table

    if as_json:
        from shapewright.app.report.outputs.catalogue import models_output

        print_json(models_output(select_presets(pattern)).to_json())
    else:
        print_table(model_columns(pattern), make_console())
    return 0
