"""Effect of a change of shape on loss and speed together: loss difference, tokens needed, net speed-up.

A shape that is s times as fast per token and needs r times the tokens for the baseline's loss reaches that loss s / r
times as fast. Shapes of a search differ a little in size, and a larger model may be better only because it is larger.
Speed and loss are therefore compared at the baseline's size: a shape with g times the baseline's parameters counts as g
times as fast, with 1 / g of its parameters in the loss law. A padded vocabulary adds no parameters. Heads of 64 to 256
count as equally good, since they differ by less than the noise of the data.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import joined
from shapewright.core.units import format_count
from shapewright.models.layers import mixers_of
from shapewright.models.parameters import count_parameters
from shapewright.prediction.loss.law import FREE_NATS, REFERENCE, Z_90, load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.speedup import Speedup

if TYPE_CHECKING:
    from shapewright.core.numeric import Numeric
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.loss.law import TokensRatio


@dataclass(frozen=True, kw_only=True, eq=False)
class NetSpeedup:
    """Training time of a baseline over the time in which candidates reach its loss.

    Attributes:
        mean: Expected speed-up (the median); 0 where the loss cannot be reached.
        low: 5 % quantile.
        high: 95 % quantile.
        chance_better: Probability that it is above 1.
    """

    mean: Numeric
    low: Numeric
    high: Numeric
    chance_better: Numeric


def net_speedup(
    step_speedup: Numeric,
    tokens_ratio: TokensRatio,
    *,
    step_log_standard_deviation: Numeric = 0.0,
) -> NetSpeedup:
    """Combine the speed-up of a step with the tokens that a shape needs.

        net = step speed-up / tokens needed ratio

    Args:
        step_speedup: Seconds per step of the baseline over those of the candidates.
        tokens_ratio: Tokens that candidates need for the baseline's loss, over the baseline's.
        step_log_standard_deviation: Standard deviation of ln(step_speedup); errors that both predictions share cancel.

    >>> from shapewright.prediction.loss.law import TokensRatio
    >>> net = net_speedup(1.2, TokensRatio(ratio=1.1, log_standard_deviation=0.05))
    >>> round(float(net.mean), 3), round(float(net.chance_better), 2)
    (1.091, 0.96)
    """
    mean = step_speedup / tokens_ratio.ratio
    deviation = np.hypot(tokens_ratio.log_standard_deviation, step_log_standard_deviation)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        spread = np.exp(Z_90 * deviation)
        gain = np.log(mean)
        # Without uncertainty, a gain or loss is infinitely many standard deviations from 0, and equal times are none.
        standard = np.where(gain == 0.0, 0.0, gain / deviation)
    return NetSpeedup(mean=mean, low=mean / spread, high=mean * spread, chance_better=_normal_cdf(standard))


def _normal_cdf(standard: Numeric) -> Numeric:
    """Return the cumulative distribution function of the standard normal distribution, within 1e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17.
    """
    size = np.minimum(np.abs(standard), 40.0)
    t = 1.0 / (1.0 + 0.2316419 * size)
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = tail * np.exp(-0.5 * size * size) / np.sqrt(2.0 * np.pi)
    share: Numeric = np.where(np.asarray(standard) > 0.0, 1.0 - tail, tail)[()]
    return share


NARROWEST_FREE_HEAD, WIDEST_FREE_HEAD = 64, 256
"""Head widths between which the loss does not depend on them. [element]

