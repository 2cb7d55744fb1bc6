"""Operating points respect memory and load, and no token is faster than its pass."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapewright
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.aggregated import MOST_LOAD_FRACTION
from shapewright.optimize.serving.point import model_as_served, pareto_front

MODELS = st.sampled_from(("gpt2-xl", "llama-3-8b", "mixtral-8x7b", "gemma-2-2b", "deepseek-v2-lite"))
DEVICES = st.sampled_from(("h100-sxm-80gb", "a100-sxm-40gb", "l40s", "mi300x"))


@settings(max_examples=8, deadline=None)
@given(
    model=MODELS,
    device=DEVICES,
    prompt_len=st.integers(1, 3000),
    output_len=st.integers(2, 800),
    num_devices=st.sampled_from((1, 4, 8)),
)
def test_every_point_keeps_to_memory_and_load(
    model: str, device: str, prompt_len: int, output_len: int, num_devices: int
) -> None:
    """Sequences fit where they decode, prefill has room, units fit the devices, a token takes a pass at least."""
    given: dict[str, Any] = {"prompt_len": prompt_len, "output_len": output_len, "num_devices": num_devices}
    try:
        found = shapewright.serve_plan(model, device=device, formats=[], **given)
    except WorkloadError:  # it does not fit on so few devices
        return
    fused = model_as_served(found.config, found.request.server)  # projections as the server has them
    for point in found.points[:: max(len(found.points) // 20, 1)]:
        held = point.num_sequences // (point.num_instances * point.layout.data_parallel)
        assert point.prefill_load_fraction <= MOST_LOAD_FRACTION + 1e-9
        assert point.num_devices <= num_devices
        assert point.ttft.low_s <= point.ttft.middle_s <= point.ttft.high_s
        workload = {
            "phase": "decode",
            "micro_batch_size": point.batch_size,
            "context_len": prompt_len + output_len // 2,
            "kv_block_tokens": 16,
        }
        full = {**workload, "micro_batch_size": held, "context_len": prompt_len + output_len - 1}
        memory = shapewright.predict(model, device=device, workload=full, layout=point.layout).memory
        assert memory.weights_bytes + memory.kv_cache_bytes <= 0.9 * found.device.memory_bytes
        step = shapewright.predict(fused, device=device, workload=workload, layout=point.layout)
        # Over PCIe servers have an all-reduce of their own, which the kernels of a single prediction are slower than.
        share = 1.0 if found.device.intra_node_bandwidth_bytes_per_s else 0.5
        assert point.tpot.middle_s >= share * step.step_time_s * (1 - 1e-9)
    fronts = [point.tokens_per_s_per_device for point in found.front()]
    assert fronts == sorted(fronts)
    speeds = [(point.tokens_per_s_per_user, point.tokens_per_s_per_device) for point in found.front()]
    assert not [
        one for one in speeds if any(other != one and min(map(float.__sub__, other, one)) >= 0 for other in speeds)
    ]
    recommended = found.recommended
    assert recommended is not None
    soon = (point for point in found.points if point.ttft.middle_s <= recommended.ttft_limit_s)
    assert recommended.point in pareto_front(soon)
    best = found.best()
    assert best is not None
    assert best.total_tokens_per_s(num_devices) == pytest.approx(
        max(point.total_tokens_per_s(num_devices) for point in found.points), rel=0.021
    )


SPECULATION = {"num_draft_tokens": 3, "acceptance_fraction": 0.7, "draft_cost_fraction": 0.1}


@pytest.mark.parametrize("speculation", [None, SPECULATION], ids=["plain", "speculative"])
def test_sequences_are_arrivals_times_the_time_that_they_stay(speculation: dict[str, Any] | None) -> None:
    """Little's law: answers a second, times the time of one after its first token, are the sequences at work.

    Where prefill cannot feed them, decoding instances of a disaggregated server hold fewer than they could.
    """
    given: dict[str, Any] = {"prompt_len": 1000, "output_len": 301, "num_devices": 4, "formats": []}
    found = shapewright.serve_plan("llama-3-8b", device="h100-sxm-80gb", speculation=speculation, **given)
    modes = {point.mode for point in found.points}
    assert modes == {"aggregated", "disaggregated"}
    for point in found.points:
        at_work = point.requests_per_s * 300 * point.tpot.middle_s
        if point.mode == "aggregated":
            assert at_work == pytest.approx(point.num_sequences)
        else:
            assert at_work <= point.num_sequences * (1 + 1e-9)
            assert point.num_prefill_instances >= 1
        devices = point.num_instances * point.layout.num_devices
        if point.prefill_layout is not None:
            devices += point.num_prefill_instances * point.prefill_layout.num_devices
        assert point.num_devices == devices <= 4
        assert point.tokens_per_s_per_device * devices == pytest.approx(point.requests_per_s * 301)
    full = [
        point.requests_per_s * 300 * point.tpot.middle_s / point.num_sequences
        for point in found.points
        if point.mode == "disaggregated"
    ]
    assert max(full) == pytest.approx(1.0)
