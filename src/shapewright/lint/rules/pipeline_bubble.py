"""Too few micro-batches for the pipeline: stages stand idle while it fills and drains.

## What it does

Training only. Fires when micro-batches per step times model chunks per stage are fewer than four times the stages.

## Why it is slow

Of (m + p - 1) time slots with m micro-batches on p stages, p - 1 are empty on each stage: with m = p almost half of the
time. A 182 B model on 384 A100 with 12 stages ran at 114 TFLOP/s with a global batch of 512, 136 with 1024, and 152
with 2048 (topology log of BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL107", pipeline_parallel=4, global_batch_size=16, micro_batch_size=4)
True

## Use instead

>>> fires("PL107", pipeline_parallel=4, global_batch_size=64, micro_batch_size=4)
False

## Fix safety

`runtime`; but a larger global batch changes the training run, and smaller micro-batches may make GEMMs slower, which
the prediction weighs. Interleaving (`virtual_pipeline`) sends more between stages.

## When it does not matter

Without a `global_batch_size` the step is assumed to have one micro-batch per stage, and the finding is only an `info`:
give the real one.

## References

- arXiv 1811.06965 (GPipe), section 2.3: the bubble is negligible from four micro-batches per stage on.
- arXiv 2104.04473, section 2.2, on interleaving: bubble (p - 1) / (v m).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.batches import global_batch_of
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

# Source: arXiv 1811.06965, section 2.3.
ENOUGH_MICRO_BATCHES_PER_STAGE = 4

_CHUNKS_PER_STAGE = (2, 4)


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a pipeline that is mostly filling and draining."""
    stages = case.layout.pipeline_parallel
    if stages == 1 or not case.workload.is_training or _is_full(case):
        return
    repairs = tuple(repair for repair in _repairs(case) if _mends(case, repair))
    yield Violation(
        field="workload.global_batch_size",
        actual=global_batch_of(case),
        wanted=f"{ENOUGH_MICRO_BATCHES_PER_STAGE} micro-batches for each of {stages} stages",
        problem=f"makes {_count_micro_batches(case):.0f} micro-batches for {stages} stages",
        repairs=repairs,
        severity_at_most=None if case.workload.global_batch_size else "info",
    )


def _count_micro_batches(case: WhatIf) -> float:
    return global_batch_of(case) / (case.workload.micro_batch_size * case.layout.data_parallel)


def _is_full(case: WhatIf) -> bool:
    chunks = _count_micro_batches(case) * case.layout.virtual_pipeline
    return chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * case.layout.pipeline_parallel


def _mends(case: WhatIf, repair: Repair) -> bool:
    after = case.changed(repair.changes)
    return after is not None and _is_full(after)


def _repairs(case: WhatIf) -> Iterator[Repair]:
    workload, layout = case.workload, case.layout
    per_stage = case.config.num_layers // layout.pipeline_parallel
    for chunks in _CHUNKS_PER_STAGE:
        if chunks > layout.virtual_pipeline and per_stage % chunks == 0:
            changes = {"virtual_pipeline": chunks}
            yield Repair(kind="runtime", title=f"use virtual_pipeline={chunks}", changes=changes)
    size = workload.micro_batch_size // 2
    while size and workload.micro_batch_size % size == 0:
        changes = {"micro_batch_size": size, "global_batch_size": global_batch_of(case)}
        yield Repair(kind="runtime", title=f"use micro_batch_size={size}", changes=changes)
        size //= 2
    enough = (
        ENOUGH_MICRO_BATCHES_PER_STAGE * layout.pipeline_parallel * workload.micro_batch_size * layout.data_parallel
    )
    yield Repair(kind="runtime", title=f"use global_batch_size={enough}", changes={"global_batch_size": enough})


RULE = Rule(
    code="PL107",
    name="pipeline-bubble",
    since="0.1.0",
    reads=(
        "workload.global_batch_size",
        "workload.micro_batch_size",
        "layout.pipeline_parallel",
        "layout.virtual_pipeline",
    ),
    check=check,
)
