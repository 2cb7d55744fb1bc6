"""Measure how long designs take: the whole command in a fresh interpreter, wall-clock and processor time.

    python benchmarks/design.py [--device h100-sxm-80gb] [--json FILE]

Target: 3 B parameters, 300 B tokens, 64 H100s in under 10 s on two cores.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

from record import job_options, run_alone, write_record

os.environ.setdefault("OMP_NUM_THREADS", "1")

JOBS: dict[str, dict[str, Any]] = {
    "3 B, 300 B tokens, 64 devices": {"num_parameters": 3 * 10**9, "train_tokens": 3 * 10**11, "num_devices": 64},
    "70 B, 1 T tokens, 512 devices": {"num_parameters": 70 * 10**9, "train_tokens": 10**12, "num_devices": 512},
    "size for 3,000 device hours, 64 devices": {"gpu_hours": 3000.0, "num_devices": 64},
}


def main() -> None:
    """Run every job and print it."""
    arguments = job_options(__doc__, JOBS).parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.device, **JOBS[arguments.only])))
        return
    rows = {}
    for name in JOBS:
        runs = [run_alone(__file__, name, device=arguments.device) for _ in range(arguments.repeats)]
        rows[name] = {**runs[0], "each_s": [run["wall_s"] for run in runs]}
        for key in ("wall_s", "processor_s"):
            rows[name][key] = statistics.median(run[key] for run in runs)
        row = rows[name]
        print(
            f"{name}: {row['num_shapes']:,} shapes, {row['num_plans']:,} plans of {row['num_planned']} of them in "
            f"{row['wall_s']:.1f} s, {row['processor_s']:.1f} s of processor time"
        )
    write_record(arguments.json, device=arguments.device, results=rows)


def measure(device: str, **job: Any) -> dict[str, Any]:
    """Make one design, imports included."""
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    import shapewright

    result = shapewright.design(device=device, **job)
    return {
        "num_shapes": result.num_shapes,
        "num_planned": result.num_planned,
        "num_plans": result.num_plans,
        "wall_s": time.perf_counter() - start_s,
        "processor_s": time.process_time() - start_processor_s,
    }


if __name__ == "__main__":
    main()
