"""Fit the collectives records from a measured NCCL table.

The data folder holds collectives.parquet. message_bytes there is the whole buffer, as Collective counts it: on 8 H100s
the largest all_reduce reaches a bus bandwidth of 445 of 450 GB/s and the largest all_gather 335, which only that
reading gives. The parameters are fitted to every (operation, group, size) cell, and errors are those of cells left out
in turn, a tenth at a time. A second set without a fifth of the cells prices these as new ones; intervals come from
cross-validation among the others. Half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    Array,
    coverage_of,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
    predict_in_turn,
    round_numbers,
)
from shapewright.measure.refit.record_files import DEVICES, SAME_CHIP, SOURCE, command, write_record
from shapewright.pricing.calibration.residual import LOG_STEP

if TYPE_CHECKING:
    from jaxtyping import Int

# Groups whose measurement depends on the machine more than on its links: L40S has no NVLink, and its 8-device rows fall
# to 1 GB/s (two sockets, no peer access). Devices that borrow the record do not use them.
ONE_MACHINE_GROUPS = {"l40s": ["8"]}
ROUNDS = {"all_reduce": 2.0}
NUM_PROTOCOLS = 3
# The correction is a Gaussian process over what the lines leave over: one part of all operations of a group, one of
# each operation and group, with these standard deviations of ln(time), and that of a measurement. Residuals beyond the
# largest count as that. Chosen by cells left out in turn (docs/decisions/0030).
CORRECTION_DOUBLINGS = 1.5
CORRECTION_SPREAD = 0.12
CELL_SCATTER = 0.1
LARGEST_RESIDUAL = 0.5
# Knots of the stored correction, per doubling of the message, and how far beyond the measured messages they reach.
KNOTS_PER_DOUBLING = 2
DOUBLINGS_BEYOND = 4
# Parts of the cells that are left out in turn.
NUM_TENTHS = 10

# Communication between nodes is unmeasured in these tables. The fraction is that of all_reduce over 4 nodes of 8 B200
# (stas00/ml-engineering network/README.md @744d01e: busbw 377.34 GB/s at 4 GiB is 36.5 GB/s on each 50 GB/s card).
NETWORK_FRACTION = 0.73
# Latency of one hop between nodes and of handing a message to the network: assumptions, on the order of RDMA round
# trips of some microseconds through NCCL's proxy thread.
NETWORK_HOP_S = 5e-6
NETWORK_START_S = 5e-6


def link_of(device: Device) -> float:
    """Return the bandwidth that fractions refer to. [byte/s]"""
    bandwidth = device.intra_node_bandwidth_bytes_per_s or device.pcie_bandwidth_bytes_per_s
    assert bandwidth
    return bandwidth


def sent_bytes(rows: pd.DataFrame) -> Array:
    """Return the ring volume of each row. [byte]"""
    rounds = rows.op_name.map(lambda name: ROUNDS.get(name, 1.0)).to_numpy(float)
    volume: Array = rounds * rows.message_bytes.to_numpy(float) * (1.0 - 1.0 / rows.num_gpus.to_numpy(float))
    return volume


def predict(protocols: list[dict[str, float]], volume: Array, link: float) -> Array:
    """Predict the time of the fastest protocol. [s]"""
    times_s: Array = np.min([p["start_s"] + volume / (p["bandwidth_fraction"] * link) for p in protocols], axis=0)
    return times_s


def fit_protocols(rows: pd.DataFrame, link: float) -> list[dict[str, float]]:
    """Fit up to NUM_PROTOCOLS lines from several starts, and drop those that are never the fastest."""
    volume, measured = sent_bytes(rows), rows.latency_s.to_numpy()
    least, last = float(measured.min()), float((volume / measured).max() / link)

    def unfold(free: dict[str, float]) -> list[dict[str, float]]:
        return [
            {"start_s": free[f"start_{i}"], "bandwidth_fraction": free[f"fraction_{i}"]} for i in range(NUM_PROTOCOLS)
        ]

    bounds: dict[str, tuple[float, float]] = {}
    for i in range(NUM_PROTOCOLS):
        bounds[f"start_{i}"] = (0.7 * least, 200.0 * least)
        bounds[f"fraction_{i}"] = (last * 1e-4, min(1.0, last * 1.2))
    best: tuple[list[dict[str, float]], float] | None = None
    for middle_start, first_fraction in ((1.3, 0.03), (2.0, 0.1), (3.0, 0.2), (1.6, 0.01)):
        start = {"start_0": least, "fraction_0": last * first_fraction}
        start |= {"start_1": least * middle_start, "fraction_1": last * 0.4}
        start |= {"start_2": least * middle_start**2, "fraction_2": last}
        fitted, cost = fit_log_times(lambda free: predict(unfold(free), volume, link), measured, start, bounds)
        if best is None or cost < best[1]:
            best = unfold(fitted), cost
    assert best is not None
    times = np.array([p["start_s"] + volume / (p["bandwidth_fraction"] * link) for p in best[0]])
    winners = sorted({int(index) for index in np.argmin(times, axis=0)}, key=lambda index: best[0][index]["start_s"])
    return [best[0][index] for index in winners]


def fit_device(rows: pd.DataFrame, link: float) -> dict[str, Any]:
    """Return the protocols of every operation and group size, and the correction of what they leave over."""
    operations: dict[str, dict[str, Any]] = {}
    for (op_name, num_gpus), group in rows.groupby(["op_name", "num_gpus"]):
        operations.setdefault(str(op_name), {})[str(num_gpus)] = round_numbers(fit_protocols(group, link))
    return {"operations": operations, "corrections": learn_corrections(rows, operations, link)}


def price_by_lines(operations: dict[str, Any], rows: pd.DataFrame, link: float) -> Array:
    """Return the time of each row by its own protocols. [s]"""
    times = np.empty(len(rows))
    for (op_name, num_gpus), index in rows.groupby(["op_name", "num_gpus"]).indices.items():
        times[index] = predict(operations[op_name][str(num_gpus)], sent_bytes(rows.iloc[index]), link)
    return times


def learn_corrections(rows: pd.DataFrame, operations: dict[str, Any], link: float) -> dict[str, Any]:
    """Return the mean of a Gaussian process of ln(measured / lines) at knots of the message."""
    doublings = np.log2(rows.message_bytes.to_numpy(float))
    logs = np.log(rows.latency_s.to_numpy() / price_by_lines(operations, rows, link))
    ranks, names = rows.num_gpus.to_numpy(), rows.op_name.to_numpy()

    def covariance(at: Array, num_gpus: Any, op_name: Any) -> Array:
        near = np.exp(-0.5 * ((at[:, None] - doublings) / CORRECTION_DOUBLINGS) ** 2)
        common = (np.atleast_1d(num_gpus)[:, None] == ranks).astype(float)
        shared: Array = CORRECTION_SPREAD**2 * near * common * (1.0 + (np.atleast_1d(op_name)[:, None] == names))
        return shared

    scatter = CELL_SCATTER**2 * np.eye(len(rows))
    weights = np.linalg.solve(
        covariance(doublings, ranks, names) + scatter, np.clip(logs, -LARGEST_RESIDUAL, LARGEST_RESIDUAL)
    )
    first, last = np.floor(doublings.min()) - DOUBLINGS_BEYOND, np.ceil(doublings.max()) + DOUBLINGS_BEYOND
    knots = np.linspace(first, last, int(last - first) * KNOTS_PER_DOUBLING + 1)

    def steps(op_name: str, num_gpus: str) -> list[int]:
        found: list[int] = np.rint(covariance(knots, int(num_gpus), op_name) @ weights / LOG_STEP).astype(int).tolist()
        return found

    tables = {op_name: {each: steps(op_name, each) for each in groups} for op_name, groups in operations.items()}
    return {"log2_bytes": knots.tolist(), "log_step": LOG_STEP, "operations": tables}


def price_rows(fitted: dict[str, Any], rows: pd.DataFrame, link: float) -> Array:
    """Return the time of each row by its own protocols and their correction. [s]"""
    times, table = price_by_lines(fitted["operations"], rows, link), fitted["corrections"]
    doublings = np.log2(rows.message_bytes.to_numpy(float))
    for (op_name, num_gpus), index in rows.groupby(["op_name", "num_gpus"]).indices.items():
        logs = table["log_step"] * np.array(table["operations"][op_name][str(num_gpus)])
        times[index] *= np.exp(np.interp(doublings[index], table["log2_bytes"], logs))
    return times


def cell_tenths(rows: pd.DataFrame) -> Int[np.ndarray, " rows"]:
    """Return the tenth of each cell: sizes of an operation and group take turns, in an order with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(rows))
    turns = rows.iloc[order].groupby(["op_name", "num_gpus"]).cumcount()
    tenths: Int[np.ndarray, " rows"] = turns.sort_index().to_numpy() % NUM_TENTHS
    return tenths


