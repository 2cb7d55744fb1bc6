"""Price of GEMMs: time of the fastest candidate kernel (gemm.kernels), its decomposition and its interval.

Scalars and arrays share one path: one shape is an array of length one. Shapes are priced in blocks that fit a core's
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.forest import ResidualForest, forest_correction
from shapewright.pricing.calibration.intervals import CARRIED_ALIGNMENT_ERROR, OWN_ALIGNMENT_ERROR, widen_by_error
from shapewright.pricing.calibration.libraries import nearest_library
from shapewright.pricing.calibration.residual import ResidualTable, log_correction
from shapewright.pricing.experts.tiles import TUNED
from shapewright.pricing.gemm.alignment import WIDEST_LOAD_BYTES, contiguous_letters
from shapewright.pricing.gemm.block import estimate_block_s, price_block
from shapewright.pricing.gemm.fastest import count_threads, has_compiler, run_over_threads
from shapewright.pricing.gemm.section import GemmPricing, Section, prepare_gemm_pricing
from shapewright.pricing.gemm.shapes import Gemms
from shapewright.pricing.price import ROOFLINE_HIGH_FACTOR, GemmPrice, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.gemm.parameters import GemmParameters

    PerGemm = Float[np.ndarray, "gemms"]
    GemmIndex = Int[np.ndarray, "gemms"]
    AnyShape = Float[np.ndarray, "..."]

TRAINING = "training"
"""Field of a record's parameters: library whose section prices the GEMMs of training, by format."""
# Shapes priced together: enough that NumPy's call overhead is small, few enough that arrays of 18 tiles x 1024 float64
# (0.15 MB) fit the L2 cache. Compiled code needs an array of 7 splits only, and longer blocks let threads contend for
# Python's lock less: two threads price 6.4 million shapes a second in blocks of 2048, 9.8 million in blocks of 8192.
ROWS_PER_BLOCK = 1024
ROWS_PER_COMPILED_BLOCK = 8192
# Number of shapes from which importing Numba (0.4 s) pays within one or two calls.
COMPILED_FROM_SHAPES = 200_000


def price_gemm(
    operation: Gemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
    run_flops: AnyShape | None = None,
) -> GemmPrice:
    """Price one GEMM, or arrays of them.

    Args:
        operation: The GEMM; its dims are ints, or arrays of one shape.
        record: A record of kind ``gemm``.
        hot_cache: Whether operands may lie in the last-level cache from a previous run, as in a benchmark.
        library: Library and version whose kernels run, if the record has it; otherwise all libraries together.
        run_flops: Work of the run of GEMMs that each was timed in, which sets their clock. Without it each counts by
            itself, or as part of an endless run where the section was fitted to runs. [flop], of the dims' shape

    Returns:
        The price; floats for int dims, arrays for array dims.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
    """
    pricing = _prepare(operation, device, record, hot_cache=hot_cache, library=library)
    shape, gemms = flatten(operation)
    if run_flops is not None:
        gemms = gemms._replace(run_flops=np.broadcast_to(run_flops, shape).reshape(-1))
    return price_shaped(shape, gemms, pricing)


def price_shaped(shape: tuple[int, ...], gemms: Gemms, pricing: GemmPricing) -> GemmPrice:
    """Price GEMMs that were flattened from arrays of a shape."""
    columns = price_flat(gemms, pricing)
    if shape == ():
        return split_rows(GemmPrice, columns, pricing.source)[0]
    values: dict[str, Any] = {name: column.reshape(shape) for name, column in columns.items()}
    return GemmPrice(calibration=pricing.source, **values)


def estimate_gemm_s(operation: Gemm, device: Device, record: CalibrationRecord, *, hot_cache: bool = False) -> Any:
    """Time of one GEMM, or of arrays of them, without decomposition and interval: for searches over many shapes. [s]

    Equals the time_s of price_gemm with the same arguments, to gemm.fastest.AGREEMENT. Where Numba is installed, many
    shapes run through it, in as many threads as OMP_NUM_THREADS allows.
    """
    pricing = _prepare(operation, device, record, hot_cache=hot_cache)
    return estimate_shaped_s(*flatten(operation), pricing)


