"""Properties of the lint: an applied suggestion resolves its finding, and never makes the step slower."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.lint.better_shapes import MOST_PARAMETERS_CHANGE_FRACTION, find_better_shapes
from shapewright.lint.evaluate import INFO_FROM_FRACTION, evaluate
from shapewright.lint.rule import Finding, Rule, list_rules
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

DEVICES = {name: load_device(name) for name in ("a100-sxm-40gb", "h100-sxm-80gb", "v100-sxm2-32gb", "h200-sxm-141gb")}
SMALL = st.sampled_from((1, 2, 3, 4, 5, 6, 8))


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    """Draw shapes with any head dimension, MLP width and vocabulary."""
    head_dim = draw(st.sampled_from((32, 40, 64, 66, 80, 96, 100, 128, 132, 192, 256)))
    num_heads = draw(st.sampled_from((4, 8, 12, 16, 20, 24, 32, 32, 40)))
    queries_per_kv = draw(st.sampled_from([each for each in (1, 2, 4, 8) if num_heads % each == 0]))
    hidden_size = head_dim * num_heads
    gated = draw(st.booleans())
    intermediate_size = draw(
        st.one_of(
            st.just(8 * hidden_size // 3 if gated else 4 * hidden_size),
            st.integers(hidden_size, 4 * hidden_size),
            st.integers(hidden_size // 64, 4 * hidden_size // 64).map(lambda count: 64 * count),
        )
    )
    experts: dict[str, Any] = {}
    if draw(st.integers(0, 3)) == 0:
        experts = {
            "num_experts": draw(st.sampled_from((8, 16, 60, 64))),
            "num_experts_per_token": draw(st.sampled_from((1, 2, 6))),
            "moe_intermediate_size": draw(st.one_of(st.integers(256, 2048), st.sampled_from((448, 768, 1408)))),
        }
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=draw(st.sampled_from((1, 2, 4, 7, 12, 24, 32))),
        num_heads=num_heads,
        num_kv_heads=num_heads // queries_per_kv,
        vocab_size=draw(st.one_of(st.integers(1000, 130000), st.sampled_from((50257, 50304, 32000, 128256)))),
        intermediate_size=intermediate_size,
        gated_mlp=gated,
        fused_gate_up=draw(st.booleans()),
        fused_qkv=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        attention_windows=draw(st.sampled_from(((), (), (1024,), (512, 0)))),
        max_position_embeddings=draw(st.sampled_from((1024, 4096, 32768))),
        **experts,
    )


@st.composite
def cases(draw: st.DrawFn) -> Scenario:
    """Draw a scenario, valid or not."""
    device = DEVICES[draw(st.sampled_from(sorted(DEVICES)))]
    phase = draw(st.sampled_from(("train", "train", "prefill", "decode")))
    data_parallel = draw(SMALL)
    micro_batch_size = draw(SMALL)
    micro_batches = draw(st.sampled_from((None, 1, 2, 4, 16)))
    workload = Workload(
        phase=phase,
        micro_batch_size=micro_batch_size,
        seq_len=draw(st.sampled_from((128, 512, 1024, 2048, 4096))),
        context_len=1023 if phase == "decode" else 0,
        global_batch_size=micro_batches and micro_batches * micro_batch_size * data_parallel,
        dtype=draw(st.sampled_from(("fp16", "fp16", "fp16", "bf16", "fp32", "fp8"))),
        attention=draw(st.sampled_from(("flash", "unfused"))),
    )
    layout = ParallelLayout(
        tensor_parallel=draw(st.sampled_from((1, 1, 1, 2, 4, 6, 8, 16))),
        pipeline_parallel=draw(st.sampled_from((1, 1, 1, 2, 3, 4))),
        data_parallel=data_parallel,
        sequence_parallel=draw(st.booleans()),
    )
    return Scenario.of(draw(configs()), device, workload, layout)


def findings_of(rule: Rule, scenario: Scenario) -> list[Finding]:
    """Findings of one rule."""
    judged = [evaluate(rule, violation, scenario) for violation in rule.check(scenario)]
    return [finding for finding in judged if finding is not None]


@settings(max_examples=150)
@given(scenario=cases())
def test_an_applied_suggestion_resolves_its_finding(scenario: Scenario) -> None:
    """With a suggestion applied, its rule does not fire for that field, and the step is not slower per token.

    What runs at another layout or batch fits, or needs no more than what does not fit now.
    """
    for rule in list_rules():
        for finding in findings_of(rule, scenario):
            for suggestion in finding.suggestions:
                after = scenario.try_replace(suggestion.changes)
                shown = f"{finding.code} {finding.message} [{suggestion.title}]"

                assert after is not None, shown
                assert not [again.message for again in findings_of(rule, after) if again.field == finding.field], shown
                if suggestion.predicted_gain_fraction is not None:
                    assert after.time_per_token_s <= scenario.time_per_token_s * (1 + 1e-9), shown
                if scenario.is_possible and suggestion.kind == "runtime" and not after.fits:
                    assert not scenario.fits, shown
                    assert after.predict().memory.total_bytes <= scenario.predict().memory.total_bytes, shown


@settings(max_examples=20)
@given(scenario=cases())
def test_better_shapes_are_better_and_as_large(scenario: Scenario) -> None:
    """Every better shape is faster, within the parameter limit, and possible."""
    assume(scenario.is_possible)
    for shape in find_better_shapes(scenario):
        after = scenario.try_replace(shape.changes)

        assert after is not None
        assert after.predict().step_time_s == shape.step_time_s < scenario.predict().step_time_s
        assert abs(shape.parameters_change_fraction) <= MOST_PARAMETERS_CHANGE_FRACTION


@settings(max_examples=50)
@given(scenario=cases())
def test_cost_is_at_least_the_threshold(scenario: Scenario) -> None:
    """The cost of a finding is above the threshold and below the step time."""
    for rule in list_rules():
        for finding in findings_of(rule, scenario):
            if finding.cost_fraction is not None and finding.cost_s is not None:
                assert INFO_FROM_FRACTION <= finding.cost_fraction < 1.0
                assert finding.cost_s == pytest.approx(finding.cost_fraction * scenario.predict().step_time_s)


@settings(max_examples=50)
@given(scenario=cases())
def test_rules_never_fail(scenario: Scenario) -> None:
    """Rules never raise, whatever the shape; only the prediction may."""
    for rule in list_rules():
        findings_of(rule, scenario)
    assert scenario.is_possible or isinstance(scenario.outcome, ShapewrightError)
