"""shapewright accuracy: compare predictions with measured tables."""

from __future__ import annotations

import json
from typing import Any

import click

from shapewright.app.cli.console import echo, make_console, progress_bars
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.names import complete_device

_EPILOG = """\b
A table of your own (others: docs/measuring.md):
  device,library,kernel,dtype,m,n,k,latency_us
  h100-sxm-80gb,torch 2.8,gemm,bf16,4096,4096,4096,230

\b
Examples:
  shapewright accuracy ./measured
  shapewright accuracy ./measured --table gemm --device h100-sxm-80gb --by device,dtype,size
  shapewright accuracy ./measured --table gemm --regret
  shapewright accuracy ./gemms.csv
  shapewright accuracy ./measured --uncalibrated --json
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.argument("folder", metavar="DIR|FILE")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_device,
    help="only this device; may be repeated",
)
@click.option("--table", "tables", multiple=True, metavar="TABLE", help="only this table; may be repeated")
@click.option(
    "--by",
    default="device,dtype,library",
    show_default=True,
    metavar="WORD,WORD,...",
    help="group by device, dtype, library, part (kernel, operation, ...), size (decade of the measured time)",
)
@click.option("--uncalibrated", is_flag=True, help="ignore the device's own calibration")
@click.option("--regret", is_flag=True, help="slowdown of the chosen shape over the best of its size")
@click.option("--calibration", metavar="FILE", help="file written by 'shapewright calibrate'")
@click.option("--physics-only", is_flag=True, help="ignore learned residuals")
@click.option("--json", "as_json", is_flag=True, help="print a JSON list; notes go to standard error")
def command(folder: str, by: str, regret: bool, as_json: bool, **given: Any) -> int:
    """Price every row of FILE, or of the measured files in DIR, and print the errors of the predictions.

    Files are known by name (gemm.parquet, paper_gemm.csv, ...), stores of 'shapewright bench' by what is in them.
    Errors are |predicted / measured - 1|, the bias is the mean of ln(predicted / measured). With --regret, of the
    shapes of one size within 3 % (GEMMs of as many tokens, layers of the paper) the one predicted to be fastest is
    held against the one that was, median and p90 over sizes. Parquet files need the fit extra. Exit code 1: a file
    could not be judged.
    """
    from shapewright.app.report.measured import print_accuracy, remark_lines, separating_words
    from shapewright.measure.accuracy.evaluate import evaluate_folder

    groups = [word.strip() for word in by.split(",") if word.strip()]
    with progress_bars() as bars:
        evaluation = evaluate_folder(
            folder,
            by=groups,
            on_table=lambda name, num_rows: bars.add_task(name, total=num_rows),
            on_rows=lambda num_rows: bars.advance(bars.task_ids[-1], num_rows),
            **given,
        )
    if as_json:
        from shapewright.app.report.outputs.measure import accuracy_output
        from shapewright.app.report.outputs.model import plain

        rows = accuracy_output(evaluation, separating_words(evaluation), regret=regret)
        click.echo(json.dumps(plain(rows), indent=2, allow_nan=False))
        for line in remark_lines(evaluation):
            echo(line, err=True)
    else:
        print_accuracy(evaluation, make_console(), regret=regret)
    return 1 if evaluation.unreadable else 0
