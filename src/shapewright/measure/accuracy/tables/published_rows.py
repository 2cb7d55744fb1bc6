"""Read the rows of published_training_throughput.csv, fill the gaps that other fields imply, and reject the rest.

Usable rows are of pre-training and state shape, batches and layout. Rows of mixtures of experts state layout and
batches but not the shape, which is that of the preset they name. Each filled gap is counted as an assumption, which
``shapewright accuracy`` prints; a micro-batch, a layout or a time that nothing implies stays a gap.

The software of a row follows from the release that its source names and from NVIDIA's public recipes of that release
(NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs: ``cuda_graph_impl``, ``cuda_graph_scope``,
``moe_a2a_overlap``). Mixtures of experts ran in three ways, which release, device and layout determine:

- launched by the host, one kernel after the other, with a wait in each layer for the number of rows of each expert;
- attention and router in CUDA graphs, so that only experts are launched: on Grace's CPUs, and since 26.02.01 on
  Blackwell with x86 without a pipeline;
- since 26.06 the whole iteration in one graph, with exchanges overlapped with another micro-batch, for block-scaled
  formats.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.measure.accuracy.measured_files import Format
from shapewright.models.read import list_presets, read_model
from shapewright.pricing.software import TUNED, UNNAMED

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns

Release = tuple[int, ...]

NVIDIA = "nemo-2024"
"""Generation of NVIDIA's dense recipes."""
# Generation of software by the prefix of a source.
_SOFTWARE = {
    "MLPerf": TUNED,  # by vendors, for the benchmark
    "NVIDIA NeMo": NVIDIA,
    "NVIDIA dgxc-benchmarking": NVIDIA,  # recipes of NeMo's containers 25.02 to 25.04
    "NVIDIA Megatron-Bridge": NVIDIA,
    "mosaicml/llm-foundry": "fsdp-2023",
    "torchtitan": "fsdp-2024",
    "BLOOM": "megatron-deepspeed-2021",
    "MT-NLG": "megatron-deepspeed-2021",
    "Megatron-LM": "megatron-2020",
    "BigScience": "megatron-2020",
    "2104.04473": "megatron-2020",
}
LAUNCHED, CAPTURED, WHOLE = "nemo-moe-2025", "nemo-moe-2025-graphs", "nemo-moe-2026"
"""Generations of NVIDIA's recipes with experts: kernels launched singly, attention in graphs, all in one graph."""
_RELEASE = re.compile(r"(\d\d)\.(\d\d)(?:\.(\d\d))?")
_WHOLE_SINCE: Release = (26, 6, 0)
_CAPTURED_BESIDE_X86_SINCE: Release = (26, 2, 1)
# Recipes without CUDA graphs where others of their time have them: GPT-OSS except on GB300 and B300.
_LAUNCHED_ANYWAY = {"gpt-oss-120b": ("blackwell", "hopper")}
_SHORT_OF_MEMORY = ("b200-sxm-180gb", "gb200")


def recomputed_modules(preset: str, device: Device, dtype_words: str, software: str) -> str | None:
    """Return the modules that NVIDIA's recipes recompute (``recompute_modules``), which its tables do not state.

    If the iteration is one graph, recipes keep all activations.
    """
    if software not in (LAUNCHED, CAPTURED):
        return None
    is_wide = "bf16" in dtype_words
    if preset == "gpt-oss-120b" and is_wide and device.name in _SHORT_OF_MEMORY:
        return "layernorm,moe_act"
    return ("moe_act" if is_wide else "mla_up_proj") if preset == "deepseek-v3" else None


def software_of(source: str, framework: str = "") -> str:
    """Return the generation of software that a source names, or that of unnamed software.

    Args:
        framework: Framework that a row of MLPerf states: NVIDIA's containers run NeMo; others are not named.
    """
    if any(word in framework for word in _NVIDIA_FRAMEWORKS):
        return NVIDIA
    return next((name for words, name in _SOFTWARE.items() if source.startswith(words)), UNNAMED)


_NVIDIA_FRAMEWORKS = ("NVIDIA", "NGC", "NeMo", "Nemo")


def release_of(source: str) -> Release:
    """Return the release that a source names, such as (26, 6, 1) of ``26.06.01``; empty if it names none.

    >>> release_of("NVIDIA Megatron-Bridge 26.06.01 NeMo Container"), release_of("torchtitan")
    ((26, 6, 1), ())
    """
    found = _RELEASE.search(source)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def software_of_experts(source: str, preset: str, device: Device, dtype_words: str, num_stages: int) -> str:
    """Return the generation of software that ran a mixture of experts.

    Args:
        dtype_words: Element format as published; block-scaled formats are ``mxfp8``, ``fp8-mx`` and ``nvfp4``.
    """
    if software_of(source) != NVIDIA:
        return UNNAMED
    release = release_of(source)
    has_grace = device.host_bandwidth_bytes_per_s is not None
    is_block_scaled = "mx" in dtype_words or "nvfp4" in dtype_words
    if release >= _WHOLE_SINCE and is_block_scaled and (has_grace or num_stages == 1):
        return WHOLE
    if device.architecture in _LAUNCHED_ANYWAY.get(preset, ()):
        return LAUNCHED
    is_captured = device.architecture_facts.family == "blackwell" and num_stages == 1
    return CAPTURED if has_grace or (is_captured and release >= _CAPTURED_BESIDE_X86_SINCE) else LAUNCHED


