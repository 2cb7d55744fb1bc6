"""Pipeline stages of a job: their layers and micro-batches, and which of them can need most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shapewright.models.layers import LayerKind, LayerPatterns, count_ranges
from shapewright.workload.layout import ParallelLayout, layers_of_stage

if TYPE_CHECKING:
    from shapewright.models.layers import IntArray
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload


class Stage:
    """Consecutive layers of one pipeline stage, counted by kind.

    Attributes:
        layer_kinds: Kinds of layer, whether it has cross-attention, and how many there are; windows do not matter.
    """

    def __init__(self, config: TransformerConfig, layout: ParallelLayout, index: int) -> None:
        self.config, self.layout, self.index = config, layout, index
        self.is_first = index == 0
        self.is_last = index == layout.pipeline_parallel - 1
        self._layers = layout.layers_of_stage(config.num_layers, index)
        self.kinds = config.count_kinds(self._layers)
        self.num_layers = len(self._layers)
        encoder = layout.layers_of_stage(config.num_encoder_layers, index) if config.num_encoder_layers else ()
        self.encoder_layers = len(encoder)
        self.layer_kinds = self._list_layer_kinds(self._layers, self.encoder_layers)

    def list_trained_kinds(self, workload: Workload) -> Sequence[tuple[LayerKind, bool, int]]:
        """List the kinds of the layers that have a backward pass, as ``layer_kinds`` does."""
        if workload.last_layers is None:
            return self.layer_kinds
        stop = self._layers.stop
        num_trained = workload.trained_layers(self._layers.start, stop, self.config.num_layers)
        return self._list_layer_kinds(self._layers[len(self._layers) - num_trained :], self.encoder_layers)

    def list_recomputed_kinds(self, workload: Workload) -> Sequence[tuple[LayerKind, bool, int]]:
        """List the kinds of the layers that run again: the first ones, of those with a backward pass.

        Layers of multi-token prediction do so where all do.
        """
        num_first = workload.recompute_layers
        if num_first is None or num_first >= self.num_layers:
            return self.list_trained_kinds(workload)
        first = self._layers[:num_first]
        kept = workload.trained_layers(first.start, first.stop, self.config.num_layers)
        return self._list_layer_kinds(first[len(first) - kept :], min(num_first, self.encoder_layers), has_mtp=False)

    def _list_layer_kinds(
        self, layers: range, encoder_layers: int, *, has_mtp: bool = True
    ) -> Sequence[tuple[LayerKind, bool, int]]:
        counts: dict[LayerKind, int] = {}
        for kind, num_layers in self.config.count_kinds(layers).items():
            key = LayerKind(kind.layer_type, mlp=kind.mlp)
            counts[key] = counts.get(key, 0) + num_layers
        if has_mtp and self.is_last and self.config.num_mtp_layers:
            last = self.config.kind_of_layer(self.config.num_layers - 1)
            key = LayerKind(last.layer_type, mlp=last.mlp)
            counts[key] = counts.get(key, 0) + self.config.num_mtp_layers
        cross = self.config.has_cross_attention
        kinds = [(kind, cross, num_layers) for kind, num_layers in counts.items()]
        return [*kinds, (LayerKind(), False, encoder_layers)] if encoder_layers else kinds


def has_embedding_copy(config: TransformerConfig, num_stages: int) -> bool:
    """Whether the last of several stages needs the token embedding of the first too.

    It is the logit matrix if both are tied, and embeds the inputs of multi-token prediction.

    Source: NVIDIA/Megatron-LM, megatron/core/models/gpt/gpt_model.py (GPTModel.__init__, mtp_process).
    """
    return num_stages > 1 and (config.tied_embeddings or config.num_mtp_layers > 0)


def peak_stage_candidates(
    config: TransformerConfig, layout: ParallelLayout, cached_tokens: Callable[[LayerKind], int] | None = None
) -> Iterable[int]:
    """List the stages among which the one that needs most memory is.

    The first stage has most micro-batches in flight, the last the logits; stages between them can need more only if
    layers differ, or if embedding or loss count as a layer, which gives the second stage a layer more than the first.
    Of those with equal layers the first and the last are listed, as the number of micro-batches in flight falls or
    rises from stage to stage, and in inference the one that caches most.

    Args:
        cached_tokens: Tokens that a layer of some kind caches, in inference.
    """
    num_stages = layout.pipeline_parallel
    windows = config.attention_windows if cached_tokens else ()
    patterns = config.patterns._replace(is_rotary=(False,), windows=windows or (0,))
    if patterns.period == 1:
        has_middle = any(layout.ends_as_layers) and num_stages > 2
        return (0, *(1,) * has_middle, *(num_stages - 1,) * (num_stages > 1))
    kinds, counts = _count_stages(patterns, config.num_layers, num_stages, layout.ends_as_layers)
    middle = np.arange(1, num_stages - 1)
    if cached_tokens is not None:
        tokens = counts @ np.array([cached_tokens(kind) for kind in kinds], dtype=float)
        middle = middle[np.argsort(-tokens[middle], kind="stable")]
    # Windows decide what is cached, and nothing else.
    sets = {kind._replace(window=0): index for index, kind in enumerate(kinds)}
    member = np.array([[kind._replace(window=0) == each for each in sets] for kind in kinds], dtype=np.int64)
    alike = counts @ member
    found = {0, num_stages - 1}
    for order in (middle,) if cached_tokens is not None else (middle, middle[::-1]):
        found.update(order[_first_of_each(alike[order])].tolist())
    return sorted(found)


def unlike_stages(config: TransformerConfig, layout: ParallelLayout) -> Iterable[int]:
    """List the first stage with each set of layers."""
    return _list_unlike(config.patterns, config.num_layers, layout.pipeline_parallel, layout.ends_as_layers)


@lru_cache(maxsize=256)
def _list_unlike(
    patterns: LayerPatterns, num_layers: int, num_stages: int, ends_as_layers: tuple[bool, bool]
) -> tuple[int, ...]:
    _, counts = _count_stages(patterns, num_layers, num_stages, ends_as_layers)
    return tuple(_first_of_each(counts).tolist())


def _first_of_each(rows: IntArray) -> IntArray:
    """Return the index of the first of each set of equal rows."""
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


@lru_cache(maxsize=256)
def _count_stages(
    patterns: LayerPatterns, num_layers: int, num_stages: int, ends_as_layers: tuple[bool, bool]
) -> tuple[list[LayerKind], IntArray]:
    """Count the layers of every stage by kind."""
    ranges = [layers_of_stage(num_layers, num_stages, index, ends_as_layers) for index in range(num_stages)]
    starts, stops = (np.array([getattr(each, end) for each in ranges]) for end in ("start", "stop"))
    return count_ranges(patterns, starts, stops)
