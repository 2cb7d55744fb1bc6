"""An MLP width is not a multiple of a full-width load, which slows the largest GEMMs of the model.

## What it does

Fires when `intermediate_size`, `moe_intermediate_size` or `shared_expert_intermediate_size` is not a multiple of the
full-width load of dtype and device (64 fp16 elements on Ampere and newer, 8 on Volta). The width 8h/3 of a gated MLP
belongs to `swiglu-width-not-aligned`, tensor parallel shards to `shard-not-aligned`.

## Why it is slow

The MLP width is the row length of the output of the up projection and the input of the down projection. On an A100 a
GEMM of 27648 x n x 4096 ran at 137.9 TFLOP/s with n = 128 and at 96.9 with n = 130; at 227.2 with 256 and at 116.6 with
258 (sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC105", intermediate_size=10242)
True

## Use instead

>>> fires("TC105", intermediate_size=10240)
False

## Fix safety

`retrain`. Padding a trained MLP with zero weights is exact, but changes the shape of the checkpoint, so it is not
suggested as an exact fix.

## When it does not matter

In decode, where the MLP is memory-bound, and with very long sequences, where attention dominates.

## References

- arXiv 2401.14489, rule 3; stas00/ml-engineering, "Vector and matrix size divisibility".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation
from shapewright.lint.rules.tensor_core.swiglu_width_not_aligned import has_eight_thirds_width
from shapewright.lint.shape_fixes import full_width_multiple, list_mlp_width_fields, width_fixes

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find MLP widths that are not multiples of a full-width load."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    for name in list_mlp_width_fields(scenario.config):
        width = getattr(scenario.config, name)
        if width % multiple == 0 or (name == "intermediate_size" and has_eight_thirds_width(scenario.config)):
            continue
        yield Violation(
            field=f"config.{name}",
            actual=width,
            wanted=f"a multiple of {multiple}",
            problem=f"is not a multiple of {multiple} ({scenario.dtype_and_device})",
            fixes=width_fixes(scenario, name),
        )


RULE = Rule(
    code="TC105",
    name="mlp-width-not-aligned",
    since="0.1.0",
    reads=(
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "config.shared_expert_intermediate_size",
        "workload.dtype",
    ),
    check=check,
)
