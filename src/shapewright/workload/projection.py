"""Optimizers that keep the moments of projected gradients: GaLore and Q-GaLore.

Legend: G[n,k] the gradient of a matrix of the layers, s and l its shorter and longer side, r the rank, P[s,r] the
projection, T steps between its updates.

The moments have r x l elements instead of s x l, and P has s x r. Each step projects the gradient, P^T G, and the
update back, P N; every T steps P is the first r singular vectors of G. Embeddings, logits and norms keep full moments.

Source: arXiv 2403.03507, algorithm 2 and section 5.2 (8-bit moments, one layer at a time); arXiv 2407.08296, section 3
(Q-GaLore: weights in INT8, P in INT4, updates of P where it still changes).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.workload.layout import ParallelLayout
from shapewright.workload.linears import list_linears
from shapewright.workload.optimizers import OPTIMIZERS, TrainingRecipe, find_recipe

if TYPE_CHECKING:
    from shapewright.core.numeric import Count
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

DEFAULT_INTERVAL = 200
"""Steps between updates of the projections. Source: arXiv 2403.03507, section 5.1."""

RANK_DIVISOR = 4  # arXiv 2403.03507, table 2: rank of 512 at width 2048, 1024 at 4096

SVD_RATE_FRACTION = 0.017
"""Rate of an SVD over the fp32 peak of the device. Derived from arXiv 2407.08296, section 1: updating all projections
of Llama-7B takes over 10 minutes, 4.0e14 FLOPs by the count below, on a card of 38.7 TFLOP/s."""


def projection_rank(config: TransformerConfig, workload: Workload) -> Count:
    """Return the rank of the projections: that of the workload, or a quarter of the hidden size."""
    rank: Count = workload.galore_rank or config.hidden_size // RANK_DIVISOR
    return rank


def training_recipe(config: TransformerConfig, workload: Workload) -> TrainingRecipe:
    """Return the bytes per parameter of the workload's optimizer; projected moments depend on the model's matrices.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.workload import Workload
    >>> square = TransformerConfig(hidden_size=1024, num_layers=1, num_heads=8, intermediate_size=1024, vocab_size=512)
    >>> training_recipe(square, Workload(optimizer="galore", galore_rank=256)).optimizer_bytes  # (1 + 2) / 4 x 2 bytes
    1.5
    """
    recipe = find_recipe(workload.optimizer, workload.dtype)
    optimizer = OPTIMIZERS[workload.optimizer]
    if not optimizer.projection_bytes:
        return recipe
    rank = projection_rank(config, workload)
    states: Any = 0.0
    weights: Any = 0
    for kind, num_layers in config.count_kinds(range(config.num_layers)).items():
        for linear in list_linears(config, ParallelLayout(), kind):
            short, long = min(linear.n, linear.k), max(linear.n, linear.k)
            own_rank = min(rank, short)
            copies = num_layers * linear.copies
            projected = short * own_rank * optimizer.projection_bytes + own_rank * long * optimizer.state_bytes
            states += copies * projected
            weights += copies * short * long
    return replace(recipe, optimizer_bytes=states / weights, embedding_optimizer_bytes=optimizer.state_bytes)


def svd_depth(short: Count, long: Count, interval: int, svd_fraction: float) -> Any:
    """Contracted dimension of an fp32 GEMM [short, long] that takes as long as the SVD's share of one step. [element]

    An SVD with singular vectors takes 4 l s^2 + 22 s^3 FLOPs (Golub and Van Loan, Matrix Computations, section 8.6).
    """
    flops = svd_fraction * (4.0 * long * short * short + 22.0 * short * short * short)
    depth: Any = flops / (2.0 * short * long * interval * SVD_RATE_FRACTION)
    return round(depth) + 1
