"""Memory under fine-tuning: parameters of adapters, and saved tensors that frozen weights do not need.

A linear layer keeps its input for its weight gradient alone. With W frozen, the input is kept only if an adapter reads
it; inputs of norms, activations and attention are kept as in full training, because gradients pass through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.numeric import ceil_div
from shapewright.memory.saved_tensors import list_layer_tensors
from shapewright.memory.tensors import SavedTensor, activation_element_bytes
from shapewright.workload.finetuning import INPUT_ROLES
from shapewright.workload.linears import Linear, count_adapter, list_linears

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

# Linear layers that read a tensor, by its role; a block's input is read by those of INPUT_ROLES.
_READERS = {
    "input": INPUT_ROLES,
    "down_input": ("down",),
    "q_latent": ("q_b",),
    "kv_latent": ("kv_b",),
    "grouped_output": ("out",),
}
_BLOCKS = ("attention", "cross_attention", "mlp", "moe", "shared_expert")
_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element
_TEMPORARY_WEIGHT_BYTES = 2.0  # weights that are converted or computed for one GEMM have 16 bits


def count_adapters(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    kind: LayerKind,
    *,
    has_cross_attention: bool = False,
) -> tuple[int, int]:
    """Count the adapters' parameters in one layer of one device: those beside routed experts, and those in them.

    >>> from shapewright.models.layers import LayerKind
    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.layout import ParallelLayout
    >>> from shapewright.workload.workload import Workload
    >>> llama = TransformerConfig(hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=11008,
    ...                           vocab_size=32000, gated_mlp=True)
    >>> job = Workload(finetune="lora", lora_rank=8, lora_targets="q_proj,v_proj")
    >>> 32 * sum(count_adapters(llama, job, ParallelLayout(), LayerKind()))
    4194304
    """
    dense = routed = 0
    for linear in _adapted(config, workload, layout, kind, has_cross_attention=has_cross_attention):
        count = count_adapter(linear, workload.adapter_rank, has_magnitude=workload.finetune == "dora")
        routed += count if linear.block == "moe" else 0
        dense += 0 if linear.block == "moe" else count
    return dense, routed


def _adapted(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    kind: LayerKind,
    *,
    has_cross_attention: bool = False,
) -> Iterator[Linear]:
    """Yield the linear layers of one layer that have adapters."""
    linears = list_linears(config, layout, kind, has_cross_attention=has_cross_attention)
    return (linear for linear in linears if workload.adapts(linear.block, linear.role))


def count_stored_weights(
    config: TransformerConfig, layout: ParallelLayout, kind: LayerKind, *, has_cross_attention: bool = False
) -> int:
    """Count the weights of one layer of one device that are stored in fewer bits: those of its linear layers."""
    linears = list_linears(config, layout, kind, has_cross_attention=has_cross_attention)
    return sum(linear.copies * linear.n * linear.k for linear in linears)


def list_kept_tensors(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    kind: LayerKind,
    *,
    has_cross_attention: bool,
) -> tuple[SavedTensor, ...]:
    """List the tensors that one layer saves for the backward pass, with the weights that the workload trains.

    Without frozen weights these are those of list_layer_tensors.

    Args:
        workload: What is run; states which weights are trained.
        kind: Mixer and MLP of the layer.
    """
    tensors = list_layer_tensors(config, workload, layout, kind, has_cross_attention=has_cross_attention)
    if not workload.has_adapters:
        return tensors
    # The input of an expert layer is that of the shared expert; routed experts read copies of their own.
    shared = ("shared_expert",) if config.shared_expert_intermediate_size else ()
    blocks_of_mlp = shared if kind.mlp == "experts" else ("mlp",)
    kept = [tensor for tensor in tensors if _is_needed(tensor, workload, blocks_of_mlp)]
    tokens = workload.micro_batch_size * ceil_div(workload.seq_len, layout.context_parallel)
    for linear in _adapted(config, workload, layout, kind, has_cross_attention=has_cross_attention):
        rows = tokens * config.num_experts_per_token if linear.block == "moe" else tokens
        # The output of the first of the adapter's two GEMMs, the input of the second.
        role, width = f"{linear.role}_adapter", activation_element_bytes(workload.dtype)
        kept.append(SavedTensor(linear.block, role, rows, workload.adapter_rank, width))
        if workload.lora_dropout > 0.0:
            # The dropped copy of the input and the mask.
            kept.append(SavedTensor(linear.block, f"{role}_input", rows, linear.k, width + _MASK_BYTES))
    return tuple(kept)


def _is_needed(tensor: SavedTensor, workload: Workload, blocks_of_mlp: tuple[str, ...]) -> bool:
    """Whether anything but the gradient of a frozen weight reads a saved tensor.

    Args:
        blocks_of_mlp: Blocks whose linear layers read the tensors of the MLP.
    """
    readers = _READERS.get(tensor.role)
    if readers is None or tensor.block not in _BLOCKS:
        return True
    blocks = blocks_of_mlp if tensor.block == "mlp" else (tensor.block,)
    return any(workload.adapts(block, role) for block in blocks for role in readers)


def temporary_weight_bytes(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, kind: LayerKind
) -> float:
    """Size of the 16-bit weights that exist while one GEMM runs: converted weights, and DoRA's B A and sum. [byte]

    Experts are converted one after the other.
    """
    linears = list(list_linears(config, layout, kind))
    largest: float = 0.0
    if workload.weight_dtype is not None and workload.weight_dtype != workload.dtype:
        largest = max((linear.n * linear.k for linear in linears), default=0)
    if workload.finetune == "dora":
        adapted = _adapted(config, workload, layout, kind)
        largest += 2 * max((linear.n * linear.k for linear in adapted), default=0)
    return _TEMPORARY_WEIGHT_BYTES * largest
