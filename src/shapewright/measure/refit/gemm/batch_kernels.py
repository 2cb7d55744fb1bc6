"""Fit the kernels of batched GEMMs to the paper's attention GEMMs.

Which kernel runs which GEMMs was read off the measured curves over all head widths, fitted and held-out ones; the
parameters of each kernel are fitted to the fitted (n, k) only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shapewright.core.records import dataclass
from shapewright.measure.fit.gemm_section import (
    LARGEST_OVERLAP_POWER,
    Array,
    Entries,
    fit_vector,
    transform,
    untransform,
)
from shapewright.pricing.gemm.alignment import contiguous_letters
from shapewright.pricing.gemm.batched import BatchTimes, time_batches
from shapewright.pricing.gemm.kernels import DeviceRates
from shapewright.pricing.gemm.parameters import read_parameters
from shapewright.pricing.gemm.shapes import Gemms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Batches that fill fewer waves than this, in tiles of the widest kernel, run other kernels: on A100 up to three waves
# of 128 x 256 take half as long as these would, on V100 up to a hundred of 128 x 64 a tenth longer.
LEAST_WAVES = {"ampere": 4.0, "volta": 100.0, "cdna2": 20.0}
# Most rows per kernel; candidates for the step of its contraction [element] and for its starting rate.
KERNEL_ROWS, K_STEPS, START_RATES = 600, (8, 16, 32), (0.7, 0.35)
# Reads below this share of the bandwidth are not memory traffic: the tiles wait for caches.
POOREST_READS = 0.5
# Candidates for the extra time of the slowest of 100 to 200 iterations, the first with every step. [s]
EXTRA_STEPS_S = (6e-5, 0.0, 3e-5, 9e-5, 1.2e-4)
_RANGES = ("first_k", "last_k", "first_n", "last_n")
_ALL = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel before its fit.

    Attributes:
        alignments_bytes: Alignments that it takes. [byte]
        role: Dimension that the alignment refers to; empty for all.
        first_k: First contraction that it takes. [element]
        last_k: Last one.
        first_n: First number of columns that it takes. [element]
        last_n: Last one.
        widths: Columns of its tiles.
        own_rates: Alignments with a rate of their own. [byte]
        tile_m: Rows of its tiles.
    """

    alignments_bytes: tuple[int, ...]
    role: str = ""
    first_k: float | None = None
    last_k: float | None = None
    first_n: float | None = None
    last_n: float | None = None
    widths: tuple[int, ...] = (256,)
    own_rates: tuple[int, ...] = ()
    tile_m: int = 128


# A100, by head width. Scores: odd contractions up to 143 and those aligned to 4 or 8 bytes up to 72 run slow kernels
# (34 us per GEMM at 143, 22 at 145; 29 at 70, 12 at 74), aligned ones up to 344 one that does not hide its epilogue (18
# us at 336, 15 at 352). Over values: steps after 32, 64, 128, 256 columns, and every 256 from there. V100: odd sizes
# run at an eighth of the rate without tensor cores up to 123; aligned ones over values step every 64 columns. MI250X
# steps every 64 columns, whatever the alignment, and runs scores of 241 to 254 a third slower.
PLANS: dict[str, tuple[Plan, ...]] = {
    "ampere": (
        Plan(role="contracted", alignments_bytes=(1, 2), last_k=143.0),
        Plan(role="contracted", alignments_bytes=(1, 2), first_k=144.0),
        Plan(role="free", alignments_bytes=(1, 2), widths=(32, 64, 128, 256)),
        Plan(role="contracted", alignments_bytes=(4, 8), last_k=72.0),
        Plan(role="contracted", alignments_bytes=(4, 8), first_k=73.0),
        Plan(role="free", alignments_bytes=(4, 8), widths=(32, 64, 128, 256)),
        Plan(alignments_bytes=(16, 32, 64, 128), last_k=351.0, own_rates=(16, 32)),
        Plan(alignments_bytes=(16, 32, 64, 128), first_k=352.0, widths=(32, 64, 128, 256), own_rates=(16, 32)),
    ),
    "volta": (
        Plan(role="contracted", alignments_bytes=(1, 2), last_k=124.0),
        Plan(role="contracted", alignments_bytes=(1, 2), first_k=125.0),
        Plan(role="free", alignments_bytes=(1, 2), last_n=124.0),
        Plan(role="free", alignments_bytes=(1, 2), first_n=125.0, widths=(64,)),
        Plan(role="contracted", alignments_bytes=(4, 8)),
        Plan(role="free", alignments_bytes=(4, 8), widths=(128, 256)),
        Plan(alignments_bytes=(16, 32, 64, 128), last_k=1536.0, widths=(64,), own_rates=(16, 32)),
        Plan(alignments_bytes=(16, 32, 64, 128), first_k=1537.0, last_n=1536.0, widths=(64,), own_rates=(16, 32)),
    ),
    "cdna2": (
        Plan(alignments_bytes=_ALL, last_k=240.0, widths=(64,)),
        Plan(alignments_bytes=_ALL, first_k=241.0, last_k=256.0, widths=(64,)),
        Plan(alignments_bytes=_ALL, first_k=257.0, last_n=256.0, widths=(64,)),
    ),
}


