"""Measure GEMM pricing throughput, compared with evaluating every kernel of the menu and with a plain roofline.

    python benchmarks/gemm_pricing.py [--shapes 1000000] [--device h100-sxm-80gb] [--json FILE]

Rates are the best of a few runs, in wall time, which depends on other load, and in CPU time. Slow methods get fewer
shapes. "Time alone" is the path of a search; "whole price" adds kernel, reasons and interval.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from record import write_record

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm import price as gemm_module
from shapewright.pricing.gemm.fastest import has_compiler
from shapewright.pricing.gemm.kernels import estimate_kernels, every_kernel, join_s, rates_of
from shapewright.pricing.gemm.parameters import read_parameters
from shapewright.pricing.gemm.price import estimate_gemm_s, price_gemm
from shapewright.pricing.gemm.shapes import Gemms
from shapewright.pricing.price import roofline_s

# Shapes of one evaluation of the whole menu: its arrays stay in the second cache.
_REFERENCE_ROWS = 256
_SLOW_SHARE = 0.05
BASELINE, FLOOR = "every kernel timed, formula alone", "roofline alone"


def main() -> None:
    """Print a line for each pricing method, and write a record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=1_000_000)
    parser.add_argument("--device", default="h100-sxm-80gb")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    dims = [np.floor(scale * 2.0 ** random.uniform(0.0, 10.0, given.shapes)) for scale in (8.0, 64.0, 64.0)]
    few = max(round(_SLOW_SHARE * given.shapes), _REFERENCE_ROWS)
    cores = os.cpu_count() or 1
    rows: dict[str, dict[str, Any]] = {}
    for name, (number, num_threads, work) in ways(given.device, dims, few, cores).items():
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        work()  # compiles, and reads the record
        seconds, processor = zip(*(seconds_of(work) for _ in range(given.repeats)), strict=True)
        rows[name] = {
            "num_shapes": number,
            "num_threads": num_threads,
            "each_s": seconds,
            "each_processor_s": processor,
        }
        rows[name]["shapes_per_s"] = number / min(seconds)
        rows[name]["shapes_per_processor_s"] = number / min(processor)
    print(f"million shapes a second, {given.device}, {dtype_of(given.device)}")
    print("| way of pricing | threads | by the clock | per processor second | times the formula | of the roofline |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        for other, key in ((BASELINE, "over_every_kernel"), (FLOOR, "over_roofline")):
            row[key] = row["shapes_per_processor_s"] / rows[other]["shapes_per_processor_s"]
        print(
            f"| {name} | {row['num_threads']} | {row['shapes_per_s'] / 1e6:.2f} | "
            f"{row['shapes_per_processor_s'] / 1e6:.2f} | {row['over_every_kernel']:.1f} | {row['over_roofline']:.3f} |"
        )
    write_record(given.json, device=given.device, results=rows)


def ways(device_name: str, dims: list[Any], few: int, cores: int) -> dict[str, tuple[int, int, Callable[[], object]]]:
    """Return the measured methods by name: number of shapes, threads, and function."""
    device = load_device(device_name)
    physics, learned = (load_record("gemm", device.with_pricing(physics_only=alone)) for alone in (True, False))
    dtype = dtype_of(device_name)
    parameters, rates = read_parameters(learned.parameters["dtypes"][dtype]), rates_of(device, dtype)
    kernels, one = every_kernel(parameters), np.ones(_REFERENCE_ROWS)
    m, n, k = dims
    number = len(m)
    every = Gemm(name="x", dtype=dtype, m=m, n=n, k=k)
    some = Gemm(name="x", dtype=dtype, m=m[:few], n=n[:few], k=k[:few])

    def time_every_kernel() -> None:
        for start in range(0, few - _REFERENCE_ROWS + 1, _REFERENCE_ROWS):
            m, n, k = (dim[start : start + _REFERENCE_ROWS] for dim in dims)
            times = estimate_kernels(Gemms(m, n, k, one, {}), one, kernels, parameters, rates)
            (join_s(times.compute_s, times.memory_s, parameters.overlap_power) + times.added_s).min(axis=0)

    def without_numba(record: Any) -> None:
        limit, gemm_module.COMPILED_FROM_SHAPES = gemm_module.COMPILED_FROM_SHAPES, number + 1
        estimate_gemm_s(some, device, record)
        gemm_module.COMPILED_FROM_SHAPES = limit

    found: dict[str, tuple[int, int, Callable[[], object]]] = {
        FLOOR: (number, 1, lambda: roofline_s(every.flops, every.num_bytes, device, dtype)),
        BASELINE: (few // _REFERENCE_ROWS * _REFERENCE_ROWS, 1, time_every_kernel),
        "whole price, with what was learned": (few, 1, lambda: price_gemm(some, device, learned)),
        "time alone, with what was learned, NumPy": (few, 1, lambda: without_numba(learned)),
        "time alone, physics, NumPy": (few, 1, lambda: without_numba(physics)),
    }
    if has_compiler():
        for num_threads in sorted({1, cores}):
            for what, record in (("with what was learned", learned), ("physics", physics)):
                name = f"time alone, {what}, Numba, {num_threads} thread{'s' if num_threads > 1 else ''}"
                found[name] = (number, num_threads, partial(estimate_gemm_s, every, device, record))
    return found


def dtype_of(device_name: str) -> str:
    """The first format of the device's record: bf16 where there is one."""
    return str(next(iter(load_record("gemm", load_device(device_name)).parameters["dtypes"])))


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Time one run by the clock on the wall, and in processor time of all threads. [s]"""
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start_s, time.process_time() - start_processor_s


if __name__ == "__main__":
    main()
