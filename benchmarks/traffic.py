"""Measure simulated traffic against SimPy in the same run.

    pip install simpy
    python benchmarks/traffic.py [--requests 1000000] [--simpy-requests 20000] [--json FILE]

The same requests, times of passes and scheduler (admission by blocks, chunked prefill; a cache that never fills) run
as a SimPy process that waits for every pass and for arrivals, and in the loop of this package, by Python alone and
compiled by Numba. Times per request are compared, and the results must agree.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from record import write_record

from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.optimize.serving.traffic.pass_table import price_table
from shapewright.optimize.serving.traffic.requests import RandomTraffic, Traffic, read_lengths
from shapewright.optimize.serving.traffic.state import Limits
from shapewright.optimize.serving.traffic.stream import pass_s
from shapewright.optimize.serving.traffic.unit import SimulatedUnit, Streams, simulate_unit
from shapewright.prediction.build import build_scenario

MODEL, DEVICE, RATE_PER_S = "llama-3-8b", "h100-sxm-80gb", 20.0
MAX_SEQUENCES, MAX_TOKENS, BLOCK_TOKENS, NUM_BLOCKS = 256, 2048, 16, 27_000


def main() -> None:
    """Run both, and print times per request and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--simpy-requests", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unit = make_unit()
    few, many = draw(arguments.simpy_requests), draw(arguments.requests)
    simulate_unit(unit, draw(100), compiled=True)  # compiles or loads
    start = time.perf_counter()
    first_s, end_s = run_simpy(few, unit)
    seconds = {"simpy": (time.perf_counter() - start) / few.num_requests}
    for name, traffic, compiled in (("python", few, False), ("numba", many, True)):
        start = time.perf_counter()
        outcome = simulate_unit(unit, traffic, compiled=compiled)
        seconds[name] = (time.perf_counter() - start) / traffic.num_requests
        if traffic is few:
            errors = {
                "ttft": float(np.mean(outcome.first_s - few.arrival_s) / np.mean(first_s - few.arrival_s) - 1.0),
                "end_to_end": float(np.mean(outcome.end_s - few.arrival_s) / np.mean(end_s - few.arrival_s) - 1.0),
            }
    for name, each_s in seconds.items():
        print(
            f"{name}: {1e6 * each_s:.1f} us a request, {seconds['simpy'] / each_s:.1f} times as fast as SimPy; a "
            f"million requests {1e6 * each_s:.1f} s"
        )
    print("means against SimPy:", ", ".join(f"{name} {100 * error:+.2f} %" for name, error in errors.items()))
    write_record(arguments.json, seconds_per_request=seconds, errors=errors, num_requests=many.num_requests)


def make_unit() -> SimulatedUnit:
    """One stream with a cache that never fills."""
    scenario = build_scenario(MODEL, DEVICE, workload={"phase": "prefill"})
    request = ServingRequest(prompt_len=1000, output_len=200)
    instance = Instance(scenario, ServingFormat("bf16", "bf16", "bf16"), request)
    priced = price_table(instance, max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS, longest_len=8192)
    return SimulatedUnit(Streams(priced.table, Limits(MAX_SEQUENCES, MAX_TOKENS, BLOCK_TOKENS, NUM_BLOCKS), 1))


def draw(count: int) -> Traffic:
    """Requests of lengths as in conversations."""
    prompts, answers = read_lengths("lognormal:800,400", "prompt_len"), read_lengths("uniform:50,350", "output_len")
    return RandomTraffic(prompts=prompts, answers=answers, num_requests=count).draw(8192)[0].at_rate(RATE_PER_S)


def run_simpy(traffic: Traffic, unit: SimulatedUnit) -> tuple[np.ndarray, np.ndarray]:
    """Return times of first and last tokens, with a SimPy event for every pass. [s], [requests]"""
    table = unit.decode.table
    columns: list[Any] = [each.tolist() if isinstance(each, np.ndarray) else each for each in table]
    listed = type(table)(*columns)
    env = simpy.Environment()
    queue: list[list[Any]] = []
    wake = env.event()
    first_s, end_s = np.zeros(traffic.num_requests), np.zeros(traffic.num_requests)
    prompts, answers = traffic.prompt_len.tolist(), traffic.output_len.tolist()

    def arrive() -> Any:
        for place, time_s in enumerate(traffic.arrival_s.tolist()):
            if time_s > env.now:
                yield env.timeout(time_s - env.now)
            queue.append([place, 0, prompts[place], answers[place]])  # number, computed, prompt, tokens left
            if not wake.triggered:
                wake.succeed()

    def serve() -> Any:
        nonlocal wake
        running: list[list[Any]] = []
        num_done = 0
        while num_done < traffic.num_requests:
            if not running and not queue:
                wake = env.event()
                yield wake
            decoding = [one for one in running if one[1] >= one[2]]
            budget, tokens, seen, filled = MAX_TOKENS - len(decoding), 0, 0.0, []
            for one in [each for each in running if each[1] < each[2]]:
                chunk = min(budget, one[2] - one[1])
                seen += chunk * (one[1] + 0.5 * (chunk + 1))
                one[1], tokens, budget = one[1] + chunk, tokens + chunk, budget - chunk
                if one[1] == one[2]:
                    filled.append(one)
            while queue and budget > 0 and len(running) < MAX_SEQUENCES:
                one = queue.pop(0)
                running.append(one)
                chunk = min(budget, one[2])
                seen += chunk * 0.5 * (chunk + 1)
                one[1], tokens, budget = chunk, tokens + chunk, budget - chunk
                if chunk == one[2]:
                    filled.append(one)
            context = sum(one[1] for one in decoding)
            yield env.timeout(pass_s(listed, len(decoding), context, tokens, seen))
            for one in decoding:
                one[1] += 1
                one[3] -= 1
            for one in filled:
                first_s[one[0]] = env.now
                one[3] -= 1
                one[2] = one[1]
            for one in running:
                if one[3] == 0:
                    end_s[one[0]] = env.now
                    num_done += 1
            running = [one for one in running if one[3] > 0]

    env.process(arrive())
    env.process(serve())
    env.run()
    return first_s, end_s


if __name__ == "__main__":
    main()
