"""How often things run: micro-batches of a step, and layers of the busiest pipeline stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload


def num_microbatches(workload: Workload, layout: ParallelLayout) -> int:
    """Passes that one replica accumulates before an optimiser step: B / (b * data_parallel).

    Without a global batch size it is one micro-batch per pipeline stage, of DualPipe two. In prefill and decode one
    pass is the step.

    Raises:
        WorkloadError: the global batch does not split into whole micro-batches, or DualPipe has too few of them.

    Source: arXiv 2104.04473, section 2.2.
    """
    if not workload.is_training:
        return 1
    fewest = 2 * layout.pipeline_parallel if layout.pipeline_schedule == "dualpipe" else 1
    if workload.global_batch_size is None:
        return max(layout.pipeline_parallel, fewest)
    per_round = workload.micro_batch_size * layout.data_parallel
    if workload.global_batch_size % per_round:
        below = workload.global_batch_size // per_round * per_round
        allowed = f"{below} or {below + per_round}" if below else f"{per_round}"
        raise WorkloadError(
            f"global_batch_size={workload.global_batch_size} must be a multiple of micro_batch_size * data_parallel = "
            f"{workload.micro_batch_size} * {layout.data_parallel}; try {allowed}"
        )
    passes = workload.global_batch_size // per_round
    if fewest > 1 and (passes < fewest or passes % 2):
        raise WorkloadError(
            f"pipeline_schedule='dualpipe' needs an even number of micro-batches, two for each of pipeline_parallel="
            f"{layout.pipeline_parallel} stages and more: {passes} are too few or odd; give a global_batch_size of "
            f"{max(fewest, passes + passes % 2) * per_round}"
        )
    return passes


def layers_per_stage(config: TransformerConfig, layout: ParallelLayout) -> int:
    """Layers of the busiest pipeline stage, ceil(L / p); of an encoder-decoder, its decoder layers.

    Ends that count as layers do not change it: L and they fill p stages of k layers, so that ceil(L / p) is k unless
    each of the stages is an end with a layer less.
    """
    return -(-config.num_layers // layout.pipeline_parallel)


def spare_layers(config: TransformerConfig, layout: ParallelLayout) -> int:
    """Layers by which the stages together have fewer than the busiest one: p ceil(L / p) - L.

    Stages at the ends of the model can do with fewer, and make up for what they have besides.
    """
    return layout.pipeline_parallel * layers_per_stage(config, layout) - config.num_layers


@dataclass(frozen=True)
class LayerCounts:
    """Layers of one stack on one pipeline stage, by kind.

    Attributes:
        windows: Layers by attention window; 0 is attention to all positions.
        num_dense: Layers with an ordinary MLP.
        num_expert: Layers with experts.
        num_rotary: Layers that turn queries and keys by their positions.
    """

    windows: Mapping[int, int]
    num_dense: int
    num_expert: int
    num_rotary: int

    @property
    def num_layers(self) -> int:
        """All layers."""
        return self.num_dense + self.num_expert


def count_layers(config: TransformerConfig, layout: ParallelLayout) -> LayerCounts:
    """Count the (decoder) layers of the busiest stage by kind.

    Stages hold consecutive layers. The busiest one has the most layers, then the most expert layers, then the fewest
    windowed ones, then the most rotary ones: experts are what makes a layer slow, windows what makes it fast.
    """
    size = layers_per_stage(config, layout)
    groups = config.layer_groups()
    if len(groups) == 1 and not config.rotary_layers:
        num_expert = size if groups[0].is_moe else 0
        return LayerCounts({groups[0].window: size}, size - num_expert, num_expert, size * config.is_rotary_layer(0))
    stages = [layout.layers_of_stage(config.num_layers, index) for index in range(layout.pipeline_parallel)]
    return max((_count_stage(config, stage) for stage in stages), key=_work)


def count_encoder_layers(config: TransformerConfig, layout: ParallelLayout) -> LayerCounts:
    """Count the encoder layers of one stage of an encoder-decoder; they have no windows and no experts."""
    num_layers = -(-config.num_encoder_layers // layout.pipeline_parallel)
    return LayerCounts({0: num_layers}, num_layers, 0, num_layers * (config.position_embedding == "rotary"))


def _count_stage(config: TransformerConfig, stage: range) -> LayerCounts:
    num_expert = sum(config.is_moe_layer(layer) for layer in stage)
    num_rotary = sum(config.is_rotary_layer(layer) for layer in stage)
    windows = Counter(config.window_of_layer(layer) for layer in stage)
    return LayerCounts(windows, len(stage) - num_expert, num_expert, num_rotary)


def _work(counts: LayerCounts) -> tuple[int, int, int, int]:
    return counts.num_layers, counts.num_expert, counts.windows.get(0, 0), counts.num_rotary
