"""Capacity of serving instances worked out by hand, and messages if a model does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.serving.capacity import InstanceCapacity, InstanceSearch
from shapewright.optimize.serving.request import ServingRequest, read_format
from shapewright.prediction.scenario import Scenario
from shapewright.workload.workload import Workload

H100 = load_device("h100-sxm-80gb")


def find(
    model: str | TransformerConfig, *formats: str, message: list[str] | None = None, given: Any = None, **request: Any
) -> list[InstanceCapacity]:
    """Return the capacity of instances on H100s, for prompts of 1000 tokens and outputs of 100."""
    config = read_model(model).config if isinstance(model, str) else model
    search = InstanceSearch(
        scenario=Scenario.of(config, H100, Workload(phase="prefill")),
        request=ServingRequest(**{"prompt_len": 1000, "output_len": 100, **request}),
        given=given or {},
    )
    return search.find([read_format(text) for text in formats or ("bf16",)], [] if message is None else message)[1]


def test_a_cache_by_hand() -> None:
    """Llama 3 8B: 8.03 billion weights of 2 bytes, and 32 layers x 2 x 8 heads x 128 x 2 bytes for each token."""
    (alone,) = find("llama-3-8b", num_devices=1, memory_fraction=0.9)
    parameters = count_parameters(read_model("llama-3-8b").config).total

    assert alone.weights_bytes == pytest.approx(2.0 * parameters)
    assert alone.cache_bytes_per_token == pytest.approx(32 * 2 * 8 * 128 * 2, rel=0.02)  # whole blocks of the cache
    # A pass over 1000 tokens and the runtime take a few GB more.
    assert 0.0 < 0.9 * H100.memory_bytes - alone.weights_bytes - alone.free_bytes < 5e9
    assert alone.cache_tokens == pytest.approx(alone.free_bytes / alone.cache_bytes_per_token, abs=1)
    assert alone.most_sequences == alone.cache_tokens // 1100


def test_the_fullest_stage_decides() -> None:
    """Three layers on two stages: the stage with two has half the room per token and sets the reported capacity."""
    config = TransformerConfig(hidden_size=4096, num_layers=3, num_heads=32, vocab_size=1000)
    (apart,) = find(config, given={"pipeline_parallel": 2, "tensor_parallel": 1}, num_devices=2)
    in_layers = 2 * (4 * 4096**2 + 2 * 4096 * 16384)

    assert apart.cache_bytes_per_token == pytest.approx(2 * 2 * 4096 * 2, rel=0.02)
    assert apart.weights_bytes == pytest.approx(2 * in_layers, rel=0.05)
    assert apart.cache_tokens == pytest.approx(apart.free_bytes / apart.cache_bytes_per_token, abs=1)


def test_room_is_left_for_a_pass_of_2048_tokens_at_most() -> None:
    """Longer prompts come in pieces; shorter ones, and what is in the cache already, need less room for a pass."""
    (short,), (whole,), (longer,), (cached,) = (
        find("llama-3-8b", num_devices=1, **sizes)
        for sizes in (
            {"prompt_len": 128},
            {"prompt_len": 2048},
            {"prompt_len": 30_000},
            {"prompt_len": 2048, "cached_len": 1920},
        )
    )

    assert longer.free_bytes == whole.free_bytes < short.free_bytes == cached.free_bytes


def test_all_layouts_of_a_node_are_looked_at() -> None:
    """Without a number of devices a node is meant, or as many as the fixed degrees need."""
    usual = [capacity.layout.num_devices for capacity in find("llama-3-8b")]
    (given,) = find("llama-3-8b", given={"tensor_parallel": 8, "pipeline_parallel": 2})

    assert usual == sorted(usual)
    assert set(usual) == {1, 2, 4, 8}
    assert given.layout.num_devices == 16
    assert {capacity.layout.num_devices for capacity in find("llama-3-8b", num_devices=2)} == {1, 2}


def test_of_many_layouts_some_of_every_size_are_kept() -> None:
    """On 64 devices experts, tensors and stages make more than 32 layouts: of every size those of fewest stages."""
    message: list[str] = []
    found = find("mixtral-8x7b", message=message, num_devices=64)

    sizes = [capacity.layout.num_devices for capacity in found]
    assert len(found) == 32
    assert set(sizes) == {2, 4, 8, 16, 32, 64}
    assert sizes == sorted(sizes)
    assert {capacity.layout.pipeline_parallel for capacity in found if capacity.layout.num_devices == 32} == {1, 2}
    (words,) = message
    assert words.startswith("bf16: 32 of ")
    assert "fix a degree of the layout to try others" in words


def test_a_format_that_does_not_fit_is_noted_with_its_memory() -> None:
    """70 billion weights are 141 GB in 16 bits and 35 in 4: two devices of 85 GB or one."""
    message: list[str] = []
    found = find("llama-3-70b", "bf16:int4", "bf16", message=message, num_devices=1)

    assert {capacity.format.name for capacity in found} == {"bf16:int4"}
    (words,) = message
    assert "in bf16 does not fit on 1 x h100-sxm-80gb" in words
    assert "it needs 2 (tensor_parallel=2, pipeline_parallel=1, expert_parallel=1): give num_devices 2" in words
    with pytest.raises(WorkloadError, match=r"it needs 2 .*give num_devices 2, or weight_dtype int4, which fits$"):
        find("llama-3-70b", "bf16", "bf16:int4", num_devices=1)
    # Four bits do not help 405 billion on one device, and nothing else is promised.
    with pytest.raises(WorkloadError, match=r"give num_devices 16$"):
        find("llama-3.1-405b", "bf16", "bf16:int4", num_devices=1)
    # 810 GB: twice as many devices are looked at until they hold it, and without a number of them just used.
    with pytest.raises(WorkloadError, match=r"not fit on 2 x .* it needs 16 \(tensor_parallel=8, pipeline_parallel=2"):
        find("llama-3.1-405b", num_devices=2)
    assert {capacity.layout.num_devices for capacity in find("llama-3.1-405b")} == {16}


def test_replicas_of_attention_hold_sequences_each() -> None:
    """Expert ranks have caches of their own: eight of them hold eight times what one has room for."""
    given = {"expert_parallel": 8, "tensor_parallel": 1, "pipeline_parallel": 1}
    (spread,) = find("mixtral-8x7b", given=given, num_devices=8)
    of_one = int(spread.free_bytes / (1100 * spread.cache_bytes_per_token))

    assert spread.most_sequences == 8 * of_one
    assert spread.cache_tokens == pytest.approx(8 * spread.free_bytes / spread.cache_bytes_per_token, abs=8)


def test_degrees_that_need_more_devices_are_refused() -> None:
    """A degree of 8 has no layout on four devices."""
    with pytest.raises(LayoutError, match="no layout of at most 4 devices with tensor_parallel=8"):
        find("llama-3-8b", given={"tensor_parallel": 8}, num_devices=4)
