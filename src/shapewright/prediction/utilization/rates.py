"""Rates of a measured step (model and hardware FLOP/s by convention, peaks), and the waterfall from peak to measured.

The waterfall starts with the time of the model FLOPs at the dense peak, which is MFU times the measured time, and adds
the losses one by one. Losses come from the predicted step of the same job, operation by operation; the difference
between prediction and measurement is ``unexplained``. The parts add up to the measured time.

Legend for one compute-bound GEMM: i time at peak, c predicted compute time, A alignment factor, T tile efficiency,
W wave efficiency. c = c (1 - A) + c A (1 - T) + c A T (1 - W) + [c A T W - i] + i.
"""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, Text, joined, with_fields
from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.flops import StepFlops, count_convention_flops
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.models.flop_conventions import get_convention
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.workload import Workload

SHORTEST_STEP_S, LONGEST_STEP_S, MOST_DEVICES = 1e-9, 1e9, 2**24
"""Measurements outside these ranges are refused: a nanosecond, thirty years, more devices than a layout can have."""

SECONDS = "seconds"
"""Name of the measurement that is a step time."""

MEASUREMENT_SCOPES = {
    SECONDS: "of a whole optimizer step",
    "tokens_per_s": "of the whole job",
    "tokens_per_s_per_device": "of one device",
    "steps_per_s": "of the whole job",
    "images_per_s": "of the whole job",
}
"""Scope of each measurement; a wrong scope is the usual cause of an MFU above 1."""

_MEASUREMENT_HINTS = {
    SECONDS: "the time of one optimizer step",
    "tokens_per_s": "the tokens per second of the whole job",
    "tokens_per_s_per_device": "the tokens per second of the whole job divided by its devices",
    "steps_per_s": "the optimizer steps per second",
    "images_per_s": "the images per second of the whole job",
}


def read_measurement(
    workload: Workload, num_devices: int, *, num_images: int = 0, **measured: float | None
) -> tuple[str, float]:
    """Convert a measurement to the time of a step.

    Args:
        workload: The measured workload; its global batch and seq_len give the tokens of a step.
        measured: One of seconds [s], tokens_per_s [token/s], tokens_per_s_per_device [token/s], steps_per_s [1/s] and
            images_per_s [image/s]; others are None.

    Returns:
        The name of the measurement, and the time of one optimizer step. [s]

    Raises:
        WorkloadError: none or several were given, the workload is not training, or a number is out of range.
    """
    given = {name: value for name in _MEASUREMENT_HINTS if (value := measured.get(name)) is not None}
    if len(given) != 1:
        named = joined(map(FieldName, given))
        raise WorkloadError(
            Text("a measurement is one of ", joined(map(FieldName, _MEASUREMENT_HINTS), ", "), ", but ")
            + (named + " were given; give only one" if given else "none was given")
        )
    ((name, value),) = given.items()
    num_tokens = _count_tokens(workload, num_devices)
    if name == "images_per_s" and not num_images:
        raise WorkloadError(
            with_fields("{images_per_s} needs a model of images, or images in each sequence; give {seconds}")
        )
    amounts = {
        "tokens_per_s": num_tokens,
        "tokens_per_s_per_device": num_tokens / num_devices,
        "steps_per_s": 1.0,
        "images_per_s": num_images * num_tokens / workload.seq_len,
    }
    lowest, highest = SHORTEST_STEP_S, LONGEST_STEP_S
    if name != SECONDS:
        lowest, highest = amounts[name] / LONGEST_STEP_S, amounts[name] / SHORTEST_STEP_S
    check_number(name, value, lowest, highest, error=WorkloadError, hint=f"give {_MEASUREMENT_HINTS[name]}")
    return name, value if name == SECONDS else amounts[name] / value


def _count_tokens(workload: Workload, num_devices: int) -> int:
    """Count the tokens of one optimizer step.

    Raises:
        WorkloadError: the workload is not training, has no global batch, or the number of devices is out of range.
    """
    if not workload.is_training:
        raise WorkloadError(
            f"utilization is defined for training, not phase={workload.phase!r}",
            advice=with_fields("set {phase:train}"),
        )
    check_integer(
        "num_devices", num_devices, 1, MOST_DEVICES, error=WorkloadError, hint="give the devices of the whole job"
    )
    if workload.global_batch_size is None:
        raise WorkloadError(
            with_fields("{global_batch_size} is missing"),
            advice="give the sequences of one optimizer step over all replicas",
        )
    return workload.global_batch_size * workload.seq_len


# A card and its dies have device files of their own, whose names differ in the last word only.
_SCOPE_WORDS = ("-gcd", "-card")


@dataclass(frozen=True)
class ConventionResult:
    """Rates by one FLOP convention.

    Attributes:
        name: The convention.
        formula: FLOPs per token.
        used_by: Projects that publish by it.
        flops: FLOPs of the step over all devices.
        model_flops_per_s_per_device: Model rate. [flop/s]
        hardware_flops_per_s_per_device: Rate with recomputation; None where the convention does not define it. [flop/s]
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


def rate_by_convention(
    name: str,
    scenario: Scenario,
    seconds: float,
    num_devices: int,
    peak: float,
    *,
    num_stages: int = 1,
) -> ConventionResult:
    """Compute the rates by one convention; see count_convention_flops for num_stages."""
    convention = get_convention(name)
    config, workload = scenario.config, scenario.workload
    flops = count_convention_flops(config, workload, workload.global_batch_size or 0, name, num_stages=num_stages)
    model = flops.model_flops / (seconds * num_devices)
    hardware = None if flops.hardware_flops is None else flops.hardware_flops / (seconds * num_devices)
    return ConventionResult(
        name=name,
        formula=convention.formula + ("" if workload.trains_all else ", less gradients of frozen weights"),
        used_by=convention.used_by,
        flops=flops,
        model_flops_per_s_per_device=model,
        hardware_flops_per_s_per_device=hardware,
        mfu=model / peak,
        hfu=None if hardware is None else hardware / peak,
    )


def describe_peak(device: Device, dtype: str) -> str:
    """Describe the peak rate that MFU is a fraction of."""
    return f"dense {dtype}, per {device.scope}"


def find_other_peaks(device: Device, dtype: str) -> dict[str, float]:
    """Find other peak rates that publications divide by: sparse, of one die, or of the card of a die. [flop/s]

    Dense GEMMs reach none of them.

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
    """Return the dense peaks of the card of a die, or of the dies of a card, where they have device files."""
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


