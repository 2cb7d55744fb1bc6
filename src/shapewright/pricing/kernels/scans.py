"""Price of scans and short convolutions by the measured kernels of gated delta nets and Kimi delta attention.

Scans without a measured kernel (Mamba-2, lightning attention) take the chunked scan of a gated delta net with their own
sizes, which works through chunks in the same way and does more in each of them. Mamba-1 has no chunks: its time is its
traffic, or its exponentials if they take longer. Both are priced with a wider interval.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.hybrids import convolution_work, scan_work
from shapewright.pricing.kernels.price import LABEL_SEPARATOR, KernelMatch, kernel_rates, price_kernel
from shapewright.pricing.pointwise import price_pointwise
from shapewright.pricing.price import Price, single_price

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord

MEASURED_SCANS = {"gated_delta_net": "gdn", "kimi_delta_attention": "kda"}
"""Rules of scans with measured kernels, and their names in the records."""

BORROWED_SCAN_ERROR = 2.0
"""Error of a scan that takes another rule's kernel, or of one priced by its traffic, as a factor. Judgement: no table
has both."""

BACKWARD_RATIO = 3.0
"""Backward over forward time of a scan: states of chunks again, then two gradients for each product.

An assumption after chunk_gated_delta_rule_bwd of flash-linear-attention; no table has backward passes."""

CONV_BACKWARD_RATIO = 2.0
"""The same of a short convolution: gradients of its input and of its weights."""

BACKWARD_ERROR = 1.6
"""Error of the assumed backward passes, as a factor."""

CHUNKLESS_SCANS = ("mamba",)
"""Rules of scans that pass from token to token instead of from chunk to chunk."""

# Serving libraries from the first to the last choice. Training runs the Triton kernels of flash-linear-attention, as
# sglang does.
_SERVING_LIBRARIES, _TRAINING_LIBRARIES = ("vllm", "sglang", "trtllm"), ("sglang", "trtllm", "vllm")
DISTURBED = frozenset({("h200-sxm-141gb", "sglang 0.5.14", "context")})
"""Devices, libraries and phases whose rows contradict all others, as if something had slowed the device down.

Other records price them.

H200 has the SMs of H100 and 1.43 times its bandwidth. In these rows it takes 1.7 times (scans) and 3.3 times
(convolutions) as long where H100 takes 1 to 10 ms, and 2.4 times beyond (medians); in those of sglang 0.5.16, trtllm
and vllm 0.84 to 1.01 times."""
# Kernels of decode that contain the convolution.
_FUSED_WITH_CONVOLUTION = ("kda_fused_decode", "fused_kda_decode")
_SCAN_SIZES = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "k_head_dim", "v_head_dim")
_CONV_SIZES = ("batch_size", "seq_len", "channels", "width")


def price_scans(operations: Sequence[Scan | CausalConv], device: Device, record: CalibrationRecord) -> list[Price]:
    """Price many scalar scans or convolutions, in their order."""
    return [single_price(price_scan(operation, device, record)) for operation in operations]


def price_scan(operation: Scan | CausalConv, device: Device, record: CalibrationRecord) -> Price:
    """Price a scan or a convolution; its sizes may be arrays of one length.

    Args:
        record: A record of kind ``linear_attention``.

    Raises:
        CalibrationError: no record has a kernel of this phase.
    """
    names = _SCAN_SIZES if isinstance(operation, Scan) else _CONV_SIZES
    arrays = np.broadcast_arrays(*(np.asarray(getattr(operation, name), dtype=float) for name in names))
    sizes = {name: np.atleast_1d(array) for name, array in zip(names, arrays, strict=True)}
    is_decode = operation.has_cache and bool(np.all(sizes["seq_len"] == 1.0))
    if isinstance(operation, Scan) and operation.rule in CHUNKLESS_SCANS:
        price, is_measured = _price_traffic(operation, sizes, device), False
    else:
        record, match, is_measured = _find_kernel(operation, device, record, is_decode=is_decode)
        rates = kernel_rates(device, record)
        if isinstance(operation, Scan):
            work = scan_work(device, rates, **sizes, removes=operation.rule in MEASURED_SCANS)
        else:
            work = convolution_work(rates, **sizes)
        price = price_kernel(work, device, record, match)
    if not is_measured:
        price = price.widened(BORROWED_SCAN_ERROR)
    if operation.is_backward:
        ratio = BACKWARD_RATIO if isinstance(operation, Scan) else CONV_BACKWARD_RATIO
        price = price.scaled(ratio).widened(BACKWARD_ERROR)
    return replace(price, shared_error=np.zeros_like(price.time_s))


def _find_kernel(
    operation: Scan | CausalConv, device: Device, own: CalibrationRecord, *, is_decode: bool
) -> tuple[CalibrationRecord, KernelMatch, bool]:
    """Find the record and kernel that price a call, and whether the kernel was measured with the call's rule.

    A device with no kernel of this phase, or one that is DISTURBED, borrows one, as a device without a record does.
    """
    is_conv = isinstance(operation, CausalConv)
    wanted = MEASURED_SCANS.get(operation.rule, "mamba2" if is_conv else "gdn")
    phase = "generation" if is_decode else "context"
    libraries = _SERVING_LIBRARIES if operation.has_cache else _TRAINING_LIBRARIES
    record, lacking = own, []
    while True:
        choices = []
        for name in record.parameters["kernels"]:
            library, kernel, measured_phase, rule = name.split(LABEL_SEPARATOR)
            brand = library.split()[0]
            is_fused = kernel in _FUSED_WITH_CONVOLUTION
            if measured_phase == phase and ("conv" in kernel) == is_conv and not is_fused:
                order = libraries.index(brand) if brand in libraries else len(libraries)
                choices.append((rule != wanted, order, name))
        if choices:
            is_other, _, name = min(choices)
            is_measured = not is_other and (is_conv or operation.rule in MEASURED_SCANS)
        if choices and (record.device, name.split(LABEL_SEPARATOR)[0], phase) not in DISTURBED:
            return record, KernelMatch(name, is_same=True), is_measured
        lacking.append(record.device)
        record = load_record(own.kind, device, without=tuple(lacking))


def _price_traffic(operation: Scan, sizes: dict[str, Any], device: Device) -> Price:
    """Price a scan by its traffic, or by one exponential for each token and element of the state."""
    moved = replace(operation, **sizes, is_backward=False).num_bytes / 2.0
    record = load_record("pointwise", device)
    call = Pointwise(name="", dtype=operation.dtype, operation="other", read_bytes=moved, written_bytes=moved)
    price = price_pointwise(call, device, record)
    rates = kernel_rates(device)
    tokens = sizes["batch_size"] * sizes["seq_len"]
    exponentials = tokens * sizes["num_v_heads"] * sizes["k_head_dim"] * sizes["v_head_dim"]
    compute_s = exponentials / rates.exponentials_per_s
    time_s = np.maximum(price.time_s, price.start_s + compute_s)
    growth = time_s / price.time_s
    return replace(price, time_s=time_s, compute_s=compute_s, low_s=price.low_s * growth, high_s=price.high_s * growth)
