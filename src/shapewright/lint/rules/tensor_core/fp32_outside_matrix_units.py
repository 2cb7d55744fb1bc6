"""fp32 GEMMs do not use the matrix units.

## What it does

Fires when `dtype` is fp32 on a device with faster matrix units for tf32, bf16 or fp16.

## Why it is slow

Tensor cores do not support fp32, which runs on the vector units. The peak rates of an A100 are 19.5 TFLOP/s in fp32,
156 in tf32 and 312 in bf16 (data sheet); 251.5 TFLOP/s were measured in fp16 for 8192 x 8192 x 4096 (logs of arXiv
2401.14489).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC108", dtype="fp32")
True

## Use instead

`torch.set_float32_matmul_precision("high")` for tf32, or autocast to bf16.

>>> fires("TC108", dtype="bf16")
False

## Fix safety

`runtime`. tf32 has the range of fp32 and 10 mantissa bits; bf16 needs fp32 master weights, as in mixed-precision
training.

## When it does not matter

Where full fp32 precision is needed, such as in tests of another implementation.

## References

- NVIDIA A100 data sheet; PyTorch, "TensorFloat-32 (TF32) on Ampere devices".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find fp32 on a device with faster formats."""
    rates = scenario.device.dense_flops_per_s
    if scenario.workload.dtype != "fp32":
        return
    faster = [name for name in ("tf32", "bf16", "fp16") if rates.get(name, 0.0) > rates.get("fp32", 0.0)]
    if not faster:
        return
    yield Violation(
        field="workload.dtype",
        actual="fp32",
        wanted="a format that the matrix units support",
        problem=f"does not run on the matrix units of {scenario.device.name}",
        fixes=tuple(Fix(kind="runtime", title=f"use {name}", changes={"dtype": name}) for name in faster),
    )


RULE = Rule(
    code="TC108",
    name="fp32-outside-matrix-units",
    since="0.1.0",
    reads=("workload.dtype", "device.dense_flops_per_s"),
    check=check,
)
