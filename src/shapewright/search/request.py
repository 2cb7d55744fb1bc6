"""What a search is asked: which fields to vary, which to keep, how large the model may be, how far it may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shapewright.config.changes import FIELD_NAMES
from shapewright.errors import ConfigError, WorkloadError, close_names
from shapewright.search.bands import check_guard

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig

VARIED = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "kv_heads": "num_kv_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "depth": "num_layers",
    "width": "hidden_size",
    "micro_batch": "micro_batch_size",
}
"""What can be varied in arrays, and the field that holds it."""

VARIED_IN_BRANCHES = ("experts", "layout", "recompute")
"""What can be varied besides, each combination by itself; see search.branches."""

DEFAULT_VARIED = ("heads", "kv_heads", "ffn", "vocab", "depth", "width")

DEFAULT_VARIED_WITH_STAGES = (*DEFAULT_VARIED, "micro_batch")
"""The same for training over pipeline stages, where the micro-batch decides how long the stages wait."""

OBJECTIVES = {"train-tokens-per-s": "train", "prefill": "prefill", "decode-latency": "decode", "cost": "train"}
"""What is to be fast, and the phase that it is measured in."""

FEWEST_PARAMETERS, MOST_PARAMETERS = 100_000, 10**14
"""Sizes that a search takes: below nothing is a transformer, above nothing fits a job."""

LARGEST_TOLERANCE = 10.0


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to look for.

    Attributes:
        vary: Keys of VARIED, and VARIED_IN_BRANCHES.
        keep: Values that fields must have, by the field's name or its key in VARIED.
        num_parameters: Parameters that shapes should have; None for as many as the baseline.
        tolerance_fraction: How far from them they may be, as a fraction.
        guard: One of the quality guards of search.bands.
        top: How many shapes to list.

    Raises:
        ConfigError: an unknown field, a contradiction, or a size out of range.
    """

    vary: tuple[str, ...] = DEFAULT_VARIED
    keep: Mapping[str, int] = field(default_factory=dict)
    num_parameters: int | None = None
    tolerance_fraction: float = 0.02
    guard: str = "usual"
    top: int = 20

    def __post_init__(self) -> None:
        for name in self.vary:
            if name not in (*VARIED, *VARIED_IN_BRANCHES):
                choices = ", ".join((*VARIED, *VARIED_IN_BRANCHES))
                raise ConfigError(f"--vary {name!r} is not known; {_hint(name)}choose among {choices}")
        check_guard(self.guard)
        if self.num_parameters is not None and not FEWEST_PARAMETERS <= self.num_parameters <= MOST_PARAMETERS:
            raise ConfigError(
                f"--params {self.num_parameters:,} is out of range; give from {FEWEST_PARAMETERS:,} to "
                f"{MOST_PARAMETERS:.0e} parameters, such as 2.7b"
            )
        if not 0.0 <= self.tolerance_fraction <= LARGEST_TOLERANCE:
            raise ConfigError(f"--tolerance {self.tolerance_fraction!r} must be from 0 to 10, such as 0.02 or 2%")
        if self.top < 1:
            raise ConfigError(f"--top {self.top} must be at least 1")
        kept: dict[str, int] = {}
        for name, value in self.keep.items():
            field_name = field_of(name)
            if kept.setdefault(field_name, value) != value:
                raise ConfigError(
                    f"--keep asks for {field_name}={kept[field_name]} and {field_name}={value}; give one of them"
                )
            if value < 1:
                raise ConfigError(f"--keep {name}={value} must be a whole number of at least 1")
        object.__setattr__(self, "keep", kept)

    def free_fields(self) -> tuple[str, ...]:
        """Keys of VARIED that stay open."""
        return tuple(name for name in self.vary if VARIED.get(name) not in self.keep)


def field_of(name: str) -> str:
    """Field that a word of --keep means.

    Raises:
        ConfigError: no such field, or one that a search does not touch.
    """
    field_name = VARIED.get(name, name)
    field_name = "intermediate_size" if field_name == "moe_intermediate_size" else field_name
    if field_name in VARIED.values():
        return field_name
    if field_name in FIELD_NAMES:
        raise ConfigError(f"--keep {name} has no effect: a search never changes it; leave it out")
    if name in VARIED_IN_BRANCHES:
        raise ConfigError(f"--keep {name} takes no value: leave {name} out of --vary, and the model's stay as they are")
    raise ConfigError(f"--keep {name!r} is no field of a model; {_hint(name)}choose among {', '.join(VARIED.values())}")


def ffn_field(config: TransformerConfig) -> str:
    """The MLP width that a search varies: of the experts where there are any."""
    return "moe_intermediate_size" if config.is_moe else "intermediate_size"


def _hint(name: str) -> str:
    hint = close_names(name, (*VARIED, *VARIED.values(), *VARIED_IN_BRANCHES))
    return f"{hint} " if hint else ""


def phase_of(objective: str | None, phase: str | None) -> str:
    """Phase that a search is measured in.

    Raises:
        ConfigError: no such objective.
        WorkloadError: objective and phase contradict each other.
    """
    if objective is None:
        return phase or "train"
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective={objective!r} is not known; choose one of {', '.join(OBJECTIVES)}")
    if phase not in (None, OBJECTIVES[objective]):
        raise WorkloadError(
            f"--objective {objective} is measured in --phase {OBJECTIVES[objective]}, not in {phase}; give one of them"
        )
    return OBJECTIVES[objective]
