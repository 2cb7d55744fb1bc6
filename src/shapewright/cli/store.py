"""shapewright store: look into a store of measurements, check it, bring others' rows in, take them out."""

from __future__ import annotations

import click

from shapewright.cli.console import make_console, print_json, status_line

SCHEMA_VERSION = 1


@click.group(
    epilog="""\b
Examples:
  shapewright store ls measured.sqlite
  shapewright store import measured.sqlite ./measured/gemm.parquet
  shapewright store merge all.sqlite measured.sqlite
"""
)
def command() -> None:
    """Look into a store of measurements, check it, bring rows in, take them out."""


@command.command(
    epilog="""\b
Examples:
  shapewright store ls measured.sqlite
  shapewright store ls measured.sqlite --json
"""
)
@click.argument("path", metavar="PATH")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def ls(path: str, as_json: bool) -> int:
    """Sum up the store at PATH: suites, devices, rows, times and sizes."""
    from dataclasses import asdict

    from shapewright.report.contents import print_contents
    from shapewright.store.contents import sum_up
    from shapewright.store.file import Store

    with Store(path, read_only=True) as store:
        contents = sum_up(store)
    if as_json:
        facts = asdict(contents)
        print_json({"schema_version": SCHEMA_VERSION, "store_schema_version": facts.pop("schema_version"), **facts})
    else:
        print_contents(contents, make_console())
    return 0


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

    with Store(path, read_only=True) as store:
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

    with Store(path, read_only=True) as store:
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

    with Store(path, read_only=True) as store:
        written = export_store(store, folder, format_name=format_name)
    for name, count in written.items():
        click.echo(f"{name}: {count} rows")
    if not written:
        click.echo("the store has no rows")
    return 0


@command.command(
    epilog="""\b
Examples:
  shapewright store merge all.sqlite measured.sqlite
"""
)
@click.argument("path", metavar="PATH")
@click.argument("sources", metavar="OTHER...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def merge(path: str, sources: tuple[str, ...], as_json: bool) -> int:
    """Bring the rows of OTHER stores into the store at PATH, which is made where it is not there.

    A row is the same if device, library, operation, dtype, layout, kernel and repetition are. Of two good rows that of
    PATH stays; a row that failed gives way to a good one. The other stores are not touched.
    """
    from shapewright.store.merge import merge_stores

    _print_counts(path, merge_stores(path, list(sources)), {}, as_json)
    return 0


@command.command(
    "import",
    epilog="""\b
Examples:
  shapewright store import measured.sqlite ./measured/gemm.parquet ./measured/paper_gemm.csv
  shapewright store import measured.sqlite ./measured/mm.out --device a100-sxm-40gb --library 'torch 1.13'
""",
)
@click.argument("path", metavar="PATH")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--device", default="", metavar="NAME", help="what was measured, where a file does not say")
@click.option("--library", default="", metavar="NAME", help="library and versions, where a file does not say")
@click.option("--dtype", default="", metavar="NAME", help="element format of a log that does not say")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def import_(path: str, files: tuple[str, ...], device: str, library: str, dtype: str, as_json: bool) -> int:
    """Bring measurements of other collectors into the store at PATH: all of the FILEs, or nothing.

    FILEs are told apart by what is in them: measured tables (gemm, attention, pointwise, collectives, linear_layers,
    paper_gemm, paper_layers, mamf), logs of EleutherAI/cookbook (its letters are renamed) and of mamf-finder, records
    of measuring campaigns (.jsonl, parquet), and 'store export' of measurements. Parquet needs the fit extra.
    """
    import shlex
    import sys

    from shapewright.store.imports import Overrides, import_files

    given = Overrides(device=_known_device(device), library=library, dtype=dtype)
    words = shlex.join(["shapewright", *sys.argv[1:]])
    with status_line("reading") as on_step:
        imported = import_files(path, files, given, command=words, on_step=on_step)
    _print_counts(path, imported.counts, imported.skipped, as_json)
    return 0


def _known_device(name: str) -> str:
    """A device of --device by its canonical name; ``cpu`` has no device file and needs none."""
    if not name or name == "cpu":
        return name
    from shapewright.hardware import find_measured_device

    return find_measured_device(name).name


def _print_counts(path: str, counts: dict[str, int], skipped: dict[str, dict[str, int]], as_json: bool) -> None:
    if as_json:
        print_json({"schema_version": SCHEMA_VERSION, "store": path, **counts, "skipped": skipped})
        return
    for name, reasons in skipped.items():
        for reason, number in reasons.items():
            click.echo(f"{name}: skipped {number:,} rows: {reason}")
    click.echo(
        f"{path}: {counts['added']:,} rows added, {counts['replaced']:,} failed ones replaced, "
        f"{counts['kept']:,} known before and kept as they were"
    )
