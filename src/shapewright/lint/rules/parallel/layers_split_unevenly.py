"""The layers do not divide over the pipeline stages, so all stages wait for the fullest one.

## What it does

Fires when `num_layers` is not a multiple of `pipeline_parallel` (times `virtual_pipeline`).

## Why it is slow

The fullest stage sets the pace of the pipeline: 33 layers on 4 stages take as long as 36, so a twelfth of the device
time is lost. (Arithmetic; arXiv 2401.14489 states it as a rule.) This share is the upper limit of the reported cost,
since fewer stages also reduce the bubble. Less is lost where the first and last stage have fewer layers, since they
also compute embedding and logits; the prediction includes this.

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL106", num_layers=33, pipeline_parallel=4, device="a100-sxm-80gb")
True

## Use instead

>>> fires("PL106", num_layers=32, pipeline_parallel=4, device="a100-sxm-80gb")
False

## Fix safety

`runtime` for another number of stages, `retrain` for another depth.

## When it does not matter

Where the missing layers compensate the time of embedding and logits.

## References

- arXiv 2401.14489, section on pipeline parallelism; arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import effective_global_batch
from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import can_change_depth, nearest_multiples

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find layer counts that do not divide over the stages."""
    layout, num_layers = scenario.layout, scenario.config.num_layers
    chunks = layout.pipeline_parallel * layout.virtual_pipeline
    if num_layers % chunks == 0 or any(layout.ends_as_layers):
        return
    fullest = -(-num_layers // chunks)
    parts = f"{chunks} pipeline stages" if layout.virtual_pipeline == 1 else f"{chunks} model chunks"
    yield Violation(
        field="config.num_layers",
        actual=num_layers,
        wanted=f"a multiple of {chunks}",
        problem=f"is not a multiple of {parts}, so the fullest holds {fullest}",
        fixes=(*_stages(scenario), *_depths(scenario, chunks)),
        max_cost_fraction=1.0 - num_layers / (chunks * fullest),
    )


def _stages(scenario: Scenario) -> Iterator[Fix]:
    """Suggest stage counts that divide the layers, on the same devices with data parallelism adjusted."""
    layout = scenario.layout
    devices = layout.pipeline_parallel * layout.data_parallel
    global_batch_size = effective_global_batch(scenario)
    for stages in divisors(scenario.config.num_layers):
        if stages == layout.pipeline_parallel or devices % stages or stages == 1 < layout.virtual_pipeline:
            continue
        if scenario.config.num_layers % (stages * layout.virtual_pipeline):
            continue
        changes: dict[str, Any] = {"pipeline_parallel": stages}
        title = f"use pipeline_parallel={stages}"
        if devices // stages != layout.data_parallel:
            changes["data_parallel"] = devices // stages
            title += f" with data_parallel={devices // stages}"
        common_changes = {"global_batch_size": global_batch_size} if scenario.workload.is_training else {}
        yield Fix(kind="runtime", title=title, changes=changes, common_changes=common_changes)


def _depths(scenario: Scenario, chunks: int) -> Iterator[Fix]:
    if not can_change_depth(scenario.config):
        return
    for num_layers in nearest_multiples(scenario.config.num_layers, chunks):
        yield Fix(kind="retrain", title=f"use num_layers={num_layers}", changes={"num_layers": num_layers})


RULE = Rule(
    code="PL106",
    name="layers-split-unevenly",
    since="0.1.0",
    reads=("config.num_layers", "layout.pipeline_parallel", "layout.virtual_pipeline"),
    check=check,
)
