"""Effect of a change of shape on the loss, as keys that several outputs share."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import described

if TYPE_CHECKING:
    from shapewright.prediction.loss import LossEffect


@dataclass(frozen=True, kw_only=True)
class EffectOutput:
    """What a change of shape does to the loss, and to the time in which it is reached."""

    is_free: bool = described("whether the change keeps the loss: other heads of 64 to 256, a padded vocabulary")
    loss_difference_nats: float | None = described(
        "loss above the baseline's after `train_tokens`, at equal size; null for a model that the loss law does not "
        "describe"
    )
    loss_difference_low_nats: float | None = described("lower end of its 90 % interval")
    loss_difference_high_nats: float | None = described("upper end of its 90 % interval")
    tokens_to_loss: float | None = described(
        "tokens needed for the loss that the baseline has after `train_tokens`; null where it is out of reach"
    )
    net_speedup: float | None = described(
        "time in which the baseline reaches that loss over the shape's, at equal size; null outside training"
    )
    net_speedup_low: float | None = described("lower end of its 90 % interval")
    net_speedup_high: float | None = described("upper end of its 90 % interval")
    chance_better: float | None = described("probability that the net speed-up is above 1")


def effect_output(effect: LossEffect | None) -> EffectOutput:
    """Effect of a change; without one, nothing is known about the loss."""
    net = effect.net_speedup if effect is not None else None
    tokens = effect.tokens_ratio * effect.train_tokens if effect is not None else None
    return EffectOutput(
        is_free=effect is not None and effect.is_free,
        loss_difference_nats=None if effect is None else effect.difference_nats,
        loss_difference_low_nats=None if effect is None else effect.difference_low_nats,
        loss_difference_high_nats=None if effect is None else effect.difference_high_nats,
        tokens_to_loss=tokens if tokens is not None and isfinite(tokens) else None,
        net_speedup=None if net is None else net.factor,
        net_speedup_low=None if net is None else net.low,
        net_speedup_high=None if net is None else net.high,
        chance_better=None if net is None else net.probability_faster,
    )


def describe_loss(effect: EffectOutput) -> str:
    """Difference of the loss with its interval, ``free``, or nothing where it is not known."""
    if effect.loss_difference_nats is None:
        return ""
    if effect.is_free:
        return "free"
    return (
        f"{effect.loss_difference_nats:+.3f} ({effect.loss_difference_low_nats:+.3f} to "
        f"{effect.loss_difference_high_nats:+.3f})"
    )


def describe_net(effect: EffectOutput) -> str:
    """Speed-up to the same loss with its interval, or nothing where it is not known."""
    if effect.net_speedup is None:
        return ""
    return f"{effect.net_speedup:.3f}x ({effect.net_speedup_low:.3f} to {effect.net_speedup_high:.3f})"
