"""A vocabulary that is no multiple of a full-width load makes the logit GEMM slow.

## What it does

Fires when `vocab_size` is not a multiple of what the dtype and the device need (64 fp16 elements from Ampere on, 8 on
Volta), times `tensor_parallel`, so that each device's share of the logits is a multiple too.

## Why it is slow

The rows of the logits, and in the backward pass the rows of the transposed embedding, are `vocab_size` elements long.
If a row does not start on a wide boundary, the kernel must use narrow loads. On an A100 the logit GEMM
(8192 tokens, h = 14336, v around 51200) ran at 74 TFLOP/s with odd v, 140 with v divisible by 4, 226 by 8, and 256 by
64 (vocabulary sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC101", vocab_size=50257)
True

## Use instead

Pad the embedding to the next multiple; the added rows are never looked up.

>>> fires("TC101", vocab_size=50304)
False

## Fix safety

`exact`. Padded tokens never occur in data; mask their logits (set them to minus infinity) where probabilities of
all tokens are used. A trained checkpoint needs its embedding and logit matrices padded with the same rows.

## When it does not matter

In decode with small batches the logit GEMM reads its weights once and waits for memory, so alignment costs little; and
in a large model with a small vocabulary it is a small share of the step. The predicted cost says so.

## References

- arXiv 2401.14489, rule 1 and the vocabulary figures.
- NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple, round_up
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a vocabulary whose share on each device is no multiple of a full-width load."""
    multiple = full_width_multiple(case.device, case.workload.dtype) * case.layout.tensor_parallel
    vocab_size = case.config.vocab_size
    if vocab_size % multiple == 0:
        return
    padded = round_up(vocab_size, multiple)
    split = f" over {case.layout.tensor_parallel} devices" if case.layout.tensor_parallel > 1 else ""
    yield Violation(
        field="config.vocab_size",
        actual=vocab_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({case.setting}{split})",
        repairs=(Repair(kind="exact", title=f"pad it to {padded}", changes={"vocab_size": padded}),),
    )


RULE = Rule(
    code="TC101",
    name="vocab-not-aligned",
    since="0.1.0",
    reads=("config.vocab_size", "layout.tensor_parallel", "workload.dtype"),
    check=check,
)
