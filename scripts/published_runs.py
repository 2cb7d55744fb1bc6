"""The evidence table of the README: published training runs and predictions, with the command of each."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout, suppress
from typing import Any, NamedTuple

from markdown_parts import markdown_table

from shapewright.app.cli.main import main
from shapewright.core.units import format_seconds

_MLPERF = "https://github.com/mlcommons/training_results_v5.0"
_RECIPES = "https://github.com/NVIDIA/dgxc-benchmarking"
_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge"
_FOUNDRY = "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
_405B = "predict llama-3.1-405b --seq-len 8192 --micro-batch-size 1 --pp 8 --virtual-pipeline 8 --cp 2"
_ADAMW = "--zero-stage 1 --optimizer adamw-narrow-gradients --software nemo-2024"
_MPT = "--zero-stage 3 --recompute full --software fsdp-2023 --seq-len 2048"


class PublishedRun(NamedTuple):
    """One published run.

    Attributes:
        title: Publisher and model.
        url: Where it was published.
        devices: Number and kind of devices.
        step_s: Published time of a step, or of the tokens of one. [s]
        command: Command that predicts it.
    """

    title: str
    url: str
    devices: str
    step_s: float
    command: str


# Per publisher and device, the runs with the most and the fewest devices whose settings are known.
RUNS = (
    PublishedRun(
        "MLPerf v5.0, Llama 3.1 405B, fp8", _MLPERF, "2,496 GB200", 5.827,
        f"{_405B} --device gb200 --tp 4 --dp 39 --global-batch 1248 --dtype fp8 --software nemo-2024",
    ),
    PublishedRun(
        "MLPerf v5.0, Llama 3.1 405B, fp8", _MLPERF, "256 GB200", 19.144,
        f"{_405B} --device gb200 --tp 4 --dp 4 --global-batch 448 --dtype fp8 --software nemo-2024",
    ),
    PublishedRun(
        "MLPerf v5.0, Llama 3.1 405B, fp8", _MLPERF, "8,192 H100", 5.180,
        f"{_405B} --device h100-sxm-80gb --tp 8 --dp 64 --global-batch 1536 --dtype fp8 --software nemo-2024",
    ),
    PublishedRun(
        "MLPerf v5.0, Llama 3.1 405B, fp8", _MLPERF, "512 H100", 55.134,
        f"{_405B} --device h100-sxm-80gb --tp 8 --dp 4 --global-batch 1152 --dtype fp8 --software nemo-2024",
    ),
    PublishedRun(
        "NVIDIA recipes 25.05, Llama 3.1 405B, bf16", _RECIPES, "512 H100", 19.81,
        f"{_405B} --device h100-sxm-80gb --tp 8 --dp 4 --global-batch 256 {_ADAMW}",
    ),
    PublishedRun(
        "NVIDIA Megatron-Bridge 25.11, Llama 3.1 405B, fp8", _BRIDGE, "128 B200", 6.197,
        f"{_405B} --device b200-sxm-180gb --tp 4 --dp 2 --global-batch 64 --dtype fp8 --narrow-inputs {_ADAMW}",
    ),
    PublishedRun(
        "llm-foundry, MPT-30B, bf16", _FOUNDRY, "128 H100", 7.451,
        f"predict llm-foundry-mpt-30b --device h100-sxm-80gb --dp 128 --micro-batch-size 8 --global-batch 1024 {_MPT}",
    ),
    PublishedRun(
        "llm-foundry, MPT-7B, bf16", _FOUNDRY, "128 A100", 10.175,
        f"predict llm-foundry-mpt-7b --device a100-sxm-40gb --dp 128 --micro-batch-size 18 --global-batch 2304 {_MPT}",
    ),
)  # fmt: skip


def evidence() -> str:
    """The published runs as a table, how far predictions are off, and their commands."""
    predictions = [_predict(run.command) for run in RUNS]
    ratios = [found["step_time_s"] / run.step_s for found, run in zip(predictions, RUNS, strict=True)]
    inside = sum(
        found["step_time_low_s"] <= run.step_s <= found["step_time_high_s"]
        for found, run in zip(predictions, RUNS, strict=True)
    )
    rows = [
        [
            f"[{run.title}]({run.url})",
            run.devices,
            format_seconds(run.step_s),
            f"{format_seconds(found['step_time_s'])} ({format_seconds(found['step_time_low_s'])} to "
            f"{format_seconds(found['step_time_high_s'])})",
            f"{ratio:.2f}",
        ]
        for run, found, ratio in zip(RUNS, predictions, ratios, strict=True)
    ]
    table = markdown_table(["published run", "devices", "published step", "predicted (90 % interval)", "ratio"], rows)
    commands = "\n".join(f"shapewright {run.command}" for run in RUNS)
    return (
        f"{table}\n\nPredicted over published time is {min(ratios):.2f} to {max(ratios):.2f}; {inside} of {len(RUNS)} "
        "published times lie inside the interval. No MLPerf run took part in a fit; `fsdp-2023` has factors fitted to "
        "the table of llm-foundry ([all tables](docs/accuracy.md)).\n\n"
        f"<details><summary>Commands, in the order of the table</summary>\n\n```\n{commands}\n```\n\n</details>"
    )


def _predict(command: str) -> dict[str, Any]:
    """JSON output of a command."""
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([*command.split(), "--json"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found
