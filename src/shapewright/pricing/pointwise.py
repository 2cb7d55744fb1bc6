"""Price of pointwise operations: memory traffic over achieved bandwidth, plus a fixed cost per kernel.

    time_s = kernels x start + bytes / (fraction of the kind x bandwidth) x cache factor

The fraction depends on the kind of operation: a residual addition streams, a norm reads its row twice through one
block, dropout draws random numbers. Small footprints hit the last-level cache (cache factor below 1), but no price is
below bytes over bandwidth.

Assumes: contiguous operands; rows wide enough to fill a block.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.intervals import choose_interval, read_residual_groups
from shapewright.pricing.calibration.records import FP32_POINTWISE, TRANSFER_WIDENING, list_records, load_record
from shapewright.pricing.calibration.source import ROOFLINE_BOUND, CalibrationSource
from shapewright.pricing.calibration.transfer import fixed_cost_scale, sm_rate_scale
from shapewright.pricing.price import ROOFLINE_HIGH_FACTOR, Price, split_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Float

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.pointwise import Pointwise
    from shapewright.pricing.calibration.records import CalibrationRecord

    KernelNumbers = Float[np.ndarray, "9 *kinds"]
    PerOperation = Float[np.ndarray, "*operations"]

# Ratio of read to written bytes above which an activation has a gate, another kernel with its own fraction, if it does
# not state whether it has one.
GATED_READ_RATIO = 1.5
BACKWARD = "_backward"
"""End of the names of kinds that are gradients of norms."""
# Bandwidth share of a norm's gradient over that of the norm where no gradient was measured: PyTorch's kernel for the
# weights' gradient reads both inputs again, which makes five passes of three.
_UNMEASURED_GRADIENT_SHARE = 3.0 / 5.0
# Steepness of the last-level cache's edge.
CACHE_EDGE_POWER = 4.0

# Widening of the logarithmic interval for kinds whose fraction comes from a few medians or from a similar kind.
_ASSUMED_WIDENING = 1.6

# Upper end of the interval of an operator of which only the bytes are known, over that of other kernels. A judgement,
# not a measurement: scans and gathers in plain PyTorch reach a tenth of the bandwidth of one fused kernel.
_UNKNOWN_HIGH_FACTOR = 10.0


def price_pointwise(operation: Pointwise, device: Device, record: CalibrationRecord) -> Price:
    """Price a pointwise operation.

    Args:
        operation: The operation; its bytes and num_kernels may be arrays of one shape.
        record: A record of kind ``pointwise``.

    Returns:
        The price; floats for scalar bytes, arrays for arrays.
    """
    sizes, kernels, record = _read_sizes(operation, device, record)
    columns, source = _price_arrays(*sizes, kernels, device, record)
    values: dict[str, Any] = {name: float(v) if np.ndim(v) == 0 else v for name, v in columns.items()}
    return Price(calibration=source, **values)


def estimate_pointwise_s(operation: Pointwise, device: Device, record: CalibrationRecord) -> PerOperation:
    """Time of ``price_pointwise`` alone, for searches: an interval costs as much again. [s]"""
    sizes, kernels, record = _read_sizes(operation, device, record)
    return _time_arrays(*sizes, kernels, device, record)["time_s"]


def _read_sizes(
    operation: Pointwise, device: Device, record: CalibrationRecord
) -> tuple[tuple[PerOperation, PerOperation, PerOperation], KernelNumbers, CalibrationRecord]:
    """Read bytes, written bytes and kernels of an operation; the constants of its kind; and their record."""
    numbers = (operation.read_bytes, operation.written_bytes, operation.num_kernels)
    read_bytes, written_bytes, num_kernels = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in numbers))
    record = _record_of(operation, device, record)
    kernels = _kernel_numbers([operation], device, record)[:, 0]
    return (read_bytes, written_bytes, num_kernels), kernels, record


def price_pointwises(operations: Sequence[Pointwise], device: Device, record: CalibrationRecord) -> list[Price]:
    """Price many scalar pointwise operations, in their order."""
    records = [_record_of(operation, device, record) for operation in operations]
    prices = {}
    for known in {own.id: own for own in records}.values():
        priced = [one for one, own in zip(operations, records, strict=True) if own.id == known.id]
        prices[known.id] = iter(_price_all(priced, device, known))
    return [next(prices[own.id]) for own in records]


def _record_of(operation: Pointwise, device: Device, record: CalibrationRecord) -> CalibrationRecord:
    """Record that prices an operation: that of fp32 for its kinds, unless a user's own record prices all formats."""
    is_own = "pointwise" in device.own_records and not device.uncalibrated
    kind = _kernel_kind(operation).removesuffix(BACKWARD)
    if operation.dtype != "fp32" or record.kind != "pointwise" or is_own or kind not in _fp32_kinds():
        return record
    fp32 = load_record(FP32_POINTWISE, device)
    return fp32 if kind in fp32.parameters["kinds"] else record


