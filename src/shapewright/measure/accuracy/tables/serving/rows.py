"""Read the rows of serving_throughput.csv and serving_static.csv: whole engines under load.

Each row becomes a load on an instance of the server that it names (pricing.servers), by its metric: queued requests, a
closed loop at a concurrency, an open loop at a rate, a static batch. Unstated settings are the server's defaults, and
counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.published_rows import UnusableRowError
from shapewright.measure.accuracy.tables.serving import mlperf
from shapewright.measure.accuracy.tables.serving.mlperf import make_instance
from shapewright.models.read import Model, list_presets, read_model
from shapewright.optimize.serving.closed_form import Load, queued, static_batch
from shapewright.optimize.serving.request import ServingFormat
from shapewright.optimize.serving.steady_loads import disaggregated, open_loop
from shapewright.pricing.servers import Server, load_server, server_names
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.optimize.serving.point import Instance

FORMAT = Format(
    numbers={"num_gpus": 1},
    labels=(
        "source",
        "framework",
        "framework_version",
        "model_id",
        "weight_dtype",
        "kv_cache_dtype",
        "device",
        "metric",
        "lengths",
        "input_kind",
        "notes",
    ),
    optional=(
        "tp",
        "pp",
        "ep",
        "attention_dp",
        "disaggregated",
        "input_len",
        "output_len",
        "num_requests",
        "concurrency",
        "request_rate",
        "output_tokens_per_s",
        "ttft_s",
        "tpot_s",
        "e2e_latency_s",
    ),
)
STATIC_FORMAT = Format(
    numbers={"tp": 1, "input_len": 1, "batch_size": 1, "output_len": 2},
    labels=("model", "device", "weight_dtype", "power_capped"),
    positive=("prompt_time_s", "token_time_s", "e2e_time_s"),
)

_PRESETS = {
    "gptj-6b": "gpt-j-6b",
    "llama2-7b": "llama-2-7b",
    "llama2-70b": "llama-2-70b",
    "llama3-8b": "llama-3.1-8b",
    "llama3-70b": "llama-3.1-70b",
    "llama3.1-405b": "llama-3.1-405b",
    "llama4-maverick": "llama-4-maverick",
    "llama4-scout": "llama-4-scout",
    "deepseek-r1": "deepseek-v3",
    "minimax-m2.5": "minimax-m2",
}
"""Presets of models that the tables name otherwise; R1 and M2.5 have the shapes of V3 and M2."""
_FORMATS = {
    "fp16": ("fp16", "fp16"),
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "nvfp4": ("fp4", "fp4"),
    "mxfp4": ("fp8", "fp4"),
}
"""Formats of GEMMs and of weights by that of the table; on devices without fp4, MXFP4 weights meet 16 bits."""
_SERVERS = {"TensorRT-LLM": "trtllm", "TensorRT": "trtllm", "vLLM": "vllm", "SGLang": "sglang"}
_VERSION = re.compile(r"(\d+)\.(\d+)")
_NEWEST = {"latest 2025-09": "0.5", "nightly 2026-02": "0.16", "2024-12 (about 0.4.0)": "0.4"}
# Minor version after which TensorRT-LLM counts from 1.0.
_FIRST_MAJOR = 22
_STATIC_SERVER = "vllm-0.2"
# Requests where a page states none: as TensorRT-LLM's pages do for their usual lengths.
_REQUESTS = {(128, 128): 30000, (128, 2048): 3000, (2048, 128): 3000, (500, 2000): 3000, (1000, 1000): 3000}
_OTHER_REQUESTS = 1500
_QUEUED = ("offline_max_throughput", "offline_batch")
_SHAREGPT = (220.0, 195.0)
"""Mean tokens of prompt and answer of ShareGPT under SGLang's benchmark script, as another run of it states."""
_REPEATED_PROMPTS = "InferenceX token_position_decode_slo"
"""Source whose runs follow each other on one server, in rising concurrency, and begin with the prompts of the run
before: its script draws them from one seed, and vLLM keeps prefixes."""
_REPEATED_SHARE = 0.65
"""Share of such a prompt that repeats: its text becomes fewer tokens, and the rest is drawn anew. From MiniMax-M2.5,
whose repeated prompts take 0.33 to 0.4 of the time of new ones."""
_KEPT_STATES = 10
"""States of a model's recurrent layers that vLLM keeps of a prompt. From Qwen3.5: 80 prompts of 10,240 tokens were
known to the next run, 80 of 12,288 and 160 of 1,024 were not, where one state is as large as 1,560 tokens."""
_STEPS = re.compile(r"num-scheduler-steps (\d+)")
_SPLIT = re.compile(r"(\d+) prefill \+ (\d+) decode workers")


