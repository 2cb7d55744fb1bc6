"""Fit the GEMM records of src/shapewright/perf/data/gemm from measured tables.

Usage: python scripts/calibrate_gemm.py --data DIR [--device a100-sxm-80gb]

DIR holds gemm.parquet and paper_gemm.csv (columns in docs/decisions/0003-gemm-calibration.md). A fifth of the whole
(n, k) shapes is never fitted: the errors and the interval of a record come from those alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shapewright.hardware import Device, load_device
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES
from shapewright.perf.gemm import ROWS_PER_BLOCK
from shapewright.perf.kernels import (
    ROLES,
    DeviceRates,
    GemmParameters,
    alignment_factor,
    estimate_kernels,
    rates_of,
    read_parameters,
)

Array = NDArray[np.float64]

RECORDS = Path(__file__).parent.parent / "src/shapewright/perf/data/gemm"
HELD_OUT_SHARE = 0.2
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


@dataclass(frozen=True)
class Source:
    """Where the rows of one record's section come from."""

    device: str
    dtype: str
    table: str
    rows: Callable[[Path], pd.DataFrame]
    layout: str
    hot_cache: bool = False


def library_rows(alias: str, dtype: str) -> Callable[[Path], pd.DataFrame]:
    """Rows of gemm.parquet of one device and dtype, all libraries."""

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_parquet(folder / "gemm.parquet", filters=[("device", "==", alias), ("dtype", "==", dtype)])
        return table.assign(batch=1)[["library", "batch", "m", "n", "k", "latency_s"]]

    return read


def paper_rows(gpu: str) -> Callable[[Path], pd.DataFrame]:
    """Rows of paper_gemm.csv of one GPU, as times."""

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_csv(folder / "paper_gemm.csv")
        table = table[table.gpu == gpu]
        seconds = 2.0 * table.batch * table.m * table.n * table.k / (table.tflops * 1e12)
        return table.assign(library="", latency_s=seconds)[["library", "batch", "m", "n", "k", "latency_s"]]

    return read