LOSSES = {
    "uneven": "FLOPs of the busiest device beyond the counted average: uneven stages, padding, replication",
    "alignment": "contiguous dimensions that force narrower loads",
    "tiles": "output tiles that extend beyond the matrix",
    "waves": "SMs idle in the last wave of tiles",
    "kernels": "GEMM kernels below the peak rate: power-limited clock, operand feed, prologue, launch",
    "attention": "fused attention beyond its counted FLOPs at peak; negative where masks skip more than is lost",
    "memory_bound": "norms, activations, losses and memory-bound GEMMs",
    "recompute": "recomputed activations",
    "optimizer": "gradient norm and optimizer step",
    "communication": "exposed collectives",
    "offload": "exposed copies to and from the host, and optimizer step on the host",
    "bubble": "pipeline bubble",
    "unexplained": "measured minus predicted: data loading, stragglers, host, other kernels than assumed",
}
"""Parts of the waterfall after the model FLOPs, in order, with descriptions."""

MITIGATIONS = {
    "uneven": "an equal number of layers per stage; a padded vocabulary that the ranks divide",
    "alignment": "widths and vocabulary that are multiples of 64: shapewright check",
    "tiles": "sizes that are multiples of the tile size: shapewright search",
    "waves": "sizes or a batch that fill complete waves: shapewright search",
    "kernels": "larger GEMMs; the rest is the power limit of the device",
    "attention": "fused attention, larger heads",
    "memory_bound": "fused kernels, larger GEMMs, chunked loss",
    "recompute": "none, or selective, where memory allows: shapewright memory",
    "optimizer": "sharded or narrower states: zero_stage, optimizer",
    "communication": "smaller tensor parallel groups inside nodes, larger micro-batches: shapewright plan",
    "offload": "recomputation, sharding or more devices instead of offload: shapewright memory",
    "bubble": "more micro-batches, model chunks, fewer stages: shapewright plan",
    "unexplained": "data loading, stragglers, host, software",
}
"""How to reduce each loss."""

MODEL_PART = "model_flops"
_MODEL_WHY = "model FLOPs at the dense peak: MFU times the measured time"


@dataclass(frozen=True)
class WaterfallPart:
    """One part of the waterfall.

    Attributes:
        name: ``model_flops`` or one of LOSSES.
        time_s: Part of the measured time; negative for a gain. [s]
        why: Description.
    """

    name: str
    time_s: float
    why: str


def build_waterfall(prediction: Prediction, seconds: float, model_s: float, peak: float) -> tuple[WaterfallPart, ...]:
    """Divide the measured time into the model FLOPs at peak and the losses."""
    losses: dict[str, list[float]] = {name: [] for name in LOSSES}
    arithmetic_s: list[float] = []
    for entry in prediction.busiest_operations:
        _add_losses(entry, peak, losses, arithmetic_s)
    losses["bubble"].append(prediction.bubble_time_s)
    losses["uneven"] = [*arithmetic_s, -model_s]
    losses["unexplained"] = [seconds, -prediction.step_time_s]
    parts = [WaterfallPart(MODEL_PART, model_s, _MODEL_WHY)]
    return (*parts, *(WaterfallPart(name, fsum(losses[name]), why) for name, why in LOSSES.items()))


def _add_losses(entry: PricedOperation, peak: float, losses: dict[str, list[float]], arithmetic_s: list[float]) -> None:
    """Add the time of one operation to the losses."""
    operation, price, total_s = entry.operation, entry.price, entry.total_time_s
    if operation.pass_name == "recompute":
        losses["recompute"].append(total_s)
    elif isinstance(operation, Collective):
        losses["offload" if operation.is_host else "communication"].append(total_s)
    elif isinstance(operation, Pointwise):
        losses["optimizer" if operation.pass_name == "step" else "memory_bound"].append(total_s)
    else:
        repeats = int(operation.repeats)
        ideal_s = float(operation.flops) * repeats / peak
        arithmetic_s.append(ideal_s)
        if isinstance(operation, Attention | SparseAttention):
            losses["attention"].append(total_s - ideal_s)
        elif price.compute_s < price.memory_s:
            losses["memory_bound"].append(total_s - ideal_s)
        elif not isinstance(price, GemmPrice):
            losses["kernels"].append(total_s - ideal_s)
        else:
            compute_s = float(price.compute_s) * repeats
            rest_s = compute_s
            for name, efficiency in (
                ("alignment", price.alignment_factor),
                ("tiles", price.tile_efficiency),
                ("waves", price.wave_efficiency),
            ):
                # Kernels may recover part of the last wave: losses never reduce the rest below the time at peak.
                next_s = max(rest_s * min(float(efficiency), 1.0), min(ideal_s, rest_s))
                losses[name].append(rest_s - next_s)
                rest_s = next_s
            losses["kernels"] += [total_s - compute_s, rest_s - ideal_s]
