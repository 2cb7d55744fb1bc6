"""Evaluate tables of kernels that are priced by their work: which columns name a kernel, and the work of each row.

Here those that stream rows, of training and serving: norms.csv, fused_ops.csv, quantize.parquet; others beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.chunk import Chunk, Labels, prices_of, split_chunks
from shapewright.measure.accuracy.context import read_stored_format
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.kernels.price import kernel_rates, match_kernel, price_kernel
from shapewright.pricing.kernels.rows import fused_sizes, fused_work, row_work

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context
    from shapewright.pricing.kernels.work import KernelRates, KernelWork


class KernelGroup(NamedTuple):
    """What rows of one kernel have in common.

    Attributes:
        words: Their labels, by column.
        device: The device.
        rates: Its rates.
    """

    words: Mapping[str, str]
    device: Device
    rates: KernelRates


BuildWork = Callable[["Columns", KernelGroup], "KernelWork"]


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """A table of kernels.

    Attributes:
        name: Name of the table, of its file and of the kind of its records.
        columns: Columns of the file.
        labels: Label columns that distinguish kernels; the library first, then from the most to the least important.
        build: Work of rows with the same labels.
        axes: Places by which residual tables may be indexed; a fit chooses among them.
        layout: Numeric columns that identify the shape that a new user has; whole ones are held out.
        dtype: Label column of the element format; empty where all rows are in bf16.
        part: Label column that groups rows in reports.
        sizes_as_labels: Integer columns each value of which is a kernel of its own, such as a compiled head width.
        library: Label column that reports show as the library.
        shapes_recur: Whether a benchmark times the same few shapes on every device, so that a residual table is worth
            having where it does not hurt on other shapes.
        suffix: Format of the file.
    """

    name: str
    columns: Format
    labels: tuple[str, ...]
    build: BuildWork
    axes: tuple[tuple[str, ...], ...]
    layout: tuple[str, ...]
    dtype: str = "dtype"
    part: str = "kernel"
    sizes_as_labels: tuple[str, ...] = ()
    library: str = "library"
    shapes_recur: bool = False
    suffix: str = "parquet"

    @property
    def file_name(self) -> str:
        """File that holds it."""
        return f"{self.name}.{self.suffix}"

    @property
    def grouped_by(self) -> tuple[str, ...]:
        """Label columns of one group of rows: the device, and those that distinguish kernels."""
        return ("device", *self.labels)

    def label_sizes(self, columns: Columns) -> Columns:
        """Return the columns with some sizes as labels too."""
        sizes = {name: columns.numbers[name].astype(int) for name in self.sizes_as_labels}
        labels = {name: Labels.of(values) for name, values in sizes.items()}
        return replace(columns, labels={**columns.labels, **labels})

    def price(self, columns: Columns, context: Context) -> Iterator[Chunk]:
        """Price every row."""

        def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
            record = context.record(self.name, device)
            rates = kernel_rates(device, record)
            match = match_kernel(record, words[1:])
            if not match.is_same:
                context.note(f"{self.name}: {' '.join(filter(None, words[1:]))} is priced as {match.name}")
            work = self.build(rows, KernelGroup(dict(zip(self.labels, words[1:], strict=True)), device, rates))
            found = price_kernel(work, device, record, match, is_bounded=False)
            return prices_of(found, found.roofline_s)

        labelled = self.label_sizes(columns)
        for rows, device, words, prices in context.price_groups(labelled, self.grouped_by, price_group):
            named = dict(zip(self.grouped_by, words, strict=True))
            dtype = named.get(self.dtype, "") or (rows.labels[self.dtype][0] if self.dtype else "bf16")
            names = (device.name, dtype, named[self.library])
            yield from split_chunks(self.name, names, rows.labels[self.part], rows.numbers["latency_s"], prices)


def need(rows: Columns, *names: str) -> list[np.ndarray]:
    """Return sizes that every row must have.

    Raises:
        MeasuredFileError: a row lacks one.
    """
    for name in names:
        if np.isnan(rows.numbers[name]).any():
            raise MeasuredFileError(f"{name} is missing in rows that need it; fill it in, or leave the rows out")
    return [rows.numbers[name] for name in names]


_PASSES = {"forward": 1.0, "backward": 2.0, "full": 3.0}
_QUANTIZERS = ("static_quantize", "dynamic_quantize")
_WIDE_BYTES, _NARROW_BYTES = 2.0, 1.0
_FUSED_SIZES = (
    "batch_size", "seq_len", "tokens", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_kv_heads",
    "num_experts", "topk", "channels_in", "kernel_size",
)  # fmt: skip


def _norm(rows: Columns, group: KernelGroup) -> KernelWork:
    words = group.words
    num_rows, columns = need(rows, "rows", "columns")
    if words["pass"] not in ("forward", "backward"):
        raise MeasuredFileError(f"unknown pass {words['pass']!r}; known are forward and backward")
    is_backward = words["pass"] == "backward"
    width = get_dtype(read_stored_format(words["dtype"]).dtype).num_bytes
    return row_work(
        group.rates,
        rows=num_rows,
        columns=columns,
        read_bytes=width * (2.0 if is_backward else 1.0),
        written_bytes=width,
        sums_columns=is_backward,
        has_mean=(rows.labels["operation"].values == "layer_norm").astype(float),
    )


def _quantize(rows: Columns, group: KernelGroup) -> KernelWork:
    num_rows, columns = need(rows, "rows", "columns")
    operation = group.words["operation"]
    if operation not in _QUANTIZERS:
        raise MeasuredFileError(f"unknown operation {operation!r}; known are {', '.join(_QUANTIZERS)}")
    return row_work(group.rates, rows=num_rows, columns=columns, read_bytes=_WIDE_BYTES, written_bytes=_NARROW_BYTES)


def _fused(rows: Columns, group: KernelGroup) -> KernelWork:
    words, device, rates = group
    if words["pass"] not in _PASSES:
        raise MeasuredFileError(f"unknown pass {words['pass']!r}; known are {', '.join(_PASSES)}")
    found = fused_sizes(words["kernel"], rows.numbers)
    if found is None:
        raise MeasuredFileError(f"unknown kernel {words['kernel']!r}; it has no count of its work")
    dtype = read_stored_format(words["dtype"]).dtype
    width = get_dtype(dtype).num_bytes
    return fused_work(device, rates, found, dtype=dtype, element_bytes=width, gemms=_PASSES[words["pass"]])


NORMS = KernelTable(
    name="norms",
    columns=Format(
        numbers={"rows": 1, "columns": 1},
        labels=("device", "backend", "operation", "dtype", "pass"),
        positive=("latency_s",),
    ),
    labels=("backend", "pass", "dtype"),
    build=_norm,
    axes=(("elements",), ("rows", "columns")),
    layout=("rows", "columns"),
    part="operation",
    library="backend",
    shapes_recur=True,
    suffix="csv",
)
QUANTIZE = KernelTable(
    name="quantize",
    columns=Format(
        numbers={"rows": 1, "columns": 1},
        labels=("device", "library", "operation", "scale", "dtype"),
        positive=("latency_s",),
    ),
    labels=("library", "operation", "scale", "dtype"),
    build=_quantize,
    axes=(("rows", "columns"), ("elements", "columns"), ("elements", "rows")),
    layout=("columns",),
    part="operation",
)
FUSED = KernelTable(
    name="fused_ops",
    columns=Format(
        numbers={},
        labels=("device", "kernel", "provider", "pass", "library", "dtype", "x_name"),
        positive=("latency_s",),
        optional=_FUSED_SIZES,
    ),
    labels=("provider", "kernel", "pass", "dtype", "library"),
    build=_fused,
    axes=(("elements",), ("elements", "table")),
    layout=_FUSED_SIZES,
    library="provider",
    shapes_recur=True,
    suffix="csv",
)
KERNEL_TABLES = (NORMS, FUSED, QUANTIZE)
