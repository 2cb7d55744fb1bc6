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

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError, UnknownRateError
from shapewright.perf.gemm import interval_factors
from shapewright.perf.price import Price

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        UnknownRateError: the device file gives no bandwidth for a link that the ranks need.
        CalibrationError: the record does not hold the operation.
    """
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


def _sent_bytes(op_name: str, message_bytes: Array, ranks: Array, local: Array) -> Array:
    """Bytes that the busiest rank sends over links inside its node. [byte]"""
    if op_name == "send_recv":
        return 1.0 * message_bytes
    if op_name == "alltoall":
        return message_bytes * (local - 1.0) / ranks
    return _ROUNDS.get(op_name, 1.0) * message_bytes * (local - 1.0) / local


def _network_bytes(op_name: str, message_bytes: Array, ranks: Array, local: Array) -> Array:
    """Bytes that one rank's network card sends to other nodes. [byte]"""
    if op_name == "send_recv":
        return 1.0 * message_bytes
    if op_name == "alltoall":
        return message_bytes * (ranks - local) / ranks
    nodes = np.ceil(ranks / local)
    return _ROUNDS.get(op_name, 1.0) * message_bytes / local * (nodes - 1.0) / nodes


def _inside_node(
    op_name: str, sent_bytes: Array, local: Array, link_bytes_per_s: float, record: CalibrationRecord
) -> tuple[Array, Array]:
    """Start and transfer time inside a node: the best protocol at the measured group sizes around ``local``."""
    groups = _groups(op_name, record)
    known = [float(size) for size in groups]
    if op_name == "send_recv":
        local = np.full_like(local, known[0])
    pairs = [_best_protocol(protocols, sent_bytes, link_bytes_per_s) for protocols in groups.values()]
    position = np.interp(np.log2(np.maximum(local, 1.0)), np.log2(known), np.arange(len(known), dtype=float))
    below = np.floor(position).astype(int)
    above = np.minimum(below + 1, len(known) - 1)
    share = position - below
    starts, transfers = (np.stack(np.broadcast_arrays(*(pair[i] for pair in pairs))) for i in (0, 1))
    start_s = (1.0 - share) * _pick(starts, below) + share * _pick(starts, above)
    transfer_s = (1.0 - share) * _pick(transfers, below) + share * _pick(transfers, above)
    # Larger groups than any measured: latency goes on as between the two largest, bandwidth stays.
    if len(known) > 1:
        first = [float(protocols[0]["start_s"]) for protocols in groups.values()]
        per_doubling_s = max(first[-1] - first[-2], 0.0) / float(np.log2(known[-1] / known[-2]))
        start_s = start_s + per_doubling_s * np.maximum(np.log2(np.maximum(local, 1.0) / known[-1]), 0.0)
    inside = local > 1.0
    return np.where(inside, start_s, 0.0), np.where(inside, transfer_s, 0.0)


def _best_protocol(
    protocols: list[Mapping[str, float]], sent_bytes: Array, link_bytes_per_s: float
) -> tuple[Array, Array]:
    """Start and transfer time of the cheapest protocol."""
    starts = np.array([protocol["start_s"] for protocol in protocols])
    fractions = np.array([protocol["bandwidth_fraction"] for protocol in protocols])
    transfers = np.asarray(sent_bytes)[..., None] / (fractions * link_bytes_per_s)
    best = np.argmin(starts + transfers, axis=-1)
    return starts[best], np.take_along_axis(transfers, best[..., None], axis=-1)[..., 0]


def _pick(stacked: Array, index: NDArray[np.int64]) -> Array:
    """Element ``index`` of the first axis, place by place."""
    return np.take_along_axis(stacked, np.broadcast_to(index, stacked.shape[1:])[None, ...], axis=0)[0]


def _groups(op_name: str, record: CalibrationRecord) -> dict[str, list[Mapping[str, float]]]:
    """Protocols of an operation by group size, ascending."""
    operations: Mapping[str, Any] = record.parameters["operations"]
    name = op_name if op_name in operations else _STAND_INS.get(op_name, op_name)
    if name not in operations:
        raise CalibrationError(
            f"collectives record {record.id} has no {op_name!r}; it has {', '.join(sorted(operations))}; "
            f"run scripts/calibrate_collectives.py"
        )
    return {size: operations[name][size] for size in sorted(operations[name], key=int)}


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