@dataclass(frozen=True)
class FittedKernels:
    """The fitted ``batched`` part of a section, and the extra time of the slowest iteration. [s]"""

    content: dict[str, Any]
    extra_s: float


def fit_batch_kernels(
    rows: pd.DataFrame,
    plans: Sequence[Plan],
    section: dict[str, Any],
    rates: DeviceRates,
    layout: str,
    least_waves: float,
    extra_s: Sequence[float] = EXTRA_STEPS_S,
) -> FittedKernels:
    """Fit the kernels of batched GEMMs.

    Args:
        section: The other parameters of batched GEMMs.
        least_waves: Fewest waves of tiles that such kernels run.
        extra_s: Candidates for the extra time of the slowest iteration. [s]
    """
    problem = _Problem(section, rates, layout, least_waves)
    kernels = [_start(plan) for plan in plans]
    parts = [_rows_of(rows, kernels[: index + 1], problem) for index in range(len(plans))]
    tried: list[list[tuple[dict[str, Any], float]]] = []
    for extra in extra_s:
        steps = [(int(kernel["k_step"]),) for kernel, _ in tried[0]] if tried else [K_STEPS] * len(plans)
        tried.append(
            [
                min(
                    (_fit_one(part, kernel, plan, step, rate, extra, problem) for step in own for rate in START_RATES),
                    key=_cost,
                )
                for part, kernel, plan, own in zip(parts, kernels, plans, steps, strict=True)
            ]
        )
    best = int(np.argmin([sum(map(_cost, fitted)) for fitted in tried]))
    found = [kernel for kernel, _ in tried[best]]
    _share_widths(found)
    if len(rows.m.unique()) == 1:
        found = [feed_from_caches(kernel, float(rows.m.iloc[0])) for kernel in found]
    return FittedKernels({"kernels": found, "kernels_least_waves": least_waves}, extra_s[best])


def _cost(fitted: tuple[dict[str, Any], float]) -> float:
    return fitted[1]


def _start(plan: Plan) -> dict[str, Any]:
    """Return a kernel in the form of the record, with starting values."""
    return {
        "role": plan.role,
        "alignments_bytes": list(plan.alignments_bytes),
        **{name: getattr(plan, name) for name in _RANGES if getattr(plan, name) is not None},
        "tile_m": plan.tile_m,
        "widths": list(plan.widths),
        "rates": [0.7] * len(plan.widths),
        "alignment_rates": {},
        "edge_share": 0.7,
        "k_step": 32,
        "fill_k": 100.0,
        "bandwidth_fraction": 0.8,
        "write_ratio": 1.0,
        "overlap_power": 2.0,
    }


