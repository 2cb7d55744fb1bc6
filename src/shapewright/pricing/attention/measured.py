"""Price of fused attention of training, of encoders and of latents (MLA) by records of their own kernels.

Where neither a device nor its siblings were measured, the kernels of serving libraries price all of them, and the
backward kernel has an assumed share of their rate (PrefillParameters.backward_rate_fraction).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.pricing.attention.kernels import CALL_SIZES
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.attention import LatentSizes, encoder_work, latent_attention_work, training_work
from shapewright.pricing.kernels.price import LABEL_SEPARATOR, KernelMatch, kernel_rates, match_kernel, price_kernel
from shapewright.pricing.price import Price

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.attention import Attention
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.kernels.work import KernelRates, KernelWork

    Sizes = dict[str, Float[np.ndarray, "*calls"]]

_MEASURED_FORMATS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}
_ENCODER_HEADS = (64, 72, 80)
# Libraries from the first to the last choice. TensorRT-LLM's latent kernels are the newest measured on most devices and
# expand latents in prefill, as lowering does; vllm's are of 0.14.0, with floors of 0.1 to 0.3 ms.
_LATENT_LIBRARIES = ("trtllm", "sglang", "vllm")
# Libraries whose prefill attends to the latents themselves, with other work.
_ABSORBING_LIBRARIES = ("sglang",)
_BLACKWELL_GENERATION = 4
LIBRARY_ERROR = 1.15
"""Error of one library's encoder and latent kernels where another one runs, as a factor: sglang's decode by TensorRT-
LLM's is 7 to 17 % off on B200, H100 and H200. Slow paths (8-bit caches of sglang on Hopper, vllm 0.14.0) are not
covered."""


def measured_kind(operation: Attention) -> str:
    """Kind of the records that may price a call, or of several whose sizes are arrays; empty for other calls."""
    if operation.dtype not in _MEASURED_FORMATS:
        return ""
    if operation.is_training:
        return "" if operation.values_in_keys else "attention_training"
    if np.any(operation.is_backward) or np.any(operation.window_size):
        return ""
    if operation.values_in_keys:
        return "mla"
    if not np.all(np.equal(operation.num_heads, operation.num_kv_heads)):
        return ""
    if operation.causal:
        is_latent = np.all(np.greater(operation.head_dim, operation.v_head_dim) & np.not_equal(operation.query_len, 1))
        return "mla" if is_latent else ""
    is_self = np.all(np.equal(operation.query_len, operation.kv_len)) and operation.dtype != "fp8"
    is_known = np.ptp(operation.head_dim) == 0 and bool(np.isin(operation.head_dim, _ENCODER_HEADS).all())
    return "attention_encoder" if is_self and is_known else ""


def measured_record(operation: Attention, device: Device, serving: CalibrationRecord) -> CalibrationRecord | None:
    """Find the record of measured kernels that prices a call; None where the formulas of serving kernels do.

    Args:
        serving: Its record of serving kernels. One that the user measured goes before a sibling's kernels.
    """
    kind = measured_kind(operation)
    if not kind or device.roofline_only or device.num_sms is None or device.own_records.get("attention") is serving:
        return None
    record = load_record(kind, device)
    if record.transfer not in ("exact", "architecture"):
        return None
    return record if kind != "mla" or _find_latent(operation, record) else None


def price_measured_attention(operation: Attention, device: Device, record: CalibrationRecord) -> Price:
    """Price calls of one direction; fields are 1-d arrays.

    Args:
        operation: The calls; their sizes may be arrays of one shape.
        record: The record that ``measured_record`` found.
    """
    arrays = [np.asarray(getattr(operation, name), dtype=float) for name in CALL_SIZES]
    sizes = dict(zip(CALL_SIZES, (array.ravel() for array in np.broadcast_arrays(*arrays)), strict=True))
    rates = kernel_rates(device, record)
    if record.kind == "mla":
        match = _find_latent(operation, record)
        assert match is not None
        work = _latent_work(operation, device, rates, sizes, match)
        return price_kernel(work, device, record, match).widened(LIBRARY_ERROR)
    dtype = _MEASURED_FORMATS[operation.dtype]
    if record.kind == "attention_encoder":
        found = match_kernel(record, ("vllm", str(int(sizes["head_dim"][0]))))
        work = encoder_work(
            device,
            rates,
            batch_size=sizes["batch_size"],
            seq_len=sizes["query_len"],
            num_heads=sizes["num_heads"],
            head_dim=sizes["head_dim"],
        )
        return price_kernel(work, device, record, KernelMatch(found.name, is_same=True)).widened(LIBRARY_ERROR)
    is_backward = bool(np.all(operation.is_backward))
    labels = ("", "backward" if is_backward else "forward", dtype)
    work = training_work(
        device,
        rates,
        is_causal=np.full_like(sizes["query_len"], float(operation.causal)),
        is_backward=is_backward,
        dtype=dtype,
        **sizes,
    )
    price = price_kernel(work, device, record, match_kernel(record, (*labels, "0")))
    if not (is_backward and operation.is_deterministic):
        return price
    return _slower(price_kernel(work, device, record, match_kernel(record, (*labels, "1"))), price)


def _slower(ordered: Price, unordered: Price) -> Price:
    """Return the price of a fixed order of gradients, but where it is below that of any order, the latter.

    A fixed order only adds waiting. H200's was measured at a single size, so that its fit says little of others.
    """
    is_below = ordered.time_s < unordered.time_s
    names = [each.name for each in fields(Price) if each.name != "calibration"]
    return replace(ordered, **{n: np.where(is_below, getattr(unordered, n), getattr(ordered, n)) for n in names})


def _find_latent(operation: Attention, record: CalibrationRecord) -> KernelMatch | None:
    """Find the kernel of latent attention with the call's form and format of the cache; None if there is none."""
    phase = "generation" if operation.values_in_keys else "context"
    cache = "fp8" if get_dtype(operation.kv_cache_dtype or operation.dtype).bits == 8 else "bf16"
    choices = []
    for name in record.parameters["kernels"]:
        library, kind, measured_phase, _, _, kv_dtype, _ = name.split(LABEL_SEPARATOR)
        brand, _, version = library.partition(" ")
        expands = phase == "generation" or brand not in _ABSORBING_LIBRARIES
        if (kind, measured_phase, kv_dtype) == ("kernel", phase, cache) and expands and brand in _LATENT_LIBRARIES:
            numbers = [-int(number) for number in version.replace("rc", ".").split(".") if number.isdigit()]
            choices.append((_LATENT_LIBRARIES.index(brand), numbers, name))
    return KernelMatch(min(choices)[2], is_same=True) if choices else None


def _latent_work(
    operation: Attention, device: Device, rates: KernelRates, sizes: Sizes, match: KernelMatch
) -> KernelWork:
    """Work of absorbed attention in decode, and of expanded heads in prefill."""
    widths, is_decode = (float(sizes[name][0]) for name in ("head_dim", "v_head_dim")), operation.values_in_keys
    head_dim, v_head_dim = widths
    cache = match.name.split(LABEL_SEPARATOR)[5]
    is_blackwell = (device.architecture_facts.generation or 0) >= _BLACKWELL_GENERATION
    if is_decode:
        latent = LatentSizes(rank=v_head_dim, rope=head_dim - v_head_dim)
    else:
        latent = LatentSizes(nope=head_dim - LatentSizes.rope, value=v_head_dim)
    return latent_attention_work(
        device,
        rates,
        batch_size=sizes["batch_size"],
        query_len=sizes["query_len"],
        context_len=sizes["kv_len"],
        num_heads=sizes["num_heads"],
        is_decode=is_decode,
        is_absorbed=is_decode,
        dtype="fp8" if cache == "fp8" and is_blackwell else "bf16",
        cache_dtype=cache,
        sizes=latent,
    )
