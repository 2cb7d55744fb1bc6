"""Rows of published_training_throughput.csv as they were published, and which of them can be used.

Taken are pre-training rows that state shape, batches and layout; what follows from the rest is filled in
(accuracy.training_gaps). Rows of mixtures of experts state layout and batches but not the model's shape, which is that
of the preset they name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.read import Format
from shapewright.accuracy.training_gaps import fill_gaps, preset_of
from shapewright.accuracy.training_software import NVIDIA, software_of
from shapewright.errors import ShapewrightError

if TYPE_CHECKING:
    from shapewright.accuracy.columns import Columns

# A row without one of these has no full configuration.
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
# What a preset says of a model that is named.
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
# Its table 2 sets DeepSpeed's ZeRO-3 of its time beside Megatron's pipelines: 1.6 to 5 times slower than their links
# allow, the more devices the slower, and no other row tells of that software.
_PTD_P = "2104.04473"


class UnusableRowError(ShapewrightError):
    """A row lacks something, or describes what is not predicted."""


@dataclass(frozen=True)
class PublishedRow:
    """One row as it was published, the gaps filled that follow from the rest.

    Attributes:
        labels: Its words by column.
        numbers: Its numbers by column; NaN where nothing says them.
        preset: The preset that a mixture of experts names, whose shape is the model's; None for others.
    """

    labels: Mapping[str, str]
    numbers: Mapping[str, float]
    preset: str | None

    @property
    def source(self) -> str:
        """Who published it."""
        return self.labels["source"]

    @property
    def is_nvidia(self) -> bool:
        """Whether NVIDIA's recipes ran it."""
        return software_of(self.source) == NVIDIA

    def number(self, name: str, default: float = np.nan) -> float:
        """A number, or what is taken where there is none."""
        value = self.numbers[name]
        return default if np.isnan(value) else value

    def count(self, name: str, default: float = np.nan) -> int:
        """A whole number, or what is taken where there is none."""
        return int(self.number(name, default))


def read_row(rows: Columns, place: int, filled: Counter[str]) -> PublishedRow:
    """Take one row out of the table and fill its gaps; what fills them is counted.

    Raises:
        UnusableRowError: it lacks a field, or is no pre-training.
    """
    labels = {name: column[place] for name, column in rows.labels.items()}
    model, source = labels["model"], labels["source"]
    if "(SFT)" in source:
        raise UnusableRowError("fine-tuning on packed sequences")
    if source.startswith(_PTD_P) and "ZeRO-3" in labels["fsdp_zero"]:
        raise UnusableRowError("ZeRO-3 of 2021, whose communication took a multiple of what its links allow")
    stated = {name: float(column[place]) for name, column in rows.numbers.items()}
    numbers = fill_gaps(stated, model, source, filled)
    has_experts = numbers["moe"] > 0.0
    preset = preset_of(model) if has_experts else None
    if has_experts and preset is None:
        raise UnusableRowError("mixture of experts whose shape is not stated and that names no preset as it is")
    row = PublishedRow(labels, numbers, preset)
    _refuse_gaps(row)
    return row


def _refuse_gaps(row: PublishedRow) -> None:
    """Refuse a row without a full configuration, or with counts that are none."""
    needed = [name for name in _NEEDED if row.preset is None or name not in _SHAPE]
    missing = [name for name in needed if not row.number(name, 0.0) > 0.0]
    if missing:
        raise UnusableRowError(f"not stated: {', '.join(missing)}")
    for name in (*needed, *_OTHER_COUNTS):
        value = row.number(name, 1.0)
        if not 0.0 < value <= _LARGEST_COUNT or value != int(value):
            raise UnusableRowError(f"{name}={value:g} is no whole number from 1 to {_LARGEST_COUNT:g}")
