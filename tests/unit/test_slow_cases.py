"""Products that leave a library's usual kernels: long contractions, far pages, narrow odd sizes, small products."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapewright
from shapewright.errors import CalibrationError
from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf.alignment import contiguous_letters
from shapewright.perf.calibration import CalibrationRecord, parse_record
from shapewright.perf.gemm import price_gemm
from shapewright.perf.slow_cases import SlowCases, narrow_floor_s, rate_share, read_slow_cases, small_floor_s

A100 = Path(shapewright.__file__).parent / "perf/data/gemm/a100-sxm-80gb.json"


def ones(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Values as an array of floats."""
    return np.array(values, dtype=float)


def record_with(**section: Any) -> CalibrationRecord:
    """The A100's physics with something more in its section, under a name of its own."""
    raw = json.loads(A100.read_text(encoding="utf-8"))
    raw["parameters"]["dtypes"]["bf16"] |= section
    raw["id"] += "/" + json.dumps(section, sort_keys=True)
    return replace(parse_record("gemm", "a100 for a test", raw), residual=None)


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


def test_narrow_odd_sizes_run_at_the_share_of_their_role() -> None:
    """128 x 128 x 63 has 2,064,384 flops: at a tenth of 1e12 flop/s 20.6 us; even and wide ones are free."""
    cases = SlowCases(narrow_edge=128, narrow_contracted_fraction=0.1, narrow_free_fraction=0.2)
    k = ones(63, 64, 127, 129)

    letters = contiguous_letters("NT")
    floor_s = narrow_floor_s(ones(*[128] * 4), ones(*[128] * 4), k, ones(1, 1, 2, 1), letters, 1e12, cases)

    assert floor_s == pytest.approx([2.064384e-5, 0.0, 2 * 127 * 128 * 128 * 2 / 1e11, 0.0])


def test_a_contracted_dimension_that_is_not_contiguous_does_not_count() -> None:
    """In layout TN the rows of A and B run along m and n: an odd k costs nothing."""
    cases = SlowCases(narrow_edge=128, narrow_contracted_fraction=0.1)

    letters = contiguous_letters("TN")
    assert narrow_floor_s(ones(128), ones(128), ones(63), ones(1), letters, 1e12, cases).tolist() == [0.0]


def test_small_products_are_bounded_by_edge_and_outputs() -> None:
    """64 x 64 x 1000 at a hundredth of 1e12 flop/s takes 819 us; more outputs or a longer edge is no small product."""
    cases = SlowCases(small_edge=64, small_outputs=8192, small_fraction=0.01)

    floor_s = small_floor_s(ones(64, 64, 128), ones(64, 64, 8), ones(*[1000] * 3), ones(1, 3, 1), 1e12, cases)

    assert floor_s == pytest.approx([8.192e-4, 0.0, 0.0])


def test_unknown_case_is_named() -> None:
    """A record with a misspelt case is refused with what is known."""
    with pytest.raises(CalibrationError, match="knows no long_kk; it knows long_k"):
        read_slow_cases({"long_kk": 1.0})


def test_price_takes_the_slow_kernel() -> None:
    """An odd head width below the edge costs what the slow kernel costs, start included, and says so in its factor."""
    slow = record_with(slow_cases={"narrow_edge": 128, "narrow_contracted_fraction": 0.01})
    usual = record_with()
    operation = Gemm(name="x", m=2048, n=2048, k=65, batch=64, layout="NN")
    device = load_device("a100-sxm-80gb")

    price, before = (price_gemm(operation, device, record) for record in (slow, usual))

    # 2 * 64 * 2048 * 2048 * 65 flops over a hundredth of 312 TFLOP/s: 11.2 ms
    assert price.time_s == pytest.approx(float(operation.flops) / 3.12e12 + float(price.start_s), rel=2e-3)
    assert price.alignment_factor < 0.3 * before.alignment_factor
    assert price_s(slow, m=2048, n=2048, k=66, batch=64) == price_s(usual, m=2048, n=2048, k=66, batch=64)


def test_batches_have_kernels_of_their_own() -> None:
    """What a section knows of batches prices them alone, wherever they stand in an array."""
    known = record_with(batched={"splits": [1], "start_s": 1e-3})
    usual = record_with()
    device = load_device("a100-sxm-80gb")
    m, batch = np.array([64, 64, 512, 512]), np.array([1, 4, 1, 4])
    operation = Gemm(name="x", m=m, n=64, k=4096, batch=batch, layout="NN")

    price, before = (price_gemm(operation, device, record) for record in (known, usual))

    assert np.asarray(price.time_s)[[0, 2]].tolist() == np.asarray(before.time_s)[[0, 2]].tolist()
    assert (np.asarray(price.start_s) == [before.start_s[0], 1e-3, before.start_s[2], 1e-3]).all()  # type: ignore[index]
    assert (np.asarray(price.split_k)[[1, 3]] == 1).all()
    assert price.time_s[1] == price_s(known, m=64, n=64, k=4096, batch=4)  # type: ignore[index]
