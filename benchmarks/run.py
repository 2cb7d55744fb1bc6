"""Measure how long shapewright itself takes: start-up of the command line, and one prediction in a warm process.

    python benchmarks/run.py [--repeats 15] [--json FILE]

Every number is the median of the repeats, with minimum and maximum. Limits apply to wall or CPU time, whichever is
less: other load lengthens the former, spinning threads of NumPy's libraries the latter. Commands run in separate
processes, after a warm-up run that writes the bytecode as installing would. For reference: a bare interpreter, one that
imports NumPy, the rooflines of a layer's twelve GEMMs in plain Python, and llm-analysis if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from record import processor_s, write_record

PRESET = "llama-3-70b"  # 80 layers
DEVICE = "h100-sxm-80gb"
FLOOR = "rooflines of 12 GEMMs in plain Python"
# What the installed script does, without the search for it.
SHAPEWRIGHT = [sys.executable, "-c", "import sys; from shapewright.app.cli import main; sys.exit(main())"]
CHECK = ["check", "gpt3-2.7b", "--device", "a100-sxm-40gb", "--attention", "unfused", "--dtype", "fp16"]

# One evaluation by other tools, measured 2026-11-21 on a machine of two cores like the one of the records here.
# Quoted, not run here: calculon is no package, and its evaluation covers a whole system of 512 devices.
QUOTED_S = {
    "llm-analysis d841e40: OPT-6.7B training step, no tiles": 0.258e-3,
    "llm-analysis d841e40: OPT-6.7B prefill and decode, no tiles": 0.234e-3,
    "calculon caa4b11: GPT-3 175B on 512 devices": 13.4e-3,
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one thing, over its repeats.

    Attributes:
        name: What was measured.
        median_s: Median by the clock. [s]
        processor_s: Median of the processor time. [s]
        fastest_s: Fastest repeat by the clock. [s]
        slowest_s: Slowest repeat by the clock. [s]
        repeats: How many there were.
        limit_s: What the project promises; None where it promises nothing. [s]
    """

    name: str
    median_s: float
    processor_s: float
    fastest_s: float
    slowest_s: float
    repeats: int
    limit_s: float | None = None

    @property
    def is_broken(self) -> bool:
        """Whether a promise was not kept."""
        return self.limit_s is not None and min(self.median_s, self.processor_s) > self.limit_s


def main() -> int:
    """Measure, print, and write a record if requested. The exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="runs of each command, and batches of calls")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    timings = [
        *measure_commands(arguments.repeats),
        *measure_predictions(arguments.repeats),
        *measure_llm_analysis(arguments.repeats),
        _time(FLOOR, roofline_of_a_layer, arguments.repeats, calls=1000),
    ]
    print(render(timings))
    write_record(arguments.json, timings=[asdict(timing) for timing in timings], quoted_s=QUOTED_S)
    return int(any(timing.is_broken for timing in timings))


def measure_commands(repeats: int) -> list[Timing]:
    """Time commands in processes of their own."""
    cases: list[tuple[str, list[str], float | None]] = [
        ("python -c pass", [sys.executable, "-c", "pass"], None),
        ("python -c 'import numpy'", [sys.executable, "-c", "import numpy"], None),
        ("shapewright --help", [*SHAPEWRIGHT, "--help"], 0.3),
        (f"shapewright {' '.join(CHECK)}", [*SHAPEWRIGHT, *CHECK], 0.5),
    ]
    with tempfile.TemporaryDirectory() as folder:
        environment = with_bytecode(folder)
        return [
            _time(name, partial(_run, arguments, environment), repeats, limit_s=limit_s)
            for name, arguments, limit_s in cases
        ]


def with_bytecode(folder: str) -> dict[str, str]:
    """This environment, in which the first run leaves bytecode in a folder for the next ones."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _run(command: list[str], environment: dict[str, str]) -> None:
    # Exit code 1 is a check with findings.
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if outcome.returncode not in (0, 1) or "Traceback" in outcome.stderr:
        raise RuntimeError(f"{' '.join(command)} failed:\n{outcome.stderr}")


def measure_predictions(repeats: int) -> list[Timing]:
    """Time one prediction of an 80-layer model in this process."""
    calls = {**prediction_calls(anew=True), **prediction_calls(anew=False)}
    name = f"predict {PRESET} on {DEVICE}"
    return [_time(f"{name}: {case}", ask, repeats, calls=20, limit_s=2e-3) for case, ask in calls.items()]


