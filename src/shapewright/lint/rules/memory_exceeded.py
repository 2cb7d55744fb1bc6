"""The step needs more memory than the device has.

## What it does

Fires when the estimate of weights, gradients, optimiser states, activations, logits and KV cache is above the device's
memory.

## Why it is slow

It is not slow, it stops: "CUDA out of memory". Mixed-precision training with AdamW keeps 18 bytes per parameter before
the first activation (stas00/ml-engineering, "Anatomy of Model's Memory Usage"): 2.65 billion parameters take 47.7 GB,
more than an A100 of 40 GB.

## Example

>>> from shapewright.lint.example import fires
>>> fires("ME101", num_layers=48)
True

## Use instead

>>> fires("ME101", num_layers=2)
False

## Fix safety

`runtime`. Recomputation takes time, sharding takes communication; those that fit are listed with the fastest first.

## When it does not matter

The estimate leaves out fragmentation and communication buffers, so a step slightly below the limit may still fail, and
offloading can let one above it run.

## References

- arXiv 2205.05198 (activations), arXiv 1910.02054 (ZeRO), `shapewright memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.lint.needs import divisors
from shapewright.lint.rule import Repair, Rule, Violation
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Compare the estimate with the device."""
    if not case.is_possible or case.fits:
        return
    needed_bytes = case.prediction.memory.total_bytes
    yield Violation(
        field="device.memory_bytes",
        actual=format_bytes(case.device.memory_bytes),
        wanted=f"at least {format_bytes(needed_bytes)}",
        problem=f"of {case.device.name} is less than the {format_bytes(needed_bytes)} that the step needs",
        repairs=tuple(repair for repair in _repairs(case) if _fits(case, repair)),
        severity="error",
    )


def _fits(case: WhatIf, repair: Repair) -> bool:
    after = case.changed(repair.changes)
    return after is not None and after.fits


def _repairs(case: WhatIf) -> Iterator[Repair]:
    """One thing at a time, and the usual pair of recomputation and a small micro-batch; on the same devices."""
    changes_to_try: list[dict[str, Any]] = []
    workload, layout = case.workload, case.layout
    if workload.attention == "unfused":
        changes_to_try.append({"attention": "flash"})
    recompute = [mode for mode in ("selective", "full") if workload.is_training and mode != workload.recompute]
    changes_to_try += [{"recompute": mode} for mode in recompute]
    smaller = [size for size in reversed(divisors(workload.micro_batch_size)) if size < workload.micro_batch_size]
    changes_to_try += [{"micro_batch_size": size} for size in smaller]
    if workload.is_training and layout.data_parallel > 1:
        changes_to_try += [{"zero_stage": stage} for stage in range(layout.zero_stage + 1, 4)]
    changes_to_try += _more_tensor_parallel(case)
    if smaller and recompute:
        changes_to_try.append({"micro_batch_size": 1, "recompute": "full"})
    for changes in changes_to_try:
        title = "use " + ", ".join(f"{name}={value}" for name, value in changes.items())
        yield Repair(kind="runtime", title=title, changes=changes)


def _more_tensor_parallel(case: WhatIf) -> list[dict[str, Any]]:
    """Larger degrees inside a node, from replicas where there are some and from more devices where there are none."""
    layout = case.layout
    found: list[dict[str, Any]] = []
    for degree in divisors(case.device.node_size):
        factor, rest = divmod(degree, layout.tensor_parallel)
        if rest or factor < 2:
            continue
        changes = {"tensor_parallel": degree}
        if layout.data_parallel % factor == 0:
            changes["data_parallel"] = layout.data_parallel // factor
        found.append(changes)
    return found


RULE = Rule(
    code="ME101",
    name="memory-exceeded",
    since="0.1.0",
    reads=("device.memory_bytes", "workload.micro_batch_size", "workload.recompute", "layout.zero_stage"),
    check=check,
)
