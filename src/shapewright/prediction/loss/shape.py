"""The part of a model's shape that its loss depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.models.parameters import count_parameters

if TYPE_CHECKING:
    from shapewright.core.numeric import Count
    from shapewright.models import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ShapeForLoss:
    """Shape of one model, or of many as arrays that broadcast against each other.

    Attributes:
        num_parameters: Parameters of the layers that one token uses: embedding and logit matrix are left out, of
            routed experts the selected ones are counted.
        hidden_size: Width of the residual stream.
        num_layers: Layers.
        head_dim: Width of a query head.
        intermediate_size: Inner width of the MLP that one token uses, over all its experts.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        gated_mlp: Whether the MLP has three matrices instead of two.
        total_parameters: Parameters of the layers with all routed experts; 0 for ``num_parameters``.
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

    @classmethod
    def of(cls, config: TransformerConfig) -> ShapeForLoss:
        """Return the shape of a model; layers of an encoder count as layers.

        >>> from shapewright.models import TransformerConfig
        >>> gpt2 = TransformerConfig(hidden_size=768, num_layers=12, num_heads=12, vocab_size=50257)
        >>> ShapeForLoss.of(gpt2).num_parameters == 12 * (12 * 768**2 + 2 * 768)
        True
        """
        counts = count_parameters(config)
        layers = counts.layers + counts.encoder_layers
        inner = config.intermediate_size
        if config.is_moe:
            inner = config.num_experts_per_token * config.moe_intermediate_size + config.shared_expert_intermediate_size
        return cls(
            num_parameters=sum(group.num_layers * layer.active for group, layer in layers),
            total_parameters=sum(group.num_layers * layer.total for group, layer in layers),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers + (config.num_encoder_layers if config.has_cross_attention else 0),
            head_dim=config.head_dim,
            intermediate_size=inner,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            gated_mlp=config.gated_mlp,
        )
