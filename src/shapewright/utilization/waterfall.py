"""The waterfall from the dense peak to a measured step.

It starts with the time that the model's arithmetic takes at the dense peak, which is MFU times the measured time, and
adds one loss after another. Losses come from the predicted step of the same job, operation by operation; what the
prediction does not explain is named so. The parts add up to the measured time.

Legend for one GEMM bound by arithmetic: i its arithmetic at peak, c its predicted arithmetic time, A its alignment
factor, T its tile efficiency, W its wave efficiency. c = c (1 - A) + c A (1 - T) + c A T (1 - W) + [c A T W - i] + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from shapewright.operations import Attention, Collective, Pointwise
from shapewright.perf.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction

LOSSES = {
    "uneven": "busiest device's arithmetic less the average that the convention counts: uneven stages, padding, copies",
    "alignment": "contiguous dimensions that force kernels with narrower loads",
    "tiles": "output tiles that reach beyond the matrix",
    "waves": "SMs idle in the last wave of tiles",
    "kernels": "rate of the GEMM kernels under the peak: clock under power, operand feed, fill, start",
    "attention": "fused attention beyond its counted arithmetic at peak; below 0 where masks skip more than is lost",
    "memory_bound": "norms, activations, losses and GEMMs that wait for memory",
    "recompute": "activations computed again",
    "optimizer": "gradient norm and optimiser step",
    "communication": "collectives that nothing hides",
    "offload": "copies to and from the host, and its optimiser step, that nothing hides",
    "bubble": "the pipeline's stages waiting for each other",
    "unexplained": "measured less predicted: data loading, stragglers, host, kernels unlike those assumed",
}
"""Parts of the waterfall after the model's arithmetic, in order, and what each is."""

WAYS_OUT = {
    "uneven": "stages with as many layers each; a padded vocabulary that the ranks divide",
    "alignment": "widths and vocabulary that are multiples of 64: shapewright check",
    "tiles": "sizes that are multiples of the tiles: shapewright search",
    "waves": "sizes or a batch that fill whole waves: shapewright search",
    "kernels": "larger products; the rest is the device under power",
    "attention": "fused attention, wider heads",
    "memory_bound": "fused kernels, larger products, chunked loss",
    "recompute": "none, or selective, where memory allows: shapewright memory",
    "optimizer": "sharded or narrower states: --zero-stage, --optimizer",
    "communication": "smaller tensor groups, none across nodes, larger micro-batches: shapewright plan",
    "offload": "less offloaded: recomputation, sharding, more devices: shapewright memory",
    "bubble": "more micro-batches, model chunks, fewer stages: shapewright plan",
    "unexplained": "data loading, stragglers, host, software",
}
"""What makes each loss smaller."""

MODEL_PART = "model_flops"
_MODEL_WHY = "the model's arithmetic at the dense peak: MFU times the measured time"


@dataclass(frozen=True)
class WaterfallPart:
    """One step from peak to measured.

    Attributes:
        name: ``model_flops`` or one of LOSSES.
        time_s: What it takes of the measured time; negative where it gives some back. [s]
        why: What it is.
    """

    name: str
    time_s: float
    why: str


def pour_waterfall(prediction: Prediction, seconds: float, model_s: float, peak: float) -> tuple[WaterfallPart, ...]:
    """Divide the measured time into the model's arithmetic at peak and the losses."""
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
    """Divide the time of one operation."""
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
                # A kernel may win back part of its last wave: no loss reaches below the arithmetic itself.
                left_s = max(kept_s * min(float(efficiency), 1.0), min(ideal_s, kept_s))
                losses[name].append(kept_s - left_s)
                kept_s = left_s
            losses["kernels"] += [total_s - compute_s, kept_s - ideal_s]
