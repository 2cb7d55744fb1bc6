"""Formula of the training loss by parameters, tokens and shape, and its derivatives.

    loss = E + A (N_eff / N0)^-a + B (N / N0)^c (D / D0)^-b

    ln N_eff = ln N - k bowl(ln(hidden_size / num_layers) - w0 - w1 ln(N / N0))     width and depth
                    - u bowl(ln head_dim - d0)                                      width of a head
                    - m bowl(ln r - r0)                                             MLP over attention parameters
                    - g ln(num_heads / num_kv_heads)                                shared keys and values
                    + e ln(all parameters / used ones)                              experts
                    + q ln(MLP width of a token / that of an expert / 8)             number of experts
    bowl(x) = 2 (sqrt(1 + x^2) - 1), twice the pseudo-Huber function: x^2 near 0, 2 |x| far from it

N are the parameters of the layers that a token uses, D the training tokens. A shape that is not the best of its size
has the loss of a smaller model of the best shape, of N_eff parameters. The terms of width, depth and heads are fitted
to public losses (docs/loss.md); the others are priors from named literature, since no public table varies those fields
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.models.layers import NO_MIXER
from shapewright.models.parameters import count_parameters

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.models.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ShapeForLoss:
    """Shape of one model, or of many as arrays that broadcast against each other.

    Attributes:
        num_parameters: Parameters of the layers that one token uses: embedding and logit matrix are left out, of
            routed experts the selected ones are counted.
        hidden_size: Width of the residual stream.
        num_layers: Layers of a mixer and an MLP.
        head_dim: Width of a query head.
        intermediate_size: Inner width of the MLP that one token uses, over all its experts.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        gated_mlp: Whether the MLP has three matrices instead of two.
        total_parameters: Parameters of the layers with all routed experts; 0 for ``num_parameters``.
        expert_width: Inner width of one routed expert; 0 without experts.
    """

    num_parameters: Count
    hidden_size: Count
    num_layers: Count
    head_dim: Count
    intermediate_size: Count
    num_heads: Count
    num_kv_heads: Count
    gated_mlp: bool | Count = True
    total_parameters: Count = 0
    expert_width: Count = 0

    @classmethod
    def of(cls, config: TransformerConfig) -> ShapeForLoss:
        """Return the shape of a model; layers of an encoder count, and half of those without mixer or MLP.

        Fitted models have both in each layer; Nemotron-H lists them as layers of their own.

        >>> from shapewright.models.transformer import TransformerConfig
        >>> gpt2 = TransformerConfig(hidden_size=768, num_layers=12, num_heads=12, vocab_size=50257)
        >>> ShapeForLoss.of(gpt2).num_parameters == 12 * (12 * 768**2 + 2 * 768)
        True
        """
        counts = count_parameters(config)
        layers = counts.layers + counts.encoder_layers
        num_layers: Any = config.num_layers + (config.num_encoder_layers if config.has_cross_attention else 0)
        halves = [group.num_layers for group, _ in layers if group.layer_type == NO_MIXER or not group.has_mlp]
        if halves:
            num_layers = num_layers - sum(halves) / 2
        inner = config.intermediate_size
        if config.is_moe:
            inner = config.num_experts_per_token * config.moe_intermediate_size + config.shared_expert_intermediate_size
        return cls(
            num_parameters=sum(group.num_layers * layer.active for group, layer in layers),
            total_parameters=sum(group.num_layers * layer.total for group, layer in layers),
            hidden_size=config.hidden_size,
            num_layers=num_layers,
            head_dim=config.head_dim,
            intermediate_size=inner,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            gated_mlp=config.gated_mlp,
            expert_width=config.moe_intermediate_size if config.is_moe else 0,
        )


REFERENCE_PARAMETERS = 1e8
"""N0, the size that coefficients refer to."""
REFERENCE_TOKENS = 1e10
"""D0, the tokens that coefficients refer to."""
_REFERENCE_EXPERTS = 8.0
"""Experts of a token that the loss refers to, as most public models have them."""
COEFFICIENTS = (
    "floor_nats",
    "log_capacity_nats",
    "capacity_exponent",
    "log_token_nats",
    "token_exponent",
    "token_size_exponent",
    "curvature",
    "log_best_width_per_layer",
    "best_width_growth",
    "head_curvature",
    "log_best_head_dim",
    "mlp_curvature",
    "log_best_mlp_ratio",
    "shared_kv",
    "expert_share",
    "expert_granularity",
)
"""E, ln A, a, ln B, b, c, k, w0, w1, u, d0, m, r0, g, e, q of the law, in the order of the covariance."""


@dataclass(frozen=True, kw_only=True)
class LawTerms:
    """Parts of the law for some shapes.

    Attributes:
        log_parameters: ln(N / N0).
        log_tokens: ln(D / D0).
        width_offset: ln(hidden_size / num_layers) minus its best value for the size.
        head_offset: ln(head_dim) minus its best value.
        mlp_offset: ln(MLP over attention parameters) minus its best value.
        log_shared: ln(num_heads / num_kv_heads).
        log_experts: ln(all parameters / used ones).
        log_granularity: ln(MLP width of a token over that of an expert), minus its reference; 0 without experts.
        log_effective: ln(N_eff / N0).
        capacity_nats: Second term of the loss, A (N_eff / N0)^-a. [nats]
        token_nats: Third term of the loss, B (N / N0)^c (D / D0)^-b. [nats]
    """

    log_parameters: Any
    log_tokens: Any
    width_offset: Any
    head_offset: Any
    mlp_offset: Any
    log_shared: Any
    log_experts: Any
    log_granularity: Any
    log_effective: Any
    capacity_nats: Any
    token_nats: Any


def evaluate_terms(coefficients: Mapping[str, Any], shape: ShapeForLoss, train_tokens: Numeric) -> LawTerms:
    """Evaluate the parts of the law; coefficients, shapes and tokens broadcast against each other."""
    value, active = coefficients, shape.num_parameters
    size = np.log(active / REFERENCE_PARAMETERS)
    tokens = np.log(train_tokens / REFERENCE_TOKENS)
    width_offset = np.log(shape.hidden_size / shape.num_layers) - value["log_best_width_per_layer"]
    if np.any(value["best_width_growth"]):  # without it, arrays of widths and depths need not broadcast to all sizes
        width_offset = width_offset - value["best_width_growth"] * size
    head_offset = np.log(shape.head_dim) - value["log_best_head_dim"]
    attention = 2.0 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    mlp = (2.0 + shape.gated_mlp) * shape.intermediate_size
    mlp_offset = np.log(mlp / attention) - value["log_best_mlp_ratio"]
    shared = np.log(shape.num_heads / shape.num_kv_heads)
    is_dense = np.isscalar(shape.total_parameters) and shape.total_parameters == 0
    experts = 0.0 if is_dense else np.log(np.maximum(shape.total_parameters, active) / active)
    granularity = _log_granularity(shape)
    # Terms of few fields are added first: in a grid of shapes their arrays are much smaller than that of the sizes.
    heads = value["head_curvature"] * _bowl(head_offset) + value["shared_kv"] * shared
    effective = size - (value["curvature"] * _bowl(width_offset) + heads) - value["mlp_curvature"] * _bowl(mlp_offset)
    if not is_dense:
        effective = effective + value["expert_share"] * experts + value["expert_granularity"] * granularity
    return LawTerms(
        log_parameters=size,
        log_tokens=tokens,
        width_offset=width_offset,
        head_offset=head_offset,
        mlp_offset=mlp_offset,
        log_shared=shared,
        log_experts=experts,
        log_granularity=granularity,
        log_effective=effective,
        capacity_nats=np.exp(value["log_capacity_nats"] - value["capacity_exponent"] * effective),
        token_nats=np.exp(
            value["token_size_exponent"] * size + (value["log_token_nats"] - value["token_exponent"] * tokens)
        ),
    )


def derivatives(coefficients: Mapping[str, Any], terms: LawTerms) -> list[Any]:
    """Return the derivatives of the loss by each coefficient, in the order of ``COEFFICIENTS``."""
    value = coefficients
    by_size = -value["capacity_exponent"] * terms.capacity_nats  # of the loss by ln N_eff
    by_width = by_size * value["curvature"] * _bowl_slope(terms.width_offset)
    return [
        1.0,
        terms.capacity_nats,
        -terms.capacity_nats * terms.log_effective,
        terms.token_nats,
        -terms.token_nats * terms.log_tokens,
        terms.token_nats * terms.log_parameters,
        -by_size * _bowl(terms.width_offset),
        by_width,
        by_width * terms.log_parameters,
        -by_size * _bowl(terms.head_offset),
        by_size * value["head_curvature"] * _bowl_slope(terms.head_offset),
        -by_size * _bowl(terms.mlp_offset),
        by_size * value["mlp_curvature"] * _bowl_slope(terms.mlp_offset),
        -by_size * terms.log_shared,
        by_size * terms.log_experts,
        by_size * terms.log_granularity,
    ]


def _log_granularity(shape: ShapeForLoss) -> Any:
    """Return ln(MLP width of a token over that of an expert), minus its reference; 0 without experts."""
    if np.isscalar(shape.expert_width) and shape.expert_width == 0:
        return 0.0
    has_experts = np.greater(shape.expert_width, 0)
    width = np.where(has_experts, shape.expert_width, 1)
    return np.where(has_experts, np.log(shape.intermediate_size / width / _REFERENCE_EXPERTS), 0.0)


def _bowl(offset: Any) -> Any:
    """Return twice the pseudo-Huber function: x^2 near 0, 2 |x| far from it."""
    return 2.0 * (np.sqrt(1.0 + offset * offset) - 1.0)


def _bowl_slope(offset: Any) -> Any:
    """Return the derivative of ``_bowl``."""
    return 2.0 * offset / np.sqrt(1.0 + offset * offset)
