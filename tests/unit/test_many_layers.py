"""Models of very many layers take no longer than those of few: layers and pipeline stages are counted by kind."""

from __future__ import annotations

from collections import Counter

import pytest

from shapewright.memory.estimate import estimate_stages
from shapewright.memory.states import peak_stage_candidates
from shapewright.models import TransformerConfig
from shapewright.workload import ParallelLayout, Workload


def make_config(num_layers: int, windows: tuple[int, ...], experts: tuple[bool, ...] = ()) -> TransformerConfig:
    """A small model whose layers have some windows, and experts where stated."""
    moe = {"num_experts": 4, "num_experts_per_token": 2, "moe_layers": experts} if experts else {}
    return TransformerConfig(
        hidden_size=64, num_layers=num_layers, num_heads=4, vocab_size=1000, attention_windows=windows, **moe
    )


@pytest.mark.parametrize("layers", [range(14), range(3, 9), range(5, 5), range(2, 13)])
def test_counts_of_a_range_equal_those_layer_by_layer(layers: range) -> None:
    """Windows, experts and rotary positions of consecutive layers, of patterns with other periods."""
    config = make_config(14, (32, 32, 0), (True, False))

    assert config.count_kinds(layers) == Counter(config.kind_of_layer(layer) for layer in layers)


@pytest.mark.parametrize("pipeline", [2, 3, 4, 7, 12])
@pytest.mark.parametrize("experts", [(), (True, False, False)])
def test_the_peak_is_among_the_candidates(pipeline: int, experts: tuple[bool, ...]) -> None:
    """No stage needs more memory than the ones that are looked at."""
    config = make_config(24, (32, 32, 32, 0), experts)
    layout = ParallelLayout(pipeline_parallel=pipeline)
    workload = Workload(micro_batch_size=1, seq_len=256, global_batch_size=2 * pipeline)
    totals = [stage.total_bytes for stage in estimate_stages(config, workload, layout)]

    assert max(totals) == max(totals[index] for index in peak_stage_candidates(config, layout))


def test_few_stages_of_many_are_looked_at() -> None:
    """Of 16,000 stages with two kinds of layers, six."""
    config = make_config(64_000, (1024, 1024, 1024, 0))

    assert len(list(peak_stage_candidates(config, ParallelLayout(pipeline_parallel=16_000)))) <= 6
