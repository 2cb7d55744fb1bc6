"""How operations make up a step: what hides what, and the interval of the sum."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.prediction.composition.stages import EXPERT_EXCHANGES, GRADIENT_GEMMS, overlap_pools


def collective(axis: str, *, overlaps: bool) -> Collective:
    """An all-reduce of eight ranks."""
    return Collective(
        name="x", op_name="all_reduce", axis=axis, message_bytes=1e6, num_ranks=8, ranks_per_node=8, overlaps=overlaps
    )


@pytest.mark.parametrize(
    ("operation", "pass_name", "pools"),
    [
        (Gemm(name="x", m=8, n=8, k=8), "forward", ("forward",)),
        (Gemm(name="x", m=8, n=8, k=8), "backward", ("backward", GRADIENT_GEMMS)),
        (GroupedGemm(name="x", groups=2, m=8, n=8, k=8), "backward", ("backward", GRADIENT_GEMMS)),
        (Gemm(name="x", m=8, n=8, k=8), "recompute", ("backward",)),
        (Pointwise(name="x", operation="norm", read_bytes=8.0, written_bytes=8.0), "backward", ("backward",)),
        (collective("tensor", overlaps=True), "backward", (GRADIENT_GEMMS,)),
        (collective("tensor", overlaps=True), "forward", ("forward",)),
        (collective("data", overlaps=True), "backward", ("backward",)),
        (collective("data", overlaps=False), "backward", ()),
        (collective("expert", overlaps=False), "forward", (EXPERT_EXCHANGES,)),
        (Pointwise(name="x", operation="optimizer", read_bytes=8.0, written_bytes=8.0), "step", ()),
    ],
)
def test_what_hides_what(operation: Operation, pass_name: str, pools: tuple[str, ...]) -> None:
    """Gradient GEMMs alone hide the tensor axis in the backward pass; the pass hides the others; nothing the step's."""
    assert overlap_pools(operation, pass_name) == pools


def test_relative_interval_does_not_depend_on_the_number_of_micro_batches() -> None:
    """Eight micro-batches through four stages are as uncertain as sixty-four, and as a device alone."""
    widths = []
    for layout, batch in (({}, 8), ({"pipeline_parallel": 4}, 8), ({"pipeline_parallel": 4}, 64)):
        step = shapewright.predict(
            "llama-3-8b",
            device="h100-sxm-80gb",
            workload={"micro_batch_size": 1, "global_batch_size": batch},
            layout=layout,
        )
        widths.append((step.step_time_high_s / step.step_time_s, step.step_time_low_s / step.step_time_s))

    assert widths[1:] == [pytest.approx(widths[0], rel=0.05)] * 2
