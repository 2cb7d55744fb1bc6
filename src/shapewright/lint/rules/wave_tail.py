"""A big GEMM ends in a wave that fills only part of the device.

## What it does

Fires when a weight GEMM that with its gradients takes at least 4 % of the step fills less than 85 % of the slots of its
waves, and an MLP width or a micro-batch nearby would leave no such GEMM and is predicted to be faster.

## Why it is slow

Output tiles run on all SMs at once, in waves; one tile more than a whole wave costs a whole wave. On an A100
(108 SMs, tiles of 128 x 256) a GEMM of 2304 x n x 4096 ran at 217.6 TFLOP/s with n = 1536, which is exactly 108 tiles,
and at 180.1 with n = 1600; likewise 235.0 and 201.3 after n = 3072 (sweep of arXiv 2401.14489).

## Example

An MLP of width 3584 makes 224 tiles for 1024 tokens: two waves of 108 and a third with 8.

>>> from shapewright.lint.example import fires
>>> small = {"num_layers": 4, "hidden_size": 1536, "num_heads": 12, "vocab_size": 32000}
>>> fires("WQ102", intermediate_size=3584, micro_batch_size=1, seq_len=1024, **small)
True

## Use instead

The width or micro-batch that the finding names: tiles that end with a wave.

>>> fires("WQ102", intermediate_size=3456, micro_batch_size=1, seq_len=1024, **small)
False

## Fix safety

A micro-batch is `runtime`; an MLP width is `retrain`.

## When it does not matter

With many waves the last one weighs little, and persistent kernels share its work. Which kernel a library picks changes
from version to version, so do not chase the last percent.

## References

- arXiv 2401.14489, section on wave quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Wave
  quantization".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple
from shapewright.lint.rule import Repair, Rule, Violation
from shapewright.lint.tails import big_gemms, width_axis

if TYPE_CHECKING:
    from shapewright.lint.tails import BigGemm
    from shapewright.lint.what_if import WhatIf

# Below this the last wave is visible beside the error of a price. With w waves the mean of an unlucky shape is
# 1 - 1 / (2 w), so three waves and more seldom come here.
SMALLEST_WAVE_EFFICIENCY = 0.85

_MOST_WIDTH_CHANGE_FRACTION = 0.1


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for the GEMM that loses most to its last wave, and for shapes without such a GEMM."""
    worst = _worst(case)
    if worst is None:
        return
    repairs = tuple(repair for repair in _repairs(case, worst) if _mends(case, repair))
    if not repairs:
        return
    axis = width_axis(case, worst)
    name = axis.field_name if axis else "micro_batch_size"
    path = f"config.{name}" if axis else f"workload.{name}"
    yield Violation(
        field=path,
        actual=axis.width if axis else case.workload.micro_batch_size,
        wanted="tiles that fill whole waves",
        problem=(
            f"gives {worst.operation.name} {round(float(worst.price.num_tiles))} tiles on {worst.slots} slots, "
            f"{float(worst.price.wave_efficiency):.0%} full"
        ),
        repairs=repairs,
    )


def _worst(case: WhatIf) -> BigGemm | None:
    """The big GEMM that wastes most of the step in its last wave."""
    if not case.is_possible:
        return None
    tails = [
        gemm
        for gemm in big_gemms(case.prediction)
        if gemm.price.wave_efficiency < SMALLEST_WAVE_EFFICIENCY and gemm.price.bound_by == "compute"
    ]
    return max(tails, key=lambda gemm: gemm.step_fraction * (1.0 - float(gemm.price.wave_efficiency)), default=None)


def _mends(case: WhatIf, repair: Repair) -> bool:
    after = case.changed(repair.changes)
    return after is not None and after.is_possible and _worst(after) is None


def _repairs(case: WhatIf, worst: BigGemm) -> Iterator[Repair]:
    yield from _widths(case, worst)
    size, layout = case.workload.micro_batch_size, case.layout
    # From one sequence to two everything changes; that is the business of micro-batch-too-small.
    if not case.workload.is_training or size == 1:
        return
    # Without a global batch a smaller micro-batch would make the step smaller, and the optimiser weigh more.
    candidates = (size - 1, size + 1) if case.workload.global_batch_size else (size + 1,)
    for candidate in candidates:
        both = math.lcm(size, candidate) * layout.data_parallel * layout.pipeline_parallel
        at_equal = {} if case.workload.global_batch_size else {"global_batch_size": both}
        yield Repair(
            kind="runtime",
            title=f"use micro_batch_size={candidate}",
            changes={"micro_batch_size": candidate},
            at_equal=at_equal,
        )


def _widths(case: WhatIf, worst: BigGemm) -> Iterator[Repair]:
    """The widths at which the last wave is full, and at which it is not begun."""
    axis = width_axis(case, worst)
    if axis is None:
        return
    multiple = full_width_multiple(case.device, case.workload.dtype) * case.layout.tensor_parallel
    other_tiles = -(-axis.other_extent // axis.other_tile) * round(float(worst.price.split_k))
    num_waves = round(float(worst.price.num_waves))
    for waves in (num_waves - 1, num_waves):
        tiles = waves * worst.slots // other_tiles
        width = axis.width_for(tiles * axis.tile) // multiple * multiple
        if width != axis.width and abs(width / axis.width - 1.0) <= _MOST_WIDTH_CHANGE_FRACTION:
            title = f"use {axis.field_name}={width}"
            yield Repair(kind="retrain", title=title, changes={axis.field_name: width})


RULE = Rule(
    code="WQ102",
    name="wave-tail",
    since="0.1.0",
    reads=("config.intermediate_size", "config.hidden_size", "workload.micro_batch_size", "workload.seq_len"),
    check=check,
)
