"""Waterfall from the dense peak to a measured step.

It starts with the time of the model FLOPs at the dense peak, which is MFU times the measured time, and adds the losses
one by one. Losses come from the predicted step of the same job, operation by operation; the difference between
prediction and measurement is ``unexplained``. The parts add up to the measured time.

Legend for one compute-bound GEMM: i time at peak, c predicted compute time, A alignment factor, T tile efficiency,
W wave efficiency. c = c (1 - A) + c A (1 - T) + c A T (1 - W) + [c A T W - i] + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from shapewright.lowering.operations import Attention, Collective, Pointwise
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction

LOSSES = {
    "uneven": "FLOPs of the busiest device beyond the counted average: uneven stages, padding, replication",
    "alignment": "contiguous dimensions that force narrower loads",
    "tiles": "output tiles that extend beyond the matrix",
    "waves": "SMs idle in the last wave of tiles",
    "kernels": "GEMM kernels below the peak rate: power-limited clock, operand feed, prologue, launch",
    "attention": "fused attention beyond its counted FLOPs at peak; negative where masks skip more than is lost",
    "memory_bound": "norms, activations, losses and memory-bound GEMMs",
    "recompute": "recomputed activations",
    "optimizer": "gradient norm and optimiser step",
    "communication": "exposed collectives",
    "offload": "exposed copies to and from the host, and optimiser step on the host",
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
        _attribute(entry, peak, losses, arithmetic_s)
    losses["bubble"].append(prediction.bubble_time_s)
    losses["uneven"] = [*arithmetic_s, -model_s]
    losses["unexplained"] = [seconds, -prediction.step_time_s]
    parts = [WaterfallPart(MODEL_PART, model_s, _MODEL_WHY)]
    return (*parts, *(WaterfallPart(name, fsum(losses[name]), why) for name, why in LOSSES.items()))


def _attribute(entry: PricedOperation, peak: float, losses: dict[str, list[float]], arithmetic_s: list[float]) -> None:
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
        if isinstance(operation, Attention):
            losses["attention"].append(total_s - ideal_s)
        elif price.compute_s < price.memory_s:
            losses["memory_bound"].append(total_s - ideal_s)
        elif not isinstance(price, GemmPrice):
            losses["kernels"].append(total_s - ideal_s)
        else:
            compute_s = float(price.compute_s) * repeats
            kept_s = compute_s
            for name, efficiency in (
                ("alignment", price.alignment_factor),
                ("tiles", price.tile_efficiency),
                ("waves", price.wave_efficiency),
            ):
                # Kernels may recover part of the last wave: losses never reduce the rest below the time at peak.
                left_s = max(kept_s * min(float(efficiency), 1.0), min(ideal_s, kept_s))
                losses[name].append(kept_s - left_s)
                kept_s = left_s
            losses["kernels"] += [total_s - compute_s, kept_s - ideal_s]
