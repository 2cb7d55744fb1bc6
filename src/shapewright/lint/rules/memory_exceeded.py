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
Where nothing fits on the same devices, the layout that needs fewest devices is given, and for a mixture of experts the
one that needs fewest with whole experts on each device.

## When it does not matter

The estimate leaves out fragmentation and communication buffers, so a step slightly below the limit may still fail;
what offloading frees is counted only where it is asked for (`--offload-activations`, `--offload-optimizer`).

## References

- arXiv 2205.05198 (activations), arXiv 1910.02054 (ZeRO), `shapewright memory`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.integers import divisors
from shapewright.layout import MOST_ZERO_STAGE_IN_PIPELINES
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
        repairs=tuple(_fitting(case, _same_devices(case)))
        or tuple(
            repair
            for spread in (_cut_tensors(case), _dealt_experts(case))
            for repair in itertools.islice(_fitting(case, _more_devices(case, spread)), 1)
        ),
        severity="error",
    )


def _fitting(case: WhatIf, candidates: Iterable[dict[str, Any]]) -> Iterator[Repair]:
    """Repairs that fit; lazily, so that the first of many costs no more than those before it."""
    for changes in candidates:
        after = case.changed(changes)
        if after is not None and after.fits:
            title = "use " + ", ".join(f"{name}={value}" for name, value in changes.items())
            yield Repair(kind="runtime", title=title, changes=changes)


def _same_devices(case: WhatIf) -> Iterator[dict[str, Any]]:
    """One thing at a time, and the usual pair of recomputation and a small micro-batch."""
    workload, layout = case.workload, case.layout
    if workload.attention == "unfused":
        yield {"attention": "flash"}
    recompute = [mode for mode in ("selective", "full") if workload.is_training and mode != workload.recompute]
    yield from ({"recompute": mode} for mode in recompute)
    if workload.recompute_layers is not None:
        yield {"recompute_layers": case.config.num_layers}
    smaller = [size for size in reversed(divisors(workload.micro_batch_size)) if size < workload.micro_batch_size]
    yield from ({"micro_batch_size": size} for size in smaller)
    if workload.is_training and layout.data_parallel > 1:
        most = MOST_ZERO_STAGE_IN_PIPELINES if layout.pipeline_parallel > 1 else 3
        yield from ({"zero_stage": stage} for stage in range(layout.zero_stage + 1, most + 1))
    for degree in divisors(case.device.node_size):
        factor, rest = divmod(degree, layout.tensor_parallel)
        if factor > 1 and not rest and layout.data_parallel % factor == 0:
            yield {"tensor_parallel": degree, "data_parallel": layout.data_parallel // factor}
    if layout.data_parallel > 1:
        yield from ({"expert_parallel": degree} for degree in _expert_degrees(case) if degree > layout.expert_parallel)
    if smaller and recompute:
        yield {"micro_batch_size": 1, "recompute": "full"}


def _more_devices(case: WhatIf, spread: Mapping[int, dict[str, int]]) -> Iterator[dict[str, Any]]:
    """More devices, as few as can be: a stage spread over some, then pipeline stages.

    Args:
        case: The question.
        spread: What spreads a stage over a number of devices.
    """
    layout = case.layout
    stages = [count for count in divisors(case.config.num_layers) if count % layout.pipeline_parallel == 0]
    layouts = sorted(itertools.product(stages, spread), key=lambda pair: (pair[0] * pair[1], pair[0]))
    for stage_count, devices in layouts:
        changes = {**spread[devices], "pipeline_parallel": stage_count}
        changed = {name: value for name, value in changes.items() if value != getattr(layout, name)}
        if changed:
            yield changed
            if case.workload.is_training and case.workload.recompute != "full":
                yield {**changed, "recompute": "full"}


def _cut_tensors(case: WhatIf) -> dict[int, dict[str, int]]:
    """A tensor axis inside a node, by the devices of a stage."""
    degrees = [degree for degree in divisors(case.device.node_size) if degree % case.layout.tensor_parallel == 0]
    return {degree: {"tensor_parallel": degree} for degree in degrees}


def _dealt_experts(case: WhatIf) -> dict[int, dict[str, int]]:
    """Whole experts on replicas of all else, by the devices of a stage; none where replicas are there already.

    Whoever trains so shards the optimiser states of what is replicated, as Megatron-LM's distributed optimiser does.
    """
    if case.layout.data_parallel > 1:
        return {}
    sharded = {"zero_stage": max(case.layout.zero_stage, 1)} if case.workload.is_training else {}
    return {
        degree * case.layout.tensor_parallel: {"data_parallel": degree, "expert_parallel": degree, **sharded}
        for degree in _expert_degrees(case)[1:]
    }


def _expert_degrees(case: WhatIf) -> tuple[int, ...]:
    """Over how many devices the experts of a layer can be dealt out whole; none for a dense model."""
    return divisors(case.config.num_experts) if case.config.is_moe else ()


RULE = Rule(
    code="ME101",
    name="memory-exceeded",
    since="0.1.0",
    reads=("device.memory_bytes", "workload.micro_batch_size", "workload.recompute", "layout.zero_stage"),
    check=check,
)
