"""shapewright calibrate: fit calibration records to measurements of one device."""

from __future__ import annotations

import shlex
import sys

import click

from shapewright.app.cli.console import make_console, print_json, refuse_unwritable, status_line, write_json_file

_EPILOG = """\b
Examples:
  shapewright calibrate --store products.sqlite -o h100.json
"""


@click.command(epilog=_EPILOG)
@click.option("--store", "store_path", required=True, metavar="PATH", help="store of measurements")
@click.option("-o", "--output", required=True, metavar="FILE", help="where to write the calibration (JSON)")
@click.option(
    "--device", default="", metavar="NAME", help="device to fit, by name or file; required if the store holds several"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(store_path: str, output: str, device: str, as_json: bool) -> int:
    """Fit calibration records to the store at PATH, and write them to FILE.

    Products are fitted, and pointwise operations and attention where the store has rows of them. The errors printed are
    those of rows that no fit saw, split by whole (n, k) shapes, sizes and head layouts. 'predict', 'check' and others
    take the file with --calibration. A CPU has no data sheet and is described by its best rows. Needs the fit extra.
    """
    from shapewright.app.report.measured import print_calibration
    from shapewright.app.report.outputs.measure import calibrate_output
    from shapewright.measure.fit.calibrate import calibrate_rows
    from shapewright.measure.store.database import Store

    refuse_unwritable(output)
    with Store(store_path, read_only=True) as store:
        rows, runs = store.rows(), store.runs()
    with status_line("fitting") as on_step:
        result = calibrate_rows(
            rows,
            runs,
            device=device,
            source=store_path,
            command=shlex.join(["shapewright", *sys.argv[1:]]),
            on_kind=lambda kind: on_step(f"fitting {kind}"),
        )
    write_json_file(output, result.content)
    answer = calibrate_output(result, output)
    if as_json:
        print_json(answer.to_json())
    else:
        print_calibration(answer, make_console())
    return 0
