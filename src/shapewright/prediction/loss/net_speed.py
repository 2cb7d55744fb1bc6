"""Net speed-up to the same loss: seconds per token from the device, tokens needed from the law of loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shapewright.prediction.loss.law import Z_90

if TYPE_CHECKING:
    from shapewright.core.numeric import Numeric
    from shapewright.prediction.loss.law import TokensRatio


@dataclass(frozen=True, kw_only=True, eq=False)
class NetSpeedup:
    """Training time of a baseline over that of candidates which reach the same loss.

    Attributes:
        mean: Expected speed-up (the median); 0 where the loss cannot be reached.
        low: 5 % quantile.
        high: 95 % quantile.
        chance_better: Probability that it is above 1.
    """

    mean: Numeric
    low: Numeric
    high: Numeric
    chance_better: Numeric


def net_speedup(
    step_speedup: Numeric,
    tokens_ratio: TokensRatio,
    *,
    tokens_per_step_ratio: Numeric = 1.0,
    step_log_standard_deviation: Numeric = 0.0,
) -> NetSpeedup:
    """Join the speed-up of a step with the tokens that a shape needs.

        net = step speed-up x tokens per step ratio / tokens needed ratio

    Args:
        step_speedup: Seconds per step of the baseline over those of the candidates.
        tokens_ratio: Tokens that candidates need for the baseline's loss, over the baseline's.
        tokens_per_step_ratio: Tokens of a step of the candidates over those of the baseline.
        step_log_standard_deviation: Standard deviation of ln(step_speedup); errors that both predictions share cancel.

    >>> from shapewright.prediction.loss.law import TokensRatio
    >>> net = net_speedup(1.2, TokensRatio(ratio=1.1, log_standard_deviation=0.05))
    >>> round(float(net.mean), 3), round(float(net.chance_better), 2)
    (1.091, 0.96)
    """
    mean = step_speedup * tokens_per_step_ratio / tokens_ratio.ratio
    deviation = np.hypot(tokens_ratio.log_standard_deviation, step_log_standard_deviation)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        spread = np.exp(Z_90 * deviation)
        gain = np.log(mean)
        # A certain gain or loss is infinitely many deviations away; a certain tie is none.
        standard = np.where(gain == 0.0, 0.0, gain / deviation)
    return NetSpeedup(mean=mean, low=mean / spread, high=mean * spread, chance_better=_normal_share_below(standard))


def _normal_share_below(standard: Numeric) -> Numeric:
    """Return the probability of a standard normal variable below a value, within 1e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
    """
    size = np.minimum(np.abs(standard), 40.0)
    t = 1.0 / (1.0 + 0.2316419 * size)
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = tail * np.exp(-0.5 * size * size) / np.sqrt(2.0 * np.pi)
    share: Numeric = np.where(np.asarray(standard) > 0.0, 1.0 - tail, tail)[()]
    return share
