"""Fit the interval files of the package from rows that no fit of a record saw.

The measured tables are priced with the committed records; intervals follow from the errors on held-out rows, on rows of
other libraries, and on left-out devices. The groups are described in ``shapewright.pricing.calibration.intervals``,
rejected alternatives in docs/decisions/0012-intervals.md. Two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware.loader import load_device
from shapewright.measure.fit.shared import round_numbers
from shapewright.measure.refit.collectives import ONE_MACHINE_GROUPS
from shapewright.measure.refit.intervals.gemm import gemm_groups, prior_biases
from shapewright.measure.refit.intervals.kernels import attention_groups, expert_groups
from shapewright.measure.refit.intervals.left_out import causes_of, left_out_interval, prior_bias_of, transfer_groups
from shapewright.measure.refit.intervals.residual_intervals import Groups, own_groups, parts_of, pool
from shapewright.measure.refit.intervals.rows import foreign_pointwise_rows, price_rows, read_table, seen_and_halves
from shapewright.measure.refit.record_files import command, record_path
from shapewright.pricing.calibration.records import load_record


def collective_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return the interval groups of collectives: their records, left-out devices."""
    columns = read_table(folder, "collectives")
    own = [
        price_rows("collectives", columns.take(chosen), as_new_shapes=True).assign(**labels)
        for chosen, labels in seen_and_halves("collectives", columns)
    ]
    rows = pd.concat(own, ignore_index=True)
    paths = {name: f"own/{load_record('collectives', load_device(name)).id}/collectives" for name in set(rows.device)}
    groups, report = own_groups(rows.assign(path=rows.device.map(paths), regime_s=rows.predicted), "table")
    far = price_rows("collectives", columns, uncalibrated=True)
    # Groups whose measurement depends on the machine are left out, as in the records.
    for name, sizes in ONE_MACHINE_GROUPS.items():
        parts = [f"{op_name} x{size}" for op_name in columns.labels["op_name"].words for size in sizes]
        far = far[~((far.device == name) & far.part.isin(parts))]
    return groups | transfer_groups(
        "collectives", far.assign(format="", format_family=""), prior_biases(folder)
    ), report


def pointwise_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return the interval groups of mask and softmax on another vendor's chip; other kinds have one measured device.

    On a third vendor's chip they may be as far off as that chip is from the record's device, or as GEMMs are.
    """
    parts = parts_of(foreign_pointwise_rows(folder), ["device"])
    prior = prior_biases(folder).prior["foreign"]
    groups: Groups = {}
    for device, rows in parts.items():
        record = load_record("pointwise", load_device(device))
        causes = causes_of("foreign", {device, *prior})
        for kind in ("mask", "softmax"):
            kinds = record.parameters["kinds"]
            bias = float(np.log(kinds[kind]["bandwidth_fraction"] / kinds[f"foreign_{kind}"]["bandwidth_fraction"]))
            known: dict[str, Any] = {
                "biases": {device: bias},
                "prior": prior_bias_of(prior, causes),
                "scatter": {device: rows},
            }
            groups[f"own/{device}/{kind}"] = pool([rows], edges_s=())
            groups[f"foreign/{kind}"] = left_out_interval({}, **known)
    return groups, {}


GROUP_FUNCTIONS: Mapping[str, Callable[[Path], tuple[Groups, dict[str, Any]]]] = {
    "gemm": gemm_groups,
    "attention": attention_groups,
    "moe": expert_groups,
    "collectives": collective_groups,
    "pointwise": pointwise_groups,
}


def write_groups(kind: str, groups: Groups, report: dict[str, Any], *, step: str = "") -> Path:
    """Write the groups of a kind, one per line; ``step`` is the refit that made them, if not that of this module."""
    head = {
        "kind": kind,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command(step) if step else command("intervals", f"--kind {kind}"),
        "held_out": report,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(round_numbers(value))}" for name, value in sorted(groups.items())]
    path = record_path("intervals", kind)
    path.parent.mkdir(exist_ok=True)
    body = json.dumps(head, indent=1)[:-2]
    path.write_text(f'{body},\n "groups": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    return path


def refit(data: Path, kinds: Sequence[str] = ()) -> None:
    """Fit and write the interval groups of every kind of operation, or of some kinds."""
    for kind in kinds or GROUP_FUNCTIONS:
        groups, report = GROUP_FUNCTIONS[kind](data)
        print(write_groups(kind, groups, report), len(groups), "groups", json.dumps(report), flush=True)
