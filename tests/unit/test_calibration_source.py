"""CalibrationSource: what kind of record prices an operation, and the text for it."""

from __future__ import annotations

from dataclasses import replace

from shapewright.pricing.calibration.source import ROOFLINE_BOUND, CalibrationSource

OWN = CalibrationSource(transfer="exact", record_id="gemm/h100/1", donor="h100")
BORROWED = replace(OWN, transfer="generic", reason="its nearest in bandwidth and rate", left_out="cutlass")


def test_own_record_is_labelled_by_its_id() -> None:
    """The device's own record is neither borrowed nor uncalibrated."""
    assert OWN.label == str(OWN) == "gemm/h100/1"
    assert not OWN.is_borrowed
    assert not OWN.is_uncalibrated


def test_borrowed_record_is_uncalibrated_and_names_its_adjustments() -> None:
    """Left-out kernels belong to the record, stand-in formats to the price."""
    source = replace(BORROWED, fractions_of="bf16", rate_scale=1.234, stored_weights="int4")
    adjusted = (
        "fractions of bf16, 1.23 times as fast by the best rate known, int4 weights assumed to be widened for free"
    )

    assert source.is_borrowed
    assert source.is_uncalibrated
    assert source.label == f"uncalibrated (borrows gemm/h100/1 without cutlass), {adjusted}"
    assert source.adjustments == f"without cutlass, {adjusted}"
    assert BORROWED.stand_in_with_reason == ("(borrows gemm/h100/1: its nearest in bandwidth and rate without cutlass)")


def test_bounds_and_assumptions_have_no_record() -> None:
    """A roofline bound is uncalibrated but not borrowed; a stated assumption is neither."""
    assumed = CalibrationSource(transfer="assumed", assumption="host link")

    assert ROOFLINE_BOUND.label == "uncalibrated (roofline bound)"
    assert ROOFLINE_BOUND.is_roofline_bound
    assert not ROOFLINE_BOUND.is_borrowed
    assert assumed.label == "assumed (host link)"
    assert not assumed.is_uncalibrated


def test_arrays_of_prices_may_rest_on_several_sources() -> None:
    """Labels of all sources are joined."""
    both = replace(OWN, others=(replace(OWN, record_id="gemm/a100/1"),))

    assert both.label == "gemm/h100/1; gemm/a100/1"
