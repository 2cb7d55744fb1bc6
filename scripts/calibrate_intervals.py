"""Fit the intervals of src/shapewright/perf/data/intervals from rows that no fit of the records saw.

    python scripts/calibrate_intervals.py --data DIR [--kind gemm]

Run it last, whenever a record was fitted anew: it prices the measured tables of DIR with the records as they are, and
asks how far the rows lie off that no fit saw, that another library ran, or whose device is left out. Groups are
explained in ``shapewright.perf.intervals``, what was tried in docs/decisions/0012-intervals.md. Needs the ``fit``
extra; two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibrate_collectives import ONE_MACHINE_GROUPS
from calibration import argument_parser, record_path
from interval_attention import attention_groups
from interval_experts import expert_groups
from interval_groups import Groups, own_groups, parts_of
from interval_products import product_groups, usual_biases
from interval_rows import collective_cells, foreign_pointwise_rows, price_rows, read_table, seen_and_halves
from interval_transfer import kin_of, transfer_groups

from shapewright.fit.intervals import pool
from shapewright.fit.left_out import left_out_interval, usual_bias
from shapewright.fit.logs import tidy
from shapewright.hardware import load_device
from shapewright.perf.calibration import load_record


def collective_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Collectives: their records, devices left out."""
    columns = read_table(folder, "collectives")
    own = [
        price_rows("collectives", columns.take(chosen)).assign(**said)
        for chosen, said in seen_and_halves("collectives", columns, collective_cells(columns))
    ]
    rows = pd.concat(own, ignore_index=True)
    paths = {name: f"own/{load_record('collectives', load_device(name)).id}/collectives" for name in set(rows.device)}
    groups, report = own_groups(rows.assign(path=rows.device.map(paths), regime_s=rows.predicted), "table")
    far = price_rows("collectives", columns, uncalibrated=True)
    # Groups that say more of one machine than of its links, as the records hold them apart.
    for name, sizes in ONE_MACHINE_GROUPS.items():
        far = far[~((far.device == name) & far.part.str.endswith(tuple(f" x{size}" for size in sizes)))]
    return groups | transfer_groups("collectives", far.assign(format=""), usual_biases(folder)), report


def pointwise_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Mask and softmax on another maker's chip: all else was measured on one device alone.

    On a third maker's they may be as far off as that chip's are from those of the record's device, or as products are.
    """
    parts = parts_of(foreign_pointwise_rows(folder), ["device"])
    usual = usual_biases(folder).usual["foreign"]
    groups: Groups = {}
    for device, rows in parts.items():
        record = load_record("pointwise", load_device(device))
        kin = kin_of("foreign", {device, *usual})
        for kind in ("mask", "softmax"):
            kinds = record.parameters["kinds"]
            bias = float(np.log(kinds[kind]["bandwidth_fraction"] / kinds[f"foreign_{kind}"]["bandwidth_fraction"]))
            known: dict[str, Any] = {
                "biases": {device: bias},
                "usual": usual_bias(usual, kin),
                "scatter": {device: rows},
            }
            groups[f"own/{device}/{kind}"] = pool([rows], edges_s=())
            groups[f"foreign/{kind}"] = left_out_interval({}, **known)
    return groups, {}


MAKERS: Mapping[str, Callable[[Path], tuple[Groups, dict[str, Any]]]] = {
    "gemm": product_groups,
    "attention": attention_groups,
    "moe": expert_groups,
    "collectives": collective_groups,
    "pointwise": pointwise_groups,
}


def write_groups(kind: str, groups: Groups, report: dict[str, Any]) -> Path:
    """Write the groups of a kind, one a line."""
    head = {
        "kind": kind,
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python scripts/calibrate_intervals.py --data DIR --kind {kind}",
        "held_out": report,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(tidy(value))}" for name, value in sorted(groups.items())]
    path = record_path("intervals", kind)
    path.parent.mkdir(exist_ok=True)
    body = json.dumps(head, indent=1)[:-2]
    path.write_text(f'{body},\n "groups": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8")
    return path


def main() -> None:
    """Fit and write the groups of every kind."""
    parser = argument_parser(__doc__)
    parser.add_argument("--kind", choices=MAKERS, action="append", help="may be given again; default: all")
    given = parser.parse_args()
    for kind in given.kind or MAKERS:
        # Own groups are made of what records say without them.
        groups, report = MAKERS[kind](given.data)
        print(write_groups(kind, groups, report), len(groups), "groups", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
