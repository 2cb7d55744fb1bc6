"""Slow cases: long contractions, far pages, narrow odd sizes, small GEMMs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapewright
from shapewright.app.report.explain import explain_operation, explanation_rows
from shapewright.core.errors import CalibrationError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import CalibrationRecord, parse_record
from shapewright.pricing.gemm.alignment import contiguous_letters
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.shapes import Gemms
from shapewright.pricing.gemm.slow_cases import (
    NarrowCase,
    SlowCases,
    Span,
    idle_floor_s,
    narrow_floor_s,
    rate_share,
    read_slow_cases,
    small_floor_s,
)

A100 = Path(shapewright.__file__).parent / "pricing/data/gemm/a100-sxm-80gb.json"


def ones(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Values as an array of floats."""
    return np.array(values, dtype=float)


def record_with(**section: Any) -> CalibrationRecord:
    """The A100's record without residuals, with additional keys in its section and another id."""
    raw = json.loads(A100.read_text(encoding="utf-8"))
    raw["parameters"]["dtypes"]["bf16"] |= section
    raw["id"] += "/" + json.dumps(section, sort_keys=True)
    return replace(parse_record("gemm", raw), residual=None)


def price_s(record: CalibrationRecord, **dims: int) -> float:
    """Predicted time on the A100. [s]"""
    return float(price_gemm(Gemm(name="x", layout="NN", **dims), load_device("a100-sxm-80gb"), record).time_s)


def test_long_contraction_halves_the_rate_at_its_scale() -> None:
    """Rate / (1 + k / long_k): all of it at k = 0, half at k = long_k, a quarter at three times that."""
    share = rate_share(ones(8, 8, 8), ones(0, 1000, 3000), 2.0, SlowCases(long_k=1000.0))

    assert np.asarray(share).tolist() == [1.0, 0.5, 0.25]


def test_far_pages_cost_half_of_their_loss_at_the_reach() -> None:
    """B of exactly the reach loses half of reach_loss; a tenth of it nothing, ten times of it nearly all."""
    cases = SlowCases(reach_bytes=2e6, reach_loss=0.4)

    share = np.asarray(rate_share(ones(100, 1000, 10000), ones(1000, 1000, 1000), 2.0, cases))

    assert share == pytest.approx([1.0, 0.8, 0.6], abs=1e-3)


def narrow(role: str, step: float = 1.0, fraction: float = 0.1, alignments_bytes: tuple[int, ...] = (2,)) -> SlowCases:
    """A kernel for dimensions below 128, and no other slow case."""
    case = NarrowCase(role=role, alignments_bytes=alignments_bytes, edge=128.0, step=step, fraction=fraction)
    return SlowCases(narrow=(case,))


def test_narrow_odd_sizes_run_at_their_share_after_their_traffic() -> None:
    """128 x 128 x 63 has 2,064,384 flops: at a tenth of 1e12 flop/s 20.6 us, and 1 us of traffic; not 64 and 129."""
    k, shapes = ones(63, 64, 127, 129), ones(*[128] * 4)
    traffic_s, gemms = ones(*[1e-6] * 4), Gemms(shapes, shapes, k, ones(1, 1, 2, 1), contiguous_letters("NT"))

    floor_s = narrow_floor_s(gemms, 16, traffic_s, 1e12, narrow("contracted"))

    assert floor_s == pytest.approx([2.064384e-5 + 1e-6, 0.0, 2 * 127 * 128 * 128 * 2 / 1e11 + 1e-6, 0.0])


def test_the_edge_of_a_slow_case_is_outside_of_narrow_sizes_and_inside_of_small_ones() -> None:
    """A contraction as long as the edge is not narrow; an m, an n and outputs at their limits are small."""
    one, none = ones(64), ones(0)
    case = replace(narrow("contracted").narrow[0], edge=63.0)
    gemms = Gemms(one, one, ones(63), ones(2), contiguous_letters("NT"))

    assert narrow_floor_s(gemms, 16, none, 1e12, SlowCases(narrow=(case,))).tolist() == [0.0]
    assert small_floor_s(gemms, 1e12, SlowCases(small_edge=64, small_outputs=8192, small_fraction=0.01)) > 0.0


