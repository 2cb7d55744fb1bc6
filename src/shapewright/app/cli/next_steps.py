"""The next useful command, which every text output ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

# Command -> template of the next one; {job} is CONFIG with the model's fields, and the device.
_NEXT = {
    "predict": "check {job}",
    "check": "search {job}",
    "memory": "plan {job} --gpus 8 --global-batch 64",
    "compare": "plan {job} --gpus 8 --global-batch 64",
    "mfu": "check {job}",
    "design": "report ./config.json --device {device} -o review.html",
    "plan": "check {job}",
    "serve-plan": "serve-plan {job} {lengths} --format vllm",
    "flops": "predict {model} --device NAME",
    "params": "memory {model} --device NAME",
    "batch": "plan CONFIG --device NAME --gpus 8 --global-batch 64",
    "search": "report {job} -o review.html",
    "devices": "devices show h100-sxm-80gb",
    "models": "check llama-3-8b --device NAME",
    "rule": "check CONFIG --device NAME",
    "accuracy": "calibrate --store STORE -o calibration.json",
    "bench": "calibrate --store {store} -o calibration.json",
    "calibrate": "predict CONFIG --device NAME --calibration {output}",
}
# Parameters whose output is not a text for a person, or is a file.
_OTHER_OUTPUT = ("as_json", "as_csv", "oneline", "format_name")


def describe_next(context: click.Context) -> str:
    """Return the line on the next command after one that printed text; empty after others.

    Args:
        context: Context of the command that ran.
    """
    given = context.params
    template = _NEXT.get(context.info_name or "")
    if template is None or any(given.get(name) for name in _OTHER_OUTPUT) or given.get("form", "text") != "text":
        return ""
    from shlex import quote

    model = _model_words(given)
    device = given.get("device") or str(given.get("devices") or "NAME").partition(",")[0]
    words = {
        "model": model,
        "device": device,
        "job": f"{model} --device {quote(str(device))}",
        "lengths": f"--isl {_length_of(given.get('isl'), 1000)} --osl {_length_of(given.get('osl'), 200)}",
        "store": quote(str(given.get("store_path") or given.get("store") or "STORE")),
        "output": quote(str(given.get("output") or "FILE")),
    }
    return f"next: shapewright {template.format_map(words)}"


def _length_of(given: object, default: int) -> int:
    """Return a length that was given as one number, else a default."""
    return given if isinstance(given, int) else default


def _model_words(given: Mapping[str, Any]) -> str:
    """Return CONFIG and the fields of the model as they were given."""
    from shlex import quote

    config = given.get("config")
    words = [quote(config)] if isinstance(config, str) else ["-"] if config is not None else []
    for key, value in given.items():
        group, _, name = key.partition("__")
        if group == "model" and value is not None:
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif not isinstance(value, tuple):
                words.append(f"--{flag} {quote(str(value))}")
    return " ".join(words) or "CONFIG"
