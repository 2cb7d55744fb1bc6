"""What a layer keeps from its forward pass until its backward pass, tensor by tensor.

Legend: b sequences of a micro-batch, s tokens of a sequence on this device, h width of the residual stream, a query
heads, d width of a head, f inner width of the MLP, t tensor parallel degree.

The list is what PyTorch's autograd saves when norms, activations and (with ``attention="flash"``) attention are one
kernel each: every linear layer keeps its input, a norm its input, a product both factors, softmax its output, dropout
a mask of one byte. A tensor that two operations need is kept once. For GPT with dropout this gives Table 2 of
arXiv 2205.05198: s*b*h*(34 + 5*a*s/h) bytes and its rows for parallelism and recomputation.

Two choices of software change it (docs/decisions/0005): ``fused_activation`` makes activation, gate and routing weight
one kernel, which keeps its inputs and none of its factors; ``narrow_inputs`` keeps what a narrow product read as narrow
as it read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.dtypes import get_dtype
from shapewright.recomputation import CORE, MODULES, read_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element
_ROUTER_BYTES = 4.0  # routing probabilities are computed in fp32 by every framework looked at
_NARROWEST_ACTIVATION_BYTES = 2.0  # fp8 and fp4 are formats of GEMM operands; what lies between them stays 16 bits wide

NARROW_PRODUCTS = {"fp8": 1.0 / 32.0, "fp4": 1.0 / 16.0}
"""Formats of products that activations are cast to, with what an element has of its block's scale. [byte] Source: OCP
MX, 8 bits for 32 elements (fp8); NVFP4, 8 bits for 16 (fp4)."""
# Inputs of linear layers that no other operation needs for its gradient. A router reads its layer's input in 16 bits.
_INPUTS_OF_PRODUCTS = ("attention.input", "mlp.input", ".down_input", ".q_latent", ".kv_latent", "expert.input")
# Fused attention needs its output beside the projection that reads it.
_ALSO_IN_FULL = "attention.output"

# Activations whose gradient follows from their output alone, so that their input need not be kept.
_OUTPUT_IS_ENOUGH = ("relu", "sigmoid", "tanh")


class SavedTensor(NamedTuple):
    """One tensor kept for the backward pass, as large as it is on one device.

    Attributes:
        name: Block and role, such as ``attention.queries``.
        rows: Leading dimensions together, usually tokens. [element]
        columns: Last dimension. [element]
        element_bytes: Width of one element. [byte]
    """

    name: str
    rows: int
    columns: int
    element_bytes: float

    @property
    def num_bytes(self) -> float:
        """Storage. [byte]"""
        return self.element_bytes * self.rows * self.columns


def activation_element_bytes(dtype: str) -> float:
    """Width of an activation between GEMMs of an element format. [byte]

    >>> activation_element_bytes("fp8"), activation_element_bytes("tf32")
    (2.0, 4.0)
    """
    return max(_NARROWEST_ACTIVATION_BYTES, get_dtype(dtype).num_bytes)


def list_saved_tensors(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    has_experts: bool = False,
    has_cross_attention: bool = False,
) -> tuple[SavedTensor, ...]:
    """List what one layer keeps of one micro-batch on one device, without any recomputation.

    Args:
        config: The model.
        workload: Batch, length, dtype and kind of attention.
        layout: Degrees of parallelism.
        has_experts: Whether this is a mixture-of-experts layer.
        has_cross_attention: Whether this is a decoder layer of an encoder-decoder.

    Assumes: Tokens are spread evenly over experts and over context-parallel ranks. Numbers that a row has one of
        (norm statistics, the log-sum-exp of flash attention) are left out: less than 0.2 % at usual widths.

    Source: arXiv 2205.05198, section 4, for the GPT layer; the rest by the same rule.
    """
    shape = _LayerShape(config, workload, layout)
    tensors = list(_residual_tensors(shape))
    tensors += _attention_tensors(shape, "attention")
    if has_cross_attention:
        tensors += [shape.residual("cross_attention.norm_input"), shape.residual("cross_attention.input")]
        tensors += _attention_tensors(shape, "cross_attention")
    if has_experts:
        tensors += _expert_tensors(shape)
        if config.shared_expert_intermediate_size:
            tensors += _mlp_tensors(shape, "shared_expert", shape.tokens, config.shared_expert_intermediate_size)
        if config.shared_expert_gate:
            tensors.append(shape.residual("shared_expert.output"))
    else:
        tensors += _mlp_tensors(shape, "mlp", shape.tokens, config.intermediate_size)
    if shape.hidden_dropout:
        tensors.append(shape.residual("mlp.output_dropout_mask", _MASK_BYTES))
    if workload.narrow_inputs:
        tensors = [_narrow(tensor, workload.dtype, has_experts=has_experts) for tensor in tensors]
    return tuple(tensors)


def _narrow(tensor: SavedTensor, dtype: str, *, has_experts: bool) -> SavedTensor:
    """A tensor as products that read it in a narrow format keep it; others are what they were.

    Source: NVIDIA/TransformerEngine, pytorch/module/linear.py and layernorm_mlp.py: what is saved for the backward pass
        is the quantized input.
    """
    if dtype not in NARROW_PRODUCTS or (has_experts and tensor.name == "mlp.input"):
        return tensor
    narrow_bytes = get_dtype(dtype).num_bytes + NARROW_PRODUCTS[dtype]
    if tensor.name.endswith(_ALSO_IN_FULL):
        return tensor._replace(element_bytes=tensor.element_bytes + narrow_bytes)
    return tensor._replace(element_bytes=narrow_bytes) if tensor.name.endswith(_INPUTS_OF_PRODUCTS) else tensor


def keep_tensors(tensors: tuple[SavedTensor, ...], recompute: str, modules: str = CORE) -> tuple[SavedTensor, ...]:
    """Choose what stays under a recomputation mode: all, all but some parts' own, or the layer's input alone.

    Args:
        tensors: What a layer keeps without.
        recompute: The mode.
        modules: Parts that the selective one takes.
    """
    if recompute == "full":
        return tuple(tensor for tensor in tensors if tensor.name == LAYER_INPUT)
    if recompute == "selective":
        taken = [MODULES[name] for name in read_modules(modules)]
        return tuple(tensor for tensor in tensors if not any(module.drops(tensor.name) for module in taken))
    return tensors


LAYER_INPUT = "layer.input"


class _LayerShape:
    """Dimensions of one layer on one device."""

    def __init__(self, config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
        self.config = config
        self.workload = workload
        self.degree = layout.tensor_parallel
        self.expert_degree = layout.tensor_degree_of_experts
        self.element_bytes = activation_element_bytes(workload.dtype)
        # In decode the context axis splits the cache and not the one new token.
        context = 1 if workload.phase == "decode" else layout.context_parallel
        self.tokens = workload.micro_batch_size * ceil_div(workload.query_len, context)
        # Sequence parallelism keeps 1/t of the tokens of every tensor that is not already split by width, and
        # gathers the inputs of linear layers again in the backward pass.
        self.token_degree = self.degree if layout.sequence_parallel and workload.is_training else 1
        self.num_heads = ceil_div(config.num_heads, self.degree)
        self.num_kv_heads = ceil_div(config.num_kv_heads, self.degree)
        self.head_dim = config.head_dim
        self.v_head_dim = config.v_head_dim
        self.fuses_activation = workload.fused_activation and workload.is_training and config.gated_mlp
        self.hidden_dropout = workload.is_training and config.hidden_dropout > 0
        self.attention_dropout = workload.is_training and config.attention_dropout > 0

    def residual(self, name: str, element_bytes: float | None = None, columns: int | None = None) -> SavedTensor:
        """A tensor as wide as the residual stream: whole on every tensor-parallel rank, or split by tokens."""
        rows = ceil_div(self.tokens, self.token_degree)
        return SavedTensor(
            name=name,
            rows=rows,
            columns=self.config.hidden_size if columns is None else columns,
            element_bytes=self.element_bytes if element_bytes is None else element_bytes,
        )

    def inner(self, name: str, columns: int, rows: int | None = None) -> SavedTensor:
        """A tensor inside a block, whose columns are already this rank's share."""
        return SavedTensor(
            name=name, rows=self.tokens if rows is None else rows, columns=columns, element_bytes=self.element_bytes
        )


