"""An MLP width ends in a tile that is mostly padding.

## What it does

Fires when a weight GEMM that with its gradients takes at least 4 % of the step computes more than a tenth of its tiles
for nothing, along a dimension that an MLP width decides, though the width is aligned.

## Why it is slow

The output is cut into tiles of, say, 128 x 256, and a tile is computed whole even if one column of it is needed. On an
A100 a GEMM of 27648 x n x 4096 ran at 242.6 TFLOP/s with n = 384, and at 220.8 with n = 448, which is 1.75 tiles of 256
(sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

On an H100, an expert of width 320 fills two and a half tiles of 128.

>>> from shapewright.lint.example import fires
>>> experts = {"num_layers": 4, "hidden_size": 2048, "num_heads": 16, "num_experts": 16, "num_experts_per_token": 4}
>>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=320, **experts)
True

## Use instead

The width that the finding names: whole tiles of the kernel that was assumed.

>>> fires("WQ103", device="h100-sxm-80gb", moe_intermediate_size=384, **experts)
False

## Fix safety

`retrain`.

## When it does not matter

A width of many tiles loses little to its last one. Which tile a library picks changes from version to version.

## References

- arXiv 2401.14489, section on tile quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Tile
  quantization".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple, neighbours
from shapewright.lint.rule import Repair, Rule, Violation
from shapewright.lint.tails import WidthAxis, big_gemms, width_axis

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

# Below this the last tile is visible beside the error of a price.
SMALLEST_TILE_EFFICIENCY = 0.9


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for the width that loses most to its last tile."""
    worst = _worst(case)
    if worst is None:
        return
    repairs = []
    for extent in neighbours(worst.extent, worst.tile):
        changes = {worst.field_name: worst.width_for(extent)}
        after = case.changed(changes)
        if after is not None and after.is_possible and _worst(after) is None:
            title = f"use {changes[worst.field_name]}"
            repairs.append(Repair(kind="retrain", title=title, changes=changes))
    if repairs:
        yield Violation(
            field=f"config.{worst.field_name}",
            actual=worst.width,
            wanted=f"a multiple of {worst.tile} on each device",
            problem=f"fills {_efficiency(worst):.0%} of its tiles of {worst.tile}",
            repairs=tuple(repairs),
        )


def _worst(case: WhatIf) -> WidthAxis | None:
    if not case.is_possible:
        return None
    multiple = full_width_multiple(case.device, case.workload.dtype)
    axes = [axis for gemm in big_gemms(case.prediction) if (axis := width_axis(case, gemm)) is not None]
    tails = [axis for axis in axes if axis.width % multiple == 0 and _efficiency(axis) < SMALLEST_TILE_EFFICIENCY]
    return min(tails, key=_efficiency, default=None)


def _efficiency(axis: WidthAxis) -> float:
    """Share of the tiles along the dimension that is output."""
    return axis.extent / (-(-axis.extent // axis.tile) * axis.tile)


RULE = Rule(
    code="WQ103",
    name="tile-tail",
    since="0.1.0",
    reads=("config.intermediate_size", "config.moe_intermediate_size", "workload.dtype"),
    check=check,
)
