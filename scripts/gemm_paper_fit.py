"""The fit of a device that the paper alone measured: single products, batches, slow cases. Not a script itself.

Single products and batches run through kernels of their own. Libraries do not split the contraction of a batch: on V100
two products of 64 x 64 x 4096 take 55 us together, one of them 10 us. So each has its own fit, and slow kernels, whose
rows neither sees, have their rate read off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from gemm_rows import LAYER_ROWS, Source

from shapewright.fit.gemm import (
    ALIGNMENT_STARTS,
    TILES,
    Array,
    Entries,
    Form,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
)
from shapewright.perf.alignment import contiguous_letters
from shapewright.perf.kernels import ROLES
from shapewright.perf.slow_cases import SlowCases, narrow_floor_s, small_floor_s

if TYPE_CHECKING:
    from shapewright.hardware import Device

# Every call of the paper's collector waits for the host. Nothing tells that wait from the start of a kernel: both are
# set. A kernel starts as on A100, and the wait is this share of the shortest call, which multiplies a few kilobytes.
START_S, OVERHEAD_SHARE = 3.3e-6, 0.6
# Where slow kernels begin. V100: odd head widths below a tile's 128 run at 4 TFLOP/s, from there on (from 176 on in one
# of two logs) at 25. MI250X: up to 256 x 256, and up to 2^20 outputs of a batch, at 3.6 TFLOP/s however long k is.
SLOW_EDGES: dict[str, dict[str, float]] = {
    "volta": {"narrow_edge": 128.0},
    "cdna2": {"small_edge": 256.0, "small_outputs": 2.0**20},
}
# Free numbers of slow cases, by architecture: name, start and transform.
SLOW_ENTRIES: dict[str, Entries] = {
    "volta": (("long_k", 1e5, "log"),),
    # A thousand pages of 1 MB. MI250X loses a third of its rate beyond, whichever dimension made B so large.
    "cdna2": (("long_k", 1e5, "log"), ("reach_bytes", 1e9, "log"), ("reach_loss", 0.2, "logit")),
}


def fit_paper_device(train: pd.DataFrame, source: Source, device: Device) -> tuple[dict[str, Any], float, int]:
    """A section with its batches and slow cases, the collector's cost per call [s], and the number of rows fitted."""
    rates = device_rates(device, source.dtype, hot=False)
    peak_flops_per_s = device.peak_flops_per_s(source.dtype)
    edges = SLOW_EDGES[device.architecture]
    slow = slow_rows(train, edges)
    usual = thin_layers(train[~slow])
    starts, tiles = ALIGNMENT_STARTS[device.architecture], TILES[device.architecture]

    form = Form(
        tiles,
        hot=False,
        alignment=alignment_entries(starts, ROLES[:2]),
        known={"start_s": START_S},
        slow_cases=SLOW_ENTRIES[device.architecture],
    )
    overhead_s = OVERHEAD_SHARE * float(usual.latency_s.min())
    usual = usual.assign(latency_s=np.maximum(usual.latency_s - overhead_s, 1e-6))
    section = form.section(fit(usual[usual.batch == 1], form, rates, source.layout, None), None)

    batches = usual[usual.batch > 1]
    form = Form(
        tiles,
        hot=False,
        alignment=alignment_entries(starts, ROLES[2:]),
        known={name: section[name] for name in ("start_s", "split_start_s")},
        splits=(1,),
    )
    x = fit(batches, form, rates, source.layout, None)
    batched, table = form.section(x, None), factor_table(form.values(x))

    cases = {**edges, **slow_fractions(train[slow], overhead_s, peak_flops_per_s, edges)}
    factors = section["alignment_factor"]
    for role in ROLES[2:]:
        factors[role] = table[role]
        # No single product with odd n or k was measured: what oddness costs a batch, it is taken to cost.
        for width in ("1", "2"):
            factors[role.removesuffix("_batched")][width] = table[role][width]
    section["slow_cases"] = {**section.get("slow_cases", {}), **cases}
    section["batched"] = {
        name: value for name, value in batched.items() if name != "alignment_factor" and value != section.get(name)
    } | {"slow_cases": cases}
    return section, overhead_s, len(usual)


def slow_rows(rows: pd.DataFrame, edges: dict[str, float]) -> Array:
    """Whether each row belongs to a slow kernel. [rows]"""
    m, n, k, batch = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch"))
    cases = SlowCases(**edges, **({"small_fraction": 1.0} if "small_edge" in edges else {}))
    letters = contiguous_letters("NN")
    found: Array = narrow_floor_s(m, n, k, batch, letters, 1.0, cases) + small_floor_s(m, n, k, batch, 1.0, cases) > 0
    return found


def slow_fractions(
    rows: pd.DataFrame, overhead_s: float, peak_flops_per_s: float, edges: dict[str, float]
) -> dict[str, float]:
    """Median share of the peak that rows of slow kernels reach, by case."""
    flops = 2.0 * rows.batch * rows.m * rows.n * rows.k
    share = flops / ((rows.latency_s - overhead_s).clip(lower=1e-6) * peak_flops_per_s)
    if "small_edge" in edges:
        # The smallest are their start alone.
        return {"small_fraction": float(share[rows.latency_s > 3.0 * overhead_s].median())}
    edge = edges["narrow_edge"]
    is_contracted = (rows.k % 2 == 1) & (rows.k < edge)
    return {
        "narrow_contracted_fraction": float(share[is_contracted].median()),
        "narrow_free_fraction": float(share[~is_contracted].median()),
    }


def thin_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep LAYER_ROWS of each product of the layers, so that long logs do not outweigh the clean sweeps."""
    is_layer = rows.slowest.astype(bool)
    parts = [part.sample(min(LAYER_ROWS, len(part)), random_state=0) for _, part in rows[is_layer].groupby("product")]
    return pd.concat([rows[~is_layer], *parts])
