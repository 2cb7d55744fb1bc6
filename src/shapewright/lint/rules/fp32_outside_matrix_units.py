"""fp32 GEMMs leave the matrix units idle.

## What it does

Fires when `dtype` is fp32 on a device that multiplies tf32, bf16 or fp16 several times faster.

## Why it is slow

Tensor cores do not multiply fp32; it runs on the ordinary cores. An A100 gives 19.5 TFLOP/s of fp32, 156 of tf32 and
312 of bf16 (data sheet); 251.5 TFLOP/s were measured in fp16 for 8192 x 8192 x 4096 (logs of arXiv 2401.14489), which
fp32 cannot come near.

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC108", dtype="fp32")
True

## Use instead

`torch.set_float32_matmul_precision("high")` for tf32, or autocast to bf16.

>>> fires("TC108", dtype="bf16")
False

## Fix safety

`runtime`. tf32 keeps the range of fp32 and 10 bits of mantissa; bf16 needs master weights in fp32, as mixed
precision keeps them.

## When it does not matter

Where every bit counts, as in checking another implementation.

## References

- NVIDIA A100 data sheet; PyTorch, "TensorFloat-32 (TF32) on Ampere devices".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for fp32 on a device that has faster formats."""
    rates = case.device.dense_flops_per_s
    if case.workload.dtype != "fp32":
        return
    faster = [name for name in ("tf32", "bf16", "fp16") if rates.get(name, 0.0) > rates.get("fp32", 0.0)]
    if not faster:
        return
    yield Violation(
        field="workload.dtype",
        actual="fp32",
        wanted="a format of the matrix units",
        problem=f"does not run on the matrix units of {case.device.name}",
        repairs=tuple(Repair(kind="runtime", title=f"use {name}", changes={"dtype": name}) for name in faster),
    )


RULE = Rule(
    code="TC108",
    name="fp32-outside-matrix-units",
    since="0.1.0",
    reads=("workload.dtype", "device.dense_flops_per_s"),
    check=check,
)
