"""Tensors that one layer saves in its forward pass for its backward pass.

Legend: b sequences of a micro-batch, s tokens of a sequence on this device, h width of the residual stream, a query
heads, d width of a head, f inner width of the MLP, t tensor parallel degree.

The list is what PyTorch's autograd saves when norms, activations and (with ``attention="flash"``) attention are one
kernel each: a linear layer keeps its input, a norm its input, an elementwise multiplication both factors, softmax its
output, dropout a mask of one byte per element. A tensor that two operations need is kept once. For GPT with dropout
this gives Table 2 of arXiv 2205.05198: s*b*h*(34 + 5*a*s/h) bytes, and its rows for parallelism and recomputation.

Three fields of the workload change it (docs/decisions/0005): with ``fused_activation`` one kernel computes activation,
gate and routing weight and keeps only its inputs; with ``narrow_inputs`` GEMMs in fp8 or fp4 keep their quantized
inputs; with ``kernels="torch"`` norms and activations are chains of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import ceil_div
from shapewright.memory.tensors import LAYER, SavedTensor, activation_element_bytes
from shapewright.models.compressed_attention import count_entries, make_compressed
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, CROSS_ATTENTION, WITH_SOFTMAX, mixers_of
from shapewright.models.mixers import make_mixer
from shapewright.workload.images import count_image_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_FP32_BYTES = 4.0
_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element
_ROUTER_BYTES = 4.0  # Megatron-LM, DeepSpeed and transformers compute routing probabilities in fp32

SCALE_BYTES_PER_ELEMENT = {"fp8": 1.0 / 32.0, "fp4": 1.0 / 16.0}
"""Block-scale storage per element of the formats that GEMM inputs are quantized to. [byte]

