"""The hidden size is not a multiple of a full-width load, which slows every GEMM of the model.

## What it does

Fires when `hidden_size` is not a multiple of the full-width load of dtype and device (64 fp16 elements on Ampere and
newer, 8 on Volta). Tensor parallel shards belong to `shard-not-aligned`.

## Why it is slow

`hidden_size` is the row length of the residual stream, hence a contiguous dimension of all weight GEMMs, forward and
backward. On an A100 the logit GEMM (8192 tokens, v = 51200, h around 14336) ran at 72 TFLOP/s with odd h, 173 with h
divisible by 2 or 4, and 256 with h divisible by 8 (hidden size sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC102", hidden_size=2548, num_heads=26)
True

## Use instead

>>> fires("TC102", hidden_size=2560, num_heads=20)
False

## Fix safety

`retrain`. Suggestions keep the head dimension where it divides the new hidden size, the queries per key-value head, and
the ratio of MLP width to hidden size.

## When it does not matter

With an alignment of 16 bytes (8 fp16 elements) or more, the remaining gain is small on Hopper and zero on Volta, which
the predicted cost shows. In decode, GEMMs are memory-bound and alignment matters little.

## References

- arXiv 2401.14489, rule 3.
- NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import full_width_multiple, nearest_multiples, with_hidden_size

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


# Multiples of a full-width load, finest first.
_COARSER = (1, 2, 4, 8)


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a hidden size that is not a multiple of a full-width load."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    hidden_size = scenario.config.hidden_size
    if hidden_size % multiple == 0:
        return
    yield Violation(
        field="config.hidden_size",
        actual=hidden_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({scenario.dtype_and_device})",
        fixes=tuple(_list_fixes(scenario, multiple)),
    )


def _list_fixes(scenario: Scenario, multiple: int) -> Iterator[Fix]:
    """Suggest the nearest aligned hidden sizes that a number of heads divides, on a coarser grid if necessary.

    Where no number of heads divides any (7 queries of 75 per key-value head), only the hidden size changes.
    """
    for coarser in _COARSER:
        found = False
        for candidate in nearest_multiples(scenario.config.hidden_size, coarser * multiple):
            changes = with_hidden_size(scenario.config, candidate, multiple * scenario.layout.tensor_parallel)
            if changes:
                found = True
                yield Fix(kind="retrain", title=f"use {candidate}", changes=changes)
        if found:
            return
    for candidate in nearest_multiples(scenario.config.hidden_size, multiple):
        alone = {"hidden_size": candidate}
        if scenario.config.embedding_size == scenario.config.hidden_size:
            alone["embedding_size"] = candidate
        yield Fix(kind="retrain", title=f"use {candidate} with the same heads", changes=alone)


RULE = Rule(
    code="TC102",
    name="hidden-size-not-aligned",
    since="0.1.0",
    reads=("config.hidden_size", "workload.dtype"),
    check=check,
)
