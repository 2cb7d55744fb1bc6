"""Collectives records against held-out measured cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judging import ALL_LIMITS as LIMITS
from judging import load_refit, mean_error, measured_file

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.collective import Collective
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.collectives import price_collective


def judge(name: str, rows: Any, *, uncalibrated: bool = False, as_new_shapes: bool = False) -> tuple[Any, Any, Any]:
    """Predicted times, roofline and measured times of rows of one device."""
    device = load_device(name)
    record = load_record("collectives", device.with_pricing(uncalibrated=uncalibrated))
    record = record.without_own_shapes if as_new_shapes else record
    predicted, floor, measured = [], [], []
    for op_name, part in rows.groupby("op_name"):
        operation = Collective(
            name="x",
            op_name=str(op_name),
            axis="tensor",
            message_bytes=part.message_bytes.to_numpy(),
            num_ranks=part.num_gpus.to_numpy(),
            ranks_per_node=part.num_gpus.to_numpy(),
        )
        price = price_collective(operation, device, record)
        predicted.append(price.time_s)
        floor.append(price.roofline_s)
        measured.append(part.latency_s.to_numpy())
    times, bounds, truth = (np.concatenate(parts) for parts in (predicted, floor, measured))
    return times, bounds, truth


@pytest.mark.parametrize("name", list(LIMITS["collectives"]))
def test_held_out_sizes(name: str) -> None:
    """Mean error of a fifth of the (operation, group, message) cells, and of all of them left out in turn.

    That of the fifth is what the record says, and the roofline's is larger.
    """
    script = load_refit("collectives")
    import pandas as pd

    rows = pd.read_parquet(measured_file("collectives.parquet"))
    rows = rows[rows.device == script.DEVICES[name]]
    rows = rows[script.fold_of_rows(rows.op_name, rows.num_gpus, rows.message_bytes) == script.HELD_OUT_FOLD]
    times, bounds, truth = judge(name, rows, as_new_shapes=True)
    report = load_record("collectives", load_device(name)).provenance["reports"]

    assert len(truth) > 15
    error = mean_error(times, truth)
    assert error <= LIMITS["collectives"][name]
    assert error == pytest.approx(report["held_out_fifth"]["mean_absolute_error"], abs=1e-3)
    assert report["held_out"]["rows"] > 150
    assert report["held_out"]["mean_absolute_error"] <= LIMITS["collectives_in_turn"][name]
    assert mean_error(bounds, truth) > 0.4


@pytest.mark.parametrize("name", list(LIMITS["collectives_borrowed"]))
def test_unmeasured_device(name: str) -> None:
    """Without its own record, a device is priced by its links and the mean start of the families."""
    import pandas as pd

    rows = pd.read_parquet(measured_file("collectives.parquet"))
    rows = rows[rows.device == load_refit("collectives").DEVICES[name]]
    times, _, truth = judge(name, rows, uncalibrated=True)

    assert mean_error(times, truth) <= LIMITS["collectives_borrowed"][name]
