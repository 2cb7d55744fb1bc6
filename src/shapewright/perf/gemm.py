"""Price of a GEMM: the fastest kernel of the menu (perf.kernels), its reason and its interval.

Scalars and arrays take the same road: one shape is an array of one. Shapes are priced in blocks that fit a core's
cache, all kernels of the menu side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.dtypes import get_dtype, stored_weight_bytes
from shapewright.errors import CalibrationError
from shapewright.hardware import load_device
from shapewright.operations.gemm import Gemm, contiguous_dims
from shapewright.perf.kernels import (
    DeviceRates,
    GemmParameters,
    alignment_factor,
    borrowed_feed_scale,
    choose_fastest,
    estimate_kernels,
    rates_of,
    read_batched_parameters,
    read_parameters,
)
from shapewright.perf.price import GemmPrice
from shapewright.perf.residual import ResidualTable, load_residuals, log_correction, section_name
from shapewright.perf.roofline import ROOFLINE_HIGH_FACTOR, roofline_s
from shapewright.perf.slow_cases import narrow_floor_s, rate_share, small_floor_s
from shapewright.perf.tiling import tile_efficiency, wave_efficiency

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

# Shapes priced together: enough that NumPy computes rather than starts. 126 kernels x 256 float64 are 0.25 MB, a few of
# which stay in the second cache.
ROWS_PER_BLOCK = 256

# Whose fractions a dtype borrows in a record that lacks it, nearest first.
DTYPE_KIN = {
    "bf16": ("fp16",),
    "fp16": ("bf16",),
    "tf32": ("bf16", "fp16"),
    "fp32": ("bf16", "fp16"),
    "fp8": ("bf16", "fp16"),
    "int8": ("fp8", "bf16", "fp16"),
    "int4": ("fp8", "bf16", "fp16"),
    "fp4": ("fp8", "bf16", "fp16"),
}
# fp16 and bf16 run at one rate through the same kernels on every device that has both.
_SAME_KERNELS = {frozenset({"fp16", "bf16"})}
# Whose residual a device takes: its own, and that of a sibling of its architecture.
_RESIDUAL_TRANSFERS = ("exact", "architecture")
# What a benchmark's hot cache is worth where a borrowed record does not say: where the fit starts (fit.gemm), which was
# set before any such device was seen. A device's own record says better.
_ASSUMED_HOT_CACHE_SPEEDUP, _ASSUMED_HOT_CACHE_SHARE = 4.0, 0.3
# Widening of the logarithmic interval for a dtype that borrows another's fractions. Judgement, as TRANSFER_WIDENING is.
_DTYPE_WIDENING = 1.6
# The same for weights that are stored narrower than they are multiplied: no table of such kernels was fitted.
_STORED_WIDENING = 1.6

ROOFLINE_LABEL = "uncalibrated (roofline bound)"


def price_gemm(
    operation: Gemm, device: Device, record: CalibrationRecord, *, hot_cache: bool = False, library: str = ""
) -> GemmPrice:
    """Price one GEMM, or arrays of them.

    Args:
        operation: The product; its dims are ints, or arrays of one shape.
        device: The device.
        record: A record of kind ``gemm``.
        hot_cache: Operands may lie in the last-level cache from a previous run, as in a benchmark.
        library: Library and version whose kernels are meant, if the record knows it; otherwise the middle of all.

    Returns:
        The price; floats for int dims, arrays for array dims.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
    """
    dims = np.broadcast_arrays(
        *(np.asarray(dim, dtype=float) for dim in (operation.m, operation.n, operation.k, operation.batch))
    )
    shape = dims[0].shape
    m, n, k, batch = (dim.reshape(-1) for dim in dims)
    kind = (operation.layout, operation.dtype, operation.weight_dtype)
    price = _price_flat(m, n, k, batch, kind, device, record, hot_cache, library)
    shaped: dict[str, Any] = {}
    for name in _ARRAY_FIELDS:
        column = getattr(price, name)
        shaped[name] = float(column[0]) if shape == () else column.reshape(shape)
    return replace(price, **shaped)


def price_gemms(operations: Sequence[Gemm], device: Device, record: CalibrationRecord) -> list[GemmPrice]:
    """Price many scalar GEMMs at once: those of one layout and element formats share one evaluation."""
    groups: dict[tuple[str, str, str | None], list[int]] = {}
    for index, operation in enumerate(operations):
        groups.setdefault((operation.layout, operation.dtype, operation.weight_dtype), []).append(index)
    prices: list[GemmPrice | None] = [None] * len(operations)
    for kind, indices in groups.items():
        m, n, k, batch = (
            np.array([float(getattr(operations[i], name)) for i in indices]) for name in ("m", "n", "k", "batch")
        )
        flat = _price_flat(m, n, k, batch, kind, device, record, False, "")
        rows = zip(*(getattr(flat, name).tolist() for name in _ARRAY_FIELDS), strict=True)
        for index, row in zip(indices, rows, strict=True):
            values: dict[str, Any] = dict(zip(_ARRAY_FIELDS, row, strict=True))
            prices[index] = GemmPrice(calibration=flat.calibration, **values)
    return [price for price in prices if price is not None]


_ARRAY_FIELDS = (
    "time_s",
    "low_s",
    "high_s",
    "compute_s",
    "memory_s",
    "start_s",
    "roofline_s",
    "correction",
    "tile_m",
    "tile_n",
    "split_k",
    "num_tiles",
    "num_waves",
    "tile_efficiency",
    "wave_efficiency",
    "alignment_bytes",
    "alignment_factor",
)


def _price_flat(
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    kind: tuple[str, str, str | None],
    device: Device,
    record: CalibrationRecord,
    hot_cache: bool,
    library: str,
) -> GemmPrice:
    """Price 1-d arrays of shapes, block by block; ``kind`` is their layout, dtype and the dtype of stored weights."""
    layout, dtype, weight_dtype = kind
    width_bytes = get_dtype(dtype).num_bytes
    stored_share = stored_weight_bytes(weight_dtype) / width_bytes if weight_dtype else 1.0
    flops, num_bytes = 2.0 * m * n * k * batch, (m * k + stored_share * k * n + m * n) * batch * width_bytes
    floor_s = np.asarray(roofline_s(flops, num_bytes, device, dtype))
    if device.roofline_only or device.num_sms is None:
        return _roofline_price(flops, num_bytes, floor_s, device, dtype)
    section = _section(record, dtype, library)
    same = _same_kernels(section.dtype, dtype)
    rates = replace(rates_of(device, dtype), stored_b_share=stored_share)
    if record.transfer != "exact":
        rates = replace(rates, feed_scale=borrowed_feed_scale(device, load_device(record.device)))
    if hot_cache:
        rates = replace(rates, l2_bytes=device.l2_bytes or 0.0)
        floor_s = flops / device.peak_flops_per_s(dtype)  # the memory's bandwidth is no floor for what the cache holds
    columns = _price_kernels((m, n, k, batch), layout, section, rates)
    time_s = np.maximum(columns.pop("time_s"), floor_s)
    widening = record.interval_widening * (1.0 if same else _DTYPE_WIDENING)
    widening *= _STORED_WIDENING if weight_dtype else 1.0
    low, high = interval_factors(section.interval, time_s, widening)
    correction = np.ones_like(time_s)
    if section.residual is not None and same and not weight_dtype:
        logs, weight = log_correction(section.residual, m, n, k)
        # A batch runs through kernels of its own, which the tables know nothing of.
        logs, weight = np.where(batch > 1.0, 0.0, logs), np.where(batch > 1.0, 0.0, weight)
        corrected_s = np.maximum(time_s * np.exp(logs), floor_s)
        correction, time_s = corrected_s / time_s, corrected_s
        near_low, near_high = interval_factors(section.residual_interval, time_s, widening)
        low, high = near_low**weight * low ** (1.0 - weight), near_high**weight * high ** (1.0 - weight)
    label = record.label if same else f"{record.label}, fractions of {section.dtype}"
    if weight_dtype:
        label += f", {weight_dtype} weights assumed to be widened for free"
    return GemmPrice(
        time_s=time_s,
        low_s=np.maximum(time_s * low, floor_s),
        high_s=time_s * high,
        correction=correction,
        roofline_s=floor_s,
        calibration=label,
        **columns,
    )


def _price_kernels(
    dims: tuple[Array, Array, Array, Array], layout: str, section: _Section, rates: DeviceRates
) -> dict[str, Array]:
    """Price shapes block by block; batches with the kernels that the section has for them."""
    whole = np.arange(len(dims[0]))
    parts = [(section.parameters, whole)]
    if section.batched is not None and (dims[3] > 1.0).any():
        is_batch = dims[3] > 1.0
        parts = [(section.parameters, whole[~is_batch]), (section.batched, whole[is_batch])]
    blocks, order = [], []
    for parameters, index in parts:
        known = parameters
        if rates.l2_bytes and not parameters.hot_cache_share:
            known = replace(
                parameters, hot_cache_speedup=_ASSUMED_HOT_CACHE_SPEEDUP, hot_cache_share=_ASSUMED_HOT_CACHE_SHARE
            )
        for start in range(0, len(index), ROWS_PER_BLOCK):
            here = index[start : start + ROWS_PER_BLOCK]
            m, n, k, batch = (dim[here] for dim in dims)
            blocks.append(price_block(m, n, k, batch, layout, known, rates))
            order.append(here)
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    if len(parts) > 1:
        places = np.argsort(np.concatenate(order))
        columns = {name: column[places] for name, column in columns.items()}
    return columns


def price_block(
    m: Array, n: Array, k: Array, batch: Array, layout: str, parameters: GemmParameters, rates: DeviceRates
) -> dict[str, Array]:
    """Choose the fastest kernel for each shape of a block; fields of GemmPrice by name, before floor and correction."""
    factor, align = alignment_factor(m, n, k, layout, round(rates.element_bytes * 8), parameters, batch > 1)
    cases = parameters.slow_cases
    rate = factor if cases is None else factor * rate_share(n, k, rates.element_bytes, cases)
    times = estimate_kernels(m, n, k, batch, rate, parameters, rates)
    best, time_s = choose_fastest(times, parameters.overlap_power)
    compute_s = times.compute_s[best, np.arange(len(m))]
    if cases is not None:
        peak_flops_per_s = rates.flops_per_s_per_sm * rates.num_sms
        narrow_s = narrow_floor_s(m, n, k, batch, contiguous_dims(layout), peak_flops_per_s, cases)
        slow_s = np.maximum(narrow_s, small_floor_s(m, n, k, batch, peak_flops_per_s, cases)) + parameters.start_s
        factor = np.where(narrow_s > time_s, factor * time_s / slow_s, factor)
        compute_s = np.where(slow_s > time_s, slow_s, compute_s)
        time_s = np.maximum(time_s, slow_s)
    rows = np.arange(len(m))
    tile, split = np.divmod(best, len(parameters.split_k))
    tile_m, tile_n, num_tiles = parameters.tile_m[tile], parameters.tile_n[tile], times.num_tiles[best, rows]
    return {
        "time_s": time_s,
        "start_s": np.full_like(time_s, parameters.start_s),
        "compute_s": compute_s,
        "memory_s": times.memory_s[best, rows],
        "tile_m": tile_m,
        "tile_n": tile_n,
        "split_k": parameters.split_k[split],
        "num_tiles": num_tiles,
        "num_waves": times.num_waves[best, rows],
        "tile_efficiency": np.asarray(tile_efficiency(m, n, tile_m, tile_n)),  # type: ignore[arg-type]
        "wave_efficiency": np.asarray(wave_efficiency(num_tiles, rates.num_sms)),  # type: ignore[arg-type]
        "alignment_bytes": align,
        "alignment_factor": factor,
    }


def _roofline_price(flops: Array, num_bytes: Array, floor_s: Array, device: Device, dtype: str) -> GemmPrice:
    """Bound for a device whose tiles are not modelled; the label says that it is one."""
    one, zero = np.ones_like(floor_s), np.zeros_like(floor_s)
    return GemmPrice(
        time_s=floor_s,
        low_s=floor_s,
        high_s=floor_s * ROOFLINE_HIGH_FACTOR,
        compute_s=flops / device.peak_flops_per_s(dtype),
        memory_s=num_bytes / device.memory_bandwidth_bytes_per_s,
        start_s=zero,
        correction=one,
        roofline_s=floor_s,
        calibration=ROOFLINE_LABEL,
        tile_m=zero,
        tile_n=zero,
        split_k=one,
        num_tiles=zero,
        num_waves=zero,
        tile_efficiency=one,
        wave_efficiency=one,
        alignment_bytes=zero,
        alignment_factor=one,
    )


def interval_factors(interval: Any, time_s: Array, widening: float | Array) -> tuple[Array, Array]:
    """Ends of the 90 % interval as factors on a predicted time, by regime of that time.

    Args:
        interval: ``edges_s`` between regimes, and per regime ``low`` and ``high``, quantiles of measured / predicted.
        time_s: Predicted times. [s]
        widening: Factor on their logarithms, 1 or more, for borrowed records.
    """
    regime = np.searchsorted(interval["edges_s"], time_s)
    return np.asarray(interval["low"])[regime] ** widening, np.asarray(interval["high"])[regime] ** widening


class _Section(NamedTuple):
    """What prices one dtype: its own section of a record, or its nearest kin's."""

    parameters: GemmParameters
    batched: GemmParameters | None
    dtype: str
    interval: Mapping[str, Any]
    residual: ResidualTable | None
    residual_interval: Mapping[str, Any]


