"""Price of an expert layer's products: an even split of rows over experts, through kernels of their own record.

Legend: R rows over all experts of a device, g experts that may get one, a of them that do, n columns, k contraction.

    a     = min(g, R)                                                each reads its weights once
    tiles = a ceil((R / a) / tile rows) ceil(n / tile columns)       the rest as in perf.kernels

The kernels differ from those of dense products (docs/decisions/0007-moe.md): rows are gathered, tiles of one expert do
not continue into the next, and libraries choose tiles by fewer rules. So a record of kind ``moe`` has its own menu.

What a price contains: one of the two products, which gathers its rows, with half of what a block costs beside its
listed operations (sorting tokens by expert, starting kernels). Activation and unpermutation are priced as pointwise
operations; the record was fitted so that two products and these add up to the measured block.

Assumes: rows are spread evenly over the experts in use. A skewed router is slower by what its busiest device gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.operations.gemm import Gemm
from shapewright.perf.expert_kernels import choose_expert_kernel, leave_poor_matches, own_kernel_record
from shapewright.perf.expert_tiles import TUNED, tuned_shapes
from shapewright.perf.gemm import estimate_products_s, flatten, price_flat, price_products, stack
from shapewright.perf.gemm_job import DTYPE_KIN, make_gemm_job
from shapewright.perf.lending import sm_rate_scale
from shapewright.perf.price import GemmPrice, split_rows
from shapewright.perf.products import ExpertChoice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.operations import GroupedGemm
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_job import GemmJob
    from shapewright.perf.products import Products

    Array = NDArray[np.float64]


def price_grouped_gemm(
    operation: GroupedGemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
) -> GemmPrice:
    """Price the products of one expert layer, or arrays of them.

    Args:
        operation: The products; dims and groups are ints, or arrays of one shape.
        device: The device.
        record: A record of kind ``moe``.
        hot_cache: Weights may lie in the last-level cache from a previous run, as in a benchmark.
        library: Library, version and kernel that are meant, such as ``vllm 0.24.0/triton``; of those that the record
            does not know, a kernel of the same family stands for them (perf.expert_kernels), else the record's default.

    Returns:
        The price; floats for int dims, arrays for array dims.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
        CalibrationError: the record is malformed.
    """
    record, asks_list = _record_of(operation, record)
    job = make_gemm_job(operation.dtype, operation.weight_dtype, device, record, hot_cache=hot_cache, library=library)
    return price_products(*_flatten(operation, job, asks_list=asks_list), job)


def estimate_grouped_gemm_s(
    operation: GroupedGemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
) -> Any:
    """Time of the products of one expert layer, or of arrays of them, without reasons and interval. [s]

    It is the time_s of price_grouped_gemm, from the same arguments.
    """
    record, asks_list = _record_of(operation, record)
    job = make_gemm_job(operation.dtype, operation.weight_dtype, device, record, hot_cache=hot_cache, library=library)
    return estimate_products_s(*_flatten(operation, job, asks_list=asks_list), job)


def price_grouped_gemms(
    operations: Sequence[GroupedGemm], device: Device, record: CalibrationRecord
) -> list[GemmPrice]:
    """Price many scalar grouped products at once, in their order."""
    groups: dict[tuple[bool, bool, str, str | None, bool], list[int]] = {}
    for index, one in enumerate(operations):
        use = (one.is_training, one.leaves_poor_kernel, one.dtype, one.weight_dtype, one.tokens is None)
        groups.setdefault(use, []).append(index)
    prices: dict[int, GemmPrice] = {}
    for own in groups.values():
        first = operations[own[0]]
        own_record, asks_list = _record_of(first, record)
        job = make_gemm_job(first.dtype, first.weight_dtype, device, own_record)
        products = stack([split_evenly(operations[index]) for index in own])
        if asks_list:
            sizes = [(one.tokens, one.experts, one.inner, one.n, one.k) for one in map(operations.__getitem__, own)]
            products = products._replace(choice=_choose_kernels(job, *np.array(sizes, dtype=float).T))
        prices.update(zip(own, split_rows(GemmPrice, price_flat(products, job), job.label), strict=True))
    return [prices[index] for index in range(len(operations))]


def say_tiles(operation: GroupedGemm, device: Device, record: CalibrationRecord) -> str:
    """Whether the serving library that prices a layer has tuned tiles for it, in words; empty where it has no rule.

    Args:
        operation: One layer; its sizes are ints.
        device: The device.
        record: A record of kind ``moe``.
    """
    own_record, asks_list = _record_of(operation, record)
    job = make_gemm_job(operation.dtype, operation.weight_dtype, device, own_record)
    rule = job.section and job.section.rule
    choice = _flatten(operation, job, asks_list=asks_list)[1].choice
    if not rule or choice is None:
        return ""
    shape = f"{operation.experts} experts of inner width {operation.inner} on {device.name}"
    if choice.step[0] == TUNED:
        return f"{rule.library} has tuned tiles for {shape}"
    return f"{rule.library} has no tuned tiles for {shape}, and takes its default for {operation.tokens} tokens"


def _record_of(operation: GroupedGemm, record: CalibrationRecord) -> tuple[CalibrationRecord, bool]:
    """The record without a kernel that the stack leaves aside, and whether a serving library's list chooses tiles."""
    if operation.is_training:
        return own_kernel_record(record, operation.dtype), False
    if operation.leaves_poor_kernel:
        kept = own_kernel_record(record, operation.dtype)
        return kept, kept is record and operation.tokens is not None
    return record, operation.tokens is not None


