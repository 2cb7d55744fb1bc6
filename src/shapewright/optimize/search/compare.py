"""Comparison of two predictions: the speedup with its interval, and the modules that the time is saved in.

Legend: t time per token, w share of a step's half-width (its uncertainty as a logarithm) that one operation brings.

Errors of two shapes on one device are not independent. As in a step, a share rho of the variance is common to all
operations (the error of the device's record) and the rest is independent for each operation; an operation that both
shapes run has the same error in both. With u and w the shares of baseline and candidate:

    half-width^2 of log(t / t') = (1 - rho) sum over operations (u - w)^2 + rho (sum u - sum w)^2

What both shapes share cancels, the cost of software outside the kernels included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import erf, exp, log, sqrt
from typing import TYPE_CHECKING, Any

from shapewright.optimize.search.pricing import price_key
from shapewright.prediction.composition import error_correlation
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction

# Half of a 90 % interval of a normal distribution, in standard deviations.
_HALF_WIDTH_DEVIATIONS = 1.645
# Smaller relative changes are not given as a reason.
_SMALLEST_CHANGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Ratio of the throughput of a shape to the baseline's.

    Attributes:
        factor: Predicted factor.
        low: Lower end of its 90 % interval.
        high: Upper end.
        probability_faster: Probability that the true factor is above 1, under the error model above.
    """

    factor: float
    low: float
    high: float
    probability_faster: float


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Time that one module of the model saves.

    Attributes:
        module: Its name, backward pass included.
        saved_fraction: Share of the baseline's step that it saves; negative if it is slower.
        reason: Differences of the operations that explain it.
    """

    module: str
    saved_fraction: float
    reason: str


def time_s(prediction: Prediction, *, per_step: bool) -> float:
    """Return the time that a search minimizes: device time per token, or the step. [s]"""
    return prediction.step_time_s if per_step else 1.0 / prediction.tokens_per_s_per_device


def compare_times(baseline: Prediction, candidate: Prediction, *, per_step: bool = False) -> Speedup:
    """Return the speedup of a candidate over the baseline, with its interval."""
    factor = time_s(baseline, per_step=per_step) / time_s(candidate, per_step=per_step)
    own, other = _half_widths(baseline), _half_widths(candidate)
    alone = sum((own.get(key, 0.0) - other.get(key, 0.0)) ** 2 for key in own | other)
    together = (sum(own.values()) - sum(other.values())) ** 2
    shared = max((error_correlation(entry.price) for entry in baseline.operations), default=0.0)
    half_width = sqrt((1.0 - shared) * alone + shared * together)
    if half_width == 0.0:
        probability = 0.5 if factor == 1.0 else float(factor > 1.0)
    else:
        probability = 0.5 * (1.0 + erf(log(factor) * _HALF_WIDTH_DEVIATIONS / half_width / sqrt(2.0)))
    return Speedup(
        factor=factor,
        low=factor * exp(-half_width),
        high=factor * exp(half_width),
        probability_faster=probability,
    )


def _half_widths(prediction: Prediction) -> dict[tuple[Any, ...], float]:
    """Return the logarithmic half-width of each distinct operation's interval, weighted by its share of the step."""
    widths: dict[tuple[Any, ...], float] = defaultdict(float)
    total_s = sum(entry.total_time_s for entry in prediction.busiest_operations)
    for entry in prediction.busiest_operations:
        if entry.total_time_s > 0.0:
            price: Any = entry.price
            half = 0.5 * log(price.high_s / max(price.low_s, 1e-6 * price.time_s))
            widths[price_key(entry.operation)] += half * entry.total_time_s / total_s
    return widths


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
    """Return what differs: arithmetic, bytes, alignment, and tile and wave efficiency."""
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
