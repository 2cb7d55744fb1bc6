"""Work of kernels that stream rows: norms, quantization, losses, activations; alone or with the GEMMs fused into them.

Legend: T rows (tokens), h their columns, v vocabulary, f inner width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.kernels.work import NOMINAL_START_S, KernelRates, KernelWork, narrow_rate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float

    from shapewright.hardware.device import Device

    PerCall = Float[np.ndarray, "*calls"]

# Unit of the work that an SM does for a row. [cycle]
_ROW_CYCLES = 100.0
_LOAD_BYTES = 16.0
_PARTIAL_BYTES = 4.0
_LLAMA4_HEAD = 128.0


def row_work(
    rates: KernelRates,
    *,
    rows: PerCall,
    columns: PerCall,
    read_bytes: float,
    written_bytes: float,
    sums_columns: bool = False,
    has_mean: PerCall | float = 0.0,
) -> KernelWork:
    """Work of a kernel that reads and writes each element of [rows, columns] once.

    Args:
        read_bytes: Bytes read per element. [byte]
        written_bytes: Bytes written per element. [byte]
        sums_columns: Whether it also sums over the rows, as the gradient of a norm's weight does: every SM keeps a
            partial sum.
        has_mean: 1 for a layer norm, which also subtracts a mean.
    """
    elements = rows * columns
    read_s, written_s = elements * read_bytes / rates.bytes_per_s, elements * written_bytes / rates.bytes_per_s
    per_sm = 1.0 / (rates.num_sms * rates.clock_hz)
    kept = np.minimum(elements * (read_bytes + written_bytes), rates.l2_bytes)
    memory = {"reads": read_s, "writes": written_s, "beyond the cache": read_s + written_s - kept / rates.bytes_per_s}
    if sums_columns:
        memory["partial sums"] = columns * rates.num_sms * _PARTIAL_BYTES / rates.bytes_per_s
    return KernelWork(
        compute={"rows": rows * _ROW_CYCLES * per_sm},
        memory=memory,
        serial={
            "start": np.full_like(read_s, NOMINAL_START_S),
            "row": columns * (read_bytes + written_bytes) / _LOAD_BYTES / rates.clock_hz,
            "mean": has_mean * (read_s + written_s),
        },
        roofline_s=read_s + written_s,
        places={"rows": rows, "columns": columns, "elements": elements},
        rare=frozenset({"beyond the cache", "mean"}),
    )


@dataclass(frozen=True)
class FusedSizes:
    """Sizes of a call of a training kernel; those that a kernel does not have are 0.

    Attributes:
        elements: Elements of the tensor that the kernel works on.
        table: Elements of a second tensor whose size does not follow from it: embeddings, weights, scores.
        gemm_flops: Multiplications and additions of the GEMMs fused into it. [flop]
        loops: Iterations of a Python loop, where the unfused form has one.
    """

    elements: PerCall
    table: PerCall
    gemm_flops: PerCall
    loops: PerCall


def fused_sizes(kernel: str, sizes: Mapping[str, PerCall]) -> FusedSizes | None:
    """Sizes of a call of a training kernel by its name; None if the kernel is unknown.

    Args:
        kernel: Name, as Liger-Kernel's benchmarks spell it.
        sizes: Columns of the table; NaN where a kernel has no such size.
    """
    batch, seq_len = (np.nan_to_num(sizes[name], nan=1.0) for name in ("batch_size", "seq_len"))
    tokens = np.where(np.isnan(sizes["tokens"]), batch * seq_len, sizes["tokens"])
    h, f, v, heads, kv_heads, experts, topk = (
        np.nan_to_num(sizes[name])
        for name in (
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "num_heads",
            "num_kv_heads",
            "num_experts",
            "topk",
        )
    )
    none = np.zeros_like(tokens)
    if kernel in ("cross_entropy", "megatron_cross_entropy", "jsd", "kl_div", "tvd", "sparsemax"):
        return FusedSizes(tokens * v, none, none, none)
    if kernel.startswith(("fused_linear_", "distill_", "kto_")):
        # Fused losses take v / h chunks of tokens and add to the gradient of the whole weight in each.
        return FusedSizes(tokens * v, h * v * np.ceil(v / np.maximum(h, 1.0)), 2.0 * tokens * h * v, none)
    if kernel in ("softmax", "layer_norm", "rms_norm", "fused_add_rms_norm", "megatron_rms_norm", "relu_squared"):
        return FusedSizes(tokens * h, none, none, none)
    if kernel == "rope":
        return FusedSizes(tokens * h * (1.0 + kv_heads / np.maximum(heads, 1.0)), none, none, none)
    if kernel == "llama4_rope":  # its benchmark keeps the head width whatever the hidden size
        return FusedSizes(tokens * (heads + kv_heads) * _LLAMA4_HEAD, none, none, none)
    if kernel == "embedding":
        return FusedSizes(tokens * h, v * h, none, none)
    if kernel == "megatron_swiglu":
        return FusedSizes(tokens * f, none, none, none)
    if kernel in ("geglu", "swiglu", "tiled_geglu", "tiled_swiglu"):
        return FusedSizes(tokens * f, h * f, 6.0 * tokens * h * f, none)
    if kernel == "fused_moe":
        return FusedSizes(tokens * topk * (h + f), experts * h * f, 6.0 * tokens * topk * h * f, experts)
    if kernel in ("fused_neighborhood_attention", "multi_token_attention", "sparse_multi_token_attention"):
        maps = heads + np.nan_to_num(sizes["channels_in"])
        flops = 4.0 * batch * seq_len**2 * np.maximum(h, 1.0)
        loops = seq_len * np.nan_to_num(sizes["kernel_size"])
        return FusedSizes(tokens * np.maximum(h, 1.0), batch * maps * seq_len**2, flops, loops)
    return None


def fused_work(
    device: Device, rates: KernelRates, found: FusedSizes, *, dtype: str, element_bytes: float, gemms: float
) -> KernelWork:
    """Work of a training kernel, with the traffic of one read and one write of each element.

    Args:
        element_bytes: Width of an element. [byte]
        gemms: GEMMs of the pass for each one of the forward pass: 1 forward, 2 backward, 3 both.
    """
    elements_s = 2.0 * found.elements * element_bytes / rates.bytes_per_s
    table_s = 2.0 * found.table * element_bytes / rates.bytes_per_s
    gemm_s = gemms * found.gemm_flops / narrow_rate(device, dtype)
    return KernelWork(
        compute={"gemm": gemm_s},
        memory={"elements": elements_s, "table": table_s},
        serial={"start": np.full_like(elements_s, NOMINAL_START_S), "loops": found.loops * NOMINAL_START_S},
        roofline_s=np.maximum(gemm_s, (elements_s + table_s) / 2.0),
        places={"elements": found.elements, "table": np.maximum(found.table, 1.0)},
        rare=frozenset({"loops"}),
    )
