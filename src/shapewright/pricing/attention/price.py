"""Time of fused attention (flash attention): kernel choice, time (attention.prefill, attention.decode), interval.

One new token per sequence runs the decode kernel, and so do a few against a longer cache, as long as the query rows of
one key-value head fit a tile. Everything else, and every backward pass, runs the prefill kernel.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.core.texts import with_fields
from shapewright.hardware.architectures import GPU_VENDORS
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.pricing.attention.decode import DecodeParameters, estimate_decode
from shapewright.pricing.attention.kernels import CALL_SIZES, AttentionRates, AttentionShape
from shapewright.pricing.attention.measured import measured_kind, measured_record, price_measured_attention
from shapewright.pricing.attention.prefill import estimate_prefill
from shapewright.pricing.attention.residual import log_correction
from shapewright.pricing.attention.sections import (
    ASSUMED_BACKWARD_ERROR,
    ASSUMED_WIDENING,
    Section,
    choose_kernels,
    choose_section,
    kernel_width,
    read_kernel,
)
from shapewright.pricing.attention.transfer import ASSUMED_CLOCK_HZ, decode_section, to_fp8_kernel, transfer_kernel
from shapewright.pricing.calibration.intervals import widen_by_error
from shapewright.pricing.calibration.records import CalibrationRecord, load_record
from shapewright.pricing.calibration.source import ROOFLINE_BOUND
from shapewright.pricing.calibration.transfer import clock_hz_of, comparable_clock_hz
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.pointwise import price_pointwise
from shapewright.pricing.price import ROOFLINE_HIGH_FACTOR, AttentionPrice, roofline_s, split_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.attention import Attention
    from shapewright.pricing.calibration.source import CalibrationSource

    PerCall = Float[np.ndarray, "*calls"]
    CallMask = Bool[np.ndarray, "*calls"]
    # Sources of prices, and the calls that each of them prices.
    _Sources = list[tuple[CalibrationSource, CallMask]]

# Time of PyTorch's attention to several queries on a CPU over that of its GEMMs at the rates of large ones, forward and
# backward: means of 19 calls each of the attention suite on one Xeon thread, which no other machine has confirmed.
_SMALL_GEMM_FACTORS = (2.3, 3.2)


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
        record: A record of kind ``attention``.
        hot_cache: Whether the keys and values of decode may lie in the last-level cache from a previous run, as in a
            benchmark; then memory bandwidth is not a bound. In a model, other layers evict them.
        library: Running library and version; an unmeasured version is priced as its nearest one. Empty for the kernels
            that price models.
        kernel: Running kernel, as libraries spell it, where a library has several for one head width.

    Returns:
        The price; floats for int sizes, arrays for arrays. memory_s of decode is the whole device's traffic, or one
        SM's wait for its key tiles if that is longer.

    Raises:
        WorkloadError: the device has no fused attention kernel.
        UnknownRateError: the device has no rate for the dtype.
    """
    columns, sources = _price_columns(operation, device, record, hot_cache=hot_cache, running=(library, kernel))
    values: dict[str, Any] = {name: _plain(column) for name, column in columns.items()}
    return AttentionPrice(calibration=sources[-1][0], **values)


