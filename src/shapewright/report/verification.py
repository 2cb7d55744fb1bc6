"""A verified search for a person and as JSON: measured beside predicted speed-ups."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_notes, print_table
from shapewright.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.search.verified import Verification

_COLUMNS = (
    Column("rank"),
    Column("predicted"),
    Column("of what is measured"),
    Column("measured"),
    Column("rounds", rank=1),
    Column("covered", rank=2),
)
_MODULE_COLUMNS = (Column("part", is_text=True), Column("baseline"), Column("shape"), Column("saves"))


def verification_to_json(found: Verification) -> dict[str, Any]:
    """Turn what was measured into plain dicts, lists, numbers and strings."""
    facts = asdict(found)
    for shape in facts["shapes"]:
        shape["modules"] = {
            module: {"baseline_s": before_s, "shape_s": after_s}
            for module, (before_s, after_s) in shape["modules"].items()
        }
    return facts


def print_verification(found: Verification, console: Console) -> None:
    """Print measured beside predicted speed-ups, and the first shape part by part."""
    console.print(f"Measured on {found.device} ({found.library}), {found.num_rounds} rounds in turns", style="bold")
    rows = [
        [
            str(shape.rank),
            f"{shape.predicted:.3f}x",
            f"{shape.predicted_of_measured:.3f}x",
            f"{shape.measured:.3f}x",
            f"{shape.measured_low:.3f} to {shape.measured_high:.3f}",
            f"{100.0 * shape.covered_fraction:.0f} %",
        ]
        for shape in found.shapes
    ]
    print_table(columns_of(rows, _COLUMNS), console)
    first = found.shapes[0]
    total_s = sum(before_s for before_s, _ in first.modules.values())
    modules = sorted(first.modules.items(), key=lambda item: item[1][1] - item[1][0])
    console.print()
    console.print(f"Rank {first.rank} by part of the model, measured, for the baseline's work", style="bold")
    print_table(
        columns_of(
            [
                [name, format_seconds(before), format_seconds(after), f"{100.0 * (before - after) / total_s:+.1f} %"]
                for name, (before, after) in modules
            ],
            _MODULE_COLUMNS,
        ),
        console,
    )
    print_notes(found.notes, console)
    console.print()
