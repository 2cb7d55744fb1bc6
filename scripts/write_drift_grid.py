"""Predict a wide grid, print how far it moved since the one that is checked in, and write it anew.

    python scripts/write_drift_grid.py [--check]

The grid is what users ask most: presets on devices in training, prefill and decode, training spread over devices,
GEMMs, fused attention and collectives by size, and the other kernels of models that have rare ones. It says nothing of
the truth, only whether and where a change moved predictions. With --check nothing is written, and the exit code is 1
where a part moved beyond the limits below: then look at it, and renew the file in the same commit if the move is meant.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from shapewright import __version__
from shapewright.core.errors import ShapewrightError
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import COLLECTIVE_OPS, Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.operation import Operation
from shapewright.prediction.build import build_scenario
from shapewright.pricing.operations import price_operations

PATH = Path(__file__).resolve().parent.parent / "tests" / "accuracy" / "drift_grid.json"

# Half of a part's cells may move by 1 %, a tenth by 5 %, any one by 15 %, before the file has to be renewed.
LIMITS = {"median": 0.01, "p90": 0.05, "largest": 0.15}
# Below this a cell counts as unmoved: numbers are kept with five digits.
UNMOVED = 1e-3

DEVICES = (
    "a100-sxm-80gb", "b200-sxm-180gb", "b300-sxm-288gb", "gb200", "h100-pcie-80gb", "h100-sxm-80gb", "h200-sxm-141gb",
    "l4", "l40s", "mi250x-gcd", "mi300x", "rtx-4090", "v100-sxm2-32gb",
)  # fmt: skip
PRESETS = (
    "bert-large", "bloom-7b1", "deepseek-v2-lite", "deepseek-v3", "flan-t5-xl", "gemma-2-9b", "gpt-oss-20b", "gpt2",
    "gpt3-13b", "gpt3-2.7b", "llama-2-7b", "llama-3-70b", "llama-3-8b", "llama-3.1-405b", "mixtral-8x7b", "phi-2",
    "pythia-1b", "pythia-410m", "qwen2.5-72b", "qwen3-30b-a3b", "starcoder2-3b",
)  # fmt: skip
STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "train": {"workload": {"micro_batch_size": 2, "seq_len": 2048}},
    "train, spread": {
        "workload": {"micro_batch_size": 1, "seq_len": 2048, "global_batch_size": 64},
        "layout": {"tensor_parallel": 4, "pipeline_parallel": 2, "data_parallel": 4, "zero_stage": 1},
    },
    "prefill": {"workload": {"phase": "prefill", "micro_batch_size": 1, "seq_len": 1024}},
    "decode": {"workload": {"phase": "decode", "micro_batch_size": 16, "context_len": 2047}},
}
# Latent and sparse attention, scans, short convolutions, experts, encoders, and what runs between GEMMs.
KERNEL_DEVICES = ("b200-sxm-180gb", "h100-sxm-80gb", "l40s", "mi300x")
KERNEL_MODELS: dict[str, dict[str, Any]] = {
    "bert-large": {}, "deepseek-v3": {}, "granite-4.0-h-small": {}, "kimi-linear-48b-a3b": {}, "lfm2-1.2b": {},
    "mamba-2.8b": {}, "qwen3-next-80b-a3b": {},
    "deepseek-v2-lite": {"index_num_heads": 64, "index_head_dim": 128, "index_topk": 512},
}  # fmt: skip
KERNEL_STEPS: tuple[dict[str, Any], ...] = (
    {"phase": "prefill", "seq_len": 512},
    {"phase": "decode", "micro_batch_size": 32, "context_len": 2047},
    {"phase": "train", "micro_batch_size": 4, "seq_len": 512},
)
_ROWS, _WIDTHS = (1, 16, 200, 2048, 16384), (1000, 4096, 11008, 32768)
_LENGTHS, _BATCHES = (1, 512, 2048, 8192), (1, 16)
_MESSAGES = tuple(4.0**power for power in range(6, 16))


def predict_grid(*parts: str) -> dict[str, list[float | None]]:
    """Seconds of every cell, by part and device, of the named parts or of all; None where there is no prediction."""
    grid: dict[str, list[float | None]] = {}
    for part in parts or PARTS:
        for name in KERNEL_DEVICES if part == "kernels" else DEVICES:
            if part in STEPS:
                cells = [_predict_step(preset, name, STEPS[part]) for preset in PRESETS]
            elif part == "kernels":
                cells = list(_predict_kernels(name))
            else:
                device = load_device(name)
                cells = [_price(operation, device) for operation in OPERATIONS[part](device)]
            grid[f"{part}/{name}"] = cells
    return grid


def _predict_step(preset: str, device: str, given: dict[str, Any]) -> float | None:
    try:
        return _short(build_scenario(preset, device, **given).predict().step_time_s)
    except ShapewrightError:
        return None


def _predict_kernels(device: str) -> Iterator[float | None]:
    for model, overrides in KERNEL_MODELS.items():
        for workload in KERNEL_STEPS:
            try:
                prediction = build_scenario(model, device, overrides=overrides, workload=workload).predict()
            except ShapewrightError:
                yield None
                continue
            for each in prediction.operations:
                if not isinstance(each.operation, Gemm):
                    yield _short(each.total_time_s)


def _price(operation: Operation, device: Device) -> float | None:
    try:
        (price,) = price_operations([operation], device)
    except ShapewrightError:
        return None
    return _short(float(price.time_s))


def _gemms(device: Device) -> Iterator[Gemm]:
    for dtype in ("fp16", "fp8"):
        if dtype in device.dense_flops_per_s:
            for m in _ROWS:
                for n in _WIDTHS:
                    for k in _WIDTHS:
                        yield Gemm(name="x", dtype=dtype, layout="NT", m=m, n=n, k=k)


def _attention(_: Device) -> Iterator[Attention]:
    for head_dim in (64, 128):
        for num_kv_heads in (4, 32):
            for batch_size in _BATCHES:
                for query_len in _LENGTHS:
                    yield Attention(
                        name="x",
                        dtype="bf16",
                        batch_size=batch_size,
                        query_len=query_len,
                        kv_len=max(query_len, 2048),
                        num_heads=32,
                        num_kv_heads=num_kv_heads,
                        head_dim=head_dim,
                        v_head_dim=head_dim,
                    )


def _collectives(device: Device) -> Iterator[Collective]:
    for op_name in COLLECTIVE_OPS:
        for num_ranks in (2, 8, 64):
            for message_bytes in _MESSAGES:
                yield Collective(
                    name="x",
                    op_name=op_name,
                    axis="data",
                    message_bytes=message_bytes,
                    num_ranks=num_ranks,
                    ranks_per_node=min(num_ranks, device.node_size),
                )


OPERATIONS: dict[str, Callable[[Device], Iterator[Operation]]] = {
    "products": _gemms,
    "attention": _attention,
    "collectives": _collectives,
}
PARTS = (*STEPS, *OPERATIONS, "kernels")


def _short(seconds: float) -> float:
    return float(f"{seconds:.5g}")


@dataclass(frozen=True)
class Movement:
    """How far one part of the grid moved, over all its devices.

    Attributes:
        part: What was predicted.
        cells: Cells that both grids predict.
        moved: Those whose prediction changed.
        appeared: Cells that only the new grid predicts, less those that only the old one does.
        median: Median of |ln(new / old)| over all cells.
        p90: Its 90 % quantile.
        largest: Its largest value.
        bias: Mean of ln(new / old).
        where: Device and cell of the largest move.
    """

    part: str
    cells: int
    moved: int
    appeared: int
    median: float
    p90: float
    largest: float
    bias: float
    where: str

    @property
    def is_beyond(self) -> bool:
        """Whether the file has to be renewed."""
        return self.appeared < 0 or any(getattr(self, name) > limit for name, limit in LIMITS.items())


def compare(old: dict[str, list[float | None]], new: dict[str, list[float | None]]) -> list[Movement]:
    """Movements, part by part; parts or devices of one grid alone count as appeared or gone."""
    movements = []
    for part in dict.fromkeys(key.partition("/")[0] for key in (*old, *new)):
        logs: list[float] = []
        places: list[str] = []
        appeared = 0
        for key in dict.fromkeys(key for key in (*old, *new) if key.partition("/")[0] == part):
            before, after = old.get(key, []), new.get(key, [])
            length = max(len(before), len(after))
            for index in range(length):
                one = before[index] if index < len(before) else None
                other = after[index] if index < len(after) else None
                if one is None or other is None:
                    appeared += (other is not None) - (one is not None)
                    continue
                logs.append(float(np.log(other / one)))
                cell = PRESETS[index] if part in STEPS else f"cell {index}"
                places.append(f"{cell} on {key.partition('/')[2]}")
        moves = np.abs(np.array(logs or [0.0]))
        movements.append(
            Movement(
                part=part,
                cells=len(logs),
                moved=int((moves > UNMOVED).sum()),
                appeared=appeared,
                median=float(np.median(moves)),
                p90=float(np.quantile(moves, 0.9)),
                largest=float(moves.max()),
                bias=float(np.mean(logs or [0.0])),
                where=places[int(moves.argmax())] if logs and moves.max() > UNMOVED else "",
            )
        )
    return movements


def describe(movements: list[Movement], since: str) -> str:
    """Changes of predicted times as lines of text."""
    lines = [f"predictions against the grid of {since}:"]
    for each in movements:
        words = f"{each.part:14s} {each.cells:6,d} cells, {each.moved:6,d} moved"
        if each.moved:
            median, p90, largest, mean = (
                f"{100.0 * (exp(value) - 1.0):.1f} %" for value in (each.median, each.p90, each.largest, each.bias)
            )
            words += f"; median {median}, p90 {p90}, mean {mean}, largest {largest} ({each.where})"
        if each.appeared:
            words += f"; {each.appeared:+d} cells"
        lines.append(words + ("  BEYOND THE LIMITS" if each.is_beyond else ""))
    return "\n".join(lines)


def read_grid() -> tuple[str, dict[str, list[float | None]]]:
    """Version and cells of the file."""
    content = json.loads(PATH.read_text(encoding="utf-8"))
    return content["version"], content["seconds"]


def write_grid(grid: dict[str, list[float | None]]) -> None:
    """Write the file, one line for each part and device."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(cells)}" for key, cells in grid.items())
    PATH.write_text(f'{{"version": "{__version__}", "seconds": {{\n{lines}\n}}}}\n', encoding="utf-8")


def main() -> int:
    """Print the movement; write the grid, or check whether it has to be renewed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a part moved too far")
    check = parser.parse_args().check
    grid = predict_grid()
    is_beyond = False
    if PATH.exists():
        since, old = read_grid()
        movements = compare(old, grid)
        is_beyond = any(each.is_beyond for each in movements)
        print(describe(movements, since))
    if not check:
        write_grid(grid)
    elif is_beyond:
        print(f"{PATH.name} has to be renewed if this is meant: python scripts/write_drift_grid.py", file=sys.stderr)
    return int(check and is_beyond)


if __name__ == "__main__":
    sys.exit(main())
