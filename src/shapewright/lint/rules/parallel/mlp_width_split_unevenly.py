"""An MLP width does not divide over the tensor parallel devices.

## What it does

Fires when `tensor_parallel` does not divide `intermediate_size`, `moe_intermediate_size` or
`shared_expert_intermediate_size`.

## Why it is slow

Each device computes the same number of columns. Where they do not divide, frameworks refuse to start; padding would
compute ceil(f/t) t columns. Degrees of 6, as on Summit, exclude every width that is a power of two (arXiv 2401.14489,
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

Never: the step cannot run.

## References

- arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import dividing_degree_fixes
from shapewright.lint.rule import Rule, Violation
from shapewright.lint.shape_fixes import (
    count_width_shards,
    list_mlp_width_fields,
    whole_expert_fixes,
    width_axis_degree,
    width_fixes,
)

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find MLP widths that do not divide over the tensor axis."""
    for name in list_mlp_width_fields(scenario.config):
        width, pieces = getattr(scenario.config, name), count_width_shards(scenario.layout, name)
        if width % pieces:
            is_routed = name == "moe_intermediate_size"
            axis = width_axis_degree(scenario.layout, name)
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {axis}={pieces}",
                problem=f"does not split over {axis}={pieces}",
                fixes=(
                    *(whole_expert_fixes(scenario) if is_routed else ()),
                    *dividing_degree_fixes(scenario),
                    *width_fixes(scenario, name),
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
