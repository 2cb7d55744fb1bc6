"""Search for the maximum achievable matmul FLOP/s (MAMF) of a device, with 1 % of the runs of an exhaustive sweep.

A Gaussian process is fitted to the logarithm of the measured rates. Its features are the logarithms of m, n and k, and
how full the last wave is for common tiles. The next shapes are those with the highest predicted mean plus one standard
deviation. On recorded sweeps of 24,000 shapes (A100, H100, H200, B200, L40S, two libraries each), 1 % of the runs reach
99 % of the best recorded rate in the median; where the recorded best is a single noisy run, the result is lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations import Gemm
from shapewright.measure.store.record import Case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float, Int

RUNS_FRACTION = 0.01
"""Share of all shapes that the search measures."""

# Tiles whose last wave is a feature; the libraries of all current GPUs have them. [element x element]
_TILES = ((128, 256), (256, 128), (128, 128), (256, 256))
# Share of the runs that are drawn from large shapes with full waves before the first fit.
_INITIAL_FRACTION = 0.2
# Quantiles of m n k below which shapes are too small to be the best: for the initial draw, and for all later runs.
_MIN_WORK_QUANTILE_INITIAL, _MIN_WORK_QUANTILE = 0.6, 0.45
_FULL_WAVES_FRACTION_INITIAL = 0.25
# Shapes whose mean is predicted, and those of them whose standard deviation is predicted as well.
_MAX_MEANS, _MAX_DEVIATIONS = 6000, 800
# Log rates relative to the best are clipped here: slower shapes need not be distinguished.
_MIN_LOG_RATE = -0.5
# Kernel of the process: variance and length scale of the terms for all sizes, nearby sizes, the same m, the same n and
# k (lengths in octaves), and the same wave fill (length in log units); then the measurement noise. Chosen on the
# recorded sweeps.
_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL = (0.4, 2.0), (0.2, 0.5), (0.1, 0.05), (0.1, 0.2), (0.3, 0.15)
_NOISE_VARIANCE = 0.02

_GPU_MULTIPLE, _CPU_MULTIPLE = 256, 16
_GPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64)
_CPU_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20)


class BestRateSearch:
    """Suggests which GEMM shapes to measure next.

    Args:
        shapes: m, n, k of each shape.
        num_sms: SMs over which tiles are spread; 1 on a device without waves.
        seed: Seed of the initial draw.
    """

    def __init__(self, shapes: Int[np.ndarray, "count 3"], *, num_sms: int, seed: int) -> None:
        self.shapes = shapes
        sizes = shapes.astype(float)
        self._logs = np.log2(sizes)
        self._fills = np.stack([_log_wave_fill(sizes, tile, num_sms) for tile in _TILES], axis=1)
        self.num_runs = max(1, round(RUNS_FRACTION * len(shapes)))
        work, fullest = self._logs.sum(1), self._fills.max(1)
        self._large = np.flatnonzero(work >= np.quantile(work, _MIN_WORK_QUANTILE))
        initial = np.flatnonzero(work >= np.quantile(work, _MIN_WORK_QUANTILE_INITIAL))
        num_full = max(1, int(len(initial) * _FULL_WAVES_FRACTION_INITIAL))
        initial = initial[np.argsort(-fullest[initial], kind="stable")[:num_full]]
        order = np.random.default_rng(seed).permutation(initial)
        self._initial = [int(index) for index in order[: max(3, int(self.num_runs * _INITIAL_FRACTION))]]
        self._fullest = fullest

    def suggest(self, rates: Mapping[int, float], count: int) -> list[int]:
        """Indices of the shapes to measure next; empty once all runs are used.

        Args:
            rates: Measured rates by index, 0 where a measurement failed. [flop/s]
            count: Upper limit of the number of suggestions.
        """
        count = min(count, self.num_runs - len(rates))
        if count <= 0:
            return []
        remaining = [index for index in self._initial if index not in rates]
        if remaining:
            return remaining[:count]
        seen = np.array(list(rates))
        measured = np.maximum(np.array([rates[index] for index in rates]), 1e-9)
        target = np.maximum(np.log(measured / measured.max()), _MIN_LOG_RATE)
        target = (target - target.mean()) / (target.std() + 1e-9)
        factor = np.linalg.cholesky(self._covariance(seen, seen) + _NOISE_VARIANCE * np.eye(len(seen)))
        weights = np.linalg.solve(factor.T, np.linalg.solve(factor, target))
        rest = np.setdiff1d(self._large, seen)
        rest = rest[np.argsort(-self._fullest[rest], kind="stable")[:_MAX_MEANS]]
        covariance = self._covariance(rest, seen)
        mean = covariance @ weights
        top = np.argsort(-mean, kind="stable")[:_MAX_DEVIATIONS]
        explained = (np.linalg.solve(factor, covariance[top].T) ** 2).sum(0)
        variance = sum(term[0] for term in (_SHARED, _NEAR, _SAME_M, _SAME_NK, _SAME_FILL))
        upper_bound = mean[top] + np.sqrt(np.maximum(variance - explained, 1e-6))
        return [int(index) for index in rest[top[np.argsort(-upper_bound, kind="stable")[:count]]]]

    def _covariance(
        self, rows: Int[np.ndarray, " rows"], columns: Int[np.ndarray, " columns"]
    ) -> Float[np.ndarray, "rows columns"]:
        """Prior covariance of the rates of two sets of shapes, given by index."""
        squares = [(self._logs[rows, axis, None] - self._logs[columns, axis]) ** 2 for axis in range(3)]
        fills = sum((self._fills[rows, tile, None] - self._fills[columns, tile]) ** 2 for tile in range(len(_TILES)))
        m, nk = squares[0], squares[1] + squares[2]
        terms = ((_SHARED, m + nk), (_NEAR, m + nk), (_SAME_M, m), (_SAME_NK, nk), (_SAME_FILL, fills))
        total: Float[np.ndarray, "rows columns"] = sum(
            (variance * np.exp(-0.5 * distance / length**2) for (variance, length), distance in terms),
            start=np.zeros_like(m),
        )
        return total


def candidate_shapes(*, small: bool) -> Int[np.ndarray, "count 3"]:
    """m, n and k of every shape of the search grid; ``small`` selects the grid for a CPU."""
    multiple, steps = (_CPU_MULTIPLE, _CPU_STEPS) if small else (_GPU_MULTIPLE, _GPU_STEPS)
    axis = multiple * np.array(steps, dtype=np.int64)
    return np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1).reshape(-1, 3)


def shape_case(shape: Sequence[int] | Int[np.ndarray, " 3"], dtype: str) -> Case:
    """The GEMM of one shape, with both operands contiguous along k."""
    m, n, k = (int(size) for size in shape)
    return Case(operation=Gemm(name="mamf", dtype=dtype, m=m, n=n, k=k))


def _log_wave_fill(
    sizes: Float[np.ndarray, "count 3"], tile: tuple[int, int], num_sms: int
) -> Float[np.ndarray, " count"]:
    """Logarithm of the output elements over the elements of all tiles of all waves."""
    num_tiles = np.ceil(sizes[:, 0] / tile[0]) * np.ceil(sizes[:, 1] / tile[1])
    slots = np.ceil(num_tiles / num_sms) * num_sms * tile[0] * tile[1]
    fill: Float[np.ndarray, " count"] = np.log(sizes[:, 0] * sizes[:, 1] / slots)
    return fill
