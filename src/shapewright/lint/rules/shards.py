"""Rules on shards: the part of a dimension that one tensor parallel device holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import dividing_degree_fixes, smaller_degree_fixes
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.lint.shape_fixes import (
    count_width_shards,
    full_width_multiple,
    list_mlp_width_fields,
    nearest_multiples,
    whole_expert_fixes,
    width_degree_field,
    width_fixes,
    with_hidden_size,
)
from shapewright.models.layers import ATTENTION, mixers_of

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout


@rule(
    "PL109",
    "mlp-width-split-unevenly",
    reads=(
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "config.shared_expert_intermediate_size",
        "layout.tensor_parallel",
        "layout.expert_tensor_parallel",
    ),
)
def mlp_width_split_unevenly(scenario: Scenario) -> Iterator[Violation]:
    """An MLP width does not divide over the tensor parallel devices.

    ## What it does

    Fires when `tensor_parallel` does not divide `intermediate_size`, `moe_intermediate_size` or
    `shared_expert_intermediate_size`.

    ## Why it is slow

    Each device computes the same number of columns. Where they do not divide, frameworks refuse to start; padding would
    compute ceil(f/t) t columns. Degrees of 6, as on Summit, exclude every width that is a power of two (arXiv
    2401.14489, section on 6-GPU nodes).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL109", intermediate_size=10242, tensor_parallel=4)
    True

    ## Use instead

    >>> fires("PL109", intermediate_size=10240, tensor_parallel=4)
    False

    ## Fix safety

    `runtime` for another degree; `retrain` for another width.

    ## When it does not matter

    Never: the step cannot run.

    ## References

    - arXiv 1909.08053, section 3.
    """
    for name in list_mlp_width_fields(scenario.config):
        width, pieces = getattr(scenario.config, name), count_width_shards(scenario.layout, name)
        if width % pieces:
            is_routed = name == "moe_intermediate_size"
            axis = width_degree_field(scenario.layout, name)
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {axis}={pieces}",
                problem=f"does not split over {axis}={pieces}",
                fixes=(
                    *(whole_expert_fixes(scenario) if is_routed else ()),
                    *dividing_degree_fixes(scenario),
                    *width_fixes(scenario, name),
                ),
                least_severity="error",
            )


@rule(
    "PL104",
    "shard-not-aligned",
    reads=(
        "config.num_heads",
        "config.head_dim",
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "layout.tensor_parallel",
        "layout.expert_tensor_parallel",
    ),
)
def shard_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """A dimension is aligned, but its shard on each tensor parallel device is not.

    ## What it does

    Fires when h/t (all heads of one device), f/t or the f/t of an expert is not a multiple of a full-width load
    although the whole dimension is. Dimensions that t does not divide are reported by `heads-split-unevenly` and
    `mlp-width-split-unevenly`, the vocabulary by `vocab-not-aligned`.

    ## Why it is slow

    Each GEMM runs on the shard. A width of 11008 is 172 times 64, but over 8 devices it is 1376, which is 21.5 times
    64. On an A100 a GEMM of 27648 x n x 4096 ran at 227.2 TFLOP/s with n = 256, 206.7 with n = 320, and 116.6 with n =
    258 (sweep of arXiv 2401.14489).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL104", intermediate_size=9280, tensor_parallel=4)
    True

    ## Use instead

    >>> fires("PL104", intermediate_size=9216, tensor_parallel=4)
    False

    ## Fix safety

    `retrain`. Where memory allows a smaller degree, `tensor-parallel-too-large` suggests it.

    ## When it does not matter

    With an alignment of 16 bytes or more, little is left to gain on Hopper. In decode, GEMMs are memory-bound.

    ## References

    - arXiv 2401.14489, rule 3 ("h/t should be divisible by a power of two").
    """
    t = scenario.layout.tensor_parallel
    if t == scenario.layout.expert_tensor_degree == 1:
        return
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    for name in list_mlp_width_fields(scenario.config):
        width, pieces = getattr(scenario.config, name), count_width_shards(scenario.layout, name)
        if _loses_alignment(width, pieces, multiple):
            is_routed = name == "moe_intermediate_size"
            axis = width_degree_field(scenario.layout, name)
            yield Violation(
                field=f"config.{name}",
                actual=width,
                wanted=f"a multiple of {multiple * pieces}",
                problem=(
                    f"over {axis}={pieces} is {width // pieces}, not a multiple of {multiple} "
                    f"({scenario.dtype_and_device})"
                ),
                fixes=(*(whole_expert_fixes(scenario) if is_routed else ()), *width_fixes(scenario, name)),
            )
    heads_width = scenario.config.num_heads * scenario.config.head_dim
    if not scenario.config.is_mla and scenario.config.num_heads % t == 0 and _loses_alignment(heads_width, t, multiple):
        yield Violation(
            field="config.num_heads",
            actual=scenario.config.num_heads,
            wanted=f"num_heads * head_dim on one device a multiple of {multiple}",
            problem=(
                f"over tensor_parallel={t} gives num_heads * head_dim = {heads_width // t} on one device, "
                f"not a multiple of {multiple} ({scenario.dtype_and_device})"
            ),
            fixes=tuple(_aligned_hidden_sizes(scenario, multiple)),
        )


def _loses_alignment(width: int, degree: int, multiple: int) -> bool:
    """Whether a width is aligned, but its shards are not."""
    return width % degree == 0 and width % multiple == 0 and width // degree % multiple != 0


def _aligned_hidden_sizes(scenario: Scenario, multiple: int) -> Iterator[Fix]:
    """Suggest hidden sizes with which the heads of one device are aligned: other heads of the same width are not."""
    config, t = scenario.config, scenario.layout.tensor_parallel
    for hidden_size in nearest_multiples(config.hidden_size, multiple * t):
        changes = with_hidden_size(config, hidden_size, multiple * t)
        num_heads, head_dim = ((changes or {}).get(name, getattr(config, name)) for name in ("num_heads", "head_dim"))
        if changes and num_heads % t == 0 and num_heads * head_dim // t % multiple == 0:
            yield Fix(kind="retrain", title=f"use hidden_size={hidden_size}", changes=changes)


SCALE_BLOCK = 128
"""Side of the square block of weights that shares one scale (weight_block_size of published checkpoints)."""


@rule(
    "SV101",
    "block-scale-split",
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
)
def block_scale_split(scenario: Scenario) -> Iterator[Violation]:
    """A tensor parallel shard is not a multiple of the 128 weights that share an fp8 scale, so engines do not load it.

    ## What it does

    Fires in prefill and decode in fp8 when the part of a matrix on one device, or as a whole one that engines merge
    with others (gate and up; queries, keys and values), is not a multiple of 128: f/t, the f/t of an expert, h/t (all
    heads of one device), or the key-value heads of one device. An `error` where the checkpoint has one scale per block
    of 128 x 128 (DeepSeek-V3, Kimi K2, Qwen3 FP8), otherwise `info`: a checkpoint with one scale per tensor or channel
    loads.

    ## Why it is slow

    The engine does not start. vLLM and SGLang raise "The output_size of gate's and up's weight = 192 is not divisible
    by weight quantization block_n = 128" (Qwen3 30B A3B, experts of 768 on 4 devices), since a device would need parts
    of a block.

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

    - vLLM 0.10.2, `model_executor/layers/quantization/fp8.py` (create_weights of linear layers and experts) and
      `utils/fp8_utils.py` (validate_fp8_block_shape).
    - arXiv 2412.19437 (DeepSeek-V3), section 3.3.2: scales of 128 x 128 weights.
    """
    workload = scenario.workload
    if workload.is_training or "fp8" not in (workload.dtype, workload.weight_dtype):
        return
    for name, shard in find_partial_blocks(scenario.config, scenario.layout).items():
        pieces, axis = count_width_shards(scenario.layout, name), width_degree_field(scenario.layout, name)
        over = f"over {axis}={pieces} is {shard}, " if pieces > 1 else "is "
        per_head = " (with head_dim)" if name.endswith("heads") else ""
        refused = ": vLLM and SGLang do not load it" if scenario.model.has_block_scales else ""
        yield Violation(
            field=f"config.{name}",
            actual=getattr(scenario.config, name),
            wanted=f"a multiple of {SCALE_BLOCK} on one device{per_head}",
            problem=f"{over}not a multiple of the {SCALE_BLOCK} weights that share an fp8 scale{per_head}{refused}",
            fixes=tuple(_whole_block_fixes(scenario, name)),
            least_severity="error" if scenario.model.has_block_scales else "info",
            has_cost=False,
        )


def find_partial_blocks(config: TransformerConfig, layout: ParallelLayout) -> dict[str, int]:
    """Return the shard sizes that are not multiples of a block, by field.

    Sizes that the degree does not divide are reported by other rules.
    """
    t = layout.tensor_parallel
    sizes = {name: (getattr(config, name), count_width_shards(layout, name)) for name in list_mlp_width_fields(config)}
    if not config.gated_mlp:  # without a gate only those of experts are merged
        sizes = {name: size for name, size in sizes.items() if size[1] > 1 or name == "moe_intermediate_size"}
    # Whole matrices are refused too where they are merged, but the last of them.
    has_attention = any(ATTENTION in mixers_of(group.layer_type) for group in config.layer_groups())
    if t > 1 or (has_attention and not config.shares_keys):
        sizes["num_heads"] = (config.num_heads * config.v_head_dim, t)
        if not config.shares_keys:
            num_stored = max(config.num_kv_heads, t)  # heads are replicated where there are fewer than devices
            sizes["num_kv_heads"] = (num_stored * config.head_dim, t)
    return {
        name: size // pieces
        for name, (size, pieces) in sizes.items()
        if size % pieces == 0 and size // pieces % SCALE_BLOCK
    }


def _whole_block_fixes(scenario: Scenario, name: str) -> Iterator[Fix]:
    """Yield changes of the layout after which the shard is a whole number of blocks."""
    fixes = [*smaller_degree_fixes(scenario, scenario.layout.tensor_parallel)]
    if name == "moe_intermediate_size":
        fixes += whole_expert_fixes(scenario)
    for fix in fixes:
        after = scenario.try_replace(fix.changes)
        if after is not None and name not in find_partial_blocks(after.config, after.layout):
            yield fix