def test_narrow_sizes_are_padded_to_whole_steps() -> None:
    """With steps of 32 a contraction of 33 costs as much as one of 63, and one of 32 half of it; 40 has other bytes."""
    one, none = ones(*[128] * 4), ones(*[0] * 4)
    cases = narrow("contracted", step=32.0, alignments_bytes=(2, 64))

    gemms = Gemms(one, one, ones(33, 63, 32, 40), one, contiguous_letters("NN"))
    floor_s = narrow_floor_s(gemms, 16, none, 1e12, cases)

    assert floor_s[0] == pytest.approx(floor_s[1]) == pytest.approx(2.0 * floor_s[2])
    assert floor_s[3] == 0.0


@pytest.mark.parametrize(("layout", "role"), [("TN", "contracted"), ("NT", "free")])
def test_a_dimension_of_another_role_does_not_count(layout: str, role: str) -> None:
    """In layout TN the contracted k is not contiguous, and k is no free dimension in any: an odd one costs nothing."""
    one = ones(128)
    gemms = Gemms(one, one, ones(63), one, contiguous_letters(layout))

    assert narrow_floor_s(gemms, 16, one, 1e12, narrow(role)).tolist() == [0.0]


def test_small_gemms_are_bounded_by_edge_and_outputs() -> None:
    """64 x 64 x 1000 at a hundredth of 1e12 flop/s takes 819 us; more outputs or a longer edge are not small."""
    cases = SlowCases(small_edge=64, small_outputs=8192, small_fraction=0.01)

    gemms = Gemms(ones(64, 64, 128), ones(64, 64, 8), ones(*[1000] * 3), ones(1, 3, 1), {})
    floor_s = small_floor_s(gemms, 1e12, cases)

    assert floor_s == pytest.approx([8.192e-4, 0.0, 0.0])


def test_a_half_empty_last_wave_disables_the_fast_kernel() -> None:
    """10 SMs, tiles of 256 x 128: last waves of 4 tiles are slow, of 5 and of 10 not, until B is larger still."""
    cases = SlowCases(idle_columns=1000, idle_elements=1e6, idle_always_elements=3e6, idle_fraction=0.25)
    n, k = ones(24 * 128, 25 * 128, 30 * 128, 24 * 128, 25 * 128), ones(500, 500, 500, 100, 1000)

    floor_s = idle_floor_s(Gemms(np.full(5, 256.0), n, k, np.ones(5), {}), 10.0, 1e12, cases)

    alone_s = 2.0 * 256 * n * k / 2.5e11
    assert floor_s == pytest.approx([alone_s[0], 0.0, 0.0, 0.0, alone_s[4]])


def test_few_columns_and_batches_keep_their_fast_kernel() -> None:
    """However large B is, up to idle_columns of C and in a batch nothing is lost."""
    cases = SlowCases(idle_columns=1000, idle_elements=1.0, idle_always_elements=1.0, idle_fraction=0.25)

    gemms = Gemms(ones(256, 256), ones(1000, 2000), ones(1e6, 1e6), ones(1, 2), {})
    floor_s = idle_floor_s(gemms, 10.0, 1e12, cases)

    assert floor_s.tolist() == [0.0, 0.0]


def test_a_span_of_contractions_loses_its_share() -> None:
    """A quarter is lost for k from 100 to 200, a tenth for n from 1000 to 2000; the larger loss applies."""
    spans = (Span(first_k=100, last_k=200, last_n=1e10, loss=0.25), Span(first_n=1000, last_n=2000, loss=0.1))
    cases = SlowCases(spans=spans, reach_bytes=1e9, reach_loss=0.5)

    share = rate_share(ones(8, 8, 8, 8, 1e9, 1000, 1000, 2001), ones(99, 100, 200, 201, 150, 150, 99, 99), 2.0, cases)

    assert share == pytest.approx([1.0, 0.75, 0.75, 1.0, 0.5, 0.75, 0.9, 1.0])


