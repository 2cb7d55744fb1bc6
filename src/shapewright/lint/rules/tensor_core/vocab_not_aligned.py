"""The vocabulary size is not a multiple of a full-width load, which slows the logit GEMM.

## What it does

Fires when `vocab_size` is not a multiple of the full-width load of dtype and device (64 fp16 elements on Ampere and
newer, 8 on Volta) times `tensor_parallel`, so that the shard of each device is aligned too.

## Why it is slow

The rows of the logits, and in the backward pass the rows of the transposed embedding, have `vocab_size` elements. Where
rows are not aligned, the kernel uses narrow loads. On an A100 the logit GEMM (8192 tokens, h = 14336, v around 51200)
ran at 74 TFLOP/s with odd v, 140 with v divisible by 4, 226 by 8, and 256 by 64 (vocabulary sweep of arXiv 2401.14489,
logs in EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC101", vocab_size=50257)
True

## Use instead

Pad the embedding to the next multiple; the added rows are never used.

>>> fires("TC101", vocab_size=50304)
False

## Fix safety

`exact`. Padding tokens never occur in data; mask their logits (set them to minus infinity) where probabilities of all
tokens are used. The embedding and logit matrices of a trained checkpoint need the same padding.

## When it does not matter

In decode with small batches, where the logit GEMM is memory-bound, and in large models with a small vocabulary, where
it is a small share of the step. The predicted cost includes both.

## References

- arXiv 2401.14489, rule 1 and the vocabulary figures.
- NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import full_width_multiple, round_up

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a vocabulary whose shard on each device is not a multiple of a full-width load."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype) * scenario.layout.tensor_parallel
    vocab_size = scenario.config.vocab_size
    if vocab_size % multiple == 0:
        return
    padded = round_up(vocab_size, multiple)
    split = f" over {scenario.layout.tensor_parallel} devices" if scenario.layout.tensor_parallel > 1 else ""
    yield Violation(
        field="config.vocab_size",
        actual=vocab_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({scenario.dtype_and_device}{split})",
        fixes=(Fix(kind="exact", title=f"pad it to {padded}", changes={"vocab_size": padded}),),
    )


RULE = Rule(
    code="TC101",
    name="vocab-not-aligned",
    since="0.1.0",
    reads=("config.vocab_size", "layout.tensor_parallel", "workload.dtype"),
    check=check,
)
