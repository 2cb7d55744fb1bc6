"""The last end of the model: final norm, logits and loss.

Legend: T tokens of this device, h hidden size, e embedding width, v vocabulary rows of this device.

The logit matrix is split over the vocabulary like the embedding, and the loss is taken from the split logits.
Source: arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.dtypes import get_dtype
from shapewright.lowering.backward import gemm_gradients, lower_backward
from shapewright.lowering.communication import collective, gather_tokens, reduce_tokens
from shapewright.lowering.embedding import vocab_rows
from shapewright.lowering.gemms import weight_gemm
from shapewright.lowering.pointwise import activation, norm
from shapewright.operations import Gemm, Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation

_FP32_BYTES = get_dtype("fp32").num_bytes

# Vocabulary-parallel cross-entropy reduces the row maximum, the target's logit and the sum of exponentials.
_LOSS_REDUCTIONS = 3


def lower_head(shard: Shard) -> list[Operation]:
    """Final norm, logits (T x e)(e x v), and the loss in training; prefill and decode need each last token's logits."""
    config, repeats = shard.config, shard.num_passes
    if shard.workload.is_training:
        operations = _lower_before_logits(shard)
        operations += gather_tokens(
            shard, "logits", repeats, tokens=shard.num_tokens, width=config.embedding_size, stage="last"
        )
        operations += [_in_chunks(shard, _logits(shard, shard.num_tokens)), _in_chunks(shard, _cross_entropy(shard))]
        return operations + collective(
            shard,
            "cross_entropy.all_reduce",
            "all_reduce",
            "tensor",
            repeats * _LOSS_REDUCTIONS,
            message_bytes=1.0 * shard.num_tokens * _FP32_BYTES,
            stage="last",
        )
    # An encoder has no last token: every position has its answer.
    rows = shard.num_tokens if config.stack == "encoder" else shard.batch_size
    logit_bytes = 1.0 * rows * vocab_rows(shard) * shard.layout.tensor_parallel * shard.width_bytes
    return [
        *_lower_before_logits(shard),
        _logits(shard, rows),
        *collective(
            shard, "logits.all_gather", "all_gather", "tensor", repeats, message_bytes=logit_bytes, stage="last"
        ),
    ]


def lower_head_backward(shard: Shard) -> list[Operation]:
    """Gradients of loss and logits and of what stands before; the tensor axis adds the gradient towards the tokens."""
    repeats, tokens = shard.num_passes, shard.num_tokens
    dgrad, wgrad = gemm_gradients(_logits(shard, tokens))
    # Scatter of the target's gradient, gradient of log-softmax, cast: 4 + 4 + 4 bytes read, 4 + 4 + width written.
    elements = 1.0 * tokens * vocab_rows(shard)
    loss_gradient = replace(
        _cross_entropy(shard),
        name="cross_entropy.backward",
        pass_name="backward",
        read_bytes=elements * 3.0 * _FP32_BYTES,
        written_bytes=elements * (2.0 * _FP32_BYTES + shard.width_bytes),
        num_kernels=3,
    )
    sizes: dict[str, Any] = {"tokens": tokens, "width": shard.config.embedding_size, "stage": "last"}
    reduced = reduce_tokens(shard, "logits.backward", repeats, **sizes)
    gathered = gather_tokens(shard, "logits.backward", repeats, **sizes, overlaps=True)
    return [
        _in_chunks(shard, loss_gradient),
        _in_chunks(shard, dgrad),
        _in_chunks(shard, wgrad),
        *(operation.changed(pass_name="backward", overlaps=True) for operation in reduced + gathered),
        *lower_backward(_lower_before_logits(shard)),
    ]


def lower_final_norm(shard: Shard) -> list[Operation]:
    """Normalise what leaves the last layer of a stack."""
    config, tokens = shard.config, shard.num_residual_tokens
    if not config.has_final_norm:
        return []
    return [norm(shard, "final_norm", shard.num_passes, width=config.hidden_size, tokens=tokens, stage="last")]


def _lower_before_logits(shard: Shard) -> list[Operation]:
    """Final norm, BERT's square transform, projection to a narrower embedding: of all tokens, as models compute it."""
    config, repeats, h = shard.config, shard.num_passes, shard.config.hidden_size
    own_rows = shard.num_residual_tokens
    operations = lower_final_norm(shard)
    if config.head_transform:
        operations += [
            weight_gemm(shard, "logits.transform", repeats, m=own_rows, n=h, k=h, stage="last"),
            activation(
                shard, "logits.transform_activation", repeats, width=h, tokens=own_rows, gated=False, stage="last"
            ),
            norm(shard, "logits.transform_norm", repeats, width=h, tokens=own_rows, stage="last"),
        ]
    if config.embedding_size != h:
        operations.append(
            weight_gemm(shard, "logits.project_out", repeats, m=own_rows, n=config.embedding_size, k=h, stage="last")
        )
    return operations


def _logits(shard: Shard, rows: int) -> Gemm:
    return weight_gemm(
        shard,
        "logits",
        shard.num_passes,
        m=rows,
        n=vocab_rows(shard),
        k=shard.config.embedding_size,
        dtype=shard.dtype,
        stage="last",
    )


def _in_chunks(shard: Shard, operation: Any) -> Any:
    """The same over a part of the tokens, as often as there are parts; products contract tokens in wgrad."""
    chunks = shard.workload.loss_chunks
    if chunks == 1:
        return operation
    parts: dict[str, Any] = {"repeats": operation.repeats * chunks}
    if isinstance(operation, Gemm):
        tokens = "k" if operation.layout == "TN" else "m"
        parts[tokens] = -(-getattr(operation, tokens) // chunks)
    else:
        parts |= {name: getattr(operation, name) / chunks for name in ("read_bytes", "written_bytes")}
    return operation.changed(**parts)


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