@pytest.mark.parametrize("raw", [{"long_kk": 1.0}, {"narrow": [{"edge": 128.0}]}])
def test_malformed_case_is_named(raw: dict[str, Any]) -> None:
    """A record with a misspelt or incomplete case is refused with what is known."""
    with pytest.raises(CalibrationError, match=r"slow_cases of a gemm record: .*; known keys are .*long_k, narrow"):
        read_slow_cases(raw)


def test_price_takes_the_slow_kernel() -> None:
    """An odd head width below the edge costs the slow kernel's time, and slow_factor shows it."""
    case = {"role": "contracted", "alignments_bytes": [2], "edge": 128.0, "step": 1.0, "fraction": 0.01}
    slow, usual = (record_with(batched={"slow_cases": {"narrow": cases}}) for cases in ([case], []))
    operation = Gemm(name="x", m=2048, n=2048, k=65, batch=64, layout="NN")
    device = load_device("a100-sxm-80gb")

    price, before = (price_gemm(operation, device, record) for record in (slow, usual))

    # 2 * 64 * 2048 * 2048 * 65 flops over a hundredth of 312 TFLOP/s are 11.2 ms; start and 0.6 GB of traffic remain
    assert 3e-4 < price.time_s - float(operation.flops) / 3.12e12 < 6e-4
    assert price.alignment_factor < 0.3 * before.alignment_factor
    assert price.slow_factor == pytest.approx(float(price.time_s) / float(before.time_s))
    assert before.slow_factor == before.rate_share == 1.0
    assert price_s(slow, m=2048, n=2048, k=66, batch=64) == price_s(usual, m=2048, n=2048, k=66, batch=64)
    assert price_s(slow, m=2048, n=2048, k=65) == price_s(usual, m=2048, n=2048, k=65)


def test_batched_gemms_have_separate_kernels() -> None:
    """A section's batch constants price batches only, at any position in an array."""
    known = record_with(batched={"splits": [1], "start_s": 1e-3})
    usual = record_with()
    device = load_device("a100-sxm-80gb")
    m, batch = np.array([64, 64, 512, 512]), np.array([1, 4, 1, 4])
    operation = Gemm(name="x", m=m, n=64, k=4096, batch=batch, layout="NN")

    price, before = (price_gemm(operation, device, record) for record in (known, usual))

    assert np.asarray(price.time_s)[[0, 2]].tolist() == np.asarray(before.time_s)[[0, 2]].tolist()
    assert (np.asarray(price.start_s) == [before.start_s[0], 1e-3, before.start_s[2], 1e-3]).all()
    assert (np.asarray(price.split_k)[[1, 3]] == 1).all()
    assert price.time_s[1] == price_s(known, m=64, n=64, k=4096, batch=4)


def test_an_explanation_names_the_slow_kernel() -> None:
    """The explanation shows the slow factor of odd heads on V100, and the rate loss of a long contraction."""
    config = shapewright.TransformerConfig(
        hidden_size=79 * 32, num_layers=2, num_heads=32, vocab_size=50304, intermediate_size=40960
    )
    workload = shapewright.Workload(micro_batch_size=1, seq_len=2048, dtype="fp16", attention="unfused")
    prediction = shapewright.predict(config, device="v100-sxm2-32gb", workload=workload)

    (score,) = explain_operation(prediction, "attention.score").operations[:1]
    (down,) = explain_operation(prediction, "mlp.down").operations[:1]

    assert score.slow_factor > 3.0
    assert "slow kernel" in explanation_rows(score)
    assert down.rate_share == pytest.approx(1.0 / (1.0 + 40960 / 381_000), rel=0.01)
    assert "long" in explanation_rows(down)
    assert "slow kernel" not in explanation_rows(down)
