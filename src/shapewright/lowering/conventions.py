"""The FLOP conventions under which throughput is published, side by side.

Legend: W weights of the layers and of one logit matrix, N parameters that a token uses, L layers, h width of all query
heads, s tokens of a sequence.

The same run reads differently in each: attention may count as the whole square, as its causal half, or not at all, and
embeddings may count as arithmetic. So a rate means something only beside the name of its convention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.config.parameters import count_parameters
from shapewright.errors import WorkloadError, close_names
from shapewright.layout import ParallelLayout
from shapewright.lowering.flops import count_hardware_flops, count_model_flops
from shapewright.lowering.model import lower
from shapewright.operations import Attention

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.workload import Workload


@dataclass(frozen=True, kw_only=True)
class FlopConvention:
    """One way to count the FLOPs of a training step.

    Attributes:
        name: Word that chooses it.
        formula: FLOPs per token, in the letters of this module.
        used_by: Who publishes by it.
        source: Where it is written down or was verified.
    """

    name: str
    formula: str
    used_by: str
    source: str


CONVENTIONS = {
    convention.name: convention
    for convention in (
        FlopConvention(
            name="megatron",
            formula="6 W + 12 L h s",
            used_by="Megatron-LM papers, NeMo to 25.07, BLOOM",
            source="arXiv 2205.05198, eq. 7 and 9; arXiv 2104.04473, eq. 3 (full recomputation)",
        ),
        FlopConvention(
            name="megatron-causal",
            formula="6 W + 6 L h s",
            used_by="Megatron-Bridge, NeMo from 25.09",
            source="NVIDIA/Megatron-LM at d98e8a6, megatron/training/training.py, which halves the causal core",
        ),
        FlopConvention(
            name="torchtitan",
            formula="6 N + 12 L h s",
            used_by="torchtitan (2024)",
            source="pytorch/torchtitan, torchtitan/models/utils.py; both embeddings are in N",
        ),
        FlopConvention(
            name="llm-foundry",
            formula="6 N + 12 L h s",
            used_by="MosaicML llm-foundry",
            source="mosaicml/llm-foundry, scripts/train/benchmarking; HFU is 4/3 of MFU with full recomputation",
        ),
        FlopConvention(
            name="6n",
            formula="6 N",
            used_by="rule of thumb",
            source="arXiv 2001.08361, section 2.1; 8 N with full recomputation",
        ),
    )
}

_TRAINING_FLOPS_PER_WEIGHT = 6.0  # 2 forward, 4 backward: a multiplication and an addition each
_FORWARD_SHARE = 1.0 / 3.0  # of forward and backward pass together


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over all devices.

    Attributes:
        model_flops: What the convention says that the model needs. [flop]
        hardware_flops: The same with recomputation; None where the convention has no such number. [flop]
    """

    model_flops: float
    hardware_flops: float | None


