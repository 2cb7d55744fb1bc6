"""Read torchtitan: job configs in TOML, and flavors of models in Python files, which are parsed and never run.

Source: config/job_config.py and the models llama3 and qwen3 of pytorch/torchtitan 0.2, for names and defaults.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from shapewright.app.formats.readers.reading import Reading, Values, literal, parse_python, round_up
from shapewright.core.errors import ConfigError, short_repr

_TITAN_SIZES = {
    "dim": "hidden_size", "n_layers": "num_layers", "n_heads": "num_heads", "n_kv_heads": "num_kv_heads",
    "vocab_size": "vocab_size", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
}  # fmt: skip
_TITAN_LAYOUT = {
    "tensor_parallel_degree": "tensor_parallel", "pipeline_parallel_degree": "pipeline_parallel",
    "context_parallel_degree": "context_parallel", "expert_parallel_degree": "expert_parallel",
}  # fmt: skip
_TITAN_DEFAULTS = {"n_layers": 32, "n_heads": 32, "dim": 4096, "multiple_of": 256, "vocab_size": 128256}
_SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "1f1b", "gpipe": "gpipe"}
_COMMENTED = re.compile(r'^#\s+"([^"]+)": (\w+\(.*\)),$', re.MULTILINE)


def find_flavors(text: str) -> dict[str, dict[str, Any]]:
    """Flavors of a Python file of torchtitan, by name: the literal arguments of calls in a table, never run."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(parse_python(text)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Call):
                    found[key.value] = _arguments(value)
    return found


def _arguments(call: ast.Call) -> dict[str, Any]:
    arguments: dict[str, Any] = {"class": getattr(call.func, "id", "")}
    for keyword in call.keywords:
        try:
            arguments[str(keyword.arg)] = literal(keyword.value)
        except (ValueError, TypeError, RecursionError):
            continue
    return arguments


def read_flavor(text: str, flavor: str) -> Reading:
    """Read one flavor of a Python file of torchtitan.

    Raises:
        ConfigError: the file has no such flavor.
    """
    flavors = {name: args for name, args in find_flavors(text).items() if "dim" in args}
    if not flavor and len(flavors) == 1:
        flavor = next(iter(flavors))
    if flavor not in flavors:
        known = ", ".join(flavors) or "none"
        raise ConfigError(f"no flavor {short_repr(flavor)}; the file has {known}: give FILE.py::FLAVOR")
    fields, untimed, unread = _flavor_fields(flavors[flavor])
    return Reading(format="torchtitan-toml", fields=fields, untimed=untimed, unread=unread)


def _flavor_fields(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float], tuple[str, ...]]:
    values = Values({**_TITAN_DEFAULTS, **arguments})
    is_qwen3 = str(values.get("class", default="")).startswith("Qwen3")
    fields = values.pick(_TITAN_SIZES)
    if "intermediate_size" not in fields:
        width = int(8 * fields["hidden_size"] / 3)
        multiplier = values.number("ffn_dim_multiplier")
        width = width if multiplier is None else int(multiplier * width)
        fields["intermediate_size"] = round_up(width, values.number("multiple_of"))
    values.skip("multiple_of", "ffn_dim_multiplier")
    fields["max_position_embeddings"] = values.number("max_seq_len", default=4096 if is_qwen3 else 131072)
    fields |= {
        "norm": "rmsnorm", "activation": "silu", "gated_mlp": True, "position_embedding": "rotary",
        "qk_norm": "per-head" if values.flag("qk_norm", default=is_qwen3) else "none",
        "tied_embeddings": values.flag("enable_weight_tying"),
    }  # fmt: skip
    untimed = values.pick({"rope_theta": "rotary_base", "norm_eps": "norm_epsilon"})
    return fields, untimed, values.unread()


def read_torchtitan(text: str) -> Reading:
    """Read a job config in TOML; its flavor stands in a comment at its top, or is given as FILE.py::FLAVOR.

    Raises:
        ConfigError: the file is not valid TOML.
    """
    try:
        file = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the file is not valid TOML: {str(error)[:150]}; check that it is complete") from None
    flavors = {name: _call_arguments(call) for name, call in _COMMENTED.findall(text)}
    model = Values(file.get("model") or {})
    arguments = flavors.get(model.get("flavor", default=""), {})
    model.skip("name")
    fields, untimed, unread = _flavor_fields(arguments) if arguments else ({}, {}, ("model.flavor",))
    layout, not_laid_out = _titan_layout(Values(file.get("parallelism") or {}), fields.get("num_layers"))
    workload, not_trained = _titan_workload(file, layout)
    others = set(file) - {"model", "parallelism", "training", "activation_checkpoint"}
    return Reading(
        format="torchtitan-toml",
        fields=fields,
        workload=workload,
        layout=layout,
        untimed=untimed,
        unread=(*unread, *not_laid_out, *not_trained, *sorted(others)),
    )


def _call_arguments(text: str) -> dict[str, Any]:
    call = ast.parse(text, mode="eval").body
    return _arguments(call) if isinstance(call, ast.Call) else {}


def _titan_layout(values: Values, num_layers: int | None) -> tuple[dict[str, Any], list[str]]:
    layout: dict[str, Any] = values.pick(_TITAN_LAYOUT)
    replicas = values.number("data_parallel_replicate_degree", default=1)
    shards = values.number("data_parallel_shard_degree", default=-1)
    if shards >= 1:
        layout["data_parallel"] = replicas * shards
    reshards = values.get("fsdp_reshard_after_forward", default="default")
    has_stages = layout.get("pipeline_parallel", 1) > 1
    # By default weights stay gathered where there are pipeline stages.
    keeps = reshards == "never" or (reshards == "default" and has_stages)
    layout["zero_stage"] = 0 if shards == 1 else 2 if keeps else 3
    schedule = str(values.get("pipeline_parallel_schedule", default="1F1B")).lower()
    if has_stages and schedule in _SCHEDULES:
        layout["pipeline_schedule"] = _SCHEDULES[schedule]
    spare = [values.number(f"pipeline_parallel_{end}_stage_less_layers", default=1) for end in ("first", "last")]
    per_chunk = values.number("pipeline_parallel_layers_per_stage")
    if has_stages and per_chunk and num_layers:
        layout["virtual_pipeline"] = -(-(num_layers + sum(spare)) // per_chunk) // layout["pipeline_parallel"]
    values.skip("pipeline_parallel_microbatch_size")
    return layout, [f"parallelism.{key}" for key in values.unread()]


def _titan_workload(file: Mapping[str, Any], layout: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    train, saved = Values(file.get("training") or {}), Values(file.get("activation_checkpoint") or {})
    workload: dict[str, Any] = {"phase": "train", "dtype": "bf16", "attention": "flash"}
    workload |= train.pick({"seq_len": "seq_len", "global_batch_size": "global_batch_size"})
    local = train.number("local_batch_size", "batch_size")
    if layout.get("pipeline_parallel", 1) > 1:
        # The local batch is split into micro-batches; the default is one sequence each.
        section = file.get("parallelism") or {}
        workload["micro_batch_size"] = section.get("pipeline_parallel_microbatch_size", 1)
        if local and "data_parallel" in layout:
            workload.setdefault("global_batch_size", local * layout["data_parallel"])
    elif local:
        workload["micro_batch_size"] = local
    workload["recompute"] = saved.get("mode", default="selective")
    saved.skip("selective_ac_option")
    return workload, [f"training.{key}" for key in train.unread()]
