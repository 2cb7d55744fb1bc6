"""Load test of the explorer: prediction latency at a fixed request rate, then many clients at once, and server memory.

    python benchmarks/explorer_load.py --rate 50 --seconds 30 --clients 200 --json explorer_load.json

Starts a server on a free port of this machine, and the clients in a separate process. The load is open-loop: arrivals
follow the clock, so a slow answer does not delay the next request, and latency is measured from the scheduled arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from explorer_server import running_explorer
from record import write_record

MODELS = ("gpt3-2.7b", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "gpt2-xl", "qwen2.5-7b")
DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
_MEBIBYTE = 2**20


def main() -> int:
    """Run both loads and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="predictions a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each load")
    parser.add_argument("--clients", type=int, default=200, help="clients at once")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    with running_explorer() as (address, pid):
        facts = asyncio.run(measure(address, pid, arguments))
    print(json.dumps(facts, indent=2))
    write_record(arguments.json, **facts)
    return 0 if not facts["steady"]["num_lost"] and not facts["crowd"]["num_lost"] else 1


async def measure(address: str, pid: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both loads, one after the other."""
    limits = httpx.Limits(max_connections=arguments.clients, max_keepalive_connections=arguments.clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60.0) as client:
        for _ in range(20):
            await ask(client, random.Random(0), 0.0)
        steady = await run_steady(client, arguments.rate, arguments.seconds)
        before_bytes = resident_bytes(pid)
        crowd, memory = await run_crowd(client, pid, arguments.clients, arguments.seconds)
    return {
        "steady": {"rate_per_s": arguments.rate, **summary(steady, arguments.seconds)},
        "crowd": {
            "num_clients": arguments.clients,
            **summary(crowd, arguments.seconds),
            "memory_before_mib": before_bytes / _MEBIBYTE,
            "memory_mib": [amount / _MEBIBYTE for amount in memory],
        },
    }


async def ask(client: httpx.AsyncClient, chance: random.Random, due_s: float) -> tuple[float, bool]:
    """Request a prediction of a new shape; return seconds since its scheduled arrival, and whether it succeeded."""
    job = {
        "preset": chance.choice(MODELS),
        "device": chance.choice(DEVICES),
        "overrides": {"vocab_size": chance.randrange(32_000, 128_000)},
        "workload": {"micro_batch_size": chance.randrange(1, 9)},
    }
    try:
        answer = await client.post("/api/v1/predict", json={"job": job})
        came = answer.status_code == 200 and answer.json()["step_time_s"] > 0.0
    except httpx.HTTPError:
        came = False
    return time.perf_counter() - due_s, came


async def run_steady(client: httpx.AsyncClient, rate: float, seconds: float) -> list[tuple[float, bool]]:
    """Requests at even distances, whatever becomes of the ones before."""
    chance, tasks = random.Random(1), []
    start_s = time.perf_counter()
    for index in range(int(rate * seconds)):
        due_s = start_s + index / rate
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(client, chance, due_s)))
    return list(await asyncio.gather(*tasks))


async def run_crowd(
    client: httpx.AsyncClient, pid: int, num_clients: int, seconds: float
) -> tuple[list[tuple[float, bool]], list[int]]:
    """Run closed-loop clients, which send the next request after each answer; sample server memory periodically."""
    stop_s = time.perf_counter() + seconds
    found: list[tuple[float, bool]] = []

    async def keep_asking(seed: int) -> None:
        chance = random.Random(seed)
        while time.perf_counter() < stop_s:
            found.append(await ask(client, chance, time.perf_counter()))

    memory = []
    clients = [asyncio.create_task(keep_asking(seed)) for seed in range(num_clients)]
    while time.perf_counter() < stop_s:
        await asyncio.sleep(seconds / 6.0)
        memory.append(resident_bytes(pid))
    await asyncio.gather(*clients)
    return found, memory


def summary(found: list[tuple[float, bool]], seconds: float) -> dict[str, Any]:
    """Percentiles of the latency. [ms]"""
    times = sorted(latency_s for latency_s, _ in found)

    def at(fraction: float) -> float:
        return 1e3 * times[min(len(times) - 1, int(fraction * len(times)))]

    return {
        "num_requests": len(found),
        "num_lost": sum(not came for _, came in found),
        "requests_per_s": len(found) / seconds,
        "p50_ms": at(0.5),
        "p95_ms": at(0.95),
        "p99_ms": at(0.99),
        "max_ms": 1e3 * times[-1],
    }


def resident_bytes(pid: int) -> int:
    """Memory of a process. [byte]"""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
