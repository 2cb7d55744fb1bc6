"""The last wave of a large GEMM fills only part of the device.

## What it does

Fires when a weight GEMM with at least 4 % of the step, gradients included, has a wave efficiency below 85 %, and a
similar MLP width or micro-batch has no such GEMM and is predicted to be faster.

## Why it is slow

Output tiles run on all SMs concurrently, in waves; one tile more than a full wave costs another wave. On an A100 (108
SMs, tiles of 128 x 256) a GEMM of 2304 x n x 4096 ran at 217.6 TFLOP/s with n = 1536, which is exactly 108 tiles, and
at 180.1 with n = 1600; at 235.0 with n = 3072 and at 201.3 with n = 3136 (sweep of arXiv 2401.14489).

## Example

An MLP of width 3584 makes 224 tiles for 1024 tokens: two waves of 108 and a third with 8.

>>> from shapewright.lint.example import fires
>>> small = {"num_layers": 4, "hidden_size": 1536, "num_heads": 12, "vocab_size": 32000}
>>> fires("WQ102", intermediate_size=3584, micro_batch_size=1, seq_len=1024, **small)
True

## Use instead

The width or micro-batch of the suggestion, whose tiles fill the last wave.

>>> fires("WQ102", intermediate_size=3456, micro_batch_size=1, seq_len=1024, **small)
False

## Fix safety

`runtime` for a micro-batch, `retrain` for an MLP width.

## When it does not matter

With many waves the last one matters little, and persistent kernels distribute its work. The kernel that a library
selects depends on its version, so gains of a few percent may not carry over.

## References

- arXiv 2401.14489, section on wave quantization; NVIDIA, Matrix Multiplication Background User's Guide, "Wave
  quantization".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import full_width_multiple
from shapewright.lint.tails import find_width_axis, list_big_gemms

if TYPE_CHECKING:
    from shapewright.lint.tails import BigGemm
    from shapewright.prediction.scenario import Scenario

# Higher efficiencies lose less than the error of a prediction. Shapes with w waves have a mean efficiency of about
# 1 - 1 / (2 w), so the rule rarely fires with three or more waves.
SMALLEST_WAVE_EFFICIENCY = 0.85

_MOST_WIDTH_CHANGE_FRACTION = 0.1


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find the GEMM that loses most to its last wave, and shapes without such a GEMM."""
    worst = _worst(scenario)
    if worst is None:
        return
    fixes = tuple(fix for fix in _list_fixes(scenario, worst) if _resolves(scenario, fix))
    if not fixes:
        return
    axis = find_width_axis(scenario, worst)
    name = axis.field_name if axis else "micro_batch_size"
    path = f"config.{name}" if axis else f"workload.{name}"
    yield Violation(
        field=path,
        actual=axis.width if axis else scenario.workload.micro_batch_size,
        wanted="a number of tiles that fills whole waves",
        problem=(
            f"gives {worst.operation.name} {round(float(worst.price.num_tiles))} tiles on {worst.slots} slots, "
            f"{float(worst.price.wave_efficiency):.0%} full"
        ),
        fixes=fixes,
    )


def _worst(scenario: Scenario) -> BigGemm | None:
    """Return the large GEMM whose last wave wastes the largest share of the step."""
    if not scenario.is_possible:
        return None
    tails = [
        gemm
        for gemm in list_big_gemms(scenario.predict())
        if gemm.price.wave_efficiency < SMALLEST_WAVE_EFFICIENCY and gemm.price.bound_by == "compute"
    ]
    return max(tails, key=lambda gemm: gemm.step_fraction * (1.0 - float(gemm.price.wave_efficiency)), default=None)


def _resolves(scenario: Scenario, fix: Fix) -> bool:
    after = scenario.try_replace(fix.changes)
    return after is not None and after.is_possible and _worst(after) is None


def _list_fixes(scenario: Scenario, worst: BigGemm) -> Iterator[Fix]:
    yield from _widths(scenario, worst)
    size, layout = scenario.workload.micro_batch_size, scenario.layout
    # A micro-batch of one sequence belongs to micro-batch-too-small.
    if not scenario.workload.is_training or size == 1:
        return
    # Without a global batch, a smaller micro-batch makes the step smaller and the share of the optimizer larger.
    candidates = (size - 1, size + 1) if scenario.workload.global_batch_size else (size + 1,)
    for candidate in candidates:
        both = math.lcm(size, candidate) * layout.data_parallel * layout.pipeline_parallel
        common_changes = {} if scenario.workload.global_batch_size else {"global_batch_size": both}
        yield Fix(
            kind="runtime",
            title=f"use micro_batch_size={candidate}",
            changes={"micro_batch_size": candidate},
            common_changes=common_changes,
        )


def _widths(scenario: Scenario, worst: BigGemm) -> Iterator[Fix]:
    """Suggest the widths with one wave less, and with a full last wave."""
    axis = find_width_axis(scenario, worst)
    if axis is None:
        return
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype) * scenario.layout.tensor_parallel
    other_tiles = -(-axis.other_extent // axis.other_tile) * round(float(worst.price.split_k))
    num_waves = round(float(worst.price.num_waves))
    for waves in (num_waves - 1, num_waves):
        tiles = waves * worst.slots // other_tiles
        width = axis.width_for(tiles * axis.tile) // multiple * multiple
        if width != axis.width and abs(width / axis.width - 1.0) <= _MOST_WIDTH_CHANGE_FRACTION:
            title = f"use {axis.field_name}={width}"
            yield Fix(kind="retrain", title=title, changes={axis.field_name: width})


RULE = Rule(
    code="WQ102",
    name="wave-tail",
    since="0.1.0",
    reads=("config.intermediate_size", "config.hidden_size", "workload.micro_batch_size", "workload.seq_len"),
    check=check,
)
