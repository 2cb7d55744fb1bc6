"""The head dimension does not match the tiles of the attention kernels, which pad it.

## What it does

Fires when the attention kernels in use are slow for `head_dim`. Unfused: it is not a multiple of a full-width load, 64
elements for 16-bit formats on Ampere and newer. Fused: it is not a multiple of 8, or not one of the head dimensions
that fused kernels are compiled for (32, 64, 96, 128, 192, 256) and padded to the next larger one. Multi-head latent
attention has its own kernels and is ignored.

## Why it is slow

Unfused attention is two batched GEMMs whose contiguous dimension is `head_dim`. On an A100, scores for h >= 16384 ran
at 85 TFLOP/s with an odd head dimension, 135 with one divisible by 4, 197 by 8, and 202 by 64 (figure 7 of arXiv
2401.14489). Fused kernels pad: FlashAttention on an H100 dropped from 370 TFLOP/s at 128 to 219 at 132
(Dao-AILab/flash-attention issue 1141).

## Example

GPT-3 2.7B has 32 heads of 80.

>>> from shapewright.lint.example import fires
>>> fires("TC103", num_heads=32, attention="unfused")
True

## Use instead

The same hidden size with 20 heads of 128: 1.18 times faster per layer on an A100 (119.47 to 140.70 TFLOP/s, section 7
of the paper), with the same number of parameters.

>>> fires("TC103", num_heads=20, attention="unfused")
False

## Fix safety

`retrain`. The number of parameters does not change.

## When it does not matter

With short sequences attention is a small share of the step. In decode attention is bound by reading the KV cache, whose
size does not depend on the number of heads.

## References

- arXiv 2401.14489, rule 3 and figures 7 and 8.
- Dao-AILab/flash-attention, README of the training code: "Headdim 128 is faster than headdim 80".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation
from shapewright.lint.shape_fixes import drop_smaller_heads, head_count_fixes, head_dim_fixes, head_dim_problem

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a head dimension that the attention kernels pad or load with narrow loads."""
    problem = head_dim_problem(scenario)
    if problem is None:
        return
    yield Violation(
        field="config.head_dim",
        actual=scenario.config.head_dim,
        wanted=problem.wanted,
        problem=problem.text,
        fixes=drop_smaller_heads(scenario, head_count_fixes(scenario, larger_only=False)) or head_dim_fixes(scenario),
    )


RULE = Rule(
    code="TC103",
    name="head-dim-not-aligned",
    since="0.1.0",
    reads=("config.head_dim", "config.num_heads", "workload.attention", "workload.dtype"),
    check=check,
)
