"""The model has fewer key-value heads than tensor parallel devices, so they are replicated.

## What it does

Fires when `tensor_parallel` exceeds `num_kv_heads`: each device stores at least one key-value head, so t / a_kv devices
store the same one. In prefill and decode it is reported whatever its predicted time, since the cost is memory.

## Why it is slow

Key and value projections are computed redundantly, and the KV cache is stored and read redundantly. With 8 key-value
heads on 16 devices a cache of 40 GB takes 80 GB over all devices, so half as many sequences fit. (Arithmetic; no
published measurement isolates it.)

## Example

>>> from shapewright.lint.example import fires
>>> gqa = {"num_heads": 32, "num_kv_heads": 4, "hidden_size": 4096}
>>> fires("PL103", phase="decode", tensor_parallel=8, **gqa)
True

## Use instead

>>> fires("PL103", phase="decode", tensor_parallel=4, **gqa)
False

## Fix safety

`runtime` for a smaller degree with more replicas, which in decode trades latency for throughput; `retrain` for more
key-value heads, which adds parameters but no time.

## When it does not matter

In training, where the key and value projections are a few percent of a layer.

## References

- arXiv 2305.13245 (GQA), section 2.2: more heads than devices avoid "wasteful replication".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import tensor_parallel_fix
from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find replicated key-value heads."""
    t, num_kv_heads = scenario.layout.tensor_parallel, scenario.config.num_kv_heads
    if scenario.config.is_mla or t <= num_kv_heads or t % num_kv_heads:
        return
    fixes: list[Fix | None] = [tensor_parallel_fix(scenario, num_kv_heads)]
    if scenario.config.num_heads % t == 0:
        fixes.append(Fix(kind="retrain", title=f"use num_kv_heads={t}", changes={"num_kv_heads": t}))
    yield Violation(
        field="config.num_kv_heads",
        actual=num_kv_heads,
        wanted=f"at least tensor_parallel={t}",
        problem=f"is below tensor_parallel={t}, so {t // num_kv_heads} devices store the same keys and values",
        fixes=tuple(filter(None, fixes)),
        severity=None if scenario.workload.is_training else "info",
    )


RULE = Rule(
    code="PL103",
    name="kv-heads-replicated",
    since="0.1.0",
    reads=("config.num_kv_heads", "layout.tensor_parallel", "workload.phase"),
    check=check,
)
