"""Fit one section of a GEMM record: its free parameters, the least squares, and errors on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.measure.fit.shared import Name
from shapewright.pricing.calibration.transfer import tensor_rate_ratio
from shapewright.pricing.gemm.alignment import (
    ALIGNMENT_CLASSES_BYTES,
    ROLES,
    contiguous_letters,
    transfer_alignment_factors,
)
from shapewright.pricing.gemm.block import estimate_block_s
from shapewright.pricing.gemm.kernels import DeviceRates, rates_of
from shapewright.pricing.gemm.parameters import read_batched_parameters, read_parameters
from shapewright.pricing.gemm.price import ROWS_PER_BLOCK
from shapewright.pricing.gemm.shapes import Gemms

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float, Int

    from shapewright.hardware.device import Device

Array = NDArray[np.float64]

FIT_ROWS = 4000
# Weight of a parameter's distance from its start, in rows of the fit scale: it settles parameters that the data do not
# determine.
PRIOR_WEIGHT = 0.15
FIT_SCALE = 0.05
# Above this power the combined time is max() to within 2 %.
LARGEST_OVERLAP_POWER = 32.0
INTERVAL_EDGES_S = (5e-6, 2e-5, 1e-4, 1e-3)

# Formats to which activations are cast before the GEMM.
NARROW = ("fp8", "fp4")
# Granularity of the contraction loop. [element]
_K_STEP = 32
SPLITS = (1, 2, 3, 4, 6, 8, 16)

# Role of single GEMMs whose factor a role falls back to.
SINGLE_ROLES = dict(zip(ROLES, ROLES[:2] * 2, strict=True))
Entries = tuple[tuple[str, float, str], ...]  # name, start, "log" or "logit"


def alignment_entries(starts: tuple[float, ...], roles: Sequence[str] = ROLES[:2]) -> Entries:
    """Return the free alignment factors, from 2 to 64 bytes; 128 bytes is full speed by definition."""
    return tuple(
        (f"{role}:{width}", start, "logit")
        for role in roles
        for width, start in zip((2, 4, 8, 16, 32, 64), starts, strict=True)
    )


def transform(entries: Sequence[tuple[Hashable, float, str]]) -> Float[np.ndarray, " parameters"]:
    """Return the starting values in the unbounded units of the fit."""
    return np.array([np.log(v / (1 - v)) if kind == "logit" else np.log(v) for _, v, kind in entries])


def untransform(x: Float[np.ndarray, " parameters"], entries: Sequence[tuple[Name, float, str]]) -> dict[Name, float]:
    """Return the values of a fitted vector by name."""
    pairs = zip(np.clip(x, -60, 60), entries, strict=True)
    return {name: float(1 / (1 + np.exp(-v)) if kind == "logit" else np.exp(v)) for v, (name, _, kind) in pairs}


def factor_table(values: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return alignment factors by role and bytes.

    One byte takes the factor of two; a width without a free factor has 1. Batched GEMMs without factors of their own
    take those of single GEMMs.
    """

    def factor(role: str, width: int) -> float:
        width = max(width, 2)
        return values.get(f"{role}:{width}", values.get(f"{SINGLE_ROLES[role]}:{width}", 1.0))

    return {role: {str(width): factor(role, width) for width in ALIGNMENT_CLASSES_BYTES} for role in ROLES}


def _area(named_tile: tuple[str, tuple[int, int]]) -> int:
    return named_tile[1][0] * named_tile[1][1]