def _residual_tensors(shape: _LayerShape) -> Iterator[SavedTensor]:
    """Inputs of norms and of the first linear layers of attention and MLP.

    Where a norm stands (before its block, after it, or after the sum) does not change how many tensors there are.
    """
    num_norms = shape.config.num_norms_per_layer
    yield shape.residual(LAYER_INPUT)
    if shape.config.parallel_attention_mlp:
        # Every norm reads the layer's input; attention and MLP read the norms' outputs.
        for index in range(num_norms):
            yield shape.residual(f"norm_{index}.output")
        return
    yield shape.residual("mlp.input")
    for index in range(num_norms):
        # The first norm's input is the layer's; what it puts out is the input of attention.
        yield shape.residual("attention.input" if index == 0 else f"norm_{index}.input")


def _attention_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    config = shape.config
    query_columns = shape.num_heads * shape.head_dim
    is_unfused = shape.workload.attention == "unfused"
    yield shape.inner(f"{block}.queries", query_columns)
    # Two batched GEMMs need keys and values repeated for every query head; fused kernels read the shared ones.
    kv_heads = shape.num_heads if is_unfused else shape.num_kv_heads
    yield shape.inner(f"{block}.keys", kv_heads * shape.head_dim)
    if config.is_mla:
        yield from _latent_tensors(shape, block)
    values_columns = kv_heads * shape.v_head_dim
    if not is_unfused:
        values_columns += _columns_beside_values(shape)
    yield shape.inner(f"{block}.values", values_columns)
    if config.qk_norm != "none":
        yield shape.inner(f"{block}.queries_before_norm", query_columns)
        yield shape.inner(f"{block}.keys_before_norm", shape.num_kv_heads * shape.head_dim)
    if is_unfused:
        yield from _score_tensors(shape, block)
    yield shape.inner(f"{block}.output", shape.num_heads * shape.v_head_dim)
    if shape.hidden_dropout:
        yield shape.residual(f"{block}.output_dropout_mask", _MASK_BYTES)


