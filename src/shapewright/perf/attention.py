"""Price of fused attention: which kernel runs, its time (perf.attention_kernels) and its interval.

One new token per sequence runs the decode kernel, and so do a few against a longer cache, as long as the query rows of
one key-value head fit a tile. All else, and every backward pass, runs the prefill kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.errors import WorkloadError
from shapewright.hardware import load_device
from shapewright.perf.attention_decode import DecodeParameters, estimate_decode
from shapewright.perf.attention_formats import narrow_kernel
from shapewright.perf.attention_kernels import AttentionRates, AttentionShape
from shapewright.perf.attention_prefill import estimate_prefill
from shapewright.perf.attention_residual import log_correction
from shapewright.perf.attention_sections import (
    ASSUMED_WIDENING,
    Section,
    choose_kernels,
    choose_section,
    kernel_width,
    read_kernel,
)
from shapewright.perf.attention_transfer import ASSUMED_CLOCK_HZ, carry_kernel, decode_section
from shapewright.perf.calibration import ROOFLINE_BOUND
from shapewright.perf.lending import clock_beside_hz, clock_hz_of
from shapewright.perf.price import AttentionPrice, split_rows
from shapewright.perf.roofline import ROOFLINE_HIGH_FACTOR, roofline_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.operations import Attention
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]
    # What to show beside the prices of calls, and which of them it stands beside.
    _Labels = list[tuple[str, NDArray[np.bool_]]]

# FlashAttention needs Ampere's asynchronous copies and bf16; no library fuses attention well before it.
# Source: arXiv 2307.08691 and the flash-attn package's list of GPUs.
_UNFUSED_ARCHITECTURES = ("pascal", "volta", "turing")
# Makers whose chips run tiles on multiprocessors with an exponential unit each; others get their roofline.
_TILE_VENDORS = ("NVIDIA", "AMD")
# Sizes of a call, as operations and AttentionShape name them.
_SIZES = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window_size")


def price_attention(
    operation: Attention,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
    kernel: str = "",
) -> AttentionPrice:
    """Price fused attention.

    Args:
        operation: The call; its sizes are ints, or arrays of one shape.
        device: The device.
        record: A record of kind ``attention``.
        hot_cache: Keys and values that decode reads may lie in the last-level cache from a previous run, as in a
            benchmark; then memory bandwidth is no bound. In a model the other layers have driven them out.
        library: Library and version that runs; of another version than the record knows, its nearest one stands for
            it. Empty for the kernels that price models.
        kernel: Kernel that runs, as libraries spell it, where a library has several for one head width.

    Returns:
        The price; floats for int sizes, arrays for arrays. memory_s of decode is the whole device's
        traffic, or one SM's wait for its key tiles if that is longer.

    Raises:
        WorkloadError: no fused attention exists for the device.
        UnknownRateError: the device has no rate for the dtype.
    """
    columns, labels = _price_columns(operation, device, record, hot_cache=hot_cache, running=(library, kernel))
    values: dict[str, Any] = {name: _plain(column) for name, column in columns.items()}
    return AttentionPrice(calibration=labels[-1][0], **values)


def price_attentions(
    operations: Sequence[Attention], device: Device, record: CalibrationRecord
) -> list[AttentionPrice]:
    """Price many scalar calls, in their order: those alike in all but their sizes share one evaluation."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, call in enumerate(operations):
        alike = (call.dtype, call.kv_cache_dtype, call.causal, call.values_in_keys, call.writes_cache)
        groups.setdefault(alike, []).append(index)
    prices: dict[int, AttentionPrice] = {}
    for indices in groups.values():
        columns, labels = _price_columns(_stack([operations[index] for index in indices]), device, record)
        found = split_rows(AttentionPrice, columns, [_label_of(row, labels) for row in range(len(indices))])
        prices.update(zip(indices, found, strict=True))
    return [prices[index] for index in range(len(operations))]


def _stack(calls: Sequence[Attention]) -> Attention:
    """Scalar calls that differ in sizes and direction alone, as one of arrays."""
    sizes = np.array([[getattr(call, name) for name in _SIZES] for call in calls], dtype=float).T.copy()
    is_backward = np.array([call.is_backward for call in calls])
    return calls[0].changed(is_backward=is_backward, **dict(zip(_SIZES, sizes, strict=True)))


