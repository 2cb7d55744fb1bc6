"""Lowering of the ends of a model: embedding; multi-token prediction, final norm, logits and loss.

Legend: T tokens of this device, e embedding width, h hidden size, v vocabulary rows of this device.

Embedding and logit matrix are split over the vocabulary, padded as in Megatron-LM, and the loss is computed from the
split logits. Source: arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.builders import (
    activation,
    dropout,
    lower_stream_start,
    lower_stream_sum,
    norm,
    pointwise,
    weight_gemm,
)
from shapewright.lowering.collectives import collective, gather_tokens, reduce_tokens
from shapewright.lowering.counts import LayerCounts
from shapewright.lowering.gradients import gemm_gradients, lower_backward
from shapewright.lowering.images import lower_final, lower_final_backward, lower_start, lower_start_backward
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise

if TYPE_CHECKING:
    from shapewright.core.numeric import Count
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.models.transformer import TransformerConfig


_FP32_BYTES = get_dtype("fp32").num_bytes

# Vocabulary-parallel cross entropy reduces the row maximum, the target's logit and the sum of exponentials.
_LOSS_REDUCTIONS = 3


def vocab_rows(shard: Shard) -> int:
    """Number of rows of the embedding and of the logit matrix on this device: ceil(v / t)."""
    return -(-shard.config.vocab_size // shard.layout.tensor_parallel)


def lower_embedding(shard: Shard) -> list[Operation]:
    """Lower the lookup of token rows, its reduction over the tensor axis, and all else before the first layer."""
    if shard.config.patches is not None:
        return lower_start(shard) + _lower_after_lookup(shard)
    width = shard.config.embedding_size
    elements = 1.0 * shard.num_tokens * width
    rows: list[Operation] = [
        pointwise(shard, "embedding", "", "embedding", shard.num_passes, read=elements, written=elements, stage="first")
    ]
    rows += reduce_tokens(shard, "embedding", shard.num_passes, tokens=shard.num_tokens, width=width, stage="first")
    return rows + _lower_after_lookup(shard)


def lower_embedding_backward(shard: Shard) -> list[Operation]:
    """Lower the scatter of gradients into a dense, zeroed gradient of the embedding matrix.

    Every device needs the gradients of all tokens, which are gathered if the tensor axis splits tokens.
    """
    config, repeats = shard.config, shard.num_passes
    if config.patches is not None:
        return lower_backward(_lower_after_lookup(shard)) + lower_start_backward(shard)
    elements = 1.0 * shard.num_tokens * config.embedding_size
    gradient = 1.0 * vocab_rows(shard) * config.embedding_size
    operations = lower_backward(_lower_after_lookup(shard))
    gathered = gather_tokens(
        shard,
        "embedding",
        repeats,
        tokens=shard.num_tokens,
        width=config.embedding_size,
        stage="first",
        name="embedding.backward",
    )
    scatter = pointwise(
        shard,
        "embedding",
        "",
        "embedding",
        repeats,
        read=2.0 * elements,
        written=elements + gradient,
        num_kernels=2,
        stage="first",
    )
    scatter = scatter.changed(name=f"{scatter.name}.backward")
    gradients: dict[str, Any] = {"gradient": "backward", "pass_name": "backward"}
    return operations + [operation.changed(**gradients) for operation in [*gathered, scatter]]


def _lower_after_lookup(shard: Shard) -> list[Operation]:
    """Lower projection to the hidden size, addition of positions and token types, norm and dropout."""
    config, repeats, tokens = shard.config, shard.num_passes, shard.num_residual_tokens
    kept = 1.0 * tokens * config.hidden_size
    has_table = config.patches.num_positions > 0 if config.patches else config.position_embedding == "learned"
    tables = {"positions": shard.query_len} if has_table else {}
    if config.num_token_types:
        tables["token_types"] = config.num_token_types
    operations: list[Operation] = []
    if config.embedding_size != config.hidden_size:
        operations.append(
            weight_gemm(
                shard,
                "embedding",
                "project_in",
                repeats,
                m=tokens,
                n=config.hidden_size,
                k=config.embedding_size,
                stage="first",
            )
        )
    for table, num_rows in tables.items():
        read = kept + 1.0 * num_rows * config.hidden_size
        operations.append(
            pointwise(shard, "embedding", table, "embedding", repeats, read=read, written=kept, stage="first")
        )
    if config.embedding_norm:
        operations.append(
            norm(shard, "embedding", "norm", repeats, width=config.hidden_size, tokens=tokens, stage="first")
        )
    if shard.workload.is_training and config.hidden_dropout > 0.0:
        operations.append(dropout(shard, "embedding", repeats, elements=kept, stage="first"))
    if config.residual_streams > 1:
        operations += lower_stream_start(shard)
    return operations


def lower_head(shard: Shard) -> list[Operation]:
    """Lower final norm, logits (T x e)(e x v) and, in training, the loss; decoders need each last token's logits."""
    config, repeats = shard.config, shard.num_passes
    if config.patches is not None:
        return lower_final_norm(shard) + lower_final(shard)
    if shard.workload.is_training:
        operations = _lower_before_logits(shard)
        operations += gather_tokens(
            shard, "logits", repeats, tokens=shard.num_tokens, width=config.embedding_size, stage="last"
        )
        operations += [_in_chunks(shard, _logits(shard, shard.num_tokens)), _in_chunks(shard, _cross_entropy(shard))]
        return operations + collective(
            shard,
            "cross_entropy",
            "all_reduce",
            "all_reduce",
            "tensor",
            repeats * _LOSS_REDUCTIONS,
            message_bytes=1.0 * shard.num_tokens * _FP32_BYTES,
            stage="last",
        )
    # An encoder returns logits of every position.
    rows = shard.num_tokens if config.stack == "encoder" else shard.batch_size
    logit_bytes = 1.0 * rows * vocab_rows(shard) * shard.layout.tensor_parallel * shard.width_bytes
    return [
        *_lower_before_logits(shard),
        _logits(shard, rows),
        *collective(
            shard, "logits", "all_gather", "all_gather", "tensor", repeats, message_bytes=logit_bytes, stage="last"
        ),
    ]