@dataclass(frozen=True)
class ServedRow:
    """One published row, completed.

    Attributes:
        server: The server.
        instance: Model, device, layout, formats and lengths.
        load: The load, ready to be priced.
        metric: Metric of the row.
        measured: Measured values by quantity: a field of LoadTimes, or ``e2e_s``.
    """

    server: Server
    instance: Instance
    load: Load
    metric: str
    measured: Mapping[str, float]

    @property
    def pair(self) -> tuple[str, str]:
        """Model and device, which the rows are held out by."""
        return self.instance.scenario.config.name, self.instance.scenario.device.name


def read_served(columns: Columns, context: Context) -> Iterator[ServedRow]:
    """Complete the rows of serving_throughput.csv; reasons for the others are counted in the context."""
    assumed: Counter[str] = Counter()
    for device, _, rows in context.device_groups(columns, "device"):
        for place, repeated in enumerate(_repeated_prompts(rows)):
            words, numbers = rows.row(place)
            numbers["repeated_prompts"] = repeated
            try:
                yield _read_row(words, numbers, context.with_pricing(device), assumed)
            except ShapewrightError as error:
                context.skipped[str(error)] += 1
    if assumed:
        context.note(
            "serving_throughput: assumed: " + "; ".join(f"{count} rows {what}" for what, count in assumed.most_common())
        )


def _repeated_prompts(rows: Columns) -> list[float]:
    """Return the prompts of each row that the server knows from the run before, at the next lower concurrency."""
    names = ("tp", "ep", "attention_dp", "input_len", "output_len")
    keys = [
        (rows.labels["model_id"][place], *(str(rows.numbers[name][place]) for name in names))
        if rows.labels["source"][place].startswith(_REPEATED_PROMPTS)
        else ()
        for place in range(rows.num_rows)
    ]
    runs = list(zip(keys, rows.numbers["concurrency"], rows.numbers["num_requests"], strict=True))
    return [
        max((float(count) for each, level, count in runs if each == key and level < own), default=0.0) if key else 0.0
        for key, own, _ in runs
    ]


