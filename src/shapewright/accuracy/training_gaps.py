"""What a published training row leaves open and is known anyway: from the model it names, or how its source counts.

Each gap that is filled is counted as an assumption, which ``shapewright accuracy`` prints. A micro-batch, a layout or
a time that nothing implies stays a gap.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache

from shapewright.config import list_presets, read_model

Numbers = dict[str, float]

_SHAPE_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
# What is said behind a model's name and changes no more of it than 4 % of its FLOPs.
_MULTI_TOKEN_PREDICTION = re.compile(r"\s*\(w/o? MTP\)\s*$")
# 50,257 tokens of GPT-2's vocabulary, padded to a multiple of 128 on 8 tensor ranks (Megatron-LM's rule), which all
# rows of NVIDIA's that state a vocabulary of GPT-3 have.
_GPT3_VOCABULARY = 51_200
_ACCUMULATES_NOTHING = "torchtitan"
# Sources whose TFLOP/s are those of arXiv 2104.04473, equation 3, full recomputation included: 106 of 106 rows that
# state a time as well agree.
_EQUATION_3 = ("2104.04473",)


@cache
def _presets() -> dict[str, str]:
    return {_plain(name): name for name in list_presets()}


def _plain(name: str) -> str:
    return re.sub(r"[\s_.\-]", "", name.lower())


def preset_of(model: str) -> str | None:
    """The preset that a model's name spells in its own way; None if there is none.

    >>> preset_of("Qwen3_30B_a3B"), preset_of("DeepSeekV3 (w/o MTP)"), preset_of("DeepSeekV3 (tokendrop)")
    ('qwen3-30b-a3b', 'deepseek-v3', None)
    """
    return _presets().get(_plain(_MULTI_TOKEN_PREDICTION.sub("", model)))


def fill_gaps(numbers: Numbers, model: str, source: str, assumed: Counter[str]) -> Numbers:
    """Numbers of a row with what follows from the others, from its model's name, or from its source's habits.

    Args:
        numbers: What the row states; NaN where it does not.
        model: Its name.
        source: Who published it.
        assumed: Counts what was filled in.
    """
    filled = dict(numbers)
    _fill_shape(filled, model, assumed)
    replicas = _read(filled, "num_gpus") / (_read(filled, "tp") * _read(filled, "pp") * _read(filled, "cp", 1.0))
    if _is_open(filled, "global_batch") and source.startswith(_ACCUMULATES_NOTHING):
        filled["global_batch"] = _read(filled, "micro_batch") * replicas
        assumed["are of torchtitan and state no global batch: one micro-batch a replica"] += 1
    if _is_open(filled, "micro_batch") and _read(filled, "global_batch") == replicas:
        filled["micro_batch"] = 1.0
        assumed["have one sequence for each replica, so micro-batches of one"] += 1
    has_rate = not (_is_open(filled, "tokens_per_s_per_gpu") and _is_open(filled, "iter_time_s"))
    if not has_rate and source.startswith(_EQUATION_3):
        filled["tokens_per_s_per_gpu"] = 1e12 * _read(filled, "tflops_per_gpu") / equation_3_flops(filled)
        assumed["state TFLOP/s alone, by equation 3 of arXiv 2104.04473"] += 1
    return filled


def equation_3_flops(numbers: Numbers) -> float:
    """FLOPs of a token of GPT with full recomputation: 96 L h^2 (1 + s / 6h + V / 16 L h). [flop]

    Source: arXiv 2104.04473, equation 3.

    >>> shape = {"num_layers": 96.0, "hidden_size": 12288.0, "seq_len": 2048.0, "vocab_size": 51200.0}
    >>> round(equation_3_flops(shape) / 1e12, 3)
    1.434
    """
    layers, h, s, v = (numbers[name] for name in ("num_layers", "hidden_size", "seq_len", "vocab_size"))
    return 96.0 * layers * h**2 * (1.0 + s / (6.0 * h) + v / (16.0 * layers * h))


def _fill_shape(filled: Numbers, model: str, assumed: Counter[str]) -> None:
    """Sizes of the preset that a model names, unless it says another one; GPT-3's vocabulary."""
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
            assumed["state no shape: that of the preset they name"] += 1
            return


def _is_open(numbers: Numbers, name: str) -> bool:
    return math.isnan(numbers.get(name, math.nan))


def _read(numbers: Numbers, name: str, default: float = math.nan) -> float:
    return default if _is_open(numbers, name) else numbers[name]