def count_step_flops(
    config: TransformerConfig, workload: Workload, num_sequences: int, convention: str, *, num_stages: int = 1
) -> StepFlops:
    """Count the FLOPs of a training step by a named convention.

    Args:
        config: The model.
        workload: Training; its seq_len and recompute count, its batch does not.
        num_sequences: Sequences of the step over all replicas.
        convention: One of CONVENTIONS.
        num_stages: Pipeline stages, each of which recomputes as many layers as the workload says, if not all.

    Returns:
        Model and hardware FLOPs of the step.

    Raises:
        WorkloadError: the convention is not known, or the phase is not train.

    >>> from shapewright.config.transformer import TransformerConfig
    >>> from shapewright.workload import Workload
    >>> gpt_22b = TransformerConfig(hidden_size=6144, num_layers=48, num_heads=64, vocab_size=51200)
    >>> f"{count_step_flops(gpt_22b, Workload(seq_len=2048), 4, 'megatron').model_flops:.6e}"
    '1.143561e+15'
    """
    get_convention(convention)
    if not workload.is_training:
        raise WorkloadError(f"FLOP conventions are about training, not phase={workload.phase!r}; use --phase train")
    step = replace(workload, micro_batch_size=1, global_batch_size=num_sequences)
    again = 1.0 if workload.recompute == "full" else 0.0  # forward passes of the layers, once more
    if workload.recompute_layers is not None:
        recomputed = min(workload.recompute_layers * num_stages, config.num_layers)
        step, again = replace(step, recompute_layers=recomputed), recomputed / config.num_layers
    if convention == "megatron":
        return StepFlops(count_model_flops(config, step), count_hardware_flops(config, step))
    if convention == "megatron-causal":
        return _count_causal(config, step, num_sequences, again)
    num_tokens = num_sequences * workload.seq_len
    parameters = count_parameters(config).active
    if convention == "6n":
        without, whole = (
            count_rule_of_thumb_flops(parameters, num_tokens, recompute=mode) for mode in ("none", "full")
        )
        return StepFlops(without, without + again * (whole - without))
    core_flops = 2.0 * _TRAINING_FLOPS_PER_WEIGHT * config.num_layers * config.num_heads * config.head_dim
    model_flops = num_tokens * (_TRAINING_FLOPS_PER_WEIGHT * parameters + core_flops * workload.seq_len)
    if convention == "torchtitan":
        return StepFlops(model_flops, None)
    return StepFlops(model_flops, model_flops * (1.0 + again * _FORWARD_SHARE))


def get_convention(name: str) -> FlopConvention:
    """Look a convention up.

    Raises:
        WorkloadError: no convention has this name.
    """
    if name not in CONVENTIONS:
        hint = close_names(name, CONVENTIONS)
        raise WorkloadError(
            f"unknown FLOP convention {name!r}; {hint + ' ' if hint else ''}choose one of {', '.join(CONVENTIONS)}"
        )
    return CONVENTIONS[name]


def count_rule_of_thumb_flops(num_parameters: float, num_tokens: float, *, recompute: str = "none") -> float:
    """Training FLOPs by parameters alone: 6 N a token, 8 N with full recomputation.

    Args:
        num_parameters: Parameters that a token uses.
        num_tokens: Tokens trained on.
        recompute: One of ``none``, ``selective``, ``full``; selective recomputation repeats attention only, which this
            rule leaves out.

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
    """Duration of a whole training run, 8 T P / (n X) with full recomputation. [s]

    Args:
        num_parameters: P, parameters that a token uses.
        num_tokens: T, tokens trained on.
        num_devices: n.
        flops_per_s_per_device: X, hardware rate achieved by one device. [flop/s]
        recompute: Whether 8 (``full``) or 6 FLOPs a parameter and token are computed.

    Source: arXiv 2104.04473, eq. 4.

    >>> round(estimate_training_s(175e9, 300e9, num_devices=1024, flops_per_s_per_device=140e12) / 86400, 1)
    33.9
    """
    flops = count_rule_of_thumb_flops(num_parameters, num_tokens, recompute=recompute)
    return flops / (num_devices * flops_per_s_per_device)


def _count_causal(config: TransformerConfig, step: Workload, num_sequences: int, again: float) -> StepFlops:
    """The whole square's count, less half of every causal core: three forward passes' worth, and what runs again."""
    one_sequence = replace(step.with_recompute("none"), global_batch_size=1, attention="flash")
    operations = lower(config, one_sequence, ParallelLayout())
    core_flops = num_sequences * sum(
        float(operation.flops) * int(operation.repeats)
        for operation in operations
        if isinstance(operation, Attention) and operation.causal and operation.pass_name == "forward"
    )
    # Selective recomputation counts the core twice, as eq. 9.
    cores = 6.0 if step.recompute == "selective" else 3.0 + again
    return StepFlops(
        count_model_flops(config, step) - 0.5 * 3.0 * core_flops,
        count_hardware_flops(config, step) - 0.5 * cores * core_flops,
    )
