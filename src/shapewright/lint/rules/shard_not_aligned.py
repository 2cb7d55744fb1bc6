"""A dimension is aligned as a whole, but its share on each device of the tensor axis is not.

## What it does

Fires when h/t (the heads of one device together), f/t or an expert's f/t is not a multiple of a full-width load though
the whole is. Shares that are not even whole numbers are the business of `heads-split-unevenly` and
`mlp-width-split-unevenly`; the vocabulary, whose share can be padded, that of `vocab-not-aligned`.

## Why it is slow

What a GEMM sees is the share. A width of 11008 is 172 times 64, but over 8 devices it is 1376, which is 21.5 times 64.
On an A100 a GEMM of 27648 x n x 4096 ran at 227.2 TFLOP/s with n = 256, 206.7 with n = 320, and 116.6 with n = 258
(sweep of arXiv 2401.14489).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL104", intermediate_size=9280, tensor_parallel=4)
True

## Use instead

>>> fires("PL104", intermediate_size=9216, tensor_parallel=4)
False

## Fix safety

`retrain`. Where memory allows a smaller degree, `tensor-parallel-too-large` offers it.

## When it does not matter

From 16 bytes on little is left to gain on Hopper. In decode, GEMMs wait for their weights.

## References

- arXiv 2401.14489, rule 3 ("h/t should be divisible by a power of two").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.heads import reheading_repairs
from shapewright.lint.mlp import mlp_width_fields, pieces_of_width, whole_experts, width_repairs
from shapewright.lint.needs import full_width_multiple, neighbours
from shapewright.lint.reshape import with_hidden_size
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for shares that are aligned only before they are split."""
    t = case.layout.tensor_parallel
    if t == case.layout.tensor_degree_of_experts == 1:
        return
    multiple = full_width_multiple(case.device, case.workload.dtype)
    for name in mlp_width_fields(case.config):
        width, pieces = getattr(case.config, name), pieces_of_width(case.layout, name)
        if _loses_alignment(width, pieces, multiple):
            is_routed = name == "moe_intermediate_size"
            axis = "expert_tensor_parallel" if is_routed and case.layout.cuts_experts_apart else "tensor_parallel"
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {multiple * pieces}",
                problem=f"over {axis}={pieces} is {width // pieces}, not a multiple of {multiple} ({case.setting})",
                repairs=(*(whole_experts(case) if is_routed else ()), *width_repairs(case, name)),
            )
    heads_width = case.config.num_heads * case.config.head_dim
    if not case.config.is_mla and case.config.num_heads % t == 0 and _loses_alignment(heads_width, t, multiple):
        yield Violation(
            field="config.num_heads",
            actual=case.config.num_heads,
            wanted=f"heads of one device together a multiple of {multiple}",
            problem=(
                f"over tensor_parallel={t} gives heads of {heads_width // t} together, not a multiple of {multiple} "
                f"({case.setting})"
            ),
            repairs=(*reheading_repairs(case, larger_only=False), *_widths(case, multiple)),
        )


def _loses_alignment(width: int, degree: int, multiple: int) -> bool:
    return width % degree == 0 and width % multiple == 0 and width // degree % multiple != 0


def _widths(case: WhatIf, multiple: int) -> Iterator[Repair]:
    step = multiple * case.layout.tensor_parallel
    for hidden_size in neighbours(case.config.hidden_size, step):
        changes = with_hidden_size(case.config, hidden_size, step)
        if changes and changes.get("num_heads", 1) % case.layout.tensor_parallel == 0:
            yield Repair(kind="retrain", title=f"use hidden_size={hidden_size}", changes=changes)


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