Source: OCP MX, an 8-bit scale for 32 elements (fp8); NVFP4, an 8-bit scale for 16 elements (fp4)."""

# Tensors that only a GEMM reads in the backward pass: the inputs of these blocks, and these tensors inside any block.
_GEMM_INPUT_BLOCKS = ("attention", "cross_attention", "mlp", "moe")
_GEMM_INPUT_ROLES = ("down_input", "q_latent", "kv_latent", "grouped_output")

# Activations whose gradient follows from their output, so that their input is not kept.
_GRADIENT_FROM_OUTPUT = ("relu", "sigmoid", "tanh")


def list_saved_tensors(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    has_experts: bool = False,
    has_cross_attention: bool = False,
    layer_type: str = ATTENTION,
    has_mlp: bool = True,
) -> tuple[SavedTensor, ...]:
    """List the tensors that one layer saves for one micro-batch on one device without recomputation.

    Args:
        workload: Batch, length, dtype and kind of attention.
        has_experts: Whether this is a mixture-of-experts layer.
        has_cross_attention: Whether this is a decoder layer of an encoder-decoder.
        layer_type: One of LAYER_TYPES.
        has_mlp: Whether it has an MLP, dense or of experts.

    Assumes: Tokens are spread evenly over experts and over context-parallel ranks. Per-row scalars (norm statistics,
        the log-sum-exp of flash attention) are left out: less than 0.2 % at usual widths.

    Source: arXiv 2205.05198, section 4, for the GPT layer; other layers by the same rule.
    """
    shape = _LayerShape(config, workload, layout)
    mixers = mixers_of(layer_type)
    tensors = list(_residual_tensors(shape, has_both=bool(mixers) and has_mlp))
    if ATTENTION in mixers:
        tensors += _attention_tensors(shape, "attention")
    if layer_type in COMPRESSED_LAYERS:
        tensors += _compressed_tensors(shape, layer_type)
    for mixer in mixers:
        tensors += _linear_tensors(shape, mixer) if mixer not in WITH_SOFTMAX else ()
    if layer_type == CROSS_ATTENTION:
        images = count_image_tokens(config, workload)
        if not images:  # the layer is skipped
            return (shape.residual(LAYER, "input")._replace(rows=0),)
        tensors += _image_attention_tensors(shape, images)
    if has_cross_attention:
        tensors += [shape.residual("cross_attention", "norm_input"), shape.residual("cross_attention", "input")]
        tensors += _attention_tensors(shape, "cross_attention")
    if has_experts:
        tensors += _expert_tensors(shape)
        if config.shared_expert_intermediate_size:
            tensors += _mlp_tensors(shape, "shared_expert", shape.tokens, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            tensors.append(shape.residual("shared_expert", "output"))
    elif has_mlp:
        tensors += _mlp_tensors(shape, "mlp", shape.tokens, config.intermediate_size)
    if config.patches is not None:
        tensors += (
            shape.residual(f"scaled_{index}", "input") for index in range(config.patches.num_scalings_per_layer)
        )
    if shape.hidden_dropout and has_mlp:
        tensors.append(shape.residual("mlp", "output_dropout_mask", _MASK_BYTES))
    if workload.narrow_inputs:
        tensors = [_narrow(tensor, workload.dtype, has_experts=has_experts) for tensor in tensors]
    return tuple(tensors)


def list_layer_tensors(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, kind: LayerKind, *, has_cross_attention: bool
) -> tuple[SavedTensor, ...]:
    """List the tensors that one layer of a kind saves, as list_saved_tensors does."""
    return list_saved_tensors(
        config,
        workload,
        layout,
        has_experts=kind.mlp == "experts",
        has_cross_attention=has_cross_attention,
        layer_type=kind.layer_type,
        has_mlp=kind.mlp != "none",
    )


def _narrow(tensor: SavedTensor, dtype: str, *, has_experts: bool) -> SavedTensor:
    """Return the quantized form of a tensor that only GEMMs read; other tensors are returned unchanged.

    Source: NVIDIA/TransformerEngine, pytorch/module/linear.py and layernorm_mlp.py save the quantized input for the
        backward pass.
    """
    block, role = tensor.block, tensor.role
    # A router reads the input of the block in 16 bits.
    if dtype not in SCALE_BYTES_PER_ELEMENT or (has_experts and (block, role) == ("mlp", "input")):
        return tensor
    narrow_bytes = get_dtype(dtype).num_bytes + SCALE_BYTES_PER_ELEMENT[dtype]
    if role == "output" and block in ("attention", "cross_attention"):
        # The backward pass of fused attention reads its output in 16 bits, that of the projection a quantized copy.
        return tensor._replace(element_bytes=tensor.element_bytes + narrow_bytes)
    is_gemm_input = role in _GEMM_INPUT_ROLES or (role == "input" and block in _GEMM_INPUT_BLOCKS)
    return tensor._replace(element_bytes=narrow_bytes) if is_gemm_input else tensor


def fuses_activation(config: TransformerConfig, workload: Workload) -> bool:
    """Whether a fused kernel computes the activation again from its input, and applies routing weights with it."""
    return workload.fused_activation and workload.kernels != "torch" and workload.is_training and config.gated_mlp


class _LayerShape:
    """Dimensions of one layer on one device, and builders of tensors of those dimensions."""

    def __init__(self, config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
        self.config = config
        self.workload = workload
        self.degree = layout.tensor_parallel
        self.expert_degree = layout.expert_tensor_degree
        self.element_bytes = activation_element_bytes(workload.dtype)
        # In decode the context axis splits the cache; each rank has the one new token.
        context = 1 if workload.phase == "decode" else layout.context_parallel
        self.tokens = workload.micro_batch_size * ceil_div(workload.query_len, context)
        # Sequence parallelism saves 1/t of the tokens of every tensor that is not already split by width, and gathers
        # the inputs of linear layers again in the backward pass.
        self.token_degree = self.degree if layout.sequence_parallel and workload.is_training else 1
        self.num_heads = ceil_div(config.num_heads, self.degree)
        self.num_kv_heads = ceil_div(config.num_kv_heads, self.degree)
        self.head_dim = config.head_dim
        self.v_head_dim = config.v_head_dim
        self.fuses_activation = fuses_activation(config, workload)
        # A chain of PyTorch keeps its input in fp32, and the normalized rows instead of the input in its own format.
        self.copies_norm_inputs = (
            workload.kernels == "torch" and config.norm == "rmsnorm" and self.element_bytes < _FP32_BYTES
        )
        self.exchanges_rows = layout.exchanges_expert_rows(is_training=workload.is_training)
        # In inference the tensor axis replicates tokens, and each of its devices sends a share of their rows.
        sends_share = layout.has_own_expert_degree and not workload.is_training
        self.sending_degree = self.degree if sends_share else self.token_degree
        self.hidden_dropout = workload.is_training and config.hidden_dropout > 0
        self.attention_dropout = workload.is_training and config.attention_dropout > 0

    def residual(
        self, block: str, role: str, element_bytes: float | None = None, columns: int | None = None
    ) -> SavedTensor:
        """Make a tensor as wide as the residual stream, which sequence parallelism splits by tokens."""
        rows = ceil_div(self.tokens, self.token_degree)
        return SavedTensor(
            block=block,
            role=role,
            rows=rows,
            columns=self.config.hidden_size if columns is None else columns,
            element_bytes=self.element_bytes if element_bytes is None else element_bytes,
        )

    def inner(self, block: str, role: str, columns: int, rows: int | None = None) -> SavedTensor:
        """Make a tensor inside a block, with the columns of this tensor-parallel rank."""
        return SavedTensor(
            block=block,
            role=role,
            rows=self.tokens if rows is None else rows,
            columns=columns,
            element_bytes=self.element_bytes,
        )


def _residual_tensors(shape: _LayerShape, *, has_both: bool) -> Iterator[SavedTensor]:
    """Yield the inputs of the norms and of the first linear layers of mixer and MLP, or of the one that there is.

    The position of a norm (before its block, after it, or after the residual sum) does not change their number.
    """
    num_norms = shape.config.num_norms_per_layer
    if shape.config.residual_streams > 1:
        yield from _stream_tensors(shape)
    else:
        yield shape.residual(LAYER, "input")
    if shape.copies_norm_inputs:
        for index in range(num_norms):
            yield shape.residual(f"norm_{index}", "fp32_input", _FP32_BYTES)
    if shape.config.parallel_attention_mlp:
        # Every norm reads the layer's input; attention and MLP read the norms' outputs.
        for index in range(num_norms):
            yield shape.residual(f"norm_{index}", "output")
        return
    if has_both:
        yield shape.residual("mlp", "input")
    for index in range(num_norms):
        # The first norm's input is the layer's input; its output is the input of attention.
        yield shape.residual("attention" if index == 0 else f"norm_{index}", "input")


def _stream_tensors(shape: _LayerShape) -> Iterator[SavedTensor]:
    """Yield the streams before each block of a layer, and the input and output of the block that are one of them.

    PyTorch also keeps the streams in fp32, and normalized, for the projection to their weights.
    """
    columns = shape.config.residual_streams * shape.config.hidden_size
    yield shape.residual(LAYER, "input", columns=columns)
    yield shape.residual("streams", "middle", columns=columns)
    for block in ("mixer", "mlp"):
        yield shape.residual("streams", f"{block}_input")
        yield shape.residual("streams", f"{block}_output")
        if shape.workload.kernels == "torch":
            yield shape.residual("streams", f"{block}_fp32", _FP32_BYTES, columns)
            yield shape.residual("streams", f"{block}_normed", _FP32_BYTES, columns)


def _image_attention_tensors(shape: _LayerShape, num_image_tokens: int) -> Iterator[SavedTensor]:
    """Yield the tensors of cross-attention to images, before and after the norms of heads; decode reads its cache."""
    block, is_unfused = "cross_attention", shape.workload.attention == "unfused"
    rows = shape.workload.micro_batch_size * num_image_tokens
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield shape.inner(block, "queries", queries)
    yield shape.inner(block, "queries_before_norm", queries)
    if shape.workload.phase != "decode":
        yield shape.inner(block, "keys_before_norm", keys, rows)
        width = shape.num_heads * shape.head_dim if is_unfused else keys
        yield shape.inner(block, "keys", width, rows)
        yield shape.inner(block, "values", width, rows)
    if is_unfused:
        yield shape.inner(block, "weights", num_image_tokens, shape.tokens * shape.num_heads)
    yield shape.inner(block, "output", shape.num_heads * shape.v_head_dim)
    # The outputs of both blocks, which gates multiply.
    yield shape.residual(block, "gated_attention")
    yield shape.residual(block, "gated_mlp")


def _compressed_tensors(shape: _LayerShape, kind: str) -> Iterator[SavedTensor]:
    """Yield the tensors of compressed attention after its input; the indexer, which has no gradient, keeps none."""
    config, block = shape.config, "attention"
    layer = make_compressed(config, kind, shape.degree)
    heads_width, is_unfused = shape.num_heads * shape.head_dim, shape.workload.attention == "unfused"
    yield shape.residual(block, "q_latent_before_norm", columns=config.q_lora_rank)
    yield shape.residual(block, "q_latent", columns=config.q_lora_rank)
    yield shape.inner(block, "queries", heads_width)
    yield shape.inner(block, "queries_before_norm", heads_width)
    yield shape.inner(block, "keys_before_norm", shape.head_dim)
    if layer.compressor is not None:
        # Values and gates, which become weights, of each token.
        yield shape.inner(block, "compressed", 2 * layer.compressor.width)
    if is_unfused:
        # The one key is repeated for every head, twice: as key and as value.
        keys = shape.workload.kv_len + count_entries(layer.compressor, shape.workload.kv_len)
        yield shape.inner(block, "keys", 2 * heads_width, shape.workload.micro_batch_size * keys)
        yield shape.inner(block, "weights", keys, shape.tokens * shape.num_heads)
    else:
        yield shape.inner(block, "keys", shape.head_dim, shape.tokens + count_entries(layer.compressor, shape.tokens))
    yield shape.inner(block, "output", heads_width)
    yield shape.inner(block, "turned_output", heads_width)
    yield shape.inner(block, "grouped_output", layer.num_groups * layer.group_rank)
    if shape.hidden_dropout:
        yield shape.residual(block, "output_dropout_mask", _MASK_BYTES)


def _linear_tensors(shape: _LayerShape, kind: str) -> Iterator[SavedTensor]:
    """Yield the tensors of linear attention, a state space or a short convolution after its input.

    The outputs of its projections, of its convolution and of its scan; the scan computes its states again.
    """
    mixer = make_mixer(shape.config, kind, shape.degree)
    for each in (*mixer.inputs, *mixer.inner):
        yield shape.inner(kind, f"{each.role}_output", each.outputs)
    if mixer.conv_channels:
        yield shape.inner(kind, "convolution_output", mixer.conv_channels)
    if kind == "short_convolution":
        yield shape.inner(kind, "gated_input", mixer.conv_channels)
    if mixer.num_v_heads:
        yield shape.inner(kind, "scan_output", mixer.num_v_heads * mixer.v_head_dim)
    if mixer.norm_width or kind == "short_convolution":
        yield shape.inner(kind, "output", mixer.out.inputs)


def _attention_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    """Yield the tensors of an attention block after its input."""
    config = shape.config
    query_columns = shape.num_heads * shape.head_dim
    is_unfused = shape.workload.attention == "unfused"
    yield shape.inner(block, "queries", query_columns)
    # Unfused attention repeats keys and values for every query head; fused kernels read the shared ones.
    kv_heads = shape.num_heads if is_unfused else shape.num_kv_heads
    yield shape.inner(block, "keys", kv_heads * shape.head_dim)
    if config.is_mla:
        yield from _latent_tensors(shape, block)
    values_columns = kv_heads * shape.v_head_dim
    if not is_unfused:
        values_columns += _columns_kept_with_values(shape)
    yield shape.inner(block, "values", values_columns)
    if config.qk_norm != "none":
        yield shape.inner(block, "queries_before_norm", query_columns)
        yield shape.inner(block, "keys_before_norm", shape.num_kv_heads * shape.head_dim)
    if is_unfused:
        yield from _score_tensors(shape, block)
    yield shape.inner(block, "output", shape.num_heads * shape.v_head_dim)
    if config.attention_output_gate and block == "attention":
        yield shape.inner(block, "gate", query_columns)
        yield shape.inner(block, "gated_output", shape.num_heads * shape.v_head_dim)
    if shape.hidden_dropout:
        yield shape.residual(block, "output_dropout_mask", _MASK_BYTES)


def _columns_kept_with_values(shape: _LayerShape) -> int:
    """Columns kept alive because values are a view of a wider GEMM output whose other columns were copied by rotary.

    Flash attention reads the view; batched GEMMs copy it first.
    """
    config = shape.config
    if config.is_mla:
        return shape.num_heads * (shape.head_dim - config.qk_rope_head_dim)
    makes_copies = config.position_embedding == "rotary" and config.qk_norm == "none"
    if config.fused_qkv and makes_copies:
        return (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 0


def _latent_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    """Yield MLA's compressed queries and keys before and after their norms, complete on every rank."""
    config = shape.config
    if config.q_lora_rank:
        yield shape.residual(block, "q_latent_before_norm", columns=config.q_lora_rank)
        yield shape.residual(block, "q_latent", columns=config.q_lora_rank)
    latent_columns = config.kv_lora_rank + config.qk_rope_head_dim
    yield shape.residual(block, "kv_latent_before_norm", columns=latent_columns)
    yield shape.residual(block, "kv_latent", columns=config.kv_lora_rank)


