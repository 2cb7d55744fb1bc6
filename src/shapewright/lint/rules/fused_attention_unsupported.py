"""Fused attention has no kernels for the device.

## What it does

Fires when the step cannot run with `attention="flash"` and can with `attention="unfused"`, as on V100 and T4.

## Why it is slow

It does not run: FlashAttention-2 needs Ampere or newer. Unfused attention writes all scores to memory and reads them
again, so that sequence length costs much more: on an A100 softmax and dropout of a layer with h = 3072 and 2048 tokens
took 18 % of its time (latency shares of arXiv 2401.14489, logs in jahatef/TransformerSizing).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC109", device="v100-sxm2-32gb", attention="flash")
True

## Use instead

>>> fires("TC109", device="v100-sxm2-32gb", attention="unfused")
False

## Fix safety

`runtime`: the same function. Unfused attention keeps the scores for the backward pass: see `recompute="selective"`.

## When it does not matter

It always does: the step cannot run.

## References

- Dao-AILab/flash-attention, README, "NVIDIA CUDA Support".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a step that only fused attention keeps from running."""
    if case.workload.attention != "flash" or case.is_possible:
        return
    changes = {"attention": "unfused"}
    unfused = case.changed(changes)
    if unfused is None or not unfused.is_possible:
        return
    yield Violation(
        field="workload.attention",
        actual="flash",
        wanted="unfused",
        problem=f"has no kernels for {case.device.name} ({case.device.architecture})",
        repairs=(Repair(kind="runtime", title="use attention=unfused", changes=changes),),
        severity="error",
    )


RULE = Rule(
    code="TC109",
    name="fused-attention-unsupported",
    since="0.1.0",
    reads=("workload.attention", "device.architecture"),
    check=check,
)
