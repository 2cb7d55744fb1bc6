"""A dimension is aligned, but its shard on each tensor parallel device is not.

## What it does

Fires when h/t (all heads of one device), f/t or the f/t of an expert is not a multiple of a full-width load although
the whole dimension is. Dimensions that t does not divide belong to `heads-split-unevenly` and
`mlp-width-split-unevenly`, the vocabulary to `vocab-not-aligned`.

## Why it is slow

Each GEMM runs on the shard. A width of 11008 is 172 times 64, but over 8 devices it is 1376, which is 21.5 times 64. On
an A100 a GEMM of 27648 x n x 4096 ran at 227.2 TFLOP/s with n = 256, 206.7 with n = 320, and 116.6 with n = 258 (sweep
of arXiv 2401.14489).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL104", intermediate_size=9280, tensor_parallel=4)
True

## Use instead

>>> fires("PL104", intermediate_size=9216, tensor_parallel=4)
False

## Fix safety

`retrain`. Where memory allows a smaller degree, `tensor-parallel-too-large` suggests it.

## When it does not matter

With an alignment of 16 bytes or more, little is left to gain on Hopper. In decode, GEMMs are memory-bound.

## References

- arXiv 2401.14489, rule 3 ("h/t should be divisible by a power of two").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import (
    count_width_shards,
    full_width_multiple,
    head_count_fixes,
    list_mlp_width_fields,
    nearest_multiples,
    whole_expert_fixes,
    width_axis_degree,
    width_fixes,
    with_hidden_size,
)

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find shards that are not aligned although the whole dimension is."""
    t = scenario.layout.tensor_parallel
    if t == scenario.layout.expert_tensor_degree == 1:
        return
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    for name in list_mlp_width_fields(scenario.config):
        width, pieces = getattr(scenario.config, name), count_width_shards(scenario.layout, name)
        if _loses_alignment(width, pieces, multiple):
            is_routed = name == "moe_intermediate_size"
            axis = width_axis_degree(scenario.layout, name)
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {multiple * pieces}",
                problem=(
                    f"over {axis}={pieces} is {width // pieces}, not a multiple of {multiple} "
                    f"({scenario.dtype_and_device})"
                ),
                fixes=(*(whole_expert_fixes(scenario) if is_routed else ()), *width_fixes(scenario, name)),
            )
    heads_width = scenario.config.num_heads * scenario.config.head_dim
    if not scenario.config.is_mla and scenario.config.num_heads % t == 0 and _loses_alignment(heads_width, t, multiple):
        yield Violation(
            field="config.num_heads",
            actual=scenario.config.num_heads,
            wanted=f"num_heads * head_dim on one device a multiple of {multiple}",
            problem=(
                f"over tensor_parallel={t} gives num_heads * head_dim = {heads_width // t} on one device, "
                f"not a multiple of {multiple} ({scenario.dtype_and_device})"
            ),
            fixes=(*head_count_fixes(scenario, larger_only=False), *_widths(scenario, multiple)),
        )


def _loses_alignment(width: int, degree: int, multiple: int) -> bool:
    return width % degree == 0 and width % multiple == 0 and width // degree % multiple != 0


def _widths(scenario: Scenario, multiple: int) -> Iterator[Fix]:
    step = multiple * scenario.layout.tensor_parallel
    for hidden_size in nearest_multiples(scenario.config.hidden_size, step):
        changes = with_hidden_size(scenario.config, hidden_size, step)
        if changes and changes.get("num_heads", 1) % scenario.layout.tensor_parallel == 0:
            yield Fix(kind="retrain", title=f"use hidden_size={hidden_size}", changes=changes)


RULE = Rule(
    code="PL104",
    name="shard-not-aligned",
    since="0.1.0",
    reads=(
        "config.num_heads",
        "config.head_dim",
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "layout.tensor_parallel",
        "layout.expert_tensor_parallel",
    ),
    check=check,
)