def _score_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    """Yield the s x s tensors of unfused attention over the keys of all context-parallel ranks."""
    rows = shape.tokens * shape.num_heads
    columns = shape.workload.kv_len
    yield shape.inner(block, "weights", columns, rows)
    if shape.attention_dropout:
        yield SavedTensor(block, "dropout_mask", rows=rows, columns=columns, element_bytes=_MASK_BYTES)
        yield shape.inner(block, "dropped_weights", columns, rows)


def _mlp_tensors(
    shape: _LayerShape, block: str, rows: int, intermediate_size: int, degree: int | None = None
) -> Iterator[SavedTensor]:
    """Yield the tensors inside an MLP, whose matrices are split over ``degree`` devices (default: the tensor axis)."""
    config = shape.config
    columns = ceil_div(intermediate_size, shape.degree if degree is None else degree)
    if config.activation not in _GRADIENT_FROM_OUTPUT:
        yield shape.inner(block, "activation_input", columns, rows)
    if config.gated_mlp:
        # Multiplying by the gate keeps both factors; a fused kernel computes the activation again from its input.
        if not shape.fuses_activation:
            yield shape.inner(block, "activation_output", columns, rows)
        yield shape.inner(block, "up_output", columns, rows)
    yield shape.inner(block, "down_input", columns, rows)


