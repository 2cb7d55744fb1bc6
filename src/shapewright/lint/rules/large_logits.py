"""The logits of one micro-batch, kept in fp32, take a large part of the device's memory.

## What it does

Training only. Fires when the logits and their gradient are a tenth of the device's memory or more.

## Why it is slow

Cross entropy keeps its softmax in fp32: 4 bytes for every token and every word, with the gradient besides, at the very
moment when all activations are still there. Llama 3 8B with 8192 tokens and 128256 words holds 3.9 GiB of softmax and
2 GiB of gradient; torchtitan measured 7 GiB (pull request 996). That memory could hold a larger micro-batch.

## Example

>>> from shapewright.lint.example import fires
>>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2)
True

## Use instead

Compute the loss in chunks of tokens or in a fused kernel (`liger-kernel`, `torch.compile`), split the vocabulary over
the tensor axis, or make the micro-batch smaller.

>>> fires("ME102", vocab_size=32000, micro_batch_size=2, num_layers=2)
False

## Fix safety

A chunked loss is the same function. Whether a framework has one is for its user to know, so no change is suggested;
`loss_chunks` says that the loss is cut, and this rule then counts the chunk that is in memory.

>>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2, loss_chunks=16)
False

## When it does not matter

Where memory is left over.

## References

- pytorch/torchtitan pull requests 996 and 4514; arXiv 2205.05198, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation
from shapewright.saved_tensors import activation_element_bytes
from shapewright.units import format_bytes, format_percent

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

# From here on a chunked loss frees room for a visibly larger micro-batch.
LARGE_LOGITS_FRACTION = 0.1

_SOFTMAX_BYTES = 4.0  # cross entropy works in fp32. Source: arXiv 2205.05198, section 4.3


def check(case: WhatIf) -> Iterator[Violation]:
    """Compare the logits that one micro-batch keeps at a time with the device's memory."""
    if not case.workload.is_training or not case.is_possible:
        return
    gradient_bytes = activation_element_bytes(case.workload.dtype)
    tokens = case.workload.micro_batch_size * (case.workload.seq_len // case.layout.context_parallel)
    rows = -(-tokens // case.workload.loss_chunks)
    words = -(-case.config.vocab_size // case.layout.tensor_parallel)
    logits_bytes = (_SOFTMAX_BYTES + gradient_bytes) * rows * words
    fraction = logits_bytes / case.device.memory_bytes
    if fraction < LARGE_LOGITS_FRACTION:
        return
    yield Violation(
        field="config.vocab_size",
        actual=case.config.vocab_size,
        wanted="a loss in chunks of tokens, or a fused one",
        problem=(
            f"makes logits and gradient of {format_bytes(logits_bytes)}, {format_percent(fraction)} of "
            f"{case.device.name}; compute the loss in chunks (loss_chunks)"
        ),
        severity="info" if case.fits else "warning",
    )


RULE = Rule(
    code="ME102",
    name="large-logits",
    since="0.1.0",
    reads=(
        "config.vocab_size",
        "workload.micro_batch_size",
        "workload.seq_len",
        "workload.loss_chunks",
        "layout.tensor_parallel",
    ),
    check=check,
)
