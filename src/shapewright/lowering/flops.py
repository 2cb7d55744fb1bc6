"""FLOPs of a step: model FLOPs, hardware FLOPs, and those of the conventions of published throughput numbers.

Model FLOPs count the GEMMs of the forward and backward pass, with attention over all query-key pairs and without
recomputation. Hardware FLOPs add the recomputation. Conventions differ from both (``models.flop_conventions``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.lowering.counts import num_microbatches
from shapewright.lowering.model import lower, lower_before_backward, lower_parts, lower_passes
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import PASSES
from shapewright.models.flop_conventions import get_convention
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, mixers_of
from shapewright.models.parameters import count_parameters
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

_SINGLE = ParallelLayout()

# arXiv 2205.05198 eq. 9 has s/(3h) where eq. 7 has s/(6h): it counts the attention core three times more, although
# selective recomputation runs its forward part once more. Published HFU follow eq. 9.
_SELECTIVE_PASSES_BY_CONVENTION = 3.0
# Each of the gradients dA = dC B^T and dB = A^T dC has the FLOPs of the GEMM itself; those of attention together twice.
_BACKWARD_TO_FORWARD_FLOPS = 2.0
_TRAINING_FLOPS_PER_WEIGHT = 6.0  # 2 forward, 4 backward: a multiplication and an addition each
_FORWARD_SHARE = 1.0 / 3.0  # of forward and backward pass together


def count_model_flops(config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE) -> float:
    """Count the model FLOPs of one step over all devices.

    For a GPT with f = 4h in training this is 72 B L s h^2 (1 + s/(6h) + v/(12 h L)). The layout only determines the
    number of sequences; sharding does not change the result.

    Args:
        workload: What is run; global_batch_size sequences per step, or one micro-batch per replica and stage.

    Returns:
        FLOPs. [flop]

    Source: arXiv 2205.05198, eq. 7.
    """
    return count_step_flops(config, workload, layout)[0]


def count_hardware_flops(config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE) -> float:
    """Count the hardware FLOPs of one step over all devices, including recomputation as published HFU do.

    For a GPT, 96 B L s h^2 (1 + s/(6h) + v/(16 h L)) with full recomputation, which repeats the forward pass of the
    layers, and 72 B L s h^2 (1 + s/(3h) + v/(12 h L)) with selective recomputation of the attention core, which is more
    than is executed: see _SELECTIVE_PASSES_BY_CONVENTION. Other recomputed modules count as executed.

    Returns:
        FLOPs. [flop]

    Source: arXiv 2104.04473, eq. 3 (full); arXiv 2205.05198, eq. 9 (selective).
    """
    return count_step_flops(config, workload, layout)[1]


def count_step_flops(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE
) -> tuple[float, float]:
    """Count the model FLOPs and the hardware FLOPs of one step over all devices. [flop]"""
    flops = _count_by_pass(config, workload, layout)
    model_flops = flops["forward"] + flops["backward"]
    return model_flops, model_flops + flops["recompute"]


def count_masked_fraction(config: TransformerConfig, workload: Workload) -> float:
    """Share of a step's model FLOPs in query-key pairs that masks and windows exclude and fused attention skips.

    Counted on one device, because ranks of a context axis also process blocks without a mask.
    """
    total = skipped = 0.0
    # The share is the same in the backward pass.
    for one in _lower_on_one_device(config, workload):
        if one.pass_name != "forward":
            continue
        flops = float(one.flops * one.repeats)
        total += flops
        if isinstance(one, Attention):
            pairs = float(1.0 * one.batch_size * one.num_heads * one.query_len * one.kv_len)
            skipped += flops * (1.0 - float(one.attended_pairs) / pairs)
    return skipped / total if total > 0.0 else 0.0


def sum_flops(operations: Iterable[Operation], passes: tuple[str, ...]) -> float:
    """Sum the FLOPs of all executions of the operations of some passes."""
    return float(sum(operation.flops * operation.repeats for operation in operations if operation.pass_name in passes))


def _count_by_pass(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> dict[str, float]:
    """Count the FLOPs of a step by pass: those of one device, scaled to the micro-batches of all replicas.

    Those of the recompute pass are as published HFU count them.
    """
    flops = dict.fromkeys(PASSES, 0.0)
    for operation in _lower_on_one_device(config, workload):
        flops[operation.pass_name] += _passes_by_convention(operation, workload) * float(
            operation.flops * operation.repeats
        )
    if workload.recompute_layers is not None and layout.pipeline_parallel > 1:
        flops["recompute"] = sum(
            _count_recomputed(config, workload, layers.stop) - _count_recomputed(config, workload, layers.start)
            for layers in _list_recomputed(config, workload.recompute_layers, layout)
        )
    # The gradient of data, such as the patches of an image, is not computed, nor that of a choice of entries.
    is_partial = config.patches is not None or config.vision is not None or config.compressed_layers
    if workload.trains_all and workload.is_training and not is_partial:
        flops["backward"] = _BACKWARD_TO_FORWARD_FLOPS * flops["forward"]
    elif workload.is_training:
        parts = lower_parts(config, workload, _SINGLE)
        flops["backward"] = sum_flops(lower_passes(parts, config, workload, _SINGLE), ("backward",))
    scale = num_microbatches(workload, layout) * layout.data_parallel / num_microbatches(workload, _SINGLE)
    return {pass_name: scale * amount for pass_name, amount in flops.items()}


def _list_recomputed(config: TransformerConfig, num_first: int, layout: ParallelLayout) -> list[range]:
    """List the first layers of each stage, up to a number of them."""
    stages = (layout.layers_of_stage(config.num_layers, index) for index in range(layout.pipeline_parallel))
    return [layers[:num_first] for layers in stages]


def _count_recomputed(config: TransformerConfig, workload: Workload, num_first: int) -> float:
    """Count the FLOPs of running the first layers of a model again, as published HFU count them. [flop]"""
    if num_first == 0:
        return 0.0
    operations = _lower_on_one_device(config, replace(workload, recompute_layers=num_first))
    again = (each for each in operations if each.pass_name == "recompute")
    return sum(_passes_by_convention(each, workload) * float(each.flops * each.repeats) for each in again)


def _passes_by_convention(operation: Operation, workload: Workload) -> float:
    """How often an execution counts: several times where selective recomputation repeats the attention core."""
    is_repeated_core = operation.pass_name == "recompute" and operation.is_attention_core
    return _SELECTIVE_PASSES_BY_CONVENTION if is_repeated_core and workload.recompute == "selective" else 1.0


@lru_cache(maxsize=64)
def _lower_on_one_device(config: TransformerConfig, workload: Workload) -> tuple[Operation, ...]:
    """Lower the forward and recompute passes on one device; FLOPs of gradients follow from the forward pass."""
    return tuple(lower_before_backward(lower_parts(config, workload, _SINGLE), config, workload, _SINGLE))


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over all devices.

    Attributes:
        model_flops: FLOPs without recomputation. [flop]
        hardware_flops: FLOPs with recomputation; None if the convention does not define them. [flop]
    """

    model_flops: float
    hardware_flops: float | None


