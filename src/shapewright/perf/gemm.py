"""Price of a GEMM: the fastest kernel of the menu (perf.kernels), its reason and its interval.

Scalars and arrays take the same road: one shape is an array of one. Shapes are priced in blocks that fit a core's
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.operations.gemm import Gemm
from shapewright.perf.alignment import WIDEST_LOAD_BYTES, contiguous_letters
from shapewright.perf.expert_tiles import TUNED
from shapewright.perf.fastest import has_compiler
from shapewright.perf.gemm_block import estimate_block_s, price_block
from shapewright.perf.gemm_job import GemmJob, Section, make_gemm_job
from shapewright.perf.intervals import CARRIED_ALIGNMENT_ERROR, with_error
from shapewright.perf.price import GemmPrice, split_rows
from shapewright.perf.products import Products
from shapewright.perf.residual import ResidualTable, log_correction
from shapewright.perf.roofline import ROOFLINE_HIGH_FACTOR
from shapewright.perf.threads import count_threads, run_over_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_menu import GemmParameters

    Array = NDArray[np.float64]

# Shapes priced together: enough that NumPy computes rather than starts, few enough for the second cache to hold some
# arrays of 18 tiles x 1024 float64 (0.15 MB). Compiled, they need an array of 7 splits, and long blocks let threads
# take turns at Python's lock more rarely: two threads went through 6.4 million a second in blocks of 2048, 9.8 in 8192.
ROWS_PER_BLOCK = 1024
ROWS_PER_COMPILED_BLOCK = 8192
# From here on loading Numba (0.4 s) pays within one call or two.
COMPILED_FROM_SHAPES = 200_000


def price_gemm(
    operation: Gemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
    run_flops: Array | None = None,
) -> GemmPrice:
    """Price one GEMM, or arrays of them.

    Args:
        operation: The product; its dims are ints, or arrays of one shape.
        device: The device.
        record: A record of kind ``gemm``.
        hot_cache: Operands may lie in the last-level cache from a previous run, as in a benchmark.
        library: Library and version whose kernels are meant, if the record knows it; otherwise the middle of all.
        run_flops: Work of the run of products that each was timed in, which sets their clock. Without it each counts by
            itself, or as of a run without end where the section was fitted to runs. [flop], of the dims' shape

    Returns:
        The price; floats for int dims, arrays for array dims.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
    """
    job = make_gemm_job(operation.dtype, operation.weight_dtype, device, record, hot_cache=hot_cache, library=library)
    shape, products = flatten(operation)
    if run_flops is not None:
        products = products._replace(run_flops=np.broadcast_to(run_flops, shape).reshape(-1))
    return price_products(shape, products, job)


def price_products(shape: tuple[int, ...], products: Products, job: GemmJob) -> GemmPrice:
    """Price products that stood in arrays of a shape."""
    columns = price_flat(products, job)
    if shape == ():
        return split_rows(GemmPrice, columns, job.label)[0]
    values: dict[str, Any] = {name: column.reshape(shape) for name, column in columns.items()}
    return GemmPrice(calibration=job.label, **values)


def estimate_gemm_s(
    operation: Gemm, device: Device, record: CalibrationRecord, *, hot_cache: bool = False, library: str = ""
) -> Any:
    """Time of one GEMM, or of arrays of them, without reasons and interval: for those who ask for very many. [s]

    It is the time_s of price_gemm, to perf.fastest.AGREEMENT, from the same arguments. Where Numba is installed, many
    shapes run through it, in as many threads as OMP_NUM_THREADS allows.
    """
    job = make_gemm_job(operation.dtype, operation.weight_dtype, device, record, hot_cache=hot_cache, library=library)
    return estimate_products_s(*flatten(operation), job)


def estimate_products_s(shape: tuple[int, ...], products: Products, job: GemmJob) -> Any:
    """Time of products that stood in arrays of a shape, as estimate_gemm_s gives it. [s]"""
    num_shapes = len(products.m)
    compiled = num_shapes >= COMPILED_FROM_SHAPES and has_compiler()
    rows_per_block = ROWS_PER_COMPILED_BLOCK if compiled else ROWS_PER_BLOCK
    time_s = np.empty(num_shapes)

    def fill(start: int) -> None:
        part = slice(start, start + rows_per_block)
        time_s[part] = _estimate_s(products.rows(part), job, compiled=compiled)

    # NumPy's loops over a block are too short for threads: two of them, taking turns at Python's lock, gain nothing.
    run_over_threads(fill, range(0, num_shapes, rows_per_block), num_threads=count_threads() if compiled else 1)
    return float(time_s[0]) if shape == () else time_s.reshape(shape)


def price_gemms(
    operations: Sequence[Gemm], device: Device, record: CalibrationRecord, *, library: str = ""
) -> list[GemmPrice]:
    """Price many scalar GEMMs at once: those of one combination of element formats share one evaluation."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for index, operation in enumerate(operations):
        groups.setdefault((operation.dtype, operation.weight_dtype), []).append(index)
    prices: list[GemmPrice | None] = [None] * len(operations)
    for (dtype, weight_dtype), indices in groups.items():
        job = make_gemm_job(dtype, weight_dtype, device, record, library=library)
        columns = price_flat(stack([operations[index] for index in indices]), job)
        for index, price in zip(indices, split_rows(GemmPrice, columns, job.label), strict=True):
            prices[index] = price
    return [price for price in prices if price is not None]


