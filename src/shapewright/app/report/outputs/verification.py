"""Output of the measurement of a search's best shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import described, take

if TYPE_CHECKING:
    from shapewright.optimize.search.result import Verification


@dataclass(frozen=True, kw_only=True)
class ModuleTimes:
    """Measured times of one part of the model, for equal work."""

    baseline_s: float = described("time of the baseline")
    shape_s: float = described("time of the shape")


@dataclass(frozen=True, kw_only=True)
class VerifiedShapeOutput:
    """One shape, measured and predicted."""

    rank: int = described("its rank in the search")
    predicted: float = described("predicted speed-up of the whole step")
    predicted_of_measured: float = described("predicted speed-up of the operations that were measured")
    measured: float = described("measured speed-up of them, median of the rounds")
    measured_low: float = described("lowest of the rounds")
    measured_high: float = described("highest of the rounds")
    covered_fraction: float = described("share of the predicted step in operations that were measured")
    modules: dict[str, ModuleTimes] = described("measured times by part of the model")


@dataclass(frozen=True, kw_only=True)
class VerificationOutput:
    """Measurement of the best shapes."""

    device: str = described("device that was measured")
    library: str = described("library and versions")
    asked_device: str = described("device of the search")
    shapes: list[VerifiedShapeOutput] = described("the shapes, by rank")
    num_rounds: int = described("rounds of the measurement")
    notes: list[str] = described("remarks, one line each")
    wall_s: float = described("duration of the measurement")


def verification_output(found: Verification) -> VerificationOutput:
    """Measurement of the best shapes of a search."""
    shapes = [
        take(
            VerifiedShapeOutput,
            shape,
            modules={
                module: ModuleTimes(baseline_s=before_s, shape_s=after_s)
                for module, (before_s, after_s) in shape.modules.items()
            },
        )
        for shape in found.shapes
    ]
    return take(VerificationOutput, found, shapes=shapes)
