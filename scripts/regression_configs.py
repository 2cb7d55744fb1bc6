"""Configs of the regression grid: every model type with each key that its reader asks for changed in turn.

Of each model type also the work and the memory of some jobs, since few types have a preset for a command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from regression_answers import Answer, checksum, shorten, summarize

from shapewright.core.errors import ShapewrightError
from shapewright.lowering.model import lower
from shapewright.memory.estimate import estimate_memory
from shapewright.models.families.fallback import transformers_types
from shapewright.models.families.registry import FAMILIES
from shapewright.models.families.vision_language import TOWERS
from shapewright.models.hf_config import read_hf_config, read_vision_tower
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# A longer text is cut, and told apart by a checksum.
_MOST_TEXT = 60
# Values that each key has in turn; lists have an entry for each layer.
_OTHERS: tuple[Any, ...] = (3, 16, True, False, None)
_ENTRIES = (("full_attention", "sliding_attention"), ("dense", "sparse"), ("attention", "mamba"), (1, 0))
_WORDS_OF_LISTS = ("layer", "types", "pattern")
# Keys that every reader reads in the same way: changed for the first model type alone.
_SHARED = (
    "_class_name", "quantization_config", "tie_word_embeddings", "hidden_act", "attention_dropout",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
# Sizes of a model type whose config states no default.
_SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000, "intermediate_size": 512,
}  # fmt: skip

_JOBS = {
    "training": (Workload(micro_batch_size=2, seq_len=384), ParallelLayout()),
    "training, unfused": (
        Workload(micro_batch_size=2, seq_len=384, attention="unfused", kernels="torch"), ParallelLayout(),
    ),
    "training on 8": (
        Workload(micro_batch_size=1, seq_len=512, global_batch_size=16),
        ParallelLayout(tensor_parallel=2, pipeline_parallel=2, data_parallel=2, sequence_parallel=True, zero_stage=1),
    ),
    "prefill": (Workload(phase="prefill", micro_batch_size=2, seq_len=384, context_len=128), ParallelLayout()),
    "prefill, unfused": (Workload(phase="prefill", seq_len=384, attention="unfused"), ParallelLayout()),
    "decode": (Workload(phase="decode", micro_batch_size=8, context_len=400), ParallelLayout()),
    "decode on 2": (Workload(phase="decode", context_len=400), ParallelLayout(tensor_parallel=2)),
}  # fmt: skip


class _Asked(dict[str, Any]):
    """A config that notes the keys that are asked for."""

    def __init__(self, values: Mapping[str, Any], asked: dict[tuple[str, ...], None], path: tuple[str, ...]) -> None:
        super().__init__(
            {key: _Asked(each, asked, (*path, key)) if type(each) is dict else each for key, each in values.items()}
        )
        self._asked, self._path = asked, path

    def __contains__(self, key: object) -> bool:
        self._asked[(*self._path, str(key))] = None
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self._asked[(*self._path, key)] = None
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._asked[(*self._path, key)] = None
        return super().get(key, default)


def list_configs() -> dict[str, dict[str, Any]]:
    """List a config of every model type that has a table, of every tower, and of every type read by its defaults."""
    configs: dict[str, dict[str, Any]] = {name: {"model_type": name} for name in FAMILIES}
    configs |= {
        name: {**spec["defaults"], "model_type": name}
        for name, spec in transformers_types().items()
        if name not in FAMILIES and "defaults" in spec
    }
    return configs | {f"tower of {name}": {"model_type": name, "vision_config": {}} for name in TOWERS}


# Model types whose keys are changed: the first of each reader, and some of those without a table.
_VARIED = {family.model_types[0] for family in FAMILIES.values()} | {"afmoe", "aria_text", "biogpt", "dots1"}


def answer_configs(name: str) -> dict[str, Answer]:
    """Read the config of a model type, and what each key that its reader asks for changes."""
    base = list_configs()[name]
    asked: dict[tuple[str, ...], None] = {}
    first = _read_config(name, _Asked(base, asked, ()))
    if "refused" in first:
        base = {**_SIZES, **base}
        first = _read_config(name, _Asked(base, asked, ()))
    answers: dict[str, Answer] = {name: {"fields": _describe_fields(first), **_answer_jobs(name, base)}}
    if name not in _VARIED and not name.startswith("tower of "):
        return answers
    for *path, key in list(asked):
        if key in _SHARED and name != next(iter(FAMILIES)):
            continue
        others = list(_OTHERS)
        if any(word in key for word in _WORDS_OF_LISTS):
            num_layers = first.get("num_layers", 4)
            others += [[one, *[two] * (num_layers - 1)] for one, two in _ENTRIES]
        told = {json.dumps(other)[:20]: _find_change(name, base, (*path, key), other, first) for other in others}
        words = "; ".join(f"{other}: {change}" for other, change in told.items() if change)
        if words and key != "model_type":
            shown = words if len(words) <= _MOST_TEXT else f"{words[:_MOST_TEXT]}... {checksum(words)}"
            answers[f"{name}: {'.'.join((*path, key))}"] = {"fields": shown}
    return answers


def _answer_jobs(name: str, values: Mapping[str, Any]) -> Answer:
    """FLOPs, bytes and memory of jobs of a model type; where one is refused, the message."""
    if name.startswith("tower of "):
        return {}
    answer: Answer = {}
    for job, (workload, layout) in _JOBS.items():
        try:
            config = read_hf_config(values).config
            operations = lower(config, workload, layout)
            memory = estimate_memory(config, workload, layout)
        except ShapewrightError as error:
            answer[job] = shorten(error)
            continue
        answer[f"{job}: flops"] = summarize([float(one.flops * one.repeats) for one in operations])
        answer[f"{job}: bytes"] = summarize([float(one.num_bytes * one.repeats) for one in operations])
        answer[f"{job}: memory"] = summarize([float(part) for part in memory.components.values()])
    return answer


def _find_change(
    name: str, base: Mapping[str, Any], keys: tuple[str, ...], other: object, first: Mapping[str, Any]
) -> str:
    """Fields that differ where a key has another value, or "refused" where no config has that value."""
    changed = json.loads(json.dumps(base))
    inner = changed
    for each in keys[:-1]:
        inner = inner[each]
    inner[keys[-1]] = other
    read = _read_config(name, changed)
    told = {field: value for field, value in read.items() if first.get(field) != value}
    lost = {} if "refused" in read else {field: "" for field in first if field not in read}
    return _describe_fields(told | lost)


def _read_config(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a config sets to other values than their defaults, or its refusal."""
    try:
        if name.startswith("tower of "):
            config, more = read_vision_tower(values, 1024), {}
        else:
            reading = read_hf_config(values)
            config = reading.config
            notes = [shorten(note) for note in reading.notes]
            more = {"text_path": reading.text_path, "notes": notes, "block_scales": reading.has_block_scales}
    except ShapewrightError as error:
        return {"refused": checksum(shorten(error))[:3]}
    defaults = {spec.name: spec.default for spec in fields(TransformerConfig)}
    own = {key: value for key, value in asdict(config).items() if value != defaults[key] and key != "model_type"}
    return own | {key: value for key, value in more.items() if value}


def _describe_fields(read: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_describe(value)}" for key, value in read.items())


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list) and len(value) > 6:
        value = (len(value), checksum(str(value)))
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each}
    return str(value).replace(" ", "").replace("'", "")
