"""The batch of attention products, b * a, is not a whole number on each device of the tensor axis.

## What it does

Fires when `micro_batch_size * num_heads / tensor_parallel` is no whole number.

## Why it is slow

Scores and attention over values are b a / t products on each device. Where that is not whole, some devices wait for
others: with 4 sequences of 20 heads on 32 devices, 16 devices get three products and 16 get two, so a sixth of the
axis idles. (Arithmetic; rule 4 of arXiv 2401.14489.)

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL102", micro_batch_size=1, num_heads=20, tensor_parallel=8)
True

## Use instead

>>> fires("PL102", micro_batch_size=1, num_heads=20, tensor_parallel=4)
False

## Fix safety

`runtime`.

## When it does not matter

Where heads divide by themselves, this holds for every batch. Frameworks that split heads, and not products, refuse
earlier: see `heads-split-unevenly`.

## References

- arXiv 2401.14489, rule 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.batches import fitting_degrees
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for attention products that do not divide."""
    t, products = case.layout.tensor_parallel, case.workload.micro_batch_size * case.config.num_heads
    if products % t == 0:
        return
    yield Violation(
        field="layout.tensor_parallel",
        actual=t,
        wanted=f"a divisor of micro_batch_size * num_heads = {products}",
        problem=(
            f"does not divide micro_batch_size * num_heads = {case.workload.micro_batch_size} * {case.config.num_heads}"
        ),
        repairs=fitting_degrees(case),
        severity="error",
    )


RULE = Rule(
    code="PL102",
    name="batched-heads-split-unevenly",
    since="0.1.0",
    reads=("workload.micro_batch_size", "config.num_heads", "layout.tensor_parallel"),
    check=check,
)
