"""A trace written by hand, for tests that need no PyTorch: two layers of an MLP, forward and backward."""

from __future__ import annotations

from typing import Any

from shapewright.lowering.gradients import gemm_gradients
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.torch_trace.trace import Trace, TracedLinear, TracedMemory, TracedModule, UnknownOperator


def small_trace(*, width: int = 4096, is_training: bool = True, **changes: Any) -> Trace:
    """Two linear layers of 1024 x ``width`` on 8192 tokens in bf16, and an operator that nothing is known of."""
    rows, inner = 8192, 1024
    linears = [("layers.0-1.up", width, inner), ("layers.0-1.down", inner, width)]
    operations: list[Operation] = []
    for path, n, k in linears:
        gemm = Gemm(name=path, m=rows, n=n, k=k, repeats=2)
        operations += [gemm, *(gemm_gradients(gemm) if is_training else ())]
    operations.append(
        Pointwise(name="layers.0-1.scan", operation="unknown", repeats=2, read_bytes=16e6, written_bytes=16e6)
    )
    parameters = 4 * width * inner
    memory = TracedMemory(
        weights_bytes=2.0 * parameters,
        inputs_bytes=1e6,
        gradients_bytes=2.0 * parameters,
        activations_bytes=3e8,
        workspace_bytes=1e8,
        saved_bytes=3e8,
        peak_bytes=4.0 * parameters + 4.01e8,
        peak_operation="layers.1.down",
        timeline_bytes=(1.0, 2.0, 1.0),
        backward_start=1,
    )
    values: dict[str, Any] = {
        "source": "mlp.py:build",
        "module_type": "Mlp",
        "inputs": "x=bfloat16[8192,1024]",
        "phase": "train" if is_training else "prefill",
        "dtype": "bf16",
        "parameter_dtype": "bf16",
        "is_fused": False,
        "num_parameters": parameters,
        "num_trainable": parameters,
        "num_tokens": rows,
        "operations": tuple(operations),
        "linears": tuple(
            TracedLinear(path=path, count=2, num_rows=rows, in_features=k, out_features=n, operation_name=path)
            for path, n, k in linears
        ),
        "modules": tuple(
            TracedModule(path=path, type_name="Linear", count=2, num_parameters=n * k, num_trainable=n * k)
            for path, n, k in linears
        ),
        "memory": memory,
        "unknown_operators": (UnknownOperator(name="lib::scan", count=2, num_bytes=64e6, bytes_fraction=0.1),),
        "notes": (),
    }
    return Trace(**(values | changes))
