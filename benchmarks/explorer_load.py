"""Load test of the explorer: prediction latency at a fixed request rate, then many clients at once, and server memory.

    python benchmarks/explorer_load.py --rate 50 --seconds 30 --clients 200 --json explorer_load.json
    python benchmarks/explorer_load.py --soak 1800 --clients 200

Starts a server on a free port of this machine, and the clients in a separate process. The load is open-loop: arrivals
follow the clock, so a slow answer does not delay the next request, and latency is measured from the scheduled arrival.
A soak has clients that think between requests: most predict, one in twenty asks for findings, memory, a sweep or a
plan, some go away before their answer, and one in forty reads its answers a few bytes at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from explorer_server import running_explorer
from record import write_record

MODELS = ("gpt3-2.7b", "llama-3-8b", "llama-3-70b", "mixtral-8x7b", "gpt2-xl", "qwen2.5-7b")
DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
THINK_S = 10.0  # mean time between the requests of one client of a soak
SLOW = ("check", "memory", "sweep", "plan")
SLOW_SHARE, LEAVING_SHARE = 0.05, 0.02
ANSWERED = (200, 422, 503)  # an answer, a shape that is refused, a queue that is full
_MEBIBYTE = 2**20


def main() -> int:
    """Run both loads and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50.0, help="predictions a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each load")
    parser.add_argument("--clients", type=int, default=200, help="clients at once")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="run a soak of this length instead")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    with running_explorer() as (address, pid):
        if arguments.soak:
            facts = asyncio.run(soak(address, pid, arguments.clients, arguments.soak))
            print(json.dumps(facts, indent=2))
            return int(bool(facts["predict"]["num_lost"]))
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
    try:
        answer = await client.post("/api/v1/predict", json={"job": random_job(chance)})
        came = answer.status_code == 200 and answer.json()["step_time_s"] > 0.0
    except httpx.HTTPError:
        came = False
    return time.perf_counter() - due_s, came


def random_job(chance: random.Random) -> dict[str, Any]:
    """Job of a new shape."""
    return {
        "preset": chance.choice(MODELS),
        "device": chance.choice(DEVICES),
        "overrides": {"vocab_size": chance.randrange(32_000, 128_000)},
        "workload": {"micro_batch_size": chance.randrange(1, 9)},
    }


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


async def soak(address: str, pid: int, num_clients: int, seconds: float) -> dict[str, Any]:
    """Clients that think between requests of every lane; latencies by request, and memory each minute."""
    found: dict[str, list[tuple[float, bool]]] = {}
    statuses: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_clients)

    def body_of(path: str, chance: random.Random) -> dict[str, Any]:
        own: dict[str, dict[str, Any]] = {"plan": {"num_devices": 8}, "sweep": {"field": "hidden_size"}}
        return {"job": random_job(chance), **own.get(path, {})}

    async def keep_asking(client: httpx.AsyncClient, seed: int) -> None:
        chance = random.Random(seed)
        while time.perf_counter() + (pause_s := chance.expovariate(1.0 / THINK_S)) < stop_s:
            await asyncio.sleep(pause_s)
            way = chance.random()
            path = "predict" if way > SLOW_SHARE else chance.choice(SLOW)
            body = body_of(path, chance)
            start_s = time.perf_counter()
            try:
                limit_s = 0.05 if way > 1.0 - LEAVING_SHARE else 60.0
                answer = await client.post(f"/api/v1/{path}", json=body, timeout=limit_s)
                statuses[f"{path} {answer.status_code}"] += 1
                found.setdefault(path, []).append((time.perf_counter() - start_s, answer.status_code in ANSWERED))
            except httpx.HTTPError as error:
                statuses[f"{path} {type(error).__name__}"] += 1
                if limit_s > 1.0:
                    found.setdefault(path, []).append((time.perf_counter() - start_s, False))

    async def read_slowly(seed: int) -> None:
        chance = random.Random(seed)
        url = httpx.URL(address)
        while time.perf_counter() < stop_s:
            body = json.dumps({"job": random_job(chance)}).encode()
            head = f"POST /api/v1/predict HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while time.perf_counter() < stop_s and await reader.read(16):
                await asyncio.sleep(0.05)
            statuses["slow reader closed"] += 1
            writer.close()

    memory: list[float] = []
    worker_memory: list[float] = []
    async with httpx.AsyncClient(base_url=address, limits=limits) as client:
        for path in ("predict", *SLOW):  # a server that starts answers late once
            await client.post(f"/api/v1/{path}", json=body_of(path, random.Random(0)), timeout=60.0)
        stop_s = time.perf_counter() + seconds
        tasks = [asyncio.create_task(keep_asking(client, seed)) for seed in range(num_clients)]
        tasks += [asyncio.create_task(read_slowly(seed)) for seed in range(num_clients // 40)]
        while time.perf_counter() < stop_s:
            memory.append(round(resident_bytes(pid) / _MEBIBYTE, 1))
            worker_memory.append(round(sum(map(resident_bytes, children(pid))) / _MEBIBYTE, 1))
            await asyncio.sleep(min(60.0, max(0.0, stop_s - time.perf_counter())))
        for task in tasks[num_clients:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "load_average": os.getloadavg(),
        "memory_mib": memory,
        "worker_memory_mib": worker_memory,
        "answers": dict(statuses),
        **{path: summary(times, seconds) for path, times in found.items()},
    }


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


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text(encoding="ascii").split()]


def resident_bytes(pid: int) -> int:
    """Memory of a process. [byte]"""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