Source: mlfoundations/scaling, grid of 2024: at equal width and depth, heads of 64 to 256 are within 0.01 nats."""

MOST_EXTRAPOLATION = 100.0
"""Factor up to which sizes and tokens may lie outside the data of the loss law. Beyond it, the law does not decide
between shapes. The data end at 2 B parameters and 350 B tokens; models of 70 B are trained on 15 T."""


@dataclass(frozen=True, kw_only=True)
class LossEffect:
    """Effect of a change of shape on the loss, and on the time to reach the baseline's, at the baseline's size.

    Attributes:
        train_tokens: Tokens that the baseline is trained on.
        difference_nats: Loss minus the baseline's after the same tokens. [nat]
        difference_low_nats: Lower end of its 90 % interval. [nat]
        difference_high_nats: Upper end. [nat]
        tokens_ratio: Tokens needed for the baseline's loss over the baseline's; infinite where it cannot be reached.
        net_speedup: Ratio of the baseline's time to its loss to the shape's, with interval; None outside training.
        is_free: Whether the change keeps the loss: it only pads the vocabulary, or divides the same attention width
            among other heads of 64 to 256. Such a change needs the same tokens, and its loss difference is 0, with the
            noise of the data as interval.
        size_ratio: Parameters that a token uses over the baseline's, with the vocabulary of the baseline.
    """

    train_tokens: float
    difference_nats: float
    difference_low_nats: float
    difference_high_nats: float
    tokens_ratio: float
    net_speedup: Speedup | None
    is_free: bool
    size_ratio: float


def has_loss_law(config: TransformerConfig) -> bool:
    """Whether the loss law describes a model, which it does for decoders with attention."""
    mixers = {mixer for layer_type in config.patterns.layer_types for mixer in mixers_of(layer_type)}
    return config.stack == "decoder" and not mixers <= set(config.linear_layers)


def require_loss_law(config: TransformerConfig, advice: str) -> None:
    """Refuse a model that the loss law does not describe.

    Raises:
        ConfigError: it is an encoder, or has no attention.
    """
    if not has_loss_law(config):
        raise ConfigError(f"the loss law describes decoders with attention, which {config.title} is not", advice=advice)


def count_active_parameters(config: TransformerConfig, vocab_size: int) -> Any:
    """Count the parameters that a token uses, with another vocabulary.

    Args:
        config: The model; its sizes can be numbers or core.traced.Traced.
        vocab_size: Vocabulary to count with.
    """
    same = copy(config)
    object.__setattr__(same, "vocab_size", vocab_size)
    return count_parameters(same).active


def is_far_outside(config: TransformerConfig, train_tokens: float) -> bool:
    """Whether a model or its run is too far outside the data of the loss law for the law to decide between shapes.

    A user's own law knows what the data of the reference say of shapes, and decides as far from those as from its own.
    """
    laws, size = (load_loss_law(), load_loss_law(REFERENCE)), float(ShapeForLoss.of(config).num_parameters)
    return any(
        all(not low / MOST_EXTRAPOLATION <= value <= high * MOST_EXTRAPOLATION for low, high in ranges)
        for value, ranges in (
            (size, [law.parameters_range for law in laws]),
            (train_tokens, [law.tokens_range for law in laws]),
        )
    )


def describe_extrapolation(config: TransformerConfig, train_tokens: float) -> tuple[Note, ...]:
    """Return notes where the loss law is a user's own, or a model or its run is outside the data of the law."""
    law, notes = load_loss_law(), list[Note]()
    if law.name != REFERENCE:
        notes.append(Note(f"losses are judged by the law of the recipe: {law.name}", "loss-recipe"))
    if config.linear_layers:
        kinds = joined(config.linear_layers, " and ")
        text = f"the data of the loss law have attention layers only: those of {kinds} count as such"
        notes.append(Note(text, "loss-other-layers"))
    size = float(ShapeForLoss.of(config).num_parameters)
    for name, value, (low, high), field in (
        ("parameters without embeddings", size, law.parameters_range, "num_parameters"),
        ("training tokens", train_tokens, law.tokens_range, "train_tokens"),
    ):
        if not low <= value <= high:
            notes.append(
                Note(
                    f"{format_count(value)} {name} are outside the data of the loss law ({format_count(low)} to "
                    f"{format_count(high)}): its intervals are extrapolated",
                    "loss-extrapolated",
                    field,
                )
            )
    return tuple(notes)


