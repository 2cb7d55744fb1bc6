"""Nearest better shapes: a quick look around for faster shapes of almost the same parameter count.

One field at a time: head width, MLP width, vocabulary, depth against width; then the best of those together. It is no
search over all shapes, and stays within MOST_PARAMETERS_CHANGE_FRACTION.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.lint.needs import full_width_multiple, neighbours, round_up
from shapewright.lint.reshape import can_change_depth, head_dims_near, splits_as_before, with_head_dim, with_hidden_size

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.lint.what_if import WhatIf

MOST_PARAMETERS_CHANGE_FRACTION = 0.02
SMALLEST_GAIN_FRACTION = 0.005
"""Shapes closer together than this are the same to a model whose error is some percent."""

_MLP_MULTIPLES = (64, 128, 256)
_WIDTH_MULTIPLE = 128
_LARGEST_DEPTH_CHANGE = 4
_LARGEST_DEPTH_CHANGE_FRACTION = 0.15
_HEADS_MULTIPLE = 4  # a new width keeps the model divisible by this many devices, if it was
_NUM_KEPT_PER_KIND = 2

# How far f / h may move when a change of depth leaves parameters to make up for.
_MOST_RATIO_CHANGE_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True)
class BetterShape:
    """A faster shape of almost the same parameter count.

    Attributes:
        changes: New values by field name of TransformerConfig.
        title: The fields that differ, in words.
        step_time_s: Predicted time of its step. [s]
        speedup: Step time as it is over this one.
        gain_fraction: Share of the time per token and parameter that it saves, by which shapes are ranked.
        parameters_change_fraction: Parameters gained or lost, as a fraction of all.
    """

    changes: Mapping[str, Any]
    title: str
    step_time_s: float
    speedup: float
    gain_fraction: float
    parameters_change_fraction: float


def find_better_shapes(case: WhatIf, limit: int = 3) -> tuple[BetterShape, ...]:
    """Look around one shape.

    Args:
        case: The shape and its setting; it must be possible.
        limit: How many shapes to return.

    Returns:
        Shapes predicted to be faster, both per step and per parameter; the best first.
    """
    singles = [_best(case, candidates) for candidates in (_heads(case), _mlp(case), _vocabulary(case), _depth(case))]
    heads, mlp, vocabulary, depth = singles
    joined = [
        {**first.changes, **second.changes}
        for group, others in ((heads, (mlp, vocabulary)), (mlp, (vocabulary,)), (depth, (vocabulary,)))
        for other in others
        for first in group[:1]
        for second in other[:1]
    ]
    if heads and mlp and vocabulary:
        joined.append({**heads[0].changes, **mlp[0].changes, **vocabulary[0].changes})
    found = {_key(shape): shape for group in (*singles, _best(case, joined, keep=limit)) for shape in group}
    return tuple(sorted(found.values(), key=lambda shape: -shape.gain_fraction)[:limit])


def _best(case: WhatIf, candidates: Iterable[Mapping[str, Any]], keep: int = _NUM_KEPT_PER_KIND) -> list[BetterShape]:
    """Predict candidates and keep the best that are better."""
    shapes = [shape for changes in candidates if (shape := _predict(case, changes)) is not None]
    return sorted(shapes, key=lambda shape: -shape.gain_fraction)[:keep]


def _predict(case: WhatIf, changes: Mapping[str, Any]) -> BetterShape | None:
    after = case.changed(changes)
    if after is None or not after.is_possible or (case.fits and not after.fits):
        return None
    old, new = case.prediction, after.prediction
    parameters_change = new.parameters.total / old.parameters.total - 1.0
    ratio = new.step_time_s / old.step_time_s
    gain = 1.0 - ratio * old.parameters.active / new.parameters.active
    if abs(parameters_change) > MOST_PARAMETERS_CHANGE_FRACTION or ratio >= 1.0 or gain < SMALLEST_GAIN_FRACTION:
        return None
    return BetterShape(
        changes=dict(changes),
        title=describe(case.config, changes),
        step_time_s=new.step_time_s,
        speedup=1.0 / ratio,
        gain_fraction=gain,
        parameters_change_fraction=parameters_change,
    )


def describe(config: TransformerConfig, changes: Mapping[str, Any]) -> str:
    """Say which fields differ; those that only follow others (value heads, embedding width) are left out."""
    told = (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "vocab_size",
    )
    parts = []
    for name in told:
        if name not in changes or changes[name] == getattr(config, name):
            continue
        if name == "num_kv_heads" and config.num_kv_heads == config.num_heads:
            continue
        parts.append(f"{name} {getattr(config, name)} -> {changes[name]}")
    return ", ".join(parts)


def _key(shape: BetterShape) -> frozenset[tuple[str, Any]]:
    return frozenset(shape.changes.items())


def _heads(case: WhatIf) -> Iterator[Mapping[str, Any]]:
    for head_dim in head_dims_near(case.config):
        changes = with_head_dim(case.config, head_dim)
        if changes:
            yield changes


def _mlp(case: WhatIf) -> Iterator[Mapping[str, Any]]:
    """MLP width rounded to multiples, a multiple on each device of the tensor axis."""
    name = "moe_intermediate_size" if case.config.is_moe else "intermediate_size"
    width = getattr(case.config, name)
    seen = {0, width}
    for multiple in _MLP_MULTIPLES:
        for candidate in neighbours(width, multiple * case.layout.tensor_parallel):
            if candidate not in seen:
                seen.add(candidate)
                yield {name: candidate}


def _vocabulary(case: WhatIf) -> Iterator[Mapping[str, Any]]:
    multiple = full_width_multiple(case.device, case.workload.dtype) * case.layout.tensor_parallel
    padded = round_up(case.config.vocab_size, multiple)
    if padded != case.config.vocab_size:
        yield {"vocab_size": padded}


def _depth(case: WhatIf) -> Iterator[Mapping[str, Any]]:
    """A few layers more or less, with the width that keeps the parameters, which go with L h^2."""
    config = case.config
    if not can_change_depth(config) or config.is_moe:
        return
    farthest = min(_LARGEST_DEPTH_CHANGE, int(_LARGEST_DEPTH_CHANGE_FRACTION * config.num_layers))
    for num_layers in range(config.num_layers - farthest, config.num_layers + farthest + 1):
        if num_layers == config.num_layers or num_layers % case.layout.pipeline_parallel:
            continue
        wanted = config.hidden_size * (config.num_layers / num_layers) ** 0.5
        nearest = round(wanted / _WIDTH_MULTIPLE)
        for step in (0, -1, 1, -2, 2):
            changes = _refit(case, num_layers, (nearest + step) * _WIDTH_MULTIPLE)
            if changes:
                yield changes
                break


def _refit(case: WhatIf, num_layers: int, hidden_size: int) -> Mapping[str, Any] | None:
    """Fit the MLP width so that depth and width together keep the parameters; heads keep their width."""
    config = case.config
    multiple = _WIDTH_MULTIPLE * case.layout.tensor_parallel
    changes = with_hidden_size(config, hidden_size, multiple) if hidden_size > 0 else None
    if changes is None or changes.get("head_dim", config.head_dim) != config.head_dim:
        return None
    if not splits_as_before(config.num_heads, changes.get("num_heads", config.num_heads), _HEADS_MULTIPLE):
        return None
    changes["num_layers"] = num_layers
    changed = case.changed(changes)
    if changed is None:
        return None
    per_width = (3 if config.gated_mlp else 2) * hidden_size * num_layers
    missing = case.prediction.parameters.total - _count(changed.config)
    intermediate_size = changes["intermediate_size"] + round(missing / per_width / multiple) * multiple
    ratio = intermediate_size / hidden_size * config.hidden_size / config.intermediate_size
    if abs(ratio - 1.0) > _MOST_RATIO_CHANGE_FRACTION:
        return None
    return {**changes, "intermediate_size": intermediate_size}


def _count(config: TransformerConfig) -> int:
    from shapewright.config.parameters import count_parameters

    return count_parameters(config).total
