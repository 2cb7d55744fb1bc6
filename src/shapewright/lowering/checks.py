"""Checks that a layout divides a model and that sequence lengths are possible.

Each message states both numbers and the nearest allowed values.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.core.notes import Note
from shapewright.core.numeric import divisors, largest, values_beside
from shapewright.core.texts import FieldName, Text, with_fields
from shapewright.models.layers import ATTENTION, mixers_of
from shapewright.workload.images import count_image_tokens
from shapewright.workload.linears import check_targets
from shapewright.workload.workload import MAX_SEQUENCE_TOKENS

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


def validate_layout(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Check that the layout divides the model evenly.

    Layers may be divided unevenly among pipeline stages and the vocabulary over the tensor axis: the busiest stage and
    the padded matrix are lowered.

    Raises:
        LayoutError: a degree does not divide the dimension that it splits.
        WorkloadError: the model does not support the phase.
    """
    if config.stack == "encoder" and workload.phase == "decode":
        raise WorkloadError(
            "phase='decode' requires a decoder, but this model is an encoder; use phase='prefill' or 'train'"
        )
    whole = _layers_of_whole_sequences(config)
    if whole and layout.context_parallel > 1:
        raise LayoutError(
            f"context_parallel={layout.context_parallel} is not supported for {whole}",
            advice=with_fields("use context_parallel=1 and {tensor_parallel} or {pipeline_parallel} instead"),
            field="context_parallel",
        )
    _validate_tensor_axis(config, layout)
    _validate_pipeline_axis(config, layout)
    _validate_expert_axis(config, layout)
    if layout.has_own_expert_degree:
        _validate_expert_tensor_axis(config, workload, layout)
    _validate_sequence(workload, layout)
    _validate_finetuning(config, workload, layout)


def _layers_of_whole_sequences(config: TransformerConfig) -> str:
    """Return which layers need all tokens of a sequence on one device, and why; empty without such layers."""
    if config.linear_layers:
        return f"{config.linear_layers[0]} layers, whose scan passes through all tokens in order"
    if config.attends_to_images:
        return "layers that attend to images, whose tokens belong to no part of the sequence"
    if config.compressed_layers:
        return f"{config.compressed_layers[0]} layers, whose entries are groups of neighbouring tokens"
    return ""


