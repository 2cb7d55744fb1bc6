"""shapewright store: look into a store of measurements, check it, export it."""

from __future__ import annotations

import click

from shapewright.cli.console import make_console, print_json

SCHEMA_VERSION = 1


@click.group(
    epilog="""\b
Examples:
  shapewright store show measured.sqlite
"""
)
def command() -> None:
    """Look into a store of measurements, check it, export it."""


@command.command(
    epilog="""\b
Examples:
  shapewright store show measured.sqlite
  shapewright store show measured.sqlite --json
"""
)
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="print JSON with every column")
def show(path: str, as_json: bool) -> int:
    """List every row of the store at PATH."""
    from shapewright.report.measured import print_rows
    from shapewright.store.file import Store

    with Store(path, must_exist=True) as store:
        rows = [row.to_json() for row in store.rows()]
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "rows": rows})
    else:
        print_rows(rows, make_console(), most=None)
        make_console().print(f"{len(rows)} rows")
    return 0


@command.command(
    epilog="""\b
Examples:
  shapewright store verify measured.sqlite
"""
)
@click.argument("path", metavar="PATH")
def verify(path: str) -> int:
    """Look for damage in the store at PATH. Exit code 1: there is some."""
    from shapewright.store.file import Store

    with Store(path, must_exist=True) as store:
        problems, num_rows = store.verify(), len(store.finished_keys())
    for problem in problems:
        click.echo(problem)
    if not problems:
        click.echo(f"{num_rows} rows, all sound")
    return 1 if problems else 0


@command.command(
    epilog="""\b
Examples:
  shapewright store export measured.sqlite ./tables --format csv
"""
)
@click.argument("path", metavar="PATH")
@click.argument("folder", metavar="DIR")
@click.option(
    "--format", "format_name", type=click.Choice(("parquet", "csv")), default="parquet", show_default=True,
    help="'shapewright accuracy DIR' reads parquet, which needs the fit extra",
)  # fmt: skip
def export(path: str, folder: str, format_name: str) -> int:
    """Write the store at PATH as tables into DIR: those that 'shapewright accuracy' judges, and one with all rows."""
    from shapewright.store.export import export_store
    from shapewright.store.file import Store

    with Store(path, must_exist=True) as store:
        written = export_store(store, folder, format_name=format_name)
    for name, count in written.items():
        click.echo(f"{name}: {count} rows")
    if not written:
        click.echo("the store has no rows")
    return 0
