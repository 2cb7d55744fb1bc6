"""Suggested shapes: heads, head dimensions, widths and depths that are possible, against all that there are."""

from __future__ import annotations

from dataclasses import replace
from math import log
from random import Random
from typing import Any

import pytest

from shapewright.hardware.loader import load_device
from shapewright.lint.shape_fixes import (
    can_change_depth,
    candidate_head_dims,
    count_width_shards,
    head_dim_fixes,
    head_dim_problem,
    list_mlp_width_fields,
    split_head_fixes,
    whole_expert_fixes,
    width_degree_field,
    width_fixes,
    with_head_dim,
    with_hidden_size,
)
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = load_device("h100-sxm-80gb")
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 96}


def model(**fields: Any) -> TransformerConfig:
    """A small GPT."""
    return TransformerConfig(**{"hidden_size": 1024, "num_layers": 12, "num_heads": 8, "vocab_size": 1024} | fields)


def scenario(config: TransformerConfig, workload: dict[str, Any] | None = None, **layout: Any) -> Scenario:
    """A step of it on H100s."""
    job = Workload(**{"micro_batch_size": 1, "seq_len": 512} | (workload or {}))
    return Scenario.of(config, H100, job).replace(layout=ParallelLayout(**layout))


def test_other_heads_of_one_total_width_are_all_that_there_are() -> None:
    """Whole numbers of query and key-value heads, which share them evenly; even numbers of heads stay even."""
    random = Random(5)
    for _ in range(300):
        num_kv_heads = random.choice((1, 2, 3, 4, 5, 8))
        num_heads, own = num_kv_heads * random.choice((1, 2, 3, 4)), random.choice((32, 64, 80, 96, 100, 128))
        config = model(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=own)
        width = random.choice((32, 48, 64, 80, 96, 128, 160, 256))
        possible = [
            (heads, shared)
            for heads in range(1, 200)
            for shared in range(1, heads + 1)
            if heads * width == num_heads * own and shared * width == num_kv_heads * own
            if heads % shared == 0 and (heads % 2 == 0 or num_heads % 2) and width != own
        ]
        changes = with_head_dim(config, width)

        found = [(changes["num_heads"], changes["num_kv_heads"])] if changes else []
        assert found == possible
        assert changes is None or changes["head_dim"] == changes["v_head_dim"] == width
    assert with_head_dim(model(head_dim=64, v_head_dim=32), 128) is None


@pytest.mark.parametrize(
    ("own", "widths"),
    [(80, (64, 96, 128)), (127, (64, 80, 96, 128)), (128, (64, 80, 96, 160, 192, 256)), (64, (80, 96, 128))],
)
def test_widths_of_heads_to_try(own: int, widths: tuple[int, ...]) -> None:
    """Those of published models up to 128, or up to twice that of the model."""
    assert candidate_head_dims(model(head_dim=own)) == widths


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "t", "expected"),
    [
        (10, 10, 4, {12: 12, 8: 8}),
        (3, 3, 4, {4: 4}),  # none below
        (12, 6, 4, {12: 4}),  # 12 heads divide, 6 key-value heads do not: 4 are nearer than 12, and 2 as near
        (14, 2, 4, {12: 2, 16: 2}),
        (16, 1, 4, {16: 1}),
    ],
)  # fmt: skip
def test_heads_for_a_tensor_axis_by_hand(num_heads: int, num_kv_heads: int, t: int, expected: dict[int, int]) -> None:
    """The nearest multiples of the axis, with nearly as many query heads for a key-value head."""
    fixes = split_head_fixes(
        scenario(model(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64), tensor_parallel=t)
    )
    found = {fix.changes["num_heads"]: fix.changes["num_kv_heads"] for fix in fixes}

    assert found == expected
    for heads, shared in found.items():
        assert heads % t == 0
        assert heads % shared == 0
        assert shared % t == 0 or t % shared == 0
        own = num_heads // num_kv_heads
        ratios = [
            abs(log(heads / count / own))
            for count in range(1, heads + 1)
            if heads % count == 0 and (count % t == 0 or t % count == 0)
        ]
        assert abs(log(heads / shared / own)) == min(ratios)
    assert all(("num_kv_heads" in fix.title) == (num_heads > num_kv_heads) for fix in fixes)