def estimate_shaped_s(shape: tuple[int, ...], gemms: Gemms, pricing: GemmPricing) -> Any:
    """Time of GEMMs that were flattened from arrays of a shape, as in estimate_gemm_s. [s]"""
    num_shapes = len(gemms.m)
    compiled = num_shapes >= COMPILED_FROM_SHAPES and has_compiler()
    rows_per_block = ROWS_PER_COMPILED_BLOCK if compiled else ROWS_PER_BLOCK
    time_s = np.empty(num_shapes)

    def fill(start: int) -> None:
        part = slice(start, start + rows_per_block)
        rows = gemms.rows(part)
        times = [_estimate_s(rows, each, compiled=compiled) for each in (pricing, *pricing.others)]
        time_s[part] = times[0] if len(times) == 1 else _mean_s(times, pricing, _floor_s(rows, pricing))

    # NumPy's loops over a block are too short for threads: two of them would only contend for Python's lock.
    run_over_threads(fill, range(0, num_shapes, rows_per_block), num_threads=count_threads() if compiled else 1)
    return float(time_s[0]) if shape == () else time_s.reshape(shape)


def price_gemms(
    operations: Sequence[Gemm], device: Device, record: CalibrationRecord, *, library: str = ""
) -> list[GemmPrice]:
    """Price many scalar GEMMs; those with the same element formats are evaluated together."""
    groups: dict[tuple[str, str | None, bool, str], list[int]] = {}
    for index, operation in enumerate(operations):
        key = (operation.dtype, operation.weight_dtype, operation.is_training, operation.library)
        groups.setdefault(key, []).append(index)
    prices: list[GemmPrice | None] = [None] * len(operations)
    for indices in groups.values():
        pricing = _prepare(operations[indices[0]], device, record, library=library)
        columns = price_flat(stack([operations[index] for index in indices]), pricing)
        for index, price in zip(indices, split_rows(GemmPrice, columns, pricing.source), strict=True):
            prices[index] = price
    return [price for price in prices if price is not None]


def _prepare(
    operation: Gemm, device: Device, record: CalibrationRecord, *, hot_cache: bool = False, library: str = ""
) -> GemmPricing:
    """Gather what prices an operation; a record may name the section of a format that training runs.

    The library that an operation names counts where the record has it: elsewhere the interval would widen for a library
    whose price is the same.
    """
    if not library and nearest_library(operation.library, record.parameters["libraries"]):
        library = operation.library
    if operation.is_training and not library:
        library = record.parameters.get(TRAINING, {}).get(operation.dtype, "")
    return prepare_gemm_pricing(
        operation.dtype, operation.weight_dtype, device, record, hot_cache=hot_cache, library=library
    )


def stack(operations: Sequence[Gemm]) -> Gemms:
    """Stack scalar GEMMs into one row."""
    m, n, k, batch = np.array([(one.m, one.n, one.k, one.batch) for one in operations], dtype=float).T.copy()
    return Gemms(m, n, k, batch, contiguous_letters([one.layout for one in operations]))


def flatten(operation: Gemm) -> tuple[tuple[int, ...], Gemms]:
    """Return the shape of the dims, and the GEMMs in one row."""
    dims = (operation.m, operation.n, operation.k, operation.batch)
    m, n, k, batch = np.broadcast_arrays(*(np.asarray(dim, dtype=float) for dim in dims))
    letters = contiguous_letters(operation.layout)
    return m.shape, Gemms(m.reshape(-1), n.reshape(-1), k.reshape(-1), batch.reshape(-1), letters)


def _floor_s(gemms: Gemms, pricing: GemmPricing) -> PerGemm:
    """Roofline of each GEMM; the compute term alone where operands need not come from memory. [s]"""
    m, n, k, batch = gemms[:4]
    flops_s: PerGemm = 2.0 * m * n * k * batch / pricing.device.peak_flops_per_s(pricing.dtype)
    if pricing.is_hot:
        return flops_s
    num_bytes = (m * k + pricing.stored_share * k * n + m * n) * batch * (pricing.bits / 8)
    floor_s: PerGemm = np.maximum(flops_s, num_bytes / pricing.device.memory_bandwidth_bytes_per_s)
    return floor_s


def _residual_correction(
    gemms: Gemms, table: ResidualTable | ResidualForest, time_s: PerGemm
) -> tuple[PerGemm, PerGemm]:
    """Logarithm of the residual correction and its weight; tables have 0 for batches, with kernels of their own."""
    if isinstance(table, ResidualForest):
        return forest_correction(table, *gemms.sizes, time_s)
    if table.has_layers:
        return _expert_residual_correction(gemms, table)
    logs, weight = log_correction(table, gemms.m, gemms.n, gemms.k)
    is_batch = gemms.batch > 1.0
    if is_batch.any():
        logs, weight = np.where(is_batch, 0.0, logs), np.where(is_batch, 0.0, weight)
    return logs, weight


