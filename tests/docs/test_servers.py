"""Fitted figures of servers in docs/decisions/0021 are those of the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapewright.pricing.servers import load_server

PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0021-servers.md"


def figures() -> list[str]:
    """Sentences of the decision with the figures of the records."""
    old, first, graphs, last = (load_server(f"trtllm-{version}") for version in ("0.14", "0.9", "0.17", "1.0"))
    launched, eager, sglang, slower = map(load_server, ("vllm-0.6", "vllm-0.2", "sglang-0.3", "sglang-0.4"))
    narrow, wide = (first.kernels[f"decode_attention.{cache}.grouped"] for cache in ("narrow", "wide"))
    pcie, large, small = (last.kernels[name] for name in ("all_reduce.pcie", "gemm.fp8.large", "gemm.fp8"))
    fp4, stored, fp8 = (
        last.kernels[f"experts.{name}"].factor for name in ("fp4.blackwell", "bf16:fp4.hopper", "fp8.hopper")
    )
    return [
        f"TensorRT-LLM 0.14 ({old.time_factor:.2f}), vLLM 0.2 and 0.6 ({eager.time_factor:.2f}, "
        f"{launched.time_factor:.2f}) and SGLang ({sglang.time_factor:.2f}; 0.4: {slower.time_factor:.2f})",
        f"TensorRT-LLM takes {1e6 * pcie.start_s:.0f} us and {pcie.fraction:.2f} of the bandwidth",
        f"{narrow.instructions_per_element:.0f} instructions for each fp8 element, "
        f"{wide.instructions_per_element:.0f} for one of 16 bits",
        f"16-bit caches take {old.kernels['decode_attention.wide.grouped'].factor:.1f} times as long",
        f"take {large.factor:.2f} of the record's time from 1,024 rows, {small.factor:.2f} below",
        f"take {fp4:.2f} times the record's time in fp4 on Blackwell, {stored:.2f} in MXFP4 and {fp8:.2f} in fp8",
        f"TensorRT-LLM {1e3 * graphs.host_s:.1f} to {1e3 * first.host_s:.1f} ms, vLLM 0.2 {1e3 * eager.host_s:.1f} ms",
        f"vLLM 0.2 adds {1e3 * eager.host_per_rank_s:.1f} ms per rank",
        f"all-reduces from 64 MiB take {eager.kernels['all_reduce.link.large'].factor:.1f} times",
    ]


@pytest.mark.parametrize("sentence", figures())
def test_figures_of_the_decision_are_those_of_the_records(sentence: str) -> None:
    """A refit that moves a figure names the sentence to change."""
    assert sentence in " ".join(PAGE.read_text(encoding="utf-8").split())
