"""Evaluate moe.parquet: a whole expert block without its router, on the busiest device of its expert group.

    block = gate_up + activation + down + unpermute + idle rows + lone rows

The parts are those to which a step is lowered, with the rows of the busiest device; tensor sharding divides inter_size.
Idle rows occur in benchmarks only: libraries that run an expert group without an exchange keep the rows of all tokens
in their buffers, where the GEMMs clear what they do not compute and the next kernel reads it. Lone rows are those of
top-1 tokens, which vllm sums as if there were several.

Distribution of a benchmark's tokens over experts:

Balanced: tokens cycle through the experts, so every device gets the same rows, and min(experts, rows) experts get one.

Power law: each expert draws a weight x from p(x) ~ x^-alpha between two ends, rows follow the weights, no expert gets
more rows than there are tokens, and the device with most rows is timed. Here weights are at the middles of equal shares
of probability, and devices are filled in shuffled orders; their busiest is averaged. Rows left by rounding go to the
experts with fewest rows: measured times show more experts in use than round to a row.

Source: the procedure that ai-dynamo/aiconfigurator's collector describes for ``power_law_<alpha>``; its ends are 1 and
0.8 tokens, or 0.01 and 2 if there are no more rows than experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.lowering.operations.gemm import GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.chunk import Chunk, Prices, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.calibration.libraries import split_version
from shapewright.pricing.experts.price import (
    price_grouped_gemm,
    read_idle_row_share,
    read_lone_row_s_per_byte,
    split_evenly,
)
from shapewright.pricing.pointwise import price_pointwise
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.pricing.calibration.records import CalibrationRecord

    Array = NDArray[np.float64]

POWER_LAW = "power_law"
# Names of an even distribution.
BALANCED = ("balanced", "uniform")
# Above this exponent one expert has all rows, and powers of its weights overflow.
_LARGEST_EXPONENT = 20.0
_NUM_SHUFFLES = 16
# With more distinct groups, tokens are rounded to steps of 1/16 in their logarithm, except small counts.
_MOST_EXACT, _STEPS_PER_E, _EXACT_TOKENS = 6_000, 16.0, 64.0


class Load(NamedTuple):
    """Load of a device's experts.

    Attributes:
        rows: Rows of the busiest device.
        experts: Its experts with at least one row.
        tokens: Tokens with a row there.
    """

    rows: float
    experts: float
    tokens: float


def busiest_loads(groups: Sequence[Array], distribution: str, *, packs_rest: bool = False) -> Array:
    """Return the loads of many expert groups, as rows of ``Load``; shape [3, groups].

    Each distinct group is computed once. With more than _MOST_EXACT of them, token counts are rounded by up to 3 %, and
    rows and tokens of the result scaled back.

    Args:
        groups: Tokens, experts per token, experts, and devices that share them, of each group. [groups]

    Raises:
        MeasuredFileError: the distribution is unknown.
    """
    distinct, places = np.unique(np.stack(groups, axis=1), axis=0, return_inverse=True)
    scale = np.ones(len(distinct))
    if len(distinct) > _MOST_EXACT:
        tokens = distinct[:, 0].copy()
        rounded = np.round(np.exp(np.round(np.log(tokens) * _STEPS_PER_E) / _STEPS_PER_E))
        distinct[:, 0] = np.where(tokens > _EXACT_TOKENS, rounded, tokens)
        scale = tokens / distinct[:, 0]
    loads = np.array(
        [
            busiest_load(int(tokens), int(topk), int(experts), int(devices), distribution, packs_rest=packs_rest)
            for tokens, topk, experts, devices in distinct.tolist()
        ]
    )
    loads = loads.reshape(-1, 3)
    loads[:, [0, 2]] *= scale[:, None]
    found: Array = loads[places.reshape(-1)].T
    return found


@cache
def busiest_load(
    num_tokens: int, topk: int, num_experts: int, num_devices: int, distribution: str, *, packs_rest: bool = False
) -> Load:
    """Return rows and active experts of the busiest device of an expert group.

    Args:
        num_tokens: Tokens of the whole group.
        num_experts: Experts of the whole group.
        num_devices: Devices that share them.
        distribution: ``balanced`` or ``uniform``, or ``power_law_`` and the exponent.
        packs_rest: Rows left by rounding go to the timed device's experts, instead of to all with the fewest.

    Raises:
        MeasuredFileError: the distribution is unknown.
    """
    rows = num_tokens * topk
    local = max(num_experts // num_devices, 1)
    if distribution in BALANCED:
        share = max(rows / num_devices, 1.0)
        # Adjacent experts go to different tokens, so a token visits each device once before it returns.
        return Load(share, min(float(local), share), min(float(num_tokens), share))
    alpha = _read_exponent(distribution)
    ends = (1.0, max(0.8 * num_tokens, 1.0)) if rows > num_experts else (0.01, 2.0)
    per_expert, rest = _spread(rows, num_tokens, num_experts, alpha, ends)
    packed = min(rest, local) if packs_rest else 0
    if not per_expert.any():
        # With so few rows that every expert's round to zero, they are packed, or distributed evenly.
        if packs_rest:
            return Load(float(packed), float(packed), float(min(packed, num_tokens)))
        return busiest_load(num_tokens, topk, num_experts, num_devices, "balanced")
    if not packs_rest:
        per_expert[:rest] += 1.0
    shuffled = np.random.default_rng(0).permuted(np.tile(per_expert, (_NUM_SHUFFLES, 1)), axis=1)
    devices = shuffled[:, : local * num_devices].reshape(_NUM_SHUFFLES, num_devices, local)
    busiest = devices[np.arange(_NUM_SHUFFLES), devices.sum(axis=2).argmax(axis=1)]
    busiest[:, :packed] += 1.0
    # Experts choose tokens independently.
    reached = num_tokens * (1.0 - np.prod(1.0 - np.minimum(busiest / num_tokens, 1.0), axis=1))
    means = (busiest.sum(axis=1).mean(), (busiest > 0.0).sum(axis=1).mean(), reached.mean())
    return Load(*(max(float(mean), 1.0) for mean in means))


def _read_exponent(distribution: str) -> float:
    """Return the exponent of ``power_law_<alpha>``.

    Raises:
        MeasuredFileError: the name is another.
    """
    prefix, _, word = distribution.rpartition("_")
    try:
        alpha = float(word)
    except ValueError:
        alpha = np.inf
    if prefix != POWER_LAW or not abs(alpha) <= _LARGEST_EXPONENT:
        raise MeasuredFileError(
            f"unknown distribution {distribution!r}; known are {', '.join(BALANCED)} and power_law_<alpha>, "
            f"alpha up to {_LARGEST_EXPONENT:g}"
        )
    return alpha


def _spread(rows: int, most: int, num_experts: int, alpha: float, ends: tuple[float, float]) -> tuple[Array, int]:
    """Return integer rows of each expert, largest last, and the rows left by rounding; shape [experts]."""
    middles = (np.arange(num_experts) + 0.5) / num_experts
    if alpha == 1.0:  # the limit of the general case
        weights = ends[0] * (ends[1] / ends[0]) ** middles
    else:
        low, high = (end ** (1.0 - alpha) for end in ends)
        weights = (low + (high - low) * middles) ** (1.0 / (1.0 - alpha))
    # Experts at the limit leave the rest to the others; each pass finds more of them, from the largest down.
    num_full = 0
    while num_full < num_experts:
        scale = (rows - most * num_full) / weights[: num_experts - num_full].sum()
        reached = int(np.count_nonzero(weights * scale > most))
        if reached <= num_full:
            break
        num_full = reached
    spread: Array = np.round(np.minimum(weights * scale, most))
    rest = int(rows - spread.sum())
    # Rows that rounding added are taken back from the largest.
    spread[num_experts + min(rest, 0) :] -= 1.0
    return spread, max(rest, 0)


_SIZES = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
FORMAT = Format(
    numbers=dict.fromkeys(_SIZES, 1),
    labels=("device", "library", "kernel", "dtype", "distribution"),
    positive=("latency_s",),
)
# Ten times the experts of any model; the distribution holds one entry per expert.
_MOST_EXPERTS = 8192
# Rows between the GEMMs stay in 16 bits, whatever the GEMMs' format. [byte]
_ACTIVATION_BYTES = 2.0

# (top k, experts) of models whose experts have no gate (Nemotron 3, relu squared). The table does not state it: with a
# gate the measured times would mean reading weights at 1.3 times the memory bandwidth.
_PLAIN_EXPERTS = ((6, 128), (22, 512))
# Libraries that timed them with a gate: weights are read at 0.85 of the bandwidth with it, at 0.57 without.
_GATED_LIBRARIES = ("sglang 0.5.10", "vllm 0.14.0")
# Libraries in which each token that reaches a device is computed with all its top-k rows, those of other devices'
# experts included: with balanced tokens the time is constant up to top-k devices. sglang 0.5.10 always does so, later
# versions for (2, 8).
_WHOLE_TOKENS_LIBRARY, _WHOLE_TOKENS_FAMILY, _WHOLE_TOKENS_EXPERTS = "sglang 0.5.10", "sglang", (2, 8)
# Library whose collector gave the rows left by rounding to the timed device: one token takes as long on 16 devices as
# on 1.
_PACKING_LIBRARY = "vllm 0.14.0"


class Block(NamedTuple):
    """Operations of measured blocks; sizes are arrays over rows of the table.

    Attributes:
        gemms: gate_up (or up) and down.
        pointwise: Activation and unpermutation of the device's own rows; the GEMMs gather them.
        idle_bytes: Traffic of clearing and reading the rows of other devices' experts. [byte]
        lone_bytes: Rows that are the only one of their token, idle ones included. [byte]
    """

    gemms: tuple[GroupedGemm, GroupedGemm]
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
    columns = context.skip_rows(columns, wrong, "topk or moe_ep_size is above num_experts")
    many = columns.numbers["num_experts"] > _MOST_EXPERTS
    columns = context.skip_rows(columns, many, f"num_experts is above {_MOST_EXPERTS:,}")
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
        distributions: Distribution of tokens over experts: of all rows, or of each. [rows]
        weight_dtype: Element format of the stored weights, if it is another.

    Raises:
        MeasuredFileError: a distribution is unknown.
    """
    tokens, h, inter, topk, experts, tensor, expert = (sizes[name] for name in _SIZES)
    packs = _is_up_to(library, _PACKING_LIBRARY)
    loads = np.empty((3, len(tokens)))
    words = np.broadcast_to(distributions, tokens.shape)
    for word in np.unique(words):
        here = words == word
        groups = [column[here] for column in (tokens, topk, experts, expert)]
        loads[:, here] = busiest_loads(groups, str(word), packs_rest=packs)
    rows, active, reached = loads
    every = np.maximum(tokens * topk, rows)
    takes_whole_tokens = library.startswith(_WHOLE_TOKENS_FAMILY) & _is_any(topk, experts, (_WHOLE_TOKENS_EXPERTS,))
    takes_whole_tokens |= _is_up_to(library, _WHOLE_TOKENS_LIBRARY)
    rows, every = (np.where(takes_whole_tokens, np.maximum(reached * topk, rows), each) for each in (rows, every))
    f = np.ceil(inter / tensor)
    is_plain = _is_any(topk, experts, _PLAIN_EXPERTS) & (not any(_is_up_to(library, old) for old in _GATED_LIBRARIES))
    num_inputs = np.where(is_plain, 1.0, 2.0)
    gemm: Callable[..., GroupedGemm] = partial(
        GroupedGemm,
        dtype=dtype,
        weight_dtype=weight_dtype,
        m=rows,
        groups=active,
        tokens=tokens,
        experts=np.maximum(experts // expert, 1.0),
        inner=f,
    )
    gemms = (gemm(name="gate_up", n=num_inputs * f, k=h), gemm(name="down", n=h, k=f))
    # Outputs of both GEMMs are cleared by one kernel and read by the next; the activation's own output is written.
    idle_elements = (every - rows) * (2.0 * num_inputs * f + f + 2.0 * h)
    lone_elements = np.where(topk == 1, tokens * h, 0.0)
    listed = _pointwise(rows, rows / topk, h, f, num_inputs)
    return Block(gemms, listed, idle_elements * _ACTIVATION_BYTES, lone_elements * _ACTIVATION_BYTES)


def unlisted_s(block: Block, device: Device, dtype: str, library: str, record: CalibrationRecord) -> Array:
    """Return the time that idle and lone rows add to each block. [s]"""
    idle_s = block.idle_bytes * read_idle_row_share(record, dtype, library) / device.memory_bandwidth_bytes_per_s
    return np.asarray(idle_s + block.lone_bytes * read_lone_row_s_per_byte(record, device, dtype, library))


def _is_up_to(library: str, other: str) -> bool:
    """Whether a library is another's version or an older one.

    >>> _is_up_to("vllm 0.13.1", "vllm 0.14.0"), _is_up_to("vllm 0.24.0", "vllm 0.14.0")
    (True, False)
    """
    (name, version), (other_name, other_version) = split_version(library), split_version(other)
    return name == other_name and bool(version) and version <= other_version


def _is_any(topk: Array, experts: Array, pairs: tuple[tuple[int, int], ...]) -> NDArray[np.bool_]:
    """Whether each row has one of the pairs of top k and experts."""
    found: NDArray[np.bool_] = np.logical_or.reduce([(topk == k) & (experts == e) for k, e in pairs])
    return found


def _pointwise(rows: Array, tokens: Array, h: Array, f: Array, num_inputs: Array) -> tuple[Pointwise, ...]:
    """Return activation and unpermutation, with their traffic as lowering counts it."""

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
    # A benchmark repeats one block: operands that fit the cache are found there.
    gemms = [price_grouped_gemm(part, device, record, hot_cache=True, library=library) for part in block.gemms]
    others = [price_pointwise(operation, device, pointwise) for operation in block.pointwise]
    gemms_s = np.asarray(sum(price.time_s for price in gemms))
    rest_s = unlisted_s(block, device, dtype, library, record)
    predicted_s = gemms_s + np.asarray(sum(price.time_s for price in others)) + rest_s
    flops = sum(np.asarray(gemm.flops) for gemm in block.gemms)
    moved = sum(np.asarray(split_evenly(gemm).num_bytes) for gemm in block.gemms)
    # A record's residuals are those of whole blocks, so the relative ends of its GEMMs' intervals apply to the block.
    return Prices(
        predicted=predicted_s,
        low=predicted_s * np.asarray(sum(price.low_s for price in gemms)) / gemms_s,
        high=predicted_s * np.asarray(sum(price.high_s for price in gemms)) / gemms_s,
        roofline=np.asarray(roofline_s(flops, moved, device, dtype)),
    )
