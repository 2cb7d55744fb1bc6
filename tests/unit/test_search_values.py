"""Values that a search tries: aligned, inside their range, the baseline's own among them, and none left out."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.core.errors import ConfigError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.search.branches import list_branches
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.space.space import FieldValues
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ALL = ("width", "depth", "heads", "kv_heads", "ffn", "vocab", "micro_batch")
RANGES = {"head_dim": (64.0, 128.0), "kv_group": (1.0, 8.0), "ffn_ratio": (2.0, 8.0)}


def values_of(
    vary: tuple[str, ...] = ALL,
    *,
    layout: ParallelLayout | None = None,
    keep: dict[str, int] | None = None,
    guard: str = "usual",
    ranges: dict[str, tuple[float, float]] | None = None,
    **fields: Any,
) -> FieldValues:
    """Values around a model of 4096, 32 heads of 128 and 8 key-value heads, with some fields changed."""
    sizes = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 50257, **fields}
    request = SearchRequest(vary=vary, keep=keep or {}, guard=guard)
    return FieldValues(
        TransformerConfig(**sizes),
        layout or ParallelLayout(),
        request,
        request.free_fields(),
        {**RANGES, **(ranges or {})},
        has_square_heads=False,
    )


def step_of(values: list[int], own: int) -> int:
    """Distance of neighbours without the baseline's own value, all alike."""
    others = [value for value in values if value != own or value % 64 == 0]
    steps = {after - before for before, after in itertools.pairwise(others)}
    assert len(steps) == 1, steps
    return steps.pop()


@given(st.integers(64, 40_000), st.sampled_from((1, 2, 4, 8)))
def test_widths_are_whole_lines_of_each_slice(hidden_size: int, t: int) -> None:
    """Multiples of 64 per device, coarser or finer by powers of two for 8 to 33 of them, a third down and up."""
    config = {"hidden_size": hidden_size, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64}
    widths = values_of(layout=ParallelLayout(tensor_parallel=t), **config).widths()
    assert hidden_size in widths
    assert all(0.75 * hidden_size - 1 <= width <= 1.35 * hidden_size for width in widths)
    others = [width for width in widths if width != hidden_size]
    unit = 8
    while others and all(width % (2 * unit) == 0 for width in others) and unit < 2**20:
        unit *= 2
    assert all(width % 8 == 0 for width in others)
    assert len(widths) <= 34
    if hidden_size >= 8 * 8 * 8:
        assert len(widths) >= 8
    # Nothing of the coarsest unit that all share is missing: neighbours are one unit apart, but for the baseline's own.
    assert len(others) >= (1.35 - 0.75) * hidden_size / unit - 2


