"""Fit the collectives records from a measured NCCL table.

The data folder holds collectives.parquet. message_bytes there is the whole buffer, as Collective counts it: on 8 H100s
the largest all_reduce reaches a bus bandwidth of 445 of 450 GB/s and the largest all_gather 335, which only that
reading gives. One fifth of the (operation, group, size) cells is held out. Intervals come from cross-validation among
the others. Some seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware import Device, load_device
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    NUM_FOLDS,
    Array,
    coverage_of,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
    round_numbers,
)
from shapewright.measure.refit.record_files import DEVICES, SAME_CHIP, SOURCE, command, write_record

# Groups whose measurement depends on the machine more than on its links: L40S has no NVLink, and its 8-device rows fall
# to 1 GB/s (two sockets, no peer access). Devices that borrow the record do not use them.
ONE_MACHINE_GROUPS = {"l40s": ["8"]}
ROUNDS = {"all_reduce": 2.0}
NUM_PROTOCOLS = 3

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


def fit_device(rows: pd.DataFrame, link: float) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return the protocols of every operation and group size."""
    operations: dict[str, dict[str, list[dict[str, float]]]] = {}
    for (op_name, num_gpus), group in rows.groupby(["op_name", "num_gpus"]):
        operations.setdefault(str(op_name), {})[str(num_gpus)] = fit_protocols(group, link)
    return operations


def price_rows(operations: dict[str, Any], rows: pd.DataFrame, link: float) -> Array:
    """Return the time of each row by its own protocols. [s]"""
    times = np.empty(len(rows))
    for (op_name, num_gpus), index in rows.groupby(["op_name", "num_gpus"]).indices.items():
        times[index] = predict(operations[op_name][str(num_gpus)], sent_bytes(rows.iloc[index]), link)
    return times


def calibrate(name: str, table: pd.DataFrame) -> None:
    """Fit one device and write its record."""
    device = load_device(name)
    link = link_of(device)
    rows = table[table.device == DEVICES[name]].reset_index(drop=True)
    folds = fold_of_rows(rows.op_name, rows.num_gpus, rows.message_bytes)
    seen, held = rows[folds != HELD_OUT_FOLD], rows[folds == HELD_OUT_FOLD]
    operations = round_numbers(fit_device(seen, link))
    seen_folds = folds[folds != HELD_OUT_FOLD]
    held_out = np.empty(len(seen))
    for fold in range(1, NUM_FOLDS):
        inside = seen_folds == fold
        held_out[inside] = price_rows(fit_device(seen[~inside], link), seen[inside], link)
    interval = interval_of(held_out, seen.latency_s.to_numpy())

    def judge(part: pd.DataFrame) -> dict[str, float]:
        predicted, measured = price_rows(operations, part, link), part.latency_s.to_numpy()
        return error_summary(predicted, measured) | {"interval_coverage": coverage_of(interval, predicted, measured)}

    report = {"fit": judge(seen), "held_out": judge(held)}
    print(f"{name:16s} {report['fit']} held out {report['held_out']}")
    record = {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": {
            "operations": operations,
            "groups_of_this_machine_only": ONE_MACHINE_GROUPS.get(name, []),
            "between_nodes": {
                "bandwidth_fraction": NETWORK_FRACTION,
                "hop_s": NETWORK_HOP_S,
                "start_s": NETWORK_START_S,
            },
        },
        "interval": interval,
        "provenance": {
            "source": SOURCE,
            "files": ["collectives.parquet"],
            "library": sorted(rows.library.unique()),
            "link": device.intra_node_link or "PCIe",
            "split": "one fifth of the (operation, group, message) cells held out, by crc32",
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
