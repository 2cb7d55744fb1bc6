"""Tensor parallelism is larger than memory requires, and adds communication to every layer.

## What it does

Training only. Fires when a smaller `tensor_parallel` on the same devices, with more replicas, fits in memory and is
predicted to take less time per token at the same global batch.

## Why it is slow

Each layer communicates its activations over the tensor axis four times per micro-batch, and GEMMs of 1/t of the width
are less efficient. A 182 B model on 384 A100 ran at 125 TFLOP/s with 8-way and at 156 with 4-way tensor parallelism
(and twice the pipeline stages; topology log of BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL105", tensor_parallel=4, num_layers=4)
True

## Use instead

>>> fires("PL105", tensor_parallel=1, num_layers=4)
False

## Fix safety

`runtime`. Memory is an estimate: test the step before a long run.

## When it does not matter

In prefill and decode, where tensor parallelism reduces the time to the first or next token.

## References

- arXiv 2401.14489, rule 5; stas00/ml-engineering, "Final recommendations for sizing".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import smaller_degree_fixes
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Suggest smaller degrees; those that do not fit or are slower are dropped when the violation is costed."""
    t = scenario.layout.tensor_parallel
    if t == 1 or not scenario.workload.is_training or not scenario.fits:
        return
    fixes = smaller_degree_fixes(scenario, largest=t)
    if fixes:
        yield Violation(
            field="layout.tensor_parallel",
            actual=t,
            wanted="the smallest that fits",
            problem="is larger than memory requires",
            fixes=fixes,
            only_best=True,
        )


RULE = Rule(
    code="PL105",
    name="tensor-parallel-too-large",
    since="0.1.0",
    reads=("layout.tensor_parallel", "layout.data_parallel", "workload.global_batch_size"),
    check=check,
)
