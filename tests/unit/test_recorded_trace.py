"""A trace that was recorded on a GPU, by the figures that its events state."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapewright.prediction.utilization.kineto import read_trace

V100 = Path(__file__).parent / "traces" / "two_linear_layers_v100.json"


def test_kernels_of_a_recorded_trace() -> None:
    """Two copies of 1 us and five kernels of 3, 2, 1, 2 and 2 us, from the first copy to the end of the last kernel."""
    trace = read_trace(V100)

    assert not trace.is_cpu
    assert "V100" in trace.device_name
    assert [round(kernel.time_s * 1e6) for kernel in trace.kernels] == [1, 1, 3, 2, 1, 2, 2]
    assert trace.span_s == pytest.approx((226_575 + 2 - 224_556) * 1e-6, abs=1e-9)


def test_operators_of_a_recorded_trace() -> None:
    """Each kernel belongs to the operator that launched it, not to those around it."""
    operators = [kernel.operator for kernel in read_trace(V100).kernels]

    assert [operator.name if operator else "" for operator in operators] == [
        "aten::copy_", "aten::copy_", "aten::mm", "aten::add_", "aten::clamp_min", "aten::mm", "aten::add_",
    ]  # fmt: skip
