"""Evaluate pointwise.parquet: norms, rotary positions, activations, residual additions, embeddings of models, 2024."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError
from shapewright.lowering.operations import Pointwise
from shapewright.measure.accuracy.chunk import Chunk, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.linear_layers import join_labels
from shapewright.pricing.pointwise import price_pointwise

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

_SIZES = (
    "num_tokens", "hidden_size", "intermediate_size", "gated", "num_heads", "num_kv_heads", "tensor_parallel",
)  # fmt: skip
FORMAT = Format(
    numbers={**dict.fromkeys(_SIZES, 1), "gated": 0},
    labels=("device", "library", "model", "operation", "dtype"),
    positive=("latency_s",),
)
# Name in the table -> kind of the package.
_KINDS = {
    "input_layernorm": "norm",
    "attn_rope": "rotary",
    "mlp_act": "activation",
    "add": "residual",
    "emb": "embedding",
}
# Prefixes of models with parallel attention and MLP, both of which are added to the residual stream.
_TWO_BRANCHES = ("phi-1", "phi-2", "falcon", "gpt-j", "gpt-neox", "pythia")


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are models and operations."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        model, gated = words[4], bool(np.all(rows.numbers["gated"]))
        operation = operation_of(rows, words[3], get_dtype(context.read_stored_format(words[1]).dtype).num_bytes)
        if words[3] == "input_layernorm" and not gated:
            operation = replace(operation, operation="layernorm")
        elif words[3] == "add" and adds_two_branches(model):
            read, written = 2.0 * operation.read_bytes, 2.0 * operation.written_bytes
            operation = replace(operation, read_bytes=read, written_bytes=written, num_kernels=2)
        found = price_pointwise(operation, device, context.record("pointwise", device))
        return prices_of(found, found.roofline_s)

    by = ("device", "dtype", "library", "operation", "model")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[1], words[2])
        parts = join_labels(rows.labels["model"], rows.labels["operation"])
        yield from split_chunks("pointwise", names, parts, rows.numbers["latency_s"], prices)


def adds_two_branches(model: str) -> bool:
    """Whether a model's residual addition stands for two, by its name.

    >>> adds_two_branches("phi-2"), adds_two_branches("Llama-2-7b-hf")
    (True, False)
    """
    return model.rpartition("/")[2].lower().startswith(_TWO_BRANCHES)


def operation_of(rows: Columns, name: str, element_bytes: float) -> Pointwise:
    """Return the operation of each row, with the bytes that lowering counts.

    Norm, residual and embedding touch tokens x h elements; the activation tokens x f / t, read twice with a gate;
    rotary positions tokens x (a + a_kv) / t heads.

    Raises:
        MeasuredFileError: the operation is unknown.
    """
    if name not in _KINDS:
        raise MeasuredFileError(f"unknown operation {name!r}; known are {', '.join(_KINDS)}")
    tokens, h, f, gated, heads, kv_heads, shards = (rows.numbers[size] for size in _SIZES)
    width, inputs = h, np.ones_like(h)
    if name == "attn_rope":
        width = (heads + kv_heads) * (h / heads) / shards
    elif name == "mlp_act":
        width, inputs = f / shards, 1.0 + gated
    elif name == "add":
        inputs = np.full_like(h, 2.0)
    written = tokens * width * element_bytes
    return Pointwise(name=name, operation=_KINDS[name], read_bytes=inputs * written, written_bytes=written)
