"""Measuring one case: make it ready, judge its result, time it, and put all that into a row."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from shapewright.bench.attention import prepare_attention
from shapewright.bench.gemm import prepare_gemm, prepare_grouped_gemm
from shapewright.bench.kernel_names import list_kernels
from shapewright.bench.layers import prepare_layer, prepare_step
from shapewright.bench.pointwise import prepare_pointwise
from shapewright.bench.prepared import TOLERANCE_FRACTION, Prepared
from shapewright.bench.timer import measure
from shapewright.errors import BenchError
from shapewright.operations import Attention, Gemm, GroupedGemm, Pointwise
from shapewright.store.record import FAILED, OK, WRONG, Case, Row, Run, row_facts
from shapewright.whole import LayerRun, StepRun

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

_LONGEST_ERROR = 300
# Operations of one kernel, or a few, whose choice by the library says why they take as long.
_NAMED_KINDS = ("gemm", "grouped_gemm", "attention")
_LONGEST_KERNEL = 500


def measure_case(
    case: Case, backend: Backend, run: Run, *, budget_s: float, ci_fraction: float, may_capture: bool = True
) -> Row:
    """Measure one case; whatever goes wrong with it becomes part of its row."""
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
        found_error = prepared.check(prepared.call(*prepared.inputs[0]), prepared.inputs[0])
        backend.synchronize()
        tolerance = TOLERANCE_FRACTION[case.operation.dtype] if prepared.tolerance is None else prepared.tolerance
        if not found_error <= tolerance:
            words = f"relative error {found_error:.3g} against the reference, at most {tolerance:g} is right"
            # NaN has no place in JSON; the words say it.
            kept_error = found_error if math.isfinite(found_error) else None
            return replace(row, status=WRONG, error=words, relative_error=kept_error, state_after=backend.read_state())
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
        # Torch raises RuntimeError for memory, for kernels it lacks and for errors of the device alike; its compiler
        # may raise anything. What is let through would cost a process.
        failed = failed_row(row, one_line(error), backend.read_state())
        del error, prepared  # with their tensors
        gc.collect()
        _release_quietly(backend)
        return failed
    figures["row_s"] = time.perf_counter() - begin
    if timing.method == "processor":
        # One thread works all the time that it has a core; the rest of the row it waited for one.
        figures["waited_s"] = max(0.0, figures["row_s"] - (time.process_time() - processor_begin_s))
    summary = timing.summary
    if backend.names_kernels and timing.method == "graph" and case.operation.kind in _NAMED_KINDS:
        names = dict.fromkeys(list_kernels(backend, partial(prepared.call, *prepared.inputs[0])))
        row = replace(row, kernel=f"{row.kernel}: {'; '.join(names)}"[:_LONGEST_KERNEL])
    if isinstance(case.operation, StepRun):
        figures["tokens_per_s"] = case.operation.num_tokens / summary.median_s
    return replace(
        row,
        status=OK,
        measured_utc=now_utc(),
        relative_error=found_error,
        method=timing.method,
        **asdict(summary),
        calls_per_sample=timing.calls_per_sample,
        launch_s=timing.launch_s,
        state_after=timing.state,
        figures={**figures, "kernels_s": timing.kernels_s},
    )


def failed_row(row: Row, error: str, state: Mapping[str, float] | None = None) -> Row:
    """The row of a case that could not be measured."""
    return replace(row, status=FAILED, error=error[:_LONGEST_ERROR], state_after=state or {}, measured_utc=now_utc())


def prepare(case: Case, backend: Backend) -> Prepared:
    """Make a case ready to run.

    Raises:
        BenchError: there is no way to measure it.
    """
    import torch

    torch.manual_seed(0)
    operation = case.operation
    if isinstance(operation, LayerRun | StepRun):
        backend.release()  # they need memory in one piece, and no numbers
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
    raise BenchError(f"{operation.kind} {operation.name} needs several ranks; bench the suite 'collectives'")


def _release_quietly(backend: Backend) -> None:
    try:
        backend.release()
    except RuntimeError:
        return  # the next synchronisation says so


def one_line(error: BaseException) -> str:
    """The first line of what an error says, with its kind where that tells more than the words.

    >>> one_line(KeyError("bias"))
    "KeyError: 'bias'"
    """
    words = str(error).strip().splitlines() or [""]
    speaks = words[0] and isinstance(error, BenchError | RuntimeError | TypeError | ValueError)
    return (words[0] if speaks else f"{type(error).__name__}: {words[0]}".removesuffix(": "))[:_LONGEST_ERROR]


def now_utc() -> str:
    """The time of day, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
