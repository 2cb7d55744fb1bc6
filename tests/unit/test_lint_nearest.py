"""Better shapes near a given one: which fields are tried, how far, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shapewright.lint import find_better_shapes
from shapewright.lint.example import example_case
from shapewright.lint.nearest import describe
from shapewright.lint.what_if import WhatIf

MANY = 100
# Heads of 80, an odd vocabulary, an MLP 24 short of a multiple of 128.
UNEVEN = {"num_heads": 32, "vocab_size": 50257, "intermediate_size": 10216}


def test_each_kind_of_change_is_tried() -> None:
    """Heads, MLP, vocabulary and depth each have something to offer here, and go together."""
    shapes = find_better_shapes(example_case(**UNEVEN), limit=MANY)
    kinds = [set(shape.changes) & {"num_heads", "intermediate_size", "vocab_size", "num_layers"} for shape in shapes]

    assert {"intermediate_size"} in kinds
    assert {"vocab_size"} in kinds
    assert any("num_layers" in kind for kind in kinds)
    assert {"num_heads", "intermediate_size", "vocab_size"} in kinds
    mlp_alone = [shape.changes["intermediate_size"] for shape in shapes if set(shape.changes) == {"intermediate_size"}]
    assert mlp_alone[0] == 10240
    assert all(width % 64 == 0 for width in mlp_alone)
    assert {shape.changes["vocab_size"] for shape in shapes if "vocab_size" in shape.changes} == {50304}


def test_gain_is_what_a_step_and_its_parameters_say() -> None:
    """A shape with 1 % more parameters in the same time gains 1 %: 1 - 1 / (speed-up x growth)."""
    for shape in find_better_shapes(example_case(**UNEVEN), limit=MANY):
        growth = 1.0 + shape.parameters_change_fraction
        assert shape.gain_fraction == pytest.approx(1.0 - 1.0 / (shape.speedup * growth))
        assert shape.gain_fraction >= 0.005
        assert shape.speedup > 1.0


def test_depth_moves_by_a_few_layers_and_stays_divisible() -> None:
    """15 % of 32 layers are 4, 28 or 36 on four stages; the width goes the other way, if at all."""
    shapes = find_better_shapes(example_case(**UNEVEN, pipeline_parallel=4, global_batch_size=32), limit=MANY)
    deeper = [shape for shape in shapes if "num_layers" in shape.changes]

    assert deeper
    for shape in deeper:
        assert shape.changes["num_layers"] in (28, 36)
        assert (shape.changes["hidden_size"] - 2560) * (32 - shape.changes["num_layers"]) >= 0
        assert shape.changes["hidden_size"] % 128 == 0


@pytest.mark.parametrize(("num_layers", "farthest"), [(16, 2), (32, 4), (64, 4)])
def test_depth_moves_by_few_layers_and_keeps_proportions(num_layers: int, farthest: int) -> None:
    """15 % of the layers and four at most; heads in fours as before, f / h within a quarter of what it was."""
    case = example_case(**UNEVEN, num_layers=num_layers)
    changed = [shape.changes for shape in find_better_shapes(case, limit=MANY) if "num_layers" in shape.changes]

    assert changed
    for changes in changed:
        ratio = changes["intermediate_size"] / changes["hidden_size"] / (10216 / 2560)
        assert 0 < abs(changes["num_layers"] - num_layers) <= farthest
        assert changes.get("num_heads", 32) % 4 == 0
        assert 0.75 <= ratio <= 1.25


def test_experts_keep_their_depth() -> None:
    """Of a mixture of experts width and depth are not exchanged."""
    experts = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 1366}
    shapes = find_better_shapes(example_case(**UNEVEN, **experts), limit=MANY)

    assert shapes
    assert not [shape for shape in shapes if "num_layers" in shape.changes]


def test_widths_that_make_up_for_depth_split_over_devices() -> None:
    """On four devices of the tensor axis a refitted MLP is a multiple of 128 on each."""
    shapes = find_better_shapes(example_case(**UNEVEN, tensor_parallel=4), limit=MANY)
    widths = [shape.changes["intermediate_size"] for shape in shapes if "num_layers" in shape.changes]

    assert widths
    assert all(width % (4 * 128) == 0 for width in widths)


def test_what_fits_is_not_exchanged_for_what_does_not() -> None:
    """On a device whose memory is just used up only shapes that need no more are better."""
    roomy = example_case(**UNEVEN)
    needed_bytes = roomy.prediction.memory.total_bytes
    full = WhatIf(roomy.config, replace(roomy.device, memory_bytes=needed_bytes), roomy.workload, roomy.layout)
    needs_bytes = []
    for case in (roomy, full):
        changed = [case.changed(shape.changes) for shape in find_better_shapes(case, limit=MANY)]
        needs_bytes.append([after.prediction.memory.total_bytes for after in changed if after is not None])

    assert max(needs_bytes[0]) > needed_bytes
    assert max(needs_bytes[1]) <= needed_bytes


def test_a_description_has_what_differs_and_nothing_that_follows() -> None:
    """Key-value heads that are all heads follow them; where they are fewer they are told."""
    plain = example_case(num_heads=32).config
    changes = {"num_heads": 20, "num_kv_heads": 20, "head_dim": 128, "v_head_dim": 128, "vocab_size": 50304}
    assert describe(plain, changes) == "num_heads 32 -> 20, head_dim 80 -> 128"

    grouped = example_case(num_heads=32, num_kv_heads=8).config
    assert describe(grouped, {**changes, "num_kv_heads": 5}) == (
        "num_heads 32 -> 20, num_kv_heads 8 -> 5, head_dim 80 -> 128"
    )
