"""find_better_shapes: varied fields, their ranges, and the descriptions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from shapewright.core.errors import WorkloadError
from shapewright.lint.better_shapes import describe, find_better_shapes
from shapewright.lint.check import check_scenario
from shapewright.lint.example import example_scenario
from shapewright.prediction.build import build_scenario
from shapewright.prediction.scenario import Scenario

MANY = 100
# Heads of 80, an odd vocabulary, an MLP 24 short of a multiple of 128.
UNEVEN = {"num_heads": 32, "vocab_size": 50257, "intermediate_size": 10216}


def test_each_kind_of_change_is_tried() -> None:
    """Heads, MLP, vocabulary and depth are varied and combined."""
    shapes = find_better_shapes(example_scenario(**UNEVEN), limit=MANY)
    kinds = [set(shape.changes) & {"num_heads", "intermediate_size", "vocab_size", "num_layers"} for shape in shapes]

    assert {"intermediate_size"} in kinds
    assert {"vocab_size"} in kinds
    assert any("num_layers" in kind for kind in kinds)
    assert {"num_heads", "intermediate_size", "vocab_size"} in kinds
    mlp_alone = [shape.changes["intermediate_size"] for shape in shapes if set(shape.changes) == {"intermediate_size"}]
    assert mlp_alone[0] == 10240
    assert all(width % 64 == 0 for width in mlp_alone)
    assert {shape.changes["vocab_size"] for shape in shapes if "vocab_size" in shape.changes} == {50304}


def test_gain_is_per_time_and_parameter() -> None:
    """In inference a shape with 1 % more parameters in the same time gains 1 %: 1 - 1 / (speed-up x growth)."""
    scenario = example_scenario(**UNEVEN)
    scenario = scenario.replace(workload=replace(scenario.workload, phase="prefill"))
    shapes = find_better_shapes(scenario, limit=MANY)

    assert shapes
    for shape in shapes:
        growth = 1.0 + shape.parameters_change_fraction
        assert shape.gain_fraction == pytest.approx(1.0 - 1.0 / (shape.speedup * growth))
        assert shape.gain_fraction >= 0.005
        assert shape.speedup > 1.0
        assert shape.effect is not None
        assert shape.effect.net_speedup is None


def test_better_shapes_reach_the_same_loss_sooner() -> None:
    """In training the gain is that of the time to the same loss, and no shape is offered whose net effect is a loss."""
    shapes = find_better_shapes(example_scenario(**UNEVEN), limit=MANY)
    free = [shape for shape in shapes if shape.effect is not None and shape.effect.is_free]

    assert {"num_heads", "vocab_size"} <= set(free[0].changes)
    for shape in shapes:
        assert shape.effect is not None
        assert shape.effect.net_speedup is not None
        assert shape.gain_fraction == pytest.approx(1.0 - 1.0 / shape.effect.net_speedup.factor)
        assert shape.gain_fraction >= 0.005
    gains = [shape.gain_low_fraction for shape in shapes]
    assert gains == sorted(gains, reverse=True)


def test_depth_moves_by_a_few_layers_and_stays_divisible() -> None:
    """15 % of 32 layers are 4: 28 or 36 on four stages; the width changes in the opposite direction, if at all."""
    shapes = find_better_shapes(example_scenario(**UNEVEN, pipeline_parallel=4, global_batch_size=32), limit=MANY)
    deeper = [shape for shape in shapes if "num_layers" in shape.changes]

    assert deeper
    for shape in deeper:
        assert shape.changes["num_layers"] in (28, 36)
        assert (shape.changes["hidden_size"] - 2560) * (32 - shape.changes["num_layers"]) >= 0
        assert shape.changes["hidden_size"] % 128 == 0


@pytest.mark.parametrize(("num_layers", "farthest"), [(16, 2), (32, 4), (64, 4)])
def test_depth_moves_by_few_layers_and_keeps_proportions(num_layers: int, farthest: int) -> None:
    """At most 15 % of the layers and four; heads stay multiples of four, f / h changes by at most a quarter."""
    scenario = example_scenario(**UNEVEN, num_layers=num_layers)
    changed = [shape.changes for shape in find_better_shapes(scenario, limit=MANY) if "num_layers" in shape.changes]

    assert changed
    for changes in changed:
        ratio = changes["intermediate_size"] / changes["hidden_size"] / (10216 / 2560)
        assert 0 < abs(changes["num_layers"] - num_layers) <= farthest
        assert changes.get("num_heads", 32) % 4 == 0
        assert 0.75 <= ratio <= 1.25


def test_experts_keep_their_depth() -> None:
    """The depth of a mixture of experts is not varied."""
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 1366}
    shapes = find_better_shapes(example_scenario(**UNEVEN, **experts), limit=MANY)

    assert shapes
    assert not [shape for shape in shapes if "num_layers" in shape.changes]


def test_widths_that_compensate_depth_divide_over_devices() -> None:
    """With tensor parallelism of 4, an adjusted MLP width is a multiple of 128 on each device."""
    shapes = find_better_shapes(example_scenario(**UNEVEN, tensor_parallel=4), limit=MANY)
    widths = [shape.changes["intermediate_size"] for shape in shapes if "num_layers" in shape.changes]

    assert widths
    assert all(width % (4 * 128) == 0 for width in widths)


def test_better_shapes_of_a_scenario_that_fits_fit() -> None:
    """On a device with just enough memory, only shapes that need no more are returned."""
    roomy = example_scenario(**UNEVEN)
    needed_bytes = roomy.predict().memory.total_bytes
    full = Scenario.of(roomy.config, replace(roomy.device, memory_bytes=needed_bytes), roomy.workload, roomy.layout)
    needs_bytes = []
    for scenario in (roomy, full):
        changed = [scenario.try_replace(shape.changes) for shape in find_better_shapes(scenario, limit=MANY)]
        needs_bytes.append([after.predict().memory.total_bytes for after in changed if after is not None])

    assert max(needs_bytes[0]) > needed_bytes
    assert max(needs_bytes[1]) <= needed_bytes


def test_a_description_omits_dependent_fields() -> None:
    """Key-value heads are described only where they differ from the heads."""
    plain = example_scenario(num_heads=32).config
    changes = {"num_heads": 20, "num_kv_heads": 20, "head_dim": 128, "v_head_dim": 128, "vocab_size": 50304}
    assert describe(plain, changes) == "num_heads 32 -> 20, head_dim 80 -> 128"

    grouped = example_scenario(num_heads=32, num_kv_heads=8).config
    assert describe(grouped, {**changes, "num_kv_heads": 5}) == (
        "num_heads 32 -> 20, num_kv_heads 8 -> 5, head_dim 80 -> 128"
    )


def test_losses_are_compared_after_the_tokens_of_the_run() -> None:
    """Other tokens than 20 per parameter reach the effect of each shape; none are taken outside training."""
    scenario = example_scenario(**UNEVEN)
    usual, long = (find_better_shapes(scenario, limit=MANY, train_tokens=tokens) for tokens in (None, 3e12))
    served = scenario.replace(phase="prefill", micro_batch_size=1)

    assert {shape.effect.train_tokens for shape in long if shape.effect} == {3e12}
    assert 3e12 not in {shape.effect.train_tokens for shape in usual if shape.effect}
    assert check_scenario(scenario, train_tokens=3e12).train_tokens == 3e12
    with pytest.raises(WorkloadError, match="train_tokens has no effect in prefill"):
        check_scenario(served, train_tokens=3e12)
    with pytest.raises(WorkloadError, match="train_tokens"):
        check_scenario(scenario, train_tokens=float("nan"))


@pytest.mark.parametrize("model", ["olmo-hybrid-7b", "granite-4.0-h-micro", "lfm2-1.2b"])
def test_depths_of_a_hybrid_keep_the_share_of_attention(model: str) -> None:
    """Attention is every fourth layer of OLMo Hybrid: 34 layers would have 8, a smaller share than 8 of 32."""
    scenario = build_scenario(model, "h100-sxm-80gb", workload={"micro_batch_size": 1, "seq_len": 2048})
    configs = [replace(scenario.config, **shape.changes) for shape in find_better_shapes(scenario, limit=MANY)]
    shares = [
        Fraction(sum(one.kind_of_layer(index).has_attention for index in range(one.num_layers)), one.num_layers)
        for one in (scenario.config, *configs)
    ]

    assert set(shares) == {shares[0]}
