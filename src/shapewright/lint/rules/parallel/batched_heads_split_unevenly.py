"""The number of attention GEMMs, b * a, is not divisible by the tensor parallel degree.

## What it does

Fires when `tensor_parallel` does not divide `micro_batch_size * num_heads`.

## Why it is slow

Attention scores and values are b a / t GEMMs on each device. Where t does not divide b a, some devices wait for others:
with 4 sequences of 20 heads on 32 devices, 16 devices compute three GEMMs and 16 compute two, so a sixth of the time is
idle. (Arithmetic; rule 4 of arXiv 2401.14489.)

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

Where `tensor_parallel` divides `num_heads`, it divides every batch. Most frameworks split heads and require that: see
`heads-split-unevenly`.

## References

- arXiv 2401.14489, rule 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import dividing_degree_fixes
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find batches of attention GEMMs that do not divide over the tensor axis."""
    t, num_gemms = scenario.layout.tensor_parallel, scenario.workload.micro_batch_size * scenario.config.num_heads
    if num_gemms % t == 0:
        return
    yield Violation(
        field="layout.tensor_parallel",
        actual=t,
        wanted=f"a divisor of micro_batch_size * num_heads = {num_gemms}",
        problem=(
            f"does not divide micro_batch_size * num_heads = {scenario.workload.micro_batch_size} * "
            f"{scenario.config.num_heads}"
        ),
        fixes=dividing_degree_fixes(scenario),
        severity="error",
    )


RULE = Rule(
    code="PL102",
    name="batched-heads-split-unevenly",
    since="0.1.0",
    reads=("workload.micro_batch_size", "config.num_heads", "layout.tensor_parallel"),
    check=check,
)
