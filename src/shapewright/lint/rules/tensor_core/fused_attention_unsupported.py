"""There are no fused attention kernels for the device.

## What it does

Fires when the step can run with `attention="unfused"` only, as on V100 and T4.

## Why it is slow

The step cannot run: FlashAttention-2 requires Ampere or newer. Unfused attention writes all scores to memory and reads
them back, so long sequences cost much more: on an A100, softmax and dropout took 18 % of the time of a layer with h =
3072 and 2048 tokens (latency shares of arXiv 2401.14489, logs in jahatef/TransformerSizing).

## Example

>>> from shapewright.lint.example import fires
>>> fires("TC109", device="v100-sxm2-32gb", attention="flash")
True

## Use instead

>>> fires("TC109", device="v100-sxm2-32gb", attention="unfused")
False

## Fix safety

`runtime`: the same function. Unfused attention stores the scores for the backward pass; see `recompute="selective"`.

## When it does not matter

Never: the step cannot run.

## References

- Dao-AILab/flash-attention, README, "NVIDIA CUDA Support".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find a step that can run with unfused attention only."""
    if scenario.workload.attention != "flash" or scenario.is_possible:
        return
    changes = {"attention": "unfused"}
    unfused = scenario.try_replace(changes)
    if unfused is None or not unfused.is_possible:
        return
    yield Violation(
        field="workload.attention",
        actual="flash",
        wanted="unfused",
        problem=f"has no kernels for {scenario.device.name} ({scenario.device.architecture})",
        fixes=(Fix(kind="runtime", title="use attention=unfused", changes=changes),),
        severity="error",
    )


RULE = Rule(
    code="TC109",
    name="fused-attention-unsupported",
    since="0.1.0",
    reads=("workload.attention", "device.architecture"),
    check=check,
)