def stack(operations: Sequence[Gemm]) -> Products:
    """Scalar products in one row."""
    m, n, k, batch = np.array([(one.m, one.n, one.k, one.batch) for one in operations], dtype=float).T.copy()
    return Products(m, n, k, batch, contiguous_letters([one.layout for one in operations]))


def flatten(operation: Gemm) -> tuple[tuple[int, ...], Products]:
    """Shape of the dims, and the products in one row."""
    dims = (operation.m, operation.n, operation.k, operation.batch)
    m, n, k, batch = np.broadcast_arrays(*(np.asarray(dim, dtype=float) for dim in dims))
    letters = contiguous_letters(operation.layout)
    return m.shape, Products(m.reshape(-1), n.reshape(-1), k.reshape(-1), batch.reshape(-1), letters)


def _floor_s(products: Products, job: GemmJob) -> Array:
    """Roofline of each product, from arithmetic alone where its operands need not come from memory. [s]"""
    m, n, k, batch = products[:4]
    flops_s = 2.0 * m * n * k * batch / job.device.peak_flops_per_s(job.dtype)
    if job.is_hot:
        return flops_s
    num_bytes = (m * k + job.stored_share * k * n + m * n) * batch * (job.bits / 8)
    floor_s: Array = np.maximum(flops_s, num_bytes / job.device.memory_bandwidth_bytes_per_s)
    return floor_s


def _learned(products: Products, table: ResidualTable) -> tuple[Array, Array]:
    """Logarithm of the learned correction and its weight: a batch has kernels of its own, unknown to the tables."""
    if table.has_layers:
        return _learned_of_experts(products, table)
    logs, weight = log_correction(table, products.m, products.n, products.k)
    is_batch = products.batch > 1.0
    if is_batch.any():
        logs, weight = np.where(is_batch, 0.0, logs), np.where(is_batch, 0.0, weight)
    return logs, weight


def _learned_of_experts(products: Products, table: ResidualTable) -> tuple[Array, Array]:
    """The same of expert layers, of which tables know what serving libraries run: rows of an expert in m."""
    if products.choice is None:
        return np.zeros_like(products.m), np.zeros_like(products.m)
    step, inner, hidden = products.choice
    return log_correction(table, products.m, products.batch, inner, hidden, layer=step - TUNED)


def _estimate_s(products: Products, job: GemmJob, *, compiled: bool) -> Array:
    """Times alone, of a block of products. [s]"""
    floor_s = _floor_s(products, job)
    if job.section is None or job.rates is None:
        return floor_s
    rates = job.rates

    def estimate(own: Products, parameters: GemmParameters) -> dict[str, Array]:
        return {"time_s": estimate_block_s(own, parameters, rates, compiled=compiled)}

    time_s: Array = np.maximum(_by_menu(estimate, products, job.section)["time_s"], floor_s)
    if job.residual is not None:
        time_s = np.maximum(time_s * np.exp(_learned(products, job.residual)[0]), floor_s)
    return time_s


