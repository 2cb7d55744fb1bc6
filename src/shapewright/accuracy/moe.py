"""moe.parquet: a whole expert block without its router, on the busiest device of its expert group.

    block = gate_up + activation + down + unpermute + idle rows + lone rows

The parts are those that a step is lowered to, on the rows that accuracy.routing gives to the busiest device; tensor
sharding cuts inter_size. Idle rows are a benchmark's: libraries that run an expert group without an exchange keep the
rows of all tokens in their buffers, where the products clear what they do not compute and the next kernel reads it.
Lone rows are those of top 1 tokens, which vllm sums as if there were several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.accuracy.chunk import Chunk, Prices, split_chunks
from shapewright.accuracy.read import Format
from shapewright.accuracy.routing import busiest_loads
from shapewright.operations import GroupedGemm, Pointwise
from shapewright.perf.experts import (
    price_grouped_gemm,
    read_idle_row_share,
    read_lone_row_s_per_byte,
    split_evenly,
)
from shapewright.perf.libraries import split_version
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.roofline import roofline_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

_SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
FORMAT = Format(
    numbers=dict.fromkeys(_SIZES, 1),
    labels=("device", "library", "kernel", "dtype", "distribution"),
    positive=("latency_s",),
)
# Tenfold what any model has; what spreads rows over experts holds each of them.
_MOST_EXPERTS = 8192
# Rows between the products stay in 16 bits, whatever the products' format. [byte]
_ACTIVATION_BYTES = 2.0

# (top k, experts) of models whose experts have no gate (Nemotron 3, relu squared). The table does not say so, the times
# do: with a gate their weights would be read at 1.3 times the memory's bandwidth.
_PLAIN_EXPERTS = ((6, 128), (22, 512))
# Libraries that timed them with a gate all the same: weights are read at 0.85 of bandwidth with it, at 0.57 without.
_GATED_LIBRARIES = ("sglang 0.5.10", "vllm 0.14.0")
# Where each token that reaches a device is computed with all its top k rows, those of other devices' experts too: with
# balanced tokens the time stays the same up to top k devices. sglang 0.5.10 does so always, later ones for (2, 8).
_WHOLE_TOKENS_LIBRARY, _WHOLE_TOKENS_FAMILY, _WHOLE_TOKENS_EXPERTS = "sglang 0.5.10", "sglang", (2, 8)
# Whose collector gave rows that rounding leaves over to the timed device: a token takes as long on 16 devices as on 1.
_PACKING_LIBRARY = "vllm 0.14.0"


class Block(NamedTuple):
    """Operations of measured blocks; sizes are arrays over rows of the table.

    Attributes:
        products: gate_up (or up) and down.
        pointwise: Activation and unpermutation of the device's own rows; the products gather them.
        idle_bytes: Traffic that rows of other devices' experts would cause if each were cleared and read. [byte]
        lone_bytes: Rows that are the only one of their token, idle ones too. [byte]
    """

    products: tuple[GroupedGemm, GroupedGemm]
    pointwise: tuple[Pointwise, ...]
    idle_bytes: Array
    lone_bytes: Array


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are distributions of tokens over experts."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        library = f"{words[2]}/{words[3]}"
        form = context.read_format(words[1], device)
        sizes = {name: rows.numbers[name] for name in _SIZES}
        block = block_of(sizes, words[4], form.dtype, words[2], weight_dtype=form.weight_dtype)
        context.note_library("moe", words[2], context.record("moe", device))
        return form.widen(_price_block(block, device, form.dtype, library, context))

    topk, experts, shared = (columns.numbers[name] for name in ("topk", "num_experts", "moe_ep_size"))
    wrong = (topk > experts) | (shared > experts)
    columns = context.leave_out(columns, wrong, "topk or moe_ep_size is above num_experts")
    many = columns.numbers["num_experts"] > _MOST_EXPERTS
    columns = context.leave_out(columns, many, f"num_experts is above {_MOST_EXPERTS:,}")
    by = ("device", "dtype", "library", "kernel", "distribution")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[1], words[2])
        yield from split_chunks("moe", names, rows.labels["distribution"], rows.numbers["latency_s"], prices)


def block_of(
    sizes: dict[str, Array],
    distributions: str | NDArray[np.str_],
    dtype: str,
    library: str,
    *,
    weight_dtype: str | None = None,
) -> Block:
    """Lower measured blocks as a step lowers an expert layer.

    Args:
        sizes: Columns of ``_SIZES``. [rows]
        distributions: How tokens spread over experts: of all rows, or of each. [rows]
        dtype: Element format of the products.
        library: Library and version that was measured.
        weight_dtype: Element format of the weights in memory, where it is another.

    Raises:
        MeasuredFileError: a distribution is unknown.
    """
    tokens, h, inter, topk, experts, tensor, expert = (sizes[name] for name in _SIZES)
    packs = _is_as_old(library, _PACKING_LIBRARY)
    loads = np.empty((3, len(tokens)))
    words = np.broadcast_to(distributions, tokens.shape)
    for word in np.unique(words):
        here = words == word
        groups = [column[here] for column in (tokens, topk, experts, expert)]
        loads[:, here] = busiest_loads(groups, str(word), packs_rest=packs)
    rows, active, reached = loads
    every = np.maximum(tokens * topk, rows)
    takes_whole_tokens = library.startswith(_WHOLE_TOKENS_FAMILY) & _is_any(topk, experts, (_WHOLE_TOKENS_EXPERTS,))
    takes_whole_tokens |= _is_as_old(library, _WHOLE_TOKENS_LIBRARY)
    rows, every = (np.where(takes_whole_tokens, np.maximum(reached * topk, rows), each) for each in (rows, every))
    f = np.ceil(inter / tensor)
    is_plain = _is_any(topk, experts, _PLAIN_EXPERTS) & (not any(_is_as_old(library, old) for old in _GATED_LIBRARIES))
    num_inputs = np.where(is_plain, 1.0, 2.0)
    product: Callable[..., GroupedGemm] = partial(
        GroupedGemm,
        dtype=dtype,
        weight_dtype=weight_dtype,
        m=rows,
        groups=active,
        tokens=tokens,
        experts=np.maximum(experts // expert, 1.0),
        inner=f,
    )
    products = (product(name="gate_up", n=num_inputs * f, k=h), product(name="down", n=h, k=f))
    # Cleared by one kernel and read by the next: outputs of both products; the activation's own output is written.
    idle_elements = (every - rows) * (2.0 * num_inputs * f + f + 2.0 * h)
    lone_elements = np.where(topk == 1, tokens * h, 0.0)
    listed = _pointwise(rows, rows / topk, h, f, num_inputs)
    return Block(products, listed, idle_elements * _ACTIVATION_BYTES, lone_elements * _ACTIVATION_BYTES)


def unlisted_s(block: Block, device: Device, dtype: str, library: str, record: CalibrationRecord) -> Array:
    """What idle and lone rows add to each block. [s]"""
    idle_s = block.idle_bytes * read_idle_row_share(record, dtype, library) / device.memory_bandwidth_bytes_per_s
    return np.asarray(idle_s + block.lone_bytes * read_lone_row_s_per_byte(record, device, dtype, library))


def _is_as_old(library: str, other: str) -> bool:
    """Whether a library is another's version or an older one.

    >>> _is_as_old("vllm 0.13.1", "vllm 0.14.0"), _is_as_old("vllm 0.24.0", "vllm 0.14.0")
    (True, False)
    """
    (name, version), (other_name, other_version) = split_version(library), split_version(other)
    return name == other_name and bool(version) and version <= other_version


def _is_any(topk: Array, experts: Array, pairs: tuple[tuple[int, int], ...]) -> NDArray[np.bool_]:
    """Whether a row has one of the pairs of top k and experts."""
    found: NDArray[np.bool_] = np.logical_or.reduce([(topk == k) & (experts == e) for k, e in pairs])
    return found


def _pointwise(rows: Array, tokens: Array, h: Array, f: Array, num_inputs: Array) -> tuple[Pointwise, ...]:
    """Activation and unpermutation, as lowering counts their traffic."""

    def part(name: str, kind: str, read: Array, written: Array) -> Pointwise:
        return Pointwise(
            name=name,
            operation=kind,
            read_bytes=read * _ACTIVATION_BYTES,
            written_bytes=written * _ACTIVATION_BYTES,
        )

    return (
        part("activation", "activation", num_inputs * rows * f, rows * f),
        part("unpermute", "permute", rows * h, tokens * h),
    )


def _price_block(block: Block, device: Device, dtype: str, library: str, context: Context) -> Prices:
    record, pointwise = context.record("moe", device), context.record("pointwise", device)
    # A benchmark runs one block again and again: what fits the cache is found there.
    products = [price_grouped_gemm(part, device, record, hot_cache=True, library=library) for part in block.products]
    others = [price_pointwise(operation, device, pointwise) for operation in block.pointwise]
    products_s = np.asarray(sum(price.time_s for price in products))
    rest_s = unlisted_s(block, device, dtype, library, record)
    predicted_s = products_s + np.asarray(sum(price.time_s for price in others)) + rest_s
    flops = sum(np.asarray(product.flops) for product in block.products)
    moved = sum(np.asarray(split_evenly(product).num_bytes) for product in block.products)
    # A record's residuals are those of whole blocks, so the ends of its products' intervals hold for all of a block.
    return Prices(
        predicted=predicted_s,
        low=predicted_s * np.asarray(sum(price.low_s for price in products)) / products_s,
        high=predicted_s * np.asarray(sum(price.high_s for price in products)) / products_s,
        roofline=np.asarray(roofline_s(flops, moved, device, dtype)),
    )
