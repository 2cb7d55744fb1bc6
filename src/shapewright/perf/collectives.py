"""Price of a collective: the cheapest protocol of the library, inside a node and between nodes.

Legend: M message (Collective.message_bytes), r ranks, L of them in one node, k = ceil(r / L) nodes, V bytes that the
busiest rank sends in a ring (all_reduce 2 M (r-1)/r, the others M (r-1)/r, send_recv M), B link bandwidth per device in
one direction.

    inside a node     time = min over protocols (start + V / (fraction B))
    between nodes     time = start inside + hops x hop + max(inside, V of one network card / (fraction its bandwidth))

Libraries switch from low-latency protocols to high-bandwidth ones as messages grow: hence the minimum. Between nodes a
hierarchical scheme is assumed: all L ranks of a node drive their own network cards with 1/L of the message, while the
links inside the node carry it to the neighbours; the slower of the two sets the pace.
Source: NCCL's bus bandwidth definition (nccl-tests, PERFORMANCE.md) for V.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError, UnknownRateError
from shapewright.operations.collective import HOST_OPS
from shapewright.perf.gemm import interval_factors
from shapewright.perf.host import price_host
from shapewright.perf.price import Price

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.operations import Collective
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

# Whose protocols an operation takes that no table holds: send_recv drives one link in one direction, as a gather
# between two ranks does.
_STAND_INS = {"send_recv": "all_gather"}
# Rounds of an operation: all_reduce scatters and gathers.
_ROUNDS = {"all_reduce": 2.0}
# Widening of the logarithmic interval between nodes, where hop and fraction are assumptions.
_ASSUMED_WIDENING = 1.6


def price_collective(operation: Collective, device: Device, record: CalibrationRecord) -> Price:
    """Price a collective.

    Args:
        operation: The call; message_bytes, num_ranks and ranks_per_node may be arrays of one shape.
        device: The device; its links are its node's.
        record: A record of kind ``collectives``.

    Returns:
        The price, 0 for a single rank. memory_s is the part that grows with the message.

    Raises:
        UnknownRateError: the device file gives no bandwidth for a link that the ranks, or the host, need.
        CalibrationError: the record does not hold the operation.
    """
    if operation.op_name in HOST_OPS:
        return price_host(operation, device)
    sizes = np.broadcast_arrays(
        *(
            np.asarray(size, dtype=float)
            for size in (operation.message_bytes, operation.num_ranks, operation.ranks_per_node)
        )
    )
    message_bytes, ranks = sizes[0], sizes[1]
    local = np.clip(sizes[2], 1.0, ranks)
    crosses = ranks > local
    zero = np.zeros_like(message_bytes)
    start_s, transfer_s, floor_s = zero, zero, zero
    if (local > 1.0).any():
        link_bytes_per_s = _link_bandwidth(device)
        sent_bytes = _sent_bytes(operation.op_name, message_bytes, ranks, local)
        start_s, transfer_s = _inside_node(operation.op_name, sent_bytes, local, link_bytes_per_s, record)
        floor_s = sent_bytes / link_bytes_per_s
    if crosses.any():
        network_bytes_per_s = _network_bandwidth(device)
        between = record.parameters["between_nodes"]
        card_bytes = np.where(crosses, _network_bytes(operation.op_name, message_bytes, ranks, local), 0.0)
        network_s = card_bytes / (network_bytes_per_s * between["bandwidth_fraction"])
        rounds = _ROUNDS.get(operation.op_name, 1.0)
        hops = np.where(crosses, rounds * np.ceil(np.log2(np.maximum(np.ceil(ranks / local), 2.0))), 0.0)
        if operation.op_name == "send_recv":
            hops = np.where(crosses, 1.0, 0.0)
            start_s, transfer_s = np.where(crosses, 0.0, start_s), np.where(crosses, 0.0, transfer_s)
            floor_s = np.where(crosses, 0.0, floor_s)
        start_s = start_s + hops * between["hop_s"] + np.where(crosses, between["start_s"], 0.0)
        transfer_s = np.maximum(transfer_s, network_s)
        floor_s = np.maximum(floor_s, card_bytes / network_bytes_per_s)
    alone = ranks <= 1.0
    start_s, transfer_s, floor_s = (np.where(alone, 0.0, part) for part in (start_s, transfer_s, floor_s))
    time_s = np.maximum(start_s + transfer_s, floor_s)
    widening = np.where(crosses, _ASSUMED_WIDENING, 1.0) * record.interval_widening
    low, high = interval_factors(record.interval, time_s, 1.0)
    return Price(
        time_s=_plain(time_s),
        low_s=_plain(np.maximum(time_s * low**widening, floor_s)),
        high_s=_plain(time_s * high**widening),
        compute_s=_plain(zero),
        memory_s=_plain(transfer_s),
        start_s=_plain(start_s),
        roofline_s=_plain(floor_s),
        calibration=record.label,
    )


def price_collectives(operations: Sequence[Collective], device: Device, record: CalibrationRecord) -> list[Price]:
    """Price many scalar collectives, in their order; those of one name are evaluated together."""
    by_name: dict[str, list[int]] = {}
    for index, operation in enumerate(operations):
        by_name.setdefault(operation.op_name, []).append(index)
    prices: dict[int, Price] = {}
    for indices in by_name.values():
        columns = zip(
            *((operations[i].message_bytes, operations[i].num_ranks, operations[i].ranks_per_node) for i in indices),
            strict=True,
        )
        message_bytes, num_ranks, ranks_per_node = (np.array(column, dtype=float) for column in columns)
        sizes: Any = {"message_bytes": message_bytes, "num_ranks": num_ranks, "ranks_per_node": ranks_per_node}
        together = price_collective(replace(operations[indices[0]], **sizes), device, record)
        names = [spec.name for spec in fields(Price) if spec.name != "calibration"]
        rows = zip(*(np.asarray(getattr(together, name)).tolist() for name in names), strict=True)
        for index, row in zip(indices, rows, strict=True):
            values: Any = dict(zip(names, row, strict=True))
            prices[index] = Price(calibration=together.calibration, **values)
    return [prices[index] for index in range(len(operations))]


def _sent_bytes(op_name: str, message_bytes: Array, ranks: Array, local: Array) -> Array:
    """Bytes that the busiest rank sends over links inside its node. [byte]"""
    if op_name == "send_recv":
        return 1.0 * message_bytes
    if op_name == "alltoall":
        return message_bytes * (local - 1.0) / ranks
    ring_bytes: Array = _ROUNDS.get(op_name, 1.0) * message_bytes * (local - 1.0) / local
    return ring_bytes


def _network_bytes(op_name: str, message_bytes: Array, ranks: Array, local: Array) -> Array:
    """Bytes that one rank's network card sends to other nodes. [byte]"""
    if op_name == "send_recv":
        return 1.0 * message_bytes
    if op_name == "alltoall":
        return message_bytes * (ranks - local) / ranks
    nodes = np.ceil(ranks / local)
    card_bytes: Array = _ROUNDS.get(op_name, 1.0) * message_bytes / local * (nodes - 1.0) / nodes
    return card_bytes


