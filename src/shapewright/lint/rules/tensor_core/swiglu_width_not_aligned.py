"""A gated MLP has the width 8h/3, which is not a multiple of a full-width load.

## What it does

Fires when the MLP is gated, `intermediate_size` is 8h/3 rounded up or down, and not a multiple of the full-width load
of dtype and device.

## Why it is slow

A gated MLP has three matrices, so its width is reduced from 4h to 8h/3 to keep the parameter count; for h = 4096 this
is 10922.67. As the row length of the largest GEMMs it forces narrow loads. On an H100 (h = 4096, a batch of four 16-bit
GEMMs that contract over the width) 10922 ran at 273 TFLOP/s and 10944 at 398, 46 % more (SwiGLU search in
stas00/ml-engineering).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=10922)
True

## Use instead

A nearby multiple: 10944, or 11008 as in Llama.

>>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=11008)
False

## Fix safety

`retrain`. The parameter count changes by less than one percent.

## When it does not matter

In decode, where the MLP is memory-bound.

## References

- stas00/ml-engineering, training/performance, "SwiGLU-based MLP"; arXiv 2002.05202, section 2, for the factor 2/3.
- arXiv 2401.14489, section on SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation
from shapewright.lint.shape_fixes import full_width_multiple, width_fixes

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario


def has_eight_thirds_width(config: TransformerConfig) -> bool:
    """Return whether a gated MLP has the width 8h/3, rounded up or down."""
    return config.gated_mlp and abs(3 * config.intermediate_size - 8 * config.hidden_size) < 3


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a gated MLP with an unaligned width of 8h/3."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    width = scenario.config.intermediate_size
    if width % multiple == 0 or not has_eight_thirds_width(scenario.config):
        return
    yield Violation(
        field="config.intermediate_size",
        actual=width,
        wanted=f"a multiple of {multiple} near 8h/3",
        problem=f"is 8h/3 and not a multiple of {multiple} ({scenario.dtype_and_device})",
        fixes=width_fixes(scenario, "intermediate_size"),
    )


RULE = Rule(
    code="TC106",
    name="swiglu-width-not-aligned",
    since="0.1.0",
    reads=("config.intermediate_size", "config.hidden_size", "config.gated_mlp", "workload.dtype"),
    check=check,
)
