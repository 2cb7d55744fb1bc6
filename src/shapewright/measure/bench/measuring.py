"""Measure one case: prepare it, check its result, time it, and return a row.

Kernel names come from a captured graph of the call, without a profiler.
"""

from __future__ import annotations

import gc
import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.core.errors import BenchError
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.bench.device.timer import measure
from shapewright.measure.bench.operations.attention import prepare_attention
from shapewright.measure.bench.operations.gemm import prepare_gemm, prepare_grouped_gemm
from shapewright.measure.bench.operations.layers import prepare_layer, prepare_step
from shapewright.measure.bench.operations.pointwise import prepare_pointwise
from shapewright.measure.bench.operations.prepared import TOLERANCE_FRACTION, PreparedCall
from shapewright.measure.store.record import FAILED, OK, WRONG, Case, Row, Run, row_facts
from shapewright.prediction.model_runs import LayerRun, StepRun

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend

# A kernel in the output of cudaGraphDebugDotPrint: its name, then grid, block and shared memory, with braces around
# multidimensional values. Source: its output with CUDA 12.8 and 13.0.
_KERNEL = re.compile(r"\(topoId: \d+\) \| (.+?)\\<\\<\\<(.+?)\\>\\>\\>")
# Names of template instances can have thousands of characters.
_MAX_NAME_LENGTH = 160
_MAX_ERROR_LENGTH = 300
# Kinds of operations whose time depends on the kernel that the library selects.
_KERNEL_NAME_KINDS = ("gemm", "grouped_gemm", "attention")
_MAX_KERNEL_LENGTH = 500


def measure_case(
    case: Case, backend: Backend, run: Run, *, budget_s: float, ci_fraction: float, may_capture: bool = True
) -> Row:
    """Measure one case; an error of the case is recorded in its row.

    Args:
        run: The run that the row belongs to.
        budget_s: Time after which no further samples are begun. [s]
        ci_fraction: Half width of the median's confidence interval over the median at which sampling may stop.
        may_capture: Whether calls may be captured as a graph.
    """
    begin, processor_begin_s = time.perf_counter(), time.process_time()
    row = Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED, state_before=backend.read_state())
    prepared = None
    try:
        backend.trim()
        prepared = prepare(case, backend)
        row = replace(
            row,
            kernel=prepared.kernel,
            num_inputs=len(prepared.inputs),
            is_cold=prepared.is_cold(backend.cache_bytes),
        )
        relative_error = prepared.check(prepared.call(*prepared.inputs[0]), prepared.inputs[0])
        backend.synchronize()
        tolerance = TOLERANCE_FRACTION[case.operation.dtype] if prepared.tolerance is None else prepared.tolerance
        if not relative_error <= tolerance:  # also if it is NaN
            return replace(
                row,
                status=WRONG,
                error=f"relative error {relative_error:.3g} against the reference exceeds {tolerance:g}",
                # JSON has no NaN; the message contains it.
                relative_error=relative_error if math.isfinite(relative_error) else None,
                state_after=backend.read_state(),
            )
        figures = prepared.figures()
        timing = measure(
            backend,
            prepared.call,
            prepared.inputs,
            budget_s=budget_s,
            ci_fraction=ci_fraction,
            capturable=prepared.capturable and may_capture,
        )
    except Exception as error:
        # Torch raises RuntimeError for lack of memory, missing kernels and device errors, and its compiler may raise
        # any exception. An exception that is not caught here would end the process.
        failed = failed_row(row, one_line(error), backend.read_state())
        del error, prepared  # they hold tensors
        gc.collect()
        _release_quietly(backend)
        return failed
    figures["row_s"] = time.perf_counter() - begin
    if timing.method == "processor":
        # The single thread runs whenever it has a core; for the rest of the row it waited for one.
        figures["waited_s"] = max(0.0, figures["row_s"] - (time.process_time() - processor_begin_s))
    summary = timing.summary
    if backend.names_kernels and timing.method == "graph" and case.operation.kind in _KERNEL_NAME_KINDS:
        names = dict.fromkeys(list_kernels(backend, partial(prepared.call, *prepared.inputs[0])))
        row = replace(row, kernel=f"{row.kernel}: {'; '.join(names)}"[:_MAX_KERNEL_LENGTH])
    if isinstance(case.operation, StepRun):
        figures["tokens_per_s"] = case.operation.num_tokens / summary.median_s
    return replace(
        row,
        status=OK,
        measured_utc=now_utc(),
        relative_error=relative_error,
        method=timing.method,
        **asdict(summary),
        calls_per_sample=timing.calls_per_sample,
        launch_s=timing.launch_s,
        state_after=timing.state,
        figures={**figures, "kernels_s": timing.kernels_s},
    )


