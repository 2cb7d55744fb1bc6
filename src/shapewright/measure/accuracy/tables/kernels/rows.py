"""Evaluate norms.csv, fused_ops.csv and quantize.parquet: kernels of training and serving that stream rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.context import read_stored_format
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels.table import KernelTable, need
from shapewright.pricing.kernels.rows import fused_sizes, fused_work, row_work

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.tables.kernels.table import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

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
    operation = rows.labels["operation"]
    has_mean = [float(operation[row] == "layer_norm") for row in range(rows.num_rows)]
    return row_work(
        group.rates,
        rows=num_rows,
        columns=columns,
        read_bytes=width * (2.0 if is_backward else 1.0),
        written_bytes=width,
        sums_columns=is_backward,
        has_mean=np.array(has_mean),
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
)
