"""Fit the pointwise record of A100 from a measured table and published medians.

The data folder contains pointwise.parquet: norms, rotary positions, activations, residual additions and embeddings of
three models, measured by microsoft/vidur (2024 software); norms.csv; and paper_layers.csv. Kinds that the first lacks
come from the layer logs of arXiv 2401.14489 (eager PyTorch on A100 40 GB) or are assumptions, each with its source.
Held-out errors leave out one whole model; the record is fitted on all three. Mask and softmax on another vendor's chip
come from the unfused layers of paper_layers.csv on MI250X, norms on Hopper and Blackwell from norms.csv, as compiled
PyTorch runs them. Some seconds.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
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
from shapewright.measure.accuracy.tables.pointwise import SIZES, operation_of
from shapewright.measure.fit.pointwise_record import Constant, fit_pointwise, predict_pointwise
from shapewright.measure.fit.shared import HELD_OUT_FOLD, Array, coverage_of, error_summary, fold_of_rows, interval_of
from shapewright.measure.refit.record_files import command, write_record
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.transfer import fixed_cost_scale
from shapewright.pricing.operations import price_operations
from shapewright.pricing.pointwise import BACKWARD

SOURCE = "microsoft/vidur @7d47513, MIT"
ELEMENT_BYTES = 2.0

# Medians of one layer's operations, h = 3072, a = 24, b = 4, s = 2048, fp16, A100 40 GB (1.555 TB/s), forward.
# Source: layer logs of arXiv 2401.14489 (EleutherAI/cookbook @27dff48, jahatef/TransformerSizing).
PAPER_BANDWIDTH_BYTES_PER_S = 1.555e12
PAPER_SCORES = 4.0 * 24 * 2048 * 2048
PAPER_SOFTMAX_S = 2.651e-3
# One layer of the 22B model (h = 6144, a = 64, t = 8, b = 4, s = 2048, fp16, A100 80 GB): what selective recomputation
# adds to its backward pass is score, mask and softmax, dropout, and attention over value, once more.
# Source: arXiv 2205.05198, table 4: 13.2 ms with it, 11.9 ms without.
SELECTIVE_OVERHEAD_S = 13.2e-3 - 11.9e-3
SELECTIVE_HEADS, SELECTIVE_HEAD_DIM, SELECTIVE_SEQ_LEN = 4 * 64 // 8, 96, 2048
# Unfused attention on another vendor's chip: its name in the table, and the kinds in its blocks.
FOREIGN_GPU, FOREIGN_DEVICE, FOREIGN_KINDS = "mi250x", "mi250x-gcd", ("mask", "softmax")
# RMS norms of newer architectures: the devices measured, by their names in the table, and who runs their kernels.
NORM_DEVICES = {"h200_sxm": ("h200-sxm-141gb", ("hopper",)), "gb200": ("gb200", ("blackwell", "blackwell-ultra"))}
# Pass, kind, tensors that stream through it, and kernels.
NORM_KERNELS = (("forward", "norm", 2, 1), ("backward", f"norm{BACKWARD}", 3, 2))
NORM_BACKEND, NORM_SOURCE = "torch_compile", "NVIDIA/cudnn-frontend @3929da2, MIT: compiled PyTorch"
# fp16 in, fp16 out, one byte of mask.
DROPOUT_BYTES_PER_ELEMENT = 5.0


def with_work(rows: pd.DataFrame) -> pd.DataFrame:
    """Add the kind of each row in the record, the bytes that it moves [byte] and its kernels, as they are evaluated.

    Gated activations are a kind of their own.
    """
    parts = []
    for (name, model), part in rows.groupby(["operation", "model"]):
        sizes = {size: part[size].to_numpy(float) for size in SIZES}
        operation = operation_of(sizes, name, model, ELEMENT_BYTES)
        has_gate = name == "mlp_act" and part.gated.all()
        kind = f"gated_{operation.operation}" if has_gate else operation.operation
        parts.append(part.assign(kind=kind, num_bytes=operation.num_bytes, num_kernels=float(operation.num_kernels)))
    return pd.concat(parts).sort_index()


def work_of(rows: pd.DataFrame) -> tuple[Array, Array, Array]:
    """Return kind, bytes [byte] and kernels of each row."""
    return rows.kind.to_numpy(), rows.num_bytes.to_numpy(), rows.num_kernels.to_numpy()


def fit(rows: pd.DataFrame, device: Device) -> dict[Constant, float]:
    """Fit start and bandwidth fraction of every kind, and the cache."""
    sample = rows.sample(min(6000, len(rows)), random_state=1)
    return fit_pointwise(*work_of(sample), sample.latency_s.to_numpy(), device)


def predict(free: dict[Constant, float], rows: pd.DataFrame, device: Device) -> Array:
    """Predict the time of each row. [s]"""
    return predict_pointwise(free, *work_of(rows), device)


def dropout_fraction(softmax_fraction: float) -> float:
    """Return the bandwidth fraction of dropout of attention scores, from the cost of recomputing them."""
    device = load_device("a100-sxm-80gb")
    sizes: dict[str, Any] = {"m": SELECTIVE_SEQ_LEN, "batch": SELECTIVE_HEADS, "dtype": "fp16"}
    gemms = [
        Gemm(name="score", n=SELECTIVE_SEQ_LEN, k=SELECTIVE_HEAD_DIM, layout="NT", **sizes),
        Gemm(name="over_value", n=SELECTIVE_HEAD_DIM, k=SELECTIVE_SEQ_LEN, layout="NN", **sizes),
    ]
    gemms_s = sum(float(price.time_s) for price in price_operations(gemms, device))
    scores = 1.0 * SELECTIVE_HEADS * SELECTIVE_SEQ_LEN**2
    bandwidth = device.memory_bandwidth_bytes_per_s
    # Megatron-LM masks inside its softmax: one kernel that reads and writes every score.
    softmax_s = 2.0 * scores * ELEMENT_BYTES / (bandwidth * softmax_fraction)
    return scores * DROPOUT_BYTES_PER_ELEMENT / bandwidth / (SELECTIVE_OVERHEAD_S - gemms_s - softmax_s)


def other_kinds(fitted: dict[Constant, float]) -> dict[str, dict[str, Any]]:
    """Return the kinds that the table lacks, each with its source."""
    streaming, start_s = fitted["bandwidth_fraction", "residual"], fitted["start_s", "residual"]
    # Mask and softmax each read and write every score once.
    score_bytes = 2.0 * 2.0 * PAPER_SCORES * ELEMENT_BYTES
    softmax = score_bytes / PAPER_BANDWIDTH_BYTES_PER_S / PAPER_SOFTMAX_S
    paper = "arXiv 2401.14489 layer logs"
    assumed = "assumption: streams as a residual addition does"
    table = {
        "softmax": (softmax, f"{paper}: mask and softmax together, 2.651 ms at h=3072, a=24"),
        "mask": (softmax, f"{paper}: mask and softmax together, 2.651 ms at h=3072, a=24"),
        "dropout": (
            dropout_fraction(softmax),
            "arXiv 2205.05198, table 4: selective recomputation adds 1.3 ms to a layer, less GEMMs and softmax",
        ),
        "cross_entropy": (softmax, "assumption: passes of a softmax"),
        "permute": (0.55, "attention_prefill.parquet: the copy of keys and values into the cache, fitted there"),
        "bias": (streaming, assumed),
        "optimizer": (streaming, assumed),
        "router": (fitted["bandwidth_fraction", "norm"], "assumption: row-wise as a norm"),
        "other": (fitted["bandwidth_fraction", "norm"], "assumption: row-wise as a norm"),
    }
    return {
        kind: {"bandwidth_fraction": fraction, "start_s": start_s, "in_table": False, "source": source}
        for kind, (fraction, source) in table.items()
    }


def fit_foreign(data: Path) -> tuple[float, dict[str, Any]]:
    """Fit the bandwidth fraction of mask and softmax on FOREIGN_DEVICE, and return held-out errors too.

    Fitted to attention blocks and layers, minus the predicted other operations; a fifth of the hidden sizes is held
    out.
    """
    device, context = load_device(FOREIGN_DEVICE), Context()
    columns = read_columns(data / "paper_layers.csv", FORMAT, Counter())
    columns = columns.take(columns.labels["gpu"].values == FOREIGN_GPU)
    misfits, repeats, found = find_misfits(columns), find_repeats(columns), []
    for name in ("attention", "layer"):
        measured = columns.numbers[f"{name}_s"]
        wrong = find_floors(columns.labels["log"].codes, measured) | (misfits & (name == "attention")) | repeats
        for row in np.flatnonzero((measured > 0.0) & ~wrong).tolist():
            layer = PaperLayer.of(columns, row)
            block = price_block(name, layer, device, is_flash=False, context=context)
            kinds = [getattr(entry.operation, "operation", "") in FOREIGN_KINDS for entry in block]
            times = np.array([entry.total_time_s for entry in block])
            bound = sum(entry.price.roofline_s for entry, is_one in zip(block, kinds, strict=True) if is_one)
            found.append((layer.hidden_size, measured[row], times[~np.array(kinds)].sum(), bound))
    hidden_size, measured_s, other_s, bound_s = np.array(found, dtype=float).T
    is_held_out = fold_of_rows(hidden_size.tolist()) == HELD_OUT_FOLD
    shares = np.geomspace(0.05, 1.0, 400)
    ratios = np.log((other_s + bound_s / shares[:, None]) / measured_s)
    best = int(np.abs(ratios[:, ~is_held_out]).mean(axis=1).argmin())
    held_out_s = (other_s + bound_s / shares[best])[is_held_out]
    return float(shares[best]), error_summary(held_out_s, measured_s[is_held_out])


def fit_norms(data: Path, start_s: float) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Fit the bandwidth shares of RMS norms and their gradients on NORM_DEVICES, and return left-out errors too.

    Args:
        start_s: Start of one kernel on A100, which the devices' clocks scale. [s]
    """
    table = pd.read_csv(data / "norms.csv")
    table = table[(table.backend == NORM_BACKEND) & (table.operation == "rms_norm")]
    kinds: dict[str, dict[str, Any]] = {}
    reports: dict[str, Any] = {}
    for alias, (name, architectures) in NORM_DEVICES.items():
        device = load_device(name)
        kernel_s = start_s * fixed_cost_scale(device, load_record("pointwise", device))
        for pass_name, kind, passes, num_kernels in NORM_KERNELS:
            rows = table[(table.device == alias) & (table["pass"] == pass_name)]
            streamed_s = passes * rows["rows"] * rows["columns"] * ELEMENT_BYTES / device.memory_bandwidth_bytes_per_s
            streamed, measured = streamed_s.to_numpy(float), rows.latency_s.to_numpy(float)
            shares = streamed / np.maximum(measured - num_kernels * kernel_s, streamed)
            share = float(np.median(shares))
            left_out = [float(np.median(np.delete(shares, row))) for row in range(len(shares))]
            reports[f"left-out shapes {name} {kind}"] = error_summary(
                num_kernels * kernel_s + streamed / np.array(left_out), measured
            )
            entry: dict[str, Any] = {"bandwidth_fraction": share, "start_s": start_s, "in_table": True}
            entry |= {"device": name, "source": NORM_SOURCE}
            kinds |= {f"{architecture}_{kind}": entry for architecture in architectures}
    return kinds, reports


