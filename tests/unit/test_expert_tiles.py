"""Tiles that serving libraries take for expert layers: tuned shapes, default rules, and what was learned besides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.app.report.explain import explain_operation, explanation_rows
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import GroupedGemm
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.residual import load_residuals
from shapewright.pricing.experts.price import (
    describe_tiles,
    estimate_grouped_gemm_s,
    price_grouped_gemm,
    price_grouped_gemms,
)
from shapewright.pricing.experts.tiles import TUNED, TileRule, tuned_shapes
from shapewright.pricing.price import GemmPrice
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = load_device("h100-sxm-80gb")
SGLANG = "sglang 0.5.14/sglang_fused_moe_triton"
RULES = {
    "vllm": TileRule(library="vllm 0.24.0", per_expert=False, up_to=np.array([32.0, 64.0]), steps=()),
    "sglang": TileRule(library="sglang 0.5.14", per_expert=True, up_to=np.array([1.0]), steps=()),
}
# Gate and up projections of Mixtral 8x7B cut over four devices, 4096 tokens to 2 of 8 experts, as it is served.
SERVED = GroupedGemm(
    name="moe.gate_up", m=8192, n=2 * 3584, k=4096, groups=8, tokens=4096, experts=8, inner=3584
)  # fmt: skip
TRIED = [
    replace(SERVED, m=2 * tokens, groups=min(8, 2 * tokens), tokens=tokens, n=2 * inner, inner=inner)
    for tokens in (1, 30, 60, 90, 500, 5000)
    for inner in (3584, 3600)
]


def price(operation: GroupedGemm, *, library: str = "", **words: bool) -> GemmPrice:
    """Price on an H100."""
    return price_grouped_gemm(operation, H100, load_record("moe", H100.with_pricing(**words)), library=library)


def test_rules_step_by_tokens() -> None:
    """A step includes its largest number of tokens; sglang counts them per expert; tuned shapes are exempt."""
    tokens, experts = np.array([32.0, 33.0, 65.0, 64.0]), np.full(4, 64.0)
    tuned = np.array([64 * 2.0**24 + 192])
    inner = np.array([100.0, 100.0, 100.0, 192.0])

    assert RULES["vllm"].choose(tokens, experts, inner, tuned).tolist() == [0, 1, 2, TUNED]
    assert RULES["sglang"].choose(tokens, experts, inner, tuned).tolist() == [0, 0, 1, TUNED]


def test_tuned_shapes_are_those_of_library_format_and_device() -> None:
    """Vllm 0.24 has Mixtral cut over 4 on an H100 and on L40S; an unknown library or device has nothing."""
    mixtral = 8 * 2.0**24 + 3584

    assert mixtral in tuned_shapes("vllm 0.24.0", "bf16", "h100-sxm-80gb")
    assert mixtral in tuned_shapes("vllm 0.24.0", "fp16", "l40s")
    assert mixtral not in tuned_shapes("vllm 0.24.0", "fp8", "l40s")
    assert len(tuned_shapes("vllm 9", "bf16", "h100-sxm-80gb")) == len(tuned_shapes("vllm 0.24.0", "bf16", "x")) == 0


@pytest.mark.parametrize(
    ("library", "transfer", "holds"),
    [
        ("", "architecture", True),
        ("", "generic", False),
        ("vllm 0.24.3/vllm_triton", "generic", True),
        ("vllm 0.14.0/vllm_fused_moe", "generic", False),
        ("vllm 0.14.0/vllm_fused_moe", "exact", False),
        ("vllm 0.19.0/vllm_fused_moe", "generic", True),
        ("trtllm 1.2/moe_triton", "exact", True),
        ("trtllm 1.2/moe_triton", "generic", False),
        ("vllm 0.24.0/flashinfer_trtllm", "exact", False),
    ],
)
def test_a_rule_holds_for_its_kernels_and_defaults(library: str, transfer: str, holds: bool) -> None:
    """The rule excludes other kernel families and defaults, and unknown libraries on another architecture."""
    assert RULES["vllm"].applies_to(library, transfer) == holds


def test_untuned_shapes_are_slower() -> None:
    """Sglang's default tiles take an H100 twice as long as tuned tiles of an adjacent width."""
    tuned, untuned = (price(replace(SERVED, n=2 * f, inner=f), library=SGLANG) for f in (3584, 3600))

    assert 1.6 * tuned.time_s < untuned.time_s
    assert (untuned.tile_m, untuned.tile_n) == (64, 64)


def test_widened_weights_have_no_files_of_tiles() -> None:
    """Kernels that widen MXFP4 weights choose tiles without the library's files, so no default step slows them."""
    tokens = (30, 60, 90)
    own = [replace(SERVED, m=2 * each, groups=8, tokens=each, n=2 * 3600, inner=3600) for each in tokens]
    narrow, stored = (
        [price(replace(one, weight_dtype="fp4", tokens=count)).time_s for one, count in zip(own, counts, strict=True)]
        for counts in (tokens, (None,) * 3)
    )

    assert narrow == stored
    assert price(own[1]).time_s > price(replace(own[1], tokens=None)).time_s


