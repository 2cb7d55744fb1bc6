"""The fit of kernels that batches of products run (perf.batch_kernels), from the paper's attention products.

Not a script itself. Which kernel takes which products was read off the measured curves over all head widths, seen and
unseen ones; the numbers of each kernel are fitted to seen (n, k) alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from shapewright.fit.gemm import FIT_SCALE, LARGEST_OVERLAP_POWER, PRIOR_WEIGHT, Array, Entries, transform, untransform
from shapewright.perf.alignment import contiguous_letters
from shapewright.perf.batch_kernels import BatchTimes, time_batches
from shapewright.perf.gemm_menu import read_parameters
from shapewright.perf.kernels import DeviceRates
from shapewright.perf.products import Products

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Batches of the paper's sweeps that fill fewer waves than this run other kernels, in tiles of the widest one: on A100
# up to three waves of 128 x 256 take half as long as those would, on V100 up to a hundred of 128 x 64 a tenth longer.
LEAST_WAVES = {"ampere": 4.0, "volta": 100.0, "cdna2": 20.0}
# Rows that one kernel is fitted to at most; steps of its contraction [element] and rates from where the fit is tried.
KERNEL_ROWS, K_STEPS, START_RATES = 600, (8, 16, 32), (0.7, 0.35)
# Reads of less than this share of the bandwidth are no traffic of memory: what all tiles read comes from caches.
POOREST_READS = 0.5
# What the slowest of 100 to 200 iterations may take on top of the others, the first with every step. [s]
EXTRA_STEPS_S = (6e-5, 0.0, 3e-5, 9e-5, 1.2e-4)
_RANGES = ("first_k", "last_k", "first_n", "last_n")
_ALL = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel before its fit: what it takes, the columns of its tiles, and alignments with a rate of their own."""

    alignments_bytes: tuple[int, ...]
    role: str = ""
    first_k: float | None = None
    last_k: float | None = None
    first_n: float | None = None
    last_n: float | None = None
    widths: tuple[int, ...] = (256,)
    own_rates: tuple[int, ...] = ()
    tile_m: int = 128


# A100, by head width. Scores: odd contractions up to 143 and those of 4 or 8 bytes up to 72 run slow kernels (34 us a
# product at 143, 22 at 145; 29 at 70, 12 at 74), aligned ones up to 344 one that does not hide its epilogue (18 us at
# 336, 15 at 352). Over values: steps after 32, 64, 128, 256 columns, and every 256 from there.
# V100: odd products run at an eighth of the rate without tensor cores up to 123; aligned ones over values step every 64
# columns. MI250X steps every 64 columns, whatever the alignment, and takes scores of 241 to 254 a third longer.
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
    """What a section's ``batched`` gets, and what the slowest iteration takes on top of it. [s]"""

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
    """Fit the kernels of some batches.

    Args:
        rows: Measured batches of products.
        plans: The kernels.
        section: What else the record's section says, of batches; its kernels are what is fitted.
        rates: Rates of the device.
        layout: How operands lie in memory.
        least_waves: Fewest waves of tiles that such kernels run.
        extra_s: What is tried as the slowest iteration's time on top of the kernel's. [s]
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
    """A kernel as the record would have it, with numbers to start from."""
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
    """What the kernels of one device have in common."""

    section: dict[str, Any]
    rates: DeviceRates
    layout: str
    least_waves: float

    def times(self, rows: pd.DataFrame, kernels: Sequence[Mapping[str, Any]]) -> BatchTimes:
        """Time rows with some kernels."""
        own = {"kernels": kernels, "kernels_least_waves": self.least_waves}
        parameters = read_parameters({**self.section, **own})
        m, n, k, batch = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch"))
        products = Products(m, n, k, batch, contiguous_letters(self.layout))
        return time_batches(products, parameters, self.rates)


def _rows_of(rows: pd.DataFrame, kernels: Sequence[Mapping[str, Any]], problem: _Problem) -> pd.DataFrame:
    """Rows that the last kernel takes, and none before it."""
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
    """One kernel fitted to its rows, and its damped cost over all of them."""
    entries: Entries = (
        *((f"rate:{width}", start_rate, "logit") for width in plan.widths),
        *((f"own:{width}", 0.95, "logit") for width in plan.own_rates),
        *((name, float(kernel[name]), "logit") for name in ("edge_share", "bandwidth_fraction")),
        *((name, float(kernel[name]), "log") for name in ("fill_k", "write_ratio", "overlap_power")),
    )
    start, target = transform(entries), np.log(rows.latency_s.to_numpy())

    def build(x: Array) -> dict[str, Any]:
        v = untransform(x, entries)
        return kernel | {
            "rates": [v[f"rate:{width}"] for width in plan.widths],
            "alignment_rates": {str(width): v[f"own:{width}"] for width in plan.own_rates},
            "k_step": k_step,
            **{name: v[name] for name in ("edge_share", "fill_k", "bandwidth_fraction", "write_ratio")},
            "overlap_power": float(np.clip(v["overlap_power"], 1.0, LARGEST_OVERLAP_POWER)),
        }

    def residuals(x: Array) -> Array:
        time_s = problem.times(rows, [build(x)]).time_s + extra_s
        return np.concatenate([np.log(time_s) - target, PRIOR_WEIGHT * FIT_SCALE * (x - start)])

    found = least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3)
    return build(found.x), float(found.cost)


def _share_widths(kernels: list[dict[str, Any]]) -> None:
    """Give kernels that were seen at one width the others of their kind, at the rates that those have to the widest.

    Scores have as many columns as keys, 2048 in every row, so that nothing tells their narrow tiles.
    """
    for kernel in kernels:
        kin = [
            other
            for other in kernels
            if other is not kernel
            and len(other["widths"]) > len(kernel["widths"])
            and other["alignments_bytes"] == kernel["alignments_bytes"]
        ]
        if len(kernel["widths"]) == 1 and kin:
            widest = kin[0]["rates"][-1]
            kernel["rates"] = [kernel["rates"][0] * rate / widest for rate in kin[0]["rates"]]
            kernel["widths"], kernel["edge_share"] = kin[0]["widths"], kin[0]["edge_share"]


def feed_from_caches(kernel: dict[str, Any], edge: float) -> dict[str, Any]:
    """A kernel whose scores read at a poor share of the bandwidth, as one that waits for caches: the same at an edge.

    Scores have one number of rows and columns, so that k (m + n) at a poor bandwidth and what all tiles read at a good
    one are the same there. On small matrices the former would take up to three times too long.

    Args:
        kernel: A fitted kernel.
        edge: Rows and columns of the scores that it was fitted to. [element]
    """
    read, written = kernel["bandwidth_fraction"], kernel["bandwidth_fraction"] / kernel["write_ratio"]
    if kernel["role"] == "free" or read >= POOREST_READS or written > 1.0:
        return kernel
    times_read = (np.ceil(edge / kernel["widths"][-1]) + np.ceil(edge / kernel["tile_m"])) / 2.0
    fed = {"bandwidth_fraction": written, "write_ratio": 1.0, "feed_ratio": float(times_read * kernel["write_ratio"])}
    return kernel | fed
