"""How fast GEMMs are priced, against evaluating the bare formula for every kernel of the menu in the same run.

Usage: python benchmarks/gemm_pricing.py [--shapes 100000] [--device h100-sxm-80gb]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import load_record
from shapewright.perf.gemm import ROWS_PER_BLOCK, price_gemm
from shapewright.perf.kernels import estimate_kernels, join_s, rates_of, read_parameters

REPEATS = 3


def seconds_of(work: Callable[[], object]) -> float:
    """Best of a few runs, in CPU time of this process: other load does not count."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Print a line for each way of pricing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100_000)
    parser.add_argument("--device", default="h100-sxm-80gb")
    given = parser.parse_args()
    device = load_device(given.device)
    random = np.random.default_rng(0)
    m, n, k = (np.floor(scale * 2.0 ** random.uniform(0.0, 10.0, given.shapes)) for scale in (8.0, 64.0, 64.0))
    record = load_record("gemm", device)
    parameters, rates = read_parameters(record.parameters["dtypes"]["bf16"]), rates_of(device, "bf16")
    one = np.ones(ROWS_PER_BLOCK)

    def evaluate_menu() -> None:
        for start in range(0, given.shapes - ROWS_PER_BLOCK + 1, ROWS_PER_BLOCK):
            block = [column[start : start + ROWS_PER_BLOCK] for column in (m, n, k)]
            times = estimate_kernels(*block, one, one, parameters, rates)
            total_s = join_s(times.compute_s, times.memory_s, parameters.overlap_power) + times.added_s
            total_s.min(axis=0)

    gemm = Gemm(name="x", m=m, n=n, k=k)  # type: ignore[arg-type]
    ways = {
        "every kernel, formula alone": evaluate_menu,
        "physics alone": lambda: price_gemm(gemm, device, load_record("gemm", device, physics_only=True)),
        "with what was learned": lambda: price_gemm(gemm, device, record),
    }
    baseline_s = 0.0
    for name, work in ways.items():
        seconds = seconds_of(work)
        baseline_s = baseline_s or seconds
        rate = given.shapes / seconds / 1e6
        print(f"{name:<34} {rate:6.3f} million shapes a second and core, {baseline_s / seconds:5.2f} x")


if __name__ == "__main__":
    main()