def price_flat(products: Products, job: GemmJob) -> dict[str, Array]:
    """Price products block by block; fields of GemmPrice by name."""
    floor_s = _floor_s(products, job)
    if job.section is None or job.rates is None:
        return _roofline_price(products, floor_s, job)
    section, rates = job.section, job.rates

    def price(own: Products, parameters: GemmParameters) -> dict[str, Array]:
        return price_block(own, parameters, rates)

    starts = range(0, len(floor_s), ROWS_PER_BLOCK)
    blocks = [_by_menu(price, products.rows(slice(start, start + ROWS_PER_BLOCK)), section) for start in starts]
    columns = blocks[0] if len(blocks) == 1 else _join_blocks(blocks)
    time_s = np.maximum(columns.pop("time_s"), floor_s)
    low, high = section.interval.factors(time_s, job.widening)
    shared = section.interval.shared_error(time_s)
    is_batch = products.batch > 1.0
    if section.batched_interval is not None and is_batch.any():
        ends = section.batched_interval.factors(time_s, job.widening)
        low, high = (np.where(is_batch, *pair) for pair in zip(ends, (low, high), strict=True))
        shared = np.where(is_batch, section.batched_interval.shared_error(time_s), shared)
    correction = np.ones_like(time_s)
    if job.residual is not None:
        logs, weight = _learned(products, job.residual)
        corrected_s = np.maximum(time_s * np.exp(logs), floor_s)
        correction, time_s = corrected_s / time_s, corrected_s
        near_low, near_high = section.residual_interval.factors(time_s, job.widening)
        low, high = near_low**weight * low ** (1.0 - weight), near_high**weight * high ** (1.0 - weight)
    is_poor = columns["alignment_bytes"] < WIDEST_LOAD_BYTES
    if job.carries_alignment and is_poor.any():
        is_known = is_batch & (section.batched_interval is not None)  # made of batches with odd sizes
        wider = with_error((low, high), _alignment_error(columns, section.parameters.overlap_power))
        low, high = (np.where(is_poor & ~is_known, *pair) for pair in zip(wider, (low, high), strict=True))
    return {
        "time_s": time_s,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "shared_error": shared,
        "correction": correction,
        "roofline_s": floor_s,
        **columns,
    }


def _alignment_error(columns: Mapping[str, Array], overlap_power: float) -> Array:
    """What poor ones of carried alignment factors may be wrong by, as a logarithm, the less the more traffic counts."""
    # By how much the joined time grows with arithmetic's: the slope of perf.kernels.join_s, on logarithms.
    slope = 1.0 / (1.0 + (columns["memory_s"] / columns["compute_s"]) ** overlap_power)
    error: Array = np.log(CARRIED_ALIGNMENT_ERROR) * slope
    return error


def _by_menu(
    work: Callable[[Products, GemmParameters], dict[str, Array]], products: Products, section: Section
) -> dict[str, Array]:
    """Columns of a block; those of batches, and of default tiles, with the kernels that the section has for them."""
    if section.rule is not None and products.choice is None:
        # A training stack's kernels are as good as the best known: some tuned tiles are older than the default.
        return _faster(work(products, section.parameters), work(products, section.rule.steps[-1]))
    if section.rule is not None and products.choice is not None:
        menus = {TUNED: section.parameters, **dict(enumerate(section.rule.steps))}
        return _by_step(work, products, products.choice.step, menus)
    if section.batched is None or not (is_batch := products.batch > 1.0).any():
        return work(products, section.parameters)
    if is_batch.all():
        return work(products, section.batched)
    single = work(products.rows(~is_batch), section.parameters)
    batched = work(products.rows(is_batch), section.batched)
    columns = {name: np.empty(len(is_batch)) for name in single}
    for name, column in columns.items():
        column[~is_batch], column[is_batch] = single[name], batched[name]
    return columns


def _faster(one: dict[str, Array], other: dict[str, Array]) -> dict[str, Array]:
    """Columns of two menus, each product's from the one that runs it faster."""
    is_other = other["time_s"] < one["time_s"]
    return {name: np.where(is_other, other[name], column) for name, column in one.items()}


def _by_step(
    work: Callable[[Products, GemmParameters], dict[str, Array]],
    products: Products,
    step: NDArray[np.intp],
    menus: Mapping[int, GemmParameters],
) -> dict[str, Array]:
    """Columns of a block of expert layers, each with the kernels of its step."""
    columns: dict[str, Array] = {}
    for each in np.unique(step).tolist():
        here = step == each
        if here.all():
            return work(products, menus[each])
        for name, own in work(products.rows(here), menus[each]).items():
            columns.setdefault(name, np.empty(len(here)))[here] = own
    return columns


def _join_blocks(blocks: Sequence[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _roofline_price(products: Products, floor_s: Array, job: GemmJob) -> dict[str, Array]:
    """Bound for a device whose tiles are not modelled; the label says that it is one."""
    m, n, k, batch = products[:4]
    one, zero = np.ones_like(floor_s), np.zeros_like(floor_s)
    num_bytes = (m * k + job.stored_share * k * n + m * n) * batch * (job.bits / 8)
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
        "compute_s": 2.0 * m * n * k * batch / job.device.peak_flops_per_s(job.dtype),
        "memory_s": num_bytes / job.device.memory_bandwidth_bytes_per_s,
        "roofline_s": floor_s,
        **dict.fromkeys(unknown, zero),
        **dict.fromkeys((*neutral, "slow_factor"), one),
    }
