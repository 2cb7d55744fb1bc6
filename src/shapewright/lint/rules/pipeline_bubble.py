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

`runtime`. Interleaving (`virtual_pipeline`) sends more between stages, and smaller micro-batches may make GEMMs slower,
which the prediction weighs. A larger global batch is only named where neither is enough: it changes the training run.

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

from shapewright.integers import divisors
from shapewright.lint.batches import global_batch_of
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

# Source: arXiv 1811.06965, section 2.3.
ENOUGH_MICRO_BATCHES_PER_STAGE = 4

_MOST_CHUNK_CHOICES = 2


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for a pipeline that is mostly filling and draining."""
    stages = case.layout.pipeline_parallel
    if stages == 1 or not case.workload.is_training or _is_full(case):
        return
    repairs = tuple(repair for repair in _repairs(case) if _mends(case, repair)) or (_larger_batch(case),)
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
    return after is not None and _is_full(after) and (after.fits or not case.fits)


def _repairs(case: WhatIf) -> Iterator[Repair]:
    workload = case.workload
    for chunks in _enough_chunks(case)[:_MOST_CHUNK_CHOICES]:
        yield Repair(kind="runtime", title=f"use virtual_pipeline={chunks}", changes={"virtual_pipeline": chunks})
    size = workload.micro_batch_size // 2
    while size and workload.micro_batch_size % size == 0:
        changes = {"micro_batch_size": size, "global_batch_size": global_batch_of(case)}
        yield Repair(kind="runtime", title=f"use micro_batch_size={size}", changes=changes)
        size //= 2


def _enough_chunks(case: WhatIf) -> list[int]:
    """Model chunks that mend the bubble, the fewest first, which send least between stages.

    They share the layers of the fullest stage out evenly, and take micro-batches in groups of as many as stages.
    """
    stages, micro_batches = case.layout.pipeline_parallel, _count_micro_batches(case)
    if micro_batches % stages:
        return []
    return [
        chunks
        for chunks in divisors(-(-case.config.num_layers // stages))
        if chunks > case.layout.virtual_pipeline and micro_batches * chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * stages
    ]


def _larger_batch(case: WhatIf) -> Repair:
    """What is left where nothing mends the bubble of this batch: another training run."""
    workload, layout = case.workload, case.layout
    enough = (
        ENOUGH_MICRO_BATCHES_PER_STAGE * layout.pipeline_parallel * workload.micro_batch_size * layout.data_parallel
    )
    title = f"use global_batch_size={enough}, another training run"
    return Repair(kind="runtime", title=title, changes={"global_batch_size": enough})


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