class FitParameters:
    """The free parameters of one fit as a vector in transformed units, and the record section of such a vector."""

    SCALARS: Entries = (
        # name, start, transform
        ("start_s", 2.5e-6, "log"),
        ("split_start_s", 2e-6, "log"),
        ("bandwidth_fraction", 0.8, "logit"),
        ("feed_ratio", 3.0, "log"),
        ("overlap_power", 4.0, "log"),
        ("wave_give_back", 0.3, "logit"),
        ("power_drop_fraction", 0.12, "logit"),
        ("power_half_flops", 4e11, "log"),
        ("fill_k", 180.0, "log"),
        ("write_ratio", 1.0, "log"),
    )
    HOT = (("hot_cache_speedup", 4.0, "log"), ("hot_cache_share", 0.3, "log"))
    # Libraries cast activations to 8 and 4 bits in a separate kernel: 16 bits are read once or twice, 8 or 4 written.
    CAST = (("cast_bytes_per_element", 4.0, "log"), ("cast_row_s", 1e-9, "log"))

    def __init__(
        self,
        tiles: Sequence[tuple[int, int]],
        *,
        hot: bool,
        alignment: Entries,
        cast: bool = False,
        splits: Sequence[int] = SPLITS,
        known: Mapping[str, float] | None = None,
        slow_cases: Entries = (),
        rate_by_shape: bool = False,
    ) -> None:
        # Tiles of equal area share a rate unless each shape has its own.
        self.rate_names = [f"rate:{m}x{n}" if rate_by_shape else f"rate:{m * n}" for m, n in tiles]
        areas = {name: m * n for name, (m, n) in sorted(zip(self.rate_names, tiles, strict=True), key=_area)}
        largest = max(areas.values())
        # Larger tiles reuse operands more: the starting rates are linear in log area.
        rates = [(name, 0.85 - 0.09 * np.log2(largest / area), "logit") for name, area in areas.items()]
        self.tiles, self.splits, self.known = tiles, splits, dict(known or {})
        self.slow_cases = [name for name, _, _ in slow_cases]
        self.entries = [*rates, *(entry for entry in self.SCALARS if entry[0] not in self.known)]
        self.entries += self.HOT if hot else ()
        self.entries += self.CAST if cast else ()
        self.entries += alignment
        self.entries += slow_cases

    def start(self) -> Float[np.ndarray, " parameters"]:
        """Return the starting point, which is also the prior."""
        return transform(self.entries)

    def values(self, x: Float[np.ndarray, " parameters"]) -> dict[str, float]:
        """Return the values of a vector by name, fixed ones included."""
        return untransform(x, self.entries) | self.known

    def section(
        self, x: Float[np.ndarray, " parameters"], factors: dict[str, dict[str, float]] | None
    ) -> dict[str, Any]:
        """Return the section of the record for one dtype; ``factors`` is the alignment table if it is not free."""
        v = self.values(x)
        return {
            "tiles": [
                {"m": m, "n": n, "rate": v[name], "fill_k": v["fill_k"]}
                for (m, n), name in zip(self.tiles, self.rate_names, strict=True)
            ],
            "splits": list(self.splits),
            **{name: v[name] for name, _, _ in self.SCALARS if name not in ("fill_k", "overlap_power")},
            "overlap_power": min(max(v["overlap_power"], 1.0), LARGEST_OVERLAP_POWER),
            "k_step": v.get("k_step", _K_STEP),
            "hot_cache_speedup": v.get("hot_cache_speedup", 1.0),
            "hot_cache_share": v.get("hot_cache_share", 0.0),
            "cast_bytes_per_element": v.get("cast_bytes_per_element", 0.0),
            "cast_row_s": v.get("cast_row_s", 0.0),
            "alignment_factor": factors or factor_table(v),
            **({"slow_cases": {name: v[name] for name in self.slow_cases}} if self.slow_cases else {}),
        }


class RowBlock(NamedTuple):
    """Measured rows that are priced in one call.

    Attributes:
        places: Their positions in the table. [rows]
        gemms: Their sizes and contiguous dimensions.
        is_cold: Their operands were not in the cache, whatever the rates allow.
        is_batch: They are batched GEMMs, which may have kernels of their own.
    """

    places: Int[np.ndarray, " rows"]
    gemms: Gemms
    is_cold: bool
    is_batch: bool


def blocks_of(rows: pd.DataFrame, layout: str) -> list[RowBlock]:
    """Split a table into blocks; a fit does this once and prices the blocks many times.

    Args:
        rows: Sizes in columns ``m``, ``n``, ``k`` and ``batch``; columns ``layout`` and ``is_cold`` if rows differ in
            them; ``run_flops`` if the clock follows the work of the run in which a row was timed.
        layout: Layout of all rows if there is no such column.
    """
    columns = [rows[c].to_numpy(float) for c in ("m", "n", "k", "batch")]
    layouts = rows.layout.to_numpy() if "layout" in rows else np.full(len(rows), layout)
    is_cold = rows.is_cold.to_numpy(bool) if "is_cold" in rows else np.zeros(len(rows), dtype=bool)
    run_flops = rows.run_flops.to_numpy(float) if "run_flops" in rows else None
    is_batch = columns[3] > 1.0
    blocks = []
    kinds = {(str(one), bool(two), bool(three)) for one, two, three in zip(layouts, is_cold, is_batch, strict=True)}
    for kind, cold, batch_too in sorted(kinds):
        places = np.flatnonzero((layouts == kind) & (is_cold == cold) & (is_batch == batch_too))
        for start in range(0, len(places), ROWS_PER_BLOCK):
            here = places[start : start + ROWS_PER_BLOCK]
            m, n, k, batch = (column[here] for column in columns)
            gemms = Gemms(m, n, k, batch, contiguous_letters(kind))
            if run_flops is not None:
                gemms = gemms._replace(run_flops=run_flops[here])
            blocks.append(RowBlock(here, gemms, cold, batch_too))
    return blocks