def layer_rows(gpu: str, products: Sequence[str], most: int | None = None) -> Callable[[Path], pd.DataFrame]:
    """Single and batched products of the paper's layers, as times; most logs hold the slowest iteration.

    Args:
        gpu: Name in the table.
        products: Columns to take.
        most: Rows to keep of each product, so that long logs do not outweigh the clean sweeps.
    """

    def read(folder: Path) -> pd.DataFrame:
        table = pd.read_csv(folder / "paper_layers.csv")
        table = table[table.gpu == gpu]
        h, t, s = table.hidden_size, table.tensor_parallel, table.seq_len
        tokens, batch, head_dim = (
            table.micro_batch_size * s,
            table.micro_batch_size * table.num_heads // t,
            h // table.num_heads,
        )
        one = batch * 0 + 1
        shapes = {
            "qkv": (one, tokens, 3 * h // t, h),
            "score": (batch, s, s, head_dim),
            "aov": (batch, s, head_dim, s),
            "proj": (one, tokens, h, h // t),
            "mlp_up": (one, tokens, 4 * h // t, h),
            "mlp_down": (one, tokens, h, 4 * h // t),
        }
        parts = [
            pd.DataFrame(dict(zip(("batch", "m", "n", "k"), shapes[name], strict=True))).assign(
                tflops=table[f"{name}_tflops"]
            )
            for name in products
        ]
        parts = [part.dropna() for part in parts]
        rows = pd.concat(part.sample(min(most or len(part), len(part)), random_state=0) for part in parts)
        seconds = 2.0 * rows.batch * rows.m * rows.n * rows.k / (rows.tflops * 1e12)
        kept = ["library", "slowest", "batch", "m", "n", "k", "latency_s"]
        return rows.assign(library="", slowest=True, latency_s=seconds)[kept]

    return read


def joined(*readers: Callable[[Path], pd.DataFrame]) -> Callable[[Path], pd.DataFrame]:
    """Rows of several tables."""
    return lambda folder: pd.concat([read(folder) for read in readers], ignore_index=True).fillna({"slowest": False})


PAPER = "paper_gemm.csv, paper_layers.csv"
LAYER_ROWS = 60
PRODUCTS = ("qkv", "score", "aov", "proj", "mlp_up", "mlp_down")
SOURCES = (
    Source("a100-sxm-80gb", "bf16", "gemm.parquet", library_rows("a100_sxm", "bf16"), "NT"),
    Source("h100-sxm-80gb", "bf16", "gemm.parquet", library_rows("h100_sxm", "bf16"), "NT"),
    Source("h100-sxm-80gb", "fp8", "gemm.parquet", library_rows("h100_sxm", "fp8"), "NT"),
    Source("h200-sxm-141gb", "bf16", "gemm.parquet", library_rows("h200_sxm", "bf16"), "NT"),
    Source("h200-sxm-141gb", "fp8", "gemm.parquet", library_rows("h200_sxm", "fp8"), "NT"),
    Source("b200-sxm-180gb", "bf16", "gemm.parquet", library_rows("b200_sxm", "bf16"), "NT"),
    Source("b200-sxm-180gb", "fp8", "gemm.parquet", library_rows("b200_sxm", "fp8"), "NT"),
    Source("b200-sxm-180gb", "fp4", "gemm.parquet", library_rows("b200_sxm", "nvfp4"), "NT"),
    Source("l40s", "bf16", "gemm.parquet", library_rows("l40s", "bf16"), "NT", hot_cache=True),
    Source("l40s", "fp8", "gemm.parquet", library_rows("l40s", "fp8"), "NT", hot_cache=True),
    Source("v100-sxm2-16gb", "fp16", PAPER, joined(paper_rows("v100"), layer_rows("v100", PRODUCTS, LAYER_ROWS)), "NN"),
    Source("mi250x-gcd", "fp16", PAPER, joined(paper_rows("mi250x"), layer_rows("mi250x", PRODUCTS, LAYER_ROWS)), "NN"),
)
# Devices that share the measured chip and its clocks, and differ in memory alone.
SHARED_CHIPS = {
    "a100-sxm-80gb": ("a100-sxm-40gb",),
    "v100-sxm2-16gb": ("v100-sxm2-32gb",),
}
# Sweeps with odd n and k exist for these alone; the rest of a vendor's chips borrow the nearest table.
ALIGNMENT_SOURCES = {"a100-sxm-80gb": "a100"}
ALIGNMENT_FROM = {"hopper": "a100-sxm-80gb", "blackwell": "a100-sxm-80gb", "ada": "a100-sxm-80gb"}
# The one published pair of Hopper: SwiGLU widths 10922 (4 bytes) and 10944 at h = 4096, 273 and 398 TFLOP/s
# (stas00/ml-engineering, training/performance). 398 is half of what this chip reaches in its SXM form, so that the pair
# may be that of a card short of power, which hides part of the loss: it is averaged with the borrowed factor.
HOPPER_PAIR = 273.0 / 398.0


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


class Form:
    """The free parameters of one fit: a flat vector in transformed units, and back."""

    SCALARS = (
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
        self, tiles: Sequence[tuple[int, int]], *, hot: bool, alignment: Entries, overhead: bool, cast: bool = False
    ) -> None:
        areas = sorted({m * n for m, n in tiles})
        largest = areas[-1]
        # Larger tiles reuse operands more; the start is a line in log area, the data bend it.
        rates = [(f"rate:{area}", 0.85 - 0.09 * np.log2(largest / area), "logit") for area in areas]
        self.tiles = tiles
        self.entries = [*rates, *self.SCALARS]
        self.entries += self.HOT if hot else ()
        self.entries += self.CAST if cast else ()
        self.entries += alignment
        self.entries += (("overhead_s", 1e-5, "log"),) if overhead else ()

    def start(self) -> Array:
        """Starting point, which is also the prior."""
        return transform(self.entries)

    def values(self, x: Array) -> dict[str, float]:
        """Named values of a vector."""
        return untransform(x, self.entries)

    def section(self, x: Array, factors: dict[str, dict[str, float]] | None) -> dict[str, Any]:
        """The record's section for one dtype; factors is the table when it is not free."""
        v = self.values(x)
        return {
            "tiles": [{"m": m, "n": n, "rate": v[f"rate:{m * n}"], "fill_k": v["fill_k"]} for m, n in self.tiles],
            "splits": list(SPLITS),
            **{name: v[name] for name, _, _ in self.SCALARS if name not in ("fill_k", "overlap_power")},
            "overlap_power": min(v["overlap_power"], LARGEST_OVERLAP_POWER),
            "k_step": 32,
            "hot_cache_speedup": v.get("hot_cache_speedup", 1.0),
            "hot_cache_share": v.get("hot_cache_share", 0.0),
            "cast_bytes_per_element": v.get("cast_bytes_per_element", 0.0),
            "cast_row_s": v.get("cast_row_s", 0.0),
            "alignment_factor": factors or factor_table(v),
        }


def predict_rows(rows: pd.DataFrame, section: dict[str, Any], rates: DeviceRates, layout: str) -> Array:
    """Price measured rows with a section. [s]"""
    parameters: GemmParameters = read_parameters(section)
    out = []
    columns = [rows[c].to_numpy(float)[:, None] for c in ("m", "n", "k", "batch")]
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        m, n, k, batch = (column[start : start + ROWS_PER_BLOCK] for column in columns)
        factor, _ = alignment_factor(m, n, k, layout, int(rates.element_bytes * 8), parameters, batch > 1)
        out.append(estimate_kernels(m, n, k, batch, factor, parameters, rates).total_s.min(axis=1))
    return np.concatenate(out)


def predict_collected(
    rows: pd.DataFrame,
    form: Form,
    x: Array,
    rates: DeviceRates,
    layout: str,
    factors: dict[str, dict[str, float]] | None,
) -> Array:
    """Price measured rows as their collector timed them. [s]"""
    return predict_rows(rows, form.section(x, factors), rates, layout) + form.values(x).get("overhead_s", 0.0)


def split_by_shape(rows: pd.DataFrame, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Hold out whole (n, k) shapes."""
    shapes = rows[["n", "k"]].drop_duplicates().reset_index(drop=True)
    shapes["held_out"] = np.random.default_rng(seed).random(len(shapes)) < HELD_OUT_SHARE
    marked = rows.merge(shapes, on=["n", "k"])
    return marked[~marked.held_out], marked[marked.held_out]


def fit(
    rows: pd.DataFrame,
    form: Form,
    rates: DeviceRates,
    layout: str,
    factors: dict[str, dict[str, float]] | None,
    start: Array | None = None,
) -> Array:
    """Least squares of log(predicted / measured), outliers damped, pulled weakly to the start."""
    sample = rows.sample(min(len(rows), FIT_ROWS), random_state=0)
    target, prior = np.log(sample.latency_s.to_numpy()), form.start() if start is None else start

    def residuals(x: Array) -> Array:
        predicted = predict_collected(sample, form, x, rates, layout, factors)
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


def fit_alignment_table(
    folder: Path, gpu: str, device: Device, section: dict[str, Any]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Alignment factors from the paper's odd sizes, the kernels of `section` held fixed.

    Single products come from paper_gemm.csv, batches from the attention products of paper_layers.csv. Free besides the
    factors: the collector's fixed cost per call, and a factor on all times of each table (an older library; the slowest
    iteration instead of the mean).
    """
    tables = {"scale": paper_rows(gpu)(folder), "scale_slowest": layer_rows(gpu, ("score", "aov"))(folder)}
    rows = pd.concat(table.assign(scale=name) for name, table in tables.items())
    train, held = split_by_shape(rows)
    layers = train[train.scale == "scale_slowest"]
    train = pd.concat([train[train.scale == "scale"], layers.sample(min(len(layers), FIT_ROWS // 4), random_state=0)])
    rates = device_rates(device, "fp16", hot=False)
    entries: Entries = (
        *alignment_entries(NVIDIA_ALIGNMENT_STARTS, ROLES),
        ("overhead_s", 1e-5, "log"),
        *((name, 1.0, "log") for name in tables),
    )
    start = transform(entries)

    def predicted(x: Array, chosen: pd.DataFrame) -> Array:
        v = untransform(x, entries)
        base = predict_rows(chosen, {**section, "alignment_factor": factor_table(v)}, rates, "NN")
        return base * chosen.scale.map(v).to_numpy() + v["overhead_s"]

    def residuals(x: Array) -> Array:
        return np.concatenate(
            [np.log(predicted(x, train) / train.latency_s.to_numpy()), PRIOR_WEIGHT * FIT_SCALE * (x - start)]
        )

    x = least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3).x
    v = untransform(x, entries)
    single, batches = held[held.scale == "scale"], held[held.scale == "scale_slowest"]
    report = {
        "source": "paper_gemm.csv, paper_layers.csv",
        "rows": len(train),
        "collector_overhead_s": v["overhead_s"],
        "collector_scale": v["scale"],
        "slowest_iteration_scale": v["scale_slowest"],
        "held_out": judge(predicted(x, single), single.latency_s.to_numpy()),
        "held_out_batches": judge(predicted(x, batches), batches.latency_s.to_numpy()),
    }
    # No single product with an odd free dimension was measured: what oddness costs a batch, it is taken to cost it.
    v["free:2"] = v["free:4"] * v["free_batched:2"] / v["free_batched:4"]
    return factor_table(v), report


def refit_alignment(folder: Path) -> None:
    """Fit the alignment tables again, kernels as they are, and hand them to the records that borrow them."""
    for name, gpu in ALIGNMENT_SOURCES.items():
        record = _read_record(name)
        section = record["parameters"]["dtypes"]["bf16"]
        table, report = fit_alignment_table(folder, gpu, load_device(name), section)
        record["provenance"]["sections"]["bf16"]["alignment"] = report
        print(name, json.dumps(report), flush=True)
        _write_record(name, _with_table(record, table))
    for path in sorted(RECORDS.glob("*.json")):
        record = _read_record(path.stem)
        lender = ALIGNMENT_FROM.get(record["architecture"])
        if lender:
            _write_record(path.stem, _with_table(record, borrowed_table(lender, record["architecture"])))


def borrowed_table(lender: str, architecture: str) -> dict[str, dict[str, float]]:
    """Another family's alignment table, with what little is known of the borrower."""
    table = _stored_table(lender)
    if architecture == "hopper":
        for width in ("4", "8"):
            table["free"][width] = float(np.sqrt(table["free"][width] * HOPPER_PAIR))
    return table


def _with_table(record: dict[str, Any], table: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Put one alignment table into every section of a record."""
    for sections in (record["parameters"]["dtypes"], *record["parameters"]["libraries"].values()):
        for section in sections.values():
            section["alignment_factor"] = table
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit every record, or those of one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gemm.parquet and paper_gemm.csv")
    parser.add_argument("--device", action="append", help="canonical name; may be given again; default: all")
    parser.add_argument("--alignment", action="store_true", help="fit the alignment tables alone again")
    given = parser.parse_args(arguments)
    if given.alignment:
        refit_alignment(given.data)
        return 0
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    chosen = given.device or list(dict.fromkeys(source.device for source in SOURCES))
    for name in chosen:
        device = load_device(name)
        sections: dict[str, Any] = {}
        libraries: dict[str, Any] = {}
        provenance: dict[str, Any] = {
            "command": "python scripts/calibrate_gemm.py --data DIR --device " + name,
            "date": today,
            "split": "a fifth of whole (n, k) shapes held out",
            "sections": {},
        }
        intervals: dict[str, Any] = {"dtypes": {}, "libraries": {}}
        borrowed = ALIGNMENT_FROM.get(device.architecture)
        for source in (s for s in SOURCES if s.device == name):
            own_table = source.table == PAPER
            factors = (
                None if own_table else (borrowed_table(borrowed, device.architecture) if borrowed else factor_table({}))
            )
            entries = (
                alignment_entries(ALIGNMENT_STARTS.get(device.architecture, NVIDIA_ALIGNMENT_STARTS), ROLES)
                if own_table
                else ()
            )
            form = Form(
                TILES[device.architecture],
                hot=source.hot_cache,
                alignment=entries,
                overhead=own_table,
                cast=source.dtype in NARROW,
            )
            rates = device_rates(device, source.dtype, hot=source.hot_cache)
            train, held = split_by_shape(source.rows(given.data))
            x = fit(train, form, rates, source.layout, factors)
            section, overhead = form.section(x, factors), form.values(x).get("overhead_s", 0.0)
            predicted = predict_collected(held, form, x, rates, source.layout, factors)
            report: dict[str, Any] = {
                "source": source.table,
                "rows_fitted": min(len(train), FIT_ROWS),
                "collector_overhead_s": overhead,
                "held_out": judge(predicted, held.latency_s.to_numpy()),
            }
            if own_table:
                for label, is_slowest in (("held_out_sweeps", False), ("held_out_layers", True)):
                    part = held.slowest.astype(bool).to_numpy() == is_slowest
                    report[label] = judge(predicted[part], held.latency_s.to_numpy()[part])
            if name in ALIGNMENT_SOURCES and source.dtype == "bf16":
                section["alignment_factor"], report["alignment"] = fit_alignment_table(
                    given.data, ALIGNMENT_SOURCES[name], device, section
                )
                factors = section["alignment_factor"]
            elif not own_table:
                report["alignment"] = {"borrowed_from": borrowed}
            for library in sorted(set(train.library) - {""}):
                seen, unseen = train[train.library == library], held[held.library == library]
                own = form.section(fit(seen, form, rates, source.layout, factors, start=x), factors)
                guess = predict_rows(unseen, own, rates, source.layout)
                libraries.setdefault(library, {})[source.dtype] = own
                intervals["libraries"].setdefault(library, {})[source.dtype] = interval(
                    guess, unseen.latency_s.to_numpy()
                )
                report.setdefault("libraries", {})[library] = judge(guess, unseen.latency_s.to_numpy())
            sections[source.dtype] = section
            intervals["dtypes"][source.dtype] = interval(predicted, held.latency_s.to_numpy())
            provenance["sections"][source.dtype] = report
            print(name, source.dtype, json.dumps(report), flush=True)
        record = {
            "id": f"gemm/{name}/{today}",
            "kind": "gemm",
            "devices": [name, *SHARED_CHIPS.get(name, ())],
            "architecture": device.architecture,
            "parameters": {"dtypes": sections, "libraries": libraries},
            "interval": intervals,
            "provenance": provenance,
        }
        _write_record(name, record)
    return 0


def _write_record(name: str, record: dict[str, Any]) -> None:
    """Write a record whole, so that an interrupted fit leaves the old one."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    draft = RECORDS / f".{name}.json.tmp"
    draft.write_text(json.dumps(round_section(record), indent=1) + "\n", encoding="utf-8")
    draft.replace(RECORDS / f"{name}.json")


def _read_record(name: str) -> dict[str, Any]:
    """A record that was fitted before."""
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _stored_table(name: str) -> dict[str, dict[str, float]]:
    """Alignment factors of a record that was fitted before."""
    table: dict[str, dict[str, float]] = _read_record(name)["parameters"]["dtypes"]["bf16"]["alignment_factor"]
    return table


if __name__ == "__main__":
    sys.exit(main())