Numbers = dict[str, float]

_SHAPE_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
# Suffix of a model's name that changes at most 4 % of its FLOPs.
_MULTI_TOKEN_PREDICTION = re.compile(r"\s*\(w/o? MTP\)\s*$")
# 50,257 tokens of GPT-2's vocabulary, padded to a multiple of 128 on 8 tensor ranks (Megatron-LM's rule), as in all
# rows of NVIDIA's that state a vocabulary of GPT-3.
_GPT3_VOCABULARY = 51_200
_ACCUMULATES_NOTHING = "torchtitan"
# Sources whose TFLOP/s are those of arXiv 2104.04473, equation 3, full recomputation included: all 106 rows that state
# a time too agree.
_EQUATION_3 = ("2104.04473",)


@cache
def _presets() -> dict[str, str]:
    return {_plain(name): name for name in list_presets()}


def _plain(name: str) -> str:
    return re.sub(r"[\s_.\-]", "", name.lower())


def preset_of(model: str) -> str | None:
    """Return the preset that a model's name spells in its own way; None if there is none.

    >>> preset_of("Qwen3_30B_a3B"), preset_of("DeepSeekV3 (w/o MTP)"), preset_of("DeepSeekV3 (tokendrop)")
    ('qwen3-30b-a3b', 'deepseek-v3', None)
    """
    return _presets().get(_plain(_MULTI_TOKEN_PREDICTION.sub("", model)))


def fill_gaps(numbers: Numbers, model: str, source: str, assumed: Counter[str]) -> Numbers:
    """Return the numbers of a row with gaps filled from other fields, the model's name or the source's conventions.

    Args:
        numbers: Stated numbers; NaN for missing ones.
    """
    filled = dict(numbers)
    _fill_shape(filled, model, assumed)
    replicas = _read(filled, "num_gpus") / (_read(filled, "tp") * _read(filled, "pp") * _read(filled, "cp", 1.0))
    if _is_open(filled, "global_batch") and source.startswith(_ACCUMULATES_NOTHING):
        filled["global_batch"] = _read(filled, "micro_batch") * replicas
        assumed["are from torchtitan and state no global batch: one micro-batch per replica"] += 1
    if _is_open(filled, "micro_batch") and _read(filled, "global_batch") == replicas:
        filled["micro_batch"] = 1.0
        assumed["have one sequence per replica, so micro-batches of one"] += 1
    has_rate = not (_is_open(filled, "tokens_per_s_per_gpu") and _is_open(filled, "iter_time_s"))
    if not has_rate and source.startswith(_EQUATION_3):
        filled["tokens_per_s_per_gpu"] = 1e12 * _read(filled, "tflops_per_gpu") / equation_3_flops(filled)
        assumed["state only TFLOP/s: converted by equation 3 of arXiv 2104.04473"] += 1
    return filled


def equation_3_flops(numbers: Numbers) -> float:
    """Return FLOPs per token of GPT with full recomputation: 96 L h^2 (1 + s / 6h + V / 16 L h). [flop]

    Source: arXiv 2104.04473, equation 3.

    >>> shape = {"num_layers": 96.0, "hidden_size": 12288.0, "seq_len": 2048.0, "vocab_size": 51200.0}
    >>> round(equation_3_flops(shape) / 1e12, 3)
    1.434
    """
    layers, h, s, v = (numbers[name] for name in ("num_layers", "hidden_size", "seq_len", "vocab_size"))
    return 96.0 * layers * h**2 * (1.0 + s / (6.0 * h) + v / (16.0 * layers * h))


def _fill_shape(filled: Numbers, model: str, assumed: Counter[str]) -> None:
    """Fill the sizes of the named preset unless a stated one differs, and GPT-3's vocabulary."""
    missing = [name for name in _SHAPE_FIELDS if _is_open(filled, name) and name != "num_kv_heads"]
    if not missing:
        return
    if missing == ["vocab_size"] and _plain(model).startswith("gpt3"):
        filled["vocab_size"] = float(_GPT3_VOCABULARY)
        assumed[f"are GPT-3 and state no vocabulary: {_GPT3_VOCABULARY:,}"] += 1
        return
    preset = preset_of(model)
    if preset is not None:
        config = read_model(preset).config
        known = {name: float(getattr(config, field)) for name, field in _SHAPE_FIELDS.items()}
        if all(_is_open(filled, name) or filled[name] == value for name, value in known.items()):
            filled.update({name: value for name, value in known.items() if _is_open(filled, name)})
            if _is_open(filled, "gated_mlp"):
                filled["gated_mlp"] = float(config.gated_mlp)
            assumed["state no shape: taken from the preset of that name"] += 1
            return