def lower_head_backward(shard: Shard) -> list[Operation]:
    """Lower the gradients of loss, logits and final norm; the tensor axis reduces the gradient of the logits' input."""
    if shard.config.patches is not None:
        return lower_final_backward(shard) + lower_backward(lower_final_norm(shard), shard.workload)
    repeats, tokens = shard.num_passes, shard.num_tokens
    dgrad, wgrad = gemm_gradients(_logits(shard, tokens))
    # Scatter of the target's gradient, gradient of log-softmax, cast: 4 + 4 + 4 bytes read, 4 + 4 + width written.
    elements = 1.0 * tokens * vocab_rows(shard)
    loss_gradient = replace(
        _cross_entropy(shard),
        name="cross_entropy.backward",
        gradient="backward",
        pass_name="backward",
        read_bytes=elements * 3.0 * _FP32_BYTES,
        written_bytes=elements * (2.0 * _FP32_BYTES + shard.width_bytes),
        num_kernels=3,
    )
    sizes: dict[str, Any] = {"tokens": tokens, "width": shard.config.embedding_size, "stage": "last"}
    reduced = reduce_tokens(shard, "logits", repeats, name="logits.backward", **sizes)
    gathered: list[Operation] = []
    if shard.workload.trains_all:
        gathered = gather_tokens(shard, "logits", repeats, name="logits.backward", **sizes, overlaps=True)
    return [
        *([] if shard.workload.kernels == "fused" else [_in_chunks(shard, loss_gradient)]),
        _in_chunks(shard, dgrad),
        *([_in_chunks(shard, wgrad), *_sum_of_chunks(shard)] if shard.workload.trains_all else []),
        *(
            operation.changed(gradient="backward", pass_name="backward", overlaps=True)
            for operation in reduced + gathered
        ),
        *lower_backward(_lower_before_logits(shard), shard.workload),
    ]


def lower_final_norm(shard: Shard) -> list[Operation]:
    """Lower the norm after the last layer of a stack, and before it the sum of residual streams."""
    config, tokens = shard.config, shard.num_residual_tokens
    summed = lower_stream_sum(shard) if config.residual_streams > 1 else []
    if not config.has_final_norm:
        return summed
    return [
        *summed,
        norm(shard, "final_norm", "", shard.num_passes, width=config.hidden_size, tokens=tokens, stage="last"),
    ]


def _lower_before_logits(shard: Shard) -> list[Operation]:
    """Lower final norm, BERT's transform and projection to the embedding width, which models compute for all tokens."""
    config, repeats, h = shard.config, shard.num_passes, shard.config.hidden_size
    own_rows = shard.num_residual_tokens
    operations = lower_final_norm(shard)
    if config.head_transform:
        operations += [
            weight_gemm(shard, "logits", "transform", repeats, m=own_rows, n=h, k=h, stage="last"),
            activation(
                shard,
                "logits",
                repeats,
                width=h,
                tokens=own_rows,
                gated=False,
                role="transform_activation",
                stage="last",
            ),
            norm(shard, "logits", "transform_norm", repeats, width=h, tokens=own_rows, stage="last"),
        ]
    if config.embedding_size != h:
        operations.append(
            weight_gemm(shard, "logits", "project_out", repeats, m=own_rows, n=config.embedding_size, k=h, stage="last")
        )
    return operations


def _logits(shard: Shard, rows: int) -> Gemm:
    """Build the GEMM of the logits."""
    return weight_gemm(
        shard,
        "logits",
        "",
        shard.num_passes,
        m=rows,
        n=vocab_rows(shard),
        k=shard.config.embedding_size,
        dtype=shard.wide_dtype,
        stage="last",
    )