def _columns_beside_values(shape: _LayerShape) -> int:
    """Columns that stay alive because values are a slice of a wider GEMM output, beside rotated copies of the rest.

    Flash attention reads the slice in place; batched GEMMs copy it first.
    """
    config = shape.config
    if config.is_mla:
        return shape.num_heads * (shape.head_dim - config.qk_rope_head_dim)
    makes_copies = config.position_embedding == "rotary" and config.qk_norm == "none"
    if config.fused_qkv and makes_copies:
        return (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return 0


def _latent_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    """Multi-head latent attention: compressed queries and keys before and after their norms, whole on every rank."""
    config = shape.config
    if config.q_lora_rank:
        yield shape.residual(f"{block}.q_latent_before_norm", columns=config.q_lora_rank)
        yield shape.residual(f"{block}.q_latent", columns=config.q_lora_rank)
    latent_columns = config.kv_lora_rank + config.qk_rope_head_dim
    yield shape.residual(f"{block}.kv_latent_before_norm", columns=latent_columns)
    yield shape.residual(f"{block}.kv_latent", columns=config.kv_lora_rank)


def _score_tensors(shape: _LayerShape, block: str) -> Iterator[SavedTensor]:
    """The s x s tensors of unfused attention; keys of all context-parallel ranks are seen."""
    rows = shape.tokens * shape.num_heads
    columns = shape.workload.kv_len
    yield shape.inner(f"{block}.weights", columns, rows)
    if shape.attention_dropout:
        yield SavedTensor(name=f"{block}.dropout_mask", rows=rows, columns=columns, element_bytes=_MASK_BYTES)
        yield shape.inner(f"{block}.dropped_weights", columns, rows)


def _mlp_tensors(
    shape: _LayerShape, block: str, rows: int, intermediate_size: int, degree: int | None = None
) -> Iterator[SavedTensor]:
    config = shape.config
    columns = ceil_div(intermediate_size, shape.degree if degree is None else degree)
    if config.activation not in _OUTPUT_IS_ENOUGH:
        yield shape.inner(f"{block}.activation_input", columns, rows)
    if config.gated_mlp:
        # The product keeps both of its factors; one kernel computes the activation again from its input.
        if not shape.fuses_activation:
            yield shape.inner(f"{block}.activation_output", columns, rows)
        yield shape.inner(f"{block}.up_output", columns, rows)
    yield shape.inner(f"{block}.down_input", columns, rows)


def _expert_tensors(shape: _LayerShape) -> Iterator[SavedTensor]:
    """Routed experts: each token's copies in, inner tensors, and outputs where they are weighted afterwards.

    Expert parallelism exchanges tokens for tokens: as many come as go when the load is even. A fused activation
    weights what it puts out (Megatron-LM's weighted SwiGLU), so that outputs are only added up.
    """
    config = shape.config
    # Devices of the tensor axis compute all rows of their tokens, each with its share of the columns; where experts are
    # cut into fewer pieces, each as many fewer rows.
    copies = ceil_div(shape.tokens * config.num_experts_per_token * shape.expert_degree, shape.degree)
    yield shape.residual("router.probabilities", _ROUTER_BYTES, config.num_experts)
    own_copies = ceil_div(shape.tokens * config.num_experts_per_token, shape.token_degree)
    # Devices that share an expert gather its rows before the product, which keeps what it read (Megatron-LM's
    # dispatcher); they are not gathered again.
    yield shape.inner("expert.input", config.hidden_size, copies)
    yield from _mlp_tensors(shape, "expert", copies, config.moe_intermediate_size, shape.expert_degree)
    if config.expert_clamp and shape.workload.is_training and not shape.workload.fused_experts:
        # The clamp keeps its input, and the activation what was clamped.
        columns = ceil_div(config.moe_intermediate_size, shape.expert_degree)
        yield shape.inner("expert.clamped", columns * (2 if config.gated_mlp else 1), copies)
    if not shape.fuses_activation:
        yield shape.inner("expert.output", config.hidden_size, own_copies)


def ceil_div(amount: int, parts: int) -> int:
    """Share of the rank that has most when an amount is split.

    >>> ceil_div(7, 2)
    4
    """
    return -(-amount // parts)


def sum_bytes(tensors: Iterable[SavedTensor]) -> float:
    """Storage of several tensors. [byte]"""
    return sum(tensor.num_bytes for tensor in tensors)