def count_convention_flops(
    config: TransformerConfig, workload: Workload, num_sequences: int, convention: str, *, num_stages: int = 1
) -> StepFlops:
    """Count the FLOPs of a training step by a named convention.

    Args:
        workload: Training; its sequence length and recomputation are used, its batch sizes are not.
        num_sequences: Sequences of the step over all replicas.
        convention: One of CONVENTIONS.
        num_stages: Number of pipeline stages, each of which recomputes ``recompute_layers`` layers if that is set.

    Returns:
        Model and hardware FLOPs of the step.

    Raises:
        WorkloadError: the convention is unknown, or the phase is not train.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.workload import Workload
    >>> gpt_22b = TransformerConfig(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200)
    >>> f"{count_convention_flops(gpt_22b, Workload(seq_len=2048), 4, 'megatron').model_flops:.6e}"
    '1.143561e+15'
    """
    counts_repeats = get_convention(convention).counts_repeats
    if not workload.is_training:
        raise WorkloadError(f"FLOP conventions apply to training, not to phase={workload.phase!r}; use phase='train'")
    step = replace(workload, micro_batch_size=1, global_batch_size=num_sequences)
    again = 1.0 if workload.recompute == "full" else 0.0  # share of the layers' forward pass that is repeated
    stages = ParallelLayout(pipeline_parallel=num_stages)
    if workload.recompute_layers is not None:
        again = sum(map(len, _list_recomputed(config, workload.recompute_layers, stages))) / config.num_layers
    trained = workload.trained_layers(0, config.num_layers, config.num_layers) / config.num_layers
    again *= trained  # layers without a backward pass are not repeated
    if convention == "megatron":
        return StepFlops(*count_step_flops(config, step, stages))
    if convention == "megatron-causal":
        return _count_causal(config, step, num_sequences, stages, trained=trained, again=again)
    num_tokens = num_sequences * workload.seq_len
    counts = count_parameters(config)
    parameters = counts.active - counts.vision
    if config.patches is not None:  # what conditions the layers runs once for an image
        parameters -= counts.by_component["norms"]
    value_width = config.head_dim
    if convention == "torchtitan-no-embedding":
        parameters -= 0 if config.tied_embeddings else counts.token_embedding
        value_width = config.v_head_dim
    # Conventions count 6 FLOPs per weight; frozen weights have no gradient, and adapters are computed in addition.
    change = 0.0
    if not workload.trains_all:
        change = count_model_flops(config, step) - count_model_flops(config, step.with_all_trained())
    if convention == "6n":
        without, repeated = (
            count_rule_of_thumb_flops(parameters, num_tokens, recompute=mode) for mode in ("none", "full")
        )
        return StepFlops(without + change, without + change + again * (repeated - without))
    # Scans have no pairs of a query and a key, and are small enough to be left out.
    attending = sum(
        group.num_layers
        for group in config.layer_groups()
        if {ATTENTION, *COMPRESSED_LAYERS} & set(mixers_of(group.layer_type))
    )
    core_flops = _TRAINING_FLOPS_PER_WEIGHT * attending * config.num_heads * (config.head_dim + value_width)
    whole = num_tokens * (_TRAINING_FLOPS_PER_WEIGHT * parameters + core_flops * workload.seq_len)
    model_flops = change + whole
    return StepFlops(model_flops, model_flops + again * _FORWARD_SHARE * whole if counts_repeats else None)


