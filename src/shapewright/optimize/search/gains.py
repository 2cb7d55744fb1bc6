"""Modules of a model that one shape saves time in, compared with another, and the reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction

# Smaller relative changes are not given as a reason.
_SMALLEST_CHANGE = 0.02


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
