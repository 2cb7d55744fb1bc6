"""shapewright calibrate: fit records to what was measured on one device."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from shapewright.cli.console import make_console, print_json, write_json_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA_VERSION = 1
_EPILOG = """\b
Examples:
  shapewright calibrate --store products.sqlite -o cpu.json
"""


@click.command(epilog=_EPILOG)
@click.option("--store", "store_path", required=True, metavar="PATH", help="store of measurements")
@click.option("-o", "--output", required=True, metavar="FILE", help="where to write the calibration (JSON)")
@click.option(
    "--device", default="", metavar="NAME", help="device to fit, by name or file; needed where there are more"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(store_path: str, output: str, device: str, as_json: bool) -> int:
    """Fit calibration records to the store at PATH, and write them to FILE.

    Products are fitted, and pointwise operations and attention where the store has rows of them. The errors printed are
    those of rows that no fit saw, split by whole (n, k) shapes, sizes and head layouts. 'predict', 'check' and others
    take the file with --calibration. A CPU has no data sheet and is described by its best rows. Needs the fit extra.
    """
    from shapewright.fit.calibrate import calibrate_rows
    from shapewright.report.calibration import print_calibration
    from shapewright.store.file import Store

    with Store(store_path, read_only=True) as store:
        rows, runs = store.rows(), store.runs()
    with _progress() as on_kind:
        result = calibrate_rows(
            rows,
            runs,
            device=device,
            source=store_path,
            command=shlex.join(["shapewright", *sys.argv[1:]]),
            on_kind=on_kind,
        )
    write_json_file(output, result.content)
    name = result.content["device"]["name"]
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "device": name,
                "output": output,
                "records": {kind: record["id"] for kind, record in result.content["records"].items()},
                "errors": list(result.errors),
                "remarks": list(result.remarks),
            }
        )
    else:
        print_calibration(name, output, result.errors, result.remarks, make_console())
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error that says what is fitted; nothing elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _kind: None
        return
    from rich.console import Console

    with Console(stderr=True).status("fitting") as status:
        yield lambda kind: status.update(f"fitting {kind}")
