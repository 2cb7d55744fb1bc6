"""Fit a device that only the paper measured: single GEMMs, batched GEMMs and slow cases.

Where slow cases begin and end was read off the measured sweeps over all sizes, fitted and held-out ones; their losses
are fitted to the fitted (n, k) only.

MI250X runs the two GEMMs of an MLP inside a layer as fast as alone up to h = 11,500. Alone they then lose a fifth of
their rate, the upper one from 11,904 on, which a layer loses at 14,000. Models run layers, so the section that prices
them has the losses of large B and long contractions of whole blocks, and GEMMs timed alone have a section of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.paper_layers import (
    FORMAT,
    PaperLayer,
    find_floors,
    find_misfits,
    find_repeats,
    price_block,
)
from shapewright.measure.fit.gemm_section import (
    SINGLE_ROLES,
    Array,
    Entries,
    FitParameters,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
    fit_vector,
    percentage_errors,
    predict_rows,
    transform,
    untransform,
)
from shapewright.measure.refit.gemm.batch_kernels import LEAST_WAVES, PLANS, Plan, fit_batch_kernels
from shapewright.measure.refit.gemm.rows import LAYER_ROWS, Source
from shapewright.pricing.gemm.alignment import ROLES, alignment_bytes
from shapewright.pricing.gemm.kernels import DeviceRates
from shapewright.pricing.gemm.slow_cases import NarrowCase, SlowCases, Span, is_idle_case

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation

# Every call of the paper's collector waits for the host, and nothing separates that wait from a kernel's start: both
# are set. A kernel starts as on A100; the wait is this share of the shortest call, which moves a few kilobytes.
START_S, OVERHEAD_SHARE = 3.3e-6, 0.6
# Limits of the kernels for narrow head widths, and the multiple that they pad to. V100: odd widths below a tile's 128
# (in one of two logs below 176). A100: odd contractions up to 143, those aligned to 4 and 8 bytes up to 72.
NARROW_CASES: dict[str, tuple[NarrowCase, ...]] = {
    "volta": tuple(
        NarrowCase(role=role, alignments_bytes=(2,), edge=128.0, step=1.0, fraction=1.0) for role in ROLES[:2]
    ),
    "ampere": (
        NarrowCase(role="contracted", alignments_bytes=(2,), edge=144.0, step=32.0, fraction=1.0),
        NarrowCase(role="contracted", alignments_bytes=(4, 8), edge=73.0, step=32.0, fraction=1.0),
    ),
}
# Logs in which a kernel for narrow sizes ends elsewhere: the usual limit and that of the log. The two logs of V100
# agree otherwise to 1 %, slow sizes included, for no recorded reason; each is priced separately. [element]
OTHER_ENDS = {"volta": {"V100_h_sweep": (124.0, 174.0)}}
# MI250X: up to 256 x 256, and up to 2^20 outputs of a batch, run at 3.6 TFLOP/s whatever k.
SMALL_EDGES = {"cdna2": {"small_edge": 256.0, "small_outputs": 2.0**20}}
# V100 runs GEMMs with gigabytes of B at 30 TFLOP/s if the last wave is less than half full. `below` is a share of the
# peak between the kernel without tensor cores (a quarter of the peak) and those with. Down projections, 25,856 columns
# at most, are not affected; 2^16, the limit of a launch axis, lies in between.
IDLE_EDGES = {"volta": {"below": 0.30, "idle_tile_m": 256.0, "idle_tile_n": 128.0, "idle_columns": 2.0**16}}
# Sizes that a library runs with a slower kernel. MI250X's down projections drop from 102 to 68 TFLOP/s between k =
# 19,968 and 20,992 and rise from 54 to 81 after 32,768; output projections of such k do not. Alone, but not in blocks,
# they drop again to 50 from 47,104 to 52,736, and qkv and up projections fall from 102 to 85 from n = 19,456 to 26,880.
# V100's down projections drop from 84 to 65 between k = 41,472 and 41,984, rise from 59 to 76 between 59,904 and
# 60,416, and drop to 60 after 80,384.
SPANS: dict[str, tuple[dict[str, float], ...]] = {
    "cdna2": (
        {"first_k": 20992.0, "last_k": 32768.0, "last_n": 16384.0},
        {"first_k": 47104.0, "last_k": 52736.0, "last_n": 16384.0},
        {"first_n": 19200.0, "last_n": 26624.0, "last_k": 16384.0},
    ),
    "volta": ({"first_k": 41984.0, "last_k": 59904.0}, {"first_k": 80640.0}),
}
# Number of spans, from the first on, that blocks of a layer have too.
SPANS_OF_BLOCKS = {"cdna2": 1}
# Candidate losses. [fraction]
SPAN_LOSSES = np.arange(0.0, 0.7, 0.01)
# Free parameters of slow cases, by architecture: name, start and transform.
SLOW_ENTRIES: dict[str, Entries] = {
    "volta": (("long_k", 1e5, "log"),),
    # A thousand pages of 1 MB. MI250X loses a third of its rate beyond, whichever dimension makes B that large.
    "cdna2": (
        ("long_k", 1e5, "log"),
        ("reach_bytes", 1e9, "log"),
        ("reach_loss", 0.2, "logit"),
        ("reach_steepness", 8.0, "log"),
    ),
}


class PaperDeviceFit(NamedTuple):
    """Result of the paper's tables for a device that nothing else measured.

    Attributes:
        section: Section with its batched GEMMs and slow cases.
        logs: Sections by log, of logs in which the library chose other kernels.
        overhead_s: The collector's cost per call. [s]
        num_fitted: Number of fitted rows.
    """

    section: dict[str, Any]
    logs: dict[str, dict[str, Any]]
    overhead_s: float
    num_fitted: int


def fit_paper_device(train: pd.DataFrame, source: Source, device: Device) -> PaperDeviceFit:
    """Fit single GEMMs, batched GEMMs and slow cases of a device."""
    rates = device_rates(device, source.dtype, hot=False)
    narrow, small = NARROW_CASES.get(device.architecture, ()), SMALL_EDGES.get(device.architecture, {})
    is_small, is_narrow = small_rows(train, small), narrow_rows(train, narrow)
    idle = idle_cases(train[~is_small & ~is_narrow], IDLE_EDGES.get(device.architecture, {}), rates)
    is_idle = idle_rows(train, idle, rates)
    is_span = span_rows(train, SPANS.get(device.architecture, ()))
    usual = thin_layers(train[~is_small & ~is_narrow & ~is_idle & ~is_span], LAYER_ROWS[device.architecture])
    starts = device.architecture_facts.alignment_factors_guess
    tiles = device.architecture_facts.gemm_tiles

    parameters = FitParameters(
        tiles,
        hot=False,
        alignment=alignment_entries(starts, ROLES[:2]),
        known={"start_s": START_S},
        slow_cases=SLOW_ENTRIES[device.architecture],
    )
    overhead_s = OVERHEAD_SHARE * float(usual.latency_s.min())
    usual, train = (rows.assign(latency_s=np.maximum(rows.latency_s - overhead_s, 1e-6)) for rows in (usual, train))
    section = parameters.section(fit(usual[usual.batch == 1], parameters, rates, source.layout, None), None)
    section["slow_cases"]["spans"] = fit_spans(
        train[is_span & ~is_idle], SPANS.get(device.architecture, ()), section, rates, source.layout
    )

    parameters = FitParameters(
        tiles,
        hot=False,
        alignment=alignment_entries(starts, ROLES[2:]),
        known={name: section[name] for name in ("start_s", "split_start_s")},
        splits=(1,),
    )
    x = fit(usual[usual.batch > 1], parameters, rates, source.layout, None)
    batched, table = parameters.section(x, None), factor_table(parameters.values(x))
    del batched["alignment_factor"]

    factors = section["alignment_factor"]
    for role in ROLES[2:]:
        factors[role] = table[role]
        # Single GEMMs with odd n or k were not measured: they take the factors of batched ones.
        for width in ("1", "2"):
            factors[SINGLE_ROLES[role]][width] = table[role][width]
    section["slow_cases"] |= small_cases(train[is_small], small, rates) | idle
    cases = {name: value for name, value in section["slow_cases"].items() if name in small or name == "small_fraction"}
    cases |= narrow_cases(train[is_narrow], narrow, {**section, **batched}, rates)
    section["batched"] = {name: value for name, value in batched.items() if value != section[name]}
    section["batched"]["slow_cases"] = cases
    layers = train[(train.batch > 1) & train.slowest.astype(bool)]
    sections = {
        log: _with_kernels(section, rows, plans, source.layout, rates, LEAST_WAVES[device.architecture])
        for log, rows, plans in _logs_with_own_kernels(layers, device.architecture)
    }
    return PaperDeviceFit(sections.pop(""), sections, overhead_s, len(usual))


def _with_kernels(
    section: dict[str, Any], rows: pd.DataFrame, plans: Sequence[Plan], layout: str, rates: DeviceRates, waves: float
) -> dict[str, Any]:
    """Return a section with the fitted kernels of its batched GEMMs."""
    batched = section["batched"]
    fitted = fit_batch_kernels(rows, plans, {**section, **batched}, rates, layout, waves, extra_s=(0.0,))
    return {**section, "batched": {**batched, **fitted.content}}


def _logs_with_own_kernels(
    layers: pd.DataFrame, architecture: str
) -> Iterator[tuple[str, pd.DataFrame, Sequence[Plan]]]:
    """Yield the logs with kernels of their own, and none for all others: rows consistent with each, and its kernels."""
    ends, plans = OTHER_ENDS.get(architecture, {}), PLANS[architecture]
    width, in_log = layers[["n", "k"]].min(axis=1), layers.log.isin(ends)
    for log, (usual, own) in {"": (0.0, 0.0), **ends}.items():
        contradicts = (width % 2 == 1) & (in_log if not log else layers.log != log)
        disputed = pd.Series(data=False, index=layers.index)
        for first, last in ends.values():
            disputed |= (width > first) & (width <= last)
        yield log, layers[~(contradicts & disputed)], [_moved(plan, usual, own) for plan in plans] if log else plans


def _moved(plan: Plan, usual: float, own: float) -> Plan:
    """Return a plan with the limits of a log instead of the usual ones."""
    moved: dict[str, Any] = {f"last_{dim}": own for dim in "kn" if getattr(plan, f"last_{dim}") == usual}
    moved |= {f"first_{dim}": own + 1.0 for dim in "kn" if getattr(plan, f"first_{dim}") == usual + 1.0}
    return replace(plan, **moved)


def span_rows(rows: pd.DataFrame, spans: Sequence[dict[str, float]]) -> Any:
    """Return whether each row is a single GEMM inside a span. [rows]"""
    found = np.zeros(len(rows), dtype=bool)
    for span in spans:
        found |= Span(**span, loss=0.0).contains(rows.n.to_numpy(float), rows.k.to_numpy(float))
    return found & (rows.batch == 1).to_numpy()


def fit_spans(
    rows: pd.DataFrame, spans: Sequence[dict[str, float]], section: dict[str, Any], rates: DeviceRates, layout: str
) -> list[dict[str, float]]:
    """Return spans with the losses of least mean error on their rows, the section fixed."""
    found = []
    for span in spans:
        inside = rows[span_rows(rows, [span])]
        errors = []
        for loss in SPAN_LOSSES:
            cases = {**section["slow_cases"], "spans": [{**span, "loss": float(loss)}]}
            predicted = predict_rows(inside, {**section, "slow_cases": cases}, rates, layout)
            errors.append(float(np.abs(np.log(predicted / inside.latency_s)).mean()))
        found.append({**span, "loss": float(SPAN_LOSSES[int(np.argmin(errors))])})
    return found


def narrow_rows(rows: pd.DataFrame, cases: Sequence[NarrowCase]) -> Any:
    """Return whether each row is a batched GEMM that runs a kernel for narrow dimensions. [rows]"""
    found = np.zeros(len(rows), dtype=bool)
    for case in cases:
        found |= _is_case(rows, case)
    return found & (rows.batch.to_numpy() > 1)


def narrow_cases(
    rows: pd.DataFrame, cases: Sequence[NarrowCase], section: dict[str, Any], rates: DeviceRates
) -> dict[str, Any]:
    """Return the share of the peak of each kernel for narrow dimensions: the median of its rows."""
    m, n, k, batch, measured_s = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch", "latency_s"))
    num_bytes = batch * (m * k + k * n + section["write_ratio"] * m * n) * rates.element_bytes
    traffic_s = num_bytes / (section["bandwidth_fraction"] * rates.bandwidth_bytes_per_s)
    alone_s = np.maximum(measured_s - section["start_s"] - traffic_s, 1e-6)
    share = 2.0 * batch * m * n * k / (alone_s * rates.flops_per_s_per_sm * rates.num_sms)
    found = []
    for case in cases:
        chosen = _is_case(rows, case)
        dim = (k if case.role == "contracted" else n)[chosen]
        fraction = float(np.median(share[chosen] * np.ceil(dim / case.step) * case.step / dim))
        found.append({**asdict(case), "alignments_bytes": list(case.alignments_bytes), "fraction": fraction})
    return {"narrow": found} if found else {}


def _is_case(rows: pd.DataFrame, case: NarrowCase) -> Any:
    dim = rows["k" if case.role == "contracted" else "n"].to_numpy(float)
    return (dim < case.edge) & np.isin(alignment_bytes(dim, 16), case.alignments_bytes)


def small_rows(rows: pd.DataFrame, edges: dict[str, float]) -> Any:
    """Return whether each row is a small GEMM that a slow kernel runs. [rows]"""
    if not edges:
        return np.zeros(len(rows), dtype=bool)
    outputs = rows.batch * rows.m * rows.n
    return ((np.maximum(rows.m, rows.n) <= edges["small_edge"]) & (outputs <= edges["small_outputs"])).to_numpy()


def small_cases(rows: pd.DataFrame, edges: dict[str, float], rates: DeviceRates) -> dict[str, float]:
    """Return the share of the peak of small GEMMs: the median of those well above the launch time."""
    if not edges:
        return {}
    rows = rows[rows.latency_s > 10.0 * START_S]
    flops = 2.0 * rows.batch * rows.m * rows.n * rows.k
    share = flops / ((rows.latency_s - START_S) * rates.flops_per_s_per_sm * rates.num_sms)
    return {**edges, "small_fraction": float(share.median())}


def idle_cases(rows: pd.DataFrame, edges: dict[str, float], rates: DeviceRates) -> dict[str, float]:
    """Return the sizes of B from which a half-empty last wave, and later any wave, excludes the fast kernels.

    Each size separates slow GEMMs from the others with the fewest misclassified rows. The share of the peak of the slow
    ones is returned too.
    """
    if not edges:
        return {}
    tile: dict[str, Any] = {name: value for name, value in edges.items() if name != "below"}
    rows = rows[(rows.batch == 1) & (rows.n > edges["idle_columns"]) & (rows[["m", "k"]].min(axis=1) >= 1024)]
    share = 2.0 * rows.m * rows.n * rows.k / (rows.latency_s * rates.flops_per_s_per_sm * rates.num_sms)
    is_slow = (share < edges["below"]).to_numpy()
    m, n, k = (rows[name].to_numpy(float) for name in ("m", "n", "k"))
    is_half_empty = is_idle_case(m, n, k, rates.num_sms, SlowCases(**tile))
    elements = n * k
    return {
        **tile,
        "idle_elements": _separating_threshold(elements[is_half_empty], is_slow[is_half_empty]),
        "idle_always_elements": _separating_threshold(elements[~is_half_empty], is_slow[~is_half_empty]),
        "idle_fraction": float(share[is_slow].median()),
    }


def _separating_threshold(values: Any, is_above: Any) -> float:
    """Return the threshold, midway between neighbors, that misclassifies the fewest marked values."""
    order = np.argsort(values, kind="stable")
    values, marks = values[order], is_above[order].astype(float)
    mistakes = np.concatenate([[0.0], np.cumsum(marks)]) + np.concatenate([np.cumsum((1.0 - marks)[::-1])[::-1], [0.0]])
    mistakes[1:-1][values[1:] == values[:-1]] = np.inf
    edge = int(mistakes.argmin())
    return float(values[max(edge - 1, 0) : edge + 1].mean())


def idle_rows(rows: pd.DataFrame, idle: dict[str, Any], rates: DeviceRates) -> Any:
    """Return whether each row is a GEMM that the fast kernels do not run. [rows]"""
    if not idle:
        return np.zeros(len(rows), dtype=bool)
    m, n, k, batch = (rows[name].to_numpy(float) for name in ("m", "n", "k", "batch"))
    return is_idle_case(m, n, k, rates.num_sms, SlowCases(**idle)) & (batch == 1)


def thin_layers(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """Keep at most ``most`` rows of each GEMM of the layers, so that long logs do not outweigh the clean sweeps."""
    is_layer = rows.slowest.astype(bool)
    parts = [part.sample(min(most, len(part)), random_state=0) for _, part in rows[is_layer].groupby("gemm")]
    return pd.concat([rows[~is_layer], *parts])


# Parameters that blocks determine: name, start and transform. Mask and softmax of an attention block are a fused kernel
# elsewhere: their time here, the same for every hidden size, is fitted too and left to the pointwise refit.
ENTRIES: Entries = (
    ("long_k", 1e5, "log"),
    ("reach_bytes", 1.5e9, "log"),
    ("reach_loss", 0.3, "logit"),
    ("reach_steepness", 8.0, "log"),
)
MASK: Entries = (("mask_s", 0.05, "log"),)
# GEMMs of a block with weights, as (n / h, k / h).
MLP, ATTENTION = ((4.0, 1.0), (1.0, 4.0)), ((3.0, 1.0), (1.0, 1.0))
GEMMS_OF_BLOCK = {"mlp": MLP, "attention": ATTENTION, "layer": MLP + ATTENTION}
FREE_KINDS = ("mask", "softmax")


def read_blocks(folder: Path, device: Device, gpu: str) -> pd.DataFrame:
    """Read unfused blocks of the paper's layers: kind, tokens, hidden size, measured time, predicted rest."""
    columns, context, rows = read_columns(folder / "paper_layers.csv", FORMAT, Counter()), Context(), []
    is_chosen = (columns.labels["gpu"].values == gpu) & (columns.labels["flash_attention"].values == "0")
    is_chosen &= (columns.numbers["tensor_parallel"] == 1.0) & ~find_repeats(columns)
    for kind in GEMMS_OF_BLOCK:
        seconds = columns.numbers[f"{kind}_s"]
        is_used = is_chosen & (seconds > 0.0)
        if kind != "mlp":
            is_used &= ~find_floors(columns.labels["log"].codes, seconds)
        if kind == "attention":
            is_used &= ~find_misfits(columns)
        for row in np.flatnonzero(is_used).tolist():
            layer = PaperLayer.of(columns, row)
            priced = price_block(kind, layer, device, is_flash=False, context=context)
            other_s = sum(entry.total_time_s for entry in priced if not _is_fitted(entry.operation))
            tokens = layer.micro_batch_size * layer.seq_len
            rows.append((kind, tokens, layer.hidden_size, float(seconds[row]), other_s))
    return pd.DataFrame(rows, columns=["kind", "tokens", "hidden_size", "measured_s", "other_s"])


