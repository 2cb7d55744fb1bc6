"""A head width that attention kernels have no exact tile for wastes part of every score.

## What it does

Fires when the width of a head does not suit the attention kernels in use. Unfused: no multiple of a full-width load,
which for 16-bit formats from Ampere on is the power of two 64. Fused: no multiple of 8, or none of the widths that
fused kernels are compiled for (32, 64, 96, 128, 192, 256), so that the next larger kernel runs with padding. Multi-head
latent attention has kernels of its own and is left alone.

## Why it is slow

Unfused attention is two batched GEMMs whose contiguous dimension is the head width. On an A100, scores for
h >= 16384 ran at 85 TFLOP/s with an odd head width, 135 with one divisible by 4, 197 by 8, and 202 by 64 (figure 7 of
arXiv 2401.14489). Fused kernels pad: FlashAttention on an H100 went from 370 TFLOP/s at head width 128 to 219 at 132
(Dao-AILab/flash-attention issue 1141).

## Example

GPT-3 2.7B has 32 heads of width 80.

>>> from shapewright.lint.example import fires
>>> fires("TC103", num_heads=32, attention="unfused")
True

## Use instead

The same width in 20 heads of 128: 1.18 times faster per layer on an A100 (119.47 to 140.70 TFLOP/s, section 7 of the
paper), with the same number of parameters.

>>> fires("TC103", num_heads=20, attention="unfused")
False

## Fix safety

`retrain`: heads are learned. The number of parameters does not change.

## When it does not matter

At short sequences attention is a small share of the step, and in decode it waits for the KV cache, whose size the
number of heads does not change.

## References

- arXiv 2401.14489, rule 3 and figures 7 and 8.
- Dao-AILab/flash-attention, README of the training code: "Headdim 128 is faster than headdim 80".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.heads import head_dim_problem, reheading_repairs, resizing_repairs, without_small_heads
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a head width that the attention kernels have to pad or load piecemeal."""
    problem = head_dim_problem(case)
    if problem is None:
        return
    yield Violation(
        field="config.head_dim",
        actual=case.config.head_dim,
        wanted=problem.wanted,
        problem=problem.text,
        repairs=without_small_heads(case, reheading_repairs(case, larger_only=False)) or resizing_repairs(case),
    )


RULE = Rule(
    code="TC103",
    name="head-dim-not-aligned",
    since="0.1.0",
    reads=("config.head_dim", "config.num_heads", "workload.attention", "workload.dtype"),
    check=check,
)