def estimate_loss_effect(
    baseline: TransformerConfig,
    candidate: TransformerConfig,
    *,
    train_tokens: float,
    speedup: Speedup | None,
) -> LossEffect:
    """Estimate the effect of a change of shape on loss and speed.

    Args:
        train_tokens: Tokens that the baseline is trained on.
        speedup: Ratio of the training throughputs; None outside training.
    """
    law, own, vocab_size = load_loss_law(), ShapeForLoss.of(baseline), baseline.vocab_size
    size_ratio = count_active_parameters(candidate, vocab_size) / count_active_parameters(baseline, vocab_size)
    is_free = keeps_loss(baseline, candidate)
    shape = own if is_free else scale_to_baseline(ShapeForLoss.of(candidate), own, size_ratio)
    difference, needed = law.compare(shape, own, train_tokens)
    noise = FREE_NATS if is_free and candidate.head_dim != baseline.head_dim else 0.0
    net = None
    if speedup is not None:
        joined = net_speedup(
            speedup.factor * size_ratio, needed, step_log_standard_deviation=speedup.log_standard_deviation
        )
        net = Speedup(
            factor=float(joined.mean),
            low=float(joined.low),
            high=float(joined.high),
            probability_faster=float(joined.chance_better),
        )
    return LossEffect(
        train_tokens=train_tokens,
        difference_nats=float(difference.mean_nats),
        difference_low_nats=float(difference.low_nats) - noise,
        difference_high_nats=float(difference.high_nats) + noise,
        tokens_ratio=float(needed.ratio),
        net_speedup=net,
        is_free=is_free,
        size_ratio=size_ratio,
    )


def scale_to_baseline(shape: ShapeForLoss, baseline: ShapeForLoss, size_ratio: Any) -> ShapeForLoss:
    """Return a shape with the parameters of a baseline, and with its head width where the loss does not depend on it.

    Args:
        shape: One shape, or arrays of many.
        size_ratio: Parameters of the shape over the baseline's.
    """
    low, high = NARROWEST_FREE_HEAD, WIDEST_FREE_HEAD
    neutral = min(max(baseline.head_dim, low), high)
    is_free = (shape.head_dim >= low) & (shape.head_dim <= high)
    head_dim = np.where(is_free, neutral, shape.head_dim)
    split = shape.head_dim / head_dim
    is_dense = np.isscalar(shape.total_parameters) and shape.total_parameters == 0
    return replace(
        shape,
        num_parameters=shape.num_parameters / size_ratio,
        total_parameters=0 if is_dense else shape.total_parameters / size_ratio,
        head_dim=head_dim,
        num_heads=shape.num_heads * split,
        num_kv_heads=shape.num_kv_heads * split,
    )


def keeps_loss(baseline: TransformerConfig, candidate: TransformerConfig) -> bool:
    """Whether a change keeps the loss: padded vocabulary, or the same attention width in other heads of 64 to 256.

    >>> from shapewright.models.read import read_model
    >>> own = read_model("gpt3-2.7b").config
    >>> heads = read_model("gpt3-2.7b", {"num_heads": 20}).config
    >>> keeps_loss(own, heads), heads.head_dim
    (True, 128)
    >>> keeps_loss(own, read_model("gpt3-2.7b", {"num_layers": 36}).config)
    False
    """
    fields = ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "vocab_size")
    if replace(candidate, **{name: getattr(baseline, name) for name in fields}) != baseline:
        return False
    if candidate.vocab_size < baseline.vocab_size:
        return False
    if candidate.head_dim == baseline.head_dim:
        return candidate.num_heads == baseline.num_heads and candidate.num_kv_heads == baseline.num_kv_heads
    keeps_widths = all(
        getattr(candidate, heads) * candidate.head_dim == getattr(baseline, heads) * baseline.head_dim
        for heads in ("num_heads", "num_kv_heads")
    )
    return keeps_widths and NARROWEST_FREE_HEAD <= candidate.head_dim <= WIDEST_FREE_HEAD
