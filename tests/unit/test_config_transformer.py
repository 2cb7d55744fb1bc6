"""TransformerConfig: defaults, validation, layer groups, changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.core.errors import ConfigError
from shapewright.models.transformer import TransformerConfig, with_changes

SMALL: dict[str, Any] = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 100}


def small(**fields: Any) -> TransformerConfig:
    """A small config with some fields set."""
    return TransformerConfig(**{**SMALL, **fields})


def test_defaults_follow_from_the_sizes() -> None:
    """Zeros are replaced by defaults: heads, head widths, inner width."""
    config = small()
    assert (config.num_kv_heads, config.head_dim, config.v_head_dim) == (4, 16, 16)
    assert (config.intermediate_size, config.embedding_size) == (256, 64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 0}, ["hidden_size=0", "from 1 to 2**40"]),
        ({"hidden_size": -64}, ["hidden_size=-64"]),
        ({"hidden_size": "64"}, ["hidden_size='64'", "an integer"]),
        ({"hidden_size": True}, ["hidden_size=True"]),
        ({"hidden_size": math.nan}, ["hidden_size=nan"]),
        ({"hidden_size": 64.0}, ["hidden_size=64.0"]),
        ({"hidden_size": None}, ["hidden_size=None"]),
        ({"hidden_size": 10**18}, ["hidden_size=1000000000000000000"]),
        ({"hidden_size": 10**5000}, ["hidden_size=a number of 16610 bits"]),
        ({"num_layers": 10**6}, ["num_layers=1000000", "65536"]),
        ({"num_heads": 7}, ["hidden_size=64", "num_heads=7", "try num_heads=8, hidden_size=63 or 70", "head_dim"]),
        ({"hidden_size": 67}, ["hidden_size=67", "try hidden_size=64 or 68, or give head_dim"]),
        ({"num_kv_heads": 3}, ["num_kv_heads=3", "divide num_heads=4", "try num_kv_heads=2 or 4"]),
        ({"norm": "batchnorm"}, ["norm='batchnorm'", "layernorm, rmsnorm"]),
        ({"attention_dropout": 1.5}, ["attention_dropout=1.5"]),
        ({"attention_dropout": math.nan}, ["attention_dropout=nan"]),
        ({"gated_mlp": 1}, ["gated_mlp=1", "true or false"]),
        ({"activation": "g" * 1000}, ["activation", "at most 200"]),
        ({"attention_windows": 7}, ["attention_windows=7", "list"]),
        ({"attention_windows": (4, -1)}, ["attention_windows[1]=-1"]),
        ({"num_experts": 4}, ["num_experts_per_token=0", "from 1 to num_experts=4"]),
        ({"num_experts": 4, "num_experts_per_token": 5}, ["num_experts_per_token=5", "num_experts=4"]),
        ({"num_experts_per_token": 2}, ["num_experts_per_token=2", "needs num_experts"]),
        ({"num_experts": 4, "num_experts_per_token": 1, "moe_layers": (False,)}, ["has no true entry"]),
        ({"num_encoder_layers": 3}, ["num_encoder_layers=3", "encoder-decoder"]),
        ({"q_lora_rank": 8}, ["q_lora_rank=8", "kv_lora_rank"]),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 16}, ["qk_rope_head_dim=16", "below head_dim=16"]),
        ({"kv_lora_rank": 8, "num_kv_heads": 2}, ["num_kv_heads=2", "num_heads=4"]),
    ],
)
def test_contradictions_are_named(fields: dict[str, Any], words: list[str]) -> None:
    """An error states the field, its value and what is allowed, on one line."""
    with pytest.raises(ConfigError) as caught:
        small(**fields)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_layer_groups() -> None:
    """Windows and experts that repeat with periods 2 and 3 give groups whose counts add up to the layers."""
    config = small(
        num_layers=7, attention_windows=(8, 0), num_experts=2, num_experts_per_token=1, moe_layers=(True, True, False)
    )
    # layer    0    1    2    3    4    5    6
    # window   8    0    8    0    8    0    8
    # experts  yes  yes  no   yes  yes  no   yes
    assert [tuple(group[:3]) for group in config.layer_groups()] == [
        (8, True, 3),
        (0, True, 2),
        (8, False, 1),
        (0, False, 1),
    ]


@given(
    num_layers=st.integers(1, 30),
    windows=st.lists(st.sampled_from([0, 8, 16]), max_size=5),
    moe_layers=st.lists(st.booleans(), max_size=4).filter(lambda flags: not flags or flags[0]),
)
def test_layer_groups_agree_with_the_layers(num_layers: int, windows: list[int], moe_layers: list[bool]) -> None:
    """Counting layer by layer gives the same groups for any pattern."""
    config = small(
        num_layers=num_layers,
        attention_windows=tuple(windows),
        num_experts=2,
        num_experts_per_token=1,
        moe_layers=tuple(moe_layers),
    )
    kinds = [
        (windows[index % len(windows)] if windows else 0, moe_layers[index % len(moe_layers)] if moe_layers else True)
        for index in range(num_layers)
    ]
    assert {(window, is_moe): count for window, is_moe, count, *_ in config.layer_groups()} == {
        kind: kinds.count(kind) for kind in kinds
    }


def test_stacks_are_separate() -> None:
    """An encoder-decoder has groups for each stack; the encoder has the depth of the decoder by default."""
    config = small(stack="encoder-decoder", num_layers=3)
    assert [tuple(group[:3]) for group in config.layer_groups()] == [(0, False, 3)]
    assert [tuple(group[:3]) for group in config.encoder_layer_groups()] == [(0, False, 3)]
    assert small().encoder_layer_groups() == ()


def test_patterns_are_reduced_to_one_period() -> None:
    """Two ways to write the same layers give equal configs."""
    assert small(attention_windows=(8, 0, 8, 0)) == small(attention_windows=(8, 0))
    assert small(attention_windows=(0, 0, 0, 0)) == small()


def test_derived_widths_follow_a_change() -> None:
    """Derived fields with their default values follow a change of the number of heads or the width."""
    config = with_changes(small(), {"num_heads": 2, "hidden_size": 96})
    assert (config.head_dim, config.num_kv_heads, config.intermediate_size) == (48, 2, 384)


def test_explicit_widths_stay() -> None:
    """Fields that differ from their defaults do not change."""
    config = with_changes(
        small(head_dim=24, num_kv_heads=2, intermediate_size=200), {"num_heads": 2, "hidden_size": 96}
    )
    assert (config.head_dim, config.num_kv_heads, config.intermediate_size) == (24, 2, 200)


def test_first_dense_layers_stay_first() -> None:
    """A pattern that does not repeat is truncated, or extended with its last value."""
    config = small(num_experts=2, num_experts_per_token=1, moe_layers=(False, True, True, True))
    longer = with_changes(config, {"num_layers": 6})
    assert [longer.is_moe_layer(index) for index in range(6)] == [False, True, True, True, True, True]
    assert with_changes(config, {"num_layers": 2}).moe_layers == (False, True)


def test_one_expert_width_under_two_names() -> None:
    """If no layer is dense, intermediate_size and moe_intermediate_size change together."""
    config = small(num_experts=2, num_experts_per_token=1, intermediate_size=96)
    for name in ("intermediate_size", "moe_intermediate_size"):
        changed = with_changes(config, {name: 80})
        assert (changed.intermediate_size, changed.moe_intermediate_size) == (80, 80)


def test_unknown_field_names_have_a_hint() -> None:
    """A misspelt field is an error with a suggestion."""
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'"):
        with_changes(small(), {"hiden_size": 8})
