"""Results of a search: candidates compared with the baseline, the time they save by module, and measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.findings import Tally
    from shapewright.optimize.search.objective import Objective
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.speedup import Speedup
    from shapewright.prediction.training_run import TrainingRun

# Smaller relative changes are not given as reasons.
_SMALLEST_CHANGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Time that a candidate saves in one module of the model.

    Attributes:
        module: Name of the module; its backward pass is included.
        saved_fraction: Share of the baseline's step that it saves; negative if it is slower.
        reason: Differences of the operations that explain it.
    """

    module: str
    saved_fraction: float
    reason: str


def explain_gains(baseline: Prediction, candidate: Prediction, *, per_step: bool = False) -> tuple[Gain, ...]:
    """Return the time saved by module, largest first; unchanged modules are left out."""
    work = 1.0 if per_step else baseline.tokens_per_step / candidate.tokens_per_step
    old, new = _by_module(baseline), _by_module(candidate)
    gains = []
    for module in {**old, **new}:
        before_s = sum(entry.total_time_s for entry in old.get(module, ()))
        after_s = work * sum(entry.total_time_s for entry in new.get(module, ()))
        saved = (before_s - after_s) / baseline.step_time_s
        if abs(saved) >= 1e-4:
            reason = _reason(old.get(module, []), new.get(module, []), work)
            gains.append(Gain(module=module, saved_fraction=saved, reason=reason))
    return tuple(sorted(gains, key=lambda gain: -gain.saved_fraction))


def _by_module(prediction: Prediction) -> dict[str, list[PricedOperation]]:
    modules: dict[str, list[PricedOperation]] = defaultdict(list)
    for entry in prediction.busiest_operations:
        modules[entry.operation.module].append(entry)
    return dict(modules)


def _reason(old: list[PricedOperation], new: list[PricedOperation], work: float) -> str:
    """Return why a module is faster or slower: arithmetic, bytes, alignment, or tile and wave efficiency."""
    if not old or not new:
        return "not in the baseline" if new else "not in this shape"
    reasons = []
    flops = _change(old, new, work, "flops")
    num_bytes = _change(old, new, work, "num_bytes")
    if abs(flops) >= _SMALLEST_CHANGE:
        reasons.append(f"{abs(100.0 * flops):.0f} % {'less' if flops < 0 else 'more'} arithmetic")
    elif not any(entry.operation.flops for entry in old) and abs(num_bytes) >= _SMALLEST_CHANGE:
        reasons.append(f"{abs(100.0 * num_bytes):.0f} % {'fewer' if num_bytes < 0 else 'more'} bytes")
    before, after = _busiest_gemm(old), _busiest_gemm(new)
    if before is not None and after is not None:
        if before.alignment_bytes != after.alignment_bytes:
            reasons.append(f"rows aligned to {after.alignment_bytes:.0f} bytes, were {before.alignment_bytes:.0f}")
        for label, name in (("tiles", "tile_efficiency"), ("waves", "wave_efficiency")):
            was, now = (100.0 * float(getattr(price, name)) for price in (before, after))
            if abs(now - was) >= 100.0 * _SMALLEST_CHANGE:
                reasons.append(f"{label} {now:.0f} % full, were {was:.0f}")
    rate = _rate(new) / _rate(old) - 1.0 if _rate(old) else 0.0
    if abs(rate) >= _SMALLEST_CHANGE:
        reasons.append(f"{100.0 * rate:+.0f} % FLOP/s")
    return ", ".join(reasons) or ("a little less work" if min(flops, num_bytes) < 0.0 else "small differences")


def _change(old: Iterable[PricedOperation], new: Iterable[PricedOperation], work: float, amount: str) -> float:
    before, after = (
        sum(float(getattr(entry.operation, amount)) * int(entry.operation.repeats) for entry in entries)
        for entries in (old, new)
    )
    return work * after / before - 1.0 if before else 0.0


def _rate(entries: Iterable[PricedOperation]) -> float:
    """Return the FLOP rate of all operations together. [flop/s]"""
    flops = seconds = 0.0
    for entry in entries:
        flops += float(entry.operation.flops) * int(entry.operation.repeats)
        seconds += entry.total_time_s
    return flops / seconds if seconds else 0.0


def _busiest_gemm(entries: Iterable[PricedOperation]) -> GemmPrice | None:
    busiest = max(entries, key=lambda entry: entry.total_time_s)
    return busiest.price if isinstance(busiest.price, GemmPrice) and busiest.price.tile_m else None


@dataclass(frozen=True, kw_only=True)
class ModuleTimes:
    """Measured times of one part of the model, for equal work.

    Attributes:
        baseline_s: Time of the baseline. [s]
        shape_s: Time of the shape. [s]
    """

    baseline_s: float
    shape_s: float


