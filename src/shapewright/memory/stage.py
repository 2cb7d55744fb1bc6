"""Which layers a pipeline stage has, and which stages can be the ones that need most memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shapewright.memory.states import DeviceParameters, count_device_parameters
from shapewright.saved_tensors import ceil_div

if TYPE_CHECKING:
    from shapewright.config.parameters import ParameterCounts
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout


class Stage:
    """Layers of one pipeline stage: consecutive ones, as many on each stage but the last."""

    def __init__(self, config: TransformerConfig, layout: ParallelLayout, index: int) -> None:
        self.config, self.layout, self.index = config, layout, index
        self.is_first = index == 0
        self.is_last = index == layout.pipeline_parallel - 1
        layers = layout.layers_of_stage(config.num_layers, index)
        num_layers = len(layers)
        if _are_alike(config):
            self.windows = {config.window_of_layer(0): num_layers}
            self.moe_layers = num_layers if config.is_moe_layer(0) else 0
        else:
            self.windows = dict(Counter(config.window_of_layer(layer) for layer in layers))
            self.moe_layers = sum(config.is_moe_layer(layer) for layer in layers)
        self.num_layers = num_layers
        self.dense_layers = num_layers - self.moe_layers
        self.encoder_layers = ceil_div(config.num_encoder_layers, layout.pipeline_parallel)

    def layer_kinds(self) -> Iterable[tuple[bool, bool, int]]:
        """Whether a kind of layer has experts, whether it has cross-attention, and how many there are."""
        cross = self.config.has_cross_attention
        kinds = ((True, cross, self.moe_layers), (False, cross, self.dense_layers), (False, False, self.encoder_layers))
        return (kind for kind in kinds if kind[2])


def _are_alike(config: TransformerConfig) -> bool:
    return len(config.attention_windows) <= 1 and len(config.moe_layers) <= 1


def stages_to_compare(config: TransformerConfig, layout: ParallelLayout) -> Iterable[int]:
    """The first stage holds most micro-batches, the last the logits; those between matter where layers differ.

    Where an end counts as a layer, the first stage that is none has a layer more.
    """
    last = min(layout.pipeline_parallel, config.num_layers) - 1
    if not _are_alike(config):
        return (*range(last), layout.pipeline_parallel - 1)
    if layout.pipeline_parallel == 1:
        return (0,)
    has_middle = any(layout.counted_ends) and layout.pipeline_parallel > 2
    return (0, 1, layout.pipeline_parallel - 1) if has_middle else (0, layout.pipeline_parallel - 1)


def count_stage_parameters(stage: Stage, counts: ParameterCounts) -> DeviceParameters:
    """Count what one device of a stage holds."""
    return count_device_parameters(
        stage.config,
        counts,
        stage.layout,
        moe_layers=stage.moe_layers,
        dense_layers=stage.dense_layers,
        encoder_layers=stage.encoder_layers,
        is_first=stage.is_first,
        is_last=stage.is_last,
    )