def prediction_calls(*, anew: bool) -> dict[str, Callable[[], object]]:
    """Return a function that predicts each case, at a new length in every call or always at the same one."""
    from shapewright.hardware.loader import load_device
    from shapewright.models.read import read_model
    from shapewright.prediction.predict import predict
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

    config, device = read_model(PRESET).config, load_device(DEVICE)
    cluster = ParallelLayout(tensor_parallel=8, pipeline_parallel=4, data_parallel=8)
    node = ParallelLayout(tensor_parallel=8)
    alone = ParallelLayout()
    training = {"micro_batch_size": 1, "global_batch_size": 512}
    cases: dict[str, tuple[dict[str, Any], ParallelLayout]] = {
        "training step, 1 device": ({"micro_batch_size": 1}, alone),
        "training step, 256 devices": (training, cluster),
        "prefill, 8 devices": ({"phase": "prefill", "micro_batch_size": 1}, node),
        "decode, 8 devices": ({"phase": "decode", "micro_batch_size": 8}, node),
    }
    # Prices are remembered, so that a search pays once for what its candidates share: a new length every time is
    # what a prediction costs, the same question again what remembering saves.
    lengths = itertools.count(4096, 128) if anew else itertools.repeat(4096)

    def ask(fields: dict[str, Any], layout: ParallelLayout) -> object:
        length = next(lengths)
        asked: dict[str, Any] = {"context_len": length} if fields.get("phase") == "decode" else {"seq_len": length}
        return predict(config, device=device, workload=Workload(**asked, **fields), layout=layout)

    how = "a new length each time" if anew else "asked again"
    return {f"{case}, {how}": partial(ask, fields, layout) for case, (fields, layout) in cases.items()}


def measure_llm_analysis(repeats: int) -> list[Timing]:
    """Time one evaluation by llm-analysis, if it can be imported (pip install llm-analysis)."""
    if importlib.util.find_spec("llm_analysis") is None:
        return []
    from llm_analysis.analysis import LLMAnalysis
    from llm_analysis.config import (
        ParallelismConfig,
        get_dtype_config_by_name,
        get_gpu_config_by_name,
        get_model_config_by_name,
    )

    logging.disable(logging.CRITICAL)
    analysis = LLMAnalysis(
        get_model_config_by_name("facebook_opt-6.7b"),
        get_gpu_config_by_name("a100-sxm-80gb"),
        get_dtype_config_by_name("w16a16e16"),
        ParallelismConfig(tp_size=1, pp_size=1),
    )
    evaluate = partial(analysis.inference, batch_size_per_gpu=1, seq_len=512)
    return [_time("llm-analysis: OPT-6.7B prefill and decode, no tiles", evaluate, repeats, calls=20)]


def roofline_of_a_layer() -> float:
    """Least time of the four GEMMs of a GPT layer, forward and both gradients, on an A100 in fp16. [s]"""
    peak_flops_per_s, bandwidth_bytes_per_s = 312e12, 1.555e12
    tokens, hidden, inner = 8192, 2560, 10240
    total_s = 0.0
    for n, k in ((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)):
        for rows, columns, inner_dim in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
            compute_s = 2.0 * rows * columns * inner_dim / peak_flops_per_s
            memory_s = 2.0 * (rows * inner_dim + inner_dim * columns + rows * columns) / bandwidth_bytes_per_s
            total_s += max(compute_s, memory_s)
    return total_s


def _time(
    name: str, call: Callable[[], object], repeats: int, *, calls: int = 1, limit_s: float | None = None
) -> Timing:
    """Time a call: one uncounted, then ``repeats`` batches of ``calls``."""
    call()
    seconds, processor = [], []
    for _ in range(repeats):
        start_s, start_processor_s = time.perf_counter(), processor_s()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start_s) / calls)
        processor.append((processor_s() - start_processor_s) / calls)
    middle_s, middle_processor_s = statistics.median(seconds), statistics.median(processor)
    return Timing(name, middle_s, middle_processor_s, min(seconds), max(seconds), repeats, limit_s)


def render(timings: list[Timing]) -> str:
    """Return a Markdown table of the timings, the predictions as multiples of the plain rooflines."""
    floor_s = next(timing.processor_s for timing in timings if timing.name == FLOOR)
    columns = ("what", "processor time", "median", "fastest", "slowest", "promise", "times 12 rooflines")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for timing in timings:
        promise = "" if timing.limit_s is None else f"{_milliseconds(timing.limit_s)}"
        ratio = f"{timing.processor_s / floor_s:.3g}" if timing.name.startswith(("predict", "llm", FLOOR)) else ""
        seconds = (timing.processor_s, timing.median_s, timing.fastest_s, timing.slowest_s)
        numbers = [_milliseconds(value) for value in seconds]
        lines.append("| " + " | ".join([timing.name, *numbers, promise, ratio]) + " |")
    for name, quoted_s in QUOTED_S.items():
        lines.append(
            f"| {name} (quoted, not run here) | {_milliseconds(quoted_s)} | | | | | {quoted_s / floor_s:.3g} |"
        )
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
