"""What a row of samples says: median, quartiles, and how sure the median is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Quantile of the normal distribution that leaves 2.5 % on either side.
_NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of the time of one call.

    Attributes:
        median_s: Median. [s]
        min_s: Smallest sample. [s]
        max_s: Largest sample. [s]
        q1_s: Lower quartile. [s]
        q3_s: Upper quartile. [s]
        ci_half_width_s: Half the width of the median's 95 % confidence interval. [s]
        num_samples: Samples.
    """

    median_s: float
    min_s: float
    max_s: float
    q1_s: float
    q3_s: float
    ci_half_width_s: float
    num_samples: int

    @property
    def ci_fraction(self) -> float:
        """Half width of the interval over the median."""
        return self.ci_half_width_s / self.median_s if self.median_s > 0.0 else math.inf


def summarize(samples_s: Sequence[float]) -> Summary:
    """Sum samples up.

    The interval makes no assumption on how times are distributed: its ends are the order statistics that a binomial of
    n and 1/2 puts there, n/2 -+ 1.96 sqrt(n)/2, clipped to the samples (Conover, Practical Nonparametric Statistics,
    3rd ed., section 3.2).

    Args:
        samples_s: Times of one call, at least one. [s]

    >>> summary = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    >>> summary.median_s, summary.q1_s, summary.q3_s, summary.ci_half_width_s
    (3.0, 2.0, 4.0, 49.5)
    """
    ordered = sorted(samples_s)
    count = len(ordered)
    half_width_ranks = _NORMAL_95 * math.sqrt(count) / 2.0
    low = max(0, math.floor((count - 1) / 2.0 - half_width_ranks))
    high = min(count - 1, math.ceil((count - 1) / 2.0 + half_width_ranks))
    return Summary(
        median_s=quantile(ordered, 0.5),
        min_s=ordered[0],
        max_s=ordered[-1],
        q1_s=quantile(ordered, 0.25),
        q3_s=quantile(ordered, 0.75),
        ci_half_width_s=(ordered[high] - ordered[low]) / 2.0,
        num_samples=count,
    )


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Quantile of sorted numbers, linear between neighbours.

    >>> quantile([1.0, 2.0, 4.0, 8.0], 0.5)
    3.0
    """
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
