"""shapewright memory: estimate memory, and suggest what makes it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import make_console, print_json, write_text_file
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import question_options, scenario_from_options, software_option
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from shapewright.app.cli.trace_options import TracedJob

_EPILOG = """\b
Examples:
  shapewright memory llama-3-8b --device h100-sxm-80gb --dp 8 --zero-stage 1 --micro-batch-size 1
  shapewright memory gpt3-175b --device a100-sxm-80gb --tp 8 --pp 8 --micro-batch-size 1 --recompute selective
  shapewright memory llama-3-8b --device rtx-4090 --optimizer adamw-8bit --micro-batch-size 1 --json
  shapewright memory llama-3-70b --device h100-sxm-80gb --tp 8 --pp 4 --micro-batch-size 1 --html memory.html
  shapewright memory llama-3-70b --device h200-sxm-141gb --phase decode --context-len 32768 --kv-cache-dtype fp8
  shapewright memory my_model.py:build --inputs "tokens=int64[4,512]" --device h100-sxm-80gb
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@trace_options
@trace_config_option
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

    job = pop_traced_job(config, device, given, software=software != TUNED)
    if job is not None:
        _print_traced(job, as_json=as_json, html=html)
        return 0
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


def _print_traced(job: TracedJob, *, as_json: bool, html: str | None) -> None:
    """Print the memory of a traced module."""
    from shapewright.prediction.traced import predict_trace

    prediction = predict_trace(job.trace, job.device, optimizer=job.optimizer)
    if html:
        from shapewright.app.report.page import render_page
        from shapewright.app.report.traced.page import memory_page_sections
        from shapewright.app.report.traced.text import describe_trace

        page = render_page(
            "Memory of a traced module", memory_page_sections(prediction), subtitle=describe_trace(prediction)
        )
        write_text_file(html, page)
        click.echo(f"wrote {html}", err=True)
    if as_json:
        from shapewright.app.report.traced.outputs import traced_memory_output

        print_json(traced_memory_output(prediction).to_json())
    else:
        from shapewright.app.report.traced.text import print_memory_of_trace

        print_memory_of_trace(prediction, make_console())
