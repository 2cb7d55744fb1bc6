"""Which software ran a published training row, as its source names it and NVIDIA's recipes set it up.

The table names a release and a layout. What runs beside what is in the recipes of that release, which are public
(NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs: ``cuda_graph_impl``, ``cuda_graph_scope``,
``moe_a2a_overlap``). Mixtures of experts came in three ways, told apart by release, device and layout:

- launched by the host, one kernel after the other, and a wait in each layer for how many rows each expert gets;
- attention and router in CUDA graphs, so that only experts are launched: on Grace's CPUs, and since 26.02.01 on
  Blackwell beside x86 where there is no pipeline;
- since 26.06 the whole iteration in one graph, with exchanges beside another micro-batch, for block-scaled formats.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shapewright.perf.software import UNNAMED

if TYPE_CHECKING:
    from shapewright.hardware import Device

Release = tuple[int, ...]

NVIDIA = "nemo-2024"
"""Generation of NVIDIA's dense recipes."""
# Generation of software by the first words of a source.
_SOFTWARE = {
    "NVIDIA NeMo": NVIDIA,
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
"""Generations of NVIDIA's recipes with experts: launched one by one, attention in graphs, all in one graph."""
_RELEASE = re.compile(r"(\d\d)\.(\d\d)(?:\.(\d\d))?")
_WHOLE_SINCE: Release = (26, 6, 0)
_CAPTURED_BESIDE_X86_SINCE: Release = (26, 2, 1)
# Recipes that capture nothing where others of their time do: GPT-OSS but for GB300's and B300's.
_LAUNCHED_ANYWAY = {"gpt-oss-120b": ("blackwell", "hopper")}
_SHORT_OF_MEMORY = ("b200-sxm-180gb", "gb200")


def recomputed_modules(preset: str, device: Device, dtype_words: str, software: str) -> str | None:
    """Parts of layers that NVIDIA's recipes compute again (``recompute_modules``), which its tables do not state.

    Where the iteration is one graph, recipes keep everything.

    Args:
        preset: The model.
        device: What it ran on.
        dtype_words: Element format as published.
        software: Generation that ran it.
    """
    if software not in (LAUNCHED, CAPTURED):
        return None
    is_wide = "bf16" in dtype_words
    if preset == "gpt-oss-120b" and is_wide and device.name in _SHORT_OF_MEMORY:
        return "layernorm,moe_act"
    return ("moe_act" if is_wide else "mla_up_proj") if preset == "deepseek-v3" else None


def software_of(source: str) -> str:
    """Generation of software that a source names, or the middle of all generations."""
    return next((name for words, name in _SOFTWARE.items() if source.startswith(words)), UNNAMED)


def release_of(source: str) -> Release:
    """Release that a source names, such as (26, 6, 1) of ``26.06.01``; empty if it names none.

    >>> release_of("NVIDIA Megatron-Bridge 26.06.01 NeMo Container"), release_of("torchtitan")
    ((26, 6, 1), ())
    """
    found = _RELEASE.search(source)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def software_of_experts(source: str, preset: str, device: Device, dtype_words: str, num_stages: int) -> str:
    """Generation of software that ran a mixture of experts.

    Args:
        source: Who published it.
        preset: The model.
        device: What it ran on.
        dtype_words: Element format as published; block-scaled formats are ``mxfp8``, ``fp8-mx`` and ``nvfp4``.
        num_stages: Pipeline stages.
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
    is_captured = device.architecture.startswith("blackwell") and num_stages == 1
    return CAPTURED if has_grace or (is_captured and release >= _CAPTURED_BESIDE_X86_SINCE) else LAUNCHED