def _label_of(row: int, labels: _Labels) -> str:
    return next(label for label, calls in labels if calls[row])


def _price_columns(
    operation: Attention,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    running: tuple[str, str] = ("", ""),
) -> tuple[dict[str, Array], _Labels]:
    """Fields of AttentionPrice but the label; labels, and which calls have them; ``running`` is library and kernel."""
    if device.architecture in _UNFUSED_ARCHITECTURES:
        raise WorkloadError(
            f"attention='flash' has no kernel for {device.name} ({device.architecture}), it needs ampere or newer; "
            f"use --attention unfused"
        )
    dtype = _arithmetic_dtype(operation.dtype, device)
    moved_bytes = 0.0 if hot_cache else operation.num_bytes
    floor_s = np.asarray(roofline_s(operation.executed_flops, moved_bytes, device, dtype), dtype=float)
    has_tiles = device.vendor in _TILE_VENDORS or "attention" in device.own_records
    if device.roofline_only or device.num_sms is None or not has_tiles:
        return _bound(operation, floor_s, device, dtype), [(ROOFLINE_BOUND, np.ones(floor_s.shape, dtype=bool))]

    kv_dtype = operation.kv_cache_dtype or operation.dtype
    section = choose_section(dtype, get_dtype(kv_dtype).bits, record, *running)
    shape, rates = _shape_of(operation, kv_dtype), _rates_of(device, dtype, record)
    columns: dict[str, Array] = {}
    labels: _Labels = []
    label = record.label if section.is_own else f"{record.label}, fractions of {section.name}"
    for own, calls in _share_calls(operation, shape, device, section, running):
        labels.append((label if own is section else f"{label}, decode of {own.record.id}", calls))
        for name, takers in choose_kernels(shape, own, running[1]).items():
            if (here := calls & takers).any():
                fresh = _estimate(operation, shape, device, rates, (own, name), hot_cache=hot_cache)
                columns = _merge(here, fresh, columns)
    time_s = np.maximum(columns.pop("total_s"), floor_s)
    widening = np.where(operation.is_backward, ASSUMED_WIDENING, 1.0)
    low, high = columns.pop("low") ** widening, columns.pop("high") ** widening
    return {
        "time_s": time_s,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "roofline_s": floor_s,
        **columns,
    }, labels


def _rates_of(device: Device, dtype: str, record: CalibrationRecord) -> AttentionRates:
    """What the device does at most; its clock beside that of the record's device where the record is borrowed."""
    is_own = record.transfer == "exact"
    clock_hz = clock_hz_of(device) if is_own else clock_beside_hz(device, load_device(record.device))
    return AttentionRates(
        flops_per_s=device.peak_flops_per_s(dtype),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 0),
        clock_hz=clock_hz or ASSUMED_CLOCK_HZ,
        l2_bytes=device.l2_bytes or 0.0,
    )


def _share_calls(
    operation: Attention, shape: AttentionShape, device: Device, section: Section, running: tuple[str, str]
) -> list[tuple[Section, NDArray[np.bool_]]]:
    """Sections that price the calls, and which: one for all, but where another family lends decode kernels."""
    every = np.ones(shape.query_len.shape, dtype=bool)
    lent = decode_section(section, *running, device)
    if lent is None:
        return [(section, every)]
    is_decode = _runs_decode_kernel(operation, shape, read_kernel(section, section.content["usual_kernel"])[1])
    shares = ((section, ~is_decode), (lent, is_decode))
    return [(own, calls) for own, calls in shares if calls.any()]