@dataclass(frozen=True, kw_only=True)
class VerifiedShape:
    """One candidate measured against the baseline.

    Attributes:
        rank: Its rank in the search.
        predicted: Predicted speed-up of the whole step, on the device of the search.
        predicted_of_measured: Predicted speed-up of the operations that were measured.
        measured: Measured speed-up of those operations, median of the rounds.
        measured_low: Lowest of the rounds.
        measured_high: Highest of the rounds.
        covered_fraction: Share of the predicted step that the measured operations take; the lower of both shapes.
        modules: Measured times by part of the model, such as ``attention``, for equal work.
    """

    rank: int
    predicted: float
    predicted_of_measured: float
    measured: float
    measured_low: float
    measured_high: float
    covered_fraction: float
    modules: Mapping[str, ModuleTimes]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Measurements of the candidates of a search.

    Attributes:
        device: Device that was measured.
        library: Versions of the libraries.
        asked_device: Device of the search.
        shapes: The candidates, by rank.
        num_rounds: Rounds of measurements.
        notes: Notes for the reader, one line each.
        wall_s: Wall time of the measurements. [s]
    """

    device: str
    library: str
    asked_device: str
    shapes: tuple[VerifiedShape, ...]
    num_rounds: int
    notes: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape compared with the baseline.

    Attributes:
        rank: Place in the list, from 1; 0 for the baseline, and for shapes of the front that are not in the list.
        prediction: Its predicted step; on the first of several devices.
        changed_fields: Names of the changed fields, see search.branches; fields that only follow another do not count.
        changes: Old and new value of every field that differs, by name.
        speedup: Ratio of its throughput to the baseline's, with interval.
        equal_size_speedup: Speedup times the ratio of active parameters, so a model that is faster only because it is
            smaller gains nothing.
        effect: Difference of the loss, and the net speedup to the baseline's loss; None for a model that the loss law
            does not describe.
        cost_ratio: What the objective minimizes, over the baseline's: time per parameter, time to the loss, dollars;
            for ``loss-at-budget`` the exponential of the loss above the baseline's.
        layer_speedup: Ratio of the baseline's forward time of one average layer to its own.
        parameters_change_fraction: Relative change of the parameters.
        kv_bytes_per_token: KV cache of one token, of the whole model. [byte]
        gains: Time saved by module, with reasons.
        measures: By measure of the quality guard: value, ratio to the baseline, percentile among public models.
        lifetime: Dollars to train the baseline and to serve the goal's tokens over those of this shape at the same
            loss; None without such tokens.
        on_devices: With several devices, speedup and regret by device.
    """

    rank: int
    prediction: Prediction
    changed_fields: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Any]]
    speedup: Speedup
    equal_size_speedup: float
    effect: LossEffect | None
    cost_ratio: float
    layer_speedup: float
    parameters_change_fraction: float
    kv_bytes_per_token: float
    gains: tuple[Gain, ...]
    measures: Mapping[str, tuple[float, float, float]]
    lifetime: Speedup | None = None
    on_devices: Mapping[str, OnDevice] = field(default_factory=dict)

    @property
    def config(self) -> TransformerConfig:
        """The config of the shape."""
        return self.prediction.config

    @property
    def gain(self) -> Speedup | None:
        """The gain that the verdict judges: in lifetime dollars if tokens are served, else in time to the same loss."""
        return self.lifetime or (self.effect.net_speedup if self.effect is not None else None)

    @property
    def is_free(self) -> bool:
        """Whether the change keeps the loss."""
        return self.effect is not None and self.effect.is_free


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """A candidate on one of several devices.

    Attributes:
        speedup: Ratio of its throughput to the baseline's on the device.
        equal_size_speedup: Speedup times the ratio of active parameters.
        effect: As in Candidate, on this device.
        regret: Ratio of its cost to that of the best shape on the device, at least 1.
    """

    speedup: Speedup
    equal_size_speedup: float
    effect: LossEffect | None
    regret: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do with the baseline.

    Attributes:
        code: A key of ``search.verdict.VERDICTS``.
        text: The verdict in one sentence.
        rank: Rank of the recommended shape; 0 where the verdict is to keep the baseline.
        changes: Old and new value of each field that it changes.
        net_speedup: Ratio of the baseline's time to its loss to that shape's; 1 where the verdict is to keep. In
            inference the speed-up.
        net_speedup_low: Lower end of its 90 % interval.
        net_speedup_high: Upper end.
        chance_better: Probability that it is above 1.
    """

    code: str
    text: str
    rank: int = 0
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    net_speedup: float = 1.0
    net_speedup_low: float = 1.0
    net_speedup_high: float = 1.0
    chance_better: float = 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchResult(NotebookDisplay):
    """Result of a search.

    Attributes:
        verdict: What to do; None for a model that the loss law does not describe.
        objective: What was minimized.
        train_tokens: Tokens of the baseline's run, at which losses are compared; None without the loss law.
        model: The baseline in the form it was read in, as models.to_config_json takes it.
        baseline: The baseline as a candidate.
        candidates: Better shapes, best first: the best of each number of changes, then the best of all.
        best_on: With several devices, the best shape on each alone.
        front: Pareto front of time per token, parameters, KV cache per token and memory, fastest first; cut to the
            fastest if it is long.
        tally: Counts of the shapes of the space.
        ranges: Ranges that the quality guard allows, by measure.
        horizon: The training run that savings are stated for; None without one.
        lifetime_usd: Dollars to train the baseline and to serve the goal's tokens; None without such tokens.
        elapsed_s: Wall time of the search. [s]
        is_complete: False if it was interrupted.
        notes: Notes for the reader, one line each.
    """

    verdict: Verdict | None
    objective: Objective
    train_tokens: float | None
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
    horizon: TrainingRun | None = None
    lifetime_usd: float | None = None

    def best_by_num_changes(self) -> dict[int, Candidate]:
        """Return the best listed shape of each number of changed fields."""
        best: dict[int, Candidate] = {}
        for candidate in self.candidates:
            best.setdefault(len(candidate.changed_fields), candidate)
        return dict(sorted(best.items()))