@pytest.mark.parametrize(
    ("own", "attention", "words", "widths"),
    [
        (128, "flash", None, [96, 192]),
        (100, "flash", "is not a multiple of 8, so fused attention pads it", [96, 128]),
        (72, "flash", "runs in the fused kernel for 96, padded", [64, 96]),
        (264, "flash", "is above 256, which fused kernels stop at", [256]),
        (64, "unfused", None, [128]),
        (100, "unfused", "is not a multiple of 64 (unfused, bf16 on h100-sxm-80gb)", [64, 128]),
    ],
)
def test_slow_widths_of_heads_by_hand(own: int, attention: str, words: str | None, widths: list[int]) -> None:
    """Fused kernels have widths of their own; unfused GEMMs load whole lines. The nearest good ones are suggested."""
    asked = scenario(model(head_dim=own), {"attention": attention})
    problem = head_dim_problem(asked)

    assert (problem and problem.text) == words
    assert [fix.changes for fix in head_dim_fixes(asked)] == [
        {"head_dim": width, "v_head_dim": width} for width in widths
    ]


def test_a_wider_model_by_hand() -> None:
    """Heads and MLP grow in proportion; heads of another width only where the old one does not divide."""
    square = model(hidden_size=1024, num_heads=8, num_kv_heads=4, intermediate_size=2816)

    wider = with_hidden_size(square, 1280, 64)
    assert wider == {
        "hidden_size": 1280,
        "num_heads": 10,
        "num_kv_heads": 5,
        "head_dim": 128,
        "v_head_dim": 128,
        "intermediate_size": 3520,  # 2.75 x 1280
        "embedding_size": 1280,
    }
    # 1,120 is no multiple of 128 or 96; of 160 it is 7 heads, which 2 queries a head do not divide; of 80 it is 14.
    other = with_hidden_size(square, 1120, 64)
    assert other is not None
    assert (other["num_heads"], other["num_kv_heads"], other["head_dim"]) == (14, 7, 80)
    assert with_hidden_size(square, 1030, 64) is None
    narrow = with_hidden_size(replace(square, intermediate_size=64), 512, 64)
    assert narrow is not None
    assert narrow["intermediate_size"] == 64
    free = with_hidden_size(model(num_heads=4, head_dim=64, embedding_size=256), 1088, 64)
    assert free == {"hidden_size": 1088, "intermediate_size": 4352}


def test_patterns_that_name_every_layer_fix_the_depth() -> None:
    """A pattern of one layer less than the model repeats, and the depth is free."""
    kinds = (True,) * 11
    assert can_change_depth(model(**EXPERTS, moe_layers=kinds))
    assert not can_change_depth(model(**EXPERTS, moe_layers=(*kinds, False)))
    assert not can_change_depth(model(stack="encoder-decoder", num_encoder_layers=12))


def test_widths_of_the_mlp_by_hand() -> None:
    """Dense, experts, both, and shared ones; routed experts may be split over fewer devices."""
    both = model(**EXPERTS, moe_layers=(False, True), shared_expert_intermediate_size=64)
    layout = ParallelLayout(tensor_parallel=4, expert_parallel=4, expert_tensor_parallel=1)

    assert list_mlp_width_fields(model()) == ("intermediate_size",)
    assert list_mlp_width_fields(model(**EXPERTS)) == ("moe_intermediate_size",)
    assert list_mlp_width_fields(both) == (
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )
    assert [count_width_shards(layout, name) for name in list_mlp_width_fields(both)] == [4, 1, 4]
    assert [width_degree_field(layout, name) for name in list_mlp_width_fields(both)] == [
        "tensor_parallel",
        "expert_tensor_parallel",
        "tensor_parallel",
    ]
    # Lines of 128 bytes are 64 elements: on two devices multiples of 128, and of 512 for whole tiles.
    asked = scenario(model(intermediate_size=1000), tensor_parallel=2)
    assert [fix.changes["intermediate_size"] for fix in width_fixes(asked, "intermediate_size")] == [1024, 896, 512]


@pytest.mark.parametrize(
    ("layout", "phase", "degree"),
    [
        ({"tensor_parallel": 4}, "train", 4),
        ({"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2}, "train", 4),
        ({"tensor_parallel": 4, "sequence_parallel": False}, "train", None),
        ({"tensor_parallel": 4, "sequence_parallel": False}, "prefill", 4),
        ({"tensor_parallel": 16}, "train", None),  # 8 experts
        ({"data_parallel": 4, "expert_parallel": 4}, "train", None),  # they are whole
    ],
)
def test_whole_experts_instead_of_split_ones(layout: dict[str, Any], phase: str, degree: int | None) -> None:
    """As many devices hold whole experts, where the experts divide and each device sends tokens of its own."""
    fixes = whole_expert_fixes(scenario(model(**EXPERTS, num_heads=16), {"phase": phase}, **layout))

    assert [fix.changes for fix in fixes] == (
        [{"expert_tensor_parallel": 1, "expert_parallel": degree}] if degree else []
    )
