"""The fit of pointwise kernels: a start and a share of bandwidth for each kind, and the last-level cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shapewright.fit.logs import Array, fit_logs
from shapewright.perf.pointwise import CACHE_EDGE_POWER

START_BOUNDS_S = (1e-6, 2e-5)
FRACTION_BOUNDS = (0.05, 0.98)
_START_S, _FRACTION = 3e-6, 0.5


def predict_pointwise(
    free: Mapping[str, float],
    kinds: Any,
    num_bytes: Array,
    bandwidth_bytes_per_s: float,
    l2_bytes: float,
    *,
    num_kernels: Array | float = 1.0,
) -> Array:
    """Time of each operation from the free parameters. [s]

    Args:
        free: ``start_<kind>`` [s], ``fraction_<kind>``, ``l2_reach_fraction`` and ``l2_speedup``.
        kinds: Kind of each. [rows]
        num_bytes: Bytes that each moves. [byte]
        bandwidth_bytes_per_s: The device's memory bandwidth. [byte/s]
        l2_bytes: Its last-level cache. [byte]
        num_kernels: Launches of each, with a start each.
    """
    names = sorted(set(kinds))
    start = np.select([kinds == kind for kind in names], [free[f"start_{kind}"] for kind in names])
    fraction = np.select([kinds == kind for kind in names], [free[f"fraction_{kind}"] for kind in names])
    reach_bytes = max(l2_bytes * free["l2_reach_fraction"], 1.0)
    resident = 1.0 / (1.0 + np.minimum(num_bytes / reach_bytes, 1e6) ** CACHE_EDGE_POWER)
    traffic_s = num_bytes / (bandwidth_bytes_per_s * fraction) * (1.0 - resident * (1.0 - 1.0 / free["l2_speedup"]))
    found: Array = np.maximum(num_kernels * start + traffic_s, num_bytes / bandwidth_bytes_per_s)
    return found


def fit_pointwise(
    kinds: Any,
    num_bytes: Array,
    measured: Array,
    bandwidth_bytes_per_s: float,
    l2_bytes: float,
    *,
    start_bounds_s: tuple[float, float] = START_BOUNDS_S,
    fraction_bounds: tuple[float, float] = FRACTION_BOUNDS,
    pull: float = 0.0,
    num_kernels: Array | float = 1.0,
) -> dict[str, float]:
    """Start and fraction of every kind, and the cache, from measured times.

    Args:
        kinds: Kind of each row. [rows]
        num_bytes: Bytes that each moves. [byte]
        measured: Times. [s]
        bandwidth_bytes_per_s: The device's memory bandwidth. [byte/s]
        l2_bytes: Its last-level cache. [byte]
        start_bounds_s: Range of the starts. [s]
        fraction_bounds: Range of the shares of bandwidth.
        pull: See fit_logs.
        num_kernels: Launches of each row.
    """
    names = sorted(set(kinds))
    bounds = {"l2_reach_fraction": (0.2, 2.0), "l2_speedup": (1.0, 4.0)}
    bounds |= {f"start_{kind}": start_bounds_s for kind in names}
    bounds |= {f"fraction_{kind}": fraction_bounds for kind in names}
    start = {"l2_reach_fraction": 0.8, "l2_speedup": 1.3}
    start |= {f"start_{kind}": _START_S for kind in names} | {f"fraction_{kind}": _FRACTION for kind in names}
    return fit_logs(
        lambda free: predict_pointwise(
            free, kinds, num_bytes, bandwidth_bytes_per_s, l2_bytes, num_kernels=num_kernels
        ),
        measured,
        start,
        bounds,
        pull=pull,
    )[0]