def _num_chunks(shard: Shard) -> Count:
    config = shard.config
    return shard.workload.count_loss_chunks(
        shard.num_tokens, config.embedding_size, config.vocab_size, shard.layout.tensor_parallel
    )


def _sum_of_chunks(shard: Shard) -> list[Operation]:
    """Lower the addition of the weight gradient of each chunk to that of the chunks before."""
    if shard.workload.kernels != "fused":
        return []
    weights = 1.0 * vocab_rows(shard) * shard.config.embedding_size
    repeats = shard.num_passes * (_num_chunks(shard) - 1)
    added = pointwise(shard, "logits", "sum", "residual", repeats, read=2.0 * weights, written=weights, stage="last")
    return [added.changed(name=f"{added.name}.backward", gradient="backward", pass_name="backward")]


def _in_chunks(shard: Shard, operation: Any) -> Any:
    """Divide an operation over tokens into the workload's loss_chunks; the weight gradient contracts tokens."""
    chunks = _num_chunks(shard)
    if isinstance(chunks, int) and chunks == 1:
        return operation
    parts: dict[str, Any] = {"repeats": operation.repeats * chunks}
    if isinstance(operation, Gemm):
        tokens = "k" if operation.layout == "TN" else "m"
        parts[tokens] = -(-getattr(operation, tokens) // chunks)
    else:
        parts |= {name: getattr(operation, name) / chunks for name in ("read_bytes", "written_bytes")}
    return operation.changed(**parts)


def _cross_entropy(shard: Shard) -> Pointwise:
    """Build cross entropy as in PyTorch, a cast to fp32 and log-softmax: width + 4 bytes read, 8 written per logit.

    A fused kernel reads the logits twice and writes their gradient over them, so that it has no backward pass.
    """
    elements = 1.0 * shard.num_tokens * vocab_rows(shard)
    is_fused = shard.workload.kernels == "fused"
    return Pointwise(
        name="cross_entropy",
        block="cross_entropy",
        stage="last",
        repeats=shard.num_passes,
        dtype=shard.dtype,
        operation="cross_entropy",
        read_bytes=elements * (2.0 * shard.width_bytes if is_fused else shard.width_bytes + _FP32_BYTES),
        written_bytes=elements * (shard.width_bytes if is_fused else 2.0 * _FP32_BYTES),
        num_kernels=1 if is_fused else 2,
    )


def predicts_more(shard: Shard) -> bool:
    """Whether a step predicts further tokens, as training does with models that have layers for it."""
    return shard.config.num_mtp_layers > 0 and shard.workload.is_training


def lower_mtp(shard: Shard, layers: list[Operation]) -> list[Operation]:
    """Lower the layers that predict further tokens: norms, the projection of 2 h to h, and a layer like the last.

    Args:
        layers: Operations of layers like the last, one for each further token.

    The tensor axis splits the columns of the projection and gathers its outputs. In the backward pass it gathers their
    gradients where it splits tokens; otherwise it reduces the gradients of the inputs, which moves four times as much.

    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2: they share embedding and logit matrix;
        NVIDIA/Megatron-LM, megatron/core/transformer/multi_token_prediction.py (eh_proj).
    """
    repeats, h, tokens = shard.num_passes * shard.config.num_mtp_layers, shard.config.hidden_size, shard.num_tokens
    output_bytes = 1.0 * tokens * h * shard.width_bytes
    outputs = collective(
        shard,
        "mtp",
        "all_gather",
        "all_gather",
        "tensor",
        repeats,
        name="mtp.outputs.all_gather",
        message_bytes=output_bytes,
        stage="last",
    )
    backward_bytes = None if shard.splits_sequence else 4.0 * output_bytes
    return [
        norm(shard, "mtp", "norm", 2 * repeats, width=h, tokens=shard.num_residual_tokens, stage="last"),
        *gather_tokens(shard, "mtp", repeats, tokens=tokens, width=2 * h, name="mtp.inputs", stage="last"),
        weight_gemm(
            shard, "mtp", "project", repeats, m=tokens, n=-(-h // shard.layout.tensor_parallel), k=2 * h, stage="last"
        ),
        *(each.changed(keeps_result=True, backward_bytes=backward_bytes) for each in outputs),
        *(operation.changed(name=f"mtp.{operation.name}", stage="last") for operation in layers),
    ]


def count_mtp(config: TransformerConfig) -> LayerCounts:
    """Count the layers of multi-token prediction, which are like the last one."""
    return LayerCounts({config.kind_of_layer(config.num_layers - 1): config.num_mtp_layers})


def with_mtp_heads(shard: Shard, head: list[Operation]) -> list[Operation]:
    """Run the operations after the layers once more for each layer of multi-token prediction."""
    if not predicts_more(shard):
        return head
    return [operation.changed(repeats=operation.repeats * (1 + shard.config.num_mtp_layers)) for operation in head]