def failed_row(row: Row, error: str, state: Mapping[str, float] | None = None) -> Row:
    """Mark a row as failed, with the reason."""
    return replace(row, status=FAILED, error=error[:_MAX_ERROR_LENGTH], state_after=state or {}, measured_utc=now_utc())


def unmeasured_row(case: Case, run: Run, error: str) -> Row:
    """A failed row of a case that ended before it was measured."""
    return failed_row(Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED), error)


def prepare(case: Case, backend: Backend) -> PreparedCall:
    """Prepare a case on the device.

    Raises:
        BenchError: the case cannot be measured.
    """
    import torch

    torch.manual_seed(0)
    operation = case.operation
    if isinstance(operation, LayerRun | StepRun):
        backend.release()  # layers and steps need contiguous memory, and no pool
        if isinstance(operation, LayerRun):
            return prepare_layer(operation, backend, case.variant)
        return prepare_step(operation, backend)
    backend.pool.begin()
    if isinstance(operation, Attention):
        return prepare_attention(operation, backend, case.variant)
    if isinstance(operation, Gemm):
        return prepare_gemm(operation, backend)
    if isinstance(operation, GroupedGemm):
        return prepare_grouped_gemm(operation, backend, case.variant)
    if isinstance(operation, Pointwise):
        return prepare_pointwise(operation, backend, case.row_width, case.variant)
    raise BenchError(f"{operation.kind} {operation.name} needs several ranks; measure it with the suite 'collectives'")


def _release_quietly(backend: Backend) -> None:
    try:
        backend.release()
    except RuntimeError:
        return  # the next synchronization reports it


def one_line(error: BaseException) -> str:
    """First line of an error's message, preceded by its type if the message alone is unclear.

    >>> one_line(KeyError("bias"))
    "KeyError: 'bias'"
    """
    message = (str(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    if not message:
        return kind
    is_clear = isinstance(error, BenchError | RuntimeError | TypeError | ValueError)
    return (message if is_clear else f"{kind}: {message}")[:_MAX_ERROR_LENGTH]


def now_utc() -> str:
    """The current time in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def list_kernels(backend: Backend, run: Callable[[], object]) -> list[str]:
    """Names and grids of the kernels that a function launches; empty if a captured graph does not list them.

    Args:
        backend: A GPU; it records an error if the capture fails.
        run: The function; it has been warmed up and captured before without an error.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    backend.synchronize()
    try:
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    except RuntimeError as error:
        backend.broken_captures.append(str(error))
        return []
    # torch warns that debug_dump is for debugging.
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), suppress(RuntimeError, OSError):
        warnings.simplefilter("ignore")
        path = Path(folder) / "graph.dot"
        graph.debug_dump(str(path))
        return read_kernels(path.read_text(encoding="utf-8", errors="replace"))
    return []


def read_kernels(dot: str) -> list[str]:
    r"""Kernels in the dump of a graph, each with its launch configuration, in the order of the file.

    Args:
        dot: Verbose output of cudaGraphDebugDotPrint.

    >>> read_kernels(r"| {ID | 0 (topoId: 0) | nvjet_tst_256x128\<\<\<\{66,2\},384,99\>\>\>}")
    ['nvjet_tst_256x128<<<{66,2},384,99>>>']
    """
    return [f"{name[:_MAX_NAME_LENGTH]}<<<{launch}>>>".replace("\\", "") for name, launch in _KERNEL.findall(dot)]
