"""A hidden size that is no multiple of a full-width load slows every GEMM of the model.

## What it does

Fires when `hidden_size` is not a multiple of what the dtype and the device need (64 fp16 elements from Ampere on, 8 on
Volta). The share of each device of the tensor axis is the business of `shard-not-aligned`.

## Why it is slow

`hidden_size` is the row length of the residual stream, so it is a contiguous dimension of all weight GEMMs, forward and
backward. On an A100 the logit GEMM (8192 tokens, v = 51200, h around 14336) ran at 72 TFLOP/s with odd h, 173 with h
divisible by 2 or 4, and 256 with h divisible by 8 (hidden size sweep of arXiv 2401.14489, logs in
EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC102", hidden_size=2548, num_heads=26)
True

## Use instead

>>> fires("TC102", hidden_size=2560, num_heads=20)
False

## Fix safety

`retrain`: another width is another model. Suggestions keep the head width where it divides the new width, queries per
key-value head, and the ratio of MLP width to hidden size.

## When it does not matter

From 16 bytes on (8 fp16 elements) what is left to gain is small on Hopper, and nothing on Volta; the predicted cost
says so. In decode, weights are read once per token and alignment counts little.

## References

- arXiv 2401.14489, rule 3.
- NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple, neighbours
from shapewright.lint.reshape import with_hidden_size
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


# Multiples of a full-width load, finest first.
_COARSER = (1, 2, 4, 8)


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a hidden size that is no multiple of a full-width load."""
    multiple = full_width_multiple(case.device, case.workload.dtype)
    hidden_size = case.config.hidden_size
    if hidden_size % multiple == 0:
        return
    yield Violation(
        field="config.hidden_size",
        actual=hidden_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({case.setting})",
        repairs=tuple(_repairs(case, multiple)),
    )


def _repairs(case: WhatIf, multiple: int) -> Iterator[Repair]:
    """The nearest widths that some number of heads fills, of a coarser grid where none does (4004 becomes 4096).

    Where none does at all (7 queries of 75 for each key-value head), the heads stay and the residual stream changes.
    """
    for coarser in _COARSER:
        found = False
        for candidate in neighbours(case.config.hidden_size, coarser * multiple):
            changes = with_hidden_size(case.config, candidate, multiple * case.layout.tensor_parallel)
            if changes:
                found = True
                heads = f" with {changes['num_heads']} heads" if "num_heads" in changes else ""
                yield Repair(kind="retrain", title=f"use {candidate}{heads}", changes=changes)
        if found:
            return
    for candidate in neighbours(case.config.hidden_size, multiple):
        alone = {"hidden_size": candidate}
        if case.config.embedding_size == case.config.hidden_size:
            alone["embedding_size"] = candidate
        yield Repair(kind="retrain", title=f"use {candidate}, with heads as they are", changes=alone)


RULE = Rule(
    code="TC102",
    name="hidden-size-not-aligned",
    since="0.1.0",
    reads=("config.hidden_size", "workload.dtype"),
    check=check,
)
