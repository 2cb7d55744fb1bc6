"""Many small heads are slower than fewer large heads with the same total width.

## What it does

Fires when `head_dim` is below 128 and supported by the kernels, and the same width in fewer heads is predicted to be
faster. Queries per key-value head stay the same.

## Why it is slow

The number of scores, their softmax and memory traffic grow with the number of heads, while the FLOPs of the GEMMs do
not: with small heads the matrix units wait. On an A100 a layer with h = 2048 ran at 129.66 TFLOP/s with 16 heads of 128
and at 155.29 with 8 heads of 256; one with h = 2560 at 108.51 with 40 heads of 64 and at 140.70 with 20 heads of 128
(arXiv 2401.14489, logs in jahatef/TransformerSizing). End to end, a 182 B model on 384 A100 ran at 110 TFLOP/s with 128
heads of 108 and at 157 with 64 heads of 216 (topology log of BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC104", num_heads=40, attention="unfused")
True

## Use instead

>>> fires("TC104", num_heads=20, attention="unfused")
False

## Fix safety

`retrain`. Fewer heads may reduce model quality; published models of similar size use head dimensions of 64 to 256
without a clear loss.

## When it does not matter

With short sequences attention is a small share of the step. In decode attention is bound by the KV cache, whose size
stays the same.

## References

- arXiv 2401.14489, rule 3 and figure 8; stas00/ml-engineering, "Number and size of attention heads".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation
from shapewright.lint.shape_fixes import LARGE_ENOUGH_HEAD_DIM, head_count_fixes, head_dim_problem

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find head dimensions below 128 that the kernels support."""
    head_dim = scenario.config.head_dim
    if head_dim >= LARGE_ENOUGH_HEAD_DIM or scenario.config.num_heads == 1 or head_dim_problem(scenario) is not None:
        return
    yield Violation(
        field="config.num_heads",
        actual=scenario.config.num_heads,
        wanted=f"heads of {LARGE_ENOUGH_HEAD_DIM} or more",
        problem=f"gives a head_dim of only {head_dim}",
        fixes=head_count_fixes(scenario, larger_only=True, smallest=LARGE_ENOUGH_HEAD_DIM),
    )


RULE = Rule(
    code="TC104",
    name="small-heads",
    since="0.1.0",
    reads=("config.num_heads", "config.head_dim", "workload.attention"),
    check=check,
)