def _read_row(words: Mapping[str, str], numbers: dict[str, float], device: Device, assumed: Counter[str]) -> ServedRow:
    """Complete one row.

    Raises:
        UnusableRowError: it lacks a field, or is not predicted.
        ShapewrightError: its fields contradict each other, or the model does not fit.
    """
    metric = words["metric"]
    if metric.startswith("production"):
        raise UnusableRowError(f"{metric}: input lengths and concurrency are not stated")
    model = read_model(preset_of(words["model_id"]))
    server = server_of(words["framework"], words["framework_version"])
    if steps := _STEPS.search(f"{words['framework_version']} {words['notes']}"):
        server = replace(server, scheduler_steps=int(steps.group(1)))
    formats = read_formats(words["weight_dtype"], words["kv_cache_dtype"], device, server)
    if metric.startswith("mlperf"):
        instance, load = mlperf.best_load(model, device, formats, server, metric, numbers)
        return ServedRow(server, instance, load, metric, {"output_tokens_per_s": numbers["output_tokens_per_s"]})
    lengths = [numbers["input_len"], numbers["output_len"]]
    if np.isnan(lengths).any() and words["input_kind"] == "ShareGPT":
        assumed["of ShareGPT state no lengths: those of another run of the script"] += 1
        lengths = [own if np.isnan(known) else known for own, known in zip(_SHAREGPT, lengths, strict=True)]
    if np.isnan(lengths).any():
        raise UnusableRowError("not stated: input_len or output_len")
    split = _SPLIT.search(words["notes"]) if numbers["disaggregated"] == 1.0 else None
    if split is None and numbers["disaggregated"] == 1.0:
        raise UnusableRowError("disaggregated: instances that prefill and decode are not stated")
    layout = _read_layout(model, numbers, server, assumed)
    instance = make_instance(model, device, layout, formats, server, *map(round, lengths))
    count = numbers["num_requests"]
    if np.isnan(count):
        assumed["state no number of requests: as TensorRT-LLM's pages for those lengths"] += 1
        count = _REQUESTS.get((round(lengths[0]), round(lengths[1])), _OTHER_REQUESTS)
    repeated, typical = numbers["repeated_prompts"], 1.0
    if repeated and repeated <= _known_prompts(instance):
        # A replica has seen the prompts that were sent to it. They are half of the run at least, so the request in the
        # middle repeats one.
        known = _REPEATED_SHARE / instance.layout.data_parallel
        mean_share = known * repeated / count
        typical = (1.0 - known) / (1.0 - mean_share)
        request = replace(instance.request, cached_len=int(mean_share * instance.request.prompt_len))
        instance = replace(instance, request=request)
    if split:
        units = int(split.group(1)), int(split.group(2))
        longest = _longest(words["lengths"], count)
        load = disaggregated(instance, *units, numbers["concurrency"], count, longest=longest)
    else:
        longest = _longest(words["lengths"], count)
        load = _load_of(metric, instance, count, numbers, longest=longest, typical=typical)
    measured = {"ttft_s": numbers["ttft_s"], "tpot_s": numbers["tpot_s"]}
    if metric in _QUEUED or metric == "static_batch_throughput":
        measured = {}
    if metric == "static_batch_latency":
        measured["e2e_s"] = numbers["e2e_latency_s"]
    measured["output_tokens_per_s"] = numbers["output_tokens_per_s"]
    kept = {key: value for key, value in measured.items() if value > 0.0}
    if not kept:
        raise UnusableRowError("no throughput and no latency is stated")
    return ServedRow(server, instance, load, metric, kept)


def _known_prompts(instance: Instance) -> float:
    """Return the prompts that the caches of an instance keep, with the states of recurrent layers."""
    request = instance.request
    ends = (instance.cache_bytes(length) for length in (request.total_len, 1))
    kept = [whole + (_KEPT_STATES - 1) * one for whole, one in zip(*ends, strict=True)]
    free = instance.free_bytes(request.server.pass_tokens)
    most: float = min(own / each for own, each in zip(free, kept, strict=True) if each)
    return instance.layout.data_parallel * most


def _longest(lengths: str, count: float) -> float:
    """Return the longest of some answers over their mean: uniform lengths, or about exponential ones of a data set.

    The expected largest of n exponential values is ln(n) + 0.577 of their mean. Answers that end by themselves below a
    limit, whose mean is a third to a half of it, count as uniform.
    """
    if lengths.startswith("uniform") or lengths.endswith("free output"):
        return 2.0
    return float(np.log(max(count, 1.0)) + np.euler_gamma) if lengths == "dataset" else 1.0


def _load_of(
    metric: str, instance: Instance, count: float, numbers: Mapping[str, float], *, longest: float, typical: float
) -> Load:
    concurrency = numbers["concurrency"]
    if metric in _QUEUED:
        return queued(instance, count, longest=longest)
    if metric.startswith("static_batch"):
        return static_batch(instance, round(concurrency if concurrency > 0.0 else count))
    if metric == "online_concurrency":
        return queued(instance, max(count, concurrency), concurrency, longest=longest, typical=typical)
    if metric == "online_request_rate":
        return open_loop(instance, count, numbers["request_rate"], longest=longest)
    raise UnusableRowError(f"unknown metric {metric!r}")


def server_of(framework: str, version: str) -> Server:
    """Return the server that a row names: the known version that is nearest.

    Raises:
        UnusableRowError: the framework is unknown.
    """
    engine = _SERVERS.get(framework)
    if engine is None:
        raise UnusableRowError(f"no server for framework {framework!r}")
    if framework == "TensorRT" or version.startswith("after 1.0"):
        return load_server("trtllm")
    found = _VERSION.search(_NEWEST.get(version, version))
    if not found:
        return load_server(engine)
    wanted = _rank(found)
    known = [name for name in server_names() if name.partition("-")[0] == engine]
    return load_server(min(known, key=lambda name: abs(_rank(_VERSION.search(name)) - wanted)))