def price_attentions(
    operations: Sequence[Attention], device: Device, record: CalibrationRecord
) -> list[AttentionPrice]:
    """Price many scalar calls, in their order; calls that differ only in sizes are evaluated together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, call in enumerate(operations):
        alike: tuple[object, ...] = (call.dtype, call.kv_cache_dtype, call.causal, call.values_in_keys)
        kind = measured_kind(call)
        alike = (*alike, call.writes_cache, call.is_training, kind)
        if kind:
            alike = (*alike, call.is_deterministic, call.is_backward, call.head_dim, call.v_head_dim)
        groups.setdefault(alike, []).append(index)
    prices: dict[int, AttentionPrice] = {}
    for indices in groups.values():
        columns, sources = _price_columns(_stack([operations[index] for index in indices]), device, record)
        found = split_rows(AttentionPrice, columns, [_source_of(row, sources) for row in range(len(indices))])
        prices.update(zip(indices, found, strict=True))
    return [prices[index] for index in range(len(operations))]


def _stack(calls: Sequence[Attention]) -> Attention:
    """Stack scalar calls that differ only in sizes and direction into one call of arrays."""
    sizes = np.array([[getattr(call, name) for name in CALL_SIZES] for call in calls], dtype=float).T.copy()
    is_backward = np.array([call.is_backward for call in calls])
    return calls[0].changed(is_backward=is_backward, **dict(zip(CALL_SIZES, sizes, strict=True)))


def _source_of(row: int, sources: _Sources) -> CalibrationSource:
    return next(source for source, calls in sources if calls[row])


def _price_columns(
    operation: Attention,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    running: tuple[str, str] = ("", ""),
) -> tuple[dict[str, PerCall], _Sources]:
    """Fields of AttentionPrice but ``calibration``, and the calls of each source; ``running``: library and kernel."""
    if not device.architecture_facts.has_fused_attention:
        raise WorkloadError(
            f"attention='flash' has no kernel for {device.name} ({device.architecture}), it needs ampere or newer",
            advice=with_fields("use {attention:unfused}"),
        )
    if not any(running) and (kernels := measured_record(operation, device, record)) is not None:
        return _price_measured(operation, device, kernels)
    dtype = _arithmetic_dtype(operation.dtype, device)
    moved_bytes = 0.0 if hot_cache else operation.num_bytes
    floor_s = np.asarray(roofline_s(operation.executed_flops, moved_bytes, device, dtype), dtype=float)
    # Other vendors' chips have no exponential unit per multiprocessor: they get their roofline.
    has_tiles = device.vendor in GPU_VENDORS or "attention" in device.own_records
    if device.roofline_only or device.num_sms is None or not has_tiles:
        columns = _bound(operation, floor_s, device, dtype)
        source = ROOFLINE_BOUND
        if own_gemms := device.own_records.get("gemm"):
            assert isinstance(own_gemms, CalibrationRecord)
            columns, source = _by_own_gemms(operation, columns, device, own_gemms), own_gemms.source
        return columns, [(source, np.ones(floor_s.shape, dtype=bool))]

    kv_dtype = operation.kv_cache_dtype or operation.dtype
    section = choose_section(dtype, get_dtype(kv_dtype).bits, record, *running)
    shape, rates = _shape_of(operation, kv_dtype), _rates_of(device, dtype, record)
    columns = {}
    sources: _Sources = []
    source = record.source if section.is_own else replace(record.source, fractions_of=section.name)
    for own, calls in _share_calls(operation, shape, device, section, running):
        sources.append((source if own is section else replace(source, decode_record_id=own.record.id), calls))
        for name, takers in choose_kernels(shape, own, running[1]).items():
            if (here := calls & takers).any():
                fresh = _estimate(operation, shape, device, rates, (own, name), hot_cache=hot_cache)
                columns = _merge(here, fresh, columns)
    time_s = np.maximum(columns.pop("total_s"), floor_s)
    low, high = columns.pop("low"), columns.pop("high")
    if np.any(operation.is_backward):
        # A user's record has a measured backward pass.
        error = 1.0 if device.own_records.get("attention") is record else ASSUMED_BACKWARD_ERROR
        wide_low, wide_high = widen_by_error((low, high), np.log(error))
        low = np.where(operation.is_backward, np.minimum(low**ASSUMED_WIDENING, wide_low), low)
        high = np.where(operation.is_backward, np.maximum(high**ASSUMED_WIDENING, wide_high), high)
    return {
        "time_s": time_s,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "roofline_s": floor_s,
        **columns,
    }, sources


def _price_measured(
    operation: Attention, device: Device, kernels: CalibrationRecord
) -> tuple[dict[str, PerCall], _Sources]:
    """Return the same for kernels with records of their own."""
    price = price_measured_attention(operation, device, kernels)
    shape = np.broadcast_shapes(*(np.shape(getattr(operation, name)) for name in CALL_SIZES))
    names = [each.name for each in fields(price) if each.name != "calibration"]
    values = {name: np.asarray(getattr(price, name), dtype=float) for name in names}
    columns = {name: np.broadcast_to(value, np.shape(price.time_s)).reshape(shape) for name, value in values.items()}
    return columns | {"correction": np.ones(shape)}, [(price.calibration, np.ones(shape, dtype=bool))]


def _rates_of(device: Device, dtype: str, record: CalibrationRecord) -> AttentionRates:
    """Rates of the device; its clock is counted as on the donor's data sheet where the record is borrowed."""
    is_own = record.transfer == "exact"
    clock_hz = clock_hz_of(device) if is_own else comparable_clock_hz(device, load_device(record.device))
    return AttentionRates(
        flops_per_s=device.peak_flops_per_s(dtype),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 0),
        clock_hz=clock_hz or ASSUMED_CLOCK_HZ,
        l2_bytes=device.l2_bytes or 0.0,
    )


def _share_calls(
    operation: Attention, shape: AttentionShape, device: Device, section: Section, running: tuple[str, str]
) -> list[tuple[Section, CallMask]]:
    """Sections that price the calls, and masks of the calls: one for all, unless another record prices decode."""
    every = np.ones(shape.query_len.shape, dtype=bool)
    decode = decode_section(section, *running, device)
    if decode is None:
        return [(section, every)]
    is_decode = _runs_decode_kernel(operation, shape, read_kernel(section, section.content["usual_kernel"])[1])
    shares = ((section, ~is_decode), (decode, is_decode))
    return [(own, calls) for own, calls in shares if calls.any()]


