"""Sizes of one device in one pass over one stack of layers, after parallel sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass
from shapewright.lowering.counts import num_microbatches
from shapewright.workload.images import count_image_tokens

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Sizes of one device after tensor, context and sequence parallel sharding.

    Attributes:
        config: The model.
        workload: What is run.
        layout: How it is spread.
        node_size: Devices of one node.
        prefix: Prefix of displayed names: ``encoder.`` for the encoder of an encoder-decoder, otherwise empty.
        causal: Whether a token attends only to itself and to tokens before it.
        num_passes: Micro-batches of one step.
        batch_size: Sequences of one pass.
        query_len: New tokens of each sequence on this device.
        kv_len: Keys of each sequence over all devices of the context axis, cached ones included.
        source_len: Encoder or image tokens of each sequence on this device, for cross-attention; 0 without it.
        encodes_source: Whether this pass runs the encoder and projects its output to keys and values (not decode).
        num_heads: Query heads on this device.
        num_kv_heads: Key-value heads on this device; replicated if there are fewer than devices.
        gemm_dtype: Element format of the weight GEMMs.
        dtype: Element format of activations: that of the GEMMs, bf16 where GEMMs run in 8 bits or less.
        width_bytes: Width of one activation. [byte]
    """

    config: TransformerConfig
    workload: Workload
    layout: ParallelLayout
    node_size: int
    prefix: str
    causal: bool
    num_passes: int
    batch_size: int
    query_len: int
    kv_len: int
    source_len: int
    encodes_source: bool
    num_heads: int
    num_kv_heads: int
    gemm_dtype: str
    dtype: str
    width_bytes: float

    @property
    def weight_dtype(self) -> str | None:
        """Element format of stored weights if it differs from that of the GEMMs, else None.

        In training frozen weights are converted by a separate operation (lowering.adapters).
        """
        stored = self.workload.weight_dtype
        return None if stored == self.gemm_dtype or self.workload.is_training else stored

    @property
    def wide_dtype(self) -> str:
        """Element format of the GEMMs that wide_gemm_dtype names."""
        return wide_gemm_dtype(self.gemm_dtype)

    @property
    def splits_keys(self) -> bool:
        """Whether the context axis splits keys instead of queries, because there is only one new token.

        This is the case in decode, and for the decoder's start token in the prefill of an encoder-decoder.
        """
        has_encoder = self.config.stack == "encoder-decoder" and self.causal
        starts_decoder = self.workload.phase == "prefill" and has_encoder
        return self.workload.phase == "decode" or starts_decoder

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass that this device multiplies with its shard of the weights."""
        return self.batch_size * self.query_len

    @property
    def splits_sequence(self) -> bool:
        """Whether norms and residuals process 1/t of the tokens (Megatron's sequence parallelism, training only)."""
        return self.layout.splits_sequence_over_tensor and self.workload.is_training

    @property
    def num_residual_tokens(self) -> int:
        """Tokens of one pass that norms, residuals and hidden dropout process on this device."""
        return self.num_tokens // self.layout.tensor_parallel if self.splits_sequence else self.num_tokens

    @property
    def num_residual_copies(self) -> int:
        """Number of devices of the tensor axis that have the same tokens of the residual stream."""
        return 1 if self.splits_sequence else self.layout.tensor_parallel


def activation_dtype(dtype: str) -> str:
    """Element format of activations between GEMMs of a dtype.

    Recipes for GEMMs in 8 bits or less keep residuals, norms, attention and logits in bf16.

    >>> activation_dtype("fp16"), activation_dtype("fp8"), activation_dtype("tf32")
    ('fp16', 'bf16', 'fp32')
    """
    if dtype == "tf32":
        return "fp32"
    return dtype if get_dtype(dtype).bits >= 16 else "bf16"


def wide_gemm_dtype(dtype: str) -> str:
    """Element format of GEMMs that stay wide where others run in 8 bits or less: logits, router, scores, adapters.

    It is that of activations. PyTorch's switch for tf32 holds for every GEMM of fp32 activations.

    >>> wide_gemm_dtype("fp8"), wide_gemm_dtype("tf32")
    ('bf16', 'tf32')
    """
    return dtype if dtype == "tf32" else activation_dtype(dtype)


def make_shard(config: TransformerConfig, workload: Workload, layout: ParallelLayout, node_size: int) -> Shard:
    """Compute the sizes of the decoder or of the only stack.

    The prefill of an encoder-decoder runs the encoder over the prompt and the decoder over its start token. For that
    token, and for the new token of decode, the context axis splits the keys.
    """
    has_source = config.stack == "encoder-decoder"
    source_len = workload.seq_len if has_source else config.num_caption_tokens
    if config.attends_to_images:
        source_len = count_image_tokens(config, workload)
    is_decode = workload.phase == "decode"
    starts_decoder = has_source and workload.phase == "prefill"
    new_tokens = 1 if is_decode or starts_decoder else workload.seq_len // layout.context_parallel
    dtype = activation_dtype(workload.dtype)
    t = layout.tensor_parallel
    return Shard(
        config=config,
        workload=workload,
        layout=layout,
        node_size=node_size,
        prefix="",
        causal=config.stack != "encoder",
        num_passes=num_microbatches(workload, layout),
        batch_size=workload.micro_batch_size,
        query_len=new_tokens,
        kv_len=workload.context_len + 1 if starts_decoder else workload.kv_len,
        source_len=source_len // layout.context_parallel,
        encodes_source=source_len > 0 and not is_decode,
        num_heads=config.num_heads // t,
        num_kv_heads=-(-config.num_kv_heads // t),
        gemm_dtype=workload.dtype,
        dtype=dtype,
        width_bytes=get_dtype(dtype).num_bytes,
    )


def make_encoder_shard(shard: Shard) -> Shard:
    """Compute the sizes of the encoder of an encoder-decoder from those of its decoder."""
    return replace(
        shard,
        prefix="encoder.",
        causal=False,
        query_len=shard.source_len,
        kv_len=shard.source_len * shard.layout.context_parallel,
        source_len=0,
        encodes_source=False,
    )