def _validate_finetuning(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Check adapters and packed documents against model and layout."""
    if workload.lora_targets is not None:
        check_targets(config, workload.lora_targets)
    if workload.has_adapters and workload.adapter_rank > config.hidden_size:
        raise WorkloadError(
            f"lora_rank={workload.adapter_rank} exceeds hidden_size={config.hidden_size}; use "
            f"a lower rank, or finetune='full'",
            field="lora_rank",
        )
    if workload.last_layers is not None and workload.last_layers > config.num_layers:
        raise WorkloadError(
            f"last_layers={workload.last_layers} exceeds num_layers={config.num_layers}; use at most that, or "
            f"finetune='full'",
            field="last_layers",
        )
    if workload.last_layers is not None and config.stack == "encoder-decoder":
        raise WorkloadError(
            "finetune='last-layers' is not modelled for an encoder-decoder; use adapters, or finetune='full'",
            field="finetune",
        )
    if workload.packed is None:
        return
    if layout.context_parallel > 1:
        raise LayoutError(
            f"packed documents with context_parallel={layout.context_parallel} are not modelled; use "
            f"context_parallel=1, or omit packed",
            field="context_parallel",
        )
    if config.stack == "encoder-decoder":
        raise WorkloadError("packed documents are not modelled for an encoder-decoder; omit packed", field="packed")


def validate_lengths(config: TransformerConfig, workload: Workload) -> None:
    """Check that a sequence is not longer than the model's learned positions, nor implausibly long.

    Rotary positions and attention biases are defined for any length.

    Raises:
        WorkloadError: the sequence is longer than the table of learned positions or than MAX_SEQUENCE_TOKENS, or
            shorter than the tokens of its images.
    """
    length = workload.seq_len if workload.is_training else largest(workload.kv_len)
    projected = 0 if config.attends_to_images else count_image_tokens(config, workload)
    if projected > length:
        raise WorkloadError(
            f"images={workload.images} make {projected} tokens, more than the {length} of a sequence; use fewer or "
            f"smaller images, or a sequence of at least {projected} tokens",
            field="images",
        )
    name = "context_len" if workload.phase == "decode" else "seq_len"
    given, limit, most = getattr(workload, name), config.max_position_embeddings, max_sequence_length(config)
    if length > max(MAX_SEQUENCE_TOKENS, limit):
        raise WorkloadError(
            f"{name}={given} is longer than the limit of {MAX_SEQUENCE_TOKENS} tokens, 13 times the longest context of "
            f"a public model",
            advice=with_fields(
                "use the tokens of one sequence, or a larger {max_position_embeddings} if the model has it"
            ),
        )
    if length > most:
        raise WorkloadError(
            f"{name}={given} exceeds the model's {limit} learned positions",
            advice=with_fields(
                "use {name} of at most {longest}, or max_position_embeddings={length} for a model with a longer table",
                name=FieldName(name),
                longest=max(limit - (length - given), 0),
                length=length,
            ),
        )


def describe_long_sequence(config: TransformerConfig, workload: Workload) -> list[Note]:
    """Note that a sequence is longer than the model's stated maximum, where that is allowed; otherwise empty."""
    if workload.kv_len <= config.max_position_embeddings:
        return []
    return [
        Note(
            f"{workload.kv_len} positions exceed the model's max_position_embeddings={config.max_position_embeddings}",
            "overlong",
            "seq_len",
        )
    ]


def max_sequence_length(config: TransformerConfig) -> int:
    """Number of tokens of the longest sequence that a model supports: its learned positions, or a generous limit."""
    if config.position_embedding == "learned" and config.stack != "encoder-decoder" and config.patches is None:
        return config.max_position_embeddings
    return max(MAX_SEQUENCE_TOKENS, config.max_position_embeddings)


def _validate_tensor_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    """Check the tensor parallel degree against heads, widths and vocabulary."""
    t = layout.tensor_parallel
    if t == 1:
        return
    split = _widths_over_tensor_axis(config, has_own_expert_degree=layout.has_own_expert_degree)
    for field_name, value in split.items():
        if value % t:
            raise LayoutError(
                f"tensor_parallel={t} must divide {field_name}={value}",
                advice=f"try {_degrees_near(t, config)}",
                field="tensor_parallel",
                reason=with_fields("tensor_parallel={t} must divide {name}", t=t, name=FieldName(field_name)),
            )
    if not _shares_kv_heads(config, t):
        raise LayoutError(
            f"tensor_parallel={t} must divide num_kv_heads={config.num_kv_heads} or be a multiple of it",
            advice=f"try {_degrees_near(t, config)}",
            field="tensor_parallel",
            reason=with_fields("tensor_parallel={t} must divide {num_kv_heads} or be a multiple of it", t=t),
        )
    if config.patches is None and t > config.vocab_size:  # image models have no vocabulary
        raise LayoutError(
            f"tensor_parallel={t} must not exceed vocab_size={config.vocab_size}",
            advice="lower it",
            field="tensor_parallel",
            reason=with_fields("tensor_parallel={t} must not exceed {vocab_size}", t=t),
        )


def possible_degrees(config: TransformerConfig, layout: ParallelLayout) -> tuple[int, ...]:
    """List the degrees that divide the model, for a layout with only a pipeline or only a tensor axis; else empty.

    Pipeline degrees are those that give every stage the same number of layers, although others are allowed.
    """
    if layout.num_devices == layout.pipeline_parallel:
        return _even_stages(config, layout)
    return _tensor_degrees(config) if layout.num_devices == layout.tensor_parallel else ()


def _even_stages(config: TransformerConfig, layout: ParallelLayout) -> tuple[int, ...]:
    """List the numbers of stages whose chunks have equally many layers, counting ends that count as a layer."""
    per_chunk, rest = divmod(config.num_layers + sum(layout.ends_as_layers), layout.virtual_pipeline)
    return divisors(per_chunk) if per_chunk and not rest else ()


def _tensor_degrees(config: TransformerConfig) -> tuple[int, ...]:
    """List the tensor parallel degrees that divide the model."""
    degrees = divisors(gcd(*_widths_over_tensor_axis(config).values()))
    return tuple(degree for degree in degrees if _shares_kv_heads(config, degree))


def _degrees_near(wanted: int, config: TransformerConfig) -> str:
    """Format the allowed tensor parallel degrees next to the wanted one; of a power of two, the powers of two."""
    degrees = _tensor_degrees(config)
    powers = [degree for degree in degrees if degree.bit_count() == 1]
    return values_beside(wanted, powers if wanted.bit_count() == 1 and len(powers) > 1 else degrees)


def _widths_over_tensor_axis(config: TransformerConfig, *, has_own_expert_degree: bool = False) -> dict[str, int]:
    """Fields whose values the tensor parallel degree must divide."""
    groups = (*config.layer_groups(), *config.encoder_layer_groups())
    kinds = {group.is_moe for group in groups if group.has_mlp}
    split = {"num_heads": config.num_heads} if any(ATTENTION in mixers_of(each.layer_type) for each in groups) else {}
    if config.compressed_layers:
        split |= {"num_heads": config.num_heads, "out_groups": config.out_groups}
    if config.linear_num_value_heads:
        split["linear_num_value_heads"] = config.linear_num_value_heads
    if "short_convolution" in config.linear_layers:
        split["hidden_size"] = config.hidden_size
    if False in kinds:
        split["intermediate_size"] = config.intermediate_size
    if True in kinds:
        if not has_own_expert_degree:
            split["moe_intermediate_size"] = config.moe_intermediate_size
        if config.shared_expert_intermediate_size:
            split["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    return split


def _shares_kv_heads(config: TransformerConfig, degree: int) -> bool:
    """Whether key-value heads can be split or replicated evenly; MLA's latents are always replicated."""
    pairs = [] if config.is_mla else [config.num_kv_heads]
    if config.linear_num_key_heads:
        pairs.append(config.linear_num_key_heads)
    return not any(heads % degree and degree % heads for heads in pairs)


def _validate_pipeline_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    """Check the number of stages and chunks against the number of layers."""
    chunks, ends = layout.pipeline_parallel * layout.virtual_pipeline, sum(layout.ends_as_layers)
    degrees = (
        with_fields("{pipeline_parallel} * {virtual_pipeline}")
        + f" = {layout.pipeline_parallel} * {layout.virtual_pipeline}"
    )
    if ends:
        _validate_counted_ends(config, chunks, ends, degrees)
    elif chunks > config.num_layers:
        counted = ""
        if layout.virtual_pipeline > 1 and (config.num_layers + 2) % chunks == 0:
            counted = with_fields(
                ", or count both ends as layers with {account_for_embedding_in_pipeline_split} and "
                "{account_for_loss_in_pipeline_split}"
            )
        stages = max(_even_stages(config, layout), default=1)
        lower = with_fields("lower {pipeline_parallel}") + (f" to {stages}" if stages > 1 else "")
        raise LayoutError(
            degrees + f" must not exceed num_layers={config.num_layers}",
            advice=lower + counted,
            reason=degrees + with_fields(" must not exceed {num_layers}"),
        )


def _validate_counted_ends(config: TransformerConfig, chunks: int, ends: int, degrees: Text) -> None:
    """Check that layers divide evenly among stages if embedding or loss count as a layer.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py (num_layers plus counted ends must be
        divisible by the number of stages, and the layers of a stage by its chunks).
    """
    if config.stack == "encoder-decoder":
        raise LayoutError(
            with_fields("{account_for_embedding_in_pipeline_split} and {account_for_loss_in_pipeline_split}")
            + " require a single stack, but this model is an encoder-decoder",
            advice="omit them",
        )
    counted = config.num_layers + ends
    if counted % chunks:
        raise LayoutError(
            f"num_layers={config.num_layers} plus {ends} end(s) that count as a layer make {counted}, which is not a "
            f"multiple of " + degrees,
            advice=with_fields(
                "change one of them, or omit {account_for_embedding_in_pipeline_split} and "
                "{account_for_loss_in_pipeline_split}"
            ),
            field="num_layers",
            reason=with_fields("{num_layers} plus {ends} end(s) that count as a layer", ends=ends)
            + " is not a multiple of "
            + degrees,
        )


def _validate_expert_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    """Check the expert parallel degree against the number of experts."""
    if layout.expert_parallel == 1:
        return
    if not config.num_experts:
        raise LayoutError(
            f"expert_parallel={layout.expert_parallel} requires a model with experts, but num_experts=0",
            advice="use expert_parallel=1",
            field="expert_parallel",
        )
    if config.num_experts % layout.expert_parallel:
        raise LayoutError(
            f"expert_parallel={layout.expert_parallel} must divide num_experts={config.num_experts}",
            advice=f"try {values_beside(layout.expert_parallel, divisors(config.num_experts))}",
            field="expert_parallel",
        )


def _validate_expert_tensor_axis(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Check experts that are split over another number of devices than other matrices.

    Source: NVIDIA/Megatron-LM, megatron/training/arguments.py (experts over a tensor axis need sequence parallelism);
        sglang, server_args.py (moe_tp_size = tp_size / ep_size); vllm, config/parallel.py (experts over data and tensor
        axis together, whole).
    """
    e_t, t = layout.expert_tensor_degree, layout.tensor_parallel
    if not config.num_experts:
        raise LayoutError(
            f"expert_tensor_parallel={e_t} requires a model with experts, but num_experts=0; omit it",
            field="expert_tensor_parallel",
        )
    if config.moe_intermediate_size % e_t:
        raise LayoutError(
            f"expert_tensor_parallel={e_t} must divide moe_intermediate_size={config.moe_intermediate_size}",
            advice=f"try {values_beside(e_t, divisors(config.moe_intermediate_size))}",
            field="expert_tensor_parallel",
            reason=with_fields("expert_tensor_parallel={e_t} must divide {moe_intermediate_size}", e_t=e_t),
        )
    if workload.is_training:
        if t > 1 and not layout.sequence_parallel:
            raise LayoutError(
                f"expert_tensor_parallel={e_t} with tensor_parallel={t} requires "
                + with_fields("{sequence_parallel}, so that every device sends different tokens"),
                advice=with_fields("use sequence_parallel=True or omit {expert_tensor_parallel}"),
                field="expert_tensor_parallel",
            )
        return
    is_over_replicas = e_t == 1 and layout.expert_parallel % t == 0
    if not (layout.keeps_experts_in_tensor_group or is_over_replicas):
        raise LayoutError(
            with_fields("{expert_parallel} * {expert_tensor_parallel}")
            + f" = {layout.expert_parallel} * {e_t} is not supported by serving libraries with tensor_parallel={t}",
            advice=with_fields(
                "use a product of {t}, or expert_tensor_parallel=1 with {expert_parallel} a multiple of {t}", t=t
            ),
        )


def _validate_sequence(workload: Workload, layout: ParallelLayout) -> None:
    """Check that context and tensor axes divide the sequence."""
    cp, t = layout.context_parallel, layout.tensor_parallel
    splits_tokens = layout.splits_sequence_over_tensor and workload.is_training
    step = cp * t if splits_tokens else cp
    # Without such axes the length may be an array, for several passes.
    if workload.phase != "decode" and step > 1 and workload.seq_len % step:
        degrees = f"context_parallel={cp}"
        if splits_tokens:
            degrees = with_fields("{context_parallel} * {tensor_parallel}") + f" = {cp} * {t}"
        below = workload.seq_len // step * step
        allowed = f"{below} or {below + step}" if below else f"{step}"
        advice: str = ""
        if splits_tokens and workload.seq_len % cp == 0:
            advice = with_fields(", or set {sequence_parallel:False}")
        raise LayoutError(
            f"seq_len={workload.seq_len} must be a multiple of " + degrees,
            advice=with_fields("try {seq_len} ") + allowed + advice,
            field="seq_len",
        )
