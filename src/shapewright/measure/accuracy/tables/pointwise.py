"""Evaluate tables of elementwise and row-wise operations.

- pointwise.parquet: norms, rotary positions, activations, residual additions and embeddings of models, 2024.
- pointwise_fp32.parquet: fp32 elementwise operations, layer norm and softmax, each with its launch. A call takes the
  host's time before the launch, then that of the kernel or of the host, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.chunk import Chunk, Labels, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.gemm import FP32_LIBRARY
from shapewright.pricing.calibration.records import FP32_POINTWISE, list_records
from shapewright.pricing.gemm.kernels import join_s
from shapewright.pricing.pointwise import price_pointwise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

    Array = NDArray[np.float64]

SIZES = (
    "num_tokens", "hidden_size", "intermediate_size", "gated", "num_heads", "num_kv_heads", "tensor_parallel",
)  # fmt: skip
FORMAT = Format(
    numbers={**dict.fromkeys(SIZES, 1), "gated": 0},
    labels=("device", "library", "model", "operation", "dtype"),
    positive=("latency_s",),
)
# Name in the table -> kind of the package.
KIND_OF = {
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
        element_bytes = get_dtype(context.read_stored_format(words[1]).dtype).num_bytes
        operation = operation_of(rows.numbers, words[3], words[4], element_bytes)
        found = price_pointwise(operation, device, context.record("pointwise", device))
        return prices_of(found, found.roofline_s)

    by = ("device", "dtype", "library", "operation", "model")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[1], words[2])
        parts = rows.labels["model"].join(rows.labels["operation"])
        yield from split_chunks("pointwise", names, parts, rows.numbers["latency_s"], prices)


def adds_two_branches(model: str) -> bool:
    """Whether a model's residual addition represents two, by its name.

    >>> adds_two_branches("phi-2"), adds_two_branches("Llama-2-7b-hf")
    (True, False)
    """
    return model.rpartition("/")[2].lower().startswith(_TWO_BRANCHES)


def operation_of(sizes: Mapping[str, Any], name: str, model: str, element_bytes: float) -> Pointwise:
    """Return the operation of each row of a model, with the bytes that lowering counts.

    Norm, residual and embedding touch tokens x h elements; the activation tokens x f / t, read twice with a gate;
    rotary positions tokens x (a + a_kv) / t heads. Models without a gate have LayerNorm.

    Raises:
        MeasuredFileError: the operation is unknown.
    """
    if name not in KIND_OF:
        raise MeasuredFileError(f"unknown operation {name!r}; known are {', '.join(KIND_OF)}")
    tokens, h, f, gated, heads, kv_heads, shards = (sizes[size] for size in SIZES)
    kind, num_kernels = KIND_OF[name], 1
    width, inputs = h, np.ones_like(h)
    if name == "input_layernorm" and not np.all(gated):
        kind = "layernorm"
    elif name == "add" and adds_two_branches(model):
        num_kernels = 2
    if name == "attn_rope":
        width = (heads + kv_heads) * (h / heads) / shards
    elif name == "mlp_act":
        width, inputs = f / shards, 1.0 + gated
    elif name == "add":
        inputs = np.full_like(h, 2.0)
    written = num_kernels * tokens * width * element_bytes
    return Pointwise(
        name=name, operation=kind, read_bytes=inputs * written, written_bytes=written, num_kernels=num_kernels
    )


FP32_FORMAT = Format(numbers={"rows": 1, "columns": 1}, labels=("device", "operation"), positive=("latency_s",))
ELEMENT_BYTES = 4.0
# Operations of two tensors; all others read one.
_TWO_TENSORS = ("add", "mul", "div", "pow")
# Operations that reduce over a row, whose kernel depends on its width: bands up to these columns, and beyond.
_ROW_WISE = ("layer_norm", "softmax")
_WIDTHS = (512.0, 1024.0, 2048.0, 4096.0)
_BEYOND = "more"
# Steepness of the larger of kernel and host.
_HIDING_POWER = 6.0


def kind_names(names: NDArray[np.str_], columns: Array) -> NDArray[np.str_]:
    """Return the kind of each row in a record: the operation, and for row-wise ones the band of its width.

    >>> kind_names(np.array(["add", "softmax", "softmax"]), np.array([64.0, 600.0, 9000.0])).tolist()
    ['add', 'softmax to 1024', 'softmax more']
    """
    bands = np.array([f" to {width:.0f}" for width in _WIDTHS] + [f" {_BEYOND}"])[np.searchsorted(_WIDTHS, columns)]
    return np.where(np.isin(names, _ROW_WISE), np.char.add(names, bands), names)


def bytes_of(names: NDArray[np.str_], elements: Array) -> Array:
    """Return the bytes that each row reads and writes once. [byte]"""
    tensors = np.where(np.isin(names, _TWO_TENSORS), 3.0, 2.0)
    num_bytes: Array = tensors * ELEMENT_BYTES * elements
    return num_bytes


class Launch(NamedTuple):
    """Cost of launching a kernel between two events.

    Attributes:
        launch_s: Time of a call whose kernel takes none. [s]
        hidden_s: The part of it after the launch, during which the kernel already runs. [s]
        low: 5 % quantile of measured over predicted time where the launch counts.
        high: Its 95 % quantile.
    """

    launch_s: float
    hidden_s: float
    low: float
    high: float


def with_launch(kernel_s: Array, launch_s: Array | float, hidden_s: float) -> Array:
    """Time between the events around kernels. [s]

    Args:
        kernel_s: Times of the kernels. [s]
        launch_s: Time of a call whose kernel takes none. [s]
        hidden_s: The part of it after the launch, during which the kernel runs. [s]
    """
    timed_s: Array = launch_s - hidden_s + join_s(kernel_s, np.full_like(kernel_s, hidden_s), _HIDING_POWER)
    return timed_s


def price_fp32(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are operations."""
    height, width = (columns.numbers[name] for name in ("rows", "columns"))
    operations = columns.labels["operation"].values
    kinds, codes = np.unique(kind_names(operations, width), return_inverse=True)
    columns = replace(
        columns,
        numbers={**columns.numbers, "num_bytes": bytes_of(operations, height * width)},
        labels={**columns.labels, "kind": Labels(codes.reshape(-1).astype(np.int64), tuple(kinds.tolist()))},
    )

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        record = context.record(FP32_POINTWISE, device)
        known = record.parameters["kinds"]
        kind = _nearest_kind(words[1], known)
        if not kind:
            raise MeasuredFileError(f"unknown operation {words[1]!r}; known are {', '.join(known)}")
        half = rows.numbers["num_bytes"] / 2.0
        operation = Pointwise(name="x", dtype="fp32", operation=kind, read_bytes=half, written_bytes=half)
        found = price_pointwise(operation, device, record)
        launch = find_pointwise_launch(words[1], device)
        bare = prices_of(found, found.roofline_s)
        predicted, low, high = (
            with_launch(end, launch.launch_s * spread, launch.hidden_s * spread)
            for end, spread in ((bare.predicted, 1.0), (bare.low, launch.low), (bare.high, launch.high))
        )
        return bare._replace(predicted=predicted, low=low, high=high)

    for rows, device, words, prices in context.price_groups(columns, ("device", "kind"), price_group):
        names, operation = (device.name, "fp32", FP32_LIBRARY), words[1].partition(" ")[0]
        yield from split_chunks("pointwise_fp32", names, operation, rows.numbers["latency_s"], prices)