def _inside_node(
    op_name: str, sent_bytes: Array, local: Array, link_bytes_per_s: float, record: CalibrationRecord
) -> tuple[Array, Array]:
    """Start and transfer time inside a node: the best protocol at the measured group sizes around ``local``."""
    table = _protocols(op_name, record)
    doublings = np.log2(np.maximum(local, 1.0))
    if op_name == "send_recv":
        doublings = np.ones_like(doublings)
    seconds = sent_bytes[..., None, None] / (table.fractions * link_bytes_per_s)  # [shape, groups, protocols]
    best = np.argmin(table.starts_s + seconds, axis=-1)[..., None]
    starts_s = np.take_along_axis(np.broadcast_to(table.starts_s, seconds.shape), best, axis=-1)[..., 0]
    seconds = np.take_along_axis(seconds, best, axis=-1)[..., 0]
    # Linear between the measured group sizes, in doublings.
    last = len(table.doublings) - 1
    position = np.interp(doublings, table.doublings, np.arange(last + 1.0))[..., None]
    weights = np.maximum(1.0 - np.abs(position - np.arange(last + 1.0)), 0.0)
    # Larger groups than any measured: latency goes on as between the two largest, bandwidth stays.
    beyond = np.maximum(doublings - table.doublings[-1], 0.0)
    start_s = (weights * starts_s).sum(axis=-1) + table.start_per_doubling_s * beyond
    inside = local > 1.0
    return np.where(inside, start_s, 0.0), np.where(inside, (weights * seconds).sum(axis=-1), 0.0)


