"""The micro-batch is smaller than memory allows, so GEMMs have fewer rows than the device needs.

## What it does

Training only. Fires when a larger `micro_batch_size` that fits in memory is predicted to take at least 1 % less time
per token at the same global batch (fewer accumulation steps). It suggests the smallest one within 1 % of the best.

## Why it is slow

Weights are read once per micro-batch, and GEMMs with few rows use part of the device. On an A100 a GEMM of m x 4096 by
4096 x m ran at 83 TFLOP/s with m = 1024, 193 with 2048, 239 with 4096 and 252 with 8192 (sweep of arXiv 2401.14489).
End to end, a 182 B model on 384 A100 went from 110 to 157 TFLOP/s with a micro-batch of 2 instead of 1 (topology log of
BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("WQ101", num_layers=4, micro_batch_size=1, seq_len=256)
True

## Use instead

>>> fires("WQ101", num_layers=4, micro_batch_size=64, seq_len=256)
False

## Fix safety

`runtime`: the global batch, and so the training run, stays the same. Memory is an estimate: test the step before a long
run. Without a `global_batch_size` the batch of a step grows with the micro-batch.

## When it does not matter

Where b * s is already some thousand tokens, GEMMs fill the device. In a pipeline, larger micro-batches are fewer and
make the bubble larger; the prediction includes this.

## References

- arXiv 2401.14489, rule 2; stas00/ml-engineering, "Final recommendations for sizing".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import sufficient_micro_batch_fix
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Suggest the smallest micro-batch within 1 % of the fastest that fits."""
    if not scenario.workload.is_training:
        return
    fix = sufficient_micro_batch_fix(scenario)
    if fix:
        yield Violation(
            field="workload.micro_batch_size",
            actual=scenario.workload.micro_batch_size,
            wanted="as many sequences as fill the device and fit in memory",
            problem="is smaller than memory allows",
            fixes=(fix,),
        )


RULE = Rule(
    code="WQ101",
    name="micro-batch-too-small",
    since="0.1.0",
    reads=("workload.micro_batch_size", "workload.global_batch_size", "layout.data_parallel"),
    check=check,
)
