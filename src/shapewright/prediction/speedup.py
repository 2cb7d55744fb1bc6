"""Speed-up of one shape over another, with its interval.

Legend: t and t' time per token of baseline and candidate; u and w, for each operation, its part of the logarithmic
half-width of the interval of the baseline's and of the candidate's step; rho the correlation of its error with others.

Errors of two shapes on one device are not independent. As in a step, a share rho of the variance of an operation is
common to all (the error of the device's record) and the rest is its own; an operation that both shapes run has the same
error in both:

    half-width^2 of log(t / t') = sum over operations (1 - rho) (u - w)^2 + (sum over operations sqrt(rho) (u - w))^2

Errors that both shapes share cancel, including those of software outside the kernels.
"""

from __future__ import annotations

from math import erf, exp, log, sqrt
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.prediction.predict import Prediction

# Half of a 90 % interval of a normal distribution, in standard deviations.
_HALF_WIDTH_DEVIATIONS = 1.645
_NO_WIDTH = (0.0, 0.0)  # of an operation that one of two shapes lacks


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

    @property
    def log_standard_deviation(self) -> float:
        """Standard deviation of the logarithm of the factor."""
        return log(self.high / self.low) / (2.0 * _HALF_WIDTH_DEVIATIONS)

    @classmethod
    def of(cls, factor: float, log_standard_deviation: float) -> Speedup:
        """Return a factor whose logarithm has a normal distribution.

        >>> Speedup.of(1.0, 0.0)
        Speedup(factor=1.0, low=1.0, high=1.0, probability_faster=0.5)
        """
        spread = exp(_HALF_WIDTH_DEVIATIONS * log_standard_deviation)
        return cls(
            factor=factor,
            low=factor / spread,
            high=factor * spread,
            probability_faster=_probability_above_1(factor, log_standard_deviation),
        )


def _probability_above_1(factor: float, log_standard_deviation: float) -> float:
    if log_standard_deviation == 0.0:
        return 0.5 if factor == 1.0 else float(factor > 1.0)
    return 0.5 * (1.0 + erf(log(factor) / log_standard_deviation / sqrt(2.0)))


def _compared_time_s(prediction: Prediction, *, per_step: bool) -> float:
    """Return the time to compare: that of the step, or device time per token. [s]"""
    return prediction.step_time_s if per_step else 1.0 / prediction.tokens_per_s_per_device


def compare_times(baseline: Prediction, candidate: Prediction, *, per_step: bool = False) -> Speedup:
    """Return the speedup of a candidate over the baseline, with its interval."""
    factor = _compared_time_s(baseline, per_step=per_step) / _compared_time_s(candidate, per_step=per_step)
    own, other = baseline.log_half_widths, candidate.log_half_widths
    independent = common = 0.0
    for key, (_, correlation) in {**own, **other}.items():
        difference = own.get(key, _NO_WIDTH)[0] - other.get(key, _NO_WIDTH)[0]
        independent += (1.0 - correlation) * difference**2
        common += sqrt(correlation) * difference
    return Speedup.of(factor, sqrt(independent + common**2) / _HALF_WIDTH_DEVIATIONS)
