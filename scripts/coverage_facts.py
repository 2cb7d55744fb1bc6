"""Coverage of the 90 % intervals by measured table, for docs/accuracy.md. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.measure.accuracy.evaluate import Accuracy, evaluate_folder
from shapewright.measure.refit.intervals.rows import SHAPE_COLUMNS, held_out_rows, price_rows
from shapewright.prediction.loss.law import load_loss_law, loss_recipes
from shapewright.pricing.calibration.records import KERNEL_KINDS, list_records

# Cells of device, format and library with fewer rows are too small to estimate coverage.
FEWEST_ROWS = 200
INSIDE = (0.85, 0.95)


def is_inside(share: float) -> bool:
    """Whether a coverage is in the accepted range of a 90 % interval."""
    return INSIDE[0] <= share <= INSIDE[1]


def coverage_facts(data: Path, together: dict[str, Accuracy]) -> list[dict[str, Any]]:
    """Coverage and width of each table: all rows, cells, held-out rows, held-out devices.

    Args:
        data: Folder with the measured tables.
        together: Errors by table, all devices together.
    """
    cells = _by_table(evaluate_folder(data).rows)
    far = _by_table(evaluate_folder(data, uncalibrated=True).rows)
    return [
        {
            "table": name,
            "covered": row.coverage_90,
            "width": row.interval_width,
            **_cells(cells[name]),
            "unseen": _unseen(data, name) if name in ("gemm", *SHAPE_COLUMNS) else _unseen_layouts(name),
            "left_out": _left_out_losses() if name == "loss_by_shape" else _left_out(far.get(name, [])),
        }
        for name, row in together.items()
    ]


def _by_table(rows: Iterable[Accuracy]) -> dict[str, list[Accuracy]]:
    found: dict[str, list[Accuracy]] = {}
    for row in rows:
        found.setdefault(row.table, []).append(row)
    return found


def _cells(rows: list[Accuracy]) -> dict[str, Any]:
    """Number of cells, and those outside the accepted range."""
    large = [row for row in rows if row.rows >= FEWEST_ROWS]
    outside = {
        f"{row.device} {row.dtype} {row.library}": row.coverage_90 for row in large if not is_inside(row.coverage_90)
    }
    return {"cells": len(large), "outside": outside}


def _unseen(data: Path, table: str) -> dict[str, Any]:
    """Coverage and width on held-out rows."""
    rows = price_rows(table, held_out_rows(data, table), as_new_shapes=True)
    covered = ((rows.measured >= rows.low) & (rows.measured <= rows.high)).astype(float)
    cells = covered.groupby([rows.device, rows.dtype, rows.library]).agg(["mean", "size"])
    cells = cells[cells["size"] >= FEWEST_ROWS]
    sizes = {"below 20 us": rows.predicted < 2e-5, "above 1 ms": rows.predicted > 1e-3}
    return {
        "rows": len(rows),
        "covered": float(covered.mean()),
        "width": float(np.log(rows.high / rows.low).mean()),
        "cells": len(cells),
        "cells_inside": int(cells["mean"].map(is_inside).sum()),
        **{name: float(covered[here].mean()) if here.sum() >= FEWEST_ROWS else None for name, here in sizes.items()},
    }


def _unseen_layouts(table: str) -> dict[str, Any] | None:
    """Coverage of kernels' layouts left out in turn, each judged by the others; from the provenance of the records."""
    if table not in KERNEL_KINDS:
        return None
    cells = [cell for record in list_records(table) for cell in record.provenance.get("covered_left_out", {}).values()]
    rows = sum(cell["rows"] for cell in cells)
    large = [cell["covered"] for cell in cells if cell["rows"] >= FEWEST_ROWS]
    return {
        "rows": rows,
        "covered": sum(cell["covered"] * cell["rows"] for cell in cells) / max(rows, 1),
        "cells": len(large),
        "cells_inside": sum(map(is_inside, large)),
    }


def _left_out(rows: list[Accuracy]) -> dict[str, float] | None:
    """Coverage by device when each is priced with the calibration and intervals of the others."""
    devices: dict[str, list[Accuracy]] = {}
    for row in rows:
        devices.setdefault(row.device, []).append(row)
    shares = {
        name: sum(row.coverage_90 * row.rows for row in own) / sum(row.rows for row in own)
        for name, own in devices.items()
    }
    return dict(sorted(shares.items(), key=lambda item: item[1])) or None


def _left_out_losses() -> dict[str, float]:
    """Coverage of losses of models left out, by source, from the record of the loss law."""
    sources: dict[str, list[tuple[int, float]]] = {}
    for recipe in loss_recipes():
        facts = load_loss_law(recipe).provenance
        if "held_out_coverage_90" in facts:
            sources.setdefault(recipe.partition(",")[0], []).append((facts["rows"], facts["held_out_coverage_90"]))
    shares = {
        name: sum(rows * share for rows, share in own) / sum(rows for rows, _ in own) for name, own in sources.items()
    }
    return dict(sorted(shares.items(), key=lambda item: item[1]))