def price_blocks(blocks: Sequence[RowBlock], section: dict[str, Any], rates: DeviceRates) -> Float[np.ndarray, " rows"]:
    """Price all rows of a table with a section. [s], shape [rows]"""
    parameters = read_parameters(section)
    batched = read_batched_parameters(section) or parameters
    cold_rates = replace(rates, l2_bytes=0.0)
    out = np.empty(sum(len(block.places) for block in blocks))
    for block in blocks:
        known, own_rates = batched if block.is_batch else parameters, cold_rates if block.is_cold else rates
        out[block.places] = estimate_block_s(block.gemms, known, own_rates)
    return out


def predict_rows(
    rows: pd.DataFrame, section: dict[str, Any], rates: DeviceRates, layout: str
) -> Float[np.ndarray, " rows"]:
    """Price measured rows with a section. [s], shape [rows]; arguments as in ``blocks_of``."""
    return price_blocks(blocks_of(rows, layout), section, rates)


def fit(
    rows: pd.DataFrame,
    parameters: FitParameters,
    rates: DeviceRates,
    layout: str,
    factors: dict[str, dict[str, float]] | None,
    start: Float[np.ndarray, " parameters"] | None = None,
) -> Float[np.ndarray, " parameters"]:
    """Fit by least squares of log(predicted / measured), with damped outliers and a weak prior at the start.

    Args:
        rows: Measured rows; at most FIT_ROWS of them are used.
        factors: Alignment table if it is not free.
        start: Starting point instead of that of ``parameters``.
    """
    sample = rows.sample(min(len(rows), FIT_ROWS), random_state=0)
    blocks = blocks_of(sample, layout)
    return fit_vector(
        lambda x: price_blocks(blocks, parameters.section(x, factors), rates),
        sample.latency_s.to_numpy(),
        parameters.start() if start is None else start,
    )[0]


def fit_vector(
    predict: Callable[[Float[np.ndarray, " parameters"]], Float[np.ndarray, " rows"]],
    measured: Float[np.ndarray, " rows"],
    start: Float[np.ndarray, " parameters"],
    *,
    weight: float = PRIOR_WEIGHT,
    most_evaluations: int = 60,
) -> tuple[Float[np.ndarray, " parameters"], float]:
    """Fit a vector of parameters by least squares of log(predicted / measured), with damped outliers.

    Args:
        predict: Returns times from parameters. [s]
        measured: Measured times. [s]
        start: Starting point, which is also the prior.
        most_evaluations: Limit on evaluations, Jacobians not counted.

    Returns:
        The parameters and the cost.
    """
    from scipy.optimize import least_squares

    target = np.log(measured)

    def residuals(x: Float[np.ndarray, " parameters"]) -> Float[np.ndarray, " residuals"]:
        return np.concatenate([np.log(predict(x)) - target, weight * FIT_SCALE * (x - start)])

    found = least_squares(
        residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=most_evaluations, diff_step=1e-3
    )
    return found.x, float(found.cost)


def percentage_errors(predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]) -> dict[str, float]:
    """Return mean, median and p90 absolute percentage error and the bias of some rows."""
    ape = np.abs(predicted / measured - 1)
    return {
        "rows": len(measured),
        "mean_ape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "bias": round(float(np.mean(np.log(predicted / measured))), 4),
    }


def interval_per_regime(
    predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> dict[str, list[float]]:
    """Return 5 % and 95 % quantiles of measured / predicted by regime of predicted time."""
    ratio = measured / predicted
    regime = np.searchsorted(INTERVAL_EDGES_S, predicted)
    low, high = [], []
    for index in range(len(INTERVAL_EDGES_S) + 1):
        chosen = ratio[regime == index]
        chosen = chosen if len(chosen) >= 30 else ratio
        low.append(round(min(float(np.quantile(chosen, 0.05)), 1.0), 4))
        high.append(round(max(float(np.quantile(chosen, 0.95)), 1.0), 4))
    return {"edges_s": list(INTERVAL_EDGES_S), "low": low, "high": high}


def device_rates(device: Device, dtype: str, *, hot: bool) -> DeviceRates:
    """Return the data-sheet rates that a fit needs."""
    rates = rates_of(device, dtype)
    return replace(rates, l2_bytes=device.l2_bytes or 0.0) if hot else rates


def borrow_alignment(
    device: Device, section: Mapping[str, Any], donor: Device, donor_section: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the alignment table of a donor's section scaled to a device's SM, by their rates in 16 bits."""
    table: dict[str, dict[str, float]] = donor_section["alignment_factor"]
    largest = [max(float(tile["rate"]) for tile in one["tiles"]) for one in (section, donor_section)]
    ratio = tensor_rate_ratio(device, donor) * largest[0] / largest[1]
    carried = transfer_alignment_factors(np.array([list(factors.values()) for factors in table.values()]), ratio)
    return {
        role: dict(zip(table[role], factors, strict=True))
        for role, factors in zip(table, carried.tolist(), strict=True)
    }