def refit(data: Path) -> None:
    """Fit and write the pointwise record of A100."""
    rows = with_work(pd.read_parquet(data / "pointwise.parquet").reset_index(drop=True))
    device = load_device("a100-sxm-80gb")
    measured = rows.latency_s.to_numpy()

    held_out = np.full(len(rows), np.nan)
    reports: dict[str, Any] = {}
    for model in sorted(rows.model.unique()):
        inside = (rows.model == model).to_numpy().copy()
        # A kind that only the held-out model has cannot be predicted.
        inside &= rows.kind.isin(rows.kind[~inside]).to_numpy()
        held_out[inside] = predict(fit(rows[~inside], device), rows[inside], device)
        reports[f"held out {model}"] = error_summary(held_out[inside], measured[inside])
    known = ~np.isnan(held_out)
    interval = interval_of(held_out[known], measured[known])
    fitted = fit(rows, device)
    predicted = predict(fitted, rows, device)
    for operation in sorted(rows.operation.unique()):
        here = (rows.operation == operation).to_numpy()
        reports[f"fit {operation}"] = error_summary(predicted[here], measured[here])
    reports["fit"] = error_summary(predicted, measured) | {
        "interval_coverage": coverage_of(interval, predicted, measured)
    }
    kinds = {
        kind: {
            "bandwidth_fraction": value,
            "start_s": fitted["start_s", kind],
            "in_table": True,
            "source": SOURCE,
        }
        for (name, kind), value in fitted.items()
        if name == "bandwidth_fraction"
    }
    share, reports[f"held out {FOREIGN_DEVICE}"] = fit_foreign(data)
    foreign = {
        "bandwidth_fraction": share,
        "start_s": fitted["start_s", "residual"],
        "in_table": False,
        "device": FOREIGN_DEVICE,
        "source": f"arXiv 2401.14489 layer logs of {FOREIGN_DEVICE}: blocks and layers less all else",
    }
    kinds |= {f"foreign_{kind}": foreign for kind in FOREIGN_KINDS}
    norms, norm_reports = fit_norms(data, fitted["start_s", "residual"])
    kinds |= norms
    reports |= norm_reports
    record = {
        "devices": ["a100-sxm-80gb", "a100-sxm-40gb"],
        "architecture": device.architecture,
        "parameters": {
            "kinds": kinds | other_kinds(fitted),
            "l2_reach_fraction": fitted["l2_reach_fraction", ""],
            "l2_speedup": fitted["l2_speedup", ""],
        },
        "interval": interval,
        "provenance": {
            "source": SOURCE,
            "files": ["pointwise.parquet", "paper_layers.csv", "norms.csv"],
            "rows": len(rows),
            "split": "each of the three models held out whole in turn; parameters fitted on all of them",
            "command": command("pointwise"),
            "reports": reports,
        },
    }
    for name, report in reports.items():
        print(name, report)
    print(write_record("pointwise", "a100-sxm", record))
