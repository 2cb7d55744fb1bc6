"""Rates of a measured step by every FLOP convention, and the peaks that they can be divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.hardware import list_devices, load_device
from shapewright.lowering.conventions import StepFlops, count_step_flops, get_convention

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.workload import Workload

# Dies of one card have files of their own; their names differ in the last word only.
_SCOPE_WORDS = ("-gcd", "-card")


@dataclass(frozen=True)
class ConventionResult:
    """Rates by one FLOP convention.

    Attributes:
        name: The convention.
        formula: FLOPs per token.
        used_by: Who publishes by it.
        flops: FLOPs of the step over all devices.
        model_flops_per_s_per_device: Model rate. [flop/s]
        hardware_flops_per_s_per_device: The same with recomputation; None where the convention has none. [flop/s]
        mfu: Model rate over the dense peak.
        hfu: Hardware rate over the dense peak.
    """

    name: str
    formula: str
    used_by: str
    flops: StepFlops
    model_flops_per_s_per_device: float
    hardware_flops_per_s_per_device: float | None
    mfu: float
    hfu: float | None


def rate_by(
    name: str,
    config: TransformerConfig,
    workload: Workload,
    seconds: float,
    num_devices: int,
    peak: float,
    *,
    num_stages: int = 1,
) -> ConventionResult:
    """Rates by one convention; see count_step_flops for the stages."""
    convention = get_convention(name)
    flops = count_step_flops(config, workload, workload.global_batch_size or 0, name, num_stages=num_stages)
    model = flops.model_flops / (seconds * num_devices)
    hardware = None if flops.hardware_flops is None else flops.hardware_flops / (seconds * num_devices)
    return ConventionResult(
        name=name,
        formula=convention.formula,
        used_by=convention.used_by,
        flops=flops,
        model_flops_per_s_per_device=model,
        hardware_flops_per_s_per_device=hardware,
        mfu=model / peak,
        hfu=None if hardware is None else hardware / peak,
    )


def describe_peak(device: Device, dtype: str) -> str:
    """The peak that MFU is a fraction of, in words."""
    return f"dense {dtype}, per {device.scope}"


def find_other_peaks(device: Device, dtype: str) -> dict[str, float]:
    """Peaks that somebody else might divide by, by what they are: sparse, of a die, of the card that a die is part of.

    None of them is reached by the dense products that are priced here. [flop/s]

    >>> find_other_peaks(load_device("b200-sxm-180gb"), "bf16")
    {'sparse bf16 (2:4), per package': 4500000000000000.0, 'dense bf16, per die (1 of 2)': 1125000000000000.0}
    """
    found: dict[str, float] = {}
    sparse = device.sparse_flops_per_s.get(dtype)
    if sparse is not None:
        found[f"sparse {dtype} (2:4), per {device.scope}"] = sparse
    siblings = _find_siblings(device, dtype)
    found |= siblings
    dense = device.dense_flops_per_s.get(dtype)
    if device.num_dies and dense is not None and not siblings:
        found[f"dense {dtype}, per die (1 of {device.num_dies})"] = dense / device.num_dies
    return found


def _find_siblings(device: Device, dtype: str) -> dict[str, float]:
    """Dense peaks of the card that a die is half of, or of a die of it, where they have files."""
    stem = device.name
    for word in _SCOPE_WORDS:
        stem = stem.removesuffix(word)
    if stem == device.name:
        return {}
    names = {stem + word for word in _SCOPE_WORDS} - {device.name}
    siblings = [load_device(name) for name in list_devices() if name in names]
    return {
        f"{describe_peak(each, dtype)} ({each.name})": each.dense_flops_per_s[dtype]
        for each in siblings
        if dtype in each.dense_flops_per_s
    }
