"""Price of host operations: copies over the host link, and an optimizer step in the host's memory.

copy_s = bytes / (0.8 x host link bandwidth)
step_s = bytes x devices of the host / rate of a host's optimizer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import UnknownRateError
from shapewright.core.texts import with_fields
from shapewright.pricing.calibration.source import CalibrationSource
from shapewright.pricing.price import Price

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.collective import Collective

LINK_FRACTION = 0.8
"""Fraction of the host link's rate that copies to pinned memory reach. Assumed: such copies usually reach 0.75 to
0.85 of PCIe.
"""

HOST_OPTIMIZER_BYTES_PER_S = 109e9
"""Bytes that a host's optimizer reads and writes per second: DeepSpeed's CPU Adam takes 2.57 s for 10 G parameters
of 28 bytes on the two sockets of a DGX-2 (arXiv 2101.06840, table 4; recalled, not read again). Current hosts have two
to four times the memory bandwidth, so the price is rather too high. [byte/s]
"""

SOURCE = CalibrationSource(transfer="assumed", assumption="host link")
# Ends of the interval over the price: best and worst link fraction; current and older hosts.
_COPY_LOW, _COPY_HIGH = 0.85, 1.35
_STEP_LOW, _STEP_HIGH = 0.25, 1.5


def host_link_bytes_per_s(device: Device) -> float:
    """Bandwidth of the link to the host's memory, one direction. [byte/s]

    Raises:
        UnknownRateError: the device file has no host link.
    """
    rate = device.host_bandwidth_bytes_per_s or device.pcie_bandwidth_bytes_per_s
    if not rate:
        raise UnknownRateError(
            "has neither host_bandwidth_bytes_per_s nor pcie_bandwidth_bytes_per_s, required for offloading",
            advice=with_fields(
                "give one in your own device file, or leave {offload_activations} and {offload_optimizer} out"
            ),
            subject=device.name,
            field="host_bandwidth_bytes_per_s",
        )
    return rate


def price_host(operation: Collective, device: Device) -> Price:
    """Price an operation of the host axis; its message_bytes and num_ranks may be arrays of one shape.

    Raises:
        UnknownRateError: the device file has no host link.
    """
    message_bytes, sharing = np.broadcast_arrays(
        *(np.asarray(size, dtype=float) for size in (operation.message_bytes, operation.num_ranks))
    )
    if operation.op_name == "host_copy":
        link = host_link_bytes_per_s(device)
        floor_s, time_s = message_bytes / link, message_bytes / (LINK_FRACTION * link)
        low, high = _COPY_LOW, _COPY_HIGH
    else:
        time_s = message_bytes * sharing / HOST_OPTIMIZER_BYTES_PER_S
        floor_s, low, high = np.zeros_like(time_s), _STEP_LOW, _STEP_HIGH
    zero = np.zeros_like(time_s)
    values: dict[str, Any] = {
        "time_s": time_s,
        "low_s": np.maximum(low * time_s, floor_s),
        "high_s": high * time_s,
        "compute_s": zero,
        "memory_s": time_s,
        "start_s": zero,
        "roofline_s": floor_s,
    }
    plain = {name: float(value) if np.ndim(value) == 0 else value for name, value in values.items()}
    return Price(calibration=SOURCE, **plain)
