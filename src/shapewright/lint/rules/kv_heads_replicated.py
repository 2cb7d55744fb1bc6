"""There are fewer key-value heads than devices on the tensor axis, so that several hold the same ones.

## What it does

Fires when `tensor_parallel` is above `num_kv_heads`: each device keeps at least one key-value head, and t / a_kv
devices keep copies. In prefill and decode it is reported whatever its cost, since what it costs is memory.

## Why it is slow

Copies of the projections are computed and copies of the KV cache are stored and read. With 8 key-value heads on 16
devices a cache of 40 GB takes 80 GB over all devices, so that half as many sequences fit. (Arithmetic; there is no
published measurement of it alone.)

## Example

>>> from shapewright.lint.example import fires
>>> gqa = {"num_heads": 32, "num_kv_heads": 4, "hidden_size": 4096}
>>> fires("PL103", phase="decode", tensor_parallel=8, **gqa)
True

## Use instead

>>> fires("PL103", phase="decode", tensor_parallel=4, **gqa)
False

## Fix safety

`runtime` for a smaller degree with more replicas, which in decode trades the time of a token for throughput; `retrain`
for more key-value heads, which adds parameters and no time.

## When it does not matter

In training, where the key and value projections are a few percent of a layer.

## References

- arXiv 2305.13245 (GQA), section 2.2: more heads than devices avoid "wasteful replication".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.batches import with_tensor_parallel
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for key-value heads that several devices hold."""
    t, num_kv_heads = case.layout.tensor_parallel, case.config.num_kv_heads
    if case.config.is_mla or t <= num_kv_heads or t % num_kv_heads:
        return
    repairs: list[Repair | None] = [with_tensor_parallel(case, num_kv_heads)]
    if case.config.num_heads % t == 0:
        repairs.append(Repair(kind="retrain", title=f"use num_kv_heads={t}", changes={"num_kv_heads": t}))
    yield Violation(
        field="config.num_kv_heads",
        actual=num_kv_heads,
        wanted=f"at least tensor_parallel={t}",
        problem=f"is below tensor_parallel={t}, so {t // num_kv_heads} devices keep the same keys and values",
        repairs=tuple(filter(None, repairs)),
        severity=None if case.workload.is_training else "info",
    )


RULE = Rule(
    code="PL103",
    name="kv-heads-replicated",
    since="0.1.0",
    reads=("config.num_kv_heads", "layout.tensor_parallel", "workload.phase"),
    check=check,
)
