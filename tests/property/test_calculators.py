"""Properties of the calculators: waterfalls add up, fractions lie in 0..1, larger sizes need no less memory."""

from __future__ import annotations

from math import fsum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shapewright
from shapewright.core.errors import LayoutError
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.compare import BOUNDS
from shapewright.workload.optimizers import OPTIMIZERS
from shapewright.workload.workload import RECOMPUTE_MODES

DEVICES = st.sampled_from(("a100-sxm-80gb", "h100-sxm-80gb", "v100-sxm2-32gb", "mi300x", "l4", "cerebras-wse-2"))
POWERS = st.sampled_from((1, 2, 4, 8))


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    """Draw a small decoder, odd widths and experts included."""
    num_heads = draw(st.sampled_from((4, 8, 12)))
    num_experts = draw(st.sampled_from((0, 0, 8)))
    return TransformerConfig(
        hidden_size=num_heads * draw(st.sampled_from((32, 64, 72, 80, 128))),
        num_layers=draw(st.integers(1, 12)),
        num_heads=num_heads,
        intermediate_size=draw(st.integers(8, 600)) * 8,
        vocab_size=draw(st.integers(1000, 60_000)),
        gated_mlp=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        num_experts=num_experts,
        num_experts_per_token=2 if num_experts else 0,
    )


@settings(max_examples=40)
@given(
    config=configs(),
    device=DEVICES,
    seconds=st.floats(1e-3, 1e3),
    num_devices=POWERS,
    batch=st.sampled_from((8, 24, 64)),
    recompute=st.sampled_from(RECOMPUTE_MODES),
)
def test_every_waterfall_adds_up(
    config: TransformerConfig, device: str, seconds: float, num_devices: int, batch: int, recompute: str
) -> None:
    """Parts sum to the measured time, quantization gives no time back, HFU is at least MFU, conventions are ordered."""
    found = shapewright.mfu(
        config,
        device=device,
        seconds=seconds,
        num_devices=num_devices,
        global_batch_size=batch,
        workload={"recompute": recompute, "seq_len": 1024},
    )
    by_name = {result.name: result for result in found.conventions}

    assert by_name["megatron-causal"].mfu <= by_name["megatron"].mfu
    assert by_name["6n"].mfu <= by_name["llm-foundry"].mfu
    assert all(result.hfu is None or result.hfu >= result.mfu for result in found.conventions)
    parts = {part.name: part.time_s for part in found.waterfall}
    if not parts:  # a device without a link, or a batch that no layout divides
        assert any(note.startswith("no waterfall") for note in found.notes)
        return
    assert fsum(parts.values()) == pytest.approx(seconds, rel=1e-9, abs=1e-9)
    never_negative = ("alignment", "tiles", "waves", "recompute", "optimizer", "communication", "bubble")
    assert all(parts[name] >= 0.0 for name in never_negative)


@settings(max_examples=40)
@given(
    config=configs(),
    device=DEVICES,
    phase=st.sampled_from(("train", "prefill", "decode")),
    optimizer=st.sampled_from(sorted(set(OPTIMIZERS) - {"lora-plus"})),  # which needs adapters
    batch=st.sampled_from((1, 3, 64, 2**16)),
)
def test_every_capacity_is_consistent(
    config: TransformerConfig, device: str, phase: str, optimizer: str, batch: int
) -> None:
    """It fits exactly if its micro-batch is no larger than the largest; what fits has no remedies."""
    found = shapewright.fits(
        config, device=device, workload={"phase": phase, "micro_batch_size": batch}, optimizer=optimizer
    )
    assert found.fits == (batch <= found.largest_micro_batch_size)
    assert found.fits == (found.verdict != "does not fit")
    assert not (found.fits and found.fit_options)
    assert all(remedy.needed_bytes <= found.device.memory_bytes for remedy in found.fit_options)


@settings(max_examples=30)
@given(config=configs(), device=DEVICES, tensor_parallel=POWERS, pipeline_parallel=POWERS)
def test_every_bound_is_a_share(
    config: TransformerConfig, device: str, tensor_parallel: int, pipeline_parallel: int
) -> None:
    """Shares of a step are between 0 and 1 and add up to 1; a refusal has its reason."""
    layout = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    try:
        (row,) = shapewright.compare(config, devices=[device], layout=layout, workload={"seq_len": 512}).rows
    except LayoutError:  # degrees that do not divide the model
        return
    if row.prediction is None:
        assert row.refusal is not None
        return
    assert tuple(row.bound_fractions) == BOUNDS
    assert all(0.0 <= fraction <= 1.0 + 1e-9 for fraction in row.bound_fractions.values())
    assert sum(row.bound_fractions.values()) == pytest.approx(1.0)
