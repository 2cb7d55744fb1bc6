"""An MLP width that is no multiple of a full-width load slows the largest GEMMs of the model.

## What it does

Fires when `intermediate_size`, `moe_intermediate_size` or `shared_expert_intermediate_size` is not a multiple of what
the dtype and the device need (64 fp16 elements from Ampere on, 8 on Volta). The width 8h/3 of a gated MLP has a rule of
its own, `swiglu-width-not-aligned`; the share of each device has `shard-not-aligned`.

## Why it is slow

The MLP width is the row length of what the up projection writes and the down projection reads. On an A100 a GEMM of
27648 x n x 4096 ran at 137.9 TFLOP/s with n = 128 and at 96.9 with n = 130; at 227.2 with 256 and at 116.6 with 258
(sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC105", intermediate_size=10242)
True

## Use instead

>>> fires("TC105", intermediate_size=10240)
False

## Fix safety

`retrain` in general. Padding a trained MLP with zero weights would be exact, but it changes the shape of the
checkpoint, so it is not offered as an exact fix.

## When it does not matter

In decode the MLP waits for its weights, and in a model with very long sequences attention outweighs it.

## References

- arXiv 2401.14489, rule 3; stas00/ml-engineering, "Vector and matrix size divisibility".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.mlp import mlp_width_fields, width_repairs
from shapewright.lint.needs import full_width_multiple
from shapewright.lint.rule import Rule, Violation
from shapewright.lint.rules.swiglu_width_not_aligned import has_eight_thirds_width

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for MLP widths that are no multiple of a full-width load."""
    multiple = full_width_multiple(case.device, case.workload.dtype)
    for name in mlp_width_fields(case.config):
        width = getattr(case.config, name)
        if width % multiple == 0 or (name == "intermediate_size" and has_eight_thirds_width(case.config)):
            continue
        yield Violation(
            field=f"config.{name}",
            actual=width,
            wanted=f"a multiple of {multiple}",
            problem=f"is not a multiple of {multiple} ({case.setting})",
            repairs=width_repairs(case, name),
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