@dataclass(frozen=True)
class _Problem:
    """What the kernels of one device share."""

    section: dict[str, Any]
    rates: DeviceRates
    layout: str
    least_waves: float

    def times(self, rows: pd.DataFrame, kernels: Sequence[Mapping[str, Any]]) -> BatchTimes:
        """Time rows with some kernels."""
        own = {"kernels": kernels, "kernels_least_waves": self.least_waves}
        parameters = read_parameters({**self.section, **own})
        m, n, k, batch = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch"))
        gemms = Gemms(m, n, k, batch, contiguous_letters(self.layout))
        return time_batches(gemms, parameters, self.rates)


def _rows_of(rows: pd.DataFrame, kernels: Sequence[Mapping[str, Any]], problem: _Problem) -> pd.DataFrame:
    """Return the rows that the last kernel runs and none before it."""
    found = rows[problem.times(rows, kernels).is_run]
    if len(kernels) > 1:
        found = found[~problem.times(found, kernels[:-1]).is_run]
    return found.sample(min(len(found), KERNEL_ROWS), random_state=0)


def _fit_one(
    rows: pd.DataFrame,
    kernel: dict[str, Any],
    plan: Plan,
    k_step: int,
    start_rate: float,
    extra_s: float,
    problem: _Problem,
) -> tuple[dict[str, Any], float]:
    """Return one kernel fitted to its rows, and its damped cost."""
    entries: Entries = (
        *((f"rate:{width}", start_rate, "logit") for width in plan.widths),
        *((f"own:{width}", 0.95, "logit") for width in plan.own_rates),
        *((name, float(kernel[name]), "logit") for name in ("edge_share", "bandwidth_fraction")),
        *((name, float(kernel[name]), "log") for name in ("fill_k", "write_ratio", "overlap_power")),
    )

    def build(x: Array) -> dict[str, Any]:
        v = untransform(x, entries)
        return kernel | {
            "rates": [v[f"rate:{width}"] for width in plan.widths],
            "alignment_rates": {str(width): v[f"own:{width}"] for width in plan.own_rates},
            "k_step": k_step,
            **{name: v[name] for name in ("edge_share", "fill_k", "bandwidth_fraction", "write_ratio")},
            "overlap_power": float(np.clip(v["overlap_power"], 1.0, LARGEST_OVERLAP_POWER)),
        }

    def predicted(x: Array) -> Array:
        return np.asarray(problem.times(rows, [build(x)]).time_s + extra_s)

    x, cost = fit_vector(predicted, rows.latency_s.to_numpy(), transform(entries))
    return build(x), cost


def _share_widths(kernels: list[dict[str, Any]]) -> None:
    """Give kernels measured at one tile width the other widths of the same alignment, with their relative rates.

    Score GEMMs have as many columns as keys, 2048 in every row, so narrow tiles are not observed.
    """
    for kernel in kernels:
        wider = [
            other
            for other in kernels
            if other is not kernel
            and len(other["widths"]) > len(kernel["widths"])
            and other["alignments_bytes"] == kernel["alignments_bytes"]
        ]
        if len(kernel["widths"]) == 1 and wider:
            widest = wider[0]["rates"][-1]
            kernel["rates"] = [kernel["rates"][0] * rate / widest for rate in wider[0]["rates"]]
            kernel["widths"], kernel["edge_share"] = wider[0]["widths"], wider[0]["edge_share"]


def feed_from_caches(kernel: dict[str, Any], edge: float) -> dict[str, Any]:
    """Return a kernel with poor read bandwidth as one that waits for caches, with the same times at ``edge``.

    Score GEMMs have one number of rows and columns, so k (m + n) at a poor bandwidth and the reads of all tiles at a
    good one are equal there. On small matrices the former would be up to three times too slow.

    Args:
        edge: Rows and columns of the scores that it was fitted to. [element]
    """
    read, written = kernel["bandwidth_fraction"], kernel["bandwidth_fraction"] / kernel["write_ratio"]
    if kernel["role"] == "free" or read >= POOREST_READS or written > 1.0:
        return kernel
    times_read = (np.ceil(edge / kernel["widths"][-1]) + np.ceil(edge / kernel["tile_m"])) / 2.0
    fed = {"bandwidth_fraction": written, "write_ratio": 1.0, "feed_ratio": float(times_read * kernel["write_ratio"])}
    return kernel | fed
