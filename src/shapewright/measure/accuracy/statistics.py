"""Error statistics of predictions against measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def absolute_percentage_errors(
    predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Return |predicted / measured - 1| of each row, as a fraction."""
    errors: Float[np.ndarray, " rows"] = np.abs(predicted / measured - 1.0)
    return errors


def bias(predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]) -> float:
    """Return the mean of ln(predicted / measured): negative if predictions are too small on average.

    >>> round(bias(np.array([1.0, 2.0]), np.array([2.0, 4.0])), 4)
    -0.6931
    """
    return float(np.mean(np.log(predicted / measured)))


def coverage(
    low: Float[np.ndarray, " rows"], high: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> float:
    """Share of measurements that lie inside their interval.

    >>> coverage(np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([1.5, 3.0]))
    0.5
    """
    return float(np.mean((measured >= low) & (measured <= high)))


def mean_width(low: Float[np.ndarray, " rows"], high: Float[np.ndarray, " rows"]) -> float:
    """Mean logarithm of the ends' ratio, over rows whose interval does not reach down to nothing.

    >>> round(mean_width(np.array([1.0, 0.0]), np.array([1.1, 2.0])), 3)
    0.095
    """
    above = low > 0.0
    return float(np.mean(np.log(high[above] / low[above]))) if above.any() else 0.0


def kendall_tau(x: Float[np.ndarray, " rows"], y: Float[np.ndarray, " rows"]) -> float | None:
    """Rank correlation tau-b, exact over all pairs; None where it has no meaning (all alike, or one row).

        tau_b = (pairs in order - pairs out of order) / sqrt((pairs not tied in x) (pairs not tied in y))

    Args:
        x: One ranking. [rows]
        y: The other. [rows]

    Source: Kendall, Biometrika 33(3), 1945; discordant pairs are the inversions of y sorted by x (Knight, 1966).

    >>> kendall_tau(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))
    0.3333333333333333
    """
    order = np.lexsort((y, x))
    x_ranks, y_ranks = _dense_ranks(x)[order], _dense_ranks(y)[order]
    pairs = len(x) * (len(x) - 1) / 2.0
    x_ties, y_ties = _tied_pairs(x_ranks), _tied_pairs(y_ranks)
    if pairs in (x_ties, y_ties):
        return None
    both = _tied_pairs(x_ranks.astype(np.int64) * (int(y_ranks.max()) + 1) + y_ranks)
    discordant = _count_inversions(y_ranks)
    concordant = pairs - x_ties - y_ties + both - discordant
    tau = (concordant - discordant) / np.sqrt((pairs - x_ties) * (pairs - y_ties))
    return float(np.clip(tau, -1.0, 1.0))


def ranking_regrets(
    predicted: Float[np.ndarray, " rows"],
    measured: Float[np.ndarray, " rows"],
    groups: Float[np.ndarray, " rows"],
    work: Float[np.ndarray, " rows"],
) -> Float[np.ndarray, " groups"]:
    """Return how much slower the predicted best of each group is than its measured best, as a fraction.

    Args:
        predicted: Predicted times. [s]
        measured: Measured times. [s]
        groups: Group of alternatives of each row; NaN for none. [rows]
        work: Work of a row, so that alternatives of nearly equal size are compared by time per work.

    Returns:
        One number for each group of at least two rows.

    >>> ranking_regrets(np.array([1.0, 2.0, 9.0]), np.array([3.0, 2.0, 9.0]), np.array([0.0, 0.0, 1.0]), np.ones(3))
    array([0.5])
    """
    known = ~np.isnan(groups)
    predicted, measured, groups = (predicted / work)[known], (measured / work)[known], groups[known]
    order = np.lexsort((predicted, groups))
    measured, groups = measured[order], groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=np.nan) != 0.0)
    if not len(starts):
        return np.empty(0)
    sizes = np.diff(starts, append=len(groups))
    regrets: Float[np.ndarray, " groups"] = measured[starts] / np.minimum.reduceat(measured, starts) - 1.0
    return regrets[sizes > 1]


# Losses are compared between models whose parameters and tokens differ by less than this, in ln.
_ONE_SIZE = 0.15
# Smallest difference of loss whose sign counts; seeds differ by less than half of it. [nats]
ORDERED_NATS = 0.01


class LossErrors(NamedTuple):
    """Errors of predicted losses.

    Attributes:
        mean_nats: Mean of |predicted - measured|. [nats]
        difference_nats: Median error of differences between models of one size; None without a pair. [nats]
        order_fraction: Share of pairs more than ``ORDERED_NATS`` apart whose order is predicted; None without one.
    """

    mean_nats: float
    difference_nats: float | None
    order_fraction: float | None


def loss_errors(
    predicted: Float[np.ndarray, " rows"],
    measured: Float[np.ndarray, " rows"],
    group: Int[np.ndarray, " rows"],
    log_parameters: Float[np.ndarray, " rows"],
    log_tokens: Float[np.ndarray, " rows"],
) -> LossErrors:
    """Summarize errors of losses, and of differences between models of one size.

    Args:
        predicted: Predicted losses. [nats]
        measured: Measured ones. [nats]
        group: Rows of different groups are not compared.
    """
    pairs = []
    for number in np.unique(group):
        own = np.flatnonzero(group == number)
        own = own[np.argsort(log_parameters[own], kind="stable")]
        for apart in range(1, len(own)):
            first, second = own[:-apart], own[apart:]
            near = log_parameters[second] - log_parameters[first] < _ONE_SIZE
            if not near.any():
                break
            near &= np.abs(log_tokens[second] - log_tokens[first]) < _ONE_SIZE
            pairs.append(np.stack([first[near], second[near]]))
    mean = float(np.mean(np.abs(predicted - measured)))
    first, second = np.concatenate(pairs, axis=1) if pairs else np.empty((2, 0), dtype=np.int64)
    if not len(first):
        return LossErrors(mean, None, None)
    actual, expected = measured[first] - measured[second], predicted[first] - predicted[second]
    counts = np.abs(actual) > ORDERED_NATS
    return LossErrors(
        mean,
        float(np.median(np.abs(expected - actual))),
        float(np.mean(actual[counts] * expected[counts] > 0.0)) if counts.any() else None,
    )


def _dense_ranks(values: Float[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
    """Return the rank of each value among the distinct ones."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _tied_pairs(ranks: Int[np.ndarray, " rows"]) -> float:
    counts: Float[np.ndarray, " values"] = np.unique(ranks, return_counts=True)[1].astype(float)
    return float(np.sum(counts * (counts - 1.0) / 2.0))


def _count_inversions(ranks: Int[np.ndarray, " rows"]) -> float:
    """Count pairs i < j with ranks[i] > ranks[j].

    Two ranks are compared at the highest bit in which they differ: rows are split by that bit, group by group, in
    order, and each 0 counts the 1s before it in its group. Ranks of n rows have log2(n) bits, each of which takes a
    pass over arrays.
    """
    total, current = 0.0, ranks
    for bit in range(int(ranks.max()).bit_length() - 1, -1, -1):
        is_one = (current >> bit) & 1
        group = current >> (bit + 1)
        ones_before = np.cumsum(is_one) - is_one
        # Rows of a group are adjacent; subtract the ones before its first row.
        starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        lengths = np.diff(np.r_[starts, len(group)])
        ones_before = ones_before - np.repeat(ones_before[starts], lengths)
        total += float(np.sum(ones_before[is_one == 0], dtype=float))
        current = current[np.argsort(current >> bit, kind="stable")]
    return total