def _nearest_kind(kind: str, known: Mapping[str, Any]) -> str:
    """Return a kind of a record: itself, else the operation's widest band there; empty where it has none."""
    if kind in known or kind == "gelu":  # A100 80 GB lacks gelu, which streams like relu
        return kind if kind in known else "relu"
    bands = [f"{kind.partition(' ')[0]} to {width:.0f}" for width in _WIDTHS]
    return next((band for band in reversed(bands) if band in known), "")


def find_pointwise_launch(kind: str, device: Device) -> Launch:
    """Return the launch of a kind on a device; without a record of its own the mean, and the spread, of all devices."""
    records = list_records(FP32_POINTWISE)
    own = [record for record in records if device.name in record.devices] or records
    reports = [record.provenance["report"] for record in own]
    known = [(report, nearest) for report in reports if (nearest := _nearest_kind(kind, report["launch_s"]))]
    costs = np.array([report["launch_s"][nearest] for report, nearest in known])
    spreads = np.array([report["launch_spread"] for report, _ in known])
    typical = float(np.exp(np.log(costs).mean()))
    low, high = float(spreads[:, 0].min() * costs.min()), float(spreads[:, 1].max() * costs.max())
    return Launch(typical, float(np.mean([report["hidden_s"] for report, _ in known])), low / typical, high / typical)
