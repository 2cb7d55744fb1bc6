"""The first end of the model: token rows, positions, token types, and what stands between them and the first layer.

Legend: T tokens of this device, e embedding width, h hidden size, v vocabulary rows of this device.

The matrix is split over the vocabulary, and v is rounded up, as Megatron-LM pads it.
Source: arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.backward import lower_backward
from shapewright.lowering.communication import gather_tokens, reduce_tokens
from shapewright.lowering.gemms import weight_gemm
from shapewright.lowering.pointwise import dropout, norm, pointwise

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation


def vocab_rows(shard: Shard) -> int:
    """Rows of the embedding and of the logit matrix on this device: ceil(v / t)."""
    return -(-shard.config.vocab_size // shard.layout.tensor_parallel)


def lower_embedding(shard: Shard) -> list[Operation]:
    """Gather the rows of the tokens, add the tensor axis's partial results, then positions and the rest."""
    width = shard.config.embedding_size
    elements = 1.0 * shard.num_tokens * width
    rows: list[Operation] = [
        pointwise(shard, "embedding", "embedding", shard.num_passes, read=elements, written=elements, stage="first")
    ]
    rows += reduce_tokens(shard, "embedding", shard.num_passes, tokens=shard.num_tokens, width=width, stage="first")
    return rows + _lower_after_rows(shard)


def lower_embedding_backward(shard: Shard) -> list[Operation]:
    """Scatter of gradients into a dense, zeroed gradient of the whole matrix; token ids have no gradient.

    Every device needs the gradient of all tokens: it is gathered where the tensor axis splits them.
    """
    config, repeats = shard.config, shard.num_passes
    elements = 1.0 * shard.num_tokens * config.embedding_size
    gradient = 1.0 * vocab_rows(shard) * config.embedding_size
    operations = lower_backward(_lower_after_rows(shard))
    gathered = gather_tokens(
        shard, "embedding.backward", repeats, tokens=shard.num_tokens, width=config.embedding_size, stage="first"
    )
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
    return operations + [operation.changed(pass_name="backward") for operation in [*gathered, scatter]]


def _lower_after_rows(shard: Shard) -> list[Operation]:
    """Positions and token types are gathered and added; then projection to the hidden size, norm and dropout."""
    config, repeats, tokens = shard.config, shard.num_passes, shard.num_residual_tokens
    kept = 1.0 * tokens * config.hidden_size
    tables = {"positions": shard.query_len} if config.position_embedding == "learned" else {}
    if config.num_token_types:
        tables["token_types"] = config.num_token_types
    operations: list[Operation] = []
    if config.embedding_size != config.hidden_size:
        operations.append(
            weight_gemm(
                shard,
                "embedding.project_in",
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
            pointwise(shard, f"embedding.{table}", "embedding", repeats, read=read, written=kept, stage="first")
        )
    if config.embedding_norm:
        operations.append(
            norm(shard, "embedding.norm", repeats, width=config.hidden_size, tokens=tokens, stage="first")
        )
    if shard.workload.is_training and config.hidden_dropout > 0.0:
        operations.append(dropout(shard, "embedding.dropout", repeats, elements=kept, stage="first"))
    return operations