@pytest.mark.parametrize(("t", "step"), [(1, 128), (2, 128), (4, 256), (8, 256)])
def test_widths_of_4096_by_hand(t: int, step: int) -> None:
    """0.6 * 4096 = 2457.6: 38 steps of 64 are too many, 19 of 128 are not; of 512 they are 4, and halved once 9."""
    widths = values_of(layout=ParallelLayout(tensor_parallel=t)).widths()
    assert step_of(widths, 4096) == step
    assert (widths[0], widths[-1]) == (3072, 5504 // step * step)


@given(
    st.sampled_from(((32, 8), (32, 32), (40, 8), (12, 12), (71, 1), (25, 25))),
    st.sampled_from((64, 80, 128)),
    st.sampled_from(("usual", "free")),
    st.booleans(),
)
def test_heads_keep_the_attention_as_wide_as_it_is(
    heads: tuple[int, int], head_dim: int, guard: str, frees_groups: bool
) -> None:
    """A d / h stays; heads are as wide as kernels or as the own ones; groups divide; heads split as they did."""
    vary = ("width", "heads", "kv_heads") if frees_groups else ("width", "heads")
    listed = values_of(
        vary, guard=guard, hidden_size=heads[0] * head_dim, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim
    )
    found = list(listed.heads())
    assert (heads[0] * head_dim, heads[0], head_dim, heads[1]) in found
    assert len(found) == len(set(found))
    for width, num_heads, wide, num_kv_heads in found:
        assert num_heads * wide == width
        assert wide == head_dim or (wide % (8 if guard == "free" else 32) == 0 and 64 <= wide <= 128)
        assert num_heads % num_kv_heads == 0
        if guard == "usual" and (num_heads, num_kv_heads) != heads:
            for power in (2, 4):
                assert heads[0] % power or num_heads % power == 0 or num_heads == heads[0]
            assert heads[1] % 2 or num_kv_heads % 2 == 0 or num_kv_heads == heads[1]
        if not frees_groups:
            same_group = num_heads * heads[1] == num_kv_heads * heads[0]
            assert same_group or num_kv_heads == heads[1]
    # Every head width that the attention's width allows is there, where heads may be any number.
    if guard == "free":
        width = heads[0] * head_dim
        wanted = {wide for wide in range(64, 129, 8) if width % wide == 0}
        assert wanted <= {wide for own, _, wide, _ in found if own == width}


def test_every_group_of_key_value_heads_is_tried() -> None:
    """32 heads in groups of 1, 2, 4 and 8, which the guard allows; 16 would be too many."""
    found = values_of(("kv_heads",)).heads()
    assert {num_kv_heads for _, _, _, num_kv_heads in found} == {4, 8, 16, 32}
    narrow = values_of(("kv_heads",), ranges={"kv_group": (2.0, 4.0)}).heads()
    assert {num_kv_heads for _, _, _, num_kv_heads in narrow} == {8, 16}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"num_heads": 64}, {(64, 64)}),
        ({"head_dim": 64}, {(64, 64)}),
        ({"head_dim": 256}, {(16, 256)}),
        ({"num_heads": 48, "head_dim": 80}, {(48, 80)}),
        ({"num_kv_heads": 4}, {(32, 128), (64, 64)}),
    ],
)
def test_only_kept_heads_are_searched(keep: dict[str, int], expected: set[tuple[int, int]]) -> None:
    """Kept head fields hold in every combination of heads, whether or not heads vary."""
    found = list(values_of(("heads",), keep=keep).heads())
    if "num_kv_heads" not in keep:
        assert list(values_of(("depth",), keep=keep).heads()) == found
    assert {(num_heads, head_dim) for _, num_heads, head_dim, _ in found} == expected
    assert {width for width, _, _, _ in found} == {4096}
    if "num_kv_heads" in keep:
        assert {num_kv_heads for _, _, _, num_kv_heads in found} == {4}


def test_free_head_widths_change_the_attentions_width() -> None:
    """From half to one and a half times as wide as it is."""
    found = {(heads, wide) for _, heads, wide, _ in values_of(("heads", "head_dim")).heads()}
    shares = [heads * wide / 4096 for heads, wide in found]
    assert {(32, 64), (32, 96), (32, 128)} <= found
    assert {wide for _, wide in found} == {64, 96, 128}
    assert min(shares) >= 0.5
    assert max(shares) <= 1.5
    assert min(shares) < 0.9


def test_the_mlp_stays_in_proportion() -> None:
    """F / h is the baseline's where that is whole, else the nearest multiple of 64 per device, and at least one."""
    listed = values_of(intermediate_size=11008, layout=ParallelLayout(tensor_parallel=2))
    assert listed.ffn_at(8192) == 22016
    assert Fraction(listed.ffn_at(2048), 2048) == Fraction(11008, 4096)
    # 11008 * 4000 / 4096 = 10750 is whole; 11008 * 4001 / 4096 = 10752.69 is not: 84 * 128 = 10752
    assert (listed.ffn_at(4000), listed.ffn_at(4001)) == (10750, 10752)
    assert listed.ffn_at(1) == 128


