"""The fit of one GEMM section: its free parameters, the least squares, and the judging of unseen rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES, contiguous_letters
from shapewright.perf.gemm import ROWS_PER_BLOCK
from shapewright.perf.gemm_block import estimate_block_s
from shapewright.perf.gemm_menu import ROLES, read_batched_parameters, read_parameters
from shapewright.perf.kernels import DeviceRates, rates_of
from shapewright.perf.products import Products

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.hardware import Device

Array = NDArray[np.float64]

FIT_ROWS = 4000
# Weight of a parameter's distance from its start, in rows of the fit scale: enough to settle what data leave open.
PRIOR_WEIGHT = 0.15
FIT_SCALE = 0.05
# Above this the joined time is max() to within 2 %.
LARGEST_OVERLAP_POWER = 32.0
INTERVAL_EDGES_S = (5e-6, 2e-5, 1e-4, 1e-3)

# Output tiles that vendors' libraries ship, both orientations. Source: kernel names in profiler traces of cuBLAS
# (ampere_..._128x256_..., nvjet_..._256x128), CUTLASS's profiler lists, rocBLAS's Tensile file names (MT128x128).
COMMON_TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
    (128, 32),
    (32, 128),
    (16, 64),
    (16, 128),
)
TILES = {
    "volta": COMMON_TILES,
    "ampere": COMMON_TILES,
    "ada": COMMON_TILES,
    "cdna2": COMMON_TILES,
    "hopper": ((192, 128), (128, 192), *COMMON_TILES),
    "blackwell": ((256, 256), (256, 192), (192, 128), (128, 192), *COMMON_TILES),
}
# Formats that activations are cast to on the way.
NARROW = ("fp8", "fp4")
SPLITS = (1, 2, 3, 4, 6, 8, 16)

Entries = tuple[tuple[str, float, str], ...]  # name, start, "log" or "logit"


def alignment_entries(starts: tuple[float, ...], roles: Sequence[str] = ROLES[:2]) -> Entries:
    """Free alignment factors, from 2 to 64 bytes; 128 bytes is full speed by definition."""
    return tuple(
        (f"{role}:{width}", start, "logit")
        for role in roles
        for width, start in zip((2, 4, 8, 16, 32, 64), starts, strict=True)
    )


# Starting points of the alignment factors: NVIDIA's narrow-load kernels lose a third to two thirds; the one AMD chip
# that was measured shows next to nothing at 4 bytes, and nothing is known of 2.
ALIGNMENT_STARTS = {
    # Volta's libraries leave the tensor cores for odd sizes: 4 TFLOP/s at head widths 65 to 127, 25 beyond.
    "volta": (0.4, 0.8, 0.8, 0.95, 0.95, 0.97),
    "cdna2": (0.8, 0.95, 0.95, 0.97, 0.98, 0.99),
}
NVIDIA_ALIGNMENT_STARTS = (0.3, 0.6, 0.6, 0.93, 0.95, 0.97)


def transform(entries: Sequence[tuple[str, float, str]]) -> Array:
    """Starting values in the units of the fit, where every real number is allowed."""
    return np.array([np.log(v / (1 - v)) if kind == "logit" else np.log(v) for _, v, kind in entries])


def untransform(x: Array, entries: Sequence[tuple[str, float, str]]) -> dict[str, float]:
    """Named values of a vector of the fit."""
    pairs = zip(np.clip(x, -60, 60), entries, strict=True)
    return {name: float(1 / (1 + np.exp(-v)) if kind == "logit" else np.exp(v)) for v, (name, _, kind) in pairs}


def factor_table(values: dict[str, float]) -> dict[str, dict[str, float]]:
    """Alignment factors by role and bytes; one byte is taken as two, a class that is not free is 1.

    Batches that were not fitted apart are taken as single products.
    """

    def factor(role: str, width: int) -> float:
        key = f"{role}:{max(width, 2)}"
        return values.get(key, values.get(key.replace("_batched", ""), 1.0))

    return {role: {str(width): factor(role, width) for width in ALIGNMENT_CLASSES_BYTES} for role in ROLES}


def _area(named_tile: tuple[str, tuple[int, int]]) -> int:
    return named_tile[1][0] * named_tile[1][1]


class Form:
    """The free parameters of one fit: a flat vector in transformed units, and back."""

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
    # Libraries cast activations to 8 and 4 bits in a kernel of its own: 16 bits read once or twice, 8 or 4 written.
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
        # Tiles of one area share a rate, unless each shape has its own.
        self.rate_names = [f"rate:{m}x{n}" if rate_by_shape else f"rate:{m * n}" for m, n in tiles]
        areas = {name: m * n for name, (m, n) in sorted(zip(self.rate_names, tiles, strict=True), key=_area)}
        largest = max(areas.values())
        # Larger tiles reuse operands more; the start is a line in log area, the data bend it.
        rates = [(name, 0.85 - 0.09 * np.log2(largest / area), "logit") for name, area in areas.items()]
        self.tiles, self.splits, self.known = tiles, splits, dict(known or {})
        self.slow_cases = [name for name, _, _ in slow_cases]
        self.entries = [*rates, *(entry for entry in self.SCALARS if entry[0] not in self.known)]
        self.entries += self.HOT if hot else ()
        self.entries += self.CAST if cast else ()
        self.entries += alignment
        self.entries += slow_cases

    def start(self) -> Array:
        """Starting point, which is also the prior."""
        return transform(self.entries)

    def values(self, x: Array) -> dict[str, float]:
        """Named values of a vector, and those that are no part of it."""
        return untransform(x, self.entries) | self.known

    def section(self, x: Array, factors: dict[str, dict[str, float]] | None) -> dict[str, Any]:
        """The record's section for one dtype; factors is the table when it is not free."""
        v = self.values(x)
        return {
            "tiles": [
                {"m": m, "n": n, "rate": v[name], "fill_k": v["fill_k"]}
                for (m, n), name in zip(self.tiles, self.rate_names, strict=True)
            ],
            "splits": list(self.splits),
            **{name: v[name] for name, _, _ in self.SCALARS if name not in ("fill_k", "overlap_power")},
            "overlap_power": min(max(v["overlap_power"], 1.0), LARGEST_OVERLAP_POWER),
            "k_step": 32,
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
        places: Where they stand in their table. [rows]
        products: Their sizes and contiguous dimensions.
        is_cold: They found no operand in the cache, whatever the rates say.
        is_batch: They are batches, which may have kernels of their own.
    """

    places: NDArray[np.intp]
    products: Products
    is_cold: bool
    is_batch: bool


def blocks_of(rows: pd.DataFrame, layout: str) -> list[RowBlock]:
    """Cut a table into blocks; a fit does so once, and prices them again and again.

    Args:
        rows: Sizes in columns ``m``, ``n``, ``k`` and ``batch``; columns ``layout`` and ``is_cold`` where rows differ;
            ``run_flops`` where a clock follows the work of the run that they were timed in.
        layout: Layout of all rows where there is no such column.
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
            products = Products(m, n, k, batch, contiguous_letters(kind))
            if run_flops is not None:
                products = products._replace(run_flops=run_flops[here])
            blocks.append(RowBlock(here, products, cold, batch_too))
    return blocks


def price_blocks(blocks: Sequence[RowBlock], section: dict[str, Any], rates: DeviceRates) -> Array:
    """Price all rows of a table with a section. [s], shape [rows]"""
    parameters = read_parameters(section)
    batched = read_batched_parameters(section) or parameters
    cold_rates = replace(rates, l2_bytes=0.0)
    out = np.empty(sum(len(block.places) for block in blocks))
    for block in blocks:
        known, own_rates = batched if block.is_batch else parameters, cold_rates if block.is_cold else rates
        out[block.places] = estimate_block_s(block.products, known, own_rates)
    return out


def predict_rows(rows: pd.DataFrame, section: dict[str, Any], rates: DeviceRates, layout: str) -> Array:
    """Price measured rows with a section. [s], shape [rows]; arguments as of ``blocks_of``."""
    return price_blocks(blocks_of(rows, layout), section, rates)


def fit(
    rows: pd.DataFrame,
    form: Form,
    rates: DeviceRates,
    layout: str,
    factors: dict[str, dict[str, float]] | None,
    start: Array | None = None,
) -> Array:
    """Least squares of log(predicted / measured), outliers damped, pulled weakly to the start."""
    from scipy.optimize import least_squares

    sample = rows.sample(min(len(rows), FIT_ROWS), random_state=0)
    target, prior = np.log(sample.latency_s.to_numpy()), form.start() if start is None else start
    blocks = blocks_of(sample, layout)

    def residuals(x: Array) -> Array:
        predicted = price_blocks(blocks, form.section(x, factors), rates)
        return np.concatenate([np.log(predicted) - target, PRIOR_WEIGHT * FIT_SCALE * (x - prior)])

    found: Array = least_squares(residuals, prior, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3).x
    return found


def judge(predicted: Array, measured: Array) -> dict[str, float]:
    """Errors of a set of rows."""
    ape = np.abs(predicted / measured - 1)
    return {
        "rows": len(measured),
        "mean_ape": round(float(ape.mean()), 4),
        "median_ape": round(float(np.median(ape)), 4),
        "p90_ape": round(float(np.quantile(ape, 0.9)), 4),
        "bias": round(float(np.mean(np.log(predicted / measured))), 4),
    }


def interval(predicted: Array, measured: Array) -> dict[str, list[float]]:
    """5 % and 95 % quantiles of measured / predicted by predicted time."""
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
    """The numbers of the sheet that a fit needs."""
    rates = rates_of(device, dtype)
    return replace(rates, l2_bytes=device.l2_bytes or 0.0) if hot else rates


def round_section(value: Any) -> Any:
    """Six significant digits everywhere: the fit knows no more, and diffs stay readable."""
    if isinstance(value, dict):
        return {key: round_section(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_section(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
