"""shapewright batch: global batch = micro-batch x replicas x accumulation, and all its solutions."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.help_pages import GroupedCommand

_EPILOG = """\b
Examples:
  shapewright batch --global-batch 2048 --gpus 512 --tp 8 --pp 4
  shapewright batch --micro-batch-size 4 --dp 8 --accumulation 4
  shapewright batch --global-batch 1024 --gpus 64 --tp 8 --micro-batch-size 2 --explain
  shapewright batch --global-batch 96 --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.option(
    "--global-batch", "--gbs", "global_batch_size", type=int, metavar="N", help="sequences per optimizer step"
)
@click.option("--micro-batch-size", "--mbs", type=int, metavar="N", help="sequences per micro-batch")
@click.option(
    "--accumulation", "--gas", "num_microbatches", type=int, metavar="N", help="micro-batches accumulated by a replica"
)
@click.option("--gpus", "num_devices", type=int, metavar="N", help="devices of the whole job")
@click.option("--dp", "data_parallel", type=int, metavar="N", help="replicas")
@click.option("--tp", "tensor_parallel", type=int, default=1, show_default=True, help="tensor parallel degree")
@click.option("--pp", "pipeline_parallel", type=int, default=1, show_default=True, help="pipeline stages")
@click.option("--cp", "context_parallel", type=int, default=1, show_default=True, help="context parallel degree")
@click.option("--virtual-pipeline", type=int, default=1, show_default=True, help="model chunks per stage")
@click.option("--explain", "explains", is_flag=True, help="show the formulas")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(explains: bool, as_json: bool, **given: Any) -> int:
    """Solve global batch = micro-batch x replicas x accumulation for the values not given, in integers."""
    from shapewright.app.report.calculators import print_batch
    from shapewright.app.report.outputs.calculators import batch_output
    from shapewright.prediction.calculators.training import BatchRequest, solve_batch

    output = batch_output(solve_batch(BatchRequest(**given)))
    print_output(output, partial(print_batch, explains=explains), as_json=as_json)
    return 0
