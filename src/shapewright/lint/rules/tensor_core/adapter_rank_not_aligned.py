"""The rank of the adapters is not a multiple of 16 bytes, which slows every GEMM of every adapter.

## What it does

Fires when the rank of LoRA, QLoRA or DoRA adapters is not a multiple of the tensor cores' granularity: 16 bytes, which
are 8 elements in 16 bits and 4 in 32 bits.

## Why it is slow

An adapter is two tall and thin GEMMs, (T x k)(k x r) and (T x r)(r x n). The rank r is a contiguous dimension of the
first one's output, of both operands of the second one, and of gradients. Where rows are not a multiple of 16 bytes,
loads are narrower, and older libraries leave the tensor cores. On an A100 the logit GEMM ran at 74 TFLOP/s with an odd
vocabulary and at 256 with a multiple of 64 (vocabulary sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).
Adapters have few FLOPs, but their GEMMs are bound by memory and starts, so that a larger aligned rank costs nothing
more: rank 16 is as fast as rank 8.

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC110", finetune="lora", lora_rank=12)
True

## Use instead

>>> fires("TC110", finetune="lora", lora_rank=16)
False

## Fix safety

`retrain`. Another rank is another adapter; the base model stays as it is. An existing adapter can be padded with zero
rows and columns, which gives the same outputs.

## When it does not matter

In full fine-tuning, and where few modules have adapters. The predicted cost includes both.

## References

- arXiv 2106.09685, section 4.1: the rank is a free choice, and small ones suffice.
- NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import nearest_multiples

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_GRANULARITY_BITS = 128
"""Alignment that tensor cores need for full-rate loads. [bit] Source: NVIDIA, Matrix Multiplication Background."""
_NARROWEST_BITS = 16  # adapters are computed in 16 bits where the frozen weights are narrower


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a rank of adapters that is not a multiple of 16 bytes."""
    workload = scenario.workload
    if not workload.has_adapters:
        return
    multiple = _GRANULARITY_BITS // max(get_dtype(workload.dtype).bits, _NARROWEST_BITS)
    rank = workload.adapter_rank
    if rank % multiple == 0:
        return
    yield Violation(
        field="workload.lora_rank",
        actual=rank,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple}, 16 bytes ({scenario.dtype_and_device})",
        fixes=tuple(
            Fix(kind="retrain", title=f"rank {near}", changes={"lora_rank": near})
            for near in nearest_multiples(rank, multiple)
        ),
    )


RULE = Rule(
    code="TC110",
    name="adapter-rank-not-aligned",
    since="0.1.0",
    reads=("workload.finetune", "workload.lora_rank", "workload.dtype"),
    check=check,
)
