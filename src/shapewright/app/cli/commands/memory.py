"""shapewright memory: estimate memory, and suggest what makes it fit."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.console import make_console, print_json, write_text_file
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import question_options, scenario_from_options, software_option

_EPILOG = """\b
Examples:
  shapewright memory llama-3-8b --device h100-sxm-80gb --dp 8 --zero-stage 1 --micro-batch-size 1
  shapewright memory gpt3-175b --device a100-sxm-80gb --tp 8 --pp 8 --micro-batch-size 1 --recompute selective
  shapewright memory llama-3-8b --device rtx-4090 --optimizer adamw-8bit --micro-batch-size 1 --json
  shapewright memory llama-3-70b --device h100-sxm-80gb --tp 8 --pp 4 --micro-batch-size 1 --html memory.html
  shapewright memory llama-3-70b --device h200-sxm-141gb --phase decode --context-len 32768 --kv-cache-dtype fp8
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--html", metavar="FILE", help="also write an HTML page with the figure")
def command(
    config: str | None,
    device: str,
    software: str,
    as_json: bool,
    html: str | None,
    **given: Any,
) -> int:
    """Estimate the memory that CONFIG needs on a device, by component and pipeline stage.

    The verdict says whether it fits, the largest batch and sequence that do, and what to turn on if it does not,
    cheapest in time first.
    """
    from shapewright.prediction.capacity import estimate_capacity

    scenario = scenario_from_options(config, device, given, software=software)
    found = estimate_capacity(scenario)
    from shapewright.app.report.outputs.memory import memory_output

    output = memory_output(found)
    if html:
        from shapewright.app.report.memory import memory_sections
        from shapewright.app.report.page import render_page

        title = f"Memory of {output.config.title} on {output.layout.num_devices} x {output.device.title}"
        write_text_file(html, render_page(title, memory_sections(output)))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        print_json(output.to_json())
    else:
        from shapewright.app.report.memory import print_memory_report

        print_memory_report(output, make_console())
    return 0
