"""Models of very many layers take no longer than those of few: layers and pipeline stages are counted by kind."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shapewright.core.errors import ConfigError
from shapewright.core.traced import Tape, Traced, sum_of_products
from shapewright.lowering.counts import count_layers
from shapewright.memory.estimate import estimate_memory, estimate_stages
from shapewright.memory.stages import peak_stage_candidates
from shapewright.models.layers import count_kinds
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


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


@pytest.mark.parametrize("num_layers", [64, 65])
def test_stages_without_a_period_are_told_apart(num_layers: int) -> None:
    """Of random windows and experts, the peak of inference and the busiest stage are those of a full look."""
    chosen = random.Random(num_layers)
    for _ in range(20):
        windows = tuple(chosen.choice((0, 16, 64, 200)) for _ in range(num_layers))
        config = make_config(num_layers, windows, (True, *(chosen.random() < 0.5 for _ in range(5))))
        layout = ParallelLayout(pipeline_parallel=chosen.choice((5, 8, 13)))
        workload = Workload(phase="decode", micro_batch_size=8, context_len=chosen.choice((8, 100, 1000)))
        totals = [stage.total_bytes for stage in estimate_stages(config, workload, layout)]
        stages = [layout.layers_of_stage(num_layers, index) for index in range(layout.pipeline_parallel)]

        assert estimate_memory(config, workload, layout).total_bytes == max(totals)
        assert count_layers(config, layout).num_layers == max(map(len, stages))
        busiest = count_layers(config, layout).kinds
        assert sum(count for kind, count in busiest.items() if kind.mlp == "experts") == max(
            sum(config.is_moe_layer(layer) for layer in stage) for stage in stages if len(stage) == len(stages[0])
        )


def test_work_is_bounded_before_it_starts() -> None:
    """Many kinds of layers, and deep models whose layers never repeat, are refused with the field and the bound."""
    with pytest.raises(ConfigError, match=r"attention_windows=\(1, 2, .* gives 33 kinds of layers; at most 32"):
        make_config(64, tuple(range(1, 34)))
    chosen = random.Random(1)
    windows = tuple(chosen.choice((0, 64)) for _ in range(300))
    with pytest.raises(ConfigError, match=r"attention_windows=.* does not repeat within 256 layers"):
        make_config(300, windows)

    assert make_config(250, windows[:250]).num_layers == 250


def test_deep_models_may_begin_with_other_layers() -> None:
    """Three dense layers before 65,533 with experts, and windows of a period of five, take few stages to estimate."""
    config = make_config(65_536, (32, 32, 32, 32, 0), (False,) * 3 + (True,) * 65_533)

    candidates = list(peak_stage_candidates(config, ParallelLayout(pipeline_parallel=8192)))

    assert sum(config.count_kinds(range(65_536)).values()) == 65_536
    assert len(candidates) <= 4


def test_a_traced_number_of_layers_has_few_terms() -> None:
    """A search over vocabularies of a model with 1,100 listed layers has no expression of 1,100 terms."""
    config = make_config(1100, (32,) * 3 + (0,) * 1097)
    tape = Tape()

    counts = count_kinds(config.patterns, 0, tape.variable("num_layers", 1100))

    assert [(kind.window, int(count)) for kind, count in counts] == [(32, 3), (0, 1097)]
    assert all(len(sum_of_products(count.node)) == 1 for _, count in counts if isinstance(count, Traced))
