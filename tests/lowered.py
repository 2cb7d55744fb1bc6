"""Models to lower, and a lowered model's operations by name."""

from __future__ import annotations

from typing import Any

from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout

ONE_DEVICE = ParallelLayout()
# Multi-head latent attention.
LATENT = TransformerConfig(
    hidden_size=64, num_heads=4, num_layers=1, vocab_size=96, head_dim=24, v_head_dim=16,
    q_lora_rank=40, kv_lora_rank=32, qk_rope_head_dim=8,
)  # fmt: skip


def gpt(
    *, hidden_size: int, num_heads: int, num_layers: int = 1, vocab_size: int = 51200, **fields: Any
) -> TransformerConfig:
    """A GPT of the paper: one QKV GEMM, f = 4h, learned positions."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=num_layers,
        vocab_size=vocab_size,
        fused_qkv=True,
        position_embedding="learned",
        **fields,
    )


def named(operations: tuple[Operation, ...], name: str, pass_name: str = "forward") -> Any:
    """The one operation of this name and pass."""
    (found,) = (each for each in operations if each.name == name and each.pass_name == pass_name)
    return found


def letters(gemm: Any) -> tuple[int, int, int, int, str]:
    """Batch, m, n, k and layout of a GEMM."""
    return gemm.batch, gemm.m, gemm.n, gemm.k, gemm.layout


def moved(operation: Pointwise) -> tuple[float, float]:
    """Bytes read and bytes written."""
    return float(operation.read_bytes), float(operation.written_bytes)
