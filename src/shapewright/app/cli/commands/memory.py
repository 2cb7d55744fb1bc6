"""shapewright memory: estimate memory, and suggest what makes it fit."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.help_pages import GroupedCommand, set_next
from shapewright.app.cli.options import question_options, scenario_from_options, software_option
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options

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
    config: str | None, device: str, software: str | None, as_json: bool, html: str | None, **given: Any
) -> int:
    """Estimate the memory that CONFIG needs on a device, by component and pipeline stage.

    The verdict says whether it fits, the largest batch and sequence that do, and what to turn on if it does not,
    cheapest in time first.
    """
    job = pop_traced_job(config, device, given, software=software)
    if job is not None:
        from shapewright.app.report.traced.outputs import traced_memory_output
        from shapewright.app.report.traced.report import memory_page_of_trace, print_memory_of_trace

        traced = traced_memory_output(job.predict())
        print_output(traced, print_memory_of_trace, as_json=as_json, html=html, page=memory_page_of_trace)
        return 0
    from shapewright.app.report.memory import memory_page, print_memory_report
    from shapewright.app.report.outputs.memory import memory_output
    from shapewright.prediction.capacity.fit import estimate_capacity

    scenario = scenario_from_options(config, device, given, software=software)
    output = memory_output(estimate_capacity(scenario))
    if output.fits or not scenario.workload.is_training:
        set_next("predict {job}")
    print_output(output, print_memory_report, as_json=as_json, html=html, page=memory_page)
    return 0
