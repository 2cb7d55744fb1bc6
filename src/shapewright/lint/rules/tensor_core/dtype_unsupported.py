"""The matrix units of the device do not support the dtype.

## What it does

Fires when the data sheet of the device gives no dense rate for `dtype`: bf16, tf32 and fp8 on V100 and T4, fp8 on A100.

## Why it is slow

Other formats run on the vector units, by emulation, or not at all. A V100 reached 88.5 TFLOP/s in fp16 (8192 x 8192 x
4096, logs of arXiv 2401.14489); the peak of its vector units is 15.7 TFLOP/s in fp32, and they emulate bf16.

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC107", device="v100-sxm2-16gb", dtype="bf16")
True

## Use instead

>>> fires("TC107", device="v100-sxm2-16gb", dtype="fp16")
False

## Fix safety

`runtime`. fp16 has a narrow range, so training needs loss scaling; fp8 needs scaling factors.

## When it does not matter

Never: without a rate there is no prediction.

## References

- The device file: `shapewright devices show NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_NEAREST = ("bf16", "fp16", "tf32", "fp32")  # fallbacks, best first


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a dtype without a dense rate on the data sheet."""
    rates, dtype = scenario.device.dense_flops_per_s, scenario.workload.dtype
    if dtype in rates:
        return
    known = ", ".join(sorted(rates)) or "none"
    yield Violation(
        field="workload.dtype",
        actual=dtype,
        wanted=f"one of {known}",
        problem=f"has no matrix units on {scenario.device.name} (it has {known})",
        fixes=tuple(
            Fix(kind="runtime", title=f"use {name}", changes={"dtype": name}) for name in _NEAREST if name in rates
        )[:1],
        severity="error",
    )


RULE = Rule(
    code="TC107",
    name="dtype-unsupported",
    since="0.1.0",
    reads=("workload.dtype", "device.dense_flops_per_s"),
    check=check,
)