def _flatten(operation: GroupedGemm, job: GemmJob, *, asks_list: bool) -> tuple[tuple[int, ...], Products]:
    """Shape of the dims, and the products of an even split with the kernels that a serving library takes."""
    shape, products = flatten(split_evenly(operation))
    if not asks_list:
        return shape, products
    sizes = (operation.tokens, operation.experts, operation.inner, operation.n, operation.k)
    flat = (np.broadcast_to(np.asarray(size, dtype=float), shape).reshape(-1) for size in sizes)
    return shape, products._replace(choice=_choose_kernels(job, *flat))


def _choose_kernels(job: GemmJob, tokens: Array, experts: Array, inner: Array, n: Array, k: Array) -> ExpertChoice:
    """What a serving library runs each layer with; the fastest of a menu where it has no rule that was measured."""
    step, rule = np.full(tokens.shape, TUNED), job.section and job.section.rule
    if rule:
        step = rule.choose(tokens, experts, inner, tuned_shapes(rule.library, job.dtype, job.device.name))
    # The second product contracts the inner width and has the hidden one as columns, the first contracts the hidden.
    return ExpertChoice(step, inner, np.where(k == inner, n, k))


def split_evenly(operation: GroupedGemm) -> Gemm:
    """The batch of equal products that stands for an even split of rows; their rows need not be whole.

    For wgrad (layout TN) k is the dimension that is split.
    """
    rows = operation.k if operation.layout == "TN" else operation.m
    active: Any = np.maximum(np.minimum(operation.groups, rows), 1)
    share = rows / active
    m, k = (operation.m, share) if operation.layout == "TN" else (share, operation.k)
    return Gemm(
        name=operation.name,
        pass_name=operation.pass_name,
        stage=operation.stage,
        repeats=operation.repeats,
        dtype=operation.dtype,
        m=m,
        n=operation.n,
        k=k,
        batch=active,
        layout=operation.layout,
        weight_dtype=operation.weight_dtype,
    )


def read_idle_row_share(record: CalibrationRecord, dtype: str, library: str = "") -> float:
    """Cost of a row that another device's expert works on, as a share of clearing and reading all that it has here.

    Serving libraries that share tokens without an exchange keep such rows in their buffers, and clear or skip them. In
    a step with an exchange there are none.

    Raises:
        CalibrationError: the record has no section for the dtype nor for its kin.
    """
    return float(_section_of(record, dtype, library)["idle_row_share"])


def read_lone_row_s_per_byte(record: CalibrationRecord, device: Device, dtype: str, library: str = "") -> float:
    """What a library takes to sum the one row of a top 1 token, beyond the listed unpermutation. [s/byte]

    vllm has kernels of its own for two to four rows and leaves one to a general reduction, which is bound by the
    multiprocessors: as long on H200 as on H100 (docs/decisions/0007-moe.md). Other libraries take nothing.

    Raises:
        CalibrationError: the record has no section for the dtype nor for its kin.
    """
    own_s_per_byte = float(_section_of(record, dtype, library).get("lone_row_s_per_byte", 0.0))
    return own_s_per_byte / sm_rate_scale(device, record)


def _section_of(record: CalibrationRecord, dtype: str, library: str) -> Mapping[str, Any]:
    """What a record says of a kernel in a format, or in the nearest that it knows."""
    record = leave_poor_matches(record)
    libraries, default = record.parameters["libraries"], record.parameters["dtypes"]
    formats = (dtype, *DTYPE_KIN[dtype])
    for own in (libraries.get(choose_expert_kernel(record, formats, library), {}), default):
        for name in formats:
            if name in own:
                found: Mapping[str, Any] = own[name]
                return found
    raise CalibrationError(
        f"record {record.id} has no section for {dtype} nor for {', '.join(DTYPE_KIN[dtype])}; "
        f"it has {', '.join(default)}"
    )