def _expert_tensors(shape: _LayerShape) -> Iterator[SavedTensor]:
    """Yield the tensors of routed experts: inputs of each routed copy of a token, inner tensors, and outputs.

    With balanced routing a rank receives as many rows as it sends. A fused activation applies the routing weights
    (Megatron-LM's weighted SwiGLU), so that outputs are only summed and need not be kept.
    """
    config = shape.config
    # Each device of the tensor axis computes all rows of their tokens with its share of the columns; if experts are
    # split over fewer devices, each computes proportionally fewer rows.
    copies = ceil_div(shape.tokens * config.num_experts_per_token * shape.expert_degree, shape.degree)
    yield shape.residual("router", "probabilities", _ROUTER_BYTES, config.num_experts)
    # Devices that share an expert gather its rows before the GEMM and keep the gathered rows (Megatron-LM's
    # dispatcher), so that the backward pass does not gather them again.
    yield shape.inner("moe", "input", config.hidden_size, copies)
    yield from _mlp_tensors(shape, "moe", copies, config.moe_intermediate_size, shape.expert_degree)
    if config.expert_clamp and shape.workload.is_training and not shape.workload.fused_experts:
        # The clamp keeps its input, the activation its clamped input.
        columns = ceil_div(config.moe_intermediate_size, shape.expert_degree)
        yield shape.inner("moe", "clamped", columns * (2 if config.gated_mlp else 1), copies)
    if not shape.fuses_activation:
        # Rows come back from an exchange; without one, each device has a part of the sum of every row.
        own_copies = ceil_div(shape.tokens * config.num_experts_per_token, shape.sending_degree)
        yield shape.inner("moe", "output", config.hidden_size, own_copies if shape.exchanges_rows else copies)
