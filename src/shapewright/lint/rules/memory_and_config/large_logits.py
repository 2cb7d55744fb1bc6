"""The fp32 logits of one micro-batch take a large part of the device memory.

## What it does

Training only. Fires when the logits and their gradient take a tenth of the device memory or more.

## Why it is slow

It limits the micro-batch. Cross entropy stores its softmax in fp32, 4 bytes per token and vocabulary entry, plus the
gradient, when all activations are still in memory. Llama 3 8B with 8192 tokens and a vocabulary of 128256 stores 3.9
GiB of softmax and 2 GiB of gradient; torchtitan measured 7 GiB (pull request 996).

## Example

>>> from shapewright.lint.example import fires
>>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2)
True

## Use instead

Compute the loss in chunks of tokens or in a fused kernel (`liger-kernel`, `torch.compile`), split the vocabulary over
the tensor axis, or reduce the micro-batch.

>>> fires("ME102", vocab_size=32000, micro_batch_size=2, num_layers=2)
False

## Fix safety

A chunked loss computes the same function. Not every framework has one, so no change is suggested. With `loss_chunks`
set, this rule counts one chunk.

>>> fires("ME102", vocab_size=256000, micro_batch_size=8, num_layers=2, loss_chunks=16)
False

## When it does not matter

Where memory is not the limit.

## References

- pytorch/torchtitan pull requests 996 and 4514; arXiv 2205.05198, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.units import format_bytes, format_percent
from shapewright.lint.rule import Rule, Violation
from shapewright.memory.saved_tensors import activation_element_bytes

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

# Share of device memory from which a chunked loss allows a considerably larger micro-batch.
LARGE_LOGITS_FRACTION = 0.1

_SOFTMAX_BYTES = 4.0  # cross entropy works in fp32. Source: arXiv 2205.05198, section 4.3


def check(scenario: Scenario) -> Iterator[Violation]:
    """Compare the logits in memory at a time with the device memory."""
    if not scenario.workload.is_training or not scenario.is_possible:
        return
    gradient_bytes = activation_element_bytes(scenario.workload.dtype)
    tokens = scenario.workload.micro_batch_size * (scenario.workload.seq_len // scenario.layout.context_parallel)
    rows = -(-tokens // scenario.workload.loss_chunks)
    vocabulary = -(-scenario.config.vocab_size // scenario.layout.tensor_parallel)
    logits_bytes = (_SOFTMAX_BYTES + gradient_bytes) * rows * vocabulary
    fraction = logits_bytes / scenario.device.memory_bytes
    if fraction < LARGE_LOGITS_FRACTION:
        return
    yield Violation(
        field="config.vocab_size",
        actual=scenario.config.vocab_size,
        wanted="a chunked or fused loss",
        problem=(
            f"makes logits and gradient of {format_bytes(logits_bytes)}, {format_percent(fraction)} of "
            f"{scenario.device.name}; compute the loss in chunks (loss_chunks)"
        ),
        severity="info" if scenario.fits else "warning",
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