def _is_fitted(operation: Operation) -> bool:
    if isinstance(operation, Gemm):
        return operation.batch == 1
    return isinstance(operation, Pointwise) and operation.operation in FREE_KINDS


def fit_blocks(
    blocks: pd.DataFrame,
    is_held_out: NDArray[np.bool_],
    section: dict[str, Any],
    spans: list[dict[str, float]],
    rates: DeviceRates,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return slow cases of a section for layers, and their errors on MLP blocks of held-out hidden sizes.

    Args:
        is_held_out: Which of them are held out. [rows]
        section: The section fitted to single GEMMs.
        spans: Those of its spans that blocks have too.
    """
    entries = (*ENTRIES, *MASK)

    def predict(rows: pd.DataFrame, values: dict[str, float]) -> Array:
        own = {**section, "slow_cases": build(values)}
        total_s = rows.other_s + np.where(rows.kind == "mlp", 0.0, values["mask_s"])
        for kind, gemms in GEMMS_OF_BLOCK.items():
            here = rows[rows.kind == kind]
            for n, k in gemms:
                sizes = {"m": here.tokens, "n": n * here.hidden_size, "k": k * here.hidden_size}
                total_s[here.index] += predict_rows(pd.DataFrame(sizes).assign(batch=1), own, rates, "NT")
        predicted_s: Array = total_s.to_numpy()
        return predicted_s

    def build(values: dict[str, float]) -> dict[str, Any]:
        found = {name: values[name] for name, _, _ in ENTRIES}
        return {**section["slow_cases"], **found, "spans": spans}

    seen, held_out = blocks[~is_held_out], blocks[is_held_out & (blocks.kind == "mlp")]
    measured, start = seen.measured_s.to_numpy(), transform(entries)
    x, _ = fit_vector(lambda x: predict(seen, untransform(x, entries)), measured, start, most_evaluations=80)
    values = untransform(x, entries)
    return build(values), {
        **percentage_errors(predict(held_out, values), held_out.measured_s.to_numpy()),
        "mask_s": values["mask_s"],
    }
