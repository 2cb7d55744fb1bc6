"""The measured tables that can be evaluated: file, columns, pricing; and the files of a folder that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import MeasuredFileError, close_names
from shapewright.core.files import open_file
from shapewright.core.texts import with_fields
from shapewright.measure.accuracy import stores as stores_module
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.tables import (
    attention,
    communication,
    gemm,
    kernels,
    linear_layers,
    loss_by_shape,
    moe,
    paper_layers,
    pointwise,
    published_rows,
    training,
)
from shapewright.measure.accuracy.tables.serving import rows as serving_rows
from shapewright.measure.accuracy.tables.serving import runs as serving_runs
from shapewright.measure.accuracy.tables.serving import table as serving_table
from shapewright.measure.fit import loss_rows

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Chunk, Columns
    from shapewright.measure.accuracy.measured_files import Format


class Table(NamedTuple):
    """A measured table.

    Attributes:
        file_name: Its file.
        columns: Required columns of the file.
        price: Prices its rows.
    """

    file_name: str
    columns: Format
    price: Callable[[Columns, Context], Iterator[Chunk]]


KERNEL_TABLES = (*attention.KERNEL_TABLES, *kernels.KERNEL_TABLES, *communication.KERNEL_TABLES)
"""Tables of kernels that are priced by their work."""
_NAMED = (
    Table("gemm.parquet", gemm.FORMAT, gemm.price),
    Table("gemm_amd.parquet", gemm.AMD_FORMAT, gemm.price_amd),
    Table("gemm_fp32.parquet", gemm.FP32_FORMAT, gemm.price_fp32),
    Table(
        "attention_prefill.parquet",
        attention.PREFILL_FORMAT,
        partial(attention.price, table="attention_prefill", keys="query_len"),
    ),
    Table(
        "attention_decode.parquet",
        attention.DECODE_FORMAT,
        partial(attention.price, table="attention_decode", keys="context_len"),
    ),
    Table("moe.parquet", moe.FORMAT, moe.price),
    Table("collectives.parquet", communication.FORMAT, communication.price),
    Table("linear_layers.parquet", linear_layers.FORMAT, linear_layers.price),
    Table("pointwise.parquet", pointwise.FORMAT, pointwise.price),
    Table("pointwise_fp32.parquet", pointwise.FP32_FORMAT, pointwise.price_fp32),
    Table("paper_gemm.csv", gemm.PAPER_FORMAT, gemm.price_paper),
    Table("paper_layers.csv", paper_layers.FORMAT, paper_layers.price),
    Table("loss_by_shape.csv", loss_rows.FORMAT, loss_by_shape.price),
    Table(
        "published_training_throughput.csv",
        published_rows.FORMAT,
        partial(training.price, table="published_training_throughput"),
    ),
    Table(
        "published_training_more.csv", published_rows.FORMAT, partial(training.price, table="published_training_more")
    ),
    Table("serving_runs.csv", serving_runs.FORMAT, serving_runs.price),
    Table("serving_throughput.csv", serving_rows.FORMAT, serving_table.price),
    Table("serving_static.csv", serving_rows.STATIC_FORMAT, serving_table.price_static),
    Table("training_mlperf.csv", published_rows.MLPERF_FORMAT, partial(training.price, table="training_mlperf")),
    *(Table(table.file_name, table.columns, table.price) for table in KERNEL_TABLES),
)
TABLES: Mapping[str, Table] = {Path(table.file_name).stem: table for table in _NAMED}

# Suffixes of table files.
SUFFIXES = (".parquet", ".csv")
_LONGEST_HEADER = 2**16


def find_tables(folder: Path, wanted: Sequence[str]) -> tuple[dict[str, Path], list[Path]]:
    """Return the files to evaluate, by table, and the stores."""
    require_known("table", wanted, (*TABLES, stores_module.TABLE))
    if folder.is_file():
        return ({}, [folder]) if stores_module.is_store(folder) else ({_table_of(folder): folder}, [])
    if not folder.is_dir():
        reason = "is neither a file nor a folder" if folder.exists() else "does not exist"
        raise MeasuredFileError(f"{folder} {reason}; give a measured file such as gemm.parquet, or their folder")
    found = {
        name: path
        for name, table in TABLES.items()
        if (path := _find_table(folder, table.file_name)) is not None and (not wanted or name in wanted)
    }
    stores = stores_module.find_stores(folder) if not wanted or stores_module.TABLE in wanted else []
    missing = [TABLES[name].file_name for name in wanted if name in TABLES and name not in found]
    if stores_module.TABLE in wanted and not stores:
        missing.append("store of 'shapewright bench'")
    if missing:
        raise MeasuredFileError(
            f"{folder} has no {', '.join(missing)}", advice=with_fields("omit {tables} to evaluate all files")
        )
    if not found and not stores:
        names = ", ".join(table.file_name for table in TABLES.values())
        raise MeasuredFileError(
            f"{folder} has no measured file; known are {names} (each as .parquet or .csv), and stores of "
            f"'shapewright bench'"
        )
    return found, stores


def _table_of(path: Path) -> str:
    """Name the table that a file holds: by its name, else by its columns.

    Raises:
        MeasuredFileError: it has the columns of no table.
    """
    if path.stem in TABLES:
        return path.stem
    header: set[str] = set()
    if path.suffix == ".csv":
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", errors="replace") as file:
            names = file.readline(_LONGEST_HEADER).strip().split(",")
        header = {"latency_s" if name.startswith("latency_") else name for name in names}
    formats = {name: table.columns for name, table in TABLES.items()}
    needed = {name: {*form.numbers, *form.labels, *form.positive} for name, form in formats.items()}
    fitting = [name for name, columns in needed.items() if columns <= header]
    if not fitting:
        raise MeasuredFileError(
            f"{path} has the columns of no table; the smallest has device, library, kernel, dtype, m, n, k, latency_us "
            f"(docs/measuring.md lists the others), or is named after its table, such as gemm.parquet"
        )
    return max(fitting, key=lambda name: len(needed[name]))


def _find_table(folder: Path, file_name: str) -> Path | None:
    """Return a table's file as parquet or csv; a path that exists and is not a file is returned too, for its error."""
    named = folder / file_name
    choices = (named, *(named.with_suffix(suffix) for suffix in SUFFIXES if suffix != named.suffix))
    there = [path for path in choices if path.is_file()]
    broken = [path for path in choices if path.exists() or path.is_symlink()]
    return next(iter(there or broken), None)


def require_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse words that are not known; ``what`` says what they name.

    Raises:
        MeasuredFileError: one is unknown.
    """
    for word in given:
        if word not in known:
            hint = close_names(word, known)
            raise MeasuredFileError(
                f"{what} {word!r} is not known; {hint + ' ' if hint else ''}choose from {', '.join(known)}"
            )