def count_rule_of_thumb_flops(num_parameters: float, num_tokens: float, *, recompute: str = "none") -> float:
    """Count training FLOPs from the number of parameters: 6 N per token, 8 N with full recomputation.

    Args:
        num_parameters: Parameters that a token uses.
        recompute: One of ``none``, ``selective``, ``full``; this rule neglects attention and so selective
            recomputation.

    Returns:
        FLOPs. [flop]

    Source: arXiv 2001.08361, section 2.1.

    >>> count_rule_of_thumb_flops(1e9, 1e9), count_rule_of_thumb_flops(1e9, 1e9, recompute="full")
    (6e+18, 8e+18)
    """
    return (8.0 if recompute == "full" else _TRAINING_FLOPS_PER_WEIGHT) * num_parameters * num_tokens


def estimate_training_s(
    num_parameters: float,
    num_tokens: float,
    *,
    num_devices: int,
    flops_per_s_per_device: float,
    recompute: str = "full",
) -> float:
    """Estimate the duration of a training run, 8 T P / (n X) with full recomputation. [s]

    Args:
        num_parameters: P, parameters that a token uses.
        num_tokens: T, training tokens.
        num_devices: n.
        flops_per_s_per_device: X, hardware FLOP rate achieved per device. [flop/s]
        recompute: ``full`` for 8 FLOPs per parameter and token, otherwise 6.

    Source: arXiv 2104.04473, eq. 4.

    >>> round(estimate_training_s(175e9, 300e9, num_devices=1024, flops_per_s_per_device=140e12) / 86400, 1)
    33.9
    """
    flops = count_rule_of_thumb_flops(num_parameters, num_tokens, recompute=recompute)
    return flops / (num_devices * flops_per_s_per_device)


def _count_causal(
    config: TransformerConfig,
    step: Workload,
    num_sequences: int,
    stages: ParallelLayout,
    *,
    trained: float,
    again: float,
) -> StepFlops:
    """Count by the megatron convention and subtract half of the causal attention of all passes.

    Args:
        trained: Share of the layers that have a backward pass.
        again: Share of the layers whose forward pass is repeated.
    """
    one_sequence = replace(step.with_recompute("none"), global_batch_size=1, attention="flash")
    operations = lower(config, one_sequence, ParallelLayout())
    core_flops = num_sequences * sum(
        float(operation.flops) * int(operation.repeats)
        for operation in operations
        if isinstance(operation, Attention) and operation.causal and operation.pass_name == "forward"
    )
    cores = 1.0 + _BACKWARD_TO_FORWARD_FLOPS * trained
    repeated = again
    if step.recompute == "selective":
        # Eq. 9 counts the attention core several times, where it is repeated.
        repeats_core = any(
            operation.is_attention_core and operation.pass_name == "recompute"
            for operation in _lower_on_one_device(config, step)
        )
        repeated = _SELECTIVE_PASSES_BY_CONVENTION * trained * repeats_core
    return StepFlops(
        count_model_flops(config, step) - 0.5 * cores * core_flops,
        count_hardware_flops(config, step, stages) - 0.5 * (cores + repeated) * core_flops,
    )
