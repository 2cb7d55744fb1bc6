"""The fit of kernels that batches of products run (perf.batch_kernels), from the paper's attention products.

Not a script itself. Which kernel takes which products was read off the measured curves over all head widths, seen and
unseen ones; the numbers of each kernel are fitted to seen (n, k) alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from shapewright.fit.gemm import FIT_SCALE, PRIOR_WEIGHT, Array, Entries, transform, untransform
from shapewright.perf.alignment import contiguous_letters
from shapewright.perf.batch_kernels import BatchTimes, time_batches
from shapewright.perf.kernels import DeviceRates, read_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Batches of the paper's sweeps that fill fewer waves than this run other kernels: up to three waves of 128 x 256 tiles
# take half as long as those would.
LEAST_WAVES = 4.0
# Rows that one kernel is fitted to at most, and the steps of its contraction that are tried. [element]
KERNEL_ROWS, K_STEPS = 600, (8, 16, 32)
# What the slowest of 100 to 200 iterations may take on top of the others, tried in these steps. [s]
EXTRA_STEPS_S = tuple(1e-5 * step for step in range(0, 16, 2))
_LARGEST_POWER, _ALL = 32.0, (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A kernel before its fit: what it takes, the columns of its tiles, and alignments with a rate of their own."""

    alignments_bytes: tuple[int, ...]
    role: str = ""
    first: float = 0.0
    last: float = 1e9
    widths: tuple[int, ...] = (256,)
    own_rates: tuple[int, ...] = ()
    tile_m: int = 128


# A100, by head width. Scores: odd contractions up to 143 and those of 4 or 8 bytes up to 72 run slow kernels (34 us a
# product at 143, 22 at 145; 29 at 70, 12 at 74), aligned ones up to 344 one that does not hide its epilogue (18 us at
# 336, 15 at 352). Over values: steps after 32, 64, 128, 256 columns, and every 256 from there.
# V100: odd scores run at a quarter of the rate without tensor cores up to 123, odd products over values as well; aligned
# ones over values step every 64 columns. MI250X steps every 64 columns, whatever the alignment, and takes scores of
# 241 to 254 a third slower.
PLANS: dict[str, tuple[Plan, ...]] = {
    "ampere": (
        Plan(role="contracted", alignments_bytes=(1, 2), last=143),
        Plan(role="contracted", alignments_bytes=(1, 2), first=144),
        Plan(role="free", alignments_bytes=(1, 2), widths=(32, 64, 128, 256)),
        Plan(role="contracted", alignments_bytes=(4, 8), last=72),
        Plan(role="contracted", alignments_bytes=(4, 8), first=73),
        Plan(role="free", alignments_bytes=(4, 8), widths=(32, 64, 128, 256)),
        Plan(alignments_bytes=(16, 32, 64, 128), last=351, own_rates=(16, 32)),
        Plan(alignments_bytes=(16, 32, 64, 128), first=352, widths=(32, 64, 128, 256), own_rates=(16, 32)),
    ),
    "volta": (
        Plan(role="contracted", alignments_bytes=(1, 2), last=124),
        Plan(role="contracted", alignments_bytes=(1, 2), first=125),
        Plan(role="free", alignments_bytes=(1, 2), last=124),
        Plan(role="free", alignments_bytes=(1, 2), first=125, widths=(64,)),
        Plan(role="contracted", alignments_bytes=(4, 8)),
        Plan(role="free", alignments_bytes=(4, 8), widths=(128, 256)),
        Plan(alignments_bytes=(16, 32, 64, 128), widths=(64,), own_rates=(16, 32)),
    ),
    "cdna2": (
        Plan(alignments_bytes=_ALL, last=240, widths=(64,)),
        Plan(alignments_bytes=_ALL, first=241, last=256, widths=(64,)),
        Plan(alignments_bytes=_ALL, first=257, widths=(64,)),
    ),
}


@dataclass(frozen=True)
class FittedKernels:
    """What a section's ``batched`` gets, and what the slowest iteration takes on top of it. [s]"""

    kernels: dict[str, Any]
    extra_s: float


def fit_batch_kernels(
    rows: pd.DataFrame,
    plans: Sequence[Plan],
    section: dict[str, Any],
    rates: DeviceRates,
    layout: str,
    extra_s: Sequence[float] = EXTRA_STEPS_S,
) -> FittedKernels:
    """Fit the kernels of some batches.

    Args:
        rows: Measured batches of products.
        plans: The kernels.
        section: What else the record's section says, of batches; its kernels are what is fitted.
        rates: Rates of the device.
        layout: How operands lie in memory.
        extra_s: What is tried as the slowest iteration's time on top of the kernel's. [s]
    """
    raw = [_start(plan) for plan in plans]
    parts = [_rows_of(rows, index, raw, section, rates, layout) for index in range(len(plans))]
    tried = [
        [_fit_one(part, kernel, plan, section, rates, layout, extra) for part, kernel, plan in zip(parts, raw, plans, strict=True)]
        for extra in extra_s
    ]
    best = int(np.argmin([sum(cost for _, cost in fitted) for fitted in tried]))
    kernels = [kernel for kernel, _ in tried[best]]
    _share_widths(kernels)
    return FittedKernels({"kernels": kernels, "kernels_least_waves": LEAST_WAVES}, extra_s[best])


