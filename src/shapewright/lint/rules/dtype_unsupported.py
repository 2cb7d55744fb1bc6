"""The device has no rate for the dtype: its matrix units cannot multiply it.

## What it does

Fires when the device's sheet gives no dense rate for `dtype`. On V100 and T4 this is bf16, tf32 and fp8; on A100 fp8.

## Why it is slow

Formats without matrix units run on the ordinary cores, by emulation, or not at all. A V100 reached 88.5 TFLOP/s in
fp16 (8192 x 8192 x 4096, logs of arXiv 2401.14489); its ordinary cores end at 15.7 TFLOP/s of fp32, and bf16 is
emulated on them.

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC107", device="v100-sxm2-16gb", dtype="bf16")
True

## Use instead

>>> fires("TC107", device="v100-sxm2-16gb", dtype="fp16")
False

## Fix safety

`runtime`. fp16 has a narrow range: training in it needs loss scaling. fp8 in place of nothing needs scaling factors.

## When it does not matter

It always does: there is no prediction for a rate that nobody states.

## References

- The device's own file: `shapewright devices show NAME`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

_NEAREST = ("bf16", "fp16", "tf32", "fp32")  # what to fall back on, the best first


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a dtype that the device's sheet gives no rate for."""
    rates, dtype = case.device.dense_flops_per_s, case.workload.dtype
    if dtype in rates:
        return
    known = ", ".join(sorted(rates)) or "none"
    yield Violation(
        field="workload.dtype",
        actual=dtype,
        wanted=f"one of {known}",
        problem=f"has no matrix units on {case.device.name} (it has {known})",
        repairs=tuple(
            Repair(kind="runtime", title=f"use {name}", changes={"dtype": name}) for name in _NEAREST if name in rates
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
