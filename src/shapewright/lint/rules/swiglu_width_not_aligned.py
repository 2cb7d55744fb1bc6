"""The width 8h/3 that keeps a gated MLP at the size of a plain one is almost never a multiple of anything.

## What it does

Fires when the MLP is gated, `intermediate_size` is 8h/3 rounded to a neighbouring integer, and that is not a multiple
of what the dtype and the device need.

## Why it is slow

A gate is a third matrix, so the width 4h is cut by 2/3 to keep the parameters; 2/3 of 4 * 4096 is 10922.67. As the row
length of the largest GEMMs it forces narrow loads. On an H100 (h = 4096, four products at once that contract over the
width, 16 bit) 10922 ran at 273 TFLOP/s and 10944 at 398, 46 % more (SwiGLU search in stas00/ml-engineering).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=10922)
True

## Use instead

The nearest multiple that tiles well: 10944 or 11008, which is what Llama uses.

>>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=11008)
False

## Fix safety

`retrain`; parameters change by less than one percent.

## When it does not matter

In decode the MLP waits for its weights.

## References

- stas00/ml-engineering, training/performance, "SwiGLU-based MLP"; arXiv 2002.05202, section 2, for the factor 2/3.
- arXiv 2401.14489, section on SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.mlp import width_repairs
from shapewright.lint.needs import full_width_multiple
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.lint.what_if import WhatIf


def has_eight_thirds_width(config: TransformerConfig) -> bool:
    """Whether a gated MLP has the width 8h/3, rounded either way."""
    return config.gated_mlp and abs(3 * config.intermediate_size - 8 * config.hidden_size) < 3


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a gated MLP of width 8h/3."""
    multiple = full_width_multiple(case.device, case.workload.dtype)
    width = case.config.intermediate_size
    if width % multiple == 0 or not has_eight_thirds_width(case.config):
        return
    yield Violation(
        field="config.intermediate_size",
        actual=width,
        wanted=f"a multiple of {multiple} near 8h/3",
        problem=f"is 8h/3 and not a multiple of {multiple} ({case.setting})",
        repairs=width_repairs(case, "intermediate_size"),
    )


RULE = Rule(
    code="TC106",
    name="swiglu-width-not-aligned",
    since="0.1.0",
    reads=("config.intermediate_size", "config.hidden_size", "config.gated_mlp", "workload.dtype"),
    check=check,
)
