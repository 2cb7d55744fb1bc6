"""Pricing of expert layers: how rows are split, and what measured blocks show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.app.report.explain import explain_operation, explanation_rows
from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.prediction.build import build_scenario
from shapewright.pricing.calibration.records import CalibrationRecord, load_record
from shapewright.pricing.experts.price import (
    price_grouped_gemm,
    price_grouped_gemms,
    read_idle_row_share,
    split_evenly,
)
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.operations import price_operations
from shapewright.pricing.price import GemmPrice

H100 = load_device("h100-sxm-80gb")
# Gate and up projections of Mixtral 8x7B, 4096 tokens to 2 of 8 experts.
MIXTRAL = GroupedGemm(name="moe.gate_up", m=8192, n=28672, k=4096, groups=8)


def price(operation: GroupedGemm) -> GemmPrice:
    """Price on an H100."""
    return price_grouped_gemm(operation, H100, load_record("moe", H100))


@pytest.fixture(scope="module")
def record() -> CalibrationRecord:
    """The H100's record."""
    return load_record("moe", H100)


def test_rows_split_evenly() -> None:
    """Two rows over 64 experts reach two of them; 100 rows over 8 give 12.5 each; wgrad splits its contraction."""
    few = split_evenly(GroupedGemm(name="moe.up", m=2, n=1024, k=512, groups=64))
    some = split_evenly(GroupedGemm(name="moe.up", m=100, n=1024, k=512, groups=8))
    gradient = split_evenly(GroupedGemm(name="moe.up.wgrad", m=1024, n=512, k=64_000, groups=64, layout="TN"))

    assert (few.batch, few.m) == (2, 1)
    assert (some.batch, some.m) == (8, 12.5)
    assert (gradient.batch, gradient.m, gradient.k) == (64, 1024, 1000)


def test_experts_are_slower_than_the_same_work_as_one_gemm() -> None:
    """Default tiles run below a dense GEMM's rate, measured 565 against 720 TFLOP/s, and tuned ones at it."""
    dense = price_gemm(Gemm(name="x", m=8192, n=28672, k=4096), H100, load_record("gemm", H100))
    served = price(replace(MIXTRAL, tokens=4096, experts=8, inner=14336))

    assert 1.15 <= served.time_s / dense.time_s <= 2.0
    assert 0.9 <= price(MIXTRAL).time_s / dense.time_s <= 1.1


def test_few_tokens_cost_the_reading_of_weights() -> None:
    """64 rows over 8 experts are bound by memory, within 30 % of reading their weights at full bandwidth."""
    found = price(replace(MIXTRAL, m=64))
    reading_s = 8 * 28672 * 4096 * 2 / 3.35e12

    assert found.bound_by == "memory"
    assert 1.0 <= found.time_s / reading_s <= 1.3


def test_experts_without_rows_cost_nothing() -> None:
    """One row takes as long among 128 experts as among 8."""
    assert price(replace(MIXTRAL, m=1, groups=128)).time_s == price(replace(MIXTRAL, m=1)).time_s


def test_vectorized_equals_scalar(record: CalibrationRecord) -> None:
    """Order and numbers are those of single calls."""
    operations = [replace(MIXTRAL, m=m, groups=g) for m, g in [(1, 8), (333, 8), (4096, 64), (70, 128)]]

    together = price_grouped_gemms(operations, H100, record)

    assert together == [price(operation) for operation in operations]


def test_operations_are_priced_with_the_expert_record() -> None:
    """In a step, grouped GEMMs are priced with a moe record and dense ones with a gemm record."""
    experts, dense = price_operations([MIXTRAL, Gemm(name="x", m=512, n=4096, k=4096)], H100)

    assert experts.calibration.record_id.startswith("moe/h100-sxm-80gb/")
    assert dense.calibration.record_id.startswith("gemm/h100-sxm-80gb/")


def test_unnamed_libraries_are_todays_vllm(record: CalibrationRecord) -> None:
    """The default is the record's default kernel, also for an unknown library; a measured one has its own price."""
    names = [name for name, sections in record.parameters["libraries"].items() if "bf16" in sections]
    served = replace(MIXTRAL, tokens=4096, experts=8, inner=14336)
    found = {name: price_grouped_gemm(served, H100, record, library=name).time_s for name in [*names, "other"]}
    vllm = next(name for name in names if name.startswith("vllm"))
    sglang = next(name for name in names if name.endswith("sglang_fused_moe_triton"))

    assert found[vllm] == found["other"] == price(served).time_s
    assert found[sglang] > 1.5 * found[vllm]


def test_an_unmeasured_device_borrows() -> None:
    """An H100 NVL borrows Hopper's fractions, is labelled so, and has a wider interval."""
    device = load_device("h100-nvl")
    found = price_grouped_gemm(MIXTRAL, device, load_record("moe", device))
    own = price(MIXTRAL)

    assert found.calibration.is_uncalibrated
    assert found.high_s / found.time_s > own.high_s / own.time_s


