"""shapewright memory: does it fit, and what makes it fit."""

from __future__ import annotations

from typing import Any

import click

from shapewright.cli.console import make_console, print_json
from shapewright.cli.options import GroupedCommand, ask_from_options, question_options

_EPILOG = """\b
Examples:
  shapewright memory llama-3-8b --device h100-sxm-80gb --micro-batch-size 1 --dp 8 --zero-stage 1
  shapewright memory gpt3-175b --device a100-sxm-80gb --tp 8 --pp 8 --micro-batch-size 1 --recompute selective
  shapewright memory llama-3-8b --device rtx-4090 --optimizer adamw-8bit --micro-batch-size 1 --json
  shapewright memory llama-3-70b --device h200-sxm-141gb --phase decode --context-len 32768 --kv-cache-dtype fp8
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(config: str | None, device: str, uncalibrated: bool, as_json: bool, **given: Any) -> int:
    """Estimate the memory that CONFIG needs on a device, by component and pipeline stage.

    The verdict says whether it fits, the largest batch and sequence that do, and what to turn on if it does not,
    cheapest in time first.
    """
    from shapewright.capacity import estimate_capacity

    question = ask_from_options(config, device, given)
    found = estimate_capacity(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        notes=question.notes,
        uncalibrated=uncalibrated,
    )
    if as_json:
        from shapewright.report.capacity import capacity_to_json

        print_json({**capacity_to_json(found), "source": question.model.source})
    else:
        from shapewright.report.capacity import print_capacity

        print_capacity(found, make_console())
    return 0