def _estimate(
    operation: Attention,
    shape: AttentionShape,
    device: Device,
    rates: AttentionRates,
    kernel: tuple[Section, str],
    *,
    hot_cache: bool,
) -> dict[str, Array]:
    """Times and interval factors of one kernel of a section; each formula runs only where some call needs it."""
    section, name = kernel
    prefill, decode = read_kernel(section, name)
    prefill, decode = carry_kernel(narrow_kernel(prefill, section), decode, device, rates, section.record)
    is_decode = _runs_decode_kernel(operation, shape, decode)
    copies = operation.writes_cache
    columns: dict[str, Array] = {}
    for phase, needed in (("prefill", np.logical_not(is_decode)), ("decode", is_decode)):
        if not needed.any():
            continue
        if phase == "prefill":
            times = estimate_prefill(shape, rates, prefill, writes_cache=copies, is_backward=operation.is_backward)
        else:
            times = estimate_decode(
                shape,
                rates,
                decode,
                writes_cache=copies,
                hot_cache=hot_cache,
                head_dims=prefill.kernel_head_dims,
            )
        interval = section.interval(name, phase)
        low, high = interval.factors(times.total_s)
        total_s, correction = times.total_s, np.ones_like(times.total_s)
        forward = np.logical_not(operation.is_backward)
        learned = section.residual(name, phase) if forward.any() else None
        if learned is not None:
            table, near = learned
            logs, weight = log_correction(table, shape, kernel_width(name), is_decode=phase == "decode", where=forward)
            correction = np.exp(logs)
            total_s = total_s * correction
            near_low, near_high = near.factors(total_s)
            low, high = near_low**weight * low ** (1.0 - weight), near_high**weight * high ** (1.0 - weight)
        fresh = {
            "total_s": total_s,
            "correction": correction,
            "compute_s": times.compute_s,
            "memory_s": times.memory_s,
            "start_s": times.start_s,
            "low": low,
            "high": high,
            "shared_error": interval.shared_error(times.total_s),
        }
        columns = _merge(needed, fresh, columns)
    return columns


def _merge(where: NDArray[np.bool_], fresh: dict[str, Array], columns: dict[str, Array]) -> dict[str, Array]:
    """Put fresh values in their places; the first ones may fill every place, later ones overwrite."""
    if not columns:
        return fresh
    return {key: np.where(where, value, columns[key]) for key, value in fresh.items()}


def _runs_decode_kernel(operation: Attention, shape: AttentionShape, decode: DecodeParameters) -> NDArray[np.bool_]:
    """Where the library takes its decode kernel."""
    rows = shape.query_len * shape.num_heads / shape.num_kv_heads
    few = (rows <= decode.query_tile) & (shape.kv_len > shape.query_len)
    return np.asarray(((shape.query_len == 1.0) | few) & np.logical_not(operation.is_backward))


def _arithmetic_dtype(dtype: str, device: Device) -> str:
    """Element format of the products: int8, int4 and fp4 models keep their attention in 16 bits."""
    if dtype in ("int8", "int4", "fp4"):
        return "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
    return dtype


def _shape_of(operation: Attention, kv_dtype: str) -> AttentionShape:
    """Sizes as float arrays of one shape."""
    arrays = [np.asarray(getattr(operation, name), dtype=float) for name in _SIZES]
    if len({array.shape for array in arrays}) > 1:
        arrays = list(np.broadcast_arrays(*arrays))
    columns: dict[str, Any] = dict(zip(_SIZES, arrays, strict=True))
    return AttentionShape(
        causal=operation.causal,
        element_bytes=get_dtype(operation.dtype).num_bytes,
        kv_element_bytes=get_dtype(kv_dtype).num_bytes,
        values_in_keys=operation.values_in_keys,
        **columns,
    )


def _bound(operation: Attention, floor_s: Array, device: Device, dtype: str) -> dict[str, Array]:
    """Columns of the roofline of a device whose kernels are not modelled."""
    return {
        "time_s": floor_s,
        "low_s": floor_s,
        "high_s": floor_s * ROOFLINE_HIGH_FACTOR,
        "compute_s": np.asarray(operation.executed_flops / device.peak_flops_per_s(dtype)),
        "memory_s": np.asarray(operation.num_bytes / device.memory_bandwidth_bytes_per_s),
        "start_s": np.zeros_like(floor_s),
        "correction": np.ones_like(floor_s),
        "roofline_s": floor_s,
        "shared_error": np.zeros_like(floor_s),
    }


def _plain(value: Array) -> Any:
    """A float for a scalar, the array itself otherwise."""
    return float(value) if np.ndim(value) == 0 else value
