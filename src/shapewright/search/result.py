"""What a search finds: shapes beside the baseline, and what became of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shapewright.shown import ShownInNotebook

if TYPE_CHECKING:
    from shapewright.config import Model, TransformerConfig
    from shapewright.horizon import Horizon
    from shapewright.predict import Prediction
    from shapewright.search.compare import Gain, Speedup
    from shapewright.search.findings import Tally


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape beside the baseline.

    Attributes:
        rank: Place in the list, from 1; 0 for the baseline, and for shapes of the front that are not in the list.
        prediction: Its step; where several devices are asked, on the first.
        changed_fields: Changed fields as a person counts them, see search.changes.
        changes: Old and new value by name, of all fields that differ.
        speedup: Throughput over the baseline's, with interval.
        equal_size_speedup: The same per parameter that a token uses, by which shapes are ranked: a model that is faster
            because it is smaller has gained nothing.
        layer_speedup: Forward time of one average layer, the baseline's over this one's.
        parameters_change_fraction: Parameters gained or lost.
        kv_bytes_per_token: What a token adds to the KV cache of the whole model. [byte]
        gains: What got faster, and why.
        measures: By measure of search.bands: value, factor from the baseline, percentile among public models.
        on_devices: By device, where several are asked: speed-up there, and regret.
    """

    rank: int
    prediction: Prediction
    changed_fields: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Any]]
    speedup: Speedup
    equal_size_speedup: float
    layer_speedup: float
    parameters_change_fraction: float
    kv_bytes_per_token: float
    gains: tuple[Gain, ...]
    measures: Mapping[str, tuple[float, float, float]]
    on_devices: Mapping[str, OnDevice] = field(default_factory=dict)

    @property
    def config(self) -> TransformerConfig:
        """The shape."""
        return self.prediction.config


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A shape on one of several devices.

    Attributes:
        speedup: Throughput over the baseline's there.
        equal_size_speedup: The same per parameter that a token uses.
        regret: Its time per token and parameter over that of the shape that is best there, from 1: what using one shape
            everywhere costs here.
    """

    speedup: Speedup
    equal_size_speedup: float
    regret: float


@dataclass(frozen=True, kw_only=True)
class SearchResult(ShownInNotebook):
    """What a search found.

    Attributes:
        model: The baseline with the form it was read in, which config.write_back takes.
        baseline: Where it started.
        candidates: Faster shapes, the fastest first: the best of each number of changes, then the best of all.
        best_on: By device, where several are asked, the shape that is best there alone.
        front: Shapes that no other beats in time per token, parameters, KV bytes per token and memory, fastest first;
            the fastest ones where there are many.
        tally: What became of the shapes of the space.
        ranges: What the quality guard allowed, by measure.
        horizon: The training run that savings are told for, None where none was asked for.
        elapsed_s: How long it took. [s]
        is_complete: False where it was interrupted.
        notes: What to know.
    """

    model: Model
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    best_on: Mapping[str, Candidate]
    tally: Tally
    ranges: Mapping[str, tuple[float, float]]
    elapsed_s: float
    is_complete: bool
    notes: tuple[str, ...]
    horizon: Horizon | None = None

    def best_by_num_changes(self) -> dict[int, Candidate]:
        """The fastest listed shape of each number of changed fields."""
        best: dict[int, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(len(candidate.changed_fields), candidate)
        return dict(sorted(best.items()))
