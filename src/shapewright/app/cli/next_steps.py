"""The next useful command, which every text output ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

# Command -> template of the next one. {job} is CONFIG, the device and every option of _SCENARIO and the model that was
# given; {model_job} leaves out those of _SCENARIO, which the next command chooses or does not take.
_NEXT = {
    "predict": "check {job}",
    "check": "search {job}",
    "memory": "plan {model_job} --gpus 8 --global-batch 64",
    "compare": "plan {model_job} --gpus 8 --global-batch 64",
    "mfu": "check {job}",
    "design": "report ./config.json --device {device} -o review.html",
    "plan": "check {model_job}",
    "serve-plan": "serve-plan {model_job} {lengths} --format vllm",
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
# Options that a command keeps for the next: fields of workload and layout, and single options.
_SCENARIO = ("workload", "layout", "software", "calibration", "node_size", "network_gbit_per_s")
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

    model = " ".join((*_config_words(given), *_given_options(context, "model"))) or "CONFIG"
    device = given.get("device") or str(given.get("devices") or "NAME").partition(",")[0]
    on_device = f"--device {quote(str(device))}"
    words = {
        "model": model,
        "device": device,
        "job": " ".join((model, on_device, *_given_options(context, *_SCENARIO))),
        "model_job": f"{model} {on_device}",
        "lengths": f"--isl {_length_of(given, 'prompt_len', 1000)} --osl {_length_of(given, 'output_len', 200)}",
        "store": quote(str(given.get("store_path") or given.get("store") or "STORE")),
        "output": quote(str(given.get("output") or "FILE")),
    }
    return f"next: shapewright {template.format_map(words)}"


def _length_of(given: Mapping[str, Any], name: str, default: int) -> int:
    """Return a length that was given as one number, else a default."""
    length = given.get(name)
    return length if isinstance(length, int) else default


def _config_words(given: Mapping[str, Any]) -> list[str]:
    """Return CONFIG as it was given: a name, or - for standard input."""
    from shlex import quote

    config = given.get("config")
    return [] if config is None else [quote(config) if isinstance(config, str) else "-"]


def _given_options(context: click.Context, *groups: str) -> list[str]:
    """Return the options of some groups (model, workload, layout) that were given, as one would type them."""
    from shlex import quote

    words: list[str] = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if (option.name or "").partition("__")[0] not in groups or value is None:
            continue
        if isinstance(value, bool):
            words.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [option.opts[-1], quote(text)]
    return words
