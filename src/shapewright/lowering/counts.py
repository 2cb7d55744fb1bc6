"""Counts of executions: micro-batches of a step, and layers of the busiest pipeline stage by kind."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.memory.stages import unlike_stages
from shapewright.models.layers import ATTENTION, NO_MIXER, LayerKind, mixers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


def num_microbatches(workload: Workload, layout: ParallelLayout) -> int:
    """Count the micro-batches of one replica per optimizer step: B / (b * data_parallel).

    Without a global batch size there is one micro-batch per pipeline stage, with DualPipe two. Prefill and decode
    steps have a single pass.

    Raises:
        WorkloadError: the global batch is not a multiple of the micro-batches, or DualPipe has too few of them.

    Source: arXiv 2104.04473, section 2.2.
    """
    if not workload.is_training:
        return 1
    if workload.global_batch_size is None:
        return layout.default_microbatches
    fewest = layout.default_microbatches if layout.pipeline_schedule == "dualpipe" else 1
    per_round = workload.micro_batch_size * layout.data_parallel
    if workload.global_batch_size % per_round:
        below = workload.global_batch_size // per_round * per_round
        allowed = f"{below} or {below + per_round}" if below else f"{per_round}"
        raise WorkloadError(
            f"global_batch_size={workload.global_batch_size} must be a multiple of "
            + with_fields("{micro_batch_size} * {data_parallel}")
            + f" = {workload.micro_batch_size} * {layout.data_parallel}",
            advice=f"try {allowed}",
            field="global_batch_size",
        )
    passes = workload.global_batch_size // per_round
    if fewest > 1 and (passes < fewest or passes % 2):
        raise WorkloadError(
            f"pipeline_schedule='dualpipe' requires an even number of micro-batches, at least two for each of "
            f"pipeline_parallel={layout.pipeline_parallel} stages, but there are {passes}; use "
            f"global_batch_size={max(fewest, passes + passes % 2) * per_round}"
        )
    return passes


def layers_per_stage(config: TransformerConfig, layout: ParallelLayout) -> int:
    """Count the layers of the busiest pipeline stage, ceil(L / p); for an encoder-decoder, its decoder layers.

    Ends that count as layers do not change this: together with L they fill p stages of k layers, and ceil(L / p) is k
    unless every stage is an end with one layer less.
    """
    return -(-config.num_layers // layout.pipeline_parallel)


def spare_layers(config: TransformerConfig, layout: ParallelLayout) -> int:
    """Count the layers that stages lack in total compared with the busiest one: p ceil(L / p) - L.

    Stages at the ends of the model can have fewer layers to compensate for the embedding and the logits.
    """
    return layout.pipeline_parallel * layers_per_stage(config, layout) - config.num_layers


@dataclass(frozen=True)
class LayerCounts:
    """Layers of one stack on one pipeline stage.

    Attributes:
        kinds: Number of layers by kind.
    """

    kinds: Mapping[LayerKind, int]

    @cached_property
    def windows(self) -> Mapping[int, int]:
        """Layers with attention by attention window; 0 is attention to all positions."""
        found: Counter[int] = Counter()
        for kind, count in self.kinds.items():
            if kind.has_attention:
                found[kind.window] += count
        return found

    @cached_property
    def mixers(self) -> Mapping[str, int]:
        """Layers by mixer, without softmax attention."""
        found: Counter[str] = Counter()
        for kind, count in self.kinds.items():
            for mixer in mixers_of(kind.layer_type):
                found[mixer] += count
        del found[ATTENTION]
        return found

    @property
    def num_attention(self) -> int:
        """Layers with softmax attention."""
        return sum(self.windows.values())

    @property
    def num_dense(self) -> int:
        """Layers with an ordinary MLP."""
        return sum(count for kind, count in self.kinds.items() if kind.mlp == "dense")

    @property
    def num_expert(self) -> int:
        """Layers with experts."""
        return sum(count for kind, count in self.kinds.items() if kind.mlp == "experts")

    @property
    def num_rotary(self) -> int:
        """Layers with rotary positions."""
        return sum(count for kind, count in self.kinds.items() if kind.is_rotary)

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return sum(self.kinds.values())

    @property
    def num_branches(self) -> int:
        """Additions to the residual stream of all layers: one of its mixers and one of its MLP, where it has them."""
        return sum(count * ((kind.layer_type != NO_MIXER) + (kind.mlp != "none")) for kind, count in self.kinds.items())


def count_layers(config: TransformerConfig, layout: ParallelLayout) -> LayerCounts:
    """Count the (decoder) layers of the busiest stage by kind.

    Stages have consecutive layers. The busiest has the most layers; ties are broken by the most expert layers (which
    are slow), then by the most layers that attend to all positions, then by the most rotary layers.
    """
    patterns = config.patterns
    if patterns.period == 1:
        return LayerCounts({patterns.kind_of(0): layers_per_stage(config, layout)})
    return LayerCounts(config.count_kinds(_find_busiest(config, layout)))


def _find_busiest(config: TransformerConfig, layout: ParallelLayout) -> range:
    """Find the layers of the busiest stage."""
    stages = [layout.layers_of_stage(config.num_layers, index) for index in unlike_stages(config, layout)]
    return max(stages, key=lambda stage: _work(LayerCounts(config.count_kinds(stage))))


def count_trained_layers(config: TransformerConfig, workload: Workload, counts: LayerCounts) -> LayerCounts:
    """Count the layers with a backward pass of the busiest stage: all, or the last ones of the model.

    Args:
        counts: Layers of the stage, which is the last one if others have fewer layers to train.
    """
    if workload.last_layers is None:
        return counts
    num_trained = min(workload.last_layers, counts.num_layers)
    if len(counts.kinds) <= 1:
        return LayerCounts(dict.fromkeys(counts.kinds, num_trained) if num_trained else {})
    return LayerCounts(config.count_kinds(range(config.num_layers - num_trained, config.num_layers)))


def count_recomputed_layers(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> LayerCounts:
    """Count the layers of the busiest stage that run again with ``recompute_layers``: the first ones that are trained.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_block.py (the block method).
    """
    num_layers, patterns = layers_per_stage(config, layout), config.patterns
    num_recomputed = num_layers if workload.recompute_layers is None else min(workload.recompute_layers, num_layers)
    is_last = workload.last_layers is not None
    if patterns.period == 1:
        start = config.num_layers - num_layers
        kept = workload.trained_layers(start, start + num_recomputed, config.num_layers)
        return LayerCounts({patterns.kind_of(0): kept} if kept else {})
    start = config.num_layers - num_layers if is_last else _find_busiest(config, layout).start
    stop = start + num_recomputed
    return LayerCounts(config.count_kinds(range(stop - workload.trained_layers(start, stop, config.num_layers), stop)))


def count_encoder_layers(config: TransformerConfig, layout: ParallelLayout) -> LayerCounts:
    """Count the encoder layers of one stage of an encoder-decoder; they have no windows and no experts."""
    num_layers = -(-config.num_encoder_layers // layout.pipeline_parallel)
    return LayerCounts({LayerKind(is_rotary=config.position_embedding == "rotary"): num_layers})


def _work(counts: LayerCounts) -> tuple[int, int, int, int]:
    return counts.num_layers, counts.num_expert, counts.windows.get(0, 0), counts.num_rotary