def test_mlp_widths_cover_the_ratio_in_aligned_steps() -> None:
    """Half to twice as wide, and what the guard allows of that: here 2 to 8 times the residual stream."""
    found = values_of(("ffn",), intermediate_size=16384, layout=ParallelLayout(tensor_parallel=4)).ffn([4096])
    assert (found[0], found[-1]) == (2 * 4096, 8 * 4096)
    assert step_of(found, 16384) == 256
    wider = values_of(("ffn",), intermediate_size=16384, ranges={"ffn_ratio": (1.0, 6.0)}).ffn([2048, 4096])
    assert (wider[0], wider[-1]) == (2 * 2048, 6 * 4096)
    assert values_of(("heads",), intermediate_size=16384).ffn([4096]) == [16384]
    assert values_of(("ffn",), keep={"intermediate_size": 999}).ffn([4096]) == [999]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, list(range(22, 49))),
        ({"pipeline_parallel": 4}, [24, 28, 32, 36, 40, 44, 48]),
        ({"pipeline_parallel": 4, "virtual_pipeline": 2}, [24, 32, 40, 48]),
    ],
)
def test_depths_fill_the_stages(layout: dict[str, int], expected: list[int]) -> None:
    """Two thirds to one and a half times 32 layers (21.12 to 48), as many on each stage and chunk."""
    listed = values_of(("depth",), layout=ParallelLayout(**layout)).depth()
    assert listed[-len(expected) :] == expected
    assert listed[0] >= 21
    assert values_of(("depth",), keep={"num_layers": 7}).depth() == [7]
    assert values_of(("heads",)).depth() == [32]


def test_vocabularies_are_paddings_of_the_given_one() -> None:
    """50257 to a multiple of 8, 64, 128 and 256, on two devices of each; never more than 2 % larger, never smaller."""
    assert values_of(("vocab",)).vocab() == [50257, 50264, 50304, 50432]
    assert values_of(("vocab",), layout=ParallelLayout(tensor_parallel=8)).vocab() == [
        50257, 50264, 50304, 50432, 50688, 51200
    ]  # fmt: skip
    assert values_of(("vocab",), vocab_size=100).vocab() == [100]
    assert values_of(("vocab",), keep={"vocab_size": 60000}).vocab() == [60000]
    with pytest.raises(ConfigError, match="losses of another tokenizer cannot be compared"):
        values_of(("vocab",), keep={"vocab_size": 100}).vocab()
    assert values_of(("heads",)).vocab() == [50257]


def test_micro_batches_are_powers_of_two_and_the_given_one() -> None:
    """1 to 64, and 3 if that is what it was."""
    assert values_of(("micro_batch",)).micro_batch(Workload(micro_batch_size=3)) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert values_of(("micro_batch",), keep={"micro_batch_size": 5}).micro_batch(Workload()) == [5]
    assert values_of(("heads",)).micro_batch(Workload(micro_batch_size=3)) == [3]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_other_experts_cost_and_hold_as_much(name: str) -> None:
    """Finer and coarser experts, shared ones too: parameters in all and per token stay within the tolerance."""
    config = read_model(name).config
    baseline = Scenario.of(config, load_device("h100-sxm-80gb"), Workload(global_batch_size=64))
    branches = list_branches(baseline, SearchRequest(vary=("experts",), tolerance_fraction=0.02))
    others = [branch for branch in branches if branch.changed]
    assert branches[0].changes == {}
    assert {branch.changed for branch in others} == {("experts",)}
    own = count_parameters(config)
    shapes = [baseline.replace(**branch.changes).config for branch in others]
    for shape in shapes:
        counts = count_parameters(shape)
        assert counts.total == pytest.approx(own.total, rel=0.02)
        assert counts.active == pytest.approx(own.active, rel=0.02)
        assert shape.moe_intermediate_size % 64 == 0
        assert bool(shape.shared_expert_intermediate_size) == bool(config.shared_expert_intermediate_size)
    assert {2 * config.num_experts, config.num_experts // 2} <= {shape.num_experts for shape in shapes}


def test_recomputation_is_a_branch_of_training_alone() -> None:
    """Each other mode, in the layouts that cut the batch; inference recomputes nothing."""
    config, device = read_model("llama-3-8b").config, load_device("h100-sxm-80gb")
    request = SearchRequest(vary=("recompute",))
    branches = list_branches(Scenario.of(config, device, Workload(recompute="selective")), request)
    assert [branch.changes for branch in branches] == [{}, {"recompute": "none"}, {"recompute": "full"}]
    assert [branch.changed for branch in branches] == [(), ("recompute",), ("recompute",)]
    with pytest.raises(WorkloadError, match="vary=recompute has no meaning in phase='decode'"):
        list_branches(Scenario.of(config, device, Workload(phase="decode")), request)