def test_training_takes_the_best_tile() -> None:
    """Training has no tile rule: widths next to a tuned one cost the same, without residual correction."""
    near, tuned = (
        price(replace(SERVED, n=2 * f, inner=f, is_training=True, dtype="bf16"), library=SGLANG) for f in (3648, 3584)
    )

    assert near.time_s < 1.1 * tuned.time_s
    assert near.correction == tuned.correction == 1.0


def test_training_takes_a_default_that_beats_old_tuned_tiles() -> None:
    """On L40S vllm's tuned tiles are slower than its default for large batches, so training uses the default."""
    device = load_device("l40s")
    record = load_record("moe", device.with_pricing(physics_only=True))
    large = replace(SERVED, m=32768, tokens=16384)

    tuned, default, training = (
        price_grouped_gemm(each, device, record).time_s
        for each in (large, replace(large, experts=9), replace(large, is_training=True))
    )

    assert training == default < 0.95 * tuned


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "b200-sxm-180gb", "l40s"])
def test_one_by_one_together_and_without_reasons_agree(name: str) -> None:
    """Served layers cost the same alone, in a list, in an array, and as a time without reasons."""
    device = load_device(name)
    record = load_record("moe", device)
    columns = {key: np.array([getattr(each, key) for each in TRIED]) for key in ("m", "n", "groups", "tokens", "inner")}

    alone = [price_grouped_gemm(each, device, record) for each in TRIED]

    assert price_grouped_gemms(TRIED, device, record) == alone
    array = replace(SERVED, **columns)
    assert np.asarray(price_grouped_gemm(array, device, record).time_s).tolist() == [each.time_s for each in alone]
    times_s = estimate_grouped_gemm_s(array, device, record)
    assert times_s == pytest.approx([each.time_s for each in alone], rel=1e-9)


def test_price_is_physics_times_residual() -> None:
    """A price contains its correction; with ``physics_only`` it is absent and the interval wider."""
    learned, physics = (price(SERVED, library=SGLANG, physics_only=each) for each in (False, True))

    assert physics.correction == 1.0 != learned.correction
    assert learned.time_s == pytest.approx(physics.time_s * learned.correction)
    assert learned.high_s / learned.low_s < physics.high_s / physics.low_s


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"])
def test_tables_are_those_of_the_record(name: str) -> None:
    """Every table that a record names is in its file, has a layer for each kernel of its rule, and an interval."""
    record = load_record("moe", load_device(name))
    assert record.residual is not None
    tables = load_residuals(record.residual["file"], "moe")

    assert set(record.residual["tables"].values()) == set(tables)
    for section, table in tables.items():
        dtype, _, library = section.partition(" of ")
        raw = record.parameters["libraries"][library][dtype]
        assert len(table.log_steps) == 1 + len(raw.get("untuned", {}).get("steps", ()))
        assert table.has_layers
        assert set(record.residual["interval"]["libraries"][library][dtype]) == {"edges_s", "low", "high"}


def test_step_counts_the_tokens_of_one_device() -> None:
    """Decode of 8 devices with a token each, 2 of 8 experts: 8 (1 - (7/8)^2) = 1.9 tokens reach one; training: none."""
    config = read_model("mixtral-8x7b").config
    layout = ParallelLayout(data_parallel=8, expert_parallel=8)
    served = [
        each
        for each in lower(config, Workload(phase="decode", micro_batch_size=1, context_len=64), layout)
        if isinstance(each, GroupedGemm)
    ]
    trained = [
        each
        for each in lower(config, Workload(micro_batch_size=1, seq_len=64), layout)
        if isinstance(each, GroupedGemm)
    ]

    assert {(each.tokens, each.experts, each.inner) for each in served} == {(2, 1, 14336)}
    assert {(each.tokens, each.experts, each.inner) for each in trained} == {(None, None, None)}


def test_an_explanation_states_whether_tiles_are_tuned() -> None:
    """Qwen3-30B whole on an H100 is untuned in vllm 0.24, Mixtral over four devices is tuned."""
    prediction = build_scenario(
        "qwen3-30b-a3b", "h100-sxm-80gb", workload={"phase": "decode", "context_len": 64}
    ).predict()
    (entry,) = explain_operation(prediction, "moe.down").operations

    assert "no tuned tiles for 128 experts of inner width 768" in explanation_rows(entry)["tiles"]
    assert describe_tiles(SERVED, H100, load_record("moe", H100)).startswith(
        "vllm 0.24.0 has tuned tiles for 8 experts"
    )
    assert describe_tiles(replace(SERVED, tokens=None), H100, load_record("moe", H100)) == ""
