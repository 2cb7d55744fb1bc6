"""The section of 2024's software against held-out models, compared with current libraries."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from judging import ALL_LIMITS as LIMITS
from judging import load_refit, mean_error, measured_file
from numpy.typing import NDArray

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.statistics import kendall_tau
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemm

NAME, LIBRARY = "a100-sxm-80gb", "vidur"
Array = NDArray[np.float64]


class LeftOut(NamedTuple):
    """Layers, and their prices by sections fitted without their model."""

    rows: Any
    predicted: Any


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The refit of the section."""
    return load_refit("gemm.older_libraries")


@pytest.fixture(scope="module")
def left_out(script: ModuleType) -> LeftOut:
    """Each model priced by a section fitted to the two others."""
    rows = script.read_rows(measured_file("linear_layers.parquet").parent)
    today = load_record("gemm", load_device(NAME)).parameters["dtypes"]["bf16"]
    return LeftOut(rows, script.predict_left_out(rows, rows.model.to_numpy(), today))


@pytest.mark.parametrize("model", LIMITS["gemm_vidur_model"])
def test_models_left_out(left_out: LeftOut, model: str) -> None:
    """A model's layers, unscaled, by a section fitted on the others."""
    mine = left_out.rows.model.to_numpy() == model
    error = np.abs(left_out.predicted[mine] / left_out.rows.latency_s.to_numpy()[mine] - 1.0)

    assert float(np.mean(error)) <= LIMITS["gemm_vidur_model"][model]


def test_models_left_out_are_in_order(left_out: LeftOut) -> None:
    """All models together: their mean error, and how well their layers are ordered."""
    measured = left_out.rows.latency_s.to_numpy()

    assert mean_error(left_out.predicted, measured) <= LIMITS["gemm_vidur"]["mean"]
    assert 1.0 - (kendall_tau(left_out.predicted, measured) or 0.0) <= LIMITS["gemm_vidur"]["disorder"]


def test_a_run_of_gemms_shares_a_clock(left_out: LeftOut, script: ModuleType) -> None:
    """Fits that treat each GEMM as a run of its own order held-out models worse."""
    alone = left_out.rows.assign(run_flops=2.0 * left_out.rows.m * left_out.rows.n * left_out.rows.k)
    today = load_record("gemm", load_device(NAME)).parameters["dtypes"]["bf16"]
    apart = script.predict_left_out(alone, alone.model.to_numpy(), today)
    measured = alone.latency_s.to_numpy()
    orders = [kendall_tau(predicted, measured) or 0.0 for predicted in (left_out.predicted, apart)]

    assert orders[0] > orders[1] + 0.002


def scaled_today(left_out: LeftOut, run_flops: Array | None) -> Array:
    """Layers by the formulas of today's libraries, after one factor. [s]"""
    device = load_device(NAME)
    layer_gemm = Gemm(
        name="x", dtype="fp16", **{letter: left_out.rows[letter].to_numpy() for letter in ("m", "n", "k")}
    )
    record = load_record("gemm", device.with_pricing(physics_only=True))
    today = np.asarray(price_gemm(layer_gemm, device, record, run_flops=run_flops).time_s)
    return today * float(np.median(left_out.rows.latency_s.to_numpy() / today))


def test_todays_libraries_keep_a_runs_clock(left_out: LeftOut) -> None:
    """Without any fit to these rows, the FLOPs of the whole run improve the order of layers."""
    measured = left_out.rows.latency_s.to_numpy()
    alone, in_runs = scaled_today(left_out, None), scaled_today(left_out, left_out.rows.run_flops.to_numpy(float))
    error = mean_error(in_runs, measured)
    disorder = 1.0 - (kendall_tau(in_runs, measured) or 0.0)

    assert error <= LIMITS["gemm_vidur_today"]["mean"]
    assert disorder <= LIMITS["gemm_vidur_today"]["disorder"]
    assert error < np.mean(np.abs(alone / measured - 1.0)) - 0.004
    assert disorder < 1.0 - (kendall_tau(alone, measured) or 0.0) - 0.002


def test_left_out_models_beat_todays_libraries(left_out: LeftOut) -> None:
    """On held-out models the section is more accurate than current libraries, even scaled."""
    measured = left_out.rows.latency_s.to_numpy()
    scaled = scaled_today(left_out, left_out.rows.run_flops.to_numpy(float))

    assert np.mean(np.abs(left_out.predicted / measured - 1.0)) < np.mean(np.abs(scaled / measured - 1.0)) - 0.01


def test_current_models_are_priced_without_the_section() -> None:
    """Neither a price without a library nor one of an unmeasured library uses the section of old software."""
    device = load_device(NAME)
    record = load_record("gemm", device)
    layer_gemm = Gemm(name="x", dtype="fp16", m=2000, n=8192, k=4096)
    today, unknown, older = (
        float(price_gemm(layer_gemm, device, record, library=library).time_s) for library in ("", "trtllm 1.2", LIBRARY)
    )

    assert today == unknown
    assert older > 1.05 * today


def test_record_states_the_error_of_the_section() -> None:
    """The record states held-out errors, interval coverage and the command."""
    record = load_record("gemm", load_device(NAME))
    report = record.provenance["reports"]["fp16, vidur: models left out"]

    assert report["held_out"]["mean_ape"] <= LIMITS["gemm_vidur"]["mean"]
    assert 1.0 - report["held_out"]["kendall_tau"] <= LIMITS["gemm_vidur"]["disorder"]
    assert 0.85 <= report["held_out"]["covered"] <= 0.95
    assert "--data DIR" in report["command"]
    assert record.interval["libraries"][LIBRARY]["fp16"]["edges_s"]
