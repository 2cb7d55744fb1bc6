"""Shared parts of benchmarks: the machine description in every record, and jobs in separate interpreters."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


def describe_machine() -> dict[str, Any]:
    """Describe the machine and the versions that the numbers depend on."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": models[0] if models else platform.processor(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: metadata.version(name) for name in ("numpy", "click", "rich")},
        "command": " ".join(["python", *sys.argv]),
    }


def processor_s() -> float:
    """Processor time of this process and of all that it waited for. [s]"""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def write_record(path: Path | None, **facts: Any) -> None:
    """Write the machine and the facts as JSON, where a path is given."""
    if path:
        record = {"schema_version": SCHEMA_VERSION, "machine": describe_machine(), **facts}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def job_options(description: str, jobs: Iterable[str]) -> argparse.ArgumentParser:
    """Options of a benchmark that runs each job several times, each time in a new interpreter."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", default="h100-sxm-80gb")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(jobs), help="run one job here, and print its numbers as JSON")
    return parser


def run_alone(script: str, job: str, **options: str) -> dict[str, Any]:
    """Measure one job of a script in a fresh interpreter, whose memory and remembered prices are its own."""
    given = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, script, "--only", job, *given]
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert isinstance(facts, dict)
    return facts