def _is_open(numbers: Numbers, name: str) -> bool:
    return math.isnan(numbers.get(name, math.nan))


def _read(numbers: Numbers, name: str, default: float = math.nan) -> float:
    return default if _is_open(numbers, name) else numbers[name]


# Fields that a full configuration needs.
_NEEDED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "vocab_size",
    "seq_len",
    "micro_batch",
    "global_batch",
    "num_gpus",
    "tp",
    "pp",
)
# Fields that a named preset fills.
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size")
_OTHER_COUNTS = ("num_kv_heads", "vp", "cp", "ep")
_LARGEST_COUNT = 1e9
FORMAT = Format(
    numbers={},
    labels=("source", "model", "gpu", "dtype", "fsdp_zero", "activation_checkpointing"),
    optional=(
        *_NEEDED,
        "num_kv_heads",
        "gated_mlp",
        "moe",
        "vp",
        "cp",
        "ep",
        "sequence_parallel",
        "flash_attention",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "iter_time_s",
    ),
)
MLPERF_FORMAT = replace(
    FORMAT, optional=(*FORMAT.optional, "lora_rank"), labels=(*FORMAT.labels, "lora_targets", "framework")
)
# Table 2 of this source compares DeepSpeed's ZeRO-3 of its time with Megatron's pipelines: 1.6 to 5 times slower than
# the links allow, more so with more devices, and no other row covers that software.
_PTD_P = "2104.04473"
# Its B200 have a power limit that it does not state.
_POWER_LIMITED = "torchtitan mxfp8 page"


class UnusableRowError(ShapewrightError):
    """A row lacks a field, or describes something that is not predicted."""


@dataclass(frozen=True)
class PublishedRow:
    """One row as published, with the gaps filled that other fields imply.

    Attributes:
        labels: Its labels by column.
        numbers: Its numbers by column; NaN for unknown ones.
        preset: Preset that a mixture of experts names, whose shape is the model's; None for others.
    """

    labels: Mapping[str, str]
    numbers: Mapping[str, float]
    preset: str | None

    @property
    def source(self) -> str:
        """Publisher."""
        return self.labels["source"]

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's recipes ran it."""
        return software_of(self.source) == NVIDIA

    def number(self, name: str, default: float = np.nan) -> float:
        """Return a number, or a default for a missing one."""
        value = self.numbers[name]
        return default if np.isnan(value) else value

    def count(self, name: str, default: float = np.nan) -> int:
        """Return an integer, or a default for a missing one."""
        return int(self.number(name, default))


def read_row(rows: Columns, place: int, filled: Counter[str]) -> PublishedRow:
    """Read one row of the table and fill its gaps, which are counted.

    Raises:
        UnusableRowError: it lacks a field, or is not pre-training.
    """
    labels, stated = rows.row(place)
    model, source = labels["model"], labels["source"]
    if "(SFT)" in source:
        raise UnusableRowError("fine-tuning on packed sequences")
    if source.startswith(_PTD_P) and "ZeRO-3" in labels["fsdp_zero"]:
        raise UnusableRowError("ZeRO-3 of 2021, whose communication took several times what its links allow")
    if source == _POWER_LIMITED:
        raise UnusableRowError("a power limit that is not stated")
    numbers = fill_gaps(stated, model, source, filled)
    has_experts = numbers["moe"] > 0.0
    preset = preset_of(model) if has_experts else None
    if has_experts and preset is None:
        raise UnusableRowError("mixture of experts without a stated shape or a preset of its name")
    row = PublishedRow(labels, numbers, preset)
    _refuse_gaps(row)
    return row


def _refuse_gaps(row: PublishedRow) -> None:
    """Reject a row without a full configuration, or with invalid counts."""
    needed = [name for name in _NEEDED if row.preset is None or name not in _SHAPE]
    missing = [name for name in needed if not row.number(name, 0.0) > 0.0]
    if missing:
        raise UnusableRowError(f"not stated: {', '.join(missing)}")
    for name in (*needed, *_OTHER_COUNTS):
        value = row.number(name, 1.0)
        if not 0.0 < value <= _LARGEST_COUNT or value != int(value):
            raise UnusableRowError(f"{name}={value:g} is not an integer from 1 to {_LARGEST_COUNT:g}")
