"""Measure the throughput of serving plans: operating points per second, and the whole command.

    python benchmarks/serve_plan.py [--device h100-sxm-80gb] [--json FILE]

A search lowers the passes that its points share, prices their operations in one call and pairs prefilling with decoding
instances. The baseline in the same run composes a point from ``predict`` calls, one per pass, without caches. Each job
runs in a separate process on one thread; the command is timed as a user runs it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any
from unittest.mock import patch

from record import job_options, run_alone, write_record

os.environ.setdefault("OMP_NUM_THREADS", "1")

JOBS: dict[str, dict[str, Any]] = {
    "llama-3-70b, instances of up to 8": {"model": "llama-3-70b"},
    "mixtral-8x7b, instances of up to 8": {"model": "mixtral-8x7b"},
    "deepseek-v3, 32 devices": {"model": "deepseek-v3", "gpus": 32},
}
LENGTHS = {"isl": 4000, "osl": 500}
# Passes that are predicted one by one; each stands for its like.
_SAMPLE = 40


def main() -> None:
    """Run every job and print it."""
    arguments = job_options(__doc__, JOBS).parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.device, **JOBS[arguments.only])))
        return
    rows = {}
    for name, job in JOBS.items():
        runs = [run_alone(__file__, name, device=arguments.device) for _ in range(arguments.repeats)]
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row["command_s"] = statistics.median(time_command(arguments.device, **job) for _ in range(arguments.repeats))
        rows[name] = row
        one_by_one_s = row["num_passes"] * row["one_pass_s"]
        print(
            f"{name}: {row['num_points']:,.0f} ways to serve from {row['num_passes']:,.0f} passes in "
            f"{row['search_s']:.2f} s ({row['num_points'] / row['search_s']:,.0f} a second; "
            f"{row['num_points'] / row['search_processor_s']:,.0f} a processor second); passes by predict one by one "
            f"{one_by_one_s:.2f} s, {one_by_one_s / row['search_processor_s']:.1f} times as long; "
            f"whole command {row['command_s']:.2f} s"
        )
    write_record(arguments.json, device=arguments.device, results=rows)


def time_command(device: str, *, model: str, gpus: int | None = None) -> float:
    """Wall time of the command line. [s]"""
    asked = [f"--{name}={value}" for name, value in LENGTHS.items()] + ([f"--gpus={gpus}"] if gpus else [])
    command = [sys.executable, "-m", "shapewright", "serve-plan", model, "--device", device, "--formats=none", *asked]
    start_s = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start_s


def measure(device: str, *, model: str, gpus: int | None = None) -> dict[str, float]:
    """Look at all ways to serve one model once, and predict some of its passes alone."""
    import shapewright
    from shapewright.optimize.serving import pass_times
    from shapewright.prediction.composition.step import compose_passes
    from shapewright.prediction.predict import predict
    from shapewright.pricing import operations as pricing

    passes: list[Any] = []

    def count(distinct: Any, *given: Any, **more: Any) -> Any:
        passes.extend(distinct)
        return compose_passes(distinct, *given, **more)

    with patch.object(pass_times, "compose_passes", count):
        start_s, start_processor_s = time.perf_counter(), time.process_time()
        found = shapewright.serve_plan(
            model, device=device, prompt_len=LENGTHS["isl"], output_len=LENGTHS["osl"], num_devices=gpus, formats=()
        )
        search_s, processor_s = time.perf_counter() - start_s, time.process_time() - start_processor_s
    seconds = []
    for one in random.Random(0).sample(passes, min(_SAMPLE, len(passes))):
        pricing._price_cache.clear()
        start_processor_s = time.process_time()
        predict(found.config, device=found.device, workload=one.workload, layout=one.layout)
        seconds.append(time.process_time() - start_processor_s)
    return {
        "num_points": len(found.points),
        "num_passes": len(passes),
        "search_s": search_s,
        "search_processor_s": processor_s,
        "one_pass_s": statistics.mean(seconds),
    }


if __name__ == "__main__":
    main()
