"""Many small heads make attention slower than few large ones of the same total width.

## What it does

Fires when heads are narrower than 128 though their width suits the kernels, and the same width in fewer heads is
predicted to be faster. Queries per key-value head stay as they are.

## Why it is slow

Scores, softmax and their traffic grow with the number of heads, while their arithmetic does not: with narrow heads each
score is paid for by little work, and the matrix units wait. On an A100 a layer with h = 2048 ran at 129.66 TFLOP/s
with 16 heads of 128 and at 155.29 with 8 heads of 256; one with h = 2560 at 108.51 with 40 heads of 64 and at 140.70
with 20 heads of 128 (arXiv 2401.14489, logs in jahatef/TransformerSizing). End to end, a 182 B model on 384 A100 ran at
110 TFLOP/s with 128 heads of 108 and at 157 with 64 heads of 216 (topology log of BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC104", num_heads=40, attention="unfused")
True

## Use instead

>>> fires("TC104", num_heads=20, attention="unfused")
False

## Fix safety

`retrain`. Fewer heads see fewer patterns at once; published models of this size use head widths of 64 to 256 without a
clear loss, but the judgement is yours.

## When it does not matter

At short sequences attention is a small share of the step. In decode the KV cache decides, which keeps its size.

## References

- arXiv 2401.14489, rule 3 and figure 8; stas00/ml-engineering, "Number and size of attention heads".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.heads import LARGE_ENOUGH_HEAD_DIM, head_dim_problem, reheading_repairs
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for heads narrower than they need to be."""
    head_dim = case.config.head_dim
    if head_dim >= LARGE_ENOUGH_HEAD_DIM or case.config.num_heads == 1 or head_dim_problem(case) is not None:
        return
    yield Violation(
        field="config.num_heads",
        actual=case.config.num_heads,
        wanted=f"heads of {LARGE_ENOUGH_HEAD_DIM} or more",
        problem=f"makes heads of only {head_dim}",
        repairs=reheading_repairs(case, larger_only=True, smallest=LARGE_ENOUGH_HEAD_DIM),
    )


RULE = Rule(
    code="TC104",
    name="small-heads",
    since="0.1.0",
    reads=("config.num_heads", "config.head_dim", "workload.attention"),
    check=check,
)
