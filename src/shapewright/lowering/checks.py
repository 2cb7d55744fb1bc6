"""Whether a layout divides a model: every message gives both numbers and the nearest values that work."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError, WorkloadError
from shapewright.integers import divisors
from shapewright.workload import MOST_SEQUENCE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload


def validate_layout(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Check that every slice of the model is whole.

    Layers may split unevenly over pipeline stages and the vocabulary over the tensor axis: the busiest stage and the
    padded matrix are what is lowered.

    Raises:
        LayoutError: a degree does not divide what it splits.
        WorkloadError: the model cannot run this phase.
    """
    if config.stack == "encoder" and workload.phase == "decode":
        raise WorkloadError(
            "phase='decode' needs a decoder, but this model is an encoder; use --phase prefill or train"
        )
    _validate_tensor_axis(config, layout)
    _validate_pipeline_axis(config, layout)
    _validate_expert_axis(config, layout)
    if layout.cuts_experts_apart:
        _validate_experts_apart(config, workload, layout)
    _validate_sequence(workload, layout)


def validate_lengths(config: TransformerConfig, workload: Workload) -> None:
    """Check that the model has positions for the sequence, and that no one meant another number.

    Rotary positions and biases can be computed for any length, sensible or not; a table of learned ones ends.

    Raises:
        WorkloadError: the sequence is longer than the table of learned positions, or than any that could be meant.
    """
    length = workload.seq_len if workload.is_training else workload.kv_len
    name = "context_len" if workload.phase == "decode" else "seq_len"
    given, limit, most = getattr(workload, name), config.max_position_embeddings, longest_sequence(config)
    if length > max(MOST_SEQUENCE_TOKENS, limit):
        raise WorkloadError(
            f"{name}={given} is no length that a sequence has: at most {MOST_SEQUENCE_TOKENS} tokens, 13 times the "
            f"longest that a public model is made for; give the tokens of one sequence, or --max-position-embeddings "
            f"of a model that is made for more"
        )
    if length > most:
        flag = "--" + name.replace("_", "-")
        raise WorkloadError(
            f"{name}={given} is beyond the {limit} learned positions that the model has; give {flag} of at most "
            f"{max(limit - (length - given), 0)}, or --max-position-embeddings {length} for a model with a longer table"
        )


def describe_overlong(config: TransformerConfig, workload: Workload) -> list[str]:
    """Say that a sequence is longer than the model was made for, where that stops nobody; empty where it is not."""
    if workload.kv_len <= config.max_position_embeddings:
        return []
    return [
        f"{workload.kv_len} positions are more than the max_position_embeddings={config.max_position_embeddings} that "
        f"the model is made for"
    ]


def longest_sequence(config: TransformerConfig) -> int:
    """Tokens of the longest sequence that a model can take: all its learned positions, or what no one will exceed."""
    if config.position_embedding == "learned" and config.stack != "encoder-decoder":
        return config.max_position_embeddings
    return max(MOST_SEQUENCE_TOKENS, config.max_position_embeddings)


def _validate_tensor_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    t = layout.tensor_parallel
    if t == 1:
        return
    split = _widths_over_tensor_axis(config, cuts_experts_apart=layout.cuts_experts_apart)
    for field_name, value in split.items():
        if value % t:
            raise LayoutError(f"tensor_parallel={t} must divide {field_name}={value}; try {_degrees_near(t, config)}")
    if not _shares_kv_heads(config, t):
        raise LayoutError(
            f"tensor_parallel={t} must divide num_kv_heads={config.num_kv_heads} or be a multiple of it; "
            f"try {_degrees_near(t, config)}"
        )
    if t > config.vocab_size:
        raise LayoutError(f"tensor_parallel={t} must not exceed vocab_size={config.vocab_size}; lower it")


def possible_degrees(config: TransformerConfig, layout: ParallelLayout) -> tuple[int, ...]:
    """Degrees that the model allows for the one axis that a layout has; empty for several, or one without a limit.

    Stages may hold unequal numbers of layers, but those that share them out evenly are what is suggested.
    """
    if layout.num_devices == layout.pipeline_parallel:
        return _even_stages(config, layout)
    return _tensor_degrees(config) if layout.num_devices == layout.tensor_parallel else ()


def _even_stages(config: TransformerConfig, layout: ParallelLayout) -> tuple[int, ...]:
    """Numbers of stages whose chunks hold equally many layers, with the ends that count as one."""
    per_chunk, rest = divmod(config.num_layers + sum(layout.counted_ends), layout.virtual_pipeline)
    return divisors(per_chunk) if per_chunk and not rest else ()


def _tensor_degrees(config: TransformerConfig) -> tuple[int, ...]:
    degrees = divisors(gcd(*_widths_over_tensor_axis(config).values()))
    return tuple(degree for degree in degrees if _shares_kv_heads(config, degree))


def _degrees_near(wanted: int, config: TransformerConfig) -> str:
    """Tensor parallel degrees next to the wanted one that the model allows."""
    return _nearest(wanted, _tensor_degrees(config))


