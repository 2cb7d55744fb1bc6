"""Measure the throughput of shape searches: shapes per second, total time, and memory.

    python benchmarks/search.py [--params 3b] [--device h100-sxm-80gb] [--json FILE]

Two spaces around a Llama-like model, each in a separate process on one thread. The first is a typical request that
varies all seven shape fields without a quality guard: parameters are counted for all shapes, and those of the right
size are priced. In the second every shape is priced. Both are also ranked by the time to the loss after 300 B tokens.
The rates are shapes per second of processor time, of a cold process that reads all tables, and of a second search in
it. For reference: one prediction of the same model, cold and cached.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from typing import Any

from record import job_options, run_alone, write_record

os.environ.setdefault("OMP_NUM_THREADS", "1")

ALL_FIELDS = ("heads", "head_dim", "kv_heads", "ffn", "vocab", "depth", "width")
SPACES: dict[str, dict[str, Any]] = {
    "all seven fields, same size": {"vary": ALL_FIELDS, "tolerance_fraction": 0.02, "guard": "free"},
    "every shape priced": {
        "vary": ("heads", "kv_heads", "ffn", "vocab", "depth", "width"),
        "tolerance_fraction": 10.0,
        "guard": "free",
    },
}
TO_LOSS = ", time to loss"
TRAIN_TOKENS = 3e11
SPACES |= {name + TO_LOSS: space for name, space in SPACES.items()}


def main() -> None:
    """Run both spaces and print them."""
    parser = job_options(__doc__, SPACES)
    parser.add_argument("--params", default="3b")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.params, arguments.device)))
        return
    rows = {}
    for name in SPACES:
        given = {"params": arguments.params, "device": arguments.device}
        runs = [run_alone(__file__, name, **given) for _ in range(arguments.repeats)]
        rows[name] = {**runs[0], "elapsed_s": statistics.median(run["elapsed_s"] for run in runs)}
        for key in ("processor_s", "again_processor_s"):
            rows[name][key] = statistics.median(run[key] for run in runs)
        rows[name]["elapsed_each_s"] = [run["elapsed_s"] for run in runs]
        row = rows[name]
        print(
            f"{name}: {row['num_shapes']:,} shapes, {row['num_priced']:,} priced, {row['elapsed_s']:.2f} s, processor "
            f"{row['processor_s']:.2f} s "
            f"({row['num_shapes'] / row['processor_s']:,.0f} shapes/s, {row['num_priced'] / row['processor_s']:,.0f} "
            f"priced/s; again {row['num_shapes'] / row['again_processor_s']:,.0f} shapes/s), "
            f"{row['most_memory_bytes'] / 1e6:,.0f} MB"
        )
    for name in [name for name in SPACES if name.endswith(TO_LOSS)]:
        by_speed = rows[name.removesuffix(TO_LOSS)]
        rows[name]["rate_over_by_speed"] = by_speed["processor_s"] / rows[name]["processor_s"]
        print(f"{name}: {rows[name]['rate_over_by_speed']:.2f} of the rate by speed")
    rows["one prediction"] = predict_one(arguments.params, arguments.device)
    print("one prediction: {cold_s:.2e} s cold, {warm_s:.2e} s with every price known".format(**rows["one prediction"]))
    write_record(arguments.json, params=arguments.params, device=arguments.device, results=rows)


def measure(name: str, params: str, device: str) -> dict[str, Any]:
    """Search one space."""
    from shapewright.core.units import parse_count
    from shapewright.optimize.search.baseline import usual_model
    from shapewright.optimize.search.objective import Goal
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.optimize.search.search import search_shapes
    from shapewright.prediction.build import build_scenario

    question = build_scenario(usual_model(parse_count(params), "llama"), device)
    goal = Goal(train_tokens=TRAIN_TOKENS) if name.endswith(TO_LOSS) else Goal()
    request = SearchRequest(**SPACES[name], goal=goal)
    processor_s: list[float] = []
    for _ in range(2):
        start_s = time.process_time()
        result = search_shapes(question, request)
        processor_s.append(time.process_time() - start_s)
    return {
        "num_shapes": result.tally.num_shapes,
        "num_priced": result.tally.priced,
        "num_faster": result.tally.faster,
        "elapsed_s": result.elapsed_s,
        "processor_s": processor_s[0],
        "again_processor_s": processor_s[1],
        "most_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "best_speedup": result.candidates[0].speedup.factor if result.candidates else None,
    }


def predict_one(params: str, device: str) -> dict[str, float]:
    """Time one prediction: of a new vocabulary, and of one whose prices are all cached."""
    from dataclasses import replace

    from shapewright.core.units import parse_count
    from shapewright.optimize.search.baseline import usual_model
    from shapewright.prediction.build import build_scenario
    from shapewright.prediction.predict import predict

    question = build_scenario(usual_model(parse_count(params), "llama"), device)
    config = question.config
    cold: list[float] = []
    warm: list[float] = []
    for step in range(20):
        fresh = replace(config, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size + 64 * step)
        for times in (cold, warm):
            start_s = time.perf_counter()
            predict(fresh, device=question.device, workload=question.workload, layout=question.layout)
            times.append(time.perf_counter() - start_s)
    return {"cold_s": statistics.median(cold), "warm_s": statistics.median(warm)}


if __name__ == "__main__":
    main()
