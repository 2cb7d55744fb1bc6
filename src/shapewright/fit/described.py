"""A device that has no data sheet, such as a CPU, described by what was measured on it.

Rates and bandwidth are the best that any row reached, since nothing else is known: so MFU on such a device is a share
of its best measured product, and no prediction goes below what those allow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError
from shapewright.hardware import Device

if TYPE_CHECKING:
    from shapewright.store.record import Row

# Cycles in attention records are fitted beside this clock, so its value decides nothing. [Hz]
NOMINAL_CLOCK_HZ = 1e9
# A row that moved fewer bytes than this may owe its rate to the first cache. [byte]
_LEAST_STREAM_BYTES = 2.0**18


def describe_device(name: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> tuple[Device, list[str]]:
    """Device of some rows.

    Args:
        name: What the rows call it.
        rows: Good rows of it.
        facts: What the bench found out about it: ``num_threads`` or ``num_sms``, ``memory_bytes``, ``l2_bytes``,
            ``processor``.

    Returns:
        The device, and what the reader must know of how it was described.

    Raises:
        CalibrationError: the rows have no product to take a rate from.
    """
    rates: dict[str, float] = {}
    for row in rows:
        if row.kind == "gemm" and row.median_s:
            rates[row.dtype] = max(rates.get(row.dtype, 0.0), row.flops / (row.min_s or row.median_s))
    if not rates:
        raise CalibrationError(f"the store has no product measured on {name}, so no rate is known; run 'bench smoke'")
    streams = [row for row in rows if row.num_bytes >= _LEAST_STREAM_BYTES and row.median_s]
    cold = [row for row in streams if row.is_cold]
    bandwidth = max(row.num_bytes / (row.min_s or row.median_s or 1.0) for row in (cold or streams or rows))
    remarks = [
        f"{name} has no data sheet: its rates and bandwidth are the best that was measured, so MFU is a share of those"
    ]
    if not cold:
        remarks.append(
            f"no row's inputs exceeded the cache of {name}: memory is taken to be as fast as what was measured, and "
            "work on larger tensors will be slower than predicted"
        )
    memory_bytes = float(facts.get("memory_bytes") or 0.0)
    if not memory_bytes:
        memory_bytes = float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
        remarks.append(f"the rows do not say how much memory {name} has; this machine's is taken")
    device = Device(
        name=name,
        title=str(facts.get("processor") or name),
        vendor="measured",
        architecture="other",
        dense_flops_per_s=rates,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        # Rows that all lie in the cache cannot tell it from memory.
        l2_bytes=float(facts["l2_bytes"]) if cold and facts.get("l2_bytes") else None,
        num_sms=int(facts.get("num_threads") or facts.get("num_sms") or 1),
        boost_clock_hz=NOMINAL_CLOCK_HZ,
        notes="Described by measurements: best rate by format, best bandwidth, threads as SMs, a nominal clock.",
    )
    return device, remarks
