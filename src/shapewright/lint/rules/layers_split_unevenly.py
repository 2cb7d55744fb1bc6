"""Layers do not divide by the pipeline stages, so that all stages wait for the fullest one.

## What it does

Fires when `num_layers` is not a multiple of `pipeline_parallel` (times `virtual_pipeline`).

## Why it is slow

The pipeline runs at the pace of the stage with most layers: 33 layers on 4 stages take as long as 36, so a twelfth of
the devices' time is lost. (Arithmetic; arXiv 2401.14489 gives it as a rule.) That share is the most that a finding is
said to cost: fewer stages also wait less, which is no fault of the layers. Less is lost where the stages at the ends
have the layers too few: they have the embedding and the logits besides, and the prediction counts with that.

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL106", num_layers=33, pipeline_parallel=4, device="a100-sxm-80gb")
True

## Use instead

>>> fires("PL106", num_layers=32, pipeline_parallel=4, device="a100-sxm-80gb")
False

## Fix safety

`runtime` for other stages, `retrain` for another depth.

## When it does not matter

Where the layers too few are no more than what the embedding and the logits weigh.

## References

- arXiv 2401.14489, section on pipeline parallelism; arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.integers import divisors
from shapewright.lint.batches import global_batch_of
from shapewright.lint.needs import neighbours
from shapewright.lint.reshape import can_change_depth
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for layers that do not divide by the stages."""
    layout, num_layers = case.layout, case.config.num_layers
    chunks = layout.pipeline_parallel * layout.virtual_pipeline
    if num_layers % chunks == 0 or any(layout.counted_ends):  # which make it come out even
        return
    fullest = -(-num_layers // chunks)
    parts = f"{chunks} pipeline stages" if layout.virtual_pipeline == 1 else f"{chunks} model chunks"
    yield Violation(
        field="config.num_layers",
        actual=num_layers,
        wanted=f"a multiple of {chunks}",
        problem=f"is not a multiple of {parts}, so the fullest holds {fullest}",
        repairs=(*_stages(case), *_depths(case, chunks)),
        most_cost_fraction=1.0 - num_layers / (chunks * fullest),
    )


def _stages(case: WhatIf) -> Iterator[Repair]:
    """Stages that divide the layers, on the same devices, replicas taking up the difference."""
    layout = case.layout
    devices = layout.pipeline_parallel * layout.data_parallel
    global_batch_size = global_batch_of(case)
    for stages in divisors(case.config.num_layers):
        if stages == layout.pipeline_parallel or devices % stages or stages == 1 < layout.virtual_pipeline:
            continue
        if case.config.num_layers % (stages * layout.virtual_pipeline):
            continue
        changes: dict[str, Any] = {"pipeline_parallel": stages}
        title = f"use pipeline_parallel={stages}"
        if devices // stages != layout.data_parallel:
            changes["data_parallel"] = devices // stages
            title += f" with data_parallel={devices // stages}"
        at_equal = {"global_batch_size": global_batch_size} if case.workload.is_training else {}
        yield Repair(kind="runtime", title=title, changes=changes, at_equal=at_equal)


def _depths(case: WhatIf, chunks: int) -> Iterator[Repair]:
    if not can_change_depth(case.config):
        return
    for num_layers in neighbours(case.config.num_layers, chunks):
        yield Repair(kind="retrain", title=f"use num_layers={num_layers}", changes={"num_layers": num_layers})


RULE = Rule(
    code="PL106",
    name="layers-split-unevenly",
    since="0.1.0",
    reads=("config.num_layers", "layout.pipeline_parallel", "layout.virtual_pipeline"),
    check=check,
)
