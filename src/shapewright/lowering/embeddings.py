"""The ends of the model: token embedding on the first stage, final norm, logits and loss on the last.

Legend: T tokens of this device, h hidden size, v vocabulary rows of this device (rounded up, as Megatron-LM pads it).

Embedding and logits are split over the vocabulary. Source: arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype
from shapewright.lowering.attention import weight_gemm
from shapewright.lowering.backward import gemm_gradients, lower_backward
from shapewright.lowering.communication import collective, gather_tokens, reduce_tokens
from shapewright.lowering.pointwise import dropout, norm, pointwise
from shapewright.operations import Collective, Gemm, Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation

_FP32_BYTES = get_dtype("fp32").num_bytes

# Vocabulary-parallel cross-entropy reduces the row maximum, the target's logit and the sum of exponentials.
_LOSS_REDUCTIONS = 3


def vocab_rows(shard: Shard) -> int:
    """Rows of the embedding and of the logit matrix on this device: ceil(v / t)."""
    return -(-shard.config.vocab_size // shard.layout.tensor_parallel)


def lower_embedding(shard: Shard) -> list[Operation]:
    """Gather of token rows, learned positions, dropout; the tensor axis adds its partial results."""
    config, repeats = shard.config, shard.num_passes
    elements = 1.0 * shard.num_tokens * config.hidden_size
    operations: list[Operation] = [
        pointwise(shard, "embedding", "embedding", repeats, read=elements, written=elements, stage="first")
    ]
    operations += reduce_tokens(shard, "embedding", repeats, tokens=shard.num_tokens, stage="first")
    kept = 1.0 * shard.num_residual_tokens * config.hidden_size
    if config.position_embedding == "learned":
        positions = 1.0 * shard.query_len * config.hidden_size
        operations.append(
            pointwise(
                shard,
                "embedding.positions",
                "embedding",
                repeats,
                read=kept + positions,
                written=kept,
                stage="first",
            )
        )
    if shard.workload.is_training and config.hidden_dropout > 0.0:
        operations.append(dropout(shard, "embedding.dropout", repeats, elements=kept, stage="first"))
    return operations


def lower_embedding_backward(shard: Shard) -> list[Operation]:
    """Scatter of gradients into a dense, zeroed gradient of the whole matrix; token ids have no gradient."""
    config, repeats = shard.config, shard.num_passes
    elements = 1.0 * shard.num_tokens * config.hidden_size
    gradient = 1.0 * vocab_rows(shard) * config.hidden_size
    operations: list[Operation] = []
    if config.hidden_dropout > 0.0:
        kept = 1.0 * shard.num_residual_tokens * config.hidden_size
        operations += lower_backward([dropout(shard, "embedding.dropout", repeats, elements=kept, stage="first")])
    gathered = gather_tokens(shard, "embedding.backward", repeats, tokens=shard.num_tokens, stage="first")
    operations += [replace(operation, pass_name="backward") for operation in gathered]
    scatter = pointwise(
        shard,
        "embedding.backward",
        "embedding",
        repeats,
        read=2.0 * elements,
        written=elements + gradient,
        num_kernels=2,
        stage="first",
    )
    operations.append(replace(scatter, pass_name="backward"))
    return operations


def lower_head(shard: Shard) -> list[Operation]:
    """Final norm, logits (T x h)(h x v), and the loss in training; prefill and decode need each last token's logits."""
    config, workload, repeats = shard.config, shard.workload, shard.num_passes
    operations = _lower_final_norm(shard)
    if workload.is_training:
        operations += gather_tokens(shard, "logits", repeats, tokens=shard.num_tokens, stage="last")
        operations.append(_logits(shard, shard.num_tokens))
        operations.append(_cross_entropy(shard))
        loss_bytes = 1.0 * shard.num_tokens * _FP32_BYTES
        operations += collective(
            shard,
            "cross_entropy.all_reduce",
            "all_reduce",
            "tensor",
            repeats * _LOSS_REDUCTIONS,
            message_bytes=loss_bytes,
            stage="last",
        )
        return operations
    # An encoder has no last token: every position has its answer.
    rows = shard.num_tokens if config.stack == "encoder" else shard.batch_size
    operations.append(_logits(shard, rows))
    logit_bytes = 1.0 * rows * vocab_rows(shard) * shard.layout.tensor_parallel * shard.width_bytes
    operations += collective(
        shard,
        "logits.all_gather",
        "all_gather",
        "tensor",
        repeats,
        message_bytes=logit_bytes,
        stage="last",
    )
    return operations


def lower_head_backward(shard: Shard) -> list[Operation]:
    """Gradients of loss, logits and final norm; the gradient towards the tokens is summed over the tensor axis."""
    repeats, tokens = shard.num_passes, shard.num_tokens
    loss, (dgrad, wgrad) = _cross_entropy(shard), gemm_gradients(_logits(shard, tokens))
    # Scatter of the target's gradient, gradient of log-softmax, cast: 4 + 4 + 4 bytes read, 4 + 4 + width written.
    elements = 1.0 * tokens * vocab_rows(shard)
    operations: list[Operation] = [
        replace(
            loss,
            name="cross_entropy.backward",
            pass_name="backward",
            read_bytes=elements * 3.0 * _FP32_BYTES,
            written_bytes=elements * (2.0 * _FP32_BYTES + shard.width_bytes),
            num_kernels=3,
        ),
        dgrad,
        wgrad,
    ]
    reduced = reduce_tokens(shard, "logits.backward", repeats, tokens=tokens, stage="last")
    gathered = gather_tokens(shard, "logits.backward", repeats, tokens=tokens, stage="last")
    operations += [replace(operation, pass_name="backward") for operation in reduced]
    for operation in gathered:
        assert isinstance(operation, Collective)
        operations.append(replace(operation, pass_name="backward", overlaps=True))
    return operations + lower_backward(_lower_final_norm(shard))


def _lower_final_norm(shard: Shard) -> list[Operation]:
    if not shard.config.has_final_norm:
        return []
    return [
        norm(
            shard,
            "final_norm",
            shard.num_passes,
            width=shard.config.hidden_size,
            tokens=shard.num_residual_tokens,
            stage="last",
        )
    ]


def _logits(shard: Shard, rows: int) -> Gemm:
    return weight_gemm(
        shard,
        "logits",
        shard.num_passes,
        m=rows,
        n=vocab_rows(shard),
        k=shard.config.hidden_size,
        dtype=shard.dtype,
        stage="last",
    )


def _cross_entropy(shard: Shard) -> Pointwise:
    """Cast to fp32, then log-softmax: width + 4 bytes read and 4 + 4 written per logit, as PyTorch's loss does."""
    elements = 1.0 * shard.num_tokens * vocab_rows(shard)
    return Pointwise(
        name="cross_entropy",
        stage="last",
        repeats=shard.num_passes,
        dtype=shard.dtype,
        operation="cross_entropy",
        read_bytes=elements * (shard.width_bytes + _FP32_BYTES),
        written_bytes=elements * 2.0 * _FP32_BYTES,
        num_kernels=2,
    )
