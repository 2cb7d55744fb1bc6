"""How much faster one prediction is than another, how sure that is, and what it gains by.

Legend: t time per token, w share of a step's half-width (its uncertainty as a logarithm) that one operation brings.

Errors of two shapes on one device are not independent. As where one step is added up, a share rho of the variance is
common to all operations (the device's record errs alike) and the rest belongs to each operation alone; an operation
that both shapes run errs in both alike. With u and w the shares of baseline and candidate:

    half-width^2 of log(t / t') = (1 - rho) sum over operations (u - w)^2 + rho (sum u - sum w)^2

What is the same in both cancels. What software outside the kernels costs cancels too, being the same for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import erf, exp, log, sqrt
from typing import TYPE_CHECKING, Any

from shapewright.adding_up import error_correlation
from shapewright.perf.price import GemmPrice
from shapewright.search.pricing import price_key

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction

# Half of a 90 % interval of a normal distribution, in standard deviations.
_HALF_WIDTH_DEVIATIONS = 1.645
_BACKWARD_ENDINGS = (".dgrad", ".wgrad", ".backward")
# A change smaller than this is not named as a reason.
_SMALLEST_CHANGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Throughput of a shape over the baseline's.

    Attributes:
        factor: Predicted factor.
        low: Lower end of its 90 % interval.
        high: Upper end.
        probability_faster: Chance that the factor is truly above 1, by the model of errors above.
    """

    factor: float
    low: float
    high: float
    probability_faster: float


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one module of the model gains.

    Attributes:
        module: Its name, backward pass included.
        saved_fraction: Share of the baseline's step that it saves; below zero where it is slower.
        reason: Why, as far as the prices tell.
    """

    module: str
    saved_fraction: float
    reason: str


def time_s(prediction: Prediction, *, per_step: bool) -> float:
    """What a search makes short: device time per token, or the step. [s]"""
    return prediction.step_time_s if per_step else 1.0 / prediction.tokens_per_s_per_device


def compare_times(baseline: Prediction, candidate: Prediction, *, per_step: bool = False) -> Speedup:
    """Predict how much faster one shape is than another, with its interval."""
    factor = time_s(baseline, per_step=per_step) / time_s(candidate, per_step=per_step)
    ours, theirs = _half_widths(baseline), _half_widths(candidate)
    alone = sum((ours.get(key, 0.0) - theirs.get(key, 0.0)) ** 2 for key in ours | theirs)
    together = (sum(ours.values()) - sum(theirs.values())) ** 2
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
    """Half of the logarithmic interval of each distinct operation, weighed by its share of the step."""
    widths: dict[tuple[Any, ...], float] = defaultdict(float)
    total_s = sum(entry.total_time_s for entry in prediction.busiest_operations)
    for entry in prediction.busiest_operations:
        if entry.total_time_s > 0.0:
            price: Any = entry.price
            half = 0.5 * log(price.high_s / max(price.low_s, 1e-6 * price.time_s))
            widths[price_key(entry.operation)] += half * entry.total_time_s / total_s
    return widths


def explain_gains(baseline: Prediction, candidate: Prediction, *, per_step: bool = False) -> tuple[Gain, ...]:
    """Modules by what they gain, the most first; those that change nothing are left out."""
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


def module_of(name: str) -> str:
    """Module of an operation, the same for both directions.

    >>> module_of("mlp.up.wgrad"), module_of("attention.fused.backward")
    ('mlp.up', 'attention.fused')
    """
    for ending in _BACKWARD_ENDINGS:
        name = name.removesuffix(ending)
    return name


def _by_module(prediction: Prediction) -> dict[str, list[PricedOperation]]:
    modules: dict[str, list[PricedOperation]] = defaultdict(list)
    for entry in prediction.busiest_operations:
        modules[module_of(entry.operation.name)].append(entry)
    return dict(modules)


def _reason(old: list[PricedOperation], new: list[PricedOperation], work: float) -> str:
    """What differs: arithmetic and bytes, alignment, how full tiles and waves are."""
    if not old or not new:
        return "not there before" if new else "not there any more"
    words = []
    flops = _change(old, new, work, "flops")
    num_bytes = _change(old, new, work, "num_bytes")
    if abs(flops) >= _SMALLEST_CHANGE:
        words.append(f"{abs(100.0 * flops):.0f} % {'less' if flops < 0 else 'more'} arithmetic")
    elif not any(entry.operation.flops for entry in old) and abs(num_bytes) >= _SMALLEST_CHANGE:
        words.append(f"{abs(100.0 * num_bytes):.0f} % {'fewer' if num_bytes < 0 else 'more'} bytes")
    before, after = _busiest_gemm(old), _busiest_gemm(new)
    if before is not None and after is not None:
        if before.alignment_bytes != after.alignment_bytes:
            words.append(f"rows aligned to {after.alignment_bytes:.0f} bytes, were {before.alignment_bytes:.0f}")
        for words_for, name in (("tiles", "tile_efficiency"), ("waves", "wave_efficiency")):
            was, now = (100.0 * float(getattr(price, name)) for price in (before, after))
            if abs(now - was) >= 100.0 * _SMALLEST_CHANGE:
                words.append(f"{words_for} {now:.0f} % full, were {was:.0f}")
    rate = _rate(new) / _rate(old) - 1.0 if _rate(old) else 0.0
    if abs(rate) >= _SMALLEST_CHANGE:
        words.append(f"{100.0 * rate:+.0f} % FLOP/s")
    return ", ".join(words) or ("a little less work" if min(flops, num_bytes) < 0.0 else "small differences")


def _change(old: Iterable[PricedOperation], new: Iterable[PricedOperation], work: float, amount: str) -> float:
    before, after = (
        sum(float(getattr(entry.operation, amount)) * int(entry.operation.repeats) for entry in entries)
        for entries in (old, new)
    )
    return work * after / before - 1.0 if before else 0.0


def _rate(entries: Iterable[PricedOperation]) -> float:
    """FLOPs per second of all of them together. [flop/s]"""
    flops = seconds = 0.0
    for entry in entries:
        flops += float(entry.operation.flops) * int(entry.operation.repeats)
        seconds += entry.total_time_s
    return flops / seconds if seconds else 0.0


def _busiest_gemm(entries: Iterable[PricedOperation]) -> GemmPrice | None:
    busiest = max(entries, key=lambda entry: entry.total_time_s)
    return busiest.price if isinstance(busiest.price, GemmPrice) and busiest.price.tile_m else None
