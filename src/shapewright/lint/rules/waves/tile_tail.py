"""The last tile along an MLP width is mostly padding.

## What it does

Fires when an aligned MLP width is an output dimension of a weight GEMM with at least 4 % of the step, gradients
included, and more than a tenth of the tiles along it is padding.

## Why it is slow

The output is divided into tiles of, for example, 128 x 256, and each tile is computed in full. On an A100 a GEMM of
27648 x n x 4096 ran at 242.6 TFLOP/s with n = 384, and at 220.8 with n = 448, which is 1.75 tiles of 256 (sweep of
arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

On an H100, an expert of width 320 fills 2.5 tiles of 128.

>>> from shapewright.lint.example import fires
>>> experts = {"num_layers": 4, "hidden_size": 2048, "num_heads": 16, "num_experts": 16, "num_experts_per_token": 4}
>>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=320, **experts)
True

## Use instead

The width of the suggestion, which fills the tiles of the assumed kernel.

>>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=384, **experts)
False

## Fix safety

`retrain`.

## When it does not matter

Where the width has many tiles, the last one matters little. The tile that a library selects depends on its version.

## References

- arXiv 2401.14489, section on tile quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Tile
  quantization".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import full_width_multiple, nearest_multiples
from shapewright.lint.tails import WidthAxis, find_width_axis, list_big_gemms

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

# Higher efficiencies lose less than the error of a prediction.
SMALLEST_TILE_EFFICIENCY = 0.9


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find the width with the lowest tile efficiency."""
    worst = _worst(scenario)
    if worst is None:
        return
    fixes = []
    for extent in nearest_multiples(worst.extent, worst.tile):
        changes = {worst.field_name: worst.width_for(extent)}
        after = scenario.try_replace(changes)
        if after is not None and after.is_possible and _worst(after) is None:
            title = f"use {changes[worst.field_name]}"
            fixes.append(Fix(kind="retrain", title=title, changes=changes))
    if fixes:
        yield Violation(
            field=f"config.{worst.field_name}",
            actual=worst.width,
            wanted=f"a multiple of {worst.tile} on each device",
            problem=f"fills {_efficiency(worst):.0%} of its tiles of {worst.tile}",
            fixes=tuple(fixes),
        )


def _worst(scenario: Scenario) -> WidthAxis | None:
    if not scenario.is_possible:
        return None
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    axes = [
        axis for gemm in list_big_gemms(scenario.predict()) if (axis := find_width_axis(scenario, gemm)) is not None
    ]
    tails = [axis for axis in axes if axis.width % multiple == 0 and _efficiency(axis) < SMALLEST_TILE_EFFICIENCY]
    return min(tails, key=_efficiency, default=None)


def _efficiency(axis: WidthAxis) -> float:
    """Return the share of the tiles along a dimension that is not padding."""
    return axis.extent / (-(-axis.extent // axis.tile) * axis.tile)


RULE = Rule(
    code="WQ103",
    name="tile-tail",
    since="0.1.0",
    reads=("config.intermediate_size", "config.moe_intermediate_size", "workload.dtype"),
    check=check,
)
