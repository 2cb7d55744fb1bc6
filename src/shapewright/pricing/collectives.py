"""Price of collectives: the fastest protocol of the library, inside a node and between nodes.

Legend: M message (Collective.message_bytes), r ranks, L of them in one node, k = ceil(r / L) nodes, V bytes that the
busiest rank sends in a ring (all_reduce 2 M (r-1)/r, the others M (r-1)/r, send_recv M), B link bandwidth per device in
one direction.

    inside a node     time_s = min over protocols (start + V / (fraction B)) x exp(correction)
    between nodes     time_s = start inside + hops x hop + max(inside, V of one network card / (fraction its bandwidth))

Libraries switch from low-latency protocols to high-bandwidth ones as messages grow: hence the minimum. What the lines
leave over is smooth in the message and similar in all operations of a group: the correction, a table over messages, is
for the measured device alone and for calls inside one node. Between nodes a
hierarchical scheme is assumed: all L ranks of a node drive their own network cards with 1/L of the message, while the
links inside the node carry it to the neighbours; the slower of the two limits. An alltoall that sends identical rows
once to each node (Collective.crossing_fraction) copies them there: M (L-1)/L inside, not M (L-1)/r. Source: NCCL's bus
bandwidth definition (nccl-tests, PERFORMANCE.md) for V.

Transfer: starts do not follow from data sheets. Protocols of two to eight ranks start after 12 us on A100 and on B200,
and after 8 us on H100 and H200, whose clock lies in between. So a device of another architecture takes the mean start
over all measured architectures, weighted equally. Fractions of the link bandwidth are kept: they differ less. Only
devices with the same kind of link predict each other, since PCIe differs from NVLink. A bridge joins a pair or four
cards. Larger groups communicate over PCIe, like cards without a bridge, whose record gives protocols and fractions of
those calls: four L40S reach 0.15 of PCIe's rate, where four A100 reach 0.7 of NVLink's. Accuracy on held-out devices:
docs/decisions/0013.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.errors import CalibrationError, UnknownRateError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.operations.collective import HOST_OPS
from shapewright.pricing.calibration.donors import has_link
from shapewright.pricing.calibration.intervals import choose_interval, interval_factors
from shapewright.pricing.calibration.records import CORRECTIONS
from shapewright.pricing.calibration.source import CalibrationSource
from shapewright.pricing.calibration.transfer import transfer_start_scale, without_bridge
from shapewright.pricing.host import price_host
from shapewright.pricing.kernels.exchange import price_own_all_reduce
from shapewright.pricing.price import Price, split_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.collective import Collective
    from shapewright.pricing.calibration.records import CalibrationRecord

    PerCall = Float[np.ndarray, "calls"]
    CallMask = Bool[np.ndarray, "calls"]


# Operation whose protocols stand in for one without measurements: send_recv drives one link in one direction, as a
# gather between two ranks does.
_STAND_INS = {"send_recv": "all_gather"}
# Operations with two rounds: all_reduce scatters and gathers.
_TWO_ROUNDS = ("all_reduce",)
# Widening of the logarithmic interval between nodes, where hop and fraction are assumptions.
_ASSUMED_WIDENING = 1.6


def price_collective(operation: Collective, device: Device, record: CalibrationRecord) -> Price:
    """Price a collective.

    Args:
        operation: The call; message_bytes, num_ranks and ranks_per_node may be arrays of one shape.
        device: The device; its links are those of its node.
        record: A record of kind ``collectives``.

    Returns:
        The price, 0 for a single rank. memory_s is the part that grows with the message.

    Raises:
        UnknownRateError: the device file has no bandwidth for a link that the ranks, or the host, need.
        CalibrationError: the record lacks the operation.
    """
    if operation.op_name in HOST_OPS:
        return price_host(operation, device)
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=float) for size in _sizes_of(operation)))
    shape = sizes[0].shape
    calls = _Calls((operation.op_name,), *(size.reshape(-1) for size in sizes))
    is_served = np.full(calls.ranks.shape, operation.is_served)
    columns, sources = _with_own_all_reduce(calls, is_served, device, *_price_links(calls, device, record))
    if shape == ():
        return split_rows(Price, columns, sources[0])[0]
    values: dict[str, Any] = {name: column.reshape(shape) for name, column in columns.items()}
    return Price(calibration=CalibrationSource.of_prices(sources), **values)


def price_collectives(operations: Sequence[Collective], device: Device, record: CalibrationRecord) -> list[Price]:
    """Price many scalar collectives, in their order."""
    prices: list[Price | None] = [
        price_host(operation, device) if operation.op_name in HOST_OPS else None for operation in operations
    ]
    places = [index for index, price in enumerate(prices) if price is None]
    if places:
        own = [operations[index] for index in places]
        sizes = np.array([_sizes_of(call) for call in own], dtype=float)
        calls = _Calls(tuple(call.op_name for call in own), *sizes.T)
        is_served = np.array([call.is_served for call in own])
        columns, sources = _with_own_all_reduce(calls, is_served, device, *_price_links(calls, device, record))
        for index, price in zip(places, split_rows(Price, columns, sources), strict=True):
            prices[index] = price
    return [price for price in prices if price is not None]


class _Calls(NamedTuple):
    """Collectives as 1-d arrays of one length; with as many names, or one for all."""

    op_names: tuple[str, ...]
    message_bytes: PerCall
    ranks: PerCall
    local: PerCall
    crossing: PerCall

    def of(self, *op_names: str) -> bool | CallMask:
        """Select the calls with one of these names; a single bool where all share one name."""
        if len(self.op_names) == 1:
            return self.op_names[0] in op_names
        return np.array([name in op_names for name in self.op_names])


def _sizes_of(operation: Collective) -> tuple[Any, ...]:
    """Numbers of a call, in the order of _Calls."""
    return (operation.message_bytes, operation.num_ranks, operation.ranks_per_node, operation.crossing_fraction)


def _price_links(
    calls: _Calls, device: Device, record: CalibrationRecord
) -> tuple[dict[str, PerCall], list[CalibrationSource]]:
    """Fields of a price and the record of each call; calls beyond a bridge are priced without it."""
    beyond = _is_beyond_bridge(calls.local, device)
    unbridged = without_bridge(device, record) if beyond.any() else None
    near = _price_arrays(calls, device, record)
    if unbridged is None:
        return near, [record.source] * len(beyond)
    far = _price_arrays(calls, *unbridged)
    # The reason for this donor is about the device without its bridge, which messages do not mention.
    source = replace(unbridged[1].source, reason="")
    columns = {name: np.where(beyond, far[name], column) for name, column in near.items()}
    return columns, [source if is_far else record.source for is_far in beyond]


def _with_own_all_reduce(
    calls: _Calls,
    is_served: CallMask,
    device: Device,
    columns: dict[str, PerCall],
    sources: list[CalibrationSource],
) -> tuple[dict[str, PerCall], list[CalibrationSource]]:
    """Price the all-reduce of a serving library where that is faster: its own one inside a node, or that of the record.

    Small messages start after 5 us instead of 12 to 19. Over PCIe servers have a fit (pricing.servers).
    """
    is_own = is_served & calls.of("all_reduce") & (calls.local >= calls.ranks) & (calls.ranks > 1.0)
    is_own = is_own & ~_is_beyond_bridge(calls.local, device) & has_link(device)
    if not is_own.any() or device.roofline_only:
        return columns, sources
    places = np.flatnonzero(is_own)
    price = price_own_all_reduce(device, message_bytes=calls.message_bytes[places], ranks=calls.ranks[places])
    if price is None:
        return columns, sources
    is_faster = np.asarray(price.time_s) < columns["time_s"][places]
    sources = list(sources)
    for place in places[is_faster]:
        sources[place] = price.calibration
    merged = {name: column.copy() for name, column in columns.items()}
    for name, column in merged.items():
        column[places[is_faster]] = np.broadcast_to(getattr(price, name), is_faster.shape)[is_faster]
    return merged, sources


def _is_beyond_bridge(local: PerCall, device: Device) -> CallMask:
    return local > (device.link_group_size or np.inf)


def _price_arrays(calls: _Calls, device: Device, record: CalibrationRecord) -> dict[str, PerCall]:
    """Fields of a price."""
    calls = calls._replace(local=np.minimum(np.maximum(calls.local, 1.0), calls.ranks))
    _, message_bytes, ranks, local, crossing = calls
    sends, exchanges = calls.of("send_recv"), calls.of("alltoall")
    rounds = np.where(calls.of(*_TWO_ROUNDS), 2.0, 1.0)
    crosses = ranks > local
    zero = np.zeros_like(message_bytes)
    start_s, transfer_s, floor_s = zero, zero, zero
    if (local > 1.0).any():
        link_bytes_per_s = _link_bandwidth(device, local)
        ring_bytes = rounds * message_bytes * (local - 1.0) / local
        receivers = np.where(crossing < 1.0, local, ranks)
        sent_bytes = np.where(exchanges, message_bytes * (local - 1.0) / receivers, ring_bytes)
        sent_bytes = np.where(sends, message_bytes, sent_bytes)
        floor_s = sent_bytes / link_bytes_per_s
        start_s, transfer_s = _inside_node(calls, floor_s, device, record)
    if crosses.any():
        network_bytes_per_s = _network_bandwidth(device)
        between_nodes = record.parameters["between_nodes"]
        nodes = np.ceil(ranks / local)
        card_bytes = rounds * message_bytes / local * (nodes - 1.0) / nodes
        card_bytes = np.where(exchanges, crossing * message_bytes * (ranks - local) / ranks, card_bytes)
        card_bytes = np.where(crosses, np.where(sends, message_bytes, card_bytes), 0.0)
        network_s = card_bytes / (network_bytes_per_s * between_nodes["bandwidth_fraction"])
        hops = np.where(sends, 1.0, rounds * np.ceil(np.log2(np.maximum(nodes, 2.0))))
        # Messages to another node use no link inside this one.
        inside = np.where(crosses & sends, 0.0, 1.0)
        start_s = inside * start_s + np.where(crosses, hops * between_nodes["hop_s"] + between_nodes["start_s"], 0.0)
        transfer_s = np.maximum(inside * transfer_s, network_s)
        floor_s = np.maximum(inside * floor_s, card_bytes / network_bytes_per_s)
    together = ranks > 1.0
    start_s, transfer_s, floor_s = (np.where(together, part, 0.0) for part in (start_s, transfer_s, floor_s))
    time_s = np.maximum(start_s + transfer_s, floor_s)
    interval = choose_interval(record, record.interval, "collectives")
    widening = np.where(crosses, _ASSUMED_WIDENING, 1.0) * interval.widening
    low, high = interval_factors(interval.quantiles, time_s, widening)
    return {
        "time_s": time_s,
        "low_s": np.maximum(time_s * low, floor_s),
        "high_s": time_s * high,
        "shared_error": interval.shared_error(time_s),
        "compute_s": zero,
        "memory_s": transfer_s,
        "start_s": start_s,
        "roofline_s": floor_s,
    }


def _inside_node(calls: _Calls, link_s: PerCall, device: Device, record: CalibrationRecord) -> tuple[PerCall, PerCall]:
    """Start and transfer time inside a node, 0 for ranks without others in their node. [s]

    Args:
        link_s: Time of their messages at full link bandwidth. [s]
    """
    doublings = np.where(calls.of("send_recv"), 1.0, np.log2(calls.local))
    start_s, transfer_s = np.zeros_like(link_s), np.zeros_like(link_s)
    inside = calls.local > 1.0
    for name in dict.fromkeys(calls.op_names):
        here = inside & calls.of(name)
        if here.any():
            table = _protocols(name, device, record)
            seconds = np.stack(_best_protocol(table, link_s[here], doublings[here]))
            if table.corrections is not None:
                logs = _log_correction(table, calls.message_bytes[here], doublings[here])
                seconds *= np.exp(np.where(calls.ranks[here] > calls.local[here], 0.0, logs))
            start_s[here], transfer_s[here] = seconds
    return start_s, transfer_s


def _log_correction(table: _Protocols, message_bytes: PerCall, doublings: PerCall) -> PerCall:
    """Learned ln(measured / best protocol) at the measured group sizes around ``doublings``."""
    assert table.corrections is not None
    assert table.correction_knots is not None
    places = np.log2(np.maximum(message_bytes, 1.0))
    by_group = [np.interp(places, table.correction_knots, own) for own in table.corrections]
    logs: PerCall = (_group_weights(table, doublings) * np.stack(by_group, axis=-1)).sum(axis=-1)
    return logs


def _group_weights(table: _Protocols, doublings: PerCall) -> Float[np.ndarray, "calls groups"]:
    """Weights of the measured group sizes, linear between them in doublings."""
    groups = np.arange(float(len(table.doublings)))
    position = np.interp(doublings, table.doublings, groups)[:, None]
    weights: Float[np.ndarray, "calls groups"] = np.maximum(1.0 - np.abs(position - groups), 0.0)
    return weights


def _best_protocol(table: _Protocols, link_s: PerCall, doublings: PerCall) -> tuple[PerCall, PerCall]:
    """Start and transfer time of the best protocol at the measured group sizes around ``doublings``. [s]

    Args:
        link_s: Time of the messages at full link bandwidth. [s]
        doublings: log2 of the group sizes.
    """
    num_groups, num_protocols = table.fractions.shape
    seconds = link_s[:, None, None] / table.fractions  # [calls, groups, protocols]
    best = np.argmin(table.starts_s + seconds, axis=-1) + num_protocols * np.arange(num_groups)
    starts_s, fractions = table.starts_s.reshape(-1)[best], table.fractions.reshape(-1)[best]
    weights = _group_weights(table, doublings)
    # Beyond the largest measured group, latency grows as between the two largest, and bandwidth stays.
    beyond = np.maximum(doublings - table.doublings[-1], 0.0)
    start_s = (weights * starts_s).sum(axis=-1) + table.start_per_doubling_s * beyond
    return start_s, link_s * (weights / fractions).sum(axis=-1)


@dataclass(frozen=True, eq=False)
class _Protocols:
    """Protocols of one operation, as arrays over group sizes (ascending) and protocols.

    Attributes:
        doublings: log2 of the group sizes. [groups]
        starts_s: Start of each protocol, infinite where a group has fewer. [groups, protocols]
        fractions: Fraction of the link's bandwidth. [groups, protocols]
        start_per_doubling_s: Growth of the smallest start from the second largest group to the largest. [s]
        correction_knots: log2 of the messages of the corrections. [knots]
        corrections: Learned ln(measured / best protocol); None where none belongs to the device. [groups, knots]
    """

    doublings: Float[np.ndarray, " groups"]
    starts_s: Float[np.ndarray, "groups protocols"]
    fractions: Float[np.ndarray, "groups protocols"]
    start_per_doubling_s: float
    correction_knots: Float[np.ndarray, " knots"] | None = None
    corrections: Float[np.ndarray, "groups knots"] | None = None


_PROTOCOLS: dict[tuple[str | bool, ...], _Protocols] = {}


def _protocols(op_name: str, device: Device, record: CalibrationRecord) -> _Protocols:
    """Read the protocols of an operation; cached per record."""
    corrections = record.parameters.get(CORRECTIONS)
    key = (record.id, record.transfer, record.is_for_new_shapes, corrections is None, device.name, op_name)
    if key not in _PROTOCOLS:
        operations: Mapping[str, Any] = record.parameters["operations"]
        name = op_name if op_name in operations else _STAND_INS.get(op_name, op_name)
        if name not in operations:
            raise CalibrationError(
                f"collectives record {record.id} has no {op_name!r}; it has {', '.join(sorted(operations))}; "
                f"run python -m shapewright.measure.refit collectives"
            )
        own = record.transfer == "exact"
        skipped = () if own else record.parameters["groups_of_this_machine_only"]
        sizes = sorted((size for size in operations[name] if size not in skipped), key=int)
        most = max(len(operations[name][size]) for size in sizes)
        starts_s, fractions = np.full((len(sizes), most), np.inf), np.ones((len(sizes), most))
        for row, size in enumerate(sizes):
            for column, protocol in enumerate(operations[name][size]):
                starts_s[row, column], fractions[row, column] = protocol["start_s"], protocol["bandwidth_fraction"]
        starts_s *= transfer_start_scale(record, device)
        doublings = np.log2([float(size) for size in sizes])
        first_s = starts_s.min(axis=1)
        growth = 0.0 if len(sizes) == 1 else (first_s[-1] - first_s[-2]) / (doublings[-1] - doublings[-2])
        learned: tuple[Any, Any] = (None, None)
        if corrections and own and name == op_name:
            steps = [corrections["operations"][name][size] for size in sizes]
            learned = (
                np.array(corrections["log2_bytes"], dtype=float),
                corrections["log_step"] * np.array(steps, dtype=float),
            )
        _PROTOCOLS[key] = _Protocols(doublings, starts_s, fractions, max(float(growth), 0.0), *learned)
    return _PROTOCOLS[key]


def _link_bandwidth(device: Device, local: PerCall) -> PerCall:
    """Bandwidth between the ranks of a node; that of the host link where no other link joins them all. [byte/s]"""
    bandwidth = device.intra_node_bandwidth_bytes_per_s or device.pcie_bandwidth_bytes_per_s
    if not bandwidth:
        raise UnknownRateError(
            "has neither intra_node_bandwidth_bytes_per_s nor pcie_bandwidth_bytes_per_s, which ranks of one node "
            "need; give one in a device file of your own, or use one device per node",
            subject=device.name,
            field="intra_node_bandwidth_bytes_per_s",
        )
    # A bridge joins a pair of cards; a ring of more is limited by its slowest link.
    beyond = min(device.pcie_bandwidth_bytes_per_s or bandwidth, bandwidth)
    return np.where(local > (device.link_group_size or np.inf), beyond, bandwidth)


def _network_bandwidth(device: Device) -> float:
    """Bandwidth between nodes, per device. [byte/s]"""
    bandwidth = device.inter_node_bandwidth_bytes_per_s
    if not bandwidth:
        raise UnknownRateError(
            f"the device file of {device.name} gives no network bandwidth, which ranks of several nodes need",
            advice=with_fields("set {inter_node_bandwidth_bytes_per_s}, or {node_size} for larger nodes, ")
            + f"or keep the ranks inside a node of {device.node_size}",
        )
    return bandwidth
