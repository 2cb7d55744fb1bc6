"""Price of an expert layer's GEMMs: rows split evenly over experts, with kernels of a ``moe`` record.

Legend: R rows over all experts of a device, g experts that may be active, a active experts, n columns, k contraction.

    a     = min(g, R)                                                each reads its weights once
    tiles = a ceil((R / a) / tile rows) ceil(n / tile columns)       the rest as in gemm.kernels

The kernels differ from those of dense GEMMs (docs/decisions/0007): rows are gathered, tiles of one expert do not
continue into the next, and libraries choose tiles by fewer rules. So a record of kind ``moe`` has its own candidate
kernels.

A price contains one of the two GEMMs, which gathers its rows, and half of the block's cost besides its listed
operations (sorting tokens by expert, starting kernels). Activation and unpermutation are priced as pointwise
operations; the record was fitted so that two GEMMs and these add up to the measured block.

Assumes: rows are spread evenly over the active experts. A skewed router is slower by the load of its busiest device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.transfer import sm_rate_scale
from shapewright.pricing.experts.kernels import (
    choose_expert_kernel,
    custom_kernel_record,
    drop_poor_kernels_if_transferred,
)
from shapewright.pricing.experts.tiles import TUNED, tuned_shapes
from shapewright.pricing.gemm.price import estimate_shaped_s, flatten, price_flat, price_shaped, stack
from shapewright.pricing.gemm.section import FALLBACK_DTYPES, prepare_gemm_pricing
from shapewright.pricing.gemm.shapes import ExpertChoice
from shapewright.pricing.price import GemmPrice, split_rows

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.gemm import GroupedGemm
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.gemm.section import GemmPricing
    from shapewright.pricing.gemm.shapes import Gemms

    PerLayer = Float[np.ndarray, "layers"]


def price_grouped_gemm(
    operation: GroupedGemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
) -> GemmPrice:
    """Price the GEMMs of one expert layer, or arrays of them.

    Args:
        operation: The GEMMs; dims and groups are ints, or arrays of one shape.
        record: A record of kind ``moe``.
        hot_cache: Whether weights may lie in the last-level cache from a previous run, as in a benchmark.
        library: Running library, version and kernel, such as ``vllm 0.24.0/triton``; unmeasured ones are priced as a
            kernel of the same family (experts.kernels), else by the record's default.

    Returns:
        The price; floats for int dims, arrays for array dims.

    Raises:
        UnknownRateError: the device has no rate for the dtype.
        CalibrationError: the record is malformed.
    """
    return price_shaped(*_prepare(operation, device, record, hot_cache=hot_cache, library=library))


def estimate_grouped_gemm_s(
    operation: GroupedGemm,
    device: Device,
    record: CalibrationRecord,
    *,
    hot_cache: bool = False,
    library: str = "",
) -> Any:
    """Time of the GEMMs of one expert layer, or of arrays of them, without decomposition and interval. [s]

    Equals the time_s of price_grouped_gemm with the same arguments.
    """
    return estimate_shaped_s(*_prepare(operation, device, record, hot_cache=hot_cache, library=library))


def price_grouped_gemms(
    operations: Sequence[GroupedGemm], device: Device, record: CalibrationRecord
) -> list[GemmPrice]:
    """Price many scalar grouped GEMMs, in their order."""
    groups: dict[tuple[bool, bool, str, str | None, bool], list[int]] = {}
    for index, one in enumerate(operations):
        use = (one.is_training, one.leaves_poor_kernel, one.dtype, one.weight_dtype, one.tokens is None)
        groups.setdefault(use, []).append(index)
    prices: dict[int, GemmPrice] = {}
    for own in groups.values():
        first = operations[own[0]]
        own_record, uses_tile_rule = _record_of(first, record)
        pricing = prepare_gemm_pricing(first.dtype, first.weight_dtype, device, own_record)
        gemms = stack([split_evenly(operations[index]) for index in own])
        if uses_tile_rule:
            sizes = [(one.tokens, one.experts, one.inner, one.n, one.k) for one in map(operations.__getitem__, own)]
            gemms = gemms._replace(choice=_choose_kernels(pricing, *np.array(sizes, dtype=float).T))
        prices.update(zip(own, split_rows(GemmPrice, price_flat(gemms, pricing), pricing.source), strict=True))
    return [prices[index] for index in range(len(operations))]


def describe_tiles(operation: GroupedGemm, device: Device, record: CalibrationRecord) -> str:
    """Text for whether the pricing serving library has tuned tiles for a layer; empty where it has no tile rule.

    Args:
        operation: One layer; its sizes are ints.
        record: A record of kind ``moe``.
    """
    _, gemms, pricing = _prepare(operation, device, record)
    rule, choice = pricing.section and pricing.section.rule, gemms.choice
    if not rule or choice is None:
        return ""
    shape = f"{operation.experts} experts of inner width {operation.inner} on {device.name}"
    if choice.step[0] == TUNED:
        return f"{rule.library} has tuned tiles for {shape}"
    return f"{rule.library} has no tuned tiles for {shape}, and takes its default for {operation.tokens} tokens"


def _record_of(operation: GroupedGemm, record: CalibrationRecord) -> tuple[CalibrationRecord, bool]:
    """Return the record without kernels that the software does not use, and whether a library's tile rule applies."""
    if operation.is_training:
        return custom_kernel_record(record, operation.dtype), False
    # Kernels that widen weights (triton_kernels and Marlin for MXFP4 under 16 bits) have no files of tiles to look up.
    is_looked_up = operation.tokens is not None and operation.weight_dtype in (None, operation.dtype)
    if operation.leaves_poor_kernel:
        kept = custom_kernel_record(record, operation.dtype)
        return kept, kept is record and is_looked_up
    return record, is_looked_up