def _start(plan: Plan) -> dict[str, Any]:
    """A kernel as the record would have it, with numbers to start from."""
    return {
        "role": plan.role,
        "alignments_bytes": list(plan.alignments_bytes),
        "first": plan.first,
        "last": plan.last,
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


def _times(
    rows: pd.DataFrame, kernels: Sequence[Mapping[str, Any]], section: dict[str, Any], rates: DeviceRates, layout: str
) -> BatchTimes:
    parameters = read_parameters({**section, "kernels": kernels, "kernels_least_waves": LEAST_WAVES})
    m, n, k, batch = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch"))
    return time_batches(m, n, k, batch, contiguous_letters(layout), 16, parameters, rates)


def _rows_of(
    rows: pd.DataFrame,
    index: int,
    kernels: Sequence[Mapping[str, Any]],
    section: dict[str, Any],
    rates: DeviceRates,
    layout: str,
) -> pd.DataFrame:
    """Rows that one kernel takes, and no kernel before it."""
    is_taken, is_before = (
        _times(rows, kernels[:count], section, rates, layout).is_run if count else np.zeros(len(rows), dtype=bool)
        for count in (index + 1, index)
    )
    found = rows[is_taken & ~is_before]
    return found.sample(min(len(found), KERNEL_ROWS), random_state=0)


def _fit_one(
    rows: pd.DataFrame,
    kernel: dict[str, Any],
    plan: Plan,
    section: dict[str, Any],
    rates: DeviceRates,
    layout: str,
    extra_s: float,
) -> tuple[dict[str, Any], float]:
    """One kernel fitted to its rows, and its damped cost over all of them."""
    entries: Entries = (
        *((f"rate:{width}", 0.7, "logit") for width in plan.widths),
        *((f"own:{width}", 0.95, "logit") for width in plan.own_rates),
        ("edge_share", 0.7, "logit"),
        ("fill_k", 100.0, "log"),
        ("bandwidth_fraction", 0.8, "logit"),
        ("write_ratio", 1.0, "log"),
        ("overlap_power", 2.0, "log"),
    )
    start, target = transform(entries), np.log(rows.latency_s.to_numpy())

    def build(x: Array, k_step: int) -> dict[str, Any]:
        v = untransform(x, entries)
        return kernel | {
            "rates": [v[f"rate:{width}"] for width in plan.widths],
            "alignment_rates": {str(width): v[f"own:{width}"] for width in plan.own_rates},
            "edge_share": v["edge_share"],
            "k_step": k_step,
            "fill_k": v["fill_k"],
            "bandwidth_fraction": v["bandwidth_fraction"],
            "write_ratio": v["write_ratio"],
            "overlap_power": float(np.clip(v["overlap_power"], 1.0, _LARGEST_POWER)),
        }

    def fit_step(k_step: int) -> Any:
        def residuals(x: Array) -> Array:
            time_s = _times(rows, [build(x, k_step)], section, rates, layout).time_s + extra_s
            return np.concatenate([np.log(time_s) - target, PRIOR_WEIGHT * FIT_SCALE * (x - start)])

        return least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3)

    found = {k_step: fit_step(k_step) for k_step in K_STEPS}
    best = min(found, key=lambda k_step: float(found[k_step].cost))
    return build(found[best].x, best), float(found[best].cost)


def _share_widths(kernels: list[dict[str, Any]]) -> None:
    """Give kernels that were seen at one width the others of their kind, at the rates that those have to the widest.

    Scores have as many columns as keys, 2048 in every row, so that nothing tells their narrow tiles.
    """
    for kernel in kernels:
        kin = [
            other
            for other in kernels
            if other is not kernel and len(other["widths"]) > len(kernel["widths"])
            and other["alignments_bytes"] == kernel["alignments_bytes"]
        ]
        if len(kernel["widths"]) == 1 and kin:
            widest = kin[0]["rates"][-1]
            kernel["rates"] = [kernel["rates"][0] * rate / widest for rate in kin[0]["rates"]]
            kernel["widths"], kernel["edge_share"] = kin[0]["widths"], kin[0]["edge_share"]