@dataclass(frozen=True, eq=False)
class _Protocols:
    """Protocols of one operation, as arrays over group sizes (ascending) and protocols.

    Attributes:
        doublings: log2 of the group sizes. [groups]
        starts_s: Start of each protocol, infinite where a group has fewer. [groups, protocols]
        fractions: Share of the link's bandwidth. [groups, protocols]
        start_per_doubling_s: Growth of the smallest start from the second largest group to the largest. [s]
    """

    doublings: Array
    starts_s: Array
    fractions: Array
    start_per_doubling_s: float


_PROTOCOLS: dict[tuple[str, str, str], _Protocols] = {}


def _protocols(op_name: str, record: CalibrationRecord) -> _Protocols:
    """Protocols of an operation, unfolded once per record."""
    key = (record.id, record.transfer, op_name)
    if key not in _PROTOCOLS:
        operations: Mapping[str, Any] = record.parameters["operations"]
        name = op_name if op_name in operations else _STAND_INS.get(op_name, op_name)
        if name not in operations:
            raise CalibrationError(
                f"collectives record {record.id} has no {op_name!r}; it has {', '.join(sorted(operations))}; "
                f"run scripts/calibrate_collectives.py"
            )
        own = record.transfer == "exact"
        skipped = () if own else record.parameters["groups_of_this_machine_only"]
        sizes = sorted((size for size in operations[name] if size not in skipped), key=int)
        most = max(len(operations[name][size]) for size in sizes)
        starts_s, fractions = np.full((len(sizes), most), np.inf), np.ones((len(sizes), most))
        for row, size in enumerate(sizes):
            for column, protocol in enumerate(operations[name][size]):
                starts_s[row, column], fractions[row, column] = protocol["start_s"], protocol["bandwidth_fraction"]
        doublings = np.log2([float(size) for size in sizes])
        first_s = starts_s.min(axis=1)
        growth = 0.0 if len(sizes) == 1 else (first_s[-1] - first_s[-2]) / (doublings[-1] - doublings[-2])
        _PROTOCOLS[key] = _Protocols(doublings, starts_s, fractions, max(float(growth), 0.0))
    return _PROTOCOLS[key]


def _link_bandwidth(device: Device) -> float:
    """Bandwidth between devices of a node, over the host link where there is no other. [byte/s]"""
    bandwidth = device.intra_node_bandwidth_bytes_per_s or device.pcie_bandwidth_bytes_per_s
    if not bandwidth:
        raise UnknownRateError(
            f"{device.name} has neither intra_node_bandwidth_bytes_per_s nor pcie_bandwidth_bytes_per_s, which ranks "
            f"of one node need; give one in a device file of your own, or use one device per node"
        )
    return bandwidth


def _network_bandwidth(device: Device) -> float:
    """Bandwidth between nodes, per device. [byte/s]"""
    bandwidth = device.inter_node_bandwidth_bytes_per_s
    if not bandwidth:
        raise UnknownRateError(
            f"{device.name} has no inter_node_bandwidth_bytes_per_s, which ranks of several nodes need; give it in a "
            f"device file of your own, or keep the ranks inside a node of {device.node_size}"
        )
    return bandwidth


def _plain(value: Array) -> Any:
    """A float for a scalar, the array itself otherwise."""
    return float(value) if np.ndim(value) == 0 else value