# Unfolded sections by record, library, dtype and whether physics stands alone. Records ship with the package: a few
# dozen at most.
_SECTIONS: dict[tuple[str, str, str, bool], _Section] = {}


def _section(record: CalibrationRecord, dtype: str, library: str) -> _Section:
    """Find the section of a dtype or of its nearest kin; unfolded once per record.

    A library that the record does not know is priced as the middle of all.
    """
    # Another family's residual does harm, a sibling's helps (docs/decisions/0003).
    residual = record.residual if record.transfer in _RESIDUAL_TRANSFERS else None
    key = (record.id, library, dtype, residual is None)
    if key not in _SECTIONS:
        own = record.parameters["libraries"].get(library, {})
        for name in (dtype, *DTYPE_KIN[dtype]):
            if name in own or name in record.parameters["dtypes"]:
                _SECTIONS[key] = _read_section(record, residual, name, library if name in own else "")
                break
        else:
            raise CalibrationError(
                f"record {record.id} has no section for {dtype} nor for {', '.join(DTYPE_KIN[dtype])}; "
                f"it has {', '.join(record.parameters['dtypes'])}"
            )
    return _SECTIONS[key]


def _read_section(record: CalibrationRecord, residual: Mapping[str, Any] | None, dtype: str, library: str) -> _Section:
    """Unfold a section that the record has; of all libraries together if ``library`` is empty."""

    def part(whole: Mapping[str, Any]) -> Any:
        return (whole["libraries"][library] if library else whole["dtypes"])[dtype]

    return _Section(
        parameters=read_parameters(part(record.parameters)),
        batched=read_batched_parameters(part(record.parameters)),
        dtype=dtype,
        interval=part(record.interval),
        residual=load_residuals(residual["file"]).get(section_name(dtype, library)) if residual else None,
        residual_interval=part(residual["interval"]) if residual else {},
    )


def _same_kernels(one: str, other: str) -> bool:
    return one == other or frozenset({one, other}) in _SAME_KERNELS
