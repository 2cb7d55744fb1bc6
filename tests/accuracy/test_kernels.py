"""Kernels priced by their work against measured tables: whole layouts that the fit left out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from judging import ALL_LIMITS, measured_file

from shapewright.hardware.loader import find_measured_device
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.kernels import KernelGroup
from shapewright.measure.accuracy.tables.registry import KERNEL_TABLES
from shapewright.pricing.kernels.price import kernel_rates

pytest.importorskip("scipy", reason="refits need the fit extra")

from shapewright.measure.refit import kernels

LIMITS = ALL_LIMITS["kernels"]
TABLES = {table.name: table for table in KERNEL_TABLES}
# One device and every fourth kernel tell the numbers of large tables as well, and are quicker.
ONE_DEVICE = {
    "attention_encoder": "h100_sxm",
    "mla": "h100_sxm",
    "quantize": "l40s",
    "linear_attention": "h100_sxm",
    "sparse_attention": "h100_sxm",
}


@pytest.mark.parametrize("name", LIMITS)
def test_layouts_left_out(name: str) -> None:
    """Fitted without whole layouts, the mean error on them stays within the limit."""
    table = TABLES[name]
    columns = table.label_sizes(read_columns(measured_file(table.file_name), table.columns, Counter()))
    errors = []
    for (alias,), rows in columns.groups("device"):
        if alias != ONE_DEVICE.get(name, alias):
            continue
        device = find_measured_device(alias)
        groups = list(rows.groups(*table.labels))
        for labels, own in groups[:: 4 if len(groups) > 30 else 1]:
            group = KernelGroup(dict(zip(table.labels, labels, strict=True)), device, kernel_rates(device))
            layouts = [np.nan_to_num(own.numbers[column]) for column in table.layout]
            work = table.build(own, group)
            fit = kernels.fit_kernel(
                work, own.numbers["latency_s"], layouts, table.axes, shapes_recur=table.shapes_recur
            )
            if "left_out" in fit.report:
                left_out = fit.report["left_out"]
                errors += [left_out["mean_absolute_error"]] * left_out["rows"]

    assert float(np.mean(errors)) <= LIMITS[name]
