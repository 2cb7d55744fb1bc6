"""Too few micro-batches for the pipeline: stages idle while it fills and drains.

## What it does

Training only. Fires when micro-batches times model chunks per stage are fewer than four times the number of stages.

## Why it is slow

With m micro-batches on p stages, each stage idles for p - 1 of m + p - 1 time slots: almost half of the time with m =
p. A 182 B model on 384 A100 with 12 stages ran at 114 TFLOP/s with a global batch of 512, 136 with 1024, and 152 with
2048 (topology log of BLOOM).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL107", pipeline_parallel=4, global_batch_size=16, micro_batch_size=4)
True

## Use instead

>>> fires("PL107", pipeline_parallel=4, global_batch_size=64, micro_batch_size=4)
False

## Fix safety

`runtime`. Interleaving (`virtual_pipeline`) adds communication between stages, and smaller micro-batches may slow GEMMs
down; the prediction includes both. A larger global batch, which changes the training run, is suggested only where
neither is sufficient.

## When it does not matter

Without a `global_batch_size` the step is assumed to have one micro-batch per stage, and the finding is at most an
`info`: set the actual one.

## References

- arXiv 1811.06965 (GPipe), section 2.3: the bubble is negligible with four or more micro-batches per stage.
- arXiv 2104.04473, section 2.2, on interleaving: bubble (p - 1) / (v m).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import effective_global_batch
from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

# Source: arXiv 1811.06965, section 2.3.
ENOUGH_MICRO_BATCHES_PER_STAGE = 4

_MOST_CHUNK_CHOICES = 2


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find pipelines with few micro-batches per stage."""
    stages = scenario.layout.pipeline_parallel
    if stages == 1 or not scenario.workload.is_training or _is_full(scenario):
        return
    fixes = tuple(fix for fix in _list_fixes(scenario) if _fills(scenario, fix)) or (_larger_batch(scenario),)
    yield Violation(
        field="workload.global_batch_size",
        actual=effective_global_batch(scenario),
        wanted=f"{ENOUGH_MICRO_BATCHES_PER_STAGE} micro-batches for each of {stages} stages",
        problem=f"makes {_count_micro_batches(scenario):.0f} micro-batches for {stages} stages",
        fixes=fixes,
        max_severity=None if scenario.workload.global_batch_size else "info",
    )


def _count_micro_batches(scenario: Scenario) -> float:
    return effective_global_batch(scenario) / (scenario.workload.micro_batch_size * scenario.layout.data_parallel)


def _is_full(scenario: Scenario) -> bool:
    chunks = _count_micro_batches(scenario) * scenario.layout.virtual_pipeline
    return chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * scenario.layout.pipeline_parallel


def _fills(scenario: Scenario, fix: Fix) -> bool:
    after = scenario.try_replace(fix.changes)
    return after is not None and _is_full(after) and (after.fits or not scenario.fits)


def _list_fixes(scenario: Scenario) -> Iterator[Fix]:
    workload = scenario.workload
    for chunks in _enough_chunks(scenario)[:_MOST_CHUNK_CHOICES]:
        yield Fix(kind="runtime", title=f"use virtual_pipeline={chunks}", changes={"virtual_pipeline": chunks})
    size = workload.micro_batch_size // 2
    while size and workload.micro_batch_size % size == 0:
        changes = {"micro_batch_size": size, "global_batch_size": effective_global_batch(scenario)}
        yield Fix(kind="runtime", title=f"use micro_batch_size={size}", changes=changes)
        size //= 2


def _enough_chunks(scenario: Scenario) -> list[int]:
    """Return numbers of model chunks that make the bubble small, the fewest and so least communication first.

    They divide the layers of the fullest stage; interleaving needs a multiple of the stages as micro-batches.
    """
    stages, micro_batches = scenario.layout.pipeline_parallel, _count_micro_batches(scenario)
    if micro_batches % stages:
        return []
    return [
        chunks
        for chunks in divisors(-(-scenario.config.num_layers // stages))
        if chunks > scenario.layout.virtual_pipeline
        and micro_batches * chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * stages
    ]


def _larger_batch(scenario: Scenario) -> Fix:
    """Suggest a larger global batch, for pipelines where no change at this batch makes the bubble small."""
    workload, layout = scenario.workload, scenario.layout
    enough = (
        ENOUGH_MICRO_BATCHES_PER_STAGE * layout.pipeline_parallel * workload.micro_batch_size * layout.data_parallel
    )
    title = f"use global_batch_size={enough}, another training run"
    return Fix(kind="runtime", title=title, changes={"global_batch_size": enough})


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
