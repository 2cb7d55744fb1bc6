"""The tensor axis cannot hand every device the same share of an MLP.

## What it does

Fires when `tensor_parallel` does not divide `intermediate_size`, `moe_intermediate_size` or
`shared_expert_intermediate_size`.

## Why it is slow

Each device computes as many columns as the others. Where they do not divide, frameworks refuse to start; padding would
compute ceil(f/t) t of them. Degrees of 6, as on Summit, rule out every width that is a power of two (arXiv 2401.14489,
section on 6-GPU nodes).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL109", intermediate_size=10242, tensor_parallel=4)
True

## Use instead

>>> fires("PL109", intermediate_size=10240, tensor_parallel=4)
False

## Fix safety

`runtime` for another degree; `retrain` for another width.

## When it does not matter

It always does: the step cannot run.

## References

- arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.batches import fitting_degrees
from shapewright.lint.mlp import mlp_width_fields, width_repairs
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for MLP widths that do not divide."""
    t = case.layout.tensor_parallel
    for name in mlp_width_fields(case.config):
        width = getattr(case.config, name)
        if width % t:
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of tensor_parallel={t}",
                problem=f"does not split over tensor_parallel={t}",
                repairs=(*fitting_degrees(case), *width_repairs(case, name)),
                severity="error",
            )


RULE = Rule(
    code="PL109",
    name="mlp-width-split-unevenly",
    since="0.1.0",
    reads=(
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "config.shared_expert_intermediate_size",
        "layout.tensor_parallel",
    ),
    check=check,
)
