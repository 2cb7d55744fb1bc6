"""A tensor parallel shard is no multiple of the blocks of 128 that share an fp8 scale, so engines refuse to load it.

## What it does

Fires in prefill and decode in fp8 when the part of a matrix on one device, or a gate or up projection as a whole, is no
multiple of 128: f/t, the f/t of an expert, h/t (all heads of one device), or the key-value heads of one device. An
`error` where the checkpoint has one scale per block of 128 x 128 (DeepSeek-V3, Kimi K2, Qwen3 FP8), otherwise `info`: a
checkpoint with one scale per tensor or channel loads.

## Why it is slow

It does not start. vLLM and SGLang raise "The output_size of gate's and up's weight = 192 is not divisible by weight
quantization block_n = 128" (Qwen3 30B A3B, experts of 768 on 4 devices), since a device would need parts of a block.

## Example

>>> from shapewright.lint.example import fires
>>> experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 768, "num_kv_heads": 4}
>>> fp8 = {"phase": "decode", "dtype": "fp8", "device": "h100-sxm-80gb"}
>>> fires("SV101", tensor_parallel=4, **experts, **fp8)
True

## Use instead

>>> fires("SV101", tensor_parallel=2, **experts, **fp8)
False

## Fix safety

`runtime`: a smaller degree, or whole experts over more devices (expert parallelism).

## When it does not matter

With scales per tensor or channel, or with weights that are quantized when they are loaded.

## References

- vLLM 0.10.2, `model_executor/layers/quantization/fp8.py` (create_weights of linear layers and experts).
- arXiv 2412.19437 (DeepSeek-V3), section 3.3.2: scales of 128 x 128 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import smaller_degree_fixes
from shapewright.lint.rule import Fix, Rule, Violation
from shapewright.lint.shape_fixes import (
    count_width_shards,
    list_mlp_width_fields,
    whole_expert_fixes,
    width_axis_degree,
)

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload import ParallelLayout

BLOCK = 128
"""Weights along each side of a block with one scale (weight_block_size of published checkpoints)."""


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find shards that end inside a block."""
    workload = scenario.workload
    if workload.is_training or "fp8" not in (workload.dtype, workload.weight_dtype):
        return
    for name, shard in odd_shards(scenario.config, scenario.layout).items():
        pieces, axis = count_width_shards(scenario.layout, name), width_axis_degree(scenario.layout, name)
        over = f"over {axis}={pieces} is {shard}, " if pieces > 1 else "is "
        per_head = " (with head_dim)" if name.endswith("heads") else ""
        refused = ": vLLM and SGLang do not load it" if scenario.model.has_block_scales else ""
        yield Violation(
            field=f"config.{name}",
            actual=getattr(scenario.config, name),
            wanted=f"a multiple of {BLOCK} on one device{per_head}",
            problem=f"{over}not a multiple of the {BLOCK} weights that share an fp8 scale{per_head}{refused}",
            fixes=tuple(_resolving(scenario, name)),
            severity="error" if scenario.model.has_block_scales else "info",
            has_cost=False,
        )


def odd_shards(config: TransformerConfig, layout: ParallelLayout) -> dict[str, int]:
    """Return the parts of matrices on one device that are no multiple of a block, by field.

    Sizes that the degree does not divide are left to other rules.
    """
    t = layout.tensor_parallel
    sizes = {name: (getattr(config, name), count_width_shards(layout, name)) for name in list_mlp_width_fields(config)}
    if t > 1:
        sizes["num_heads"] = (config.num_heads * config.v_head_dim, t)
        if not config.is_mla:
            kept = max(config.num_kv_heads, t)  # replicated where there are fewer than devices
            sizes["num_kv_heads"] = (kept * config.head_dim, t)
    return {
        name: size // pieces for name, (size, pieces) in sizes.items() if size % pieces == 0 and size // pieces % BLOCK
    }


def _resolving(scenario: Scenario, name: str) -> Iterator[Fix]:
    """Yield changes of the layout after which the shard is whole blocks."""
    fixes = [*smaller_degree_fixes(scenario, scenario.layout.tensor_parallel)]
    if name == "moe_intermediate_size":
        fixes += whole_expert_fixes(scenario)
    for fix in fixes:
        after = scenario.try_replace(fix.changes)
        if after is not None and name not in odd_shards(after.config, after.layout):
            yield fix


RULE = Rule(
    code="SV101",
    name="block-scale-split",
    since="0.1.0",
    reads=(
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "config.shared_expert_intermediate_size",
        "config.num_heads",
        "config.num_kv_heads",
        "config.head_dim",
        "layout.tensor_parallel",
        "layout.expert_tensor_parallel",
        "workload.dtype",
        "workload.weight_dtype",
        "workload.phase",
    ),
    check=check,
)
