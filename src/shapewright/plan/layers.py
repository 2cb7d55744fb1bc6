"""What a layer of each kind adds to a step, so that stages of any depth are added up and not lowered again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.layout import ParallelLayout
from shapewright.lowering import LayerCounts, count_encoder_layers, count_layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig


class LayerKinds(NamedTuple):
    """The kinds of layers of a model.

    Lowering is linear in its counts of layers: layers alike are one operation that repeats. A step of any stage is
    therefore a sum over kinds, with a factor for each. The kinds are one layer of each attention window with the MLP of
    the first layer; where MLPs differ, one layer with the other MLP in exchange for one with the first; where positions
    differ, one layer with the other kind likewise; and a layer of an encoder.

    Attributes:
        counts: Layers to lower for each kind: of the stack, and of the encoder.
        windows: Attention windows, in the order of the first kinds.
        has_other_mlp: Whether the next kind exchanges the MLP.
        starts_with_experts: Whether the first layer has experts.
        has_other_positions: Whether the next kind exchanges rotary positions for none, or none for them.
        starts_with_rotary: Whether the first layer has rotary positions.
        has_encoder: Whether the last kind is a layer of an encoder.
    """

    counts: tuple[tuple[LayerCounts, LayerCounts], ...]
    windows: tuple[int, ...]
    has_other_mlp: bool
    starts_with_experts: bool
    has_other_positions: bool
    starts_with_rotary: bool
    has_encoder: bool

    def factors(self, config: TransformerConfig, pipeline_parallel: int) -> NDArray[np.float64]:
        """How many layers of each kind the busiest stage has. [kinds]"""
        layout = ParallelLayout(pipeline_parallel=pipeline_parallel)
        counts = count_layers(config, layout)
        found = [float(counts.windows.get(window, 0)) for window in self.windows]
        if self.has_other_mlp:
            others = float(counts.num_dense if self.starts_with_experts else counts.num_expert)
            found[0] -= others
            found.append(others)
        if self.has_other_positions:
            others = float(counts.num_rotary)
            if self.starts_with_rotary:
                others = counts.num_layers - others
            found[0] -= others
            found.append(others)
        if self.has_encoder:
            found.append(float(count_encoder_layers(config, layout).num_layers))
        return np.array(found)


def kinds_of(config: TransformerConfig) -> LayerKinds:
    """Find the kinds of layers of a model."""
    groups = config.layer_groups()
    windows = tuple(dict.fromkeys(group.window for group in groups))
    has_experts, has_rotary = groups[0].is_moe, config.is_rotary_layer(0)
    none = LayerCounts({}, 0, 0, 0)
    counts = [(_one_layer(window, has_experts=has_experts, has_rotary=has_rotary), none) for window in windows]
    has_other_mlp = len({group.is_moe for group in groups}) > 1
    if has_other_mlp:
        counts.append((_one_layer(windows[0], has_experts=not has_experts, has_rotary=has_rotary), none))
    # Patterns are cut to their period: one that is there has both kinds in it, or none of the rotary one.
    has_other_positions = len(set(config.rotary_layers)) > 1
    if has_other_positions:
        counts.append((_one_layer(windows[0], has_experts=has_experts, has_rotary=not has_rotary), none))
    has_encoder = config.num_encoder_layers > 0
    if has_encoder:
        one = _one_layer(0, has_experts=False, has_rotary=config.position_embedding == "rotary")
        counts.append((none, one))
    return LayerKinds(tuple(counts), windows, has_other_mlp, has_experts, has_other_positions, has_rotary, has_encoder)


def _one_layer(window: int, *, has_experts: bool, has_rotary: bool) -> LayerCounts:
    return LayerCounts({window: 1}, int(not has_experts), int(has_experts), int(has_rotary))