def calibrate(name: str, table: pd.DataFrame) -> None:
    """Fit one device and write its record."""
    device = load_device(name)
    link = link_of(device)
    rows = table[table.device == DEVICES[name]].reset_index(drop=True)
    folds = fold_of_rows(rows.op_name, rows.num_gpus, rows.message_bytes)
    seen, held = rows[folds != HELD_OUT_FOLD], rows[folds == HELD_OUT_FOLD]
    fitted, fitted_to_seen = (fit_device(part, link) for part in (rows, seen))
    held_out = predict_in_turn(
        folds[folds != HELD_OUT_FOLD],
        lambda others, left: price_rows(fit_device(seen[others], link), seen[left], link),
    )
    interval = interval_of(held_out, seen.latency_s.to_numpy())

    in_turn, lines_in_turn, tenths = np.empty(len(rows)), np.empty(len(rows)), cell_tenths(rows)
    for tenth in range(NUM_TENTHS):
        inside = tenths == tenth
        others = fit_device(rows[~inside], link)
        in_turn[inside] = price_rows(others, rows[inside], link)
        lines_in_turn[inside] = price_by_lines(others["operations"], rows[inside], link)

    def judge(predicted: Array, part: pd.DataFrame) -> dict[str, float]:
        measured = part.latency_s.to_numpy()
        return error_summary(predicted, measured) | {"interval_coverage": coverage_of(interval, predicted, measured)}

    report = {
        "fit": judge(price_rows(fitted, rows, link), rows),
        "held_out": judge(in_turn, rows),
        "held_out_lines": judge(lines_in_turn, rows),
        "held_out_fifth": judge(price_rows(fitted_to_seen, held, link), held),
    }
    print(name, report)
    common = {
        "groups_of_this_machine_only": ONE_MACHINE_GROUPS.get(name, []),
        "between_nodes": {
            "bandwidth_fraction": NETWORK_FRACTION,
            "hop_s": NETWORK_HOP_S,
            "start_s": NETWORK_START_S,
        },
    }
    record = {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": {**fitted, **common},
        "parameters_without_own_shapes": {**fitted_to_seen, **common},
        "interval": interval,
        "provenance": {
            "source": SOURCE,
            "files": ["collectives.parquet"],
            "library": sorted(rows.library.unique()),
            "link": device.intra_node_link or "PCIe",
            "split": "held_out: tenths of the (operation, group, message) cells left out in turn; held_out_fifth: one "
            "fifth, by crc32, priced by the parameters without it",
            "command": command("collectives"),
            "assumptions": {
                "between_nodes.bandwidth_fraction": "stas00/ml-engineering @744d01e, 4 nodes of 8 B200, 4 GiB",
                "between_nodes.hop_s, start_s": "not measured",
                "send_recv": "not measured; priced as all_gather of two ranks",
            },
            "reports": report,
        },
    }
    print(write_record("collectives", name, record))


def refit(data: Path) -> None:
    """Fit and write every collectives record."""
    table = pd.read_parquet(data / "collectives.parquet")
    for name in DEVICES:
        calibrate(name, table)
