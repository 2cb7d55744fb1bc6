"""Work of communication kernels that serving libraries bring along: their own all-reduce, and the exchange of tokens.

Legend: M message, r ranks, B link bandwidth per device in one direction, T tokens that a device sends, h their width,
k experts of a token, E experts. The all-reduce of a small message sends all of it to every rank at once (one shot,
(r - 1) M); a large one is scattered and gathered (2 M (r - 1) / r).

The exchange brings each token to the devices of its experts (dispatch, 8 bits an element with a scale for 128) and the
results back (combine, 16 bits). In high-throughput mode a token goes to each device once, whatever its number of
experts there, and to each node once over the network. In low-latency mode it goes to each expert. Source: DeepEP
(deepseek-ai/DeepEP, README and csrc/kernels).
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import UnknownRateError
from shapewright.core.texts import with_fields
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.donors import has_link
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.price import LABEL_SEPARATOR, match_kernel, price_kernel
from shapewright.pricing.kernels.work import NOMINAL_START_S, KernelRates, KernelWork
from shapewright.pricing.price import Price

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device

    PerCall = Float[np.ndarray, "*calls"]

DISPATCH_BYTES, COMBINE_BYTES = 1.0 + 4.0 / 128.0, 2.0
"""Bytes of an element: 8 bits with a scale of fp32 for 128 elements, and 16 bits. [byte]"""
# Bytes that an SM copies in a clock: one 16-byte load of each of 4 schedulers.
_COPIED_BYTES_PER_CLOCK = 64.0
# Library whose all-reduce stands for all, in CUDA graphs: those of others take 0.6 to 1.1 times as long.
_SERVING_LIBRARY, _IN_GRAPH = "vllm", "true"
# Experts whose counters one SM handles together.
_EXPERTS_PER_ROUND = 128.0


def link_bytes_per_s(device: Device, ranks: float) -> float:
    """Bandwidth that joins the devices of a node: their link, or PCIe where it joins fewer. [byte/s]

    Raises:
        UnknownRateError: the device file states neither.
    """
    is_joined = ranks <= (device.link_group_size or np.inf)
    bandwidth = device.intra_node_bandwidth_bytes_per_s if is_joined else None
    bandwidth = bandwidth or device.pcie_bandwidth_bytes_per_s
    if not bandwidth:
        raise UnknownRateError(
            "has neither intra_node_bandwidth_bytes_per_s nor pcie_bandwidth_bytes_per_s, which ranks of one node need",
            subject=device.name,
            field="intra_node_bandwidth_bytes_per_s",
        )
    return bandwidth


def all_reduce_work(device: Device, *, message_bytes: PerCall, ranks: PerCall) -> KernelWork:
    """Work of a serving library's own all-reduce inside a node.

    Args:
        message_bytes: The reduced buffer. [byte]
    """
    bandwidth = np.array([link_bytes_per_s(device, count) for count in ranks])
    one_shot_s = (ranks - 1.0) * message_bytes / bandwidth
    ring_s = 2.0 * (ranks - 1.0) / ranks * message_bytes / bandwidth
    start_s = np.full_like(ring_s, NOMINAL_START_S)
    return KernelWork(
        compute={"one shot": np.minimum(one_shot_s, NOMINAL_START_S)},
        memory={"ring": ring_s},
        serial={"start": start_s},
        roofline_s=ring_s,
        places={"message": message_bytes},
    )


def price_own_all_reduce(device: Device, *, message_bytes: PerCall, ranks: PerCall) -> Price | None:
    """Price the all-reduce of a serving library in a CUDA graph; None where only other links are measured.

    The kernel is that of the measured number of ranks nearest to each call's.

    Args:
        device: The device, whose ranks share a node and a link.
        message_bytes: The reduced buffer. [byte]
        ranks: Participating devices, above 1.
    """
    record = load_record("collectives_more", device)
    if has_link(load_device(record.device)) != has_link(device):
        return None
    kernels = (name.split(LABEL_SEPARATOR) for name in record.parameters["kernels"])
    measured = np.array(sorted({float(group) for _, in_graph, group in kernels if in_graph == _IN_GRAPH}))
    nearest = measured[np.argmin(np.abs(np.log(ranks[:, None] / measured)), axis=1)]
    columns: dict[str, Any] = {spec.name: np.empty(len(ranks)) for spec in fields(Price) if spec.name != "calibration"}
    for group in np.unique(nearest):
        here = nearest == group
        work = all_reduce_work(device, message_bytes=message_bytes[here], ranks=ranks[here])
        price = price_kernel(work, device, record, match_kernel(record, (_SERVING_LIBRARY, _IN_GRAPH, f"{group:.0f}")))
        for name, column in columns.items():
            column[here] = getattr(price, name)
    return Price(calibration=record.source, **columns)


def exchange_work(
    device: Device,
    rates: KernelRates,
    *,
    tokens: PerCall,
    hidden_size: PerCall,
    topk: PerCall,
    num_experts: PerCall,
    ranks: PerCall,
    nodes: PerCall,
    num_sms: PerCall,
    element_bytes: float,
    sends_to_each_expert: bool,
) -> KernelWork:
    """Work of one exchange of tokens between the devices that share the experts.

    Args:
        tokens: Tokens that a device sends.
        num_experts: Experts of all devices.
        num_sms: Multiprocessors given to the kernel; not used in low-latency mode, which takes one block for each
            group of experts.
        element_bytes: Bytes of an element. [byte]
        sends_to_each_expert: Whether a token goes to each of its experts (low-latency mode), not once to each device.
    """
    row_bytes = hidden_size * element_bytes
    copies = topk if sends_to_each_expert else reached(ranks, topk, num_experts)
    if sends_to_each_expert:  # blocks: ceil(E / ceil(E / SMs))
        num_sms = np.ceil(num_experts / np.ceil(num_experts / rates.num_sms))
    local = ranks / nodes
    bandwidth = np.array([link_bytes_per_s(device, count) for count in local])
    link_s = tokens * copies * (local - 1.0) / ranks * row_bytes / bandwidth
    network_s = np.zeros_like(link_s)
    if (nodes > 1.0).any():
        if not device.inter_node_bandwidth_bytes_per_s:
            raise UnknownRateError(
                with_fields("has no {inter_node_bandwidth_bytes_per_s}, which ranks of several nodes need"),
                subject=device.name,
                field="inter_node_bandwidth_bytes_per_s",
            )
        sent = topk * (nodes - 1.0) / nodes if sends_to_each_expert else reached(nodes, topk, num_experts) - 1.0
        network_s = tokens * np.maximum(sent, 0.0) * row_bytes / device.inter_node_bandwidth_bytes_per_s
    per_sm = 1.0 / (np.maximum(num_sms, 1.0) * rates.clock_hz * _COPIED_BYTES_PER_CLOCK)
    start_s = np.full_like(link_s, NOMINAL_START_S)
    return KernelWork(
        compute={"copies": tokens * copies * row_bytes * per_sm, "rows": tokens * row_bytes * per_sm},
        memory={
            "link": link_s,
            "network": network_s,
            "traffic": tokens * (1.0 + copies) * row_bytes / rates.bytes_per_s,
        },
        serial={
            "start": start_s,
            "experts": start_s * num_experts / _EXPERTS_PER_ROUND,
            "nodes": start_s * np.log2(nodes),
        },
        roofline_s=np.maximum(link_s, network_s),
        places={"tokens": tokens, "sms": num_sms, "nodes": nodes, "sent": tokens * copies * row_bytes},
        rare=frozenset({"network", "nodes", "experts"}),
    )


def reached(groups: PerCall, topk: PerCall, num_experts: PerCall) -> PerCall:
    """Mean number of groups of experts that hold one of a token's experts, routed evenly at random.

    >>> float(reached(np.array([8.0]), np.array([1.0]), np.array([64.0]))[0])
    1.0
    """
    missed = np.ones_like(topk * groups)
    for chosen in range(int(np.max(topk))):
        left = np.maximum(num_experts - chosen, 1.0)
        missed = np.where(chosen < topk, missed * np.maximum(1.0 - num_experts / groups / left, 0.0), missed)
    found: PerCall = groups * (1.0 - missed)
    return found
