"""Products with weights: the form that every layer of a transformer has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.operations import Gemm

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard


def weight_gemm(
    shard: Shard, name: str, repeats: int, *, m: int, n: int, k: int, dtype: str | None = None, stage: str = "every"
) -> Gemm:
    """Build the product of activations x[m,k] with a weight W[n,k].

    With a ``dtype`` of its own (logits, router) a weight is stored in it too: recipes leave those as they are.
    """
    return Gemm(
        name=shard.prefix + name,
        stage=stage,
        repeats=repeats,
        dtype=dtype or shard.gemm_dtype,
        m=m,
        n=n,
        k=k,
        weight_dtype=None if dtype else shard.weight_dtype,
    )