def _expert_residual_correction(gemms: Gemms, table: ResidualTable) -> tuple[PerGemm, PerGemm]:
    """The same for expert layers, whose tables hold the kernels of serving libraries; m is the rows of one expert."""
    if gemms.choice is None:
        return np.zeros_like(gemms.m), np.zeros_like(gemms.m)
    step, inner, hidden = gemms.choice
    return log_correction(table, gemms.m, gemms.batch, inner, hidden, layer=step - TUNED)


def _estimate_s(gemms: Gemms, pricing: GemmPricing, *, compiled: bool) -> PerGemm:
    """Times of a block of GEMMs. [s]"""
    floor_s = _floor_s(gemms, pricing)
    if pricing.section is None or pricing.rates is None:
        return floor_s
    rates = pricing.rates

    def estimate(own: Gemms, parameters: GemmParameters) -> dict[str, PerGemm]:
        return {"time_s": estimate_block_s(own, parameters, rates, compiled=compiled)}

    time_s: PerGemm = np.maximum(_by_kernel_set(estimate, gemms, pricing.section)["time_s"], floor_s)
    if pricing.residual is not None:
        time_s = np.maximum(time_s * np.exp(_residual_correction(gemms, pricing.residual, time_s)[0]), floor_s)
    return time_s


def price_flat(gemms: Gemms, pricing: GemmPricing) -> dict[str, PerGemm]:
    """Price GEMMs block by block; fields of GemmPrice by name.

    With several donors, the time is their mean, and all else is that of the first.
    """
    columns = _price_by_one(gemms, pricing)
    if not pricing.others:
        return columns
    floor_s = columns["roofline_s"]
    times = [columns["time_s"], *(_price_by_one(gemms, other)["time_s"] for other in pricing.others)]
    time_s = _mean_s(times, pricing, floor_s)
    scale = time_s / columns["time_s"]
    low_s, high_s = np.maximum(columns["low_s"] * scale, floor_s), columns["high_s"] * scale
    return {**columns, "time_s": time_s, "low_s": np.minimum(low_s, time_s), "high_s": high_s}


def _mean_s(times: Sequence[PerGemm], pricing: GemmPricing, floor_s: PerGemm) -> PerGemm:
    """Geometric mean of the times by a pricing and its others, each architecture once, at least the bound. [s]"""
    architectures = [each.architecture for each in (pricing, *pricing.others)]
    weights = [1.0 / architectures.count(each) for each in architectures]
    mean: PerGemm = np.maximum(np.exp(np.average(np.log(times), axis=0, weights=weights)), floor_s)
    return mean


def _price_by_one(gemms: Gemms, pricing: GemmPricing) -> dict[str, PerGemm]:
    """Price GEMMs block by block by the record of one donor."""
    floor_s = _floor_s(gemms, pricing)
    if pricing.section is None or pricing.rates is None:
        return _roofline_price(gemms, floor_s, pricing)
    section, rates = pricing.section, pricing.rates

    def price(own: Gemms, parameters: GemmParameters) -> dict[str, PerGemm]:
        return price_block(own, parameters, rates)

    starts = range(0, len(floor_s), ROWS_PER_BLOCK)
    blocks = [_by_kernel_set(price, gemms.rows(slice(start, start + ROWS_PER_BLOCK)), section) for start in starts]
    columns = blocks[0] if len(blocks) == 1 else _join_blocks(blocks)
    time_s = np.maximum(columns.pop("time_s"), floor_s)
    low, high = section.interval.factors(time_s, pricing.widening)
    shared = section.interval.shared_error(time_s)
    is_batch = gemms.batch > 1.0
    if section.batched_interval is not None and is_batch.any():
        ends = section.batched_interval.factors(time_s, pricing.widening)
        low, high = (np.where(is_batch, *pair) for pair in zip(ends, (low, high), strict=True))
        shared = np.where(is_batch, section.batched_interval.shared_error(time_s), shared)
    correction = np.ones_like(time_s)
    if pricing.residual is not None:
        logs, weight = _residual_correction(gemms, pricing.residual, time_s)
        corrected_s = np.maximum(time_s * np.exp(logs), floor_s)
        correction, time_s = corrected_s / time_s, corrected_s
        near_low, near_high = section.residual_interval.factors(time_s, pricing.widening)
        low, high = near_low**weight * low ** (1.0 - weight), near_high**weight * high ** (1.0 - weight)
    is_poor = columns["alignment_bytes"] < WIDEST_LOAD_BYTES
    if is_poor.any():
        is_known = is_batch & (section.batched_interval is not None)  # its residuals include unaligned sizes
        error = CARRIED_ALIGNMENT_ERROR if pricing.has_transferred_alignment else OWN_ALIGNMENT_ERROR
        wider = widen_by_error((low, high), _arithmetic_error(columns, section.parameters.overlap_power, error))
        low, high = (np.where(is_poor & ~is_known, *pair) for pair in zip(wider, (low, high), strict=True))
    if pricing.rate_error > 1.0:
        error_logs = _arithmetic_error(columns, section.parameters.overlap_power, pricing.rate_error)
        low, high = widen_by_error((low, high), error_logs)
    return {
        "time_s": time_s,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "shared_error": shared,
        "correction": correction,
        "roofline_s": floor_s,
        **columns,
    }


