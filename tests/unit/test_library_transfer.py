"""Pricing of libraries and kernels that were not measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.libraries import nearest_library
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.kernels import (
    choose_expert_kernel,
    drop_poor_kernels_if_transferred,
    expert_kernel_family,
)
from shapewright.pricing.experts.price import price_grouped_gemm
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing

B200, H100 = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb"))
GEMMS = Gemm(name="x", m=np.array([1, 64, 4096]), n=np.array([4096] * 3), k=np.array([4096] * 3))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)
EXPERTS = GroupedGemm(name="x", m=256, n=3072, k=4096, groups=64)


@pytest.mark.parametrize(
    ("library", "known", "expected"),
    [
        ("vllm 0.24.0", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.24.0"),
        ("vllm 0.19", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.14.0"),
        ("vllm 0.30.0", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.24.0"),
        ("vllm 0.9", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.14.0"),
        ("VLLM", ["vllm 0.14.0", "vllm 0.24.0", "sglang 1"], "vllm 0.24.0"),
        ("trtllm 1.2.0", ["vllm 0.24.0"], ""),
        ("vllm-omni 1", ["vllm 0.24.0"], ""),
        ("", ["vllm 0.24.0"], ""),
    ],
)
def test_nearest_library(library: str, known: list[str], expected: str) -> None:
    """A missing version is replaced by the nearest that is not newer; another library never replaces it."""
    assert nearest_library(library, known) == expected


def test_another_version_is_priced_as_its_library() -> None:
    """GEMMs and attention of sglang 0.6 are priced as the measured sglang, not as vllm."""
    gemm, attention = load_record("gemm", H100), load_record("attention", H100)
    times = [price_gemm(GEMMS, H100, gemm, library=name).time_s for name in ("sglang 0.6.0", "sglang 0.5.14", "")]
    calls = [
        price_attention(CALL, H100, attention, library=name, kernel="fa3").time_s
        for name in ("sglang 0.6.0", "sglang 0.5.14", "")
    ]

    assert (times[0] == times[1]).all()
    assert (times[0] != times[2]).any()
    assert calls[0] == calls[1] != calls[2]


def test_a_kernel_is_found_in_another_library() -> None:
    """Triton attention of an unknown library is that of sglang, since vllm's section for H100 has none."""
    record = load_record("attention", H100)
    wide = replace(CALL, head_dim=256, v_head_dim=256)
    unmeasured, sglang, usual = (
        price_attention(wide, H100, record, library=library, kernel=kernel).time_s
        for library, kernel in (("trtllm 1.2.0", "triton"), ("sglang 0.5.14", "triton"), ("trtllm 1.2.0", ""))
    )

    assert unmeasured == sglang != usual


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("sglang_fused_moe_triton", "triton"),
        ("vllm_fused_moe", "triton"),
        ("vllm_x_flashinfer_trtllm_trtllmbf16experts", "trtllm"),
        ("sglang_flashinfer_cutlass_moe", "cutlass"),
        ("moe_torch_flow", ""),
    ],
)
def test_families_of_expert_kernels(kernel: str, family: str) -> None:
    """The family is read from a kernel's name, or empty."""
    assert expert_kernel_family(kernel) == family


def test_family_comes_before_format_and_library() -> None:
    """8-bit triton on H100 uses triton's 16-bit section, an unknown kernel the default, a measured one its own."""
    record = load_record("moe", H100)
    own = "vllm 0.24.0/vllm_unquantizedfusedmoe_triton_tritonexperts"

    assert choose_expert_kernel(record, ("bf16", "bf16"), own) == own
    assert choose_expert_kernel(record, ("fp8", "bf16"), "sglang 0.6/sglang_fused_moe_triton") == (
        "sglang 0.5.14/sglang_fused_moe_triton"
    )
    assert choose_expert_kernel(record, ("fp8", "bf16"), "trtllm 1.2/moe_triton") == own
    assert choose_expert_kernel(record, ("fp8", "bf16"), "trtllm 1.2/moe_torch_flow") == ""


@pytest.mark.parametrize(
    ("library", "donor"),
    [("vllm 0.14.0", "sglang 0.5.14"), ("vllm 0.16.2", "sglang 0.5.14"), ("vllm 0.17.0", "vllm 0.24.0")],
)
def test_an_older_vllm_is_priced_by_who_has_its_default_tiles(library: str, donor: str) -> None:
    """Up to 0.16 vllm had sglang's two default tiles; tuned shapes come from its own list."""
    key = f"{library}/vllm_fused_moe"
    pricing = prepare_gemm_pricing("bf16", None, H100, load_record("moe", H100), library=key)

    assert choose_expert_kernel(load_record("moe", H100), ("bf16", "bf16"), key).startswith(donor)
    assert pricing.section is not None
    assert pricing.section.rule is not None
    assert pricing.section.rule.library == ("vllm 0.14.0" if donor.startswith("sglang") else "vllm 0.24.0")


def test_poor_kernels_are_not_transferred() -> None:
    """Hopper's CUTLASS experts are not transferred: an uncalibrated B200 uses 16-bit fractions in 8 bits."""
    transferred = load_record("moe", B200.with_pricing(uncalibrated=True))
    kept = drop_poor_kernels_if_transferred(transferred)
    own = price_grouped_gemm(replace(EXPERTS, dtype="fp8"), B200, load_record("moe", B200))
    borrowed = price_grouped_gemm(replace(EXPERTS, dtype="fp8"), B200, transferred)

    assert transferred.architecture == "hopper"
    assert "fp8" in transferred.parameters["dtypes"]
    assert "fp8" not in kept.parameters["dtypes"]
    assert borrowed.calibration.left_out == "cutlass"
    assert borrowed.time_s < 2.0 * own.time_s
    assert drop_poor_kernels_if_transferred(load_record("moe", H100)) is load_record("moe", H100)