def test_idle_rows_of_a_format_without_a_section(record: CalibrationRecord) -> None:
    """The nearest fallback format's share is used, as for its price; a record without any raises an error."""
    empty = replace(record, parameters={"dtypes": {}, "libraries": {}})

    assert read_idle_row_share(record, "fp4") == read_idle_row_share(record, "fp8") > 0.0
    with pytest.raises(CalibrationError, match=r"no section for fp4 nor for fp8, bf16, fp16"):
        read_idle_row_share(empty, "fp4")


def test_rows_step_up_with_tiles() -> None:
    """At 128 columns, where arithmetic is small, one row more than a tile holds costs a whole row of tiles."""
    rows = np.arange(1, 2049) * 8
    found = price_grouped_gemm(replace(MIXTRAL, m=rows), H100, load_record("moe", H100))

    assert float(np.max(np.diff(found.num_tiles))) >= 8 * 28672 / 256


def test_training_leaves_a_serving_librarys_poor_kernel() -> None:
    """FP8 experts of training take H100's 16-bit fractions at the FP8 rate; all else is as it was measured."""
    narrow = replace(MIXTRAL, dtype="fp8")
    serving, training = price(narrow), price(replace(narrow, is_training=True))
    wide = price(MIXTRAL)
    b200 = load_device("b200-sxm-180gb")
    own = [
        price_grouped_gemm(replace(narrow, is_training=each), b200, load_record("moe", b200)) for each in (True, False)
    ]

    assert 2.5 * training.time_s < serving.time_s
    assert 0.5 * wide.time_s <= training.time_s < 0.65 * wide.time_s
    assert training.calibration.label.endswith("without cutlass, fractions of bf16")
    assert training.high_s / training.low_s > wide.high_s / wide.low_s
    assert price(replace(MIXTRAL, is_training=True)) == wide
    assert own[0] == own[1]


def test_mixed_operations_are_priced_one_by_one() -> None:
    """Training and serving GEMMs of several formats, priced together, keep their order and their own kernels."""
    mixed = [
        replace(MIXTRAL, dtype=dtype, is_training=is_training)
        for dtype in ("fp8", "bf16")
        for is_training in (True, False, True)
    ]
    together = price_grouped_gemms(mixed, H100, load_record("moe", H100))

    assert together == [price(each) for each in mixed]


def test_cutlass_sets_up_each_expert(record: CalibrationRecord) -> None:
    """Its start grows with the experts in use to the whole that the section names; other kernels' stays the same."""
    starts = {
        kernel: [
            float(price_grouped_gemm(replace(MIXTRAL, groups=groups), H100, record, library=library).start_s)
            for groups in (1, 8, 4096)
        ]
        for kernel, library in (
            ("cutlass", "sglang 0.5.14/sglang_flashinfer_cutlass_moe"),
            ("triton", "sglang 0.5.14/sglang_fused_moe_triton"),
        )
    }
    section = record.parameters["libraries"]["sglang 0.5.14/sglang_flashinfer_cutlass_moe"]["bf16"]

    assert starts["cutlass"][0] == pytest.approx(section["start_growth"]["first_share"] * section["start_s"])
    assert starts["cutlass"][0] < starts["cutlass"][1] < starts["cutlass"][2] < section["start_s"]
    assert len(set(starts["triton"])) == 1


def test_an_explanation_names_the_kernel_that_stands_in() -> None:
    """FP8 experts in training on a borrowed Hopper record name the omitted kernel and the stand-in format."""
    prediction = build_scenario(
        "qwen3-30b-a3b", "h800-sxm-80gb", workload={"dtype": "fp8"}, layout={"data_parallel": 8, "expert_parallel": 8}
    ).predict()
    (entry,) = explain_operation(prediction, "moe.down").operations

    words = explanation_rows(entry)["record"]
    assert words.endswith("(architecture; without cutlass, fractions of bf16)")


def test_power_limited_sibling_has_no_wave_cliffs() -> None:
    """H20 borrows H100's tiles, whose rates a quarter of the multipliers would make 2.9 times slower at 48 tokens."""
    device = load_device("h20-96gb")
    layers = [replace(MIXTRAL, m=2 * tokens, tokens=tokens, experts=8, inner=14336) for tokens in (32, 48, 64, 96, 128)]
    times_s = np.array([one.time_s for one in price_operations(layers, device)])

    assert np.all(times_s[1:] < 1.6 * times_s[:-1])
    assert np.all(times_s[1:] > 0.75 * times_s[:-1])


def test_a_server_may_leave_a_poor_kernel_too() -> None:
    """expert_kernel="as-16-bit" prices served FP8 experts on H100 as training's; what was measured well stays."""
    narrow = replace(MIXTRAL, dtype="fp8", tokens=16, experts=8, inner=14336, m=32)
    requested = replace(narrow, leaves_poor_kernel=True)
    b200 = load_device("b200-sxm-180gb")
    measured_well = [price_grouped_gemm(each, b200, load_record("moe", b200)) for each in (narrow, requested)]

    assert price(requested) == price(replace(narrow, is_training=True))
    assert price_grouped_gemms([narrow, requested], H100, load_record("moe", H100)) == [price(narrow), price(requested)]
    assert measured_well[0] == measured_well[1]