def _widths_over_tensor_axis(config: TransformerConfig, *, cuts_experts_apart: bool = False) -> dict[str, int]:
    """Fields that the tensor axis must share out evenly."""
    kinds = {group.is_moe for group in (*config.layer_groups(), *config.encoder_layer_groups())}
    split = {"num_heads": config.num_heads}
    if False in kinds:
        split["intermediate_size"] = config.intermediate_size
    if True in kinds:
        if not cuts_experts_apart:
            split["moe_intermediate_size"] = config.moe_intermediate_size
        if config.shared_expert_intermediate_size:
            split["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    return split


def _shares_kv_heads(config: TransformerConfig, degree: int) -> bool:
    """Whether key-value heads are shared out evenly, or each is copied to as many devices; latents always are."""
    return config.is_mla or not (config.num_kv_heads % degree and degree % config.num_kv_heads)


def _validate_pipeline_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    chunks, ends = layout.pipeline_parallel * layout.virtual_pipeline, sum(layout.counted_ends)
    degrees = f"pipeline_parallel * virtual_pipeline = {layout.pipeline_parallel} * {layout.virtual_pipeline}"
    if ends:
        _validate_counted_ends(config, chunks, ends, degrees)
    elif chunks > config.num_layers:
        counted = ""
        if layout.virtual_pipeline > 1 and (config.num_layers + 2) % chunks == 0:
            counted = (
                ", or count both ends as layers: --account-for-embedding-in-pipeline-split "
                "--account-for-loss-in-pipeline-split"
            )
        stages = max(_even_stages(config, layout), default=1)
        lower = f"lower --pipeline-parallel{f' to {stages}' if stages > 1 else ''}"
        raise LayoutError(f"{degrees} must not exceed num_layers={config.num_layers}; {lower}{counted}")


def _validate_counted_ends(config: TransformerConfig, chunks: int, ends: int, degrees: str) -> None:
    """Check a cut that counts embedding or loss as a layer, which has to come out even.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py (num_layers with what is accounted for
        must be divisible by the stages, and a stage's by its chunks).
    """
    if config.stack == "encoder-decoder":
        raise LayoutError("--account-for-... counts the ends of one stack, and this model has two; leave it out")
    counted = config.num_layers + ends
    if counted % chunks:
        raise LayoutError(
            f"num_layers={config.num_layers} and {ends} end(s) that count as a layer are {counted}, which {degrees} "
            f"must divide; change one of them, or leave --account-for-... out"
        )


def _validate_expert_axis(config: TransformerConfig, layout: ParallelLayout) -> None:
    if layout.expert_parallel == 1:
        return
    if not config.num_experts:
        raise LayoutError(
            f"expert_parallel={layout.expert_parallel} needs a model with experts, but num_experts=0; "
            "use expert_parallel=1"
        )
    if config.num_experts % layout.expert_parallel:
        raise LayoutError(
            f"expert_parallel={layout.expert_parallel} must divide num_experts={config.num_experts}; "
            f"try {_nearest(layout.expert_parallel, divisors(config.num_experts))}"
        )


def _validate_experts_apart(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Check experts that are cut over another number of devices than other matrices.

    Source: NVIDIA/Megatron-LM, megatron/training/arguments.py (experts over a tensor axis need sequence parallelism);
        sglang, server_args.py (moe_tp_size = tp_size / ep_size); vllm, config/parallel.py (experts over data and tensor
        axis together, whole).
    """
    e_t, t = layout.tensor_degree_of_experts, layout.tensor_parallel
    if not config.num_experts:
        raise LayoutError(f"expert_tensor_parallel={e_t} needs a model with experts, but num_experts=0; leave it out")
    if config.moe_intermediate_size % e_t:
        raise LayoutError(
            f"expert_tensor_parallel={e_t} must divide moe_intermediate_size={config.moe_intermediate_size}; "
            f"try {_nearest(e_t, divisors(config.moe_intermediate_size))}"
        )
    if workload.is_training:
        if t > 1 and not layout.sequence_parallel:
            raise LayoutError(
                f"expert_tensor_parallel={e_t} beside tensor_parallel={t} needs sequence_parallel, so that each device "
                f"has tokens of its own to send; use --sequence-parallel or leave --expert-tensor-parallel out"
            )
        return
    is_over_replicas = e_t == 1 and layout.expert_parallel % t == 0
    if not (layout.keeps_experts_in_tensor_axis or is_over_replicas):
        raise LayoutError(
            f"expert_parallel * expert_tensor_parallel = {layout.expert_parallel} * {e_t} is no way in which servers "
            f"spread experts beside tensor_parallel={t}; use a product of {t}, or expert_tensor_parallel=1 with a "
            f"multiple of {t}"
        )


def _validate_sequence(workload: Workload, layout: ParallelLayout) -> None:
    cp, t = layout.context_parallel, layout.tensor_parallel
    splits_tokens = layout.splits_sequence_over_tensor and workload.is_training
    if workload.phase != "decode" and workload.seq_len % (cp * (t if splits_tokens else 1)):
        degrees = f"context_parallel * tensor_parallel = {cp} * {t}" if splits_tokens else f"context_parallel={cp}"
        step = cp * t if splits_tokens else cp
        below = workload.seq_len // step * step
        allowed = f"{below} or {below + step}" if below else f"{step}"
        advice = ", or turn sequence_parallel off" if splits_tokens and workload.seq_len % cp == 0 else ""
        raise LayoutError(f"seq_len={workload.seq_len} must be a multiple of {degrees}; try seq_len {allowed}{advice}")


def _nearest(wanted: int, allowed: Sequence[int]) -> str:
    """The allowed values next below and next above.

    >>> _nearest(6, [1, 2, 4, 8, 16])
    '4 or 8'
    """
    below = [value for value in allowed if value < wanted][-1:]
    above = [value for value in allowed if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)
