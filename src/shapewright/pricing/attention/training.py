"""Price of fused attention in training, forward and backward, by the measured kernels of cuDNN.

Where neither a device nor its siblings were measured, the forward kernel is that of serving libraries, and the backward
kernel has an assumed share of its rate (PrefillParameters.backward_rate_fraction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.attention import training_work
from shapewright.pricing.kernels.price import kernel_rates, match_kernel, price_kernel

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.lowering.operations import Attention
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.price import Price

_MEASURED_FORMATS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}


def training_record(operation: Attention, device: Device, serving: CalibrationRecord) -> CalibrationRecord | None:
    """Find the record of training kernels that prices a call; None where serving kernels do.

    Args:
        operation: The call.
        device: The device.
        serving: Its record of serving kernels. One that the user measured goes before a sibling's training kernels.
    """
    if not operation.is_training or operation.values_in_keys or operation.dtype not in _MEASURED_FORMATS:
        return None
    if device.roofline_only or device.num_sms is None or device.own_records.get("attention") is serving:
        return None
    record = load_record("attention_training", device)
    return record if record.transfer in ("exact", "architecture") else None


def price_training_attention(operation: Attention, device: Device, record: CalibrationRecord) -> Price:
    """Price calls of one direction; fields are 1-d arrays.

    Args:
        operation: The calls; their sizes may be arrays of one shape.
        device: The device.
        record: A record of kind ``attention_training``.
    """
    names = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window_size")
    arrays = [np.asarray(getattr(operation, name), dtype=float) for name in names]
    sizes = dict(zip(names, (array.ravel() for array in np.broadcast_arrays(*arrays)), strict=True))
    dtype, is_backward = _MEASURED_FORMATS[operation.dtype], bool(np.all(operation.is_backward))
    labels = ("", "backward" if is_backward else "forward", dtype, str(int(operation.is_deterministic and is_backward)))
    work = training_work(
        device,
        kernel_rates(device, record),
        is_causal=np.full_like(sizes["query_len"], float(operation.causal)),
        is_backward=is_backward,
        dtype=dtype,
        **sizes,
    )
    return price_kernel(work, device, record, match_kernel(record, labels))
