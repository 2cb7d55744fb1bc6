"""Operations of equal name: attention of layers with and of those without a window."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.app.report.optimize.candidates import explained_shape_output
from shapewright.lint.evaluate import slowest_operation

MODEL, DEVICE = "gpt-neo-1.3b", "h100-sxm-80gb"


def test_a_step_loses_nothing_to_itself() -> None:
    """Attention without a window is not compared with that of a window, which is faster."""
    prediction = shapewright.predict(MODEL, device=DEVICE, workload={"seq_len": 2048})
    attention = [one for one in prediction.operations if one.operation.name == "attention.fused"]

    assert len({one.price.time_s for one in attention}) == 2
    assert slowest_operation(prediction, prediction) == ""


def test_an_explained_shape_has_every_operation() -> None:
    """The times of both sides add up to the operations of both steps."""
    result = shapewright.search(MODEL, device=DEVICE, vary=["vocab"])
    candidate, baseline = result.candidates[0], result.baseline.prediction
    pairs = explained_shape_output(result, candidate).operations

    work = baseline.tokens_per_step / candidate.prediction.tokens_per_step
    for own_s, step, factor in (
        (sum(pair.before_s for pair in pairs), baseline, 1.0),
        (sum(pair.after_s for pair in pairs), candidate.prediction, work),
    ):
        assert own_s == pytest.approx(factor * sum(one.total_time_s for one in step.busiest_operations))
    windowed, whole = sorted((pair for pair in pairs if pair.name == "attention.fused"), key=lambda pair: pair.before_s)
    assert windowed.before_s == windowed.after_s < whole.before_s == whole.after_s
