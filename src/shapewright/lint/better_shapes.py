"""Local search for better shapes with almost the same parameter count.

The search varies one of head dimension, MLP width, vocabulary, a hidden size that is not aligned, and depth with hidden
size, then combines the best changes. Parameter counts stay within MOST_PARAMETERS_CHANGE_FRACTION.

In training of decoders, a better shape reaches the loss of the present one in less time; the loss is that after the
tokens of the run, or after 20 per parameter. Elsewhere, a better shape is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import round_up
from shapewright.core.records import dataclass
from shapewright.lint.shape_fixes import (
    can_change_depth,
    candidate_head_dims,
    full_width_multiple,
    keeps_divisibility,
    nearest_multiples,
    with_head_dim,
    with_hidden_size,
)
from shapewright.lowering.shard import wide_gemm_dtype
from shapewright.models.parameters import count_parameters
from shapewright.prediction.loss.effect import estimate_loss_effect, has_loss_law
from shapewright.prediction.speedup import compare_times
from shapewright.prediction.training_run import count_chinchilla_tokens

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

MOST_PARAMETERS_CHANGE_FRACTION = 0.02
SMALLEST_GAIN_FRACTION = 0.005
"""Smaller predicted gains are within the error of the prediction and not reported."""

_MLP_MULTIPLES = (64, 128, 256)
_WIDTH_MULTIPLE = 128
_LARGEST_DEPTH_CHANGE = 4
_LARGEST_DEPTH_CHANGE_FRACTION = 0.15
_HEADS_MULTIPLE = 4  # head counts keep their divisibility by powers of two up to this
_NUM_KEPT_PER_KIND = 2

# Largest relative change of f / h to compensate parameters after a change of depth.
_MOST_RATIO_CHANGE_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True)
class BetterShape:
    """A better shape of almost the same parameter count.

    Attributes:
        changes: New values by field name of TransformerConfig.
        title: Description of the changed fields.
        step_time_s: Predicted step time. [s]
        speedup: Present step time over this one.
        gain_fraction: Relative saving of the time to the present loss; without the loss law, of time per token and
            parameter.
        effect: Difference of the loss, and net speedup to the present loss; None for a model that the loss law does not
            describe.
        parameters_change_fraction: Relative change of the parameter count.
    """

    changes: Mapping[str, Any]
    title: str
    step_time_s: float
    speedup: float
    gain_fraction: float
    effect: LossEffect | None
    parameters_change_fraction: float

    @property
    def gain_low_fraction(self) -> float:
        """Lower end of the interval of the gain, by which shapes are ranked; without an interval, the gain."""
        net = self.effect.net_speedup if self.effect is not None else None
        return self.gain_fraction if net is None else 1.0 - 1.0 / net.low


def find_better_shapes(
    scenario: Scenario, limit: int = 3, *, train_tokens: float | None = None
) -> tuple[BetterShape, ...]:
    """Search similar shapes for better ones.

    Args:
        scenario: The scenario; its step must be possible.
        train_tokens: Tokens after which losses are compared; default: 20 per parameter.

    Returns:
        Shapes predicted to reach the same loss sooner, ranked by the lower end of their gain; outside training, and for
        models that the loss law does not describe, shapes that are faster both per step and per parameter. Where the
        weights are given, only the vocabulary is changed.
    """
    tokens = train_tokens or count_chinchilla_tokens(scenario.predict().parameters.active)
    if scenario.workload.has_given_weights:
        return tuple(_best_shapes(scenario, _vocabulary_candidates(scenario), tokens, keep=limit))
    singles = [
        _best_shapes(scenario, candidates, tokens)
        for candidates in (
            _head_candidates(scenario),
            _mlp_candidates(scenario),
            _vocabulary_candidates(scenario),
            _depth_candidates(scenario),
            _hidden_size_candidates(scenario),
        )
    ]
    heads, mlp, vocabulary, depth, width = singles
    pairs = ((heads, mlp), (heads, vocabulary), (mlp, vocabulary), (depth, vocabulary), (width, vocabulary))
    combined = [{**first[0].changes, **second[0].changes} for first, second in pairs if first and second]
    if heads and mlp and vocabulary:
        combined.append({**heads[0].changes, **mlp[0].changes, **vocabulary[0].changes})
    groups = (*singles, _best_shapes(scenario, combined, tokens, keep=limit))
    # Different combinations can have equal changes; they are reported once.
    found = {frozenset(shape.changes.items()): shape for group in groups for shape in group}
    return tuple(sorted(found.values(), key=lambda shape: -shape.gain_low_fraction)[:limit])


def _best_shapes(
    scenario: Scenario, candidates: Iterable[Mapping[str, Any]], train_tokens: float, keep: int = _NUM_KEPT_PER_KIND
) -> list[BetterShape]:
    """Predict candidates and return those that are better, best first."""
    shapes = [shape for changes in candidates if (shape := _evaluate(scenario, changes, train_tokens)) is not None]
    return sorted(shapes, key=lambda shape: -shape.gain_low_fraction)[:keep]


def _evaluate(scenario: Scenario, changes: Mapping[str, Any], train_tokens: float) -> BetterShape | None:
    """Predict a changed shape; None where it is not better, or has another size."""
    after = scenario.try_replace(changes)
    if after is None:
        return None
    old = scenario.predict()
    parameters_change = count_parameters(after.config).total / old.parameters.total - 1.0
    if abs(parameters_change) > MOST_PARAMETERS_CHANGE_FRACTION:
        return None
    if not after.is_possible or (scenario.fits and not after.fits):
        return None
    new = after.predict()
    ratio = new.step_time_s / old.step_time_s
    effect = _estimate_loss_effect(scenario, old, new, train_tokens)
    if effect is not None and effect.net_speedup is not None:
        gain = 1.0 - 1.0 / max(effect.net_speedup.factor, 1e-9)
    else:
        gain = 1.0 - ratio * old.parameters.active / new.parameters.active if ratio < 1.0 else 0.0
    if gain < SMALLEST_GAIN_FRACTION:
        return None
    return BetterShape(
        changes=dict(changes),
        title=describe(scenario.config, changes),
        step_time_s=new.step_time_s,
        speedup=1.0 / ratio,
        gain_fraction=gain,
        effect=effect,
        parameters_change_fraction=parameters_change,
    )


def _estimate_loss_effect(
    scenario: Scenario, old: Prediction, new: Prediction, train_tokens: float
) -> LossEffect | None:
    """Estimate the effect on loss and speed; None for a model that the loss law does not describe."""
    if not has_loss_law(scenario.config):
        return None
    is_training = scenario.workload.is_training
    return estimate_loss_effect(
        scenario.config,
        new.config,
        train_tokens=train_tokens,
        speedup=compare_times(old, new) if is_training else None,
    )


def describe(config: TransformerConfig, changes: Mapping[str, Any]) -> str:
    """Describe the changed fields, without those that follow others (value heads, embedding width)."""
    described = (
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
    for name in described:
        if name not in changes or changes[name] == getattr(config, name):
            continue
        if name == "num_kv_heads" and config.num_kv_heads == config.num_heads:
            continue
        parts.append(f"{name} {getattr(config, name)} -> {changes[name]}")
    return ", ".join(parts)


def _head_candidates(scenario: Scenario) -> Iterator[Mapping[str, Any]]:
    for head_dim in candidate_head_dims(scenario.config):
        changes = with_head_dim(scenario.config, head_dim)
        if changes:
            yield changes


def _mlp_candidates(scenario: Scenario) -> Iterator[Mapping[str, Any]]:
    """Yield MLP widths that are aligned on each device of the tensor axis."""
    name = "moe_intermediate_size" if scenario.config.is_moe else "intermediate_size"
    width = getattr(scenario.config, name)
    seen = {0, width}
    for multiple in _MLP_MULTIPLES:
        for candidate in nearest_multiples(width, multiple * scenario.layout.tensor_parallel):
            if candidate not in seen:
                seen.add(candidate)
                yield {name: candidate}


def _vocabulary_candidates(scenario: Scenario) -> Iterator[Mapping[str, Any]]:
    dtype = wide_gemm_dtype(scenario.workload.dtype)
    multiple = full_width_multiple(scenario.device, dtype) * scenario.layout.tensor_parallel
    padded = round_up(scenario.config.vocab_size, multiple)
    if padded != scenario.config.vocab_size:
        yield {"vocab_size": padded}


def _hidden_size_candidates(scenario: Scenario) -> Iterator[Mapping[str, Any]]:
    """Yield the nearest aligned hidden sizes, if that of the model is not aligned."""
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    if scenario.config.hidden_size % multiple and not scenario.config.is_moe:
        for candidate in nearest_multiples(scenario.config.hidden_size, multiple):
            changes = with_hidden_size(scenario.config, candidate, multiple * scenario.layout.tensor_parallel)
            if changes:
                yield changes


def _depth_candidates(scenario: Scenario) -> Iterator[Mapping[str, Any]]:
    """Yield other depths, with the hidden size that keeps the parameter count, which is proportional to L h^2.

    Hybrids keep the share of each kind of layer, whose effect on the loss no law knows.
    """
    config = scenario.config
    if not can_change_depth(config) or config.is_moe or config.num_layers % config.hybrid_period:
        return
    unit = lcm(config.hybrid_period, scenario.layout.pipeline_parallel)
    farthest = min(_LARGEST_DEPTH_CHANGE, int(_LARGEST_DEPTH_CHANGE_FRACTION * config.num_layers))
    for num_layers in range(config.num_layers - farthest, config.num_layers + farthest + 1):
        if num_layers == config.num_layers or num_layers % unit:
            continue
        wanted = config.hidden_size * (config.num_layers / num_layers) ** 0.5
        nearest = round(wanted / _WIDTH_MULTIPLE)
        for step in (0, -1, 1, -2, 2):
            changes = _keep_parameter_count(scenario, num_layers, (nearest + step) * _WIDTH_MULTIPLE)
            if changes:
                yield changes
                break


def _keep_parameter_count(scenario: Scenario, num_layers: int, hidden_size: int) -> Mapping[str, Any] | None:
    """Keep the parameter count at another depth and hidden size by an adjusted MLP width, with the same head_dim.

    None where the heads or the ratio of MLP width to hidden size would change too much.
    """
    config = scenario.config
    multiple = _WIDTH_MULTIPLE * scenario.layout.tensor_parallel
    changes = with_hidden_size(config, hidden_size, multiple) if hidden_size > 0 else None
    if changes is None or changes.get("head_dim", config.head_dim) != config.head_dim:
        return None
    if not keeps_divisibility(config.num_heads, changes.get("num_heads", config.num_heads), _HEADS_MULTIPLE):
        return None
    changes["num_layers"] = num_layers
    changed = scenario.try_replace(changes)
    if changed is None:
        return None
    per_width = (3 if config.gated_mlp else 2) * hidden_size * num_layers
    missing = scenario.predict().parameters.total - count_parameters(changed.config).total
    intermediate_size = changes["intermediate_size"] + round(missing / per_width / multiple) * multiple
    ratio = intermediate_size / hidden_size * config.hidden_size / config.intermediate_size
    if abs(ratio - 1.0) > _MOST_RATIO_CHANGE_FRACTION:
        return None
    return {**changes, "intermediate_size": intermediate_size}
