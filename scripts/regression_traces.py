"""Traced modules of the regression grid: the findings of modules of many widths, from traces written by hand."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

from regression_answers import Answer, list_cells

from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.lint.traced import check_trace
from shapewright.lowering.gradients import gemm_gradients
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.torch_trace.trace import Trace, TracedLinear, TracedMemory, TracedModule

TRACED_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "l40s", "mi300x", "t4", "v100-sxm2-32gb")
_TRACES_OF_A_DEVICE = 12
_WIDTHS = (64, 100, 768, 1000, 1024, 1056, 1536, 1600, 2560, 4095, 4096, 4100, 4224, 10000, 50257)
_HEAD_DIMS = (60, 64, 77, 80, 100, 128)


def answer_traces(name: str) -> dict[str, Answer]:
    """Check random modules on a device."""
    answers: dict[str, Answer] = {}
    for number in range(_TRACES_OF_A_DEVICE):
        trace = _make_trace(Random(f"{name} {number}"))
        question = f"{name}: {number} {trace.inputs} in {trace.dtype}, {trace.phase}"
        try:
            found = check_trace(trace, load_device(name), ignore=("TC103",) if number % 4 == 3 else ())
        except ShapewrightError as error:
            answers[question] = {"refused": str(error)}
            continue
        answers[question] = {
            "step_time_s": found.prediction.step_time_s,
            "suppressed": float(found.num_suppressed),
            "findings": float(len(found.findings)),
            **dict(list_cells([asdict(each) for each in found.findings], "finding")),
        }
    return answers


def _make_trace(chance: Random) -> Trace:
    """Two or three kinds of linear layers and attention between them."""
    rows, dtype = chance.choice((8, 200, 4096, 16_384)), chance.choice(("bf16", "fp16", "fp32", "tf32"))
    is_training = chance.random() < 0.6
    widths = [chance.choice(_WIDTHS) for _ in range(3)]
    linears = []
    operations: list[Operation] = []
    for place, (inner, outer) in enumerate(zip(widths, (*widths[1:], widths[0]), strict=True)):
        path, count = f"layers.{place}.linear", chance.choice((1, 2, 12))
        linears.append(
            TracedLinear(
                path=path,
                count=count,
                num_rows=rows,
                in_features=inner,
                out_features=outer,
                operation_name=path,
                is_convolution=chance.random() < 0.2,
            )
        )
        gemm = Gemm(name=path, m=rows, n=outer, k=inner, repeats=count, dtype=dtype)
        operations += [gemm, *(gemm_gradients(gemm) if is_training else ())]
    head_dim = chance.choice(_HEAD_DIMS)
    operations.append(
        Attention(
            name="layers.0.core",
            batch_size=2,
            query_len=max(rows // 2, 1),
            kv_len=max(rows // 2, 1),
            num_heads=8,
            num_kv_heads=chance.choice((1, 8)),
            head_dim=head_dim,
            v_head_dim=head_dim,
            repeats=4,
            dtype=dtype,
        )
    )
    parameters = sum(each.count * each.in_features * each.out_features for each in linears)
    saved_bytes = chance.choice((3e8, 3e10, 3e11))
    memory = TracedMemory(
        weights_bytes=2.0 * parameters,
        inputs_bytes=1e6,
        gradients_bytes=2.0 * parameters * is_training,
        activations_bytes=saved_bytes,
        workspace_bytes=1e8,
        saved_bytes=saved_bytes,
        peak_bytes=4.0 * parameters + saved_bytes + 1.01e8,
        peak_operation="layers.1.linear",
        timeline_bytes=(1.0, 2.0, 1.0),
        backward_start=1,
    )
    return Trace(
        source="widths.py:build",
        module_type="Widths",
        inputs=f"x[{rows},{widths[0]}] {widths[1:]} heads of {head_dim}",
        phase="train" if is_training else "prefill",
        dtype=dtype,
        parameter_dtype=dtype,
        is_fused=False,
        num_parameters=parameters,
        num_trainable=parameters,
        num_tokens=rows,
        operations=tuple(operations),
        linears=tuple(linears),
        memory=memory,
        unknown_operators=(),
        notes=(),
        modules=tuple(
            TracedModule(
                path=each.path,
                type_name="Linear",
                count=each.count,
                num_parameters=each.in_features,
                num_trainable=each.in_features,
            )
            for each in linears
        ),
    )
