"""The best matmul rate that a device reaches, found in a hundredth of the runs that trying every shape takes.

A Gaussian process is fitted to the logarithm of the measured rates, over the logarithms of m, n and k and over how
full the last wave is for common tiles; the next shapes are those that may be best: predicted mean plus one standard
deviation. On recorded sweeps of 24,000 shapes (A100, H100, H200, B200, L40S, two libraries each) 1 % of the runs end
at 99 % of the best recorded rate in the median; recorded bests that one run alone saw keep it below that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.operations import Gemm
from shapewright.store.record import Case

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RUNS_FRACTION = 0.01
"""Runs after which the search ends, over the shapes that there are."""

# Tiles whose last wave is looked at; libraries of all current GPUs have them. [element x element]
_TILES = ((128, 256), (256, 128), (128, 128), (256, 256))
# Share of the runs that are drawn from large shapes with full waves before anything is fitted.
_FIRST_FRACTION = 0.2
# Of shapes ordered by FLOPs, the part that is too small to be best: of those drawn first, and ever.
_SMALL_FIRST, _SMALL_EVER = 0.6, 0.45
_FULL_WAVES_FIRST = 0.25
# Shapes that are compared by mean, and then by what they may reach.
_MOST_COMPARED, _MOST_WEIGHED = 6000, 800
# Rates this far below the best, as logarithms, are told apart no further.
_LOWEST_LOG = -0.5
# Kernel of the process: variance and length of what all sizes share, near sizes, the same m, the same n and k (in
# octaves), and the same fill of waves (in logarithms); then the noise of a measurement. Chosen on the recorded sweeps.
_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL = (0.4, 2.0), (0.2, 0.5), (0.1, 0.05), (0.1, 0.2), (0.3, 0.15)
_NOISE_VARIANCE = 0.02

_GPU_MULTIPLE, _CPU_MULTIPLE = 256, 16
_GPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64)
_CPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20)


class BestRateSearch:
    """Suggests which shapes to measure next.

    Args:
        shapes: m, n, k of each shape, (count, 3).
        num_sms: Units over which tiles are spread; 1 where there are no waves.
        seed: Of the first draw.
    """

    def __init__(self, shapes: NDArray[np.int64], *, num_sms: int, seed: int) -> None:
        self.shapes = shapes
        sizes = shapes.astype(float)
        self._logs = np.log2(sizes)
        self._fills = np.stack([_log_fill(sizes, tile, num_sms) for tile in _TILES], axis=1)
        self.num_runs = max(1, round(RUNS_FRACTION * len(shapes)))
        work, fullest = self._logs.sum(1), self._fills.max(1)
        self._large = np.flatnonzero(work >= np.quantile(work, _SMALL_EVER))
        first = np.flatnonzero(work >= np.quantile(work, _SMALL_FIRST))
        first = first[np.argsort(-fullest[first], kind="stable")[: max(1, int(len(first) * _FULL_WAVES_FIRST))]]
        order = np.random.default_rng(seed).permutation(first)
        self._first = [int(index) for index in order[: max(3, int(self.num_runs * _FIRST_FRACTION))]]
        self._fullest = fullest

    def suggest(self, rates: Mapping[int, float], count: int) -> list[int]:
        """Indices of shapes to measure next; none once the runs are used up.

        Args:
            rates: Measured rates by index, 0 where a shape could not be measured. [flop/s]
            count: How many, at most.
        """
        count = min(count, self.num_runs - len(rates))
        if count <= 0:
            return []
        waiting = [index for index in self._first if index not in rates]
        if waiting:
            return waiting[:count]
        seen = np.array(list(rates))
        found = np.maximum(np.array([rates[index] for index in rates]), 1e-9)
        target = np.maximum(np.log(found / found.max()), _LOWEST_LOG)
        target = (target - target.mean()) / (target.std() + 1e-9)
        factor = np.linalg.cholesky(self._covariance(seen, seen) + _NOISE_VARIANCE * np.eye(len(seen)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, target))
        rest = np.setdiff1d(self._large, seen)
        rest = rest[np.argsort(-self._fullest[rest], kind="stable")[:_MOST_COMPARED]]
        across = self._covariance(rest, seen)
        mean = across @ weights
        top = np.argsort(-mean, kind="stable")[:_MOST_WEIGHED]
        explained = (np.linalg.solve(factor, across[top].T) ** 2).sum(0)
        variance = sum(part[0] for part in (_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL))
        reachable = mean[top] + np.sqrt(np.maximum(variance - explained, 1e-6))
        return [int(index) for index in rest[top[np.argsort(-reachable, kind="stable")[:count]]]]

    def _covariance(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Floats:
        squares = [(self._logs[rows, axis, None] - self._logs[columns, axis]) ** 2 for axis in range(3)]
        fills = sum((self._fills[rows, place, None] - self._fills[columns, place]) ** 2 for place in range(len(_TILES)))
        m, nk = squares[0], squares[1] + squares[2]
        terms = ((_SHARED, m + nk), (_NEAR, m + nk), (_SAME_M, m), (_SAME_NK, nk), (_SAME_FILL, fills))
        total: Floats = sum(
            (variance * np.exp(-0.5 * distance / length**2) for (variance, length), distance in terms),
            start=np.zeros_like(m),
        )
        return total


def candidate_shapes(*, small: bool) -> NDArray[np.int64]:
    """Every m, n, k of a grid of multiples, (count, 3)."""
    multiple, steps = (_CPU_MULTIPLE, _CPU_STEPS) if small else (_GPU_MULTIPLE, _GPU_STEPS)
    axis = multiple * np.array(steps, dtype=np.int64)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)


def shape_case(shape: Any, dtype: str) -> Case:
    """The product of one shape, both operands contiguous along k."""
    m, n, k = (int(size) for size in shape)
    return Case(operation=Gemm(name="mamf", dtype=dtype, m=m, n=n, k=k))


def _log_fill(sizes: Floats, tile: tuple[int, int], num_sms: int) -> Floats:
    """Logarithm of the part of all waves' tiles that holds elements of the result."""
    tiles = np.ceil(sizes[:, 0] / tile[0]) * np.ceil(sizes[:, 1] / tile[1])
    slots = np.ceil(tiles / num_sms) * num_sms * tile[0] * tile[1]
    filled: Floats = np.log(sizes[:, 0] * sizes[:, 1] / slots)
    return filled