def _prepare(
    operation: GroupedGemm, device: Device, record: CalibrationRecord, *, hot_cache: bool = False, library: str = ""
) -> tuple[tuple[int, ...], Gemms, GemmPricing]:
    """Return the shape of the dims, the GEMMs of an even split with their kernel choice, and what prices them."""
    own_record, uses_tile_rule = _record_of(operation, record)
    pricing = prepare_gemm_pricing(
        operation.dtype, operation.weight_dtype, device, own_record, hot_cache=hot_cache, library=library
    )
    shape, gemms = flatten(split_evenly(operation))
    if uses_tile_rule:
        sizes = (operation.tokens, operation.experts, operation.inner, operation.n, operation.k)
        flat = (np.broadcast_to(np.asarray(size, dtype=float), shape).reshape(-1) for size in sizes)
        gemms = gemms._replace(choice=_choose_kernels(pricing, *flat))
    return shape, gemms, pricing


def _choose_kernels(
    pricing: GemmPricing, tokens: PerLayer, experts: PerLayer, inner: PerLayer, n: PerLayer, k: PerLayer
) -> ExpertChoice:
    """Kernel of each layer in a serving library; the fastest candidate where no tile rule was measured."""
    step, rule = np.full(tokens.shape, TUNED), pricing.section and pricing.section.rule
    if rule:
        step = rule.choose(tokens, experts, inner, tuned_shapes(rule.library, pricing.dtype, pricing.device.name))
    # The second GEMM contracts the inner width and has hidden columns; the first contracts the hidden width.
    return ExpertChoice(step, inner, np.where(k == inner, n, k))


def split_evenly(operation: GroupedGemm) -> Gemm:
    """Return the batch of equal GEMMs of an even split of rows; their rows may be fractional.

    For weight gradients (layout TN) k is the dimension that is split.
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
    """Cost of a row of another device's expert, as a fraction of clearing and reading a row of this device.

    Serving libraries that share tokens without an exchange keep such rows in their buffers, and clear or skip them. In
    a step with an exchange there are none.

    Raises:
        CalibrationError: the record has no section for the dtype or its fallbacks.
    """
    return float(_section_of(record, dtype, library)["idle_row_share"])


def read_lone_row_s_per_byte(record: CalibrationRecord, device: Device, dtype: str, library: str = "") -> float:
    """Added time of summing the single row of a top-1 token, besides the listed unpermutation. [s/byte]

    vllm has special kernels for two to four rows and uses a general reduction for one, which is bound by the SMs: as
    long on H200 as on H100 (docs/decisions/0007). It is 0 for other libraries.

    Raises:
        CalibrationError: the record has no section for the dtype or its fallbacks.
    """
    own_s_per_byte = float(_section_of(record, dtype, library).get("lone_row_s_per_byte", 0.0))
    return own_s_per_byte / sm_rate_scale(device, record)


def _section_of(record: CalibrationRecord, dtype: str, library: str) -> Mapping[str, Any]:
    """Section of a record for a kernel in a format, or in its nearest measured fallback."""
    record = drop_poor_kernels_if_transferred(record)
    libraries, default = record.parameters["libraries"], record.parameters["dtypes"]
    formats = (dtype, *FALLBACK_DTYPES[dtype])
    for own in (libraries.get(choose_expert_kernel(record, formats, library), {}), default):
        for name in formats:
            if name in own:
                found: Mapping[str, Any] = own[name]
                return found
    raise CalibrationError(
        f"record {record.id} has no section for {dtype} nor for {', '.join(FALLBACK_DTYPES[dtype])}; "
        f"it has {', '.join(default)}"
    )