@cache
def _fp32_kinds() -> frozenset[str]:
    """Kinds that were measured in fp32 on any device; for others, such as the optimizer, no donor is looked for."""
    return frozenset(kind for record in list_records(FP32_POINTWISE) for kind in record.parameters["kinds"])


def _kernel_kind(operation: Pointwise) -> str:
    """Kind whose kernels run: those of PyTorch's chain for a norm reach as much of the bandwidth as activations do."""
    if operation.is_chain and operation.operation == "norm":
        return "activation"
    return f"{operation.operation}{BACKWARD}" if operation.is_backward else operation.operation


def _price_all(operations: Sequence[Pointwise], device: Device, record: CalibrationRecord) -> list[Price]:
    sizes = [(op.read_bytes, op.written_bytes, op.num_kernels) for op in operations]
    read_bytes, written_bytes, num_kernels = np.array(sizes, dtype=float).T
    kernels = _kernel_numbers(operations, device, record)
    columns, source = _price_arrays(read_bytes, written_bytes, num_kernels, kernels, device, record)
    return split_rows(Price, columns, source)


def _kernel_numbers(operations: Sequence[Pointwise], device: Device, record: CalibrationRecord) -> KernelNumbers:
    """Constants of the kinds of operations, and whether each has a gate: 1, 0, or NaN where its bytes tell."""
    gates = [np.nan if operation.is_gated is None else float(operation.is_gated) for operation in operations]
    return np.vstack([_kind_numbers([_kernel_kind(operation) for operation in operations], device, record), gates])


def _kind_numbers(kinds: Sequence[str], device: Device, record: CalibrationRecord) -> Float[np.ndarray, "8 kinds"]:
    """Constants of each kind; shape [8, kinds].

    Fraction and start of the plain and of the gated kernel, whether these belong to the record's own device, further
    widening of the record's interval, and two factors on the interval's ends. On another vendor's chip, and on an
    architecture with kernels of its own in the record, a kind uses the kernel measured there, if any.
    """
    table: Mapping[str, Mapping[str, Any]] = record.parameters["kinds"]
    rows = []
    for kind in kinds:
        foreign = table.get(f"foreign_{kind}") if record.distance == "foreign" else None
        local = table.get(f"{device.architecture}_{kind}")
        plain = foreign or local or table.get(kind) or _unmeasured(kind, table)
        gated = table.get(f"gated_{kind}", plain)
        measured = _foreign_ends(kind, foreign["device"], device, record) if foreign else None
        widening = 1.0 if plain.get("in_table", False) else _ASSUMED_WIDENING
        numbers = [entry[name] for entry in (plain, gated) for name in ("bandwidth_fraction", "start_s")]
        ends = measured or (1.0, _UNKNOWN_HIGH_FACTOR if kind == "unknown" else 1.0)
        rows.append([*numbers, float(not (foreign or local)), 0.0 if measured else widening, *ends])
    return np.array(rows).T


