"""What came of measuring the shapes of a search: plain records, which the bench makes and reports show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VerifiedShape:
    """One shape, measured beside the baseline.

    Attributes:
        rank: Its rank in the search.
        predicted: Speed-up that the search predicts for the whole step, on the device that was asked.
        predicted_of_measured: The same over the operations that were measured.
        measured: Speed-up over them, median of the rounds.
        measured_low: Least of the rounds.
        measured_high: Most of the rounds.
        covered_fraction: Share of the predicted step, the lesser of both sides, in operations that were measured.
        modules: By part of the model, such as ``attention``, measured seconds of the baseline and of the shape, for
            equal work. [s]
    """

    rank: int
    predicted: float
    predicted_of_measured: float
    measured: float
    measured_low: float
    measured_high: float
    covered_fraction: float
    modules: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was measured of a search.

    Attributes:
        device: What it was measured on.
        library: With which versions.
        asked_device: What the search was for.
        shapes: The shapes, by rank.
        num_rounds: Rounds.
        notes: What to know.
        wall_s: How long it took. [s]
    """

    device: str
    library: str
    asked_device: str
    shapes: tuple[VerifiedShape, ...]
    num_rounds: int
    notes: tuple[str, ...]
    wall_s: float
