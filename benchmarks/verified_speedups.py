"""Search small models for a faster shape on this machine's CPU, and compare the predicted with the measured speed-up.

    shapewright bench --for-calibration --cpu --budget 6m --store cpu.sqlite
    shapewright calibrate --store cpu.sqlite -o cpu.json
    OMP_NUM_THREADS=1 python benchmarks/verified_speedups.py --calibration cpu.json [--json FILE]

Each model is one ``shapewright search MODEL --objective time --verify 1``, which measures the operations of both shapes
in turns. Both speed-ups are those of the operations that can be measured. Target: they differ by at most 3 points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import write_record

MODELS = (
    "pythia-70m", "gpt2", "opt-125m", "gpt3-125m", "llm-foundry-mpt-125m", "smollm2-135m", "pythia-160m",
    "smollm2-360m", "pythia-410m", "qwen2.5-0.5b",
)  # fmt: skip
TARGET_POINTS = 3.0
# A training step of one short sequence, so that every operation takes less than a second on one thread.
WORKLOAD = ("--dtype", "fp32", "--seq-len", "256", "--micro-batch-size", "1")


def main() -> None:
    """Print a row for each model, and write a record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True, help="file of 'shapewright calibrate' for this CPU")
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=MODELS)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds of measuring after which no round begins")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| model | change | predicted | measured (range) | rounds | share of the step | off by |")
    print("|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        row = verify_model(model, arguments.calibration, arguments.budget)
        rows.append(row)
        print(
            f"| {model} | {row['change']} | {row['predicted']:.3f} | {row['measured']:.3f} "
            f"({row['low']:.3f} to {row['high']:.3f}) | {row['rounds']} | {row['covered_fraction']:.0%} | "
            f"{row['off_points']:+.1f} points |",
            flush=True,
        )
        write_record(arguments.json, results=rows)
    off = [abs(row["off_points"]) for row in rows]
    met = sum(points <= TARGET_POINTS for points in off)
    print(
        f"{met} of {len(off)} within {TARGET_POINTS:g} points; median {statistics.median(off):.1f}, most {max(off):.1f}"
    )


def verify_model(model: str, calibration: Path, budget_s: float) -> dict[str, Any]:
    """Search for a faster shape of one model, and measure both shapes."""
    command = [
        sys.executable, "-m", "shapewright", "search", model, "--device", "cpu", "--calibration", str(calibration),
        *WORKLOAD, "--objective", "time", "--verify", "1", "--verify-budget", str(budget_s), "--json",
    ]  # fmt: skip
    answer = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    verification, best = answer["verification"], answer["candidates"][0]
    shape = verification["shapes"][0]
    return {
        "model": model,
        "change": ", ".join(f"{name} {change['from']} to {change['to']}" for name, change in best["changes"].items()),
        "predicted": shape["predicted_of_measured"],
        "measured": shape["measured"],
        "low": shape["measured_low"],
        "high": shape["measured_high"],
        "rounds": verification["num_rounds"],
        "covered_fraction": shape["covered_fraction"],
        "off_points": 100.0 * (shape["predicted_of_measured"] - shape["measured"]),
        "modules": shape["modules"],
    }


if __name__ == "__main__":
    main()
