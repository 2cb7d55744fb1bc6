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
from shapewright.lint.mlp import mlp_width_fields, pieces_of_width, whole_experts, width_repairs
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for MLP widths that do not divide."""
    for name in mlp_width_fields(case.config):
        width, pieces = getattr(case.config, name), pieces_of_width(case.layout, name)
        if width % pieces:
            is_routed = name == "moe_intermediate_size"
            axis = "expert_tensor_parallel" if is_routed and case.layout.cuts_experts_apart else "tensor_parallel"
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {axis}={pieces}",
                problem=f"does not split over {axis}={pieces}",
                repairs=(
                    *(whole_experts(case) if is_routed else ()),
                    *fitting_degrees(case),
                    *width_repairs(case, name),
                ),
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
        "layout.expert_tensor_parallel",
    ),
    check=check,
)
