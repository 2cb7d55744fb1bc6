"""Evaluate attention_prefill.parquet and attention_decode.parquet: fused causal attention of serving libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations import Attention
from shapewright.measure.accuracy.chunk import Chunk, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context, ElementFormat

_SIZES = {"batch_size": 1, "query_len": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "window_size": 0}
_LABELS = ("device", "library", "kernel", "dtype", "kv_cache_dtype")
PREFILL_FORMAT = Format(numbers=_SIZES, labels=_LABELS, positive=("latency_s",))
DECODE_FORMAT = Format(numbers={**_SIZES, "context_len": 1}, labels=_LABELS, positive=("latency_s",))


def price_prefill(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price causal attention over whole sequences; parts are kernels."""
    return _price("attention_prefill", columns, context, "query_len")


def price_decode(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price one new token with a cache of context_len tokens; parts are kernels."""
    return _price("attention_decode", columns, context, "context_len")


def _price(table: str, columns: Columns, context: Context, keys: str) -> Iterator[Chunk]:
    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        sizes = rows.numbers
        form, cache = context.read_format(words[1], device), _read_cache(words[3], words[1], context)
        dtype = form.dtype
        operation = Attention(
            name="attention",
            dtype=dtype,
            kv_cache_dtype=cache.dtype,
            batch_size=sizes["batch_size"],
            query_len=sizes["query_len"],
            kv_len=sizes[keys],
            num_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            v_head_dim=sizes["head_dim"],
            window_size=sizes["window_size"],
            writes_cache=True,  # these libraries time the copy into the cache with the call
        )
        record = context.record("attention", device)
        context.note_library("attention", words[2], record)
        price = price_attention(operation, device, record, hot_cache=True, library=words[2], kernel=words[4])
        floor = roofline_s(operation.executed_flops, operation.num_bytes, device, dtype)
        return cache.widen(form.widen(prices_of(price, floor)))

    wrong = columns.numbers["num_heads"] % columns.numbers["num_kv_heads"] != 0.0
    columns = context.skip_rows(columns, wrong, "num_heads is not a multiple of num_kv_heads")
    by = ("device", "dtype", "library", "kv_cache_dtype", "kernel")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        form, cache = context.read_format(words[1], device), _read_cache(words[3], words[1], context)
        stored = get_dtype(cache.dtype)
        dtype = f"{words[1]}+{stored.name}kv" if stored.bits < get_dtype(form.dtype).bits else words[1]
        names = (device.name, dtype, words[2])
        yield from split_chunks(table, names, rows.labels["kernel"], rows.numbers["latency_s"], prices)


def _read_cache(word: str, arithmetic: str, context: Context) -> ElementFormat:
    """Return the element format of the cache: that of the GEMMs if a library names it ``auto``, or not at all."""
    return context.read_stored_format(arithmetic if word.strip().casefold() in ("", "auto") else word)