def _arithmetic_error(columns: Mapping[str, PerGemm], overlap_power: float, error: float) -> PerGemm:
    """Error of an arithmetic rate as a logarithm, which shrinks as traffic dominates."""
    # Slope of gemm.kernels.join_s in the compute time, on logarithms.
    slope = 1.0 / (1.0 + (columns["memory_s"] / columns["compute_s"]) ** overlap_power)
    logs: PerGemm = np.log(error) * slope
    return logs


def _by_kernel_set(
    work: Callable[[Gemms, GemmParameters], dict[str, PerGemm]], gemms: Gemms, section: Section
) -> dict[str, PerGemm]:
    """Columns of a block; batches and default tiles use the kernels that the section has for them."""
    if section.rule is not None and gemms.choice is None:
        # A training stack's kernels are as good as the best known: some tuned tiles are older than the default.
        return _faster(work(gemms, section.parameters), work(gemms, section.rule.steps[-1]))
    if section.rule is not None and gemms.choice is not None:
        kernel_sets = {TUNED: section.parameters, **dict(enumerate(section.rule.steps))}
        return _by_step(work, gemms, gemms.choice.step, kernel_sets)
    if section.batched is None or not (is_batch := gemms.batch > 1.0).any():
        return work(gemms, section.parameters)
    if is_batch.all():
        return work(gemms, section.batched)
    single = work(gemms.rows(~is_batch), section.parameters)
    batched = work(gemms.rows(is_batch), section.batched)
    columns = {name: np.empty(len(is_batch)) for name in single}
    for name, column in columns.items():
        column[~is_batch], column[is_batch] = single[name], batched[name]
    return columns


def _faster(one: dict[str, PerGemm], other: dict[str, PerGemm]) -> dict[str, PerGemm]:
    """Columns of two kernel sets, each GEMM's from the faster one."""
    is_other = other["time_s"] < one["time_s"]
    return {name: np.where(is_other, other[name], column) for name, column in one.items()}


def _by_step(
    work: Callable[[Gemms, GemmParameters], dict[str, PerGemm]],
    gemms: Gemms,
    step: GemmIndex,
    kernel_sets: Mapping[int, GemmParameters],
) -> dict[str, PerGemm]:
    """Columns of a block of expert layers, each with the kernels of its tile step."""
    columns: dict[str, PerGemm] = {}
    for each in np.unique(step).tolist():
        here = step == each
        if here.all():
            return work(gemms, kernel_sets[each])
        for name, own in work(gemms.rows(here), kernel_sets[each]).items():
            columns.setdefault(name, np.empty(len(here)))[here] = own
    return columns


def _join_blocks(blocks: Sequence[dict[str, PerGemm]]) -> dict[str, PerGemm]:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _roofline_price(gemms: Gemms, floor_s: PerGemm, pricing: GemmPricing) -> dict[str, PerGemm]:
    """Roofline bound for a device whose tiles are not modelled."""
    m, n, k, batch = gemms[:4]
    one, zero = np.ones_like(floor_s), np.zeros_like(floor_s)
    num_bytes = (m * k + pricing.stored_share * k * n + m * n) * batch * (pricing.bits / 8)
    unknown = ("start_s", "shared_error", "tile_m", "tile_n", "num_tiles", "num_waves", "alignment_bytes")
    neutral = (
        "split_k",
        "correction",
        "tile_efficiency",
        "wave_efficiency",
        "alignment_factor",
        "rate_share",
        "slow_factor",
    )
    return {
        "time_s": floor_s,
        "low_s": floor_s,
        "high_s": floor_s * ROOFLINE_HIGH_FACTOR,
        "compute_s": 2.0 * m * n * k * batch / pricing.device.peak_flops_per_s(pricing.dtype),
        "memory_s": num_bytes / pricing.device.memory_bandwidth_bytes_per_s,
        "roofline_s": floor_s,
        **dict.fromkeys(unknown, zero),
        **dict.fromkeys((*neutral, "slow_factor"), one),
    }