def _unmeasured(kind: str, table: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Constants of a kind that a record lacks: for the gradient of a norm from the norm, for others ``other``."""
    norm = table.get(kind.removesuffix(BACKWARD))
    if norm is None or not kind.endswith(BACKWARD):
        return {**table["other"], "in_table": False}
    return {**norm, "bandwidth_fraction": norm["bandwidth_fraction"] * _UNMEASURED_GRADIENT_SHARE}


def _foreign_ends(kind: str, measured: str, device: Device, record: CalibrationRecord) -> tuple[float, float] | None:
    """Ends of the interval of a kernel of another vendor's chip, as factors; None where no group has them.

    Args:
        measured: The chip whose kernel it is. It predicts its siblings worse, other chips of its vendor worse still,
            and a third vendor's as vendors predict each other.
        device: The chip to price.
        record: The record that holds it.
    """
    chip = load_device(measured)
    is_known = chip.vendor == device.vendor
    found = read_residual_groups(record.kind).get(f"own/{measured}/{kind}" if is_known else f"foreign/{kind}")
    if not found:
        return None
    distance = "exact" if record.recipient == measured else "architecture"
    if chip.architecture != device.architecture:
        distance = "generic"
    widening = TRANSFER_WIDENING[distance] if is_known else 1.0
    return found["low"][0] ** widening, found["high"][0] ** widening


def _price_arrays(
    read_bytes: PerOperation,
    written_bytes: PerOperation,
    num_kernels: PerOperation,
    kernels: KernelNumbers,
    device: Device,
    record: CalibrationRecord,
) -> tuple[dict[str, PerOperation], CalibrationSource]:
    """Fields of a price, and its source."""
    times = _time_arrays(read_bytes, written_bytes, num_kernels, kernels, device, record)
    time_s, floor_s = times["time_s"], times["roofline_s"]
    if device.roofline_only:
        source, shared = ROOFLINE_BOUND, np.zeros_like(floor_s)
        low, high = np.ones_like(floor_s), np.full_like(floor_s, ROOFLINE_HIGH_FACTOR)
    else:
        *_, widening, least, most, _ = kernels
        interval = choose_interval(record, record.interval, "pointwise")
        source, shared = record.source, interval.shared_error(time_s)
        low, high = interval.factors(time_s, widening)
        low, high = low * least, high * most
    fields = {
        **times,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "shared_error": shared,
        "compute_s": np.zeros_like(floor_s),
    }
    return fields, source


def _time_arrays(
    read_bytes: PerOperation,
    written_bytes: PerOperation,
    num_kernels: PerOperation,
    kernels: KernelNumbers,
    device: Device,
    record: CalibrationRecord,
) -> dict[str, PerOperation]:
    """Times of a price, by its fields."""
    num_bytes = read_bytes + written_bytes
    floor_s = num_bytes / device.memory_bandwidth_bytes_per_s
    if device.roofline_only:
        return {"time_s": floor_s, "memory_s": floor_s, "start_s": np.zeros_like(floor_s), "roofline_s": floor_s}
    plain_fraction, plain_start_s, gated_fraction, gated_start_s, is_carried, *_, gate = kernels
    has_gate = np.where(np.isnan(gate), read_bytes > GATED_READ_RATIO * written_bytes, gate > 0.0)
    start_s = num_kernels * np.where(has_gate, gated_start_s, plain_start_s) * fixed_cost_scale(device, record)
    fraction = np.where(has_gate, gated_fraction, plain_fraction)
    fraction = np.where(is_carried > 0.0, _transfer_fraction(fraction, device, record), fraction)
    memory_s = floor_s / fraction * _cache_factor(num_bytes, device, record)
    time_s = np.maximum(start_s + memory_s, floor_s)
    return {"time_s": time_s, "memory_s": memory_s, "start_s": start_s, "roofline_s": floor_s}


def _transfer_fraction(fraction: PerOperation, device: Device, record: CalibrationRecord) -> PerOperation:
    """Fraction of bandwidth that a donor's kernel reaches on a device.

        1 / fraction = 1 / streaming + (1 / donor's fraction - 1 / streaming) x min(1, bandwidth ratio / SM rate ratio)

    The record's best kernel is limited by memory alone, and its fraction is kept. The additional time of others is
    spent in the SMs: a norm at 37 % of A100's bandwidth waits for its reduction, which takes as many clock cycles on a
    device with a third of that bandwidth. Where memory is faster per SM, fractions are kept, since newer kernels use
    it: with the ratio above 1, steps on GB200 were 7.3 instead of 5.9 % off.
    """
    if record.transfer == "exact":
        return fraction
    kinds: Mapping[str, Mapping[str, float]] = record.parameters["kinds"]
    streaming = max(entry["bandwidth_fraction"] for entry in kinds.values())
    donor = load_device(record.device)
    growth = device.memory_bandwidth_bytes_per_s / donor.memory_bandwidth_bytes_per_s / sm_rate_scale(device, record)
    carried: PerOperation = 1.0 / (1.0 / streaming + (1.0 / fraction - 1.0 / streaming) * min(growth, 1.0))
    return carried


def _cache_factor(num_bytes: PerOperation, device: Device, record: CalibrationRecord) -> PerOperation:
    """Fraction of the traffic's time that remains where operands lie in the last-level cache."""
    reach_bytes = max((device.l2_bytes or 0.0) * record.parameters["l2_reach_fraction"], 1.0)
    resident = 1.0 / (1.0 + np.minimum(num_bytes / reach_bytes, 1e6) ** CACHE_EDGE_POWER)
    factor: PerOperation = 1.0 - resident * (1.0 - 1.0 / float(record.parameters["l2_speedup"]))
    return factor
