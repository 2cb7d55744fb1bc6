"""moe.parquet: a whole expert block without its router: two grouped GEMMs with the activation between them.

A device of an expert group of size e meets num_experts / e experts and, under balanced routing, num_tokens topk / e
rows; tensor sharding cuts inter_size. Gated experts are assumed (gate and up in one matrix), and an even split of rows:
the skew of a power-law distribution is not priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.context import Chunk, Prices, split_chunks
from shapewright.accuracy.gemm import HOT_CACHE_ARCHITECTURES
from shapewright.accuracy.read import Format
from shapewright.dtypes import get_dtype
from shapewright.operations import GroupedGemm, Pointwise
from shapewright.perf.gemm import as_gemm, price_gemm
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.roofline import roofline_s

if TYPE_CHECKING:
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device

_SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
FORMAT = Format(
    numbers=dict.fromkeys(_SIZES, 1),
    labels=("device", "library", "kernel", "dtype", "distribution"),
    positive=("latency_s",),
)
# Activations between the products stay in 16 bits, whatever the products' format. [byte]
_ACTIVATION_BYTES = 2.0


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are distributions of tokens over experts."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        # The same block is timed under several distributions: each shape is priced once.
        sizes = np.stack([rows.numbers[name] for name in _SIZES])
        shapes, back = np.unique(sizes, axis=1, return_inverse=True)
        found = _price_shapes(
            dict(zip(_SIZES, shapes, strict=True)), device, get_dtype(words[1]).name, words[2], context
        )
        return found.take(back.reshape(-1))

    for rows, device, words, prices in context.price_groups(columns, ("device", "dtype", "library"), price_group):
        names = (device.name, words[1], words[2])
        yield from split_chunks("moe", names, rows.labels["distribution"], rows.numbers["latency_s"], prices)


def _price_shapes(sizes: dict[str, np.ndarray], device: Device, dtype: str, library: str, context: Context) -> Prices:
    h, inner = sizes["hidden_size"], np.ceil(sizes["inter_size"] / sizes["moe_tp_size"])
    experts = np.maximum(np.floor(sizes["num_experts"] / sizes["moe_ep_size"]), 1.0)
    rows = np.maximum(np.round(sizes["num_tokens"] * sizes["topk"] / sizes["moe_ep_size"]), 1.0)
    hot = device.architecture in HOT_CACHE_ARCHITECTURES
    record = context.record("gemm", device)
    products = (
        GroupedGemm(name="gate_up", dtype=dtype, m=rows, n=2.0 * inner, k=h, groups=experts),
        GroupedGemm(name="down", dtype=dtype, m=rows, n=h, k=inner, groups=experts),
    )
    between = Pointwise(
        name="activation",
        operation="activation",
        read_bytes=2.0 * rows * inner * _ACTIVATION_BYTES,
        written_bytes=rows * inner * _ACTIVATION_BYTES,
    )
    prices = [
        *(price_gemm(as_gemm(product), device, record, hot_cache=hot, library=library) for product in products),
        price_pointwise(between, device, context.record("pointwise", device)),
    ]
    flops = sum(np.asarray(product.flops) for product in products)
    # Few rows reach few experts: only their weights are read.
    moved = sum(np.asarray(as_gemm(product).num_bytes) for product in products)
    # Ends of intervals add up as if all three erred alike.
    return Prices(
        predicted=np.asarray(sum(price.time_s for price in prices)),
        low=np.asarray(sum(price.low_s for price in prices)),
        high=np.asarray(sum(price.high_s for price in prices)),
        roofline=np.asarray(roofline_s(flops, moved, device, dtype)),
    )