def _rank(version: re.Match[str] | None) -> int:
    """Return a number that orders versions; 1.0 follows 0.21."""
    assert version is not None
    return _FIRST_MAJOR * int(version.group(1)) + int(version.group(2))


def read_formats(weights: str, cache: str, device: Device, server: Server) -> ServingFormat:
    """Return the formats of a row; those that the device cannot multiply meet 16 bits.

    Raises:
        UnusableRowError: the format is unknown.
    """
    if weights not in _FORMATS:
        raise UnusableRowError(f"unknown weight_dtype {weights!r}")
    dtype, weight_dtype = _FORMATS[weights]
    if weights == "mxfp4" and "fp4" not in device.dense_flops_per_s:
        dtype = "bf16"
    kept = "fp8" if cache == "fp8" else server.cache_dtype(dtype, weight_dtype)
    return ServingFormat(dtype, weight_dtype, kept)


def preset_of(name: str) -> str:
    """Return the preset of a model that the tables name.

    Raises:
        UnusableRowError: there is none.
    """
    preset = _PRESETS.get(name, name)
    if preset not in list_presets():
        raise UnusableRowError(f"no preset of {name!r}")
    return preset


def _read_layout(model: Model, numbers: Mapping[str, float], server: Server, assumed: Counter[str]) -> ParallelLayout:
    """Return the layout; with attention data parallelism every device holds a replica of the attention.

    Devices beyond one instance hold further ones, which share the requests.
    """
    devices = round(numbers["num_gpus"])
    stages = degree_of(numbers["pp"])
    if np.isnan(numbers["tp"]):
        assumed["state no tensor parallelism: over all devices"] += 1
    tensor = devices // stages if np.isnan(numbers["tp"]) else round(numbers["tp"])
    own: dict[str, Any] = {}
    is_unstated = np.isnan(numbers["attention_dp"]) and devices > 1 and server.attention_data_parallel
    if model.config.is_moe and is_unstated:
        assumed["of experts state no attention data parallelism: as the server's pages"] += 1
    if model.config.is_moe and (numbers["attention_dp"] == 1.0 or is_unstated):
        tensor, own = 1, {"data_parallel": devices // stages, "expert_parallel": devices // stages}
    elif model.config.is_moe and numbers["ep"] > 1.0:
        own = {"expert_parallel": round(numbers["ep"]), "expert_tensor_parallel": 1}
    elif numbers["disaggregated"] != 1.0:
        own = {"data_parallel": devices // (tensor * stages)}
    return ParallelLayout(tensor_parallel=tensor, pipeline_parallel=stages, **own)


def degree_of(value: float) -> int:
    """Return a parallel degree: 1 where none is stated."""
    return 1 if np.isnan(value) else round(value)


def read_static(columns: Columns, context: Context) -> Iterator[ServedRow]:
    """Complete the rows of serving_static.csv; reasons for the others are counted in the context."""
    server = load_server(_STATIC_SERVER)
    for device, (_, model_id, power), rows in context.device_groups(columns, "device", "model", "power_capped"):
        if power == "1":
            context.skipped["a power cap is not modelled"] += rows.num_rows
        for place in range(rows.num_rows if power != "1" else 0):
            words, numbers = rows.row(place)
            try:
                formats = read_formats(words["weight_dtype"], "", device, server)
                layout = ParallelLayout(tensor_parallel=round(numbers["tp"]))
                lengths = (round(numbers["input_len"]), round(numbers["output_len"]))
                model, own = read_model(preset_of(model_id)), context.with_pricing(device)
                instance = make_instance(model, own, layout, formats, server, *lengths)
                load = static_batch(instance, round(numbers["batch_size"]))
            except ShapewrightError as error:
                context.skipped[str(error)] += 1
                continue
            names = {"e2e_s": "e2e_time_s", "ttft_s": "prompt_time_s", "tpot_s": "token_time_s"}
            yield ServedRow(server, instance, load, "", {key: numbers[column] for key, column in names.items()})
