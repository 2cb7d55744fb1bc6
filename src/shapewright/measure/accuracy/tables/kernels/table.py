"""Evaluate tables of kernels that are priced by their work: labels that distinguish kernels, and the work of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.chunk import Chunk, Labels, prices_of, split_chunks
from shapewright.pricing.kernels.price import kernel_rates, match_kernel, price_kernel

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context
    from shapewright.measure.accuracy.measured_files import Format
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
