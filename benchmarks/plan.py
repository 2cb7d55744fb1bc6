"""Measure the throughput of plan searches: plans per second, cold and warm, compared with one prediction per plan.

    python benchmarks/plan.py [--device h100-sxm-80gb] [--json FILE]

Each job runs in a separate process on one thread with cold caches, as a user would wait for it. Memory is estimated for
every plan of the space, step times for those that fit. Wall and CPU time are those of the search without interpreter
start-up. The baseline in the same run is ``estimate_memory`` for every plan and ``predict`` for those that fit, one by
one without caches, measured on a sample and scaled to all.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from dataclasses import replace
from typing import Any

from record import job_options, run_alone, write_record

os.environ.setdefault("OMP_NUM_THREADS", "1")

JOBS: dict[str, dict[str, Any]] = {
    "llama-3-70b, 512 devices": {"model": "llama-3-70b", "gpus": 512},
    "gpt3-175b, 1024 devices": {"model": "gpt3-175b", "gpus": 1024, "seq_len": 2048},  # as many positions as it has
    "mixtral-8x7b, 512 devices": {"model": "mixtral-8x7b", "gpus": 512},
    "deepseek-v3, 2048 devices": {"model": "deepseek-v3", "gpus": 2048},
}
# One evaluation of calculon (calculon-ai/calculon, caa4b11) took 13.4 ms on a machine of this kind, and its own search
# on two processes went through 130 plans a second (2,736 plans of a model of 126 M parameters on 2 devices).
CALCULON_PLANS_PER_S = 130.0
# Plans that are worked out one by one; each stands for its like.
_SAMPLE = 40


def main() -> None:
    """Run every job and print it."""
    arguments = job_options(__doc__, JOBS).parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.device, **JOBS[arguments.only])))
        return
    rows = {}
    for name in JOBS:
        runs = [run_alone(__file__, name, device=arguments.device) for _ in range(arguments.repeats)]
        rows[name] = {**runs[0], "cold_each_s": [run["cold_s"] for run in runs]}
        for key in ("cold_s", "cold_processor_s", "warm_s", "one_prediction_s", "one_estimate_s"):
            rows[name][key] = statistics.median(run[key] for run in runs)
        row = rows[name]
        per_processor_s = row["num_plans"] / row["cold_processor_s"]
        row["one_by_one_s"] = row["num_plans"] * row["one_estimate_s"] + row["num_fitting"] * row["one_prediction_s"]
        print(
            f"{name}: {row['num_plans']:,} plans, {row['num_fitting']:,} fit; cold {row['cold_s']:.2f} s "
            f"({row['num_plans'] / row['cold_s']:,.0f} plans/s; {per_processor_s:,.0f} per "
            f"processor second), warm {row['num_plans'] / row['warm_s']:,.0f} plans/s; one by one "
            f"{row['num_plans'] / row['one_by_one_s']:,.0f} plans/s, "
            f"{row['one_by_one_s'] / row['cold_processor_s']:.0f} times as long; "
            f"{per_processor_s / CALCULON_PLANS_PER_S:,.0f} times calculon's"
        )
    print(f"calculon, quoted: {CALCULON_PLANS_PER_S:.0f} plans/s")
    write_record(arguments.json, device=arguments.device, results=rows, calculon_plans_per_s=CALCULON_PLANS_PER_S)


def measure(device: str, *, model: str, gpus: int, seq_len: int = 8192) -> dict[str, Any]:
    """Look at all plans of one job, twice, and predict one of them alone."""
    from shapewright.memory.estimate import estimate_memory
    from shapewright.optimize.plan.engine import explore
    from shapewright.optimize.plan.request import PlanJob, PlanRequest
    from shapewright.prediction.build import build_scenario
    from shapewright.prediction.predict import predict
    from shapewright.pricing import operations as pricing

    workload = {"seq_len": seq_len, "global_batch_size": 2048}
    question = build_scenario(model, device, workload=workload)
    request = PlanRequest(num_devices=gpus)
    job = PlanJob(scenario=question, request=request)
    seconds, processor = [], []
    for _ in range(2):
        start_s, start_processor_s = time.perf_counter(), time.process_time()
        findings = explore(job)
        seconds.append(time.perf_counter() - start_s)
        processor.append(time.process_time() - start_processor_s)
    predictions, estimates = [], []
    num_kept = len(findings.best["step_s"])
    for row in random.Random(0).sample(range(num_kept), min(_SAMPLE, num_kept)):
        choice = findings.choice(findings.best, row)
        own = replace(question.workload, **choice.chosen_workload)
        pricing._price_cache.clear()
        start_s = time.process_time()
        estimate_memory(question.config, own, choice.layout)
        estimates.append(time.process_time() - start_s)
        start_s = time.process_time()
        predict(question.config, device=question.device, workload=own, layout=choice.layout)
        predictions.append(time.process_time() - start_s)
    return {
        "num_plans": findings.tally.num_plans,
        "num_fitting": findings.tally.num_fitting,
        "cold_s": seconds[0],
        "cold_processor_s": processor[0],
        "warm_s": seconds[1],
        "one_prediction_s": statistics.mean(predictions),
        "one_estimate_s": statistics.mean(estimates),
    }


if __name__ == "__main__":
    main()
