"""Fit the records of kernels that are priced by their work, from the tables that list them. Some minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.hardware import find_measured_device
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.kernels.attention import ENCODER, LATENT, TRAINING
from shapewright.measure.accuracy.tables.kernels.exchange import ALL_REDUCE, EXCHANGE
from shapewright.measure.accuracy.tables.kernels.hybrids import LINEAR, SPARSE
from shapewright.measure.accuracy.tables.kernels.rows import FUSED, NORMS, QUANTIZE
from shapewright.measure.accuracy.tables.kernels.table import KernelGroup, KernelTable
from shapewright.measure.refit.kernels.fit import KernelFit, fit_kernel, intervals_of
from shapewright.measure.refit.record_files import SAME_CHIP, SOURCE, command, record_path, write_record
from shapewright.pricing.kernels.price import LABEL_SEPARATOR, kernel_rates

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns

# Source and licence of each table.
_CUDNN, _LIGER = "NVIDIA/cudnn-frontend @3929da2, MIT", "linkedin/Liger-Kernel @ead96b6, BSD-2-Clause"
SOURCES: tuple[tuple[KernelTable, str], ...] = (
    (TRAINING, _CUDNN),
    (ENCODER, SOURCE),
    (LATENT, SOURCE),
    (NORMS, _CUDNN),
    (FUSED, _LIGER),
    (QUANTIZE, SOURCE),
    (LINEAR, SOURCE),
    (SPARSE, SOURCE),
    (ALL_REDUCE, SOURCE),
    (EXCHANGE, SOURCE),
)


def refit(data: Path, kinds: Sequence[str] = ()) -> None:
    """Fit every record of these kinds, or of all."""
    for table, source in SOURCES:
        if not kinds or table.name in kinds:
            refit_table(data, table, source)


def refit_table(data: Path, table: KernelTable, source: str) -> None:
    """Fit the record of every device of a table."""
    path = next(path for suffix in ("parquet", "csv") if (path := data / f"{table.name}.{suffix}").is_file())
    columns = table.label_sizes(read_columns(path, table.columns, Counter()))
    for (name,), rows in columns.groups("device"):
        print(write_device(table, name, rows, (path.name, source)))


def write_device(table: KernelTable, alias: str, columns: Columns, origin: tuple[str, str]) -> Path:
    """Fit and write the record of one device; ``origin``: file and source of the rows."""
    device = find_measured_device(alias)
    rates = kernel_rates(device)
    fits: dict[str, KernelFit] = {}
    arrays: dict[str, Any] = {}
    for labels, rows in columns.groups(*table.labels):
        name = LABEL_SEPARATOR.join(labels)
        work = table.build(rows, KernelGroup(dict(zip(table.labels, labels, strict=True)), device, rates))
        layouts = [np.nan_to_num(rows.numbers[column]) for column in table.layout]
        fit = fit_kernel(work, rows.numbers["latency_s"], layouts, table.axes, shapes_recur=table.shapes_recur)
        fits[name] = fit
        if fit.table is not None:
            arrays[f"{name}@steps"] = fit.table.log_steps
            arrays |= {f"{name}@{axis}": knots.astype(np.float32) for axis, knots in enumerate(fit.table.knots_log2)}
        error = fit.report.get("left_out", fit.report.get("fit", {}))["mean_absolute_error"]
        print(f"{device.name:16s} {name:60s} {rows.num_rows:6d} {error:.3f} {' '.join(fit.axes)}", flush=True)
    file = f"{device.name}.npz"
    record: dict[str, Any] = {
        "devices": [device.name, *SAME_CHIP.get(device.name, ())],
        "architecture": device.architecture,
        "parameters": {"kernels": {name: fit.content for name, fit in fits.items()}},
        "interval": intervals_of(fits),
        "residual": {"file": file} if arrays else None,
        "provenance": {
            "source": origin[1],
            "files": [origin[0]],
            "rows": columns.num_rows,
            "split": f"layouts ({', '.join(table.layout)}) left out whole in turn; parameters fitted on all of them",
            "command": command("kernels", f"--kind {table.name}"),
            "reports": {name: fit.report for name, fit in fits.items()},
        },
    }
    path = write_record(table.name, device.name, record)
    if arrays:
        np.savez_compressed(record_path(table.name, device.name).with_suffix(".npz"), **arrays)
    return path