def _estimate(
    operation: Attention,
    shape: AttentionShape,
    device: Device,
    rates: AttentionRates,
    kernel: tuple[Section, str],
    *,
    hot_cache: bool,
) -> dict[str, PerCall]:
    """Times and interval factors of one kernel of a section; each formula runs only where a call needs it."""
    section, name = kernel
    prefill, decode = read_kernel(section, name)
    prefill, decode = transfer_kernel(to_fp8_kernel(prefill, section), decode, device, rates, section.record)
    is_decode = _runs_decode_kernel(operation, shape, decode)
    copies = operation.writes_cache
    columns: dict[str, PerCall] = {}
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


def _merge(where: CallMask, fresh: dict[str, PerCall], columns: dict[str, PerCall]) -> dict[str, PerCall]:
    """Insert new values where a mask is set; the first ones fill every place."""
    if not columns:
        return fresh
    return {key: np.where(where, value, columns[key]) for key, value in fresh.items()}


def _runs_decode_kernel(operation: Attention, shape: AttentionShape, decode: DecodeParameters) -> CallMask:
    """Whether the library uses its decode kernel."""
    rows = shape.query_len * shape.num_heads / shape.num_kv_heads
    few = (rows <= decode.query_tile) & (shape.kv_len > shape.query_len)
    return np.asarray(((shape.query_len == 1.0) | few) & np.logical_not(operation.is_backward))


def _arithmetic_dtype(dtype: str, device: Device) -> str:
    """Element format of the arithmetic: int8, int4 and fp4 models keep their attention in 16 bits."""
    if dtype in ("int8", "int4", "fp4"):
        return "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
    return dtype


def _shape_of(operation: Attention, kv_dtype: str) -> AttentionShape:
    """Sizes of the calls as float arrays of one shape."""
    arrays = [np.asarray(getattr(operation, name), dtype=float) for name in CALL_SIZES]
    if len({array.shape for array in arrays}) > 1:
        arrays = list(np.broadcast_arrays(*arrays))
    columns: dict[str, Any] = dict(zip(CALL_SIZES, arrays, strict=True))
    return AttentionShape(
        causal=operation.causal,
        element_bytes=get_dtype(operation.dtype).num_bytes,
        kv_element_bytes=get_dtype(kv_dtype).num_bytes,
        values_in_keys=operation.values_in_keys,
        **columns,
    )


def _bound(operation: Attention, floor_s: PerCall, device: Device, dtype: str) -> dict[str, PerCall]:
    """Columns of the roofline bound, for devices whose kernels are not modelled."""
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


def _by_own_gemms(
    operation: Attention, bound: dict[str, PerCall], device: Device, record: CalibrationRecord
) -> dict[str, PerCall]:
    """Replace the times of the bound by those of scores, softmax and values at the device's own measured rates.

    A fused kernel keeps the scores in cache; without measurements of one, the bound at the best rate of a GEMM is
    several times too fast.

    Args:
        operation: The calls.
        bound: Columns of the bound.
        device: A device without a data sheet.
    """
    sizes = np.broadcast_arrays(*(np.asarray(getattr(operation, name), dtype=float) for name in CALL_SIZES))
    batch, query, keys, heads, kv_heads, head, value = (size.reshape(-1) for size in sizes[:7])
    rows = query * heads / kv_heads  # queries that share keys and values are rows of one GEMM
    dtype = _arithmetic_dtype(operation.dtype, device)
    gemms = [
        Gemm(name="scores", batch=batch * kv_heads, m=rows, n=keys, k=head, dtype=dtype),
        Gemm(name="values", batch=batch * kv_heads, m=rows, n=value, k=keys, dtype=dtype, layout="NN"),
    ]
    # Masked scores are left out, and the backward pass is more of the same.
    executed = np.asarray(operation.executed_flops, dtype=float).reshape(-1) / sum(one.flops for one in gemms)
    scores_bytes = get_dtype("fp32").num_bytes * batch * heads * query * keys
    softmax = Pointwise(
        name="softmax", operation="softmax", dtype=dtype, read_bytes=scores_bytes, written_bytes=scores_bytes
    )
    prices = [
        *(price_gemm(one, device, record) for one in gemms),
        price_pointwise(softmax, device, load_record("pointwise", device)),
    ]
    is_backward = np.broadcast_to(operation.is_backward, bound["time_s"].shape).reshape(-1)
    forward, backward = _SMALL_GEMM_FACTORS
    factor = np.where(query > 1.0, np.where(is_backward, backward, forward), 1.0)
    total_s = executed * factor * sum(np.asarray(price.time_s) for price in prices)
    total_s = total_s.reshape(bound["time_s"].shape)
    time_s = np.maximum(total_s, bound["roofline_s"])
    return {
        **bound,
        "time_s": time_s,
        "low_s": bound["roofline_s"],
        "high_s": time_s * ROOFLINE_HIGH_FACTOR,
    }


def _plain(value: PerCall) -> Any:
    """Convert a 0-d array to a float."""
    return float(value) if np.ndim(value) == 0 else value
